"""Tests of the readers of small images: TinyImageNet, arrays, folders, digits, and what is wrong with them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision
from cifar_files import noise, write_cifar
from numpy.typing import NDArray
from PIL import Image

from fastmoll.pipelines import cifar, decoded, small
from fastmoll.pipelines.small import SmallData, read_small, standardisation

pytestmark = pytest.mark.usefixtures("small_counts")


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
        ("train", write("wnids.txt", "n01\nn02\n"), "train and .*wnids.txt have other classes, for example n03"),
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
        (
            "train",
            np.zeros((3, 8), np.uint8),
            r"train.npy: .* or grey \(N, H, W\) or \(N, H, W, 1\), got uint8 \(3, 8\)",
        ),
        ("train", np.zeros((3, 8, 8, 3), np.uint8), r"train_labels.npy: labels must be .* \(3,\), .* got .*\(12,\)"),
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
    with pytest.raises(ValueError, match=r"val_labels.npy: labels must be in 0..9, got 10 for image 2"):
        read_small(tmp_path, "val")
    labels = (tmp_path / "train_labels.npy").rename(tmp_path / "moved.npy")
    with pytest.raises(ValueError, match=r"val_labels.npy: labels must be 0..K-1, .* 4 different ones from 0 to 10"):
        read_small(tmp_path, "val")
    labels.rename(tmp_path / "train_labels.npy")
    np.save(tmp_path / "train_labels.npy", np.zeros(0, np.int64))
    with pytest.raises(ValueError, match=r"train_labels.npy has no labels"):
        read_small(tmp_path, "val")
    (tmp_path / "val_labels.npy").unlink()
    with pytest.raises(ValueError, match=r"val_labels.npy is missing"):
        read_small(tmp_path, "val")
    (tmp_path / "val.npy").unlink()
    with pytest.raises(ValueError, match=r"has train.npy, but no val.npy or validation.npy or test.npy"):
        read_small(tmp_path, "val")
    (tmp_path / "train.npy").unlink()
    message = r"has no class folders train/<class>, no train.npy with train_labels.npy, and is none of cifar10"
    with pytest.raises(ValueError, match=message):
        read_small(tmp_path)


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
        (("/tmp", "train", "/tmp"), "path must be left out for '/tmp', which is none of cifar10, .* got '/tmp'"),
        ((None,), "data must be a name or a path, got None"),
        (("digits", "train", "/tmp"), "path must be left out for digits, .* got '/tmp'"),
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
