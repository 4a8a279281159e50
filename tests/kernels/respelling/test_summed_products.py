"""Respelling of loops that add products to what they carry: what is found, what is left alone, what it computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compare import compare, with_gradients
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


def network(x, w, u, **options):
    def step(h, x):
        h = jnp.tanh(x @ w + h @ u)
        return h, h

    return lax.scan(step, jnp.zeros((*x.shape[1:-1], u.shape[0]), x.dtype), x, **options)[1]


def backwards(x, w, u):
    return network(x, w, u, reverse=True)


def unrolled(x, w, u):
    return network(x, w, u, unroll=4)


def transposed(x, w, u):
    """Weights are read turned and in parts."""

    def step(h, x):
        a, b = jnp.split(jnp.einsum("...h,gh->...g", h, u.T), 2, -1)
        h = jnp.tanh(x @ w + jnp.concatenate([b * jax.nn.sigmoid(a), a], -1))
        return h, h

    return lax.scan(step, jnp.zeros((*x.shape[1:-1], H), x.dtype), x)[1]


def in_parts(x, w, u):
    """Gates read slices of the weights, so that their gradients are put among zeros."""
    half = H // 2

    def step(h, x):
        a, b = jnp.tanh(x @ w[:, :half] + h @ u[:, :half]), jax.nn.sigmoid(h @ u[:, half:] + (x @ w)[..., half:])
        h = jnp.concatenate([a * b, b - a], -1)
        return h, h.sum(-1)

    return lax.scan(step, jnp.zeros((*x.shape[1:-1], H), x.dtype), x)


def solver(x, w, u):
    """Reads each weight more than once in a step, one of them turned."""

    def slope(h):
        return jnp.tanh(h @ u) @ u.T

    def step(h, x):
        first = slope(h) + x @ w
        return h + 0.1 * (first + slope(h + 0.2 * first)), None

    return lax.scan(step, jnp.ones((*x.shape[1:-1], H), x.dtype), x)[0]


def checkpointed(x, w, u):
    """Steps are computed again in the backward, one within another."""

    @jax.checkpoint
    def inner(h):
        return jnp.tanh(h @ u)

    @jax.checkpoint
    def step(h, x):
        h = jnp.sin(x @ w + inner(inner(h)))
        return h, h

    return lax.scan(step, jnp.zeros((*x.shape[1:-1], H), x.dtype), x)[1]


def of_examples(x, w, u):
    """Weights of each example's own."""
    scale = jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None, None] / 4
    return jax.vmap(network, (1, 0, 0))(x, scale * w, scale * u)


def split(x, w, u):
    """Reads the parts of a product of all weights, so that its gradient is split again."""

    def step(h, x):
        a, b = jnp.split(x @ w + h @ jnp.concatenate([u, u.T], 1)[:, :H], 2, -1)
        h = jnp.concatenate([jnp.tanh(b), a * jax.nn.sigmoid(b)], -1)
        return h, h

    return lax.scan(step, jnp.zeros((*x.shape[1:-1], H), x.dtype), x)[1]


FORMS = [split, network, backwards, unrolled, transposed, in_parts, solver, checkpointed]


@pytest.mark.parametrize("lead", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_gradients_of_weights_are_added_up_chunk_by_chunk(form, lead):
    compared = compare(form, arguments(*lead), ops=NAME)
    assert compared.complaints == []
    found = sites(with_gradients(form, arguments(*lead)), *arguments(*lead), ops=(NAME,))
    assert sum(bool(match.spec.numbers("sums")) for match in found) == 1


def test_weights_of_every_example():
    given = arguments(3)
    assert compare(of_examples, given, ops=NAME).complaints == []


@pytest.mark.parametrize("steps", [2, 8, 130, 131, 300])
def test_every_number_of_steps(steps):
    """Chunks have 128 steps of one row, and a loop of fewer than two chunks is one."""
    assert compare(network, arguments(steps=steps), ops=NAME).complaints == []


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_of_16_bits(dtype):
    assert compare(network, arguments(2, dtype=dtype), dtype=jnp.dtype(dtype).name, ops=NAME).complaints == []


def test_mixed_dtypes():
    """Products of 16 bits are cast before they are added to a gradient of 32."""

    def mixed(x, w, u):
        def step(h, x):
            given = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16) + h.astype(jnp.bfloat16) @ u.astype(jnp.bfloat16)
            h = jnp.tanh(given.astype(jnp.float32))
            return h, h

        return lax.scan(step, jnp.zeros((*x.shape[1:-1], H)), x)[1]

    assert compare(mixed, arguments(2), dtype="bfloat16", ops=NAME).complaints == []


