"""Machine code of sm_90 as ``cuobjdump -sass`` prints it, with the bits that say when an instruction may start."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from sass.decode import INSTRUCTION, OPERATIONS, decode

_LINE = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+([^;]*?)\s*;\s+/\* (0x[0-9a-f]+) \*/\s*\n\s+/\* (0x[0-9a-f]+) \*/", re.MULTILINE
)


@dataclass(frozen=True)
class Instruction:
    """One instruction, 128 bits.

    Attributes:
        text: as disassembled, without its predicate.
        predicate: lanes that run it: ``""``, ``"P0"``, ``"!UP1"``.
        stall: cycles from its issue to the next of its warp.
        write_barrier: 0 to 5, let go when its result is there; 7: none.
        read_barrier: 0 to 5, let go when its sources have been read; 7: none.
        wait: mask of barriers that must be free before it issues.
    """

    text: str
    predicate: str
    stall: int
    write_barrier: int
    read_barrier: int
    wait: int

    @property
    def name(self) -> str:
        """Operation and modifiers: ``IMAD.WIDE.U32``."""
        return self.text.split()[0]

    @property
    def operation(self) -> str:
        """Operation: ``IMAD``."""
        return self.name.partition(".")[0]


class Program:
    """A decoded kernel.

    Attributes:
        code: the instructions.
        table: what the interpreter takes of each, ``INSTRUCTION`` of :mod:`sass.decode`.
        unknown: what is wrong with instructions that the interpreter can't run; it fails only where it meets one.
        registers: of a thread.
        stack: bytes of local memory of a thread.
    """

    def __init__(self, sass: str, registers: int = 0, stack: int = 0) -> None:
        """Decode the text of one kernel.

        Raises:
            ValueError: there is no instruction in it.
        """
        found = _LINE.findall(sass)
        if not found:
            raise ValueError(f"sass must be what cuobjdump -sass prints, got {sass[:40]!r}")
        self.registers, self.stack = registers, stack
        self.code: list[Instruction] = []
        self.unknown: dict[int, str] = {}
        self.table = np.zeros(len(found), INSTRUCTION)
        place = {int(address, 16): i for i, (address, *_) in enumerate(found)}
        for i, (_, text, low, high) in enumerate(found):
            control = int(high, 16) >> 41
            match = re.fullmatch(r"(?:@(!?U?P\w+)\s+)?(.*)", text.strip())
            assert match is not None
            fields = (control & 15, control >> 5 & 7, control >> 8 & 7, control >> 11 & 63)
            self.code.append(Instruction(match[2], match[1] or "", *fields))
            try:
                decode(match[1] or "", match[2], int(low, 16), place, self.table[i])
            except ValueError as error:
                self.table[i]["op"] = OPERATIONS["UNKNOWN"]
                self.unknown[i] = str(error)
