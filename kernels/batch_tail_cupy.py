"""The CuPy backend of :mod:`fastmoll.kernels.batch_tail`: how ``batch_tail.cu`` is compiled and launched."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from fastmoll.kernels.batch_tail import Tail, batch_tail, check_device
from fastmoll.kernels.cuda_toolchain import load_kernel, shared_limit
from fastmoll.kernels.philox import EPOCH_BITS, NOISE

_TYPES: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Codes of the enumeration in ``batch_tail_instructions.cuh``, for inputs and outputs."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of the kernel, ready for CuPy or for anything else that can run it.

    Attributes:
        macros: what the source is compiled with.
        grid: blocks in x and y.
        threads: threads a block.
        shared: bytes of dynamic shared memory a block.
        arguments: NumPy scalars, pointers as uint64.
        keep: tensors that the pointers lead to.
    """

    macros: tuple[tuple[str, int], ...]
    grid: tuple[int, int]
    threads: int
    shared: int
    arguments: tuple[np.generic, ...]
    keep: tuple[Tensor, ...]


def batch_tail_cupy(tail: Tail, *, rows: Sequence[int] = (32, 16), warps: int | None = None) -> Tensor:
    """Compute :func:`fastmoll.kernels.batch_tail.batch_tail` in one launch on torch's current stream.

    Args:
        tail: the checked arguments.
        rows, warps: see :func:`plan`.

    Raises:
        ValueError: images that are not on a CUDA device.
        ImportError: there is no CuPy.
        RuntimeError: CuPy, NVRTC and the driver do not fit together, or the GPU is older than compute capability 8.0.
    """
    device = tail.images.device
    check_device("cupy", tail.images)
    with torch.cuda.device(device):
        out = torch.empty(
            (tail.batch, tail.channels, tail.height, tail.width),
            dtype=tail.dtype,
            device=device,
            memory_format=tail.memory_format,
        )
        launch = plan(tail, out, shared_limit(out.get_device()), rows=rows, warps=warps)
        kernel = load_kernel("batch_tail.cu", "batch_tail", launch.macros, out.get_device())
        kernel.launch(
            launch.grid, launch.threads, launch.shared, launch.arguments, torch.cuda.current_stream().cuda_stream
        )
    return out


