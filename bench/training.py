"""Training: images a second with the loader and mollification, against the same steps on one resident batch."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import harness
import tyro
from harness import spread

from fastmoll.pipelines.files import scan_folder

Side = Literal["resident", "real, mollified", "decoded by the CPU", "decoded by the engine", "real, clean"]


@dataclass(frozen=True, kw_only=True)
class Settings(harness.Settings):
    """What is timed."""

    data: tyro.conf.Positional[Path]
    """ImageFolder tree."""
    model: str = "resnet50"
    """A torchvision classifier, from random weights."""
    steps: int = 200
    """Steps of a run."""
    rounds: int = 1
    """Runs of each side."""
    compile: bool = True
    """Compile the network."""
    sides: tuple[Side, ...] = ("resident", "real, mollified", "real, clean")
    """What is run, in turns; the first run compiles for those after it."""


_OPTIONS: Final[dict[Side, tuple[str, ...]]] = {
    "resident": ("--resident",),
    "real, mollified": (),
    "decoded by the CPU": ("--data.decoder", "cpu"),
    "decoded by the engine": ("--data.hw-decoder-load", "1"),
    "real, clean": ("--mollify.no-enabled",),
}


def _one_long_epoch(data: Path, folder: Path, images: int) -> None:
    """A tree with at least ``images`` training files, links to those of ``data``, and one a class for validation.

    Within one epoch no step is slowed by what comes at an epoch's end, and none is given a batch prepared meanwhile.
    """
    found = scan_folder(data, "train")
    for copy in range(math.ceil(images / len(found))):
        for sample, path in enumerate(found.paths):
            for split in ("train", "val") if copy == 0 else ("train",):
                target = folder / split / found.classes[found.targets[sample]] / f"{copy}-{sample}{Path(path).suffix}"
                if split == "val" and target.parent.exists():
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(found.path(sample))


def _run(settings: Settings, data: Path, *extra: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as output:
        command = [
            *(sys.executable, str(Path(__file__).parent.parent / "train" / "imagenet.py"), str(data)),
            *("--model.name", settings.model, "--model.weights", "None", "--run.device", settings.device),
            *("--data.batch-size", str(settings.batch_size), "--data.size", str(settings.size)),
            *("--run.max-steps", str(settings.steps), "--run.output", output),
            *("--run.checkpoint-every", str(10 * settings.steps), "--run.log-every", str(max(1, settings.steps // 5))),
            *("--run.validate-every", "0", "--compile" if settings.compile else "--no-compile", *extra),
        ]
        start = time.perf_counter()
        # Its own messages stay visible: what is stopped by a time limit has then said how far it came.
        done = subprocess.run(command, stdout=sys.stderr, check=False)
        if done.returncode != 0:
            raise ValueError(f"{' '.join(command)}\nended with {done.returncode}")
        seconds = time.perf_counter() - start
        lines = [json.loads(line) for line in (Path(output) / "log.jsonl").read_text().splitlines()]
    timed = [line for line in lines if line["kind"] == "train"][1:]  # the first interval compiles and warms up
    if not timed:
        raise ValueError(f"steps={settings.steps} are too few: only one interval was logged")
    figures = {name: spread([line[name] for line in timed]) for name in ("images_per_second", "data_wait")}
    return {**figures, "seconds": seconds}


def bench_train(settings: Annotated[Settings, tyro.conf.arg(name="")]) -> dict[str, Any]:
    """Steps on real, mollified batches, on real clean ones, and on one batch that stays on the device."""
    runs: dict[Side, list[dict[str, Any]]] = {name: [] for name in settings.sides}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        _one_long_epoch(settings.data, Path(folder), (settings.steps + 5) * settings.batch_size)
        for _ in range(settings.rounds):
            for name in settings.sides:
                try:
                    runs[name].append(_run(settings, Path(folder), *_OPTIONS[name]))
                except ValueError as error:  # the others' figures must not be lost with it
                    failed[name] = str(error)
    rows: list[dict[str, Any]] = []
    if failed and not any(runs.values()):
        raise ValueError("; ".join(failed.values()))
    for name, results in runs.items():
        if not results:
            continue
        rows.append(
            {
                "batches": name,
                "images/s": spread([r["images_per_second"]["median"] for r in results]),
                "share waiting for data": spread([r["data_wait"]["median"] for r in results]),
                "seconds a run": spread([r["seconds"] for r in results]),
            }
        )
    for row in rows:
        row["against " + rows[0]["batches"]] = row["images/s"]["median"] / rows[0]["images/s"]["median"]
    return {
        "benchmark": "train",
        "settings": {**asdict(settings), "data": settings.data.name},
        "failed": failed,
        "rows": rows,
    }
