"""The endless stream of a DALI graph, with a position that can be read, saved, restored and moved."""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
import warnings
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.dlpack
from numpy.typing import NDArray
from nvidia.dali import Pipeline
from PIL import Image
from torch import Tensor

from fastmoll.kernels.checks import check_integer, check_tensor
from fastmoll.pipelines import imagenet
from fastmoll.pipelines.diagnose import diagnose_files
from fastmoll.pipelines.errors import BadImageError, BadImageWarning
from fastmoll.pipelines.files import ImageFolder
from fastmoll.pipelines.imagenet import GraphConfig


@dataclass(frozen=True)
class Position:
    """Where a stream stands, and all it takes to stand there again.

    Attributes:
        born: Epoch the stream was begun at. Orders and augmentations follow from (seed, born): DALI draws the order of
            the next epoch itself, but can't be told to begin at a given one.
        epoch: Epoch of the batch that comes next.
        batch: Its number in the epoch.
        checkpoint: DALI's state there; None at the very beginning.
        epoch_start: DALI's state at batch 0 of ``epoch``; None likewise.
        without: Samples that are left out in this epoch, since other ranks than there are now had them, as the bits of
            ``numpy.packbits``; None for none.
    """

    born: int
    epoch: int
    batch: int
    checkpoint: bytes | None = None
    epoch_start: bytes | None = None
    without: bytes | None = None

    def to_state(self) -> dict[str, Any]:
        """As a part of a loader's state: integers and uint8 tensors."""
        return {f"stream_{name}": _packed(value) for name, value in vars(self).items()}

    @classmethod
    def from_state(cls, state: dict[str, Any], length: int) -> Position:
        """What `to_state` gave, in the state of a loader that stands there, with epochs of ``length`` batches.

        Raises:
            ValueError: it is no such state; the message names what is wrong.
        """
        born, epoch, batch = (
            check_integer(f"state's stream_{name}", state[f"stream_{name}"], 0, end)
            for name, end in (("born", None), ("epoch", None), ("batch", length + 1))
        )
        parts = (f"stream_{name}" for name in ("checkpoint", "epoch_start", "without"))
        found = cls(born, epoch, batch, *(bytes_of(state, part) or None for part in parts))
        place, begun = (state["epoch"], state["position"]), found.checkpoint is not None or found.without is not None
        if (place[1] and place != (epoch, batch)) or (batch and not begun):
            where = f"stream at batch {batch} of epoch {epoch}{'' if begun else ' without a checkpoint'}"
            raise ValueError(f"loader state contradicts itself: batch {place[1]} of epoch {place[0]}, {where}")
        return found


def bytes_of(state: dict[str, Any], part: str) -> bytes:
    """What a uint8 tensor in a loader's state holds.

    Raises:
        ValueError: it is none.
    """
    check_tensor(f"state's {part}", state[part], (None,), (torch.uint8,), None)
    return bytes(state[part].tolist())


def _packed(value: int | bytes | None) -> int | Tensor:
    if isinstance(value, int):
        return value
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else empty


class Batch(NamedTuple):
    """What the graph gives.

    Attributes:
        images: float32 or uint8 ``(B, H, W, 3)`` on the graph's device.
        samples: Sample ids, int64 ``(B,)``, on the CPU.
        flip: Which images are still to be mirrored, bool ``(B,)``, on the CPU; None for none.
    """

    images: Tensor
    samples: Tensor
    flip: Tensor | None


_STREAMS: weakref.WeakSet[Stream] = weakref.WeakSet()
_FIRST_PROCESS = os.getpid()


