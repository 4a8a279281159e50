"""Casts between the scores and the exponential, in numbers of the row, in positions and in labels: what one of them
rounds is what the original rounds, or less."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.catalogue import ODD, bhtd
from support.compare import compare, compiled, optimized_like_a_user, with_gradients

import autopallas
from autopallas.graph import Graph
from autopallas.graph.flatten import flatten
from autopallas.numerics.casts import counts_exactly, rounds, widens

f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16


def divided(p):
    return p / p.sum(-1, keepdims=True)


def normalised(p, v):
    return divided(p).astype(v.dtype) @ v


def far(q, k, offset):
    """Scores far from 0, which 16 bits hold badly."""
    return q @ k.mT * 4 + offset


def less_maximum(s):
    return s - s.max(-1, keepdims=True)


def rounded(x, dtype):
    return x.astype(dtype).astype(x.dtype)


def first_keys(s):
    return jnp.where(jnp.arange(s.shape[-1]) < 5, s, -jnp.inf)


# ---------------------------------------------------------------------- casts that follow a subtracted row

CAST_AFTER_A_ROW = {
    "maximum": (300, lambda s: jnp.exp(less_maximum(s).astype(bf16))),
    "maximum, float16": (7e4, lambda s: jnp.exp(less_maximum(s).astype(f16)).astype(f32)),
    "maximum, and back": (300, lambda s: jnp.exp(rounded(less_maximum(s), bf16))),
    "exp2": (300, lambda s: jnp.exp2(less_maximum(s).astype(bf16))),
    "bias after it": (300, lambda s: jnp.exp(less_maximum(s).astype(bf16) + jnp.arange(s.shape[-1]).astype(bf16) / 8)),
    "scale after it": (300, lambda s: jnp.exp(less_maximum(s).astype(bf16) * 0.5)),
    "mask after it": (300, lambda s: jnp.exp(first_keys(less_maximum(s).astype(bf16)))),
    "mean": (300, lambda s: jnp.exp((s - s.mean(-1, keepdims=True)).astype(bf16))),
    "two casts": (300, lambda s: jnp.exp(less_maximum(s).astype(f16).astype(bf16))),
}  # fmt: skip


@pytest.mark.parametrize("name", CAST_AFTER_A_ROW)
def test_a_cast_that_follows_a_subtracted_row_is_not_moved_before_it(name):
    offset, weights = CAST_AFTER_A_ROW[name]
    compared = compare(lambda q, k, v: normalised(weights(far(q, k, offset)), v), bhtd(ODD, f32), dtype="bfloat16")
    assert compared.complaints == []
    assert compared.counts() == 1, compared.reasons()


def test_a_cast_to_float64_after_a_row_and_back():
    with jax.enable_x64(True):
        q, k, v = bhtd(ODD, f32)

        def attend(q, k, v):
            s = far(q, k, 3e7).astype(jnp.float64) + 1e7 * jnp.arange(k.shape[-2])
            return normalised(jnp.exp(less_maximum(s).astype(f32)), v)

        assert compare(attend, (q, k, v), dtype="float32").complaints == []


# ---------------------------------------------------------------------- casts of numbers of the row


def total(weights):
    return weights.sum(-1, keepdims=True)


ROUNDED_ROWS = {
    "maximum of the numerator alone": lambda s, m, b: (jnp.exp(s - m), total(jnp.exp(s - b))),
    "maximum of the denominator alone": lambda s, m, b: (jnp.exp(s - b), total(jnp.exp(s - m))),
    "floor that acts": lambda s, m, b: (jnp.exp(s - b), jnp.maximum(total(jnp.exp(s - b)), 0.999)),
    "factor": lambda s, m, b: (jnp.exp(s) * jnp.exp(-m), total(jnp.exp(s) * jnp.exp(-b))),
}


@pytest.mark.parametrize("dtype", [bf16, f16])
@pytest.mark.parametrize("name", ROUNDED_ROWS)
def test_a_rounded_number_of_the_row_is_not_the_number(name, dtype):
    def attend(q, k, v):
        s = q @ k.mT * 6
        m = jax.lax.stop_gradient(s.max(-1, keepdims=True))
        weights, denominator = ROUNDED_ROWS[name](s, m, rounded(m, dtype))
        return (weights / denominator) @ v

    args = bhtd(ODD, f32)
    given, expected = (compiled(with_gradients(f, args))(*args) for f in (optimized_like_a_user(attend), attend))
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)  # sums of a few float32 numbers in another order


def test_a_floor_that_acts_in_rows_without_keys_is_kept():
    """There the maximum is -inf, 0 is subtracted instead, the sum is 0, and the floor makes 0 of what were 0 / 0."""

    def attend(q, k, v):
        s = jnp.where(jnp.arange(k.shape[-2]) < jnp.arange(q.shape[-2])[:, None], q @ k.mT, -jnp.inf)
        m = s.max(-1, keepdims=True)
        p = jnp.exp(s - jnp.where(jnp.isfinite(m), m, 0))
        return (p / jnp.maximum(total(p), 1e-9)) @ v

    compared = compare(attend, bhtd(ODD, f32))
    assert compared.complaints == []


def test_equal_casts_of_a_number_of_the_row_cancel():
    def attend(q, k, v):
        s = q @ k.mT * 6
        m = rounded(s.max(-1, keepdims=True), bf16)
        return jnp.exp(s - m) @ v / jnp.exp(s - m).sum(-1, keepdims=True)

    compared = compare(attend, bhtd(ODD, f32))
    assert compared.complaints == []
    assert compared.counts() == 1, compared.reasons()


def test_products_that_are_cast_to_whole_numbers_are_no_contraction():
    def attend(q, k, v):
        s = (q[..., :, None, :] * k[..., None, :, :]).astype(jnp.int32).astype(f32).sum(-1)
        return jax.nn.softmax(s) @ v

    q, k, v = bhtd(ODD, f32)
    assert compare(attend, (q * 3, k, v)).complaints == []


# ---------------------------------------------------------------------- constants and fills of 64 bits


def test_integer_constants_beyond_those_that_floats_hold_are_exact():
    with jax.enable_x64(True):
        far_away = 2**53 + 1  # as a float it is 2 ** 53

        def attend(q, k, v):
            row, column = (jnp.arange(x.shape[-2], dtype=jnp.int64) for x in (q, k))
            shown = row[:, None] + far_away > column + 2**53
            return jax.nn.softmax(jnp.where(shown, q @ k.mT, -jnp.inf)) @ v

        compared = compare(attend, bhtd(ODD, f32))
        assert compared.complaints == []
        assert compared.counts() == 1, compared.reasons()


def test_a_quotient_of_integer_constants_is_exact():
    with jax.enable_x64(True):

        def attend(q, k, v):
            row, column = (jnp.arange(x.shape[-2], dtype=jnp.int64) for x in (q, k))
            least = jax.lax.div(jnp.int64(3 * (2**53 + 1)), jnp.int64(3)) - 2**53
            return jax.nn.softmax(jnp.where(row[:, None] + least > column, q @ k.mT, -jnp.inf)) @ v

        assert compare(attend, bhtd(ODD, f32)).complaints == []


@pytest.mark.parametrize("fill", [-250.0, -400.0, -2000.0])
def test_a_fill_before_a_cast_to_float64_counts_as_its_exponential_in_float64(fill):
    with jax.enable_x64(True):
        q, k, v = bhtd(ODD, f32)

        def attend(q, k, v):
            s = q @ k.mT
            hidden = jnp.arange(k.shape[-2]) >= jnp.arange(s.shape[-2])[:, None]  # all keys of the first row
            p = jnp.exp(jnp.where(hidden, fill, less_maximum(s)).astype(jnp.float64))
            return (p / p.sum(-1, keepdims=True)) @ v.astype(jnp.float64)

        compared = compare(attend, (q, k, v), dtype="float32")
        assert compared.complaints == []


# ---------------------------------------------------------------------- scores that are not shifted


def test_that_no_maximum_is_subtracted_is_an_assumption_of_the_site():
    def attend(q, k, v):
        return normalised(jnp.exp(q @ k.mT), v)

    args = bhtd(ODD, f32)
    (site,) = autopallas.explain(optimized_like_a_user(attend), *args).sites
    assert any("no maximum is subtracted" in assumption for assumption in site.assumptions)
    kept = autopallas.explain(optimized_like_a_user(attend, assume_finite=False), *args)
    assert kept.counts()["attention"] == 0
    assert any("no maximum is subtracted" in miss.reason for miss in kept.near_misses)


def test_the_same_of_logits():
    def loss(x, w, labels):
        z = x @ w
        return (jnp.log(jnp.exp(z).sum(-1)) - jnp.take_along_axis(z, labels[:, None], 1)[:, 0]).mean()

    args = jnp.ones((6, 4)), jnp.ones((4, 9)), jnp.zeros(6, jnp.int32)
    (site,) = autopallas.explain(optimized_like_a_user(loss), *args).sites
    assert any("no maximum is subtracted" in assumption for assumption in site.assumptions)
    assert autopallas.explain(optimized_like_a_user(loss, assume_finite=False), *args).counts()["cross_entropy"] == 0


HIDDEN_AFTERWARDS = {
    "by a selection": lambda s, m: jnp.where(m, jnp.exp(less_maximum(s)), 0),
    "by a factor": lambda s, m: jnp.exp(less_maximum(s)) * m.astype(s.dtype),
}


@pytest.mark.parametrize("name", HIDDEN_AFTERWARDS)
def test_that_keys_are_hidden_after_the_maximum_is_an_assumption_of_the_site(name):
    """Where a hidden key is far greater than the others, these vanish, and the original divides 0 by 0."""

    def attend(q, k, v):
        shown = jnp.arange(k.shape[-2]) <= jnp.arange(q.shape[-2])[:, None]
        return divided(HIDDEN_AFTERWARDS[name](q @ k.mT, shown)) @ v

    args = bhtd(ODD, f32)
    compared = compare(attend, args)
    assert compared.complaints == []
    assert compared.counts() == 1, compared.reasons()
    (site,) = autopallas.explain(optimized_like_a_user(attend), *args).sites
    assert any("after the maximum is subtracted" in assumption for assumption in site.assumptions)
    assert autopallas.explain(optimized_like_a_user(attend, assume_finite=False), *args).counts()["attention"] == 0


def test_equal_sites_that_assume_different_things_say_so():
    def both(q, k, v):
        return divided(jnp.exp(q @ k.mT)) @ v, jax.nn.softmax(k @ q.mT) @ q

    q, _, v = bhtd(ODD, f32)
    sites = autopallas.explain(optimized_like_a_user(both), q, q + 1, v[..., : q.shape[-2], :]).sites
    assert sorted(len(site.assumptions) for site in sites) == [0, 1]


SHIFTED = {
    "mask in softmax": lambda s: jax.nn.softmax(s, where=jnp.arange(s.shape[-1]) < 5),
    "mask before and after": lambda s: divided(
        jnp.where(jnp.arange(s.shape[-1]) < 5, jnp.exp(less_maximum(first_keys(s))), 0)
    ),
    "softmax": jax.nn.softmax,
    "log_softmax": lambda s: jnp.exp(jax.nn.log_softmax(s)),
    "logsumexp": lambda s: jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True)),
    "maximum in 16 bits": lambda s: jax.nn.softmax(s.astype(bf16)).astype(f32),
    "scaled": lambda s: divided(jnp.exp(less_maximum(s) * 0.3)),
}


@pytest.mark.parametrize("name", SHIFTED)
def test_a_subtracted_maximum_needs_no_assumption(name):
    args = bhtd(ODD, f32)
    report = autopallas.explain(
        optimized_like_a_user(lambda q, k, v: SHIFTED[name](q @ k.mT) @ v, assume_finite=False), *args
    )
    assert report.counts()["attention"] == 1, [miss.reason for miss in report.near_misses]
    assert report.sites[0].assumptions == ()


# ---------------------------------------------------------------------- losses


def logits_and_labels(vocabulary=300, rows=20, offset=0.0):
    numbers = np.random.default_rng(7)
    x = jnp.asarray(numbers.standard_normal((rows, 8)), f32)
    w = jnp.asarray(numbers.standard_normal((8, vocabulary)), f32)
    return x, w, jnp.asarray(numbers.integers(0, 100, (rows,)), jnp.int32)


def picked(z, labels):
    return jnp.take_along_axis(z, labels[:, None], 1)[:, 0]


LOSSES = {
    "cast after the maximum": lambda z, y: (lambda c: jnp.log(jnp.exp(c).sum(-1)) - picked(c, y))(
        less_maximum(z).astype(bf16).astype(f32)
    ),
    "cast after the maximum, summed in 16 bits": lambda z, y: (lambda c: jnp.log(jnp.exp(c).sum(-1)) - picked(c, y))(
        less_maximum(z).astype(bf16)
    ),
    "maximum of what was cast": lambda z, y: (
        lambda c: jax.nn.logsumexp(c, -1) - picked(c, y)
    )((z - z.mean(-1, keepdims=True)).astype(bf16)),
    "picked by a product in 16 bits": lambda z, y: (
        lambda c: jnp.log(jnp.exp(c).sum(-1)) - (c * jax.nn.one_hot(y, c.shape[-1], dtype=bf16)).sum(-1)
    )(less_maximum(z).astype(bf16)),
    "picked by a mask in 16 bits": lambda z, y: (
        lambda c: jnp.log(jnp.exp(c).sum(-1)) - jnp.where(jnp.arange(c.shape[-1]) == y[:, None], c, 0).sum(-1)
    )(less_maximum(z).astype(bf16)),
    "summed in 16 bits": lambda z, y: (
        lambda c: jnp.log(jnp.exp(c).sum(-1)) - 0.9 * picked(c, y) - 0.1 * c.mean(-1)
    )(less_maximum(z).astype(bf16)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_cast_that_follows_a_subtracted_row_of_logits(name):
    x, w, labels = logits_and_labels()
    compared = compare(lambda x, w: LOSSES[name](x @ w + 1000, labels).mean(), (x, w), dtype="bfloat16")
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1, compared.reasons()


def by_index(dtype, pick):
    return lambda p, y: jax.vmap(pick)(p, y.astype(dtype))


NARROW_LABELS = {
    "int8 labels by index": by_index(jnp.int8, lambda row, i: row[i]),
    "uint8 labels by index": by_index(jnp.uint8, lambda row, i: row[i]),
    "int8 labels, clipped": by_index(jnp.int8, lambda row, i: jnp.take(row, i, mode="clip")),
    "uint8 labels, filled": by_index(jnp.uint8, lambda row, i: row.at[i].get(mode="fill", fill_value=0.0)),
    "uint8 labels, promised": by_index(jnp.uint8, lambda row, i: row.at[i].get(mode="promise_in_bounds")),
    "int8 labels, sliced": by_index(jnp.int8, lambda row, i: jax.lax.dynamic_slice(row, (i,), (1,))[0]),
    "uint8 positions": lambda p, y: jnp.where(jnp.arange(p.shape[-1], dtype=jnp.uint8) == y[:, None], p, 0).sum(-1),
    "int8 positions and labels": lambda p, y: (
        p * (jnp.arange(p.shape[-1], dtype=jnp.int8) == y[:, None].astype(jnp.int8))
    ).sum(-1),
    "bfloat16 positions": lambda p, y: (
        p * (jnp.arange(p.shape[-1], dtype=bf16) == (y[:, None] + 200).astype(bf16))
    ).sum(-1),
    "float16 positions, cast to whole numbers": lambda p, y: (
        p * (jnp.arange(p.shape[-1], dtype=f16).astype(jnp.int32) == y[:, None])
    ).sum(-1),
}


@pytest.mark.parametrize("vocabulary", [300, 2100])
@pytest.mark.parametrize("name", NARROW_LABELS)
def test_labels_and_positions_of_narrow_types(name, vocabulary):
    x, w, labels = logits_and_labels(vocabulary)

    def loss(x, w, labels):
        return -NARROW_LABELS[name](jax.nn.log_softmax(x @ w), labels).mean()

    for function, gradients in ((loss, True), (jax.grad(loss, (0, 1)), False)):
        compared = compare(function, (x, w, labels), gradients, dtype="float32")
        assert compared.complaints == []
        assert compared.counts("cross_entropy") == 1, compared.reasons()


def test_rows_counted_in_a_type_that_does_not_hold_them():
    x, w, labels = logits_and_labels(9, rows=300)
    rows = jnp.arange(300, dtype=jnp.int32).astype(jnp.uint8)  # 256 is 0 again

    compared = compare(lambda x, w: -jax.nn.log_softmax(x @ w)[rows, labels % 9].mean(), (x, w))
    assert compared.complaints == []


def test_keys_counted_in_a_type_that_does_not_hold_them():
    q, k, v = bhtd(ODD, f32)
    k, v = (jnp.tile(x, (1, 1, 40, 1)) for x in (k, v))

    def attend(q, k, v):
        shown = jnp.arange(k.shape[-2]).astype(jnp.uint8) < 3  # and again after 256 keys
        return jax.nn.softmax(jnp.where(shown, q @ k.mT, -jnp.inf)) @ v

    assert k.shape[-2] > 256
    compared = compare(attend, (q, k, v))
    assert compared.complaints == []


def test_an_axis_without_elements_is_left_alone():
    x, w, labels = jnp.ones((6, 0)), jnp.ones((0, 9)), jnp.zeros(6, jnp.int32)

    def loss(x, w):
        return -picked(jax.nn.log_softmax(x @ w), labels).mean()

    optimized = optimized_like_a_user(jax.value_and_grad(loss, argnums=(0, 1)))
    np.testing.assert_allclose(jax.jit(optimized)(x, w)[0], np.log(9), rtol=1e-6)
    assert optimized.report().counts()["cross_entropy"] == 0


def test_a_mask_that_is_a_product_of_booleans():
    q, k, v = bhtd(ODD, f32)
    valid = jnp.arange(k.shape[-2]) < jnp.arange(2, 2 + k.shape[0])[:, None]
    shown = jnp.arange(q.shape[-2]) < jnp.arange(2, 2 + k.shape[0])[:, None]

    def attend(q, k, v):
        mask = jnp.einsum("bi,bj->bij", shown, valid)
        return jax.nn.softmax(jnp.where(mask[:, None], q @ k.mT, -1e9)) @ v

    compared = compare(attend, (q, k, v))
    assert compared.complaints == []
    assert compared.counts() == 1, compared.reasons()


# ---------------------------------------------------------------------- programs as long as one likes


def doubled_row(s):
    m = s.max(-1, keepdims=True)
    for _ in range(120):
        m = (m + m) * 0.5
    return s - m


def doubled_scores(s):
    s = less_maximum(s)
    for _ in range(120):
        s = (s + s) * 0.5
    return s


def long_row(s):
    m = s.max(-1, keepdims=True)
    for i in range(1500):
        m = m + 1e-6 * i
    return s - m


def long_scores(s):
    for i in range(1500):
        s = s + 1e-6 * i
    return less_maximum(s)


LONG = {f.__name__: f for f in (doubled_row, doubled_scores, long_row, long_scores)}


@pytest.mark.parametrize("name", LONG)
def test_what_is_read_does_not_grow_with_repetition(name):
    """Each of these took for ever, or more stack than there is."""
    args = bhtd(ODD, f32)
    report = autopallas.explain(
        optimized_like_a_user(lambda q, k, v: normalised(jnp.exp(LONG[name](q @ k.mT)), v)), *args
    )
    assert report.failures == ()
    x, w, labels = logits_and_labels(9)
    loss = lambda x, w: (jnp.log(jnp.exp(LONG[name](x @ w)).sum(-1)) - picked(LONG[name](x @ w), labels)).mean()  # noqa: E731
    assert autopallas.explain(optimized_like_a_user(jax.value_and_grad(loss)), x, w).failures == ()


# ---------------------------------------------------------------------- the rule itself


FLOATS = [jnp.dtype(name) for name in ("float16", "bfloat16", "float32", "float64")]


@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_a_cast_widens_exactly_if_every_value_comes_back(source, target):
    with jax.enable_x64(True):
        information = jnp.finfo(source)
        hard = [information.max, information.tiny, information.smallest_subnormal, 1 + float(information.eps)]
        values = np.asarray(hard, source)
        back = values.astype(target).astype(source)
    assert rounds(source, target)
    assert widens(source, target) == bool(np.array_equal(back, values))


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16", "float16", "bfloat16", "bool"])
def test_a_type_counts_exactly_as_far_as_numbers_differ(name):
    dtype = jnp.dtype(name)
    last = next(n for n in range(2**17) if not counts_exactly(dtype, n)) - 1 if counts_exactly(dtype, 1) else 0
    numbers = np.arange(max(0, last - 300), last + 1)
    assert np.array_equal(numbers.astype(dtype).astype(np.int64), numbers)
    assert int(np.asarray(last + 1).astype(dtype).astype(np.int64)) != last + 1 or name == "bool"


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "int32", "bool"])
def test_nothing_is_read_through_a_cast_to_a_quantised_or_whole_number(name):
    dtype = jnp.dtype(name)
    assert not rounds(jnp.dtype("float32"), dtype)
    assert not rounds(dtype, jnp.dtype("float32"))


@pytest.mark.parametrize("dtype", [bf16, f16])
def test_a_bound_that_a_function_rounds_is_the_number_that_it_becomes(dtype):
    """JAX casts the bounds of jnp.clip in a function of its own, and rounds them where it differentiates it anew."""
    x, w, u, out = (jnp.asarray(np.random.default_rng(i).standard_normal((16, 16)), dtype) for i in range(4))

    def clipped(x, w, u, out):
        return (jax.nn.silu(jnp.clip(x @ w, max=1.3)) * jnp.clip(x @ u, -0.7, 0.7)) @ out

    compared = compare(clipped, (x, w, u, out))
    assert compared.complaints == []
    assert compared.counts("gated_mlp") == 1
    optimized = optimized_like_a_user(with_gradients(clipped, (x, w, u, out)))
    optimized(x, w, u, out)
    found = [(site.op, site.direction) for site in optimized.report().sites if site.op != "respelling"]
    assert found == [("gated_mlp", "forward+backward")]


@pytest.mark.parametrize(
    ("number", "dtype"), [(1e-6, f16), (7e4, f16), (1e-39, bf16), (3.4028e38, bf16), (0.3, jnp.float8_e4m3fn)]
)
def test_a_number_that_devices_may_round_otherwise_stays_a_cast(number, dtype):
    """One that some flush to zero, one that overflows, and one that is rounded twice on some."""
    program = jax.make_jaxpr(lambda x: x + jax.jit(lambda n: n.astype(dtype).astype(f32))(number))(f32(1))
    assert any(node.name == "convert_element_type" for node in Graph(flatten(program)).nodes)


CAST_LITERALS = {
    "too large a fill": (lambda x: jax.nn.softmax(jnp.where(x @ x.T > 0, x @ x.T, -1e30)) @ x, f16),
    "an infinity to a whole number": (lambda x: x + jax.jit(lambda n: n.astype(jnp.int32))(jnp.inf), f32),
    "a number too large for a whole one": (lambda x: x + jax.jit(lambda n: n.astype(jnp.int8))(1e10), f32),
    "not a number to a whole one": (lambda x: x + jax.jit(lambda n: n.astype(jnp.int32))(jnp.nan), f32),
    "a real number to a complex one": (lambda x: x * jax.jit(lambda n: n.astype(jnp.complex64))(2.0), f32),
}


@pytest.mark.parametrize("name", CAST_LITERALS)
def test_a_literal_that_a_cast_changes_is_no_warning_and_stays_cast(name):
    """Numpy warns of such a cast, which the program does and JAX does not warn of."""
    function, dtype = CAST_LITERALS[name]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)), dtype)
    optimized = autopallas.optimize(lambda x: function(x), objective="always", strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given, expected = optimized(x), jax.jit(function)(x)
    np.testing.assert_allclose(*(np.asarray(y, np.complex128) for y in (given, expected)), rtol=5e-3)


def scores_of(a, b):
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=f32)


def attention_of_eight_bits(first, second, x):
    return jax.nn.softmax(scores_of(x.astype(first), x.astype(second))) @ x


def loss_of_eight_bits(first, second, x):
    logits = scores_of(x.astype(first), jnp.sin(x).astype(second))
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.diagonal(logits, 1).sum())


@pytest.mark.parametrize("function", [attention_of_eight_bits, loss_of_eight_bits])
@pytest.mark.parametrize("second", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float32"])
def test_operands_of_eight_bits_which_jax_promotes_to_no_other_type_are_left_alone(function, second):
    (x, *_) = bhtd(ODD, f32)
    step = jax.value_and_grad(lambda x: jnp.sum(function("float8_e4m3fn", second, x) ** 2))
    optimized = optimized_like_a_user(step)
    jax.tree.map(np.testing.assert_array_equal, optimized(x[0, 0]), jax.jit(step)(x[0, 0]))
    assert "floats of 8 bits" in str(optimized.report())


def test_a_maximum_that_is_rounded_otherwise_is_not_compared_with_logits():
    """What the forward makes of the maximum of float16 logits is rounded once, and bfloat16 logits that the backward
    makes of them twice: none may be equal to it, and the gradient of the maximum would be 0 / 0."""

    def loss(x, w):
        z = x @ w
        z = (z - z.mean(-1, keepdims=True)).astype(bf16)
        e = jnp.exp(z - z.max(-1, keepdims=True))
        return -jnp.log(e / e.sum(-1, keepdims=True) + 1e-9)[:, 3].astype(f32).sum()

    draw = np.random.default_rng(0)
    x, w = (jnp.asarray(draw.normal(size=size) * scale, f16) for size, scale in (((64, 8), 8), ((8, 40), 3)))
    optimized = optimized_like_a_user(jax.value_and_grad(jax.checkpoint(loss), (0, 1)))
    _, gradients = optimized(x, w)
    assert all(np.isfinite(np.float32(gradient)).all() for gradient in gradients)
    (miss,) = optimized.report().near_misses
    assert "rounded otherwise" in miss.reason
