"""A process as its starter left it: Ctrl-C while what it needs is still being imported, and streams that are closed."""

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


@contextmanager
def tidying() -> Iterator[None]:
    """Let SIGTERM and a hang-up end the block as an exception does: what is half done is removed; exit code 143 or 129.

    Those that are ignored, as by nohup, stay so.
    """

    def end(number: int, frame: FrameType | None) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)  # the removal is not to be interrupted
        raise SystemExit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    before = [x for x in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(x) is signal.SIG_DFL]
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in before:
            signal.signal(number, signal.SIG_DFL)


def open_streams() -> None:
    """Let what is said be lost where standard output or error is closed (``>&-``): it is no reason to stop working."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8", errors="backslashreplace"))


def reader_gone() -> int:
    """The exit code where whoever read standard output (``| head``) closed it, of which no more is to be said."""
    # The interpreter flushes once more as it ends, and would complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def _end(number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
    os._exit(128 + number)
