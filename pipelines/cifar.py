"""The official CIFAR-10 and CIFAR-100, pickled and binary, from their archives or the folders in them."""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Layout(NamedTuple):
    """How one of the official archives is made.

    Attributes:
        name: ``"cifar10"`` or ``"cifar100"``.
        num_classes: Of the data set.
        archive: File name of the archive.
        md5: Its published checksum.
        folder: The folder in it.
        train: Files of training images in that folder.
        val: Those of validation images.
        names: The file of class names.
        keys: In pickles, the keys of labels and class names; None for the binary version.
        label_bytes: In the binary version, bytes before each image, of which the last is its class.
    """

    name: str
    num_classes: int
    archive: str
    md5: str
    folder: str
    train: tuple[str, ...]
    val: tuple[str, ...]
    names: str
    keys: tuple[bytes, bytes] | None
    label_bytes: int = 0


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))

LAYOUTS = (
    Layout(
        *("cifar10", 10, "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", "cifar-10-batches-py"),
        train=_BATCHES,
        val=("test_batch",),
        names="batches.meta",
        keys=(b"labels", b"label_names"),
    ),
    Layout(
        *("cifar10", 10, "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", "cifar-10-batches-bin"),
        train=tuple(f"{batch}.bin" for batch in _BATCHES),
        val=("test_batch.bin",),
        names="batches.meta.txt",
        keys=None,
        label_bytes=1,
    ),
    Layout(
        *("cifar100", 100, "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", "cifar-100-python"),
        train=("train",),
        val=("test",),
        names="meta",
        keys=(b"fine_labels", b"fine_label_names"),
    ),
    Layout(
        *("cifar100", 100, "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", "cifar-100-binary"),
        train=("train.bin",),
        val=("test.bin",),
        names="fine_label_names.txt",
        keys=None,
        label_bytes=2,
    ),
)


def find_cifar(place: Path, name: str | None = None) -> tuple[Layout, Path] | None:
    """Which version is at a path, and where exactly.

    Args:
        place: An archive, its unpacked folder, or a folder that has one of them in it.
        name: Look in folders for this data set only.

    Returns:
        The version, and the archive or the folder of its files; None for a folder without any.

    Raises:
        ValueError: A file whose checksum is none of the published ones.
    """
    if place.is_file():
        return _identify(place), place
    layouts = [layout for layout in LAYOUTS if name in (None, layout.name)]
    for layout in layouts:
        # Some of its files are enough to know it by, so that a missing one can be named.
        if any((place / file).is_file() for file in (layout.names, *layout.train, *layout.val)):
            return layout, place
    for layout in layouts:
        if (place / layout.folder).is_dir():
            return layout, place / layout.folder
        if (place / layout.archive).is_file():
            return _identify(place / layout.archive), place / layout.archive
    return None


def _identify(archive: Path) -> Layout:
    with open(archive, "rb") as file:
        md5 = hashlib.file_digest(file, "md5").hexdigest()
    for layout in LAYOUTS:
        if layout.md5 == md5:
            return layout
    published = next((layout.md5 for layout in LAYOUTS if layout.archive == archive.name), None)
    if published is None:
        raise ValueError(
            f"{archive} has the checksum {md5}, which is that of no CIFAR archive; any other must be unpacked"
        )
    raise ValueError(
        f"{archive} has the checksum {md5}, not {published} as published: it is damaged, or was not downloaded whole"
    )


