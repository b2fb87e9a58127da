"""The names and the published constants of the corruptions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastmoll.kernels.corruption_constants import (
    CORRUPTIONS,
    GROUPS,
    SEVERITIES,
    SIZES,
    cell,
    constants,
    published_size,
)
from fastmoll.kernels.philox import EPOCH_BITS


def test_names_are_the_fifteen_of_the_benchmark_in_four_groups() -> None:
    assert CORRUPTIONS == (
        *("gaussian_noise", "shot_noise", "impulse_noise"),
        *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
        *("snow", "frost", "fog", "brightness"),
        *("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    )
    assert [len(names) for names in GROUPS.values()] == [3, 4, 4, 4]
    assert list(GROUPS) == ["noise", "blur", "weather", "digital"]
    assert SEVERITIES == (1, 2, 3, 4, 5)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_cell_has_constants_of_one_form_for_each_published_size(name: str) -> None:
    lengths = {len(constants(name, severity, size)) for severity in SEVERITIES for size in SIZES}
    assert len(lengths) == (1 if name != "zoom_blur" else len({7, 12, 16, 21, 26, 11, 13}))
    assert all(
        isinstance(value, float) and value >= 0
        for s in SEVERITIES
        for size in SIZES
        for value in constants(name, s, size)
    )


# Read off the published scripts, where the sizes differ most.
@pytest.mark.parametrize(
    ("name", "severity", "size", "expected"),
    [
        ("gaussian_noise", 5, 32, (0.10,)),
        ("gaussian_noise", 5, 224, (0.38,)),
        ("shot_noise", 1, 32, (500,)),
        ("shot_noise", 5, 64, (15,)),
        ("impulse_noise", 4, 224, (0.17,)),
        ("defocus_blur", 5, 224, (10, 0.5)),
        ("glass_blur", 3, 224, (1, 2, 3)),
        ("motion_blur", 5, 64, (12, 3)),
        ("snow", 5, 32, (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8)),
        ("frost", 2, 64, (0.9, 0.4)),
        ("fog", 3, 224, (2.5, 1.7)),
        ("brightness", 5, 32, (0.3,)),
        ("contrast", 1, 32, (0.75,)),
        ("contrast", 1, 64, (0.4,)),
        ("elastic_transform", 1, 32, (0, 0, 2.56)),
        ("elastic_transform", 1, 224, (488, 170.8, 24.4)),
        ("elastic_transform", 5, 64, (10.24, 1.92, 1.28)),
        ("pixelate", 1, 32, (0.95,)),
        ("jpeg_compression", 5, 224, (7,)),
        ("jpeg_compression", 5, 64, (25,)),
    ],
)
def test_constants_are_the_published_ones(name: str, severity: int, size: int, expected: tuple[float, ...]) -> None:
    assert constants(name, severity, size) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("size", "bounds", "step", "counts"),
    [
        (32, (1.06, 1.11, 1.16, 1.21, 1.26), (0.01,) * 5, (7, 12, 16, 21, 26)),
        (64, (1.06, 1.11, 1.16, 1.21, 1.26), (0.01,) * 5, (7, 12, 16, 21, 26)),
        (224, (1.11, 1.16, 1.21, 1.26, 1.31), (0.01, 0.01, 0.02, 0.02, 0.03), (12, 16, 11, 13, 11)),
    ],
)
def test_zoom_factors_are_numpys_with_the_entry_that_rounding_adds(
    size: int, bounds: tuple[float, ...], step: tuple[float, ...], counts: tuple[int, ...]
) -> None:
    for severity, (bound, width, count) in enumerate(zip(bounds, step, counts, strict=True), 1):
        factors = constants("zoom_blur", severity, size)
        assert factors == tuple(np.arange(1, bound, width))
        assert len(factors) == count


@pytest.mark.parametrize(
    ("size", "published"),
    [(1, 32), (28, 32), (45, 32), (46, 64), (96, 64), (119, 64), (120, 224), (224, 224), (512, 224)],
)
def test_other_sizes_take_the_nearest_in_ratio(size: int, published: int) -> None:
    assert published_size(size) == published
    assert constants("shot_noise", 2, size) == constants("shot_noise", 2, published)


def test_cells_have_numbers_of_their_own_that_fit_the_counter() -> None:
    numbers = {cell(name, severity) for name in CORRUPTIONS for severity in SEVERITIES}
    assert len(numbers) == 75
    assert max(numbers) < 2**EPOCH_BITS
    assert cell("gaussian_noise", 1) == 1
    assert cell("jpeg_compression", 5) == 117


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gaussian", 1, 32), "corruption must be one of .*got 'gaussian'"),
        (("fog", 0, 32), r"severity must be an integer in \[1, 6\), got 0"),
        (("fog", 6, 32), "severity must be .*got 6"),
        (("fog", 1.5, 32), "severity must be .*got 1.5"),
        (("fog", 1, 0), "size must be .*got 0"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        constants(*arguments)
