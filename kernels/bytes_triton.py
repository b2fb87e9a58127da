"""How the kernels of :mod:`fastmoll.kernels.batch_tail_triton_bytes` read interleaved bytes of three channels, flipped
and mixed. Clean and noised images go the whole way here.

A thread has 24 bytes: eight pixels. Which of them belongs to which channel is known when the code is compiled, so that
channels are separated, pixels put in the opposite order, and results interleaved by naming registers.
"""

# Tuples grow, in loops that are unrolled.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from fastmoll.kernels.philox_triton import INTERPRETED, four_normals
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
def _word(low, high, kind: tl.constexpr):
    """Two numbers, rounded to half precision, in a word: one instruction, which the compiler does not find."""
    if INTERPRETED:
        word = low.to(kind).to(tl.uint16, bitcast=True).to(tl.uint32)
        return word | (high.to(kind).to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    elif kind == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def _swapped(x, N: tl.constexpr):
    """Numbers 1, 0, 3, 2 and so on of ``N`` words."""
    pairs = tl.reshape(x, [N // 2, 2])
    return tl.reshape(pairs ^ tl.xor_sum(pairs, 1, keep_dims=True), [N])


@triton.jit
def _store_words(target, a, b, c, d, mask, N: tl.constexpr):
    """Four words at each of ``target``."""
    four = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [N, 4])
    words = target.to(tl.pointer_type(tl.uint32), bitcast=True)
    tl.store(words[:, None] + tl.arange(0, 4)[None, :], four, mask[:, None])


@triton.jit
def _store_sectors(target, place, count, x, N: tl.constexpr):
    """Store a tuple of 24, float32, at the first ``count`` of ``N`` of ``target``. Each has one and a half sectors of
    memory; two beside each other store halves of the same three at a time, as a half costs as much as all of it."""
    kind: tl.constexpr = target.dtype.element_ty
    odd = (place & 1) != 0
    to = target - tl.where(odd, 16, 0)
    low = ()
    other = ()
    high = ()
    for j in tl.static_range(4):
        low += (_word(x[2 * j], x[2 * j + 1], kind),)
        other += (_swapped(_word(x[8 + 2 * j], x[9 + 2 * j], kind), N),)
        high += (_word(x[16 + 2 * j], x[17 + 2 * j], kind),)
    for third in tl.static_range(3):
        words = ()
        for j in tl.static_range(4):
            if third == 0:
                words += (tl.where(odd, other[j], low[j]),)
            elif third == 1:
                words += (tl.where(odd, low[j], high[j]),)
            else:
                words += (tl.where(odd, high[j], other[j]),)
        owner = place if third == 1 else (place & -2) + third // 2
        _store_words(to + 16 * third, words[0], words[1], words[2], words[3], owner < count, N)


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
    place = tl.arange(0, GROUPS)
    for start in range(first, last, GROUPS):
        group = start + place
        mask = group < last
        h = group // row
        x = pixels_of(
            images, image, h, group - h * row, mask, mirror, second, mirror2, part, y0, y1, x0, x1, H, W, MIX, GROUPS
        )
        to = out + image.to(tl.int64) * (H * W * 3) + group * 24
        values = ()
        for j in tl.static_range(24):
            values += (x[j] * factors[j % 3] + summands[j % 3],)
        if NOISE:
            # What bounds it is the number of instructions: it stores as it is.
            noisy = ()
            for quarter in tl.static_range(6):
                noise = four_normals(group * 6 + quarter, sigma, sample, epoch, key0, key1)
                for k in tl.static_range(4):
                    noisy += ((values[4 * quarter + k] + noise[k]).to(out.dtype.element_ty),)
            for third in tl.static_range(3):
                eight = join_eight(
                    noisy[8 * third], noisy[8 * third + 1], noisy[8 * third + 2], noisy[8 * third + 3],
                    noisy[8 * third + 4], noisy[8 * third + 5], noisy[8 * third + 6], noisy[8 * third + 7], GROUPS,
                )  # fmt: skip
                tl.store(to[:, None] + (8 * third + tl.arange(0, 8))[None, :], eight, mask[:, None])
        else:
            _store_sectors(to, place, last - start, values, GROUPS)
