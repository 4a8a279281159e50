"""Finds where a program tells which experts a token chooses, and what is zero for all others."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax.lax import GatherScatterMode

from autopallas.compat import Dtype
from autopallas.graph import Node, Ref
from autopallas.graph.custom_rules import called_program, is_elementwise_call
from autopallas.graph.labels import Atom, Dimension, View, is_product
from autopallas.numerics.casts import kind_of
from autopallas.patterns.expressions import Scope
from autopallas.patterns.mixture_of_experts.axes import choice_axes, narrow_positions, position_of, positions_along
from autopallas.patterns.mixture_of_experts.intervals import Interval, interval
from autopallas.patterns.mixture_of_experts.quotients import Quotients
from autopallas.patterns.mixture_of_experts.signs import Signs
from autopallas.sites.elementwise import Constant, Input, Instruction, Side

__all__ = ["Choice", "Choices", "folded"]

_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_or", "reduce_and", "reduce_prod"})
_DEPTH = 60
_PLAIN = 3
_SELECTED = frozenset({"select_n", "convert_element_type", "mul"})
_USES = 2000


@dataclass(frozen=True, slots=True)
class Choice:
    """A value that is 1 at a chosen expert and 0 elsewhere, or that holds what was scattered to the chosen experts.

    Attributes:
      number: the number of the value.
      index: the chosen expert, an integer.
      several: labels of ``index`` that the value lacks or that are summed later: a token has as many choices.
      within: the intervals of rows that belong to the experts; rows are the ``index`` until their experts are known.
    """

    number: int
    index: Ref
    several: tuple[Atom, ...]
    within: Interval | None = None


class Choices:
    """Collects all choices among the experts over which a sum runs."""

    def __init__(self, scope: Scope, summed: Sequence[Atom], experts_of: Mapping[int, int] | None = None):
        self.experts_of = experts_of or {}
        """Per number of the intervals' ends, the number of the experts of the rows."""
        self.scope, self.space, self.graph = scope, scope.space, scope.graph
        self.summed = frozenset(summed)
        self.axes = choice_axes(self.graph)
        self.expert: tuple[Atom, ...] = ()
        self.found: list[Choice] = []
        self.others: list[tuple[Atom, ...]] = []
        """Labels along which something else is chosen, such as a place among an expert's tokens."""
        self.narrow: tuple[tuple[Atom, ...], str] | None = None
        """Labels along which a program counts in a type that does not hold all of the numbers, and that type."""
        self.note = ""
        """Reason, to be added to another one, why something is not known to be zero."""
        self._asked: Quotients | None = None
        self.proved: set[int] = set()
        """Values that are scattered into and were shown to be zero."""
        self._at: dict[tuple[int, View], Choice] = {}
        self._off: dict[Hashable, float | None] = {}
        self._named: frozenset[Atom] = self.summed
        """Labels by which choices are told apart."""

    # ------------------------------------------------------------------ finding them

    def search(self, ref: Ref, every: bool = False) -> None:
        """Finds the choices from which a value is computed; ``every`` use of a choice, or only the first."""
        seen: set[Hashable] = set()
        todo: list[tuple[Ref, tuple[Atom, ...]]] = [(ref, ())]
        while todo:
            ref, several = todo.pop()
            ref = self.space.canonical(ref)
            key = self._key(ref)
            node = self.scope.node(ref)
            if node is None or not self._may_choose(ref):
                continue
            # Labels that are summed inside say nothing about experts.
            place = ref.value, tuple(tuple(x for x in atoms if x in self.summed) for _, atoms in key[1])
            if (key if every else place) in seen or len(seen) > _USES:
                continue
            seen.add(key if every else place)
            choice = self._one_hot(ref, node, several) or self._scattered(ref, node, several)
            choice = choice or self._within(ref, node, several)
            if choice is not None:
                self._at[key] = choice
                self.found.append(choice)
            todo += [(operand, (*several, *more)) for operand, more in self._inside(ref, node)]
            if choice is not None and node.name in ("scatter", "scatter-add"):  # what else depends on the choice
                todo.append((Ref(node.inputs[0], ref.view), several))

    def keep_needed(self, ref: Ref) -> None:
        """Forgets choices that are not needed to show that a value is zero, those with the most choices per token
        first."""
        for choice in sorted(self.found, key=lambda c: -self.space.extent(c.several)):
            known = self._at
            self._at = {key: other for key, other in known.items() if other is not choice}
            self._off, self._asked = {}, None
            if self.off(ref) != 0:
                self._at = known
        self._off, self._asked, self.note = {}, None, ""
        self.found = [choice for choice in self.found if any(choice is other for other in self._at.values())]

    def _inside(self, ref: Ref, node: Node) -> list[tuple[Ref, tuple[Atom, ...]]]:
        """Returns the operands of a node, each with the labels that it has and the result lacks."""
        if node.name in _REDUCTIONS:
            operand, dimensions = self.space.reduced(ref)
            return [(operand, self._labels(dimensions))]
        if node.name == "dot_general" and not is_product(node):
            a, b, dimensions = self.space.dot(ref)
            return [(a, self._labels(dimensions)), (b, self._labels(dimensions))]
        return [(operand, ()) for operand in self.space.uses(ref) or []]

    def _labels(self, dimensions: Sequence[Dimension]) -> tuple[Atom, ...]:
        return self.space.resolve([x for _, atoms in dimensions for x in atoms])

    def _key(self, ref: Ref) -> tuple[int, View]:
        return ref.value, self.space.view(ref.view)

    def _may_choose(self, ref: Ref) -> bool:
        """Returns whether a value may differ, along a label that is summed, by something compared with positions or
        scattered.

        Other values need no look.
        """
        bits = self.axes[ref.value]
        return bits != 0 and any(bits >> d & 1 and self._is_summed(atoms) for d, (_, atoms) in enumerate(ref.view))

    def _is_summed(self, atoms: Sequence[Atom]) -> bool:
        return not self.summed.isdisjoint(self.space.resolve(atoms))

    def _one_hot(self, ref: Ref, node: Node, several: tuple[Atom, ...]) -> Choice | None:
        """Reads ``expert == positions``."""
        if node.name != "eq":
            return None
        operands = self.space.operands(ref)
        for positions, index in (operands, operands[::-1]) if operands else ():
            counted = positions_along(self.scope, positions)
            if counted is None and self.narrow is None:
                self.narrow = narrow_positions(self.scope, positions)
            if counted is None or kind_of(self.graph.dtype(index.value)) not in "iu":
                continue
            first, atoms, size = counted
            if first == 0 and self._is_expert(atoms, size, index):
                return self._choice(ref, index, several)
        return None

    def _within(self, ref: Ref, node: Node, several: tuple[Atom, ...]) -> Choice | None:
        """Reads ``(start <= rows) & (rows < end)``."""
        found = interval(self.scope, ref, node)
        if found is None or not self._is_expert(found.expert, self.space.extent(found.expert), found.rows):
            return None
        self.proved |= found.kept
        choice = self._choice(ref, found.rows, several)
        known = self.experts_of.get(found.ends.value)
        if known is not None:
            return replace(choice, index=found.index(self.space, self.graph, known))
        return replace(choice, within=found)

    def _scattered(self, ref: Ref, node: Node, several: tuple[Atom, ...]) -> Choice | None:
        """Reads ``zeros.at[tokens, expert].set(weights)``."""
        if node.name not in ("scatter", "scatter-add"):
            return None
        numbers, space = node.params["dimension_numbers"], self.space
        if numbers.update_window_dims or node.params["mode"] == GatherScatterMode.CLIP:
            return None
        indices = node.inputs[1]
        shape = self.graph.shape(indices)
        view: list[Dimension] = [*space.inside(ref, shape[:-1])]
        fresh = {x for _, atoms in view for x in atoms}
        batching = getattr(numbers, "operand_batching_dims", ())
        for own, theirs in zip(batching, getattr(numbers, "scatter_indices_batching_dims", ()), strict=True):
            view[theirs] = ref.view[own]
        expert: int | None = None
        for part, dimension in enumerate(numbers.scatter_dims_to_operand_dims):
            piece = space.canonical(Ref(indices, (*view, (part, ()))))
            along = position_of(self.scope, piece)
            if along is not None and along in view:
                place = view.index(along)
                if ref.view[dimension][0] or space.extent(ref.view[dimension][1]) != shape[place]:
                    return None  # only some rows are scattered to
                view[place] = ref.view[dimension]
            elif expert is None:
                expert = part
                target = ref.view[dimension], self.graph.shape(ref.value)[dimension]
            else:
                return None
        if expert is None:
            return None
        index = space.canonical(Ref(indices, (*view, (expert, ()))))
        (offset, atoms), size = target
        if offset or not self._is_expert(space.resolve(atoms), size, index):
            return None
        several = (*several, *(x for x in space.resolve(list(fresh)) if x in space.atoms(index)))
        return self._choice(ref, index, several)

    def _is_expert(self, atoms: tuple[Atom, ...], size: int, index: Ref) -> bool:
        """Returns whether labels are those of all experts, and the same as in the choices found before."""
        if not atoms or not set(atoms) <= self.summed or set(atoms) & self.space.atoms(index):
            return False
        if self.space.extent(atoms) != size or (self.expert and self.space.resolve(self.expert) != atoms):
            self.others.append(atoms)
            return False
        self.expert = atoms
        return True

    def _choice(self, ref: Ref, index: Ref, several: tuple[Atom, ...]) -> Choice:
        own = self.space.atoms(index)
        return Choice(ref.value, index, tuple(x for x in self.space.resolve(several) if x in own))

    # ------------------------------------------------------------------ what is zero elsewhere

    def _never_equal(self, ref: Ref, given: Sequence[float | None]) -> bool:
        """Returns whether a known number is compared with positions that do not include it."""
        operands = self.space.operands(ref)
        for positions, number in zip(operands or (), given[::-1], strict=True):
            counted = None if number is None else positions_along(self.scope, positions)
            if number is not None and counted is not None:
                first, atoms, _ = counted
                return not (first <= number < first + self.space.extent(atoms) and number == int(number))
        return False

    def off(self, ref: Ref, depth: int = 0) -> float | None:
        """Evaluates a value where the expert is not chosen; returns None if the result is not a known number."""
        number = self.scope.number(ref)
        if number is not None:
            return number
        ref = self.space.canonical(ref)
        if not self._may_choose(ref):
            return None
        if not self._off:
            self._named = self.summed.union(x for _, view in self._at for _, atoms in view for x in atoms)
        key = self.space.pattern(ref, self._named)
        if key not in self._off:
            self._off[key] = None
            self._off[key] = self._evaluated(ref, depth) if depth <= _DEPTH else None
        return self._off[key]

    def _evaluated(self, ref: Ref, depth: int) -> float | None:
        node = self.scope.node(ref)
        if node is None or node.equation.effects:
            return None
        choice = self._at.get(self._key(ref))
        if choice is not None:
            if node.name in ("eq", "and"):
                return 0.0
            if self.scope.node(Ref(node.inputs[0], ref.view)) is not None:
                self.proved.add(node.inputs[0])
            into = self.space.canonical(Ref(node.inputs[0], ref.view))
            return self.off(into, depth + 1) if self._may_choose(into) else self._plain(into)
        operands = self._inside(ref, node)
        given = [self.off(operand, depth + 1) for operand, _ in operands]
        if not self._left_out(node, [operand for operand, _ in operands], given):
            return None
        if node.name == "eq" and self._never_equal(ref, given):
            return 0.0
        if node.name in _REDUCTIONS:
            keeps = given[0] == 0 or node.name not in ("reduce_sum", "reduce_prod")
            return given[0] if keeps else None
        if node.name == "dot_general" and not is_product(node):
            return 0.0 if _annihilates(given) else None
        program = called_program(node.equation) if is_elementwise_call(node.equation) else None
        if program is not None:

            def load(source: Input) -> float | None:
                if isinstance(source, Constant):
                    return float(source.value)
                return given[source.position] if isinstance(source, Side) else None

            def apply(instruction: Instruction, own: list[float | None]) -> float | None:
                name = instruction.primitive.name
                return None if name == "div" and own[1] is None else folded(name, own, instruction.dtype)

            result: float | None = program.run(load, apply)
            return result
        if node.name in ("add", "add_any", "sub") and given[0] in (math.inf, -math.inf) and given[1] is None:
            # A maximum is finite where one expert at least has a logit that is not masked.
            return given[0] if self._certain() else None
        return folded("mul" if node.name == "dot_general" else node.name, given, self.graph.dtype(ref.value))

    def _plain(self, ref: Ref, depth: int = 0) -> float | None:
        """Evaluates a value that depends on no choice, looking a few operations back; None if it is not a known
        number."""
        number, node = self.scope.number(ref), self.scope.node(ref)
        if number is not None or node is None or depth > _PLAIN:
            return number
        operands = self.space.operands(ref) or []
        given = [self._plain(operand, depth + 1) for operand in operands]
        return folded(node.name, given, self.graph.dtype(ref.value)) if node.name in _SELECTED else None

    def _left_out(self, node: Node, operands: Sequence[Ref], given: Sequence[float | None]) -> bool:
        """Returns whether no quotient makes a product with zero anything but zero."""
        name = self.scope.name(Ref(node.outputs[0], ()))
        if len(given) != 2 or name not in ("div", "mul", "dot_general"):
            return True
        for (zero, own), (other, known) in (
            zip(operands, given, strict=True),
            zip(operands[::-1], given[::-1], strict=True),
        ):
            if own == 0 and known is None:
                if name == "div":
                    kept = other is operands[0] or self._quotients.divides(other.value, zero.value)
                else:
                    kept = self._quotients.multiplies(other.value, zero.value)
                if not kept:
                    self.note = ", since a token without an expert may have the weight 0 / 0"
                    return False
        return True

    @property
    def _quotients(self) -> Quotients:
        if self._asked is None:
            self._asked = Quotients(self.graph, [choice.number for choice in self.found], self._certain)
        return self._asked

    def _certain(self) -> bool:
        """Returns whether every token surely has an expert."""
        signs, size = Signs(self.graph), self.space.extent(self.expert)
        return any(signs.counts_below(choice.index.value, size) for choice in self._at.values())


