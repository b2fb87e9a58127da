"""``fastmoll evaluate`` on networks of one's own, and on images that say little about themselves."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluations import OWN, cells, fails, run, write_data, write_official
from PIL import Image

from fastmoll.robustness.stored_images import StoredImages
from fastmoll.scoring import evaluate

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    return write_official(tmp_path_factory.mktemp("official"), data)


DALI = "error: decoding needs NVIDIA DALI: pip install 'fastmoll[cu12]', or fastmoll[cu13] for CUDA 13\n"


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


@pytest.fixture
def sets(tmp_path: Path, data: Path, official: Path) -> tuple[list[object], Path]:
    """Arguments for a network of one's own and one cell, and its folder; beside it sets ``a`` and ``b`` of two."""
    (tmp_path / "nets.py").write_text(OWN)
    folder = tmp_path / "run"
    folder.mkdir()
    torch.save(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 3)).state_dict(), folder / "w.pt")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shutil.copy(official / "labels.npy", tmp_path / name)
        for corruption in ("fog", "snow"):
            images = np.load(official / f"{corruption}.npy")
            np.save(tmp_path / name / f"{corruption}.npy", images if name == "a" else 255 - images)
    net = [folder / "w.pt", "--net", f"{tmp_path / 'nets.py'}:tiny", "--data", data, "--mean", 0, 0, 0]
    return [*net, "--std", 1, 1, 1, "--severities", "1", "--device", "cpu"], folder


def test_a_set_that_has_a_folder_goes_on_there_whatever_became_of_the_other_or_of_its_name(
    tmp_path: Path, sets: tuple[list[object], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    net, folder = sets

    def evaluate_set(name: str, corruption: str) -> list[str]:
        assert run(*net, "--corruptions", corruption, "--corrupted", f"official:{tmp_path / name}") == 0
        return sorted(path.name for path in folder.glob("robustness-*"))

    evaluate_set("a", "fog")
    both = ["robustness-official-w.pt", "robustness-official-w.pt-b"]
    assert evaluate_set("b", "fog") == both
    # Both renamed, with no cell in common.
    (tmp_path / "a").rename(tmp_path / "c")
    (tmp_path / "b").rename(tmp_path / "d")
    for name, place in (("c", both[0]), ("d", both[1])):
        assert evaluate_set(name, "snow") == both
        assert sorted(cells(folder / place)) == ["clean", "fog-1", "snow-1"]
    shutil.rmtree(folder / both[0])
    (tmp_path / "d").rename(tmp_path / "b")
    capsys.readouterr()
    assert evaluate_set("b", "fog") == both[1:]
    assert "2 of 2 cells are done already" in capsys.readouterr().out
    assert evaluate_set("c", "snow") == both


def test_a_set_of_a_long_name_has_a_folder_of_a_shorter_one(
    tmp_path: Path, sets: tuple[list[object], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    net, folder = sets
    place = (tmp_path / "a").rename(tmp_path / ("x" * 248 + "-a"))
    (place / "corrupted.json").write_text(json.dumps({"frost": "made"}))
    arguments = [*net, "--corruptions", "fog", "--corrupted", f"official:{place}"]
    assert run(*arguments) == 0
    assert [*folder.glob("robustness-*")] == [folder / f"robustness-generated-w.pt-{'x' * 48}-a"]
    # What it says of its frost is a part of what was evaluated.
    (place / "corrupted.json").write_text(json.dumps({"frost": "published"}))
    capsys.readouterr()
    message = fails(capsys, *arguments)
    assert "it was cifar-c (generated, frost made) and is now cifar-c (generated, frost published)" in message


def test_each_official_set_of_a_run_has_a_folder_of_its_own_and_a_moved_one_keeps_it(
    tmp_path: Path, official: Path, sets: tuple[list[object], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    net, folder = [*sets[0], "--corruptions", "fog"], sets[1]
    for name in ("a", "b"):
        assert run(*net, "--corrupted", f"official:{tmp_path / name}/") == 0
    folders = [folder / name for name in ("robustness-official-w.pt", "robustness-official-w.pt-b")]
    assert sorted(folder.glob("robustness-*")) == folders
    capsys.readouterr()
    # Again, with a set where it was, and with one that was moved.
    (tmp_path / "a").rename(tmp_path / "c")
    for name in ("b", "c"):
        assert run(*net, "--corrupted", f"official:{tmp_path / name}") == 0
        assert "2 of 2 cells are done already" in capsys.readouterr().out
    assert sorted(folder.glob("robustness-*")) == folders
    # The set of that name has other images now: nobody is told that these are the same.
    np.save(tmp_path / "b" / "fog.npy", np.load(official / "snow.npy"))
    message = fails(capsys, *net, "--corrupted", f"official:{tmp_path / 'b'}")
    assert "robustness-official-w.pt-b holds" in message and "choose another folder with --out DIR" in message


def test_several_files_of_a_network_have_a_folder_each_and_go_on_in_that_of_earlier_versions(
    tmp_path: Path,
    sets: tuple[list[object], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # no name is shortened
    (first, *net), folder = [*sets[0], "--corruptions", "fog"], sets[1]
    second = folder / "w_b.pt"
    torch.save({name: -x for name, x in torch.load(folder / "w.pt").items()}, second)
    (tmp_path / "names.txt").write_text("0\n1\n2\n")
    with (tmp_path / "names.txt").open() as names:  # as of a shell's <(...), which can be read once
        assert run(first, second, *net, "--classes", f"/dev/fd/{names.fileno()}") == 0
    table = capsys.readouterr().out.rpartition("\nrun ")[2].splitlines()
    assert [line.split()[0] for line in table if line.startswith("/")] == [str(first), str(second)]
    own = [folder / f"robustness-generated-{name}" for name in ("w.pt", "w_b.pt")]
    assert sorted(folder.glob("robustness-*")) == own
    # One that an earlier version began for one of them.
    own[1].rename(folder / "robustness-generated")
    for file in (first, second):
        assert run(file, *net) == 0 and "2 of 2 cells are done already" in capsys.readouterr().out
    assert sorted(folder.glob("robustness-*")) == [folder / "robustness-generated", own[0]]
    message = fails(capsys, first, second, *net, "--out", tmp_path)
    assert message == "error: --out is for one network, but 2 are given"
    for other, what in (("torchvision:resnet18", "says its network itself"), (tmp_path / "none.pt", "is no file")):
        assert what in fails(capsys, first, other, *net)
