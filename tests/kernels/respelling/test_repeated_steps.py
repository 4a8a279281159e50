"""Respelling of equal steps that stand one after the other: what is found, what is left alone, and what it computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support.catalogue import registry
from support.compare import compare
from support.respellings import random

import autopallas
from autopallas.graph import Graph, flatten
from autopallas.kernels.respelling.operation import OPERATION
from autopallas.patterns.respelling import find
from autopallas.plan.decision import Decision
from autopallas.plan.nested_sites import without_nested
from autopallas.tuning.row import Row

NAME = "repeated_steps"
SHAPE = (6, 5)


def arguments(count=2, shape=SHAPE, dtype=jnp.float32):
    return [random(*shape, seed=seed, dtype=dtype) for seed in range(count)]


def sites(function, *operands, **options):
    """The number of runs that are respelt, alone."""
    optimized = autopallas.optimize(function, objective="always", strict=True, ops=NAME, **options)
    optimized(*operands)
    return optimized.report().counts()["respelling"]


def around(u):
    return jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) + jnp.roll(u, 1, 1) + jnp.roll(u, -1, 1)


FOUND, found = registry()


@found
def heat(u, v):
    for _ in range(6):
        u = u + 0.1 * (around(u) - 4 * u) + v
    return u


@found
def a_wave_of_the_last_two(u, v):
    for _ in range(7):
        u, v = 2 * u - v + 0.2 * (around(u) - 4 * u), u
    return u, v


@found
def a_wave_that_begins_at_rest(u, v):
    v = u
    for _ in range(7):
        u, v = 2 * u - v + 0.2 * (around(u) - 4 * u), u
    return u


@found
def rates_of_the_last_two_steps(u, v):
    def rate(u):
        return jnp.sin(u) * u + jnp.cos(u)

    before = rate(u)
    for _ in range(7):
        now = rate(u)
        u, before = u + 0.1 * (1.5 * now - 0.5 * before), now
    return u * v


@found
def what_comes_of_the_last_step(u, v):
    for _ in range(5):
        u = jnp.tanh(u * v + jnp.sin(u))
        further = u * 2 + v
    return u, further, u.sum(), u.astype(jnp.float16)


@found
def roots(u, v):
    x = jnp.ones_like(u)
    for _ in range(8):
        x = x - (x * x - jnp.exp(u)) / (2 * x + 1e-3)
    return x


@found
def integers(u, v):
    n = (u * 100).astype(jnp.int32)
    for _ in range(9):
        n = jnp.where(n % 2 == 0, n // 2, 3 * n + 1)
    return n


@found
def two_runs(u, v):
    for _ in range(5):
        u = jnp.sin(u) * v + jnp.cos(u) - 0.1 * u
    u = u @ jnp.ones((u.shape[1], u.shape[1]), u.dtype) / 9
    for _ in range(6):
        u = jnp.tanh(u + v) * jnp.exp(-u * u) + 0.3
    return u


@found
def within_a_loop(u, v):
    def step(u, _):
        for _ in range(5):
            u = u + 0.1 * (around(u) - 4 * u)
        return u, u.sum()

    return lax.scan(step, u, None, length=3)


@found
def mapped(u, v):
    return jax.vmap(lambda u: heat(u[None], 0.5)[0])(u)


@found
def a_step_that_is_jitted(u, v):
    step = jax.jit(lambda u: u + 0.1 * (around(u) - 4 * u) * v)
    for _ in range(5):
        u = step(u)
    return u


RUNS = {"two_runs": 2}


@pytest.mark.parametrize("name", FOUND)
def test_it_is_found_and_right(name):
    assert sites(FOUND[name], *arguments()) == RUNS.get(name, 1)
    compared = compare(FOUND[name], arguments(), gradients=False, ops=NAME)
    assert compared.complaints == []


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_numbers(dtype):
    assert compare(heat, arguments(dtype=dtype), gradients=False, ops=NAME).complaints == []


def test_infinities_and_nans_stay_where_they_are():
    u = np.array(arguments(1)[0])
    u[0, 0], u[2, 3], u[4, 1] = np.inf, -np.inf, np.nan
    optimized = autopallas.optimize(roots, objective="always", ops=NAME)
    np.testing.assert_allclose(optimized(u, u), jax.jit(roots)(u, u), rtol=1e-5)


def test_a_loop_takes_the_place_of_the_steps():
    def sines(function):
        return str(jax.make_jaxpr(function)(*arguments())).count(" sin ")

    def steps(u, v):
        for _ in range(40):
            u = u * 0.9 + jnp.sin(u) * v - 0.5
        return u

    whole = autopallas.optimize(steps, objective="always", ops=NAME)
    text = jax.jit(whole).lower(*arguments()).as_text()
    assert sines(steps) == 40
    assert text.count("stablehlo.sine") == 2
    assert text.count("stablehlo.while") == 1


def test_no_first_step_waits_for_a_search():
    """Steps that are written one after the other may take minutes to compile."""

    def waved(u, v):
        for _ in range(10):
            u, v = u + 0.1 * v, v + 0.1 * around(u)
        return u.sum() + v.sum()

    wide = [jax.ShapeDtypeStruct((2000, 3000), jnp.float32)] * 2
    found, _ = find(Graph(flatten(jax.make_jaxpr(jax.grad(waved))(*wide))), True)
    runs = [match.spec for match in found if match.spec.kind == NAME]
    assert {OPERATION.may_gain("xla", "time", spec, "cpu") for spec in runs} == {False}
    (sort,), _ = find(Graph(flatten(jax.make_jaxpr(jnp.sort)(wide[0]))), True)
    assert OPERATION.may_gain("xla", "time", sort.spec, "cpu")


OTHERS, other = registry()


@other
def a_number_for_each_step(u, v):
    for i in range(6):
        u = jnp.sin(u) * (1 + 0.1 * i) + jnp.cos(u) * v
    return u


@other
def an_operand_for_each_step(u, v):
    for i in range(6):
        u = jnp.sin(u) * v[i] + jnp.cos(u) + 0.1 * u
    return u


@other
def steps_of_the_last_three(u, v):
    a, b, c = u, v, u + v
    for _ in range(8):
        a, b, c = b, c, jnp.sin(a) * 0.5 + jnp.cos(c) * b + 0.1
    return c


@other
def alike_and_side_by_side(u, v):
    return [jnp.sin(x) * jnp.cos(x) + x * 0.5 for x in (u, v, u + v, u - v, u * v)]


@other
def one_step_differs(u, v):
    for i in range(6):
        w = jnp.sin(u) if i == 3 else jnp.cos(u)
        u = w * v + jnp.tanh(u) * 0.5
    return u


@other
def three_steps(u, v):
    for _ in range(3):
        u = jnp.tanh(u * v + jnp.sin(u)) + 0.1 * u
    return u


@other
def products(u, v):
    for _ in range(6):
        u = jnp.tanh(u @ (v.T @ u)) + jnp.sin(u) * 0.1
    return u


@other
def another_first_step(u, v):
    w = v
    for _ in range(6):
        u, w = jnp.sin(u) * w + jnp.cos(v) * u + jnp.tanh(w), v * 1.5
    return u


@other
def shapes_that_change(u, v):
    for _ in range(5):
        u = jnp.sin(u[:, :-1] if u.shape[1] > 1 else u) * 0.5 + 0.1
    return u


@other
def a_type_that_changes(u, v):
    x = u.astype(jnp.float16)
    for _ in range(5):
        x = (jnp.sin(x).astype(jnp.float32) + v * 0.5 + jnp.cos(x)) * 1.5
    return x


@pytest.mark.parametrize("name", OTHERS)
def test_what_looks_alike_is_right(name):
    compared = compare(OTHERS[name], arguments(), gradients=False, ops=NAME)
    assert compared.complaints == []


LEFT_ALONE = ("alike_and_side_by_side", "three_steps", "products")


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_left_alone(name):
    assert sites(OTHERS[name], *arguments()) == 0


@pytest.mark.parametrize("name", ["heat", "what_comes_of_the_last_step", "rates_of_the_last_two_steps"])
def test_gradients_are_right(name):
    compared = compare(FOUND[name], arguments(), gradients=True, ops=NAME)
    assert compared.complaints == []


def test_an_intermediate_that_is_read_elsewhere():
    def steps(u, v):
        for i in range(6):
            u = jnp.sin(u) * v + jnp.cos(u)
            if i == 2:
                kept = u
        return u, kept

    assert sites(steps, *arguments()) == 0, "the compiler computes no step anew that it stores"


def test_devices_with_parts():
    mesh = Mesh(np.array(jax.devices()[:1]), ("i",))

    def parts(u, v):
        return jax.shard_map(heat, mesh=mesh, in_specs=(P("i"), P("i")), out_specs=P("i"))(u, v)

    operands = arguments()
    optimized = autopallas.optimize(parts, objective="always")
    np.testing.assert_allclose(optimized(*operands), jax.jit(parts)(*operands), rtol=1e-5, atol=1e-6)


def planned(function, operands, gains):
    """The kinds that are left of what is found, each applied with a gain, or without evidence."""
    graph = Graph(flatten(jax.make_jaxpr(function)(*operands)))
    matches = [match for match in find(graph, assume_finite=True)[0] if match.spec.kind in gains]
    assert {match.spec.kind for match in matches} == set(gains)
    rows = {kind: gain and Row((), 1.0, gain, 0, 0, "measured", "", "") for kind, gain in gains.items()}
    decisions = [Decision("applied", "", "cpu", evidence=rows[match.spec.kind]) for match in matches]
    found = zip(*without_nested(graph, matches, decisions), strict=True)
    return {match.spec.kind for match, decision in found if decision.verdict == "applied"}


def sines(u, v):
    for _ in range(6):
        u = jnp.sin(u) * v + jnp.cos(u) * 0.5
    return u


def sines_in_a_loop(u, v):
    def step(u, _):
        return jnp.sin(u) * v + jnp.cos(u) * 0.5, None

    return lax.scan(step, u, None, length=32, unroll=8)[0]


@pytest.mark.parametrize(("function", "kind"), [(sines, NAME), (sines_in_a_loop, "unrolled_scan")])
def test_either_the_loop_or_what_is_within_its_steps_is_replaced(function, kind):
    """The one that gains more: a loop of the steps has none of the others' replacements."""
    operands = arguments(shape=(64, 512))
    assert planned(function, operands, {kind: None, "elementwise": None}) == {kind}
    assert planned(function, operands, {kind: 20.0, "elementwise": 4.0}) == {kind}
    assert planned(function, operands, {kind: 1.5, "elementwise": 4.0}) == {"elementwise"}
    assert planned(function, operands, {kind: None, "elementwise": 4.0}) == {"elementwise"}
    assert planned(function, operands, {kind: 1.5, "elementwise": 1.1}) == {kind}
    assert compare(function, operands, gradients=False).complaints == []


