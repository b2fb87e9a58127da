"""The errors of images, the warning where a loader goes on without one, and words that many messages have."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence


class BadImageError(RuntimeError):
    """One or more image files can't be decoded.

    Attributes:
        files: ``(path, reason)`` of every file found to be the cause; empty when the decoder failed and no single
            file of the batch does when it is decoded alone.
    """

    def __init__(self, files: Sequence[tuple[str, str]], context: str) -> None:
        """Compose the message: one line a file, then what to do about it."""
        self.files = list(files)
        listed = "".join(f"\n  {path}: {reason}" for path, reason in self.files)
        super().__init__(f"{context}{listed}")


class ImageSizeError(ValueError):
    """Images of several sizes, or too large ones, for what keeps them all in one array."""


class BadImageWarning(UserWarning):
    """An image file can't be decoded, and another takes its place."""


def in_words(error: Exception) -> str:
    """An error's message, that of the system as the file and what is wrong with it."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def reason_of(error: BaseException) -> str:
    """The type of an error and the first line of its message, of code that says what is wrong in many lines."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def counted(number: int, one: str, more: str | None = None) -> str:
    """A number and what it is of: ``1 step``, ``2 steps``.

    Args:
        number: How many.
        one: The noun.
        more: Its plural; by default with an s.
    """
    return f"{number} {one if number == 1 else more or f'{one}s'}"


def some(names: Sequence[str], most: int = 3) -> str:
    """The first of some names, and how many more there are: ``"a, b, c and 2 more"``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def nearest(name: object, known: Iterable[str], most: int = 1) -> list[str]:
    """The known names that may have been meant by one that there is not; none where none is near.

    Those are up to three that begin with it, of more those that are spelt much like it, else those that end in it after
    a dot; and, up to ``most`` in all, others that are spelt much like it; without any, the longest that it begins with
    in the middle of a word. Case, hyphens and underscores make no difference.
    """
    bare, given = {_bare(x): x for x in known}, str(name).lower().replace("-", "_")
    name = _bare(given)
    begun = [x for x in bare if name and x.startswith(name)]
    if len(begun) > 3:
        begun = difflib.get_close_matches(name, begun, most, 0.75)
    first = begun or [x for x in bare if x.endswith(f".{name}")]
    near = dict.fromkeys([*first, *difflib.get_close_matches(name, bare, most, 0.75)])
    # Where another word follows, as in mollify_alpha, it is something else that is meant.
    begins = [x for x, y in bare.items() if len(x) > 2 and given.startswith(y.lower().replace("-", "_"))]
    whole = [x for x in begins if given[len(bare[x]) :][:1] not in "._"]
    return [bare[x] for x in near or sorted(whole, key=len)[-1:]][: max(most, len(first))]


def nearest_option(name: str, known: Iterable[str]) -> list[str]:
    """`nearest` among options in groups: first up to three that are called so in another group, after its dot."""
    known, (_, dot, last) = [*known], name.rpartition(".")
    elsewhere = [x for x in known if dot and _bare(x).endswith(f".{_bare(last)}")]
    return elsewhere if 0 < len(elsewhere) <= 3 else nearest(name, known)


def _bare(name: str) -> str:
    return re.sub("[-_]", "", name.lower())


def did_you_mean(near: Sequence[str], otherwise: str = "") -> str:
    """Names that `nearest` found as the end of a message, ``"; did you mean fog?"``; else what there is to say."""
    return f"; did you mean {' or '.join(near)}?" if near else otherwise
