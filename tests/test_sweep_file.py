"""What the file of a sweep means, and what is said of one that is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from sweeps import finish, names

from fastmoll.cli.main import main
from fastmoll.paper import published
from fastmoll.sweep.file import Run, read_sweep
from fastmoll.sweep.table import make_rows
from fastmoll.train.config import parse, parse_small


def test_the_papers_file_has_three_seeds_for_every_cell_of_its_tables_on_small_images(paper_sweep: list[Run]) -> None:
    small = [x for x in published() if x.data != "imagenet"]
    cells = {(x.data, x.net, x.augment, x.mollify) for x in small}
    # Tables 1 (and A1), A2; 2, as far as it is not table 1.
    assert len(cells) == 48 + 45 + 6
    roles = {"true": [1, 1, 1], "noise": [1, 1, 0], "blur": [1, 0, 1]}
    for data, net, augment, mollify in cells:
        seeds = {
            run.seed
            for run in paper_sweep
            if (run.data, run.net, run.augment) == (data, net, augment)
            and run.mollify == (mollify != "false")
            and (not run.mollify or run.settings["mollify.roles"] == roles[mollify])
            and {*run.changes} <= {"mollify.roles"}
        }
        assert seeds == {0, 1, 2}, (data, net, augment, mollify)
    assert len({*names(paper_sweep)}) == len(paper_sweep)
    assert [run.seed for run in paper_sweep] == sorted(run.seed for run in paper_sweep)


def test_a_run_is_the_papers_recipe_and_what_the_file_says(paper_sweep: list[Run]) -> None:
    (run,) = [run for run in paper_sweep if run.name == "cifar100-presnet50-fcr+trivial-mollify-mollify.beta=1,3-seed2"]
    config = parse_small(run.arguments)
    recipe = parse_small("--data cifar100 --augment fcr+trivial --mollify --mollify.beta 1 3 --run.seed 2".split())
    assert config == recipe and run.settings == flat(config.plain())


def flat(tree: dict[str, Any]) -> dict[str, Any]:
    return dict(chain(*([(f"{group}.{name}", x) for name, x in section.items()] for group, section in tree.items())))


def test_options_may_be_flat_or_nested_and_the_grid_comes_before_the_defaults(
    write_sweep: Callable[[str], Path],
) -> None:
    path = write_sweep("""
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


