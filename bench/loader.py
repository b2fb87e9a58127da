"""Loading: `ImageNetLoader` against a torchvision ``DataLoader`` on the same files, in turns, in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from harness import spread
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from fastmoll import ImageNetLoader
from fastmoll.pipelines import MEAN, STD
from fastmoll.pipelines.files import split_folder


@dataclass(frozen=True)
class Settings:
    """What is timed."""

    data: tyro.conf.Positional[Path]
    """ImageFolder tree."""
    batch_size: int = 64
    """Images a batch."""
    size: int = 224
    """Height and width, pixels."""
    rounds: int = 7
    """Turns of each side."""
    batches: int = 6
    """Timed batches a turn, after the batches that were prepared ahead."""
    workers: int = len(os.sched_getaffinity(0))
    """Threads of DALI, worker processes of the DataLoader."""
    device: str = "cpu"
    """Where fastmoll decodes and delivers; the DataLoader's batches are copied there."""


class Side:
    """One loader, endless, with the CPU time of all processes that work for it."""

    def __init__(
        self, name: str, epochs: Iterator[Iterator[Any]], ahead: int, workers: Callable[[], list[int]]
    ) -> None:
        self.name = name
        self.batches = (batch for epoch in epochs for batch in epoch)
        self.ahead = ahead
        self.workers = workers
        self.rates: list[float] = []
        self.cpu: list[float] = []

    def turn(self, batches: int, device: str) -> None:
        """Time some batches. What was prepared during the other side's turn is taken first, untimed."""
        for _ in range(self.ahead):
            next(self.batches)
        start, cpu, images = time.perf_counter(), self._cpu_seconds(), 0
        for _ in range(batches):
            images += len(next(self.batches)[0].to(device))
        if device != "cpu":
            torch.cuda.synchronize()
        self.rates.append(images / (time.perf_counter() - start))
        self.cpu.append(1e3 * (self._cpu_seconds() - cpu) / images)

    def _cpu_seconds(self) -> float:
        total = time.process_time()
        for pid in self.workers():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return total


def _torchvision(settings: Settings, split: str, transform: list[Any], shuffle: bool) -> DataLoader[Any]:
    tail = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    dataset = ImageFolder(str(split_folder(settings.data, split)), v2.Compose([*transform, *tail]))
    return DataLoader(
        dataset,
        settings.batch_size,
        shuffle=shuffle,
        drop_last=shuffle,
        num_workers=settings.workers,
        persistent_workers=True,
        pin_memory=settings.device != "cpu",
    )


def _agree(settings: Settings) -> float:
    """Mean difference in grey levels of the evaluation batches; more than one is an error, and nothing is timed."""
    resize = round(settings.size * 256 / 224)
    theirs = _torchvision(settings, "val", [v2.Resize(resize, antialias=True), v2.CenterCrop(settings.size)], False)
    with ImageNetLoader(settings.data, "val", settings.batch_size, settings.size, device=settings.device) as ours:
        (left, labels), (right, expected) = next(iter(ours)), next(iter(theirs))
    difference = float(((left.cpu() - right).abs() * 255 * torch.tensor(STD).view(3, 1, 1)).mean())
    if not difference <= 1 or not torch.equal(labels.cpu(), expected):
        raise ValueError(f"the loaders disagree: {difference} grey levels on average, labels {labels} and {expected}")
    return difference


def bench_loader(settings: Annotated[Settings, tyro.conf.arg(name="")]) -> dict[str, Any]:
    """Decode, RandomResizedCrop, flip, standardise: images a second and CPU milliseconds an image."""
    difference = _agree(settings)
    ours = ImageNetLoader(
        settings.data,
        "train",
        settings.batch_size,
        settings.size,
        device=settings.device,
        num_threads=settings.workers,
    )
    crop = v2.RandomResizedCrop(settings.size, antialias=True)
    theirs = _torchvision(settings, "train", [crop, v2.RandomHorizontalFlip()], True)

    def workers() -> list[int]:
        return [worker.pid for worker in getattr(theirs._iterator, "_workers", [])]

    def endless(loader: Any) -> Iterator[Iterator[tuple[Tensor, Tensor]]]:
        while True:
            yield iter(loader)

    sides = [
        Side("fastmoll", endless(ours), 3, list),
        Side("torchvision DataLoader", endless(theirs), 2 * settings.workers + 1, workers),
    ]
    for side in sides:  # start-up: pipelines, workers, page cache
        for _ in range(len(ours)):
            next(side.batches)
    for _ in range(settings.rounds):
        for side in sides:
            side.turn(settings.batches, settings.device)
    ours.close()
    rows = [{"loader": side.name, "images/s": spread(side.rates), "CPU ms/image": spread(side.cpu)} for side in sides]
    for row in rows:
        row["CPU against torchvision"] = row["CPU ms/image"]["median"] / rows[-1]["CPU ms/image"]["median"]
    return {
        "benchmark": "loader",
        "settings": {**asdict(settings), "data": settings.data.name},
        "grey_levels_apart": difference,
        "rows": rows,
    }
