"""What the batch tail takes on an H200, without one: machine code is interpreted, and its traces are timed.

The parts are in ``bench/sass``: ``sass.timing`` says what is modelled and what is not, ``sass.card`` what was fitted,
and how well the model says what was not. Launches follow each other: none begins before the one before has ended.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import torch
import tyro
from fused import Tails, TailSettings
from harness import spread
from launches import CHANNELS, Backend, Kernel, kernels, output_of, works
from sass.card import H200, MEASURED, NOT_FITTED, Card
from sass.interpreter import run_block
from sass.timing import Timing, resident_blocks, time_blocks

from fastmoll.kernels.batch_tail import Tail, check_tail
from fastmoll.kernels.draw import BLUR, CLEAN, NOISE
from fastmoll.pipelines import MEAN, STD

SAMPLED = 11
"""Multiprocessors that are simulated, evenly spread: the time of a launch is their mean. With roles
mixed, the standard error is about 3 % of it."""
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
    backends: tuple[Backend, ...] = ("cupy", "triton")
    """Whose kernels."""
    roles: tuple[Literal["mixed", "clean", "noise", "blur"], ...] = ("mixed", "clean", "noise", "blur")
    """Batches: thirds of all, or of one role alone."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if not 8 <= self.size <= 512 or self.size % 8:
            raise ValueError(f"size must be a multiple of 8 from 8 to 512, got {self.size}")
        for name in ("backends", "roles"):
            if not getattr(self, name):
                raise ValueError(f"{name} must name at least one, got none")


def batch(settings: Settings, roles: str) -> Tail:
    """The benchmark's batch, in which images have those roles: uint8 NHWC to bfloat16, channels last."""
    tails = Tails(TailSettings(batch_size=settings.batch_size, size=settings.size, device="cpu"), peers=False)
    none = dict.fromkeys(("partner", "lam", "box", "index", "sigma_max"))
    tail = check_tail(
        tails.pixels, mean=MEAN, std=STD, flip=tails.flip, role=tails.role, t=tails.t, seed=0, epoch=0, sigma_min=0.3,
        dtype=torch.bfloat16, memory_format=torch.channels_last, **none,
    )  # fmt: skip
    return tail if roles == "mixed" else replace(tail, role=torch.full_like(tails.role, _ALONE[roles]))


@dataclass(frozen=True)
class Launched:
    """What the sampled multiprocessors did in a launch, and the blocks they had beside each other."""

    name: str
    timings: list[Timing]
    resident: int

    def us(self, card: Card) -> list[float]:
        """What each took."""
        return [timing.cycles / card.ghz / 1e3 for timing in self.timings]


