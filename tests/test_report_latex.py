"""LaTeX takes the tables, which are laid out as the paper's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fake_runs import ODD, TABLE, fake_result, find, groups_of, several_groups, write_run

from fastmoll.paper import published
from fastmoll.report.latex import escape_latex, latex
from fastmoll.report.pairs import in_order
from fastmoll.report.read import read_run
from fastmoll.report.runs import Group, group_seeds
from fastmoll.report.table import Number, Table
from fastmoll.report.tables import all_tables, architectures, benchmark


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> list[Group]:
    return several_groups(tmp_path_factory.mktemp("runs"))


def test_latex_is_a_booktabs_table_that_prints_every_character() -> None:
    lines = latex(TABLE).splitlines()
    assert r"\caption{A title: 50 \% of \#1. A note on a\_b.}" in lines and r"\begin{tabular}{lrr}" in lines
    rules = [line for line in lines if re.fullmatch(r"\\(top|mid|bottom)rule", line)]
    assert rules == [r"\toprule", r"\midrule", r"\bottomrule"]
    assert r"name & count & error, \% \\" in lines
    assert r"a\_b\textbar{}c \& d & 3 & 0.33 $\pm$ 0.05 \\" in lines
    assert r"\textasciitilde{}\textasciicircum{}\textbackslash{}\{\}\$ & 10 & $-$2.5 \\" in lines
    text = latex(TABLE)
    assert [x for x in re.findall(r"\\(begin|end)\{(\w+)\}", text)] == [
        ("begin", "table"),
        ("begin", "tabular"),
        ("end", "tabular"),
        ("end", "table"),
    ]
    assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")
    assert escape_latex("a−b – ±") == r"a$-$b -- $\pm$"


def assert_latex(text: str) -> None:
    """Tables that LaTeX takes: every row has as many cells as there are columns, and all that opens closes."""
    body = re.sub(r"\\[\\{}&%$#_]", lambda x: r"\\" if x[0] == r"\\" else "", text)
    assert text.splitlines()[0] == r"% \usepackage{booktabs,graphicx}"
    for part in body.split(r"\begin{table}")[1:]:
        assert part.count("{") == part.count("}") and part.count("$") % 2 == 0
        opened = ["table"]
        for what, name in re.findall(r"\\(begin|end)\{(\w+)\}", part):
            assert what == "begin" or opened.pop() == name
            if what == "begin":
                opened.append(name)
        assert opened == []
        (columns,) = re.findall(r"\\begin\{tabular\}\{([lr]+)\}", part)
        rows = [line for line in part.splitlines() if line.endswith(r"\\")]
        assert len(rows) > 1
        for row in rows:
            spans = [int(x) for x in re.findall(r"\\multicolumn\{(\d+)\}", row)]
            assert row.count("&") + 1 + sum(spans) - len(spans) == len(columns), row
            assert not row.startswith(("[", "*"))
        for a, b in re.findall(r"\\cmidrule\(lr\)\{(\d+)-(\d+)\}", part):
            assert 1 < int(a) <= int(b) <= len(columns)
    labels = re.findall(r"\\label\{[^}]*\}", body)
    assert labels and len({*labels}) == len(labels)


def test_every_table_and_every_name_is_taken(groups: list[Group]) -> None:
    for table in all_tables(groups):
        if table.rows:
            assert_latex(latex(table))
    text = latex(Table("Odd", ODD[2], ("data", "error, %"), tuple((name, Number(1.5, 0.25, 1)) for name in ODD)))
    assert_latex(text)
    assert "LuaLaTeX" in text and "LuaLaTeX" not in latex(TABLE)
    assert escape_latex("[a] *b* `c` --d") == r"{[}a{]} {*}b{*} \textasciigrave{}c\textasciigrave{} -{}-d"
    table = Table("Alike", "", ("data", "net", "settings"), (("digits", "wrn", None), ("digits", "wrn", None)))
    assert "digits" in latex(table) and r"\begin{tabular}{l}" in latex(table)


def heads_of(text: str) -> list[list[str]]:
    """The lines of the head of the first table; a head of several columns is there once."""
    lines = text.splitlines()
    head = lines[lines.index(r"\toprule") + 1 : lines.index(r"\midrule")]
    rows = [line.removesuffix(r"\\").split("&") for line in head if line.endswith(r"\\")]
    return [[re.sub(r"\\multicolumn\{\d+\}\{c\}\{(.*)\}", r"\1", cell.strip()) for cell in row] for row in rows]


def rows_of(text: str) -> list[list[str]]:
    """The cells of each row below the first rule, a rule as an empty row."""
    body = text.partition(r"\midrule")[2].partition(r"\bottomrule")[0].strip()
    lines = [line for line in body.splitlines() if "scriptsize" not in line]
    return [[x.strip() for x in line.removesuffix(r"\\").split("&")] if "&" in line else [] for line in lines]


def test_the_benchmark_has_data_sets_beside_each_other_and_is_apart_for_networks_and_images(tmp_path: Path) -> None:
    values: list[dict[str, Any]] = [
        {"data": data, "size": size, "augment": augment, "mollify": mollify, "source": "official"}
        for data, size in (("cifar10", 32), ("tinyimagenet", 64))
        for augment in ("fcr", "fcr+trivial")
        for mollify in (False, True)
        if (data, augment) != ("tinyimagenet", "fcr")
    ]
    other = {"data": "imagenet", "size": 224, "net": "resnet50", "source": "official"}
    groups = groups_of(tmp_path, *values, {"augment": "fcr"}, other)
    text = latex(benchmark(groups))
    assert_latex(text)
    titles = re.findall(r"\\caption\{Benchmark, (.*?)\. ", text)
    assert sorted(titles) == [
        "net presnet50, corrupted images generated (frost: made), seeds 1",
        "net presnet50, corrupted images official, seeds 1",
        "net resnet50, corrupted images official, seeds 1",
    ]
    (part,) = [x for x in text.split(r"\begin{table}") if "presnet50, corrupted images official" in x]
    top, metrics, places = heads_of(part)
    assert top == ["", "", "cifar10", "tinyimagenet"] and metrics == ["", "", *[r"error, \%", "NLL", "ECE"] * 2]
    assert places == ["augmentation", "mollification", *["clean", "corrupted"] * 6]
    rows = rows_of(part)
    assert [row[:2] for row in rows] == [
        ["fcr", "no"],
        ["fcr+trivial", "no"],
        [],
        ["fcr", "yes"],
        ["fcr+trivial", "yes"],
    ]
    assert all((row[8:] == ["--"] * 6) == (row[0] == "fcr") for row in rows if row)
    figures = {(x.run.data, x.run.augment, x.run.mollify): x for x in groups if x.run.source == "official"}
    for row in filter(None, rows):
        group = figures["cifar10", row[0], row[1] == "yes"]
        expected = [group.statistic(x, y).mean for x in ("error", "nll", "ece") for y in ("clean", None)]
        found = [float(re.sub(r"\\textbf\{(.*)\}", r"\1", cell)) for cell in row[2:8]]
        assert found == pytest.approx(expected, abs=0.0051)


def test_mce_has_a_column_where_there_is_one_and_is_explained_there(tmp_path: Path) -> None:
    values = [{"data": data, "augment": x} for data in ("cifar10", "imagenet") for x in ("fcr", "none")]
    values += [{"net": "n", "augment": x} for x in ("fcr", "none")]
    paths = [write_run(tmp_path / str(n), fake_result(count=40, **x)) for n, x in enumerate(values)]
    for path in paths[2:4]:
        file = path / "robustness-generated" / "robustness.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"mce": {"value": 70.0, "baseline": "AlexNet"}}))
    text = latex(benchmark(in_order(group_seeds(map(read_run, paths)))))
    assert_latex(text)
    other, both = sorted(text.split(r"\begin{table}")[1:])
    assert "net n," in other and "mCE" not in other
    assert heads_of(both)[2].count(r"mCE (AlexNet), \%") == 1 and "mCE: each corruption's error" in both


def test_the_lowest_of_each_column_is_bold_with_all_that_are_printed_like_it() -> None:
    def made(*cells: tuple[str, float]) -> Table:
        rows = tuple((data, f"n{i}", Number(value, 0.2, 1)) for i, (data, value) in enumerate(cells))
        return Table("T", "", ("data", "name", "error"), rows, best=("error",))

    text = latex(made(("a", 3.04), ("a", 2.96), ("a", 3.2), ("b", 9.0), ("b", 8.0), ("c", 1.0)))
    assert [row[-1] for row in rows_of(text) if row] == [
        r"\textbf{3.0} $\pm$ 0.2",
        r"\textbf{3.0} $\pm$ 0.2",
        r"3.2 $\pm$ 0.2",
        r"9.0 $\pm$ 0.2",
        r"\textbf{8.0} $\pm$ 0.2",
        r"1.0 $\pm$ 0.2",  # nothing to compare it with
    ]
    assert r"\caption{T. In bold: the lowest mean, whatever its deviation.}" in text


def test_many_networks_of_one_row_each_share_a_table(tmp_path: Path) -> None:
    foreign = {"augment": None, "mollify": None, "seed": None}
    text = latex(benchmark(groups_of(tmp_path / "a", *({**foreign, "net": f"n{x}"} for x in range(4)))))
    assert [row[0] for row in rows_of(text)] == ["n0", "n1", "n2", "n3"] and text.count("begin{table}") == 1
    assert "corrupted images generated (frost: made), seeds 1." in text and text.count("textbf") >= 6
    # One network on two data sets is one row with a name.
    text = latex(benchmark(groups_of(tmp_path / "b", *({**foreign, "data": x} for x in ("a", "b")))))
    assert_latex(text)
    assert [row[0] for row in rows_of(text)] == ["presnet50"] and heads_of(text)[0] == ["", "a", "b"]
    # And so is one on one.
    text = latex(benchmark(groups_of(tmp_path / "c", foreign)))
    assert_latex(text)
    assert rows_of(text)[0][:2] == ["presnet50", "generated (frost: made)"]


def test_architectures_stand_under_each_other_as_the_papers(tmp_path: Path) -> None:
    values = [{"data": x, "net": y, "augment": z} for x in ("a", "b") for y in ("n1", "n2") for z in ("none", "fcr")]
    rows = rows_of(latex(architectures(groups_of(tmp_path, *values))))
    assert [row[:2] for row in rows] == [["n1", "none"], ["n2", "none"], [], ["n1", "fcr"], ["n2", "fcr"]]


def test_rows_that_look_alike_are_all_there(tmp_path: Path) -> None:
    values = [{"settings": {"mollify.roles": roles}} for roles in ([1, 1, 0], [1.0, 1.0, 0.0])]
    assert len(rows_of(latex(benchmark(groups_of(tmp_path, *values))))) == 2


def test_the_breakdown_stands_next_to_the_papers(groups: list[Group]) -> None:
    tables = all_tables(groups)
    text = latex(find(tables, "Error of each corruption"))
    families, heads = heads_of(text)
    assert [x for x in families if x] == ["noise", "blur", "weather", "digital"]
    # Table 2's own order.
    order = list(dict.fromkeys(cell.images for cell in published(table="2")))[1:16]
    assert [head.split()[0].lower() for head in heads[-16:-1]] == [x.split("_")[0] for x in order]
    # Seventeen means ± deviations would not fit side by side: the deviations are below.
    lines = text.splitlines()
    top = lines.index(r"\toprule")
    assert r"{\scriptsize $\pm$ " in lines[top + 6] and r"$\pm$" not in lines[top + 5]
    each = r"In all rows: data cifar10, net presnet50."
    assert sum(each in latex(table) for table in tables) >= 4
