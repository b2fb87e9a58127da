"""What a run says: its progress bars, where they can be redrawn and where they can't."""

from __future__ import annotations

import io
import re
import sys
import warnings

import pytest
import torch

from fastmoll.distributed import Process, together
from fastmoll.output import Bar, bar, say
from fastmoll.pipelines.errors import BadImageWarning


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


@pytest.mark.parametrize(("often", "leave", "least"), [(True, False, 4), (True, True, 5), (False, True, 2)])
def test_a_bar_in_a_file_is_whole_lines(often: bool, leave: bool, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    both = Stream(False)  # as 2>&1 does
    monkeypatch.setattr(sys, "stderr", both)
    monkeypatch.setattr(sys, "stdout", both)
    monkeypatch.setattr(Bar, "_shown", -float("inf"))
    monkeypatch.setattr("fastmoll.output._SELDOM", 0 if often else 30)
    with Bar(total=3, desc="files", leave=leave, mininterval=0) as progress:
        for _ in range(3):
            progress.update()
            say(Process(0, 1, torch.device("cpu")), "saved")
    shown = both.getvalue().split("\n")
    assert shown.pop() == "" and shown.count("saved") == 3
    assert all(re.fullmatch(r"files: +\d+%\|.*\d/3 \[.*\]", line) for line in shown if line != "saved")
    assert "\r" not in both.getvalue() and len(shown) - 3 >= least
    assert "100%" in [line for line in shown if line != "saved"][-1] or not leave


def test_warnings_of_ours_are_a_line_and_others_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    def work(process: Process) -> None:
        warnings.warn("x.jpg: empty", BadImageWarning, stacklevel=1)
        warnings.warn("of others", UserWarning, stacklevel=1)

    before = warnings.showwarning
    with pytest.warns(UserWarning, match="of others") as others:
        assert together("cpu", work) == 0
    assert len(others) == 1 and warnings.showwarning is before
    assert capsys.readouterr().err == "warning: x.jpg: empty\n"
