"""The HTML page of a report: one file that needs no other, for a screen of any width, and for paper."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

from PIL import Image

from fastmoll.output import replacing
from fastmoll.pipelines.errors import counted
from fastmoll.report.style import Figure, listed, slug
from fastmoll.report.table import Table, as_text

_UPRIGHT: Final = 115  # letters that a table may be wide on an upright page; others are printed across
_LONGEST: Final = 40  # letters of a word that is not broken into lines
_DOTS_PER_PIXEL: Final = 1.6  # figures are written at 160 dots an inch, a page has 96 pixels an inch


def write_page(tables: Sequence[Table], figures: Sequence[Figure], path: Path) -> None:
    """Write the page.

    It loads nothing: styles, a script of its own that sorts the tables, and all figures are in it, and its content
    security policy forbids the rest.

    Args:
        tables: Tables, in their order.
        figures: Figures, in their order. Those without files, and tables without rows, are listed at the end with
            the reason.
        path: File to write; it is replaced in one piece.

    Raises:
        ImportError: Jinja is missing.
        OSError: ``path`` cannot be written.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ImportError("the page needs Jinja: pip install 'fastmoll[report]'") from error

    shown = [figure for figure in figures if figure.svg is not None]
    left_out = [(table.title, table.note) for table in tables if not table.rows]
    left_out += [(figure.title, figure.caption) for figure in figures if figure.svg is None]
    anchors = _Anchors()
    table_items = [_table(table, anchors) for table in tables if table.rows]
    figure_items = [_figure(figure, anchors) for figure in shown]
    template = resources.files("fastmoll.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    text = environment.from_string(template).render(
        summary=_summary(len(table_items), len(shown), len(left_out)),
        contents=[("Tables", "tables", table_items), ("Figures", "figures", figure_items)],
        tables=table_items,
        figures=figure_items,
        left_out=left_out,
        has_mce=any(name.startswith("mCE") for table in tables for name in table.columns),
    )
    with replacing(path) as file:
        file.write(text.encode())


class _Anchors:
    """Names of places on the page, each given once."""

    def __init__(self) -> None:
        self._seen: set[str] = {"tables", "figures", "contents", "content", "left-out"}

    def new(self, title: str) -> str:
        base = slug(title) or "part"
        name, number = base, 2
        while name in self._seen:
            name, number = f"{base}-{number}", number + 1
        self._seen.add(name)
        return name


def _table(table: Table, anchors: _Anchors) -> dict[str, Any]:
    # Where a number must be broken into two lines, then before its "±".
    texts = [[as_text(cell).replace("± ", "±\N{NO-BREAK SPACE}") for cell in row] for row in table.rows]
    # What is the same in all rows stands above them: a phone's width is for what differs.
    shown, common = table.split()
    widths = [max(len(part) for text in column for part in text) for column in _words(table, texts, shown)]
    across = sum(2 + width for width in widths)
    return {
        "anchor": anchors.new(table.title),
        "title": table.title,
        "wide": across > _UPRIGHT,
        "long": max(widths) > _LONGEST,
        "note": table.note,
        "common": common,
        "columns": [{"name": table.columns[place], "number": table.numeric(place)} for place in shown],
        "rows": [[row[place] for place in shown] for row in texts],
    }


def _words(table: Table, texts: list[list[str]], shown: Sequence[int]) -> list[list[list[str]]]:
    """What can't be broken into lines, for each column: words of its head, numbers, words of other cells."""
    numeric = {place: table.numeric(place) for place in shown}  # which looks at all rows
    return [
        [
            table.columns[place].split(),
            *([row[place]] if numeric[place] else row[place].split() or [""] for row in texts),
        ]
        for place in shown
    ]


def _figure(figure: Figure, anchors: _Anchors) -> dict[str, Any]:
    assert figure.png is not None
    assert figure.svg is not None
    with Image.open(figure.png) as picture:
        width, height = (round(side / _DOTS_PER_PIXEL) for side in picture.size)
    return {
        "anchor": anchors.new(figure.title),
        "title": figure.title,
        "caption": figure.caption,
        "data": "data:image/svg+xml;base64," + base64.b64encode(figure.svg.read_bytes()).decode("ascii"),
        "width": width,
        "height": height,
    }


def _summary(tables: int, figures: int, left_out: int) -> str:
    counts = [(tables, "table"), (figures, "figure")]
    parts = [counted(count, noun) for count, noun in counts if count]
    text = f"{listed(parts)}. " if parts else ""
    if left_out:
        text += f"{left_out} more {'has' if left_out == 1 else 'have'} nothing to show; the end says why. "
    return text + ("A click on a column's heading sorts by it." if tables else "")
