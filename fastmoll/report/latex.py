"""A table of a report in LaTeX, laid out as the paper's are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

from fastmoll.report.style import slug
from fastmoll.report.table import Number, Table, Value, as_text
from fastmoll.report.table_parts import MCE, SET

_SIGNS: Final = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # else the length of a line break, where a row begins with it
    "]": "{]}",
    "*": "{*}",
    "`": r"\textasciigrave{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": "$-$",
    "–": "--",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}
_LATIN: Final = 0x17F  # pdfLaTeX prints letters up to here as they are
_BESIDE: Final = 10  # more columns of mean ± deviation would be too small to read across a page
_OF_DATA: Final = ("data", "pixels", "classes", "images")
_COMPARED: Final = (*_OF_DATA, SET)
_SEEDS: Final = "seeds"


def latex(table: Table) -> str:
    """A ``table`` environment of the package booktabs; graphicx fits one that is wider than the text into it.

    Columns as in the paper: heads of several lines; text that all rows share is in the caption; a rule before each new
    block; standard deviations below the means where there are many. Of a table with ``wide`` the data sets stand beside
    each other, in an environment for each network and kind of images that has several rows.
    """
    text = "\n".join(_environment(part, label) for part, label in _beside(table))
    beyond = any(ord(sign) > _LATIN for sign in text)
    lines = [
        r"% \usepackage{booktabs,graphicx}",
        *["% Has letters beyond Latin ones: LuaLaTeX or XeLaTeX, with a font that has them."] * beyond,
    ]
    return "\n".join([*lines, text])


def escape_latex(text: str) -> str:
    """Text with every character that LaTeX takes for a command written so that it is printed."""
    signs = "[" + re.escape("".join(_SIGNS)) + "]|-(?=-)"  # two hyphens would become a dash
    return re.sub(signs, lambda found: _SIGNS.get(found[0], "-{}"), text)


# --- data sets beside each other --------------------------------------------------------------------------------------


def _beside(table: Table) -> list[tuple[Table, str]]:
    """Tables with their labels: of a ``wide`` one several, with data sets beside each other; else the table itself."""
    if not table.wide:
        return [(table, table.name)]
    place = {name: number for number, name in enumerate(table.columns)}
    others = {*table.heads, *_OF_DATA, _SEEDS}
    # Not a table for each network where there is hardly more than a row of each.
    apart = [name for name in table.wide if 2 * len({row[place[name]] for row in table.rows}) <= len(table.rows)]
    if {*table.columns} <= {*others, *apart}:
        apart = apart[1:]  # a row has a name
    keys = [number for number, name in enumerate(table.columns) if name not in {*others, *apart}]
    parts: dict[tuple[Value, ...], list[tuple[Value, ...]]] = {}
    for row in table.rows:
        parts.setdefault(tuple(row[place[name]] for name in apart), []).append(row)
    return [
        (_pivot(table, rows, place, keys, dict(zip(apart, values, strict=True))), slug(table.title, *values))
        for values, rows in parts.items()
    ]


def _pivot(
    table: Table,
    rows: Sequence[tuple[Value, ...]],
    place: dict[str, int],
    keys: list[int],
    said: dict[str, Value],
) -> Table:
    """Some rows, named by the columns ``keys``, with the figures of each data set beside each other."""
    figures = [number for number, name in enumerate(table.columns) if name in table.heads]
    of_data = [place[name] for name in _OF_DATA if name in place]
    order = [keys.index(place[name]) for name in table.rules if place.get(name) in keys]
    found: dict[str, dict[tuple[Value, ...], tuple[Value, ...]]] = {}
    for row in rows:
        data = ", ".join([str(row[of_data[0]]), *(f"{row[x]} {table.columns[x]}" for x in of_data[1:])])
        there, key = found.setdefault(data, {}), tuple(row[x] for x in keys)
        # Those that look alike are as many rows.
        there[(*key, sum(other[:-1] == key for other in there))] = row
    names = list(dict.fromkeys(key for there in found.values() for key in there))
    blocks = list(dict.fromkeys(tuple(key[x] for x in order) for key in names))
    names.sort(key=lambda key: blocks.index(tuple(key[x] for x in order)))
    # Those of a data set that nothing was measured of, as mCE, have no column there.
    shown = [
        (data, there, x)
        for data, there in found.items()
        for x in figures
        if any(row[x] is not None for row in there.values())
    ]
    heads = {f"{data}: {table.columns[x]}": (data, *table.heads[table.columns[x]]) for data, _, x in shown}
    cells = [(*key[:-1], *(there[key][x] if key in there else None for _, there, x in shown)) for key in names]
    explained = any(name.startswith("mCE") for *_, name in heads.values())
    seeds = " or ".join(sorted({str(row[place[_SEEDS]]) for row in rows}, key=int))
    return replace(
        table,
        title=", ".join([table.title, *(f"{name} {value}" for name, value in said.items()), f"seeds {seeds}"]),
        note=table.note if explained else table.note.replace(f" {MCE}", ""),
        columns=(*(table.columns[x] for x in keys), *heads),
        rows=tuple(cells),
        heads=heads,
        wide=(),
        best=tuple(f"{data}: {name}" for data in found for name in table.best),
    )


def _best(table: Table) -> set[tuple[int, int]]:
    """Row and column of the lowest figure of each column, and of those that are printed like it.

    Compared are rows of the same data and images.
    """
    found = set()
    alike = [number for number, name in enumerate(table.columns) if name in _COMPARED]
    blocks: dict[tuple[Value, ...], list[int]] = {}
    for number, row in enumerate(table.rows):
        blocks.setdefault(tuple(row[x] for x in alike), []).append(number)
    for column in (number for number, name in enumerate(table.columns) if name in table.best):
        for numbers in blocks.values():
            cells = [(x, cell) for x in numbers if isinstance(cell := table.rows[x][column], Number)]
            if len(cells) > 1:
                lowest = str(_alone(min((cell for _, cell in cells), key=lambda cell: cell.value)))
                found |= {(x, column) for x, cell in cells if str(_alone(cell)) == lowest}
    return found


# --- the environment --------------------------------------------------------------------------------------------------


def _environment(table: Table, label: str) -> str:
    shown, common = table.split()
    align = "".join("r" if table.numeric(column) else "l" for column in shown)
    depth = max(map(len, table.heads.values()), default=1)
    heads = [table.heads.get(name, (*[""] * (depth - 1), name)) for name in (table.columns[x] for x in shown)]
    below = sum(any(_has_deviation(row[x]) for row in table.rows) for x in shown) > _BESIDE
    best = _best(table)
    bold = "In bold: the lowest mean, whatever its deviation." if best else ""
    body: list[str] = []
    rules = [column for column in shown if table.columns[column] in table.rules]
    before: list[Value] = []
    for number, row in enumerate(table.rows):
        block = [row[column] for column in rules]
        if body and block != before:
            body.append(r"\midrule")
        before = block
        body.append(_line(_cell(row[x], below, (number, x) in best) for x in shown))
        if below and any(_has_deviation(row[column]) for column in shown):
            texts = (x.spread if isinstance(x, Number) else "" for x in (row[column] for column in shown))
            body.append(_line(text and rf"{{\scriptsize $\pm$ {text}}}" for text in texts).strip())
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{escape_latex(' '.join(filter(None, (f'{table.title}.', common, table.note, bold))))}}}",
            rf"\label{{tab:{label}}}",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{{align}}}",
            r"\toprule",
            *(line for level in range(1, depth) for line in _groups([head[:level] for head in heads])),
            _line(escape_latex(head[-1]) for head in heads),
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}%",
            r"}",
            r"\end{table}",
            "",
        ]
    )


def _groups(heads: Sequence[tuple[str, ...]]) -> list[str]:
    """An upper line of the head, with a rule under each part of it; nothing where there are no parts."""
    if not any(head[-1] for head in heads):
        return []
    cells, rules, place = [], [], 1
    for head, members in groupby(heads):
        width = len([*members])
        if head[-1]:
            cells.append(rf"\multicolumn{{{width}}}{{c}}{{{escape_latex(head[-1])}}}")
            rules.append(rf"\cmidrule(lr){{{place}-{place + width - 1}}}")
        else:
            cells += [""] * width
        place += width
    return [_line(cells).strip(), "".join(rules)]


def _line(texts: Iterable[str]) -> str:
    return " & ".join(texts) + r" \\"


def _cell(cell: Value, alone: bool, bold: bool) -> str:
    """A cell; of the best figure only the mean is bold, as that alone is compared."""
    if not bold:
        return escape_latex(as_text(_alone(cell) if alone else cell))
    mean = rf"\textbf{{{escape_latex(as_text(_alone(cell)))}}}"
    return mean if alone or not isinstance(cell, Number) or not cell.spread else rf"{mean} $\pm$ {cell.spread}"


def _alone(cell: Value) -> Value:
    return replace(cell, deviation=None) if isinstance(cell, Number) else cell


def _has_deviation(cell: Value) -> bool:
    return isinstance(cell, Number) and cell.deviation is not None
