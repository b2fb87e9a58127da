"""Checkpoints: what is written, and whether one that is read back belongs to the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fastmoll.output import replacing
from fastmoll.pipelines.errors import counted
from fastmoll.train.config import difference
from fastmoll.weights import FORMAT, read_file


def save(content: object, path: Path) -> None:
    """``torch.save`` in one piece.

    Raises:
        OSError: it can't be written; what was there stays.
    """
    with replacing(path) as file:
        torch.save(content, file)


def load(path: Path, *, config: dict[str, Any], classes: list[str], world_size: int) -> dict[str, Any]:
    """Read a checkpoint of a run with these settings and classes.

    Args:
        path: File that `save` wrote.
        config: ``Config.plain()`` of this run.
        classes: Class names of this run's data.
        world_size: Number of processes of this run; it may be another than before if a step has as many images.

    Returns:
        The content, on the CPU.

    Raises:
        ValueError: unreadable file, or a checkpoint of another run; the message names what differs.
        LookupError, TypeError, AttributeError: something is missing in it, or of another type.
    """
    content = read_file(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of this trainer (format {FORMAT})")
    if content["config"]["model"]["name"] != config["model"]["name"]:
        raise ValueError(f"{path} is of model {content['config']['model']['name']}, not of {config['model']['name']}")
    check_same(str(path), content["classes"], classes)
    if content["world_size"] != world_size:
        # The schedule counts steps, so that one must have as many images as before.
        before, now = content["config"]["data"]["batch_size"], config["data"]["batch_size"]
        images = before * content["world_size"]
        if now * world_size != images:
            wanted = f"is {images // world_size}" if images % world_size == 0 else f"times their number is {images}"
            raise ValueError(
                f"{path} is of {counted(content['world_size'], 'process', 'processes')} with batches of "
                f"{counted(before, 'image')}: {world_size} can go on where --data.batch-size {wanted}, got {now}"
            )
        config = {**config, "data": {**config["data"], "batch_size": before}}
    changed = difference(content["config"], config)
    if changed:
        raise ValueError(f"{path} is of a run with other settings: {changed}")
    return content


def check_same(file: str, theirs: Sequence[str], ours: Sequence[str]) -> None:
    """Refuse data of other classes than those of the run that a file is of, by name and order.

    Args:
        file: The file, as messages name it.
        theirs: Class names of that run's data.
        ours: Class names of the data here.

    Raises:
        ValueError: the first difference.
    """
    if list(theirs) == list(ours):
        return
    other = next((pair for pair in zip(theirs, ours, strict=False) if pair[0] != pair[1]), None)
    raise ValueError(
        f"{file} is of another data set: {len(theirs)} classes there and {len(ours)} here"
        + (f", the first difference is {other[0]!r} against {other[1]!r}" if other else "")
    )


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """State of this process's random generators, those of dropout and the like."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Put back what `rng_state` gave; of a run that was on a CPU, a GPU has nothing."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
