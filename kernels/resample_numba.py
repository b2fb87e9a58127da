"""Crops to their final size on a CPU, for DALI's operator that calls compiled code; importing this file imports Numba.

DALI's own operators take three to four times as long on a CPU. The four bytes from a pixel's first on are worked on at
once; the fourth belongs to the pixel after it and is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from fastmoll.kernels.compiled_numba import compiled as _compiled
from fastmoll.kernels.compiled_numba import entry as _entry

# What comes from other files, which Numba's cache does not watch (tests/test_numba_cache.py): 9b89b9006af8

# What Numba says of their types is not how they are called.
_helpers: Any = cgutils
_intrinsic: Callable[[Any], Any] = intrinsic

_FLOATS, _INTEGERS, _BYTES = (ir.VectorType(kind, 4) for kind in (ir.FloatType(), ir.IntType(32), ir.IntType(8)))
_ZERO, _HALF = np.float32(0.0), np.float32(0.5)


def _splat(builder: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_INTEGERS, [0] * 4))


def _rounded(builder: Any, values: Any) -> Any:
    """Four values in [0, 255] as the bytes of a word."""
    half = ir.Constant(_FLOATS, [0.5] * 4)
    whole = builder.fptosi(builder.fadd(values, half), _INTEGERS)
    return builder.bitcast(builder.trunc(whole, _BYTES), ir.IntType(32))


@_intrinsic
def _blend(context: Any, line: Any, place: Any, weights: Any, row: Any, count: Any) -> Any:
    """``Σ_k weights[row, k] line[place + 3k ... + 3]``, rounded, as the bytes of a word."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, table = (context.make_array(signature.args[at])(context, builder, arguments[at]) for at in (0, 2))
        place, row, count = arguments[1], arguments[3], arguments[4]
        stride = builder.sdiv(_helpers.unpack_tuple(builder, table.strides)[0], row.type(4))
        start = builder.gep(table.data, [builder.mul(row, stride)])
        total = _helpers.alloca_once_value(builder, ir.Constant(_FLOATS, [0.0] * 4))
        with _helpers.for_range(builder, count) as loop:
            weight = _splat(builder, builder.load(builder.gep(start, [loop.index])))
            at = builder.gep(values.data, [builder.add(place, builder.mul(loop.index, place.type(3)))])
            four = builder.load(builder.bitcast(at, _FLOATS.as_pointer()), align=4)
            builder.store(builder.fadd(builder.load(total), builder.fmul(weight, four)), total)
        return _rounded(builder, builder.load(total))

    return types.uint32(line, types.intp, weights, types.intp, types.intp), generate


