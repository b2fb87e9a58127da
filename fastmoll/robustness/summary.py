"""One short table of the evaluations of several runs."""

from __future__ import annotations

import itertools
import statistics
import textwrap
from collections.abc import Iterable, Mapping
from typing import Final

from fastmoll.kernels.corruption_constants import SEVERITIES
from fastmoll.report.runs import BINARY, label_images
from fastmoll.robustness.results import ALL, Results

_HEADS: Final = ("clean, %", "corrupted, %", "NLL", "ECE")
_NARROWEST: Final = 8  # letters of a name in a line


def summary(runs: Mapping[str, Results | None], width: int | None) -> str:
    """A line for each run: its error on clean images, and error, NLL and ECE on corrupted ones.

    Args:
        runs: Evaluations by the names of their runs; None for one that failed.
        width: Letters that a line may have, for which what all names begin with is said once, and names that are still
            too long are broken into several lines; None: any number.

    Raises:
        ValueError: a cell is of another evaluation.
    """
    figures = {name: _figures(results) for name, results in runs.items()}
    counts = {count for _, count, _ in figures.values() if count is not None}
    heads = _HEADS if counts <= {len(ALL) - 1} else (*_HEADS, "cells")
    taken = sum(2 + max(7, len(head)) for head in heads)
    most = max(map(len, runs)) if width is None else max(_NARROWEST, width - taken)
    common = _common(runs) if most < max(map(len, runs)) else ""
    rows: list[tuple[str, tuple[str, ...]]] = [("run", heads)]
    for name, (cells, count, _) in figures.items():
        rows.append((name.removeprefix(common), (*cells, "–" if count is None else str(count))[: len(heads)]))
    room = min(most, max(len(name) for name, _ in rows))
    lines = []
    for name, cells in rows:
        first, *more = textwrap.wrap(name, room) or [""]
        lines += [first.ljust(room) + "".join(f"  {x:>{max(7, len(y))}}" for x, y in zip(cells, heads, strict=True))]
        lines += more
    images = {images for *_, images in figures.values() if images}
    line = "─" * (room + taken)
    where = f" images {images.pop()}" if len(images) == 1 else " images"
    notes = [f"Names begin with {common}"] if common else []
    notes.append(f"Corrupted{where}: means over their cells. Error, NLL and ECE: lower is better.")
    notes += [BINARY] * any(results is not None and results.is_binary for results in runs.values())
    notes = [part for note in notes for part in textwrap.wrap(note, width or len(note))]
    return "\n".join([line, lines[0], line, *lines[1:], line, *notes])


def _common(names: Iterable[str]) -> str:
    """The parts, joined by hyphens, that all names begin with and none ends with."""
    columns = zip(*(name.split("-")[:-1] for name in names), strict=False)
    return "".join(f"{column[0]}-" for column in itertools.takewhile(lambda column: len({*column}) == 1, columns))


def _figures(results: Results | None) -> tuple[tuple[str, ...], int | None, str]:
    """The cells of a line, the number of corrupted cells that they are means of, and what images these have."""
    if results is None:
        return ("–",) * len(_HEADS), None, ""
    clean = results.read(None)
    done = {cell: found for cell in ALL[1:] if (found := results.read(cell)) is not None}
    means = [
        f"{statistics.fmean(found[metric] for found in done.values()):.{digits}f}" if done else "–"
        for metric, digits in (("error", 2), ("nll", 4), ("ece", 4))
    ]
    has_frost = any(("frost", severity) in done for severity in SEVERITIES)
    images = label_images(results.header["source"], results.header["frost"] if has_frost else None)
    return ("–" if clean is None else f"{clean['error']:.2f}", *means), len(done), images
