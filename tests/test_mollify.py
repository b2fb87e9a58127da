"""``Mollify``: the batch that comes out is the public operations applied role by role, and nothing else."""

import copy
import functools
import io
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchvision import tv_tensors
from torchvision.transforms import v2

import fastmoll
from fastmoll.kernels.cosine_noise import cosine_noise
from fastmoll.kernels.draw import BLUR, CLEAN, NOISE, PURE_NOISE
from fastmoll.kernels.heat_blur import heat_blur
from fastmoll.kernels.mix import draw_mix, mix_images
from fastmoll.kernels.soft_cross_entropy import soft_cross_entropy
from fastmoll.kernels.soft_labels import label_decay, soft_labels
from fastmoll.mollify import Mollify, beta_quantiles, with_mix

CLASSES = 7
MEMORY_FORMATS = [torch.contiguous_format, torch.channels_last]


def batch(size=24, height=12, width=10, dtype=torch.float32):
    generator = torch.Generator().manual_seed(size)
    images = torch.randn(size, 3, height, width, generator=generator).to(dtype)
    return images, torch.randint(CLASSES, (size,), generator=generator), torch.arange(1000, 1000 + size)


def expected(mollify, images, labels, index, epoch):
    """The same from the public operations, image by image."""
    role, t = mollify.draw(index, epoch)
    gamma = label_decay(role, t, k_noise=mollify.k_noise, k_blur=mollify.k_blur)
    out = images.clone()
    for i, kind in enumerate(role.tolist()):
        one = slice(i, i + 1)
        if kind in (NOISE, PURE_NOISE):
            out[one] = cosine_noise(images[one], t[one], seed=mollify.seed, epoch=epoch, index=index[one])
        if kind == BLUR:
            out[one] = heat_blur(images[one], t[one], sigma_min=mollify.sigma_min, sigma_max=mollify.sigma_max)
    return role, out, soft_labels(labels, gamma, mollify.num_classes, kind=mollify.kind)


@pytest.mark.parametrize("memory_format", MEMORY_FORMATS)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"roles": (1, 2, 3, 4), "seed": 2**64 - 1},
        {"beta": (2.0, 0.7), "k_noise": 0.5, "k_blur": 3, "kind": "temper"},
        {"sigma_min": 1.0, "sigma_max": 4.0},
    ],
)
def test_a_batch_is_the_public_operations_applied_by_role(arguments, memory_format):
    mollify = Mollify(CLASSES, **arguments)
    images, labels, index = batch()
    images = images.to(memory_format=memory_format)
    role, want_images, want_targets = expected(mollify, images, labels, index, 3)
    assert set(role.tolist()) >= {CLEAN, NOISE, BLUR}
    out, targets = mollify(images, labels, index, 3)
    assert out.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(out, want_images, atol=1e-6, rtol=0)
    assert torch.equal(targets, want_targets)
    assert torch.equal(out[role == CLEAN], images[role == CLEAN])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_images_keep_their_dtype_and_targets_are_float32(dtype):
    images, labels, index = batch(dtype=dtype)
    out, targets = Mollify(CLASSES)(images, labels, index)
    assert out.dtype == dtype
    assert targets.dtype == torch.float32
    assert targets.shape == (24, CLASSES)


def test_the_input_is_not_written_to_and_not_handed_back():
    images, labels, index = batch()
    before = images.clone(), labels.clone(), index.clone()
    for roles in ((1, 1, 1), (1, 0, 0)):
        out, _ = Mollify(CLASSES, roles)(images, labels, index)
        out.zero_()
        assert all(torch.equal(a, b) for a, b in zip(before, (images, labels, index), strict=True))


