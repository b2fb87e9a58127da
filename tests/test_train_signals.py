"""Tests of runs that a signal ends: what several processes hear of it, and a validation in its middle."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluations import write_data
from processes import assert_same_end, be_rank, log, rank_main, run, started

from fastmoll.distributed import Process, launch
from fastmoll.output import run_weights
from fastmoll.train import engine
from fastmoll.train.signals import stop_asked
from fastmoll.train.small_images import main

SETTINGS = [
    *("--net", "mobilenet_v3_small", "--model.ema", "0.9", "--optim.epochs", "3", "--data.batch-size", "4"),
    *("--augment", "fcr+trivial", "--mollify", "--run.validate-every", "1", "--run.device", "cpu"),
]


def interrupted(rank: int, world_size: int, port: int, output: str, *rest: Any) -> None:
    """As `rank_main`, but the last process gets a SIGTERM at the second batch of its second validation."""
    score, validations = engine.score, 0

    def watched(model: Any, batches: Any, *args: Any, **options: Any) -> None:
        nonlocal validations
        validations += 1
        done = 0

        def counted() -> Iterator[Any]:
            nonlocal done
            for batch in batches:
                done += 1
                if (rank, validations, done) == (world_size - 1, 2, 1):
                    os.kill(os.getpid(), signal.SIGTERM)
                yield batch

        score(model, counted(), *args, **options)
        with open(f"{output}.batches", "a") as file:
            file.write(f"{done} ")

    engine.score = watched
    rank_main(rank, world_size, port, output, *rest)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_signal_ends_a_validation_in_its_middle_and_the_resumed_run_has_the_bits_of_an_uninterrupted_one(
    tmp_path: Path, world_size: int
) -> None:
    data = write_data(tmp_path, 32, 45, 33)
    arguments = ["--data", data, *SETTINGS]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run(world_size, whole, *arguments, script="small_images")
    with started(world_size, stopped, *arguments, script="small_images", main=interrupted) as ranks:
        for process in ranks:
            process.join(timeout=100)
    said = Path(f"{stopped}.0.txt").read_text()
    assert [process.exitcode for process in ranks] == [128 + signal.SIGTERM] * world_size, said
    step = torch.load(stopped / "checkpoint.pt", weights_only=True)["learner"]["step"]
    assert f"stopped by SIGTERM after step {step}, before its validation was done; --resume goes on there" in said
    # 33 images in batches of 4, or 16 and 17 of them.
    batches = [Path(f"{stopped}.{rank}.txt.batches").read_text().split() for rank in range(world_size)]
    assert batches == ([["9", "1"]] if world_size == 1 else [["4", "4"], ["5", "1"]])
    assert [line["epoch"] for line in log(stopped) if line["kind"] == "validation"] == [1]
    assert not (stopped / "result.json").exists()

    assert f"resuming {stopped}/checkpoint.pt after step {step}\n" in run(
        world_size, stopped, "--resume", script="small_images"
    )
    assert assert_same_end(whole, stopped)["count"] == 33
    lines = [[line for line in log(folder) if line["kind"] == "validation"] for folder in (whole, stopped)]
    assert lines[0] == lines[1] and len(lines[0]) == 3


def looks(rank: int, world_size: int, port: int, output: str, *rest: Any) -> None:
    """Write down in which step a process hears of a signal that came to the last one before the fifth."""
    be_rank(rank, world_size, port)
    with launch("cpu") as process, stop_asked(process) as signals:
        heard = []
        for step in range(8):
            if (rank, step) == (world_size - 1, 4):
                os.kill(os.getpid(), signal.SIGTERM)
            heard.append(signals.look())
        Path(output).write_text(json.dumps([heard, signals.own, signals.agreed()]))


def test_all_processes_hear_of_a_signal_to_one_in_the_same_step(tmp_path: Path) -> None:
    with started(3, tmp_path / "out", main=looks) as ranks:
        for process in ranks:
            process.join(timeout=100)
    assert [process.exitcode for process in ranks] == [0] * 3
    found = [json.loads((tmp_path / f"out.{rank}.txt").read_text()) for rank in range(3)]
    assert [heard for heard, _, _ in found] == [[0] * 5 + [15] * 3] * 3
    assert [(own, agreed) for _, own, agreed in found] == [(0, 15), (0, 15), (15, 15)]


def test_a_run_that_goes_on_with_more_steps_is_not_finished_until_it_has_done_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    arguments = ["--data", str(write_data(tmp_path, 32, 45, 33)), *SETTINGS, "--run.output", str(output)]
    assert main([*arguments, "--run.max-steps", "1"]) == 0 and run_weights(output) == output / "model.pt"

    def stop(*anything: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fastmoll.train.run.train_epoch", stop)
    assert main([*arguments, "--resume", "--run.max-steps", "2"]) == 130
    assert run_weights(output) is None and not (output / "result.json").exists()


def test_signals_of_one_moment_are_one_notice_and_a_later_one_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []
    with pytest.raises(KeyboardInterrupt), stop_asked(Process(0, 1, torch.device("cpu"))) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)  # as that of a sweep, in a job that a cluster ends
        heard.append(signals.look())
        monkeypatch.setattr("fastmoll.train.signals.ONE_NOTICE", -1)
        os.kill(os.getpid(), signal.SIGINT)
    assert heard == [signal.SIGTERM]
