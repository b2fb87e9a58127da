"""The tables hold the figures of the runs and say what images they are of."""

from __future__ import annotations

import math
import statistics
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from fake_runs import fake_result, find, groups_of, number, rows_of, several_groups, write_run

from fastmoll.kernels.corruption_constants import CORRUPTIONS
from fastmoll.report.pairs import make_pairs
from fastmoll.report.read import read_run
from fastmoll.report.runs import BINARY, Group, group_seeds
from fastmoll.report.style import words
from fastmoll.report.table import Number, as_text
from fastmoll.report.tables import all_tables, architectures, benchmark

NETS = ("presnet50", "wrn40")


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> list[Group]:
    return several_groups(tmp_path_factory.mktemp("runs"))


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
    files = [{**fake_result(count=40, seed=None), "checkpoint": name} for name in ("a.pt", "b.pt")]
    runs = [read_run(write_run(tmp_path / result["checkpoint"], result)) for result in files]
    tables = all_tables(group_seeds(runs))
    for title in ("Benchmark", "Every run"):
        assert [row["weights"] for row in rows_of(find(tables, title))] == ["a.pt", "b.pt"]


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
    for some in (groups, groups_of(tmp_path / "a", {}, {"mollify": False})):
        for table in all_tables(some):
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


def test_notes_explain_what_frost_is_where_it_stands(tmp_path: Path) -> None:
    made = groups_of(tmp_path / "a", {"mollify": False}, {})
    published_ones = groups_of(tmp_path / "b", {"frost": "published"})
    official = groups_of(tmp_path / "c", {"source": "official"})
    for groups, said in ((made, "Frost: made means"), (published_ones, "Frost: published means"), (official, None)):
        for table in all_tables(groups):
            if table.rows:
                assert said is None or said in table.note, table.title
                assert said is not None or "Frost" not in table.note


def test_notes_say_of_which_likelihood_nll_and_ece_are_where_it_is_not_that_of_the_training(tmp_path: Path) -> None:
    plain = groups_of(tmp_path / "a", {"mollify": False}, {})
    binary = groups_of(tmp_path / "b", {}, {"settings": {"optim.loss": "binary"}})
    for groups, said in ((plain, False), (binary, True)):
        for table in all_tables(groups):
            assert not table.rows or (BINARY in table.note) == said, table.title


def test_networks_are_in_order_of_the_numbers_in_their_names(tmp_path: Path) -> None:
    values = [{"net": net, "mollify": x} for x in (False, True) for net in ("net37", "net04", "net4")]
    rows = rows_of(benchmark(groups_of(tmp_path, *values)))
    assert [row["net"] for row in rows] == [net for net in ("net04", "net4", "net37") for _ in range(2)]


def test_runs_are_in_order_of_the_numbers_in_their_settings(tmp_path: Path) -> None:
    values = [{"settings": {"mollify.beta": [1, x]}} for x in (10, 2.5, 3)]
    rows = rows_of(benchmark(groups_of(tmp_path, *values)))
    assert [row["settings"] for row in rows] == [f"mollify.beta=1,{x}" for x in ("2.5", "3", "10")]
