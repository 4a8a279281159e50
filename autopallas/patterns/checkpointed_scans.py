"""Finds loops whose backward reads, in a reversed loop, much of what each of their steps leaves.

What is looked for is no derivative: a reversed loop reads, slice by slice, what a loop of the same length stacks, and
nothing else reads that.  Then it need not exist for all steps at once, whatever the steps compute, so long as they
compute the same when they run again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from autopallas import array_types, compat, jaxprs
from autopallas.faults import contained
from autopallas.graph import Graph, Node
from autopallas.graph.edit import surviving
from autopallas.kernels.respelling.checkpointed import CheckpointedScan, Loop, Part, key_of
from autopallas.kernels.respelling.kinds.scan_checkpoint import KIND
from autopallas.kernels.respelling.operation import OPERATION
from autopallas.kernels.respelling.site import RespellingSite
from autopallas.kernels.respelling.spec import RespellingSpec
from autopallas.numerics.casts import is_quantised
from autopallas.patterns.advice import SIDE_EFFECTS, WHOLE_GRADIENT
from autopallas.patterns.carry import is_available
from autopallas.patterns.match import Match, Mismatch, NearMiss, describe_reason

__all__ = ["find"]

_SHORTEST = 16
"""Smallest number of steps of a loop that is looked at."""
_LEAST_BYTES = 2**17
"""Smallest size of what is stacked for the backward, all steps together, that is looked at."""
_LEAST_GAIN = 2
"""How many times as much memory stacks take as what takes their place, at least."""
_ROOTS = 1.4
"""Smallest number of steps of a chunk, in square roots of the number of all steps: with fewer, beginning a chunk costs
more time than the memory is worth."""
_NEAR = 1.5
"""How far the number of steps of a chunk may be from the best one, as a factor."""
_ROUNDS = 8
"""How often is asked what else reads the stacks."""


_OWN_CHECKPOINT = (
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
class _Candidate:
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


def find(graph: Graph, taken: Container[Node]) -> tuple[list[Match], list[NearMiss]]:
    """Finds every such pair of loops.

    Args:
      graph: the program.
      taken: loops that other sites replace.

    Returns:
      The sites, and near misses of those that stack much and cannot be one.
    """
    alive = surviving(graph)
    candidates = [c for c in _candidates(graph, alive) if c.forward not in taken and c.backward not in taken]
    matches: list[Match] = []
    misses: list[NearMiss] = []
    for candidate in _read_by_nothing_else(graph, candidates):
        location = jaxprs.location(candidate.forward.equation)
        with contained(location, OPERATION.name, "recognition"):
            try:
                matches.append(_match(graph, candidate, alive, location))
            except Mismatch as mismatch:
                reason = describe_reason(graph, mismatch.reason, mismatch.operand)
                last = min(candidate.backward.outputs)
                misses.append(NearMiss(OPERATION.name, location, reason, last, mismatch.advice))
    return matches, misses


# ---------------------------------------------------------------------- which loops


def _candidates(graph: Graph, alive: frozenset[int]) -> list[_Candidate]:
    """Returns the pairs in which much is stacked, each loop in one of them."""
    found: list[tuple[int, _Candidate]] = []
    for node in graph.nodes:
        if node.name != "scan" or alive.isdisjoint(node.outputs):
            continue
        stacks: dict[Node, dict[int, None]] = defaultdict(dict)
        for number in _slices(node):
            source = graph.definitions.get(number)
            if source is not None and source.name == "scan" and number in _stacked(source):
                stacks[source][number] = None
        graph.steps.spend(len(node.inputs))
        for source, numbers in stacks.items():
            size = sum(_bytes(graph, n) for n in numbers)
            if _are_opposite(source, node) and size >= _LEAST_BYTES:
                found.append((size, _Candidate(source, node, numbers)))
    kept: list[_Candidate] = []
    used: set[Node] = set()
    for _, candidate in sorted(found, key=lambda pair: -pair[0]):
        if used.isdisjoint((candidate.forward, candidate.backward)):
            used.update((candidate.forward, candidate.backward))
            kept.append(candidate)
    return sorted(kept, key=lambda candidate: min(candidate.backward.outputs))


def _are_opposite(forward: Node, backward: Node) -> bool:
    first, second = forward.params, backward.params
    return bool(first["length"] == second["length"] and first["reverse"] != second["reverse"])


def _slices(node: Node) -> tuple[int, ...]:
    return node.inputs[sum(compat.scan_parts(node.equation)) :]


def _stacked(node: Node) -> tuple[int, ...]:
    return node.outputs[compat.scan_parts(node.equation)[1] :]


def _bytes(graph: Graph, number: int) -> int:
    return math.prod(graph.shape(number)) * int(graph.dtype(number).itemsize)


def _read_by_nothing_else(graph: Graph, candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Returns the candidates with those of their stacks that nothing but the reversed loop reads."""
    alive = surviving(graph)
    for candidate in candidates:
        node = candidate.backward
        others = set(node.inputs[: sum(compat.scan_parts(node.equation))])
        for number in [*candidate.residuals]:
            users = (user for user in graph.users[number] if user is not node)
            if number in others or any(not u.outputs or not alive.isdisjoint(u.outputs) for u in users):
                _leave(candidate, number)
    for _ in range(_ROUNDS if candidates else 0):
        reads = {n: _read_again(c) for c in candidates for n in c.backward.outputs if _is_given(graph, c.backward, n)}
        still = surviving(graph, reads, reads)
        needed = [(c, n) for c in candidates for n in c.residuals if n in still]
        if not needed:
            return list(candidates)
        for candidate, number in needed:
            _leave(candidate, number)
    return []


