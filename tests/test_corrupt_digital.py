"""Contrast, elastic transform, pixelate and JPEG against NumPy, SciPy, Pillow and the published generator."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from photographs import figures, photographs
from PIL import Image
from scipy import ndimage
from torch import Tensor

from fastmoll.kernels import corrupt_digital, corruption_job, philox
from fastmoll.kernels.checks import installed
from fastmoll.kernels.corruption_constants import SEVERITIES, cell, constants
from fastmoll.kernels.jpeg_loss import MATRIX, jpeg_loss, quantisation

SEED = 7
INDEX = torch.tensor([11, 2**47])
SIZES = [(32, 32), (64, 64), (224, 224), (33, 47), (130, 61), (7, 5), (1, 3)]

# Means, and root mean squares of the change, that imagecorruptions-imaug 1.1.5 gave on these photographs.
PUBLISHED = {
    "contrast": ((101.96, 30.12), (101.95, 35.14), (101.95, 40.16), (101.95, 45.18), (101.96, 47.69)),
    "pixelate": ((102.84, 7.27), (102.93, 8.03), (102.64, 10.24), (102.55, 12.39), (102.69, 13.75)),
    "jpeg_compression": ((102.51, 7.49), (102.65, 8.52), (102.64, 9.2), (102.59, 10.97), (102.73, 13.07)),
}


def images(height: int, width: int) -> Tensor:
    """A photograph and noise, which leaves no rule of a codec untried."""
    picture = photographs(max(height, width, 32))[12, :height, :width]
    noise = np.random.default_rng(0).integers(0, 256, picture.shape, np.uint8)
    return torch.from_numpy(np.stack([picture, noise])).permute(0, 3, 1, 2).contiguous()


def pillow(x: Tensor) -> list[Image.Image]:
    return [Image.fromarray(picture) for picture in x.permute(0, 2, 3, 1).contiguous().numpy()]


def planes(pictures: list[Image.Image]) -> np.ndarray:
    return np.stack([np.asarray(picture) for picture in pictures]).transpose(0, 3, 1, 2)


def corrupted(name: str, x: Tensor, severity: int) -> np.ndarray:
    out: Tensor = getattr(corrupt_digital, name)(x, severity, seed=SEED, index=INDEX[: len(x)])
    return out.numpy()


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_contrast_is_the_published_formula(corruption_backend: str, height: int, width: int) -> None:
    x = images(height, width)
    for severity in SEVERITIES:
        (factor,) = constants("contrast", severity, min(height, width))
        values = x.numpy() / 255.0
        mean = values.mean((2, 3), keepdims=True)
        exact = np.clip((values - mean) * factor + mean, 0, 1) * 255
        out = corrupted("contrast", x, severity)
        # Float64 sums in another order: next to a whole number either side is right.
        assert np.abs(out - exact + 0.5).max() <= 0.5 + 1e-9


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_pixelate_has_the_bits_of_pillow_on_squares(corruption_backend: str, height: int, width: int) -> None:
    x = images(height, width)
    for severity in SEVERITIES:
        (share,) = constants("pixelate", severity, min(height, width))
        small = max(1, int(width * share)), max(1, int(height * share))
        box = Image.Resampling.BOX
        expected = planes([picture.resize(small, box).resize((width, height), box) for picture in pillow(x)])
        apart = np.abs(corrupted("pixelate", x, severity).astype(int) - expected)
        # Rows first is published; Pillow has come to do columns first for some pictures that are no squares.
        assert apart.max() <= (0 if height == width else 1)


def test_areas_are_pillows_for_every_size_and_share() -> None:
    row = np.random.default_rng(1).integers(0, 256, (1, 300), np.uint8)
    for size in range(1, 300, 7):
        for share in (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5, 0.4, 0.3, 0.25):
            less = max(1, int(size * share))
            first, last, weight, back = corrupt_digital.areas(size, less)
            total = np.array([row[0, a:b].sum(dtype=np.int64) for a, b in zip(first, last, strict=True)])
            small = (total * weight + 2**21) >> 22
            image = Image.fromarray(row[:, :size]).resize((less, 1), Image.Resampling.BOX)
            np.testing.assert_array_equal(small, np.asarray(image)[0])
            np.testing.assert_array_equal(
                small[back], np.asarray(image.resize((size, 1), Image.Resampling.BOX))[0], err_msg=f"{size}, {less}"
            )


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_jpeg_has_the_bits_of_pillow(corruption_backend: str, height: int, width: int) -> None:
    x = images(height, width)
    for severity in SEVERITIES:
        quality = int(constants("jpeg_compression", severity, min(height, width))[0])
        expected = planes([_through_pillow(picture, quality) for picture in pillow(x)])
        np.testing.assert_array_equal(corrupted("jpeg_compression", x, severity), expected)


def _through_pillow(picture: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality)
    return Image.open(file)


@pytest.mark.parametrize("quality", [1, 2, 49, 50, 51, 75, 99, 100])
def test_jpeg_has_the_bits_of_pillow_at_any_quality(quality: int) -> None:
    x = images(40, 72)
    expected = planes([_through_pillow(picture, quality) for picture in pillow(x)])
    np.testing.assert_array_equal(jpeg_loss(x, quality), expected)


def test_matrix_of_the_transform_is_a_cosine_transform() -> None:
    place, frequency = np.arange(8), np.arange(8)[:, None]
    cosine = np.cos((2 * place + 1) * frequency * np.pi / 16) * np.where(frequency == 0, 1, np.sqrt(2))
    assert np.abs(MATRIX / 2**13 - cosine).max() < 3e-4


def test_quality_outside_1_to_100_is_named() -> None:
    with pytest.raises(ValueError, match=r"quality must be an integer in \[1, 101\), got 0"):
        quantisation(0)


def _uniform(severity: int, count: int) -> np.ndarray:
    blocks = -(-count // 4)
    number = cell("elastic_transform", severity)
    words = philox.sample_words(INDEX, number, seed=SEED, purpose=philox.CORRUPT, blocks=blocks)
    return philox.uniform(torch.stack(words, 2).flatten(1)[:, :count]).double().numpy() * 2 - 1


@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 64), (224, 224), (48, 35)])
@pytest.mark.parametrize("severity", SEVERITIES)
def test_elastic_transform_is_scipys_with_the_same_draws(
    corruption_backend: str, height: int, width: int, severity: int
) -> None:
    x = images(height, width)
    tall, sigma, shift = constants("elastic_transform", severity, min(height, width))
    draws = _uniform(severity, 8 + 2 * height * width)
    column, row = np.meshgrid(np.arange(width), np.arange(height))
    out = corrupted("elastic_transform", x, severity)
    for b in range(len(x)):
        side, centre = min(height, width) // 3, np.array([width // 2, height // 2])
        points = np.array([centre + side, [centre[0] + side, centre[1] - side], centre - side], float)
        moved = np.column_stack([points + draws[b, :6].reshape(3, 2) * shift, np.ones(3)])
        matrix = np.linalg.solve(moved, points).T
        there = np.einsum("ij,jhw->ihw", matrix, np.stack([column, row, np.ones_like(row)]))
        noise = draws[b, 8:].reshape(2, height, width)
        right, down = (ndimage.gaussian_filter(part, sigma, mode="reflect", truncate=3) * tall for part in noise)
        for c in range(3):
            # SciPy's "mirror" is OpenCV's REFLECT_101.
            once = ndimage.map_coordinates(x[b, c].double().numpy(), there[::-1], order=1, mode="mirror")
            exact = ndimage.map_coordinates(once, (row + down, column + right), order=1, mode="reflect")
            # Places in float32, 1e-4 of a pixel in the worst of cases; a little is added before truncation.
            apart = exact - out[b, c]
            assert apart.min() > -1 / 128 - 0.02
            assert apart.max() < 1 + 0.02


@pytest.mark.parametrize("sigma", [0.0, 0.3, 1.92, 2.44, 19.52, 170.8])
@pytest.mark.parametrize("size", [1, 5, 64, 224])
def test_smoothing_is_scipys_gaussian_filter(size: int, sigma: float) -> None:
    x = np.random.default_rng(2).normal(size=(size, 3))
    expected = ndimage.gaussian_filter1d(x, sigma, axis=0, mode="reflect", truncate=3) if sigma else x
    np.testing.assert_allclose(corrupt_digital.smoothing(size, sigma) @ x, expected, rtol=0, atol=1e-13)


def test_points_on_a_line_still_give_a_picture(corruption_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first two of the drawn places coincide.
    x, shift = images(32, 32), constants("elastic_transform", 1, 32)[2]
    places = torch.tensor([[0.5, 0.5 - 10 / shift, 0.5, 0.5 + 10 / shift, 0.5, 0.5]]).repeat(2, 1)
    matrix = corrupt_digital.affine(places, 32, 32, shift)
    assert matrix.isfinite().all()
    monkeypatch.setattr(corrupt_digital, "affine", lambda *_: matrix)
    assert corrupted("elastic_transform", x, 1).shape == x.shape


@pytest.mark.skipif(not installed("numba"), reason="numba is not installed")
@pytest.mark.parametrize("name", ["contrast", "elastic_transform", "pixelate", "jpeg_compression"])
def test_compiled_and_plain_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = images(100, 75)
    compiled = [corrupted(name, x, severity).astype(int) for severity in SEVERITIES]
    monkeypatch.setattr(corruption_job, "installed", lambda package: False)
    for severity, ours in zip(SEVERITIES, compiled, strict=True):
        apart = np.abs(ours - corrupted(name, x, severity))
        assert apart.max() <= (1 if name == "elastic_transform" else 0)
        assert (apart > 0).mean() < 1e-3


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_means_and_changes_are_the_published_generators(name: str) -> None:
    clean = photographs()
    x = torch.from_numpy(clean).permute(0, 3, 1, 2).contiguous()
    for severity, (mean, change) in zip(SEVERITIES, PUBLISHED[name], strict=True):
        out: Tensor = getattr(corrupt_digital, name)(x, severity, seed=0, index=torch.arange(len(x)))
        # Nothing is drawn: what is left is that Pillow may prepare the photographs otherwise some day.
        ours = figures(clean, out.permute(0, 2, 3, 1).numpy())
        assert ours == pytest.approx((mean, change), abs=0.05)
