"""Tests of sweeps: what a file means, names that are wrong, runs that fail, stop and go on, the table of results."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import fastmoll
from fastmoll.cli.main import main
from fastmoll.paper import published
from fastmoll.sweep import run as sweep
from fastmoll.sweep.file import Run, find_file, read_sweep
from fastmoll.sweep.run import run_sweep, select
from fastmoll.sweep.table import Row, as_csv, as_markdown, make_rows
from fastmoll.train.config import parse, parse_small

DIGITS = """
[defaults]
data = "digits"
[[grid]]
mollify = [false, true]
seed = [0, 1]
"""

# Stands for a trainer: two steps with a checkpoint after each, unless the folder above says what else it should do.
FAKE = """
import fcntl, json, os, pathlib, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--run.output") + 1])
assert "--run.resume" in sys.argv and not (out / "result.json").exists()
lock = open(out / ".lock", "a")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
place = os.environ.get("CUDA_VISIBLE_DEVICES") or sys.argv[sys.argv.index("--run.device") + 1]
begin = time.monotonic()
checkpoint, wait, bad = out / "checkpoint.pt", out.parent / "wait", out.parent / "bad"
first = int(checkpoint.read_text()) if checkpoint.exists() else 0
for step in range(first, 2):
    print("step", step, flush=True)
    checkpoint.write_text(str(step + 1))
    while wait.exists():
        time.sleep(0.01)
if bad.exists() and bad.read_text() in sys.argv:
    print("\\rbar 1\\rbar 2\\nerror: no such thing", file=sys.stderr)
    sys.exit(2)
time.sleep(0.1)
(out / "log").write_text(json.dumps([place, begin, time.monotonic(), first]))
(out / "result.json").write_text(json.dumps({"validation": {"error": 0.25, "nll": 1.0, "ece": 0.1}}))
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Write a sweep file into the current folder, an empty one."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        Path("some.toml").write_text(text)
        return Path("some.toml")

    return write


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `FAKE` be the trainer."""
    (tmp_path / "fake.py").write_text(FAKE)
    theirs = sweep.trainer_command

    def command(run: Run, folder: Path, device: str) -> list[str]:
        return [sys.executable, "-S", str(tmp_path / "fake.py"), *theirs(run, folder, device)[3:]]

    monkeypatch.setattr(sweep, "trainer_command", command)


def driver(*options: str, real: bool = False) -> list[str]:
    """A command that sweeps through ``some.toml``, with `FAKE` unless ``real``."""
    swap = "" if real else "sweep.trainer_command = lambda *x: [sys.executable, '-S', 'fake.py', *theirs(*x)[3:]]"
    code = (
        "import sys; from fastmoll.cli.main import main; from fastmoll.sweep import run as sweep\n"
        f"theirs = sweep.trainer_command\n{swap}\n"
    )
    return [sys.executable, "-c", f"{code}sys.exit(main(sys.argv[1:]))", "sweep", "some.toml", *options]


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 100
    while not condition():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.005)


def names(runs: Sequence[Run]) -> list[str]:
    return [run.name for run in runs]


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paper() -> list[Run]:
    return read_sweep(find_file("paper.toml"))


def test_the_papers_file_has_three_seeds_for_every_cell_of_its_tables_on_small_images(paper: list[Run]) -> None:
    small = [x for x in published() if x.data != "imagenet"]
    cells = {(x.data, x.net, x.augment, x.mollify) for x in small}
    # Tables 1 (and A1), A2; 2, as far as it is not table 1.
    assert len(cells) == 48 + 45 + 6
    roles = {"true": [1, 1, 1], "noise": [1, 1, 0], "blur": [1, 0, 1]}
    for data, net, augment, mollify in cells:
        seeds = {
            run.seed
            for run in paper
            if (run.data, run.net, run.augment) == (data, net, augment)
            and run.mollify == (mollify != "false")
            and (not run.mollify or run.settings["mollify.roles"] == roles[mollify])
            and {*run.changes} <= {"mollify.roles"}
        }
        assert seeds == {0, 1, 2}, (data, net, augment, mollify)
    assert len({*names(paper)}) == len(paper)
    assert [run.seed for run in paper] == sorted(run.seed for run in paper)


def test_a_run_is_the_papers_recipe_and_what_the_file_says(paper: list[Run]) -> None:
    (run,) = [run for run in paper if run.name == "cifar100-presnet50-fcr+trivial-mollify-mollify.beta=1,3-seed2"]
    config = parse_small(run.arguments)
    recipe = parse_small("--data cifar100 --augment fcr+trivial --mollify --mollify.beta 1 3 --run.seed 2".split())
    assert config == recipe and run.settings == flat(config.plain())


def flat(tree: dict[str, Any]) -> dict[str, Any]:
    return dict(chain(*([(f"{group}.{name}", x) for name, x in section.items()] for group, section in tree.items())))


def test_options_may_be_flat_or_nested_and_the_grid_comes_before_the_defaults(write: Callable[[str], Path]) -> None:
    path = write("""
