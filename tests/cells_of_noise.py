"""A network and random images for the cells of an evaluation, for tests of what is done with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastmoll.distributed import Process
from fastmoll.robustness.measure import measure
from fastmoll.robustness.results import ALL, Cell, Results

CPU = Process(0, 1, torch.device("cpu"))
HEADER: dict[str, Any] = {
    "source": "official",
    "frost": None,
    "data": "noise",
    "size": 2,
    "num_classes": 3,
    "net": "linear",
    "augment": None,
    "mollify": None,
    "seed": None,
    "settings": {},
    "checkpoint": "w.pt",
    "count": 120,
    "baseline": False,
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))


class Loader:
    """Random images, other ones for each cell."""

    num_samples = 120

    def __init__(self, cell: Cell) -> None:
        generator = torch.Generator().manual_seed(ALL.index(cell))
        self.images = torch.randn(120, 3, 2, 2, generator=generator)
        self.labels = torch.randint(3, (120,), generator=generator)

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for rows in torch.arange(120).split(50):
            yield self.images[rows], self.labels[rows], rows


def begun(out: Path, images: dict[str, str] | None = None, of_files: bool = False, **fingerprint: Any) -> Results:
    out.mkdir(exist_ok=True)
    results = Results(out, HEADER, {"checkpoint": "abc", **fingerprint}, {"device": "cpu"}, images, of_files=of_files)
    results.begin()
    return results


def run(results: Results, cells: tuple[Cell, ...] = ALL, opened: list[Cell] | None = None, **options: Any) -> None:
    def open_loader(cell: Cell) -> Loader:
        if opened is not None:
            opened.append(cell)
        return Loader(cell)

    measure(CPU, network(), results, cells, open_loader, num_classes=3, **options)


def write_finished(out: Path) -> Path:
    """An evaluation of all cells, with predictions."""
    results = begun(out)
    run(results, predictions=True)
    assert results.finish() is not None
    return out
