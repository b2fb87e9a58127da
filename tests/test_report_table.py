"""A table is written whole as Markdown and CSV, whatever its cells hold."""

from __future__ import annotations

import csv
import io
import re

import pytest
from fake_runs import ODD, TABLE, several_groups

from fastmoll.escape import escape_markdown
from fastmoll.report.runs import Group
from fastmoll.report.table import Number, Table, Value, as_text
from fastmoll.report.tables import all_tables


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> list[Group]:
    return several_groups(tmp_path_factory.mktemp("runs"))


def test_markdown_is_aligned_escaped_and_rounded() -> None:
    assert TABLE.markdown() == (
        "## A title: 50 % of #1\n\n"
        "| name       | count |    error, % |\n"
        "| ---------- | ----: | ----------: |\n"
        "| a_b\\|c & d |     3 | 0.33 ± 0.05 |\n"
        "| \\~^\\\\{}\\$  |    10 |        −2.5 |\n"
        "| ü \\<x>     |     7 |           – |\n\n"
        "A note on a_b.\n"
    )


def test_csv_is_unrounded_with_deviations_in_columns_of_their_own() -> None:
    read = list(csv.reader(io.StringIO(TABLE.csv())))
    assert read[0] == ["name", "count", "error, %", "error, % sd"]
    assert [row[0] for row in read[1:]] == ["a_b|c & d", "~^\\{}$", "ü <x>"]
    assert [row[2:] for row in read[1:]] == [[repr(1 / 3), "0.046"], ["-2.5", ""], ["", ""]]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Number(12.3456), "12.35"),
        (Number(0.04, 0.001, 2, deviation_digits=3), "0.04 ± 0.001"),
        (Number(0.04, None, 1, signed=True), "0.0"),
        (Number(-0.04, None, 1, signed=True), "0.0"),
        (Number(3.0, None, 1, signed=True), "+3.0"),
        (Number(-3.0, 0.5, 1), "−3.0 ± 0.5"),
        (Number(3.4e38, 1.2e37, 3), "3.40e+38 ± 1.20e+37"),
        (None, "–"),
        (7, "7"),
        ("text", "text"),
    ],
)
def test_a_cell_is_read_with_its_digits(value: Value, text: str) -> None:
    assert as_text(value) == text


def test_a_table_has_as_many_cells_as_heads() -> None:
    with pytest.raises(ValueError, match="a row of 2 cells is needed"):
        Table("t", "", ("a", "b"), ((1,),))
    with pytest.raises(ValueError, match="columns must have different names"):
        Table("t", "", ("a", "a"), ())


def test_every_table_is_written_in_every_format(groups: list[Group]) -> None:
    tables = [table for table in all_tables(groups) if table.rows]
    assert len({table.name for table in tables}) == len(tables) == 8
    for table in tables:
        assert re.fullmatch(r"[a-z0-9_]+", table.name)
        pipes = [line for line in table.markdown().splitlines() if line.startswith("|")]
        assert len(pipes) == 2 + len(table.rows) and len({len(line) for line in pipes}) == 1
        read = list(csv.reader(io.StringIO(table.csv())))
        assert len(read) == 1 + len(table.rows) and len({len(row) for row in read}) == 1


def test_odd_names_are_printed_as_they_are_in_every_format() -> None:
    rows = tuple((name, Number(1.5, 0.25, 1)) for name in ODD)
    table = Table("Odd", ODD[2], ("data", "error, %"), rows)
    assert [row[0] for row in csv.reader(io.StringIO(table.csv()))][1:] == [*ODD]
    cells = [line[2:].split(" | ")[0].rstrip() for line in table.markdown().splitlines() if line.startswith("|")]
    # What CommonMark takes away again: a backslash before a sign.
    assert [re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", cell) for cell in cells[2:]] == [*ODD]
    assert not any(re.search(r"(?<!\\)[<*`$\[]", cell) for cell in cells[2:])
    assert escape_markdown("data.batch_size=32 a < b") == r"data.batch_size=32 a \< b"


def test_a_table_whose_rows_are_all_alike_keeps_its_first_column() -> None:
    table = Table("Alike", "", ("data", "net", "settings"), (("digits", "wrn", None), ("digits", "wrn", None)))
    assert table.split() == ([0], "In all rows: net wrn.")
    assert Table("None", "why", (), ()).split() == ([], "")


def test_counts_that_are_the_same_in_all_rows_need_no_column_but_figures_do() -> None:
    columns = ("augmentation", "seeds", "pixels", "error, %")
    table = Table("T", "", columns, (("none", 3, 32, Number(1.0)), ("fcr", 3, 64, Number(1.0))))
    assert table.split() == ([0, 2, 3], "In all rows: seeds 3.")


def test_text_that_a_spreadsheet_would_calculate_is_text() -> None:
    names = ("=1+1", "+x", "-x", "@SUM(A1)", "\t=1", "a=1", "'=1")
    rows = tuple((name, Number(-1.5, None, 1, signed=True)) for name in names)
    read = [*csv.reader(io.StringIO(Table("T", "", ("net", "difference"), rows).csv()))][1:]
    assert [row[0] for row in read] == ["'=1+1", "'+x", "'-x", "'@SUM(A1)", "'\t=1", "a=1", "'=1"]
    assert {row[1] for row in read} == {"-1.5"}
