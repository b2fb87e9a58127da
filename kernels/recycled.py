"""Large tensors on the CPU whose memory is used again, as that on GPUs is.

The system clears each page of new memory at its first touch, and takes large blocks back as soon as they are freed: a
batch of new images a step costs as much time for that as for the noise on it. So of the blocks that tensors made here
leave behind, the last one is kept for the next tensor of the same size.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import weakref
from typing import Final

import torch
from torch import Tensor

# Bytes of a huge page on the usual systems. What is smaller the C library keeps by itself.
LARGE: Final = 2**21

_spare: list[Tensor] = []


def empty_like(x: Tensor) -> Tensor:
    """A new tensor like ``torch.empty_like(x)`` of a dense tensor on the CPU; unlike that one, it cannot be resized.

    Its memory belongs to it, to its views and to all that shares its storage, until the last of them is gone.
    """
    if x.nbytes < LARGE:
        return torch.empty_like(x, device="cpu")
    plain = torch.empty_like(x, device="meta")
    try:
        block = _spare.pop()
    except IndexError:
        block = None
    if block is None or len(block) != x.nbytes:
        block = _new(x.nbytes)
    # The array lives as long as the storage does, which is how one learns of its end.
    array = block.numpy()
    weakref.finalize(array, _keep, block).atexit = False
    storage = torch.from_numpy(array).untyped_storage()
    return torch.empty(0, dtype=x.dtype).set_(storage, 0, plain.shape, plain.stride())


def forget() -> None:
    """Give the block that is kept back to the system."""
    _spare.clear()


def _keep(block: Tensor) -> None:
    _spare[:] = [block]


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _new(size: int) -> Tensor:
    """Bytes in huge pages, where the system lets programs ask for them: they take a fraction of the time to clear."""
    block = torch.empty(size, dtype=torch.uint8, device="cpu")
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        first = -(-block.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = (block.data_ptr() + size - first) // mmap.PAGESIZE * mmap.PAGESIZE
        # Only advice: whatever it answers, the memory is good.
        _c_library().madvise(ctypes.c_void_p(first), ctypes.c_size_t(whole), advice)
    return block
