"""Cross-entropy with soft targets (paper, equation 15): ``-Σ_c y_c log softmax(logits)_c``."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmoll.kernels.checks import FLOATING, check_choice, check_tensor, check_values, installed
from fastmoll.kernels.soft_labels import KINDS, SoftLabels

REDUCTIONS = ("mean", "sum", "none")

# Looked up here, once: a compiler that traces the loss would trace the look-up.
_TRITON = installed("triton")


def soft_cross_entropy(logits: Tensor, target: Tensor | SoftLabels, *, reduction: str = "mean") -> Tensor:
    """Cross-entropy of logits against classes or any non-negative soft targets, differentiable in both.

    Target rows need not sum to 1: tempered labels (paper, equation 7) sum to ``1 - γ`` and give ``1 - γ`` times the
    loss.

    Args:
        logits: ``(B, K)``; float16, bfloat16, float32 or float64. They must be finite where it matters: a logit of
            ``-inf`` gives ``inf`` or, under a target of 0, NaN, as ``0 * inf`` does.
        target: classes ``(B,)`` int64 in [0, K), or ``(B, K)`` floating point, finite and not negative; on logits'
            device. Or :class:`fastmoll.SoftLabels`, which :func:`soft_cross_entropy_short` then gets.
        reduction: ``"mean"`` over the batch (NaN for an empty one), ``"sum"`` or ``"none"``.

    Returns:
        A scalar, or ``(B,)`` for ``"none"``. The arithmetic and the result are float64 for float64 logits and float32
        for all others, under autocast too.

    Raises:
        ValueError: an argument outside the ranges above. *Values* are looked at on the CPU only, as that would take
            several more launches in every step on a GPU: there, a class outside [0, K) gives a loss of NaN.
    """
    if isinstance(target, SoftLabels):
        label, gamma, partner, lam, kind = target
        return soft_cross_entropy_short(logits, label, gamma, partner=partner, lam=lam, kind=kind, reduction=reduction)
    if _fused(logits, target):
        from fastmoll.kernels import soft_cross_entropy_triton

        return soft_cross_entropy_triton.soft_cross_entropy(logits, target, reduction=reduction)
    check_dense(logits, target, reduction)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    target = target.to(dtype) if target.dim() == 2 else target
    return F.cross_entropy(logits.to(dtype), target, reduction=reduction)


def soft_cross_entropy_short(
    logits: Tensor,
    label: Tensor,
    gamma: Tensor,
    *,
    partner: Tensor | None = None,
    lam: Tensor | None = None,
    kind: str = "smooth",
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy against mollified labels in their short form: no target ``(B, K)`` is ever written.

    The target is ``(1 - γ) y + γ/K`` (``"smooth"``; paper, equation 8) or ``(1 - γ) y`` (``"temper"``; equation 7) with
    ``y = λ onehot(label) + (1 - λ) onehot(partner)``, as MixUp and CutMix mix them.

    Args:
        logits: ``(B, K)``; float16, bfloat16, float32 or float64.
        label: classes ``(B,)`` int64 in [0, K), on logits' device.
        gamma: label decay ``(B,)``, floating point, in [0, 1], on logits' device.
        partner: classes ``(B,)`` int64 in [0, K) that images were mixed with; default: not mixed.
        lam: share of ``label`` in ``y``, ``(B,)``, floating point, in [0, 1]; given if and only if ``partner`` is.
        kind: ``"smooth"`` or ``"temper"``.
        reduction: ``"mean"`` over the batch (NaN for an empty one), ``"sum"`` or ``"none"``.

    Returns:
        A scalar, or ``(B,)`` for ``"none"``; float64 for float64 logits, float32 for all others.

    Raises:
        ValueError: an argument outside the ranges above; values as in :func:`soft_cross_entropy`.
    """
    if _fused(logits, gamma, lam):
        from fastmoll.kernels import soft_cross_entropy_triton

        return soft_cross_entropy_triton.soft_cross_entropy_short(
            logits, label, gamma, partner=partner, lam=lam, kind=kind, reduction=reduction
        )
    check_short(logits, label, gamma, partner, lam, kind, reduction)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_probability = F.log_softmax(logits.to(dtype), dim=1)
    gamma = gamma.to(dtype)
    kept = log_probability.gather(1, label.unsqueeze(1)).squeeze(1)
    if partner is not None and lam is not None:
        kept = torch.lerp(log_probability.gather(1, partner.unsqueeze(1)).squeeze(1), kept, lam.to(dtype))
    loss = (gamma - 1.0) * kept
    if kind == "smooth":
        loss = loss - gamma * log_probability.mean(1)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _fused(logits: Tensor, *others: Tensor | None) -> bool:
    """Whether the fused kernel does it: on a GPU, when only the logits need a gradient."""
    if not isinstance(logits, Tensor) or not logits.is_cuda or logits.dtype == torch.float64:
        return False
    return _TRITON and not any(isinstance(other, Tensor) and other.requires_grad for other in others)


def check_dense(logits: Tensor, target: Tensor, reduction: str) -> None:
    """Raise ``ValueError`` unless the arguments are those of :func:`soft_cross_entropy`."""
    batch, classes = _check_logits(logits, reduction)
    if isinstance(target, Tensor) and target.dim() == 2:
        check_tensor("target", target, (batch, classes), FLOATING, logits.device)
        if target.device.type == "cpu" and (torch.compiler.is_compiling() or not _all_right(target)):
            check_values("target", target, (target >= 0) & target.isfinite(), "be finite and not negative")
    else:
        _check_classes("target", target, batch, classes, logits.device)


def _all_right(target: Tensor) -> bool:
    """Whether all values are finite and not negative, in one pass: comparisons one by one take as long as the loss."""
    if target.numel() == 0:
        return True
    low, high = target.detach().aminmax()
    return bool(low >= 0) and bool(high < math.inf)


def check_short(
    logits: Tensor,
    label: Tensor,
    gamma: Tensor,
    partner: Tensor | None,
    lam: Tensor | None,
    kind: str,
    reduction: str,
) -> None:
    """Raise ``ValueError`` unless the arguments are those of :func:`soft_cross_entropy_short`."""
    check_choice("kind", kind, KINDS)
    batch, classes = _check_logits(logits, reduction)
    _check_classes("label", label, batch, classes, logits.device)
    _check_share("gamma", gamma, batch, logits.device)
    if (partner is None) != (lam is None):
        missing, there = ("partner", "lam") if partner is None else ("lam", "partner")
        raise ValueError(f"{missing} must be given together with {there}, got None")
    if partner is not None and lam is not None:
        _check_classes("partner", partner, batch, classes, logits.device)
        _check_share("lam", lam, batch, logits.device)


def _check_logits(logits: Tensor, reduction: str) -> tuple[int, int]:
    check_choice("reduction", reduction, REDUCTIONS)
    check_tensor("logits", logits, (None, None), FLOATING, None)
    batch, classes = logits.shape
    return batch, classes


def _check_classes(name: str, label: Tensor, batch: int, classes: int, device: torch.device) -> None:
    check_tensor(name, label, (batch,), (torch.int64,), device)
    if device.type == "cpu":
        check_values(name, label, (label >= 0) & (label < classes), f"lie in [0, {classes})")


def _check_share(name: str, share: Tensor, batch: int, device: torch.device) -> None:
    check_tensor(name, share, (batch,), FLOATING, device)
    if device.type == "cpu":
        check_values(name, share, (share >= 0) & (share <= 1), "lie in [0, 1]")
