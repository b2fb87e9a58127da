"""The paper's tables, made from finished evaluations."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Final

from fastmoll.kernels.corruption_constants import CORRUPTIONS, GROUPS, SEVERITIES
from fastmoll.paper import SIZES, PublishedCell, compare, departs, paper_mollification, published
from fastmoll.report.labels import differing_settings, explain_frost, mollification, settings_text, shared_settings
from fastmoll.report.runs import CLEAN, Group, RunResult, Statistic, image_set, statistic
from fastmoll.report.style import words
from fastmoll.report.table import Number, Table, Value

_DIGITS: Final = {"error": 2, "nll": 3, "ece": 3, "ece_adaptive": 3, "ece_batch100": 3}
_HEADS: Final = {
    "error": "error, %",
    "nll": "NLL",
    "ece": "ECE",
    "ece_adaptive": "adaptive ECE",
    "ece_batch100": "ECE, mean of batches of 100",
}
_SET: Final = "corrupted images"
_PLACES: Final = (
    *("shot_noise", "impulse_noise", "gaussian_noise"),
    *("motion_blur", "zoom_blur", "defocus_blur", "glass_blur"),
    *("fog", "frost", "snow", "brightness"),
    *("jpeg_compression", "pixelate", "elastic_transform", "contrast"),
)
"""Corruptions in the order of the paper's tables 2 and 4, so that columns stand below columns."""
_SPREAD: Final = "± is the standard deviation over seeds (n − 1)."
_CORRUPTION_HEADS: Final = {
    words(name): (family, words(name).removesuffix(f" {family}")) for family, names in GROUPS.items() for name in names
}
_MEAN: Final = "Corrupted: the plain mean over 15 corruptions and 5 severities."


def in_order(groups: Sequence[Group]) -> list[Group]:
    """Sorted for reading: by data set, network and images, augmentations as in the paper, without before with."""
    data, nets = ([getattr(group.run, name) for group in groups] for name in ("data", "net"))
    augments = [*dict.fromkeys(cell.augment for cell in published(table="1"))]

    def key(group: Group) -> tuple[object, ...]:
        run = group.run
        known = run.augment in augments
        place = augments.index(run.augment) if run.augment and known else len(augments)
        mollify = 2 if run.mollify is None else int(run.mollify)
        order = (data.index(run.data), run.size, image_set(run), nets.index(run.net))
        return (*order, place, run.augment or "", mollify, _natural(settings_text(run.settings)))

    return sorted(groups, key=key)


def _natural(text: str) -> list[tuple[str, float]]:
    """For sorting: numbers within text by their value."""
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(part, float(number or 0)) for part, number in zip_longest(parts[::2], parts[1::2])]


def all_tables(groups: Sequence[Group]) -> list[Table]:
    """Every table of a report; one that these runs have nothing for has no rows, and a note that says why.

    Args:
        groups: Runs, grouped over seeds.
    """
    return [make(groups) for make in _TABLES]


def make_pairs(groups: Sequence[Group]) -> list[tuple[Group, Group]]:
    """Each group with mollification, after the one without that differs from it in settings of mollification alone."""

    def key(group: Group) -> tuple[object, ...]:
        run = group.run
        settings = {name: value for name, value in run.settings.items() if not name.startswith("mollify.")}
        known = (run.data, run.size, run.num_classes, run.net, run.augment, settings_text(settings), run.count)
        return (*known, image_set(run), "" if run.seed is not None else run.checkpoint)

    without = {key(group): group for group in groups if group.run.mollify is False}
    return [(without[key(x)], x) for x in groups if x.run.mollify and key(x) in without]


def difference(without: Group, mollified: Group, metric: str, place: str | None) -> Statistic:
    """A figure with mollification minus that without, of independent runs.

    Args:
        without: Runs without mollification.
        mollified: Runs with it.
        metric: One of :data:`fastmoll.report.runs.METRICS`.
        place: A corruption, a group of them, ``"clean"``, or None: all cells.

    Returns:
        The difference of the means, its standard deviation (None unless both have one), and the lower number of runs.
    """
    before, after = without.statistic(metric, place), mollified.statistic(metric, place)
    deviation = None
    if before.deviation is not None and after.deviation is not None:
        deviation = math.hypot(before.deviation, after.deviation)
    return Statistic(after.mean - before.mean, deviation, min(before.count, after.count))


def benchmark(groups: Sequence[Group]) -> Table:
    """Error, NLL and ECE on clean and corrupted images (paper, tables 1, A1 and 5)."""
    return _clean_and_corrupted(
        "Benchmark",
        groups,
        ("error", "nll", "ece"),
        f"{_MEAN} NLL in nats, of plain cross-entropy. ECE has 15 equal bins over the whole set.",
    )


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
        return _empty(title, "No two runs differ in their network alone.")
    return _clean_and_corrupted(title, chosen, ("error", "nll", "ece"), f"Runs that differ in their network. {_MEAN}")


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
    columns, keys = _identity(groups)
    rows = [
        (
            *key,
            _HEADS[metric],
            Number.of(group.statistic(metric, CLEAN), _DIGITS[metric]),
            *(Number.of(group.statistic(metric, severity=severity), _DIGITS[metric]) for severity in SEVERITIES),
        )
        for group, key in zip(groups, keys, strict=True)
        for metric in ("error", "nll", "ece")
    ]
    heads = {f"severity {severity}": ("severity", str(severity)) for severity in SEVERITIES}
    note = _note("The mean over 15 corruptions at each severity.", groups)
    return Table("Severity", note, (*columns, "metric", CLEAN, *heads), tuple(rows), heads)


