"""Noise and heat blur on the CPU, compiled: the arithmetic of :mod:`fastmoll.kernels.cosine_noise` and
:mod:`fastmoll.kernels.heat_blur` for float32 images, all roles of a batch in one pass, several times faster.

The noise is Philox in SIMD registers and Box-Muller with polynomials. An image is blurred in the cheapest of three ways
that are all exact to a few times 1e-6, chosen by ``σ_B``:

- a filter of ``2R + 1`` taps an axis, mirrored at the edges, from ``σ_B = 1.3`` on: there the spectrum has all but
  ended at the Nyquist frequency, and ``A_N`` is a band;
- the cosine modes whose factor ``exp(-τ π² k²/N²)`` is above 1e-6, for large ``σ_B``;
- two dense products otherwise, for small ``σ_B``.

The last two work on even and odd parts: ``A_N`` maps mirror images to mirror images, so on sums and differences of
mirrored pixels it falls into two blocks of half the size, and half of the arithmetic is gone.

Numba compiles this at first use (seconds) and keeps the result on disk. Its own thread pools are not used: one of them
cannot be called from two threads, the other forbids ``fork`` afterwards, as a ``DataLoader`` does it. The compiled code
lets go of the GIL instead, and plain threads call it: ``torch.get_num_threads()`` of them, so one in a worker process.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fastmoll.kernels import philox
from fastmoll.kernels.checks import check_images, check_temperature, check_tensor, check_values
from fastmoll.kernels.draw import BLUR, CLEAN, NOISE, PURE_NOISE
from fastmoll.kernels.heat_blur import checked_blur_scale, cosine_table, resolve_scales

# What is left out, relative to an image of unit variance: modes below this factor, filter mass beyond the radius.
_NEGLIGIBLE: Final = 1e-6
_RADII: Final = 4.9
# At a blur scale of 1.7 the spectrum at the Nyquist frequency is 6e-7, and h is a Gaussian that ends. Below, its tail
# is that of the kink in the spectrum; beyond 24 pixels it still matters less than 1e-5 from a scale of 1.3 on.
_SHARP_BAND: Final = 1.7
_WIDE_RADIUS: Final = 24
_FIRST_BAND: Final = 1.3
# Bytes of a huge page on the usual systems; smaller batches are not worth the question.
_HUGE: Final = 2**21
# Measured costs, in fused multiply-adds of the matrix product a pixel.
_TAP_COST: Final = 4.9
_FOLD_COST: Final = 20.0
_COPY_COST: Final = 15.0
_NOISE_COST: Final = 50.0


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
    images are copied, pure noise replaces an image whatever ``t`` says.

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
        out: where to write: a tensor with the shape, dtype and strides of ``x``, or ``x`` itself. Memory that was
            written before costs less than new memory, whose every page the system has to clear.

    Returns:
        ``out``, or a new tensor with the shape, dtype and memory format of ``x``. Float32 arithmetic, rounded once.

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
    index = torch.arange(batch) if index is None else index
    philox.check_key(seed, epoch, index, batch)
    sigma_min, sigma_max = resolve_scales(sigma_min, sigma_max, width)
    if out is not None:
        check_tensor("out", out, tuple(x.shape), (x.dtype,), x.device)
        if out.stride() != x.stride() or out.requires_grad:
            raise ValueError(f"out must have x's strides {x.stride()} and no gradient, got {out.stride()}")
    result = _empty_like(x) if out is None else out
    if x.numel() == 0:
        return result

    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    layout = torch.channels_last if last else torch.contiguous_format
    with torch.no_grad():
        source = x.detach().to(torch.float32, memory_format=layout)
        direct = result.dtype == torch.float32 and result.is_contiguous(memory_format=layout)
        target = result if direct else _empty_like(source)
        # Dynamo would trace the NumPy calls as tensors. Not a decorator: that imports Dynamo, and with it Triton.
        run = torch.compiler.disable(_run) if torch.compiler.is_compiling() else _run  # type: ignore[no-untyped-call]
        run(source, target, last, role, t, seed, epoch, index, sigma_min, sigma_max)
        if not direct:
            result.copy_(target)
    return result


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _empty_like(x: Tensor) -> Tensor:
    """New memory in huge pages, where the system lets programs ask for them.

    The first touch of each ordinary page costs as much as the noise on it.
    """
    out = torch.empty_like(x)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None and out.nbytes >= _HUGE:
        first = -(-out.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = (out.data_ptr() + out.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
        # Only advice: whatever it answers, the memory is good.
        _c_library().madvise(ctypes.c_void_p(first), ctypes.c_size_t(whole), advice)
    return out


def _run(
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
    from fastmoll.kernels import mollify_numba as compiled

    batch, channels, height, width = x.shape
    t = torch.where(role == PURE_NOISE, 1.0, t.float())
    sigma = torch.sin(t * (math.pi / 2))
    alpha = torch.sin((1.0 - t) * (math.pi / 2))

    way = np.full(batch, compiled.COPY, np.int8)
    way[((role == NOISE) | (role == PURE_NOISE)).numpy()] = compiled.NOISE
    blurred = (role == BLUR).nonzero().squeeze(1)
    place = np.zeros(batch, np.int64)
    place[blurred.numpy()] = np.arange(len(blurred))
    scale = checked_blur_scale(t[blurred].double(), sigma_min, sigma_max).numpy()
    chosen, extent_h, extent_w, cost = _plan(scale, height, width)
    way[blurred.numpy()] = chosen
    weight = np.array([_COPY_COST, _NOISE_COST, 0.0, 0.0, 0.0])[way]
    weight[blurred.numpy()] = cost

    def flat(images: Tensor) -> Any:
        return (images.permute(0, 2, 3, 1) if last else images).reshape(batch, -1).numpy()

    ids = index.long().numpy().astype(np.uint64)
    source, target = flat(x), flat(out)

    arguments = (
        channels,
        height,
        width,
        last,
        way,
        alpha.numpy(),
        sigma.numpy(),
        ids,
        np.uint64(epoch),
        np.uint64(seed),
        place,
        cosine_table(height, x.device).numpy(),
        cosine_table(width, x.device).numpy(),
        _factors(scale, height),
        _factors(scale, width),
        extent_h,
        extent_w,
        _cosine_modes(height),
        _cosine_modes(width),
    )

    def work(rows: Any) -> None:
        clean = way[rows] == compiled.COPY
        for row in rows[clean]:
            np.copyto(target[row], source[row])
        compiled.run(source, target, rows[~clean], *arguments)

    wanted = np.flatnonzero(way != compiled.COPY) if x.data_ptr() == out.data_ptr() else np.arange(batch)
    threads = min(torch.get_num_threads(), len(wanted))
    if threads <= 1:
        work(wanted)
        return
    # Several shares a thread, the largest first, so that a thread which the system holds up leaves the rest to others.
    shares = [wanted[share] for share in _shares(weight[wanted], 4 * threads)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, shares))


def _factors(scale: Any, size: int) -> Any:
    """``exp(-τ π² k²/N²)``, float64 ``(n, N)``."""
    factors = np.exp(-0.5 * np.square(scale[:, None] * (np.arange(size) * (math.pi / size))))
    # Products of factors too small to matter would be denormal numbers, which are slow.
    factors[factors < 1e-12] = 0.0
    return factors


@functools.lru_cache(maxsize=8)
def _cosine_modes(size: int) -> Any:
    """Even, then odd cosine modes on the first half of an axis, float32 ``(2, ...)``: blocks (mode, pixel), transposed.

    Mode ``k`` is ``sqrt(ε_k / N) cos(π k (i + 1/2) / N)``, ``ε_0 = 1``, all other ``ε_k = 2``.
    """
    k, i = np.arange(size)[:, None], np.arange(size)[None]
    # The phase is reduced in integers, as in heat_blur.
    table = np.sqrt(2.0 / size) * np.cos(k * (2 * i + 1) % (4 * size) * (math.pi / (2 * size)))
    table[0] /= math.sqrt(2.0)
    blocks = [table[parity::2, : (size + 1 - parity) // 2] for parity in (0, 1)]
    forward = np.concatenate([block.ravel() for block in blocks])
    return np.stack([forward, np.concatenate([block.T.ravel() for block in blocks])]).astype(np.float32)


def _plan(sigma: Any, height: int, width: int) -> tuple[Any, Any, Any, Any]:
    """How to blur each image: the way, the extent (radius or rank) on both axes, and what it costs."""
    from fastmoll.kernels import mollify_numba as compiled

    radius = np.ceil(_RADII * sigma).astype(np.int64)
    radius = np.where(sigma < _SHARP_BAND, np.maximum(radius, _WIDE_RADIUS), radius)
    # Half of the modes are even, half odd; whole vectors of them cost no more than a part of one.
    last = math.sqrt(-2.0 * math.log(_NEGLIGIBLE)) / (math.pi * sigma)
    ranks = [np.minimum((size + 1) // 2, -(-(last * size).astype(np.int64) // 16) * 8 + 8) for size in (height, width)]
    filtering = np.where(
        (sigma >= _FIRST_BAND) & (radius <= min(height, width)), _TAP_COST * radius + _FOLD_COST, np.inf
    )
    projecting = 2.0 * ranks[0] * (1.0 + 2.0 * ranks[1] / height) + _FOLD_COST
    dense = np.full(len(sigma), (height + width) / 2 + _FOLD_COST)
    costs = np.stack([filtering, projecting, dense])
    best = costs.argmin(0)
    way = np.array([compiled.FILTER, compiled.MODES, compiled.DENSE], np.int8)[best]
    extents = [np.where(best == 0, radius, rank) for rank in ranks]
    return way, extents[0], extents[1], costs.min(0)


def _shares(weight: Any, parts: int) -> list[Any]:
    """Indices of images in ``parts`` shares of about equal weight, heaviest first."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    load = [0.0] * parts
    for image in np.argsort(-weight, kind="stable"):
        lightest = load.index(min(load))
        shares[lightest].append(int(image))
        load[lightest] += float(weight[image])
    return [np.array(share, np.int64) for share in shares if share]
