"""What the batch tail should take on cards that may not be at hand: bytes, arithmetic and compiled instructions.

Written down before a card measures it; a measurement that differs says which term of the model is wrong.

The model, for each launch and each card:

- **memory**: pixels and results once; scratch written by one launch and read by the next goes to memory as far as both
  launches' bytes exceed the second-level cache.
- **L2**: what blocks load and store, each block by itself (a block's own re-reads hit the first level).
- **tensor**: multiply-adds really issued: whole blocks, over the band only.
- **issue**: instructions of the compiled kernel. Code on the path of a role counts once a warp, a loop as often as the
  shape says: loops with matrix instructions by the products they must do, others by elements. In a loop of the
  pointwise kernels, both sides of a forward branch (flip or not) count half. One instruction a cycle and scheduler,
  or one in ``WARP_CYCLES`` of each warp that is resident, if those are too few.
- **xu**, **imad**, **alu**, **lsu**: the same instructions against the pipes they share: 16 lanes a cycle and
  multiprocessor for MUFU and I2F, 64 for integer multiply-add (wide ones twice) and for integer logic, and for loads
  and stores 32 words.
- The *floor* is the largest of these; the *prediction* divides all but memory, whose rate is one that copies reach, by
  ``REACHED`` first. Both add half a wave of blocks at the end, the time blocks without work hold their places, and the
  gaps between launches.

Temperatures of blurred images are the quantiles of Beta(1, 2), which ``bench/fused.py`` draws from; half of the images
are flipped.
"""

from __future__ import annotations

import functools
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import triton
import tyro

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import triton_compile
from disassembly import Code, Counts, outside, times, total_of

from fastmoll.kernels import batch_tail_cupy, batch_tail_triton, cuda_toolchain
from fastmoll.kernels.batch_tail import Tail, check_tail

SIZES = (32, 64, 224, 256, 288, 384)
ROLES = {"mixed": (1 / 3, 1 / 3, 1 / 3), "clean": (1.0, 0.0, 0.0), "noise": (0.0, 1.0, 0.0), "blur": (0.0, 0.0, 1.0)}
"""Shares of clean, noised and blurred images."""

WARP_CYCLES = 7.0  # from one instruction of a warp to its next: measured on an H200, for the CUDA C++ kernel
REACHED = 0.75  # of the peak of a pipe, in kernels that do more than one thing
LAUNCH_US, GAP_US = 2.0, 1.0  # around the first launch (also of a copy), before each further one
IDLE_US = 0.5  # a block that reads its role and leaves
CHANNELS = 3
MMA_FLOPS = 2 * 16 * 8 * 16  # of one mma.sync.m16n8k16


@dataclass(frozen=True)
class Card:
    """Public figures of a card.

    Attributes:
        architecture: that kernels are compiled for.
        multiprocessors: how many.
        ghz: boost clock.
        tb_s: memory bandwidth that a copy reaches.
        l2_mb, l2_tb_s: second-level cache; its bandwidth is as measured by others, for B200 guessed from the clock.
        tflops: dense float16, by the card's newest matrix instructions.
        mma_sync: the share of it that ``mma.sync`` reaches; for B200 a guess.
        shared_kb: shared memory of a multiprocessor.
        alu_lanes: 32-bit integer operations a cycle and multiprocessor.
    """

    architecture: int
    multiprocessors: int
    ghz: float
    tb_s: float
    l2_mb: float
    l2_tb_s: float
    tflops: float
    mma_sync: float
    shared_kb: int = 228
    alu_lanes: int = 64


CARDS = {
    "A100-SXM 80GB": Card(80, 108, 1.41, 1.8, 40, 4.5, 312, 1.0, 164),
    "H100 SXM": Card(90, 132, 1.83, 3.0, 50, 5.7, 989, 0.62),
    "H200": Card(90, 132, 1.83, 4.3, 50, 5.7, 989, 0.62),
    "B200": Card(100, 148, 1.85, 7.2, 126, 9.0, 2250, 0.3, alu_lanes=128),
}


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


