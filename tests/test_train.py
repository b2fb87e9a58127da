"""Tests of the trainer as it is run: killed and resumed, on several processes, with bad input."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learners import TIMM, publish
from PIL import Image
from processes import assert_equal, kill_at, log, run, started

import fastmoll
from fastmoll.output import lock
from fastmoll.pipelines import MEAN, STD
from fastmoll.train.imagenet import main

# A network with BatchNorm and dropout, its average, steps of several batches with a leftover one: all that a resumed
# run has to put back.
SETTINGS = [
    *("--recipe", "sample", "--model.name", "mobilenet_v3_small", "--model.ema", "0.9", "--optim.accumulate", "2"),
    *("--optim.epochs", "3", "--data.size", "32", "--data.batch-size", "3", "--data.threads", "1"),
    *("--run.log-every", "1", "--run.checkpoint-every", "4", "--run.device", "cpu"),
]


pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_killed_and_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(
    tmp_path: Path, data: Path, world_size: int
) -> None:
    # 15 batches of 3 on one process, 7 of 2 on each of three: always one left over after the steps of two batches. With
    # three, a sum of gradients depends on its order.
    arguments = [data, *SETTINGS, "--data.batch-size", 3 if world_size == 1 else 2, "--optim.epochs", "2"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(world_size, whole, *arguments)
    # In the second epoch.
    kill_at(log(whole)[-1]["step"] // 2 + 1, world_size, killed, *arguments)
    said = run(world_size, killed, *arguments, "--run.resume", "--mollify.backend", "torch")  # on a CPU, what auto is
    assert "resuming" in said and "mollify.backend was auto and is now torch" in said

    states = [torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (whole, killed)]
    for state in states:
        del state["config"]["run"], state["config"]["mollify"]["backend"]  # these differ, as they should
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

    # One process that evaluates the same weights finds the figures of several.
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


def works(*arguments: object) -> None:
    """Run in this process."""
    assert main([str(argument) for argument in arguments]) == 0


def validation(run: Path) -> Any:
    """Its figures, to the last digits but one or two: another size of the batches rounds otherwise."""
    return pytest.approx(json.loads((run / "result.json").read_text())["validation"], rel=1e-5)


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    """The figures that an evaluation ends with."""
    return json.loads(capsys.readouterr().out.splitlines()[-1])["validation"]


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


def test_a_checkpoint_is_evaluated_without_any_training_images(
    tmp_path: Path, finished: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "val").symlink_to(data / "val")
    arguments = ["--run.evaluate", "--model.weights", finished / "checkpoint.pt", "--data.batch-size", "99"]
    works(tmp_path, *SETTINGS, *arguments)
    assert printed(capsys) == validation(finished)


def test_weights_of_a_run_bring_its_network_and_image_size(
    finished: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    works(data, "--evaluate", "--model.weights", finished / "model.pt", "--run.device", "cpu")
    assert printed(capsys) == validation(finished)


@pytest.mark.parametrize("file", ["model.pt", "checkpoint.pt"])
def test_weights_of_a_run_are_evaluated_on_its_data_and_on_no_others(
    tmp_path: Path, finished: Path, data: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    arguments = ["--evaluate", "--model.weights", finished / file, "--run.device", "cpu"]
    works(*arguments)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{data}: 11 validation images, 3 classes"
    assert json.loads(lines[-1])["validation"] == validation(finished)

    (tmp_path / "val").mkdir()
    for number in range(3):
        (tmp_path / "val" / f"class{number + 1}").symlink_to(data / "val" / f"class{number}")
    message = "is of another data set: 3 classes there and 3 here, the first difference is 'class0' against 'class1'"
    assert fails(capsys, tmp_path, *arguments) == f"error: --model.weights: {finished / file} {message}"


def test_weights_of_timm_bring_their_standardisation_and_so_does_the_run(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(monkeypatch, tmp_path)
    output = tmp_path / "run"
    network = ["--model.name", TIMM, "--model.weights", "timm", "--optim.name", "adamw", "--optim.clip-norm", "1"]
    works(data, *SETTINGS, *network, "--run.max-steps", "3", "--run.output", output)
    said = capsys.readouterr().out
    assert "standardised as timm does for test_vit.r160_in1k: mean (0.5, 0.5, 0.5), std (0.5, 0.5, 0.5)\n" in said
    assert "weights from timm's test_vit.r160_in1k, but a fresh head: that one is for 1000 classes" in said
    config = json.loads((output / "config.json").read_text())
    assert (config["data"]["mean"], config["data"]["std"]) == ([0.5] * 3, [0.5] * 3)

    theirs = json.loads((output / "result.json").read_text())["validation"]
    half = (0.5, 0.5, 0.5)
    for mean, std, same in ((None, None, True), (MEAN, half, False), (half, STD, False)):
        evaluation = ["--evaluate", "--model.weights", output / "model.pt", "--run.device", "cpu"]
        others = ["--data.mean", *mean, "--data.std", *std] if mean and std else []
        works(*evaluation, *others)
        assert (printed(capsys)["nll"] == pytest.approx(theirs["nll"], rel=1e-5)) is same

    works("--resume", "--output", output, "--run.max-steps", 4)
    assert "standardised" not in capsys.readouterr().out


def test_validation_can_wait_for_the_end_and_so_does_the_checkpoint_before_it(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = []
    monkeypatch.setattr("fastmoll.train.run.save_checkpoint", lambda _config, _process, x, _: saved.append(x.step))
    arguments = [data, *SETTINGS, "--optim.epochs", "2", "--run.validate-every", "0", "--run.checkpoint-every", "99"]
    works(*arguments, "--run.output", tmp_path / "run")
    assert saved == [16]  # and none after the first epoch's 8 steps
    assert [line["epoch"] for line in log(tmp_path / "run") if line["kind"] == "validation"] == [2]
    assert "has no val folder" not in capsys.readouterr().out


def test_validation_on_the_training_images_is_said(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    works(data / "train", *SETTINGS, "--run.max-steps", "1", "--run.output", tmp_path / "run")
    assert "has no val folder" in capsys.readouterr().out


def fails(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 2) -> str:
    """Run in this process; the one line of its error, apart from progress bars."""
    assert main([str(argument) for argument in arguments]) == code
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip() and not line.startswith("epoch ")]
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


def test_a_finished_run_is_not_overwritten(finished: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = "holds a run that stopped after step 3 of 24; --resume with more steps goes on, or choose another folder"
    assert fails(capsys, data, *SETTINGS, "--run.output", finished).endswith(message)
    again = [data, *SETTINGS, "--mollify.no-enabled", "--run.output", finished, "--run.resume", "--run.max-steps"]
    assert "has done 3 of 24 steps, and this one ends at 2; choose a larger" in fails(capsys, *again, "2")
    assert (finished / "result.json").exists()


def test_a_run_stopped_by_max_steps_says_so_and_goes_on_as_if_it_had_not(
    tmp_path: Path, finished: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    shutil.copytree(finished, stopped)
    arguments = [data, *SETTINGS, "--mollify.no-enabled", "--run.max-steps", "5", "--run.output"]
    works(*arguments, whole)
    works(*arguments, stopped, "--run.resume")
    assert_equal(*[torch.load(folder / "model.pt", weights_only=True) for folder in (whole, stopped)])
    results = [json.loads((folder / "result.json").read_text()) for folder in (whole, stopped)]
    assert results[0]["validation"] == results[1]["validation"] and results[1]["steps"] == 5
    assert [line["step"] for line in log(stopped)] == [1, 2, 3, 4, 5, 5]
    assert f"stopped after step 5 of 24; --output {stopped} --resume goes on\n" in capsys.readouterr().out


def test_a_run_goes_on_with_fewer_processes_and_as_many_steps(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    arguments = [data, *SETTINGS, "--optim.epochs", "1"]
    run(2, output, *arguments, "--data.batch-size", "2", "--run.max-steps", "2")
    alone = [*arguments, "--run.output", output, "--run.resume", "--data.batch-size"]
    assert "is of 2 processes with batches of 2 images: 1 can go on where --data.batch-size is 4, got 3" in fails(
        capsys, *alone, "3"
    )
    # Nothing else has to be said: the settings are those of that run, and the batch of 4 follows.
    works("--resume", "--output", output)
    assert "after step 2, on 1 process instead of 2, with batches of 4 images\n" in capsys.readouterr().out
    assert json.loads((output / "result.json").read_text())["steps"] == 6  # of 8 images, 4 in the last
    assert [line["step"] for line in log(output) if line["kind"] == "train"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("resume", [[], ["--run.resume"]])
def test_a_folder_that_a_run_is_in_is_left_alone(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str], resume: list[str]
) -> None:
    with lock(tmp_path, "--run.output"):
        message = fails(capsys, data, *SETTINGS, "--run.output", tmp_path, *resume)
    assert f"{tmp_path} is in use by another run (process {os.getpid()} on " in message
    assert os.listdir(tmp_path) == [".lock"]


def test_weights_that_are_no_numbers_leave_no_results(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The loss, taken before the step, is still a number.
    output = tmp_path / "run"
    arguments = [data, *SETTINGS, "--optim.warmup-epochs", "0", "--run.max-steps", "1", "--run.output", output]
    assert "the norm of the weights is" in fails(capsys, *arguments, "--optim.lr", "1e30", code=1)
    assert not {"checkpoint.pt", "model.pt", "result.json"} & {*os.listdir(output)}


def test_a_full_disk_ends_the_run_with_one_line(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".checkpoint.pt.part").symlink_to("/dev/full")
    message = fails(capsys, data, *SETTINGS, "--run.max-steps", "1", "--run.output", tmp_path, code=1)
    assert message == f"error: {tmp_path}/checkpoint.pt can't be written: No space left on device"
    assert not [name for name in os.listdir(tmp_path) if "checkpoint" in name]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda state: state.pop("ranks"), "KeyError: 'ranks'"),
        (lambda state: state["learner"].update(step="x"), "TypeError: 'str' object"),
        (lambda state: state["learner"].update(step=2), "step 2, but its loader at batch 6 of epoch 0)"),
        (lambda state: state["ranks"][0]["rng"].update(cpu=torch.zeros(3, dtype=torch.uint8)), "RuntimeError: "),
        (lambda state: state.update(config=5), "TypeError: 'int' object"),
    ],
)
def test_a_damaged_checkpoint_is_named(
    tmp_path: Path,
    finished: Path,
    data: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], Any],
    reason: str,
) -> None:
    state = torch.load(finished / "checkpoint.pt", weights_only=True)
    change(state)
    torch.save(state, tmp_path / "checkpoint.pt")
    message = fails(capsys, data, *SETTINGS, "--mollify.no-enabled", "--run.output", tmp_path, "--run.resume")
    assert f"{tmp_path}/checkpoint.pt is damaged, or of another version ({reason}" in message


def test_an_unfinished_run_is_only_touched_with_resume(
    tmp_path: Path, finished: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoint.pt").write_bytes((finished / "checkpoint.pt").read_bytes())
    assert "pass --resume or choose another" in fails(capsys, data, *SETTINGS, "--run.output", tmp_path)
    # The run of the fixture was not mollified.
    message = fails(capsys, data, *SETTINGS, "--run.output", tmp_path, "--run.resume")
    assert message.endswith("other settings: mollify.enabled was False and is now True")


def test_a_checkpoint_of_other_files_is_refused(
    tmp_path: Path, finished: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, output = tmp_path / "data", tmp_path / "run"
    shutil.copytree(data, other, ignore=shutil.ignore_patterns("14.jpg"))
    output.mkdir()
    (output / "checkpoint.pt").write_bytes((finished / "checkpoint.pt").read_bytes())
    message = fails(capsys, other, *SETTINGS, "--mollify.no-enabled", "--run.output", output, "--run.resume")
    assert "files was" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.name", "resnet1"], "no classification model 'resnet1'"),
        (["--model.weights", "nowhere.pt"], "'nowhere.pt' is no file"),
        (["--data.augment", "magic"], "^error: --data.augment must be .*'magic'"),
        (["--batch-size", "99"], "^error: --data.batch-size=99 is more than "),
        (["--data.hw-decoder-load", "1.5"], "^error: --data.hw-decoder-load must be .* got 1.5"),
        (["--mollify.roles", "0", "0", "0"], "^error: --mollify.roles must "),
        (["--mollify.beta", "1", "-2"], r"^error: --mollify.beta\[1\] must .*-2"),
        (["--no-mollify", "--mollify.k-noise", "-3"], "^error: --mollify.k-noise must .*-3"),
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


@pytest.mark.parametrize(
    ("world_size", "bad"), [(1, "train/class1/3.jpg"), (2, "train/class1/3.jpg"), (2, "val/class2/1.jpg")]
)
def test_an_unreadable_image_ends_the_run_with_its_name_and_no_more(
    tmp_path: Path, data: Path, world_size: int, bad: str
) -> None:
    root = tmp_path / "data"
    shutil.copytree(data, root)
    (root / bad).write_bytes(b"<html>not found</html>")
    with started(world_size, tmp_path / "run", root, *SETTINGS, "--optim.epochs", "1") as ranks:
        for process in ranks:
            process.join(timeout=100)
    assert [process.exitcode for process in ranks] == [1] * world_size
    texts = "".join((tmp_path / f"run.{rank}.txt").read_text() for rank in range(world_size))
    assert texts.count("error: ") == 1 and bad in texts and "Traceback" not in texts


def test_one_resident_batch_is_trained_on_without_checkpoints(tmp_path: Path, data: Path) -> None:
    output = tmp_path / "run"
    works(data, *SETTINGS, "--run.resident", "--run.max-steps", "9", "--run.output", output)
    assert not (output / "checkpoint.pt").exists()
    assert [line["step"] for line in log(output) if line["kind"] == "train"] == list(range(1, 10))
    assert json.loads((output / "result.json").read_text())["images_per_second"] > 0


def test_resume_with_nothing_to_resume_starts(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    works(data, *SETTINGS, "--run.resume", "--run.max-steps", "1", "--run.output", tmp_path / "run")
    assert "nothing to resume" in capsys.readouterr().out


def test_an_error_on_one_process_ends_all_with_one_message(tmp_path: Path, data: Path) -> None:
    # Only rank 0 reads weights; rank 1 would wait for them.
    with started(2, tmp_path / "run", data, *SETTINGS, "--model.weights", "nowhere.pt") as ranks:
        for process in ranks:
            process.join(timeout=100)
    assert [process.exitcode for process in ranks] == [2, 2]
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
    assert "find_unused_parameters" not in done.stderr
