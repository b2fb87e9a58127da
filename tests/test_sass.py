"""Machine code of sm_90 run on the CPU agrees with the definition; the timing model counts cycles as by hand."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs the cuobjdump in triton's package")
sys.path.append(str(Path(__file__).parents[1] / "bench"))

import simulate
from cuda_compile import compile_cuda
from cuda_shim import BF16, CONTIGUOUS, F16, F32, check, make
from launches import Kernel
from sass import native
from sass.card import H200
from sass.interpreter import SassError, Trace, run_all, run_block
from sass.program import Program
from sass.timing import Timing, time_blocks
from test_batch_tail_cupy import LIMITS, define, error
from triton_compile import SHARED_LIMIT

from fastmoll.kernels import batch_tail_cupy
from fastmoll.kernels.batch_tail import Tail
from fastmoll.kernels.batch_tail_cupy import Launch
from fastmoll.kernels.draw import BLUR, CLEAN, NOISE

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="needs a C compiler to interpret machine code")

TINY = dataclasses.replace(H200, between=0.0, block_start=0.0)


def listing(*lines: str) -> str:
    """Text as cuobjdump prints it. A line is a predicate, an instruction, and after a bar its control bits."""
    text = ""
    for number, line in enumerate(lines):
        code, _, given = line.partition("|")
        bits = {"stall": 1, "write": 7, "read": 7, "wait": 0} | {
            k: int(v) for k, v in (x.split("=") for x in given.split())
        }
        high = (bits["stall"] | bits["write"] << 5 | bits["read"] << 8 | bits["wait"] << 11) << 41
        text += f"        /*{16 * number:04x}*/  {code.strip()} ;  /* {0:#018x} */\n  /* {high:#018x} */\n"
    return text


def tiny_launch(out: torch.Tensor, threads: int = 32) -> Launch:
    """A launch of one block, whose one parameter is a tensor."""
    return Launch((), (1, 1), threads, 1024, (np.uint64(out.data_ptr()),), (out,))


def run_tiny(*lines: str, threads: int = 32) -> tuple[torch.Tensor, list[Trace]]:
    """Run one block; the last lines write R0 of each thread to the tensor, which is returned."""
    out = torch.full((threads,), -1, dtype=torch.int32)
    ends = (
        "S2R R30, SR_TID.X",
        "LDC.64 R40, c[0x0][0x210]",
        "IMAD.WIDE.U32 R40, R30, 0x4, R40",
        "STG.E [R40.64], R0",
        "EXIT",
    )
    return out, run_block(Program(listing(*lines, *ends)), tiny_launch(out, threads), (0, 0))


# ------------------------------------------------------------------------------------------ compiled kernels, executed

TEN = torch.linspace(0, 1, 10)
CASES: dict[str, dict[str, Any]] = {
    "224 of all roles": make((8, 3, 224, 224), t=torch.linspace(0, 1, 8)),
    "224 blurred, half flipped": make((10, 3, 224, 224), roles=(BLUR,), t=TEN, flip=torch.arange(10) % 2 == 0),
    "224 float16": make((4, 3, 224, 224), dtype=F16),
    "224 mixup": make((4, 3, 224, 224), mix="mixup"),
    "224 cutmix": make((4, 3, 224, 224), mix="cutmix", roles=(BLUR, NOISE, CLEAN)),
    "224 not mollified": make((2, 3, 224, 224), role=None, t=None, index=None),
    "32": make((20, 3, 32, 32), roles=(CLEAN, BLUR, NOISE, BLUR), t=torch.linspace(0, 1, 20)),
    "32 mixup float16": make((8, 3, 32, 32), mix="mixup", dtype=F16),
    "32 cutmix float16": make((8, 3, 32, 32), mix="cutmix", dtype=F16),
    "fast contiguous": make((4, 3, 40, 72), memory_format=CONTIGUOUS),
    "slow cutmix": make((8, 3, 33, 21), mix="cutmix"),
    "slow pixels to float32": make((4, 3, 40, 35), dtype=F32),
    "slow float32 mixup": make((4, 3, 40, 35), F32, "mixup", dtype=F32),
}


def compiled(tail: Tail) -> tuple[Program, Launch, torch.Tensor]:
    """The kernel for a batch, its launch, and the output, full of NaN."""
    pytest.importorskip("cupy", reason="needs CuPy to compile CUDA C++")
    shape = (tail.batch, tail.channels, tail.height, tail.width)
    out = torch.full(shape, torch.nan, dtype=tail.dtype).contiguous(memory_format=tail.memory_format)
    launch = batch_tail_cupy.plan(tail, out, SHARED_LIMIT[90])
    use = compile_cuda(launch.macros, 90)
    return Program(use.sass, use.registers, use.stack), launch, out


@pytest.mark.parametrize("case", CASES)
def test_machine_code_writes_every_element_as_defined(case: str) -> None:
    tail = check(CASES[case])
    program, launch, out = compiled(tail)
    assert dict(launch.macros)["FAST"] == (not case.startswith("slow"))
    run_all(program, launch)
    assert error(out, define(tail)) < LIMITS[tail.dtype]


def test_blocks_with_work_write_all_of_the_output_and_nothing_beside_it() -> None:
    tail = check(make((4, 3, 64, 64), roles=(CLEAN, BLUR)))
    program, launch, out = compiled(tail)
    blocks = simulate.working(Kernel("batch_tail", program, launch), tail)
    assert len(blocks) == launch.grid[0] == launch.grid[0] * launch.grid[1] // 2
    stores = [i for i, instruction in enumerate(program.code) if instruction.operation == "STG"]
    written = []
    for block in blocks:
        for trace in run_block(program, launch, block):
            for i in np.flatnonzero(np.isin(trace.pc, stores) & (trace.active > 0)):
                written.append(trace.sectors[trace.first[i] : trace.first[i] + trace.count[i]])
    assert error(out, define(tail)) < LIMITS[BF16]
    sectors = np.unique(np.concatenate(written))
    # The output is the second tensor of the launch: they are 4 GiB apart in traces.
    assert np.array_equal(sectors, np.arange(out.nbytes // 32) + (2 << 32) // 32)


# -------------------------------------------------------------------------------------------- small programs, by hand


def test_carries_pass_from_word_to_word() -> None:
    # 2^33 - 1 + lane, less one thousand; the upper word is what is kept.
    out, _ = run_tiny(
        "S2R R1, SR_TID.X", "MOV R2, 0xffffffff", "MOV R3, 0x1",
        "IADD3 R4, P0, R1, R2, RZ", "IADD3.X R5, RZ, R3, RZ, P0, !PT",
        "IADD3 R6, P1, R4, -0x3e8, RZ", "IADD3.X R0, R5, -0x1, RZ, P1, !PT",
    )  # fmt: skip
    assert out.tolist() == [(2**33 - 1 + lane - 1000) >> 32 for lane in range(32)]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["IMAD.WIDE R4, R1, -0x7, R8", "MOV R0, R5"], lambda lane: (lane * -7) >> 32),
        (["IMAD.HI.U32 R0, R1, 0x9000000, R8"], lambda lane: lane * 0x9000000 >> 32),
        (["LEA R0, R1, R1, 0x3"], lambda lane: 9 * lane),
        (["LOP3.LUT R0, R1, 0x6, RZ, 0x3c, !PT"], lambda lane: lane ^ 6),
        (["PRMT R0, R1, 0x4404, RZ"], lambda lane: lane << 8),
        (["SHF.R.U32.HI R0, RZ, 0x2, R1"], lambda lane: lane >> 2),
        (["SHF.L.U32 R0, R1, 0x1f, RZ"], lambda lane: -(2**31) * (lane % 2)),
        (["VIADDMNMX R0, R1, -0x5, RZ, !PT"], lambda lane: max(lane - 5, 0)),
        (["VIADD R2, R1, -0x5", "VIMNMX.RELU R0, R2, 0xa, PT"], lambda lane: max(min(lane - 5, 10), 0)),
        (["ISETP.GT.AND P0, PT, R1, 0x9, PT", "SEL R0, R1, 0x7, P0"], lambda lane: lane if lane > 9 else 7),
        (["ISETP.LT.AND P2, PT, R1, 0x9, PT", "P2R R0, PR, R1, 0x4"], lambda lane: lane & ~4 | 4 * (lane < 9)),
        (["SHFL.BFLY PT, R0, R1, 0x10, 0x1f"], lambda lane: lane ^ 16),
        (["I2FP.F32.S32 R2, R1", "FMUL.FTZ R2, R2, R2", "MUFU.SQRT R2, R2", "F2I.NTZ R0, R2"], lambda lane: lane),
    ],
)  # fmt: skip
def test_instructions_do_what_python_does(lines: list[str], expected: Callable[[int], int]) -> None:
    out, _ = run_tiny("S2R R1, SR_TID.X", *lines)
    assert out.tolist() == [expected(lane) for lane in range(32)]


def test_lanes_that_part_at_a_branch_meet_again() -> None:
    out, (trace,) = run_tiny(
        "S2R R1, SR_TID.X", "MOV R0, 0x5", "ISETP.GT.AND P0, PT, R1, 0xb, PT",
        "BSSY B0, 0x70", "@P0 BRA 0x70", "IADD3 R0, R0, R1, RZ", "IADD3 R0, R0, 0x1, RZ", "BSYNC B0",
        "IADD3 R0, R0, 0x2, RZ",
    )  # fmt: skip
    assert out.tolist() == [7 if lane > 11 else 8 + lane for lane in range(32)]
    assert [int(n) for pc, n in zip(trace.pc, trace.active, strict=True) if pc in (4, 5, 6, 8)] == [20, 12, 12, 32]


def test_warps_see_what_others_wrote_before_a_barrier() -> None:
    # Each thread reads the word of the one in the other warp.
    out, traces = run_tiny(
        "S2R R1, SR_TID.X", "SHF.L.U32 R2, R1, 0x2, RZ", "STS [R2+0x400], R1", "BAR.SYNC.DEFER_BLOCKING 0x0",
        "LOP3.LUT R2, R2, 0x80, RZ, 0x3c, !PT", "LDS R0, [R2+0x400]", threads=64,
    )  # fmt: skip
    assert out.tolist() == [lane ^ 32 for lane in range(64)]
    assert len(traces) == 2


@pytest.mark.parametrize(
    ("width", "lanes", "stride", "wavefronts"),
    [
        ("", 32, 4, 1),
        ("", 32, 8, 2),
        ("", 32, 128, 32),
        ("", 32, 0, 1),
        (".64", 32, 8, 2),
        (".64", 16, 16, 4),  # the halves of the warp read the same, one after the other
        (".128", 32, 16, 4),
        (".128", 32, 32, 8),
    ],
)
def test_wavefronts_of_shared_memory_are_those_counted_by_hand(
    width: str, lanes: int, stride: int, wavefronts: int
) -> None:
    lines = "S2R R1, SR_TID.X", f"LOP3.LUT R1, R1, {lanes - 1:#x}, RZ, 0xc0, !PT", f"IMAD R2, R1, {stride:#x}, RZ"
    out = torch.zeros(32, dtype=torch.int32)
    launch = dataclasses.replace(tiny_launch(out), shared=8192)
    (trace,) = run_block(Program(listing(*lines, f"LDS{width} R4, [R2]", "EXIT")), launch, (0, 0))
    assert trace.wavefronts.tolist() == [-1, -1, -1, wavefronts, -1]


def test_sectors_of_memory_are_counted_once() -> None:
    _, (trace,) = run_tiny("MOV R0, RZ")
    assert trace.count.tolist() == [0, 0, 0, 0, 4, 0]
    assert np.diff(trace.sectors).tolist() == [1, 1, 1]
    launch = tiny_launch(torch.zeros(32, dtype=torch.int32))
    code = "LDC.64 R2, c[0x0][0x210]", "LDG.E R4, [R2.64+0x40]", "EXIT"
    (trace,) = run_block(Program(listing(*code)), launch, (0, 0))
    assert trace.sectors.tolist() == [(1 << 32) // 32 + 2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("FROB R0, R1", r"unknown instruction in 'FROB R0, R1' \(operation FROB\)"),
        ("IMAD.ODD R0, R1, R2, R3", r"\(modifier ODD\)"),
        ("MOV R0, Q7", r"\(operand Q7\)"),
        ("HMMA.16816.F16 R0, R4, R8, R0", r"\(modifier F16\)"),
        ("LDG.E R0, [R2.64]", r"no tensor has an element of 4 bytes at 0x0, lane 0 in 'LDG.E R0, \[R2.64\]'"),
        ("LDS R0, [R2+0x800]", r"no 4 bytes of shared memory at 0x800, lane 0"),
        ("BRA 0x0", r"more than 20000000 instructions"),
        ("NOP", r"a jump out of the program"),
    ],
)
def test_what_cannot_be_run_is_named(line: str, message: str) -> None:
    launch = tiny_launch(torch.zeros(1, dtype=torch.int32))
    with pytest.raises(SassError, match=message):
        run_block(Program(listing(line)), launch, (0, 0), trace=False)


def test_an_instruction_that_is_never_met_may_be_unknown() -> None:
    program = Program(listing("EXIT", "FROB"))
    run_block(program, tiny_launch(torch.zeros(1)), (0, 0))
    assert program.unknown == {1: "operation FROB"}


def test_text_without_instructions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sass must be what cuobjdump -sass prints, got 'nothing'"):
        Program("nothing")


def test_a_missing_compiler_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/such/compiler")
    with pytest.raises(FileNotFoundError, match=r"install a C compiler as cc, or name one in \$CC"):
        native.library.__wrapped__()


# ------------------------------------------------------------------------------------------------------ cycles, by hand


def cycles(*programs: list[str], blocks: int = 1, resident: int = 1, idle: float = 0.0) -> Timing:
    """Time blocks whose warps run these lines one after the other, each its own; shared memory takes one wavefront."""
    lines: list[str] = []
    traces = []
    for program in programs:
        pc = np.arange(len(lines), len(lines) + len(program), dtype=np.int32)
        lines += program
        zero = np.zeros(len(pc), np.int64)
        ones = np.ones(len(pc), np.int16)
        traces.append(Trace(pc, ones.astype(np.uint8), ones, zero - 1, zero.astype(np.uint8), zero))
    return time_blocks(Program(listing(*lines)), [traces] * blocks, TINY, resident, idle)


def test_a_chain_takes_its_stalls() -> None:
    # Issued at 0, 4, ..., 36, and the last at 40.
    assert cycles(["FADD R0, R0, R1 | stall=4"] * 10 + ["EXIT"]).cycles == 41


def test_warps_fill_the_gaps_of_others() -> None:
    # Two on each scheduler: the second's are a cycle later.
    chain = ["FADD R0, R0, R1 | stall=4"] * 10 + ["EXIT"]
    assert cycles(*[chain] * 8).cycles == 42


def test_a_full_pipe_takes_an_instruction_every_other_cycle() -> None:
    # A scheduler's two warps issue 20, at 0, 2, ..., 38; the last EXIT at 39.
    busy = cycles(*[["LOP3.LUT R0, R1, R2, RZ, 0x3c, !PT"] * 10 + ["EXIT"]] * 8)
    assert busy.cycles == 40
    assert busy.taken["alu"] == 40
    assert busy.taken["issue"] == 22
    # One a cycle where the pipe has 32 lanes: at 0, ..., 9 and 11, ..., 20, an EXIT after each.
    assert cycles(*[["FFMA R0, R1, R2, R3"] * 10 + ["EXIT"]] * 8).cycles == 22


def test_a_scheduler_stays_with_the_warp_it_took_last() -> None:
    # Of warps 0 and 4: 4 goes on until its EXIT at 11, 0 goes on at 12, and its EXIT is 15 later.
    first = ["FADD R0, R0, R1 | stall=3", "FADD R0, R0, R1 | stall=15", "EXIT"]
    assert cycles(first, *[["EXIT"]] * 3, ["FFMA R0, R1, R2, R3"] * 10 + ["EXIT"]).cycles == 28


def test_all_warps_leave_a_barrier_after_the_last_has_come() -> None:
    late = ["FADD R0, R0, R1 | stall=10"] * 5
    meet = ["BAR.SYNC.DEFER_BLOCKING 0x0", "EXIT"]
    # Come at 50, go on 20 later.
    assert cycles(late + meet, meet, meet, meet).cycles == 71


def test_a_load_is_waited_for_where_its_barrier_is() -> None:
    # The unit has it at 4 and its value at 30; what does not need it goes on.
    load = "LDS R0, [R1] | write=2"
    assert cycles([load, "FADD R2, R2, R3", "EXIT"]).cycles == 3
    assert cycles([load, "FADD R2, R0, R3 | wait=4", "EXIT"]).cycles == 32
    # One unit for all: of four schedulers' loads, the last is three cycles later.
    assert cycles(*[[load, "FADD R2, R0, R3 | wait=4", "EXIT"]] * 4).cycles == 35


def test_blocks_follow_each_other_where_there_is_room_for_one() -> None:
    chain = ["FADD R0, R0, R1 | stall=4"] * 10 + ["EXIT"]
    assert cycles(chain, blocks=3).cycles == 3 * 41
    assert cycles(chain, blocks=3, resident=3).cycles == 41
    assert cycles(chain, idle=2.0).cycles == 41 + 2 * H200.idle_block


# ------------------------------------------------------------------------------------------------------- the benchmark


def test_no_batch_is_faster_than_its_bounds() -> None:
    pytest.importorskip("cupy", reason="needs CuPy to compile CUDA C++")
    result = simulate.bench_simulate(simulate.Settings(batch_size=66, size=64, backends=("cupy",)))
    rows = {row["roles"]: row for row in result["rows"]}
    assert [*rows] == ["mixed", "clean", "noise", "blur"]
    for row in rows.values():
        bounds = {name: row[f"{name} us"] for name in simulate.SHOWN}
        assert row["bound by"] == max(bounds, key=bounds.__getitem__)
        assert max(bounds.values()) < row["predicted us"]
    assert rows["clean"]["predicted us"] < rows["noise"]["predicted us"] < rows["blur"]["predicted us"]
    assert rows["clean"]["matrix us"] == 0 < rows["blur"]["matrix us"]
    # A byte read and two written, of 66 x 3 x 64 x 64, by 132 multiprocessors.
    assert rows["clean"]["memory us"] == pytest.approx(3 * 66 * 3 * 64**2 / H200.memory_tb_s / 1e6, rel=0.02)


def test_the_table_is_written_as_of_other_benchmarks(tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="needs CuPy to compile CUDA C++")
    run = [sys.executable, str(Path(simulate.__file__).with_name("run.py")), "simulate", "--out", str(tmp_path)]
    done = subprocess.run(
        [*run, "--size", "32", "--batch-size", "12", "--backends", "cupy", "--roles", "clean"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "simulate.json").read_text())
    assert [(row["backend"], row["roles"]) for row in result["rows"]] == [("cupy", "clean")]
    assert result["card"]["ghz"] == H200.ghz and len(result["fitted to"]) == 10 and len(result["not fitted"]) == 13
    assert "256.3 and 250.6 us" in done.stdout and "384 pixels 459.8 and 371.5 us" in done.stdout  # the worst of all
    assert "times the copy" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 30}, "size must be a multiple of 8 from 8 to 512, got 30"),
        ({"size": 0}, "size must be a multiple of 8 from 8 to 512, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"roles": ()}, "roles must name at least one, got none"),
        ({"backends": ()}, "backends must name at least one, got none"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate.Settings(**options)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's kernels can be compiled here")
def test_kernels_of_tritons_interpreter_are_not_predicted() -> None:
    settings = simulate.Settings(batch_size=2, size=8, backends=("triton",), roles=("clean",))
    with pytest.raises(ValueError, match="TRITON_INTERPRET must not be set to compile, got '1'"):
        simulate.bench_simulate(settings)
