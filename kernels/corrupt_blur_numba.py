"""The compiled half of :mod:`fastmoll.kernels.corrupt_blur`; importing this file imports Numba.

Each function does the images ``first`` to ``last`` of a batch of uint8 planes ``(B, C, H, W)`` and lets go of the GIL.
Numba promotes to float64 and int64 wherever a literal or an unsigned number meets a signed one; hence the typed
constants.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastmoll.kernels import corruption_job
from fastmoll.kernels.compiled_numba import compiled as _compiled
from fastmoll.kernels.compiled_numba import fused as _fused
from fastmoll.kernels.philox_numba import sample_words

# What comes from other files, which Numba's cache does not watch (tests/test_numba_cache.py): 5b614ff53a0c


_FIRST = np.uint64(0)
_ZERO, _TOP, _ROUND = np.float32(0.0), np.float32(255.0), np.float32(0.5)
_NUDGE = np.float32(corruption_job.NUDGE)


@_compiled
def _byte(grey: Any, more: Any, out: Any) -> None:
    for i in range(len(out)):
        out[i] = np.uint8(np.int32(min(max(grey[i] + more, _ZERO), _TOP)))


@_fused
def _add_four(total: Any, s: Any, a: Any, b: Any, c: Any, d: Any, weights: Any) -> None:
    """Four taps at a time, so that sums stay in registers for as long; places are those in ``s``."""
    s0, s1, s2, s3 = s[a:], s[b:], s[c:], s[d:]
    k0, k1, k2, k3 = weights[0], weights[1], weights[2], weights[3]
    for x in range(len(total)):
        total[x] += (s0[x] * k0 + s1[x] * k1) + (s2[x] * k2 + s3[x] * k3)


@_fused
def _add(total: Any, s: Any, weight: Any) -> None:
    for x in range(len(total)):
        total[x] += s[x] * weight


@_fused
def _add_two(total: Any, s: Any, t: Any, weight: Any) -> None:
    for x in range(len(total)):
        total[x] += (s[x] + t[x]) * weight


@_compiled
def defocus(
    images: Any, out: Any, down: Any, right: Any, weights: Any, rows: Any, columns: Any, first: Any, last: Any
) -> None:
    """Correlation with a kernel whose rows above the middle are those below.

    ``down`` and ``right`` are its taps, rows from the middle and columns from the left; ``rows`` and ``columns`` say
    which pixel is where in the padded image.
    """
    _, channels, height, width = images.shape
    wide, reach = len(columns), (len(rows) - height) // 2
    padded = np.empty((len(rows), wide), np.float32)
    pairs = np.empty((reach + 1, wide), np.float32)
    flat = pairs.reshape(-1)
    place = down * wide + right
    total = np.empty(width, np.float32)
    whole = len(weights) // 4 * 4
    for b in range(first, last):
        for c in range(channels):
            image, result = images[b, c], out[b, c]
            for i in range(len(rows)):
                for j in range(wide):
                    padded[i, j] = np.float32(image[rows[i], columns[j]])
            for y in range(height):
                middle = y + reach
                pairs[0] = padded[middle]
                for distance in range(1, reach + 1):
                    above, below, pair = padded[middle - distance], padded[middle + distance], pairs[distance]
                    for j in range(wide):
                        pair[j] = above[j] + below[j]
                total[:] = _ZERO
                for k in range(0, whole, 4):
                    _add_four(total, flat, place[k], place[k + 1], place[k + 2], place[k + 3], weights[k : k + 4])
                for k in range(whole, len(weights)):
                    _add(total, flat[place[k] :], weights[k])
                _byte(total, _NUDGE, result[y])


@_compiled
def _smooth(image: Any, weights: Any, row: Any, total: Any, out: Any) -> None:
    """Gaussian blur of a float32 plane; ``row`` is scratch, wider than the plane by the reach on either side."""
    height, width = image.shape
    reach = len(weights) - 1
    inner = row[reach : reach + width]
    for y in range(height):
        inner[:] = _ZERO
        _add(inner, image[y], weights[0])
        for distance in range(1, reach + 1):
            _add_two(inner, image[max(y - distance, 0)], image[min(y + distance, height - 1)], weights[distance])
        row[:reach], row[reach + width :] = inner[0], inner[width - 1]
        total[:] = _ZERO
        _add(total, inner, weights[0])
        for distance in range(1, reach + 1):
            _add_two(total, row[reach - distance :], row[reach + distance :], weights[distance])
        _byte(total, _NUDGE, out[y])


@_compiled
def glass(
    images: Any,
    out: Any,
    weights: Any,
    delta: Any,
    passes: Any,
    sample: Any,
    middle: Any,
    seed: Any,
    first: Any,
    last: Any,
) -> None:
    """Gaussian blur, passes of pixels that take each other's values, Gaussian blur."""
    _, channels, height, width = images.shape
    pixels = height * width
    words = np.empty((4, (passes * pixels + 3) // 4), np.uint32)
    plane, total = np.empty((height, width), np.float32), np.empty(width, np.float32)
    row = np.empty(width + 2 * (len(weights) - 1), np.float32)
    # The channels of a pixel in one number.
    packed = np.empty(pixels, np.int32)
    span, d = np.uint32(2 * delta), np.int32(delta)
    for b in range(first, last):
        packed[:] = 0
        for c in range(channels):
            flat, source, shift = out[b, c].reshape(pixels), images[b, c], np.int32(8 * c)
            plane[:] = source
            _smooth(plane, weights, row, total, out[b, c])
            for i in range(pixels):
                packed[i] |= np.int32(flat[i]) << shift
        sample_words(_FIRST, sample[b], middle, seed, words)
        for k in range(passes):
            for y in range(height - delta, delta, -1):
                for x in range(width - delta, delta, -1):
                    place = y * width + x
                    number = k * pixels + place
                    word = words[number & 3, number >> 2]
                    right = np.int32(np.uint32((word & np.uint32(0xFFFF)) * span) >> np.uint32(16)) - d
                    down = np.int32(np.uint32((word >> np.uint32(16)) * span) >> np.uint32(16)) - d
                    packed[place] = packed[place + down * width + right]
        for c in range(channels):
            flat, shift = plane.reshape(pixels), np.int32(8 * c)
            for i in range(pixels):
                flat[i] = np.float32((packed[i] >> shift) & np.int32(255))
            _smooth(plane, weights, row, total, out[b, c])


@_compiled
def motion(images: Any, out: Any, weights: Any, down: Any, right: Any, first: Any, last: Any) -> None:
    """Weighted sums of shifted images; ``down`` and ``right``, ``(B, taps)``, are each image's own."""
    _, channels, height, width = images.shape
    taps = len(weights)
    total = np.empty(width, np.float32)
    for b in range(first, last):
        dx, dy = right[b], down[b]
        reach = np.int64(0)
        for k in range(taps):
            reach = max(reach, abs(dx[k]))
        padded = np.empty((height, width + 2 * reach), np.float32)
        for c in range(channels):
            image, result = images[b, c], out[b, c]
            padded[:, reach : reach + width] = image
            for y in range(height):
                padded[y, :reach], padded[y, reach + width :] = np.float32(image[y, 0]), np.float32(image[y, width - 1])
            for y in range(height):
                total[:] = _ZERO
                for k in range(taps):
                    _add(total, padded[min(max(y + dy[k], 0), height - 1)][reach + dx[k] :], weights[k])
                _byte(total, _ROUND, result[y])


@_compiled
def zoom(
    images: Any,
    out: Any,
    above: Any,
    below: Any,
    lower: Any,
    left: Any,
    right: Any,
    further: Any,
    first: Any,
    last: Any,
) -> None:
    """Mean of the image and its enlargements: for each, ``(factors, H)`` and ``(factors, W)``, pixels and weights."""
    _, channels, height, width = images.shape
    factors = len(above)
    share = np.float32(1.0 / (factors + 1.0))
    plane, total = np.empty((height, width), np.float32), np.empty((height, width), np.float32)
    row = np.empty(width, np.float32)
    line = np.empty(width, np.float32)
    for b in range(first, last):
        for c in range(channels):
            plane[:] = images[b, c]
            total[:] = plane
            for k in range(factors):
                u, v = left[k], right[k]
                weight = further[k].astype(np.float32)
                for y in range(height):
                    upper, under, part = plane[above[k, y]], plane[below[k, y]], np.float32(lower[k, y])
                    for x in range(width):
                        row[x] = upper[x] + (under[x] - upper[x]) * part
                    sums = total[y]
                    for x in range(width):
                        near = row[u[x]]
                        sums[x] += near + (row[v[x]] - near) * weight[x]
            for y in range(height):
                for x in range(width):
                    line[x] = total[y, x] * share
                _byte(line, _NUDGE, out[b, c, y])
