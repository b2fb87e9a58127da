"""The results of a sweep as a table: mean and standard deviation over seeds, next to the paper's numbers."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fastmoll.escape import escape_csv, escape_markdown
from fastmoll.kernels.corruption_constants import CORRUPTIONS
from fastmoll.output import LARGEST_LOSS
from fastmoll.paper import PublishedCell, paper_mollification, published
from fastmoll.pipelines.errors import in_words
from fastmoll.sweep.file import Run

METRICS: Final = ("error", "nll", "ece", "corrupted")
"""Clean error (%), NLL (nats), ECE, and error over corrupted images (%)."""
_HEADS: Final = ("error, %", "NLL", "ECE", "corrupted error, %")
_PAPER: Final = {
    "error": ("error", "clean"),
    "nll": ("nll", "clean"),
    "ece": ("ece", "clean"),
    "corrupted": ("error", "corrupted"),
}
_KEYS: Final = ("data", "net", "augment", "mollify", "settings", "source", "seeds")
_NOTE: Final = "± is the standard deviation over seeds (n - 1); ECE has 15 bins over the whole set."
_TO_DO: Final = (
    "Where the corrupted error is missing, `fastmoll evaluate DIR` adds it, DIR being this table's folder (or that of "
    "one run); then make this table again with --table. A row has it when all of its seeds do."
)
_PAPER_NOTE: Final = "The paper's ECE is a mean over batches of 100 images, which is another number."
_TABLE_2: Final = "paper, table 2"
_TABLE_2_NOTE: Final = (
    "Table 2 prints a mean over its corrupted and clean images; the corrupted error here is that of its 15 corruptions."
)


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        data: Data set.
        net: Network.
        augment: Augmentation.
        mollify: Whether it was mollified.
        settings: Settings that differ from the recipe.
        source: ``"here"``, or the paper's table.
        seeds: Number of runs; None where the paper doesn't say.
        means: Mean of each metric, errors in %.
        deviations: Standard deviation, likewise; none for a single run.
        corrupted_set: The corrupted images, as the results say: ``"official"``, ``"generated (frost: made)"``, ...
    """

    data: str
    net: str
    augment: str
    mollify: bool
    settings: str
    source: str
    seeds: int | None
    means: dict[str, float | str] = field(default_factory=dict)
    deviations: dict[str, float | str] = field(default_factory=dict)
    corrupted_set: str = ""


def read_result(folder: Path) -> dict[str, Any] | None:
    """The figures of a finished run; None where there are none yet.

    Args:
        folder: A trainer's output folder. Its ``result.json`` has ``validation`` with ``error``, ``nll`` and ``ece``
            and may have ``corrupted`` with ``error``, ``source`` and, of a set that was read, its name, ``set``.

    Returns:
        The metrics that are there, errors in %, ``corrupted_set``, that source, and ``set``.

    Raises:
        ValueError: ``result.json`` is no such file.
        OSError: it can't be read at all.
    """
    path = folder / "result.json"
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        clean, corrupted = content["validation"], content.get("corrupted", {})
        found = {
            **{f"validation.{name}": clean[name] for name in ("error", "nll", "ece")},
            **({"corrupted.error": corrupted["error"]} if corrupted else {}),
        }
        for name, figure in found.items():
            high = LARGEST_LOSS if name.endswith("nll") else 1
            if not isinstance(figure, int | float) or isinstance(figure, bool) or not 0 <= figure <= high:
                raise ValueError(f"{name} is {json.dumps(figure)}")
        source = corrupted.get("source", "")
        set_name = corrupted.get("set", "")
        for name, text in (("source", source), ("set", set_name)):
            if not isinstance(text, str) or not text.isprintable():
                raise ValueError(f"corrupted.{name} is {json.dumps(text)}")
        error, nll, ece, *more = map(float, found.values())
        figures = {"error": 100 * error, "nll": nll, "ece": ece, **({"corrupted": 100 * more[0]} if more else {})}
        return {**figures, "corrupted_set": source, "set": set_name}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not the result of a run ({type(error).__name__}: {error})") from error


def is_done(folder: Path) -> bool:
    """Whether there is a result of a run in a folder: no damaged one, but perhaps one that can't be read just now."""
    try:
        return read_result(folder) is not None
    except ValueError:
        return False
    except OSError:
        return True


def read_results(runs: Iterable[Run], out: Path) -> tuple[list[tuple[Run, dict[str, Any]]], dict[str, str]]:
    """The runs that have a result, with it, and, by their names, what is wrong with those that can't be read."""
    found: list[tuple[Run, dict[str, Any]]] = []
    damaged: dict[str, str] = {}
    for run in runs:
        try:
            result = read_result(run.folder(out))
        except (ValueError, OSError) as error:
            damaged[run.name] = in_words(error)
        else:
            found += [] if result is None else [(run, result)]
    return found, damaged


