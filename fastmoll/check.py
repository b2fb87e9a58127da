"""``fastmoll check``: decode every file of a data set before a run depends on it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import IO

from fastmoll.output import Bar
from fastmoll.pipelines import check_dali
from fastmoll.pipelines.diagnose import Finding, diagnose
from fastmoll.pipelines.errors import counted
from fastmoll.pipelines.files import SPLITS, ImageFolder, check_classes, check_several, list_folder

_CHUNK = 32  # files a task: enough to hide the cost of sending it, few enough to stop at once
_TASKS_PER_WORKER = 4
_CRASHED = "crashes the decoder: its process died"
_EMPTY = "class folder without an image, which training refuses"
_UNLISTABLE = "line break in its name: DALI's file list can't carry it"
_SHOWN = 8  # kinds of ignored files that are told apart


def check_files(
    paths: Sequence[str | os.PathLike[str]], threads: int | None = None
) -> Generator[Finding | None, None, None]:
    """Decode files in parallel, each as training would on the CPU.

    Every worker is a process of its own: DALI's eager mode holds Python's lock for half a millisecond a file, warnings
    of a decoder can only be told apart on a standard error of one's own, and one that crashes takes nothing else along.
    At most 128 files a worker are under way at a time, whatever the number of paths.

    Args:
        paths: Image files.
        threads: Number of worker processes, one file at a time each; by default one per usable core.

    Yields:
        For each path, in order, what is bad or odd about the file, or ``None``.

    Raises:
        ValueError: ``threads`` is not positive.
        ImportError: DALI is not installed.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    check_dali()
    names = [os.fspath(path) for path in paths]
    chunks = deque(names[start : start + _CHUNK] for start in range(0, len(names), _CHUNK))
    workers = max(1, min(threads or len(os.sched_getaffinity(0)), len(chunks)))
    return _run(chunks, workers)


def _run(todo: deque[list[str]], workers: int) -> Generator[Finding | None, None, None]:
    running: deque[tuple[list[str], Future[list[Finding | None]]]] = deque()
    pool = _pool(workers)
    try:
        while todo or running:
            try:
                while todo and len(running) < workers * _TASKS_PER_WORKER:
                    running.append((todo[0], pool.submit(_check_chunk, todo[0])))
                    todo.popleft()
                findings = running[0][1].result()
                running.popleft()
            except BrokenProcessPool:
                # One of the files under way killed its process, and the pool with it. Which one shows when they go
                # through one at a time; the oldest list does so now, the others are queued again.
                pool.shutdown()
                todo.extendleft(chunk for chunk, _ in reversed(running))
                running.clear()
                findings = _one_at_a_time(todo.popleft())
                pool = _pool(workers)
            yield from findings
    finally:
        # Also where an interrupt or a consumer that stops early ends up.
        pool.shutdown(cancel_futures=True)


def _one_at_a_time(paths: list[str]) -> list[Finding | None]:
    findings: list[Finding | None] = []
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(_pool(1))
        for path in paths:
            try:
                findings += pool.submit(_check_chunk, [path]).result()
            except BrokenProcessPool:
                findings.append(Finding(path, "bad", _CRASHED))
                pool = stack.enter_context(_pool(1))
    return findings


def _pool(workers: int) -> ProcessPoolExecutor:
    # A forked child would inherit locks of threads it does not have (tqdm's, DALI's).
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker)


_messages: IO[bytes] | None = None


def _start_worker() -> None:
    global _messages
    # The parent gets the interrupt too and lets the workers finish what they hold.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Nothing is decoded on a GPU, and a CUDA context per worker would fill one.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # DALI loads torch where it can, for tensors nobody makes here: 480 MB and half of a worker's start.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    _messages = tempfile.TemporaryFile(buffering=0)  # open as long as the worker lives
    os.dup2(_messages.fileno(), 2)


def _take_messages() -> str:
    """What was written to this worker's standard error since the last call."""
    assert _messages is not None
    size = _messages.tell()  # the descriptor 2 shares this position: whatever writes there moves it
    if not size:
        return ""
    _messages.seek(0)
    text = _messages.read(size).decode(errors="replace")
    _messages.seek(0)
    _messages.truncate()
    return text


def _check_chunk(paths: list[str]) -> list[Finding | None]:
    import nvidia.dali.experimental.dynamic as ndd

    ndd.set_num_threads(1)
    return [diagnose(path, _take_messages) for path in paths]


