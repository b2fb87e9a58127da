"""The paper's tables, made from finished evaluations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from fastmoll.kernels.corruption_constants import GROUPS, SEVERITIES
from fastmoll.report.labels import settings_text
from fastmoll.report.pairs import difference, make_pairs
from fastmoll.report.runs import CLEAN, Group, image_set, statistic
from fastmoll.report.style import words
from fastmoll.report.table import Number, Table
from fastmoll.report.table_paper import paper_check
from fastmoll.report.table_parts import DIGITS, HEADS, MCE, SET, empty, identity, on_runs, on_seeds

_PLACES: Final = (
    *("shot_noise", "impulse_noise", "gaussian_noise"),
    *("motion_blur", "zoom_blur", "defocus_blur", "glass_blur"),
    *("fog", "frost", "snow", "brightness"),
    *("jpeg_compression", "pixelate", "elastic_transform", "contrast"),
)
"""Corruptions in the order of the paper's tables 2 and 4, so that columns stand below columns."""
_CORRUPTION_HEADS: Final = {
    words(name): (family, words(name).removesuffix(f" {family}")) for family, names in GROUPS.items() for name in names
}
_MEAN: Final = "Corrupted: the plain mean over 15 corruptions and 5 severities."


def all_tables(groups: Sequence[Group]) -> list[Table]:
    """Every table of a report; one that these runs have nothing for has no rows, and a note that says why.

    Args:
        groups: Runs, grouped over seeds.
    """
    return [make(groups) for make in _TABLES]


def benchmark(groups: Sequence[Group]) -> Table:
    """Error, NLL and ECE on clean and corrupted images (paper, tables 1, A1 and 5)."""
    table = _clean_and_corrupted(
        "Benchmark",
        groups,
        ("error", "nll", "ece"),
        f"{_MEAN} NLL in nats, of plain cross-entropy. ECE has 15 equal bins over the whole set.",
    )
    return replace(table, wide=("net", SET), rules=("mollification",), best=(*table.heads,))


def architectures(groups: Sequence[Group]) -> Table:
    """The benchmark again, networks under each other (paper, table A2)."""
    title = "Architectures"

    def rest(group: Group) -> tuple[object, ...]:
        run = group.run
        return (run.data, run.size, image_set(run), run.augment, run.mollify, settings_text(run.settings))

    nets: dict[tuple[object, ...], list[Group]] = {}
    for group in groups:
        nets.setdefault(rest(group), []).append(group)
    chosen = [group for members in nets.values() if len({x.run.net for x in members}) > 1 for group in members]
    if not chosen:
        return empty(title, "No two runs differ in their network alone.")
    note = f"Runs that differ in their network. {_MEAN}"
    table = _clean_and_corrupted(title, chosen, ("error", "nll", "ece"), note)
    return replace(table, wide=(SET,), rules=("augmentation", "mollification", "settings"))


def calibration(groups: Sequence[Group]) -> Table:
    """Three estimates of the calibration error, on clean and corrupted images."""
    return _clean_and_corrupted(
        "Calibration",
        groups,
        ("ece", "ece_adaptive", "ece_batch100"),
        f"{_MEAN} ECE has 15 equal bins over the whole set, adaptive ECE bins of equal mass. The mean over batches of "
        "100 images is the paper's estimator. Of so few images it is above zero for a perfectly calibrated network, "
        "too (by about 0.05 at an error of 8 %): it only serves to compare with the paper.",
    )


def breakdown(groups: Sequence[Group]) -> Table:
    """Error of each corruption (paper, table 2)."""
    return _over_places(
        "Error of each corruption",
        groups,
        [(words(name), name) for name in _PLACES],
        "Error in %, the mean over 5 severities of each corruption; mean: over the 75 corrupted cells, without clean "
        "images.",
    )


def families(groups: Sequence[Group]) -> Table:
    """Error of each group of corruptions."""
    members = "; ".join(f"{family}: {', '.join(map(words, names))}" for family, names in GROUPS.items())
    note = f"Error in %, the mean over a group's corruptions and 5 severities. {members}."
    return _over_places("Error of each group of corruptions", groups, [(family, family) for family in GROUPS], note)


def severities(groups: Sequence[Group]) -> Table:
    """Each metric against severity (paper, figures on severity)."""
    columns, keys = identity(groups)
    rows = [
        (
            *key,
            HEADS[metric],
            Number.of(group.statistic(metric, CLEAN), DIGITS[metric]),
            *(Number.of(group.statistic(metric, severity=severity), DIGITS[metric]) for severity in SEVERITIES),
        )
        for group, key in zip(groups, keys, strict=True)
        for metric in ("error", "nll", "ece")
    ]
    heads = {f"severity {severity}": ("severity", str(severity)) for severity in SEVERITIES}
    note = on_seeds("The mean over 15 corruptions at each severity.", groups)
    return Table("Severity", note, (*columns, "metric", CLEAN, *heads), tuple(rows), heads)


