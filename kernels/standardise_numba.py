"""Pixels to standardised, mixed float images on the CPU; importing this file imports Numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastmoll.kernels.compiled_numba import compiled as _compiled
from fastmoll.kernels.counter_numba import take

# What comes from other files, which Numba's cache does not watch (tests/test_numba_cache.py): 477918cdd23c


_ONE = np.float32(1.0)
_CHANNELS = 3


@_compiled
def _row(pixels: Any, flip: Any, scale: Any, bias: Any, turned: Any, out: Any) -> None:
    """A row of interleaved pixels, turned if ``flip``, times ``scale`` plus ``bias``."""
    size = len(pixels)
    if flip:
        for start in range(0, size, _CHANNELS):
            for c in range(_CHANNELS):
                turned[start + c] = pixels[size - _CHANNELS - start + c]
        for i in range(size):
            out[i] = np.float32(turned[i]) * scale[i] + bias[i]
    else:
        for i in range(size):
            out[i] = np.float32(pixels[i]) * scale[i] + bias[i]


@_compiled
def run(
    pixels: Any,
    out: Any,
    counter: Any,
    interleaved: Any,
    scale: Any,
    bias: Any,
    flip: Any,
    partner: Any,
    lam: Any,
    box: Any,
) -> None:
    """Flip, standardise and mix: the first half of :func:`fastmoll.kernels.batch_tail.batch_tail`.

    Args:
        pixels: uint8 ``(B, H, W * 3)``.
        out: float32, ``(B, H, W * 3)`` if ``interleaved``, else ``(B, 3 * H, W)``.
        counter: int64 ``(1,)``: threads that share it share the work.
        interleaved: whether the channels of the result are.
        scale: float32 ``(W * 3,)``, of the values of a row.
        bias: likewise.
        flip: bool ``(B,)``.
        partner: int64 ``(B,)``; empty without a mix.
        lam: float32 ``(B,)``; empty without MixUp.
        box: int32 ``(B, 4)``; empty without CutMix.
    """
    batch, height, size = pixels.shape
    turned = np.empty(size, np.uint8)
    row, other = np.empty(size, np.float32), np.empty(size, np.float32)
    while True:
        b = take(counter)
        if b >= batch:
            return
        for h in range(height):
            target = out[b, h] if interleaved else row
            _row(pixels[b, h], flip[b], scale, bias, turned, target)
            if len(lam) > 0:
                _row(pixels[partner[b], h], flip[partner[b]], scale, bias, turned, other)
                own = lam[b]
                rest = _ONE - own
                for i in range(size):
                    target[i] = own * target[i] + rest * other[i]
            elif len(box) > 0 and box[b, 0] <= h < box[b, 1] and box[b, 2] < box[b, 3]:
                _row(pixels[partner[b], h], flip[partner[b]], scale, bias, turned, other)
                for i in range(box[b, 2] * _CHANNELS, box[b, 3] * _CHANNELS):
                    target[i] = other[i]
            if not interleaved:
                for c in range(_CHANNELS):
                    plane = out[b, c * height + h]
                    for w in range(size // _CHANNELS):
                        plane[w] = row[_CHANNELS * w + c]
