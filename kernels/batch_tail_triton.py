"""The batch tail of :mod:`fastmoll.kernels.batch_tail` in Triton: four launches, whatever the roles of the images, or
two for the images of most loaders (:mod:`fastmoll.kernels.batch_tail_triton_bytes`).

The blur is ``A_H X A_W`` with one small matrix an axis (see :mod:`fastmoll.kernels.heat_blur`). Only ``X A_W`` needs
the channels apart, so it goes first and leaves ``Z`` with the channels together again, if that is how the result wants
them; ``A_H Z`` is then one plain product over rows of ``W * C`` numbers, which end up in memory as they come.

1. ``_lines``: ``h`` of both axes, of the blurred images.
2. ``_prepare``: from ``h``, the matrices ``A_W`` and ``A_H`` of the blurred images, and their standardised, mixed
   channels ``X``.
3. ``_across``: ``Z = X A_W`` of the blurred images; the whole way for the clean ones.
4. ``_down``: ``A_H Z`` of the blurred images; the whole way for the noised ones.

Each program belongs to one image and branches on its role, so nothing is sorted, gathered or known to the host. Clean
and noised images are memory traffic, the products are arithmetic: side by side in one launch they overlap.

Half-precision results use float16 operands and float32 sums, and a band of each matrix: its entries past
``max(32, 4 σ)`` pixels are left out. At worst, near σ = 0.5, what a row of 224 loses has norm 3e-4: that much of white
noise. The rest is not scaled to sum to 1 again: the entries left out alternate in sign, so that constant images lose
7e-5 of their value, less than bfloat16 or float16 round; and no program sees all of ``h``, which others are still
writing, so that the sum would take one more launch. Float32 results use neither.
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
from fastmoll.kernels.batch_tail_triton_bytes import BYTE_BLOCKS, ByteBlocks, batch_tail_bytes, takes_bytes
from fastmoll.kernels.draw import BLUR, CLEAN, PURE_NOISE
from fastmoll.kernels.philox_triton import on_device, signed, sine_quarter
from fastmoll.kernels.pixels_triton import affine_of, pixels, pointwise, recipe, store_interleaved

_CLEAN: tl.constexpr = tl.constexpr(CLEAN)
_BLUR: tl.constexpr = tl.constexpr(BLUR)
_PURE_NOISE: tl.constexpr = tl.constexpr(PURE_NOISE)

# Storage of a matrix is a multiple of this, filled up with zeros, so that no product needs to mask it.
_PAD: Final = 64
_PLACES: Final = 64  # numbers of h that a program computes


# ---------------------------------------------------------------------------------------------- the factors of the blur


@triton.jit
def _scale_and_reach(t, image, log_min, log_ratio, H, W, BAND: tl.constexpr):
    # Below 1e9, where nothing but the mean is left anyway, its square is finite.
    sigma = tl.minimum(tl.exp(log_min + tl.load(t + image) * log_ratio), 1e9)
    if BAND:
        reach = tl.minimum(tl.maximum(4.0 * sigma, 32.0), H + W + 0.0).to(tl.int32)
    else:
        reach = H + W
    return sigma, reach


@triton.jit
def _lines(
    lines, cosines, role, t, H, W, second_table, line_size, log_min, log_ratio,
    AXES: tl.constexpr, TERMS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """``PLACES`` of the numbers ``h[0 ... N]`` of an image and axis, of the width first."""
    pieces = line_size // PLACES
    place = tl.program_id(0) // pieces
    axis = place % AXES
    N = tl.where(axis == 0, W, H)
    m = tl.program_id(0) % pieces * PLACES + tl.arange(0, PLACES)
    if tl.load(role + place // AXES) == _BLUR:
        sigma = _scale_and_reach(t, place // AXES, log_min, log_ratio, H, W, False)[0]
        step = sigma * 3.141592653589793 / N
        # exp(-20) is 2e-9: what follows is not seen in a float32 sum whose first term is 1.
        terms = tl.minimum(6.33 / step, N - 1.0).to(tl.int32) + 1
        table = cosines + axis * second_table + m[None, :]
        total = tl.zeros([TERMS, PLACES], tl.float32)
        for term in range(0, terms, TERMS):
            k = term + tl.arange(0, TERMS)
            decay = k * step
            decay = tl.exp(-0.5 * decay * decay)
            total += decay[:, None] * tl.load(table + k[:, None] * line_size, (k < N)[:, None], other=0.0)
        tl.store(lines + place.to(tl.int64) * line_size + m, tl.sum(total, 0))


@triton.jit
def _prepare(
    x, matrices, lines, images, affine, flip, partner, lam, box, role, t,
    B, H, W, stride_b, stride_h, stride_w, stride_c, x_row, line_size, log_min, log_ratio,
    C: tl.constexpr, MIX: tl.constexpr, AXES: tl.constexpr, ROWS: tl.constexpr, SIDE: tl.constexpr,
    BAND: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows of ``X``, of ``A_W`` and of ``A_H``, of a blurred image. The matrices are filled up with zeros to
    multiples of ``PAD`` rows."""
    blocks = tl.cdiv(tl.maximum(H, W), PAD) * (PAD // ROWS)
    image = tl.program_id(0) // blocks
    if tl.load(role + image) == _BLUR:
        first = tl.program_id(0) % blocks * ROWS
        h = first + tl.arange(0, ROWS)[:, None]
        w = tl.arange(0, SIDE)[None, :]
        reach = _scale_and_reach(t, image, log_min, log_ratio, H, W, BAND)[1]
        apart = tl.abs(h - w)
        for axis in tl.static_range(AXES):
            N = W if axis == 0 else H
            place = (image * AXES + axis).to(tl.int64)
            mirrored = h + w + 1
            mirrored = tl.minimum(mirrored, 2 * N - mirrored)
            mask = (h < N) & (w < N) & (apart <= reach)
            line = lines + place * line_size
            value = tl.load(line + apart, mask, other=0.0) + tl.load(line + mirrored, mask, other=0.0)
            tl.store(matrices + place * (SIDE * SIDE) + h * SIDE + w, value.to(matrices.dtype.element_ty))
        if first < H:
            mirror, second, mirror2, part, y0, y1, x0, x1 = recipe(flip, partner, lam, box, image, B, MIX)
            mask = (h < H) & (w < W)
            for c in range(C):
                value = pixels(
                    images, image, h, w, c, mask, mirror, second, mirror2, part, y0, y1, x0, x1,
                    W, stride_b, stride_h, stride_w, stride_c, MIX,
                )  # fmt: skip
                value = tl.where(mask, value * tl.load(affine + c) + tl.load(affine + C + c), 0.0)
                plane = x + (image.to(tl.int64) * C + c) * H * x_row
                tl.store(plane + h * x_row + w, value.to(x.dtype.element_ty), (h < H) & (w < x_row))


# ----------------------------------------------------------------------------------------------------- the two products


@triton.jit
def _across(
    out, z, x, matrices, images, affine, flip, partner, lam, box, role, t,
    B, H, W, inverse, stride_b, stride_h, stride_w, stride_c, x_row, z_image, z_row, z_channel, z_column, axes, chunk,
    log_min, log_ratio,
    C: tl.constexpr, GROUP: tl.constexpr, MIX: tl.constexpr, PACKED: tl.constexpr, LAST: tl.constexpr,
    SIDE: tl.constexpr, BAND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``Z = X A_W`` for ``BM`` rows, ``BN`` columns and ``GROUP`` channels of a blurred image; clean images."""
    row_blocks = tl.cdiv(H, BM)
    column_blocks = tl.cdiv(W, BN)
    programs = row_blocks * column_blocks * (C // GROUP)
    image = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    if role is None:
        kind = _CLEAN
    else:
        kind = tl.load(role + image)
    if kind == _CLEAN:
        pointwise(
            out, images, affine, flip, partner, lam, box, image, program * chunk, (program + 1) * chunk, 1.0, 0.0,
            0, 0, 0, 0, B, H, W, inverse, stride_b, stride_h, stride_w, stride_c, C, MIX, PACKED, LAST, False, BLOCK,
        )  # fmt: skip
    elif role is not None:
        if kind == _BLUR:
            operand = x.dtype.element_ty
            channel = program // column_blocks // row_blocks * GROUP
            column = program % column_blocks * BN
            r = program // column_blocks % row_blocks * BM + tl.arange(0, BM)
            n = column + tl.arange(0, BN)
            reach = _scale_and_reach(t, image, log_min, log_ratio, H, W, BAND)[1]
            begin = tl.maximum(column - reach, 0) // BK * BK
            end = tl.minimum(column + BN + reach, W)
            # Read along its rows, which the symmetry allows.
            matrix = matrices + (image * axes).to(tl.int64) * (SIDE * SIDE) + n[None, :] * SIDE
            source = x + (image.to(tl.int64) * C + channel) * H * x_row + r[:, None] * x_row
            acc0 = tl.zeros([BM, BN], tl.float32)
            if GROUP == 3:
                acc1 = tl.zeros([BM, BN], tl.float32)
                acc2 = tl.zeros([BM, BN], tl.float32)
            for start in range(begin, end, BK):
                k = start + tl.arange(0, BK)
                weights = tl.load(matrix + k[:, None])
                # Rows past the last one are somebody else's: they stay in their own sums, which nobody stores.
                mask = (k < x_row)[None, :]
                acc0 = tl.dot(tl.load(source + k[None, :], mask, other=0.0), weights, acc0, input_precision="tf32x3")
                if GROUP == 3:
                    plane = H * x_row
                    acc1 = tl.dot(tl.load(source + plane + k[None, :], mask, other=0.0), weights, acc1)
                    acc2 = tl.dot(tl.load(source + 2 * plane + k[None, :], mask, other=0.0), weights, acc2)
            if GROUP == 3:
                # Rows of z are a multiple of 16 numbers long.
                group = tl.arange(0, BM * (BN // 8))
                row = program // column_blocks % row_blocks * BM + group // (BN // 8)
                f = (column // 8 + group % (BN // 8)) * 24
                store_interleaved(
                    z + image.to(tl.int64) * z_image + row * z_row + f, tl.where(row < H, z_row - f, 0),
                    acc0.to(operand), acc1.to(operand), acc2.to(operand), BM * (BN // 8),
                )  # fmt: skip
            else:
                target = z + image.to(tl.int64) * z_image + channel * z_channel
                mask = (r < H)[:, None] & (n < W)[None, :]
                tl.store(target + r[:, None] * z_row + n[None, :] * z_column, acc0.to(operand), mask)


# One kernel for all seeds and epochs: no variants for numbers that are 1 or multiples of 16.
@triton.jit(do_not_specialize=["epoch", "key0", "key1"])
def _down(
    out, z, matrices, images, affine, flip, partner, lam, box, role, t, index,
    B, H, W, inverse, stride_b, stride_h, stride_w, stride_c, z_row, axes, planes, columns, chunk,
    log_min, log_ratio, epoch, key0, key1,
    C: tl.constexpr, MIX: tl.constexpr, PACKED: tl.constexpr, LAST: tl.constexpr,
    SIDE: tl.constexpr, BAND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``A_H Z`` for ``BM`` rows and ``BN`` columns of one plane of a blurred image; noised images."""
    row_blocks = tl.cdiv(H, BM)
    column_blocks = tl.cdiv(columns, BN)
    programs = row_blocks * column_blocks * planes
    image = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    kind = tl.load(role + image)
    if kind == _BLUR:
        plane = program // column_blocks // row_blocks
        column = program % column_blocks * BN
        row = program // column_blocks % row_blocks * BM
        r = row + tl.arange(0, BM)
        f = column + tl.arange(0, BN)
        reach = _scale_and_reach(t, image, log_min, log_ratio, H, W, BAND)[1]
        begin = tl.maximum(row - reach, 0) // BK * BK
        end = tl.minimum(row + BM + reach, H)
        matrix = matrices + (image * axes + axes - 1).to(tl.int64) * (SIDE * SIDE) + r[:, None] * SIDE
        source = z + (image.to(tl.int64) * planes + plane) * H * z_row + f[None, :]
        acc = tl.zeros([BM, BN], tl.float32)
        for start in range(begin, end, BK):
            k = start + tl.arange(0, BK)
            weights = tl.load(matrix + k[None, :])
            # Columns past the last one stay in their own sums, which nobody stores; rows past it would enter all.
            rows = tl.load(source + k[:, None] * z_row, (k < H)[:, None], other=0.0)
            acc = tl.dot(weights, rows, acc, input_precision="tf32x3")
        target = out + image.to(tl.int64) * (H * W * C) + plane * (H * W)
        mask = (r < H)[:, None] & (f < columns)[None, :]
        tl.store(target + r[:, None] * columns + f[None, :], acc.to(out.dtype.element_ty), mask)
    elif kind != _CLEAN:
        level = tl.where(kind == _PURE_NOISE, 1.0, tl.load(t + image))
        # The cosine as the sine of the complement: exactly 0 at t = 1, and accurate in relative terms near it.
        pointwise(
            out, images, affine, flip, partner, lam, box, image, program * chunk, (program + 1) * chunk,
            sine_quarter(1.0 - level), sine_quarter(level),
            tl.load(index + image), epoch, key0, key1, B, H, W, inverse, stride_b, stride_h, stride_w, stride_c,
            C, MIX, PACKED, LAST, True, BLOCK,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ launching


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks, warps and pipeline stages of the launches.

    Attributes:
        prepare: ``ROWS``, ``num_warps``.
        across, down: ``BM``, ``BN``, ``BK`` of the product, ``BLOCK`` numbers at a time of the other images,
            ``num_warps``, ``num_stages``.
    """

    prepare: Mapping[str, int]
    across: Mapping[str, int]
    down: Mapping[str, int]


_SINGLE: Final = Blocks(
    prepare={"ROWS": 16, "num_warps": 8},
    across={"BM": 64, "BN": 32, "BK": 32, "BLOCK": 512, "num_warps": 4, "num_stages": 2},
    down={"BM": 64, "BN": 64, "BK": 32, "BLOCK": 1024, "num_warps": 8, "num_stages": 2},
)
# Measured on an H200, by bench/tune.py, at 32, 224 and 384 pixels.
_HALF: Final = Blocks(
    prepare={"ROWS": 16, "num_warps": 4},
    across={"BM": 64, "BN": 64, "BK": 32, "BLOCK": 2048, "num_warps": 8, "num_stages": 3},
    down={"BM": 64, "BN": 64, "BK": 32, "BLOCK": 512, "num_warps": 4, "num_stages": 4},
)
_HALF_SMALL: Final = Blocks(
    prepare=_HALF.prepare,
    across={"BM": 32, "BN": 64, "BK": 32, "BLOCK": 512, "num_warps": 4, "num_stages": 3},
    # One step is the whole product: more stages would only take memory and, on an A100, a register too many.
    down={"BM": 32, "BN": 128, "BK": 32, "BLOCK": 512, "num_warps": 4, "num_stages": 2},
)


def blocks_for(tail: Tail) -> Blocks | ByteBlocks:
    """The blocks, and so the kernels: ``ByteBlocks`` wherever they can do it."""
    return BYTE_BLOCKS if takes_bytes(tail) else any_blocks_for(tail)


def any_blocks_for(tail: Tail) -> Blocks:
    """The fastest of this module's own blocks; images up to 32 pixels high fit half those of all others."""
    if tail.dtype == torch.float32:
        return _SINGLE
    return _HALF_SMALL if tail.height <= 32 else _HALF


@functools.lru_cache(maxsize=32)
def _cosines(sizes: tuple[int, ...], width: int, device: torch.device) -> Tensor:
    """``ε_k / (2N) cos(π k m / N)``, float32: a row for each ``k = 0 ... N-1``, a column for each ``m < width``; the
    tables of all sizes below each other."""
    tables = []
    for size in sizes:
        k, m = torch.arange(size, device="cpu").unsqueeze(1), torch.arange(width, device="cpu")
        table = torch.cos((k * m % (2 * size)).double() * (math.pi / size)) / size
        table[0] /= 2.0
        tables.append(table)
    return torch.cat(tables).float().to(device)


def batch_tail_triton(tail: Tail, out: Tensor | None = None, blocks: Blocks | ByteBlocks | None = None) -> Tensor:
    """Run :func:`fastmoll.kernels.batch_tail.batch_tail` in Triton.

    Args:
        tail: the checked arguments; images of at most 512 x 512 pixels, on a CUDA device (or, in Triton's interpreter,
            on the CPU). Nothing waits for the device.
        out: where to write; default: a new tensor.
        blocks: default: :func:`blocks_for`. With ``Blocks`` even images that :func:`takes_bytes` have the kernels of
            this module.

    Returns:
        ``(B, C, H, W)``, see there.
    """
    images = tail.images
    device = images.device
    B, C, H, W = tail.batch, tail.channels, tail.height, tail.width
    if out is None:
        out = torch.empty((B, C, H, W), dtype=tail.dtype, device=device, memory_format=tail.memory_format)
    last = tail.memory_format == torch.channels_last
    blocks = blocks_for(tail) if blocks is None else blocks
    if isinstance(blocks, ByteBlocks):
        return batch_tail_bytes(tail, out, blocks)
    integer = images.dtype == torch.uint8
    if integer:
        images = images.permute(0, 3, 1, 2)
    if sum((size - 1) * stride for size, stride in zip(images.shape[1:], images.stride()[1:], strict=True)) >= 2**31:
        images = images.contiguous()  # Offsets inside an image are 32 bits wide.
    stride_b, stride_c, stride_h, stride_w = images.stride()
    packed = (stride_c == 1 or C == 1) and (stride_w == C or W == 1) and (stride_h == W * C or H == 1)
    mix = 0 if tail.partner is None else 1 if tail.lam is not None else 2

    single = tail.dtype == torch.float32
    # Three channels at once share the loads of the matrix; in float32, their operands would not fit the registers.
    group = 3 if last and C == 3 and not single else 1
    prepare, across, down = blocks.prepare, blocks.across, blocks.down
    constants = {"C": C, "MIX": mix, "PACKED": packed, "LAST": last}
    flip = None if tail.flip is None else tail.flip.contiguous().view(torch.uint8)
    partner, lam, box = (None if x is None else x.contiguous() for x in (tail.partner, tail.lam, tail.box))
    affine = affine_of(tail.mean, tail.std, 1.0 / 255.0 if integer else 1.0, device)

    programs = triton.cdiv(H, across["BM"]) * triton.cdiv(W, across["BN"]) * (C // group)
    common = (images, affine, flip, partner, lam, box)
    strides = (stride_b, stride_h, stride_w, stride_c)
    inverse = triton.cdiv(2**30, W)
    with on_device(device):
        if tail.role is None or tail.t is None or tail.index is None:
            _across[(B * programs,)](
                out, out, out, out, *common, None, None, B, H, W, inverse, *strides, 0, 0, 0, 0, 0, 0,
                _chunk(H * W * C, programs, C * across["BLOCK"]), 0.0, 0.0,
                **constants, GROUP=group, SIDE=_PAD, BAND=False, **across,
            )  # fmt: skip
            return out

        role, t, index = tail.role.contiguous(), tail.t.contiguous(), tail.index.contiguous()
        band = not single
        operand = torch.float16 if band else torch.float32
        logs = math.log(tail.sigma_min), math.log(tail.sigma_max / tail.sigma_min)
        axes = 1 if H == W else 2
        side = max(_PAD, triton.next_power_of_2(max(H, W)))
        line_size = (max(H, W) + _PLACES) // _PLACES * _PLACES
        cosines = _cosines((W, H)[:axes], line_size, device)
        lines = torch.empty(B * axes, line_size, dtype=torch.float32, device=device)
        matrices = torch.empty(B * axes, side, side, dtype=operand, device=device)
        # Rows start at multiples of 16 numbers, for wide loads. The slack at the end is for the last block, which reads
        # past the rows and columns there are.
        planes, columns = (1, W * C) if last else (C, W)
        x_row, z_row = triton.cdiv(W, 16) * 16, triton.cdiv(columns, 16) * 16
        x = torch.empty((B * C * H + across["BM"]) * x_row, dtype=operand, device=device)
        z = torch.empty(B * planes * H * z_row + down["BN"], dtype=operand, device=device)
        _lines[(B * axes * (line_size // _PLACES),)](
            lines, cosines, role, t, H, W, W * line_size, line_size, *logs, AXES=axes, TERMS=32, PLACES=_PLACES
        )
        _prepare[(B * triton.cdiv(max(H, W), _PAD) * (_PAD // prepare["ROWS"]),)](
            x, matrices, lines, *common, role, t, B, H, W, *strides, x_row, line_size, *logs,
            C=C, MIX=mix, AXES=axes, SIDE=side, BAND=band, PAD=_PAD, **prepare,
        )  # fmt: skip
        _across[(B * programs,)](
            out, z, x, matrices, *common, role, t, B, H, W, inverse, *strides,
            x_row, planes * H * z_row, z_row, 1 if last else H * z_row, C if last else 1, axes,
            _chunk(H * W * C, programs, C * across["BLOCK"]), *logs,
            **constants, GROUP=group, SIDE=side, BAND=band, **across,
        )  # fmt: skip
        programs = triton.cdiv(H, down["BM"]) * triton.cdiv(columns, down["BN"]) * planes
        _down[(B * programs,)](
            out, z, matrices, *common, role, t, index, B, H, W, inverse, *strides, z_row, axes, planes,
            columns, _chunk(H * W * C, programs, C * down["BLOCK"]), *logs,
            tail.epoch, signed(tail.seed & 0xFFFFFFFF), signed(tail.seed >> 32),
            **constants, SIDE=side, BAND=band, **down,
        )  # fmt: skip
    return out


def _chunk(size: int, programs: int, unit: int) -> int:
    """Elements of an image for each of its programs, a multiple of ``unit``."""
    return int(triton.cdiv(triton.cdiv(size, programs), unit)) * unit
