"""Tests of what a run leaves: checkpoints, logs, the lock on its folder, and errors in one line."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from learners import CPU, saved_run, settings

import fastmoll
from fastmoll.distributed import Stop, launch
from fastmoll.output import lock, write_json
from fastmoll.train import checkpoint
from fastmoll.train.logs import Log, table


def test_an_error_of_input_becomes_one_line_and_any_other_is_raised() -> None:
    with pytest.raises(Stop) as stopped, CPU.agree():
        raise ValueError("x must be 1, got 2")
    assert (stopped.value.message, stopped.value.code) == ("x must be 1, got 2", 2)
    with pytest.raises(Stop) as stopped, CPU.agree():
        raise fastmoll.BadImageError([("a.jpg", "empty")], "bad")
    assert stopped.value.code == 1 and "a.jpg: empty" in str(stopped.value.message)
    with pytest.raises(Stop) as stopped, CPU.agree():
        raise OSError("no space")
    assert (stopped.value.message, stopped.value.code) == ("no space", 1)
    with pytest.raises(KeyError), CPU.agree():
        raise KeyError("a bug")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_asked_for_and_absent_is_an_error() -> None:
    with pytest.raises(Stop, match=r"the device is to be cuda, but torch finds no usable CUDA device"), launch("cuda"):
        pass


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    this = saved_run(tmp_path / "c.pt")
    assert checkpoint.load(tmp_path / "c.pt", **this)["classes"] == ["a", "b"]
    assert os.listdir(tmp_path) == ["c.pt"]


def test_a_gpu_goes_on_from_the_random_state_of_a_cpu() -> None:
    state = checkpoint.rng_state(CPU.device)
    expected = torch.rand(3)
    checkpoint.set_rng_state(state, torch.device("cuda"))
    assert torch.equal(torch.rand(3), expected)


def test_an_interrupted_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    this = saved_run(tmp_path / "c.pt")

    def stop_midway(content: object, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", stop_midway)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save({}, tmp_path / "c.pt")
    assert checkpoint.load(tmp_path / "c.pt", **this)["format"] == 1


def test_a_file_that_can_not_be_written_leaves_the_old_one_and_one_line(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    path.write_text("old")
    for write in (checkpoint.save, lambda content, path: write_json(path, content)):
        (tmp_path / ".c.pt.part").symlink_to("/dev/full")
        with pytest.raises(OSError, match=r"^/.*c\.pt can't be written: No space left on device$"):
            write({"a": list(range(5000))}, path)
        assert (os.listdir(tmp_path), path.read_text()) == (["c.pt"], "old")


def test_only_one_run_holds_a_folder_and_leaving_frees_it(tmp_path: Path) -> None:
    for _ in range(2):
        with lock(tmp_path / "run", "--out"), pytest.raises(ValueError, match=rf"in use .*process {os.getpid()} on"):
            lock(tmp_path / "run", "--out").__enter__()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": ["a", "c"]}, "another data set: .*'c' against 'b'"),
        ({"classes": ["a", "b", "c"]}, "another data set: 3 classes there and 2 here"),
        (
            {"world_size": 4},
            "of 4 processes with batches of 32 images: 1 can go on where --data.batch-size is 128, got 32",
        ),
        ({"format": 99}, "not a checkpoint of this trainer"),
        ({"config": settings(model__name="alexnet").plain()}, "of model alexnet, not of resnet18"),
        ({"config": settings(optim__epochs=3).plain()}, "other settings: optim.epochs was 3 and is now 12"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    this = saved_run(tmp_path / "c.pt", **change)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(tmp_path / "c.pt", **this)


def test_a_file_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    this = saved_run(tmp_path / "c.pt")
    (tmp_path / "c.pt").write_bytes(b"half a file")
    with pytest.raises(ValueError, match=r"c\.pt is damaged"):
        checkpoint.load(tmp_path / "c.pt", **this)


def test_a_resumed_log_has_each_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = Log(tmp_path, CPU, 0)
    for step in (2, 4, 6):
        log.write("train", step, 0, {"loss": float(step)})
    log.write("validation", 4, 0, {"error": 0.5})
    log.close()
    with open(tmp_path / "log.jsonl", "ab") as file:
        file.write(b'5\n{}\n\xff\xfe\n{"kind": "tra')  # other people's lines; then the kill came
    time.sleep(1.1)  # TensorBoard reads its files in the order of the seconds in their names
    log = Log(tmp_path, CPU, 4)
    log.write("validation", 4, 0, {"error": 0.25})
    log.write("train", 6, 1, {"loss": 60.0})
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("train", 2),
        ("train", 4),
        ("validation", 4),
        ("train", 6),
    ]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [(2, 2.0), (4, 4.0), (6, 60.0)]
    assert [event.value for event in board.Scalars("validation/error")] == [0.25]


def test_logs_on_a_full_disk_are_named(tmp_path: Path) -> None:
    log = Log(tmp_path, CPU, 0)
    log._file = open("/dev/full", "w", buffering=1)
    with pytest.raises(OSError, match=f"^{tmp_path}: the logs can't be written: No space left on device$"):
        log.write("train", 2, 0, {"loss": 1.0})


def test_the_table_shows_every_figure() -> None:
    text = table("Validation", {"error": 0.251, "nll": 1.25, "ece": 0.0321, "count": 50000})
    assert [word in text for word in ("25.10%", "1.2500", "0.0321", "50000")] == [True] * 4
