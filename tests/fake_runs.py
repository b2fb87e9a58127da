"""Made-up evaluations in the format of ``robustness.json``, for tests of what reads them.

The figures of a cell belong together: error, NLL and calibration errors are those of the same made-up predictions.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastmoll.report.pairs import in_order
from fastmoll.report.read import read_run
from fastmoll.report.runs import Group, group_seeds
from fastmoll.report.table import Number, Table, Value

TABLE = Table(
    "A title: 50 % of #1",
    "A note on a_b.",
    ("name", "count", "error, %"),
    (
        ("a_b|c & d", 3, Number(1 / 3, 0.046, 2)),
        ("~^\\{}$", 10, Number(-2.5, None, 1, signed=True)),
        ("ü <x>", 7, None),
    ),
)
"""A small table with signs that mean something in every format."""
ODD = ("a|b$x_{", "<script>x</script>", r"\input{x}%&#~^_", "../../x", "🦊猫", "L" * 300, "[x] *y* `z` &lt; _q_ --v")
"""Names that mean something where they are written: in Markdown, HTML, LaTeX, paths."""
NAMES = (
    *("gaussian_noise", "shot_noise", "impulse_noise"),
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
ENVIRONMENT = {"fastmoll": "0.2.0", "torch": "2.11.0", "device": "cpu"}


def cell(error: float, count: int, classes: int, rng: np.random.Generator) -> dict[str, Any]:
    """One cell: ``count`` predictions of which about ``error`` % are wrong, somewhat too confident."""
    right = rng.permutation(count) >= round(count * error / 100)
    confidence = np.where(right, rng.beta(6, 1, count), rng.beta(3, 2, count)).clip(1 / classes, 1 - 1e-6)
    loss = -np.log(np.where(right, confidence, (1 - confidence) / (classes - 1)))
    place = np.minimum((confidence * 15).astype(int), 14)
    bins = np.stack([np.bincount(place, w, 15) for w in (np.ones(count), confidence, right)], 1)
    order = np.argsort(confidence, kind="stable")
    gaps = [abs((confidence[part] - right[part]).sum()) for part in np.array_split(order, 15)]
    batches = [
        sum(abs((confidence[b] - right[b])[place[b] == i].sum()) for i in range(15)) / len(b)
        for b in np.array_split(np.arange(count), max(1, count // 100))
    ]
    return {
        "error": 100 * float(1 - right.mean()),
        "nll": float(loss.mean()),
        "ece": float(np.abs(bins[:, 1] - bins[:, 2]).sum() / count),
        "ece_adaptive": float(sum(gaps) / count),
        "ece_batch100": float(np.mean(batches)),
        "count": count,
        "reliability": [[int(n), float(c), int(k)] for n, c, k in bins],
    }


def fake_result(
    *,
    data: str = "cifar10",
    size: int = 32,
    num_classes: int = 10,
    net: str = "presnet50",
    augment: str | None = "fcr+trivial",
    mollify: bool | None = True,
    seed: int | None = 0,
    settings: dict[str, Any] | None = None,
    source: str = "generated",
    frost: str | None = "made",
    set_name: str | None = None,
    count: int = 400,
    shift: float = 0.0,
) -> dict[str, Any]:
    """The content of a ``robustness.json``; ``shift`` is added to all errors, in %."""
    settings = settings or {}
    key = repr((data, net, augment, mollify, seed, sorted(settings.items()), source))
    rng = np.random.default_rng(zlib.crc32(key.encode()))
    clean = 5.0 + shift + (1.0 if mollify else 0.0) + (4.0 if augment is None else 0.0) + rng.normal(0, 0.3)
    steep = (0.4 if mollify else 1.0) * (1.3 if augment is None else 1.0)
    cells = {
        name: [
            cell(clean + steep * (2 + number % 5) * severity + rng.normal(0, 0.3), count, num_classes, rng)
            for severity in range(1, 6)
        ]
        for number, name in enumerate(NAMES)
    }
    every = [one for row in cells.values() for one in row]
    return {
        "format": 1,
        "source": source,
        "frost": frost if source == "generated" else None,
        "set": set_name,
        "data": data,
        "size": size,
        "num_classes": num_classes,
        "net": net,
        "augment": augment,
        "mollify": mollify,
        "seed": seed,
        "settings": settings,
        "checkpoint": "last.pt",
        "count": count,
        "clean": cell(clean, count, num_classes, rng),
        "cells": cells,
        "corrupted": {m: float(np.mean([x[m] for x in every])) for m in ("error", "nll", "ece", "ece_batch100")},
        "mce": None,
        "environment": ENVIRONMENT,
    }


def write_run(folder: Path, result: dict[str, Any]) -> Path:
    """Write a result where an evaluation puts it, below a run's folder; returns that folder."""
    out = folder / "-".join(filter(None, ("robustness", result["source"], result["set"])))
    out.mkdir(parents=True, exist_ok=True)
    (out / "robustness.json").write_text(json.dumps(result))
    return folder


def fake_runs(
    root: Path,
    *,
    augments: Iterable[str | None] = ("fcr", "fcr+trivial"),
    seeds: Iterable[int] = (0, 1),
    **common: Any,
) -> list[Path]:
    """Folders of runs with and without mollification, for each augmentation and seed."""
    return [
        write_run(
            root / f"{common.get('data', 'cifar10')}-{augment}-{mollify}-{seed}",
            fake_result(augment=augment, mollify=mollify, seed=seed, **common),
        )
        for augment in augments
        for mollify in (False, True)
        for seed in seeds
    ]


def groups_of(root: Path, *values: dict[str, Any]) -> list[Group]:
    """The groups of small runs, one of each of these values."""
    paths = [write_run(root / str(n), fake_result(**{"count": 40, **x})) for n, x in enumerate(values)]
    return in_order(group_seeds(map(read_run, paths)))


def several_groups(root: Path) -> list[Group]:
    """Two augmentations on generated and one on official images, with and without mollification, over seeds."""
    paths = [*fake_runs(root / "a"), *fake_runs(root / "b", source="official", augments=("fcr",), seeds=(0, 1, 2))]
    return in_order(group_seeds(map(read_run, paths)))


def rows_of(table: Table) -> list[dict[str, Value]]:
    """The cells of each row by the heads of their columns."""
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def number(value: Value) -> Number:
    """A cell that is a figure."""
    assert isinstance(value, Number)
    return value


def find(tables: Sequence[Table], title: str) -> Table:
    """The table of that title."""
    (table,) = [table for table in tables if table.title == title]
    return table
