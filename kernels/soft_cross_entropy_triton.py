"""Soft cross-entropy and its gradient in one Triton kernel, one program a row of logits.

A row is read twice: for its largest value and its sums, then, from the cache, for the gradient, which is stored as
``mass * softmax - target`` and scaled in the backward pass. All sums are float32 and are taken relative to the largest
value so far, so logits of any size lose nothing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastmoll.kernels.philox_triton import on_device
from fastmoll.kernels.soft_cross_entropy import check_dense, check_short

# The number of classes is a constant of each kernel: it is one number for a whole training run, and the loops need no
# test for a tail where there is none. Classes at a time: longer blocks keep too many values in registers.
_LARGEST_BLOCK: Final = 4096


@triton.jit
def _rows(
    logits_ptr,
    target_ptr,
    label_ptr,
    partner_ptr,
    lam_ptr,
    gamma_ptr,
    loss_ptr,
    grad_ptr,
    logits_stride,
    target_stride,
    CLASSES: tl.constexpr,
    DENSE: tl.constexpr,
    MIXED: tl.constexpr,
    SMOOTH: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    target_ptr += row * target_stride
    grad_ptr += row * CLASSES
    columns = tl.arange(0, BLOCK)

    # Finite, so that no difference of two of them is NaN.
    highest = -3.0e38
    total = 0.0
    weighted = 0.0
    mass = 0.0
    for start in range(0, CLASSES, BLOCK):
        inside = start + columns < CLASSES
        x = tl.load(logits_ptr + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        above = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - above) + tl.sum(tl.exp(x - above), 0)
        below = tl.where(inside, x - above, 0.0)
        if DENSE:
            y = tl.load(target_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
            weighted += mass * (highest - above) + tl.sum(y * below, 0)
            mass += tl.sum(y, 0)
        else:
            if SMOOTH:
                weighted += mass * (highest - above) + tl.sum(below, 0)
                mass += tl.sum(inside.to(tl.float32), 0)
        highest = above

    first = 0.0
    second = 0.0
    floor = 0.0
    label = 0
    partner = 0
    if not DENSE:
        label = tl.load(label_ptr + row)
        gamma = tl.load(gamma_ptr + row).to(tl.float32)
        first = 1.0 - gamma
        # A label that is no class must not read beyond the row.
        valid = (label >= 0) & (label < CLASSES)
        at_label = tl.load(logits_ptr + label, mask=valid, other=float("nan")).to(tl.float32) - highest
        if SMOOTH:
            floor = gamma / CLASSES
            weighted *= floor
            mass = 1.0
        else:
            weighted = 0.0
            mass = 1.0 - gamma
        if MIXED:
            lam = tl.load(lam_ptr + row).to(tl.float32)
            partner = tl.load(partner_ptr + row)
            valid = (partner >= 0) & (partner < CLASSES)
            at_partner = tl.load(logits_ptr + partner, mask=valid, other=float("nan")).to(tl.float32) - highest
            second = first * (1.0 - lam)
            first *= lam
            weighted += second * at_partner
        weighted += first * at_label
    tl.store(loss_ptr + row, mass * tl.log(total) - weighted)

    if GRADIENT:
        scale = mass / total
        for start in range(0, CLASSES, BLOCK):
            place = start + columns
            inside = place < CLASSES
            x = tl.load(logits_ptr + place, mask=inside, other=float("-inf")).to(tl.float32)
            gradient = scale * tl.exp(x - highest)
            if DENSE:
                gradient -= tl.load(target_ptr + place, mask=inside, other=0.0).to(tl.float32)
            else:
                gradient -= floor + tl.where(place == label, first, 0.0)
                if MIXED:
                    gradient -= tl.where(place == partner, second, 0.0)
            tl.store(grad_ptr + place, gradient.to(grad_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scale(grad_ptr, factor_ptr, out_ptr, factor_stride, CLASSES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factor_ptr + row * factor_stride)
    for start in range(0, CLASSES, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < CLASSES
        gradient = tl.load(grad_ptr + row * CLASSES + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * CLASSES + place, (gradient * factor).to(out_ptr.dtype.element_ty), mask=inside)


def _sizes(classes: int) -> dict[str, Any]:
    block = min(_LARGEST_BLOCK, triton.next_power_of_2(classes))
    return {"CLASSES": classes, "BLOCK": block, "num_warps": max(1, min(8, block // 256))}


@torch.library.custom_op("fastmoll::soft_cross_entropy_rows", mutates_args=())
def _losses(
    logits: Tensor,
    target: Tensor | None,
    label: Tensor | None,
    partner: Tensor | None,
    lam: Tensor | None,
    gamma: Tensor | None,
    smooth: bool,
    gradient: bool,
) -> tuple[Tensor, Tensor]:
    batch, classes = logits.shape
    loss = torch.empty(batch, dtype=torch.float32, device=logits.device)
    grad = torch.empty(logits.shape if gradient else (0,), dtype=logits.dtype, device=logits.device)
    if not batch:
        return loss, grad
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    if target is not None and target.stride(1) != 1:
        target = target.contiguous()
    with on_device(logits.device):
        _rows[(batch,)](
            logits,
            logits if target is None else target,
            *(logits if tensor is None else tensor.contiguous() for tensor in (label, partner, lam, gamma)),
            loss,
            grad,
            logits.stride(0),
            0 if target is None else target.stride(0),
            DENSE=target is not None,
            MIXED=partner is not None,
            SMOOTH=smooth,
            GRADIENT=gradient,
            **_sizes(classes),
        )
    return loss, grad


@_losses.register_fake
def _(
    logits: Tensor,
    target: Tensor | None,
    label: Tensor | None,
    partner: Tensor | None,
    lam: Tensor | None,
    gamma: Tensor | None,
    smooth: bool,
    gradient: bool,
) -> tuple[Tensor, Tensor]:
    loss = logits.new_empty(len(logits), dtype=torch.float32)
    return loss, logits.new_empty(logits.shape if gradient else (0,))


@torch.library.custom_op("fastmoll::scale_rows", mutates_args=())
def _scaled(grad: Tensor, factor: Tensor) -> Tensor:
    out = torch.empty_like(grad)
    if len(grad):
        with on_device(grad.device):
            # A mean or a sum sends the same number to all rows, as a tensor of stride 0.
            _scale[(len(grad),)](grad, factor, out, factor.stride(0), **_sizes(grad.shape[1]))
    return out


@_scaled.register_fake
def _(grad: Tensor, factor: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, loss: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    (grad,) = ctx.saved_tensors
    return _scaled(grad, loss), None, None, None, None, None, None, None


_losses.register_autograd(_backward, setup_context=_save)


def _reduce(loss: Tensor, reduction: str) -> Tensor:
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def soft_cross_entropy(logits: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """:func:`fastmoll.kernels.soft_cross_entropy.soft_cross_entropy` in one kernel, differentiable in the logits alone.

    Args:
        logits: ``(B, K)``; float16, bfloat16 or float32.
        target: classes ``(B,)`` int64 in [0, K), or ``(B, K)`` floating point, finite, not negative, without gradient.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Returns:
        float32, a scalar, or ``(B,)`` for ``"none"``.

    Raises:
        ValueError: an argument outside the ranges above.
    """
    check_dense(logits, target, reduction)
    _check_differentiable(logits, target=target)
    wanted = logits.requires_grad and torch.is_grad_enabled()
    if target.dim() == 2:
        loss, _ = _losses(logits, target, None, None, None, None, True, wanted)
    else:
        gamma = torch.zeros(len(target), device=target.device)
        loss, _ = _losses(logits, None, target, None, None, gamma, False, wanted)
    return _reduce(loss, reduction)


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
    """:func:`fastmoll.kernels.soft_cross_entropy.soft_cross_entropy_short` in one kernel.

    Args:
        logits: ``(B, K)``; float16, bfloat16 or float32; the only argument with a gradient.
        label: classes ``(B,)`` int64 in [0, K).
        gamma: label decay ``(B,)``, floating point, in [0, 1].
        partner: classes ``(B,)`` that images were mixed with, int64, or None.
        lam: share of ``label`` in a mixed image, ``(B,)``, floating point, in [0, 1]; given if and only if partner is.
        kind: ``"smooth"`` or ``"temper"``.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Returns:
        float32, a scalar, or ``(B,)`` for ``"none"``.

    Raises:
        ValueError: an argument outside the ranges above.
    """
    check_short(logits, label, gamma, partner, lam, kind, reduction)
    _check_differentiable(logits, gamma=gamma, lam=lam)
    wanted = logits.requires_grad and torch.is_grad_enabled()
    loss, _ = _losses(logits, None, label, partner, lam, gamma, kind == "smooth", wanted)
    return _reduce(loss, reduction)


def _check_differentiable(logits: Tensor, **others: Tensor | None) -> None:
    if logits.dtype == torch.float64:
        raise ValueError(f"logits must be float16, bfloat16 or float32, got {logits.dtype}: sums are float32")
    if torch.is_grad_enabled():
        for name, tensor in others.items():
            if tensor is not None and tensor.requires_grad:
                raise ValueError(f"{name} must not require grad, got requires_grad=True: the kernel has none for it")
