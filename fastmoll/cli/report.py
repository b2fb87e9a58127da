"""``fastmoll report``: the paper's tables and figures from finished evaluations."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Add the command's parser.

    Args:
        commands: Sub-parsers of the ``fastmoll`` command.
    """
    report = commands.add_parser(
        "report",
        help="tables, figures and an HTML page from finished evaluations",
        description="Make the paper's tables (Markdown, CSV, LaTeX) and figures (PNG, SVG) from evaluations of "
        "fastmoll evaluate, put what the paper prints beside what was measured, and write one HTML page with all of "
        "it, which needs no other file. Runs that differ in their seed alone are averaged, but never official with "
        "generated images.",
        epilog="Exit status: 0 written, 2 bad input, before anything is written.",
        allow_abbrev=False,
    )
    report.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folder of a run that was evaluated, of one of its evaluations, or of many runs (a sweep's), or a "
        "robustness.json",
    )
    report.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("report"),
        metavar="DIR",
        help="folder to write: a new one, or an earlier report's, which is replaced (default: report)",
    )
    report.add_argument(
        "--images",
        type=Path,
        metavar="FOLDER",
        help="folder of images, or a small data set, for the figures that need pictures: information against blur, "
        "the corruptions and their spectra (default: these are left out)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the report and say where it is.

    Args:
        args: The command's arguments.

    Returns:
        Exit status 0.

    Raises:
        ValueError: bad input, named.
        ImportError: Matplotlib is missing.
        OSError: the folder cannot be written.
    """
    from fastmoll.report.read import find_runs, find_unfinished
    from fastmoll.report.write import report

    # A shell's runs/* has the tables of a sweep in it, and runs that nobody has evaluated.
    others: dict[Path, str] = {}
    for path in args.runs:
        if path.is_file() and path.suffix != ".json":
            others[path] = f"{path} is no evaluation: name a run's folder or a robustness.json"
        elif path.is_dir():
            try:
                find_runs(path)
            except ValueError as error:
                others[path] = str(error)
    runs = [path for path in args.runs if path not in others]
    if not runs:
        raise ValueError(next(iter(others.values())))
    written = report(runs, args.out, images=args.images)
    tables = [table for table in written.tables if table.rows]
    figures = [figure for figure in written.figures if figure.png is not None]
    left_out = [(table.title, table.note) for table in written.tables if not table.rows]
    left_out += [(figure.title, figure.caption) for figure in written.figures if figure.png is None]
    unfinished = [folder for path in args.runs for folder in find_unfinished(path)]
    lines = [f"left out: {path}: no evaluation" for path in others if not find_unfinished(path)]
    lines += [f"left out: {folder}: not all 75 cells are evaluated" for folder in unfinished]
    lines += [f"left out: {title}: {reason}" for title, reason in left_out]
    lines.append(
        f"{len(tables)} tables and {len(figures)} figures in {written.page.parent}; the page is {written.page}"
    )
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0
