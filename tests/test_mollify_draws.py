"""Several draws of each image of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_loaders import loader
from torch import Tensor

import fastmoll
from fastmoll.losses import augmented_likelihood

ROLES = (1, 1, 1, 1)
INDEX = torch.tensor([5, 2, 11, 7, 3])
LABELS = torch.tensor([0, 3, 1, 2, 3])


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5, 3, 12, 10, generator=torch.Generator().manual_seed(0)).to(dtype)


def pixels() -> Tensor:
    return torch.randint(0, 256, (5, 12, 10, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def dense(targets: Any) -> Tensor:
    if isinstance(targets, Tensor):
        return targets
    mixed = {} if targets.partner is None else {"partner": targets.partner, "lam": targets.lam}
    return fastmoll.soft_labels(targets.label, targets.gamma, 4, kind=targets.kind, **mixed)


@pytest.mark.parametrize("targets", ["dense", "short"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_draws_are_those_of_as_many_epochs(targets: str, dtype: torch.dtype) -> None:
    several = fastmoll.Mollify(4, ROLES, targets=targets, draws=3)
    single = fastmoll.Mollify(4, ROLES, targets=targets)
    out, labels = several(images(dtype), LABELS, INDEX, 7)
    assert out.shape == (15, 3, 12, 10) and dense(labels).shape == (15, 4)
    for m in range(3):
        expected, wanted = single(images(dtype), LABELS, INDEX, 21 + m)
        assert torch.equal(out[5 * m : 5 * m + 5], expected)
        assert torch.equal(dense(labels)[5 * m : 5 * m + 5], dense(wanted))
    assert not torch.equal(out[:5], out[5:10])


@pytest.mark.parametrize("given", ["images", "pixels"])
@pytest.mark.parametrize("mix", ["mixup", "cutmix"])
def test_an_image_has_the_same_partner_in_all_draws(mix: str, given: str) -> None:
    def call(roles: tuple[int, ...], draws: int, epoch: int) -> tuple[Tensor, Tensor]:
        mollify = fastmoll.Mollify(4, roles, mix=mix, draws=draws)
        if given == "images":
            return mollify(images(), LABELS, INDEX, epoch)  # type: ignore[no-any-return]
        return mollify.from_pixels(pixels(), LABELS, INDEX, epoch, mean=(0.5,) * 3, std=(0.2,) * 3)  # type: ignore[return-value]

    mixed, targets = call((1, 0, 0), 1, 7)
    out, repeated = call((1, 0, 0), 3, 7)
    for m in range(3):
        torch.testing.assert_close(out[5 * m : 5 * m + 5], mixed, rtol=0, atol=1e-6)
        torch.testing.assert_close(repeated[5 * m : 5 * m + 5], targets)
    # And with roles, what is mollified is the mixture.
    out, soft = call(ROLES, 3, 7)
    for m in range(3):
        noised, expected = fastmoll.Mollify(4, ROLES)(mixed, targets, INDEX, 21 + m)
        torch.testing.assert_close(out[5 * m : 5 * m + 5], noised, rtol=0, atol=1e-5)
        torch.testing.assert_close(soft[5 * m : 5 * m + 5], expected)


def test_images_without_ids_are_numbered_once() -> None:
    mollify = fastmoll.Mollify(4, draws=3)
    mollify(images(), LABELS)
    assert mollify.get_extra_state() == 5


def test_the_batch_is_left_alone_unless_it_may_be_overwritten() -> None:
    given, mollify = images(), fastmoll.Mollify(4, ROLES, draws=2)
    kept = mollify(given, LABELS, INDEX)[0]
    assert torch.equal(given, images())
    assert torch.equal(mollify(given, LABELS, INDEX, inplace=True)[0], kept)


@pytest.mark.parametrize("mix", [None, "mixup"])
@pytest.mark.parametrize("targets", ["dense", "short"])
def test_compiled_code_gets_the_same(targets: str, mix: str | None) -> None:
    mollify = fastmoll.Mollify(4, ROLES, targets=targets, draws=2, mix=mix)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out, labels = mollify(x, y, INDEX, 3)
        return out * 2, (labels if isinstance(labels, Tensor) else labels.gamma) * 2

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for left, right in zip(compiled(images(), LABELS), step(images(), LABELS), strict=True):
        assert torch.equal(left, right)


def test_the_likelihood_takes_them_as_they_come() -> None:
    for targets in ("dense", "short"):
        _, labels = fastmoll.Mollify(4, targets=targets, draws=3, mix="mixup")(images(), LABELS, INDEX)
        logits = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(2))
        jensen = augmented_likelihood(logits, labels)
        torch.testing.assert_close(jensen, fastmoll.soft_cross_entropy(logits.flatten(0, 1), labels))


def test_loaders_give_all_draws_of_their_batches() -> None:
    mollify = fastmoll.Mollify(5, ROLES, draws=2)
    for images, targets, index in loader(mollify=mollify, augment="fcr+cutmix"):
        assert (len(images), len(targets), len(index)) == (8, 8, 4)


@pytest.mark.parametrize("draws", [0, -1, 1.5, True, None, 2**24 + 1])
def test_a_wrong_number_of_draws_is_named(draws: Any) -> None:
    with pytest.raises(ValueError, match=f"draws must be .*{draws}"):
        fastmoll.Mollify(4, draws=draws)


def test_epochs_end_where_the_draws_would_repeat() -> None:
    with pytest.raises(ValueError, match=r"epoch must be .*5592405"):
        fastmoll.Mollify(4, draws=3)(images(), LABELS, INDEX, 2**24 // 3)
