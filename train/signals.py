"""Ending a run between two steps instead of in the middle of one."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from fastmoll.distributed import ONE_NOTICE, Process


class Signals:
    """The SIGINT or SIGTERM that came to a run, by its number; 0 where none did.

    Attributes:
        own: That of this process.
    """

    def __init__(self, process: Process) -> None:
        """Of the run that ``process`` is one of."""
        self.own = 0
        self._process = process
        self._sent: tuple[torch.Tensor, Any] | None = None

    def look(self) -> int:
        """That of any process; all of them must look equally often, once a step.

        They hear of it in the same step, the one after it came: their CPUs exchange it while a step is computed, so
        that none waits for the others' last step, let alone for a GPU.
        """
        if self._process.world_size == 1:
            return self.own
        sent, number = self._sent, torch.tensor(self.own)
        if sent is not None:
            sent[1].wait()
        self._sent = number, dist.all_reduce(number, dist.ReduceOp.MAX, async_op=True)
        return 0 if sent is None else int(sent[0])

    def agreed(self) -> int:
        """That of any process by now; waits for all of them, and leaves nothing under way between them."""
        if self._sent is not None:
            self._sent[1].wait()
            self._sent = None
        number: int = max(self._process.gather(self.own))
        return number


@contextmanager
def stop_asked(process: Process) -> Iterator[Signals]:
    """Let the first SIGINT or SIGTERM (a cluster's notice) wait until the block looks for it; a later one ends it.

    Yields:
        Where the block looks.

    Raises:
        KeyboardInterrupt: a second signal came, more than a moment later.
    """
    signals = Signals(process)
    first = 0.0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if signals.own:
            if time.monotonic() - first > ONE_NOTICE:
                raise KeyboardInterrupt
            return
        signals.own, first = number, time.monotonic()
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write("stopping soon; once more to stop at once\n")

    # Python hands signals to the main thread alone; one that is ignored, as that of a job in the background, stays so.
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
