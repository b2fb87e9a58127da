"""The published corrupted sets, ImageNet-C, CIFAR-10/100-C and TinyImageNet-C (Hendrycks and Dietterich, ICLR 2019).

Two layouts. Folders, for images already cropped to their final size: ``<corruption>/<severity>/<class>/<image>.JPEG``,
each corruption perhaps below the folder of its archive (``noise``, ``blur``, ``weather``, ``digital``, ``extra``). And
arrays, for CIFAR: ``<corruption>.npy``, uint8 ``(5 * N, H, W, 3)``, the images of severity 1, then those of severity 2,
and so on, with one ``labels.npy`` for all. The published sets have four more corruptions, which are not looked at.

A set that is not whole gives wrong averages without any error, so that all of it is looked through when it is opened.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastmoll.kernels.corruption_constants import CORRUPTIONS, GROUPS, SEVERITIES
from fastmoll.pipelines.decoded import image_size, load_array, size_of
from fastmoll.pipelines.errors import did_you_mean, nearest, some
from fastmoll.pipelines.files import ImageFolder, scan_folder

Kind = Literal["imagenet-c", "tinyimagenet-c", "cifar-c"]
Cell = tuple[str, int]

DESCRIPTION = "corrupted.json"
"""File that `fastmoll corrupt` leaves in a set it wrote: what it was made from, and how."""

ARCHIVES = (*GROUPS, "extra")
"""Folders of the archives that ImageNet-C comes in."""

_TINY = (64, 200)  # TinyImageNet's pixels and classes; ImageNet's thousand come in 64 pixels, too
_READERS = 8  # folders listed at a time: on a network file system each waits for its server
_SHOWN = 5


@dataclass(frozen=True)
class CorruptedSet:
    """A corrupted set that is whole, as far as names, shapes and labels tell.

    Attributes:
        root: Its folder.
        kind: Which of the published ones it is like; those of CIFAR differ in their classes only.
        size: Height and width of the images, pixels.
        classes: Class names; in arrays, which have none, the numbers, where nothing else was given.
        count: Images of each cell, that is of a corruption at a severity.
        corruptions: The corruptions that were looked through, in the order of `CORRUPTIONS`.
        severities: Likewise.
        source: ``"generated"`` where `fastmoll corrupt` wrote it, else ``"official"``.
        frost: In a generated set, where the frost is from: ``"published"`` or ``"made"``; else None.
    """

    root: Path
    kind: Kind
    size: int
    classes: list[str]
    count: int
    corruptions: tuple[str, ...]
    severities: tuple[int, ...]
    source: Literal["official", "generated"]
    frost: str | None
    _folders: dict[Cell, ImageFolder]
    _images: dict[str, NDArray[np.uint8]]
    _labels: NDArray[np.int64]

    def folder(self, corruption: str, severity: int) -> ImageFolder:
        """The files of a cell, in sets of folders.

        Raises:
            ValueError: No such cell, or a set of arrays.
        """
        self._check(corruption, severity, "imagenet-c", "tinyimagenet-c")
        return self._folders[corruption, severity]

    def arrays(self, corruption: str, severity: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The images of a cell, uint8 ``(N, H, W, 3)``, mapped from its file, and labels ``(N,)``, in sets of arrays.

        Raises:
            ValueError: No such cell, or a set of folders.
        """
        self._check(corruption, severity, "cifar-c")
        first = (severity - 1) * self.count
        return self._images[corruption][first : first + self.count], self._labels

    def _check(self, corruption: str, severity: int, *kinds: str) -> None:
        if self.kind not in kinds:
            raise ValueError(f"{self.root} is of the kind {self.kind}, not {' or '.join(kinds)}")
        if corruption not in self.corruptions:
            raise ValueError(f"corruption must be one of {', '.join(self.corruptions)}, got {corruption!r}")
        if severity not in self.severities:
            raise ValueError(f"severity must be one of {', '.join(map(str, self.severities))}, got {severity!r}")


