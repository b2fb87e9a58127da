"""How the kernels of :mod:`fastmoll.kernels.batch_tail_triton` read images, flipped and mixed, and write them.

Clean and noised images go the whole way here: standardised, with noise, one element after the other.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastmoll.kernels.philox_triton import normals

_MIXUP: tl.constexpr = tl.constexpr(1)
_CUTMIX: tl.constexpr = tl.constexpr(2)


@triton.jit
def _flag(flip, image):
    if flip is None:
        return 0
    else:
        return tl.load(flip + image).to(tl.int32)


@triton.jit
def recipe(flip, partner, lam, box, image, B, MIX: tl.constexpr):
    """The scalars that say where the pixels of an image come from."""
    mirror = _flag(flip, image)
    second = image
    mirror2 = mirror
    part = 1.0
    y0 = 0
    y1 = 0
    x0 = 0
    x1 = 0
    if MIX != 0:
        # A bad partner may give a wrong image, but must not read outside the batch.
        second = tl.minimum(tl.maximum(tl.load(partner + image), 0), B - 1).to(tl.int32)
        mirror2 = _flag(flip, second)
    if MIX == _MIXUP:
        part = tl.load(lam + image)
    if MIX == _CUTMIX:
        y0 = tl.load(box + image * 4)
        y1 = tl.load(box + image * 4 + 1)
        x0 = tl.load(box + image * 4 + 2)
        x1 = tl.load(box + image * 4 + 3)
    return mirror, second, mirror2, part, y0, y1, x0, x1


@triton.jit
def pixels(
    images, image, h, w, c, mask, mirror, second, mirror2, part, y0, y1, x0, x1,
    W, stride_b, stride_h, stride_w, stride_c, MIX: tl.constexpr,
):  # fmt: skip
    """Flipped and mixed pixels at (h, w, c), not standardised: that is affine, so it may come after mixing."""
    opposite = W - 1 - 2 * w
    base = images + image.to(tl.int64) * stride_b
    x = h * stride_h + (w + mirror * opposite) * stride_w + c * stride_c
    if MIX == 0:
        return tl.load(base + x, mask, other=0).to(tl.float32)
    else:
        other = images + second.to(tl.int64) * stride_b
        y = h * stride_h + (w + mirror2 * opposite) * stride_w + c * stride_c
        if MIX == _MIXUP:
            one = tl.load(base + x, mask, other=0).to(tl.float32)
            two = tl.load(other + y, mask, other=0).to(tl.float32)
            return part * one + (1.0 - part) * two
        else:
            inside = (h >= y0) & (h < y1) & (w >= x0) & (w < x1)
            one = tl.load(base + x, mask & (inside == 0), other=0).to(tl.float32)
            two = tl.load(other + y, mask & inside, other=0).to(tl.float32)
            return tl.where(inside, two, one)


@triton.jit
def _piece(
    out, images, image, start, scale, shift, mirror, second, mirror2, part, y0, y1, x0, x1,
    sigma, sample, epoch, key0, key1, H, W, inverse, stride_b, stride_h, stride_w, stride_c,
    C: tl.constexpr, MIX: tl.constexpr, PACKED: tl.constexpr, LAST: tl.constexpr, NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Elements ``start ... start + BLOCK - 1`` of an image, in the order of the noise stream: row, column, channel."""
    size = H * W * C
    flat = start + tl.arange(0, BLOCK)
    mask = flat < size
    pixel = (flat.to(tl.uint32) // C).to(tl.int32)
    c = flat - pixel * C
    # The row, pixel // W: exact with inverse = ceil(2^30 / W), as long as there are no more than 2^18 pixels.
    h = tl.umulhi((pixel << 2).to(tl.uint32), inverse.to(tl.uint32)).to(tl.int32)
    w = pixel - h * W
    if PACKED and MIX == 0:
        if mirror == 0:
            # The common case is one contiguous run, which the compiler only sees when it is written like this.
            x = tl.load(images + image.to(tl.int64) * stride_b + flat, mask, other=0).to(tl.float32)
        else:
            x = tl.load(
                images + image.to(tl.int64) * stride_b + flat + (W - 1 - 2 * w) * C, mask, other=0
            ).to(tl.float32)  # fmt: skip
    else:
        x = pixels(
            images, image, h, w, c, mask, mirror, second, mirror2, part, y0, y1, x0, x1,
            W, stride_b, stride_h, stride_w, stride_c, MIX,
        )  # fmt: skip
    x = x * scale + shift
    if NOISE:
        x += normals(start // 4, BLOCK, sigma, sample, epoch, key0, key1)
    place = flat if LAST else c * (H * W) + pixel
    tl.store(out + image.to(tl.int64) * size + place, x.to(out.dtype.element_ty), mask)


@triton.jit
def pointwise(
    out, images, affine, flip, partner, lam, box, image, first, last, alpha, sigma, sample, epoch, key0, key1,
    B, H, W, inverse, stride_b, stride_h, stride_w, stride_c,
    C: tl.constexpr, MIX: tl.constexpr, PACKED: tl.constexpr, LAST: tl.constexpr, NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Elements ``first ... last - 1`` of a clean or noised image; ``first`` is a multiple of ``C * BLOCK``."""
    mirror, second, mirror2, part, y0, y1, x0, x1 = recipe(flip, partner, lam, box, image, B, MIX)
    # A block is no multiple of 3 long, but three blocks are: with one round of the loop for all channels, the factors
    # of each of its C blocks are the same in every round.
    scale0, shift0 = _factors(affine, 0, alpha, C, BLOCK)
    scale1, shift1 = _factors(affine, 1, alpha, C, BLOCK)
    scale2, shift2 = _factors(affine, 2, alpha, C, BLOCK)
    for start in range(first, tl.minimum(last, H * W * C), C * BLOCK):
        for block in tl.static_range(C):
            if block == 0:
                scale = scale0
                shift = shift0
            elif block == 1:
                scale = scale1
                shift = shift1
            elif block == 2:
                scale = scale2
                shift = shift2
            else:
                scale, shift = _factors(affine, block, alpha, C, BLOCK)
            _piece(
                out, images, image, start + block * BLOCK, scale, shift,
                mirror, second, mirror2, part, y0, y1, x0, x1,
                sigma, sample, epoch, key0, key1, H, W, inverse, stride_b, stride_h, stride_w, stride_c,
                C, MIX, PACKED, LAST, NOISE, BLOCK,
            )  # fmt: skip


@triton.jit
def _factors(affine, block, alpha, C: tl.constexpr, BLOCK: tl.constexpr):
    """Factors and summands of the channels of elements ``block * BLOCK ...``, times ``alpha``."""
    c = (block * BLOCK + tl.arange(0, BLOCK)) % C
    return tl.load(affine + c) * alpha, tl.load(affine + C + c) * alpha


@triton.jit
def split_eight(x, N: tl.constexpr):
    """Columns 0 ... 7 of ``N`` times eight numbers."""
    # By the upper bit of the column first: the other way, what comes out of a product changes hands half by half.
    low, high = tl.split(tl.permute(tl.reshape(x, [N, 2, 2, 2]), (0, 3, 2, 1)))
    low0, low1 = tl.split(low)
    high0, high1 = tl.split(high)
    x0, x1 = tl.split(low0)
    x2, x3 = tl.split(low1)
    x4, x5 = tl.split(high0)
    x6, x7 = tl.split(high1)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def join_eight(x0, x1, x2, x3, x4, x5, x6, x7, N: tl.constexpr):
    """The reverse of :func:`split_eight`, ``(N, 8)``."""
    even = tl.join(tl.join(x0, x4), tl.join(x2, x6))
    odd = tl.join(tl.join(x1, x5), tl.join(x3, x7))
    return tl.reshape(tl.join(even, odd), [N, 8])


@triton.jit
def store_interleaved(target, room, a, b, c, N: tl.constexpr):
    """Store ``N`` times eight numbers of each as ``a0 b0 c0 a1 b1 c1 ...`` at each of ``target``: three runs of eight,
    one wide store each, those for which there is ``room``."""
    a0, a1, a2, a3, a4, a5, a6, a7 = split_eight(a, N)
    b0, b1, b2, b3, b4, b5, b6, b7 = split_eight(b, N)
    c0, c1, c2, c3, c4, c5, c6, c7 = split_eight(c, N)
    to = target[:, None] + tl.arange(0, 8)[None, :]
    room = room[:, None]
    tl.store(to, join_eight(a0, b0, c0, a1, b1, c1, a2, b2, N), room >= 8)
    tl.store(to + 8, join_eight(c2, a3, b3, c3, a4, b4, c4, a5, N), room >= 16)
    tl.store(to + 16, join_eight(b5, c5, a6, b6, c6, a7, b7, c7, N), room >= 24)


@functools.lru_cache(maxsize=32)
def affine_of(mean: tuple[float, ...], std: tuple[float, ...], unit: float, device: torch.device) -> Tensor:
    """Factors and summands ``(2, C)`` of the standardisation of pixels in [0, ``1 / unit``]."""
    pairs = [(unit / s, -m / s) for m, s in zip(mean, std, strict=True)]
    return torch.tensor(pairs, dtype=torch.float64).T.contiguous().float().to(device)
