"""``fastmoll sweep``: many training runs from one file, one at a time per GPU, each in a folder of its own."""

from __future__ import annotations

import fcntl
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Final

from fastmoll.distributed import ONE_NOTICE
from fastmoll.pipelines.errors import in_words
from fastmoll.sweep.arguments import find_file, parse_task
from fastmoll.sweep.checks import check_names, check_start, done_otherwise
from fastmoll.sweep.file import Run, read_sweep
from fastmoll.sweep.select import select
from fastmoll.sweep.settings import environment_alone
from fastmoll.sweep.table import as_csv, as_markdown, is_done, make_rows, read_results

_POLL: Final = 0.2
_GRACE: Final = 15.0  # seconds to end in; SLURM gives 30 before it kills
_TAIL: Final = 12


def run_sweep(
    file: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    filters: Sequence[str] = (),
    task: str | None = None,
    device: str = "auto",
    gpus: str | None = None,
    action: str = "run",
) -> int:
    """Train what a sweep file asks for and is not done yet, then write and print the table of results.

    Every run has its folder ``out/<name>``, with the trainer's files and its messages in ``output.txt``. A
    ``result.json`` there means done, unless it is damaged: it is then renamed, and the run is done again. A run that
    was begun goes on from its checkpoint. A run that another sweep, or a trainer started by hand, is at is left to it.
    A run that fails, or can't be started, doesn't stop the others. An interrupt, SIGTERM or a hang-up ends the running
    trainers with an interrupt; the next sweep goes on with them.

    Args:
        file: Sweep file, or the name of one in this package (``paper.toml``).
        out: Folder of the runs; default ``runs/<file's name>``.
        filters: Only runs that match all of these: a name, present or former, a value (``cifar10``), ``key=value``
            (``mollify=false``, ``optim.epochs=30``), or, where no run has that value, a part of the run's name.
        task: ``"i/n"``: only part i of n, 1 <= i <= n. The parts have no run in common and together are all, whatever
            is done already.
        device: ``"auto"`` (GPUs where there are any), ``"cuda"`` or ``"cpu"``.
        gpus: GPUs to use, as in ``CUDA_VISIBLE_DEVICES``; default: all that are visible.
        action: ``"run"``, ``"list"`` (print the runs, how far they are, and on standard error what a start here would
            be refused for) or ``"table"`` (only write and print it).

    Returns:
        Exit status: 0; 1 if a run failed or a result of the chosen runs is damaged; 128 and the number of the signal
        that stopped it, after the trainers have ended.

    Raises:
        ValueError: an argument or a name in the file is unknown or unusable; nothing was started.
    """
    path = find_file(file)
    folder = Path("runs") / path.stem if out is None else Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out: {folder} is not a folder")
    part, parts = parse_task(task)
    runs = read_sweep(path)
    check_names(runs)
    every = select(runs, filters)
    chosen = every[part - 1 :: parts]
    if not chosen:
        _say(f"--task {task}: nothing to do, there are only {len(every)} runs")
        return 0
    for note in done_otherwise(chosen, folder):
        sys.stderr.write(f"{note}\n")
    if action == "list":
        _list(chosen, folder)
        try:
            check_start(chosen, folder, device, gpus)
        except ValueError as error:
            sys.stderr.write(f"a start here would be refused: {error}\n")
        return 0
    status = 0
    if action == "run":
        status = _Sweep(chosen, folder, check_start(chosen, folder, device, gpus)).run()
        if status > 1:
            return status
    whole = _write_table(runs, chosen, folder)
    return status if whole else 1


def state(folder: Path) -> str:
    """How far the run in ``folder`` is: ``"done"``, ``"running"``, ``"unfinished"`` or ``"to do"``."""
    if is_done(folder):
        return "done"
    if _held(folder / ".sweep") or _held(folder / ".lock"):
        return "running"
    return "unfinished" if (folder / "checkpoint.pt").exists() else "to do"


def trainer_command(run: Run, folder: Path, device: str) -> list[str]:
    """The command that trains ``run`` in ``folder``, from the beginning or from its checkpoint."""
    own = ["--run.output", str(folder), "--run.resume", "--run.device", device]
    return [sys.executable, "-m", f"fastmoll.train.{run.trainer}", *run.arguments, *own]


