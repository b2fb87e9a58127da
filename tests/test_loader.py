"""`ImageNetLoader`: its batches, and how long they and it live."""

from __future__ import annotations

import os
import signal
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from imagenet_loaders import Make, equal, loader, stream
from small_loaders import loader as small_loader
from torch import Tensor

import fastmoll


def test_batches_have_the_promised_shapes_types_and_layout(make_tree: Make) -> None:
    tree = make_tree(12)
    images, targets = next(iter(loader(tree, return_index=False)))
    assert images.shape == (4, 3, 16, 16) and images.dtype == torch.float32
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert targets.shape == (4,) and targets.dtype == torch.int64
    for _, targets, index in loader(tree):
        assert targets.tolist() == [i // 4 for i in index.tolist()]  # 3 classes of 4, in order


@pytest.mark.parametrize("mollified", [False, True])
@pytest.mark.parametrize("split", ["train", "val"])
def test_the_fused_tail_gives_what_dali_gives(make_tree: Make, split: str, mollified: bool) -> None:
    tree = make_tree(14)
    mollify = fastmoll.Mollify(3) if mollified else None
    plain, fused = (loader(tree, split=split, mollify=mollify, fused=fused) for fused in (False, True))
    for _ in range(2):
        for (images, targets, index), (want, want_targets, want_index) in zip(fused, plain, strict=True):
            assert torch.equal(index, want_index)
            torch.testing.assert_close(images, want, atol=1e-4, rtol=0)
            torch.testing.assert_close(targets, want_targets)
            assert images.is_contiguous(memory_format=torch.channels_last)
    state = fused.state_dict()
    with pytest.raises(ValueError, match="standardise was 0 when it was saved, is 1 now"):
        plain.load_state_dict(state)


def test_the_fused_tail_can_give_half_precision(make_tree: Make) -> None:
    images, _, _ = next(iter(loader(make_tree(14), fused=True, dtype=torch.bfloat16)))
    assert images.dtype == torch.bfloat16


def test_mollify_gets_sample_ids_and_epoch(make_tree: Make) -> None:
    mollify = fastmoll.Mollify(3, seed=5)
    with loader(make_tree(12), mollify=mollify) as mollified, loader(make_tree(12)) as plain:
        for epoch in range(2):
            for (images, targets, index), (raw, labels, raw_index) in zip(mollified, plain, strict=True):
                assert torch.equal(index, raw_index)
                expected = fastmoll.Mollify(3, seed=5)(raw, labels, index=index, epoch=epoch)
                assert torch.equal(images, expected[0]) and torch.equal(targets, expected[1])


@pytest.mark.parametrize("fused", [False, True])
def test_labels_come_in_short_form_on_request(make_tree: Make, fused: bool) -> None:
    tree = make_tree(12)
    dense, short = (
        loader(tree, mollify=fastmoll.Mollify(3, seed=5, targets=targets), fused=fused)
        for targets in ("dense", "short")
    )
    with dense, short:
        for (images, targets, _), (want, want_targets, _) in zip(short, dense, strict=True):
            assert torch.equal(images, want)
            assert isinstance(targets, fastmoll.SoftLabels)
            written_out = fastmoll.soft_labels(targets.label, targets.gamma, 3)
            torch.testing.assert_close(written_out, want_targets, atol=1e-7, rtol=0)


@pytest.mark.parametrize("augment", ["fc+trivial", "fcr+rand", "fc+auto", "fc+augmix", "fcr"])
def test_automatic_augmentations_change_images_and_resume(make_tree: Make, augment: str) -> None:
    tree = make_tree(16)
    plain, augmented = stream(loader(tree)), loader(tree, augment=augment)
    batches = stream(islice(augmented, 2))
    assert not torch.allclose(plain[0][0], batches[0][0])
    resumed = loader(tree, augment=augment)
    resumed.load_state_dict(augmented.state_dict())
    assert equal(stream(resumed), stream(augmented)[2:])


def test_a_function_of_the_batch_augments_pixels(make_tree: Make) -> None:
    tree, calls = make_tree(8), []

    def invert(images: torch.Tensor, index: torch.Tensor, epoch: int) -> torch.Tensor:
        calls.append((images.dtype, index.dtype, epoch))
        return 255 - images

    options = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    with loader(tree, fused=True, **options) as plain, loader(tree, augment=invert, **options) as inverted:
        for (one, _, index), (other, _, same) in zip(plain, inverted, strict=True):
            assert torch.equal(index, same)
            torch.testing.assert_close(other, -one, atol=1e-6, rtol=0)
    assert calls and set(calls) == {(torch.uint8, torch.int64, 0)}
    # Evaluation is not augmented.
    with loader(tree, augment=invert, train=False) as evaluated, loader(tree, train=False) as expected:
        assert equal(stream(evaluated), stream(expected))


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda images, *_: images[:, 1:], r"have shape \(4, 16, 16, 3\), got \(4, 15, 16, 3\)"),
        (lambda images, *_: images.permute(0, 3, 1, 2), r"have shape \(4, 16, 16, 3\), got \(4, 3, 16, 16\)"),
        (lambda images, *_: images.float(), "be torch.uint8, got torch.float32"),
        (lambda images, *_: None, "be a torch.Tensor, got NoneType"),
    ],
)
def test_a_function_of_the_batch_gives_what_it_gets(make_tree: Make, function: Any, got: str) -> None:
    with (
        loader(make_tree(8), augment=function) as batches,
        pytest.raises(ValueError, match=rf"augment\(images, index, epoch\) must {got}"),
    ):
        next(iter(batches))