def test_what_is_a_small_part_of_the_steps_does_not_decide():
    def step(u, v):
        for _ in range(6):
            u = ((((u + v) * u - v) * u + v) * u - v) * 0.1 + jnp.sin(u[:1])
        return u

    operands = arguments(shape=(512, 4096))
    assert planned(step, operands, {NAME: 1.5, "elementwise": 4.0}) == {NAME}


# ---------------------------------------------------------------------- steps apart

APART, apart = registry()
"""Programs with runs of which more is read than what the last step gives."""


def laplacian(u):
    return around(u) - 4 * u


def wave(steps):
    """What a wave that spreads at a speed of each place is at one row, after each step."""

    def rows(c, u):
        v, found = u, []
        for _ in range(steps):
            u, v = 2 * u - v + c * laplacian(u), u
            found.append(u[2])
        return jnp.stack(found)

    return rows


@apart
def a_trajectory(u, v):
    places = []
    for _ in range(6):
        u = u + 0.1 * laplacian(u) * v
        places.append(u)
    return jnp.stack(places)


@apart
def a_trajectory_in_a_loop(u, v):
    return lax.scan(lambda u, _: (a_trajectory(u, v)[-1], a_trajectory(u, v)), u, None, length=3)


@apart
def many_trajectories(u, v):
    return jax.vmap(lambda k: a_trajectory(u, v * k))(jnp.arange(3.0))


