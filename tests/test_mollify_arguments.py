"""``Mollify`` shows its arguments, has the paper's as defaults, and names bad ones."""

import pytest
import torch
from mollify_batches import CLASSES

from fastmoll.mollify import Mollify, beta_quantiles


def test_repr_shows_every_argument():
    text = repr(Mollify(10, roles=(1, 2, 3), beta=(1, 3), k_noise=2, k_blur=0.5, sigma_max=9, kind="temper", seed=4))
    assert text == (
        "Mollify(num_classes=10, roles=(1.0, 2.0, 3.0), beta=(1.0, 3.0), k_noise=2.0, k_blur=0.5, "
        "sigma_min=0.3, sigma_max=9.0, kind='temper', seed=4, backend='auto', "
        "targets='dense', mix=None, mix_alpha=1.0, draws=1, temperature=None, label_decay=None, blur_scale=None)"
    )


def test_the_defaults_are_the_papers():
    mollify = Mollify(10)
    assert (mollify.roles, mollify.beta) == ((1, 1, 1), (1, 2))
    assert (mollify.k_noise, mollify.k_blur, mollify.sigma_min, mollify.sigma_max) == (1, 1, 0.3, None)
    assert (mollify.kind, mollify.seed) == ("smooth", 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_classes": 1}, "num_classes .* got 1"),
        ({"num_classes": 10.0}, "num_classes .* got 10.0"),
        ({"num_classes": True}, "num_classes .* got True"),
        ({"roles": (1, 1)}, r"roles must be 3 weights .* got \(1, 1\)"),
        ({"roles": (1, -1, 1)}, r"roles\[1\] .* got -1"),
        ({"roles": (0, 0, 0)}, r"roles must have at least one positive weight, got \(0, 0, 0\)"),
        ({"roles": (1, 1, float("nan"))}, r"roles\[2\] .* got nan"),
        ({"beta": (0, 2)}, r"beta\[0\] .* got 0"),
        ({"beta": (1, -2.0)}, r"beta\[1\] .* got -2.0"),
        ({"targets": "sparse"}, "targets must be one of 'dense', 'short', got 'sparse'"),
        ({"beta": (1, 2, 3)}, r"beta must be two numbers"),
        ({"k_noise": -0.1}, "k_noise .* got -0.1"),
        ({"k_blur": float("inf")}, "k_blur .* got inf"),
        ({"sigma_min": 0}, "sigma_min .* got 0"),
        ({"sigma_min": -1.0}, "sigma_min .* got -1.0"),
        ({"sigma_min": 2.0, "sigma_max": 1.0}, "sigma_max .* at least 2.0, got 1.0"),
        ({"sigma_max": float("nan")}, "sigma_max .* got nan"),
        ({"kind": "hard"}, "kind must be one of 'smooth', 'temper', 'none', got 'hard'"),
        ({"seed": -1}, "seed .* got -1"),
        ({"seed": 2**64}, "seed .* got 18446744073709551616"),
        ({"seed": 0.5}, "seed .* got 0.5"),
        ({"seed": None}, "seed .* got None"),
        ({"mix": "blend"}, "mix must be one of 'mixup', 'cutmix', got 'blend'"),
        ({"mix_alpha": 0}, "mix_alpha .* got 0"),
        ({"temperature": 0.5}, "temperature must be callable or None, got 0.5"),
        ({"temperature": lambda u: 2 * u}, r"temperature\(u\) must lie in \[0, 1\], got 1.*"),
        ({"temperature": lambda u: u[:9]}, r"temperature\(u\) must have shape \(4097\), got \(9,\)"),
        ({"temperature": torch.sqrt, "beta": (2.0, 2.0)}, r"beta has no effect .* got \(2.0, 2.0\)"),
        ({"label_decay": "linear"}, "label_decay must be callable or None, got 'linear'"),
        ({"label_decay": max, "k_blur": 2.0}, "k_blur has no effect .* got 2.0"),
        ({"label_decay": max, "kind": "none"}, "kind has no effect .* got none"),
        ({"blur_scale": 3.0}, "blur_scale must be callable or None, got 3.0"),
    ],
)
def test_bad_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Mollify(**{"num_classes": CLASSES, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"images": torch.zeros(2, 3, 4, 4, dtype=torch.uint8)},
            "images must be floating point, got torch.uint8: stand",
        ),
        ({"images": torch.zeros(3, 4, 4)}, r"images must have shape .* got \(3, 4, 4\)"),
        ({"images": [[0.0]]}, "images must be a torch.Tensor, got list"),
        ({"labels": torch.tensor([0, CLASSES])}, r"labels must lie in \[0, 7\), got 7 at position 1"),
        ({"labels": torch.tensor([-1, 0])}, "labels must lie .* got -1 at position 0"),
        ({"labels": torch.tensor([0])}, r"labels must have shape \(2\), got \(1,\)"),
        ({"labels": torch.zeros(2, CLASSES + 1)}, r"labels must have shape \(2, 7\), got \(2, 8\)"),
        ({"labels": torch.full((2, CLASSES), float("nan"))}, "labels .* got nan"),
        ({"labels": torch.tensor([0.0, 1.0])}, "labels .* got torch.float32"),
        ({"labels": [0, 1]}, "labels must be a torch.Tensor, got list"),
        ({"index": torch.arange(3)}, r"index must have shape \(2\), got \(3,\)"),
        ({"index": torch.tensor([0, -5])}, "index .* got -5 at position 1"),
        ({"index": torch.tensor([0, 2**48])}, "index .* got 281474976710656"),
        ({"index": torch.tensor([0.0, 1.0])}, "index .* got torch.float32"),
        ({"epoch": -1}, "epoch .* got -1"),
        ({"epoch": 2**24}, "epoch .* got 16777216"),
        ({"epoch": 2**24, "index": torch.arange(2)}, "epoch .* got 16777216"),
        (
            {"labels": torch.zeros(2, dtype=torch.int64, device="meta")},
            "labels must hold values .* got a tensor on meta",
        ),
        ({"index": torch.arange(2, device="meta")}, "index must hold values .* got a tensor on meta"),
    ],
)
def test_bad_batches_are_named(arguments, message):
    good = {"images": torch.zeros(2, 3, 4, 4), "labels": torch.tensor([0, 1])}
    with pytest.raises(ValueError, match=message):
        Mollify(CLASSES)(**{**good, **arguments})


