"""The blur of :mod:`fastmoll.kernels.mollify_cpu` in SIMD registers; importing this file imports Numba.

``A_N`` maps mirror images to mirror images. So planes are folded: split into parts that are even and odd along both
axes, each given by the first half of its pixels, and ``A_N`` falls into two blocks of half the size. A folded plane has
each half of an axis filled up to ``P`` numbers, a multiple of 16: even rows, odd rows, ``2P`` in all, and the same of
columns. What stands in the rest is never part of a sum that matters.

LLVM turns a loop into SIMD along its innermost level only: the sums of a matrix product then go through memory, at half
of the speed. Here they stay in registers, because the innermost block is written in LLVM's own language, with vectors
of sixteen numbers; processors with shorter ones use several for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from fastmoll.kernels.compiled_numba import compiled as _compiled
from fastmoll.kernels.compiled_numba import fused as _fused
from fastmoll.kernels.counter_numba import take

# What comes from other files, which Numba's cache does not watch (tests/test_numba_cache.py): 477918cdd23c

# What Numba says of their types is not how they are called.
_helpers: Any = cgutils
_intrinsic: Callable[[Any], Any] = intrinsic

LANES = 16
"""Rows and columns of a product are multiples of this."""
# More than any axis is long.
_ALL = 2**30
# As many sums as there are registers for (32 of 16 numbers, or 16 of 8), enough to keep two multipliers busy.
_WIDE = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
_ROWS, _VECTORS = (8, 2) if _WIDE else (4, 1)


def _block(rows: int, vectors: int) -> Any:
    """``rows`` rows and ``16 * vectors`` columns of ``C`` from ``(i, j)`` on, summed over ``first <= k < last``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), LANES)
        lanes = ir.VectorType(ir.IntType(32), LANES)
        zero, unset = ir.Constant(vector, [0.0] * LANES), ir.Constant(vector, ir.Undefined)
        i, j, first, last = arguments[3:]

        def operand(position: int) -> tuple[Any, Any]:
            array = context.make_array(signature.args[position])(context, builder, arguments[position])
            stride = builder.sdiv(_helpers.unpack_tuple(builder, array.strides)[0], i.type(4))
            return array.data, stride

        def element(matrix: tuple[Any, Any], row: Any, column: Any, more: int = 0) -> Any:
            data, stride = matrix
            return builder.gep(builder.gep(data, [builder.add(builder.mul(row, stride), column)]), [i.type(more)])

        def as_vector(pointer: Any) -> Any:
            return builder.bitcast(pointer, vector.as_pointer())

        a, b, c = (operand(position) for position in range(3))
        # LLVM's first pass puts these into registers.
        sums = [[_helpers.alloca_once_value(builder, zero) for _ in range(vectors)] for _ in range(rows)]
        with _helpers.for_range_slice(builder, first, last, i.type(1), intp=i.type) as (k, _):
            right = [builder.load(as_vector(element(b, k, j, LANES * v)), align=4) for v in range(vectors)]
            for r in range(rows):
                one = builder.insert_element(unset, builder.load(element(a, k, i, r)), ir.IntType(32)(0))
                left = builder.shuffle_vector(one, unset, ir.Constant(lanes, [0] * LANES))
                for v in range(vectors):
                    product = builder.fmul(left, right[v], flags=("contract",))
                    added = builder.fadd(builder.load(sums[r][v]), product, flags=("contract",))
                    builder.store(added, sums[r][v])
        for r in range(rows):
            for v in range(vectors):
                place = element(c, builder.add(i, i.type(r)), j, LANES * v)
                builder.store(builder.load(sums[r][v]), as_vector(place), align=4)
        return context.get_dummy_value()

    @_intrinsic
    def block(context: Any, a: Any, b: Any, c: Any, i: Any, j: Any, first: Any, last: Any) -> Any:
        return types.void(a, b, c, types.intp, types.intp, types.intp, types.intp), generate

    return block


_main_block, _last_block = _block(_ROWS, _VECTORS), _block(_ROWS, 1)


@_compiled
def _product(a: Any, b: Any, band: Any, c: Any) -> None:
    """``C = Aᵀ B``, ``(n, k) (k, m)``, of float32 matrices whose rows are contiguous.

    Both operands are read along their rows so. ``n`` and ``m`` are multiples of :data:`LANES`. Of ``B``, only the terms
    ``|k - j| <= band`` have to be counted.
    """
    depth, width = len(a), _VECTORS * LANES
    n, m = c.shape
    for j in range(0, m, width):
        first, last = max(0, j - band), min(depth, j + width + band)
        if j + width <= m:
            for i in range(0, n, _ROWS):
                _main_block(a, b, c, i, j, first, last)
        else:
            for i in range(0, n, _ROWS):
                _last_block(a, b, c, i, j, first, last)


