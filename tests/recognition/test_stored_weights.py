"""Weights that a program stores in 8 bits belong to the grouped matmuls that read them, with its own casts and scales;
whatever is not certain to be that is multiplied as the program computes it."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compare import compiled

import autopallas
from autopallas import compat
from autopallas.sites.device import Device
from autopallas.sites.encoding import saved_site

M, K, N, G = 24, 6, 10, 4
SIZES = jnp.array([7, 0, 11, 3], jnp.int32)
OP = "grouped_matmul"
BF16, F32, E4M3, E5M2 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2


def normal(seed: int, *shape: int, dtype: Any = BF16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def positive(seed: int, *shape: int, dtype: Any = F32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).uniform(0.5, 2, shape), dtype)


X, W = normal(0, M, K), normal(1, G, K, N, dtype=E4M3)
dot = lax.ragged_dot


def report_of(function: Any, *args: Any, tolerance: float = 0.0, **options: Any) -> Any:
    """The report of a program whose results are the original's.

    Products of 16 bits are summed in float32 in either, in an order that is the compiler's affair: results of 16 bits
    may differ by a unit in the last place, which ``tolerance`` says relative to the largest.
    """
    optimized = autopallas.optimize(function, objective="always", strict=True, **options)
    found, wanted = compiled(optimized)(*args), compiled(function)(*args)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        np.testing.assert_allclose(one, other, rtol=0, atol=(tolerance or 2**-7) * np.abs(other).max())
    return optimized.report()


def site_of(function: Any, *args: Any, **options: Any) -> Any:
    report = report_of(function, *args, **options)
    assert report.counts()[OP] == 1, [miss.reason for miss in report.near_misses]
    return report.sites[0]


def is_stored(site: Any, dtype: Any = E4M3, scales: int = 0) -> bool:
    program = str(site.spec["widening"])
    return f"score: {jnp.dtype(dtype).name}" in program and program.count(": ") == 1 + scales


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("wide", [BF16, jnp.float16, F32])
def test_a_cast_before_the_product(dtype, wide):
    site = site_of(lambda x, w: dot(x, w.astype(wide), SIZES), X.astype(wide), W.astype(dtype))
    assert is_stored(site, dtype)
    assert site.spec["second_dtype"] == jnp.dtype(wide).name
    assert "weights stored in" in str(site)


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3, F32), (E4M3, E4M3, BF16), (E5M2, E4M3, F32), (BF16, E5M2, None),
                                    (F32, E4M3, None), (jnp.float16, E5M2, F32)], ids=str)  # fmt: skip
def test_operands_of_8_bits_with_a_wider_result(dtypes):
    """Their values are multiplied as bfloat16, or as those of the other operand, which hold all of them."""
    first, second, result = dtypes
    site = site_of(lambda x, w: dot(x, w, SIZES, preferred_element_type=result), X.astype(first), W.astype(second))
    assert is_stored(site, second)
    wide = BF16 if jnp.dtype(first).itemsize == 1 else first
    assert (site.spec["first_dtype"], site.spec["second_dtype"]) == (jnp.dtype(wide).name,) * 2


def test_rows_of_8_bits_are_replaced_where_that_was_measured():
    """What the original does with them is nothing that the tables' rows were measured against."""

    def function(x, w):
        return dot(x, w, jnp.full((8,), 256, jnp.int32), preferred_element_type=BF16)

    types = [jax.ShapeDtypeStruct(shape, E4M3) for shape in ((2048, 256), (8, 256, 512))]
    (site,) = autopallas.explain(autopallas.optimize(function), *types).sites
    assert site.verdict == "kept"
    assert "no row for rows of 8 bits" in site.reason
    with Device("gpu", "NVIDIA H100 80GB HBM3").targeted():
        (site,) = autopallas.explain(autopallas.optimize(function), *types).sites
    assert site.verdict == "kept"
    assert compat.missing_mosaic_gpu() is not None or "that multiply rows of 8 bits" in site.reason


