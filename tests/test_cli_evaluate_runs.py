"""``fastmoll evaluate`` and ``--rescore`` on folders: of a sweep, with all its runs, and of one run."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from statistics import fmean

import pytest
from evaluations import SOME, cells, fails, finish, run, start, write_data

from fastmoll.train.small_images import main as train

pytestmark = pytest.mark.usefixtures("one_thread")
ONE = ["--corruptions", "fog", "--severities", 2, "--device", "cpu"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of one epoch."""
    place = tmp_path_factory.mktemp("trained")
    (place / "data").mkdir()
    settings = ["--net", "shufflenet_v2_x0_5", "--augment", "none", "--optim.epochs", "1", "--data.batch-size", "10"]
    settings += ["--run.device", "cpu", "--run.output", str(place / "run")]
    assert train(["--data", str(write_data(place / "data")), *settings]) == 0
    return place / "run"


@pytest.fixture
def sweep(tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two runs, one that isn't finished, and one with a damaged network."""
    monkeypatch.delenv("COLUMNS", raising=False)  # to which a table would be wrapped, and which pytest-xdist sets
    for name in ("run-10", "run-2", "run-3", "run-4"):
        shutil.copytree(trained, tmp_path / "sweep" / name)
    for name in ("model.pt", "result.json"):
        (tmp_path / "sweep" / "run-3" / name).unlink()
    (tmp_path / "sweep" / "run-4" / "model.pt").write_bytes(b"none")
    (tmp_path / "sweep" / "table.md").touch()
    return tmp_path / "sweep"


def test_the_finished_runs_of_a_sweep_are_evaluated_and_an_error_keeps_no_other_from_it(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(sweep, *SOME) == 1
    out, err = capsys.readouterr()
    assert "1 of 4 runs are not finished and left out: run-3\n" in out
    places = [out.index(f"{sweep / name / 'model.pt'} on") for name in ("run-2", "run-10")]  # in natural order
    assert places == sorted(places)
    errors = [line for line in err.splitlines() if line.startswith("error")]
    assert len(errors) == 1 and errors[0].startswith(f"error: {sweep / 'run-4'}: CHECKPOINT: ")
    for name in ("run-2", "run-10"):
        assert len(cells(sweep / name / "robustness-generated")) == 5
    # At the end stands a table of all runs.
    lines = out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("run  "))
    heads, *rows = [line.split() for line in lines[first : first + 5] if "─" not in line]
    assert heads == ["run", "clean,", "%", "corrupted,", "%", "NLL", "ECE", "cells"]
    figures = cells(sweep / "run-10" / "robustness-generated")
    mean = {x: fmean(cell[x] for name, cell in figures.items() if name != "clean") for x in ("error", "nll", "ece")}
    row = [f"{figures['clean']['error']:.2f}", f"{mean['error']:.2f}", f"{mean['nll']:.4f}", f"{mean['ece']:.4f}", "4"]
    assert rows == [["run-2", *row], ["run-4", *"–––––"], ["run-10", *row]]
    shutil.rmtree(sweep / "run-4")
    assert run(sweep, *SOME) == 0
    assert capsys.readouterr().out.count("5 of 5 cells are done already") == 2


def test_runs_are_found_one_further_down_and_a_finished_one_has_its_weights_in_its_checkpoint_too(
    sweep: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(sweep / "run-4")
    shutil.copytree(trained, sweep.parent / "mine")
    (sweep.parent / "latest").symlink_to("sweep")
    (sweep.parent / "mine" / "model.pt").unlink()
    (sweep / "run-10" / "model.pt").unlink()
    (sweep / "run-10" / "checkpoint.pt").unlink()
    assert run(sweep.parent, *ONE) == 0
    out = capsys.readouterr().out
    evaluated = [line.partition(" on ")[0] for line in out.splitlines() if ".pt on " in line]
    assert evaluated == [f"{sweep.parent / 'mine' / 'checkpoint.pt'}", f"{sweep / 'run-2' / 'model.pt'}"]
    assert "1 of 4 runs are not finished and left out: sweep/run-3\n" in out
    assert "1 of 4 runs are finished, but have no weights any more, and left out: sweep/run-10\n" in out
    assert [line.split()[0] for line in out.splitlines() if line.startswith(("mine ", "sweep/"))] == [
        "mine",
        "sweep/run-2",
    ]
    shutil.copy(trained / "model.pt", sweep.parent / "mine")  # the same weights
    assert run(sweep.parent / "mine", *ONE) == 0 and "2 of 2 cells are done already" in capsys.readouterr().out


def test_a_run_under_several_names_is_evaluated_once(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("run-3", "run-4", "run-10"):
        shutil.rmtree(sweep / name)
    for name, target in (("best", "run-2"), ("zz", "run-2"), ("other", sweep.parent / "elsewhere")):
        (sweep / name).symlink_to(target)
    shutil.copytree(sweep / "run-2", sweep.parent / "elsewhere")
    assert run(sweep, *ONE) == 0
    evaluated = [line for line in capsys.readouterr().out.splitlines() if "model.pt on " in line]
    assert [line.partition(" on ")[0] for line in evaluated] == [
        f"{sweep / x / 'model.pt'}" for x in ("other", "run-2")
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", 0], "--batch-size must be"),
        (["--corruptions", "fogg"], "error: --corruptions: there is no 'fogg'; did you mean fog?"),
        (["--corrupted", "official"], "--corrupted must be generated or official:PATH, got 'official'"),
        (["--corrupted", "/"], "generated or official:PATH, got '/'; did you mean official:/?"),
    ],
)
def test_a_wrong_argument_is_said_once_for_all_runs(
    sweep: Path, capsys: pytest.CaptureFixture[str], arguments: list[object], message: str
) -> None:
    assert message in fails(capsys, sweep, *ONE, *arguments)
    assert not list(sweep.glob("*/robustness-*"))


def test_an_error_that_all_runs_have_is_said_once(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(sweep / "run-4")
    assert run(sweep, *ONE, "--data", "/nowhere") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {sweep / 'run-2'}: --data: '/nowhere' is no file or folder")
    assert second == "error: the same as for run-2: run-10"


def test_two_processes_evaluate_a_sweep_together(sweep: Path) -> None:
    assert finish(start(2, sweep, *ONE), 100) == [1, 1]
    for name in ("run-2", "run-10"):
        assert len(cells(sweep / name / "robustness-generated")) == 2
    assert finish(start(2, sweep, *ONE, "--out", sweep / "out"), 100) == [2, 2]


def test_what_is_of_one_network_is_refused_for_a_sweep(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--out is for one network, but {sweep} is a folder of runs" in fails(capsys, sweep, "--out", "x")
    assert f"--net: {sweep / 'run-2' / 'model.pt'} is of shufflenet_v2_x0_5, not of x" in fails(
        capsys, sweep, "--net", "x"
    )
    for path in (*sweep.glob("*/model.pt"), *sweep.glob("*/result.json")):
        path.unlink()
    message = fails(capsys, sweep)
    assert message == f"error: CHECKPOINT: no run in {sweep} is finished: run-2, run-3, run-4, run-10"
    assert "is the folder of a run that is not finished, whose checkpoint.pt has" in fails(capsys, sweep / "run-2")
    (sweep / "run-2" / "checkpoint.pt").unlink()
    assert "is a folder without model.pt" in fails(capsys, sweep / "run-2")


def test_the_table_of_all_runs_is_as_wide_as_the_terminal(
    sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(sweep / "run-4")
    name = "digits-shufflenet_v2_x0_5-none-mollify-mollify.beta=1,3-seed10"
    (sweep / "run-10").rename(sweep / name)
    (sweep / "run-2").rename(sweep / name.replace("1,3", "1,2"))
    start = name.partition("mollify.beta")[0]
    for width in (60, 80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        assert run(sweep, *ONE) == 0
        lines = capsys.readouterr().out.splitlines()
        shown = lines[max(place for place, line in enumerate(lines) if line.startswith("run ")) - 1 :]
        assert all(len(line) <= width for line in shown)
        names = "".join(line.split("  ")[0] for line in shown)  # be they in several lines
        assert (name in names) == (width == 200)
        assert (f"Names begin with {start}" in names and name.removeprefix(start) in names) == (width < 200)


def test_several_networks_are_evaluated_each_once_and_put_in_one_table(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two, ten = sweep / "run-2", sweep / "run-10"
    assert run(two, *ONE, ten / "model.pt", f"{two}/", sweep / "run-3", sweep / "table.md") == 0
    out = capsys.readouterr().out
    assert [x.partition(" on ")[0] for x in out.splitlines() if ".pt on " in x] == [f"{x}/model.pt" for x in (two, ten)]
    assert f"1 of 4 runs are not finished and left out: {sweep / 'run-3'}\n" in out
    assert f"1 of 4 are no networks and left out: {sweep / 'table.md'}\n" in out
    table = out[out.rindex("\nrun ") :].splitlines()
    assert [line.split()[0] for line in table if line.startswith("/")] == [str(two), str(ten / "model.pt")]
    # With a folder of runs among them, and an error of one.
    (sweep.parent / "other").mkdir()
    ten.rename(sweep.parent / "other" / "run-2")
    assert run(sweep.parent / "other", sweep, *ONE) == 1
    out, err = capsys.readouterr()
    table = out[out.rindex("\nrun ") :].splitlines()
    names = [str(sweep.parent / "other" / "run-2"), str(two), str(sweep / "run-4")]
    assert [line.split()[0] for line in table if line.startswith("/")] == names
    assert f"error: {sweep / 'run-4'}: CHECKPOINT: " in err


def test_one_of_several_that_names_nothing_is_refused_before_the_others_are_evaluated(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = sweep / "run-2"
    (tmp_path / "empty").mkdir()
    for other, message in (
        (tmp_path / "nowhere", "nowhere is no file"),
        (tmp_path / "empty", "empty is a folder without model.pt"),
        ("torchvision:resnet51", "torchvision has no 'resnet51'; did you mean torchvision:resnet50"),
    ):
        assert message in fails(capsys, mine, other, *ONE)
    assert "--out is for one network, but 2 are given" in fails(capsys, mine, sweep / "run-10", *ONE, "--out", "x")
    message = fails(capsys, sweep / "run-3", sweep / "table.md")
    assert message.endswith(f"none of these is a finished run: {sweep / 'run-3'}, {sweep / 'table.md'}")
    assert not list(sweep.glob("*/robustness-*"))


def test_rescoring_takes_the_folder_of_a_run_with_one_evaluation(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = sweep / "run-2"
    assert f"{mine} holds no evaluation" in fails(capsys, "--rescore", mine)
    assert run(mine, *ONE, "--predictions") == 0
    out = mine / "robustness-generated"
    (out / "cells" / "fog-2.json").unlink()
    assert run("--rescore", mine) == 0 and (out / "cells" / "fog-2.json").exists()


def test_rescoring_takes_several_evaluations_and_all_with_predictions_in_folders(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(sweep / "run-4")
    assert run(sweep / "run-2", *ONE, "--predictions") == 0 and run(sweep / "run-10", *ONE) == 0
    first, bare = (sweep / name / "robustness-generated" for name in ("run-2", "run-10"))
    second = Path(shutil.copytree(first, sweep / "run-2" / "robustness-other"))
    both = [first / "cells" / "fog-2.json", second / "cells" / "fog-2.json"]
    for folders in ([first, second], [sweep / "run-2"], [sweep], [first, sweep]):
        for path in both:
            path.unlink()
        capsys.readouterr()
        assert run("--rescore", *folders) == 0 and all(path.exists() for path in both)
        table = capsys.readouterr().out.rpartition("\nrun ")[2].splitlines()
        assert [line.split()[0] for line in table if line.startswith("/")] == [str(first), str(second)]
    both[0].unlink()
    assert run("--rescore", bare, first) == 1 and both[0].exists()
    assert f"error: {bare}: {bare} has no predictions of clean, fog-2: evaluate with" in capsys.readouterr().err


def test_predictions_without_pyarrow_are_refused_before_anything_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    message = "error: predictions need pyarrow: pip install 'fastmoll[report]'"
    assert fails(capsys, tmp_path / "nowhere.pt", "--predictions") == message
