"""The compiled half of :mod:`fastmoll.kernels.mollify_cpu`; importing this file imports Numba.

Images are flat float32 arrays, planes ``(C, H, W)`` or interleaved ``(H, W, C)``. All functions let go of the GIL. What
each image goes through does not depend on its memory format, on other images or on threads, so its bits do not either.

Numba promotes to float64 and int64 wherever a literal or an unsigned number meets a signed one; hence the typed
constants. Multiplications and additions may be fused in the polynomials and the products only.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from fastmoll.kernels import philox

_compiled = numba.njit(nogil=True, cache=True, error_model="numpy")
_fused = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})

_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_PURPOSE = np.uint64(philox.NOISE << philox.EPOCH_BITS)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)

# Generator blocks at a time: 3072 normals, 1024 pixels of three channels, all in the first-level cache. The trip count
# of the loops is this constant, a multiple of every vector width: each normal goes through the same instructions.
BLOCKS = 768
_NORMALS = 4 * BLOCKS

_TINY = np.float32(2.0**-32)
_HALF_TINY = np.float32(2.0**-33)
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
def _normals(first: Any, low: Any, middle: Any, high: Any, seed: Any, words: Any, normals: Any) -> None:
    """``4 * BLOCKS`` normals of a sample's stream from block ``first`` on; ``words`` is scratch, uint32 (4, BLOCKS)."""
    w0, w1, w2, w3 = words[0], words[1], words[2], words[3]
    for i in range(BLOCKS):
        c0 = (first + np.uint64(i)) & _MASK
        c1, c2, c3 = low, middle, high
        k0, k1 = seed & _MASK, seed >> _HALF
        for _ in range(10):
            p0, p1 = c0 * _M0, c2 * _M1
            c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _MASK, (p0 >> _HALF) ^ c3 ^ k1, p0 & _MASK
            k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
        w0[i], w1[i], w2[i], w3[i] = np.uint32(c0), np.uint32(c1), np.uint32(c2), np.uint32(c3)
    for i in range(BLOCKS):
        z0, z1 = _pair(w0[i], w1[i])
        z2, z3 = _pair(w2[i], w3[i])
        normals[4 * i], normals[4 * i + 1], normals[4 * i + 2], normals[4 * i + 3] = z0, z1, z2, z3


