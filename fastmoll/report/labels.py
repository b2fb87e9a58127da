"""What reports call the runs that they show."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastmoll.paper import paper_mollification
from fastmoll.report.runs import BINARY, Group, RunResult, image_set, is_binary

_FROST: Final = {
    "made": "Frost: made means that the frost is of textures that fastmoll makes, not of the published photographs.",
    "published": "Frost: published means that the frost is of the published photographs.",
}
_ALONE: Final = {"noise": "noise alone", "blur": "blur alone"}


def labels(groups: Sequence[Group]) -> list[str]:
    """A short name for each group, for legends: augmentation and mollification, and what else differs among them."""
    parts = [_parts(group.run, text) for group, text in zip(groups, differing_settings(groups), strict=True)]
    differing = {key for key in (parts[0] if parts else ()) if len({part[key] for part in parts}) > 1}
    known = any(group.run.augment is not None or group.run.mollify is not None for group in groups)
    shown = differing | ({"training"} if known else {"net"})
    return [", ".join(text for key, text in part.items() if key in shown and text) for part in parts]


def differing_settings(groups: Sequence[Group]) -> list[str]:
    """`settings_text` of each group, of what the groups don't all share and `mollification` does not say."""
    shared = _shared(groups)
    return [
        settings_text({x: value for x, value in run.settings.items() if x not in shared and x not in _said(run)})
        for run in (group.run for group in groups)
    ]


def shared_settings(groups: Sequence[Group]) -> str:
    """A sentence on what `differing_settings` leaves out since all share it, ``"All runs: optim.epochs=4."``.

    Empty where there is none.
    """
    text = settings_text(
        {x: y for x, y in _shared(groups).items() if not all(x in _said(group.run) for group in groups)}
    )
    return text and f"All runs: {text}."


def mollification(run: RunResult) -> str | None:
    """``"no"``, ``"yes"``, ``"noise alone"`` or ``"blur alone"``; None: unknown."""
    if not run.mollify:
        return None if run.mollify is None else "no"
    return _ALONE.get(paper_mollification(run.mollify, run.settings) or "", "yes")


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings as text, ``"mollify.beta=1,3 optim.epochs=30"``."""

    def text(value: Any) -> str:
        if isinstance(value, bool) or value is None:
            return json.dumps(value)
        return ",".join(map(text, value)) if isinstance(value, list | tuple) else str(value)

    return " ".join(f"{name}={text(value)}" for name, value in sorted(settings.items()))


def training(run: RunResult) -> str:
    """Augmentation and mollification, ``"fcr+trivial + mollification"``; empty where neither is known."""
    unknown = "mollification unknown" if run.augment else ""
    mollify = {None: unknown, "no": "", "yes": "mollification"}.get(kind := mollification(run), kind)
    return " + ".join(filter(None, (augmentation(run), mollify)))


def augmentation(run: RunResult) -> str | None:
    """The augmentation in words, ``"no augmentation"`` where it is ``"none"``; None: unknown."""
    return "no augmentation" if run.augment == "none" else run.augment


def explain(groups: Sequence[Group]) -> str:
    """Sentences on what the names of the corrupted images mean and what figures are of; empty where none is needed."""
    runs = [group.run for group in groups]
    texts = [text for name, text in _FROST.items() if name in {run.frost for run in runs}]
    if len({run.set_name is None for run in runs if run.source == "generated"}) > 1:
        texts.append("Generated images without the name of a set were made on the way.")
    texts += [BINARY] * any(is_binary(run.settings) for run in runs)
    return " ".join(texts)


def _shared(groups: Sequence[Group]) -> dict[str, Any]:
    every = [group.run.settings for group in groups]
    first = every[0] if every else {}
    return {x: value for x, value in first.items() if all(x in other and other[x] == value for other in every)}


def _said(run: RunResult) -> tuple[str, ...]:
    """Settings that `mollification` says."""
    return ("mollify.roles",) if mollification(run) in _ALONE.values() else ()


def _parts(run: RunResult, settings: str) -> dict[str, str]:
    return {
        "data": run.data,
        "size": f"{run.size} px",
        "net": run.net,
        "training": training(run),
        "settings": settings,
        "checkpoint": "" if run.seed is not None else run.checkpoint,
        "count": f"{run.count} images",
        "set": image_set(run),
    }
