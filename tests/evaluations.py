"""A small data set, a corrupted one, networks, and the command ``fastmoll evaluate``, for its tests."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import CONTEXT, be_rank, free_port

from fastmoll.cli.main import main
from fastmoll.corruptions import CORRUPTIONS

SOME = ["--corruptions", "fog", "gaussian_noise", "--severities", "2", "5", "--device", "cpu"]

OWN = """
import torch


def tiny(num_classes=5):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, num_classes))


def other(num_classes=5):
    return torch.nn.Sequential(*tiny(num_classes), torch.nn.Softplus())


def two():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 2))
"""


def run(*arguments: object) -> int:
    """The command in this process; its exit status."""
    return main(["evaluate", *map(str, arguments)])


def cells(out: Path) -> dict[str, dict[str, Any]]:
    """The figures of each cell that is done."""
    found = {path.stem: json.loads(path.read_text()) for path in (out / "cells").iterdir()}
    for name, content in found.items():
        corruption, severity = content.pop("corruption"), content.pop("severity")
        assert name == ("clean" if corruption is None else f"{corruption}-{severity}") and content.pop("images")
    return found


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of an error of input."""
    assert run(*arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


def write_data(root: Path, size: int = 16, train: int = 30, val: int = 24) -> Path:
    """Arrays of three classes of noise around a colour."""
    generator = np.random.default_rng(0)
    for split, count in {"train": train, "val": val}.items():
        labels = np.arange(count) % 3
        images = generator.integers(0, 120, (count, size, size, 3), dtype=np.uint8)
        images[np.arange(count), :, :, labels] += 100
        np.save(root / f"{split}.npy", images)
        np.save(root / f"{split}_labels.npy", labels)
    return root


def write_official(root: Path, data: Path) -> Path:
    """A set in the layout of CIFAR-C: brighter with the severity, by another amount for each corruption."""
    images = np.load(data / "val.npy").astype(np.int64)
    for number, name in enumerate(CORRUPTIONS):
        levels = [np.clip(images + (5 + number) * severity, 0, 255).astype(np.uint8) for severity in range(1, 6)]
        np.save(root / f"{name}.npy", np.concatenate(levels))
    np.save(root / "labels.npy", np.tile(np.load(data / "val_labels.npy"), 5))
    return root


def rank_main(rank: int, world_size: int, port: int, arguments: list[str]) -> None:
    be_rank(rank, world_size, port)
    with open(os.devnull, "w") as sink, redirect_stdout(sink), redirect_stderr(sink):
        code = run(*arguments)
    sys.exit(code)


def start(world_size: int, *arguments: object) -> list[Any]:
    """The processes of an evaluation, as torchrun would start them."""
    port = free_port()
    texts = [str(argument) for argument in arguments]
    ranks: list[Any] = [
        CONTEXT.Process(target=rank_main, args=(rank, world_size, port, texts)) for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    return ranks


def finish(ranks: list[Any], timeout: float = 200) -> list[int]:
    for process in ranks:
        process.join(timeout=timeout)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    return codes
