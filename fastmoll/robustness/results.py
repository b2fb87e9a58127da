"""The results of an evaluation on clean images and on 15 corruptions at five severities, and the folder they are in.

The folder of an evaluation holds ``settings.json``, what it is of; ``cells/``, the figures of each cell that is done
(``fog-3.json``, ...), which is all there is of an evaluation of some cells; ``predictions/``, where they were asked
for; and ``robustness.json``, once all cells are done.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from fastmoll.distributed import Process
from fastmoll.kernels.corruption_constants import CORRUPTIONS, SEVERITIES
from fastmoll.metrics import mean_corruption_error
from fastmoll.output import write_json
from fastmoll.report.read import BadEvaluation, check_cell
from fastmoll.report.runs import BINARY, MEANS, METRICS, is_binary, label_images
from fastmoll.robustness.networks import WEIGHTS

Cell = tuple[str, int] | None
"""A corruption and its severity; None: the clean images."""
_FORMAT: Final = 1
_CELL: Final = (*METRICS, "count", "reliability")
_PARTS: Final = ("header", "fingerprint", "environment", "images")
_HEADER: Final = ("source", "frost", "data", "net", "count", "baseline")


def cell_name(cell: Cell) -> str:
    """What a cell's files are called: ``"clean"``, ``"fog-3"``."""
    return "clean" if cell is None else f"{cell[0]}-{cell[1]}"


ALL: Final[tuple[Cell, ...]] = (None, *((name, severity) for name in CORRUPTIONS for severity in SEVERITIES))
"""Every cell, the clean one first."""