def differences(groups: Sequence[Group]) -> Table:
    """Error with mollification minus error without, for each corruption (paper, table 4)."""
    title = "With minus without mollification"
    pairs = make_pairs(groups)
    if not pairs:
        return _empty(title, "No two runs differ in mollification alone.")
    columns, keys = _identity([mollified for _, mollified in pairs])
    places: list[tuple[str, str | None]] = [(CLEAN, CLEAN), *((words(x), x) for x in _PLACES), ("mean", None)]
    found = [[difference(*pair, "error", place) for _, place in places] for pair in pairs]
    rows = [(*key, *(Number.of(x, 1, signed=True) for x in row)) for row, key in zip(found, keys, strict=True)]
    note = "Difference of the error, in percentage points; below zero mollification helps."
    if any(x.deviation is not None for row in found for x in row):
        note += " ± is the standard deviation of the difference of independent runs, from that over seeds of both."
    note = _on_runs(note, [group for pair in pairs for group in pair])
    return Table(title, note, (*columns, *(head for head, _ in places)), tuple(rows), _CORRUPTION_HEADS)


def every_run(groups: Sequence[Group]) -> Table:
    """The figures of each seed."""
    columns, keys = _identity(groups, whole=True)
    metrics = ("error", "nll", "ece", "ece_adaptive", "ece_batch100")
    heads = _metric_heads(metrics)
    rows = [
        (
            *key[:-1],
            run.seed,
            *(Number(run.value(metric, place), None, _DIGITS[metric]) for metric in metrics for place in (CLEAN, None)),
            run.checkpoint,
        )
        for group, key in zip(groups, keys, strict=True)
        for run in group.runs
    ]
    note = _on_runs(f"One row a seed. {_MEAN}", groups)
    return Table("Every run", note, (*columns[:-1], "seed", *heads, "weights"), tuple(rows), heads)


def paper_check(groups: Sequence[Group]) -> Table:
    """What the paper prints beside what was measured."""
    title = "Paper check"
    columns, keys = _identity(groups, whole=True)
    place = {id(group): key for group, key in zip(groups, keys, strict=True)}
    found: list[tuple[Group, PublishedCell, Statistic]] = []
    for group in groups:
        found += [(group, cell, _measured(group, cell)) for cell in _published(group)]
    for without, mollified in make_pairs(groups):
        if "true" == _kind(mollified.run):
            found += [
                (mollified, cell, difference(without, mollified, cell.metric, _place(cell)))
                for cell in _published(mollified, "difference")
            ]
    rows: list[tuple[Value, ...]] = []
    outcomes: list[bool | None] = []
    for group, cell, measured in found:
        result = compare(measured.mean, measured.deviation, measured.count, cell)
        digits = _decimals(cell.printed)
        signed = cell.mollify == "difference"
        rows.append(
            (
                *place[id(group)],
                cell.table,
                ("difference of " if signed else "") + _HEADS[_metric(cell)],
                words(cell.images),
                Number.of(measured, digits + 1, signed),
                Number(cell.value, cell.deviation, digits, signed, _decimals(cell.printed_deviation)),
                Number(result.difference, None, digits + 1, signed=True),
                None if result.within is None else "yes" if result.within else "no",
                result.deviation,
                "other settings" if departs(group.run.settings) else "the recipe",
            )
        )
        if not departs(group.run.settings):
            outcomes.append(result.within)
    heads = (
        "table",
        "metric",
        "images",
        "measured",
        "published",
        "difference",
        "within 2 sd",
        "whose sd",
        "trained with",
    )
    if not rows:
        return _empty(title, "The paper has no figures of these data sets, sizes, networks and augmentations.")
    notes = []
    if outcomes:
        notes.append(
            f"{outcomes.count(True)} of {len(outcomes)} figures are within two standard deviations of the published "
            f"ones, {outcomes.count(False)} are not; {outcomes.count(None)} have no standard deviation to tell with."
        )
    if other := len(rows) - len(outcomes):
        notes.append(f"{other} figures{' more' * bool(outcomes)} are of runs with other settings than the paper's.")
    notes.append(
        "The standard deviation is the paper's where it prints one, else the measured one; half a unit of the last "
        "printed digit is allowed besides. The paper's corrupted images are the official ones. Its ECE is a mean over "
        "batches of 100, and so is the measured one here. clean+corrupted is the mean that table 2 prints, over clean "
        "images and the 15 corruptions."
    )
    notes += [explain_frost([group for group, _, _ in found]), shared_settings(groups)]
    return Table(title, " ".join(filter(None, notes)), (*columns, *heads), tuple(rows))


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


