"""All figures of a report, from finished evaluations and, where they are given, the user's images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastmoll.report import figures_method as method
from fastmoll.report import figures_runs as of_runs
from fastmoll.report.figures_ablations import ablations
from fastmoll.report.labels import explain, shared_settings
from fastmoll.report.runs import Group, image_set
from fastmoll.report.style import COLOURS, Figure, NothingToShowError, check_matplotlib, slug, style, write

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_OF_RUNS: Final[dict[str, tuple[str, Callable[[Sequence[of_runs.Line]], tuple[Canvas, str]]]]] = {
    "error_severity": ("Error against severity", of_runs.error_severity),
    "clean_corrupted": ("Clean against corrupted", of_runs.clean_corrupted),
    "differences": ("With minus without mollification", of_runs.differences),
    "radar": ("Error of each corruption", of_runs.radar),
    "polygons": ("With against without mollification", of_runs.polygons),
    "reliability": ("Reliability", of_runs.reliability),
    "ablations": ("Ablations", ablations),
}
_WHOLE: Final = ("clean_corrupted", "ablations")
"""Figures that stay readable with any number of runs; of the others there are several where there are many."""
_MANY: Final = 10
_MOST: Final = 16

_SIZES: Final = (32, 64, 224)


def all_figures(groups: Sequence[Group], out: Path, *, images: str | Path | None = None) -> list[Figure]:
    """Draw and write every figure, as PNG and as SVG.

    Args:
        groups: Runs, grouped over seeds; there may be none, then only the method is shown.
        out: Folder to write into; it is made.
        images: Folder of image files, or a data set of small images, for the figures that need pictures.

    Returns:
        The figures, those of the runs first. One that has no data to show has no files, and a caption that says why.

    Raises:
        ValueError: ``images`` can't be read.
        ImportError: Matplotlib is missing.
    """
    check_matplotlib()
    pictures = None if images is None else method.Pictures(images, _picture_size(groups))
    out.mkdir(parents=True, exist_ok=True)
    sets: dict[tuple[str, int, str], list[Group]] = {}
    for group in groups:
        sets.setdefault((group.run.data, group.run.size, image_set(group.run)), []).append(group)
    found: list[Figure] = []
    for name, (title, draw) in _OF_RUNS.items():
        for (data, size, source), members in sets.items():
            several = len({other[1] for other in sets if other[0] == data}) > 1
            where = f"{data} {size} px" if several else data
            for net, part in _parts(members, name):
                lines = of_runs.make_lines(part[:_MOST], groups)
                more = f" {len(part) - _MOST} more runs are left out." if len(part) > _MOST else ""
                shared = shared_settings(part[:_MOST])
                more += "".join(f" {text}" for text in (explain(part[:_MOST]), shared) if text)
                file = slug(name, where, source, *([net] if net else []))
                while any(figure.name == file for figure in found):  # two names may differ in signs alone
                    file += "_2"
                heading = f"{title}: {', '.join([where, *([net] if net else [])])}, {source} corruptions"
                found.append(_figure(out, file, heading, partial(draw, lines), more))
    if not groups:
        found += [Figure(name, title, "there are no runs", None, None) for name, (title, _) in _OF_RUNS.items()]
    betas = [beta for group in groups if (beta := _beta(group.run.settings.get("mollify.beta"))) is not None]
    sizes = sorted({*_SIZES, *(group.run.size for group in groups)})
    for name, title, make in (
        ("temperature_densities", "Temperature distributions", partial(method.temperature_densities, betas)),
        ("blur_schedule", "Blur schedule", partial(method.blur_schedule, sizes)),
        ("information_blur", "Information against blur", partial(method.information_blur, pictures)),
        ("dirichlet", "Label distributions", method.dirichlet_triangles),
        ("corruptions", "The corruptions", partial(method.corruption_gallery, pictures)),
        ("spectral_maps", "Spectral change by corruption", partial(method.spectral_maps, pictures)),
        ("spectral_profiles", "Spectral change against frequency", partial(method.spectral_profiles, pictures)),
    ):
        found.append(_figure(out, name, title, make))
    return found


def _figure(out: Path, name: str, title: str, draw: Callable[[], tuple[Canvas, str]], more: str = "") -> Figure:
    with style():
        try:
            canvas, caption = draw()
        except NothingToShowError as reason:
            return Figure(name, title, str(reason), None, None)
        return Figure(name, title, caption + more, *write(canvas, out, name))


def _parts(groups: Sequence[Group], name: str) -> list[tuple[str, list[Group]]]:
    """Runs for each figure, and the networks in its title: all in one, or where those are too many, several figures.

    Each of these has as many networks as there are colours for their runs. The recipe's runs come first.
    """
    ordered = sorted(groups, key=lambda group: bool(group.run.settings))
    nets = list(dict.fromkeys(group.run.net for group in groups))
    if name in _WHOLE or len(groups) <= _MANY or len(nets) == 1:
        return [("", ordered)]
    count = Counter(group.run.net for group in groups)
    parts: list[list[str]] = [[]]
    for net in nets:
        if parts[-1] and sum(count[x] for x in parts[-1]) + count[net] > len(COLOURS):
            parts.append([])
        parts[-1].append(net)
    return [(_names(part), [group for group in ordered if group.run.net in part]) for part in parts]


def _names(nets: Sequence[str]) -> str:
    return nets[0] if len(nets) == 1 else f"{len(nets)} networks, {nets[0]} to {nets[-1]}"


def _picture_size(groups: Sequence[Group]) -> int:
    sizes = Counter(group.run.size for group in groups)
    return sizes.most_common(1)[0][0] if sizes else _SIZES[-1]


def _beta(value: Any) -> tuple[float, float] | None:
    """A setting of the temperatures, if it is one that can be drawn."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    if not all(isinstance(x, int | float) and not isinstance(x, bool) and 0.05 <= x <= 200 for x in value):
        return None
    return float(value[0]), float(value[1])
