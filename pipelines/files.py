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
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastmoll.pipelines.errors import some

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
SPLITS = ("train", "val", "validation", "test")
_CACHE_VERSION = 3
# A folder that changed this recently may change again without its time stamps moving (clock ticks are coarse).
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

    @property
    def unlistable(self) -> list[int]:
        """Sample ids of files with a line break in their name: DALI's file list has one file a line."""
        return [sample for sample, path in enumerate(self.paths) if "\n" in path or "\r" in path]

    @property
    def empty(self) -> list[str]:
        """Names of the classes without images."""
        return [self.classes[label] for label in np.setdiff1d(np.arange(len(self.classes)), self.targets)]

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
        ValueError: ``split`` is not the name of a folder, ``root`` is not a folder, or holds other splits but not this
            one, or none, and ``split`` is none of `SPLITS`.
    """
    if not isinstance(split, str) or split in ("", ".", "..") or "/" in split:
        # An empty one would be `root` itself, whatever splits that has.
        raise ValueError(f"split must be the name of a folder, got {split!r}")
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
    if split not in SPLITS:
        raise ValueError(
            f"data folder {folder} has no {split!r} folder; without any, split is one of {', '.join(SPLITS)}"
        )
    return folder


def scan_folder(root: str | os.PathLike[str], split: str = "train") -> ImageFolder:
    """List the samples of an ImageFolder tree.

    A sample is a regular file with one of `EXTENSIONS`, or a link to one; broken links are listed too, so that whoever
    reads them can say which. A folder that a class reaches by several ways, as by a link to itself, counts once in it.

    The list is kept under ``$XDG_CACHE_HOME/fastmoll`` (``~/.cache/fastmoll``) and taken from there as long as no
    folder of the tree has changed: on ImageNet that is a thousand time stamps, not 1.28 million directory entries.

    Args:
        root: Data folder; ``root/split`` is used where it exists, else ``root`` itself.
        split: Name of the split.

    Raises:
        ValueError: ``split`` is not the name of a folder, a missing or empty folder, one whose path is not UTF-8, no
            class folders, a class without images, or a line break in a file name.
        OSError: A folder can't be read.
    """
    folder = _locate(root, split)
    store = _cache_file(folder)
    found = _load(folder, store)
    if found is None:
        found, stamps, _ = _walk(folder)
        if found.empty:
            names = some([*map(repr, found.empty)], 10)
            raise ValueError(f"data folder {folder} has class folders without an image: {names}")
        if found.unlistable:
            path = found.path(found.unlistable[0])
            raise ValueError(f"file name {path!r} has a line break, which DALI's file list can't carry")
        _save(found, stamps, store)
    return found


def stems_of(split: str) -> tuple[str, ...]:
    """What files and folders of a split may be called."""
    return SPLITS[1:] if split == "val" else (split,)


def scan_split(root: Path, split: str) -> ImageFolder:
    """`scan_folder` of a split, by the first of `stems_of` that is there."""
    # Where none of them is there, the folder without splits, or the error, is that of `split` itself.
    return scan_folder(root, next((stem for stem in stems_of(split) if (root / stem).is_dir()), split))


def list_folder(root: str | os.PathLike[str], split: str = "train") -> tuple[ImageFolder, Counter[str]]:
    """List a tree afresh, for those who look for faults in it: no cache.

    Names with line breaks and classes without images are let through.

    Args:
        root: As for `scan_folder`.
        split: Likewise.

    Returns:
        The samples, and the number of files in class folders that are none, by lower-case extension, ``"without
        extension"``, or, with an image's extension, ``"not a regular file"``.

    Raises:
        ValueError: As for `scan_folder`, except for those.
        OSError: A folder can't be read.
    """
    found, _, ignored = _walk(_locate(root, split))
    return found, ignored


def _locate(root: str | os.PathLike[str], split: str) -> Path:
    folder = split_folder(root, split).resolve()
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        # Names below it may be any bytes: they travel in the file list, not as an argument.
        raise ValueError(f"data folder {str(folder)!r}: its path is not UTF-8, which DALI can't open") from None
    return folder


def _walk(folder: Path) -> tuple[ImageFolder, dict[str, list[int]], Counter[str]]:
    classes = _classes(folder)
    if not classes:
        raise ValueError(f"data folder {folder} has no class folders: expected {folder}/<class>/<image>.JPEG")
    top = folder.stat()
    stamps = {"": _stamp(top)}
    ignored: Counter[str] = Counter()
    paths: list[str] = []
    targets: list[int] = []
    for target, name in enumerate(classes):
        before = len(paths)
        files: dict[str, list[str]] = {}
        # Links may lead in circles: forty times round, until the system refuses.
        seen = {(top.st_dev, top.st_ino)}
        queue = [name]
        for relative in queue:
            status = os.stat(folder / relative)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            stamps[relative] = _stamp(status)
            folders, files[relative] = _entries(folder / relative, ignored)
            queue.extend(os.path.join(relative, inner) for inner in sorted(folders))
        for relative in sorted(files):
            paths.extend(os.path.join(relative, file) for file in sorted(files[relative]))
        targets.extend([target] * (len(paths) - before))
    if not paths:
        raise ValueError(
            f"data folder {folder} has {len(classes)} class folders but no image ({', '.join(EXTENSIONS)})"
        )
    return ImageFolder(folder, classes, paths, np.asarray(targets, dtype=np.int64)), stamps, ignored


def _classes(folder: Path) -> list[str]:
    # Folders whose name begins with a dot are tools' (.ipynb_checkpoints), never classes.
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if _is_folder(e) and not e.name.startswith("."))


def _stamp(status: os.stat_result) -> list[int]:
    """When a folder was changed: mtime, which ``touch`` and ``tar`` set back, and ctime, which nobody can.

    Device and inode, which differ with the mount on network file systems, would tell no more.
    """
    return [status.st_mtime_ns, status.st_ctime_ns]


def _entries(folder: Path, ignored: Counter[str]) -> tuple[list[str], list[str]]:
    """Names of the folders and of the samples in a folder; what is neither is added to ``ignored``."""
    folders, samples = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if _is_folder(entry):
                folders.append(entry.name)
            elif not entry.name.lower().endswith(EXTENSIONS):
                ignored[os.path.splitext(entry.name)[1].lower() or "without extension"] += 1
            elif _is_file(entry):
                samples.append(entry.name)
            else:
                ignored["not a regular file"] += 1
    return folders, samples


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself, or where one may not look
        return False


def _is_file(entry: os.DirEntry[str]) -> bool:
    """A file, as far as names go: opening a pipe or a device would wait for ever, opening a broken link says so."""
    try:
        return entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path))
    except OSError:
        return True


def check_classes(training: list[str], validation: list[str], where: str) -> None:
    """Raise ``ValueError`` for training images of other classes than those of the validation."""
    odd = sorted({*training} ^ {*validation})
    if odd:
        raise ValueError(f"{where} have other classes, for example {some(odd, 5)}")


def warn_of_shift(root: str | os.PathLike[str], classes: list[str], where: Path) -> None:
    """Warn where a label of a split does not mean what it does in training, whose folder lies beside it.

    A split of the first of the training classes is all right.

    Args:
        root: What `split_folder` was given: the data folder, or that of the split itself.
        classes: Class names of the split, sorted.
        where: Their folder, resolved.

    Warns:
        UserWarning: Names the first label with two meanings, where whoever called the caller is.
    """
    folder = Path(root).absolute()
    if folder.name in SPLITS and folder.resolve() == where:  # which a whole data set may be called like, too
        folder = folder.parent
    training = folder / "train"
    try:
        known = _classes(training)
    except OSError:  # mostly there is none
        return
    for label, name in enumerate(classes if known else ()):
        other = known[label] if label < len(known) else None
        if name != other:
            warnings.warn(
                f"labels are positions among the {len(classes)} classes of {where}, which are not those of {training}: "
                f"{label} is {name!r} here, {'nothing' if other is None else repr(other)} there",
                stacklevel=3,
            )
            return


def check_several(classes: list[str]) -> None:
    """Raise ``ValueError`` unless there are two classes to train on."""
    if len(classes) < 2:
        raise ValueError(f"all images are of one class, {classes[0]!r}: there is nothing to tell apart")


def cache_home() -> Path:
    """Folder of everything fastmoll caches: ``$XDG_CACHE_HOME/fastmoll`` or ``~/.cache/fastmoll``.

    Of a user without a home, as in some containers, it is one for temporary files.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastmoll"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"fastmoll-{os.getuid()}"


