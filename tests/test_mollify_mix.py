"""``Mollify`` with MixUp and CutMix: mixed first, images and labels, and then as without."""

from pathlib import Path

import pytest
import torch
from mollify_batches import CLASSES, MEMORY_FORMATS, batch, expected
from torchvision.transforms import v2

import fastmoll
from fastmoll.kernels.mix import draw_mix, mix_images
from fastmoll.kernels.soft_cross_entropy import soft_cross_entropy
from fastmoll.kernels.soft_labels import label_decay
from fastmoll.mollify import Mollify, with_mix

MIXES = ["mixup", "cutmix"]
ROOT = Path("data")


def mixed_first(mollify, images, labels, index, epoch):
    """The same from the public operations: mix images and labels, then mollify them. In float64."""
    mix = mollify.draw_mix(index, epoch, height=images.shape[2], width=images.shape[3])
    assert torch.equal(mix.partner, torch.arange(len(images)).roll(1))
    role, out, _ = expected(mollify, mix_images(images, **mix.of_images()), labels, index, epoch)
    gamma = label_decay(role, mollify.draw(index, epoch)[1], k_noise=mollify.k_noise, k_blur=mollify.k_blur)
    own = torch.nn.functional.one_hot(labels, CLASSES).double()
    lam, gamma = mix.lam.double().unsqueeze(1), gamma.double().unsqueeze(1)
    targets = (1 - gamma) * (lam * own + (1 - lam) * own.roll(1, 0))
    return mix, out, targets + gamma / CLASSES if mollify.kind == "smooth" else targets


@pytest.mark.parametrize("memory_format", MEMORY_FORMATS)
@pytest.mark.parametrize("kind", ["smooth", "temper"])
@pytest.mark.parametrize("mix", MIXES)
def test_mixing_comes_before_mollification_for_images_and_labels(mix, kind, memory_format):
    mollify = Mollify(CLASSES, seed=3, kind=kind, mix=mix, roles=(1, 1, 1, 1))
    images, labels, index = batch()
    images = images.to(memory_format=memory_format)
    before = images.clone()
    _, want, want_targets = mixed_first(mollify, images, labels, index, 3)
    out, targets = mollify(images, labels, index, 3)
    assert out.is_contiguous(memory_format=memory_format)
    assert torch.equal(images, before)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=0)
    torch.testing.assert_close(targets, want_targets.float(), atol=1.2e-7, rtol=0)
    if kind == "smooth":
        torch.testing.assert_close(targets.sum(1), torch.ones(24), atol=1e-6, rtol=0)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_mixing_rounds_once_and_keeps_the_dtype(dtype, mix):
    images, labels, index = batch(dtype=dtype)
    mollify = Mollify(CLASSES, mix=mix)
    out, targets = mollify(images, labels, index)
    want, want_targets = mollify(images.double(), labels, index)
    assert out.dtype == dtype
    # Half a unit in the last place, and what float32 is off by.
    rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(out.double(), want, rtol=1.01 * rounding, atol=1e-5)
    assert torch.equal(targets, want_targets)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no CUDA device")