def _is_given(graph: Graph, node: Node, number: int) -> bool:
    """Returns whether a result of a loop is computed there: what a loop stacks of its slices is the array of these."""
    return graph.definitions.get(number) is node


def _leave(candidate: _Candidate, number: int) -> None:
    del candidate.residuals[number]
    candidate.elsewhere[number] = None


def _read_again(candidate: _Candidate) -> tuple[int, ...]:
    """Returns what the chunks of the backward read, without what the loop carries at their beginnings."""
    constants, carried = compat.scan_parts(candidate.forward.equation)
    inputs = candidate.forward.inputs
    own = [n for n in candidate.backward.inputs if n not in candidate.residuals]
    return (*inputs[:constants], *inputs[constants + carried :], *own)


# ---------------------------------------------------------------------- whether it can be, and gains


def _match(graph: Graph, candidate: _Candidate, alive: frozenset[int], location: str) -> Match:
    """Returns the site of a pair.

    Raises:
      Mismatch: it cannot be one, or would gain too little.
    """
    forward, backward = candidate.forward, candidate.backward
    length = int(forward.params["length"])
    if length < _SHORTEST:
        raise Mismatch(f"a loop of {length} steps has too few of them for chunks", advice=_OWN_CHECKPOINT)
    for node in (forward, backward):
        if compat.has_side_effects(node.equation):
            raise Mismatch("a step has an effect beside its results, so that it cannot run again", advice=SIDE_EFFECTS)
        if node.equation.effects:
            raise Mismatch("a step communicates with other devices", advice=_COMMUNICATION)
    if not candidate.residuals:
        number = max(candidate.elsewhere, key=lambda n: _bytes(graph, n))
        raise Mismatch("what the loop stacks for its backward is needed elsewhere too", number, advice=_ELSEWHERE)
    if any(_is_odd(graph, n) for node in (forward, backward) for n in (*node.inputs, *node.outputs)):
        raise Mismatch(
            "a loop carries or reads numbers of less than 16 bits, or keys of random numbers", advice=_PLAIN_NUMBERS
        )
    body = backward.body
    read = [n for n in _read_again(candidate) if n not in graph.literals]
    if not all(is_available(graph, n, (forward.body,), body, across=True) for n in read):
        raise Mismatch("what the loop reads cannot be brought to where its backward is", advice=WHOLE_GRADIENT)
    chunk = _chunk(graph, candidate, length, alive)
    needed, given = (
        tuple(i for i, n in enumerate(node.outputs) if n in alive and _is_given(graph, node, n))
        for node in (forward, backward)
    )
    needed = tuple(i for i in needed if forward.outputs[i] not in candidate.residuals)
    stacks, slices = _stacked(forward), _slices(backward)
    first = {n: i for i, n in reversed([*enumerate(stacks)])}
    pair = CheckpointedScan(
        key="",
        forward=_loop(graph, forward),
        backward=_loop(graph, backward),
        length=length,
        chunk=chunk,
        residuals=tuple((first[n], i) for i, n in enumerate(slices) if n in candidate.residuals),
        needed=_once(forward.outputs, needed),
        given=_once(backward.outputs, given),
    )
    pair = replace(pair, key=key_of(pair))
    return _site(graph, candidate, pair, location)


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
    return Loop(node.params["jaxpr"], constants, carried, reverse, unroll, tuple(literals))


