"""Tests of fastmoll.robustness.checkpoints."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from torchvision import models

from fastmoll.pipelines import MEAN, STD
from fastmoll.robustness.checkpoints import find_checkpoint
from fastmoll.robustness.networks import digest
from fastmoll.robustness.stored_images import StoredImages
from fastmoll.train.config import parse, parse_small, with_standardisation
from fastmoll.weights import HeadError, build_model, load_weights


def save(folder: Path, config: dict[str, Any], classes: list[str], small_stem: bool | None) -> Path:
    """What a trainer leaves; its average is what counts."""
    size = config["data"].get("size", 32)
    average = build_model(config["model"]["name"], len(classes), size, small_stem=small_stem)
    learner = {"model": {}, "ema": average.state_dict()}
    content = {"format": 1, "config": config, "classes": classes, "world_size": 1, "learner": learner, "ranks": []}
    folder.mkdir(exist_ok=True)
    torch.save(content, folder / "checkpoint.pt")
    torch.save(average.state_dict(), folder / "model.pt")
    (folder / "config.json").write_text(json.dumps({**config, "resolved": {"device": "cpu"}}))
    return folder


def small(*arguments: str) -> dict[str, Any]:
    config = parse_small(["--net", "resnet18", *arguments])
    return with_standardisation(config, [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]).plain()


@pytest.mark.parametrize("file", ["checkpoint.pt", "model.pt", ""])
def test_every_file_of_a_run_brings_its_network_classes_and_training(tmp_path: Path, file: str) -> None:
    config = small("--data", "cifar10", "--mollify", "--mollify.beta", "1", "3", "--run.seed", "5", "--optim.lr", "0.1")
    save(tmp_path / "run", config, ["a", "b", "c"], None)
    found = find_checkpoint(str(tmp_path / "run" / file))
    assert (found.net, found.num_classes, found.classes, found.size) == ("resnet18", 3, ["a", "b", "c"], None)
    assert found.standardisation == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    assert (found.folder, found.file) == (tmp_path / "run", None)
    assert found.training == {
        "augment": "fcr+trivial",
        "mollify": True,
        "seed": 5,
        "settings": {"mollify.beta": [1.0, 3.0], "optim.lr": 0.1},
    }
    model = found.build(3, 32, True)
    assert model.conv1.weight.shape[2:] == (3, 3)  # the form for small images
    state = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    assert digest(model.state_dict()) != digest(found.build(3, 32, False).state_dict())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert digest(model.state_dict()) == digest(state)  # by which a report knows them again
    # A copy may lie beside those of other runs.
    (tmp_path / "run" / "checkpoint.pt").rename(tmp_path / "a.pt")
    assert find_checkpoint(str(tmp_path / "a.pt")).file == "a.pt"


def test_a_network_of_folders_keeps_its_stem_and_size(tmp_path: Path) -> None:
    config = parse(["--recipe", "sample", "--data.size", "48", "--optim.epochs", "3", "--data.decoder", "cpu"]).plain()
    found = find_checkpoint(str(save(tmp_path, config, ["a", "b"], False)))
    assert (found.net, found.size, found.standardisation) == ("resnet18", 48, (MEAN, STD))
    assert found.training["settings"] == {"recipe": "sample", "data.size": 48, "optim.epochs": 3}
    assert found.build(2, 48, True).conv1.weight.shape[2:] == (7, 7)


def test_a_network_of_folders_brings_the_standardisation_of_its_training(tmp_path: Path) -> None:
    config = parse("--data.mean 0.5 0.5 0.5 --data.std 0.25 0.5 1".split()).plain()
    found = find_checkpoint(str(save(tmp_path / "own", config, ["a", "b"], False)))
    assert found.standardisation == ([0.5, 0.5, 0.5], [0.25, 0.5, 1.0])
    assert found.training["settings"]["data.mean"] == [0.5, 0.5, 0.5]  # another network than one with ImageNet's
    del config["data"]["mean"], config["data"]["std"]  # of an earlier version
    found = find_checkpoint(str(save(tmp_path / "earlier", config, ["a", "b"], False)))
    assert found.standardisation == (MEAN, STD)


def test_settings_that_do_nothing_are_not_told(tmp_path: Path) -> None:
    config = small("--data", "digits", "--mollify.k-blur", "2", "--run.log-every", "7", "--data.path", "/x")
    settings = find_checkpoint(str(save(tmp_path, config, ["a", "b"], None))).training["settings"]
    assert settings == {}  # resnet18 is told as the network, and nothing is mollified
    config = small("--data", "cifar10", "--optim.name", "adamw", "--optim.decay", "all")
    settings = find_checkpoint(str(save(tmp_path, config, ["a", "b"], None))).training["settings"]
    assert settings == {"optim.name": "adamw", "optim.decay": "all"}  # not what AdamW brings with it


def test_a_run_that_ended_early_is_told_from_one_that_came_to_its_end(tmp_path: Path) -> None:
    config = small("--data", "digits", "--optim.epochs", "4", "--optim.accumulate", "2")
    # 21 batches an epoch, two a step.
    loader = {"fingerprint": {"num_samples": 509, "world_size": 2, "batch_size": 12}}
    torch.save({}, tmp_path / "model.pt")

    def ended(file: str, limit: int | None, step: int) -> int | None:
        config["run"] |= {"max_steps": limit, "resident": step == 1}
        (tmp_path / "config.json").write_text(json.dumps(config | {"resolved": {"steps_per_epoch": 11}}))
        content = {"format": 1, "config": config, "classes": ["a", "b"], "learner": {"step": step}}
        torch.save(content | {"ranks": [{"loader": loader}]}, tmp_path / "checkpoint.pt")
        found = find_checkpoint(str(tmp_path / file)).config["run"]["max_steps"]
        assert found is None or isinstance(found, int)
        return found

    for limit, step, end in ((None, 44, None), (44, 44, None), (100, 44, None), (43, 43, 43)):
        assert ended("model.pt", limit, step) == ended("checkpoint.pt", limit, step) == end
    # Interrupted before its end.
    assert ended("checkpoint.pt", None, 20) == ended("checkpoint.pt", 30, 20) == 20
    assert ended("model.pt", 1, 1) == 1
    told = find_checkpoint(str(tmp_path)).training["settings"]
    assert told == {"optim.epochs": 4, "optim.accumulate": 2, "run.max_steps": 1, "run.resident": True}


def test_a_file_of_others_needs_the_name_of_its_network(tmp_path: Path) -> None:
    torch.save(build_model("resnet18", 4, 64).state_dict(), tmp_path / "w.pt")
    with pytest.raises(ValueError, match=r"^--net must be given: .*w\.pt doesn't say of .* trained on \(--data\)$"):
        find_checkpoint(str(tmp_path / "w.pt"))
    with pytest.raises(ValueError, match=r"^--net: there is no classification model 'resnet19'"):
        find_checkpoint(str(tmp_path / "w.pt"), "resnet19")
    with pytest.raises(ValueError, match=r"--net takes the bare name, resnet18, got 'torchvision:resnet18'$"):
        find_checkpoint(str(tmp_path / "w.pt"), "torchvision:resnet18")
    with pytest.raises(
        ValueError, match=r"bare name, x, got 'timm:x'; a network of timm is made by a function of yours"
    ):
        find_checkpoint(str(tmp_path / "w.pt"), "timm:x")
    found = find_checkpoint(str(tmp_path / "w.pt"), "resnet18")
    assert (found.net, found.num_classes, found.classes, found.config) == ("resnet18", None, None, {})
    assert found.identity == "resnet18"
    assert found.training == {"augment": None, "mollify": None, "seed": None, "settings": {}}
    assert found.build(4, 64, True).fc.out_features == 4
    with pytest.raises(ValueError, match=r"CHECKPOINT: .*fc\.weight is \(4, 512\) there and \(5, 512\) here"):
        found.build(5, 64, True)


def test_a_network_of_ones_own_takes_a_state_dict_or_brings_its_weights(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "import torch\n\n\ndef wide(num_classes):\n    return torch.nn.Sequential(torch.nn.Linear(3, 8),"
        " torch.nn.BatchNorm1d(8), torch.nn.Linear(8, num_classes))\n\n\ndef whole():\n"
        f"    net = wide(4)\n    net.load_state_dict(torch.load({str(tmp_path / 'w.pt')!r}))\n    return net\n"
    )
    state = find_checkpoint(f"python:{tmp_path / 'nets.py'}:wide").build(4, 32, False).state_dict()
    torch.save(state, tmp_path / "w.pt")
    whole = find_checkpoint(f"python:{tmp_path / 'nets.py'}:whole")
    assert (whole.net, whole.folder) == ("nets.py:whole", Path("runs") / "nets-whole")
    # As old scripts save it: of several GPUs, without the counts, and with their arguments and best figure.
    old = {f"module.{name}": value for name, value in state.items() if "num_batches" not in name}
    options = argparse.Namespace(lr=0.1, out=tmp_path)
    torch.save(
        {"state_dict": old, "args": options, "best": np.float64(91.7), "epoch": np.int64(3)}, tmp_path / "old.th"
    )
    own = find_checkpoint(str(tmp_path / "old.th"), f"{tmp_path / 'nets.py'}:wide")
    assert (own.net, own.folder, own.size, own.standardisation) == ("nets.py:wide", tmp_path, None, None)
    digests = [
        digest(x.state_dict()) for x in (own.build(4, 32, True), whole.build(4, 32, True), own.build(4, 32, False))
    ]
    assert digests[0] == digests[1] != digests[2]
    with pytest.raises(HeadError, match=r"old\.th does not fit nets\.py:wide: .*\(4, 8\) there and \(2, 8\)") as caught:
        own.build(2, 32, True)
    assert caught.value.outputs == 4
    (tmp_path / "lazy.py").write_text("import torch\n\n\ndef net():\n    return torch.nn.LazyLinear(4)\n")
    torch.save(torch.nn.Linear(3, 4).state_dict(), tmp_path / "lazy.pt")
    lazy = find_checkpoint(str(tmp_path / "lazy.pt"), f"{tmp_path / 'lazy.py'}:net").build(4, 32, True)
    assert torch.equal(lazy.weight, torch.load(tmp_path / "lazy.pt")["weight"])


def test_outputs_are_chosen_by_name_where_names_are_known(tmp_path: Path) -> None:
    ours = find_checkpoint(str(save(tmp_path / "a", small("--data", "cifar10"), ["cat", "dog", "ship"], None)))
    assert ours.choose_outputs(["cat", "dog", "ship"], "x") == (3, None)
    assert ours.choose_outputs(["cat", "ship"], "x") == (3, [0, 2])
    assert ours.choose_outputs(["ship", "dog", "cat"], "x") == (3, [2, 1, 0])
    with pytest.raises(ValueError, match="has other classes than x: dog, ship there, frog here"):
        ours.choose_outputs(["cat", "frog"], "x")
    assert ours.choose_outputs(["c", "a"], "x", ["a", "b", "c"], "f.txt") == (3, [2, 0])
    with pytest.raises(ValueError, match=r"--classes: f\.txt has 2 names, but .* has 3 outputs$"):
        ours.choose_outputs(["a"], "x", ["a", "b"], "f.txt")
    with pytest.raises(ValueError, match=r"f\.txt has the classes of .* order: 'ship' in place of 'dog'$"):
        ours.choose_outputs(["cat"], "x", ["cat", "ship", "dog"], "f.txt")
    # The names of arrays are numbers, of other classes in every data set.
    arrays = find_checkpoint(str(save(tmp_path / "b", small("--data", "/x"), ["0", "1", "2"], None)))
    assert arrays.choose_outputs(["0", "1", "2"], "x") == (3, None)
    with pytest.raises(ValueError, match=r"has 3 classes, but x has 2; .* --classes FILE"):
        arrays.choose_outputs(["0", "1"], "x")
    torch.save({}, tmp_path / "w.pt")
    foreign = find_checkpoint(str(tmp_path / "w.pt"), "resnet18")
    assert foreign.choose_outputs(["b", "c"], "x") == (2, None)
    foreign.check_outputs(2, 2, "x")
    with pytest.raises(ValueError, match=r"w\.pt gives 1000 logits, but x has 2 classes; .* --classes FILE"):
        foreign.check_outputs(1000, 2, "x")
    with pytest.raises(ValueError, match=r"^--classes: f\.txt has 999 names, but \S*w\.pt has 1000 outputs$"):
        foreign.check_outputs(1000, 999, "x", "f.txt")


def test_weights_of_torchvision_bring_what_they_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = models.get_model_weights("squeezenet1_1").IMAGENET1K_V1
    state = build_model("squeezenet1_1", 1000, 224, fresh=False).state_dict()
    monkeypatch.setattr(type(weights), "get_state_dict", lambda *_, **__: state)
    for name in ("torchvision:squeezenet1_1", "torchvision:squeezenet1_1:IMAGENET1K_V1"):
        found = find_checkpoint(name)
        assert (found.net, found.size, found.num_classes) == ("squeezenet1_1", 224, 1000)
        assert [list(part) for part in found.standardisation or ()] == [[*MEAN], [*STD]]
        assert found.folder == Path("runs") / "squeezenet1_1-IMAGENET1K_V1"
    model = found.build(1000, 224, True)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    with pytest.raises(ValueError, match=r"has 1000 classes, but x has 10; .* --classes FILE"):
        found.choose_outputs([str(number) for number in range(10)], "x")

    def fail(*_: object, **__: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr(type(weights), "get_state_dict", fail)
    with pytest.raises(
        ValueError, match=r"^CHECKPOINT: IMAGENET1K_V1 can't be downloaded from \S+ .*no network.*; "
    ) as error:
        found.build(1000, 224, True)
    assert str(error.value).endswith("; download it elsewhere, then FILE --net squeezenet1_1")
    with pytest.raises(ValueError, match=r"^--model\.weights: .*; give a file, or None for random weights$"):
        load_weights(model, "squeezenet1_1", "IMAGENET1K_V1")


def test_a_tag_that_timm_does_not_have_is_answered_with_those_it_has() -> None:
    pytest.importorskip("timm")
    with pytest.raises(ValueError, match=r"^CHECKPOINT: timm has no 'test_vit\.v2', only test_vit\.r160_in1k$"):
        find_checkpoint("timm:test_vit.v2")
    for name, near in (
        ("timm:resnet18x", "timm:resnet18 or "),
        ("timm:vit_smal_patch16_224.augreg_in1k", "timm:vit_small_patch16_224 or "),
        ("torchvision:vit_small_patch16_224", "timm:vit_small_patch16_224[?]$"),
    ):
        with pytest.raises(ValueError, match=rf"has no .*; did you mean {near}"):
            find_checkpoint(name)


def test_models_of_timm_bring_what_they_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("timm")
    found = find_checkpoint("timm:vit_tiny_patch16_384.augreg_in21k_ft_in1k")
    assert (found.size, found.num_classes) == (384, 1000)
    assert [list(part) for part in found.standardisation or ()] == [[0.5] * 3] * 2
    asked: list[Any] = []

    def create(name: str, **options: Any) -> torch.nn.Module:
        asked.append((name, options))
        return torch.nn.Identity()

    monkeypatch.setattr(timm, "create_model", create)
    found.build(1000, 384, True)
    options = {"pretrained": True, "num_classes": 1000, "img_size": 384}
    assert asked == [("vit_tiny_patch16_384.augreg_in21k_ft_in1k", options)]

    def refuse(name: str, **options: Any) -> torch.nn.Module:
        raise RuntimeError("no network\nand advice")

    monkeypatch.setattr(timm, "create_model", refuse)
    with pytest.raises(ValueError, match=r"^CHECKPOINT: timm:vit_tiny\S+ can't be loaded: RuntimeError: no network$"):
        found.build(1000, 384, True)


@pytest.mark.parametrize(
    ("name", "net", "message"),
    [
        ("nowhere.pt", None, r"CHECKPOINT: nowhere\.pt is no file .*a run or of a sweep, torchvision:NAME"),
        (
            "torchvision:resnet51",
            None,
            r"^CHECKPOINT: torchvision has no 'resnet51'; did you mean torchvision:resnet50 or ",
        ),
        ("torchvision:presnet50", None, r"torchvision has no 'presnet50'; did you mean torchvision:resnet50 "),
        ("torchvision:zzz", None, "torchvision has no 'zzz'$"),
        ("resnet50", None, r"resnet50 is no file; did you mean torchvision:resnet50.*\? \(others are"),
        ("torchvison:resnet18:V1", None, r"resnet18:V1 is no file; did you mean torchvision:resnet18"),
        ("torchvision:resnet18:V9", None, "torchvision has no weights 'V9' of resnet18, only IMAGENET1K_V1"),
        ("torchvision:resnet18", "resnet18", "--net: torchvision:resnet18 says its network itself, got 'resnet18'"),
    ],
)
def test_names_that_mean_nothing_are_refused(name: str, net: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_checkpoint(name, net)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"half a file")
    with pytest.raises(ValueError, match=r"^CHECKPOINT: .*checkpoint\.pt is damaged"):
        find_checkpoint(str(path))
    for content in ({"format": 1}, {"format": 1, "classes": ["a"], "config": {"model": {"name": "resnet18"}}}):
        torch.save(content, path)
        with pytest.raises(ValueError, match=r"^CHECKPOINT: .*is a damaged checkpoint"):
            find_checkpoint(str(path))
    torch.save({"a": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes().replace(bytes(2000), b"\1" * 2000))
    with pytest.raises(ValueError, match=r"^CHECKPOINT: \S*checkpoint\.pt is damaged: Bad CRC-32 for file '\S*'$"):
        find_checkpoint(str(path))
    path.unlink()
    save(tmp_path / "run", small("--data", "cifar10"), ["a", "b"], None)
    (tmp_path / "run" / "checkpoint.pt").write_bytes(b"half a file")
    with pytest.raises(ValueError, match=r"^CHECKPOINT: \S*run/checkpoint\.pt is damaged.* python:FILE\.py:FUNCTION$"):
        find_checkpoint(str(tmp_path / "run"))
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(
        ValueError, match=r"^CHECKPOINT: \S*config\.json, the settings of \S*model\.pt, is damaged: Expec"
    ):
        find_checkpoint(str(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"is a folder without model\.pt"):
        find_checkpoint(str(tmp_path))


def test_the_digest_is_that_of_names_and_values() -> None:
    model = build_model("squeezenet1_1", 3, 64)
    first = digest(model.state_dict())
    assert digest(model.to(memory_format=torch.channels_last).state_dict()) == first
    with torch.no_grad():
        model.get_parameter("classifier.1.bias")[0] += 1e-6
    assert digest(model.state_dict()) != first
    assert digest(torch.nn.BatchNorm2d(2).state_dict()) != digest(
        torch.nn.InstanceNorm2d(2, affine=True, track_running_stats=True).half().state_dict()
    )


def test_a_run_was_validated_on_data_of_its_name_split_and_size(tmp_path: Path) -> None:
    pixels = np.zeros((4, 32, 32, 3), np.uint8)
    images = StoredImages("cifar10", tmp_path, ["a", "b"], np.arange(4) % 2, 32, pixels)
    found = find_checkpoint(str(save(tmp_path / "named", small("--data", "cifar10"), ["a", "b"], None)))
    assert found.validated_on("cifar10", "val", images)
    assert found.validated_on("/some/cifar-10-python.tar.gz", "val", images)  # of which the name was found
    assert not found.validated_on("cifar10", "train", images)
    assert not found.validated_on("mine", "val", replace(images, name="mine"))
    trained = parse([str(tmp_path / "photographs"), "--recipe", "sample", "--data.size", "48"]).plain()
    found = find_checkpoint(str(save(tmp_path / "folders", trained, ["a", "b"], False)))
    images = replace(images, name="photographs", size=48)
    assert found.validated_on("elsewhere/photographs", "val", images)
    assert not found.validated_on("elsewhere/photographs", "val", replace(images, size=64))
    torch.save(build_model("resnet18", 2, 64).state_dict(), tmp_path / "w.pt")
    assert not find_checkpoint(str(tmp_path / "w.pt"), "resnet18").validated_on("photographs", "val", images)
