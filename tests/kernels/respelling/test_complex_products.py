"""Respelling of products of complex matrices: what is found, which parts are left out, and what it computes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.respellings import found, random, sites

import autopallas
from autopallas.kernels.respelling.kinds.complex_product import KIND

NAME = "complex_product"


def complex_random(*shape, seed=0):
    return lax.complex(random(*shape, seed=seed), random(*shape, seed=seed + 100))


def optimized(function, **options):
    return autopallas.optimize(function, objective="always", strict=True, ops=NAME, **options)


def respelt(function, *arguments):
    """The specs of this kind alone."""
    return [site.spec for site in sites(function, *arguments) if site.spec.kind == NAME]


def features(function, *arguments):
    """How many products of parts each site computes."""
    return [KIND.feature(spec).partition(",")[0] for spec in respelt(function, *arguments)]


def check(function, *arguments):
    """Results are as near to those with 64 bits as the original's, or within a few roundings of the largest number."""
    run = optimized(function)
    given, own = (jax.tree.leaves(f(*arguments)) for f in (run, jax.jit(function)))
    assert "respelling" in run.report().counts()
    wide = (np.asarray(a, np.complex128 if jnp.iscomplexobj(a) else np.float64) for a in arguments)
    with jax.enable_x64(True):
        exact = list(map(np.asarray, jax.tree.leaves(function(*map(jnp.asarray, wide)))))
    for one, other, wanted in zip(given, own, exact, strict=True):
        assert one.dtype == other.dtype
        error, before = (np.abs(np.asarray(x) - wanted) for x in (one, other))
        least = 4 * np.finfo(np.float32).eps * np.abs(wanted).max()  # sums of 67 terms in another order
        assert error.max() <= max(2 * before.max(), least), (error.max(), error.mean(), before.max(), before.mean())


