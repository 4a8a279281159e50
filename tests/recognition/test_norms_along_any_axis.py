"""Norms along axes that are not the last, as where channels come first; norms of batches and of groups are none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compare import compare, compiled, in_float64, measured, optimized_like_a_user, with_gradients

import autopallas

B, C, H, W = 2, 6, 3, 4


def array(*shape, dtype=jnp.float32, seed=0, scale=1.0, offset=0.0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape) * scale + offset, dtype)


def centred(x, axis):
    return x - x.mean(axis, keepdims=True)


def layer(x, axis):
    return centred(x, axis) / jnp.sqrt(x.var(axis, keepdims=True) + 1e-6)


def rms(x, axis):
    return x * lax.rsqrt(jnp.mean(x * x, axis, keepdims=True) + 1e-6)


def last(x, norm):
    return norm(x.transpose(0, 2, 3, 1), -1).transpose(0, 3, 1, 2)


def columns(g):
    return g[:, None, None]


def fast(x, axis):
    mean, square = x.mean(axis, keepdims=True), (x * x).mean(axis, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.maximum(square - mean * mean, 0) + 1e-6)


FIRST = {
    "scale and shift": ("layer_norm", lambda x, g, b: layer(x, 1) * columns(g) + columns(b)),
    "scale first": ("layer_norm", lambda x, g, b: columns(g) * layer(x, 1) + columns(b)),
    "scale of the root": (
        "layer_norm",
        lambda x, g, b: centred(x, 1) * (lax.rsqrt(x.var(1, keepdims=True) + 1e-6) * columns(g)) + columns(b),
    ),
    "fast variance": ("layer_norm", lambda x, g, b: fast(x, 1) * columns(g) + columns(b)),
    "shift alone": ("layer_norm", lambda x, g, b: layer(x, 1) + columns(b)),
    "moved to the end": ("layer_norm", lambda x, g, b: last(x, layer) * columns(g) + columns(b)),
    "mapped": (
        "layer_norm",
        lambda x, g, b: jax.vmap(lambda x: layer(x, 0) * columns(g) + columns(b))(x),
    ),
    "rms": ("rms_norm", lambda x, g, b: rms(x, 1) * columns(g)),
    "rms without a scale": ("rms_norm", lambda x, g, b: rms(x, 1)),
    "norm": ("rms_norm", lambda x, g, b: x / jnp.linalg.norm(x, axis=1, keepdims=True) * columns(g)),
    "one scale": ("rms_norm", lambda x, g, b: rms(x, 1) * g[0]),
}
OTHERS = {
    "the first": ("layer_norm", lambda x, g: layer(x, 0) * g[:, None], (8, 5), (8,)),
    "the second of three": ("rms_norm", lambda x, g: rms(x, -2) * g[:, None], (2, 7, 5), (7,)),
    "the second and the last": ("layer_norm", lambda x, g: layer(x, (1, 3)) * g[:, None], (2, 3, 4, 5), (3, 5)),
    "a product's": ("layer_norm", lambda x, g: jax.vmap(lambda row: layer(g @ row, -1) * g[0])(x), (5, 8), (8, 8)),
}


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_channels_may_come_first(name, dtype):
    op, function = FIRST[name]
    arguments = array(B, C, H, W, dtype=dtype), array(C, dtype=dtype, seed=1), array(C, dtype=dtype, seed=2)
    compared = compare(function, arguments)
    assert compared.complaints == []
    assert compared.counts(op) == 1
    step = with_gradients(function, arguments)
    optimized = optimized_like_a_user(step)
    given, true = optimized(*arguments), in_float64(step, arguments)
    own = measured(compiled(step)(*arguments), true)
    for (error, _), (original, _) in zip(measured(given, true), own, strict=True):
        assert error < max({"float32": 2e-5, "bfloat16": 2e-2}[dtype], 2 * original)
    sites = [(site.op, site.direction) for site in optimized.report().sites if site.op != "respelling"]
    assert sites == [(op, "forward+backward")]


@pytest.mark.parametrize("name", OTHERS)
def test_any_axis_may_be_normalised(name):
    op, function, x, g = OTHERS[name]
    compared = compare(function, (array(*x), array(*g, seed=1)))
    assert compared.complaints == []
    assert compared.counts(op) == 1


@pytest.mark.parametrize("form", ["scan", "checkpoint", "vmap", "vmap of weights"])
@pytest.mark.parametrize("name", ["scale and shift", "rms"])
def test_transforms(name, form):
    op, function = FIRST[name]

    def block(x, weights):
        return x + jnp.tanh(function(x, *weights))

    programs = {
        "scan": lambda x, s: lax.scan(lambda x, one: (block(x, one), None), x, s)[0],
        "checkpoint": lambda x, s: lax.scan(lambda x, one: (jax.checkpoint(block)(x, one), None), x, s)[0],
        "vmap": lambda x, s: jax.vmap(lambda x: block(x[None], jax.tree.map(lambda w: w[0], s)))(x),
        "vmap of weights": lambda x, s: jax.vmap(block)(jnp.stack([x, x + 1, -x]), s),
    }
    compared = compare(programs[form], (array(B, C, H, W), (array(3, C, seed=1), array(3, C, seed=2))))
    assert compared.complaints == []
    assert compared.counts(op) == 1


@pytest.mark.parametrize("name", ["scale and shift", "rms", "norm"])
def test_rows_of_zeros_infinities_and_large_offsets(name):
    op, function = FIRST[name]
    x, g, b = array(B, C, H, W, offset=300.0), array(C, seed=1), array(C, seed=2)
    x = x.at[0, :, 0, 0].set(0.0).at[0, 1, 1, 1].set(jnp.inf).at[1, 2, 0, 3].set(jnp.nan).at[1, :, 2, 2].set(7.0)
    optimized = optimized_like_a_user(function)
    given, expected = jax.jit(optimized)(x, g, b), jax.jit(function)(x, g, b)
    assert optimized.report().counts()[op] == 1
    np.testing.assert_array_equal(np.isnan(given), np.isnan(expected))
    true = in_float64(function, (x, g, b))
    (error, _), (own, _) = measured(given, true)[0], measured(expected, true)[0]
    assert error <= max(2e-5, 2 * own)


GROUPS = {
    "a batch": lambda x, g, b: layer(x.reshape(-1, C), 0) * g + b,
    "a batch of images": lambda x, g, b: layer(x.reshape(B, H, W, C), (0, 1, 2)) * g + b,
    "a batch, scale of the root": lambda x, g, b: (
        centred(x.reshape(-1, C), 0) * (lax.rsqrt(x.reshape(-1, C).var(0, keepdims=True) + 1e-6) * g) + b
    ),
    "instances": lambda x, g, b: layer(x.reshape(B, H, W, C), (1, 2)) * g + b,
    "groups": lambda x, g, b: layer(x.reshape(B, H, W, 2, C // 2), (1, 2, 4)).reshape(B, H, W, C) * g + b,
    "a batch without a scale": lambda x, g, b: layer(x.reshape(-1, C), 0),
    "instances without a scale": lambda x, g, b: layer(x.reshape(B, H, W, C), (1, 2)),
    "weights": lambda x, g, b: x.reshape(-1, C) / jnp.linalg.norm(x.reshape(-1, C), axis=0) * g,
    "N - 1": lambda x, g, b: centred(x, 1) / jnp.sqrt(x.var(1, keepdims=True, ddof=1) + 1e-6) * columns(g),
    "another axis": lambda x, g, b: centred(x, 1) / jnp.sqrt(x.var(2, keepdims=True) + 1e-6) * columns(g),
    "weighted": lambda x, g, b: x * lax.rsqrt((x * x * columns(g)).mean(1, keepdims=True) ** 2 + 1e-6),
}


@pytest.mark.parametrize("name", GROUPS)
def test_norms_of_batches_groups_and_instances_are_left_alone(name):
    compared = compare(GROUPS[name], (array(B, C, H, W), array(C, seed=1), array(C, seed=2)))
    assert compared.complaints == []
    assert compared.counts("rms_norm") + compared.counts("layer_norm") == 0


def test_what_standardises_a_batch_is_a_near_miss_that_says_so():
    report = autopallas.explain(lambda x: layer(x, 0), array(8, 5))
    assert [(miss.op, "not the last" in miss.reason) for miss in report.near_misses] == [("layer_norm", True)]


@pytest.mark.parametrize("implementation", ["pallas_gpu", "pallas_tpu"])
def test_kernels_leave_columns_that_lie_apart_to_the_original(implementation):
    """A kernel would read a transposed copy, of which nothing that was measured of rows in memory knows."""
    optimized = autopallas.optimize(FIRST["rms"][1], objective="always", implementation=(implementation,))
    (site,) = autopallas.explain(optimized, array(B, C, H, W), array(C), array(C)).sites
    assert site.verdict == "kept"
