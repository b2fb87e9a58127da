"""The numbers that the paper prints, and how measured ones compare with them.

The package has all cells of its tables: 1 and A1 (the benchmark on small images, A1 with standard deviations), 2 (error
per corruption on them), A2 (other networks), 4 (ImageNet: differences per corruption) and 5 (ImageNet's benchmark).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final, Literal

MOLLIFY: Final = ("false", "true", "noise", "blur", "difference")
"""Without mollification, with noise and blur, with one of them alone; with minus without."""
METRICS: Final = ("error", "nll", "ece")
SIZES: Final = {"cifar10": 32, "cifar100": 32, "tinyimagenet": 64, "imagenet": 224}
"""Side of the images of the paper's data sets, in pixels."""
_NAMES: Final = ("table", "data", "net", "augment", "mollify", "metric", "images")


@dataclass(frozen=True)
class PublishedCell:
    """A cell of one of the paper's tables, in fastmoll's names.

    Attributes:
        table: The table's number, as text.
        data: Data set.
        net: Network.
        augment: Augmentation.
        mollify: One of ``MOLLIFY``.
        metric: ``"error"`` (%), ``"nll"`` (nats) or ``"ece"`` (a fraction; a mean over batches of 100 images, which
            compares with ``ece_batch100`` and not with ``ece``).
        images: ``"clean"``; ``"corrupted"``, the mean over the 75 cells; a corruption, the mean over its severities; or
            ``"clean+corrupted"``: what table 2 prints as the mean is that of its 16 columns, clean images among them.
        printed: The number as it is printed.
        printed_deviation: The standard deviation as it is printed; empty where it isn't.
    """

    table: str
    data: str
    net: str
    augment: str
    mollify: str
    metric: str
    images: str
    printed: str
    printed_deviation: str

    @property
    def value(self) -> float:
        """The number."""
        return float(self.printed)

    @property
    def deviation(self) -> float | None:
        """The standard deviation; None where none is printed."""
        return float(self.printed_deviation) if self.printed_deviation else None

    @property
    def rounding(self) -> float:
        """Half a unit of the last digit that is printed: as far as the number may be from the unrounded one."""
        return 0.5 * 10.0 ** -len(self.printed.partition(".")[2])


@dataclass(frozen=True)
class Comparison:
    """A measured figure beside a published one.

    Attributes:
        difference: Measured minus published.
        within: Whether that is at most two standard deviations and the rounding of the printed number; None where there
            is no standard deviation to say it with.
        deviation: Whose standard deviation that was: the paper's where it prints one, else the measured one.
    """

    difference: float
    within: bool | None
    deviation: Literal["published", "measured"] | None


def published(
    *,
    table: str | None = None,
    data: str | None = None,
    net: str | None = None,
    augment: str | None = None,
    mollify: str | None = None,
    metric: str | None = None,
    images: str | None = None,
) -> list[PublishedCell]:
    """The published cells with these values, in the paper's order; a value that is left out may be anything.

    Args:
        table: The table's number.
        data: Data set, in upper or lower case.
        net: Network, as ``create_model`` names it.
        augment: Augmentation, as ``Augment`` names it.
        mollify: One of ``MOLLIFY``.
        metric: ``"error"``, ``"nll"`` or ``"ece"``.
        images: ``"clean"``, ``"corrupted"``, ``"clean+corrupted"`` or a corruption.

    Raises:
        ValueError: table, mollify, metric or images is none that the paper has.
    """
    wanted = dict(zip(_NAMES, (table, data and data.lower(), net, augment, mollify, metric, images), strict=True))
    wanted = {name: value for name, value in wanted.items() if value is not None}
    for name in ("table", "mollify", "metric", "images"):
        known = dict.fromkeys(getattr(cell, name) for cell in _cells())
        if wanted.get(name, next(iter(known))) not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {wanted[name]!r}")
    return [cell for cell in _cells() if all(getattr(cell, name) == value for name, value in wanted.items())]


def compare(mean: float, deviation: float | None, cell: PublishedCell) -> Comparison:
    """Compare a measured mean over seeds with a published number.

    Args:
        mean: Mean over the seeds, in the unit of the cell.
        deviation: Its standard deviation over the seeds (n - 1); None for a single run.
        cell: What the paper prints.
    """
    difference = mean - cell.value
    whose: Literal["published", "measured"] | None = "published" if cell.deviation is not None else "measured"
    spread = deviation if cell.deviation is None else cell.deviation
    if spread is None:
        return Comparison(difference, None, None)
    # A hair more than the sum, for numbers that are exactly as far apart as that in decimal digits.
    return Comparison(difference, abs(difference) <= (2 * spread + cell.rounding) * (1 + 1e-9), whose)


def paper_mollification(mollify: bool | None, settings: Mapping[str, object]) -> str | None:
    """What the paper calls a run's mollification.

    Args:
        mollify: Whether the run mollifies; None: unknown.
        settings: Its settings that differ from the recipe, by dotted name.

    Returns:
        ``"false"``, ``"true"``, ``"noise"`` or ``"blur"``; None for what the paper has no table of.
    """
    if not mollify:
        return None if mollify is None else "false"
    changed = {name: value for name, value in settings.items() if name.startswith("mollify.")}
    roles = changed.pop("mollify.roles", (1, 1, 1))
    if changed or not isinstance(roles, Sequence) or isinstance(roles, str) or len(roles) < 3:
        return None
    if not all(isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x <= 1e30 for x in roles):
        return None
    clean, noise, blur, *pure = map(float, roles)
    if clean <= 0 or any(pure):
        return None
    return {(1.0, 1.0): "true", (1.0, 0.0): "noise", (0.0, 1.0): "blur"}.get((noise / clean, blur / clean))


def departs(settings: Mapping[str, object]) -> bool:
    """Whether a run with these settings is none of the paper's, though its mollification, as far as it uses any, is.

    Args:
        settings: Settings that differ from the recipe, of a run that `paper_mollification` has a name for. Those of
            mollification are in that name, or unused.
    """
    return any(not name.startswith("mollify.") for name in settings)


@cache
def _cells() -> tuple[PublishedCell, ...]:
    text = resources.files("fastmoll").joinpath("paper_cells.csv").read_text(encoding="utf-8")
    return tuple(
        PublishedCell(**{name: row[name] for name in _NAMES}, printed=row["value"], printed_deviation=row["deviation"])
        for row in csv.DictReader(io.StringIO(text))
    )
