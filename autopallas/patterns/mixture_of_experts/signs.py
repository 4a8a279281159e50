"""Tells signs of the numbers that a program computes, and whether they are numbers of experts.

Nothing here depends on labels: a statement about a value holds for each of its elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from autopallas import compat
from autopallas.compat import Dtype, Params
from autopallas.graph import Graph
from autopallas.graph.custom_rules import called_program, is_elementwise_call
from autopallas.numerics.casts import counts_exactly, kind_of
from autopallas.sites.elementwise import Constant, Input, Instruction, Side

__all__ = ["Outside", "Signs"]

_DEPTH = 24
_VISITED = 400
"""Most values that are looked at for one site: nearby values tell the signs, and those of other layers do not
matter."""
_LONGEST = 2**16
"""Most elements of a captured array that is looked into."""

_SAME = frozenset(
    """reshape transpose broadcast_in_dim squeeze expand_dims slice split concatenate stack unstack tile copy copy_p
    name optimization_barrier pvary pcast sharding_constraint layout_constraint reshard stop_gradient rev
    dynamic_slice""".split()
)
"""Operations whose results hold only elements of their operands; of the first operand, if the others are positions."""
_OF_MANY = frozenset({"reduce_sum", "reduce_max", "reduce_min", "cumsum", "cummax", "cummin", "sort", "top_k"})
_FIRST_ONLY = frozenset({"dynamic_slice", "sort"})


class _Sign(NamedTuple):
    nonnegative: bool = False
    positive: bool = False


_UNKNOWN, _NONNEGATIVE, _POSITIVE = _Sign(), _Sign(True), _Sign(True, True)
_POSITIVE_FUNCTIONS = frozenset({"exp", "exp2", "logistic", "cosh"})


class Signs:
    """Tells the signs of the values of a graph, in simple cases.

    A value that is called positive may still be zero where an exponential underflows, and may be NaN.
    """

    def __init__(self, graph: Graph):
        self._graph = graph
        self._signs: dict[int, _Sign] = {}

    # ------------------------------------------------------------------ signs

    def nonnegative(self, number: int) -> bool:
        return self._sign(number, 0).nonnegative

    def positive(self, number: int) -> bool:
        return self._sign(number, 0).positive

    def _sign(self, number: int, depth: int) -> _Sign:
        if number not in self._signs:
            self._graph.steps.spend()
            self._signs[number] = _UNKNOWN
            if depth <= _DEPTH and len(self._signs) <= _VISITED:
                self._signs[number] = self._computed(number, depth + 1)
        return self._signs[number]

    def _computed(self, number: int, depth: int) -> _Sign:
        graph = self._graph
        if number in graph.outside:
            outside, place = graph.outside[number]
            return _Sign(outside.ask(place, "nonnegative"), outside.ask(place, "positive"))
        array = self._array(number)
        if array is not None:
            return _Sign(bool(np.all(array >= 0)), bool(np.all(array > 0)))
        node = graph.definitions.get(number)
        dtype = graph.dtype(number)
        least = _NONNEGATIVE if kind_of(dtype) in "bu" else _UNKNOWN
        if node is None:
            return least
        if number in graph.inner:
            return self._sign(graph.inner[number], depth)
        program = called_program(node.equation) if is_elementwise_call(node.equation) else None
        if program is not None:
            given = [self._sign(i, depth) for i in node.inputs]

            def load(source: Input) -> _Sign:
                if isinstance(source, Constant):
                    return _Sign(source.value >= 0, source.value > 0)
                return given[source.position] if isinstance(source, Side) else _UNKNOWN

            def apply(instruction: Instruction, own: list[_Sign]) -> _Sign:
                name, arguments = instruction.primitive.name, instruction.arguments
                skipped = 1 if name == "select_n" else 0
                params = dict(instruction.params)
                return _sign_of(name, own[skipped:], params, arguments[skipped:], [], instruction.dtype)

            found: _Sign = program.run(load, apply)
            return found
        name, inputs = node.name, node.inputs
        if name in ("argmax", "argmin", "iota") or name == "top_k" and number != node.outputs[0]:
            return _NONNEGATIVE
        if name in ("scatter", "scatter-add"):
            into, added = self._sign(inputs[0], depth), self._sign(inputs[2], depth)
            return _Sign(into.nonnegative and added.nonnegative)
        if name in _SAME or name in _OF_MANY:
            if name in _FIRST_ONLY:
                inputs = (inputs[node.outputs.index(number) if name == "sort" else 0],)
            if 0 in (n for i in inputs for n in graph.shape(i)):
                return least
            own = self._signs_of(inputs, depth)
            return _Sign(all(s.nonnegative for s in own) or least.nonnegative, all(s.positive for s in own))
        if name == "sub":
            return _NONNEGATIVE if self._is_rest(*inputs) else least
        if name not in _TOLD:
            return _POSITIVE if name in _POSITIVE_FUNCTIONS else least
        if name == "select_n":
            inputs = inputs[1:]
        own = self._signs_of(inputs, depth, every=name == "max" or len(set(inputs)) == 1)
        sources = [graph.dtype(i) for i in inputs]
        found = _sign_of(name, own, node.params, inputs, sources, dtype)
        if name == "dot_general" and any(0 in graph.shape(i) for i in inputs):
            return least
        return _Sign(found.nonnegative or least.nonnegative, found.positive)

    def _is_rest(self, whole: int, part: int) -> bool:
        """Returns whether a difference is what a part of one leaves, as where ``1 - mask`` keeps other experts."""
        node = self._graph.definitions.get(whole)
        if node is not None and node.name == "broadcast_in_dim":
            whole = node.inputs[0]
        known = self._array(whole)
        return known is not None and bool(np.all(known >= 1)) and self._at_most_one(part)

    def _at_most_one(self, number: int, depth: int = 0) -> bool:
        """Returns whether no element is above one: zeros and ones, and products of these."""
        self._graph.steps.spend()
        array = self._array(number)
        if array is not None:
            return bool(np.all(array <= 1))
        node = self._graph.definitions.get(number)
        if node is None or depth > _DEPTH:
            return False
        inputs = node.inputs
        if node.name == "convert_element_type":
            return kind_of(self._graph.dtype(inputs[0])) == "b" or self._at_most_one(inputs[0], depth + 1)
        if node.name == "mul":
            return all(self.nonnegative(i) and self._at_most_one(i, depth + 1) for i in inputs)
        if node.name in _SAME and node.name not in _FIRST_ONLY:
            return all(self._at_most_one(i, depth + 1) for i in inputs)
        return False

    def _signs_of(self, numbers: Sequence[int], depth: int, every: bool = False) -> list[_Sign]:
        """Returns the signs of some values; unless ``every`` one is needed, stops after the first unknown one."""
        own = [_UNKNOWN] * len(numbers)
        for i, number in enumerate(numbers):
            own[i] = self._sign(number, depth)
            if not own[i].nonnegative and not every:
                break
        return own

    def _array(self, number: int) -> np.ndarray | None:
        """Returns the elements of a literal or a captured array."""
        graph = self._graph
        if number in graph.literals:
            return graph.literals[number]
        constant = graph.constants.get(number)
        if constant is None or compat.is_tracer(constant) or not 0 < np.size(constant) <= _LONGEST:
            return None
        return np.asarray(constant)

    # ------------------------------------------------------------------ numbers of experts

    def counts_below(self, number: int, size: int, depth: int = 0) -> bool:
        """Returns whether every element is one of 0, 1, ..., size - 1."""
        graph = self._graph
        graph.steps.spend()
        if number in graph.outside:
            outside, place = graph.outside[number]
            return bool(outside.ask(place, "counts_below", size))
        array = self._array(number)
        if array is not None:
            return array.dtype.kind in "iub" and bool(np.all((array >= 0) & (array < size)))
        node = graph.definitions.get(number)
        if node is None or depth > _DEPTH or not counts_exactly(graph.dtype(number), size - 1):
            return False
        name, inputs, params = node.name, node.inputs, node.params

        def below(*numbers: int) -> bool:
            return all(self.counts_below(i, size, depth + 1) for i in numbers)

        if name in ("argmax", "argmin"):
            shape = graph.shape(inputs[0])
            return all(shape[int(d)] <= size for d in params["axes"])
        if name == "top_k" and number != node.outputs[0]:
            axis: int = params.get("axis", -1)
            return graph.shape(inputs[0])[axis] <= size
        if name == "iota":
            dimension: int = params["dimension"]
            return graph.shape(number)[dimension] <= size
        if name == "sort":
            return below(inputs[node.outputs.index(number)])
        if name == "convert_element_type":
            return kind_of(graph.dtype(inputs[0])) in "iub" and below(*inputs)
        if name == "dynamic_slice":
            return below(inputs[0])
        if name == "clamp":
            return below(inputs[0], inputs[2])
        if name == "gather":  # a gather out of range may give a number that its operand does not hold
            places = params["dimension_numbers"].start_index_map
            if params["mode"] == GatherScatterMode.FILL_OR_DROP:
                if len(places) != 1 or not self.counts_below(inputs[1], graph.shape(inputs[0])[places[0]], depth + 1):
                    return False
            return below(inputs[0])
        if name in _SAME or name in ("reduce_max", "reduce_min"):
            return below(*inputs)
        if name == "select_n":
            cases = inputs[1:]
            test = graph.definitions.get(inputs[0])
            if test is not None and test.name == "lt" and len(cases) == 2 and self._is_zero(test.inputs[1]):
                if self.nonnegative(test.inputs[0]) or below(
                    test.inputs[0]
                ):  # the case for negative numbers never occurs
                    cases = cases[:1]
            return below(*cases)
        return False

    def _is_zero(self, number: int) -> bool:
        graph = self._graph
        node = graph.definitions.get(number)
        if node is not None and node.name == "broadcast_in_dim":
            number = node.inputs[0]
        return number in graph.literals and not np.any(graph.literals[number])


Answer: TypeAlias = tuple[int, str, tuple[int, ...], bool]
"""A question about an input, and the answer: (place of the input, question, further arguments, answer)."""


class Outside:
    """Answers questions about the inputs of a part of a program, as values of the whole program.

    Attributes:
      answers: the questions and answers so far, in order.
    """

    def __init__(self, graph: Graph, numbers: Sequence[int]):
        self.graph = graph
        self._signs, self._numbers = Signs(graph), numbers
        self.answers: list[Answer] = []

    def ask(self, place: int, question: str, *more: int) -> bool:
        answer: bool = getattr(self._signs, question)(self._numbers[place], *more)
        self.answers.append((place, question, more, answer))
        return answer

    def answers_alike(self, answers: Sequence[Answer]) -> bool:
        """Returns whether the answers to the same questions are the same here."""
        return all(self.ask(place, question, *more) == answer for place, question, more, answer in answers)


def _sign_of(
    name: str, own: Sequence[_Sign], params: Params, inputs: Sequence[object], sources: Sequence[Dtype], dtype: Dtype
) -> _Sign:
    """Returns the sign of an elementwise operation or a contraction.

    ``inputs`` are equal where the operands are the same; for ``select_n`` they are its cases.
    """
    if name in _POSITIVE_FUNCTIONS:
        return _POSITIVE
    if name in ("abs", "square"):
        return _Sign(True, own[0].positive)
    if name == "mul" and inputs[0] == inputs[1]:
        return _Sign(True, own[0].positive)
    if name == "integer_pow":
        return _Sign(params["y"] % 2 == 0 or own[0].nonnegative, own[0].positive)
    if name == "pow":
        return own[0] if own[0].positive else _UNKNOWN
    if name in ("convert_element_type", "reduce_precision"):
        flag = len(sources) == 1 and sources[0].kind == "b"
        kept = own[0].nonnegative and (kind_of(dtype) != "i" or flag)
        return _Sign(kept, own[0].positive and _keeps_small(sources, dtype))
    rule = _RULES.get(name)
    if rule is None or not own:
        return _UNKNOWN
    return rule([s.nonnegative for s in own], [s.positive for s in own])


def _keeps_small(sources: Sequence[Dtype], dtype: Dtype) -> bool:
    """Returns whether a cast turns no nonzero number into zero."""
    if len(sources) != 1:
        return False
    (source,) = sources
    if kind_of(source) in "iub":
        return bool(jnp.issubdtype(dtype, jnp.floating)) or source == dtype
    if not (jnp.issubdtype(source, jnp.floating) and jnp.issubdtype(dtype, jnp.floating)):
        return False
    return bool(jnp.finfo(dtype).minexp <= jnp.finfo(source).minexp)


def _all(nonnegative: Sequence[bool], positive: Sequence[bool]) -> _Sign:
    return _Sign(all(nonnegative), all(positive))


def _sum(nonnegative: Sequence[bool], positive: Sequence[bool]) -> _Sign:
    return _Sign(all(nonnegative), all(nonnegative) and any(positive))


def _largest(nonnegative: Sequence[bool], positive: Sequence[bool]) -> _Sign:
    return _Sign(any(nonnegative), any(positive))


_RULES: dict[str, Callable[[Sequence[bool], Sequence[bool]], _Sign]] = {
    "mul": _all, "dot_general": _all, "div": _all, "min": _all, "select_n": _all, "sqrt": _all, "rsqrt": _all,
    "and": _all, "cbrt": _all, "add": _sum, "add_any": _sum, "max": _largest, "log1p": _all, "expm1": _all,
    "tanh": _all,
}  # fmt: skip
_TOLD = frozenset(_RULES) | {"abs", "square", "integer_pow", "pow", "convert_element_type", "reduce_precision"}
