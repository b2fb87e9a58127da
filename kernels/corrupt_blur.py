"""The blurs of ImageNet-C, CIFAR-C and TinyImageNet-C (Hendrycks and Dietterich, ICLR 2019) on batches of uint8 images.

==============  ====================================================================================================
corruption      definition
==============  ====================================================================================================
`defocus_blur`  correlation with a disk whose rim is softened by a 3x3 Gaussian (5x5 if the disk's radius is above 8);
                pixels outside are mirrored about the border pixel
`glass_blur`    Gaussian blur, truncated; then passes over the pixels from the lower right to the upper left, each of
                which takes the present value of a pixel drawn near it; then the same Gaussian blur
`motion_blur`   ``sum_i k_i x[row + dy_i, column + dx_i]``, ``i = 0 ... 2 ceil(radius)``, ``k_i`` the positive half of a
                Gaussian, ``(dx_i, dy_i)`` the whole pixels next to ``i`` steps along the angle; outside, the border
`zoom_blur`     mean of the image and of enlargements of its centre, one of them by 1, bilinear
==============  ====================================================================================================

The published sets are the definition, traps included: the glass "swaps" copy, for what they exchange are views of one
array, and their offsets run from ``-d`` to ``d - 1``; at the array's edge the softened disks of radius 8 and 10 are
mirrored, so that their sum is 1.013 and 1.011; motion blur is ImageMagick's, which rounds where the others truncate.
One thing differs. In flat areas sums are whole numbers but for the last bit of float64, and the published truncation
may or may not take a level off, from one level to the next. Here a sum within 1/256 below a whole number counts as it.

Draws come from the sample's ``CORRUPT`` stream (:mod:`fastmoll.kernels.philox`): word 0 is the angle of motion blur;
word ``(pass * H + row) * W + column`` has glass blur's offsets, to the right in its low and down in its high half.

On a CPU with Numba the blurs are compiled (:mod:`fastmoll.kernels.corrupt_blur_numba`); otherwise they are plain torch,
on any device. Both give the same picture, but for a level where a sum is within float32 of the next.
"""

from __future__ import annotations

import functools
import math
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fastmoll.kernels.corruption_job import Job, on, start, truncate
from fastmoll.kernels.draw import uniform_double

# Followed this often, doubling each time, a chain of pixels that took each other's values has ended: each link goes on
# with a probability below 0.43, and 2^7 links come to 1e-47.
_JUMPS: Final = 7


