"""Replaced attention is as precise as the program's own: operands of different dtypes, and masks that are multiplied.

Judged by the same function in float64, with the tolerance of float32, or twice the program's own error.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopallas

B, T, S, N, D = 2, 24, 32, 2, 8
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def scores(q: Any, k: Any) -> Any:
    return jnp.einsum("btnd,bsnd->bnts", q, k)


def promoting(q, k, v):
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores(q, k) / 3, axis=-1), v)


def widened(q, k, v):
    q, k, v = (x.astype(jnp.promote_types(x.dtype, F32)) for x in (q, k, v))
    return promoting(q, k, v)


def declared(q, k, v):
    wide = jnp.promote_types(q.dtype, F32)
    s = jnp.einsum("btnd,bsnd->bnts", q, k, preferred_element_type=wide)
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(s / 3, axis=-1), v, preferred_element_type=wide)


def divided_after(q, k, v):
    e = jnp.exp(scores(q, k) / 3)
    return jnp.einsum("bnts,bsnd->btnd", e, v) / jnp.swapaxes(e.sum(-1), 1, 2)[..., None]


def agrees(function: Any, arguments: Any, wanted: Any) -> None:
    """The function and its gradients, with the float64 of every argument in the place of the oracle."""

    def everything(function: Any) -> Any:
        def loss(*arguments: Any) -> Any:
            out = function(*arguments)
            weight = jnp.cos(jnp.arange(out.size, dtype=F32)).reshape(out.shape)
            return (out * weight).sum(), out

        def run(*arguments: Any) -> Any:
            (_, out), gradients = jax.value_and_grad(loss, wanted, has_aux=True)(*arguments)
            return [out, *gradients]

        return run

    with autopallas.options(objective="always"):
        report = autopallas.explain(everything(function), *arguments)
        assert [site.verdict for site in report.sites] == ["applied"], str(report)
        found = autopallas.optimize(everything(function), strict=True)(*arguments)
    own = jax.jit(everything(function))(*arguments)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in arguments]
        exact = everything(function)(*wide)
    for number, (x, y, z) in enumerate(zip(found, own, exact, strict=True)):
        a, b, c = (np.asarray(array, np.float64) for array in (x, y, z))
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        inside = np.isfinite(b) & np.isfinite(c)
        largest = np.abs(c[inside]).max()
        # A result is rounded once more to its own dtype.
        tolerance = (5e-5 if number else 1e-5) + float(jnp.finfo(x.dtype).eps)
        allowed = max(tolerance, 2 * np.abs(b - c)[inside].max() / largest)
        assert np.abs(a - c)[inside].max() / largest <= allowed, number


@pytest.mark.parametrize("function", [promoting, widened, declared, divided_after])
@pytest.mark.parametrize(
    "dtypes", [(F32, BF16, BF16), (F32, F32, BF16), (BF16, F32, F32), (BF16, F16, F16), (F32, F16, BF16)],
    ids=lambda dtypes: "-".join(np.dtype(d).name for d in dtypes),
)  # fmt: skip
def test_operands_that_the_program_promotes_are_not_rounded(function, dtypes):
    random = np.random.default_rng(0)
    shapes = (B, T, N, D), (B, S, N, D), (B, S, N, D)
    # With an offset of all keys, gradients of scores that are rounded no longer add up to zero.
    offsets, factors = (0, 8, 4), (0.1, 1, 1)
    arguments = [
        jnp.asarray(offset + factor * random.standard_normal(shape), dtype)
        for shape, offset, factor, dtype in zip(shapes, offsets, factors, dtypes, strict=True)
    ]
    agrees(function, arguments, (0, 1, 2))


def multiplied(q, k, v, mask):
    e = jnp.exp(scores(q, k)) * mask
    return jnp.einsum("bnts,bsnd->btnd", e / e.sum(-1, keepdims=True), v)


def multiplied_twice(q, k, v, mask):
    e = jnp.exp(scores(q, k)) * mask * jnp.abs(mask)
    return jnp.einsum("bnts,bsnd->btnd", e / e.sum(-1, keepdims=True), v)


def divided(q, k, v, mask):
    e = jnp.exp(scores(q, k)) / jnp.where(mask == 0, jnp.inf, 1 / jnp.where(mask == 0, 1, mask))
    return jnp.einsum("bnts,bsnd->btnd", e / e.sum(-1, keepdims=True), v)


def causal_too(q, k, v, mask):
    s = jnp.where(jnp.arange(S) <= jnp.arange(T)[:, None] + 8, scores(q, k), -jnp.inf)
    e = jnp.exp(s) * mask
    return jnp.einsum("bnts,bsnd->btnd", e / e.sum(-1, keepdims=True), v)


def with_epsilon(q, k, v, mask):
    """The epsilon is a quarter of an exponential: of one key, a much smaller one would leave gradients of roundings."""
    e = jnp.exp(scores(q, k)) * mask
    return jnp.einsum("bnts,bsnd->btnd", e / (e.sum(-1, keepdims=True) + 1e-18), v)


MASKS = {
    "zeros and ones": lambda random, shape: random.uniform(size=shape) < 0.5,
    "any size and sign": lambda random, shape: random.choice([0, 0, 2.0, 3.0, 0.25, -0.1], shape),
    "one key left": lambda random, shape: np.arange(S) == 5,
}


@pytest.mark.parametrize("function", [multiplied, multiplied_twice, divided, causal_too, with_epsilon])
@pytest.mark.parametrize("mask", MASKS)
def test_keys_whose_weight_is_zero_take_nothing_from_the_others(function, mask):
    """The scores of the dead keys are near 60, those of the others near -40: exponentials that float32 holds, and whose
    ratio it does not."""
    random = np.random.default_rng(1)
    weights = np.broadcast_to(MASKS[mask](random, (B, 1, 1, S)), (B, 1, 1, S)).astype(np.float32)
    q, k, v = (random.standard_normal(shape) * 0.3 for shape in ((B, T, N, D), (B, S, N, D), (B, S, N, D)))
    q[..., 0] = 10
    k[..., 0] = np.where(weights[:, 0, 0, :, None] == 0, 6, -4)
    arguments = [jnp.asarray(x, F32) for x in (q, k, v, weights)]
    agrees(function, arguments, (0, 1, 2))


def test_the_gradient_of_a_weight_of_zero_is_not_zero():
    random = np.random.default_rng(2)
    q, k, v = (jnp.asarray(random.standard_normal((B, n, N, D)) * 0.3, F32) for n in (T, S, S))
    mask = jnp.asarray(random.choice([0, 1.0], (B, 1, 1, S)), F32)
    agrees(multiplied, (q, k, v, mask), (0, 3))


def _with_temperature(q, k, v, weights, temperature):
    return jax.nn.softmax(q @ k.mT / temperature, -1) @ v


def _with_temperature_and_weights(q, k, v, weights, temperature):
    return (jax.nn.softmax(q @ k.mT / temperature, -1) * (1 + jnp.tanh(weights))) @ v


def _with_scales(q, k, v, scales, weights):
    scores = q @ k.mT * (1.2 + jnp.tanh(scales)) + scales
    return (jax.nn.softmax(scores, -1) * (weights > -1)) @ v


def test_gradients_that_the_score_multiplies_keep_their_digits_where_it_is_large():
    """Where one key has nearly all weight of a row, its logit's gradient is a difference of equal numbers."""
    random = np.random.default_rng(202)
    shapes = ((2, 2, 32, 8), 16), ((2, 2, 17, 8), 16), ((2, 2, 17, 8), 1), ((32, 17), 1), ((2, 2, 32, 17), 1)
    narrow = [jnp.asarray(random.standard_normal(shape) * scale, jnp.float32) for shape, scale in shapes]

    def gradient(*arrays):
        return jax.grad(lambda *x: jnp.sin(_with_scales(*x)).sum(), 3)(*arrays)

    with jax.enable_x64(True):
        true = np.asarray(jax.jit(gradient)(*(np.asarray(x, np.float64) for x in narrow)))
    optimized = autopallas.optimize(gradient, objective="always", ops=("attention",), strict=True)
    errors = [np.abs(np.asarray(f(*narrow), np.float64) - true).max() for f in (jax.jit(gradient), optimized)]
    assert optimized.report().counts() == {"attention": 1}
    # 1e-4: half a rounding of scores of some thousands, where the original happens to be more exact.
    assert errors[1] <= max(errors[0], 1e-4)


