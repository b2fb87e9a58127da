"""The sample data: real, disjoint, the same everywhere, whole whoever asks for it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fastmoll.sample
from fastmoll.sample import PHOTOGRAPHS, SIDES, Photograph, sample_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_folder(tmp_path_factory.mktemp("cache"))


def test_it_is_an_image_folder_of_ten_classes(folder):
    names = sorted(photograph.name for photograph in PHOTOGRAPHS)
    assert len(names) == 10 and names == [photograph.name for photograph in PHOTOGRAPHS]
    for split, count in (("train", 80), ("val", 20)):
        assert sorted(path.name for path in (folder / split).iterdir()) == names
        assert all(len(list((folder / split / name).glob("*.jpg"))) == count for name in names)


def test_sizes_vary_within_bounds_and_both_ways_up(folder):
    sizes = [Image.open(path).size for path in folder.glob("*/*/*.jpg")]
    assert all(SIDES[0] <= side <= SIDES[1] for size in sizes for side in size)
    assert len(set(sizes)) > 500
    for split in ("train", "val"):
        for photograph in PHOTOGRAPHS:
            ratios = [w / h for w, h in (Image.open(p).size for p in (folder / split / photograph.name).iterdir())]
            assert min(ratios) < 0.9 and max(ratios) > 1.1


def test_training_and_validation_share_no_pixel(tmp_path, monkeypatch):
    # In a picture whose grey says how far to the right a pixel stands, the parts show in the crops' values.
    source = tmp_path / "gradient.png"
    Image.fromarray(np.tile(np.arange(1024) // 4, (600, 1)).astype(np.uint8)).save(source)
    monkeypatch.setattr(fastmoll.sample, "_locate", lambda photograph: source)
    folder = sample_folder(tmp_path / "cache")

    def crops(split: str, photograph: Photograph) -> Iterator[Path]:
        return (folder / split / photograph.name).iterdir()

    for photograph in PHOTOGRAPHS:
        values = {
            split: np.concatenate([np.asarray(Image.open(p))[..., 0].ravel() for p in crops(split, photograph)])
            for split in ("train", "val")
        }
        # JPEG's quantisation moves a grey by a level or two.
        assert values["train"].max() <= photograph.cut * 256 + 2
        assert values["val"].min() >= photograph.cut * 256 - 2
        assert values["train"].min() < values["val"].min() and values["train"].max() < values["val"].max()


@pytest.mark.parametrize("photograph", PHOTOGRAPHS, ids=lambda photograph: photograph.name)
def test_parts_touch_but_never_overlap(photograph: Photograph):
    for width in (451, 640, 1411):
        parts = photograph.parts(width, 300)
        assert 0 <= parts["train"][0] < parts["train"][2] <= parts["val"][0] < parts["val"][2] <= width


def test_it_can_be_learnt_and_is_not_trivial_to_chance(folder):
    def features(split: str) -> tuple[np.ndarray, np.ndarray]:
        rows, labels = [], []
        for label, photograph in enumerate(PHOTOGRAPHS):
            for path in (folder / split / photograph.name).iterdir():
                small = np.asarray(Image.open(path).resize((16, 16)), dtype=np.float32).reshape(-1, 3)
                rows.append(np.histogramdd(small, bins=(5, 5, 5), range=[(0, 256)] * 3)[0].ravel())
                labels.append(label)
        return np.sqrt(np.array(rows)), np.array(labels)

    train, train_labels = features("train")
    val, val_labels = features("val")
    distance = (val**2).sum(1)[:, None] - 2 * val @ train.T + (train**2).sum(1)
    error = np.mean(train_labels[distance.argmin(1)] != val_labels)
    assert error < 0.3  # chance is 0.9


def test_it_is_the_same_every_time(folder, tmp_path):
    again = sample_folder(tmp_path)
    for path in sorted(folder.glob("*/*/00*.jpg")):
        assert path.read_bytes() == (again / path.relative_to(folder)).read_bytes()


def test_a_finished_cache_is_reused(folder):
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/*/*.jpg")}
    assert sample_folder(folder.parent) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/*/*.jpg")} == before


def test_the_default_place_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert sample_folder() == tmp_path / "fastmoll" / "sample-v1"


def test_processes_that_ask_at_once_all_get_it_whole(tmp_path):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        folders = pool.map(sample_folder, [tmp_path] * 3, chunksize=1)
    assert set(folders) == {tmp_path / "sample-v1"}
    assert [path.name for path in tmp_path.iterdir()] == ["sample-v1"]
    assert len(list(folders[0].glob("*/*/*.jpg"))) == 1000


def test_a_race_lost_at_the_last_step_is_no_error(folder, tmp_path, monkeypatch):
    write = fastmoll.sample._write_crops

    def slow(photograph: Photograph, source: Path, root: Path) -> None:
        write(photograph, source, root)
        if photograph is PHOTOGRAPHS[-1]:  # another process finishes now
            (tmp_path / "sample-v1").symlink_to(folder)

    monkeypatch.setattr(fastmoll.sample, "_write_crops", slow)
    assert sample_folder(tmp_path) == tmp_path / "sample-v1"
    assert [path.name for path in tmp_path.iterdir()] == ["sample-v1"]


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(fastmoll.sample, "_write_crops", fail)
    with pytest.raises(OSError, match="disk full"):
        sample_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_is_cleared_away_once_no_process_can_be_at_it(folder, tmp_path):
    (tmp_path / "sample-v1").symlink_to(folder)
    old, new, others = (tmp_path / f"sample-v1.{name}" for name in ("0ld_abcd", "n3w_abcd", "backup"))
    for place in (old, new, others):
        (place / "sample-v1" / "train").mkdir(parents=True)
    for place in (old, others):
        os.utime(place, (0, time.time() - 3601))
    sample_folder(tmp_path)
    assert not old.exists() and new.exists() and others.exists()


def test_missing_files_in_the_cache_are_reported(tmp_path):
    folder = sample_folder(tmp_path)
    next(folder.glob("train/*/*.jpg")).unlink()
    with pytest.raises(ValueError, match="has 999 files instead of 1000: delete"):
        sample_folder(tmp_path)


def test_a_missing_package_is_named_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(fastmoll.sample.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'fastmoll\[sample\]'"):
        sample_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_making_it_imports_neither_the_packages_nor_torch(tmp_path):
    code = (
        "import sys, pathlib; from fastmoll.sample import sample_folder; sample_folder(pathlib.Path(sys.argv[1]));"
        "sys.exit(any(name in sys.modules for name in ('skimage', 'sklearn', 'pooch', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0
