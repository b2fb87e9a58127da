"""Tests of the loader of small images: every sample counted once, draws that batches don't change, bad arguments."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_loaders import MEAN, STD, assert_same, by_sample, data, ids, loader
from torch import Tensor

import fastmoll
from fastmoll.augment import NAMES
from fastmoll.pipelines.small import SmallData
from fastmoll.small_loader import SmallImageLoader


def test_evaluation_gives_the_standardised_pixels_in_order() -> None:
    whole = data()
    images, targets = (torch.cat(part) for part in zip(*loader(split="val", return_index=False), strict=True))
    expected = (whole.images / 255 - np.array(MEAN)) / np.array(STD)
    np.testing.assert_allclose(images.permute(0, 2, 3, 1), expected, atol=2e-6)
    assert images.dtype == torch.float32 and images.is_contiguous(memory_format=torch.channels_last)
    assert np.array_equal(targets, whole.labels) and targets.dtype == torch.int64


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_in_evaluation_every_sample_comes_once_over_all_ranks(world_size: int) -> None:
    ranks = [loader(split="val", rank=rank, world_size=world_size) for rank in range(world_size)]
    shares = [list(rank) for rank in ranks]
    assert [len(share) for share in shares] == [len(rank) for rank in ranks]
    assert sorted(ids(chain(*shares))) == list(range(23))
    assert all(rank.num_samples == 23 for rank in ranks)


@pytest.mark.parametrize("mix", ["mixup", "cutmix"])
@pytest.mark.parametrize("mollify", [None, fastmoll.Mollify(5, seed=2, targets="short")])
def test_a_name_mixes_the_batches_before_they_are_mollified(mollify: fastmoll.Mollify | None, mix: str) -> None:
    plain, mixed = loader(augment="fcr"), loader(augment=f"fcr+{mix}", mollify=mollify)
    settings = {"roles": (1, 0, 0), "seed": 3} if mollify is None else {"seed": 2, "targets": "short"}
    by_hand = fastmoll.Mollify(5, mix=mix, **settings)
    for epoch in range(2):
        for (images, targets, index), (raw, labels, _) in zip(mixed, plain, strict=True):
            want, want_targets = by_hand(raw, labels, index, epoch)
            torch.testing.assert_close(images, want, atol=1e-5, rtol=0)
            assert type(targets) is type(want_targets)
            parts = (targets, want_targets) if isinstance(targets, Tensor) else (targets[:4], want_targets[:4])
            torch.testing.assert_close(*parts, atol=0, rtol=0)
    validation = loader(augment=f"fcr+{mix}", split="val")
    assert next(iter(validation))[1].dtype == torch.int64


@pytest.mark.parametrize("mollified", [False, True])
@pytest.mark.parametrize("augment", NAMES)
def test_every_augmentation_gives_what_a_step_of_training_needs(augment: str, mollified: bool) -> None:
    mollify = fastmoll.Mollify(5, targets="short") if mollified else None
    images, targets, _ = next(iter(loader(of=data(8), augment=augment, mollify=mollify)))
    assert images.shape == (4, 3, 32, 32) and images.isfinite().all()
    mixed = augment.endswith(("mixup", "cutmix"))
    if mollify is not None:
        assert isinstance(targets, fastmoll.SoftLabels) and (targets.lam is not None) == mixed
    elif mixed:
        assert targets.shape == (4, 5)
        torch.testing.assert_close(targets.sum(1), torch.ones(4), rtol=0, atol=1e-6)
    else:
        assert targets.dtype == torch.int64
    weight = torch.eye(3, 5, requires_grad=True)
    fastmoll.soft_cross_entropy(images.mean((2, 3)) @ weight, targets).backward()
    assert weight.grad is not None and weight.grad.isfinite().all() and weight.grad.any()


def test_an_augment_object_mixes_like_its_name() -> None:
    name = "fcr+trivial+cutmix"
    assert_same(list(loader(augment=fastmoll.Augment(name, seed=3))), list(loader(augment=name)))


@pytest.mark.parametrize("augment", ["fcr+trivial", "fc+augmix+mixup"])
def test_batches_augmented_together_are_the_same(augment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"augment": augment, "mollify": fastmoll.Mollify(5)}
    monkeypatch.setattr("fastmoll.small_loader._TOGETHER", {})
    alone = list(loader(**options)) + list(loader(**options, rank=1, world_size=2))
    monkeypatch.setattr("fastmoll.small_loader._TOGETHER", {"cpu": 9})  # two batches of 4; the epoch has 5
    calls: list[int] = []
    call = fastmoll.Augment.__call__

    def counted(self: fastmoll.Augment, images: Tensor, index: Tensor, epoch: int) -> Tensor:
        calls.append(len(index))
        return call(self, images, index, epoch)

    monkeypatch.setattr(fastmoll.Augment, "__call__", counted)
    together = loader(**options)
    assert_same([*together, *loader(**options, rank=1, world_size=2)], alone)
    assert calls == [8, 8, 4, 8]
    with monkeypatch.context() as patch:
        patch.setattr("fastmoll.small_loader._TOGETHER_BYTES", 7 * together.data.images[0].nbytes)
        assert_same(list(loader(**options)), alone[:5])
    assert calls[4:] == [4] * 5
    resumed = loader(**options)
    together.set_epoch(0)
    running = iter(together)
    for _ in range(3):
        next(running)
    resumed.load_state_dict(together.state_dict())
    assert_same(list(resumed), alone[3:5])


def test_a_loader_that_mixes_resumes_and_takes_no_state_of_one_that_does_not() -> None:
    first, second = (loader(augment="fc+mixup", mollify=fastmoll.Mollify(5)) for _ in range(2))
    whole = list(first)
    first.set_epoch(0)
    running = iter(first)
    next(running)
    second.load_state_dict(first.state_dict())
    assert_same(list(second), whole[1:])
    with pytest.raises(ValueError, match=r"augment was 'fc\+mixup' when it was saved, is 'fc' now"):
        loader(augment="fc", mollify=fastmoll.Mollify(5)).load_state_dict(first.state_dict())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_in_training_ranks_share_full_batches_without_overlap_and_leave_out_others_each_epoch(world_size: int) -> None:
    ranks = [loader(rank=rank, world_size=world_size) for rank in range(world_size)]
    seen: list[list[int]] = []
    for _ in range(6):
        shares = [list(rank) for rank in ranks]
        assert all(len(share) == 23 // world_size // 4 for share in shares)
        assert all(len(batch[2]) == 4 for share in shares for batch in share)
        seen.append(ids(chain(*shares)))
        assert len(set(seen[-1])) == len(seen[-1])
    assert len({tuple(epoch) for epoch in seen}) == 6
    assert set(chain(*seen)) == set(range(23))


def test_a_step_has_the_same_images_on_one_rank_and_on_several() -> None:
    alone = [index.tolist() for _, _, index in loader(batch_size=8)]
    ranks = [list(loader(rank=rank, world_size=2)) for rank in range(2)]
    assert alone == [first[2].tolist() + second[2].tolist() for first, second in zip(*ranks, strict=True)]


def test_the_order_follows_from_seed_and_epoch() -> None:
    first, again, other = loader(), loader(), loader(seed=4)
    orders = [ids(first), ids(first)]
    again.set_epoch(1)
    assert ids(again) == orders[1]
    assert ids(other) not in orders


@pytest.mark.parametrize("augment", ["fcr+trivial", "fc+augmix"])
def test_an_image_is_the_same_in_every_batch_size_and_rank_and_another_each_epoch(augment: str) -> None:
    mollify = fastmoll.Mollify(5, seed=3)
    one = loader(augment=augment, mollify=mollify)
    epochs = [by_sample(one), by_sample(one)]
    for other in (
        loader(batch_size=7, augment=augment, mollify=mollify),
        loader(batch_size=2, augment=augment, mollify=mollify, rank=1, world_size=2),
    ):
        for sample, (image, target) in by_sample(other).items():
            if sample in epochs[0]:
                torch.testing.assert_close(image, epochs[0][sample][0], rtol=0, atol=1e-6)
                assert torch.equal(target, epochs[0][sample][1])
    both = epochs[0].keys() & epochs[1].keys()
    assert len(both) > 10
    assert sum(torch.equal(epochs[0][sample][0], epochs[1][sample][0]) for sample in both) <= 1


def test_a_subclass_of_augment_is_called_batch_by_batch_and_is_another_augmentation() -> None:
    class Inverted(fastmoll.Augment):
        def __call__(self, images: Tensor, index: Tensor, epoch: int = 0) -> Tensor:
            calls.append((len(index), index.device))
            return 255 - super().__call__(images, index, epoch)

    calls: list[tuple[int, torch.device]] = []
    ours, plain = (loader(augment=kind("fcr+trivial+mixup", seed=3)) for kind in (Inverted, fastmoll.Augment))
    total = torch.tensor([(1 - 2 * m) / s for m, s in zip(MEAN, STD, strict=True)]).view(3, 1, 1)
    for (images, targets, _), (theirs, others, _) in zip(ours, plain, strict=True):
        torch.testing.assert_close(images + theirs, total.expand_as(images), rtol=0, atol=1e-5)
        assert torch.equal(targets, others)
    assert calls == [(4, torch.device("cpu"))] * 5
    with pytest.raises(ValueError, match=r"augment was .*Augment.*, is .*Inverted"):
        ours.load_state_dict(plain.state_dict())


def test_an_augmentation_may_be_any_function_of_pixels_ids_and_epoch() -> None:
    calls = []

    def invert(images: Tensor, index: Tensor, epoch: int) -> Tensor:
        calls.append((images.dtype, tuple(images.shape), index.tolist(), epoch))
        return 255 - images

    one = loader(augment=invert)
    one.set_epoch(2)
    plain = loader(augment="none")
    plain.set_epoch(2)
    (images, _, index), (theirs, *_) = next(iter(one)), next(iter(plain))
    assert calls == [(torch.uint8, (4, 32, 32, 3), index.tolist(), 2)]
    total = torch.tensor([(1 - 2 * m) / s for m, s in zip(MEAN, STD, strict=True)]).view(3, 1, 1)
    torch.testing.assert_close(images + theirs, total.expand_as(images), rtol=0, atol=1e-5)


def test_any_function_may_mollify_and_gets_standardised_images_ids_and_epoch() -> None:
    def double(images: Tensor, targets: Tensor, index: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        return images * 2, targets + 100 * index + epoch

    one, plain = loader(augment="none", mollify=double), loader(augment="none")
    for (images, targets, index), (theirs, labels, _) in zip(one, plain, strict=True):
        assert torch.equal(images, 2 * theirs) and torch.equal(targets, labels + 100 * index)


def test_images_are_mollified_as_mollify_does_it() -> None:
    mollify = fastmoll.Mollify(5, seed=9)
    ours, plain = loader(augment="fc", mollify=mollify), loader(augment="fc")
    for (images, targets, _), (theirs, labels, index) in zip(ours, plain, strict=True):
        expected, soft = mollify(theirs, labels, index, 0)
        torch.testing.assert_close(images, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(targets, soft)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_images_come_in_the_type_that_was_asked_for(dtype: torch.dtype) -> None:
    assert next(iter(loader(dtype=dtype)))[0].dtype == dtype


def test_without_mean_and_deviation_the_images_of_an_unknown_set_are_standardised_by_its_training_images(
    tmp_path: Path,
) -> None:
    whole = data()
    for split, rows in (("train", slice(0, 15)), ("val", slice(15, 23))):
        np.save(tmp_path / f"{split}.npy", whole.images[rows])
        np.save(tmp_path / f"{split}_labels.npy", whole.labels[rows])
    train, val = (
        SmallImageLoader(tmp_path, split, batch_size=15, augment="none", device="cpu") for split in ("train", "val")
    )
    images = next(iter(train))[0]
    assert images.mean((0, 2, 3)).tolist() == pytest.approx([0] * 3, abs=1e-4)
    assert images.std((0, 2, 3), correction=0).tolist() == pytest.approx([1] * 3, abs=1e-4)
    assert (train.mean, train.std) == (val.mean, val.std)
    assert train.mean == pytest.approx(whole.images[:15].mean((0, 1, 2)) / 255)
    with pytest.raises(ValueError, match="mean and std must be given for made: those of the training images"):
        SmallImageLoader(whole, "val", device="cpu")
    assert SmallImageLoader(data(name="cifar10"), "val", device="cpu").mean == (0.4914, 0.4822, 0.4465)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size must be .*got 0"),
        ({"batch_size": 24}, "batch_size=24 is more than the 23 samples of .*made$"),
        ({"seed": -1}, "seed must be .*got -1"),
        ({"augment": "fcr+trival"}, "augment must be .*'fcr[+]trival'; did you mean fcr[+]trivial"),
        ({"augment": 5}, "augment must be a name or callable, got 5"),
        ({"augment": fastmoll.Augment}, "augment must be an object that can be called, not a class, got .*Augment"),
        ({"augment": lambda x: x}, r"augment must take \(images, index, epoch\), got .*: too many positional"),
        ({"augment": fastmoll.Augment("fc", 28)}, r"augment must be for images of 32 x 32 pixels, got Augment\('fc'"),
        ({"mollify": 5}, "mollify must be callable, got 5"),
        ({"mollify": fastmoll.Mollify(6)}, "num_classes=6, but made has 5 classes"),
        ({"dtype": torch.float64}, "dtype must be .*float64"),
        ({"std": (0.1, 0, 0.1)}, r"std\[1\] must be .* got 0"),
        ({"mean": (0.1, 0.2)}, "mean must be three numbers"),
        ({"mean": None}, "mean and std belong together"),
        ({"rank": 0}, "rank and world_size belong together"),
        ({"rank": 0, "world_size": 24}, "made has 23 samples for 24 ranks"),
        ({"device": "tpu"}, "device must be"),
        ({"of": SmallData(np.zeros((9, 8, 6, 3), np.uint8), np.zeros(9, np.int64), ["a"])}, "needs squares.*8 x 6"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader(**change)
    with pytest.raises(ValueError, match="epoch must be"):
        loader().set_epoch(-1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda images: images[1:], r"must have shape \(4, H, W, 3\), got \(3, 32, 32, 3\)"),
        (lambda images: images.float(), "must be torch.uint8, got torch.float32"),
        (lambda images: None, "must be a torch.Tensor, got NoneType"),
    ],
)
def test_a_users_augmentation_that_gives_something_else_is_refused(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"augment\(images, index, epoch\) {message}"):
        next(iter(loader(augment=lambda images, index, epoch: change(images))))


def test_a_closed_loader_says_so() -> None:
    with loader() as one:
        batches = iter(one)
        next(batches)
    for use in (lambda: next(batches), lambda: iter(one)):
        with pytest.raises(RuntimeError, match="the loader over made was closed"):
            use()


@pytest.mark.gpu
@pytest.mark.parametrize("augment", ["fcr+trivial", "fcr+auto"])
def test_a_gpu_gives_the_images_and_labels_of_the_cpu_without_waiting(augment: str) -> None:
    mollify = fastmoll.Mollify(5, seed=9)
    cpu, gpu = (loader(augment=augment, mollify=mollify, device=device) for device in ("cpu", "cuda"))
    evaluation = loader(split="val", device="cuda")
    list(evaluation)
    for (images, targets, index), (theirs, soft, other) in zip(cpu, gpu, strict=True):
        assert torch.equal(index, other)
        # A rounded grey level of an augmentation may differ.
        assert ((images - theirs.cpu()).abs() > 0.05).float().mean() < 0.01
        torch.testing.assert_close(targets, soft.cpu(), rtol=1e-5, atol=1e-6)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gpu.set_epoch(3)
        for _ in (*gpu, *evaluation):
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
