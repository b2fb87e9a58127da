"""The output folder of a run: what is in it already."""

from __future__ import annotations

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
        raise ValueError(f"--run.output: {output} holds a finished run; choose another folder")
    if not wanted and (found or (output / "log.jsonl").exists()):
        raise ValueError(f"--run.output: {output} holds an unfinished run; pass --run.resume or choose another folder")
    return False
