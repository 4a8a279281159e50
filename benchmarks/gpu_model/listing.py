"""Reads the machine code of a Hopper kernel: its loops, and how many instructions of each class they have.

The listing is what nvdisasm prints: an instruction to a line, with the cycles for which the scheduler stalls behind it.
Loops are those of the control flow (an edge back to a block that dominates it), so that code that is laid out behind
the end, such as waiting for a barrier again, makes none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

__all__ = ["CLASSES", "Instruction", "Listing", "Loop", "classified"]

_LINE = re.compile(
    r"^\s*(?P<control>\S*[:-]\S*)\s+/\*(?P<at>[0-9a-f]{4,})\*/\s+(?:@!?(?P<if>U?PT?\w*)\s+)?(?P<operation>[A-Z][\w.]*)"
    r"(?P<operands>[^\n]*)$"
)
_LABEL = re.compile(r"^(\.L_x_\w+):")
_TARGET = re.compile(r"`\((\.L_x_\w+)\)")
_STORES = frozenset("UTMASTG UTMAREDG".split())
_PRODUCT = re.compile(r"HGMMA\.(\d+x\d+x\d+)")

CLASSES: Mapping[str, frozenset[str]] = {
    "special": frozenset("MUFU F2F F2I I2F FRND".split()),
    "half": frozenset(
        "FMNMX FSEL FSETP F2FP SEL PRMT SHF LOP3 ISETP IMNMX VIMNMX PLOP3 LEA IADD3 IABS P2R R2P I2FP SHFL VOTE".split()
    ),
    "full": frozenset("FFMA FADD FMUL IMAD HFMA2 HADD2 HMUL2 MOV CS2R".split()),
    "memory": frozenset("LDS STS LDSM STSM LD ST LDG STG LDL STL LDC ATOMS RED".split()),
    "barrier": frozenset("BAR SYNCS MEMBAR FENCE WARPSYNC DEPBAR ERRBAR".split()),
    "transfer": frozenset("UTMALDG UTMASTG UTMAREDG UTMACMDFLUSH UBLKCP UTMAPF UTMACCTL".split()),
    "product": frozenset(["HGMMA"]),
}
"""Classes by what executes them: "special" issues a warp in 8 cycles, "half" in 2, "full" in 1. All others: "other"."""


def classified(operation: str) -> str:
    """Returns the class of an instruction."""
    name = operation.partition(".")[0]
    return next((kind for kind, names in CLASSES.items() if name in names), "other")


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
      operation: with its modifiers, such as ``HGMMA.64x256x16.F32.BF16``.
      operands: as they are written.
      conditional: whether a predicate guards it.
      target: the label of a branch.
      stall: cycles before the warp may issue the next.
    """

    operation: str
    operands: str
    conditional: bool
    target: str | None
    stall: int

    @property
    def name(self) -> str:
        return self.operation.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop of a kernel.

    Attributes:
      blocks: numbers of its basic blocks, those of loops inside included.
      own: numbers of those that are in no loop inside.
      depth: 0 for the outermost.
      inside: whether there are loops with matrix products in it.
      classes: how many instructions of each class one pass takes, along the shortest way with most stores.
      operations: the same by names.
      cycles: the sum of the stalls on this way, for one warp alone.
      products: its wgmma by shape, such as ``64x128x16``.
      waits: how often it waits at a barrier.
      overlaps: how often it waits for all groups of wgmma but the last.
      multicasts: transfers that write into the shared memory of all blocks of a cluster.
    """

    blocks: frozenset[int]
    own: frozenset[int]
    depth: int
    inside: bool
    classes: Mapping[str, int]
    operations: Mapping[str, int]
    cycles: int
    products: Mapping[str, int]
    waits: int
    overlaps: int
    multicasts: int

    @property
    def instructions(self) -> int:
        return sum(self.classes.values())


@dataclass(frozen=True)
class Listing:
    """A kernel's code as basic blocks: ``Listing.of(text)``.

    Attributes:
      blocks: the instructions of each.
      after: where control may go from each.
    """

    blocks: Sequence[Sequence[Instruction]]
    after: Sequence[Sequence[int]]

    @staticmethod
    def of(text: str) -> Listing:
        """Reads a listing of one kernel."""
        blocks: list[list[Instruction]] = [[]]
        labels: dict[str, int] = {}
        for line in text.splitlines():
            if label := _LABEL.match(line):
                if blocks[-1]:
                    blocks.append([])
                labels[label[1]] = len(blocks) - 1
            elif found := _LINE.match(line):
                operands = found["operands"]
                target = _TARGET.search(operands) if found["operation"].startswith(("BRA", "BSSY", "CALL")) else None
                stall = re.sub(r"\D", "", found["control"].rpartition(":")[2])
                instruction = Instruction(
                    found["operation"],
                    operands.strip(),
                    found["if"] is not None or bool(re.match(r"\s*!?U?P\d", operands)),
                    target[1] if target else None,
                    int(stall or 1),
                )
                blocks[-1].append(instruction)
                if instruction.name in ("BRA", "EXIT", "RET", "BRX"):
                    blocks.append([])
        if not blocks[-1]:
            blocks.pop()
        return Listing(blocks, [_after(n, blocks, labels) for n in range(len(blocks))])

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """The loops, in the order of their first blocks; the outer of two that begin together first."""
        found: dict[int, set[int]] = {}
        before: dict[int, list[int]] = {block: [] for block in range(len(self.blocks))}
        for block, others in enumerate(self.after):
            for other in others:
                before[other].append(block)
        for block in self._ordered:
            for head in self.after[block]:
                if head in self._dominators[block]:
                    found.setdefault(head, {head}).update(_reaching(block, head, before))
        bodies = sorted(found.items(), key=lambda item: (item[0], -len(item[1])))
        return tuple(self._loop(head, body, bodies) for head, body in bodies)

    def _loop(self, head: int, body: set[int], bodies: Sequence[tuple[int, set[int]]]) -> Loop:
        inner = [other for start, other in bodies if start != head and other < body]
        own = body.difference(*inner)
        way = self._way(head, body, own)
        taken = [instruction for block in way for instruction in self.blocks[block]]
        return Loop(
            frozenset(body),
            frozenset(own),
            sum(head in other and start != head for start, other in bodies),
            any(self._multiplies(other) for other in inner),
            dict(Counter(classified(instruction.operation) for instruction in taken)),
            dict(Counter(instruction.name for instruction in taken)),
            sum(instruction.stall for instruction in taken),
            dict(Counter(filter(None, map(_product, taken)))),
            sum(i.name == "BAR" or i.operation.startswith("SYNCS.PHASECHK") for i in taken),
            sum(i.operation.startswith("WARPGROUP.DEPBAR") and i.operands.endswith("0x1") for i in taken),
            sum(i.name == "UTMALDG" and i.operation.endswith(".MULTICAST") for i in taken),
        )

    def _multiplies(self, body: set[int]) -> bool:
        return any(i.name == "HGMMA" for block in body for i in self.blocks[block])

    def _way(self, head: int, body: set[int], own: set[int]) -> list[int]:
        """Returns the blocks of one pass that are in no loop inside: the shortest way of those that store by TMA, or of
        all where none does.

        What is skipped is what a kernel does rarely: waiting again, tails, rows of a neighbour.
        """
        ways: dict[tuple[int, bool], tuple[int, tuple[int, ...]]] = {(head, False): (0, ())}
        ends: dict[bool, tuple[int, tuple[int, ...]]] = {}
        for block in [block for block in self._ordered if block in body]:
            stores = block in own and any(i.name in _STORES for i in self.blocks[block])
            for stored in (False, True):
                if (block, stored) not in ways:
                    continue
                length, blocks = ways[block, stored]
                here = (length + len(self.blocks[block]), (*blocks, block)) if block in own else (length, blocks)
                key = stored or stores
                for other in self.after[block]:
                    if other == head:
                        ends[key] = min(ends.get(key, here), here)
                    elif other in body:
                        ways[other, key] = min(ways.get((other, key), here), here)
        return list(ends[max(ends)][1])

    @cached_property
    def _ordered(self) -> list[int]:
        """Returns the blocks that control reaches, each behind those that lead to it but for loops."""
        done: list[int] = []
        seen, stack = {0}, [(0, iter(self.after[0]))]
        while stack:
            block, others = stack[-1]
            new = next((other for other in others if other not in seen), None)
            if new is None:
                stack.pop()
                done.append(block)
            else:
                seen.add(new)
                stack.append((new, iter(self.after[new])))
        return done[::-1]

    @cached_property
    def _dominators(self) -> dict[int, set[int]]:
        """Returns for each block those through which control must have come, itself included."""
        before: dict[int, list[int]] = {block: [] for block in self._ordered}
        for block in self._ordered:
            for other in self.after[block]:
                before[other].append(block)
        found = {block: set(self._ordered) for block in self._ordered} | {0: {0}}
        changed = True
        while changed:
            changed = False
            for block in self._ordered[1:]:
                new = {block} | set.intersection(*(found[other] for other in before[block]))
                changed |= new != found[block]
                found[block] = new
        return found


def _after(number: int, blocks: Sequence[Sequence[Instruction]], labels: Mapping[str, int]) -> list[int]:
    """Returns the blocks to which control may go from one."""
    last = blocks[number][-1] if blocks[number] else None
    on = [number + 1] if number + 1 < len(blocks) else []
    if last is None or last.name not in ("BRA", "EXIT", "RET", "BRX"):
        return on
    jump = [labels[last.target]] if last.target in labels and labels[last.target] < len(blocks) else []
    return [*jump, *(on if last.conditional else [])]


def _reaching(block: int, head: int, before: Mapping[int, Sequence[int]]) -> set[int]:
    """Returns the blocks from which control reaches ``block`` without coming through ``head``."""
    found, left = {head}, [block]
    while left:
        new = left.pop()
        if new not in found:
            found.add(new)
            left += before[new]
    return found


def _product(instruction: Instruction) -> str:
    shape = _PRODUCT.match(instruction.operation)
    return shape[1] if shape else ""
