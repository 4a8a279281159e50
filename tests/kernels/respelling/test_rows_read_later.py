"""Loops that set rows which later steps read: they carry these rows in place of the array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.compare import compare
from support.indexed_loops import judged
from support.respellings import random

T, D = 9, 4


def filtered(step, bounds=(0, T), first=jnp.sin):
    """A loop that writes ``step(i, a, y, x)`` in place of what it is given."""

    def run(a, x):
        y = lax.fori_loop(*bounds, lambda i, y: step(i, a, y, x), first(x))
        return jnp.sum(jnp.sin(y) * jnp.arange(1, T + 1)[:, None])

    return run


def _last_to_first(k, a, y, x):
    i = T - 2 - k
    return y.at[i].set(x[i] + a * jnp.tanh(y[i + 1]))


def _by_lax(i, a, y, x):
    row = jnp.tanh(a * lax.dynamic_slice(y, (i - 1, 0), (1, D))) + lax.dynamic_slice(x, (i, 0), (1, D))
    return lax.dynamic_update_slice(y, row, (i, 0))


def _new_and_old(i, a, y, x):
    """The step before is read again after this one was written, from both versions of the array."""
    new = y.at[i].set(a * y[i - 1] + x[i])
    return new.at[i].set(new[i] * new[i - 1] + y[i - 2] * y[i])


LAGGED = {
    "y[i-1]": (filtered(lambda i, a, y, x: y.at[i].set(jnp.tanh(a * y[i - 1]) + x[i]), (1, T)), 1),
    "y[i-1] and y[i-2]": (filtered(lambda i, a, y, x: y.at[i].set(a * y[i - 1] + x[i] * y[i - 2]), (2, T)), 2),
    "y[i-3] alone": (filtered(lambda i, a, y, x: y.at[i].set(jnp.cos(a * y[i - 3]) + x[i]), (3, T)), 3),
    "the last row first": (filtered(lambda i, a, y, x: y.at[i].set(a * y[i - 1] + x[i] * y[i - 2])), 2),
    "clamped": (filtered(lambda i, a, y, x: y.at[i].set(a * jnp.tanh(y[jnp.maximum(i - 1, 0)]) + x[i])), 1),
    "from the last to the first": (filtered(_last_to_first, (0, T - 1)), 1),
    "every other row": (filtered(lambda i, a, y, x: y.at[2 * i].set(a * y[2 * i - 2] * x[i]), (1, T // 2 + 1)), 1),
    "twice": (filtered(lambda i, a, y, x: y.at[i].set(a * y[i - 1] + jnp.sin(y[i - 1]) + x[i]), (1, T)), 1),
    "into the next one": (filtered(lambda i, a, y, x: y.at[i + 1].set(jnp.sin(a * y[i]) + x[i]), (0, T - 1)), 1),
    "added to the next one": (filtered(lambda i, a, y, x: y.at[i + 1].add(a * y[i] * x[i]), (0, T - 1)), 1),
    "added": (filtered(lambda i, a, y, x: y.at[i].add(a * y[i - 1] * x[i]), (1, T)), 1),
    "by lax": (filtered(_by_lax, (1, T)), 1),
    "new and old": (filtered(_new_and_old, (2, T)), 2),
    "from zeros": (filtered(lambda i, a, y, x: y.at[i].set(a * y[i - 1] + x[i] ** 2), (1, T), jnp.zeros_like), 1),
}


@pytest.mark.parametrize("name", LAGGED)
def test_rows_that_later_steps_read_are_carried_in_place_of_the_array(name):
    function, depth = LAGGED[name]
    arguments = random(D), random(T, D, seed=1)
    # The forward, which keeps what it read, goes the same way, but for one that adds.
    *_, loop = judged(function, *arguments, sites=1 if name.startswith("added") else 2)
    assert depth in [table.depth for _, table in loop.tables]
    carried = loop.step.jaxpr.invars[loop.constants : loop.constants + loop.carried]
    whole = [i for i, variable in enumerate(carried) if T in variable.aval.shape]
    assert whole == sorted(i for i, _ in (*loop.tables, *loop.sums))


@pytest.mark.parametrize("shape", [(T,), (D, T), (2, T, D), (2, D, T)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_along_any_axis_that_later_steps_read(shape, dtype):
    axis = shape.index(T)

    def run(a, x):
        def at(i):
            return (slice(None),) * axis + (i,)

        def step(carried, _):
            i, y = carried
            return (i + 1, y.at[at(i)].set(a * y[at(i - 1)] * y[at(i - 2)] + x[at(i)])), None

        return jnp.sum(jnp.sin(lax.scan(step, (2, x), None, T - 2, unroll=2)[0][1]))

    *_, loop = judged(run, random(dtype=dtype), random(*shape, seed=1, dtype=dtype), sites=2)
    assert [table.depth for _, table in loop.tables] == [2]


def test_arrays_that_read_each_others_past():
    def run(a, x):
        def step(i, carried):
            y, z = carried
            return y.at[i].set(a * z[i - 1] + x[i]), z.at[i].set(jnp.sin(y[i - 2]) * x[i - 1])

        y, z = lax.fori_loop(2, T, step, (x, jnp.cos(x)))
        return jnp.sum(jnp.sin(y) + z * jnp.arange(T)[:, None])

    *_, loop = judged(run, random(D), random(T, D, seed=1), sites=2)
    assert sorted(table.depth for _, table in loop.tables) == [1, 2]


def test_rows_that_later_steps_read_under_vmap_and_jit_and_from_outside():
    plain, _ = LAGGED["y[i-1] and y[i-2]"]
    x = random(3, T, D, seed=1)
    judged(lambda a, x: jnp.sum(jax.vmap(jax.jit(plain), (None, 0))(a, x)), random(D), x, sites=2)
    assert compare(plain, (random(D), x[0])).complaints == []
    judged(lambda a, x: jnp.sum(jax.vmap(jax.checkpoint(plain))(a, x)), random(3, D), x, sites=2)


def test_the_derivative_of_a_derivative_that_carries_rows():
    plain, _ = LAGGED["y[i-1]"]

    def run(a, x):
        return jnp.sum(jnp.sin(jax.grad(plain, 1)(a, x)))

    assert compare(jax.value_and_grad(run, (0, 1)), (random(D), random(T, D, seed=1)), gradients=False).complaints == []
