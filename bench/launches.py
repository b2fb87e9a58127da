"""The launches of the batch tail: compiled, and what they do for an image of each role, as their code is interpreted.

The half of the model in ``bench/roofline.py`` that knows the kernels and no card.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import triton

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import triton_compile
from cuda_compile import compile_cuda
from sass.interpreter import Trace, run_block, storages
from sass.program import Instruction, Program

from fastmoll.kernels import batch_tail_cupy, batch_tail_triton, batch_tail_triton_bytes
from fastmoll.kernels.batch_tail import Tail, check_tail
from fastmoll.kernels.draw import BLUR, CLEAN, NOISE

Backend = Literal["triton", "cupy"]
Array = np.ndarray[Any, Any]
Counts = Counter[str]
"""Warp instructions by class; ``warp`` is all of them, ``xu``, ``imad_pipe``, ``alu``, ``lsu`` what pipes are taken."""

CHANNELS = 3
BATCH = 16
"""Images of a batch that is interpreted: as with more, code for multiples of 16 is compiled."""
COUNTED = {CLEAN: 2, NOISE: 2, BLUR: BATCH}
"""How many of them are, of each role: half are flipped, and blurred ones have temperatures of their own."""
IDLE_INSTRUCTIONS = 80
"""A block of fewer a warp has found that it has no work."""


@dataclass(frozen=True)
class Kernel:
    """A launch, compiled for sm_90."""

    name: str
    program: Program
    launch: batch_tail_cupy.Launch


@dataclass(frozen=True)
class Work:
    """What one launch does for a mean image of a role. Bytes, FLOPs and warp instructions by class."""

    idle: float = 0.0  # blocks without work
    blocks: float = 0.0  # blocks with work
    pixels: float = 0.0
    result: float = 0.0
    scratch_in: float = 0.0  # that earlier launches wrote
    scratch_out: float = 0.0
    l2: float = 0.0
    flops: float = 0.0
    instructions: Counts = field(default_factory=Counter)


Roles = tuple[Work, Work, Work]
"""Of a clean, a noised and a blurred image."""


@dataclass(frozen=True)
class LaunchModel:
    """One launch: what it does for an image of each role, and what of it fits a multiprocessor."""

    name: str
    roles: Roles
    threads: int
    registers: int
    shared: int
    wgmma: bool


# ---------------------------------------------------------------------------------------------------------- the kernels


def make_tail(size: int, batch: int) -> Tail:
    """The arguments of the benchmark: uint8 NHWC to bfloat16, channels last; clean images."""
    none = dict.fromkeys(("partner", "lam", "box", "sigma_max"))
    return check_tail(
        torch.zeros(batch, size, size, CHANNELS, dtype=torch.uint8),
        **none,
        mean=(0.5,) * CHANNELS, std=(0.25,) * CHANNELS, seed=2**64 - 1, epoch=1, sigma_min=0.3,
        flip=torch.arange(batch) % 2 == 0, role=torch.zeros(batch, dtype=torch.int8), t=torch.zeros(batch),
        index=torch.arange(batch), dtype=torch.bfloat16, memory_format=torch.channels_last,
    )  # fmt: skip


def output_of(tail: Tail) -> torch.Tensor:
    """Where to write, not initialised."""
    shape = (tail.batch, tail.channels, tail.height, tail.width)
    return torch.empty(shape, dtype=tail.dtype, memory_format=tail.memory_format)


def triton_launches(
    tail: Tail, out: torch.Tensor, blocks: batch_tail_triton.Blocks | batch_tail_triton_bytes.ByteBlocks | None = None
) -> list[triton_compile.Launch]:
    """The launches that the launcher wants, in their order.

    Raises:
        ValueError: kernels are defined for the interpreter.
    """
    if not isinstance(batch_tail_triton._down, triton.JITFunction):
        raise ValueError(f"TRITON_INTERPRET must not be set to compile, got {os.environ.get('TRITON_INTERPRET')!r}")
    with triton_compile.recorded(batch_tail_triton, batch_tail_triton_bytes) as launches:
        batch_tail_triton.batch_tail_triton(tail, out, blocks)
    return list(launches)


def kernels(
    backend: Backend,
    tail: Tail,
    out: torch.Tensor,
    blocks: batch_tail_triton.Blocks | batch_tail_triton_bytes.ByteBlocks | None = None,
) -> list[Kernel]:
    """The launches of a backend for a batch on the CPU, compiled for sm_90, in their order.

    Args:
        backend: whose.
        tail: the batch.
        out: where they write.
        blocks: of the Triton kernels; default: theirs.
    """
    if backend == "cupy":
        launch = batch_tail_cupy.plan(tail, out, triton_compile.SHARED_LIMIT[90])
        compiled = compile_cuda(launch.macros, 90)
        return [Kernel("batch_tail", Program(compiled.sass, compiled.registers, compiled.stack), launch)]
    found = []
    for wanted in triton_launches(tail, out, blocks):
        used = triton_compile.compile_launch(wanted, 90)
        program = Program(used.sass, used.registers, used.stack)
        found.append(Kernel(used.kernel, program, triton_compile.as_cuda(wanted, used)))
    return found


def works(traces: Sequence[Trace]) -> bool:
    """Whether a block does more than find out that it has no work."""
    return sum(len(trace.pc) for trace in traces) >= IDLE_INSTRUCTIONS * len(traces)


# ------------------------------------------------------------------------------------------------------- what they do


def classify(name: str) -> dict[str, float]:
    """The class of an instruction, and what it takes of the pipes (1: a warp of 32 lanes at the pipe's full rate)."""
    base = name.partition(".")[0]
    wide = 4.0 if ".128" in name or "LDSM" in name else 2.0 if ".64" in name else 1.0
    if base in ("HMMA", "HGMMA"):
        return {"warp": 1.0, "matrix": 1.0}
    if re.match("MUFU|I2F$|F2I", base):
        return {"warp": 1.0, "mufu" if base == "MUFU" else "convert": 1.0, "xu": 1.0}
    if base == "IMAD":
        kind = "imad_wide" if re.search("WIDE|HI", name) else "imad"
        return {"warp": 1.0, kind: 1.0, "imad_pipe": 2.0 if kind == "imad_wide" else 1.0}
    if re.match("LDG|LDS|STG|STS|LDSM|LDGSTS", base):
        return {"warp": 1.0, base.lower(): 1.0, "lsu": wide}
    if re.match("LOP3|IADD3|VIADD|PRMT|SHF|ISETP|SEL|LEA|IABS|[UV]?IMNMX|VIADDMNMX|FSETP|FSEL|FMNMX|PLOP3", base):
        return {"warp": 1.0, "other": 1.0, "alu": 1.0}
    return {"warp": 1.0, "other": 1.0}


def flops(instruction: Instruction) -> int:
    """Of a matrix instruction, those of a warp: of HGMMA, whose rows are those of four warps, a quarter."""
    if instruction.operation == "HMMA":
        return 2 * 16 * 8 * 16  # m16n8k16
    if instruction.operation == "HGMMA":
        rows, columns, depth = map(int, instruction.name.split(".")[1].split("x"))
        return 2 * rows * columns * depth // 4
    return 0


def times(counts: Counts, factor: float) -> Counts:
    """Counts, so many times."""
    return Counter({name: value * factor for name, value in counts.items()})


def total_of(parts: Sequence[Counts]) -> Counts:
    """The sum of counts."""
    total: Counts = Counter()
    for part in parts:
        total.update(part)
    return total


class Sectors:
    """32-byte sectors of memory that the blocks of a launch load and store, by their addresses, and those of all that
    pass the second-level cache."""

    def __init__(self, kernel: Kernel) -> None:
        names = [instruction.name for instruction in kernel.program.code]
        self._loads = np.array([name.startswith("LDG") for name in names])
        self._stores = np.array([name.startswith("STG") for name in names])
        self._bypass = np.array(["BYPASS" in name for name in names])
        # From where tensors lie in traces to where they are.
        self._shift = np.array([0, *(begin // 32 - (n << 27) for n, begin in enumerate(storages(kernel.launch), 1))])
        self.through_l2 = 0
        self._loaded: list[Array] = []
        self._stored: list[Array] = []

    def add(self, block: Sequence[Trace]) -> None:
        pc = np.concatenate([np.repeat(trace.pc, trace.count) for trace in block])
        sectors = np.concatenate([trace.sectors for trace in block])
        sectors = sectors + self._shift[sectors >> 27]
        loaded, stored = np.unique(sectors[self._loads[pc]]), sectors[self._stores[pc]]
        kept = np.unique(sectors[self._loads[pc] & ~self._bypass[pc]])
        self.through_l2 += len(kept) + int(self._bypass[pc].sum()) + len(stored)
        self._loaded.append(loaded)
        self._stored.append(np.unique(stored))

    @property
    def loaded(self) -> Array:
        return np.unique(np.concatenate(self._loaded))

    @property
    def stored(self) -> Array:
        return np.unique(np.concatenate(self._stored))


def _inside(sectors: Array, tensor: torch.Tensor) -> int:
    """How many sectors are of a tensor."""
    begin = tensor.data_ptr()
    return int(((sectors >= begin // 32) & (sectors < (begin + tensor.nbytes + 31) // 32)).sum())


def _observe(kernel: Kernel, tail: Tail, out: torch.Tensor, images: int, written: Array) -> tuple[Work, Array]:
    """What a launch does for the first images of a batch, each on average, and the sectors it stores; ``written`` are
    those that launches before it stored."""
    columns, rows = kernel.launch.grid
    executed = np.zeros(len(kernel.program.code), np.int64)
    sectors, busy, count = Sectors(kernel), 0, columns * images // tail.batch
    for y in range(rows):
        for x in range(count):
            traces = run_block(kernel.program, kernel.launch, (x, y))
            busy += works(traces)
            sectors.add(traces)
            for trace in traces:
                executed += np.bincount(trace.pc, minlength=len(executed))
    code = [(kernel.program.code[i], int(executed[i])) for i in np.flatnonzero(executed)]
    loaded, stored = sectors.loaded, sectors.stored
    result = _inside(stored, out)
    work = Work(
        idle=(count * rows - busy) / images,
        blocks=busy / images,
        pixels=32 * _inside(loaded, tail.images) / images,
        result=32 * result / images,
        scratch_in=32 * len(np.intersect1d(loaded, written)) / images,
        scratch_out=32 * (len(stored) - result) / images,
        l2=32 * sectors.through_l2 / images,
        flops=sum(flops(instruction) * n for instruction, n in code) / images,
        instructions=total_of([times(Counter(classify(instruction.name)), n / images) for instruction, n in code]),
    )
    return work, stored


@functools.cache
def launch_works(backend: Backend, size: int) -> dict[str, Roles]:
    """What each launch does for an image of each role; temperatures are quantiles of Beta(1, 2)."""
    found: dict[str, list[Work]] = {}
    quantiles = (np.arange(BATCH) + 0.5) / BATCH
    for role, images in COUNTED.items():
        tail = replace(
            make_tail(size, BATCH),
            role=torch.full((BATCH,), role, dtype=torch.int8),
            t=torch.from_numpy(1.0 - np.sqrt(1.0 - quantiles)).float(),
        )
        out, written = output_of(tail), np.zeros(0, np.int64)
        for kernel in kernels(backend, tail, out):
            work, stored = _observe(kernel, tail, out, images, written)
            written = np.union1d(written, stored)
            found.setdefault(kernel.name, []).append(work)
    return {name: (clean, noise, blur) for name, (clean, noise, blur) in found.items()}


def triton_model(size: int, batch: int, architecture: int) -> list[LaunchModel]:
    """The launches of the Triton backend, compiled. What they do is counted for sm_90, whatever the architecture."""
    models, tail = [], make_tail(size, batch)
    for launch in triton_launches(tail, output_of(tail)):
        used = triton_compile.compile_launch(launch, architecture)
        roles, threads = launch_works("triton", size)[used.kernel], 32 * launch.options.get("num_warps", 4)
        asynchronous = "GMMA" in used.sass or "UTC" in used.sass
        models.append(LaunchModel(used.kernel, roles, threads, used.registers, used.shared, asynchronous))
    return models


def cuda_model(size: int, architecture: int) -> list[LaunchModel]:
    """The one launch of the CuPy backend, likewise."""
    tail = make_tail(size, 1)
    plan = batch_tail_cupy.plan(tail, output_of(tail), triton_compile.SHARED_LIMIT[architecture])
    compiled = compile_cuda(plan.macros, architecture)
    roles = launch_works("cupy", size)["batch_tail"]
    return [LaunchModel("batch_tail", roles, plan.threads, compiled.registers, plan.shared, False)]
