"""`SmallImageLoader` on noise, for its tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastmoll.pipelines.small import SmallData
from fastmoll.small_loader import SmallImageLoader

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def data(count: int = 23, size: int = 32, name: str | None = None) -> SmallData:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, size, size, 3), np.uint8)
    return SmallData(images, np.arange(count) % 5, list("abcde"), Path("made"), name)


def loader(*, of: SmallData | None = None, **changes: Any) -> SmallImageLoader:
    options = {"batch_size": 4, "augment": "fcr+trivial", "device": "cpu", "return_index": True, "seed": 3}
    options |= {"mean": MEAN, "std": STD, **changes}
    return SmallImageLoader(data() if of is None else of, **options)


def ids(batches: Any) -> list[int]:
    return [int(sample) for batch in batches for sample in batch[2]]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)


def by_sample(batches: Any) -> dict[int, tuple[Tensor, Tensor]]:
    return {
        int(sample): (image, target)
        for images, targets, index in batches
        for image, target, sample in zip(images, targets, index, strict=True)
    }