def test_pixels_are_mixed_after_each_was_flipped(backend, mix):
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (24, 20, 17, 3), generator=generator, dtype=torch.uint8)
    labels, index, flip = torch.arange(24) % CLASSES, torch.arange(24), torch.arange(24) % 3 == 0
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    images = (pixels.permute(0, 3, 1, 2) / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    images[flip] = images[flip].flip(3)
    mollify = Mollify(CLASSES, backend=backend, mix=mix, seed=4)
    _, want, want_targets = mixed_first(mollify, images, labels, index, 3)
    out, targets = mollify.from_pixels(pixels, labels, index, 3, mean=mean, std=std, flip=flip)
    torch.testing.assert_close(out, want, atol=1e-4, rtol=0)
    torch.testing.assert_close(targets, want_targets.float(), atol=1.2e-7, rtol=0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kind", ["smooth", "temper", "none"])
@pytest.mark.usefixtures("triton_interpreter")
def test_short_targets_of_mixed_images_give_the_loss_of_the_dense_ones(kind, backend):
    pytest.importorskip("triton")
    images, labels, index = batch()
    logits = torch.randn(24, CLASSES, generator=torch.Generator().manual_seed(1))
    losses = []
    for targets in ("dense", "short"):
        mollify = Mollify(CLASSES, mix="cutmix", kind=kind, backend=backend, targets=targets)
        _, made = mollify(images, labels, index, 1)
        losses.append(soft_cross_entropy(logits, made, reduction="none"))
    assert isinstance(made, fastmoll.SoftLabels)
    assert torch.equal(made.partner, labels.roll(1))
    assert torch.equal(made.lam, mollify.draw_mix(index, 1, height=12, width=10).lam)
    torch.testing.assert_close(*losses, atol=1e-6, rtol=0)


@pytest.mark.parametrize("mix", MIXES)
def test_mixing_alone_is_torchvisions(mix, monkeypatch):
    images, labels, index = batch()
    out, targets = Mollify(CLASSES, roles=(1, 0, 0), mix=mix, seed=8)(images, labels, index, 5)
    drawn = draw_mix(index, 5, kind=mix, height=12, width=10, seed=8)
    theirs = {"mixup": v2.MixUp, "cutmix": v2.CutMix}[mix](num_classes=CLASSES)
    lam = float(drawn.lam[0])
    if mix == "cutmix":
        y0, y1, x0, x1 = drawn.box[0].tolist()
        monkeypatch.setattr(theirs, "make_params", lambda _: {"box": (x0, y0, x1, y1), "lam_adjusted": lam})
    else:
        monkeypatch.setattr(theirs, "make_params", lambda _: {"lam": lam})
    want, want_targets = theirs(images, labels)
    torch.testing.assert_close(out, want, atol=1e-6, rtol=0)
    torch.testing.assert_close(targets, want_targets, atol=1e-6, rtol=0)


def test_soft_labels_are_mixed_and_softened_further():
    mollify = Mollify(CLASSES, mix="mixup")
    images, _, index = batch()
    soft = torch.rand(24, CLASSES, generator=torch.Generator().manual_seed(2))
    _, targets = mollify(images, soft, index)
    role, t = mollify.draw(index)
    gamma, lam = label_decay(role, t).unsqueeze(1), mollify.draw_mix(index, height=12, width=10).lam.unsqueeze(1)
    torch.testing.assert_close(targets, (1 - gamma) * (lam * soft + (1 - lam) * soft.roll(1, 0)) + gamma / CLASSES)


def test_mixing_leaves_the_roles_as_they_were():
    index = torch.arange(50)
    plain, mixed = Mollify(CLASSES), Mollify(CLASSES, mix="mixup", mix_alpha=0.2)
    assert all(torch.equal(a, b) for a, b in zip(plain.draw(index, 2), mixed.draw(index, 2), strict=True))
    assert plain.draw_mix(index, height=4, width=4) is None


def test_a_loader_finds_what_to_mix_with():
    plain, cutmix = Mollify(CLASSES, seed=3, mix_alpha=0.4), Mollify(CLASSES, mix="cutmix")
    assert with_mix(plain, None, CLASSES, 0, ROOT) == (plain, None)
    assert with_mix(None, None, CLASSES, 0, ROOT) == (None, None)
    assert with_mix(repr, None, CLASSES, 0, ROOT) == (None, repr)
    mixed, after = with_mix(plain, "mixup", CLASSES, 0, ROOT)
    assert after is None and plain.mix is None
    assert repr(mixed) == repr(Mollify(CLASSES, seed=3, mix_alpha=0.4, mix="mixup"))
    images, labels, index = batch()
    assert torch.equal(
        mixed(images, labels, index)[0], Mollify(CLASSES, seed=3, mix_alpha=0.4, mix="mixup")(images, labels, index)[0]
    )
    alone, after = with_mix(repr, "cutmix", CLASSES, 9, ROOT)
    assert after is repr
    assert repr(alone) == repr(Mollify(CLASSES, (1, 0, 0), seed=9, mix="cutmix"))
    assert repr(with_mix(cutmix, "cutmix", CLASSES, 0, ROOT)[0]) == repr(cutmix)
    with pytest.raises(ValueError, match="augment says mixup, but mollify has mix='cutmix'"):
        with_mix(cutmix, "mixup", CLASSES, 0, ROOT)
