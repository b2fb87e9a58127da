"""The compiled half of :mod:`fastmoll.kernels.corrupt_noise`; importing this file imports Numba.

Each function does the images ``first`` to ``last`` of a batch of uint8 planes ``(B, C, H, W)`` and lets go of the GIL.
Numba promotes to float64 and int64 wherever a literal or an unsigned number meets a signed one; hence the typed
constants.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastmoll.kernels.compiled_numba import compiled as _compiled
from fastmoll.kernels.compiled_numba import fused as _fused
from fastmoll.kernels.philox_numba import BLOCKS, WORDS, in_order, normal, sample_words, to_uniform

# What comes from other files, which Numba's cache does not watch (tests/test_numba_cache.py): 64e606376bab


_ZERO, _TOP = np.float32(0.0), np.float32(255.0)


@_fused
def _add(x: Any, normals: Any, scale: Any, out: Any) -> None:
    for i in range(len(x)):
        grey = np.float32(x[i]) + scale * normals[i]
        out[i] = np.uint8(np.int32(min(max(grey, _ZERO), _TOP)))


@_compiled
def gaussian(images: Any, out: Any, scale: Any, sample: Any, middle: Any, seed: Any, first: Any, last: Any) -> None:
    """Add normals times ``scale``, float32, grey levels."""
    words = np.empty((4, BLOCKS), np.uint32)
    normals = np.empty(WORDS, np.float32)
    for b in range(first, last):
        x, y = images[b].reshape(-1), out[b].reshape(-1)
        for place in range(0, len(x), WORDS):
            sample_words(np.uint64(place // 4), sample[b], middle, seed, words)
            normal(words, normals)
            _add(x[place : place + WORDS], normals, scale, y[place : place + WORDS])


@_compiled
def shot(
    images: Any,
    out: Any,
    limits: Any,
    grey: Any,
    guide: Any,
    sample: Any,
    middle: Any,
    seed: Any,
    first: Any,
    last: Any,
) -> None:
    """Look photons up: the tables of :func:`fastmoll.kernels.corrupt_noise.poisson_table`, and where to begin."""
    words, row = np.empty((4, BLOCKS), np.uint32), np.empty(WORDS, np.uint32)
    most = limits.shape[1]
    for b in range(first, last):
        x, y = images[b].reshape(-1), out[b].reshape(-1)
        for place in range(0, len(x), WORDS):
            sample_words(np.uint64(place // 4), sample[b], middle, seed, words)
            in_order(words, row)
            for i in range(min(WORDS, len(x) - place)):
                level, word = x[place + i], np.int64(row[i])
                k = np.int64(guide[level, word >> 24])
                while k < most and limits[level, k] < word:
                    k += 1
                y[place + i] = grey[k]


@_compiled
def _strike(x: Any, row: Any, salt: Any, pepper: Any, out: Any) -> None:
    for i in range(len(x)):
        changed = np.uint8(255) if row[i] < salt else np.uint8(0)
        out[i] = changed if row[i] < pepper else x[i]


@_compiled
def impulse(
    images: Any, out: Any, salt: Any, pepper: Any, sample: Any, middle: Any, seed: Any, first: Any, last: Any
) -> None:
    """Words below ``salt`` are white, others below ``pepper`` black."""
    words, row = np.empty((4, BLOCKS), np.uint32), np.empty(WORDS, np.uint32)
    for b in range(first, last):
        x, y = images[b].reshape(-1), out[b].reshape(-1)
        for place in range(0, len(x), WORDS):
            sample_words(np.uint64(place // 4), sample[b], middle, seed, words)
            in_order(words, row)
            _strike(x[place : place + WORDS], row, salt, pepper, y[place : place + WORDS])


@_compiled
def uniform(out: Any, skip: Any, sample: Any, middle: Any, seed: Any, first: Any, last: Any) -> None:
    """Rows of float32 in (0, 1], of the words from ``skip`` on, which is whole blocks."""
    words, row = np.empty((4, BLOCKS), np.uint32), np.empty(WORDS, np.uint32)
    for b in range(first, last):
        y = out[b]
        for place in range(0, len(y), WORDS):
            sample_words(np.uint64((place + skip) // 4), sample[b], middle, seed, words)
            in_order(words, row)
            for i in range(min(WORDS, len(y) - place)):
                y[place + i] = to_uniform(row[i])
