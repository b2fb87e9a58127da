"""The published augmentation policies as data: operations, magnitudes and sub-policies, with torchvision's numbers.

Two programs read these tables, so that both draw from the same distributions: `fastmoll.Augment`, which works on
batches of decoded images, and the DALI graphs (:mod:`fastmoll.pipelines.dali_policies`).

Sources: AutoAugment (arXiv 1805.09501), RandAugment (1909.13719), TrivialAugment (2103.10158), AugMix (1912.02781).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

POLICIES: Final = ("rand", "auto", "trivial", "augmix")

ROTATION: Final = 15.0
"""Largest rotation of ``fcr``, degrees."""

RAND_OPERATIONS: Final = 2
RAND_BIN: Final = 9
AUGMIX_SEVERITY: Final = 3
AUGMIX_WIDTH: Final = 3
AUGMIX_DEPTH: Final = 3


class Range(NamedTuple):
    """What an operation can be given.

    Attributes:
        magnitudes: float32 ``(bins,)``, from weakest to strongest, as :mod:`fastmoll.kernels.image_ops` takes them;
            None for an operation without.
        signed: Whether the sign is drawn, too, each with probability 1/2.
    """

    magnitudes: Tensor | None
    signed: bool


class _Limits(NamedTuple):
    bins: int
    shear: float
    translate_x: float
    translate_y: float
    rotate: float
    enhance: float
    bits: int  # that the weakest Posterize leaves
    bits_lost: int  # more, in the strongest
    others: tuple[str, ...]


def ranges(policy: str, height: int, width: int) -> dict[str, Range]:
    """The operations of a policy, in the order they are numbered in, and their magnitudes.

    Args:
        policy: one of `POLICIES`.
        height: of the images, pixels.
        width: likewise.
    """
    plain = ("AutoContrast", "Equalize")
    # Not simplified: the largest shift is truncated to whole pixels, and must fall on torchvision's side of one.
    fraction = 150.0 / 331.0
    limits = {
        "rand": _Limits(31, 0.3, fraction * width, fraction * height, 30.0, 0.9, 8, 4, ("Identity", *plain)),
        "auto": _Limits(10, 0.3, fraction * width, fraction * height, 30.0, 0.9, 8, 4, (*plain, "Invert")),
        "trivial": _Limits(31, 0.99, 32.0, 32.0, 135.0, 0.99, 8, 6, ("Identity", *plain)),
        "augmix": _Limits(10, 0.3, width / 3.0, height / 3.0, 30.0, 0.9, 4, 4, plain),
    }[policy]

    def line(end: float) -> Range:
        return Range(torch.linspace(0.0, end, limits.bins, dtype=torch.float32, device="cpu"), True)

    bits = limits.bits - torch.arange(limits.bins, dtype=torch.float32, device="cpu") / (
        (limits.bins - 1) / limits.bits_lost
    )
    return {
        "ShearX": line(limits.shear),
        "ShearY": line(limits.shear),
        "TranslateX": line(limits.translate_x),
        "TranslateY": line(limits.translate_y),
        "Rotate": line(limits.rotate),
        **{name: line(limits.enhance) for name in ("Brightness", "Color", "Contrast", "Sharpness")},
        "Posterize": Range(bits.round(), False),
        "Solarize": Range(torch.linspace(1.0, 0.0, limits.bins, dtype=torch.float32, device="cpu"), False),
        **{name: Range(None, False) for name in limits.others},
    }


Step = tuple[str, float, int | None]
"""Operation, probability, bin of the magnitude."""

AUTO_AUGMENT: Final[dict[str, tuple[tuple[Step, Step], ...]]] = {
    "imagenet": (
        (("Posterize", 0.4, 8), ("Rotate", 0.6, 9)),
        (("Solarize", 0.6, 5), ("AutoContrast", 0.6, None)),
        (("Equalize", 0.8, None), ("Equalize", 0.6, None)),
        (("Posterize", 0.6, 7), ("Posterize", 0.6, 6)),
        (("Equalize", 0.4, None), ("Solarize", 0.2, 4)),
        (("Equalize", 0.4, None), ("Rotate", 0.8, 8)),
        (("Solarize", 0.6, 3), ("Equalize", 0.6, None)),
        (("Posterize", 0.8, 5), ("Equalize", 1.0, None)),
        (("Rotate", 0.2, 3), ("Solarize", 0.6, 8)),
        (("Equalize", 0.6, None), ("Posterize", 0.4, 6)),
        (("Rotate", 0.8, 8), ("Color", 0.4, 0)),
        (("Rotate", 0.4, 9), ("Equalize", 0.6, None)),
        (("Equalize", 0.0, None), ("Equalize", 0.8, None)),
        (("Invert", 0.6, None), ("Equalize", 1.0, None)),
        (("Color", 0.6, 4), ("Contrast", 1.0, 8)),
        (("Rotate", 0.8, 8), ("Color", 1.0, 2)),
        (("Color", 0.8, 8), ("Solarize", 0.8, 7)),
        (("Sharpness", 0.4, 7), ("Invert", 0.6, None)),
        (("ShearX", 0.6, 5), ("Equalize", 1.0, None)),
        (("Color", 0.4, 0), ("Equalize", 0.6, None)),
        (("Equalize", 0.4, None), ("Solarize", 0.2, 4)),
        (("Solarize", 0.6, 5), ("AutoContrast", 0.6, None)),
        (("Invert", 0.6, None), ("Equalize", 1.0, None)),
        (("Color", 0.6, 4), ("Contrast", 1.0, 8)),
        (("Equalize", 0.8, None), ("Equalize", 0.6, None)),
    ),
    "cifar10": (
        (("Invert", 0.1, None), ("Contrast", 0.2, 6)),
        (("Rotate", 0.7, 2), ("TranslateX", 0.3, 9)),
        (("Sharpness", 0.8, 1), ("Sharpness", 0.9, 3)),
        (("ShearY", 0.5, 8), ("TranslateY", 0.7, 9)),
        (("AutoContrast", 0.5, None), ("Equalize", 0.9, None)),
        (("ShearY", 0.2, 7), ("Posterize", 0.3, 7)),
        (("Color", 0.4, 3), ("Brightness", 0.6, 7)),
        (("Sharpness", 0.3, 9), ("Brightness", 0.7, 9)),
        (("Equalize", 0.6, None), ("Equalize", 0.5, None)),
        (("Contrast", 0.6, 7), ("Sharpness", 0.6, 5)),
        (("Color", 0.7, 7), ("TranslateX", 0.5, 8)),
        (("Equalize", 0.3, None), ("AutoContrast", 0.4, None)),
        (("TranslateY", 0.4, 3), ("Sharpness", 0.2, 6)),
        (("Brightness", 0.9, 6), ("Color", 0.2, 8)),
        (("Solarize", 0.5, 2), ("Invert", 0.0, None)),
        (("Equalize", 0.2, None), ("AutoContrast", 0.6, None)),
        (("Equalize", 0.2, None), ("Equalize", 0.6, None)),
        (("Color", 0.9, 9), ("Equalize", 0.6, None)),
        (("AutoContrast", 0.8, None), ("Solarize", 0.2, 8)),
        (("Brightness", 0.1, 3), ("Color", 0.7, 0)),
        (("Solarize", 0.4, 5), ("AutoContrast", 0.9, None)),
        (("TranslateY", 0.9, 9), ("TranslateY", 0.7, 9)),
        (("AutoContrast", 0.9, None), ("Solarize", 0.8, 3)),
        (("Equalize", 0.8, None), ("Invert", 0.1, None)),
        (("TranslateY", 0.7, 9), ("AutoContrast", 0.9, None)),
    ),
}
"""The sub-policies that AutoAugment found on each data set: 25 pairs, one of which is drawn an image."""