def test_an_image_is_mollified_alike_in_any_batch_and_order():
    mollify = Mollify(CLASSES, seed=5)
    images, labels, index = batch()
    out, targets = mollify(images, labels, index, 2)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    again, targets_again = mollify(images[order], labels[order], index[order], 2)
    torch.testing.assert_close(again, out[order], atol=1e-6, rtol=0)
    assert torch.equal(targets_again, targets[order])
    for start in range(0, 24, 5):
        part = slice(start, start + 5)
        piece, targets_piece = mollify(images[part], labels[part], index[part], 2)
        torch.testing.assert_close(piece, out[part], atol=1e-6, rtol=0)
        assert torch.equal(targets_piece, targets[part])


def test_equal_keys_give_equal_bits_and_other_epochs_and_seeds_do_not():
    images, labels, index = batch()
    out, targets = Mollify(CLASSES)(images, labels, index, 1)
    same = Mollify(CLASSES)(images, labels, index, 1)
    assert torch.equal(same[0], out)
    assert torch.equal(same[1], targets)
    assert not torch.equal(Mollify(CLASSES)(images, labels, index, 2)[0], out)
    assert not torch.equal(Mollify(CLASSES, seed=1)(images, labels, index, 1)[0], out)


def test_zero_weight_roles_never_happen():
    images, labels, index = batch(64)
    for role, roles in ((CLEAN, (1, 0, 0)), (NOISE, (0, 1, 0)), (BLUR, (0, 0, 1)), (PURE_NOISE, (0, 0, 0, 1))):
        assert (Mollify(CLASSES, roles).draw(index)[0] == role).all()
    out, targets = Mollify(CLASSES, (0, 0, 0, 1))(images, labels, index)
    torch.testing.assert_close(targets, torch.full((64, CLASSES), 1 / CLASSES))
    torch.testing.assert_close(out, cosine_noise(images, torch.ones(64), index=index), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (7, 13)])
def test_any_height_and_width_work(shape):
    images, labels, index = batch(40, *shape)
    out, _ = Mollify(CLASSES, sigma_min=2.0)(images, labels, index)
    assert out.shape == images.shape
    assert out.isfinite().all()


def test_an_empty_batch_works():
    out, targets = Mollify(CLASSES)(torch.empty(0, 3, 8, 8), torch.empty(0, dtype=torch.int64))
    assert out.shape == (0, 3, 8, 8)
    assert targets.shape == (0, CLASSES)


def test_soft_labels_are_softened_further():
    mollify = Mollify(CLASSES)
    images, labels, index = batch()
    dense = torch.nn.functional.one_hot(labels, CLASSES).float()
    mixed = 0.3 * dense + 0.7 * dense.flip(0)
    _, targets = mollify(images, mixed, index)
    role, t = mollify.draw(index)
    gamma = label_decay(role, t).unsqueeze(1)
    torch.testing.assert_close(targets, (1 - gamma) * mixed + gamma / CLASSES)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.usefixtures("triton_interpreter")
def test_short_targets_are_the_labels_and_their_decays(backend):
    pytest.importorskip("triton")
    images, labels, index = batch()
    dense, short = (Mollify(CLASSES, seed=2, kind="temper", backend=backend, targets=t) for t in ("dense", "short"))
    role, t = short.draw(index, 3)
    want, _ = dense(images, labels, index, 3)
    out, targets = short(images, labels, index, 3)
    assert torch.equal(out, want)
    assert isinstance(targets, fastmoll.SoftLabels)
    assert torch.equal(targets.label, labels)
    torch.testing.assert_close(targets.gamma, label_decay(role, t), atol=1e-7, rtol=0)
    assert targets[2:] == (None, None, "temper")
    with pytest.raises(ValueError, match=r"labels must have shape \(24\), got \(24, 7\)"):
        short(images, torch.zeros(24, CLASSES), index)


