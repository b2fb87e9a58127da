"""What ``imagenet.py`` does once its command line is read: loaders of folders of images, a network and its training."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import fastmoll
from fastmoll.distributed import Process
from fastmoll.output import say
from fastmoll.pipelines import MEAN, STD
from fastmoll.pipelines.files import check_classes, scan_folder
from fastmoll.sample import sample_folder
from fastmoll.scoring import image_dtype
from fastmoll.train.config import with_standardisation
from fastmoll.train.run import evaluate_only, fit, make_mollify, set_up
from fastmoll.train.settings import ImageNetConfig
from fastmoll.weights import timm_offers


def run(config: ImageNetConfig, process: Process) -> None:
    """Set-up, loaders, then the network and its training."""
    config, resuming = set_up(config, process)
    if resuming is None:
        return
    with ExitStack() as stack:
        with process.agree():
            if config.data.path is None:
                config = replace(config, data=replace(config.data, path=sample_folder()))
            config = standardised(config, process)
            validation = stack.enter_context(closing(make_loader(config, process, "val")))
        if config.run.evaluate:
            evaluate_only(config, process, validation, source=str(config.data.path), size=config.data.size)
            return
        training = stack.enter_context(closing(make_training(config, process, validation.classes)))
        source, size = str(config.data.path), config.data.size
        fit(config, process, training, validation, source=source, size=size, resuming=resuming)


def standardised(config: ImageNetConfig, process: Process) -> ImageNetConfig:
    """The settings with mean and standard deviation filled in where weights of timm want others than ImageNet's.

    Every third of them does. ImageNet's stay None, as in runs of earlier versions.
    """
    facts = timm_offers(config.model.name).get(config.model.weights or "")
    if config.data.mean is not None or facts is None or (facts.mean, facts.std) == (MEAN, STD):
        return config
    source = f"{facts.architecture}.{facts.tag}"
    say(process, f"images are standardised as timm does for {source}: mean {facts.mean}, std {facts.std}")
    return with_standardisation(config, facts.mean, facts.std)


def make_loader(config: ImageNetConfig, process: Process, split: str, **training: Any) -> fastmoll.ImageNetLoader:
    """A loader of the folder ``split``."""
    assert config.data.path is not None
    return fastmoll.ImageNetLoader(
        config.data.path,
        split=split,
        batch_size=config.data.batch_size,
        size=config.data.size,
        mean=config.data.mean,
        std=config.data.std,
        device=process.device,
        seed=config.run.seed,
        rank=process.rank,
        world_size=process.world_size,
        num_threads=config.data.threads,
        hw_decoder_load=config.data.hw_decoder_load,
        decoder=config.data.decoder,
        dtype=image_dtype(process.device, config.run.amp),
        **training,
    )


def make_training(config: ImageNetConfig, process: Process, classes: list[str]) -> fastmoll.ImageNetLoader:
    """The loader of the training images, mollified, whose classes must be those of the validation."""
    with process.agree():
        assert config.data.path is not None
        check_classes(scan_folder(config.data.path, "train").classes, classes, f"{config.data.path}: train and val")
        mollify = make_mollify(config, classes)
        options = {"augment": config.data.augment, "mollify": mollify, "on_error": config.data.on_error}
        return make_loader(config, process, "train", **options)
