"""What a kernel has to show: its values, odd sizes, dtypes, that it is found, and that training with it is right.

AUTOPALLAS_INTERPRET=1 PYTHONPATH=examples python -m pytest examples/own_kernel
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopallas
from own_kernel import fused_rms_norm, kernel, reference

TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}
"""Of max |x - oracle| / max |oracle|: some eighty roundings of float32, five of bfloat16."""


def arrays(*shape, dtype=jnp.float32):
    random = np.random.default_rng(0)
    return jnp.asarray(random.standard_normal(shape), dtype), jnp.asarray(random.standard_normal(shape[-1]), dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(8, 128), (300, 128), (2, 3, 7, 96), (1, 8)])
def test_values_are_those_of_the_reference_in_float64(shape, dtype):
    x, scale = arrays(*shape, dtype=dtype)
    found = np.asarray(kernel.rms_norm(x, scale, eps=1e-6, interpret=True), np.float64)
    wide, factor = np.asarray(x, np.float64), np.asarray(scale, np.float64)
    oracle = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-6) * factor
    assert np.max(np.abs(found - oracle)) <= TOLERANCE[dtype] * np.max(np.abs(oracle))


def loss(w, scale, x):
    return jnp.mean((reference.rms_norm(x, scale, eps=1e-6) @ w) ** 2)


def test_it_is_found_in_a_train_step_and_the_gradients_are_right():
    if "cpu" not in fused_rms_norm.platforms:
        pytest.skip("the kernel runs on TPUs alone; AUTOPALLAS_INTERPRET=1 interprets it")
    x, scale = arrays(5, 24)
    w = jnp.cos(jnp.arange(24.0 * 6)).reshape(24, 6)
    plain = jax.value_and_grad(loss, argnums=(0, 1, 2))
    step = autopallas.optimize(plain, require={}, strict=True)
    for ours, theirs in zip(jax.tree.leaves(step(w, scale, x)), jax.tree.leaves(plain(w, scale, x)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=5e-5, atol=5e-5 * float(jnp.max(jnp.abs(theirs))))
    assert step.report().counts() == {"fused_rms_norm": 1}
    assert autopallas.verify(step, w, scale, x).ok
