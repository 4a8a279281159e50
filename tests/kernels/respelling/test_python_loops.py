"""Respelling of loops that Python wrote out, and of their backwards: what is found, what is left alone, and what it
computes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.catalogue import registry
from support.compare import compare
from support.respellings import random

import autopallas
from autopallas.graph import Graph, flatten
from autopallas.kernels.respelling.kinds import kind_named
from autopallas.patterns import find as find_all
from autopallas.patterns.chained_steps import find
from autopallas.patterns.match import NearMiss

NAME = "python_loop"
WIDTH = 5


def arguments(dtype=jnp.float32):
    """x [time, batch, width], and two weights."""
    x, w, u = random(9, 3, WIDTH), random(WIDTH, WIDTH, seed=1) / 3, random(WIDTH, WIDTH, seed=2) / 3
    return [a.astype(dtype) for a in (x, w, u)]


def matches(function, *operands):
    found, misses = find_all(Graph(flatten(jax.make_jaxpr(function)(*operands))), (NAME,), True)
    return [match for match in found if match.spec.kind == NAME], misses


def counts(function, *operands):
    """The number of steps of each pass of each site."""
    return [[own.spec["steps"].count for own in match.passes] for match in matches(function, *operands)[0]]


def applied(function, *operands):
    optimized = autopallas.optimize(function, objective="always", strict=True, ops=NAME)
    optimized(*operands)
    return optimized.report().counts()["respelling"]


FOUND, found = registry()


@found
def a_cell(x, w, u):
    h = jnp.zeros((3, WIDTH), x.dtype)
    for t in range(9):
        h = jnp.tanh(x[t] @ w + h @ u)
    return h


@found
def a_cell_whose_states_are_read(x, w, u):
    h, states = jnp.zeros((3, WIDTH), x.dtype), []
    for t in range(9):
        h = jnp.tanh(x[t] @ w + h @ u)
        states.append(h)
    return jnp.stack(states, 1)


@found
def a_cell_along_the_second_axis(x, w, u):
    x = x.swapaxes(0, 1) * 2
    h = jnp.zeros((3, WIDTH), x.dtype)
    for t in range(9):
        h = jnp.tanh(x[:, t] @ w + h @ u)
    return h


@found
def a_reversed_cell(x, w, u):
    h, states = jnp.ones((3, WIDTH), x.dtype), []
    for t in reversed(range(9)):
        h = jnp.tanh(x[t] @ w + h @ u)
        states.append(h)
    return sum(states)


@found
def gates_of_one_product(x, w, u):
    h = c = jnp.zeros((3, WIDTH), x.dtype)
    weights = jnp.concatenate([w, u, w - u, w * u], 1)
    for t in range(9):
        i, f, g, o = jnp.split((x[t] + h) @ weights, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return h + c


@found
def every_other_slice(x, w, u):
    h = x[0]
    for t in range(0, 9, 2):
        h = jnp.tanh(x[t] @ w + h @ u)
    return h


@found
def slices_in_no_order(x, w, u):
    h = x[0]
    for t in (3, 1, 4, 8, 5, 2, 6):
        h = jnp.tanh(x[t] @ w + h @ u)
    return h


@found
def rows_of_a_stack(x, w, u):
    h = x[0]
    for row in x:
        h = jnp.tanh(row @ w + h @ u)
    return h


@found
def numbers_of_their_own(x, w, u):
    h = x[0]
    for t in np.linspace(1, 0.1, 7):
        h = h - float(t) * (jax.nn.silu(h @ w + float(t)) @ u)
    return h


@found
def the_last_two(x, w, u):
    a, b = x[0], x[1]
    for _ in range(8):
        a, b = b, jnp.tanh(a @ w + b @ u) + 0.1 * a
    return a, b


@found
def two_products_that_alternate(x, w, u):
    v, s = jnp.abs(x[0]) + 1, jnp.abs(w) + 0.1
    for _ in range(6):
        r = 1 / (v @ s)
        v = 1 / (r @ s.T)
    return v


@found
def two_products_that_alternate_and_are_both_read(x, w, u):
    v, s = jnp.abs(x[0]) + 1, jnp.abs(w) + 0.1
    for _ in range(8):
        r = 1 / (v @ s)
        v = 1 / (r @ s.T)
    return r[:, :, None] * s.T * v[:, None]


@found
def descent(x, w, u):
    def loss(w, u):
        return ((jnp.tanh(x[0] @ w) @ u - x[1]) ** 2).mean()

    for _ in range(6):
        dw, du = jax.grad(loss, argnums=(0, 1))(w, u)
        w, u = w - 0.1 * dw, u - 0.1 * du
    return loss(w, u)


@found
def powers(x, w, u):
    v = x[0]
    for _ in range(7):
        v = v @ w
        v = v / jnp.sqrt((v * v).sum(-1, keepdims=True))
    return v * (x[0] @ w)


@found
def sums_alone(x, w, u):
    h = x[0]
    for _ in range(6):
        h = jnp.sin(h) * u[0] - h.max(0) + h.sum(1, keepdims=True) * 0.1
    return h


@found
def what_comes_of_the_last_step(x, w, u):
    h = x[0]
    for _ in range(6):
        h = jnp.tanh(h @ w)
        further = jnp.exp(h @ u) * 0.5
    return h, further


@found
def losses_of_each_step(x, w, u):
    h, loss = x[0], 0.0
    for t in range(9):
        h = jnp.tanh(h @ w + x[t] @ u)
        loss = loss + (h**2).mean()
    return loss


@found
def in_a_loop(x, w, u):
    def step(h, row):
        for _ in range(7):
            h = jnp.tanh(h @ w + row @ u)
        return h, h.sum()

    return lax.scan(step, x[0], x)


@found
def mapped(x, w, u):
    return jax.vmap(lambda w: a_cell(x, w, u))(jnp.stack([w, u, w + u]))


@pytest.mark.parametrize("name", FOUND)
def test_it_is_found_and_right(name):
    function = FOUND[name]
    assert applied(function, *arguments()) == 1
    assert compare(function, arguments(), gradients=False, ops=NAME).complaints == []


def test_half_steps_of_which_the_last_two_are_read_are_steps_together():
    """As of Sinkhorn's iterations, whose plan reads both scalings."""
    assert counts(two_products_that_alternate_and_are_both_read, *arguments()) == [[8]]


