"""Finds what of a forward its backward can compute again, element by element, from less than is kept for it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp

from autopallas import jaxprs
from autopallas.compat import JaxprAtom, JaxprEqn, Var
from autopallas.graph.custom_rules import ELEMENTWISE, is_elementwise_call
from autopallas.graph.prices import LONG, SAME
from autopallas.report.records import Rematerialised
from autopallas.rewrite.rematerialisation.rounding import compared, roundings

__all__ = [
    "LEAST_BYTES",
    "SHORT",
    "Group",
    "Recomputation",
    "is_large_beside",
    "renamed",
    "size_of",
    "variables",
]

SHORT = ELEMENTWISE | SAME | {"broadcast_in_dim", "transpose"}
"""Primitives of what is computed again."""
LEAST_BYTES = 2**16
"""Smallest size of an array that is computed again."""
_SMALL = 8
"""How many times as large an array is as one that costs next to nothing to keep for it, such as the mean of a row."""
_SOURCES = 16
"""Most arrays that are kept to compute another one again."""
_LONGEST = 128
"""Most equations that are computed again for one array."""
_ROUNDS = 8
"""How often the groups that gain nothing are left out, and the others formed again."""


def size_of(variable: Var) -> int:
    """Returns the bytes of an array; 0 for what is none, such as a token or a key of random numbers."""
    shape, dtype = getattr(variable.aval, "shape", None), getattr(variable.aval, "dtype", None)
    if shape is None or dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return 0
    count: int = math.prod(shape) * dtype.itemsize
    return count


def is_large_beside(base: Var, size: int) -> bool:
    """Returns whether it costs something to keep an array for one of that many bytes."""
    return size_of(base) * _SMALL > size


def variables(atoms: Iterable[JaxprAtom]) -> list[Var]:
    return list(dict.fromkeys(atom for atom in atoms if isinstance(atom, Var)))


def renamed(atoms: Iterable[JaxprAtom], names: Mapping[Var, JaxprAtom]) -> list[JaxprAtom]:
    return [names.get(atom, atom) if isinstance(atom, Var) else atom for atom in atoms]


@dataclass(eq=False, slots=True)
class Group:
    """Values that are computed again together.

    Attributes:
      values: the values.
      bases: what they are computed from.
      equations: the positions of the equations that compute them.
      late: the positions of the equations of the backward that read one of them, in order.
    """

    values: list[Var] = field(default_factory=list)
    bases: dict[Var, None] = field(default_factory=dict)
    equations: set[int] = field(default_factory=set)
    late: list[int] = field(default_factory=list)


class Recomputation(ABC):
    """The equations of a forward, and after them those of its backward, with what is kept of one for the other.

    Attributes:
      equations: the equations.
      defined: for each value, the position of its equation.
      readers: for each value, the positions of the equations that read it.
      stored: values that take memory.
      peak: the position of the forward's last equation.
    """

    SHORT: ClassVar[frozenset[str]] = SHORT
    """Primitives of what is computed again."""

    stored: set[Var]
    peak: int

    def __init__(self, equations: Sequence[JaxprEqn]):
        self.equations = equations
        self._calls = {position for position, equation in enumerate(equations) if is_elementwise_call(equation)}
        self.defined: dict[Var, int] = {}
        self.readers: dict[Var, list[int]] = defaultdict(list)
        for position, equation in enumerate(equations):
            for variable in variables(equation.invars):
                self.readers[variable].append(position)
            self.defined.update(dict.fromkeys(equation.outvars, position))
        self._roundings, self._unsure = roundings(equations)
        self._far: set[Var] = set()

    def is_call(self, position: int) -> bool:
        """Returns whether an equation calls a function that is elementwise."""
        return position in self._calls

    def is_elementwise(self, value: Var) -> bool:
        """Returns whether a value is computed element by element."""
        position = self.defined.get(value)
        return position is not None and self._is_elementwise(position)

    def _is_elementwise(self, position: int) -> bool:
        equation = self.equations[position]
        named = equation.primitive.name in self.SHORT or position in self._calls
        return named and len(equation.outvars) == 1 and not equation.effects

    def can_repeat(self, value: Var) -> bool:
        """Returns whether a value is elementwise, and the same but for rounding where it is computed again."""
        return self.is_elementwise(value) and self.defined[value] not in self._unsure and value not in self._far

    def _through_two(self, wanted: Set[Var]) -> set[Var]:
        """Returns values to keep, so that none of the wanted ones is computed again through two long primitives."""
        useful = set(wanted)
        leading: set[Var] = set()  # values of which a long primitive computes something useful
        elementwise = [i for i in range(self.peak + 1) if self._is_elementwise(i)]
        for position in reversed(elementwise):
            (value,) = self.equations[position].outvars
            operands = variables(self.equations[position].invars)
            if value in leading or value in useful and self.is_long(position):
                leading.update(operands)
            if value in useful:
                useful.update(operands)
        through: set[Var] = set()  # values that are computed from what is kept through a long primitive
        found: set[Var] = set()
        for position in elementwise:
            (value,) = self.equations[position].outvars
            after = not through.isdisjoint(variables(self.equations[position].invars))
            long = self.is_long(position)
            if after and long or (after or long) and value in wanted and value in leading:
                found.add(value)
            elif after or long:
                through.add(value)
        return found

    def is_long(self, position: int) -> bool:
        """Returns whether an equation takes long for each element."""
        return self.equations[position].primitive.name in LONG or position in self._calls

    @abstractmethod
    def candidates(self) -> set[Var]:
        """Returns what the forward keeps for the backward alone, and could be computed again."""

    @abstractmethod
    def is_kept(self, value: Var) -> bool:
        """Returns whether the backward has a value in any case, unless it is computed again."""

    @abstractmethod
    def can_compute(self, group: Group) -> bool:
        """Returns whether the backward can compute a group again where it first reads one of its values."""

    def is_worth(self, sources: Set[Var], equations: Set[int]) -> bool:
        """Returns whether to compute a value again, from some large arrays and others, by some equations."""
        return True

    def is_slow(self, value: Var, equations: Set[int]) -> bool:
        """Returns whether it takes longer to compute a value again than to keep it.

        Args:
          value: the value.
          equations: those of its equations that nothing else computes again.
        """
        return False

    # ------------------------------------------------------------------ what is computed again

    def groups(self) -> list[Group]:
        """Returns what is worth computing again, in groups that are computed from the same arrays."""
        again = self.candidates()
        if again:
            again -= compared(self.equations[self.peak + 1 :], self._roundings)
        self._far = self._through_two(again)
        again -= self._far
        for _ in range(_ROUNDS if again else 0):
            groups, left = self._grouped(again)
            left |= {
                v for group in groups if not self.can_compute(group) or self.gain(group) <= 0 for v in group.values
            }
            left.update(base for group in groups for base in group.bases if base in again)  # which is kept for it
            if not left:
                return groups
            again -= left
        return []

    def gain(self, group: Group) -> int:
        """Returns by how many bytes less are kept."""
        stored = sum(size_of(value) for value in group.values if value in self.stored)
        return stored - sum(size_of(base) for base in group.bases if not self.is_kept(base))

    def _grouped(self, again: set[Var]) -> tuple[list[Group], set[Var]]:
        """Returns groups of values, and values that take too long."""
        groups: dict[frozenset[Var], Group] = defaultdict(Group)
        known: dict[frozenset[Var], set[int]] = defaultdict(set)  # equations whose results are there for the next value
        slow: set[Var] = set()
        passed = self._passed(again)
        for value in sorted(again, key=self.defined.__getitem__):
            bases, equations = self._chain(value, passed)
            large = frozenset(base for base in bases if is_large_beside(base, size_of(value)))
            if len(equations) <= _LONGEST and self.is_worth(large, equations):
                if self.is_slow(value, equations - known[large]):
                    slow.add(value)
                else:
                    group = groups[large]
                    group.values.append(value)
                    group.bases.update(bases)
                    group.equations |= equations
                known[large] |= equations
        for group in groups.values():
            group.late = sorted({i for value in group.values for i in self.readers[value] if i > self.peak})
        return list(groups.values()), slow

    def _passed(self, again: set[Var]) -> set[Var]:
        """Returns the values that are not kept, but computed from others, where these are not larger together."""
        sources: dict[Var, frozenset[Var]] = {}  # what would be kept for a value
        passed: set[Var] = set()
        for equation in self.equations[: self.peak + 1]:
            for value in equation.outvars:
                kept = value not in again and self.is_kept(value)
                sources[value] = frozenset() if kept else frozenset([value])
                if kept or not self.can_repeat(value):
                    continue
                found = frozenset[Var]().union(*(sources.get(o, ()) for o in variables(equation.invars)))
                size, sizes = size_of(value), [*map(size_of, found)]
                large = sum(is_large_beside(one, size) for one in found)
                if large < 2 and len(found) <= _SOURCES and sum(sizes) <= size + size // _SMALL:
                    passed.add(value)
                    sources[value] = found
        return passed

    def _chain(self, value: Var, passed: set[Var]) -> tuple[dict[Var, None], set[int]]:
        """Returns what a value is computed from, and the positions of the equations that do so."""
        bases: dict[Var, None] = {}
        equations: set[int] = set()
        todo = [value]
        while todo and len(equations) <= _LONGEST:
            position = self.defined[todo.pop()]
            if position not in equations:
                equations.add(position)
                for operand in variables(self.equations[position].invars):
                    if operand in passed:
                        todo.append(operand)
                    else:
                        bases[operand] = None
        return bases, equations

    def computed_again(self, group: Group, names: dict[Var, Var]) -> list[JaxprEqn]:
        """Returns the equations of a group with results of their own, which ``names`` is extended by."""
        new = []
        for position in sorted(group.equations):
            equation = self.equations[position]
            (value,) = equation.outvars
            operands = renamed(equation.invars, names)
            names[value] = Var(value.aval)
            new.append(equation.replace(invars=operands, outvars=[names[value]]))
        return new

    def record(self, group: Group, times: int = 1) -> Rematerialised:
        """Returns the report's record of a group that is computed again so many times."""
        return Rematerialised(
            location=jaxprs.location(self.equations[max(group.equations)]),
            arrays=sum(value in self.stored for value in group.values),
            bytes=self.gain(group) * times,
        )
