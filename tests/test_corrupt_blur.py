"""Blurs against slow float64 versions of their definitions, with the same draws, and against a published generator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from photographs import means
from scipy import ndimage
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fastmoll.corruptions import corrupt
from fastmoll.kernels import corrupt_blur, corrupt_weather, corruption_job, philox
from fastmoll.kernels.corruption_constants import CORRUPTIONS, GROUPS, cell, constants

NAMES = GROUPS["blur"]
ALL = NAMES + GROUPS["weather"]
SIDES = (32, 64, 224)
Picture = np.ndarray[Any, np.dtype[np.float64]]

# Mean, and root mean square difference to the clean image, of the centres of four photographs (astronaut, chelsea,
# coffee, rocket of scikit-image 0.26), severities 1 to 5, as imagecorruptions-imaug 1.1.5 gives them with OpenCV 5.0.0,
# over 4 draws for glass, 40 for motion. It truncates motion blur where the original rounds: half a level is added here.
PUBLISHED = {
    "defocus_blur": ((99.35, 11.81), (99.36, 13.63), (99.36, 16.68), (100.66, 19.05), (100.44, 21.34)),
    "glass_blur": ((98.99, 13.92), (98.94, 13.59), (99.13, 20.36), (98.99, 19.05), (98.92, 20.63)),
    "motion_blur": ((99.85, 14.95), (99.88, 19.43), (99.97, 24.03), (100.10, 28.29), (100.01, 30.81)),
    "zoom_blur": ((98.42, 20.12), (98.04, 22.86), (97.69, 23.98), (97.39, 25.80), (97.05, 27.18)),
}
DRAWS = {"glass_blur": 4, "motion_blur": 40}
TOLERANCE = {"defocus_blur": 0.1, "glass_blur": 0.3, "motion_blur": 0.4, "zoom_blur": 0.05}


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch, as on a GPU, in place of compiled code."""
    monkeypatch.setattr(corruption_job, "installed", lambda package: False)


def picture(height: int, width: int, seed: int = 0) -> Tensor:
    """A smooth image with some noise and flat black and white, uint8 ``(1, 3, H, W)``."""
    rng = np.random.default_rng(seed)
    waves = ndimage.gaussian_filter(rng.normal(size=(3, height, width)), (0, 3, 3), mode="wrap")
    grey = 128 + 90 * waves / waves.std() + rng.normal(size=waves.shape, scale=4)
    return torch.from_numpy(np.clip(grey, 0, 255).astype(np.uint8)).unsqueeze(0)


