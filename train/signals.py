"""Ending a run between two steps instead of in the middle of one."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_asked() -> Iterator[Callable[[], int]]:
    """Let the first SIGINT or SIGTERM (a cluster's notice) wait until the block looks for it; another one ends it.

    Validation does not look; the checkpoint before it is there, whatever happens.

    Yields:
        A function that gives the number of the signal that came, 0 where none did.

    Raises:
        KeyboardInterrupt: a second signal came.
    """
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write("stopping after a step; once more to stop at once\n")

    # Python hands signals to the main thread alone; one that is ignored, as that of a job in the background, stays so.
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield lambda: caught[0] if caught else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