@dataclass
class _Child:
    run: Run
    folder: Path
    gpu: str | None
    process: subprocess.Popen[bytes]
    lock: BinaryIO
    begin: int  # of its messages in output.txt
    started: float

    def end(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class _Sweep:
    """Runs, the devices they go to, and what became of them."""

    def __init__(self, runs: Sequence[Run], out: Path, devices: Sequence[str | None]) -> None:
        self.total = len(runs)
        self.out = out
        self.free = deque(devices)
        self.places = len(devices)
        todo = [run for run in runs if state(run.folder(out)) != "done"]
        self.queue = deque(todo)
        self.before = self.total - len(todo)
        self.children: list[_Child] = []
        self.done = self.failed = self.busy = 0

    def run(self) -> int:
        """Train; returns the exit status: 0, 1 if a run failed, 128 and the number of the signal that stopped it."""
        _say(f"{self.total} runs, {self.before} of them done; folder {self.out}")
        with _signals() as signals:
            try:
                while (self.queue or self.children) and not signals:
                    while self.queue and self.free and not signals:
                        self.start(self.queue.popleft())
                    if self.children:
                        time.sleep(_POLL)
                    self.collect()
            finally:
                self.stop(signals)
            if signals:
                name = signal.Signals(signals[0]).name
                _say(f"stopped by {name}; the same command goes on ({self.summary()})")
                return 128 + signals[0]
        _say(self.summary())
        return 1 if self.failed else 0

    def summary(self) -> str:
        counts = {
            "done": self.before + self.done,
            "failed": self.failed,
            "left to another process": self.busy,
            "to do": len(self.queue) + len(self.children),
        }
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count)

    def start(self, run: Run) -> None:
        """Start the trainer of a run, unless it is done or another process is at it."""
        lock = None
        try:
            folder = run.folder(self.out)
            folder.mkdir(parents=True, exist_ok=True)
            lock = _claim(folder / ".sweep")
            if lock is None or _held(folder / ".lock"):
                self.leave(run, lock)
            elif is_done(folder):  # another sweep was faster
                lock.close()
                self.done += 1
            else:
                self.train(run, folder, lock)
        except OSError as error:  # as on a full disk; the others go on
            if lock is not None:
                lock.close()
            self.failed += 1
            _say(f"{run.name}: can't be started: {in_words(error)}")

    def train(self, run: Run, folder: Path, lock: BinaryIO) -> None:
        """Start the trainer of a run in its folder, which ``lock`` keeps others out of, on the next free device."""
        if (folder / "result.json").exists():
            kept = (folder / "result.json").replace(folder / "result.json.damaged")
            _say(f"{run.name}: its result is damaged, and kept as {kept.name}")
        gpu = self.free[0]
        environment = environment_alone()
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
            # Else every trainer would start a thread on each core, as often as there are GPUs.
            environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // self.places)))
        command = trainer_command(run, folder, "cpu" if gpu is None else "cuda")
        verb = "resumed" if (folder / "checkpoint.pt").exists() else "started"
        with open(folder / "output.txt", "ab") as output:
            output.write(f"$ {shlex.join(command)}\n".encode())
            output.flush()
            begin = output.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # a Ctrl-C in the terminal is for the sweep, which hands it on once
                pass_fds=[lock.fileno()],  # if the sweep is killed, the trainer keeps other sweeps out of its folder
            )
        self.free.popleft()
        self.children.append(_Child(run, folder, gpu, process, lock, begin, time.monotonic()))
        _say(f"{run.name}: {verb} on {'the CPU' if gpu is None else f'GPU {gpu}'}")

    def leave(self, run: Run, lock: BinaryIO | None) -> None:
        if lock is not None:
            lock.close()
        self.busy += 1
        _say(f"{run.name}: left to another process, which is at it")

    def collect(self) -> None:
        """Look which trainers have ended, and how."""
        for child in [child for child in self.children if child.process.poll() is not None]:
            self.children.remove(child)
            self.free.append(child.gpu)
            child.lock.close()
            code, name = child.process.returncode, child.run.name
            took = time.strftime("%H:%M:%S", time.gmtime(time.monotonic() - child.started))
            results, _ = read_results([child.run], self.out)
            if code == 0 and results:
                self.done += 1
                _say(f"{name}: done in {took}, error {results[0][1]['error']:.2f} %")
            elif _held(child.folder / ".lock"):
                self.leave(child.run, None)
            else:
                self.failed += 1
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
                lines = _tail(child.folder / "output.txt", child.begin)
                _say("\n    ".join([f"{name}: failed after {took}, {how}; {child.folder / 'output.txt'}:", *lines]))

    def stop(self, signals: Sequence[int]) -> None:
        """End the trainers: with an interrupt first, by force if they don't, or at a second signal."""
        # A job in the background of a shell script ignores interrupts, and so do the trainers that it starts.
        ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        for child in self.children:
            child.end(signal.SIGTERM if ignored else signal.SIGINT)
        deadline = time.monotonic() + _GRACE
        while any(child.process.poll() is None for child in self.children):
            if time.monotonic() > deadline or len(signals) > 1:
                for child in self.children:
                    child.end(signal.SIGKILL)
                    child.process.wait()
            time.sleep(_POLL / 4)
        for child in self.children:
            child.lock.close()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals to end that came since; noted rather than raised, so that none comes between start and record."""
    caught: list[int] = []
    before = {}
    last = -math.inf

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal last
        if time.monotonic() - last > ONE_NOTICE:
            last = time.monotonic()
            caught.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, note)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _claim(path: Path) -> BinaryIO | None:
    """Lock ``path`` until the file that is returned is closed; None where another process has it."""
    file = open(path, "ab")
    for attempt in range(4):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if attempt < 3:
                time.sleep(0.02)  # it may be one that only looks, as `_held` does
        except OSError:
            return file  # some cluster file systems have no locks; the trainer goes on without them too
    file.close()
    return None


def _held(path: Path) -> bool:
    """Whether a process holds the lock on ``path``."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # no such file, or no locks there
    return False


