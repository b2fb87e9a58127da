"""`fastmoll check` over whole trees: nothing lost, nothing invented, whatever happens to its workers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fastmoll.check
from fastmoll.check import check_files, run_check
from fastmoll.pipelines.diagnose import Finding, diagnose
from fastmoll.pipelines.files import scan_split


def write_images(folder: Path, count: int) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(len(str(folder)))
    pixels = rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)
    paths = [folder / f"{number:04}.jpg" for number in range(count)]
    for path in paths:
        Image.fromarray(pixels).save(path)
    return paths


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for split, count in (("train", 5), ("val", 2)):
        for name in ("a", "b"):
            write_images(tmp_path / split / name, count)
    return tmp_path


def test_findings_come_in_order_one_an_image(tmp_path, monkeypatch):
    monkeypatch.setattr(fastmoll.check, "_CHUNK", 4)
    paths = write_images(tmp_path, 50)
    paths[7].unlink()
    for number in (0, 23, 49):
        cut(paths[number])
    (tmp_path / "0031.jpg").write_bytes(b"")
    found = list(check_files(paths, 2))
    assert len(found) == 50
    assert {i: f.reason.split(":")[0] for i, f in enumerate(found) if f} == {
        0: "truncated JPEG",
        7: "missing file",
        23: "truncated JPEG",
        31: "empty file",
        49: "truncated JPEG",
    }
    assert all(f is None or f.path == str(paths[i]) for i, f in enumerate(found))


def test_corruption_that_only_the_decoder_mentions_is_odd_and_only_there(tmp_path, capfd):
    paths = write_images(tmp_path, 4)
    data = bytearray(paths[1].read_bytes())
    data[-400:-300] = bytes(100)
    paths[1].write_bytes(bytes(data))
    found = list(check_files(paths, 1))
    assert [f is None for f in found] == [True, False, True, True]
    assert found[1] is not None and found[1].kind == "odd"
    assert found[1].reason.startswith("corrupt but decoded: Corrupt JPEG data")
    assert "Corrupt" not in capfd.readouterr().err


def crash_on_four(paths: list[str]) -> list[Finding | None]:
    """Stands in for a decoder that takes its whole process down."""
    if any(path == "4" for path in paths):
        os._exit(11)
    return [Finding(path, "odd", "seen") if path == "9" else None for path in paths]


def test_a_decoder_that_kills_its_process_costs_one_file(monkeypatch):
    monkeypatch.setattr(fastmoll.check, "_CHUNK", 3)
    monkeypatch.setattr(fastmoll.check, "_check_chunk", crash_on_four)
    found = list(check_files([str(number) for number in range(12)], 2))
    assert [(f.path, f.kind, f.reason) for f in found if f] == [
        ("4", "bad", "crashes the decoder: its process died"),
        ("9", "odd", "seen"),
    ]
    assert len(found) == 12


def test_no_files_no_findings():
    assert list(check_files([])) == []


@pytest.fixture
def in_process(monkeypatch):
    """Decode without workers: starting those is most of the time of a small check."""
    monkeypatch.setattr(fastmoll.check, "check_files", lambda paths, threads: (diagnose(path) for path in paths))


def test_a_good_tree_is_success(tree, capsys, in_process):
    assert run_check(tree, threads=1) == 0
    assert capsys.readouterr().out == "14 files in 2 classes: all decode\n"


def test_bad_files_of_every_split_are_listed_and_counted(tree, capsys):
    cut(tree / "train/b/0003.jpg")
    cut(tree / "val/a/0001.jpg")
    (tree / "val/b/0000.jpg").unlink()
    (tree / "val/b/0000.jpg").symlink_to("nowhere.jpg")
    Image.new("CMYK", (32, 24)).save(tree / "train/a/0002.jpg")
    assert run_check(tree, threads=1) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines[:4]] == [
        f"odd {tree.resolve()}/train/a/0002.jpg",
        f"bad {tree.resolve()}/train/b/0003.jpg",
        f"bad {tree.resolve()}/val/a/0001.jpg",
        f"bad {tree.resolve()}/val/b/0000.jpg",
    ]
    assert [line.split(maxsplit=2) for line in lines[5:8]] == [
        ["2", "bad", "truncated JPEG"],
        ["1", "bad", "broken link"],
        ["1", "odd", "CMYK colours"],
    ]
    assert lines[8] == "14 files in 2 classes: 3 bad, 1 odd"


def test_a_split_can_be_chosen(tree, capsys, in_process):
    cut(tree / "train/a/0000.jpg")
    assert run_check(tree, split="val", threads=1) == 0
    assert capsys.readouterr().out == "4 files in 2 classes: all decode\n"


def test_a_tree_without_splits_is_checked_itself(tree, capsys, in_process):
    assert run_check(tree / "train", threads=1) == 0
    assert capsys.readouterr().out == "10 files in 2 classes: all decode\n"


def test_of_a_tree_without_validation_images_it_is_said_that_training_needs_them(tree, capsys, in_process):
    shutil.rmtree(tree / "val")
    assert run_check(tree, threads=1) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first == f"no val folder in {tree}: the trainers do not start without one"
    with pytest.raises(ValueError, match="has no 'val' folder"):
        scan_split(tree, "val")
    assert last == "10 files in 2 classes: all decode"


@pytest.mark.parametrize(
    ("lacking", "files", "message"),
    [
        (["val/b"], 12, "train and val have other classes, for example b"),
        (["train/a"], 9, "train and val have other classes, for example a"),
        (["train/b", "val/b"], 7, "all images are of one class, 'a': there is nothing to tell apart"),
    ],
)
def test_classes_that_training_refuses_are_bad_in_its_words(lacking, files, message, tree, capsys, in_process):
    for name in lacking:
        shutil.rmtree(tree / name)
    assert run_check(tree, threads=1, allow_odd=True) == 1
    line, empty, count, last = capsys.readouterr().out.splitlines()
    assert line == f"bad {tree}: {message}"
    assert not empty and count.split(maxsplit=2) == ["1", "bad", message.split(":")[0]]
    assert last == f"{files} files in {2 - (len(lacking) == 2)} class{'es' * (len(lacking) == 1)}: 1 bad"
    assert run_check(tree, split="val", threads=1) == 0


@pytest.mark.parametrize(("allow_odd", "status"), [(False, 1), (True, 0)])
def test_odd_files_count_unless_allowed(allow_odd, status, tree, capsys, in_process):
    Image.new("CMYK", (32, 24)).save(tree / "val/a/0000.jpg")
    assert run_check(tree, split="val", allow_odd=allow_odd, threads=1) == status
    assert capsys.readouterr().out.endswith("4 files in 2 classes: all decode, 1 odd\n")


def test_a_name_that_is_no_utf8_is_listed(tree, capsys, in_process):
    name = os.fsdecode(b"caf\xe9.jpg")
    (tree / "val/a" / name).write_bytes(b"")
    assert run_check(tree, split="val", threads=1) == 1
    assert "caf\\udce9.jpg: empty file" in capsys.readouterr().out


def test_a_class_without_images_is_bad_and_the_others_are_looked_at(tree, capsys, in_process):
    (tree / "train" / "empty").mkdir()
    cut(tree / "train/b/0001.jpg")
    assert run_check(tree, split="train", threads=1) == 1
    found = capsys.readouterr().out.splitlines()
    assert found[0] == f"bad {tree.resolve()}/train/empty: class folder without an image, which training refuses"
    assert found[1].startswith(f"bad {tree.resolve()}/train/b/0001.jpg: truncated JPEG")
    assert found[-1] == "10 files in 3 classes: 2 bad"


def test_names_that_can_not_be_in_a_list_are_bad_and_take_one_line(tree, capsys, in_process):
    (tree / "val/a/0000.jpg").rename(tree / "val/a/a\nb.jpg")
    (tree / "val/a/0001.jpg").rename(tree / "val/a/a\rb.jpg")
    (tree / "val/b/0000.jpg").unlink()
    (tree / "val/b/\x1b[2J.jpg").write_bytes(b"")
    assert run_check(tree, split="val", threads=1) == 1
    folder = tree.resolve() / "val"
    assert capsys.readouterr().out.split("\n") == [
        f"bad {folder}/a/a\\nb.jpg: line break in its name: DALI's file list can't carry it",
        f"bad {folder}/a/a\\rb.jpg: line break in its name: DALI's file list can't carry it",
        f"bad {folder}/b/\\x1b[2J.jpg: empty file",
        "",
        "       2 bad  line break in its name",
        "       1 bad  empty file",
        "4 files in 2 classes: 3 bad",
        "",
    ]


def test_files_that_are_no_samples_are_mentioned_and_no_fault(tree, capsys, in_process):
    for name in ("train/a/x.gif", "train/b/x.GIF", "val/a/notes.txt", "val/a/README"):
        (tree / name).write_text("")
    os.mkfifo(tree / "val/b/pipe.jpg")
    assert run_check(tree, threads=1) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ignored in class folders: 2 .gif, 1 .txt, 1 not a regular file, 1 without extension",
        "14 files in 2 classes: all decode",
    ]


def test_of_many_other_extensions_the_most_frequent_are_named(tree, capsys, in_process):
    for number in range(20):
        (tree / f"val/a/x.{number}").write_text("")
    (tree / "val/b/y.19").write_text("")
    assert run_check(tree, split="val", threads=1) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line == ("ignored in class folders: 2 .19, 1 .0, 1 .1, 1 .10, 1 .11, 1 .12, 1 .13, 1 .14, 21 in all")


@pytest.mark.parametrize("threads", [0, -1])
def test_threads_must_be_positive(threads):
    with pytest.raises(ValueError, match=f"threads .* got {threads}"):
        check_files(["x.jpg"], threads)


def test_an_unknown_split_is_refused(tree):
    with pytest.raises(ValueError, match=r"split: .* no folder 'valid'"):
        run_check(tree, split="valid")
    with pytest.raises(ValueError, match="split must be the name of a folder, got ''"):
        run_check(tree, split="")


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        run_check(tmp_path / "nowhere", split="val")


def test_an_interrupt_ends_it_cleanly(tmp_path):
    write_images(tmp_path / "train/b", 1)
    source = write_images(tmp_path / "train/a", 1)[0]
    (source.parent / "first.jpg").write_bytes(b"")
    for number in range(20_000):
        os.link(source, source.parent / f"more{number}.jpg")
    command = [sys.executable, "-m", "fastmoll", "check", str(tmp_path), "--threads", "2"]
    pipe, unbuffered = subprocess.PIPE, {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
        env=unbuffered,
        # Shells start background jobs with the interrupt ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert "empty file" in process.stdout.readline()  # the workers are at work
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith("interrupted\n") and "Traceback" not in err
    assert "files in" not in out  # no summary of what was not seen
