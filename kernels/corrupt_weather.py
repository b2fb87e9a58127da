"""The weathers of ImageNet-C, CIFAR-C and TinyImageNet-C (Hendrycks and Dietterich, ICLR 2019) on batches of uint8
images.

============  ======================================================================================================
corruption    definition, values in [0, 1]
============  ======================================================================================================
`snow`        ``keep x + (1 - keep) max(x, 1.5 grey(x) + 0.5) + layer + layer turned by 180 degrees``; the layer is
              normal noise, its centre enlarged, black below a threshold, uint8, then under ImageMagick's motion blur
`frost`       ``a x + b texture``: one of five textures, cropped where it is drawn; the textures are taken at 0.2 of
              their size with the constants for 32 pixels, at 0.3 with those for 64 (bilinear between two pixels each
              way, so aliased), in full with those for 224
`fog`         ``(x + height f) m / (m + height)``, ``m`` the image's largest value, ``f`` a plasma fractal in [0, 1]
`brightness`  more value in HSV, hue and saturation as they are: ``x v' / v``, ``v`` the largest of red, green, blue
============  ======================================================================================================

The fractal (diamond-square, periodic, on the power of two at or above the image's longer side) adds to each mean of
four neighbours a uniform number in ``±(100 / decay^level)²``: the square is in the published generator. Values are
clipped and truncated to uint8, as in :mod:`fastmoll.kernels.corrupt_blur`, to which the rules about randomness and
backends and the one about sums next to whole numbers belong.

Draws come from the sample's ``CORRUPT`` stream. Frost: words 0 to 2 are texture, row and column. Fog: word
``row * side + column`` is the number added there. Snow: word 0 is the angle; word ``4 + row * columns + column`` is the
normal number of a pixel of the part that is enlarged, 65,536 levels of equal probability in steps of 2^-12. The
weights of the enlargement are multiples of 2^-18; so all sums before the threshold are exact in float64, and no backend
sees a flake that another does not.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fastmoll.kernels.corrupt_blur import blur_along, enlarged, resample
from fastmoll.kernels.corruption_constants import published_size
from fastmoll.kernels.corruption_job import in_threads, on, start, truncate
from fastmoll.kernels.draw import uniform_double
from fastmoll.kernels.frost_textures import VARIABLE, frost_source, frost_textures

__all__ = ["brightness", "fog", "frost", "frost_source", "frost_textures", "snow"]

_GREY: Final = (0.299, 0.587, 0.114)
_LEVELS: Final = 2**16
_SCALE: Final = {32: 0.2, 64: 0.3, 224: 1.0}


def snow(images: Tensor, severity: int, *, seed: int, index: Tensor) -> Tensor:
    """Snow: arguments, result and errors as for :func:`fastmoll.kernels.corrupt_blur.defocus_blur`."""
    job = start("snow", images, severity, seed, index)
    mean, deviation, factor, threshold, radius, sigma, keep = job.constants
    height, width = images.shape[2:]
    rows, columns = (_exact(size, factor) for size in (height, width))
    inside = math.ceil(height / factor), math.ceil(width / factor)
    heights = _normals(mean, deviation)

    def angle(ids: Tensor) -> Tensor:
        return uniform_double(job.words(ids, 1).squeeze(1)) * 90.0 - 135.0

    if job.compiled:
        from fastmoll.kernels import corrupt_weather_numba as compiled

        layers = torch.empty(len(images), 1, height, width, dtype=torch.uint8, device="cpu")
        fall: Callable[..., Any] = compiled.flakes
        arguments = (layers.numpy(), *rows, *columns, *inside, heights, threshold, *job.key())
        in_threads(lambda first, last: fall(*arguments, first, last), layers)
        layers = blur_along(layers, angle(index), radius, sigma, job)
        return job.threads(compiled.snow, layers.numpy(), np.float32(keep))
    device = images.device
    rows_there, columns_there = (tuple(on(array, device) for array in table) for table in (rows, columns))
    heights_there = on(heights, device)

    def work(part: Tensor, ids: Tensor) -> Tensor:
        words = job.words(ids, 4 + inside[0] * inside[1])[:, 4:].view(-1, *inside)
        layer = resample(heights_there[words >> 16], rows_there, columns_there)
        layer = torch.where(layer < threshold, 0.0, layer).clamp_(0.0, 1.0).mul_(255.0).to(torch.uint8)
        layer = blur_along(layer.unsqueeze(1), angle(ids), radius, sigma)
        x = part.float()
        grey = x[:, :1] * _GREY[0] + x[:, 1:2] * _GREY[1] + x[:, 2:] * _GREY[2]
        white = torch.maximum(x, grey.mul_(1.5).add_(127.5)).mul_(1.0 - keep)
        return truncate(x.mul_(keep).add_(white).add_(layer).add_(layer.flip(2, 3)))

    return job.portions(work)


def frost(images: Tensor, severity: int, *, seed: int, index: Tensor) -> Tensor:
    """Frost: arguments, result and errors as for :func:`fastmoll.kernels.corrupt_blur.defocus_blur`.

    An image larger than a texture sees it mirrored at its border.
    """
    job = start("frost", images, severity, seed, index)
    height, width = images.shape[2:]
    scale = _SCALE[published_size(min(height, width))]
    flat, size, base = _library(os.environ.get(VARIABLE, ""), scale, images.device)
    table = on(_frosted(*job.constants), images.device)
    words = job.words(index, 3)
    texture = words[:, 0] * len(size) >> 32
    size, base = size[texture], base[texture]
    room = (size - torch.stack([base.new_full((), height), base.new_full((), width)])).clamp_(min=1)
    corner = words[:, 1:] * room >> 32
    if job.compiled:
        from fastmoll.kernels import corrupt_weather_numba as compiled

        return job.threads(compiled.frost, *(part.numpy() for part in (flat, size, base, corner, table)))
    places = [torch.arange(length, device=images.device) for length in (height, width)]

    def work(part: Tensor, which: Tensor) -> Tensor:
        row, column = (
            _mirror(corner[which, axis].unsqueeze(1) + places[axis], size[which, axis].unsqueeze(1)) for axis in (0, 1)
        )
        tall, wide = size[which].unbind(1)
        place = (row * wide.unsqueeze(1) + base[which].unsqueeze(1)).unsqueeze(2) + column.unsqueeze(1)
        channels = [flat[place + (tall * wide * c).view(-1, 1, 1)] for c in range(3)]
        return table[torch.stack(channels, 1).long(), part.long()]

    # A portion's positions in the batch, instead of its ids: all is drawn already.
    return job._replace(index=torch.arange(len(images), device=images.device)).portions(work)


def fog(images: Tensor, severity: int, *, seed: int, index: Tensor) -> Tensor:
    """Fog: arguments, result and errors as for :func:`fastmoll.kernels.corrupt_blur.defocus_blur`."""
    job = start("fog", images, severity, seed, index)
    thickness, decay = job.constants
    levels = max((max(images.shape[2:]) - 1).bit_length(), 1)
    amplitudes = [(100.0 / decay**level) ** 2 for level in range(levels)]
    if job.compiled:
        from fastmoll.kernels import corrupt_weather_numba as compiled

        return job.threads(compiled.fog, np.float32(thickness), np.array(amplitudes, np.float32), *job.key())
    side, (height, width) = 2**levels, images.shape[2:]

    def work(part: Tensor, ids: Tensor) -> Tensor:
        uniform = job.words(ids, side * side).view(-1, side, side).float().mul_(2.0**-31).sub_(1.0)
        field = plasma(uniform, amplitudes)
        low, high = (edge.view(-1, 1, 1, 1) for edge in field.flatten(1).aminmax(dim=1))
        largest = part.flatten(1).amax(1).float().mul_(1.0 / 255.0).view(-1, 1, 1, 1)
        mist = (field[:, None, :height, :width] - low) * (255.0 * thickness / (high - low))
        return truncate((part + mist).mul_(largest / (largest + thickness)))

    return job.portions(work)


def brightness(images: Tensor, severity: int, *, seed: int, index: Tensor) -> Tensor:
    """More light; nothing in it is drawn: arguments, result and errors as for
    :func:`fastmoll.kernels.corrupt_blur.defocus_blur`.
    """
    job = start("brightness", images, severity, seed, index)
    table = on(_brighter(*job.constants), images.device)
    if job.compiled:
        from fastmoll.kernels import corrupt_weather_numba as compiled

        return job.threads(compiled.brightness, table.numpy())
    return job.portions(lambda part, _: table[part.amax(1, keepdim=True).long(), part.long()])


def plasma(uniform: Tensor, amplitudes: list[float]) -> Tensor:
    """The fractal of fog, before it is brought to [0, 1].

    Args:
        uniform: the numbers added, before their amplitudes, ``(B, side, side)``, ``side = 2^levels``.
        amplitudes: one a level, coarsest first.

    Returns:
        A tensor like ``uniform``; its corner is 0.
    """
    field = torch.zeros_like(uniform)
    step = field.shape[1]
    for amplitude in amplitudes:
        half = step // 2
        noise = uniform * amplitude

        def fill(rows: slice, columns: slice, total: Tensor, noise: Tensor = noise) -> None:
            field[:, rows, columns] = total.mul_(0.25).add_(noise[:, rows, columns])

        old, new = slice(None, None, step), slice(half, None, step)
        corner = field[:, old, old]
        side = corner + corner.roll(-1, 1)
        fill(new, new, side + side.roll(-1, 2))
        middle = field[:, new, new]
        fill(old, new, middle + middle.roll(1, 1) + (corner + corner.roll(-1, 2)))
        fill(new, old, middle + middle.roll(1, 2) + (corner + corner.roll(-1, 1)))
        step = half
    return field


def _exact(size: int, factor: float) -> tuple[np.ndarray, ...]:
    """One axis of an enlargement, in pixels of the part that is enlarged; weights are multiples of 2^-18."""
    first, second, weight = enlarged(size, factor)
    begin = (size - math.ceil(size / factor)) // 2
    return first - begin, second - begin, np.rint(weight * 2**18) / 2**18


@functools.lru_cache(64)
def _normals(mean: float, deviation: float) -> np.ndarray:
    """Quantiles of a normal distribution, in the middle of each of 65,536 parts, as multiples of 2^-12, float64."""
    probability = (torch.arange(_LEVELS, dtype=torch.float64, device="cpu") + 0.5) / _LEVELS
    quantiles = torch.special.ndtri(probability).numpy() * deviation + mean
    return np.asarray(np.rint(quantiles * 2**12) / 2**12)


@functools.lru_cache(64)
def _frosted(image: float, texture: float) -> np.ndarray:
    """What becomes of a grey level (column) under a texture's (row), uint8 ``(256, 256)``, in float64 as published."""
    level = np.arange(256, dtype=np.float64)
    return np.clip(image * level + texture * level[:, None], 0.0, 255.0).astype(np.uint8)


