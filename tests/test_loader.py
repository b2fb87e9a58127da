"""`ImageNetLoader`: order, shards, epochs, resume, life cycle, bad arguments (the tables of DALI facts, row by row)."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import io
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastmoll
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


# ------------------------------------------------------------------ batches


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


def test_a_dali_function_augments_in_the_graph(make_tree: Make) -> None:
    tree = make_tree(8)
    options = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    with loader(tree, **options) as plain, loader(tree, dali_augment=lambda x: 255 - x, **options) as inverted:
        for (one, _, index), (other, _, same) in zip(plain, inverted, strict=True):
            assert torch.equal(index, same)
            torch.testing.assert_close(other, -one, atol=1e-5, rtol=0)
        with pytest.raises(ValueError, match="dali_augment was"):
            plain.load_state_dict(inverted.state_dict())


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


def test_training_crops_and_flips_differ_between_epochs_and_samples_are_the_same(make_tree: Make) -> None:
    tree = make_tree(8)
    epochs = [
        {int(i): x for images, _, index in lo for i, x in zip(index, images, strict=True)} for lo in [loader(tree)] * 2
    ]
    assert epochs[0].keys() == epochs[1].keys()
    assert all(not torch.equal(epochs[0][i], epochs[1][i]) for i in epochs[0])


# ------------------------------------------------------------------ order and shards


def test_each_epoch_is_a_new_order(make_tree: Make) -> None:
    lo = loader(make_tree(120), size=8)
    orders = np.argsort([ids(lo) for _ in range(4)], axis=1)
    correlations = np.corrcoef(orders)[~np.eye(4, dtype=bool)]
    assert np.abs(correlations).max() < 0.4  # 4.4 standard deviations; DALI's random_shuffle gives 0.97


def test_seeds_give_other_orders(make_tree: Make) -> None:
    tree = make_tree(40)
    assert ids(loader(tree, seed=1)) != ids(loader(tree, seed=2))
    assert ids(loader(tree, seed=1)) == ids(loader(tree, seed=1))


@pytest.mark.parametrize(("samples", "world"), [(24, 2), (25, 2), (31, 3), (12, 3), (14, 3)])
def test_training_ranks_have_equal_full_batches_and_no_sample_twice(make_tree: Make, samples: int, world: int) -> None:
    tree = make_tree(samples)
    ranks = [loader(tree, rank=r, world_size=world) for r in range(world)]
    left_out = []
    for _ in range(3):
        batches = [stream(lo) for lo in ranks]
        assert {len(b) for b in batches} == {len(ranks[0])} == {samples // world // 4}
        assert all(len(index) == 4 for b in batches for _, _, index in b)
        seen = Counter(i for b in batches for _, _, index in b for i in index.tolist())
        assert set(seen.values()) == {1}
        left_out.append(frozenset(set(range(samples)) - seen.keys()))
    if left_out[0]:
        assert len(set(left_out)) > 1  # nothing is lost for ever


def test_ranks_augment_differently(make_tree: Make) -> None:
    tree = make_tree(4, name="one")
    for path in sorted(tree.rglob("*.jpg"))[1:]:
        path.write_bytes(sorted(tree.rglob("*.jpg"))[0].read_bytes())
    first, second = (next(iter(loader(tree, batch_size=2, rank=r, world_size=2)))[0] for r in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("samples", "world", "batch"), [(11, 1, 4), (11, 2, 4), (9, 2, 4), (11, 3, 4), (7, 7, 4), (8, 3, 1)]
)
def test_evaluation_gives_every_sample_exactly_once_in_every_epoch(
    make_tree: Make, samples: int, world: int, batch: int
) -> None:
    tree = make_tree(samples)
    ranks = [loader(tree, split="val", rank=r, world_size=world, batch_size=batch) for r in range(world)]
    for _ in range(2):
        seen = []
        for lo in ranks:
            batches = stream(lo)
            assert len(batches) == len(lo) and all(len(index) > 0 for _, _, index in batches)
            seen += [i for _, _, index in batches for i in index.tolist()]
        assert seen == list(range(samples))


def test_rank_and_world_size_come_from_torch_distributed(make_tree: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree(10)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert ids(loader(tree, split="val")) == [5, 6, 7, 8, 9]


# ------------------------------------------------------------------ epochs


def test_len_is_constant(make_tree: Make) -> None:
    lo = loader(make_tree(13))
    lengths = [len(lo)]
    for _ in lo:
        lengths.append(len(lo))
    assert set(lengths) == {3}


def test_a_new_loop_after_a_break_restarts_the_epoch(make_tree: Make) -> None:
    lo = loader(make_tree(16))
    first = stream(lo)
    begun = stream(islice(lo, 2))
    assert lo.epoch == 1
    second = stream(lo)
    assert equal(second[:2], begun) and not equal(second, first)
    lo.set_epoch(0)
    assert equal(stream(lo), first)


def test_set_epoch_in_order_changes_nothing_and_repeats_on_request(make_tree: Make) -> None:
    tree = make_tree(16)
    free, steered = loader(tree), loader(tree)
    for epoch in range(3):
        steered.set_epoch(epoch)
        last = stream(steered)
        assert equal(last, stream(free))
    steered.set_epoch(2)
    assert equal(stream(steered), last)
    with pytest.raises(ValueError, match=r"epoch must be an integer in \[0, 16777216\), got 16777216"):
        steered.set_epoch(2**24)


def test_set_epoch_can_jump_and_is_reproducible(make_tree: Make) -> None:
    tree = make_tree(16)
    jumped = []
    for _ in range(2):
        lo = loader(tree)
        next(iter(lo))
        lo.set_epoch(7)
        jumped.append(stream(lo))
        assert lo.epoch == 8
    assert equal(*jumped) and not equal(jumped[0], stream(loader(tree)))


def test_loops_that_stop_without_exhausting_the_iterator_move_on(make_tree: Make) -> None:
    lo = loader(make_tree(16))
    free = loader(make_tree(16))
    for _ in range(2):
        assert equal([b for _, b in zip(range(len(lo)), lo, strict=False)], stream(free))


def test_an_older_loop_over_the_same_loader_is_over(make_tree: Make) -> None:
    lo = loader(make_tree(16))
    old = iter(lo)
    next(old)
    new = iter(lo)
    next(new)
    with pytest.raises(RuntimeError, match="another one began"):
        next(old)


# ------------------------------------------------------------------ resume


def saved(state: dict[str, Any]) -> Any:
    """The state after a trip through a file, as a trainer saves it."""
    file = io.BytesIO()
    torch.save(state, file)
    assert len(file.getvalue()) < 20_000
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("stop", [0, 1, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("shard", [(0, 1), (2, 3)])
def test_resumes_to_the_identical_stream(make_tree: Make, stop: int, shard: tuple[int, int]) -> None:
    rank, world = shard
    options: dict[str, Any] = {"rank": rank, "world_size": world, "mollify": fastmoll.Mollify(3)}
    tree = make_tree(17 * world)
    whole = loader(tree, **options)
    expected = [batch for _ in range(3) for batch in stream(whole)]
    first = loader(tree, **options)
    done = 0
    for _ in range(3):
        for _ in islice(first, stop - done):
            done += 1
        if done == stop:
            break
    second = loader(tree, num_threads=2, prefetch=3, **options)
    second.load_state_dict(saved(first.state_dict()))
    rest: list[tuple[Tensor, ...]] = []
    while len(rest) < len(expected) - stop:
        second.set_epoch(second.epoch)  # as a trainer does
        rest += stream(second)
    assert equal(rest, expected[stop:])


def test_a_state_taken_between_epochs_after_set_epoch_resumes(make_tree: Make) -> None:
    tree = make_tree(17)
    first, second = loader(tree), loader(tree)
    stream(first)
    first.set_epoch(1)
    second.load_state_dict(saved(first.state_dict()))
    assert second.epoch == 1
    assert equal(stream(second), stream(first))


def test_a_resumed_epoch_can_be_restarted_and_states_of_resumed_loaders_resume(make_tree: Make) -> None:
    tree = make_tree(17)
    first = loader(tree)
    stream(first)
    expected = stream(first)
    first.set_epoch(1)
    stream(islice(first, 1))
    second = loader(tree)
    second.load_state_dict(first.state_dict())
    assert equal(stream(islice(second, 1)), expected[1:2])
    third = loader(tree)
    third.load_state_dict(second.state_dict())
    assert equal(stream(third), expected[2:])
    assert equal(stream(second), expected)  # the loop after a break


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("batch_size", {"batch_size": 3}),
        ("seed", {"seed": 1}),
        ("size", {"size": 8}),
        ("augment", {"augment": "none"}),
        ("world_size", {"rank": 0, "world_size": 2}),
        ("train", {"split": "val"}),
        ("mean", {"mean": (0, 0, 0)}),
        ("adjust_orientation", {"adjust_orientation": True}),
        ("mollify", {"mollify": fastmoll.Mollify(3)}),
    ],
)
def test_a_state_of_another_set_up_is_refused_by_name(make_tree: Make, field: str, options: dict[str, Any]) -> None:
    tree = make_tree(17)
    state = loader(tree).state_dict()
    with pytest.raises(ValueError, match=f"does not fit: {field} was"):
        loader(tree, **options).load_state_dict(state)


def test_a_state_of_other_files_is_refused(make_tree: Make) -> None:
    tree = make_tree(17)
    state = loader(tree).state_dict()
    next(tree.rglob("*.jpg")).rename(tree / "class1" / "x.jpg")
    with pytest.raises(ValueError, match="does not fit: files was"):
        loader(tree).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": 10**6}, "position must be .* got 1000000"),
        ({"position": -3}, "position must be .* got -3"),
        ({"position": 1}, "contradicts itself"),
        ({"stream_epoch": 3}, "contradicts itself"),
        ({"stream_checkpoint": torch.empty(0, dtype=torch.uint8)}, "contradicts itself"),
    ],
)
def test_a_state_that_makes_no_sense_is_refused(make_tree: Make, change: dict[str, Any], message: str) -> None:
    lo = loader(make_tree(17))
    stream(islice(lo, 2))
    with pytest.raises(ValueError, match=message):
        lo.load_state_dict({**lo.state_dict(), **change})


def test_other_things_than_states_are_refused(make_tree: Make) -> None:
    lo = loader(make_tree(17))
    state = lo.state_dict()
    del state["stream_born"]
    with pytest.raises(ValueError, match="lacks stream_born"):
        lo.load_state_dict(state)
    with pytest.raises(ValueError, match="version is None"):
        lo.load_state_dict(None)  # type: ignore[arg-type]


def test_a_damaged_checkpoint_is_an_error_not_another_stream(make_tree: Make) -> None:
    lo = loader(make_tree(17))
    stream(islice(lo, 2))
    state = lo.state_dict()
    state["stream_checkpoint"] = state["stream_checkpoint"][:-7]
    lo.load_state_dict(state)
    with pytest.raises(ValueError, match="can't be restored"):
        next(iter(lo))


def test_a_function_that_mollifies_has_a_fingerprint_that_lasts(make_tree: Make) -> None:
    tree = make_tree(17)
    first = loader(tree, mollify=lambda images, labels, index, epoch: (images, labels))
    assert " at 0x" not in str(first.fingerprint)


def test_a_state_of_another_version_is_refused(make_tree: Make) -> None:
    lo = loader(make_tree(17))
    state = copy.deepcopy(lo.state_dict())
    state["version"] = 99
    with pytest.raises(ValueError, match="version is 99"):
        lo.load_state_dict(state)


# ------------------------------------------------------------------ life cycle


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


# ------------------------------------------------------------------ bad arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be .* got 0"),
        ({"batch_size": 2.5}, "batch_size must be an integer .* got 2.5"),
        ({"batch_size": 18}, "batch_size=18 is more than the 17 samples"),
        ({"size": 0}, "size must be .* got 0"),
        ({"resize": 8}, "resize must be .* got 8"),
        ({"seed": -1}, "seed must be .* got -1"),
        ({"num_threads": 0}, "num_threads must be .* got 0"),
        ({"prefetch": 0}, "prefetch must be .* got 0"),
        ({"decoder": "gpu"}, "decoder must be one of 'mixed', 'cpu', got 'gpu'"),
        ({"hw_decoder_load": 1.5}, r"hw_decoder_load must be in \[0, 1\], got 1.5"),
        ({"augment": "fcr+augmx"}, r"augment must be none, fc, fcr, .* got 'fcr\+augmx': did you mean 'fcr\+augmix'"),
        ({"augment": "fc+augmix", "fused": False}, r"fused must not be False for augment='fc\+augmix'"),
        (
            {"augment": "fc+mixup", "mollify": fastmoll.Mollify(3, mix="cutmix")},
            "augment says mixup, but mollify has mix='cutmix'",
        ),
        ({"dali_augment": "blur"}, r"dali_augment must be callable, got 'blur'"),
        ({"device": "tpu"}, "device must be .* got 'tpu'"),
        ({"device": "mps"}, "device must be .* got 'mps'"),
        ({"rank": 2, "world_size": 2}, r"rank must be an integer in \[0, 2\), got 2"),
        ({"rank": 1}, "rank and world_size belong together"),
        ({"rank": 0, "world_size": 18}, "17 samples for 18 ranks"),
        ({"split": "val", "rank": 0, "world_size": 18}, "17 samples for 18 ranks"),
        ({"mean": (1, 2)}, r"mean must be three numbers, got \(1, 2\)"),
        ({"mean": 0.5}, "mean must be three numbers, got 0.5"),
        ({"std": (1, 0, 1)}, r"std\[1\] must be a finite number above 0.0, got 0"),
        ({"dtype": torch.bfloat16}, "dtype must be torch.float32, .* got torch.bfloat16"),
        ({"mollify": 5}, "mollify must be callable, got 5"),
        ({"mollify": fastmoll.Mollify(4)}, "num_classes=4, but .* has 3 class folders"),
    ],
)
def test_bad_arguments_are_named_before_work_starts(make_tree: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader(make_tree(17), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_cuda_asked_for_and_absent(make_tree: Make) -> None:
    with pytest.raises(ValueError, match="no CUDA device"):
        loader(make_tree(17), device="cuda")


def test_a_process_group_that_was_forgotten_is_an_error(make_tree: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE=2 is set, but torch"):
        loader(make_tree(17))
    loader(make_tree(17), rank=0, world_size=1)


def test_dali_that_is_missing_or_there_twice_is_explained(make_tree: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree(17)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: "2.4.0")
        with pytest.raises(ImportError, match="cuda120 and nvidia-dali-cuda130 are both installed"):
            loader(tree)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'fastmoll\[cu12\]'"):
        loader(tree)


def test_negative_epoch(make_tree: Make) -> None:
    with pytest.raises(ValueError, match="got -1"):
        loader(make_tree(17)).set_epoch(-1)


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
