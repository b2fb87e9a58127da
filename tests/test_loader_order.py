"""`ImageNetLoader`: order, shards and epochs."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from imagenet_loaders import Make, equal, ids, loader, stream


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
