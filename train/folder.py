"""The output folder: what is in it, who writes to it, and files that are there whole or not at all."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def look_for_run(output: Path, wanted: bool) -> bool:
    """Whether ``output`` has a checkpoint to go on from.

    Args:
        output: Folder, which need not be there.
        wanted: Whether a run is to go on, not to begin.

    Raises:
        ValueError: it is no folder, or holds a run that a new one would overwrite.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"--run.output: {output} is not a folder")
    found = (output / "checkpoint.pt").exists()
    if wanted and found:
        return True
    if (output / "result.json").exists():
        raise ValueError(f"--run.output: {output} holds a finished run; choose another folder")
    if not wanted and (found or (output / "log.jsonl").exists()):
        raise ValueError(f"--run.output: {output} holds an unfinished run; pass --run.resume or choose another folder")
    return False


@contextmanager
def lock(output: Path) -> Iterator[None]:
    """Make the folder and keep other runs out of it; a run that is killed lets go of it too.

    Raises:
        ValueError: another run is in it, or it can't be made.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--run.output: {output} can't be made: {error.strerror}") from error
    with open(output / ".lock", "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise ValueError(f"--run.output: {output} is in use by another run (process {owner})") from None
        except OSError:
            pass  # some cluster file systems have no locks: better to run unguarded there than not at all
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}\n")
        file.flush()
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
