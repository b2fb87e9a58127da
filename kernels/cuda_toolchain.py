"""Compiling CUDA C++ by NVRTC, through CuPy: one place for its options and for what can be wrong with an installation.

The sources include no header but their own, so neither a CUDA toolkit nor its include folder is needed: CuPy, NVRTC (a
wheel that torch brings along) and the driver suffice. CuPy keeps compiled kernels in its own cache on disk.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

Macros = tuple[tuple[str, int], ...]

OPTIONS: Final = ("-std=c++17",)
"""Beside the architecture and ``-ftz=true``, which CuPy adds."""

OLDEST: Final = (8, 0)
"""Compute capability: ``mma.sync.m16n8k16`` and ``cvt.rn.bf16x2`` begin there."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled kernel that may use all the shared memory there is.

    Attributes:
        function: CuPy's ``RawKernel``.
        device: number of the CUDA device.
    """

    function: Any
    device: int

    def launch(
        self, grid: tuple[int, int], threads: int, shared: int, arguments: Sequence[np.generic], stream: int
    ) -> None:
        """Launch, and return at once.

        Args:
            grid: blocks in x and y.
            threads: threads a block.
            shared: bytes of dynamic shared memory a block.
            arguments: NumPy scalars of the types that the kernel takes, pointers as uint64.
            stream: the address by which both torch and CuPy know the CUDA stream.
        """
        import cupy

        with cupy.cuda.Device(self.device), cupy.cuda.ExternalStream(stream, self.device):
            self.function(grid, (threads,), tuple(arguments), shared_mem=shared)


def read_source(name: str) -> str:
    """The CUDA C++ of the file ``name`` beside this one, with the files it includes in their place.

    CuPy's cache goes by the text that it is given, and would not see a change of what that includes. Messages of a
    compiler name the file and the line.
    """
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate((Path(__file__).parent / name).read_text(encoding="utf-8").splitlines(), 1):
        included = re.fullmatch(r'#include "(.+)"', line)
        lines += [read_source(included[1]), f'#line {number + 1} "{name}"'] if included else [line]
    return "\n".join(lines)


def options(macros: Macros) -> tuple[str, ...]:
    """The options of NVRTC, without the architecture."""
    return (*OPTIONS, *(f"-D{name}={value}" for name, value in macros))


@functools.cache
def load_kernel(source: str, name: str, macros: Macros, device: int) -> Kernel:
    """Compile a kernel for the device, or find it among those compiled before.

    Args:
        source: as :func:`read_source` takes it.
        name: the ``extern "C"`` function in it.
        macros: names and values to compile with.
        device: number of the CUDA device.

    Raises:
        ImportError: there is no CuPy.
        RuntimeError: CuPy, NVRTC and the driver do not fit together, or the GPU is too old.
    """
    check_installation()
    import cupy

    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        raise RuntimeError(
            f"backend 'cupy' needs a GPU of compute capability {OLDEST[0]}.{OLDEST[1]} or newer, "
            f"got {capability[0]}.{capability[1]} ({torch.cuda.get_device_name(device)}): use backend='torch'"
        )
    with cupy.cuda.Device(device):
        module = cupy.RawModule(code=read_source(source), options=options(macros))
        function = module.get_function(name)
        # Once and for all: CuPy may hand out the same function for another size later.
        function.max_dynamic_shared_size_bytes = shared_limit(device)
    return Kernel(function, device)


@functools.cache
def shared_limit(device: int) -> int:
    """Bytes of shared memory that a block may ask for on a device; raises what :func:`check_installation` raises."""
    check_installation()
    import cupy

    return int(cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"])


@functools.cache
def usable(device: int) -> bool:
    """Whether :func:`load_kernel` can work on a CUDA device."""
    try:
        check_installation()
    except (ImportError, RuntimeError):
        return False
    return torch.cuda.get_device_capability(device) >= OLDEST


@functools.cache
def check_installation() -> None:
    """Check, once, at the first use of a GPU, that CuPy, NVRTC, torch and the driver can work together.

    Raises:
        ImportError: there is no CuPy, or no NVRTC for it.
        RuntimeError: two CuPys at once, or something newer than the driver.
    """
    names = importlib.metadata.packages_distributions().get("cupy", [])
    try:
        import cupy

        built = cupy.cuda.runtime.runtimeGetVersion() // 1000
        driver = cupy.cuda.runtime.driverGetVersion() // 1000
        nvrtc = cupy.cuda.nvrtc.getVersion()[0]
    except (ImportError, RuntimeError, OSError) as error:
        raise ImportError(explain(names, None, None, None) or f"CuPy cannot be used: {error}") from error
    problem = explain(names, built, nvrtc, driver)
    if problem is not None:
        raise RuntimeError(problem)


def explain(distributions: Sequence[str], cupy: int | None, nvrtc: int | None, driver: int | None) -> str | None:
    """Say what is wrong with an installation, and what to do, or return None.

    Args:
        distributions: installed distributions that own the name ``cupy``.
        cupy: CUDA major version that CuPy was built for, None if it could not be loaded.
        nvrtc: major version of the NVRTC library that CuPy found.
        driver: newest CUDA major version that the driver runs, 0 if there is no driver.
    """
    wanted = f"cu{(torch.version.cuda or '13').partition('.')[0]}"
    remedy = f"pip install 'fastmoll[{wanted}]'"
    if len(set(distributions)) > 1:
        both = ", ".join(sorted(set(distributions)))
        return (
            f"more than one CuPy is installed ({both}); they overwrite each other's files: uninstall all of them, "
            f"then {remedy}, the one for the CUDA that torch was built for ({torch.version.cuda})"
        )
    if not distributions:
        return f"backend 'cupy' needs CuPy: {remedy}"
    if cupy is None or nvrtc is None or driver is None:
        return None
    if driver == 0:
        return "backend 'cupy' needs a CUDA driver, and none is installed"
    if driver < max(cupy, nvrtc):
        return (
            f"the driver runs CUDA {driver}, but CuPy was built for CUDA {cupy} and found the compiler (NVRTC) of "
            f"CUDA {nvrtc}: install a newer driver, or a torch and a CuPy for CUDA {driver} "
            f"(torch here is for {torch.version.cuda})"
        )
    return None
