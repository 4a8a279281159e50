"""Reads a sum over experts: which terms are always zero, and what is computed for the others.

A term is zero where an expert was not chosen. To prove that, the term is evaluated with every comparison "is this
expert the chosen one" taken as false. If the result is zero, whatever all other values are, the term can be left out.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import compat
from autopallas.compat import Dtype, Params, Primitive
from autopallas.graph import Node, Ref
from autopallas.graph.labels import Atom, is_product
from autopallas.kernels.mixture_of_experts.steps import Gathered, Pointwise, Product, Step
from autopallas.patterns.advice import BETWEEN_EXPERTS, CHOOSE_FEW, DIAGONAL, FLOATS, NUMBER_SLOTS, ONE_TOKEN
from autopallas.patterns.expressions import Scope, operation
from autopallas.patterns.grouped_matmul.ragged_dot import precision
from autopallas.patterns.match import Mismatch
from autopallas.patterns.mixture_of_experts.choice import Choice, Choices
from autopallas.patterns.mixture_of_experts.expert_choice import CHOOSE
from autopallas.patterns.mixture_of_experts.reading import Reading
from autopallas.patterns.mixture_of_experts.refusals import DENSE, refuse_hidden, refuse_weight, weights
from autopallas.patterns.mixture_of_experts.slots import DISPATCHED, Slots, Unproved, slots_of
from autopallas.sites.elementwise import Constant, ElementwiseProgram, Instruction, Side, conversion_params, parameters
from autopallas.sites.index_notation import Operand

__all__ = ["SumReader"]

_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_DEPTH = 60
_DEEPEST = 120


class SumReader:
    """Reads a sum over experts whose terms are what each expert computes, times a weight."""

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
        self._shares_tokens = False
        """Whether rows may lack the labels of examples that have experts of their own."""
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
                    if not self.choosing:
                        raise Mismatch(f"{DENSE}, and there is one token alone", advice=ONE_TOKEN)
                    raise Mismatch(f"{DISPATCHED}, in no form that is known", advice=NUMBER_SLOTS)
            if not self._models_share_tokens():
                refuse_hidden(self.scope, self.factors, self.expert, self.tokens)
                return None
        if not any(choices.off(factor) == 0 for factor in self.factors):
            raise Mismatch(
                f"{DENSE}, and it cannot be shown that what is not chosen has no weight{choices.note}",
                advice=CHOOSE_FEW,
            )
        result = self.result
        result.expert = self.space.resolve(choices.expert)
        known: set[Hashable] = set()
        for choice in choices.found:
            several = tuple(x for x in self.space.resolve(choice.several) if x not in self.tokens)
            source = self._operand(choice.index)
            if not set(source.labels) <= self.tokens | set(several):
                raise Mismatch(f"{DENSE}, and the choice of experts has an axis of its own", advice=CHOOSE_FEW)
            shape = self._up_to_names(source, several)
            if shape not in known:
                known.add(shape)
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

    def _up_to_names(self, source: Operand, several: Sequence[Atom]) -> Hashable:
        """Returns what tells a token's choices from others: those that two sums run over, each under labels of its own,
        are the same choices."""
        own = [label for label in source.labels if label in several]
        names = {label: (place, self.space.sizes[label]) for place, label in enumerate(own)}
        view = tuple((start, tuple(names.get(label, label) for label in labels)) for start, labels in source.view)
        return source.position, view, source.fixed, tuple(label for label in several if label not in own)

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
        given = rows | shared if self._shares_tokens else rows
        return not shared or shared <= self.tokens & given - set(inner) and bool(rows & self.rows - shared)

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

    def _models_share_tokens(self) -> bool:
        """Returns whether experts of several models all compute the same tokens, as where ``vmap`` maps parameters
        alone: then each token is one of each model's, since each chooses experts of its own."""
        self._shares_tokens, self._holds = True, {}
        if any(map(self.holds_product, self.factors)):
            return True
        self._shares_tokens, self._holds = False, {}
        return False

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
            experts = [other for other in others if not self._of_exponentials(other)]
            if self.expert and self.tokens and any(map(self.holds_product, experts)):
                refuse_weight(self.scope, gate)

    def _of_exponentials(self, ref: Ref) -> bool:
        """Returns whether a value is a product of exponentials, as of a block of keys, rather than what experts
        compute."""
        contraction = self.space.contraction(self.space.canonical(ref))
        sides = contraction[:2] if contraction else ()
        return any(self.scope.exponential(self.space.canonical(side)) is not None for side in sides)

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
