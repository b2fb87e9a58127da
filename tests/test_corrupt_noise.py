"""Gaussian, shot and impulse noise against NumPy and SciPy with the same draws, and against the published generator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from photographs import figures, photographs
from scipy import stats
from torch import Tensor

from fastmoll.kernels import corrupt_noise, corruption_job, philox
from fastmoll.kernels.checks import installed
from fastmoll.kernels.corruption_constants import SEVERITIES, cell, constants

NAMES = ("gaussian_noise", "shot_noise", "impulse_noise")
SEED = 2**63 + 12345
INDEX = torch.tensor([3, 2**40 + 7, 0])

# Means, and root mean squares of the change, that imagecorruptions-imaug 1.1.5 gave on these photographs (four draws).
PUBLISHED = {
    "gaussian_noise": ((102.55, 19.47), (103.07, 28.49), (104.1, 41.09), (105.77, 56.12), (108.61, 74.68)),
    "shot_noise": ((101.67, 20.05), (100.91, 30.11), (99.54, 41.99), (96.27, 61.27), (92.54, 75.44)),
    "impulse_noise": ((103.2, 25.57), (103.95, 36.13), (104.68, 44.31), (106.73, 60.92), (109.19, 76.72)),
}


def images(height: int, width: int) -> Tensor:
    pictures = photographs(max(height, width))[[0, 5, 12], :height, :width]
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous()


def noise(name: str, x: Tensor, severity: int) -> np.ndarray:
    function: Callable[..., Tensor] = getattr(corrupt_noise, name)
    return function(x, severity, seed=SEED, index=INDEX).numpy()


def words(name: str, x: Tensor, severity: int) -> tuple[Tensor, ...]:
    blocks = -(-x[0].numel() // 4)
    return philox.sample_words(INDEX, cell(name, severity), seed=SEED, purpose=philox.CORRUPT, blocks=blocks)


# The second is no multiple of a block of four words, the third longer than what is drawn at a time.
@pytest.mark.parametrize(("height", "width"), [(32, 32), (47, 33), (64, 100)])
@pytest.mark.parametrize("severity", SEVERITIES)
def test_gaussian_noise_adds_the_normals_of_each_value(
    corruption_backend: str, height: int, width: int, severity: int
) -> None:
    x = images(height, width)
    scale = constants("gaussian_noise", severity, min(height, width))[0]
    normals = philox.normal(words("gaussian_noise", x, severity), torch.float64)[:, : x[0].numel()].reshape(x.shape)
    exact = np.clip(x.numpy() / 255.0 + scale * normals.numpy(), 0, 1) * 255
    out = noise("gaussian_noise", x, severity)
    wrong = out != exact.astype(np.uint8)
    assert np.abs(out - exact)[wrong].max(initial=0) < 1 + 1e-3
    # Only where float64 lies next to a whole number may float32 be on its other side.
    assert np.abs(exact - np.rint(exact))[wrong].max(initial=0) < 1e-3


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("size", [32, 120])
def test_shot_noise_is_the_poisson_quantile_of_each_value(corruption_backend: str, size: int, severity: int) -> None:
    x = images(size, size)
    photons = constants("shot_noise", severity, size)[0]
    uniform = torch.stack(words("shot_noise", x, severity), 2).flatten(1)[:, : x[0].numel()].reshape(x.shape)
    count = stats.poisson.ppf((uniform.numpy() + 0.5) / 2**32, x.numpy() / 255.0 * photons)
    expected = (np.clip(count / photons, 0, 1) * 255).astype(np.uint8)
    np.testing.assert_array_equal(noise("shot_noise", x, severity), expected)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_impulse_noise_strikes_the_published_share_of_values(corruption_backend: str, severity: int) -> None:
    x = images(64, 100).clamp(1, 254)
    share = constants("impulse_noise", severity, 64)[0]
    out = noise("impulse_noise", x, severity)
    uniform = torch.stack(words("impulse_noise", x, severity), 2).flatten(1)[:, : x[0].numel()].reshape(x.shape)
    level = (uniform.numpy() + 0.5) / 2**32
    np.testing.assert_array_equal(out, np.where(level < share / 2, 255, np.where(level < share, 0, x.numpy())))
    values = x.numel()
    for struck in (out == 0, out == 255):
        # Five standard deviations of a binomial count.
        assert abs(struck.sum() - values * share / 2) < 5 * np.sqrt(values * share / 2)


@pytest.mark.parametrize("photons", [3, 12, 500])
def test_table_of_photons_is_the_distribution_function(photons: int) -> None:
    limits, grey = corrupt_noise.poisson_table(photons)
    rate, count = np.arange(256)[:, None] / 255.0 * photons, np.arange(photons)
    np.testing.assert_allclose((limits.numpy() + 1) / 2**32, stats.poisson.cdf(count, rate), rtol=0, atol=2**-32)
    assert (limits.diff(dim=1) >= 0).all()
    np.testing.assert_array_equal(grey, (np.arange(photons + 1) / photons * 255).astype(np.uint8))


def test_black_stays_black_under_shot_noise(corruption_backend: str) -> None:
    black = torch.zeros(3, 3, 48, 48, dtype=torch.uint8)
    for severity in SEVERITIES:
        assert not noise("shot_noise", black, severity).any()


@pytest.mark.skipif(not installed("numba"), reason="numba is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_compiled_and_plain_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = images(100, 75)
    compiled = [noise(name, x, severity).astype(int) for severity in SEVERITIES]
    monkeypatch.setattr(corruption_job, "installed", lambda package: False)
    for severity, ours in zip(SEVERITIES, compiled, strict=True):
        apart = np.abs(ours - noise(name, x, severity))
        assert apart.max() <= (1 if name == "gaussian_noise" else 0)
        assert (apart > 0).mean() < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_means_and_changes_are_the_published_generators(name: str) -> None:
    clean = photographs()
    x = torch.from_numpy(clean).permute(0, 3, 1, 2).contiguous()
    for severity, (mean, change) in zip(SEVERITIES, PUBLISHED[name], strict=True):
        out = getattr(corrupt_noise, name)(x, severity, seed=0, index=torch.arange(len(x)))
        ours = figures(clean, out.permute(0, 2, 3, 1).numpy())
        # Three million draws: the figures scatter by less than a fifth of a level, impulse noise's by the most.
        assert ours == pytest.approx((mean, change), abs=0.4)
