"""Sums and extrema over windows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compare import compare
from support.respellings import optimized, random, same_bits, sites

from autopallas.kernels.respelling.tuned_block_sizes import conditions


@pytest.mark.parametrize("step", [lax.add, lax.max, lax.min])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8])
@pytest.mark.parametrize(
    ("window", "strides", "padding", "base", "dilation"),
    [
        ((1, 2, 2, 1), (1, 2, 2, 1), "VALID", (1,) * 4, (1,) * 4),
        ((1, 3, 3, 1), (1, 1, 1, 1), "SAME", (1,) * 4, (1,) * 4),
        ((1, 3, 2, 1), (1, 2, 1, 1), [(0, 0), (2, 1), (0, 3), (0, 0)], (1,) * 4, (1, 1, 2, 1)),
        ((2, 1, 1, 3), (1, 1, 1, 2), "VALID", (1,) * 4, (1,) * 4),
        ((1, 2, 2, 1), (1, 1, 1, 1), [(0, 0), (1, 1), (1, 1), (0, 0)], (1, 2, 2, 1), (1,) * 4),
    ],
)
def test_windows(step, dtype, window, strides, padding, base, dilation):
    floating = jnp.issubdtype(dtype, jnp.floating)
    x = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 7, 6, 5)), dtype)
    x = (x / 7).astype(dtype) if floating else x
    start = 0 if step is lax.add else (jnp.finfo if floating else jnp.iinfo)(dtype)
    start = start if step is lax.add else (start.min if step is lax.max else start.max)
    start = (-np.inf if step is lax.max else np.inf) if floating and step is not lax.add else start

    def run(x):
        return lax.reduce_window(x, np.asarray(start, dtype), step, window, strides, padding, base, dilation)

    assert len(sites(run, x)) == 1
    if floating and step is lax.add:
        found = compare(run, (x,))
        assert found.complaints == []
        assert found.counts("respelling") > 0
    else:
        same_bits(jax.jit(optimized(run))(x), jax.jit(run)(x))


@pytest.mark.parametrize("step", [lax.add, lax.max, lax.min])
def test_windows_of_what_is_not_finite(step):
    x = random(1, 6, 6, 2).at[0, 2, 3, 0].set(jnp.nan).at[0, 0, 0, 1].set(jnp.inf).at[0, 4, 4, 1].set(-jnp.inf)
    start = {lax.add: 0.0, lax.max: -jnp.inf, lax.min: jnp.inf}[step]
    run = lambda x: lax.reduce_window(x, start, step, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")  # noqa: E731
    np.testing.assert_allclose(optimized(run)(x), run(x), rtol=1e-6, atol=1e-6)
    assert len(sites(run, x)) == 1


def test_windows_of_what_others_read_ask_for_more_gain():
    """As in train steps: the gradient of the rectifier reads what it is given, which the slices would compute anew."""

    def pooled(x):
        return lax.reduce_window(jax.nn.relu(x * 2), 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def unlike(function):
        return [
            conditions(site).unlike for site in sites(function, random(4, 8, 8, 16)) if "window_sum" in str(site.spec)
        ]

    assert unlike(pooled) == [""]
    read, *_ = unlike(jax.value_and_grad(lambda x: (pooled(x) ** 2).sum()))
    assert read
