"""From a command line to the settings of a run: defaults, options in their place, and what makes no run."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

from fastmoll.pipelines import check_standardisation
from fastmoll.pipelines.errors import did_you_mean, nearest
from fastmoll.sweep.settings import flat
from fastmoll.train.options import as_typed, fail, look, program, typed
from fastmoll.train.recipes import RECIPES, SMALL_RECIPES, recipe_of, small_recipe, with_adamw
from fastmoll.train.settings import Config, ImageNetConfig, Kind, OptimConfig, SmallConfig, SmallDataConfig


def parse(argv: Sequence[str] | None = None) -> ImageNetConfig:
    """Read the command line of ``imagenet.py``.

    Args:
        argv: Arguments without the program's name; None: those of this process.

    Returns:
        The recipe's defaults with every given option in their place. Values are not checked yet: see `check`.

    Raises:
        SystemExit: after ``--help`` (0), or for an option that does not exist or can't be read (2).
    """
    asked = look(argv, RECIPES["finetune"])
    given = "recipe" in typed(argv, ImageNetConfig).values()
    config = _parse(argv, _fitting(argv, asked, RECIPES[asked.recipe]))
    if not given and config.data.path is None:
        config = _parse(argv, _fitting(argv, asked, RECIPES["sample"]))
    saved = _trained(config)
    if saved is not None:
        default = RECIPES[config.recipe]
        with suppress(LookupError, ValueError, TypeError):
            # Else they are ImageNet's, or of the command line.
            if saved["data"].get("mean") is not None and not _standardised(config):
                default = _with_standardisation_of(saved, default)
            data = replace(default.data, size=int(saved["data"]["size"]), path=_path(saved["data"]))
            model = replace(default.model, name=str(saved["model"]["name"]))
            config = _parse(argv, _fitting(argv, asked, replace(default, data=data, model=model)))
    return _going_on(argv, config, f"--recipe {asked.recipe}" if given else None)


def parse_small(argv: Sequence[str] | None = None) -> SmallConfig:
    """Read the command line of ``small_images.py``; arguments, result and errors as for `parse`."""
    asked = look(argv, SMALL_RECIPES["digits"])
    given = "data.name" in typed(argv, SmallConfig).values()
    recipe = small_recipe(asked.data.name)
    default = _fitting(argv, asked, SMALL_RECIPES[recipe])
    if recipe == "digits":
        hint = "The defaults below are those of digits; all other data have the paper's: --data cifar10 --help."
    else:
        hint = "The defaults below are the paper's, for all data but digits."
    config = _parse(argv, default, hint)
    saved = _trained(config)
    if saved is not None:
        with suppress(LookupError, ValueError, TypeError):
            if not _standardised(config):
                default = _with_standardisation_of(saved, default)
            data = default.data
            if not given:  # else the run's path would be that of other data
                data = replace(data, name=str(saved["data"]["name"]), path=_path(saved["data"]))
            model = replace(default.model, name=str(saved["model"]["name"]))
            config = _parse(argv, replace(default, data=data, model=model))
    return _going_on(argv, config, f"--data {asked.data.name}" if given else None)


def _fitting(argv: Sequence[str] | None, asked: Config, default: Kind) -> Kind:
    """A recipe for the optimiser that is asked for, and its warm-up not longer than the run."""
    if asked.optim.name == "adamw":
        default = with_adamw(default)
    epochs, optim = asked.optim.epochs, default.optim
    if "optim.epochs" in typed(argv, type(default)).values() and 0 <= epochs < optim.warmup_epochs:
        warmup = epochs * optim.warmup_epochs / optim.epochs
        default = replace(default, optim=replace(optim, warmup_epochs=warmup))
    return default


def _standardised(config: ImageNetConfig | SmallConfig) -> bool:
    """Whether mean or deviation are given: both are then, or `check` refuses them."""
    return config.data.mean is not None or config.data.std is not None


def _with_standardisation_of(saved: dict[str, Any], default: Kind) -> Kind:
    mean, std = ([float(x) for x in saved["data"][key]] for key in ("mean", "std"))
    return with_standardisation(default, mean, std)


def _going_on(argv: Sequence[str] | None, config: Kind, asked: str | None) -> Kind:
    """Where a run is resumed, its own settings in the place of defaults: only what changes must be given again.

    ``asked`` is the option that decided on the recipe, if there was one: of another recipe nothing would be taken.
    """
    if not config.run.resume or config.run.output is None:
        return config
    path = config.run.output / "config.json"
    if not path.exists():
        return config
    try:
        saved = _read(path)
        if saved is None:
            raise ValueError("it can't be read as settings")
        if ("recipe" in saved) != isinstance(config, ImageNetConfig):
            raise ValueError("it is of the other trainer")
        restored: Kind = _restored(config, saved)
        recipe = recipe_of(restored)[0]
        if asked is not None and recipe != recipe_of(config)[0]:
            raise ValueError(f"that run's recipe is {recipe}, not that of {asked}")
        trained = saved.get("optim", {}).get("name", OptimConfig.name)
        given = "optim.name" in typed(argv, type(config)).values()
        if given and config.optim.name != trained:  # what else differs follows from it
            raise ValueError(f"that run's optimiser is {trained}, not {config.optim.name}")
        restored = _shared_out(restored, saved)
    except ValueError as error:
        fail(as_typed(f"--run.output: {path} does not fit: {error}", config, argv))
    return _parse(argv, restored)


def _shared_out(restored: Kind, saved: dict[str, Any]) -> Kind:
    """Settings of a run, on another number of processes with as many images a step, where that number divides them."""
    before = saved["resolved"].get("world_size") if isinstance(saved.get("resolved"), dict) else None
    given = os.environ.get("WORLD_SIZE", "") if "RANK" in os.environ else "1"  # without a rank it is one process alone
    if type(before) is not int or not given.isdecimal() or int(given) == 0:
        return restored
    share, rest = divmod(restored.data.batch_size * before, int(given))
    return restored if rest else replace(restored, data=replace(restored.data, batch_size=share))


def _restored(default: Any, saved: Any, section: str = "") -> Any:
    """``default`` with what ``Config.plain`` gave in its place, but for what a run is stopped by, and where it is."""
    if not isinstance(saved, dict):
        raise ValueError(f"{section.rstrip('.')} is {saved!r}")
    changes: dict[str, Any] = {}
    kinds = get_type_hints(type(default))
    for name in saved:
        if name not in kinds and f"{section}{name}" != "resolved":
            raise ValueError(f"there is no setting {section}{name}{did_you_mean(nearest(name, kinds))}")
    for entry in fields(default):
        value: Any = saved.get(entry.name)
        now = getattr(default, entry.name)
        if entry.name not in saved or entry.name in ("output", "resume", "resident", "evaluate", "max_steps"):
            continue
        if is_dataclass(now):
            value = _restored(now, value, f"{section}{entry.name}.")
        elif not _fits(value, kinds[entry.name]):
            raise ValueError(f"{section}{entry.name} is {value!r}")
        elif entry.name == "path" and value is not None:
            value = Path(value)
        changes[entry.name] = tuple(value) if isinstance(value, list) else value
    return replace(default, **changes)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value from JSON can be a setting of that type; of choices, which versions add to, any text can."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_fits(value, part) for part in parts)
    if origin is tuple:
        inner = parts[:1] * len(value) if isinstance(value, list) and parts[-1] is ... else parts
        return isinstance(value, list) and len(value) == len(inner) and all(map(_fits, value, inner))
    if origin is Literal or kind is Path:
        return isinstance(value, str)
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _trained(config: Config) -> dict[str, Any] | None:
    """Where only weights are evaluated, the settings of the run in whose folder they lie.

    They bring their network, and data where none are given.
    """
    if not config.run.evaluate or config.model.weights is None or not Path(config.model.weights).is_file():
        return None
    return _read(Path(config.model.weights).parent / "config.json")


def _path(data: dict[str, Any]) -> Path | None:
    return None if data.get("path") is None else Path(str(data["path"]))


def _read(path: Path) -> dict[str, Any] | None:
    """The settings of a run; None where the file is not of this trainer."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return saved if isinstance(saved, dict) else None


