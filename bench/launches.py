"""What the launches of the batch tail do for an image of each role: bytes, multiply-adds, compiled instructions.

The half of the model in ``bench/roofline.py`` that knows the kernels and no card.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import triton_compile
from cuda_compile import compile_cuda
from disassembly import Code, Counts, classify, outside, times, total_of
from sass.interpreter import run_block
from sass.program import Program

from fastmoll.kernels import batch_tail_cupy, batch_tail_triton
from fastmoll.kernels.batch_tail import Tail, check_tail
from fastmoll.kernels.draw import BLUR, CLEAN, NOISE

CHANNELS = 3
MMA_FLOPS = 2 * 16 * 8 * 16  # of one mma.sync.m16n8k16


@dataclass(frozen=True)
class Work:
    """What one launch does for a mean image of a role. Bytes, FLOPs and warp instructions by class."""

    idle: float = 0.0  # blocks without work
    blocks: float = 0.0  # blocks with work
    pixels: float = 0.0
    result: float = 0.0
    scratch_in: float = 0.0
    scratch_out: float = 0.0
    l2: float = 0.0
    flops: float = 0.0
    instructions: Counts = field(default_factory=Counter)


@dataclass(frozen=True)
class LaunchModel:
    """One launch: what it does for an image of each role, and what of it fits a multiprocessor."""

    name: str
    roles: tuple[Work, Work, Work]
    threads: int
    registers: int
    shared: int
    wgmma: bool


# ------------------------------------------------------------------------------------------------------------- shapes


def scales(size: int, count: int = 256) -> np.ndarray[Any, Any]:
    """Blur scales σ_B in pixels at ``count`` equally likely temperatures of Beta(1, 2)."""
    t = 1.0 - np.sqrt(1.0 - (np.arange(count) + 0.5) / count)
    return np.exp((1.0 - t) * math.log(0.3) + t * math.log(size))


def triton_steps(size: int, block: int, depth: int, sigma: float) -> int:
    """Steps of ``depth`` over the band, summed over the blocks of ``block`` rows or columns of ``size``."""
    reach = int(min(max(4.0 * sigma, 32.0), 2.0 * size))
    return sum(
        math.ceil((min(first + block + reach, size) - max(first - reach, 0) // depth * depth) / depth)
        for first in range(0, size, block)
    )


def cuda_steps(size: int, span: int, step: int, sigma: float) -> int:
    """Steps of 16 over the band, summed over spans, of ``find_band`` in the CUDA C++ with that ``step``."""
    reach = min(math.ceil(max(4.0 * sigma, min(32.0, 80.0 - 72.0 * sigma))), size)
    total = 0
    for first in range(0, size, span):
        begin = max(first - reach, 0) // step * step
        end = min(math.ceil((first + span + reach) / step), math.ceil(size / step)) * step
        total += (end - begin) // 16
    return total


def mean_steps(steps: Callable[[float], int], size: int) -> float:
    """Expectation of a step count over the temperatures."""
    return float(np.mean([steps(sigma) for sigma in scales(size)]))


def make_tail(size: int, batch: int) -> Tail:
    """The arguments of the benchmark: uint8 NHWC to bfloat16, channels last."""
    none = dict.fromkeys(("partner", "lam", "box", "sigma_max"))
    return check_tail(
        torch.zeros(batch, size, size, CHANNELS, dtype=torch.uint8),
        **none,
        mean=(0.5,) * CHANNELS, std=(0.25,) * CHANNELS, seed=2**64 - 1, epoch=1, sigma_min=0.3,
        flip=torch.zeros(batch, dtype=torch.bool), role=torch.zeros(batch, dtype=torch.int8), t=torch.zeros(batch),
        index=torch.zeros(batch, dtype=torch.int64), dtype=torch.bfloat16, memory_format=torch.channels_last,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- Triton


@functools.cache
def triton_launches(size: int, batch: int) -> tuple[triton_compile.Launch, ...]:
    """The launches that the launcher wants, in their order."""
    with triton_compile.recorded(batch_tail_triton) as launches:
        batch_tail_triton.batch_tail_triton(make_tail(size, batch))
    return tuple(launches)


def triton_work(size: int, blocks: batch_tail_triton.Blocks) -> dict[str, tuple[Work, Work, Work]]:
    """Bytes, FLOPs and blocks of the four launches for an image of each role, without instructions."""
    across, down, rows = blocks.across, blocks.down, blocks.prepare["ROWS"]
    values, width = size * size * CHANNELS, size * CHANNELS
    line = (size + batch_tail_triton._PLACES) // batch_tail_triton._PLACES
    padded, side = math.ceil(size / batch_tail_triton._PAD) * batch_tail_triton._PAD, batch_tail_triton._PAD
    while side < size:
        side *= 2
    matrix, x = padded * side * 2, CHANNELS * size * math.ceil(size / 16) * 16 * 2
    z = size * math.ceil(width / 16) * 16 * 2
    stream = Work(pixels=values, result=2 * values, l2=3 * values)
    terms = float(np.mean(np.minimum(6.33 * size / (scales(size) * math.pi), size - 1) // 32 + 1)) * 32

    grid = {
        "_lines": line,
        "_prepare": padded // rows,
        "_across": math.ceil(size / across["BM"]) * math.ceil(size / across["BN"]),
        "_down": math.ceil(size / down["BM"]) * math.ceil(width / down["BN"]),
    }
    idle = {name: Work(idle=count) for name, count in grid.items()}
    a = mean_steps(lambda s: triton_steps(size, across["BN"], across["BK"], s), size) * math.ceil(size / across["BM"])
    d = mean_steps(lambda s: triton_steps(size, down["BM"], down["BK"], s), size) * math.ceil(width / down["BN"])
    lines = line * batch_tail_triton._PLACES * 4
    blur = {
        "_lines": Work(scratch_out=lines, l2=terms * lines + lines),
        "_prepare": Work(pixels=values, scratch_in=lines, scratch_out=matrix + x,
                         l2=values + matrix + x + padded // rows * lines),
        "_across": Work(scratch_in=matrix + x, scratch_out=z, flops=a * 2 * tile(across) * CHANNELS,
                        l2=z + a * across["BK"] * 2 * (across["BN"] + CHANNELS * across["BM"])),
        "_down": Work(scratch_in=matrix + z, result=2 * values, flops=d * 2 * tile(down),
                      l2=2 * values + d * down["BK"] * 2 * (down["BN"] + down["BM"])),
    }  # fmt: skip
    work = {}
    for name, count in grid.items():
        clean, noise = (replace(stream, blocks=count) if name == busy else idle[name] for busy in ("_across", "_down"))
        work[name] = (clean, noise, replace(blur[name], blocks=count))
    return work


def tile(blocks: Any) -> int:
    """Multiply-adds of one step of a block."""
    return int(blocks["BM"] * blocks["BN"] * blocks["BK"])


def triton_model(size: int, batch: int, architecture: int) -> list[LaunchModel]:
    """The four launches of the Triton backend, compiled."""
    blocks = batch_tail_triton.blocks_for(make_tail(size, 1))
    work = triton_work(size, blocks)
    models = []
    for launch in triton_launches(size, batch):
        used = triton_compile.compile_launch(launch, architecture)
        code, name = Code(used.sass), used.kernel
        warps = launch.options.get("num_warps", 4)
        counts: list[Counts] = [Counter(), Counter(), Counter()]
        path = set(range(len(code.text)))
        running = work[name][2].blocks * warps
        if name in ("_lines", "_prepare"):
            # _prepare's only loop, if it is not unrolled, is over the channels.
            rounds = float(np.mean(np.minimum(6.33 * size / (scales(size) * math.pi), size - 1) // 32 + 1))
            real = [loop for loop in code.inner if loop.last > loop.first]
            round_ = total_of([code.body(loop) for loop in real])
            counts[2] = times(outside(code, path), running)
            counts[2].update(times(round_, running * (rounds if name == "_lines" else CHANNELS)))
        else:
            shape = blocks.across if name == "_across" else blocks.down
            matrix = code.find("HMMA|HGMMA|UTCHMMA")
            stream = code.find("STG", "HMMA|HGMMA|UTCHMMA")
            if not matrix or not stream:
                raise ValueError(f"no loops for both roles in {name} for sm_{architecture}")
            per_step = tile(shape) * 2 * (CHANNELS if name == "_across" else 1)
            counts[2] = times(outside(code, code.path(matrix[0], stream)), running)
            counts[2].update(times(code.body(matrix[0]), warps * work[name][2].flops / per_step))
            role = 0 if name == "_across" else 1
            counts[role] = times(outside(code, code.path(stream[0], matrix)), running)
            rounds = math.ceil(size * size * CHANNELS / (CHANNELS * shape["BLOCK"]))
            counts[role].update(times(code.body(stream[0]), warps * rounds))
        clean, noise, blur = (replace(w, instructions=c) for w, c in zip(work[name], counts, strict=True))
        asynchronous = "GMMA" in used.sass or "UTC" in used.sass
        if not asynchronous:
            # What warps issue: a layout that gives two warps the same rows multiplies twice.
            blur = replace(blur, flops=counts[2]["matrix"] * MMA_FLOPS)
        models.append(LaunchModel(name, (clean, noise, blur), 32 * warps, used.registers, used.shared, asynchronous))
    return models


# --------------------------------------------------------------------------------------------------------------- CuPy


def cuda_work(size: int, rows: int) -> tuple[Work, Work, Work]:
    """Bytes, FLOPs and blocks of the one launch for an image of each role, without instructions."""
    values, tiles = size * size * CHANNELS, math.ceil(size / rows)
    stream = Work(blocks=tiles, pixels=values, result=2 * values, l2=3 * values)
    first = mean_steps(lambda s: cuda_steps(size, rows, 16, s), size)
    second = mean_steps(lambda s: cuda_steps(size, 32, 16, s), size)
    groups = math.ceil(size / 32)
    flops = 2 * 16 * CHANNELS * (first * rows * 32 * groups + second * rows * tiles * 32)
    l2 = 2 * values + first * 16 * size * CHANNELS
    return stream, stream, Work(blocks=tiles, pixels=values, result=2 * values, l2=l2, flops=flops)


@functools.cache
def cuda_instructions(size: int) -> tuple[Counts, Counts, Counts]:
    """What the warps of a clean, a noised and a blurred image execute, as their code for sm_90 is interpreted.

    Half of the images are flipped; blurred ones are the mean over some temperatures.
    """
    means = []
    for role, count in ((CLEAN, 2), (NOISE, 2), (BLUR, 16)):
        t = torch.from_numpy(1.0 - np.sqrt(1.0 - (np.arange(count) + 0.5) / count)).float()
        roles = torch.full((count,), role, dtype=torch.int8)
        tail = replace(make_tail(size, count), role=roles, t=t, flip=torch.arange(count) % 2 == 0)
        launch = cuda_launch(tail, 90)
        compiled = compile_cuda(launch.macros, 90)
        program = Program(compiled.sass, compiled.registers, compiled.stack)
        executed: Counter[int] = Counter()
        for block in range(launch.grid[0]):
            for trace in run_block(program, launch, (block, 0 if role == BLUR else 1)):
                executed.update(trace.pc.tolist())
        parts = [times(Counter(classify(program.code[i].name)), n / count) for i, n in executed.items()]
        means.append(total_of(parts))
    return means[0], means[1], means[2]


def cuda_launch(tail: Tail, architecture: int) -> batch_tail_cupy.Launch:
    """The launch of the CuPy backend, on a card of that architecture."""
    shape = (tail.batch, CHANNELS, tail.height, tail.width)
    out = torch.empty(shape, dtype=torch.bfloat16, memory_format=torch.channels_last)
    return batch_tail_cupy.plan(tail, out, triton_compile.SHARED_LIMIT[architecture])


def cuda_model(size: int, architecture: int) -> LaunchModel:
    """The one launch of the CuPy backend, compiled. Instructions are counted for sm_90, whatever the architecture."""
    plan = cuda_launch(make_tail(size, 1), architecture)
    compiled = compile_cuda(plan.macros, architecture)
    work = zip(cuda_work(size, dict(plan.macros)["ROWS"]), cuda_instructions(size), strict=True)
    clean, noise, blur = (replace(role, instructions=counts) for role, counts in work)
    return LaunchModel("batch_tail", (clean, noise, blur), plan.threads, compiled.registers, plan.shared, False)
