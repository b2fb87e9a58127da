"""``fastmoll report``: the paper's tables and figures from finished evaluations."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

_SHOWN: Final = 3  # of what is left out for the same reason


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
        epilog="Error in %, NLL in nats and ECE, how far confidence is from the share of right answers: lower is "
        "better; the page explains them. Exit status: 0 written, 2 bad input, before anything is written, "
        "130 interrupted, 143 ended by SIGTERM.",
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
    report.add_argument(
        "-v", "--verbose", action="store_true", help="name everything that is left out, each on a line of its own"
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
    from fastmoll.report.read import find_runs, find_unevaluated, find_unfinished
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
    unfinished = [folder for path in args.runs for folder in find_unfinished(path)]
    unevaluated = [path for path in others if not find_unfinished(path)]
    unevaluated += [run for path in runs for run in find_unevaluated(path)]
    left_out = [("no evaluation", str(path)) for path in unevaluated]
    left_out += [("not all 75 cells are evaluated", str(folder)) for folder in unfinished]
    left_out += [(error.reason, str(error.path)) for error in written.unread]
    left_out += [(table.note, table.title) for table in written.tables if not table.rows]
    left_out += [(figure.caption, figure.title) for figure in written.figures if figure.png is None]
    lines = _grouped(left_out, verbose=args.verbose)
    lines.append(
        f"{len(tables)} tables and {len(figures)} figures in {written.page.parent}; the page is {written.page}"
    )
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _grouped(left_out: Iterable[tuple[str, str]], *, verbose: bool) -> list[str]:
    """A line for each reason, which names the first things that are left out for it; or all, in lines of their own."""
    reasons: dict[str, list[str]] = {}
    for reason, name in left_out:
        names = reasons.setdefault(reason[:1].lower() + reason[1:].removesuffix("."), [])
        if name not in names:
            names.append(name)
    lines = []
    for reason, names in reasons.items():
        head = f"left out ({len(names)}): {reason}:"
        if verbose and len(names) > 1:
            lines += [head, *(f"  {name}" for name in names)]
            continue
        more = [f"{len(names) - _SHOWN} more (-v names them)"] if len(names) > _SHOWN else []
        lines.append(f"{head} {', '.join([*names[:_SHOWN], *more])}")
    return lines
