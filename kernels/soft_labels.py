"""Labels of mollified images: how much of a label is lost (paper, equations 12, 13), and what is left (7, 8)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmoll.kernels.checks import (
    INTEGER,
    check_choice,
    check_integer,
    check_labels,
    check_number,
    check_temperature,
    check_tensor,
    check_values,
)
from fastmoll.kernels.draw import BLUR, CLEAN, NOISE, PURE_NOISE

KINDS = ("smooth", "temper")


class SoftLabels(NamedTuple):
    """Soft labels of ``B`` images in their short form, as :func:`soft_labels` would write them out for ``K`` classes.

    A few numbers an image instead of ``K``: ``(1 - γ) y + γ/K`` (``"smooth"``; paper, equation 8) or ``(1 - γ) y``
    (``"temper"``; equation 7), with ``y = onehot(label)`` or, for mixed images,
    ``y = λ onehot(label) + (1 - λ) onehot(partner)``.

    Attributes:
        label: classes, int64 ``(B,)``.
        gamma: label decay, floating point ``(B,)``, in [0, 1].
        partner: classes that the images were mixed with, int64 ``(B,)``; None: not mixed.
        lam: share of ``label`` in ``y``, floating point ``(B,)``, in [0, 1]; None if and only if ``partner`` is.
        kind: ``"smooth"`` or ``"temper"``.
    """

    label: Tensor
    gamma: Tensor
    partner: Tensor | None = None
    lam: Tensor | None = None
    kind: str = "smooth"

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> SoftLabels:
        """The same on another device; arguments as for :meth:`torch.Tensor.to`."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=non_blocking)
            for name, value in self._asdict().items()
            if isinstance(value, Tensor)
        }
        return self._replace(**moved)


def label_decay(role: Tensor, t: Tensor, *, k_noise: float = 1.0, k_blur: float = 1.0) -> Tensor:
    """The label decay ``γ``: the part of a label that is lost.

    - clean: 0;
    - noise: ``(1 / (1 + α²/σ²))^k = sin(πt/2)^(2k)`` (paper, equation 12, without its 0/0 at ``t = 0``);
    - blur: ``t^k`` (paper, equation 13);
    - pure noise: 1.

    ``k = 0`` means ``γ = 1`` at every temperature, ``t = 0`` included: the limit of what the formulas say for
    ``t > 0``.

    Args:
        role: integer tensor, any shape, values 0 clean, 1 noise, 2 blur, 3 pure noise.
        t: temperatures in [0, 1], floating point, same shape and device.
        k_noise: slope for noise, finite, at least 0.
        k_blur: slope for blur, finite, at least 0.

    Returns:
        ``γ`` in [0, 1], the shape of ``t``; float64 for float64 ``t``, float32 for all others.

    Raises:
        ValueError: an argument outside the ranges above.
    """
    k_noise = check_number("k_noise", k_noise, at_least=0.0)
    k_blur = check_number("k_blur", k_blur, at_least=0.0)
    check_tensor("role", role, None, INTEGER, None)
    check_values("role", role, (role >= CLEAN) & (role <= PURE_NOISE), f"lie in [{CLEAN}, {PURE_NOISE}]")
    check_temperature("t", t, tuple(role.shape), role.device)
    t = t.to(torch.promote_types(t.dtype, torch.float32))
    gamma = (role == PURE_NOISE).to(t.dtype)
    gamma = torch.where(role == NOISE, torch.sin(t * (math.pi / 2)) ** (2.0 * k_noise), gamma)
    return torch.where(role == BLUR, t**k_blur, gamma)


def soft_labels(
    labels: Tensor,
    gamma: Tensor,
    num_classes: int,
    *,
    kind: str = "smooth",
    partner: Tensor | None = None,
    lam: Tensor | None = None,
) -> Tensor:
    """Degrade labels by ``γ``, those of mixed images too.

    - ``"smooth"``: ``(1 - γ) y + γ/K`` (paper, equation 8);
    - ``"temper"``: ``(1 - γ) y`` (paper, equation 7).

    ``y`` is the label, or ``λ`` of it and ``1 - λ`` of the partner's.

    Args:
        labels: classes ``(B,)`` int64 in [0, K), or labels that are soft already, ``(B, K)`` floating point, finite and
            not negative (as MixUp or CutMix give them).
        gamma: label decay ``(B,)``, floating point, in [0, 1], on labels' device.
        num_classes: ``K``, at least 2.
        kind: ``"smooth"`` or ``"temper"``.
        partner: positions in the batch, int64 ``(B,)``: whose labels to mix in.
        lam: share of the image's own label, floating point ``(B,)``, in [0, 1]; given if and only if ``partner`` is.

    Returns:
        Targets ``(B, K)``; float64 for float64 ``gamma``, float32 for all others.

    Raises:
        ValueError: an argument outside the ranges above.
    """
    check_choice("kind", kind, KINDS)
    check_integer("num_classes", num_classes, 2)
    check_labels(labels, num_classes, None, None)
    batch, device = len(labels), labels.device
    check_temperature("gamma", gamma, (batch,), device)
    gamma = gamma.to(torch.promote_types(gamma.dtype, torch.float32)).unsqueeze(1)
    floor = gamma / num_classes if kind == "smooth" else torch.zeros_like(gamma)
    if (partner is None) != (lam is None):
        raise ValueError(f"partner and lam must be given together, got {'lam' if partner is None else 'partner'} alone")
    if partner is not None and lam is not None:
        check_tensor("partner", partner, (batch,), (torch.int64,), device)
        check_values("partner", partner, (partner >= 0) & (partner < batch), f"lie in [0, {batch})")
        check_temperature("lam", lam, (batch,), device)
        share = lam.to(gamma.dtype).unsqueeze(1)
        if labels.dim() == 1:
            mixed = gamma.new_zeros(batch, num_classes).scatter_(1, labels.unsqueeze(1), share)
            labels = mixed.scatter_add_(1, labels[partner].unsqueeze(1), 1.0 - share)
        else:
            labels = labels.to(gamma.dtype)
            labels = share * labels + (1.0 - share) * labels[partner]
    if labels.dim() == 2:
        return torch.addcmul(floor, 1.0 - gamma, labels.to(gamma.dtype))
    return floor.repeat(1, num_classes).scatter_(1, labels.unsqueeze(1), 1.0 - gamma + floor)
