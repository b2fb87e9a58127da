"""What a sweep looks at before it starts, or would start, any run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from fastmoll.output import check_writable
from fastmoll.pipelines.errors import some
from fastmoll.pipelines.small import NAMES, find_small
from fastmoll.sweep.file import Run
from fastmoll.sweep.settings import QUIET, as_text, flat
from fastmoll.sweep.table import is_done
from fastmoll.weights import check_weights

_LONGEST: Final = 255  # bytes of a name, in the file systems of Linux


def check_names(runs: Sequence[Run]) -> None:
    """Refuse runs whose folders no file system takes.

    Raises:
        ValueError: the name of one is too long; its place in the sweep's file, and the longest part of the name.
    """
    for run in runs:
        excess = len(os.fsencode(run.name)) - _LONGEST
        if excess > 0:
            parts = {"data": run.data, "net": run.net, "augment": run.augment, **run.changes}
            key = max(parts, key=lambda x: len(os.fsencode(parts[x])))
            raise ValueError(
                f"{run.places.get(key, run.places['data'])}: a run's name, which is its folder's, is {excess} bytes "
                f"too long: shorten {key}, {parts[key]!r} ({run.name[:30]}...{run.name[-60:]})"
            )


def check_start(runs: Sequence[Run], out: Path, device: str, gpus: str | None) -> list[str | None]:
    """Refuse what would make run after run fail: data and weights that are not there, a folder that can't be made.

    Args:
        runs: The runs that are to be trained, if they aren't yet.
        out: Folder of the sweep.
        device: auto, cuda or cpu.
        gpus: GPUs to use, as in ``CUDA_VISIBLE_DEVICES``; None: all that are visible.

    Returns:
        What to run on, each one run at a time: GPUs as ``CUDA_VISIBLE_DEVICES`` names them, or None, the CPU.

    Raises:
        ValueError: the first of these, with its place in the sweep's file or the option.
    """
    devices = _devices(device, gpus)
    todo = [run for run in runs if not is_done(run.folder(out))]
    if todo:
        check_writable("--out", out)
    # A run that was begun has its weights in its checkpoint.
    new = [run for run in todo if not (run.folder(out) / "checkpoint.pt").exists()]
    wanted_weights = ((run.net, run.settings["model.weights"], run.places["model.weights"]) for run in new)
    for net, weights, place in dict.fromkeys(wanted_weights):
        if weights is not None:
            with _said_of(place):
                check_weights(net, weights)
    wanted = {(run.trainer, run.settings.get("data.name", ""), run.settings["data.path"]): run.places for run in todo}
    for (trainer, name, path), places in wanted.items():
        with _said_of(places["data"]):
            if trainer == "small_images":
                find_small(name, path)
            elif path is not None and not Path(path).is_dir():
                raise ValueError(f"data: there is no folder {path}")
    return devices


def done_otherwise(runs: Sequence[Run], out: Path) -> list[str]:
    """What to say of runs that were done with another setting than they have now: the file may have changed."""
    found: dict[str, list[str]] = {}
    for run in runs:
        change = _change(run, run.folder(out)) if is_done(run.folder(out)) else None
        if change is not None:
            found.setdefault(change, []).append(run.name)
    return [f"{out}: done before with {change}, and left as it is: {some(names)}" for change, names in found.items()]


def _change(run: Run, folder: Path) -> str | None:
    try:
        saved = flat(json.loads((folder / "config.json").read_bytes()))
    except (OSError, ValueError, AttributeError):
        return None  # of a run that was begun by other means
    for name, value in run.settings.items():
        # What the file leaves open, as the mean of the data, the trainer has filled in.
        if name in saved and name not in QUIET and value is not None:
            before, now = (
                str(Path(str(x)).resolve()) if name == "data.name" and x not in NAMES else as_text(x)
                for x in (saved[name], value)
            )
            if before != now:
                return f"{name} {before} instead of {now}"
    return None


@contextmanager
def _said_of(place: str) -> Iterator[None]:
    """Put the place in the sweep's file before what is wrong."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _devices(device: str, gpus: str | None) -> list[str | None]:
    if device == "cpu" and gpus is not None:
        raise ValueError(f"--gpus: there are none to use with --device cpu, got {gpus!r}")
    count = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if count == 0:
        if device == "cuda" or gpus is not None:
            raise ValueError(f"--{'gpus' if gpus is not None else 'device'}: torch finds no usable CUDA device")
        return [None]
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    visible = named.split(",")[:count] if named else [str(i) for i in range(count)]
    wanted = visible if gpus is None else [name.strip() for name in gpus.split(",")]
    for name in wanted:
        if name not in visible or wanted.count(name) > 1:
            raise ValueError(f"--gpus must be some of {','.join(visible)}, each once, got {gpus!r}")
    return [*wanted]
