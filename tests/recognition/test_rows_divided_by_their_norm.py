"""Rows divided by their norm, also with factors before and after: each is an RMSNorm whose numbers are kept as they are
written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compare import compare, compiled, in_float64, measured, optimized_like_a_user, with_gradients

import autopallas

N = 33


def array(*shape, dtype=jnp.float32, seed=0, scale=1.0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape) * scale, dtype)


def norm(x):
    return jnp.linalg.norm(x, axis=-1, keepdims=True)


def squares(x):
    return jnp.sum(x * x, -1, keepdims=True)


NORMS = {
    # function of the rows and a scale for each column: gain, factor, epsilon, and whether that is outside of the root
    "norm": (lambda x, g: x / norm(x) * g, (1.0, N, 0.0, False)),
    "epsilon after the norm": (lambda x, g: x / (norm(x) + 1e-3) * g, (1.0, N, 1e-3, True)),
    "epsilon before the root": (lambda x, g: g * x * lax.rsqrt(squares(x) + 1e-3), (1.0, N, 1e-3, False)),
    "times a number": (lambda x, g: 10.0 * x / jnp.sqrt(squares(x) + 1e-3) * g, (10.0, N, 1e-3, False)),
    "times the root of N": (lambda x, g: N**0.5 * x * lax.rsqrt(squares(x) + 1e-3) * g, (1.0, 1.0, 1e-3 / N, False)),
    "the root of N, epsilon after": (lambda x, g: x / (norm(x) + 1e-3) * N**0.5 * g, (1.0, 1.0, 1e-3 / N**0.5, True)),
    "negative": (lambda x, g: -x / norm(x) * g, (-1.0, N, 0.0, False)),
    "half of an RMSNorm": (
        lambda x, g: 0.5 * x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3) * g,
        (0.5, 1.0, 1e-3, False),
    ),
    "a floor under the norm": (lambda x, g: x / jnp.maximum(norm(x), 1e-3) * g, (1.0, N, 1e-3, True)),
    "a floor under the squares": (lambda x, g: x * lax.rsqrt(jnp.maximum(1e-3, squares(x))) * g, (1.0, N, 1e-3, False)),
    "a floor under the root of the mean": (
        lambda x, g: g * x / jnp.clip(jnp.sqrt(squares(x) / N), 1e-3),
        (1.0, 1.0, 1e-3, True),
    ),
    "a floor under a multiple of the mean": (
        lambda x, g: x / jnp.sqrt(4 * jnp.maximum(squares(x) / N, 1e-3)) * g,
        (1.0, 4.0, 4e-3, False),
    ),
    "a floor, times a number": (lambda x, g: x / jnp.maximum(norm(x), 1e-3) * (3.0 * g), (1.0, N, 1e-3, True)),
    "a product": (
        lambda x, g: x * lax.rsqrt(jnp.einsum("...d,...d->...", x, x) + 1e-3)[..., None] * (1 + g),
        (1.0, N, 1e-3, False),
    ),
    "in float32": (
        lambda x, g: (lambda w: w / (norm(w) + 1e-3))(x.astype(jnp.float32)).astype(x.dtype) * g,
        (1.0, N, 1e-3, True),
    ),
}
each_norm = pytest.mark.parametrize("name", NORMS)


@each_norm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_found_with_its_backward_and_right(name, dtype):
    function, _ = NORMS[name]
    arguments = array(2, 7, N, dtype=dtype), array(N, dtype=dtype, seed=1)
    compared = compare(function, arguments)
    assert compared.complaints == []
    assert compared.counts("rms_norm") == 1
    step = with_gradients(function, arguments)
    optimized = optimized_like_a_user(step)
    given, true = optimized(*arguments), in_float64(step, arguments)
    own = measured(compiled(step)(*arguments), true)
    for (error, _), (original, _) in zip(measured(given, true), own, strict=True):
        assert error < max({"float32": 1e-5, "bfloat16": 2e-2}[dtype], 2 * original)
    assert [(site.op, site.direction) for site in optimized.report().sites] == [("rms_norm", "forward+backward")]


@each_norm
def test_its_numbers_are_those_of_the_program(name):
    function, (gain, factor, epsilon, outside) = NORMS[name]
    (site,) = autopallas.explain(function, array(2, 7, N), array(N, seed=1)).sites
    given = [site.spec[name] for name in ("gain", "factor", "epsilon")]
    np.testing.assert_allclose(given, (gain, factor, epsilon), rtol=1e-6)
    assert site.spec["outside"] is outside
    assert site.spec["floor"] is ("floor" in name)


PLAIN = {
    "alone": lambda x, g: x / norm(x),
    "one scale": lambda x, g: x / (norm(x) + 1e-5) * g[0],
    "one scale, the root of N": lambda x, g: g[:1] * (x / norm(x) * N**0.5),
    "a scale for each head": lambda x, g: x * lax.rsqrt(squares(x) + 1e-6) * g[:7, None],
    "one row": lambda x, g: x[0, 0] / jnp.linalg.norm(x[0, 0]) * g,
    "mapped": lambda x, g: jax.vmap(jax.vmap(lambda row: row / jnp.linalg.norm(row) * g))(x),
}


@pytest.mark.parametrize("name", PLAIN)
def test_scales_may_be_missing_or_be_single_numbers(name):
    arguments = array(2, 7, N), array(N, seed=1)
    compared = compare(PLAIN[name], arguments)
    assert compared.complaints == []
    assert compared.counts("rms_norm") == 1


@pytest.mark.parametrize("form", ["scan", "checkpoint", "vmap", "vmap of weights", "gradients of examples"])
@pytest.mark.parametrize("name", ["norm", "epsilon after the norm", "times a number"])
def test_transforms(name, form):
    function, _ = NORMS[name]

    def layer(x, weights):
        g, w = weights
        return x + jnp.tanh(function(x, g) @ w)

    programs = {
        "scan": lambda x, s: lax.scan(lambda x, one: (layer(x, one), None), x, s)[0],
        "checkpoint": lambda x, s: lax.scan(lambda x, one: (jax.checkpoint(layer)(x, one), None), x, s)[0],
        "vmap": lambda x, s: jax.vmap(lambda x: layer(x, jax.tree.map(lambda w: w[0], s)))(x),
        "vmap of weights": lambda x, s: jax.vmap(layer)(x[:3], s),
        "gradients of examples": lambda x, s: jax.vmap(
            lambda x: jax.grad(lambda s: jnp.sum(jnp.sin(layer(x, jax.tree.map(lambda w: w[0], s)))))(s)
        )(x),
    }
    arguments = array(4, 5, N), (array(3, N, seed=1, scale=0.3), array(3, N, N, seed=2, scale=0.3))
    compared = compare(programs[form], arguments, gradients=form != "gradients of examples")
    assert compared.complaints == []
    assert compared.counts("rms_norm") == 1


@pytest.mark.parametrize("name", ["a floor under the norm", "a floor under the squares"])
def test_rows_at_their_floor_have_half_of_a_gradient(name):
    """JAX gives each of two equal numbers half of the gradient of their maximum."""
    function = {
        "a floor under the norm": lambda x, g: x / jnp.maximum(norm(x), 2.0) * g,
        "a floor under the squares": lambda x, g: x * lax.rsqrt(jnp.maximum(squares(x), 4.0)) * g,
    }[name]
    x = array(3, 16).at[1].set(0.5).at[2].mul(1e-2)
    arguments = x, array(16, seed=1)
    compared = compare(function, arguments)
    assert compared.complaints == []
    assert compared.counts("rms_norm") == 1


@pytest.mark.parametrize(
    "name",
    ["norm", "epsilon after the norm", "epsilon before the root", "times a number", "a floor under the norm",
     "a floor under the squares"],
)  # fmt: skip
def test_rows_of_zeros_infinities_and_numbers_whose_squares_are_none(name):
    function, _ = NORMS[name]
    x, g = array(2, 7, N), array(N, seed=1)
    x = x.at[0, 0].set(0.0).at[0, 1, 3].set(jnp.inf).at[1, 2, 0].set(jnp.nan).at[1, 3].mul(1e-18).at[1, 4].mul(1e25)
    step = with_gradients(function, (x, g))
    optimized = optimized_like_a_user(step)
    given, expected = jax.jit(optimized)(x, g), jax.jit(step)(x, g)
    assert optimized.report().counts()["rms_norm"] == 1
    (result, (gradient, _)), (own, (own_gradient, _)) = given, expected
    np.testing.assert_array_equal(np.isfinite(result), np.isfinite(own))
    np.testing.assert_array_equal(np.isnan(result), np.isnan(own))
    finite = np.isfinite(own)
    np.testing.assert_allclose(result[finite], own[finite], rtol=1e-4, atol=1e-6)
    # Where the gradient overflows in one order of the operations, it need not in another.
    ordinary = np.ones((2, 7), bool)
    ordinary[[0, 1, 1, 1], [1, 2, 3, 4]] = False
    np.testing.assert_array_equal(np.isnan(gradient[ordinary]), np.isnan(own_gradient[ordinary]))
    finite = ordinary[..., None] & np.isfinite(own_gradient)
    np.testing.assert_allclose(gradient[finite], own_gradient[finite], rtol=1e-4, atol=1e-5)


def test_numbers_of_any_size_in_float64():
    """Neither the mean of the squares nor the epsilon that belongs to the mean would hold what these sums hold."""
    function = lambda x: x * lax.rsqrt(squares(x) + 1e-37)  # noqa: E731
    x = array(3, 4096, scale=1e-20)
    given = jax.jit(optimized_like_a_user(function))(x)
    true = in_float64(function, (x,))
    own = measured(jax.jit(function)(x), true)[0][0]
    assert measured(given, true)[0][0] <= max(1e-5, 2 * own)


LOOK_ALIKES = {
    "a floor and an epsilon": lambda x, g: x / (jnp.maximum(norm(x), 1e-3) + 1e-3) * g,
    "an epsilon and a floor": lambda x, g: x / jnp.maximum(jnp.sqrt(squares(x) + 1e-3), 0.1) * g,
    "a floor under the root and one under the squares": (
        lambda x, g: x / jnp.maximum(jnp.sqrt(jnp.maximum(squares(x), 1e-3)), 0.1) * g
    ),
    "a floor for each row": lambda x, g: x / jnp.maximum(norm(x), g[:7, None]),
    "a floor that is trained": lambda x, g: x / jnp.maximum(norm(x), g[0]),
    "a ceiling": lambda x, g: x / jnp.minimum(norm(x), 3.0) * g,
    "a floor and a ceiling": lambda x, g: x / jnp.clip(norm(x), 1e-3, 3.0) * g,
    "the squares under a floor as divisor": lambda x, g: x / jnp.maximum(squares(x), 1e-3) * g,
    "the root of the norm under a floor": lambda x, g: x / jnp.sqrt(jnp.maximum(norm(x), 1e-3)) * g,
    "a negative floor": lambda x, g: x / jnp.maximum(norm(x), -1.0) * g,
    "clipped": lambda x, g: x * jnp.minimum(1.0, 3.0 / norm(x)) * g,
    "clipped by a choice": lambda x, g: jnp.where(norm(x) < 3.0, x, x / norm(x) * 3.0),
    "a safe norm": lambda x, g: x / jnp.where(norm(x) == 0, 1.0, norm(x)),
    "the norm of all": lambda x, g: x / jnp.linalg.norm(x, axis=-1, keepdims=True).sum(),
    "weighted": lambda x, g: x * lax.rsqrt(jnp.sum(g * x * x, -1, keepdims=True) + 1e-6),
    "absolute values": lambda x, g: x / (jnp.sum(jnp.abs(x), -1, keepdims=True) + 1e-6) * g,
    "like a softmax": lambda x, g: jnp.exp(x) / jnp.sum(jnp.exp(x), -1, keepdims=True) * g,
    "other rows": lambda x, g: x / norm(x)[::-1] * g,
    "the norm of a part": lambda x, g: x / norm(x[..., :16]) * g,
    "a cosine": lambda x, g: (x @ g) / (norm(x)[..., 0] * jnp.linalg.norm(g)),
    "weight normalisation": lambda x, g: x[0] / jnp.linalg.norm(x[0], axis=0) * g,
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_are_left_alone(name):
    compared = compare(LOOK_ALIKES[name], (array(2, 7, N), jnp.abs(array(N, seed=1))))
    assert compared.complaints == []
    assert compared.counts("rms_norm") + compared.counts("layer_norm") == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [("a floor and an epsilon", "floor"), ("an epsilon and a floor", "floor"), ("a safe norm", "such as of a 0")],
)
def test_a_floor_beside_an_epsilon_and_a_choice_are_near_misses_that_say_so(name, reason):
    report = autopallas.explain(LOOK_ALIKES[name], array(2, 7, N), array(N, seed=1))
    assert [(miss.op, reason in miss.reason) for miss in report.near_misses] == [("rms_norm", True)]


def test_rows_that_a_loop_stacks_as_it_is_given_them():
    def state_space(k, v):
        k = k / (1 + norm(k))

        def step(i, carried):
            state, results = carried
            state = 0.9 * state + k[i][:, None] * v[i]
            return state, results.at[i].set(k[i] @ state)

        first = jnp.zeros((k.shape[1], v.shape[1])), jnp.zeros_like(v)
        return jnp.sum(jnp.sin(lax.fori_loop(0, k.shape[0], step, first)[1]))

    function, given = jax.value_and_grad(state_space, (0, 1)), (array(64, 16), array(64, 8))
    run = autopallas.optimize(function, objective="always", strict=True)
    for a, b in zip(jax.tree.leaves(run(*given)), jax.tree.leaves(jax.jit(function)(*given)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())  # sums in another order
    assert not run.report().failures
