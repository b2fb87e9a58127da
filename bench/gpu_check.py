"""The whole validation of the project on one card, in under nine minutes: ``python bench/gpu_check.py [DATA]``.

Tests marked ``gpu``, kernels against the copy, the loader alone, training on real against resident batches. Each part
has a time limit of its own, and one that fails does not stop the others. Without DATA, JPEGs of ImageNet's usual size
are made up; decoding those costs about the same, but say so beside the figures.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from harness import environment, table
from PIL import Image

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Part:
    """One command with its time limit, in seconds."""

    name: str
    command: tuple[str, ...]
    limit: float


def made_up_photos(folder: Path, count: int) -> Path:
    """An ImageFolder tree of 500×375 JPEGs of about 110 kB: smooth shapes with a little grain."""
    rng = np.random.default_rng(0)
    for i in range(count):
        place = folder / f"class{i % 10}"
        place.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8)).resize(
            (500, 375), Image.Resampling.BICUBIC
        )
        pixels = np.asarray(coarse, np.float32) + rng.normal(0, 14, (375, 500, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place / f"{i:05}.JPEG", quality=90)
    return folder


def run(part: Part, log: Path) -> tuple[str, float]:
    """Run a part, its output into ``log``; returns how it ended and its seconds."""
    start = time.perf_counter()
    with open(log, "w") as file:
        child = subprocess.Popen(part.command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            ended = f"exit {child.wait(part.limit)}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {part.limit:.0f} s"
            os.killpg(child.pid, signal.SIGKILL)  # its children hold the card too
            child.wait()
    return ended, time.perf_counter() - start


def main(data: tyro.conf.Positional[Path | None] = None, out: Path = HERE / "results", device: str = "cuda") -> int:
    """Check the project on this machine's card.

    Args:
        data: ImageFolder tree of real JPEGs.
        out: Folder for a log of each part and ``gpu_check.json``.
        device: cuda; cpu tries the script out on a machine without a card.

    Returns:
        The exit code: 0 if every part ended well.
    """
    if device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("error: device is 'cuda', but torch sees no CUDA device\n")
        return 2
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        photos = data or made_up_photos(Path(place), 2000 if device == "cuda" else 64)
        small = ("--batch-size", "8", "--size", "32") if device == "cpu" else ()
        bench = (sys.executable, str(HERE / "run.py"))
        cpus = str(len(os.sched_getaffinity(0)))
        rounds = ("--rounds", "2", "--batches", "2") if device == "cpu" else ()
        steps = ("--steps", "5", "--no-compile", "--model", "resnet18") if device == "cpu" else ("--steps", "150")
        parts = [
            Part("tests", (sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(HERE.parent / "tests")), 150),
            Part("kernels", (*bench, "kernels", "--device", device, *small), 100),
            Part("loader", (*bench, "loader", str(photos), "--device", device, "--workers", cpus, *small, *rounds), 90),
            Part("train", (*bench, "train", str(photos), "--device", device, *small, *steps), 190),
        ]
        rows = []
        for part in parts:
            log = out / f"gpu_check-{part.name}.log"
            ended, seconds = run(part, log)
            rows.append({"part": part.name, "ended": ended, "seconds": seconds})
            sys.stdout.write(f"== {part.name}: {ended}, {seconds:.0f} s\n{log.read_text()[-4000:]}\n")
            sys.stdout.flush()
    result = {"environment": environment(device), "photos": "given" if data else "made up", "parts": rows}
    (out / "gpu_check.json").write_text(json.dumps(result, indent=2) + "\n")
    sys.stdout.write(table(rows) + "\n")
    return 0 if all(row["ended"] == "exit 0" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