_REGISTRY = ConstructorRegistry()
_reading: list[type] = []


@_REGISTRY.struct_rule
def _flowing(info: StructTypeInfo) -> StructConstructorSpec | None:
    """The rule of tyro itself for the settings, but with the lines of each help text joined.

    tyro keeps a line break before an indented line, which in a docstring is every line but the first.
    """
    if _reading or not is_dataclass(info.type):
        return None
    _reading.append(info.type)  # so that what is asked next is the rule of tyro, not this one again
    try:
        spec = ConstructorRegistry.get_struct_spec(info)
    finally:
        _reading.pop()
    if not isinstance(spec, StructConstructorSpec):
        return None
    return replace(spec, fields=tuple(replace(x, helptext=partial(_joined, x.helptext)) for x in spec.fields))


def _joined(text: str | Callable[[], str | None] | None) -> str | None:
    text = text() if callable(text) else text
    return None if text is None else " ".join(text.split())


def _parse(argv: Sequence[str] | None, default: Kind, hint: str = "") -> Kind:
    text = "Train and evaluate a classifier on mollified images. Start it with python or with torchrun."
    asked = {"-h", "--help"} & {*(sys.argv[1:] if argv is None else argv)}
    return tyro.cli(
        type(default),
        args=["--help"] if asked else argv,  # beside a DATA tyro would leave it out of the help
        prog=program(type(default)),
        description=f"{text} {hint}".rstrip(),
        default=default,
        registry=_REGISTRY,
        # Under torchrun every process reads the same command line: one message is enough.
        console_outputs=os.environ.get("RANK", "0") == "0",
    )


