"""Respelling of products of many small matrices: what is found, what is left alone, and what it computes."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.compare import compare
from support.respellings import found, random
from support.tiers import examples

import autopallas

N = 67  # no multiple of what a vector holds
NAME = "batched_product"


def optimized(function, **options):
    return autopallas.optimize(function, objective="always", strict=True, ops=NAME, **options)


def kinds(function, *arguments):
    """The respellings of this kind alone."""
    return [kind for kind in found(function, *arguments) if kind == NAME]


def einsum(spelling):
    return functools.partial(jnp.einsum, spelling)


def operands(spelling, sizes, dtype=jnp.float32):
    sizes = {"n": N} | sizes
    parts = spelling.partition("->")[0].split(",")
    return [random(*(sizes[letter] for letter in own), seed=i, dtype=dtype) for i, own in enumerate(parts)]


def check(function, *arguments, times=1):
    """The respelt function and its gradients are as near to float64 as the original's, or within the tolerance."""
    assert kinds(function, *arguments) == [NAME] * times
    compared = compare(function, arguments, ops=NAME)
    assert compared.complaints == []
    assert compared.report.counts()["respelling"] >= times


SIZES = [(3, 3, 3), (4, 4, 4), (2, 3, 5), (8, 4, 2), (7, 5, 1), (1, 6, 4)]


