"""The compiled half of :mod:`fastmoll.kernels.corrupt_noise`; importing this file imports Numba.

Each function does the images ``first`` to ``last`` of a batch of uint8 planes ``(B, C, H, W)`` and lets go of the GIL.
Numba promotes to float64 and int64 wherever a literal or an unsigned number meets a signed one; hence the typed
constants.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

_compiled = numba.njit(nogil=True, cache=True, error_model="numpy")
_fused = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})

_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)

# Generator blocks at a time, so that what is made of them stays in the first-level cache. The trip count of the loops
# is this constant, a multiple of every vector width: each word goes through the same instructions.
BLOCKS = 512
_WORDS = 4 * BLOCKS

_ZERO, _TOP = np.float32(0.0), np.float32(255.0)
_TINY, _HALF_TINY = np.float32(2.0**-32), np.float32(2.0**-33)
_ONE, _TWO, _FOUR = np.float32(1.0), np.float32(2.0), np.float32(4.0)
_ONE_HALF, _QUARTER = np.float32(0.5), np.float32(0.25)
_LN2 = np.float32(math.log(2.0))
_SQRT_HALF_BITS = np.int32(np.float32(math.sqrt(0.5)).view(np.int32))
_MANTISSA_BITS = np.int32(23)
# Fits as in :mod:`fastmoll.kernels.cosine_noise_numba`: (ln(1+f) - f + f²/2) / f³, sin(2πr) / r and cos(2πr).
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7 = (
    np.float32(c)
    for c in (
        0.333333317,
        -0.25000821,
        0.200012269,
        -0.166233573,
        0.142017582,
        -0.131601831,
        0.127615756,
        -0.0763449302,
    )
)
_S0, _S1, _S2, _S3 = (np.float32(c) for c in (6.28318529, -41.3416626, 81.5925535, -75.4020679))
_C0, _C1, _C2, _C3, _C4 = (np.float32(c) for c in (1.0, -19.7392087, 64.9393162, -85.4428521, 59.2204072))
_I1, _I2 = np.int32(1), np.int32(2)


@_compiled
def _generate(start: Any, sample: Any, middle: Any, seed: Any, words: Any) -> None:
    """``BLOCKS`` blocks of a sample's stream from block ``start`` on, uint32 ``(4, BLOCKS)``."""
    low, high = sample & _MASK, sample >> _HALF
    w0, w1, w2, w3 = words[0], words[1], words[2], words[3]
    for i in range(BLOCKS):
        c0 = (start + np.uint64(i)) & _MASK
        c1, c2, c3 = low, middle, high
        k0, k1 = seed & _MASK, seed >> _HALF
        for _ in range(10):
            p0, p1 = c0 * _M0, c2 * _M1
            c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _MASK, (p0 >> _HALF) ^ c3 ^ k1, p0 & _MASK
            k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
        w0[i], w1[i], w2[i], w3[i] = np.uint32(c0), np.uint32(c1), np.uint32(c2), np.uint32(c3)


@_compiled
def _in_order(words: Any, row: Any) -> None:
    """The words of blocks one after the other."""
    w0, w1, w2, w3 = words[0], words[1], words[2], words[3]
    for i in range(BLOCKS):
        row[4 * i], row[4 * i + 1], row[4 * i + 2], row[4 * i + 3] = w0[i], w1[i], w2[i], w3[i]


