"""How the kernels of :mod:`fastmoll.kernels.batch_tail_triton_bytes` read interleaved bytes of three channels, flipped
and mixed. Clean and noised images go the whole way here.

A thread has 24 bytes: eight pixels. Which of them belongs to which channel is known when the code is compiled, so that
channels are separated, pixels put in the opposite order, and results interleaved by naming registers.
"""

# Tuples grow, in loops that are unrolled.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from fastmoll.kernels.philox_triton import four_normals
from fastmoll.kernels.pixels_triton import join_eight, split_eight

_MIXUP: tl.constexpr = tl.constexpr(1)


@triton.jit
def bytes_of(images, image, h, g, mask, H, W, N: tl.constexpr):
    """The bytes of groups ``g`` of rows ``h``, as they lie in memory: a tuple of 24."""
    at = images + image.to(tl.int64) * (H * W * 3) + (h * (W * 3) + g * 24)[:, None] + tl.arange(0, 8)[None, :]
    mask = mask[:, None]
    x = split_eight(tl.load(at, mask, other=0), N)
    y = split_eight(tl.load(at + 8, mask, other=0), N)
    return x + y + split_eight(tl.load(at + 16, mask, other=0), N)


@triton.jit
def _flipped(images, image, h, g, mask, mirror, H, W, N: tl.constexpr):
    """The same of an image that is flipped where ``mirror`` is not 0: the group opposite, its pixels backwards."""
    turn = mirror != 0
    x = bytes_of(images, image, h, tl.where(turn, W // 8 - 1 - g, g), mask, H, W, N)
    result = ()
    for j in tl.static_range(24):
        result += (tl.where(turn, x[21 - j // 3 * 3 + j % 3], x[j]),)
    return result


@triton.jit
def pixels_of(images, image, h, g, mask, mirror, second, mirror2, part, y0, y1, x0, x1, H, W, MIX: tl.constexpr,
            N: tl.constexpr):  # fmt: skip
    """Flipped and mixed bytes, float32: a tuple of 24."""
    result = ()
    one = _flipped(images, image, h, g, mask, mirror, H, W, N)
    if MIX == 0:
        for j in tl.static_range(24):
            result += (one[j].to(tl.float32),)
    else:
        two = _flipped(images, second, h, g, mask, mirror2, H, W, N)
        for j in tl.static_range(24):
            if MIX == _MIXUP:
                result += (part * one[j].to(tl.float32) + (1.0 - part) * two[j].to(tl.float32),)
            else:
                w = g * 8 + j // 3
                inside = (h >= y0) & (h < y1) & (w >= x0) & (w < x1)
                result += (tl.where(inside, two[j], one[j]).to(tl.float32),)
    return result


@triton.jit
def pointwise(
    out, images, affine, image, mirror, second, mirror2, part, y0, y1, x0, x1, alpha, sigma, sample, epoch, key0, key1,
    top, bottom, H, W, MIX: tl.constexpr, NOISE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Rows ``top ... bottom - 1`` of a clean or noised image, ``GROUPS`` times 24 numbers at a time."""
    row = W // 8
    first = top * row
    last = tl.minimum(bottom, H) * row
    factors = (tl.load(affine) * alpha, tl.load(affine + 1) * alpha, tl.load(affine + 2) * alpha)
    summands = (tl.load(affine + 3) * alpha, tl.load(affine + 4) * alpha, tl.load(affine + 5) * alpha)
    for start in range(first, last, GROUPS):
        group = start + tl.arange(0, GROUPS)
        mask = group < last
        h = group // row
        x = pixels_of(
            images, image, h, group - h * row, mask, mirror, second, mirror2, part, y0, y1, x0, x1, H, W, MIX, GROUPS
        )
        to = out + image.to(tl.int64) * (H * W * 3) + (group * 24)[:, None] + tl.arange(0, 8)[None, :]
        values = ()
        for quarter in tl.static_range(6):
            if NOISE:
                noise = four_normals(group * 6 + quarter, sigma, sample, epoch, key0, key1)
            for k in tl.static_range(4):
                value = x[4 * quarter + k] * factors[(4 * quarter + k) % 3] + summands[(4 * quarter + k) % 3]
                if NOISE:
                    value += noise[k]
                values += (value.to(out.dtype.element_ty),)
        for third in tl.static_range(3):
            eight = join_eight(
                values[8 * third], values[8 * third + 1], values[8 * third + 2], values[8 * third + 3],
                values[8 * third + 4], values[8 * third + 5], values[8 * third + 6], values[8 * third + 7], GROUPS,
            )  # fmt: skip
            tl.store(to + 8 * third, eight, mask[:, None])