def _list(runs: Sequence[Run], out: Path) -> None:
    folders = [run.folder(out) for run in runs]
    states = [*map(state, folders)]
    for folder, text in zip(folders, states, strict=True):
        _say(f"{text:<11}{folder.name}")
    counts = (f"{states.count(text)} {text}" for text in ("done", "running", "unfinished", "to do") if text in states)
    _say(f"{len(runs)} runs in {out}: {', '.join(counts)}")
    for message in read_results(runs, out)[1].values():
        sys.stderr.write(f"{message}: the run is to be done again\n")


def _write_table(runs: Sequence[Run], chosen: Sequence[Run], out: Path) -> bool:
    """Write the table of the whole sweep, and print that of the chosen runs; whether none of their results is damaged.

    Damaged ones are named on standard error, and left out.
    """
    damaged = read_results(runs, out)[1]
    for message in damaged.values():
        sys.stderr.write(f"error: {message}: left out of the table\n")
    whole = not any(run.name in damaged for run in chosen)
    rows = make_rows(runs, out)
    if not rows:
        _say(f"no run in {out} is done")
        return whole
    for name, text in {"table.md": as_markdown(rows), "table.csv": as_csv(rows)}.items():
        part = out / f".{name}.{os.getpid()}"  # several tasks of a job array may come here at the same moment
        part.write_text(text, encoding="utf-8")
        part.replace(out / name)
    shown = make_rows(chosen, out)
    finished = sum(row.seeds or 0 for row in shown)
    _say(f"\n{as_markdown(shown)}" if shown else "")
    _say(f"{finished} of {len(chosen)} runs done; {out / 'table.md'} and table.csv have the whole sweep's")
    return whole


def _tail(path: Path, begin: int) -> list[str]:
    """The last lines after ``begin``; of a progress bar only its last state."""
    try:
        with open(path, "rb") as file:
            file.seek(max(begin, path.stat().st_size - 20_000))
            text = file.read().decode(errors="replace")
    except OSError as error:  # its folder was removed
        return [in_words(error)]
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return [line for line in lines if line][-_TAIL:] or ["(no message)"]


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
