"""Tests of the trainer as it is run: killed and resumed, on several processes, with bad input."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fastmoll
from fastmoll.train.imagenet import main

# A network with BatchNorm and dropout, its average, steps of several batches with a leftover one: all that a resumed
# run has to put back.
SETTINGS = [
    *("--recipe", "sample", "--model.name", "mobilenet_v3_small", "--model.ema", "0.9", "--optim.accumulate", "2"),
    *("--optim.epochs", "3", "--data.size", "32", "--data.batch-size", "3", "--data.threads", "1"),
    *("--run.log-every", "1", "--run.checkpoint-every", "4", "--run.device", "cpu"),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The networks are too small for more, and threads that wait for each other are slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of noise around a colour: 45 training images, 11 for validation."""
    root = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    for split, counts in {"train": (15, 15, 15), "val": (4, 4, 3)}.items():
        for number, count in enumerate(counts):
            folder = root / split / f"class{number}"
            folder.mkdir(parents=True)
            for image in range(count):
                height, width = generator.integers(36, 48, 2)
                pixels = generator.integers(0, 120, (height, width, 3), dtype=np.uint8)
                pixels[:, :, number] += 100
                Image.fromarray(pixels).save(folder / f"{image}.jpg")
    return root


def rank_main(rank: int, world_size: int, port: int, output: str, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    if world_size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with open(output, "a", buffering=1) as sink, redirect_stdout(sink), redirect_stderr(sink):
        code = main(arguments)
    sys.exit(code)


# Processes forked from one that has imported everything: as fresh as new ones, and seconds sooner.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["fastmoll.train.imagenet", "fastmoll.loader", "torch.utils.tensorboard"])


@contextmanager
def started(world_size: int, output: Path, *arguments: object) -> Iterator[list[Any]]:
    """The processes of a run, as torchrun would start them; at the end those that still run are killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    texts = [*map(str, arguments), "--run.output", str(output)]
    ranks: list[Any] = [
        CONTEXT.Process(target=rank_main, args=(rank, world_size, port, f"{output}.{rank}.txt", texts))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()  # SIGKILL
            process.join()


def run(world_size: int, output: Path, *arguments: object) -> str:
    """Run to the end; what rank 0 printed."""
    with started(world_size, output, *arguments) as ranks:
        for process in ranks:
            process.join(timeout=200)
    printed = Path(f"{output}.0.txt").read_text()
    assert [process.exitcode for process in ranks] == [0] * world_size, printed
    return printed


def kill_at(step: int, world_size: int, output: Path, *arguments: object) -> None:
    """Start a run and kill all of it as soon as its log shows ``step``."""
    with started(world_size, output, *arguments) as ranks:
        while not any(line["step"] >= step for line in log(output)):
            assert all(process.is_alive() for process in ranks), Path(f"{output}.0.txt").read_text()
            time.sleep(0.002)
    assert not (output / "result.json").exists()


def log(output: Path) -> list[dict[str, Any]]:
    path = output / "log.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def assert_equal(ours: Any, theirs: Any, where: str = "") -> None:
    """Bit for bit, through dicts and lists."""
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), where
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for name in ours:
            assert_equal(ours[name], theirs[name], f"{where}.{name}")
    elif isinstance(ours, list):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(*pair, f"{where}.{number}")
    else:
        assert ours == theirs, where


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_killed_and_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(
    tmp_path: Path, data: Path, world_size: int
) -> None:
    # 15 batches of 3 on one process, 11 of 2 on each of two: always one left over after the steps of two batches.
    arguments = [data, *SETTINGS, "--data.batch-size", 4 - world_size]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(world_size, whole, *arguments)
    # In the middle of the second epoch, and between two checkpoints.
    kill_at(log(whole)[-1]["step"] // 2 + 1, world_size, killed, *arguments)
    assert "resuming" in run(world_size, killed, *arguments, "--run.resume")

    states = [torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (whole, killed)]
    for state in states:
        del state["config"]["run"]  # output and resume differ, as they should
        state["ranks"] = [rank["rng"] for rank in state["ranks"]]
    assert_equal(*states)
    assert_equal(*[torch.load(folder / "model.pt", weights_only=True) for folder in (whole, killed)])
    results = [json.loads((folder / "result.json").read_text())["validation"] for folder in (whole, killed)]
    assert results[0] == results[1]
    assert results[0]["count"] == 11
    # Each step and each validation is in the log once.
    assert [(line["kind"], line["step"]) for line in log(killed)] == [
        (line["kind"], line["step"]) for line in log(whole)
    ]

    # One process that evaluates the same weights finds the figures of two.
    evaluation = [data, *SETTINGS, "--run.evaluate", "--model.weights", whole / "model.pt"]
    alone = json.loads(run(1, tmp_path / "alone", *evaluation).splitlines()[-1])["validation"]
    assert (alone["error"], alone["count"]) == (results[0]["error"], 11)
    assert alone == pytest.approx(results[0], rel=1e-5)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Output folder of a short run in this process, without mollification."""
    output = tmp_path_factory.mktemp("finished") / "run"
    arguments = [data, *SETTINGS, "--mollify.no-enabled", "--run.max-steps", "3", "--run.output", output]
    assert main([str(argument) for argument in arguments]) == 0
    return output


def test_a_run_leaves_its_settings_weights_and_figures(finished: Path) -> None:
    config = json.loads((finished / "config.json").read_text())
    assert config["model"]["name"] == "mobilenet_v3_small" and config["mollify"]["enabled"] is False
    assert config["resolved"]["images_per_step"] == 6
    result = json.loads((finished / "result.json").read_text())
    assert result["weights"] == "average" and result["steps"] == 3
    assert result["images_per_second"] > 0 and 0 <= result["data_wait"] <= 1
    state = torch.load(finished / "checkpoint.pt", weights_only=True)
    assert state["learner"]["step"] == 3
    assert_equal(torch.load(finished / "model.pt", weights_only=True), state["learner"]["ema"])
    assert [line["step"] for line in log(finished)] == [1, 2, 3, 3]
    assert list((finished / "tensorboard").iterdir())


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run in this process; the one line of its error."""
    assert main([str(argument) for argument in arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


def test_a_finished_run_is_not_overwritten(finished: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds a finished run" in fails(capsys, data, *SETTINGS, "--run.output", finished)
    assert "holds a finished run" in fails(capsys, data, *SETTINGS, "--run.output", finished, "--run.resume")


def test_an_unfinished_run_is_only_touched_with_resume(
    tmp_path: Path, finished: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoint.pt").write_bytes((finished / "checkpoint.pt").read_bytes())
    assert "pass --run.resume or choose another" in fails(capsys, data, *SETTINGS, "--run.output", tmp_path)
    # The run of the fixture was not mollified.
    message = fails(capsys, data, *SETTINGS, "--run.output", tmp_path, "--run.resume")
    assert message.endswith("other settings: mollify.enabled was False and is now True")


def test_a_checkpoint_of_other_files_is_refused(
    tmp_path: Path, finished: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, output = tmp_path / "data", tmp_path / "run"
    for file in sorted(data.rglob("*.jpg")):
        if file.name != "14.jpg":
            copy = other / file.relative_to(data)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    output.mkdir()
    (output / "checkpoint.pt").write_bytes((finished / "checkpoint.pt").read_bytes())
    message = fails(capsys, other, *SETTINGS, "--mollify.no-enabled", "--run.output", output, "--run.resume")
    assert "files was" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.name", "resnet1"], "no classification model 'resnet1'"),
        (["--model.weights", "nowhere.pt"], "'nowhere.pt' is no file"),
        (["--data.augment", "magic"], "augment must be one of .*'magic'"),
        (["--data.batch-size", "99"], "batch_size=99"),
        (["--mollify.roles", "0", "0", "0"], "roles"),
        (["--mollify.beta", "1", "-2"], "beta.*-2"),
        (["--optim.lr", "-1"], "--optim.lr must be positive, got -1"),
    ],
)
def test_bad_input_is_one_line_before_any_work(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    line = fails(capsys, data, *SETTINGS, "--run.output", tmp_path / "run", *arguments)
    assert re.search(message, line), line
    assert not (tmp_path / "run").exists()


def test_a_folder_without_classes_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert str(tmp_path) in fails(capsys, tmp_path, *SETTINGS, "--run.output", tmp_path / "run")
    assert str(tmp_path / "no") in fails(capsys, tmp_path / "no", *SETTINGS, "--run.output", tmp_path / "run")


def test_train_and_val_of_other_classes_are_refused(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "data"
    root.mkdir()
    (root / "train").symlink_to(data / "train")
    (root / "val" / "stranger").mkdir(parents=True)
    (root / "val" / "stranger" / "0.jpg").write_bytes((data / "val" / "class0" / "0.jpg").read_bytes())
    (root / "val" / "class0").symlink_to(data / "val" / "class0")
    message = fails(capsys, root, *SETTINGS, "--run.output", tmp_path / "run")
    assert "train and val have other classes, for example class1, class2, stranger" in message


def test_an_unreadable_image_ends_the_run_with_its_name(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "data"
    for file in sorted(data.rglob("*.jpg")):
        copy = root / file.relative_to(data)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    (root / "train" / "class1" / "3.jpg").write_bytes(b"<html>not found</html>")
    arguments = [root, *SETTINGS, "--run.output", tmp_path / "run"]
    assert main([str(argument) for argument in arguments]) == 1
    assert "class1/3.jpg" in capsys.readouterr().err


def test_one_resident_batch_is_trained_on_without_checkpoints(tmp_path: Path, data: Path) -> None:
    output = tmp_path / "run"
    arguments = [data, *SETTINGS, "--run.resident", "--run.max-steps", "9", "--run.output", output]
    assert main([str(argument) for argument in arguments]) == 0
    assert not (output / "checkpoint.pt").exists()
    assert [line["step"] for line in log(output) if line["kind"] == "train"] == list(range(1, 10))
    assert json.loads((output / "result.json").read_text())["images_per_second"] > 0


def test_resume_with_nothing_to_resume_starts(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [data, *SETTINGS, "--run.resume", "--run.max-steps", "1", "--run.output", tmp_path / "run"]
    assert main([str(argument) for argument in arguments]) == 0
    assert "nothing to resume" in capsys.readouterr().out


def test_an_error_on_one_process_ends_all_with_one_message(tmp_path: Path, data: Path) -> None:
    # Only rank 0 reads weights; rank 1 would wait for them.
    with started(2, tmp_path / "run", data, *SETTINGS, "--model.weights", "nowhere.pt") as ranks:
        for process in ranks:
            process.join(timeout=100)
    assert [process.exitcode for process in ranks] == [2, 1]
    texts = [(tmp_path / f"run.{rank}.txt").read_text() for rank in range(2)]
    assert "error: --model.weights: 'nowhere.pt' is no file" in texts[0]
    assert "error" not in texts[1]


def test_torchrun_runs_the_script_from_any_folder(tmp_path: Path, data: Path) -> None:
    script = Path(fastmoll.__file__).resolve().parent.parent / "train" / "imagenet.py"
    path = os.pathsep.join([str(script.parent.parent), os.environ.get("PYTHONPATH", "")])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, script, data, *SETTINGS, "--run.max-steps", "2", "--run.output", "out"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "result.json").read_text())["validation"]["count"] == 11
    assert done.stdout.count("ECE (15 bins)") == 1
