"""Programs with operations that current JAX keeps whole until it compiles ("hijax"), or that another library defines,
alone and beside sites."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from support.catalogue import array
from support.compare import optimized_like_a_user

Q, K, V = (array(6, 4, seed=n) for n in range(3))


def attention(q):
    return jax.nn.softmax(q @ K.T) @ V


def positions(x):
    return x[jnp.nonzero(x[:, 0] > 0, size=3, fill_value=5)[0]]


def searched(x):
    return x[jnp.searchsorted(jnp.array([0.1, 0.5, 0.9]), jax.nn.sigmoid(x[:, 0]))]


def root(x):
    def solve(f, start):
        return lax.fori_loop(0, 60, lambda _, y: y - f(y) / jax.grad(lambda y: f(y).sum())(y), start)

    def tangent(g, y):
        return y / g(jnp.ones_like(y))

    return lax.custom_root(lambda y: y**3 + y - x, jnp.zeros_like(x), solve, tangent)


def looped(x):
    return lax.scan(lambda carry, row: (carry + positions(carry).sum(0), root(row)), x, x)


def branched(x):
    return lax.cond(x[0, 0] > 0, lambda x: positions(x).sum(), lambda x: root(x).sum(), x)


def each(x):
    return jax.vmap(lambda row: row[jnp.nonzero(row > 0, size=2, fill_value=0)[0]])(x)


def checkpointed(x):
    return jax.checkpoint(lambda x: searched(root(x)))(x)


PROGRAMS = (positions, searched, root, looped, branched, each, checkpointed)


@pytest.mark.parametrize("beside", ["alone", "before attention"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_results_and_gradients_are_the_original_ones(program, beside):
    def function(x):
        return program(x) if beside == "alone" else (program(x), attention(x))

    def total(function):
        return lambda x: sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(function(x)))

    optimized = optimized_like_a_user(function)
    step = optimized_like_a_user(jax.grad(total(function)))
    for given, wanted in (
        (optimized(Q), function(Q)),
        (jax.jit(optimized)(Q), function(Q)),
        (jax.grad(total(optimized))(Q), jax.grad(total(function))(Q)),
        (step(Q), jax.grad(total(function))(Q)),
    ):
        for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert optimized.report().counts()["attention"] == (beside != "alone")


def test_a_loss_of_rows_that_nonzero_picks_is_a_site():
    x, w, y = array(12, 4, seed=0), array(4, 9, seed=1), jnp.arange(12) % 9

    def loss(w, x):
        rows = jnp.nonzero(y % 2, size=6, fill_value=0)[0]
        chosen = jax.nn.log_softmax((x @ w)[rows])
        return -jnp.take_along_axis(chosen, y[rows][:, None], 1).mean()

    step = jax.value_and_grad(loss, (0, 1))
    optimized = optimized_like_a_user(step)
    for a, b in zip(jax.tree.leaves(optimized(w, x)), jax.tree.leaves(step(w, x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert optimized.report().counts()["cross_entropy"] == 1


def test_a_jaxpr_whose_constants_are_operands_is_a_parameter_like_any_other():
    """Libraries of linear operators hold the functions that they are given so."""
    primitive = Primitive("applied")

    def run(*operands, jaxpr, **_):
        return jax.core.eval_jaxpr(jaxpr, operands[:-1], operands[-1])[0]

    primitive.def_impl(run)
    primitive.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.outvars[0].aval)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))

    def function(x):
        closed = jax.make_jaxpr(lambda y: jnp.cos(y) @ jnp.asarray(K).T @ V)(x)
        held = closed.jaxpr
        if len(held.constvars) == 0:
            pytest.skip("this JAX has the constants in the equations")
        return primitive.bind(*closed.consts, x, jaxpr=held, others=(held,)) + attention(x)

    optimized = optimized_like_a_user(function)
    np.testing.assert_allclose(optimized(Q), function(Q), rtol=1e-5, atol=1e-6)
    assert optimized.report().counts()["attention"] == 1
