"""A report on finished evaluations: the paper's tables and figures, and one HTML page with all of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Final

from fastmoll.output import check_writable, replacing, write_json
from fastmoll.report.figures import all_figures
from fastmoll.report.latex import latex
from fastmoll.report.page import write_page
from fastmoll.report.pairs import in_order
from fastmoll.report.read import BadEvaluation, find_runs, read_run
from fastmoll.report.runs import RunResult, group_seeds
from fastmoll.report.style import Figure, check_matplotlib
from fastmoll.report.table import Table
from fastmoll.report.tables import all_tables
from fastmoll.report.weights import changed_weights

PAGE: Final = "report.html"
LIST: Final = "report.json"
"""Names the files of a report: what else is in its folder is not the report's to replace or to remove."""
_TABLES: Final = "tables"
_FIGURES: Final = "figures"
_WRITER: Final = "fastmoll report"
_ENDINGS: Final = {_TABLES: (".md", ".csv", ".tex"), _FIGURES: (".png", ".svg")}


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes:
        page: The HTML page.
        tables: Tables; one without rows was left out, and its note says why.
        figures: Figures; one without files was left out, and its caption says why.
        unread: Evaluations that were left out as their file is damaged, or their weights were changed after it, each
            with what is wrong with it.
    """

    page: Path
    tables: list[Table]
    figures: list[Figure]
    unread: list[BadEvaluation]


def report(runs: Sequence[str | Path], out: str | Path, *, images: str | Path | None = None) -> Report:
    """Write ``tables/*.md``, ``.csv`` and ``.tex``, ``figures/*.png`` and ``.svg``, and ``report.html`` with all of it.

    ``report.json`` lists these files. In the folder of an earlier report the files that its list names are replaced or
    removed; any other file stays.

    Args:
        runs: Evaluations, each a ``robustness.json`` or a folder as :func:`fastmoll.report.read.find_runs` takes it.
            One that is named twice is taken once; those that differ in their seed alone are averaged. One whose file is
            damaged, or whose weights were changed after it, is left out, unless nothing else is there.
        out: Folder to write into: a new or an empty one, or that of an earlier report.
        images: The user's images, for the figures that need pictures.

    Raises:
        ValueError: no run can be read, two files are of one run, ``images`` cannot be read, or ``out`` holds something
            else than a report, or another file where one of the report's would be, or can't be written to.
        ImportError: Matplotlib is missing.
        OSError: ``out`` cannot be written.
    """
    check_matplotlib()
    if not runs:
        raise ValueError("runs must name at least one evaluation, got none")
    paths: dict[Path, Path] = {}  # by where they lie: folders may overlap, and have links
    for run in runs:
        for path in find_runs(run):
            paths.setdefault(path.resolve(), path)
    read, unread = _read(paths.values())
    if not read:
        raise unread[0]
    groups = in_order(group_seeds(read))
    folder = Path(out)
    earlier = _listed(folder)
    # Elsewhere first: what fails until all is drawn leaves an earlier report as it was.
    with TemporaryDirectory(prefix="fastmoll-report-") as name:
        made = Path(name)
        figures = all_figures(groups, made / _FIGURES, images=images)
        tables = all_tables(groups)
        (made / _TABLES).mkdir()
        for table in tables:
            if table.rows:
                for ending, text in zip(_ENDINGS[_TABLES], (table.markdown(), table.csv(), latex(table)), strict=True):
                    (made / _TABLES / f"{table.name}{ending}").write_text(text, encoding="utf-8")
        write_page(tables, figures, made / PAGE)
        _install(made, folder, earlier)
    figures = [
        replace(
            figure,
            png=figure.png and folder / figure.png.relative_to(made),
            svg=figure.svg and folder / figure.svg.relative_to(made),
        )
        for figure in figures
    ]
    return Report(folder / PAGE, tables, figures, unread)


def _read(paths: Iterable[Path]) -> tuple[list[RunResult], list[BadEvaluation]]:
    """The evaluations that hold, and what is wrong with the others."""
    read: list[RunResult] = []
    unread: list[BadEvaluation] = []
    for path in paths:
        try:
            run = read_run(path)
            if reason := changed_weights(run):
                raise BadEvaluation(path, reason)
            read.append(run)
        except BadEvaluation as error:
            unread.append(error)
    return read, unread


def _install(made: Path, folder: Path, earlier: set[str]) -> None:
    """Put a report's files in place and remove those of the earlier one that it has not."""
    files = sorted(file.relative_to(made).as_posix() for file in made.rglob("*") if file.is_file())
    for file in files:
        if file not in earlier and (folder / file).exists():
            raise ValueError(f"out: {folder / file} is no file of the earlier report; move it or choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    # The list comes first, so that one that is killed here can be made again.
    _write_list(folder, earlier.union(files))
    for file in files:
        (folder / file).parent.mkdir(exist_ok=True)
        with replacing(folder / file) as target:
            target.write((made / file).read_bytes())
    for file in earlier.difference(files):
        (folder / file).unlink(missing_ok=True)
    _write_list(folder, files)


def _write_list(folder: Path, files: Iterable[str]) -> None:
    write_json(folder / LIST, {"written_by": _WRITER, "files": sorted(files)})


def _listed(folder: Path) -> set[str]:
    """The files of the report that a folder holds; none where it is new or empty.

    Raises:
        ValueError: it holds something else, is no folder or in none, or can't be written to.
    """
    check_writable("out", folder)
    others = sorted(item.name for item in folder.iterdir()) if folder.is_dir() else []
    if not others:
        return set()
    place = folder / LIST
    if not place.is_file():
        raise ValueError(f"out: {folder} holds something else than a report ({others[0]}); choose another folder")
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
        known = content["written_by"] == _WRITER and all(map(_is_ours, content["files"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        known = False
    if not known:
        raise ValueError(f"out: {place} is no list of a report's files; choose another folder")
    return {*content["files"]}


def _is_ours(name: str) -> bool:
    """Whether a report may write a file of that name: a list that was tampered with must not remove others."""
    path = PurePosixPath(name)
    return name == PAGE or (name == f"{path.parent}/{path.name}" and path.suffix in _ENDINGS.get(str(path.parent), ()))
