"""What every benchmark shares: its settings, where it ran, how sides are timed in turns, how rows are printed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_AHEAD_CYCLES = 4_000_000  # about 2 ms in which the host gets ahead of the card, so that launches are not timed
_FLUSH_BYTES = 256 * 2**20  # more than any card's second-level cache
_PACKAGES = (
    *("torch", "torchvision", "triton", "numpy", "scipy", "numba", "kornia", "pillow", "imagecorruptions-imaug"),
    *("nvidia-dali-cuda120", "nvidia-dali-cuda130", "cupy-cuda12x", "cupy-cuda13x"),
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is timed.

    Raises:
        ValueError: a size or count below 1, or a GPU asked for and absent.
    """

    batch_size: int = 256
    """Images a batch."""
    size: int = 224
    """Height and width, pixels."""
    rounds: int = 50
    """Turns of each side."""
    device: str = "cuda"
    """Where: cuda or cpu."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "size", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device must be 'cuda', 'cuda:<n>' or 'cpu', got {self.device!r}")
        if self.device != "cpu" and not torch.cuda.is_available():
            raise ValueError(f"device must be 'cpu' where torch sees no CUDA device, got {self.device!r}")


class Clock:
    """Milliseconds of a call, with a cold cache; by events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.scratch = torch.empty(_FLUSH_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)

    def __call__(self, run: Callable[[], Any]) -> float:
        if self.device.type == "cpu":
            start = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - start)
        self.scratch.zero_()
        torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


def in_turns(runs: Sequence[Callable[[], Any]], clock: Clock, rounds: int) -> list[dict[str, float]]:
    """Time each of ``runs`` once a round, after three untimed rounds: what disturbs the machine disturbs them all."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(-3, rounds):
        for run, taken in zip(runs, times, strict=True):
            milliseconds = clock(run)
            if turn >= 0:
                taken.append(milliseconds)
    return [spread(taken) for taken in times]


def environment(device: str) -> dict[str, Any]:
    """The machine and the software a result belongs to."""

    def output(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
        return done.stdout.strip()

    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    cuda = device.startswith("cuda")
    return {
        "processor": torch.cuda.get_device_name() if cuda else _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else "",
        "python": platform.python_version(),
        "versions": versions,
        "commit": output("git", "describe", "--always", "--dirty"),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest of repeated measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of equal keys as aligned text; a spread is shown as ``median (min-max)``."""

    def show(value: Any) -> str:
        if isinstance(value, dict):
            return f"{value['median']:.3g} ({value['min']:.3g}-{value['max']:.3g})"
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    cells = [list(rows[0]), *([show(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
