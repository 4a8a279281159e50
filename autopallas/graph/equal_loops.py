"""Recognises equal loops: a loop carries what an earlier one carried, if it starts and continues in the same way.

A checkpoint around a loop computes the loop again, and on the way stacks what the backward reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from autopallas import compat
from autopallas.compat import JaxprEqn, Literal, Var
from autopallas.graph.flatten import Body, Child

__all__ = ["Loop", "Loops", "loops"]

_COMPARED = 8
"""Largest number of earlier scans to compare a scan with."""


def loops(body: Body) -> int:
    """Counts the loops around a body, including its own."""
    return sum(part.startswith(("scan", "while")) for part in body.path)


@dataclass(slots=True)
class Loop:
    """A scan in numbers: each carried value at the start, within a step, after the step, and at the end."""

    starts: Sequence[int]
    within: Sequence[int]
    after: Sequence[int]
    ends: Sequence[int]


@dataclass(slots=True)
class Loops:
    """The scans of a program so far.

    Attributes:
      read: returns the number of a literal, or of the values that an equation computes, if the program has it; takes a
        literal or an equation, the numbers of its operands, and its frame.
      held: returns the numbers of the results of an equation that holds bodies, likewise, as far as they are known.
    """

    read: Callable[[Literal | JaxprEqn, Sequence[int | None], tuple[int, ...]], list[int] | None]
    held: Callable[[JaxprEqn, Sequence[Child], Sequence[int | None], tuple[int, ...]], Sequence[int | None] | None]
    _known: dict[Hashable, list[Loop]] = field(default_factory=lambda: defaultdict(list))
    """Scans by kind and by a number that they read or start with."""
    _ends: dict[int, int] = field(default_factory=dict)

    def add(
        self, equation: JaxprEqn, body: Body, frame: tuple[int, ...], inputs: Sequence[int | None], loop: Loop
    ) -> None:
        """Records a numbered scan; ``inputs`` as in :meth:`alike`."""
        kind = _kind(equation, body, frame)
        for number in {*inputs, *loop.starts} - {None}:
            self._known[kind, number].append(loop)
        self._ends.update(zip(loop.within, loop.ends, strict=True))

    def alike(
        self,
        equation: JaxprEqn,
        body: Body,
        frame: tuple[int, ...],
        inputs: Sequence[int | None],
        starts: Sequence[int | None],
    ) -> tuple[Loop | None, dict[int, int]]:
        """Finds an earlier scan that shares carried values with this one; returns it, and {position here: there}.

        ``inputs`` are the numbers of the body's inputs, None for carried values and for those not numbered yet.
        """
        if compat.has_side_effects(equation):
            return None, {}
        constants, _ = compat.scan_parts(equation)
        for loop in self._near(_kind(equation, body, frame), inputs, starts):
            pairs = _paired(starts, loop.starts)
            while pairs:
                # Suppose that they are equal within a step.  Are they then equal after it?
                given = list(inputs)
                for here, there in pairs.items():
                    given[constants + here] = loop.within[there]
                results = self.follow(body, given, frame)
                right = {here: there for here, there in pairs.items() if results[here] == loop.after[there]}
                if right == pairs:
                    return loop, pairs
                pairs = right
        return None, {}

    def _near(self, kind: Hashable, inputs: Sequence[int | None], starts: Sequence[int | None]) -> list[Loop]:
        """Returns the earlier scans that share most with this one; those that read what few others read come first."""
        numbers = [*dict.fromkeys(inputs), *dict.fromkeys(starts)]
        sharing = [self._known[kind, number] for number in numbers if (kind, number) in self._known]
        found: dict[int, Loop] = {}
        for known in sorted(sharing, key=len):
            for loop in known[-_COMPARED:]:
                found.setdefault(id(loop), loop)
            if len(found) >= _COMPARED:
                break
        return list(found.values())[:_COMPARED]

    def end(self, within: int) -> int | None:
        """Returns the number at the end of a value that an earlier scan carries."""
        return self._ends.get(within)

    def follow(self, body: Body, inputs: Sequence[int | None], frame: tuple[int, ...]) -> list[int | None]:
        """Returns the numbers of a body's results, as far as the program has computed the same before."""
        numbers: dict[Var, int | None] = dict(zip(body.invars, inputs, strict=True))

        def number(atom: Var | Literal) -> int | None:
            if isinstance(atom, Literal):
                found = self.read(atom, [], frame)
                return None if found is None else found[0]
            return numbers.get(atom)

        for position, equation in enumerate(body.equations):
            operands = [number(atom) for atom in equation.invars]
            results: Sequence[int | None] | None = None
            if position in body.children:
                results = self.held(equation, body.children[position], operands, frame)
            else:
                results = self.read(equation, operands, frame)
            if results is not None:
                numbers.update(zip(equation.outvars, results, strict=True))
        return [number(atom) for atom in body.outvars]


def _kind(equation: JaxprEqn, body: Body, frame: tuple[int, ...]) -> Hashable:
    return equation.params["length"], equation.params["reverse"], loops(body), frame


def _paired(starts: Sequence[int | None], others: Sequence[int]) -> dict[int, int]:
    """Pairs the positions of equal numbers, in order."""
    pairs: dict[int, int] = {}
    free = list(range(len(others)))
    for here, number in enumerate(starts):
        there = next((i for i in free if others[i] == number), None)
        if there is not None:
            pairs[here] = there
            free.remove(there)
    return pairs
