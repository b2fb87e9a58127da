"""Tests of ``fastmoll evaluate`` as it is run: resumed, on several processes, with bad input."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from processes import CONTEXT

from fastmoll.cli.main import main
from fastmoll.corruptions import CORRUPTIONS, corrupt
from fastmoll.output import lock
from fastmoll.pipelines.small import read_small
from fastmoll.report.read import read_run
from fastmoll.robustness.loader import CorruptedLoader
from fastmoll.robustness.stored_images import StoredImages
from fastmoll.scoring import evaluate
from fastmoll.train.small_images import main as train
from fastmoll.weights import build_model, load_weights

pytestmark = pytest.mark.usefixtures("one_thread")


def run(*arguments: object) -> int:
    """The command in this process; its exit status."""
    return main(["evaluate", *map(str, arguments)])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of noise around a colour, 16 pixels: 30 training images, 24 for validation."""
    root = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    for split, count in {"train": 30, "val": 24}.items():
        labels = np.arange(count) % 3
        images = generator.integers(0, 120, (count, 16, 16, 3), dtype=np.uint8)
        images[np.arange(count), :, :, labels] += 100
        np.save(root / f"{split}.npy", images)
        np.save(root / f"{split}_labels.npy", labels)
    return root


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A set in the layout of CIFAR-C: brighter with the severity, by another amount for each corruption."""
    root = tmp_path_factory.mktemp("official")
    images = np.load(data / "val.npy").astype(np.int64)
    for number, name in enumerate(CORRUPTIONS):
        levels = [np.clip(images + (5 + number) * severity, 0, 255).astype(np.uint8) for severity in range(1, 6)]
        np.save(root / f"{name}.npy", np.concatenate(levels))
    np.save(root / "labels.npy", np.tile(np.load(data / "val_labels.npy"), 5))
    return root


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


def cells(out: Path) -> dict[str, dict[str, Any]]:
    """The figures of each cell that is done."""
    found = {path.stem: json.loads(path.read_text()) for path in (out / "cells").iterdir()}
    for name, content in found.items():
        corruption, severity = content.pop("corruption"), content.pop("severity")
        assert name == ("clean" if corruption is None else f"{corruption}-{severity}") and content.pop("images")
    return found


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
    added = {"error": found.corrupted["error"] / 100, "source": "official"}
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


DALI = "error: decoding needs NVIDIA DALI: pip install 'fastmoll[cu12]', or fastmoll[cu13] for CUDA 13\n"
SOME = ["--corruptions", "fog", "gaussian_noise", "--severities", "2", "5", "--device", "cpu"]


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


OWN = """
import torch


def tiny(num_classes=5):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, num_classes))


def other(num_classes=5):
    return torch.nn.Sequential(*tiny(num_classes), torch.nn.Softplus())


