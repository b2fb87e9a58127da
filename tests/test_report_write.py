"""A report is written whole, replaces an earlier one, and refuses bad input before it touches one."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_runs import fake_result, fake_runs, write_run
from PIL import Image

from fastmoll.cli import report as cli_report
from fastmoll.report import write

pytest.importorskip("matplotlib")

from fastmoll.report.runs import Group
from fastmoll.report.style import Figure
from fastmoll.report.write import report
from fastmoll.robustness.networks import WEIGHTS, digest


def command(*words: object) -> int:
    parser = argparse.ArgumentParser()
    cli_report.add(parser.add_subparsers(dest="command", required=True))
    return cli_report.run(parser.parse_args(["report", *map(str, words)]))


def files(folder: Path) -> dict[str, bytes]:
    return {str(x.relative_to(folder)): x.read_bytes() for x in sorted(folder.rglob("*")) if x.is_file()}


@pytest.fixture
def one_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports with one small figure: drawing all takes seconds."""

    def draw(groups: Sequence[Group], out: Path, *, images: object = None) -> list[Figure]:
        out.mkdir()
        Image.new("RGB", (16, 16)).save(out / "one.png")
        (out / "one.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
        return [Figure("one", "One", "It.", out / "one.png", out / "one.svg"), Figure("no", "No", "none", None, None)]

    monkeypatch.setattr(write, "all_figures", draw)


def test_a_report_is_tables_figures_and_a_page_with_all_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = fake_runs(tmp_path / "runs", augments=("fcr",), count=40)
    out = tmp_path / "out"
    assert command(tmp_path / "runs", "-o", out) == 0
    text = capsys.readouterr().out
    written = files(out)
    tables = {Path(name).stem for name in written if name.startswith("tables/")}
    figures = {Path(name).stem for name in written if name.startswith("figures/")}
    for name, endings in (("tables", ("md", "csv", "tex")), ("figures", ("png", "svg"))):
        for stem in tables if name == "tables" else figures:
            assert all(written[f"{name}/{stem}.{ending}"] for ending in endings)
    assert {"benchmark", "error_of_each_corruption", "paper_check", "severity"} <= tables
    assert f"{len(tables)} tables and {len(figures)} figures in {out}; the page is {out}/report.html\n" in text
    assert "left out (1): no two runs differ in their network alone: Architectures\n" in text
    assert re.search(r"^left out \(4\): it needs pictures, .*--images\): (?:[A-Z][^,]*, ){3}1 more \(-v", text, re.M)
    assert len([line for line in text.splitlines() if line.startswith("left out")]) == 3
    page = written["report.html"].decode()
    for title in ("Benchmark", "Error of each corruption", "With minus without mollification", "Paper check"):
        assert title in page
    assert page.count("<img") == len(figures) and "generated (frost: made)" in page

    # Another report in its place leaves nothing of this one, and the same runs give the same files.
    again = report([runs[0]], out)
    assert not (out / "tables" / "with_minus_without_mollification.md").exists()
    assert again.page == out / "report.html" and "With minus without" not in again.page.read_text().split("left-out")[0]
    report([tmp_path / "runs"], out)
    assert files(out) == written


def test_a_new_report_leaves_the_users_own_files(tmp_path: Path, one_figure: None) -> None:
    runs = fake_runs(tmp_path / "runs", augments=("fcr",), seeds=(0,), count=40)
    out = tmp_path / "out"
    report(runs, out)
    own = [out / "tables" / "mine.md", out / "figures" / "mine.png", out / "notes.txt"]
    for file in own:
        file.write_text("mine")
    report(runs[:1], out)
    assert [file.read_text() for file in own] == ["mine"] * 3
    assert not [*(out / "tables").glob("with_minus_without*")]  # the earlier report's own is gone
    listed = set(json.loads((out / "report.json").read_text())["files"])
    assert files(out).keys() - listed == {"report.json", *(str(file.relative_to(out)) for file in own)}

    # Nor does it write over one.
    mine = out / "tables" / "with_minus_without_mollification.md"
    mine.write_text("mine")
    before = files(out)
    with pytest.raises(ValueError, match=r"out: .*with_minus_without_mollification.md is no file of the earlier"):
        report(runs, out)
    assert files(out) == before


def test_a_folder_without_the_list_of_a_report_is_left_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", fake_result(count=40))
    out = tmp_path / "out"
    for name in ("tables/mine.csv", "figures/mine.png", "report.html", "../kept.md"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    before = files(tmp_path)
    with pytest.raises(ValueError, match=r"out: .*out holds something else than a report \(figures\)"):
        report([run], out)
    assert files(tmp_path) == before
    by = {"written_by": "fastmoll report"}
    for content in ("[]", "{", '{"files": []}', *(json.dumps({**by, "files": [x]}) for x in ("../kept.md", "a", 1))):
        (out / "report.json").write_text(content)
        with pytest.raises(ValueError, match=r"out: .*report.json is no list of a report's files"):
            report([run], out)
    (out / "report.json").unlink()
    assert files(tmp_path) == before


def test_a_report_that_stopped_halfway_is_made_again_in_its_place(
    tmp_path: Path, one_figure: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", fake_result(count=40))
    out = tmp_path / "out"
    usual = write.replacing

    def stop(path: Path) -> Any:
        if path.suffix == ".html":
            raise OSError("the disk is full")
        return usual(path)

    with monkeypatch.context() as patch:
        patch.setattr(write, "replacing", stop)
        with pytest.raises(OSError, match="the disk is full"):
            report([run], out)
    assert (out / "figures").is_dir() and not (out / "report.html").exists()
    report([run], out)
    again = files(out)
    report([run], tmp_path / "other")
    assert again == files(tmp_path / "other")


def test_the_page_lists_tables_that_have_nothing_to_show(tmp_path: Path, one_figure: None) -> None:
    run = write_run(tmp_path / "run", fake_result(count=40))
    written = report([run], tmp_path / "out")
    reasons = [f"<li>{table.title}: {table.note}</li>" for table in written.tables if not table.rows]
    assert len(reasons) == 2
    page = written.page.read_text()
    assert all(reason in page for reason in reasons)
    assert [figure.png for figure in written.figures] == [tmp_path / "out" / "figures" / "one.png", None]


def test_what_a_report_imports_is_in_its_extra() -> None:
    place = Path(__file__).parents[1] / "pyproject.toml"
    extra = tomllib.loads(place.read_text())["project"]["optional-dependencies"]["report"]
    assert {re.split("[<>=]", x)[0] for x in extra} >= {"jinja2", "matplotlib"}


def test_official_and_generated_runs_stand_side_by_side(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", fake_result(count=40))
    write_run(run, fake_result(count=40, source="official"))
    report([run], tmp_path / "out")
    benchmark = (tmp_path / "out" / "tables" / "benchmark.md").read_text()
    assert "| official " in benchmark and "| generated (frost: made) |" in benchmark


def test_an_evaluation_that_is_named_twice_is_taken_once(tmp_path: Path, one_figure: None) -> None:
    run = write_run(tmp_path / "runs" / "a", fake_result(count=40))
    (tmp_path / "runs" / "link").symlink_to(run)
    report([run, tmp_path / "runs"], tmp_path / "out")
    rows = (tmp_path / "out" / "tables" / "every_run.csv").read_text().splitlines()
    assert len(rows) == 2


def test_bad_input_is_named_and_leaves_an_earlier_report_as_it_was(tmp_path: Path) -> None:
    good, bad, twin = (tmp_path / x for x in ("good", "bad", "twin"))
    write_run(good, fake_result(count=40))
    write_run(twin, fake_result(count=40))
    content = fake_result(count=40, seed=1)
    del content["cells"]["fog"]
    write_run(bad, content)
    (tmp_path / "file").touch()
    out = tmp_path / "out"
    report([good], out)
    before = files(out)
    for runs, message in (
        ([bad], f"{bad}/robustness-generated/robustness.json: cells lacks fog"),
        ([good, twin], "are one run twice"),
        ([tmp_path / "none"], "there is no file or folder .*none"),
        ([], "runs must name at least one evaluation"),
    ):
        with pytest.raises(ValueError, match=message):
            report(runs, out)
    with pytest.raises(ValueError, match=r"images: .*missing"):
        report([good], out, images=tmp_path / "missing")
    with pytest.raises(ValueError, match=r"out: .*file is not a folder"):
        report([good], tmp_path / "file" / "below")
    assert files(out) == before


def test_a_damaged_evaluation_keeps_no_other_from_the_report(
    tmp_path: Path, one_figure: None, capsys: pytest.CaptureFixture[str]
) -> None:
    good, *bad = (tmp_path / "runs" / name for name in ("good", "cut", "odd", "short"))
    for seed, run in enumerate((good, *bad)):
        write_run(run, fake_result(count=40, seed=seed))
    cut, odd, short = (run / "robustness-generated" / "robustness.json" for run in bad)
    cut.write_bytes(cut.read_bytes()[:200])
    for path in (odd, short):
        content = json.loads(path.read_text())
        del content["cells"]["fog"]
        path.write_text(json.dumps(content))
    assert command(tmp_path / "runs", "-o", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert re.search(rf"^left out \(1\): it cannot be read as JSON .*evaluate again, .*: {cut}$", said, re.MULTILINE)
    assert f"left out (2): cells lacks fog; a report needs all 15: {odd}, {short}\n" in said
    rows = (tmp_path / "out" / "tables" / "every_run.csv").read_text().splitlines()
    assert len(rows) == 2
    with pytest.raises(ValueError, match=rf"^{cut}: it cannot be read as JSON"):
        command(*bad, "-o", tmp_path / "other")


def test_an_evaluation_of_weights_that_were_changed_after_it_is_left_out(
    tmp_path: Path, one_figure: None, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("same", "copied", "other", "unknown", "average", "own", "unreadable", "foreign")
    runs = {name: tmp_path / "runs" / name for name in names}
    state = {"a": torch.arange(3.0)}
    for seed, (name, run) in enumerate(runs.items()):
        result = fake_result(count=40, seed=seed) | {"checkpoint": "elsewhere/model.pt"}
        # Weights of others may have other names than those that they were loaded into.
        write_run(run, result | ({"seed": None} if name == "foreign" else {}))
        evaluation = run / "robustness-generated"
        if name == "own":  # in a folder of the user's choice, of the run as it was
            evaluation = evaluation.rename(run / "epoch-3")
        if name != "unknown":
            (evaluation / "settings.json").write_text(json.dumps({"fingerprint": {WEIGHTS: digest(state)}}))
        content: dict[str, Any] = state if name in ("same", "copied") else {"a": torch.ones(3)}
        if name == "average":
            content = {"format": 1, "learner": {"model": content, "ema": state}}
        torch.save(content, run / "model.pt")
        if name == "unreadable":
            (run / "model.pt").unlink()
            (run / "model.pt").mkdir()  # also for root
        times = (0, 0) if name == "same" else (2e9, 2e9)
        os.utime(run / "model.pt", times)
    assert command(*runs.values(), runs["own"] / "epoch-3", "-o", tmp_path / "out") == 0
    reason = "the weights beside it, model.pt, were changed after it; evaluate again, which compares them"
    other = runs["other"] / "robustness-generated" / "robustness.json"
    assert f"left out (1): {reason}: {other}\n" in capsys.readouterr().out
    assert len((tmp_path / "out" / "tables" / "every_run.csv").read_text().splitlines()) == len(runs)
    (runs["other"] / "model.pt").write_bytes(b"half a file")
    with pytest.raises(ValueError, match=reason):
        command(runs["other"], "-o", tmp_path / "alone")


def test_a_folder_that_may_not_be_written_to_is_refused_before_anything_is_drawn(
    tmp_path: Path, one_figure: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", fake_result(count=40))
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(write, "all_figures", None)
    usual = os.access
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path / "closed" and usual(place, mode))
    for out in ("closed", "closed/a/b"):
        with pytest.raises(ValueError, match=r"out: .*closed can't be written to: no permission"):
            report([run], tmp_path / out)
    with pytest.raises(ValueError, match=r"closed: no permission to look into this folder"):
        report([tmp_path / "closed"], tmp_path / "out")


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", fake_result(count=40))
    with pytest.raises(ValueError, match=r"out: .*run holds something else than a report \(robustness-generated\)"):
        report([run], run)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"out: .*file is not a folder"):
        report([run], tmp_path / "file")
    assert [*files(run)] == ["robustness-generated/robustness.json"] and (tmp_path / "file").read_text() == "mine"


def test_a_shells_star_takes_tables_and_unevaluated_runs_along(
    tmp_path: Path, one_figure: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "runs" / "a", fake_result(count=40))
    table = tmp_path / "runs" / "table.csv"
    table.write_text("data,net\n")
    unevaluated, begun = tmp_path / "runs" / "b", tmp_path / "runs" / "c"
    unevaluated.mkdir()
    (begun / "robustness-generated" / "cells").mkdir(parents=True)
    assert command(unevaluated, begun, run, table, "-o", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert f"left out (2): no evaluation: {unevaluated}, {table}\n" in said
    assert f"left out (1): not all 75 cells are evaluated: {begun}/robustness-generated\n" in said
    with pytest.raises(ValueError, match=r"has no robustness\.json: evaluate a checkpoint first"):
        command(unevaluated, "-o", tmp_path / "other")
    with pytest.raises(ValueError, match=r"table.csv is no evaluation: name a run's folder or a robustness.json"):
        command(table, "-o", tmp_path / "other")


def test_runs_of_a_folder_that_are_left_out_are_counted_and_named_in_full_on_request(
    tmp_path: Path, one_figure: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs" / "a", fake_result(count=40))
    for name in "abcdef":
        (tmp_path / "runs" / name).mkdir(exist_ok=True)
        (tmp_path / "runs" / name / "config.json").touch()
    paths = [str(tmp_path / "runs" / name) for name in "bcdef"]
    assert command(tmp_path / "runs", "-o", tmp_path / "out") == 0
    text = f"left out (5): no evaluation: {', '.join(paths[:3])}, 2 more (-v names them)\n"
    assert text in capsys.readouterr().out
    assert command(tmp_path / "runs", "-o", tmp_path / "out", "-v") == 0
    lines = "".join(f"  {path}\n" for path in paths)
    assert f"left out (5): no evaluation:\n{lines}left out" in (said := capsys.readouterr().out)
    assert "left out (1): none: No\n" in said  # one alone stands beside its reason


def test_the_same_runs_give_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    fake_runs(tmp_path / "runs", augments=("fcr", "none"), count=40)
    code = (
        "import sys; from fastmoll.report import figures, write\n"
        "figures._OF_RUNS = {x: figures._OF_RUNS[x] for x in ('error_severity', 'polygons', 'ablations')}\n"
        "write.report([sys.argv[1]], sys.argv[2])"
    )
    made = []
    for seed in ("1", "2"):  # of Python's hashes, on which the order of sets depends
        words = [sys.executable, "-c", code, str(tmp_path / "runs"), str(tmp_path / seed)]
        subprocess.run(words, check=True, env={**os.environ, "PYTHONHASHSEED": seed})
        made.append(files(tmp_path / seed))
    assert made[0] == made[1] and {Path(x).suffix for x in made[0]} >= {".md", ".csv", ".tex", ".svg", ".png", ".html"}


def test_the_command_is_known_without_loading_what_draws() -> None:
    code = (
        "import json, sys; import fastmoll, fastmoll.cli.report, fastmoll.report.tables\n"
        "names = 'matplotlib', 'pyarrow', 'jinja2', 'triton', 'nvidia.dali', 'numba'\n"
        "print(json.dumps([x for x in names if x in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == []
