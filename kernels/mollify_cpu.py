"""Noise and heat blur on the CPU, compiled: the arithmetic of :mod:`fastmoll.kernels.cosine_noise` and
:mod:`fastmoll.kernels.heat_blur` for float32 images, all roles of a batch in one pass, several times faster.

The noise is Philox in SIMD registers and Box-Muller with polynomials. An image is blurred in the cheaper of two ways,
both exact to a few times 1e-6, chosen by ``σ_B``:

- the cosine modes whose factor ``exp(-τ π² k²/N²)`` matters, few for large ``σ_B``;
- two matrix products, within the band of ``A_N`` where that has one: from ``σ_B = 1.6`` on the spectrum has all but
  ended at the Nyquist frequency. Below, the tail of ``h`` is that of the spectrum's kink there, and falls slowly.

Both work on even and odd parts: ``A_N`` maps mirror images to mirror images, so on sums and differences of mirrored
pixels it falls into two blocks of half the size, and half of the arithmetic is gone.

Numba compiles this at first use (seconds) and keeps the result on disk. Its own thread pools are not used: one of them
cannot be called from two threads, the other forbids ``fork`` afterwards, as a ``DataLoader`` does it. The compiled code
lets go of the GIL instead, and plain threads call it: ``torch.get_num_threads()`` of them, so one in a worker process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fastmoll.kernels import philox, recycled
from fastmoll.kernels.checks import check_images, check_temperature, check_tensor, check_values, overlaps
from fastmoll.kernels.draw import BLUR, CLEAN, NOISE, PURE_NOISE
from fastmoll.kernels.heat_blur import checked_blur_scale, cosine_table, resolve_scales

# What the blur leaves out, relative to the largest pixel: modes below this factor, entries of ``h`` that add up to it.
_NEGLIGIBLE: Final = 2e-6
# To tell what the band will cost, before it is known: it is there from this blur scale on, of so many scales.
_FIRST_BAND: Final = 1.6
_RADII: Final = 4.7
# Values that are worth a thread: starting one takes as long as a third of a millisecond of work.
_WORTH_A_THREAD: Final = 2**19


def mollify_cpu(
    x: Tensor,
    role: Tensor,
    t: Tensor,
    *,
    seed: int = 0,
    epoch: int = 0,
    index: Tensor | None = None,
    sigma_min: float = 0.3,
    sigma_max: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Mollify each image of a CPU batch by its role at its temperature (paper, equations 4 to 6).

    Equal to :func:`fastmoll.kernels.cosine_noise.cosine_noise` on images of role noise, to
    :func:`fastmoll.kernels.heat_blur.heat_blur` on those of role blur, within 1e-5 for standardised images; clean
    images are copied, pure noise replaces an image whatever ``t`` says (a pixel that is not finite by NaN).

    Args:
        x: standardised images ``(B, C, H, W)`` on the CPU; float16, bfloat16 or float32. Contiguous and channels-last
            batches are read in place, others are copied first, and so are those in half precision.
        role: int8 ``(B,)``: 0 clean, 1 noise, 2 blur, 3 pure noise.
        t: temperatures ``(B,)``, floating point, in [0, 1].
        seed: int in [0, 2^64).
        epoch: int in [0, 2^24).
        index: sample ids, integer ``(B,)``, in [0, 2^48); default ``0 ... B-1``.
        sigma_min: blur scale at ``t = 0``, in pixels, positive.
        sigma_max: blur scale at ``t = 1``, in pixels, at least ``sigma_min``; default: the width ``W``, or
            ``sigma_min`` for images narrower than that.
        out: where to write: a tensor with the shape, dtype and strides of ``x``, or ``x`` itself, which saves copies
            of clean images; no two elements may share memory.

    Returns:
        ``out``, or a new tensor with the shape, dtype and memory format of ``x``; a large one takes the memory of an
        earlier result that is gone, see :mod:`fastmoll.kernels.recycled`. Float32 arithmetic, rounded once.

    Raises:
        ValueError: an argument outside the ranges above, images that require grad, or images not on the CPU.
    """
    check_images("x", x)
    if x.device.type != "cpu" or x.dtype == torch.float64:
        raise ValueError(f"x must be float16, bfloat16 or float32 on the CPU, got {x.dtype} on {x.device}")
    batch, width = x.shape[0], x.shape[3]
    check_tensor("role", role, (batch,), (torch.int8,), x.device)
    check_values("role", role, (role >= CLEAN) & (role <= PURE_NOISE), f"lie in [{CLEAN}, {PURE_NOISE}]")
    check_temperature("t", t, (batch,), x.device)
    index = torch.arange(batch, device="cpu") if index is None else index
    philox.check_key(seed, epoch, index, batch)
    sigma_min, sigma_max = resolve_scales(sigma_min, sigma_max, width)
    if out is not None:
        check_tensor("out", out, tuple(x.shape), (x.dtype,), x.device)
        if out.stride() != x.stride() or out.requires_grad:
            raise ValueError(f"out must have x's strides {x.stride()} and no gradient, got {out.stride()}")
        if overlaps(out):
            raise ValueError(f"out must have memory of its own for each element, got strides {out.stride()}")
    # Dynamo would trace the NumPy calls as tensors. Not a decorator: that imports Dynamo, and with it Triton.
    run = torch.compiler.disable(_run) if torch.compiler.is_compiling() else _run  # type: ignore[no-untyped-call]
    with torch.no_grad():
        result: Tensor = run(x.detach(), out, role, t, seed, epoch, index, sigma_min, sigma_max)
    return result