def invert_in_graph(images: Any) -> Any:
    from nvidia.dali import fn, types

    return fn.cast(255 - images, dtype=types.UINT8)


def test_a_dali_function_augments_in_the_graph(make_tree: Make) -> None:
    tree = make_tree(8)
    options = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    with loader(tree, **options) as plain, loader(tree, dali_augment=invert_in_graph, **options) as inverted:
        for (one, _, index), (other, _, same) in zip(plain, inverted, strict=True):
            assert torch.equal(index, same)
            torch.testing.assert_close(other, -one, atol=1e-5, rtol=0)
        with pytest.raises(ValueError, match="dali_augment was"):
            plain.load_state_dict(inverted.state_dict())


def halve_unless_black(images: Any) -> Any:
    from nvidia.dali import fn, types

    side = 16.0 - 8.0 * fn.cast(fn.reductions.max(images) > 0, dtype=types.FLOAT)
    return fn.resize(images, resize_x=side, resize_y=side)


def halve_if_bright(images: Any) -> Any:
    """Of the images of `make_tree`, half: one resized image in a batch, and the others as they were."""
    from nvidia.dali import fn, types

    side = 16.0 - 8.0 * fn.cast(fn.reductions.mean(images) > 128, dtype=types.FLOAT)
    return fn.resize(images, resize_x=side, resize_y=side)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("function", [halve_unless_black, halve_if_bright])
def test_a_dali_function_that_does_something_else_to_some_images_is_found_out(
    make_tree: Make, fused: bool, function: Any
) -> None:
    with loader(make_tree(8), dali_augment=function, fused=fused) as batches:
        for _ in range(2):  # the same batch again
            with pytest.raises(ValueError, match=r"^dali_augment must give images of 16 x 16 pixels, .* \(8, 8, 3\)$"):
                next(iter(batches))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mix", ["mixup", "cutmix"])
@pytest.mark.parametrize("mollify", [None, fastmoll.Mollify(3, seed=5)])
def test_a_name_mixes_the_batches_before_they_are_mollified(
    make_tree: Make, mollify: fastmoll.Mollify | None, mix: str, fused: bool
) -> None:
    tree = make_tree(16)
    options = {"seed": 7, "fused": fused}
    plain, mixed = loader(tree, **options), loader(tree, augment=f"fc+{mix}", mollify=mollify, **options)
    by_hand = fastmoll.Mollify(3, mix=mix, **({"roles": (1, 0, 0), "seed": 7} if mollify is None else {"seed": 5}))
    with plain, mixed:
        for epoch in range(2):
            for (images, targets, index), (raw, labels, raw_index) in zip(mixed, plain, strict=True):
                assert torch.equal(index, raw_index)
                want, want_targets = by_hand(raw, labels, index, epoch)
                torch.testing.assert_close(images, want, atol=1e-5, rtol=0)
                assert torch.equal(targets, want_targets)
                torch.testing.assert_close(targets.sum(1), torch.ones(4), atol=1e-6, rtol=0)
    assert mollify is None or mollify.mix is None
    with loader(tree, split="val", train=False, augment=f"fc+{mix}") as validation:
        assert next(iter(validation))[1].dtype == torch.int64


