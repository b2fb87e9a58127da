"""Blurring by the heat equation (paper, equations 5 and 6), as two dense products a channel.

The definition is ``V exp(-τΛ) Vᵀ x`` with the orthonormal DCT-II ``V`` over both axes, ``Λ[w, h] = π² (w²/W² + h²/H²)``
and ``τ = σ_B(t)² / 2``. The exponential of the sum is a product, so the blur is ``A_H X A_W`` with one symmetric matrix
an axis, ``A_N = V_N exp(-τ π² k²/N²) V_Nᵀ``, and the addition theorem of the cosine turns that matrix into Toeplitz
plus Hankel:

    ``A_N[i, j] = h[|i - j|] + h[i + j + 1]``,
    ``h[m] = 1/(2N) Σ_{k<N} ε_k exp(-τ π² k²/N²) cos(π k m / N)``, ``ε_0 = 1``, all other ``ε_k = 2``.

``h`` is even and has period ``2N``: ``2N`` numbers an image and axis describe the whole operator. ``σ_B`` is in pixels,
the same on both axes. Rows of ``A_N`` sum to 1, so the mean of each channel is kept.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from fastmoll.kernels.checks import check_images, check_no_grad, check_number, check_temperature


def blur_scale(t: Tensor, sigma_min: float, sigma_max: float) -> Tensor:
    """The blur scale ``σ_B(t) = exp((1-t) ln σ_min + t ln σ_max)`` (paper, equation 6).

    Args:
        t: temperatures in [0, 1], floating point, any shape.
        sigma_min: scale at ``t = 0``, in pixels, positive.
        sigma_max: scale at ``t = 1``, in pixels, at least ``sigma_min``.

    Returns:
        ``σ_B`` in pixels, the shape of ``t``; float64 for float64 ``t``, float32 for all others.

    Raises:
        ValueError: an argument outside the ranges above.
    """
    sigma_min, sigma_max = check_scales(sigma_min, sigma_max)
    check_temperature("t", t, None, None)
    return checked_blur_scale(t.to(torch.promote_types(t.dtype, torch.float32)), sigma_min, sigma_max)


def checked_blur_scale(t: Tensor, sigma_min: float, sigma_max: float) -> Tensor:
    """:func:`blur_scale` of arguments that were checked before, in the dtype of ``t``."""
    return torch.exp((1.0 - t) * math.log(sigma_min) + t * math.log(sigma_max))


def check_scales(sigma_min: float, sigma_max: float) -> tuple[float, float]:
    """Return both scales as floats, or raise ``ValueError`` unless ``0 < sigma_min <= sigma_max``, both finite."""
    sigma_min = check_number("sigma_min", sigma_min, above=0.0)
    return sigma_min, check_number("sigma_max", sigma_max, at_least=sigma_min)


def resolve_scales(sigma_min: float, sigma_max: float | None, width: int) -> tuple[float, float]:
    """:func:`check_scales`, for images of ``width`` pixels: the default of ``sigma_max``, that or ``sigma_min``."""
    sigma_min = check_number("sigma_min", sigma_min, above=0.0)
    return check_scales(sigma_min, max(sigma_min, width) if sigma_max is None else sigma_max)


@functools.lru_cache(maxsize=32)
def cosine_table(size: int, device: torch.device) -> Tensor:
    """``ε_k / (2N) cos(π k m / N)``, float64 ``(N, 2N)``: one size serves every batch of a run."""
    k, m = torch.arange(size, device="cpu"), torch.arange(2 * size, device="cpu")
    # The phase is reduced in integers: π k m / N itself grows to 2 π N, where the rounding of π shows.
    table = torch.cos((k.unsqueeze(1) * m % (2 * size)).double() * (math.pi / size)) / size
    table[0] /= 2.0
    return table.to(device)


def heat_kernel(sigma: Tensor, size: int) -> Tensor:
    """The numbers ``h[0 ... 2N-1]`` that describe the blur of an axis of ``N = size`` pixels.

    Args:
        sigma: scales in pixels, float64 ``(B,)``.
        size: pixels on the axis.

    Returns:
        float64 ``(B, 2 * size)``. Float64, because the sum cancels; it is a small part of the work.
    """
    k = torch.arange(size, device=sigma.device, dtype=torch.float64) * (math.pi / size)
    # A compiler looks through the cache, and warns of it.
    table = cosine_table.__wrapped__ if torch.compiler.is_compiling() else cosine_table
    return torch.exp(-0.5 * (sigma.unsqueeze(1) * k).square()) @ table(size, sigma.device)


def heat_matrix(kernel: Tensor) -> Tensor:
    """The symmetric matrices ``A[i, j] = h[|i - j|] + h[i + j + 1]``: ``(B, 2N)`` to ``(B, N, N)``, same dtype."""
    size = kernel.shape[1] // 2
    # Sliding windows build both parts without an index for every element. Window i of the Hankel sequence starts at
    # h[i + 1]; window N-1-i of the sequence h[-(N-1)] ... h[N-1] starts at h[-i], where h[-m] = h[2N - m].
    centred = torch.cat((kernel[:, size + 1 :], kernel[:, :size]), dim=1)
    return centred.unfold(1, size, 1).flip(1).add_(kernel[:, 1:].unfold(1, size, 1))


def heat_blur(x: Tensor, t: Tensor, *, sigma_min: float = 0.3, sigma_max: float | None = None) -> Tensor:
    """Blur each image of a batch at its own temperature (paper, equations 5 and 6).

    ``t = 0`` is *not* the identity: it blurs by ``sigma_min``. Any height and width will do; an axis of one pixel is
    left alone.

    Args:
        x: images ``(B, C, H, W)``; float16, bfloat16, float32 or float64; contiguous or channels-last.
        t: temperatures ``(B,)``, floating point, in [0, 1], on x's device.
        sigma_min: blur scale at ``t = 0``, in pixels, positive.
        sigma_max: blur scale at ``t = 1``, in pixels, at least ``sigma_min``; default: the width ``W``, or
            ``sigma_min`` for images narrower than that.

    Returns:
        A new tensor with the shape, dtype, device and memory format of ``x``. The arithmetic ignores autocast: it is
        float64 for float64 images and float32 for all others (within TF32, if ``torch.set_float32_matmul_precision``
        allows that), rounded once, at the end.

    Raises:
        ValueError: an argument outside the ranges above, or images that require grad.
    """
    check_images("x", x)
    batch, channels, height, width = x.shape
    check_temperature("t", t, (batch,), x.device)
    check_no_grad("t", t)
    sigma_min, sigma_max = resolve_scales(sigma_min, sigma_max, width)

    dtype = torch.promote_types(x.dtype, torch.float32)
    out = torch.empty_like(x)
    if x.is_meta:  # a device that autocast does not know
        return out
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        sigma = checked_blur_scale(t.double(), sigma_min, sigma_max)
        across = heat_matrix(heat_kernel(sigma, width).to(dtype))
        down = across if height == width else heat_matrix(heat_kernel(sigma, height).to(dtype))
        # Channels-last images are put in order once: a product on the strided view, or on (W, C) slices, is slower.
        planes = x.to(dtype, memory_format=torch.contiguous_format).contiguous()  # the former lets transposed ones be
        rows = torch.bmm(planes.view(batch, channels * height, width), across)
        out.copy_(down.unsqueeze(1) @ rows.view(batch, channels, height, width))
    return out