def defocus_blur(images: Tensor, severity: int, *, seed: int, index: Tensor) -> Tensor:
    """Blur by a lens out of focus; nothing in it is drawn.

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
    job = start("defocus_blur", images, severity, seed, index)
    radius, softness = job.constants
    kernel = disk(radius, softness)
    reach = len(kernel) // 2
    if not job.compiled:
        return job.portions(lambda part, _: _correlate(part, kernel))
    from fastmoll.kernels import corrupt_blur_numba as compiled

    # Rows above and below weigh the same: they are added first, and the taps are those of the lower half.
    down, right = np.nonzero(kernel[reach:])
    weights = kernel[reach:][down, right].astype(np.float32)
    outside = [_mirror(size, reach, images.device).numpy() for size in images.shape[2:]]
    return job.threads(compiled.defocus, down, right, weights, *outside)


def glass_blur(images: Tensor, severity: int, *, seed: int, index: Tensor) -> Tensor:
    """Blur by frosted glass: arguments, result and errors as for :func:`defocus_blur`."""
    job = start("glass_blur", images, severity, seed, index)
    sigma, delta, passes = job.constants[0], int(job.constants[1]), int(job.constants[2])
    # As scikit-image's `gaussian` has it: four standard deviations, rounded.
    taps = np.exp(-0.5 * (np.arange(int(4.0 * sigma + 0.5) + 1) / sigma) ** 2)
    weights = taps / (taps[0] + 2.0 * taps[1:].sum())
    if job.compiled:
        from fastmoll.kernels import corrupt_blur_numba as compiled

        return job.threads(compiled.glass, weights.astype(np.float32), delta, passes, *job.key())
    height, width = images.shape[2:]

    def work(part: Tensor, ids: Tensor) -> Tensor:
        blurred = truncate(_smooth(part.float(), weights.tolist()))
        words = job.words(ids, passes * height * width)
        place = _shuffle(words.view(len(part), passes, -1), height, width, delta)
        taken = blurred.flatten(2).gather(2, place.unsqueeze(1).expand(-1, 3, -1)).view_as(part)
        return truncate(_smooth(taken.float(), weights.tolist()))

    return job.portions(work)


def motion_blur(images: Tensor, severity: int, *, seed: int, index: Tensor) -> Tensor:
    """Blur along a line at a drawn angle of up to 45 degrees: arguments, result, errors as for :func:`defocus_blur`."""
    job = start("motion_blur", images, severity, seed, index)
    radius, sigma = job.constants

    def angle(ids: Tensor) -> Tensor:
        return uniform_double(job.words(ids, 1).squeeze(1)) * 90.0 - 45.0

    if not job.compiled:
        return job.portions(lambda part, ids: blur_along(part, angle(ids), radius, sigma))
    return blur_along(images, angle(index), radius, sigma, job)


def zoom_blur(images: Tensor, severity: int, *, seed: int, index: Tensor) -> Tensor:
    """Blur by zooming in; nothing in it is drawn: arguments, result and errors as for :func:`defocus_blur`."""
    job = start("zoom_blur", images, severity, seed, index)
    factors = job.constants
    rows, columns = ([enlarged(size, factor) for factor in factors] for size in images.shape[2:])
    if job.compiled:
        from fastmoll.kernels import corrupt_blur_numba as compiled

        tables = [np.stack([t[k] for t in axis]) for axis in (rows, columns) for k in range(3)]
        return job.threads(compiled.zoom, *tables)
    device = images.device
    down, right = ([tuple(on(array, device) for array in table) for table in axis] for axis in (rows, columns))

    def work(part: Tensor, _: Tensor) -> Tensor:
        x = part.float()
        total = x.clone()
        for one, other in zip(down, right, strict=True):
            total += resample(x, one, other)
        return truncate(total.div_(len(factors) + 1))

    return job.portions(work)


Table = tuple[np.ndarray, np.ndarray, np.ndarray]


@functools.lru_cache(512)
def enlarged(size: int, factor: float) -> Table:
    """One axis of an enlargement of the centre, as ``scipy.ndimage.zoom(order=1)`` and a crop to ``size`` have it.

    Returns:
        int64 ``(size,)`` twice and float64 ``(size,)``: result ``i`` is ``x[first[i]]`` and ``x[second[i]]``, mixed
        with the third as the second's weight.
    """
    inside = math.ceil(size / factor)
    begin = (size - inside) // 2
    full = max(round(inside * factor), size)
    place = (np.arange(size) + (full - size) // 2) * ((inside - 1) / max(full - 1, 1))
    first = np.clip(np.floor(place).astype(np.int64), 0, max(inside - 2, 0))
    return begin + first, begin + np.minimum(first + 1, inside - 1), place - first


def resample(x: Tensor, rows: tuple[Tensor, ...], columns: tuple[Tensor, ...]) -> Tensor:
    """The image ``(..., H, W)`` at the places of two tables of :func:`enlarged`, rows first."""
    down, right = rows[2].to(x.dtype).unsqueeze(1), columns[2].to(x.dtype)
    x = torch.lerp(x[..., rows[0], :], x[..., rows[1], :], down)
    return torch.lerp(x[..., columns[0]], x[..., columns[1]], right)


def blur_along(images: Tensor, angle: Tensor, radius: float, sigma: float, job: Job | None = None) -> Tensor:
    """Motion blur of uint8 images ``(B, C, H, W)``, rounded; compiled for a ``job``.

    Args:
        images: the images, or the layers of snow.
        angle: degrees, float64 ``(B,)``, from the right towards the bottom.
        radius: at least 0; there are ``2 ceil(radius) + 1`` taps.
        sigma: standard deviation of the Gaussian, pixels.
        job: whose threads to work in; None for plain torch.
    """
    taps = torch.arange(2 * math.ceil(radius) + 1, device=angle.device, dtype=torch.float64)
    radians = (angle * (math.pi / 180)).unsqueeze(1)
    right, down = ((taps * part - 0.5).ceil_().long() for part in (radians.cos(), radians.sin()))
    gaussian = np.exp(-0.5 * (np.arange(len(taps)) / sigma) ** 2)
    weights = gaussian / gaussian.sum()
    height, width = images.shape[2:]
    if job is not None:
        from fastmoll.kernels import corrupt_blur_numba as compiled

        layers = job._replace(images=images)
        return layers.threads(compiled.motion, weights.astype(np.float32), down.numpy(), right.numpy())
    batch = torch.arange(len(images), device=images.device).view(-1, 1, 1)
    row = torch.arange(height, device=images.device).view(1, -1, 1)
    column = torch.arange(width, device=images.device).view(1, 1, -1)
    # Channels last: indices with a slice between them put it there.
    total = torch.full((len(images), height, width, images.shape[1]), 0.5, device=images.device)
    for i, weight in enumerate(weights.tolist()):
        y = (row + down[:, i].view(-1, 1, 1)).clamp_(0, height - 1)
        x = (column + right[:, i].view(-1, 1, 1)).clamp_(0, width - 1)
        total.add_(images[batch, :, y, x], alpha=weight)
    return total.permute(0, 3, 1, 2).clamp_(0.0, 255.0).to(torch.uint8)


# Defocus.


@functools.lru_cache(64)
def disk(radius: float, softness: float) -> np.ndarray:
    """The published kernel of defocus blur, float64, square, of odd size, without its rim of zeros."""
    reach = max(8, round(radius))
    axis = np.arange(-reach, reach + 1)
    sharp = (axis[:, None] ** 2 + axis**2 <= radius**2).astype(np.float64)
    half = 1 if radius <= 8 else 2
    gaussian = np.exp(-0.5 * (np.arange(-half, half + 1) / softness) ** 2)
    mirrored = np.pad(sharp / sharp.sum(), half, mode="reflect")
    for axis_number in (0, 1):
        mirrored = np.apply_along_axis(np.convolve, axis_number, mirrored, gaussian / gaussian.sum(), "valid")
    # What float32 has as zero, or next to it, needs no tap.
    mirrored[mirrored < 1e-12] = 0.0
    empty = int(np.flatnonzero(mirrored.any(0))[0])
    return np.ascontiguousarray(mirrored[empty : len(mirrored) - empty, empty : len(mirrored) - empty])


def _mirror(size: int, reach: int, device: torch.device) -> Tensor:
    """For places ``-reach`` to ``size + reach - 1`` the pixel there: mirrored about the border pixels."""
    period = max(2 * (size - 1), 1)
    place = torch.arange(-reach, size + reach, device=device).remainder(period)
    return torch.minimum(place, period - place).clamp_(max=size - 1)


def _correlate(images: Tensor, kernel: np.ndarray) -> Tensor:
    """Correlation by way of frequencies: cuDNN might round to ten bits, and 441 taps are as many passes."""
    reach, (height, width), device = len(kernel) // 2, images.shape[2:], images.device
    padded = images[:, :, _mirror(height, reach, device)][:, :, :, _mirror(width, reach, device)].float()
    size = [1 << (length - 1).bit_length() for length in padded.shape[2:]]
    # A disk is symmetric: correlation is convolution.
    taps = on(kernel.astype(np.float32), device)
    spectrum = torch.fft.rfft2(padded, s=size).mul_(torch.fft.rfft2(taps, s=size))
    return truncate(torch.fft.irfft2(spectrum, s=size)[:, :, 2 * reach :, 2 * reach :][:, :, :height, :width])


# Glass.


def _smooth(x: Tensor, weights: list[float]) -> Tensor:
    """Gaussian blur of float32 ``(B, 3, H, W)``: weights of distances 0, 1, ... pixels; the border goes on outside."""
    reach = len(weights) - 1
    for axis in (2, 3):
        size = x.shape[axis]
        place = torch.arange(-reach, size + reach, device=x.device).clamp_(0, size - 1)
        padded = x.index_select(axis, place)
        x = padded.narrow(axis, reach, size) * weights[0]
        for distance, weight in enumerate(weights[1:], 1):
            x.add_(padded.narrow(axis, reach - distance, size), alpha=weight)
            x.add_(padded.narrow(axis, reach + distance, size), alpha=weight)
    return x


def _shuffle(words: Tensor, height: int, width: int, delta: int) -> Tensor:
    """Where each pixel of the result of glass blur's passes comes from.

    A pass is sequential: later pixels take values that earlier ones have taken. But all that a pixel needs is who it
    takes from, and whether that one has been through this pass already; such chains are followed in parallel.

    Args:
        words: int64 ``(B, passes, H * W)``.
        height: rows.
        width: columns.
        delta: largest offset, pixels.

    Returns:
        int64 ``(B, H * W)``, flat places in the image before the first pass.
    """
    here = torch.arange(height * width, device=words.device)
    row, column = here // width, here % width
    inner = (row > delta) & (row <= height - delta) & (column > delta) & (column <= width - delta)
    right, down = ((half * (2 * delta) >> 16) - delta for half in (words & 0xFFFF, words >> 16))
    source = torch.where(inner, here + down * width + right, here)
    place = here.expand(len(words), -1)
    for taken in source.unbind(1):
        if delta > 1:
            # Offsets of at most 1 only go to pixels that the pass has yet to reach; others may go back.
            follow = torch.where((taken > here) & inner[taken], taken, here)
            for _ in range(_JUMPS):
                follow = follow.gather(1, follow)
            taken = taken.gather(1, follow)
        place = place.gather(1, taken)
    return place
