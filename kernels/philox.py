"""Philox4x32-10, the counter-based random generator behind every draw (Salmon et al., SC 2011), in plain torch.

A draw is a pure function of (seed, epoch, sample id, purpose), so it does not depend on the batch an image is in, on
the number of processes, or on whether a run was resumed. The layout below is a contract between the backends:

=========  =============================================
word       contents
=========  =============================================
key 0, 1   seed, low and high 32 bits
counter 0  block: which four words of the sample's stream
counter 1  sample id, bits 0 to 31
counter 2  epoch (24 bits), purpose << 24
counter 3  sample id, bits 32 to 47, draw << 16
=========  =============================================

Word ``i`` of a stream is word ``i % 4`` of block ``i // 4``. ``draw`` numbers several draws for one image in one epoch.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from fastmoll.kernels.checks import INTEGER, check_integer, check_tensor, check_values

DRAW: Final = 0
"""Purpose of the stream that role and temperature come from."""
NOISE: Final = 1
"""Purpose of the stream that the image noise comes from."""
AUGMENT: Final = 2
"""Purpose of the stream that flips, crops, rotations and the operations of a policy come from."""
MIX: Final = 3
"""Purpose of the stream of a batch's first sample that the batch is mixed by."""
CORRUPT: Final = 4
"""Purpose of the stream that corruptions come from; the epoch's place holds the corruption and its severity."""

INDEX_BITS: Final = 48
EPOCH_BITS: Final = 24

_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_MASK: Final = 0xFFFFFFFF

# On a CPU, the blocks to work on at a time: the ten rounds, a hundred short operations, then stay in the cache, and
# torch runs operations on fewer than 2^15 elements in one thread. Split over threads, and joined again each time, they
# would wait for the slowest thread whenever other processes (a loader's workers, say) wanted the same cores.
_PORTION = 2**15 - 1

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    # The int64 product wraps modulo 2^64, which keeps all 64 bits of the unsigned product; the shift is arithmetic, so
    # the mask removes the copies of the sign bit.
    product = word * multiplier
    return (product >> 32).bitwise_and_(_MASK), product.bitwise_and_(_MASK)


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds of Philox4x32.

    Args:
        counter: four int64 tensors of 32-bit words (values in [0, 2^32)), shapes that broadcast together, one device.
            Words that are the same for many blocks may stay small: the first rounds then cost next to nothing.
        key: two 32-bit words.

    Returns:
        Four int64 tensors of the broadcast shape, values in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = (high1 ^ c1).bitwise_xor_(k0), low1, (high0 ^ c3).bitwise_xor_(k1), low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def check_key(seed: int, epoch: int, index: Tensor, batch: int | None = None) -> None:
    """Raise ``ValueError`` unless seed, epoch and sample ids fit the fields that the counter has for them.

    Args:
        seed: int in [0, 2^64).
        epoch: int in [0, 2^24).
        index: sample ids, integer tensor ``(B,)``, values in [0, 2^48).
        batch: the ``B`` to demand, or None for any.
    """
    check_integer("seed", seed, 0, 2**64)
    check_integer("epoch", epoch, 0, 2**EPOCH_BITS)
    check_tensor("index", index, (batch,), INTEGER, None)
    index = index.long()
    check_values("index", index, (index >= 0) & (index < 2**INDEX_BITS), f"lie in [0, 2**{INDEX_BITS})")


def sample_words(index: Tensor, epoch: int, *, seed: int, purpose: int, blocks: int, draw: int = 0) -> Words:
    """The first ``4 * blocks`` random words of each sample's stream.

    Args:
        index: sample ids, integer ``(B,)``, checked by :func:`check_key` like ``seed`` and ``epoch``.
        epoch: epoch number.
        seed: the run's seed.
        purpose: which stream of the sample: ``DRAW``, ``NOISE``, ``AUGMENT``, ``MIX`` or ``CORRUPT``.
        blocks: blocks of four words, at most 2^32.
        draw: number of the draw for this image in this epoch, in [0, 2^16).

    Returns:
        Four int64 tensors ``(B, blocks)`` on index's device; entry ``[b, i]`` of tensor ``j`` is word ``4 * i + j``.
    """
    ids = index.long().unsqueeze(1)
    low, high = ids & _MASK, ids >> 32 | draw << 16
    middle = torch.full_like(ids, epoch | purpose << EPOCH_BITS)
    place = torch.arange(blocks, device=index.device).unsqueeze(0)
    key = (seed & _MASK, seed >> 32)
    if index.device.type != "cpu":
        return philox4x32((place, low, middle, high), key)
    w0, w1, w2, w3 = torch.empty(4, len(index), blocks, dtype=torch.int64, device="cpu")
    step = max(1, _PORTION // max(1, blocks))
    for start in range(0, len(index), step):
        rows = slice(start, start + step)
        for first in range(0, blocks, _PORTION):
            columns = slice(first, first + _PORTION)
            portion = philox4x32((place[:, columns], low[rows], middle[rows], high[rows]), key)
            for words, part in zip((w0, w1, w2, w3), portion, strict=True):
                words[rows, columns] = part
    return w0, w1, w2, w3


def uniform(word: Tensor) -> Tensor:
    """Map 32-bit words to float32 in (0, 1]: ``float32(word) * 2^-32 + 2^-33``.

    The product is exact, so a fused multiply-add gives the same bits; the only roundings are those of the conversion
    and of the sum, both to nearest.
    """
    return word.to(torch.float32).mul_(2.0**-32).add_(2.0**-33)


def normal(words: Words, dtype: torch.dtype) -> Tensor:
    """Standard normals from words by the transform of Box and Muller, one a word.

    ``z0 = sqrt(-2 ln u) cos(2π v)`` and ``z1 = sqrt(-2 ln u) sin(2π v)`` with ``u = uniform(w0)`` in (0, 1] and
    ``v = float32(w1) * 2^-32`` in [0, 1]; ``w2, w3`` give ``z2, z3`` in the same way. ``u`` and ``v`` are float32 by
    definition, whatever the output: a float64 result continues from the same numbers and serves as the oracle. No value
    exceeds ``sqrt(66 ln 2) = 6.77``.

    Args:
        words: four int64 tensors ``(B, n)``.
        dtype: float32 or float64, for everything after the uniforms.

    Returns:
        ``(B, 4 * n)``: the normals in the order of their words.
    """
    normals = []
    for first, second in (words[:2], words[2:]):
        radius = uniform(first).to(dtype).log_().mul_(-2.0).sqrt_()
        angle = second.to(torch.float32).mul_(2.0**-32).to(dtype).mul_(2.0 * math.pi)
        normals += [radius * angle.cos(), radius * angle.sin()]
    return torch.stack(normals, dim=2).flatten(1)