def batch_tail_arrays(images: Any, **arguments: Any) -> Any:
    """:func:`fastmoll.kernels.batch_tail.batch_tail` for arrays of any library that speaks DLPack, CuPy first of all.

    Nothing is copied on the way in or out. The work goes to the current stream of CuPy if ``images`` are a CuPy array,
    and to that of torch for all others.

    Args:
        images: an array as in :func:`~fastmoll.kernels.batch_tail.batch_tail`.
        arguments: the arguments of that function; arrays may come from any library. ``backend`` is ``"cupy"`` unless
            given.

    Returns:
        An array of the library that ``images`` belong to.

    Raises:
        ValueError: as :func:`~fastmoll.kernels.batch_tail.batch_tail`, for images without DLPack, and for ``dtype``
            bfloat16, its default, of NumPy arrays, which don't have it.
    """
    if not hasattr(images, "__dlpack__"):
        raise ValueError(f"images must be an array that supports DLPack, got {type(images).__name__}")
    arguments = {"backend": "cupy"} | arguments
    if isinstance(images, Tensor):
        return batch_tail(images, **_to_torch(arguments))
    library = type(images).__module__.partition(".")[0]
    if library == "numpy" and arguments.get("dtype", torch.bfloat16) == torch.bfloat16:
        raise ValueError(f"dtype must be torch.float32 or torch.float16 for NumPy's arrays, got {torch.bfloat16}")
    # CuPy's arrays speak DLPack, but name no array namespace.
    space = sys.modules["cupy"] if library == "cupy" else images.__array_namespace__()
    if library != "cupy":
        return space.from_dlpack(batch_tail(from_dlpack(images), **_to_torch(arguments)))
    device = images.device.id
    stream = torch.cuda.ExternalStream(space.cuda.get_current_stream().ptr, device=device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        return space.from_dlpack(batch_tail(from_dlpack(images), **_to_torch(arguments)))


def _to_torch(arguments: dict[str, Any]) -> dict[str, Any]:
    def convert(name: str, value: Any) -> Any:
        # These are read as plain numbers, whatever holds them.
        if isinstance(value, Tensor) or name in ("mean", "std") or not hasattr(value, "__dlpack__"):
            return value
        return from_dlpack(value)

    return {name: convert(name, value) for name, value in arguments.items()}


def plan(
    tail: Tail, out: Tensor, shared_limit: int, *, rows: Sequence[int] = (32, 16), warps: int | None = None
) -> Launch:
    """Lay out the launch that fills ``out``.

    Args:
        tail: the checked arguments.
        out: ``(B, C, H, W)`` of the dtype and memory format asked for, on images' device.
        shared_limit: bytes of shared memory that a block may have on the device, at least 99 KiB.
        rows: rows of a block, multiples of 16; the first that fits is taken.
        warps: of all blocks whose registers shall fit a multiprocessor beside each other, if the kernel is a fast one
            and shared memory has room for them; by default 28, or 24 where a block may have less than 160 KiB.
    """
    images = tail.images
    pixels = images.dtype == torch.uint8
    output = _TYPES[tail.dtype]
    if pixels:
        image_stride, row_stride, column_stride, channel_stride = images.stride()
    else:
        image_stride, channel_stride, row_stride, column_stride = images.stride()
    fast = (
        pixels
        and output != 0
        and (column_stride, channel_stride, row_stride) == (3, 1, 3 * tail.width)
        and (images.data_ptr() | image_stride | tail.width) % 8 == 0
    )

    # Three fast kernels for three kinds of batch; the slow ones decide as they go.
    mix = 3 if not fast else 0 if tail.partner is None else 1 if tail.lam is not None else 2
    groups = -(-tail.width // 32)
    threads = 32 * max(4, -(-groups // -(-groups // 8)))
    # Shared memory as batch_tail.cu has it: T, or h and what it is made with, or pixels; the tables of A_H and A_W.
    halves = 1 if output else 2
    longest = max(tail.height, tail.width)
    work = 4 * (4 * longest + 2)
    tables = 4 * 3 * 32 * (-(-tail.height // 32) + groups)
    for height in rows:
        stage = fast * (2 if mix else 1) * height * row_stride
        product = halves * (3 if fast else 1) * height * (32 * groups + 4) * 2
        table_offset = -(-max(product, work, stage) // 16) * 16
        shared = stage if tail.role is None else table_offset + tables
        if shared <= shared_limit:
            break
    # A multiprocessor has 1 KiB more than a block may ask for, and every block takes 1 KiB beside what it asks for.
    room = (shared_limit + 1024) // (shared + 1024)
    warps = warps or (28 if shared_limit >= 160 * 1024 else 24)
    resident = max(2, min(32 * warps // threads, room)) if fast else 2

    parameters = [
        _scale_bias(tail.mean, tail.std, pixels, images.device),
        *(
            None if value is None else value.contiguous()
            for value in (tail.flip, tail.partner, tail.lam, tail.box, tail.role, tail.t, tail.index)
        ),
    ]
    keep = tuple(tensor for tensor in (images, out, *parameters) if tensor is not None)
    pointers = [images.data_ptr(), out.data_ptr(), *(0 if value is None else value.data_ptr() for value in parameters)]
    out_image, out_channel, out_row, out_column = out.stride()
    arguments: tuple[np.generic, ...] = (
        *map(np.uint64, pointers),
        *map(np.int32, (tail.batch, tail.channels, tail.height, tail.width, 0 if pixels else _TYPES[images.dtype])),
        *map(np.int64, (image_stride, row_stride, column_stride, channel_stride)),
        *map(np.int64, (out_image, out_row, out_column, out_channel)),
        *map(np.uint32, (tail.seed & 0xFFFFFFFF, tail.seed >> 32, tail.epoch | NOISE << EPOCH_BITS)),
        *map(np.float32, (np.log(tail.sigma_min), np.log(tail.sigma_max))),
        *map(np.int32, (table_offset, tail.memory_format == torch.channels_last)),
    )
    return Launch(
        macros=(
            ("PIXELS", int(pixels)),
            ("OUTPUT", output),
            ("FAST", int(fast)),
            ("MIX", mix),
            ("ROWS", height),
            ("THREADS", threads),
            ("RESIDENT", resident),
            ("HEIGHT", tail.height if fast else 0),
            ("WIDTH", tail.width if fast else 0),
        ),
        grid=(tail.batch * -(-tail.height // height), (1 if tail.role is None else 2) if fast else tail.channels),
        threads=threads,
        shared=shared,
        arguments=arguments,
        keep=keep,
    )


@functools.lru_cache(maxsize=32)
def _scale_bias(mean: tuple[float, ...], std: tuple[float, ...], pixels: bool, device: torch.device) -> Tensor:
    """What standardises a value, float32 ``(2, C)``: ``scale x + bias`` with ``x`` the byte less 128, or the float."""
    unit, zero = (255.0, 128.0) if pixels else (1.0, 0.0)
    scale = [1.0 / (unit * s) for s in std]
    bias = [(zero / unit - m) / s for m, s in zip(mean, std, strict=True)]
    return torch.tensor([scale, bias], dtype=torch.float64).to(torch.float32).to(device)
