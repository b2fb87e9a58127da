"""What every benchmark shares: where it ran, how sides are timed against each other, how rows are printed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def environment(device: str) -> dict[str, Any]:
    """The machine and the software a result belongs to."""

    def output(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
        return done.stdout.strip()

    packages = ["torch", "torchvision", "triton", "nvidia-dali-cuda120", "nvidia-dali-cuda130", "numpy", "pillow"]
    versions = {}
    for package in packages:
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
