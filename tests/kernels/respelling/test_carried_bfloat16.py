"""Respelling of loops that set slices of the bfloat16 arrays they carry: what is found, and what it computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support.compare import compare
from support.respellings import random

import autopallas

NAME = "looped_bfloat16"
STEPS, ROWS, WIDTH = 16, 24, 5


def operands(dtype=jnp.bfloat16):
    return random(ROWS, WIDTH, dtype=dtype), random(STEPS, WIDTH, seed=1, dtype=dtype)


def loop(step, **parameters):
    """A loop whose step gets the array, what it sets, and its number."""

    def function(array, x):
        numbers = jnp.arange(x.shape[0])
        return lax.scan(lambda array, given: step(array, *given), array, (x, numbers), **parameters)

    return function


def sites(function, *arguments):
    """The number of loops that are respelt; the results are those of the original, NaNs and signs of zeros included."""
    optimized = autopallas.optimize(function, objective="always", strict=True, ops=NAME)
    pairs = zip(*map(jax.tree.leaves, (optimized(*arguments), jax.jit(function)(*arguments))), strict=True)
    for found, expected in pairs:
        assert found.dtype == expected.dtype
        found, expected = (np.asarray(x, np.float32) for x in (found, expected))
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))
    return optimized.report().counts()["respelling"]


def _sets(array, x, i):
    return array.at[i].set(x), None


def _updates(array, x, i):
    return lax.dynamic_update_slice(array, x[None], (i, 0)), None


def _beyond_the_end(array, x, i):
    return lax.dynamic_update_slice(array, x[None], (3 * i - 5, 2)), lax.dynamic_slice(array, (5 * i - 9, 3), (1, 4))


def _dropped_and_filled(array, x, i):
    read = array.at[3 * i].get(mode="fill"), array.at[3 * i].get(mode="fill", fill_value=-0.0), array[2 * i]
    return array.at[2 * i - 9].set(x, mode="drop"), read


def _several_at_once(array, x, i):
    places = jnp.array([2, 0, 23]) - jnp.minimum(i, 2)
    return array.at[places, jnp.array([1, 4, 0])].set(x[:3], unique_indices=True), array[places]


def _old_and_new(array, x, i):
    new = array.at[i].set(x)
    return new.at[i + 1].set(array[i]), (array[i], new[i], new[:3, 1])


def _in_products(array, x, i):
    array = array.at[i].set(x)
    weights = jax.nn.softmax((array @ x).astype(jnp.float32))
    return array, weights.astype(x.dtype) @ array


def _of_what_is_read(array, x, i):
    return array.at[i].set(array[i - 1] * x + jax.nn.relu(array[-1])), None


def _with_special_values(array, x, i):
    values = jnp.array([jnp.nan, -jnp.nan, jnp.inf, -0.0, 1e-40], x.dtype)
    return array.at[i].set(jnp.where(i % 2 == 0, values, -values)), array[i - 1] + x


@pytest.mark.parametrize(
    "step",
    [
        _sets,
        _updates,
        _beyond_the_end,
        _dropped_and_filled,
        _several_at_once,
        _old_and_new,
        _in_products,
        _of_what_is_read,
        _with_special_values,
    ],
)
@pytest.mark.parametrize("parameters", [{}, {"reverse": True, "unroll": 3}], ids=str)
def test_found_and_equal(step, parameters):
    assert sites(loop(step, **parameters), *operands()) == 1


def test_it_computes_what_the_loop_does():
    compared = compare(loop(_in_products), operands(), gradients=True, ops=NAME)
    assert compared.complaints == []
    assert compared.report.counts()["respelling"] == 1


def test_several_arrays_and_what_is_stacked():
    def step(carried, x):
        keys, i, values, h = carried
        h = jnp.tanh(h * x + keys[i - 1])
        return (keys.at[i].set(h), i + 1, lax.dynamic_update_slice(values, h[None, None], (0, i, 0)), h), (h, i)

    def function(array, x):
        return lax.scan(step, (array, jnp.int32(0), array[None], x[0]), jnp.tile(x, (4, 1)))

    assert sites(function, *operands()) == 1


def test_a_cache_for_each_head():
    def step(carried, i):
        keys, values, x = carried
        keys, values = keys.at[:, :, i].set(x), values.at[:, :, i].set(-x)
        scores = jnp.einsum("bhd,bhsd->bhs", x, keys, preferred_element_type=jnp.float32)
        scores = jnp.where(jnp.arange(32) <= i, scores, -jnp.inf)
        x = jnp.einsum("bhs,bhsd->bhd", jax.nn.softmax(scores).astype(x.dtype), values)
        return (keys, values, x), x

    cache = random(2, 3, 32, 4, dtype=jnp.bfloat16)

    def function(cache):
        return lax.fori_loop(0, 32, lambda i, carried: step(carried, i)[0], (cache, cache, cache[:, :, 0]))

    assert sites(function, cache) == 1
    optimized = autopallas.optimize(function, objective="always", ops=NAME)
    optimized(cache)
    assert "('carried', (1, 2))" in str(optimized.report().sites[0].spec)


def test_under_vmap_jit_and_in_loops():
    array, x = operands()
    function = loop(_of_what_is_read)
    assert sites(jax.vmap(function, (0, None)), jnp.stack([array, 2 * array]), x) == 1
    assert sites(lambda many, x: lax.map(lambda a: jax.jit(function)(a, x), many), jnp.stack([array, -array]), x) == 1


def _in_a_branch(array, x, i):
    return lax.cond(i % 2 == 0, lambda array: array.at[i].set(x), lambda array: array, array), None


def _added(array, x, i):
    return array.at[i].add(x), None


def _given_as_a_whole(array, x, i):
    array = array.at[i].set(x)
    return array, array


def _read_as_a_whole(array, x, i):
    return array.at[i].set(array.sum(0)), None


def _turned_in_products(array, x, i):
    array = array.reshape(ROWS // 2, 2, WIDTH)
    return array.reshape(ROWS, WIDTH).at[i].set(jnp.einsum("bhd,hd->bd", array, array[0])[0]), None


def _chosen(array, x, i):
    return jnp.where(x[0] > 0, array.at[i].set(x), array), None


def _large_slices(array, x, i):
    return lax.dynamic_update_slice(array, jnp.tile(x, (4, 1)), (i, 0)), None


def _sorted(array, x, i):
    return array.at[i].set(jnp.sort(x)), None


@pytest.mark.parametrize(
    "step",
    [
        _in_a_branch,
        _added,
        _given_as_a_whole,
        _read_as_a_whole,
        _turned_in_products,
        _chosen,
        _large_slices,
        _sorted,
    ],
)
def test_steps_left_alone(step):
    assert sites(loop(step), *operands()) == 0


def _exchanged(array, x):
    def step(carried, given):
        one, other = carried
        x, i = given
        return (other.at[i].set(x), one.at[i].set(-x)), None

    return lax.scan(step, (array, -array), (x, jnp.arange(STEPS)))[0]


def _until(array, x):
    def step(carried):
        i, array = carried
        return i + 1, array.at[i].set(x[i])

    return lax.while_loop(lambda carried: carried[0] < x[0, 0].astype(jnp.int32) + STEPS, step, (0, array))[1]


def _in_parts(array, x):
    mesh = Mesh(np.array(jax.devices()[:1]), ("i",))
    function = jax.shard_map(
        loop(_sets), mesh=mesh, in_specs=(P(None, "i"), P(None, "i")), out_specs=(P(None, "i"), P())
    )
    return function(array, x)


@pytest.mark.parametrize(
    "function",
    [
        lambda array, x: loop(_sets)(array, x[:15]),
        lambda array, x: loop(_sets)(array.astype(jnp.float32), x),
        lambda array, x: loop(_sets)(array.astype(jnp.float16), x.astype(jnp.float16)),
        _exchanged,
        _until,
        _in_parts,
    ],
    ids=["few steps", "float32", "float16", "exchanged arrays", "until", "in shard_map"],
)
def test_loops_left_alone(function):
    assert sites(function, *operands()) == 0


def test_loops_around_attention_that_is_replaced_stay():
    def function(cache):
        def step(carried, i):
            cache, x = carried
            cache = cache.at[:, :, i].set(x)
            scores = jnp.einsum("bhd,bhsd->bhs", x, cache)
            return (cache, jnp.einsum("bhs,bhsd->bhd", jax.nn.softmax(scores), cache)), None

        return lax.scan(step, (cache, cache[:, :, 0]), jnp.arange(32))[0]

    optimized = autopallas.optimize(function, objective="always", strict=True, ops=["attention", NAME])
    optimized(random(2, 3, 32, 4, dtype=jnp.bfloat16))
    assert optimized.report().counts() == {"attention": 1}


def _decayed(decay, x):
    def step(i, carried):
        state, results = carried
        state = state * decay + x[i]
        return state, results.at[i].set(state)

    return lax.fori_loop(0, len(x), step, (jnp.zeros_like(decay), jnp.zeros_like(x)))[1]


def _of_matrices(x, y):
    def step(i, carried):
        state, results = carried
        state = 0.5 * state + x[i][:, None] * y[i]
        return state, results.at[i].set(x[i] @ state)

    return lax.fori_loop(0, len(x), step, (jnp.zeros((x.shape[1], y.shape[1]), x.dtype), jnp.zeros_like(y)))[1]


def _verdicts(function, *arguments):
    optimized = autopallas.optimize(function, objective="always", strict=True, ops=("recurrence", NAME))
    found = optimized(*arguments)
    return [(site.op, site.verdict) for site in optimized.report().sites], np.asarray(found, np.float32)


def test_a_recurrence_that_is_its_best_form_is_respelt():
    decay, x = random(16, dtype=jnp.bfloat16), random(64, 16, seed=1, dtype=jnp.bfloat16)
    verdicts, found = _verdicts(_decayed, decay, x)
    assert verdicts == [("recurrence", "kept"), ("respelling", "applied")]
    np.testing.assert_array_equal(found, np.asarray(jax.jit(_decayed)(decay, x), np.float32))


def test_a_recurrence_that_is_replaced_is_not_respelt():
    x, y = (random(64, 16, seed=seed, dtype=jnp.bfloat16) for seed in (0, 1))
    assert _verdicts(_of_matrices, x, y)[0] == [("recurrence", "applied")]
