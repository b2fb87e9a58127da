"""`CorruptedLoader`: a cell of a corrupted set, read as published, or made from clean images as they are needed."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastmoll.corruptions import corrupt
from fastmoll.kernels.batch_tail import DTYPES, batch_tail
from fastmoll.kernels.checks import check_choice, check_integer, check_triple
from fastmoll.pipelines import MEAN, STD
from fastmoll.pipelines.corrupted import Cell, CorruptedSet, check_cells
from fastmoll.pipelines.files import ImageFolder
from fastmoll.pipelines.small import SmallData
from fastmoll.placement import resolve_device, resolve_rank, threads
from fastmoll.robustness.stored_images import StoredImages, open_clean

_DIGESTED = 8  # files of a cell whose content is looked at
_READERS = 8


class Options(TypedDict, total=False):
    """What `CorruptedLoader` is told besides its images."""

    batch_size: int
    device: str | torch.device
    rank: int | None
    world_size: int | None
    dtype: torch.dtype
    mean: Sequence[float] | None
    std: Sequence[float] | None
    num_threads: int | None


class CorruptedLoader:
    """Batches of the images of one corruption at one severity: made by `official` or `generated`.

    Every sample exactly once over all ranks, in order; the last batch of a rank may be smaller, and ranks may differ by
    one batch, so do not synchronise between batches. What is in an image depends neither on ranks nor on batches.

    Attributes:
        root: What the images are read from.
        classes: Class names; a label is a position here.
        num_samples: Samples of the cell, over all ranks.
        size: Height and width, pixels.
        mean: Mean per channel that is subtracted, for pixels in [0, 1].
        std: Standard deviation per channel that is divided by.
    """

    def __init__(
        self,
        images: StoredImages,
        batch_size: int = 256,
        device: str | torch.device = "auto",
        rank: int | None = None,
        world_size: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        num_threads: int | None = None,
        change: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        """Check every argument; files are opened at the first batch.

        Args:
            images: What there is.
            batch_size: Samples a batch on this rank.
            device: ``"cpu"``, ``"cuda"``, ``"cuda:<n>"``, or ``"auto"``: the current GPU where there is one.
            rank: Global rank; by default torch.distributed's, 0 where it is not initialised.
            world_size: Number of ranks; likewise, 1.
            dtype: Of the images: float32, bfloat16 or float16.
            mean: Mean per channel for pixels in [0, 1], subtracted; by default what goes with ``images``.
            std: Standard deviation per channel, divided by; likewise. Both are given, or none.
            num_threads: CPU threads that decode; by default this process's share of the CPUs, 16 at most.
            change: What is done to the pixels, uint8 ``(B, 3, H, W)``, with sample ids, int64 ``(B,)``, both on the
                device.

        Raises:
            ValueError: A bad argument, a GPU asked for and absent, or neither ``mean`` nor one that is known.
        """
        self._device = resolve_device(device)
        rank, world_size = resolve_rank(rank, world_size)
        self._batch_size = check_integer("batch_size", batch_size, 1)
        self._threads = threads() if num_threads is None else check_integer("num_threads", num_threads, 1)
        check_choice("dtype", dtype, DTYPES)
        if (mean is None) != (std is None):
            raise ValueError(f"mean and std belong together, got mean={mean} and std={std}")
        if mean is None or std is None:
            if images.standardisation is None:
                raise ValueError(f"mean and std must be given for {images.root}: those of the training images")
            mean, std = images.standardisation
        self.mean, self.std = check_triple("mean", mean), check_triple("std", std, above=0.0)
        self.root, self.classes, self.size = images.root, images.classes, images.size
        self.num_samples = len(images)
        first, end = (self.num_samples * r // world_size for r in (rank, rank + 1))
        self._samples = np.arange(first, end, dtype=np.int64)
        self._images = images
        self._labels = torch.from_numpy(images.labels)
        self._dtype = dtype
        self._change = change

    @classmethod
    def official(
        cls, dataset: CorruptedSet, corruption: str, severity: int, **options: Unpack[Options]
    ) -> CorruptedLoader:
        """A cell of a set that `fastmoll.pipelines.corrupted.open_corrupted` opened, its images as they are.

        Args:
            dataset: The set.
            corruption: One of its corruptions.
            severity: One of its severities.
            options: As for the class; ``mean`` and ``std`` are by default ImageNet's for folders of images, and must be
                given for arrays.

        Raises:
            ValueError: As for the class, and a cell that is not in the set.
        """
        pixels: NDArray[np.uint8] | ImageFolder
        if dataset.kind == "cifar-c":
            pixels, labels = dataset.arrays(corruption, severity)
            root, standardisation = dataset.root / f"{corruption}.npy", None
        else:
            pixels = dataset.folder(corruption, severity)
            root, labels, standardisation = pixels.root, pixels.targets, (MEAN, STD)
        name = dataset.root.name
        images = StoredImages(
            name, root, dataset.classes, labels, dataset.size, pixels, standardisation=standardisation
        )
        return cls(images, **options)

    @classmethod
    def generated(
        cls,
        data: str | os.PathLike[str] | SmallData | StoredImages,
        corruption: str | None = None,
        severity: int | None = None,
        *,
        split: str = "val",
        size: int | None = None,
        path: str | os.PathLike[str] | None = None,
        seed: int = 0,
        **options: Unpack[Options],
    ) -> CorruptedLoader:
        """A cell that is made on the device from clean images, or the clean images themselves.

        What is drawn for an image follows from (``seed``, sample id, corruption, severity): see `fastmoll.corrupt`.

        Args:
            data: What `open_clean` gave, so that it is opened once for all cells, or what `open_clean` takes.
            corruption: Its name; None for the clean images.
            severity: 1 to 5; None for the clean images.
            split: As for `open_clean`, like the next two.
            size: See there.
            path: See there.
            seed: Seed of what is drawn.
            options: As for the class; ``mean`` and ``std`` are by default the published ones of a known data set, and
                ImageNet's for folders of larger images.

        Raises:
            ValueError: As for the class and `open_clean`, and an unknown corruption or severity.
        """
        change = None
        if corruption is not None and severity is not None:
            check_cells([corruption], [severity])
            seed = check_integer("seed", seed, 0, 2**63)
            change = partial(_corrupt, corruption=corruption, severity=severity, seed=seed)
        elif corruption is not None or severity is not None:
            raise ValueError(
                f"corruption and severity belong together, got corruption={corruption!r} and severity={severity!r}"
            )
        images = data if isinstance(data, StoredImages) else open_clean(data, split, size, path)
        return cls(images, change=change, **options)

    def __len__(self) -> int:
        """Batches on this rank."""
        return math.ceil(len(self._samples) / self._batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Give ``(images, labels, index)`` for every sample of this rank.

        ``images`` are ``(B, 3, size, size)`` of the loader's ``dtype``, standardised, in channels-last memory;
        ``labels`` int64 ``(B,)``, both on its device; ``index`` the sample ids, int64 ``(B,)`` on the CPU.

        Raises:
            BadImageError: A file can't be decoded, or has another size than the first.
            ImportError: Files without DALI.
        """
        for pixels, index in self._images.batches(self._samples, self._batch_size, self._device, self._threads):
            labels = self._labels[index]
            if self._device.type == "cuda":
                # From pinned memory a copy waits neither for the stream nor for the host.
                index, labels = index.pin_memory(), labels.pin_memory()
            if self._change is not None:
                ids = index.to(self._device, non_blocking=True)
                pixels = self._change(pixels.permute(0, 3, 1, 2), ids).permute(0, 2, 3, 1)
            images = batch_tail(pixels, mean=self.mean, std=self.std, dtype=self._dtype)
            yield images, labels.to(self._device, non_blocking=True), index


