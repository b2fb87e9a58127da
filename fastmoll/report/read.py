"""Finished evaluations, read from their ``robustness.json``; what is wrong in one is named by its key."""

from __future__ import annotations

import json
import math
import os
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from fastmoll.kernels.corruption_constants import CORRUPTIONS, SEVERITIES
from fastmoll.output import LARGEST_LOSS, in_runs
from fastmoll.report.runs import CLEAN, MEANS, Cell, RunResult

_FILE: Final = "robustness.json"
_EXACT: Final = 2**53  # up to here whole numbers are numbers of float64, too
_SIDE: Final = 16_384


class BadEvaluation(ValueError):
    """A file that is not what an evaluation writes.

    Attributes:
        path: The file.
        reason: What is wrong with it.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


def find_runs(path: str | Path) -> list[Path]:
    """The evaluations that a path names.

    Args:
        path: A ``robustness.json``, the folder it is in, the run's folder with ``robustness-*`` in it, or a folder of
            such run folders (a sweep's), which may lie one further down.

    Returns:
        Their ``robustness.json``, at least one, in alphabetical order.

    Raises:
        ValueError: there is none, or only unfinished ones.
    """
    place = Path(path)
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise ValueError(f"there is no file or folder {place}")
    if not os.access(place, os.R_OK | os.X_OK):
        raise ValueError(f"{place}: no permission to look into this folder")
    own = sorted(place.glob(_FILE)) or sorted(place.glob(f"robustness-*/{_FILE}"))
    found = own or in_runs(place, f"robustness-*/{_FILE}")
    if found:
        return found
    begun = find_unfinished(place)
    reason = "not all 75 cells are evaluated; evaluate again to add them" if begun else "evaluate a checkpoint first"
    raise ValueError(f"{place} has no {_FILE}: {reason}")


def find_unfinished(path: str | Path) -> list[Path]:
    """The folders of evaluations under a path, as for `find_runs`, that lack some of their cells."""
    place = Path(path)
    found = [*place.glob("cells"), *place.glob("robustness-*/cells"), *in_runs(place, "robustness-*/cells")]
    return sorted(cells.parent for cells in found if not (cells.parent / _FILE).exists())


def find_unevaluated(path: str | Path) -> list[Path]:
    """The runs in a folder of many of which there is no evaluation, not even a part."""
    runs = {file.parent for file in in_runs(Path(path), "config.json")}
    begun = ("robustness-*/cells", f"robustness-*/{_FILE}")
    return sorted(run for run in runs if not any(any(run.glob(pattern)) for pattern in begun))


def read_run(folder: str | Path) -> RunResult:
    """Read one finished evaluation.

    Args:
        folder: A ``robustness.json``, the folder it is in, or the run's folder with one ``robustness-*`` in it.

    Raises:
        ValueError: there is none or more than one; `BadEvaluation`: it is not what an evaluation writes, with the file
            and the key.
    """
    path, *others = find_runs(folder)
    if others:
        raise ValueError(
            f"{folder} has {1 + len(others)} evaluations: name one ({path.parent}, {others[0].parent}, ...)"
        )
    try:
        return _Reader(path).result(_load(path))
    except RecursionError as error:
        raise BadEvaluation(path, "it cannot be read as JSON (too deeply nested)") from error


def check_cell(path: Path, content: object, count: int) -> None:
    """Refuse figures of a cell that no evaluation on ``count`` images gives; ``path`` is the file they are from.

    Raises:
        BadEvaluation: one is missing, or not what it can be; the message names it.
    """
    _Reader(path).cell(content, "cell", count)


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_each_once)
    except OSError as error:
        raise BadEvaluation(path, f"it cannot be read ({error.strerror})") from error
    except ValueError as error:
        anew = "; evaluate again, which writes it anew from its cells"
        raise BadEvaluation(path, f"it cannot be read as JSON ({error}){anew}") from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different: of two values for one, JSON would silently take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for n, (key, _) in enumerate(pairs) if key in dict(pairs[:n]))
        raise ValueError(f"key {json.dumps(twice)} is there twice")
    return found


@dataclass(frozen=True)
class _Kind:
    """What a value must be, in words and as a test."""

    words: str
    test: Callable[[Any], bool]

    def __or__(self, other: None) -> _Kind:
        return _Kind(f"{self.words} or null", lambda x: x is None or self.test(x))


def _is_whole(x: object, low: int = -(2**63), high: int = 2**64 - 1) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and low <= x <= high


def _is_amount(x: object, high: float = LARGEST_LOSS) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x <= high


def _is_line(x: object) -> bool:
    """Text without line breaks, other control characters, and halves of characters that no file can hold."""
    return isinstance(x, str) and not any(unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp") for sign in x)


def _is_plain(x: object) -> bool:
    """A setting's value that can be compared and printed."""
    if isinstance(x, dict):
        return all(_is_line(key) and _is_plain(value) for key, value in x.items())
    if isinstance(x, list):
        return all(map(_is_plain, x))
    if isinstance(x, float):
        return not math.isnan(x)
    return x is None or isinstance(x, bool) or _is_whole(x) or _is_line(x)


def _is_bin(row: object) -> bool:
    if not isinstance(row, list) or len(row) != 3 or not all(map(_is_amount, row)):
        return False
    samples, confidence, right = row
    # The confidences are a sum of rounded numbers.
    whole = all(x % 1 == 0 for x in (samples, right))
    return whole and bool(right <= samples and confidence <= samples * (1 + 1e-6))


_WHOLE: Final = _Kind("a whole number of 64 bits", _is_whole)
_COUNT: Final = _Kind("a whole number from 1 to 2^53", lambda x: _is_whole(x, 1, _EXACT))
_PIXELS: Final = _Kind(f"a whole number from 1 to {_SIDE}", lambda x: _is_whole(x, 1, _SIDE))
_AMOUNT: Final = _Kind("a finite number of at least 0 that float32 holds", _is_amount)
_PERCENT: Final = _Kind("a number from 0 to 100", lambda x: _is_amount(x, 100))
_FRACTION: Final = _Kind("a number from 0 to 1", lambda x: _is_amount(x, 1 + 1e-9))
_TEXT: Final = _Kind("text of one line", lambda x: x != "" and _is_line(x))
_PLAIN: Final = _Kind("a number, text of one line, true, false, null, or a list or an object of these", _is_plain)
_FLAG: Final = _Kind("true or false", lambda x: isinstance(x, bool))
_OBJECT: Final = _Kind("an object", lambda x: isinstance(x, dict))
_BINS: Final = _Kind(
    "15 rows of [samples, sum of confidences, right ones], the last two at most the first",
    lambda rows: isinstance(rows, list) and len(rows) == 15 and all(map(_is_bin, rows)),
)
_CELL: Final = {
    "error": _PERCENT,
    "nll": _AMOUNT,
    "ece": _FRACTION,
    "ece_adaptive": _FRACTION,
    "ece_batch100": _FRACTION,
}


class _Reader:
    """Takes the content of a file apart; each complaint names the file and the key."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fail(self, key: str, wanted: str, got: object) -> NoReturn:
        text = json.dumps(got)
        raise BadEvaluation(self.path, f"{key} must be {wanted}, got {text if len(text) < 60 else text[:56] + ' ...'}")

    def take(self, content: Mapping[str, Any], key: str, kind: _Kind, place: str = "") -> Any:
        if key not in content:
            raise BadEvaluation(self.path, f"{place}{key} is missing")
        if not kind.test(content[key]):
            self.fail(f"{place}{key}", kind.words, content[key])
        return content[key]

    def result(self, content: Any) -> RunResult:
        if not isinstance(content, dict):
            raise BadEvaluation(self.path, f"it must hold an object, got {type(content).__name__}")
        self.take(content, "format", _Kind("1, the format that this version reads", lambda x: _is_whole(x, 1, 1)))
        count = self.take(content, "count", _COUNT)
        cells = self.take(content, "cells", _OBJECT)
        missing = [name for name in CORRUPTIONS if name not in cells]
        if missing:
            lacking = f"cells lacks {', '.join(missing)}; a report needs all {len(CORRUPTIONS)}"
            raise BadEvaluation(self.path, lacking)
        row = _Kind("a list of 5 cells, one a severity", lambda x: isinstance(x, list) and len(x) == len(SEVERITIES))
        means = self.take(content, "corrupted", _OBJECT)
        mce = self.take(content, "mce", _OBJECT | None)
        if mce is not None:
            self.take(mce, "value", _AMOUNT, "mce.")
            self.take(mce, "baseline", _TEXT, "mce.")
        settings = self.take(content, "settings", _OBJECT)
        for name in settings:
            if not _is_line(name):
                self.fail("a name in settings", "text of one line", name)
            self.take(settings, name, _PLAIN, "settings.")
        source = self.take(content, "source", _Kind("generated or official", lambda x: x in ("generated", "official")))
        textures = ("published", "made") if source == "generated" else (None,)
        words = "published or made" if source == "generated" else "null for official images"
        result = RunResult(
            path=self.path,
            source=source,
            frost=self.take(content, "frost", _Kind(words, lambda x: x in textures)),
            # Evaluations of earlier versions don't say.
            set_name=self.take(content, "set", _TEXT | None) if "set" in content else None,
            data=self.take(content, "data", _TEXT),
            size=self.take(content, "size", _PIXELS),
            num_classes=self.take(content, "num_classes", _COUNT),
            net=self.net(content),
            augment=self.take(content, "augment", _TEXT | None),
            mollify=self.take(content, "mollify", _FLAG | None),
            seed=self.take(content, "seed", _WHOLE | None),
            settings=settings,
            checkpoint=self.take(content, "checkpoint", _TEXT),
            count=count,
            clean=self.cell(self.take(content, CLEAN, _OBJECT), CLEAN, count),
            cells={
                name: tuple(
                    self.cell(cell, f"cells.{name}[{place}]", count)
                    for place, cell in enumerate(self.take(cells, name, row, "cells."))
                )
                for name in CORRUPTIONS
            },
            corrupted={name: float(self.take(means, name, _CELL[name], "corrupted.")) for name in MEANS},
            mce=mce,
            environment=self.take(content, "environment", _OBJECT),
        )
        for name, mean in result.corrupted.items():
            # The figure that people quote: better to stop than to print one that its own cells contradict.
            if not math.isclose(mean, result.value(name), rel_tol=1e-6, abs_tol=1e-9):
                self.fail(f"corrupted.{name}", f"the mean of its cells, {result.value(name)}", mean)
        return result

    def net(self, content: Mapping[str, Any]) -> str:
        """The network's name; of one with more outputs than classes it says so: fewer are easier to tell apart."""
        name: str = self.take(content, "net", _TEXT)
        classes = self.take(content, "num_classes", _COUNT)
        least = _Kind(f"a whole number from num_classes, {classes}, to 2^53", lambda x: _is_whole(x, classes, _EXACT))
        # Evaluations of earlier versions don't say.
        outputs = self.take(content, "outputs", least) if "outputs" in content else classes
        return name if outputs == classes else f"{name} ({classes} of {outputs} outputs)"

    def cell(self, content: Any, place: str, count: int) -> Cell:
        if not isinstance(content, dict):
            self.fail(place, _OBJECT.words, content)
        figures = {name: float(self.take(content, name, kind, f"{place}.")) for name, kind in _CELL.items()}
        same = _Kind(f"{count}, the run's count", lambda x: x == count)
        bins = self.take(content, "reliability", _BINS, f"{place}.")
        if sum(row[0] for row in bins) != count:
            self.fail(f"{place}.reliability", f"bins of {count} samples together", sum(row[0] for row in bins))
        reliability = tuple((int(samples), float(confidence), int(right)) for samples, confidence, right in bins)
        return Cell(**figures, count=self.take(content, "count", same, f"{place}."), reliability=reliability)
