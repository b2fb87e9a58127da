"""A report on finished evaluations: the paper's tables and figures, and one HTML page with all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastmoll.report_figures import all_figures
from fastmoll.report_page import write_page
from fastmoll.report_runs import find_runs, group_seeds, read_run
from fastmoll.report_style import Figure, check_matplotlib
from fastmoll.report_table import Table
from fastmoll.report_tables import all_tables, in_order

PAGE: Final = "report.html"
_TABLES: Final = "tables"
_FIGURES: Final = "figures"
_ENDINGS: Final = {_TABLES: (".md", ".csv", ".tex"), _FIGURES: (".png", ".svg")}


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes:
        page: The HTML page.
        tables: Tables; one without rows was left out, and its note says why.
        figures: Figures; one without files was left out, and its caption says why.
    """

    page: Path
    tables: list[Table]
    figures: list[Figure]


def report(runs: Sequence[str | Path], out: str | Path, *, images: str | Path | None = None) -> Report:
    """Write ``tables/*.md``, ``.csv`` and ``.tex``, ``figures/*.png`` and ``.svg``, and ``report.html`` with all of it.

    Args:
        runs: Evaluations, each a ``robustness.json`` or a folder as :func:`fastmoll.report_runs.find_runs` takes it.
            Those that differ in their seed alone are averaged.
        out: Folder to write into: a new or an empty one, or that of an earlier report, which is replaced.
        images: The user's images, for the figures that need pictures.

    Raises:
        ValueError: a run cannot be read or is there twice, ``images`` cannot be read, or ``out`` holds something else.
        ImportError: Matplotlib is missing.
        OSError: ``out`` cannot be written.
    """
    check_matplotlib()
    if not runs:
        raise ValueError("runs must name at least one evaluation, got none")
    groups = in_order(group_seeds(read_run(path) for run in runs for path in find_runs(run)))
    folder = Path(out)
    _check(folder)
    # First, because it may find that the images cannot be read.
    figures = all_figures(groups, folder / _FIGURES, images=images)
    tables = all_tables(groups)
    written = {file for figure in figures for file in (figure.png, figure.svg) if file is not None}
    (folder / _TABLES).mkdir(parents=True, exist_ok=True)
    for table in tables:
        if table.rows:
            for ending, text in zip(_ENDINGS[_TABLES], (table.markdown(), table.csv(), table.latex()), strict=True):
                file = folder / _TABLES / f"{table.name}{ending}"
                file.write_text(text, encoding="utf-8")
                written.add(file)
    write_page([table for table in tables if table.rows], figures, folder / PAGE)
    # What an earlier report left may be of other runs.
    for name, endings in _ENDINGS.items():
        for file in (folder / name).iterdir():
            if file.suffix in endings and file not in written:
                file.unlink()
    return Report(folder / PAGE, tables, figures)


def _check(folder: Path) -> None:
    """Refuse a folder that holds other things: a report's files would mix with them, or replace them."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out: {folder} is not a folder")
    others = {item.name for item in folder.iterdir()} if folder.is_dir() else set()
    others -= {PAGE, f"{PAGE}.part", *_ENDINGS}
    if others:
        raise ValueError(f"out: {folder} holds something else than a report ({min(others)}); choose another folder")
