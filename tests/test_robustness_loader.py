"""`CorruptedLoader`: official and generated cells, whatever batches and ranks; `open_clean`: what the data may be."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fastmoll import BadImageError, ImageNetLoader, SmallImageLoader
from fastmoll.corruptions import corrupt
from fastmoll.kernels.corruption_constants import CORRUPTIONS
from fastmoll.pipelines import MEAN, STD
from fastmoll.pipelines.corrupted import open_corrupted
from fastmoll.pipelines.small import SmallData, read_small, standardisation
from fastmoll.robustness.loader import CorruptedLoader, cell_digests
from fastmoll.robustness.stored_images import is_unsplit, open_clean
from fastmoll.robustness.writer import write_corrupted

Make = Callable[..., Path]

HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
needs_dali = pytest.mark.skipif(importlib.util.find_spec("nvidia") is None, reason="DALI is not installed")


def small(count: int = 11, size: int = 32) -> SmallData:
    images = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), np.uint8)
    return SmallData(images, np.arange(count, dtype=np.int64) % 3, ["cat", "dog", "owl"])


def whole(loader: CorruptedLoader) -> tuple[Tensor, Tensor, Tensor]:
    images, labels, index = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels), torch.cat(index)


def over_ranks(make: Callable[[int, int], CorruptedLoader], ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    parts = [whole(loader) for loader in (make(rank, ranks) for rank in range(ranks)) if len(loader)]
    images, labels, index = (torch.cat(part) for part in zip(*parts, strict=True))
    return images, labels, index


def standardised(pixels: Tensor) -> Tensor:
    """With `HALF`."""
    return pixels / 127.5 - 1


# ------------------------------------------------------------------ generated cells


@pytest.mark.parametrize("name", ["gaussian_noise", "contrast"])
def test_a_generated_cell_is_the_corrupted_and_standardised_split(name: str) -> None:
    data = small()
    loader = CorruptedLoader.generated(data, name, 4, batch_size=4, device="cpu", seed=3, **HALF)
    assert (loader.num_samples, len(loader), loader.size, loader.classes) == (11, 3, 32, data.classes)
    images, labels, index = whole(loader)
    pixels = torch.from_numpy(data.images).permute(0, 3, 1, 2)
    wanted = corrupt(pixels, name, 4, seed=3)
    assert (wanted != pixels).float().mean() > 0.5
    torch.testing.assert_close(images, standardised(wanted), atol=1e-6, rtol=0)
    assert labels.tolist() == data.labels.tolist() and index.tolist() == list(range(11))
    assert (images.dtype, labels.dtype, index.dtype) == (torch.float32, torch.int64, torch.int64)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert len(list(loader)) == 3  # and once more


@pytest.mark.parametrize("ranks", [1, 2, 3, 13])
@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_ranks_and_batches_change_nothing(ranks: int, batch_size: int) -> None:
    data = small()
    one = whole(CorruptedLoader.generated(data, "gaussian_noise", 1, device="cpu", **HALF))

    def make(rank: int, world_size: int) -> CorruptedLoader:
        where = {"rank": rank, "world_size": world_size, "batch_size": batch_size}
        return CorruptedLoader.generated(data, "gaussian_noise", 1, device="cpu", **where, **HALF)

    for ours, wanted in zip(over_ranks(make, ranks), one, strict=True):
        assert torch.equal(ours, wanted)
    assert sum(len(make(rank, ranks)) for rank in range(ranks)) >= 11 / batch_size


def test_seed_corruption_and_severity_change_what_is_drawn() -> None:
    def pixels(name: str, severity: int, seed: int) -> Tensor:
        return whole(CorruptedLoader.generated(small(), name, severity, device="cpu", seed=seed, **HALF))[0]

    first = pixels("gaussian_noise", 1, 0)
    assert torch.equal(first, pixels("gaussian_noise", 1, 0))
    assert not torch.equal(first, pixels("gaussian_noise", 1, 1))
    # The same draws would only be scaled.
    clean = standardised(torch.from_numpy(small().images).permute(0, 3, 1, 2))
    both = torch.stack([(pixels("gaussian_noise", s, 0) - clean).flatten() for s in (1, 2)])
    assert abs(torch.corrcoef(both)[0, 1]) < 0.1


def test_the_clean_cell_of_small_images_is_the_small_loaders() -> None:
    data = small()
    clean = whole(CorruptedLoader.generated(data, batch_size=4, device="cpu", **HALF))
    loader = SmallImageLoader(data, "val", 4, device="cpu", return_index=True, **HALF)
    for ours, theirs in zip(clean, zip(*loader, strict=True), strict=True):
        assert torch.equal(ours, torch.cat(theirs))


def test_images_come_in_half_precision_on_request() -> None:
    loader = CorruptedLoader.generated(small(), "contrast", 1, device="cpu", dtype=torch.bfloat16, **HALF)
    assert next(iter(loader))[0].dtype == torch.bfloat16


@needs_dali
def test_the_clean_cell_of_photographs_is_the_imagenet_loaders(make_tree: Make) -> None:
    tree = make_tree(14)
    clean = whole(CorruptedLoader.generated(tree, size=24, batch_size=4, device="cpu"))
    with ImageNetLoader(tree, "val", 4, size=24, device="cpu", fused=True, return_index=True) as loader:
        for ours, theirs in zip(clean, zip(*loader, strict=True), strict=True):
            assert torch.equal(ours, torch.cat(theirs))


@needs_dali
@pytest.mark.parametrize("ranks", [1, 3])
def test_photographs_are_cropped_before_they_are_corrupted(make_tree: Make, ranks: int) -> None:
    tree = make_tree(14)
    source = open_clean(tree, size=32)
    pixels = torch.cat([x for x, _ in source.batches(np.arange(14), 5, torch.device("cpu"), 1)])
    assert pixels.dtype == torch.uint8 and pixels.shape == (14, 32, 32, 3)
    wanted = corrupt(pixels.permute(0, 3, 1, 2), "gaussian_noise", 5)

    def make(rank: int, world_size: int) -> CorruptedLoader:
        where = {"rank": rank, "world_size": world_size, "batch_size": 3, "device": "cpu", "num_threads": 1}
        return CorruptedLoader.generated(source, "gaussian_noise", 5, **where, **HALF)

    images, labels, index = over_ranks(make, ranks)
    torch.testing.assert_close(images, standardised(wanted), atol=1e-6, rtol=0)
    assert labels.tolist() == [0] * 5 + [1] * 5 + [2] * 4 and index.tolist() == list(range(14))


@needs_dali
def test_any_samples_can_be_read_in_any_order(make_tree: Make) -> None:
    source = open_clean(make_tree(9), size=16)
    chosen, device = np.array([7, 2, 3, 0]), torch.device("cpu")
    every = torch.cat([x for x, _ in source.batches(np.arange(9), 9, device, 1)])
    some = list(source.batches(chosen, 3, device, 1))
    assert torch.equal(torch.cat([x for x, _ in some]), every[chosen])
    assert torch.cat([index for _, index in some]).tolist() == chosen.tolist()
    assert list(source.batches(chosen[:0], 3, device, 1)) == []


# ------------------------------------------------------------------ official cells


def write_arrays(root: Path) -> np.ndarray:
    images = np.random.default_rng(1).integers(0, 256, (35, 32, 32, 3), np.uint8)
    root.mkdir()
    for number, name in enumerate(CORRUPTIONS):
        np.save(root / f"{name}.npy", images + np.uint8(number))
    np.save(root / "labels.npy", np.tile(np.arange(7) % 3, 5))
    return images


@pytest.mark.parametrize("ranks", [1, 2, 9])
def test_official_arrays_come_as_they_are(tmp_path: Path, ranks: int) -> None:
    images = write_arrays(tmp_path / "CIFAR-10-C")
    dataset = open_corrupted(tmp_path / "CIFAR-10-C")

    def make(rank: int, world_size: int) -> CorruptedLoader:
        where = {"rank": rank, "world_size": world_size, "batch_size": 2, "device": "cpu"}
        return CorruptedLoader.official(dataset, "fog", 2, **where, **HALF)

    got, labels, index = over_ranks(make, ranks)
    wanted = torch.from_numpy(images[7:14] + np.uint8(CORRUPTIONS.index("fog"))).permute(0, 3, 1, 2)
    torch.testing.assert_close(got, standardised(wanted), atol=1e-6, rtol=0)
    assert labels.tolist() == [0, 1, 2, 0, 1, 2, 0] and index.tolist() == list(range(7))
    with pytest.raises(ValueError, match=r"mean and std must be given for .*fog\.npy"):
        CorruptedLoader.official(dataset, "fog", 2, device="cpu")
    with pytest.raises(ValueError, match="severity must be one of 1, 2, 3, 4, 5, got 6"):
        CorruptedLoader.official(dataset, "fog", 6, device="cpu", **HALF)


def write_cell(folder: Path, size: int, count: int) -> None:
    for i in range(count):
        place = folder / f"class{i % 3}" / f"{i:03}.png"  # without loss
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((size, size, 3), 10 * i, np.uint8)).save(place)


@needs_dali
@pytest.mark.parametrize("size", [64, 224])
@pytest.mark.parametrize("ranks", [1, 3])
def test_official_files_are_neither_resized_nor_cropped(tmp_path: Path, size: int, ranks: int) -> None:
    write_cell(tmp_path / "weather" / "fog" / "4", size, 8)
    rim = np.zeros((size, size, 3), np.uint8)
    rim[0], rim[:, -1] = 255, 255
    Image.fromarray(rim).save(tmp_path / "weather" / "fog" / "4" / "class0" / "000.png")
    dataset = open_corrupted(tmp_path, corruptions=["fog"], severities=[4])

    def make(rank: int, world_size: int) -> CorruptedLoader:
        where = {"rank": rank, "world_size": world_size, "batch_size": 2, "device": "cpu", "num_threads": 1}
        return CorruptedLoader.official(dataset, "fog", 4, **where)

    images, labels, index = over_ranks(make, ranks)
    numbers = [0, 3, 6, 1, 4, 7, 2, 5]  # in the order of ids
    pixels = np.stack([np.full((size, size, 3), 10 * number, np.uint8) for number in numbers])
    pixels[0] = rim
    wanted = (torch.from_numpy(pixels) / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    torch.testing.assert_close(images, wanted.permute(0, 3, 1, 2), atol=1e-5, rtol=0)
    assert labels.tolist() == [number % 3 for number in numbers] and index.tolist() == list(range(8))


@needs_dali
@pytest.mark.parametrize("wrong", [[5], [4, 5], [2, 3, 4, 5]])
def test_official_files_of_another_size_are_named(tmp_path: Path, wrong: list[int]) -> None:
    write_cell(tmp_path / "fog" / "1", 64, 6)
    files = sorted((tmp_path / "fog" / "1").glob("*/*"))
    for i in wrong:
        Image.new("RGB", (32, 48)).save(files[i])
    dataset = open_corrupted(tmp_path, corruptions=["fog"], severities=[1])
    loader = CorruptedLoader.official(dataset, "fog", 1, batch_size=2, device="cpu", num_threads=1)
    with pytest.raises(BadImageError, match="48 x 32 pixels instead of 64 x 64") as error:
        list(loader)
    assert {path for path, _ in error.value.files} <= {str(files[i]) for i in wrong}


@needs_dali
def test_files_that_cannot_be_decoded_are_named(tmp_path: Path) -> None:
    write_cell(tmp_path / "fog" / "1", 64, 6)
    bad = tmp_path / "fog" / "1" / "class2" / "002.png"
    bad.write_bytes(bad.read_bytes()[:20])
    dataset = open_corrupted(tmp_path, corruptions=["fog"], severities=[1])
    with pytest.raises(BadImageError, match=r"class2/002\.png"):
        list(CorruptedLoader.official(dataset, "fog", 1, batch_size=2, device="cpu", num_threads=1))


# ------------------------------------------------------------------ clean data


def test_data_may_be_a_name_arrays_or_a_folder(tmp_path: Path) -> None:
    digits = open_clean("digits")
    assert (digits.name, digits.size, len(digits), len(digits.classes)) == ("digits", 32, 355, 10)
    assert digits.standardisation == standardisation(read_small("digits", "train"))  # as in training
    data = small(6)
    for stem in ("train", "val"):
        np.save(tmp_path / f"{stem}.npy", data.images)
        np.save(tmp_path / f"{stem}_labels.npy", data.labels)
    found = open_clean(tmp_path)
    assert (found.name, found.size, found.standardisation) == (tmp_path.name, 32, None)
    assert np.array_equal(found.pixels, data.images) and found.classes == ["0", "1", "2"]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mean and std must be given"):
        CorruptedLoader.generated(found, "fog", 1, device="cpu")


@pytest.mark.parametrize("stem", ["val", "test"])
def test_a_folder_of_small_images_is_read_as_it_is(tmp_path: Path, stem: str) -> None:
    root = tmp_path / "little"
    write_cell(root / stem, 32, 6)
    for size in (None, 32):
        found = open_clean(root, size=size)
        assert isinstance(found.pixels, np.ndarray) and found.pixels.shape == (6, 32, 32, 3)
        assert found.name == "little" and found.classes == ["class0", "class1", "class2"]
    # Asked for in another size they are photographs like others.
    larger = open_clean(root, size=48)
    assert (larger.size, larger.resize, len(larger)) == (48, 55, 6)
    assert larger.standardisation == (MEAN, STD)
    before = larger.fingerprint
    assert len({before, open_clean(root, size=40).fingerprint, found.fingerprint}) == 3
    picture = next((root / stem).rglob("*.*"))
    picture.write_bytes(picture.read_bytes() + b"\0")
    assert open_clean(root, size=48).fingerprint != before


def test_photographs_are_cropped_to_224_pixels_unless_told_otherwise(make_tree: Make) -> None:
    tree = make_tree(6)
    found = open_clean(tree)
    assert (found.size, found.resize, found.name, len(found)) == (224, 256, "tree", 6)


def test_bad_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"arrays has images of 32 x 32 pixels, not 64 x 64"):
        open_clean(small(), size=64)
    oblong = SmallData(np.zeros((3, 32, 16, 3), np.uint8), np.arange(3), ["a", "b", "c"])
    with pytest.raises(ValueError, match="arrays has images of 32 x 16 pixels, not squares"):
        open_clean(oblong)
    with pytest.raises(ValueError, match="did you mean cifar10"):
        open_clean("cifar-10")
    with pytest.raises(ValueError, match="path goes with one of the names"):
        write_cell(tmp_path / "val", 32, 3)
        open_clean(tmp_path, path=tmp_path)
    with pytest.raises(ValueError, match="has no class folders"):
        (tmp_path / "empty").mkdir()
        open_clean(tmp_path / "empty")


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"corruption": "fogg", "severity": 1}, "there is no 'fogg'; did you mean fog"),
        ({"corruption": "fog", "severity": 0}, "severities must be 1 to 5, got 0"),
        ({"corruption": "fog"}, "corruption and severity belong together, got corruption='fog' and severity=None"),
        ({"severity": 1}, "belong together"),
        ({"corruption": "fog", "severity": 1, "seed": -1}, "seed must be an integer in"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"num_threads": 0}, "num_threads must be"),
        ({"dtype": torch.float64}, "dtype must be one of"),
        ({"device": "tpu"}, "device must be"),
        ({"rank": 2, "world_size": 2}, "rank must be"),
        ({"std": None}, "mean and std belong together"),
        ({"mean": (0.5, 0.5)}, "mean must be three numbers"),
    ],
)
def test_bad_arguments_are_named_before_any_work(options: dict[str, object], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        CorruptedLoader.generated(small(), **{"device": "cpu", **HALF, **options})  # type: ignore[arg-type]


@pytest.mark.gpu
@needs_dali
def test_a_gpu_gives_the_same_cells_to_a_grey_level(make_tree: Make) -> None:
    for data, size in ((small(), None), (make_tree(9), 64)):
        source = open_clean(data, size=size)
        chosen = {"batch_size": 4, **HALF}
        # DALI decodes and resizes a little differently on a GPU: corrupt the same pixels.
        pixels = torch.cat([x.cpu() for x, _ in source.batches(np.arange(len(source)), 4, torch.device("cuda", 0), 1)])
        wanted = standardised(corrupt(pixels.permute(0, 3, 1, 2), "gaussian_noise", 3))
        images, labels, _ = whole(CorruptedLoader.generated(source, "gaussian_noise", 3, device="cuda", **chosen))
        assert images.is_cuda and labels.is_cuda
        torch.testing.assert_close(images.cpu(), wanted, atol=1.01 / 127.5, rtol=0)


# ------------------------------------------------------------------ digests


@pytest.mark.parametrize("size", [32, 64])
def test_the_digest_of_a_cell_follows_its_images_and_not_its_place(tmp_path: Path, size: int) -> None:
    write_corrupted(small(size=size), tmp_path / "a", corruptions=["contrast", "brightness"])
    before = cell_digests(open_corrupted(tmp_path / "a", corruptions=["contrast", "brightness"]))
    assert len({*before.values()}) == 10  # each cell its own
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert cell_digests(open_corrupted(tmp_path / "b", corruptions=["contrast"], severities=[3])) == {
        ("contrast", 3): before["contrast", 3]
    }
    # Other images under the same names.
    ending = ".npy" if size == 32 else ""
    (tmp_path / "b" / f"contrast{ending}").rename(tmp_path / "other")
    (tmp_path / "b" / f"brightness{ending}").rename(tmp_path / "b" / f"contrast{ending}")
    after = cell_digests(open_corrupted(tmp_path / "b", corruptions=["contrast"]))
    assert all(after["contrast", level] == before["brightness", level] for level in range(1, 6))


def test_one_pixel_of_one_image_is_seen_in_the_digest_of_its_cell_alone(tmp_path: Path) -> None:
    write_corrupted(small(40), tmp_path, corruptions=["contrast"])

    def digests() -> dict[tuple[str, int], str]:
        return cell_digests(open_corrupted(tmp_path, corruptions=["contrast"]))

    before = digests()
    images = np.load(tmp_path / "contrast.npy", mmap_mode="r+")
    images[40 + 17, 3, 4, 1] ^= 1
    images.flush()
    after = digests()
    assert [level for level in range(1, 6) if before["contrast", level] != after["contrast", level]] == [2]


@pytest.mark.parametrize("linked", [False, True])
def test_every_file_of_another_size_or_time_is_seen_in_the_digest_of_its_cell_alone(
    tmp_path: Path, linked: bool
) -> None:
    root = tmp_path / "set"
    write_corrupted(small(40, 64), root, corruptions=["contrast"], severities=[1, 2])
    if linked:
        root = root.rename(tmp_path / "files")
        for path in [path for path in root.rglob("*") if path.suffix == ".JPEG"]:
            link = tmp_path / "set" / path.relative_to(root)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)

    def digests() -> dict[tuple[str, int], str]:
        dataset = open_corrupted(tmp_path / "set", corruptions=["contrast"], severities=[1, 2])
        return cell_digests(dataset)

    before = digests()
    for path in sorted((root / "contrast" / "2").rglob("*.JPEG")):
        content, status = path.read_bytes(), path.stat()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # of the same size
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 5_000_000_000))
        after = digests()
        assert after["contrast", 1] == before["contrast", 1] and after["contrast", 2] != before["contrast", 2]
        path.write_bytes(content + b"1")  # of the same time
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert digests()["contrast", 2] != before["contrast", 2]
        path.write_bytes(content)
        # Archives keep whole seconds.
        os.utime(path, (int(status.st_atime), int(status.st_mtime)))
        assert digests() == before


def test_class_folders_alone_are_those_of_the_training_too(tmp_path: Path) -> None:
    for place in ("alone/a", "split/train/a", "split/val/a"):
        (tmp_path / place).mkdir(parents=True)
    np.save(tmp_path / "val.npy", np.zeros(1))
    assert is_unsplit(tmp_path / "alone")
    assert not any(is_unsplit(place) for place in (tmp_path / "split", tmp_path, Path("digits")))