SCALES = {
    "one number": (lambda w, s: w.astype(BF16) * s, (), BF16, (1, 1, 1)),
    "groups": (lambda w, s: (w.astype(F32) * s[:, None, None]).astype(BF16), (G,), F32, (G, 1, 1)),
    "columns of groups": (lambda w, s: w.astype(BF16) * s, (G, 1, N), BF16, (G, 1, N)),
    "columns": (lambda w, s: w.astype(BF16) / s, (N,), BF16, (1, 1, N)),
    "rows of groups": (lambda w, s: w.astype(BF16) * s[:, :, None], (G, K), BF16, (G, K, 1)),
    "float32 throughout": (lambda w, s: (w.astype(F32) * s).astype(BF16), (G, 1, 1), F32, (G, 1, 1)),
    "each weight": (lambda w, s: w.astype(BF16) * s, (G, K, N), BF16, (G, K, N)),
    "a computed one": (
        lambda w, s: w.astype(BF16) * (1 / jnp.max(s, 1))[:, None],
        (G, 3, N),
        BF16,
        (G, 1, N),
    ),
}


@pytest.mark.parametrize("name", SCALES)
def test_scales(name):
    function, shape, dtype, varies = SCALES[name]
    site = site_of(lambda x, w, s: dot(x, function(w, s), SIZES), X, W, positive(2, *shape, dtype=dtype))
    assert is_stored(site, scales=1)
    assert site.spec["scales"] == str((varies,))


def test_two_scales_and_a_shift():
    def function(x, w, s, z):
        return dot(x, ((w.astype(F32) - z[:, None]) * s * 0.5).astype(BF16), SIZES)

    site = site_of(function, X, W, positive(2, G, 1, N), positive(3, G, N))
    assert is_stored(site, scales=3)  # two arrays and a constant


def test_weights_that_are_stored_transposed():
    site = site_of(lambda x, w: dot(x, w.astype(BF16).mT, SIZES), X, W.mT)
    assert is_stored(site)
    assert site.spec["use"] == "forward"


def test_layers_that_lie_in_one_array():
    def function(x, ws, scales):
        for i in range(2):
            x = dot(x, ws[i].astype(BF16) * scales[i], SIZES)
        return x

    given = X, normal(1, 2, G, K, K, dtype=E4M3), positive(2, 2, G, 1, 1, dtype=BF16)
    report = report_of(function, *given)
    assert [is_stored(site, scales=1) for site in report.sites] == [True, True]


def test_in_checkpoints():
    def layer(x, w, s):
        return jnp.tanh(dot(x, (w.astype(F32) * s).astype(BF16), SIZES))

    given = X, normal(1, G, K, K, dtype=E4M3), positive(2, G, 1, 1)
    report = report_of(jax.grad(lambda *a: jnp.sum(jax.checkpoint(layer)(*a).astype(F32))), *given)
    assert [(site.direction, is_stored(site, scales=1)) for site in report.sites] == [("forward+backward", True)]


def test_an_epilogue_and_stored_weights():
    site = site_of(
        lambda x, w, s: jax.nn.silu(dot(x, w.astype(BF16) * s, SIZES)), X, W, positive(2, G, 1, 1, dtype=BF16)
    )
    assert is_stored(site, scales=1)
    assert site.spec["epilogue"] != "None"


