"""Which blocks of the batch tail are the fastest on this card, size by size."""

from __future__ import annotations

import collections
import itertools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
import tyro
from harness import Clock, in_turns
from torch import Tensor

from fastmoll.kernels.batch_tail import Tail, check_tail
from fastmoll.kernels.draw import draw
from fastmoll.pipelines import MEAN, STD


@dataclass(frozen=True)
class Settings:
    """What is tuned."""

    sizes: tuple[int, ...] = (224, 32, 64, 256, 288, 384)
    """Heights and widths, pixels."""
    pixels: int = 256 * 224 * 224
    """Pixels of a batch, whatever the size of its images."""
    rounds: int = 15
    """Turns of each candidate."""
    shown: int = 4
    """Candidates of each launch that are listed, the fastest first."""
    workers: int = len(os.sched_getaffinity(0))
    """Processes that compile."""
    device: str = "cuda"
    """Only a GPU can be tuned."""


def make_tail(size: int, batch: int) -> Tail:
    """A batch with a third of each role, as the benchmark of the kernels has it."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (batch, size, size, 3), generator=generator, dtype=torch.uint8)
    index = torch.arange(batch)
    order = torch.randperm(batch, generator=generator)
    tensors = {
        "role": (index % 3).to(torch.int8)[order],
        "t": draw(index, roles=(0, 1, 0))[1],
        "flip": order % 2 == 0,
        "index": index,
    }
    return check_tail(
        pixels.cuda(), mean=MEAN, std=STD, **{k: v.cuda() for k, v in tensors.items()},
        partner=None, lam=None, box=None, seed=0, epoch=0, sigma_min=0.3, sigma_max=None,
        dtype=torch.bfloat16, memory_format=torch.channels_last,
    )  # fmt: skip


Candidate = tuple[str, str, dict[str, int]]
"""Backend, launch, blocks."""


def candidates(by_bytes: bool) -> Iterable[Candidate]:
    """What is tried, of the Triton kernels for bytes or of the others."""
    yield from _two_launches() if by_bytes else _four_launches()
    for rows, warps in itertools.product((16, 32), (14, 21, 24, 28, 32)):
        yield "cupy", "batch_tail", {"rows": rows, "warps": warps}


def _two_launches() -> Iterable[Candidate]:
    for rows, terms, warps in itertools.product((16, 32, 64), (16, 32), (2, 4, 8)):
        yield "triton", "first", {"ROWS": rows, "TERMS": terms, "num_warps": warps, "GROUPS": 32 * warps}
    # Larger ones would read of the matrices what no block of 64 rows has written.
    for bm, bn, stages, warps in itertools.product((32, 64), (32, 64), (2, 3, 4), (4, 8)):
        if bm * bn // (32 * warps) >= 8:  # numbers of each of the three sums in a thread
            blocks = {"BM": bm, "BN": bn, "STAGES": stages}
            yield "triton", "second", {**blocks, "num_warps": warps}
    for groups in (64, 128, 256):
        yield "triton", "first", {"GROUPS": groups}


def _four_launches() -> Iterable[Candidate]:
    for rows, warps in itertools.product((16, 32), (4, 8)):
        yield "triton", "prepare", {"ROWS": rows, "num_warps": warps}
    for bm, bn, bk, warps in itertools.product((32, 64, 128), (32, 64, 128), (32, 64), (4, 8)):
        if 16 <= bm * bn // (32 * warps) <= 32:  # numbers of each of the three sums in a thread
            yield "triton", "across", {"BM": bm, "BN": bn, "BK": bk, "num_warps": warps, "BLOCK": 128 * warps}
    for bm, bn, bk, warps in itertools.product((32, 64, 128), (64, 128, 256), (32, 64), (4, 8)):
        if 32 <= bm * bn // (32 * warps) <= 64:
            yield "triton", "down", {"BM": bm, "BN": bn, "BK": bk, "num_warps": warps, "BLOCK": 128 * warps}
    for launch, (name, values) in itertools.product(
        ("across", "down"), (("BLOCK", (256, 512, 1024, 2048)), ("num_stages", (2, 3, 4, 5)))
    ):
        for value in values:
            yield "triton", launch, {name: value}


def runner(tail: Tail, backend: str, launch: str, options: dict[str, int]) -> Callable[[], Tensor]:
    """The batch tail with one launch changed."""
    if backend == "cupy":
        from fastmoll.kernels.batch_tail_cupy import batch_tail_cupy

        return partial(batch_tail_cupy, tail, rows=(options["rows"],), warps=options["warps"])
    from fastmoll.kernels.batch_tail_triton import batch_tail_triton, blocks_for

    blocks = blocks_for(tail)
    if launch:
        blocks = replace(blocks, **{launch: {**getattr(blocks, launch), **options}})
    return partial(batch_tail_triton, tail, blocks=blocks)


def _compile(size: int, backend: str, launch: str, options: dict[str, int]) -> str:
    """Leave the compiled kernels in the caches on disk; returns what was wrong."""
    try:
        runner(make_tail(size, 16), backend, launch, options)()
        torch.cuda.synchronize()
    except Exception as error:  # Whatever it is, the candidate is out, and the table says why.
        return f"{type(error).__name__}: {error}"[:80]
    return ""


def entries(tail: Tail, best: Sequence[tuple[Candidate, float]], clock: Clock, rounds: int) -> list[str]:
    """The fastest options of all launches together, as source for the files of the kernels.

    Args:
        tail: what was timed.
        best: candidates with their milliseconds, the fastest first.
        clock: times the Triton kernels once more, with what is best for each of their launches.
        rounds: turns.
    """
    from fastmoll.kernels.batch_tail_triton import batch_tail_triton, blocks_for

    lines, changed = [], {}
    present = next((ms for (_, launch, _), ms in best if not launch), 0.0)
    for (backend, launch, options), ms in best:
        if backend == "cupy" and not lines:
            rows, warps = options["rows"], options["warps"]
            lines.append(f"# CuPy, {tail.height} pixels: {ms:.4f} ms\nrows=({rows},), warps={warps}")
        if backend == "triton" and launch not in changed and ms < present:
            changed[launch] = {**getattr(blocks_for(tail), launch), **options}
    blocks = replace(blocks_for(tail), **changed)
    before, after = in_turns([partial(batch_tail_triton, tail, blocks=x) for x in (None, blocks)], clock, rounds)
    now, new = before["median"], after["median"]
    return [*lines, f"# Triton, {tail.height} pixels: {new:.4f} ms, {now:.4f} with the present blocks\n{blocks}"]


def bench_tune(settings: Annotated[Settings, tyro.conf.arg(name="")]) -> dict[str, Any]:
    """Time the batch tail with other blocks, for each size; the present choice is the row without options."""
    if not settings.device.startswith("cuda") or not torch.cuda.is_available():
        raise ValueError(f"device must be a CUDA device that torch sees, got {settings.device!r}")
    from fastmoll.kernels.batch_tail_triton_bytes import takes_bytes

    clock = Clock(torch.device("cuda"))
    tried = {size: [("triton", "", {}), *candidates(takes_bytes(make_tail(size, 16)))] for size in settings.sizes}
    with ProcessPoolExecutor(settings.workers, multiprocessing.get_context("spawn")) as pool:
        jobs = [[pool.submit(_compile, size, *one) for one in tried[size]] for size in settings.sizes]
        # All of them before the first is timed: compiling takes the processors, and its trial runs the card.
        wrong = [[job.result() for job in of_size] for of_size in jobs]
    rows: list[dict[str, Any]] = []
    sources: list[str] = []
    for size, errors in zip(settings.sizes, wrong, strict=True):
        tail = make_tail(size, max(16, math.ceil(settings.pixels / size**2 / 16) * 16))
        sides = [(one, runner(tail, *one)) for one, error in zip(tried[size], errors, strict=True) if not error]
        times = in_turns([run for _, run in sides], clock, settings.rounds)
        best = sorted(zip(sides, times, strict=True), key=lambda pair: pair[1]["median"])
        sources += entries(tail, [(one, taken["median"]) for (one, _), taken in best], clock, settings.rounds)
        listed: collections.Counter[str] = collections.Counter()
        for ((backend, launch, options), _), taken in best:
            listed[launch] += 1
            if listed[launch] <= settings.shown:
                rows.append(_row(size, backend, launch, str(options), taken))
        rows += [_row(size, *one, error) for one, error in zip(tried[size], errors, strict=True) if error]
    return {"benchmark": "tune", "settings": asdict(settings), "entries": sources, "rows": rows}


def _row(size: int, backend: str, launch: str, options: Any, milliseconds: Any) -> dict[str, Any]:
    return {"size": size, "backend": backend, "launch": launch, "options": str(options), "ms": milliseconds}
