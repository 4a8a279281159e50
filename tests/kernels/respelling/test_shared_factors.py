"""Respelling of loops that multiply slices, or what they only give, by arrays that all steps share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compare import compare
from support.respellings import found, random, sites

import autopallas
from autopallas.kernels.respelling.kinds.summed_products import KIND

NAME = KIND.name
T, D, H = 19, 5, 6
"""Steps that no chunk divides, and widths that name their axes."""


def arguments(*lead, steps=T, dtype=jnp.float32):
    """x [T, ..., D], w [D, H], u [H, H]."""
    scaled = [random(*shape, seed=i, dtype=dtype) * 0.3 for i, shape in enumerate([(D, H), (H, H)], 1)]
    return random(steps, *lead, D, dtype=dtype), *scaled


def loop(step, **options):
    """A loop over x whose steps map h and a slice to the next h and a result."""

    def function(x, w, u):
        return lax.scan(lambda h, x: step(h, x, w, u), jnp.zeros((*x.shape[1:-1], H), x.dtype), x, **options)

    return function


def cell(h, x, w, u):
    h = jnp.tanh(x @ w + h @ u)
    return h, h


def twice(y):
    return y, y


def blocks(h, x, w, u):
    """Multiplies each half of h by a matrix of its own, and x by matrices of two heads."""
    heads = jnp.einsum("...d,kdh->...kh", x, jnp.stack([w[:, : H // 2], w[:, H // 2 :]]))
    parts = jnp.einsum("...kh,khg->...kg", h.reshape(*h.shape[:-1], 2, H // 2), u.reshape(2, H // 2, H)[..., : H // 2])
    return twice(jnp.tanh(heads + parts).reshape(h.shape))


def together(h, x, w, u):
    """Multiplies a slice and what was carried by one matrix."""
    return twice(jnp.tanh(jnp.concatenate([x, h], -1) @ jnp.concatenate([w, u])))


def gates(h, x, w, u):
    """Reads parts of the weights, in parts of slices and of what was carried, and of a product's result."""
    a, b = jnp.split(jnp.concatenate([x[..., :2], h, x[..., 2:]], -1) @ jnp.concatenate([w[:2], u, w[2:]]), 2, -1)
    return twice(jnp.tanh(jnp.concatenate([a * jax.nn.sigmoid(b), h[..., :3] @ u[:3, 3:]], -1)))


def result_in_parts(h, x, w, u):
    """Carries a part of a product, and gives others."""
    y = h @ jnp.concatenate([u, u.T, u @ u], 1)
    return jnp.sin(y[..., :H] + x[..., :1]), (y[..., H : 2 * H], jnp.exp(y[..., -2:]))


FORMS = {
    "slices and what was carried together": loop(together),
    "gates of both": loop(gates),
    "a product's result in parts": loop(result_in_parts),
    "a cell": loop(cell),
    "from behind": loop(cell, reverse=True),
    "several steps as one": loop(cell, unroll=4),
    "weights turned": loop(lambda h, x, w, u: twice(jnp.tanh(jnp.einsum("hd,...d->...h", w.T, x) + h @ u))),
    "parts of weights": loop(lambda h, x, w, u: twice(jnp.tanh((x @ w[:, 2:5]).sum(-1, keepdims=True) + h @ u))),
    "parts of slices": loop(lambda h, x, w, u: twice(jnp.tanh(jnp.flip(x[..., 1:], -1) @ w[1:] + h @ u))),
    "two layers of slices": loop(lambda h, x, w, u: twice(jnp.tanh(jnp.maximum(x @ w, 0) @ u + h @ u))),
    "a matrix for each head": loop(blocks),
    "products alone": loop(lambda h, x, w, u: (h + x[..., :1], x @ w)),
    "a product that is carried on": loop(lambda h, x, w, u: (x @ w, h @ u)),
    "a product of what was carried": loop(lambda h, x, w, u: (jnp.sin(h + x[..., :1]), (h @ u, jnp.exp(h @ u) @ u))),
    "a product that is given and read": loop(lambda h, x, w, u: ((y := x @ w) + jnp.sin(h), (y, 2 * y, x))),
    "results that follow": loop(lambda h, x, w, u: (jnp.sin(x @ w + h), (jax.nn.softmax(h @ u), 1.0, h.sum(-1)))),
    "what a product reads is a product": loop(lambda h, x, w, u: (jnp.sin(h @ u + x[..., :1]), ((h @ u) @ u.T) @ u)),
}


@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_rows_of_many_steps_are_multiplied_at_once(form, lead):
    given = arguments(*lead)
    assert compare(FORMS[form], given, ops=NAME).complaints == []
    function = autopallas.optimize(FORMS[form], objective="always", ops=NAME, strict=True)
    function(*given)
    assert function.report().counts()["respelling"] == 1, function.report()


@pytest.mark.parametrize("steps", [2, 8, 130, 300])
def test_every_number_of_steps(steps):
    """Chunks have 128 steps of one row, and a loop of fewer than two chunks is one."""
    for form in ("a cell", "from behind", "a product of what was carried"):
        assert compare(FORMS[form], arguments(steps=steps), ops=NAME).complaints == []


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_products_of_16_bits(dtype):
    assert compare(FORMS["a cell"], arguments(2, dtype=dtype), dtype=jnp.dtype(dtype).name, ops=NAME).complaints == []


