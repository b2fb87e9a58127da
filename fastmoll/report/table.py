"""A table of a report, and how it is written as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from fastmoll.report.runs import Statistic
from fastmoll.report.style import slug

NONE: Final = "–"
"""What stands where there is no figure."""
_LATEX: Final = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


@dataclass(frozen=True)
class Number:
    """A figure with as many digits as are shown of it.

    Attributes:
        value: The figure, unrounded.
        deviation: Its standard deviation; None where there is none.
        digits: Decimals to show.
        signed: Whether a plus sign is shown, as of a difference.
        deviation_digits: Decimals of the standard deviation; None: as many.
    """

    value: float
    deviation: float | None = None
    digits: int = 2
    signed: bool = False
    deviation_digits: int | None = None

    @classmethod
    def of(cls, statistic: Statistic, digits: int = 2, signed: bool = False) -> Number:
        """Mean and standard deviation of a figure over seeds."""
        return cls(statistic.mean, statistic.deviation, digits, signed)

    def __str__(self) -> str:
        text = f"{self.value:{'+' if self.signed else ''}.{self.digits}f}"
        if float(text) == 0:
            text = text.lstrip("+-")  # a difference that rounds to none has no sign
        text = text.replace("-", "−")
        digits = self.digits if self.deviation_digits is None else self.deviation_digits
        return text if self.deviation is None else f"{text} ± {self.deviation:.{digits}f}"


Value = str | int | Number | None
"""A cell of a table; None: there is no figure."""


def as_text(value: Value) -> str:
    """A cell for reading: ``"4.00 ± 0.10"``, and a dash where there is no figure."""
    return NONE if value is None else str(value)


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: Heading.
        note: What the figures are; a table without rows says here why.
        columns: Head of each column, all different.
        rows: Cells of each row.

    Raises:
        ValueError: a row is longer or shorter than the head, or two columns have one name.
    """

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]

    def __post_init__(self) -> None:
        if len({*self.columns}) != len(self.columns):
            raise ValueError(f"columns must have different names, got {self.columns}")
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {len(self.columns)} cells is needed, got {row}")

    @property
    def name(self) -> str:
        """File name without its ending."""
        return slug(self.title)

    def numeric(self, column: int) -> bool:
        """Whether a column holds numbers, which stand to its right."""
        cells = [row[column] for row in self.rows if row[column] is not None]
        return bool(cells) and all(isinstance(cell, int | Number) for cell in cells)

    def markdown(self) -> str:
        """Heading, pipe table and note, for reading as it is too."""
        lines = [[cell.replace("|", "\\|") for cell in line] for line in (self.columns, *self._texts())]
        right = [self.numeric(column) for column in range(len(self.columns))]
        widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
        padded = [
            [
                cell.rjust(width) if to_right else cell.ljust(width)
                for cell, width, to_right in zip(line, widths, right, strict=True)
            ]
            for line in lines
        ]
        padded.insert(
            1, ["-" * (width - to_right) + ":" * to_right for width, to_right in zip(widths, right, strict=True)]
        )
        table = ["| " + " | ".join(line) + " |" for line in padded]
        return "\n".join([f"## {self.title}", "", *([*table, ""] if self.rows else []), self.note, ""])

    def csv(self) -> str:
        """Unrounded, standard deviations in columns of their own, empty where there is no figure."""
        spread = [any(_deviation(row[column]) is not None for row in self.rows) for column in range(len(self.columns))]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_flat(((head, f"{head} sd") for head in self.columns), spread))
        for row in self.rows:
            writer.writerow(_flat(((_plain(cell), _deviation(cell)) for cell in row), spread))
        return text.getvalue()

    def latex(self) -> str:
        """A ``table`` environment of the package booktabs; graphicx fits one that is wider than the text into it."""
        align = "".join("r" if self.numeric(column) else "l" for column in range(len(self.columns)))
        head, *body = [" & ".join(map(escape_latex, line)) + r" \\" for line in (self.columns, *self._texts())]
        return "\n".join(
            [
                r"% \usepackage{booktabs,graphicx}",
                r"\begin{table}",
                r"\centering",
                rf"\caption{{{escape_latex(self.title)}. {escape_latex(self.note)}}}",
                rf"\label{{tab:{self.name}}}",
                r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
                rf"\begin{{tabular}}{{{align}}}",
                r"\toprule",
                head,
                r"\midrule",
                *body,
                r"\bottomrule",
                r"\end{tabular}",
                r"}",
                r"\end{table}",
                "",
            ]
        )

    def _texts(self) -> list[list[str]]:
        return [[as_text(cell) for cell in row] for row in self.rows]


def _plain(cell: Value) -> str | int | float | None:
    return cell.value if isinstance(cell, Number) else cell


def _deviation(cell: Value) -> float | None:
    return cell.deviation if isinstance(cell, Number) else None


def _flat(pairs: Iterable[tuple[object, object]], both: Sequence[bool]) -> list[object]:
    return [item for pair, two in zip(pairs, both, strict=True) for item in pair[: 1 + two]]


def escape_latex(text: str) -> str:
    """Text with every character that LaTeX takes for a command written so that it is printed."""
    return re.sub("[" + re.escape("".join(_LATEX)) + "]", lambda found: _LATEX[found[0]], text)
