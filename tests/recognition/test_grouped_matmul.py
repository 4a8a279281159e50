"""Every ragged dot of a program is one site; what is none is refused with its reason; results are exact."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from support.compare import compare, compiled, optimized_like_a_user

import autopallas
from autopallas.errors import UnsupportedError

M, K, N, G = 24, 6, 10, 4
SIZES = jnp.array([7, 0, 11, 3], jnp.int32)
BOTH_WAYS = jnp.stack([SIZES, SIZES[::-1]])
OP = "grouped_matmul"


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


X, W = normal(0, M, K), normal(1, G, K, N)


def found(function: Any, args: Any, count: int = 1, **options: Any) -> Any:
    """The report of a program that is exact and has so many sites, all replaced."""
    compared = compare(function, args, **options)
    assert compared.complaints == []
    assert compared.report.counts()[OP] == count, [m.reason for m in compared.report.near_misses]
    return compared.report


def dims(contracting: Any, batch: Any = ((), ()), ragged: int = 0, group: Any = (0,)) -> lax.RaggedDotDimensionNumbers:
    return lax.RaggedDotDimensionNumbers((contracting, batch), [ragged], group)


@pytest.mark.parametrize("sizes", [[7, 0, 11, 3], [6, 6, 6, 6], [0, 0, 24, 0], [0, 0, 0, 0], [9, 9, 9, 9]])
def test_a_ragged_dot_with_any_group_sizes(sizes):
    report = found(lambda x, w, n: lax.ragged_dot(x, w, n), (X, W, jnp.array(sizes, jnp.int32)))
    (site,) = report.sites
    assert site.direction == "forward"
    assert site.implementation == "xla"
    assert "test_grouped_matmul.py" in site.location
    assert site.spec["groups"] == G
    assert any("assume_finite" in text for text in site.assumptions)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("preferred", [None, jnp.float32])
def test_narrow_operands_with_and_without_a_wide_result(dtype, preferred):
    report = found(lambda x, w: lax.ragged_dot(x, w, SIZES, preferred_element_type=preferred),
                   (X.astype(dtype), W.astype(dtype)))  # fmt: skip
    assert report.sites[0].spec["result_dtype"] == jnp.dtype(preferred or dtype).name


def test_the_precision_is_kept():
    report = found(lambda x, w: lax.ragged_dot(x, w, SIZES, precision="highest"), (X, W))
    assert report.sites[0].spec["precision"] == "HIGHEST"


@pytest.mark.parametrize(
    ("numbers", "x", "w", "sizes"),
    [
        (dims(((1,), (2,))), X, W.swapaxes(1, 2), SIZES),
        (dims(((1,), (0,)), group=(1,)), X, W.swapaxes(0, 1), SIZES),
        (dims(((0,), (1,)), ragged=1), X.T, W, SIZES),
        (dims(((1, 2), (1, 2))), X.reshape(M, 2, 3), W.reshape(G, 2, 3, N), SIZES),
        (dims(((2, 1), (2, 1))), X.reshape(M, 2, 3), W.reshape(G, 2, 3, N), SIZES),
        (dims(((1,), (1,))), X, W.reshape(G, K, 2, 5), SIZES),
        (dims(((1,), (1,))), X, W[..., 0], SIZES),
        (dims(((2,), (2,)), ((0,), (0,)), 1, (1,)), X.reshape(2, 12, K), normal(2, 2, G, K, N), SIZES),
        (dims(((2,), (2,)), ((0,), (0,)), 1, (1,)), X.reshape(2, 12, K), normal(2, 2, G, K, N), BOTH_WAYS),
        (dims(((2,), (1,)), ragged=1), X.reshape(2, 12, K), W, BOTH_WAYS),
        (dims(((2,), (1,))), X.reshape(12, 2, K), W, SIZES),
    ],
    ids=["transposed", "groups inside", "rows inside", "two inner axes", "in another order", "two columns",
         "no columns", "batch", "batch of sizes", "outer axis", "inner axis"],
)  # fmt: skip
def test_any_layout(numbers, x, w, sizes):
    found(lambda x, w: lax.ragged_dot_general(x, w, sizes, numbers), (x, w))


def test_a_gradient_of_the_matrices_may_stand_alone():
    numbers = dims(((0,), (0,)), group=())
    report = found(lambda x, d: lax.ragged_dot_general(x, d, SIZES, numbers), (X, normal(3, M, N)), gradients=False)
    assert report.sites[0].spec["use"] == "drhs"


def test_each_forward_is_a_site():
    def layer(x, w, u, d):
        h = jax.nn.silu(lax.ragged_dot(x, w, SIZES)) * lax.ragged_dot(x, u, SIZES)
        return lax.ragged_dot(h, d, SIZES)

    report = found(layer, (X, W, 2 * W[::-1], W.swapaxes(1, 2)), 3)
    assert len({site.location for site in report.sites}) == 2


def test_a_site_that_is_used_twice_counts_once():
    def function(x, w):
        y = lax.ragged_dot(x, w, SIZES)
        return jnp.sin(y) + jnp.cos(lax.ragged_dot(x, w, SIZES))

    found(function, (X, W))


def test_in_loops_branches_checkpoints_and_custom_rules():
    own = jax.custom_vjp(lambda x, w: lax.ragged_dot(x, w, SIZES))
    own.defvjp(lambda x, w: (own(x, w), (x, w)), lambda r, d: (d @ r[1][0].T, jnp.zeros_like(r[1])))
    square = normal(4, G, K, K)

    def function(x, w, flag):
        x = lax.scan(lambda c, _: (jnp.sin(lax.ragged_dot(c, w, SIZES)), None), x, None, length=2)[0]
        x = lax.cond(flag, lambda x: lax.ragged_dot(x, 2 * w, SIZES), lambda x: x, x)
        x = jax.checkpoint(lambda x: jnp.sin(lax.ragged_dot(x, 3 * w, SIZES)))(x)
        return own(x, w)

    report = found(function, (X, square, jnp.array(True)), 4)
    assert [site.path for site in report.sites] == ["scan", "cond.1", "checkpoint", "custom_vjp"]


def test_vmap_inside_and_outside():
    x, w, sizes = normal(5, 3, M, K), normal(6, 3, G, K, N), jnp.stack([SIZES, SIZES[::-1], 0 * SIZES])

    def function(x, w):
        return jax.vmap(lax.ragged_dot)(x, w, sizes)

    found(function, (x, w))
    optimized = autopallas.optimize(lambda x, w, n: lax.ragged_dot(x, w, n), objective="always", strict=True)
    given = compiled(lambda x, w: jax.vmap(optimized)(x, w, sizes))(x, w)
    np.testing.assert_allclose(given, function(x, w), rtol=1e-5, atol=1e-5)


def test_inside_shard_map():
    mesh = Mesh(np.array(jax.devices()[:1]), ("m",))
    spec = PartitionSpec()
    for check in (False, True):
        mapped = jax.shard_map(lambda x, w: lax.ragged_dot(x, w, SIZES), mesh=mesh, in_specs=(spec, spec),
                               out_specs=spec, check_vma=check)  # fmt: skip
        optimized = optimized_like_a_user(mapped)
        given = compiled(lambda *a, f=optimized: f(*a))(X, W)
        np.testing.assert_allclose(given, compiled(mapped)(X, W), rtol=1e-5, atol=1e-5)
        assert optimized.report().counts()[OP] == 1


@pytest.mark.parametrize(
    ("function", "args", "reason"),
    [
        (lambda x, w: lax.ragged_dot(x, w, SIZES), (X.astype(jnp.int32), W.astype(jnp.int32)), "dtype int32"),
        (lambda x, w: lax.ragged_dot(x, w, SIZES), (X[:, :0], W[:, :0]), "empty"),
        (lambda x, w: lax.ragged_dot(x, w, SIZES, group_offset=1), (X, W), "group offset"),
        (lambda x, w: lax.ragged_dot(x, w, SIZES.astype(jnp.int8)), (normal(7, 200, K), W), "cannot count 200 rows"),
        (lambda x, w: lax.ragged_dot_general(x, w, jnp.array([1, 1]), dims(((1,), (1,)), ((0,), (0,)), 0, ())),
         (normal(8, 3, K), normal(9, 3, K)), "batch axis"),
        (lambda x, w: lax.ragged_dot_general(x, w, SIZES, dims(((0, 1), (0, 1)), ragged=0, group=())),
         (normal(8, M, 2, K), normal(9, M, 2, K)), "more than the ragged axis"),
        (lambda x, w: lax.ragged_dot(x, w, SIZES, precision=("highest", "default")), (X, W), "precision"),
    ],
)  # fmt: skip
def test_what_no_kernel_computes_is_refused(function, args, reason):
    report = autopallas.explain(autopallas.optimize(function, objective="always", strict=True), *args)
    assert report.sites == ()
    assert [reason in miss.reason for miss in report.near_misses] == [True], report.near_misses


def test_weights_that_may_be_infinite_keep_the_original():
    w = W.at[0, 0, 0].set(jnp.inf)  # the original multiplies every row by it
    optimized = autopallas.optimize(lambda x, w: lax.ragged_dot(x, w, SIZES), objective="always", assume_finite=False)
    given, wanted = compiled(lambda *a: optimized(*a))(X, w), compiled(lambda x, w: lax.ragged_dot(x, w, SIZES))(X, w)
    np.testing.assert_array_equal(given, wanted)
    (site,) = optimized.report().sites
    assert site.verdict == "kept"
    assert "assume_finite is off" in site.reason
    assert site.assumptions == ()
    with pytest.raises(UnsupportedError, match="assume_finite is off"):
        autopallas.explain(autopallas.optimize(lambda x, w: lax.ragged_dot(x, w, SIZES), assume_finite=False,
                                               implementation="xla"), X, w)  # fmt: skip


def test_only_the_operations_asked_for():
    report = autopallas.explain(autopallas.optimize(lax.ragged_dot, objective="always", ops="attention"), X, W, SIZES)
    assert report.sites == report.near_misses == ()


def test_verify_agrees():
    assert autopallas.verify(autopallas.optimize(lax.ragged_dot, objective="always"), X, W, SIZES).ok


# ---------------------------------------------------------------------- epilogues


def epilogue(function: Any, args: Any = (X, W), **options: Any) -> Any:
    """The epilogue of a program's only site, one instruction a line; empty where there is none."""
    (site,) = found(function, args, **options).sites
    return site.replacement.partition("epilogue: ")[2]


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [(jax.nn.silu, jnp.bfloat16), (jax.nn.relu, jnp.float32), (lambda y: jax.nn.gelu(y) * 2 + 1, jnp.float32)],
    ids=["silu", "relu", "gelu and more"],
)
def test_an_activation_is_the_epilogue_of_its_product(activation, dtype):
    """Rows that no group owns are activated zeros."""
    assert epilogue(lambda x, w: activation(lax.ragged_dot(x, w, SIZES)), (X.astype(dtype), W.astype(dtype)))


