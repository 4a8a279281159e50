"""Products with one-hot matrices, and their transposes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import compare
from support.respellings import optimized, random, sites


def test_one_hot_products_pick_and_add_up_rows():
    ids, table = jnp.asarray([[3, 0, 7, 2], [-1, 9, 8, 3]]), random(9, 5)

    def loss(table, ids):
        return (jnp.sin(jax.nn.one_hot(ids, 9) @ table) ** 2).sum()

    found = compare(jax.value_and_grad(loss), (table, ids), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 2


@pytest.mark.parametrize(
    "spelling", ["lik,kj->lij", "lik,kj->jli", "lik,jk->lij", "lik,kjm->limj", "lik,lij->kj", "lik,ilj->jk"]
)
def test_one_hot_products_in_any_spelling(spelling):
    ids = jnp.asarray([[3, 0, 2], [4, 3, 1]])
    sizes = {"l": 2, "i": 3, "k": 5, "j": 4, "m": 6}
    other = random(*(sizes[letter] for letter in spelling.split(",")[1].split("->")[0]))
    for flipped in (False, True):

        def run(ids, other, flipped=flipped):
            matrix = (ids[..., None] == jnp.arange(5)).astype(other.dtype)
            left, right = spelling.split("->")[0].split(",")
            words, given = (f"{right},{left}", (other, matrix)) if flipped else (f"{left},{right}", (matrix, other))
            return jnp.einsum(f"{words}->{spelling.split('->')[1]}", *given)

        found = compare(run, (ids, other), gradients=False, dtype="float32")
        assert found.complaints == []
        assert found.counts("respelling") == 1


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (1,), (2, 1, 3)])
def test_one_hot_products_with_axes_of_size_one(shape):
    ids, table = jnp.asarray(np.arange(np.prod(shape)).reshape(shape) % 5), random(5, 3)
    loss = jax.value_and_grad(lambda t, i: (jnp.sin(jax.nn.one_hot(i, 5) @ t) ** 2).sum())
    found = compare(loss, (table, ids), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 2


def test_ids_that_are_a_part_of_others():
    """As those of the tokens before the last one, which begin with the first of all."""
    ids = jnp.asarray(np.arange(20).reshape(4, 5) % 7)

    def run(t, i):
        parts = jax.lax.slice(i, (0, 0), (4, 4)), jax.lax.slice(i, (1, 0), (4, 5)), i.T[:3], i[0]
        return [jax.nn.one_hot(part, 7) @ t for part in parts]

    found = compare(run, (random(7, 3), ids), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 4


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.int32])
def test_ids_of_any_integer_dtype(dtype):
    ids, table = jnp.asarray([3, 0, 100], dtype), random(101, 4)
    found = compare(lambda i, t: jax.nn.one_hot(i, 101) @ t, (ids, table), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 1


@pytest.mark.parametrize(("dtype", "classes"), [(jnp.uint8, 256), (jnp.int8, 128), (jnp.uint16, 65536)])
def test_as_many_classes_as_a_dtype_has_ids(dtype, classes):
    """The number of classes is no number of that dtype."""
    ids = jnp.asarray(np.random.default_rng(0).integers(0, classes, 50), dtype)
    run = lambda i, t, x: (jax.nn.one_hot(i, classes) @ t, jax.nn.one_hot(i, classes).T @ x)  # noqa: E731
    found = compare(run, (ids, random(classes, 3), random(50, 3)), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 2


@pytest.mark.parametrize("count", [512, 513, 20_000])
def test_a_long_sum_of_equal_rows_is_as_exact_as_a_product(count):
    """Added one by one, 20,000 times 0.1 are off by 1e-4."""
    ids = jnp.zeros(count, jnp.int32).at[3].set(7)
    found = compare(lambda i, x: jax.nn.one_hot(i, 2).T @ x, (ids, jnp.full((count, 3), 0.1)), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 1


def test_sums_by_index_of_any_number_of_rows_copy_no_rows():
    """Blocks of rows are read where they stand, also where the last one is shorter."""
    sums = optimized(lambda ids, x: jax.nn.one_hot(ids, 20).T @ x)
    ids, x = jax.ShapeDtypeStruct((5000,), jnp.int32), jax.ShapeDtypeStruct((5000, 64), jnp.float32)
    compiled = sums.lower(ids, x).compile()
    assert sums.report().counts() == {"respelling": 1}
    assert compiled.memory_analysis().temp_size_in_bytes < x.size * x.dtype.itemsize / 4


def test_what_is_no_one_hot_product_is_left_alone():
    ids, table = jnp.asarray([3, 0, 2]), random(4, 4)
    for run in (
        lambda i, t: (i[:, None] == i[None, :]).astype(t.dtype) @ t[:3],  # no positions
        lambda i, t: (i[:, None] == jnp.arange(1, 5)).astype(t.dtype) @ t,  # positions that begin at 1
        lambda i, t: (i[:, None] >= jnp.arange(4)).astype(t.dtype) @ t,
        lambda i, t: jax.nn.one_hot(i, 4).at[0].mul(2) @ t,
        lambda i, t: jnp.einsum("lik,ikj->lj", jax.nn.one_hot(i[:, None], 4), t[None]),
    ):
        assert sites(run, ids, table) == []


def test_products_with_infinities_stay_unless_they_are_assumed_away():
    ids, table = jnp.asarray([0, 1]), random(4, 3).at[3].set(jnp.inf)
    run = lambda i, t: jax.nn.one_hot(i, 4) @ t  # noqa: E731
    assert np.isnan(run(ids, table)).all()
    assert np.isnan(optimized(run, assume_finite=False)(ids, table)).all()
    found = optimized(run)
    assert np.isfinite(found(ids, table)).all()
    assert any("finite" in assumption for assumption in found.report().sites[0].assumptions)
