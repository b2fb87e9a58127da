"""How a network of ours was trained, as evaluations say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastmoll.sweep.settings import AXES, DECISIVE, QUIET, changes, flat, read_settings, words


def ended(config: Mapping[str, Any], steps: int | None, per_epoch: int) -> dict[str, Any]:
    """Settings of a run whose weights have had some of its steps, by an interrupt too: as if it was to end there.

    Args:
        config: Its settings.
        steps: Number of steps; None: all.
        per_epoch: Steps of an epoch.

    Returns:
        Its settings with ``run.max_steps`` where that is less than its schedule has, and else without.
    """
    early = steps is not None and steps < config["optim"]["epochs"] * per_epoch
    return {**config, "run": {**config["run"], "max_steps": steps if early else None}}


def changed_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that it does not have by default and that matter for the result: those that name a sweep's runs.

    Beside these, that it was on one batch alone (``--resident``), which no run of a sweep is.
    """
    data, small = config["data"], "name" in config["data"]
    recipe = str(config.get("recipe", "finetune"))
    base = [f"--data={data['name']}"] if small else [str(data.get("path") or "data"), f"--recipe={recipe}"]
    now = flat({name: value for name, value in config.items() if name != "resolved"})
    decisive = [word for name in DECISIVE if name in now for word in words(name, now[name])]
    trainer = "small_images" if small else "imagenet"
    answers = read_settings([(trainer, base), (trainer, [*base, *decisive])])
    if not all("settings" in answer for answer in answers):
        return {}  # of a version of the trainer that had other recipes
    before, usual = (flat(answer["settings"]) for answer in answers)
    quiet = {*QUIET, *AXES.values(), "recipe"} - {"run.resident"}
    if small:  # that trainer fills them in from its data where the user gave none
        quiet |= {"data.mean", "data.std"}
    if not config["mollify"]["enabled"]:
        quiet |= {name for name in now if name.startswith("mollify.")}
    found = changes({name: value for name, value in now.items() if name not in quiet}, before, usual)
    return found if recipe == "finetune" else {"recipe": recipe, **found}
