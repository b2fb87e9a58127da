"""`SmallImageLoader`: a data set that stays on the device, batches of it augmented and mollified there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastmoll.augment import Augment, check_augment, check_augmented, parse_augment
from fastmoll.epochs import EpochLoader, Epochs, describe, share_out, states_for
from fastmoll.kernels.batch_tail import DTYPES, batch_tail
from fastmoll.kernels.checks import check_choice, check_integer, check_triple
from fastmoll.kernels.soft_labels import SoftLabels
from fastmoll.mollify import with_mix
from fastmoll.pipelines.files import warn_of_shift
from fastmoll.pipelines.small import SmallData, read_small, standardisation
from fastmoll.placement import resolve_device, resolve_rank

_STATE_VERSION = 1

_TOGETHER: Final = {"cpu": 1024, "cuda": 2048}
"""Images that are augmented together, at least a batch; and at most so many bytes of them:"""
_TOGETHER_BYTES: Final = 2**25

Augmentation = Callable[[Tensor, Tensor, int], Tensor]


class _Order(NamedTuple):
    """The samples of this rank in an epoch."""

    samples: Tensor
    labels: Tensor
    on_device: Tensor
    """The samples once more."""


class SmallImageLoader(EpochLoader):
    """Batches of a data set of small images, kept on the device as uint8.

    A batch is gathered, augmented, standardised and mollified where it lies; on a GPU nothing waits for the device, and
    no CPU is needed. Every draw is a function of (seed, epoch, sample id).

    Training (``split="train"``): the order is drawn anew each epoch from (seed, epoch). A step takes the next
    ``batch_size * world_size`` samples of it, rank after rank, so that the images of a step depend on that product
    alone (MixUp and CutMix pair those of one rank); the few samples at its end that fill no step are left out, other
    ones each epoch. Evaluation (any other split): every sample exactly once over all ranks, in order; the last batch of
    a rank may be smaller, and ranks may differ by one batch.

    A new ``for`` starts an epoch from its beginning: the next one after a finished pass, the same one, with the same
    images, after a ``break``. After `load_state_dict` the next ``for`` goes on in the middle.

    Attributes:
        data: The split, on the CPU.
        root: What it was read from.
        classes: Class names; a target is a position here.
        num_samples: Samples of the whole split, over all ranks.
        mean: Mean per channel that is subtracted, for pixels in [0, 1].
        std: Standard deviation per channel that is divided by.
    """

    def __init__(
        self,
        data: str | os.PathLike[str] | SmallData,
        split: str = "train",
        batch_size: int = 128,
        augment: str | Augmentation = "fcr+trivial",
        mollify: Callable[..., tuple[Tensor, Tensor | SoftLabels]] | None = None,
        device: str | torch.device = "auto",
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        train: bool | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        return_index: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Check every argument, read the images and bring them to the device.

        Args:
            data: Name or path of a data set (see `fastmoll.pipelines.small.read_small`), or a split that was read.
            split: ``"train"``, ``"val"``, or another one that the data set has.
            batch_size: Samples a batch on this rank.
            augment: Training augmentation: a name (see `fastmoll.augment.parse_augment`), in which ``mixup`` and
                ``cutmix`` mix all batches (targets are then soft labels also without ``mollify``), or any function of
                ``(images, index, epoch)``, uint8 ``(B, H, W, 3)`` and int64 ``(B,)`` on the device and an int, to
                images of the same kind, also of another size. It is called for one batch at a time, an object of a
                subclass of `fastmoll.Augment` too; that class itself does several batches together.
            mollify: A `fastmoll.Mollify`, called as ``mollify(images, labels, index=sample_ids, epoch=epoch)``.
            device: ``"cpu"``, ``"cuda"``, ``"cuda:<n>"``, or ``"auto"``: the current GPU where there is one.
            seed: Seed of order and augmentation.
            rank: Global rank; by default torch.distributed's, 0 where it is not initialised.
            world_size: Number of ranks; likewise, 1.
            path: Where a named data set is.
            train: Shuffle and augment; by default exactly for ``split="train"``.
            mean: Mean per channel for pixels in [0, 1], subtracted; by default the published one of a known data set,
                or that of the training images.
            std: Standard deviation per channel, divided by; likewise. Both are given, or none.
            return_index: Give ``(images, targets, index)`` with the int64 ``(B,)`` sample ids, on the CPU.
            dtype: Of the images: float32, bfloat16 or float16.

        Raises:
            ValueError: A bad argument, unusable data, fewer samples than ranks, fewer than one batch a rank in
                training, ``mollify.num_classes`` other than the number of classes, or a GPU asked for and absent.
            ImportError: The digits without scikit-learn.

        Warns:
            UserWarning: A label of this split is another class than in the folder ``train`` beside it.
        """
        self._device = resolve_device(device)
        self._rank, self._world_size = resolve_rank(rank, world_size)
        self._train = split == "train" if train is None else train
        self._batch_size = check_integer("batch_size", batch_size, 1)
        self._seed = check_integer("seed", seed, 0, 2**63)
        check_choice("dtype", dtype, DTYPES)
        if mollify is not None and not callable(mollify):
            raise ValueError(f"mollify must be callable, got {mollify!r}")
        if (mean is None) != (std is None):
            raise ValueError(f"mean and std belong together, got mean={mean} and std={std}")

        self.data = data if isinstance(data, SmallData) else read_small(data, split, path)
        self.root = self.data.root
        self.classes = self.data.classes
        self.num_samples = len(self.data)
        if not isinstance(data, SmallData) and self.data.name is None and split != "train":
            warn_of_shift(data, self.classes, self.root)
        if mean is None or std is None:
            if isinstance(data, SmallData) and not self._train and data.name is None:
                raise ValueError(f"mean and std must be given for {self.root}: those of the training images")
            own = self._train or isinstance(data, SmallData)
            mean, std = standardisation(self.data if own else data, path)
        self.mean, self.std = check_triple("mean", mean), check_triple("std", std, above=0.0)
        first, end, length = share_out(
            self.root, self.num_samples, self._rank, self._world_size, self._batch_size, train=self._train
        )
        self._augment_name = describe(augment if self._train else "none")
        self._augment: Augmentation | None = None
        mix = None
        if self._train:
            self._augment, mix = self._resolve(augment)
        self._mollify, self._after = with_mix(mollify, mix, len(self.classes), self._seed, self.root)

        self._shard = (first, end)
        self._images: Tensor | None = _tensor(self.data.images).to(self._device)
        self._labels = _tensor(self.data.labels)
        self._dtype = dtype
        self._return_index = return_index
        self._place = Epochs(length)
        self._order: tuple[int, _Order] | None = None  # of an epoch
        self._augmented: tuple[int, int, Tensor] | None = None  # epoch, first row of its order, images

    def _resolve(self, augment: str | Augmentation) -> tuple[Augmentation | None, str | None]:
        """What is done to the pixels of a batch, and how its images are mixed."""
        height, width = self.data.images.shape[1:3]
        if not isinstance(augment, str):
            check_augment(augment, height, width)
            return augment, augment.spec.mix if isinstance(augment, Augment) else None
        spec = parse_augment(augment)
        if spec.base == "none" and spec.policy is None:
            return None, spec.mix
        if height != width:
            raise ValueError(f"augment={augment!r} needs squares, but {self.root} has {height} x {width} pixels")
        return Augment(spec, size=width, seed=self._seed), spec.mix

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Give ``(images, targets)``, or ``(images, targets, index)``, for one epoch.

        ``images`` are ``(B, 3, H, W)`` of the loader's ``dtype``, standardised, in channels-last memory; ``targets``
        int64 ``(B,)``, or what ``mollify`` makes of them: float32 ``(B, K)``, or `fastmoll.SoftLabels` from a
        ``Mollify(targets="short")``. Both are on the loader's device, ``M·B`` of each from ``Mollify(draws=M)``.

        Raises:
            ValueError: ``augment`` is a function that gives something else than it should.
            RuntimeError: The loader was closed, or another ``for`` over it began.
        """
        self._require_open()
        return self._batches(self._place.begin())

    def _batches(self, token: object) -> Iterator[tuple[Any, ...]]:
        place = self._place
        while place.position < place.length:
            images = self._require_open()
            place.require(token)
            order = self._order_of(place.epoch)
            rows = slice(place.position * self._batch_size, (place.position + 1) * self._batch_size)
            batch = self._batch(self._pixels(images, order, rows), *(part[rows] for part in order))
            place.position += 1  # only now: what a function of the user's failed at has not been handed out
            yield batch
        place.end(token)

    def _order_of(self, epoch: int) -> _Order:
        if self._order is None or self._order[0] != epoch:
            if self._train:
                # Counter-based like all other draws: the order follows from (seed, epoch).
                key = np.array([self._seed, epoch], np.uint64)
                whole = np.random.Generator(np.random.Philox(key=key)).permutation(self.num_samples)
                used = len(self) * self._world_size * self._batch_size
                steps = torch.from_numpy(whole[:used]).view(len(self), self._world_size, self._batch_size)
                index = steps[:, self._rank].flatten()
            else:
                index = torch.arange(*self._shard, device="cpu")
            labels = self._labels[index]
            if self._device.type == "cuda":
                # From pinned memory a copy waits neither for the stream nor for the host.
                index, labels = index.pin_memory(), labels.pin_memory()
            self._order = epoch, _Order(index, labels, index.to(self._device, non_blocking=True))
        return self._order[1]

    def _pixels(self, images: Tensor, order: _Order, rows: slice) -> Tensor:
        """The augmented images of a batch."""
        if type(self._augment) is not Augment:  # a subclass may look at its batch, as any function may
            chosen = order.on_device[rows]
            if self._augment is None:
                return images[chosen]
            return check_augmented(self._augment(images[chosen], chosen, self.epoch), len(chosen), self._device)
        # What is drawn for an image follows from its id alone, so batches can be augmented together. A GPU is done with
        # one of them sooner than the host has launched its operations, which cost as much for many images.
        most = min(_TOGETHER.get(self._device.type, 0), _TOGETHER_BYTES // images[0].numel())
        together = max(1, most // self._batch_size) * self._batch_size
        start = rows.start // together * together
        if self._augmented is None or self._augmented[:2] != (self.epoch, start):
            part = slice(start, start + together)
            # Draws made on the CPU tell the host which images an operation is for, without asking the device.
            self._augmented = None  # frees the memory of those before
            pixels = self._augment(images[order.on_device[part]], order.samples[part], self.epoch)
            self._augmented = self.epoch, start, pixels
        return self._augmented[2][rows.start - start : rows.stop - start]

    def _batch(self, pixels: Tensor, index: Tensor, labels: Tensor, chosen: Tensor) -> tuple[Any, ...]:
        mollify, epoch = self._mollify, self.epoch
        tail: dict[str, Any] = {"mean": self.mean, "std": self.std, "dtype": self._dtype}
        targets: Tensor | SoftLabels
        if mollify is None:
            out, targets = batch_tail(pixels, **tail), labels.to(self._device, non_blocking=True)
        else:
            # Labels and ids from the CPU, where their values can be checked without waiting.
            out, targets = mollify.from_pixels(pixels, labels, index, epoch, **tail)
        if self._after is not None:
            out, targets = self._after(out, targets, index=chosen, epoch=epoch)
        return (out, targets, index) if self._return_index else (out, targets)

    def close(self) -> None:
        """Free the images on the device."""
        self._images = self._order = self._augmented = None

    def _require_open(self) -> Tensor:
        if self._images is None:
            raise RuntimeError(f"the loader over {self.root} was closed")
        return self._images

    @property
    def fingerprint(self) -> dict[str, int | str]:
        """What a state depends on; a state is only taken up by a loader that has all of it equal."""
        return {
            "data": self.data.fingerprint,
            "num_samples": self.num_samples,
            "batch_size": self._batch_size,
            "world_size": self._world_size,
            "rank": self._rank,
            "seed": self._seed,
            "train": int(self._train),
            "augment": self._augment_name,
            "mean": repr(self.mean),
            "std": repr(self.std),
            "mollify": describe(self._mollify if self._after is None else self._after),
        }

    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands: after the batch that was handed out last. Integers and strings only."""
        return {
            "version": _STATE_VERSION,
            "epoch": self._place.epoch,
            "position": self._place.position,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go on where a state was taken: the next ``for`` gives the rest of its epoch, bit for bit.

        Args:
            state: What `state_dict` gave on this rank; or, in training, what it gave on all ranks, in their order,
                whose number may have been another: with as many images a step, its steps have the same images.

        Raises:
            ValueError: Not a loader's state, or one of another data set, rank, batch size, seed or set-up; the message
                names what differs.
        """
        states, _ = states_for(state, self.state_dict())  # the order of an epoch does not depend on ranks
        self._place.restore(states[0]["epoch"], states[0]["position"])


def _tensor(array: NDArray[Any]) -> Tensor:
    """A tensor of an array's memory; of a copy where PyTorch can't take that: read-only, or running backwards."""
    return torch.from_numpy(array if array.flags.writeable and min(array.strides) >= 0 else array.copy())
