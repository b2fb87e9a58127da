"""Tests of `SmallImageLoader` on arrays of any layout and on images that are no squares."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_loaders import MEAN, STD, assert_same, data, loader

from fastmoll import Mollify
from fastmoll.pipelines.small import SmallData


def read_only(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


def planes(array: Any) -> Any:
    """The same values with the last axis in front in memory."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, -1, 0)), 0, -1)


def backwards(array: Any) -> Any:
    """The same values, from a view that runs against memory."""
    return array[::-1].copy()[::-1]


def test_means_and_deviations_may_be_arrays() -> None:
    assert_same(list(loader(mean=np.array(MEAN), std=np.array(STD))), list(loader()))


@pytest.mark.parametrize("layout", [read_only, planes, backwards])
def test_batches_are_those_of_the_values_whatever_their_layout_in_memory(layout: Callable[[Any], Any]) -> None:
    plain = data()
    other = SmallData(layout(plain.images), layout(plain.labels), plain.classes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(list(loader(of=other)), list(loader(of=plain)))


@pytest.mark.parametrize("augment", ["none", "none+mixup"])
def test_images_need_not_be_squares_where_none_is_turned(augment: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 8, 6, 3), np.uint8)
    made = SmallData(pixels, np.arange(9) % 3, ["a", "b", "c"])
    standard = (torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(
        STD
    ).view(3, 1, 1)
    mix = Mollify(3, (1, 0, 0), seed=3, mix="mixup") if "mixup" in augment else None
    for images, targets, index in loader(of=made, augment=augment):
        labels = torch.from_numpy(made.labels)[index]
        wanted, soft = mix(standard[index], labels, index) if mix else (standard[index], labels)
        torch.testing.assert_close(images, wanted, atol=1e-5, rtol=0)
        torch.testing.assert_close(targets, soft)
