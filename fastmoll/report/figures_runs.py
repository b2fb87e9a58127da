"""Figures of a report that show evaluations: errors over severities and corruptions, calibration, ablations."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fastmoll.kernels.corruption_constants import CORRUPTIONS, GROUPS, SEVERITIES
from fastmoll.report.labels import labels, settings_text
from fastmoll.report.pairs import difference, make_pairs
from fastmoll.report.runs import CLEAN, Group
from fastmoll.report.style import (
    COLOURS,
    INK,
    MARKERS,
    Look,
    NothingToShowError,
    diagonal,
    legend_below,
    panels,
    plain,
    words,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

Drawing = tuple["Canvas", str]
"""A figure and its caption."""

_METRICS: Final = {"error": "error, %", "nll": "NLL, nats", "ece": "ECE"}
MOLLIFY: Final = "mollify."
"""What names of settings of mollification begin with."""
_FEW: Final = 10
_SHORT: Final = 18  # points; markers take five at each end of an arrow, and its head four
_PANELS: Final = 9
"""Pairs of runs that have a panel each, at most."""


@dataclass(frozen=True)
class Line:
    """Runs over seeds, and how they are drawn."""

    group: Group
    look: Look


Pair = tuple[Line, Line]
"""Without and with mollification."""


def network(group: Group) -> tuple[str, str | None, str]:
    run = group.run
    return (run.net, run.augment, "" if run.seed is not None else run.checkpoint)


def make_lines(groups: Sequence[Group], every: Sequence[Group]) -> list[Line]:
    """Give each of some groups its look.

    Args:
        groups: Those that a figure shows.
        every: All of the report: a run's colour doesn't depend on the figure.
    """
    known: dict[tuple[Any, ...], int] = {}
    for group in every:
        known.setdefault((*network(group), settings_text(group.run.settings)), len(known))
    lines = []
    for group, label in zip(groups, labels(groups), strict=True):
        number = known[(*network(group), settings_text(group.run.settings))]
        # A marker of another kind where the colours begin anew.
        marker = MARKERS[(number + number // len(COLOURS)) % len(MARKERS)]
        look = Look(
            plain(label.replace(MOLLIFY, "") or "all runs"),
            COLOURS[number % len(COLOURS)],
            marker,
            group.run.mollify is not False,
        )
        lines.append(Line(group, look))
    return lines


def pair_lines(lines: Sequence[Line]) -> list[Pair]:
    """Each line with mollification beside the one without that the tables, too, compare it with."""
    known = {id(line.group): line for line in lines}
    return [(known[id(a)], known[id(b)]) for a, b in make_pairs([line.group for line in lines])]


def _needed_pairs(lines: Sequence[Line]) -> list[Pair]:
    pairs = pair_lines(lines)
    if not pairs:
        raise NothingToShowError("no two runs differ in mollification alone")
    return pairs


def error_severity(lines: Sequence[Line]) -> Drawing:
    """Error, NLL and ECE against severity (paper, figures of severity)."""
    canvas, axes = panels(1, 3, height=2.7)
    for place, (metric, name) in zip(axes, _METRICS.items(), strict=True):
        for line in lines:
            statistics = [line.group.statistic(metric, CLEAN)]
            statistics += [line.group.statistic(metric, None, severity) for severity in SEVERITIES]
            mean = np.array([x.mean for x in statistics])
            place.plot(range(6), mean, **line.look.line, clip_on=False)
            deviation = np.array([x.deviation or 0.0 for x in statistics])
            if deviation.any():
                # With the edge of its line: that tells the two bands of one colour apart.
                place.fill_between(
                    range(6),
                    mean - deviation,
                    mean + deviation,
                    facecolor=(line.look.colour, 0.12),
                    edgecolor=(line.look.colour, 0.6),
                    linestyle=line.look.line["linestyle"],
                    linewidth=0.7,
                )
        place.set(title=name, xlabel="severity", xticks=range(6), xlim=(-0.15, 5.15))
        place.set_ylim(bottom=0)
    legend_below(canvas, axes[0])
    dashes = any(not line.look.mollified for line in lines)
    dashed = "Dashed lines and open markers: without mollification." if dashes else ""
    return canvas, (
        "Means over the 15 corruptions at each severity; severity 0 is clean images. "
        f"{over_seeds(lines, 'Bands')}{dashed}"
    ).strip()


def clean_corrupted(lines: Sequence[Line]) -> Drawing:
    """Corrupted against clean error, NLL and ECE, arrows from without to with mollification (paper, figure 5)."""
    from matplotlib.patheffects import withStroke

    if len(lines) == 1:
        raise NothingToShowError("there is nothing to compare the only run with")
    canvas, axes = panels(1, 3, height=2.7)
    for place, (metric, name) in zip(axes, _METRICS.items(), strict=True):
        for line in lines:
            clean, corrupted = line.group.statistic(metric, CLEAN), line.group.statistic(metric)
            place.errorbar(
                clean.mean,
                corrupted.mean,
                corrupted.deviation,
                clean.deviation,
                **line.look.line | {"linestyle": "none", "markersize": 7},
                elinewidth=1,
            )
        place.set(title=name, xlabel="clean", ylabel="corrupted")
        place.margins(0.12)
        place.locator_params("x", nbins=4)  # whose numbers don't touch
        diagonal(place)
        for pair in pair_lines(lines):
            start, end = ((x.group.statistic(metric, CLEAN).mean, x.group.statistic(metric).mean) for x in pair)
            length = np.hypot(*np.diff(place.transData.transform([start, end]), axis=0)[0]) * 72 / canvas.dpi
            # One too short to lie between its markers lies on them, in their colour.
            look: dict[str, Any] = {"alpha": 0.7, "zorder": 1.5}
            if length < _SHORT:
                look = {"zorder": 3, "path_effects": [withStroke(linewidth=3, foreground="white")]}
            look |= {"arrowstyle": "->", "color": pair[1].look.colour, "shrinkA": 5, "shrinkB": 5}
            place.annotate("", end, start, arrowprops=look, zorder=look["zorder"])
    legend_below(canvas, axes[0])
    arrows = " Arrows go from runs without to those with mollification." if pair_lines(lines) else ""
    return canvas, (
        "Mean over the 75 corrupted cells against clean images; on the dotted line, where it is in sight, both are "
        f"equal. The axes do not begin at zero.{arrows} {over_seeds(lines, 'Bars')}"
    ).strip()


def radar(lines: Sequence[Line]) -> Drawing:
    """Error under each corruption, mean over severities, as polygons."""
    from matplotlib.ticker import MaxNLocator

    pairs = pair_lines(lines)
    shown = _panels_of(lines, pairs) if pairs else [list(lines)]
    left_out = len(shown) - _PANELS
    shown = shown[:_PANELS]
    columns = 1 if len(shown) == 1 else 2
    canvas, axes = panels(math.ceil(len(shown) / columns), columns, height=4.4 if columns == 1 else 3.4, polar=True)
    angle = np.linspace(0, 2 * np.pi, len(CORRUPTIONS), endpoint=False)
    top = max(x.group.statistic("error", name).mean for members in shown for x in members for name in CORRUPTIONS)
    top = max(top, 1e-9)
    # Not at the circle, whose line would run through the number.
    ticks = [tick for tick in MaxNLocator(4).tick_values(0, top) if 0 < tick < 0.95 * top]
    for place, members in zip(axes, shown, strict=False):
        for line in members:
            values = [line.group.statistic("error", name).mean for name in CORRUPTIONS]
            place.plot([*angle, angle[0]], [*values, values[0]], **line.look.line | {"markersize": 3})
            place.fill(angle, values, color=line.look.colour, alpha=0.08)
        place.set_xticks(angle, [words(name).replace(" ", "\n") for name in CORRUPTIONS], fontsize=7)
        place.tick_params("x", pad=1)
        for name, turn in zip(place.get_xticklabels(), angle, strict=True):
            # Beside the circle, not over it.
            name.set_horizontalalignment(
                "center" if abs(np.cos(turn)) < 0.2 else "left" if np.cos(turn) > 0 else "right"
            )
        place.set_ylim(0, top * 1.05)
        place.set_yticks(ticks, [""] * len(ticks))
        away = _free_angle([np.array(line.get_ydata()) for line in place.lines], ticks, 0.09 * top)
        for tick in ticks:  # over the lines, where they must be: the axis' own numbers would lie below them
            box = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.3}
            place.text(away, tick, f"{tick:g} %", fontsize=7, ha="center", va="center", bbox=box, zorder=3)
        place.grid(color="#d0d0d0")
    for place in axes[len(shown) :]:
        place.set_visible(False)
    legend_below(canvas, *axes[: len(shown)])
    more = f" {left_out} more have no panel." if left_out > 0 else ""
    seeds = " and seeds" if any(len(line.group.runs) > 1 for line in lines) else ""
    panel = " A panel for each training, with and without mollification." if len(shown) > 1 else ""
    return canvas, (
        f"Error (%) under each corruption, mean over the five severities{seeds}; one scale for all, "
        f"from zero in the middle.{panel}{more}"
    )


def _free_angle(curves: Sequence[NDArray[np.float64]], ticks: Sequence[float], half: float) -> float:
    """The angle, between two spokes, where numbers at ``ticks`` are farthest from closed curves over the corruptions.

    Args:
        curves: Radii on the spokes, ``(16,)``, the first again at the end.
        ticks: Radii of the numbers, centred there.
        half: Half the width of a number, about twice its half height.
    """
    spokes = np.exp(2j * np.pi * np.arange(len(CORRUPTIONS) + 1) / len(CORRUPTIONS))
    parts = np.linspace(0, 1, 20)[:, None]
    ends = [curve * spokes for curve in curves]
    points = np.concatenate([(x[:-1] * (1 - parts) + x[1:] * parts).ravel() for x in ends])
    angles = 2 * np.pi * (np.arange(len(CORRUPTIONS)) + 0.5) / len(CORRUPTIONS)
    gap = np.exp(1j * angles)[:, None, None] * np.asarray(ticks)[None, :, None] - points
    room = np.maximum(abs(gap.real) / half, abs(gap.imag) / (half / 2)).min((1, 2))
    return float(angles[int(room.argmax())])


def polygons(lines: Sequence[Line]) -> Drawing:
    """Error with against without mollification in each cell, triangles to heptagons for severities 1 to 5 (paper,
    figure "Blurring-based input mollification ...").
    """
    pairs = _needed_pairs(lines)
    left_out, pairs = len(pairs) - _PANELS, pairs[:_PANELS]
    columns = 2 if len(pairs) in (2, 4) else min(3, len(pairs))
    rows = math.ceil(len(pairs) / columns)
    height = 4.2 if columns == 1 else 6.6 / columns + 0.2
    canvas, axes = panels(rows, columns, height=height, sharex=True, sharey=True)
    for place, (without, mollified) in zip(axes, pairs, strict=False):
        for colour, names in zip(COLOURS, GROUPS.values(), strict=False):
            # Small ones last: they would be hidden.
            for severity in SEVERITIES[::-1]:
                x, y = (
                    [line.group.statistic("error", name, severity).mean for name in names]
                    for line in (without, mollified)
                )
                place.scatter(x, y, color=colour, **_polygon(severity))
        place.set_title(textwrap.fill(mollified.look.label, 72 // columns), fontsize=8.5)
    every = [x for pair in pairs for line in pair for x in _errors(line)]
    margin = 0.05 * (max(every) - min(every)) + 0.5
    limits = (min(every) - margin, max(every) + margin)
    axes[0].set(xlim=limits, ylim=limits)  # of all panels
    for place in axes:
        place.set_aspect("equal")
    for number, place in enumerate(axes):
        if number >= len(pairs):
            place.set_visible(False)
            continue
        if number % columns == 0:
            place.set_ylabel("error with, %")
        if number + columns >= len(pairs):  # the last of its column
            place.set_xlabel("error without, %")
            place.tick_params(labelbottom=True)
        diagonal(place)
    # Outside of the panels: what colours and shapes mean.
    for colour, family in zip(COLOURS, GROUPS, strict=False):
        axes[0].plot([], [], "s", color=colour, label=family)
    for severity in SEVERITIES:
        look = _polygon(severity)
        axes[0].plot(
            *([], []),
            marker=look["marker"],
            markersize=look["s"] ** 0.5,
            color=INK,
            linestyle="none",
            label=f"severity {severity}" if severity == 1 else f"{severity}",
        )
    legend_below(canvas, axes[0], columns=len(GROUPS) + len(SEVERITIES))
    more = f" {left_out} more pairs have no panel." if left_out > 0 else ""
    return canvas, (
        "Each polygon is a corruption at a severity, from small triangles (1) to large heptagons (5): error with "
        f"mollification against error without, mean over seeds where there are several. Below the dotted line "
        f"mollification helps.{more}"
    )


def _errors(line: Line) -> list[float]:
    return [line.group.statistic("error", name, severity).mean for name in CORRUPTIONS for severity in SEVERITIES]


def _polygon(severity: int) -> dict[str, Any]:
    """How the marks of a severity look: more corners and larger, since a pentagon and a hexagon are much alike."""
    side = 3.0 + 1.3 * severity
    return {"marker": (severity + 2, 0, 0), "s": side**2, "alpha": 0.7, "linewidth": 0.5, "edgecolor": "white"}


def differences(lines: Sequence[Line]) -> Drawing:
    """Error with less error without mollification, for each corruption (paper, table 4)."""
    pairs = _needed_pairs(lines)
    rows: list[tuple[str, str | None]] = [("clean", CLEAN), *((words(name), name) for name in CORRUPTIONS)]
    rows.append(("mean", None))
    # So much that marks of a row don't hide each other; with very many pairs they are smaller instead.
    canvas, (axes,) = panels(height=min(9.5, max(5.2, 0.6 + len(rows) * (0.12 + 0.08 * len(pairs)))))
    step = 0.8 / len(pairs)
    size = min(5.0, 0.75 * 72 * (canvas.get_figheight() - 0.6) / len(rows) / len(pairs))
    for number, (without, mollified) in enumerate(pairs):
        change = [difference(without.group, mollified.group, "error", place) for _, place in rows]
        spread = [x.deviation for x in change if x.deviation is not None]  # of all rows, or unknown
        height = np.arange(len(rows)) + (number - (len(pairs) - 1) / 2) * step
        look = mollified.look.line | {"linestyle": "none"}
        axes.errorbar([x.mean for x in change], height, xerr=spread or None, elinewidth=1, **look, markersize=size)
    edges = np.cumsum([1, *map(len, GROUPS.values())]) - 0.5
    for edge in edges:
        axes.axhline(edge, color="#b0b0b0", linewidth=0.8)
    axes.axvline(0, color=INK, linewidth=1)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel="error with − without mollification, percentage points")
    axes.grid(axis="y", visible=False)
    legend_below(canvas, axes)
    known = [mollified for without, mollified in pairs if min(len(x.group.runs) for x in (without, mollified)) > 1]
    return canvas, (
        "Change of the error by mollification, mean over severities; left of zero it helps. The last row is the mean "
        f"over the 75 cells. {over_seeds(known, 'Bars', 'of the difference, where both have several seeds')}"
    ).strip()


def reliability(lines: Sequence[Line]) -> Drawing:
    """Accuracy against confidence in 15 bins, for clean and for all corrupted images."""
    canvas, axes = panels(1, 2, height=3.9, sharex=True, sharey=True)
    for place, title in zip(axes, ("clean", "corrupted, all 75 cells"), strict=True):
        for line in lines:
            clean = title == CLEAN
            cells = [
                cell
                for run in line.group.runs
                for cell in ([run.clean] if clean else [x for row in run.cells.values() for x in row])
            ]
            count, confidence, right = np.array([cell.reliability for cell in cells], np.float64).sum(0).T
            some = count >= _FEW
            place.plot(confidence[some] / count[some], right[some] / count[some], **line.look.line)
        place.set(title=title, xlabel="confidence", xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal")
        diagonal(place)
    axes[0].set_ylabel("accuracy")
    legend_below(canvas, axes[0])
    return canvas, (
        "Share of right predictions against their mean confidence, in 15 equal bins of confidence, seeds together; "
        f"bins with fewer than {_FEW} are left out. Below the dotted line a network is too confident."
    )


def _panels_of(lines: Sequence[Line], pairs: Sequence[Pair]) -> list[list[Line]]:
    """A panel for each run without mollification and those compared with it, one for each that has no partner."""
    panel = {id(line): [line] for line in lines}
    for without, mollified in pairs:
        panel[id(without)].append(panel.pop(id(mollified))[0])
    return list(panel.values())


def over_seeds(lines: Sequence[Line], name: str, which: str = "over seeds") -> str:
    """A sentence for the caption that says what bars or bands are, where there are any."""
    return f"{name}: ± the standard deviation {which}. " if any(len(line.group.runs) > 1 for line in lines) else ""
