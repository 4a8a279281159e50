"""Attention with the heads on two axes: what it computes, what it leaves to others, and what XLA makes of it."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import KEY, QUERY, SCORE, oracle, traced
from support.oracle import errors
from test_attention_implementations import BY_NAME, TOLERANCES, computed

import autopallas
from autopallas.kernels.attention import reference, xla_heads
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported

CPU = Device("cpu", "cpu")
SIZES = BlockSizes.get_default()


def one(name, **changes):
    """A case of one sequence with an even number of key heads."""
    return replace(BY_NAME[name], batch=1, key_heads=4, **changes)


def positions(s, i, j):
    return jnp.tanh(s * np.float32(0.3)) * 5 - abs(i - j).astype(jnp.float32) * np.float32(0.1)


CASES = {
    "full": one("full"),
    "odd sizes": one("full with odd sizes"),
    "groups": one("full", groups=3),
    "one row": one("full", query_length=1),
    "large logits": one("large logits"),
    "positions": one("full", groups=2, score=traced(positions, SCORE, QUERY, KEY)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, dtype):
    case, dtype = CASES[name], jnp.dtype(dtype)
    assert xla_heads.supports(case.spec(dtype), CPU) == Supported()
    found, wanted = computed(xla_heads, case, dtype, SIZES), oracle(case, dtype)
    own = computed(reference, case, dtype, SIZES)
    for part, value in wanted.items():
        largest, mean = errors(found[part], value)
        # The plain formula's own error in this precision counts twice.
        allowed = max(TOLERANCES[dtype.name][part.startswith("d")], 2 * errors(own[part], value)[0])
        assert largest <= allowed, f"{part}: max error {largest:.2e}, mean {mean:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize(
    "name", ["causal", "bias", "lengths", "sink", "probabilities multiplied", "weights inside the sum"]
)
def test_masks_side_inputs_and_weights_are_left_to_others(name):
    case = one(name) if name in BY_NAME else one(next(known for known in BY_NAME if name in known))
    assert isinstance(xla_heads.supports(case.spec(), CPU), Unsupported)


def test_several_sequences_and_odd_heads_are_left_to_others():
    assert isinstance(xla_heads.supports(replace(CASES["full"], batch=2).spec(), CPU), Unsupported)
    assert isinstance(xla_heads.supports(replace(CASES["full"], key_heads=3).spec(), CPU), Unsupported)
    assert "CPU" in xla_heads.supports(CASES["full"].spec(), Device("tpu", "TPU v6e")).reason


def attention(q, k, v):
    scores = jnp.einsum("btnd,bsnd->bnts", q, k) / np.sqrt(q.shape[-1]).astype(np.float32)
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores), v)


def test_a_program_without_an_array_of_all_scores():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 1024, 8, 64))
    own = autopallas.optimize(attention, implementation="xla_heads")
    compiled = jax.jit(own).lower(q, k, v).compile()
    (site,) = own.report().sites
    assert (site.verdict, site.implementation) == ("applied", "xla_heads")
    scores = 8 * 1024 * 1024 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < scores / 2
    np.testing.assert_allclose(compiled(q, k, v), attention(q, k, v), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_under_vmap_another_implementation_computes_several_sequences(wrap, recwarn):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 3, 1, 64, 4, 8))
    own = autopallas.optimize(attention, objective="always", implementation=("xla_heads", "xla"))

    def loss(function):
        return lambda *arrays: jnp.sum(jax.vmap(wrap(function))(*arrays) ** 2)

    found, wanted = (jax.value_and_grad(loss(f), (0, 1, 2))(q, k, v) for f in (own, attention))
    (site,) = own.report().sites
    assert site.implementation == "xla_heads"
    assert not [w for w in recwarn if "autopallas" in str(w.message)]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_under_vmap_an_implementation_asked_for_by_name_refuses_several_sequences():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 3, 1, 64, 4, 8))
    own = autopallas.optimize(attention, implementation="xla_heads")
    with pytest.raises(autopallas.UnsupportedError, match="one sequence"):
        jax.vmap(own)(q, k, v)