@pytest.mark.parametrize("name", ["a_cell", "descent", "losses_of_each_step", "numbers_of_their_own"])
def test_gradients_outside_are_right(name):
    assert compare(FOUND[name], arguments(), gradients=True, ops=NAME).complaints == []


def train_step(function, argnums):
    def loss(x, w, u):
        return sum((1.0 * y**2).mean() for y in jax.tree.leaves(function(x, w, u)))

    return jax.value_and_grad(loss, argnums=argnums)


@pytest.mark.parametrize("argnums", [(1, 2), (0, 1, 2)])
@pytest.mark.parametrize("name", FOUND)
def test_gradients_inside_are_right(name, argnums):
    step = train_step(FOUND[name], argnums)
    assert applied(step, *arguments()) >= (name != "every_other_slice")  # five steps, of whose backward three are alike
    assert compare(step, arguments(), gradients=False, ops=NAME).complaints == []


@pytest.mark.parametrize("name", ["a_cell", "gates_of_one_product", "descent", "numbers_of_their_own", "powers"])
def test_steps_and_their_backward_are_one_site(name):
    (passes,) = counts(train_step(FOUND[name], (1, 2)), *arguments())
    assert len(passes) == 2
    assert min(passes) >= 4


def test_stacks_pass_from_loop_to_loop():
    """The two loops read and write arrays of all steps, and nothing takes these apart and puts them together."""
    whole = autopallas.optimize(train_step(a_cell, (1, 2)), objective="always", ops=NAME)
    text = jax.jit(whole).lower(*arguments()).as_text()
    assert text.count("stablehlo.while") == 2
    assert text.count("stablehlo.tanh") <= 3


def test_loops_are_looked_for_where_all_sites_are_replaced_or_by_name():
    graph = Graph(flatten(jax.make_jaxpr(a_cell)(*arguments())))
    asked = {"time": None, "memory": None, "always": None, "by name": (NAME,)}
    kinds = {
        name: NAME in [match.spec.kind for match in find_all(graph, ops, True, name if ops is None else "time")[0]]
        for name, ops in asked.items()
    }
    assert kinds == {"time": False, "memory": False, "always": True, "by name": True}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_numbers(dtype):
    for function in (a_cell, train_step(a_cell, (1, 2))):
        assert compare(function, arguments(dtype), gradients=False, ops=NAME).complaints == []


