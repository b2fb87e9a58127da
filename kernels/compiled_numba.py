"""How the CPU's kernels are compiled; importing this file imports Numba.

All of them let go of the GIL and divide as NumPy does. They are compiled once and kept on disk, where Numba finds a
folder that can be written to: beside the source, in the user's cache, or ``$NUMBA_CACHE_DIR``. What is damaged there is
compiled once more; what can't be kept there, because the disk is full, by each process.
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

    def save_overload(self, *arguments: Any) -> None:
        try:
            super().save_overload(*arguments)  # type: ignore[no-untyped-call]
        except OSError as error:
            self.leave(error)

    def forget(self, error: Exception) -> None:
        """Take the files of the function for none at all."""
        name = f"{self._py_func.__module__}.{self._py_func.__qualname__}"
        what = f"{type(error).__name__}: {error}"
        warnings.warn(f"{name} is compiled anew: its files in {self.cache_path} are damaged ({what})", stacklevel=2)
        try:
            self.flush()  # type: ignore[no-untyped-call]
        except OSError as failure:
            self.leave(failure)

    @property
    def enabled(self) -> bool:
        """Whether there are files."""
        return bool(self._enabled)

    def leave(self, error: OSError) -> None:
        """Do without files from now on."""
        self.disable()  # type: ignore[no-untyped-call]
        warnings.warn(f"each process compiles anew: {self.cache_path} can't be used ({error})", stacklevel=2)


def _compile(compiler: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    def decorate(function: Callable[..., Any]) -> Any:
        uncached = compiler(*arguments, error_model="numpy", **options)
        try:
            cache = _Cache(function)  # type: ignore[no-untyped-call]
        except RuntimeError:  # no such folder, in a read-only container: compiled anew by each process
            return uncached(function)
        cached = compiler(*arguments, cache=True, error_model="numpy", **options)
        try:  # functions that are compiled at once are looked up, and kept, in Numba's own cache
            made = cached(function)
        except OSError as error:
            cache.leave(error)
            return uncached(function)
        except Exception as error:
            cache.forget(error)
            made = (cached if cache.enabled else uncached)(function)
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
