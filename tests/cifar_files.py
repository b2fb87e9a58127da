"""Noise for images, and files of it like the official ones of CIFAR, for tests of the readers of small images."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastmoll.pipelines import cifar

PER_FILE = 6


def noise(count: int, size: int = 32, seed: int = 0, classes: int = 10) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, size, size, 3), np.uint8)
    return images, np.concatenate([np.arange(min(classes, count)), rng.integers(0, classes, max(count - classes, 0))])


def string(data: bytes) -> bytes:
    return b"U" + bytes([len(data)]) + data if len(data) < 256 else b"T" + struct.pack("<I", len(data)) + data


def python2_array(array: NDArray[np.uint8]) -> bytes:
    rows, columns = array.shape
    return (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + string(b"b") + b"\x87R(K\x01"
        b"M" + struct.pack("<H", rows) + b"M" + struct.pack("<H", columns) + b"\x86"
        b"cnumpy\ndtype\n" + string(b"u1") + b"K\x00K\x01\x87R(K\x03" + string(b"|") + b"NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb\x89" + string(array.tobytes()) + b"tb"
    )


def python2_pickle(content: dict[bytes, Any]) -> bytes:
    """The bytes that Python 2's cPickle writes, as in the official files: strings that Python 3 reads as bytes."""
    out = b"\x80\x02}"
    for key, value in content.items():
        out += string(key)
        if isinstance(value, np.ndarray):
            out += python2_array(value)
        else:
            items = [string(item) if isinstance(item, bytes) else b"M" + struct.pack("<H", item) for item in value]
            out += b"](" + b"".join(items) + b"e"
        out += b"s"
    return out + b"."


def write_cifar(folder: Path, layout: cifar.Layout) -> dict[str, tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    """Files like the official ones, with fewer images; what is in each split."""
    folder.mkdir(parents=True)
    names = [b"class%d" % number for number in range(layout.num_classes)]
    splits = {}
    for split, files in (("train", layout.train), ("val", layout.val)):
        images, labels = noise(PER_FILE * len(files), seed=len(split), classes=layout.num_classes)
        splits[split] = images, labels
        for number, file in enumerate(files):
            rows = slice(number * PER_FILE, (number + 1) * PER_FILE)
            planes = images[rows].transpose(0, 3, 1, 2).reshape(PER_FILE, 3072)
            if layout.keys:
                # CIFAR-100 has coarse labels too.
                content = {b"coarse_labels": [0] * PER_FILE, layout.keys[0]: labels[rows].tolist(), b"data": planes}
                (folder / file).write_bytes(python2_pickle(content))
            else:
                before = np.zeros((PER_FILE, layout.label_bytes), np.uint8)
                before[:, -1] = labels[rows]
                (folder / file).write_bytes(np.concatenate([before, planes], 1).tobytes())
    if layout.keys:
        (folder / layout.names).write_bytes(python2_pickle({layout.keys[1]: names}))
    else:
        (folder / layout.names).write_bytes(b"\n".join(names) + b"\n\n")
    return splits
