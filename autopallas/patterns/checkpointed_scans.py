"""Finds loops whose backward reads, in a reversed loop, much of what each of their steps leaves."""

from __future__ import annotations

import math
from collections.abc import Container

from autopallas import compat, jaxprs
from autopallas.faults import contained
from autopallas.graph import Graph, Node
from autopallas.graph.edit import surviving
from autopallas.kernels.respelling.kinds.scan_checkpoint import KIND
from autopallas.kernels.respelling.operation import OPERATION
from autopallas.patterns.loop_pairs import (
    OWN_CHECKPOINT,
    LoopPair,
    bytes_of,
    check,
    checkpointed,
    pairs,
    read_again,
    site,
    stacked_by,
)
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


def find(graph: Graph, taken: Container[Node]) -> tuple[list[Match], list[NearMiss]]:
    """Finds every such pair of loops.

    Args:
      graph: the program.
      taken: loops that other sites replace.

    Returns:
      The sites, and near misses of those that stack much and cannot be one.
    """
    alive = surviving(graph)
    matches: list[Match] = []
    misses: list[NearMiss] = []
    for pair in pairs(graph, alive, taken, _LEAST_BYTES):
        location = jaxprs.location(pair.forward.equation)
        with contained(location, OPERATION.name, "recognition"):
            try:
                matches.append(_match(graph, pair, alive, location))
            except Mismatch as mismatch:
                reason = describe_reason(graph, mismatch.reason, mismatch.operand)
                last = min(pair.backward.outputs)
                misses.append(NearMiss(OPERATION.name, location, reason, last, mismatch.advice))
    return matches, misses


# ---------------------------------------------------------------------- whether it can be, and gains


def _match(graph: Graph, pair: LoopPair, alive: frozenset[int], location: str) -> Match:
    """Returns the site of a pair.

    Raises:
      Mismatch: it cannot be one, or would gain too little.
    """
    length = int(pair.forward.params["length"])
    if length < _SHORTEST:
        raise Mismatch(f"a loop of {length} steps has too few of them for chunks", advice=OWN_CHECKPOINT)
    check(graph, pair)
    return site(graph, pair, checkpointed(graph, pair, _chunk(graph, pair, length, alive), alive), KIND, location)


def _chunk(graph: Graph, pair: LoopPair, length: int, alive: frozenset[int]) -> int:
    """Returns the number of steps of a chunk: one that divides the length, where there is one.

    Raises:
      Mismatch: the memory that is needed with it is not much less than what is stacked.
    """
    forward, backward = pair.forward, pair.backward
    constants, carried = compat.scan_parts(forward.equation)
    states = sum(bytes_of(graph, n) for n in forward.inputs[constants : constants + carried])
    stacked = sum(bytes_of(graph, n) for n in pair.residuals)
    least = math.sqrt(length * length * states / stacked)  # with which the least memory is needed
    best = min(max(least, _ROOTS * math.sqrt(length)), length / 2)
    dividing = [c for c in range(2, length) if length % c == 0 and best <= _NEAR * c <= _NEAR**2 * best]
    chunk = max(dividing, default=round(best))
    rest = 0
    if length % chunk:  # results are put together
        results = [n for n in stacked_by(forward) if n not in pair.residuals and n in alive]
        rest = sum(bytes_of(graph, n) for n in dict.fromkeys((*results, *stacked_by(backward))))
    kept = -(-length // chunk) * states + chunk * stacked // length + rest + _kept_longer(graph, pair)
    if stacked < _LEAST_GAIN * kept:
        raise Mismatch(
            f"the loop stacks {_mebibytes(stacked)} for its backward that nothing else reads, and to compute them "
            f"again in chunks would take {_mebibytes(kept)}",
            advice=OWN_CHECKPOINT,
        )
    return chunk


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.3g} MiB"


def _kept_longer(graph: Graph, pair: LoopPair) -> int:
    """Returns the bytes of what is to be kept from the loop to its backward, and is not kept as it stands."""
    backward = pair.backward
    own, inputs = set(backward.inputs), {graph.numbers[graph.root][v] for v in graph.root.invars}
    last = max(backward.outputs)
    total = 0
    for number in dict.fromkeys(read_again(pair)):
        late = any(u.outputs and min(u.outputs) > last for u in graph.users[number])
        if number in own or number in inputs or number in graph.literals or number in graph.constants or late:
            continue
        total += bytes_of(graph, number)
    return total