def open_corrupted(
    path: str | os.PathLike[str],
    *,
    classes: Sequence[str] | None = None,
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
) -> CorruptedSet:
    """Open a corrupted set and look whether it is whole.

    In folders: all corruptions at all severities, and in each cell the same classes, as many images of each, and a
    first image of the same size; no other file is opened. In arrays: types, lengths and shapes, and labels that are the
    same at each severity. What differs from most of the set is named.

    Args:
        path: The folder that has the corruptions, or the folders of their archives.
        classes: Class names that the images must have, in the order of a network's outputs; of a set of arrays, which
            has no names, only the number is compared.
        corruptions: Those needed, to use a set of which only some archives were unpacked.
        severities: Likewise.

    Raises:
        ValueError: An unknown corruption or severity, no such folder or no set in it, or one that isn't whole.
        OSError: A folder can't be read.
    """
    root = Path(path)
    names, levels = check_cells(corruptions, severities)
    if not root.is_dir():
        raise ValueError(f"corrupted set {root} is not a folder" if root.exists() else f"there is no folder {root}")
    with os.scandir(root) as entries:
        found = {entry.name for entry in entries}
    arrays = "labels.npy" in found or any(f"{name}.npy" in found for name in CORRUPTIONS)
    source, frost = _describe(root)
    common: dict[str, Any] = {
        "root": root,
        "corruptions": names,
        "severities": levels,
        "source": source,
        "frost": frost,
    }
    if arrays:
        return _open_arrays(common, found, None if classes is None else list(classes))
    return _open_folders(common, found, None if classes is None else list(classes))