def words(name: str, severity: int, index: int, seed: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    blocks = -(-count // 4)
    drawn = philox.sample_words(
        torch.tensor([index]), cell(name, severity), seed=seed, purpose=philox.CORRUPT, blocks=blocks
    )
    return torch.stack(drawn, 2).flatten()[:count].numpy()


def agree(ours: Tensor, grey: Picture, allowed: float) -> None:
    """Our uint8 ``(1, 3, H, W)`` is the truncated ``(H, W, 3)``, but for sums next to a whole number."""
    found = ours[0].permute(1, 2, 0).numpy().astype(np.float64)
    low, high = (np.floor(np.clip(grey + shift, 0.0, 255.0)) for shift in (-1e-3, 5e-3))
    wrong = (found < low) | (found > high)
    assert wrong.mean() <= allowed, (wrong.mean(), abs(found - grey).max())


def softened_disk(radius: float, softness: float) -> Picture:
    reach = max(8, math.ceil(radius))
    axis = np.arange(-reach, reach + 1)
    disk = (np.hypot(*np.meshgrid(axis, axis)) <= radius + 1e-9).astype(float)
    half = 1 if radius <= 8 else 2
    bell = np.exp(-(np.arange(-half, half + 1) ** 2) / (2 * softness**2))
    return ndimage.correlate(disk / disk.sum(), np.outer(bell, bell) / bell.sum() ** 2, mode="mirror")


def defocus(x: Picture, severity: int, side: int) -> Picture:
    kernel = softened_disk(*constants("defocus_blur", severity, side))
    return np.stack([ndimage.correlate(x[..., c], kernel, mode="mirror") for c in range(3)], 2)


def glass(x: Picture, severity: int, side: int, drawn: np.ndarray[Any, Any]) -> Picture:
    sigma, delta, passes = constants("glass_blur", severity, side)
    d, (height, width) = int(delta), x.shape[:2]

    def smooth(y: Picture) -> Picture:
        return ndimage.gaussian_filter(y, (sigma, sigma, 0), mode="nearest", truncate=4.0)

    y = np.floor(smooth(x) + 1 / 256).astype(np.uint8)
    for k in range(int(passes)):
        for h in range(height - d, d, -1):
            for w in range(width - d, d, -1):
                word = int(drawn[(k * height + h) * width + w])
                there = h - d + ((word >> 16) * 2 * d >> 16), w - d + ((word & 0xFFFF) * 2 * d >> 16)
                # An exchange of views, which is none: the second gets back what it had.
                y[h, w], y[there] = y[there], y[h, w]
    return smooth(y.astype(np.float64))


def motion(x: Picture, severity: int, side: int, word: int) -> Picture:
    radius, sigma = constants("motion_blur", severity, side)
    angle = math.radians(-45 + 90 * (word + 0.5) / 2**32)
    taps = np.arange(2 * math.ceil(radius) + 1)
    weights = np.exp(-(taps**2) / (2 * sigma**2))
    total = np.zeros_like(x)
    for tap, weight in zip(taps, weights / weights.sum(), strict=True):
        row = np.clip(np.arange(len(x)) + math.ceil(tap * math.sin(angle) - 0.5), 0, len(x) - 1)
        column = np.clip(np.arange(x.shape[1]) + math.ceil(tap * math.cos(angle) - 0.5), 0, x.shape[1] - 1)
        total += weight * x[row][:, column]
    return total + 0.5


def zoom(x: Picture, severity: int, side: int) -> Picture:
    factors = constants("zoom_blur", severity, side)
    total = x.copy()
    for factor in factors:
        part = [math.ceil(size / factor) for size in x.shape[:2]]
        top, left = ((size - inside) // 2 for size, inside in zip(x.shape[:2], part, strict=True))
        large = ndimage.zoom(x[top : top + part[0], left : left + part[1]], (factor, factor, 1), order=1)
        top, left = ((full - size) // 2 for full, size in zip(large.shape[:2], x.shape[:2], strict=True))
        total += large[top : top + x.shape[0], left : left + x.shape[1]]
    return total / (len(factors) + 1)


CASES = [(32, 32, 32), (64, 64, 64), (224, 224, 224), (48, 53, 64), (130, 121, 224)]


def expected(name: str, image: Tensor, severity: int, side: int, index: int, seed: int) -> Picture:
    x = image[0].permute(1, 2, 0).double().numpy()
    if name == "defocus_blur":
        return defocus(x, severity, side)
    if name == "zoom_blur":
        return zoom(x, severity, side)
    if name == "motion_blur":
        return motion(x, severity, side, int(words(name, severity, index, seed, 1)[0]))
    passes = int(constants(name, severity, side)[2])
    return glass(x, severity, side, words(name, severity, index, seed, passes * x.shape[0] * x.shape[1]))


@pytest.mark.parametrize(("height", "width", "side"), CASES)
@pytest.mark.parametrize("name", NAMES)
def test_a_blur_is_its_definition_in_float64_with_the_same_draws(name: str, height: int, width: int, side: int) -> None:
    image = picture(height, width)
    for severity in (1, 4, 5) if height == 224 else range(1, 6):
        ours = corrupt(image, name, severity, seed=9, index=torch.tensor([severity]))
        # Where the first of glass blur's truncations goes the other way, the passes and the second blur spread it.
        allowed = 1e-3 if name == "glass_blur" else 1e-4
        agree(ours, expected(name, image, severity, side, severity, 9), allowed)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 60), (57, 131), (224, 224), (7, 3), (1, 1), (1, 40)])
def test_plain_torch_gives_the_compiled_picture(
    name: str, height: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = torch.cat([picture(height, width, k) for k in range(2)])
    images[1, :, : height // 2] = 255
    index = torch.tensor([5, 2**47 + 3])
    compiled = [corrupt(images, name, severity, seed=2**63 + 1, index=index) for severity in range(1, 6)]
    monkeypatch.setattr(corruption_job, "installed", lambda package: False)
    for severity, found in enumerate(compiled, 1):
        difference = (found.int() - corrupt(images, name, severity, seed=2**63 + 1, index=index).int()).abs()
        assert difference.max() <= 1
        assert (difference > 0).float().mean() <= max(1e-3 if name == "glass_blur" else 1e-4, 1.5 / difference.numel())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("backend", ["compiled", "plain"])
def test_a_picture_depends_on_its_key_alone(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "plain":
        monkeypatch.setattr(corruption_job, "installed", lambda package: False)
        monkeypatch.setitem(corruption_job._PORTION, "cpu", 3 * 40 * 40)
    images = torch.cat([picture(40, 40, k) for k in range(8)])
    index = torch.arange(8) + 2**33
    whole = corrupt(images, name, 3, seed=4, index=index)
    order = torch.tensor([6, 1, 3])
    assert torch.equal(corrupt(images[order], name, 3, seed=4, index=index[order]), whole[order])
    channels_last = images.contiguous(memory_format=torch.channels_last)
    again = corrupt(channels_last, name, 3, seed=4, index=index.to(torch.int64))
    assert torch.equal(again, whole) and again.is_contiguous()
    assert corrupt(images[:0], name, 3, seed=4, index=index[:0]).shape == (0, 3, 40, 40)


@pytest.mark.parametrize("name", ["glass_blur", "motion_blur", "snow", "frost", "fog"])
def test_seed_id_and_severity_change_what_is_drawn(name: str) -> None:
    image = picture(64, 64)
    first = words(name, 2, 7, 1, 4)
    for other in (words(name, 2, 8, 1, 4), words(name, 2, 7, 2, 4), words(name, 3, 7, 1, 4)):
        assert not np.array_equal(first, other)
    ours = corrupt(image, name, 2, seed=1, index=torch.tensor([7]))
    assert not torch.equal(ours, corrupt(image, name, 2, seed=1, index=torch.tensor([8])))
    assert not torch.equal(ours, corrupt(image, name, 2, seed=2, index=torch.tensor([7])))


def test_disks_of_radius_8_and_10_sum_to_more_than_one() -> None:
    for side in SIDES:
        for severity in range(1, 6):
            radius, softness = constants("defocus_blur", severity, side)
            kernel = corrupt_blur.disk(radius, softness)
            wanted = {8: 1.012975, 10: 1.010786}.get(radius, 1.0)
            assert kernel.sum() == pytest.approx(wanted, abs=2e-6)
            assert np.array_equal(kernel, kernel[::-1]) or np.allclose(kernel, kernel[::-1], rtol=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_flat_areas_keep_their_level(name: str) -> None:
    levels = torch.arange(256, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 46, 46)
    for severity in range(1, 6):
        assert torch.equal(corrupt(levels, name, severity), levels)


def test_motion_blur_goes_to_one_side_by_whole_pixels() -> None:
    image = torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
    image[:, :, 32, 40] = 255
    for index in range(20):
        trace = corrupt(image, "motion_blur", 5, index=torch.tensor([index]))[0, 0]
        assert trace[32, 40] > 0 and not trace[:, 41:].any()
        # Steps of up to 45 degrees from the horizontal: near those, two of them may lead to one column.
        assert ((trace > 0).sum(0) <= 2).all() and (trace[:, :40] > 0).sum() > 5


def test_glass_blur_copies_pixels_rather_than_exchanging_them() -> None:
    drawn = torch.from_numpy(words("glass_blur", 3, 0, 0, 3 * 240 * 240)).view(1, 3, -1)
    here = torch.arange(240 * 240)
    for delta in range(1, 5):
        place = corrupt_blur._shuffle(drawn, 240, 240, delta)[0]
        row, column = here // 240, here % 240
        rim = (row <= delta) | (row > 240 - delta) | (column <= delta) | (column > 240 - delta)
        assert torch.equal(place[rim], here[rim])
        # Exchanges would keep each of the pixels; three passes of copies lose more than half.
        assert 0.2 < len(place.unique()) / len(here) < 0.5


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """Tensors that have a shape and a device but no values: to look at one raises."""
    for module in (corrupt_blur, corrupt_weather):
        monkeypatch.setattr(module, "on", lambda array, device: torch.from_numpy(array).clone().to(device))
    corrupt_weather._library.cache_clear()
    yield FakeTensorMode()
    corrupt_weather._library.cache_clear()


@pytest.mark.parametrize("name", ALL)
def test_a_gpu_need_not_wait_for_values(name: str, fake_gpu: FakeTensorMode) -> None:
    corrupt(picture(64, 64), name, 4)  # the tables of the host
    with fake_gpu:
        images = torch.empty(3, 3, 64, 64, dtype=torch.uint8, device="cuda")
        out = corrupt(images, name, 4, index=torch.empty(3, dtype=torch.int64, device="cuda"))
    assert out.device.type == "cuda" and out.shape == images.shape and out.dtype == torch.uint8


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_a_gpu_gives_the_picture_of_the_cpu(name: str, four_photographs: Tensor) -> None:
    for severity in range(1, 6):
        ours = corrupt(four_photographs.cuda(), name, severity, seed=3).cpu().int()
        difference = (ours - corrupt(four_photographs, name, severity, seed=3).int()).abs()
        assert difference.max() <= 1 and (difference > 0).float().mean() < 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_photographs_come_out_as_from_a_published_generator(name: str, four_photographs: Tensor) -> None:
    for severity, theirs in enumerate(PUBLISHED[name], 1):
        ours = means(four_photographs, name, severity, DRAWS.get(name, 1))
        assert ours == pytest.approx(theirs, abs=TOLERANCE[name])


def test_photographs_come_out_as_from_the_installed_generator(four_photographs: Tensor) -> None:
    peer = pytest.importorskip("imagecorruptions")
    generate: Callable[..., Any] = peer.corrupt
    for name in ("defocus_blur", "zoom_blur", "brightness"):
        for severity in range(1, 6):
            ours = corrupt(four_photographs, name, severity).permute(0, 2, 3, 1).double().numpy()
            for image, found in zip(four_photographs.permute(0, 2, 3, 1).numpy(), ours, strict=True):
                theirs = generate(image, corruption_name=name, severity=severity).astype(np.float64)
                assert abs(found - theirs).max() <= 1 and abs(found - theirs).mean() < 0.3


@pytest.mark.parametrize("name", ALL)
def test_bad_input_is_named(name: str) -> None:
    function = getattr(corrupt_blur if name in NAMES else corrupt_weather, name)
    image, index = picture(8, 8), torch.zeros(1, dtype=torch.int64)
    assert name in CORRUPTIONS
    with pytest.raises(ValueError, match=r"images must be torch.uint8, got torch.float32"):
        function(image.float(), 1, seed=0, index=index)
    with pytest.raises(ValueError, match=r"images must have shape \(B, 3, H, W\), got \(1, 1, 8, 8\)"):
        function(image[:, :1], 1, seed=0, index=index)
    with pytest.raises(ValueError, match=r"severity must be an integer in \[1, 6\), got 6"):
        function(image, 6, seed=0, index=index)
    with pytest.raises(ValueError, match=r"index must have shape \(1\), got \(2,\)"):
        function(image, 1, seed=0, index=index.repeat(2))
    with pytest.raises(ValueError, match="seed must be an integer in"):
        function(image, 1, seed=-1, index=index)
