"""The tables hold the figures of the runs, say what images they are of, and are written whole in each format."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from fake_runs import fake_result, fake_runs, write_run

from fastmoll.kernels.corruption_constants import CORRUPTIONS
from fastmoll.markdown import escape_markdown
from fastmoll.paper import published
from fastmoll.report.read import read_run
from fastmoll.report.runs import Group, group_seeds
from fastmoll.report.style import words
from fastmoll.report.table import Number, Table, Value, as_text, escape_latex
from fastmoll.report.tables import all_tables, architectures, benchmark, in_order, make_pairs, paper_check

NETS = ("presnet50", "wrn40")


def groups_of(tmp_path: Path, *values: dict[str, Any]) -> list[Group]:
    paths = [write_run(tmp_path / str(n), fake_result(**{"count": 40, **x})) for n, x in enumerate(values)]
    return in_order(group_seeds(map(read_run, paths)))


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> list[Group]:
    root = tmp_path_factory.mktemp("runs")
    paths = [*fake_runs(root / "a"), *fake_runs(root / "b", source="official", augments=("fcr",), seeds=(0, 1, 2))]
    return in_order(group_seeds(map(read_run, paths)))


def rows_of(table: Table) -> list[dict[str, Value]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def number(value: Value) -> Number:
    assert isinstance(value, Number)
    return value


def find(tables: Sequence[Table], title: str) -> Table:
    (table,) = [table for table in tables if table.title == title]
    return table


# --- what is in them --------------------------------------------------------------------------------------------------


def test_every_row_with_corrupted_figures_says_which_images_they_are_of(groups: list[Group]) -> None:
    for table in all_tables(groups):
        where = table.columns.index("corrupted images") if table.rows else None
        for row in table.rows:
            assert where is not None and row[where] in ("official", "generated (frost: made)")
    assert {row["corrupted images"] for row in rows_of(benchmark(groups))} == {"official", "generated (frost: made)"}


def test_the_benchmark_is_mean_and_deviation_over_seeds(groups: list[Group]) -> None:
    table = rows_of(benchmark(groups))
    assert [(x["augmentation"], x["mollification"], x["corrupted images"], x["seeds"]) for x in table] == [
        ("fcr", "no", "generated (frost: made)", 2),
        ("fcr", "yes", "generated (frost: made)", 2),
        ("fcr+trivial", "no", "generated (frost: made)", 2),
        ("fcr+trivial", "yes", "generated (frost: made)", 2),
        ("fcr", "no", "official", 3),
        ("fcr", "yes", "official", 3),
    ]
    for row, group in zip(table, groups, strict=True):
        for head, metric in (("error, %", "error"), ("NLL", "nll"), ("ECE", "ece")):
            clean = [getattr(run.clean, metric) for run in group.runs]
            assert number(row[f"clean {head}"]).value == pytest.approx(statistics.fmean(clean))
            assert number(row[f"clean {head}"]).deviation == pytest.approx(statistics.stdev(clean))
            assert number(row[f"corrupted {head}"]).value == pytest.approx(
                statistics.fmean(run.corrupted[metric] for run in group.runs)
            )


def test_the_breakdowns_are_means_over_severities_and_corruptions(groups: list[Group]) -> None:
    tables = all_tables(groups)
    each, parts = (
        rows_of(find(tables, "Error of each corruption")),
        rows_of(find(tables, "Error of each group of corruptions")),
    )
    for row, part, group in zip(each, parts, groups, strict=True):
        cells = {name: statistics.fmean(x.error for run in group.runs for x in run.cells[name]) for name in CORRUPTIONS}
        found = {head: x.value for head, x in row.items() if isinstance(x, Number)}
        named = {words(name): error for name, error in cells.items()}
        assert {head: found[head] for head in named} == pytest.approx(named)
        assert [*found][:1] == ["clean"] and found["mean"] == pytest.approx(statistics.fmean(cells.values()))
        weather = statistics.fmean(cells[name] for name in ("snow", "frost", "fog", "brightness"))
        assert number(part["weather"]).value == pytest.approx(weather)
        assert number(part["mean"]).value == pytest.approx(found["mean"])
    severity = rows_of(find(tables, "Severity"))
    assert len(severity) == 3 * len(groups)
    errors = [x.cells[name][3].error for x in groups[1].runs for name in CORRUPTIONS]
    assert severity[3]["metric"] == "error, %"
    assert number(severity[3]["severity 4"]).value == pytest.approx(statistics.fmean(errors))
    runs = rows_of(find(tables, "Every run"))
    assert [x["seed"] for x in runs] == [0, 1] * 4 + [0, 1, 2] * 2
    assert all(x.deviation is None for row in runs for x in row.values() if isinstance(x, Number))


def test_the_difference_is_with_minus_without_on_the_same_images(groups: list[Group]) -> None:
    table = rows_of(find(all_tables(groups), "With minus without mollification"))
    assert [(x["augmentation"], x["corrupted images"]) for x in table] == [
        ("fcr", "generated (frost: made)"),
        ("fcr+trivial", "generated (frost: made)"),
        ("fcr", "official"),
    ]
    without, mollified = groups[4], groups[5]
    before, after = without.statistic("error", "fog"), mollified.statistic("error", "fog")
    assert before.deviation and after.deviation
    found = number(table[2]["fog"])
    assert found.value == pytest.approx(after.mean - before.mean)
    assert found.deviation == pytest.approx(math.hypot(before.deviation, after.deviation))
    assert as_text(found).startswith(("+", "−"))


def test_pairs_differ_in_mollification_alone(tmp_path: Path) -> None:
    groups = groups_of(
        tmp_path,
        {"mollify": False},
        {"mollify": True},
        {"mollify": True, "settings": {"mollify.roles": [1, 1, 0]}},
        {"mollify": True, "settings": {"optim.epochs": 30}},
        {"mollify": True, "source": "official"},
        {"mollify": True, "augment": "fcr"},
        {"mollify": None},
    )
    pairs = [(a.run.mollify, b.run.settings) for a, b in make_pairs(groups)]
    assert pairs == [(False, {}), (False, {"mollify.roles": [1, 1, 0]})]
    heads = {row["mollification"] for row in rows_of(benchmark(groups))}
    assert heads == {"no", "yes", "noise alone", None}


def test_architectures_are_only_compared_where_the_rest_is_alike(tmp_path: Path) -> None:
    groups = groups_of(tmp_path, {}, {"net": "wrn40"}, {"augment": "fcr"}, {"net": "googlenet", "source": "official"})
    assert [(x["net"], x["augmentation"]) for x in rows_of(architectures(groups))] == [
        ("presnet50", "fcr+trivial"),
        ("wrn40", "fcr+trivial"),
    ]
    alone = architectures(groups[:1])
    assert alone.rows == () and alone.note == "No two runs differ in their network alone."


def test_rows_are_in_the_papers_order(tmp_path: Path) -> None:
    mixed = ("fcr+cutmix", "none", "other", "fcr+trivial", "fcr")
    values = [{"augment": x, "mollify": y} for x, y in product(mixed, (True, False))]
    rows = rows_of(benchmark(groups_of(tmp_path, *values)))
    order = ("none", "fcr", "fcr+trivial", "fcr+cutmix", "other")
    assert [(x["augmentation"], x["mollification"]) for x in rows] == [*product(order, ("no", "yes"))]


def test_rows_that_would_be_alike_say_what_tells_them_apart(tmp_path: Path) -> None:
    plain = benchmark(groups_of(tmp_path / "a", {}, {"augment": "fcr"}))
    assert plain.columns[:6] == ("data", "net", "augmentation", "mollification", "corrupted images", "seeds")
    sizes = rows_of(benchmark(groups_of(tmp_path / "b", {"size": 32}, {"size": 64})))
    assert [row["pixels"] for row in sizes] == [32, 64]
    settings = rows_of(benchmark(groups_of(tmp_path / "c", {}, {"settings": {"optim.epochs": 30}})))
    assert [row["settings"] for row in settings] == [None, "optim.epochs=30"]


def test_settings_that_all_runs_share_are_named_below_every_table(tmp_path: Path) -> None:
    few, alone = {"optim.epochs": 4}, {"mollify.roles": [1, 1, 0]}
    values: list[dict[str, Any]] = [{"mollify": x, "settings": few, "net": y} for x in (False, True) for y in NETS]
    values.append({"settings": {**few, "mollify.beta": [1, 3]}})
    tables = all_tables(groups_of(tmp_path / "a", *values))
    assert all(table.rows for table in tables)
    assert all(table.note.endswith(" All runs: optim.epochs=4.") for table in tables)
    settings = [row.get("settings") for row in rows_of(find(tables, "Benchmark"))]
    assert sorted(map(str, settings)) == ["None"] * 4 + ["mollify.beta=1,3"]
    everything = [row["settings"] for row in rows_of(find(tables, "Every run"))]
    assert sorted(map(str, everything)) == ["mollify.beta=1,3 optim.epochs=4"] + ["optim.epochs=4"] * 4
    # What another column says, or nobody has, is not said again.
    assert "All runs" not in benchmark(groups_of(tmp_path / "b", {"settings": alone})).note
    mixed = groups_of(tmp_path / "c", {"settings": alone}, {"settings": alone, "mollify": False})
    assert benchmark(mixed).note.endswith(" All runs: mollify.roles=1,1,0.")
    null = groups_of(tmp_path / "d", {"settings": {"optim.clip": None}}, {"settings": {}, "augment": "fcr"})
    assert "All runs" not in benchmark(null).note
    assert {row["settings"] for row in rows_of(benchmark(null))} == {None, "optim.clip=null"}


def test_notes_say_what_plus_minus_is_only_where_a_row_has_one(tmp_path: Path) -> None:
    # Two seeds without and one with mollification: each error without has a deviation, their difference has none.
    groups = groups_of(tmp_path, *({"mollify": x, "seed": y} for x, y in ((False, 0), (False, 1), (True, 0))))
    for table in all_tables(groups):
        if table.rows and table.title not in ("Every run", "Paper check"):
            numbers = [x for row in table.rows for x in row if isinstance(x, Number)]
            assert ("±" in table.note) == any(x.deviation is not None for x in numbers), table.title
    table = find(all_tables(groups), "With minus without mollification")
    assert table.rows and "±" not in table.note
    with_both = find(all_tables([*groups[:1], *groups_of(tmp_path / "b", {"seed": 0}, {"seed": 1})]), table.title)
    assert "±" in with_both.note


def test_mce_is_a_column_of_its_own_that_names_its_baseline(tmp_path: Path) -> None:
    results = [fake_result(count=40, seed=seed, source="official") for seed in (0, 1)]
    for result, value in zip(results, (70.0, 74.0), strict=True):
        result["mce"] = {"value": value, "baseline": "AlexNet"}
    paths = [write_run(tmp_path / str(n), x) for n, x in enumerate(results)]
    (row,) = rows_of(benchmark(group_seeds(map(read_run, paths))))
    assert as_text(row["mCE (AlexNet), %"]) == "72.00 ± 2.83"
    (alone,) = rows_of(benchmark(groups_of(tmp_path / "b", {})))
    assert not any("mCE" in head for head in alone)


# --- the paper --------------------------------------------------------------------------------------------------------


def test_the_paper_check_is_measured_published_difference_and_verdict(groups: list[Group]) -> None:
    table = paper_check(groups)
    rows = [x for x in rows_of(table) if x["corrupted images"] == "official" and x["mollification"] == "no"]
    # Tables 1 and A1 have 2 x 3 figures of it each.
    assert [x["table"] for x in rows] == ["1"] * 6 + ["A1"] * 6
    group = groups[4]
    cells = published(data="cifar10", net="presnet50", augment="fcr", mollify="false")
    for row, cell in zip(rows, cells, strict=True):
        # The paper's ECE is a mean over batches of 100: only that of the measured ones is the same number.
        metric = {"ece": "ece_batch100"}.get(cell.metric, cell.metric)
        place = "clean" if cell.images == "clean" else None
        measured, difference = number(row["measured"]), number(row["difference"])
        assert measured.value == group.statistic(metric, place).mean
        assert as_text(row["published"]) == " ± ".join(filter(None, (cell.printed, cell.printed_deviation)))
        assert difference.value == pytest.approx(measured.value - cell.value)
        spread = measured.deviation if cell.deviation is None else cell.deviation
        assert spread is not None
        within = abs(difference.value) <= 2 * spread + cell.rounding
        assert row["within 2 sd"] == ("yes" if within else "no")
        assert row["whose sd"] == ("measured" if cell.table == "1" else "published")
    verdicts = [x["within 2 sd"] for x in rows_of(table)]
    assert {"yes", "no"} <= {*verdicts}
    assert table.note.startswith(f"{verdicts.count('yes')} of {len(verdicts)} figures are within")


def test_the_mean_of_table_2_is_compared_with_a_mean_over_clean_images_too(tmp_path: Path) -> None:
    groups = groups_of(tmp_path, {"mollify": True, "settings": {"mollify.roles": [1, 1, 0]}})
    rows = {x["images"]: x for x in rows_of(paper_check(groups))}
    assert len(rows) == 17 and {x["table"] for x in rows.values()} == {"2"}
    run = groups[0].run
    mean = statistics.fmean([run.clean.error, *(run.value("error", name) for name in CORRUPTIONS)])
    assert number(rows["clean+corrupted"]["measured"]).value == pytest.approx(mean)
    assert as_text(rows["clean+corrupted"]["published"]) == "7.6"
    assert rows["fog"]["within 2 sd"] is None and rows["fog"]["whose sd"] is None


def test_the_differences_of_table_4_are_compared_with_measured_ones(tmp_path: Path) -> None:
    common = {"data": "ImageNet", "net": "resnet50", "augment": "fcr+trivial", "source": "official", "size": 224}
    groups = groups_of(tmp_path, *({**common, "mollify": x, "seed": s} for x in (False, True) for s in (0, 1)))
    rows = [x for x in rows_of(paper_check(groups)) if x["table"] == "4"]
    assert len(rows) == 17 and {x["metric"] for x in rows} == {"difference of error, %"}
    (fog,) = [x for x in rows if x["images"] == "fog"]
    without, mollified = (group.statistic("error", "fog").mean for group in groups)
    assert number(fog["measured"]).value == pytest.approx(mollified - without)
    assert as_text(fog["published"]) == "−2.1" and fog["whose sd"] == "measured"


def test_runs_the_paper_does_not_have_are_not_compared(tmp_path: Path) -> None:
    values: list[dict[str, Any]] = [
        {"data": "digits"},
        {"augment": None},
        {"mollify": None},
        {"settings": {"mollify.beta": [1, 3]}},
        {"net": "resnet18"},
        {"size": 64},
        {"data": "imagenet", "net": "resnet50", "size": 64},
    ]
    table = paper_check(groups_of(tmp_path, *values))
    assert table.rows == () and "has no figures of these" in table.note


def test_runs_that_depart_from_the_recipe_are_shown_as_such_and_not_counted(tmp_path: Path) -> None:
    few: dict[str, Any] = {"optim.epochs": 4}
    roles = {"mollify.roles": [1, 1, 0]}
    table = paper_check(groups_of(tmp_path / "a", {}, {"settings": few}, {"settings": roles}))
    rows = rows_of(table)
    said = {(row["settings"], row["trained with"]) for row in rows}
    assert said == {
        (None, "the recipe"),
        ("optim.epochs=4", "other settings"),
        ("mollify.roles=1,1,0", "the recipe"),
    }
    departing = [row for row in rows if row["trained with"] == "other settings"]
    assert f" of {len(rows) - len(departing)} figures are within two standard deviations" in table.note
    assert f" {len(departing)} figures more are of runs with other settings than the paper's." in table.note
    alone = paper_check(groups_of(tmp_path / "b", {"settings": few}))
    assert {(row["settings"], row["trained with"]) for row in rows_of(alone)} == {("optim.epochs=4", "other settings")}
    assert alone.note.startswith(f"{len(alone.rows)} figures are of runs with other settings than the paper's.")
    assert "are within" not in alone.note


# --- how they are written ---------------------------------------------------------------------------------------------

TABLE = Table(
    "A title: 50 % of #1",
    "A note on a_b.",
    ("name", "count", "error, %"),
    (
        ("a_b|c & d", 3, Number(1 / 3, 0.046, 2)),
        ("~^\\{}$", 10, Number(-2.5, None, 1, signed=True)),
        ("ü <x>", 7, None),
    ),
)


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


def test_latex_is_a_booktabs_table_that_prints_every_character() -> None:
    lines = TABLE.latex().splitlines()
    assert r"\caption{A title: 50 \% of \#1. A note on a\_b.}" in lines and r"\begin{tabular}{lrr}" in lines
    rules = [line for line in lines if re.fullmatch(r"\\(top|mid|bottom)rule", line)]
    assert rules == [r"\toprule", r"\midrule", r"\bottomrule"]
    assert r"name & count & error, \% \\" in lines
    assert r"a\_b\textbar{}c \& d & 3 & 0.33 $\pm$ 0.05 \\" in lines
    assert r"\textasciitilde{}\textasciicircum{}\textbackslash{}\{\}\$ & 10 & $-$2.5 \\" in lines
    text = TABLE.latex()
    assert [x for x in re.findall(r"\\(begin|end)\{(\w+)\}", text)] == [
        ("begin", "table"),
        ("begin", "tabular"),
        ("end", "tabular"),
        ("end", "table"),
    ]
    assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")
    assert escape_latex("a−b – ±") == r"a$-$b -- $\pm$"


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
        assert_latex(table.latex())


def assert_latex(text: str) -> None:
    """A table that LaTeX takes: every row has as many cells as there are columns, and all that opens closes."""
    body = re.sub(r"\\[\\{}&%$#_]", lambda x: r"\\" if x[0] == r"\\" else "", text)
    assert body.count("{") == body.count("}") and body.count("$") % 2 == 0
    opened = []
    for what, name in re.findall(r"\\(begin|end)\{(\w+)\}", body):
        assert what == "begin" or opened.pop() == name
        if what == "begin":
            opened.append(name)
    assert opened == []
    (columns,) = re.findall(r"\\begin\{tabular\}\{([lr]+)\}", body)
    rows = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert len(rows) > 1
    for row in rows:
        spans = [int(x) for x in re.findall(r"\\multicolumn\{(\d+)\}", row)]
        assert row.count("&") + 1 + sum(spans) - len(spans) == len(columns), row
        assert not row.startswith(("[", "*"))
    for a, b in re.findall(r"\\cmidrule\(lr\)\{(\d+)-(\d+)\}", body):
        assert 1 < int(a) <= int(b) <= len(columns)
    assert text.splitlines()[0] == r"% \usepackage{booktabs,graphicx}"


def test_tables_in_latex_stand_next_to_the_papers(groups: list[Group]) -> None:
    tables = all_tables(groups)
    lines = find(tables, "Benchmark").latex().splitlines()
    top = lines.index(r"\toprule")
    names = [re.findall(r"\\multicolumn\{(\d)\}\{c\}\{([^}]*)\}", line) for line in lines]
    assert names[top + 1] == [("2", r"error, \%"), ("2", "NLL"), ("2", "ECE")]
    assert lines[top + 3].endswith("clean & corrupted & clean & corrupted & clean & corrupted " + r"\\")
    lines = find(tables, "Error of each corruption").latex().splitlines()
    top = lines.index(r"\toprule")
    for text, width in (("noise", 3), ("blur", 4), ("weather", 4), ("digital", 4)):
        assert rf"\multicolumn{{{width}}}{{c}}{{{text}}}" in lines[top + 1]
    heads = [head.strip(" \\") for head in lines[top + 3].split("&")]
    # Table 2's own order.
    order = list(dict.fromkeys(cell.images for cell in published(table="2")))[1:16]
    assert [head.split()[0].lower() for head in heads[-16:-1]] == [x.split("_")[0] for x in order]
    # Seventeen means ± deviations would not fit side by side: the deviations are below.
    assert r"{\scriptsize $\pm$ " in lines[top + 6] and r"$\pm$" not in lines[top + 5]
    each = r"In all rows: data cifar10, net presnet50."
    assert sum(each in table.latex() for table in tables) >= 5


ODD = ("a|b$x_{", "<script>x</script>", r"\input{x}%&#~^_", "../../x", "🦊猫", "L" * 300, "[x] *y* `z` &lt; _q_ --v")


def test_odd_names_are_printed_as_they_are_in_every_format() -> None:
    rows = tuple((name, Number(1.5, 0.25, 1)) for name in ODD)
    table = Table("Odd", ODD[2], ("data", "error, %"), rows)
    assert [row[0] for row in csv.reader(io.StringIO(table.csv()))][1:] == [*ODD]
    text = table.latex()
    assert_latex(text)
    assert "LuaLaTeX" in text and "LuaLaTeX" not in TABLE.latex()
    assert escape_latex("[a] *b* `c` --d") == r"{[}a{]} {*}b{*} \textasciigrave{}c\textasciigrave{} -{}-d"
    cells = [line[2:].split(" | ")[0].rstrip() for line in table.markdown().splitlines() if line.startswith("|")]
    # What CommonMark takes away again: a backslash before a sign.
    assert [re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", cell) for cell in cells[2:]] == [*ODD]
    assert not any(re.search(r"(?<!\\)[<*`$\[]", cell) for cell in cells[2:])
    assert escape_markdown("data.batch_size=32 a < b") == r"data.batch_size=32 a \< b"


def test_notes_explain_what_frost_is_where_it_stands(tmp_path: Path) -> None:
    made = groups_of(tmp_path / "a", {"mollify": False}, {})
    published_ones = groups_of(tmp_path / "b", {"frost": "published"})
    official = groups_of(tmp_path / "c", {"source": "official"})
    for groups, said in ((made, "Frost: made means"), (published_ones, "Frost: published means"), (official, None)):
        for table in all_tables(groups):
            if table.rows:
                assert said is None or said in table.note, table.title
                assert said is not None or "Frost" not in table.note


def test_runs_are_in_order_of_the_numbers_in_their_settings(tmp_path: Path) -> None:
    values = [{"settings": {"mollify.beta": [1, x]}} for x in (10, 2.5, 3)]
    rows = rows_of(benchmark(groups_of(tmp_path, *values)))
    assert [row["settings"] for row in rows] == [f"mollify.beta=1,{x}" for x in ("2.5", "3", "10")]


def test_a_table_whose_rows_are_all_alike_keeps_its_first_column() -> None:
    table = Table("Alike", "", ("data", "net", "settings"), (("digits", "wrn", None), ("digits", "wrn", None)))
    assert table.split() == ([0], "In all rows: net wrn.")
    assert "digits" in table.latex() and r"\begin{tabular}{l}" in table.latex()
    assert Table("None", "why", (), ()).split() == ([], "")
