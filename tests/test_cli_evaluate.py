"""Tests of ``fastmoll evaluate`` as it is run: resumed, on several processes, with bad input."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluations import SOME, cells, fails, finish, run, start, write_data, write_official

from fastmoll.corruptions import corrupt
from fastmoll.output import lock
from fastmoll.pipelines.small import read_small
from fastmoll.report.read import read_run
from fastmoll.robustness.loader import CorruptedLoader
from fastmoll.scoring import evaluate
from fastmoll.train.small_images import main as train
from fastmoll.weights import build_model, load_weights

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    return write_official(tmp_path_factory.mktemp("official"), data)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Folder of a short run of the trainer."""
    output = tmp_path_factory.mktemp("trained") / "run"
    settings = ["--net", "shufflenet_v2_x0_5", "--augment", "none", "--mollify", "--optim.epochs", "20"]
    settings += ["--data.batch-size", "10", "--optim.lr", "0.1", "--run.seed", "3", "--run.device", "cpu"]
    settings += ["--run.output", str(output)]
    assert train(["--data", str(data), *settings]) == 0
    return output


@pytest.fixture
def mine(tmp_path: Path, trained: Path) -> Path:
    """A copy of that folder, to be written to."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def network(folder: Path) -> torch.nn.Module:
    model = build_model("shufflenet_v2_x0_5", 3, 16, small_stem=None)
    load_weights(model, "shufflenet_v2_x0_5", str(folder / "checkpoint.pt"))
    return model


def test_an_official_set_is_evaluated_and_its_results_say_of_what(
    mine: Path, data: Path, official: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [mine / "checkpoint.pt", "--data", data, "--corrupted", f"official:{official}", "--device", "cpu"]
    assert run(*arguments) == 0
    printed = capsys.readouterr().out
    found = read_run(mine)
    assert found.path == mine / "robustness-official" / "robustness.json" and str(found.path) in printed
    assert (found.source, found.frost, found.data, found.size, found.count) == ("official", None, data.name, 16, 24)
    assert (found.net, found.augment, found.mollify, found.seed) == ("shufflenet_v2_x0_5", "none", True, 3)
    assert found.settings == {"optim.epochs": 20, "optim.lr": 0.1, "data.batch_size": 10} and found.num_classes == 3
    assert found.mce is None and found.environment["world_size"] == 1
    assert len({cell.nll for row in found.cells.values() for cell in row}) > 50  # no network that sees nothing

    # The cell's own images, standardised as in training, through the network of the checkpoint.
    saved = json.loads((mine / "config.json").read_text())["data"]
    mean, std = (torch.tensor(saved[name]).view(3, 1, 1) for name in ("mean", "std"))
    images = torch.from_numpy(np.load(official / "fog.npy")[24 * 3 : 24 * 4]).permute(0, 3, 1, 2)
    batch = ((images / 255 - mean) / std, torch.from_numpy(np.load(data / "val_labels.npy")))
    theirs = evaluate(network(mine), [batch])
    assert found.cells["fog"][3].error == theirs["error"]
    assert found.cells["fog"][3].nll == pytest.approx(theirs["nll"], rel=1e-4)
    validation = json.loads((mine / "result.json").read_text())
    assert found.clean.error == pytest.approx(100 * validation["validation"]["error"])
    added = {"error": found.corrupted["error"] / 100, "source": "official", "set": official.name}
    assert validation["corrupted"] == pytest.approx(added)

    # Nothing is done a second time.
    before = {path: path.stat().st_mtime_ns for path in (mine / "robustness-official" / "cells").iterdir()}
    assert run(mine / "model.pt", *arguments[1:]) == 0
    assert "76 of 76 cells are done already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in before} == before

    # A result that it does not belong to is named.
    (mine / "result.json").write_text(json.dumps({"validation": {"count": 7}}))
    assert run(*arguments) == 0
    reason = "the run was validated on 7 images, not on 24"
    assert f"the corrupted error was not added to {mine / 'result.json'}: {reason}\n" in capsys.readouterr().out


def test_generated_images_are_those_of_corrupt_and_some_cells_can_be_asked_for(
    mine: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = [mine, "--out", out, *SOME, "--seed", "4"]  # on generated images of the data of its training
    assert run(*arguments, "--batch-size", "7", "--predictions") == 0
    assert sorted(cells(out)) == ["clean", "fog-2", "fog-5", "gaussian_noise-2", "gaussian_noise-5"]
    assert not (out / "robustness.json").exists() and "a report needs all 75 cells" in capsys.readouterr().out
    images = read_small(data, "val")
    noisy = corrupt(torch.from_numpy(images.images).permute(0, 3, 1, 2).contiguous(), "gaussian_noise", 5, seed=4)
    saved = json.loads((mine / "config.json").read_text())["data"]
    mean, std = (torch.tensor(saved[name]).view(3, 1, 1) for name in ("mean", "std"))
    theirs = evaluate(network(mine), [((noisy / 255 - mean) / std, torch.from_numpy(images.labels))])
    ours = cells(out)["gaussian_noise-5"]
    assert ours["error"] == theirs["error"] and ours["nll"] == pytest.approx(theirs["nll"], rel=1e-4)

    # Scored again, with neither the network nor the images.
    before = cells(out)
    (out / "cells" / "fog-2.json").unlink()
    assert run("--rescore", out) == 0
    after = cells(out)
    for name, cell in before.items():
        assert after[name].pop("reliability") is not None and cell.pop("reliability") is not None
        assert after[name].pop("evaluation") == cell.pop("evaluation")
        assert after[name] == pytest.approx(cell, rel=1e-6), name
    # Also where torchrun started it.
    (out / "cells" / "fog-2.json").unlink()
    assert finish(start(2, "--rescore", out), 60) == [0, 0]
    assert (out / "cells" / "fog-2.json").exists()


def test_a_killed_evaluation_of_three_processes_ends_with_the_figures_of_one(
    tmp_path: Path, trained: Path, data: Path, official: Path
) -> None:
    arguments = [trained / "checkpoint.pt", "--data", data, "--corrupted", f"official:{official}", "--device", "cpu"]
    assert run(*arguments, "--out", tmp_path / "whole") == 0
    out = tmp_path / "killed"
    # Five batches on three processes: 24 samples in shares of 8, by 5.
    ranks = start(3, *arguments, "--out", out, "--batch-size", 5)
    while len(list(out.glob("cells/*.json"))) < 4:
        assert all(process.is_alive() for process in ranks)
        time.sleep(0.002)
    for process in ranks:
        process.kill()
        process.join()
    assert not (out / "robustness.json").exists()
    done = {path: path.stat().st_mtime_ns for path in out.glob("cells/*.json")}
    assert 4 <= len(done) < 76
    assert finish(start(3, *arguments, "--out", out, "--batch-size", 5)) == [0, 0, 0]
    assert {path: path.stat().st_mtime_ns for path in done} == done
    ours, theirs = cells(out), cells(tmp_path / "whole")
    assert ours.keys() == theirs.keys() and len(ours) == 76
    for name, cell in theirs.items():
        for content in (ours[name], cell):
            assert sum(row[0] for row in content.pop("reliability")) == 24
        assert ours[name].pop("evaluation") == cell.pop("evaluation")
        assert ours[name] == pytest.approx(cell, rel=1e-4, abs=1e-6), name
    assert read_run(out).environment["world_size"] == 3


def test_an_error_on_the_way_is_one_line_and_keeps_what_is_done(
    tmp_path: Path, trained: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = CorruptedLoader.generated

    def fail(data: Any, corruption: str | None = None, severity: int | None = None, **options: Any) -> Any:
        if corruption == "fog":
            raise OSError("the disk is gone")
        return real(data, corruption, severity, **options)

    monkeypatch.setattr(CorruptedLoader, "generated", fail)
    arguments = [trained / "model.pt", "--data", data, "--corrupted", "generated", "--out", tmp_path / "out", *SOME]
    assert run(*arguments) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert errors == ["error: the disk is gone"]
    assert sorted(cells(tmp_path / "out")) == ["clean", "gaussian_noise-2", "gaussian_noise-5"]
    monkeypatch.undo()
    assert run(*arguments) == 0
    assert "3 of 5 cells are done already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--corrupted": "offical:x"}, "--corrupted must be generated or official:PATH, got 'offical:x'"),
        ({"--corrupted": "official:"}, "--corrupted must be generated or official:PATH, got 'official:'"),
        ({"--corrupted": "official:/nowhere"}, "there is no folder /nowhere"),
        ({"--data": "cifra10"}, "did you mean cifar10"),
        ({"--corruptions": "frog"}, "corruptions: there is no 'frog'; did you mean f"),
        ({"--severities": "6"}, "severities must be 1 to 5, got 6"),
        ({"--batch-size": "0"}, "--batch-size must be .*0"),
        ({"--seed": "-1"}, "--seed must be .*-1"),
        ({"--net": "resnet50"}, "--net: .* is of shufflenet_v2_x0_5, not of resnet50"),
        ({"--size": "32"}, "has images of 16 x 16 pixels, not 32 x 32; --size 16 takes them as they are"),
        ({"--out": "/proc/nowhere"}, "--out: /proc/nowhere can't be made"),
        ({"--mean": ("0", "0", "0")}, "--std must be given, too: --mean and --std belong together"),
    ],
)
def test_bad_input_is_one_line_before_any_work(
    tmp_path: Path, trained: Path, data: Path, capsys: pytest.CaptureFixture[str], change: Any, message: str
) -> None:
    options = {"--data": data, "--corrupted": "generated", "--out": tmp_path / "out", "--device": "cpu", **change}
    words = [word for name, value in options.items() for word in (name, *(value if name == "--mean" else [value]))]
    line = fails(capsys, trained / "checkpoint.pt", *words)
    assert re.search(message, line), line
    assert not (tmp_path / "out").exists()


def test_what_must_be_given_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path, trained: Path) -> None:
    shutil.copy(trained / "model.pt", tmp_path / "foreign.pt")
    foreign = [tmp_path / "foreign.pt", "--net", "shufflenet_v2_x0_5", "--device", "cpu"]
    for given, also in (([], "--size, --mean, --std"), (["--mean", 0, 0, 0, "--std", 1, 1, 1], "--size")):
        message = fails(capsys, *foreign, *given)
        expected = rf"--data must be given: .*foreign.pt does not say what it was trained on \(and {also}, as far as"
        assert re.search(expected, message)
    weights = ["torchvision:resnet18", "--device", "cpu"]
    assert fails(capsys, *weights).endswith("IMAGENET1K_V1 does not say what it was trained on")
    assert "CHECKPOINT must be given" in fails(capsys, "--data", "digits", "--corrupted", "generated")
    assert "--rescore needs nothing but its folder, got CHECKPOINT" in fails(capsys, "x.pt", "--rescore", tmp_path)
    assert "holds no evaluation" in fails(capsys, "--rescore", tmp_path)
    message = fails(capsys, "--rescore", tmp_path, "--out", tmp_path, "--corrupted", "generated")
    assert "--rescore needs nothing but its folder, got --corrupted, --out" in message


def test_a_wrong_folder_of_frost_matters_to_frost_alone(
    trained: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTMOLL_FROST", str(tmp_path / "nowhere"))
    arguments = [trained / "model.pt", "--data", data, "--out", tmp_path / "out", "--device", "cpu"]
    arguments += ["--severities", 1, "--corruptions", "fog"]
    assert "FASTMOLL_FROST must be a folder" in fails(capsys, *arguments, "frost")
    assert not (tmp_path / "out" / "cells").exists()
    assert run(*arguments) == 0 and sorted(cells(tmp_path / "out")) == ["clean", "fog-1"]


def test_a_corrupted_set_that_is_not_whole_or_of_other_data_is_refused(
    tmp_path: Path, trained: Path, data: Path, official: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in official.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "fog.npy").unlink()
    common = [trained / "model.pt", "--out", tmp_path / "out", "--device", "cpu"]
    arguments = [*common, "--data", data, "--corrupted", f"official:{tmp_path}"]
    assert re.search(
        r"fog\.npy missing; for those that are there: --corruptions gau\S+ .* jpeg_\w+$", fails(capsys, *arguments)
    )
    for name in ("weather/fog/2", "blur/glass_blur/2"):
        (tmp_path / "folders" / name).mkdir(parents=True)
    folders = [*arguments[:-1], f"official:{tmp_path / 'folders'}", "--severities", 2, "--corruptions"]
    message = fails(capsys, *folders, "snow", "fog", "glass_blur")
    assert re.search(r"snow missing; for those that are there: --corruptions glass_blur fog$", message)
    message = fails(capsys, *folders[:-2], 2, 3, "--corruptions", "fog", "glass_blur")
    assert re.search(r"fog lacks severity 3; for those that are there: --severities 2$", message)
    assert "there: --corr" not in (message := fails(capsys, *folders, "snow")) and "none of snow" in message
    assert "there: --corr" not in fails(capsys, *folders, "fog")  # which has no images
    np.save(tmp_path / "fog.npy", np.load(official / "fog.npy")[:-24])  # severity 5
    assert "fog.npy has 96 images, but labels.npy has 120 labels" in fails(capsys, *arguments)
    # Fewer clean images than there are in each cell.
    other = tmp_path / "other"
    other.mkdir()
    for name in ("val.npy", "val_labels.npy"):
        np.save(other / name, np.load(data / name)[:21])
    arguments = [*common, "--data", other, "--corrupted", f"official:{official}"]
    assert "has 24 images of each kind, but" in fails(capsys, *arguments)
    # As many, but not these: of another test set, or in another order.
    shuffled = np.load(data / "val_labels.npy")
    shuffled[[4, 5]] = shuffled[[5, 4]]
    (tmp_path / "labels.npy").unlink()
    np.save(tmp_path / "labels.npy", np.tile(shuffled, 5))
    (tmp_path / "fog.npy").unlink()
    np.save(tmp_path / "fog.npy", np.load(official / "fog.npy"))
    arguments = [*common, "--data", data, "--corrupted", f"official:{tmp_path}"]
    assert "other labels than" in (message := fails(capsys, *arguments)) and "at position 4, 2 there and 1" in message
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_other_classes_or_another_order_is_refused(
    tmp_path: Path, trained: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--corrupted", "generated", "--out", tmp_path / "out", "--device", "cpu"]
    more = tmp_path / "more"
    more.mkdir()
    labels = np.arange(24) % 4
    np.save(more / "val.npy", np.load(data / "val.npy"))
    np.save(more / "val_labels.npy", labels)
    message = fails(capsys, trained / "checkpoint.pt", "--data", more, *common)
    assert re.search(r"checkpoint\.pt has 3 classes, but .*val\.npy has 4", message)
    state = torch.load(trained / "checkpoint.pt", weights_only=True)
    for classes, expected in (
        (["1", "0", "2"], r"other classes than .*, or another order: number 0 is '1' there and '0' here"),
        (["cat", "1", "2"], r"other classes than .*: cat there, 0 here"),
    ):
        torch.save({**state, "classes": classes}, tmp_path / "checkpoint.pt")
        assert re.search(expected, fails(capsys, tmp_path / "checkpoint.pt", "--data", data, *common))
    # Bare weights tell by their head alone.
    weights = build_model("shufflenet_v2_x0_5", 5, 16).state_dict()
    torch.save(weights, tmp_path / "w.pt")
    given = ["--data", data, *common, "--mean", 0.5, 0.5, 0.5, "--std", 0.2, 0.2, 0.2]
    message = fails(capsys, tmp_path / "w.pt", "--net", "shufflenet_v2_x0_5", *given)
    assert re.search(r"w\.pt gives 5 logits, but .* has 3 classes; .* --classes FILE", message)
    assert "doesn't say of which network it is" in fails(capsys, tmp_path / "w.pt", *given)
    # However many names are given, their number is compared with that of the outputs.
    for names in (["0", "1", "2", "3"], ["0", "1", "2", "3", "4", "5"]):
        (tmp_path / "n.txt").write_text("\n".join(names))
        classes = ["--classes", tmp_path / "n.txt"]
        message = fails(capsys, tmp_path / "w.pt", "--net", "shufflenet_v2_x0_5", *given, *classes)
        files = f"{re.escape(str(tmp_path))}/n.txt has {len(names)} names, but {re.escape(str(tmp_path))}/w.pt has 5"
        assert re.search(rf"^error: --classes: {files} outputs$", message)
    message = fails(capsys, tmp_path / "nowhere.pt", "--classes", "no.txt", *common)
    assert message == "error: --classes: there is no file no.txt"
    assert not (tmp_path / "out").exists()


def test_rescoring_without_pyarrow_changes_nothing(
    tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert run(mine, "--out", out, "--predictions", "--corruptions", "fog", "--severities", 1, "--device", "cpu") == 0
    capsys.readouterr()
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run("--rescore", out) == 2
    assert capsys.readouterr() == ("", "error: predictions need pyarrow: pip install 'fastmoll[report]'\n")
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_set_of_fastmoll_corrupt_is_kept_apart_from_images_made_on_the_way(
    tmp_path: Path, mine: Path, official: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Path(shutil.copytree(official, tmp_path / "set"))
    (place / "corrupted.json").write_text(json.dumps({"frost": "made"}))
    assert run(mine, "--corrupted", f"official:{place}", "--device", "cpu") == 0
    printed = capsys.readouterr().out
    assert run(mine, *SOME) == 0
    found = read_run(mine)
    assert found.path == mine / "robustness-generated-set" / "robustness.json" and str(found.path) in printed
    assert (found.source, found.frost, found.set_name) == ("generated", "made", "set")
    assert len(cells(mine / "robustness-generated")) == 5 and len(cells(found.path.parent)) == 76


def test_a_folder_in_use_or_of_another_evaluation_is_refused(
    tmp_path: Path, trained: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--data", data, "--corrupted", "generated", "--out", out, *SOME]
    with lock(out, "--out"):
        assert f"--out: {out} is in use by another run (process {os.getpid()} on" in fails(
            capsys, trained / "model.pt", *arguments
        )
    assert run(trained / "model.pt", *arguments) == 0
    capsys.readouterr()
    before = cells(out)
    assert "another corrupted set: it was generated (seed 0, frost" in fails(
        capsys, trained / "model.pt", *arguments, "--seed", "1"
    )
    state = torch.load(trained / "model.pt", weights_only=True)
    state["fc.bias"] += 1e-3
    torch.save(state, tmp_path / "w.pt")
    net = ["--net", "shufflenet_v2_x0_5", "--mean", 0, 0, 0, "--std", 1, 1, 1]
    message = fails(capsys, tmp_path / "w.pt", *arguments, *net)
    files = (re.escape(str(path)) for path in (trained / "model.pt", tmp_path / "w.pt"))
    assert re.search(
        r"another checkpoint .*: it was \w+ of {} and is now \w+ of {}; .* --out DIR, or delete this one$".format(
            *files
        ),
        message,
    )
    assert cells(out) == before


def test_an_official_set_may_move_but_its_images_may_not_change(
    tmp_path: Path, trained: Path, data: Path, official: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Path(shutil.copytree(official, tmp_path / "set"))
    arguments = [trained / "model.pt", "--data", data, "--out", tmp_path / "out", "--device", "cpu"]
    some = ["--severities", "2", "--corruptions", "frost"]
    assert run(*arguments, "--corrupted", f"official:{place}", *some) == 0
    place = place.rename(tmp_path / "moved")
    assert run(*arguments, "--corrupted", f"official:{place}", *some, "fog") == 0
    assert "2 of 3 cells are done already" in capsys.readouterr().out
    np.save(place / "frost.npy", 255 - np.load(place / "frost.npy"))
    message = fails(capsys, *arguments, "--corrupted", f"official:{place}", *some, "fog")
    assert "with another frost-2 (digest of its images)" in message
    # What has not changed can be gone on with.
    assert run(*arguments, "--corrupted", f"official:{place}", *some[:3], "snow") == 0


def test_the_trainers_result_is_left_alone_by_another_data_set_of_as_many_images(
    tmp_path: Path, mine: Path, data: Path, official: Path
) -> None:
    other = Path(shutil.copytree(data, tmp_path / "other"))
    before = (mine / "result.json").read_text()
    common = ["--corrupted", f"official:{official}", "--device", "cpu"]
    assert run(mine, "--data", other, *common) == 0
    assert (mine / "robustness-official" / "robustness.json").exists()
    assert (mine / "result.json").read_text() == before