@pytest.mark.parametrize("spelling", ["nik,nkj->nij", "nik,njk->nij", "nki,nkj->nij", "nki,njk->nij"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_and_their_gradients(spelling, sizes):
    sizes = dict(zip("ikj", sizes, strict=True))
    check(einsum(spelling), *operands(spelling, sizes))


@pytest.mark.parametrize(
    ("spelling", "sizes"),
    [
        ("nik,nk->ni", {"i": 3, "k": 3}),
        ("nki,nk->ni", {"i": 7, "k": 16}),
        ("nk,nkj->nj", {"j": 5, "k": 4}),
        ("nij,nmj->nmi", {"i": 3, "j": 3, "m": 50}),  # points that are rotated
        ("ikn,kjn->ijn", {"i": 3, "k": 4, "j": 5}),  # the batch last
        ("ikn,nkj->nij", {"i": 3, "k": 3, "j": 3}),
        ("bnik,bnkj->bnij", {"b": 2, "i": 4, "k": 4, "j": 4}),
        ("bnik,nkbj->ibnj", {"b": 2, "i": 4, "k": 4, "j": 4}),
        ("nikl,nkjl->nij", {"i": 3, "k": 2, "l": 3, "j": 4}),
        ("nika,njkb->nabij", {"i": 2, "k": 4, "j": 2, "a": 2, "b": 3}),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_axes_in_any_order_and_number(spelling, sizes, dtype):
    check(einsum(spelling), *operands(spelling, sizes, dtype))


@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_products_at_random(data):
    sizes = {"n": N} | {letter: data.draw(st.sampled_from([1, 1, 2, 3, 4, 5])) for letter in "bijklm"}
    shared = data.draw(st.sampled_from(["n", "nb"]))
    summed = data.draw(st.sampled_from(["k", "kl"]))
    left, right = (data.draw(st.sampled_from(own)) for own in (["", "i", "im"], ["", "j"]))
    orders = [list(shared + summed + left), list(shared + summed + right)]
    first, second = ("".join(data.draw(st.permutations(order))) for order in orders)
    numbers = tuple(
        tuple(tuple(own.index(letter) for letter in letters) for own in (first, second)) for letters in (summed, shared)
    )
    dtype = data.draw(st.sampled_from([jnp.float32, jnp.bfloat16]))
    result = data.draw(st.sampled_from([None, jnp.float32]))

    def function(x, y):
        return lax.dot_general(x, y, numbers, preferred_element_type=result)

    x, y = (random(*(sizes[letter] for letter in own), seed=i, dtype=dtype) for i, own in enumerate((first, second)))
    if kinds(function, x, y):
        check(function, x, y)
    else:
        terms, rows, columns = (int(np.prod([sizes[a] for a in own])) for own in (summed, left, right))
        assert terms == 1 or terms > 16 or rows == columns == 1 or not 2 < max(rows, terms, columns) < 8


@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf, jnp.nan, 3e38])
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_not_finite(place, value):
    given = operands("nik,nkj->nij", {"i": 4, "k": 4, "j": 4})
    given[place] = given[place].at[3, 1].set(value).at[5, 0, 2].set(value)
    given[1 - place] = given[1 - place].at[3].set(0).at[5, 2].set(jnp.inf)
    wanted, ours = (np.asarray(jax.jit(run(jnp.matmul))(*given)) for run in (lambda f: f, optimized))
    np.testing.assert_array_equal(np.isnan(wanted), np.isnan(ours))
    np.testing.assert_allclose(wanted, ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", [None, "default", "high", "highest", ("default", "highest")])
def test_every_precision_is_kept(precision):
    given = operands("nik,nkj->nij", {"i": 4, "k": 5, "j": 3})
    check(lambda x, y: jnp.matmul(x, y, precision=precision), *given)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_results_that_are_wider_than_the_operands(dtype):
    given = operands("nik,nkj->nij", {"i": 4, "k": 5, "j": 3}, dtype)
    run = lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.float32)  # noqa: E731
    check(run, *given)
    assert optimized(run)(*given).dtype == jnp.float32


def test_x64():
    with jax.enable_x64(True):
        given = [x.astype(jnp.float64) for x in operands("nik,nkj->nij", {"i": 4, "k": 5, "j": 3})]
        ours, wanted = optimized(jnp.matmul)(*given), np.asarray(given[0]) @ np.asarray(given[1])
        assert ours.dtype == jnp.float64
        np.testing.assert_allclose(ours, wanted, rtol=1e-13, atol=1e-14)
        assert kinds(jnp.matmul, *given) == [NAME]
        mixed = lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.float64)  # noqa: E731
        check(mixed, *(x.astype(jnp.float32) for x in given))


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (1, 2)], ids=str)
def test_vmap_inside_and_outside(axes):
    def function(x, y):
        return jnp.sin(x) @ y

    x, y = operands("nik,nkj->nij", {"i": 3, "k": 3, "j": 3})
    many = [a if axis is None else jnp.stack([a, 2 * a, -a], axis) for a, axis in zip((x, y), axes, strict=True)]
    wanted = jax.jit(jax.vmap(function, axes))(*many)
    outside, inside = optimized(function), optimized(jax.vmap(function, axes))
    for ours in (jax.vmap(outside, axes)(*many), jax.jit(jax.vmap(outside, axes))(*many), inside(*many)):
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-5)
    assert outside.report().counts() == {"respelling": 1}


def transforms(angles):
    """Poses along a chain of joints: [n, joint, 4, 4]."""
    c, s = jnp.cos(angles), jnp.sin(angles)
    zero, one = jnp.zeros_like(c), jnp.ones_like(c)
    rows = [[c, -s, zero, one], [s, c, zero, zero], [zero, zero, one, 0.3 * one], [zero, zero, zero, one]]
    return jnp.stack([jnp.stack(row, -1) for row in rows], -2)


def kinematics(angles):
    joints = transforms(angles)
    pose, poses = joints[:, 0], []
    for joint in range(1, joints.shape[1]):
        pose = pose @ joints[:, joint]
        poses.append(pose[:, :3, 3])
    return jnp.stack(poses, 1)


