"""Blocks of a compiled kernel, run on the CPU on the tensors of its launch, and what each warp of them did.

Results are those of a card but for last bits: MUFU is exact and rounded, HMMA adds up in double and rounds once.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastmoll.kernels.batch_tail_cupy import Launch
from sass.decode import INSTRUCTION
from sass.native import library
from sass.program import Program

Array = np.ndarray[Any, Any]

PARAMETERS = 0x210
"""Where the parameters of a kernel lie in the constants of sm_90."""
SYSTEM_SHARED = 0x400
"""Shared memory of a block that is the system's, at its beginning."""
_LIMIT = 20_000_000  # instructions a block


class SassError(RuntimeError):
    """A program that can't go on: an unknown instruction, an address outside of all tensors, lanes that deadlock."""


@dataclass(frozen=True)
class Trace:
    """What one warp executed.

    Attributes:
        pc: int32, numbers of instructions in :attr:`Program.code`.
        active: uint8, lanes that ran each; of a branch, lanes that took it.
        wavefronts: int16, cycles of shared memory, -1 where it was not accessed.
        first, count: int64 and uint8, where in ``sectors`` those of an instruction are; first is -1 if it has none.
        sectors: int64, the distinct 32-byte sectors of an instruction, ascending. Tensors of the launch lie 4 GiB apart
            in them, wherever they lie in this process.
    """

    pc: Array
    active: Array
    wavefronts: Array
    first: Array
    count: Array
    sectors: Array


_RECORD = np.dtype([("pc", "i4"), ("wavefronts", "i2"), ("active", "u1"), ("count", "u1"), ("first", "i8")])


class _Trace(ctypes.Structure):
    _fields_ = [
        *(("records", ctypes.c_void_p), ("length", ctypes.c_int64), ("room", ctypes.c_int64)),
        *(("sectors", ctypes.c_void_p), ("sector_length", ctypes.c_int64), ("sector_room", ctypes.c_int64)),
    ]

    def read(self) -> Trace:
        records = np.frombuffer(_bytes(self.records, self.length * _RECORD.itemsize), _RECORD)
        sectors = np.frombuffer(_bytes(self.sectors, self.sector_length * 8), np.int64)
        pc, active, wavefronts, first, count = (
            records[x].copy() for x in ("pc", "active", "wavefronts", "first", "count")
        )
        return Trace(pc, active, wavefronts, first, count, sectors)


def _bytes(address: int | None, count: int) -> bytes:
    return ctypes.string_at(address, count) if address else b""


class _Block(ctypes.Structure):  # as in machine.h
    _fields_ = [
        *(("program", ctypes.c_void_p), ("length", ctypes.c_int32)),
        *(("constants", ctypes.c_char_p), ("constant_bytes", ctypes.c_int32)),
        *(("shared", ctypes.c_void_p), ("shared_bytes", ctypes.c_int32)),
        *((name, ctypes.c_int32) for name in ("threads", "block_x", "block_y")),
        *(("regions", ctypes.c_void_p), ("region_count", ctypes.c_int32)),
        *(("local_bytes", ctypes.c_int32), ("tracing", ctypes.c_int32)),
        *(("limit", ctypes.c_int64), ("steps", ctypes.c_int64)),
        *(("traces", ctypes.c_void_p), ("error", ctypes.c_char_p), ("error_pc", ctypes.c_int32)),
    ]


def _constants(launch: Launch, local: int) -> bytes:
    """The constants of a kernel: dimensions, the end of a thread's local memory, and parameters, naturally aligned."""
    bank = bytearray(PARAMETERS)
    bank[:24] = np.array((launch.threads, 1, 1, *launch.grid, 1), np.int32).tobytes()
    bank[0x28:0x2C] = np.int32(local).tobytes()
    for value in launch.arguments:
        bank += b"\0" * (-len(bank) % value.itemsize) + value.tobytes()
    return bytes(bank)


def storages(launch: Launch) -> dict[int, int]:
    """Addresses and bytes of the memory that a launch may access; in traces, the n-th begins at 4 n GiB."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in launch.keep}


def _regions(launch: Launch) -> Array:
    """Begin, end, and begin in traces of that memory."""
    rows = [(begin, begin + size, number << 32) for number, (begin, size) in enumerate(storages(launch).items(), 1)]
    return np.array(rows, np.uint64)


def run_block(program: Program, launch: Launch, block: tuple[int, int], *, trace: bool = True) -> list[Trace]:
    """Run one block; it writes the output of the launch.

    Args:
        program: the launch's kernel, compiled for sm_90.
        launch: of CPU tensors.
        block: its number in x and y.
        trace: whether to write down what warps do, which takes as long again.

    Returns:
        A trace a warp, or none.

    Raises:
        SassError: see there; it names the instruction.
        FileNotFoundError: there is no C compiler.
    """
    native = library()
    if native.instruction_bytes() != INSTRUCTION.itemsize:
        raise AssertionError("machine.h and decode.py disagree about an instruction")
    warps, local = launch.threads // 32, max(program.stack, 16)
    constants, regions = _constants(launch, local), _regions(launch)
    # Whatever a block finds in shared memory before it wrote there is not to be relied on.
    shared = np.full(SYSTEM_SHARED + launch.shared, 0xA5, np.uint8)
    traces, error = (_Trace * warps)(), ctypes.create_string_buffer(400)
    context = _Block(
        *(program.table.ctypes.data, len(program.code), constants, len(constants), shared.ctypes.data, len(shared)),
        *(launch.threads, *block, regions.ctypes.data, len(regions), local, trace, _LIMIT, 0),
        *(ctypes.addressof(traces), ctypes.addressof(error), -1),
    )
    status = native.run_block(ctypes.byref(context))
    result = [warp.read() for warp in traces] if trace else []
    native.free_traces(traces, warps)
    if status:
        at = context.error_pc
        where = f" in {program.code[at].text!r}" if 0 <= at < len(program.code) else ""
        why = f" ({program.unknown[at]})" if at in program.unknown else ""
        raise SassError(f"{error.value.decode()}{where}{why}, instruction {at}, block {block}, warp {-1 - status}")
    return result


def run_all(program: Program, launch: Launch) -> None:
    """Run all blocks, without traces: ``launch`` on the CPU."""
    for y in range(launch.grid[1]):
        for x in range(launch.grid[0]):
            run_block(program, launch, (x, y), trace=False)