def cell_digests(dataset: CorruptedSet) -> dict[Cell, str]:
    """What tells each cell of a set from another one, wherever the set lies.

    Returns:
        Of each cell a hex digest of its labels and, in sets of arrays, of all its pixels. In sets of files, where those
        would take as long as an evaluation, it is of every file's name, size and time of change, in whole seconds as
        archives keep it, and of the content of some files spread over the cell. So a file that was changed unseen kept
        both its size and its time; and a copy that did not keep the times (``cp`` without ``-a``) counts as another
        set.

    Raises:
        OSError: A file can't be read.
    """
    samples = np.unique(np.linspace(0, dataset.count - 1, _DIGESTED).astype(np.int64))

    def digest(cell: Cell) -> str:
        if dataset.kind == "cifar-c":
            pixels, labels = dataset.arrays(*cell)
            content = hashlib.blake2b(labels.tobytes(), digest_size=16)
            content.update(np.ascontiguousarray(pixels).reshape(-1).data)
        else:
            folder = dataset.folder(*cell)
            content = hashlib.blake2b(folder.fingerprint.encode(), digest_size=16)
            facts = (os.stat(folder.path(sample)) for sample in range(len(folder)))
            content.update(np.array([(x.st_size, int(x.st_mtime)) for x in facts], np.int64).tobytes())
            for sample in samples.tolist():
                content.update(Path(folder.path(sample)).read_bytes())
        return content.hexdigest()

    cells = [(name, level) for name in dataset.corruptions for level in dataset.severities]
    with ThreadPoolExecutor(_READERS) as pool:
        return dict(zip(cells, pool.map(digest, cells), strict=True))


def _corrupt(pixels: Tensor, index: Tensor, *, corruption: str, severity: int, seed: int) -> Tensor:
    return corrupt(pixels, corruption, severity, seed=seed, index=index)
