"""Tests of the trainer of small images as it is run: its flags, killed and resumed, two processes, bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from cifar_files import write_cifar
from evaluations import write_data
from PIL import Image
from processes import assert_same_end, kill_at, log, run, started

import fastmoll
from fastmoll.pipelines.cifar import LAYOUTS
from fastmoll.train import checkpoint
from fastmoll.train.config import check, parse_small
from fastmoll.train.recipes import SMALL_RECIPES
from fastmoll.train.settings import MollifyConfig, OptimConfig, SmallDataConfig
from fastmoll.train.small_images import main

# A network with BatchNorm and dropout, its average, steps of several batches with a leftover one, draws for
# augmentation and mollification: all that a resumed run has to put back.
SETTINGS = [
    *("--net", "mobilenet_v3_small", "--model.ema", "0.9", "--optim.accumulate", "2", "--optim.epochs", "3"),
    *("--data.batch-size", "4", "--augment", "fcr+trivial", "--mollify", "--run.validate-every", "1"),
    *("--mollify.draws", "2", "--optim.loss", "corrected"),
    *("--run.log-every", "1", "--run.checkpoint-every", "4", "--run.device", "cpu"),
]
ONE_DRAW = ["--mollify.draws", "1", "--optim.loss", "soft"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Arrays of three classes of noise around a colour: 45 training images, 11 for validation."""
    return write_data(tmp_path_factory.mktemp("data"), 32, 45, 11)


def test_the_flags_of_the_paper_are_the_papers_recipe() -> None:
    config = parse_small("--data cifar10 --net presnet50 --augment fcr+trivial --mollify".split())
    assert config.data == SmallDataConfig(128, "fcr+trivial", "cifar10")
    assert (config.model.name, config.model.weights, config.mollify) == ("presnet50", None, MollifyConfig())
    assert config.optim == OptimConfig(epochs=300, lr=0.01, momentum=0.9, nesterov=False, weight_decay=5e-4)
    plain = parse_small(["--data", "cifar10"])
    assert (plain.model, plain.optim, plain.data) == (config.model, config.optim, config.data)
    assert not plain.mollify.enabled and not parse_small(["--mollify", "--no-mollify"]).mollify.enabled


def test_the_digits_have_a_recipe_of_their_own() -> None:
    for arguments in ([], ["--data", "digits"], ["--data.name=digits"]):
        assert parse_small(arguments) == SMALL_RECIPES["digits"]
    for config in SMALL_RECIPES.values():
        check(config)
        assert json.loads(json.dumps(config.plain())) == config.plain()


def test_the_pairs_of_autoaugment_can_be_those_of_cifar10(tmp_path: Path, data: Path) -> None:
    arguments = ["--data", str(data), *SETTINGS, "--augment", "fcr+auto", "--optim.epochs", "1"]
    for pairs in ("imagenet", "cifar10"):
        options = ["--data.auto-augment", pairs, "--run.output", str(tmp_path / pairs)]
        assert main([*arguments, *options]) == 0
    ours, other = (torch.load(tmp_path / pairs / "model.pt") for pairs in ("imagenet", "cifar10"))
    assert any(not torch.equal(ours[name], other[name]) for name in ours)


@pytest.mark.parametrize("augment", ["none", "fcr+trivial", "fc+augmix+mixup"])
def test_pairs_that_no_augmentation_draws_from_are_refused(augment: str) -> None:
    message = f"--data.auto-augment must be left out without auto in --data.augment, which is {augment}, got cifar10"
    with pytest.raises(ValueError, match=re.escape(message)):
        check(parse_small(["--augment", augment, "--data.auto-augment", "cifar10"]))
    check(parse_small(["--augment", "fc+auto+mixup", "--data.auto-augment", "cifar10"]))