def test_runs_that_are_the_same_are_one(write_sweep: Callable[[str], Path]) -> None:
    path = write_sweep("""
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


def test_settings_are_checked_with_the_mollification_of_their_run(write_sweep: Callable[[str], Path]) -> None:
    text = '[[grid]]\ndata = "digits"\nmollify = {}\nvary."mollify.draws" = [1, 2]\n'
    start = "digits-shufflenet_v2_x0_5-none"
    expected = [f"{start}-mollify-seed0", f"{start}-seed0", f"{start}-mollify-mollify.draws=2-seed0"]
    assert names(read_sweep(write_sweep(text.format("[true, false]")))) == expected
    several = text.format("true").replace("[1, 2]", "[2]") + 'options."optim.loss" = "corrected"\n'
    assert names(read_sweep(write_sweep(several))) == [f"{start}-mollify-mollify.draws=2-optim.loss=corrected-seed0"]


def test_a_run_on_imagenet_has_its_recipe(write_sweep: Callable[[str], Path]) -> None:
    path = write_sweep("""
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


def test_a_name_leaves_out_what_the_optimiser_and_short_runs_bring_unless_it_was_changed(
    write_sweep: Callable[[str], Path],
) -> None:
    path = write_sweep("""
[[grid]]
trainer = "imagenet"
data = "/data/imagenet"
net = "resnet50"
augment = "fc"
mollify = false
seed = 0
options = { recipe = "scratch" }
[grid.vary]
optim.name = ["sgd", "adamw"]
optim.epochs = [90, 3]
optim.lr = [0.1, 1e-3]
optim.decay = ["all", "weights"]
""")
    start = "imagenet-resnet50-fc-recipe=scratch"
    runs = read_sweep(path)
    parts = [run.name.removeprefix(start).removesuffix("-seed0").split("-optim.") for run in runs]
    shown = {" ".join([name.strip("-"), *more]).strip() for name, *more in parts}
    assert len(shown) == 16 and {"", "adamw", "adamw epochs=3", "epochs=3", "lr=0.001 decay=weights"} <= shown
    changes = ("", " lr=0.1", " decay=all", " lr=0.1 decay=all")
    adamw = {f"adamw{epochs}{change}" for epochs in ("", " epochs=3") for change in changes}
    assert {x for x in shown if x.startswith("adamw")} == adamw
    # Those of earlier versions are other names, and as many.
    former = {run.former for run in runs}
    assert len(former) == 16 and all(run.former not in {*names(runs)} - {run.name} for run in runs)
    long = "optim.name=adamw-optim.lr=0.001-optim.lr_batch=1024-optim.weight_decay=0.05-optim.decay=weights"
    assert sorted(next(run.former for run in runs if run.name == f"{start}-adamw-seed0").split("-")) == sorted(
        f"{start}-{long}-seed0".split("-")
    )
    assert f"{start}-optim.epochs=3-optim.warmup_epochs=0.166666666667-seed0" in former


def test_defaults_that_are_written_out_make_no_other_run(write_sweep: Callable[[str], Path]) -> None:
    written = 'options = { optim.lr = 1e-3, optim.weight_decay = 0.05, optim.decay = "weights" }'
    path = write_sweep(f"""
[defaults]
data = "cifar10"
options = {{ optim.name = "adamw" }}
[[grid]]
[[grid]]
{written}
""")
    assert names(read_sweep(path)) == ["cifar10-presnet50-fcr+trivial-adamw-seed0"]


def test_a_folder_of_the_former_name_is_the_runs_own(write_sweep: Callable[[str], Path], tmp_path: Path) -> None:
    text = '[[grid]]\ndata = "digits"\noptions."optim.name" = "adamw"\n'
    (run,) = read_sweep(write_sweep(text))
    assert run.folder(tmp_path) == tmp_path / run.name != tmp_path / run.former
    finish(tmp_path / run.former, 0.25)
    assert run.folder(tmp_path) == tmp_path / run.former
    (row,) = make_rows([run], tmp_path)
    assert (row.settings, row.means["error"]) == ("optim.name=adamw", 25)
    (tmp_path / run.name).mkdir()
    assert run.folder(tmp_path) == tmp_path / run.name


GRID = '[defaults]\ndata = "digits"\n\n[[grid]]\nseed = 1\n\n[[grid]]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file: there must be at least one [[grid]]"),
        ("[grid]\ndata = 'digits'", "at least one [[grid]], in double brackets"),
        ("[[grid]\n", "some.toml: Expected ']]' at the end of an array declaration (at line 1"),
        ("[[grid]]\n", "[[grid]] 1: data is missing"),
        ("[default]\n" + GRID, "the file, line 1: unknown key 'default'; did you mean defaults?"),
        (GRID + 'augmnet = "fcr"', "[[grid]] 2, line 8: unknown key 'augmnet'; did you mean augment?"),
        (GRID + 'augment = ["fcr",\n  "fcr+trival"]', "[[grid]] 2, line 9: augment must be"),
        (GRID + 'augment = ["fcr",\n  "fcr+trival"]', "got 'fcr+trival'; did you mean fcr+trivial?"),
        (GRID + 'net = "presnet51"', "line 8: net: there is no classification model 'presnet51'; did you mean"),
        (GRID + 'data = "cifar1O"', "line 8: data: 'cifar1O' is neither a known data set nor a file or folder; did"),
        (GRID + 'data = "cifar1O"', "did you mean cifar10?"),
        (GRID + 'trainer = "imagnet"', "line 8: unknown trainer 'imagnet'; did you mean imagenet?"),
        (GRID + 'mollify = "yes"', "line 8: mollify must be true or false, got 'yes'"),
        (GRID + "seed = [true]", "line 8: seed must be an integer in [0, 2^63), got True"),
        (GRID + "seed = -1", "line 8: seed must be an integer in [0, 2^63), got -1"),
        (GRID + f"seed = {2**63}", f"line 8: seed must be an integer in [0, 2^63), got {2**63}"),
        (GRID + "options.data.mean = [0, 0, 0]", "line 8: --data.mean and --data.std belong together, got (0.0, 0.0"),
        (GRID + "net = []", "line 8: net has no value"),
        (GRID + "options = 3", "line 8: options must be a table, got 3"),
        (GRID + 'options."optim.epoch" = 3', "line 8: unknown option 'optim.epoch'; did you mean optim.epochs?"),
        (GRID + "[grid.options.optim]\nlr = 1\nepoch = 3", "line 10: unknown option 'optim.epoch'"),
        (GRID + 'vary."optim.epoch" = [3]', "line 8: unknown option 'optim.epoch'"),
        (GRID + 'vary."optim.epochs" = 3', "line 8: vary must have a list of values for optim.epochs, got 3"),
        (GRID + 'options."model.weights" = "IMAGENET1K_V9"', "line 8: --model.weights: 'IMAGENET1K_V9' is no file"),
        (GRID + 'net = "resnet50"\noptions."model.weights" = "timm"', "for resnet50: IMAGENET1K_V1, IMAGENET1K_V2; "),
        (GRID + 'options."optim.epochs" = "ten"', "line 8: --epochs/--optim.epochs: "),
        (GRID + 'options."optim.lr" = -1', "line 8: --optim.lr must be positive and finite, got -1"),
        (GRID + 'mollify = true\noptions."mollify.beta" = [1, -2]', "line 9: mollify: beta"),
        (
            GRID + 'mollify = [true, false]\noptions."mollify.draws" = 2\noptions."optim.loss" = "corrected"',
            "line 10: --optim.loss must be another with one draw of an image, got corrected",
        ),
        (GRID + "options.run.seed = 1", "options: run.seed is given by the key seed"),
        (GRID + "options.run.output = 'x'", "options: run.output is set by the sweep itself"),
        (GRID + f"data = './{'d' * 230}'", f"is 3 bytes too long: shorten data, '{'d' * 230}' (ddd"),
        (GRID + f"options.'model.weights' = './{'w' * 230}'", "line 8: a run's name, which is its folder's, is "),
        (GRID + "seed = 1\noptions.run.log-every = 3", "digits-shufflenet_v2_x0_5-none-seed1 is also a run of other"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_place_and_the_nearest_name(
    write_sweep: Callable[[str], Path], capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    write_sweep(text)
    assert main(["sweep", "some.toml"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("error: some.toml") and message in captured.err, captured.err
    assert not Path("runs").exists()


def test_a_line_of_the_defaults_is_found_too(write_sweep: Callable[[str], Path]) -> None:
    path = write_sweep('[defaults]\naugment = "fcr+tirvial" # a comment\n[[grid]]\ndata = "digits" # fcr+tirvial')
    with pytest.raises(ValueError, match=r"some.toml, \[defaults\], line 2: .* fcr[+]trivial"):
        read_sweep(path)


@pytest.mark.parametrize(
    ("defaults", "grid", "place"),
    [
        ("seed = -1", "mollify = true\n[[grid]]\nseed = 1", "[defaults], line 3: seed must be"),
        ("trainer = 'imagnet'", "trainer = 'imagenet'\n[[grid]]", "[defaults], line 3: unknown trainer"),
        ("net = 'presnet51'", "[[grid]]\nnet = 'presnet51'", "[defaults], line 3: net: there is no"),
        ("options.optim.lr = -1", "options.optim.lr-batch = 32", "[defaults] for [[grid]] 1, line 3: --optim.lr must"),
        ("options.optim.lr = 1", "options.optim.lr = -1", "[[grid]] 1, line 5: --optim.lr must"),
        (
            "options.optim.lr = -1",
            "options.optim.lr = 1\n[[grid]]",
            "[defaults] for [[grid]] 2, line 3: --optim.lr must",
        ),
        (
            "[defaults.options]\noptim.epoch = 3",
            "options.optim.epochs = 3",
            "[defaults] for [[grid]] 1, line 4: unknown",
        ),
        ("vary.optim.lr = 1", "vary.optim.lr = [1]", "[defaults], line 3: vary must have a list"),
        ("vary.optim.lr = [-1]", "options.optim.epochs = 1", "[defaults] for [[grid]] 1, line 3: --optim.lr must"),
        ("options.run.seed = 1", "seed = 1", "[defaults], line 3: options: run.seed is given by the key seed"),
        (
            "mollify = true\noptions.mollify.k-noise = -1",
            "vary.mollify.k-blur = [1, 2]",
            "[defaults] for [[grid]] 1, line 4: mollify: k_noise",
        ),
        (
            "options.model.weights = 'IMAGENET1K_V9'",
            "# options.model.weights = 'IMAGENET1K_V9'",
            "[defaults] for [[grid]] 1, line 3: --model.weights: 'IMAGENET1K_V9' is no file",
        ),
        (
            "options.optim.lr = 1",
            "options.optim.lr = 2\nvary.optim.lr = [3]",
            "[[grid]] 1, line 5: optim.lr is in options",
        ),
    ],
)
def test_an_error_is_of_the_table_that_has_it(
    write_sweep: Callable[[str], Path], defaults: str, grid: str, place: str
) -> None:
    path = write_sweep(f'[defaults]\ndata = "digits"\n{defaults}\n[[grid]]\n{grid}\n')
    with pytest.raises(ValueError, match="^" + re.escape(f"some.toml, {place}")):
        read_sweep(path)


def test_a_grids_option_replaces_the_axis_of_the_defaults_and_the_other_way_round(
    write_sweep: Callable[[str], Path],
) -> None:
    path = write_sweep("""
[defaults]
data = "digits"
vary."optim.lr" = [1, 2]
options."optim.epochs" = 3
[[grid]]
options."optim.lr" = 4
vary."optim.epochs" = [5, 6]
""")
    assert [(run.settings["optim.lr"], run.settings["optim.epochs"]) for run in read_sweep(path)] == [(4, 5), (4, 6)]


def test_what_is_like_no_name_brings_the_names_there_are(write_sweep: Callable[[str], Path]) -> None:
    for line, message in (
        ("zzz = 1", "unknown key 'zzz'; there are augment, data, mollify, net, options, seed, trainer, vary"),
        ("options.optim.zzz = 1", "unknown option 'optim.zzz'; there are optim."),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            read_sweep(write_sweep(f'[[grid]]\ndata = "digits"\n{line}\n'))


def test_a_file_that_is_not_there_brings_those_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "papre.toml"]) == 2
    assert capsys.readouterr().err == "error: papre.toml: no such file (with fastmoll: paper.toml)\n"
