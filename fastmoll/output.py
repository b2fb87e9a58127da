"""What a run leaves and says: its folder, files that are there whole or not at all, lines and bars on rank 0."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar

from tqdm import tqdm

if TYPE_CHECKING:
    from fastmoll.distributed import Process

T = TypeVar("T")

LARGEST_LOSS: Final = 3.5e38
"""Just above what float32, in which losses are, holds: a larger one in a file is none that a run left."""

_SELDOM: Final = 30  # seconds


@contextmanager
def lock(output: Path, option: str) -> Iterator[None]:
    """Make the folder and keep other runs out of it; a run that is killed lets go of it too.

    Args:
        output: Folder.
        option: What the user gave it by, for messages.

    Raises:
        ValueError: another run is in it, or it can't be made or written to.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        opened = open(output / ".lock", "a+", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option}: {output} can't be made or written to: {error.strerror}") from error
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise ValueError(f"{option}: {output} is in use by another run (process {owner})") from None
        except OSError:
            pass  # some cluster file systems have no locks: better to run unguarded there than not at all
        try:
            file.truncate(0)
            file.write(f"{os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        except OSError as error:  # a full disk
            raise ValueError(f"{option}: {output} can't be written to: {error.strerror}") from error
        yield


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` at the end of the block: a kill leaves the old one or the new one.

    Raises:
        OSError: it can't be written, for example because the disk is full; the old one stays, the new one is removed.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        # The new name is on the disk only once the folder is.
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except BaseException as error:
        part.unlink(missing_ok=True)
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__  # torch.save turns the disk's error into one of its own
        if cause is None:
            raise
        raise OSError(f"{path} can't be written: {cause.strerror or cause}") from error


def write_json(path: Path, content: object) -> None:
    """Write a JSON file in one piece."""
    with replacing(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def check_writable(option: str, folder: Path) -> None:
    """Refuse a folder that can't be made or written to, before the work whose results belong there.

    Raises:
        ValueError: it, or the first one above it that is there, is a file or can't be written to; after ``option``.
    """
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not there.is_dir():
        raise ValueError(f"{option}: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{option}: {there} can't be written to: no permission")


def in_runs(folder: Path, *patterns: str) -> list[Path]:
    """What matches in the folders of runs below ``folder``, a sweep's or one of several, in alphabetical order."""
    return sorted({x for depth in ("*", "*/*") for pattern in patterns for x in folder.glob(f"{depth}/{pattern}")})


def run_weights(folder: Path) -> Path | None:
    """The weights of the finished run in a folder: ``model.pt`` or, where that was removed, its last checkpoint."""
    names = ["model.pt", *(["checkpoint.pt"] if (folder / "result.json").exists() else [])]
    return next((folder / name for name in names if (folder / name).is_file()), None)


class Bar(tqdm):  # type: ignore[type-arg]
    """A progress bar that writes a line now and then where it can't be redrawn, in a file or the log of a job."""

    _shown = -float("inf")  # of all bars together

    def refresh(self, *args: Any, **options: Any) -> None:
        now = time.monotonic()
        if sys.stderr.isatty() or now - self._shown >= _SELDOM:
            Bar._shown = now
            super().refresh(*args, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if sys.stderr.isatty():
            return super().display(msg, pos)
        if msg is None:  # and not the empty one that takes a bar away
            self.fp.write(f"{self}\n")
        return None

    def clear(self, *args: Any, **options: Any) -> None:
        if sys.stderr.isatty():
            super().clear(*args, **options)

    def close(self) -> None:
        if self.leave and not self.disable and not sys.stderr.isatty():
            self.leave = False  # which would end its last line once more
            self.display()
        super().close()


def bar(items: Iterable[T], process: Process, description: str, total: int, done: int = 0) -> tqdm[T]:
    """A progress bar on rank 0 over ``items``, or moved by hand where they are empty.

    Args:
        items: What to go through.
        process: This process.
        description: Text before the bar.
        total: Number of items or moves.
        done: Those done before.
    """
    return Bar(
        items,
        desc=description,
        total=total,
        initial=done,
        disable=not process.main,
        leave=False,
        dynamic_ncols=True,
        mininterval=0.2,
        unit="batch",
    )


def say(process: Process, text: str) -> None:
    """A line on rank 0's standard output that leaves the progress bar whole.

    Raises:
        OSError: whoever reads it is gone (``| head``), or the disk that it goes to is full.
    """
    if process.main:
        try:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()
        except OSError as error:
            raise type(error)(f"standard output can't be written to: {error.strerror}") from error
