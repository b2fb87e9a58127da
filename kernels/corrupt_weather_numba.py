"""The compiled half of :mod:`fastmoll.kernels.corrupt_weather`; importing this file imports Numba.

Each function does the images ``first`` to ``last`` of a batch of uint8 planes ``(B, C, H, W)`` and lets go of the GIL.
Numba promotes to float64 and int64 wherever a literal or an unsigned number meets a signed one; hence the typed
constants. Nothing is fused: sums are rounded as in plain torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastmoll.kernels import corruption_job
from fastmoll.kernels.compiled_numba import compiled as _compiled
from fastmoll.kernels.philox_numba import sample_words

# What comes from other files, which Numba's cache does not watch (tests/test_numba_cache.py): 5b614ff53a0c


_FIRST = np.uint64(0)
_ZERO, _ONE, _TOP = np.float32(0.0), np.float32(1.0), np.float32(255.0)
_NUDGE, _QUARTER = np.float32(corruption_job.NUDGE), np.float32(0.25)
_RED, _GREEN, _BLUE = np.float32(0.299), np.float32(0.587), np.float32(0.114)
_GLOW, _WHITE = np.float32(1.5), np.float32(127.5)
_LEVEL, _UNIT = np.float32(1.0 / 255.0), np.float32(2.0**-31)


@_compiled
def _byte(grey: Any) -> Any:
    return np.uint8(np.int32(min(max(grey + _NUDGE, _ZERO), _TOP)))


@_compiled
def flakes(
    layers: Any,
    above: Any,
    below: Any,
    lower: Any,
    left: Any,
    right: Any,
    further: Any,
    inside_rows: Any,
    inside_columns: Any,
    heights: Any,
    threshold: Any,
    sample: Any,
    middle: Any,
    seed: Any,
    first: Any,
    last: Any,
) -> None:
    """The layers of snow before they are blurred, ``(B, 1, H, W)``. All sums are exact: see the definition."""
    _, _, height, width = layers.shape
    pixels = inside_rows * inside_columns
    words = np.empty((4, (pixels + 7) // 4), np.uint32)
    field = np.empty((inside_rows, inside_columns), np.float64)
    flat, row = field.reshape(pixels), np.empty(inside_columns, np.float64)
    for b in range(first, last):
        sample_words(_FIRST, sample[b], middle, seed, words)
        for i in range(pixels):
            flat[i] = heights[words[i & 3, (i >> 2) + 1] >> np.uint32(16)]
        layer = layers[b, 0]
        for y in range(height):
            upper, under, part = field[above[y]], field[below[y]], lower[y]
            for x in range(inside_columns):
                row[x] = upper[x] + (under[x] - upper[x]) * part
            for x in range(width):
                near = row[left[x]]
                value = near + (row[right[x]] - near) * further[x]
                value = 0.0 if value < threshold else min(max(value, 0.0), 1.0)
                layer[y, x] = np.uint8(np.int32(value * 255.0))


@_compiled
def snow(images: Any, out: Any, layers: Any, keep: Any, first: Any, last: Any) -> None:
    """Whiten the images and add their layers."""
    _, _, height, width = images.shape
    rest = _ONE - keep
    for b in range(first, last):
        layer = layers[b, 0]
        for y in range(height):
            red, green, blue = images[b, 0, y], images[b, 1, y], images[b, 2, y]
            r, g, bl = out[b, 0, y], out[b, 1, y], out[b, 2, y]
            falling, turned = layer[y], layer[height - 1 - y]
            for x in range(width):
                x0, x1, x2 = np.float32(red[x]), np.float32(green[x]), np.float32(blue[x])
                glow = (x0 * _RED + x1 * _GREEN + x2 * _BLUE) * _GLOW + _WHITE
                flake, other = np.float32(falling[x]), np.float32(turned[width - 1 - x])
                r[x] = _byte(x0 * keep + max(x0, glow) * rest + flake + other)
                g[x] = _byte(x1 * keep + max(x1, glow) * rest + flake + other)
                bl[x] = _byte(x2 * keep + max(x2, glow) * rest + flake + other)


@_compiled
def _mirror(place: Any, size: Any) -> Any:
    period = max(2 * (size - 1), 1)
    place = place % period
    return min(place, period - place, size - 1)


@_compiled
def frost(
    images: Any, out: Any, flat: Any, size: Any, base: Any, corner: Any, table: Any, first: Any, last: Any
) -> None:
    """Look image and texture up in ``table``; ``size``, ``base`` and ``corner`` are each image's own."""
    _, channels, height, width = images.shape
    columns = np.empty(width, np.int64)
    for b in range(first, last):
        tall, wide = size[b, 0], size[b, 1]
        for x in range(width):
            columns[x] = _mirror(corner[b, 1] + x, wide)
        for c in range(channels):
            for y in range(height):
                begin = base[b] + (c * tall + _mirror(corner[b, 0] + y, tall)) * wide
                texture, image, result = flat[begin : begin + wide], images[b, c, y], out[b, c, y]
                for x in range(width):
                    result[x] = table[texture[columns[x]], image[x]]


