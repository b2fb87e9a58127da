"""RandAugment, AutoAugment and TrivialAugment inside a DALI graph, on the CPU or a GPU: DALI's automatic augmentation
with torchvision's operations, magnitudes and sub-policies.

DALI's own suites are other ones: magnitudes, signs of the colour operations, the sub-policies of AutoAugment (those of
``auto_augment_image_net`` are not the published ones), grey instead of black corners, linear interpolation. What stays
DALI's are the operations themselves. On photographs they differ from torchvision's by (``tests/test_dali_augment.py``
holds every magnitude of every policy to it; mean over an image at the worst magnitude, largest at a pixel):

- Brightness, AutoContrast, Sharpness: 0.6 grey levels, 1 (rounded, not truncated); and Sharpness works on the rim of
  one pixel, too, which torchvision leaves;
- Color, Contrast: 1.2 grey levels, 3 (rounded, and other last digits of the weights of grey);
- Equalize: up to 7 grey levels, 30: the formula of OpenCV instead of Pillow's;
- shears and rotations: equal, but for pixels whose source lies halfway between two (within 1e-3 pixels);
- translations, Posterize, Solarize, Invert: equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from nvidia.dali import types
from nvidia.dali.auto_aug import augmentations as dali
from nvidia.dali.auto_aug import auto_augment, rand_augment, trivial_augment
from nvidia.dali.auto_aug.core import Policy

from fastmoll.pipelines.policies import AUTO_AUGMENT, RAND_BIN, RAND_OPERATIONS, Range, ranges

# DALI moves the image forward, torchvision says where pixels come from: shears have opposite signs.
_OPERATIONS: dict[str, tuple[Any, Callable[[float], Any] | None]] = {
    "Identity": (dali.identity, None),
    "ShearX": (dali.shear_x, lambda m: [-m, 0.0]),
    "ShearY": (dali.shear_y, lambda m: [0.0, -m]),
    "TranslateX": (dali.translate_x_no_shape, lambda m: [np.trunc(m), 0.0]),
    "TranslateY": (dali.translate_y_no_shape, lambda m: [0.0, np.trunc(m)]),
    "Rotate": (dali.rotate, None),
    "Brightness": (dali.brightness, dali.shift_enhance_range),
    "Color": (dali.color, dali.shift_enhance_range),
    "Contrast": (dali.contrast, dali.shift_enhance_range),
    "Sharpness": (dali.sharpness, dali.sharpness_kernel),
    "Posterize": (dali.posterize, dali.poster_mask_uint8),
    "Solarize": (dali.solarize, lambda m: np.float32(255.0 * m)),
    "AutoContrast": (dali.auto_contrast, None),
    "Equalize": (dali.equalize, None),
    "Invert": (dali.invert, None),
}

GEOMETRY = {"fill_value": 0, "interp_type": types.INTERP_NN}
"""How shears, translations and rotations resample: as torchvision's policies do by default."""


def operation(name: str, limits: Range) -> Any:
    """DALI's augmentation of that name with these magnitudes, which are torchvision's."""
    found, parameter = _OPERATIONS[name]
    if limits.magnitudes is None:
        return found
    return found.augmentation(
        mag_range=limits.magnitudes.numpy(), randomly_negate=limits.signed, mag_to_param=parameter, name=name
    )


def policy(name: str, size: int) -> Callable[[Any], Any]:
    """What a policy does to a node of uint8 HWC images, ``size`` pixels high and wide.

    Args:
        name: ``"rand"``, ``"auto"`` (the sub-policies found on ImageNet) or ``"trivial"``.
        size: height and width of the images, pixels.

    Returns:
        A function for a graph with ``enable_conditionals=True``.
    """
    known = {key: operation(key, limits) for key, limits in ranges(name, size, size).items()}
    suite = list(known.values())
    if name == "rand":
        return functools.partial(_rand, suite)
    if name == "trivial":
        return functools.partial(_trivial, suite)
    pairs = [
        [(known[key], probability, place) for key, probability, place in pair] for pair in AUTO_AUGMENT["imagenet"]
    ]
    return functools.partial(_auto, Policy(name="AutoAugment", num_magnitude_bins=10, sub_policies=pairs))


def _rand(suite: list[Any], images: Any) -> Any:
    return rand_augment.apply_rand_augment(suite, images, n=RAND_OPERATIONS, m=RAND_BIN, **GEOMETRY)


def _trivial(suite: list[Any], images: Any) -> Any:
    return trivial_augment.apply_trivial_augment(suite, images, **GEOMETRY)


def _auto(pairs: Policy, images: Any) -> Any:
    return auto_augment.apply_auto_augment(pairs, images, **GEOMETRY)
