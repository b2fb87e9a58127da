"""The tail of an image pipeline in one operation: flip, standardise, MixUp or CutMix, then blur or noise, then cast.

Every image of the batch has its own parameters, in this order:

1. a horizontal flip;
2. standardisation ``(x - mean) / std`` per channel, of pixels in [0, 1];
3. MixUp ``λ x + (1 - λ) x'``, or CutMix: inside a box, the partner's pixels. The partner ``x'`` went through 1 and 2
   with its own parameters;
4. by its role, nothing, noise by the cosine schedule (paper, equation 4) or blur by the heat equation (equations 5, 6).

The parameters are explicit: drawing them is left to other functions, so any batch can be repeated. This file holds the
checks and the choice of a backend; the definition in plain torch is :mod:`fastmoll.kernels.batch_tail_torch`. Code that
is being compiled sees one operator, ``fastmoll::batch_tail``, which runs the same eager code.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fastmoll.kernels.checks import (
    INTEGER,
    check_choice,
    check_images,
    check_integer,
    check_no_grad,
    check_number,
    check_tensor,
    check_values,
    has_length,
    installed,
)
from fastmoll.kernels.draw import PURE_NOISE, SEED_OFFSET, as_int64
from fastmoll.kernels.heat_blur import resolve_scales
from fastmoll.kernels.philox import EPOCH_BITS, INDEX_BITS

BACKENDS: Final = ("auto", "torch", "triton", "cupy")
DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
FORMATS: Final = (torch.channels_last, torch.contiguous_format)

SIZE_LIMIT: Final = 512
"""Largest height and width of the fused kernels."""


@dataclasses.dataclass(frozen=True)
class Tail:
    """The checked arguments of :func:`batch_tail`, defaults filled in: what a backend computes from.

    Attributes:
        images: uint8 ``(B, H, W, 3)`` or floating point ``(B, C, H, W)``, not empty.
        batch, channels, height, width: the sizes.
        mean, std: one number per channel; 0 and 1 for images that are standardised already.
        sigma_min, sigma_max: blur scales at ``t = 0`` and ``t = 1``, in pixels.
        index: int64 ``(B,)``, given whenever ``role`` is.

    The other attributes are the arguments of the same name.
    """

    images: Tensor
    batch: int
    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: Tensor | None
    partner: Tensor | None
    lam: Tensor | None
    box: Tensor | None
    role: Tensor | None
    t: Tensor | None
    index: Tensor | None
    seed: int
    epoch: int
    sigma_min: float
    sigma_max: float
    dtype: torch.dtype
    memory_format: torch.memory_format


def batch_tail(
    images: Tensor,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    flip: Tensor | None = None,
    partner: Tensor | None = None,
    lam: Tensor | None = None,
    box: Tensor | None = None,
    role: Tensor | None = None,
    t: Tensor | None = None,
    index: Tensor | None = None,
    seed: int = 0,
    epoch: int | Tensor = 0,
    sigma_min: float = 0.3,
    sigma_max: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
    memory_format: torch.memory_format = torch.channels_last,
    backend: str = "auto",
) -> Tensor:
    """Turn a batch of pixels into the batch that a network trains on.

    Noise is a function of (seed, epoch, sample id) alone, the same in every backend (see
    :func:`fastmoll.kernels.cosine_noise.cosine_noise`). The arithmetic is float32 and rounded once, at the end; for
    outputs in half precision the fused backends multiply float16 operands in the blur and sum them in float32, so
    floating-point images beyond 65504, float16's largest number, overflow there, also if the output is bfloat16.

    ``torch.compile`` takes it as one operator, whatever the backend. A second value of ``seed`` or of an int ``epoch``
    compiles once more, for all values; a tensor ``epoch`` does not.

    Args:
        images: uint8 ``(B, H, W, 3)``, as decoders give them, or float16, bfloat16 or float32 ``(B, C, H, W)``; any
            strides.
        mean: one number per channel, for pixels in [0, 1] (uint8 is divided by 255); None for floating-point images
            that are standardised already. Given with ``std`` or not at all.
        std: likewise, positive.
        flip: bool ``(B,)``: mirror left and right.
        partner: int64 ``(B,)``, positions in the batch: the second image of MixUp or CutMix.
        lam: float32 ``(B,)`` in [0, 1]: MixUp's weight of the image itself.
        box: int32 ``(B, 4)``, ``y0, y1, x0, x1`` with ``0 <= y0 <= y1 <= H`` and ``0 <= x0 <= x1 <= W``, in the
            coordinates of the result: where CutMix shows the partner. Exactly one of ``lam`` and ``box`` goes with
            ``partner``.
        role: int8 ``(B,)``: 0 clean, 1 noise, 2 blur, 3 pure noise (``t`` counts as 1). None mollifies nothing.
        t: temperatures, float32 ``(B,)`` in [0, 1]; given with ``role`` or not at all.
        index: sample ids, integer ``(B,)``, in [0, 2^48); default ``0 ... B-1``.
        seed: int in [0, 2^64).
        epoch: int in [0, 2^24), or an int64 scalar tensor on the CPU.
        sigma_min: blur scale at ``t = 0``, in pixels, positive.
        sigma_max: blur scale at ``t = 1``, in pixels, at least ``sigma_min``; default: the width ``W``, or
            ``sigma_min`` for images narrower than that.
        dtype: of the result: bfloat16, float16 or float32.
        memory_format: of the result: ``torch.channels_last`` or ``torch.contiguous_format``.
        backend: ``"torch"``, ``"triton"`` or ``"cupy"``; ``"auto"`` see :func:`choose_backend`.

    Returns:
        A new tensor ``(B, C, H, W)`` of ``dtype`` in ``memory_format``, on images' device.

    Raises:
        ValueError: an argument outside the ranges above, on another device than ``images``, or one that requires
            grad; before anything is computed. The *values* of tensors on a GPU are not looked at, which would stall
            the host in every step: there, partners and boxes outside the batch or the image are clamped to it.
    """
    options: dict[str, Any] = {
        "mean": mean,
        "std": std,
        "sigma_min": sigma_min,
        "sigma_max": sigma_max,
        "dtype": dtype,
        "backend": backend,
    }
    if not torch.compiler.is_compiling():
        options |= {"flip": flip, "partner": partner, "lam": lam, "box": box, "role": role, "t": t, "index": index}
        return _run(images, seed=seed, epoch=epoch, memory_format=memory_format, **options)
    if images.dtype != torch.uint8:
        check_images("images", images)
    check_choice("memory_format", memory_format, FORMATS)
    result: Tensor = _operator(
        images,
        flip,
        partner,
        lam,
        box,
        role,
        t,
        index,
        epoch if isinstance(epoch, Tensor) else None,
        epoch=0 if isinstance(epoch, Tensor) else epoch,
        seed=as_int64(seed),
        channels_last=memory_format == torch.channels_last,
        **options,
    )
    return result


def choose_backend(images: Tensor, height: int, width: int, dtype: torch.dtype) -> str:
    """What ``backend="auto"`` stands for.

    On a GPU, for uint8 pixels that become half precision (width a multiple of 8), the CUDA C++ where CuPy works: on an
    H200 it takes less than half of the time of Triton. Triton for all other images on a GPU; torch on the CPU, and for
    images that the fused kernels do not take.

    Args:
        images: as :func:`batch_tail` takes them.
        height: pixels.
        width: pixels.
        dtype: of the result.
    """
    if not images.is_cuda or max(height, width) > SIZE_LIMIT or images.dtype == torch.float64:
        return "torch"
    if images.dtype == torch.uint8 and dtype != torch.float32 and width % 8 == 0 and installed("cupy"):
        from fastmoll.kernels.cuda_toolchain import usable

        if usable(images.get_device()):
            return "cupy"
    return "triton" if installed("triton") else "torch"


def check_device(backend: str, images: Tensor) -> None:
    """Raise ``ValueError`` unless the backend takes images where they are."""
    # Triton's interpreter, which the variable switches on, takes tensors of the CPU.
    interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if backend in ("triton", "cupy") and not images.is_cuda and not interpreted:
        raise ValueError(f"images must be on a CUDA device for backend {backend!r}, got {images.device}")


def _run(images: Tensor, *, backend: str, **options: Any) -> Tensor:
    tail = check_tail(images, **options)
    check_choice("backend", backend, BACKENDS)
    fits = max(tail.height, tail.width) <= SIZE_LIMIT
    if backend == "auto":
        backend = choose_backend(images, tail.height, tail.width, tail.dtype)
    if backend != "torch" and not fits:
        raise ValueError(
            f"images must be at most {SIZE_LIMIT} pixels high and wide for backend {backend!r}, "
            f"got {tail.height} x {tail.width}"
        )
    if tail.batch == 0 or images.is_meta:
        shape = (tail.batch, tail.channels, tail.height, tail.width)
        return torch.empty(shape, dtype=tail.dtype, device=images.device, memory_format=tail.memory_format)
    check_device(backend, images)
    # Imported here: Triton and CuPy take seconds to load, and not every machine has them.
    if backend == "triton":
        from fastmoll.kernels.batch_tail_triton import batch_tail_triton

        return batch_tail_triton(tail)
    if backend == "cupy":
        from fastmoll.kernels.batch_tail_cupy import batch_tail_cupy

        return batch_tail_cupy(tail)
    from fastmoll.kernels.batch_tail_torch import batch_tail_torch

    with torch.no_grad():
        return batch_tail_torch(tail, compiled=True)


# CUDA graphs leave it out: backends look at the host's numbers, and the torch backend at the device's.
@torch.library.custom_op("fastmoll::batch_tail", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _operator(
    images: Tensor,
    flip: Tensor | None,
    partner: Tensor | None,
    lam: Tensor | None,
    box: Tensor | None,
    role: Tensor | None,
    t: Tensor | None,
    index: Tensor | None,
    epoch_tensor: Tensor | None,
    *,
    epoch: int,
    seed: int,
    channels_last: bool,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    sigma_min: float,
    sigma_max: float | None,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    return _run(
        images,
        flip=flip,
        partner=partner,
        lam=lam,
        box=box,
        role=role,
        t=t,
        index=index,
        epoch=epoch if epoch_tensor is None else epoch_tensor,
        seed=seed + SEED_OFFSET,
        memory_format=FORMATS[not channels_last],
        mean=mean,
        std=std,
        sigma_min=sigma_min,
        sigma_max=sigma_max,
        dtype=dtype,
        backend=backend,
    )


@_operator.register_fake
def _(images: Tensor, *_: Tensor | None, channels_last: bool, dtype: torch.dtype, **__: Any) -> Tensor:
    batch, *size = images.shape
    shape = (batch, size[2], size[0], size[1]) if images.dtype == torch.uint8 else images.shape
    return torch.empty(shape, dtype=dtype, device=images.device, memory_format=FORMATS[not channels_last])


def check_tail(
    images: Tensor,
    *,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    flip: Tensor | None,
    partner: Tensor | None,
    lam: Tensor | None,
    box: Tensor | None,
    role: Tensor | None,
    t: Tensor | None,
    index: Tensor | None,
    seed: int,
    epoch: int | Tensor,
    sigma_min: float,
    sigma_max: float | None,
    dtype: torch.dtype,
    memory_format: torch.memory_format,
) -> Tail:
    """Check the arguments of :func:`batch_tail` and fill in the defaults; raises ``ValueError`` as it says there."""
    pixels = isinstance(images, Tensor) and images.dtype == torch.uint8
    if pixels:
        check_tensor("images", images, (None, None, None, 3), (torch.uint8,), None)
        batch, height, width, channels = images.shape
        if min(height, width) < 1:
            raise ValueError(f"images must have at least one row and column, got shape {tuple(images.shape)}")
    else:
        check_images("images", images)
        check_tensor("images", images, None, DTYPES, None)
        batch, channels, height, width = images.shape
    device = images.device

    for name, value, other in (("mean", mean, std), ("std", std, mean)):
        if value is None and (pixels or other is not None):
            raise ValueError(f"{name} must be given for uint8 images and with its counterpart, got None")
        if value is not None and not has_length(value, channels):
            raise ValueError(f"{name} must have one number for each of {channels} channels, got {value!r}")
    mean = (0.0,) * channels if mean is None else mean
    std = (1.0,) * channels if std is None else std
    shift = tuple(check_number(f"mean[{i}]", value) for i, value in enumerate(mean))
    scale = tuple(check_number(f"std[{i}]", value, above=0.0) for i, value in enumerate(std))

    if flip is not None:
        check_tensor("flip", flip, (batch,), (torch.bool,), device)
    if (partner is None) != (lam is None and box is None) or not (lam is None or box is None):
        given = [name for name, value in (("partner", partner), ("lam", lam), ("box", box)) if value is not None]
        raise ValueError(f"partner must be given with exactly one of lam and box, got {', '.join(given)}")
    if partner is not None:
        check_tensor("partner", partner, (batch,), (torch.int64,), device)
    if lam is not None:
        check_tensor("lam", lam, (batch,), (torch.float32,), device)
        check_no_grad("lam", lam)
    if box is not None:
        check_tensor("box", box, (batch, 4), (torch.int32,), device)

    if (role is None) != (t is None):
        raise ValueError(f"role and t must be given together, got {'t' if role is None else 'role'} alone")
    if role is not None and t is not None:
        check_tensor("role", role, (batch,), (torch.int8,), device)
        check_tensor("t", t, (batch,), (torch.float32,), device)
        check_no_grad("t", t)
    check_integer("seed", seed, 0, 2**64)
    epoch = check_integer("epoch", epoch, 0, 2**EPOCH_BITS)
    if index is not None:
        check_tensor("index", index, (batch,), INTEGER, device)
        index = index.long()
    elif role is not None:
        index = torch.arange(batch, device=device)
    # Not on a GPU: an assertion there would be four more launches an argument, beside a handful for the operation.
    if device.type == "cpu":
        if partner is not None:
            check_values("partner", partner, (partner >= 0) & (partner < batch), f"lie in [0, {batch})")
        if lam is not None:
            check_values("lam", lam, (lam >= 0) & (lam <= 1), "lie in [0, 1]")
        if box is not None:
            y0, y1, x0, x1 = box.unbind(1)
            good = torch.stack((y0 >= 0, (y1 >= y0) & (y1 <= height), x0 >= 0, (x1 >= x0) & (x1 <= width)), 1)
            check_values("box", box, good, f"be y0 <= y1, x0 <= x1 inside {height} x {width} pixels")
        if role is not None and t is not None:
            check_values("role", role, (role >= 0) & (role <= PURE_NOISE), f"lie in [0, {PURE_NOISE}]")
            check_values("t", t, (t >= 0) & (t <= 1), "lie in [0, 1]")
        if index is not None:
            check_values("index", index, (index >= 0) & (index < 2**INDEX_BITS), f"lie in [0, 2**{INDEX_BITS})")

    sigma_min, sigma_max = resolve_scales(sigma_min, sigma_max, width)
    check_choice("dtype", dtype, DTYPES)
    check_choice("memory_format", memory_format, FORMATS)
    return Tail(
        images=images.detach(),
        batch=batch,
        channels=channels,
        height=height,
        width=width,
        mean=shift,
        std=scale,
        flip=flip,
        partner=partner,
        lam=lam,
        box=box,
        role=role,
        t=t,
        index=index,
        seed=seed,
        epoch=epoch,
        sigma_min=sigma_min,
        sigma_max=sigma_max,
        dtype=dtype,
        memory_format=memory_format,
    )
