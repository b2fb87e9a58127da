"""Loading: `ImageNetLoader` against a torchvision ``DataLoader`` on the same files, in turns, from one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import harness
import torch
import tyro
from harness import spread
from peers import Authors
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from fastmoll import ImageNetLoader, Mollify
from fastmoll.pipelines import MEAN, STD
from fastmoll.pipelines.files import scan_folder, split_folder

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings(harness.Settings):
    """What is timed."""

    data: tyro.conf.Positional[Path]
    """ImageFolder tree."""
    batch_size: int = 64
    """Images a batch."""
    rounds: int = 7
    """Turns of each side."""
    batches: int = 6
    """Timed batches a turn, after the batches that were prepared ahead."""
    workers: int = len(os.sched_getaffinity(0))
    """Threads of DALI and of torch, worker processes of the DataLoader."""
    device: str = "cpu"
    """Where fastmoll decodes and delivers; the DataLoader's batches are copied there."""


class Side:
    """One way to get batches, endless, with the CPU time of all processes that work for it.

    Args:
        name: how it is called.
        job: what it does; the sides of a job are compared.
        batches: of its loader; sides can share them.
        ahead: batches that its loader prepares while others have their turns.
        workers: gives the ids of its processes beside this one.
        last: what is done to a batch on the device.
    """

    def __init__(
        self,
        name: str,
        job: str,
        batches: Iterator[Batch],
        ahead: int,
        workers: Callable[[], list[int]] = list,
        last: Callable[[Tensor, Tensor], Batch] = lambda images, labels: (images, labels),
    ) -> None:
        self.name, self.job = name, job
        self.batches = batches
        self.ahead = ahead
        self.workers = workers
        self.last = last
        self.rates: list[float] = []
        self.cpu: list[float] = []

    def turn(self, batches: int, device: torch.device) -> Batch:
        """Time some batches; gives the last. What was prepared during other sides' turns is taken first, untimed."""
        for _ in range(self.ahead):
            batch = self._next(device)
        start, cpu, images = time.perf_counter(), self._cpu_seconds(), 0
        for _ in range(batches):
            batch = self._next(device)
            images += len(batch[0])
        if device.type == "cuda":
            torch.cuda.synchronize()
        self.rates.append(images / (time.perf_counter() - start))
        self.cpu.append(1e3 * (self._cpu_seconds() - cpu) / images)
        return batch

    def _next(self, device: torch.device) -> Batch:
        images, labels = next(self.batches)
        return self.last(images.to(device, non_blocking=True), labels.to(device, non_blocking=True))

    def _cpu_seconds(self) -> float:
        total = time.process_time()
        for pid in self.workers():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return total


def torchvision_loader(settings: Settings, split: str, transform: list[Any], shuffle: bool) -> DataLoader[Any]:
    """Standardised batches of a split's files, read by Pillow, each put through ``transform``."""
    tail = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    dataset = ImageFolder(str(split_folder(settings.data, split)), v2.Compose([*transform, *tail]))
    return DataLoader(
        dataset,
        settings.batch_size,
        shuffle=shuffle,
        drop_last=shuffle,
        num_workers=settings.workers,
        persistent_workers=settings.workers > 0,
        pin_memory=settings.device != "cpu",
    )


def agree(settings: Settings) -> float:
    """Mean difference in grey levels of the evaluation batches; more than one is an error, and nothing is timed."""
    resize = round(settings.size * 256 / 224)
    theirs = torchvision_loader(
        settings, "val", [v2.Resize(resize, antialias=True), v2.CenterCrop(settings.size)], False
    )
    with ImageNetLoader(settings.data, "val", settings.batch_size, settings.size, device=settings.device) as ours:
        (left, labels), (right, expected) = next(iter(ours)), next(iter(theirs))
    difference = float(((left.cpu() - right).abs() * 255 * torch.tensor(STD).view(3, 1, 1)).mean())
    if not difference <= 1 or not torch.equal(labels.cpu(), expected):
        raise ValueError(f"the loaders disagree: {difference} grey levels on average, labels {labels} and {expected}")
    return difference


def endless(loader: Any) -> Iterator[Batch]:
    """The batches of epoch after epoch."""
    while True:
        yield from loader


def bench_loader(settings: Annotated[Settings, tyro.conf.arg(name="")]) -> dict[str, Any]:
    """Crops of JPEGs, standardised, without and with mollification: images a second and CPU milliseconds an image."""
    difference = agree(settings)
    torch.set_num_threads(settings.workers)
    device = torch.device(settings.device)
    classes = len(scan_folder(settings.data, "train").classes)
    ours = [
        ImageNetLoader(
            settings.data,
            "train",
            settings.batch_size,
            settings.size,
            mollify=mollify,
            device=device,
            num_threads=settings.workers,
        )
        for mollify in (None, Mollify(classes))
    ]
    crop = v2.RandomResizedCrop(settings.size, antialias=True)
    theirs = torchvision_loader(settings, "train", [crop, v2.RandomHorizontalFlip()], True)
    shared, ahead = endless(theirs), 2 * settings.workers + 1
    authors = Authors(settings.size, classes, device)

    def workers() -> list[int]:
        return [worker.pid for worker in getattr(theirs._iterator, "_workers", [])]

    sides = [
        Side("fastmoll", "crops", endless(ours[0]), 3),
        Side("torchvision DataLoader", "crops", shared, ahead, workers),
        Side("fastmoll", "crops, mollified, soft labels", endless(ours[1]), 3),
        Side(
            "torchvision DataLoader, the authors' way", "crops, mollified, soft labels", shared, ahead, workers, authors
        ),
    ]
    for side in sides:  # start-up: pipelines, workers, compilers, page cache
        labels = side.turn(len(ours[0]), device)[1]
        if "soft labels" in side.job:
            torch.testing.assert_close(labels.sum(1), torch.ones_like(labels[:, 0]))
        side.rates, side.cpu = [], []
    for _ in range(settings.rounds):
        for side in sides:
            side.turn(settings.batches, device)
    for loader in ours:
        loader.close()
    rows = []
    for side in sides:
        peer = spread(next(other.cpu for other in reversed(sides) if other.job == side.job))["median"]
        cpu = spread(side.cpu)
        rows.append(
            {
                "job": side.job,
                "side": side.name,
                "images/s": spread(side.rates),
                "CPU ms/image": cpu,
                "times less CPU": peer / cpu["median"],
            }
        )
    return {
        "benchmark": "loader",
        "settings": {**asdict(settings), "data": settings.data.name},
        "grey_levels_apart": difference,
        "rows": rows,
    }
