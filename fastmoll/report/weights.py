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
    no time. Of newer ones, which may be a copy, the digest tells.

    Args:
        run: The evaluation.

    Returns:
        The reason; None where they are the same, aren't there, or nothing says which they were.
    """
    out = run.path.absolute().parent
    weights, settings = out.parent / Path(run.checkpoint).name, out / "settings.json"
    try:
        if not out.name.startswith("robustness-") or weights.stat().st_mtime_ns <= settings.stat().st_mtime_ns:
            return None
        evaluated = json.loads(settings.read_text(encoding="utf-8"))["fingerprint"][WEIGHTS]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    try:
        if _digest(weights) == evaluated:
            return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass  # not what was read then
    return f"the weights beside it, {weights.name}, were changed after it; evaluate again, which compares them"


def _digest(path: Path) -> str:
    """`digest` of the state dict that a file of weights holds, of a checkpoint of ours that of its average if any."""
    content = read_file(path)
    if content.get("format") == FORMAT:
        content = content["learner"]["ema"] or content["learner"]["model"]
    return digest(content)
