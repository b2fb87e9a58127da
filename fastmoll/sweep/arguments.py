"""What the words of a sweep's command line mean, as far as that can be said without torch."""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path


def find_file(file: str | os.PathLike[str]) -> Path:
    """The sweep file of that path, or the one of that name that comes with the package.

    Raises:
        ValueError: neither is there.
    """
    path = Path(file)
    if path.is_file():
        return path
    folder = Path(str(resources.files("fastmoll")))
    ours = folder / path
    if path.parent == Path() and path.suffix == ".toml" and ours.is_file():
        return ours
    raise ValueError(
        f"{file}: no such file (with fastmoll: {', '.join(sorted(x.name for x in folder.glob('*.toml')))})"
    )


def parse_task(task: str | None) -> tuple[int, int]:
    """Part and number of parts of ``--task``, ``"i/n"``.

    Raises:
        ValueError: it is none.
    """
    if task is None:
        return 1, 1
    match = re.fullmatch(r"(\d+)/(\d+)", task)
    part, parts = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= part <= parts:
        raise ValueError(f"--task must be i/n with 1 <= i <= n, for example 1/8 to 8/8 (--array=1-8), got {task!r}")
    return part, parts
