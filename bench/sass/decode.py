"""Instructions of sm_90 as records of numbers: what of each the interpreter in ``interpreter.c`` goes by.

Only what compiled kernels of the batch tail need is known; :func:`decode` names what is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NOTHING, REGISTER, UNIFORM, IMMEDIATE, CONSTANT, PREDICATE, UNIFORM_PREDICATE = range(7)
NEGATED, ABSOLUTE, INVERTED, NOT = 1, 2, 4, 8
RZ, URZ, PT = 255, 63, 7

SOURCE = np.dtype([(name, "i4") for name in ("kind", "index", "value", "flags", "part")])
_FIELDS = (
    "op form ftz sat round is_unsigned extended high relu logic size predicate predicate_not predicate_uniform "
    "into destination out0 out1 out_uniform base base64 ureg offset base2 ureg2 offset2 target"
)
INSTRUCTION = np.dtype([*((name, "i4") for name in _FIELDS.split()), ("source", SOURCE, 5)])
"""The same fields, in the same order, as in ``machine.h``."""

Fields = Mapping[str, int]


@dataclass(frozen=True)
class Form:
    """How the text of an operation is read.

    Attributes:
        operands: a letter an operand: ``d`` register written, ``p`` predicate written, ``P`` any number of those,
            ``s`` all sources that are left, ``f`` the same, floating-point, ``m`` an address, ``M`` a second one,
            ``b`` a barrier of convergence, ``t`` a target, ``z`` nothing that matters.
        modifiers: what each modifier sets; others are unknown.
        default: fields that modifiers change.
        needs: modifiers without which the operation is unknown.
        name: of the operation that does the same.
    """

    operands: str
    modifiers: Mapping[str, Fields] = field(default_factory=dict)
    default: Fields = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    name: str = ""


def _numbered(names: str, what: str, start: int = 0) -> dict[str, Fields]:
    return {name: {what: number} for number, name in enumerate(names.split(), start)}


_FTZ: dict[str, Fields] = {"FTZ": {"ftz": 1}}
_ROUND = _numbered("RM RP RZ", "round", 1) | _numbered("FLOOR CEIL TRUNC", "round", 1)
_U32: dict[str, Fields] = {"U32": {"is_unsigned": 1}}
_X: dict[str, Fields] = {"X": {"extended": 1}}
_LOGIC = _numbered("AND OR XOR", "logic")
_COMPARE = _numbered("LT EQ LE GT NE GE", "form", 1)
_COMPARE_FLOATS = _COMPARE | _numbered("LTU EQU LEU GTU NEU GEU", "form", 9)
_RELU: dict[str, Fields] = {"RELU": {"relu": 1}}
_MATRICES: dict[str, Fields] = {"16": {}, "M88": {}, "MT88": {"form": 1}, "2": {"size": 8}, "4": {"size": 16}}
_SIZES: dict[str, Fields] = {
    "U8": {"size": 1}, "S8": {"size": 1, "is_unsigned": 0}, "U16": {"size": 2}, "S16": {"size": 2, "is_unsigned": 0},
    "64": {"size": 8}, "128": {"size": 16},
}  # fmt: skip
_ACCESS: dict[str, Fields] = {"E": {}, "LU": {}, **_SIZES}
_WORD = {"size": 4, "is_unsigned": 1}
_ARITHMETIC = {**_FTZ, **_ROUND, "SAT": {"sat": 1}}

FORMS: dict[str, Form] = {
    # Control.
    "NOP": Form(""),
    "DEPBAR": Form("zz", {"LE": {}}, name="NOP"),
    "LDGDEPBAR": Form("", name="NOP"),
    "CCTL": Form("z", {"E": {}, "PF2": {}}, needs=("PF2",), name="NOP"),  # a prefetch
    "MEMBAR": Form("", {"ALL": {}, "CTA": {}}, needs=("CTA",), name="NOP"),
    "FENCE": Form("", {"VIEW": {}, "ASYNC": {}, "S": {}}, needs=("VIEW", "ASYNC"), name="NOP"),
    # Matrix products are done at once, and so nobody needs to wait for them.
    "WARPGROUP": Form("", {"ARRIVE": {}, "DEPBAR": {}, "LE": {}}, name="NOP"),
    "BSSY": Form("bz"),
    "BSYNC": Form("b"),
    "BREAK": Form("sb"),
    "WARPSYNC": Form("", {"ALL": {}}, needs=("ALL",)),
    "BAR": Form("z", {"SYNC": {}, "DEFER_BLOCKING": {}}, needs=("SYNC",)),
    "BRADIV": Form("st"),
    "BRA": Form("st"),
    "CALL": Form("st", {"REL": {}, "NOINC": {}}, needs=("REL",)),
    "RET": Form("z", {"REL": {}, "NODEC": {}}, needs=("REL",)),
    "EXIT": Form("s"),
    # Integers and predicates.
    "MOV": Form("ds"),
    "CS2R": Form("dz"),
    "S2R": Form("dz"),
    "R2UR": Form("ds"),
    "SEL": Form("ds"),
    "IADD3": Form("dPs", {"64": {"size": 8}} | _X),
    "VIADD": Form("ds"),
    "VIMNMX": Form("ds", _U32 | _RELU),
    "VIADDMNMX": Form("ds", _U32 | _RELU),
    "VIMNMX3": Form("ds"),
    "IMAD": Form("dPs", {"MOV": {}, "IADD": {}, "SHL": {}, "WIDE": {"form": 1}, "HI": {"form": 2}} | _U32 | _X),
    "LEA": Form("dPs", {"HI": {"high": 1}, "SX32": {"is_unsigned": 0}} | _X, {"is_unsigned": 1}),
    "LOP3": Form("Pds", {"LUT": {}}),
    "PLOP3": Form("pps", {"LUT": {}}),
    "SHF": Form("ds", {"L": {"form": 0}, "R": {"form": 1}, "HI": {"high": 1}, "S32": {}, "S64": {"size": 8},
                "U64": {"is_unsigned": 1, "size": 8}} | _U32),
    "SGXT": Form("ds", _U32),
    "P2R": Form("dzs"),
    "PRMT": Form("ds"),
    "IABS": Form("ds"),
    "ISETP": Form("pps", {"EX": {"extended": 1}} | _U32 | _LOGIC | _COMPARE),
    # Floating point.
    "FADD": Form("df", _ARITHMETIC),
    "FMUL": Form("df", _ARITHMETIC),
    "FFMA": Form("df", _ARITHMETIC),
    "FMNMX": Form("df", _FTZ),
    "FSEL": Form("df"),
    "FSETP": Form("ppf", _FTZ | _LOGIC | _COMPARE_FLOATS),
    "FCHK": Form("pf"),
    "MUFU": Form("df", _numbered("COS SIN EX2 LG2 RCP RSQ SQRT", "form")),
    "FRND": Form("df", _FTZ | _ROUND),
    "F2I": Form("df", {"NTZ": {}} | _FTZ | _ROUND | _U32, needs=("NTZ",)),
    "I2F": Form("ds", {"F32": {}, "F16": {"form": 1}, "S32": {}, "U8": {"size": 1, "is_unsigned": 1},
                "U16": {"size": 2, "is_unsigned": 1}, "S8": {"size": 1}, "S16": {"size": 2}} | _ROUND | _U32),
    "F2FP": Form("df", {**_numbered("F16 BF16", "form"), "F32": {}, "PACK_AB": {}}, needs=("F32", "PACK_AB")),
    "HADD2": Form("df", {"F32": {"size": 4}}),
    "HFMA2": Form("df", {"MMA": {}}),
    "HMMA": Form("ds", {"16816": {}, "F32": {}}, needs=("16816", "F32")),
    "HGMMA": Form("ds", {"F32": {}}, needs=("F32",)),
    # Memory and other lanes.
    "SHFL": Form("pds", {"BFLY": {}, "IDX": {"form": 1}}),
    "VOTE": Form("ps", {"ANY": {}}, needs=("ANY",)),
    "LDC": Form("ds", {"64": {"size": 8}}, _WORD),
    "LDG": Form("dm", _ACCESS, _WORD),
    "STG": Form("ms", _ACCESS, _WORD),
    "LDS": Form("dm", _SIZES, _WORD),
    "STS": Form("ms", _SIZES, _WORD),
    "LDL": Form("dm", _ACCESS, _WORD),
    "STL": Form("ms", _ACCESS, _WORD),
    "LDGSTS": Form("Mms", {"BYPASS": {}} | _ACCESS, _WORD),
    "LDSM": Form("dm", _MATRICES, {"size": 4}),
    "STSM": Form("ms", _MATRICES, {"size": 4}),
}  # fmt: skip
_ALIASES = {"S2UR": "S2R", "ULDC": "LDC", "I2FP": "I2F", "VOTEU": "VOTE"}
# The last two are 0: clusters have one block, and generic addresses of shared memory, of which this is the upper half,
# are used by none.
_SPECIAL = {"SR_TID.X": 0, "SR_CTAID.X": 1, "SR_CTAID.Y": 2, "SR_CgaCtaId": 3, "SR_SWINHI": 3}

OPERATIONS = {name: number for number, name in enumerate(("UNKNOWN", *(x for x in FORMS if not FORMS[x].name)))}
"""Numbers of operations, ``OP_*`` of the interpreter."""

_IS_PREDICATE = re.compile(r"!?U?P(\d|T)")
_IS_NUMBER = re.compile(r"[-+]?(\d.*|INF|QNAN)")


def decode(predicate: str, text: str, word: int, place: Mapping[int, int], out: Any) -> None:
    """Read one instruction.

    Args:
        predicate: as in :class:`sass.program.Instruction`.
        text: without the predicate.
        word: its lower 64 bits, from which immediate floats are taken.
        place: numbers of instructions by their addresses.
        out: the record of ``INSTRUCTION`` to write, zeros so far.

    Raises:
        ValueError: an operation, a modifier or an operand that is not known.
    """
    out["out0"] = out["out1"] = PT
    out["base"] = out["ureg"] = out["base2"] = out["ureg2"] = -1
    out["predicate"], out["predicate_not"] = PT, predicate.startswith("!")
    if predicate:
        given = _operand(predicate, word, False)
        out["predicate"], out["predicate_uniform"] = given["index"], given["kind"] == UNIFORM_PREDICATE
    name, _, rest = text.partition(" ")
    operation, *modifiers = name.split(".")
    operands = [x.strip() for x in rest.replace(".reuse", "").split(",")] if rest else []
    if operation == "BRA" and modifiers[:1] == ["DIV"]:
        operation, modifiers = "BRADIV", modifiers[1:]
    operation = _ALIASES.get(operation, operation)
    if operation == "HGMMA":
        _shared_matrices(modifiers, operands, out)
    form = FORMS.get(operation) or FORMS.get(operation.removeprefix("U"))
    if form is None:
        raise ValueError(f"operation {operation}")
    operation = operation if operation in FORMS else operation.removeprefix("U")
    out["op"] = OPERATIONS[form.name or operation]
    for name, value in form.default.items():
        out[name] = value
    for modifier in modifiers:
        if modifier not in form.modifiers:
            raise ValueError(f"modifier {modifier}")
        for name, value in form.modifiers[modifier].items():
            out[name] = value
    if missing := set(form.needs) - set(modifiers):
        raise ValueError(f"no modifier {', '.join(sorted(missing))}")
    _special(operation, operands, out)
    _operands(form.operands, operands, word, place, out)


def _special(operation: str, operands: list[str], out: Any) -> None:
    """What only one operation has."""
    if operation == "S2R":
        if operands[1] not in _SPECIAL:
            raise ValueError(f"special register {operands[1]}")
        out["form"] = _SPECIAL[operands[1]]
    elif operation == "CS2R" and operands[1] != "SRZ":
        raise ValueError(f"special register {operands[1]}")
    elif operation == "BAR" and operands != ["0x0"]:
        raise ValueError(f"barrier {', '.join(operands)}")
    elif operation == "RET":
        register, base = operands[0].split()
        out["source"][0], out["target"] = _operand(register, 0, False), int(base, 16)
    elif operation in ("HADD2", "HFMA2") and _IS_NUMBER.fullmatch(operands[-2]):
        del operands[-1]  # a pair of immediate halves is one operand
    elif operation == "LDC" and (found := re.fullmatch(r"c\[0x0\]\[R(\d+)\+(0x[0-9a-f]+)\]", operands[1])):
        out["base"], operands[1] = int(found[1]), f"c[0x0][{found[2]}]"
    elif operation == "WARPGROUP":
        operands.clear()


def _shared_matrices(modifiers: list[str], operands: list[str], out: Any) -> None:
    """What HGMMA says of its matrices in shared memory: ``size`` columns, the uniform registers of their descriptors,
    and whether A (``high``) and B (``extended``) lie transposed. D, A if it is in registers, and C are left."""
    shape = re.fullmatch(r"64x(\d+)x16", modifiers.pop(0))
    found = re.fullmatch(r"gdesc\[UR(\d+)\]((?:\.tnsp[AB])*)", next(x for x in operands if x.startswith("gdesc")))
    if not shape or not found:
        raise ValueError(f"matrices {', '.join(operands)}")
    out["size"], out["ureg"] = int(shape[1]), int(found[1])
    out["high"], out["extended"] = ".tnspA" in found[2], ".tnspB" in found[2]
    operands[:] = [x for x in operands if not x.startswith(("gdesc", "gsb"))]


def _operands(letters: str, operands: list[str], word: int, place: Mapping[int, int], out: Any) -> None:
    left, written = list(operands), 0
    after = len(letters) - 1 - max(letters.find("s"), letters.find("f"))  # operands behind the sources
    for letter in letters:
        if letter in "sf":
            for number in range(len(left) - after):
                out["source"][number] = _operand(left.pop(0), word, letter == "f")
        elif letter == "P":
            while left and _IS_PREDICATE.fullmatch(left[0]):
                _write_predicate(left.pop(0), written, out)
                written += 1
        elif letter == "p":
            _write_predicate(left.pop(0), written, out)
            written += 1
        elif letter == "d":
            to = _operand(left.pop(0), word, False)
            if to["kind"] not in (REGISTER, UNIFORM) or to["flags"]:
                raise ValueError(f"destination {operands[0]}")
            out["into"], out["destination"] = to["kind"], to["index"]
        elif letter in "mM":
            _address(left.pop(0), out, "2" if letter == "M" else "")
        elif letter == "b":
            out["form"] = int(left.pop(0).removeprefix("B"))
        elif letter == "t":
            out["target"] = place[int(left.pop(0), 16)]
        else:
            left.pop(0)
    if left:
        raise ValueError(f"operands {', '.join(left)}")


def _write_predicate(text: str, which: int, out: Any) -> None:
    to = _operand(text, 0, False)
    if to["kind"] not in (PREDICATE, UNIFORM_PREDICATE) or to["flags"]:
        raise ValueError(f"destination {text}")
    out[f"out{which}"] = to["index"]
    out["out_uniform"] |= to["kind"] == UNIFORM_PREDICATE and to["index"] != PT


def _operand(text: str, word: int, is_float: bool) -> Any:
    """A source, as ``SOURCE``."""
    out = np.zeros((), SOURCE)
    if is_float and _IS_NUMBER.fullmatch(text):
        out["kind"], out["value"] = IMMEDIATE, np.uint32(word >> 32).view(np.int32)
        return out
    if re.fullmatch(r"-?0x[0-9a-f]+", text):
        out["kind"], out["value"] = IMMEDIATE, np.uint32(int(text, 16) & 0xFFFFFFFF).view(np.int32)
        return out
    match = re.fullmatch(r"([-~!]*)(\|?)([^|]+)\|?", text)
    if not match:
        raise ValueError(f"operand {text}")
    signs, absolute, body = match.groups()
    out["flags"] = (
        NEGATED * ("-" in signs) | ABSOLUTE * bool(absolute) | INVERTED * ("~" in signs) | NOT * ("!" in signs)
    )
    if bank := re.fullmatch(r"c\[0x0\]\[(0x[0-9a-f]+)\]", body):
        out["kind"], out["value"] = CONSTANT, int(bank[1], 16)
        return out
    name, *suffixes = body.split(".")
    for suffix in suffixes:
        if suffix in ("H0_H0", "H1_H1"):
            out["part"] = 1 + (suffix == "H1_H1")
        elif suffix != "64":
            raise ValueError(f"suffix {suffix} of {text}")
    match = re.fullmatch(r"(UR|R|UP|P)(\d+|Z|T)", name)
    if not match:
        raise ValueError(f"operand {text}")
    kind, zero = {"R": (REGISTER, RZ), "UR": (UNIFORM, URZ), "P": (PREDICATE, PT), "UP": (UNIFORM_PREDICATE, PT)}[
        match[1]
    ]
    out["kind"], out["index"] = kind, zero if match[2] in "ZT" else int(match[2])
    return out


def _address(text: str, out: Any, which: str) -> None:
    """``[R2.64+UR4+0x10]``, ``desc[UR4][R2.64]``, ``[UR4]``."""
    match = re.fullmatch(r"(?:desc\[UR\d+\])?\[([^\]]*)\]", text)
    if not match:
        raise ValueError(f"address {text}")
    for term in match[1].replace("+-", "+~").split("+"):
        if found := re.fullmatch(r"R(\d+|Z)(?:\.(64|U32))?", term):
            out[f"base{which}"] = RZ if found[1] == "Z" else int(found[1])
            if found[2] == "64" and not which:
                out["base64"] = 1
        elif found := re.fullmatch(r"UR(\d+|Z)", term):
            out[f"ureg{which}"] = URZ if found[1] == "Z" else int(found[1])
        elif found := re.fullmatch(r"(~?)(0x[0-9a-f]+)", term):
            out[f"offset{which}"] = -int(found[2], 16) if found[1] else int(found[2], 16)
        else:
            raise ValueError(f"address {text}")