[defaults]
data = ["digits", "cifar10"]
seed = 7
options = { "optim.epochs" = 3, optim.lr = 0.5 }
[[grid]]
data = "cifar10"
[grid.options.optim]
epochs = 4
weight-decay = 0
[grid.vary]
model.compile = [true, false]
"data.mean" = [[0, 0.25, 1]]
data.std = [[1, 1, 1]]
""")
    first, second = read_sweep(path)
    assert first.name == (
        "cifar10-presnet50-fcr+trivial-data.mean=0,0.25,1-data.std=1,1,1-model.compile=true-optim.epochs=4-"
        "optim.lr=0.5-optim.weight_decay=0-seed7"
    )
    assert second.name == first.name.replace("-model.compile=true", "")
    config = parse_small(first.arguments)
    assert (config.optim.epochs, config.optim.lr, config.optim.weight_decay) == (4, 0.5, 0)
    assert (config.model.compile, config.data.mean, config.run.seed, config.mollify.enabled) == (
        True,
        (0, 0.25, 1),
        7,
        False,
    )


def test_runs_that_are_the_same_are_one(write: Callable[[str], Path]) -> None:
    path = write("""
[defaults]
data = "digits"
[[grid]]
mollify = [true, false]
[[grid]]
mollify = [true, false]
vary.mollify.k_noise = [1, 2]
""")
    start = "digits-shufflenet_v2_x0_5-none"  # the digits' own recipe
    expected = [f"{start}-mollify-seed0", f"{start}-seed0", f"{start}-mollify-mollify.k_noise=2-seed0"]
    assert names(read_sweep(path)) == expected


def test_a_run_on_imagenet_has_its_recipe(write: Callable[[str], Path]) -> None:
    path = write("""
