"""Train steps with grouped matmuls: the backward is a part of its forward's site, wherever it stands."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from support.checks import arrays, exact, right
from support.compare import compiled, optimized_like_a_user

from autopallas import jaxprs
from autopallas.rewrite import primitive

M, D, F, G, LAYERS = 20, 6, 10, 4, 3
SIZES = jnp.array([6, 0, 9, 3], jnp.int32)


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * 0.4, dtype)


def parameters(layers: int | None = None, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    outer = () if layers is None else (layers,)
    shapes = {"gate": (G, D, F), "up": (G, D, F), "down": (G, F, D)}
    return {name: normal(i, *outer, *shape, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}


X = normal(9, M, D)


def layer(p, x, sizes=SIZES):
    h = jax.nn.silu(lax.ragged_dot(x, p["gate"], sizes)) * lax.ragged_dot(x, p["up"], sizes)
    return x + lax.ragged_dot(h, p["down"], sizes)


def loss(p, x, sizes=SIZES):
    return jnp.sum(layer(p, x, sizes).astype(jnp.float32) ** 2)


def scanned(p, x, body=layer):
    return jnp.sum(lax.scan(lambda x, p: (body(p, x), None), x, p)[0] ** 2)


def unrolled(p, x, body=layer):
    for i in range(LAYERS):
        x = body(jax.tree.map(lambda a, i=i: a[i], p), x)
    return jnp.sum(x**2)


def step(loss, p, x):
    value, gradients = jax.value_and_grad(loss)(p, x)
    return value, jax.tree.map(lambda a, g: a - 0.1 * g.astype(a.dtype), p, gradients)


def stacked(*arrays):
    return [jnp.stack([a] * LAYERS) for a in arrays]


def directions(report: Any) -> list[str]:
    assert report.near_misses == ()
    return [s.direction for s in report.sites if s.op == "grouped_matmul" and s.verdict == "applied"]


def ragged(function: Any, args: Any) -> int:
    """How many ragged dots are left in the optimized program, outside the kernels."""
    program = jax.make_jaxpr(lambda *args: optimized_like_a_user(function)(*args))(*args)
    return sum(name == "ragged_dot_general" for name, _ in arrays(program))


BOTH = "forward+backward"
SAVING = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)
STEPS = {
    "plain": (partial(step, loss), parameters(), [BOTH] * 3),
    "unrolled": (partial(step, unrolled), parameters(LAYERS), [BOTH] * 3 * LAYERS),
    "scan": (partial(step, scanned), parameters(LAYERS), [BOTH] * 3),
    "remat": (partial(step, partial(unrolled, body=jax.checkpoint(layer))), parameters(LAYERS), [BOTH] * 3 * LAYERS),
    "scan and remat": (partial(step, partial(scanned, body=jax.checkpoint(layer))), parameters(LAYERS), [BOTH] * 3),
    "scan and a policy": (partial(step, partial(scanned, body=SAVING)), parameters(LAYERS), [BOTH] * 3),
    "scan inside remat": (partial(step, jax.checkpoint(scanned)), parameters(LAYERS), [BOTH] * 3),
    "gradient of the matrices only": (lambda p, x: jax.grad(loss)(p, x), parameters(), [BOTH] * 3),
    "gradient of the rows only": (lambda p, x: jax.grad(loss, 1)(p, x), parameters(), [BOTH] * 3),
    "gradients and no value": (lambda p, x: jax.grad(loss, (0, 1))(p, x), parameters(), [BOTH] * 3),
    "microbatches": (
        lambda p, x: lax.scan(lambda g, x: (jax.tree.map(jnp.add, g, jax.grad(loss)(p, x)), None),
                              jax.tree.map(jnp.zeros_like, p), jnp.stack([x, 2 * x]))[0],
        parameters(), [BOTH] * 3,
    ),
    "vmap of the gradient": (
        lambda p, x: jax.vmap(jax.grad(loss))(p, jnp.stack([x] * LAYERS), jnp.stack([SIZES, SIZES[::-1], 0 * SIZES])),
        parameters(LAYERS), [BOTH] * 3,
    ),
    "gradient of the vmap": (
        lambda p, x: jax.grad(lambda p: jnp.sum(jax.vmap(loss)(p, *stacked(x, SIZES))))(p),
        parameters(LAYERS), [BOTH] * 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_each_forward_has_its_backward(name):
    function, p, wanted = STEPS[name]
    assert directions(exact(function, (p, X))) == wanted
    assert ragged(function, (p, X)) == 0


@pytest.mark.parametrize("name", ["plain", "scan and remat", "vmap of the gradient"])
def test_the_kernels_are_right(name):
    function, p, _ = STEPS[name]
    optimized = optimized_like_a_user(function)
    right(compiled(lambda *args: optimized(*args))(p, X), function, (p, X), "float32")


@pytest.mark.parametrize("body", [layer, jax.checkpoint(layer)], ids=["plain", "remat"])
def test_derivatives_of_an_optimized_function(body):
    p = parameters(LAYERS)
    optimized = optimized_like_a_user(partial(scanned, body=body))
    right(compiled(jax.value_and_grad(lambda p, x: optimized(p, x), (0, 1)))(p, X), jax.value_and_grad(scanned, (0, 1)),
          (p, X), "float32")  # fmt: skip
    assert directions(optimized.report()) == ["forward"] * 3


def test_second_derivatives_and_forward_mode():
    p, direction = parameters(), jax.tree.map(lambda a: jnp.cos(a), parameters())
    step_of = lambda loss: lambda p: jax.jvp(jax.grad(loss), (p, X), (direction, X))[1]  # noqa: E731
    optimized = optimized_like_a_user(loss)
    right(compiled(step_of(lambda p, x: optimized(p, x)))(p), step_of(loss), (p,), "float32")
    inside = optimized_like_a_user(step_of(loss))
    right(compiled(lambda p: inside(p))(p), step_of(loss), (p,), "float32")


@pytest.mark.parametrize("preferred", [None, jnp.float32])
def test_bfloat16_with_casts_around_the_gradients(preferred):
    def function(p, x):
        def loss(p, x):
            y = lax.ragged_dot(x, p["gate"], SIZES, preferred_element_type=preferred)
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        return jax.value_and_grad(loss, (0, 1))(p, x)

    args = parameters(dtype=jnp.bfloat16), X.astype(jnp.bfloat16)
    optimized = optimized_like_a_user(function)
    right(compiled(lambda *args: optimized(*args))(*args), function, args, "bfloat16")
    assert directions(optimized.report()) == [BOTH]


def test_a_layer_that_shares_its_matrices_has_one_backward_for_each_use():
    def function(p, x):
        def loss(p, x):
            for _ in range(2):
                x = jnp.sin(lax.ragged_dot(x, p["square"], SIZES))
            return jnp.sum(x**2)

        return jax.grad(loss)(p, x)

    args = {"square": normal(3, G, D, D)}, X
    assert directions(exact(function, args)) == [BOTH] * 2


def test_tied_matrices_used_both_ways_are_two_forwards():
    numbers = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])

    def forward(p, x):
        h = jnp.sin(lax.ragged_dot(x, p["gate"], SIZES))
        return lax.ragged_dot_general(h, p["gate"], SIZES, numbers)

    args = parameters(), X
    assert directions(exact(forward, args)) == ["forward"] * 2
    trained = lambda p, x: jax.grad(lambda p: jnp.sum(forward(p, x) ** 2))(p)  # noqa: E731
    assert directions(exact(trained, args)) == [BOTH] * 2


def test_a_users_own_rule_is_a_backward_too():
    @jax.custom_vjp
    def product(x, w):
        return lax.ragged_dot(x, w, SIZES)

    def pulled(saved, dout):
        x, w = saved
        return (lax.ragged_dot(dout, w.swapaxes(1, 2), SIZES),
                jax.vjp(lambda w: lax.ragged_dot(x, w, SIZES), w)[1](dout)[0])  # fmt: skip

    product.defvjp(lambda x, w: (product(x, w), (x, w)), pulled)
    function = jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(product(x, w))), (0, 1))
    assert directions(exact(function, (X, parameters()["gate"]))) == [BOTH]


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_inside_shard_map(inside, check):
    mesh, whole = Mesh(np.array(jax.devices()[:1]), ("m",)), PartitionSpec()

    def mapped(function, results):
        return jax.shard_map(function, mesh=mesh, in_specs=(whole, whole), out_specs=results, check_vma=check)

    def within(p, x):
        return mapped(lambda p, x: jax.grad(loss)(p, x), whole)(p, x)

    def around(p, x):
        return jax.grad(lambda p: jnp.sum(mapped(layer, whole)(p, x) ** 2))(p)

    function = within if inside else around
    optimized = optimized_like_a_user(function)
    args = parameters(), X
    given, wanted = (compiled(f)(*args) for f in (lambda *a: optimized(*a), function))
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    assert directions(optimized.report()) == [BOTH] * 3


def test_no_result_is_kept_for_the_backward():
    """The gradients are products of the operands, so a scan stacks no more than the original's."""
    args = parameters(LAYERS), X

    def stacked(function):
        program = jax.make_jaxpr(lambda *a: function(*a))(*args)
        scans = [e for e in jaxprs.open_jaxpr(program)[0].eqns if e.primitive.name == "scan"]
        inner = [e for e in jaxprs.open_jaxpr(program)[0].eqns if e.primitive.name == "jit"]
        while inner:
            equations = jaxprs.open_jaxpr(inner.pop().params["jaxpr"])[0].eqns
            scans += [e for e in equations if e.primitive.name == "scan"]
            inner += [e for e in equations if e.primitive.name == "jit"]
        return sum(v.aval.size for e in scans for v in e.outvars)

    function = partial(step, scanned)
    assert stacked(optimized_like_a_user(function)) <= stacked(function)
    assert primitive.backward_p.name not in str(jax.make_jaxpr(lambda *a: optimized_like_a_user(function)(*a))(*args))