def two():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 2))
"""


def test_some_outputs_of_a_network_of_ones_own_are_compared(
    tmp_path: Path, data: Path, official: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nets.py").write_text(OWN)
    (tmp_path / "names.txt").write_text("9\n2\n0\n7\n1\n")
    net = f"{tmp_path / 'nets.py'}:tiny"
    scale = ["--mean", 0.5, 0.4, 0.3, "--std", 0.2, 0.2, 0.2]
    some = ["--corruptions", "fog", "--severities", 2]
    out = ["--data", data, *scale, *some, "--device", "cpu", "--out", tmp_path / "out"]
    listed = [f"python:{net}", "--classes", tmp_path / "names.txt", *out]
    assert run(*listed, "--corrupted", f"official:{official}") == 0
    assert "3 classes of 5, 2 cells; standardised by (0.5, 0.4, 0.3) and (0.2, 0.2, 0.2)" in capsys.readouterr().out
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert (settings["header"]["outputs"], settings["header"]["num_classes"]) == (5, 3)
    assert settings["header"]["net"] == "nets.py:tiny"

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 5))
    images = torch.from_numpy(np.load(official / "fog.npy")[24:48]).permute(0, 3, 1, 2) / 255
    images = (images - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)) / 0.2
    logits = model(images)[:, [2, 4, 1]].detach()
    theirs = evaluate(torch.nn.Identity(), [(logits, torch.from_numpy(np.load(data / "val_labels.npy")))])
    ours = cells(tmp_path / "out")["fog-2"]
    assert ours["error"] == theirs["error"] and ours["nll"] == pytest.approx(theirs["nll"], rel=1e-5)

    # Its weights in a file, and the same function, are the same evaluation; others are not.
    torch.save(model.state_dict(), tmp_path / "w.pt")
    again = ["--corrupted", f"official:{official}", *out]
    message = fails(capsys, tmp_path / "w.pt", "--net", net, *again)
    assert "w.pt gives 5 logits" in message and "has 3 classes" in message and "evaluate --classes FILE" in message
    assert run(tmp_path / "w.pt", "--net", net, "--classes", tmp_path / "names.txt", *again) == 0
    assert "2 of 2 cells are done already" in capsys.readouterr().out
    message = fails(capsys, f"python:{tmp_path / 'nets.py'}:other", *listed[1:], "--corrupted", f"official:{official}")
    assert re.search(r"with another network: it was nets\.py:tiny \(.*\) and is now nets\.py:other \(", message)
    (tmp_path / "nets.py").write_text(OWN + "# Another file.\n")
    message = fails(capsys, *listed, "--corrupted", f"official:{official}")
    assert re.search(r"another network: it was nets\.py:tiny \(digest of its file \w+\) and is now nets\.py:t", message)
    (tmp_path / "nets.py").write_text(OWN)
    (tmp_path / "names.txt").write_text("9\n0\n2\n7\n1\n")
    message = fails(capsys, *listed, "--corrupted", f"official:{official}")
    assert re.search(r"with another choice of outputs: it was 3 of 5 \(digest \w+\) and is now 3 of 5", message)
    (tmp_path / "names.txt").write_text("9\n2\n7\n1\n")
    assert "names.txt has no '0', a class of the data; its first is '9'" in fails(capsys, *listed)
    two = f"{tmp_path / 'nets.py'}:two"
    (tmp_path / "names.txt").write_text("9\n2\n0\n7\n1\n")
    message = fails(capsys, tmp_path / "w.pt", "--net", two, "--classes", tmp_path / "names.txt", *again)
    assert "does not fit nets.py:two" in message and "--classes" not in message  # which is given
    message = fails(capsys, f"python:{tmp_path / 'nets.py'}:two", *out)
    assert re.search(r"two gives 2 logits, but .*val\.npy has 3 classes$", message)


def test_what_a_folder_of_photographs_leaves_open_must_be_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (120, 110), (len(name), 90, 200)).save(tmp_path / "photos" / name / "1.png")
    (tmp_path / "nets.py").write_text(OWN)
    arguments = [f"python:{tmp_path / 'nets.py'}:tiny", "--data", tmp_path / "photos", "--device", "cpu"]
    message = fails(capsys, *arguments)
    assert re.search(r"--size must be given: neither python:\S+:tiny nor \S+photos says how many pixels", message)
    assert "tiny can't take images of 32 x 32 pixels: RuntimeError" in fails(capsys, *arguments, "--size", "32")
    message = fails(capsys, *arguments, "--split", "test")
    assert re.search(r"split: \S+photos has no folder 'test', only cat, dog$", message)


@pytest.mark.parametrize("limit", [7, 8])
def test_that_many_files_are_looked_at_is_said_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    def stop(images: object) -> str:
        raise ValueError("stopped")

    monkeypatch.setattr("fastmoll.cli.evaluation._MANY_FILES", limit)
    monkeypatch.setattr(StoredImages, "fingerprint", property(stop))
    for number in range(8):
        picture = Image.new("RGB", (120, 120), (10 * number, 90, 200))
        for place in ("photos", "set/fog/1", "set/fog/2"):
            path = tmp_path / place / f"class{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.resize((120 if place == "photos" else 16,) * 2).save(path)
    (tmp_path / "nets.py").write_text(OWN)
    net = [f"python:{tmp_path / 'nets.py'}:two", "--out", tmp_path / "out", "--device", "cpu"]
    for data, images, count in (
        ("photos", ["--size", 16, "--corrupted", "generated"], 8),
        ("photos", ["--corrupted", f"official:{tmp_path / 'set'}", "--severities", 1, 2, "--corruptions", "fog"], 24),
        ("set/fog/1", ["--corrupted", f"official:{tmp_path / 'set'}", "--severities", 1, "--corruptions", "fog"], 8),
    ):
        assert run(*net, "--data", tmp_path / data, *images, "--mean", 0, 0, 0, "--std", 1, 1, 1) == 2
        captured = capsys.readouterr()
        assert captured.err == "error: stopped\n"
        assert (f"looking at {count} files" in captured.out) == (count > limit)


def rank_main(rank: int, world_size: int, port: int, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    if world_size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with open(os.devnull, "w") as sink, redirect_stdout(sink), redirect_stderr(sink):
        code = run(*arguments)
    sys.exit(code)


def start(world_size: int, *arguments: object) -> list[Any]:
    """The processes of an evaluation, as torchrun would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    texts = [str(argument) for argument in arguments]
    ranks: list[Any] = [
        CONTEXT.Process(target=rank_main, args=(rank, world_size, port, texts)) for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    return ranks


def finish(ranks: list[Any], timeout: float = 200) -> list[int]:
    for process in ranks:
        process.join(timeout=timeout)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    return codes


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


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of an error of input."""
    assert run(*arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


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
        ({"--size": "32"}, "has images of 16 x 16 pixels, not 32 x 32"),
        ({"--out": "/proc/nowhere"}, "--out: /proc/nowhere can't be made"),
        ({"--mean": ("0", "0", "0")}, "--mean and --std belong together"),
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
    message = fails(capsys, tmp_path / "foreign.pt", "--net", "shufflenet_v2_x0_5", "--device", "cpu")
    assert re.search(r"--data must be given: .*foreign.pt does not say what it was trained on", message)
    assert "CHECKPOINT must be given" in fails(capsys, "--data", "digits", "--corrupted", "generated")
    assert "--rescore needs nothing but its folder, got CHECKPOINT" in fails(capsys, "x.pt", "--rescore", tmp_path)
    assert "holds no evaluation" in fails(capsys, "--rescore", tmp_path)
    message = fails(capsys, "--rescore", tmp_path, "--out", tmp_path, "--corrupted", "generated")
    assert "--rescore needs nothing but its folder, got --corrupted, --out" in message


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


def test_files_without_dali_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    for name in ("photos/cat", "photos/dog", "set/fog/1/cat", "set/fog/1/dog"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (32, 32) if name.startswith("set") else (120, 110)).save(tmp_path / name / "1.png")
    (tmp_path / "nets.py").write_text(OWN)
    network = [f"python:{tmp_path / 'nets.py'}:two", "--mean", 0, 0, 0, "--std", 1, 1, 1, "--device", "cpu"]
    for data in (
        ["--data", tmp_path / "photos", "--size", 16],
        ["--data", tmp_path / "set/fog/1", "--corrupted", f"official:{tmp_path / 'set'}", "--corruptions", "fog"],
    ):
        assert run(*network, *data, "--out", tmp_path / "new", "--severities", 1) == 2
        assert capsys.readouterr() == ("", DALI)
        assert not (tmp_path / "new").exists()


def test_a_set_of_fastmoll_corrupt_is_kept_apart_from_images_made_on_the_way(
    tmp_path: Path, mine: Path, official: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(mine, *SOME) == 0
    place = Path(shutil.copytree(official, tmp_path / "set"))
    (place / "corrupted.json").write_text(json.dumps({"frost": "made"}))
    assert run(mine, "--corrupted", f"official:{place}", "--device", "cpu") == 0
    printed = capsys.readouterr().out
    found = read_run(mine)
    assert found.path == mine / "robustness-official" / "robustness.json" and str(found.path) in printed
    assert (found.source, found.frost) == ("generated", "made")
    assert len(cells(mine / "robustness-generated")) == 5 and len(cells(mine / "robustness-official")) == 76


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
        r"another checkpoint .*: it was \w+ of {} and is now \w+ of {}; .* --out DIR$".format(*files), message
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
