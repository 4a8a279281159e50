"""Respelling of products of integers and booleans: what is found, and that the results are the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.respellings import found, same_bits, sites

import autopallas
from autopallas.kernels.respelling.kinds.integer_product import KIND

NAME = "integer_product"


def integers(*shape, dtype, seed=0):
    """Numbers of the whole range of a dtype, its ends among them."""
    random, dtype = np.random.default_rng(seed), jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(random.random(shape) < 0.3)
    ends = np.iinfo(dtype)
    drawn = random.integers(ends.min, ends.max, shape, dtype=dtype, endpoint=True)
    return jnp.asarray(np.where(random.random(shape) < 0.2, random.choice([ends.min, ends.max], shape), drawn), dtype)


def optimized(function, **options):
    return autopallas.optimize(function, objective="always", strict=True, ops=NAME, **options)


def product(dtype=None, left="r", right="c"):
    """A product whose operands are summed along their rows ("r") or columns ("c")."""
    summed = ((1,) if left == "r" else (0,)), ((1,) if right == "r" else (0,))
    return lambda x, y: lax.dot_general(x, y, (summed, ((), ())), preferred_element_type=dtype)


def check(function, *arguments):
    run = optimized(function)
    given = run(*arguments)
    assert run.report().counts() != {}
    same_bits(given, jax.jit(function)(*arguments))


def features(function, *arguments):
    return [KIND.feature(site.spec) for site in sites(function, *arguments) if site.spec.kind == NAME]


def operands(dtype, left, right, terms, other=None, seed=0):
    rows, columns = 67, 35
    x = integers(*((rows, terms) if left == "r" else (terms, rows)), dtype=dtype, seed=seed)
    return x, integers(*((columns, terms) if right == "r" else (terms, columns)), dtype=other or dtype, seed=seed + 1)


@pytest.mark.parametrize("layout", ["rc", "rr", "cc", "cr"])
@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        ("bool", "bool"), ("bool", "int32"), ("int8", "int8"), ("int8", "int16"), ("int8", "int32"),
        ("uint8", "uint8"), ("uint8", "uint32"), ("uint8", "int32"), ("int16", "int16"), ("uint16", "uint16"),
        ("int16", "int32"), ("uint32", "uint32"), ("int32", "int32"),
    ],
)  # fmt: skip
def test_each_dtype_in_each_layout(dtype, result, layout):
    """What XLA multiplies fast, or nothing multiplies faster, is left alone."""
    function, arguments = product(jnp.dtype(result), *layout), operands(dtype, *layout, terms=65)
    fast = layout == "rr" if result != "int32" else dtype == "int8" and layout[0] == "r"
    if fast or (result == "int32" and dtype not in ("bool", "int8", "uint8")):
        assert NAME not in found(function, *arguments)
        return
    check(function, *arguments)


@pytest.mark.parametrize(
    ("dtype", "other", "terms", "sums"),
    [
        ("int8", "int8", 1024, "float32"), ("int8", "int8", 1025, "parts in float32"),
        ("uint8", "uint8", 258, "float32"), ("uint8", "uint8", 259, "parts in float32"),
        ("uint8", "int8", 514, "float32"), ("uint8", "int8", 3001, "parts in float32"),
        ("bool", "int8", 3000, "float32"), ("int8", "int8", 16 * 1024, "parts in float32"),
    ],
)  # fmt: skip
def test_sums_that_float32_holds_exactly(dtype, other, terms, sums):
    """Also of the numbers of the greatest magnitude alone, and of these and 1."""

    def function(x, y):
        return product(jnp.int32, "c", "c")(x.astype(jnp.int32), y.astype(jnp.int32))

    x, y = operands(dtype, "c", "c", terms, other)
    assert features(function, x, y)[0].startswith(f"{sums},")
    check(function, x, y)
    largest = {"int8": -128, "uint8": 255, "bool": True}
    x, y = jnp.full_like(x, largest[dtype]), jnp.full_like(y, largest[other])
    check(function, x, y)
    one = jnp.arange(terms)[:, None] == 0
    check(function, jnp.where(one, jnp.ones_like(x), x), jnp.where(one, jnp.ones_like(y), y))


def test_too_many_terms_are_multiplied_as_wide_integers_or_left_alone():
    x, y = operands("int8", "c", "c", 16 * 1024 + 1)
    assert NAME not in found(product(jnp.int32, "c", "c"), x, y)
    assert features(product(jnp.int8, "c", "c"), x, y) == ["32 bits, narrow, columns and columns summed"]
    check(product(jnp.int8, "c", "c"), x, y)


def test_several_axes_batches_and_sizes():
    x, y = integers(3, 5, 67, 9, dtype="uint8"), integers(67, 4, 9, 33, dtype="uint8", seed=1)
    check(lambda x, y: jnp.einsum("abck,cdke->abde", x, y), x, y)
    check(lambda x, y: jnp.einsum("abck,cdke->abde", x, y, preferred_element_type=jnp.int32), x, y)
    x, y = integers(2, 3, 67, 33, dtype="bool"), integers(2, 35, 3, 33, dtype="bool", seed=1)
    check(lambda x, y: jnp.einsum("bhtk,bshk->bhts", x, y, preferred_element_type=jnp.int32), x, y)


def test_reachability_and_counts_as_people_write_them():
    graph = integers(70, 70, dtype="bool")

    def reachable(graph):
        return lax.fori_loop(0, 6, lambda _, reached: reached | (reached @ reached), graph)

    def triangles(graph):
        paths = graph.astype(jnp.int32)
        return (paths @ paths * paths).sum()

    check(reachable, graph)
    check(triangles, graph)
    assert features(triangles, graph) == ["float32, to 32 bits, rows and columns summed"]


def test_conversions_that_lose_nothing_alone_are_looked_through():
    wanted = {
        ("int8", "int32"): ["float32, to 32 bits, rows and columns summed"],
        ("int16", "int32"): [],
        ("int8", "uint32"): ["32 bits, narrow, rows and columns summed"],
        ("uint8", "uint32"): ["float32, narrow, rows and columns summed"],
    }
    for (narrow, wide), given in wanted.items():
        function = lambda x, y: x.astype(wide) @ y.astype(wide)  # noqa: B023, E731
        arguments = operands(narrow, "r", "c", 65)
        assert features(function, *arguments) == given
        if given:
            check(function, *arguments)


@pytest.mark.parametrize("transform", ["vmap", "scan", "outside"])
def test_under_transformations(transform):
    x, y = integers(3, 67, 65, dtype="int8"), integers(65, 35, dtype="int8", seed=1)
    function = {
        "vmap": lambda x, y: jax.vmap(jnp.matmul, (0, None))(x, y),
        "scan": lambda x, y: lax.scan(lambda c, x: (c + 1, x @ y), 0, x)[1],
        "outside": lambda x, y: jax.vmap(optimized(jnp.matmul), (0, None))(x, y),
    }[transform]
    if transform == "outside":
        same_bits(function(x, y), jax.vmap(jnp.matmul, (0, None))(x, y))
    else:
        check(function, x, y)


def test_what_is_left_alone():
    x, y = operands("int8", "r", "c", 65)
    assert NAME not in found(jnp.matmul, x[:3], y)  # rows
    assert NAME not in found(jnp.matmul, x[:, :15], y[:15])  # terms
    assert NAME not in found(jnp.matmul, x[:16], y[:, :35])  # multiplications
    assert NAME not in found(product(jnp.float32), x, y)
    assert NAME not in found(jnp.matmul, x.astype(jnp.float32), y.astype(jnp.float32))
    with jax.enable_x64(True):
        assert NAME not in found(jnp.matmul, x.astype(jnp.int64), y.astype(jnp.int64))
        assert NAME not in found(product(jnp.int64), x, y)
    empty = jnp.zeros((0, 65), jnp.int8)
    assert NAME not in found(jnp.matmul, empty, y)
    off = autopallas.optimize(jnp.matmul, objective="always", ops=f"-{NAME}")
    assert autopallas.explain(off, x, y).counts() == {}
