"""The command line of a trainer: its options, what is wrong with it in one line, and their names in messages."""

from __future__ import annotations

import difflib
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from types import NoneType, UnionType
from typing import Any, Final, Literal, NoReturn, get_args, get_origin, get_type_hints

import tyro

from fastmoll.train.settings import Config, ImageNetConfig


@dataclass(frozen=True)
class Option:
    """A setting as it is typed.

    Attributes:
        setting: ``optim.lr``.
        names: ``--optim.lr``, then its short forms; none where it is typed without a name.
        kind: Its type, without None.
        optional: Whether None is one of its values.
    """

    setting: str
    names: tuple[str, ...]
    kind: Any
    optional: bool = False

    @property
    def all_names(self) -> tuple[str, ...]:
        """`names`, and for a switch those that turn it off."""
        off = [re.sub(r"([\w-]+)$", r"no-\1", name.lstrip("-")) for name in self.names if self.kind is bool]
        return (*self.names, *(f"--{name}" for name in off))

    @property
    def places(self) -> float:
        """How many words it takes, at most."""
        if get_origin(self.kind) is tuple:
            return math.inf if ... in get_args(self.kind) else len(get_args(self.kind))
        return 0 if self.kind in (bool, None) else 1


@dataclass(frozen=True)
class Typed:
    """An option on a command line.

    Attributes:
        name: As it was typed, but for ``_``; the values where it has none.
        option: Which it is.
        values: The words that it takes.
    """

    name: str
    option: Option
    values: list[str]


def read(argv: Sequence[str] | None, kind: type[Config]) -> list[Typed]:
    """What is on a command line, in its order; values are not looked at.

    Args:
        argv: The command line without the program's name; None: that of this process.
        kind: Type of the settings.

    Raises:
        ValueError: an option that there is not, or a word that none takes.
    """
    named = {name: option for option in _options(kind) for name in option.all_names}
    unnamed = [option for option in _options(kind) if not option.names]
    words, found = [*(sys.argv[1:] if argv is None else argv)], []
    end = words.index("--") if "--" in words else len(words)
    words, free = words[:end], words[end + 1 :]
    while words:
        word = words.pop(0)
        if not _is_option(word):
            free.append(word)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name not in named:
            raise ValueError(f"there is no option {name}{nearest(name, named)}")
        option, values = named[name], [value] if equals else []
        while words and len(values) < option.places and not _is_option(words[0]):
            values.append(words.pop(0))
            if option.optional and values == ["None"]:
                break
        found.append(Typed(name, option, values))
    if len(free) > len(unnamed):
        word = free[len(unnamed)]
        hint = "" if unnamed or not os.path.exists(word) else f"; did you mean --data {word}?"
        raise ValueError(f"no option takes the word {word!r}{hint}")
    return [*found, *(Typed(word, option, [word]) for word, option in zip(free, unnamed, strict=False))]


def refuse(argv: Sequence[str] | None, kind: type[Config]) -> None:
    """End the process where a command line has options or values that there are not; arguments as for `read`.

    Raises:
        SystemExit: 2, after a line that names the option, the value and what is allowed.
    """
    try:
        found = read(argv, kind)
    except ValueError as error:
        fail(f"{error} (see {program(kind)} --help)")
    for one in found:
        wanted = _wanted(one.option, one.values)
        if wanted is not None:
            got = repr(" ".join(one.values)) if one.values else "nothing"
            choices = get_args(one.option.kind) if get_origin(one.option.kind) is Literal else ()
            fail(f"{one.name} must be {wanted}, got {got}{nearest(' '.join(one.values), choices)}")


def value_of(argv: Sequence[str] | None, kind: type[Config], setting: str) -> str | None:
    """The last value of an option, which decides on the defaults of others; arguments as for `read`."""
    values = [one.values[0] for one in read(argv, kind) if one.option.setting == setting]
    return values[-1] if values else None


