"""The model of what the batch tail should take: bytes, blocks and arithmetic of interpreted code are those by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
sys.path.append(str(Path(__file__).parents[1] / "bench"))

import launches
import roofline
import torch
from sass import native
from sass.interpreter import Trace
from sass.program import Instruction, Program
from test_sass import listing, tiny_launch

interpreted = pytest.mark.skipif(native.compiler() is None, reason="needs a C compiler to interpret machine code")


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("IMAD.WIDE.U32", {"imad_wide": 1, "imad_pipe": 2}),
        ("HGMMA.64x64x16.F32", {"matrix": 1}),
        ("MUFU.EX2", {"mufu": 1, "xu": 1}),
        ("I2F.U8", {"convert": 1, "xu": 1}),
        ("STG.E.128", {"stg": 1, "lsu": 4}),
        ("LOP3.LUT", {"other": 1, "alu": 1}),
        ("EXIT", {"other": 1}),
    ],
)
def test_instructions_take_what_their_class_does(name: str, taken: dict[str, int]) -> None:
    assert launches.classify(name) == {"warp": 1, **taken}


@pytest.mark.parametrize(
    ("name", "flops"), [("HMMA.16816.F32", 4096), ("HGMMA.64x64x16.F32", 2 * 16 * 64 * 16), ("FFMA", 0)]
)
def test_a_warp_multiplies_sixteen_rows(name: str, flops: int) -> None:
    assert launches.flops(Instruction(name, "", 1, 7, 7, 0)) == flops


def test_what_a_block_loads_again_passes_the_second_level_once() -> None:
    memory = torch.zeros(64)
    code = "LDG.E R0, [R2.64]", "LDGSTS.E.BYPASS.128 [R0], [R2.64]", "STG.E [R2.64], R0", "EXIT"
    sectors = launches.Sectors(launches.Kernel("", Program(listing(*code)), tiny_launch(memory)))
    pc = np.array([0, 0, 1, 1, 2, 2, 3], np.int32)
    touched = (1 << 27) + np.array([0, 1, 0, 2, 2, 3, 3])
    count = np.array([2, 1, 1, 1, 1, 1, 0], np.uint8)
    first = np.array([0, 2, 3, 4, 5, 6, -1])
    trace = Trace(pc, count, -np.ones(7, np.int16), first, count, touched)
    for passed in (6, 12):
        sectors.add([trace])  # 0 and 1 of three loads; 2 twice, past the first level; two stores
        assert sectors.through_l2 == passed
    begin = memory.data_ptr() // 32
    assert (sectors.loaded - begin).tolist() == [0, 1, 2] and (sectors.stored - begin).tolist() == [3]


@interpreted
def test_bytes_and_operations_of_a_tiny_image_are_those_counted_by_hand() -> None:
    pytest.importorskip("cupy", reason="needs CuPy to compile CUDA C++")
    (roles,) = launches.launch_works("cupy", 32).values()
    for work in roles:
        assert (work.blocks, work.idle) == (1, 1)
        assert (work.pixels, work.result, work.scratch_in, work.scratch_out) == (3072, 6144, 0, 0)
        # Beside pixels and results, what all images share: roles, temperatures, tables.
        assert 9216 < work.l2 < 9216 + 1024
    # Two steps of 16 in each product: 3 x 2 x 2 x 4 matrix instructions of 4096 operations.
    assert [work.flops for work in roles] == [0, 0, 2 * 48 * 4096]


def test_a_launch_takes_what_its_tightest_bound_says() -> None:
    card = roofline.Card(80, 100, 1.0, tb_s=2.0, l2_mb=40, l2_tb_s=4.0, tflops=100.0, mma_sync=0.5)
    copy = launches.Work(blocks=1e6, pixels=1e6, result=2e6)
    products = launches.Work(blocks=1e6, flops=1e9, instructions=Counter(warp=4e5))
    model = launches.LaunchModel("a", (copy, launches.Work(), products), 256, 64, 0, wgmma=False)
    (row,) = roofline.predict([model], card, (1.0, 0.0, 0.0), 4)
    assert row["bound"] == "memory"
    assert row["floor_us"] == pytest.approx(4 * 3e6 / 2e6)
    (row,) = roofline.predict([model], card, (0.0, 0.0, 1.0), 4)
    assert row["bounds_us"]["tensor"] == pytest.approx(4 * 1e9 / 50e6)
    assert row["bounds_us"]["issue"] == pytest.approx(4 * 4e5 / 4 / 100 / 1e3)


SCRIPT = """
import json, sys
sys.path.append(sys.argv[1])
import launches
models = launches.triton_model(64, 16, 80)
print(json.dumps({m.name: [m.threads, m.registers, m.wgmma, *map(vars, m.roles)] for m in models}))
"""


@interpreted
def test_both_launches_of_triton_do_what_is_counted_by_hand() -> None:
    bench = Path(__file__).parents[1] / "bench"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(bench.parent), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", SCRIPT, str(bench)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert [*found] == ["_first", "_second"]
    of_role = {name: values[3:] for name, values in found.items()}
    values, matrix = 3 * 64**2, 2 * 64**2
    for role, where in enumerate(("_first", "_first", "_second")):
        for name, roles in of_role.items():
            work = roles[role]
            assert (work["pixels"], work["result"]) == ((values, 2 * values) if name == where else (0, 0))
            assert work["blocks"] > 0 or (role < 2 and name != where)
    clean, noise, blur = of_role["_second"]
    assert (clean["blocks"], clean["idle"], noise["blocks"], noise["idle"]) == (0, 1, 0, 1)
    # Each half of a block's rows of the matrix has a line of 128 numbers, which it alone reads.
    assert (of_role["_first"][2]["scratch_in"], of_role["_first"][2]["scratch_out"]) == (0, matrix + 2 * 128 * 4)
    assert (blur["scratch_in"], blur["scratch_out"]) == (matrix, 2 * values)
    # At 64 pixels the band is all there is: of two products of each channel.
    assert [work["flops"] for work in of_role["_second"]] == [0, 0, 2 * 3 * 2 * 64**3]
    # A logarithm, a root, a sine and a cosine for two normals. A few more outside of the loop.
    pairs = values / 2 / 32
    assert 4 * pairs <= of_role["_first"][1]["instructions"]["mufu"] <= 4.5 * pairs
    assert all(threads == 128 and registers > 0 and not wgmma for threads, registers, wgmma, *_ in found.values())


def test_bad_sizes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        roofline.bench_roofline(roofline.Settings(batch_size=0))
