"""The figure of a report that shows ablations: error against each setting that was varied alone."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Final

from fastmoll.report.figures_runs import MOLLIFY, Drawing, Line, network, over_seeds
from fastmoll.report.labels import augmentation, settings_text
from fastmoll.report.runs import CLEAN, Group
from fastmoll.report.style import COLOURS, NothingToShowError, legend_below, panels, plain


def ablations(lines: Sequence[Line]) -> Drawing:
    """Clean and corrupted error against each setting that was swept (paper, figure "Combining substantial noising and
    blurring with greedy label smoothing yields good results").
    """
    sweeps = find_sweeps(lines)
    if not sweeps:
        raise NothingToShowError("no two runs differ in other settings alone")
    columns = min(2, len(sweeps))
    canvas, axes = panels(math.ceil(len(sweeps) / columns), columns, height=2.7)
    for place, (names, members) in zip(axes, sweeps, strict=False):
        ticks = [_values(line.group, names) for line in members]
        for colour, linestyle, title, which in (
            (COLOURS[0], "-", "corrupted", None),
            (COLOURS[1], (0, (4, 2)), "clean", CLEAN),
        ):
            statistics = [line.group.statistic("error", which) for line in members]
            deviation = [math.nan if x.deviation is None else x.deviation for x in statistics]  # no bar where unknown
            place.errorbar(
                range(len(members)),
                [x.mean for x in statistics],
                None if all(map(math.isnan, deviation)) else deviation,
                color=colour,
                linestyle="none" if names == _ROLES else linestyle,  # between kinds there is nothing
                marker="o" if which is None else "s",
                label=title,
                elinewidth=1,
                capsize=2,
            )
        crowded = sum(max(map(len, tick.split("\n"))) + 2 for tick in ticks) > 100 // columns
        place.set_xticks(range(len(members)), ticks, rotation=90 if crowded else 0)
        run = members[0].group.run
        place.set_title(plain(", ".join(x for x in (run.net, augmentation(run)) if x), 72 // columns), fontsize=8.5)
        title = "roles (clean, noise, blur)" if names == _ROLES else ", ".join(x.removeprefix(MOLLIFY) for x in names)
        place.set(xlabel=plain(title), ylabel="error, %")
        place.margins(x=0.1, y=0.15)
        place.set_ylim(bottom=min(0.0, place.get_ylim()[0]))
    for place in axes[len(sweeps) :]:
        place.set_visible(False)
    legend_below(canvas, axes[0])
    bars = over_seeds([line for _, members in sweeps for line in members], "Bars")
    return canvas, f"Error against a setting that was varied with all others as they were. {bars}".strip()


_ROLES: Final = (f"{MOLLIFY}roles",)
Sweep = tuple[tuple[str, ...], list[Line]]


def find_sweeps(lines: Sequence[Line]) -> list[Sweep]:
    """Settings that were varied, with the runs that differ in nothing else, in order of the values.

    Settings that always changed together, such as two slopes, are one sweep.
    """
    families: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        families.setdefault((*network(line.group), line.group.run.mollify), []).append(line)
    sweeps: list[Sweep] = []
    for family in families.values():
        settings = [line.group.run.settings for line in family]
        differing = {
            frozenset(key for key in {**a, **b} if key not in a or key not in b or a[key] != b[key])
            for a, b in combinations(settings, 2)
        }
        kept: list[frozenset[str]] = []
        for names in sorted(differing, key=lambda names: (len(names), sorted(names))):
            # What differs between a point of one sweep and a point of another is no sweep of its own.
            if names and not any(known < names for known in kept):
                kept.append(names)
        for names in kept:
            classes: dict[str, list[Line]] = {}
            for line in family:
                fixed = {key: value for key, value in line.group.run.settings.items() if key not in names}
                classes.setdefault(settings_text(fixed), []).append(line)
            key = tuple(sorted(names))
            for members in classes.values():
                if len(members) > 1:
                    sweeps.append((key, sorted(members, key=lambda line: _order(line.group, key))))
    return sweeps


def _recipe(name: str) -> Any:
    """The recipe's value of a setting of mollification; None where it isn't known here."""
    from fastmoll.mollify import Mollify

    known = inspect.signature(Mollify).parameters.get(name.removeprefix(MOLLIFY).replace("-", "_"))
    return known.default if name.startswith(MOLLIFY) and known is not None else None


def _numbers(value: Any) -> tuple[float, ...]:
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(float(x) if isinstance(x, int | float) else math.inf for x in items)


def _order(group: Group, names: Sequence[str]) -> tuple[Any, ...]:
    values = [group.run.settings.get(name, _recipe(name)) for name in names]
    return (*map(_numbers, values), *map(str, values))


def _values(group: Group, names: Sequence[str]) -> str:
    settings: Mapping[str, Any] = group.run.settings
    own = any(name in settings for name in names)
    values = {name: settings.get(name, _recipe(name)) for name in names}
    if not own and None in values.values():
        return "recipe"
    text = plain(", ".join(_short(value) for value in values.values()), 24)
    return text if own else f"{text}\n(recipe)"


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "(" + ", ".join(_short(x) for x in value) + ")"
    return f"{value:g}" if isinstance(value, float) else str(value)
