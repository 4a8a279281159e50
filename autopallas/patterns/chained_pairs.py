"""Makes one site of equal steps and of those of their backward, which read what each of the first ones leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax

from autopallas import array_types, jaxprs
from autopallas.compat import JaxprEqn
from autopallas.graph import Graph, Node
from autopallas.graph.custom_rules import is_elementwise_call, rule_key
from autopallas.kernels.respelling.chained_steps import ChainedSteps
from autopallas.kernels.respelling.kinds.python_loop import KIND
from autopallas.kernels.respelling.spec import Plain, RespellingSpec
from autopallas.patterns.chain import Chain, Refused
from autopallas.patterns.chain_site import site_of
from autopallas.patterns.match import Match
from autopallas.patterns.respelling_parts import match_of_part

__all__ = ["pairs"]


def pairs(graph: Graph, chains: Sequence[Chain]) -> list[tuple[Chain, Chain, Match]]:
    """Returns the sites of chains of which the second reads what each step of the first leaves, each in one site."""
    found: list[tuple[Chain, Chain, Match]] = []
    used: set[int] = set()
    for second in reversed(chains):
        sizes: dict[Chain, int] = {}
        for family in second.families:
            number = family.numbers[0]
            sizes[family.chain] = sizes.get(family.chain, 0) + int(graph.avals[number].size)
        for first in sorted(sizes, key=lambda chain: -sizes[chain]):
            if first not in chains or not used.isdisjoint((id(first), id(second))):
                continue
            try:
                match = _site(graph, first, second)
            except Refused:
                continue
            used.update((id(first), id(second)))
            found.append((first, second, match))
    return found


def _site(graph: Graph, first: Chain, second: Chain) -> Match:
    """Returns the site of two chains.

    Raises:
      Refused: the first one cannot give what the second reads as arrays of all steps, or the steps of one have
        derivatives of their own that differ, of which the site's original would have one.
    """
    if any(len({rule_key(e) for e in calls}) > 1 for chain in (first, second) for calls in _calls(chain)):
        raise Refused
    families = list(dict.fromkeys(family for family in second.families if family.chain is first))
    types = [graph.avals[family.numbers[0]] for family in families]
    made = [
        graph.further(array_types.array_type((len(family.numbers), *a.shape), a.dtype, [a], a))
        for family, a in zip(families, types, strict=True)
    ]
    nodes = [[node for block in chain.blocks for node in block] for chain in (first, second)]
    forward = site_of(first, {}, {id(node) for node in nodes[1]}, [family.slot for family in families])
    given = {n: (family, k) for family in families for k, n in enumerate(family.numbers)}
    backward = site_of(
        second, second.given | given, stacks_read={f.numbers: n for f, n in zip(families, made, strict=True)}
    )
    location = jaxprs.location(nodes[0][-1].equation)
    own = [n for n in backward.operands if n not in made]
    places = tuple(made.index(n) if n in made else -1 for n in backward.operands)
    steps, later = forward.parameters[0][1], backward.parameters[0][1]
    assert isinstance(steps, ChainedSteps)
    assert isinstance(later, ChainedSteps)

    def part(
        parameters: dict[str, Plain], operands: Sequence[int], results: Sequence[int], equations: Sequence[Node]
    ) -> Match:
        def original(spec: RespellingSpec, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
            return KIND.original(spec, *arrays)

        new, home = [n for n in results if n in made], equations[0].body
        return match_of_part(graph, KIND.name, parameters, original, operands, results, equations, home, location, new)

    pair: dict[str, Plain] = {"steps": steps, "then": later, "places": places, "operands": (len(forward.operands),)}
    whole = part(pair, [*forward.operands, *own], [*forward.results, *backward.results], [*nodes[0], *nodes[1]])
    then = part({"steps": later}, backward.operands, backward.results, nodes[1])
    start = part({"steps": steps}, forward.operands, [*forward.results, *made], [*nodes[0], *nodes[1]])
    return replace(start, then=(then,), measured=replace(whole, own_results=len(forward.results)))


def _calls(chain: Chain) -> Iterator[list[JaxprEqn]]:
    """Yields the calls with a derivative of their own at each position of the steps."""
    for i, node in enumerate(chain.blocks[0]):
        if is_elementwise_call(node.equation):
            yield [block[i].equation for block in chain.blocks]