@_compiled
def _add_noise(
    x: Any, out: Any, channels: Any, interleaved: Any, alpha: Any, sigma: Any, sample: Any, epoch: Any, seed: Any
) -> None:
    """``alpha x + sigma ε`` of one image."""
    words = np.empty((4, BLOCKS), np.uint32)
    normals = np.empty(_NORMALS, np.float32)
    values = len(x)
    pixels = values // channels
    low, high = sample & _MASK, sample >> _HALF
    middle = epoch | _PURPOSE
    for start in range(0, values, _NORMALS):
        _normals(np.uint64(start // 4), low, middle, high, seed, words, normals)
        stop = min(values, start + _NORMALS)
        if interleaved or channels == 1:
            for i in range(stop - start):
                out[start + i] = alpha * x[start + i] + sigma * normals[i]
        elif channels == 3:
            # A chunk begins with a pixel. The constant step is what lets the compiler use shuffles.
            first, count = start // 3, (stop - start) // 3
            for c in range(3):
                place, z = c * pixels + first, normals[c:]
                for i in range(count):
                    out[place + i] = alpha * x[place + i] + sigma * z[3 * i]
        else:
            for c in range(channels):
                first = (start - c + channels - 1) // channels
                count = (stop - c + channels - 1) // channels - first
                place, offset = c * pixels + first, first * channels + c - start
                for i in range(count):
                    out[place + i] = alpha * x[place + i] + sigma * normals[offset + i * channels]


@_fused
def _product(
    n: Any, m: Any, depth: Any, a: Any, a0: Any, lda: Any, b: Any, b0: Any, ldb: Any, c: Any, c0: Any, ldc: Any
) -> None:
    """``C = A B``, ``(n, depth) (depth, m)``, each a block of a flat array: offset and distance of rows.

    Four rows and four terms at a time: sixteen fused operations for eight loads, and they fit the registers.
    """
    whole_n, whole_k = n - n % 4, depth - depth % 4
    for i in range(0, whole_n, 4):
        r0, r1, r2, r3 = a0 + i * lda, a0 + (i + 1) * lda, a0 + (i + 2) * lda, a0 + (i + 3) * lda
        o0 = c0 + i * ldc
        d0, d1, d2, d3 = c[o0:], c[o0 + ldc :], c[o0 + 2 * ldc :], c[o0 + 3 * ldc :]
        for k in range(0, whole_k, 4):
            a00, a01, a02, a03 = a[r0 + k], a[r0 + k + 1], a[r0 + k + 2], a[r0 + k + 3]
            a10, a11, a12, a13 = a[r1 + k], a[r1 + k + 1], a[r1 + k + 2], a[r1 + k + 3]
            a20, a21, a22, a23 = a[r2 + k], a[r2 + k + 1], a[r2 + k + 2], a[r2 + k + 3]
            a30, a31, a32, a33 = a[r3 + k], a[r3 + k + 1], a[r3 + k + 2], a[r3 + k + 3]
            p = b0 + k * ldb
            e0, e1, e2, e3 = b[p:], b[p + ldb :], b[p + 2 * ldb :], b[p + 3 * ldb :]
            if k == 0:
                for j in range(m):
                    v0, v1, v2, v3 = e0[j], e1[j], e2[j], e3[j]
                    s0 = a00 * v0
                    s1 = a10 * v0
                    s2 = a20 * v0
                    s3 = a30 * v0
                    s0 += a01 * v1
                    s1 += a11 * v1
                    s2 += a21 * v1
                    s3 += a31 * v1
                    s0 += a02 * v2
                    s1 += a12 * v2
                    s2 += a22 * v2
                    s3 += a32 * v2
                    s0 += a03 * v3
                    s1 += a13 * v3
                    s2 += a23 * v3
                    s3 += a33 * v3
                    d0[j], d1[j], d2[j], d3[j] = s0, s1, s2, s3
            else:
                for j in range(m):
                    v0, v1, v2, v3 = e0[j], e1[j], e2[j], e3[j]
                    s0, s1, s2, s3 = d0[j], d1[j], d2[j], d3[j]
                    s0 += a00 * v0
                    s1 += a10 * v0
                    s2 += a20 * v0
                    s3 += a30 * v0
                    s0 += a01 * v1
                    s1 += a11 * v1
                    s2 += a21 * v1
                    s3 += a31 * v1
                    s0 += a02 * v2
                    s1 += a12 * v2
                    s2 += a22 * v2
                    s3 += a32 * v2
                    s0 += a03 * v3
                    s1 += a13 * v3
                    s2 += a23 * v3
                    s3 += a33 * v3
                    d0[j], d1[j], d2[j], d3[j] = s0, s1, s2, s3
        if whole_k == 0:
            for j in range(m):
                d0[j] = d1[j] = d2[j] = d3[j] = np.float32(0.0)
        for k in range(whole_k, depth):
            f0, f1, f2, f3 = a[r0 + k], a[r1 + k], a[r2 + k], a[r3 + k]
            e0 = b[b0 + k * ldb :]
            for j in range(m):
                v0 = e0[j]
                d0[j] += f0 * v0
                d1[j] += f1 * v0
                d2[j] += f2 * v0
                d3[j] += f3 * v0
    for i in range(whole_n, n):
        d0 = c[c0 + i * ldc :]
        for j in range(m):
            d0[j] = np.float32(0.0)
        for k in range(depth):
            f0 = a[a0 + i * lda + k]
            e0 = b[b0 + k * ldb :]
            for j in range(m):
                d0[j] += f0 * e0[j]


@_compiled
def _aligned(size: Any) -> Any:
    """Scratch that begins with a cache line: loads that cross two of them made the products a fifth slower."""
    scratch = np.empty(size + 16, np.float32)
    return scratch[(64 - scratch.ctypes.data % 64) % 64 // 4 :][:size]


@_compiled
def _copy(x: Any, out: Any) -> None:
    # An assignment of a slice is slower: it looks for overlaps, and goes by elements.
    for i in range(len(x)):
        out[i] = x[i]


@_compiled
def _load_plane(x: Any, channels: Any, c: Any, plane: Any) -> None:
    """Channel ``c`` of an interleaved image."""
    if channels == 3:
        for i in range(len(plane)):
            plane[i] = x[3 * i + c]
    else:
        for i in range(len(plane)):
            plane[i] = x[channels * i + c]


@_compiled
def _store_plane(plane: Any, out: Any, channels: Any, c: Any) -> None:
    if channels == 3:
        for i in range(len(plane)):
            out[3 * i + c] = plane[i]
    else:
        for i in range(len(plane)):
            out[channels * i + c] = plane[i]


@_compiled
def _fold_rows(x: Any, height: Any, width: Any, out: Any) -> None:
    """Even parts ``x_i + x_{N-1-i}`` of the columns to the upper half, odd parts ``x_i - x_{N-1-i}`` to the lower.

    The middle of an odd axis is its own mirror image, and is even.
    """
    odd = height // 2
    even = height - odd
    for i in range(odd):
        top, below = x[i * width : (i + 1) * width], x[(height - 1 - i) * width : (height - i) * width]
        plus, minus = out[i * width : (i + 1) * width], out[(even + i) * width : (even + i + 1) * width]
        for j in range(width):
            plus[j], minus[j] = top[j] + below[j], top[j] - below[j]
    if even > odd:
        _copy(x[odd * width : even * width], out[odd * width : even * width])


@_compiled
def _unfold_rows(x: Any, height: Any, width: Any, out: Any) -> None:
    """Back from even and odd parts: ``e_i + o_i`` and, mirrored, ``e_i - o_i``."""
    odd = height // 2
    even = height - odd
    for i in range(odd):
        plus, minus = x[i * width : (i + 1) * width], x[(even + i) * width : (even + i + 1) * width]
        top, below = out[i * width : (i + 1) * width], out[(height - 1 - i) * width : (height - i) * width]
        for j in range(width):
            top[j], below[j] = plus[j] + minus[j], plus[j] - minus[j]
    if even > odd:
        _copy(x[odd * width : even * width], out[odd * width : even * width])


@_compiled
def _fold_columns(x: Any, height: Any, width: Any) -> None:
    """The same along each row, in place."""
    # Unsigned, because a signed index may be negative, counted from the end, and that test rules out SIMD.
    odd, last = np.uintp(width // 2), np.uintp(width - 1)
    even = np.uintp(width) - odd
    row = np.empty(width, np.float32)
    for i in range(height):
        d = x[i * width : (i + 1) * width]
        _copy(d, row)
        for j in range(odd):
            plus, minus = row[j] + row[last - j], row[j] - row[last - j]
            d[j], d[even + j] = plus, minus


@_compiled
def _unfold_columns(x: Any, height: Any, width: Any) -> None:
    odd, last = np.uintp(width // 2), np.uintp(width - 1)
    even = np.uintp(width) - odd
    row = np.empty(width, np.float32)
    for i in range(height):
        d = x[i * width : (i + 1) * width]
        _copy(d, row)
        for j in range(odd):
            left, right = row[j] + row[even + j], row[j] - row[even + j]
            d[j], d[last - j] = left, right


@_fused
def _filter(x: Any, height: Any, width: Any, down: Any, across: Any, scratch: Any, out: Any) -> None:
    """Symmetric filters on both axes, ``taps[|m|]``, images mirrored at the edges (edge pixels twice)."""
    radius = len(down) - 1
    for i in range(height):
        d = scratch[i * width : (i + 1) * width]
        s = x[i * width : (i + 1) * width]
        g0 = down[0]
        for j in range(width):
            d[j] = g0 * s[j]
        for m in range(1, radius + 1, 2):
            # A tap beyond the last is zero: `down` and `across` are padded.
            g1, g2 = down[m], (down[m + 1] if m < radius else np.float32(0.0))
            n = m + 1 if m < radius else m
            up1, dn1, up2, dn2 = i - m, i + m, i - n, i + n
            up1 = -1 - up1 if up1 < 0 else up1
            up2 = -1 - up2 if up2 < 0 else up2
            dn1 = 2 * height - 1 - dn1 if dn1 >= height else dn1
            dn2 = 2 * height - 1 - dn2 if dn2 >= height else dn2
            s1, s2 = x[up1 * width : (up1 + 1) * width], x[dn1 * width : (dn1 + 1) * width]
            s3, s4 = x[up2 * width : (up2 + 1) * width], x[dn2 * width : (dn2 + 1) * width]
            for j in range(width):
                v = d[j]
                v += g1 * (s1[j] + s2[j])
                v += g2 * (s3[j] + s4[j])
                d[j] = v
    radius = len(across) - 1
    padded = np.empty(width + 2 * radius + 2, np.float32)
    for i in range(height):
        s = scratch[i * width : (i + 1) * width]
        d = out[i * width : (i + 1) * width]
        _copy(s, padded[radius : radius + width])
        for m in range(radius):
            padded[radius - 1 - m] = s[m]
            padded[radius + width + m] = s[width - 1 - m]
        g0 = across[0]
        for j in range(width):
            d[j] = g0 * s[j]
        for m in range(1, radius + 1, 2):
            g1, g2 = across[m], (across[m + 1] if m < radius else np.float32(0.0))
            n = m + 1 if m < radius else m
            s1, s2 = padded[radius - m :], padded[radius + m :]
            s3, s4 = padded[radius - n :], padded[radius + n :]
            for j in range(width):
                v = d[j]
                v += g1 * (s1[j] + s2[j])
                v += g2 * (s3[j] + s4[j])
                d[j] = v


@_fused
def _heat_kernel(factors: Any, cosines: Any, count: Any, sums: Any) -> None:
    """``h[0 ... count-1]``, as :func:`fastmoll.kernels.heat_blur.heat_kernel` sums it up, float64.

    Here, because a product in torch would leave its threads spinning on the cores that this needs.
    """
    for m in range(count):
        sums[m] = 0.0
    for k in range(len(factors)):
        factor, row = factors[k], cosines[k]
        for m in range(count):
            sums[m] += factor * row[m]


@_compiled
def _half_matrices(kernel: Any, size: Any, out: Any) -> None:
    """The two blocks of ``A_N`` on even and on odd parts, one after the other, from ``h``.

    With ``e[m] = h[m] + h[m+N]`` and ``o[m] = h[m] - h[m+N]`` both are Toeplitz plus Hankel again:
    ``(e[i-j] + e[i+j+1]) / 2``, and the same of ``o``.
    """
    start = 0
    around = np.empty(3 * size, np.float32)
    for part in range(2):
        half = size - size // 2 if part == 0 else size // 2
        for m in range(-size, 2 * size):
            # h is even and has period 2N: what is known of it is h[0 ... N].
            near, far = abs(m), abs(m + size) % (2 * size)
            near, far = min(near, 2 * size - near), min(far, 2 * size - far)
            around[m + size] = 0.5 * (kernel[near] + kernel[far] if part == 0 else kernel[near] - kernel[far])
        for i in range(half):
            row = out[start + i * half : start + (i + 1) * half]
            toeplitz, hankel = around[size - i :], around[size + i + 1 :]
            for j in range(half):
                row[j] = toeplitz[j] + hankel[j]
        start += half * half


@_compiled
def _dense(x: Any, height: Any, width: Any, down: Any, across: Any, first: Any, second: Any, out: Any) -> None:
    """``A_H X A_W`` of a plane, by the blocks of both matrices on even and on odd parts."""
    odd_h, odd_w = height // 2, width // 2
    even_h, even_w = height - odd_h, width - odd_w
    lower = even_h * width
    _fold_rows(x, height, width, first)
    _product(even_h, width, even_h, down, 0, even_h, first, 0, width, second, 0, width)
    _product(odd_h, width, odd_h, down, even_h * even_h, odd_h, first, lower, width, second, lower, width)
    _fold_columns(second, height, width)
    _product(height, even_w, even_w, second, 0, width, across, 0, even_w, first, 0, width)
    _product(height, odd_w, odd_w, second, even_w, width, across, even_w * even_w, odd_w, first, even_w, width)
    _unfold_columns(first, height, width)
    _unfold_rows(first, height, width, out)


@_compiled
def _modes(
    x: Any,
    height: Any,
    width: Any,
    down: Any,
    across: Any,
    factors_h: Any,
    factors_w: Any,
    rank_h: Any,
    rank_w: Any,
    first: Any,
    second: Any,
    out: Any,
) -> None:
    """``A_H X A_W`` of a plane, by way of the first cosine modes of both axes: ``rank`` even ones, ``rank`` odd ones.

    ``down`` and ``across`` hold, for even and then for odd modes, the square blocks (mode, pixel) and their transposes.
    Rows go first, and come back last: those products have long inner loops, whatever the ranks.
    """
    odd_h, odd_w = height // 2, width // 2
    even_h, even_w = height - odd_h, width - odd_w
    rank_eh, rank_oh, rank_ew, rank_ow = (
        min(rank_h, even_h),
        min(rank_h, odd_h),
        min(rank_w, even_w),
        min(rank_w, odd_w),
    )
    rows, columns = rank_eh + rank_oh, rank_ew + rank_ow
    block_h, block_w = even_h * even_h, even_w * even_w
    _fold_rows(x, height, width, first)
    _product(rank_eh, width, even_h, down[0], 0, even_h, first, 0, width, second, 0, width)
    lower = rank_eh * width
    _product(rank_oh, width, odd_h, down[0], block_h, odd_h, first, even_h * width, width, second, lower, width)
    _fold_columns(second, rows, width)
    _product(rows, rank_ew, even_w, second, 0, width, across[1], 0, even_w, first, 0, columns)
    _product(rows, rank_ow, odd_w, second, even_w, width, across[1], block_w, odd_w, first, rank_ew, columns)
    for a in range(rows):
        factor = factors_h[2 * a if a < rank_eh else 2 * (a - rank_eh) + 1]
        core = first[a * columns : (a + 1) * columns]
        for b in range(rank_ew):
            core[b] *= np.float32(factor * factors_w[2 * b])
        for b in range(rank_ow):
            core[rank_ew + b] *= np.float32(factor * factors_w[2 * b + 1])
    _product(rows, even_w, rank_ew, first, 0, columns, across[0], 0, even_w, second, 0, width)
    _product(rows, odd_w, rank_ow, first, rank_ew, columns, across[0], block_w, odd_w, second, even_w, width)
    _unfold_columns(second, rows, width)
    _product(even_h, width, rank_eh, down[1], 0, even_h, second, 0, width, first, 0, width)
    _product(odd_h, width, rank_oh, down[1], block_h, odd_h, second, lower, width, first, even_h * width, width)
    _unfold_rows(first, height, width, out)


@_compiled
def _taps(kernel: Any, radius: Any) -> Any:
    """The band of ``h`` up to ``radius``, scaled to sum to 1 over both sides."""
    total = kernel[0]
    for m in range(1, radius + 1):
        total += 2.0 * kernel[m]
    taps = np.empty(radius + 1, np.float32)
    for m in range(radius + 1):
        taps[m] = kernel[m] / total
    return taps


COPY, NOISE, FILTER, MODES, DENSE = 0, 1, 2, 3, 4


@_compiled
def run(
    x: Any,
    out: Any,
    rows: Any,
    channels: Any,
    height: Any,
    width: Any,
    interleaved: Any,
    way: Any,
    alpha: Any,
    sigma: Any,
    sample: Any,
    epoch: Any,
    seed: Any,
    place: Any,
    cosines_h: Any,
    cosines_w: Any,
    factors_h: Any,
    factors_w: Any,
    extent_h: Any,
    extent_w: Any,
    down: Any,
    across: Any,
) -> None:
    """Mollify the images ``rows`` of the batch ``x (B, values)`` into ``out``, which may be ``x`` itself.

    ``way``, ``alpha``, ``sigma`` and ``sample`` have an entry an image; ``place`` says which row of the blur's arrays
    is an image's: the factors of the modes of both axes, and how many of them, or of ``h``, to use.
    """
    pixels = height * width
    first, second = _aligned(pixels), _aligned(pixels)
    plane, result = _aligned(pixels if interleaved else 0), _aligned(pixels if interleaved else 0)
    kernel = np.empty(max(height, width) + 1)
    half_h, half_w = (height + 1) // 2, (width + 1) // 2
    matrix_h, matrix_w = _aligned(2 * half_h * half_h), _aligned(2 * half_w * half_w)
    for b in rows:
        s, d = x[b], out[b]
        if way[b] == NOISE:
            _add_noise(s, d, channels, interleaved, alpha[b], sigma[b], sample[b], epoch, seed)
        else:
            n = place[b]
            fh, fw, eh, ew = factors_h[n], factors_w[n], extent_h[n], extent_w[n]
            if way[b] == DENSE:
                _heat_kernel(fh, cosines_h, height + 1, kernel)
                _half_matrices(kernel, height, matrix_h)
                _heat_kernel(fw, cosines_w, width + 1, kernel)
                _half_matrices(kernel, width, matrix_w)
            taps_h = taps_w = matrix_h[:0]
            if way[b] == FILTER:
                _heat_kernel(fh, cosines_h, eh + 1, kernel)
                taps_h = _taps(kernel, eh)
                _heat_kernel(fw, cosines_w, ew + 1, kernel)
                taps_w = _taps(kernel, ew)
            for c in range(channels):
                if interleaved:
                    _load_plane(s, channels, c, plane)
                    source, target = plane, result
                else:
                    source, target = s[c * pixels : (c + 1) * pixels], d[c * pixels : (c + 1) * pixels]
                if way[b] == FILTER:
                    _filter(source, height, width, taps_h, taps_w, first, target)
                elif way[b] == DENSE:
                    _dense(source, height, width, matrix_h, matrix_w, first, second, target)
                else:
                    _modes(source, height, width, down, across, fh, fw, eh, ew, first, second, target)
                if interleaved:
                    _store_plane(target, d, channels, c)
