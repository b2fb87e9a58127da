"""The output folder of a run: what is in it already."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path


def look_for_run(output: Path, wanted: bool) -> bool:
    """Whether ``output`` has a checkpoint to go on from.

    Args:
        output: Folder, which need not be there.
        wanted: Whether a run is to go on, not to begin.

    Raises:
        ValueError: it is no folder, or holds a run that a new one would overwrite.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"--run.output: {output} is not a folder")
    found = (output / "checkpoint.pt").exists()
    if wanted and found:
        return True
    if (output / "result.json").exists():
        step = _stopped(output) if found else None
        if step is not None:
            raise ValueError(
                f"--run.output: {output} holds a run that stopped after {step}; --resume with more steps goes on, or "
                "choose another folder"
            )
        raise ValueError(f"--run.output: {output} holds a finished run; choose another folder")
    if not wanted and (found or (output / "log.jsonl").exists()):
        raise ValueError(f"--run.output: {output} holds an unfinished run; pass --resume or choose another folder")
    return False


def _stopped(output: Path) -> str | None:
    """The step that a run was stopped after by ``--run.max-steps``, and of how many; None where it came to its end."""
    with suppress(OSError, LookupError, ValueError, TypeError):
        config, result = (json.loads((output / f"{name}.json").read_bytes()) for name in ("config", "result"))
        done, total = int(result["steps"]), int(config["optim"]["epochs"] * config["resolved"]["steps_per_epoch"])
        return f"step {done} of {total}" if done < total else None
    return None