def make_rows(runs: Iterable[Run], out: Path) -> list[Row]:
    """A row for each combination that has a result, seeds together, followed by the paper's rows for it."""
    groups: dict[tuple[Any, ...], list[tuple[Run, dict[str, Any]]]] = {}
    for run, result in read_results(runs, out)[0]:
        key = (run.data, run.net, run.augment, run.mollify, run.changed)
        groups.setdefault(key, []).append((run, result))
    rows: list[Row] = []
    for key, members in groups.items():
        means: dict[str, float | str] = {}
        deviations: dict[str, float | str] = {}
        for metric in METRICS:
            values = [result[metric] for _, result in members if metric in result]
            # A mean over some of the seeds would stand beside one over all of them.
            if len(values) == len(members):
                means[metric] = statistics.fmean(values)
                if len(values) > 1:
                    deviations[metric] = statistics.stdev(values)
        sets = {result["corrupted_set"] for _, result in members} - {""} if "corrupted" in means else set()
        names = {result["set"] for _, result in members} if "corrupted" in means else set()
        if len(names) > 1:  # seeds that are not of the same images
            sets |= {f"set: {name}" for name in names if name}
        rows.append(Row(*key, "here", len(members), means, deviations, ", ".join(sorted(sets))))
        rows += _paper_rows(members[0][0])
    return rows


def as_markdown(rows: Sequence[Row]) -> str:
    """The table for reading; a pipe table of Markdown, in columns."""
    sets = {row.corrupted_set for row in rows if row.source == "here" and "corrupted" in row.means}
    usual = sets.pop() if len(sets) == 1 else ""
    lines: list[list[str]] = [["data", "net", "augment", "mollify", "settings", "source", "seeds", *_HEADS]]
    for row in rows:
        here = row.source == "here"
        cells = [row.data, row.net, row.augment, "yes" if row.mollify else "no", row.settings] if here else [""] * 5
        lines.append([*cells, row.source, str(row.seeds or ""), *(_cell(row, metric, usual) for metric in METRICS)])
    lines = [[*map(escape_markdown, line)] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    table = ["| " + " | ".join(cell.ljust(n) for cell, n in zip(line, widths, strict=True)) + " |" for line in lines]
    sources = {row.source for row in rows} - {"here"}
    lacking = any(row.source == "here" and "corrupted" not in row.means for row in rows)
    notes = [_NOTE, *([f"Corrupted images, where nothing else is said: {escape_markdown(usual)}."] if usual else [])]
    notes += [_TO_DO] if lacking else []
    notes += [*([_PAPER_NOTE] if sources else []), *([_TABLE_2_NOTE] if _TABLE_2 in sources else [])]
    return "\n".join([*table, "", *notes, ""])


def as_csv(rows: Sequence[Row]) -> str:
    """The table for programs: errors in %, full precision, empty where there is no number."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_KEYS, *(name for metric in METRICS for name in (metric, f"{metric}_sd")), "corrupted_set"])
    for row in rows:
        numbers = [x.get(metric, "") for metric in METRICS for x in (row.means, row.deviations)]
        key = map(escape_csv, (row.data, row.net, row.augment, str(row.mollify).lower(), row.settings, row.source))
        writer.writerow([*key, row.seeds, *numbers, escape_csv(row.corrupted_set)])
    return text.getvalue()


def _cell(row: Row, metric: str, usual: str) -> str:
    mean, deviation = row.means.get(metric), row.deviations.get(metric)
    if mean is None:
        return "–"
    digits = 4 if metric in ("nll", "ece") else 2
    # The paper's numbers are text, with the digits that it prints.
    texts = [x if isinstance(x, str) else f"{x:.{digits}f}" for x in (mean, deviation) if x is not None]
    label = [f"({row.corrupted_set})"] if metric == "corrupted" and row.corrupted_set not in ("", usual) else []
    return " ".join([" ± ".join(texts), *label])


def _paper_rows(run: Run) -> list[Row]:
    """The paper's rows for the run's data set, network, augmentation and mollification, whatever its other settings."""
    mollify = paper_mollification(run.mollify, {name: run.settings.get(name) for name in run.changes})
    if mollify is None:
        return []
    tables: dict[str, dict[tuple[str, str], PublishedCell]] = {}
    for cell in published(data=run.data, net=run.net, augment=run.augment, mollify=mollify):
        tables.setdefault(cell.table, {})[cell.metric, cell.images] = cell
    if len(tables) > 1:
        tables.pop("2", None)  # repeats rows of table 1, with fewer digits
    rows = []
    for table, cells in tables.items():
        found = {name: cells[place] for name, place in _PAPER.items() if place in cells}
        means: dict[str, float | str] = {name: cell.printed for name, cell in found.items()}
        deviations: dict[str, float | str] = {
            name: cell.printed_deviation for name, cell in found.items() if cell.printed_deviation
        }
        if table == "2":
            # One digit: of the same runs, this comes within 0.13 of what table 1 prints.
            means["corrupted"] = f"{statistics.fmean(cells['error', name].value for name in CORRUPTIONS):.1f}"
        key = (run.data, run.net, run.augment, run.mollify, run.changed)
        rows.append(Row(*key, f"paper, table {table}", None, means, deviations, "official"))
    return rows
