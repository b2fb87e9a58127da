"""Where a loader runs: which device, which rank, how many threads."""

from __future__ import annotations

import os

import torch

from fastmoll.kernels.checks import check_integer


def resolve_device(device: str | torch.device) -> torch.device:
    """The device that ``device`` means, with its number.

    Raises:
        ValueError: Another kind of device, or a GPU that is not there.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):
        resolved = None
    if resolved is None or resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:<n>', got {str(device)!r}")
    if resolved.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r} was asked for, but torch sees no CUDA device")
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"device={str(device)!r} was asked for, but there are {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def resolve_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Global rank and number of ranks: as given, else torch.distributed's, else 0 of 1.

    Raises:
        ValueError: One without the other, a rank out of range, or a process group that was not initialised.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size belong together, got rank={rank} and world_size={world_size}")
    if rank is None or world_size is None:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # Every rank would silently read the whole data set.
            raise ValueError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set, but torch.distributed is not initialised: call "
                "init_process_group first, or give rank and world_size"
            )
        return 0, 1
    world_size = check_integer("world_size", world_size, 1)
    return check_integer("rank", rank, 0, world_size), world_size


def threads() -> int:
    """CPU threads for one process: its share of the CPUs that it may use, 16 at most."""
    cpus = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(cpus, 1), 16)
