"""Dropout on the probabilities whose mask many sequences or heads share, as in Flax by default, is a side input."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopallas

B, N, T, D = 4, 3, 24, 8
KEY = jax.random.key(3)


def operands(dtype=np.float32):
    random = np.random.default_rng(0)
    return [jnp.asarray(random.standard_normal((B, T, N, D)).astype(dtype)) for _ in range(3)]


def attend(q, k, v, key, shape, form):
    scores = jnp.einsum("btnd,bsnd->bnts", q, k) / np.sqrt(D).astype(q.dtype)
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf)
    p = jax.nn.softmax(scores)
    kept = jax.random.bernoulli(key, jnp.float32(0.75), shape)
    dropped = jnp.where(kept, p / 0.75, 0) if form == "where" else p * (kept.astype(p.dtype) / 0.75)
    return jnp.einsum("bnts,bsnd->btnd", dropped, v)


@pytest.mark.parametrize("form", ["where", "product"])
@pytest.mark.parametrize("shape", [(1, 1, T, T), (T, T), (B, N, 1, T)], ids=str)
def test_values_and_gradients(shape, form):
    def loss(q, k, v, key):
        return (attend(q, k, v, key, shape, form) ** 2).sum()

    run = autopallas.optimize(jax.value_and_grad(loss, (0, 1, 2)), objective="always", strict=True, ops="attention")
    given = run(*operands(), KEY)
    assert run.report().counts() == {"attention": 1}
    with jax.enable_x64(True):
        wanted = jax.value_and_grad(loss, (0, 1, 2))(*operands(np.float64), KEY)
    for ours, exact in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
        # A few roundings of float32, through two products and a softmax.
        assert float(jnp.abs(ours - exact).max() / jnp.abs(exact).max()) <= 5e-6


@pytest.mark.parametrize("shape", [(B, N, T, T), (B, 1, T, T), (1, N, T, T)], ids=str)
def test_masks_that_are_nearly_as_large_as_the_scores(shape):
    run = autopallas.optimize(lambda *given: attend(*given, shape, "where"), objective="always", ops="attention")
    report = autopallas.explain(run, *operands(), KEY)
    assert report.counts() == {}
    assert [miss.reason for miss in report.near_misses] == ["dropout is active on the probabilities"]
