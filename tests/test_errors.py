"""Words that many messages have: what may have been meant, and the first of many names."""

from __future__ import annotations

import pytest

from fastmoll.pipelines.errors import nearest, nearest_option, some


@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("shot", ["fog", "shot_noise"], ["shot_noise"]),
        ("ResNet-50", ["resnet_18", "resnet_50"], ["resnet_50"]),
        # Of many that begin with it those like it, before others that are as much like it.
        ("resnet", ["tresnet_m", "resnet18", "resnet34", "resnet50", "resnet101_v2"], ["resnet50"]),
        ("fc+", ["fc", "fc+auto", "fc+rand", "fc+mixup", "fc+cutmix"], ["fc"]),
        ("--augmentation", ["--aug", "--augment", "--data.augment"], ["--augment"]),
        ("snow-flakes", ["fog", "snow", "Snow_f"], ["Snow_f"]),
        *((f"mollify{sign}alpha", ["mollify"], []) for sign in "._-"),
        ("noise", ["shot_noise", "fog"], []),
        ("", ["fog", "snow"], []),
    ],
)
def test_what_begins_with_a_name_or_is_spelt_like_it_may_have_been_meant(
    name: str, known: list[str], near: list[str]
) -> None:
    assert nearest(name, known) == near


def test_an_option_of_another_group_comes_before_those_that_are_spelt_alike() -> None:
    known = ["data.batch_size", "data.path", "model.path", "optim.lr_batch", "optim.lr"]
    assert nearest_option("optim.batch_size", known) == ["data.batch_size"]
    assert nearest_option("path", known) == nearest_option("run.path", known) == ["data.path", "model.path"]
    assert nearest_option("optim.lr_bacth", known) == ["optim.lr_batch"]
    assert nearest_option("batch-size", known) == ["data.batch_size"]


def test_of_many_names_the_first_are_named_and_the_others_counted() -> None:
    assert some(["a", "b", "c"]) == "a, b, c"
    assert some(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
