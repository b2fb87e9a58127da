"""The errors of images that can't be read or are of wrong sizes, and the warning where a loader goes on without one."""

from __future__ import annotations

import os
from collections.abc import Sequence


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
