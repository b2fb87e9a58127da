"""A corrupted set written to disk, in the layout of the published ones: as files, or as arrays."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

import fastmoll
from fastmoll.corruptions import corrupt
from fastmoll.kernels.checks import check_choice, check_integer
from fastmoll.kernels.corruption_constants import CORRUPTIONS, SEVERITIES
from fastmoll.kernels.frost_textures import frost_source
from fastmoll.output import Bar, lock, replacing, write_json
from fastmoll.pipelines.corrupted import DESCRIPTION, Cell, CorruptedSet, check_cells, open_corrupted
from fastmoll.pipelines.errors import some
from fastmoll.pipelines.files import ImageFolder
from fastmoll.pipelines.small import SmallData
from fastmoll.robustness.stored_images import StoredImages, open_clean

LAYOUTS = ("auto", "imagenet-c", "cifar-c")

_FORMAT = 1
_ARRAYS_UP_TO = 32  # pixels: CIFAR-C has arrays, TinyImageNet-C with its 64 pixels has files
_PORTION = 16 * 224 * 224  # pixels a thread works on at a time: long operations, and yet little memory
_LARGEST_BATCH = 256
_AHEAD = 4  # portions a thread that wait for it
_PARTS = ".parts"  # files that are being written; then they are moved

Put = Callable[[str, int, NDArray[np.int64], NDArray[np.uint8]], None]


def write_corrupted(
    data: str | os.PathLike[str] | SmallData,
    out: str | os.PathLike[str],
    *,
    split: str = "val",
    size: int | None = None,
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    layout: str = "auto",
    seed: int = 0,
    quality: int = 85,
    threads: int | None = None,
    progress: bool = False,
) -> CorruptedSet:
    """Write the corrupted images of a data set, or what is missing of them.

    Every file is written whole or not at all, so that a call that was ended goes on where it was: in files, with the
    next image, in arrays, with the next corruption. Images are what `CorruptedLoader.generated` gives on a CPU for the
    same seed, files of them with the loss of JPEG; they get the names of the clean files, or their sample ids.

    Args:
        data: Clean images, as for `open_clean`.
        out: Folder to write: a new one, or one of an earlier call with the same data and settings.
        split: As for `open_clean`.
        size: Likewise.
        corruptions: Those to write; others may be there already.
        severities: Likewise. Arrays have all five of them.
        layout: ``"imagenet-c"``, files of 4:2:0 JPEG as in ImageNet-C and TinyImageNet-C, ``"cifar-c"``, arrays, or
            ``"auto"``: arrays up to 32 pixels.
        seed: Seed of what is drawn.
        quality: Of the files, 1 to 95; 85 is that of ImageNet-C.
        threads: CPU threads; by default one per usable core.
        progress: Show a progress bar on standard error.

    Returns:
        What was written, opened and checked.

    Raises:
        ValueError: A bad argument, unusable data, a folder with something else in it or of other settings, class names
            that can't be folders, two images that would get the same file name, or another process that writes there.
        OSError: A file can't be read or written.
        BadImageError: A clean file can't be decoded.
    """
    names, levels = check_cells(corruptions, severities)
    check_choice("layout", layout, LAYOUTS)
    seed = check_integer("seed", seed, 0, 2**63)
    quality = check_integer("quality", quality, 1, 96)
    threads = len(os.sched_getaffinity(0)) if threads is None else check_integer("threads", threads, 1)
    images = open_clean(data, split, size)
    absent = [
        name
        for name, count in zip(images.classes, np.bincount(images.labels, minlength=len(images.classes)), strict=True)
        if count == 0
    ]
    if absent:
        raise ValueError(f"{images.root} has no images of {some([*map(repr, absent)], 5)} in its {split} split")
    if layout == "auto":
        layout = "cifar-c" if images.size <= _ARRAYS_UP_TO else "imagenet-c"
    if layout == "cifar-c" and levels != SEVERITIES:
        given = ", ".join(map(str, levels))
        raise ValueError(
            f"severities must be all of 1 to 5 in the layout cifar-c (--format imagenet-c takes some), got {given}"
        )
    files = _file_names(images) if layout == "imagenet-c" else []
    root = Path(out)
    if (images.root / images.classes[0]).is_dir() and root.resolve().is_relative_to(images.root.resolve()):
        raise ValueError(f"OUT: {root} is inside {images.root}, where each folder is a class")
    settings: dict[str, Any] = {
        "data": images.name,
        "split": split,
        "images": images.fingerprint,
        "count": len(images),
        "size": images.size,
        "layout": layout,
        "seed": seed,
        "quality": quality if layout == "imagenet-c" else None,
        "frost": frost_source(used="frost" in names),
    }
    with _claimed(root, settings), Bar(unit=" images", dynamic_ncols=True, disable=not progress) as bar:
        if layout == "imagenet-c":
            _write_files(
                root, images, files, [(name, level) for name in names for level in levels], seed, quality, threads, bar
            )
        else:
            _write_arrays(root, images, names, seed, threads, bar)
    return open_corrupted(root, classes=images.classes, corruptions=names, severities=levels)


# --- the folder -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _claimed(root: Path, settings: dict[str, Any]) -> Iterator[None]:
    """The folder, with a description of its content, for this process alone."""
    description = root / DESCRIPTION
    if root.exists() and not description.exists() and (not root.is_dir() or {*os.listdir(root)} - {".lock"}):
        raise ValueError(f"OUT: {root} is there already, and not a corrupted set that fastmoll wrote")
    with lock(root, "OUT"):
        if description.exists():
            _compare(description, settings)
        else:
            write_json(description, {"format": _FORMAT, "fastmoll": fastmoll.__version__, **settings})
        yield


def _compare(description: Path, settings: dict[str, Any]) -> None:
    try:
        before = json.loads(description.read_text(encoding="utf-8"))
        before = {name: before[name] for name in ("format", *settings)}
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"OUT: {description} is damaged: {error!r}") from error
    # The digest comes last: images of another size have another one, too.
    for name, value in sorted({"format": _FORMAT, **settings}.items(), key=lambda item: item[0] == "images"):
        if before[name] != value:
            what = "of other images (digest)" if name == "images" else f"with another {name}"
            raise ValueError(f"OUT: {description.parent} was written {what}, {before[name]!r} instead of {value!r}")


# --- the work ---------------------------------------------------------------------------------------------------------


def _make(
    images: StoredImages, todo: dict[Cell, NDArray[np.bool_]], put: Put, seed: int, threads: int, bar: tqdm[Any]
) -> None:
    """Corrupt the images that are to do in each cell, and put them away.

    Threads are enough: torch, Numba and the encoder let go of the interpreter. Each image is decoded once.
    """
    samples = np.flatnonzero(np.logical_or.reduce(list(todo.values())))
    batch = min(max(_PORTION // images.size**2, 1), _LARGEST_BATCH)
    names = dict.fromkeys(name for name, _ in todo)
    waiting: deque[Future[int]] = deque()

    def work(name: str, pixels: torch.Tensor, index: torch.Tensor) -> int:
        done = 0
        for (other, level), wanted in todo.items():
            rows = torch.from_numpy(wanted)[index] if other == name else None
            if rows is None or not rows.any():
                continue
            made = corrupt(pixels[rows].permute(0, 3, 1, 2), name, level, seed=seed, index=index[rows])
            put(name, level, index[rows].numpy(), made.permute(0, 2, 3, 1).contiguous().numpy())
            done += len(made)
        return done

    before = torch.get_num_threads()
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            for pixels, index in images.batches(samples, batch, torch.device("cpu"), 1):
                for name in names:
                    waiting.append(pool.submit(work, name, pixels, index))
                    while len(waiting) > threads * _AHEAD:
                        bar.update(waiting.popleft().result())
            while waiting:
                bar.update(waiting.popleft().result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            torch.set_num_threads(before)


# --- files ------------------------------------------------------------------------------------------------------------


def _file_names(images: StoredImages) -> list[str]:
    """Where each sample goes below a severity: ``<class>/<name>.JPEG``."""
    classes = images.classes
    bad = [name for name in classes if not name or name.startswith(".") or "/" in name or "\0" in name]
    if bad:
        raise ValueError(f"{images.root} has the class {bad[0]!r}, which can't be a folder: use the layout cifar-c")
    if classes != sorted(classes):
        # Who reads folders takes their sorted names for the order of the classes.
        raise ValueError(f"{images.root} has classes that are not in the order of their names: use the layout cifar-c")
    if isinstance(images.pixels, ImageFolder):
        stems = [Path(path).stem for path in images.pixels.paths]
    else:
        stems = [f"{sample:08}" for sample in range(len(images))]
    files = [f"{classes[label]}/{stem}.JPEG" for label, stem in zip(images.labels.tolist(), stems, strict=True)]
    first: dict[str, int] = {}
    for sample, file in enumerate(files):
        if first.setdefault(file, sample) != sample:
            assert isinstance(images.pixels, ImageFolder)
            one, other = images.pixels.path(first[file]), images.pixels.path(sample)
            raise ValueError(f"{one} and {other} would both become {file}")
    return files


def _write_files(
    root: Path,
    images: StoredImages,
    files: list[str],
    cells: list[Cell],
    seed: int,
    quality: int,
    threads: int,
    bar: tqdm[Any],
) -> None:
    todo = {}
    for name, level in cells:
        there: set[str] = set()
        for label in images.classes:
            folder = root / name / str(level) / label
            folder.mkdir(parents=True, exist_ok=True)
            with os.scandir(folder) as entries:
                # Not empty: after a power cut, a file can be there by name alone.
                there.update(f"{label}/{entry.name}" for entry in entries if entry.stat().st_size > 0)
        todo[name, level] = np.array([file not in there for file in files])
    bar.reset(len(cells) * len(images))
    bar.initial = bar.n = int(sum((~wanted).sum() for wanted in todo.values()))

    def put(name: str, level: int, index: NDArray[np.int64], made: NDArray[np.uint8]) -> None:
        for sample, image in zip(index.tolist(), made, strict=True):
            # Not waiting for the disk as `replacing` does: that would take longer than all the rest.
            part, path = parts / f"{name}-{level}-{sample}", root / name / str(level) / files[sample]
            try:
                Image.fromarray(image).save(part, "JPEG", quality=quality, optimize=True)
                os.replace(part, path)
            except OSError as error:
                raise OSError(f"{path} can't be written: {error.strerror or error}") from error

    parts = root / _PARTS
    parts.mkdir(exist_ok=True)
    try:
        _make(images, todo, put, seed, threads, bar)
    finally:
        shutil.rmtree(parts)


# --- arrays -----------------------------------------------------------------------------------------------------------


def _write_arrays(
    root: Path, images: StoredImages, names: Sequence[str], seed: int, threads: int, bar: tqdm[Any]
) -> None:
    count = len(images)
    labels = np.tile(images.labels, len(SEVERITIES))
    with replacing(root / "labels.npy") as file:
        np.save(file, labels.astype(np.uint8) if len(images.classes) <= 256 else labels)
    bar.reset(len(names) * len(labels))
    for name in names:
        path = root / f"{name}.npy"
        if path.exists() and path.stat().st_size > 0:
            bar.initial = bar.n = bar.n + len(labels)
            continue
        with replacing(path) as file:
            shape = (len(labels), images.size, images.size, 3)
            array = np.lib.format.open_memmap(file.name, mode="w+", dtype=np.uint8, shape=shape)
            # Else a disk that gets full would end the process with a signal, without a word.
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)

            def put(_: str, level: int, index: NDArray[np.int64], made: NDArray[np.uint8], array: Any = array) -> None:
                array[(level - 1) * count + index] = made

            _make(images, {(name, level): np.ones(count, bool) for level in SEVERITIES}, put, seed, threads, bar)
            array.flush()
