"""``Mollify`` without sample ids: images are numbered as they come, in each process by itself, and after a resume."""

import io
import os
import pickle
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from mollify_batches import CLASSES, batch

from fastmoll.mollify import Mollify
from fastmoll.mollify_batch import _COUNTING


def test_images_without_ids_are_numbered_as_they_come():
    images, labels, _ = batch()
    counting, explicit = Mollify(CLASSES), Mollify(CLASSES)
    for start, size in ((0, 24), (24, 10), (34, 24)):
        out, targets = counting(images[:size], labels[:size])
        want, want_targets = explicit(images[:size], labels[:size], torch.arange(start, start + size))
        assert torch.equal(out, want)
        assert torch.equal(targets, want_targets)


def test_threads_share_the_count():
    mollify = Mollify(2, roles=(0, 0, 0, 1))
    images, labels = torch.zeros(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            noises = torch.cat([*pool.map(lambda _: mollify(images, labels)[0], range(500))])
    finally:
        sys.setswitchinterval(before)
    assert len(noises.flatten(1).unique(dim=0)) == 2000


def test_a_process_that_is_forked_while_a_thread_counts_counts_too():
    mollify, (images, labels, _) = Mollify(CLASSES), batch()
    counting = threading.Event()

    def count():
        with _COUNTING:
            counting.set()
            time.sleep(0.2)

    thread = threading.Thread(target=count)
    thread.start()
    counting.wait()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)  # which ends it
            mollify(images, labels)
            os._exit(0)
        finally:
            os._exit(1)
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_one_that_was_made_for_inference_counts_outside_of_it():
    images, labels, _ = batch()
    with torch.inference_mode():
        mollify = Mollify(CLASSES)
    mollify(images, labels)
    assert mollify.get_extra_state() == len(images)


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
    def __init__(self, *given):
        self.given, self.mollify = given, Mollify(CLASSES)

    def __call__(self, samples):
        index = torch.tensor(samples)
        images, labels = torch.zeros(len(samples), 1, 4, 4), index % CLASSES
        numbers = {"index": index, "epoch": 0}
        return self.mollify(images, labels, **{name: numbers[name] for name in self.given})


@pytest.mark.parametrize("given", [(), ("epoch",), ("index",)])
def test_a_loader_worker_must_give_ids_and_epoch(given):
    lacking = "epoch" if given == ("index",) else "index"
    with pytest.raises(ValueError, match=f"{lacking} must be given .*inside a DataLoader worker, got None"):
        next(iter(torch.utils.data.DataLoader(range(8), 4, num_workers=1, collate_fn=Collate(*given))))


def test_a_loader_worker_draws_as_this_process_does():
    batches = list(torch.utils.data.DataLoader(range(8), 4, num_workers=1, collate_fn=Collate("index", "epoch")))
    want = Collate("index")([4, 5, 6, 7])
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
