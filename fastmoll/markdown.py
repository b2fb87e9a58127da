"""Text in Markdown: what the tables of reports and of sweeps share."""

from __future__ import annotations

import re
from typing import Final

_MARKUP: Final = re.compile(r"[\\|*`<~$\[\]]|&(?=#?\w+;)|(?<![^\W_])_|_(?![^\W_])")
"""Signs that would start something: not an underscore within a word."""


def escape_markdown(text: str) -> str:
    """Text with a backslash before every character that Markdown, GitHub's too, takes for markup."""
    return _MARKUP.sub(lambda found: f"\\{found[0]}", text)
