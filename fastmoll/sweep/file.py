"""The runs that a sweep file asks for, each of its names checked."""

from __future__ import annotations

import itertools
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import fastmoll
from fastmoll.augment import parse_augment
from fastmoll.models import check_model_name
from fastmoll.pipelines.errors import did_you_mean, nearest, nearest_option
from fastmoll.pipelines.small import NAMES
from fastmoll.sweep.places import DEFAULTS, Places, grid_name
from fastmoll.sweep.settings import (
    AXES,
    DECISIVE,
    OWN,
    QUIET,
    TRAINERS,
    as_text,
    changes,
    flat,
    read_settings,
    words,
)
from fastmoll.weights import check_weights

_KEYS: Final = (*AXES, "trainer", "options", "vary")


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        name: Its folder's name: the axes, and what the run does not have by default.
        former: What earlier versions called it: also with the defaults that its optimiser brings.
        trainer: Module of ``fastmoll.train``.
        arguments: Its command line, without output folder and device.
        data: Data set, or the last part of its path.
        net: Network.
        augment: Augmentation.
        mollify: Whether it mollifies.
        seed: Seed.
        changes: Other settings that it does not have by default and that matter for the result, as text.
        settings: All settings, ``{"optim.epochs": 300, ...}``.
        places: Where the sweep's file names its ``"data"`` and ``"model.weights"``, for messages.
    """

    name: str
    former: str
    trainer: str
    arguments: tuple[str, ...]
    data: str
    net: str
    augment: str
    mollify: bool
    seed: int
    changes: Mapping[str, str]
    settings: Mapping[str, Any]
    places: Mapping[str, str]

    @property
    def changed(self) -> str:
        """``changes`` in one line."""
        return ", ".join(f"{name}={value}" for name, value in self.changes.items())

    def folder(self, out: Path) -> Path:
        """Its folder in that of the sweep: the one of its former name where that alone is there."""
        now, before = out / self.name, out / self.former
        return before if os.path.isdir(before) and not now.exists() else now  # a former name may be too long for one


def read_sweep(path: Path) -> list[Run]:
    """The runs of a sweep file, all of the smallest seed first, none twice.

    Args:
        path: A TOML file; ``paper.toml`` in this package explains its keys.

    Raises:
        ValueError: unreadable, an unknown name (the message has the nearest one there is), a value that the trainer
            refuses, or different runs of one name.
    """
    sweep = _Sweep(path)
    requests: list[_Request] = []
    for number, grid in enumerate(sweep.grids, 1):
        requests += sweep.expand(number, grid)
    return sweep.runs(requests)


def hint(name: object, known: Iterable[str], shown: Iterable[str] | None = None) -> str:
    """What ``name`` may be a slip of, as the end of a message, or what there is: ``known``, or ``shown`` of it."""
    known = sorted(known)
    return did_you_mean(nearest(name, known), f"; there are {', '.join(shown or known)}")


@dataclass(frozen=True)
class _Request:
    """Combinations that differ in net, augment, mollify and seed only.

    Attributes:
        table: Their grid.
        origins: For keys and options, the table that gives them: the grid, or ``[defaults]``.
    """

    table: str
    origins: Mapping[str, str]
    trainer: str
    data: str
    axes: Mapping[str, Sequence[Any] | None]
    options: Mapping[str, Any]

    @property
    def base(self) -> list[str]:
        place = [self.data] if self.trainer == "imagenet" else [f"--data={self.data}"]
        recipe = self.options.get("recipe")
        return [*place, *([] if recipe is None else [f"--recipe={recipe}"])]

    @property
    def words(self) -> list[str]:
        return [word for name, value in self.options.items() if name != "recipe" for word in words(name, value)]

    @property
    def decisive(self) -> list[str]:
        return [word for name in DECISIVE if name in self.options for word in words(name, self.options[name])]


class _Sweep:
    """A sweep file while it is read: what is in it, and where an error was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.text = path.read_text(encoding="utf-8")
            content = tomllib.loads(self.text)
        except ValueError as error:  # TOML or UTF-8
            raise ValueError(f"{path}: {error}") from error
        self.defaults = content.get("defaults", {})
        self.grids = content.get("grid", [])
        self.places = Places(path, self.text, len(self.grids) if isinstance(self.grids, list) else 0)
        self.check_keys("the file", content, ("defaults", "grid"))
        if not isinstance(self.defaults, dict):
            self.fail(DEFAULTS, "it must be a table")
        if not isinstance(self.grids, list) or not self.grids or not all(isinstance(x, dict) for x in self.grids):
            self.fail("the file", "there must be at least one [[grid]], in double brackets")
        self.check_keys(DEFAULTS, self.defaults, _KEYS)

    def fail(self, table: str, message: str, *words: object) -> NoReturn:
        """Raise ``ValueError`` with the file, the table, and the first line there that has all of ``words``."""
        raise ValueError(f"{self.places.find(table, *words)}: {message}")

    def fail_option(self, request: _Request, name: str, message: str) -> NoReturn:
        """Raise ``ValueError`` with the place of an option, where it is one, and the grid that it is wrong for."""
        table = request.origins.get(name, request.table)
        words = [name.rpartition(".")[2]] if name in request.origins else []
        note = f" for {request.table}" if table == DEFAULTS else ""
        raise ValueError(f"{self.places.find(table, *words, note=note)}: {message}")

    def check_keys(self, table: str, content: Mapping[str, object], known: Sequence[str]) -> None:
        for key in content:
            if key not in known:
                self.fail(table, f"unknown key {key!r}{hint(key, known)}", key)

    def expand(self, number: int, grid: Mapping[str, Any]) -> list[_Request]:
        """The combinations of data sets and options of one grid, names checked that need no trainer."""
        table = grid_name(number)
        self.check_keys(table, grid, _KEYS)
        merged = {**self.defaults, **grid}
        origins = {**dict.fromkeys(self.defaults, DEFAULTS), **dict.fromkeys(grid, table)}
        trainer = merged.get("trainer", TRAINERS[0])
        if trainer not in TRAINERS:
            self.fail(origins["trainer"], f"unknown trainer {trainer!r}{hint(trainer, TRAINERS)}", "trainer")
        axes = {
            axis: self.axis(origins[axis], axis, merged[axis], trainer) if axis in merged else None for axis in AXES
        }
        data = axes.pop("data")
        if data is None:
            self.fail(table, "data is missing")
        options: dict[str, Any] = {}
        vary: dict[str, Any] = {}
        for place, content in ((DEFAULTS, self.defaults), (table, grid)):
            fixed, varied = (self.options(place, content, key) for key in ("options", "vary"))
            if twice := next((name for name in varied if name in fixed), None):
                self.fail(place, f"{twice} is in options and in vary", twice.rpartition(".")[2])
            for name, values in varied.items():
                if not isinstance(values, list) or not values:
                    message = f"vary must have a list of values for {name}, got {values!r}"
                    self.fail(place, message, name.rpartition(".")[2])
            origins |= dict.fromkeys([*fixed, *varied], place)
            options = {name: x for name, x in options.items() if name not in varied} | fixed
            vary = {name: x for name, x in vary.items() if name not in fixed} | varied
        choices = [[(name, value) for value in values] for name, values in vary.items()]
        return [
            _Request(table, origins, trainer, name, axes, {**options, **dict(choice)})
            for name in data
            for choice in itertools.product(*choices)
        ]

    def axis(self, table: str, axis: str, given: Any, trainer: str) -> list[Any]:
        """The values of an axis, checked."""
        values: list[Any] = given if isinstance(given, list) else [given]
        if not values:
            self.fail(table, f"{axis} has no value", axis)
        kinds: dict[str, tuple[type, str]] = {
            "mollify": (bool, "true or false"),
            "seed": (int, "an integer in [0, 2^63)"),
        }
        kind, wanted = kinds.get(axis, (str, "a name, in quotes"))
        for value in values:
            given_kind: type = type(value)  # a bool is an int for isinstance
            if given_kind is not kind or (kind is int and not 0 <= value < 2**63):
                self.fail(table, f"{axis} must be {wanted}, got {value!r}", axis)
            try:
                if axis == "net":
                    check_model_name(value, "net")
                elif axis == "augment":
                    parse_augment(value)
            except ValueError as error:
                self.fail(table, str(error), f'"{value}"')
            plain = axis == "data" and trainer == "small_images" and value not in NAMES and os.sep not in value
            if plain and not Path(value).exists():
                message = f"data: {value!r} is neither a known data set nor a file or folder"
                self.fail(table, f"{message}{hint(value, NAMES)}", f'"{value}"')
        return values

    def options(self, table: str, content: Mapping[str, Any], key: str) -> dict[str, Any]:
        """``options`` or ``vary`` of a table, as ``{"optim.epochs": ...}`` whether it was written flat or nested."""
        given = content.get(key, {})
        if not isinstance(given, dict):
            self.fail(table, f"{key} must be a table, got {given!r}", key)
        options = {name.replace("-", "_"): value for name, value in flat(given).items()}
        for name in options:
            axis = next((axis for axis, setting in AXES.items() if name in (axis, setting)), None)
            if axis is not None:
                self.fail(table, f"{key}: {name} is given by the key {axis}", key)
            if name in OWN:
                self.fail(table, f"{key}: {name} is set by the sweep itself", name.rpartition(".")[2])
        return options

    def runs(self, requests: Sequence[_Request]) -> list[Run]:
        """The runs, after the trainers have read their settings."""
        # Of the axes, only mollification decides on what other settings may be.
        pairs = [(request, arm) for request in requests for arm in request.axes["mollify"] or [None]]
        flags = {None: [], True: [_flag(True)], False: [_flag(False)]}
        asked = [
            (x.trainer, (*x.base, *more))
            for x, arm in pairs
            for more in ([], [*x.words, *flags[arm]], x.decisive)  # the recipe, the run, what is usual with its choices
        ]
        once = [*dict.fromkeys(asked)]
        answers = dict(zip(once, read_settings(once), strict=True))
        known: dict[str, Run] = {}
        for number, (request, _) in enumerate(pairs):
            before, *others = (answers[x] for x in asked[3 * number : 3 * number + 3])
            recipe = self.settings(request, before)
            settings, usual = (self.settings(request, before, answer) for answer in others)
            net, augment, seed = (request.axes[axis] or [settings[AXES[axis]]] for axis in ("net", "augment", "seed"))
            mollify = settings["mollify.enabled"]
            if mollify:
                self.check_mollify(request, settings)
            for name in net:
                self.check_weights(request, name, settings["model.weights"])
            places = self.sources(request, settings["model.weights"])
            for values in itertools.product(net, augment, [mollify], seed):
                run = _run(request, places, recipe, usual, settings, *values)
                other = known.setdefault(run.name, run)
                if (other.trainer, other.settings) != (run.trainer, run.settings):
                    differ = [x for x in run.settings if run.settings[x] != other.settings.get(x)] or ["trainer"]
                    self.fail(request.table, f"{run.name} is also a run of other {', '.join(differ)}")
        return sorted(known.values(), key=lambda run: run.seed)

    def settings(
        self, request: _Request, base: Mapping[str, Any], answer: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The settings of an answer, flat; errors in it are those of the file."""
        if "settings" in base:
            names = [*flat(base["settings"])]
            for name in request.options:
                if name not in names:
                    known = [x for x in names if x not in (*OWN, *AXES.values())]
                    alike = [x for x in known if x.startswith(f"{name.rpartition('.')[0]}.")]
                    near = did_you_mean(nearest_option(name, known), f"; there are {', '.join(alike or known)}")
                    self.fail_option(request, name, f"unknown option {name!r}{near}")
        answer = base if answer is None else answer
        if "error" in answer:
            message = answer["error"]
            plain = message.replace("_", "-")
            named = (x for x in request.options if re.search(rf"{re.escape(x.replace('_', '-'))}(?![\w-])", plain))
            self.fail_option(request, next(named, ""), message)
        return flat(answer["settings"])

    def check_weights(self, request: _Request, net: str, weights: str | None) -> None:
        """Refuse weights that nobody has; whether a file is there, the start of the runs says."""
        if weights is None or os.sep in weights or Path(weights).suffix:
            return
        try:
            check_weights(net, weights)
        except ValueError as error:
            self.fail_option(request, "model.weights", str(error))

    def sources(self, request: _Request, weights: str | None) -> dict[str, str]:
        """`Run.places` of a request."""
        path = "data.path" in request.options
        data = self.places.find(
            request.origins["data.path" if path else "data"], "path" if path else f'"{request.data}"'
        )
        origin = request.origins.get("model.weights", request.table)
        return {"data": data, "model.weights": self.places.find(origin, f'"{weights}"')}

    def check_mollify(self, request: _Request, settings: Mapping[str, Any]) -> None:
        """Let `Mollify` refuse its settings now, not each run."""
        section = {name.removeprefix("mollify."): x for name, x in settings.items() if name.startswith("mollify.")}
        options: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in section.items()}
        del options["enabled"], options["backend"]  # it need not be there where the sweep is listed
        try:
            fastmoll.Mollify(2, backend="torch", **options)
        except ValueError as error:
            named = (f"mollify.{name}" for name in section if re.search(rf"\b{name}\b", str(error)))
            self.fail_option(request, next(named, ""), f"mollify: {error}")


def _run(
    request: _Request,
    places: Mapping[str, str],
    recipe: Mapping[str, Any],
    usual: Mapping[str, Any],
    settings: Mapping[str, Any],
    net: str,
    augment: str,
    mollify: bool,
    seed: int,
) -> Run:
    idle = {name for name in settings if name.startswith("mollify.") and not mollify} - {"mollify.enabled"}
    quiet = {*QUIET, *AXES.values(), *idle}
    telling = {name: value for name, value in settings.items() if name not in quiet}
    chosen = {name: as_text(value) for name, value in changes(telling, recipe, usual).items()}
    earlier = {name: as_text(value) for name, value in changes(telling, recipe, recipe).items()}
    if request.options.get("recipe", "finetune") != "finetune":
        chosen, earlier = ({"recipe": str(request.options["recipe"]), **x} for x in (chosen, earlier))
    data = Path(request.data).resolve().name
    axes = {"model.name": net, "data.augment": augment, "mollify.enabled": mollify, "run.seed": seed}
    arguments = [*request.base, f"--net={net}", f"--augment={augment}", _flag(mollify)]

    def name(parts: Iterable[str]) -> str:
        every = [data, net, augment, *(["mollify"] if mollify else []), *parts, f"seed{seed}"]
        return "-".join(every).replace("/", "_")

    return Run(
        # The optimiser by its bare name, which no former name has: the folder of one run is never another's.
        name=name(y if x == "optim.name" else f"{x}={y}" for x, y in chosen.items()),
        former=name(f"{x}={y}" for x, y in earlier.items()),
        trainer=request.trainer,
        arguments=(*arguments, f"--run.seed={seed}", *request.words),
        data=data,
        net=net,
        augment=augment,
        mollify=mollify,
        seed=seed,
        changes=chosen,
        settings={**settings, **axes, **dict.fromkeys(idle)},
        places=places,
    )


def _flag(mollify: bool) -> str:
    return "--mollify" if mollify else "--no-mollify"