def read_cifar(where: Path, layout: Layout, split: str) -> tuple[NDArray[np.uint8], NDArray[np.int64], list[str], Path]:
    """Read one split.

    Args:
        where: What `find_cifar` found.
        layout: Likewise.
        split: ``"train"``, or ``"val"`` or ``"test"`` for the 10,000 test images.

    Returns:
        Images uint8 ``(N, 32, 32, 3)``, labels int64 ``(N,)``, class names, and the first file with images.

    Raises:
        ValueError: Another split, or a file that is missing, damaged or truncated, or holds labels out of range; it
            names the file.
    """
    if split not in ("train", "val", "test"):
        raise ValueError(f"split must be 'train' or 'val' for {layout.name}, got {split!r}")
    files = layout.train if split == "train" else layout.val
    images, labels = [], []
    classes: list[str] = []
    inside = where / layout.folder if where.is_file() else where
    for name, content in _contents(where, layout, (layout.names, *files)):
        source = str(inside / name)
        if name == layout.names:
            classes = _class_names(content, layout, source)
            continue
        pixels, targets = _pickled(content, layout, source) if layout.keys else _binary(content, layout, source)
        bad = np.flatnonzero((targets < 0) | (targets >= layout.num_classes))
        if len(bad):
            raise ValueError(
                f"{source}: labels must be in 0..{layout.num_classes - 1}, got {targets[bad[0]]} for image {bad[0]}"
            )
        images.append(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        labels.append(targets)
    return np.concatenate(images), np.concatenate(labels), classes, inside / files[0]


def _contents(where: Path, layout: Layout, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """The files of an archive or a folder, in the order of ``names``."""
    if where.is_dir():
        for name in names:
            if not (where / name).is_file():
                raise ValueError(f"{where / name} is missing: {where} is not all of {layout.archive}")
            yield name, (where / name).read_bytes()
        return
    found = {}
    with tarfile.open(where, "r:gz") as archive:
        for member in archive:
            name = member.name.removeprefix(f"{layout.folder}/")
            file = archive.extractfile(member) if name in names else None
            if file is not None:
                found[name] = file.read()
    for name in names:
        if name not in found:
            raise ValueError(f"{where} has no {layout.folder}/{name}")
        yield name, found[name]


class _Unpickler(pickle.Unpickler):
    """Reads arrays, lists, dicts, bytes, strings and numbers; a pickle that names anything else is refused.

    The official files are Python 2's, which name little. Copies that Python 3 wrote name what its protocols need.
    """

    # Where NumPy's functions are, now and before NumPy 2, by which name the official files know them.
    _RECONSTRUCT = ("numpy._core.multiarray", "numpy.core.multiarray")
    _FROM_BUFFER = ("numpy._core.numeric", "numpy.core.numeric")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        # As an empty array names them, whatever NumPy's version is.
        if module in self._RECONSTRUCT and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        if module in self._FROM_BUFFER and name == "_frombuffer":  # protocol 5
            return np.empty(0).__reduce_ex__(5)[0]
        if (module, name) == ("_codecs", "encode"):  # bytes up to protocol 2
            return _latin1
        raise pickle.UnpicklingError(f"it names {module}.{name}, for which a data set has no use")


def _latin1(text: str, encoding: str) -> bytes:
    """What ``_codecs.encode`` does in a pickle of bytes; that itself would look up codecs of any name."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it has bytes in {encoding!r}")
    return text.encode("latin1")


def _unpickle(content: bytes, source: str) -> dict[Any, Any]:
    try:
        loaded = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a damaged pickle raises whatever its wrong operations do
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{source} can't be unpickled: {reason}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{source} must hold a dict, got {type(loaded).__name__}")
    return {_bytes(key): value for key, value in loaded.items()}


def _bytes(value: Any) -> Any:
    """Strings as the official files have them."""
    return value.encode("utf-8", "replace") if isinstance(value, str) else value


def _pickled(content: bytes, layout: Layout, source: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    assert layout.keys is not None
    loaded = _unpickle(content, source)
    pixels, labels = loaded.get(b"data"), loaded.get(layout.keys[0])
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (3072,):
        got = f"{pixels.dtype} {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise ValueError(f"{source}: data must be uint8 of shape (N, 3072), got {got}")
    if not isinstance(labels, list) or len(labels) != len(pixels) or not all(type(label) is int for label in labels):
        raise ValueError(f"{source}: {layout.keys[0].decode()} must be a list of {len(pixels)} integers")
    odd = next((label for label in labels if not 0 <= label < layout.num_classes), None)
    if odd is not None:  # before NumPy sees it, whose integers end somewhere
        raise ValueError(
            f"{source}: labels must be in 0..{layout.num_classes - 1}, got {odd} for image {labels.index(odd)}"
        )
    return pixels, np.asarray(labels, np.int64)


def _binary(content: bytes, layout: Layout, source: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    record = layout.label_bytes + 3072
    if not content or len(content) % record:
        raise ValueError(f"{source} is truncated: its {len(content)} bytes are no multiple of {record}")
    rows = np.frombuffer(content, np.uint8).reshape(-1, record)
    return rows[:, layout.label_bytes :], rows[:, layout.label_bytes - 1].astype(np.int64)


def _class_names(content: bytes, layout: Layout, source: str) -> list[str]:
    if layout.keys is None:
        names: Any = content.split()
    else:
        names = _unpickle(content, source).get(layout.keys[1])
        names = [_bytes(name) for name in names] if isinstance(names, list) else names
    if not isinstance(names, list) or not all(isinstance(name, bytes) for name in names):
        raise ValueError(f"{source}: the class names must be a list of strings")
    if len(names) != layout.num_classes:
        raise ValueError(f"{source} has {len(names)} class names instead of {layout.num_classes}")
    return [name.decode("utf-8", "replace") for name in names]
