"""What the CUDA C++ batch tail takes on an H200, without one: machine code is interpreted, and its traces are timed.

The parts are in ``bench/sass``: ``sass.timing`` says what is modelled and what is not, ``sass.card`` what was fitted.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from fused import Tails, TailSettings
from harness import spread
from sass.card import H200, MEASURED, Card
from sass.interpreter import run_block
from sass.program import Program
from sass.timing import Timing, resident_blocks, time_blocks

from fastmoll.kernels import batch_tail_cupy
from fastmoll.kernels.batch_tail import Tail, check_tail
from fastmoll.kernels.draw import BLUR, CLEAN, NOISE
from fastmoll.pipelines import MEAN, STD

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from cuda_compile import compile_cuda
from triton_compile import SHARED_LIMIT

CHANNELS = 3
SAMPLED = 6
"""Multiprocessors that are simulated, evenly spread: the time of a launch is their mean."""
_ALONE = {"clean": CLEAN, "noise": NOISE, "blur": BLUR}
SHOWN = ("issue", "load/store", "alu", "fma", "special", "matrix", "l2", "memory")
"""What a batch may be bound by, in the order of the table: ``taken`` of :class:`sass.timing.Timing`."""


@dataclass(frozen=True)
class Settings:
    """What is predicted.

    Raises:
        ValueError: a size or count that is not possible.
    """

    batch_size: int = 256
    """Images a batch."""
    size: int = 224
    """Height and width, pixels: a multiple of 8, as the fast kernels have it."""
    roles: tuple[Literal["mixed", "clean", "noise", "blur"], ...] = ("mixed", "clean", "noise", "blur")
    """Batches: thirds of all, or of one role alone."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if not 8 <= self.size <= 512 or self.size % 8:
            raise ValueError(f"size must be a multiple of 8 from 8 to 512, got {self.size}")
        if not self.roles:
            raise ValueError("roles must name at least one batch, got none")


def batch(settings: Settings, roles: str) -> Tail:
    """The benchmark's batch, in which images have those roles: uint8 NHWC to bfloat16, channels last."""
    tails = Tails(TailSettings(batch_size=settings.batch_size, size=settings.size, device="cpu"), peers=False)
    none = dict.fromkeys(("partner", "lam", "box", "index", "sigma_max"))
    tail = check_tail(
        tails.pixels, mean=MEAN, std=STD, flip=tails.flip, role=tails.role, t=tails.t, seed=0, epoch=0, sigma_min=0.3,
        dtype=torch.bfloat16, memory_format=torch.channels_last, **none,
    )  # fmt: skip
    return tail if roles == "mixed" else replace(tail, role=torch.full_like(tails.role, _ALONE[roles]))


def working(tail: Tail, launch: batch_tail_cupy.Launch) -> list[tuple[int, int]]:
    """Blocks of a fast kernel that have work, in their order; the others return at once."""
    assert tail.role is not None
    tiles = launch.grid[0] // tail.batch
    blurred = (tail.role == BLUR).tolist()
    columns, rows = launch.grid
    return [(x, y) for y in range(rows) for x in range(columns) if blurred[x // tiles] == (y == 0)]


def predict(tail: Tail, card: Card = H200, resident: int | None = None) -> tuple[list[Timing], int]:
    """Simulate the launch of a batch on some multiprocessors, each with the blocks it would get.

    Args:
        tail: a batch that a fast kernel takes, on the CPU.
        card: whose multiprocessors.
        resident: blocks beside each other; by default what fits.

    Returns:
        What each multiprocessor did, and the blocks beside each other.
    """
    shape = (tail.batch, tail.channels, tail.height, tail.width)
    out = torch.empty(shape, dtype=tail.dtype, memory_format=tail.memory_format)
    launch = batch_tail_cupy.plan(tail, out, SHARED_LIMIT[90])
    compiled = compile_cuda(launch.macros, 90)
    program = Program(compiled.sass, compiled.registers, compiled.stack)
    blocks = working(tail, launch)
    idle = launch.grid[0] * launch.grid[1] / len(blocks) - 1
    resident = resident or resident_blocks(program, launch)
    timings = []
    for first in range(0, min(card.multiprocessors, len(blocks)), card.multiprocessors // SAMPLED):
        mine = blocks[first :: card.multiprocessors]
        traces = [run_block(program, launch, block) for block in mine]
        from_memory = [card.blur_from_memory if y == 0 else 1.0 for _, y in mine]
        timings.append(time_blocks(program, traces, card, resident, idle, from_memory))
    return timings, resident


def row(roles: str, timings: Sequence[Timing], copied: int, card: Card = H200) -> dict[str, Any]:
    """A batch's time and bounds in µs; ``copied`` are the bytes it reads and writes at least."""
    cycles = card.ghz * 1e3  # in a µs
    times = [timing.cycles / cycles + card.launch_us for timing in timings]
    bounds = {name: statistics.mean(t.taken[name] for t in timings) / cycles for name in SHOWN}
    predicted = statistics.mean(times)
    return {
        "roles": roles, "predicted us": predicted, "multiprocessors us": spread(times),
        "times the copy": predicted / (card.copy_us + copied / card.copy_tb_s / 1e6),
        "bound by": max(bounds, key=lambda name: bounds[name]), **{f"{name} us": bounds[name] for name in SHOWN},
    }  # fmt: skip


def bench_simulate(settings: Annotated[Settings, tyro.conf.arg(name="")]) -> dict[str, Any]:
    """Predict the CUDA C++ batch tail on an H200 from its machine code, cycle by cycle; needs no GPU."""
    before = {name: MEASURED[name] for name in ("mixed", "clean", "noise", "blur")}
    entries = [
        "predicted: the mean over some multiprocessors, and their range; bound by: what would take longest alone",
        "of commit a0baa47's kernel, measured on an H200 and said by the model: "
        + ", ".join(f"{name} {measured:g} and {said:g} us" for name, (measured, said) in before.items()),
    ]
    rows = []
    copied = 3 * settings.batch_size * CHANNELS * settings.size**2  # a byte in, two out
    for roles in settings.roles:
        timings, resident = predict(batch(settings, roles))
        rows.append(row(roles, timings, copied))
        entries.append(f"{roles}: {resident} blocks beside each other on a multiprocessor")
    return {
        "benchmark": "simulate", "settings": asdict(settings), "card": asdict(H200), "fitted to": MEASURED,
        "rows": rows, "entries": entries,
    }  # fmt: skip
