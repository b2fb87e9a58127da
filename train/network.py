"""The network of a run, with the weights it starts from or is evaluated with."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fastmoll.distributed import Process
from fastmoll.output import say
from fastmoll.train.recipes import recipe_of
from fastmoll.train.settings import Config, SmallConfig
from fastmoll.weights import build_model, check_weights, load_weights, timm_offers


def make_model(config: Config, process: Process, num_classes: int, size: int, *, load: bool) -> nn.Module:
    """The network on the device, the same on all processes, with ``model.weights`` where ``load`` says so."""
    name, weights = config.model.name, config.model.weights
    note = "random weights"
    with process.agree():
        torch.manual_seed(config.run.seed)
        stem = None if isinstance(config, SmallConfig) else False
        model = build_model(name, num_classes, size, small_stem=stem, fresh=weights is None)
        if not config.run.evaluate:
            check_batch(model, config.data.batch_size * config.draws, size)
        if load and weights is not None and process.main:
            check_names(config)
            note = load_weights(model, name, weights, size=size, exact=config.run.evaluate)
    order = torch.channels_last if config.model.channels_last else torch.contiguous_format
    model.to(process.device).to(memory_format=order)
    process.copy_from_main(model)
    torch.manual_seed(config.run.seed + 1 + process.rank)  # dropout: another stream on each process
    if load:
        say(process, f"{name}: {note}")
    return model


def check_names(config: Config) -> None:
    """Refuse weights that there are not for the network, with what to give where the recipe brought them along."""
    name, weights = config.model.name, str(config.model.weights)
    recipe, default = recipe_of(config)
    try:
        check_weights(name, weights)
    except ValueError as error:
        if weights != default.model.weights:
            raise
        others = "timm or None" if timm_offers(name) else "None"
        hint = f"{weights} is the default of --recipe {recipe}: give --model.weights {others}"
        raise ValueError(f"{error}; {hint}") from error


def check_batch(model: nn.Module, batch_size: int, size: int) -> None:
    """Refuse a batch of one image, with all its draws, where batch norm would have one value a channel to normalise."""
    if batch_size > 1:
        return
    trial = copy.deepcopy(model).train().to("meta")
    try:
        trial(torch.empty(1, 3, size, size, device="meta"))
    except ValueError as error:
        raise ValueError(f"--data.batch-size must be more than 1 for this network: {error}") from error
