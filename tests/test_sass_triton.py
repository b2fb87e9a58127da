"""The machine code that Triton makes for sm_90, run on the CPU, agrees with the definition, and is timed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
sys.path.append(str(Path(__file__).parents[1] / "bench"))

from sass import native
from sass.card import H200, NOT_FITTED

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="needs a C compiler to interpret machine code")

# In a process of its own: kernels that were defined for the interpreter cannot be compiled.
SCRIPT = """
import json, sys
import torch
import launches, simulate
import triton_compile
from sass.program import Program
from sass.interpreter import run_all
from test_batch_tail import KEY, batch, checked, definition
from fastmoll.kernels import batch_tail_triton, batch_tail_triton_bytes

def run_tail(tail):
    # Names of the launches, and the result.
    with triton_compile.recorded(batch_tail_triton, batch_tail_triton_bytes) as launches:
        out = batch_tail_triton.batch_tail_triton(tail)
    for launch in launches:
        used = triton_compile.compile_launch(launch, 90)
        run_all(Program(used.sass, used.registers, used.stack), triton_compile.as_cuda(launch, used))
    return [launch.kernel.__name__ for launch in launches], out

def run(height, width, dtype, memory_format, mix):
    images, arguments = batch(height, width, mix=mix)
    # Blurred images first and last, and flipped: what they read outside of the batch is an error.
    arguments["role"][:2] = torch.tensor([2, 0])
    arguments["flip"][[0, -1]] = True
    dtype, memory_format = getattr(torch, dtype), getattr(torch, memory_format)
    tail = checked(images, memory_format, dtype, **arguments, **KEY)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty gives with NaN
    names, out = run_tail(tail)
    exact = definition(images, **arguments, **KEY)
    errors = [((one - want).norm() / want.norm()).item() for one, want in zip(out.double(), exact)]
    return {"kernels": names, "errors": errors}

def noise():
    # The largest error of normals in float32.
    images, arguments = batch(96, 97)
    arguments["role"][:] = 3
    tail = checked(images, torch.contiguous_format, torch.float32, **arguments, **KEY)
    out = run_tail(tail)[1]
    return (out.double() - definition(images, **arguments, **KEY)).abs().max().item()

def measured(size):
    # What the model says of the four launches that a card has measured, in us.
    tail = simulate.batch(simulate.Settings(size=size), "mixed")
    blocks = batch_tail_triton.any_blocks_for(tail)
    kernels = launches.kernels("triton", tail, launches.output_of(tail), blocks)
    return simulate.row([simulate.simulate(kernel, tail) for kernel in kernels], 1)["predicted us"]

settings = simulate.Settings(batch_size=66, size=64, backends=("triton",))
print(json.dumps({
    "runs": [run(*case) for case in json.loads(sys.argv[1])],
    "noise": noise(),
    "64 pixels": measured(64),
    "simulated": simulate.bench_simulate(settings),
}))
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
def found() -> dict[str, Any]:
    tests = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(tests), str(tests.parent), str(tests.parent / "bench"), environment.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", SCRIPT, json.dumps([case for case, _ in CASES])]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("number", range(len(CASES)))
def test_all_roles_are_the_definition(number: int, found: dict[str, Any]) -> None:
    (_, width, _, memory_format, _), limit = CASES[number]
    by_bytes = memory_format == "channels_last" and width % 8 == 0
    run = found["runs"][number]
    assert run["kernels"] == (["_first", "_second"] if by_bytes else ["_lines", "_prepare", "_across", "_down"])
    assert len(run["errors"]) == 7 and max(run["errors"]) < limit


def test_normals_are_the_definition_in_float32(found: dict[str, Any]) -> None:
    # 1e-5 is what the backends may be apart; here, where fast functions are exact, is 3e-6 of that left for a card's.
    assert found["noise"] < 7e-6


def test_the_model_says_what_was_measured(found: dict[str, Any]) -> None:
    assert found["64 pixels"] == pytest.approx(NOT_FITTED["64 pixels"][0], rel=0.15)


def test_launches_follow_each_other(found: dict[str, Any]) -> None:
    result = found["simulated"]
    rows = {row["roles"]: row for row in result["rows"]}
    assert [*rows] == ["mixed", "clean", "noise", "blur"]
    for row in rows.values():
        bounds = [value for name, value in row.items() if name.endswith(" us") and isinstance(value, float)]
        assert row["backend"] == "triton" and max(bounds) == row["predicted us"] > H200.launch_us + H200.next_launch_us
    assert rows["clean"]["matrix us"] == 0 < rows["blur"]["matrix us"]
    for name, row in rows.items():
        (entry,) = (entry for entry in result["entries"] if entry.startswith(f"triton, {name}: "))
        each = [float(us) for us in re.findall(r"_(?:first|second) (\d+\.\d) us", entry)]
        between = H200.launch_us + H200.next_launch_us
        assert len(each) == 2 and row["predicted us"] == pytest.approx(sum(each) + between, abs=0.11)
    # Noise leaves the second launch nothing to do: its blocks return at once.
    assert re.search(r"triton, noise: _first [1-9].*; _second 0\.[0-2] us", "\n".join(result["entries"]))
