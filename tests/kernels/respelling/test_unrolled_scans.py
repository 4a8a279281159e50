"""Respelling of loops that compile several steps as one: what is found, what is left alone, and what it computes."""

from __future__ import annotations

from types import SimpleNamespace

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
from autopallas.graph import Graph, flatten
from autopallas.kernels.respelling import plain_steps
from autopallas.kernels.respelling.kinds import summed_products
from autopallas.patterns import find

NAME = "unrolled_scan"
STEPS = 19


def recurrent(x, w, unroll=4):
    def step(h, x):
        h = jnp.tanh(h @ w + x)
        return h, h

    return lax.scan(step, jnp.zeros_like(x[0]), x, unroll=unroll)


def advantages(reward, value):
    def step(carried, own):
        advantage, following = carried
        reward, value = own
        advantage = jnp.clip(reward + 0.9 * following - value + 0.8 * advantage, -1, 1)
        return (advantage, value), advantage

    first = jnp.zeros_like(reward[0]), jnp.zeros_like(reward[0])
    return lax.scan(step, first, (reward, value), reverse=True, unroll=8)[1]


def operands(steps=STEPS, batch=3, width=5, dtype=jnp.float32):
    return random(steps, batch, width, dtype=dtype), random(width, width, seed=1, dtype=dtype)


def sites(function, *arguments, **options):
    """The number of loops that are respelt."""
    optimized = autopallas.optimize(function, objective="always", strict=True, ops=NAME, **options)
    optimized(*arguments)
    return optimized.report().counts()["respelling"]


def loss(x, w, **options):
    return jnp.sum(jnp.sin(recurrent(x, w, **options)[1].astype(jnp.float32)))


def test_a_loop_and_its_gradient_are_found():
    assert sites(recurrent, *operands()) == 1
    assert sites(jax.grad(loss, (0, 1)), *operands()) == 2
    assert sites(advantages, random(STEPS, 6), random(STEPS, 6, seed=1)) == 1


def test_one_step_is_taken_at_a_time():
    def steps(function):
        return jax.jit(function).lower(*operands()).compile().as_text().count(" tanh(")

    assert steps(recurrent) > 4
    assert steps(autopallas.optimize(recurrent, objective="always", ops=NAME)) == 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_it_computes_what_the_loop_does(dtype):
    compared = compare(recurrent, operands(dtype=dtype), gradients=True, ops=NAME)
    assert compared.complaints == []
    assert compared.report.counts()["respelling"] >= 1


def _without_slices(x, w):
    return lax.scan(lambda h, _: (jnp.sin(h @ w), h[0]), x[0], None, length=STEPS, unroll=5)


def _counting(x, w):
    def step(carried, x):
        i, h = carried
        h = jnp.tanh(h @ w + x) * (i + 1).astype(h.dtype)
        return (i + 1, h), (h, i, h > 0, {"half": h.astype(jnp.float16)})

    return lax.scan(step, (jnp.int32(0), x[0]), x, reverse=True, unroll=4)


def _special(x, w):
    values = jnp.array([jnp.nan, jnp.inf, -jnp.inf, -0.0, 1e-40], jnp.float32)
    return lax.scan(lambda h, x: (h, x * h), values, x, unroll=4)


def _of_random_numbers(x, w):
    def step(key, x):
        key, own = jax.random.split(key)
        return key, x + jax.random.key_data(own)[0].astype(x.dtype) % 7

    return lax.scan(step, jax.random.key(3), x, unroll=4)[1]


def _checkpointed(x, w):
    def step(h, x):
        h = jax.checkpoint(lambda h, x: jnp.tanh(h @ w + x))(h, x)
        return h, h

    return lax.scan(step, jnp.zeros_like(x[0]), x, unroll=4)


def _mapped(x, w):
    return jax.vmap(lambda x: recurrent(x, w), 1)(x)


FORMS = (_without_slices, _counting, _special, _checkpointed, _mapped)