def check_cells(corruptions: Sequence[str], severities: Sequence[int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Put corruptions and severities into the usual order, each once.

    Raises:
        ValueError: None at all, or an unknown one, with the nearest known one.
    """
    for name in corruptions:
        if name not in CORRUPTIONS:
            hint = did_you_mean(nearest(name, CORRUPTIONS), f"; there are {', '.join(CORRUPTIONS)}")
            raise ValueError(f"corruptions: there is no {name!r}{hint}")
    for level in severities:
        if level not in SEVERITIES:
            raise ValueError(f"severities must be 1 to 5, got {level!r}")
    if not corruptions or not severities:
        raise ValueError(f"{'severities' if corruptions else 'corruptions'} must not be empty")
    return (
        tuple(name for name in CORRUPTIONS if name in corruptions),
        tuple(level for level in SEVERITIES if level in severities),
    )


def _describe(root: Path) -> tuple[Literal["official", "generated"], str | None]:
    description = root / DESCRIPTION
    if not description.is_file():
        return "official", None
    try:
        frost = json.loads(description.read_text(encoding="utf-8"))["frost"]
        if frost not in ("published", "made"):
            raise ValueError(f"frost is {frost!r}")
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{description} is damaged: {error!r}") from error
    return "generated", frost


def _demand(root: Path, problems: list[str]) -> None:
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(f"corrupted set {root}: {'; '.join(problems[:_SHOWN])}{more}")


def _missing(names: Iterable[str], others: Iterable[str]) -> str:
    """What is not there, with what may be meant to be it."""
    near = dict.fromkeys(other for name in names for other in nearest(name, sorted(others)))
    return f"{', '.join(names)} missing" + (f" (is {', '.join(near)} meant to be that?)" if near else "")


# --- folders ----------------------------------------------------------------------------------------------------------


class _Content(NamedTuple):
    """What all cells must have in common."""

    classes: tuple[str, ...]
    counts: tuple[int, ...]
    size: tuple[int, int]


def _open_folders(common: dict[str, Any], found: set[str], classes: list[str] | None) -> CorruptedSet:
    root, names, levels = common["root"], common["corruptions"], common["severities"]
    places = _find(root, names, levels, found)
    cells = [(name, level) for name in names for level in levels]
    folders: dict[Cell, ImageFolder] = {}
    with ThreadPoolExecutor(_READERS) as pool:
        # The first gives its lists to the others: the names of a whole ImageNet-C are 3.75 million.
        first = scan_folder(places[names[0]], str(levels[0]))
        for cell, folder in zip(
            cells, pool.map(lambda cell: scan_folder(places[cell[0]], str(cell[1])), cells), strict=True
        ):
            same = folder.paths == first.paths and folder.classes == first.classes
            folders[cell] = ImageFolder(folder.root, first.classes, first.paths, first.targets) if same else folder
        sizes = dict(zip(cells, pool.map(lambda cell: image_size(folders[cell].path(0)), cells), strict=True))
    contents = {
        cell: _Content(
            tuple(folder.classes),
            tuple(np.bincount(folder.targets, minlength=len(folder.classes)).tolist()),
            sizes[cell],
        )
        for cell, folder in folders.items()
    }
    # What most cells have is right: with one wrong corruption in a set, the first one may be it.
    usual = Counter(contents.values()).most_common(1)[0][0]
    if classes is not None:
        _check_classes(root, classes, list(usual.classes))
    _demand(root, _odd(contents, usual))
    if usual.size[0] != usual.size[1]:
        raise ValueError(f"corrupted set {root} has images of {_pixels(usual.size)}, but networks take squares")
    size, count = usual.size[0], sum(usual.counts)
    kind: Kind = "tinyimagenet-c" if size == _TINY[0] and len(usual.classes) <= _TINY[1] else "imagenet-c"
    return CorruptedSet(
        **common,
        kind=kind,
        size=size,
        classes=list(usual.classes),
        count=count,
        _folders=folders,
        _images={},
        _labels=first.targets,
    )


def _find(root: Path, names: Iterable[str], levels: Iterable[int], found: set[str]) -> dict[str, Path]:
    """The folder of each corruption, which has the severities."""
    places: dict[str, Path] = {}
    problems, missing = [], []
    archives = [name for name in ARCHIVES if (root / name).is_dir()]
    for name in names:
        candidates = [
            folder for folder in (root, *(root / archive for archive in archives)) if (folder / name).is_dir()
        ]
        if len(candidates) > 1:
            problems.append(f"{name} is there twice, in {candidates[0]} and in {candidates[1]}")
        elif candidates:
            places[name] = candidates[0] / name
        else:
            missing.append(name)
    if not places:
        raise ValueError(
            f"corrupted set {root} has none of {', '.join(names)}: expected {root}/<corruption>/<severity>/<class>/"
            f"<image>.JPEG, or {root}/<corruption>.npy and {root}/labels.npy"
        )
    if missing:
        others = {name for name in found if (root / name).is_dir()} - {*ARCHIVES, *CORRUPTIONS}
        problems.append(_missing(missing, others))
    for name, folder in places.items():
        with os.scandir(folder) as entries:
            severities = {entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")}
        lacking = [str(level) for level in levels if str(level) not in severities]
        unknown = sorted(severities - {str(level) for level in SEVERITIES})
        if lacking:
            problems.append(f"{name} lacks severity {', '.join(lacking)}")
        if unknown:
            problems.append(f"{name} has folders that are no severities: {some([*map(repr, unknown)], _SHOWN)}")
    _demand(root, problems)
    return places


def _odd(contents: dict[Cell, _Content], usual: _Content) -> list[str]:
    """What is wrong with which cells; severities of a corruption that have the same fault together."""
    faults: dict[tuple[str, str], list[int]] = {}
    for (name, level), content in contents.items():
        if content != usual:
            faults.setdefault((name, _difference(content, usual)), []).append(level)
    return [f"{name}, severity {', '.join(map(str, levels))}: {fault}" for (name, fault), levels in faults.items()]


def _difference(content: _Content, usual: _Content) -> str:
    if content.classes != usual.classes:
        return f"{len(content.classes)} classes, {_classes_apart(usual.classes, content.classes)}"
    if content.counts != usual.counts:
        at = next(i for i, pair in enumerate(zip(content.counts, usual.counts, strict=True)) if pair[0] != pair[1])
        here, there = sum(content.counts), sum(usual.counts)
        of_all = "as many images as elsewhere" if here == there else f"{here} images instead of {there}"
        return f"{of_all}, of {content.classes[at]} {content.counts[at]} instead of {usual.counts[at]}"
    return f"images of {_pixels(content.size)} instead of {_pixels(usual.size)}"


def _classes_apart(wanted: Iterable[str], found: Iterable[str]) -> str:
    parts = []
    for word, names in (("missing", {*wanted} - {*found}), ("extra", {*found} - {*wanted})):
        if names:
            parts.append(f"{len(names)} {word} ({some(sorted(names))})")
    return ", ".join(parts)


def _check_classes(root: Path, wanted: list[str], found: list[str]) -> None:
    if {*wanted} != {*found}:
        raise ValueError(
            f"corrupted set {root} has {len(found)} classes instead of {len(wanted)}: {_classes_apart(wanted, found)}"
        )
    if wanted != found:
        at = next(i for i, pair in enumerate(zip(wanted, found, strict=True)) if pair[0] != pair[1])
        raise ValueError(
            f"corrupted set {root} has its classes in another order: number {at} is {found[at]}, not {wanted[at]}"
        )


def _pixels(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]} pixels"


# --- arrays -----------------------------------------------------------------------------------------------------------


def _open_arrays(common: dict[str, Any], found: set[str], classes: list[str] | None) -> CorruptedSet:
    root, names = common["root"], common["corruptions"]
    files = ["labels.npy", *(f"{name}.npy" for name in names)]
    missing = [file for file in files if file not in found]
    if missing:
        _demand(root, [_missing(missing, found - {*files})])
    labels = _load_labels(root / "labels.npy", None if classes is None else len(classes))
    count = len(labels) // len(SEVERITIES)
    images: dict[str, NDArray[np.uint8]] = {name: load_array(root / f"{name}.npy") for name in names}
    problems = []
    for name, array in images.items():
        if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3 or array.shape[1] != array.shape[2]:
            problems.append(f"{name}.npy must be uint8 of shape (N, S, S, 3), got {array.dtype} {array.shape}")
        elif len(array) != len(labels):
            problems.append(f"{name}.npy has {len(array)} images, but labels.npy has {len(labels)} labels")
    _demand(root, problems)
    _require_same_labels(root / "labels.npy", labels)
    usual = Counter(array.shape for array in images.values()).most_common(1)[0][0]
    _demand(
        root,
        [
            f"{name}.npy has images of {size_of(array)} instead of {_pixels(usual[1:3])}"
            for name, array in images.items()
            if array.shape != usual
        ],
    )
    return CorruptedSet(
        **common,
        kind="cifar-c",
        size=usual[1],
        classes=[str(label) for label in range(int(labels.max()) + 1)] if classes is None else classes,
        count=count,
        _folders={},
        _images=images,
        _labels=labels[:count],
    )


def _load_labels(path: Path, num_classes: int | None) -> NDArray[np.int64]:
    labels = load_array(path)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or labels.size == 0:
        raise ValueError(f"{path} must hold integers of shape (N,), got {labels.dtype} {labels.shape}")
    if len(labels) % len(SEVERITIES):
        raise ValueError(f"{path} has {len(labels)} labels, which is no multiple of the {len(SEVERITIES)} severities")
    labels = labels.astype(np.int64)
    present = np.unique(labels)
    known = len(present) if num_classes is None else num_classes
    bad = np.flatnonzero((labels < 0) | (labels >= known))
    if len(bad):
        raise ValueError(f"{path}: labels must be in 0..{known - 1}, got {labels[bad[0]]} at position {bad[0]}")
    if len(present) != known:
        raise ValueError(f"{path} has labels of {len(present)} classes instead of {known}")
    return labels


def _require_same_labels(path: Path, labels: NDArray[np.int64]) -> None:
    each = labels.reshape(len(SEVERITIES), -1)
    if (each != each[0]).any():
        level, at = np.argwhere(each != each[0])[0]
        raise ValueError(
            f"{path}: labels must be the same at each severity, got {each[level, at]} for image {at} at severity "
            f"{SEVERITIES[level]}, {each[0, at]} at severity 1"
        )