class Results:
    """The folder of an evaluation.

    Attributes:
        out: The folder.
        header: What `finish` writes about it besides figures.
        evaluation: Digest of what the figures depend on, besides ``images``.
        environment: Where they are measured.
    """

    def __init__(
        self,
        out: Path,
        header: Mapping[str, Any],
        fingerprint: Mapping[str, Any],
        environment: Mapping[str, Any],
        images: Mapping[str, str] | None = None,
        *,
        of_files: bool = False,
    ) -> None:
        """Describe the evaluation; the folder isn't touched before `begin`.

        Args:
            out: The folder.
            header: The keys of ``robustness.json`` that are no figures.
            fingerprint: All that the figures depend on, by name.
            environment: Versions and device.
            images: Digest of each cell's images, where they are read; cells may be missing.
            of_files: Whether these are files, whose times are in the digests: a copy may have lost those.
        """
        self.out, self.header, self.environment = out, dict(header), dict(environment)
        self._images, self._of_files = dict(images or {}), of_files
        self._fingerprint = json.loads(json.dumps(fingerprint))
        text = json.dumps(self._fingerprint, sort_keys=True)
        self.evaluation = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def is_of_this_set(self, out: Path, digest: Callable[[str], str | None]) -> bool | None:
        """Whether a folder holds an evaluation on the same corrupted set, by its name or, if renamed, its images.

        Args:
            out: The folder.
            digest: Gives that of the images of a cell, by its name, where `images` has none; None: they aren't there.

        Returns:
            None where it holds no evaluation, or is damaged: what is wrong there, `begin` says.
        """
        try:
            there = Results.open(out)
        except ValueError:
            return None
        ours = self.header["set"]
        if there.header.get("set", ours) == ours:  # those of earlier versions don't say which
            return True
        known = self._images.keys() & there._images.keys()
        if not known:  # one more cell tells: all of them may be millions of files
            return any(digest(name) == there._images[name] for name in [*there._images][:1])
        return all(self._images[name] == there._images[name] for name in known)

    @classmethod
    def open(cls, out: Path) -> Results:
        """The evaluation that a folder holds.

        Raises:
            ValueError: it holds none.
        """
        path = out / "settings.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            for name in _PARTS:
                if not isinstance(content, dict) or not isinstance(content.get(name), dict):
                    raise ValueError(f"it has no {name}")
            for name in _HEADER:
                if name not in content["header"]:
                    raise ValueError(f"its header has no {name}")
            return cls(out, *(content[name] for name in _PARTS))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ValueError(f"{out} holds no evaluation: there is no {path}") from error
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from error

    def begin(self) -> None:
        """Write down what the evaluation is of, or check it against the one that is there, whose environment is kept.

        Raises:
            ValueError: the folder holds one of something else; the message names the first difference.
            OSError: it can't be written.
        """
        path = self.out / "settings.json"
        # Where nothing was evaluated yet, a wrong setting may still be put right.
        if path.exists() and any((self.out / "cells").glob("*.json")):
            there = Results.open(self.out)
            before, now = there._fingerprint, self._fingerprint
            # The size says more than the digest of the data, which differs with it.
            names = sorted(before.keys() | now.keys(), key=lambda name: (name != "image size", name))
            pairs = [(name, before.get(name), now.get(name), "") for name in names]
            known = [name for name in self._images if name in there._images]
            hint = ", or copy the set with the times of its files (cp -a)" if self._of_files else ""
            pairs += [
                (f"{name} (digest of its images)", there._images[name], self._images[name], hint) for name in known
            ]
            for name, was, is_now, also in pairs:
                if was != is_now:
                    if name == WEIGHTS:  # nobody knows a digest; the files may still have the same name
                        was, is_now = (
                            f"{weights} of {results.header.get('checkpoint')}"
                            for weights, results in ((was, there), (is_now, self))
                        )
                    raise ValueError(
                        f"--out: {self.out} holds an evaluation with another {name}: it was {was} and is now {is_now}; "
                        f"choose another folder with --out DIR, or delete this one{also}"
                    )
            self.environment, self._images = there.environment, {**there._images, **self._images}
        (self.out / "cells").mkdir(parents=True, exist_ok=True)
        content = {"header": self.header, "fingerprint": self._fingerprint, "environment": self.environment}
        write_json(path, {"format": _FORMAT, **content, "images": self._images})

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """The figures of a cell, None where it isn't done.

        Raises:
            ValueError: they are of another evaluation.
        """
        path = self._cell(cell)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            found = {name: content[name] for name in _CELL}
            evaluation = content["evaluation"]
        except (OSError, ValueError, LookupError, TypeError):
            return None  # not there, or damaged on the disk: to be done again
        if evaluation != self.evaluation:
            raise ValueError(f"{path} is of another evaluation than {self.out / 'settings.json'}")
        try:
            check_cell(path, found, self.header["count"])
        except BadEvaluation:
            return None  # damaged likewise
        return found

    def write(self, cell: Cell, found: Mapping[str, Any]) -> None:
        """Write the figures of a cell, in one piece.

        Raises:
            FloatingPointError: its NLL is not finite.
            OSError: it can't be written.
        """
        if not math.isfinite(found["nll"]):
            raise FloatingPointError(f"the NLL on {cell_name(cell)} is {found['nll']}")
        corruption, severity = (None, None) if cell is None else cell
        images = "clean" if cell is None else label_images(self.header["source"], self.header["frost"])
        content = {"corruption": corruption, "severity": severity, "images": images}
        content |= {name: found[name] for name in _CELL}
        write_json(self._cell(cell), {**content, "evaluation": self.evaluation})

    def predictions(self, cell: Cell) -> Path:
        """The file of the predictions of a cell."""
        return self.out / "predictions" / f"{cell_name(cell)}.parquet"

    @property
    def has_mce(self) -> bool:
        """Whether they may stand beside AlexNet's errors: on ImageNet-C itself, not on images made here."""
        return bool(self.header["baseline"]) and self.header["source"] == "official"

    @property
    def is_binary(self) -> bool:
        """Whether NLL and ECE are of another likelihood than the network was trained for: see `BINARY`."""
        return is_binary(self.header.get("settings", {}))

    def finish(self) -> dict[str, Any] | None:
        """Write ``robustness.json`` if all cells are done.

        Returns:
            Its content, or None.

        Raises:
            ValueError: a cell is of another evaluation.
            OSError: it can't be written.
        """
        found = {cell: self.read(cell) for cell in ALL}
        done = {cell: content for cell, content in found.items() if content is not None}
        if len(done) < len(ALL):
            return None
        cells = {name: [done[name, severity] for severity in SEVERITIES] for name in CORRUPTIONS}
        every = [content for row in cells.values() for content in row]
        content = {
            "format": _FORMAT,
            **self.header,
            "clean": done[None],
            "cells": cells,
            "corrupted": {metric: statistics.fmean(cell[metric] for cell in every) for metric in MEANS},
            "mce": mean_corruption_error(cells) if self.has_mce else None,
            "environment": {**self.environment, "precision": self._fingerprint.get("precision", "off")},
        }
        del content["baseline"]
        write_json(self.out / "robustness.json", content)
        return content

    def _cell(self, cell: Cell) -> Path:
        return self.out / "cells" / f"{cell_name(cell)}.json"


def has_baseline(classes: Sequence[str], size: int) -> bool:
    """Whether AlexNet's errors are for such data: ImageNet's thousand classes, by their WordNet ids, at 224 pixels."""
    return size == 224 and is_imagenet(classes)


