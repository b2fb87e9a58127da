"""Decoding: the files people really have, and the evaluation crop against torchvision."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import v2

import fastmoll
from fastmoll import BadImageError, ImageNetLoader

SIZE = 32


def photo(height: int = SIZE, width: int = SIZE) -> Image.Image:
    """A smooth colour picture, different in each corner."""
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    waves = [np.sin(5 * x + 2 * y), np.cos(3 * y - x), np.sin(4 * x * y + 1)]
    return Image.fromarray((127 + 120 * np.stack(waves, -1)).astype(np.uint8))


def encode(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def pixels(folder: Path, **options: object) -> NDArray[np.float32]:
    """What the loader makes of the only image of a tree, as grey levels, unresized."""
    with ImageNetLoader(
        folder, "val", 1, SIZE, device="cpu", resize=0, mean=(0, 0, 0), std=(1 / 255,) * 3, num_threads=1, **options
    ) as loader:
        images, _ = next(iter(loader))
    return np.asarray(images[0].permute(1, 2, 0))


def one(tmp_path: Path, data: bytes, name: str = "x.JPEG") -> Path:
    (tmp_path / "data" / "class").mkdir(parents=True)
    (tmp_path / "data" / "class" / name).write_bytes(data)
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("make", "name", "tolerance"),
    [
        (lambda: encode(photo(), "JPEG", quality=95), "x.jpg", 1),
        (lambda: encode(photo(), "JPEG", progressive=True), "progressive.jpg", 1),
        (lambda: encode(photo().convert("L"), "JPEG"), "grey.jpg", 1),
        # The two CMYK to RGB conversions differ by rounding.
        (lambda: encode(photo().convert("CMYK"), "JPEG", quality=95), "cmyk.jpg", 2),
        (lambda: encode(photo(), "PNG"), "a_png_named.JPEG", 0),
        (lambda: encode(photo().quantize(64), "PNG"), "palette.png", 0),
        (lambda: encode(photo().convert("RGBA"), "PNG"), "alpha.png", 0),
        (lambda: encode(photo().convert("L"), "PNG"), "grey.png", 0),
        (lambda: encode(photo(), "TIFF"), "x.tiff", 0),
        (lambda: encode(photo(), "BMP"), "x.bmp", 0),
        (lambda: encode(photo(), "PPM"), "x.ppm", 0),
        (lambda: encode(photo(), "WEBP", lossless=True), "x.webp", 0),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_format_gives_pillows_rgb(tmp_path: Path, make: Callable[[], bytes], name: str, tolerance: int) -> None:
    data = make()
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), dtype=np.float32)
    assert np.abs(pixels(one(tmp_path, data, name)) - expected).max() <= tolerance + 1e-3


def test_16_bit_png_is_scaled_to_8_bits(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, SIZE * SIZE).astype(np.uint16).reshape(SIZE, SIZE)
    data = encode(Image.fromarray(values), "PNG")
    expected = np.repeat((values / 257)[..., None], 3, axis=2)
    assert np.abs(pixels(one(tmp_path, data, "x.png")) - expected).max() <= 1


def test_damage_in_the_middle_decodes_as_pillow_decodes_it(tmp_path: Path) -> None:
    data = bytearray(encode(photo(), "JPEG", quality=95))
    scan = data.index(b"\xff\xda")
    for offset in range(scan + 60, scan + 90):
        data[offset] = 0x55
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), dtype=np.float32)
    assert np.abs(expected - np.asarray(photo(), dtype=np.float32)).mean() > 3  # it is damaged
    assert np.abs(pixels(one(tmp_path, bytes(data))) - expected).max() <= 1


def test_exif_orientation_is_left_alone_unless_asked_for(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to show
    data = encode(photo(), "JPEG", quality=95, exif=exif)
    folder = one(tmp_path, data)
    stored = np.asarray(Image.open(io.BytesIO(data)), dtype=np.float32)
    assert np.abs(pixels(folder) - stored).max() <= 1
    assert np.abs(pixels(folder, adjust_orientation=True) - np.rot90(stored, -1)).max() <= 1


BAD: dict[str, Callable[[bytes], bytes | None]] = {
    "truncated": lambda data: data[: len(data) // 2],
    "header cut short": lambda data: data[:10],
    "html": lambda _: b"<!DOCTYPE html><html><body>404</body></html>",
    "random bytes": lambda _: np.random.default_rng(0).bytes(3000),
    "gif": lambda _: encode(photo(), "GIF"),
    "empty": lambda _: b"",
    "missing": lambda _: None,
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_bad_file_is_named_with_its_reason(make_tree: Callable[..., Path], kind: str, split: str) -> None:
    tree = make_tree(24)
    victim = tree / "class1" / "0013.jpg"
    loader = ImageNetLoader(tree, split, 4, SIZE, device="cpu", num_threads=1)
    data = BAD[kind](victim.read_bytes())
    if data is None:
        victim.unlink()
    else:
        victim.write_bytes(data)
    batches = 0
    with pytest.raises(BadImageError) as caught:
        for _ in loader:
            batches += 1
    assert [path for path, _ in caught.value.files] == [str(victim)]
    assert str(victim) in str(caught.value) and f"batch {batches} of epoch 0" in str(caught.value)
    assert caught.value.files[0][1]  # a reason in words


@pytest.mark.parametrize("kind", BAD)
def test_another_image_of_the_class_takes_the_place_of_a_bad_one_and_all_else_stays(
    make_tree: Callable[..., Path], kind: str
) -> None:
    def loader(tree: Path) -> ImageNetLoader:
        return ImageNetLoader(
            tree, "train", 4, SIZE, device="cpu", num_threads=1, return_index=True, on_error="substitute"
        )

    whole, tree = make_tree(24, name="whole"), make_tree(24)
    with loader(whole) as undamaged:
        expected = [batch for _ in range(2) for batch in undamaged]
    bad = [tree / "class1" / name for name in ("0013.jpg", "0016.jpg")]  # neighbours: the next but one takes the place
    victims = [12, 13]
    damaged = loader(tree)
    assert [damaged._folder.path(i) for i in victims] == [*map(str, bad)]
    for path in bad:
        data = BAD[kind](path.read_bytes())
        path.unlink()
        if data is not None:
            path.write_bytes(data)
    with pytest.warns(fastmoll.BadImageWarning) as warned, damaged:
        batches = [batch for _ in range(2) for batch in damaged]
    said = sorted(str(warning.message) for warning in warned)
    assert [text.partition(":")[0] for text in said] == [*map(str, bad)]
    assert all(text.endswith("class1/0019.jpg takes its place") for text in said)
    for (images, labels, index), (old_images, old_labels, old_index) in zip(batches, expected, strict=True):
        good = torch.tensor([i not in victims for i in old_index.tolist()])
        assert torch.equal(images[good], old_images[good]) and torch.equal(labels, old_labels)
        assert torch.equal(index, old_index)
        assert not any(torch.equal(a, b) for a, b in zip(images[~good], old_images[~good], strict=True))


def test_what_has_no_other_in_its_class_and_what_is_evaluated_is_not_replaced(make_tree: Callable[..., Path]) -> None:
    tree = make_tree(8, classes=8)
    (tree / "class3" / "0003.jpg").write_text("<html>")
    options: dict[str, Any] = {"size": SIZE, "device": "cpu", "num_threads": 1, "on_error": "substitute"}
    with pytest.raises(BadImageError, match=r"class3/0003\.jpg: HTML page"):
        list(ImageNetLoader(tree, "train", 4, **options))
    with pytest.raises(ValueError, match=r"on_error must be 'raise' in validation, .*got 'substitute'"):
        ImageNetLoader(tree, "val", 4, **options)


def test_a_bad_file_in_a_later_epoch_is_named(make_tree: Callable[..., Path]) -> None:
    tree = make_tree(24)
    victim = tree / "class2" / "0014.jpg"
    loader = ImageNetLoader(tree, "train", 4, SIZE, device="cpu", num_threads=1)
    for _ in loader:
        pass
    victim.write_text("<html>")
    with pytest.raises(BadImageError, match=r"class2/0014\.jpg"):
        for _ in range(2):  # what was prepared ahead of the damage is still good
            for _ in loader:
                pass


@pytest.mark.parametrize("size", [224, 64])
def test_evaluation_crop_matches_torchvision(tmp_path: Path, size: int) -> None:
    skimage = pytest.importorskip("skimage.data")
    photos = [skimage.astronaut(), skimage.chelsea(), skimage.coffee(), skimage.rocket()]
    folder = tmp_path / "data" / "class"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for i in range(24):
        source = photos[i % len(photos)]
        height, width = (int(rng.integers(size // 2, min(n, 3 * size) + 1)) for n in source.shape[:2])
        Image.fromarray(source[:height, :width]).save(folder / f"{i:02}.jpg", quality=92)
    resize = round(size * 256 / 224)
    reference = v2.Compose([v2.Resize(resize, antialias=True), v2.CenterCrop(size)])
    with ImageNetLoader(tmp_path / "data", "val", 8, size, device="cpu", mean=(0, 0, 0), std=(1 / 255,) * 3) as loader:
        ours = torch.cat([images for images, _ in loader]).permute(0, 2, 3, 1)
    for image, path in zip(ours, sorted(folder.iterdir()), strict=True):
        expected = torch.from_numpy(np.array(reference(Image.open(path).convert("RGB")))).float()
        assert (image - expected).abs().mean() < 0.5, path.name  # grey levels; DALI's own crop: up to 23


def test_random_resized_crops_have_torchvisions_statistics(tmp_path: Path) -> None:
    # A ramp from left to right: the mean of a crop tells its centre, the range its width.
    ramp = np.tile(np.linspace(0, 255, 256)[None, :, None], (256, 1, 3)).astype(np.uint8)
    folder = tmp_path / "data" / "class"
    folder.mkdir(parents=True)
    for i in range(400):
        Image.fromarray(ramp).save(folder / f"{i:03}.bmp")
    with ImageNetLoader(tmp_path / "data", "train", 100, 8, device="cpu", mean=(0, 0, 0), std=(1 / 255,) * 3) as loader:
        ours = torch.cat([images for images, _ in loader])[:, 0, 4]
    torch.manual_seed(0)
    crop = v2.Compose([v2.RandomResizedCrop(8, antialias=True), v2.RandomHorizontalFlip()])
    image = torch.from_numpy(ramp).permute(2, 0, 1).float()
    theirs = torch.stack([crop(image)[0, 4] for _ in range(400)])
    for name, measure in {
        "centre": lambda rows: rows.mean(1) / 255,
        "width": lambda rows: (rows[:, -1] - rows[:, 0]).abs() / 255,
        "flipped": lambda rows: (rows[:, -1] < rows[:, 0]).float(),
    }.items():
        left, right = measure(ours), measure(theirs)
        error = (left.var() / 400 + right.var() / 400).sqrt()
        assert abs(left.mean() - right.mean()) < 4 * error, name
        assert 0.8 < left.std() / right.std() < 1.25, name
