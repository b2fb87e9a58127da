"""The batch tail in Triton for images as decoders leave them: interleaved bytes of three channels, to half precision in
channels-last memory, rows of a multiple of eight pixels. Two launches; all other images take the four of
:mod:`fastmoll.kernels.batch_tail_triton`.

1. ``_first``: of a blurred image ``A_H`` and ``A_W`` (see :mod:`fastmoll.kernels.heat_blur`); all other images, for
   which it has room: the products take three times the registers.
2. ``_second``: of a blurred image ``A_H X A_W``, a block of rows at a time.

The blur multiplies bytes less 128, exact in float16, and standardises in the end. ``Y = A_H X`` of a block of rows goes
to memory that only its block reads again. A flip of a blurred image is one of ``A_W``: its columns backwards.

Both matrices are a band: ``h`` is cut at ``4 σ``. Where σ is not large against a pixel, ``h`` is no Gaussian, but
oscillates and decays slowly. As ``A[i, j] = h[|i - j|] + h[i + j + 1]``, multiples of ``(-1)^m`` may be added to ``h``
without a change of ``A``; half of what the term ``k = N`` of the cosine series would be makes it decay fast. ``h`` is
scaled so that its sum over a period is 1, and what rounding to float16 takes from it goes to its last number.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastmoll.kernels.batch_tail import Tail
from fastmoll.kernels.bytes_triton import bytes_of, pixels_of, pointwise
from fastmoll.kernels.draw import BLUR, CLEAN, PURE_NOISE
from fastmoll.kernels.philox_triton import on_device, signed, sine_quarter
from fastmoll.kernels.pixels_triton import affine_of, join_eight, recipe, store_interleaved

_CLEAN: tl.constexpr = tl.constexpr(CLEAN)
_BLUR: tl.constexpr = tl.constexpr(BLUR)
_PURE_NOISE: tl.constexpr = tl.constexpr(PURE_NOISE)

_DEPTH: Final = 32
"""Of a step of a product, and so of the columns of a matrix that lie together."""
_PAD: Final = 64
"""Rows and columns of the matrices are filled up to a multiple of this."""


# --------------------------------------------------------------------------------------------------------- the matrices


@triton.jit
def _scale_and_reach(t, image, log_min, log_ratio, H, W):
    # Below 1e9, where nothing but the mean is left anyway, its square is finite.
    sigma = tl.minimum(tl.exp(log_min + tl.load(t + image) * log_ratio), 1e9)
    # Where it is a Gaussian, h is cut at 4 σ; below σ = 1.1 more is left of the term k = N.
    reach = tl.maximum(4.0 * sigma, tl.minimum(32.0, 80.0 - 72.0 * sigma))
    return sigma, tl.minimum(reach + 1.0, H + W + 0.0).to(tl.int32)


@triton.jit
def _find_h(line, cosines, sigma, reach, N, line_size, LINE: tl.constexpr, TERMS: tl.constexpr, PLACES: tl.constexpr):
    """``h[0 ... reach]``, its sum over a period 1 also in float16, at ``line``, which only this program reads."""
    m = tl.arange(0, LINE)
    if (sigma >= 1.7) & (sigma <= 0.5 * N):
        # The period of 2 N, and what comes from the two beside it.
        x = m / sigma
        y = (2 * N - m) / sigma
        z = (2 * N + m) / sigma
        tl.store(line + m, tl.exp(-0.5 * x * x) + tl.exp(-0.5 * y * y) + tl.exp(-0.5 * z * z))
    else:
        step = sigma * 3.141592653589793 / N
        # exp(-20) is 2e-9: what follows is not seen in a float32 sum whose first term is 1.
        terms = tl.minimum(6.33 / step, N + 0.0).to(tl.int32) + 1
        for first in range(0, reach + 1, PLACES):
            place = first + tl.arange(0, PLACES)
            total = tl.zeros([TERMS, PLACES], tl.float32)
            for term in range(0, terms, TERMS):
                k = term + tl.arange(0, TERMS)
                decay = k * step
                mask = (k <= N)[:, None] & (place <= N)[None, :]
                cosine = tl.load(cosines + k[:, None] * line_size + place[None, :], mask, other=0.0)
                total += tl.exp(-0.5 * decay * decay)[:, None] * cosine
            tl.store(line + place, tl.sum(total, 0))
    tl.debug_barrier()
    h = tl.load(line + m, m <= reach, other=0.0)
    # The period holds h[0] and h[N] once, all others twice.
    times = tl.where((m == 0) | (m == N), 1.0, 2.0)
    h = h / tl.sum(h * times)
    rest = 0.5 - 0.5 * tl.sum(h.to(tl.float16).to(tl.float32) * times)
    h += tl.where(m == tl.minimum(reach, N - 1), rest, 0.0)
    tl.debug_barrier()
    tl.store(line + m, h)
    tl.debug_barrier()


@triton.jit
def _matrix_rows(
    matrices, lines, cosines, t, image, part, H, W, second_table, line_size, log_min, log_ratio,
    AXES: tl.constexpr, SIDE: tl.constexpr, LINE: tl.constexpr, TERMS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows of ``A_W`` or ``A_H``: of a block of ``BLOCK`` rows, ``DEPTH`` columns of all rows after another,
    and of those only what products with rows of that block read, which may begin ``AHEAD`` rows after it does."""
    axis = part // (SIDE // ROWS)
    first = part % (SIDE // ROWS) * ROWS
    N = tl.where(axis == 0, W, H)
    sigma, reach = _scale_and_reach(t, image, log_min, log_ratio, H, W)
    line = lines + (image.to(tl.int64) * (AXES * (SIDE // ROWS)) + part) * LINE
    reach_h = tl.minimum(reach, N)
    _find_h(line, cosines + axis * second_table, sigma, reach_h, N, line_size, LINE, TERMS, 64)
    i = first + tl.arange(0, ROWS)[:, None]
    block = first // BLOCK * BLOCK
    begin = tl.maximum(block - reach - (BLOCK - AHEAD) % BLOCK, 0) // DEPTH * DEPTH
    to = matrices + (image * AXES + axis).to(tl.int64) * (SIDE * SIDE)
    for start in range(begin, tl.minimum(block + BLOCK + reach + AHEAD, SIDE), DEPTH):
        column = tl.arange(0, DEPTH)[None, :]
        j = start + column
        apart = tl.abs(i - j)
        mirrored = i + j + 1
        mirrored = tl.minimum(mirrored, 2 * N - mirrored)
        inside = (i < N) & (j < N)
        toeplitz = tl.load(line + apart, inside & (apart <= reach_h), other=0.0)
        hankel = tl.load(line + mirrored, inside & (mirrored <= reach_h), other=0.0)
        tl.store(to + start * SIDE + i * DEPTH + column, (toeplitz + hankel).to(tl.float16))


# One kernel for all seeds and epochs: no variants for numbers that are 1 or multiples of 16.
@triton.jit(do_not_specialize=["epoch", "key0", "key1"])
def _first(
    out, matrices, lines, cosines, images, affine, flip, partner, lam, box, role, t, index,
    B, H, W, parts, second_table, line_size, log_min, log_ratio, epoch, key0, key1,
    MIX: tl.constexpr, AXES: tl.constexpr, SIDE: tl.constexpr, LINE: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, TERMS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The matrices of a blurred image, in ``parts`` programs; clean and noised images."""
    W = W // 8 * 8  # Nothing else tells the compiler that rows are aligned.
    image = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    if role is None:
        kind = _CLEAN
    else:
        kind = tl.load(role + image).to(tl.int32)
    if kind != _BLUR:
        mirror, second, mirror2, share, y0, y1, x0, x1 = recipe(flip, partner, lam, box, image, B, MIX)
        rows = tl.cdiv(H, parts)
        if kind == _CLEAN:
            pointwise(
                out, images, affine, image, mirror, second, mirror2, share, y0, y1, x0, x1, 1.0, 0.0, 0, 0, 0, 0,
                part * rows, (part + 1) * rows, H, W, MIX, False, GROUPS,
            )  # fmt: skip
        else:
            level = tl.where(kind == _PURE_NOISE, 1.0, tl.load(t + image))
            # The cosine as the sine of the complement: exactly 0 at t = 1, and accurate in relative terms near it.
            pointwise(
                out, images, affine, image, mirror, second, mirror2, share, y0, y1, x0, x1, sine_quarter(1.0 - level),
                sine_quarter(level), tl.load(index + image), epoch, key0, key1, part * rows, (part + 1) * rows, H, W,
                MIX, True, GROUPS,
            )  # fmt: skip
    elif part < AXES * (SIDE // ROWS):
        _matrix_rows(
            matrices, lines, cosines, t, image, part, H, W, second_table, line_size, log_min, log_ratio,
            AXES, SIDE, LINE, TERMS, ROWS, BLOCK, DEPTH, AHEAD,
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- the products


@triton.jit
def _half(x):
    """Bytes, or mixed ones as float32, less 128: exact, of bytes."""
    if x.dtype == tl.uint8:
        # 1024 + x, by its bits.
        return (x.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    else:
        return (x - 128.0).to(tl.float16)


@triton.jit
def _channel(x, c: tl.constexpr, DEPTH: tl.constexpr, BN: tl.constexpr):
    """``(DEPTH, BN)`` of a channel, of groups."""
    N: tl.constexpr = DEPTH * (BN // 8)
    eight = join_eight(
        _half(x[c]), _half(x[3 + c]), _half(x[6 + c]), _half(x[9 + c]), _half(x[12 + c]), _half(x[15 + c]),
        _half(x[18 + c]), _half(x[21 + c]), N,
    )  # fmt: skip
    return tl.reshape(eight, [DEPTH, BN])


@triton.jit
def _blurred_rows(
    out, scratch, matrices, images, affine, image, mirror, second, mirror2, part, y0, y1, x0, x1, reach, row,
    H, W, width, MIX: tl.constexpr, AXES: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows ``row ... row + BM - 1`` of a blurred image: ``Y = A_H X``, to ``scratch``, and then ``Y A_W``."""
    r = tl.arange(0, BM)
    down = matrices + (image * AXES + AXES - 1).to(tl.int64) * (SIDE * SIDE) + (row + r)[:, None] * DEPTH
    plane = BM * width
    begin = tl.maximum(row - reach, 0) // DEPTH * DEPTH
    end = tl.minimum(row + BM + reach, H)
    group = tl.arange(0, DEPTH * (BN // 8))
    for column in range(0, W, BN):
        acc0 = tl.zeros([BM, BN], tl.float32)
        acc1 = tl.zeros([BM, BN], tl.float32)
        acc2 = tl.zeros([BM, BN], tl.float32)
        g = column // 8 + group % (BN // 8)
        for start in tl.range(begin, end, DEPTH, num_stages=1):
            h = start + group // (BN // 8)
            mask = (h < H) & (g < W // 8)
            if MIX == 0:
                x = bytes_of(images, image, h, g, mask, H, W, DEPTH * (BN // 8))
            else:
                x = pixels_of(
                    images, image, h, g, mask, mirror, second, mirror2, part, y0, y1, x0, x1, H, W, MIX,
                    DEPTH * (BN // 8),
                )  # fmt: skip
            weights = tl.load(down + start * SIDE + tl.arange(0, DEPTH)[None, :])
            acc0 = tl.dot(weights, _channel(x, 0, DEPTH, BN), acc0)
            acc1 = tl.dot(weights, _channel(x, 1, DEPTH, BN), acc1)
            acc2 = tl.dot(weights, _channel(x, 2, DEPTH, BN), acc2)
        n = column + tl.arange(0, BN)
        to = scratch + (n // DEPTH * (BM * DEPTH) + n % DEPTH)[None, :] + r[:, None] * DEPTH
        mask = (n < width)[None, :]
        tl.store(to, acc0.to(tl.float16), mask)
        tl.store(to + plane, acc1.to(tl.float16), mask)
        tl.store(to + 2 * plane, acc2.to(tl.float16), mask)
    tl.debug_barrier()

    across = matrices + (image * AXES).to(tl.int64) * (SIDE * SIDE) + tl.arange(0, DEPTH)[:, None]
    source = scratch + r[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
    s0 = tl.load(affine)
    s1 = tl.load(affine + 1)
    s2 = tl.load(affine + 2)
    group = tl.arange(0, BM * (BN // 8))
    # Mixed images were flipped before they were mixed.
    turn = (mirror != 0) & (MIX == 0)
    for column in range(0, W, BN):
        n = column + tl.arange(0, BN)
        n = tl.maximum(tl.where(turn, W - 1 - n, n), 0)
        left = tl.where(turn, W - BN - column, column)
        acc0 = tl.zeros([BM, BN], tl.float32)
        acc1 = tl.zeros([BM, BN], tl.float32)
        acc2 = tl.zeros([BM, BN], tl.float32)
        for start in tl.range(
            tl.maximum(left - reach, 0) // DEPTH * DEPTH, tl.minimum(left + BN + reach, W), DEPTH, num_stages=STAGES
        ):
            weights = tl.load(across + start * SIDE + n[None, :] * DEPTH)
            at = source + start * BM
            acc0 = tl.dot(tl.load(at), weights, acc0)
            acc1 = tl.dot(tl.load(at + plane), weights, acc1)
            acc2 = tl.dot(tl.load(at + 2 * plane), weights, acc2)
        acc0 = acc0 * s0 + (tl.load(affine + 3) + 128.0 * s0)
        acc1 = acc1 * s1 + (tl.load(affine + 4) + 128.0 * s1)
        acc2 = acc2 * s2 + (tl.load(affine + 5) + 128.0 * s2)
        h = row + group // (BN // 8)
        g = column // 8 + group % (BN // 8)
        kind = out.dtype.element_ty
        store_interleaved(
            out + image.to(tl.int64) * (H * W * 3) + h * (W * 3) + g * 24, tl.where((h < H) & (g < W // 8), 24, 0),
            acc0.to(kind), acc1.to(kind), acc2.to(kind), BM * (BN // 8),
        )  # fmt: skip


@triton.jit
def _second(
    out, scratch, matrices, images, affine, flip, partner, lam, box, role, t, B, H, W, width, log_min, log_ratio,
    MIX: tl.constexpr, AXES: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``BM`` rows of a blurred image."""
    W = W // 8 * 8  # See _first.
    blocks = tl.cdiv(H, BM)
    image = tl.program_id(0) // blocks
    row = tl.program_id(0) % blocks * BM
    kind = tl.load(role + image).to(tl.int32)
    if kind == _BLUR:
        mirror, second, mirror2, part, y0, y1, x0, x1 = recipe(flip, partner, lam, box, image, B, MIX)
        reach = _scale_and_reach(t, image, log_min, log_ratio, H, W)[1]
        _blurred_rows(
            out, scratch + tl.program_id(0).to(tl.int64) * (3 * BM) * width, matrices, images, affine, image, mirror,
            second, mirror2, part, y0, y1, x0, x1, reach, row, H, W, width, MIX, AXES, SIDE, DEPTH, BM, BN, STAGES,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ launching


@dataclasses.dataclass(frozen=True)
class ByteBlocks:
    """Blocks and warps of the two launches.

    Attributes:
        first: ``ROWS`` of a matrix, ``TERMS`` of the cosine series at a time, ``GROUPS`` of 24 numbers of the other
            images, ``num_warps``.
        second: ``BM`` rows and ``BN`` columns of the products, ``STAGES`` of the pipeline of the second,
            ``num_warps``.

    Raises:
        ValueError: blocks that would read of the matrices what nobody has written.
    """

    first: Mapping[str, int]
    second: Mapping[str, int]

    def __post_init__(self) -> None:
        for name, size in (*self.first.items(), *self.second.items()):
            if name in ("ROWS", "BM", "BN") and size > _PAD:
                raise ValueError(f"{name} must be at most {_PAD}, got {size}")


# The fastest by the simulator in bench/sass; no card has measured them.
BYTE_BLOCKS: Final = ByteBlocks(
    first={"ROWS": 32, "TERMS": 32, "GROUPS": 128, "num_warps": 4},
    second={"BM": 64, "BN": 64, "STAGES": 3, "num_warps": 4},
)


def takes_bytes(tail: Tail) -> bool:
    """Whether the kernels of this module can do it."""
    images = tail.images
    return (
        images.dtype == torch.uint8
        and images.is_contiguous()
        and tail.width % 8 == 0
        and tail.dtype in (torch.float16, torch.bfloat16)
        and tail.memory_format == torch.channels_last
    )


@functools.lru_cache(maxsize=32)
def _cosines(sizes: tuple[int, ...], width: int, device: torch.device) -> Tensor:
    """``ε_k / (2N) cos(π k m / N)``, ``ε_0 = ε_N = 1``, float32: a row for each ``k = 0 ... N``, a column for each
    ``m < width``; the tables of all sizes below each other."""
    tables = []
    for size in sizes:
        k, m = torch.arange(size + 1, device="cpu").unsqueeze(1), torch.arange(width, device="cpu")
        table = torch.cos((k * m % (2 * size)).double() * (math.pi / size)) / size
        table[[0, -1]] /= 2.0
        tables.append(table)
    return torch.cat(tables).float().to(device)


def batch_tail_bytes(tail: Tail, out: Tensor, blocks: ByteBlocks) -> Tensor:
    """Run :func:`fastmoll.kernels.batch_tail.batch_tail` for arguments that :func:`takes_bytes`.

    Args:
        tail: the checked arguments, at most 512 x 512 pixels.
        out: where to write, ``(B, 3, H, W)``, channels last.
        blocks: of the launches.

    Returns:
        ``out``.
    """
    images, device = tail.images, tail.images.device
    B, H, W = tail.batch, tail.height, tail.width
    mix = 0 if tail.partner is None else 1 if tail.lam is not None else 2
    flip = None if tail.flip is None else tail.flip.contiguous().view(torch.uint8)
    partner, lam, box = (None if x is None else x.contiguous() for x in (tail.partner, tail.lam, tail.box))
    affine = affine_of(tail.mean, tail.std, 1.0 / 255.0, device)
    common = (images, affine, flip, partner, lam, box)
    axes = 1 if H == W else 2
    side = triton.cdiv(max(H, W), _PAD) * _PAD
    first, second = blocks.first, blocks.second
    constants = {"MIX": mix, "AXES": axes, "SIDE": side, "DEPTH": _DEPTH}
    line = max(_PAD, triton.next_power_of_2(max(H, W) + 1))
    shape = {"LINE": line, "AHEAD": W % _PAD, "BLOCK": _PAD}
    with on_device(device):
        if tail.role is None or tail.t is None or tail.index is None:
            parts = triton.cdiv(H, 16)
            _first[(B * parts,)](
                out, out, out, out, *common, None, None, None, B, H, W, parts, 0, 0, 0.0, 0.0, 0, 0, 0,
                **constants, **shape, **first,
            )  # fmt: skip
            return out
        role, t, index = tail.role.contiguous(), tail.t.contiguous(), tail.index.contiguous()
        logs = math.log(tail.sigma_min), math.log(tail.sigma_max / tail.sigma_min)
        parts = axes * (side // first["ROWS"])
        cosines = _cosines((W, H)[:axes], line, device)
        lines = torch.empty(B * parts, line, dtype=torch.float32, device=device)
        matrices = torch.empty(B * axes, side, side, dtype=torch.float16, device=device)
        _first[(B * parts,)](
            out, matrices, lines, cosines, *common, role, t, index, B, H, W, parts, (W + 1) * line, line, *logs,
            tail.epoch, signed(tail.seed & 0xFFFFFFFF), signed(tail.seed >> 32), **constants, **shape, **first,
        )  # fmt: skip
        width = triton.cdiv(W, _DEPTH) * _DEPTH
        rows = triton.cdiv(H, second["BM"])
        scratch = torch.empty(B * rows, 3, width, second["BM"], dtype=torch.float16, device=device)
        _second[(B * rows,)](
            out, scratch, matrices, *common, role, t, B, H, W, width, *logs, **constants, **second
        )  # fmt: skip
    return out
