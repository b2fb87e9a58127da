"""Draw the role and the temperature of each image from its key (paper, section 4: one of clean, noise, blur an image,
``t ~ Beta(a, b)``).

Block 0 of the sample's ``DRAW`` stream decides both: its word 0 the role, by comparison with integers (so that every
backend agrees exactly), its word 1 the temperature, by inverting the distribution function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from typing import Final

import torch
from torch import Tensor

from fastmoll.kernels import philox
from fastmoll.kernels.checks import check_number, check_tensor

CLEAN: Final = 0
NOISE: Final = 1
BLUR: Final = 2
PURE_NOISE: Final = 3
"""Noise at ``t = 1``: nothing of the image is left. Drawn only if a fourth weight asks for it."""

LOGIT_LIMIT: Final = 33.0 * math.log(2.0)
"""Half width of the quantile table: past the logit of the smallest uniform number, ``2^-33``."""


SEED_OFFSET: Final = 2**63


def as_int64(seed: int) -> int:
    """A seed less ``SEED_OFFSET``, as operators take it: their numbers have 64 bits and a sign.

    Raises:
        ValueError: ``seed`` is outside [0, 2^64).
    """
    # Compared here: `operator.index` in `check_integer` would have each value of a seed compiled anew.
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be an integer in [0, {2**64}), got {seed}")
    return seed - SEED_OFFSET


def role_thresholds(roles: Sequence[float]) -> tuple[int, int, int]:
    """The 32-bit words at which noise, blur and pure noise begin.

    A word ``w`` means role ``(w >= noise) + (w >= blur) + (w >= pure)``; a role of weight zero has an empty interval.

    Args:
        roles: three or four weights, not negative, not all zero: clean, noise, blur and, optionally, pure noise.

    Returns:
        Three ints in [0, 2^32], ascending: ``round(2^32 * cumulative weight)``.

    Raises:
        ValueError: wrong length, a negative or non-finite weight, or no positive weight.
    """
    if not isinstance(roles, Sized) or len(roles) not in (3, 4):
        raise ValueError(f"roles must be 3 weights (clean, noise, blur) or 4 (and pure noise), got {roles!r}")
    weights = [check_number(f"roles[{i}]", weight, at_least=0.0) for i, weight in enumerate(roles)]
    largest = max(weights)
    if largest == 0.0:
        raise ValueError(f"roles must have at least one positive weight, got {tuple(roles)}")
    # Scaled by the largest first, so that no sum of finite weights overflows.
    cumulative = [0.0]
    for weight in weights:
        cumulative.append(cumulative[-1] + weight / largest)
    noise, blur, pure = (round(part / cumulative[-1] * 2**32) for part in cumulative[1:4])
    return noise, blur, pure


def draw(
    index: Tensor,
    epoch: int = 0,
    *,
    seed: int = 0,
    roles: Sequence[float] = (1.0, 1.0, 1.0),
    beta: tuple[float, float] = (1.0, 2.0),
    quantiles: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw a role and a temperature for each sample id.

    With ``u = (w + 1/2) * 2^-32`` in float64 from word 1 ``w``:

    - without ``quantiles``, for ``a = 1``: ``t = 1 - (1 - u)^(1/b) = -expm1(log1p(-u) / b)``;
    - with them ``t`` is their linear interpolation: the ``n`` entries are the quantiles of any distribution at ``n``
      equally spaced values of ``s = ln u - ln(1 - u)``, from ``-LOGIT_LIMIT`` to ``LOGIT_LIMIT``. In ``s`` both tails
      of every Beta distribution are smooth, in ``u`` they can be infinitely steep.

    Args:
        index: sample ids, integer ``(B,)``, values in [0, 2^48).
        epoch: int in [0, 2^24).
        seed: int in [0, 2^64).
        roles: weights of clean, noise, blur and, optionally, pure noise.
        beta: ``(a, b)`` of the temperature's distribution, both positive.
        quantiles: float64 ``(n,)``, ``n >= 2``, in [0, 1]; taken in place of ``beta``, and needed unless ``a = 1``.

    Returns:
        role: int8 ``(B,)``, one of ``CLEAN``, ``NOISE``, ``BLUR``, ``PURE_NOISE``.
        t: float32 ``(B,)`` in [0, 1]; 0 for clean, 1 for pure noise. Both on index's device.

    Raises:
        ValueError: an argument outside the ranges above.
    """
    noise, blur, pure = role_thresholds(roles)
    a, b = check_beta(beta)
    philox.check_key(seed, epoch, index)
    if not any(roles[1:]):  # as where images are only mixed: there is nothing to draw
        return torch.zeros_like(index, dtype=torch.int8), torch.zeros_like(index, dtype=torch.float32)
    words = philox.sample_words(index, epoch, seed=seed, purpose=philox.DRAW, blocks=1)
    choice = words[0].squeeze(1)
    role = (choice >= noise).to(torch.int8) + (choice >= blur) + (choice >= pure)
    t = beta_quantile(uniform_double(words[1].squeeze(1)), (a, b), quantiles)
    t = torch.where(role == CLEAN, 0.0, torch.where(role == PURE_NOISE, 1.0, t))
    return role, t.float()


def uniform_double(word: Tensor) -> Tensor:
    """Map 32-bit words to float64 in (0, 1): ``(word + 1/2) * 2^-32``, exact, and so is its complement."""
    return (word.double() + 0.5) * 2.0**-32


def beta_quantile(u: Tensor, beta: tuple[float, float], quantiles: Tensor | None) -> Tensor:
    """What :func:`draw` makes of its uniform numbers ``u``: float64, in [0, 1]; all arguments as there."""
    a, b = beta
    if quantiles is None:
        if a != 1.0:
            raise ValueError(f"quantiles must be given for beta = {beta}: only a = 1 has a closed form")
        return u if b == 1.0 else -torch.expm1(torch.log1p(-u) / b)
    check_tensor("quantiles", quantiles, (None,), (torch.float64,), u.device)
    if len(quantiles) < 2:
        raise ValueError(f"quantiles must have at least 2 entries, got {len(quantiles)}")
    place = (torch.logit(u) / LOGIT_LIMIT + 1.0) * (0.5 * (len(quantiles) - 1))
    below = place.long().clamp_(0, len(quantiles) - 2)
    return torch.lerp(quantiles[below], quantiles[below + 1], (place - below).clamp_(0.0, 1.0))


def check_beta(beta: tuple[float, float]) -> tuple[float, float]:
    """Return ``beta`` as two floats, or raise ``ValueError`` unless it is two positive finite numbers."""
    if not isinstance(beta, Sized) or len(beta) != 2:
        raise ValueError(f"beta must be two numbers (a, b), got {beta!r}")
    return check_number("beta[0]", beta[0], above=0.0), check_number("beta[1]", beta[1], above=0.0)