[[grid]]
trainer = "imagenet"
data = "/data/imagenet"
augment = ["fc", "fcr+trivial"]
mollify = true
vary."mollify.roles" = [[1, 1, 0], [2, 2, 2]]
options = { recipe = "scratch", "optim.epochs" = 30 }
""")
    runs = read_sweep(path)
    run = runs[1]
    assert run.name == (
        "imagenet-resnet50-fcr+trivial-mollify-recipe=scratch-mollify.roles=1,1,0-optim.epochs=30-seed0"
    )
    config = parse(run.arguments)
    assert (str(config.data.path), config.data.augment, config.recipe) == ("/data/imagenet", "fcr+trivial", "scratch")
    assert (config.optim.epochs, config.optim.lr, config.mollify.roles) == (30, 0.1, (1, 1, 0))
    for run in runs:
        finish(Path(run.name), 0.25)
    sources = [(row.augment, row.source, row.means["error"]) for row in make_rows(runs, Path())]
    ours = [("fc", "here", 25), ("fcr+trivial", "here", 25)]
    assert sources == [*ours, *ours, ("fcr+trivial", "paper, table 5", "25.1")]


GRID = '[defaults]\ndata = "digits"\n\n[[grid]]\nseed = 1\n\n[[grid]]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file: there must be at least one [[grid]]"),
        ("[grid]\ndata = 'digits'", "at least one [[grid]], in double brackets"),
        ("[[grid]\n", "some.toml: Expected ']]' at the end of an array declaration (at line 1"),
        ("[[grid]]\n", "[[grid]] 1: data is missing"),
        ("[default]\n" + GRID, "the file, line 1: unknown key 'default': did you mean 'defaults'?"),
        (GRID + 'augmnet = "fcr"', "[[grid]] 2, line 8: unknown key 'augmnet': did you mean 'augment'?"),
        (GRID + 'augment = ["fcr",\n  "fcr+trival"]', "[[grid]] 2, line 9: augment must be"),
        (GRID + 'augment = ["fcr",\n  "fcr+trival"]', "got 'fcr+trival': did you mean 'fcr+trivial'?"),
        (GRID + 'net = "presnet51"', "line 8: there is no classification model 'presnet51'; did you mean presnet50"),
        (GRID + 'data = "cifar1O"', "line 8: data: 'cifar1O' is neither a known data set nor a file or folder: did"),
        (GRID + 'data = "cifar1O"', "did you mean 'cifar10'?"),
        (GRID + 'trainer = "imagnet"', "line 8: unknown trainer 'imagnet': did you mean 'imagenet'?"),
        (GRID + 'mollify = "yes"', "line 8: mollify must be true or false, got 'yes'"),
        (GRID + "seed = [true]", "line 8: seed must be an integer in [0, 2^63), got True"),
        (GRID + "seed = -1", "line 8: seed must be an integer in [0, 2^63), got -1"),
        (GRID + f"seed = {2**63}", f"line 8: seed must be an integer in [0, 2^63), got {2**63}"),
        (GRID + "options.data.mean = [0, 0, 0]", "line 8: --data.mean and --data.std belong together, got (0.0, 0.0"),
        (GRID + "net = []", "line 8: net has no value"),
        (GRID + "options = 3", "line 8: options must be a table, got 3"),
        (GRID + 'options."optim.epoch" = 3', "line 8: unknown option 'optim.epoch': did you mean 'optim.epochs'?"),
        (GRID + "[grid.options.optim]\nlr = 1\nepoch = 3", "line 10: unknown option 'optim.epoch'"),
        (GRID + 'vary."optim.epoch" = [3]', "line 8: unknown option 'optim.epoch'"),
        (GRID + 'vary."optim.epochs" = 3', "line 8: vary must have a list of values for optim.epochs, got 3"),
        (GRID + 'options."optim.epochs" = "ten"', "line 8: Error parsing --optim.epochs: invalid literal for int()"),
        (GRID + 'options."optim.lr" = -1', "line 8: --optim.lr must be positive, got -1"),
        (GRID + 'mollify = true\noptions."mollify.beta" = [1, -2]', "line 9: mollify: beta"),
        (GRID + "options.run.seed = 1", "options: run.seed is given by the key seed"),
        (GRID + "options.run.output = 'x'", "options: run.output is set by the sweep itself"),
        (GRID + "seed = 1\noptions.run.log-every = 3", "digits-shufflenet_v2_x0_5-none-seed1 is also a run of other"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_place_and_the_nearest_name(
    write: Callable[[str], Path], capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    write(text)
    assert main(["sweep", "some.toml"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("error: some.toml") and message in captured.err, captured.err
    assert not Path("runs").exists()


def test_a_line_of_the_defaults_is_found_too(write: Callable[[str], Path]) -> None:
    path = write('[defaults]\naugment = "fcr+tirvial" # a comment\n[[grid]]\ndata = "digits" # fcr+tirvial')
    with pytest.raises(ValueError, match=r"\[\[grid\]\] 1, line 2: .*'fcr[+]trivial'"):
        read_sweep(path)


def test_a_file_that_is_not_there_brings_those_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "papre.toml"]) == 2
    assert capsys.readouterr().err == "error: papre.toml: no such file (with fastmoll: paper.toml)\n"


def test_every_option_has_help_and_bad_usage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--help"]) == 0
    text = capsys.readouterr().out
    options = ["FILE", "--out", "--filter", "--task", "--device", "--gpus", "--list", "--table", "paper.toml"]
    assert all(word in text for word in options)
    assert main(["sweep", "paper.toml", "--list", "--table"]) == 2
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["0/3", "4/3", "1", "1/0", "-1/3", "a/3"])
def test_a_task_that_is_no_part_is_refused(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "paper.toml", f"--task={task}"]) == 2
    assert f"1 <= i <= n, for example 1/8 to 8/8 (--array=1-8), got '{task}'" in capsys.readouterr().err


# --- which runs -------------------------------------------------------------------------------------------------------


def test_a_filter_is_a_value_before_it_is_a_part_of_a_name(paper: list[Run]) -> None:
    def chosen(*filters: str) -> list[str]:
        return names(select(paper, filters))

    assert chosen("cifar10") == [name for name in names(paper) if name.startswith("cifar10-")]
    assert chosen("cifar") == [name for name in names(paper) if name.startswith("cifar")]
    plain = ["cifar10-presnet50-fcr-seed0", "cifar10-presnet50-fcr-seed1", "cifar10-presnet50-fcr-seed2"]
    assert chosen("cifar10", "presnet50", "fcr", "mollify=false") == plain
    assert chosen("data=cifar10", "net=presnet50", "augment=fcr", "mollify=false", "seed=1") == plain[1:2]
    assert {*chosen("mollify.k-noise=2.0")} == {*chosen("mollify.k_noise=2")} == {*chosen("mollify.k_noise=2")}
    assert len(chosen("mollify.k_noise=2")) == 9
    assert len(chosen("mollify.roles=1,0,1", "seed0")) == 3


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (["cifra10"], "no run matches 'cifra10': did you mean 'cifar10'?"),
        (["nets=presnet50"], "unknown key 'nets': did you mean 'net'?"),
        (["net=presnet51"], "no run matches 'net=presnet51': did you mean 'net=presnet50'?"),
        (["seed=3"], "no run matches 'seed=3': did you mean 'seed="),
        (["wrn40", "fcr+mixup"], "no run matches all of wrn40, fcr+mixup"),
    ],
)
def test_a_filter_that_matches_nothing_is_an_error(paper: list[Run], filters: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        select(paper, filters)


@pytest.mark.parametrize("done", [0, 2])
def test_the_tasks_of_an_array_share_no_run_and_leave_none_out(
    write: Callable[[str], Path], capsys: pytest.CaptureFixture[str], done: int
) -> None:
    runs = read_sweep(write(DIGITS.replace("seed = [0, 1]", "seed = [0, 1, 2, 3, 4]")))
    for run in runs[:done]:
        finish(Path("runs/some") / run.name, error=0.1)
    listed = []
    for part in (1, 2, 3, 4):
        assert main(["sweep", "some.toml", "--list", "--task", f"{part}/4"]) == 0
        *lines, last = capsys.readouterr().out.splitlines()
        assert len(lines) in (2, 3) and last.startswith(f"{len(lines)} runs in runs/some: ")
        listed += [tuple(line.split(maxsplit=1 if line[:4] == "done" else 2)) for line in lines]
    assert sorted(words[-1] for words in listed) == sorted(names(runs))
    assert sum(words[0] == "done" for words in listed) == done


# --- running ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake")
def test_a_failed_run_is_reported_the_others_go_on_and_only_it_is_done_again(
    write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write(DIGITS)
    out = Path("there")
    out.mkdir()
    (out / "bad").write_text("--run.seed=0")
    command = ["sweep", "some.toml", "--out", "there", "--device", "cpu"]
    assert main([*command, "--filter", "mollify=true"]) == 1
    text = capsys.readouterr().out
    name = "digits-shufflenet_v2_x0_5-none-mollify-seed0"
    assert re.search(rf"{name}: failed after 00:00:0\d, exit status 2; there/{name}/output.txt:\n    step 0", text)
    assert "    bar 2\n    error: no such thing\n" in text and "bar 1" not in text
    assert "1 done, 1 failed" in text and "1 of 2 runs done" in text
    (out / "bad").unlink()
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "4 runs, 1 of them done" in text and f"{name}: resumed on the CPU" in text and text.count(": done in") == 3
    assert "4 of 4 runs done" in text
    before = sorted((path, path.stat().st_mtime_ns) for path in out.glob("*/*"))
    assert main(command) == 0
    assert sorted((path, path.stat().st_mtime_ns) for path in out.glob("*/*")) == before


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("gpus", "expected"), [(None, ["2", "GPU-5"]), ("2", ["2"])])
def test_each_gpu_has_one_run_at_a_time(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, gpus: str | None, expected: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5")
    path = write(DIGITS)
    assert run_sweep(path, gpus=gpus) == 0
    logs = [json.loads(file.read_text()) for file in Path("runs/some").glob("*/log")]
    assert len(logs) == 4 and sorted({place for place, *_ in logs}) == expected
    for place in expected:
        spans = sorted((begin, end) for name, begin, end, _ in logs if name == place)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    if gpus is None:  # and the GPUs work at the same time
        spans = sorted((begin, end, place) for place, begin, end, _ in logs)
        assert spans[1][0] < spans[0][1] and spans[0][2] != spans[1][2]
    with pytest.raises(ValueError, match="--gpus must be some of 2,GPU-5, each once, got '0'"):
        run_sweep(path, gpus="0")


def test_gpus_that_are_not_there_are_refused(write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = write(DIGITS)
    with pytest.raises(ValueError, match="--gpus: torch finds no usable CUDA device"):
        run_sweep(path, gpus="0")
    with pytest.raises(ValueError, match="--device: torch finds no usable CUDA device"):
        run_sweep(path, device="cuda")
    with pytest.raises(ValueError, match="--gpus: there are none to use with --device cpu, got '0'"):
        run_sweep(path, device="cpu", gpus="0")
    assert not Path("runs").exists()


@pytest.mark.usefixtures("fake")
def test_the_end_of_a_job_ends_the_trainers_and_the_next_sweep_goes_on(
    write: Callable[[str], Path], tmp_path: Path
) -> None:
    write(DIGITS)
    out = tmp_path / "runs" / "some"
    out.mkdir(parents=True)
    (out / "wait").touch()
    with subprocess.Popen(driver("--device=cpu"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: [*out.glob("*/checkpoint.pt")], process)
        process.terminate()  # as SLURM does at the time limit
        text, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "interrupted\n"), (text, error)
    assert text.endswith("stopped; the same command goes on (4 to do)\n")
    (begun,) = out.glob("*/checkpoint.pt")
    with open(begun.parent / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the trainer has ended
    assert "KeyboardInterrupt" in (begun.parent / "output.txt").read_text()
    (out / "wait").unlink()
    assert run_sweep("some.toml", device="cpu") == 0
    assert json.loads((begun.parent / "log").read_text())[3] == 1  # went on after its first step
    assert len([*out.glob("*/result.json")]) == 4


@pytest.mark.usefixtures("fake")
def test_a_run_that_another_process_is_at_is_left_to_it(
    write: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(DIGITS)
    out = tmp_path / "runs" / "some"
    out.mkdir(parents=True)
    (out / "wait").touch()
    command = driver("--device=cpu", "--filter=mollify")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: [*out.glob("*/checkpoint.pt")], process)
        process.kill()  # the sweep is gone, its trainer goes on
    (begun,) = out.glob("*/checkpoint.pt")
    by_hand = out / "digits-shufflenet_v2_x0_5-none-seed1"
    by_hand.mkdir()
    with open(by_hand / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert run_sweep(path, action="list") == 0
        text = capsys.readouterr().out
        assert all(re.search(rf"^running +{x.name}$", text, re.M) for x in (begun.parent, by_hand))
        assert run_sweep(path, filters=["seed1"], device="cpu", task="1/2") == 0  # the one by hand
        assert run_sweep(path, filters=["mollify", "seed0"], device="cpu") == 0
        text = capsys.readouterr().out
    assert all(f"{x.name}: left to another process" in text for x in (begun.parent, by_hand))
    assert text.count("1 left to another process\n") == 2 and "started" not in text
    (out / "wait").unlink()
    while sweep.state(begun.parent) == "running":
        time.sleep(0.01)
    assert json.loads((begun.parent / "log").read_text())[3] == 0  # nobody interfered
    assert run_sweep(path, device="cpu") == 0
    assert len([*out.glob("*/result.json")]) == 4


def test_the_trainer_itself_is_stopped_goes_on_and_ends_in_the_table(
    write: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("""