class Stream:
    """Batches of ``(images, sample ids)``; pads as the graph pads: every epoch has ``padded_length`` batches."""

    def __init__(
        self,
        config: GraphConfig,
        folder: ImageFolder,
        seed: int,
        length: int,
        padded_length: int,
        *,
        substitute: bool = False,
    ) -> None:
        """Describe the stream; the pipeline is built when the first batch is asked for.

        Args:
            config: The graph.
            folder: The samples.
            seed: Seed of orders and augmentations.
            length: Batches of an epoch that are used; the rest is skipped on the way to the next epoch.
            padded_length: Batches of an epoch that the graph gives.
            substitute: Put another of its class in the place of an image that can't be decoded, and go on.
        """
        self._config = config
        self._folder = folder
        self._seed = seed
        self._length = length
        self._padded_length = padded_length
        self._substitute = substitute
        self._replaced: dict[int, int] = {}
        self._pipeline: Pipeline | None = None
        self.position = Position(0, 0, 0)
        _STREAMS.add(self)

    def __getstate__(self) -> dict[str, Any]:
        # A pipeline can't be copied: a copy stands at the same place, and builds its own.
        return {**self.__dict__, "_pipeline": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _STREAMS.add(self)

    def restore(self, position: Position) -> None:
        """Stand where a position was read."""
        self._pipeline = None
        self.position = position

    def seek(self, epoch: int, batch: int) -> None:
        """Stand before ``batch`` of ``epoch``: the present place, the beginning of this epoch or that of another."""
        here = self.position
        if (here.epoch, here.batch) == (epoch, batch):
            return
        if batch != 0:
            raise ValueError(f"can't move from batch {here.batch} of epoch {here.epoch} to batch {batch} of {epoch}")
        if here.without is not None:  # a stream of the rest of an epoch has no next one, nor a beginning
            self.restore(Position(epoch, epoch, 0))
        elif epoch == here.epoch + 1 and here.batch >= self._length:
            for _ in range(self._padded_length - here.batch):
                self.next()
            end = self.position.checkpoint
            self.position = Position(here.born, epoch, 0, end, end)
        elif epoch == here.epoch:
            self.restore(Position(here.born, epoch, 0, here.epoch_start, here.epoch_start))
        else:
            self.restore(Position(epoch, epoch, 0))

    def next(self) -> Batch:
        """The next batch.

        Raises:
            BadImageError: A file of the batch can't be decoded, and no other takes its place.
            ValueError: ``dali_augment`` gives images of another size.
        """
        while True:
            if self._pipeline is None:
                self._pipeline = self._build(self._folder)
            try:
                batch = _run(self._pipeline, self._config)
                break
            except ValueError:
                self._pipeline = None  # it is a batch ahead
                raise
            except RuntimeError as error:
                self._pipeline = None  # DALI's pipeline can't be used after an error
                bad, reason = self._explain(error)
                if not (self._substitute and self._replace(bad, reason)):
                    raise reason from error
        here = self.position
        self.position = replace(here, batch=here.batch + 1, checkpoint=self._pipeline.checkpoint())
        return batch

    def _replace(self, bad: list[int], reason: BadImageError) -> bool:
        """Put others in the places of bad samples, where each of them has one; returns whether that is so.

        DALI's state before them fits the new list, which is as long: all that is random in the batches that follow is
        as if there had been no error.
        """
        why = dict(reason.files)
        for sample in bad:
            other = self._other(sample)
            if other is None:
                return False
            path = self._folder.path(self._replaced.get(sample, sample))
            instead = f"{self._folder.paths[other]} takes its place"
            warnings.warn(f"{path}: {why[path]}; {instead}", BadImageWarning, stacklevel=3)
            self._replaced[sample] = other
        return bool(bad)

    def close(self) -> None:
        """Free the pipeline; the position stays."""
        self._pipeline = None  # DALI shuts down with the last reference

    def forget(self) -> None:
        """Leave the pipeline to the process this one was forked from, and build another when one is needed.

        Its threads don't exist here, and shutting it down would wait for them for ever: it is never freed.
        """
        if self._pipeline is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pipeline))
            self._pipeline = None

    def _build(self, folder: ImageFolder) -> Pipeline:
        born, checkpoint, packed = self.position.born, self.position.checkpoint, self.position.without
        without = None if packed is None else unpack(packed, len(folder))
        try:
            return imagenet.build(
                self._config,
                folder,
                seed=_mix(self._seed, born, self._config.rank),
                shuffle_seed=_mix(self._seed, born),
                checkpoint=checkpoint,
                map_files=os.getpid() == _FIRST_PROCESS,
                without=without,
                replaced=self._replaced,
            )
        except RuntimeError as error:
            if checkpoint is None:
                raise
            raise ValueError(f"the loader state's checkpoint of {len(checkpoint)} bytes can't be restored") from error

    def _other(self, sample: int) -> int | None:
        """The next sample of the same class that can be decoded; None where there is none."""
        folder = self._folder
        same = np.flatnonzero(folder.targets == folder.targets[sample])
        for other in np.roll(same, -1 - np.searchsorted(same, sample)).tolist():
            if other != sample and not any(found.kind == "bad" for found in diagnose_files([folder.path(other)])):
                return int(other)
        return None

    def _explain(self, error: RuntimeError) -> tuple[list[int], BadImageError]:
        """Find the samples of the batch that failed and what is wrong with them.

        DALI often does not name the file, and the order is known to DALI alone. A pipeline with the same state over the
        same number of files, each of them a small good image, gives the sample ids of the batches around the failure.
        """
        folder = self._folder
        where = f"batch {self.position.batch} of epoch {self.position.epoch} over {folder.root}"
        with tempfile.TemporaryDirectory(prefix="fastmoll-") as place:
            Image.new("RGB", (self._config.size, self._config.size)).save(Path(place) / "good.png")
            stand_in = ImageFolder(Path(place), folder.classes, ["good.png"] * len(folder), folder.targets)
            pipeline = self._build(stand_in)
            # The error can belong to a batch that was being prepared ahead.
            for _ in range(self._config.prefetch + 1):
                samples = dict.fromkeys(_run(pipeline, self._config).samples.tolist())
                files = {i: folder.path(self._replaced.get(i, i)) for i in samples}
                found = {
                    f.path: f.reason for f in diagnose_files(list(dict.fromkeys(files.values()))) if f.kind == "bad"
                }
                bad = {i: (path, found[path]) for i, path in files.items() if path in found}
                if bad:
                    context = f"can't decode {len(found)} file(s) in {where}:"
                    return list(bad), BadImageError(list(dict.fromkeys(bad.values())), context)
        return [], BadImageError([], f"DALI failed in {where}, though each of its files can be decoded alone: {error}")


