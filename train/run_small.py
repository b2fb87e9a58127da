"""What ``small_images.py`` does once its command line is read: images, loaders, a network and its training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from fastmoll.augment import Augment
from fastmoll.distributed import Process
from fastmoll.pipelines.errors import ImageSizeError
from fastmoll.pipelines.files import check_classes
from fastmoll.pipelines.small import SmallData, read_small, standardisation
from fastmoll.scoring import image_dtype
from fastmoll.small_loader import SmallImageLoader
from fastmoll.train.config import with_standardisation
from fastmoll.train.run import evaluate_only, fit, make_mollify, set_up
from fastmoll.train.settings import SmallConfig


def run(config: SmallConfig, process: Process) -> None:
    """Set-up, images, loaders, then the network and its training."""
    config, resuming = set_up(config, process)
    if resuming is None:
        return
    with ExitStack() as stack:
        with process.agree(), pointing_to_imagenet(config.data.name):
            images = read_small(config.data.name, "val", config.data.path)
            size = image_size(images)
        if config.run.evaluate:
            with process.agree():
                config = standardised(config, None)
                validation = stack.enter_context(closing(make_loader(config, process, images, "val")))
            evaluate_only(config, process, validation, source=config.data.name, size=size)
            return
        with process.agree():
            with pointing_to_imagenet(config.data.name):
                training_images = read_small(config.data.name, "train", config.data.path)
                check_alike(training_images, images)
            config = standardised(config, training_images)
            mollify = make_mollify(config, images.classes)
            pairs = config.data.auto_augment
            augment = Augment(config.data.augment, size, seed=config.run.seed, auto_augment=pairs)
            options: dict[str, Any] = {"augment": augment, "mollify": mollify}
            training = stack.enter_context(closing(make_loader(config, process, training_images, "train", **options)))
            validation = stack.enter_context(closing(make_loader(config, process, images, "val")))
        fit(config, process, training, validation, source=config.data.name, size=size, resuming=resuming)


@contextmanager
def pointing_to_imagenet(data: str) -> Iterator[None]:
    """In an error of the sizes of image files in a folder, name the trainer that crops them to one."""
    try:
        yield
    except ImageSizeError as error:
        folder = Path(data)
        if not folder.is_dir() or any(folder.glob("*.npy")):
            raise
        raise ValueError(f"{error}; train/imagenet.py {folder} --data.size N crops them to N x N pixels") from error


def image_size(images: SmallData) -> int:
    """Height and width of the images, which networks want to be one number."""
    height, width = map(int, images.images.shape[1:3])
    if height != width:
        raise ImageSizeError(f"{images.root} has images of {height} x {width} pixels, but networks take squares")
    return width


def check_alike(training: SmallData, validation: SmallData) -> None:
    """Refuse training and validation images of other classes or sizes."""
    check_classes(training.classes, validation.classes, f"{training.root} and {validation.root}")
    if training.images.shape[1:] != validation.images.shape[1:]:
        sizes = [" x ".join(map(str, split.images.shape[1:3])) for split in (training, validation)]
        raise ImageSizeError(f"{training.root} has images of {sizes[0]} pixels, {validation.root} of {sizes[1]}")


def standardised(config: SmallConfig, training: SmallData | None) -> SmallConfig:
    """The settings with mean and standard deviation filled in, from the training images where nothing else says so."""
    data = config.data
    if data.mean is not None:
        return config
    return with_standardisation(config, *standardisation(data.name if training is None else training, data.path))


def make_loader(
    config: SmallConfig, process: Process, images: SmallData, split: str, **training: Any
) -> SmallImageLoader:
    """A loader of one split."""
    return SmallImageLoader(
        images,
        split=split,
        batch_size=config.data.batch_size,
        mean=config.data.mean,
        std=config.data.std,
        device=process.device,
        seed=config.run.seed,
        rank=process.rank,
        world_size=process.world_size,
        dtype=image_dtype(process.device, config.run.amp),
        **training,
    )
