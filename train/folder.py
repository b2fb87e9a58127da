"""The output folder of a run: what is in it already."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastmoll.pipelines.errors import counted
from fastmoll.train.config import difference
from fastmoll.train.logs import results_in_words
from fastmoll.train.settings import Config


def look_for_run(output: Path, wanted: bool) -> bool:
    """Whether ``output`` has a checkpoint to go on from.

    Args:
        output: Folder, which need not be there.
        wanted: Whether a run is to go on, not to begin.

    Raises:
        ValueError: it holds a run that a new one would overwrite.
    """
    found = (output / "checkpoint.pt").exists()
    if wanted and found:
        return True
    if (output / "result.json").exists():
        ended = _ended(output) if found else None
        if ended is not None and ended[2] < ended[3]:
            raise ValueError(
                f"--run.output: {output} holds a run that stopped after step {ended[2]} of {ended[3]}; --resume with "
                "more steps goes on, or choose another folder"
            )
        raise ValueError(f"--run.output: {output} holds a finished run; choose another folder")
    if not wanted and (found or (output / "log.jsonl").exists()):
        raise ValueError(f"--run.output: {output} holds an unfinished run; pass --resume or choose another folder")
    return False


def finished(output: Path, config: Config, world_size: int) -> str | None:
    """What came out of a run in ``output``, in words, where it has done all the steps that ``config`` asks for.

    Args:
        output: Folder, which need not be there.
        config: Settings that the run is to go on with.
        world_size: Number of processes.

    Raises:
        ValueError: it was a run with other settings.
    """
    ended = _ended(output)
    if ended is None:
        return None
    saved, result, done, total = ended
    if done != min(total, config.run.max_steps or total):
        return None
    resolved, now = saved.pop("resolved"), config.plain()
    if resolved.get("world_size") != world_size:
        now["data"]["batch_size"] = saved["data"]["batch_size"]  # no step is left that must have as many images
    changed = difference(saved, now)
    if changed:
        raise ValueError(
            f"--run.output: {output} holds a finished run with other settings: {changed}; choose another folder"
        )
    steps = counted(total, "step") if done == total else f"the {done} of {counted(total, 'step')} that are asked for"
    before, path = (str(settings["data"]["path"]) for settings in (saved, now))  # which may have been moved
    other = f" on {before}, not {path}" if os.path.abspath(before) != os.path.abspath(path) else ""
    return f"the run in {output} is finished, after {steps}{other}: {result}"


def _ended(output: Path) -> tuple[dict[str, Any], str, int, int] | None:
    """Of a run with results: its settings, the results in words, its steps, and how many it would have to its end.

    None where there are none, or some that can't be read.
    """
    with suppress(OSError, LookupError, ValueError, TypeError):
        config, result = (json.loads((output / f"{name}.json").read_bytes()) for name in ("config", "result"))
        total = int(config["optim"]["epochs"] * config["resolved"]["steps_per_epoch"])
        return config, results_in_words(result["validation"]), int(result["steps"]), total
    return None
