"""``fastmoll corrupt``: what it writes opens as a set, holds what is generated on the fly, and is gone on with."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fastmoll.cli import corrupt as cli_corrupt
from fastmoll.corruptions import corrupt
from fastmoll.kernels.corruption_constants import CORRUPTIONS
from fastmoll.output import lock
from fastmoll.pipelines.corrupted import DESCRIPTION, open_corrupted
from fastmoll.pipelines.small import SmallData
from fastmoll.robustness import writer
from fastmoll.robustness.stored_images import open_clean
from fastmoll.robustness.writer import write_corrupted

Make = Callable[..., Path]

SOME = ["gaussian_noise", "brightness"]
needs_dali = pytest.mark.skipif(importlib.util.find_spec("nvidia") is None, reason="DALI is not installed")


def small(count: int = 7, size: int = 32, classes: int = 3) -> SmallData:
    images = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), np.uint8)
    names = [str(label) for label in range(classes)]
    return SmallData(images, np.arange(count, dtype=np.int64) % classes, names)


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    cli_corrupt.add(parser.add_subparsers())
    return cli_corrupt.run(parser.parse_args(["corrupt", *map(str, arguments)]))


def content(root: Path) -> dict[str, bytes]:
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def listed(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if name != ".lock")


def expected(data: SmallData, name: str, level: int, seed: int = 0) -> np.ndarray:
    made = corrupt(torch.from_numpy(data.images).permute(0, 3, 1, 2), name, level, seed=seed)
    return made.permute(0, 2, 3, 1).numpy()


# ------------------------------------------------------------------ arrays


@pytest.mark.parametrize("threads", [1, 3])
def test_arrays_hold_what_is_generated_severity_after_severity(
    tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_LARGEST_BATCH", 3)
    data = small()
    found = write_corrupted(data, tmp_path / "out", corruptions=SOME, seed=5, threads=threads)
    assert (found.kind, found.source, found.count, found.corruptions) == ("cifar-c", "generated", 7, tuple(SOME))
    for name in SOME:
        for level in found.severities:
            images, labels = found.arrays(name, level)
            assert np.array_equal(images, expected(data, name, level, seed=5))
            assert np.array_equal(labels, data.labels)
    assert np.load(tmp_path / "out" / "labels.npy").dtype == np.uint8
    assert listed(tmp_path / "out") == ["brightness.npy", DESCRIPTION, "gaussian_noise.npy", "labels.npy"]


def test_the_command_writes_all_digits_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("digits", tmp_path / "out", "--corruptions", "brightness", "--threads", "1") == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'out'}: 1 x 5 cells of 355 images of 32 x 32 pixels in 10 classes\n"
    assert "1775/1775" in printed.err
    digits = open_clean("digits")
    images, labels = open_corrupted(tmp_path / "out", classes=digits.classes, corruptions=["brightness"]).arrays(
        "brightness", 3
    )
    assert len(images) == 355 and np.array_equal(labels, digits.labels)


def test_a_second_call_writes_only_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_corrupted(small(), out, corruptions=["brightness"])
    before = (out / "brightness.npy").stat()
    write_corrupted(small(), out, corruptions=SOME)
    after = (out / "brightness.npy").stat()
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)
    assert open_corrupted(out, corruptions=SOME).count == 7


def test_a_failure_leaves_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(images: torch.Tensor, name: str, level: int, **options: Any) -> torch.Tensor:
        if (name, level) == ("brightness", 4):
            raise OSError(28, "No space left on device")
        return corrupt(images, name, level, **options)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(writer, "corrupt", fails)
        with pytest.raises(OSError, match="No space left"):
            write_corrupted(small(), out, corruptions=SOME)
    assert listed(out) == [DESCRIPTION, "gaussian_noise.npy", "labels.npy"]
    whole = write_corrupted(small(), out, corruptions=SOME)
    assert np.array_equal(whole.arrays("brightness", 4)[0], expected(small(), "brightness", 4))


# ------------------------------------------------------------------ files


def test_files_are_those_of_imagenet_c(tmp_path: Path) -> None:
    data, out = small(size=64), tmp_path / "out"
    found = write_corrupted(data, out, corruptions=SOME, severities=[2, 5], threads=2)
    assert (found.kind, found.count, found.size, found.classes) == ("tinyimagenet-c", 7, 64, ["0", "1", "2"])
    made = expected(data, "gaussian_noise", 5)
    for sample in range(7):
        path = out / "gaussian_noise" / "5" / str(sample % 3) / f"{sample:08}.JPEG"
        again = tmp_path / "again.jpg"
        Image.fromarray(made[sample]).save(again, quality=85, optimize=True)
        assert path.read_bytes() == again.read_bytes()
    assert listed(out) == ["brightness", DESCRIPTION, "gaussian_noise"]
    with pytest.raises(ValueError, match="lacks severity 1, 3, 4"):
        open_corrupted(out, corruptions=SOME)
    best = write_corrupted(data, tmp_path / "best", corruptions=["brightness"], severities=[1], quality=95)
    Image.fromarray(expected(data, "brightness", 1)[0]).save(again, quality=95, optimize=True)
    assert Path(best.folder("brightness", 1).path(0)).read_bytes() == again.read_bytes()


@needs_dali
def test_files_keep_the_names_of_photographs(make_tree: Make, tmp_path: Path) -> None:
    tree, out = make_tree(7), tmp_path / "out"
    Image.new("RGB", (40, 50), (9, 8, 7)).save(tree / "class0" / "picture.png")
    found = write_corrupted(tree, out, size=48, layout="imagenet-c", corruptions=SOME, severities=[1], threads=1)
    names = [str(Path(path).with_suffix(".JPEG")) for path in open_clean(tree).pixels.paths]  # type: ignore[union-attr]
    assert found.folder("brightness", 1).paths == names and "class0/picture.JPEG" in names
    assert (found.kind, found.size) == ("imagenet-c", 48)


@needs_dali
def test_missing_files_alone_are_made_again_and_are_the_same(make_tree: Make, tmp_path: Path) -> None:
    tree, out = make_tree(7), tmp_path / "out"
    options: dict[str, Any] = {"size": 40, "corruptions": SOME, "severities": [1, 3], "threads": 2}
    write_corrupted(tree, out, **options)
    before = content(out)
    assert len(before) == 1 + 2 * 2 * 7
    for path in [path for path in before if path.endswith("JPEG")][::3]:
        (out / path).unlink()
    stamps = {path: (out / path).stat().st_mtime_ns for path in content(out)}
    write_corrupted(tree, out, **options)
    assert content(out) == before
    assert {path: (out / path).stat().st_mtime_ns for path in stamps} == stamps


def test_an_empty_file_is_made_again(tmp_path: Path) -> None:
    for data, name in ((small(3, 64), "brightness/2/1/00000001.JPEG"), (small(), "brightness.npy")):
        out = tmp_path / str(data.images.shape[1])
        options: dict[str, Any] = {"corruptions": ["brightness"]}
        write_corrupted(data, out, **options)
        before = content(out)
        (out / name).write_bytes(b"")
        write_corrupted(data, out, **options)
        assert content(out) == before


def test_a_killed_process_is_gone_on_with(tmp_path: Path) -> None:
    data, out = small(400, 64), tmp_path / "out"
    np.save(tmp_path / "val.npy", data.images)
    np.save(tmp_path / "val_labels.npy", data.labels)
    code = (
        "import sys; from fastmoll.robustness.writer import write_corrupted; "
        f"write_corrupted({str(tmp_path)!r}, {str(out)!r}, corruptions={SOME}, threads=1)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    while len(list(out.glob("*/*/*/*.JPEG"))) < 50:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {path: path.read_bytes() for path in out.glob("*/*/*/*.JPEG")}
    assert 50 <= len(kept) < 4000
    for path in kept:
        with Image.open(path) as image:
            image.load()
    found = write_corrupted(tmp_path, out, corruptions=SOME)
    assert found.count == 400 and not (out / ".parts").exists()
    assert {path: path.read_bytes() for path in kept} == kept


# ------------------------------------------------------------------ bad input


def refused(match: str, data: Any, out: Path, **options: Any) -> None:
    before = content(out) if out.is_dir() else out.exists()
    with pytest.raises(ValueError, match=match):
        write_corrupted(data, out, **options)
    assert (content(out) if out.is_dir() else out.exists()) == before


def test_bad_input_is_named_before_anything_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused("there is no 'fogg'; did you mean fog", small(), out, corruptions=["fogg"])
    refused("severities must be 1 to 5, got 7", small(), out, severities=[7])
    message = "severities must be all of 1 to 5 in the layout cifar-c (--format imagenet-c takes some), got 2, 3"
    refused(re.escape(message), small(), out, severities=[3, 2])
    refused("has no images of '3' in its val split", small(count=3, classes=4), out)
    refused("layout must be one of", small(), out, layout="zip")
    refused("quality must be", small(), out, quality=96)
    refused("threads must be", small(), out, threads=0)
    refused("seed must be", small(), out, seed=-1)
    refused("not 64 x 64", small(), out, size=64)
    refused("no name of a data set", tmp_path / "none", out)
    refused("not in the order of their names: use the layout cifar-c", small(22, 64, 11), out)
    slashed = SmallData(small().images, small().labels, ["a", "b/c", "d"])
    refused("has the class 'b/c', which can't be a folder", slashed, out, layout="imagenet-c")


def test_a_wrong_folder_of_frost_matters_to_frost_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTMOLL_FROST", str(tmp_path / "nowhere"))
    refused("FASTMOLL_FROST must be a folder", small(), tmp_path / "out", corruptions=["fog", "frost"])
    assert write_corrupted(small(), tmp_path / "out", corruptions=["fog"]).corruptions == ("fog",)


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    refused("is there already, and not a corrupted set that fastmoll wrote", small(), out)
    out.unlink()
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    refused("is there already, and not a corrupted set that fastmoll wrote", small(), out)
    (out / "mine.txt").unlink()
    write_corrupted(small(), out, corruptions=["brightness"])


def test_other_data_and_settings_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_corrupted(small(), out, corruptions=["brightness"])
    refused("written with another seed, 0 instead of 1", small(), out, seed=1)
    refused("written with another layout, 'cifar-c' instead of 'imagenet-c'", small(), out, layout="imagenet-c")
    with pytest.raises(ValueError, match="written with another size, 32 instead of 24"):
        write_corrupted(small(size=24), out)
    other = small()
    other.images[0, 0, 0, 0] += 1
    refused(r"written of other images \(digest\), '[0-9a-f]+' instead of '", other, out)
    description = out / DESCRIPTION
    whole = description.read_text()
    description.write_text(json.dumps({**json.loads(whole), "fastmoll": "0.0.1"}))
    write_corrupted(small(), out, corruptions=["brightness"])
    description.write_text("{}")
    refused(r"corrupted\.json is damaged", small(), out)
    description.write_text(whole)
    with lock(out, "OUT"):
        refused("is in use by another run", small(), out)


@needs_dali
def test_a_clean_file_that_cannot_be_decoded_is_named_on_one_line(make_tree: Make, tmp_path: Path) -> None:
    tree = make_tree(4)
    (tree / "class1" / "0001.jpg").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(ValueError, match=r"can't decode 1 file\(s\)(.|\n)*class1/0001\.jpg"):
        run(tree, tmp_path / "out", "--size", "40", "--corruptions", "brightness", "--format", "imagenet-c")
    assert listed(tmp_path / "out") == ["brightness", DESCRIPTION]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(image: Image.Image, place: Path, *words: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(OSError, match=r"^/.*/brightness/2/0/0000000.\.JPEG can't be written: No space left on device$"):
        write_corrupted(small(size=64), tmp_path / "out", corruptions=["brightness"], severities=[2], threads=1)
    assert listed(tmp_path / "out") == ["brightness", DESCRIPTION]


def test_a_folder_among_the_classes_of_the_data_is_refused(make_tree: Make, tmp_path: Path) -> None:
    tree = make_tree(4)
    (tmp_path / "link").symlink_to(tree)
    for out in (tree, tree / "out", tmp_path / "link" / "out", tree / "class1" / "out"):
        refused(r"OUT: .* is inside .*/tree, where each folder is a class", tree, out, size=32)
    assert sorted(os.listdir(tree)) == ["class0", "class1", "class2"]


@needs_dali
def test_two_images_that_would_get_one_name_are_refused(make_tree: Make, tmp_path: Path) -> None:
    tree = make_tree(4)
    Image.new("RGB", (40, 40)).save(tree / "class0" / "0000.png")
    refused(r"class0/0000\.jpg and .*class0/0000\.png would both become class0/0000\.JPEG", tree, tmp_path / "out")


def test_the_parser_waits_for_no_torch(tmp_path: Path) -> None:
    code = "import sys, fastmoll.cli.corrupt; sys.exit(any(n in sys.modules for n in ('torch', 'numpy', 'PIL')))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_fifteen_corruptions_can_be_written(tmp_path: Path) -> None:
    found = write_corrupted(small(4), tmp_path / "out")
    assert found.corruptions == CORRUPTIONS and found.frost in ("made", "published")
