"""A network to evaluate, by whatever names it: a file of ours or of others, weights of torchvision, a model of timm."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from torch import nn
from torchvision import models

from fastmoll.kernels.checks import installed
from fastmoll.models import check_model_name, from_timm
from fastmoll.output import run_weights
from fastmoll.pipelines import MEAN, STD
from fastmoll.pipelines.errors import reason_of, some
from fastmoll.robustness.networks import call_function, describe_function, find_function, find_names
from fastmoll.robustness.stored_images import StoredImages, data_name
from fastmoll.robustness.training import changed_settings, ended
from fastmoll.weights import FORMAT, build_model, load_weights, nearest_published, read_file

_OPTION: Final = "CHECKPOINT"
# What to do about a network with more outputs than the data have classes.
_SOME_CLASSES: Final = "; if the data have some of its classes, name all of them: fastmoll evaluate --classes FILE"
_PREFIXES: Final = ("torchvision:", "timm:", "python:")


@dataclass(frozen=True)
class Checkpoint:
    """What is known about a network before it is built.

    Attributes:
        name: As the user named it.
        net: Name of the network.
        build: Makes it: ``build(num_classes, size, load)``, with its weights only where ``load``.
        folder: Where results about it belong.
        file: Name of its file, where others may lie beside it: it is not in the folder of a run of ours.
        size: Height and width of the images it is for, pixels; None: those it is given.
        num_classes: Number of its classes; None: only its weights tell.
        classes: Their names, in the order of its outputs, where it knows them.
        standardisation: Mean and standard deviation per channel of its images, for pixels in [0, 1], where known.
        config: Settings of its training, where it is ours; ``run.max_steps`` is where it ended, if before its schedule.
        function: The user's function that makes it, where one does, and the module that it was found in.
    """

    name: str
    net: str
    build: Callable[[int, int, bool], nn.Module]
    folder: Path
    file: str | None = None
    size: int | None = None
    num_classes: int | None = None
    classes: list[str] | None = None
    standardisation: tuple[Sequence[float], Sequence[float]] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    function: tuple[Callable[..., Any], ModuleType] | None = None

    @property
    def identity(self) -> str:
        """What tells the network from others besides its weights: its name, and a digest of the user's code, if any.

        To be asked for after ``build``, during which that code may import more.
        """
        return self.net if self.function is None else describe_function(self.net, *self.function)

    def choose_outputs(
        self, classes: Sequence[str], source: object, names: Sequence[str] | None = None, file: object = None
    ) -> tuple[int, list[int] | None]:
        """Find the outputs of the data's classes, by name, or refuse data of other classes.

        Args:
            classes: Class names of the data.
            source: What the data are read from, for messages.
            names: Names of all its outputs, where the user gives them; by default those it knows itself. Numbers are no
                names then: data without names have them, too.
            file: What ``names`` are read from, for messages.

        Returns:
            Number of its outputs, and which of them are compared, in the order of ``classes``; None: all, in order.

        Raises:
            ValueError: the first difference.
        """
        if names is not None:
            if self.num_classes not in (None, len(names)):
                raise ValueError(self._other_names(len(names), file, self.num_classes))
            differ = [pair for pair in zip(names, self.classes or (), strict=False) if pair[0] != pair[1]]
            if differ and sorted(names) == sorted(self.classes or ()):
                raise ValueError(
                    f"--classes: {file} has the classes of {self.name}, which knows them, in another order: "
                    f"{differ[0][0]!r} in place of {differ[0][1]!r}"
                )
            kept = find_names(classes, names, file)
        elif self.classes is None or all(name.isdecimal() for name in self.classes):
            self._check_classes(classes, source)
            return len(classes), None
        else:
            names = self.classes
            if theirs := sorted({*classes} - {*names}):
                ours = sorted({*names} - {*classes})
                apart = f"{some(ours) or 'none more'} there, {some(theirs)} here"
                raise ValueError(f"{_OPTION}: {self.name} has other classes than {source}: {apart}")
            kept = [names.index(name) for name in classes]
        return len(names), None if kept == list(range(len(names))) else kept

    def _other_names(self, names: int, file: object, outputs: int | None) -> str:
        return f"--classes: {file} has {names} names, but {self.name} has {outputs} outputs"

    def _check_classes(self, classes: Sequence[str], source: object) -> None:
        if self.num_classes is not None and self.num_classes != len(classes):
            hint = _SOME_CLASSES if self.num_classes > len(classes) else ""
            raise ValueError(
                f"{_OPTION}: {self.name} has {self.num_classes} classes, but {source} has {len(classes)}{hint}"
            )
        if self.classes is None or self.classes == list(classes):
            return
        at = next(i for i, pair in enumerate(zip(self.classes, classes, strict=True)) if pair[0] != pair[1])
        raise ValueError(
            f"{_OPTION}: {self.name} has other classes than {source}, or another order: number {at} is "
            f"{self.classes[at]!r} there and {classes[at]!r} here (--classes FILE can name its outputs)"
        )

    def check_outputs(self, found: int, expected: int, source: object, file: object = None) -> None:
        """Refuse a network that gives another number of logits than `choose_outputs` said.

        Args:
            found: Number of its logits.
            expected: What was said.
            source: What the data are read from, for messages.
            file: What the names of its outputs are read from, where the user gives them, for messages.

        Raises:
            ValueError: they differ.
        """
        if found != expected and file is not None:
            raise ValueError(self._other_names(expected, file, found))
        if found != expected:
            hint = _SOME_CLASSES if found > expected else ""
            raise ValueError(f"{_OPTION}: {self.name} gives {found} logits, but {source} has {expected} classes{hint}")

    def validated_on(self, data: str, split: str, images: StoredImages) -> bool:
        """Whether the trainer validated it on these images, as far as the names of the data and the size tell.

        Args:
            data: Name or path of the data, as for `open_clean`.
            split: Their part; the trainers' is ``"val"``.
            images: What was opened.
        """
        ours = self.config.get("data", {})
        place = ours.get("name", ours.get("path"))
        if place is None or split != "val" or ours.get("size", images.size) != images.size:
            return False
        return data_name(place) in (images.name, data_name(data))

    @property
    def data(self) -> tuple[str, str | None] | None:
        """What it was trained on, as the first and the last argument of `open_clean`, where it says so."""
        ours = self.config.get("data", {})
        name, path = ours.get("name"), ours.get("path")
        if name is None:
            return None if path is None else (str(path), None)
        return str(name), path

    @property
    def training(self) -> dict[str, Any]:
        """How it was trained, as results say it: ``augment``, ``mollify``, ``seed``, ``settings``."""
        if not self.config:
            return {"augment": None, "mollify": None, "seed": None, "settings": {}}
        augment, mollify = self.config["data"]["augment"], self.config["mollify"]["enabled"]
        seed, settings = self.config["run"]["seed"], changed_settings(self.config)
        return {"augment": augment, "mollify": mollify, "seed": seed, "settings": settings}


def find_checkpoint(name: str, net: str | None = None) -> Checkpoint:
    """Look up a network to evaluate.

    Args:
        name: ``torchvision:NAME`` or ``torchvision:NAME:WEIGHTS`` (by default its best ones), ``timm:NAME``,
            ``python:MODULE:FUNCTION`` or ``python:FILE.py:FUNCTION``, a function that returns a network with its
            weights, or a file: a checkpoint of our trainers, the ``model.pt`` in the folder of one of their runs, or a
            state dict.
        net: Name of the network in the file, or a function that makes it, ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``;
            of our trainers' files it is known. Functions are told ``num_classes`` if they have such a parameter.

    Returns:
        What is known about it. Files are looked at and functions imported, but nothing is built or downloaded.

    Raises:
        ValueError: no such network, function, weights or file, a file that is damaged, or one of another network than
            ``net``.
        ImportError: timm's without timm.
    """
    kind, colon, rest = name.partition(":")
    kinds = {"torchvision": _torchvision, "timm": _timm, "python": _python}
    if colon and kind in kinds:
        if net is not None:
            raise ValueError(f"--net: {name} says its network itself, got {net!r}")
        return kinds[kind](name, rest)
    return _file(name, net)


def _torchvision(name: str, rest: str) -> Checkpoint:
    net, _, weights = rest.partition(":")
    known = models.list_models(module=models)
    if net not in known:
        raise ValueError(f"{_OPTION}: torchvision has no {net!r}{nearest_published(net, 'torchvision')}")
    offers = {item.name: item for item in models.get_model_weights(net)}
    if weights and weights not in offers:
        raise ValueError(f"{_OPTION}: torchvision has no weights {weights!r} of {net}, only {', '.join(offers)}")
    chosen = models.get_model_weights(net).DEFAULT if not weights else offers[weights]
    transform, num_classes = chosen.transforms(), len(chosen.meta["categories"])
    elsewhere = f"download it elsewhere, then FILE --net {net}"

    def build(classes: int, size: int, load: bool) -> nn.Module:
        model = build_model(net, classes, size, fresh=False, option=_OPTION)
        if load:
            load_weights(model, net, chosen.name, exact=True, option=_OPTION, instead=elsewhere)
        return model

    return Checkpoint(
        f"torchvision:{net}:{chosen.name}",
        net,
        build,
        Path("runs") / f"{net}-{chosen.name}",
        size=transform.crop_size[0],
        num_classes=num_classes,
        standardisation=(transform.mean, transform.std),
    )


def _timm(name: str, net: str) -> Checkpoint:
    if not installed("timm"):
        raise ImportError(f"{_OPTION}: {name} needs timm: pip install timm")
    timm = importlib.import_module("timm")
    if not timm.is_model(net):
        raise ValueError(f"{_OPTION}: timm has no model {net!r}{nearest_published(net, 'timm')}")
    check_model_name(net, _OPTION)  # its tag
    facts = timm.get_pretrained_cfg(net)
    if facts is None or not facts.has_weights:
        raise ValueError(f"{_OPTION}: timm has no weights of {net}")

    def build(classes: int, size: int, load: bool) -> nn.Module:
        try:
            return from_timm(net, classes, size, pretrained=load)
        except Exception as error:  # the hub's errors are of many types, and none says what was asked for
            raise ValueError(f"{_OPTION}: {name} can't be loaded: {reason_of(error)}") from error

    return Checkpoint(
        name,
        net,
        build,
        Path("runs") / net.replace("/", "_"),
        size=facts.input_size[-1],
        num_classes=facts.num_classes,
        standardisation=(facts.mean, facts.std),
    )


def _python(name: str, reference: str) -> Checkpoint:
    net, function, module = find_function(reference, _OPTION)

    def build(num_classes: int, size: int, load: bool) -> nn.Module:
        return call_function(function, net, num_classes, _OPTION)

    folder = Path("runs") / net.replace(".py:", "-").replace(":", "-")
    return Checkpoint(name, net, build, folder, function=(function, module))


def _file(name: str, net: str | None) -> Checkpoint:
    path = run_weights(Path(name)) or Path(name)
    if not path.is_file():
        reason = "is a folder without model.pt" if path.is_dir() else "is no file"
        if (path / "checkpoint.pt").is_file():
            reason = "is the folder of a run that is not finished, whose checkpoint.pt has its weights so far"
        raise ValueError(
            f"{_OPTION}: {name} {reason}{nearest_published(name)} (others are the folder of a run or of a sweep, "
            "torchvision:NAME[:WEIGHTS], timm:NAME and python:FILE.py:FUNCTION)"
        )
    config, classes = find_training(path)
    found: tuple[Callable[..., Any], ModuleType] | None = None
    try:
        if config:
            trained = str(config["model"]["name"])
            if net not in (None, trained):
                raise ValueError(f"--net: {path} is of {trained}, not of {net}")
            net, data = trained, config["data"]
            # Networks for small images may have the form for them; only that trainer's settings name their data.
            stem = None if "name" in data else False
            if stem is None:
                mean, std, size = data["mean"], data["std"], None
            else:  # None is ImageNet's, as in earlier versions, which have no such settings
                mean, std, size = data.get("mean") or MEAN, data.get("std") or STD, data["size"]
            _ = config["data"]["augment"], config["mollify"]["enabled"], config["run"]["seed"]
        elif net is None:
            raise ValueError(
                f"--net must be given: {path} doesn't say of which network it is, nor what it was trained on (--data)"
            )
        else:
            if net.startswith(_PREFIXES):
                prefix, _, bare = net.partition(":")
                own = "; a network of timm is made by a function of yours, FILE.py:FUNCTION" if prefix == "timm" else ""
                raise ValueError(f"--net takes the bare name, {bare}, got {net!r}{own}")
            if ":" in net:
                net, function, module = find_function(net, "--net")
                found = function, module
            else:
                check_model_name(net, "--net")
            stem, mean, std, size = False, None, None, None
    except (LookupError, TypeError) as error:
        raise ValueError(f"{_OPTION}: {path} is a damaged checkpoint") from error
    kind = net

    def build(num_classes: int, size: int, load: bool) -> nn.Module:
        if found is None:
            model = build_model(kind, num_classes, size, small_stem=stem, fresh=False, option="--net")
        else:
            model = call_function(found[0], kind, num_classes, "--net")
        if load:
            load_weights(model, kind, str(path), exact=True, option=_OPTION)
        return model

    return Checkpoint(
        str(path),
        kind,
        build,
        path.parent,
        file=None if config and path.name in ("model.pt", "checkpoint.pt") else path.name,
        size=size,
        num_classes=None if classes is None else len(classes),
        classes=classes,
        standardisation=None if mean is None or std is None else (mean, std),
        config=config,
        function=found,
    )


def find_training(path: Path, option: str = _OPTION) -> tuple[Mapping[str, Any], list[str] | None]:
    """Settings and class names of the run that a file is from; none for the files of others.

    Args:
        path: The file. ``model.pt`` has its run's ``config.json`` and ``checkpoint.pt`` beside it; without the latter
            its classes are unknown.
        option: What the user gave the file by, for messages.

    Raises:
        ValueError: a damaged file.
    """
    try:
        content = read_file(path)
    except ValueError as error:
        whole = "; a network that was saved whole is loaded by a function of yours: python:FILE.py:FUNCTION"
        may_be_one = option == _OPTION and "no PyTorch file of tensors" in str(error)
        raise ValueError(f"{option}: {error}{whole if may_be_one else ''}") from error
    if isinstance(content, dict) and content.get("format") == FORMAT:
        config, classes = content.get("config"), content.get("classes")
        if not isinstance(config, dict) or not isinstance(classes, list):
            raise ValueError(f"{option}: {path} is a damaged checkpoint")
        with suppress(LookupError, TypeError, ValueError, ZeroDivisionError):  # of an earlier version, or damaged
            data, batches = content["ranks"][0]["loader"]["fingerprint"], config["optim"]["accumulate"]
            per_epoch = data["num_samples"] // data["world_size"] // data["batch_size"]
            config = ended(config, content["learner"]["step"], math.ceil(per_epoch / batches))
        return config, classes
    settings, beside = path.parent / "config.json", path.parent / "checkpoint.pt"
    if path.name != "model.pt" or not settings.is_file():
        return {}, None
    try:
        config = json.loads(settings.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{option}: {settings}, the settings of {path}, is damaged: {error}") from error
    if not isinstance(config, dict) or "model" not in config:
        return {}, None  # a file of somebody else's
    with suppress(LookupError, TypeError, ValueError):  # of an earlier version, or damaged
        config = ended(config, config["run"]["max_steps"], config["resolved"]["steps_per_epoch"])
    return config, find_training(beside, option)[1] if beside.is_file() else None