@_compiled
def brightness(images: Any, out: Any, table: Any, first: Any, last: Any) -> None:
    """Look each channel up in ``table`` by the largest of the pixel's."""
    _, _, height, width = images.shape
    pixels = height * width
    for b in range(first, last):
        image, result = images[b].reshape(3, pixels), out[b].reshape(3, pixels)
        red, green, blue = image[0], image[1], image[2]
        for i in range(pixels):
            row = table[max(red[i], green[i], blue[i])]
            result[0, i], result[1, i], result[2, i] = row[red[i]], row[green[i]], row[blue[i]]


@_compiled
def _plasma(field: Any, amplitudes: Any) -> None:
    """The fractal, in the place of its uniform numbers: each gives way when its own point is reached."""
    side = len(field)
    field[0, 0] = _ZERO
    step, mask = side, side - 1
    for level in range(len(amplitudes)):
        amplitude, half = amplitudes[level], step >> 1
        for y in range(half, side, step):
            up, here, down = field[y - half], field[y], field[(y + half) & mask]
            for x in range(half, side, step):
                left, right = x - half, (x + half) & mask
                total = up[left] + down[left] + (up[right] + down[right])
                here[x] = total * _QUARTER + here[x] * amplitude
        for y in range(0, side, step):
            up, here, down = field[(y - half) & mask], field[y], field[y + half]
            for x in range(half, side, step):
                total = down[x] + up[x] + (here[x - half] + here[(x + half) & mask])
                here[x] = total * _QUARTER + here[x] * amplitude
        for y in range(half, side, step):
            up, here, down = field[y - half], field[y], field[(y + half) & mask]
            for x in range(0, side, step):
                total = here[x + half] + here[(x - half) & mask] + (up[x] + down[x])
                here[x] = total * _QUARTER + here[x] * amplitude
        step = half


@_compiled
def fog(
    images: Any,
    out: Any,
    thickness: Any,
    amplitudes: Any,
    sample: Any,
    middle: Any,
    seed: Any,
    first: Any,
    last: Any,
) -> None:
    """Add each image's fractal and take its contrast back."""
    _, channels, height, width = images.shape
    side = 1 << len(amplitudes)
    words = np.empty((4, side * side // 4), np.uint32)
    field, mist = np.empty((side, side), np.float32), np.empty((height, width), np.float32)
    flat = field.reshape(side * side)
    for b in range(first, last):
        sample_words(_FIRST, sample[b], middle, seed, words)
        for i in range(side * side // 4):
            for k in range(4):
                flat[4 * i + k] = np.float32(words[k, i]) * _UNIT - _ONE
        _plasma(field, amplitudes)
        low, high = flat[0], flat[0]
        for i in range(side * side):
            low, high = min(low, flat[i]), max(high, flat[i])
        scale = _TOP * thickness / (high - low)
        top = np.uint8(0)
        for c in range(channels):
            for y in range(height):
                for x in range(width):
                    top = max(top, images[b, c, y, x])
        largest = np.float32(top) * _LEVEL
        share = largest / (largest + thickness)
        for y in range(height):
            for x in range(width):
                mist[y, x] = (field[y, x] - low) * scale
        for c in range(channels):
            for y in range(height):
                image, result, cloud = images[b, c, y], out[b, c, y], mist[y]
                for x in range(width):
                    result[x] = _byte((np.float32(image[x]) + cloud[x]) * share)
