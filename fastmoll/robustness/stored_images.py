"""Images of one size with their labels, wherever they are: in memory or in files, to be read batch by batch."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastmoll.kernels.checks import check_integer
from fastmoll.pipelines import MEAN, STD, check_dali
from fastmoll.pipelines.cifar import find_cifar
from fastmoll.pipelines.decoded import image_size
from fastmoll.pipelines.errors import BadImageError, some
from fastmoll.pipelines.files import ImageFolder, scan_split, split_folder, stems_of
from fastmoll.pipelines.small import NAMES, SmallData, Triple, find_tiny, read_small, standardisation

_IN_MEMORY = 96  # pixels: up to this side, a folder's images are decoded once (CIFAR 32, TinyImageNet 64, STL-10 96)
_SIZE = 224


@dataclass(frozen=True)
class StoredImages:
    """Images of one size with their labels, as an array or as files.

    Attributes:
        name: Of the data set, or of its folder.
        root: What the images were read from.
        classes: Class names; a label is a position here.
        labels: int64 ``(N,)``; a sample id is a position here.
        size: Height and width of the images, pixels.
        pixels: uint8 ``(N, size, size, 3)``, or files.
        resize: Of files, the shorter side before the centre crop, pixels; 0: they have ``size``² already.
        standardisation: Mean and standard deviation per channel, for pixels in [0, 1], where they are known.
    """

    name: str
    root: Path
    classes: list[str]
    labels: NDArray[np.int64]
    size: int
    pixels: NDArray[np.uint8] | ImageFolder
    resize: int = 0
    standardisation: tuple[Triple, Triple] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of the images (of files: names and sizes), how they are cropped, labels and class names."""
        digest = hashlib.blake2b(repr((self.classes, self.size, self.resize)).encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.labels).data)
        if isinstance(self.pixels, ImageFolder):
            digest.update(self.pixels.fingerprint.encode())
            sizes = [os.stat(self.pixels.path(sample)).st_size for sample in range(len(self.pixels))]
            digest.update(np.array(sizes, np.int64).data)
        else:
            digest.update(np.ascontiguousarray(self.pixels).data)
        return digest.hexdigest()

    def batches(
        self, samples: NDArray[np.int64], batch_size: int, device: torch.device, num_threads: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The pixels of these samples, in this order.

        Args:
            samples: Sample ids, int64 ``(M,)``.
            batch_size: Images a batch; the last one may have fewer.
            device: Where the images are wanted. Files are decoded there.
            num_threads: CPU threads that decode files.

        Yields:
            uint8 ``(B, size, size, 3)`` on the device, and sample ids, int64 ``(B,)`` on the CPU.

        Raises:
            BadImageError: A file can't be decoded, or has another size than the first; it names the file.
            ImportError: Files without DALI.
        """
        if len(samples) == 0:
            return
        if isinstance(self.pixels, ImageFolder):
            yield from self._decoded(self.pixels, samples, batch_size, device, num_threads)
            return
        for start in range(0, len(samples), batch_size):
            index = samples[start : start + batch_size]
            images = torch.from_numpy(self.pixels[index])
            if device.type == "cuda":
                images = images.pin_memory().to(device, non_blocking=True)
            yield images, torch.from_numpy(index)

    def _decoded(
        self, folder: ImageFolder, samples: NDArray[np.int64], batch_size: int, device: torch.device, num_threads: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        check_dali()
        from fastmoll.pipelines.imagenet import GraphConfig
        from fastmoll.pipelines.stream import Stream

        chosen = ImageFolder(
            folder.root, folder.classes, [folder.paths[sample] for sample in samples.tolist()], folder.targets[samples]
        )
        config = GraphConfig(
            train=False,
            batch_size=min(batch_size, len(chosen)),
            size=self.size,
            resize=self.resize,
            augment="none",
            standardise=False,
            device_id=device.index if device.type == "cuda" else None,
            num_threads=num_threads,
        )
        length = math.ceil(len(chosen) / batch_size)
        ids = torch.from_numpy(samples)
        with closing(Stream(config, chosen, 0, length, length)) as stream:
            for number in range(length):
                rows = slice(number * batch_size, min((number + 1) * batch_size, len(chosen)))
                try:
                    images, position, _ = stream.next()
                except BadImageError as error:
                    if not error.files:
                        # Decoded well, each of them, but not to one size.
                        self._check_sizes(chosen, rows)
                    raise
                if tuple(images.shape[1:3]) != (self.size, self.size):
                    self._check_sizes(chosen, rows)
                valid = rows.stop - rows.start
                yield images[:valid], ids[position[:valid]]

    def _check_sizes(self, folder: ImageFolder, rows: slice) -> None:
        wrong = []
        for path in (folder.path(row) for row in range(rows.start, rows.stop)):
            height, width = image_size(path)
            if (height, width) != (self.size, self.size):
                wrong.append((path, f"has {height} x {width} pixels instead of {self.size} x {self.size}"))
        if wrong:
            raise BadImageError(wrong, f"{len(wrong)} file(s) of another size in {folder.root}:")


def open_clean(
    data: str | os.PathLike[str] | SmallData,
    split: str = "val",
    size: int | None = None,
    path: str | os.PathLike[str] | None = None,
) -> StoredImages:
    """Open the clean images of a split: whatever the trainers take as data.

    Data sets of small images are read into memory, as they are (see `fastmoll.pipelines.small.read_small`); folders of
    images of up to 96 pixels, all of one size, too. Other folders are decoded by DALI as they are needed, resized to
    ``size * 256 / 224`` pixels on the shorter side, and their centre is cropped: ImageNet-C's clean images for 224.

    Args:
        data: Name or path of a data set, or a split that was read.
        split: ``"val"``, which may be called ``validation`` or ``test`` in files, or another one. Class folders that
            are in no folder of a split are taken as ``"val"``, and as no other.
        size: Height and width, pixels; by default that of small images, else 224.
        path: Where a named data set is.

    Raises:
        ValueError: Unusable data, as for `read_small` and `scan_folder`; small images of another size than asked for,
            or that are not squares.
        ImportError: The digits without scikit-learn.
        OSError: A file can't be read.
    """
    wanted = None if size is None else check_integer("size", size, 1)
    if isinstance(data, SmallData):
        return _small(data, data.root.name, wanted)
    name = data_name(data)
    if str(data) in NAMES or not _is_tree(Path(data), split):
        return _small(read_small(data, split, path), name, wanted)
    if path is not None:
        raise ValueError(f"path goes with one of the names {', '.join(NAMES)}, but data is {str(data)!r}")
    place = Path(data)
    if split != "val":
        _check_split(place, split)
    folder = scan_split(place, split)
    height, width = image_size(folder.path(0))
    if height == width <= _IN_MEMORY and wanted in (None, width):
        return _small(read_small(data, split), name, wanted)
    crop = _SIZE if wanted is None else wanted
    return StoredImages(
        name=name,
        root=folder.root,
        classes=folder.classes,
        labels=folder.targets,
        size=crop,
        pixels=folder,
        resize=round(crop * 256 / 224),
        standardisation=(MEAN, STD),
    )


def data_name(data: str | os.PathLike[str]) -> str:
    """What data are called: by their name, or as the last folder or file of their path."""
    return str(data) if str(data) in NAMES else Path(data).resolve().name


def _check_split(place: Path, split: str) -> None:
    """Refuse a split that a folder hasn't, where `scan_folder` would take the folder itself."""
    if split_folder(place, split) == place:
        found = sorted(entry.name for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        names = f", only {some(found, 5)}" if found else ""
        raise ValueError(f"split: {place} has no folder {split!r}{names}")


def is_unsplit(place: Path) -> bool:
    """Whether a folder has class folders, and none for validation: a training on it is validated on the same images."""
    return _is_tree(place, "val") and split_folder(place, "val") == place


def _is_tree(place: Path, split: str) -> bool:
    """Whether a path has neither of the layouts that small images come in, so that it should have class folders."""
    if not place.is_dir() or find_cifar(place) is not None or find_tiny(place) is not None:
        return False
    return not any((place / f"{stem}.npy").is_file() for stem in stems_of(split))


def _small(data: SmallData, name: str, size: int | None) -> StoredImages:
    height, width = map(int, data.images.shape[1:3])
    if height != width or size not in (None, width):
        wanted = f"{size} x {size}" if size is not None else "squares"
        hint = f"; --size {width} takes them as they are" if height == width else ""
        raise ValueError(f"size: {data.root} has images of {height} x {width} pixels, not {wanted}{hint}")
    usual = None if data.name is None else standardisation(data.name)
    return StoredImages(
        data.name or name, data.root, data.classes, data.labels, width, data.images, standardisation=usual
    )