def _run(
    x: Tensor,
    out: Tensor | None,
    role: Tensor,
    t: Tensor,
    seed: int,
    epoch: int,
    index: Tensor,
    sigma_min: float,
    sigma_max: float,
) -> Tensor:
    """The checked call, in memory that the compiled code can use."""
    result = recycled.empty_like(x) if out is None else out
    if x.numel() == 0:
        return result
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    layout = torch.channels_last if last else torch.contiguous_format
    # Not memory_format= of to(): that leaves a transposed image as it is.
    source = x.float().contiguous(memory_format=layout)
    direct = result.dtype == torch.float32 and result.is_contiguous(memory_format=layout)
    target = result if direct else recycled.empty_like(source)
    _compute(source, target, last, role, t, seed, epoch, index, sigma_min, sigma_max)
    return result if direct else result.copy_(target)


def _compute(
    x: Tensor,
    out: Tensor,
    last: bool,
    role: Tensor,
    t: Tensor,
    seed: int,
    epoch: int,
    index: Tensor,
    sigma_min: float,
    sigma_max: float,
) -> None:
    from fastmoll.kernels import cosine_noise_numba, heat_blur_numba

    batch, channels, height, width = x.shape
    t = torch.where(role == PURE_NOISE, 1.0, t.float())
    sigma = torch.sin(t * (math.pi / 2))
    alpha = torch.sin((1.0 - t) * (math.pi / 2))

    def flat(images: Tensor) -> Any:
        return (images.permute(0, 2, 3, 1) if last else images).view(batch, -1).numpy()

    source, target, roles = flat(x), flat(out), role.numpy()
    noised = np.flatnonzero((roles == NOISE) | (roles == PURE_NOISE))
    blurred = np.flatnonzero(roles == BLUR)
    copied = np.flatnonzero(roles == CLEAN)[: 0 if x.data_ptr() == out.data_ptr() else None]
    if not (len(noised) or len(blurred) or len(copied)):
        return

    scale = checked_blur_scale(t[torch.from_numpy(blurred)].double(), sigma_min, sigma_max).numpy()
    rank_h, rank_w, cost = _plan(scale, height, width)
    factors_h = _factors(scale, height)
    blur = (
        source,
        target,
        # The costly ones first, so that the threads end together.
        np.argsort(-cost, kind="stable"),
        np.zeros(1, np.int64),
        blurred,
        channels,
        height,
        width,
        last,
        rank_h,
        rank_w,
        factors_h,
        factors_h if height == width else _factors(scale, width),
        cosine_table(height, x.device).numpy(),
        cosine_table(width, x.device).numpy(),
        _cosine_modes(height),
        _cosine_modes(width),
        _NEGLIGIBLE,
    )
    noise = (
        source,
        target,
        noised,
        np.zeros(1, np.int64),
        channels,
        last,
        alpha.numpy(),
        sigma.numpy(),
        index.long().numpy().astype(np.uint64),
        np.uint64(epoch),
        np.uint64(seed),
    )
    copies = iter(copied.tolist())

    def work() -> None:
        heat_blur_numba.run(*blur)
        cosine_noise_numba.run(*noise)
        for image in copies:
            np.copyto(target[image], source[image])

    _share(work, len(blurred) + len(noised) + len(copied), out.numel())


