"""Losses of the paper: soft, normalised and binary cross-entropy, and the likelihood of several draws of an image.

All take any form of target: classes ``(B,)``, soft labels ``(B, K)``, or :class:`fastmoll.SoftLabels`, the short form.
All compute in float64 for float64 logits and in float32 for all others, under autocast too. As in
:func:`soft_cross_entropy`, the *values* of targets are looked at on the CPU only.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmoll.kernels.checks import FLOATING, check_choice, check_tensor, check_values
from fastmoll.kernels.soft_cross_entropy import (
    REDUCTIONS,
    check_dense,
    check_short,
    soft_cross_entropy,
    soft_cross_entropy_short,
)
from fastmoll.kernels.soft_labels import SoftLabels

__all__ = [
    "augmented_likelihood",
    "binary_cross_entropy",
    "normalised_cross_entropy",
    "soft_cross_entropy",
    "soft_cross_entropy_short",
]

LIKELIHOODS: Final = ("jensen", "geometric", "log_mean", "corrected")

# ln(sinh(d/2) / (d/2)) = Σ_n B_2n d^2n / (2n (2n)!), B the Bernoulli numbers; up to |d| = 1 what follows
# these terms is below 1e-16.
_BERNOULLI: Final = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
_SERIES: Final = tuple(b / (2 * n * math.factorial(2 * n)) for n, b in enumerate(_BERNOULLI, 1))


def normalised_cross_entropy(logits: Tensor, target: Tensor | SoftLabels, *, reduction: str = "mean") -> Tensor:
    """Cross-entropy as the negative logarithm of a density over smoothed labels (paper, appendix B).

    ``-Σ_c y_c ln f_c + ln Z`` with ``f = softmax(logits)`` and ``Z = Σ_j (κ - f_j) / (ln κ - ln f_j)``, the integral of
    ``Π_c f_c^y_c`` over all smoothed labels ``y = (1 - γ) e_j + γ/K``, ``γ`` in [0, 1]; ``κ`` is the geometric mean of
    ``f``, and a term is ``f_j`` where both are equal. ``Z`` depends on the logits only, not on the target.

    Args:
        logits: ``(B, K)``; float16, bfloat16, float32 or float64; finite.
        target: classes ``(B,)`` int64, soft labels ``(B, K)``, or :class:`fastmoll.SoftLabels` of kind ``"smooth"``.
        reduction: ``"mean"`` over the batch (NaN for an empty one), ``"sum"`` or ``"none"``.

    Returns:
        A scalar, or ``(B,)`` for ``"none"``; float64 for float64 logits, float32 for all others.

    Raises:
        ValueError: as :func:`soft_cross_entropy`; or short labels of kind ``"temper"``, which ``Z`` does not normalise.
    """
    if isinstance(target, SoftLabels) and target.kind == "temper":
        raise ValueError("target must be of kind 'smooth', whose density this loss normalises, got 'temper'")
    check_choice("reduction", reduction, REDUCTIONS)
    loss = soft_cross_entropy(logits, target, reduction="none")
    return _reduce(loss + _log_normaliser(logits.to(loss.dtype)), reduction)


def binary_cross_entropy(logits: Tensor, target: Tensor | SoftLabels, *, reduction: str = "mean") -> Tensor:
    """Soft one-against-all cross-entropy: each class is a yes or no of its own, ``p_c = sigmoid(logits)_c``.

    ``-1/K Σ_c (y_c ln p_c + (1 - y_c) ln(1 - p_c))`` an image. The mean over the classes is that of the paper's code.

    Args:
        logits: ``(B, K)``; float16, bfloat16, float32 or float64; finite.
        target: classes ``(B,)`` int64 in [0, K), soft labels ``(B, K)`` in [0, 1], or :class:`fastmoll.SoftLabels`.
        reduction: ``"mean"`` over the batch (NaN for an empty one), ``"sum"`` or ``"none"``.

    Returns:
        A scalar, or ``(B,)`` for ``"none"``; float64 for float64 logits, float32 for all others.

    Raises:
        ValueError: an argument outside the ranges above.
    """
    if isinstance(target, SoftLabels):
        check_short(logits, target.label, target.gamma, target.partner, target.lam, target.kind, reduction)
    else:
        check_dense(logits, target, reduction)
        if target.dim() == 2 and target.device.type == "cpu":
            check_values("target", target, target <= 1, "lie in [0, 1]")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    dense = _dense(target, logits)
    return _reduce(F.binary_cross_entropy_with_logits(logits, dense, reduction="none").mean(1), reduction)


def augmented_likelihood(
    logits: Tensor, target: Tensor | SoftLabels, *, kind: str = "jensen", reduction: str = "mean"
) -> Tensor:
    """Negative logarithm of the likelihood of ``M`` draws of each image (paper, equations 2 and 3, and appendix C).

    With ``p_m = exp(Σ_c y_c ln f_c)`` of draw ``m``, the logarithm of the likelihood of an image is taken to be

    - ``"jensen"``: ``1/M Σ_m ln p_m``, a lower bound without bias. Its mean is that of soft cross-entropy over all
      draws;
    - ``"geometric"``: ``ln Π_m p_m^(1/M)``, the multiplicative, tempered likelihood: the same number;
    - ``"log_mean"``: ``ln I`` with ``I = 1/M Σ_m p_m``, too low on average;
    - ``"corrected"``: ``ln I + var[I] / (2 I²)`` with ``var[I] = Σ_m (p_m - I)² / (M (M - 1))``, which takes away the
      leading term of that bias; for ``M = 1`` as ``"log_mean"``.

    Args:
        logits: ``(M, B, K)``: ``M`` draws of ``B`` images; float16, bfloat16, float32 or float64; finite.
        target: classes int64, soft labels floating point with ``K`` at the end, or :class:`fastmoll.SoftLabels`. One an
            image, ``(B, ...)``, or, as mollification gives them, one a draw: ``(M, B, ...)``, or ``(M·B, ...)`` draw by
            draw.
        kind: one of the above.
        reduction: ``"mean"`` over the images (NaN for none), ``"sum"`` or ``"none"``.

    Returns:
        A scalar, or ``(B,)`` for ``"none"``; float64 for float64 logits, float32 for all others.

    Raises:
        ValueError: an argument outside the ranges above, or no draws.

    Example:
        >>> mollify = fastmoll.Mollify(10, draws=M)
        >>> for images, targets in SmallImageLoader("cifar10", mollify=mollify):
        ...     logits = model(images).unflatten(0, (M, -1))
        ...     loss = augmented_likelihood(logits, targets, kind="corrected")
    """
    check_choice("kind", kind, LIKELIHOODS)
    check_choice("reduction", reduction, REDUCTIONS)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or not len(logits):
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"logits must have shape (M, B, K) with M >= 1, got {got}")
    check_tensor("logits", logits, None, FLOATING, None)
    draws, batch, _ = logits.shape
    if isinstance(target, SoftLabels):
        target = SoftLabels(
            _by_draw("label", target.label, draws, batch),
            _by_draw("gamma", target.gamma, draws, batch),
            None if target.partner is None else _by_draw("partner", target.partner, draws, batch),
            None if target.lam is None else _by_draw("lam", target.lam, draws, batch),
            target.kind,
        )
    else:
        check_tensor("target", target, None, (torch.int64, *FLOATING), logits.device)
        target = _by_draw("target", target, draws, batch, trailing=int(target.is_floating_point()))
    likelihood = -soft_cross_entropy(logits.flatten(0, 1), target, reduction="none").view(draws, batch)
    if kind in ("jensen", "geometric"):
        return _reduce(-likelihood.mean(0), reduction)
    log_mean = likelihood.logsumexp(0) - math.log(draws)
    if kind == "corrected" and draws > 1:
        # Of p_m / I, which lies in [0, M] however small both are.
        variance = (torch.exp(likelihood - log_mean) - 1.0).square().sum(0) / (draws * (draws - 1))
        log_mean = log_mean + 0.5 * variance
    return _reduce(-log_mean, reduction)


def _by_draw(name: str, value: Tensor, draws: int, batch: int, trailing: int = 0) -> Tensor:
    """One value a draw, ``(M·B, ...)``, of one an image or one a draw with ``trailing`` further dimensions."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    split = max(value.dim() - trailing, 0)
    leading, rest = value.shape[:split], value.shape[split:]
    if leading in ((draws, batch), (draws * batch,)):
        return value.reshape(draws * batch, *rest)
    if leading == (batch,):
        return value.expand(draws, *value.shape).flatten(0, 1)
    end = ", K" * trailing
    wanted = f"({batch}{end}), ({draws}, {batch}{end}) or ({draws * batch}{end})"
    raise ValueError(f"{name} must have shape {wanted}, got {tuple(value.shape)}")