@apart
def rates_that_differ(u, v):
    places = []
    for rate in np.linspace(0.05, 0.15, 7):
        u = u + float(rate) * laplacian(u)
        places.append(u * v)
    return sum(places)


@apart
def sources_that_differ(u, v):
    for i in range(6):
        u = u + 0.1 * laplacian(u) + v[i]
    return u


@apart
def each_step_added_to_a_loss(u, v):
    loss = 0.0
    for _ in range(6):
        u = u + 0.1 * laplacian(u)
        loss = loss + (u - v) ** 2
    return loss.mean()


@apart
def a_gradient_by_the_speeds_of_a_wave(u, v):
    return jax.value_and_grad(lambda c: ((wave(8)(c, v) - 0.5) ** 2).mean())(u)


@apart
def a_gradient_by_two_arrays(u, v):
    return jax.grad(lambda u, v: (a_trajectory(u, v) ** 2).mean(), argnums=(0, 1))(u, v)


@apart
def a_gradient_of_gated_units(u, v):
    def loss(w, x):
        h = jnp.zeros((3, 5))
        total = 0.0
        for t in range(x.shape[0]):
            g = jnp.tanh(x[t] + h @ w)
            z = jax.nn.sigmoid(x[t] - h @ w)
            h = z * h + (1 - z) * g
            total = total + (h**2).sum()
        return total

    return jax.value_and_grad(loss, argnums=(0, 1))(jnp.tanh(v[:5]), jnp.stack([u[:3] * 0.1 * t for t in range(8)]))


