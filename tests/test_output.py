"""What a run says: its progress bars, where they can be redrawn and where they can't."""

from __future__ import annotations

import io
import sys

import pytest
import torch

from fastmoll.distributed import Process
from fastmoll.output import Bar, bar, say


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize(("terminal", "lines"), [(False, [1]), (True, range(7, 100))])
def test_a_bar_in_a_file_is_written_once_in_a_while_whatever_is_said_of_it(
    terminal: bool, lines: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Stream(terminal))
    monkeypatch.setattr(Bar, "_shown", -float("inf"))
    process = Process(0, 1, torch.device("cpu"))
    with bar(range(0), process, "epoch 1", 3) as progress:
        for step in range(3):
            progress.update()
            progress.set_postfix_str(f"loss {step}")
            say(process, "saved")
    assert sys.stderr.getvalue().count("epoch 1: ") in lines  # type: ignore[attr-defined]
