"""The work of an evaluation: cell after cell through the network, or again from the predictions that were saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from torch import Tensor, nn
from tqdm import tqdm

from fastmoll.distributed import Process
from fastmoll.metrics import ClassificationMetrics
from fastmoll.output import bar, say
from fastmoll.pipelines.errors import some
from fastmoll.robustness.predictions import (
    Recorder,
    gather_predictions,
    has_predictions,
    read_predictions,
    write_predictions,
)
from fastmoll.robustness.results import ALL, Cell, Results, cell_name
from fastmoll.scoring import check_count, figures, score

_MUCH: Final = 10**9  # bytes; they take seconds to read, over a network minutes


class CellLoader(Protocol):
    """A loader of the images of a cell."""

    num_samples: int

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]: ...


def measure(
    process: Process,
    model: nn.Module,
    results: Results,
    cells: Sequence[Cell],
    open_loader: Callable[[Cell], CellLoader],
    *,
    num_classes: int,
    precision: str = "off",
    channels_last: bool = False,
    predictions: bool = False,
) -> None:
    """Do the cells that are not done yet; each is on the disk before the next one begins.

    Args:
        process: This process; rank 0 writes.
        model: The network, equal on all processes.
        results: Where the figures go, begun.
        cells: Those wanted.
        open_loader: Gives the loader of a cell, this process's share of it.
        num_classes: Number of classes.
        precision: As for `fastmoll.evaluate`.
        channels_last: Likewise.
        predictions: Save the predictions, too; a cell without them, or with a damaged file, isn't done then.

    Raises:
        Stop: on all processes, for an error on one of them.
    """
    with process.agree():
        if process.main and predictions:
            size = sum(path.stat().st_size for path in map(results.predictions, cells) if path.exists())
            if size > _MUCH:
                say(process, f"reading {size / 1e9:.1f} GB of predictions, to see whether they are whole")
        width = num_classes if predictions else None
        todo = [cell for cell in cells if not _is_done(results, cell, width)] if process.main else []
        if process.main and predictions:
            (results.out / "predictions").mkdir(exist_ok=True)
    todo = process.gather(todo)[0]
    if len(todo) < len(cells):
        say(process, f"{len(cells) - len(todo)} of {len(cells)} cells are done already in {results.out}")
    if not todo:
        return
    with process.agree():
        batches = len(todo) * len(open_loader(todo[0]))
    with bar(range(0), process, "evaluation", batches) as progress:
        for cell in todo:
            progress.set_description(cell_name(cell))
            recorder = Recorder() if predictions else None
            metrics = ClassificationMetrics().to(process.device)
            with process.agree():
                loader = open_loader(cell)
                score(
                    model,
                    _moving(loader, progress),
                    metrics,
                    num_classes=num_classes,
                    precision=precision,
                    channels_last=channels_last,
                    on_batch=recorder,
                )
            found = figures(metrics)
            parts = gather_predictions(process, recorder.take()) if recorder else []
            with process.agree():
                check_count(found["count"], loader.num_samples)
                if process.main:
                    if recorder:
                        write_predictions(results.predictions(cell), parts, results.evaluation, cell_name(cell))
                    results.write(cell, found)
            line = f"error {found['error']:.2f} %, NLL {found['nll']:.4f}, ECE {found['ece']:.4f}"
            say(process, f"{cell_name(cell)}{'' if cell is None else ', ' + results.header['source']}: {line}")


def rescore(process: Process, results: Results) -> None:
    """Compute the figures of every cell again, from its predictions, in this process alone.

    Raises:
        ValueError: there are none of a cell that is done, they are damaged, or of another evaluation or cell.
        ImportError: pyarrow is missing.
    """
    saved = [cell for cell in ALL if results.predictions(cell).exists()]
    lacking = [cell_name(cell) for cell in ALL if cell not in saved and results.read(cell) is not None]
    if lacking or not saved:
        names = f" of {some(lacking)}" if lacking else ""
        raise ValueError(f"{results.out} has no predictions{names}: evaluate with --predictions first")
    (results.out / "cells").mkdir(exist_ok=True)
    with bar(saved, process, "scoring", len(saved)) as cells:
        for cell in cells:
            metrics = ClassificationMetrics(sync_on_compute=False)
            path = results.predictions(cell)
            try:
                for part in read_predictions(path, results.evaluation, cell_name(cell)):
                    metrics.update(part.logits, part.labels, part.ids)
                found, count = figures(metrics), results.header["count"]
                if found["count"] != count:
                    raise ValueError(f"{path} is damaged: it has {found['count']} rows of {count}")
            except (ValueError, RuntimeError) as error:
                where = "" if str(path) in str(error) else f"{path}: "
                raise ValueError(f"{where}{error}") from error
            results.write(cell, found)


def _moving(loader: CellLoader, progress: tqdm[int]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for batch in loader:
        yield batch
        progress.update()


def _is_done(results: Results, cell: Cell, num_classes: int | None) -> bool:
    """Whether a cell has its figures and, unless ``num_classes`` is None, its predictions of so many classes."""
    if results.read(cell) is None:
        return False
    if num_classes is None:
        return True
    path, count = results.predictions(cell), results.header["count"]
    return has_predictions(path, results.evaluation, cell_name(cell), count, num_classes)
