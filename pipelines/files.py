"""ImageFolder trees: which files there are, and what class each has.

The order is torchvision's (`torchvision.datasets.ImageFolder`): classes are the sorted folder names, samples are sorted
within a class. A sample's position in that order is its *sample id*, the key of all of its random draws.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
SPLITS = ("train", "val", "validation", "test")
_CACHE_VERSION = 1
# A folder that changed this recently may change again without its time stamp moving (clock ticks are coarse).
_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True)
class ImageFolder:
    """The samples of one split.

    Attributes:
        root: Folder that holds the class folders.
        classes: Class names, sorted; a class is its position here.
        paths: Path of each sample, relative to ``root``; a sample id is a position here.
        targets: Class of each sample, int64 ``(N,)``.
    """

    root: Path
    classes: list[str]
    paths: list[str]
    targets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.paths)

    def path(self, sample: int) -> str:
        """Full path of a sample id."""
        return str(self.root / self.paths[sample])

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of names and classes: two equal ones give the same sample ids."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update("\0".join(self.paths).encode("utf-8", "surrogateescape"))
        digest.update(self.targets.tobytes())
        return digest.hexdigest()


def split_folder(root: str | os.PathLike[str], split: str) -> Path:
    """``root/split`` where that exists, else ``root`` itself.

    Raises:
        ValueError: ``root`` is not a folder, or holds other splits but not this one.
    """
    folder = Path(root)
    if not folder.exists():
        raise ValueError(f"data folder {folder} does not exist")
    if not folder.is_dir():
        raise ValueError(f"data folder {folder} is not a folder")
    if (folder / split).is_dir():
        return folder / split
    others = [name for name in SPLITS if (folder / name).is_dir()]
    if others:
        # Taking `root` itself here would train on classes called "train" and "val".
        raise ValueError(f"data folder {folder} has no {split!r} folder, only {', '.join(map(repr, others))}")
    return folder


def scan_folder(root: str | os.PathLike[str], split: str = "train", *, cache: bool = True) -> ImageFolder:
    """List the samples of an ImageFolder tree.

    The list is kept under ``$XDG_CACHE_HOME/fastmoll`` (``~/.cache/fastmoll``) and taken from there as long as no
    folder of the tree has changed: on ImageNet that is a thousand time stamps, not 1.28 million directory entries.

    Args:
        root: Data folder; ``root/split`` is used where it exists, else ``root`` itself.
        split: Name of the split.
        cache: Read and write the cached list.

    Raises:
        ValueError: Missing or empty folder, no class folders, a class without images, or a line break in a file name.
    """
    folder = split_folder(root, split).resolve()
    store = _cache_file(folder) if cache else None
    found = _load(folder, store) if store else None
    if found is None:
        found, stamps = _walk(folder)
        if store:
            _save(found, stamps, store)
    return found


def _walk(folder: Path) -> tuple[ImageFolder, dict[str, int]]:
    # Folders whose name begins with a dot are tools' (.ipynb_checkpoints), never classes.
    classes = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
    if not classes:
        raise ValueError(f"data folder {folder} has no class folders: expected {folder}/<class>/<image>.JPEG")
    stamps = {"": folder.stat().st_mtime_ns}
    paths: list[str] = []
    targets: list[int] = []
    empty: list[str] = []
    for target, name in enumerate(classes):
        before = len(paths)
        for where, _, files in sorted(os.walk(folder / name, followlinks=True)):
            relative = os.path.relpath(where, folder)
            stamps[relative] = os.stat(where).st_mtime_ns
            paths.extend(os.path.join(relative, file) for file in sorted(files) if file.lower().endswith(EXTENSIONS))
        if len(paths) == before:
            empty.append(name)
        targets.extend([target] * (len(paths) - before))
    if not paths:
        raise ValueError(
            f"data folder {folder} has {len(classes)} class folders but no image ({', '.join(EXTENSIONS)})"
        )
    if empty:
        raise ValueError(
            f"data folder {folder} has class folders without an image: {', '.join(map(repr, empty[:10]))}"
            f"{', ...' if len(empty) > 10 else ''}"
        )
    for path in paths:
        if "\n" in path or "\r" in path:
            raise ValueError(f"file name {path!r} in {folder} has a line break, which DALI's file list can't carry")
    return ImageFolder(folder, classes, paths, np.asarray(targets, dtype=np.int64)), stamps


def cache_home() -> Path:
    """Folder of everything fastmoll caches: ``$XDG_CACHE_HOME/fastmoll`` or ``~/.cache/fastmoll``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastmoll"


def _cache_file(folder: Path) -> Path:
    name = hashlib.blake2b(os.fsencode(folder), digest_size=12).hexdigest()
    return cache_home() / "lists" / f"{name}.json"


def _load(folder: Path, store: Path) -> ImageFolder | None:
    try:
        kept = json.loads(store.read_text(encoding="utf-8"))
        if kept["version"] != _CACHE_VERSION or kept["root"] != str(folder):
            return None
        if any(os.stat(folder / name).st_mtime_ns != stamp for name, stamp in kept["stamps"].items()):
            return None
        targets = np.repeat(np.arange(len(kept["counts"]), dtype=np.int64), kept["counts"])
        if len(targets) != len(kept["paths"]):
            return None
        return ImageFolder(folder, kept["classes"], kept["paths"], targets)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent, half-written by an older version, or stale: scan again


def _save(found: ImageFolder, stamps: dict[str, int], store: Path) -> None:
    if max(stamps.values()) > time.time_ns() - _SETTLED_NS:
        return
    content = {
        "version": _CACHE_VERSION,
        "root": str(found.root),
        "stamps": stamps,
        "classes": found.classes,
        "counts": np.bincount(found.targets, minlength=len(found.classes)).tolist(),
        "paths": found.paths,
    }
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=store.parent, delete=False, encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(file.name, store)
    except OSError:
        pass  # a read-only home: the list is only slower to make again