def filtered(measured):
    """Estimates of a Kalman filter whose transition depends on the state: [n, time, 4] from [n, time, 2]."""
    seen = jnp.eye(2, 4)

    def step(carried, z):
        x, covariance = carried
        transition = jnp.eye(4) + 0.1 * jnp.cos(x)[:, None]
        x, covariance = transition @ x, transition @ covariance @ transition.T + 0.1 * jnp.eye(4)
        innovation = seen @ covariance @ seen.T + jnp.eye(2)
        (a, b), (c, d) = innovation
        gain = covariance @ seen.T @ (jnp.array([[d, -b], [-c, a]]) / (a * d - b * c))
        x = x + gain @ (z - seen @ x)
        return (x, covariance - gain @ seen @ covariance), x

    def one(measured):
        return lax.scan(step, (jnp.zeros(4), jnp.eye(4)), measured)[1]

    return jax.vmap(one)(measured)


@pytest.mark.parametrize(("program", "shape"), [(kinematics, (N, 5)), (filtered, (N, 6, 2))])
def test_train_steps(program, shape):
    x = random(*shape)
    step = jax.value_and_grad(lambda x: (jnp.sin(program(x)) ** 2).sum())
    compared = compare(step, (x,), gradients=False, ops=NAME)
    assert compared.complaints == []
    assert compared.report.counts()["respelling"] >= 8


def test_derivatives_that_are_taken_outside():
    x, ours = random(N, 3), optimized(kinematics)
    for derivative in (jax.grad, lambda f: jax.jit(jax.hessian(f))):
        given, wanted = (derivative(lambda x, f=f: (f(x) ** 2).sum())(x) for f in (ours, jax.jit(kinematics)))
        np.testing.assert_allclose(given, wanted, rtol=1e-4, atol=1e-4)


def test_checkpoints_scans_and_branches():
    def function(x, y):
        def step(carry, _):
            one = jax.checkpoint(lambda c: jnp.tanh(c @ y))(carry)
            return lax.cond(one.sum() > 0, lambda: one @ one, lambda: one @ x), None

        return lax.scan(step, x, None, length=3)[0]

    given = operands("nik,nkj->nij", {"i": 4, "k": 4, "j": 4})
    check(function, *given, times=3)


def test_loops_that_read_and_write_at_their_own_step():
    """The loop is given slices, and its products are respelt too."""

    def function(measured, transition):
        def step(i, carried):
            x, covariance, estimates = carried
            covariance = transition @ covariance @ jnp.swapaxes(transition, -1, -2) + jnp.eye(4)
            x = jnp.einsum("nij,nj->ni", transition, x) + measured[i]
            return x, covariance, estimates.at[i].set(x + covariance[:, 0])

        first = jnp.zeros_like(measured[0]), jnp.zeros_like(transition), jnp.zeros_like(measured)
        return lax.fori_loop(0, measured.shape[0], step, first)[2]

    gradient = jax.grad(lambda *given: (function(*given) ** 2).sum(), (0, 1))
    given = random(5, N, 4), random(N, 4, 4, seed=1) / 4
    assert sorted({*found(gradient, *given)}) == [NAME, "indexed_loop"]
    compared = compare(gradient, given, gradients=False)
    assert compared.complaints == []
    assert compared.report.counts()["respelling"] > 3


def test_an_operand_that_is_multiplied_by_itself():
    (x,) = operands("nik->nik", {"i": 4, "k": 4})
    check(lambda x: x @ x, x)
    check(lambda x: jnp.einsum("nki,nkj->nij", x, x), x)


