"""Tests of the trainers' settings: recipes, options in their place, what makes no run, and what a resumed run takes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from learners import refused

from fastmoll.train.config import check, difference, parse, parse_small
from fastmoll.train.recipes import RECIPES
from fastmoll.train.settings import Config, OptimConfig


def test_without_data_the_recipe_is_the_sample() -> None:
    assert parse([]) == RECIPES["sample"]


def test_with_data_the_recipe_is_the_papers(tmp_path: Path) -> None:
    config = parse([str(tmp_path)])
    assert config.data.path == tmp_path
    assert (config.model.name, config.model.weights) == ("resnet50", "IMAGENET1K_V1")
    assert config.optim == OptimConfig(epochs=10, lr=0.01, momentum=0.9, nesterov=False, weight_decay=5e-4)


def test_every_setting_overrides_its_recipe() -> None:
    config = parse(["--recipe", "scratch", "--optim.lr", "0.3", "--mollify.roles", "1", "0", "2", "--compile"])
    assert config.optim == dataclasses.replace(RECIPES["scratch"].optim, lr=0.3)
    assert config.mollify.roles == (1.0, 0.0, 2.0)
    assert config.model.compile


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_valid_and_survives_json(recipe: str) -> None:
    check(RECIPES[recipe])
    plain = RECIPES[recipe].plain()
    assert json.loads(json.dumps(plain)) == plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optim.lr", "0"], "--optim.lr must be positive and finite, got 0"),
        (["--optim.lr", "nan"], "--optim.lr must be positive and finite, got nan"),
        (["--optim.lr", "inf"], "--optim.lr must be positive and finite, got inf"),
        (["--optim.momentum", "1"], "--optim.momentum must be .*got 1"),
        (["--optim.betas", "0.9", "1"], r"--optim.betas must be in \[0, 1\), got \(0.9, 1.0\)"),
        (["--optim.name", "adamw", "--optim.betas", "nan", "0"], r"--optim.betas must be .*got \(nan, 0.0\)"),
        (["--optim.clip-norm", "0"], "--optim.clip-norm must be positive and finite, got 0"),
        (["--optim.clip-norm", "nan"], "--optim.clip-norm must be positive and finite, got nan"),
        (["--optim.betas", "0.9", "0.99"], r"--optim.betas must be left out with --optim.name sgd, got \(0.9, 0.99\)"),
        (
            ["--optim.name", "adamw", "--optim.momentum", "0.8"],
            "--optim.momentum must be left out with --optim.name adamw, got 0.8",
        ),
        (["--optim.name=adamw", "--optim.no-nesterov"], "--optim.nesterov must be left out with .*adamw, got False"),
        (["--data.mean", "0", "0", "0"], r"--data.mean and --data.std belong together, got \(0.0, 0.0, 0.0\) and None"),
        (
            ["--data.mean", "123", "116", "103", "--data.std", "58", "57", "57"],
            r"--data.mean must be in \[0, 1\], for pixels in \[0, 1\], got 123 116 103$",
        ),
        (["--data.mean", "0", "0", "0", "--data.std", "1", "1", "0"], r"--data.std must be in \(0, 1\].*got 1 1 0$"),
        (["--optim.weight-decay", "-1"], "--optim.weight-decay must be .*got -1"),
        (["--optim.warmup-epochs", "99"], r"--optim.warmup-epochs must be in \[0, 12\], got 99"),
        (["--optim.epochs", "0"], "--optim.epochs must be at least 1, got 0"),
        (["--mollify.draws", "0"], "--mollify.draws must be at least 1, got 0"),
        (
            ["--no-mollify", "--mollify.draws", "2", "--optim.loss", "log_mean"],
            "--optim.loss must be another with one draw of an image, got log_mean, which needs --mollify$",
        ),
        (["--mollify", "--optim.loss", "corrected"], "got corrected, which needs --mollify.draws 2 or more$"),
        (["--no-mollify", "--optim.loss", "corrected"], "which needs --mollify and --mollify.draws 2 or more$"),
        (["--mollify", "--mollify.kind", "temper", "--optim.loss", "normalised"], "--optim.loss must .*got normalised"),
        (["--optim.accumulate", "0"], "--optim.accumulate must be at least 1, got 0"),
        (["--data.batch-size", "0"], "--data.batch-size must be at least 1, got 0"),
        (["--run.log-every", "0"], "--run.log-every must be at least 1, got 0"),
        (["--run.seed", "-1"], "--run.seed must be .*got -1"),
        (["--model.ema", "1"], r"--model.ema must be in \(0, 1\), got 1"),
        (["--run.evaluate"], "--model.weights must be given with --run.evaluate, for example DIR/model.pt, got None"),
        (
            ["--output", "x", "--resume", "--evaluate"],
            "--run.resume goes on with a training, --run.evaluate does none: give the weights of the run instead, "
            "--run.evaluate --model.weights x/model.pt$",
        ),
        (["--resume"], "--run.output must be the folder to go on in, with --resume, got None"),
        (["--run.output", ""], "--run.output must be a folder of its own"),
        (["--resume", "--run.output", "x", "--resident"], "--run.resident must be off with --resume"),
    ],
)
def test_unusable_values_name_option_and_value(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(parse(arguments))


@pytest.mark.parametrize("read", [parse, parse_small])
@pytest.mark.parametrize("given", [[], ["--optim.momentum", "0.9"]])
def test_adamw_brings_defaults_of_its_own_that_can_be_overridden(
    read: Callable[[list[str]], Config], given: list[str]
) -> None:
    sgd, adamw = read(given), read(["--optim.name", "adamw", *given])
    check(adamw)
    others = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05, "decay": "weights"}
    assert adamw == dataclasses.replace(sgd, optim=dataclasses.replace(sgd.optim, **others))
    own = ["--lr", "0.01", "--optim.decay", "all", "--optim.betas", "0.9", "0.95", "--optim.clip-norm", "1"]
    optim = read(["--optim.name=adamw", *given, *own]).optim
    assert (optim.lr, optim.decay, optim.betas, optim.clip_norm) == (0.01, "all", (0.9, 0.95), 1.0)


@pytest.mark.parametrize(
    ("recipe", "lr", "batch"), [("finetune", 1e-4, None), ("scratch", 1e-3, 1024), ("sample", 1e-3, None)]
)
def test_adamws_learning_rate_is_that_of_its_recipe(recipe: str, lr: float, batch: int | None) -> None:
    config = parse(["/data", "--recipe", recipe, "--optim.name", "adamw"])
    check(config)
    assert (config.optim.lr, config.optim.lr_batch, config.optim.epochs) == (lr, batch, RECIPES[recipe].optim.epochs)
    assert json.loads(json.dumps(config.plain())) == config.plain()


def test_a_path_without_the_name_of_its_data_is_answered_with_how_to_give_it() -> None:
    message = (
        "--data.path must be left out for digits, the default of --data, got /mine: give the folder as --data /mine,"
    )
    with pytest.raises(ValueError, match=message):
        check(parse_small(["--data.path", "/mine"]))
    check(parse_small(["--data", "cifar10", "--data.path", "/mine"]))
    with pytest.raises(ValueError, match=r"^--data.name must be a name or a path, got ''$"):
        check(parse_small(["--data", ""]))


@pytest.mark.parametrize("read", [parse, parse_small])
def test_what_is_changed_most_has_a_short_name(read: Callable[[list[str]], Config]) -> None:
    config = read("--epochs 3 --lr 0.5 --batch-size 7 --seed 9 --output there".split())
    assert (config.optim.epochs, config.optim.lr, config.data.batch_size) == (3, 0.5, 7)
    assert (config.run.seed, config.run.output) == (9, Path("there"))


def test_a_run_is_continued_only_with_settings_that_change_nothing() -> None:
    config = parse([])
    other_code = dataclasses.replace(config.mollify, backend="torch")
    run = dataclasses.replace(config.run, resume=True, log_every=3)
    free = dataclasses.replace(config, run=run, mollify=other_code)
    assert difference(config.plain(), free.plain()) is None
    other = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=0.5))
    assert difference(config.plain(), other.plain()) == "optim.lr was 0.05 and is now 0.5"


NEWER = {"optim": ("name", "betas", "decay", "clip_norm"), "data": ("mean", "std")}


def of_an_earlier_version(plain: dict[str, Any]) -> dict[str, Any]:
    """Settings as they were before there was a choice of optimisers."""
    return {
        section: {name: value for name, value in content.items() if name not in NEWER.get(section, ())}
        if isinstance(content, dict)
        else content
        for section, content in plain.items()
    }


def test_a_run_of_an_earlier_version_goes_on_and_only_with_the_optimiser_it_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = parse(["/data", "--recipe", "scratch"])
    saved = of_an_earlier_version(config.plain())
    assert not {"name", "betas"} & saved["optim"].keys()
    (tmp_path / "config.json").write_text(json.dumps(saved))
    again = ["--resume", "--output", str(tmp_path)]
    assert parse(again).optim == config.optim and parse(again).data == config.data
    assert difference(saved, parse(again).plain()) is None
    assert refused(capsys, parse, [*again, "--optim.name", "adamw"]).endswith("that run's optimiser is sgd, not adamw")
    assert difference(saved, parse([*again, "--optim.clip-norm", "1"]).plain()) == (
        "optim.clip_norm was None and is now 1.0"
    )
    shifted = parse([*again, "--data.mean", "0", "0", "0", "--data.std", "1", "1", "1"]).plain()
    assert difference(saved, shifted) == "data.mean was None and is now [0.0, 0.0, 0.0]"


def test_a_run_with_adamw_goes_on_with_its_own_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--optim.name", "adamw", "--optim.betas", "0.8", "0.9", "--optim.clip-norm", "2", "--data", "cifar10"]
    config = parse_small([*given, "--optim.decay", "all"])
    (tmp_path / "config.json").write_text(json.dumps(config.plain()))
    again = ["--resume", "--output", str(tmp_path)]
    for more in ([], ["--optim.name", "adamw"]):
        resumed = parse_small([*again, *more])
        check(resumed)
        assert resumed.optim == config.optim
    # Not that its betas are none of SGD's.
    said = refused(capsys, parse_small, [*again, "--optim.name=sgd"])
    assert said == f"--output: {tmp_path}/config.json does not fit: that run's optimiser is adamw, not sgd"


def test_a_resumed_run_has_its_own_settings_but_for_those_that_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    output.mkdir()
    given = ["--recipe", "scratch", "--data.size", "96", "--mollify.roles", "1", "0", "1", "--model.ema", "0.9"]
    first = parse(["/data", *given, "--run.output", str(output), "--run.max-steps", "7", "--run.seed", "3"])
    (output / "config.json").write_text(json.dumps({**first.plain(), "resolved": {"world_size": 1}}))
    again = ["--run.output", str(output), "--resume"]
    expected = dataclasses.replace(first, run=dataclasses.replace(first.run, resume=True, max_steps=None))
    assert parse(again) == expected
    assert parse([*again, "--data.batch-size", "8"]) == dataclasses.replace(
        expected, data=dataclasses.replace(first.data, batch_size=8)
    )
    for text in (
        "{",
        "[]",
        '{"recipe": "scratch", "data": 3}',
        '{"recipe": "scratch", "data": {"batch_size": "8"}}',
        '{"recipe": "scratch", "data": {"mean": [1, 2]}}',
        '{"recipe": "scratch", "data": {"path": 3}}',
        '{"recipe": "scratch", "mollify": {"roles": [1, "2"]}}',
        '{"recipe": "scratch", "model": {"ema": "0.9"}}',
        '{"recipe": "scratch", "optim": {"betas": [0.9]}}',
        '{"recipe": "scratch", "optim": {"betas": 0.9}}',
        '{"recipe": "scratch", "optim": {"lr_batch": 2.5}}',
        '{"recipe": "scratch", "optim": {"clip_norm": true}}',
        '{"recipe": "scratch", "optim": {"decay": null}}',
        '{"recipe": "scratch", "optim": {"lrr": 0.1}}',
        '{"recipe": "scratch", "resolved": {}, "seed": 3}',
        "{}",
    ):
        (output / "config.json").write_text(text)
        with pytest.raises(SystemExit) as stopped:
            parse(again)
        assert stopped.value.code == 2 and f"{output}/config.json does not fit" in capsys.readouterr().err

    small = parse_small(["--data", "cifar10", "--data.mean", "0.1", "0.2", "0.3", "--data.std", "1", "1", "1"])
    (output / "config.json").write_text(json.dumps(small.plain()))
    assert parse_small(again) == dataclasses.replace(
        small, run=dataclasses.replace(small.run, output=output, resume=True)
    )


@pytest.mark.parametrize(
    ("processes", "given", "batch_size"),
    [("4", [], 8), ("1", [], 32), (None, [], 32), ("3", [], 16), ("4", ["--batch-size", "5"], 5), ("x", [], 16)],
)
def test_on_another_number_of_processes_a_step_keeps_its_images_where_they_can_be_shared_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: str | None, given: list[str], batch_size: int
) -> None:
    first = parse(["/data", "--batch-size", "16"])
    (tmp_path / "config.json").write_text(json.dumps({**first.plain(), "resolved": {"world_size": 2}}))
    if processes is not None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", processes)
    assert parse(["--output", str(tmp_path), "--resume", *given]).data.batch_size == batch_size


def test_weights_to_evaluate_bring_the_data_of_their_run_where_none_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "model.pt"
    evaluation = ["--evaluate", "--model.weights", str(weights)]
    first = parse(["/mine", "--recipe", "scratch", "--data.size", "96"])
    (tmp_path / "config.json").write_text(json.dumps(first.plain()))
    assert parse(evaluation).data.path is None  # there is no such file: of torchvision, perhaps
    weights.touch()
    assert parse(evaluation).data.path == Path("/mine") and parse(evaluation).data.size == 96
    assert parse(["/other", *evaluation]).data.path == Path("/other")
    assert parse(evaluation).data.mean is None
    shifted = {**first.plain()["data"], "mean": [0.5, 0.5, 0.5], "std": [1, 1, 1]}
    (tmp_path / "config.json").write_text(json.dumps({**first.plain(), "data": shifted}))
    assert (parse(evaluation).data.mean, parse(evaluation).data.std) == ((0.5,) * 3, (1.0,) * 3)
    (tmp_path / "config.json").write_text(json.dumps(of_an_earlier_version(first.plain())))
    assert (parse(evaluation).data.mean, parse(evaluation).data.size) == (None, 96)

    first = parse_small("--data cifar10 --data.path /there --data.mean 0 0 0 --data.std 1 1 1".split())
    (tmp_path / "config.json").write_text(json.dumps(first.plain()))
    data = parse_small(evaluation).data
    assert (data.name, data.path, data.std) == ("cifar10", Path("/there"), (1.0, 1.0, 1.0))
    data = parse_small(["--data", "/other", *evaluation]).data
    assert (data.name, data.path, data.std) == ("/other", None, (1.0, 1.0, 1.0))


@pytest.mark.parametrize("read", [parse, parse_small])
def test_mean_and_deviation_of_a_run_are_taken_both_or_not_at_all(
    tmp_path: Path, read: Callable[[list[str]], Config]
) -> None:
    (tmp_path / "model.pt").touch()
    own = ["--data.mean", "0", "0", "0", "--data.std", "1", "1", "1"]
    (tmp_path / "config.json").write_text(json.dumps(read(own).plain()))
    evaluation = ["--evaluate", "--model.weights", str(tmp_path / "model.pt")]
    check(read(evaluation))
    for option, pair in (("--data.mean", r"\(0.5, 0.5, 0.5\) and None"), ("--data.std", r"None and \(0.5, 0.5, 0.5\)")):
        with pytest.raises(ValueError, match=f"^--data.mean and --data.std belong together, got {pair}$"):
            check(read([*evaluation, option, "0.5", "0.5", "0.5"]))


def test_a_run_is_not_resumed_with_another_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = ["--resume", "--run.output", str(tmp_path)]
    (tmp_path / "config.json").write_text(json.dumps(parse(["/data", "--recipe", "scratch"]).plain()))
    assert parse(["--recipe=scratch", *again]) == parse([*again]) and parse(["/elsewhere", *again]).recipe == "scratch"
    with pytest.raises(SystemExit) as stopped:
        parse(["/data", "--recipe", "finetune", *again])
    message = "config.json does not fit: that run's recipe is scratch, not that of --recipe finetune\n"
    assert stopped.value.code == 2 and capsys.readouterr().err.endswith(message)

    # Of small images, the data decide.
    (tmp_path / "config.json").write_text(json.dumps(parse_small(["--data", "cifar10"]).plain()))
    assert parse_small(["--data", "/elsewhere", *again]).optim == parse_small([*again]).optim
    with pytest.raises(SystemExit) as stopped:
        parse_small(["--data", "digits", *again])
    message = "config.json does not fit: that run's recipe is paper, not that of --data digits\n"
    assert stopped.value.code == 2 and capsys.readouterr().err.endswith(message)


@pytest.mark.parametrize(
    ("given", "said", "shown"),
    [
        ([], "The defaults below are those of digits; all other data have the paper's: --data cifar10 --help.", 30),
        (["--data", "cifar10"], "The defaults below are the paper's, for all data but digits.", 300),
    ],
)
def test_the_help_says_whose_defaults_it_shows(
    given: list[str], said: str, shown: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_small([*given, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stopped.value.code == 0 and said in text and f"(default: {shown})" in text


@pytest.mark.parametrize("given", [[], ["/data"], ["/data", "--recipe", "scratch"]])
def test_the_help_has_the_data_also_beside_them(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([*given, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "[OPTIONS] DATA" in text and "DATA Folder of class folders" in text
    assert f"(default: {90 if given[1:] else 10})" in text


@pytest.mark.parametrize("read", [parse, parse_small])
def test_texts_of_the_help_are_broken_only_where_the_next_word_is_too_long(
    read: Callable[[list[str]], Config], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    with pytest.raises(SystemExit):
        read(["--help"])
    # Texts are set in; what is not, an option or the edge of a box, ends one.
    shown = capsys.readouterr().out.splitlines()
    lines = [line[8:-2].rstrip() if line[1:8].isspace() else "" for line in shown]
    breaks = [pair for pair in itertools.pairwise(lines) if all(pair)]
    assert len(breaks) > 15
    assert [(one, two) for one, two in breaks if len(f"{one} {two.split()[0]}") <= 90 - 8 - 2] == []


@pytest.mark.parametrize("trainer", ["imagenet", "small_images"])
def test_neither_the_help_nor_a_wrong_option_waits_for_torch(trainer: str) -> None:
    code = f"""
import sys
from fastmoll.train.{trainer} import main
for options, expected in ((["--help"], 0), (["--nope"], 2), (["--lr", "x"], 2), (["--lr", "0"], 2)):
    try:
        main(options)
    except SystemExit as stopped:
        assert stopped.code == expected
sys.exit(any(name in sys.modules for name in ("torch", "torchvision", "numpy")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_default_warm_up_is_no_longer_than_the_run() -> None:
    assert parse(["--recipe", "scratch", "--epochs", "2"]).optim.warmup_epochs == pytest.approx(2 * 5 / 90)
    assert parse(["--recipe", "scratch", "--epochs", "5"]).optim.warmup_epochs == 5
    given = parse("--recipe scratch --optim.epochs 2 --optim.warmup-epochs 3".split())
    with pytest.raises(ValueError, match=r"^--optim.warmup-epochs must be in \[0, 2\], got 3.0$"):
        check(given)