def role_of(kernel: Kernel, tail: Tail, block: tuple[int, int]) -> int:
    """The role of the image that a block belongs to."""
    assert tail.role is not None
    return int(tail.role[block[0] * tail.batch // kernel.launch.grid[0]])


def working(kernel: Kernel, tail: Tail) -> list[tuple[int, int]]:
    """Blocks of a launch that have work, in their order; the others return at once: all of a role and ``y`` alike."""
    columns, rows = kernel.launch.grid
    found, alike = [], {}
    for block in ((x, y) for y in range(rows) for x in range(columns)):
        key = role_of(kernel, tail, block), block[1]
        if key not in alike:
            alike[key] = works(run_block(kernel.program, kernel.launch, block))
        if alike[key]:
            found.append(block)
    return found


def from_memory(kernel: Kernel, tail: Tail, block: tuple[int, int], card: Card) -> float:
    """The part of what a block loads that comes from memory: all, but of blurred images."""
    if role_of(kernel, tail, block) != BLUR:
        return 1.0
    parts = {"batch_tail": card.blur_from_memory, "_second": card.products_from_memory}
    return parts.get(kernel.name, card.scratch_from_memory)


def simulate(kernel: Kernel, tail: Tail, card: Card = H200) -> Launched:
    """Simulate a launch on some multiprocessors, each with the blocks it would get.

    Args:
        kernel: a launch for the batch. What those before it write need not be there: the time does not depend on it.
        tail: the batch, on the CPU.
        card: whose multiprocessors.
    """
    program, launch = kernel.program, kernel.launch
    resident = resident_blocks(program, launch)
    blocks, count = working(kernel, tail), launch.grid[0] * launch.grid[1]
    timings = []
    for first in range(0, min(card.multiprocessors, len(blocks)), card.multiprocessors // SAMPLED):
        mine = blocks[first :: card.multiprocessors]
        traces = [run_block(program, launch, block) for block in mine]
        shares = [from_memory(kernel, tail, block, card) for block in mine]
        timings.append(time_blocks(program, traces, card, resident, count / len(blocks) - 1, shares))
    if not blocks:
        cycles = count / card.multiprocessors / resident * card.idle_block
        timings.append(Timing(cycles, dict.fromkeys(SHOWN, 0.0)))
    return Launched(kernel.name, timings, resident)


def row(launched: Sequence[Launched], copied: int, card: Card = H200) -> dict[str, Any]:
    """A batch's time and bounds in µs, of all launches; ``copied`` are the bytes it reads and writes at least."""
    between = card.launch_us + card.next_launch_us * (len(launched) - 1)
    each = [spread(launch.us(card)) for launch in launched]
    predicted = sum(statistics.mean(launch.us(card)) for launch in launched) + between
    bounds = {
        name: sum(statistics.mean(t.taken[name] for t in launch.timings) for launch in launched) / card.ghz / 1e3
        for name in SHOWN
    }
    return {
        "predicted us": predicted,
        "multiprocessors us": {name: sum(one[name] for one in each) + between for name in each[0]},
        "times the copy": predicted / (card.copy_us + copied / card.copy_tb_s / 1e6),
        "bound by": max(bounds, key=lambda name: bounds[name]), **{f"{name} us": bounds[name] for name in SHOWN},
    }  # fmt: skip


def _compared(known: Mapping[str, tuple[float, float]], names: Iterable[str]) -> str:
    return ", ".join("{} {:g} and {:g} us".format(name, *known[name]) for name in names)


def bench_simulate(settings: Annotated[Settings, tyro.conf.arg(name="")]) -> dict[str, Any]:
    """Predict the batch tail on an H200 from its machine code, cycle by cycle; needs no GPU."""
    apart = {name: said / measured - 1 for name, (measured, said) in NOT_FITTED.items()}
    worst = sorted(apart, key=lambda name: apart[name])
    entries = [
        "predicted: the mean over some multiprocessors, and their range; bound by: what would take longest alone",
        "fitted to, measured on an H200 and said by the model, the CUDA kernel of commit a0baa47: "
        + _compared(MEASURED, ("mixed", "clean", "noise", "blur")),
        "not fitted, Triton's kernels of commit feda3d7: "
        + _compared(NOT_FITTED, dict.fromkeys(("mixed", "blur alone", *worst[:2], worst[-1])))
        + f"; of {len(apart)} batches, {100 * statistics.mean(x * x for x in apart.values()) ** 0.5:.0f} % apart (rms)",
    ]
    rows = []
    copied = 3 * settings.batch_size * CHANNELS * settings.size**2  # a byte in, two out
    for backend in settings.backends:
        for roles in settings.roles:
            tail = batch(settings, roles)
            launched = [simulate(kernel, tail) for kernel in kernels(backend, tail, output_of(tail))]
            rows.append({"backend": backend, "roles": roles, **row(launched, copied)})
            each = (f"{x.name} {statistics.mean(x.us(H200)):.1f} us, {x.resident} blocks" for x in launched)
            entries.append(f"{backend}, {roles}: {'; '.join(each)} beside each other on a multiprocessor")
    return {
        "benchmark": "simulate", "settings": asdict(settings), "card": asdict(H200), "fitted to": MEASURED,
        "not fitted": NOT_FITTED, "rows": rows, "entries": entries,
    }  # fmt: skip
