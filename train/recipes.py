"""The defaults of a run, by the name of its recipe or its data, and by its optimiser."""

from __future__ import annotations

from dataclasses import replace

from fastmoll.train.settings import (
    Config,
    FolderConfig,
    ImageNetConfig,
    Kind,
    ModelConfig,
    MollifyConfig,
    OptimConfig,
    RunConfig,
    SmallConfig,
    SmallDataConfig,
)

RECIPES: dict[str, ImageNetConfig] = {
    # The paper's ImageNet recipe (section "Results on ImageNet"): ResNet-50 from IMAGENET1K_V1, 10 epochs of SGD at
    # 0.01, cosine to 0, no warm-up. It leaves the batch open: 256 a process here, learning rate not scaled.
    "finetune": ImageNetConfig(model=ModelConfig(weights="IMAGENET1K_V1")),
    # ResNet-50 from random weights: lr 0.1 per 256 images of a step, five epochs of warm-up, no fixed label smoothing
    # (mollification has its own). `--model.ema 0.9999` adds the average.
    "scratch": ImageNetConfig(
        recipe="scratch",
        optim=OptimConfig(epochs=90, lr=0.1, lr_batch=256, nesterov=True, weight_decay=1e-4, warmup_epochs=5.0),
    ),
    # The bundled photographs, ten classes, a few minutes on two CPU cores.
    "sample": ImageNetConfig(
        recipe="sample",
        data=FolderConfig(size=64, batch_size=32),
        model=ModelConfig(name="resnet18"),
        optim=OptimConfig(epochs=12, lr=0.05, nesterov=True, warmup_epochs=1.0),
        run=RunConfig(checkpoint_every=100, log_every=5),
    ),
}


# The paper's recipe for small images (appendix "Experiments"), the same for every network and augmentation; it trains
# with and without mollification, so that is asked for by name. The digits have one of their own.
SMALL_RECIPES: dict[str, SmallConfig] = {
    "paper": SmallConfig(
        mollify=MollifyConfig(enabled=False),
        model=ModelConfig(name="presnet50"),
        optim=OptimConfig(epochs=300),
        run=RunConfig(validate_every=5),
    ),
    "digits": SmallConfig(
        mollify=MollifyConfig(enabled=False),
        data=SmallDataConfig(batch_size=64, augment="none"),
        model=ModelConfig(name="shufflenet_v2_x0_5"),
        optim=OptimConfig(epochs=30, lr=0.05, nesterov=True),
        run=RunConfig(log_every=10),
    ),
}


def with_adamw(config: Kind) -> Kind:
    """A recipe for AdamW, with what is usual there in the place of what is meant for SGD."""
    pretrained, scaled = config.model.weights is not None, config.optim.lr_batch is not None
    optim = replace(
        config.optim,
        name="adamw",
        lr=1e-4 if pretrained else 1e-3,
        lr_batch=1024 if scaled else None,
        weight_decay=0.05,
        decay="weights",
    )
    return replace(config, optim=optim)


def small_recipe(data: str) -> str:
    """Name of the recipe for small images of that name."""
    return data if data in SMALL_RECIPES else "paper"


def recipe_of(config: Config) -> tuple[str, Config]:
    """Name of the recipe that ``config`` is a variant of, and its settings."""
    if isinstance(config, SmallConfig):
        name = small_recipe(config.data.name)
        return name, SMALL_RECIPES[name]
    assert isinstance(config, ImageNetConfig)
    return config.recipe, RECIPES.get(config.recipe, ImageNetConfig())  # a run's may be of another version