X, Z, W = random(129, 67), complex_random(129, 67, seed=1), complex_random(67, 70, seed=2)
FORMS = {
    "complex": (lambda z, w: z @ w, (Z, W), 4),
    "real part": (lambda z, w: (z @ w).real, (Z, W), 2),
    "imaginary part": (lambda z, w: jnp.imag(z @ w), (Z, W), 2),
    "real part, transposed": (lambda z, w: jnp.einsum("ik,kj->ji", z, w).real, (Z, W), 2),
    "left made complex": (lambda x, w: x.astype(jnp.complex64) @ w, (X, W), 2),
    "left real": (lambda x, w: x @ w, (X, W), 2),
    "right real": (lambda z, x: jnp.einsum("ik,jk->ij", z, x), (Z, X), 2),
    "left real, real part": (lambda x, w: (x @ w).real, (X, W), 1),
    "left real, imaginary part": (lambda x, w: (x @ w).imag, (X, W), 1),
    "both parts, apart": (lambda z, w: (z @ w).real + (z @ w).imag ** 2, (Z, W), 4),
    "batch": (lambda z, w: jnp.einsum("bik,bkj->bij", z, w), (Z[None, :66].repeat(2, 0), W[None].repeat(2, 0)), 4),
    "three axes": (lambda z, w: jnp.einsum("tik,kj->tij", z, w), (Z[:128].reshape(4, 32, 67), W), 4),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_products_and_the_parts_that_are_read(name):
    function, arguments, parts = FORMS[name]
    assert set(features(function, *arguments)) == {f"{parts} product{'s' * (parts > 1)} of parts"}
    check(function, *arguments)


def test_a_layer_of_a_state_space_model_and_its_gradients():
    """The cotangent of a real part is real, and so is what reads the gradient of a real operand."""

    def loss(b, c, x):
        states = jnp.einsum("th,hp->tp", x.astype(jnp.complex64), b)
        return (jnp.einsum("tp,ph->th", jnp.exp(0.1 * states), c).real ** 2).sum()

    b, c = complex_random(67, 70, seed=3) / 8, complex_random(70, 67, seed=4) / 8
    step = jax.grad(loss, (0, 1, 2))
    assert features(step, b, c, X) == ["2 products of parts"] * 6
    run = optimized(step)
    for given, wanted in zip(run(b, c, X), jax.jit(step)(b, c, X), strict=True):
        # Gradients of three products after one another, relative to the largest.
        np.testing.assert_allclose(given, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    outside = jax.grad(optimized(loss), (0, 1, 2))
    for given, wanted in zip(outside(b, c, X), jax.jit(step)(b, c, X), strict=True):
        np.testing.assert_allclose(given, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_gradients_of_real_functions_of_complex_products():
    def function(x, y, w):
        z = lax.complex(x, y) @ (w + 1j * jnp.cos(w))
        return jnp.abs(z).sum() + (x @ jnp.exp(1j * w)).real.sum()

    check(jax.grad(function, (0, 1, 2)), X, random(129, 67, seed=9), random(67, 70, seed=5))


@pytest.mark.parametrize("transform", ["vmap", "scan", "remat"])
def test_under_transformations(transform):
    def step(x, w):
        return (x.astype(jnp.complex64) @ w).real

    function = {
        "vmap": lambda x, w: jax.vmap(step, (0, None))(x, w),
        "scan": lambda x, w: lax.scan(lambda c, row: (c + 1, step(row, w)), 0, x)[1],
        "remat": lambda x, w: jax.vmap(jax.checkpoint(step), (0, None))(x, w),
    }[transform]
    x = random(3, 129, 67)
    assert features(function, x, W)
    given, wanted = optimized(function)(x, W), jax.jit(function)(x, W)
    np.testing.assert_allclose(given, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    mapped = jax.vmap(optimized(step), (0, None))(x, W)
    np.testing.assert_allclose(mapped, wanted[: len(mapped)], rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_a_part_that_something_else_reads_is_computed():
    """Also where it leaves a loop, and is read outside of it."""

    def stacked(z, w):
        rows = lax.scan(lambda c, z: (c, z @ w), 0, z[None])[1]
        return rows[0].real, rows[0].imag

    def carried(z, w):
        return lax.fori_loop(0, 2, lambda i, c: c @ w, z[:, :67])

    square = complex_random(67, 67, seed=8) / 10
    for function, arguments in (
        (lambda z, w: ((z @ w).real, z @ w), (Z, W)),
        (lambda z, w: ((z @ w).real, jnp.exp(z @ w)), (Z, W)),
        (stacked, (Z, W)),
        (carried, (Z, square)),
    ):
        assert "2 products of parts" not in features(function, *arguments)
        for given, wanted in zip(
            jax.tree.leaves(optimized(function)(*arguments)),
            jax.tree.leaves(jax.jit(function)(*arguments)),
            strict=True,
        ):
            np.testing.assert_allclose(given, wanted, rtol=2e-4, atol=1e-5 * np.abs(wanted).max())


def test_what_may_be_infinite_is_left_alone():
    """Of an infinity XLA's own loop makes NaN, and zero imaginary parts would too."""
    for function, arguments, _ in FORMS.values():
        assert {spec.assumptions() for spec in respelt(function, *arguments)} == {("both operands are finite",)}
        assert autopallas.explain(optimized(function, assume_finite=False), *arguments).counts() == {}


def test_what_is_left_alone():
    small = complex_random(15, 4096), complex_random(4096, 64, seed=1)
    many = complex_random(64, 32, 32), complex_random(64, 32, 32, seed=1)
    assert NAME not in found(jnp.matmul, *small) + found(jnp.matmul, *many)
    assert NAME not in found(jnp.matmul, X, X.T)
    highest = functools.partial(jnp.matmul, precision="highest")
    assert NAME not in found(highest, Z, W)
    assert NAME not in found(
        lambda x, w: x.astype(jnp.complex64) @ w, complex_random(64, 32).real, complex_random(32, 64)
    )
    with jax.enable_x64(True):
        assert NAME not in found(jnp.matmul, Z.astype(jnp.complex128), W.astype(jnp.complex128))
    assert (
        autopallas.explain(autopallas.optimize(jnp.matmul, objective="always", ops="-complex_product"), Z, W).counts()
        == {}
    )


def test_zeros_that_are_not_known_leave_an_operand_complex():
    def function(x, y, w):
        return lax.complex(x, y) @ w

    assert features(function, X, jnp.zeros_like(X), W) == ["4 products of parts"]
    assert features(lambda x, w: lax.complex(x, jnp.ones_like(x)) @ w, X, W) == ["4 products of parts"]
    given = optimized(function)(X, X, W)
    np.testing.assert_allclose(given, jax.jit(function)(X, X, W), rtol=0, atol=1e-4)