def checked(config: Kind, argv: Sequence[str] | None) -> Kind:
    """``config``, or the end of the process with a line that names what `check` refuses as ``argv`` does."""
    try:
        check(config)
    except ValueError as error:
        fail(as_typed(str(error), config, argv))
    return config


def check(config: Config) -> None:
    """Refuse values that make no run, before any work.

    The mollification's settings are checked by `fastmoll.Mollify`, the names of models and augmentations where they are
    looked up.

    Raises:
        ValueError: names the option and its value.
    """
    data, mollify, model, optim, run = config.data, config.mollify, config.model, config.optim, config.run
    for name, number in {
        "data.size": getattr(data, "size", None),
        "data.batch-size": data.batch_size,
        "data.threads": getattr(data, "threads", None),
        "optim.epochs": optim.epochs,
        "optim.lr-batch": optim.lr_batch,
        "optim.accumulate": optim.accumulate,
        "mollify.draws": mollify.draws,
        "run.max-steps": run.max_steps,
        "run.checkpoint-every": run.checkpoint_every,
        "run.log-every": run.log_every,
    }.items():
        _require(number is None or number >= 1, name, number, "at least 1")
    if isinstance(config, SmallConfig):
        _require(config.data.name != "", "data.name", "''", "a name or a path")
        if config.data.name == SmallDataConfig.name and config.data.path is not None:
            raise ValueError(
                f"--data.path must be left out for digits, the default of --data, got {config.data.path}: give the "
                f"folder as --data {config.data.path}, or the name of what is in it as well, --data cifar10"
            )
    mean, std = getattr(data, "mean", None), getattr(data, "std", None)
    if (mean is None) != (std is None):
        raise ValueError(f"--data.mean and --data.std belong together, got {mean} and {std}")
    if mean is not None and std is not None:
        check_standardisation(mean, std, ("--data.mean", "--data.std"))
    if isinstance(config, SmallConfig):
        _require(
            config.data.auto_augment == SmallDataConfig.auto_augment or "auto" in config.data.augment.split("+"),
            "data.auto-augment",
            config.data.auto_augment,
            f"left out without auto in --data.augment, which is {config.data.augment}",
        )
    _require(0 < optim.lr < math.inf, "optim.lr", optim.lr, "positive and finite")
    _require(0 <= optim.momentum < 1, "optim.momentum", optim.momentum, "in [0, 1)")
    _require(all(0 <= beta < 1 for beta in optim.betas), "optim.betas", optim.betas, "in [0, 1)")
    clip = optim.clip_norm
    _require(clip is None or 0 < clip < math.inf, "optim.clip-norm", clip, "positive and finite")
    usual = OptimConfig() if optim.name == "sgd" else recipe_of(config)[1].optim
    for name in ("betas",) if optim.name == "sgd" else ("momentum", "nesterov"):
        value = getattr(optim, name)
        _require(value == getattr(usual, name), f"optim.{name}", value, f"left out with --optim.name {optim.name}")
    _require(
        math.isfinite(optim.weight_decay) and optim.weight_decay >= 0,
        "optim.weight-decay",
        optim.weight_decay,
        "finite and not negative",
    )
    _require(
        0 <= optim.warmup_epochs <= optim.epochs, "optim.warmup-epochs", optim.warmup_epochs, f"in [0, {optim.epochs}]"
    )
    _require(not optim.nesterov or optim.momentum > 0, "optim.momentum", optim.momentum, "positive with Nesterov")
    missing = ["--mollify"] * (not mollify.enabled) + ["--mollify.draws 2 or more"] * (mollify.draws == 1)
    of_draws = optim.loss in ("log_mean", "corrected")
    given = f"{optim.loss}, which needs {' and '.join(missing)}"
    _require(not (of_draws and missing), "optim.loss", given, "another with one draw of an image")
    tempered = mollify.enabled and mollify.kind == "temper"
    _require(optim.loss != "normalised" or not tempered, "optim.loss", optim.loss, "another with --mollify.kind temper")
    _require(model.ema is None or 0 < model.ema < 1, "model.ema", model.ema, "in (0, 1)")
    _require(run.validate_every >= 0, "run.validate-every", run.validate_every, "at least 0")
    _require(0 <= run.seed < 2**63, "run.seed", run.seed, "in [0, 2^63)")
    file = Path("DIR" if run.output is None else run.output) / "model.pt"
    if run.resume and run.evaluate:
        raise ValueError(
            f"--run.resume goes on with a training, --run.evaluate does none: give the weights of the run instead, "
            f"--run.evaluate --model.weights {file}"
        )
    wanted = f"given with --run.evaluate, for example {file}"
    _require(not (run.evaluate and model.weights is None), "model.weights", None, wanted)
    # An empty path is the current folder for Python; that one is not a run's, be it meant or an unset variable.
    _require(run.output != Path(), "run.output", run.output, "a folder of its own")
    _require(not (run.resume and run.output is None), "run.output", None, "the folder to go on in, with --resume")
    _require(not (run.resume and run.resident), "run.resident", True, "off with --resume")