def test_infinities_and_nans_stay_where_they_are():
    x, w, u = arguments()
    x = x.at[2, 0, 1].set(jnp.nan).at[4, 1, 0].set(jnp.inf)
    optimized = autopallas.optimize(a_cell_whose_states_are_read, objective="always", ops=NAME)
    # States of at most one are sums of terms of that size: near zero their roundings are not small beside them.
    np.testing.assert_allclose(
        optimized(x, w, u), jax.jit(a_cell_whose_states_are_read)(x, w, u), rtol=1e-5, atol=4 * jnp.finfo(x.dtype).eps
    )


def test_the_original_of_a_site_is_the_program():
    """What is measured in a site's place, and what is written instead, give what its equations give of any operands."""
    for function in (*FOUND.values(), train_step(a_cell, (1, 2)), train_step(descent, (1, 2))):
        for match in matches(function, *arguments())[0]:
            for own in match.passes:
                given = [
                    abs(random(*shape, seed=i)).astype(dtype) / 3 for i, (shape, dtype) in enumerate(own.spec.operands)
                ]
                wanted = jax.jit(jax.extend.core.jaxpr_as_fun(own.original))(*given)
                for kind in ("original", "respelt"):
                    run = partial(getattr(kind_named(NAME), kind), own.spec)
                    for a, b in zip(jax.jit(run)(*given), wanted, strict=True):
                        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)  # roundings of sums of five


OTHERS, other = registry()
"""Programs that look alike."""


@other
def layers_with_weights_of_their_own(x, w, u):
    h = x[0]
    weights = [w, u, w + u, w - u, w * u, u.T, w.T]
    for own in weights:
        h = jnp.tanh(h @ own)
    return h


@other
def layers_of_arguments(x, *weights):
    h = x[0]
    for own in weights * 1:
        h = jnp.tanh(h @ own)
    return h


@other
def sums_over_parameters_of_layers(x, w, u):
    layers = [{"w": w * k, "b": x[k], "u": u[:3] - k} for k in range(9)]
    return sum((a**2).sum() for a in jax.tree.leaves(layers))


@other
def the_largest_parameter_of_layers(x, w, u):
    largest = jnp.float32(0)
    for k in range(9):
        for a in (w * k, x[k], u[:3] - k):
            largest = jnp.maximum(largest, abs(a).max())
    return largest


@other
def three_steps(x, w, u):
    h = x[0]
    for t in range(3):
        h = jnp.tanh(x[t] @ w + h @ u)
    return h


@other
def side_by_side(x, w, u):
    return sum(jnp.tanh(x[t] @ w) @ u for t in range(9))


@other
def steps_of_the_last_three(x, w, u):
    a, b, c = x[0], x[1], x[2]
    for _ in range(9):
        a, b, c = b, c, jnp.tanh(a @ w + c @ u)
    return c


@other
def one_step_differs(x, w, u):
    h = x[0]
    for t in range(9):
        h = jnp.tanh(x[t] @ w + h @ u) if t != 4 else jnp.sin(x[t] @ w - h @ u)
    return h


@other
def weights_that_change_their_places(x, w, u):
    h = x[0]
    for t in range(9):
        h = jnp.tanh(x[t] @ (w if t % 3 else u) + h @ (u if t % 2 else w))
    return h


@other
def another_first_step(x, w, u):
    h, v = x[0], x[1]
    for _ in range(7):
        h, v = jnp.tanh(h @ w) * v + jnp.sin(x[2] @ u + v), v * 1.5
    return h


@other
def few_states_are_read(x, w, u):
    h, states = jnp.zeros((3, WIDTH), x.dtype), []
    for t in range(9):
        h = jnp.tanh(x[t] @ w + h @ u)
        if t == 4:
            states.append(h)
    return h, states


@other
def a_type_that_changes(x, w, u):
    h = x[0].astype(jnp.float16)
    for t in range(7):
        h = jnp.tanh(x[t] @ w + h @ u)
    return h


@other
def a_sort_between_steps(x, w, u):
    h = x[0]
    for t in range(7):
        h = jnp.sort(jnp.tanh(x[t] @ w + h @ u), axis=1) + 0.1 * h
    return h


@other
def what_earlier_states_become_outside(x, w, u):
    h, y = x[0], jnp.zeros_like(x)
    for t in range(7):
        h = jnp.tanh(y[t] @ w + h @ u)
        y = y.at[t + 1].set(h)
    return h, y


def operands_of(name):
    layers = [random(WIDTH, WIDTH, seed=i) / 3 for i in range(7)]
    return [arguments()[0], *layers] if name == "layers_of_arguments" else arguments()