@pytest.mark.parametrize("function", FORMS)
def test_forms(function):
    arguments = operands()
    assert sites(function, *arguments) == 1
    optimized = autopallas.optimize(function, objective="always", ops=NAME)
    expected, given = jax.jit(function)(*arguments), optimized(*arguments)
    assert jax.tree.structure(expected) == jax.tree.structure(given)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(given), strict=True):
        assert one.dtype == other.dtype
        # Of the same steps, a compiler may fuse products and sums otherwise: a few units in the last place.
        np.testing.assert_allclose(np.float32(one), np.float32(other), rtol=1e-5, atol=1e-5)


def _two_at_a_time(x, w):
    return recurrent(x, w, unroll=3)


def _one_at_a_time(x, w):
    return recurrent(x, w, unroll=1)


def _all_at_once(x, w):
    return recurrent(x, w, unroll=True)


def _with_a_branch(x, w):
    def step(h, x):
        h = lax.cond(x.sum() > 0, jnp.sin, jnp.cos, h + x)
        return h, h

    return lax.scan(step, x[0], x, unroll=4)


def _with_a_loop(x, w):
    def step(h, x):
        h = lax.fori_loop(0, 3, lambda _, h: jnp.sin(h @ w), h + x)
        return h, h

    return lax.scan(step, x[0], x, unroll=4)


def _with_a_sort(x, w):
    def step(h, x):
        h = jnp.sort(h + x)
        return h, h

    return lax.scan(step, x[0], x, unroll=4)


def _in_parts(x, w):
    mesh = Mesh(np.array(jax.devices()[:1]), ("i",))
    specs = {"in_specs": (P(None, "i"), P()), "out_specs": (P("i"), P(None, "i"))}
    return jax.shard_map(recurrent, mesh=mesh, **specs)(x, w)


@pytest.mark.parametrize(
    "function",
    [_two_at_a_time, _one_at_a_time, _all_at_once, _with_a_branch, _with_a_loop, _with_a_sort, _in_parts],
)
def test_what_is_left_alone(function):
    assert sites(function, *operands()) == 0


def test_random_numbers_are_the_same():
    arguments = operands()
    optimized = autopallas.optimize(_of_random_numbers, objective="always")
    np.testing.assert_array_equal(optimized(*arguments), jax.jit(_of_random_numbers)(*arguments))


def test_a_site_in_the_step_goes_first():
    def layers(x, w):
        def layer(x, _):
            weights = jax.nn.softmax(x @ x.mT / 2, -1)
            return x + weights @ x @ w, None

        return lax.scan(layer, x, None, length=12, unroll=4)[0]

    optimized = autopallas.optimize(layers, objective="always")
    optimized(*operands(steps=16))
    report = optimized.report()
    applied = {(site.op, site.verdict) for site in report.sites}
    assert ("attention", "applied") in applied
    assert report.counts()["respelling"] == 0


def test_a_checkpointed_scan_goes_first_where_memory_counts():
    optimized = autopallas.optimize(jax.grad(loss), objective="memory")
    optimized(*operands(steps=512, batch=64, width=64))
    assert not any("unrolled_scan" in str(site.spec) and site.verdict == "applied" for site in optimized.report().sites)


@pytest.mark.parametrize(("platform", "steps"), [("cpu", 1), ("tpu", 8)])
def test_other_respellings_take_one_step_at_a_time_on_cpus(platform, steps, monkeypatch):
    """A loop whose backward's sums are taken out of it."""
    device = SimpleNamespace(platform=platform)
    monkeypatch.setattr(plain_steps, "Device", SimpleNamespace(current=lambda: device))
    jaxpr = jax.make_jaxpr(jax.grad(lambda x, w: loss(x, w, unroll=8), 1))(*operands(steps=64, batch=1))
    graph = Graph(flatten(jaxpr))
    (match,) = (match for match in find(graph, ("summed_products",), True)[0] if match.op == "respelling")
    spec = match.spec
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in spec.operands]
    respelt = jax.make_jaxpr(lambda *arrays: summed_products.KIND.respelt(spec, *arrays))(*given)
    loops = [e for e in flatten(respelt).equations if e.primitive.name == "scan"]
    inner = [e for outer in loops for e in flatten(outer.params["jaxpr"]).equations if e.primitive.name == "scan"]
    assert {e.params["unroll"] for e in inner or loops} == {steps}
