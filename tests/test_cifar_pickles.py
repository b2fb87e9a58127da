"""Tests of copies of CIFAR that Python 3 pickled again: read where they hold the same, refused where they run code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision
from cifar_files import string, write_cifar

from fastmoll.pipelines import cifar
from fastmoll.pipelines.small import read_small

pytestmark = pytest.mark.usefixtures("small_counts")


@pytest.mark.parametrize("encoding", ["bytes", "latin1"])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("layout", [x for x in cifar.LAYOUTS if x.keys], ids=lambda layout: layout.name)
def test_files_that_python_3_pickled_are_read_as_the_official_ones(
    tmp_path: Path, layout: cifar.Layout, protocol: int, encoding: str
) -> None:
    folder = tmp_path / layout.folder
    splits = write_cifar(folder, layout)
    for file in folder.iterdir():
        content: dict[Any, Any] = pickle.loads(file.read_bytes(), encoding=encoding)
        file.write_bytes(pickle.dumps(content, protocol=protocol))
    for split, (images, labels) in splits.items():
        read = read_small(folder, split)
        assert np.array_equal(read.images, images) and np.array_equal(read.labels, labels)
        assert read.classes == [f"class{number}" for number in range(layout.num_classes)]


def test_files_whose_keys_are_strings_are_read_as_torchvision_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = cifar.LAYOUTS[0]
    folder = tmp_path / layout.folder
    write_cifar(folder, layout)
    for file in folder.iterdir():
        file.write_bytes(pickle.dumps(pickle.loads(file.read_bytes(), encoding="latin1")))
    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda *_: True)
    theirs, ours = torchvision.datasets.CIFAR10(tmp_path), read_small(tmp_path)
    assert np.array_equal(ours.images, theirs.data)
    assert (ours.labels.tolist(), ours.classes) == (theirs.targets, theirs.classes)


@pytest.mark.parametrize("codec", ["rot13", "zlib_codec", "some_module"])
def test_a_pickle_looks_up_no_codec(tmp_path: Path, codec: str) -> None:
    write_cifar(tmp_path / "x", cifar.LAYOUTS[0])
    text, name = (b"X" + len(part).to_bytes(4, "little") + part for part in (b"abc", codec.encode()))
    (tmp_path / "x" / "data_batch_3").write_bytes(b"\x80\x02c_codecs\nencode\n" + text + name + b"\x86R.")
    with pytest.raises(ValueError, match=f"data_batch_3 can't be unpickled: it has bytes in '{codec}'"):
        read_small(tmp_path / "x")
    (tmp_path / "x" / "data_batch_3").write_bytes(b"\x80\x02c_codecs\nlookup\n" + string(b"zlib") + b"\x85R.")
    with pytest.raises(ValueError, match=r"data_batch_3 can't be unpickled: it names _codecs.lookup"):
        read_small(tmp_path / "x")
