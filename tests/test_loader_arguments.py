"""`ImageNetLoader`: bad arguments and missing parts are named before work starts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from imagenet_loaders import Make, loader

import fastmoll


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be .* got 0"),
        ({"batch_size": 2.5}, "batch_size must be an integer .* got 2.5"),
        ({"batch_size": 18}, "batch_size=18 is more than the 17 samples"),
        ({"size": 0}, "size must be .* got 0"),
        ({"resize": 8}, "resize must be .* got 8"),
        ({"seed": -1}, "seed must be .* got -1"),
        ({"num_threads": 0}, "num_threads must be .* got 0"),
        ({"prefetch": 0}, "prefetch must be .* got 0"),
        ({"decoder": "gpu"}, "decoder must be one of 'mixed', 'cpu', got 'gpu'"),
        ({"hw_decoder_load": 1.5}, r"hw_decoder_load must be in \[0, 1\], got 1.5"),
        ({"augment": "fcr+augmx"}, r"augment must be none, fc, fcr, .* got 'fcr\+augmx'; did you mean fcr\+augmix"),
        ({"augment": fastmoll.Augment("fc", 28)}, r"augment must be for images of \d+ x \d+ pixels, got Augment\('fc'"),
        ({"augment": "fc+augmix", "fused": False}, r"fused must not be False for augment='fc\+augmix'"),
        (
            {"augment": "fc+mixup", "mollify": fastmoll.Mollify(3, mix="cutmix")},
            "augment says mixup, but mollify has mix='cutmix'",
        ),
        ({"dali_augment": "blur"}, r"dali_augment must be callable, got 'blur'"),
        ({"device": "tpu"}, "device must be .* got 'tpu'"),
        ({"device": "mps"}, "device must be .* got 'mps'"),
        ({"rank": 2, "world_size": 2}, r"rank must be an integer in \[0, 2\), got 2"),
        ({"split": 3}, "split must be the name of a folder, got 3"),
        ({"rank": 1}, "rank and world_size belong together"),
        ({"rank": 0, "world_size": 18}, "17 samples for 18 ranks"),
        ({"split": "val", "rank": 0, "world_size": 18}, "17 samples for 18 ranks"),
        ({"mean": (1, 2)}, r"mean must be three numbers, got \(1, 2\)"),
        ({"mean": 0.5}, "mean must be three numbers, got 0.5"),
        ({"std": np.array(0.5)}, r"std must be three numbers, got array\(0.5\)"),
        ({"std": (1, 0, 1)}, r"std\[1\] must be a finite number above 0.0, got 0"),
        ({"dtype": torch.bfloat16}, "dtype must be torch.float32, .* got torch.bfloat16"),
        ({"mollify": 5}, "mollify must be callable, got 5"),
        ({"mollify": fastmoll.Mollify(4)}, "num_classes=4, but .* has 3 classes"),
    ],
)
def test_bad_arguments_are_named_before_work_starts(make_tree: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader(make_tree(17), **options)


@pytest.mark.parametrize("as_root", [False, True])
def test_a_label_that_is_another_class_in_training_is_named(make_tree: Make, as_root: bool) -> None:
    make_tree(4, classes=4, name="test/train")  # a data set called like a split
    root = make_tree(4, classes=4, name="test/val").parent
    place = root / "val" if as_root else root
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for lacking in (None, "class3"):  # the first of the classes have the labels of training
            if lacking is not None:
                shutil.rmtree(root / "val" / lacking)
            loader(place, split="val", batch_size=1)
    shutil.rmtree(root / "val" / "class1")
    with pytest.warns(UserWarning, match="the 2 classes of .*val, .* of .*train: 1 is 'class2' here, 'class1' there$"):
        loader(place, split="val", batch_size=1)
    for name in ("class1", "class2", "class3"):
        shutil.rmtree(root / "train" / name)
    shutil.copyfile(root / "val/class0/0000.jpg", root / "val/class2/0002.jpg")  # small images are of one size
    with pytest.warns(UserWarning, match="1 is 'class2' here, nothing there$") as record:
        fastmoll.SmallImageLoader(place, "val", 1, device="cpu", mean=(0, 0, 0), std=(1, 1, 1))
    assert record[0].filename == __file__


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_cuda_asked_for_and_absent(make_tree: Make) -> None:
    with pytest.raises(ValueError, match="no CUDA device"):
        loader(make_tree(17), device="cuda")


def test_a_process_group_that_was_forgotten_is_an_error(make_tree: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE=2 is set, but torch"):
        loader(make_tree(17))
    loader(make_tree(17), rank=0, world_size=1)


def test_dali_that_is_missing_or_there_twice_is_explained(make_tree: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree(17)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: "2.4.0")
        with pytest.raises(ImportError, match="cuda120 and nvidia-dali-cuda130 are both installed"):
            loader(tree)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'fastmoll\[cu12\]'"):
        loader(tree)


def test_negative_epoch(make_tree: Make) -> None:
    with pytest.raises(ValueError, match="got -1"):
        loader(make_tree(17)).set_epoch(-1)
