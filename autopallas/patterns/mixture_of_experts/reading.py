"""Reads a sum over experts: which terms are always zero, and what is computed for the others.

A term is zero where an expert was not chosen. To prove that, the term is evaluated with every comparison "is this
expert the chosen one" taken as false. If the result is zero, whatever all other values are, the term can be left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from autopallas import compat
from autopallas.compat import Dtype, Params, Primitive
from autopallas.graph import Graph, Node, Ref
from autopallas.graph.labels import Atom, is_product
from autopallas.kernels.mixture_of_experts.steps import Gathered, Pointwise, Product, Step
from autopallas.patterns.advice import (
    BETWEEN_EXPERTS,
    CHOOSE_FEW,
    DIAGONAL,
    FLOATS,
    NUMBER_SLOTS,
    ONE_NUMBER,
    PICK_ROWS,
)
from autopallas.patterns.expressions import Scope, operation
from autopallas.patterns.grouped_matmul.ragged_dot import precision
from autopallas.patterns.match import Mismatch
from autopallas.patterns.mixture_of_experts.choice import Choice, Choices
from autopallas.patterns.mixture_of_experts.chosen import CHOOSE, refuse_chosen, refuse_slots_read
from autopallas.patterns.mixture_of_experts.intervals import Interval
from autopallas.patterns.mixture_of_experts.picks import GATHERED, PICKED, Picking, SlotPick, pick_at, slots_at
from autopallas.patterns.mixture_of_experts.refusals import DENSE, refuse_hidden, refuse_weight, weights
from autopallas.patterns.mixture_of_experts.signs import Signs
from autopallas.patterns.mixture_of_experts.slots import DISPATCHED, SCATTERED, Slots, Unproved, slots_of
from autopallas.sites.elementwise import Constant, ElementwiseProgram, Instruction, Side, conversion_params, parameters
from autopallas.sites.index_notation import Operand, View

__all__ = ["PickedRows", "Reading", "SlotRows", "read"]

_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_DEPTH = 60
_DEEPEST = 120
_ROUNDS = 16
_WALKED = 500
_NEAR = 32
"""Most values behind a gather of slots among which the products with the experts' matrices are looked for."""
_STOP_GRADIENT = jax.make_jaxpr(lax.stop_gradient)(0.0).eqns[0].primitive


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Rows that are picked from slots, before the values that describe them are computed.

    Attributes:
      pick: the gather.
      expert: labels of experts, among those of its places.
      slot: the other labels of its places.
      leaves: per value that differs between slots and is computed from no product, its view.
    """

    pick: SlotPick
    expert: tuple[Atom, ...]
    slot: tuple[Atom, ...]
    leaves: dict[int, View]


@dataclass(frozen=True, slots=True)
class PickedRows:
    """Numbers of the values that describe rows picked from slots.

    Attributes:
      expert: the expert of each row.
      inside: whether the place of a row exists.
      reached: whether the row is read from a slot.
      other: what is read for rows that are not reached, if there is anything beside slots.
      leaves: per value that differs between slots, the value of each row: axes of rows, then the axes without a place.
    """

    expert: int
    inside: int
    reached: int
    other: int | None
    leaves: Mapping[int, int]


@dataclass(slots=True)
class Reading:
    """A sum over experts that can be computed for the chosen experts alone.

    Attributes:
      scope: the labels that all other attributes refer to.
      result: the sum.
      tokens, expert: labels.
      examples: of the tokens' labels, those of examples that have experts of their own; they come first.
      choices: where the experts of the tokens are, and the further labels of each such array.
      steps: what is computed for each row; arrays are numbered as in ``arrays``.
      arrays: values that the steps read.
      seeds: the comparisons and the products: whatever depends on one belongs to the mixture.
      kept: further values that belong to it, though others may read them too: the zeros that weights are scattered
        into.
      products: the products among the seeds.
      between: the products and how they are read, including one that is the sum itself.
      summed: of the tokens' labels, those of the rows of a token, whose results are added up; they come last.
      within: the intervals of rows whose experts are still to be counted.
      what: what the program does, in words.
      slots: the slots to which tokens are dispatched, if their weights are still to be added up.
      picked: the rows that are picked from slots, if the values that describe them are still to be computed.
    """

    scope: Scope
    result: Ref
    tokens: tuple[Atom, ...] = ()
    expert: tuple[Atom, ...] = ()
    examples: tuple[Atom, ...] = ()
    choices: list[tuple[Operand, tuple[Atom, ...]]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    arrays: list[int] = field(default_factory=list)
    seeds: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    products: set[int] = field(default_factory=set)
    between: dict[int, View] = field(default_factory=dict)
    summed: tuple[Atom, ...] = ()
    within: list[Interval] = field(default_factory=list)
    what: str = DENSE
    slots: Slots | None = None
    picked: SlotRows | None = None


def read(
    graph: Graph,
    root: int,
    weights: int | None = None,
    experts_of: Mapping[int, int] | None = None,
    picked: PickedRows | None = None,
) -> Reading | None:
    """Reads the sum over experts that gives the value ``root``; returns None where the value does not resemble one.

    Where tokens are dispatched to slots, ``weights`` is the number of the combining weights summed over slots. Where an
    expert has an interval of rows, ``experts_of`` maps the number of the intervals' ends to that of the rows' experts.
    Where rows are picked from slots, ``picked`` describes them.

    Raises:
      Mismatch: the value resembles such a sum, and cannot be taken apart.
    """
    if graph.name(root) in ("scatter", "scatter-add"):
        refuse_chosen(graph, root)
        return None
    for reader in (
        _picked(graph, root),
        _in_slots(graph, root, picked),
        _summed(graph, root, weights, experts_of or {}),
    ):
        found = None if reader is None else _settled(reader)
        if found is not None:
            return found
    refuse_slots_read(graph, root)
    return None


def _settled(reader: Callable[[], _Reader]) -> Reading | None:
    """Reads again until no label is refined any more, and returns the last reading."""
    for _ in range(_ROUNDS):
        now = reader()
        space = now.space
        before = space.refinements
        try:
            found = now.read()
            if found is None or space.refinements == before:
                return found
        except Mismatch:
            if space.refinements == before:
                raise
    raise Mismatch(f"{DENSE}, and its axes are cut into parts in more than {_ROUNDS} ways", advice=CHOOSE_FEW)


def _summed(
    graph: Graph, root: int, weights: int | None, experts_of: Mapping[int, int]
) -> Callable[[], _Reader] | None:
    """Prepares a reader of a sum over experts."""
    scope = Scope(graph)
    scope.space = Picking(graph)
    top = scope.space.full(root)
    terms = _terms(scope, top)
    return None if terms is None else lambda: _Reader(scope, top, *terms, weights, experts_of)


def _picked(graph: Graph, root: int) -> Callable[[], _Reader] | None:
    """Prepares a reader of what is computed by experts that are chosen by gathers."""
    scope = Scope(graph)
    scope.space = space = Picking(graph)
    top = space.full(root)
    pick = pick_at(space, top)
    if pick is None:
        return None
    space.choose(pick)
    return lambda: _PickReader(scope, top, space)


def _in_slots(graph: Graph, root: int, picked: PickedRows | None) -> Callable[[], _Reader] | None:
    """Prepares a reader of rows that are picked from what experts compute for slots."""
    scope = Scope(graph)
    scope.space = space = Picking(graph)
    top = space.full(root)
    slots = slots_at(space, top)
    if slots is None or not jnp.issubdtype(graph.dtype(root), jnp.floating):
        return None
    space.choose_slots(slots)
    return lambda: _SlotReader(scope, top, slots, picked)


def _terms(scope: Scope, top: Ref) -> tuple[list[Ref], tuple[Atom, ...]] | None:
    """Returns the factors whose product is summed, and the summed labels."""
    space, graph = scope.space, scope.graph
    node = graph.definitions.get(top.value)
    if node is None or node.name not in ("dot_general", "reduce_sum") or is_product(node):
        return None
    if not jnp.issubdtype(graph.dtype(top.value), jnp.floating):
        return None
    contraction = space.contraction(top)
    if contraction is not None:
        a, b, dimensions = contraction
        return [a, b], tuple(x for _, atoms in dimensions for x in atoms)
    operand, dimensions = space.reduced(top)
    return [operand], tuple(x for _, atoms in dimensions for x in atoms)


class _Reader:
    _farthest = math.inf
    """Most values behind the result at which the products with the experts' matrices may be."""

    def __init__(
        self,
        scope: Scope,
        top: Ref,
        factors: Sequence[Ref],
        summed: Sequence[Atom],
        weights: int | None = None,
        experts_of: Mapping[int, int] | None = None,
    ):
        self.experts_of = experts_of or {}
        self.scope, self.space, self.graph = scope, scope.space, scope.graph
        self.top, self.factors = top, factors
        slots = slots_of(scope, top, factors, summed)
        self.slots = slots if isinstance(slots, Slots) else None
        self.refused = slots if isinstance(slots, Unproved) else None
        self.result = Reading(scope, top)
        self.rows: frozenset[Atom] = frozenset()
        """Labels of the rows of products: tokens, or the slots that they are in."""
        if self.slots is not None:
            summed, self.rows = self.slots.expert, frozenset(self.slots.slot)
            combine = self.slots.combine
            if weights is None:
                self.result.slots = self.slots
            else:
                if self.scope.graph.definitions[weights].inputs[0] != combine.value:
                    raise Mismatch(f"{DISPATCHED}, and slots are read in two ways", advice=NUMBER_SLOTS)
                kept = tuple(d for d in combine.view if not self.rows & set(self.space.resolve(d[1])))
                combine = Ref(weights, kept)
            self.factors = [combine, self.slots.outputs]
        self.summed = self.space.resolve(summed)
        self.expert: frozenset[Atom] = frozenset()
        self.tokens: frozenset[Atom] = frozenset()
        self.choosing: frozenset[Atom] = frozenset()
        self._examples: frozenset[Atom] = frozenset()
        self._known: dict[Hashable, int] = {}
        self._holds: dict[Hashable, bool] = {}
        self._inside = 0

    def read(self) -> Reading | None:
        """Reads the sum; returns None if it is no sum over experts.

        Raises:
          Mismatch: it resembles one, and cannot be taken apart.
        """
        self._refuse_slots()
        choices = Choices(self.scope, self.summed, self.experts_of)
        if self.slots is not None:
            choices.search(self.factors[0], every=True)
            choices.keep_needed(self.factors[0])
        else:
            for factor in self.factors:
                choices.search(factor)
        if not choices.found:
            self._refuse_narrow(choices)
            self._refuse_weighted()
            return None
        self.expert = frozenset(choices.expert)
        if not self._find_tokens(choices.found):
            return None
        if not any(self.holds_product(factor) for factor in self.factors):
            for atoms in (choices.expert, *choices.others):
                if any(self._product_of_slots(factor, frozenset(atoms)) for factor in self.factors):
                    raise Mismatch(f"{DISPATCHED}, in no form that is known", advice=NUMBER_SLOTS)
            refuse_hidden(self.scope, self.factors, self.expert, self.tokens)
            return None
        if not any(choices.off(factor) == 0 for factor in self.factors):
            raise Mismatch(
                f"{DENSE}, and it cannot be shown that what is not chosen has no weight{choices.note}",
                advice=CHOOSE_FEW,
            )
        result = self.result
        result.expert = self.space.resolve(choices.expert)
        for choice in choices.found:
            several = tuple(x for x in self.space.resolve(choice.several) if x not in self.tokens)
            source = self._operand(choice.index)
            if not set(source.labels) <= self.tokens | set(several):
                raise Mismatch(f"{DENSE}, and the choice of experts has an axis of its own", advice=CHOOSE_FEW)
            if (source, several) not in result.choices:
                result.choices.append((source, several))
            result.seeds.add(choice.number)
            if choice.within is not None:
                result.within.append(choice.within)
        result.kept |= choices.proved
        if self.slots is not None:
            result.kept |= self.slots.needed
            dispatched = Choices(self.scope, self.summed, self.experts_of)
            dispatched.search(self.slots.dispatch, every=True)
            result.seeds |= {choice.number for choice in dispatched.found}
        last = self._contribution()
        wanted = {x for _, atoms in self.space.view(self.top.view) for x in atoms}
        slots = self.rows - self.tokens if result.slots is not None else frozenset()  # still to be added up
        if wanted != self.tokens | (set(last) - slots):
            raise Mismatch(f"{DENSE}, and the result has an axis that its terms lack", advice=CHOOSE_FEW)
        return self._finished()

    def _finished(self) -> Reading:
        result = self.result
        result.seeds |= result.products
        result.examples = tuple(x for x in result.tokens if x in self._examples)
        others = tuple(x for x in result.tokens if x not in self._examples and x not in result.summed)
        result.tokens = (*result.examples, *others, *result.summed)
        return result

    # ------------------------------------------------------------------ tokens

    def _find_tokens(self, choices: Sequence[Choice]) -> bool:
        """Finds the labels of tokens: those of the choices, and further ones that the rows of products run over."""
        chosen = {x for choice in choices for x in self.space.atoms(choice.index)}
        own = chosen - {x for choice in choices for x in self.space.resolve(choice.several)}
        return self._add_tokens(own, [x for _, atoms in self.space.view(self.top.view) for x in atoms])

    def _add_tokens(self, own: set[Atom], order: Sequence[Atom]) -> bool:
        """Adds labels of choices, and of the rows of products, to the labels of tokens, if they are in ``order``."""
        if not own <= set(order):
            return False
        self.choosing = frozenset(own)
        for factor in self.factors:
            for rows, matrices, inner in self._contractions(factor):
                # Labels that rows and matrices share are those of examples that have experts of their own.
                shared = matrices & (own | self.rows)
                outer = matrices - inner - self.expert - shared
                if self.expert <= matrices and (not shared or shared <= rows - inner and outer and own - matrices):
                    own |= (rows - inner - self.expert - matrices) & set(order)
        self.tokens = frozenset(own)
        self.rows |= self.tokens
        self.result.tokens = tuple(x for x in order if x in own)
        return bool(own)

    def _contractions(self, ref: Ref) -> Iterator[tuple[frozenset[Atom], frozenset[Atom], frozenset[Atom]]]:
        """Yields (labels of one side, of the other, summed labels) of the contractions from which a value is
        computed."""
        space, todo = self.space, [ref]
        seen: set[Hashable] = set()
        named = self.expert | self.rows | space.atoms(self.top) | frozenset(self.summed)
        contraction = space.contraction(self.top)
        if contraction is not None:
            a, b = (space.atoms(space.canonical(r)) for r in contraction[:2])
            inner = frozenset(space.resolve([x for _, atoms in contraction[2] for x in atoms]))
            # Fresh labels stand for the summed ones, which the result lacks in any case.
            yield a - inner, b | self.expert, frozenset()
            yield b - inner, a | self.expert, frozenset()
        while todo and len(seen) <= self._farthest:
            ref = space.canonical(todo.pop())
            key = space.pattern(ref, named)
            if key in seen or not self._concerns(ref):
                continue
            seen.add(key)
            found = space.contraction(ref)
            if found is not None and self.scope.name(ref) == "dot_general":
                a, b = (space.atoms(space.canonical(r)) for r in found[:2])
                inner = frozenset(space.resolve([x for _, atoms in found[2] for x in atoms]))
                yield a, b, inner
                yield b, a, inner
                todo += found[:2]
            else:
                todo += space.uses(ref) or []

    def _concerns(self, ref: Ref) -> bool:
        """Returns whether a value may be computed from products with a matrix of each expert."""
        return not self.expert.isdisjoint(self.space.atoms(ref))

    # ------------------------------------------------------------------ products

    def _product(self, ref: Ref) -> tuple[Ref, Ref, tuple[Atom, ...], tuple[Atom, ...]] | None:
        """Returns (rows, matrices, inner labels, outer labels) if a value is a product with a matrix of each expert."""
        space = self.space
        contraction = space.contraction(ref)
        if contraction is None or self._dispatched(ref):
            return None
        inner = space.resolve([x for _, atoms in contraction[2] for x in atoms])
        for rows, matrices in (contraction[:2], contraction[1::-1]):
            other, own = (space.atoms(space.canonical(r)) for r in (rows, matrices))
            shared = own & self.rows
            outer = own - set(inner) - self.expert - shared
            if not self.expert <= own or not self._are_examples(shared, other, inner) or not outer or not inner:
                continue
            if set(inner) <= own & other and not other - set(inner) - self.expert - self.rows:
                order = [x for _, atoms in space.view(ref.view) for x in atoms if x in outer]
                return rows, matrices, inner, tuple(order)
        return None

    def _are_examples(self, shared: frozenset[Atom], rows: frozenset[Atom], inner: Sequence[Atom]) -> bool:
        """Returns whether labels that matrices share with the rows they multiply are those of examples."""
        return not shared or shared <= self.tokens & rows - set(inner) and bool(rows & self.rows - shared)

    def holds_product(self, ref: Ref, depth: int = 0) -> bool:
        """Returns whether a value is computed from a product of tokens with a matrix of each expert."""
        ref = self.space.canonical(ref)
        key = self.space.pattern(ref, self.expert | self.rows)
        if key not in self._holds:
            self._holds[key] = False
            if depth <= _DEPTH and self._concerns(ref):
                product = self._product(ref)
                if product is not None:
                    self._holds[key] = bool(self.space.atoms(ref) & self.rows)
                else:
                    operands = self.space.uses(ref) or []
                    self._holds[key] = any(self.holds_product(operand, depth + 1) for operand in operands)
        return self._holds[key]

    def _product_of_slots(self, ref: Ref, expert: frozenset[Atom]) -> bool:
        """Returns whether a value is a product, with a matrix of each expert, of rows that are no tokens of the
        result."""
        ref = self.space.canonical(ref)
        contraction = self.space.contraction(ref)
        if contraction is None or self.space.atoms(ref) & self.choosing:
            return False
        return all(expert <= self.space.atoms(self.space.canonical(side)) for side in contraction[:2])

    def _refuse_slots(self) -> None:
        """Refuses slots about which too little is known, if a choice decides their combining weights."""
        if self.refused is not None:
            choices = Choices(self.scope, self.summed)
            choices.search(self.refused.combine)
            if choices.found:
                raise Mismatch(f"{DISPATCHED}, and {self.refused.reason}", advice=NUMBER_SLOTS)
            tokens = [x for _, atoms in self.space.view(self.top.view) for x in atoms]
            chosen = Choices(self.scope, tokens)
            chosen.search(self.refused.combine)
            own = {x for choice in chosen.found for x in self.space.atoms(choice.index)}
            if own & set(self.space.resolve(self.summed)):
                raise Mismatch(
                    f"{CHOOSE}, by products with one-hot vectors: each computes the rows that it chose and no others, "
                    "so that a grouped matmul has nothing to leave out",
                    advice="Gather each expert's tokens, x[chosen], and add what they give with .at[chosen].add: "
                    "products with one-hot vectors cost more. Each expert computes its own tokens alone either way, "
                    "and no kernel of this library does that better.",
                )

    def _refuse_narrow(self, choices: Choices) -> None:
        """Refuses experts that are counted in a type too narrow for their numbers."""
        if choices.narrow is None:
            return
        atoms, name = choices.narrow
        self.expert = frozenset(atoms) & frozenset(self.summed)
        self.rows = self.tokens = self.space.atoms(self.top)
        self._holds = {}
        if self.expert and any(map(self.holds_product, self.factors)):
            raise Mismatch(
                f"{DENSE}, and their numbers are counted in {name}, which does not hold all of them",
                advice="Compare with jnp.arange of the number of experts in int32, and cast the comparison.",
            )

    def _refuse_weighted(self) -> None:
        """Refuses a sum of experts that all have a weight."""
        for gate, others in weights(self.scope, self.factors):
            atoms = self.space.atoms(gate)
            self.expert = atoms & frozenset(self.summed)
            self.rows = self.tokens = atoms - self.expert
            self._holds = {}
            if self.expert and self.tokens and any(map(self.holds_product, others)):
                refuse_weight(self.scope, gate)

    # ------------------------------------------------------------------ the steps

    def _contribution(self) -> tuple[Atom, ...]:
        """Adds the steps of a row's term of the sum; returns the term's labels."""
        rest = tuple(x for x in self.summed if x not in self.expert)
        if not rest:
            values = [self._row(factor) for factor in self.factors]
            value = values[0]
            dtype = jnp.promote_types(self._dtype(value), jnp.float32)
            if len(values) == 2:
                value = self._pointwise_on(lax.mul_p, compat.multiplication_params(),
                                           tuple(self._cast(v, dtype) for v in values), dtype)  # fmt: skip
            elif value != len(self.result.steps) - 1:  # the term has to be the last step
                value = self._pointwise_on(lax.convert_element_type_p, conversion_params(dtype), (value,), dtype)
            return self._labels(value)
        if len(self.factors) == 2:
            for rows, matrices in (self.factors, self.factors[::-1]):
                own = self.space.atoms(self.space.canonical(matrices))
                shared = own & self.tokens
                outer = own - set(rest) - self.expert - shared
                other = self.space.atoms(self.space.canonical(rows))
                if not self._are_examples(shared, other, rest) or not self.expert | set(rest) <= own or not outer:
                    continue
                order = [x for _, atoms in self.space.view(self.top.view) for x in atoms if x in outer]
                node = self.graph.definitions[self.top.value]
                wide = jnp.promote_types(self.graph.dtype(self.top.value), jnp.float32)
                self.result.between[self.top.value] = self.space.view(self.top.view)
                return self._labels(self._emit(rows, matrices, rest, tuple(order), node, wide))
        raise Mismatch(f"{DENSE}, and the sum over experts is of another form", advice=CHOOSE_FEW)

    def _row(self, ref: Ref) -> int:
        """Returns the step that computes a value of tokens and experts."""
        if self._inside > _DEEPEST:
            raise Mismatch(f"{DENSE}, in more than {_DEEPEST} operations one after the other", advice=CHOOSE_FEW)
        self._inside += 1
        step = self._step_of(ref)
        self._inside -= 1
        return step

    def _step_of(self, ref: Ref) -> int:
        number = self.scope.number(ref)
        if number is not None:
            return self._constant(number, self.graph.dtype(ref.value))
        found = self.space.canonical(ref)
        if self.slots is not None and self._dispatched(found):
            tokens = self.slots.filled(self.scope, found)
            if tokens is None:
                raise Mismatch(f"{DISPATCHED}, and read from others", advice=NUMBER_SLOTS)
            return self._cast(self._row(tokens), self.graph.dtype(found.value))
        key = found.value, self.space.view(found.view)
        if key not in self._known:
            product = self._product(found) if self.holds_product(found) else None
            node = self.scope.node(found)
            if product is not None:
                rows, matrices, inner, outer = product
                assert node is not None
                self.result.between[found.value] = key[1]
                self._known[key] = self._emit(rows, matrices, inner, outer, node, self.graph.dtype(found.value))
            elif self.holds_product(found) or self._is_large(found):
                assert node is not None
                self._known[key] = self._pointwise(found, node)
            else:
                source = self._operand(found)
                known = self.tokens | self.expert
                labels = tuple(x for x in source.labels if x not in known)
                self._known[key] = self._add(Gathered(source, labels))
        return self._known[key]

    def _dispatched(self, ref: Ref) -> bool:
        """Returns whether a value holds the tokens in their slots."""
        return self.slots is not None and ref.value == self.slots.rows.value

    def _made_of_slots(self, value: int) -> bool:
        """Returns whether a value is computed from the tokens in their slots."""
        assert self.slots is not None
        rows, seen, todo = self.slots.rows.value, set(), [value]
        while todo:
            number = todo.pop()
            if number == rows:
                return True
            if number not in seen and number > rows:
                seen.add(number)
                node = self.graph.definitions.get(number)
                todo += node.inputs if node is not None else ()
        return False

    def _is_large(self, ref: Ref) -> bool:
        """Returns whether a value has tokens, experts and features as axes, and is computed elementwise from smaller
        values."""
        atoms = self.space.atoms(ref)
        features = atoms - self.rows - self.expert
        return bool(features and atoms & self.rows and atoms & self.expert and self.space.uses(ref))

    def _pointwise(self, ref: Ref, node: Node) -> int:
        operands = self.space.uses(ref)
        if operands is None or node.equation.effects:
            raise Mismatch(f"{DENSE}, and what they compute passes through {node.name}", advice=BETWEEN_EXPERTS)
        arguments = tuple(self._row(operand) for operand in operands)
        dtype = self.graph.dtype(ref.value)
        if is_product(node):
            cast = tuple(self._cast(argument, dtype) for argument in arguments)
            return self._pointwise_on(lax.mul_p, compat.multiplication_params(), cast, dtype)
        primitive, given = operation(node)
        return self._pointwise_on(primitive, given, arguments, dtype)

    def _cast(self, step: int, dtype: Dtype) -> int:
        if self._dtype(step) == dtype:
            return step
        return self._pointwise_on(lax.convert_element_type_p, conversion_params(dtype), (step,), dtype)

    def _pointwise_on(self, primitive: Primitive, params: Params, arguments: tuple[int, ...], dtype: Dtype) -> int:
        labels = dict.fromkeys(x for argument in arguments for x in self._labels(argument))
        given = parameters(params)
        try:
            hash(given)
        except TypeError:
            raise Mismatch(
                f"{DENSE}, and an equation on it has a parameter that cannot be compared", advice=BETWEEN_EXPERTS
            ) from None
        sides = tuple(Side(i, np.dtype(self._dtype(argument))) for i, argument in enumerate(arguments))
        instruction = Instruction(primitive, given, tuple(range(len(sides))), np.dtype(dtype))
        return self._add(Pointwise(ElementwiseProgram(sides, (instruction,), len(sides)), arguments, tuple(labels)))

    def _emit(
        self, rows: Ref, matrices: Ref, inner: tuple[Atom, ...], outer: tuple[Atom, ...], node: Node, dtype: Dtype
    ) -> int:
        if node.name != "dot_general":
            raise Mismatch(
                f"{DENSE}, in a product that is written as a sum",
                advice="Write the product of tokens and matrices as one: with @ or jnp.einsum.",
            )
        names = {self.graph.dtype(n).name for n in (*node.inputs, *node.outputs)}
        if not names <= _FLOATS:
            raise Mismatch(f"{DENSE}, in {', '.join(sorted(names))}", advice=FLOATS)
        value = self._row(rows)
        if set(self._labels(value)) != set(inner):
            raise Mismatch(f"{DENSE}, and a product has an axis of its own", advice=CHOOSE_FEW)
        self.result.products.add(node.outputs[0])
        self._examples |= self.space.atoms(self.space.canonical(matrices)) & self.tokens
        return self._add(Product(value, self._operand(matrices), inner, outer, np.dtype(dtype), precision(node)))

    def _operand(self, ref: Ref) -> Operand:
        found = self.space.canonical(ref)
        view = self.space.view(found.view)
        atoms = [x for _, own in view for x in own]
        if len(set(atoms)) != len(atoms):
            raise Mismatch(f"{DENSE}, and an operand is read along a diagonal", advice=DIAGONAL)
        if self.slots is not None and self._made_of_slots(found.value):
            raise Mismatch(f"{DISPATCHED}, and what is computed for them is mixed", advice=NUMBER_SLOTS)
        if self.slots is not None and set(atoms) & set(self.space.resolve(self.slots.slot)):
            if self.result.slots is None or not self.space.same(found, self.space.canonical(self.slots.combine)):
                raise Mismatch(f"{DISPATCHED}, and something differs between slots", advice=NUMBER_SLOTS)
        if found.value not in self.result.arrays:
            self.result.arrays.append(found.value)
        return Operand(self.result.arrays.index(found.value), view)

    def _constant(self, value: float, dtype: Dtype) -> int:
        kind = int(value) if dtype.kind in "iu" else bool(value) if dtype.kind == "b" else float(value)
        return self._add(Constant(kind, dtype))

    def _add(self, step: Step) -> int:
        self.result.steps.append(step)
        return len(self.result.steps) - 1

    def _labels(self, step: int) -> tuple[Atom, ...]:
        found = self.result.steps[step]
        return () if isinstance(found, Constant) else found.labels

    def _dtype(self, step: int) -> Dtype:
        found = self.result.steps[step]
        return (
            self.graph.dtype(self.result.arrays[found.source.position]) if isinstance(found, Gathered) else found.dtype
        )


