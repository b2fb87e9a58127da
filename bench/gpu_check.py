"""The whole validation of the project on one card, in under nine minutes: ``python bench/gpu_check.py [DATA]``.

Tests marked ``gpu``, kernels against the copy, the loader alone, the sweep over batch sizes and resolutions, training
on real against resident batches; then the goals, met or not. Each part has a time limit of its own, all of them
together have another, and one that fails does not stop the others. Without DATA, JPEGs of ImageNet's usual size are
made up; decoding those costs about the same, but say so beside the figures.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from goals import compare
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

    def make(i: int) -> None:
        rng = np.random.default_rng(i)
        place = folder / f"class{i % 10}"
        place.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8)).resize(
            (500, 375), Image.Resampling.BICUBIC
        )
        pixels = np.asarray(coarse, np.float32) + rng.normal(0, 14, (375, 500, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place / f"{i:05}.JPEG", quality=90)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(make, range(count)))
    return folder


def run(part: Part, log: Path, deadline: float) -> tuple[str, float]:
    """Run a part, its output into ``log``, until ``deadline`` at most; returns how it ended and its seconds."""
    start = time.perf_counter()
    limit = max(0.0, min(part.limit, deadline - start))
    with open(log, "w") as file:
        child = subprocess.Popen(part.command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            ended = f"exit {child.wait(limit)}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {limit:.0f} s"
            os.killpg(child.pid, signal.SIGKILL)  # its children hold the card too
            child.wait()
    return ended, time.perf_counter() - start


def result_of(text: str) -> dict[str, Any]:
    """What a benchmark wrote, by what it said of it; nothing where it ended before."""
    said = re.findall(r"^written to (.+)$", text, re.MULTILINE)
    return dict(json.loads(Path(said[-1]).read_text())) if said else {}


def main(
    data: tyro.conf.Positional[Path | None] = None,
    out: Path | None = None,
    device: str = "cuda",
    seconds: float = 520.0,
) -> int:
    """Check the project on this machine's card.

    Args:
        data: ImageFolder tree of real JPEGs.
        out: Folder for a log of each part, its results, and gpu_check.json: by default bench/results for a
            card's, a temporary one for a CPU's.
        device: cuda; cpu tries the script out on a machine without a card, which no goal is for.
        seconds: limit of all parts together.

    Returns:
        The exit code: 0 if every part ended well.
    """
    if device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("error: device is 'cuda', but torch sees no CUDA device\n")
        return 2
    out = out or (Path(tempfile.mkdtemp(prefix="gpu_check-")) if device == "cpu" else HERE / "results")
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.perf_counter() + seconds
    with tempfile.TemporaryDirectory() as place:
        photos = data or made_up_photos(Path(place), 2000 if device == "cuda" else 64)
        cpus = str(len(os.sched_getaffinity(0)))
        # A machine without a card gets as little work as there can be.
        tiny = device == "cpu"
        small = ("--batch-size", "6", "--size", "32") if tiny else ()
        kernels = ("--no-compile", "--rounds", "2") if tiny else ()
        turns = ("--rounds", "2", "--batches", "2") if tiny else ()
        steps = ("--steps", "5", "--no-compile", "--model", "resnet18") if tiny else ("--steps", "100")
        steps += ("--sides", "resident", "real, mollified", *(() if tiny else ("decoded by the CPU",)))
        # Compiling its kernels is most of a test's time.
        together = ("-n", str(min(8, int(cpus)))) if find_spec("xdist") and not tiny else ()
        points = ("--batches", "6", "--sizes", "32", "--rounds", "2") if tiny else ()

        def bench(name: str, *options: str) -> tuple[str, ...]:
            return (sys.executable, str(HERE / "run.py"), name, *options, "--device", device, "--out", str(out), *small)

        parts = [
            Part(
                "tests", (sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(HERE.parent / "tests"), *together), 150
            ),
            Part("kernels", bench("kernels", *kernels), 130),
            Part("loader", bench("loader", str(photos), "--workers", cpus, *turns), 90),
            Part("sweep", bench("sweep", *points), 80),
            Part("train", bench("train", str(photos), *steps), 220),
        ]
        # Before anything can bring the card down.
        result = {"environment": environment(device), "photos": "given" if data else "made up"}
        rows, found = [], {}
        for part in parts:
            log = out / f"gpu_check-{part.name}.log"
            ended, seconds = run(part, log, deadline)
            text = log.read_text(errors="replace")
            rows.append({"part": part.name, "ended": ended, "seconds": seconds})
            found[part.name] = result_of(text)
            goals = compare(found)
            if tiny:
                goals = [{**goal, "met": "-"} for goal in goals]
            # After each part: whoever stops this script keeps what there is.
            content = json.dumps({**result, "parts": rows, "goals": goals}, indent=2)
            (out / "gpu_check.json").write_text(content + "\n")
            sys.stdout.write(f"== {part.name}: {ended}, {seconds:.0f} s\n{text[-8000:]}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{table(rows)}\n\n{table(goals)}\nwritten to {out}\n")
    return 0 if all(row["ended"] == "exit 0" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
