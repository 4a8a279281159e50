"""Respelling of loops that stack bfloat16: what is found, what is left alone, and what it computes."""

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
STEPS = 64


def recurrent(x, w):
    def step(h, x):
        h = jnp.tanh(h @ w + x)
        return h, h

    return lax.scan(step, jnp.zeros_like(x[0]), x)


def sites(function, *arguments, **options):
    """The number of loops that are respelt, and whether the results are those of the original, bit for bit."""
    optimized = autopallas.optimize(function, objective="always", strict=True, ops=NAME, **options)
    same = jax.tree.map(np.array_equal, optimized(*arguments), jax.jit(function)(*arguments))
    assert jax.tree.all(same)
    return optimized.report().counts()["respelling"]


def operands(steps=STEPS, batch=3, width=5, dtype=jnp.bfloat16):
    return random(steps, batch, width, dtype=dtype), random(width, width, seed=1, dtype=dtype)


def in_parts(function):
    mesh = Mesh(np.array(jax.devices()[:1]), ("i",))
    return jax.shard_map(function, mesh=mesh, in_specs=(P(None, "i"), P()), out_specs=(P("i"), P(None, "i")))


def loss(x, w):
    return jnp.sum(jnp.sin(recurrent(x, w)[1].astype(jnp.float32)))


def test_a_loop_and_its_gradient_are_found():
    assert sites(recurrent, *operands()) == 1
    assert sites(jax.grad(loss, (0, 1)), *operands()) == 2


def test_it_computes_what_the_loop_does():
    compared = compare(recurrent, operands(), gradients=True, ops=NAME)
    assert compared.complaints == []
    assert compared.report.counts()["respelling"] >= 1


def _backwards(x, w):
    return lax.scan(lambda h, x: ((h @ w + x).astype(h.dtype), h), jnp.ones_like(x[0]), x, reverse=True, unroll=3)


def _several(x, w):
    def step(carried, x):
        i, h = carried
        h = jnp.tanh(h @ w + x) * (i + 1).astype(h.dtype)
        return (i + 1, h), (h, i, h.astype(jnp.float32), h > 0, {"half": h.astype(jnp.float16)})

    return lax.scan(step, (jnp.int32(0), x[0]), x)


def _without_slices(x, w):
    return lax.scan(lambda h, _: (jnp.sin(h @ w), h[0]), x[0], None, length=STEPS)


def _special(x, w):
    values = jnp.array([jnp.nan, jnp.inf, -jnp.inf, -0.0, 1e-40], jnp.bfloat16)
    return lax.scan(lambda h, x: (h, x * h), values, x)


def _checkpointed(x, w):
    def step(h, x):
        h = jax.checkpoint(lambda h, x: jnp.tanh(h @ w + x))(h, x)
        return h, h

    return lax.scan(step, jnp.zeros_like(x[0]), x)


@pytest.mark.parametrize("function", [_backwards, _several, _without_slices, _special, _checkpointed])
def test_forms_of_loops(function):
    optimized = autopallas.optimize(function, objective="always", strict=True, ops=NAME)
    for found, expected in zip(
        *map(jax.tree.leaves, (optimized(*operands()), jax.jit(function)(*operands()))), strict=True
    ):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))
    assert optimized.report().counts()["respelling"] == 1


def test_under_vmap_jit_and_in_loops():
    x, w = operands()
    many = jnp.stack([x, 2 * x])
    assert sites(jax.vmap(recurrent, (0, None)), many, w) == 1
    assert sites(lambda many, w: lax.map(lambda x: jax.jit(recurrent)(x, w), many), many, w) == 1
    assert sites(jax.grad(lambda x, w: jax.checkpoint(loss)(x, w), (0, 1)), x, w) >= 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: recurrent(x[:63], w),
        lambda x, w: recurrent(x.astype(jnp.float32), w.astype(jnp.float32)),
        lambda x, w: recurrent(x.astype(jnp.float16), w.astype(jnp.float16)),
        lambda x, w: lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), x[0], x)[0],
        lambda x, w: lax.scan(lambda h, x: (h + jnp.cumsum(x, 1), h), x[0], x),
        lambda x, w: in_parts(recurrent)(x, w),
        lambda x, w: lax.scan(lambda h, x: (lax.cond(h[0, 0] > 0, jnp.sin, jnp.cos, h) + x, h), x[0], x),
    ],
    ids=[
        "few steps",
        "float32",
        "float16",
        "nothing stacked",
        "with what has its own respelling",
        "in shard_map",
        "with branches",
    ],
)
def test_left_alone(function):
    assert sites(function, *operands()) == 0


@pytest.mark.parametrize("options", [{"objective": "memory"}, {"ops": ["respelling", "scan_checkpoint"]}], ids=str)
def test_what_needs_less_memory_goes_first(options):
    def gated(x, w):
        def step(h, x):
            h = jax.nn.sigmoid(h @ w) * jnp.tanh(h + x) + jnp.cos(h * x)
            return h, h

        return jnp.sum(lax.scan(step, x[0], x)[0].astype(jnp.float32))

    optimized = autopallas.optimize(jax.grad(gated, (0, 1)), **options)
    optimized(*operands(steps=256, batch=8, width=32))
    kinds = {site.kind for site in optimized.report().sites}
    assert "scan_checkpoint" in kinds
    assert NAME not in kinds


@pytest.mark.skipif(jax.__version_info__[:2] <= (0, 10), reason="JAX 0.10 takes the square of the steps")
def test_later_compilers_need_it_not():
    optimized = autopallas.optimize(recurrent, objective="always", strict=True)
    optimized(*operands())
    assert NAME not in {site.kind for site in optimized.report().sites}