def test_sums_without_a_gradient():
    """A sum of outer products that does not begin with zeros."""

    def function(first, x, y):
        return lax.scan(lambda total, own: (total + outer(*own), own[0].sum()), first, (x, y))

    given = random(D, D, seed=1) * 100, random(T, D), random(T, D, seed=2)
    compared = compare(function, given, gradients=False, ops=NAME)
    assert compared.complaints == []
    assert compared.counts("respelling") == 1


def test_numbers_that_are_not_finite_stay_where_they_are():
    x, w, u = arguments(2)
    given = (x.at[7, 1, 2].set(jnp.inf), w, u.at[0, 0].set(jnp.nan))

    def step(x, w, u):
        return jax.grad(lambda *own: jnp.sin(network(*own)).sum(), (0, 1, 2))(x, w, u)

    ours = autopallas.optimize(step, objective="always", ops=NAME, strict=True)(*given)
    for mine, wanted in zip(ours, step(*given), strict=True):
        np.testing.assert_array_equal(np.isnan(mine), np.isnan(wanted))


# ---------------------------------------------------------------------- what is left alone


def scanned(step, first=(D, D)):
    """A loop of slices x and y, whose first carried value has the shape ``first``."""

    def function(x, y, w):
        return lax.scan(step(w), jnp.zeros(first), (x, y))

    return function


def outer(x, y):
    return lax.dot_general(x, y, (((), ()), ((), ())))


LEFT = {
    "a sum that decays": lambda w: lambda c, own: (0.9 * c + outer(*own), None),
    "a sum that steps read": lambda w: lambda c, own: (c + outer(*own), c @ own[0]),
    "a sum of which steps give each state": lambda w: lambda c, own: (c + outer(*own), c),
    "a sum of which steps give what follows": lambda w: lambda c, own: ((after := c + outer(*own)), after),
    "a difference": lambda w: lambda c, own: (outer(*own) - c, None),
    "a maximum": lambda w: lambda c, own: (jnp.maximum(c, outer(*own)), None),
    "twice the sum": lambda w: lambda c, own: (c + c + outer(*own), None),
    "another term": lambda w: lambda c, own: (c + outer(*own) + w, None),
    "a term that is broadcast": lambda w: lambda c, own: (c + outer(*own) + own[0], None),
    "a product that is changed": lambda w: lambda c, own: (c + jnp.tanh(outer(*own)), None),
    "a product with a constant": lambda w: lambda c, own: (c + w @ outer(*own), None),
    "a product that steps read": lambda w: lambda c, own: (c + (own_ := outer(*own)), own_),
    "no sum": lambda w: lambda c, own: (outer(*own), None),
    "a product of the sum": lambda w: lambda c, own: (c + c @ outer(*own), None),
    "a narrower product": lambda w: lambda c, own: (c + outer(*own).astype(jnp.bfloat16).astype(jnp.float32), None),
    "ones in the place of zeros": lambda w: lambda c, own: (
        c + jnp.pad(outer(own[0][:2], own[1]), ((0, 3), (0, 0)), constant_values=1.0), None
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_anything_else_is_left_alone(name):
    function = scanned(LEFT[name])
    given = random(T, D), random(T, D, seed=1), random(D, D, seed=2)
    compared = compare(function, given, gradients=False, ops=NAME)
    assert compared.complaints == []
    assert compared.counts("respelling") == 0


def test_two_carried_values_that_change_places_are_left_alone():
    def function(x, y):
        def step(carried, own):
            a, b = carried
            return (b + outer(*own), a + outer(own[1], own[0])), None

        return lax.scan(step, (jnp.zeros((D, D)), jnp.ones((D, D))), (x, y))[0]

    compared = compare(function, (random(T, D), random(T, D, seed=1)), gradients=False, ops=NAME)
    assert compared.complaints == []
    assert compared.counts("respelling") == 0


def test_what_a_step_adds_to_itself_is_looked_at_once():
    """A value that is doubled again and again is a sum of carried values in a number of ways that nothing can list."""

    def function(x, first):
        def step(carried, own):
            total = own * jnp.sin(carried)
            for _ in range(64):
                total = total + total
            return total, None

        return lax.scan(step, first, x)[0]

    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((T, D), (D, D))]
    assert autopallas.explain(function, *given).counts()["respelling"] == 0


def test_sums_of_integers_are_left_alone():
    def function(x, y):
        return lax.scan(lambda c, own: (c + outer(*own), None), jnp.zeros((D, D), jnp.int32), (x, y))[0]

    given = [jax.ShapeDtypeStruct((T, D), jnp.int32)] * 2
    ours = autopallas.optimize(function, objective="always", ops=NAME)
    assert autopallas.explain(ours, *given).counts()["respelling"] == 0


def test_loops_that_index_whole_arrays_are_respelt_as_such():
    """A gradient that adds a whole array in each step costs more than one that adds products."""

    def function(x, w, u):
        def step(i, h):
            return jnp.tanh(x[i] @ w + h @ u)

        return lax.fori_loop(0, len(x), step, jnp.zeros((x.shape[1], 256))).sum()

    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 4, 256), (256, 256), (256, 256))]
    kinds = found(jax.grad(function, (0, 1, 2)), *types)
    assert kinds.count("indexed_loop") == 1
    assert kinds.count(NAME) == 0


