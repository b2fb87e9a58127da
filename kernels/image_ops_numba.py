"""The compiled half of :mod:`fastmoll.kernels.image_ops`; importing this file imports Numba.

The same float32 products and sums in the same order as in plain torch, and no fused ones: the bits are equal. All
functions let go of the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastmoll.kernels import image_ops
from fastmoll.kernels.compiled_numba import compiled as _compiled

# What comes from other files, which Numba's cache does not watch (tests/test_numba_cache.py): 4f220f9adf64


_ZERO, _ONE, _TOP = np.float32(0.0), np.float32(1.0), np.float32(255.0)
_RED, _GREEN, _BLUE = np.float32(0.2989), np.float32(0.587), np.float32(0.114)
_LEVEL = np.float32(1.0 / 255.0)
_FAR = np.float32(2.0**24)
_CHANNELS = (np.uint64(0), np.uint64(1), np.uint64(2))
_I1, _I3 = np.int32(1), np.int32(3)

_ROTATE, _INVERT = image_ops.ROTATE, image_ops.INVERT
_SHEAR_X, _COLOR, _CONTRAST, _SHARPNESS = (
    image_ops.SHEAR_X,
    image_ops.COLOR,
    image_ops.CONTRAST,
    image_ops.SHARPNESS,
)
_BRIGHTNESS, _POSTERIZE, _SOLARIZE = image_ops.BRIGHTNESS, image_ops.POSTERIZE, image_ops.SOLARIZE
_AUTO_CONTRAST, _EQUALIZE = image_ops.AUTO_CONTRAST, image_ops.EQUALIZE


@_compiled
def _only_moves(ax: Any, bx: Any, cx: Any, ay: Any) -> Any:
    """Whether rows stay rows, and their pixels pixels."""
    return bx == _ZERO and ay == _ZERO and (ax == _ONE or ax == -_ONE) and cx == np.rint(cx) and abs(cx) < _FAR


@_compiled
def _shift_rows(image: Any, out: Any, ax: Any, cx: Any, by: Any, cy: Any, y0: Any, y1: Any, x0: Any, x1: Any) -> None:
    """`_nearest` without rotation or shear: rows that are moved as they are, or turned."""
    height, width, _ = image.shape
    source, target, values = image.reshape(-1), out.reshape(-1), 3 * width
    shift = np.int64(cx)
    if ax > _ZERO:  # column j is column j + shift of the image
        first, last = max(x0 - shift, 0), min(x1 - shift, width)
    else:  # shift - j
        first, last = max(shift - x1 + 1, 0), min(shift - x0 + 1, width)
    for i in range(height):
        y = np.rint(by * np.float32(i) + cy)
        row = target[i * values : (i + 1) * values]
        if not (y >= np.float32(y0) and y < np.float32(y1)) or first >= last:
            row[:] = np.uint8(0)
            continue
        row[: 3 * first] = np.uint8(0)
        row[3 * last :] = np.uint8(0)
        start = np.int64(y) * values
        if ax > _ZERO:
            row[3 * first : 3 * last] = source[start + 3 * (first + shift) : start + 3 * (last + shift)]
        else:
            for j in range(first, last):
                pixel = start + 3 * (shift - j)
                for c in range(3):
                    row[3 * j + c] = source[pixel + c]


@_compiled
def _nearest(image: Any, out: Any, matrix: Any, y0: Any, y1: Any, x0: Any, x1: Any) -> None:
    height, width, _ = image.shape
    ax, bx, cx = matrix[0, 0], matrix[0, 1], matrix[0, 2]
    ay, by, cy = matrix[1, 0], matrix[1, 1], matrix[1, 2]
    top, bottom, left, right = np.float32(y0), np.float32(y1), np.float32(x0), np.float32(x1)
    if _only_moves(ax, bx, cx, ay):
        _shift_rows(image, out, ax, cx, by, cy, y0, y1, x0, x1)
        return
    for i in range(height):
        bi, di = bx * np.float32(i), by * np.float32(i)
        for j in range(width):
            x = np.rint(ax * np.float32(j) + bi + cx)
            y = np.rint(ay * np.float32(j) + di + cy)
            if x >= left and x < right and y >= top and y < bottom:
                u, v = np.int64(x), np.int64(y)
                out[i, j, 0], out[i, j, 1], out[i, j, 2] = image[v, u, 0], image[v, u, 1], image[v, u, 2]
            else:
                out[i, j, 0] = out[i, j, 1] = out[i, j, 2] = np.uint8(0)


@_compiled
def _bilinear(image: Any, out: Any, matrix: Any, y0: Any, y1: Any, x0: Any, x1: Any) -> None:
    height, width, _ = image.shape
    ax, bx, cx = matrix[0, 0], matrix[0, 1], matrix[0, 2]
    ay, by, cy = matrix[1, 0], matrix[1, 1], matrix[1, 2]
    top, bottom, left, right = np.float32(y0), np.float32(y1), np.float32(x0), np.float32(x1)
    if _only_moves(ax, bx, cx, ay) and by == _ONE and cy == np.rint(cy):
        _shift_rows(image, out, ax, cx, by, cy, y0, y1, x0, x1)
        return
    source, values = image.reshape(-1), np.int32(3 * width)
    first_row, last_row = np.int32(y0), np.int32(y1 - 1)
    first_column, last_column = np.int32(x0), np.int32(x1 - 1)
    # Places and weights of a row, by vector instructions; then its pixels.
    place, weight = np.empty((4, width), np.int32), np.empty((4, width), np.float32)
    for i in range(height):
        bi, di = bx * np.float32(i), by * np.float32(i)
        for j in range(width):
            x = ax * np.float32(j) + bi + cx
            y = ay * np.float32(j) + di + cy
            inside = x > left - _ONE and x < right and y > top - _ONE and y < bottom
            x, y = x if inside else left, y if inside else top
            fx, fy = np.floor(x), np.floor(y)
            p, q = x - fx, y - fy
            u, v = np.int32(fx), np.int32(fy)
            # A pixel outside weighs nothing, and is read at a place that exists.
            east = p if inside and u < last_column else _ZERO
            west = _ONE - p if inside and u >= first_column else _ZERO
            south = q if v < last_row else _ZERO
            north = _ONE - q if v >= first_row else _ZERO
            weight[0, j], weight[1, j] = west * north, east * north
            weight[2, j], weight[3, j] = west * south, east * south
            u0, u1 = max(u, first_column), min(np.int32(u + _I1), last_column)
            v0, v1 = max(v, first_row), min(np.int32(v + _I1), last_row)
            place[0, j], place[1, j] = np.int32(v0 * values + _I3 * u0), np.int32(v0 * values + _I3 * u1)
            place[2, j], place[3, j] = np.int32(v1 * values + _I3 * u0), np.int32(v1 * values + _I3 * u1)
        for j in range(width):
            a, b, c, d = np.uint64(place[0, j]), np.uint64(place[1, j]), np.uint64(place[2, j]), np.uint64(place[3, j])
            wa, wb, wc, wd = weight[0, j], weight[1, j], weight[2, j], weight[3, j]
            for channel in _CHANNELS:
                total = np.float32(source[a + channel]) * wa
                total = total + np.float32(source[b + channel]) * wb
                total = total + np.float32(source[c + channel]) * wc
                total = total + np.float32(source[d + channel]) * wd
                out[i, j, channel] = np.uint8(np.int32(np.rint(total)))


@_compiled
def _byte(value: Any) -> Any:
    return np.uint8(np.int32(min(max(value, _ZERO), _TOP)))


@_compiled
def _map(image: Any, out: Any, table: Any) -> None:
    for pixel in range(len(image)):
        for c in range(3):
            out[pixel, c] = table[c, image[pixel, c]]


@_compiled
def _count(image: Any, counts: Any) -> None:
    # Neighbours are often equal, and a counter has to be stored before it can be read again: pixels take turns at two.
    for pixel in range(len(image)):
        for c in range(3):
            counts[pixel & 1, c, image[pixel, c]] += np.int32(1)


@_compiled
def _tables(image: Any, op: Any, magnitude: Any, table: Any) -> None:
    """The table of an operation on single values, uint8 ``(3, 256)``."""
    pixels = len(image)
    if op == _AUTO_CONTRAST or op == _EQUALIZE:
        halves = np.zeros((2, 3, 256), np.int32)
        _count(image, halves)
        for c in range(3):
            counts = halves[0, c] + halves[1, c]
            low, high = 0, 255
            while counts[low] == 0:
                low += 1
            while counts[high] == 0:
                high -= 1
            if op == _AUTO_CONTRAST:
                start = np.float32(low) if high > low else _ZERO
                scale = np.float32(high - low) * _LEVEL if high > low else _ONE
                for level in range(256):
                    table[c, level] = _byte((np.float32(level) - start) / scale)
            else:
                step = (pixels - np.int64(counts[high])) // 255
                before = np.int64(0)
                for level in range(256):
                    table[c, level] = min((before + step // 2) // step, np.int64(255)) if step > 0 else level
                    before += counts[level]
        return
    factor = np.float32(1.0 + np.float64(magnitude))
    bits: Any = min(max(np.int64(magnitude), np.int64(0)), np.int64(8))
    mask = (255 << (8 - bits)) & 255
    threshold = np.float32(255.0 * np.float64(magnitude))
    for level in range(256):
        value = np.float32(level)
        if op == _BRIGHTNESS:
            entry = _byte(value * factor)
        elif op == _POSTERIZE:
            entry = np.uint8(level & mask)
        elif op == _INVERT or value >= threshold:
            entry = np.uint8(255 - level)
        else:
            entry = np.uint8(level)
        table[0, level] = table[1, level] = table[2, level] = entry


@_compiled
def _grey(image: Any, pixel: Any) -> Any:
    red, green, blue = np.float32(image[pixel, 0]), np.float32(image[pixel, 1]), np.float32(image[pixel, 2])
    return np.floor(red * _RED + green * _GREEN + blue * _BLUE)


@_compiled
def _color(image: Any, out: Any, near: Any, far: Any) -> None:
    for pixel in range(len(image)):
        dull = _grey(image, pixel) * far
        for c in range(3):
            out[pixel, c] = _byte(np.float32(image[pixel, c]) * near + dull)


@_compiled
def _contrast(image: Any, out: Any, near: Any, far: Any) -> None:
    total = np.int64(0)
    for pixel in range(len(image)):
        total += np.int32(_grey(image, pixel))
    dull = np.float32(total) / np.float32(len(image)) * far
    table = np.empty((3, 256), np.uint8)
    for level in range(256):
        table[0, level] = table[1, level] = table[2, level] = _byte(np.float32(level) * near + dull)
    _map(image, out, table)


@_compiled
def _sharpness(image: Any, out: Any, far: Any) -> None:
    height, width, _ = image.shape
    values = 3 * width
    flat, sharp = image.reshape(height * values), out.reshape(height * values)
    sharp[:] = flat
    for i in range(1, height - 1):
        # Slices that begin at the first neighbour: indices count from 0, which the compiler can make vectors of.
        a, b, c = flat[(i - 1) * values :], flat[i * values :], flat[(i + 1) * values :]
        a1, a2, b1, b2, c1, c2 = a[3:], a[6:], b[3:], b[6:], c[3:], c[6:]
        line = sharp[i * values + 3 :]
        for k in range(values - 6):
            middle = np.int32(b1[k])
            total = np.int32(a[k]) + np.int32(a1[k]) + np.int32(a2[k]) + np.int32(b[k]) + np.int32(b2[k])
            total = np.int32(total + np.int32(c[k]) + np.int32(c1[k]) + np.int32(c2[k]) + np.int32(5) * middle)
            # Divided by 13, to the nearest: exact for all sums there are.
            smooth = np.int32(np.int32((total + np.int32(6)) * np.int32(20165)) >> np.int32(18))
            line[k] = _byte(np.float32(middle) + np.float32(smooth - middle) * far)


@_compiled
def warp(images: Any, out: Any, matrix: Any, window: Any, bilinear: Any, first: Any, last: Any) -> None:
    """Resample images ``first`` to ``last``."""
    for b in range(first, last):
        y0, y1, x0, x1 = window[b, 0], window[b, 1], window[b, 2], window[b, 3]
        if bilinear:
            _bilinear(images[b], out[b], matrix[b], y0, y1, x0, x1)
        else:
            _nearest(images[b], out[b], matrix[b], y0, y1, x0, x1)


@_compiled
def mix(images: Any, out: Any, chains: Any, weights: Any, first: Any, last: Any) -> None:
    """Weighted sums of images ``first`` to ``last`` and of what chains made of them, one image ``(values,)`` a row."""
    total = np.empty(images.shape[1], np.float32)
    for b in range(first, last):
        own = weights[0, b]
        for i in range(len(total)):
            total[i] = np.float32(images[b, i]) * own
        for chain in range(len(chains)):
            share, made = weights[1 + chain, b], chains[chain, b]
            for i in range(len(total)):
                total[i] = total[i] + np.float32(made[i]) * share
        for i in range(len(total)):
            out[b, i] = np.uint8(np.int32(total[i]))


@_compiled
def apply(images: Any, out: Any, op: Any, magnitude: Any, matrix: Any, bilinear: Any, first: Any, last: Any) -> None:
    """Do to images ``first`` to ``last`` what ``op`` says."""
    _, height, width, _ = images.shape
    table = np.empty((3, 256), np.uint8)
    for b in range(first, last):
        number, image, result = op[b], images[b], out[b]
        if number < _SHEAR_X:
            result.reshape(-1)[:] = image.reshape(-1)
        elif number <= _ROTATE:
            if bilinear:
                _bilinear(image, result, matrix[b], 0, height, 0, width)
            else:
                _nearest(image, result, matrix[b], 0, height, 0, width)
        else:
            flat, target = image.reshape(height * width, 3), result.reshape(height * width, 3)
            factor = 1.0 + np.float64(magnitude[b])
            near, far = np.float32(factor), np.float32(1.0 - factor)
            if number <= _INVERT:
                _tables(flat, number, magnitude[b], table)
                _map(flat, target, table)
            elif number == _COLOR:
                _color(flat, target, near, far)
            elif number == _CONTRAST:
                _contrast(flat, target, near, far)
            else:
                _sharpness(image, result, far)
