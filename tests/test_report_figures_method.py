"""What the figures of the method measure, against other ways to compute it and on photographs."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.fft import dctn, idctn
from torch import Tensor

from fastmoll.corruptions import corrupt
from fastmoll.report import figures_method as method
from fastmoll.report.measures import information, label_density, radial_profile, read_images, spectral_change
from fastmoll.report.style import style

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def photographs() -> Tensor:
    """Squares of 64 pixels from photographs."""
    data = pytest.importorskip("skimage.data")
    squares = []
    for name in ("astronaut", "chelsea", "coffee", "rocket"):
        picture = Image.fromarray(getattr(data, name)())
        for part in range(3):
            left = part * (picture.width - picture.height * 2 // 3) // 2
            box = (left, 0, left + picture.height * 2 // 3, picture.height * 2 // 3)
            squares.append(np.asarray(picture.crop(box).resize((64, 64), Image.Resampling.BOX)))
    return torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2).contiguous()


@pytest.fixture(scope="module")
def folder(photographs: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as files."""
    root = tmp_path_factory.mktemp("pictures")
    for number, image in enumerate(photographs):
        place = root / f"class{number % 3}"
        place.mkdir(exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(place / f"{number:02}.png")
    return root


# --- what is measured -------------------------------------------------------------------------------------------------


def test_change_of_the_spectrum_is_that_of_explicit_cosine_transforms() -> None:
    rng = np.random.default_rng(0)
    clean, corrupted = (torch.from_numpy(rng.integers(0, 256, (3, 3, 8, 12), np.uint8)) for _ in range(2))

    def basis(size: int) -> np.ndarray:
        k, i = np.arange(size)[:, None], np.arange(size)
        matrix = np.sqrt(2 / size) * np.cos(np.pi * k * (2 * i + 1) / (2 * size))
        matrix[0] /= np.sqrt(2)
        return matrix

    transformed = [basis(8) @ x.double().numpy() @ basis(12).T for x in (clean, corrupted)]
    expected = np.abs(transformed[1] - transformed[0]).mean((0, 1))
    np.testing.assert_allclose(spectral_change(clean, corrupted), expected, rtol=1e-4, atol=1e-3)


def test_white_noise_changes_all_frequencies_by_its_mean_absolute_value() -> None:
    clean = torch.full((64, 3, 16, 16), 128, dtype=torch.uint8)
    noise = 10 * torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    change = spectral_change(clean, (clean + noise).round().clamp(0, 255).byte())
    # Mean of |N(0, s²)|; 192 samples a coefficient.
    np.testing.assert_allclose(change, 10 * math.sqrt(2 / math.pi), rtol=0.25)
    np.testing.assert_allclose(change.mean(), 10 * math.sqrt(2 / math.pi), rtol=0.01)


def test_noise_is_flat_and_fog_is_low_frequency_on_photographs(photographs: Tensor) -> None:
    profiles = {}
    for name in ("gaussian_noise", "shot_noise", "impulse_noise", "fog"):
        changed = corrupt(photographs, name, 3)
        radius, mean = radial_profile(spectral_change(photographs, changed), 8)
        assert len(radius) == 8
        profiles[name] = mean
    for name in ("gaussian_noise", "shot_noise", "impulse_noise"):
        # Clipping at black and white moves the mean of an image: the lowest ring is left out.
        flat = profiles[name][1:]
        assert flat.max() < 1.35 * flat.min(), name
    fog = profiles["fog"]
    assert fog[0] > 20 * fog[4:].max()
    assert np.all(np.diff(fog) < 0)


def test_rings_of_the_profile_hold_the_frequencies_they_say() -> None:
    height, width = 24, 40
    radius = np.hypot(np.arange(height)[:, None] / height, np.arange(width) / width)
    centre, mean = radial_profile(radius, 10)
    assert np.all(np.abs(centre - mean) < 0.05)  # half a ring
    assert centre[-1] < 1.0
    np.testing.assert_array_equal(radial_profile(np.full((8, 8), 7.0), 4)[1], 7.0)


def test_information_is_the_size_of_images_blurred_in_float64(photographs: Tensor) -> None:
    def png_bytes(pixels: Tensor) -> int:
        file = io.BytesIO()
        Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(file, "PNG")
        return len(file.getvalue())

    images, temperatures = photographs[:2], (0.0, 0.4, 0.9)
    frequency = np.pi * np.arange(64) / 64
    squares = frequency[:, None] ** 2 + frequency**2
    for image, row in zip(images, information(images, temperatures), strict=True):
        spectrum = dctn(image.double().numpy(), axes=(1, 2), norm="ortho")
        for t, ratio in zip(temperatures, row, strict=True):
            sigma = 0.3 ** (1 - t) * 64**t
            blurred = idctn(spectrum * np.exp(-(sigma**2) / 2 * squares), axes=(1, 2), norm="ortho")
            pixels = torch.from_numpy(np.clip(np.rint(blurred), 0, 255).astype(np.uint8))
            # A pixel in thousands is rounded the other way in float32.
            assert ratio == pytest.approx(png_bytes(pixels) / png_bytes(image), rel=5e-3)


def test_information_of_photographs_falls_about_linearly_as_the_paper_says(photographs: Tensor) -> None:
    temperatures = np.linspace(0, 1, 11)
    mean = information(photographs, temperatures.tolist()).mean(0)
    assert np.all(np.diff(mean) < 0)
    away = {k: np.sqrt(np.mean((mean - (1 - temperatures**k)) ** 2)) for k in (0.5, 1.0, 2.0)}
    assert min(away, key=lambda k: away[k]) == 1.0


@pytest.mark.parametrize("label", [(1.0, 0.0, 0.0), (0.4, 0.0, 0.0), (0.6, 0.2, 0.2)])
def test_label_density_is_a_density_and_has_its_mode_at_the_label(label: tuple[float, float, float]) -> None:
    x, y, density = label_density(label, 300)
    # By the trapezoidal rule over (f_2, f_3): points on the edges count half, those at corners a sixth.
    f3 = y / (3**0.5 / 2)
    f2 = x - f3 / 2
    zeros = sum(np.isclose(part, 0) for part in (f2, f3, 1 - f2 - f3))
    weight = np.array([1.0, 0.5, 1 / 6])[zeros]
    assert (density * weight).sum() / 300**2 == pytest.approx(1.0, abs=5e-3)
    if label[1] or label[0] == 1.0:
        mode = np.array(label) / sum(label)
    else:
        mode = np.array([1.0, 0.0, 0.0])
    top = np.argmax(density)
    np.testing.assert_allclose((f2[top], f3[top]), mode[1:], atol=1 / 300)


def test_images_are_read_as_centred_squares_spaced_over_all_folders(tmp_path: Path) -> None:
    for number in range(6):
        place = tmp_path / f"c{number // 3}"
        place.mkdir(exist_ok=True)
        pixels = np.full((10, 30, 3), 255, np.uint8)
        pixels[:, 8:22] = number  # the centred square and what its scaling reaches
        Image.fromarray(pixels).save(place / f"{number}.PNG")
    images = read_images(tmp_path, 8, 3)
    assert images.shape == (3, 3, 8, 8)
    assert [image.unique().tolist() for image in images] == [[0], [2], [4]]
    deep = tmp_path / "deep"
    deep.mkdir()
    Image.fromarray(np.full((8, 8), 257 * 100, np.uint16)).save(deep / "a.png")
    assert read_images(deep, 8, 1).unique().tolist() == [100]  # not white


def test_images_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        read_images(tmp_path / "nowhere", 8, 3)
    with pytest.raises(
        ValueError, match=rf"^images: {tmp_path} has no files \.jpg, .*, and as a data set: .*val/<class>"
    ):
        read_images(tmp_path, 8, 3)
    (tmp_path / "a.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"images: .*a\.jpg can't be read"):
        read_images(tmp_path, 8, 3)


# --- what is drawn --------------------------------------------------------------------------------------------


def test_temperatures_as_drawn_have_the_densities_beside_them() -> None:
    with style():
        canvas, _ = method.temperature_densities([(1.0, 5.0)])
    shown = [axes for axes in canvas.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown].count("Beta(1, 5)") == 1
    for axes in shown:
        curve = axes.lines[0].get_xydata()
        for bar in axes.patches:
            middle = bar.get_x() + bar.get_width() / 2
            # 40,000 draws in 40 bins: four standard deviations of the count, and the curve's bend inside a bin.
            expected = np.interp(middle, *np.asarray(curve).T)
            assert abs(bar.get_height() - expected) < 4 * math.sqrt(expected / 1000) + 0.03


def test_blur_schedule_goes_from_the_smallest_scale_to_the_width() -> None:
    with style():
        canvas, _ = method.blur_schedule((224, 32))
    curves = {line.get_label(): np.asarray(line.get_xydata()) for line in canvas.axes[0].lines}
    for size in (32, 224):
        t, scale = curves[f"images of {size} pixels"].T
        np.testing.assert_allclose(np.log(scale), (1 - t) * math.log(0.3) + t * math.log(size), atol=1e-9)


def test_information_is_drawn_with_the_decays_of_labels_and_the_nearest_is_named(folder: Path) -> None:
    with style():
        canvas, caption = method.information_blur(method.Pictures(folder, 32))
    lines = {line.get_label(): np.asarray(line.get_xydata()).T for line in canvas.axes[0].lines}
    t, kept = lines["1 − γ with γ = $t^{2}$"]
    np.testing.assert_allclose(kept, 1 - t**2)
    t, kept = lines["1 − γ with γ = $t^{0.5}$"]
    assert np.abs(np.diff(kept)).max() < 0.02  # no corners
    t, mean = lines["measured, mean over images"]
    np.testing.assert_allclose(mean, information(read_images(folder, 32, 12), t.tolist()).mean(0))
    assert "12 images of 32×32 pixels" in caption
    assert f"for k = {method.fitted_slope(t, mean):g}, the nearest k" in caption


def test_fitted_slope_is_the_slope_of_a_curve_that_has_one() -> None:
    t = np.linspace(0, 1, 21)
    assert [method.fitted_slope(t, 1 - t**k) for k in (0.5, 1.37, 3.0)] == [0.5, 1.37, 3.0]
