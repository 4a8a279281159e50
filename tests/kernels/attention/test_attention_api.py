"""The public function: what it computes, what it refuses, and how it chooses."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopallas.errors import AutopallasWarning, UnsupportedError
from autopallas.kernels.attention import attention
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.operation import OPERATION


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


QUERY, KEY, VALUE = normal(0, 2, 19, 4, 8), normal(1, 2, 23, 2, 8), normal(2, 2, 23, 2, 5)
BIAS = normal(3, 1, 4, 19, 23)
MASK = jnp.asarray(np.random.default_rng(4).uniform(size=(2, 1, 19, 23)) < 0.7).at[:, :, :, 0].set(True)


def written_out(query, key, value, bias=None, mask=None, is_causal=False, scale=None, logits_soft_cap=None, sink=None):
    key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
    s = jnp.einsum("btnd,bsnd->bnts", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if logits_soft_cap is not None:
        s = logits_soft_cap * jnp.tanh(s / logits_soft_cap)
    s = s if bias is None else s + bias
    s = s if mask is None else jnp.where(mask, s, -jnp.inf)
    s = jnp.where(np.tri(*s.shape[-2:], dtype=bool), s, -jnp.inf) if is_causal else s
    if sink is not None:
        s = jnp.concatenate([s, jnp.broadcast_to(sink[None, :, None, None], (*s.shape[:3], 1))], axis=-1)
    p = jax.nn.softmax(s, axis=-1)[..., : key.shape[1]]
    return jnp.einsum("bnts,bsnd->btnd", p, value)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"bias": BIAS, "mask": MASK, "is_causal": True, "scale": 0.5, "logits_soft_cap": 2.0},
        {"sink": normal(5, 4), "bias": BIAS[:, :1]},
    ],
    ids=["plain", "everything", "sink"],
)
def test_values_and_gradients(arguments, implementation):
    static = {k: v for k, v in arguments.items() if not isinstance(v, jax.Array) or v.dtype == bool}
    floating = {k: v for k, v in arguments.items() if k not in static}

    def loss(function, **rest):
        return lambda x: (function(*x[:3], **x[3], **static, **rest) ** 2).sum()

    operands = (QUERY, KEY, VALUE, floating)
    sizes = BlockSizes(8, 16)
    found = jax.jit(jax.value_and_grad(loss(attention, implementation=implementation, block_sizes=sizes)))(operands)
    wanted = jax.jit(jax.value_and_grad(loss(written_out)))(operands)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)


def test_a_row_without_keys_has_the_mean_of_the_values():
    out = attention(QUERY, KEY, VALUE, mask=jnp.zeros((1, 1, 1, 1), bool))
    mean = jnp.repeat(VALUE.mean(axis=1), 2, axis=1)[:, None]
    np.testing.assert_allclose(out, jnp.broadcast_to(mean, out.shape), atol=1e-6)


def test_under_vmap_and_narrow_dtypes():
    query, key, value = (x.astype(jnp.bfloat16) for x in (QUERY, KEY, VALUE))
    out = jax.vmap(lambda q: attention(q[None], key[:1], value[:1])[0])(query)
    assert out.dtype == jnp.bfloat16
    assert out.shape == (2, 19, 4, 5)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"query": QUERY[0]}, ValueError, "query has shape (19, 4, 8)"),
        ({"query": QUERY.astype(int)}, TypeError, "query must be a floating-point array"),
        ({"query": QUERY[:, :, :3]}, ValueError, "query has 3 heads, not a multiple of key's 2"),
        ({"key": KEY[..., :4]}, ValueError, "key has head size 4 and query 8"),
        ({"key": KEY[:1]}, ValueError, "key has batch 1 and query 2"),
        ({"value": VALUE[:, :9]}, ValueError, "value has 9 positions and key 23"),
        ({"value": VALUE[:, :, :1]}, ValueError, "value has 1 heads and key 2"),
        ({"mask": BIAS}, TypeError, "mask must be a boolean array, not float32"),
        ({"mask": MASK[0]}, ValueError, "mask has shape (1, 19, 23); it must broadcast against"),
        ({"bias": BIAS[..., :7]}, ValueError, "bias has shape (1, 4, 19, 7)"),
        ({"sink": BIAS}, ValueError, "one per query head, (4,)"),
        ({"scale": float("nan")}, ValueError, "scale is nan"),
        ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap is 0.0"),
        ({"block_sizes": (8, 8)}, TypeError, "block_sizes is a tuple"),
        ({"implementation": "flash"}, UnsupportedError, "no implementation is called 'flash'; there are pallas_tpu"),
        ({"implementation": ()}, UnsupportedError, "empty list"),
    ],
)
def test_refusals_name_the_argument_and_the_remedy(change, error, message):
    arguments = {"query": QUERY, "key": KEY, "value": VALUE} | change
    with pytest.raises(error, match=re.escape(message)):
        attention(**arguments)


def without(monkeypatch, name: str) -> None:
    """An operation without the named implementation, on any machine."""
    original = type(OPERATION).implementation
    monkeypatch.setattr(
        type(OPERATION), "implementation", lambda s, asked: None if asked == name else original(s, asked)
    )


def test_one_name_fails_fast_a_list_warns_and_goes_on(monkeypatch):
    without(monkeypatch, "cudnn")
    with pytest.raises(UnsupportedError, match="cudnn"):
        attention(QUERY, KEY, VALUE, implementation="cudnn")
    with pytest.warns(AutopallasWarning, match="cudnn.*using xla"):
        out = attention(QUERY, KEY, VALUE, implementation=["cudnn", "xla"])
    np.testing.assert_allclose(out, written_out(QUERY, KEY, VALUE), atol=1e-5)
    with pytest.raises(UnsupportedError, match="cudnn"):
        attention(QUERY, KEY, VALUE, implementation=["cudnn"])


def test_an_error_inside_an_implementation_falls_back_only_in_a_list(monkeypatch):
    from autopallas.kernels.attention import xla

    def broken(*_):
        raise NotImplementedError("not today")

    monkeypatch.setattr(xla, "forward", broken)
    with pytest.raises(NotImplementedError, match="not today"):
        attention(QUERY, KEY, VALUE, implementation="xla")
    with pytest.warns(AutopallasWarning, match="not today.*using reference"):
        attention(QUERY, KEY, VALUE, implementation=["xla", "reference"])