def _share(work: Callable[[], None], pieces: int, values: int) -> None:
    """Do ``work`` in several threads, which share counters and iterators: each takes what is next, until nothing is
    left."""
    helpers = min(torch.get_num_threads(), pieces, values // _WORTH_A_THREAD) - 1
    if helpers <= 0:
        work()
        return
    with ThreadPoolExecutor(helpers) as pool:
        others = [pool.submit(work) for _ in range(helpers)]
        work()
        for other in others:
            other.result()


def standardise_cpu(
    pixels: Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    flip: Tensor | None,
    partner: Tensor | None,
    lam: Tensor | None,
    box: Tensor | None,
    memory_format: torch.memory_format,
) -> Tensor:
    """Flipped, standardised and mixed images, float32 ``(B, 3, H, W)``; arguments as checked by
    :func:`fastmoll.kernels.batch_tail.check_tail`, ``pixels`` uint8 ``(B, H, W, 3)`` on the CPU."""
    from fastmoll.kernels import standardise_numba

    batch, height, width, channels = pixels.shape
    interleaved = memory_format == torch.channels_last
    like = torch.empty(batch, channels, height, width, dtype=torch.float32, device="meta")
    like = like.to(memory_format=memory_format)
    result = recycled.empty_like(like)
    flat = result.permute(0, 2, 3, 1).reshape(batch, height, -1) if interleaved else result.view(batch, -1, width)
    scale = np.tile(1.0 / (255.0 * np.asarray(std)), width).astype(np.float32)
    bias = np.tile(-np.asarray(mean) / np.asarray(std), width).astype(np.float32)

    def array(value: Tensor | None, like: Tensor) -> Any:
        return (like if value is None else value.contiguous()).numpy()

    arguments = (
        pixels.reshape(batch, height, -1).numpy(),
        flat.numpy(),
        np.zeros(1, np.int64),
        interleaved,
        scale,
        bias,
        array(flip, torch.zeros(batch, dtype=torch.bool, device="cpu")),
        array(partner, torch.empty(0, dtype=torch.int64, device="cpu")),
        array(lam, torch.empty(0, dtype=torch.float32, device="cpu")),
        array(box, torch.empty(0, 4, dtype=torch.int32, device="cpu")),
    )
    _share(lambda: standardise_numba.run(*arguments), batch, result.numel())
    return result


def _factors(scale: Any, size: int) -> Any:
    """``exp(-τ π² k²/N²)``, float64 ``(n, N)``."""
    factors = np.exp(-0.5 * np.square(scale[:, None] * (np.arange(size) * (math.pi / size))))
    # Products of factors too small to matter would be denormal numbers, which are slow.
    factors[factors < 1e-12] = 0.0
    return factors


@functools.lru_cache(maxsize=8)
def _cosine_modes(size: int) -> Any:
    """Even, then odd cosine modes on the first half of an axis, float32: ``(2, P, P)`` by (pixel, mode), transposes.

    Mode ``k`` is ``sqrt(ε_k / N) cos(π k (i + 1/2) / N)``, ``ε_0 = 1``, all other ``ε_k = 2``.
    """
    from fastmoll.kernels.heat_blur_numba import padded_half

    k, i = np.arange(size)[:, None], np.arange(size)[None]
    # The phase is reduced in integers, as in heat_blur.
    table = np.sqrt(2.0 / size) * np.cos(k * (2 * i + 1) % (4 * size) * (math.pi / (2 * size)))
    table[0] /= math.sqrt(2.0)
    side = padded_half(size)
    blocks = np.zeros((2, side, side), np.float32)
    for parity in (0, 1):
        half = (size + 1 - parity) // 2
        blocks[parity, :half, :half] = table[parity::2, :half].T
    return np.stack([blocks, blocks.transpose(0, 2, 1)])


def _plan(sigma: Any, height: int, width: int) -> tuple[Any, Any, Any]:
    """How to blur each image: the ranks (so many even modes, and odd ones) or 0 for matrices; and what it costs."""
    from fastmoll.kernels.heat_blur_numba import LANES, padded_half

    halves = padded_half(height), padded_half(width)
    last = math.sqrt(-2.0 * math.log(_NEGLIGIBLE)) / (math.pi * sigma)
    # Half of the modes are even, half odd.
    rank_h, rank_w = (
        np.minimum(half, (last * size // (2 * LANES) + 1) * LANES).astype(np.int64)
        for half, size in zip(halves, (height, width), strict=True)
    )
    # Sums of products a pixel.
    modes = 2.0 * rank_h * (1.0 + rank_w / halves[0])
    reach = np.where(sigma < _FIRST_BAND, np.inf, 2.0 * _RADII * sigma + 2.0 * LANES)
    matrices = np.minimum(reach, halves[0]) + np.minimum(reach, halves[1])
    chosen = modes < matrices
    return rank_h * chosen, rank_w * chosen, np.minimum(modes, matrices)
