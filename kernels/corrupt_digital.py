"""The digital corruptions of ImageNet-C, CIFAR-C and TinyImageNet-C (Hendrycks and Dietterich, ICLR 2019) on batches of
uint8 images.

===================  ===============================================================================================
corruption           definition
===================  ===============================================================================================
`contrast`           ``m + c (x - m)``, ``m`` the mean of the image's channel
`elastic_transform`  an affine map that takes three points near the centre to drawn places near them, pixels outside
                     mirrored about the border pixel; then each pixel from a place displaced by noise that a Gaussian
                     smoothed, pixels outside mirrored about the border; bilinear
`pixelate`           Pillow's resizing by areas to a share of the sides, truncated to pixels, and back, rows first: the
                     bits of Pillow, which of late does columns first for some pictures that are no squares
`jpeg_compression`   JPEG at the quality ``c`` and back; bits as libjpeg's: :mod:`fastmoll.kernels.jpeg_loss`
===================  ===============================================================================================

Results of the first two are clipped and truncated to whole numbers, not rounded, as published; what lies within 1/256
below a whole number counts as it, for elastic transforms. OpenCV, which made the published sets' affine maps, rounded
places to 1/32 of a pixel then; here they are exact.

Draws come from the sample's ``CORRUPT`` stream (:mod:`fastmoll.kernels.philox`): words 0 to 5 are the places of the
three points, x before y; word ``8 + row * W + column`` is the displacement to the right of a pixel before smoothing,
``H * W`` words further on the one down.

On a CPU with Numba all four are compiled; otherwise they are plain torch, on any device. Both give the same bits but
for elastic transforms, where a level may differ.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from fastmoll.kernels import philox
from fastmoll.kernels.corruption_job import in_threads, on, start, truncate
from fastmoll.kernels.jpeg_loss import jpeg_loss, quantisation

# Words before those of the displacements.
_SKIP: Final = 8
# Images whose displacements are in memory at a time, where the work is compiled.
_PORTION: Final = 32
# Bits of the fractions that Pillow weighs pixels with.
PRECISION: Final = 22


def contrast(images: Tensor, severity: int, *, seed: int, index: Tensor) -> Tensor:
    """Bring each channel nearer to its mean; nothing in it is drawn.

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
    job = start("contrast", images, severity, seed, index)
    (factor,) = job.constants
    if job.compiled:
        from fastmoll.kernels import corrupt_digital_numba as compiled

        return job.threads(compiled.contrast, factor)
    level = torch.arange(256, device=images.device, dtype=torch.float64) / 255.0

    def work(part: Tensor, _: Tensor) -> Tensor:
        values = part.flatten(2)
        mean = values.sum(2, keepdim=True).double() / (255.0 * values.shape[2])
        table = ((level - mean) * factor + mean).clamp_(0.0, 1.0).mul_(255.0).to(torch.uint8)
        return table.gather(2, values.long()).view(part.shape)

    return job.portions(work)


def elastic_transform(images: Tensor, severity: int, *, seed: int, index: Tensor) -> Tensor:
    """Stretch like rubber: arguments, result and errors as for :func:`contrast`."""
    job = start("elastic_transform", images, severity, seed, index)
    height, smoothness, _ = job.constants
    rows, columns = images.shape[2:]
    # In float64: a trainer's wish for fast products of float32 would move pixels by hundredths.
    across, down = (
        on(smoothing(size, smoothness) * scale, images.device) for size, scale in ((columns, height), (rows, 1))
    )

    def displacements(noise: Tensor) -> Tensor:
        return (down @ (noise.double() * 2.0 - 1.0).view(-1, 2, rows, columns) @ across.T).float()

    if not job.compiled:

        def work(part: Tensor, ids: Tensor) -> Tensor:
            words = job.words(ids, _SKIP + (2 * rows * columns if height else 0))
            uniform = philox.uniform(words)
            matrix = affine(uniform[:, :6], rows, columns, job.constants[2])
            moved = displacements(uniform[:, _SKIP:]) if height else None
            return _stretch(part, matrix, moved)

        return job.portions(work)
    from fastmoll.kernels import corrupt_digital_numba as compiled
    from fastmoll.kernels import corrupt_noise_numba as noises

    out = torch.empty_like(images, memory_format=torch.contiguous_format)
    for first in range(0, len(images), _PORTION):
        part = slice(first, first + _PORTION)
        share = job._replace(images=images[part], index=index[part])
        matrix = affine(philox.uniform(share.words(share.index, 6)), rows, columns, job.constants[2]).numpy()
        count = 2 * rows * columns if height else 0
        noise = torch.empty(len(share.images), count, dtype=torch.float32, device="cpu")
        if height:
            fields, key = noise.numpy(), share.key()
            in_threads(functools.partial(noises.uniform, fields, _SKIP, *key), share.images)
        moved = displacements(noise) if height else noise.view(len(noise), 2, 0, 0)
        out[part] = share.threads(compiled.stretch, matrix, moved.numpy())
    return out


