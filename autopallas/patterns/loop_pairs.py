"""Finds loops whose backward reads, in a reversed loop, what each of their steps leaves.

What is looked for is no derivative: a reversed loop reads, slice by slice, what a loop of the same length stacks, and
nothing else reads that.  Then it need not exist for all steps at once, whatever the steps compute, so long as they
compute the same when they run again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from autopallas import array_types, compat, jaxprs
from autopallas.graph import Graph, Node
from autopallas.graph.edit import surviving
from autopallas.graph.loop_slices import is_zero
from autopallas.kernels.respelling.checkpointed_scan import CheckpointedScan, Loop, Part, key_of
from autopallas.kernels.respelling.kind import Kind
from autopallas.kernels.respelling.spec import Plain, RespellingSpec
from autopallas.numerics.casts import is_quantised
from autopallas.patterns.advice import SIDE_EFFECTS, WHOLE_GRADIENT
from autopallas.patterns.carry import is_available
from autopallas.patterns.match import Match, Mismatch
from autopallas.patterns.respelling_parts import match_of_part

__all__ = [
    "OWN_CHECKPOINT",
    "LoopPair",
    "bytes_of",
    "check",
    "checkpointed",
    "pairs",
    "read_again",
    "site",
    "slices_of",
    "stacked_by",
]

_ROUNDS = 8
"""How often is asked what else reads the stacks."""

OWN_CHECKPOINT = (
    "Where memory is short, put jax.checkpoint around the step: its backward then computes each step again."
)
_COMMUNICATION = "Communicate before or after the loop, on the arrays of all steps, where the computation allows it."
_ELSEWHERE = (
    "Return from the loop only what the loss needs, and take one gradient of it: what a second backward or the "
    "program's results read has to exist for all steps."
)
_PLAIN_NUMBERS = (
    "Draw the random numbers before the loop, and let the steps read these as slices; carry numbers of 16 or 32 bits."
)


@dataclass(eq=False, slots=True)
class LoopPair:
    """A loop and a reversed one.

    Attributes:
      forward, backward: the loops.
      residuals: numbers of what the one stacks and only the other reads.
      elsewhere: numbers of what it stacks, the other reads, and something else too.
    """

    forward: Node
    backward: Node
    residuals: dict[int, None]
    elsewhere: dict[int, None] = field(default_factory=dict)


def pairs(
    graph: Graph,
    alive: frozenset[int],
    taken: Container[Node],
    least: int,
    may_be: Callable[[Node], bool] = lambda node: True,
) -> list[LoopPair]:
    """Returns pairs in which much is stacked that only the reversed loop reads, each loop in one of them.

    Args:
      graph: the program.
      alive: numbers of what it needs.
      taken: loops that other sites replace.
      least: smallest number of bytes of what is stacked, all steps together.
      may_be: whether a loop may be the first of a pair that is looked for.
    """
    found: list[tuple[int, LoopPair]] = []
    for node in graph.nodes:
        if node.name != "scan" or alive.isdisjoint(node.outputs) or node in taken:
            continue
        stacks: dict[Node, dict[int, None]] = defaultdict(dict)
        for number in slices_of(node):
            source = graph.definitions.get(number)
            if source is not None and source.name == "scan" and number in stacked_by(source):
                stacks[source][number] = None
        graph.steps.spend(len(node.inputs))
        for source, numbers in stacks.items():
            size = sum(bytes_of(graph, n) for n in numbers)
            if _are_opposite(source, node) and size >= least and source not in taken and may_be(source):
                found.append((size, LoopPair(source, node, numbers)))
    kept: list[LoopPair] = []
    used: set[Node] = set()
    for _, pair in sorted(found, key=lambda own: -own[0]):
        if used.isdisjoint((pair.forward, pair.backward)):
            used.update((pair.forward, pair.backward))
            kept.append(pair)
    return _read_by_nothing_else(graph, sorted(kept, key=lambda pair: min(pair.backward.outputs)))


def _are_opposite(forward: Node, backward: Node) -> bool:
    first, second = forward.params, backward.params
    return bool(first["length"] == second["length"] and first["reverse"] != second["reverse"])


def slices_of(node: Node) -> tuple[int, ...]:
    """Returns the numbers of the arrays of which each step of a loop is given a slice."""
    return node.inputs[sum(compat.scan_parts(node.equation)) :]


def stacked_by(node: Node) -> tuple[int, ...]:
    """Returns the numbers of what a loop stacks."""
    return node.outputs[compat.scan_parts(node.equation)[1] :]


def bytes_of(graph: Graph, number: int) -> int:
    """Returns the size of an array."""
    return math.prod(graph.shape(number)) * int(graph.dtype(number).itemsize)


def _read_by_nothing_else(graph: Graph, found: Sequence[LoopPair]) -> list[LoopPair]:
    """Returns the pairs with those of their stacks that nothing but the reversed loop reads."""
    alive = surviving(graph)
    for pair in found:
        node = pair.backward
        others = set(node.inputs[: sum(compat.scan_parts(node.equation))])
        for number in [*pair.residuals]:
            users = (user for user in graph.users[number] if user is not node)
            if number in others or any(not u.outputs or not alive.isdisjoint(u.outputs) for u in users):
                _leave(pair, number)
    for _ in range(_ROUNDS if found else 0):
        reads = {n: read_again(c) for c in found for n in c.backward.outputs if _is_given(graph, c.backward, n)}
        still = surviving(graph, reads, reads)
        needed = [(c, n) for c in found for n in c.residuals if n in still]
        if not needed:
            return list(found)
        for pair, number in needed:
            _leave(pair, number)
    return []


def _is_given(graph: Graph, node: Node, number: int) -> bool:
    """Returns whether a result of a loop is computed there: what a loop stacks of its slices is the array of these."""
    return graph.definitions.get(number) is node


def _leave(pair: LoopPair, number: int) -> None:
    del pair.residuals[number]
    pair.elsewhere[number] = None


def read_again(pair: LoopPair) -> tuple[int, ...]:
    """Returns what the chunks of the backward read, without what the loop carries at their beginnings."""
    constants, carried = compat.scan_parts(pair.forward.equation)
    inputs = pair.forward.inputs
    own = [n for n in pair.backward.inputs if n not in pair.residuals]
    return (*inputs[:constants], *inputs[constants + carried :], *own)


def check(graph: Graph, pair: LoopPair) -> None:
    """Checks whether the steps of a loop may run again where its backward is.

    Raises:
      Mismatch: they may not.
    """
    forward, backward = pair.forward, pair.backward
    for node in (forward, backward):
        if compat.has_side_effects(node.equation):
            raise Mismatch("a step has an effect beside its results, so that it cannot run again", advice=SIDE_EFFECTS)
        if node.equation.effects:
            raise Mismatch("a step communicates with other devices", advice=_COMMUNICATION)
    if not pair.residuals:
        number = max(pair.elsewhere, key=lambda n: bytes_of(graph, n))
        raise Mismatch("what the loop stacks for its backward is needed elsewhere too", number, advice=_ELSEWHERE)
    if any(_is_odd(graph, n) for node in (forward, backward) for n in (*node.inputs, *node.outputs)):
        raise Mismatch(
            "a loop carries or reads numbers of less than 16 bits, or keys of random numbers", advice=_PLAIN_NUMBERS
        )
    body = backward.body
    read = [n for n in read_again(pair) if n not in graph.literals]
    if not all(is_available(graph, n, (forward.body,), body, across=True) for n in read):
        raise Mismatch("what the loop reads cannot be brought to where its backward is", advice=WHOLE_GRADIENT)


def checkpointed(graph: Graph, pair: LoopPair, chunk: int, alive: frozenset[int]) -> CheckpointedScan:
    """Returns a pair whose steps run again chunk by chunk.

    Args:
      graph: the program.
      pair: the loops.
      chunk: the number of steps of a chunk.
      alive: numbers of what the program needs.
    """
    forward, backward = pair.forward, pair.backward
    needed, given = (
        tuple(i for i, n in enumerate(node.outputs) if n in alive and _is_given(graph, node, n))
        for node in (forward, backward)
    )
    needed = tuple(i for i in needed if forward.outputs[i] not in pair.residuals)
    stacks, slices = stacked_by(forward), slices_of(backward)
    first = {n: i for i, n in reversed([*enumerate(stacks)])}
    found = CheckpointedScan(
        key="",
        forward=_loop(graph, forward),
        backward=_loop(graph, backward),
        length=int(forward.params["length"]),
        chunk=chunk,
        residuals=tuple((first[n], i) for i, n in enumerate(slices) if n in pair.residuals),
        needed=_once(forward.outputs, needed),
        given=_once(backward.outputs, given),
    )
    return replace(found, key=key_of(found))


def _once(numbers: Sequence[int], places: Sequence[int]) -> tuple[int, ...]:
    """Returns the places with one for each number."""
    return tuple({numbers[i]: i for i in reversed(places)}[n] for n in dict.fromkeys(numbers[i] for i in places))


def _is_odd(graph: Graph, number: int) -> bool:
    dtype = graph.dtype(number)
    return jnp.issubdtype(dtype, jax.dtypes.extended) or is_quantised(dtype)


def _loop(graph: Graph, node: Node) -> Loop:
    constants, carried = compat.scan_parts(node.equation)
    literals = [
        (i, np.asarray(graph.literals[n], graph.dtype(n))) for i, n in enumerate(node.inputs) if n in graph.literals
    ]
    reverse, unroll = bool(node.params["reverse"]), int(node.params["unroll"])
    zeros = frozenset(i for i, n in enumerate(node.inputs[:constants]) if is_zero(graph, n))
    return Loop(node.params["jaxpr"], constants, carried, reverse, unroll, tuple(literals), zeros)


def site(graph: Graph, pair: LoopPair, scan: CheckpointedScan, kind: Kind, location: str) -> Match:
    """Returns the site of a pair, whose second pass is the backward.

    Args:
      graph: the program.
      pair: the loops.
      scan: the same, as they are computed.
      kind: that of the site.
      location: of the loop in the program.
    """
    forward, backward = pair.forward, pair.backward
    constants, carried = scan.forward.constants, scan.forward.carried
    inputs = [n for n in forward.inputs if n not in graph.literals]
    again = [*forward.inputs[:constants], *forward.inputs[constants + carried :]]
    own = [n for n in backward.inputs if n not in pair.residuals and n not in graph.literals]
    firsts = [v.aval for v in jaxprs.open_jaxpr(scan.forward.step)[0].invars[constants : constants + carried]]
    types = [array_types.array_type((scan.chunks, *a.shape), a.dtype, [a], a) for a in firsts]
    starts = tuple(graph.further(aval) for aval in types)
    results = [forward.outputs[i] for i in scan.needed]
    given = [backward.outputs[i] for i in scan.given]
    second = [*(n for n in again if n not in graph.literals), *starts, *own]

    def part(
        which: Part, operands: Sequence[int], found: Sequence[int], nodes: tuple[Node, ...], made: Sequence[int] = ()
    ) -> Match:
        def original(_: RespellingSpec, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
            return scan.as_written(which, arrays)

        parameters: dict[str, Plain] = {"pair": scan, "part": which}
        return match_of_part(
            graph, kind.name, parameters, original, operands, found, nodes, forward.body, location, made
        )

    both = part("both", (*inputs, *own), (*results, *given), (forward, backward))
    then = part("backward", second, given, (backward,))
    first = part("forward", inputs, (*results, *starts), (forward, backward), starts)
    return replace(first, then=(then,), measured=replace(both, own_results=len(results)))