[[grid]]
data = "digits"
mollify = true
options = { "run.max-steps" = 30, "run.checkpoint-every" = 1 }
""")
    root = str(Path(fastmoll.__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (run,) = read_sweep(path)
    folder = tmp_path / "runs" / "some" / run.name
    command = driver("--device=cpu", real=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for((folder / "checkpoint.pt").exists, process)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130 and not (folder / "result.json").exists()
    assert main(["sweep", str(path), "--device", "cpu"]) == 0
    assert re.search(r"resuming .*checkpoint.pt after step [1-9]", (folder / "output.txt").read_text())
    result = json.loads((folder / "result.json").read_text())
    assert result["steps"] == 30 and json.loads((folder / "config.json").read_text())["mollify"]["enabled"]
    error = 100 * result["validation"]["error"]
    assert f"{run.name}: done in" in (text := capsys.readouterr().out) and f"| {error:.2f} " in text


# --- the table --------------------------------------------------------------------------------------------------------


def finish(folder: Path, error: float, nll: float = 1.0, ece: float = 0.1, **more: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"validation": {"error": error, "nll": nll, "ece": ece, "count": 100}, **more}
    (folder / "result.json").write_text(json.dumps(content))


def test_the_table_is_mean_and_deviation_next_to_the_papers_numbers(paper: list[Run], tmp_path: Path) -> None:
    runs = select(paper, ["cifar10", "presnet50", "fcr+trivial"])
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
    assert lines[4][7:] == ["3.4 ± 0.02", "0.12 ± 0.00", "0.03 ± 0.00", "12.2 ± 0.37 (official)"]
    assert lines[5][:5] == ["cifar10", "presnet50", "fcr+trivial", "yes", ""]
    assert lines[5][-1] == "10.00 ± 2.83 (official)"
    read = list(csv.DictReader(io.StringIO(as_csv(rows))))
    assert [row["source"] for row in read] == [row.source for row in rows]
    assert float(read[0]["error_sd"]) == pytest.approx(7**0.5) and read[0]["corrupted"] == ""
    assert (read[3]["mollify"], read[3]["corrupted_set"], read[1]["seeds"]) == ("true", "official", "")


def test_the_table_says_how_to_fill_in_a_corrupted_error_that_is_missing(paper: list[Run], tmp_path: Path) -> None:
    run = select(paper, ["cifar10", "presnet50", "fcr+trivial"])[0]
    finish(tmp_path / run.name, 0.05)
    assert "`fastmoll evaluate RUN` adds it" in as_markdown(make_rows([run], tmp_path))
    finish(tmp_path / run.name, 0.05, corrupted={"error": 0.1, "source": "official"})
    assert "fastmoll evaluate" not in as_markdown(make_rows([run], tmp_path))


def test_names_with_signs_of_markdown_stay_in_their_cells() -> None:
    row = Row("a|b", "*x*", "<i>", False, "x=$1$", "here", 1, {"error": 1.0})
    line = as_markdown([row]).splitlines()[2]
    assert [cell.strip() for cell in line.split(" | ")[:5]] == [r"| a\|b", r"\*x\*", r"\<i>", "no", r"x=\$1\$"]


def test_the_table_alone_trains_nothing_and_a_filter_shortens_only_what_is_printed(
    write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    runs = read_sweep(write(DIGITS))
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
def test_a_result_that_is_none_is_an_error_before_training(
    content: str, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = read_sweep(write(DIGITS))[0]
    folder = Path("runs/some") / run.name
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(content)
    assert main(["sweep", "some.toml", "--device", "cpu"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and f"error: {folder}/result.json is not the result of a run" in captured.err
