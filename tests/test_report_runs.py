"""Evaluations are read whole or refused by file and key, and only seeds are averaged."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_runs import NAMES, fake_result, fake_runs, write_run

from fastmoll.kernels.corruption_constants import CORRUPTIONS, GROUPS
from fastmoll.report.labels import explain, labels
from fastmoll.report.read import find_runs, find_unevaluated, find_unfinished, read_run
from fastmoll.report.runs import RunResult, group_seeds, image_set


def write(folder: Path, **values: Any) -> Path:
    return write_run(folder, fake_result(count=40, **values))


def test_a_run_is_read_from_its_folder_its_evaluation_or_the_file(tmp_path: Path) -> None:
    content = fake_result(seed=3, settings={"optim.epochs": 30})
    folder = write_run(tmp_path / "run", content)
    out = folder / "robustness-generated"
    runs = [read_run(place) for place in (folder, out, out / "robustness.json", str(folder))]
    assert all(run == runs[0] for run in runs)
    run = runs[0]
    assert (run.data, run.net, run.augment, run.mollify, run.seed) == ("cifar10", "presnet50", "fcr+trivial", True, 3)
    assert (run.source, run.frost, run.size, run.num_classes, run.count) == ("generated", "made", 32, 10, 400)
    assert run.settings == {"optim.epochs": 30} and run.path == out / "robustness.json"
    assert CORRUPTIONS == NAMES and tuple(run.cells) == CORRUPTIONS
    assert run.cells["fog"][4].error == content["cells"]["fog"][4]["error"]
    assert [list(row) for row in run.clean.reliability] == content["clean"]["reliability"]


def test_a_figure_is_the_plain_mean_of_the_cells_it_names(tmp_path: Path) -> None:
    content = fake_result()
    run = read_run(write_run(tmp_path, content))
    cells = content["cells"]
    for metric in ("error", "nll", "ece", "ece_adaptive", "ece_batch100"):
        value = {(name, place): cells[name][place][metric] for name in NAMES for place in range(5)}
        assert run.value(metric) == pytest.approx(statistics.fmean(value.values()), rel=1e-12)
        assert run.value(metric, "snow") == pytest.approx(statistics.fmean(value["snow", x] for x in range(5)))
        assert run.value(metric, "snow", 2) == value["snow", 1]
        assert run.value(metric, severity=5) == pytest.approx(statistics.fmean(value[x, 4] for x in NAMES))
        noise = statistics.fmean(value[name, 0] for name in ("gaussian_noise", "shot_noise", "impulse_noise"))
        assert run.value(metric, "noise", 1) == pytest.approx(noise)
        assert run.value(metric, "clean") == content["clean"][metric]
    assert not {*GROUPS} & {*CORRUPTIONS}


def test_a_sweeps_folder_is_all_of_its_finished_runs(tmp_path: Path) -> None:
    runs = fake_runs(tmp_path / "sweep", seeds=(0,), count=40)
    (tmp_path / "sweep" / "begun" / "robustness-generated" / "cells").mkdir(parents=True)
    assert [x.parent.parent for x in find_runs(tmp_path / "sweep")] == sorted(runs)
    assert find_unfinished(tmp_path / "sweep") == [tmp_path / "sweep" / "begun" / "robustness-generated"]
    other = write_run(tmp_path / "mine", fake_result(count=40))
    (tmp_path / "sweep" / "none").mkdir()
    (tmp_path / "sweep" / "none" / "config.json").touch()
    assert [x.parent.parent for x in find_runs(tmp_path)] == [other, *sorted(runs)]  # also one further down
    assert find_unfinished(tmp_path) == find_unfinished(tmp_path / "sweep")
    assert find_unevaluated(tmp_path) == find_unevaluated(tmp_path / "sweep") == [tmp_path / "sweep" / "none"]
    with pytest.raises(ValueError, match=r"begun has no robustness.json: not all 75 cells are evaluated"):
        read_run(tmp_path / "sweep" / "begun")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no robustness.json: evaluate a checkpoint first"):
        find_runs(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"there is no file or folder .*none"):
        find_runs(tmp_path / "none")
    (tmp_path / "sweep" / "waiting" / "robustness-generated").mkdir(parents=True)
    (tmp_path / "sweep" / "waiting" / "config.json").touch()
    assert find_unevaluated(tmp_path / "sweep") == [tmp_path / "sweep" / name for name in ("none", "waiting")]
    write_run(runs[0], fake_result(source="official", count=40))
    assert len(find_runs(runs[0])) == 2
    with pytest.raises(ValueError, match="has 2 evaluations: name one"):
        read_run(runs[0])


# --- what is refused --------------------------------------------------------------------------------------------------


def drop(*keys: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


def put(value: Any, *keys: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(2, "format"), "format must be 1, the format that this version reads, got 2"),
        (drop("net"), "net is missing"),
        (drop("mce"), "mce is missing"),
        (drop("cells", "fog"), "cells lacks fog; a report needs all 15"),
        (put([], "cells", "fog"), "cells.fog must be a list of 5 cells, one a severity, got []"),
        (drop("cells", "snow", 4), "cells.snow must be a list of 5 cells"),
        (drop("cells", "snow", 2, "ece_adaptive"), "cells.snow[2].ece_adaptive is missing"),
        (put(None, "cells", "snow", 2), "cells.snow[2] must be an object, got null"),
        (
            put(float("nan"), "clean", "nll"),
            "clean.nll must be a finite number of at least 0 that float32 holds, got NaN",
        ),
        (put(101, "clean", "error"), "clean.error must be a number from 0 to 100, got 101"),
        (put(1.5, "clean", "ece"), "clean.ece must be a number from 0 to 1, got 1.5"),
        (put(True, "clean", "ece"), "clean.ece must be a number from 0 to 1, got true"),
        (put(39, "clean", "count"), "clean.count must be 40, the run's count, got 39"),
        (put([[1, 1.0, 1]], "clean", "reliability"), "clean.reliability must be 15 rows of [samples"),
        (
            put([[1, 1.0, 1]] * 15, "clean", "reliability"),
            "clean.reliability must be bins of 40 samples together, got 15",
        ),
        (put("both", "source"), 'source must be generated or official, got "both"'),
        (put(None, "frost"), "frost must be published or made, got null"),
        (put("official", "source"), 'frost must be null for official images, got "made"'),
        (put(12.0, "corrupted", "error"), "corrupted.error must be the mean of its cells, "),
        (drop("corrupted", "nll"), "corrupted.nll is missing"),
        (put({"value": 80.0}, "mce"), "mce.baseline is missing"),
        (put("yes", "mollify"), 'mollify must be true or false or null, got "yes"'),
        (put(0.5, "seed"), "seed must be a whole number of 64 bits or null, got 0.5"),
        (put(0, "size"), "size must be a whole number from 1 to 16384, got 0"),
        (put(10**400, "size"), "size must be a whole number from 1 to 16384, got 1000"),
        (put(True, "format"), "format must be 1, the format that this version reads, got true"),
        (put(-1, "count"), "count must be a whole number from 1 to 2^53, got -1"),
        (put(1e308, "cells", "fog", 0, "nll"), "cells.fog[0].nll must be a finite number of at least 0 that float32"),
        (put(10**400, "cells", "fog", 0, "nll"), "cells.fog[0].nll must be a finite number of at least 0 that float32"),
        (
            put(float("inf"), "corrupted", "nll"),
            "corrupted.nll must be a finite number of at least 0 that float32 holds",
        ),
        (put("1", "cells", "fog", 4, "ece"), 'cells.fog[4].ece must be a number from 0 to 1, got "1"'),
        (put(-1, "cells", "fog", 4, "error"), "cells.fog[4].error must be a number from 0 to 100, got -1"),
        (put(1e308, "clean", "reliability", 3, 1), "clean.reliability must be 15 rows of [samples, sum of confid"),
        (put(-1, "clean", "reliability", 3, 2), "clean.reliability must be 15 rows of [samples, sum of confid"),
        (put(0.5, "clean", "reliability", 3, 0), "clean.reliability must be 15 rows of [samples, sum of confid"),
        (put([1, 1.0, 2], "clean", "reliability", 3), "clean.reliability must be 15 rows of [samples, sum of confid"),
        (put({"value": 1e308, "baseline": "A"}, "mce"), "mce.value must be a finite number of at least 0 that"),
        (put("a\nb", "net"), 'net must be text of one line, got "a\\nb"'),
        (put("\ud800", "data"), 'data must be text of one line, got "\\ud800"'),
        (put(["x"], "augment"), 'augment must be text of one line or null, got ["x"]'),
        (put("a\r", "settings", "x"), "settings.x must be a number, text of one line, true, false, null, or a list"),
        (put(float("nan"), "settings", "x"), "settings.x must be a number, text of one line, true, false, null, or"),
        (
            put({"a": [10**400]}, "settings", "x"),
            "settings.x must be a number, text of one line, true, false, null, or",
        ),
        (put(1, "settings", "a\nb"), 'a name in settings must be text of one line, got "a\\nb"'),
    ],
)
def test_a_wrong_file_is_refused_by_name_and_key(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    content = fake_result(count=40)
    change(content)
    folder = write_run(tmp_path, {**content, "source": "generated"})
    path = folder / "robustness-generated" / "robustness.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        read_run(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", "[" * 100_000, '{"a": 1' + "0" * 5000 + "}"])
def test_a_file_that_is_no_evaluation_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "robustness.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}: it (cannot be read as JSON|must hold an object)"):
        read_run(path)


def test_a_byte_order_mark_before_the_text_is_read_over(tmp_path: Path) -> None:
    file = write(tmp_path) / "robustness-generated" / "robustness.json"
    before = read_run(file)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert read_run(file) == before


def test_a_network_of_which_some_outputs_are_compared_says_so(tmp_path: Path) -> None:
    content = fake_result(net="resnet50", num_classes=10)
    assert read_run(write_run(tmp_path, content)).net == "resnet50"
    assert read_run(write_run(tmp_path, {**content, "outputs": 10})).net == "resnet50"
    assert read_run(write_run(tmp_path, {**content, "outputs": 1000})).net == "resnet50 (10 of 1000 outputs)"
    with pytest.raises(ValueError, match=r"outputs must be a whole number from num_classes, 10, to 2\^53, got 9"):
        read_run(write_run(tmp_path, {**content, "outputs": 9}))


def test_a_cell_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "robustness.json"
    text = json.dumps(fake_result(count=40))
    path.write_text(text.replace('"cells": {', '"cells": {"fog": [], ', 1))
    with pytest.raises(
        ValueError, match=rf'{re.escape(str(path))}: it cannot be read as JSON \(key "fog" is there twice\)'
    ):
        read_run(path)


def test_the_loss_of_a_network_that_diverged_is_read(tmp_path: Path) -> None:
    content = fake_result(count=40)
    content["clean"]["nll"] = 3.4e38
    assert read_run(write_run(tmp_path, content)).clean.nll == 3.4e38


# --- seeds ------------------------------------------------------------------------------------------------------------


def test_only_seeds_are_averaged(tmp_path: Path) -> None:
    different = [
        {},
        {"data": "cifar100"},
        {"net": "wrn40"},
        {"augment": "fcr"},
        {"augment": None},
        {"mollify": False},
        {"mollify": None},
        {"settings": {"optim.epochs": 30}},
        {"settings": {"mollify.roles": [1, 1, 0]}},
        {"size": 64},
        {"source": "official"},
        {"frost": "published"},
    ]
    runs = [
        read_run(write(tmp_path / f"{number}-{seed}", seed=seed, shift=2.5 * seed, **values))
        for seed in (1, 0)
        for number, values in enumerate(different)
    ]
    groups = group_seeds(runs)
    assert len(groups) == len(different) == len({*labels(groups)})
    for group, first, second in zip(groups, runs[: len(different)], runs[len(different) :], strict=True):
        assert group.runs == (second, first)  # by seed
        a, b = first.value("nll", "fog"), second.value("nll", "fog")
        found = group.statistic("nll", "fog")
        assert found.mean == pytest.approx((a + b) / 2) and found.count == 2
        assert found.deviation == pytest.approx(abs(a - b) / 2**0.5)  # n - 1
    single = group_seeds(runs[:1])[0].statistic("error")
    assert (single.deviation, single.count) == (None, 1)


def test_official_and_generated_are_never_averaged(tmp_path: Path) -> None:
    generated = read_run(write(tmp_path / "a", seed=0))
    official = read_run(write(tmp_path / "b", seed=1, source="official"))
    published = read_run(write(tmp_path / "c", seed=1, frost="published"))
    for other in (official, published):
        assert len(group_seeds([generated, other])) == 2


def test_a_run_evaluated_on_several_sets_is_one_row_for_each(tmp_path: Path) -> None:
    def read(name: str, **values: Any) -> RunResult:
        return read_run(write(tmp_path / name, **values))

    own, other = ({"source": "official", "set_name": name} for name in ("CIFAR-10-C", "CIFAR-10-C-bar"))
    written = [read("written", seed=0, set_name="mine"), read("made", seed=0), read("made 1", seed=1)]
    named = [read(f"named {seed}", seed=seed, **own) for seed in (0, 1)]
    groups = group_seeds([*named, *written, read("other", seed=0, **other)])
    assert [(image_set(group.run), len(group.runs)) for group in groups] == [
        ("official (set: CIFAR-10-C)", 2),
        ("generated (frost: made; set: mine)", 1),
        ("generated (frost: made)", 2),
        ("official (set: CIFAR-10-C-bar)", 1),
    ]
    assert "without the name of a set were made on the way" in explain(groups)
    # Names that tell nothing apart are left out, and an official set of unknown name is the only one there is.
    older = read("older", seed=2, source="official")
    assert [(image_set(x.run), len(x.runs)) for x in group_seeds([*named, older])] == [("official", 3)]
    assert [image_set(x.run) for x in group_seeds(written[:1])] == ["generated (frost: made)"]
    assert "on the way" not in explain(group_seeds(written[1:]))
    content = fake_result(count=40)
    del content["set"]  # an evaluation of an earlier version
    path = tmp_path / "robustness.json"
    path.write_text(json.dumps(content))
    assert read_run(path).set_name is None


def test_a_run_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    first, copy = (read_run(write(tmp_path / name, seed=0)) for name in ("a", "b"))
    with pytest.raises(ValueError, match=rf"{first.path} and {copy.path} are one run twice: cifar10, presnet50, "):
        group_seeds([first, copy])
    # Without a seed, weights are what tells runs apart.
    one = fake_result(count=40, seed=None)
    a, b, c = (
        read_run(write_run(tmp_path / name, {**one, "checkpoint": weights}))
        for name, weights in (("c", "a.pt"), ("d", "b.pt"), ("e", "b.pt"))
    )
    assert len(group_seeds([a, b])) == 2
    with pytest.raises(ValueError, match="are one run twice"):
        group_seeds([a, b, c])


def test_labels_say_what_differs(tmp_path: Path) -> None:
    groups = group_seeds(read_run(x) for x in fake_runs(tmp_path, seeds=(0,), count=40))
    assert labels(groups) == ["fcr", "fcr + mollification", "fcr+trivial", "fcr+trivial + mollification"]
    both = group_seeds(
        [
            read_run(write(tmp_path / "a", settings={"mollify.beta": [1, 3], "optim.nesterov": True})),
            read_run(write(tmp_path / "b", source="official", net="wrn40")),
        ]
    )
    assert labels(both) == [
        "presnet50, fcr+trivial + mollification, mollify.beta=1,3 optim.nesterov=true, generated (frost: made)",
        "wrn40, fcr+trivial + mollification, official",
    ]
    foreign = [read_run(write(tmp_path / x, net=x, augment=None, mollify=None, seed=None)) for x in ("n1", "n2")]
    assert labels(group_seeds(foreign)) == ["n1", "n2"] and labels([]) == []


def test_a_label_leaves_out_what_all_runs_share_and_names_a_single_role(tmp_path: Path) -> None:
    shared = {"optim.epochs": 15}
    trained = [
        {"mollify": False, "settings": shared},
        {"mollify": True, "settings": shared},
        {"mollify": True, "settings": {**shared, "mollify.roles": [1.0, 1.0, 0.0]}},
        {"mollify": True, "settings": {**shared, "mollify.beta": [1.0, 3.0]}},
        {"mollify": False, "settings": {**shared, "data.name": "$5$"}},
    ]
    runs = [read_run(write(tmp_path / str(i), augment="fcr", **changes)) for i, changes in enumerate(trained)]
    assert labels(group_seeds(runs)) == [
        "fcr",
        "fcr + mollification",
        "fcr + noise alone",
        "fcr + mollification, mollify.beta=1.0,3.0",
        "fcr, data.name=$5$",
    ]
