"""How long blocks take whose traces are known: one multiprocessor, cycle by cycle (``timing.c``).

Modelled: four schedulers that issue an instruction a cycle, of the warp they took last if it can go on, else of the
oldest block; stall counts and the six barriers of each warp; pipes, and the cycles that an instruction takes of them
(:func:`classify`); one load/store unit for all, with queues before it, wavefronts of shared memory, lines and sectors
of global memory; a first-level cache of 4 ways; bandwidth and latency of second-level cache and memory, of both a
multiprocessor's share; results that memory writes while it has nothing to read; barriers of a block; blocks that start
and end.

Not modelled: instruction caches, register banks and operand reuse, other multiprocessors (which share the second-level
cache and memory unevenly), which sectors that cache holds and in which of its sets, address translation, and how blocks
are handed out: a multiprocessor has those it is given. Prefetches take their turn and bring nothing; products of
matrices in shared memory (HGMMA) go on without their warp, which waits for them as for copies, but four warps of one
product are not kept together.

Fitted: the figures of :class:`sass.card.Card`. Latencies of other pipes, in :func:`classify` and ``timing.c``, are
plausible ones.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastmoll.kernels.batch_tail_cupy import Launch
from sass.card import Card
from sass.interpreter import Trace
from sass.native import library
from sass.program import Instruction, Program

Array = np.ndarray[Any, Any]

_PIPES = ("free", "fma", "half of fma", "alu", "special", "matrix", "load/store")
_FREE, _FMA, _FMA_HALF, _ALU, _SPECIAL, _MATRIX, _MEMORY = range(len(_PIPES))
(
    _PLAIN, _LOAD, _STORE, _COPY, _SHARED, _BARRIER, _COPIES_END, _COPIES_DONE, _BRANCH, _PRODUCT, _PRODUCTS_DONE,
) = range(11)  # fmt: skip

_TIMED = np.dtype(
    [(name, "i4") for name in ("pipe", "kind", "stall", "write_barrier", "read_barrier", "wait", "groups", "bytes")]
    + [("cycles", "f8"), ("latency", "f8")],
    align=True,
)


def classify(instruction: Instruction, card: Card) -> tuple[int, int, float, float]:
    """What an instruction takes: pipe, kind, cycles of the pipe, and cycles to its result where a barrier waits for it.

    Operations that are not named here are those of integer logic: ALU.
    """
    operation = instruction.operation
    if operation == "HGMMA":
        columns = int(instruction.name.split(".")[1].split("x")[1])
        return _MATRIX, _PRODUCT, card.matrix * columns / 8, 33
    if operation == "WARPGROUP":
        return _FREE, _PRODUCTS_DONE if "DEPBAR" in instruction.name else _PLAIN, 1, 0
    fixed: dict[str, tuple[int, int, float, float]] = {
        "HMMA": (_MATRIX, _PLAIN, card.matrix, 33),
        **dict.fromkeys(("MUFU", "I2F", "F2I"), (_SPECIAL, _PLAIN, 8, 25)),
        "LDG": (_MEMORY, _LOAD, 2, 0),
        "STG": (_MEMORY, _STORE, 2, 0),
        "LDGSTS": (_MEMORY, _COPY, 2, 0),
        **dict.fromkeys(("LDS", "LDSM", "STS", "STSM"), (_MEMORY, _SHARED, 2, card.shared_latency)),
        **dict.fromkeys(("LDL", "STL"), (_MEMORY, _SHARED, 2, 35)),
        "SHFL": (_MEMORY, _SHARED, 2, 25),
        "LDC": (_MEMORY, _SHARED, 2, 40),
        "CCTL": (_MEMORY, _SHARED, 2, 0),
        "BAR": (_FREE, _BARRIER, 1, 0),
        "LDGDEPBAR": (_FREE, _COPIES_END, 1, 0),
        "DEPBAR": (_FREE, _COPIES_DONE, 1, 0),
        **dict.fromkeys(("BRA", "BSYNC", "CALL", "RET"), (_FREE, _BRANCH, 1, 0)),
        **dict.fromkeys(("S2R", "S2UR", "CS2R", "R2UR"), (_FREE, _PLAIN, 1, 25)),
        **dict.fromkeys(("FFMA", "FMUL", "FADD", "HADD2", "HFMA2"), (_FMA, _PLAIN, 1, 5)),
        **dict.fromkeys(("BSSY", "EXIT", "FENCE", "MEMBAR", "NOP", "WARPSYNC"), (_FREE, _PLAIN, 1, 12)),
    }
    if operation in fixed:
        return fixed[operation]
    if operation == "IMAD":
        return _FMA_HALF, _PLAIN, card.wide if re.search("WIDE|HI", instruction.name) else 2, 5
    if operation.startswith("U"):  # one for the warp
        return _FREE, _PLAIN, 1, 12
    return _ALU, _PLAIN, 2, 8


def groups(instruction: Instruction) -> int:
    """Of copies or products: how many groups need not be done for it to go on; 1 where it ends one."""
    if found := re.search(r"DEPBAR\.LE (?:SB0|gsb0), (0x[0-9a-f]+)", instruction.text):
        return int(found[1], 16)
    return int(instruction.text.endswith("gsb0"))


def size(instruction: Instruction) -> int:
    """Bytes that a lane loads or stores."""
    found = re.search(r"\.[US]?(8|16|64|128)\b", instruction.name)
    return int(found[1]) // 8 if found else 4


class _Card(ctypes.Structure):  # as in timing.c
    _fields_ = [
        *(
            (name, ctypes.c_double)
            for name in ("memory_bytes", "l2_bytes", "l1_latency", "l2_latency", "memory_latency")
        ),
        *((name, ctypes.c_double) for name in ("branch", "between", "block_start", "idle_block", "dirty_bytes")),
        *((name, ctypes.c_int32) for name in ("l1_lines", "queue")),
    ]


class _Trace(ctypes.Structure):
    _fields_ = [
        ("length", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("pc", "active", "wavefronts", "first", "count", "sectors")),
    ]


class _Result(ctypes.Structure):
    _fields_ = [
        *(("cycles", ctypes.c_double), ("issued", ctypes.c_double), ("pipes", ctypes.c_double * len(_PIPES))),
        *((name, ctypes.c_double) for name in ("unit", "from_l2", "to_l2", "from_memory", "stored")),
    ]


@dataclass(frozen=True)
class Timing:
    """What one multiprocessor did.

    Attributes:
        cycles: from the first block's start to the last write.
        taken: cycles for which each of these alone would do: ``issue``, ``load/store``, ``alu``, ``fma``, ``special``,
            ``matrix``, ``l2``, ``memory``.
    """

    cycles: float
    taken: dict[str, float]


def time_blocks(
    program: Program,
    blocks: Sequence[Sequence[Trace]],
    card: Card,
    resident: int,
    idle: float = 0.0,
    from_memory: Sequence[float] = (),
) -> Timing:
    """Run blocks on one multiprocessor.

    Args:
        program: whose instructions the traces name.
        blocks: the traces of each block's warps, in the order in which the multiprocessor gets them.
        card: its figures.
        resident: blocks it has room for.
        idle: blocks without work that come before each.
        from_memory: a block each, the part of its sectors missing in the first level that memory has; 1 if not given.
    """
    table = np.zeros(len(program.code), _TIMED)
    for row, instruction in zip(table, program.code, strict=True):
        row["pipe"], row["kind"], row["cycles"], row["latency"] = classify(instruction, card)
        row["groups"] = groups(instruction)
        row["bytes"] = size(instruction)
        for name in ("stall", "write_barrier", "read_barrier", "wait"):
            row[name] = getattr(instruction, name)
    warps = len(blocks[0])
    flat = [trace for block in blocks for trace in block]
    traces = (_Trace * len(flat))()
    for into, trace in zip(traces, flat, strict=True):
        arrays = (trace.pc, trace.active, trace.wavefronts, trace.first, trace.count, trace.sectors)
        into.length = len(trace.pc)
        into.pc, into.active, into.wavefronts, into.first, into.count, into.sectors = (x.ctypes.data for x in arrays)
    hertz = card.multiprocessors * card.ghz * 1e9
    memory_bytes, l2_bytes = card.memory_tb_s * 1e12 / hertz, card.l2_tb_s * 1e12 / hertz
    figures = _Card(
        *(memory_bytes, l2_bytes, card.l1_latency, card.l2_latency, card.memory_latency, card.branch, card.between),
        *(card.block_start, card.idle_block, card.dirty_kb * 1024, int(card.l1_kb * 1024) // 128, card.queue),
    )
    shares = np.array(from_memory or [1.0] * len(blocks))
    result, run = _Result(), library().time_blocks
    run(
        *(ctypes.c_void_p(table.ctypes.data), ctypes.byref(figures), traces, len(blocks), warps, resident),
        *(ctypes.c_double(idle), ctypes.c_void_p(shares.ctypes.data), ctypes.byref(result)),
    )
    pipes = [cycles / 4 for cycles in result.pipes]
    return Timing(
        result.cycles,
        {
            "issue": result.issued / 4,
            "load/store": result.unit,
            "alu": pipes[_ALU],
            "fma": pipes[_FMA] + pipes[_FMA_HALF] / 2,
            "special": pipes[_SPECIAL],
            "matrix": pipes[_MATRIX],
            "l2": (result.from_l2 + result.to_l2) / l2_bytes,
            "memory": (result.from_memory + result.stored) / memory_bytes,
        },
    )


def resident_blocks(program: Program, launch: Launch) -> int:
    """Blocks that fit a multiprocessor of 65536 registers, 228 KiB of shared memory and 64 warps beside each other."""
    warps = launch.threads // 32
    by_registers = 4 * (16384 // (-(-32 * program.registers // 256) * 256)) // warps
    return max(1, min(by_registers, 228 * 1024 // (launch.shared + 1024), 64 // warps, 32))
