"""The model of what the batch tail should take: bytes and arithmetic by hand, steps against the kernels themselves."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
sys.path.append(str(Path(__file__).parents[1] / "bench"))

import launches
import roofline
from cuda_shim import check, compile_shim, launch_shim, make
from disassembly import Code
from triton_compile import SHARED_LIMIT

from fastmoll.kernels import batch_tail_cupy, batch_tail_triton
from fastmoll.kernels.draw import BLUR

BLOCKS = batch_tail_triton.Blocks(
    prepare={"ROWS": 16, "num_warps": 8},
    across={"BM": 64, "BN": 64, "BK": 32},
    down={"BM": 64, "BN": 128, "BK": 32},
)


def temperatures(size: int, sigmas: list[float]) -> torch.Tensor:
    return torch.log(torch.tensor(sigmas) / 0.3) / np.log(size / 0.3)


def test_steps_over_the_band_are_those_counted_by_hand() -> None:
    # Rows 0-63 need columns 0-95, rows 64-127 need 32-159, rows 128-191 need 96-223, rows 192-223 need 160-223.
    assert launches.triton_steps(224, 64, 32, 1.0) == 3 + 4 + 4 + 2
    assert launches.triton_steps(224, 64, 32, 60.0) == 4 * 7
    # Steps of 16: rows 0-31 need 0-63, the next five 96 columns each, rows 192-223 need 160-223; where h is cut at 8,
    # 0-47, 64 each, 176-223.
    assert launches.cuda_steps(224, 32, 16, 0.5) == 4 + 5 * 6 + 4
    assert launches.cuda_steps(224, 32, 16, 1.0) == 3 + 5 * 4 + 3
    assert launches.cuda_steps(224, 32, 32, 60.0) == 7 * 14


def test_bytes_and_operations_of_a_tiny_image_are_those_counted_by_hand() -> None:
    work = launches.triton_work(32, BLOCKS)
    pixels, matrix, rows = 32 * 32 * 3, 64 * 64 * 2, 32 * 96 * 2
    clean, noise, blur = work["_across"]
    assert (clean.pixels, clean.result, clean.flops, clean.blocks) == (pixels, 2 * pixels, 0, 1)
    assert (noise.pixels, noise.result, noise.idle) == (0, 0, 1)
    assert (blur.scratch_in, blur.scratch_out) == (matrix + rows, rows)
    assert blur.flops == 3 * 2 * 64 * 64 * 32
    assert work["_prepare"][2].scratch_out == matrix + rows
    assert work["_down"][2].flops == 2 * 64 * 128 * 32
    assert (work["_down"][2].result, work["_down"][0].idle) == (2 * pixels, 1)
    # Two steps of 16 in each product: 3 x 2 x 2 x 4 matrix instructions of 4096 operations.
    clean, _, blur = launches.cuda_work(32, 32)
    assert (clean.pixels, blur.pixels, blur.result) == (pixels, pixels, 2 * pixels)
    assert blur.flops == 2 * 48 * 4096


def test_compulsory_bytes_do_not_depend_on_the_role() -> None:
    for all_of_them in (list(launches.triton_work(224, BLOCKS).values()), [launches.cuda_work(224, 32)]):
        for role in range(3):
            assert sum(launch[role].result for launch in all_of_them) == 2 * 3 * 224**2
            assert sum(launch[role].pixels for launch in all_of_them) == 3 * 224**2


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="counts the products of Triton's interpreter")
@pytest.mark.usefixtures("triton_interpreter")
def test_triton_multiplies_as_often_as_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    done = 0
    create = InterpreterBuilder.create_dot

    def counted(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        nonlocal done
        done += 2 * a.data.size * b.data.shape[-1]
        return create(self, a, b, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counted)
    size, sigmas = 144, [1.0, 12.1, 40.3]
    tail = check(make((3, 3, size, size), roles=(BLUR,), t=temperatures(size, sigmas)))
    batch_tail_triton.batch_tail_triton(tail)
    monkeypatch.setattr(launches, "scales", lambda size: np.array(sigmas))
    work = launches.triton_work(size, batch_tail_triton.blocks_for(tail))
    assert done == pytest.approx(3 * sum(roles[2].flops for roles in work.values()), rel=1e-12)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to run CUDA C++ on the CPU")
def test_cuda_multiplies_as_often_as_the_model_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, sigmas = 80, [1.0, 12.1, 40.3]
    tail = check(make((3, 3, size, size), roles=(BLUR,), t=temperatures(size, sigmas)))
    out = torch.empty(3, 3, size, size, dtype=torch.bfloat16, memory_format=torch.channels_last)
    plan = batch_tail_cupy.plan(tail, out, SHARED_LIMIT[90])
    # `extern "C"` with a value warns; a block does not.
    count = (
        'extern "C" { long long products = 0; }\n#define multiply_add(...) (++products, multiply_add(__VA_ARGS__))\n'
    )
    library = compile_shim(plan.macros, tmp_path, count)
    launch_shim(library, plan)
    done = ctypes.c_longlong.in_dll(library, "products").value / 32 * 4096
    monkeypatch.setattr(launches, "scales", lambda size: np.array(sigmas))
    assert done == pytest.approx(3 * launches.cuda_work(size, dict(plan.macros)["ROWS"])[2].flops, rel=1e-12)


SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @P0 BRA 0x60 ;
        /*0020*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*0030*/                   IMAD.WIDE.U32 R2, R3, R4, R5 ;
        /*0040*/              @P1 BRA 0x20 ;
        /*0050*/                   EXIT ;
        /*0060*/              @P2 BRA 0x80 ;
        /*0070*/                   MUFU.EX2 R2, R2 ;
        /*0080*/                   STG.E.128 [R2.64], R4 ;
        /*0090*/              @P1 BRA 0x60 ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   BRA 0xb0;
"""


