"""``fastmoll evaluate --rescore``: what it takes besides its folder, which is nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from fastmoll.cli import evaluate
from fastmoll.cli.main import main


def options() -> list[str]:
    """Each option there is, with a value that it doesn't have by itself."""
    parser = argparse.ArgumentParser()
    evaluate.add(parser.add_subparsers())
    (commands,) = (action for action in parser._actions if isinstance(action.choices, dict))
    assert isinstance(commands.choices, dict)
    found = []
    for action in commands.choices["evaluate"]._actions:
        name = action.option_strings[-1] if action.option_strings else ""
        if name in ("--help", "--rescore"):
            continue
        value = str(action.choices[-1]) if isinstance(action.choices, list) else "3"
        count = action.nargs if isinstance(action.nargs, int) else 1
        found.append(" ".join([name, *[value] * count]).strip())
    return found


OPTIONS = options()


def test_the_options_are_all_there() -> None:
    assert {"3", "--batch-size 3", "--predictions", "--precision off", "--mean 3 3 3"} <= {*OPTIONS}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_but_the_folder_is_refused_by_name(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", *option.split(), "--rescore", str(tmp_path)]) == 2
    name = option.split()[0] if option.startswith("--") else "CHECKPOINT"
    command = f"fastmoll evaluate --rescore {tmp_path}"
    assert capsys.readouterr().err == f"error: --rescore needs nothing but its folder, got {name}: {command}\n"


def test_several_are_named_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--seed", "1", "--rescore", str(tmp_path), "--batch-size", "1"]) == 2
    assert "got --batch-size, --seed" in capsys.readouterr().err
