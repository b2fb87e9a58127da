"""The compiled half of :mod:`fastmoll.kernels.jpeg_loss`; importing this file imports Numba.

All is int32, which none of the sums leaves; hence the typed constants, without which Numba goes on in int64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastmoll.kernels import jpeg_loss
from fastmoll.kernels.compiled_numba import compiled as _compiled

# What comes from other files, which Numba's cache does not watch (tests/test_numba_cache.py): 056fafd3987f


_FORWARD = np.ascontiguousarray(jpeg_loss.MATRIX.T)
_BACK = np.ascontiguousarray(jpeg_loss.MATRIX)
_0, _1, _2, _3, _4, _7, _8 = (np.int32(i) for i in (0, 1, 2, 3, 4, 7, 8))
_11, _15, _16, _18 = (np.int32(i) for i in (11, 15, 16, 18))
_128, _TOP = np.int32(128), np.int32(255)
_YR, _YG, _YB = np.int32(19595), np.int32(38470), np.int32(7471)
_BR, _BG, _HALF = np.int32(-11058), np.int32(-21710), np.int32(32768)
_RG, _RB = np.int32(-27439), np.int32(-5329)
_MIDDLE = np.int32((128 << 16) + 32767)
_R, _GB, _GR, _B = np.int32(91881), np.int32(-22554), np.int32(-46802), np.int32(116130)


@_compiled
def _split(red: Any, green: Any, blue: Any, y: Any, cb: Any, cr: Any) -> None:
    for j in range(len(red)):
        r, g, b = np.int32(red[j]), np.int32(green[j]), np.int32(blue[j])
        y[j] = (_YR * r + _YG * g + _YB * b + _HALF) >> _16
        cb[j] = (_BR * r + _BG * g + _HALF * b + _MIDDLE) >> _16
        cr[j] = (_HALF * r + _RG * g + _RB * b + _MIDDLE) >> _16


@_compiled
def _fill(row: Any, filled: Any) -> None:
    for j in range(filled, len(row)):
        row[j] = row[filled - 1]


@_compiled
def _halve(above: Any, below: Any, out: Any) -> None:
    for j in range(len(out)):
        total = above[2 * j] + above[2 * j + 1] + below[2 * j] + below[2 * j + 1]
        out[j] = (total + _1 + (np.int32(j) & _1)) >> _2


@_compiled
def _forward(x: Any, across: Any, along: Any, shift: Any, out: Any) -> None:
    """Eight times eight numbers, ``along`` apart, times the matrix: rows of ``out``, vectors along them."""
    half = _1 << (shift - _1)
    m = _FORWARD
    for i in range(8):
        a, b, c, d = i * across, i * across + along, i * across + 2 * along, i * across + 3 * along
        x0, x1, x2, x3 = x[a], x[b], x[c], x[d]
        x4, x5, x6, x7 = x[a + 4 * along], x[b + 4 * along], x[c + 4 * along], x[d + 4 * along]
        for k in range(8):
            total = x0 * m[0, k] + x1 * m[1, k] + x2 * m[2, k] + x3 * m[3, k]
            total += x4 * m[4, k] + x5 * m[5, k] + x6 * m[6, k] + x7 * m[7, k]
            out[8 * i + k] = (total + half) >> shift


@_compiled
def _back(x: Any, across: Any, along: Any, shift: Any, out: Any) -> None:
    """The same with the transposed matrix."""
    half = _1 << (shift - _1)
    m = _BACK
    for i in range(8):
        a, b, c, d = i * across, i * across + along, i * across + 2 * along, i * across + 3 * along
        x0, x1, x2, x3 = x[a], x[b], x[c], x[d]
        x4, x5, x6, x7 = x[a + 4 * along], x[b + 4 * along], x[c + 4 * along], x[d + 4 * along]
        for k in range(8):
            total = x0 * m[0, k] + x1 * m[1, k] + x2 * m[2, k] + x3 * m[3, k]
            total += x4 * m[4, k] + x5 * m[5, k] + x6 * m[6, k] + x7 * m[7, k]
            out[8 * i + k] = (total + half) >> shift


@_compiled
def _quantise(x: Any, table: Any, out: Any) -> None:
    # Quotients of whole numbers this small are never so close below a whole number that float32 would round them to it.
    for i in range(64):
        step = table[i]
        level = np.int32(np.float32(abs(x[i]) + _4 * step) / np.float32(_8 * step)) * step
        out[i] = level if x[i] >= _0 else -level


@_compiled
def _through(plane: Any, table: Any, a: Any, b: Any) -> None:
    """Each block of a plane through the transform and back; ``a`` and ``b`` are scratch, int32 ``(64,)``."""
    for top in range(0, plane.shape[0], 8):
        for left in range(0, plane.shape[1], 8):
            for i in range(8):
                for j in range(8):
                    a[8 * i + j] = plane[top + i, left + j] - _128
            _forward(a, 8, 1, _11, b)
            _forward(b, 1, 8, _15, a)  # frequencies to the right are rows from here on, and so in the table
            _quantise(a, table, b)
            _back(b, 8, 1, _11, a)
            _back(a, 1, 8, _18, b)
            for i in range(8):
                for j in range(8):
                    plane[top + i, left + j] = min(max(b[8 * i + j] + _128, _0), _TOP)


@_compiled
def _enlarge(near: Any, far: Any, column: Any, out: Any) -> None:
    """One row of twice the length."""
    last = len(column) - 1
    if last < 2:
        for j in range(last + 1):
            out[2 * j] = out[2 * j + 1] = near[j]
        return
    for j in range(last + 1):
        column[j] = _3 * near[j] + far[j]
    out[0] = (_4 * column[0] + _8) >> _4
    out[2 * last + 1] = (_4 * column[last] + _7) >> _4
    for j in range(last):
        out[2 * j + 1] = (_3 * column[j] + column[j + 1] + _7) >> _4
    for j in range(1, last + 1):
        out[2 * j] = (_3 * column[j] + column[j - 1] + _8) >> _4


@_compiled
def _join(y: Any, cb: Any, cr: Any, red: Any, green: Any, blue: Any) -> None:
    for j in range(len(red)):
        u, v = cb[j] - _128, cr[j] - _128
        red[j] = np.uint8(min(max(y[j] + ((_R * v + _HALF) >> _16), _0), _TOP))
        green[j] = np.uint8(min(max(y[j] + ((_GB * u + _GR * v + _HALF) >> _16), _0), _TOP))
        blue[j] = np.uint8(min(max(y[j] + ((_B * u + _HALF) >> _16), _0), _TOP))


@_compiled
def jpeg(images: Any, out: Any, tables: Any, first: Any, last: Any) -> None:
    """Compress and decompress the images ``first`` to ``last`` of uint8 ``(B, 3, H, W)``; int32 ``(2, 64)`` tables.

    The tables are transposed: entry ``8 k + l`` is that of frequency ``k`` to the right and ``l`` down.
    """
    height, width = images.shape[2:]
    small_height, small_width = (height + 1) // 2, (width + 1) // 2
    y = np.empty((-(-height // 8) * 8, -(-width // 8) * 8), np.int32)
    wide = -(-width // 16) * 16
    small = np.empty((2, -(-small_height // 8) * 8, wide // 2), np.int32)
    whole = np.empty((2, 2, wide), np.int32)
    column, large = np.empty(small_width, np.int32), np.empty((2, 2 * small_width), np.int32)
    a, b = np.empty(64, np.int32), np.empty(64, np.int32)
    for n in range(first, last):
        red, green, blue = images[n, 0], images[n, 1], images[n, 2]
        for i in range(small_height):
            for part in range(2):
                row = min(2 * i + part, height - 1)
                line = y[min(2 * i + part, len(y) - 1)]
                _split(red[row], green[row], blue[row], line, whole[0, part], whole[1, part])
                _fill(line, width)
                _fill(whole[0, part], width)
                _fill(whole[1, part], width)
            for c in range(2):
                _halve(whole[c, 0], whole[c, 1], small[c, i])
        for i in range(height, len(y)):
            y[i] = y[height - 1]
        for i in range(small_height, small.shape[1]):
            small[:, i] = small[:, small_height - 1]
        _through(y, tables[0], a, b)
        for c in range(2):
            _through(small[c], tables[1], a, b)
        for i in range(height):
            near = i // 2
            far = min(max(near + (1 if i % 2 else -1), 0), small_height - 1)
            for c in range(2):
                _enlarge(small[c, near][:small_width], small[c, far][:small_width], column, large[c])
            _join(y[i], large[0], large[1], out[n, 0, i], out[n, 1, i], out[n, 2, i])
