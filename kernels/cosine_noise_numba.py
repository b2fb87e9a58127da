"""The noise of :mod:`fastmoll.kernels.mollify_cpu` in SIMD registers; importing this file imports Numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastmoll.kernels import philox
from fastmoll.kernels.compiled_numba import compiled as _compiled
from fastmoll.kernels.counter_numba import take
from fastmoll.kernels.philox_numba import BLOCKS, WORDS, normal, sample_words

# What comes from other files, which Numba's cache does not watch (tests/test_numba_cache.py): 710329412724


_PURPOSE = np.uint64(philox.NOISE << philox.EPOCH_BITS)


@_compiled
def _mix(x: Any, normals: Any, step: Any, alpha: Any, sigma: Any, mixed: Any, out: Any) -> None:
    """``alpha x + sigma ε`` of a chunk, by way of ``mixed``: SIMD loops must not read what they may have written."""
    for i in range(len(x)):
        mixed[i] = alpha * x[i] + sigma * normals[step * i]
    for i in range(len(x)):
        out[i] = mixed[i]


@_compiled
def run(
    x: Any,
    out: Any,
    order: Any,
    counter: Any,
    channels: Any,
    interleaved: Any,
    alpha: Any,
    sigma: Any,
    sample: Any,
    epoch: Any,
    seed: Any,
) -> None:
    """``alpha x + sigma ε`` of the images ``order`` of a batch of flat images ``(B, values)``; ``out`` may be ``x``.

    Images are planes ``(C, H, W)`` or interleaved ``(H, W, C)``. ``alpha``, ``sigma`` and ``sample`` have an entry an
    image. Threads that share a ``counter`` share the work.
    """
    words = np.empty((4, BLOCKS), np.uint32)
    normals, mixed = np.empty(WORDS, np.float32), np.empty(WORDS, np.float32)
    values = x.shape[1]
    pixels = values // channels
    while True:
        turn = take(counter)
        if turn >= len(order):
            return
        b = order[turn]
        s, d = x[b], out[b]
        middle = epoch | _PURPOSE
        for start in range(0, values, WORDS):
            sample_words(np.uint64(start // 4), sample[b], middle, seed, words)
            normal(words, normals)
            stop = min(values, start + WORDS)
            if interleaved or channels == 1:
                _mix(s[start:stop], normals, 1, alpha[b], sigma[b], mixed, d[start:stop])
                continue
            for c in range(channels):
                first = (start - c + channels - 1) // channels
                last = (stop - c + channels - 1) // channels
                place = slice(c * pixels + first, c * pixels + last)
                z = normals[first * channels + c - start :]
                if channels == 3:  # a constant step lets the compiler use shuffles
                    _mix(s[place], z, 3, alpha[b], sigma[b], mixed, d[place])
                else:
                    _mix(s[place], z, channels, alpha[b], sigma[b], mixed, d[place])
