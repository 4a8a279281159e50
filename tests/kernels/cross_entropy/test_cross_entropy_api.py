"""The public function: what it computes, what it refuses, and how it chooses."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopallas.errors import AutopallasWarning, UnsupportedError
from autopallas.kernels.cross_entropy import cross_entropy
from autopallas.kernels.cross_entropy.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.operation import OPERATION


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


X, W, BIAS = normal(0, 21, 8), normal(1, 8, 37), normal(2, 37)
LABELS = jnp.asarray(np.random.default_rng(3).integers(0, 37, 21), jnp.int32)


def written_out(x, w, labels, bias=None, scale=None, logits_soft_cap=None, vocabulary_major=False):
    z = x @ (w.T if vocabulary_major else w) * (1.0 if scale is None else scale)
    if logits_soft_cap is not None:
        z = logits_soft_cap * jnp.tanh(z / logits_soft_cap)
    z = z if bias is None else z + bias
    logsumexp = jax.nn.logsumexp(z, axis=-1)
    return logsumexp - jnp.take_along_axis(z, labels[:, None], axis=-1)[:, 0], logsumexp


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"bias": BIAS, "scale": 0.5, "logits_soft_cap": 2.0}, {"vocabulary_major": True, "scale": 3.0}],
    ids=["plain", "everything", "embedding table"],
)
def test_values_and_gradients(arguments, implementation):
    static = {k: v for k, v in arguments.items() if not isinstance(v, jax.Array)}
    bias = {k: v for k, v in arguments.items() if k not in static}
    w = W.T if arguments.get("vocabulary_major") else W

    def objective(function, **rest):
        def mean_with_z_loss(x, w, bias):
            loss, logsumexp = function(x, w, LABELS, **bias, **static, **rest)
            return (loss * jnp.arange(21)).mean() + 1e-2 * (logsumexp**2).mean()

        return jax.jit(jax.value_and_grad(mean_with_z_loss, argnums=(0, 1, 2)))

    sizes = BlockSizes(8, 16)
    found = objective(cross_entropy, implementation=implementation, block_sizes=sizes)(X, w, bias)
    wanted = objective(written_out)(X, w, bias)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)


def test_default_block_sizes_and_results():
    loss, logsumexp = cross_entropy(X, W, LABELS)
    wanted = written_out(X, W, LABELS)
    np.testing.assert_allclose(loss, wanted[0], atol=1e-5)
    np.testing.assert_allclose(logsumexp, wanted[1], atol=1e-5)
    assert loss.dtype == logsumexp.dtype == jnp.float32


@pytest.mark.parametrize("label", [-1, -100, 37, 2**31 - 1])
def test_a_label_that_is_none_costs_the_logsumexp(label):
    """Not the logit that a negative index would wrap around to."""

    def total(x, labels):
        loss, logsumexp = cross_entropy(x, W, labels, block_sizes=BlockSizes(8, 16))
        return (loss - logsumexp).sum()

    labels = jnp.full((21,), label, jnp.int32)
    value, gradient = jax.value_and_grad(total)(X, labels)
    assert value == 0
    np.testing.assert_allclose(gradient, jnp.zeros_like(X), atol=1e-6)


def test_a_bias_of_minus_infinity_takes_a_position_out():
    bias = jnp.where(jnp.arange(37) < 30, 0.0, -jnp.inf)
    labels = LABELS % 30
    run = jax.jit(jax.value_and_grad(lambda x, w, b: cross_entropy(x, w, labels, bias=b)[0].mean(), argnums=(0, 1, 2)))
    value, (dx, dw, dbias) = run(X, W, bias)
    wanted, (dx_wanted, dw_wanted) = jax.value_and_grad(
        lambda x, w: written_out(x, w[:, :30], labels)[0].mean(), argnums=(0, 1)
    )(X, W)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_allclose(dx, dx_wanted, atol=1e-6)
    np.testing.assert_allclose(dw, dw_wanted, atol=1e-6)
    assert not np.asarray(dbias)[30:].any()


def test_under_vmap_and_narrow_dtypes():
    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)

    def total(x):
        return cross_entropy(x, w, LABELS)[0].sum()

    gradient = jax.jit(jax.vmap(jax.grad(total)))(jnp.stack([x, -x]))
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(gradient[0].astype(float), jax.grad(total)(x).astype(float), atol=4e-2)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"x": X[0]}, ValueError, "x has shape (8,); it must be [rows, hidden size]"),
        ({"x": X.astype(int)}, TypeError, "x must be a floating-point array, not int"),
        ({"w": W[0]}, ValueError, "w has shape (37,); it must be [hidden size, vocabulary]"),
        ({"w": W.T}, ValueError, "w has hidden size 37 (shape (37, 8), vocabulary_major=False) and x 8"),
        ({"vocabulary_major": True}, ValueError, "(shape (8, 37), vocabulary_major=True)"),
        ({"x": X[:0], "labels": LABELS[:0]}, ValueError, "must not be empty"),
        ({"labels": LABELS.astype(jnp.float32)}, TypeError, "labels must be an integer array, not float32"),
        ({"labels": 3}, TypeError, "labels must be an integer array, not int"),
        ({"labels": LABELS[:4]}, ValueError, "labels has shape (4,); there must be one for each row, (21,)"),
        ({"bias": BIAS[:5]}, ValueError, "bias has shape (5,); it must be (37,)"),
        ({"bias": BIAS.astype(int)}, TypeError, "bias must be a floating-point array"),
        ({"scale": float("inf")}, ValueError, "scale is inf"),
        ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap is 0.0"),
        ({"block_sizes": (8, 8)}, TypeError, "block_sizes is a tuple"),
        ({"implementation": "liger"}, UnsupportedError, "no implementation is called 'liger'; there are pallas_tpu"),
        ({"implementation": ()}, UnsupportedError, "empty list"),
    ],
)
def test_refusals_name_the_argument_and_the_remedy(change, error, message):
    arguments = {"x": X, "w": W, "labels": LABELS} | change
    with pytest.raises(error, match=re.escape(message)):
        cross_entropy(**arguments)


def test_one_name_fails_fast_a_list_warns_and_goes_on():
    with pytest.raises(UnsupportedError, match="cudnn"):
        cross_entropy(X, W, LABELS, implementation="cudnn")
    with pytest.warns(AutopallasWarning, match="cudnn.*using xla"):
        loss, _ = cross_entropy(X, W, LABELS, implementation=["cudnn", "xla"])
    np.testing.assert_allclose(loss, written_out(X, W, LABELS)[0], atol=1e-5)


def test_an_error_inside_an_implementation_falls_back_only_in_a_list(monkeypatch):
    from autopallas.kernels.cross_entropy import xla

    def broken(*_):
        raise NotImplementedError("not today")

    monkeypatch.setattr(xla, "forward", broken)
    with pytest.raises(NotImplementedError, match="not today"):
        cross_entropy(X, W, LABELS, implementation="xla")
    with pytest.warns(AutopallasWarning, match="not today.*using reference"):
        cross_entropy(X, W, LABELS, implementation=["xla", "reference"])


def test_the_operation_offers_what_it_names():
    assert OPERATION.implementation("xla") is not None
    assert OPERATION.implementation("reference") is not None