def test_short_targets_take_no_memory_for_the_classes():
    images, labels, index = batch(height=2, width=2)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            nonlocal largest
            out = function(*arguments, **(keywords or {}))
            sizes = [each.untyped_storage().nbytes() for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
            largest = max([largest, *sizes])
            return out

    def most(targets):
        nonlocal largest
        largest = 0
        with Watch():
            Mollify(10**6, targets=targets)(images, labels, index)
        return largest

    assert most("dense") >= 24 * 10**6 * 4
    assert most("short") < 10**6


def test_it_works_after_mixup_in_a_torchvision_pipeline():
    torch.manual_seed(0)
    images, labels, _ = batch()
    pipeline = v2.Compose([v2.MixUp(num_classes=CLASSES), Mollify(CLASSES, (1, 0, 0))])
    out, targets = pipeline(images, labels)
    torch.manual_seed(0)
    mixed, mixed_labels = v2.MixUp(num_classes=CLASSES)(images, labels)
    assert torch.equal(out, mixed)
    torch.testing.assert_close(targets, mixed_labels)
    out, targets = v2.Compose([v2.CutMix(num_classes=CLASSES), Mollify(CLASSES)])(tv_tensors.Image(images), labels)
    assert out.shape == images.shape
    assert targets.sum(1).tolist() == pytest.approx([1.0] * 24)


def test_images_without_ids_are_numbered_as_they_come():
    images, labels, _ = batch()
    counting, explicit = Mollify(CLASSES), Mollify(CLASSES)
    for start, size in ((0, 24), (24, 10), (34, 24)):
        out, targets = counting(images[:size], labels[:size])
        want, want_targets = explicit(images[:size], labels[:size], torch.arange(start, start + size))
        assert torch.equal(out, want)
        assert torch.equal(targets, want_targets)


def test_a_refused_batch_is_not_counted():
    images, labels, _ = batch()
    mollify = Mollify(CLASSES)
    with pytest.raises(ValueError, match="labels"):
        mollify(images, labels + CLASSES)
    assert mollify.get_extra_state() == 0


def test_the_count_resumes_from_a_checkpoint(tmp_path):
    images, labels, _ = batch()
    first = torch.nn.Sequential()
    first.mollify = Mollify(CLASSES)
    first.mollify(images, labels)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    want, _ = first.mollify(images, labels)
    second = torch.nn.Sequential()
    second.mollify = Mollify(CLASSES)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(second.mollify(images, labels)[0], want)


@pytest.mark.parametrize("state", [torch.tensor(-1), torch.tensor([3]), torch.tensor(1.0), {"seen": 3}, None])
def test_a_state_of_something_else_is_refused(state):
    with pytest.raises(ValueError, match="state"):
        Mollify(CLASSES).set_extra_state(state)


def test_the_rank_goes_above_the_count(monkeypatch):
    images, labels, _ = batch()
    want = {rank: Mollify(CLASSES)(images, labels, torch.arange(24) + (rank << 32))[0] for rank in (0, 1, 65535)}
    assert not torch.equal(want[0], want[1])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank, out in want.items():
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        assert torch.equal(Mollify(CLASSES)(images, labels)[0], out)


def test_the_count_never_runs_into_the_rank():
    images, labels, _ = batch(4)
    mollify = Mollify(CLASSES)
    mollify.set_extra_state(torch.tensor(2**32 - 2))
    out, _ = mollify(images, labels)
    assert torch.equal(out, Mollify(CLASSES)(images, labels, torch.tensor([2**32 - 2, 2**32 - 1, 0, 1]))[0])


class Collate:
    def __init__(self, with_index):
        self.with_index, self.mollify = with_index, Mollify(CLASSES)

    def __call__(self, samples):
        index = torch.tensor(samples)
        images, labels = torch.zeros(len(samples), 1, 4, 4), index % CLASSES
        return self.mollify(images, labels, index if self.with_index else None)


def test_a_loader_worker_must_give_ids():
    with pytest.raises(ValueError, match="index must be given inside a DataLoader worker, got None"):
        next(iter(torch.utils.data.DataLoader(range(8), 4, num_workers=1, collate_fn=Collate(False))))
    batches = list(torch.utils.data.DataLoader(range(8), 4, num_workers=1, collate_fn=Collate(True)))
    want = Collate(True)([4, 5, 6, 7])
    assert torch.equal(batches[1][0], want[0])
    assert torch.equal(batches[1][1], want[1])


def test_a_copy_in_another_process_counts_for_itself():
    images, labels, _ = batch()
    mollify = Mollify(CLASSES)
    mollify(images, labels)
    sent = io.BytesIO()
    ForkingPickler(sent).dump(mollify)
    other = pickle.loads(sent.getvalue())
    assert other.get_extra_state() == 24
    other(images, labels)
    assert (mollify.get_extra_state(), other.get_extra_state()) == (24, 48)


def test_it_can_be_copied_and_moved_without_changing_its_draws():
    index = torch.arange(100)
    mollify = Mollify(CLASSES, beta=(2.0, 3.0))
    role, t = mollify.draw(index)
    for other in (
        copy.deepcopy(mollify),
        Mollify(CLASSES, beta=(2.0, 3.0)).half(),
        Mollify(CLASSES, beta=(2, 3)).eval(),
    ):
        assert torch.equal(other.draw(index)[0], role)
        assert torch.equal(other.draw(index)[1], t)
    assert list(mollify.parameters()) == list(mollify.buffers()) == []


@pytest.mark.parametrize("beta", [(1.0, 2.0), (0.7, 1.5)])
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no CUDA device")
@pytest.mark.usefixtures("triton_interpreter")
def test_triton_gives_what_torch_gives(beta):
    images, labels, index = batch()
    want, want_targets = Mollify(CLASSES, beta=beta, backend="torch")(images, labels, index, 3)
    out, targets = Mollify(CLASSES, beta=beta, backend="triton")(images, labels, index, 3)
    torch.testing.assert_close(out, want, atol=1e-4, rtol=0)
    torch.testing.assert_close(targets, want_targets, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "backend",
    [
        "torch",
        pytest.param(
            "triton",
            marks=pytest.mark.skipif(
                torch.cuda.is_available(), reason="the interpreter runs where there is no CUDA device"
            ),
        ),
    ],
)
@pytest.mark.usefixtures("triton_interpreter")
def test_pixels_give_what_standardised_images_give(backend):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (24, 20, 17, 3), generator=generator, dtype=torch.uint8)
    labels, index = torch.arange(24) % CLASSES, torch.arange(24)
    flip = torch.rand(24, generator=generator) < 0.5
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    images = (pixels.permute(0, 3, 1, 2) / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    images[flip] = images[flip].flip(3)
    want, want_targets = Mollify(CLASSES)(images, labels, index, 3)
    mollify = Mollify(CLASSES, backend=backend)
    out, targets = mollify.from_pixels(pixels, labels, index, 3, mean=mean, std=std, flip=flip)
    torch.testing.assert_close(out, want, atol=1e-4, rtol=0)
    torch.testing.assert_close(targets, want_targets, atol=1e-6, rtol=0)
    assert out.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last])
