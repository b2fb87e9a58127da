"""Whether an evaluation is still that of the weights beside it."""

from __future__ import annotations

import json
from pathlib import Path

from fastmoll.report.runs import RunResult
from fastmoll.robustness.networks import WEIGHTS, digest
from fastmoll.weights import FORMAT, read_file


def changed_weights(run: RunResult) -> str | None:
    """Why an evaluation in the folder that it has by default is not that of the weights beside that.

    Weights that are as old as ``settings.json``, for which they were read, are not: thousands of runs are looked at in
    no time. Of newer ones, which may be a copy, the digest tells; not of others' than our trainers', whose names and
    types may not be those of the network that was made of them.

    Args:
        run: The evaluation.

    Returns:
        The reason; None where they are the same, aren't there or can't be read, or nothing says which they were.
    """
    out = run.path.absolute().parent
    weights, settings = out.parent / Path(run.checkpoint).name, out / "settings.json"
    try:
        if run.seed is None or not out.name.startswith("robustness-"):
            return None
        if weights.stat().st_mtime_ns <= settings.stat().st_mtime_ns:
            return None
        evaluated = json.loads(settings.read_text(encoding="utf-8"))["fingerprint"][WEIGHTS]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    try:
        if _digest(weights) == evaluated:
            return None
    except OSError:  # as those of another user
        return None
    except (ValueError, LookupError, TypeError, AttributeError):
        pass  # not what was read then
    return f"the weights beside it, {weights.name}, were changed after it; evaluate again, which compares them"


def _digest(path: Path) -> str:
    """`digest` of the state dict that a file of weights holds, of a checkpoint of ours that of its average if any."""
    content = read_file(path)
    if content.get("format") == FORMAT:
        content = content["learner"]["ema"] or content["learner"]["model"]
    return digest(content)
