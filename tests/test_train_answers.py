"""Tests of what the trainers answer where a run is finished already, or weights are not for the network."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from evaluations import write_data
from learners import TIMM
from processes import run

from fastmoll.train import imagenet, small_images
from fastmoll.train.folder import finished
from fastmoll.train.settings import ImageNetConfig

SETTINGS = [
    *("--net", "mobilenet_v3_small", "--epochs", "1", "--batch-size", "4", "--optim.accumulate", "4", "--mollify"),
    *("--run.checkpoint-every", "1", "--run.device", "cpu"),
]

pytestmark = pytest.mark.usefixtures("one_thread")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fails(capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int], *arguments: object) -> str:
    """Run in this process; the one line of its error."""
    assert main([str(argument) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def make_data(folder: Path) -> Path:
    folder.mkdir()
    return write_data(folder, 32, 45, 11)


def trained(data: Path, output: Path, *more: object) -> list[str]:
    """Train on a few images into ``output``; the command line."""
    arguments = [str(argument) for argument in ("--data", data, *SETTINGS, "--output", output, *more)]
    assert small_images.main(arguments) == 0
    return arguments


def test_resuming_a_finished_run_says_what_it_came_to_and_leaves_it_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = make_data(tmp_path / "data"), tmp_path / "run"
    arguments = trained(data, output)
    said = capsys.readouterr().out
    assert "1 epoch of 3 steps of 16 images, " in said and "stopped after" not in said
    assert fails(capsys, small_images.main, *arguments).endswith("run holds a finished run; choose another folder")

    figures = re.search(r"^epoch 1/1: (error .*, NLL .*, ECE .*)$", said, re.MULTILINE)
    assert figures is not None
    expected, before = f"the run in {output} is finished, after 3 steps: {figures[1]}\n", contents(output)
    for again in ([*arguments, "--resume"], ["--resume", "--output", str(output), "--run.max-steps", "7"]):
        assert small_images.main(again) == 0
        assert capsys.readouterr() == (expected, "")
    message = "run holds a finished run with other settings: optim.epochs was 1 and is now 2; choose another folder"
    assert fails(capsys, small_images.main, *arguments, "--resume", "--epochs", "2").endswith(message)
    # Also where data and checkpoint have been cleared away, and on any number of processes.
    shutil.rmtree(data)
    (output / "checkpoint.pt").unlink()
    del before[output / "checkpoint.pt"]
    assert run(3, output, "--resume", script="small_images") == expected
    assert contents(output) == before


def test_resuming_a_run_that_has_done_the_steps_asked_for_says_so_and_one_without_a_result_makes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = make_data(tmp_path / "data"), tmp_path / "run"
    trained(data, output, "--run.max-steps", "2")
    capsys.readouterr()
    again = ["--resume", "--output", str(output), "--run.max-steps"]
    before = contents(output)
    assert small_images.main([*again, "2"]) == 0
    message = f"the run in {output} is finished, after the 2 of 3 steps that are asked for: error "
    assert capsys.readouterr().out.startswith(message)
    assert contents(output) == before

    weights = torch.load(output / "model.pt")
    for lost in ("result.json", "config.json"):
        (output / lost).unlink()
        arguments = ["--data", str(data), *SETTINGS, *again, "2"]
        assert small_images.main(arguments) == 0
        assert f"resuming {output}/checkpoint.pt after step 2\n" in capsys.readouterr().out
        assert {"result.json", "config.json"} <= {path.name for path in output.iterdir()}
        assert all(torch.equal(value, weights[name]) for name, value in torch.load(output / "model.pt").items())

    assert small_images.main(again[:-1]) == 0
    assert "after step 2\n" in capsys.readouterr().out


def test_weights_of_the_recipe_that_do_not_fit_are_answered_with_what_to_give(
    tmp_path: Path, make_tree: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("timm")
    small = ["--data.size", "160", "--batch-size", "3", "--data.threads", "1", "--run.device", "cpu"]
    arguments = [make_tree(9), "--output", tmp_path / "run", *small, "--net"]
    line = fails(capsys, imagenet.main, *arguments, TIMM)
    assert line.startswith("error: --model.weights: 'IMAGENET1K_V1' is no file; weights that timm has for test_vit: ")
    assert line.endswith("; IMAGENET1K_V1 is the default of --recipe finetune: give --model.weights timm or None")
    assert fails(capsys, imagenet.main, *arguments, "presnet18").endswith("finetune: give --model.weights None")
    assert "default" not in fails(capsys, imagenet.main, *arguments, TIMM, "--model.weights", "other")


def test_a_folder_in_the_place_of_weights_is_answered_with_the_file_in_it(
    tmp_path: Path, make_tree: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [make_tree(9), "--evaluate", "--run.device", "cpu", "--model.weights"]
    mine = tmp_path / "mine"
    mine.mkdir()
    assert (
        fails(capsys, imagenet.main, *arguments, mine) == f"error: --model.weights: '{mine}' is a folder; give a file"
    )
    (mine / "model.pt").touch()
    assert fails(capsys, imagenet.main, *arguments, mine).endswith(f"is a folder; give a file in it, {mine}/model.pt")
    # Nor are weights of the default network what was meant.
    assert fails(capsys, imagenet.main, *arguments, mine / "modle.pt").endswith("/modle.pt' is no file")


def test_an_output_that_can_not_be_made_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    for output in (file, file / "run"):
        arguments = ["--data", tmp_path / "none", "--output", output]
        assert fails(capsys, small_images.main, *arguments) == f"error: --output: {file} is not a folder"
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    line = fails(capsys, small_images.main, "--data", tmp_path / "none", "--output", tmp_path / "a" / "b")
    assert line == f"error: --output: {tmp_path} can't be written to: no permission"


def test_options_of_a_mollification_that_is_off_are_said_to_do_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    arguments = ["--net", "mobilenet_v3_small", "--run.max-steps", "1", "--run.device", "cpu", "--output"]
    off = ["--mollify.roles", "1", "0", "0", "--mollify.k-blur", "2"]
    assert small_images.main([*arguments, str(tmp_path / "off"), *off]) == 0
    said = "without --mollify, --mollify.roles, --mollify.k-blur do nothing\n"
    assert said in capsys.readouterr().out
    assert small_images.main([*arguments, str(tmp_path / "on"), *off, "--mollify"]) == 0
    assert "without --mollify" not in capsys.readouterr().out


def test_of_a_finished_run_it_is_said_what_images_it_was_on_where_others_are_given(tmp_path: Path) -> None:
    def config(path: str) -> ImageNetConfig:
        return replace(ImageNetConfig(), data=replace(ImageNetConfig().data, path=Path(path)))

    settings = {**config("mine").plain(), "resolved": {"steps_per_epoch": 1, "world_size": 1}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    figures = {"error": 0.25, "nll": 1.0, "ece": 0.1}
    result = {"steps": settings["optim"]["epochs"], "validation": figures}
    (tmp_path / "result.json").write_text(json.dumps(result))
    for path, other in (("mine", ""), ("./mine", ""), (os.path.abspath("mine"), ""), ("/x", " on mine, not /x")):
        said = finished(tmp_path, config(path), 1)
        assert said is not None and re.search(rf"is finished, after \d+ steps{other}: error 25", said)
