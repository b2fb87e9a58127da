"""Roles, temperatures, label decays and soft labels of a batch in one small Triton launch.

What :func:`fastmoll.kernels.draw.draw`, :func:`fastmoll.kernels.soft_labels.label_decay` and
:func:`fastmoll.kernels.soft_labels.soft_labels` compute, for batches whose sample ids are on the device. A program
belongs to one image: it draws (in float64, for a handful of numbers) and then writes the row of its label. Code that is
being compiled sees one operator, ``fastmoll::draw_batch``, which runs the same eager code.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastmoll.kernels.checks import (
    FLOATING,
    INTEGER,
    check_choice,
    check_integer,
    check_labels,
    check_number,
    check_tensor,
    check_values,
)
from fastmoll.kernels.draw import LOGIT_LIMIT, SEED_OFFSET, as_int64, check_beta, role_thresholds
from fastmoll.kernels.philox import EPOCH_BITS, check_key
from fastmoll.kernels.philox_triton import on_device, signed
from fastmoll.kernels.soft_labels import KINDS

_BLOCK = 1024


class Draw(NamedTuple):
    """What one launch draws for a batch of ``B`` images.

    Attributes:
        role: int8 ``(B,)``: 0 clean, 1 noise, 2 blur, 3 pure noise.
        t: float32 ``(B,)``, temperatures in [0, 1].
        gamma: float32 ``(B,)``, label decays in [0, 1].
        partner_label: int64 ``(B,)``, the partners' classes; None without partners.
        target: float32 ``(B, K)``, soft labels; None unless asked for.
    """

    role: Tensor
    t: Tensor
    gamma: Tensor
    partner_label: Tensor | None
    target: Tensor | None


@triton.jit
def _power(x, exponent: tl.constexpr):
    """``x ** exponent`` for float64 ``x`` in [0, 1], ``0 ** 0 = 1``; exact for ``x = 1``."""
    if exponent == 0.0:
        result = x * 0.0 + 1.0
    elif exponent == 1.0:
        result = x
    elif exponent == 2.0:
        result = x * x
    else:
        result = tl.where(x > 0.0, tl.exp(exponent * tl.log(tl.where(x > 0.0, x, 1.0))), 0.0)
    return result


@triton.jit
def _sine_quarter(t):
    """``sin(πt/2)`` for float64 ``t`` in [0, 1], to 6e-12: Taylor's terms up to the fifteenth power.

    The sine of the library is made for angles of many turns, too, and takes stack for them.
    """
    y = 1.5707963267948966 * t
    z = y * y
    tail = -1.0 / 39916800.0 + z * (1.0 / 6227020800.0 - z / 1307674368000.0)
    tail = 1.0 / 120.0 + z * (-1.0 / 5040.0 + z * (1.0 / 362880.0 + z * tail))
    return y + y * z * (-1.0 / 6.0 + z * tail)


@triton.jit(do_not_specialize=["epoch", "key0", "key1", "batch"])
def _draw(
    index_ptr, table_ptr, labels_ptr, partner_ptr, lam_ptr, role_ptr, t_ptr, gamma_ptr, partner_label_ptr, target_ptr,
    epoch, key0, key1, batch,
    NOISE_FROM: tl.constexpr, BLUR_FROM: tl.constexpr, PURE_FROM: tl.constexpr, INVERSE_B: tl.constexpr,
    NODES: tl.constexpr, LIMIT: tl.constexpr, K_NOISE: tl.constexpr, K_BLUR: tl.constexpr, CLASSES: tl.constexpr,
    SMOOTH: tl.constexpr, MIXED: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    sample = tl.load(index_ptr + row).to(tl.int64)
    seed = (key1.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | key0.to(tl.uint32, bitcast=True).to(tl.uint64)
    low = (sample & 0xFFFFFFFF).to(tl.uint32)
    high = (sample >> 32).to(tl.uint32)
    # Block 0 of purpose DRAW, which is 0.
    choice, word, _, _ = tl.philox(seed, low & 0, low, epoch.to(tl.uint32), high)

    choice = choice.to(tl.int64) & 0xFFFFFFFF
    role = (choice >= NOISE_FROM).to(tl.int32) + (choice >= BLUR_FROM).to(tl.int32) + (choice >= PURE_FROM).to(tl.int32)

    # u = (word + 1/2) / 2^32, and its complement: both exact.
    half = (word.to(tl.int64) & 0xFFFFFFFF).to(tl.float64) + 0.5
    u = half * 2.3283064365386963e-10
    rest = (4294967296.0 - half) * 2.3283064365386963e-10
    if NODES == 0:
        t = 1.0 - _power(rest, INVERSE_B)
    else:
        node = ((tl.log(u) - tl.log(rest)) / LIMIT + 1.0) * (0.5 * (NODES - 1))
        below = tl.minimum(tl.maximum(node.to(tl.int32), 0), NODES - 2)
        left = tl.load(table_ptr + below)
        right = tl.load(table_ptr + below + 1)
        t = left + tl.minimum(tl.maximum(node - below, 0.0), 1.0) * (right - left)
    t = tl.where(role == 0, 0.0, tl.where(role == 3, 1.0, t)).to(tl.float32)
    tl.store(role_ptr + row, role.to(tl.int8))
    tl.store(t_ptr + row, t)

    # From the rounded temperature, as everything that is handed t computes.
    exact = t.to(tl.float64)
    sine = tl.minimum(_sine_quarter(exact), 1.0)
    gamma = tl.where(role == 1, _power(sine * sine, K_NOISE), tl.where(role == 2, _power(exact, K_BLUR), 0.0))
    gamma = tl.where(role == 3, 1.0, gamma).to(tl.float32)
    tl.store(gamma_ptr + row, gamma)

    if MIXED:
        # A bad partner may give a wrong row, but must not read outside the batch.
        partner = tl.minimum(tl.maximum(tl.load(partner_ptr + row), 0), batch - 1)
    if DENSE != 2:
        if MIXED:
            other = tl.load(labels_ptr + partner)
            tl.store(partner_label_ptr + row, other)
    if DENSE != 0:
        kept = 1.0 - gamma
        floor = 0.0
        if SMOOTH:
            floor = gamma / CLASSES
        if MIXED:
            lam = tl.load(lam_ptr + row)
        if DENSE == 1:
            label = tl.load(labels_ptr + row)
        for start in range(0, CLASSES, BLOCK):
            place = start + tl.arange(0, BLOCK)
            inside = place < CLASSES
            if DENSE == 1:
                y = (place == label).to(tl.float32)
                if MIXED:
                    y = lam * y + (1.0 - lam) * (place == other).to(tl.float32)
            else:
                y = tl.load(labels_ptr + row * CLASSES + place, mask=inside, other=0.0).to(tl.float32)
                if MIXED:
                    z = tl.load(labels_ptr + partner * CLASSES + place, mask=inside, other=0.0).to(tl.float32)
                    y = lam * y + (1.0 - lam) * z
            tl.store(target_ptr + row * CLASSES + place, kept * y + floor, mask=inside)


def draw_batch(
    index: Tensor,
    epoch: int | Tensor = 0,
    *,
    seed: int = 0,
    roles: Sequence[float] = (1.0, 1.0, 1.0),
    beta: tuple[float, float] = (1.0, 2.0),
    quantiles: Tensor | None = None,
    k_noise: float = 1.0,
    k_blur: float = 1.0,
    labels: Tensor | None = None,
    partner: Tensor | None = None,
    lam: Tensor | None = None,
    num_classes: int | None = None,
    kind: str = "smooth",
    dense: bool = True,
    validate: bool = True,
) -> Draw:
    """Draw roles and temperatures and soften labels, in one launch and without waiting for the device.

    Args:
        index: sample ids, integer ``(B,)``, in [0, 2^48).
        epoch: int in [0, 2^24), or an int64 scalar tensor on the CPU: compiled code then has one number less to be
            compiled for.
        seed: int in [0, 2^64).
        roles: weights of clean, noise, blur and, optionally, pure noise.
        beta: ``(a, b)`` of the temperature's distribution, both positive.
        quantiles: float64 ``(n,)``, taken in place of ``beta``, and needed unless ``a = 1``: see
            :func:`fastmoll.kernels.draw.draw`.
        k_noise: slope of the label decay for noise, at least 0.
        k_blur: slope of the label decay for blur, at least 0.
        labels: classes ``(B,)`` int64, or soft labels ``(B, K)`` floating point; None for draws alone.
        partner: int64 ``(B,)``, in [0, B): the position of the image that each one is mixed with (MixUp, CutMix).
        lam: share of the image's own label, float32 ``(B,)``, in [0, 1]; given if and only if ``partner`` is.
        num_classes: ``K``, at least 2; needed with labels.
        kind: ``"smooth"`` for ``(1 - γ) y + γ/K``, ``"temper"`` for ``(1 - γ) y``.
        dense: write targets ``(B, K)``. Without, labels (which must be classes then), ``partner_label``, ``lam`` and
            ``gamma`` are the short form that :func:`soft_cross_entropy_short` takes.
        validate: look at the values of ``index``, ``labels``, ``partner`` and ``lam`` too, by assertions on the device
            if that is a GPU. Without, for callers that have seen them on the host, values outside the ranges above
            give wrong rows: a class outside [0, K) no class at all, a partner outside the batch the nearest one in it.

    Returns:
        The draws, on index's device.

    Raises:
        ValueError: an argument outside the ranges above.
    """
    options: dict[str, Any] = {
        "roles": roles,
        "beta": beta,
        "k_noise": k_noise,
        "k_blur": k_blur,
        "num_classes": num_classes,
        "kind": kind,
        "dense": dense,
        "validate": validate,
    }
    if not torch.compiler.is_compiling():
        return _run(index, epoch, quantiles, labels, partner, lam, seed=seed, **options)
    whole, counter = (0, epoch) if isinstance(epoch, Tensor) else (epoch, None)
    drawn = _operator(index, counter, quantiles, labels, partner, lam, epoch=whole, seed=as_int64(seed), **options)
    role, t, gamma, other, target = drawn
    has_other = labels is not None and labels.dim() == 1 and partner is not None
    return Draw(role, t, gamma, other if has_other else None, target if labels is not None and dense else None)


def _run(
    index: Tensor,
    epoch: int | Tensor,
    quantiles: Tensor | None,
    labels: Tensor | None,
    partner: Tensor | None,
    lam: Tensor | None,
    *,
    seed: int,
    roles: Sequence[float],
    beta: tuple[float, float],
    k_noise: float,
    k_blur: float,
    num_classes: int | None,
    kind: str,
    dense: bool,
    validate: bool,
) -> Draw:
    thresholds = role_thresholds(roles)
    a, b = check_beta(beta)
    k_noise = check_number("k_noise", k_noise, at_least=0.0)
    k_blur = check_number("k_blur", k_blur, at_least=0.0)
    check_choice("kind", kind, KINDS)
    epoch = check_integer("epoch", epoch, 0, 2**EPOCH_BITS)
    if validate:
        check_key(seed, epoch, index)
    else:
        check_integer("seed", seed, 0, 2**64)
        check_tensor("index", index, (None,), INTEGER, None)
    device, batch = index.device, len(index)
    nodes = 0
    if quantiles is None:
        if a != 1.0:
            raise ValueError(f"quantiles must be given for beta = {beta}: only a = 1 has a closed form")
    else:
        check_tensor("quantiles", quantiles, (None,), (torch.float64,), device)
        nodes = check_integer("len(quantiles)", len(quantiles), 2)
    if (partner is None) != (lam is None):
        missing, there = ("partner", "lam") if partner is None else ("lam", "partner")
        raise ValueError(f"{missing} must be given together with {there}, got None")
    classes = 0
    if labels is None:
        if partner is not None:
            raise ValueError("labels must be given with partner, got None")
    else:
        if num_classes is None:
            raise ValueError("num_classes must be given with labels, got None")
        classes = check_integer("num_classes", num_classes, 2)
        if validate:
            check_labels(labels, classes, batch, device)
        elif isinstance(labels, Tensor) and labels.dim() == 2:
            check_tensor("labels", labels, (batch, classes), FLOATING, device)
        else:
            check_tensor("labels", labels, (batch,), (torch.int64,), device)
        if labels.dim() == 2 and not dense:
            raise ValueError("dense must be True for soft labels, got False: they have no short form")
    if partner is not None and lam is not None:
        check_tensor("partner", partner, (batch,), (torch.int64,), device)
        check_tensor("lam", lam, (batch,), FLOATING, device)
        if validate:
            check_values("partner", partner, (partner >= 0) & (partner < batch), f"lie in [0, {batch})")
            check_values("lam", lam, (lam >= 0) & (lam <= 1), "lie in [0, 1]")

    role = torch.empty(batch, dtype=torch.int8, device=device)
    t = torch.empty(batch, dtype=torch.float32, device=device)
    gamma = torch.empty_like(t)
    mixed = partner is not None
    soft = labels is not None and labels.dim() == 2
    other = torch.empty(batch, dtype=torch.int64, device=device) if mixed and not soft else None
    target = torch.empty(batch, classes, dtype=torch.float32, device=device) if labels is not None and dense else None
    if batch:
        with on_device(device):
            _draw[(batch,)](
                *(
                    # A pointer that is not read has to be something.
                    role if tensor is None else tensor.contiguous()
                    for tensor in (index, quantiles if nodes else None, labels, partner, lam)
                ),
                role,
                t,
                gamma,
                role if other is None else other,
                role if target is None else target,
                epoch,
                signed(seed & 0xFFFFFFFF),
                signed(seed >> 32),
                batch,
                NOISE_FROM=thresholds[0],
                BLUR_FROM=thresholds[1],
                PURE_FROM=thresholds[2],
                INVERSE_B=1.0 / b,
                NODES=nodes,
                LIMIT=LOGIT_LIMIT,
                K_NOISE=k_noise,
                K_BLUR=k_blur,
                CLASSES=classes,
                SMOOTH=kind == "smooth",
                MIXED=mixed,
                DENSE=0 if target is None else 2 if soft else 1,
                BLOCK=min(_BLOCK, triton.next_power_of_2(max(1, classes))),
                num_warps=1 if target is None else 4,
            )
    return Draw(role, t, gamma, other, target)


@torch.library.custom_op("fastmoll::draw_batch", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _operator(
    index: Tensor,
    epoch_tensor: Tensor | None,
    quantiles: Tensor | None,
    labels: Tensor | None,
    partner: Tensor | None,
    lam: Tensor | None,
    *,
    epoch: int,
    seed: int,
    roles: Sequence[float],
    beta: Sequence[float],
    k_noise: float,
    k_blur: float,
    num_classes: int | None,
    kind: str,
    dense: bool,
    validate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    drawn = _run(
        index,
        epoch if epoch_tensor is None else epoch_tensor,
        quantiles,
        labels,
        partner,
        lam,
        seed=seed + SEED_OFFSET,
        roles=roles,
        beta=(beta[0], beta[1]),
        k_noise=k_noise,
        k_blur=k_blur,
        num_classes=num_classes,
        kind=kind,
        dense=dense,
        validate=validate,
    )
    # An operator always gives all of its tensors: an empty one for each that is None.
    other = index.new_empty(0, dtype=torch.int64) if drawn.partner_label is None else drawn.partner_label
    target = index.new_empty(0, dtype=torch.float32) if drawn.target is None else drawn.target
    return drawn.role, drawn.t, drawn.gamma, other, target


@_operator.register_fake
def _(
    index: Tensor,
    epoch_tensor: Tensor | None,
    quantiles: Tensor | None,
    labels: Tensor | None,
    partner: Tensor | None,
    lam: Tensor | None,
    *,
    num_classes: int | None,
    dense: bool,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch = len(index)
    t = index.new_empty(batch, dtype=torch.float32)
    mixed = partner is not None and labels is not None and labels.dim() == 1
    other = index.new_empty(batch if mixed else 0, dtype=torch.int64)
    target = index.new_empty((batch, num_classes or 0) if labels is not None and dense else 0, dtype=torch.float32)
    return index.new_empty(batch, dtype=torch.int8), t, torch.empty_like(t), other, target