class _PickReader(_Reader):
    """Reads what is computed by experts that are chosen by gathers, one for each row."""

    def __init__(self, scope: Scope, top: Ref, space: Picking):
        assert space.pick is not None
        super().__init__(scope, top, [top], ())
        self.pick, self.picking = space.pick, space
        self.contraction = None if scope.name(top) == "gather" else space.contraction(top)

    def _concerns(self, ref: Ref) -> bool:
        atoms = self.space.atoms(ref)
        # Before the choice nothing is gathered, so only values with a label of experts matter there.
        return (
            not self.expert.isdisjoint(atoms) or ref.value > self.pick.index.value and not self.rows.isdisjoint(atoms)
        )

    def read(self) -> Reading | None:
        space, pick = self.space, self.pick
        self.expert = frozenset(space.resolve(pick.expert))
        index = space.canonical(pick.index)
        own = set(space.atoms(index))
        order = [x for _, atoms in space.view(self.top.view) for x in atoms]
        added: tuple[Atom, ...] = ()
        if self.contraction is not None:
            inner = space.resolve([x for _, atoms in self.contraction[2] for x in atoms])
            added = tuple(x for x in inner if x in own)
        self.rows = frozenset(own)
        if not self._add_tokens(own, [*order, *added]) or set(added) & self._shared():
            return None
        self.result.summed, self.result.expert = added, space.resolve(pick.expert)
        if not (self._sum_of_rows() if added else self.holds_product(self.top)):
            return None
        rows = space.extent(self.result.tokens)
        dense = self.contraction is None
        self.result.what = PICKED if dense else GATHERED
        try:
            if not dense and rows <= space.extent((*pick.expert, *self._shared())):
                return None  # each matrix is read about once
            if not Signs(self.graph).counts_below(index.value, pick.size):
                raise Mismatch(
                    f"{DENSE}, and it is not known that the numbers of experts are in range",
                    advice="Take the numbers from jax.lax.top_k or jnp.argmax over the experts, or clip them to 0 and "
                    "the last one with jnp.clip: a gather takes a number out of range for the last expert, or for NaN, "
                    "and a mixture for no expert.",
                )
            self.result.choices.append((self._operand(index), ()))
            last = self._row_sum() if added else self._contribution()
            if set(order) != (self.tokens | set(last)) - set(added):
                raise Mismatch(f"{DENSE}, and the result has an axis that its terms lack", advice=CHOOSE_FEW)
        except Mismatch as mismatch:
            advice = ONE_NUMBER if not dense and mismatch.advice == CHOOSE_FEW else mismatch.advice
            raise Mismatch(mismatch.reason.replace(DENSE, self.result.what, 1), advice=advice) from None
        self.result.seeds |= self.picking.gathers
        return self._finished()

    def _shared(self) -> frozenset[Atom]:
        """Returns the labels that matrices share with rows."""
        found: frozenset[Atom] = frozenset()
        for side in self.contraction[:2] if self.contraction is not None else ():
            atoms = self.space.atoms(self.space.canonical(side))
            if self.expert <= atoms:
                found |= atoms & self.tokens
        return found

    def _sides(self) -> tuple[Ref, Ref, tuple[Atom, ...], tuple[Atom, ...]] | None:
        """Returns (rows, matrices, inner labels, outer labels) of a product whose rows are added up."""
        assert self.contraction is not None
        space, summed = self.space, set(self.result.summed)
        inner = tuple(x for x in space.resolve([x for _, own in self.contraction[2] for x in own]) if x not in summed)
        for rows, matrices in (self.contraction[:2], self.contraction[1::-1]):
            other, own = (space.atoms(space.canonical(r)) for r in (rows, matrices))
            shared = own & self.rows
            outer = own - set(inner) - self.expert - shared
            if not self.expert <= own or not outer or not inner or not self._are_examples(shared, other, inner):
                continue
            if set(inner) <= own & other and not other - set(inner) - self.rows:
                order = [x for _, atoms in space.view(self.top.view) for x in atoms if x in outer]
                return rows, matrices, inner, tuple(order)
        return None

    def _sum_of_rows(self) -> bool:
        return self._sides() is not None

    def _row_sum(self) -> tuple[Atom, ...]:
        """Adds the steps of rows whose results are then added up; returns the labels of the last step."""
        sides = self._sides()
        assert sides is not None
        node = self.graph.definitions[self.top.value]
        wide = jnp.promote_types(self.graph.dtype(self.top.value), jnp.float32)
        return self._labels(self._emit(*sides, node, wide))


