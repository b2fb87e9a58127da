"""Tests of the readers of small images: official archives, folders, arrays, digits, and what is wrong with them."""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision
from numpy.typing import NDArray
from PIL import Image

from fastmoll.pipelines import cifar, decoded, small
from fastmoll.pipelines.small import SmallData, read_small, standardisation

PER_FILE = 6


def noise(count: int, size: int = 32, seed: int = 0, classes: int = 10) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, size, size, 3), np.uint8)
    return images, np.concatenate([np.arange(min(classes, count)), rng.integers(0, classes, max(count - classes, 0))])


@pytest.fixture(autouse=True)
def small_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete data sets are a few images here."""
    counts = {"cifar10": (5 * PER_FILE, PER_FILE), "cifar100": (PER_FILE, PER_FILE), "tinyimagenet": (8, 5)}
    known = {name: small.KNOWN[name]._replace(train=counts[name][0], val=counts[name][1]) for name in counts}
    known["tinyimagenet"] = known["tinyimagenet"]._replace(classes=4, size=64)
    monkeypatch.setattr(small, "KNOWN", known)


# --- CIFAR ------------------------------------------------------------------------------------------------------------


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


# --- TinyImageNet -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Four classes, not in order in their list; two training images each, five for validation, one of them grey."""
    folder = tmp_path / "tiny-imagenet-200"
    names = ["n03", "n01", "n04", "n02"]
    images, _ = noise(13, size=64)
    for number, name in enumerate(names):
        (folder / "train" / name / "images").mkdir(parents=True)
        (folder / "train" / name / f"{name}_boxes.txt").write_text("")
        for at in range(2):
            picture = Image.fromarray(images[2 * number + at])
            picture.save(folder / "train" / name / "images" / f"{name}_{at}.JPEG")
    (folder / "val" / "images").mkdir(parents=True)
    lines = []
    for at in range(5):
        picture = Image.fromarray(images[8 + at])
        (picture.convert("L") if at == 3 else picture).save(folder / "val" / "images" / f"val_{at}.JPEG")
        lines.append(f"val_{at}.JPEG\t{names[(at + 1) % 4]}\t0\t0\t63\t63\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("\n".join(names) + "\n")
    return folder


def test_tinyimagenet_has_sorted_classes_and_its_annotated_validation_images(tiny: Path) -> None:
    for data, path in (("tinyimagenet", tiny.parent), ("tinyimagenet", tiny), (tiny, None)):
        train, val = read_small(data, "train", path), read_small(data, "val", path)
        assert train.classes == val.classes == ["n01", "n02", "n03", "n04"]
        assert train.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert val.labels.tolist() == [0, 3, 1, 2, 0]  # n01 n04 n02 n03 n01
        assert train.name == "tinyimagenet"
    for at in range(5):
        with Image.open(tiny / "val" / "images" / f"val_{at}.JPEG") as picture:
            assert np.array_equal(val.images[at], np.asarray(picture.convert("RGB")))
    with Image.open(tiny / "train" / "n02" / "images" / "n02_1.JPEG") as picture:
        assert np.array_equal(train.images[3], np.asarray(picture))


@pytest.mark.parametrize("listed", [True, False])
def test_validation_images_of_tinyimagenet_may_have_been_sorted_into_folders(tiny: Path, listed: bool) -> None:
    lines = [line.split("\t") for line in (tiny / "val" / "val_annotations.txt").read_text().splitlines()]
    for file, name, *_ in lines:
        (tiny / "val" / name).mkdir(exist_ok=True)
        os.rename(tiny / "val" / "images" / file, tiny / "val" / name / file)
    (tiny / "val" / "images").rmdir()
    if not listed:
        (tiny / "val" / "val_annotations.txt").unlink()
    assert read_small(tiny, "val").labels.tolist() == [0, 0, 1, 2, 3]


def remove(path: str) -> Callable[[Path], None]:
    return lambda folder: (folder / path).unlink()


def write(path: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / path).write_text(text)


@pytest.mark.parametrize(
    ("split", "damage", "message"),
    [
        ("val", remove("val/images/val_2.JPEG"), "val/images/val_2.JPEG is missing"),
        ("val", write("val/images/val_2.JPEG", "<html>"), "val/images/val_2.JPEG is not an image"),
        ("val", write("val/val_annotations.txt", "val_0.JPEG n01\n"), "val_annotations.txt, line 1: expected an image"),
        ("val", write("val/val_annotations.txt", "val_0.JPEG\tn09\n"), "val_annotations.txt, line 1: .*n09"),
        ("val", write("val/val_annotations.txt", "val_0.JPEG\tn01\n"), "not all of it: 1 images of 64 x 64 pixels"),
        ("val", write("val/val_annotations.txt", ""), "val_annotations.txt lists no images"),
        ("val", lambda folder: (folder / "wnids.txt").write_bytes(b"n\xff"), "wnids.txt is no text in UTF-8"),
        ("train", write("wnids.txt", "n01\nn02\n"), "other classes than .*wnids.txt, for example n03"),
        ("train", remove("train/n01/images/n01_0.JPEG"), "not all of it: 7 images"),
        ("test", lambda folder: None, "its test set has no labels"),
    ],
)
def test_an_incomplete_tinyimagenet_is_named(
    tiny: Path, split: str, damage: Callable[[Path], Any], message: str
) -> None:
    damage(tiny)
    with pytest.raises(ValueError, match=message):
        read_small(tiny, split)


# --- arrays -----------------------------------------------------------------------------------------------------------


def write_arrays(folder: Path, val: str = "val", grey: bool = False) -> dict[str, tuple[Any, Any]]:
    folder.mkdir(exist_ok=True)
    made = {}
    for split, count in (("train", 12), (val, 4)):
        images, labels = noise(count, size=16, seed=count)
        np.save(folder / f"{split}.npy", images[..., 0] if grey else images)
        np.save(folder / f"{split}_labels.npy", labels.astype(np.uint8))
        made[split] = images, labels
    return made


@pytest.mark.parametrize("val", ["val", "validation", "test"])
def test_arrays_come_as_they_are(tmp_path: Path, val: str) -> None:
    made = write_arrays(tmp_path, val)
    for asked, split in (("train", "train"), ("val", val), (val, val)):
        read = read_small(tmp_path, asked)
        assert np.array_equal(read.images, made[split][0]) and np.array_equal(read.labels, made[split][1])
        assert read.classes == [str(number) for number in range(10)]


def test_grey_arrays_become_colour(tmp_path: Path) -> None:
    images = write_arrays(tmp_path, grey=True)["train"][0]
    for grey in (images[..., 0], images[..., :1]):
        np.save(tmp_path / "train.npy", grey)
        assert np.array_equal(read_small(tmp_path).images, np.stack([images[..., 0]] * 3, axis=3))


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("train", np.zeros((3, 8, 8, 3)), r"train.npy: images must be uint8 of shape .*got float64 \(3, 8, 8, 3\)"),
        ("train", np.zeros((3, 3, 8, 8), np.uint8), r"train.npy: .* got uint8 \(3, 3, 8, 8\) \(channels come last\)"),
        ("train", np.zeros((0, 8, 8, 3), np.uint8), r"train.npy: .* got uint8 \(0, 8, 8, 3\)"),
        ("train", np.zeros((3, 8, 8, 3), np.uint8), r"train.npy: labels must be int64 of shape \(3,\), got .*\(12,\)"),
        ("train", np.zeros((1, 1, 513, 3), np.uint8), r"train.npy has images of 1 x 513 pixels"),
        ("train", np.array([Evil()]), r"train.npy is truncated, or no .npy file of numbers: Array can't"),
        ("train_labels", np.zeros(12), r"train_labels.npy: labels must be integers of shape \(N,\), got float64"),
        ("train_labels", np.arange(1, 13), r"train_labels.npy: labels must be 0..K-1.* 12 different ones from 1 to 12"),
        ("train_labels", np.arange(12) - 1, r"train_labels.npy: labels must be 0..K-1.* from -1 to 10"),
    ],
)
def test_unusable_arrays_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, array: NDArray[Any], message: str
) -> None:
    write_arrays(tmp_path)
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / f"{name}.npy", array, allow_pickle=True)
    with pytest.raises(ValueError, match=message):
        read_small(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_truncated_missing_and_empty_arrays_and_labels_out_of_range_are_named(tmp_path: Path) -> None:
    write_arrays(tmp_path)
    whole = (tmp_path / "train.npy").read_bytes()
    for part in (whole[:-1], whole[:50], b"", b"PK\3\4", b"text"):
        (tmp_path / "train.npy").write_bytes(part)
        with pytest.raises(ValueError, match=r"train.npy is truncated, or no .npy file of numbers"):
            read_small(tmp_path)
    np.save(tmp_path / "val_labels.npy", np.array([0, 1, 10, 2]))
    with pytest.raises(ValueError, match=r"val.npy: labels must be in 0..9, got 10 for image 2"):
        read_small(tmp_path, "val")
    np.save(tmp_path / "train_labels.npy", np.zeros(0, np.int64))
    with pytest.raises(ValueError, match=r"train_labels.npy has no labels"):
        read_small(tmp_path, "val")
    (tmp_path / "val_labels.npy").unlink()
    with pytest.raises(ValueError, match=r"val_labels.npy is missing"):
        read_small(tmp_path, "val")
    (tmp_path / "val.npy").unlink()
    with pytest.raises(ValueError, match=r"has train.npy, but no val.npy or validation.npy or test.npy"):
        read_small(tmp_path, "val")


# --- folders of images ------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Like the CIFAR-10 that is a folder of JPEGs: train and test, two classes."""
    images, _ = noise(10)
    for at, image in enumerate(images):
        folder = tmp_path / "folders" / ("train" if at < 6 else "test") / ("cat", "dog")[at % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{at:04}.jpg")
    return tmp_path / "folders"


def test_folders_come_as_pillow_decodes_them_in_torchvisions_order(folders: Path) -> None:
    for split, there in (("train", "train"), ("val", "test"), ("test", "test")):
        read, theirs = read_small(folders, split), torchvision.datasets.ImageFolder(folders / there)
        assert read.classes == theirs.classes and read.labels.tolist() == theirs.targets
        assert np.array_equal(read.images, [np.asarray(image) for image, _ in theirs])
        assert read.root == folders / there


def test_png_with_alpha_palette_or_grey_and_names_in_any_script_are_images(tmp_path: Path) -> None:
    pixels = noise(1)[0][0]
    alpha = Image.fromarray(np.dstack([pixels, pixels[..., 0]]))
    grey, palette = Image.fromarray(pixels[..., 0]), Image.fromarray(pixels).quantize(16)
    for at, picture in enumerate((alpha, grey, palette)):
        folder = tmp_path / "train" / ("猫", "собака")[at % 2]
        folder.mkdir(parents=True, exist_ok=True)
        picture.save(folder / f"é{at}.png")
    read = read_small(tmp_path)
    assert read.classes == ["собака", "猫"] and read.labels.tolist() == [0, 1, 1]
    assert np.array_equal(read.images[0], np.stack([pixels[..., 0]] * 3, 2))
    assert np.array_equal(read.images[1], pixels)
    assert np.array_equal(read.images[2], np.asarray(palette.convert("RGB")))


def test_images_are_decoded_once_until_one_changes(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    decode = decoded._decode

    def counted(folder: Any) -> Any:
        calls.append(folder)
        return decode(folder)

    monkeypatch.setattr(decoded, "_decode", counted)
    # Two at once, as the processes of a run: one waits for the other.
    threads = [threading.Thread(target=read_small, args=(folders,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = read_small(folders)
    assert len(calls) == 1
    path = folders / "train" / "cat" / "0000.jpg"
    Image.new("RGB", (32, 32), "red").save(path)
    second = read_small(folders)
    assert len(calls) == 2
    assert not np.array_equal(first.images[0], second.images[0]) and second.images[0].max() >= 254
    assert np.array_equal(first.images[1:], second.images[1:])
    assert first.fingerprint != second.fingerprint
    (kept,) = decoded.cache_home().glob("small/*.npy")
    kept.write_bytes(kept.read_bytes()[:-1])
    assert np.array_equal(read_small(folders).images, second.images) and len(calls) == 3


def test_without_a_cache_folder_images_are_decoded_all_the_same(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(read_small(folders)) == 6


def test_images_of_two_sizes_bad_files_and_large_images_are_named(folders: Path) -> None:
    path = folders / "train" / "dog" / "0003.jpg"
    whole = path.read_bytes()
    Image.new("RGB", (32, 31)).save(path)
    with pytest.raises(ValueError, match=r"0003.jpg has 31 x 32 pixels, .*0000.jpg has 32 x 32"):
        read_small(folders)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"0003.jpg can't be decoded: .*truncated"):
        read_small(folders)
    path.write_text("<html>")
    with pytest.raises(ValueError, match=r"0003.jpg is not an image"):
        read_small(folders)
    path.unlink()
    deep = path.with_suffix(".png")
    Image.fromarray(np.full((32, 32), 1000, np.uint16)).save(deep)
    with pytest.raises(ValueError, match=r"0003.png can't be decoded: its pixels have more than 8 bits"):
        read_small(folders)
    deep.unlink()
    Image.new("RGB", (513, 513)).save(folders / "train" / "cat" / "0000.jpg")
    with pytest.raises(ValueError, match=r"0000.jpg has 513 x 513 pixels, but a small image has at most 512"):
        read_small(folders)


def test_folders_that_are_called_cifar10_must_be_all_of_it(folders: Path) -> None:
    with pytest.raises(ValueError, match=r"not all of it: 6 images of 32 x 32 pixels in 2 classes, instead of 30"):
        read_small("cifar10", "train", folders)


# --- digits, names, statistics ----------------------------------------------------------------------------------------


def test_the_digits_are_split_by_class_and_enlarged() -> None:
    from sklearn.datasets import load_digits

    train, val = read_small("digits", "train"), read_small("digits", "val")
    levels, labels = load_digits(return_X_y=True)
    assert len(train) + len(val) == 1797 and train.images.shape[1:] == (32, 32, 3)
    for split, share in ((train, 4 / 5), (val, 1 / 5)):
        counts = np.bincount(split.labels) / np.bincount(labels)
        assert np.all(np.abs(counts - share) < 0.01)
    for label in range(10):
        original = levels[labels == label].reshape(-1, 8, 8) * 255 / 16
        held_out = np.arange(len(original)) % 5 == 4
        for split, chosen in ((train, ~held_out), (val, held_out)):
            images = split.images[split.labels == label]
            assert np.all(images == images[..., :1])
            # Made small again, each is the one that ships, but for the ringing of the bicubic filter.
            again = images[..., 0].reshape(-1, 8, 4, 8, 4).mean((2, 4))
            assert np.abs(again - original[chosen]).mean((1, 2)).max() < 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cifra10",), "'cifra10' is no file or folder, and no name of a data set; did you mean cifar10"),
        (("CIFAR-100",), "did you mean cifar100"),
        (("/nowhere/at/all",), "names are cifar10, cifar100, tinyimagenet, digits"),
        (("cifar10", "train", "/nowhere"), "there is no /nowhere, where cifar10 should be"),
        (("/tmp", "train", "/tmp"), "path goes with one of the names cifar10, .* but data is '/tmp'"),
        ((None,), "data must be a name or a path, got None"),
        (("digits", "train", "/tmp"), "path goes with other names than digits, .* got '/tmp'"),
        (("digits", "test"), "split must be 'train' or 'val' for digits, got 'test'"),
    ],
)
def test_unknown_names_and_places_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_small(*arguments)


def test_lists_in_place_of_arrays_are_named() -> None:
    with pytest.raises(ValueError, match="arrays: labels must be a NumPy array, got list"):
        SmallData(np.zeros((2, 8, 8, 3), np.uint8), [0, 1], ["a", "b"])


def test_a_named_data_set_is_looked_for_in_two_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_home: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"neither in {tmp_path}/data nor in {cache_home}/fastmoll/data: put https:"):
        read_small("cifar10")
    write_cifar(cache_home / "fastmoll" / "data" / "cifar-10-batches-py", cifar.LAYOUTS[0])
    # Another data set in the first place is passed by.
    write_cifar(tmp_path / "data" / "cifar-100-python", cifar.LAYOUTS[2])
    assert read_small("cifar10").root.is_relative_to(cache_home)
    assert read_small("cifar100").root.is_relative_to(tmp_path)


def test_statistics_are_those_of_all_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, _ = write_arrays(tmp_path)["train"]
    mean, std = standardisation(tmp_path)
    pixels = images.reshape(-1, 3) / 255
    assert mean == pytest.approx(pixels.mean(0), rel=1e-12) and std == pytest.approx(pixels.std(0), rel=1e-12)
    assert standardisation("cifar10") == (small.KNOWN["cifar10"].mean, small.KNOWN["cifar10"].std)
    assert standardisation(SmallData(images, np.zeros(12, np.int64), ["a"])) == (mean, std)
