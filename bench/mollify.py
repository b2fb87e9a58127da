"""Mollification of a batch in memory: fastmoll against the way of the paper's code and others, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import harness
import torch
import tyro
from harness import spread
from peers import DenseDCT
from torch import Tensor

from fastmoll.kernels import recycled
from fastmoll.kernels.cosine_noise import cosine_noise
from fastmoll.kernels.draw import BLUR, NOISE, draw
from fastmoll.kernels.heat_blur import heat_blur
from fastmoll.kernels.mollify_cpu import mollify_cpu

# OpenMP's threads spin for a while after their last work, on the cores of whoever comes next.
_SETTLE_SECONDS = 0.005


@dataclass(frozen=True, kw_only=True)
class Settings(harness.Settings):
    """What is timed."""

    batch_size: int = 64
    """Images a batch, a third of each role."""
    rounds: int = 25
    """Turns of each side."""
    threads: int = 2
    """Threads of torch."""
    compile: bool = True
    """Time the dense transforms under torch.compile, too: on a CPU this takes a C++ compiler."""
    device: str = "cpu"
    """Only the CPU path is timed here."""


def _gathered(x: Tensor, role: Tensor, t: Tensor, index: Tensor) -> Tensor:
    """The reference operations, each on its own images."""
    out = x.clone()
    for one in (NOISE, BLUR):
        rows = (role == one).nonzero().squeeze(1)
        out[rows] = heat_blur(x[rows], t[rows]) if one == BLUR else cosine_noise(x[rows], t[rows], index=index[rows])
    return out


def _check(name: str, result: Tensor, expected: Tensor, rows: Tensor) -> float:
    """Largest difference on some images; more than 1e-4 is an error, and nothing is timed."""
    difference = float((result.double() - expected)[rows].abs().max())
    if not difference <= 1e-4:
        raise ValueError(f"{name} is off by {difference}")
    return difference


def bench_mollify(settings: Annotated[Settings, tyro.conf.arg(name="")]) -> dict[str, Any]:
    """Noise and blur of a float32 batch on the CPU: milliseconds of time and of CPU, and ratios of their medians."""
    if settings.device != "cpu":
        raise ValueError(f"device must be 'cpu', got {settings.device!r}")
    torch.set_num_threads(settings.threads)
    batch, size = settings.batch_size, settings.size
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, size, size, generator=generator)
    role = (torch.arange(batch) % 3).to(torch.int8)[torch.randperm(batch, generator=generator)]
    index = torch.arange(batch)
    _, t = draw(index, roles=(0, 1, 0))
    t = torch.where(role == 0, 0.0, t)

    theirs = DenseDCT(size, images.device)
    changed, target = images.clone(), torch.empty_like(images)

    def into_new_memory() -> Tensor:
        recycled.forget()
        return mollify_cpu(images, role, t, index=index)

    sides: dict[str, Callable[[], Tensor]] = {
        "dense DCT, masks, randn (in place)": lambda: theirs(changed, role, t),
        "fastmoll in place": lambda: mollify_cpu(changed, role, t, index=index, out=changed),
        "fastmoll into a buffer": lambda: mollify_cpu(images, role, t, index=index, out=target),
        "fastmoll, a new tensor each": lambda: mollify_cpu(images, role, t, index=index),
        "fastmoll into new memory": into_new_memory,
        "reference": lambda: _gathered(images, role, t, index),
        "copy into a buffer": lambda: target.copy_(images),
        "copy into new memory": images.clone,
    }
    if settings.compile:
        compiled = DenseDCT(size, images.device, compiled=True)
        sides["dense DCT, masks, torch.compile"] = lambda: compiled(changed, role, t)

    expected = _gathered(images.double(), role, t, index)
    everything, noise = torch.arange(batch), role == NOISE
    apart = {}
    for name, side in sides.items():  # also compiles, and warms the caches up
        changed.copy_(images)
        if not name.startswith("copy"):
            # Their noise is another draw of the same distribution.
            rows = everything[~noise] if name.startswith("dense") else everything
            apart[name] = _check(name, side(), expected, rows)

    wall: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(settings.rounds):
        for name, side in sides.items():
            changed.copy_(images)
            time.sleep(_SETTLE_SECONDS)
            start, used = time.perf_counter(), time.process_time()
            side()
            cpu[name].append(1e3 * (time.process_time() - used))
            wall[name].append(1e3 * (time.perf_counter() - start))

    first = next(iter(sides))
    rows = []
    for name in sides:
        time_ms, cpu_ms = spread(wall[name]), spread(cpu[name])
        rows.append(
            {
                "side": name,
                "ms": time_ms,
                "CPU ms": cpu_ms,
                "GB/s": 2 * images.nbytes / time_ms["median"] / 1e6,
                "times faster": spread(wall[first])["median"] / time_ms["median"],
                "times less CPU": spread(cpu[first])["median"] / cpu_ms["median"],
            }
        )
    return {"benchmark": "mollify", "settings": asdict(settings), "largest_difference": apart, "rows": rows}
