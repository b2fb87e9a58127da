"""The Triton kernels of the batch tail, compiled for cards that are not there: no spills, memory in limits, matrix
instructions where they are meant."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton_compile import ARCHITECTURES, SHARED_LIMIT

# In a process of its own: kernels that were defined for the interpreter cannot be compiled.
SCRIPT = """
import json, re, sys
import torch
import triton_compile
from fastmoll.kernels import batch_tail_triton, batch_tail_triton_bytes
from fastmoll.kernels.batch_tail import check_tail

def compile_case(case):
    size, batch = case["size"], case["batch"]
    pixels = torch.zeros(batch, size, size, 3, dtype=torch.uint8)
    arguments = dict.fromkeys(("lam", "box", "partner", "sigma_max")) | {
        "mean": (0.5,) * 3, "std": (0.2,) * 3, "seed": 2**64 - 1, "epoch": 1, "sigma_min": 0.3,
        "flip": torch.zeros(batch, dtype=torch.bool), "role": torch.zeros(batch, dtype=torch.int8),
        "t": torch.zeros(batch), "index": torch.zeros(batch, dtype=torch.int64),
        "dtype": getattr(torch, case["dtype"]), "memory_format": getattr(torch, case["memory_format"]),
    }
    if case["mix"]:
        arguments["partner"] = torch.zeros(batch, dtype=torch.int64)
        arguments["lam"] = torch.zeros(batch) if case["mix"] == "mixup" else None
        arguments["box"] = torch.zeros(batch, 4, dtype=torch.int32) if case["mix"] == "cutmix" else None
    tail = check_tail(pixels, **arguments)
    with triton_compile.recorded(batch_tail_triton, batch_tail_triton_bytes) as launches:
        batch_tail_triton.batch_tail_triton(tail)
    for launch in launches:
        if launch.kernel.__name__ in case["kernels"]:
            for architecture in case["architectures"]:
                used = triton_compile.compile_launch(launch, architecture)
                yield {
                    "kernel": used.kernel, "architecture": architecture, "stack": used.stack, "shared": used.shared,
                    "matrix": sorted(set(re.findall(r"HMMA|HGMMA|UTCHMMA", used.sass))),
                    "copies": bool(re.search(r"LDGSTS|UBLKCP|UTMALDG", used.sass)),
                    "narrow": bool(re.search(r"STG\\.E\\.U(8|16)\\b", used.sass)),
                }

print(json.dumps({name: list(compile_case(case)) for name, case in json.loads(sys.argv[1]).items()}))
"""

PRODUCTS = ("_across", "_down", "_second")
ANY = ("_across", "_down")
BYTES = ("_first", "_second")
MATRIX = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}


@dataclasses.dataclass(frozen=True)
class Case:
    """What to compile: arguments of a launch, kernels, architectures."""

    dtype: str = "bfloat16"
    memory_format: str = "channels_last"
    mix: str = ""
    size: int = 224
    batch: int = 4
    kernels: tuple[str, ...] = BYTES
    architectures: tuple[int, ...] = ARCHITECTURES


CASES = {
    "bytes": Case(),
    "bytes, small": Case(size=32, architectures=(80, 90)),
    "bytes, eights": Case(size=40, architectures=(80, 90)),
    "bytes, large": Case(size=512, architectures=(80, 120)),
    "bytes, MixUp": Case(dtype="float16", mix="mixup"),
    "bytes, CutMix": Case(mix="cutmix", architectures=(80, 90)),
    "bytes, ones": Case(size=8, batch=1, architectures=(90,)),
    "half": Case(memory_format="contiguous_format", kernels=ANY),
    "half, small": Case(size=31, kernels=ANY),
    "factors": Case(size=223, kernels=("_lines", "_prepare"), mix="mixup"),
    "mixed": Case(dtype="float16", size=223, mix="mixup", kernels=ANY, architectures=(90,)),
    "odd": Case(size=37, memory_format="contiguous_format", kernels=ANY, architectures=(80,)),
    # Sizes that are 1 become constants of the kernel, which may be less than the code expects of a number.
    "ones": Case(size=1, batch=1, mix="mixup", kernels=("_lines", "_prepare", *ANY), architectures=(120,)),
    "float": Case(dtype="float32", kernels=ANY),
}


@pytest.fixture(scope="module")
def compiled():
    """What each case's kernels take, by its name."""
    tests = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tests), str(tests.parent), environment.get("PYTHONPATH", "")])
    cases = {name: dataclasses.asdict(case) for name, case in CASES.items()}
    command = [sys.executable, "-c", SCRIPT, json.dumps(cases)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_without_spills_and_with_matrix_instructions(name, compiled):
    case, found = CASES[name], compiled[name]
    assert len(found) == len(case.kernels) * len(case.architectures)
    for used in found:
        assert used["stack"] == 0, used
        assert used["shared"] <= SHARED_LIMIT[used["architecture"]], used
        if used["kernel"] in PRODUCTS:
            # Blocks for small images have 32 rows; the instructions of the newer cards take 64 and more.
            small = case.size <= 32 and used["kernel"] != "_second"
            assert ("HMMA" if small else MATRIX[used["architecture"]]) in used["matrix"], used
            # Wide copies past the registers: they need rows whose alignment the compiler knows.
            assert used["copies"], used
        # Eight numbers at a time, whatever the width.
        assert used["kernel"] not in BYTES or not used["narrow"], used
