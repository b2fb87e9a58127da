"""Batches for the batch tail, and its CUDA C++ run on the CPU through ``cuda_shim.h``."""

from __future__ import annotations

import ctypes
import functools
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastmoll.kernels import cuda_toolchain
from fastmoll.kernels.batch_tail import Tail, check_tail
from fastmoll.kernels.batch_tail_cupy import Launch
from fastmoll.kernels.draw import BLUR, CLEAN, NOISE, PURE_NOISE

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LAST, CONTIGUOUS = torch.channels_last, torch.contiguous_format
U8, F16, BF16, F32 = torch.uint8, torch.float16, torch.bfloat16, torch.float32


def make(
    shape: tuple[int, int, int, int],
    source: torch.dtype = U8,
    mix: str | None = None,
    roles: tuple[int, ...] = (CLEAN, NOISE, BLUR, PURE_NOISE),
    *,
    seed: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    """Arguments of ``batch_tail`` for images ``(B, C, H, W)`` of white noise, the hardest there are."""
    rng = torch.Generator().manual_seed(seed)
    batch, channels, height, width = shape
    if source == U8:
        images = torch.randint(0, 256, (batch, height, width, channels), generator=rng, dtype=U8)
        arguments: dict[str, Any] = {"images": images, "mean": MEAN, "std": STD}
    else:
        arguments = {"images": torch.randn(shape, generator=rng).to(source)}
    arguments["flip"] = torch.arange(batch) % 3 == 1
    if mix is not None:
        arguments["partner"] = torch.arange(batch).roll(1)
        arguments["partner"][2:3] = 2  # itself
    if mix == "mixup":
        arguments["lam"] = torch.rand(batch, generator=rng)
        arguments["lam"][:2] = torch.tensor([0.0, 1.0])[:batch]
    if mix == "cutmix":
        rows = torch.randint(0, height + 1, (batch, 2), generator=rng).sort(1).values
        columns = torch.randint(0, width + 1, (batch, 2), generator=rng).sort(1).values
        arguments["box"] = torch.cat((rows, columns), 1).int()
        # All of the image, its last pixel.
        edges = torch.tensor([[0, height, 0, width], [height - 1, height, width - 1, width]], dtype=torch.int32)
        arguments["box"][:2] = edges[:batch]
    arguments["role"] = torch.tensor([roles[i % len(roles)] for i in range(batch)], dtype=torch.int8)
    arguments["t"] = torch.rand(batch, generator=rng)
    arguments["index"] = torch.randint(0, 2**48, (batch,), generator=rng)
    return arguments | {"seed": 2**63 + 12345, "epoch": 2**24 - 1, "dtype": BF16, "memory_format": LAST} | changes


def check(arguments: dict[str, Any]) -> Tail:
    """The arguments as a backend gets them."""
    defaults = dict.fromkeys(("mean", "std", "flip", "partner", "lam", "box", "role", "t", "index", "sigma_max"))
    return check_tail(**(defaults | {"sigma_min": 0.3} | arguments))


C_TYPES = {
    np.uint64: ctypes.c_uint64,
    np.int64: ctypes.c_int64,
    np.uint32: ctypes.c_uint32,
    np.int32: ctypes.c_int32,
    np.float32: ctypes.c_float,
}


@functools.cache
def compile_shim(macros: cuda_toolchain.Macros, folder: Path, before: str = "") -> ctypes.CDLL:
    """The kernel as a library for the CPU, with some code before it."""
    name = folder / "-".join(str(value) for _, value in macros)
    shim, kernel = Path(__file__).parent / "cuda_shim.h", cuda_toolchain.read_source("batch_tail.cu")
    name.with_suffix(".cpp").write_text(f'#include "{shim}"\n{before}{kernel}\nCUDA_SHIM(batch_tail)\n')
    flags = ["-std=c++17", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-fPIC", "-shared"]
    flags += [f"-D{macro}={value}" for macro, value in macros]
    subprocess.run(["g++", *flags, "-o", name.with_suffix(".so"), name.with_suffix(".cpp")], check=True)
    return ctypes.CDLL(str(name.with_suffix(".so")))


def launch_shim(library: ctypes.CDLL, plan: Launch) -> None:
    """Do on the CPU what CuPy would have a card do."""
    values = [C_TYPES[type(value)](value.item()) for value in plan.arguments]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    assert library.launch(*plan.grid, plan.threads, plan.shared, pointers) == 0
