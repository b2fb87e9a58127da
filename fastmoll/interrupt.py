"""Ctrl-C while what a command needs is still being imported."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def importing() -> Iterator[None]:
    """Let SIGINT end the process at once in this block: a line on the first process, exit code 130.

    Modules in the middle of being imported may make something else of an exception, or nothing: NumPy an ImportError,
    torch a NumPy that is not there.
    """
    before = signal.getsignal(signal.SIGINT)
    # One that is ignored, as that of a job in the background, stays so; Python hands signals to the main thread alone.
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
    os._exit(128 + number)