def _log_normaliser(logits: Tensor) -> Tensor:
    """``ln Z`` of appendix B, ``(B,)``.

    A term of ``Z`` is the logarithmic mean of ``f_j`` and ``κ``. With ``d = ln κ - ln f_j`` its logarithm is
    ``max(ln f_j, ln κ) + ln((1 - e^-|d|) / |d|)``, or ``(ln f_j + ln κ) / 2`` plus an even series in ``d``.
    """
    log_f = F.log_softmax(logits, dim=1)
    log_k = log_f.mean(1, keepdim=True)
    d = log_k - log_f
    near = d.abs() < 1.0
    # Each formula gets arguments it is good for everywhere, or the gradient of the one not taken would be NaN.
    square = torch.where(near, d, 0.0).square()
    series = torch.zeros_like(square)
    for coefficient in reversed(_SERIES):
        series = (series + coefficient) * square
    gap = torch.where(near, 1.0, d.abs())
    far = torch.maximum(log_f, log_k) + torch.log(-torch.expm1(-gap)) - torch.log(gap)
    return torch.where(near, 0.5 * (log_f + log_k) + series, far).logsumexp(1)


def _dense(target: Tensor | SoftLabels, logits: Tensor) -> Tensor:
    """The target written out, ``(B, K)``, of the dtype of ``logits``."""
    classes = logits.shape[1]
    if isinstance(target, Tensor):
        return target.to(logits.dtype) if target.dim() == 2 else F.one_hot(target, classes).to(logits.dtype)
    label, gamma, partner, lam, kind = target
    dense = F.one_hot(label, classes).to(logits.dtype)
    if partner is not None and lam is not None:
        dense = torch.lerp(F.one_hot(partner, classes).to(logits.dtype), dense, lam.to(logits.dtype).unsqueeze(1))
    gamma = gamma.to(logits.dtype).unsqueeze(1)
    dense = (1.0 - gamma) * dense
    return dense + gamma / classes if kind == "smooth" else dense


def _reduce(loss: Tensor, reduction: str) -> Tensor:
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()
