"""The processes of a run: who this one is, how an error on one ends all of them, and what the user sees of it."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous
from tqdm import tqdm

from fastmoll.pipelines.errors import BadImageError, in_words

ONE_NOTICE: Final = 1.0
"""Seconds in which several signals to end are one: what starts processes sends or hands it on to each of them."""
# Errors whose message says all that the user needs: those of what was asked for, and those of the run itself.
BAD_INPUT = (ValueError, ImportError)
BAD_RUN = (BadImageError, FloatingPointError, OSError)


class Stop(Exception):
    """Ends the run with one line instead of a traceback; without a message where another process has said it."""

    def __init__(self, message: str | None, code: int) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


@dataclass(frozen=True)
class Process:
    """One process of the run.

    Attributes:
        rank: Number of this process among all.
        world_size: Number of processes.
        device: Where it computes.
    """

    rank: int
    world_size: int
    device: torch.device

    @classmethod
    def current(cls, device: torch.device) -> Process:
        """This process in the group that torch.distributed was given, or the only one."""
        if not dist.is_initialized():
            return cls(0, 1, device)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @property
    def main(self) -> bool:
        """Whether this is the process that logs and writes."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every process, in rank order, on every process."""
        if not dist.is_initialized():
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Add ``value`` up over the processes, in place."""
        if dist.is_initialized():
            dist.all_reduce(value)
        return value

    @contextmanager
    def agree(self) -> Iterator[None]:
        """A block that either every process finishes or none: an error on one ends all of them.

        Without it, the other processes would wait for ever in their next exchange. So the block itself must
        exchange nothing with other processes.

        Raises:
            Stop: an error on some process. On the lowest such rank an error of ``BAD_INPUT`` or ``BAD_RUN`` gives the
                message (another one is raised as it is); the other ranks have none, and its exit code.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        code = 0 if error is None else 2 if isinstance(error, BAD_INPUT) else 1
        failed = [(rank, code) for rank, code in enumerate(self.gather(code)) if code]
        if not failed:
            return
        first, code = failed[0]
        if error is None or self.rank != first:
            raise Stop(None, code) from error
        if isinstance(error, (*BAD_INPUT, *BAD_RUN)):
            raise Stop(in_words(error), code) from error
        raise error

    @torch.no_grad()
    def copy_from_main(self, module: nn.Module, *, parameters: bool = True) -> None:
        """Overwrite the buffers of ``module``, and its parameters, with those of rank 0."""
        if dist.is_initialized():
            for tensor in [*(module.parameters() if parameters else ()), *module.buffers()]:
                # gloo and NCCL send memory as it lies; a contiguous view of a channels-last weight is a copy.
                sent = tensor.contiguous()
                dist.broadcast(sent, 0)
                tensor.copy_(sent)


def together(device: str, work: Callable[[Process], object]) -> int:
    """Join the processes of this run and do ``work(process)``; errors of input and run, and warnings, are one line.

    Args:
        device: auto, cpu or cuda.
        work: What each process does.

    Returns:
        The exit code: 0, 1 after an error in the run (unreadable image, full disk, loss no longer finite), 2 for
        unusable input, 130 interrupted.
    """
    try:
        with plain_warnings(), launch(device) as process:
            work(process)
    except Stop as stop:
        if stop.message is not None:
            sys.stderr.write(f"error: {stop.message}\n")
        return stop.code
    except BAD_RUN as error:
        sys.stderr.write(f"error: {in_words(error)}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    return 0


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Write warnings of this package in the block as one line each, without the code that they come from."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
            if category.__module__.startswith("fastmoll."):
                tqdm.write(f"warning: {message}", file=sys.stderr)
            else:
                usual(message, category, *place, **options)

        warnings.showwarning = show
        yield


@contextmanager
def launch(device: str) -> Iterator[Process]:
    """Join the processes that torchrun started (or be the only one), on ``device``: auto, cpu or cuda.

    Raises:
        Stop: CUDA asked for and absent, or more processes on a machine than GPUs.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        message = "the device is to be cuda, but torch finds no usable CUDA device (cpu or auto would run on the CPU)"
        raise Stop(message if os.environ.get("RANK", "0") == "0" else None, 2)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise Stop(f"process {local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}", 2)
        torch.cuda.set_device(local_rank)  # before any DALI pipeline, which takes the current device
    here = torch.device(device, local_rank) if device == "cuda" else torch.device("cpu")
    if "RANK" not in os.environ:
        yield Process(0, 1, here)
        return
    store, rank, world_size = next(rendezvous("env://"))
    # gloo beside NCCL: objects and errors travel between the CPUs, without touching the GPUs.
    backend, bound = ("cpu:gloo,cuda:nccl", here) if device == "cuda" else ("gloo", None)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=bound)
    process = Process(rank, world_size, here)
    try:
        yield process
    except Stop:
        raise
    except Exception as error:
        # In the middle of a step nobody can agree: when one process fails the others lose their connection to it.
        if not _first_to_fail(store):
            raise Stop(None, 1) from error
        raise
    # Only after a good end, and together: on an error the other processes may never come, and rank 0, which holds the
    # store, must not leave while another still needs it.
    process.gather(None)
    dist.destroy_process_group()


def _first_to_fail(store: Any) -> bool:
    try:
        return bool(store.add("failed", 1) == 1)
    except RuntimeError:
        return False  # rank 0, which held the store, went first
