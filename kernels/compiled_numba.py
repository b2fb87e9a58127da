"""How the CPU's kernels are compiled; importing this file imports Numba.

All of them let go of the GIL and divide as NumPy does. They are compiled once and kept on disk, where Numba finds a
folder that can be written to: beside the source, in the user's cache, or ``$NUMBA_CACHE_DIR``. What is damaged there is
compiled once more.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numba
from numba.core.caching import FunctionCache


class _Cache(FunctionCache):
    """Numba's fails at a damaged file, with whatever error that leads to, and so would every process to come."""

    def load_overload(self, *arguments: Any) -> Any:
        try:
            return super().load_overload(*arguments)  # type: ignore[no-untyped-call]
        except Exception as error:
            self.forget(error)
            return None

    def forget(self, error: Exception) -> None:
        """Take the files of the function for none at all."""
        name = f"{self._py_func.__module__}.{self._py_func.__qualname__}"
        what = f"{type(error).__name__}: {error}"
        warnings.warn(f"{name} is compiled anew: its files in {self.cache_path} are damaged ({what})", stacklevel=2)
        self.flush()  # type: ignore[no-untyped-call]


def _compile(compiler: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    def decorate(function: Callable[..., Any]) -> Any:
        try:
            cache = _Cache(function)  # type: ignore[no-untyped-call]
        except RuntimeError:  # no such folder, in a read-only container: compiled anew by each process
            return compiler(*arguments, error_model="numpy", **options)(function)
        cached = compiler(*arguments, cache=True, error_model="numpy", **options)
        try:
            made = cached(function)
        except Exception as error:  # of functions that are compiled at once, and so looked up in Numba's own cache
            cache.forget(error)
            made = cached(function)
        made._cache = cache
        return made

    return decorate


compiled = _compile(numba.njit, nogil=True)
"""For functions whose products and sums are rounded one by one."""
fused = _compile(numba.njit, nogil=True, fastmath={"contract"})
"""For those whose products and sums may be fused."""


def entry(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """For functions that C calls by their address, compiled at once."""
    return _compile(numba.cfunc, signature)