def unpack(packed: bytes, samples: int) -> NDArray[np.bool_]:
    """Bits of ``numpy.packbits`` as bool ``(samples,)``.

    Raises:
        ValueError: they are of another number of samples.
    """
    if len(packed) != -(-samples // 8):
        raise ValueError(f"{len(packed)} bytes are no bits of {samples} samples")
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=samples).astype(bool)


def _forget_all() -> None:
    for stream in list(_STREAMS):
        stream.forget()


os.register_at_fork(after_in_child=_forget_all)


def _run(pipeline: Pipeline, config: GraphConfig) -> Batch:
    if config.device_id is None:
        return _batch(config, *pipeline.run())
    with torch.cuda.device(config.device_id):
        return _batch(config, *pipeline.run(torch.cuda.current_stream(config.device_id)))


def _batch(config: GraphConfig, images: Any, index: Any, flip: Any = None) -> Batch:
    if config.train and config.dali_augment is not None:
        _check_size(images.shape(), config.size)
    # No copy: with the dynamic executor each output is its own memory, alive as long as the tensor.
    return Batch(
        _tensor(images), _tensor(index).view(-1).to(torch.int64), None if flip is None else _tensor(flip).view(-1) != 0
    )


def _check_size(shapes: list[tuple[int, ...]], size: int) -> None:
    """Refuse images of another size: ``dali_augment`` was tried on black ones, which it may treat otherwise."""
    found = next((shape for shape in shapes if shape != (size, size, 3)), None)
    if found is not None:
        raise ValueError(f"dali_augment must give images of {size} x {size} pixels, got some of shape {found}")


def _tensor(outputs: Any) -> Tensor:
    return torch.utils.dlpack.from_dlpack(outputs.as_tensor())


def _mix(*parts: int) -> int:
    """A 31-bit seed of its own for every tuple; sums would collide between seeds, epochs and ranks."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "little") >> 1
