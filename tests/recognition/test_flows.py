"""What values are computed from, told of many logits in one pass, is what a walk back from each value finds."""

from __future__ import annotations

import jax
import pytest

from autopallas.graph import Graph, flatten
from autopallas.patterns import cross_entropy
from autopallas.patterns.cross_entropy import flows as cross_entropy_flows
from recognition.stacks import attention, looked_up, one_hot_mixture, rematerialised, slots, stack


def graph_of(layers, depth):
    function, args = stack(layers, depth, looked_up, loss=True)
    return Graph(flatten(jax.make_jaxpr(function)(*args)))


def walked(graph, flow, value):
    """(ends, and None for other values inside, from which a value is computed, whether from the logits too)."""
    seen, ends, todo, reached = set(), set(), [value], False
    while todo:
        number = todo.pop()
        if number in seen:
            continue
        seen.add(number)
        if number in flow.ends or number in flow.inside:
            ends.add(number if number in flow.ends else None)
        elif number in graph.definitions:
            todo += graph.definitions[number].inputs
    todo, seen = [value], set()
    while todo:
        number = todo.pop()
        reached = reached or number in flow.logits
        if number not in seen and number in graph.definitions:
            todo += graph.definitions[number].inputs
        seen.add(number)
    return ends, reached


@pytest.mark.parametrize(
    "layers",
    [[slots], [one_hot_mixture, attention], [rematerialised, slots]],
    ids=lambda layers: " ".join(f.__name__ for f in layers),
)
def test_flows_are_what_a_walk_finds(monkeypatch, layers):
    monkeypatch.setattr(cross_entropy_flows, "_TOGETHER", 3)  # several passes, the last of fewer
    graph, flows = graph_of(layers, 5), []
    add = cross_entropy_flows.Flows.add
    monkeypatch.setattr(cross_entropy_flows.Flows, "add", lambda *args: flows.append(add(*args)) or flows[-1])
    cross_entropy.find(graph)
    assert len(flows) > 2
    for flow in flows:
        for value in range(len(graph.avals)):
            ends, reached = walked(graph, flow, value)
            found = set(flow.sources(value))
            assert flow.follows(value) == reached
            assert found == ends or None in found & ends


def test_many_routers_are_followed_in_one_pass(monkeypatch):
    passes = []
    follow = cross_entropy_flows.Flows._follow
    monkeypatch.setattr(
        cross_entropy_flows.Flows, "_follow", lambda self, flows: passes.append(len(flows)) or follow(self, flows)
    )
    cross_entropy.find(graph_of([slots], 100))
    assert passes == [101]
