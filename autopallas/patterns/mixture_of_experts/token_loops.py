"""Names mixtures that go through their tokens one after the other, or select among experts in a chain."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set

from autopallas import compat, jaxprs
from autopallas.compat import JaxprLike
from autopallas.graph import Graph, Node
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.graph.equal_loops import loops
from autopallas.graph.flatten import Body
from autopallas.numerics.casts import kind_of
from autopallas.patterns.advice import ALL_TOKENS_AT_ONCE, BOTH_ENDS, NO_BRANCHES
from autopallas.patterns.match import NearMiss

__all__ = ["one_by_one"]

_OP = "grouped_matmul"
_CHOICES = frozenset({"top_k", "approx_top_k", "argmax", "argmin"})
_LAYOUT = frozenset(
    """reshape squeeze expand_dims broadcast_in_dim transpose slice split unstack dynamic_slice gather concatenate
    copy""".split()
)
_FURTHEST = 12
"""Most equations between a product and the array from which its matrix comes."""
_ROUNDS = 3
"""Most loops inside each other through which the numbers of experts are followed."""
_SAID = frozenset({"dot_general", "cond", "select_n"})
"""Operations at which such a loop or chain is recognised."""
_VISITED = 60
"""Most values behind a condition among which a choice of experts is looked for."""
_ANY = frozenset({"reduce_or", "reduce_max", "reduce_sum"})
_FEWEST = 3
"""Fewest alternatives that are taken for experts."""


def one_by_one(graph: Graph, alive: Set[int]) -> Iterator[NearMiss]:
    """Yields a near miss for each loop over tokens that picks their experts, and each chain of selections among
    experts."""
    elements, within = _numbers_in_loops(graph) if any(n.name in _CHOICES for n in graph.nodes) else (set(), set())
    loops_said: set[Body] = set()
    skipped: dict[Body, list[Node]] = {}
    stacks_said: set[int] = set()
    for node in graph.nodes:
        if not node.outputs or node.outputs[0] not in alive:
            continue
        if node.name not in _SAID:
            continue
        stacks = [_picked(graph, n, elements, within) for n in node.inputs] if node.name == "dot_general" else []
        picked = {stack for stack in stacks if stack is not None}
        if picked:
            new = picked.isdisjoint(stacks_said)  # a loop's backward picks the same matrices again
            stacks_said |= picked
            if not new or node.body in loops_said:
                continue
            loops_said.add(node.body)
            reason = "a loop goes through the tokens one by one, and picks the matrices of each token's experts"
            yield NearMiss(_OP, jaxprs.location(node.equation), reason, node.outputs[0], ALL_TOKENS_AT_ONCE)
        elif node.name == "cond" and node.inputs[0] in elements and len(node.params["branches"]) >= _FEWEST:
            reason = "a loop goes through the tokens one by one, and each token's expert is a branch"
            yield NearMiss(_OP, jaxprs.location(node.equation), reason, node.outputs[0], ALL_TOKENS_AT_ONCE)
        elif node.name == "cond" and _skips(graph, node):
            skipped.setdefault(node.body, []).append(node)
        elif node.name == "select_n" and _is_chain(graph, node):
            reason = "the results of experts are selected in a chain, in which each interval of rows has one end alone"
            yield NearMiss(_OP, jaxprs.location(node.equation), reason, node.outputs[0], BOTH_ENDS)
    for branches in skipped.values():
        if len(branches) > 1 and not branches[0].body.transposed:
            reason = "each expert is a branch that is left out where no token chose it"
            yield NearMiss(_OP, jaxprs.location(branches[0].equation), reason, branches[0].outputs[0], NO_BRANCHES)


def _skips(graph: Graph, node: Node) -> bool:
    """Returns whether a branch that has products is left out unless some token chose an expert."""
    held = jaxprs.bodies(node.equation)
    if len(held) != 2 or sum(_multiplies(body) for _, _, body in held) != 1:
        return False
    todo, seen = [node.inputs[0]], set[int]()
    reduced = chosen = False
    while todo and len(seen) < _VISITED:
        number = todo.pop()
        definition = graph.definitions.get(number)
        if definition is None or number in seen:
            continue
        seen.add(number)
        reduced |= definition.name in _ANY
        chosen |= definition.name in _CHOICES
        todo += definition.inputs
    return reduced and chosen


def _multiplies(body: JaxprLike) -> bool:
    """Returns whether a body holds a product of matrices."""
    return any(equation.primitive.name == "dot_general" for equation in jaxprs.every_equation(body))


def _numbers_in_loops(graph: Graph) -> tuple[set[int], set[int]]:
    """Returns integers inside of loops that are elements of what was chosen before the loop, or computed from these,
    and those that are computed from what a step chooses itself for one token."""
    scans = [(inner, *held) for inner, held in graph.holders.items()]
    chosen: set[int] = set()
    found: set[int] = set()
    within: set[int] = set()
    for _ in range(_ROUNDS):
        before = len(chosen)
        for node in graph.nodes:
            if node.name in _CHOICES:
                own = [n for n in node.outputs if _counts(graph, n)]
                chosen.update(own)
                scores = graph.shape(node.inputs[0])
                if loops(node.body) and scores and math.prod(scores) == max(scores):
                    within.update(own)
            elif node.name in _LAYOUT or node.name in ELEMENTWISE:
                for known in (chosen, found, within):
                    if any(n in known for n in node.inputs):
                        known.update(n for n in node.outputs if _counts(graph, n))
        for inner, body, position in scans:
            equation = body.equations[position]
            if equation.primitive.name != "scan":
                continue
            first = sum(compat.scan_parts(equation))
            for atom, element in zip(equation.invars[first:], inner.invars[first:], strict=True):
                if isinstance(atom, compat.Var) and graph.numbers[body].get(atom) in chosen:
                    number = graph.numbers[inner][element]
                    found.add(number)
                    chosen.add(number)
        if len(chosen) == before:
            break
    return found, within


def _counts(graph: Graph, number: int) -> bool:
    return kind_of(graph.dtype(number)) in "iu"


def _picked(graph: Graph, number: int, elements: Set[int], within: Set[int]) -> int | None:
    """Returns the stack from which a matrix is picked by the number of an expert inside of a loop, if one is.

    Where a step chooses the expert itself, all steps pick from one stack, for layers have stacks of their own, and no
    step waits for another.
    """
    node = _source(graph, number, ("gather", "dynamic_slice"))
    if node is None or loops(node.body) == 0 or len(graph.shape(node.inputs[0])) < 3:
        return None
    stack = node.inputs[0]
    if any(n in elements for n in node.inputs[1:]):
        return stack
    own = [n for n in node.inputs[1:] if n in within]
    shared = loops(graph.bodies_with(stack)[0]) < loops(node.body)
    return stack if own and shared and not any(_waits(graph, node.body, n) for n in own) else None


def _waits(graph: Graph, body: Body, number: int) -> bool:
    """Returns whether a step computes a number from what the step before carries to it, as where each token follows
    from the one before; true where that is not known."""
    carried: set[int] = set()
    while (held := graph.holders.get(body)) is not None:
        equation = held[0].equations[held[1]]
        if equation.primitive.name == "scan":
            constants, count = compat.scan_parts(equation)
            inputs = (graph.numbers[body][v] for v in body.invars[constants : constants + count])
            carried.update(n for n in inputs if not _counts(graph, n))
        body = held[0]
    todo, seen = [number], set[int]()
    while todo and len(seen) < _VISITED:
        number = todo.pop()
        if number in carried:
            return True
        if number not in seen and (definition := graph.definitions.get(number)) is not None:
            todo += definition.inputs
        seen.add(number)
    return bool(todo)


def _source(graph: Graph, number: int, names: tuple[str, ...]) -> Node | None:
    """Returns the computation with one of some names from which a value is computed by layout operations and casts."""
    for _ in range(_FURTHEST):
        node = graph.definitions.get(number)
        if node is None or node.name in names:
            return node
        if node.name not in _LAYOUT and node.name != "convert_element_type":
            return None
        number = node.inputs[0]
    return None


def _is_chain(graph: Graph, node: Node) -> bool:
    """Returns whether selections by rows follow each other, among products with matrices of one stack."""
    stacks: list[int] = []
    current: Node | None = node
    users = (user for user in graph.users[node.outputs[0]] if user.name == "select_n")
    if any(node.outputs[0] in user.inputs[1:] and _compares_rows(graph, user.inputs[0]) for user in users):
        return False  # the last one tells
    while current is not None and current.name == "select_n" and len(current.inputs) == 3:
        if len(stacks) > _FURTHEST or not _compares_rows(graph, current.inputs[0]):
            return False
        products = [_stack(graph, n) for n in current.inputs[1:]]
        following = [graph.definitions.get(n) for n in current.inputs[1:]]
        own = [stack for stack in products if stack is not None]
        stacks += own
        current = next((n for n in following if n is not None and n.name == "select_n"), None)
        if not own:
            return False
    return len(stacks) >= _FEWEST and len(set(stacks)) == 1


def _stack(graph: Graph, number: int) -> int | None:
    """Returns the stack from which the matrix of a product is taken, if a value is such a product's result."""
    product = _source(graph, number, ("dot_general",))
    if product is None:
        return None
    for operand in product.inputs:
        for _ in range(_FURTHEST):
            node = graph.definitions.get(operand)
            if node is None or node.name not in _LAYOUT and node.name != "convert_element_type":
                break
            operand = node.inputs[0]
            if node.name in ("slice", "dynamic_slice", "gather") and len(graph.shape(operand)) >= 3:
                return operand
    return None


def _compares_rows(graph: Graph, number: int) -> bool:
    """Returns whether a condition compares row numbers with something."""
    node = _source(graph, number, ("lt", "le", "gt", "ge"))
    if node is None:
        return False
    return any(_source(graph, n, ("iota",)) is not None for n in node.inputs)
