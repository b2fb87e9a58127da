"""Cross-entropy with soft targets (paper, equation 15): ``-Σ_c y_c log softmax(logits)_c``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmoll.kernels.checks import FLOATING, check_choice, check_tensor, check_values

REDUCTIONS = ("mean", "sum", "none")


def soft_cross_entropy(logits: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """Cross-entropy of logits against classes or any non-negative soft targets, differentiable in both.

    Target rows need not sum to 1: tempered labels (paper, equation 7) sum to ``1 - γ`` and give ``1 - γ`` times the
    loss.

    Args:
        logits: ``(B, K)``; float16, bfloat16, float32 or float64. They must be finite where it matters: a logit of
            ``-inf`` gives ``inf`` or, under a target of 0, NaN, as ``0 * inf`` does.
        target: classes ``(B,)`` int64 in [0, K), or ``(B, K)`` floating point, finite and not negative; on logits'
            device.
        reduction: ``"mean"`` over the batch (NaN for an empty one), ``"sum"`` or ``"none"``.

    Returns:
        A scalar, or ``(B,)`` for ``"none"``. The arithmetic and the result are float64 for float64 logits and float32
        for all others, under autocast too.

    Raises:
        ValueError: an argument outside the ranges above.
    """
    check_choice("reduction", reduction, REDUCTIONS)
    check_tensor("logits", logits, (None, None), FLOATING, None)
    batch, classes = logits.shape
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if isinstance(target, Tensor) and target.dim() == 2:
        check_tensor("target", target, (batch, classes), FLOATING, logits.device)
        check_values("target", target, (target >= 0) & target.isfinite(), "be finite and not negative")
        target = target.to(dtype)
    else:
        check_tensor("target", target, (batch,), (torch.int64,), logits.device)
        check_values("target", target, (target >= 0) & (target < classes), f"lie in [0, {classes})")
    return F.cross_entropy(logits.to(dtype), target, reduction=reduction)
