"""`ImageNetLoader`: a DALI pipeline with the manners of a ``DataLoader``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastmoll.augment import Augment, AugmentSpec, check_augment, check_augmented, parse_augment
from fastmoll.epochs import EpochLoader, Epochs, describe, share_out, states_for
from fastmoll.kernels.batch_tail import DTYPES, batch_tail
from fastmoll.kernels.checks import check_choice, check_integer, check_number, check_triple
from fastmoll.kernels.soft_labels import SoftLabels
from fastmoll.mollify import with_mix
from fastmoll.pipelines import MEAN, STD, check_dali
from fastmoll.pipelines.files import scan_folder, warn_of_shift
from fastmoll.placement import resolve_device, resolve_rank, threads

_STATE_VERSION = 2
_SIZE_LIMIT = 4096


class ImageNetLoader(EpochLoader):
    """Batches of an ImageFolder tree, decoded and augmented by DALI, mollified on request.

    Training (``split="train"``): the order is drawn anew each epoch, equally on all ranks; every rank gets the same
    number of full batches, and the few samples that fill none are left out, other ones each epoch. Evaluation (any
    other split): every sample exactly once over all ranks, in order; the last batch of a rank may be smaller, and
    ranks may differ by one batch, so do not synchronise between batches.

    A new ``for`` starts an epoch from its beginning: the next one after a finished pass, the same one, with the same
    images, after a ``break``. After `load_state_dict` the next ``for`` goes on in the middle. Passing from one epoch to
    the next costs nothing. A jump by `set_epoch` rebuilds the pipeline (a second for a million files), and the order of
    the epoch then depends on where the jump went to, not on what was run before.

    Attributes:
        root: Folder that holds the class folders.
        classes: Class names, sorted; a target is a position here.
        num_samples: Samples of the whole split, over all ranks.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        split: str = "train",
        batch_size: int = 256,
        size: int = 224,
        augment: str | Callable[[Tensor, Tensor, int], Tensor] = "fc",
        mollify: Callable[..., tuple[Tensor, Tensor | SoftLabels]] | None = None,
        device: str | torch.device = "auto",
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        num_threads: int | None = None,
        *,
        train: bool | None = None,
        resize: int | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        adjust_orientation: bool = False,
        return_index: bool = False,
        prefetch: int = 2,
        hw_decoder_load: float = 0.65,
        preallocate: tuple[int, int] | None = None,
        fused: bool | None = None,
        dtype: torch.dtype = torch.float32,
        dali_augment: Callable[[Any], Any] | None = None,
        decoder: str = "mixed",
        on_error: str = "raise",
    ) -> None:
        """List the files and check every argument; the pipeline is built at the first batch.

        Args:
            root: ImageFolder tree, ``root/<split>/<class>/<image>`` or ``root/<class>/<image>``.
            split: Folder under ``root``; ``root`` itself where it has none.
            batch_size: Samples a batch on this rank.
            size: Height and width of the images, pixels.
            augment: Training augmentation: a name (see `fastmoll.augment.parse_augment`), in which ``fc`` means
                RandomResizedCrop and flip, and ``mixup`` and ``cutmix`` mix all batches (targets are then soft labels
                also without ``mollify``); or any function of ``(images, index, epoch)``, uint8 ``(B, size, size, 3)``
                and int64 ``(B,)`` on the device and an int, to images of the same kind, which are flipped afterwards.
            mollify: A `fastmoll.Mollify`, called as ``mollify(images, labels, index=sample_ids, epoch=epoch)``.
            device: ``"cpu"``, ``"cuda"``, ``"cuda:<n>"``, or ``"auto"``: the current GPU where there is one.
            seed: Seed of order and augmentation.
            rank: Global rank; by default torch.distributed's, 0 where it is not initialised.
            world_size: Number of ranks; likewise, 1.
            num_threads: CPU threads of the pipeline; by default this process's share of the CPUs, 16 at most.
            train: Shuffle and augment; by default exactly for ``split="train"``.
            resize: Shorter side before the evaluation's centre crop, pixels; by default ``size * 256 / 224``. 0 takes
                the images as they are (all must be ``size``²).
            mean: Mean per channel for pixels in [0, 1], subtracted; by default ImageNet's.
            std: Standard deviation per channel, divided by; likewise.
            adjust_orientation: Turn images by their EXIF tag (torchvision's ImageFolder does not).
            return_index: Give ``(images, targets, index)`` with the int64 ``(B,)`` sample ids, on the CPU.
            prefetch: Batches prepared ahead.
            hw_decoder_load: Share of a batch decoded by the GPU's JPEG engine, 0 to 1.
            preallocate: ``(width, height)`` to allocate the engine's buffers for.
            fused: Let DALI stop at uint8 crops, and flip, standardise and mollify in one kernel, on the current stream;
                by default exactly on a GPU. A ``mollify`` that is no `fastmoll.Mollify` then gets its images from it.
            dtype: Of the images: float32, bfloat16 or float16 (the latter two only where ``fused``).
            dali_augment: What the graph does, in training, after all that it does for ``augment``: a function of a DALI
                node of uint8 HWC images to one of the same, of operators that can be checkpointed; tried on black ones.
            decoder: Who decodes for a GPU: ``"mixed"``, itself and its JPEG engine, or ``"cpu"``, which leaves more of
                it to the network and takes 1 to 1.3 ms of a CPU an image.
            on_error: What to do, in training, about a file that can't be decoded: ``"raise"`` a `BadImageError`, or
                ``"substitute"`` the next image of its class that can, with a `BadImageWarning`. The rest of the stream
                stays as it is. In evaluation every image counts, so there it must be ``"raise"``.

        Raises:
            ImportError: DALI is missing, or there in two builds.
            ValueError: A bad argument, an unusable data folder, fewer samples than ranks, fewer than one batch a rank
                in training, ``mollify.num_classes`` other than the number of class folders, or a GPU asked for and
                absent.

        Warns:
            UserWarning: A label of this split is another class than in the folder ``train`` beside it.
        """
        self._device = resolve_device(device)
        rank, world_size = resolve_rank(rank, world_size)
        train = split == "train" if train is None else train
        size = check_integer("size", size, 1, _SIZE_LIMIT)
        resize = round(size * 256 / 224) if resize is None else check_integer("resize", resize, 0)
        if 0 < resize < size:
            raise ValueError(f"resize must be 0 or at least size={size}, got {resize}")
        batch_size = check_integer("batch_size", batch_size, 1)
        seed = check_integer("seed", seed, 0, 2**63)
        cpu_threads = threads() if num_threads is None else check_integer("num_threads", num_threads, 1)
        prefetch = check_integer("prefetch", prefetch, 1)
        if check_number("hw_decoder_load", hw_decoder_load, at_least=0.0) > 1:
            raise ValueError(f"hw_decoder_load must be in [0, 1], got {hw_decoder_load}")
        check_choice("decoder", decoder, ("mixed", "cpu"))
        check_choice("on_error", on_error, ("raise", "substitute"))
        if on_error == "substitute" and not train:
            raise ValueError(
                "on_error must be 'raise' in validation, whose figures are of all images, got 'substitute'"
            )
        in_graph, on_batch, mix = _resolve_augment(augment, size, seed)
        self._on_batch = on_batch if train else None
        if fused is None:
            fused = self._device.type == "cuda" or self._on_batch is not None
        elif self._on_batch is not None and not fused:
            raise ValueError(f"fused must not be False for augment={augment!r}: it works on batches of pixels")
        if dali_augment is not None and not callable(dali_augment):
            raise ValueError(f"dali_augment must be callable, got {dali_augment!r}")
        if dtype not in DTYPES or (dtype != torch.float32 and not fused):
            raise ValueError(f"dtype must be torch.float32, or with fused torch.bfloat16 or torch.float16, got {dtype}")
        if mollify is not None and not callable(mollify):
            raise ValueError(f"mollify must be callable, got {mollify!r}")

        check_dali()
        from fastmoll.pipelines import imagenet

        self._folder = scan_folder(root, split)
        self.root = self._folder.root
        self.classes = self._folder.classes
        self.num_samples = len(self._folder)
        if split != "train":
            warn_of_shift(root, self.classes, self.root)
        first, end, length = share_out(self.root, self.num_samples, rank, world_size, batch_size, train=train)
        self._mollify, self._after = with_mix(mollify, mix if train else None, len(self.classes), seed, self.root)
        self._shard_size, self._batch_size = end - first, batch_size
        # Batches the padded graph gives in an epoch: as many as the largest shard fills. Padding is decoded too, so a
        # batch is never larger than that shard.
        largest = math.ceil(self.num_samples / world_size)
        padded_length = math.ceil(largest / batch_size)
        self._config = imagenet.GraphConfig(
            train=train,
            batch_size=min(batch_size, largest),
            size=size,
            resize=resize,
            augment=in_graph,
            standardise=not fused,
            mean=MEAN if mean is None else check_triple("mean", mean),
            std=STD if std is None else check_triple("std", std, above=0.0),
            adjust_orientation=adjust_orientation,
            rank=rank,
            world_size=world_size,
            device_id=self._device.index if self._device.type == "cuda" else None,
            num_threads=cpu_threads,
            prefetch=prefetch,
            hw_decoder_load=hw_decoder_load,
            preallocate=preallocate,
            dali_augment=dali_augment,
            decoder=decoder,
        )
        from fastmoll.pipelines.stream import Stream

        substitute = on_error == "substitute"
        self._stream = Stream(self._config, self._folder, seed, length, padded_length, substitute=substitute)
        self._augment = describe(augment)
        self._dtype = dtype
        self._seed = seed
        self._return_index = return_index
        self._targets = torch.from_numpy(self._folder.targets)
        self._place = Epochs(length)
        # Of the running epoch, over all ranks before the number of ranks changed, and on this one since.
        self._seen = np.zeros(self.num_samples, bool)
        self._closed = False

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Give ``(images, targets)``, or ``(images, targets, index)``, for one epoch.

        ``images`` are ``(B, 3, size, size)`` of the loader's ``dtype``, standardised, in channels-last memory;
        ``targets`` int64 ``(B,)``, or what ``mollify`` makes of them: float32 ``(B, K)``, or `fastmoll.SoftLabels` from
        a ``Mollify(targets="short")``. Both are on the loader's device, ``M·B`` of each from ``Mollify(draws=M)``.

        Raises:
            BadImageError: A file can't be decoded; it names the file and the reason.
            ValueError: ``augment`` or ``dali_augment`` is a function that gives something else than it should.
            RuntimeError: The loader was closed, or another ``for`` over it began.
        """
        self._require_open()
        return self._batches(self._place.begin())

    def _batches(self, token: object) -> Iterator[tuple[Any, ...]]:
        place = self._place
        while place.position < place.length:
            self._require_open()
            place.require(token)
            self._stream.seek(place.epoch, place.position)
            before = self._stream.position
            images, index, flip = self._stream.next()
            valid = min(self._batch_size, self._shard_size - place.position * self._batch_size)
            if self._config.train:
                valid = self._batch_size  # the shards of the rest of an epoch are others
            try:
                batch = self._finish(images[:valid], index[:valid], None if flip is None else flip[:valid])
            except BaseException:  # of a function of the user's: the batch has not been handed out
                self._stream.restore(before)
                raise
            if self._config.train:
                if place.position == 0:
                    self._seen[:] = False
                self._seen[index.numpy()] = True
            place.position += 1
            yield batch
        place.end(token)

    def _finish(self, images: Tensor, index: Tensor, flip: Tensor | None) -> tuple[Any, ...]:
        mollify, labels = self._mollify, self._targets[index]
        targets: Tensor | SoftLabels
        if self._device.type == "cuda":
            # From pinned memory a copy waits neither for the stream nor for the host.
            labels, index = labels.pin_memory(), index.pin_memory()
            flip = None if flip is None else flip.pin_memory()
        if self._on_batch is not None:
            # Draws on the CPU tell the host an operation's images; a subclass of Augment is called as any function is.
            ids = index if type(self._on_batch) is Augment else index.to(self._device, non_blocking=True)
            given = self._on_batch(images, ids, self.epoch)
            images = check_augmented(given, len(index), self._device, self._config.size)
        if self._config.standardise:
            images = images.permute(0, 3, 1, 2)
        else:
            flip = None if flip is None else flip.to(self._device, non_blocking=True)
            mean, std = self._config.mean, self._config.std
            tail: dict[str, Any] = {"mean": mean, "std": std, "flip": flip, "dtype": self._dtype}
            if mollify is None:
                images = batch_tail(images, **tail)
            else:
                images, targets = mollify.from_pixels(images, labels, index, self.epoch, **tail)
        if mollify is None:
            targets = labels.to(self._device, non_blocking=True)
        elif self._config.standardise:
            images, targets = mollify(images, labels, index, self.epoch, inplace=True)
        if self._after is not None:
            images, targets = self._after(images, targets, index=index, epoch=self.epoch)
        return (images, targets, index) if self._return_index else (images, targets)

    def close(self) -> None:
        """Free the pipeline: its threads, queues and GPU memory. Call it before ``destroy_process_group``."""
        self._closed = True
        self._stream.close()

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the loader over {self.root} was closed")

    @property
    def fingerprint(self) -> dict[str, int | str]:
        """What a state depends on; a state is only taken up by a loader that has all of it equal."""
        import nvidia.dali

        config = self._config
        return {
            "files": self._folder.fingerprint,
            "num_samples": self.num_samples,
            "batch_size": self._batch_size,
            "world_size": config.world_size,
            "rank": config.rank,
            "seed": self._seed,
            "train": int(config.train),
            "size": config.size,
            "resize": config.resize,
            "augment": self._augment,
            "dali_augment": describe(config.dali_augment),
            "standardise": int(config.standardise),
            "mean": repr(config.mean),
            "std": repr(config.std),
            "adjust_orientation": int(config.adjust_orientation),
            "decoder": "cpu" if config.device_id is None else "gpu" if config.decoder == "mixed" else "cpu of a gpu",
            "mollify": describe(self._mollify if self._after is None else self._after),
            "resampled_by": "numba" if config.compiled else "dali",
            "dali": nvidia.dali.__version__,
        }

    def state_dict(self) -> dict[str, Any]:
        """Where the stream of this rank stands: after the batch that was handed out last.

        To be taken between batches, inside or outside the loop. Integers, strings and uint8 tensors, so that
        ``torch.load(weights_only=True)`` reads it; about a kilobyte, and a bit a sample in the middle of an epoch.
        """
        middle = self._config.train and 0 < self._place.position < len(self)
        return {
            "version": _STATE_VERSION,
            "epoch": self._place.epoch,
            "position": self._place.position,
            **self._stream.position.to_state(),
            "seen": torch.from_numpy(np.packbits(self._seen[: self.num_samples if middle else 0])),
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go on where a state was taken: the next ``for`` gives the rest of its epoch, bit for bit.

        Args:
            state: What `state_dict` gave on this rank; or, in training, what it gave on all ranks, in their order,
                whose number may have been another. If it was, the samples of the epoch that no rank had yet come in
                another order and as other crops; ``batch_size`` must be such that a step has as many images as before.

        Raises:
            ValueError: Not a loader's state, or one of another data set, seed or set-up, or of another rank or batch
                size than ``state`` may be of; the message names what differs.
        """
        from fastmoll.pipelines.stream import Position, bytes_of, unpack

        states, same = states_for(state, self.state_dict())
        own = states[0]
        epoch = check_integer("state's epoch", own["epoch"], 0)
        position = check_integer("state's position", own["position"], 0, len(self) + 1)
        seen = np.zeros(self.num_samples, bool)
        middle = self._config.train and 0 < position < len(self)
        for one in states if middle else ():
            seen |= unpack(bytes_of(one, "seen"), self.num_samples)
        if same:
            stream = Position.from_state(own, len(self))
        elif middle:
            stream = Position(epoch, epoch, position, without=np.packbits(seen).tobytes())
        else:
            stream = Position(epoch, epoch, 0)  # `seek` moves it on where the epoch was done
        self._place.restore(epoch, position)
        self._stream.restore(stream)
        self._seen = seen


def _resolve_augment(
    augment: str | Callable[[Tensor, Tensor, int], Tensor], size: int, seed: int
) -> tuple[str, Callable[[Tensor, Tensor, int], Tensor] | None, str | None]:
    """What the graph does for an augmentation, what is done to its batches, and how their images are mixed.

    Raises:
        ValueError: Neither a name nor a function, or a name that there is not.
    """
    if not isinstance(augment, str):
        check_augment(augment, size, size)
        return "fc", augment, augment.spec.mix if isinstance(augment, Augment) else None
    spec = parse_augment(augment)
    if spec.policy == "augmix":  # DALI has none
        return spec.base, Augment(AugmentSpec("none", spec.policy), size, seed=seed), spec.mix
    return str(AugmentSpec(spec.base, spec.policy)), None, spec.mix