@pytest.mark.parametrize("attend", [_with_temperature, _with_temperature_and_weights])
def test_the_gradient_of_a_temperature_keeps_its_digits_where_scores_are_large(attend):
    """It sums what the keys of a row contribute, times scores in the thousands, and nearly all of it cancels."""
    random = np.random.default_rng(0)
    shapes = ((4, 64, 16), 30), ((4, 64, 16), 30), ((4, 64, 16), 1), ((4, 64, 64), 1)
    arguments = [random.standard_normal(shape) * scale for shape, scale in shapes] + [np.float64(1.3)]

    def gradient(*arrays):
        return jax.grad(lambda *x: jnp.sin(attend(*x)).sum(), 4)(*arrays)

    narrow = [jnp.asarray(x, jnp.float32) for x in arguments]
    with jax.enable_x64(True):
        true = float(jax.jit(gradient)(*(x.astype(np.float64) for x in map(np.asarray, narrow))))
    optimized = autopallas.optimize(gradient, objective="always", ops=("attention",), strict=True)
    errors = [abs(float(f(*narrow)) - true) for f in (jax.jit(gradient), optimized)]
    assert optimized.report().counts() == {"attention": 1}
    assert errors[1] <= max(2 * errors[0], 2e-3 * max(abs(true), 1))


def test_losses_of_large_logits_that_are_scaled_by_a_temperature_keep_their_digits():
    """The logits are rounded alike where the sums are taken and in the backward."""
    random = np.random.default_rng(0)
    x, w = (jnp.asarray(random.standard_normal(shape) * 30, F32) for shape in ((64, 32), (32, 200)))
    temperature = jnp.float32(1.3)

    def step(x, w, temperature):
        def loss(x, w):
            return -jax.nn.log_softmax(x @ w * temperature)[jnp.arange(64), jnp.arange(64)].mean()

        return jax.grad(loss, (0, 1))(x, w)

    with jax.enable_x64(True):
        true = jax.jit(step)(*(np.asarray(a, np.float64) for a in (x, w, temperature)))
    optimized = autopallas.optimize(step, objective="always", ops=("cross_entropy",), strict=True)
    for original, given, exact in zip(
        jax.jit(step)(x, w, temperature), optimized(x, w, temperature), true, strict=True
    ):
        own, error = (np.abs(np.asarray(a, np.float64) - exact).max() for a in (original, given))
        assert error <= max(2 * own, 5e-5 * np.abs(exact).max())
    assert optimized.report().counts() == {"cross_entropy": 1}
