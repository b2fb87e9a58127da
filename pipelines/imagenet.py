"""The DALI graphs for ImageFolder trees: one training graph, one evaluation graph, each for CPU and GPU.

Both read ``(file, sample id)``, decode, crop, and give a batch in NHWC order with the sample ids: standardised float32,
or uint8 with the flips still to be done, for a fused kernel that does all the rest. Ids rather than classes travel
through DALI, because every random draw of fastmoll is keyed by them; the class is ``folder.targets[id]``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import Pipeline, fn, math, pipeline_def, types
from nvidia.dali.data_node import DataNode

from fastmoll.kernels.checks import installed
from fastmoll.pipelines import MEAN, STD, dali_policies
from fastmoll.pipelines.files import ImageFolder
from fastmoll.pipelines.policies import ROTATION
from fastmoll.pipelines.resample import resample

READER = "reader"
# A crop that is this many times larger than the output, or more, is reduced with a filter before it is rotated.
_SHARPEST = 2.0


@dataclass(frozen=True)
class GraphConfig:
    """Everything that defines a graph, apart from where in the stream it stands.

    Attributes:
        train: Shuffle each epoch and augment, or go through the samples in order and crop the centre.
        batch_size: Samples a batch.
        size: Height and width of the output, pixels.
        resize: Shorter side before the centre crop, pixels; 0: no resize, no crop, the files are ``size``².
        augment: Training only: ``"none"`` (the evaluation's crop, not flipped), ``"fc"`` (RandomResizedCrop and flip)
            or ``"fcr"`` (and rotation), then perhaps ``+`` and ``rand``, ``auto`` or ``trivial``.
        standardise: Flip and standardise in the graph; else give uint8 and, in training, which images to flip.
        device_id: GPU, or None for the CPU.
        num_threads: CPU threads of the pipeline.
        mean: Mean per channel of the data set, for pixels in [0, 1].
        std: Standard deviation per channel, likewise.
        adjust_orientation: Turn images by their EXIF tag.
        rank: Global rank; it reads shard ``rank`` of ``world_size``.
        world_size: Number of ranks.
        prefetch: Batches prepared ahead.
        hw_decoder_load: Share of a batch that the GPU's JPEG engine decodes, 0 to 1 (no effect without one).
        preallocate: ``(width, height)`` the engine's buffers are made for at once, or None.
        dali_augment: What to do, in training, after that: a function of a node of uint8 HWC images to one of the same.
        decoder: ``"mixed"``: a GPU decodes; ``"cpu"``: its CPU does, and everything after that is the GPU's.
    """

    train: bool
    batch_size: int
    size: int
    resize: int
    augment: str
    standardise: bool
    device_id: int | None
    num_threads: int
    mean: tuple[float, float, float] = MEAN
    std: tuple[float, float, float] = STD
    adjust_orientation: bool = False
    rank: int = 0
    world_size: int = 1
    prefetch: int = 2
    hw_decoder_load: float = 0.65
    preallocate: tuple[int, int] | None = None
    dali_augment: Callable[[Any], Any] | None = None
    decoder: str = "mixed"

    @property
    def compiled(self) -> bool:
        """Whether crops are resampled by compiled code rather than by DALI's operators: on a CPU, with Numba."""
        cropped = self.train and not self.augment.startswith("none")
        interpreted = os.environ.get("NUMBA_DISABLE_JIT", "0") != "0"  # such code has no address for DALI
        return cropped and self.device_id is None and installed("numba") and not interpreted


def _random_crop(encoded: Any, config: GraphConfig) -> Any:
    # Fused: only the blocks of the JPEG that the crop touches are decoded, 1.3 to 1.6 times less CPU.
    images = fn.decoders.image_random_crop(
        encoded,
        random_area=[0.08, 1.0],
        random_aspect_ratio=[3 / 4, 4 / 3],
        num_attempts=10,
        **_decoder_options(config),
    )
    return _uploaded(images, config)


def _resample(images: Any, size: int, angle: Any) -> Any:
    """Crops of any size to ``size``², rotated counter-clockwise by ``angle`` degrees about their centre, black outside.

    One resampling, linear: compared with the exact average over each rotated pixel it is off by 3.3 grey levels, for
    1.1 ms of a CPU an image more than a crop without rotation (0.3 ms in compiled code, which does the same). The way
    of torchvision, a filtered resize and then a rotation that takes the nearest pixel, is off by 4.7 for 0.2 ms; with a
    linear rotation, by 3.1 for 1.8 ms (photographs of ImageNet). Without a filter, though, crops far larger than the
    output would alias: those are reduced first.
    """
    if angle is None:
        return _resize(images, size, size)
    shape = images.shape(dtype=types.FLOAT)
    largest = _SHARPEST * size
    if math.max(shape[0], shape[1]) > largest:
        images = _resize(images, math.min(shape[0], largest), math.min(shape[1], largest))
    shape = images.shape(dtype=types.FLOAT)
    height, width = shape[0], shape[1]
    matrix = fn.transforms.translation(offset=[-size / 2, -size / 2])
    matrix = fn.transforms.rotation(matrix, angle=angle)
    matrix = fn.transforms.scale(matrix, scale=fn.stack(width / size, height / size))
    matrix = fn.transforms.translation(matrix, offset=fn.stack(width / 2, height / 2))
    return fn.warp_affine(
        images,
        matrix=matrix,
        size=[size, size],
        fill_value=0,
        interp_type=types.INTERP_LINEAR,
        inverse_map=True,
    )


def _centre_crop(encoded: Any, config: GraphConfig) -> Any:
    images = _uploaded(fn.decoders.image(encoded, jpeg_fancy_upsampling=True, **_decoder_options(config)), config)
    if config.resize == 0:
        return images
    # torchvision's arithmetic to the pixel: the longer side is truncated, the margin is rounded half to even. DALI's
    # own (`resize_shorter`, `crop_pos=0.5`) rounds otherwise, and is one pixel off on every second image.
    shape = fn.peek_image_shape(encoded, adjust_orientation=config.adjust_orientation, dtype=types.INT64)
    height, width = shape[0], shape[1]
    shorter = math.min(height, width)
    height, width = config.resize * height // shorter, config.resize * width // shorter
    images = _resize(images, fn.cast(height, dtype=types.FLOAT), fn.cast(width, dtype=types.FLOAT))
    return fn.crop(
        images,
        crop=(config.size, config.size),
        crop_pos_y=_centre(height, config.size),
        crop_pos_x=_centre(width, config.size),
        rounding="round",
    )


def _centre(length: Any, size: int) -> Any:
    margin = length - size
    half = margin // 2
    start = half + (margin % 2) * (half % 2)
    return fn.cast(start, dtype=types.FLOAT) / math.max(margin, 1)


def _resize(images: Any, height: Any, width: Any) -> Any:
    return fn.resize(images, resize_y=height, resize_x=width, antialias=True, interp_type=types.INTERP_LINEAR)


def _uploaded(decoded: Any, config: GraphConfig) -> Any:
    return decoded.gpu() if config.device_id is not None and config.decoder == "cpu" else decoded


def _decoder_options(config: GraphConfig) -> dict[str, Any]:
    on_gpu = config.device_id is not None and config.decoder != "cpu"
    options: dict[str, Any] = {
        "device": "mixed" if on_gpu else "cpu",
        "adjust_orientation": config.adjust_orientation,
        "output_type": types.RGB,
    }
    if on_gpu:
        options["hw_decoder_load"] = config.hw_decoder_load
        if config.preallocate is not None:
            options["preallocate_width_hint"], options["preallocate_height_hint"] = config.preallocate
    return options


def _augment(encoded: Any, config: GraphConfig) -> Any:
    """Crops of the final size, uint8 HWC, all but flipped.

    The flip comes last, inside crop_mirror_normalize or the kernel, where it is free: rotations and policies are
    symmetric, so before or after makes no difference.
    """
    base, _, policy = config.augment.partition("+")
    if base == "none":
        images = _centre_crop(encoded, config)
    else:
        angle = fn.random.uniform(range=[-ROTATION, ROTATION]) if base == "fcr" else None
        images = _random_crop(encoded, config)
        images = resample(images, config.size, angle) if config.compiled else _resample(images, config.size, angle)
    if policy:
        images = dali_policies.policy(policy, config.size)(images)
    return images if config.dali_augment is None else _by_user(images, config.dali_augment)


def _by_user(images: Any, function: Callable[[Any], Any]) -> Any:
    try:
        found = function(images)
    except Exception as error:  # whatever the user's function meets, in the words of whoever raised it
        raise ValueError(f"dali_augment: {type(error).__name__}: {error}") from error
    if not isinstance(found, DataNode):
        raise ValueError(f"dali_augment must give a node of the graph, got {found!r}")
    return found


@pipeline_def(enable_conditionals=True, batch_size=2, num_threads=1, exec_dynamic=True)  # type: ignore[untyped-decorator]
def _trial(config: GraphConfig, function: Callable[[Any], Any]) -> Any:
    black = np.zeros((config.size, config.size, 3), np.uint8)
    images = fn.external_source(lambda: [black, black], layout="HWC")
    return _by_user(images if config.device_id is None else images.gpu(), function)


def _check_dali_augment(config: GraphConfig, function: Callable[[Any], Any]) -> None:
    """Try the user's function on black images: in the graph its result says neither of what type nor how large it is.

    Raises:
        ValueError: it fails, or gives something else than what it gets.
    """
    try:
        trial = _trial(config, function, device_id=config.device_id)
        trial.build()
        (found,) = trial.run()
    except Exception as error:  # of the user's own code, or DALI's for what it put into the graph
        # Where it fails as the graph is built, DALI tells the way there before the error itself, in the last line.
        text = str(error)
        reason = text.strip().splitlines()[-1] if text.startswith("in user code") else text
        raise ValueError(f"dali_augment fails: {reason}") from error
    dtype, layout, shapes = found.dtype, found.layout(), found.shape()
    for shape in shapes:
        if dtype != types.UINT8 or layout not in ("HWC", "") or shape != (config.size, config.size, 3):
            hint = "" if dtype == types.UINT8 else "; fn.cast(images, dtype=types.UINT8) is for types"
            raise ValueError(
                f"dali_augment must give uint8 HWC images of {config.size} x {config.size} pixels, as it gets, got "
                f"{dtype.name.lower()} {layout} of shape {shape}{hint}"
            )


@pipeline_def(enable_conditionals=True)  # type: ignore[untyped-decorator]
def _graph(
    config: GraphConfig, root: str, file_list: str, shuffle_seed: int, map_files: bool = True
) -> tuple[Any, ...]:
    order: dict[str, Any] = {"stick_to_shard": True}  # else the shards go round the ranks from epoch to epoch
    if config.train:
        order = {"shuffle_after_epoch": True, "shuffle_after_epoch_seed": shuffle_seed}
    encoded, sample = fn.readers.file(
        file_root=root,
        file_list=file_list,
        shard_id=config.rank,
        num_shards=config.world_size,
        # Equal numbers of batches on every rank; the loader cuts off what is padding.
        pad_last_batch=True,
        dont_use_mmap=not map_files,
        name=READER,
        **order,
    )
    images = _augment(encoded, config) if config.train else _centre_crop(encoded, config)
    flipped = config.train and not config.augment.startswith("none")
    mirror = fn.random.coin_flip(probability=0.5) if flipped else 0
    if not config.standardise:
        return (images, sample, mirror) if flipped else (images, sample)
    images = fn.crop_mirror_normalize(
        images,
        mirror=mirror,
        mean=[255 * m for m in config.mean],
        std=[255 * s for s in config.std],
        output_layout="HWC",
        dtype=types.FLOAT,
    )
    return images, sample


def build(
    config: GraphConfig,
    folder: ImageFolder,
    *,
    seed: int,
    shuffle_seed: int,
    checkpoint: bytes | None = None,
    map_files: bool = True,
    without: NDArray[np.bool_] | None = None,
    replaced: Mapping[int, int] | None = None,
) -> Pipeline:
    """Build the graph over a folder.

    Args:
        config: The graph.
        folder: The samples.
        seed: Seed of the augmentations, 31 bits; different on each rank.
        shuffle_seed: Seed of the order, 31 bits; equal on all ranks.
        checkpoint: A state of this graph (``Pipeline.checkpoint()``) to go on from. DALI restores it without looking
            whether it fits: the caller compares fingerprints first.
        map_files: Map files into memory, which is a little faster. Not in a forked process: DALI keeps its mappings
            behind one lock, which a thread of the parent may have held when the process was made.
        without: The samples that are left out, bool ``(samples,)``.
        replaced: Samples, and those whose files take the places of theirs.

    Returns:
        A built pipeline; ``run()`` gives images ``(batch, size, size, 3)``, sample ids int32 ``(batch, 1)`` and, where
        there are flips left to do, int32 ``(batch,)``.

    Raises:
        ValueError: ``dali_augment`` fails, or gives something else than what it gets.
    """
    # DALI reads the list while it builds. A list in a file builds four times faster than one of Python strings; a file
    # in memory is gone with this process, however that ends.
    with open(os.memfd_create("fastmoll-files"), "wb") as file:
        samples: Iterable[int] = range(len(folder)) if without is None else np.flatnonzero(~without).tolist()
        source = replaced or {}
        file.writelines(os.fsencode(folder.paths[source.get(i, i)]) + b" %d\n" % i for i in samples)
        file.flush()
        with warnings.catch_warnings(record=True) as caught:
            if config.train and config.dali_augment is not None:
                _check_dali_augment(config, config.dali_augment)
            pipeline = _graph(
                config,
                str(folder.root),
                f"/proc/self/fd/{file.fileno()}",
                shuffle_seed,
                map_files,
                batch_size=config.batch_size,
                num_threads=config.num_threads,
                device_id=config.device_id,
                seed=seed,
                prefetch_queue_depth=config.prefetch,
                exec_dynamic=True,
                # Always on: with it the order of an epoch is drawn anew, without it the order before is shuffled
                # again, so a run that is resumed would otherwise go another way.
                enable_checkpointing=True,
                checkpoint=checkpoint,
            )
            pipeline.build()
    for warning in caught:
        # DALI's own auto_aug module calls operators by names that DALI deprecates, and insists on telling; and one of
        # the published sub-policies of AutoAugment does have a probability of 0.
        if not any(text in str(warning.message) for text in ("nvidia.dali.fn.experimental", "with probability 0")):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return pipeline
