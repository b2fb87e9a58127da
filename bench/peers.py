"""What mollification is measured against."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmoll.kernels.draw import BLUR, NOISE
from fastmoll.kernels.heat_blur import blur_scale


class DenseDCT:
    """The way of the paper's published code: dense cosine transforms and a boolean mask a role, in place.

    The blur is two linear layers (one an axis) to the cosine coefficients, their decay, and two layers back. Images of
    one role are gathered by a boolean mask and scattered back; noise is ``torch.randn_like``.

    Args:
        size: height and width of the images.
        device: where they are.
        compiled: put the arithmetic of both roles through ``torch.compile``; masks would break its graphs.
    """

    def __init__(self, size: int, device: torch.device, compiled: bool = False) -> None:
        k = torch.arange(size, dtype=torch.float64)
        transform = math.sqrt(2 / size) * torch.cos(math.pi / size * k.unsqueeze(1) * (k + 0.5))
        transform[0] /= math.sqrt(2)
        frequency = (math.pi / size * k) ** 2
        self.size = size
        self.forward = transform.float().to(device)
        self.inverse = transform.T.float().contiguous().to(device)
        self.decay = (frequency.unsqueeze(1) + frequency).float().to(device)
        self._noised = torch.compile(self.noised) if compiled else self.noised
        self._blurred = torch.compile(self.blurred) if compiled else self.blurred

    @staticmethod
    def _both_axes(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(F.linear(x, weight).transpose(-1, -2), weight).transpose(-1, -2)

    @staticmethod
    def noised(x: Tensor, t: Tensor) -> Tensor:
        """Noise images ``(B, C, H, W)`` at temperatures ``(B,)``."""
        quarter = (math.pi / 2) * t.view(-1, 1, 1, 1)
        return torch.cos(quarter) * x + torch.sin(quarter) * torch.randn_like(x)

    def blurred(self, x: Tensor, t: Tensor) -> Tensor:
        """Blur images ``(B, C, size, size)`` at temperatures ``(B,)``."""
        time = blur_scale(t, 0.3, self.size).square() / 2
        decay = torch.exp(-self.decay * time.view(-1, 1, 1, 1))
        return self._both_axes(decay * self._both_axes(x, self.forward), self.inverse)

    @torch.no_grad()
    def __call__(self, x: Tensor, role: Tensor, t: Tensor) -> Tensor:
        """Mollify the batch ``x`` in place."""
        chosen = role == NOISE
        if chosen.any():
            x[chosen] = self._noised(x[chosen], t[chosen])
        chosen = role == BLUR
        if chosen.any():
            x[chosen] = self._blurred(x[chosen], t[chosen])
        return x