@pytest.mark.parametrize(
    ("world_size", "optimiser"), [(1, []), (2, []), (2, ["--optim.name", "adamw", "--optim.clip-norm", "0.5"])]
)
def test_a_killed_and_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(
    tmp_path: Path, data: Path, world_size: int, optimiser: list[str]
) -> None:
    # 11 batches of 4 on one process, 5 of 4 on each of two: always one left over after the steps of two batches.
    arguments = ["--data", data, *SETTINGS, *optimiser, "--optim.epochs", "2"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(world_size, whole, *arguments, script="small_images")
    # In the second epoch.
    kill_at(log(whole)[-1]["step"] // 2 + 1, world_size, killed, *arguments, script="small_images")
    assert "resuming" in run(world_size, killed, *arguments, "--resume", script="small_images")

    result = assert_same_end(whole, killed)
    assert result["count"] == 11
    steps = [(line["kind"], line["step"]) for line in log(whole)]
    assert [(line["kind"], line["step"]) for line in log(killed)] == steps

    # The weights bring the network, and the mean and deviation they were trained with; one process evaluates alike.
    evaluation = ["--data", data, "--evaluate", "--model.weights", whole / "model.pt", "--run.device", "cpu"]
    printed = run(1, tmp_path / "alone", *evaluation, script="small_images")
    alone = json.loads(printed.splitlines()[-1])["validation"]
    assert (alone["error"], alone["count"]) == (result["error"], 11)
    assert alone == pytest.approx(result, rel=1e-5)


@pytest.mark.parametrize(("world_size", "number"), [(1, signal.SIGINT), (1, signal.SIGTERM), (2, signal.SIGTERM)])
def test_a_signal_ends_a_run_after_a_step_with_a_checkpoint_and_it_goes_on_with_its_own_settings(
    tmp_path: Path, data: Path, world_size: int, number: signal.Signals
) -> None:
    output = tmp_path / "run"
    arguments = ["--data", data, *SETTINGS, "--optim.epochs", "100", "--run.checkpoint-every", "10000"]
    late = ["--run.validate-every", "0", "--run.log-every", "3"]
    with started(world_size, output, *arguments, *late, script="small_images") as ranks:
        while not log(output):
            assert all(process.is_alive() for process in ranks), Path(f"{output}.0.txt").read_text()
            time.sleep(0.01)
        for process in ranks:
            os.kill(process.pid, number)
        for process in ranks:
            process.join(timeout=100)
    assert [process.exitcode for process in ranks] == [128 + number] * world_size
    said = Path(f"{output}.0.txt").read_text()
    step = torch.load(output / "checkpoint.pt", weights_only=True)["learner"]["step"]
    assert f"stopped by {number.name} after step {step}; --resume goes on there" in said
    assert log(output)[-1]["step"] == step and not (output / "result.json").exists()
    if world_size == 1:
        again = ["--resume", "--run.max-steps", step + 1, "--run.output", output]
        assert main([str(argument) for argument in again]) == 0
        assert log(output)[-1]["step"] == step + 1


def test_a_signal_that_comes_while_the_last_checkpoint_of_an_epoch_is_written_is_heeded(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, output = checkpoint.save, tmp_path / "run"

    def saved(content: object, path: Path) -> None:
        save(content, path)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(checkpoint, "save", saved)
    arguments = ["--data", data, *SETTINGS, "--run.checkpoint-every", "10000", "--run.output", output]
    assert main([str(argument) for argument in arguments]) == 128 + signal.SIGTERM
    assert {line["kind"] for line in log(output)} == {"train"} and log(output)[-1]["step"] == 6


def test_weights_are_evaluated_without_training_images(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    arguments = ["--data", data, *SETTINGS, "--run.max-steps", "2", "--run.output", output]
    assert main([str(argument) for argument in arguments]) == 0
    theirs = json.loads((output / "result.json").read_text())["validation"]
    saved = json.loads((output / "config.json").read_text())["data"]
    pixels = np.load(data / "train.npy").reshape(-1, 3) / 255
    assert saved["mean"] == pytest.approx(pixels.mean(0)) and saved["std"] == pytest.approx(pixels.std(0))

    (tmp_path / "other").mkdir()
    for name in ("val.npy", "val_labels.npy"):
        (tmp_path / "other" / name).symlink_to(data / name)
    capsys.readouterr()
    arguments = ["--data", tmp_path / "other", "--evaluate", "--model.weights", output / "model.pt"]
    assert main([str(argument) for argument in (*arguments, "--run.device", "cpu")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["validation"] == pytest.approx(theirs, rel=1e-5)
    # Without data, those of the run.
    assert main([str(argument) for argument in (*arguments[2:], "--run.device", "cpu")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{data}: 11 validation images, 3 classes"
    assert json.loads(lines[-1])["validation"] == pytest.approx(theirs, rel=1e-5)


def test_weights_are_not_evaluated_on_data_of_other_classes(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    arguments = ["--data", data, *SETTINGS, "--run.max-steps", "1", "--run.output", output]
    assert main([str(argument) for argument in arguments]) == 0
    capsys.readouterr()
    said = fails(capsys, "--data", "digits", "--evaluate", "--model.weights", output / "model.pt")
    assert said.endswith("model.pt is of another data set: 3 classes there and 10 here")


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run in this process; the one line of its error."""
    assert main([str(argument) for argument in arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "cifra10"], "^error: --data: 'cifra10' is no file or folder, .* did you mean cifar10"),
        (["--data", "cifar10"], "cifar10 is neither in .*cifar-10-python.tar.gz"),
        (
            ["--data", "cifar10", "--data.path", "/nowhere"],
            "^error: --data.path: there is no /nowhere, where cifar10 should be",
        ),
        (["--augment", "fcr+trival"], "'fcr[+]trival'; did you mean fcr[+]trivial"),
        (["--net", "presnet51"], "no classification model 'presnet51'; did you mean .*presnet50"),
        (["--net", "vgg11"], "vgg11 can't take images of 16×16 pixels"),
        (["--data.batch-size", "46"], "^error: --data.batch-size=46 is more than the 45 samples"),
        (["--mollify.beta", "1", "-2"], "beta.*-2"),
        (["--mollify.backend", "triton"], "--mollify.backend must be auto or torch on a cpu, got triton"),
        ([*ONE_DRAW, "--data.batch-size", "1"], "--data.batch-size must be more than 1 .* 1 value per chan"),
        (["--run.output", "/proc/nowhere"], "--run.output: /proc/nowhere can't be made"),
    ],
)
def test_bad_input_is_one_line_before_any_work(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    place = tmp_path / "small"
    place.mkdir()
    for path in data.iterdir():
        array = np.load(path)
        np.save(place / path.name, array[:, ::2, ::2] if array.ndim == 4 else array)
    line = fails(capsys, "--data", place, *SETTINGS, "--run.output", tmp_path / "run", *arguments)
    assert re.search(message, line), line
    assert not (tmp_path / "run").exists()


def test_data_that_teach_nothing_are_refused(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in data.iterdir():
        array = np.load(path)
        np.save(tmp_path / path.name, array if array.ndim == 4 else np.zeros_like(array))
    settings = ["--data", tmp_path, *SETTINGS, "--run.output", tmp_path / "run"]
    assert re.search(r"all images are of one class, .*: there is nothing to tell apart", fails(capsys, *settings))
    for path in data.iterdir():
        np.save(tmp_path / path.name, np.load(path))
    np.save(tmp_path / "train.npy", np.zeros_like(np.load(tmp_path / "train.npy")))
    assert re.search(r"the standard deviation is \(0.0, 0.0, 0.0\): a colour channel", fails(capsys, *settings))


def test_validation_images_that_do_not_fit_the_training_images_are_refused(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in data.iterdir():
        (tmp_path / path.name).symlink_to(path)
    settings = ["--data", tmp_path, *SETTINGS, "--run.output", tmp_path / "run"]
    (tmp_path / "val.npy").unlink()
    np.save(tmp_path / "val.npy", np.zeros((11, 24, 24, 3), np.uint8))
    assert re.search(r"train.npy has images of 32 x 32 pixels, .*val.npy of 24 x 24", fails(capsys, *settings))
    (tmp_path / "val.npy").unlink()
    np.save(tmp_path / "val.npy", np.zeros((11, 32, 24, 3), np.uint8))
    assert fails(capsys, *settings).endswith("val.npy has images of 32 x 24 pixels, but networks take squares")


def test_photographs_are_sent_to_the_other_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(place: str, width: int, height: int) -> None:
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (width, height)).save(tmp_path / place / "0.png")

    for place in ("val/a", "val/b"):
        write(place, 48, 32)
    settings = ["--data", tmp_path, *SETTINGS, "--run.output", tmp_path / "run"]
    hint = f"; train/imagenet.py {tmp_path} --data.size N crops them to N x N pixels"
    assert fails(capsys, *settings).endswith(f"val has images of 32 x 48 pixels, but networks take squares{hint}")
    for place, side in (("val/a", 32), ("val/b", 32), ("train/a", 32), ("train/b", 31)):
        write(place, side, side)
    assert re.search(rf"must be of one size: .*/b/0.png has 31 x 31 .*{hint}$", fails(capsys, *settings))
    write("train/a", 31, 31)
    assert fails(capsys, *settings).endswith(f"val of 32 x 32{hint}")


def test_a_run_on_other_images_is_not_resumed(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, output = tmp_path / "other", tmp_path / "run"
    other.mkdir()
    for path in data.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    arguments = ["--data", data, *SETTINGS, "--run.output", output, "--run.max-steps"]
    assert main([str(argument) for argument in (*arguments, 1)]) == 0
    # The same images at another place are the same data set.
    moved = ["--data", other, *SETTINGS, "--run.output", output, "--resume", "--run.max-steps"]
    assert main([str(argument) for argument in (*moved, 2)]) == 0
    images = np.load(other / "train.npy")
    images[0, 0, 0], images[1, 0, 0] = images[1, 0, 0].copy(), images[0, 0, 0].copy()  # the same mean and deviation
    np.save(other / "train.npy", images)
    capsys.readouterr()
    assert "loader state does not fit: data was" in fails(capsys, *moved, 3)


@pytest.mark.parametrize("name", [None, "cifar10"])
def test_a_run_on_data_at_a_relative_path_is_resumed_in_another_folder(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, small_counts: None, name: str | None
) -> None:
    first, second, output = tmp_path / "first", tmp_path / "second", tmp_path / "run"
    for folder in (first, second):
        folder.mkdir()
    if name is None:
        (first / "mine").symlink_to(data)
        given, expected = ["--data", "./mine"], {"name": str(first / "mine"), "path": None}
    else:
        write_cifar(first / name, LAYOUTS[0])
        given, expected = ["--data", name, "--data.path", name], {"name": name, "path": str(first / name)}
    monkeypatch.chdir(first)
    arguments = [*given, *SETTINGS, "--run.output", output, "--run.max-steps", 1]
    assert main([str(argument) for argument in arguments]) == 0
    for saved in (json.loads((output / "config.json").read_text()), torch.load(output / "checkpoint.pt")["config"]):
        assert {key: saved["data"][key] for key in expected} == expected
    monkeypatch.chdir(second)
    assert main(["--resume", "--run.output", str(output), "--run.max-steps", "2"]) == 0
    assert log(output)[-1]["step"] == 2


def test_torchrun_runs_the_script_on_the_digits_with_nothing_said(tmp_path: Path) -> None:
    script = Path(fastmoll.__file__).resolve().parent.parent / "train" / "small_images.py"
    path = os.pathsep.join([str(script.parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", script, "--run.max-steps", "2"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    (output,) = (tmp_path / "runs").iterdir()
    assert output.name.startswith("digits-")
    assert json.loads((output / "result.json").read_text())["validation"]["count"] == 355
