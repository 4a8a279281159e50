"""Loops that index arrays at their own step, under grad: what becomes a loop over slices, and what has to stay."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from support.compare import compare
from support.indexed_loops import judged, loops, only_sets
from support.respellings import random
from support.tiers import examples

import autopallas
from autopallas.graph import Graph, flatten
from autopallas.kernels.respelling.kinds.indexed_loop import KIND
from autopallas.patterns import find
from autopallas.workbench.cases import only_match

T, D = 9, 4


def written(step, count=T, start=0):
    """A loop with ``step(i, h, x) -> h`` that writes its states."""

    def run(a, x):
        def body(i, carried):
            h, results = carried
            h = step(i, a, h, x)
            return h, results.at[i - start].set(h)

        first = jnp.zeros(x.shape[1:], x.dtype), jnp.zeros((count, *x.shape[1:]), x.dtype)
        return jnp.sum(jnp.sin(lax.fori_loop(start, start + count, body, first)[1]))

    return run


STEPS = {
    "x[i]": lambda i, a, h, x: a * h + x[i],
    "x[T-1-i]": lambda i, a, h, x: a * h + x[x.shape[0] - 1 - i],
    "x[i] and x[i-1]": lambda i, a, h, x: a * h + x[i] * x[jnp.maximum(i - 1, 0)],
    "x[i+1], clamped": lambda i, a, h, x: jnp.tanh(a * h) + x[jnp.minimum(i + 1, x.shape[0] - 1)],
    "x[2i]": lambda i, a, h, x: a * h + lax.dynamic_index_in_dim(x, 2 * i, 0, keepdims=False),
    "lax, clamped below": lambda i, a, h, x: a * h + lax.dynamic_slice_in_dim(x, i - 3, 1, 0)[0],
    "negative": lambda i, a, h, x: a * h + x[i - x.shape[0]],
    "twice": lambda i, a, h, x: x[i] * jnp.tanh(a * h + x[i]),
    "a nonlinear step": lambda i, a, h, x: jnp.tanh(h @ jnp.outer(a, a)) + jnp.exp(-(x[i] ** 2)),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_gradient_that_is_zero_but_for_slices_is_put_together_after_the_loop(name):
    (loop,) = judged(written(STEPS[name]), random(D), random(T, D, seed=1))
    assert len(loop.sums) == 1
    assert len(loop.tables) == 1  # the cotangent of what is written


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("start", [0, 3])
def test_dtypes_and_loops_that_begin_later(dtype, start):
    a, x = random(D, dtype=dtype), random(T + 4, D, seed=1, dtype=dtype)
    judged(written(STEPS["x[i]"], T, start), a, x)


def test_slices_of_bfloat16_are_stacked_as_bits():
    step = jax.grad(written(STEPS["twice"]), (0, 1))
    a, x = (random(*shape, seed=1, dtype=jnp.bfloat16).at[0].set(jnp.nan) for shape in ((D,), (T, D)))
    optimized = autopallas.optimize(step, objective="always", ops="indexed_loop")
    for found, expected in zip(optimized(a, x), jax.jit(step)(a, x), strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))
    for site in find(Graph(flatten(jax.make_jaxpr(step)(a, x))), ("indexed_loop",), True)[0]:
        loop, given = dict(site.spec.parameters)["loop"], [jnp.zeros(t.shape, t.dtype) for t in site.original.in_avals]
        scan = next(e for e in jax.make_jaxpr(loop.by_slices)(given).eqns if e.primitive.name == "scan")
        slices = [v.aval.dtype for v in scan.outvars if v.aval.shape[:1] == (T,)]
        assert slices
        assert jnp.bfloat16 not in slices


def test_a_scan_over_numbers_of_steps():
    def run(a, x):
        def step(h, i):
            h = jnp.tanh(a * h) + x[i]
            return h, h * x[x.shape[0] - 1 - i]

        return jnp.sum(lax.scan(step, jnp.zeros(D), jnp.arange(x.shape[0]))[1])

    (loop,) = judged(run, random(D), random(T, D, seed=1))
    assert [len(places) for _, places in loop.sums] == [2]


@pytest.mark.parametrize("unroll", [2, 4, T])
def test_unrolled_and_reversed_scans(unroll):
    def run(a, x):
        def step(h, i):
            h = jnp.tanh(a * h) + x[i]
            return h, h

        given = jnp.zeros(D), jnp.arange(x.shape[0])
        return jnp.sum(lax.scan(step, *given, reverse=True, unroll=unroll)[1] ** 2)

    judged(run, random(D), random(T, D, seed=1))


def test_other_axes():
    def run(a, x):
        def body(i, carried):
            h, results = carried
            h = a * h + x[:, i]
            return h, results.at[:, i].set(h)

        return jnp.sum(jnp.sin(lax.fori_loop(0, T, body, (jnp.zeros(D), jnp.zeros((D, T))))[1]))

    judged(run, random(D), random(D, T, seed=1))


def test_under_vmap_remat_and_in_layers():
    plain = written(STEPS["a nonlinear step"])
    x = random(3, T, D, seed=1)
    judged(lambda a, x: jnp.sum(jax.vmap(plain, (None, 0))(a, x)), random(D), x)
    judged(lambda a, x: jnp.sum(jax.vmap(plain)(a, x)), random(3, D), x)
    judged(jax.checkpoint(plain), random(D), x[0])

    def layers(a, x):
        return lax.scan(lambda x, a: (x + jnp.cos(x) * plain(a, x), None), x, a)[0].sum()

    judged(layers, random(3, D), x[0])


def test_a_sum_that_the_program_writes_itself():
    def run(x):
        def step(total, i):
            return total + jnp.zeros((T, D)).at[i].set(jnp.sin(x[i])), None

        return lax.scan(step, jnp.ones((T, D)), jnp.arange(T))[0]

    assert len(loops(run, random(T, D))) == 1
    assert compare(run, (random(T, D),), gradients=False).complaints == []


def test_infinities_and_nan_stay_where_they_are():
    x = random(T, D, seed=1).at[2, 1].set(jnp.inf).at[5, 0].set(jnp.nan)
    run = jax.grad(written(lambda i, a, h, x: a + x[i] * x[i]), (0, 1))
    wanted, found = jax.jit(run)(random(D), x), autopallas.optimize(run, objective="always", strict=True)(random(D), x)
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_second_derivatives():
    plain = written(STEPS["twice"])

    def run(a, x):
        return jnp.sum(jax.grad(plain, 1)(a, x) ** 2)

    assert compare(jax.value_and_grad(run, (0, 1)), (random(D), random(T, D, seed=1)), gradients=False).complaints == []
    assert compare(jax.grad(plain, 1), (random(D), random(T, D, seed=1))).complaints == []


# ---------------------------------------------------------------------- what has to stay as it is


def _reads_its_results(a, x):
    """Steps read what steps that are no fixed number before them wrote: the loop goes on carrying it."""

    def body(i, results):
        return results.at[i].set(a * results[i // 2] + x[i])

    return jnp.sum(jnp.sin(lax.fori_loop(0, T, body, jnp.zeros((T, D)))))


def _reads_the_mirrored(a, x):
    def body(i, results):
        return results.at[i].set(a * results[T - 1 - i] + x[i])

    return jnp.sum(jnp.sin(lax.fori_loop(0, T, body, jnp.ones((T, D)))))


def _reads_the_first(a, x):
    def body(i, results):
        return results.at[i].set(a * results[i - 1] * results[0] + x[i])

    return jnp.sum(jnp.sin(lax.fori_loop(1, T, body, jnp.ones((T, D)))))


def _reads_far_back(a, x):
    def body(i, results):
        return results.at[i].set(a * results[i - 11] + x[i])

    return jnp.sum(jnp.sin(lax.fori_loop(11, 24, body, jnp.ones((24, D)))))


def _reads_a_sum(a, x):
    """A sum whose slices decide what is added next."""

    def step(carried, i):
        total, h = carried
        h = jnp.tanh(a * h + x[i]) + total.mean(0)
        return (total + jnp.zeros((T, D)).at[i].set(h), h), None

    return jnp.sum(lax.scan(step, (jnp.zeros((T, D)), jnp.zeros(D)), jnp.arange(T))[0][0])


def test_what_is_read_by_other_steps_is_carried_on():
    for function in (_reads_its_results, _reads_the_mirrored, _reads_the_first, _reads_far_back):
        (loop,) = judged(function, random(D), random(24 if function is _reads_far_back else T, D, seed=1))
        assert (len(loop.sums), len(loop.tables)) == (1, 0)
    (loop,) = judged(_reads_a_sum, random(D), random(T, D, seed=1))
    assert loop.carried > len(loop.sums) + len(loop.tables)


def _by_state(a, x):
    """The position depends on what is carried."""

    def step(carried, _):
        h, i = carried
        h = jnp.tanh(a * h + x[i])
        return (h, jnp.int32(8 * h[0] ** 2)), h

    return jnp.sum(lax.scan(step, (jnp.zeros(D), jnp.int32(0)), None, T)[1])


def _by_argument(ids, a, x):
    def step(h, i):
        h = jnp.tanh(a * h + x[ids[i]])
        return h, h

    return jnp.sum(lax.scan(step, jnp.zeros(D), jnp.arange(T))[1])


def _of_two_axes(a, x):
    def step(h, i):
        h = jnp.tanh(a * h + x[i, i % 2])
        return h, h

    return jnp.sum(lax.scan(step, jnp.zeros(D), jnp.arange(T))[1])


def _dropped(a, x):
    """Slices beyond the end are dropped, and read as NaN's place, zero."""

    def step(h, i):
        h = jnp.tanh(a * h + x.at[i + 2].get(mode="fill", fill_value=0.0))
        return h, h

    return jnp.sum(lax.scan(step, jnp.zeros(D), jnp.arange(T))[1])


