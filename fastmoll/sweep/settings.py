"""The settings of the trainers, as these read them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

TRAINERS: Final = ("small_images", "imagenet")
AXES: Final = {
    "data": "data.name",
    "net": "model.name",
    "augment": "data.augment",
    "mollify": "mollify.enabled",
    "seed": "run.seed",
}
"""Axes of a grid, and the settings of the trainer that they are."""
OWN: Final = ("run.output", "run.resume", "run.evaluate", "run.resident", "run.device")
"""Settings that a sweep gives its runs itself."""
# Settings that change how a run is done or reported, not what comes out: they neither name nor distinguish runs.
QUIET: Final = (
    *("data.path", "data.threads", "data.decoder", "data.hw_decoder_load", "mollify.backend", *OWN),
    *("run.checkpoint_every", "run.validate_every", "run.log_every"),
)
DECISIVE: Final = ("optim.name", "optim.epochs")
"""Settings by which the trainers choose defaults of others."""

# Run in a process of its own, because fastmoll does not import its trainers: reads [[trainer, arguments], ...], writes
# for each the settings that follow or what is wrong. No network, no data, no GPU: a tenth of a second each.
_READ_SETTINGS: Final = """
import contextlib, io, json, sys
from fastmoll.train import config
def read(trainer, arguments):
    text = io.StringIO()
    try:
        with contextlib.redirect_stderr(text):
            settings = {"small_images": config.parse_small, "imagenet": config.parse}[trainer](arguments)
        config.check(settings)
    except SystemExit:
        return {"error": text.getvalue().removeprefix("error: ").strip()}
    except ValueError as error:
        return {"error": str(error)}
    return {"settings": settings.plain()}
json.dump([read(*request) for request in json.load(sys.stdin)], sys.stdout)
"""


def environment_alone() -> dict[str, str]:
    """The environment without what tells a trainer that it is one of several processes: those it would wait for."""
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}


def read_settings(requests: Sequence[tuple[str, Sequence[str]]]) -> list[dict[str, Any]]:
    """What the trainers make of these command lines."""
    done = subprocess.run(
        [sys.executable, "-c", _READ_SETTINGS],
        input=json.dumps(requests),
        env=environment_alone(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the trainer's settings can't be read:\n{done.stderr}")
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def words(name: str, value: Any) -> list[str]:
    """A setting on the trainer's command line."""
    option = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        group, _, flag = option.rpartition(".")
        return [option if value else f"{group}.no-{flag}"]
    if isinstance(value, list):
        return [option, *map(as_text, value)]
    return [f"{option}={as_text(value)}"]


def as_text(value: object) -> str:
    """A setting's value, short: ``1``, ``1,0.5``, ``true``."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.12g}"
    return ",".join(map(as_text, value)) if isinstance(value, (list, tuple)) else str(value)


def changes(settings: Mapping[str, Any], recipe: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a run does not have by default.

    Args:
        settings: All of them, flat.
        recipe: Those of its recipe.
        usual: Those of its recipe with its `DECISIVE` ones.
    """
    return {x: y for x, y in settings.items() if y != (recipe if x in DECISIVE else usual).get(x)}


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted names: ``{"optim": {"lr": 1}}`` is ``{"optim.lr": 1}``."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found