def _kind(run: RunResult) -> str | None:
    return paper_mollification(run.mollify, run.settings)


def _identity(groups: Sequence[Group], whole: bool = False) -> tuple[tuple[str, ...], list[tuple[Value, ...]]]:
    """Columns that say which group a row is, and their cells; the last two are the images and the number of seeds.

    Settings are those that the groups do not all share, or the `whole` of them.
    """
    runs = [group.run for group in groups]
    settings = [settings_text(run.settings) for run in runs] if whole else differing_settings(groups)
    always: dict[str, list[Value]] = {
        "data": [run.data for run in runs],
        "net": [run.net for run in runs],
        "augmentation": [run.augment for run in runs],
        "mollification": [mollification(run) for run in runs],
        "settings": [text or None for text in settings],
    }
    # These only where rows would be alike without them.
    more: dict[str, list[Value]] = {
        "pixels": [run.size for run in runs],
        "weights": [run.checkpoint for run in runs],
        "classes": [run.num_classes for run in runs],
        "images": [run.count for run in runs],
    }
    columns = {head: cells for head, cells in always.items() if {*cells} != {None}}
    images = [image_set(run) for run in runs]
    for head, cells in more.items():
        if len({*zip(*columns.values(), images, strict=True)}) < len(groups) and len({*cells}) > 1:
            columns[head] = cells
    columns[_SET] = [*images]
    columns["seeds"] = [len(group.runs) for group in groups]
    return (*columns,), [*zip(*columns.values(), strict=True)]


def _clean_and_corrupted(title: str, groups: Sequence[Group], metrics: Sequence[str], note: str) -> Table:
    columns, keys = _identity(groups)
    heads = _metric_heads(metrics)
    rows = [
        (*key, *(Number.of(group.statistic(x, place), _DIGITS[x]) for x in metrics for place in (CLEAN, None)))
        for group, key in zip(groups, keys, strict=True)
    ]
    baselines = {run.mce["baseline"] for group in groups for run in group.runs if run.mce}
    if "error" in metrics and baselines:
        # Relative to the errors of a baseline: another number than the corrupted error, and named so.
        for baseline in sorted(baselines):
            heads[f"mCE ({baseline}), %"] = ("", f"mCE ({baseline}), %")
            rows = [(*row, _mce(group, baseline)) for row, group in zip(rows, groups, strict=True)]
        note += " mCE: each corruption's error relative to the baseline's, averaged over the 15."
    return Table(title, _note(note, groups), (*columns, *heads), tuple(rows), heads)


def _metric_heads(metrics: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Heads of clean and corrupted figures of each metric, in one line and in two."""
    return {f"{where} {_HEADS[x]}": (_HEADS[x], where) for x in metrics for where in ("clean", "corrupted")}


def _mce(group: Group, baseline: str) -> Number | None:
    values = [float(run.mce["value"]) for run in group.runs if run.mce and run.mce["baseline"] == baseline]
    return Number.of(statistic(values)) if len(values) == len(group.runs) else None


def _over_places(title: str, groups: Sequence[Group], places: Sequence[tuple[str, str]], note: str) -> Table:
    columns, keys = _identity(groups)
    every: list[tuple[str, str | None]] = [(CLEAN, CLEAN), *places, ("mean", None)]
    rows = [
        (*key, *(Number.of(group.statistic("error", place), 1) for _, place in every))
        for group, key in zip(groups, keys, strict=True)
    ]
    return Table(title, _note(note, groups), (*columns, *(head for head, _ in every)), tuple(rows), _CORRUPTION_HEADS)


def _empty(title: str, reason: str) -> Table:
    return Table(title, reason, (), ())


def _note(text: str, groups: Sequence[Group]) -> str:
    """A note on figures over seeds."""
    return _on_runs(f"{text} {_SPREAD}" if any(len(group.runs) > 1 for group in groups) else text, groups)


def _on_runs(text: str, groups: Sequence[Group]) -> str:
    """A note, and what must be known of these runs: their frost, and the settings that all share."""
    return " ".join(filter(None, (text, explain_frost(groups), shared_settings(groups))))


def _published(group: Group, mollify: str | None = None) -> list[PublishedCell]:
    run, kind = group.run, mollify or _kind(group.run)
    # The same classes at another size are another data set.
    if run.augment is None or kind is None or run.size != SIZES.get(run.data.lower()):
        return []
    return published(data=run.data, net=run.net, augment=run.augment, mollify=kind)


def _decimals(printed: str) -> int:
    return len(printed.partition(".")[2])


def _metric(cell: PublishedCell) -> str:
    return "ece_batch100" if cell.metric == "ece" else cell.metric


def _place(cell: PublishedCell) -> str | None:
    return None if cell.images == "corrupted" else cell.images


def _measured(group: Group, cell: PublishedCell) -> Statistic:
    metric = _metric(cell)
    if cell.images != "clean+corrupted":
        return group.statistic(metric, _place(cell))
    columns = len(CORRUPTIONS) + 1
    return statistic([(run.value(metric, CLEAN) + (columns - 1) * run.value(metric)) / columns for run in group.runs])