@pytest.mark.parametrize("refused", [_by_state, _of_two_axes, _dropped])
def test_positions_that_are_not_known_or_out_of_range_are_left_alone(refused):
    x = random(T, 2, D, seed=1) if refused is _of_two_axes else random(T, D, seed=1)
    judged(refused, random(D), x, sites=0)


def test_positions_from_an_argument_are_left_alone():
    ids = jnp.arange(T)[::-1]
    judged(partial(_by_argument, ids), random(D), random(T, D, seed=1))  # a captured array is known
    judged(_by_argument, ids, random(D), random(T, D, seed=1), sites=0, argnums=(1, 2))


def summed(function):
    return lambda a, x: jnp.sum(jnp.sin(function(a, x).astype(jnp.float32)))


def _sets(a, x):
    def step(i, carried):
        h, results = carried
        h = jnp.tanh(a * h + 0.1)
        return h, results.at[i].set(h)

    return lax.fori_loop(0, T, step, (x[0], jnp.zeros_like(x)))[1]


def _solves(a, x):
    """Euler's method, with an array of all states."""
    step = lambda i, states: states.at[i + 1].set(states[i] + 0.1 * jnp.tanh(a * states[i]))  # noqa: E731
    return lax.fori_loop(0, T - 1, step, jnp.zeros_like(x).at[0].set(x[0]))