@dataclass(frozen=True)
class Settings:
    """What is predicted."""

    batch_size: int = 256
    """Images a batch."""
    size: int = 224
    """Height and width, pixels."""
    sizes: tuple[int, ...] = SIZES
    """Further sizes, for the mixed batch alone."""


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
    reach = min(math.ceil(max(32.0, 4.0 * sigma)), size)
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
        models.append(
            LaunchModel(
                name,
                (clean, noise, blur),
                32 * warps,
                used.registers,
                used.shared,
                "GMMA" in used.sass or "UTC" in used.sass,
            )
        )
    return models


# --------------------------------------------------------------------------------------------------------------- CuPy


@functools.cache
def compile_cuda(macros: cuda_toolchain.Macros, architecture: int) -> tuple[str, int]:
    """Disassembly and registers of the CUDA C++ kernel."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(cuda_toolchain.source_path("batch_tail.cu").read_text(), "batch_tail.cu", (), ())
    options = (f"-arch=sm_{architecture}", "-ftz=true", "--device-as-default-execution-space")
    nvrtc.compileProgram(program, (*cuda_toolchain.options(macros), *options))
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(nvrtc.getCUBIN(program) + b"\0")  # CuPy drops the last byte
        sass, usage = (
            subprocess.run([tool, option, cubin], check=True, capture_output=True, text=True).stdout
            for option in ("-sass", "-res-usage")
        )
    return sass, int(re.findall(r"REG:(\d+)", usage)[0])


def cuda_work(size: int, rows: int) -> tuple[Work, Work, Work]:
    """Bytes, FLOPs and blocks of the one launch for an image of each role, without instructions."""
    values, tiles = size * size * CHANNELS, math.ceil(size / rows)
    stream = Work(blocks=tiles, pixels=values, result=2 * values, l2=3 * values)
    first = mean_steps(lambda s: cuda_steps(size, rows, 16, s), size)
    second = mean_steps(lambda s: cuda_steps(size, 32, 32, s), size)
    groups = math.ceil(size / 32)
    flops = 2 * 16 * CHANNELS * (first * rows * 32 * groups + second * rows * tiles * 32)
    l2 = 2 * values + first * 16 * size * CHANNELS
    return stream, stream, Work(blocks=tiles, pixels=values, result=2 * values, l2=l2, flops=flops)


def cuda_model(size: int, architecture: int) -> LaunchModel:
    """The one launch of the CuPy backend, compiled."""
    tail = make_tail(size, 1)
    out = torch.empty(1, CHANNELS, size, size, dtype=torch.bfloat16, memory_format=torch.channels_last)
    plan = batch_tail_cupy.plan(tail, out, triton_compile.SHARED_LIMIT[architecture])
    rows, warps = dict(plan.macros)["ROWS"], plan.threads // 32
    sass, registers = compile_cuda(plan.macros, architecture)
    code = Code(sass)
    work = cuda_work(size, rows)
    tiles, groups = math.ceil(size / rows), math.ceil(size / 32)
    stream, stage = code.find("STG.*128", "HMMA"), code.find("LDGSTS", "HMMA")
    # One loop for each of three words of four pixels, or one for all of them.
    product1, product2 = code.find("HMMA", "LDS\\b"), code.find("HMMA", "LDG")
    product2 = [x for x in product2 if x not in product1]
    if not (stream and stage and product1 and len(product2) == 1):
        raise ValueError(f"the loops of batch_tail.cu for sm_{architecture} are not as expected")
    # The most unrolled of each does the work, what others do is left over.
    stream, stage = (max(found, key=lambda x: x.last - x.first) for found in (stream, stage))
    clean, noise = (code.body(stream, noise=noised) for noised in (False, True))
    rounds = (
        math.ceil(rows * size * CHANNELS / (8 * (plan.threads // 3 * 3))) * tiles * warps / code.count("STG", stream)
    )
    staged = times(code.body(stage), tiles * rows * size * CHANNELS / 8 / 32 / code.count("LDGSTS", stage))

    parts = []
    first = mean_steps(lambda s: cuda_steps(size, rows, 16, s), size)
    second = mean_steps(lambda s: cuda_steps(size, 32, 32, s), size)
    for loops, steps, around in (
        (product1, first * CHANNELS * groups * (rows // 16) * 4, tiles * groups * CHANNELS),
        (product2, second * tiles * (rows // 16) * CHANNELS * 4, tiles * groups * (rows // 16)),
    ):
        for loop in loops:
            body = code.tally(range(loop.first, loop.last + 1))
            parts.append(times(body, steps / len(loops) / code.count("HMMA", loop)))
        outer = [x for x in code.loops if x not in loops and all(code.inside(loop, x) for loop in loops)]
        shell = min(outer, key=lambda x: x.last - x.first)
        parts.append(times(code.body(shell, loops), around / len(loops)))
    # What a block prepares: loops in their order, the most unrolled of each kind; square images prepare once.
    reach = np.minimum(np.ceil(np.maximum(32, 4 * scales(size))), size)
    terms = np.minimum(np.ceil(6.5 * size / (scales(size) * math.pi)), size)
    sums = float(np.mean((reach + 1) / 4 * np.ceil((terms + 1) / 8)))  # eight lanes a sum, four sums a warp
    padded = 3 * groups * 32
    for has, has_not, unit, elements in (
        ("STS", "MUFU|STG|LDS\\b|HMMA|LDSM|FADD", "STS", 2 * size / 32),
        ("MUFU.EX2", "STG|MUFU.SIN", "MUFU.EX2", size / 32),
        ("FFMA", "SHFL|MUFU|FCHK|HMMA|STG|STS", "FFMA", sums),
        ("FADD", "FFMA|STS|HMMA|STG|IABS", "LDS", float(np.mean(reach)) / 32 * warps),
        ("IABS", "HMMA|STG", "IABS", padded / 32),
        ("F2FP", "HMMA|STG", "F2FP", padded / 32 + first / tiles * 16 / 64 * rows),
    ):
        found = [x for x in code.find(has, has_not) if x.first < product1[0].first]
        if not found:
            continue
        loop = max(found, key=lambda x: code.count(unit, x))
        parts.append(times(code.tally(range(loop.first, loop.last + 1)), tiles * elements / code.count(unit, loop)))
    sums_shells = [x for x in code.loops if code.count("SHFL", x) and x.last < product1[0].first]
    if sums_shells:
        shell = min(sums_shells, key=lambda x: x.last - x.first)
        inside = [x for x in code.inner if x != shell and code.inside(x, shell)]
        parts.append(times(code.body(shell, inside), tiles * float(np.mean(reach + 1)) / 4))
    instructions = (total_of([times(role, rounds), staged]) for role in (clean, noise))
    instructions = (*instructions, total_of(parts))
    roles = (replace(w, instructions=c) for w, c in zip(work, instructions, strict=True))
    return LaunchModel(
        "batch_tail", (next(roles), next(roles), next(roles)), plan.threads, registers, plan.shared, False
    )


# --------------------------------------------------------------------------------------------------------------- time


def predict(models: Sequence[LaunchModel], card: Card, shares: Sequence[float], batch: int) -> list[dict[str, Any]]:
    """Each launch's bytes, operations, bounds in µs, and the floor and the prediction, without gaps."""
    rows, before = [], 0.0
    for model in models:

        def mean(name: str, model: LaunchModel = model) -> float:
            return batch * sum(s * float(getattr(w, name)) for s, w in zip(shares, model.roles, strict=True))

        each = zip(shares, model.roles, strict=True)
        counts = total_of([times(work.instructions, share * batch) for share, work in each])
        pixels, result, taken, left = (mean(name) for name in ("pixels", "result", "scratch_in", "scratch_out"))
        own = pixels + result + taken + left
        miss_in = max(0.0, 1.0 - card.l2_mb * 1e6 / max(before + own, 1.0))
        # What is left dirty in the cache may never have to be written, if what follows reads it while it is there.
        moved = pixels + result + miss_in * (taken + left)
        before = own
        resident = max(1, min(
            65536 // (max(model.registers, 16) * model.threads), 2048 // model.threads,
            card.shared_kb * 1024 // (model.shared + 1024), 32,
        ))  # fmt: skip
        warps = resident * model.threads / 32 / 4  # of a scheduler
        cycles = card.multiprocessors * card.ghz * 1e3  # of all multiprocessors in a µs
        bounds = {
            "memory": moved / card.tb_s / 1e6,
            "l2": mean("l2") / card.l2_tb_s / 1e6,
            "tensor": mean("flops") / (card.tflops * (1.0 if model.wgmma else card.mma_sync)) / 1e6,
            "issue": counts["warp"] / 4 / cycles * max(1.0, WARP_CYCLES / warps),
            "xu": counts["xu"] * 2 / cycles,
            "imad": counts["imad_pipe"] / 2 / cycles,
            "alu": counts["alu"] * 32 / card.alu_lanes / cycles,
            "lsu": counts["lsu"] / cycles,
        }
        slots = resident * card.multiprocessors
        idle = mean("idle") * IDLE_US / slots
        tail = 1.0 + 0.5 * min(1.0, slots / max(mean("blocks"), 1.0))
        floor = max(bounds.values())
        reached = max(value / (1.0 if name == "memory" else REACHED) for name, value in bounds.items())
        rows.append({
            "launch": model.name, "resident": resident, "compulsory_bytes": pixels + result, "moved_bytes": moved,
            "l2_bytes": mean("l2"), "flops": mean("flops"), "instructions": dict(counts), "bounds_us": bounds,
            "bound": max(bounds, key=lambda name: bounds[name] / (1.0 if name == "memory" else REACHED)),
            "floor_us": floor + idle, "predicted_us": reached * tail + idle,
        })  # fmt: skip
    return rows