@pytest.mark.parametrize("name", OTHERS)
def test_what_looks_alike_is_right(name):
    operands = operands_of(name)
    for function in (OTHERS[name], lambda x, *w: jax.grad(lambda *w: sum(
        y.astype(jnp.float32).sum() for y in jax.tree.leaves(OTHERS[name](x, *w))), argnums=(0, 1))(*w)):  # fmt: skip
        assert compare(function, operands, gradients=False, ops=NAME).complaints == []


@pytest.mark.parametrize(
    "name",
    [
        "layers_of_arguments", "three_steps", "side_by_side", "few_states_are_read", "a_sort_between_steps",
        "sums_over_parameters_of_layers", "the_largest_parameter_of_layers",
    ],
)  # fmt: skip
def test_what_is_left_alone(name):
    operands = (
        arguments() if name != "layers_of_arguments" else [arguments()[0], *(random(5, 5, seed=i) for i in range(6))]
    )
    assert counts(OTHERS[name], *operands) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [("few_states_are_read", "of few of many equal steps"), ("a_sort_between_steps", "can hold: sort")],
)
def test_a_near_miss_says_why(name, reason):
    _, misses = matches(OTHERS[name], *arguments())
    assert [reason in miss.reason for miss in misses] == [True]


def test_steps_in_a_loop_of_another_kind_say_nothing():
    x, w, u = arguments()

    def scanned(x, w, u):
        return lax.scan(lambda h, row: (jnp.tanh(row @ w + h @ u), None), x[0], x)[0]

    assert matches(scanned, x, w, u) == ([], [])


def test_many_steps_are_looked_at_in_the_time_that_it_takes_to_trace_them():
    """Each equation is looked at a bounded number of times: what is spent is proportional to the equations."""

    def spent(count):
        def cell(x, w, u):
            h = x[0]
            for _ in range(count):
                h = jnp.tanh(h @ w) + jnp.sin(h @ u)
            return h

        graph = Graph(flatten(jax.make_jaxpr(train_step(cell, (1, 2)))(*arguments())))
        before = graph.steps.spent
        chains = [chain for chain in find(graph) if not isinstance(chain, NearMiss)]
        assert len(chains) == 2
        return graph.steps.spent - before

    assert spent(160) < 5 * spent(40)


def activation(slope):
    @jax.custom_jvp
    def act(z):
        return jnp.tanh(z)

    act.defjvp(lambda given, moved: (act(given[0]), slope * moved[0] * (1 - act(given[0]) ** 2)))
    return act


def test_steps_whose_own_derivatives_differ_are_differentiated_each_by_its_own():
    """A site of steps and their backward, and a gradient around it."""
    acts = [activation(slope) for slope in (0.5, 2.0, 1.0)]

    def loss(x, w, u):
        h = x[0]
        for t in range(9):
            h = acts[t % 3 if t < 5 else 1](h @ w + x[t])
        return (h**2).sum()

    def around(step):
        return jax.grad(lambda x, w, u: sum((g**2).sum() for g in step(x, w, u)), argnums=(0, 1))

    step = jax.grad(loss, argnums=(0, 1))
    assert applied(step, *arguments()) >= 1
    optimized = autopallas.optimize(step, objective="always", strict=True, ops=NAME)
    for a, b in zip(around(optimized)(*arguments()), around(step)(*arguments()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * abs(b).max())  # roundings of sums of five


# ---------------------------------------------------------------------- beside other sites


def gated(x, w, u):
    h = jnp.zeros((3, WIDTH), x.dtype)
    for t in range(9):
        z = jax.nn.sigmoid(x[t] @ w - h @ u)
        h = z * h + (1 - z) * jnp.tanh(x[t] @ w + h @ u)
    return h


def test_no_equation_is_computed_by_two_sites_of_steps():
    """Steps apart keep their equations: nothing says that a loop of them gains more."""
    graph = Graph(flatten(jax.make_jaxpr(train_step(gated, (1, 2)))(*arguments())))
    found = [
        match for match in find_all(graph, ("respelling",), True)[0] if match.spec.kind in (NAME, "repeated_steps")
    ]
    equations = [id(node) for match in found for node in match.equations]
    assert found
    assert len(equations) == len({*equations})


def test_all_kinds_together_are_right():
    for function in (gated, FOUND["gates_of_one_product"], FOUND["descent"]):
        assert compare(train_step(function, (0, 1, 2)), arguments(), gradients=False, ops="respelling").complaints == []
