"""The machine code that Triton makes for sm_90, run on the CPU, agrees with the definition."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
sys.path.append(str(Path(__file__).parents[1] / "bench"))

from sass import native

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="needs a C compiler to interpret machine code")

# In a process of its own: kernels that were defined for the interpreter cannot be compiled.
SCRIPT = """
import json, sys
import torch
import triton_compile
from sass.program import Program
from sass.interpreter import run_all
from test_batch_tail import KEY, batch, checked, definition
from fastmoll.kernels import batch_tail_triton, batch_tail_triton_bytes

def run(height, width, dtype, memory_format, mix):
    images, arguments = batch(height, width, mix=mix)
    dtype, memory_format = getattr(torch, dtype), getattr(torch, memory_format)
    tail = checked(images, memory_format, dtype, **arguments, **KEY)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty gives with NaN
    with triton_compile.recorded(batch_tail_triton, batch_tail_triton_bytes) as launches:
        out = batch_tail_triton.batch_tail_triton(tail)
    for launch in launches:
        used = triton_compile.compile_launch(launch, 90)
        run_all(Program(used.sass, used.registers, used.stack), triton_compile.as_cuda(launch, used))
    exact = definition(images, **arguments, **KEY)
    errors = [((one - want).norm() / want.norm()).item() for one, want in zip(out.double(), exact)]
    return {"kernels": [launch.kernel.__name__ for launch in launches], "errors": errors}

print(json.dumps([run(*case) for case in json.loads(sys.argv[1])]))
"""

CASES: list[tuple[tuple[Any, ...], float]] = [
    ((72, 72, "bfloat16", "channels_last", None), 4e-3),
    ((40, 136, "float16", "channels_last", None), 1e-3),
    ((33, 24, "float16", "channels_last", "mixup"), 1e-3),
    ((70, 16, "bfloat16", "channels_last", "cutmix"), 4e-3),
    ((33, 70, "float16", "channels_last", "mixup"), 1e-3),
    ((37, 40, "bfloat16", "contiguous_format", "cutmix"), 4e-3),
]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    tests = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(tests), str(tests.parent), str(tests.parent / "bench"), environment.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", SCRIPT, json.dumps([case for case, _ in CASES])]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("number", range(len(CASES)))
def test_all_roles_are_the_definition(number: int, found: list[dict[str, Any]]) -> None:
    (_, width, _, memory_format, _), limit = CASES[number]
    by_bytes = memory_format == "channels_last" and width % 8 == 0
    assert found[number]["kernels"] == (
        ["_first", "_second"] if by_bytes else ["_lines", "_prepare", "_across", "_down"]
    )
    assert len(found[number]["errors"]) == 7 and max(found[number]["errors"]) < limit
