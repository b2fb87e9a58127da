"""A table of a report, and how it is written as Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from fastmoll.escape import escape_csv, escape_markdown
from fastmoll.report.runs import Statistic
from fastmoll.report.style import slug

NONE: Final = "–"
"""What stands where there is no figure."""
_LARGE: Final = 1e6


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
        text = f"{self.value:{'+' if self.signed else ''}{_form(self.value, self.digits)}}"
        if float(text) == 0:
            text = text.lstrip("+-")  # a difference that rounds to none has no sign
        text = text.replace("-", "−")
        return text if self.deviation is None else f"{text} ± {self.spread}"

    @property
    def spread(self) -> str:
        """The standard deviation, as it is shown; empty where there is none."""
        digits = self.digits if self.deviation_digits is None else self.deviation_digits
        return "" if self.deviation is None else f"{self.deviation:{_form(self.deviation, digits)}}"


def _form(value: float, digits: int) -> str:
    """How a figure is written: the loss of a network that diverged would have more digits than anybody reads."""
    return f".{digits}f" if abs(value) < _LARGE else ".2e"


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
        heads: By the name of a column, its head in several lines, the upper ones shared by neighbours. This and all
            below is for LaTeX alone, whose tables are laid out as the paper's.
        rules: Columns at whose changes a rule is set.
        best: Columns of figures of which the lowest is bold.
        wide: Where it isn't empty, the data sets stand beside each other: the columns with ``heads`` are there for each
            of them. Rows that differ in one of the columns named here go into tables of their own, unless these would
            have hardly more than a row each.

    Raises:
        ValueError: a row is longer or shorter than the head, or two columns have one name.
    """

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    heads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rules: tuple[str, ...] = ("data", "net")
    best: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()

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

    def split(self) -> tuple[list[int], str]:
        """Columns to show where width is dear, and a sentence on those without figures that are the same in all rows.

        At least one is shown: where all are such columns, the first.
        """
        common = [
            place
            for place, cells in enumerate(zip(*self.rows, strict=True))
            if len(cells) > 1
            and not any(isinstance(cell, Number) for cell in cells)
            and len({as_text(cell) for cell in cells}) == 1
        ]
        if len(common) == len(self.columns):
            common = common[1:]
        said = [f"{self.columns[x]} {as_text(self.rows[0][x])}" for x in common if self.rows[0][x] is not None]
        shown = [place for place in range(len(self.columns)) if place not in common]
        return shown, f"In all rows: {', '.join(said)}." if said else ""

    def markdown(self) -> str:
        """Heading, pipe table and note, for reading as it is too."""
        lines = [[escape_markdown(as_text(cell)) for cell in line] for line in (self.columns, *self.rows)]
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
        head, note = map(escape_markdown, (self.title, self.note))
        return "\n".join([f"## {head}", "", *([*table, ""] if self.rows else []), note, ""])

    def csv(self) -> str:
        """Unrounded, standard deviations in columns of their own, empty where there is no figure.

        Text that a spreadsheet would take for a formula has an apostrophe before it.
        """
        spread = [any(_deviation(row[column]) is not None for row in self.rows) for column in range(len(self.columns))]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_flat(((head, f"{head} sd") for head in self.columns), spread))
        for row in self.rows:
            writer.writerow(_flat(((_plain(cell), _deviation(cell)) for cell in row), spread))
        return text.getvalue()


def _plain(cell: Value) -> str | int | float | None:
    if isinstance(cell, str):
        return escape_csv(cell)
    return cell.value if isinstance(cell, Number) else cell


def _deviation(cell: Value) -> float | None:
    return cell.deviation if isinstance(cell, Number) else None


def _flat(pairs: Iterable[tuple[object, object]], both: Sequence[bool]) -> list[object]:
    return [item for pair, two in zip(pairs, both, strict=True) for item in pair[: 1 + two]]