def _annihilates(given: Sequence[float | None]) -> bool:
    """Returns whether a product is zero, whatever finite numbers the unknown factors are."""
    return 0 in given and all(number is None or math.isfinite(number) for number in given)


def folded(name: str, given: Sequence[float | None], dtype: Dtype) -> float | None:
    """Evaluates an elementwise operation as far as its result is known; None stands for any finite number.

    A number that the result's dtype cannot hold is not known: rounding is left to the program.
    """
    found = _folded(name, given)
    if found is None or kind_of(dtype) == "b":
        return None if found is None else float(bool(found))
    with np.errstate(all="ignore"):
        return found if float(np.asarray(found).astype(dtype)) == found else None


def _folded(name: str, given: Sequence[float | None]) -> float | None:
    given = list(given)
    if name in ("mul", "and") and 0 in given:
        return 0.0 if _annihilates(given) else None
    if name == "div" and given[0] == 0:
        return None if given[1] == 0 else 0.0
    if name == "select_n" and len(given) == 3:
        if given[0] is not None:
            return given[2 if given[0] else 1]
        return given[1] if given[1] == given[2] else None
    if name in _ZERO_AT_MINUS_INFINITY and given == [-math.inf]:  # as of the logits that a router masks
        return 0.0
    if not given or None in given:
        return None
    if name in _KEEPS_ZERO and given[0] == 0:
        return 0.0
    fold = _FOLDS.get(name)
    return None if fold is None else float(fold(*given))


_ZERO_AT_MINUS_INFINITY = frozenset({"exp", "exp2", "logistic"})
_KEEPS_ZERO = frozenset(
    """neg sign abs sqrt square tanh sin sinh tan asin atan asinh atanh erf expm1 log1p cbrt floor ceil round
    convert_element_type reduce_precision stop_gradient copy""".split()
)
_FOLDS: dict[str, Callable[..., float]] = {
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "add_any": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "max": max,
    "min": min,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "or": lambda a, b: int(a) | int(b),
    "xor": lambda a, b: int(a) ^ int(b),
    "convert_element_type": lambda a: a,
    "stop_gradient": lambda a: a,
}
