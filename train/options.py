"""Names of options in messages, as the user knows them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from typing import Any, get_type_hints

from fastmoll.train.settings import Config


def as_typed(text: str, config: Config, argv: Sequence[str] | None) -> str:
    """A message that names options in full, with the short forms of those that have one and were not typed in full.

    Args:
        text: The message.
        config: Settings of the run.
        argv: Its command line without the program's name; None: that of this process.
    """
    typed = {word.partition("=")[0].replace("_", "-") for word in (sys.argv[1:] if argv is None else argv)}
    for full, short in _short_forms(type(config)):
        if full not in typed:
            text = re.sub(rf"(?<![\w.-]){re.escape(full)}(?!\.?[\w-])", short, text)
    return text


def _short_forms(kind: type[Any], prefix: str = "--") -> Iterator[tuple[str, str]]:
    for name, annotation in get_type_hints(kind, include_extras=True).items():
        full = prefix + name.replace("_", "-")
        if isinstance(annotation, type) and is_dataclass(annotation):
            yield from _short_forms(annotation, f"{full}.")
        for note in getattr(annotation, "__metadata__", ()):
            for short in getattr(note, "aliases", None) or ():
                yield full, short
