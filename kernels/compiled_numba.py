"""How the CPU's kernels are compiled; importing this file imports Numba.

All of them let go of the GIL and divide as NumPy does. They are compiled once and kept on disk, where Numba finds a
folder that can be written to: beside the source, in the user's cache, or ``$NUMBA_CACHE_DIR``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def _compile(compiler: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return compiler(*arguments, cache=True, error_model="numpy", **options)(function)
        except RuntimeError:  # no such folder, in a read-only container: compiled anew by each process
            return compiler(*arguments, error_model="numpy", **options)(function)

    return decorate


compiled = _compile(numba.njit, nogil=True)
"""For functions whose products and sums are rounded one by one."""
fused = _compile(numba.njit, nogil=True, fastmath={"contract"})
"""For those whose products and sums may be fused."""


def entry(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """For functions that C calls by their address, compiled at once."""
    return _compile(numba.cfunc, signature)
