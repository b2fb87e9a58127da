"""`ImageNetLoader`: states, and the identical stream after a resume."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from imagenet_loaders import Make, equal, ids, loader, stream
from torch import Tensor

import fastmoll
from fastmoll.epochs import Epochs, check_state


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


def test_a_loop_that_begins_anew_is_told_that_it_gives_up_the_loaded_state() -> None:
    place = Epochs(5)
    place.restore(2, 3)
    place.set_epoch(2)
    assert place.position == 3
    with pytest.warns(UserWarning, match=r"set_epoch\(0\) gives up the loaded state, .* in the middle of epoch 2"):
        place.set_epoch(0)
    place.set_epoch(1)
    assert (place.epoch, place.position) == (1, 0)


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


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda lo: pickle.loads(pickle.dumps(lo))])
def test_a_copy_of_a_running_loader_is_one_of_its_own_at_the_same_place(
    make_tree: Make, copied: Callable[[Any], Any]
) -> None:
    tree = make_tree(17)
    expected = stream(loader(tree))
    first = loader(tree)
    batches = iter(first)
    stream(islice(batches, 2))
    with copied(first) as second:
        third = loader(tree)
        third.load_state_dict(saved(second.state_dict()))
        assert equal(stream(third), expected[2:])
        assert equal(stream(second), expected)  # as the loop after a break
    assert equal(stream(batches), expected[2:])


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


def test_another_backend_goes_on_with_the_same_draws_but_no_other_setting_may_change(make_tree: Make) -> None:
    tree = make_tree(17)
    first, second = (loader(tree, mollify=fastmoll.Mollify(3, backend=backend)) for backend in ("auto", "torch"))
    expected = stream(first)
    first.set_epoch(0)
    stream(islice(first, 2))
    second.load_state_dict(saved(first.state_dict()))
    assert equal(stream(second), expected[2:])
    with pytest.raises(ValueError, match="does not fit: mollify was"):
        loader(tree, mollify=fastmoll.Mollify(3, backend="torch", k_blur=2.0)).load_state_dict(first.state_dict())
    ours, theirs = ({"version": 1, "fingerprint": {"augment": f"Own(backend='{x}', size=8)"}} for x in ("cv", "pil"))
    with pytest.raises(ValueError, match="does not fit: augment was"):  # which may well be another augmentation
        check_state(theirs, ours)


@pytest.mark.parametrize(("stop", "before", "after"), [(1, 2, 4), (2, 4, 1), (3, 1, 2), (5, 2, 1), (0, 2, 4)])
def test_on_another_number_of_ranks_what_is_left_of_an_epoch_comes_once(
    make_tree: Make, stop: int, before: int, after: int
) -> None:
    tree = make_tree(43)  # 5 steps of 8, and 3 samples that this epoch leaves out

    def ranks(world: int, states: list[dict[str, Any]] | None = None) -> list[fastmoll.ImageNetLoader]:
        made = [loader(tree, batch_size=8 // world, rank=rank, world_size=world) for rank in range(world)]
        for one in made if states is not None else ():
            one.load_state_dict(states)
        return made

    old = ranks(before)
    first = [i for one in old for i in ids(islice(one, stop))]
    states = [saved(one.state_dict()) for one in old]
    new, twins = ranks(after, states), ranks(after, states)
    if stop not in (0, 5):
        rest = [stream(one) for one in new]
        begun = [stream(islice(one, 1)) for one in twins]
        states = [saved(one.state_dict()) for one in twins]
        # Stopped once more: as many ranks go on bit for bit, and another number goes on, too.
        resumed = [a + stream(one) for a, one in zip(begun, ranks(after, states), strict=True)]
        assert all(equal(ours, theirs) for ours, theirs in zip(resumed, rest, strict=True))
        others = [i for one in ranks(8, states) for i in ids(one)] + [i for part in begun for i in ids(part)]
        for found in ([i for part in rest for i in ids(part)], others):
            assert len(found) == 8 * (5 - stop) and len({*first, *found}) == 40
    for epoch in (1, 2) if stop else (0, 1):  # those that follow are whole
        assert [one.epoch for one in new] == [epoch] * after
        found = [i for one in new for i in ids(one)]
        assert len(found) == len({*found}) == 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda states: states[:1], "number 0 of 1 is of rank 0 of 2"),
        (lambda states: [*states[::-1], states[0]], "number 0 of 3 is of rank 1 of 2"),
        (lambda states: [states[0], {**states[1], "position": 2}], "those of ranks 0 and 1 differ in their place"),
        (lambda states: [{**states[0], "seen": states[0]["seen"][:1]}, states[1]], "1 bytes are no bits of 43 samples"),
        (lambda states: [], "got 0"),
    ],
)
def test_states_that_are_not_those_of_all_ranks_are_refused(
    make_tree: Make, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], message: str
) -> None:
    tree = make_tree(43)
    old = [loader(tree, rank=rank, world_size=2) for rank in range(2)]
    for one in old:
        stream(islice(one, 1))
    states = [one.state_dict() for one in old]
    four = {"batch_size": 2, "rank": 1, "world_size": 4}
    with pytest.raises(ValueError, match=message):
        loader(tree, **four).load_state_dict(change(states))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 3}, "of world_size=2 with batch_size=4: 4 must have as many images together, got batch_size=3"),
        ({"seed": 1}, "does not fit: seed was"),
        ({"train": False}, "those of world_size=4, or in training of any number of ranks, got 2"),
    ],
)
def test_another_number_of_ranks_must_have_the_same_set_up(
    make_tree: Make, options: dict[str, Any], message: str
) -> None:
    tree = make_tree(43)
    states = [loader(tree, rank=rank, world_size=2).state_dict() for rank in range(2)]
    with pytest.raises(ValueError, match=message):
        loader(tree, **{"batch_size": 2, "rank": 1, "world_size": 4, **options}).load_state_dict(states)


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
        ({"stream_epoch": 3}, "contradicts itself: batch 2 of epoch 0, stream at batch 2 of epoch 3$"),
        ({"stream_checkpoint": torch.empty(0, dtype=torch.uint8)}, "contradicts itself"),
        ({"stream_checkpoint": [1, 2]}, r"state's stream_checkpoint must be a torch\.Tensor, got list"),
        ({"seen": torch.zeros(3)}, "state's seen must be torch.uint8, got torch.float32"),
        ({"epoch": 2**70, "position": 0}, f"state's epoch must be .* got {2**70}"),
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
