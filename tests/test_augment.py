"""Augmentation of batches: names, distributions as torchvision's, and draws that depend on nothing but their keys."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from test_image_ops import photographs, torchvision
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from fastmoll.augment import NAMES, Augment, AugmentSpec, Draws, augment, parse_augment
from fastmoll.kernels.image_ops import OPERATIONS
from fastmoll.pipelines.policies import AUTO_AUGMENT, ranges

MANY = torch.arange(20_000)
SPACES: dict[str, Any] = {
    "rand": v2.RandAugment._AUGMENTATION_SPACE,
    "auto": v2.AutoAugment._AUGMENTATION_SPACE,
    "trivial": v2.TrivialAugmentWide._AUGMENTATION_SPACE,
    "augmix": v2.AugMix._AUGMENTATION_SPACE,
}


def uniform(values: Tensor, categories: int) -> float:
    """p-value of the chi-square test that integers are uniform."""
    return float(stats.chisquare(torch.bincount(values.flatten(), minlength=categories).numpy()).pvalue)


@pytest.mark.parametrize("name", NAMES)
def test_names_survive_being_parsed(name: str) -> None:
    assert str(parse_augment(name)) == name


def test_a_name_is_taken_apart() -> None:
    assert parse_augment("fc+rand+cutmix") == AugmentSpec("fc", "rand", "cutmix")
    assert parse_augment("fcr+mixup") == AugmentSpec("fcr", None, "mixup")
    assert len(NAMES) == 45


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("fcr+trivail", "fcr+trivial"),
        ("FCR+augmix", "fcr+augmix"),
        ("fcr + auto", "fcr+auto"),
        ("fcr+mixup+rand", "fcr+rand+mixup"),
        ("trivial", "none+trivial"),
        ("cutmix+rand", "none+rand+cutmix"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"; did you mean {near.replace('+', '[+]')}\?$"):
        parse_augment(name)


@pytest.mark.parametrize("size", [32, 64, 224])
@pytest.mark.parametrize("policy", SPACES)
def test_operations_and_magnitudes_are_torchvisions(policy: str, size: int) -> None:
    ours = ranges(policy, size, size)
    assert ours.keys() == SPACES[policy].keys()
    bins = {"rand": 31, "auto": 10, "trivial": 31, "augmix": 10}[policy]
    for name, (magnitudes, signed) in SPACES[policy].items():
        expected = magnitudes(bins, size, size)
        assert ours[name].signed == signed
        if expected is None:
            assert ours[name].magnitudes is None
        else:
            assert torch.equal(ours[name].magnitudes, expected.float())


def test_the_pairs_of_autoaugment_are_torchvisions() -> None:
    for name, policy in (("imagenet", v2.AutoAugmentPolicy.IMAGENET), ("cifar10", v2.AutoAugmentPolicy.CIFAR10)):
        assert list(AUTO_AUGMENT[name]) == v2.AutoAugment(policy)._policies
    assert AUTO_AUGMENT[Augment("fcr+auto").auto_augment] == tuple(v2.AutoAugment()._policies)


def test_flips_crops_and_angles_have_their_distributions() -> None:
    draws = Augment("fcr", seed=3).draw(MANY)
    assert draws.flip is not None and draws.top is not None and draws.left is not None and draws.angle is not None
    assert uniform(draws.flip.long(), 2) > 1e-3
    places = (draws.top + 4) * 9 + draws.left + 4
    assert uniform(places, 81) > 1e-3
    assert stats.kstest(draws.angle.numpy(), stats.uniform(-15, 30).cdf).pvalue > 1e-3
    assert not Augment("fc").draw(MANY).angle.any()
    assert Augment("none").draw(MANY).flip is None


@pytest.mark.parametrize(("policy", "steps"), [("rand", 2), ("trivial", 1)])
def test_operations_magnitudes_and_signs_are_drawn_as_by_torchvision(policy: str, steps: int) -> None:
    draws = Augment(f"none+{policy}", seed=1).draw(MANY)
    assert draws.op.shape == (1, steps, len(MANY))
    known = ranges(policy, 32, 32)
    order = {OPERATIONS.index(name): k for k, name in enumerate(known)}
    ops = draws.op.clone().apply_(order.__getitem__)
    assert uniform((ops[0] * len(known) ** torch.arange(steps).view(-1, 1)).sum(0), len(known) ** steps) > 1e-3
    for name, limits in known.items():
        drawn = draws.magnitude[draws.op == OPERATIONS.index(name)]
        if limits.magnitudes is None:
            assert not drawn.any()
            continue
        allowed = limits.magnitudes if policy == "trivial" else limits.magnitudes[9:10]
        # Several bins of Posterize are the same number of bits.
        values, weights = allowed.unique(return_counts=True)
        counts = (drawn.abs().view(-1, 1) == values).sum(0)
        assert counts.sum() == len(drawn)
        if len(values) > 1:
            assert stats.chisquare(counts, weights.double() / weights.sum() * len(drawn)).pvalue > 1e-3
        nonzero = drawn[drawn != 0]
        assert uniform((nonzero < 0).long(), 2) > 1e-3 if limits.signed else bool((drawn >= 0).all())


@pytest.mark.parametrize("which", AUTO_AUGMENT)
def test_autoaugment_draws_each_pair_and_does_each_operation_with_its_probability(which: str) -> None:
    draws = Augment("none+auto", seed=2, auto_augment=which).draw(MANY)
    known = ranges("auto", 32, 32)
    expected: dict[tuple[Any, ...], float] = {}
    for pair in AUTO_AUGMENT[which]:
        for happens in itertools.product((True, False), repeat=2):
            probability, key = 1 / len(AUTO_AUGMENT[which]), []
            for (name, p, place), does in zip(pair, happens, strict=True):
                probability *= p if does else 1 - p
                magnitudes = known[name].magnitudes
                size = 0.0 if magnitudes is None or place is None else float(magnitudes[place])
                key += [OPERATIONS.index(name), size] if does else [0, 0.0]
            if probability:
                expected[tuple(key)] = expected.get(tuple(key), 0.0) + probability
    happened = (draws.op[0] != 0).float()
    parts = torch.stack([draws.op[0, 0], draws.op[0, 1]]).tolist(), (draws.magnitude[0].abs() * happened).tolist()
    counts = dict.fromkeys(expected, 0)
    for a, b, x, y in zip(*parts[0], *parts[1], strict=True):
        counts[(a, x, b, y)] += 1  # an outcome that torchvision does not have is a KeyError
    assert stats.chisquare(list(counts.values()), [len(MANY) * p for p in expected.values()]).pvalue > 1e-3


def test_augmix_draws_chains_and_weights_as_torchvision_does() -> None:
    draws = Augment("none+augmix", seed=4).draw(MANY)
    assert draws.op.shape == (3, 3, len(MANY)) and draws.weights is not None
    depth = (draws.op != 0).sum(1)
    assert uniform(depth[0] - 1 + 3 * (depth[1] - 1) + 9 * (depth[2] - 1), 27) > 1e-3
    # Operations come first in a chain, and then nothing.
    assert (draws.op[:, 1:][draws.op[:, :-1] == 0] == 0).all()
    known = ranges("augmix", 32, 32)
    first = draws.op[:, 0]
    assert uniform(first.clone().apply_({OPERATIONS.index(n): k for k, n in enumerate(known)}.__getitem__), 13) > 1e-3
    shears = draws.magnitude[:, 0][first == OPERATIONS.index("ShearX")].abs()
    assert uniform((shears.view(-1, 1) == known["ShearX"].magnitudes[:3]).long().argmax(1), 3) > 1e-3
    weights = draws.weights.double().numpy()
    assert np.abs(weights.sum(0) - 1).max() < 1e-6
    assert stats.kstest(weights[0], stats.uniform.cdf).pvalue > 1e-3
    for part in weights[1:] / (1 - weights[0]):  # a weight of Dirichlet(1, 1, 1) is Beta(1, 2)
        assert stats.kstest(part, stats.beta(1, 2).cdf).pvalue > 1e-3


@pytest.mark.parametrize("policy", ["none+rand", "none+trivial", "none+auto"])
def test_a_policy_is_its_operations_one_after_the_other(policy: str) -> None:
    images, index = photographs(32).repeat(6, 1, 1, 1), torch.arange(18)
    transform = Augment(policy, seed=5)
    draws = transform.draw(index, 2)
    expected = images.clone()
    for k in range(draws.op.shape[1]):
        for i in range(len(images)):
            name, magnitude = OPERATIONS[int(draws.op[0, k, i])], float(draws.magnitude[0, k, i])
            expected[i : i + 1] = torchvision(expected[i : i + 1], name, magnitude, False)
    done = transform(images, index, 2)
    assert ((done.int() - expected.int()).abs() > 2).float().mean() < 1e-3  # ties of places
    assert not torch.equal(done, images)


def test_augmix_is_torchvisions_for_the_same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    images, index = photographs(32).repeat(4, 1, 1, 1), torch.arange(12)
    transform = Augment("none+augmix", seed=6)
    draws, done = transform.draw(index), transform(images, index)
    assert draws.weights is not None
    for i in range(len(images)):
        theirs = v2.AugMix()
        itself, parts = draws.weights[0, i], draws.weights[1:, i]
        dirichlet = iter([torch.stack([itself, 1 - itself])[None], (parts / (1 - itself))[None]])
        monkeypatch.setattr(theirs, "_sample_dirichlet", lambda _, d=dirichlet: next(d))
        chains = [draws.op[c, :, i][draws.op[c, :, i] != 0].tolist() for c in range(3)]
        sizes = iter([float(draws.magnitude[c, k, i]) for c in range(3) for k in range(len(chains[c]))])
        names = iter([OPERATIONS[op] for chain in chains for op in chain])
        depths = iter([len(chain) for chain in chains])
        monkeypatch.setattr(torch, "randint", lambda *a, d=depths, **k: torch.tensor([next(d)]))
        one = lambda *_, n=names, s=sizes: (next(n), (lambda *_: None, False))  # noqa: E731
        monkeypatch.setattr(theirs, "_get_random_item", one)
        do = theirs._apply_image_or_video_transform

        def with_size(image: Any, name: str, _: float, s: Any = sizes, do: Any = do, **more: Any) -> Any:
            return do(image, name, next(s), **more)

        monkeypatch.setattr(theirs, "_apply_image_or_video_transform", with_size)
        expected = theirs(images[i].permute(2, 0, 1)).permute(1, 2, 0)
        monkeypatch.undo()
        assert (done[i].int() - expected.int()).abs().max() <= 2


def test_fcr_is_torchvisions_for_the_same_draws() -> None:
    images, index = photographs(32).repeat(8, 1, 1, 1), torch.arange(24)
    transform = Augment("fcr", seed=7)
    draws, done = transform.draw(index, 1), transform(images, index, 1)
    unequal = 0
    for i in range(len(images)):
        image = images[i].permute(2, 0, 1)
        image = F.horizontal_flip(image) if draws.flip[i] else image
        image = F.crop(F.pad(image, [4]), 4 + int(draws.top[i]), 4 + int(draws.left[i]), 32, 32)
        unequal += int((F.rotate(image, float(draws.angle[i])).permute(1, 2, 0) != done[i]).any(2).sum())
    assert unequal <= 3  # ties


@pytest.mark.parametrize("name", ["fcr", "fc+rand", "fcr+auto", "fcr+trivial", "none+augmix"])
def test_an_image_is_augmented_alike_whatever_the_batch(name: str) -> None:
    images, index = photographs(32).repeat(4, 1, 1, 1), torch.arange(12) * 1_000_003
    whole = Augment(name, seed=8)(images, index, 5)
    order = torch.tensor([7, 0, 11, 3])
    assert torch.equal(Augment(name, seed=8)(images[order], index[order], 5), whole[order])
    assert not torch.equal(Augment(name, seed=8)(images, index, 6), whole)
    assert not torch.equal(Augment(name, seed=9)(images, index, 5), whole)


def test_a_policy_leaves_flips_and_crops_as_they_are() -> None:
    plain = Augment("fcr", seed=1).draw(MANY)
    for policy in SPACES:
        other = Augment(f"fcr+{policy}", seed=1).draw(MANY)
        for name in ("flip", "top", "left", "angle"):
            assert torch.equal(getattr(plain, name), getattr(other, name))


@pytest.mark.parametrize("name", NAMES[::3])
def test_nothing_waits_for_the_device(name: str) -> None:
    transform = Augment(name, 8)
    images = torch.empty(4, 8, 8, 3, dtype=torch.uint8, device="meta")
    assert transform(images, torch.zeros(4, dtype=torch.int64, device="meta"), 1).shape == images.shape


def test_a_device_gets_no_more_operations_for_more_images() -> None:
    class Count(TorchDispatchMode):
        launched = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            made = isinstance(out, Tensor) and out.device.type == "meta" and not func.is_view
            self.launched += made and "empty" not in func.name()
            return out

    transform, counts = Augment("fcr+trivial", 8), []
    for batch in (256, 2048):
        images = torch.empty(batch, 8, 8, 3, dtype=torch.uint8, device="meta")
        with Count() as count:
            transform(images, torch.arange(batch))
        counts.append(count.launched)
    # With 16 batches of 128 together these are a tenth of what a small ResNet launches forwards and back.
    assert counts[0] == counts[1] < 240


def test_draws_can_be_given() -> None:
    images = photographs(32)
    op = torch.full((1, 1, 3), OPERATIONS.index("Invert"))
    draws = Draws(None, None, None, None, op, torch.zeros(1, 1, 3), None)
    assert torch.equal(augment(images, draws), 255 - images)


def test_nothing_to_do_is_not_done() -> None:
    images = photographs(32)
    assert Augment("none")(images, torch.arange(3)) is images


def test_bad_arguments_are_named() -> None:
    images, index = photographs(32), torch.arange(3)
    for options, message in (
        ({"augment": "cropflip"}, "got 'cropflip'$"),
        ({"augment": None}, "got None; did you mean none"),
        ({"augment": "fc", "size": 0}, "size must be an integer"),
        ({"augment": "fc", "padding": -1}, "padding must be an integer"),
        ({"augment": "fc", "seed": 2**64}, "seed must be an integer"),
        ({"augment": "fc+auto", "auto_augment": "svhn"}, "auto_augment must be one of 'imagenet', 'cifar10'"),
    ):
        with pytest.raises(ValueError, match=message):
            Augment(**options)
    with pytest.raises(ValueError, match="images must be 28 pixels high and wide"):
        Augment("fc", 28)(images, index)
    with pytest.raises(ValueError, match="index must have one entry an image"):
        Augment("fc")(images, index[:2])
    with pytest.raises(ValueError, match="epoch must be an integer"):
        Augment("fc")(images, index, -1)
