"""`open_corrupted`: whole sets in both published layouts, and sets that are not whole, by name."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastmoll.kernels.corruption_constants import CORRUPTIONS, GROUPS, SEVERITIES
from fastmoll.pipelines.corrupted import DESCRIPTION, check_cells, open_corrupted

CLASSES = ["n01440764", "n01443537", "n01484850"]
EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")


def jpeg(size: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size), (200, 100, 50)).save(file, "JPEG")
    return file.getvalue()


def fill_cell(folder: Path, size: int = 224, classes: list[str] = CLASSES, count: int = 2) -> None:
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            (folder / name / f"ILSVRC2012_val_{number * count + i:08}.JPEG").write_bytes(jpeg(size))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sets") / "ImageNet-C"
    for name in CORRUPTIONS:
        for level in SEVERITIES:
            fill_cell(root / name / str(level))
    return root


@pytest.fixture
def folders(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "ImageNet-C"))


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """CIFAR-10-C in small: four images a severity, each grey level its own."""
    root = tmp_path / "CIFAR-10-C"
    root.mkdir()
    for number, name in enumerate((*CORRUPTIONS, *EXTRA)):
        levels = (np.arange(20) + 10 * number).astype(np.uint8)
        np.save(root / f"{name}.npy", np.broadcast_to(levels[:, None, None, None], (20, 32, 32, 3)))
    np.save(root / "labels.npy", np.tile(np.array([1, 0, 2, 1], np.uint8), 5))
    return root


# ------------------------------------------------------------------ whole sets


def test_all_cells_of_folders_are_listed_with_their_classes(folders: Path) -> None:
    found = open_corrupted(folders, classes=CLASSES)
    assert (found.kind, found.size, found.count, found.source, found.frost) == ("imagenet-c", 224, 6, "official", None)
    assert found.corruptions == CORRUPTIONS and found.severities == SEVERITIES and found.classes == CLASSES
    for name in CORRUPTIONS:
        for level in SEVERITIES:
            cell = found.folder(name, level)
            assert cell.root == folders / name / str(level)
            assert cell.targets.tolist() == [0, 0, 1, 1, 2, 2]
            assert [Path(cell.path(i)).is_file() for i in range(6)] == [True] * 6
    with pytest.raises(ValueError, match="of the kind imagenet-c, not cifar-c"):
        found.arrays("fog", 1)


def test_archives_folders_and_extra_corruptions_may_be_there(folders: Path) -> None:
    for group, names in GROUPS.items():
        (folders / group).mkdir()
        for name in names:
            (folders / name).rename(folders / group / name)
    fill_cell(folders / "extra" / "spatter" / "1", count=1)
    (folders / "README.txt").write_text("")
    found = open_corrupted(folders)
    assert found.folder("fog", 3).root == folders / "weather" / "fog" / "3"
    (folders / "fog").mkdir()
    with pytest.raises(ValueError, match=r"fog is there twice, in .*ImageNet-C and in .*weather"):
        open_corrupted(folders)


@pytest.mark.parametrize(
    ("size", "classes", "kind"), [(64, 3, "tinyimagenet-c"), (64, 201, "imagenet-c"), (299, 3, "imagenet-c")]
)
def test_the_kind_follows_from_size_and_classes(tmp_path: Path, size: int, classes: int, kind: str) -> None:
    fill_cell(tmp_path / "fog" / "1", size, [f"n{i:03}" for i in range(classes)], 1)
    found = open_corrupted(tmp_path, corruptions=["fog"], severities=[1])
    assert (found.kind, found.size) == (kind, size)


def test_arrays_are_cut_by_severity_and_mapped(arrays: Path) -> None:
    found = open_corrupted(arrays)
    assert (found.kind, found.size, found.count, found.classes) == ("cifar-c", 32, 4, ["0", "1", "2"])
    for number, name in enumerate(CORRUPTIONS):
        for level in SEVERITIES:
            images, labels = found.arrays(name, level)
            assert isinstance(images, np.memmap) and images.shape == (4, 32, 32, 3)
            assert images[:, 5, 7, 1].tolist() == [(10 * number + 4 * (level - 1) + i) % 256 for i in range(4)]
            assert labels.dtype == np.int64 and labels.tolist() == [1, 0, 2, 1]
    assert open_corrupted(arrays, classes=["cat", "dog", "owl"]).classes == ["cat", "dog", "owl"]
    with pytest.raises(ValueError, match="of the kind cifar-c, not imagenet-c"):
        found.folder("fog", 1)


def test_part_of_a_set_can_be_asked_for(folders: Path, arrays: Path) -> None:
    for root in (folders, arrays):
        for name in ("snow", "snow.npy"):
            shutil.rmtree(root / name, ignore_errors=True)
            (root / name).unlink(missing_ok=True)
    shutil.rmtree(folders / "fog" / "5")
    some = open_corrupted(folders, corruptions=["fog", "gaussian_noise"], severities=[4, 2])
    assert some.corruptions == ("gaussian_noise", "fog") and some.severities == (2, 4)
    with pytest.raises(ValueError, match="corruption must be one of gaussian_noise, fog, got 'frost'"):
        some.folder("frost", 2)
    with pytest.raises(ValueError, match="severity must be one of 2, 4, got 1"):
        some.folder("fog", 1)
    assert open_corrupted(arrays, corruptions=["fog"]).corruptions == ("fog",)


def test_a_set_that_fastmoll_wrote_is_not_called_official(arrays: Path) -> None:
    (arrays / DESCRIPTION).write_text(json.dumps({"format": 1, "frost": "made"}))
    assert (open_corrupted(arrays).source, open_corrupted(arrays).frost) == ("generated", "made")
    for damaged in ("{", "[]", '{"frost": 3}', "\udcff"):
        (arrays / DESCRIPTION).write_text(damaged, errors="surrogateescape")
        with pytest.raises(ValueError, match=r"corrupted\.json is damaged"):
            open_corrupted(arrays)


# ------------------------------------------------------------------ bad folders


def refused(root: Path, match: str, **options: object) -> None:
    with pytest.raises(ValueError, match=match):
        open_corrupted(root, **options)  # type: ignore[arg-type]


def test_what_is_no_set_is_said(tmp_path: Path) -> None:
    refused(tmp_path / "none", "there is no folder")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "is not a folder")
    refused(tmp_path, r"has none of gaussian_noise, .*expected .*<corruption>/<severity>/<class>")
    refused(tmp_path, "there is no 'fogg'; did you mean fog", corruptions=["fogg"])
    refused(tmp_path, "severities must be 1 to 5, got 6", severities=[6])
    refused(tmp_path, "corruptions must not be empty", corruptions=[])
    assert check_cells(["fog", "snow", "fog"], [5, 1]) == (("snow", "fog"), (1, 5))


def test_missing_corruptions_and_severities_are_named(folders: Path) -> None:
    (folders / "zoom_blur").rename(folders / "zoomblur")
    shutil.rmtree(folders / "snow")
    shutil.rmtree(folders / "fog" / "3")
    shutil.rmtree(folders / "fog" / "5")
    (folders / "contrast" / "6").mkdir()
    refused(
        folders,
        r"zoom_blur, snow missing \(is zoomblur meant to be that\?\); fog lacks severity 3, 5; "
        "contrast has folders that are no severities: '6'",
    )


def test_a_frost_of_other_images_is_named_wherever_it_stands(folders: Path) -> None:
    shutil.rmtree(folders / "frost")
    for level in SEVERITIES:
        fill_cell(folders / "frost" / str(level), classes=["n01440764", "n01443537", "n99999999", "n99999998"])
    fault = r"4 classes, 1 missing \(n01484850\), 2 extra \(n99999998, n99999999\)"
    refused(folders, f"frost, severity 1, 2, 3, 4, 5: {fault}")
    # Also where it is the first that is looked at.
    shutil.rmtree(folders / "gaussian_noise")
    (folders / "frost").rename(folders / "gaussian_noise")
    for level in SEVERITIES:
        fill_cell(folders / "frost" / str(level))
    refused(folders, f"gaussian_noise, severity 1, 2, 3, 4, 5: {fault}")


def test_other_counts_and_sizes_are_named(folders: Path) -> None:
    (folders / "fog" / "2" / CLASSES[1] / "ILSVRC2012_val_00000002.JPEG").unlink()
    refused(folders, "fog, severity 2: 5 images instead of 6, of n01443537 1 instead of 2")
    shutil.copy(
        folders / "fog" / "1" / CLASSES[0] / "ILSVRC2012_val_00000000.JPEG",
        folders / "fog" / "2" / CLASSES[0] / "a.JPEG",
    )
    refused(folders, f"fog, severity 2: as many images as elsewhere, of {CLASSES[0]} 3 instead of 2")
    shutil.rmtree(folders / "fog" / "2")
    fill_cell(folders / "fog" / "2", size=64)
    refused(folders, "fog, severity 2: images of 64 x 64 pixels instead of 224 x 224 pixels")
    (folders / "fog" / "2" / CLASSES[0] / "ILSVRC2012_val_00000000.JPEG").write_bytes(b"<html>")
    refused(folders, r"ILSVRC2012_val_00000000\.JPEG can't be read as an image")
    shutil.rmtree(folders / "fog" / "2" / CLASSES[2])
    (folders / "fog" / "2" / CLASSES[2]).mkdir()
    refused(folders, r"fog/2 has class folders without an image: 'n01484850'")


def test_images_that_are_no_squares_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "fog" / "1" / "cat"
    place.mkdir(parents=True)
    Image.new("RGB", (32, 24)).save(place / "1.JPEG", "JPEG")
    refused(tmp_path, "has images of 24 x 32 pixels, but networks take squares", corruptions=["fog"], severities=[1])


def test_classes_other_than_the_networks_are_named(folders: Path, arrays: Path) -> None:
    refused(folders, r"3 classes instead of 2: 1 extra \(n01484850\)", classes=CLASSES[:2])
    refused(folders, r"3 classes instead of 4: 1 missing \(zebra\)", classes=[*CLASSES, "zebra"])
    refused(folders, "another order: number 0 is n01440764, not n01484850", classes=CLASSES[::-1])
    refused(arrays, r"labels.npy has labels of 3 classes instead of 100", classes=[str(i) for i in range(100)])
    refused(arrays, r"labels.npy: labels must be in 0..1, got 2 at position 2", classes=["cat", "dog"])


# ------------------------------------------------------------------ bad arrays


def test_missing_arrays_are_named(arrays: Path) -> None:
    (arrays / "labels.npy").unlink()
    (arrays / "jpeg_compression.npy").rename(arrays / "jpeg.npy")
    refused(arrays, r"labels.npy, jpeg_compression.npy missing")
    (arrays / "fog.npy").rename(arrays / "fogs.npy")
    refused(arrays, r"fog.npy, jpeg_compression.npy missing \(is fogs.npy meant to be that\?\)")


@pytest.mark.parametrize(
    ("array", "fault"),
    [
        (np.zeros((20, 3, 32, 32), np.uint8), r"frost.npy must be uint8 of shape \(N, S, S, 3\), got uint8 \(20, 3"),
        (np.zeros((20, 32, 32, 3), np.float32), r"frost.npy must be uint8 of shape \(N, S, S, 3\), got float32"),
        (np.zeros((4, 32, 32, 3), np.uint8), "frost.npy has 4 images, but labels.npy has 20 labels"),
        (np.zeros((20, 64, 64, 3), np.uint8), "frost.npy has images of 64 x 64 pixels instead of 32 x 32 pixels"),
    ],
)
def test_arrays_of_another_shape_are_named(arrays: Path, array: np.ndarray, fault: str) -> None:
    np.save(arrays / "frost.npy", array)
    refused(arrays, fault)


def test_truncated_arrays_are_named(arrays: Path) -> None:
    whole = (arrays / "snow.npy").read_bytes()
    (arrays / "snow.npy").write_bytes(whole[:-1])
    refused(arrays, r"snow\.npy is truncated")
    (arrays / "snow.npy").write_bytes(b"")
    refused(arrays, r"snow\.npy is truncated")


@pytest.mark.parametrize(
    ("labels", "fault"),
    [
        (np.zeros((20, 1), np.uint8), r"labels.npy must hold integers of shape \(N,\), got uint8 \(20, 1\)"),
        (np.zeros(20, np.float64), r"labels.npy must hold integers of shape \(N,\), got float64 \(20,\)"),
        (np.zeros(0, np.uint8), r"got uint8 \(0,\)"),
        (np.array([0, 1, 2, 1, 0] * 2, np.uint8), "has 20 images, but labels.npy has 10 labels"),
        (np.zeros(19, np.uint8), "labels.npy has 19 labels, which is no multiple of the 5 severities"),
        (np.tile([0, 1, -1, 1], 5), r"labels.npy: labels must be in 0\.\.2, got -1 at position 2"),
        (np.tile(np.array([0, 1, 255, 1], np.uint8), 5), r"labels must be in 0\.\.2, got 255 at position 2"),
        (
            np.r_[[0, 1, 2, 1] * 4, 0, 2, 2, 1],
            "labels must be the same at each severity, got 2 for image 1 at severity 5, 1 at severity 1",
        ),
    ],
)
def test_labels_that_are_none_are_named(arrays: Path, labels: np.ndarray, fault: str) -> None:
    np.save(arrays / "labels.npy", labels)
    refused(arrays, fault)


def test_opening_a_set_loads_no_dali(arrays: Path) -> None:
    code = (
        "import sys; from fastmoll.pipelines.corrupted import open_corrupted; "
        f"open_corrupted({str(arrays)!r}); "
        "sys.exit(any(name.startswith('nvidia.dali') or name in ('triton', 'numba') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
