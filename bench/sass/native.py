"""The C of this package, compiled once a process by the system's compiler, into a folder that is gone after that."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from sass.decode import OPERATIONS

_SOURCES = ("interpreter.c", "timing.c")
# The interpreter sets rounding modes, and rounds products and sums one by one.
_FLAGS = "-std=gnu11 -O2 -march=native -ffp-contract=off -frounding-math -fno-strict-aliasing -fPIC -shared"


def compiler() -> str | None:
    """The C compiler: ``$CC``, or ``cc``."""
    return shutil.which(os.environ.get("CC", "cc"))


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled sources.

    Raises:
        FileNotFoundError: there is no C compiler.
        RuntimeError: it does not compile them, with what it says.
    """
    program = compiler()
    if program is None:
        raise FileNotFoundError("machine code is interpreted by C: install a C compiler as cc, or name one in $CC")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "sass.so")
        macros = [f"-DOP_{name}={number}" for name, number in OPERATIONS.items()]
        sources = [str(Path(__file__).with_name(name)) for name in _SOURCES]
        done = subprocess.run(
            [program, *_FLAGS.split(), *macros, *sources, "-lm", "-o", str(file)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{program} does not compile the interpreter of machine code: {done.stderr.strip()}")
        return ctypes.CDLL(str(file))
