"""Where the results of an evaluation go if nobody says."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from fastmoll.pipelines.corrupted import CorruptedSet, open_corrupted
from fastmoll.robustness.checkpoints import Checkpoint
from fastmoll.robustness.loader import cell_digests
from fastmoll.robustness.results import Results

# Letters of another name, of up to four bytes each, in a folder's, which has 255; ends differ.
_LONGEST: Final = 50


def first_folder(checkpoint: Checkpoint, source: str) -> Path:
    """The folder for images of that source, if it has no other corrupted set in it.

    Weights that are no run's may lie beside others: theirs has the file's name behind its own, but for one that earlier
    versions began for a file of that name.

    Args:
        checkpoint: The network.
        source: ``"generated"`` or ``"official"``.
    """
    folder = checkpoint.folder / f"robustness-{source}"
    if checkpoint.file is None:
        return folder
    with suppress(ValueError):
        if Path(str(Results.open(folder).header.get("checkpoint"))).name == checkpoint.file:
            return folder
    return folder.with_name(f"{folder.name}-{checkpoint.file[-_LONGEST:]}")


def folder_of_set(results: Results, corrupted: CorruptedSet) -> Path:
    """Where results on a corrupted set go: on in the folder that has some, else in a new one.

    Args:
        results: The evaluation, in its `first_folder`.
        corrupted: The set.
    """

    def digest(name: str) -> str | None:
        corruption, _, severity = name.rpartition("-")
        try:
            one = open_corrupted(corrupted.root, corruptions=[corruption], severities=[int(severity)])
            return next(iter(cell_digests(one).values()))
        except (OSError, ValueError):
            return None

    out = results.out
    own = out.with_name(f"{out.name}-{results.header['set'][-_LONGEST:]}")
    if results.is_of_this_set(own, digest):
        return own
    # A set that fastmoll corrupt wrote is not the images that are made on the way: those of files have JPEG's loss.
    first = corrupted.source == "official" and results.is_of_this_set(out, digest)
    if first:
        return out
    for folder in sorted(out.parent.glob(f"robustness-{corrupted.source}*")):  # of a set that was renamed
        if results.is_of_this_set(folder, digest) and Results.open(folder).evaluation == results.evaluation:
            return folder
    return out if first is None else own