class _SlotReader(_Reader):
    """Reads rows that are picked from what experts compute for their slots.

    What an expert computes for a slot depends on the contents of that slot alone. So the picked row is what the expert
    computes from the contents picked at the same place, whatever they are and whoever shares them.
    """

    _farthest = _NEAR

    def __init__(self, scope: Scope, top: Ref, pick: SlotPick, known: PickedRows | None):
        super().__init__(scope, top, [top], ())
        self.pick, self.known = pick, known
        self.places: tuple[Atom, ...] = ()
        while not self.places or self.places != self._resolved(pick):  # a reshape may cut a place into several
            self.places = self._resolved(pick)
            self.expert = self._experts()
        self.slot = frozenset(self.places) - self.expert
        self.row_labels = self.space.view(pick.rows)
        self.leaves: dict[int, View] = {}
        self.brought = False
        self.result.what = SCATTERED

    def read(self) -> Reading | None:
        space, result = self.space, self.result
        own = {x for _, atoms in self.row_labels for x in atoms}
        self.rows = frozenset(own) | self.slot
        order = [x for _, atoms in space.view(self.top.view) for x in atoms]
        if not self.expert or not self._add_tokens(own, order) or not self.holds_product(self.top):
            return None
        result.expert = tuple(x for x in self.places if x in self.expert)
        graph = self.graph
        indices = graph.definitions[self.top.value].inputs[1] if self.known is None else self.known.expert
        try:
            result.choices.append((self._array(indices, self.row_labels), ()))
            last = self._term()
            if set(order) != self.tokens | set(last):
                raise Mismatch(f"{DENSE}, and the result has an axis that its terms lack", advice=CHOOSE_FEW)
            beside = self._beside()
            if any(map(self._made_of_products, [*result.arrays, *beside])):
                raise Mismatch(f"{SCATTERED}, and what is computed for them is mixed", advice=PICK_ROWS)
        except Mismatch as mismatch:
            if not self.brought or not self._are_matrices():
                return None
            advice = PICK_ROWS if mismatch.advice == CHOOSE_FEW else mismatch.advice
            raise Mismatch(mismatch.reason.replace(DENSE, SCATTERED, 1), advice=advice) from None
        if not self.brought:
            return None
        if self.known is None:
            slot = tuple(x for x in self.places if x in self.slot)
            result.picked = SlotRows(self.pick, result.expert, slot, self.leaves)
        result.seeds.add(self.top.value)
        return self._finished()

    def _resolved(self, pick: SlotPick) -> tuple[Atom, ...]:
        return tuple(x for place in pick.places for x in self.space.resolve(place.labels))

    def _experts(self) -> frozenset[Atom]:
        """Returns the labels of places that matrices have; none where there is no product with such matrices."""
        space, places = self.space, frozenset(self.places)
        seen: set[Hashable] = set()
        todo = [self.top]
        while todo and len(seen) <= _NEAR:
            ref = space.canonical(todo.pop())
            key = space.pattern(ref, places)
            if key in seen or not places <= space.atoms(ref):
                continue
            seen.add(key)
            sides = space.contraction(ref)
            if sides is None:
                todo += space.uses(ref) or []
                continue
            own = [space.atoms(space.canonical(side)) & places for side in sides[:2]]
            for rows, matrices in (own, own[::-1]):
                if rows == places and matrices and matrices < places:
                    return matrices
            todo += sides[:2]
        return frozenset()

    def _term(self) -> tuple[Atom, ...]:
        """Adds the steps of a row; returns its labels."""
        value = self._row(self.top)
        node, dtype = self.graph.definitions[self.top.value], self._dtype(value)
        if self.known is not None and node.params["mode"] != GatherScatterMode.CLIP:
            inside = self._add(Gathered(self._array(self.known.inside, self.row_labels), ()))
            if node.params["mode"] == GatherScatterMode.FILL_OR_DROP:
                fill = node.params["fill_value"]
                other = self._constant(float("nan") if fill is None else float(fill), dtype)
            else:  # a place out of range reads the nearest one, without a derivative
                other = self._pointwise_on(_STOP_GRADIENT, {}, (value,), dtype)
            value = self._pointwise_on(lax.select_n_p, {}, (inside, other, value), dtype)
        if self.known is not None and self.known.other is not None:
            reached = self._add(Gathered(self._array(self.known.reached, self.row_labels), ()))
            source = self._array(self.known.other, self.space.view(self.top.view))
            beside = self._add(Gathered(source, tuple(x for x in source.labels if x not in self.tokens)))
            value = self._pointwise_on(lax.select_n_p, {}, (reached, beside, value), dtype)
        wide = jnp.promote_types(dtype, jnp.float32)
        return self._labels(self._pointwise_on(lax.convert_element_type_p, conversion_params(wide), (value,), wide))

    def _are_matrices(self) -> bool:
        """Returns whether the matrices are not scattered themselves, unlike the keys of padded sequences."""
        graph, seen = self.graph, set[int]()
        todo = [self.result.arrays[s.weights.position] for s in self.result.steps if isinstance(s, Product)]
        while todo and len(seen) < _WALKED:
            number = todo.pop()
            node = graph.definitions.get(number)
            if number in seen or node is None:
                continue
            if node.name in ("scatter", "scatter-add"):
                return False
            seen.add(number)
            graph.steps.spend()
            todo += node.inputs
        return True

    def _made_of_products(self, value: int) -> bool:
        """Returns whether a value is computed from the products of the site."""
        products, seen, todo = self.result.products, set(), [value]
        first = min(products)
        while todo:
            number = todo.pop()
            if number in products:
                return True
            if number not in seen and number > first:
                self.graph.steps.spend()
                seen.add(number)
                node = self.graph.definitions.get(number)
                todo += node.inputs if node is not None else ()
        return False

    def _beside(self) -> Sequence[int]:
        """Returns the numbers of what the gather reads beside slots."""
        if self.pick.beside is None or self.known is not None:
            return ()
        parts = self.graph.definitions[self.graph.definitions[self.top.value].inputs[0]].inputs
        return [part for i, part in enumerate(parts) if i != self.pick.beside]

    def _array(self, number: int, view: View) -> Operand:
        if number not in self.result.arrays:
            self.result.arrays.append(number)
        return Operand(self.result.arrays.index(number), view)

    def _operand(self, ref: Ref) -> Operand:
        found = self.space.canonical(ref)
        if self.slot.isdisjoint(self.space.atoms(found)):
            return super()._operand(found)
        named = self.expert | self.rows
        view = self.space.view(found.view)
        atoms = [x for _, own in view for x in own]
        if len(set(atoms)) != len(atoms):
            raise Mismatch(f"{DENSE}, and an operand is read along a diagonal", advice=DIAGONAL)
        kept = tuple(dimension for dimension in view if named.isdisjoint(dimension[1]))
        if any(not named >= set(own) for _, own in view if not named.isdisjoint(own)):
            raise Mismatch(f"{DENSE}, and places are merged with other axes", advice=CHOOSE_FEW)
        placed = tuple((0, ()) if dimension in kept else dimension for dimension in view)
        before = self.leaves.setdefault(found.value, placed)
        if placed != before:
            raise Mismatch(f"{DENSE}, and slots are read in two ways", advice=CHOOSE_FEW)
        source = found.value
        while self.graph.name(source) == "convert_element_type":
            source = self.graph.definitions[source].inputs[0]
        # In a part of a program, the rows brought to slots may be an input.
        given = source in self.graph.outside
        self.brought = self.brought or given or self.graph.name(source) in ("scatter", "scatter-add", "gather")
        number = found.value if self.known is None else self.known.leaves[found.value]
        return self._array(number, (*self.row_labels, *kept))
