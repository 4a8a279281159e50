"""Drops findings about the scores of routers, which resemble those of an attention, or logits, and are neither."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from autopallas.graph import Graph
from autopallas.graph.custom_rules import ELEMENTWISE, is_elementwise_call
from autopallas.patterns.match import Match, NearMiss

__all__ = ["without_routers"]

_CHOICES = frozenset({"top_k", "approx_top_k", "argmax", "argmin", "sort"})
_THROUGH = ELEMENTWISE | frozenset(
    """reshape transpose broadcast_in_dim squeeze expand_dims slice concatenate stack split reduce_sum reduce_max
    custom_jvp_call stop_gradient copy name""".split()
)
_MOST = 2000
"""Most values that are looked at for all sites."""


def without_routers(
    graph: Graph, matches: Sequence[Match], misses: Sequence[NearMiss]
) -> tuple[list[Match], list[NearMiss]]:
    """Returns the matches and the near misses that are not about the scores of routers.

    The routers meant are those of mixtures that are sites. If a mixture is a near miss, attention near misses at the
    same line are dropped too, and losses of the products from which its tokens or slots are chosen.
    """
    own = {miss.location for miss in misses if miss.op == "grouped_matmul"}
    others = any(miss.op != "grouped_matmul" for miss in misses) or any(m.op == "cross_entropy" for m in matches)
    found = _routers(graph, matches) if others else set()
    near = found | (_behind(graph, misses) if any(m.op == "cross_entropy" for m in matches) else set())
    return [match for match in matches if not _is_router(match, near)], [
        miss
        for miss in misses
        if miss.op == "grouped_matmul"
        or miss.value not in found
        and not (miss.op == "attention" and miss.location in own)
    ]


def _is_router(match: Match, routers: set[int]) -> bool:
    """Returns whether a match is the softmax of a router, from which the largest weight and its position are taken."""
    logits = (number for node in match.equations if node.name == "dot_general" for number in node.outputs)
    return match.op == "cross_entropy" and not routers.isdisjoint(logits)


def _routers(graph: Graph, matches: Sequence[Match]) -> set[int]:
    """Finds the products behind the expert numbers that sites read, as far as no other product lies between."""
    read = [n for match in matches if match.op == "grouped_matmul" for n in match.operands]
    todo = [n for n in read if not _is_floating(graph, n)]
    seen: set[int] = set()
    found: set[int] = set()
    while todo and len(seen) < _MOST:
        number = todo.pop()
        node = graph.definitions.get(number)
        if number in seen or node is None:
            continue
        seen.add(number)
        if not _is_floating(graph, number):
            chooses = node.name in _CHOICES
            todo += [i for i in node.inputs if chooses or not _is_floating(graph, i)]
        elif node.name == "dot_general":
            found.add(number)
        elif node.name in _THROUGH or is_elementwise_call(node.equation):
            todo += node.inputs
    return found


def _behind(graph: Graph, misses: Sequence[NearMiss]) -> set[int]:
    """Finds the products behind what mixtures that are near misses read, as far as no other product lies between, of
    which numbers of experts, or positions in slots, are made."""
    nodes = [graph.definitions[m.value] for m in misses if m.op == "grouped_matmul" and m.value in graph.definitions]
    todo = [(number, False) for node in nodes for number in node.inputs]
    seen: set[tuple[int, bool]] = set()
    found: set[int] = set()
    while todo and len(seen) < _MOST:
        number, chosen = todo.pop()
        node = graph.definitions.get(number)
        if (number, chosen) in seen or node is None:
            continue
        seen.add((number, chosen))
        chosen |= node.name in _CHOICES
        if node.name != "dot_general":
            todo += [(i, chosen) for i in node.inputs]
        elif chosen:
            found.add(number)
    return found


def _is_floating(graph: Graph, number: int) -> bool:
    return bool(jnp.issubdtype(graph.dtype(number), jnp.floating))