def fail(message: str) -> NoReturn:
    """End the process for its command line; under torchrun all have the same, and the first one says so."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"error: {' '.join(message.split())}\n")
    raise SystemExit(2)


def nearest(name: str, known: Iterable[str]) -> str:
    """What known names were meant, one to three, as the end of a message; nothing where none is near."""
    names, name = {other.lower(): other for other in known}, name.lower()
    last = [other for other in names if other.endswith(f".{name.lstrip('-')}")]
    begun = [other for other in names if name and other.startswith(name)]
    near = last or (begun if len(begun) <= 3 else []) or difflib.get_close_matches(name, names, 1)
    return f"; did you mean {' or '.join(names[x] for x in near)}?" if near else ""


def program(kind: type[Config]) -> str:
    """Name of the script whose settings are of that type."""
    return "imagenet.py" if issubclass(kind, ImageNetConfig) else "small_images.py"


def as_typed(text: str, config: Config, argv: Sequence[str] | None) -> str:
    """A message with options as they are typed: in short where there is such a form that was not left for the full one.

    Args:
        text: The message; it names options in full, or begins with the argument of a function that one is handed on as.
        config: Settings of the run.
        argv: Its command line without the program's name; None: that of this process.
    """
    words = {one.name for one in read(argv, type(config))}
    options = _options(type(config))
    argument = re.match(r"(\w+)(?=\[\d\]|=| must )", text)
    handed_on = [x.names[0] for x in options if argument and x.names and x.setting.endswith(f".{argument[1]}")]
    if argument and len(handed_on) == 1:
        text = handed_on[0] + text[argument.end() :]
    for option in options:
        for short in option.names[1:]:
            if option.names[0] not in words:
                text = re.sub(rf"(?<![\w.-]){re.escape(option.names[0])}(?!\.?[\w-])", short, text)
    return text


# What an evaluation of given weights looks at; all other settings are those of a training.
_OF_EVALUATION: Final = (
    *("data.name", "data.path", "data.size", "data.mean", "data.std", "data.batch_size", "recipe"),
    *("data.threads", "data.decoder", "data.hw_decoder_load"),
    *("model.name", "model.weights", "model.channels_last", "run.evaluate", "run.device", "run.amp"),
)


def idle(config: Config, argv: Sequence[str] | None) -> str | None:
    """Options of a command line that the run makes nothing of, in words; arguments as for `as_typed`."""
    if not config.run.evaluate and config.mollify.enabled:
        return None
    found = [(one.name, one.option.setting) for one in read(argv, type(config))]
    if config.run.evaluate:
        where, names = "with --evaluate", [name for name, setting in found if setting not in _OF_EVALUATION]
    else:
        of_mollify = [(name, setting) for name, setting in found if setting.startswith("mollify.")]
        where, names = "without --mollify", [name for name, setting in of_mollify if setting != "mollify.enabled"]
    names = [*dict.fromkeys(names)]
    return f"{where}, {', '.join(names)} {'does' if len(names) == 1 else 'do'} nothing" if names else None


def _options(kind: type[Config]) -> tuple[Option, ...]:
    return (Option("help", ("--help", "-h"), None), *_of(kind, ""))


def _of(kind: type[Any], prefix: str) -> Iterator[Option]:
    for field, annotation in get_type_hints(kind, include_extras=True).items():
        if isinstance(annotation, type) and is_dataclass(annotation):
            yield from _of(annotation, f"{prefix}{field}.")
            continue
        notes = getattr(annotation, "__metadata__", ())
        bare = annotation.__origin__ if notes else annotation
        parts = get_args(bare) if isinstance(bare, UnionType) else (bare,)
        short = [name for note in notes for name in getattr(note, "aliases", None) or ()]
        names = () if tyro.conf.Positional in notes else (f"--{prefix}{field}".replace("_", "-"), *short)
        yield Option(f"{prefix}{field}", names, next(x for x in parts if x is not NoneType), NoneType in parts)


def _is_option(word: str) -> bool:
    """Whether a word begins an option; a negative number does not."""
    return word.startswith("-") and word.lstrip("-")[:1].isalpha() and word.lower() not in ("-inf", "-infinity", "-nan")


def _wanted(option: Option, values: list[str]) -> str | None:
    """What an option's values must be, in words; None where these are."""
    kind, places = option.kind, option.places
    if places == 0:
        return "without a value" if values else None
    if option.optional and values == ["None"]:
        return None
    many = get_origin(kind) is tuple
    one = get_args(kind)[0] if many else kind
    if len(values) >= (1 if places == math.inf else places) and all(_fits(value, one) for value in values):
        return None
    if get_origin(one) is Literal:
        what = f"one of {', '.join(get_args(one))}"
    elif many:
        what = "numbers" if places == math.inf else f"{places} numbers"
    else:
        what = {int: "an integer", float: "a number"}.get(one, "")
    return (f"{what} or None" if option.optional else what) if what else "given a value"


def _fits(value: str, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    try:
        kind(value)
    except ValueError:
        return False
    return True
