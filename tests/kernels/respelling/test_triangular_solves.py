"""Respelling of many small triangular systems: what is found, what is left alone, and what it computes."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compare import compare
from support.respellings import found, random

import autopallas

N = 67
NAME = "triangular_solve"


def optimized(function, **options):
    return autopallas.optimize(function, objective="always", strict=True, ops=NAME, **options)


def kinds(function, *arguments):
    return [kind for kind in found(function, *arguments) if kind == NAME]


def matrices(rows, batch=(N,), dtype=jnp.float32):
    """Whose triangles can be solved with."""
    a = random(*batch, rows, rows)
    return jnp.where(jnp.eye(rows, dtype=bool), 2 + jnp.abs(a), a).astype(dtype)


FLAGS = ("left_side", "lower", "transpose_a", "unit_diagonal")


@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=4)), ids=str)
def test_every_side_and_triangle_and_the_gradients(flags):
    """The other triangle, and the diagonal where it is one, are not read."""
    flags = dict(zip(FLAGS, flags, strict=True))
    a, b = matrices(3), random(N, 3, 2) if flags["left_side"] else random(N, 2, 3)
    unread = jnp.triu(jnp.ones((3, 3), bool), 1) if flags["lower"] else jnp.tril(jnp.ones((3, 3), bool), -1)
    if flags["unit_diagonal"]:
        unread |= jnp.eye(3, dtype=bool)
    run = lambda a, b: lax.linalg.triangular_solve(a, b, **flags)  # noqa: E731
    filled = jnp.where(unread, jnp.nan, a)
    assert kinds(run, filled, b) == [NAME]
    ours = optimized(run)
    np.testing.assert_allclose(ours(filled, b), run(filled, b), rtol=1e-5, atol=1e-5)
    assert ours.report().counts() == {"respelling": 1}
    compared = compare(run, (a, b), ops=NAME)
    assert compared.complaints == []


@pytest.mark.parametrize(
    ("batch", "rows", "columns"), [((N,), 2, 1), ((N,), 4, 4), ((5, 17), 4, 1), ((2, 3, 13), 2, 7), ((N,), 3, 64)]
)
def test_shapes(batch, rows, columns):
    a, b = matrices(rows, batch), random(*batch, rows, columns)
    run = lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True)  # noqa: E731
    assert kinds(run, a, b) == [NAME]
    compared = compare(run, (a, b), ops=NAME)
    assert compared.complaints == []
    assert compared.report.counts()["respelling"] >= 1


def positive(x):
    return x @ jnp.swapaxes(x, -1, -2) + 3 * jnp.eye(x.shape[-1])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: lax.linalg.triangular_solve(jnp.linalg.cholesky(positive(x)), y, left_side=True, lower=True),
        lambda x, y: jax.vmap(lambda x, y: jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(positive(x)), True), y))(
            x, y
        ),
    ],
    ids=["cholesky", "cho_solve"],
)
def test_what_solves_inside_and_its_gradients(function):
    x, y = random(N, 3, 3), random(N, 3, 2)
    step = jax.value_and_grad(lambda x, y: (jnp.sin(function(x, y)) ** 2).sum(), (0, 1))
    assert len(kinds(step, x, y)) >= 2
    compared = compare(step, (x, y), gradients=False, ops=NAME)
    assert compared.complaints == []
    assert compared.report.counts()["respelling"] >= 2


def test_under_vmap_scan_and_x64():
    a, b = matrices(3), random(N, 3, 2)
    run = lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True)  # noqa: E731
    many = jnp.stack([b, 2 * b])
    wanted = jax.vmap(run, (None, 0))(a, many)
    np.testing.assert_allclose(jax.vmap(optimized(run), (None, 0))(a, many), wanted, rtol=1e-5, atol=1e-6)
    scanned = lambda a, b: lax.scan(lambda c, _: (run(a, c), None), b, None, length=3)[0]  # noqa: E731
    np.testing.assert_allclose(optimized(scanned)(a, b), scanned(a, b), rtol=1e-5, atol=1e-6)
    with jax.enable_x64(True):
        a, b = matrices(4, dtype=jnp.float64), random(N, 4, 2).astype(jnp.float64)
        assert kinds(run, a, b) == [NAME]
        wanted = np.linalg.solve(np.tril(a), np.asarray(b))
        np.testing.assert_allclose(optimized(run)(a, b), wanted, rtol=1e-12, atol=1e-13)


def test_what_is_left_alone():
    def alone(a, b, **flags):
        return (
            kinds(lambda a, b: lax.linalg.triangular_solve(a, b, **{"left_side": True, "lower": True} | flags), a, b)
            == []
        )

    a, b = matrices(3), random(N, 3, 2)
    assert not alone(a, b)
    assert alone(a[:63], b[:63]), "few systems"
    assert alone(matrices(5), random(N, 5, 2)), "long to compile"
    assert alone(a[:, :1, :1], b[:, :1]), "one number"
    assert alone(a, random(N, 3, 65))
    assert alone(a[:0], b[:0])
    assert alone(a, b[..., :0])
    assert alone(a.astype(jnp.complex64), b.astype(jnp.complex64))
    assert kinds(jnp.linalg.inv, a) == [], "inside of custom_linear_solve, into which recognition does not look"


def test_without_the_assumption_it_stays():
    a, b = matrices(3).at[4, 1, 1].set(0), random(N, 3, 2)
    run = lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True)  # noqa: E731
    strict = optimized(run, assume_finite=False)
    np.testing.assert_array_equal(strict(a, b), jax.jit(run)(a, b))
    assert not strict.report().sites
    ours = optimized(run)
    found, wanted = np.asarray(ours(a, b)), np.asarray(run(a, b))
    rest = np.arange(N) != 4
    np.testing.assert_allclose(found[rest], wanted[rest], rtol=1e-5, atol=1e-6)
    assert any("diagonal" in assumption for assumption in ours.report().sites[0].assumptions)
