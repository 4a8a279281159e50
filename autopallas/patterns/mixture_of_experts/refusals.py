"""Gives near-miss reasons for sums over experts that cannot be restricted to the chosen experts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

from autopallas.graph import Graph, Ref
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.graph.labels import Atom
from autopallas.numerics.casts import is_floating
from autopallas.patterns.advice import BETWEEN_EXPERTS, CHOOSE_FEW
from autopallas.patterns.expressions import Scope
from autopallas.patterns.forward import LAYOUT
from autopallas.patterns.match import Mismatch

__all__ = ["DENSE", "refuse_compared", "refuse_hidden", "refuse_weight", "weights"]

DENSE = "every expert computes every token"
_VISITED = 40
_LONGEST = 8
_MASKED = 4
"""Most selections and products between a comparison of weights and the weight that it leaves."""
_COMPARISONS = frozenset({"ge", "gt", "le", "lt", "eq"})
_LARGEST = frozenset({"reduce_max", "top_k", "approx_top_k", "sort"})
_RESTATES = LAYOUT | {"slice", "split", "convert_element_type", "stop_gradient", "copy"}


def refuse_hidden(scope: Scope, factors: Sequence[Ref], expert: frozenset[Atom], tokens: frozenset[Atom]) -> None:
    """Refuses a sum of results of experts that pass through something that is not elementwise."""
    space = scope.space
    seen: set[Hashable] = set()
    todo = [(factor, False) for factor in factors]
    while todo:
        given, through = todo.pop()
        ref = space.canonical(given)
        key, atoms, node = (ref.value, space.view(ref.view)), space.atoms(ref), scope.node(ref)
        if key in seen or node is None or not expert | tokens <= atoms:
            continue
        seen.add(key)
        operands = space.uses(ref)
        sides = space.contraction(ref) if node.name == "dot_general" else None
        own = [side for side in sides[:2] if expert <= space.atoms(side)] if sides is not None else []
        if operands is None and len(own) == 1:  # these are no experts' matrices: the factor alone may come from experts
            todo.append((own[0], True))
            continue
        found = operands is None and atoms - tokens - expert and not node.name.startswith("scatter")
        if found and (not through or len(own) == 2):
            raise Mismatch(f"{DENSE}, and what they compute passes through {node.name}", advice=BETWEEN_EXPERTS)
        todo += [(operand, through) for operand in operands or []]


def weights(scope: Scope, factors: Sequence[Ref]) -> Iterator[tuple[Ref, list[Ref]]]:
    """Yields what may be the weight of an expert in a sum, with what it may weigh."""
    parts = [part for factor in factors for part in _parts(scope, factor)]
    atoms = {part: scope.space.atoms(part) for part in parts}
    for gate in parts:
        yield gate, [other for other in parts if atoms[gate] < atoms[other]]


def _parts(scope: Scope, ref: Ref, depth: int = 0) -> list[Ref]:
    """Returns a factor, and the factors whose product it is; a condition is a factor of what it keeps."""
    ref = scope.space.canonical(ref)
    inner = scope.space.uses(ref) if scope.name(ref) in ("mul", "select_n") and depth < 3 else None
    return [ref, *(part for operand in inner or [] for part in _parts(scope, operand, depth + 1))]


def refuse_weight(scope: Scope, gate: Ref) -> None:
    """Refuses a weight that is zero for no expert, or for an unknown number of experts."""
    made_of = _made_of(scope, gate)
    compared = not made_of.isdisjoint(_COMPARISONS)
    if made_of.isdisjoint({"exp", "logistic"}) and not (compared and made_of & _LARGEST):
        return
    if compared:
        raise _compared()
    raise Mismatch(f"{DENSE}, and each has a weight that is not zero: nothing can be left out", advice=CHOOSE_FEW)


def refuse_compared(graph: Graph, numbers: Iterable[int]) -> None:
    """Refuses experts, written one after the other, whose weights are compared with the largest one or one of a few
    largest."""
    seen: set[int] = set()
    todo = [(number, 0) for number in numbers]
    while todo:
        number, depth = todo.pop()
        number = _whole(graph, number)
        node = graph.definitions.get(number)
        if node is None or number in seen:
            continue
        seen.add(number)
        if node.name in ("select_n", "mul", "div", "convert_element_type") and depth < _MASKED:
            todo += [(operand, depth + 1) for operand in node.inputs]
        if node.name not in _COMPARISONS or not any(is_floating(graph.dtype(i)) for i in node.inputs):
            continue  # numbers of experts are compared too, with 0 where one may count from the end
        sources = (graph.definitions.get(_whole(graph, i)) for i in node.inputs)
        if any(source is not None and source.name in _LARGEST for source in sources):
            raise _compared()


def _compared() -> Mismatch:
    return Mismatch(
        f"{DENSE}, and a comparison of weights decides which count, so that how many is not known", advice=CHOOSE_FEW
    )


def _whole(graph: Graph, number: int) -> int:
    """Returns the value of which a value is a part, or another layout."""
    for _ in range(_LONGEST):
        node = graph.definitions.get(number)
        if node is None or node.name not in _RESTATES:
            break
        number = node.inputs[0]
    return number


def _made_of(scope: Scope, ref: Ref) -> set[str]:
    """Returns the primitives from which a value is computed."""
    names: set[str] = set()
    seen: set[int] = set()
    todo = [ref.value]
    while todo and len(seen) < _VISITED:
        node = scope.graph.definitions.get(todo.pop())
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        names.add(node.name)
        if node.name in ELEMENTWISE or node.name in ("broadcast_in_dim", "reshape", "reduce_sum", "transpose"):
            todo += node.inputs
    return names
