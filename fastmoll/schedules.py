"""Schedules of the mollification as tables and functions: what `fastmoll.Mollify` takes in place of the paper's."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy.special import betainccinv, betaincinv
from torch import Tensor

from fastmoll.kernels.checks import FLOATING, check_temperature, check_tensor, check_values
from fastmoll.kernels.draw import BLUR, LOGIT_LIMIT
from fastmoll.kernels.heat_blur import resolve_scales

_NODES = 4097


def beta_quantiles(a: float, b: float, nodes: int = _NODES) -> Tensor:
    """The quantile table of ``Beta(a, b)`` that :func:`fastmoll.kernels.draw.draw` interpolates.

    Args:
        a: first shape parameter, positive.
        b: second shape parameter, positive.
        nodes: table size; 4097 keeps the interpolated temperature within 5e-6 of the exact quantile for ``a, b >= 0.5``
            and within 5e-5 for ``a, b >= 0.1``.

    Returns:
        float64 ``(nodes,)``, ascending, in [0, 1]: quantiles at equally spaced logits from ``-LOGIT_LIMIT`` to
        ``LOGIT_LIMIT``.

    Raises:
        ValueError: SciPy cannot invert this distribution.
    """
    logits = np.linspace(-LOGIT_LIMIT, LOGIT_LIMIT, nodes)
    # From the upper tail where that is the smaller one: 1 - u would round its last bits away.
    tail = 1.0 / (1.0 + np.exp(np.abs(logits)))
    table = np.where(logits < 0.0, betaincinv(a, b, tail), betainccinv(a, b, tail))
    if not np.all((table >= 0.0) & (table <= 1.0)):
        raise ValueError(f"beta must be a distribution whose quantiles can be computed, got ({a}, {b})")
    return torch.from_numpy(np.maximum.accumulate(table))


def quantiles_of(temperature: Callable[[Tensor], Tensor], nodes: int = _NODES) -> Tensor:
    """The table of :func:`beta_quantiles` for any distribution.

    Args:
        temperature: its quantile function: of ``u`` in (0, 1), float64 ``(nodes,)``, temperatures in [0, 1].
        nodes: table size.

    Returns:
        float64 ``(nodes,)``.

    Raises:
        ValueError: the function gives something else.
    """
    table = temperature(
        torch.sigmoid(torch.linspace(-LOGIT_LIMIT, LOGIT_LIMIT, nodes, dtype=torch.float64, device="cpu"))
    )
    check_temperature("temperature(u)", table, (nodes,), torch.device("cpu"))
    return table.detach().double()


def decay_of(label_decay: Callable[[Tensor, Tensor], Tensor], role: Tensor, t: Tensor) -> Tensor:
    """``label_decay(role, t)``, as float32.

    Args:
        label_decay: the label decay ``γ`` in [0, 1].
        role: int8 ``(B,)``.
        t: float32 ``(B,)``.

    Raises:
        ValueError: the function gives something else.
    """
    gamma = label_decay(role, t.clone())  # the images need t as it is, and a function may work in place
    check_temperature("label_decay(role, t)", gamma, (len(t),), t.device)
    return gamma.detach().float()


def blur_temperature(
    blur_scale: Callable[[Tensor], Tensor],
    role: Tensor,
    t: Tensor,
    sigma_min: float,
    sigma_max: float | None,
    width: int,
) -> Tensor:
    """The temperatures at which the paper's blur scale (equation 6) is what another function says at ``t``.

    Args:
        blur_scale: scales in pixels, from ``sigma_min`` to ``sigma_max``.
        role: int8 ``(B,)``; only those of blurred images change, and only what the function says of them counts.
        t: float32 ``(B,)``.
        sigma_min: as in :func:`fastmoll.kernels.heat_blur.resolve_scales`.
        sigma_max: likewise.
        width: of the images, pixels.

    Returns:
        float32 ``(B,)``, in [0, 1].

    Raises:
        ValueError: the function gives something else.
    """
    low, high = resolve_scales(sigma_min, sigma_max, width)
    sigma = blur_scale(t.clone())
    check_tensor("blur_scale(t)", sigma, (len(t),), FLOATING, t.device)
    sigma, blurred = sigma.detach().double(), role == BLUR
    # The ends may be off by the rounding of a function that computes in float32.
    inside = (sigma >= low * (1.0 - 1e-5)) & (sigma <= high * (1.0 + 1e-5))
    check_values("blur_scale(t)", sigma, inside | ~blurred, f"lie in [sigma_min, sigma_max] = [{low}, {high}]")
    place = (torch.log(sigma / low) / max(math.log(high / low), 1e-30)).clamp(0.0, 1.0)
    return torch.where(blurred, place.float(), t)


class Table:
    """A table or None, copied to each device once."""

    def __init__(self, table: Tensor | None) -> None:
        """Keep a table that is on the CPU."""
        self._copies = {} if table is None else {table.device: table}

    def on(self, device: torch.device) -> Tensor | None:
        """The table on ``device``."""
        if self._copies and device not in self._copies:
            self._copies[device] = self._copies[torch.device("cpu")].to(device)
        return self._copies.get(device)
