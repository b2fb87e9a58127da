"""What a run reports: speed and data-wait, the log files, the final table."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastmoll.distributed import Process
from fastmoll.kernels.soft_labels import SoftLabels
from fastmoll.output import replacing


class Meter:
    """Hands out batches, and knows how fast they went and how much of the time was spent waiting for them.

    On the CPU the wait is the time inside ``next(loader)``. On a GPU that time says little, since the host runs ahead;
    there it is the time on the GPU's stream between the end of a step and the arrival of the next batch (its copies and
    its mollification included), from events that are read only when the meter is.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._cuda = process.device.type == "cuda"
        self._batches: Iterator[tuple[Any, ...]] = iter(())
        self._speeds: list[float] = []
        self._waits: list[float] = []
        self._reset()

    def _reset(self) -> None:
        self._loss = torch.zeros((), device=self._process.device)
        self._norm = torch.zeros((), device=self._process.device)
        self._forward_passes = self._images = self._clipped = 0
        self._waited = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._before: torch.cuda.Event | None = None
        self._start = time.perf_counter()

    def begin(self, batches: Iterable[tuple[Any, ...]]) -> None:
        """Start an epoch: forget what was measured before, time the first batch too."""
        self._reset()
        self._batches = iter(batches)
        if self._cuda:
            self._before = _event()

    def next_batch(self) -> tuple[Tensor, Tensor | SoftLabels]:
        """The loader's next batch."""
        start = time.perf_counter()
        images, targets = next(self._batches)
        self._waited += time.perf_counter() - start
        if self._before is not None:
            self._events.append((self._before, _event()))
            self._before = None
        return images, targets

    def add(self, loss: Tensor, images: int) -> None:
        """Count a forward pass: its mean loss (kept on the device) and this process's images."""
        self._loss += loss
        self._forward_passes += 1
        self._images += images
        if self._cuda:
            self._before = _event()

    def end_step(self, norm: Tensor | None) -> None:
        """Mark the end of a step: what the GPU does until the next batch is there is waiting.

        Args:
            norm: Norm of the step's gradient before it was clipped, the same on all processes (kept on the device).
        """
        if norm is not None:
            self._norm += norm
            self._clipped += 1
        if self._cuda:
            self._before = _event()

    def read(self) -> dict[str, float]:
        """Loss, images/s over all processes and share of time waited, since the last reading; waits for the device.

        The loss is the mean over all processes, the wait that of the process that waited longest. Where gradients are
        clipped, there is the mean of their norms as well.
        """
        loss = float(self._process.sum(self._loss / self._forward_passes)) / self._process.world_size
        seconds = time.perf_counter() - self._start
        if self._cuda:
            self._waited = sum(before.elapsed_time(after) for before, after in self._events) / 1000
        waits = self._process.gather(self._waited)
        images = self._images * self._process.world_size
        self._speeds.append(images / seconds)
        self._waits.append(min(max(waits) / seconds, 1.0))
        norm = {"gradient_norm": float(self._norm / self._clipped)} if self._clipped else {}
        self._reset()
        if self._cuda:
            self._before = _event()
        return {
            "loss": loss,
            "images_per_second": images / seconds,
            "data_wait": self._waits[-1],
            "seconds": seconds,
            **norm,
        }

    def typical(self) -> dict[str, float | None]:
        """Medians of images/s and data-wait over the readings, without the first (start-up) where there are more."""
        speeds, waits = self._speeds[1:] or self._speeds, self._waits[1:] or self._waits
        return {
            "images_per_second": statistics.median(speeds) if speeds else None,
            "data_wait": statistics.median(waits) if waits else None,
        }


class Log:
    """``log.jsonl`` and TensorBoard in the output folder; on processes other than rank 0 it does nothing."""

    def __init__(self, output: Path, process: Process, step: int) -> None:
        """Open the logs, and drop what a killed run wrote after ``step``.

        Args:
            output: Folder of the run.
            process: This process.
            step: Steps done: 0, or those of the checkpoint that the run goes on from.
        """
        self._file, self._output = None, output
        if not process.main:
            return
        from torch.utils.tensorboard import SummaryWriter

        path = output / "log.jsonl"
        kept = [line for line in _lines(path) if line["step"] <= step and step]
        # A validation at this very step comes again: a checkpoint is written before it.
        kept = [line for line in kept if line["step"] < step or line["kind"] != "validation"]
        with replacing(path) as file:
            file.write("".join(json.dumps(line) + "\n" for line in kept).encode())
        self._file = open(path, "a", encoding="utf-8", buffering=1)
        self._board = SummaryWriter(str(output / "tensorboard"), purge_step=step or None)
        for line in kept:
            if line["step"] == step:
                self._draw(line)  # purged with what came after it

    def write(self, kind: str, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        """Add a line: ``kind`` is train or validation."""
        if self._file is None:
            return
        line = {"kind": kind, "step": step, "epoch": epoch, **values}
        with self._named():
            self._file.write(json.dumps(line) + "\n")
            self._draw(line)

    def _draw(self, line: Mapping[str, Any]) -> None:
        for name, value in line.items():
            if name not in ("kind", "step", "epoch", "count", "seconds") and isinstance(value, int | float):
                self._board.add_scalar(f"{line['kind']}/{name}", value, line["step"])

    def close(self) -> None:
        """Flush and close both."""
        if self._file is not None:
            with self._named():
                self._file.close()
                self._board.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name what can't be written, which neither a file nor TensorBoard's thread does."""
        try:
            yield
        except OSError as error:
            raise OSError(f"{self._output}: the logs can't be written: {error.strerror or error}") from error


def results_in_words(results: Mapping[str, float]) -> str:
    """Results in one line."""
    return f"error {results['error']:.2%}, NLL {results['nll']:.4f}, ECE {results['ece']:.4f}"


def table(title: str, results: Mapping[str, float]) -> str:
    """Results as a table for reading."""
    rows = [
        ("error", f"{results['error']:.2%}"),
        ("NLL", f"{results['nll']:.4f}"),
        ("ECE (15 bins)", f"{results['ece']:.4f}"),
        ("images", f"{results['count']:.0f}"),
    ]
    width = max(len(title), 28)
    return "\n".join([title, "─" * width, *(f"{name:<16}{value:>{width - 16}}" for name, value in rows), "─" * width])


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for text in path.read_bytes().splitlines():
            try:
                line = json.loads(text)
            except ValueError:  # the kill came in the middle of this line
                continue
            if isinstance(line, dict) and isinstance(line.get("step"), int) and "kind" in line:
                yield line