def is_imagenet(classes: Sequence[str]) -> bool:
    """Whether these are ImageNet's thousand classes, as far as their names tell."""
    return len(classes) == 1000 and all(len(x) == 9 and x[0] == "n" and x[1:].isdecimal() for x in classes)


def table(results: Results) -> str:
    """The figures of the cells that are done, as a table for reading."""
    found = {cell: results.read(cell) for cell in ALL}
    has_frost = any(found["frost", severity] is not None for severity in SEVERITIES)
    images = label_images(results.header["source"], results.header["frost"] if has_frost else None)
    rows = []
    if (clean := found[None]) is not None:
        rows.append(_row("clean", [], [clean]))
    done = []
    for name in CORRUPTIONS:
        row = [found[name, severity] for severity in SEVERITIES]
        there = [cell for cell in row if cell is not None]
        done += there
        if there:
            rows.append(_row(name, [None if cell is None else cell["error"] for cell in row], there))
    heads = f"{'error, %':<18}" + "".join(f"{severity:>7}" for severity in SEVERITIES)
    heads += "".join(f"{name:>10}" for name in ("mean", "NLL", "ECE", "ECE/100"))
    line = "─" * len(heads)
    lines = [
        f"{results.header['net']} on {results.header['data']}, corrupted images {images}",
        line,
    ]
    lines += [heads, *rows, line]
    if done:
        title = "corrupted" if len(done) == len(ALL) - 1 else f"{len(done)} of {len(ALL) - 1} cells"
        lines += [_row(title, [], done), line]
    lines.append("ECE has 15 bins over all images; ECE/100 is its mean over batches of 100, the paper's estimator.")
    lines += [BINARY] * results.is_binary
    if len(done) == len(ALL) - 1 and results.has_mce:
        cells = {name: [found[name, severity] or {} for severity in SEVERITIES] for name in CORRUPTIONS}
        lines.append(f"mCE {mean_corruption_error(cells)['value']:.2f} % (relative to AlexNet), {images}")
    return "\n".join(lines)


def add_to_result(folder: Path, content: Mapping[str, Any]) -> str | None:
    """Add the corrupted error to the ``result.json`` of the trainer's run in ``folder``, where there is one.

    Not if that was validated on another number of images, and an error on official images is not replaced by one on
    generated images or on another official set. Whether they are the same images, the caller knows: see
    `Checkpoint.validated_on`. A folder that may only be read is left as it is.

    Args:
        folder: The run's folder.
        content: What `Results.finish` returned.

    Returns:
        Why it was not added, with the path; None where it was, where there is no such file, and where the folder may
        only be read.
    """
    if not os.access(folder, os.W_OK):
        return None
    path = folder / "result.json"
    refused = "the corrupted error was not added to"
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        count = result["validation"]["count"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"{refused} {path}, which can't be read: {error.strerror}"
    except (ValueError, LookupError, TypeError) as error:
        return f"{refused} {path}, which is damaged: {error!r}"
    if count != content["count"]:
        return f"{refused} {path}: the run was validated on {count} images, not on {content['count']}"
    before = result.get("corrupted")
    if isinstance(before, dict) and before.get("source") == "official" and content["source"] != "official":
        return f"{refused} {path}, which has that of official images: one of generated images does not replace it"
    # The trainer's errors are fractions.
    fraction, name = content["corrupted"]["error"] / 100, content.get("set")
    if isinstance(before, dict) and before.get("source") == "official" and before.get("set", name) != name:
        return (
            f"{refused} {path}, which has that of the official set {before['set']}: that of {name} does not replace it"
        )
    source = label_images(content["source"], content["frost"])
    result["corrupted"] = {"error": fraction, "source": source, **({} if name is None else {"set": name})}
    try:
        write_json(path, result)
    except OSError as error:
        return f"the corrupted error was not added: {error}"
    return None


def environment(process: Process) -> dict[str, Any]:
    """Versions, device and number of processes."""
    import torchvision

    import fastmoll

    cuda = process.device.type == "cuda"
    return {
        "fastmoll": fastmoll.__version__,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "device": torch.cuda.get_device_name(process.device) if cuda else process.device.type,
        "world_size": process.world_size,
    }


def _row(title: str, errors: Sequence[float | None], cells: Sequence[Mapping[str, Any]]) -> str:
    by_severity = "".join(f"{'–' if error is None else f'{error:.2f}':>7}" for error in errors) or " " * 7 * 5
    mean = {metric: statistics.fmean(cell[metric] for cell in cells) for metric in MEANS}
    return (
        f"{title:<18}{by_severity}{mean['error']:>10.2f} {mean['nll']:>9.4f}{mean['ece']:>10.4f}"
        f"{mean['ece_batch100']:>10.4f}"
    )
