"""Settings, small networks, batches and checkpoints of the trainers, for tests of their parts."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastmoll.distributed import Process
from fastmoll.train import checkpoint
from fastmoll.train.config import parse
from fastmoll.train.engine import Learner
from fastmoll.train.logs import Meter
from fastmoll.train.settings import Config

CPU = Process(0, 1, torch.device("cpu"))

TIMM = "test_vit"
"""A small network of timm for images of 160 pixels, in patches of 16, standardised by 0.5 and 0.5."""

Batch = tuple[torch.Tensor, ...]


def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches(count: int, size: int = 4) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 3, 4, 4, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


def settings(**changes: Any) -> Config:
    config = parse([])
    for name, value in changes.items():
        group, field = name.split("__")
        changed = dataclasses.replace(getattr(config, group), **{field: value})
        config = dataclasses.replace(config, **{group: changed})
    return config


def run_steps(learner: Learner, data: list[Batch], steps: int) -> None:
    meter = Meter(CPU)
    meter.begin(data)
    for _ in range(steps):
        learner.train_step(meter)


def saved_run(path: Path, **changes: Any) -> dict[str, Any]:
    """Save the checkpoint of a run, with changes, and return what loads it."""
    config = settings().plain()
    content = {"format": 1, "config": config, "classes": ["a", "b"], "world_size": 1, "learner": {}, "ranks": []}
    checkpoint.save({**content, **changes}, path)
    return {"config": config, "classes": ["a", "b"], "world_size": 1}


def publish(monkeypatch: pytest.MonkeyPatch, folder: Path) -> nn.Module:
    """A network `TIMM` for 1,000 classes, whose weights timm then finds in a file, in the place of its hub."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(7)
    model: nn.Module = timm.create_model(TIMM, num_classes=1000)
    torch.save(model.state_dict(), folder / "published.pt")
    registry = importlib.import_module("timm.models._registry")._model_pretrained_cfgs
    for name in (TIMM, f"{TIMM}.r160_in1k"):
        here = dataclasses.replace(registry[name], file=str(folder / "published.pt"), hf_hub_id=None)
        monkeypatch.setitem(registry, name, here)
    return model


def refused(capsys: pytest.CaptureFixture[str], act: Callable[[list[str]], object], arguments: list[str]) -> str:
    """The one line of a wrong command line, without its "error: "."""
    with pytest.raises(SystemExit) as stopped:
        act(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and line.startswith("error: ")
    return line.removeprefix("error: ")