def test_in_place_overwrites_the_images_with_the_same_result(fmt):
    images, labels, index = batch()
    images = images.to(memory_format=fmt)
    want, want_targets = Mollify(CLASSES)(images, labels, index)
    out, targets = Mollify(CLASSES)(images, labels, index, inplace=True)
    assert torch.equal(out, want) and torch.equal(targets, want_targets)


MIXES = ["mixup", "cutmix"]


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
    assert with_mix(plain, None, CLASSES, 0) == (plain, None)
    assert with_mix(None, None, CLASSES, 0) == (None, None)
    assert with_mix(repr, None, CLASSES, 0) == (None, repr)
    mixed, after = with_mix(plain, "mixup", CLASSES, 0)
    assert after is None and plain.mix is None
    assert repr(mixed) == repr(Mollify(CLASSES, seed=3, mix_alpha=0.4, mix="mixup"))
    images, labels, index = batch()
    assert torch.equal(
        mixed(images, labels, index)[0], Mollify(CLASSES, seed=3, mix_alpha=0.4, mix="mixup")(images, labels, index)[0]
    )
    alone, after = with_mix(repr, "cutmix", CLASSES, 9)
    assert after is repr
    assert repr(alone) == repr(Mollify(CLASSES, (1, 0, 0), seed=9, mix="cutmix"))
    assert repr(with_mix(cutmix, "cutmix", CLASSES, 0)[0]) == repr(cutmix)
    with pytest.raises(ValueError, match="augment says mixup, but mollify has mix='cutmix'"):
        with_mix(cutmix, "mixup", CLASSES, 0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.usefixtures("triton_interpreter")
def test_kind_none_mollifies_images_and_leaves_labels_alone(backend):
    pytest.importorskip("triton")
    images, labels, index = batch()
    want, _ = Mollify(CLASSES, backend=backend)(images, labels, index)
    out, targets = Mollify(CLASSES, kind="none", backend=backend)(images, labels, index)
    assert torch.equal(out, want)
    assert torch.equal(targets, torch.nn.functional.one_hot(labels, CLASSES).float())
    _, short = Mollify(CLASSES, kind="none", backend=backend, targets="short")(images, labels, index)
    assert torch.equal(short.label, labels) and not short.gamma.any()
    soft = torch.rand(24, CLASSES)
    assert torch.equal(Mollify(CLASSES, kind="none", backend=backend)(images, soft, index)[1], soft)


def square_root(u):
    """The quantile function of Beta(2, 1)."""
    return u.sqrt()


def half_of_noise(role, t):
    return torch.where(role == NOISE, t / 2, (role == PURE_NOISE).float())


def linear(t):
    return 1.0 + 5.0 * t


def test_a_quantile_function_takes_the_place_of_the_beta_distribution():
    index = torch.arange(5000)
    role, t = Mollify(CLASSES, temperature=square_root, seed=6).draw(index, 2)
    want_role, want = Mollify(CLASSES, beta=(2.0, 1.0), seed=6).draw(index, 2)
    assert torch.equal(role, want_role)
    torch.testing.assert_close(t, want, atol=1e-6, rtol=0)
    # And of those that have a formula, too.
    constant = Mollify(CLASSES, (0, 1, 1), temperature=lambda u: torch.full_like(u, 0.25)).draw(index)[1]
    torch.testing.assert_close(constant, torch.full_like(constant, 0.25), atol=1e-7, rtol=0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("targets", ["dense", "short"])
@pytest.mark.usefixtures("triton_interpreter")
def test_schedules_can_be_the_users_own_functions(targets, backend):
    pytest.importorskip("triton")
    options = {"sigma_min": 1.0, "sigma_max": 6.0, "roles": (1, 1, 1, 1), "seed": 2, "targets": targets}
    own = {"temperature": square_root, "label_decay": half_of_noise, "blur_scale": linear}
    mollify = Mollify(CLASSES, backend=backend, **own, **options)
    images, labels, index = batch(height=16, width=16)
    out, made = mollify(images, labels, index, 1)
    role, t = Mollify(CLASSES, beta=(2.0, 1.0), **options).draw(index, 1)
    want = images.clone()
    for i, kind in enumerate(role.tolist()):
        one = slice(i, i + 1)
        if kind in (NOISE, PURE_NOISE):
            want[one] = cosine_noise(images[one], t[one], seed=2, epoch=1, index=index[one])
        if kind == BLUR:
            scale = float(linear(t[i]))
            want[one] = heat_blur(images[one], torch.zeros(1), sigma_min=scale, sigma_max=scale)
    torch.testing.assert_close(out, want, atol=2e-5 if backend == "torch" else 1e-4, rtol=0)
    gamma = half_of_noise(role, t)
    if targets == "dense":
        torch.testing.assert_close(made, soft_labels(labels, gamma, CLASSES), atol=1e-6, rtol=0)
    else:
        torch.testing.assert_close(made.gamma, gamma, atol=1e-6, rtol=0)


def test_schedules_survive_copies_pickles_and_are_shown_the_same_in_every_process():
    images, labels, index = batch()
    mollify = Mollify(CLASSES, temperature=square_root, label_decay=half_of_noise, mix="mixup", mix_alpha=0.3)
    want, want_targets = mollify(images, labels, index)
    for other in (pickle.loads(pickle.dumps(mollify)), copy.deepcopy(mollify), copy.copy(mollify)):
        out, targets = other(images, labels, index)
        assert torch.equal(out, want) and torch.equal(targets, want_targets)
    assert repr(mollify).endswith(
        f"mix='mixup', mix_alpha=0.3, temperature={__name__}.square_root, label_decay={__name__}.half_of_noise, "
        "blur_scale=None)"
    )
    assert " at 0x" not in repr(Mollify(CLASSES, temperature=functools.partial(torch.pow, exponent=0.5)))


def test_a_decay_with_parameters_sends_no_gradient():
    images, labels, index = batch()
    weight = torch.tensor(0.5, requires_grad=True)
    _, targets = Mollify(CLASSES, label_decay=lambda role, t: weight * t)(images, labels, index)
    assert not targets.requires_grad


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label_decay": lambda role, t: t + 1.0}, r"label_decay\(role, t\) must lie in \[0, 1\], got"),
        ({"label_decay": lambda role, t: t[:3]}, r"label_decay\(role, t\) must have shape \(24\), got \(3,\)"),
        ({"label_decay": lambda role, t: 0.5}, r"label_decay\(role, t\) must be a torch.Tensor, got float"),
        ({"blur_scale": lambda t: t + 100.0}, r"blur_scale\(t\) must lie in \[sigma_min, sigma_max\] = \[0.3, 10.0\]"),
        ({"blur_scale": lambda t: t.sum()}, r"blur_scale\(t\) must have shape \(24\), got \(\)"),
    ],
)
def test_results_of_the_users_functions_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        Mollify(CLASSES, **arguments)(*batch())


