"""torch's defaults for new tensors, which are the user's to set, change no result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from small_loaders import data
from torch import Tensor

import fastmoll

IMAGES = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
PIXELS = (255 * IMAGES).byte()
LABELS = torch.arange(4)


def mollified(**settings: Any) -> tuple[Any, ...]:
    return fastmoll.Mollify(10, backend="torch", **settings)(IMAGES, LABELS, LABELS)


def measured() -> dict[str, Tensor]:
    metrics = fastmoll.ClassificationMetrics()
    metrics.update(IMAGES[:, 0, 0], LABELS)
    return metrics.compute()


def loaded() -> list[Any]:
    mollify = fastmoll.Mollify(5)
    return list(fastmoll.SmallImageLoader(data(9), "train", 4, augment="fcr+rand", device="cpu", mollify=mollify))


CALLS = {
    "mollify": mollified,
    "own schedule": lambda: mollified(temperature=lambda u: u.sqrt(), label_decay=lambda role, t: t**2),
    "mixed, short": lambda: mollified(beta=(0.5, 0.5), mix="cutmix", targets="short"),
    "trivial": lambda: fastmoll.Augment("fcr+trivial", 16)(PIXELS.permute(0, 2, 3, 1), LABELS),
    "augmix": lambda: fastmoll.Augment("fcr+augmix", 16)(PIXELS.permute(0, 2, 3, 1), LABELS),
    "loss": lambda: fastmoll.soft_cross_entropy(IMAGES[:, 0, 0], LABELS),
    "metrics": measured,
    "small images": loaded,
    **{name: lambda name=name: fastmoll.corrupt(PIXELS, name, 3, index=LABELS) for name in fastmoll.CORRUPTIONS},
}


def tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    parts = found.values() if isinstance(found, dict) else found if isinstance(found, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors(part)]


@contextmanager
def default(name: str) -> Iterator[None]:
    try:
        if name == "meta":  # as with a GPU, what is made there can't be used on a CPU
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(getattr(torch, name))
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore:.*frost")
@pytest.mark.parametrize("name", ["meta", "float64", "bfloat16"])
@pytest.mark.parametrize("call", CALLS)
def test_defaults_change_no_result(call: str, name: str) -> None:
    with default(name):  # first, so that tables which are kept are made under it
        found = tensors(CALLS[call]())
    expected = tensors(CALLS[call]())
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0, equal_nan=True)