@_compiled
def padded_half(size: Any) -> Any:
    """``P``: half of an axis, rounded up."""
    return -(-((size + 1) // 2) // LANES) * LANES


@_compiled
def _scratch(size: Any) -> Any:
    """Zeros from a cache line on: loads that cross two of them are slower."""
    memory = np.zeros(size + 16, np.float32)
    return memory[(64 - memory.ctypes.data % 64) % 64 // 4 :][:size]


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
def _fold(x: Any, height: Any, width: Any, out: Any) -> None:
    """Even parts ``x_i + x_{N-1-i}`` and odd parts ``x_i - x_{N-1-i}`` along both axes, to ``out (2P, 2P)``.

    The middle of an odd axis is its own mirror image, and is even.
    """
    # Unsigned, because a signed index may be negative, counted from the end, and that test rules out SIMD.
    odd, last, half = np.uintp(width // 2), np.uintp(width - 1), np.uintp(padded_half(width))
    # And rows as slices of one dimension, of which LLVM sees that they do not overlap.
    flat, lower, columns = out.reshape(-1), len(out) // 2, out.shape[1]
    for i in range((height + 1) // 2):
        below = height - 1 - i
        s, t = x[i * width : (i + 1) * width], x[below * width : (below + 1) * width]
        d, e = flat[i * columns : (i + 1) * columns], flat[(lower + i) * columns : (lower + i + 1) * columns]
        if below > i:
            for j in range(odd):
                k = last - j
                left, right = s[j] + t[j], s[k] + t[k]
                d[j], d[half + j] = left + right, left - right
                left, right = s[j] - t[j], s[k] - t[k]
                e[j], e[half + j] = left + right, left - right
            if width % 2:
                d[odd], e[odd] = s[odd] + t[odd], s[odd] - t[odd]
        else:
            for j in range(odd):
                k = last - j
                d[j], d[half + j] = s[j] + s[k], s[j] - s[k]
            if width % 2:
                d[odd] = s[odd]


@_compiled
def _unfold(x: Any, height: Any, width: Any, out: Any) -> None:
    """Back from even and odd parts: ``e_i + o_i`` and, mirrored, ``e_i - o_i``."""
    odd, last, half = np.uintp(width // 2), np.uintp(width - 1), np.uintp(padded_half(width))
    for i in range((height + 1) // 2):
        below = height - 1 - i
        s, t = out[i * width : (i + 1) * width], out[below * width : (below + 1) * width]
        d, e = x[i], x[len(x) // 2 + i]
        if below > i:
            for j in range(odd):
                k = last - j
                plus, minus = d[j] + e[j], d[j] - e[j]
                other_plus, other_minus = d[half + j] + e[half + j], d[half + j] - e[half + j]
                s[j], s[k] = plus + other_plus, plus - other_plus
                t[j], t[k] = minus + other_minus, minus - other_minus
            if width % 2:
                s[odd], t[odd] = d[odd] + e[odd], d[odd] - e[odd]
        else:
            for j in range(odd):
                k = last - j
                s[j], s[k] = d[j] + d[half + j], d[j] - d[half + j]
            if width % 2:
                s[odd] = d[odd]


@_fused
def _heat_kernel(factors: Any, cosines: Any, sums: Any) -> None:
    """``h[0 ... N]``, as :func:`fastmoll.kernels.heat_blur.heat_kernel` sums it up, float64.

    Here, because a product in torch would leave its threads spinning on the cores that this needs.
    """
    for m in range(len(sums)):
        sums[m] = 0.0
    for k in range(len(factors)):
        factor, row = factors[k], cosines[k]
        for m in range(len(sums)):
            sums[m] += factor * row[m]


@_compiled
def _matrices(factors: Any, cosines: Any, negligible: Any, out: Any) -> Any:
    """The two blocks of ``A_N`` on even and on odd parts, to ``out (2, P, P)``; returns the width of their band.

    With ``e[m] = h[m] + h[m+N]`` and ``o[m] = h[m] - h[m+N]`` both are Toeplitz plus Hankel again:
    ``(e[i-j] + e[i+j+1]) / 2``, and the same of ``o``. All of ``h`` beyond the band adds up to ``negligible``.
    """
    size = len(factors)
    kernel, around = np.empty(size + 1), np.empty(3 * size, np.float32)
    _heat_kernel(factors, cosines, kernel)
    for part in range(2):
        half = (size + 1 - part) // 2
        for m in range(-size, 2 * size):
            # h is even and has period 2N: what is known of it is h[0 ... N].
            near, far = abs(m), abs(m + size) % (2 * size)
            near, far = min(near, 2 * size - near), min(far, 2 * size - far)
            around[m + size] = 0.5 * (kernel[near] + kernel[far] if part == 0 else kernel[near] - kernel[far])
        for i in range(half):
            row, toeplitz, hankel = out[part, i], around[size - i :], around[size + i + 1 :]
            for j in range(half):
                row[j] = toeplitz[j] + hankel[j]
    band, beyond = size, 2.0 * abs(kernel[size])
    while band > 0 and beyond <= negligible:
        band -= 1
        beyond += 2.0 * abs(kernel[band])
    return band


@_compiled
def _multiply(x: Any, blocks: Any, size: Any, band: Any, out: Any) -> None:
    """``Xᵀ B`` of ``size`` folded rows of ``x``, and the blocks of ``B`` on even and odd ones."""
    rows, columns = len(x) // 2, out.shape[1] // 2
    for part in range(2):
        depth = (size + 1 - part) // 2
        start, place = part * rows, part * columns
        _product(x[start : start + depth, :], blocks[part, :depth, :columns], band, out[:, place : place + columns])


@_compiled
def _shaped(memory: Any, rows: Any, columns: Any) -> Any:
    return memory[: rows * columns].reshape(rows, columns)


@_compiled
def _by_matrices(
    x: Any, height: Any, width: Any, down: Any, across: Any, band_h: Any, band_w: Any, memory: Any
) -> None:
    """``A_H X A_W`` of a folded plane, in place: ``(Xᵀ A_H)ᵀ A_W``."""
    turned = _shaped(memory, x.shape[1], x.shape[0])
    _multiply(x, down, height, band_h, turned)
    _multiply(turned, across, width, band_w, x)


@_compiled
def _by_modes(
    x: Any,
    height: Any,
    width: Any,
    modes_h: Any,
    modes_w: Any,
    factors_h: Any,
    factors_w: Any,
    rank_h: Any,
    rank_w: Any,
    memory: Any,
    more: Any,
) -> None:
    """The same by way of the first cosine modes of both axes, ``rank`` even ones and ``rank`` odd ones."""
    rows, columns = x.shape
    turned, core = _shaped(memory, columns, 2 * rank_h), _shaped(more, 2 * rank_h, 2 * rank_w)
    _multiply(x, modes_h[0], height, _ALL, turned)
    _multiply(turned, modes_w[0], width, _ALL, core)
    # Ranks are rounded up; modes beyond the last are zeros.
    for i in range(2 * rank_h):
        k = 2 * i if i < rank_h else 2 * (i - rank_h) + 1
        factor, row = factors_h[min(k, height - 1)], core[i]
        for j in range(min(rank_w, (width + 1) // 2)):
            row[j] *= np.float32(factor * factors_w[2 * j])
        for j in range(min(rank_w, width // 2)):
            row[rank_w + j] *= np.float32(factor * factors_w[2 * j + 1])
    back = _shaped(memory, 2 * rank_w, rows)
    _multiply(core, modes_h[1], 2 * rank_h, _ALL, back)
    _multiply(back, modes_w[1], 2 * rank_w, _ALL, x)


@_compiled
def run(
    x: Any,
    out: Any,
    order: Any,
    counter: Any,
    place: Any,
    channels: Any,
    height: Any,
    width: Any,
    interleaved: Any,
    rank_h: Any,
    rank_w: Any,
    factors_h: Any,
    factors_w: Any,
    cosines_h: Any,
    cosines_w: Any,
    modes_h: Any,
    modes_w: Any,
    negligible: Any,
) -> None:
    """Blur images of a batch of flat images ``(B, values)``; ``out`` may be ``x``.

    Images are planes ``(C, H, W)`` or interleaved ``(H, W, C)``. Threads that share a ``counter`` share the work:
    entries ``order`` of the arrays ``place``, which image of the batch it is, ``rank``, how many even cosine modes to
    use and as many odd ones, or 0 for matrices, and ``factors`` of the modes. ``cosines`` is the table of
    :mod:`fastmoll.kernels.heat_blur`, ``modes`` are blocks (pixel, mode) of even and odd modes, and their transposes.
    """
    pixels = height * width
    half_h, half_w = padded_half(height), padded_half(width)
    folded = _shaped(_scratch(4 * half_h * half_w), 2 * half_h, 2 * half_w)
    memory, more = _scratch(4 * half_h * half_w), _scratch(4 * half_h * half_w)
    plane = _scratch(pixels if interleaved else 0)
    down = _scratch(2 * half_h * half_h).reshape(2, half_h, half_h)
    across = down if height == width else _scratch(2 * half_w * half_w).reshape(2, half_w, half_w)
    while True:
        turn = take(counter)
        if turn >= len(order):
            return
        n = order[turn]
        s, d = x[place[n]], out[place[n]]
        fh, fw, rh, rw = factors_h[n], factors_w[n], rank_h[n], rank_w[n]
        band_h = band_w = 0
        if rh == 0:
            band_h = band_w = _matrices(fh, cosines_h, negligible, down)
            if height != width:
                band_w = _matrices(fw, cosines_w, negligible, across)
        for c in range(channels):
            if interleaved:
                _load_plane(s, channels, c, plane)
                source, target = plane, plane
            else:
                source, target = s[c * pixels : (c + 1) * pixels], d[c * pixels : (c + 1) * pixels]
            _fold(source, height, width, folded)
            if rh == 0:
                _by_matrices(folded, height, width, down, across, band_h, band_w, memory)
            else:
                _by_modes(folded, height, width, modes_h, modes_w, fh, fw, rh, rw, memory, more)
            _unfold(folded, height, width, target)
            if interleaved:
                _store_plane(target, d, channels, c)
