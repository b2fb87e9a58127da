"""Where in the text of a sweep's file something stands, for messages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

DEFAULTS: Final = "[defaults]"


def grid_name(number: int) -> str:
    """What a message calls the grid of that number, from 1."""
    return f"[[grid]] {number}"


class Places:
    """The lines of a sweep's file and the tables that they are of.

    Args:
        path: The file.
        text: Its content.
        grids: Number of its grids. Where they have no heads of their own (``grid = [{...}]``), a line is of any table.
    """

    def __init__(self, path: Path, text: str, grids: int) -> None:
        self.path = path
        self.lines = [line.split("#")[0] for line in text.splitlines()]
        self.tables: list[str | None] = []
        table, number = None, 0
        for line in self.lines:
            head = re.match(r"\s*(\[\[?)\s*(grid|defaults)\s*[].]", line)
            if head and head[2] == "grid":
                number += head[1] == "[[" and re.match(r"\s*\[\[\s*grid\s*\]", line) is not None
                table = grid_name(number)
            elif head:
                table = DEFAULTS
            self.tables.append(table)
        if number != grids:
            self.tables = [None] * len(self.lines)

    def find(self, table: str, *words: object, note: str = "") -> str:
        """The file, the table, and the first line of it that has all of ``words``: ``"a.toml, [[grid]] 2, line 8"``.

        Args:
            table: As `grid_name` and `DEFAULTS` name it, or another name of the whole file.
            words: Keys, ``-`` and ``_`` in them alike, and values, text in double quotes.
            note: What is said behind the table.
        """
        signs = [re.compile(_sign(str(word))) for word in words]
        own = [n for n, x in enumerate(self.tables) if x in (table, None) or table not in self.tables]
        found = [n for n in own if signs and all(sign.search(self.lines[n]) for sign in signs)]
        line = f", line {found[0] + 1}" if found else ""
        return f"{self.path}, {table}{note}{line}"


def _sign(word: str) -> str:
    """The regular expression of a key or of a value in quotes, be they double or single."""
    if word.startswith('"'):
        return f"[\"']{re.escape(word[1:-1])}[\"']"
    return rf"(?<![\w-]){re.sub('[-_]', '[-_]', word)}(?![\w-])"