def test_any_function_gets_the_mixed_batch(make_tree: Make) -> None:
    tree, mixer = make_tree(16), fastmoll.Mollify(3, roles=(1, 0, 0), mix="mixup")

    def double(images: Tensor, targets: Tensor, index: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        return 2 * images, targets

    with loader(tree, augment="fc+mixup", mollify=double) as ours, loader(tree) as plain:
        for (images, targets, index), (raw, labels, _) in zip(ours, plain, strict=True):
            want, want_targets = mixer(raw, labels, index)
            torch.testing.assert_close(images, 2 * want, atol=1e-5, rtol=0)
            assert torch.equal(targets, want_targets)


def test_mixed_batches_resume_exactly(make_tree: Make) -> None:
    tree = make_tree(16)
    options: dict[str, Any] = {"augment": "fcr+cutmix", "mollify": fastmoll.Mollify(3)}
    with loader(tree, **options) as first, loader(tree, **options) as second:
        whole = stream(first)
        first.set_epoch(0)
        _ = [*islice(first, 2)]
        second.load_state_dict(first.state_dict())
        assert equal(stream(second), whole[2:])


def test_a_batch_that_a_users_function_failed_at_comes_again(make_tree: Make) -> None:
    failing: list[bool] = []

    def decay(role: Tensor, t: Tensor) -> Tensor:
        if failing and failing.pop():
            raise MemoryError
        return t

    for classes, make in ((3, partial(loader, make_tree(8))), (5, small_loader)):
        mollify = fastmoll.Mollify(classes, label_decay=decay)
        with make(mollify=mollify) as first, make(mollify=mollify) as second:
            whole = stream(first)
            first.set_epoch(0)
            batches = iter(first)
            next(batches)
            failing.append(True)
            with pytest.raises(MemoryError):
                next(batches)
            second.load_state_dict(first.state_dict())
            assert equal(stream(second), whole[1:])


def test_training_crops_and_flips_differ_between_epochs_and_samples_are_the_same(make_tree: Make) -> None:
    tree = make_tree(8)
    epochs = [
        {int(i): x for images, _, index in lo for i, x in zip(index, images, strict=True)} for lo in [loader(tree)] * 2
    ]
    assert epochs[0].keys() == epochs[1].keys()
    assert all(not torch.equal(epochs[0][i], epochs[1][i]) for i in epochs[0])


def test_close_ends_loops_and_loaders(make_tree: Make) -> None:
    with loader(make_tree(17)) as lo:
        batches = iter(lo)
        images = next(batches)[0]
        kept = images.clone()
    with pytest.raises(RuntimeError, match="was closed"):
        next(batches)
    with pytest.raises(RuntimeError, match="was closed"):
        iter(lo)
    lo.close()  # twice is fine
    assert torch.equal(images, kept)  # a batch outlives its loader


def test_batches_that_are_kept_are_not_overwritten(make_tree: Make) -> None:
    lo = loader(make_tree(40))
    kept = list(lo)
    lo.set_epoch(0)
    assert equal(kept, stream(lo))


def test_evaluation_batches_are_not_padded_beyond_the_shard(make_tree: Make) -> None:
    lo = loader(make_tree(5), split="val", batch_size=100_000)
    assert [len(index) for _, _, index in lo] == [5]


def test_a_forked_process_goes_on_by_itself(make_tree: Make) -> None:
    lo = loader(make_tree(17))
    batches = iter(lo)
    next(batches)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # DALI's threads don't exist here: what waits for them waits for ever
        index = next(batches)[2]
        lo.close()
        os._exit(10 + int(index[0]))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 10 + int(next(batches)[2][0])


@pytest.mark.gpu
@pytest.mark.parametrize("decoding", [{"hw_decoder_load": 0.0}, {"hw_decoder_load": 1.0}, {"decoder": "cpu"}])
@pytest.mark.parametrize("fused", [False, True])
def test_gpu_batches_live_until_the_stream_is_done_with_them(
    make_tree: Make, decoding: dict[str, Any], fused: bool
) -> None:
    tree = make_tree(64)

    def sums(*, hurry: bool) -> list[float]:
        found = []
        with loader(tree, device="cuda", fused=fused, mollify=fastmoll.Mollify(3), **decoding) as lo:
            for images, targets, _ in lo:
                if hurry:
                    torch.cuda._sleep(20_000_000)  # the host is batches ahead of the card
                found.append(images.double().sum() + targets.double().square().sum())
                del images, targets
                if not hurry:
                    torch.cuda.synchronize()
        return torch.stack(found).tolist()

    assert sums(hurry=True) == sums(hurry=False)


@pytest.mark.gpu
@pytest.mark.parametrize("mollified", [False, True])
def test_gpu_training_batches_match_the_cpu(make_tree: Make, mollified: bool) -> None:
    tree = make_tree(17)
    mollify = fastmoll.Mollify(3) if mollified else None
    gpu, cpu = (loader(tree, augment="none", mollify=mollify, device=device) for device in ("cuda", "cpu"))
    for (images, targets, index), (want, want_targets, want_index) in zip(gpu, cpu, strict=True):
        assert torch.equal(index, want_index)
        assert (images.cpu() - want).abs().mean((1, 2, 3)).max() < 1 / 58  # each image, one grey level
        torch.testing.assert_close(targets.cpu(), want_targets)


@pytest.mark.gpu
@pytest.mark.parametrize("decoder", ["mixed", "cpu"])
def test_gpu_batches_match_the_cpu(make_tree: Make, decoder: str) -> None:
    tree = make_tree(17)
    for (gpu, gpu_targets, _), (cpu, cpu_targets, _) in zip(
        loader(tree, split="val", device="cuda", decoder=decoder), loader(tree, split="val"), strict=True
    ):
        assert gpu.is_cuda and gpu.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(gpu_targets.cpu(), cpu_targets)
        assert (gpu.cpu() - cpu).abs().mean((1, 2, 3)).max() < 1 / 58  # each image, one grey level
