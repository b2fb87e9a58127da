"""Text in Markdown and CSV: what the tables of reports and of sweeps share."""

from __future__ import annotations

import re
from typing import Final

_MARKUP: Final = re.compile(r"[\\|*`<~$\[\]]|&(?=#?\w+;)|(?<![^\W_])_|_(?![^\W_])")
"""Signs that would start something: not an underscore within a word."""
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def escape_markdown(text: str) -> str:
    """Text with a backslash before every character that Markdown, GitHub's too, takes for markup."""
    return _MARKUP.sub(lambda found: f"\\{found[0]}", text)


def escape_csv(text: str) -> str:
    """Text with an apostrophe before what a spreadsheet would take for a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text