@functools.lru_cache(64)
def _brighter(more: float) -> np.ndarray:
    """What becomes of a grey level (column) in a pixel by its largest one (row), uint8 ``(256, 256)``.

    The largest level itself in float64 as published, where rounding decides on which side of a whole number it falls.
    """
    level = np.arange(256, dtype=np.float64)
    value = np.clip(level / 255.0 + more, 0.0, 1.0) * 255.0
    scaled = value[:, None] * np.minimum(level / np.maximum(level, 1.0)[:, None], 1.0)
    table = np.floor(scaled + 1e-9)
    np.fill_diagonal(table, np.floor(value))
    return table.astype(np.uint8)


@functools.lru_cache(8)
def _library(folder: str, scale: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The textures one after the other on a device: values, uint8; rows and columns of each; where each begins."""
    flat, sizes, begins = (on(array, device) for array in _textures(folder, scale))
    return flat, sizes, begins


@functools.lru_cache(4)
def _textures(folder: str, scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    textures = [_reduced(texture.numpy(), scale) for texture in frost_textures()]
    ends = np.cumsum([texture.size for texture in textures])
    sizes = np.array([texture.shape[1:] for texture in textures])
    return np.concatenate([texture.ravel() for texture in textures]), sizes, np.concatenate([[0], ends[:-1]])


def _reduced(texture: np.ndarray, scale: float) -> np.ndarray:
    """A texture ``(3, rows, columns)`` at a part of its size, as ``cv2.resize`` does it: bilinear, not smoothed."""
    if scale == 1.0:
        return texture
    values = texture.astype(np.float64)
    for axis in (1, 2):
        size = values.shape[axis]
        place = np.clip((np.arange(round(size * scale)) + 0.5) / scale - 0.5, 0, size - 1)
        first = np.minimum(place.astype(int), max(size - 2, 0))
        weight = np.expand_dims(place - first, 1) if axis == 1 else place - first
        near, far = (values.take(np.minimum(first + k, size - 1), axis) for k in (0, 1))
        values = near + (far - near) * weight
    return np.rint(values).astype(np.uint8)


def _mirror(place: Tensor, size: Tensor) -> Tensor:
    """Places from 0 on, mirrored about the last pixel, and so on."""
    period = (2 * (size - 1)).clamp(min=1)
    place = place.remainder(period)
    return torch.minimum(place, period - place).minimum(size - 1)