@_fused
def _pair(first: Any, second: Any) -> Any:
    """Two normals of two words, by Box and Muller: see :func:`fastmoll.kernels.philox.normal`."""
    u = np.float32(first) * _TINY + _HALF_TINY
    # `view` is compiled for a call of a type only.
    bits = np.float32(u).view(np.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> _MANTISSA_BITS
    f = np.int32(bits - (exponent << _MANTISSA_BITS)).view(np.float32) - _ONE
    square = f * f
    p = _L7
    p = p * f + _L6
    p = p * f + _L5
    p = p * f + _L4
    p = p * f + _L3
    p = p * f + _L2
    p = p * f + _L1
    p = p * f + _L0
    p = p * f * square - _ONE_HALF * square
    radius = np.sqrt(-_TWO * (np.float32(exponent) * _LN2 + (p + f)))

    v = np.float32(second) * _TINY
    quarter = np.int32(v * _FOUR + _ONE_HALF)
    r = v - np.float32(quarter) * _QUARTER
    z = r * r
    sine = _S3
    sine = sine * z + _S2
    sine = sine * z + _S1
    sine = (sine * z + _S0) * r
    cosine = _C4
    cosine = cosine * z + _C3
    cosine = cosine * z + _C2
    cosine = cosine * z + _C1
    cosine = cosine * z + _C0
    # A quarter turn exchanges the two, the second bit turns both round, and the first and second together the cosine.
    swap = (quarter & _I1) != 0
    x = sine if swap else cosine
    y = cosine if swap else sine
    x = -x if ((quarter + _I1) & _I2) != 0 else x
    y = -y if (quarter & _I2) != 0 else y
    return radius * x, radius * y


@_compiled
def _normals(words: Any, normals: Any) -> None:
    w0, w1, w2, w3 = words[0], words[1], words[2], words[3]
    for i in range(BLOCKS):
        z0, z1 = _pair(w0[i], w1[i])
        z2, z3 = _pair(w2[i], w3[i])
        normals[4 * i], normals[4 * i + 1], normals[4 * i + 2], normals[4 * i + 3] = z0, z1, z2, z3


@_fused
def _add(x: Any, normals: Any, scale: Any, out: Any) -> None:
    for i in range(len(x)):
        grey = np.float32(x[i]) + scale * normals[i]
        out[i] = np.uint8(np.int32(min(max(grey, _ZERO), _TOP)))


@_compiled
def gaussian(images: Any, out: Any, scale: Any, sample: Any, middle: Any, seed: Any, first: Any, last: Any) -> None:
    """Add normals times ``scale``, float32, grey levels."""
    words = np.empty((4, BLOCKS), np.uint32)
    normals = np.empty(_WORDS, np.float32)
    for b in range(first, last):
        x, y = images[b].reshape(-1), out[b].reshape(-1)
        for place in range(0, len(x), _WORDS):
            _generate(np.uint64(place // 4), sample[b], middle, seed, words)
            _normals(words, normals)
            _add(x[place : place + _WORDS], normals, scale, y[place : place + _WORDS])


@_compiled
def shot(
    images: Any,
    out: Any,
    limits: Any,
    grey: Any,
    guide: Any,
    sample: Any,
    middle: Any,
    seed: Any,
    first: Any,
    last: Any,
) -> None:
    """Look photons up: the tables of :func:`fastmoll.kernels.corrupt_noise.poisson_table`, and where to begin."""
    words, row = np.empty((4, BLOCKS), np.uint32), np.empty(_WORDS, np.uint32)
    most = limits.shape[1]
    for b in range(first, last):
        x, y = images[b].reshape(-1), out[b].reshape(-1)
        for place in range(0, len(x), _WORDS):
            _generate(np.uint64(place // 4), sample[b], middle, seed, words)
            _in_order(words, row)
            for i in range(min(_WORDS, len(x) - place)):
                level, word = x[place + i], np.int64(row[i])
                k = np.int64(guide[level, word >> 24])
                while k < most and limits[level, k] < word:
                    k += 1
                y[place + i] = grey[k]


@_compiled
def _strike(x: Any, row: Any, salt: Any, pepper: Any, out: Any) -> None:
    for i in range(len(x)):
        changed = np.uint8(255) if row[i] < salt else np.uint8(0)
        out[i] = changed if row[i] < pepper else x[i]


@_compiled
def impulse(
    images: Any, out: Any, salt: Any, pepper: Any, sample: Any, middle: Any, seed: Any, first: Any, last: Any
) -> None:
    """Words below ``salt`` are white, others below ``pepper`` black."""
    words, row = np.empty((4, BLOCKS), np.uint32), np.empty(_WORDS, np.uint32)
    for b in range(first, last):
        x, y = images[b].reshape(-1), out[b].reshape(-1)
        for place in range(0, len(x), _WORDS):
            _generate(np.uint64(place // 4), sample[b], middle, seed, words)
            _in_order(words, row)
            _strike(x[place : place + _WORDS], row, salt, pepper, y[place : place + _WORDS])


@_compiled
def uniform(out: Any, skip: Any, sample: Any, middle: Any, seed: Any, first: Any, last: Any) -> None:
    """Rows of float32 in (0, 1], of the words from ``skip`` on, which is whole blocks."""
    words, row = np.empty((4, BLOCKS), np.uint32), np.empty(_WORDS, np.uint32)
    for b in range(first, last):
        y = out[b]
        for place in range(0, len(y), _WORDS):
            _generate(np.uint64((place + skip) // 4), sample[b], middle, seed, words)
            _in_order(words, row)
            for i in range(min(_WORDS, len(y) - place)):
                y[place + i] = np.float32(row[i]) * _TINY + _HALF_TINY
