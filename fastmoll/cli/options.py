"""Options that commands share, and their names in messages, as the user types them."""

from __future__ import annotations

import argparse
import re


def name_option(message: str, parser: argparse.ArgumentParser) -> str:
    """A message that begins with the name of a parameter, with that of its option instead.

    Args:
        message: ``"severities must be 1 to 5, got 7"``, ``"images: there is no folder x"``.
        parser: That of the command, whose options have the parameters' names as their ``dest``.

    Returns:
        ``"--severities must be 1 to 5, got 7"``; any other message as it is.
    """
    for action in parser._actions:
        name = "/".join(action.option_strings) or str(action.metavar)
        message, count = re.subn(rf"^{re.escape(action.dest)}(?= must\b|:|\[)", name, message)
        if count:
            break
    return message


def add_cells(parser: argparse.ArgumentParser, severities: str = "") -> None:
    """Add the options that choose cells of a corrupted set; there may be more to say of some severities."""
    parser.add_argument(
        "--corruptions", nargs="+", default=argparse.SUPPRESS, metavar="NAME", help="some only (default: all 15)"
    )
    parser.add_argument(
        "--severities",
        nargs="+",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help=f"some only{severities} (default: 1 to 5)",
    )
