"""What all figures of a report share: fonts, colours, one look for each run, and how they are written."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

WIDTH: Final = 7.2
"""Width of every figure, inches, so that its text has one size on the page."""

COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#333333", "#8c6d00", "#56b4e9", "#882255")
"""Told apart with any colour vision: Okabe and Ito's, without the yellow, too light for lines on white."""

MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*")
_LONGEST: Final = 60  # letters of a part of a file name: all together have 255 at most
_ACROSS: Final = 78  # letters of a legend beside each other, at most
_DPI: Final = 160
INK: Final = "#333333"
MAP: Final = "viridis"

_STYLE: Final[dict[str, Any]] = {
    "font.family": "DejaVu Sans",  # comes with Matplotlib: the same picture everywhere
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.labelsize": 9.0,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e2e2e2",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "lines.linewidth": 1.7,
    "lines.markersize": 5.0,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "figure.facecolor": "white",
    "svg.fonttype": "path",  # an SVG that looks alike where the font is missing
    "svg.hashsalt": "fastmoll",  # the same figure is the same file
}


@dataclass(frozen=True)
class Figure:
    """A figure of a report.

    Attributes:
        name: File name without its ending.
        title: Heading.
        caption: What it shows; where it was left out, why.
        png: The picture in pixels; None where it was left out.
        svg: The picture in lines, likewise.
    """

    name: str
    title: str
    caption: str
    png: Path | None
    svg: Path | None


@dataclass(frozen=True)
class Look:
    """How a run is drawn, the same in every figure.

    Attributes:
        label: Its name in legends.
        colour: ``#rrggbb``; runs that differ only in mollification share it.
        marker: Matplotlib's marker.
        mollified: Solid lines and filled markers; without mollification they are dashed and open.
    """

    label: str
    colour: str
    marker: str
    mollified: bool

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of ``Axes.plot``."""
        return {
            "label": self.label,
            "color": self.colour,
            "linestyle": "-" if self.mollified else (0, (4, 2)),
            "marker": self.marker,
            "markerfacecolor": self.colour if self.mollified else "white",
            "markeredgecolor": self.colour,
        }


class NothingToShowError(Exception):
    """A figure has no data to show; the message says which are missing."""


def check_matplotlib() -> None:
    """Say what to install where Matplotlib is missing.

    Raises:
        ImportError: It is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("figures need Matplotlib: pip install 'fastmoll[report]'")


@contextmanager
def style() -> Iterator[None]:
    """Matplotlib's settings while a figure is drawn and written; afterwards the user's own are back."""
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()
        parameters: Any = mpl.rcParams  # whose names are types, in some releases
        parameters.update(_STYLE)
        yield


def panels(
    rows: int = 1, columns: int = 1, *, height: float, polar: bool = False, **grid: Any
) -> tuple[Canvas, list[Axes]]:
    """An empty figure of the report's width.

    Args:
        rows: Rows of panels.
        columns: Columns.
        height: Of a row, inches.
        polar: Polar axes.
        grid: Further arguments of ``Figure.subplots``.

    Returns:
        The figure and its panels, row by row. Not known to pyplot: no window, and no closing needed.
    """
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(WIDTH, rows * height), layout="constrained")
    if polar:
        grid["subplot_kw"] = {"projection": "polar"}
    axes = canvas.subplots(rows, columns, squeeze=False, **grid)
    return canvas, list(axes.flat)


def legend_below(canvas: Canvas, *axes: Axes, columns: int | None = None) -> None:
    """One legend for all panels, below them, of what ``axes`` show; the figure grows by its height.

    Args:
        canvas: Figure.
        axes: Panels.
        columns: Columns of a legend of short names and marks; None: as many as fit.
    """
    marks: dict[str, Any] = {} if columns is None else {"handlelength": 1.0, "handletextpad": 0.3, "columnspacing": 1.0}
    found = {label: handle for place in axes for handle, label in zip(*place.get_legend_handles_labels(), strict=True)}
    labels, handles = [*found], [*found.values()]
    if handles:
        if columns is None:
            columns = next(n for n in range(min(5, len(labels)), 0, -1) if n == 1 or _letters(labels, n) <= _ACROSS)
            columns = math.ceil(len(labels) / math.ceil(len(labels) / columns))  # as many in each, as far as it goes
        width, height = canvas.get_size_inches()
        canvas.set_size_inches(width, height + 0.1 + 0.2 * math.ceil(len(labels) / columns))
        canvas.legend(handles, labels, loc="outside lower center", ncols=columns, **marks)


def _letters(labels: Sequence[str], columns: int) -> int:
    """Width of a legend in letters; its columns are filled one after the other, and each has its line or marker."""
    rows = math.ceil(len(labels) / columns)
    return sum(max(map(len, labels[i : i + rows])) + 8 for i in range(0, len(labels), rows))


def diagonal(axes: Axes) -> None:
    """A dotted line where both coordinates are equal, as far as it is in the panel, whose limits stay."""
    low, high = max(0.0, axes.get_xlim()[0], axes.get_ylim()[0]), min(axes.get_xlim()[1], axes.get_ylim()[1])
    limits = (axes.get_xlim(), axes.get_ylim())
    if high - low > 0.15 * min(b - a for a, b in limits):  # not a stub in a corner
        axes.plot([low, high], [low, high], color=INK, linewidth=1, linestyle=":", zorder=0)
        axes.set(xlim=limits[0], ylim=limits[1])


def write(canvas: Canvas, folder: Path, name: str) -> tuple[Path, Path]:
    """Write a figure as ``<name>.png`` and ``<name>.svg``; the same figure gives the same bytes.

    The layout is found once, for the PNG, and each file is drawn once; ``savefig`` would find it for each, and draw
    each twice.

    Returns:
        Both paths.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    canvas.set_dpi(_DPI)
    pixels: Any = FigureCanvasAgg(canvas)
    pixels.print_png(png, metadata={"Software": None})
    canvas.set_layout_engine("none")
    vectors: Any = FigureCanvasSVG(canvas)
    vectors.print_svg(svg, metadata={"Date": None, "Creator": None})
    return png, svg


def slug(*parts: object) -> str:
    """Parts of a file name, in characters that every system takes, and no longer than that either."""
    return "-".join(re.sub(r"[^a-z0-9]+", "_", str(part).lower()).strip("_")[:_LONGEST] for part in parts)


def plain(text: str, longest: int = 60) -> str:
    """A user's text as Matplotlib prints it: no mathematics, and no more of it than fits.

    Signs that the figures' font lacks are printed by their number: boxes would make two names one.

    Args:
        text: The text.
        longest: Letters to print; the middle of a longer one is left out, since names differ at their ends.
    """
    known = _known_signs()
    text = "".join(sign if ord(sign) in known else f"U+{ord(sign):04X} " for sign in text)
    if len(text) > longest:
        text = f"{text[: longest - longest // 2 - 1]}…{text[-(longest // 2) :]}"
    return text.replace("$", r"\$")


@cache
def _known_signs() -> frozenset[int]:
    from matplotlib import font_manager

    return frozenset(font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap())


def words(name: str) -> str:
    """A corruption's name for reading: ``gaussian_noise`` is ``gaussian noise``."""
    return name.replace("_", " ").replace("jpeg", "JPEG").replace(" transform", "")


def listed(items: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else "".join(items)