def _cache_file(folder: Path) -> Path:
    name = hashlib.blake2b(os.fsencode(folder), digest_size=12).hexdigest()
    return cache_home() / "lists" / f"{name}.json"


def _load(folder: Path, store: Path) -> ImageFolder | None:
    try:
        kept = json.loads(store.read_text(encoding="utf-8"))
        if kept["version"] != _CACHE_VERSION or kept["root"] != str(folder):
            return None
        if any(_stamp(os.stat(folder / name)) != stamp for name, stamp in kept["stamps"].items()):
            return None
        targets = np.repeat(np.arange(len(kept["counts"]), dtype=np.int64), kept["counts"])
        if len(targets) != len(kept["paths"]):
            return None
        return ImageFolder(folder, kept["classes"], kept["paths"], targets)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent, half-written by an older version, or stale: scan again


def _save(found: ImageFolder, stamps: dict[str, list[int]], store: Path) -> None:
    if max(map(max, stamps.values())) > time.time_ns() - _SETTLED_NS:
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
        with tempfile.TemporaryDirectory(dir=store.parent, ignore_cleanup_errors=True) as folder:
            made = Path(folder) / store.name
            made.write_text(json.dumps(content), encoding="utf-8")
            os.replace(made, store)
    except OSError:
        pass  # a read-only home or a full disk: the list is only slower to make again
