"""What the tests of sweeps share: a small sweep, the names of its runs, and results as a trainer leaves them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fastmoll.sweep.file import Run

DIGITS = """
[defaults]
data = "digits"
[[grid]]
mollify = [false, true]
seed = [0, 1]
"""


def names(runs: Sequence[Run]) -> list[str]:
    return [run.name for run in runs]


def finish(folder: Path, error: float, nll: float = 1.0, ece: float = 0.1, **more: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"validation": {"error": error, "nll": nll, "ece": ece, "count": 100}, **more}
    (folder / "result.json").write_text(json.dumps(content))
