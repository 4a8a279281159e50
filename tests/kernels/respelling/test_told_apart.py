"""Two loops of one program are told apart where their text is equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopallas

T, D = 64, 512


def held(array):
    """A function whose derivative holds an array."""
    function = jax.custom_vjp(lambda h: jnp.tanh(h * array))
    function.defvjp(lambda h: (function(h), h), lambda h, g: (g * (1 - jnp.tanh(h * array) ** 2) * array,))
    return function


def called(array):
    """A function that gets an array by a callback."""
    kind = jax.ShapeDtypeStruct(array.shape, array.dtype)
    return lambda h: jnp.tanh(h * jax.pure_callback(lambda _: array, kind, lax.stop_gradient(h)))


def indexed(function):
    def run(d, x):
        def step(i, h):
            return function(h) * d + x[i]

        return lax.fori_loop(0, T, step, d)

    return run


def sliced(function):
    def run(d, x):
        def step(h, x):
            h = function(h) * d + x
            return h, jnp.sin(h)

        return lax.scan(step, d, x)[1]

    return run


@pytest.mark.parametrize("loop", [indexed, sliced])
@pytest.mark.parametrize("function", [held, called])
def test_loops_are_told_apart_by_what_their_text_does_not_name(function, loop):
    first, second = np.linspace(0.2, 1, D, dtype=np.float32), np.linspace(1, 0.2, D, dtype=np.float32)
    random = np.random.default_rng(0)
    d, x = (jnp.asarray(random.standard_normal(shape) / 2, jnp.float32) for shape in ((D,), (T, D)))
    runs = [loop(function(array)) for array in (first, second)]

    def losses(d, x):
        return sum(jnp.sin(run(d, x)).sum() for run in runs)

    step = jax.grad(losses, (0, 1))
    kinds = ("indexed_loop",) if loop is indexed else ("scan_checkpoint",)
    optimized = autopallas.optimize(step, objective="always", ops=kinds, strict=True)
    for given, wanted in zip(optimized(d, x), jax.jit(step)(d, x), strict=True):
        np.testing.assert_allclose(given, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    assert optimized.report().counts() == {"respelling": 2}
