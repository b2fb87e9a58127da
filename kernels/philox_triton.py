"""Philox4x32-10 and the normals of a sample's noise stream, as :mod:`fastmoll.kernels.philox` defines them, in Triton.

The normals agree with the definition, evaluated in float64, to 1.1e-6 (the worst of 195,552, machine code with exact
functions); a card's fast sine and cosine, which CUDA's manual has good to 2^-21, may add 3e-6. No card measured it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from fastmoll.kernels.philox import EPOCH_BITS, NOISE

_PURPOSE: tl.constexpr = tl.constexpr(NOISE << EPOCH_BITS)

INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, which knows no functions of the device's own."""


def signed(word: int) -> int:
    """A 32-bit word as a signed number: Triton would give larger ones 64 bits, and so compile another kernel."""
    return word - 2**32 if word >= 2**31 else word


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Launch on ``device``: launches go to the current one, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Ten rounds of Philox4x32; one 64-bit product gives both halves that a round needs."""
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = p1.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = p0.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


# Cosine and sine by polynomials fitted to the few arguments that occur, to about 1e-7: the general functions spend more
# on the other arguments (infinities, angles of many turns, which even take stack).


@triton.jit
def _sine(turns):
    """``sin(2π turns)`` for ``|turns| <= 1/8``, accurate in relative terms."""
    y = turns * turns
    return turns * (6.28318529 + y * (-41.3416615 + y * (81.5923533 + y * -75.39355)))


@triton.jit
def _cosine(turns):
    """``cos(2π turns)`` for ``|turns| <= 1/8``."""
    y = turns * turns
    return 1.0 + y * (-19.7391673 + y * (64.9232284 + y * -83.6659078))


@triton.jit
def sine_quarter(t):
    """``sin(πt/2)`` for ``t`` in [0, 1]: exactly 0 at 0, exactly 1 at 1."""
    return tl.where(t <= 0.5, _sine(0.25 * t), _cosine(0.25 * (1.0 - t)))


@triton.jit
def _normal_pair(w0, w1, sigma):
    """Two normals, times ``sigma``, by the transform of Box and Muller."""
    u = w0.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    # Fast functions are good to 2^-21 on [-π, π]: the turn is shifted by a half, and the sign put right.
    angle = w1.to(tl.float32) * 1.4629180792671596e-09 - 3.141592653589793
    if INTERPRETED:
        log2 = tl.log2(u)
        cosine = tl.cos(angle)
        sine = tl.sin(angle)
    else:
        log2 = libdevice.fast_log2f(u)
        cosine = libdevice.fast_cosf(angle)
        sine = libdevice.fast_sinf(angle)
    # -2 ln u. Near 1, where the square root would magnify the error of the logarithm, by its series.
    d = 1.0 - u
    radius = -sigma * tl.sqrt(tl.where(d < 0.003, d * d + (d + d), -1.3862943611198906 * log2))
    return radius * cosine, radius * sine


@triton.jit
def four_normals(counter, sigma, sample, epoch, key0, key1):
    """Normals ``4 * counter ... 4 * counter + 3`` of a sample's noise stream, times ``sigma``: a tuple."""
    counter = counter.to(tl.uint32)
    zero = counter & 0
    low = (sample & 0xFFFFFFFF).to(tl.uint32)
    high = (sample >> 32).to(tl.uint32)
    middle = (epoch | _PURPOSE).to(tl.uint32)
    w0, w1, w2, w3 = _philox(
        counter, zero + low, zero + middle, zero + high,
        key0.to(tl.uint32, bitcast=True), key1.to(tl.uint32, bitcast=True),
    )  # fmt: skip
    z0, z1 = _normal_pair(w0, w1, sigma)
    z2, z3 = _normal_pair(w2, w3, sigma)
    return z0, z1, z2, z3


@triton.jit
def normals(first, BLOCK: tl.constexpr, sigma, sample, epoch, key0, key1):
    """Normals ``4 * first ... 4 * first + BLOCK - 1`` of a sample's noise stream, in order, times ``sigma``."""
    z0, z1, z2, z3 = four_normals(first + tl.arange(0, BLOCK // 4), sigma, sample, epoch, key0, key1)
    return tl.reshape(tl.join(tl.join(z0, z2), tl.join(z1, z3)), [BLOCK])
