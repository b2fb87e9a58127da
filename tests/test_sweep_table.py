"""The table of a sweep's results."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from sweeps import DIGITS, finish, names

from fastmoll.cli.main import main
from fastmoll.sweep.file import Run, read_sweep
from fastmoll.sweep.select import select
from fastmoll.sweep.table import Row, as_csv, as_markdown, make_rows


def test_the_table_is_mean_and_deviation_next_to_the_papers_numbers(paper_sweep: list[Run], tmp_path: Path) -> None:
    runs = select(paper_sweep, ["cifar10", "presnet50", "fcr+trivial"])
    plain = [run for run in runs if not run.mollify]
    both = [run for run in runs if run.mollify and not run.changes]
    noise = [run for run in runs if run.changed == "mollify.roles=1,1,0"]
    beta = [run for run in runs if run.changed == "mollify.beta=1,3"]
    for run, error in zip(plain, (0.03, 0.04, 0.08), strict=True):
        finish(tmp_path / run.name, error, nll=10 * error)
    for run, error in zip(both[:2], (0.04, 0.06), strict=True):
        finish(tmp_path / run.name, error, corrupted={"error": 2 * error, "source": "official"})
    finish(tmp_path / noise[0].name, 0.05, corrupted={"error": 0.09, "source": "generated"})
    finish(tmp_path / noise[1].name, 0.05)  # no corrupted error yet: no mean of one of two
    finish(tmp_path / beta[0].name, 0.07)
    rows = make_rows(runs, tmp_path)
    table = [
        (row.mollify, row.settings, row.source, row.seeds, row.means.get("error"), row.means.get("corrupted"))
        for row in rows
    ]
    assert table == [
        (False, "", "here", 3, pytest.approx(5), None),
        (False, "", "paper, table 1", None, "3.4", "12.1"),
        (False, "", "paper, table A1", None, "3.4", "12.2"),
        (True, "", "here", 2, pytest.approx(5), pytest.approx(10)),
        (True, "", "paper, table 1", None, "4.0", "8.0"),
        (True, "", "paper, table A1", None, "3.7", "7.7"),
        (True, "mollify.roles=1,1,0", "here", 2, pytest.approx(5), None),
        (True, "mollify.roles=1,1,0", "paper, table 2", None, "3.4", "7.9"),
        (True, "mollify.beta=1,3", "here", 1, pytest.approx(7), None),
    ]
    # Of 3, 4, 8: mean 5, squares 4 + 1 + 9 = 14, over n - 1 = 2 is 7. Of 4, 6: squares 1 + 1, over 1 is 2.
    assert rows[0].deviations == pytest.approx({"error": 7**0.5, "nll": 7**0.5 / 10, "ece": 0})
    assert rows[3].deviations == pytest.approx({"error": 2**0.5, "nll": 0, "ece": 0, "corrupted": 2 * 2**0.5})
    assert rows[8].deviations == {} and rows[2].deviations["corrupted"] == "0.37"

    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in as_markdown(rows).splitlines()]
    assert lines[2][5:] == ["here", "3", "5.00 ± 2.65", "0.5000 ± 0.2646", "0.1000 ± 0.0000", "–"]
    assert lines[4][:7] == ["", "", "", "", "", "paper, table A1", ""]
    assert lines[4][7:] == ["3.4 ± 0.02", "0.12 ± 0.00", "0.03 ± 0.00", "12.2 ± 0.37"]
    assert lines[5][:5] == ["cifar10", "presnet50", "fcr+trivial", "yes", ""]
    assert lines[5][-1] == "10.00 ± 2.83" and "where nothing else is said: official.\n" in as_markdown(rows)
    read = list(csv.DictReader(io.StringIO(as_csv(rows))))
    assert [row["source"] for row in read] == [row.source for row in rows]
    assert float(read[0]["error_sd"]) == pytest.approx(7**0.5) and read[0]["corrupted"] == ""
    assert (read[3]["mollify"], read[3]["corrupted_set"], read[1]["seeds"]) == ("true", "official", "")


def test_the_table_says_how_to_fill_in_a_corrupted_error_that_is_missing(
    paper_sweep: list[Run], tmp_path: Path
) -> None:
    run = select(paper_sweep, ["cifar10", "presnet50", "fcr+trivial"])[0]
    finish(tmp_path / run.name, 0.05)
    assert "`fastmoll evaluate DIR` adds it" in as_markdown(make_rows([run], tmp_path))
    finish(tmp_path / run.name, 0.05, corrupted={"error": 0.1, "source": "official"})
    assert "fastmoll evaluate" not in as_markdown(make_rows([run], tmp_path))


def test_seeds_on_other_corrupted_sets_are_named(paper_sweep: list[Run], tmp_path: Path) -> None:
    runs = [run for run in select(paper_sweep, ["cifar10", "presnet50", "fcr+trivial"]) if not run.mollify][:2]
    for run, place in zip(runs, ("CIFAR-10-C", "mine"), strict=True):
        finish(tmp_path / run.name, 0.05, corrupted={"error": 0.1, "source": "official", "set": place})
    assert make_rows(runs, tmp_path)[0].corrupted_set == "official, set: CIFAR-10-C, set: mine"
    finish(tmp_path / runs[1].name, 0.05, corrupted={"error": 0.1, "source": "official", "set": "CIFAR-10-C"})
    assert make_rows(runs, tmp_path)[0].corrupted_set == "official"


def test_corrupted_images_are_named_once_where_those_of_all_runs_are_alike() -> None:
    def shown(*sets: str | None) -> tuple[list[str], list[str]]:
        sources = ["paper, table 1", *["here"] * (len(sets) - 1)]
        found = [
            Row("a", "b", "c", False, "", source, 1, {"corrupted": "7"} if name is not None else {}, {}, name or "")
            for source, name in zip(sources, sets, strict=True)
        ]
        lines = as_markdown(found).splitlines()
        notes = [line.partition(": ")[2] for line in lines if line.startswith("Corrupted images, ")]
        return [line.split("|")[-2].strip() for line in lines[2 : 2 + len(found)]], notes

    made, published = "generated (frost: made)", "generated (frost: published)"
    assert shown("official", made, None, made) == (["7 (official)", "7", "–", "7"], [f"{made}."])
    assert shown("official", "official") == (["7", "7"], ["official."])
    assert shown("official", made, published) == (["7 (official)", f"7 ({made})", f"7 ({published})"], [])
    assert shown("official", made, "") == (["7 (official)", f"7 ({made})", "7"], [])
    assert shown("official", "") == (["7 (official)", "7"], [])
    assert shown("official", None) == (["7 (official)", "–"], [])


def test_names_with_signs_of_markdown_or_of_formulas_stay_in_their_cells() -> None:
    row = Row("=1+1", "-net", "@a", False, "", "here", 1, {"error": 1.0})
    assert as_csv([row]).splitlines()[1].startswith("'=1+1,'-net,'@a,false,,here,1,1.0,")
    row = Row("a|b", "*x*", "<i>", False, "x=$1$", "here", 1, {"error": 1.0})
    line = as_markdown([row]).splitlines()[2]
    assert [cell.strip() for cell in line.split(" | ")[:5]] == [r"| a\|b", r"\*x\*", r"\<i>", "no", r"x=\$1\$"]


def test_the_table_alone_trains_nothing_and_a_filter_shortens_only_what_is_printed(
    write_sweep: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    runs = read_sweep(write_sweep(DIGITS))
    assert main(["sweep", "some.toml", "--table"]) == 0
    assert capsys.readouterr().out == "no run in runs/some is done\n" and not Path("runs").exists()
    for run in runs[:2]:
        finish(Path("runs/some") / run.name, 0.5)
    assert main(["sweep", "some.toml", "--table", "--filter", "mollify=true"]) == 0
    text = capsys.readouterr().out
    assert "| yes " in text and "| no " not in text and "1 of 2 runs done" in text
    written = Path("runs/some/table.md").read_text()
    assert "| yes " in written and "| no " in written
    assert len(Path("runs/some/table.csv").read_text().splitlines()) == 3
    assert {path.name for path in Path("runs/some").iterdir()} == {"table.md", "table.csv", *names(runs[:2])}


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "{",
        "[" * 100_000,
        *(
            f'{{"validation": {{"error": {error}, "nll": {nll}, "ece": 0.1}}{more}}}'
            for error, nll, more in (
                ("0.1", "NaN", ""),
                ("-1", "1", ""),
                ("1e308", "1", ""),
                ("true", "1", ""),
                ('"0.1"', "1", ""),
                ("0.1", "1" + "0" * 400, ""),
                ("0.1", "1", ', "corrupted": {"error": Infinity, "source": "official"}'),
                ("0.1", "1", ', "corrupted": {"error": 0.1, "source": "a\\nb"}'),
                ("0.1", "1", ', "corrupted": [0.1]'),
            )
        ),
    ],
)
def test_a_result_that_is_none_is_named_and_left_out_of_the_table(
    content: str, write_sweep: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    runs = read_sweep(write_sweep(DIGITS))
    folder = Path("runs/some") / runs[0].name
    finish(folder, 0.5)
    finish(Path("runs/some") / runs[2].name, 0.5)  # its other seed
    (folder / "result.json").write_text(content)
    assert main(["sweep", "some.toml", "--table"]) == 1
    captured = capsys.readouterr()
    assert captured.out.endswith("1 of 4 runs done; runs/some/table.md and table.csv have the whole sweep's\n")
    assert captured.err.startswith(f"error: {folder}/result.json is not the result of a run (")
    assert captured.err.endswith("): left out of the table\n") and captured.err.count("\n") == 1
    # Where it was not asked for, that is no failure.
    assert main(["sweep", "some.toml", "--table", "--filter", "seed1"]) == 0
    assert main(["sweep", "some.toml", "--list", "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert f"to do      {runs[0].name}\n" in captured.out and "): the run is to be done again\n" in captured.err
