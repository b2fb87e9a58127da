"""What the paper prints stands beside what was measured, for runs that it has."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from fake_runs import groups_of, number, rows_of, several_groups

from fastmoll.kernels.corruption_constants import CORRUPTIONS
from fastmoll.paper import published
from fastmoll.report.runs import Group
from fastmoll.report.table import as_text
from fastmoll.report.table_paper import paper_check


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> list[Group]:
    return several_groups(tmp_path_factory.mktemp("runs"))


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