def test_what_is_left_alone():
    def alone(function, *arguments):
        return kinds(function, *arguments) == []

    x, y = operands("nik,nkj->nij", {"i": 4, "k": 4, "j": 4})
    few = slice(63)
    assert alone(jnp.matmul, x[few], y[few]), "few products"
    assert alone(jnp.matmul, x, y[0]), "no shared axis"
    assert alone(jnp.matmul, x[:0], y[:0])
    assert alone(jnp.matmul, x[..., :0], y[:, :0])
    assert alone(jnp.matmul, x[..., :1], y[:, :1]), "one term"
    assert alone(jnp.matmul, x.astype(int), y.astype(int))
    assert alone(jnp.matmul, x.astype(jnp.complex64), y.astype(jnp.complex64))
    assert alone(lambda x, y: lax.dot_general(x.astype(jnp.bfloat16), y, (((2,), (1,)), ((0,), (0,)))), x, y)
    narrow = lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.bfloat16)  # noqa: E731
    assert alone(narrow, x, y), "rounded operands"
    preset = lax.DotAlgorithmPreset.BF16_BF16_F32
    assert alone(lambda x, y: jnp.matmul(x, y, precision=preset), x, y)
    assert alone(einsum("nk,nk->n"), x[:, 0], y[:, 0]), "a sum"
    assert alone(einsum("nik,njk->nij"), random(N, 5, 17), random(N, 5, 17)), "a long sum"
    assert alone(jnp.matmul, random(N, 8, 8), random(N, 8, 8)), "as fast on vectors"
    assert alone(einsum("nik,nk->ni"), random(N, 4, 8), random(N, 8)), "long rows"
    assert alone(jnp.matmul, random(N, 9, 16), random(N, 16, 9))
    assert alone(jnp.matmul, x[:, :2, :2], y[:, :2, :2]), "so small that XLA's loops are as fast"


def test_the_report_names_it_and_without_evidence_it_stays():
    given = operands("nik,nkj->nij", {"i": 4, "k": 4, "j": 4}, jnp.float16)
    run = autopallas.optimize(jnp.matmul)
    np.testing.assert_array_equal(run(*given), jax.jit(jnp.matmul)(*given))
    assert [site.verdict for site in run.report().sites] == ["kept"]
    assert NAME in str(autopallas.explain(optimized(jnp.matmul), *given))


@pytest.mark.parametrize("check_vma", [False, True])
def test_inside_shard_map(check_vma):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    x, y = operands("nik,nkj->nij", {"i": 4, "k": 4, "j": 4})
    run = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"), check_vma=check_vma)
    ours = optimized(run)
    np.testing.assert_allclose(ours(x, y), run(x, y), rtol=1e-5, atol=1e-5)
    assert ours.report().counts() == {"respelling": 1}
    gradient = jax.grad(lambda x, y: (run(x, y) ** 2).sum(), (0, 1))
    for a, b in zip(optimized(gradient)(x, y), gradient(x, y), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_arrays_that_are_divided_among_devices():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    given = [jax.device_put(x, NamedSharding(mesh, P("d"))) for x in random_pair()]
    ours = optimized(jnp.matmul)
    np.testing.assert_allclose(ours(*given), jnp.matmul(*given), rtol=1e-5, atol=1e-5)


def random_pair():
    return operands("nik,nkj->nij", {"i": 4, "k": 4, "j": 4})


def test_sums_are_not_fused_with_what_computes_their_operands():
    """Each would be computed anew for all that read it: in a chain of products, the more often the longer it is."""

    def chain(x, y):
        for _ in range(4):
            x = jnp.cos(x) @ y
        return x

    text = optimized(chain).lower(*random_pair()).compile().as_text()
    assert text.count(" conditional(") == 4
    assert " dot(" not in text


def test_orders_of_two_shared_axes():
    orders = list(itertools.product(itertools.permutations("abik"), itertools.permutations("abkj")))
    for place in np.random.default_rng(0).choice(len(orders), 12, replace=False):
        first, second = orders[place]
        numbers = tuple(
            tuple(tuple(own.index(letter) for letter in letters) for own in (first, second)) for letters in ("k", "ab")
        )
        sizes = {"a": 13, "b": 5, "i": 2, "k": 3, "j": 4}
        x, y = (random(*(sizes[letter] for letter in own), seed=i) for i, own in enumerate((first, second)))
        run = lambda x, y, numbers=numbers: lax.dot_general(x, y, numbers)  # noqa: E731
        assert kinds(run, x, y) == [NAME]
        wanted = np.einsum(f"{''.join(first)},{''.join(second)}->abij", np.float64(x), np.float64(y))
        np.testing.assert_allclose(optimized(run)(x, y), wanted, rtol=1e-5, atol=1e-5)