# ---------------------------------------------------------------------- what is looked for unasked


def gradients(x, w, u):
    return jax.grad(lambda *own: jnp.sin(network(*own)).sum(), (0, 1, 2))(x, w, u)


@pytest.mark.parametrize(
    ("rows", "width", "wanted"),
    [(1, 256, 2), (8, 256, 2), (9, 256, 0), (32, 512, 2), (33, 512, 0), (1, 64, 0)],
    ids=["one", "8", "9", "32 of large ones", "33 of large ones", "small"],
)
def test_few_rows_of_large_products_are_looked_for(rows, width, wanted):
    """In the loop of the network, and in that of its backward."""
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, rows, width), (width, width), (width, width))]
    assert found(gradients, *types).count(NAME) == wanted


def times_sine(count):
    def layer(h):
        for _ in range(count):
            h = jnp.sin(h)
        return h

    return layer


ACTIVATIONS = [
    (times_sine(1), 1),
    (times_sine(16), 0),
    (lambda h: jax.scipy.special.digamma(jnp.abs(h) + 2), 0),
]


def solver_under_checkpoint(activation):
    def loss(w, b, table, h):
        @jax.checkpoint
        def step(h, _):
            return h + 0.1 * activation(h @ w + b, table), None

        return lax.scan(step, h, None, 16)[0].sum()

    return jax.grad(loss, (0, 1, 2))


@pytest.mark.parametrize(("activation", "wanted"), ACTIVATIONS, ids=["a sine", "16 sines", "digamma"])
def test_functions_of_a_step_that_cost_more_than_its_sums_are_respelt_instead(activation, wanted):
    """Of a loop that is respelt nothing else is: what a checkpoint computes again would stay slow."""
    shapes = (512, 512), (512,), (512, 512), (8, 512)
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    kinds = found(solver_under_checkpoint(lambda h, _: activation(h)), *types)
    assert kinds.count(NAME) == wanted


def test_products_with_one_hot_matrices_that_a_step_makes_are_respelt_instead():
    def embedded(h, table):
        return h + jax.nn.one_hot(jnp.argmax(h, -1), 512) @ table

    shapes = (512, 512), (512,), (512, 512), (8, 512)
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    kinds = found(solver_under_checkpoint(embedded), *types)
    assert kinds.count(NAME) == 0
    assert kinds.count("one_hot") == 2
