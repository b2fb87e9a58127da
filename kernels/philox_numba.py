"""The words and normals of :mod:`fastmoll.kernels.philox` in SIMD registers; importing this file imports Numba.

Numba promotes to float64 and int64 wherever a literal or an unsigned number meets a signed one; hence the typed
constants. Multiplications and additions may be fused in the polynomials only. Files that use this one change with it:
see tests/test_numba_cache.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastmoll.kernels.compiled_numba import compiled as _compiled
from fastmoll.kernels.compiled_numba import fused as _fused

# What comes from other files, which Numba's cache does not watch (tests/test_numba_cache.py): 9b89b9006af8

_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)

# Generator blocks at a time: 3072 normals, 1024 pixels of three channels, all in the first-level cache. The trip count
# of the loops is this constant, a multiple of every vector width: each normal goes through the same instructions.
BLOCKS = 768
WORDS = 4 * BLOCKS

_TINY, _HALF_TINY = np.float32(2.0**-32), np.float32(2.0**-33)
_ONE, _TWO, _FOUR = np.float32(1.0), np.float32(2.0), np.float32(4.0)
_ONE_HALF, _QUARTER = np.float32(0.5), np.float32(0.25)
_LN2 = np.float32(math.log(2.0))
_SQRT_HALF_BITS = np.int32(np.float32(math.sqrt(0.5)).view(np.int32))
_MANTISSA_BITS = np.int32(23)
# Minimax fits: (ln(1+f) - f + f²/2) / f³ for 1+f in [√½, √2], to 6e-9 of ln(1+f); sin(2πr) / r and cos(2πr) in powers
# of r² for |r| <= 1/8, to 2e-8 and 5e-11.
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
def sample_words(first: Any, sample: Any, middle: Any, seed: Any, words: Any) -> None:
    """Blocks of a sample's stream from block ``first`` on, uint32 ``(4, blocks)``; the other arguments are uint64.

    ``middle`` is the epoch with the purpose of the stream.
    """
    low, high = sample & _MASK, sample >> _HALF
    w0, w1, w2, w3 = words[0], words[1], words[2], words[3]
    for i in range(words.shape[1]):
        c0 = (first + np.uint64(i)) & _MASK
        c1, c2, c3 = low, middle, high
        k0, k1 = seed & _MASK, seed >> _HALF
        for _ in range(10):
            p0, p1 = c0 * _M0, c2 * _M1
            c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _MASK, (p0 >> _HALF) ^ c3 ^ k1, p0 & _MASK
            k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
        w0[i], w1[i], w2[i], w3[i] = np.uint32(c0), np.uint32(c1), np.uint32(c2), np.uint32(c3)


@_compiled
def in_order(words: Any, row: Any) -> None:
    """The words of ``BLOCKS`` blocks one after the other."""
    w0, w1, w2, w3 = words[0], words[1], words[2], words[3]
    for i in range(BLOCKS):
        row[4 * i], row[4 * i + 1], row[4 * i + 2], row[4 * i + 3] = w0[i], w1[i], w2[i], w3[i]


@_compiled
def to_uniform(word: Any) -> Any:
    """See :func:`fastmoll.kernels.philox.uniform`."""
    return np.float32(word) * _TINY + _HALF_TINY


@_fused
def _normal_pair(first: Any, second: Any) -> Any:
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
def normal(words: Any, normals: Any) -> None:
    """A normal for each of the words of ``BLOCKS`` blocks, in their order, float32."""
    w0, w1, w2, w3 = words[0], words[1], words[2], words[3]
    for i in range(BLOCKS):
        z0, z1 = _normal_pair(w0[i], w1[i])
        z2, z3 = _normal_pair(w2[i], w3[i])
        normals[4 * i], normals[4 * i + 1], normals[4 * i + 2], normals[4 * i + 3] = z0, z1, z2, z3
