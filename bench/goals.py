"""The goals of speed, and which of them the results of a check on a card meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Results = Mapping[str, Any]
"""What the benchmarks wrote, by name."""


@dataclass(frozen=True)
class Goal:
    """One number of the results, and what it should be."""

    what: str
    sign: Literal["<=", ">="]
    limit: float
    measure: Callable[[Results], float]


def _rows(results: Results, benchmark: str, column: str, value: str, side: str, start: str) -> list[dict[str, Any]]:
    """The rows with ``value`` in a column whose ``side`` begins as said."""
    rows = results[benchmark]["rows"]
    return [row for row in rows if row[column] == value and str(row[side]).startswith(start)]


def _tail(tail: str, column: str, side: str) -> Callable[[Results], float]:
    return lambda results: min(
        float(row[column]) for row in _rows(results, "kernels", "operation", f"tail, {tail}", "side", side)
    )


def _loader(column: str) -> Callable[[Results], float]:
    def measure(results: Results) -> float:
        (row,) = _rows(results, "loader", "job", "crops, mollified, soft labels", "side", "fastmoll")
        return float(row[column]["median"] if isinstance(row[column], dict) else row[column])

    return measure


def _training(results: Results) -> float:
    """Of mollified batches, by whatever decodes them fastest."""
    others = ("resident", "real, clean")
    return max(row["against resident"] for row in results["train"]["rows"] if row["batches"] not in others)


def _share(results: Results) -> float:
    (step,) = (row["images/s"]["median"] for row in results["train"]["rows"] if row["batches"] == "resident")
    rows = _rows(results, "kernels", "operation", "tail, roles mixed", "side", "fastmoll")
    each = min(row["ms"]["median"] for row in rows) / results["kernels"]["settings"]["batch_size"]
    return float(each * step / 1e3)


GOALS: Final = (
    *(
        goal
        for tail in ("roles mixed", "roles and MixUp")
        for goal in (
            Goal(f"batch tail, {tail}: times the copy", "<=", 1.25, _tail(tail, "times the copy", "fastmoll")),
            Goal(f"batch tail, {tail}: Triton alone", "<=", 1.5, _tail(tail, "times the copy", "fastmoll triton")),
        )
    ),
    Goal(
        "blur alone: times faster than the authors' way", ">=", 20, _tail("blur alone", "times fastmoll", "dense DCT")
    ),
    Goal("loader, mollified: images a second", ">=", 10_000, _loader("images/s")),
    Goal("loader, mollified: times less CPU time", ">=", 3, _loader("times less CPU")),
    Goal("training on real batches: against resident ones", ">=", 0.99, _training),
    Goal("mollification: share of a training step", "<=", 0.01, _share),
)


def compare(results: Results) -> list[dict[str, Any]]:
    """A row for each goal; what was not measured, or was lost, is named so."""
    rows = []
    for goal in GOALS:
        try:
            value: float | None = goal.measure(results)
        except (KeyError, ValueError, TypeError):
            value = None
        met = value is not None and (value <= goal.limit if goal.sign == "<=" else value >= goal.limit)
        rows.append(
            {
                "goal": goal.what,
                "wanted": f"{goal.sign} {goal.limit:g}",
                "measured": "nothing" if value is None else value,
                "met": "-" if value is None else "yes" if met else "NO",
            }
        )
    return rows
