"""Compile the CUDA C++ of the batch tail for cards that are not there, as CuPy would, and read what came out."""

from __future__ import annotations

import dataclasses
import functools
import re
import tempfile
from pathlib import Path

from triton_compile import cuobjdump, used

from fastmoll.kernels import cuda_toolchain


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a kernel takes, registers and bytes of stack, and its assembly."""

    registers: int
    stack: int
    sass: str


@functools.cache
def compile_cuda(macros: cuda_toolchain.Macros, architecture: int) -> Compiled:
    """The kernel for ``sm_<architecture>``; no device is needed."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(cuda_toolchain.read_source("batch_tail.cu"), "batch_tail.cu", (), ())
    try:
        # The last two are what CuPy adds.
        options = (f"-arch=sm_{architecture}", "-ftz=true", "--device-as-default-execution-space")
        nvrtc.compileProgram(program, (*cuda_toolchain.options(macros), *options))
        binary = nvrtc.getCUBIN(program) + b"\0"  # CuPy drops the last byte, which cuobjdump misses
    finally:
        nvrtc.destroyProgram(program)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(binary)
        usage = cuobjdump("-res-usage", cubin)
        return Compiled(used(usage, "REG"), used(usage, "STACK"), cuobjdump("-sass", cubin))


def inner_loops(sass: str) -> list[list[str]]:
    """The instructions of each innermost loop of a kernel, without predicates."""
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([^;]*?)\s*;", sass, re.MULTILINE)
    place = {int(address, 16): i for i, (address, _) in enumerate(found)}
    loops = set()
    for i, (_, text) in enumerate(found):
        jump = re.match(r"BRA\b.*?(0x[0-9a-f]+)", text)
        if jump and (first := place.get(int(jump[1], 16), i)) < i:
            loops.add((first, i))
    inner = [x for x in loops if not any(x != y and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    return [[text for _, text in found[first : last + 1]] for first, last in sorted(inner)]