def blocks_of_rows(w: Any, s: Any) -> Any:
    parts = w.astype(BF16).reshape(G, 2, K // 2, N) * s[:, :, None, None]
    return parts.reshape(G, K, N)


def blocks(w: Any, s: Any) -> Any:
    parts = w.astype(F32).reshape(G, 3, K // 3, 2, N // 2) * s[:, :, None, :, None]
    return parts.astype(BF16).reshape(G, K, N)


def repeated(w: Any, s: Any) -> Any:
    return (w.astype(F32) * jnp.repeat(jnp.repeat(s, K // 3, 1), N // 2, 2)).astype(BF16)


def in_turns(w: Any, s: Any) -> Any:
    return w.astype(BF16) * jnp.tile(s, (1, K // 2))[:, :, None]


BLOCKS = {
    "rows": (blocks_of_rows, (G, 2), BF16, (G, 2, 1)),
    "both": (blocks, (G, 3, 2), F32, (G, 3, 2)),
    "repeated": (repeated, (G, 3, 2), F32, (G, 3, 2)),
    "in turns": (in_turns, (G, 2), BF16, (G, K, 1)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_scales_of_blocks(name):
    function, shape, dtype, numbers = BLOCKS[name]
    scales = positive(2, *shape, dtype=dtype)
    site = site_of(lambda x, w, s: dot(x, function(w, s), SIZES), X, W, scales)
    assert is_stored(site, scales=1)
    assert site.spec["scales"] == str((numbers,))
    assert (site.spec["contracting"], site.spec["columns"]) == (K, N)
    step = jax.grad(lambda x, w, s: jnp.sum(jnp.sin(dot(x, function(w, s), SIZES).astype(F32))))
    report = report_of(step, X, W, scales, tolerance=2**-6)
    assert [is_stored(site, scales=1) for site in report.sites] == [True]
    around = jax.grad(autopallas.optimize(lambda x, w, s: jnp.sum(dot(x, function(w, s), SIZES).astype(F32)),
                                          objective="always", strict=True), 2)  # fmt: skip
    wanted = jax.grad(lambda x, w, s: jnp.sum(dot(x, function(w, s), SIZES).astype(F32)), 2)(X, W, scales)
    np.testing.assert_allclose(np.asarray(around(X, W, scales), np.float64), np.asarray(wanted, np.float64),
                               rtol=0, atol=2e-2 * np.abs(np.asarray(wanted, np.float64)).max())  # fmt: skip


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda x, w: (dot(x, w.astype(BF16), SIZES), w.astype(BF16)), (X, W)),
        (lambda x, w: dot(x, w.astype(BF16) + jnp.flip(w, 2).astype(BF16), SIZES), (X, W)),
        (lambda x, w: dot(x, jnp.cumsum(w.astype(BF16), 1), SIZES), (X, W)),
        (lambda x, w: dot(x, w.astype(BF16), SIZES), (X, normal(1, G, K, N, dtype=jnp.float8_e4m3b11fnuz))),
        (lambda x, w: dot(x, w.astype(BF16), SIZES), (X, jnp.ones((G, K, N), jnp.int8))),
        (lambda x, w: lax.scan(lambda c, _: (dot(c, w, SIZES), None), x, None, length=2)[0],
         (X, normal(1, G, K, K))),
    ],
    ids=["another reader", "two arrays", "a running sum", "another format", "integers",
         "no stored weights"],
)  # fmt: skip
def test_what_is_not_certain_is_multiplied_as_it_is_computed(function, args):
    site = site_of(function, *args)
    assert site.spec["widening"] is None


def test_weights_that_are_cast_before_a_loop_are_not_cast_in_it():
    def function(x, w):
        wide = w.astype(BF16) * 2
        return lax.scan(lambda c, _: (dot(c, wide, SIZES), None), x, None, length=2)[0]

    assert site_of(function, X, normal(1, G, K, K, dtype=E4M3)).spec["widening"] is None


def test_weights_that_are_cast_in_a_loop_are_read_there_as_they_are_stored():
    def function(x, ws, scales):
        body = lambda c, given: (dot(c, (given[0].astype(F32) * given[1]).astype(BF16), SIZES), None)  # noqa: E731
        return lax.scan(body, x, (ws, scales))[0]

    site = site_of(function, X, normal(1, 3, G, K, K, dtype=E4M3), positive(2, 3, G, 1, 1))
    assert is_stored(site, scales=1)


def test_results_of_8_bits_are_a_near_miss():
    report = report_of(lambda x, w: dot(x, w, SIZES).astype(F32), X.astype(E4M3), W, tolerance=1)
    assert report.counts().get(OP, 0) == 0
    assert "dtype float8_e4m3fn" in report.near_misses[0].reason


# ---------------------------------------------------------------------- gradients


def loss(x: Any, w: Any, s: Any) -> Any:
    return jnp.sum(jnp.sin(dot(x, (w.astype(F32) * s).astype(BF16), SIZES).astype(F32)))


def in_float64(x: Any, w: Any, s: Any) -> Any:
    """The gradients of x and of the scales, group by group, of the weights that the program multiplies."""
    wide = np.asarray((w.astype(F32) * s).astype(BF16), np.float64)
    x, stored = np.asarray(x, np.float64), np.asarray(w, np.float64)
    dx, ds, begin = np.zeros_like(x), np.zeros(s.shape), 0
    for g, size in enumerate(np.asarray(SIZES)):
        rows = slice(begin, begin + size)
        dout = np.cos(x[rows] @ wide[g])
        dx[rows] = dout @ wide[g].T
        ds[g] = np.sum(
            (x[rows].T @ dout) * stored[g], axis=tuple(i for i in (0, 1) if s.shape[1 + i] == 1), keepdims=True
        )
        begin += size
    return dx, ds


@pytest.mark.parametrize("outside", [False, True], ids=["in the program", "around it"])
@pytest.mark.parametrize("active", [(0,), (0, 2)], ids=["rows", "rows and scales"])
@pytest.mark.parametrize("shape", [(G, 1, 1), (G, 1, N)])
def test_gradients(active, outside, shape):
    given = X, W, positive(2, *shape)
    wanted = [in_float64(*given)[i // 2] for i in active]
    options = dict(objective="always", strict=True)
    if outside:
        found = compiled(jax.grad(autopallas.optimize(loss, **options), active))(*given)
    else:
        optimized = autopallas.optimize(jax.grad(loss, active), **options)
        found = compiled(optimized)(*given)
        assert optimized.report().counts()[OP] == 1
    for one, truth in zip(found, wanted, strict=True):
        # Results, their cotangents and the gradients are each rounded to bfloat16.
        np.testing.assert_allclose(np.asarray(one, np.float64), truth, rtol=0, atol=3e-2 * np.abs(truth).max())


def test_a_backward_reads_the_stored_weights_too():
    """With frozen weights, which nothing but the two products reads."""
    optimized = autopallas.optimize(jax.grad(loss), objective="always", strict=True)
    compiled(optimized)(X, W, positive(2, G, 1, 1))
    (site,) = optimized.report().sites
    assert site.direction == "forward+backward"
    assert is_stored(site, scales=1)


@pytest.mark.parametrize("result", [F32, BF16])
def test_gradients_of_operands_of_8_bits_are_the_programs(result):
    def function(x, w):
        return jnp.sum(dot(x, w, SIZES, preferred_element_type=result).astype(F32) ** 2)

    given = X.astype(E4M3), W
    wanted = compiled(jax.grad(function, (0, 1)))(*given)
    options = dict(objective="always", strict=True)
    inside = compiled(autopallas.optimize(jax.grad(function, (0, 1)), **options))(*given)
    around = compiled(jax.grad(autopallas.optimize(function, **options), (0, 1)))(*given)
    for found in (inside, around):
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == other.dtype
            one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
            np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
            finite = np.isfinite(other)
            # A unit in the last of e4m3's 4 digits.
            np.testing.assert_allclose(one[finite], other[finite], rtol=0, atol=np.abs(other[finite]).max() / 8)


def test_under_vmap():
    def function(x, w, s, n):
        return dot(x, w.astype(BF16) * s, n)

    optimized = autopallas.optimize(function, objective="always", strict=True)
    given = normal(4, 3, M, K), W, positive(5, 3, G, 1, 1, dtype=BF16), jnp.stack([SIZES, SIZES[::-1], 0 * SIZES])
    wanted = np.asarray(jax.vmap(function, (0, None, 0, 0))(*given), np.float64)
    found = compiled(jax.vmap(optimized, (0, None, 0, 0)))(*given)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=0, atol=2**-7 * np.abs(wanted).max())


def test_a_site_is_read_back_from_a_report():
    given = X, W, positive(2, G, 1, N)
    optimized = autopallas.optimize(
        lambda x, w, s: dot(x, (w.astype(F32) * s).astype(BF16), SIZES), objective="always", strict=True
    )
    (site,) = autopallas.explain(optimized, *given).sites
    saved = saved_site(site.op, site.direction, json.loads(json.dumps(site.encoded)))
    assert saved.spec.to_dict() == site.spec
    assert saved.site.types == (np.dtype(BF16), np.dtype(E4M3), np.dtype(np.int32), np.dtype(F32))


def test_a_search_measures_a_site(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPALLAS_CACHE_DIR", str(tmp_path))
    function = lambda x, w, s: dot(x, (w.astype(F32) * s).astype(BF16), SIZES)  # noqa: E731
    optimized = autopallas.optimize(function, autotune=True, strict=True)
    given = X, W, positive(2, G, 1, N)
    found, wanted = compiled(optimized)(*given), compiled(function)(*given)
    np.testing.assert_allclose(np.asarray(found, np.float64), np.asarray(wanted, np.float64), rtol=2**-7, atol=1e-2)
    (site,) = optimized.report().sites
    assert is_stored(site, scales=1)
    assert not optimized.report().failures