def test_a_cast_after_a_wide_product_is_its_epilogue():
    def function(x, w):
        return jax.nn.silu(lax.ragged_dot(x, w, SIZES, preferred_element_type=jnp.float32)).astype(jnp.bfloat16)

    text = epilogue(function, (X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)))
    assert "score: float32" in text
    assert "convert_element_type" in text


def test_groups_that_overlap_are_added_before_the_activation():
    sizes = jnp.array([12, -5, 9, 6], jnp.int32)
    optimized = optimized_like_a_user(lambda x, w: jax.nn.silu(lax.ragged_dot(x, w, sizes)))
    given = compiled(lambda *a: optimized(*a))(X, W)
    wanted = compiled(lambda x, w: jax.nn.silu(lax.ragged_dot(x, w, sizes)))(X, W)
    np.testing.assert_allclose(given, wanted, rtol=1e-5, atol=1e-5)
    assert "epilogue" in optimized.report().sites[0].replacement


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (y := lax.ragged_dot(x, w, SIZES), jnp.sin(y)),
        lambda x, w: jnp.sin(y := lax.ragged_dot(x, w, SIZES)) @ y.T,
        lambda x, w: lax.ragged_dot(x, w, SIZES) * x[0, 0],
        lambda x, w: lax.ragged_dot(x, w, SIZES) + jnp.arange(N, dtype=jnp.float32),
        lambda x, w: lax.ragged_dot(x, w, SIZES) > 0,
        lambda x, w: lax.scan(lambda c, _: (c + jnp.sin(y), None), y := lax.ragged_dot(x, w, SIZES), None, 2)[0],
        lambda x, w: jax.nn.softmax(lax.ragged_dot(x, w, SIZES)),
    ],
    ids=["returned", "read twice", "unknown scalar", "other elements", "no number", "in a loop", "of a row"],
)
def test_what_else_reads_a_product_leaves_it_without_an_epilogue(function):
    assert not epilogue(function, gradients=False)


