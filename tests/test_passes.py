"""The passes of the pipeline: named in the report with their times, and checked under strict."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopallas
from autopallas import pipeline
from autopallas.graph import Graph, flatten
from autopallas.invariants import (
    InvariantError,
    check_bodies,
    check_decisions,
    check_graph,
    check_program,
    check_sites,
)
from autopallas.patterns import find
from autopallas.plan.decision import Decision

X = jax.ShapeDtypeStruct((2, 32, 16), jnp.float32)


def attend(q, k, v):
    return jax.nn.softmax(q @ k.mT / 4.0) @ v


def layers(q, k, v):
    def layer(x, scale):
        return x + jax.lax.cond(scale[0] > 0, lambda y: attend(y, k, v), jnp.tanh, x) * scale[1], None

    return jax.lax.scan(layer, q, jnp.ones((3, 2)))[0]


@pytest.fixture
def program():
    return jax.make_jaxpr(layers)(X, X, X)


@pytest.fixture
def body(program):
    return flatten(program)


@pytest.fixture
def graph(body):
    return Graph(body)


@pytest.fixture
def matches(graph):
    matches, _ = find(graph, None, False)
    assert len(matches) == 1
    return matches


def inner(body):
    """The body of the scan."""
    return next(child.body for children in body.children.values() for child in children)


# --- the trace -------------------------------------------------------------------------------------------------------


def traced(**options):
    return autopallas.explain(autopallas.optimize(layers, objective="always", **options), X, X, X)


def test_the_report_names_the_passes_and_what_they_left():
    trace = traced().trace
    assert [one.name for one in trace][:2] == ["flatten", "move heads out of checkpoints"]
    by_name = {one.name: one for one in trace}
    assert len(by_name) == len(trace)
    assert by_name["number values"].sites == 0
    assert by_name["find sites"].sites == by_name["splice"].sites == 1
    assert by_name["splice"].equations < by_name["find sites"].equations
    assert all(one.seconds >= 0 for one in trace)


def test_a_site_that_is_kept_is_not_counted_as_one_to_be_replaced():
    report = autopallas.explain(autopallas.optimize(layers, objective="always", fuel=0), X, X, X)
    last = report.trace[-1]
    assert [site.verdict for site in report.sites] == ["kept"]
    assert last.sites == 0
    assert last.equations == report.trace[0].equations


def test_the_trace_is_the_same_each_time_but_for_the_times():
    first, second = (tuple(replace(one, seconds=0.0) for one in traced().trace) for _ in range(2))
    assert first == second


def test_reports_are_compared_and_printed_without_the_trace():
    report = traced()
    bare = replace(report, trace=())
    assert report == bare
    assert str(report) == str(bare)


def test_json_keeps_the_trace_and_reads_a_report_that_has_none():
    report = traced()
    again = autopallas.Report.from_json(report.to_json())
    assert again.trace == report.trace
    data = json.loads(report.to_json())
    del data["trace"]
    data["schema_version"] = 2
    assert autopallas.Report.from_json(json.dumps(data)).trace == ()
    whole = json.loads(report.to_json())
    whole["trace"][0]["seconds"] = 1
    assert autopallas.Report.from_json(json.dumps(whole)).trace[0].seconds == 1.0
    whole["trace"][0]["seconds"] = "long"
    with pytest.raises(ValueError, match=r"report.trace\[0\].seconds is 'long', not a number"):
        autopallas.Report.from_json(json.dumps(whole))


# --- invariants ------------------------------------------------------------------------------------------------------


def test_strict_names_the_pass_that_broke_the_program(monkeypatch):
    def broken(body, finite, divided):
        del body.equations[0]
        return body

    monkeypatch.setattr(pipeline, "move_selections", broken)
    with pytest.raises(InvariantError, match=r"after the pass 'move row selections', an operand of .* is not defined"):
        traced(strict=True)


def test_strict_names_the_pass_that_lost_a_decision(monkeypatch):
    monkeypatch.setattr(pipeline, "only_allowed", lambda matches, decisions, device: [*decisions, *decisions])
    with pytest.raises(InvariantError, match="after the pass 'leave out suspects', there is not one decision"):
        traced(strict=True)


def test_what_the_passes_give_is_in_order(program, body, graph, matches):
    check_bodies("flatten", body)
    check_graph("number values", graph)
    check_sites("find sites", graph, matches)
    check_decisions("plan", matches, [Decision("kept", "", "cpu")])
    check_program("splice", program, program)


def read_too_early(body):
    body.equations.reverse()
    body.children.clear()


def defined_twice(body):
    body.equations.append(body.equations[-1])


def constant_without_a_value(body):
    body.constvars.append(body.invars[0])


def result_that_is_not_there(body):
    body.outvars = [inner(body).outvars[0]]


def body_with_an_input_more(body):
    child = inner(body)
    child.invars.append(flatten(jax.make_jaxpr(jnp.sin)(1.0)).invars[0])


def body_of_no_equation(body):
    body.children[100] = next(iter(body.children.values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (read_too_early, "is not defined before it"),
        (defined_twice, "defined twice"),
        (constant_without_a_value, "has no value"),
        (result_that_is_not_there, "a result in the program is not defined"),
        (body_with_an_input_more, "the body of a scan does not fit"),
        (body_of_no_equation, "belongs to no equation|defined twice"),
    ],
)
def test_a_broken_tree_of_bodies_is_found(body, change, message):
    change(body)
    with pytest.raises(InvariantError, match=f"after the pass 'broken', .*({message})"):
        check_bodies("broken", body)


def number_of_another_type(graph):
    numbers = graph.numbers[graph.root]
    scan = next(e for e in graph.root.equations if e.primitive.name == "scan")
    numbers[scan.outvars[0]] = next(n for n, aval in enumerate(graph.avals) if aval.shape == ())
    graph.positions[graph.root].setdefault(numbers[scan.outvars[0]], (0, scan.outvars[0]))


def variable_without_a_number(graph):
    numbers = graph.numbers[graph.root]
    del numbers[graph.root.invars[0]]


def operand_after_its_result(graph):
    node = graph.nodes[-1]
    first = graph.nodes[0]
    first.inputs = (node.outputs[0],)


def definition_by_another_node(graph):
    graph.definitions[graph.nodes[0].outputs[0]] = graph.nodes[-1]


def literal_that_is_computed(graph):
    graph.literals[graph.nodes[0].outputs[0]] = 1


def value_at_another_place(graph):
    places = graph.positions[graph.root]
    (first, here), (second, there) = list(places.items())[:2]
    places[first], places[second] = there, here


def body_that_another_holds(graph):
    body = inner(graph.root)
    graph.holders[body] = (body, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (number_of_another_type, "another type"),
        (variable_without_a_number, "numbers of variables of another one"),
        (operand_after_its_result, "comes after it"),
        (definition_by_another_node, "does not give it"),
        (literal_that_is_computed, "both given and computed"),
        (value_at_another_place, "is not where it is said to be"),
        (body_that_another_holds, "is not held where"),
    ],
)
def test_a_broken_graph_is_found(graph, change, message):
    change(graph)
    with pytest.raises(InvariantError, match=f"after the pass 'broken', .*{message}"):
        check_graph("broken", graph)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, g: [m, m], "replaces what another site replaces"),
        (lambda m, g: [replace(m, operands=(*m.operands, *m.results))], "reads what it replaces"),
        (lambda m, g: [replace(m, operands=(*m.operands[:-1], len(g.avals)))], "does not have"),
        (lambda m, g: [replace(m, operands=m.operands[:-1])], "of other types than its original"),
        (lambda m, g: [replace(m, site=replace(m.site, key=replace(m.site.key, view=())))], "labels that do not fit"),
        (lambda m, g: [replace(m, site=replace(m.site, sizes=(1, *m.site.sizes)))], "labels that do not fit"),
    ],
)
def test_a_broken_site_is_found(graph, matches, change, message):
    with pytest.raises(InvariantError, match=f"after the pass 'broken', the attention at .*{message}"):
        check_sites("broken", graph, change(matches[0], graph))


def test_a_site_that_must_not_be_replaced_is_not(matches):
    applied = Decision("applied", "", "cpu", implementation="xla")
    check_decisions("plan", matches, [applied])
    with pytest.raises(InvariantError, match="replaced where that must not be"):
        check_decisions("plan", [replace(matches[0], obstacle="in use")], [applied])
    with pytest.raises(InvariantError, match="replaced by nothing"):
        check_decisions("plan", matches, [replace(applied, implementation=None)])


def test_a_program_with_another_signature_is_found(program):
    other = jax.make_jaxpr(lambda x: x)(X)
    with pytest.raises(InvariantError, match="another signature"):
        check_program("splice", program, other)


def test_branches_of_a_cond_may_be_one_function():
    def layer(x):
        return jax.nn.softmax(x @ x.T) @ x

    def function(x):
        return jax.lax.cond(x[0, 0] > 0, layer, layer, x)

    x = jnp.ones((4, 4))
    optimized = autopallas.optimize(function, objective="always", strict=True)
    np.testing.assert_allclose(optimized(x), function(x), rtol=1e-6)
    assert optimized.report().counts()["attention"] == 1  # one site, in both branches