def _replaces(a, x):
    return lax.fori_loop(1, T, lambda i, x: x.at[i].set(a * x[i - 1] + jnp.sin(x[i])), x)


def _sets_two(a, x):
    def step(i, carried):
        h, results, others = carried
        h = a * h + 0.1
        return h, results.at[i].set(h), others.at[:, T - 1 - i].set(jnp.sin(h))

    first = x[0], jnp.zeros_like(x), jnp.zeros_like(x.T)
    _, results, others = lax.fori_loop(0, T, step, first)
    return results * others.T


@pytest.mark.parametrize(
    ("function", "sites"),  # what sets and reads an array is copied in the forward too
    [(_sets, 1), (_solves, 2), (_replaces, 2), (_sets_two, 1)],
    ids=["sets", "solves", "replaces", "sets two"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_that_a_loop_sets_are_not_copied_in_each_step_of_their_gradient(function, sites, dtype):
    judged(summed(function), random(D).astype(dtype), random(T, D, seed=1).astype(dtype), sites=sites)


def test_they_are_found_under_vmap_and_in_layers():
    def layers(a, x):
        return lax.scan(lambda x, a: (jax.checkpoint(_solves)(a, x), None), x, a)[0]

    judged(summed(jax.vmap(_solves, (None, 0))), random(D), random(3, T, D, seed=1), sites=2)
    judged(summed(layers), random(2, D), random(T, D, seed=1), sites=2)


def test_a_loop_without_whole_sums_is_left_alone():
    def run(a, x):
        def body(i, carried):
            h, results = carried
            h = a * h + x[i]
            return h, results.at[i].set(h)

        return lax.fori_loop(0, T, body, (jnp.zeros(D), jnp.zeros((T, D))))

    assert loops(run, random(D), random(T, D)) == []


def test_parts_for_each_device_are_left_alone():
    def gradients(decay, x):
        return jax.grad(lambda *given: jnp.sum(jnp.sin(_running(*given))), (0, 1))(decay, x)

    def _running(decay, x):
        def step(i, carried):
            state, results = carried
            state = decay * state + x[i]
            return state, results.at[i].set(state)

        return lax.fori_loop(0, len(x), step, (jnp.zeros_like(x[0]), jnp.zeros_like(x)))[1]

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    rows, columns = jax.P("i"), jax.P(None, "i")
    parts = jax.shard_map(gradients, mesh=mesh, in_specs=(rows, columns), out_specs=(rows, columns))
    optimized = autopallas.optimize(parts, objective="always", strict=True, ops="indexed_loop")
    given = random(D), random(T, D, seed=1)
    for found, expected in zip(optimized(*given), jax.jit(parts)(*given), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_site_inside_the_loop_is_not_lost():
    """Layers whose weights are indexed: the loop stays a loop of attentions where these are replaced."""

    def run(w, x):
        def body(i, x):
            q = x @ w[i]
            probabilities = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, x), -1)
            return x + jnp.einsum("bts,bsd->btd", probabilities, x)

        return jnp.sum(lax.fori_loop(0, 3, body, x) ** 2)

    w, x = random(3, D, D), random(2, T, D, seed=1)
    step = jax.value_and_grad(run, (0, 1))
    assert len(loops(step, w, x)) == 1
    optimized = autopallas.optimize(step, objective="always", strict=True, ops="-product")
    for one, other in zip(jax.tree.leaves(jax.jit(step)(w, x)), jax.tree.leaves(optimized(w, x)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    applied = {site.op for site in optimized.report().sites if site.verdict == "applied"}
    assert applied == {"attention"}
    alone = autopallas.optimize(step, objective="always", strict=True, ops={"respelling"})
    for one, other in zip(jax.tree.leaves(jax.jit(step)(w, x)), jax.tree.leaves(alone(w, x)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert alone.report().counts()["respelling"] >= 1


@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(
    st.integers(2, 7), st.integers(-3, 3), st.sampled_from([1, -1, 2]), st.sampled_from(["int8", "int32", "uint8"]),
    st.booleans(), st.sampled_from(["index", "slice", "fill", "clip"]),
)  # fmt: skip
def test_any_affine_position(steps, shift, factor, dtype, reverse, form):
    """Reads at ``factor * i + shift``, in range or not, counted in small integers too."""

    def run(a, x):
        def step(h, i):
            at = factor * i + jnp.asarray(shift % 256 if dtype == "uint8" else shift, dtype)
            if form == "index":
                row = x[at]
            elif form == "slice":
                row = lax.dynamic_slice_in_dim(x, at, 1, 0)[0]
            else:
                row = x.at[at].get(mode=form)
            h = jnp.tanh(a * h) + jnp.nan_to_num(row)
            return h, h

        numbers = jnp.arange(steps, dtype=dtype)
        return jnp.sum(lax.scan(step, jnp.zeros(D), numbers, reverse=reverse)[1] ** 2)

    a, x = random(D), random(6, D, seed=1)
    step = jax.value_and_grad(run, (0, 1))
    optimized = autopallas.optimize(step, objective="always", strict=True)
    for one, other in zip(jax.tree.leaves(jax.jit(step)(a, x)), jax.tree.leaves(optimized(a, x)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_loops_are_told_apart_by_every_digit_of_what_they_begin_with():
    def scaled(first, x):
        def step(carried, i):
            factor, results = carried
            return (0.9 * factor, results + jnp.zeros_like(results).at[i].set(x[i] * jnp.cos(factor))), None

        return jax.lax.scan(step, (first, jnp.zeros_like(x)), jnp.arange(T))[0][1]

    with jax.enable_x64(True):
        x = random(T, D, dtype=jnp.float64)
        function = autopallas.optimize(lambda x: [scaled(c, x) for c in (1.0, 1.0 + 1e-9)], objective="always")
        results = function(x)
        assert function.report().counts() == {"respelling": 2}
        np.testing.assert_array_equal(results, [jax.jit(partial(scaled, c))(x) for c in (1.0, 1.0 + 1e-9)])


@pytest.mark.parametrize("x64", [False, True])
def test_stacked_integers_that_lie_further_apart_than_32_bits_reach(x64):
    with jax.enable_x64(x64):
        low, high = (-(2**63), 2**62) if x64 else (1 - 2**31, 2**31 - 1)

        def run(x):
            def step(results, i):
                return results.at[i].set(jnp.sin(x[i])), (x[i], jnp.where(i == 0, jnp.asarray(low), jnp.asarray(high)))

            return lax.scan(step, x, jnp.arange(2))

        x = random(2, D, dtype=jnp.float32)
        optimized = autopallas.optimize(run, objective="always", strict=True, ops="indexed_loop")
        _, (_, found) = optimized(x)
        assert optimized.report().counts() == {"respelling": 1}
        assert found.dtype == jax.jit(run)(x)[1][1].dtype
        assert found.tolist() == [low, high]


def test_samples_of_backwards_measure_the_backward():
    """Their forward, which only sets slices, is found after them."""
    (sample,) = [sample for name, sample in KIND.samples() if name == "16x512"]
    found = only_match(sample.function, sample.arguments, "indexed_loop", sample.place)
    assert not only_sets(dict(found.spec.parameters)["loop"])
