"""The processes of a training run, as torchrun would start them: run to the end, or killed."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def be_rank(rank: int, world_size: int, port: int) -> None:
    """Let this process be one of several, as torchrun would."""
    torch.set_num_threads(1)
    if world_size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def rank_main(rank: int, world_size: int, port: int, output: str, script: str, arguments: list[str]) -> None:
    be_rank(rank, world_size, port)
    with open(output, "a", buffering=1) as sink, redirect_stdout(sink), redirect_stderr(sink):
        code = importlib.import_module(f"fastmoll.train.{script}").main(arguments)
    sys.exit(code)


# Processes forked from one that has imported everything: as fresh as new ones, and seconds sooner.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["fastmoll.train.run_imagenet", "fastmoll.train.run_small", "fastmoll.loader", "torch.utils.tensorboard"]
)


@contextmanager
def started(
    world_size: int,
    output: Path,
    *arguments: object,
    script: str = "imagenet",
    main: Callable[..., None] = rank_main,
) -> Iterator[list[Any]]:
    """The processes of a run, as torchrun would start them; at the end those that still run are killed."""
    port = free_port()
    texts = [*map(str, arguments), "--run.output", str(output)]
    ranks: list[Any] = [
        CONTEXT.Process(target=main, args=(rank, world_size, port, f"{output}.{rank}.txt", script, texts))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()  # SIGKILL
            process.join()


def run(world_size: int, output: Path, *arguments: object, script: str = "imagenet") -> str:
    """Run to the end; what rank 0 printed."""
    with started(world_size, output, *arguments, script=script) as ranks:
        for process in ranks:
            process.join(timeout=200)
    printed = Path(f"{output}.0.txt").read_text()
    assert [process.exitcode for process in ranks] == [0] * world_size, printed
    return printed


def kill_at(step: int, world_size: int, output: Path, *arguments: object, script: str = "imagenet") -> None:
    """Start a run and kill all of it as soon as its log shows ``step``."""
    with started(world_size, output, *arguments, script=script) as ranks:
        while not any(line["step"] >= step for line in log(output)):
            assert all(process.is_alive() for process in ranks), Path(f"{output}.0.txt").read_text()
            time.sleep(0.002)
    assert not (output / "result.json").exists()


def log(output: Path) -> list[dict[str, Any]]:
    path = output / "log.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def assert_equal(ours: Any, theirs: Any, where: str = "") -> None:
    """Bit for bit, through dicts and lists."""
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), where
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for name in ours:
            assert_equal(ours[name], theirs[name], f"{where}.{name}")
    elif isinstance(ours, list):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(*pair, f"{where}.{number}")
    else:
        assert ours == theirs, where


def assert_same_end(whole: Path, other: Path) -> dict[str, Any]:
    """Two runs of the small-images trainer came to the same, bit for bit, output folders aside; their results."""
    states = [torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (whole, other)]
    for state in states:
        del state["config"]["run"]  # output and resume differ, as they should
    assert_equal(*states)
    assert_equal(*[torch.load(folder / "model.pt", weights_only=True) for folder in (whole, other)])
    results = [json.loads((folder / "result.json").read_text())["validation"] for folder in (whole, other)]
    assert results[0] == results[1]
    found: dict[str, Any] = results[0]
    return found