def test_repr_shows_every_argument():
    text = repr(Mollify(10, roles=(1, 2, 3), beta=(1, 3), k_noise=2, k_blur=0.5, sigma_max=9, kind="temper", seed=4))
    assert text == (
        "Mollify(num_classes=10, roles=(1.0, 2.0, 3.0), beta=(1.0, 3.0), k_noise=2.0, k_blur=0.5, "
        "sigma_min=0.3, sigma_max=9.0, kind='temper', seed=4, backend='auto', "
        "targets='dense', mix=None, mix_alpha=1.0, temperature=None, label_decay=None, blur_scale=None)"
    )


def test_the_defaults_are_the_papers():
    mollify = Mollify(10)
    assert (mollify.roles, mollify.beta) == ((1, 1, 1), (1, 2))
    assert (mollify.k_noise, mollify.k_blur, mollify.sigma_min, mollify.sigma_max) == (1, 1, 0.3, None)
    assert (mollify.kind, mollify.seed) == ("smooth", 0)


def test_images_that_require_grad_are_refused_only_where_autograd_listens():
    images, labels, index = batch()
    want, _ = Mollify(CLASSES)(images, labels, index)
    with torch.no_grad():
        out, _ = Mollify(CLASSES)(images.requires_grad_(), labels, index)
    assert not out.requires_grad
    assert torch.equal(out, want)
    with pytest.raises(ValueError, match="images must not require grad"):
        Mollify(CLASSES)(images, labels, index)