def test_rows_of_a_table():
    """Slices are numbers of rows, which steps read and multiply."""

    def function(ids, table, w, u):
        return lax.scan(lambda h, i: cell(h, table[i], w, u), jnp.zeros((3, H)), ids)[1]

    given = jnp.arange(3 * T).reshape(T, 3) % 7, random(7, D), *arguments()[1:]
    assert compare(lambda *own: function(given[0], *own), given[1:], ops=NAME).complaints == []


def test_a_loop_without_slices():
    def function(h, u):
        return lax.scan(lambda h, _: (jnp.sin(h), jnp.cos(h) @ u), h, None, T)

    given = random(3, H), random(H, H, seed=1)
    compared = compare(function, given, ops=NAME)
    assert compared.complaints == []
    assert compared.counts("respelling") >= 1


def test_numbers_that_are_not_finite_stay_in_their_rows():
    x, w, u = arguments(3)
    x = x.at[4, 1, 2].set(jnp.inf).at[7, 0, 0].set(jnp.nan)

    def function(x, w, u):
        return lax.scan(lambda h, x: (h, (x @ w, (h + x[:, :1]) @ u)), jnp.zeros((3, H)), x)[1]

    ours = autopallas.optimize(function, objective="always", ops=NAME, strict=True)(x, w, u)
    for mine, wanted in zip(ours, function(x, w, u), strict=True):
        np.testing.assert_array_equal(np.isfinite(mine), np.isfinite(wanted))


def test_weights_that_steps_put_together_are_put_together_once():
    """Where nothing is taken out of the steps, and where products are; turned ones are multiplied by as they are."""

    def slices(h, x, w, u):
        return twice(jnp.tanh((h @ u[:, :3]) @ u[:3] + x[..., :1]))

    def turned(h, x, w, u):
        return twice(jnp.tanh(h @ u.T + x[..., :1]))

    assert compare(loop(slices), arguments(3), ops=NAME).complaints == []
    for step, wanted in ((slices, 1), (turned, 0)):
        function = autopallas.optimize(loop(step), objective="always", ops=NAME, strict=True)
        function(*arguments(3))
        assert function.report().counts()["respelling"] == wanted


LEFT = {
    "weights of each step": lambda h, x, w, u: (jnp.tanh(h @ (u * x[..., :1])), h),
    "a product of what was carried, which the next step reads": lambda h, x, w, u: twice(jnp.tanh(h @ u + x[..., :1])),
    "a function of slices that takes long": lambda h, x, w, u: twice(jnp.exp(x) @ w + jnp.sin(h)),
    "products of slices": lambda h, x, w, u: (h + x @ x, h),
}


@pytest.mark.parametrize("name", LEFT)
def test_anything_else_is_left_alone(name):
    compared = compare(loop(LEFT[name]), arguments(), gradients=False, ops=NAME)
    assert compared.complaints == []
    assert compared.counts("respelling") == 0


@pytest.mark.parametrize(
    ("rows", "width", "wanted"),
    [(1, 256, 1), (8, 256, 1), (9, 256, 0), (32, 512, 1), (33, 512, 0), (1, 128, 0)],
    ids=["one", "8", "9", "32 of large ones", "33 of large ones", "small"],
)
def test_few_rows_of_large_weights_are_looked_for(rows, width, wanted):
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, rows, width), (width, width), (width, width))]

    def network(x, w, u):
        return lax.scan(lambda h, x: cell(h, x, w, u), jnp.zeros_like(x[0]), x)[1]

    assert found(network, *types).count(NAME) == wanted


def test_evidence_is_filed_by_what_is_taken_out_of_the_steps():
    """Where nothing but sums is, it is filed as it was before anything else could be."""
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 2, 256), (256, 256), (256, 256))]

    def loss(x, w, u):
        return jnp.sin(lax.scan(lambda h, x: cell(h, x, w, u), jnp.zeros_like(x[0]), x)[1]).sum()

    filed = {
        arguments: [KIND.feature(match.spec) for match in sites(jax.grad(loss, arguments), *types, ops=(NAME,))]
        for arguments in ((1, 2), (0, 1, 2))
    }
    before, few = "small products before of 2 to 8 rows", "of 2 to 8 rows"
    assert filed == {
        (1, 2): [before, f"small sums {few}"],
        (0, 1, 2): [before, f"small sums and products after {few}"],
    }


def test_a_matrix_and_a_bias_that_steps_split_one_array_into():
    """One equation gives what products read and what they do not."""

    def step(h, x, w, u):
        weight, bias = jnp.split(jnp.concatenate([w, u[:1]]), [D])
        h = jnp.tanh(x @ weight + bias + h @ u)
        return h, ((h @ u) * bias, bias)

    function = autopallas.optimize(loop(step), objective="always", ops=NAME, strict=True)
    for mine, wanted in zip(*map(jax.tree.leaves, (function(*arguments(3)), loop(step)(*arguments(3)))), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-6)
    assert function.report().counts()["respelling"] == 1


def test_what_the_host_computes_of_a_product_stays_in_its_step():
    """Such a call takes the arrays of one step."""

    def step(h, x, w, u):
        y = h @ u
        found = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(y.shape, y.dtype), y)
        return jnp.sin(h + x @ w), (found, jnp.cos(h) @ u)

    function = autopallas.optimize(loop(step), objective="always", ops=NAME, strict=True)
    for mine, wanted in zip(*map(jax.tree.leaves, (function(*arguments(3)), loop(step)(*arguments(3)))), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-6)
    assert function.report().counts()["respelling"] == 1
