"""Time of the batch tail against batch size and resolution, and the picture of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from fused import COPY, Tails, TailSettings, timed
from harness import Clock

_DPI = 80


@dataclass(frozen=True, kw_only=True)
class Settings(TailSettings):
    """What is timed: all ``batches`` at ``size``, and ``batch_size`` images of all ``sizes``."""

    rounds: int = 10
    """Turns of each side at each point."""
    batches: tuple[int, ...] = (32, 64, 128, 256, 512)
    """Images a batch."""
    sizes: tuple[int, ...] = (32, 64, 128, 160, 224, 256, 288, 384)
    """Heights and widths, pixels."""


def bench_sweep(settings: Annotated[Settings, tyro.conf.arg(name="")]) -> dict[str, Any]:
    """The batch tail with roles mixed, against the authors' way and the copy, over batch sizes and resolutions."""
    points = {(batch, settings.size) for batch in settings.batches}
    points |= {(settings.batch_size, size) for size in settings.sizes}
    rows, failed = [], {}
    for batch, size in sorted(points):
        tails = Tails(replace(settings, batch_size=batch, size=size), peers=False)
        timings = timed(tails.sides("roles mixed"), Clock(tails.device), settings.rounds)
        rows += [{"batch": batch, "size": size, **row} for row in timings]
        failed |= {f"{batch} images of {size} pixels, {side}": why for side, why in tails.failed.items()}
    return {"benchmark": "sweep", "settings": asdict(settings), "failed": failed, "rows": rows}


def plot(result: Annotated[Path, tyro.conf.Positional]) -> Path:
    """Draw the result of a sweep beside its JSON, as PNG.

    Args:
        result: the JSON file.

    Returns:
        The picture's file.

    Raises:
        ValueError: not the result of a sweep.
    """
    import matplotlib.pyplot as plt  # Only here: everything else runs without it.

    content = json.loads(result.read_text())
    if content.get("benchmark") != "sweep":
        raise ValueError(f"result must be the JSON of a sweep, got {result}")
    settings, rows = content["settings"], content["rows"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.4), sharey=True, layout="constrained")
    left.set(xlabel=f"images of {settings['size']} × {settings['size']} pixels", ylabel="milliseconds a batch")
    right.set(xlabel=f"height and width of {settings['batch_size']} images, pixels")
    chosen = {
        "batch": [row for row in rows if row["size"] == settings["size"]],
        "size": [row for row in rows if row["batch"] == settings["batch_size"]],
    }
    for axes, (along, points) in zip((left, right), chosen.items(), strict=True):
        for name in dict.fromkeys(row["side"] for row in points):
            line = sorted((row[along], row["ms"]["median"]) for row in points if row["side"] == name)
            style = {"color": "black", "linestyle": "--"} if name == COPY else {"marker": "o", "markersize": 4}
            axes.plot(*zip(*line, strict=True), **style, label=f"{name} (the floor)" if name == COPY else name)
        places = sorted({row[along] for row in points})
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(places, [str(place) for place in places], rotation=45)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"Batch tail, a third of each role: {content['environment']['processor']}")
    picture = result.with_suffix(".png")
    figure.savefig(picture, dpi=_DPI)
    plt.close(figure)
    return picture