def test_the_package_exports_the_method_and_loads_neither_dali_nor_triton():
    code = (
        "import sys, fastmoll; "
        "fastmoll.Mollify, fastmoll.heat_blur, fastmoll.cosine_noise, fastmoll.label_decay, fastmoll.soft_labels; "
        "fastmoll.soft_cross_entropy, fastmoll.soft_cross_entropy_short, fastmoll.SoftLabels, fastmoll.blur_scale; "
        "fastmoll.losses.soft_cross_entropy, fastmoll.SmallImageLoader, fastmoll.Augment; "
        "sys.stdout.write(repr([m for m in ('nvidia.dali', 'triton', 'cupy') if m in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("[]", "")
    assert fastmoll.Mollify is Mollify
    assert all(hasattr(fastmoll, name) for name in fastmoll.__all__)


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
    ],
)
def test_bad_batches_are_named(arguments, message):
    good = {"images": torch.zeros(2, 3, 4, 4), "labels": torch.tensor([0, 1])}
    with pytest.raises(ValueError, match=message):
        Mollify(CLASSES)(**{**good, **arguments})


def test_beta_without_quantiles_is_refused():
    with pytest.raises(ValueError, match="beta must be a distribution whose quantiles can be computed"):
        beta_quantiles(float("nan"), 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("memory_format", MEMORY_FORMATS)
@pytest.mark.parametrize("labels_on_gpu", [False, True])
def test_a_gpu_mollifies_as_the_cpu_does_without_waiting(memory_format, labels_on_gpu):
    mollify = Mollify(CLASSES, roles=(1, 1, 1, 1), beta=(2.0, 3.0))
    images, labels, index = batch(64)
    gpu = images.cuda().to(memory_format=memory_format)
    placed = labels.cuda() if labels_on_gpu else labels.pin_memory()
    mollify(gpu, placed, index, 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, targets = mollify(gpu, placed, index, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want, want_targets = mollify(images, labels, index, 1)
    assert out.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(out.cpu(), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(targets.cpu(), want_targets, atol=1e-6, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("ids_on_gpu", [False, True])
@pytest.mark.parametrize("targets", ["dense", "short"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"mix": "mixup"},
        {"mix": "cutmix", "kind": "none"},
        {"temperature": square_root, "label_decay": half_of_noise, "blur_scale": linear, "sigma_max": 6.0},
    ],
)
def test_a_gpu_mixes_and_schedules_as_the_cpu_does_without_waiting(arguments, targets, ids_on_gpu):
    mollify = Mollify(CLASSES, targets=targets, **arguments)
    images, labels, index = batch(64)
    gpu, classes = images.cuda(), labels.cuda()
    ids = index.cuda() if ids_on_gpu else index.pin_memory()
    mollify(gpu, classes, ids, 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, made = mollify(gpu, classes, ids, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want, want_made = mollify(images, labels, index, 1)
    torch.testing.assert_close(out.cpu(), want, atol=2e-5, rtol=0)
    for ours, theirs in zip(tree_leaves(made), tree_leaves(want_made), strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours.cpu(), theirs, atol=1e-6, rtol=0)


@pytest.mark.gpu
def test_ids_on_the_gpu_give_the_same_draws():
    mollify = Mollify(CLASSES)
    images, labels, index = batch(64)
    want, want_targets = mollify(images, labels, index)
    out, targets = mollify(images.cuda(), labels.cuda(), index.cuda())
    torch.testing.assert_close(out.cpu(), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(targets.cpu(), want_targets, atol=1e-6, rtol=0)


@pytest.mark.parametrize("backend", ["triton", "cupy"])
def test_fused_backends_refuse_images_on_the_cpu_before_anything_is_drawn(backend, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    mollify = Mollify(4, backend=backend)
    with pytest.raises(ValueError, match=f"CUDA device for backend '{backend}', got cpu"):
        mollify(torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64))
    pixels = torch.zeros(2, 8, 8, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"CUDA device for backend '{backend}', got cpu"):
        mollify.from_pixels(pixels, torch.zeros(2, dtype=torch.int64), mean=(0.5,) * 3, std=(0.5,) * 3)
