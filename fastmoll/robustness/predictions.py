"""Predictions on disk: the logits of a set, as Parquet, from which all figures can be computed again."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fastmoll.distributed import Process
from fastmoll.output import replacing

_ROWS: Final = 8192  # of a group that is read and scored at a time
_KEY: Final = b"fastmoll.evaluation"
_CELL_KEY: Final = b"fastmoll.cell"


class Predictions(NamedTuple):
    """What a network said about a set.

    Attributes:
        ids: Sample ids, int64 ``(N,)``.
        labels: Classes, int64 ``(N,)``.
        logits: float32 ``(N, K)``.
    """

    ids: Tensor
    labels: Tensor
    logits: Tensor


class Recorder:
    """Keeps the predictions of one process, batch by batch; an ``on_batch`` of `fastmoll.scoring.score`."""

    def __init__(self) -> None:
        self._batches: list[tuple[Tensor, ...]] = []

    def __call__(self, logits: Tensor, labels: Tensor, index: Tensor | None) -> None:
        """Keep a batch, on the CPU."""
        if index is None:
            raise ValueError("index must be given by the loader for predictions to be saved")
        self._batches.append((index.long().cpu(), labels.cpu(), logits.detach().float().cpu()))

    def take(self) -> Predictions | None:
        """What was kept, which is forgotten; None for nothing."""
        batches, self._batches = self._batches, []
        return Predictions(*(torch.cat(part) for part in zip(*batches, strict=True))) if batches else None


def gather_predictions(process: Process, part: Predictions | None) -> list[Predictions | None]:
    """The parts of all processes, in rank order, on rank 0 alone: of a thousand classes they are large."""
    if not dist.is_initialized():
        return [part]
    parts: list[Predictions | None] = [None] * process.world_size if process.main else []
    dist.gather_object(part, parts if process.main else None)
    return parts


def check_parquet() -> None:
    """Raise ``ImportError`` where pyarrow is missing."""
    _parquet()


def write_predictions(path: Path, parts: Sequence[Predictions | None], evaluation: str, cell: str) -> None:
    """Write the predictions of all processes in one piece, in the order of the sample ids.

    The columns are ``index`` and ``label``, int64, and ``logits``, a list of float32 of fixed length.

    Args:
        path: File to write or replace.
        parts: Those of each process.
        evaluation: What they belong to, kept in the file.
        cell: Name of the images that they are of, likewise.

    Raises:
        ImportError: pyarrow is missing.
        OSError: it can't be written; what was there stays.
    """
    arrow, parquet = _parquet()
    whole = Predictions(*(torch.cat(part) for part in zip(*(x for x in parts if x is not None), strict=True)))
    order = whole.ids.argsort(stable=True)
    index, labels, logits = (part[order].numpy() for part in whole)
    columns = {
        "index": arrow.array(index),
        "label": arrow.array(labels),
        "logits": arrow.FixedSizeListArray.from_arrays(arrow.array(logits.reshape(-1)), logits.shape[1]),
    }
    table = arrow.table(columns).replace_schema_metadata({_KEY: evaluation.encode(), _CELL_KEY: cell.encode()})
    with replacing(path) as file:
        parquet.write_table(table, file, row_group_size=_ROWS, compression="zstd", write_page_checksum=True)


def read_predictions(path: Path, evaluation: str | None = None, cell: str | None = None) -> Any:
    """The predictions of a file, in portions.

    Args:
        path: File that `write_predictions` wrote.
        evaluation: What they must belong to.
        cell: Name of the images that they must be of; a file that doesn't say is taken at its own name.

    Returns:
        An iterator over `Predictions`.

    Raises:
        ImportError: pyarrow is missing.
        ValueError: no such file, one that is damaged, without these columns, of another evaluation, or of
            another cell.
    """
    _check(_open(path), path, evaluation, cell)
    return _portions(path, _parquet()[1])


def has_predictions(path: Path, evaluation: str, cell: str, count: int, num_classes: int) -> bool:
    """Whether a file has the predictions of a cell, undamaged: all of it is read, and its checksums are compared.

    Args:
        path: The file, which may be missing or damaged.
        evaluation: What they must belong to.
        cell: As for `read_predictions`.
        count: Number of samples that there must be.
        num_classes: Number of logits a sample, likewise.

    Raises:
        ImportError: pyarrow is missing.
    """
    try:
        shapes = [tuple(part.logits.shape) for part in read_predictions(path, evaluation, cell)]
    except ValueError:
        return False
    return sum(rows for rows, _ in shapes) == count and {width for _, width in shapes} == {num_classes}


def _open(path: Path) -> Any:
    """The schema of a file, as its footer says it."""
    _, parquet = _parquet()
    try:
        with path.open("rb") as file:  # pyarrow itself opens no path that is not UTF-8
            return parquet.read_metadata(file).schema.to_arrow_schema()
    except FileNotFoundError as error:
        raise ValueError(f"there are no predictions {path}") from error
    except Exception as error:  # pyarrow raises what the damaged bytes make of it, NotImplementedError for example
        raise ValueError(f"{path} is damaged, or no Parquet file") from error


def _check(schema: Any, path: Path, evaluation: str | None, cell: str | None) -> None:
    """Refuse a file that is of something else."""
    kept = schema.metadata or {}
    missing = [name for name in ("index", "label", "logits") if name not in schema.names]
    if missing:
        raise ValueError(f"{path} has no column {', '.join(missing)}")
    if evaluation is not None and kept.get(_KEY) != evaluation.encode():
        raise ValueError(f"{path} is of another evaluation")
    if cell is not None and kept.get(_CELL_KEY, cell.encode()) != cell.encode():  # older files have no cell
        raise ValueError(f"{path} has the predictions of {kept[_CELL_KEY].decode(errors='replace')}, not of {cell}")


def _portions(path: Path, parquet: Any) -> Any:
    try:
        with path.open("rb") as file:
            for rows in parquet.ParquetFile(file, page_checksum_verification=True).iter_batches(_ROWS):
                index, labels = (torch.from_numpy(np.array(rows.column(name))) for name in ("index", "label"))
                logits = rows.column("logits")
                values = np.array(logits.flatten(), dtype=np.float32).reshape(len(rows), -1)
                yield Predictions(index, labels, torch.from_numpy(values))
    except Exception as error:  # as in `_open`, and NumPy's and torch's of columns that are no numbers
        raise ValueError(f"{path} is damaged: {error}") from error


def _parquet() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError("predictions need pyarrow: pip install 'fastmoll[report]'") from error
