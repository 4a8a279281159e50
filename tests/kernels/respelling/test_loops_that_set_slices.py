"""Forwards of loops that set slices, and stack what their backwards need."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compare import compare
from support.indexed_loops import loops, only_sets
from support.respellings import random

import autopallas
from autopallas.graph import Graph, flatten
from autopallas.patterns import find

T, D = 9, 4


def forward(function):
    """The results of a function, and all that its backward needs."""

    def run(*given):
        results, pull = jax.vjp(function, *given)
        return results, jax.tree.leaves(pull)

    return run


def _fori(place, start=0, length=T, count=T, first=jnp.zeros):
    def run(a, x):
        def step(i, carried):
            h, y = carried
            h = jnp.tanh(a * h + x[i])
            return h, place(y, i, h)

        return lax.fori_loop(start, start + length, step, (x[0], first((count, D), x.dtype)))

    return run


def _set(y, i, h):
    return y.at[i].set(h)


def _reversed(a, x):
    def step(carried, i):
        h, y = carried
        h = jnp.tanh(a * h + x[i])
        return (h, y.at[i].set(h)), h * x[i]

    return lax.scan(step, (x[0], jnp.ones_like(x)), jnp.arange(T, dtype=jnp.int8), reverse=True)


def _counted(a, x):
    """The counter is carried, goes up by 2, and is a result."""

    def step(carried, _):
        i, h, y = carried
        h = jnp.sin(a * h + x[i // 2])
        return (i + 2, h, y.at[:, i].set(h)), (h, i)

    return lax.scan(step, (1, x[0], jnp.ones((D, 2 * T + 1), x.dtype)), None, T)


def _several(a, x):
    def step(i, carried):
        h, y, z, whole = carried
        h = jnp.tanh(a * h + x[i])
        z = lax.dynamic_update_slice(z, (h * h)[None], (T - 1 - i, 0))
        return h, y.at[i].set(h).at[i].set(jnp.sin(h)), z, whole.at[i // 2].set(h)

    return lax.fori_loop(0, T, step, (x[0], *[jnp.cos(x)] * 3))


def _nested(a, x):
    def outer(i, carried):
        h, y = carried

        def inner(j, carried):
            h, z = carried
            h = jnp.tanh(a * h + x[i])
            return h, z.at[j].set(h)

        h, z = lax.fori_loop(0, 3, inner, (h, jnp.zeros((3, D), x.dtype)))
        return h, y.at[i].set(z.sum(0))

    return lax.fori_loop(0, T, outer, (x[0], jnp.zeros_like(x)))


FORWARDS = {
    "set": (_fori(_set), 1),
    "rows that no step sets": (_fori(_set, 2, T - 3, T + 2, jnp.ones), 1),
    "clipped, in range": (_fori(lambda y, i, h: y.at[i].set(h, mode="clip")), 1),
    "dynamic_update_slice": (_fori(lambda y, i, h: lax.dynamic_update_slice_in_dim(y, h[None], i, 0)), 1),
    "negative positions": (_fori(lambda y, i, h: y.at[i - T].set(h)), 1),
    "the mirrored row": (_fori(lambda y, i, h: y.at[T - 1 - i].set(h)), 1),
    "reversed, small integers": (_reversed, 1),
    "a counter that is carried": (_counted, 1),
    "several arrays, one of them twice, one of them as it is": (_several, 1),
    "nested": (_nested, 2),
    "compiled by itself": (jax.jit(_fori(_set)), 1),
    "checkpointed": (jax.checkpoint(_fori(_set)), 0),
    "mapped": (jax.vmap(_fori(_set), (0, None)), 1),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_that_sets_slices_gives_them_and_what_its_backward_needs(name, dtype):
    function, sites = FORWARDS[name]
    with jax.enable_x64(dtype == "float64"):
        a, x = random(*((2, D) if name == "mapped" else (D,)), dtype=dtype), random(T, D, seed=1, dtype=dtype)
        run = forward(function)
        found = loops(run, a, x)
        assert [only_sets(loop) for loop in found] == [True] * sites
        optimized = autopallas.optimize(run, objective="always", ops="indexed_loop", strict=True)
        wanted, given = jax.tree.leaves(jax.jit(run)(a, x)), jax.tree.leaves(optimized(a, x))
        tolerance = {"float32": 1e-6, "bfloat16": 1e-2, "float64": 1e-14}[dtype]  # steps are fused otherwise
        for one, other in zip(wanted, given, strict=True):
            assert (one.dtype, one.weak_type) == (other.dtype, other.weak_type)
            exact = not jnp.issubdtype(one.dtype, jnp.floating)
            one, other = (np.asarray(v, None if exact else np.float64) for v in (one, other))
            np.testing.assert_allclose(one, other, rtol=0, atol=0 if exact else tolerance)
        assert optimized.report().counts().get("respelling", 0) == min(sites, 1)  # of loops in loops the outermost


def test_positions_are_neither_stacked_nor_computed_in_each_step():
    a, x = random(D), random(T, D, seed=1)
    (site,) = find(Graph(flatten(jax.make_jaxpr(forward(_fori(_set)))(a, x))), ("indexed_loop",), True)[0]
    loop, given = dict(site.spec.parameters)["loop"], [jnp.zeros(t.shape, t.dtype) for t in site.original.in_avals]
    scan = next(e for e in jax.make_jaxpr(loop.by_slices)(given).eqns if e.primitive.name == "scan")
    assert all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in scan.outvars if v.aval.shape[:1] == (T,))
    names = {e.primitive.name for e in scan.params["jaxpr"].jaxpr.eqns}
    assert names.isdisjoint({"scatter", "gather", "dynamic_slice", "dynamic_update_slice", "select_n"})


@pytest.mark.parametrize("length", [0, 1])
def test_forwards_of_no_step_and_of_one(length):
    function = forward(_fori(_set, 1, length))
    a, x = random(D), random(T, D, seed=1)
    assert loops(function, a, x) == []
    optimized = autopallas.optimize(function, objective="always", ops="indexed_loop", strict=True)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(function)(a, x), optimized(a, x))


def _in_turn(y, i, h):
    """Reads the row that the step before set, from the array that it sets."""
    return y.at[i].set(h + y[i // 2])


KEPT = {
    "a step that reads another row": _fori(_in_turn),
    "positions beyond the end, which are dropped": _fori(lambda y, i, h: y.at[i + 1].set(h)),
    "the last rows are one": _fori(lambda y, i, h: y.at[jnp.minimum(i, T - 2)].set(h)),
    "moved into the array": _fori(lambda y, i, h: lax.dynamic_update_slice_in_dim(y, h[None], i + 2, 0)),
    "negative positions that wrap around": _fori(lambda y, i, h: y.at[i - 2].set(h), count=T - 2),
    "a position of data": _fori(lambda y, i, h: y.at[jnp.int32(jnp.abs(h[0]) * T)].set(h)),
    "a part of the row": _fori(lambda y, i, h: y.at[i, 1:].set(h[1:])),
    "elements of it": _fori(lambda y, i, h: y.at[i, jnp.arange(D)].set(h)),
    "a position of its own in each example": lambda a, x: jax.vmap(
        lambda s: lax.fori_loop(0, T - 2, lambda i, c: (jnp.tanh(a * c[0]), _set(c[1], i + s, c[0])), (x[0], x))
    )(jnp.arange(2)),
    "in one of two branches": _fori(lambda y, i, h: lax.cond(h[0] > 0, lambda: y.at[i].set(h), lambda: y)),
    "the whole array is read": _fori(lambda y, i, h: y.at[i].set(h + y.sum(0))),
}


@pytest.mark.parametrize("name", KEPT)
def test_forwards_that_set_other_rows_carry_the_array_on(name):
    function, (a, x) = KEPT[name], (random(D), random(T, D, seed=1))
    assert loops(forward(function), a, x) == []
    loss = lambda a, x: sum(jnp.sum(jnp.sin(v)) for v in jax.tree.leaves(function(a, x)))  # noqa: E731
    assert compare(jax.value_and_grad(loss, (0, 1)), (a, x), gradients=False).complaints == []


def test_loops_that_set_slices_and_compile_several_steps_as_one_are_left_to_the_kind_that_is_of_those():
    def run(a, x):
        def step(carried, i):
            h, y = carried
            h = jnp.tanh(a * h + x[i])
            return (h, y.at[i].set(h)), h

        return lax.scan(step, (x[0], jnp.zeros_like(x)), jnp.arange(8), unroll=4)

    a, x = random(D), random(8, D, seed=1)
    sites = find(Graph(flatten(jax.make_jaxpr(run)(a, x))), ("respelling",), True)[0]
    assert [site.spec.kind for site in sites] == ["unrolled_scan"]
    assert [only_sets(loop) for loop in loops(run, a, x)] == [True]
    optimized = autopallas.optimize(run, objective="always", strict=True)
    for one, other in zip(jax.tree.leaves(jax.jit(run)(a, x)), jax.tree.leaves(optimized(a, x)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert optimized.report().counts() == {"respelling": 1}
