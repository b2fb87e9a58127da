"""Compile Triton kernels for cards that are not there, exactly as a launch on them would, and read what came out.

Needs plain (not interpreted) kernels: run it in a process without ``TRITON_INTERPRET``. There, ``recorded`` stands in
for a launch, so that arguments and their specialisation are those of the real launcher.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastmoll.kernels.batch_tail_cupy import Launch as CudaLaunch

ARCHITECTURES = (80, 90, 100, 120)

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that one block may have."""

_POINTERS = {
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch that a launcher wanted: the kernel, its grid, all of its arguments and options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes, and its assembly."""

    kernel: str
    architecture: int
    registers: int
    stack: int
    shared: int
    instructions: int
    ptx: str
    sass: str


class _Recorder:
    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
            arguments = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
            assert set(arguments) == set(self.kernel.arg_names)
            self.launches.append(Launch(self.kernel, grid, arguments, options))

        return launch


@contextlib.contextmanager
def recorded(*modules: ModuleType) -> Iterator[list[Launch]]:
    """Inside, launches of the modules' kernels are written down instead of run."""
    kernels = [(m, name, x) for m in modules for name, x in vars(m).items() if isinstance(x, triton.JITFunction)]
    launches: list[Launch] = []
    for module, name, kernel in kernels:
        setattr(module, name, _Recorder(kernel, launches))
    try:
        yield launches
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)


def specialised(launch: Launch) -> tuple[dict[str, str], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Types of a launch's arguments, values of those that are compiled into the code, and what else is known."""
    kernel = launch.kernel
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, parameter in enumerate(kernel.params):
        value = launch.arguments[parameter.name]
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(place,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            # Allocations are aligned to 256 bytes and more; views at odd offsets compile to another variant.
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if special and value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def compile_launch(launch: Launch, architecture: int) -> Resources:
    """Compile a launch for ``sm_<architecture>``; no device is needed."""
    kernel = launch.kernel
    source = ASTSource(kernel, *specialised(launch))
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch.options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        usage, sass = cuobjdump("-res-usage", cubin), cuobjdump("-sass", cubin)
    return Resources(
        kernel=kernel.__name__,
        architecture=architecture,
        registers=used(usage, "REG"),
        stack=used(usage, "STACK"),
        # Static and dynamic: the second is only known to the launcher.
        shared=max(used(usage, "SHARED"), compiled.metadata.shared),
        instructions=len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", sass, re.MULTILINE)),
        ptx=compiled.asm["ptx"],
        sass=sass,
    )


def as_cuda(launch: Launch, compiled: Resources) -> CudaLaunch:
    """A compiled launch as those of CUDA C++ are: with pointers as uint64; last, those of scratch memory, of which none
    is used."""
    kinds = {"fp32": np.float32, "i32": np.int32, "i64": np.int64}
    given: list[np.generic] = []
    for name, kind in specialised(launch)[0].items():
        value = launch.arguments[name]
        if kind != "constexpr":
            given.append(np.uint64(value.data_ptr()) if kind.startswith("*") else kinds[kind](value))
    tensors = tuple(value for value in launch.arguments.values() if isinstance(value, torch.Tensor))
    columns, rows = (*launch.grid, 1)[:2]
    threads = 32 * launch.options.get("num_warps", 4)
    return CudaLaunch((), (columns, rows), threads, compiled.shared, (*given, np.uint64(0), np.uint64(0)), tensors)


def used(usage: str, name: str) -> int:
    """A number in what ``cuobjdump -res-usage`` says."""
    match = re.search(rf"\b{name}:(\d+)", usage)
    assert match is not None, usage
    return int(match[1])


def cuobjdump(option: str, cubin: Path) -> str:
    """What the cuobjdump of triton's package says of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, option, cubin], check=True, capture_output=True, text=True).stdout
