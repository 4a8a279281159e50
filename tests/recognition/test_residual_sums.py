"""The addition before a normalisation is part of its site where that can give the sum too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compare import (
    compare,
    compiled,
    in_float64,
    measured,
    optimized_like_a_user,
    optimized_step,
    with_gradients,
)

import autopallas

WIDTH = 33


def array(*shape, dtype=jnp.float32, seed=0, scale=1.0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape) * scale, dtype)


def mean(x):
    return jnp.mean(x, -1, keepdims=True)


def rms(x, g):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(mean(wide * wide) + 1e-6)).astype(x.dtype) * g


def layer(x, g):
    wide = x.astype(jnp.float32)
    return ((wide - mean(wide)) * lax.rsqrt(wide.var(-1, keepdims=True) + 1e-6)).astype(x.dtype) * g


NORMS = {"rms_norm": rms, "layer_norm": layer}
each_norm = pytest.mark.parametrize("op", NORMS)


def operands(dtype="float32", scale=1.0):
    x, y = (array(2, 5, WIDTH, dtype=dtype, seed=n, scale=scale) for n in (0, 1))
    return x, y, array(WIDTH, dtype=dtype, seed=2)


def block(op, scale=1.0):
    def program(x, y, g):
        h = x + y
        return 0.5 / scale * h, jnp.tanh(NORMS[op](h, g))

    return program


def sites_of(report):
    """Per norm: its direction, whether it reads a residual, and whether it gives the sum."""
    norms = [site for site in report.sites if site.op in NORMS]
    return [(s.direction, s.spec["residual_dtype"] is not None, s.spec["sum_dtype"] is not None) for s in norms]


def step_outcome(program, arguments):
    """A train step optimized as a whole: its sites, and the largest errors of it and of the original."""
    step, given, report = optimized_step(program, arguments)
    true = in_float64(step, arguments)
    own = measured(compiled(step)(*arguments), true)
    return sites_of(report), [(a, b) for (a, _), (b, _) in zip(measured(given, true), own, strict=True)]


@each_norm
@pytest.mark.parametrize("dtype, scale", [("float32", 1.0), ("bfloat16", 30.0), ("float16", 1.0), ("bfloat16", 1000.0)])
def test_one_site_gives_the_sum_and_its_norm(op, dtype, scale):
    outcome = compare(block(op, scale), operands(dtype, scale))
    assert outcome.complaints == []
    assert sites_of(outcome.report) == [("forward", True, True)]


@each_norm
@pytest.mark.parametrize("dtype, scale", [("float32", 1.0), ("bfloat16", 30.0), ("float16", 1.0), ("float32", 1000.0)])
def test_its_backward_adds_the_cotangent_of_the_sum(op, dtype, scale):
    """In float32 JAX adds up three cotangents of the sum one by one, and in 16 bits two."""
    sites, errors = step_outcome(block(op, scale), operands(dtype, scale))
    assert sites == [("forward+backward", True, True)]
    for error, original in errors:
        assert error <= max({"float32": 5e-5, "bfloat16": 4e-2, "float16": 1e-2}[dtype], 2 * original)


@each_norm
def test_a_sum_that_nothing_else_reads_is_not_given(op):
    def post(x, y, g):
        return jnp.tanh(NORMS[op](x + y, g))

    outcome = compare(post, operands())
    assert outcome.complaints == []
    assert sites_of(outcome.report) == [("forward", True, False)]
    sites, errors = step_outcome(post, operands())
    assert sites == [("forward+backward", False, False)]  # it would keep two arrays for the backward, and not their sum
    assert all(error < 5e-5 for error, _ in errors)


@each_norm
@pytest.mark.parametrize("form", ["unrolled", "checkpoint", "scan", "scan of checkpoints"])
def test_layers_in_train_steps(op, form):
    def layer_of(x, weights):
        g, w, v = weights
        h = x + jnp.sin(x @ w)
        return h + jnp.tanh(NORMS[op](h, g) @ v)

    sizes = (WIDTH,), (WIDTH, WIDTH), (WIDTH, WIDTH)
    layers = [tuple(array(*size, seed=9 * n + i, scale=0.3) for i, size in enumerate(sizes)) for n in range(3)]
    body = jax.checkpoint(layer_of) if "checkpoint" in form else layer_of

    def program(x, layers):
        if "scan" in form:
            return lax.scan(lambda x, one: (body(x, one), None), x, jax.tree.map(lambda *x: jnp.stack(x), *layers))[0]
        for one in layers:
            x = body(x, one)
        return x

    arguments = array(4, 5, WIDTH), layers
    outcome = compare(program, arguments)
    assert outcome.complaints == []
    count = 1 if "scan" in form else 3
    assert sites_of(outcome.report) == [("forward", True, True)] * count
    sites, errors = step_outcome(program, arguments)
    kept = form == "scan"  # the backward's loop has the sum alone, and would have to be given both terms
    assert sites == [("forward+backward", not kept, not kept)] * count
    assert all(error < 5e-5 for error, _ in errors)


@each_norm
def test_mapped_and_differentiated_twice(op):
    x, y, g = operands()
    optimized = optimized_like_a_user(block(op))
    batched = jnp.stack([x, 2 * x, -x])

    def gradients(function):
        return jax.grad(lambda *a: sum(jnp.sum(jnp.sin(x)) for x in function(*a)), argnums=(0, 1, 2))

    for axes in ((0, None, None), (0, 0, None)):
        given = batched, batched if axes[1] == 0 else y, g
        for form in (lambda function: function, gradients):
            ours, theirs = (jax.vmap(form(function), axes)(*given) for function in (optimized, block(op)))
            for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    twice = [jax.grad(lambda x, f=f: jnp.sum(gradients(f)(x, y, g)[1] ** 2))(x) for f in (optimized, block(op))]
    np.testing.assert_allclose(*twice, rtol=1e-3, atol=1e-4)


OTHERS = {
    "its scale is computed from the sum": lambda norm: lambda x, y, g: (h := x + y) + norm(h, g * jnp.tanh(h[0, 0])),
    "a row for all": lambda norm: lambda x, y, g: (h := x + g) + norm(h, g),
    "a part of a sum": lambda norm: lambda x, y, g: norm((x + y)[:, 1:], g),
    "a wider array": lambda norm: lambda x, y, g: (h := x + y.astype(jnp.bfloat16).astype(x.dtype)) + norm(h, g),
    "a difference": lambda norm: lambda x, y, g: (h := x - y) + norm(h, g),
}


@each_norm
@pytest.mark.parametrize("name", OTHERS)
def test_other_additions_stay_outside(op, name):
    program = OTHERS[name](NORMS[op])
    outcome = compare(program, operands())
    assert outcome.complaints == []
    assert sites_of(outcome.report) == [("forward", False, False)]
    sites, errors = step_outcome(program, operands())
    assert sites == [("forward+backward", False, False)]
    assert all(error < max(5e-5, 2 * original) for error, original in errors)


def test_of_two_norms_of_one_sum_one_gives_it():
    def both(x, y, g):
        h = x + y
        return h + rms(h, g) * layer(h, 2 * g)

    outcome = compare(both, operands())
    assert outcome.complaints == []
    assert sorted(sites_of(outcome.report)) == [("forward", False, False), ("forward", True, True)]
    sites, errors = step_outcome(both, operands())
    assert len(sites) == 2
    assert sum(residual for _, residual, _ in sites) <= 1
    assert all(error < 5e-5 for error, _ in errors)


@each_norm
def test_without_evidence_it_stays_as_it_is(op):
    for program in (block(op), with_gradients(block(op), operands())):
        report = autopallas.explain(autopallas.optimize(program), *operands())
        assert [(site.op, site.verdict) for site in report.sites] == [(op, "kept")]
