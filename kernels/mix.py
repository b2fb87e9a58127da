"""MixUp and CutMix: what a batch is mixed with (drawn here), and the mixing itself.

As in torchvision's ``v2.MixUp`` and ``v2.CutMix``, which the paper's experiments use, a batch has one ``λ`` and one
box, and each image is mixed with the one before it, the first with the last. A training loader has shuffled the batch,
so this is as good as any other permutation without fixed points.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from fastmoll.kernels import philox
from fastmoll.kernels.checks import check_choice, check_integer, check_number
from fastmoll.kernels.draw import beta_quantile, uniform_double
from fastmoll.kernels.image_ops import upload

MIXES: Final = ("mixup", "cutmix")


class Mix(NamedTuple):
    """What each image of a batch is mixed with.

    Attributes:
        partner: positions in the batch, int64 ``(B,)``.
        lam: share of the image itself, float32 ``(B,)`` in [0, 1]: of its pixels' values in MixUp, of their number in
            CutMix, and of its label in both.
        box: CutMix: ``y0, y1, x0, x1``, where the partner is seen, int32 ``(B, 4)``; None in MixUp.
    """

    partner: Tensor
    lam: Tensor
    box: Tensor | None

    def on(self, device: torch.device) -> Mix:
        """The same on ``device``, without the host waiting."""
        box = None if self.box is None else upload(self.box, device)
        return Mix(upload(self.partner, device), upload(self.lam, device), box)

    def of_images(self) -> dict[str, Tensor]:
        """The arguments that say how images are mixed: ``partner`` and one of ``lam`` and ``box``."""
        return {"partner": self.partner} | ({"lam": self.lam} if self.box is None else {"box": self.box})

    def of_labels(self) -> dict[str, Tensor]:
        """The arguments that say how labels are mixed: ``partner`` and ``lam``."""
        return {"partner": self.partner, "lam": self.lam}


def partners(values: Tensor) -> Tensor:
    """What each entry of a batch, along its first axis, is mixed with."""
    return values.roll(1, 0)


def draw_mix(
    index: Tensor,
    epoch: int = 0,
    *,
    kind: str,
    height: int,
    width: int,
    seed: int = 0,
    alpha: float = 1.0,
    quantiles: Tensor | None = None,
) -> Mix:
    """Draw how a batch is mixed, from block 0 of the ``MIX`` stream of its first sample.

    ``λ ~ Beta(α, α)`` comes from word 0. CutMix takes the centre of its box, uniform over the pixels, from words 1 and
    2; the box has the shape of the image and ``1 - λ`` of its area, less what lies outside, and ``λ`` becomes the share
    that is left.

    Args:
        index: sample ids, integer ``(B,)``, in [0, 2^48), in the order of the batch.
        epoch: int in [0, 2^24).
        kind: ``"mixup"`` or ``"cutmix"``.
        height: of the images, pixels.
        width: of the images, pixels.
        seed: int in [0, 2^64).
        alpha: ``α``, positive; 1 means a uniform ``λ``.
        quantiles: float64 ``(n,)``, needed unless ``α = 1``: see :func:`fastmoll.kernels.draw.draw`.

    Returns:
        The mixture, on index's device.

    Raises:
        ValueError: an argument outside the ranges above.
    """
    check_choice("kind", kind, MIXES)
    height, width = check_integer("height", height, 1), check_integer("width", width, 1)
    alpha = check_number("alpha", alpha, above=0.0)
    philox.check_key(seed, epoch, index)
    batch, device = len(index), index.device
    partner = partners(torch.arange(batch, device=device))
    words = philox.sample_words(index[:1], epoch, seed=seed, purpose=philox.MIX, blocks=1)
    first, second, third, _ = (word.squeeze(1) for word in words)
    lam = beta_quantile(uniform_double(first), (alpha, alpha), quantiles).float()
    box = None
    if kind == "cutmix":
        # In float64 of a float32 λ, whose last bit may only depend on the device where α is not 1.
        half = 0.5 * torch.sqrt(1.0 - lam.double())
        y0, y1 = _edges(second * height >> 32, half, height)
        x0, x1 = _edges(third * width >> 32, half, width)
        lam = (1.0 - ((y1 - y0) * (x1 - x0)).double() / (height * width)).float()
        box = torch.stack((y0, y1, x0, x1), 1).to(torch.int32).expand(batch, 4).contiguous()
    return Mix(partner, lam.expand(batch).contiguous(), box)


def _edges(centre: Tensor, half: Tensor, size: int) -> tuple[Tensor, Tensor]:
    reach = (half * size).long()
    return (centre - reach).clamp(min=0), (centre + reach).clamp(max=size)


def mix_images(x: Tensor, partner: Tensor, *, lam: Tensor | None = None, box: Tensor | None = None) -> Tensor:
    """Mix images with others of their batch, in their own dtype.

    Args:
        x: floating point ``(B, C, H, W)``.
        partner: int64 ``(B,)``, positions in the batch.
        lam: floating point ``(B,)``: ``λ x + (1 - λ) x'`` (MixUp).
        box: integer ``(B, 4)``, ``y0, y1, x0, x1``: the partner's pixels inside of it (CutMix). One of both is given.

    Returns:
        A new tensor like ``x``.
    """
    other = x[partner]
    if lam is not None:
        weight = lam.to(x.dtype).view(-1, 1, 1, 1)
        return weight * x + (1.0 - weight) * other
    assert box is not None
    y0, y1, x0, x1 = box.view(-1, 4, 1, 1, 1).unbind(1)
    row = torch.arange(x.shape[2], device=x.device).view(-1, 1)
    column = torch.arange(x.shape[3], device=x.device)
    return torch.where((row >= y0) & (row < y1) & (column >= x0) & (column < x1), other, x)
