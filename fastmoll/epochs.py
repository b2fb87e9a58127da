"""What all loaders have in common: their manners, which samples are whose, and whether a saved state is its own."""

from __future__ import annotations

import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Self

from fastmoll.kernels.checks import check_integer
from fastmoll.kernels.philox import EPOCH_BITS
from fastmoll.pipelines.errors import counted


class Epochs:
    """Which batch of which epoch comes next, with the manners of a ``DataLoader``.

    A new ``for`` starts an epoch from its beginning: the next one after a finished pass, the same one after a
    ``break``. Where a state was restored it goes on in the middle.

    Attributes:
        length: Batches of an epoch.
        epoch: Epoch of the batch that comes next.
        position: Batches of it that were handed out.
    """

    def __init__(self, length: int) -> None:
        """Stand before the first batch of epoch 0."""
        self.length = length
        self.epoch = self.position = 0
        self._resuming = False  # the next `for` begins in the middle
        self._running: object | None = None  # token of the loop that the place belongs to

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next ``for``; one that a restored state is in the middle of is kept.

        Warns:
            UserWarning: it is another one, so that the restored state is lost before a ``for`` went on from there.

        Raises:
            ValueError: ``epoch`` is not an integer in [0, 2^24).
        """
        epoch = check_integer("epoch", epoch, 0, 2**EPOCH_BITS)
        if self._resuming and epoch != self.epoch:
            warnings.warn(
                f"set_epoch({epoch}) gives up the loaded state, which is in the middle of epoch {self.epoch}: begin "
                "with the loader's epoch to go on from there",
                stacklevel=3,
            )
        if epoch != self.epoch or self.position == self.length:
            self._move(epoch, 0)

    def begin(self) -> object:
        """Begin a ``for``; returns the token it shows before each batch."""
        if self.position == self.length:
            self._move(self.epoch + 1, 0)
        elif not self._resuming:
            self.position = 0
        self._resuming = False
        self._running = token = object()
        return token

    def require(self, token: object) -> None:
        """Raise ``RuntimeError`` where another ``for`` began since that of ``token``, or another epoch was chosen."""
        if self._running is not token:
            raise RuntimeError("this loop over the loader is over: another one began, or set_epoch was called")

    def end(self, token: object) -> None:
        """End the ``for`` of ``token`` after its last batch."""
        if self._running is token:
            self._move(self.epoch + 1, 0)

    def restore(self, epoch: int, position: int) -> None:
        """Stand where a state was saved.

        Raises:
            ValueError: there is no such place.
        """
        epoch = check_integer("state's epoch", epoch, 0, 2**EPOCH_BITS + 1)
        position = check_integer("state's position", position, 0, self.length + 1)
        if position == self.length:
            epoch, position = epoch + 1, 0
        self._move(epoch, position)

    def _move(self, epoch: int, position: int) -> None:
        self.epoch, self.position, self._running = epoch, position, None
        self._resuming = position > 0


class EpochLoader(ABC):
    """A loader with the manners of a ``DataLoader``; its batches are for subclasses to give."""

    _place: Epochs

    def __len__(self) -> int:
        """Batches an epoch on this rank; constant."""
        return self._place.length

    @property
    def epoch(self) -> int:
        """Epoch the next ``for`` gives (the running one inside a loop)."""
        return self._place.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next ``for``, as ``DistributedSampler.set_epoch`` does.

        An epoch that a loaded state is in the middle of is kept.

        Raises:
            ValueError: ``epoch`` is not an integer in [0, 2^24).
        """
        self._place.set_epoch(epoch)

    @abstractmethod
    def close(self) -> None:
        """Free what the loader holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def share_out(
    root: Path, samples: int, rank: int, world_size: int, batch_size: int, *, train: bool
) -> tuple[int, int, int]:
    """What a rank has of the samples in ``root``.

    Returns:
        In evaluation, the first of its samples and the one after its last; and the number of its batches.

    Raises:
        ValueError: fewer samples than ranks, or, in training, fewer than one batch a rank.
    """
    if samples < world_size:
        raise ValueError(f"{root} has {samples} samples for {world_size} ranks")
    first, end = (samples * r // world_size for r in (rank, rank + 1))
    if not train:
        return first, end, math.ceil((end - first) / batch_size)
    share = samples // world_size
    if share < batch_size:
        whose = f" that each of {world_size} ranks has" if world_size > 1 else ""
        raise ValueError(f"batch_size={batch_size} is more than the {counted(share, 'sample')} of {root}{whose}")
    return first, end, share // batch_size


def check_state(state: dict[str, Any], ours: dict[str, Any], free: Collection[str] = ()) -> None:
    """Refuse a state that is none, or another loader's.

    Args:
        state: What is to be loaded.
        ours: A state of this loader: its ``"version"`` and every number or string in its ``"fingerprint"`` must agree,
            but for the backend of a `fastmoll.Mollify`: all of them draw the same.
        free: What of the fingerprint need not agree.

    Raises:
        ValueError: names what differs.
    """
    if not isinstance(state, dict) or state.get("version") != ours["version"]:
        version = state.get("version") if isinstance(state, dict) else state
        raise ValueError(f"not a loader state of version {ours['version']}: version is {version!r}")
    missing = sorted(ours.keys() - state.keys())
    if missing:
        raise ValueError(f"loader state lacks {', '.join(missing)}")
    if not isinstance(state["fingerprint"], dict):
        raise ValueError(f"loader state's fingerprint must be a dict, got {state['fingerprint']!r}")
    for name, now in ours["fingerprint"].items():
        before = state["fingerprint"].get(name)
        if name not in free and _without_backend(before) != _without_backend(now):
            raise ValueError(f"loader state does not fit: {name} was {before!r} when it was saved, is {now!r} now")


def states_for(
    state: dict[str, Any] | Sequence[dict[str, Any]], ours: dict[str, Any]
) -> tuple[Sequence[dict[str, Any]], bool]:
    """The states that a loader goes on from.

    Args:
        state: What is to be loaded: a state, or those of all ranks, in their order.
        ours: A state of this loader, as `check_state` takes it.

    Returns:
        The state of this rank alone, and True; or, where their number was another, those of all ranks, and False.

    Raises:
        ValueError: names what differs, or why these are not the states of all ranks.
    """
    now = ours["fingerprint"]
    if isinstance(state, Sequence) and len(state) == now["world_size"]:
        state = state[now["rank"]]
    if not isinstance(state, Sequence):
        check_state(state, ours)
        return [state], True
    if not state or not now["train"]:
        wanted = f"world_size={now['world_size']}, or in training of any number of ranks"
        raise ValueError(f"loader states must be those of {wanted}, got {len(state)}")
    for rank, one in enumerate(state):
        check_state(one, ours, ("batch_size", "rank", "world_size"))
        before = one["fingerprint"]
        if (before["rank"], before["world_size"]) != (rank, len(state)):
            raise ValueError(
                f"loader states must be those of all ranks in order: number {rank} of {len(state)} is of rank "
                f"{before['rank']} of {before['world_size']}"
            )
        if (one["epoch"], one["position"]) != (state[0]["epoch"], state[0]["position"]):
            raise ValueError(f"loader states are not of one moment: those of ranks 0 and {rank} differ in their place")
    if before["batch_size"] * before["world_size"] != now["batch_size"] * now["world_size"]:
        raise ValueError(
            f"loader states are of world_size={before['world_size']} with batch_size={before['batch_size']}: "
            f"{now['world_size']} must have as many images together, got batch_size={now['batch_size']}"
        )
    return state, False


def _without_backend(value: Any) -> Any:
    # Of a Mollify alone: a user's function may do something else with another backend.
    return re.sub(r"(?<=\(num_classes=)(.*) backend='\w+',", r"\1", value) if isinstance(value, str) else value


def describe(function: object) -> str:
    """What a function is, the same in every process; most objects' own ``repr`` shows where in memory they lie.

    Args:
        function: A function, an object that is called like one, the name of one, or None.
    """
    if isinstance(function, str):
        return function
    if hasattr(function, "__qualname__"):
        return f"{function.__module__}.{function.__qualname__}"
    return re.sub(" at 0x[0-9a-f]+", "", repr(function))
