"""A counter for threads that share work; importing this file imports Numba.

Files that use it change with it: see tests/test_numba_cache.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

# Its type says how it is written, not how it is called.
_intrinsic: Callable[[Any], Any] = intrinsic


@_intrinsic
def take(context: Any, counter: Any) -> Any:
    """The next number of a counter, an int64 array of one element: each number goes to one thread only."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.atomic_rmw("add", array.data, ir.IntType(64)(1), "monotonic")

    return types.int64(counter), generate
