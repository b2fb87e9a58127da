"""Which runs of a sweep its filters choose."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from fastmoll.sweep.file import Run, hint
from fastmoll.sweep.settings import AXES, as_text


def select(runs: Sequence[Run], filters: Sequence[str]) -> list[Run]:
    """The runs that match all filters; see `fastmoll.sweep.run.run_sweep`.

    Raises:
        ValueError: a filter that no run of the sweep matches.
    """
    chosen = list(runs)
    for text in filters:
        key, equals, value = text.partition("=")
        matching = [run for run in runs if text in (run.name, run.former)]
        if equals and not matching:
            setting = AXES.get(key, key.replace("-", "_"))
            known = {*AXES, *(name for run in runs for name in run.settings)}
            if key not in AXES and setting not in known:
                varied = sorted({name for run in runs for name in run.changes})
                raise ValueError(f"--filter: unknown key {key!r}{hint(key, known, [*AXES, *varied])}")
            matching = [run for run in runs if _same(run.data if key == "data" else run.settings.get(setting), value)]
            known = {as_text(run.data if key == "data" else run.settings.get(setting)) for run in runs}
        elif not matching:
            matching = [run for run in runs if text in _values(run)] or [run for run in runs if text in run.name]
            known = {value for run in runs for value in _values(run)}
        if not matching:
            raise ValueError(f"--filter: no run matches {text!r}{hint(value if equals else text, known)}")
        names = {run.name for run in matching}
        chosen = [run for run in chosen if run.name in names]
    if not chosen:
        raise ValueError(f"--filter: no run matches all of {', '.join(filters)}")
    return chosen


def _same(value: object, text: str) -> bool:
    """Whether ``text`` means ``value``: ``1`` and ``1.0`` do."""
    with suppress(ValueError):
        text = as_text(float(text))
    return as_text(value) == text


def _values(run: Run) -> list[str]:
    changes = [f"{name}={value}" for name, value in run.changes.items()]
    return [run.data, run.net, run.augment, *(["mollify"] if run.mollify else []), *changes, f"seed{run.seed}"]