def test_paths_and_loops_of_a_small_program() -> None:
    code = Code(SASS)
    matrix, stream = code.find("HMMA"), code.find("STG", "HMMA")
    assert len(matrix) == len(stream) == 1
    assert code.path(matrix[0], stream) == {0, 1, 2, 3, 4, 5}
    assert code.path(stream[0], matrix) == {0, 1, 6, 7, 8, 9, 10}
    assert code.body(matrix[0]) == Counter(warp=3, matrix=1, imad_wide=1, imad_pipe=2, other=1)
    assert code.body(stream[0])["mufu"] == 0.5
    assert code.body(stream[0])["lsu"] == 4


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
from fastmoll.kernels import batch_tail_triton
shape = launches.triton_work(64, batch_tail_triton.blocks_for(launches.make_tail(64, 1)))
print(json.dumps([[m.name, m.roles[2].flops, shape[m.name][2].flops, m.roles[1].instructions["mufu"]]
                  for m in launches.triton_model(64, 16, 80)]))
"""


def test_matrix_instructions_of_the_compiled_kernels_add_up_to_the_operations() -> None:
    bench = Path(__file__).parents[1] / "bench"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(bench.parent), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", SCRIPT, str(bench)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = {name: numbers for name, *numbers in json.loads(run.stdout.splitlines()[-1])}
    for name in ("_across", "_down"):
        issued, needed, _ = found[name]
        # Twice if Triton gives two warps the same rows, as it does where more warps than rows of 16 share a block.
        assert issued / needed in (1.0, 2.0)
    assert found["_down"][0] == found["_down"][1]
    # One square root for two normals; the rest of Box and Muller are polynomials. A few more outside of the loop.
    pairs = 64 * 64 * 3 / 2 / 32
    assert pairs <= found["_down"][2] <= 1.5 * pairs


def test_bad_sizes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        roofline.bench_roofline(roofline.Settings(batch_size=0))
