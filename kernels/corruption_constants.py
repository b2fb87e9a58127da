"""The fifteen corruptions of Hendrycks and Dietterich (ICLR 2019): names, groups, severities, published constants.

The constants are those of the scripts that made CIFAR-10-C (32 pixels), TinyImageNet-C (64) and ImageNet-C (224). They
differ between the three: none follows from another by scaling.

====================  =========================================================================================
corruption            constants of a severity
====================  =========================================================================================
`gaussian_noise`      standard deviation, of values in [0, 1]
`shot_noise`          photons of a white pixel
`impulse_noise`       share of values that become salt or pepper
`defocus_blur`        radius of the disk and standard deviation of the Gaussian that softens its rim, pixels
`glass_blur`          standard deviation of the Gaussian and largest offset, pixels; passes
`motion_blur`         radius (2⌈r⌉+1 taps) and standard deviation of the half Gaussian over them, pixels
`zoom_blur`           the zoom factors themselves, one of them 1
`snow`                mean and standard deviation of the layer, its zoom, threshold, radius and sigma of the motion,
                      share of the image that stays
`frost`               weights of image and texture
`fog`                 height of the fog, decay of its roughness
`brightness`          added to the value (HSV), of values in [0, 1]
`contrast`            factor of the difference to the mean
`elastic_transform`   height and smoothness of the displacements, largest shift of the affine map's corners, pixels
`pixelate`            share of the side that stays
`jpeg_compression`    quality, 1 to 100
====================  =========================================================================================
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

GROUPS: Final[dict[str, tuple[str, ...]]] = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
}
"""The names by group."""

CORRUPTIONS: Final[tuple[str, ...]] = tuple(name for names in GROUPS.values() for name in names)
"""The names; a corruption's number is its position here."""

SEVERITIES: Final = (1, 2, 3, 4, 5)

SIZES: Final = (32, 64, 224)
"""Pixels of the sides for which constants were published."""

Row = tuple[float, ...]


def _each(*values: float) -> tuple[Row, ...]:
    return tuple((value,) for value in values)


def _factors(*ranges: tuple[float, float]) -> tuple[Row, ...]:
    """From 1 up to a bound that is left out, in steps, as NumPy counts and rounds them.

    It counts one more than the bounds suggest where their difference is a whole number of steps and a rounding above
    it: that entry belongs to the published sets. Rounding decides over sizes too: 224 / 1.12 is just below 200.
    """
    return tuple(tuple(np.arange(1, bound, step).tolist()) for bound, step in ranges)


def _elastic(side: int, *rows: Row) -> tuple[Row, ...]:
    return tuple(tuple(side * share for share in row) for row in rows)


_CONSTANTS: Final[dict[str, dict[int, tuple[Row, ...]]]] = {
    "gaussian_noise": {
        32: _each(0.04, 0.06, 0.08, 0.09, 0.10),
        64: _each(0.04, 0.08, 0.12, 0.15, 0.18),
        224: _each(0.08, 0.12, 0.18, 0.26, 0.38),
    },
    "shot_noise": {
        32: _each(500, 250, 100, 75, 50),
        64: _each(250, 100, 50, 30, 15),
        224: _each(60, 25, 12, 5, 3),
    },
    "impulse_noise": {
        32: _each(0.01, 0.02, 0.03, 0.05, 0.07),
        64: _each(0.01, 0.02, 0.05, 0.08, 0.14),
        224: _each(0.03, 0.06, 0.09, 0.17, 0.27),
    },
    "defocus_blur": {
        32: ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        64: ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
        224: ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    },
    "glass_blur": {
        32: ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        64: ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
        224: ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    },
    "motion_blur": {
        32: ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        64: ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
        224: ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    },
    "zoom_blur": {
        32: _factors((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        64: _factors((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        224: _factors((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
    },
    "snow": {
        32: (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        64: (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
        ),
        224: (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
    },
    "frost": {
        32: ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
        64: ((1, 0.3), (0.9, 0.4), (0.8, 0.45), (0.75, 0.5), (0.7, 0.55)),
        224: ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
    },
    "fog": {
        32: ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        64: ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)),
        224: ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    },
    "brightness": {
        32: _each(0.05, 0.1, 0.15, 0.2, 0.3),
        64: _each(0.1, 0.2, 0.3, 0.4, 0.5),
        224: _each(0.1, 0.2, 0.3, 0.4, 0.5),
    },
    "contrast": {
        32: _each(0.75, 0.5, 0.4, 0.3, 0.15),
        64: _each(0.4, 0.3, 0.2, 0.1, 0.05),
        224: _each(0.4, 0.3, 0.2, 0.1, 0.05),
    },
    "elastic_transform": {
        32: _elastic(32, (0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
        64: _elastic(64, (0, 0, 0.08), (0.05, 0.3, 0.06), (0.1, 0.08, 0.06), (0.1, 0.03, 0.03), (0.16, 0.03, 0.02)),
        # The published script has 244 here, a slip of the pen for 224 that became the benchmark's definition.
        224: _elastic(244, (2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)),
    },
    "pixelate": {
        32: _each(0.95, 0.9, 0.85, 0.75, 0.65),
        64: _each(0.9, 0.8, 0.7, 0.6, 0.5),
        224: _each(0.6, 0.5, 0.4, 0.3, 0.25),
    },
    "jpeg_compression": {
        32: _each(80, 65, 58, 50, 40),
        64: _each(65, 58, 50, 40, 25),
        224: _each(25, 18, 15, 10, 7),
    },
}


def published_size(size: int) -> int:
    """The side for which constants were published that is nearest to ``size`` in ratio, the smaller one at a tie."""
    from fastmoll.kernels.checks import check_integer  # here: the names alone should not wait for torch

    check_integer("size", size, 1)
    return min(SIZES, key=lambda side: abs(math.log(size / side)))


def constants(corruption: str, severity: int, size: int) -> tuple[float, ...]:
    """The published constants of a corruption, as in the table above.

    Args:
        corruption: one of `CORRUPTIONS`.
        severity: 1 to 5.
        size: the shorter side of the images, pixels. Of 1 to 45 those for 32 are taken, of 46 to 119 those for 64, and
            above that those for 224.

    Raises:
        ValueError: an unknown corruption, a severity outside 1 to 5, a size below 1.
    """
    _check(corruption, severity)
    return tuple(float(value) for value in _CONSTANTS[corruption][published_size(size)][severity - 1])


def cell(corruption: str, severity: int) -> int:
    """The number of a corruption at a severity, in the epoch's place in the counter of its draws.

    It is ``8 * number + severity``: below 2^24, and never the same for two cells.
    """
    _check(corruption, severity)
    return 8 * CORRUPTIONS.index(corruption) + severity


def _check(corruption: str, severity: int) -> None:
    from fastmoll.kernels.checks import check_choice, check_integer  # here, as above

    check_choice("corruption", corruption, CORRUPTIONS)
    check_integer("severity", severity, SEVERITIES[0], SEVERITIES[-1] + 1)
