"""Tests of the reader of CIFAR: archives and folders, pickled and binary, and what is wrong with them."""

from __future__ import annotations

import hashlib
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torchvision
from cifar_files import PER_FILE, python2_pickle, string, write_cifar

from fastmoll.pipelines import cifar
from fastmoll.pipelines.small import read_small

pytestmark = pytest.mark.usefixtures("small_counts")


def pack(folder: Path, layout: cifar.Layout, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The archive of a folder, whose checksum is taken for the published one."""
    archive = folder.parent / layout.archive
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, layout.folder)
    changed = layout._replace(md5=hashlib.md5(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(cifar, "LAYOUTS", tuple(changed if x is layout else x for x in cifar.LAYOUTS))
    return archive


each_layout = pytest.mark.parametrize("layout", cifar.LAYOUTS, ids=lambda layout: layout.folder)


@each_layout
def test_cifar_comes_as_it_was_written_from_archive_folder_and_the_folder_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: cifar.Layout
) -> None:
    folder = tmp_path / "here" / layout.folder
    splits = write_cifar(folder, layout)
    places = [(pack(folder, layout, monkeypatch), None), (folder, None), (layout.name, folder.parent)]
    for split, (images, labels) in splits.items():
        for data, path in places:
            read = read_small(data, split, path)
            assert read.name == layout.name
            assert np.array_equal(read.images, images) and np.array_equal(read.labels, labels)
            assert read.classes == [f"class{number}" for number in range(layout.num_classes)]
    assert len({read_small(folder, split).root for split in splits}) == 2


@pytest.mark.parametrize("name", ["CIFAR10", "CIFAR100"])
def test_pickled_cifar_is_read_as_torchvision_reads_it_and_has_its_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    dataset = getattr(torchvision.datasets, name)
    layout = next(x for x in cifar.LAYOUTS if x.name == name.lower() and x.keys)
    assert (layout.archive, layout.md5, layout.folder) == (dataset.filename, dataset.tgz_md5, dataset.base_folder)
    write_cifar(tmp_path / layout.folder, layout)
    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda *_: True)
    for split in ("train", "val"):
        theirs, ours = dataset(tmp_path, train=split == "train"), read_small(tmp_path, split)
        assert np.array_equal(ours.images, theirs.data)
        assert (ours.labels.tolist(), ours.classes) == (theirs.targets, theirs.classes)


def test_an_archive_with_another_checksum_is_refused_by_name(tmp_path: Path) -> None:
    layout = cifar.LAYOUTS[0]
    (tmp_path / layout.archive).write_bytes(b"half of it")
    md5 = hashlib.md5(b"half of it").hexdigest()
    for data, path in ((tmp_path / layout.archive, None), ("cifar10", tmp_path)):
        with pytest.raises(ValueError, match=rf"{layout.archive} has the checksum {md5}, not {layout.md5} as publ"):
            read_small(data, "train", path)
    (tmp_path / "other.zip").write_bytes(b"")
    with pytest.raises(ValueError, match=r"other.zip has the checksum .* no CIFAR archive; any other must be unpacked"):
        read_small(tmp_path / "other.zip")


@pytest.mark.parametrize(
    "evil",
    [
        b"cos\nsystem\n" + string(b"touch ran") + b"\x85R.",
        b"cbuiltins\neval\n" + string(b"open('ran', 'w')") + b"\x85R.",
        b"cnumpy.core.multiarray\nscalar\n.",
        b"cnumpy\nload\n" + string(b"x.npy") + b"\x85R.",
    ],
)
def test_a_pickle_can_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evil: bytes) -> None:
    layout = cifar.LAYOUTS[0]
    write_cifar(tmp_path / "x", layout)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x" / "data_batch_3").write_bytes(b"\x80\x02" + evil)
    with pytest.raises(ValueError, match=r"data_batch_3 can't be unpickled: it names (os|builtins|numpy)"):
        read_small(tmp_path / "x")
    assert not (tmp_path / "ran").exists()


PLANES = np.zeros((PER_FILE, 3072), np.uint8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "can't be unpickled"),
        (b"\x80\x04\x8e" + b"\xff" * 7 + b"\0", "can't be unpickled: [A-Z]"),
        (b"Pabc\n.", "can't be unpickled: .*, but no persistent_load"),
        (python2_pickle({b"data": PLANES})[:-400], "can't be unpickled"),
        (pickle.dumps([1]), "must hold a dict, got list"),
        (python2_pickle({b"labels": [0]}), r"data must be uint8 of shape \(N, 3072\), got NoneType"),
        (python2_pickle({b"data": PLANES[:, :5], b"labels": [0]}), r"data must be .*got uint8 \(6, 5\)"),
        (python2_pickle({b"data": PLANES, b"labels": [0]}), "labels must be a list of 6 integers"),
        (python2_pickle({b"data": PLANES, b"labels": [0] * 5 + [10]}), "labels must be in 0..9, got 10 for image 5"),
    ],
)
def test_a_damaged_pickle_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    write_cifar(tmp_path / "x", cifar.LAYOUTS[0])
    (tmp_path / "x" / "data_batch_2").write_bytes(content)
    with pytest.raises(ValueError, match=rf"x/data_batch_2:? ?{message}"):
        read_small(tmp_path / "x")


def test_a_label_beyond_numpys_integers_is_named(tmp_path: Path) -> None:
    layout = cifar.LAYOUTS[0]
    folder = tmp_path / layout.folder
    write_cifar(folder, layout)
    pixels = np.zeros((2, 3072), np.uint8)
    (folder / "data_batch_1").write_bytes(pickle.dumps({b"data": pixels, b"labels": [3, 2**70]}))
    with pytest.raises(ValueError, match=rf"data_batch_1: labels must be in 0..9, got {2**70} for image 1"):
        read_small(folder)


def test_missing_and_truncated_files_and_too_few_images_are_named(tmp_path: Path) -> None:
    layout = cifar.LAYOUTS[1]
    folder = tmp_path / layout.folder
    write_cifar(folder, layout)
    whole = (folder / "data_batch_5.bin").read_bytes()
    (folder / "data_batch_5.bin").write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"data_batch_5.bin is truncated: its 18437 bytes"):
        read_small(folder)
    (folder / "data_batch_5.bin").write_bytes(whole[:3073])
    with pytest.raises(ValueError, match=r"not all of it: 25 images of 32 x 32 .* instead of 30 of 32 x 32 in 10"):
        read_small(folder)
    (folder / "data_batch_5.bin").unlink()
    with pytest.raises(ValueError, match=r"data_batch_5.bin is missing: .* is not all of cifar-10-binary.tar.gz"):
        read_small(folder)
    (folder / layout.names).write_text("cat\ndog\n")
    with pytest.raises(ValueError, match=r"batches.meta.txt has 2 class names instead of 10"):
        read_small(folder, "val")


def test_one_data_set_is_not_taken_for_another(tmp_path: Path) -> None:
    write_cifar(tmp_path / "x", cifar.LAYOUTS[2])
    with pytest.raises(ValueError, match="x is cifar100, not cifar10"):
        read_small("cifar10", "train", tmp_path / "x")
    with pytest.raises(ValueError, match="split must be 'train' or 'val' for cifar100, got 'extra'"):
        read_small(tmp_path / "x", "extra")
