"""The command line of a trainer: what is wrong with it in one line, its options, and their names in messages."""

from __future__ import annotations

import io
import itertools
import os
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, is_dataclass
from typing import Any, Final, NoReturn, get_type_hints

import tyro

from fastmoll.pipelines.errors import did_you_mean, nearest_option
from fastmoll.train.settings import Config, ImageNetConfig, Kind

_OPTION: Final = re.compile(r"--[a-z]|-(?!inf|nan)[a-z]", re.IGNORECASE)  # and no negative number


@dataclass(frozen=True)
class Option:
    """A setting as it is typed.

    Attributes:
        setting: ``optim.lr``.
        names: ``--optim.lr``, then its short forms.
        off: Of a switch, those that turn it off.
    """

    setting: str
    names: tuple[str, ...]
    off: tuple[str, ...]


def look(argv: Sequence[str] | None, default: Kind) -> Kind:
    """The settings that a command line asks for, whether or not for help too; some decide on the defaults of others.

    Args:
        argv: The command line without the program's name; None: that of this process.
        default: What is not asked for.

    Raises:
        SystemExit: 2, after a line that says what is wrong with it.
    """
    kind, manual = type(default), f"(see {program(type(default))} --help)"
    words = [word for word in (sys.argv[1:] if argv is None else argv) if word not in ("-h", "--help")]
    known = {name: option for option in _options(kind) for name in (*option.names, *option.off)}
    for word in words:  # tyro may take for DATA what follows an option that there is not, and the value of a switch
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if _OPTION.match(word) and name not in known:
            fail(f"there is no option {name}{did_you_mean(nearest_option(name, known))} {manual}")
        if equals and name in known and known[name].off:
            fail(f"{name} must be without a value, got {value!r}")
    text = io.StringIO()
    try:
        with redirect_stdout(text), redirect_stderr(text):  # colours and the edges of boxes depend on the former
            config, free = tyro.cli(kind, args=words, default=default, return_unknown_args=True)
    except SystemExit:
        # In a box: a title, what is wrong, and more about it below a line or an empty one.
        lines = (line.strip("│ ") for line in text.getvalue().splitlines()[1:])
        parts = itertools.groupby(lines, lambda line: bool(line.strip("─-")))
        message = next(" ".join(part) for worded, part in parts if worded)
        message = re.sub(r"no type matching (.*) could be instantiated from \[(.*)\]\.?", _of_no_kind, message)
        fail(f"{message.removeprefix('Error parsing ')} {manual}")
    if free:
        hint = [f"--data {free[0]}"] if "--data" in known and os.path.exists(free[0]) else []
        fail(f"no option takes the word {free[0]!r}{did_you_mean(hint)} {manual}")
    return config


def _of_no_kind(found: re.Match[str]) -> str:
    kinds = re.sub("[{}]", "", found[1].replace("|", " or "))
    words = " ".join(word for _, word in re.findall(r"""(['"])(.*?)\1(?:, |$)""", found[2]))
    return f"must be {kinds}, got {words or 'nothing'}"


def typed(argv: Sequence[str] | None, kind: type[Config]) -> dict[str, str]:
    """The options on a command line, by their names as typed but for ``_``, and the settings that they are."""
    settings = {name: option.setting for option in _options(kind) for name in (*option.names, *option.off)}
    names = [word.partition("=")[0].replace("_", "-") for word in (sys.argv[1:] if argv is None else argv)]
    return {name: settings[name] for name in names if name in settings}


def fail(message: str) -> NoReturn:
    """End the process for its command line; under torchrun all have the same, and the first one says so."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"error: {' '.join(message.split())}\n")
    raise SystemExit(2)


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
    options, words = _options(type(config)), typed(argv, type(config))
    argument = re.match(r"(\w+)(?=\[\d\]|=|:| must )", text)
    handed_on = [
        x.names[0]
        for x in options
        if argument and (x.setting.endswith(f".{argument[1]}") or f"--{argument[1]}" in x.names)
    ]
    if argument and len(handed_on) == 1:
        text = handed_on[0] + text[argument.end() :]
    for full, *short in (option.names for option in options):
        if short and full not in words:
            text = re.sub(rf"(?<![\w.-]){re.escape(full)}(?!\.?[\w-])", short[0], text)
    return text


# What an evaluation of given weights looks at; all other settings are those of a training.
_OF_EVALUATION: Final = (
    *("data.name", "data.path", "data.size", "data.mean", "data.std", "data.batch_size", "recipe"),
    *("data.threads", "data.decoder", "data.hw_decoder_load"),
    *("model.name", "model.weights", "model.channels_last", "run.evaluate", "run.device", "run.amp"),
)


def idle(config: Config, argv: Sequence[str] | None) -> str | None:
    """Options of a command line that the run makes nothing of, in words; arguments as for `as_typed`."""
    found = typed(argv, type(config)).items()
    if config.run.evaluate:
        where, names = "with --evaluate", [name for name, setting in found if setting not in _OF_EVALUATION]
    elif not config.mollify.enabled:
        of_mollify = [(name, setting) for name, setting in found if setting.startswith("mollify.")]
        where, names = "without --mollify", [name for name, setting in of_mollify if setting != "mollify.enabled"]
    else:
        return None
    return f"{where}, {', '.join(names)} {'does' if len(names) == 1 else 'do'} nothing" if names else None


def _options(kind: type[Any], prefix: str = "") -> list[Option]:
    """The options of settings, without DATA, which is typed without a name."""
    found: list[Option] = []
    for field, annotation in get_type_hints(kind, include_extras=True).items():
        notes = getattr(annotation, "__metadata__", ())
        if isinstance(annotation, type) and is_dataclass(annotation):
            found += _options(annotation, f"{prefix}{field}.")
        elif tyro.conf.Positional not in notes:
            short = [name for note in notes for name in getattr(note, "aliases", None) or ()]
            names = (f"--{prefix}{field}".replace("_", "-"), *short)
            switch = getattr(annotation, "__origin__", annotation) is bool
            off = tuple(re.sub(r"([\w-]+)$", r"no-\1", name.lstrip("-")) for name in names if switch)
            found.append(Option(f"{prefix}{field}", names, tuple(f"--{name}" for name in off)))
    return found
