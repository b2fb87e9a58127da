"""`ImageNetLoader` on small trees, for its tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastmoll import ImageNetLoader

Make = Callable[..., Path]


def loader(tree: Path, **options: Any) -> ImageNetLoader:
    defaults = {"batch_size": 4, "size": 16, "device": "cpu", "return_index": True, "num_threads": 1}
    return ImageNetLoader(tree, **{**defaults, **options})


def ids(batches: Iterator[tuple[Tensor, ...]] | ImageNetLoader) -> list[int]:
    return [i for _, _, index in batches for i in index.tolist()]


def stream(batches: Iterator[tuple[Tensor, ...]] | ImageNetLoader) -> list[tuple[Tensor, ...]]:
    return [tuple(t.clone() for t in batch) for batch in batches]


def equal(left: list[tuple[Tensor, ...]], right: list[tuple[Tensor, ...]]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)
    )
