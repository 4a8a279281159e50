"""Sites under ``vmap`` of which some operands are shared by all examples, and the others are not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopallas

EXAMPLES = 3


def attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
    return jax.nn.softmax(q @ k.T / 4 + bias) @ v


def mlp(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def gradients(function: Callable[..., jax.Array], axes: Sequence[int | None]) -> Callable[..., tuple[jax.Array, ...]]:
    def loss(*operands: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(function(*operands)))

    return jax.vmap(jax.grad(loss, tuple(range(len(axes)))), tuple(axes))


def operands(shapes: Sequence[tuple[int, ...]], axes: Sequence[int | None]) -> list[jax.Array]:
    random = np.random.default_rng(0)
    given = ((() if axis is None else (EXAMPLES,)) + shape for axis, shape in zip(axes, shapes, strict=True))
    return [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in given]


def agree(found: Sequence[jax.Array], wanted: Sequence[jax.Array]) -> None:
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=5e-5 * max(1.0, float(jnp.max(jnp.abs(y)))))


@pytest.mark.parametrize("axes", [(None, None, 0, 0), (None, 0, 0, None), (0, None, None, 0), (None, None, None, 0)])
@pytest.mark.parametrize("around", [False, True])
def test_attention_whose_values_and_bias_have_examples(axes: tuple[int | None, ...], around: bool) -> None:
    given = operands(((6, 5), (7, 5), (7, 4), (6, 7)), axes)
    if around:
        found = gradients(autopallas.optimize(attend, objective="always", strict=True), axes)(*given)
    else:
        found = autopallas.optimize(gradients(attend, axes), objective="always", strict=True)(*given)
    agree(found, gradients(attend, axes)(*given))


@pytest.mark.parametrize("axes", [a for a in itertools.product((None, 0), repeat=4) if 0 in a and None in a])
def test_gated_mlps_that_share_some_of_their_weights(axes: tuple[int | None, ...]) -> None:
    given = operands(((6, 5), (5, 7), (5, 7), (7, 4)), axes)
    step = autopallas.optimize(gradients(mlp, axes), objective="always", strict=True)
    agree(step(*given), gradients(mlp, axes)(*given))
    mapped = gradients(autopallas.optimize(mlp, objective="always", strict=True), axes)
    agree(mapped(*given), gradients(mlp, axes)(*given))


def test_one_attention_pulls_many_cotangents_back() -> None:
    """XLA's CPU compiler of JAX 0.10 adds up products wrong of which many examples share a factor."""
    random = np.random.default_rng(0)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    q, k, v, cotangents = array(64, 16), array(64, 16), array(64, 16), array(64, 64, 16)

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.softmax(q @ k.T / 4) @ v

    def pulled(function: Callable[..., jax.Array]) -> tuple[jax.Array, ...]:
        return jax.vmap(jax.vjp(function, q, k, v)[1])(cotangents)

    with jax.disable_jit():
        wanted = pulled(plain)
    agree(pulled(autopallas.optimize(plain, objective="always", strict=True)), wanted)


def moved(function: Callable[..., jax.Array], axes: Sequence[int | None]) -> Callable[..., jax.Array]:
    """Forward mode, with many tangents of some operands and one of the others."""

    def of(operands: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> jax.Array:
        return jax.vmap(lambda *tangents: jax.jvp(function, tuple(operands), tangents)[1], tuple(axes))(*tangents)

    return of


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0)])
def test_many_tangents_meet_one_attention(axes: tuple[int | None, ...]) -> None:
    """XLA's CPU compiler of JAX 0.10 adds up products wrong that it makes of copies of an operand."""
    random = np.random.default_rng(0)
    given = [jnp.asarray(random.normal(size=size), jnp.float32) for size in [(64, 16), (64, 16), (64, 16)]]
    shapes = [(() if axis is None else (64,)) + x.shape for axis, x in zip(axes, given, strict=True)]
    tangents = [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.softmax(q @ k.T / 4) @ v

    ours = jax.jit(moved(autopallas.optimize(plain, objective="always", strict=True), axes))
    with jax.disable_jit():
        wanted = moved(plain, axes)(given, tangents)
    agree([ours(given, tangents)], [wanted])
    text = ours.lower(given, tangents).as_text()
    exponentials = [line for line in text.splitlines() if "stablehlo.exponential" in line]
    assert exponentials
    assert not any("tensor<64x64x64x" in line for line in exponentials), "each tangent computes its own"
