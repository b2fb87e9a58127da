"""Listing ImageFolder trees."""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import ImageFolder as TorchvisionFolder

from fastmoll.pipelines import files
from fastmoll.pipelines.files import cache_home, list_folder, scan_folder, split_folder


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every tree be old enough for its list to be cached."""
    monkeypatch.setattr(files, "_SETTLED_NS", 0)


def test_same_order_and_classes_as_torchvision(make_tree: Callable[..., Path]) -> None:
    tree = make_tree(20, classes=4)
    (tree / "class1" / "nested").mkdir()
    (tree / "class1" / "0001.jpg").rename(tree / "class1" / "nested" / "Z.JPEG")
    (tree / "class2" / "notes.txt").write_text("not an image")
    ours, theirs = scan_folder(tree), TorchvisionFolder(str(tree))
    assert ours.classes == theirs.classes
    assert [ours.path(i) for i in range(len(ours))] == [path for path, _ in theirs.samples]
    assert ours.targets.tolist() == theirs.targets
    assert ours.targets.dtype == np.int64


def test_split_folder_is_used_where_it_exists_else_the_root(make_tree: Callable[..., Path], tmp_path: Path) -> None:
    make_tree(4, name="data/train")
    make_tree(6, name="data/val")
    flat = make_tree(8, name="flat")
    assert [len(scan_folder(tmp_path / "data", split)) for split in ("train", "val")] == [4, 6]
    assert len(scan_folder(flat, "val")) == 8


def test_a_split_that_is_missing_beside_others_is_an_error(make_tree: Callable[..., Path], tmp_path: Path) -> None:
    make_tree(4, name="data/train")
    with pytest.raises(ValueError, match=r"data has no 'val' folder, only 'train'"):
        scan_folder(tmp_path / "data", "val")
    with pytest.raises(ValueError, match=r"has no 'vla' folder; without any, split is one of train, val, "):
        scan_folder(make_tree(4, name="flat"), "vla")


def test_missing_empty_and_classless_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere does not exist"):
        scan_folder(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is not a folder"):
        scan_folder(tmp_path / "file")
    with pytest.raises(ValueError, match="has no class folders"):
        scan_folder(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match="1 class folders but no image"):
        scan_folder(tmp_path)


def test_a_class_without_images_is_named(make_tree: Callable[..., Path]) -> None:
    tree = make_tree(4)
    (tree / "hollow").mkdir()
    with pytest.raises(ValueError, match="without an image: 'hollow'"):
        scan_folder(tree)


def test_dot_folders_are_no_classes(make_tree: Callable[..., Path]) -> None:
    tree = make_tree(4)
    (tree / ".ipynb_checkpoints").mkdir()
    assert scan_folder(tree).classes == ["class0", "class1", "class2"]


def test_a_line_break_in_a_name_is_an_error(make_tree: Callable[..., Path]) -> None:
    tree = make_tree(4)
    next(tree.rglob("*.jpg")).rename(tree / "class0" / "a\nb.jpg")
    with pytest.raises(ValueError, match=r"a\\nb.jpg"):
        scan_folder(tree)
    folder, _ = list_folder(tree)
    assert [folder.paths[sample] for sample in folder.unlistable] == ["class0/a\nb.jpg"]


@pytest.mark.parametrize("split", ["", ".", "..", "sub/train", "train/", "/"])
def test_a_split_is_the_name_of_a_folder(split: str, make_tree: Callable[..., Path], tmp_path: Path) -> None:
    make_tree(4, name="data/train")
    make_tree(4, name="data/sub/train")
    with pytest.raises(ValueError, match=f"split must be the name of a folder, got '{re.escape(split)}'"):
        split_folder(tmp_path / "data", split)


def test_a_root_that_dali_can_not_open_is_named_and_one_in_utf8_is_not(make_tree: Callable[..., Path]) -> None:
    assert len(scan_folder(make_tree(3, name="caf\u00e9"))) == 3
    tree = make_tree(3, name=os.fsdecode(b"caf\xe9"))
    with pytest.raises(ValueError, match=r"caf\\udce9': its path is not UTF-8"):
        scan_folder(tree)


def test_links_in_circles_add_no_copies(make_tree: Callable[..., Path]) -> None:
    tree = make_tree(6)
    (tree / "class0" / "more").mkdir()
    (tree / "class0" / "0003.jpg").rename(tree / "class0" / "more" / "0003.jpg")
    expected = scan_folder(tree).paths
    assert len(expected) == 6
    for link, target in (("self", "."), ("more/up", ".."), ("more/root", "../.."), ("again", "more")):
        (tree / "class0" / link).symlink_to(target)
    found = scan_folder(tree)
    again = [path.replace("/again/", "/more/") for path in found.paths]
    assert (sorted(again), found.classes) == (expected, ["class0", "class1", "class2"])


def test_links_to_folders_and_files_elsewhere_are_followed(make_tree: Callable[..., Path], tmp_path: Path) -> None:
    tree, other = make_tree(3), make_tree(4, classes=1, name="other")
    (tree / "class0" / "more").symlink_to(other / "class0")
    (tree / "class1" / "one.jpg").symlink_to(other / "class0" / "0002.jpg")
    (tree / "class3").symlink_to(other / "class0")  # the same images in another class are no circle
    assert np.bincount(scan_folder(tree).targets).tolist() == [5, 2, 1, 4]
    assert scan_folder(tree).paths == [os.path.relpath(path, tree) for path, _ in TorchvisionFolder(str(tree)).samples]


def test_only_regular_files_and_broken_links_are_samples(
    make_tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = make_tree(3)
    os.mkfifo(tree / "class0" / "pipe.jpg")
    for name, target in (("null", os.devnull), ("to_pipe", "pipe.jpg"), ("gone", "nowhere"), ("loop", "loop.jpg")):
        (tree / "class0" / f"{name}.jpg").symlink_to(target)
    monkeypatch.chdir(tree / "class0")  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.jpg")
    found, ignored = list_folder(tree)
    assert found.paths[:3] == ["class0/0000.jpg", "class0/gone.jpg", "class0/loop.jpg"]
    assert found.paths == scan_folder(tree).paths and len(found) == 5
    assert ignored == {"not a regular file": 4}


def test_files_with_other_extensions_are_counted(make_tree: Callable[..., Path]) -> None:
    tree = make_tree(3)
    for name in ("class0/a.GIF", "class1/b.gif", "class1/notes.txt", "class1/.DS_Store", "LICENSE.txt"):
        (tree / name).write_text("")
    found, ignored = list_folder(tree)
    assert (len(found), ignored) == (3, {".gif": 2, ".txt": 1, "without extension": 1})


@pytest.mark.usefixtures("settled")
def test_the_list_is_cached_and_made_again_when_a_folder_changes(
    make_tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = make_tree(9)
    before = (tree / "class1").stat()
    time.sleep(0.05)  # until the clock of the file system ticks
    first = scan_folder(tree)
    with monkeypatch.context() as patch:
        patch.setattr(files, "_walk", None)  # a second walk would fail
        again = scan_folder(tree)
    assert (again.paths, again.classes, again.fingerprint) == (first.paths, first.classes, first.fingerprint)
    assert np.array_equal(again.targets, first.targets)
    (tree / "class1" / "0001.jpg").unlink()
    os.utime(tree / "class1", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert len(scan_folder(tree)) == 8


@pytest.mark.usefixtures("settled")
def test_a_damaged_cache_is_ignored(make_tree: Callable[..., Path], cache_home: Path) -> None:
    tree = make_tree(9)
    scan_folder(tree)
    (store,) = (cache_home / "fastmoll" / "lists").iterdir()
    store.write_text("{")
    assert len(scan_folder(tree)) == 9


def test_a_user_without_a_home_has_a_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cache_home() == tmp_path / f"fastmoll-{os.getuid()}"


def test_a_folder_that_changed_just_now_is_not_cached(make_tree: Callable[..., Path], cache_home: Path) -> None:
    tree = make_tree(3)
    for where, _, _ in os.walk(tree):
        os.utime(where, (1_000_000_000, 1_000_000_000))  # as when unpacked
    scan_folder(tree)
    assert not (cache_home / "fastmoll").exists()


def test_fingerprint_sees_names_and_classes(make_tree: Callable[..., Path]) -> None:
    tree = make_tree(6)
    before = scan_folder(tree).fingerprint
    (tree / "class0" / "0000.jpg").rename(tree / "class1" / "0000.jpg")
    assert scan_folder(tree).fingerprint != before
