"""One corruption at one severity on a batch: arguments, constants and draws, and the ways to run over the images."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastmoll.kernels import philox
from fastmoll.kernels.checks import check_integer, check_tensor, installed
from fastmoll.kernels.corruption_constants import cell, constants
from fastmoll.kernels.image_ops import upload

NUDGE: Final = 1.0 / 256.0
"""Grey levels added before truncation: more than float32's errors, less than anyone sees."""

# Pixels of a portion of a batch in plain torch: on a GPU what bounds its scratch memory to about a gigabyte, on a CPU
# what stays in the cache.
_PORTION: Final = {"cpu": 2**17}
_PORTION_GPU: Final = 2**22
# Pixels that are worth a second thread, where the work is compiled.
_SHARE: Final = 2**16


class Job(NamedTuple):
    """One cell of the benchmark on one batch."""

    images: Tensor
    index: Tensor  # type: ignore[assignment] # hides the search of tuples
    seed: int
    cell: int
    constants: tuple[float, ...]

    @property
    def compiled(self) -> bool:
        """Whether compiled code is to do the work."""
        return self.images.device.type == "cpu" and installed("numba") and not torch.compiler.is_compiling()

    def words(self, ids: Tensor, count: int) -> Tensor:
        """The first words of each sample's stream, int64 ``(B, count)``."""
        blocks = -(-count // 4)
        words = philox.sample_words(ids, self.cell, seed=self.seed, purpose=philox.CORRUPT, blocks=blocks)
        return torch.stack(words, 2).flatten(1)[:, :count]

    def key(self) -> tuple[Any, ...]:
        """What compiled code makes the words from: ids, the third word of the counter, seed."""
        ids = self.index.long().contiguous().numpy().view(np.uint64)
        return ids, np.uint64(self.cell | philox.CORRUPT << philox.EPOCH_BITS), np.uint64(self.seed)

    def portions(self, work: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """``work(images, ids)`` on portions of the batch."""
        out = torch.empty_like(self.images, memory_format=torch.contiguous_format)
        pixels = self.images.shape[2] * self.images.shape[3]
        step = max(1, _PORTION.get(self.images.device.type, _PORTION_GPU) // pixels)
        for first in range(0, len(out), step):
            rows = slice(first, first + step)
            out[rows] = work(self.images[rows], self.index[rows])
        return out

    def threads(self, work: Callable[..., Any], *arguments: Any) -> Tensor:
        """``work(images, out, *arguments, first, last)`` on the images ``first`` to ``last``, compiled, in threads."""
        out = torch.empty_like(self.images, memory_format=torch.contiguous_format)
        source, target = self.images.contiguous().numpy(), out.numpy()
        in_threads(lambda first, last: work(source, target, *arguments, first, last), self.images)
        return out


def start(corruption: str, images: Tensor, severity: int, seed: int, index: Tensor) -> Job:
    """Check the arguments of a corruption and look its constants up."""
    check_tensor("images", images, (None, 3, None, None), (torch.uint8,), None)
    for side, size in zip(("height", "width"), images.shape[2:], strict=True):
        check_integer(f"{side} of images", size, 1)
    philox.check_key(seed, 0, index, len(images))
    published = constants(corruption, severity, min(images.shape[2:]))
    return Job(images, index, seed, cell(corruption, severity), published)


def in_threads(work: Callable[[int, int], Any], images: Tensor) -> None:
    """``work(first, last)`` over all images, in torch's number of threads if there are pixels enough."""
    batch, _, height, width = images.shape
    count = min(torch.get_num_threads(), batch, batch * height * width // _SHARE)
    if count <= 1:
        work(0, batch)
        return
    # Several shares a thread: the system may hold a thread up.
    ends = np.linspace(0, batch, min(batch, 4 * count) + 1).astype(int).tolist()
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, ends[:-1], ends[1:]))


def truncate(grey: Tensor) -> Tensor:
    """Grey levels to uint8, as published: clipped and truncated, but see `NUDGE`. Overwrites its argument."""
    return grey.add_(NUDGE).clamp_(0.0, 255.0).to(torch.uint8)


def on(array: np.ndarray, device: torch.device) -> Tensor:
    """A table on a device, without the host waiting; on the CPU it shares the array's memory."""
    return upload(torch.from_numpy(array), device)
