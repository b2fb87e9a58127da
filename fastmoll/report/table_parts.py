"""What the tables of a report have in common: which row is of which runs, and notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fastmoll.report.labels import differing_settings, explain, mollification, settings_text, shared_settings
from fastmoll.report.runs import Group, image_set
from fastmoll.report.table import Table, Value

DIGITS: Final = {"error": 2, "nll": 3, "ece": 3, "ece_adaptive": 3, "ece_batch100": 3}
HEADS: Final = {
    "error": "error, %",
    "nll": "NLL",
    "ece": "ECE",
    "ece_adaptive": "adaptive ECE",
    "ece_batch100": "ECE, mean of batches of 100",
}
SET: Final = "corrupted images"
MCE: Final = "mCE: each corruption's error relative to the baseline's, averaged over the 15."
"""What stands where there is a column of mCE."""
_SPREAD: Final = "± is the standard deviation over seeds (n − 1)."


def identity(groups: Sequence[Group], whole: bool = False) -> tuple[tuple[str, ...], list[tuple[Value, ...]]]:
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
    columns[SET] = [*images]
    columns["seeds"] = [len(group.runs) for group in groups]
    return (*columns,), [*zip(*columns.values(), strict=True)]


def empty(title: str, reason: str) -> Table:
    return Table(title, reason, (), ())


def on_seeds(text: str, groups: Sequence[Group]) -> str:
    """A note on figures over seeds."""
    return on_runs(f"{text} {_SPREAD}" if any(len(group.runs) > 1 for group in groups) else text, groups)


def on_runs(text: str, groups: Sequence[Group]) -> str:
    """A note, and what must be known of these runs: their frost, and the settings that all share."""
    return " ".join(filter(None, (text, explain(groups), shared_settings(groups))))
