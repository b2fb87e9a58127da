"""Tests of networks by name, and of weights from files of ours and of others."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from learners import CPU, TIMM, publish, saved_run, settings
from torch import nn

from fastmoll.train.engine import Learner
from fastmoll.weights import HeadError, build_model, head_name, load_weights, read_file, timm_offers


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("resnet18", "fc"),
        ("squeezenet1_1", "classifier.1"),
        ("mobilenet_v3_small", "classifier.3"),
        ("googlenet", "fc"),
        ("vit_b_16", "heads.head"),
        ("swin_t", "head"),
        ("maxvit_t", "classifier.5"),
    ],
)
def test_networks_take_the_images_and_have_a_head_of_the_classes(name: str, head: str) -> None:
    size = 224 if name in ("swin_t", "maxvit_t") else 64
    with torch.device("meta"):
        model = build_model(name, 7, size, fresh=False)
    assert head_name(model) == head
    assert model.state_dict()[f"{head}.weight"].shape[0] == 7
    out = model.train()(torch.empty(2, 3, size, size, device="meta"))
    assert isinstance(out, torch.Tensor) and out.shape == (2, 7)


def test_an_unknown_network_names_close_ones() -> None:
    with pytest.raises(ValueError, match=r"'ResNet-51'; did you mean .*resnet50"):
        build_model("ResNet-51", 3, 64)


def test_a_network_for_larger_images_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="alexnet can't take images of 16×16 pixels"):
        build_model("alexnet", 3, 16)


def test_a_file_of_weights_is_loaded_as_it_is(tmp_path: Path) -> None:
    theirs, ours = build_model("squeezenet1_1", 3, 64), build_model("squeezenet1_1", 3, 64)
    torch.save(theirs.state_dict(), tmp_path / "w.pt")
    load_weights(ours, "squeezenet1_1", str(tmp_path / "w.pt"), exact=True)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


TRUNCATED, FLIPPED = object(), object()


@pytest.mark.parametrize(
    "prefix",
    ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "model.", "net.", "model._orig_mod."],
)
@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict"])
def test_weights_are_found_where_other_scripts_put_them(tmp_path: Path, key: str, prefix: str) -> None:
    theirs, ours = build_model("squeezenet1_1", 3, 64), build_model("squeezenet1_1", 3, 64)
    state = {prefix + name: value for name, value in theirs.state_dict().items()}
    torch.save({"epoch": 3, key: state}, tmp_path / "w.pt")
    load_weights(ours, "squeezenet1_1", str(tmp_path / "w.pt"), exact=True)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_network_with_the_names_of_a_wrapper_keeps_them(tmp_path: Path) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(2, 3)

    theirs, ours = Whole(), Whole()
    torch.save(theirs.state_dict(), tmp_path / "w.pt")
    load_weights(ours, "mine", str(tmp_path / "w.pt"), exact=True)
    assert torch.equal(ours.model.weight, theirs.model.weight)


def test_a_head_for_other_classes_is_left_fresh_and_said_so(tmp_path: Path) -> None:
    theirs, ours = build_model("squeezenet1_1", 5, 64), build_model("squeezenet1_1", 3, 64)
    fresh = ours.state_dict()["classifier.1.weight"].clone()
    torch.save({"model": theirs.state_dict()}, tmp_path / "w.pt")
    note = load_weights(ours, "squeezenet1_1", str(tmp_path / "w.pt"))
    assert note.endswith("a fresh head classifier.1: that one is for 5 classes")
    assert torch.equal(ours.state_dict()["classifier.1.weight"], fresh)
    assert torch.equal(ours.state_dict()["features.0.weight"], theirs.state_dict()["features.0.weight"])
    with pytest.raises(ValueError, match=r"classifier.1.weight is \(5, 512, 1, 1\) there and \(3, 512, 1, 1\) here"):
        load_weights(ours, "squeezenet1_1", str(tmp_path / "w.pt"), exact=True)


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    model = build_model("squeezenet1_1", 3, 64)
    path = tmp_path / "w.pt"
    state = model.state_dict()
    state["stray"] = state.pop("features.0.bias")
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"w\.pt does not fit .*without features\.0\.bias; with unknown stray"):
        load_weights(model, "squeezenet1_1", str(path))
    state["features.0.bias"] = state.pop("stray")
    state["classifier.1.bias"] = torch.tensor(0.0)
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"classifier\.1\.bias is \(\) there and \(3,\) here"):
        load_weights(model, "squeezenet1_1", str(path))
    with pytest.raises(ValueError, match=r"'IMAGENET9K' is no file; weights .* for squeezenet1_1: IMAGENET1K_V1"):
        load_weights(model, "squeezenet1_1", "IMAGENET9K")


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    return publish(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("name", "weights"), [(TIMM, "timm"), (TIMM, "r160_in1k"), (f"{TIMM}.r160_in1k", "timm")], ids=str
)
def test_weights_of_timm_are_loaded_as_they_are(published: nn.Module, name: str, weights: str) -> None:
    ours = build_model(name, 1000, 160).eval()
    assert load_weights(ours, name, weights, size=160, exact=True) == f"weights from timm's {TIMM}.r160_in1k"
    assert {*ours.state_dict()} == {*published.state_dict()}
    assert all(torch.equal(value, published.state_dict()[key]) for key, value in ours.state_dict().items())
    images = torch.randn(2, 3, 160, 160)
    assert torch.equal(ours(images), published.eval()(images))


def test_weights_of_timm_get_a_fresh_head_and_positions_of_the_images(published: nn.Module) -> None:
    layers = importlib.import_module("timm.layers")
    torch.manual_seed(0)
    ours = build_model(TIMM, 7, 96)
    note = load_weights(ours, TIMM, "timm", size=96)
    assert note == f"weights from timm's {TIMM}.r160_in1k, but a fresh head: that one is for 1000 classes"
    theirs = published.state_dict()
    positions = layers.resample_abs_pos_embed(theirs["pos_embed"], (6, 6), num_prefix_tokens=1)
    for key, value in ours.state_dict().items():
        if not key.startswith("head."):
            torch.testing.assert_close(value, positions if key == "pos_embed" else theirs[key], rtol=0, atol=0)
    head = ours.state_dict()["head.weight"]
    assert head.shape == (7, 64) and head.std() > 0
    with pytest.raises(HeadError, match=r"does not fit: it has 1000 outputs there and 7 here$") as caught:
        load_weights(ours, TIMM, "timm", size=96, exact=True)
    assert caught.value.outputs == 1000


def test_weights_that_timm_does_not_have_or_can_not_get_are_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("timm")
    model = build_model(TIMM, 7, 160)
    with pytest.raises(
        ValueError, match=r"^--model.weights: 'v2' is no file; weights that timm has for test_vit: timm, r160_in1k$"
    ):
        load_weights(model, TIMM, "v2", size=160)
    with pytest.raises(ValueError, match=r"^--model.name: timm has no 'test_vit.v2', only test_vit.r160_in1k$"):
        build_model(f"{TIMM}.v2", 7, 160)
    with pytest.raises(ValueError, match=r"'timm' is no file; .* IMAGENET1K_V1, IMAGENET1K_V2; .* resnet50\.TAG$"):
        load_weights(build_model("resnet50", 7, 64, fresh=False), "resnet50", "timm", size=64)
    with pytest.raises(ValueError, match=r"has for allconv10: none; timm's own are those of networks of timm$"):
        load_weights(build_model("allconv10", 7, 32), "allconv10", "timm", size=32)

    def create(name: str, **options: Any) -> nn.Module:
        raise RuntimeError("no network\nand advice")

    monkeypatch.setattr(timm, "create_model", create)
    message = "timm's test_vit.r160_in1k can't be loaded (RuntimeError: no network); give a file, or None for random"
    with pytest.raises(ValueError, match=re.escape(message)):
        load_weights(model, TIMM, "timm", size=160)


def test_without_timm_there_are_no_weights_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastmoll.models.installed", lambda name: False)
    assert timm_offers(TIMM) == {}
    with pytest.raises(ValueError, match=r"model 'test_vit'; .* timm, which has more, is not installed \("):
        build_model(TIMM, 7, 160)


@pytest.mark.parametrize("average", [False, True])
def test_the_weights_in_a_checkpoint_are_those_that_were_evaluated(tmp_path: Path, average: bool) -> None:
    network = build_model("squeezenet1_1", 3, 64)
    learner = Learner(network, settings(model__ema=0.9 if average else None), CPU, 5)
    with torch.no_grad():
        learner.evaluated.get_parameter("classifier.1.bias").fill_(7)
    saved_run(tmp_path / "c.pt", config={"model": {"name": "squeezenet1_1"}}, learner=learner.state_dict())
    ours = build_model("squeezenet1_1", 3, 64)
    load_weights(ours, "squeezenet1_1", str(tmp_path / "c.pt"), exact=True)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), learner.evaluated.parameters(), strict=True))
    with pytest.raises(ValueError, match="is a checkpoint of squeezenet1_1, not of resnet18"):
        load_weights(ours, "resnet18", str(tmp_path / "c.pt"))


@pytest.mark.filterwarnings("ignore:.*[Ss]parse")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"not weights", "is damaged, or no PyTorch file"),
        (TRUNCATED, "is damaged, or no PyTorch file"),
        (FLIPPED, "is damaged: Bad CRC-32 for file 'w/data/0'$"),
        ([1, 2], "holds no state dict"),
        ({1: torch.zeros(1)}, "holds no state dict"),
        ({"a": torch.eye(2).to_sparse()}, "holds no state dict"),
        ({"config": {}}, "holds no state dict"),
        ({"format": 1, "config": {"model": 5}}, "is a damaged checkpoint"),
        ({"format": 1, "config": {"model": {"name": "squeezenet1_1"}}, "learner": []}, "is a damaged checkpoint"),
    ],
)
def test_a_file_without_weights_is_named_with_the_reason(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "w.pt"
    if content in (TRUNCATED, FLIPPED):
        torch.save({"a": torch.zeros(10_000)}, path)
        half = path.read_bytes()[:20_000]
        content = half if content is TRUNCATED else half[:-1] + b"\1" + path.read_bytes()[20_000:]
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(ValueError, match=rf"^--model\.weights: .*w\.pt {message}"):
        load_weights(build_model("squeezenet1_1", 3, 64), "squeezenet1_1", str(path))


@pytest.mark.parametrize("legacy", [False, True])
def test_files_without_checksums_are_read_as_they_are(tmp_path: Path, legacy: bool) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(3)}, tmp_path / "w.pt", _use_new_zipfile_serialization=not legacy)
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(read_file(tmp_path / "w.pt")["a"], torch.ones(3))