def bench_roofline(settings: Annotated[Settings, tyro.conf.arg(name="")]) -> dict[str, Any]:
    """Predict the batch tail from bytes, arithmetic and compiled instructions; needs no GPU."""
    for name in ("batch_size", "size"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(settings, name)}")
    if not isinstance(batch_tail_triton._down, triton.JITFunction):
        raise ValueError(f"TRITON_INTERPRET must not be set to compile, got {os.environ.get('TRITON_INTERPRET')!r}")
    rows, details = [], []
    batch = settings.batch_size
    for size in (settings.size, *(s for s in settings.sizes if s != settings.size)):
        compiled: dict[tuple[str, int], list[LaunchModel]] = {}
        for architecture in sorted({card.architecture for card in CARDS.values()}):
            compiled["triton", architecture] = triton_model(size, batch, architecture)
            compiled["cupy", architecture] = [cuda_model(size, architecture)]
        for backend in ("triton", "cupy"):
            for roles, shares in ROLES.items():
                if size != settings.size and roles != "mixed":
                    continue
                for name, card in CARDS.items():
                    parts = predict(compiled[backend, card.architecture], card, shares, batch)
                    fixed = LAUNCH_US + GAP_US * (len(parts) - 1)
                    copied = 3.0 * batch * CHANNELS * size * size
                    copy = copied / card.tb_s / 1e6 + LAUNCH_US
                    row = {
                        "size": size, "backend": backend, "roles": roles, "card": name,
                        "moved MB": sum(p["moved_bytes"] for p in parts) / 1e6,
                        "GFLOP": sum(p["flops"] for p in parts) / 1e9,
                        "warp instr. M": sum(p["instructions"].get("warp", 0.0) for p in parts) / 1e6,
                        "bounds": "/".join(p["bound"] for p in parts),
                        "floor us": sum(p["floor_us"] for p in parts) + fixed,
                        "predicted us": sum(p["predicted_us"] for p in parts) + fixed, "copy us": copy,
                    }  # fmt: skip
                    rows.append(row | {"times the copy": row["predicted us"] / copy})
                    details.append({"size": size, "backend": backend, "roles": roles, "card": name, "launches": parts})
    cards = {name: asdict(card) for name, card in CARDS.items()}
    return {
        "benchmark": "roofline", "settings": asdict(settings), "cards": cards, "rows": rows, "details": details,
    }  # fmt: skip
