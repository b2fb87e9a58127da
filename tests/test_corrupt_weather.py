"""Weathers against slow float64 versions of their definitions, with the same draws, and a published generator."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from photographs import means
from PIL import Image
from scipy import ndimage, stats
from torch import Tensor

from fastmoll.corruptions import corrupt
from fastmoll.kernels import corrupt_weather, corruption_job, frost_textures, philox
from fastmoll.kernels.corruption_constants import cell, constants

Picture = np.ndarray[Any, np.dtype[np.float64]]

# As in test_corrupt_blur.py; over 40 draws for snow, 250 for fog.
PUBLISHED = {
    "snow": ((140.29, 44.59), (166.16, 72.47), (165.75, 73.18), (180.59, 89.85), (195.73, 103.05)),
    "fog": ((114.53, 49.30), (115.66, 54.84), (117.40, 59.86), (116.29, 59.82), (117.01, 62.85)),
    "brightness": ((116.57, 18.36), (131.71, 35.37), (144.66, 50.40), (155.76, 63.93), (164.53, 75.03)),
}
DRAWS = {"snow": 40, "fog": 250}
# The mean of a fog differs by 15 levels from one draw to the next.
TOLERANCE = {"snow": 0.6, "fog": 2.5, "brightness": 0.05}

CASES = [(32, 32, 32), (64, 64, 64), (224, 224, 224), (40, 35, 32), (130, 121, 224)]


@pytest.fixture
def textures() -> Iterator[None]:
    """Textures looked for anew, in this test and after it."""
    caches = [frost_textures._folder, frost_textures._read, corrupt_weather._textures, corrupt_weather._library]
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def picture(height: int, width: int) -> Tensor:
    rng = np.random.default_rng(height)
    waves = ndimage.gaussian_filter(rng.normal(size=(3, height, width)), (0, 3, 3), mode="wrap")
    grey = np.clip(110 + 60 * waves / waves.std() + rng.normal(size=waves.shape, scale=4), 0, 251)
    return torch.from_numpy(grey.astype(np.uint8)).unsqueeze(0)


def words(name: str, severity: int, index: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The words of a sample with seed 9."""
    ids, blocks = torch.tensor([index]), -(-count // 4)
    drawn = philox.sample_words(ids, cell(name, severity), seed=9, purpose=philox.CORRUPT, blocks=blocks)
    return torch.stack(drawn, 2).flatten()[:count].numpy()


def motion(layer: Picture, radius: float, sigma: float, angle: float) -> Picture:
    taps = np.arange(2 * math.ceil(radius) + 1)
    weights = np.exp(-(taps**2) / (2 * sigma**2))
    total = np.zeros_like(layer)
    for tap, weight in zip(taps, weights / weights.sum(), strict=True):
        row = np.clip(np.arange(len(layer)) + math.ceil(tap * math.sin(angle) - 0.5), 0, len(layer) - 1)
        column = np.arange(layer.shape[1]) + math.ceil(tap * math.cos(angle) - 0.5)
        total += weight * layer[row][:, np.clip(column, 0, layer.shape[1] - 1)]
    return np.floor(total + 0.5)


def snow(x: Picture, severity: int, side: int, index: int) -> Picture:
    mean, deviation, factor, threshold, radius, sigma, keep = constants("snow", severity, side)
    height, width = x.shape[:2]
    part = [math.ceil(size / factor) for size in (height, width)]
    drawn = words("snow", severity, index, 4 + part[0] * part[1])
    field = stats.norm.ppf(((drawn[4:] >> 16) + 0.5) / 2**16, mean, deviation).reshape(part)
    large = ndimage.zoom(np.rint(field * 4096) / 4096, factor, order=1)
    top, left = ((full - size) // 2 for full, size in zip(large.shape, (height, width), strict=True))
    layer = large[top : top + height, left : left + width]
    layer = np.floor(np.clip(np.where(layer < threshold, 0.0, layer), 0.0, 1.0) * 255.0)
    layer = motion(layer, radius, sigma, math.radians(-135 + 90 * (int(drawn[0]) + 0.5) / 2**32))
    grey = x @ [0.299, 0.587, 0.114]
    x = keep * x + (1 - keep) * np.maximum(x, grey[..., None] * 1.5 + 127.5)
    return x + layer[..., None] + np.rot90(layer, 2)[..., None]


def frost(x: Picture, severity: int, side: int, index: int) -> Picture:
    ours, theirs = constants("frost", severity, side)
    height, width = x.shape[:2]
    drawn = [int(word) for word in words("frost", severity, index, 3)]
    whole = frost_textures.frost_textures()[drawn[0] * 5 >> 32].permute(1, 2, 0).double().numpy()
    if side == 32:  # a fifth of the size: the middle one of five pixels
        whole = whole[2::5, 2::5][: round(whole.shape[0] / 5), : round(whole.shape[1] / 5)]
    elif side == 64:
        places = [(np.arange(round(size * 0.3)) + 0.5) / 0.3 - 0.5 for size in whole.shape[:2]]
        grid = np.meshgrid(*places, indexing="ij")
        channels = [ndimage.map_coordinates(whole[..., c], grid, order=1, mode="nearest") for c in range(3)]
        whole = np.rint(np.stack(channels, 2))
    top, left = (
        word * (full - size) >> 32 for word, full, size in zip(drawn[1:], whole.shape, (height, width), strict=False)
    )
    return ours * x + theirs * whole[top : top + height, left : left + width]


def fog(x: Picture, severity: int, side: int, index: int) -> Picture:
    thickness, decay = constants("fog", severity, side)
    size = 2 ** math.ceil(math.log2(max(x.shape[:2])))
    uniform = words("fog", severity, index, size * size).reshape(size, size) / 2.0**31 - 1
    field = np.full((size, size), np.nan)
    field[0, 0] = 0.0
    step, roughness = size, 100.0
    while step > 1:
        half = step // 2
        # Squares first, then those whose neighbours are above, below and at the sides.
        for rows, columns, shifts in (
            (half, half, ((-half, -half), (-half, half), (half, -half), (half, half))),
            (0, half, ((-half, 0), (half, 0), (0, -half), (0, half))),
            (half, 0, ((-half, 0), (half, 0), (0, -half), (0, half))),
        ):
            y, z = np.meshgrid(np.arange(rows, size, step), np.arange(columns, size, step), indexing="ij")
            around = [field[(y + dy) % size, (z + dz) % size] for dy, dz in shifts]
            field[y, z] = np.mean(around, axis=0) + roughness * roughness * uniform[y, z]
        step, roughness = half, roughness / decay
    field = (field - field.min()) / (field.max() - field.min())
    largest = x.max() / 255
    return (x + 255 * thickness * field[: x.shape[0], : x.shape[1], None]) * largest / (largest + thickness)


@pytest.mark.parametrize(("height", "width", "side"), CASES)
@pytest.mark.parametrize("definition", [snow, frost, fog])
def test_a_weather_is_its_definition_in_float64_with_the_same_draws(
    definition: Any, height: int, width: int, side: int
) -> None:
    name, image = definition.__name__, picture(height, width)
    for severity in range(1, 6):
        found = corrupt(image, name, severity, seed=9, index=torch.tensor([severity]))
        grey = definition(image[0].permute(1, 2, 0).double().numpy(), severity, side, severity)
        ours = found[0].permute(1, 2, 0).numpy().astype(np.float64)
        low, high = (np.floor(np.clip(grey + shift, 0.0, 255.0)) for shift in (-2e-3, 6e-3))
        # A flake whose height is within 1e-5 of the threshold is in one and not in the other; a pixel of a texture of
        # 0.3 the size that is halfway between two levels may be either.
        assert ((ours < low) | (ours > high)).mean() <= (2e-4 if name == "fog" else 2e-3)
        assert name == "snow" or (np.maximum(low - ours, ours - high) <= 1).all()


@pytest.mark.parametrize(("size", "severity"), [(32, 1), (32, 5), (224, 1), (224, 2), (224, 4), (224, 5)])
def test_brightness_is_that_of_scikit_image(size: int, severity: int) -> None:
    color = pytest.importorskip("skimage.color")
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (size, size, 3)).astype(np.uint8)
    x[:16] = np.arange(512).reshape(16, 32, 1).repeat(size // 32, 1) % 256  # greys, each of them
    x[16] = 0
    hsv = color.rgb2hsv(x / 255.0)
    hsv[..., 2] = np.clip(hsv[..., 2] + constants("brightness", severity, size)[0], 0, 1)
    theirs = np.clip(color.hsv2rgb(hsv), 0, 1) * 255
    ours = corrupt(torch.from_numpy(x).permute(2, 0, 1)[None], "brightness", severity)[0].permute(1, 2, 0).numpy()
    assert ((ours == theirs.astype(np.uint8)) | (abs(ours - theirs) < 1e-6)).all()
    assert np.array_equal(ours.max(2), theirs.astype(np.uint8).max(2))


@pytest.mark.parametrize("name", PUBLISHED)
def test_photographs_come_out_as_from_a_published_generator(name: str, four_photographs: Tensor) -> None:
    for severity, theirs in enumerate(PUBLISHED[name], 1):
        ours = means(four_photographs, name, severity, DRAWS.get(name, 1))
        assert ours == pytest.approx(theirs, abs=TOLERANCE[name])


def test_backends_see_the_same_flakes(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.zeros(40, 3, 224, 224, dtype=torch.uint8)
    for severity in range(1, 6):
        compiled = corrupt(images, "snow", severity)
        with monkeypatch.context() as patch:
            patch.setattr(corruption_job, "installed", lambda package: False)
            assert (corrupt(images, "snow", severity).int() - compiled.int()).abs().max() <= 1


def test_a_black_image_stays_black_in_fog() -> None:
    images = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)
    assert not corrupt(images, "fog", 5).any()


def test_frost_covers_images_larger_than_its_textures() -> None:
    images = torch.zeros(30, 3, 340, 580, dtype=torch.uint8)
    out = corrupt(images, "frost", 5)
    columns = (out[:, :, :, -22:].float().mean((1, 2, 3)), out.float().mean((1, 2, 3)))
    assert (columns[0] > 30).all() and (columns[1] > 30).all()


def slope(texture: Tensor) -> float:
    grey = (texture.permute(1, 2, 0).double() @ torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)).numpy()
    window = np.outer(*(np.hanning(size) for size in grey.shape))
    power = abs(np.fft.fft2((grey - grey.mean()) * window)) ** 2
    frequency = np.hypot(np.fft.fftfreq(grey.shape[0])[:, None], np.fft.fftfreq(grey.shape[1]))
    edges = np.geomspace(0.008, 0.5, 22)
    ring = np.digitize(frequency, edges)
    mean = [power[ring == k].mean() for k in range(1, 22)]
    return float(np.polyfit(np.log(np.sqrt(edges[:-1] * edges[1:])), np.log(mean), 1)[0])


def test_made_textures_have_the_mean_contrast_and_spectral_slope_of_the_published() -> None:
    textures = frost_textures._made()
    wanted = (130, 18, -1.75), (205, 22, -1.62), (205, 22, -1.62), (150, 29, -1.15), (121, 43, -1.76)
    for texture, (mean, deviation, power) in zip(textures, wanted, strict=True):
        grey = (texture.double() * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(0)
        assert grey.mean().item() == pytest.approx(mean, abs=1.0)
        assert grey.std().item() == pytest.approx(deviation, abs=1.5)
        assert slope(texture) == pytest.approx(power, abs=0.15)
    assert torch.equal(textures[1], textures[2])


def published(folder: Path) -> Path:
    """Five pictures with the sizes of the published ones, each of one colour, the first with an alpha channel."""
    folder.mkdir(parents=True)
    for k, (name, look) in enumerate(zip(frost_textures.FILES, frost_textures._LOOKS, strict=True)):
        mode, color = ("RGBA", (40, 80, 120, 3)) if k == 0 else ("RGB", (10 * k, 20 * k, 30 * k))
        Image.new(mode, look.size[::-1], color).save(folder / name)
    return folder


@pytest.mark.usefixtures("textures")
def test_textures_come_from_the_folder_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = corrupt(torch.zeros(12, 3, 64, 64, dtype=torch.uint8), "frost", 5)
    monkeypatch.setenv("FASTMOLL_FROST", str(published(tmp_path / "frost")))
    assert corrupt_weather.frost_source() == "published"
    first, *_, last = corrupt_weather.frost_textures()
    assert first.shape == (3, 600, 900) and first[:, 5, 5].tolist() == [40, 80, 120]
    assert last.shape == (3, 495, 660) and abs(last[:, 9, 9].int() - torch.tensor([40, 80, 120])).max() <= 2
    after = corrupt(torch.zeros(12, 3, 64, 64, dtype=torch.uint8), "frost", 5)
    assert not torch.equal(before, after) and (after.flatten(2).amin(2) == after.flatten(2).amax(2)).any()


@pytest.mark.usefixtures("textures")
def test_a_folder_without_the_published_pictures_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = published(tmp_path / "frost")
    Image.new("RGB", (20, 30)).save(folder / "frost4.jpg")
    monkeypatch.setenv("FASTMOLL_FROST", str(folder))
    with pytest.raises(ValueError, match=r"FASTMOLL_FROST must be a folder .*frost4.jpg has 30 rows and 20 columns"):
        corrupt(picture(32, 32), "frost", 1)
    (folder / "frost2.png").write_bytes(b"no picture")
    frost_textures._folder.cache_clear()
    with pytest.raises(ValueError, match=r"frost2\.png is not a picture"):
        frost_textures.frost_source()
    monkeypatch.setenv("FASTMOLL_FROST", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"nowhere': frost1\.png: No such file"):
        frost_textures.frost_textures()
    monkeypatch.setattr(frost_textures.importlib.util, "find_spec", lambda name: None)
    assert frost_textures.frost_source(used=False) == "made"
    monkeypatch.setenv("FASTMOLL_FROST", str(published(tmp_path / "other")))
    assert frost_textures.frost_source(used=False) == "published"


@pytest.mark.usefixtures("textures")
def test_an_installed_package_with_the_pictures_is_found_but_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FASTMOLL_FROST", raising=False)
    package = tmp_path / "site" / "imagecorruptions"
    published(package / "frost")
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "imagecorruptions", raising=False)
    importlib.invalidate_caches()
    assert frost_textures.frost_source() == "published"
    assert corrupt_weather.frost_textures()[0].shape == (3, 600, 900) and "imagecorruptions" not in sys.modules


@pytest.mark.usefixtures("textures")
def test_without_the_published_pictures_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTMOLL_FROST", raising=False)
    monkeypatch.setattr(frost_textures.importlib.util, "find_spec", lambda name: None)
    assert frost_textures.frost_source() == "made"
    assert [tuple(texture.shape[1:]) for texture in frost_textures.frost_textures()] == [
        look.size for look in frost_textures._LOOKS
    ]


def test_frost_draws_each_of_five_textures_alike() -> None:
    drawn = torch.stack(philox.sample_words(torch.arange(5000), 1, seed=0, purpose=philox.CORRUPT, blocks=1))[0]
    counts = torch.bincount((drawn * 5 >> 32).flatten())
    assert len(counts) == 5 and stats.chisquare(counts.numpy()).pvalue > 1e-4
