"""Refuses experts that compute the rows gathered for them, and add their results to the tokens by a scatter, or by
products with one-hot vectors.

Each expert then computes its own rows and no others: a product with a batch of experts, [G, C, K] x [G, K, N], is all
that there is to compute, and a grouped matmul would leave out nothing. So this is no site, and a near miss says so.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from autopallas.graph import Graph, Node, Ref
from autopallas.graph.labels import Atom
from autopallas.patterns.advice import PICK_ROWS, SORT_TOKENS
from autopallas.patterns.expressions import Scope
from autopallas.patterns.match import Mismatch
from autopallas.patterns.mixture_of_experts.axes import counted_from_zero, position_of, positions_along
from autopallas.patterns.mixture_of_experts.picks import Picking
from autopallas.patterns.mixture_of_experts.slots import SCATTERED

__all__ = ["CHOOSE", "refuse_chosen", "refuse_put_back", "refuse_slots_read"]

CHOOSE = "experts choose their tokens"
_WALKED = 300
_MADE_OF = 60
_INDICES = frozenset(
    """reshape transpose broadcast_in_dim squeeze expand_dims slice concatenate select_n add lt convert_element_type
    copy""".split()
)
_READ_AS = _INDICES | {
    "copy_p", "name", "sharding_constraint", "optimization_barrier", "pvary", "pcast", "layout_constraint", "reshard",
    "split", "tile", "stack", "unstack", "reduce_precision",
}  # fmt: skip
"""Operations between an index and the gather that reads rows by it."""
_FACTORS = frozenset("mul div and select_n convert_element_type neg".split())
"""Operations that leave a one-hot vector zero where it is zero.  Sums are none: a walk through them would see all the
layers before, by what they add to a residual stream."""


def refuse_chosen(graph: Graph, number: int) -> None:
    """Refuses a sum, by a scatter, of what experts compute for rows that are gathered by the same indices."""
    scope = Scope(graph)
    scope.space = Picking(graph)
    kinds = [kind for node in _chain(graph, number) if (kind := _Chosen(scope, scope.space, node).kind())]
    if not kinds:
        return
    if kinds[0] == "one" and len(kinds) > 1:
        raise Mismatch(
            "the tokens of each expert are gathered, as many as there is room for, and what it computes for them is "
            "added by a scatter: rows without a token are computed too",
            advice=SORT_TOKENS,
        )
    _refuse(kinds[0], "a scatter", "a scatter adds them up")


def _refuse(kind: str, by: str, adds_up: str) -> None:
    """Refuses rows that experts chose, or that are gathered for their slots."""
    if kind == "chosen":
        raise Mismatch(
            f"{CHOOSE}, by gathers and {by}: each computes the rows that it chose and no others, so that a "
            "grouped matmul has nothing to leave out",
            advice="Nothing has to be changed: products with a batch of experts, as they are written, are all that "
            "there is to compute.",
        )
    if kind == "slots":
        raise Mismatch(
            f"experts compute the rows that are gathered for their slots, and {adds_up}: which slots are "
            "empty is not known, and nothing else could be left out",
            advice=SORT_TOKENS,
        )


def refuse_put_back(graph: Graph, root: int) -> None:
    """Refuses a product with one-hot vectors that adds up what experts compute for rows gathered by the same
    indices."""
    scope = Scope(graph)
    scope.space = space = Picking(graph)
    contraction = space.contraction(space.full(root)) if graph.name(root) in ("dot_general", "reduce_sum") else None
    if contraction is None:
        return
    summed = frozenset(space.resolve([x for _, atoms in contraction[2] for x in atoms]))
    for weights, outputs in (contraction[:2], contraction[1::-1]):
        if not summed < space.atoms(space.canonical(weights)):
            continue
        for index in _one_hot(scope, weights, summed):
            gathered, expert = _walk(scope, space, outputs, index)
            if gathered and expert is not None and expert & summed:
                kind = "chosen" if _is_chosen(graph, index.value) else "slots"
                _refuse(kind, "products with one-hot vectors", "a product with one-hot vectors adds them up")


def _one_hot(scope: Scope, ref: Ref, summed: frozenset[Atom]) -> Iterator[Ref]:
    """Yields the indices that are compared, in a factor of a value, with positions along an axis that is not summed."""
    space, seen, todo = scope.space, set[Hashable](), [ref]
    while todo and len(seen) <= _WALKED:
        found = space.canonical(todo.pop())
        key = found.value, space.view(found.view)
        if key in seen or scope.node(found) is None:
            continue
        seen.add(key)
        name = scope.name(found)
        operands = space.operands(found) if name == "eq" else None
        for positions, index in (operands, operands[::-1]) if operands else ():
            along = positions_along(scope, positions)
            if along is not None and not summed & set(along[1]) and space.atoms(index) & summed:
                yield space.canonical(index)
        if name in _FACTORS:
            todo += space.uses(found) or []


def _chain(graph: Graph, number: int) -> list[Node]:
    """Returns the scatters each of which adds to the result of the one before, the last one first."""
    found: list[Node] = []
    while len(found) < 2:
        node = graph.definitions.get(number)
        if node is None or node.name not in ("scatter", "scatter-add"):
            break
        found.append(node)
        number = node.inputs[0]
    return found


class _Chosen:
    """Reads one scatter of what may be computed by experts."""

    def __init__(self, scope: Scope, space: Picking, node: Node):
        self.scope, self.space, self.graph, self.node = scope, space, scope.graph, node

    def kind(self) -> str | None:
        """Returns "chosen" or "slots", "one" for a single expert, or None for anything else."""
        space, numbers = self.space, self.node.params["dimension_numbers"]
        if not numbers.update_window_dims:
            return None
        updates = space.full(self.node.inputs[2])
        batch = [dimension for d, dimension in enumerate(updates.view) if d not in numbers.update_window_dims]
        own = {x for d in numbers.scatter_indices_batching_dims for x in space.resolve(batch[d][1])}
        index: Ref | None = None
        for part in range(len(numbers.scatter_dims_to_operand_dims)):
            piece = space.canonical(Ref(self.node.inputs[1], (*batch, (part, ()))))
            along = position_of(self.scope, piece)
            if along is not None:
                own |= set(space.resolve(along[1]))
            elif index is None:
                index = piece
            else:
                return None
        if index is None:
            return None
        gathered, expert = _walk(self.scope, space, updates, index)
        summed = space.atoms(index) - own
        if not gathered or expert is None:
            return None
        if expert & summed:
            return "chosen" if _is_chosen(self.graph, index.value) else "slots"
        return "one" if not expert - own and summed else None


def _walk(scope: Scope, space: Picking, updates: Ref, index: Ref) -> tuple[bool, frozenset[Atom] | None]:
    """Returns whether rows are gathered by these indices, and the labels that they share with matrices (None
    without matrices)."""
    labels = space.atoms(index)
    wanted = counted_from_zero(scope, index)
    if not _is_gathered_by(scope.graph, wanted.value):
        return False, None
    seen: set[Hashable] = set()
    todo, gathered = [updates], False
    expert: frozenset[Atom] | None = None
    while todo and len(seen) <= _WALKED:
        ref = space.canonical(todo.pop())
        key = space.pattern(ref, labels)
        node = scope.node(ref)
        if key in seen or node is None or not labels <= space.atoms(ref):
            continue
        seen.add(key)
        if node.name == "gather":
            found = space.gathered(ref, node)
            own_indices = [counted_from_zero(scope, i) for i, _, _ in found[1]] if found is not None else []
            gathered = gathered or own_indices == [wanted]
            continue
        sides = space.contraction(ref)
        if sides is None:
            todo += space.uses(ref) or []
            continue
        own = [space.atoms(space.canonical(side)) & labels for side in sides[:2]]
        for rows, matrices in (own, own[::-1]):
            if rows == labels and matrices < labels:
                expert = matrices if expert is None else expert & matrices
        todo += sides[:2]
    return gathered, expert


def _is_gathered_by(graph: Graph, number: int) -> bool:
    """Returns whether a gather reads places that an index tells, or the index has more users than are looked at."""
    seen, todo, looks = {number}, [number], 0
    while todo:
        value = todo.pop()
        for user in graph.users[value]:
            looks += 1
            graph.steps.spend()
            if user.name == "gather" and value == user.inputs[1] or looks > _MADE_OF:
                return True
            if user.name in _READ_AS:
                todo += [output for output in user.outputs if output not in seen]
                seen.update(user.outputs)
    return False


def _is_chosen(graph: Graph, number: int) -> bool:
    """Returns whether numbers of tokens are the positions of the largest elements, or the first in an order."""
    seen, todo = set[int](), [number]
    while todo and len(seen) < _MADE_OF:
        value = todo.pop()
        node = graph.definitions.get(value)
        if node is None or value in seen:
            continue
        seen.add(value)
        graph.steps.spend()
        if node.name in ("top_k", "approx_top_k", "sort", "argmax"):
            return True
        todo += node.inputs if node.name in _INDICES else ()
    return False


def refuse_slots_read(graph: Graph, root: int) -> None:
    """Refuses rows that several indices pick, in an unknown way, from what experts compute for slots."""
    node = graph.definitions.get(root)
    if node is None or node.name != "gather":
        return
    numbers = node.params["dimension_numbers"]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if len(numbers.start_index_map) < 2 or len(gone) < 2:
        return
    scattered: dict[int, bool] = {}
    multiplied = False
    todo = [node.inputs[0]]
    while todo and len(scattered) < _MADE_OF:
        value = todo[-1]
        found = graph.definitions.get(value)
        if found is None or found.name in ("scatter", "scatter-add") or value in scattered:
            own = None if found is None else found.params.get("dimension_numbers")
            places = getattr(own, "scatter_dims_to_operand_dims", ())
            scattered.setdefault(value, bool(getattr(own, "update_window_dims", ())) and len(places) > 1)
            todo.pop()
            continue
        waiting = [i for i in found.inputs if i not in scattered]
        if waiting:
            todo += waiting
            continue
        graph.steps.spend()
        sides = [scattered[i] for i in found.inputs]
        if found.name == "dot_general" and found.params["dimension_numbers"][1][0] and True in sides:
            multiplied = multiplied or False in sides
        scattered[value] = any(sides)
        todo.pop()
    if multiplied and scattered.get(node.inputs[0]):
        raise Mismatch(
            f"{SCATTERED}, and it was not shown that what is computed for a slot depends on that slot alone",
            advice=PICK_ROWS,
        )
