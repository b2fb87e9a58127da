"""Disassembled CUDA code: its loops, the path of a role through it, and how often its instructions run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

Counts = Counter[str]
"""Warp instructions by class; ``warp`` is all of them, ``xu``, ``imad_pipe``, ``alu``, ``lsu`` what pipes are taken."""


@dataclass(frozen=True)
class Loop:
    """An innermost or outer loop of compiled code: first and last instruction, both inside."""

    first: int
    last: int


class Code:
    """Disassembled code: its loops, and instruction counts of the path through one of them."""

    def __init__(self, sass: str) -> None:
        found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+([^;]*);", sass, re.MULTILINE)
        place = {int(address, 16): i for i, (address, _) in enumerate(found)}
        self.text = [re.sub(r"^@!?U?P\w+\s+", "", text.strip()) for _, text in found]
        self.conditional = [text.strip().startswith("@") for _, text in found]
        self.target: list[int | None] = []
        for text in self.text:
            match = re.match(r"BRA\b.*?(0x[0-9a-f]+)", text)
            self.target.append(place.get(int(match[1], 16)) if match else None)
        back = {(to, i) for i, to in enumerate(self.target) if to is not None and to < i}
        self.loops = [Loop(*ends) for ends in sorted(back)]
        self.inner = [x for x in self.loops if not any(x != y and self.inside(y, x) for y in self.loops)]

    @staticmethod
    def inside(inner: Loop, outer: Loop) -> bool:
        return outer.first <= inner.first and inner.last <= outer.last

    def count(self, pattern: str, loop: Loop) -> int:
        return sum(bool(re.match(pattern, text)) for text in self.text[loop.first : loop.last + 1])

    def find(self, has: str, has_not: str = "$^") -> list[Loop]:
        """Innermost loops with one instruction and without another."""
        return [loop for loop in self.inner if self.count(has, loop) and not self.count(has_not, loop)]

    def after(self, place: int) -> list[int]:
        text, to = self.text[place], self.target[place]
        ends = text.startswith(("EXIT", "RET", "BRA")) and not self.conditional[place] and "BRA.DIV" not in text
        following = [] if ends or place + 1 == len(self.text) else [place + 1]
        return following if to is None else [*following, to]

    def path(self, through: Loop, around: Sequence[Loop]) -> set[int]:
        """Instructions on ways from the entry through one loop, past none of the others, to the exit."""
        barred = {i for loop in around for i in range(loop.first, loop.last + 1)}
        forward = [[j for j in self.after(i) if j not in barred] for i in range(len(self.text))]
        backward: list[list[int]] = [[] for _ in forward]
        for i, successors in enumerate(forward):
            for j in successors:
                backward[j].append(i)

        def reach(start: int, edges: list[list[int]]) -> set[int]:
            seen, todo = {start}, [start]
            while todo:
                for j in edges[todo.pop()]:
                    if j not in seen:
                        seen.add(j)
                        todo.append(j)
            return seen

        return reach(0, forward) & (reach(through.last, forward) | reach(through.first, backward))

    def tally(self, places: Sequence[int], weight: Sequence[float] | float = 1.0) -> Counts:
        """Instructions by class, and their cycles of shared pipes in units of a full warp."""
        weights = [weight] * len(places) if isinstance(weight, float) else weight
        total: Counts = Counter()
        for place, part in zip(places, weights, strict=True):
            for name, value in classify(self.text[place]).items():
                total[name] += value * part  # type: ignore[assignment]
        return total

    def body(self, loop: Loop) -> Counts:
        """One round of a loop; forward branches share out evenly."""
        chance = {i: 0.0 for i in range(loop.first, loop.last + 2)}
        chance[loop.first] = 1.0
        for i in range(loop.first, loop.last + 1):
            to, falls = self.target[i], not (self.text[i].startswith("BRA") and not self.conditional[i])
            if to is None or not i < to <= loop.last:
                chance[i + 1] += chance[i] if falls else 0.0
                continue
            share = 0.5 if falls else 1.0
            chance[to] += share * chance[i]
            chance[i + 1] += (1.0 - share) * chance[i]
        places = range(loop.first, loop.last + 1)
        return self.tally(places, [min(chance[i], 1.0) for i in places])


def classify(text: str) -> dict[str, float]:
    """The class of an instruction, and what it takes of the pipes (1: a warp of 32 lanes at the pipe's full rate)."""
    name = text.split()[0]
    base = name.split(".")[0]
    wide = 4.0 if ".128" in name or "LDSM" in name else 2.0 if ".64" in name else 1.0
    if re.match("HMMA|HGMMA|UTCHMMA", base):
        return {"warp": 1.0, "matrix": 1.0}
    if re.match("MUFU|I2F$|F2I", base):
        return {"warp": 1.0, "mufu" if base == "MUFU" else "convert": 1.0, "xu": 1.0}
    if base == "IMAD":
        kind = "imad_wide" if re.search("WIDE|HI", name) else "imad"
        return {"warp": 1.0, kind: 1.0, "imad_pipe": 2.0 if kind == "imad_wide" else 1.0}
    if re.match("LDG|LDS|STG|STS|LDSM|LDGSTS", base):
        return {"warp": 1.0, base.lower(): 1.0, "lsu": wide}
    if re.match("LOP3|IADD3|VIADD|PRMT|SHF|ISETP|SEL|LEA|IABS|[UV]?IMNMX|VIADDMNMX|FSETP|FSEL|FMNMX|PLOP3", base):
        return {"warp": 1.0, "other": 1.0, "alu": 1.0}
    return {"warp": 1.0, "other": 1.0}


def times(counts: Counts, factor: float) -> Counts:
    """Counts, so many times."""
    return Counter({name: value * factor for name, value in counts.items()})


def total_of(parts: Sequence[Counts]) -> Counts:
    """The sum of counts."""
    total: Counts = Counter()
    for part in parts:
        total.update(part)
    return total


def outside(code: Code, path: set[int]) -> Counts:
    """The instructions of a path that are in no loop."""
    looped = {i for loop in code.inner for i in range(loop.first, loop.last + 1)}
    return code.tally(sorted(path - looped))
