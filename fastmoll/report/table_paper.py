"""The table of a report that puts what the paper prints beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from fastmoll.kernels.corruption_constants import CORRUPTIONS
from fastmoll.paper import SIZES, PublishedCell, compare, departs, paper_mollification, published
from fastmoll.report.labels import explain, shared_settings
from fastmoll.report.pairs import difference, make_pairs
from fastmoll.report.runs import CLEAN, Group, RunResult, Statistic, statistic
from fastmoll.report.style import words
from fastmoll.report.table import Number, Table, Value
from fastmoll.report.table_parts import HEADS, empty, identity


def paper_check(groups: Sequence[Group]) -> Table:
    """What the paper prints beside what was measured."""
    title = "Paper check"
    columns, keys = identity(groups, whole=True)
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
        result = compare(measured.mean, measured.deviation, cell)
        digits = _decimals(cell.printed)
        signed = cell.mollify == "difference"
        rows.append(
            (
                *place[id(group)],
                cell.table,
                ("difference of " if signed else "") + HEADS[_metric(cell)],
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
        return empty(title, "The paper has no figures of these data sets, sizes, networks and augmentations.")
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
    notes += [explain([group for group, _, _ in found]), shared_settings(groups)]
    return Table(title, " ".join(filter(None, notes)), (*columns, *heads), tuple(rows))


def _kind(run: RunResult) -> str | None:
    return paper_mollification(run.mollify, run.settings)


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