def pixelate(images: Tensor, severity: int, *, seed: int, index: Tensor) -> Tensor:
    """Shrink and enlarge; nothing in it is drawn: arguments, result and errors as for :func:`contrast`."""
    job = start("pixelate", images, severity, seed, index)
    (share,) = job.constants
    rows, columns = (areas(size, max(1, int(size * share))) for size in images.shape[2:])
    if job.compiled:
        from fastmoll.kernels import corrupt_digital_numba as compiled

        return job.threads(compiled.pixelate, *rows, *columns)
    device = images.device
    (top, bottom, weight_down, back_down), (left, right, weight_across, back_across) = (
        tuple(on(array, device) for array in axis) for axis in (rows, columns)
    )

    def work(part: Tensor, _: Tensor) -> Tensor:
        x = _shrink(part.int(), left, right, weight_across)
        x = _shrink(x.mT, top, bottom, weight_down).mT
        return x.to(torch.uint8).index_select(2, back_down).index_select(3, back_across)

    return job.portions(work)


def jpeg_compression(images: Tensor, severity: int, *, seed: int, index: Tensor) -> Tensor:
    """Compress by JPEG; nothing in it is drawn: arguments, result and errors as for :func:`contrast`."""
    job = start("jpeg_compression", images, severity, seed, index)
    quality = int(job.constants[0])
    if not job.compiled:
        return job.portions(lambda part, _: jpeg_loss(part, quality))
    from fastmoll.kernels import jpeg_loss_numba as compiled

    tables = np.ascontiguousarray(quantisation(quality).transpose(0, 2, 1)).reshape(2, 64)
    return job.threads(compiled.jpeg, tables)


# Elastic transforms.


@functools.lru_cache(64)
def smoothing(size: int, sigma: float) -> np.ndarray:
    """A Gaussian filter of one axis as a matrix: cut off at three standard deviations, pixels outside mirrored.

    As SciPy's ``gaussian_filter1d(mode="reflect", truncate=3)``, whose mirror lies at the edge of the border pixel.

    Returns:
        float64 ``(size, size)``; the identity for ``sigma`` 0.
    """
    reach = int(3.0 * sigma + 0.5)
    place = np.arange(-reach, reach + 1)
    weights = np.exp(-0.5 * (place / sigma) ** 2) if sigma else np.ones(1)
    here = np.arange(size)
    there = (here[:, None] + place) % (2 * size)
    matrix = np.zeros((size, size))
    np.add.at(matrix, (here[:, None], np.minimum(there, 2 * size - 1 - there)), weights / weights.sum())
    return matrix


