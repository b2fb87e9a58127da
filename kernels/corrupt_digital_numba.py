"""The compiled half of :mod:`fastmoll.kernels.corrupt_digital`; importing this file imports Numba.

Each function does the images ``first`` to ``last`` of a batch of uint8 planes ``(B, 3, H, W)`` and lets go of the GIL.
Numba promotes to float64 and int64 wherever a literal or an unsigned number meets a signed one; hence the typed
constants.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastmoll.kernels import corrupt_digital, corruption_job
from fastmoll.kernels.compiled_numba import compiled as _compiled

# What comes from other files, which Numba's cache does not watch (tests/test_numba_cache.py): fd5fad14dae1


_ONE, _ZERO, _TOP = np.float32(1.0), np.float32(0.0), np.float32(255.0)
_NUDGE = np.float32(corruption_job.NUDGE)
_PRECISION = np.int32(corrupt_digital.PRECISION)
_ROUND = np.int32(1 << corrupt_digital.PRECISION - 1)


@_compiled
def contrast(images: Any, out: Any, factor: Any, first: Any, last: Any) -> None:
    """Each channel nearer to its mean by ``factor``, float64."""
    table = np.empty(256, np.uint8)
    for b in range(first, last):
        for c in range(images.shape[1]):
            x, y = images[b, c].reshape(-1), out[b, c].reshape(-1)
            total = np.int64(0)
            for i in range(len(x)):
                total += np.int64(x[i])
            mean = total / (255.0 * len(x))
            for level in range(256):
                value = (level / 255.0 - mean) * factor + mean
                table[level] = np.uint8(min(max(value, 0.0), 1.0) * 255.0)
            for i in range(len(x)):
                y[i] = table[x[i]]


@_compiled
def _mirror_pixel(i: Any, size: Any) -> Any:
    if size == 1:
        return np.int64(0)
    i %= 2 * size - 2
    return min(i, 2 * size - 2 - i)


@_compiled
def _mirror_edge(i: Any, size: Any) -> Any:
    i %= 2 * size
    return min(i, 2 * size - 1 - i)


@_compiled
def stretch(images: Any, out: Any, matrix: Any, moved: Any, first: Any, last: Any) -> None:
    """Affine maps, float32 ``(B, 2, 3)``, then displacements, float32 ``(B, 2, H, W)``, or none: an empty array."""
    height, width = images.shape[2:]
    mapped = np.empty((height, width, 3), np.float32)
    for b in range(first, last):
        source = images[b]
        ax, bx, cx = matrix[b, 0, 0], matrix[b, 0, 1], matrix[b, 0, 2]
        ay, by, cy = matrix[b, 1, 0], matrix[b, 1, 1], matrix[b, 1, 2]
        for i in range(height):
            for j in range(width):
                x = ax * np.float32(j) + bx * np.float32(i) + cx
                y = ay * np.float32(j) + by * np.float32(i) + cy
                fx, fy = np.floor(x), np.floor(y)
                u, v = np.int64(fx), np.int64(fy)
                p, q = x - fx, y - fy
                u1, v1 = u + 1, v + 1
                if u < 0 or v < 0 or u1 >= width or v1 >= height:
                    u, u1 = _mirror_pixel(u, width), _mirror_pixel(u1, width)
                    v, v1 = _mirror_pixel(v, height), _mirror_pixel(v1, height)
                w00, w01, w10, w11 = (_ONE - p) * (_ONE - q), p * (_ONE - q), (_ONE - p) * q, p * q
                for c in range(3):
                    total = np.float32(source[c, v, u]) * w00 + np.float32(source[c, v, u1]) * w01
                    mapped[i, j, c] = total + np.float32(source[c, v1, u]) * w10 + np.float32(source[c, v1, u1]) * w11
        for i in range(height):
            for j in range(width):
                if moved.shape[2] == 0:
                    for c in range(3):
                        out[b, c, i, j] = np.uint8(np.int32(min(max(mapped[i, j, c] + _NUDGE, _ZERO), _TOP)))
                    continue
                x = np.float32(j) + moved[b, 0, i, j]
                y = np.float32(i) + moved[b, 1, i, j]
                fx, fy = np.floor(x), np.floor(y)
                u, v = np.int64(fx), np.int64(fy)
                p, q = x - fx, y - fy
                u1, v1 = u + 1, v + 1
                if u < 0 or v < 0 or u1 >= width or v1 >= height:
                    u, u1 = _mirror_edge(u, width), _mirror_edge(u1, width)
                    v, v1 = _mirror_edge(v, height), _mirror_edge(v1, height)
                w00, w01, w10, w11 = (_ONE - p) * (_ONE - q), p * (_ONE - q), (_ONE - p) * q, p * q
                for c in range(3):
                    total = mapped[v, u, c] * w00 + mapped[v, u1, c] * w01
                    total += mapped[v1, u, c] * w10 + mapped[v1, u1, c] * w11
                    out[b, c, i, j] = np.uint8(np.int32(min(max(total + _NUDGE, _ZERO), _TOP)))


@_compiled
def pixelate(
    images: Any,
    out: Any,
    top: Any,
    bottom: Any,
    weight_down: Any,
    back_down: Any,
    left: Any,
    right: Any,
    weight_across: Any,
    back_across: Any,
    first: Any,
    last: Any,
) -> None:
    """Means over areas, rows first and then columns, and back: tables of :func:`corrupt_digital.areas` of each axis."""
    height, width = images.shape[2:]
    narrow, total = np.empty((height, len(left)), np.int32), np.empty(len(left), np.int32)
    for b in range(first, last):
        for c in range(images.shape[1]):
            for i in range(height):
                x = images[b, c, i]
                for j in range(len(left)):
                    row_sum = np.int32(0)
                    for k in range(left[j], right[j]):
                        row_sum += np.int32(x[k])
                    narrow[i, j] = (row_sum * weight_across[j] + _ROUND) >> _PRECISION
            done = np.int64(-1)
            for i in range(height):
                area = back_down[i]
                if area == done:
                    out[b, c, i] = out[b, c, i - 1]
                    continue
                done = np.int64(area)
                total[:] = 0
                for k in range(top[area], bottom[area]):
                    for j in range(len(total)):
                        total[j] += narrow[k, j]
                for j in range(len(total)):
                    total[j] = (total[j] * weight_down[area] + _ROUND) >> _PRECISION
                for j in range(width):
                    out[b, c, i, j] = np.uint8(total[back_across[j]])
