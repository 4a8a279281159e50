"""Finds causal linear attention: products of queries and keys that a triangle masks, times values; or queries times
running sums of outer products of keys and values.

Every spelling ends in a contraction, over keys or over features.  One of its operands is masked products, or running
sums; from there on views tell which axis is which, whatever the layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp

from autopallas import jaxprs
from autopallas.faults import contained
from autopallas.graph import Graph, Node, Ref
from autopallas.graph.edit import surviving
from autopallas.graph.extract import nodes_between
from autopallas.graph.labels import Atom, Dimension
from autopallas.kernels.linear_attention.operation import OPERATION, LinearAttentionSpec, Spelling
from autopallas.numerics.casts import is_floating, keeps_range, rounds, widens
from autopallas.patterns.advice import LINEAR_ROWS, LINEAR_SCORES, LINEAR_STATES
from autopallas.patterns.declared_match import declared_match
from autopallas.patterns.escapes import complete
from autopallas.patterns.expressions import Scope, computed_from
from autopallas.patterns.forward import in_backward
from autopallas.patterns.linear_attention.factors import Factor
from autopallas.patterns.linear_attention.masks import Seen
from autopallas.patterns.linear_attention.steps import Unread
from autopallas.patterns.linear_attention.weights import Weights, read_weights
from autopallas.patterns.match import Match, Mismatch, NearMiss, bounded, describe_reason

__all__ = ["found"]

_DEEPEST = 16
"""Longest chain of elementwise equations that is looked at."""
_MOST = 64
"""Most values that are looked at to find out which factor products lead to."""


class _Unlike(Exception):
    """A contraction does not resemble linear attention."""


class _Parts(NamedTuple):
    """Queries, keys and values as a site reads them, and the labels of features and steps."""

    query: Ref
    key: Ref
    value: Ref
    features: Sequence[Dimension]
    weights: Weights
    spelling: Spelling


def found(graph: Graph, nodes: Sequence[Node]) -> tuple[list[Match], list[NearMiss]]:
    """Finds causal linear attention among the nodes that may give its results, and the near misses."""
    alive = surviving(graph)
    sites: list[tuple[Match, Node]] = []
    misses: list[NearMiss] = []
    for node in nodes:
        if node.outputs[0] not in alive:
            continue
        with contained(node):
            try:
                with bounded(graph):
                    match = _match(graph, node)
                if match is not None:
                    sites.append((match, node))
            except Mismatch as mismatch:
                if in_backward(node):
                    continue  # said of the forward
                location = jaxprs.location(node.equation)
                misses.append(NearMiss(OPERATION.name, location, mismatch.reason, node.outputs[0], mismatch.advice))
    # Quotients hold sums, so they come first. Gradients are sums of the same kind: those that belong to no site with
    # its backward are sites of their own.
    matches: list[Match] = []
    for with_backward in (True, False):
        for quotients in (True, False):
            given = {number for match in matches for number in match.replaced}
            reads = {number: read for match in matches for number, read in match.reads.items()}
            still = surviving(graph, given, reads)
            left = [(match, node) for match, node in sites if (node.name == "div") == quotients]
            left = [(match, node) for match, node in left if not still.isdisjoint(match.results)]
            left = [(match, node) for match, node in left if not (with_backward and in_backward(node))]
            whole, missed = complete(graph, left)
            if with_backward:
                done = {match.results for match in whole}
                whole += complete(graph, _as_shared(graph, [own for own in left if own[0].results not in done]))[0]
            matches += [match for match in whole if match.backwards or not with_backward]
            misses += [] if with_backward or quotients else missed
    return matches, misses


def _match(graph: Graph, node: Node, shared: bool = False) -> Match | None:
    """Returns the site whose result a contraction or a quotient gives, if it is one.

    Args:
      graph: the program.
      node: the contraction or the quotient.
      shared: whether queries, keys and values are read where something else reads them too, and not further back.

    Raises:
      Mismatch: it is none, but resembles one.
    """
    for place in (0, 1):
        with suppress(_Unlike):
            if (match := _Place(graph, node, place, shared).match()) is not None:
                return match
    return None


def _as_shared(graph: Graph, sites: Sequence[tuple[Match, Node]]) -> list[tuple[Match, Node]]:
    """Returns the sites, of which no backward was found, that read other values if they read what is shared.

    Where chunks of a sequence are read both within a chunk and by what goes from chunk to chunk, the program adds up
    the cotangents of chunks, and the site has none of the whole sequence.
    """
    found: list[tuple[Match, Node]] = []
    for match, node in sites:
        with contained(node), suppress(Mismatch), bounded(graph):
            other = _match(graph, node, shared=True)
            if other is not None and other.operands != match.operands:
                found.append((other, node))
    return found


class _Place:
    """A contraction of masked products, or of running sums, with another array."""

    def __init__(self, graph: Graph, node: Node, place: int, shared: bool = False):
        self.graph, self.node, self.scope, self.shared = graph, node, Scope(graph), shared
        self.space = self.scope.space
        self.whole = self.space.full(node.outputs[0])
        self.factor, self.epsilon = 1.0, 0.0
        self.least: float | None = None
        self.magnitudes = False
        self.normalised = False
        sums, divisor = self.whole, None
        if node.name == "div":
            operands = self.space.operands(self.whole)
            if operands is None:
                raise _Unlike
            sums, divisor = operands
        found = self.space.contraction(sums)
        if found is None:
            raise _Unlike
        first, second, self.summed = found
        self.inner, self.other = (first, second) if place == 0 else (second, first)
        if divisor is not None and not self._is_total(divisor, self.space.canonical(self.inner)):
            raise _Unlike

    def match(self) -> Match | None:
        """Returns the match.

        Raises:
          _Unlike: it is none.
          Mismatch: it is none, but resembles one.
        """
        graph, space = self.graph, self.space
        parts = self._parts()
        weights = parts.weights
        given = {"query": parts.query, "key": parts.key, "value": parts.value}
        if weights.decay is not None:
            given["log_decays" if weights.form in ("steps", "sums") else "decay"] = self._source(weights.decay)
        factors = {"query": weights.of_t, "key": weights.of_s}
        given |= {f"{name}_factor": own.ref for name, own in factors.items() if own is not None}
        read_as = {name: self._before_casts(ref) for name, ref in given.items()}
        result = [own for _, own in space.view(self.whole.view)]
        ordered = [atom for own in result for atom in own]
        steps = space.resolve(weights.steps)
        features = [atom for _, own in parts.features for atom in space.resolve(own)]
        read = {name: space.atoms(ref) for name, ref in read_as.items()}
        shared = frozenset[Atom]().union(*(own for name, own in read.items() if name != "value"))
        columns = [a for a in ordered if a in read["value"] and a not in shared | {*steps}]
        batch = [a for a in ordered if a not in columns and a not in steps]
        allowed = {"query": {*batch, *steps, *features}, "key": {*batch, *steps, *features}, "decay": {*batch}}
        allowed |= {"value": {*batch, *steps, *columns}}
        allowed |= {name: {*batch, *steps} for name in ("log_decays", "query_factor", "key_factor")}
        if any(not own <= allowed[name] for name, own in read.items()):
            raise _Unlike
        if not {*features} <= read["query"] & read["key"]:
            raise _Unlike
        if not {*steps} <= {*ordered}:
            raise _Unlike
        if not features or not columns or not steps:
            raise _Unlike
        dtypes = {f"{name}_dtype": graph.dtype(ref.value) for name, ref in read_as.items()}
        result_dtype = graph.dtype(self.node.outputs[0])
        if not all(is_floating(x) for x in (dtypes["query_dtype"], dtypes["key_dtype"], dtypes["value_dtype"])):
            raise _Unlike
        if not is_floating(result_dtype):
            raise _Unlike
        if weights.rounding > jnp.finfo(result_dtype).eps:
            raise Mismatch("decays are captured in a narrower type than the result's", advice=LINEAR_SCORES)
        strict = weights.seen.strict
        if strict is None:
            raise Mismatch(
                f"each step sees the steps up to {abs(weights.seen.offset)} steps away from it", advice=LINEAR_SCORES
            )
        form = LinearAttentionSpec(
            0, 0, 0, 0, **dtypes, result_dtype=result_dtype, factor=self.factor * weights.factor,
            reverse=weights.seen.reverse, strict=strict, normalised=self.normalised, epsilon=self.epsilon,
            magnitudes=self.magnitudes, least=self.least,
            spelling=parts.spelling, decay_form=weights.form, rate=weights.rate,
            divided=tuple(name for name, own in factors.items() if own is not None and own.divides),
            shared=weights.form is not None and not {*batch} <= read["query"] | read["key"],
        )  # fmt: skip
        operands = {name: Ref(ref.value, space.view(ref.view)) for name, ref in read_as.items()}
        letters = {"B": batch, "T": list(steps), "N": features, "P": columns}
        values = [ref.value for ref in operands.values()]
        _, known = nodes_between(graph, values, [self.node.outputs[0]])
        if known:  # whose elements were read: masks, positions and numbers
            if len(known) != 1 or known[0] not in graph.constants:
                raise Mismatch("masks, positions and numbers are several captured arrays", advice=LINEAR_SCORES)
            operands["captured"] = Ref(known[0], tuple((0, ()) for _ in graph.shape(known[0])))
            form = replace(form, captured_dtype=graph.dtype(known[0]))
        return declared_match(graph, OPERATION.name, form, self.node, operands, letters, result, space.sizes)

    def _before_casts(self, ref: Ref) -> Ref:
        """Returns an operand before casts to wider types: the kernel casts it itself."""
        for _ in range(_DEEPEST):
            operands = self.space.operands(ref) if self.scope.name(ref) == "convert_element_type" else None
            if operands is None:
                break
            if not widens(*(self.graph.dtype(x.value) for x in (operands[0], ref))):
                break
            ref = operands[0]
        return ref

    def _parts(self) -> _Parts:
        """Returns the parts, whichever of both spellings it is."""
        at = self.inner
        factors: list[Factor] = []
        for _ in range(_DEEPEST):
            at = self.space.canonical(at)
            name = self.scope.name(at)
            if name == "cumsum" and not factors:
                return self._of_states(at)
            products = self.space.contraction(at) if factors else None
            if products is not None:
                return self._of_scores(products, factors, at.value)
            operands = self.space.operands(at) if name in _PEELED else None
            if operands is None:
                raise _Unlike
            if name == "convert_element_type":
                at = self._cast(at)
            elif name == "select_n":
                at = self._selected(operands, factors)
            elif (further := self._scaled(operands, name)) is not None:
                at = further
            elif name == "div":
                at = self.space.canonical(operands[0])
                first = not factors and self.factor == 1 and not self.normalised
                if not first or not self._is_total(operands[1], at):
                    factors.append(Factor(operands[1], divides=True))
            elif name == "mul":
                at = self._multiplied(operands, factors)
            else:
                raise _Unlike
        raise _Unlike

    # ------------------------------------------------------------------ elementwise equations around masked products

    def _scaled(self, operands: Sequence[Ref], name: str | None) -> Ref | None:
        """Returns what is multiplied by a known number, which is noted; None if nothing is."""
        if name == "neg":
            self.factor *= -1
            return operands[0]
        for x, other in (operands, operands[::-1]) if name == "mul" else (operands,):
            number = self.scope.number(other)
            if number is not None and math.isfinite(number) and number != 0:
                self.factor = self.factor * number if name == "mul" else self.factor / number
                return x
        return None

    def _is_total(self, ref: Ref, scores: Ref) -> bool:
        """Notes that something is divided by the sum of scores over the steps, and a number, or by its magnitude, or by
        a number where that is less; returns whether it is."""
        space, epsilon, absolute = self.space, 0.0, False
        least: float | None = None
        ref = space.canonical(ref)
        for _ in range(_DEEPEST):
            name, operands = self.scope.name(ref), space.operands(ref)
            if operands is None or name not in ("add", "max", "abs", "convert_element_type"):
                break
            if name == "convert_element_type":
                ref = space.canonical(self._cast(ref))
                continue
            if epsilon or (absolute and name != "add"):
                return False
            if name == "abs":
                absolute, ref = True, space.canonical(operands[0])
                continue
            numbers = [self.scope.number(x) for x in operands]
            place = next((i for i, n in enumerate(numbers) if n is not None and math.isfinite(n)), None)
            if place is None or (name == "max" and least is not None):
                return False
            if name == "max":
                least = float(numbers[place] or 0)
            else:
                epsilon = float(numbers[place] or 0)
            ref = space.canonical(operands[1 - place])
        if self.scope.name(ref) != "reduce_sum":
            return False
        summed, dimensions = space.reduced(ref)
        summed = space.canonical(summed)
        while summed.value != scores.value and self.scope.name(summed) == "convert_element_type":
            summed = space.canonical(self._cast(summed))
        inner, keys = ([a for _, own in d for a in space.resolve(own)] for d in (dimensions, self.summed))
        if [space.sizes[a] for a in inner] != [space.sizes[a] for a in keys] or {*inner} & space.atoms(scores):
            return False
        if not space.same(self._renamed(summed, dict(zip(inner, keys, strict=True))), scores):
            return False
        self.normalised, self.epsilon = True, epsilon
        self.magnitudes, self.least = absolute, least
        return True

    def _cast(self, ref: Ref) -> Ref:
        """Returns what is cast from another floating type; neither may be quantised, nor make a number infinite."""
        (operand,) = self.space.operands(ref) or (None,)
        source, target = (None if x is None else self.graph.dtype(x.value) for x in (operand, ref))
        if operand is None or not (rounds(source, target) and keeps_range(source, target)):
            raise _Unlike
        return operand

    def _selected(self, operands: Sequence[Ref], factors: list[Factor]) -> Ref:
        """Returns what a selection masks with zeros, and notes the mask."""
        if len(operands) == 3:
            for kept, filled in ((2, 1), (1, 2)):
                if self.scope.number(operands[filled]) == 0:
                    factors.append(Factor(operands[0], kept == 2))
                    return operands[kept]
        raise _Unlike

    def _multiplied(self, operands: Sequence[Ref], factors: list[Factor]) -> Ref:
        """Returns what leads to products of queries and keys, and notes by what that is multiplied."""
        for x, other in (operands, operands[::-1]):
            if self._leads_to_products(x):
                factors.append(Factor(other))
                return x
        raise _Unlike

    def _leads_to_products(self, ref: Ref) -> bool:
        """Returns whether a value is a contraction, but for elementwise equations that are followed."""
        todo = [ref]
        for _ in range(_MOST):
            if not todo:
                return False
            at = self.space.canonical(todo.pop())
            if self.space.contraction(at) is not None:
                return True
            if self.scope.name(at) in _PEELED:
                todo += self.space.operands(at) or ()
        return False

    # ------------------------------------------------------------------ the two spellings

    def _of_scores(self, products: tuple[Ref, Ref, list[Dimension]], factors: Sequence[Factor], number: int) -> _Parts:
        """Returns the parts of masked products, whose number is given, that are multiplied by values."""
        space = self.space
        first, second, features = products
        first, second, value = (self._source(x) for x in (first, second, self.other))
        keys = tuple(a for _, own in self.summed for a in space.resolve(own))
        if not {*keys} <= space.atoms(value):
            raise _Unlike
        known = {number: True}
        of_scores = [f for f in factors if computed_from(self.graph, f.ref.value, known, number)]
        try:
            weights = read_weights(self.scope, [f for f in factors if f not in of_scores], keys)
        except Unread as unread:
            if not unread.reason:
                raise _Unlike from None
            raise Mismatch(
                "the products of queries and keys are multiplied by something else than numbers, decays between steps "
                f"and one causal mask: {unread.reason}",
                advice=LINEAR_SCORES,
            ) from None
        steps = space.resolve(weights.steps)
        keys = space.resolve(keys)
        key, query = (first, second) if {*keys} <= space.atoms(first) else (second, first)
        if [space.sizes[a] for a in keys] != [space.sizes[a] for a in steps]:
            raise _Unlike
        if not {*keys} <= space.atoms(key) & space.atoms(value) or {*keys} & space.atoms(query):
            raise _Unlike
        if {*steps} & (space.atoms(key) | space.atoms(value)):
            raise _Unlike
        if of_scores:
            reason = "the products of queries and keys are divided or multiplied by what is computed from all of a row"
            raise Mismatch(describe_reason(self.graph, reason, of_scores[0].ref.value), advice=LINEAR_ROWS)
        names = dict(zip(keys, steps, strict=True))
        key, value = (self._renamed(x, names) for x in (key, value))
        if weights.of_s is not None:
            own = weights.of_s._replace(ref=self._renamed(weights.of_s.ref, names))
            weights = weights._replace(of_s=own)
        return _Parts(query, key, value, features, weights, "scores")

    def _source(self, ref: Ref) -> Ref:
        """Returns an operand before changes of layout, or before those that follow what the forward shares."""
        source = self.space.canonical(ref)
        uses = [use for use in (ref, *self.space.met(source)) if use != source] if self.shared else []
        for use in uses:
            for found in self.space.chain(use):
                users = self.graph.users.get(found.value, ())
                if len(users) > 1 and sum(not in_backward(user) for user in users) > 1:
                    return found
        return source

    def _renamed(self, ref: Ref, names: dict[Atom, Atom]) -> Ref:
        view = ((start, tuple(names.get(a, a) for a in own)) for start, own in self.space.view(ref.view))
        return Ref(ref.value, tuple(view))

    def _of_states(self, sums: Ref) -> _Parts:
        """Returns the parts of queries that are multiplied by running sums of outer products."""
        space, node = self.space, self.graph.definitions[sums.value]
        axis = int(node.params["axis"])
        start, steps = sums.view[axis]
        if start or space.extent(steps) != self.graph.shape(sums.value)[axis]:
            raise _Unlike
        features = {a for _, own in self.summed for a in space.resolve(own)}
        if features & {*space.resolve(steps)}:
            raise _Unlike
        key, value = self._factors(Ref(node.inputs[0], sums.view))
        if not features & space.atoms(key):
            key, value = value, key
        if features & space.atoms(value):
            raise _Unlike
        weights = Weights(Seen(bool(node.params["reverse"]), 0), space.resolve(steps))
        return _Parts(space.canonical(self.other), key, value, self.summed, weights, "states")

    def _factors(self, added: Ref) -> tuple[Ref, Ref]:
        """Returns the two arrays whose outer product is summed."""
        space = self.space
        for _ in range(_DEEPEST):
            added = space.canonical(added)
            name = self.scope.name(added)
            operands = space.operands(added) if name in ("mul", "div", "neg", "convert_element_type") else None
            if operands is None:
                break
            if name == "convert_element_type":
                added = self._cast(added)
            elif (scaled := self._scaled(operands, name)) is not None:
                added = scaled
            elif name == "mul":
                whole = space.atoms(added)
                first, second = (space.canonical(x) for x in operands)
                if whole not in (space.atoms(first), space.atoms(second)):
                    return first, second
                wide = first if space.atoms(first) == whole else second
                if self.scope.name(wide) == "mul" and whole not in map(space.atoms, space.operands(wide) or ()):
                    raise Mismatch(
                        "the outer products of keys and values are multiplied by a third array", advice=LINEAR_STATES
                    )
                break
            else:
                break
        raise _Unlike


_PEELED = frozenset({"convert_element_type", "select_n", "mul", "div", "neg"})
