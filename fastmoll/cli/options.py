"""Names of options in messages, as the user types them."""

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