def differences(groups: Sequence[Group]) -> Table:
    """Error with mollification minus error without, for each corruption (paper, table 4)."""
    title = "With minus without mollification"
    pairs = make_pairs(groups)
    if not pairs:
        return empty(title, "No two runs differ in mollification alone.")
    columns, keys = identity([mollified for _, mollified in pairs])
    places: list[tuple[str, str | None]] = [(CLEAN, CLEAN), *((words(x), x) for x in _PLACES), ("mean", None)]
    found = [[difference(*pair, "error", place) for _, place in places] for pair in pairs]
    rows = [(*key, *(Number.of(x, 1, signed=True) for x in row)) for row, key in zip(found, keys, strict=True)]
    note = "Difference of the error, in percentage points; below zero mollification helps."
    if any(x.deviation is not None for row in found for x in row):
        note += " ± is the standard deviation of the difference of independent runs, from that over seeds of both."
    note = on_runs(note, [group for pair in pairs for group in pair])
    return Table(title, note, (*columns, *(head for head, _ in places)), tuple(rows), _CORRUPTION_HEADS)


def every_run(groups: Sequence[Group]) -> Table:
    """The figures of each seed."""
    columns, keys = identity(groups, whole=True)
    metrics = ("error", "nll", "ece", "ece_adaptive", "ece_batch100")
    heads = _metric_heads(metrics)
    # Each run's weights come last, be they what tells rows apart or not.
    kept = [place for place, head in enumerate(columns[:-1]) if head != "weights"]
    rows = [
        (
            *(key[place] for place in kept),
            run.seed,
            *(Number(run.value(metric, place), None, DIGITS[metric]) for metric in metrics for place in (CLEAN, None)),
            run.checkpoint,
        )
        for group, key in zip(groups, keys, strict=True)
        for run in group.runs
    ]
    note = on_runs(f"One row a seed. {_MEAN}", groups)
    return Table("Every run", note, (*(columns[x] for x in kept), "seed", *heads, "weights"), tuple(rows), heads)


_TABLES: Final[tuple[Callable[[Sequence[Group]], Table], ...]] = (
    benchmark,
    breakdown,
    families,
    differences,
    architectures,
    severities,
    calibration,
    every_run,
    paper_check,
)


# --- parts ------------------------------------------------------------------------------------------------------------


def _clean_and_corrupted(title: str, groups: Sequence[Group], metrics: Sequence[str], note: str) -> Table:
    columns, keys = identity(groups)
    heads = _metric_heads(metrics)
    rows = [
        (*key, *(Number.of(group.statistic(x, place), DIGITS[x]) for x in metrics for place in (CLEAN, None)))
        for group, key in zip(groups, keys, strict=True)
    ]
    baselines = {run.mce["baseline"] for group in groups for run in group.runs if run.mce}
    if "error" in metrics and baselines:
        # Relative to the errors of a baseline: another number than the corrupted error, and named so.
        for baseline in sorted(baselines):
            heads[f"mCE ({baseline}), %"] = ("", f"mCE ({baseline}), %")
            rows = [(*row, _mce(group, baseline)) for row, group in zip(rows, groups, strict=True)]
        note += f" {MCE}"
    return Table(title, on_seeds(note, groups), (*columns, *heads), tuple(rows), heads)


def _metric_heads(metrics: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Heads of clean and corrupted figures of each metric, in one line and in two."""
    return {f"{where} {HEADS[x]}": (HEADS[x], where) for x in metrics for where in ("clean", "corrupted")}


def _mce(group: Group, baseline: str) -> Number | None:
    values = [float(run.mce["value"]) for run in group.runs if run.mce and run.mce["baseline"] == baseline]
    return Number.of(statistic(values)) if len(values) == len(group.runs) else None


def _over_places(title: str, groups: Sequence[Group], places: Sequence[tuple[str, str]], note: str) -> Table:
    columns, keys = identity(groups)
    every: list[tuple[str, str | None]] = [(CLEAN, CLEAN), *places, ("mean", None)]
    rows = [
        (*key, *(Number.of(group.statistic("error", place), 1) for _, place in every))
        for group, key in zip(groups, keys, strict=True)
    ]
    return Table(
        title, on_seeds(note, groups), (*columns, *(head for head, _ in every)), tuple(rows), _CORRUPTION_HEADS
    )