@_intrinsic
def _between(context: Any, pixels: Any, place: Any, below: Any, across: Any, down: Any) -> Any:
    """Between the pixels at ``place``, after it, and ``below`` bytes later, linear, rounded, as the bytes of a word."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place, below = arguments[1], arguments[2]
        right, bottom = _splat(builder, arguments[3]), _splat(builder, arguments[4])

        def four(at: Any) -> Any:
            address = builder.bitcast(builder.gep(data, [at]), _BYTES.as_pointer())
            return builder.uitofp(builder.load(address, align=1), _FLOATS)

        def mix(one: Any, other: Any, share: Any) -> Any:
            return builder.fadd(one, builder.fmul(share, builder.fsub(other, one)))

        under = builder.add(place, below)
        upper, lower = (mix(four(at), four(builder.add(at, at.type(3))), right) for at in (place, under))
        return _rounded(builder, mix(upper, lower, bottom))

    return types.uint32(pixels, types.intp, types.intp, types.float32, types.float32), generate


@_intrinsic
def _store(context: Any, word: Any, row: Any, place: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[1])(context, builder, arguments[1]).data
        address = builder.bitcast(builder.gep(data, [arguments[2]]), arguments[0].type.as_pointer())
        builder.store(arguments[0], address, align=1)
        return context.get_dummy_value()

    return types.void(types.uint32, row, types.intp), generate


@_compiled
def _put(word: Any, row: Any, j: Any) -> None:
    """Pixel ``j`` of a row, from the left: what is written after it is overwritten by the next."""
    if 3 * j + 4 <= len(row):
        _store(word, row, 3 * j)
    else:
        row[3 * j], row[3 * j + 1], row[3 * j + 2] = word & 255, (word >> 8) & 255, (word >> 16) & 255


@_compiled
def _filters(length: Any, size: Any) -> Any:
    """For each place of ``size``: where its pixels of ``length`` begin, how many, and their weights, which sum to 1."""
    scale = length / size
    reach = max(scale, 1.0)  # of a triangle on either side
    first, count = np.empty(size, np.int64), np.empty(size, np.int64)
    weights = np.zeros((size, int(2 * reach) + 2), np.float32)
    for i in range(size):
        centre = scale * (i + 0.5)
        begin, end = max(int(centre - reach + 0.5), 0), min(int(centre + reach + 0.5), length)
        first[i], count[i] = begin, end - begin
        total = 0.0
        for k in range(begin, end):
            total += 1.0 - abs(k + 0.5 - centre) / reach
        for k in range(begin, end):
            weights[i, k - begin] = (1.0 - abs(k + 0.5 - centre) / reach) / total
    return first, count, weights


@_compiled
def resize(image: Any, out: Any) -> None:
    """``image``, uint8 ``(H, W, 3)`` without gaps, to the height and width of ``out``, likewise.

    Linear, with a filter as wide as the reduction: ``antialias=True`` of torchvision, Pillow and DALI. Rows come first;
    it is rounded once.
    """
    height, width, _ = image.shape
    rows, columns, _ = out.shape
    first_row, row_count, row_weight = _filters(height, rows)
    first_column, column_count, column_weight = _filters(width, columns)
    source, target = image.reshape(height, 3 * width), out.reshape(rows, 3 * columns)
    memory = np.zeros(3 * width + 1, np.float32)
    line = memory[: 3 * width]
    for i in range(rows):
        pixels, weight = source[first_row[i]], row_weight[i, 0]
        for x in range(len(line)):
            line[x] = weight * pixels[x]
        for k in range(1, row_count[i]):
            pixels, weight = source[first_row[i] + k], row_weight[i, k]
            for x in range(len(line)):
                line[x] += weight * pixels[x]
        result = target[i]
        for j in range(columns):
            _put(_blend(memory, 3 * first_column[j], column_weight, j, column_count[j]), result, j)


@_compiled
def _range(start: Any, step: Any, end: Any, count: Any, margin: Any) -> Any:
    """The range of ``j < count`` with ``0 <= start + j step < end``, ``margin`` shorter at either end."""
    if end <= 0 or step == _ZERO:
        return 0, count if 0 <= start < end else 0
    one, other = -start / step, (end - start) / step
    first, last = max(min(one, other), -2.0), min(max(one, other), count + 2.0)
    return max(math.ceil(first) + margin, 0), min(math.floor(last) + 1 - margin, count)


@_compiled
def _put_border(image: Any, x: Any, y: Any, row: Any, j: Any) -> None:
    """Between four pixels, of which those outside of the image are black."""
    height, width, _ = image.shape
    left, top = math.floor(x), math.floor(y)
    for c in range(3):
        total = _HALF
        for i in range(max(top, 0), min(top + 2, height)):
            for k in range(max(left, 0), min(left + 2, width)):
                total += (1 - abs(x - np.float32(k))) * (1 - abs(y - np.float32(i))) * image[i, k, c]
        row[3 * j + c] = np.uint8(total)


@_compiled
def rotate(image: Any, angle: Any, out: Any) -> None:
    """``image`` to the size of ``out``, as in `resize`, turned counter-clockwise about its centre by ``angle`` degrees.

    One resampling, linear, black outside. An image more than twice as large as the result is reduced to that first.
    """
    rows, columns, _ = out.shape
    height, width, _ = image.shape
    if height > 2 * rows or width > 2 * columns:
        reduced = np.empty((min(height, 2 * rows), min(width, 2 * columns), 3), np.uint8)
        resize(image, reduced)
        image = reduced
        height, width, _ = image.shape
    # Where a step to the right and one down lead in the image.
    cosine, sine = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    right_x, right_y = cosine * width / columns, sine * height / rows
    down_x, down_y = -sine * width / columns, cosine * height / rows
    step_x, step_y = np.float32(right_x), np.float32(right_y)
    pixels, below = image.reshape(-1), 3 * width
    for i in range(rows):
        result = out[i].reshape(-1)
        u, v = 0.5 - columns / 2, i + 0.5 - rows / 2
        from_x = np.float32(right_x * u + down_x * v + width / 2 - 0.5)
        from_y = np.float32(right_y * u + down_y * v + height / 2 - 0.5)
        # Places with any of their four pixels in the image, and those with all, as far as that is certain; the last
        # column counts as border, for its lowest pixel has no byte after it.
        begin, end = _range(from_x + 1, step_x, width + 1, columns, -1)
        top, bottom = _range(from_y + 1, step_y, height + 1, columns, -1)
        begin, end = max(begin, top), min(end, bottom)
        first, last = _range(from_x, step_x, width - 2, columns, 1)
        top, bottom = _range(from_y, step_y, height - 1, columns, 1)
        first, last = max(first, top), min(last, bottom)
        result[: 3 * begin] = 0
        for j in range(begin, end):
            x, y = from_x + np.float32(j) * step_x, from_y + np.float32(j) * step_y
            if first <= j < last:
                # Sums of floats may be a little beyond.
                left, top = min(np.int64(x), width - 3), min(np.int64(y), height - 2)
                share_x, share_y = x - np.float32(left), y - np.float32(top)
                _put(_between(pixels, top * below + 3 * left, below, share_x, share_y), result, j)
            else:
                _put_border(image, x, y, result, j)
        result[3 * max(begin, end) :] = 0


@_intrinsic
def _pointer(context: Any, address: Any) -> Any:
    """An address, as DALI gives them, as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), generate


