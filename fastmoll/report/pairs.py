"""Runs of a report in the order for reading, and those with mollification beside those without."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import zip_longest

from fastmoll.paper import published
from fastmoll.report.labels import settings_text
from fastmoll.report.runs import Group, Statistic, image_set


def in_order(groups: Sequence[Group]) -> list[Group]:
    """Sorted for reading: by data set, network and images, augmentations as in the paper, without before with."""
    data = [group.run.data for group in groups]
    augments = [*dict.fromkeys(cell.augment for cell in published(table="1"))]

    def key(group: Group) -> tuple[object, ...]:
        run = group.run
        known = run.augment in augments
        place = augments.index(run.augment) if run.augment and known else len(augments)
        mollify = 2 if run.mollify is None else int(run.mollify)
        order = (data.index(run.data), run.size, image_set(run), _natural(run.net), run.net)
        return (*order, place, run.augment or "", mollify, _natural(settings_text(run.settings)))

    return sorted(groups, key=key)


def _natural(text: str) -> list[tuple[str, float]]:
    """For sorting: numbers within text by their value."""
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(part, float(number or 0)) for part, number in zip_longest(parts[::2], parts[1::2])]


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