def run_check(
    data: Path,
    *,
    split: str | None = None,
    allow_odd: bool = False,
    threads: int | None = None,
) -> int:
    """Check a data set: a line for each bad or odd file as it is found, then a summary by reason, on standard output.

    Files that are no samples (other extensions, pipes) are counted in the summary, not judged. Classes that training
    refuses make a line like a bad file's.

    Args:
        data: ImageFolder tree.
        split: Folder below ``data`` to check; by default every one of train, val, validation and test that exists, and
            ``data`` itself if there is none.
        allow_odd: Odd files are listed, but the result is success.
        threads: As for `check_files`.

    Returns:
        Exit status: 1 if a file, or the classes, are bad (or odd, without ``allow_odd``), else 0.

    Raises:
        ValueError: No data set or no such split there, or ``threads`` is not positive.
        OSError: A folder can't be read.
        ImportError: DALI is not installed.
    """
    if split is not None and data.is_dir() and not (data / split).is_dir():
        raise ValueError(f"split: {data} has no folder {split!r}")
    splits = [split] if split is not None else [name for name in SPLITS if (data / name).is_dir()] or ["train"]
    check_dali()
    listed = [list_folder(data, name) for name in splits]
    folders = [folder for folder, _ in listed]
    ignored = sum((others for _, others in listed), Counter[str]())
    paths = [folder.path(sample) for folder in folders for sample in range(len(folder))]
    unlistable = {folder.path(sample) for folder in folders for sample in folder.unlistable}
    kinds: Counter[str] = Counter()
    reasons: Counter[tuple[str, str]] = Counter()

    def note(finding: Finding) -> str:
        """Count it, and put it into a line."""
        kinds[finding.kind] += 1
        # A reason is "what: detail"; the detail differs from file to file.
        reasons.update((finding.kind, part.split(":")[0]) for part in finding.reason.split("; "))
        return _printable(f"{finding.kind} {finding.path}: {finding.reason}")

    for folder in folders:
        for name in folder.empty:
            sys.stdout.write(f"{note(Finding(str(folder.root / name), 'bad', _EMPTY))}\n")
    refusal = _refusal(dict(zip(splits, folders, strict=True)))
    if refusal is not None:
        sys.stdout.write(f"{note(Finding(str(data), 'bad', refusal))}\n")
    with (
        contextlib.closing(check_files(paths, threads)) as findings,
        Bar(total=len(paths), unit=" files", dynamic_ncols=True) as bar,
    ):
        for path, finding in zip(paths, findings, strict=True):
            bar.update()
            if path in unlistable:
                finding = Finding(path, "bad", _UNLISTABLE)
            if finding is not None:
                bar.write(note(finding), file=sys.stdout)
                bar.set_postfix(kinds, refresh=False)
    if reasons:
        sys.stdout.write("\n")
    for (kind, what), count in sorted(reasons.items(), key=lambda item: (item[0][0], -item[1])):
        sys.stdout.write(f"{count:8} {kind}  {what}\n")
    if ignored:
        frequent = sorted(ignored.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN]
        counts = [f"{count} {_printable(what)}" for what, count in frequent]
        more = [f"{ignored.total()} in all"] if len(ignored) > _SHOWN else []
        sys.stdout.write(f"ignored in class folders: {', '.join(counts + more)}\n")
    if split is None and splits == ["train"] and (data / "train").is_dir():
        sys.stdout.write(f"no val folder in {_printable(str(data))}: the trainers do not start without one\n")
    classes = {name for folder in folders for name in folder.classes}
    verdict = f"{kinds['bad']} bad" if kinds["bad"] else "all decode"
    odd = f", {kinds['odd']} odd" if kinds["odd"] else ""
    sys.stdout.write(f"{counted(len(paths), 'file')} in {counted(len(classes), 'class', 'classes')}: {verdict}{odd}\n")
    return int(kinds["bad"] > 0 or (kinds["odd"] > 0 and not allow_odd))


def _refusal(folders: Mapping[str, ImageFolder]) -> str | None:
    """What training says of the classes in these splits, where it refuses them."""
    if "train" not in folders:
        return None
    classes = folders["train"].classes
    try:
        if "val" in folders:
            check_classes(classes, folders["val"].classes, "train and val")
        check_several(classes)
    except ValueError as error:
        return str(error)
    return None


def _printable(text: str) -> str:
    """One harmless line: file names may hold line breaks, escape sequences, and bytes that are no UTF-8."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
