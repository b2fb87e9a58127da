"""Noising by the variance-preserving cosine schedule (paper, equation 4): ``cos(πt/2) x + sin(πt/2) ε``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastmoll.kernels import philox
from fastmoll.kernels.checks import check_images, check_no_grad, check_temperature

# Generator blocks at a time, to bound the scratch memory: 32 bytes of words and as much again for the normals a block.
_BLOCKS = 2**20


def cosine_noise(x: Tensor, t: Tensor, *, seed: int = 0, epoch: int = 0, index: Tensor | None = None) -> Tensor:
    """Noise each image of a batch at its own temperature (paper, equation 4).

    ``ε`` is a function of (seed, epoch, sample id) alone: normal ``(h * W + w) * C + c`` of the sample's ``NOISE``
    stream (see :mod:`fastmoll.kernels.philox`) belongs to row ``h``, column ``w``, channel ``c``, whatever the memory
    format of ``x``. Nothing is clipped. ``t = 0`` returns the image itself, ``t = 1`` returns ``ε``, but NaN
    for a pixel that is not finite.

    Args:
        x: standardised images ``(B, C, H, W)``; float16, bfloat16, float32 or float64; contiguous or channels-last.
        t: temperatures ``(B,)``, floating point, in [0, 1], on x's device.
        seed: int in [0, 2^64).
        epoch: int in [0, 2^24).
        index: sample ids, integer ``(B,)``, in [0, 2^48), on any device; default ``0 ... B-1``.

    Returns:
        A new tensor with the shape, dtype, device and memory format of ``x``. The arithmetic is float64 for float64
        images, float32 for all others, and is rounded once, at the end.

    Raises:
        ValueError: an argument outside the ranges above, or images that require grad.
    """
    check_images("x", x)
    batch, channels, height, width = x.shape
    check_temperature("t", t, (batch,), x.device)
    check_no_grad("t", t)
    if index is None:
        index = torch.arange(batch, device=x.device)
    philox.check_key(seed, epoch, index, batch)
    index = index.to(x.device, non_blocking=True)

    dtype = torch.promote_types(x.dtype, torch.float32)
    out = torch.empty_like(x)
    with torch.no_grad():
        quarter = t.to(dtype).mul(math.pi / 2)
        sigma = torch.sin(quarter).view(-1, 1, 1, 1)
        # The cosine as the sine of the complement: exactly 0 at t = 1, and accurate in relative terms near it.
        alpha = torch.sin((1.0 - t.to(dtype)) * (math.pi / 2)).view(-1, 1, 1, 1)
        noise = _noise(index, epoch, seed, channels * height * width, dtype)
        noise = noise.reshape(batch, height, width, channels).permute(0, 3, 1, 2)
        out.copy_(noise.mul_(sigma).addcmul_(x.to(dtype), alpha))
    return out


def _noise(index: Tensor, epoch: int, seed: int, values: int, dtype: torch.dtype) -> Tensor:
    """The first ``values`` normals of each sample's ``NOISE`` stream, ``(B, values)``."""
    blocks = -(-values // 4)
    noise = torch.empty(len(index), values, dtype=dtype, device=index.device)
    step = max(1, _BLOCKS // blocks)
    for start in range(0, len(index), step):
        rows = slice(start, start + step)
        words = philox.sample_words(index[rows], epoch, seed=seed, purpose=philox.NOISE, blocks=blocks)
        noise[rows] = philox.normal(words, dtype)[:, :values]
    return noise
