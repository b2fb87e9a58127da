"""Tests of the trainers' command lines: what is wrong with one in a line, and which options a run makes nothing of."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from learners import refused

from fastmoll.train import imagenet, small_images
from fastmoll.train.config import parse, parse_small
from fastmoll.train.options import as_typed, idle, typed
from fastmoll.train.recipes import RECIPES, SMALL_RECIPES
from fastmoll.train.settings import Config

Read = Callable[[list[str]], Config]


@pytest.mark.parametrize("parse", [parse, parse_small])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--lr abc", "--lr float 'abc'"),
        ("--optim.lr=1e", "--optim.lr float '1e'"),
        ("--lr --compile", "--lr value"),
        ("--epochs 3.5", "--epochs int '3.5'"),
        ("--optim.lr_batch x", "--optim.lr-batch None or INT, got x ("),
        ("--optim.name adamW", "--optim.name 'sgd' 'adamw' 'adamW'"),
        ("--optim.betas 0.9", "--optim.betas 2 values"),
        ("--data.std 1 None 1", "--data.std None or FLOAT FLOAT FLOAT, got 1 None 1 ("),
        ("--mollify.roles --seed 1", "--mollify.roles FLOAT FLOAT FLOAT or nothing ("),
        ("--data.mean 1 2 3 /a", "--data.mean None or FLOAT FLOAT FLOAT, got 1 2 3 /a ("),
        ("--mollify.sigma-max it's", "--mollify.sigma-max must be None or FLOAT, got it's ("),
        ("--output --help", "--output value"),
        ("--no-mollify=yes", "--no-mollify value 'yes'"),
    ],
)
def test_a_wrong_value_is_answered_in_one_line_with_what_is_allowed(
    parse: Read, arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, parse, arguments.split())
    assert all(word in line for word in words.split()) and not {"─", "│", "\x1b"} & {*line}


@pytest.mark.parametrize("parse", [parse, parse_small])
@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--optim.lrr", "; did you mean --optim.lr?"),
        ("--epoch", "; did you mean --epochs?"),
        ("--batchsize", "; did you mean --batch-size?"),
        ("--weight_decay", "; did you mean --optim.weight-decay?"),
        ("--mollify.sigma", "; did you mean --mollify.sigma-min or --mollify.sigma-max?"),
        ("--optim.batch-size", "; did you mean --data.batch-size?"),
        ("--data.epochs", "; did you mean --optim.epochs?"),
        ("-o", ""),
    ],
)
def test_a_misspelt_option_is_answered_with_the_one_that_was_meant(
    parse: Read, word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, parse, [word, "3"])
    name = "imagenet.py" if parse.__name__ == "parse" else "small_images.py"
    assert line == f"there is no option {word.replace('_', '-')}{meant} (see {name} --help)"


def test_a_word_that_no_option_takes_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, parse, ["/a", "/b"]).startswith("no option takes the word '/b' (")
    assert refused(capsys, parse_small, ["--mollify", "yes"]).startswith("no option takes the word 'yes' (")
    folder = str(tmp_path)
    assert refused(capsys, parse_small, [folder]).startswith(
        f"no option takes the word '{folder}'; did you mean --data"
    )
    assert parse(["--", folder]).data.path == parse([folder, "--mollify.beta", "1", "2"]).data.path == tmp_path


@pytest.mark.parametrize("main", [imagenet.main, small_images.main])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_all_processes_end_alike_for_their_command_line_and_the_first_one_says_why(
    main: Callable[[list[str]], int], rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    for value, wrong in (("x", ": could not convert"), ("-1", " must be positive and finite, got -1.0\n")):
        with pytest.raises(SystemExit) as stopped:
            main(["--optim.lr", value])
        assert stopped.value.code == 2
        said = capsys.readouterr().err
        assert (f"--optim.lr{wrong}" in said and said.count("\n") == 1) if rank == "0" else said == ""


@pytest.mark.parametrize("config", [*RECIPES.values(), *SMALL_RECIPES.values()])
def test_every_setting_can_be_typed(config: Config) -> None:
    plain = config.plain()
    words = [f"--recipe={plain.pop('recipe')}", str(plain["data"].pop("path"))] if "recipe" in plain else []
    for section, content in plain.items():
        for name, value in content.items():
            if isinstance(value, bool):
                words.append(f"--{section}.{name}" if value else f"--{section}.no-{name}")
            else:
                words += [f"--{section}.{name}", *map(str, value if isinstance(value, list) else [value])]
    assert len(typed(words, type(config))) > 40
    found = (parse if words[0].startswith("--recipe") else parse_small)(words)
    assert {**found.plain(), "data": {**found.plain()["data"], "path": None}} == config.plain()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("--optim.lr must be positive", "--lr must be positive"),
        ("--optim.lr-batch and --data.path stay", "--optim.lr-batch and --data.path stay"),
        ("--model.name: no such, or --data.name.", "--model.name: no such, or --data."),
        ("--run.output: DIR, --data.batch-size=3", "--output: DIR, --data.batch-size=3"),
        ("k_noise must be", "--mollify.k-noise must be"),
        ("beta[1] must be", "--mollify.beta[1] must be"),
        ("seed=3 is", "--seed=3 is"),
        ("path: there is none", "--data.path: there is none"),
        ("data: 'x' is none", "--data: 'x' is none"),
        ("name must be, or k_noise must be", "name must be, or k_noise must be"),
        ("labels must be; path: there is none", "labels must be; path: there is none"),
    ],
)
def test_messages_name_options_in_short_unless_they_were_typed_in_full(text: str, shown: str) -> None:
    argv = ["--lr", "-1", "--model.name=x", "--data.batch_size", "3"]
    assert as_typed(text, parse_small([]), argv) == shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--mollify.roles 1 0 0 --mollify.k-blur 2", "without --mollify, --mollify.roles, --mollify.k-blur do nothing"),
        ("--mollify.k_blur=1 --no-mollify", "without --mollify, --mollify.k-blur does nothing"),
        ("--mollify.roles 1 0 0 --mollify", None),
        ("--evaluate --model.weights x --data cifar10 --batch-size 3 --run.device cpu --net wrn40", None),
        (
            "--evaluate --output x --epochs 3 --mollify --resident",
            "with --evaluate, --output, --epochs, --mollify, --resident do nothing",
        ),
        ("--evaluate --lr 3 --lr 4 --mollify.draws 2", "with --evaluate, --lr, --mollify.draws do nothing"),
    ],
)
def test_options_that_change_nothing_about_a_run_are_found(arguments: str, said: str | None) -> None:
    assert idle(parse_small(arguments.split()), arguments.split()) == said


def test_a_setting_of_a_run_that_there_is_not_is_named_with_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = parse(["/data"]).plain()
    plain["optim"]["momentun"] = plain["optim"].pop("momentum")
    (tmp_path / "config.json").write_text(json.dumps(plain))
    said = refused(capsys, parse, ["--resume", "--output", str(tmp_path)])
    assert said == (
        f"--output: {tmp_path}/config.json does not fit: there is no setting optim.momentun; did you mean momentum?"
    )


@pytest.mark.parametrize("command", [[imagenet.__file__], [small_images.__file__], ["-m", "fastmoll", "evaluate", "x"]])
def test_ctrl_c_while_numpy_is_imported_is_no_traceback(tmp_path: Path, command: list[str]) -> None:
    # A module of that name that waits, and then makes an error of its own of the exception, as that one does.
    (tmp_path / "numpy.py").write_text(
        "import sys, time\nsys.stdout.write('here\\n')\nsys.stdout.flush()\n"
        "try:\n    time.sleep(60)\nexcept BaseException as error:\n    raise ImportError('twice') from error\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(imagenet.__file__).resolve().parents[1])])
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # jobs in the background ignore it
    )
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, "interrupted\n")


@pytest.mark.parametrize("script", [imagenet.__file__, small_images.__file__])
def test_help_that_nobody_reads_is_no_traceback(script: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        gone = subprocess.run([sys.executable, script, "--help"], stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert (gone.returncode, gone.stderr) == (141, b"")
    command = f"{sys.executable} {script} --help >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 0