BACKWARDS = {"a_gradient_by_the_speeds_of_a_wave": 2, "a_gradient_by_two_arrays": 2}


@pytest.mark.parametrize("name", APART)
def test_steps_of_which_more_is_read_are_found_and_right(name):
    assert sites(APART[name], *arguments()) == BACKWARDS.get(name, 1)
    assert compare(APART[name], arguments(), gradients=False, ops=NAME).complaints == []


@pytest.mark.parametrize("name", ["a_trajectory", "each_step_added_to_a_loss", "sources_that_differ"])
def test_gradients_of_steps_apart_are_right(name):
    assert compare(APART[name], arguments(), gradients=True, ops=NAME).complaints == []


def states_that_are_stored_in_any_case(u, v):
    sums = []
    for _ in range(6):
        u = jnp.sin(u + 0.1 * laplacian(u)) * v
        sums.append(u.sum())
    return u, jnp.stack(sums)


def states_that_are_returned(u, v):
    states = []
    for _ in range(6):
        u = u + 0.1 * laplacian(u) * v
        states.append(u)
    return states


def layers_with_weights_of_their_own(u, v):
    for i in range(6):
        u = u + jnp.tanh(u @ (v[:5] * (i + 1))) + jnp.roll(u, 1, 0)
    return u, u[0]


def running_sums(u, v):
    found = []
    for i in range(8):
        u = u + jnp.sin(v * i)
        found.append(u)
    return jnp.stack(found)


STORED = (
    states_that_are_stored_in_any_case, states_that_are_returned, layers_with_weights_of_their_own, running_sums,
)  # fmt: skip


@pytest.mark.parametrize("function", STORED, ids=lambda function: function.__name__)
def test_what_the_compiler_does_not_compute_anew_is_left_alone(function):
    assert sites(function, *arguments()) == 0


def test_each_step_stands_in_a_branch():
    whole = autopallas.optimize(APART["a_trajectory"], objective="always", ops=NAME)
    text = jax.jit(whole).lower(*arguments()).as_text()
    assert text.count("stablehlo.case") == 6
    assert text.count("stablehlo.concatenate") <= 6 * 4 + 1, "no step is computed a second time"


def test_what_reads_its_own_steps_from_outside_is_no_operand():
    """A product of two states lies between two steps: what it gives is no operand of one site of both."""

    def steps(u, v):
        for _ in range(6):
            w = u @ u.T
            u = jnp.sin(u + 0.1 * laplacian(u)) + w[:, :5]
        return u, u * v

    assert sites(steps, *arguments()) == 0
    assert compare(steps, arguments(), gradients=False, ops=NAME).complaints == []
