"""The noises of ImageNet-C, CIFAR-C and TinyImageNet-C (Hendrycks and Dietterich, ICLR 2019) on batches of uint8
images.

================  ==================================================================================================
corruption        definition, of values ``x`` in [0, 1]
================  ==================================================================================================
`gaussian_noise`  ``x + c z``, ``z ~ N(0, 1)``
`shot_noise`      ``Poisson(c x) / c``
`impulse_noise`   0 with probability ``c / 2``, 1 with probability ``c / 2``, else ``x``
================  ==================================================================================================

Each value of each channel has a draw of its own: word ``(channel * H + row) * W + column`` of the sample's ``CORRUPT``
stream (:mod:`fastmoll.kernels.philox`), for `gaussian_noise` the normal of that place. Results are clipped, scaled to
255 and truncated to whole numbers, not rounded, as published.

On a CPU with Numba the noises are compiled (:mod:`fastmoll.kernels.corrupt_noise_numba`); otherwise they are plain
torch, on any device. Shot and impulse noise are decided by comparing integers, and give the same bits everywhere;
gaussian noise may differ by a grey level where a sum is within float32 of a whole number.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from fastmoll.kernels import philox
from fastmoll.kernels.corruption_job import start
from fastmoll.kernels.image_ops import upload


def gaussian_noise(images: Tensor, severity: int, *, seed: int, index: Tensor) -> Tensor:
    """Add normal noise.

    Args:
        images: uint8 ``(B, 3, H, W)``.
        severity: 1 to 5.
        seed: int in [0, 2^64).
        index: sample ids, integer ``(B,)``, in [0, 2^48), on images' device.

    Returns:
        A new contiguous tensor like ``images``.

    Raises:
        ValueError: a wrong shape or dtype, a severity, seed or id out of range.
    """
    job = start("gaussian_noise", images, severity, seed, index)
    scale = 255.0 * job.constants[0]
    if job.compiled:
        from fastmoll.kernels import corrupt_noise_numba as compiled

        return job.threads(compiled.gaussian, np.float32(scale), *job.key())
    values = images[0].numel() if len(images) else 0

    def work(part: Tensor, ids: Tensor) -> Tensor:
        blocks = -(-values // 4)
        words = philox.sample_words(ids, job.cell, seed=seed, purpose=philox.CORRUPT, blocks=blocks)
        noise = philox.normal(words, torch.float32)[:, :values].view(part.shape)
        return noise.mul_(scale).add_(part).clamp_(0.0, 255.0).to(torch.uint8)

    return job.portions(work)


def shot_noise(images: Tensor, severity: int, *, seed: int, index: Tensor) -> Tensor:
    """Count photons: arguments, result and errors as for :func:`gaussian_noise`."""
    job = start("shot_noise", images, severity, seed, index)
    photons = int(job.constants[0])
    limits, grey = poisson_table(photons)
    if job.compiled:
        from fastmoll.kernels import corrupt_noise_numba as compiled

        guide = _guide(photons)
        return job.threads(compiled.shot, limits.numpy(), grey.numpy(), guide.numpy(), *job.key())
    # One sorted row for all levels: a level's limits are those of the levels below, moved up.
    width, device = limits.shape[1], images.device
    row = upload((limits + (torch.arange(256, device="cpu") << 32).unsqueeze(1)).flatten(), device)
    grey = upload(grey, device)

    def work(part: Tensor, ids: Tensor) -> Tensor:
        level = part.flatten(1).long()
        words = job.words(ids, level.shape[1]).add_(level << 32)
        count = torch.searchsorted(row, words).sub_(level.mul_(width))
        return grey[count].view(part.shape)

    return job.portions(work)


def impulse_noise(images: Tensor, severity: int, *, seed: int, index: Tensor) -> Tensor:
    """Salt and pepper: arguments, result and errors as for :func:`gaussian_noise`."""
    job = start("impulse_noise", images, severity, seed, index)
    salt, pepper = (round(job.constants[0] * 2**32 / part) for part in (2, 1))
    if job.compiled:
        from fastmoll.kernels import corrupt_noise_numba as compiled

        return job.threads(compiled.impulse, np.uint32(salt), np.uint32(pepper), *job.key())

    def work(part: Tensor, ids: Tensor) -> Tensor:
        words = job.words(ids, part[0].numel()).view(part.shape)
        changed = (words < salt).to(torch.uint8) * 255
        return torch.where(words < pepper, changed, part)

    return job.portions(work)


@functools.lru_cache(16)
def poisson_table(photons: int) -> tuple[Tensor, Tensor]:
    """Shot noise by inverting the distribution function, for each of the 256 grey levels.

    Level ``x`` with word ``w`` becomes ``grey[k]``, ``k`` the number of ``limits[x]`` below ``w``: as many photons as
    ``(w + 1/2) / 2^32`` exceeds values of the Poisson distribution function with mean ``photons * x / 255``. As many
    photons as white has on average are white, and more are not counted.

    Args:
        photons: those of white, on average.

    Returns:
        limits: int64 ``(256, photons)``, ascending, in [0, 2^32).
        grey: uint8 ``(photons + 1,)``.
    """
    rate = torch.arange(256, dtype=torch.float64, device="cpu").unsqueeze(1) / 255.0 * photons
    count = torch.arange(photons, dtype=torch.float64, device="cpu")
    # A sum, because torch's incomplete gamma function is a few 1e-10 off.
    below = (torch.xlogy(count, rate) - rate - torch.lgamma(count + 1.0)).exp_().cumsum(1)
    limits = (below * 2.0**32 - 0.5).ceil_().sub_(1.0).clamp_(0.0, 2.0**32 - 1.0).long()
    grey = (torch.arange(photons + 1, dtype=torch.float64, device="cpu") / photons * 255.0).to(torch.uint8)
    return limits, grey


@functools.lru_cache(16)
def _guide(photons: int) -> Tensor:
    """Where to begin the search in a row of limits: int16 ``(256, 256)``, by level and the word's upper eight bits."""
    limits, _ = poisson_table(photons)
    lowest = (torch.arange(256, device="cpu") << 24).expand(256, -1).contiguous()
    return torch.searchsorted(limits, lowest).to(torch.int16)
