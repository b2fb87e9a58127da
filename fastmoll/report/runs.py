"""Finished evaluations, grouped over seeds: what reports are made from."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from fastmoll.kernels.corruption_constants import CORRUPTIONS, GROUPS, SEVERITIES

METRICS: Final = ("error", "nll", "ece", "ece_adaptive", "ece_batch100")
"""Metrics of a cell: error (%), NLL (nats), and three calibration errors (fractions)."""
MEANS: Final = ("error", "nll", "ece", "ece_batch100")
"""Those of which an evaluation has means over all corrupted cells."""
CLEAN: Final = "clean"
BINARY: Final = (
    "optim.loss=binary trains a yes or no of each class; NLL and ECE are those of the softmax of its outputs all the "
    "same."
)
"""What stands beside figures of such runs."""


@dataclass(frozen=True)
class Cell:
    """The figures of one corruption at one severity, or of the clean images.

    Attributes:
        error: Error, in %.
        nll: Negative log-likelihood, nats.
        ece: Expected calibration error of 15 equal bins over the whole set, a fraction.
        ece_adaptive: Likewise with bins of equal mass.
        ece_batch100: Mean over batches of 100 samples, the paper's estimator.
        count: Number of samples.
        reliability: For each of 15 bins of confidence: samples, sum of their confidences, how many are right.
    """

    error: float
    nll: float
    ece: float
    ece_adaptive: float
    ece_batch100: float
    count: int
    reliability: tuple[tuple[int, float, int], ...]


@dataclass(frozen=True)
class RunResult:
    """One evaluation of one network over clean images and all 75 cells.

    Attributes:
        path: The ``robustness.json`` it was read from.
        source: Where the corrupted images are from: ``"official"`` or ``"generated"``.
        frost: Frost's textures: ``"published"``, ``"made"``, or None for an official set.
        set_name: Name of the corrupted set's folder; None for images that were made on the way, where it isn't known
            and, after `group_seeds`, where it tells nothing apart.
        data: Data set.
        size: Side of the images, in pixels.
        num_classes: Number of classes.
        net: Network, ``"resnet50 (10 of 1000 outputs)"`` where only some of its outputs were compared.
        augment: Augmentation it was trained with; None where that isn't known.
        mollify: Whether it was trained with mollification; None where that isn't known.
        seed: Seed of its training; None where that isn't known.
        settings: Settings of its training that differ from the recipe, by dotted name.
        checkpoint: Its weights.
        count: Number of samples of each cell.
        clean: Figures on clean images.
        cells: For each corruption, the figures of severities 1 to 5.
        corrupted: Plain means over the 75 cells.
        mce: Mean corruption error relative to a baseline, ``{"value": %, "baseline": name}``, where it is defined.
        environment: Versions and device.
    """

    path: Path
    source: str
    frost: str | None
    set_name: str | None
    data: str
    size: int
    num_classes: int
    net: str
    augment: str | None
    mollify: bool | None
    seed: int | None
    settings: Mapping[str, Any]
    checkpoint: str
    count: int
    clean: Cell
    cells: Mapping[str, tuple[Cell, ...]]
    corrupted: Mapping[str, float]
    mce: Mapping[str, Any] | None
    environment: Mapping[str, Any]

    def value(self, metric: str, corruption: str | None = None, severity: int | None = None) -> float:
        """A figure, or the plain mean of several.

        Args:
            metric: One of ``METRICS``.
            corruption: A corruption; a group of them (``"noise"``); ``"clean"``; None: all.
            severity: 1 to 5; None: all.
        """
        if corruption == CLEAN:
            return float(getattr(self.clean, metric))
        names = CORRUPTIONS if corruption is None else GROUPS.get(corruption, (corruption,))
        places = SEVERITIES if severity is None else (severity,)
        return statistics.fmean(getattr(self.cells[name][place - 1], metric) for name in names for place in places)


@dataclass(frozen=True)
class Statistic:
    """A figure over seeds: mean, standard deviation (n - 1; None for a single run) and number of runs."""

    mean: float
    deviation: float | None
    count: int


def statistic(values: Sequence[float]) -> Statistic:
    """Mean and standard deviation (n - 1) of a figure over seeds."""
    return Statistic(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone; they stand for one row of a table and one line of a figure.

    Attributes:
        runs: The runs, by seed; at least one. `group_seeds` makes groups.
    """

    runs: tuple[RunResult, ...]

    @property
    def run(self) -> RunResult:
        """The first of its runs, for what they have in common: data, network, augmentation, source, ..."""
        return self.runs[0]

    def statistic(self, metric: str, corruption: str | None = None, severity: int | None = None) -> Statistic:
        """Mean and standard deviation over seeds of a figure, selected as in :meth:`RunResult.value`."""
        return statistic([run.value(metric, corruption, severity) for run in self.runs])


def group_seeds(runs: Iterable[RunResult]) -> list[Group]:
    """Put the runs together that differ in their seed alone, in the order in which they first come.

    Official and generated images, the two kinds of frost, and sets by their folders' names make different groups: their
    figures are not comparable. Runs that say no seed are groups of their own.

    Raises:
        ValueError: a run is there twice.
    """
    groups: dict[tuple[Any, ...], list[RunResult]] = {}
    for run in _naming_sets([*runs]):
        groups.setdefault(_key(run), []).append(run)
    for members in groups.values():
        members.sort(key=_seed)
        for one, run in pairwise(members):
            if one.seed == run.seed:
                raise ValueError(
                    f"{one.path} and {run.path} are one run twice: {run.data}, {run.net}, {run.augment}, "
                    f"mollify={run.mollify}, seed {run.seed}"
                )
    return [Group(tuple(members)) for members in groups.values()]


def label_images(source: str, frost: str | None) -> str:
    """What stands beside every corrupted figure: ``"official"``, ``"generated (frost: made)"``, ..."""
    return source if frost is None else f"{source} (frost: {frost})"


def is_binary(settings: Mapping[str, Any]) -> bool:
    """Whether settings, by their dotted names, are those of a run that `BINARY` is about."""
    return bool(settings.get("optim.loss") == "binary")


def image_set(run: RunResult) -> str:
    """`label_images` of a run, and which set it is where there are several: ``"official (set: CIFAR-10-C)"``."""
    label = label_images(run.source, run.frost)
    if run.set_name is None:
        return label
    return f"{label[:-1]}; set: {run.set_name})" if run.frost else f"{label} (set: {run.set_name})"


def _naming_sets(runs: Sequence[RunResult]) -> list[RunResult]:
    """Runs that name their corrupted set where they are on several of the same data, and elsewhere don't."""

    def kind(run: RunResult) -> tuple[object, ...]:
        return run.data, run.size, run.source, run.frost

    names: dict[tuple[object, ...], set[str | None]] = {}
    for run in runs:
        # Of an official set, None means that it isn't known which.
        names.setdefault(kind(run), set()).update({run.set_name} - ({None} if run.source == "official" else set()))
    return [run if len(names[kind(run)]) > 1 else replace(run, set_name=None) for run in runs]


def _key(run: RunResult) -> tuple[Any, ...]:
    weights = "" if run.seed is not None else run.checkpoint
    settings = json.dumps(run.settings, sort_keys=True)
    training = (run.augment, run.mollify, settings, weights)
    return (run.data, run.size, run.num_classes, run.count, run.net, *training, image_set(run))


def _seed(run: RunResult) -> int:
    return -1 if run.seed is None else run.seed