def affine(uniform: Tensor, height: int, width: int, shift: float) -> Tensor:
    """The map from places of the result to places of the image, ``(x, y) = matrix (column, row, 1)``.

    It takes the drawn places of three points back to the points: the centre plus and minus a third of the shorter
    side, in both directions, and in x plus but in y minus it.

    Args:
        uniform: ``(B, 6)`` in (0, 1], floating point.
        height: rows.
        width: columns.
        shift: largest distance of a drawn coordinate to the point's, pixels.

    Returns:
        float32 ``(B, 2, 3)``.
    """
    side = min(height, width) // 3
    x, y = width // 2, height // 2
    moved = (uniform.double() * 2.0 - 1.0) * shift
    x0, y0, x1, y1, x2, y2 = moved.unbind(1)
    # From the third point, in the result: to the first and to the second.
    ax, ay, bx, by = x0 - x2 + 2 * side, y0 - y2 + 2 * side, x1 - x2 + 2 * side, y1 - y2
    # The three may come to lie on a line, or next to it.
    area = ax * by - bx * ay
    scale = 2 * side / torch.where(area.abs() < 1.0, 1.0, area)
    # In the image the first lies at (2, 2) sides from the third, the second at (2, 0).
    xx, xy = scale * (by - ay), scale * (ax - bx)
    yx, yy = scale * by, scale * -bx
    x2, y2 = x2 + (x - side), y2 + (y - side)
    xc, yc = x - side - xx * x2 - xy * y2, y - side - yx * x2 - yy * y2
    return torch.stack([xx, xy, xc, yx, yy, yc], 1).view(-1, 2, 3).float()


def _stretch(images: Tensor, matrix: Tensor, moved: Tensor | None) -> Tensor:
    height, width = images.shape[2:]
    column = torch.arange(width, device=images.device, dtype=torch.float32)
    row = torch.arange(height, device=images.device, dtype=torch.float32).view(-1, 1)
    (ax, bx, cx), (ay, by, cy) = ((entry.view(-1, 1, 1) for entry in line.unbind(1)) for line in matrix.unbind(1))
    x = _sample(images.float(), ax * column + bx * row + cx, ay * column + by * row + cy, mirror_pixel=True)
    if moved is not None:
        x = _sample(x, column + moved[:, 0], row + moved[:, 1], mirror_pixel=False)
    return truncate(x)


def _sample(images: Tensor, x: Tensor, y: Tensor, *, mirror_pixel: bool) -> Tensor:
    """Bilinear; outside, mirrored about the centre of the border pixel or its edge."""
    height, width = images.shape[2:]
    if mirror_pixel:
        x, y = (2.0 * place / max(size - 1, 1) - 1.0 for place, size in ((x, width), (y, height)))
    else:
        x, y = ((2.0 * place + 1.0) / size - 1.0 for place, size in ((x, width), (y, height)))
    grid = torch.stack([x, y], 3)
    return grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=mirror_pixel)


# Pixelate.


@functools.lru_cache(64)
def areas(size: int, less: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Resizing an axis by areas as Pillow does it: whole pixels whose centres an area holds, all of equal weight.

    Returns:
        int32 ``(less,)`` three times: first pixel, the one after the last, and the weight, times ``2^PRECISION``; and
        int32 ``(size,)``: which of the ``less`` each of the enlarged pixels is.
    """
    scale = size / less
    centre = (np.arange(less) + 0.5) * scale
    first = np.maximum((centre - 0.5 * scale + 0.5).astype(np.int32), 0)
    last = np.minimum((centre + 0.5 * scale + 0.5).astype(np.int32), size)
    # A pixel whose centre is on the border of the area belongs to it on the right only.
    first += ((first - centre + 0.5) / scale <= -0.5).astype(np.int32)
    last -= ((last - 1 - centre + 0.5) / scale > 0.5).astype(np.int32)
    weight = (1.0 / (last - first) * 2**PRECISION + 0.5).astype(np.int32)
    back = ((np.arange(size) + 0.5) * (less / size)).astype(np.int32)
    return first, last, weight, np.minimum(back, less - 1)


def _shrink(x: Tensor, first: Tensor, last: Tensor, weight: Tensor) -> Tensor:
    """Means over areas of the last axis, int32, rounded as Pillow rounds."""
    total = torch.nn.functional.pad(x.cumsum(3, dtype=torch.int32), (1, 0))
    mean = (total.index_select(3, last) - total.index_select(3, first)) * weight
    return (mean + (1 << PRECISION - 1)) >> PRECISION