def test_only_what_follows_the_product_alone_is_its_epilogue():
    def gated(x, w, u):
        return jax.nn.silu(lax.ragged_dot(x, w, SIZES)) * lax.ragged_dot(x, u, SIZES)

    report = found(gated, (X, W, 2 * W[::-1]), 2)
    programs = [site.replacement.partition("epilogue: ")[2] for site in report.sites]
    assert sorted(map(bool, programs)) == [False, True]
    assert "logistic" in max(programs)


def test_a_train_step_keeps_the_product_that_its_backward_reads():
    """What silu's derivative reads is no epilogue; that of tanh reads the activated value alone."""
    for activation, carried in ((jax.nn.silu, False), (jnp.tanh, True)):

        def step(x, w, activation=activation):
            return jax.value_and_grad(lambda x, w: jnp.sum(activation(lax.ragged_dot(x, w, SIZES)) ** 2), (0, 1))(x, w)

        optimized = optimized_like_a_user(step)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
            compiled(lambda *a, f=optimized: f(*a))(X, W), compiled(step)(X, W),
        )  # fmt: skip
        (site,) = optimized.report().sites
        assert site.direction == "forward+backward"
        assert ("epilogue" in site.replacement) is carried


@pytest.mark.parametrize(
    "transformed",
    [
        lambda f: lambda x, w: jax.jvp(f, (x, w), (w[0, :, :1].T + 0 * x, w))[1],
        lambda f: lambda x, w: jax.jvp(jax.grad(f, 1), (x, w), (x, w))[1],
        lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
        lambda f: lambda x, w: jax.vmap(jax.grad(f, (0, 1)))(jnp.stack([x, x + 1]), jnp.stack([w, 2 * w]), BOTH_WAYS),
    ],
    ids=["forward mode", "second order", "checkpoint", "vmap"],
)
def test_derivatives_of_an_epilogue(transformed):
    def function(x, w, sizes=SIZES):
        return jnp.sum(jax.nn.silu(lax.ragged_dot(x, w, sizes)) ** 2)

    optimized = optimized_like_a_user(function)
    given, wanted = compiled(transformed(lambda *a: optimized(*a)))(X, W), compiled(transformed(function))(X, W)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), given, wanted)
    assert "epilogue" in optimized.report().sites[0].replacement


def test_the_backward_does_not_compute_the_product_again():
    optimized = optimized_like_a_user(lambda w: jnp.sum(jax.nn.silu(lax.ragged_dot(X, w, SIZES)) ** 2))
    text = str(jax.make_jaxpr(jax.grad(lambda w: optimized(w)))(W))
    assert text.count("saves_product=True") >= 2
    assert text.count("saves_product=False") == 0