def test_pixels_without_rows_are_named():
    with pytest.raises(ValueError, match=r"pixels must have at least one row and column, got shape \(2, 0, 4, 3\)"):
        Mollify(CLASSES).from_pixels(
            torch.zeros(2, 0, 4, 3, dtype=torch.uint8), torch.tensor([0, 1]), mean=(0.5,) * 3, std=(0.2,) * 3
        )


@pytest.mark.parametrize("mix", [None, "cutmix"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_images_without_data_give_shapes_and_are_not_counted(device, mix):
    labels = torch.tensor([0, 1], device=device)
    mollify, short = Mollify(CLASSES, mix=mix), Mollify(CLASSES, mix=mix, targets="short")
    images, targets = mollify(torch.empty(2, 3, 4, 5, device="meta"), labels)
    assert images.is_meta and targets.is_meta and (images.shape, targets.shape) == ((2, 3, 4, 5), (2, CLASSES))
    pixels = torch.empty(2, 4, 5, 3, dtype=torch.uint8, device="meta")
    images, targets = short.from_pixels(pixels, labels, mean=(0.5,) * 3, std=(0.2,) * 3, dtype=torch.float16)
    assert images.is_meta and images.shape == (2, 3, 4, 5) and images.dtype == torch.float16
    assert targets.gamma.is_meta and targets.gamma.shape == (2,)
    assert int(mollify.get_extra_state()) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"labels must have shape \(2\), got \(3,\)"),
        ({"labels": torch.zeros(3, dtype=torch.int64, device="meta")}, r"labels must have shape \(2\), got \(3,\)"),
        ({"labels": torch.zeros(2, CLASSES + 1, device="meta")}, rf"labels must have shape \(2, {CLASSES}\)"),
        ({"labels": torch.zeros(2, dtype=torch.int32, device="meta")}, "labels must be torch.int64, got torch.int32"),
        ({"labels": torch.tensor([0, CLASSES])}, rf"labels must lie in \[0, {CLASSES}\), got {CLASSES} at position 1"),
        ({"index": torch.arange(3, device="meta")}, r"index must have shape \(2\), got \(3,\)"),
        ({"epoch": -1}, "epoch must be an integer in .* got -1"),
    ],
)
@pytest.mark.parametrize("pixels", [False, True])
def test_what_comes_with_images_without_data_is_checked_as_ever(pixels, arguments, message):
    given = {"labels": torch.zeros(2, dtype=torch.int64, device="meta"), **arguments}
    with pytest.raises(ValueError, match=message):
        if pixels:
            images = torch.empty(2, 4, 5, 3, dtype=torch.uint8, device="meta")
            Mollify(CLASSES).from_pixels(images, mean=(0.5,) * 3, std=(0.2,) * 3, **given)
        else:
            Mollify(CLASSES)(torch.empty(2, 3, 4, 5, device="meta"), **given)


def test_beta_without_quantiles_is_refused():
    with pytest.raises(ValueError, match="beta must be a distribution whose quantiles can be computed"):
        beta_quantiles(float("nan"), 1.0)