# The same for DALI's operator `NumbaFunction`, by addresses. Its inputs are one whose length is the height and width of
# the result, the image, and, to rotate it, the angle. What there is for all inputs, and for all samples of each, lies
# one after the other.
SETUP = types.void(*[types.uint64] * 2, types.int32, *[types.uint64] * 2, *[types.int32] * 2)
RUN = types.void(*[types.uint64] * 3, types.int32, *[types.uint64] * 3, types.int32)


@_compiled
def _address(addresses: Any, place: Any) -> Any:
    return _pointer(carray(_pointer(addresses), place + 1, np.uint64)[place])


@_entry(SETUP)
def setup(out_shapes: Any, _0: Any, _1: Any, in_shapes: Any, _2: Any, _3: Any, samples: Any) -> None:
    """Write the shapes of a batch's results."""
    for sample in range(samples):
        shape = carray(_address(out_shapes, sample), 3, np.int64)
        shape[0] = shape[1] = carray(_address(in_shapes, sample), 1, np.int64)[0]
        shape[2] = 3


@_entry(RUN)
def run(outs: Any, out_shapes: Any, _0: Any, _1: Any, ins: Any, in_shapes: Any, _2: Any, inputs: Any) -> None:
    """Compute one sample's result."""
    before, after = carray(_address(in_shapes, 1), 3, np.int64), carray(_address(out_shapes, 0), 3, np.int64)
    image = carray(_address(ins, 1), (before[0], before[1], 3), np.uint8)
    out = carray(_address(outs, 0), (after[0], after[1], 3), np.uint8)
    if inputs == 3:
        rotate(image, carray(_address(ins, 2), 1, np.float32)[0], out)
    else:
        resize(image, out)
