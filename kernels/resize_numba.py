"""Pixels to another size on a CPU, for DALI's operator that calls Numba's functions; importing this file imports Numba.

Linear, with a filter as wide as the reduction, as ``antialias=True`` means in torchvision, Pillow and DALI. DALI's own
operator takes three to four times as long on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from fastmoll.kernels.compiled_numba import compiled as _compiled
from fastmoll.kernels.compiled_numba import entry as _entry

# What comes from other files, which Numba's cache does not watch (tests/test_numba_cache.py): c4cf6327c901

_intrinsic: Callable[[Any], Any] = intrinsic  # what Numba says of its type is not how it is called
_HALF = np.float32(0.5)


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
    """``image``, uint8 ``(H, W, 3)`` without gaps, to the height and width of ``out``: rows first, rounded once."""
    height, width, channels = image.shape
    rows, columns, _ = out.shape
    first_row, row_count, row_weight = _filters(height, rows)
    first_column, column_count, column_weight = _filters(width, columns)
    source, target = image.reshape(height, width * channels), out.reshape(rows, columns * channels)
    line = np.empty(width * channels, np.float32)
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
            red, green, blue = _HALF, _HALF, _HALF
            place = 3 * first_column[j]
            for k in range(column_count[j]):
                weight = column_weight[j, k]
                red += weight * line[place]
                green += weight * line[place + 1]
                blue += weight * line[place + 2]
                place += 3
            result[3 * j], result[3 * j + 1], result[3 * j + 2] = np.uint8(red), np.uint8(green), np.uint8(blue)


@_intrinsic
def _pointer(context: Any, address: Any) -> Any:
    """An address, as DALI gives them, as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), generate


# The same for DALI's operator `NumbaFunction`, by addresses. Its inputs are one whose length is the height and width of
# the result, and the image. What there is for all inputs, and for all samples of each, lies one after the other.
SETUP = types.void(*[types.uint64] * 2, types.int32, *[types.uint64] * 2, *[types.int32] * 2)
RUN = types.void(*[types.uint64] * 3, types.int32, *[types.uint64] * 3, types.int32)


@_compiled
def _shape(addresses: Any, place: Any, dims: Any) -> Any:
    return carray(_pointer(carray(_pointer(addresses), place + 1, np.uint64)[place]), dims, np.int64)


@_entry(SETUP)
def setup(out_shapes: Any, _0: Any, _1: Any, in_shapes: Any, _2: Any, _3: Any, samples: Any) -> None:
    """Write the shapes of a batch's results."""
    for sample in range(samples):
        shape = _shape(out_shapes, sample, 3)
        shape[0] = shape[1] = _shape(in_shapes, sample, 1)[0]
        shape[2] = 3


@_entry(RUN)
def run(outs: Any, out_shapes: Any, _0: Any, _1: Any, ins: Any, in_shapes: Any, _2: Any, _3: Any) -> None:
    """Compute one sample's result."""
    before, after = _shape(in_shapes, 1, 3), _shape(out_shapes, 0, 3)
    image = carray(_pointer(carray(_pointer(ins), 2, np.uint64)[1]), (before[0], before[1], 3), np.uint8)
    out = carray(_pointer(carray(_pointer(outs), 1, np.uint64)[0]), (after[0], after[1], 3), np.uint8)
    resize(image, out)