def _chunk(graph: Graph, candidate: _Candidate, length: int, alive: frozenset[int]) -> int:
    """Returns the number of steps of a chunk: one that divides the length, where there is one.

    Raises:
      Mismatch: the memory that is needed with it is not much less than what is stacked.
    """
    forward, backward = candidate.forward, candidate.backward
    constants, carried = compat.scan_parts(forward.equation)
    states = sum(_bytes(graph, n) for n in forward.inputs[constants : constants + carried])
    stacked = sum(_bytes(graph, n) for n in candidate.residuals)
    least = math.sqrt(length * length * states / stacked)  # with which the least memory is needed
    best = min(max(least, _ROOTS * math.sqrt(length)), length / 2)
    dividing = [c for c in range(2, length) if length % c == 0 and best <= _NEAR * c <= _NEAR**2 * best]
    chunk = max(dividing, default=round(best))
    rest = 0
    if length % chunk:  # results are put together
        results = [n for n in _stacked(forward) if n not in candidate.residuals and n in alive]
        rest = sum(_bytes(graph, n) for n in dict.fromkeys((*results, *_stacked(backward))))
    kept = -(-length // chunk) * states + chunk * stacked // length + rest + _kept_longer(graph, candidate)
    if stacked < _LEAST_GAIN * kept:
        raise Mismatch(
            f"the loop stacks {_mebibytes(stacked)} for its backward that nothing else reads, and to compute them "
            f"again in chunks would take {_mebibytes(kept)}",
            advice=_OWN_CHECKPOINT,
        )
    return chunk


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.3g} MiB"


def _kept_longer(graph: Graph, candidate: _Candidate) -> int:
    """Returns the bytes of what is to be kept from the loop to its backward, and is not kept as it stands."""
    backward = candidate.backward
    own, inputs = set(backward.inputs), {graph.numbers[graph.root][v] for v in graph.root.invars}
    last = max(backward.outputs)
    total = 0
    for number in dict.fromkeys(_read_again(candidate)):
        late = any(u.outputs and min(u.outputs) > last for u in graph.users[number])
        if number in own or number in inputs or number in graph.literals or number in graph.constants or late:
            continue
        total += _bytes(graph, number)
    return total


# ---------------------------------------------------------------------- the site


def _site(graph: Graph, candidate: _Candidate, pair: CheckpointedScan, location: str) -> Match:
    """Returns the site, whose second pass is the backward."""
    forward, backward = candidate.forward, candidate.backward
    constants, carried = pair.forward.constants, pair.forward.carried
    inputs = [n for n in forward.inputs if n not in graph.literals]
    again = [*forward.inputs[:constants], *forward.inputs[constants + carried :]]
    own = [n for n in backward.inputs if n not in candidate.residuals and n not in graph.literals]
    firsts = [v.aval for v in jaxprs.open_jaxpr(pair.forward.step)[0].invars[constants : constants + carried]]
    types = [array_types.array_type((pair.chunks, *a.shape), a.dtype, [a], a) for a in firsts]
    starts = tuple(graph.further(aval) for aval in types)
    results = [forward.outputs[i] for i in pair.needed]
    given = [backward.outputs[i] for i in pair.given]
    second = [*(n for n in again if n not in graph.literals), *starts, *own]

    def part(
        which: Part, operands: Sequence[int], found: Sequence[int], nodes: tuple[Node, ...], made: Sequence[int] = ()
    ) -> Match:
        given, gives = ([(graph.shape(n), graph.dtype(n)) for n in numbers] for numbers in (operands, found))
        spec = RespellingSpec(KIND.name, (("pair", pair), ("part", which)), tuple(given), tuple(gives))
        avals = [graph.avals[n] for n in operands]
        with array_types.on_mesh_of(avals):
            original = compat.make_jaxpr(
                lambda *arrays: tuple(pair.as_written(which, arrays)), *map(array_types.typed_like, avals)
            )
        return Match(
            op=OPERATION.name,
            site=RespellingSite(spec),
            direction="forward",
            operands=tuple(operands),
            results=tuple(found),
            equations=nodes,
            original=original,
            body=nodes[0].body,
            location=location,
            homes=(forward.body,),
            made=tuple(made),
            in_body=True,
        )

    both = part("both", (*inputs, *own), (*results, *given), (forward, backward))
    then = part("backward", second, given, (backward,))
    first = part("forward", inputs, (*results, *starts), (forward, backward), starts)
    return replace(first, then=(then,), measured=both)