def with_standardisation(config: Kind, mean: Sequence[float], std: Sequence[float]) -> Kind:
    """``config`` with mean and standard deviation of its images, three numbers each, filled in."""
    (r, g, b), (u, v, w) = mean, std
    data: Any = config.data  # of both trainers, which have these settings in different places
    return replace(config, data=replace(data, mean=(r, g, b), std=(u, v, w)))


# A run may be resumed with other values of these: they change neither the weights nor the schedule.
_FREE = {
    "recipe",
    "data.name",  # what is read there goes into the loader's state
    "data.path",
    "data.threads",
    "data.hw_decoder_load",
    "data.on_error",
    "mollify.backend",  # other code for the same draws
    "model.weights",
    "run.output",
    "run.resume",
    "run.max_steps",
    "run.checkpoint_every",
    "run.log_every",
    "run.validate_every",
    "run.device",
}


def difference(saved: dict[str, Any], current: dict[str, Any]) -> str | None:
    """The first setting that keeps ``current`` from continuing ``saved``, in words; None where nothing does.

    Settings that ``saved`` lacks had their defaults: it is of a version before there were others.
    """
    before, now = flat(saved), flat(current)
    before = flat((ImageNetConfig() if "recipe" in now else SmallConfig()).plain()) | before
    # A name first: what else differs may follow from it.
    for name in sorted((before.keys() | now.keys()) - _FREE, key=lambda name: (not name.endswith(".name"), name)):
        if before.get(name) != now.get(name):
            return f"{name} was {before.get(name)} and is now {now.get(name)}"
    return None


def _require(condition: bool, option: str, value: object, wanted: str) -> None:
    if not condition:
        raise ValueError(f"--{option} must be {wanted}, got {value}")
