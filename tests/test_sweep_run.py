"""Runs of a sweep: that they fail, stop and go on one by one."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from sweeps import DIGITS, finish

import fastmoll
from fastmoll.cli.main import main
from fastmoll.sweep import run as sweep
from fastmoll.sweep.file import Run, read_sweep
from fastmoll.sweep.run import run_sweep
from fastmoll.sweep.select import select

# Stands for a trainer: two steps with a checkpoint after each, unless the folder above says what else it should do.
FAKE = """
import fcntl, json, os, pathlib, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--run.output") + 1])
assert "--run.resume" in sys.argv and not (out / "result.json").exists()
assert not {"RANK", "LOCAL_RANK"} & os.environ.keys()
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


def test_every_option_has_help_and_bad_usage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--help"]) == 0
    text = capsys.readouterr().out
    options = ["FILE", "--out", "--filter", "--task", "--device", "--gpus", "--list", "--table", "paper.toml"]
    assert all(word in text for word in options)
    assert main(["sweep", "paper.toml", "--list", "--table"]) == 2
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.usefixtures("fake")
def test_a_failed_run_is_reported_the_others_go_on_and_only_it_is_done_again(
    write_sweep: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_sweep(DIGITS)
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
def test_a_run_whose_result_is_damaged_is_done_again_and_what_was_there_is_kept(
    write_sweep: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (run, *_) = read_sweep(write_sweep(DIGITS))
    folder = Path("runs/some") / run.name
    folder.mkdir(parents=True)
    (folder / "result.json").write_text('{"validation": {"err')
    (folder / "checkpoint.pt").write_text("2")
    assert run_sweep("some.toml", filters=[run.name], device="cpu") == 0
    text = capsys.readouterr().out
    assert "1 runs, 0 of them done" in text and f"{run.name}: its result is damaged, and kept as result.json.d" in text
    assert f"{run.name}: resumed" in text and "done in 00:00:0" in text and sweep.state(folder) == "done"
    assert (folder / "result.json.damaged").read_text() == '{"validation": {"err'


@pytest.mark.usefixtures("fake")
def test_a_result_that_can_not_be_read_ends_no_sweep(
    write_sweep: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_text = Path.read_text

    def stale(path: Path, **options: str) -> str:
        if path.name == "result.json":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return read_text(path, **options)

    monkeypatch.setattr(Path, "read_text", stale)
    write_sweep(DIGITS)
    assert main(["sweep", "some.toml", "--filter", "mollify=true", "--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    assert "2 failed" in out and err.count("result.json: Stale file handle: left out of the table") == 2


@pytest.mark.usefixtures("fake")
def test_a_run_that_can_not_be_started_stops_no_other_and_takes_no_device(
    write_sweep: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first, *_ = runs = read_sweep(write_sweep(DIGITS))
    (Path("there") / first.name / "output.txt").mkdir(parents=True)
    assert main(["sweep", "some.toml", "--out", "there", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert f"{first.name}: can't be started: there/{first.name}/output.txt: Is a directory\n" in out
    assert out.count(": done in") == len(runs) - 1 and "3 done, 1 failed\n" in out
    assert main(["sweep", "some.toml", "--out", "some.toml/there", "--device", "cpu"]) == 2
    assert re.fullmatch(r"error: --out: \S*/some.toml is not a folder\n", capsys.readouterr().err)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("gpus", "expected"), [(None, ["2", "GPU-5"]), ("2", ["2"])])
def test_each_gpu_has_one_run_at_a_time(
    write_sweep: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, gpus: str | None, expected: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5")
    for name in ("RANK", "LOCAL_RANK"):  # of the sweep's own job; a trainer would wait for others
        monkeypatch.setenv(name, "0")
    path = write_sweep(DIGITS)
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


def test_gpus_that_are_not_there_are_refused(
    write_sweep: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = write_sweep(DIGITS)
    with pytest.raises(ValueError, match="--gpus: torch finds no usable CUDA device"):
        run_sweep(path, gpus="0")
    with pytest.raises(ValueError, match="--device: torch finds no usable CUDA device"):
        run_sweep(path, device="cuda")
    with pytest.raises(ValueError, match="--gpus: there are none to use with --device cpu, got '0'"):
        run_sweep(path, device="cpu", gpus="0")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ('data = [\n"digits",\n"./nowhere"]', "error: some.toml, [[grid]] 1, line 4: data: "),
        ('data = ["digits", "cifar100"]', "cifar100 is neither in "),
        ('trainer = "imagenet"\nnet = "resnet18"\ndata = "nowhere"', "data: there is no folder nowhere"),
    ],
)
def test_data_that_are_not_there_are_found_before_any_run_starts(
    grid: str,
    message: str,
    tmp_path: Path,
    fake: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Path("some.toml").write_text(f"[[grid]]\n{grid}\n")
    assert main(["sweep", "some.toml", "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err and not Path("runs").exists()
    if "digits" in grid:
        assert main(["sweep", "some.toml", "--device", "cpu", "--filter", "digits"]) == 0


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ('data = ["digits", "./nowhere"]', "nowhere' is no file or folder"),
        (
            'data = "digits"\noptions."model.weights" = "there/best.pt"',
            "error: some.toml, [[grid]] 1, line 3: --model.weights: 'there/best.pt' is no file\n",
        ),
        ("data = 'cifar10'\noptions.data.path = './x'", "error: some.toml, [[grid]] 1, line 3: "),
    ],
)
def test_what_a_start_would_be_refused_for_is_said_of_a_list_too(
    grid: str, message: str, write_sweep: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    runs = read_sweep(write_sweep(f"[[grid]]\n{grid}\n"))
    assert main(["sweep", "some.toml", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and not Path("runs").exists()
    assert main(["sweep", "some.toml", "--device", "cpu", "--list"]) == 0
    captured = capsys.readouterr()
    assert all(f"to do      {run.name}\n" in captured.out for run in runs)
    assert captured.err == f"a start here would be refused: {error.removeprefix('error: ')}"


def test_a_run_that_was_begun_needs_its_weights_no_more(
    write_sweep: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    text = '[[grid]]\ndata = "digits"\noptions = { "model.weights" = "there/best.pt", "optim.name" = "adamw" }\n'
    (run,) = read_sweep(write_sweep(text))
    folder = Path("runs/some") / run.former  # as earlier versions called it
    folder.mkdir(parents=True)
    (folder / "checkpoint.pt").touch()
    assert main(["sweep", "some.toml", "--device", "cpu", "--list"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"unfinished {run.former}\n") and captured.err == ""
    assert select([run], [run.former]) == select([run], ["adamw"]) == [run]


@pytest.mark.usefixtures("fake")
def test_the_end_of_a_job_ends_the_trainers_and_the_next_sweep_goes_on(
    write_sweep: Callable[[str], Path], tmp_path: Path
) -> None:
    write_sweep(DIGITS)
    out = tmp_path / "runs" / "some"
    out.mkdir(parents=True)
    (out / "wait").touch()
    with subprocess.Popen(driver("--device=cpu"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: [*out.glob("*/checkpoint.pt")], process)
        process.terminate()  # as SLURM does at the time limit
        time.sleep(0.1)
        process.terminate()  # timeout(1) sends it to its child, then to the group that it is in
        text, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (128 + signal.SIGTERM, ""), (text, error)
    assert text.endswith("stopped by SIGTERM; the same command goes on (4 to do)\n")
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
    write_sweep: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep(DIGITS)
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


@pytest.mark.usefixtures("fake")
def test_of_two_sweeps_the_slower_leaves_what_the_other_has_done_meanwhile(
    write_sweep: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = read_sweep(write_sweep(DIGITS))
    slower = sweep._Sweep(runs, tmp_path, [None])
    for run in runs[:3]:
        finish(tmp_path / run.name, 0.1)
    (tmp_path / runs[3].name).mkdir()
    with open(tmp_path / runs[3].name / ".sweep", "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert slower.run() == 0
    text = capsys.readouterr().out
    assert "started" not in text and text.endswith("3 done, 1 left to another process\n")


def test_the_trainer_itself_is_stopped_goes_on_and_ends_in_the_table(
    write_sweep: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_sweep("""
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
