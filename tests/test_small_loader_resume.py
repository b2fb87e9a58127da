"""Tests of the loader of small images that goes on where a state was saved, or begins an epoch again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_loaders import assert_same, by_sample, data, ids, loader

import fastmoll
from fastmoll.small_loader import SmallImageLoader


@pytest.mark.parametrize("stop", [1, 3, 5, 7])
@pytest.mark.parametrize("targets", ["dense", "short"])
def test_a_saved_state_goes_on_bit_for_bit(tmp_path: Path, stop: int, targets: str) -> None:
    def make() -> SmallImageLoader:
        return loader(mollify=fastmoll.Mollify(5, seed=3, targets=targets))

    def flat(batch: Any) -> list[Any]:
        images, made, index = batch
        return [images, *(made[:2] if targets == "short" else [made]), index]

    uninterrupted = make()
    whole = [flat(batch) for _ in range(3) for batch in uninterrupted]
    interrupted, taken = make(), 0
    while taken < stop:
        for _ in interrupted:
            taken += 1
            if taken == stop:
                torch.save(interrupted.state_dict(), tmp_path / "state.pt")
                break
    resumed = make()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    resumed.set_epoch(resumed.epoch)  # as a trainer does at the head of its loop
    rest = []
    while len(rest) < len(whole) - stop:
        rest += [flat(batch) for batch in resumed]
    assert_same(rest, whole[stop:])


def test_break_begins_the_epoch_again_and_a_finished_one_leads_to_the_next() -> None:
    one = loader()
    first = next(iter(one))
    whole = list(one)
    assert_same([first], whole[:1])
    assert one.epoch == 1
    assert ids(one) != ids(whole) and one.epoch == 2
    old = iter(one)
    next(old)
    next(iter(one))
    with pytest.raises(RuntimeError, match="another one began"):
        next(old)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 1), (2, 4)])
def test_another_number_of_ranks_goes_on_with_the_same_images(before: int, after: int) -> None:
    def ranks(world: int) -> list[SmallImageLoader]:
        return [loader(batch_size=4 // world, rank=rank, world_size=world) for rank in range(world)]

    old, new = ranks(before), ranks(after)
    for one in old:
        next(iter(one))
    states = [one.state_dict() for one in old]
    for one in (*old, *new):
        one.load_state_dict(states)
    for _ in range(2):  # the rest of this epoch and the next, step by step
        for theirs, ours in zip(zip(*old, strict=True), zip(*new, strict=True), strict=True):
            found, expected = by_sample(ours), by_sample(theirs)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[sample][0], expected[sample][0]) for sample in found)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"batch_size": 5}, "batch_size"),
        ({"seed": 4}, "seed"),
        ({"rank": 1, "world_size": 2}, "world_size"),
        ({"augment": "fcr"}, "augment"),
        ({"augment": torch.nn.Identity()}, "augment"),
        ({"train": False}, "train"),
        ({"std": (0.1, 0.1, 0.1)}, "std"),
        ({"mollify": fastmoll.Mollify(5)}, "mollify"),
        ({"of": data(24)}, "data"),
    ],
)
def test_the_state_of_another_loader_is_refused_by_name(change: dict[str, Any], name: str) -> None:
    state = loader().state_dict()
    with pytest.raises(ValueError, match=f"loader state does not fit: {name} was "):
        loader(**change).load_state_dict(state)


def test_what_is_no_state_is_refused() -> None:
    one = loader()
    state = one.state_dict()
    for bad, message in (
        ({}, "version is None"),
        ({**state, "version": 9}, "version is 9"),
        ({k: v for k, v in state.items() if k != "position"}, "lacks position"),
        ({**state, "position": 6}, r"state's position must be an integer in \[0, 6\), got 6"),
        ({**state, "fingerprint": None}, "state's fingerprint must be a dict, got None"),
        ({**state, "epoch": -1}, r"state's epoch must be an integer in \[0, 16777217\), got -1"),
        ({**state, "epoch": 2**70}, rf"state's epoch must be an integer in \[0, 16777217\), got {2**70}"),
    ):
        with pytest.raises(ValueError, match=message):
            one.load_state_dict(bad)
    assert len(list(one)) == 5
