"""Programs that the generator of random programs has found, each by what was wrong with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.catalogue import ODD, array, bhtd
from support.compare import compare, compiled, measured, optimized_like_a_user
from support.oracle import evaluate

import autopallas


@pytest.mark.parametrize("size", [1, 400])
def test_rows_without_keys_give_no_gradient_of_the_values(size):
    """With large scores the backward takes maxima and sums anew, and those of such a row are -inf and 0."""
    q, k, v = bhtd(ODD, jnp.float32)
    shown = (jnp.arange(q.shape[-2]) < 4)[:, None] & (jnp.arange(k.shape[-2]) < 6)

    def attend(q, k, v):
        return jax.nn.softmax(q @ k.mT * size, where=shown) @ v

    for gradients in (True, False):
        compared = compare(attend, (q, k, v), gradients)
        assert compared.complaints == []
        assert compared.counts() == 1, compared.reasons()


@pytest.mark.parametrize("values_first", [False, True])
def test_a_second_contraction_that_is_written_as_a_sum(values_first):
    q, k, v = (array(2, n, 5, seed=n) for n in (4, 6, 6))

    def attend(q, k, v):
        p, values = jax.nn.softmax(q @ k.mT)[..., None], v[:, None]
        return (values * p if values_first else p * values).sum(2)

    compared = compare(attend, (q, k, v))
    assert compared.complaints == []
    assert compared.counts() == 1, compared.reasons()


def test_a_factor_of_the_keys_in_both_branches_of_a_condition():
    """What the backward reads is not what the forward of the other branch reads: a site whose gradients are right, or
    none, and no exception."""
    weights = tuple(array(2, 4, 4, seed=n) for n in range(4))
    factor, table = array(5, seed=8), array(7, 4, seed=9)

    def loss(weights, factor, table, which):
        def layer(h, w):
            wq, wk, wv, wo = w
            q, k, v = ((h @ x).reshape(5, 2, 2) for x in (wq, wk, wv))
            p = jax.nn.softmax(jnp.einsum("tnd,snd->nts", q, k), -1) * factor
            return h + jnp.einsum("nts,sne->tne", p, v).reshape(5, 4) @ wo

        def model(tokens):
            first, second = ([w[i] for w in weights] for i in (0, 1))
            return layer(layer(table[tokens], first), second)

        return jnp.sin(jax.lax.cond(which, model, model, jnp.arange(5))).sum()

    gradient = jax.grad(loss, (0, 1, 2))
    for which in (True, False):
        arguments = weights, factor, table, jnp.array(which)
        optimized = optimized_like_a_user(gradient)
        given = compiled(optimized)(*arguments)
        true = evaluate(jax.make_jaxpr(gradient)(*arguments), *jax.tree.leaves(arguments))
        for error, _ in measured(given, jax.tree.unflatten(jax.tree.structure(given), true)):
            assert error < 5e-5
        assert autopallas.explain(optimized, *arguments).failures == ()


def test_probabilities_too_small_for_float32_in_a_loss_that_widens_its_logits():
    """exp(-200) is 0 in float32 and has a logarithm in float64."""
    with jax.enable_x64(True):
        x, w = (jnp.asarray(a, jnp.float32) for a in (array(5, 4, seed=1) * 100, array(4, 11, seed=2)))
        labels = jnp.arange(5) * 2

        def loss(x, w):
            z = x @ w
            shifted = (z - z.max(-1, keepdims=True)).astype(jnp.float64)
            p = jnp.exp(shifted) / jnp.exp(shifted).sum(-1, keepdims=True)
            return -jnp.take_along_axis(jnp.log(p), labels[:, None], -1).mean()

        step = jax.value_and_grad(loss, (0, 1))
        optimized = optimized_like_a_user(step)
        given, expected = jax.jit(optimized)(x, w), compiled(step)(x, w)
        assert optimized.report().counts()["cross_entropy"] == 1
        z = x @ w
        picked = jnp.take_along_axis(z, labels[:, None], -1)
        assert float(jnp.max(jnp.max(z, -1, keepdims=True) - picked)) > 110
        for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fill", [-1e30, -1e9, -np.inf])
@pytest.mark.parametrize("added", [False, True])
def test_a_logarithm_that_a_fill_swallows(fill, added):
    """In a row of nothing but -1e30, ``exp(s - logsumexp(s))`` is 1 everywhere, in float64 too."""
    q, k, v = (array(5, 4, seed=n) for n in range(3))
    shown = jnp.arange(5)[None] + 3 <= jnp.arange(5)[:, None]

    def attend(q, k, v):
        scores = q @ k.T
        scores = scores + jnp.where(shown, 0.0, fill) if added else jnp.where(shown, scores, fill)
        return jnp.exp(scores - jax.nn.logsumexp(scores, -1, keepdims=True)) @ v

    compared = compare(attend, (q, k, v))
    assert compared.complaints == []
    assert compared.counts() == 1, compared.reasons()


@pytest.mark.parametrize("offset", [1000.0, 1.0])
def test_a_cast_far_from_zero_acts(offset):
    """bfloat16 holds every fourth whole number at 1,000: what is left of the logits is no longer theirs."""
    x, w = array(5, 4, seed=1), array(4, 11, seed=2)
    labels = jnp.arange(5) * 2

    def loss(x, w):
        z = x @ w
        z = (z - z.max(-1, keepdims=True) + offset).astype(jnp.bfloat16).astype(jnp.float32)
        return (jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, labels[:, None], -1)[:, 0]).mean()

    optimized = optimized_like_a_user(loss)
    given, expected = float(jax.jit(optimized)(x, w)), float(compiled(loss)(x, w))
    assert optimized.report().counts()["cross_entropy"] == (offset < 100)
    assert abs(given - expected) < 1e-2


def test_a_maximum_beyond_the_range_of_float16_is_assumed_away():
    q, k, v = (array(5, 4, seed=n) for n in range(3))
    shown = jnp.arange(5)[:, None] > 1

    def attend(q, k, v):
        scores = jnp.where(shown, q @ k.T, -1e9)
        e = jnp.exp(scores - scores.max(-1, keepdims=True).astype(jnp.float16))
        return (e / e.sum(-1, keepdims=True)) @ v

    optimized = optimized_like_a_user(attend)
    given, expected = (compiled(f)(q, k, v) for f in (optimized, attend))
    np.testing.assert_allclose(given[2:], expected[2:], atol=1e-3)
    (site,) = optimized.report().sites
    assert site.assumptions
    strict = optimized_like_a_user(attend, assume_finite=False)
    np.testing.assert_array_equal(np.isnan(compiled(strict)(q, k, v)), np.isnan(expected))


def test_an_infinite_fill_is_nothing_that_a_sum_multiplies_with_zero():
    x, head = array(5, 4, seed=0), array(4, 11, seed=1)
    labels = jnp.array([7, 5, 8, 6, 0])

    def picked(x, head):
        z = x @ head
        z = jnp.where(jnp.arange(11) < 9, z - lax.stop_gradient(z.max(-1, keepdims=True)), -jnp.inf)
        return jax.nn.logsumexp(z, -1) - jnp.where(jnp.arange(11) == labels[:, None], z, 0.0).sum(-1)

    loss = lambda x, head: picked(x, head).mean()  # noqa: E731
    optimized = optimized_like_a_user(loss)
    np.testing.assert_allclose(compiled(optimized)(x, head), compiled(loss)(x, head), rtol=1e-5)
    assert optimized.report().counts()["cross_entropy"] == 1


def test_what_is_added_after_the_maximum_rounds_as_finely_as_it_is_small():
    q, k, v, bias = 1000 * array(5, 4, seed=0), array(5, 4, seed=1), array(5, 4, seed=2), array(5, 5, seed=3)

    def attend(q, k, v, bias):
        s = q @ k.T
        e = jnp.exp(s - s.max(-1, keepdims=True) + bias)
        return (e / (1.0 + e.sum(-1, keepdims=True))) @ v

    optimized = optimized_like_a_user(attend)
    np.testing.assert_allclose(compiled(optimized)(q, k, v, bias), compiled(attend)(q, k, v, bias), rtol=1e-5)


def test_rows_of_fills_that_do_not_cancel_round_as_in_the_program():
    q, k, v, factor = (array(*shape, seed=n) for n, shape in enumerate([(5, 4), (5, 4), (5, 4), (5,)]))
    keep = jnp.ones((5, 5), bool).at[2].set(False)

    def attend(q, k, v, factor):
        s = q @ k.T + (1.0 - keep.astype(jnp.float32)) * -1e9
        e = jnp.exp2(s - lax.stop_gradient(s.max(-1, keepdims=True))) * factor
        return (e / jnp.maximum(e.sum(-1, keepdims=True), 1e-9)) @ v

    optimized = optimized_like_a_user(attend)
    for sign in (1, -1):
        given, expected = (compiled(f)(q, k, v, sign * factor) for f in (optimized, attend))
        np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-5)


def test_scores_less_a_fill_keep_none_of_their_digits():
    q, k, v = (array(5, 4, seed=n) for n in range(3))

    def attend(q, k, v):
        s = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), q @ k.T, -2.0e38)
        return jax.nn.softmax(s - s.min(-1, keepdims=True), -1) @ v

    np.testing.assert_allclose(compiled(optimized_like_a_user(attend))(q, k, v), compiled(attend)(q, k, v), rtol=1e-5)


def test_a_guarded_row_whose_keys_are_hidden_after_the_maximum_stays_zero():
    q, k, v = (array(5, 4, seed=n) for n in range(3))
    segments = jnp.array([0, 0, 1, 0, 1])

    def attend(q, k, v):
        s = jnp.where(jnp.tril(jnp.ones((5, 5), bool), -1), q @ k.T, -1e9)
        s = s - s.max(-1, keepdims=True)
        e = jnp.exp(jnp.where(segments[:, None] == segments, s, -1e9))
        p = e / e.sum(-1, keepdims=True)
        return jnp.where(jnp.isnan(p), 0.0, p) @ v

    given, expected = (compiled(f)(q, k, v) for f in (optimized_like_a_user(attend), attend))
    assert not np.asarray(expected)[2].any()
    np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-6)


def test_a_maximum_that_a_cast_makes_infinite_is_not_multiplied_with_zero():
    q, k, v = (array(5, 4, seed=n) for n in range(3))
    keep = jnp.tril(jnp.ones((5, 5), bool)) & (jnp.arange(5)[:, None] != 1)

    def attend(q, k, v):
        s = jnp.where(keep, q @ k.T, jnp.finfo(jnp.float32).min)
        m = lax.stop_gradient(s.max(-1, keepdims=True)).astype(jnp.bfloat16).astype(jnp.float32)
        e = jnp.exp(jnp.where(keep, s - m, -1e9))
        return (e / jnp.maximum(e.sum(-1, keepdims=True), 1.0)) @ v

    given, expected = (compiled(f)(q, k, v) for f in (optimized_like_a_user(attend), attend))
    np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-6)


def test_what_is_computed_in_bfloat16_of_logits_is_rounded_everywhere():
    x, head, labels = 10 * array(7, 8, seed=0), array(8, 11, seed=1), jnp.array([3, 1, 4, 1, 5, 9, 2])

    def loss(x, head):
        z = (x @ head).astype(jnp.bfloat16) + 30.0
        return (jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, labels[:, None], -1)[:, 0]).mean()

    step = jax.value_and_grad(loss, (0, 1))
    optimized = optimized_like_a_user(step)
    given, expected = compiled(optimized)(x, head), compiled(step)(x, head)
    assert optimized.report().counts()["cross_entropy"] == 1
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2 * np.abs(b).max())


def test_sites_that_wait_for_each_other_are_not_both_replaced():
    """The router, read as a loss, gives the mixture its weights, and reads their cotangents from it."""
    x, up, down, router = array(7, 4), 0.5 * array(4, 4, 6), 0.5 * array(4, 6, 4), array(4, 4)
    chosen = jnp.arange(7)[:, None] % 4

    def mix(x, down):
        weights = jnp.take_along_axis(jax.nn.softmax(x @ router, -1), chosen, -1, mode="clip")
        hot = (chosen[..., None] == jnp.arange(4)).astype(jnp.float32)
        gates = jnp.einsum("tk,tke->te", weights, hot)
        return jnp.einsum("tef,efd,te->td", jax.nn.relu(jnp.einsum("td,edf->tef", x, up)), down, gates)

    step = jax.grad(lambda x, down: (mix(x, down) ** 2).sum(), (0, 1))

    def linear(x, down):
        out, pull = jax.vjp(mix, x, down)
        return out, *pull(jnp.cos(jnp.arange(28.0)).reshape(7, 4))

    for function in (step, linear):
        optimized = optimized_like_a_user(function)
        for a, b in zip(compiled(optimized)(x, down), compiled(function)(x, down), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        assert optimized.report().counts()["grouped_matmul"] == 1
        assert not optimized.report().failures


def test_a_mixture_in_a_loop_over_rows_is_one_site():
    """From outside, the loop that counts its steps looks like a loop over experts."""
    x, up, down, router = array(3, 7, 4), 0.5 * array(3, 4, 4, 6), 0.5 * array(3, 4, 6, 4), array(4, 4)

    def mix(x, up, down):
        weights, chosen = lax.top_k(jax.nn.softmax(x @ router, -1), 2)
        gates = ((chosen[..., None] == jnp.arange(4)).astype(jnp.float32) * weights[..., None]).sum(1)
        return jnp.einsum("tef,efd,te->td", jax.nn.relu(jnp.einsum("td,edf->tef", x, up)), down, gates)

    def rows(x, up, down):
        return lax.scan(lambda n, row: (n + 1, mix(*row)), 0, (x, up, down))[1]

    step = jax.value_and_grad(lambda *a: jnp.sin(rows(*a)).sum(), (0, 1, 2))
    for function in (rows, step):
        optimized = optimized_like_a_user(function)
        given, expected = compiled(optimized)(x, up, down), compiled(function)(x, up, down)
        for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        assert optimized.report().counts()["grouped_matmul"] == 1
        assert not optimized.report().near_misses


GUARDS = {
    "zero": lambda total: jnp.where(total == 0, 1.0, total),
    "floor": lambda total: jnp.maximum(total, 1e-9),
    "epsilon": lambda total: total + 1e-9,
}
"""What keeps a row without keys from a division by zero."""


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("fills", [(-jnp.inf, -jnp.inf), (-jnp.inf, -1e9), (-1e9, -jnp.inf)])
@pytest.mark.parametrize("guard", GUARDS)
def test_a_mask_over_the_difference_hides_a_maximum_that_is_infinite(guard, fills, dtype):
    """In a row without keys ``s - max(s)`` is no number, and its mask makes it one."""
    q, k, v = (array(5, 4, seed=n) for n in range(3))
    rows, keys = jnp.arange(5)[:, None], jnp.arange(5)
    shown = (keys <= rows) & (rows != 1)

    def attend(q, k, v):
        s = jnp.where(shown, q @ k.T, fills[0]).astype(dtype)
        e = jnp.exp(jnp.where(shown, s - lax.stop_gradient(s.max(-1, keepdims=True)), fills[1]))
        return (e / GUARDS[guard](e.sum(-1, keepdims=True))) @ v

    step = jax.value_and_grad(lambda *a: jnp.sin(attend(*a)).sum(), (0, 1, 2))
    for function in (attend, step):
        optimized = optimized_like_a_user(function)
        given, expected = compiled(optimized)(q, k, v), compiled(function)(q, k, v)
        tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
        for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
        if dtype == jnp.float32 or guard == "epsilon":
            assert optimized.report().counts()["attention"] == 1


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("guard", GUARDS)
def test_a_row_of_masked_logits_has_a_sum_of_zero(guard, after):
    x, head = array(5, 4, seed=0), array(4, 7, seed=1)
    rows, tokens = jnp.arange(5)[:, None], jnp.arange(7)
    shown = (tokens <= rows) & (rows != 1)

    def entropy(x, head):
        z = jnp.where(shown, x @ head, -jnp.inf)
        greatest = lax.stop_gradient(z.max(-1, keepdims=True))
        masked = jnp.where(shown, jnp.exp(z - greatest), 0.0), jnp.exp(jnp.where(shown, z - greatest, -jnp.inf))
        e = masked[0] if after else masked[1]
        return jnp.log(GUARDS[guard](e.sum(-1)))

    optimized = optimized_like_a_user(entropy)
    np.testing.assert_allclose(compiled(optimized)(x, head), compiled(entropy)(x, head), rtol=1e-5, atol=1e-6)
    assert optimized.report().counts()["cross_entropy"] == 1


def test_a_contraction_with_one_hot_labels_says_what_it_assumes():
    """An element by element product is a selection for XLA: zero times an infinity is zero then, and not NaN."""
    x, head, labels = array(5, 4, seed=0), array(4, 11, seed=1), jnp.array([3, 1, 4, 1, 5])

    def loss(x, head):
        log_p = jnp.log(jax.nn.softmax((x @ head).astype(jnp.float16) * 2))
        return -jnp.einsum("tv,tv->t", log_p, jax.nn.one_hot(labels, 11)).mean()

    report = autopallas.explain(autopallas.optimize(loss, objective="always"), x, head)
    assert report.counts()["cross_entropy"] == 1
    assert any("one-hot" in assumption for site in report.sites for assumption in site.assumptions)
    doubtful = autopallas.optimize(loss, objective="always", assume_finite=False)
    assert autopallas.explain(doubtful, x, head).counts()["cross_entropy"] == 0


@pytest.mark.parametrize("reduce", [jnp.min, jnp.mean])
def test_a_number_of_the_row_that_a_mask_makes_infinite_does_not_cancel(reduce):
    q, k, v = (array(5, 4, seed=n) for n in range(3))

    def attend(q, k, v):
        s = jnp.where(jnp.tri(5, dtype=bool), q @ k.T, -jnp.inf)
        return jax.nn.softmax(s - reduce(s, -1, keepdims=True)) @ v

    optimized = optimized_like_a_user(attend)
    np.testing.assert_array_equal(np.isnan(optimized(q, k, v)), np.isnan(attend(q, k, v)))


@pytest.mark.parametrize(("fill", "dtype"), [(-1e9, jnp.float16), (float(jnp.finfo(jnp.float32).min), jnp.bfloat16)])
def test_a_maximum_that_a_cast_makes_infinite_does_not_cancel_under_a_guard(fill, dtype):
    """A row of nothing but the fill is infinite then: NaN behind the softmax, which the guard makes 0."""
    q, k, v = (array(5, 4, seed=n) for n in range(3))
    valid = jnp.array([True, True, False, True, False])

    def attend(q, k, v):
        s = jnp.where(valid[:, None] & valid, q @ k.T, fill)
        p = jax.nn.softmax(s - s.max(-1, keepdims=True).astype(dtype), -1)
        return jnp.where(jnp.isnan(p), 0.0, p) @ v

    np.testing.assert_allclose(optimized_like_a_user(attend)(q, k, v), attend(q, k, v), rtol=1e-5, atol=1e-6)


def test_a_gradient_divided_by_a_probability_that_vanishes_is_assumed_away():
    """Of ``log(softmax(z))``: 0 / 0 beside the label, where a padded vocabulary has a probability of exactly 0."""
    x, head, labels = array(5, 4, seed=0), array(4, 11, seed=1), jnp.array([3, 1, 4, 1, 5])

    def loss(x, head):
        z = jnp.where(jnp.arange(11) < 9, x @ head, -1e9)
        p = jax.nn.softmax(z)
        return -jnp.take_along_axis(jnp.log(p), labels[:, None], -1).mean()

    step = jax.grad(loss)
    report = autopallas.explain(autopallas.optimize(step, objective="always"), x, head)
    assert any("vanishes" in assumption for site in report.sites for assumption in site.assumptions)
    exact = autopallas.optimize(step, objective="always", assume_finite=False)
    np.testing.assert_array_equal(np.isnan(exact(x, head)), np.isnan(step(x, head)))


ADDED_BEHIND = {
    "replaced": lambda s, keep: jnp.where(keep, s, -1e9),
    "added": lambda s, keep: s + jnp.where(keep, 0, -1e9),
    "multiplied": lambda s, keep: s + (1 - keep) * -1e9,
    "given": lambda s, keep: s + MASK,
}
MASK = jnp.where(jnp.tri(5, k=-1, dtype=bool), 0, -1e9)
"""Hides all keys of the first row."""


@pytest.mark.parametrize("masked", ADDED_BEHIND)
@pytest.mark.parametrize("subtract", ["maximum", "logsumexp"])
def test_what_is_added_behind_the_maximum_of_a_fill_keeps_its_digits(masked, subtract):
    """In a row of nothing but the fill what is left is 0, to which a bias of 0.5 is added; to the fill it is lost."""
    q, k, v, bias = (array(5, 5, seed=n) for n in range(4))

    def attend(q, k, v, mask):
        s = ADDED_BEHIND[masked](q @ k.T, jnp.tri(5, k=-1, dtype=bool))
        s = s if masked != "given" else q @ k.T + mask
        row = s.max(-1, keepdims=True) if subtract == "maximum" else jax.nn.logsumexp(s, -1, keepdims=True)
        return jax.nn.softmax(s - row + bias, -1) @ v

    optimized = optimized_like_a_user(attend, ops=("attention",))
    np.testing.assert_allclose(optimized(q, k, v, MASK), attend(q, k, v, MASK), rtol=1e-5, atol=1e-6)
    if subtract == "maximum":
        (miss,) = optimized.report().near_misses
        assert "after their maximum is subtracted" in miss.reason


def test_what_is_added_behind_the_maximum_of_plain_scores_is_part_of_the_site():
    q, k, v, bias = (array(5, 5, seed=n) for n in range(4))

    def attend(q, k, v):
        s = q @ k.T
        return jax.nn.softmax(s - s.max(-1, keepdims=True) + bias, -1) @ v

    optimized = optimized_like_a_user(attend)
    np.testing.assert_allclose(optimized(q, k, v), attend(q, k, v), rtol=1e-5, atol=1e-6)
    assert optimized.report().counts()["attention"] == 1


def test_a_bias_in_float64_is_added_in_float64():
    """The sum of 1,000 and a score has fewer digits in float32, in which kernels compute."""
    with jax.enable_x64(True):
        q, k, v = (array(5, 4, seed=n) for n in range(3))
        bias = 1000 * jnp.asarray(array(5, 5, seed=3), jnp.float64)
        labels = jnp.arange(5)

        def attend(q, k, v, bias):
            return jax.nn.softmax(q @ k.T + bias, -1) @ v

        def loss(x, head, _, bias):
            z = x @ head.T + bias
            return (jax.nn.logsumexp(z, -1) - z[jnp.arange(5), labels]).mean()

        for program in (attend, loss):
            optimized = optimized_like_a_user(program)
            np.testing.assert_allclose(optimized(q, k, v, bias), program(q, k, v, bias), rtol=1e-9, atol=1e-9)
            assert any("float64" in miss.reason for miss in optimized.report().near_misses)


def test_a_maximum_that_is_rounded_says_what_it_assumes():
    """Of 100,000 bfloat16 may lose more than 88: the exponential of what is left overflows."""
    q, k, v = (array(5, 4, seed=n) for n in range(3))

    def attend(q, k, v):
        s = q @ k.T
        e = jnp.exp(s - s.max(-1, keepdims=True).astype(jnp.bfloat16))
        return e / e.sum(-1, keepdims=True) @ v

    assert not np.isfinite(attend(q, k * 1e6, v)).all()
    report = autopallas.explain(autopallas.optimize(attend, objective="always"), q, k, v)
    assert any("rounded" in assumption for site in report.sites for assumption in site.assumptions)
    exact = autopallas.optimize(attend, objective="always", assume_finite=False)
    np.testing.assert_array_equal(np.isnan(exact(q, k * 1e6, v)), np.isnan(attend(q, k * 1e6, v)))


def test_a_floor_in_float64_under_a_sum_that_weights_make_negative():
    """What is divided by the floor has no place in float32, in which kernels compute."""
    with jax.enable_x64(True):
        q, k, v, weights = (array(5, 4, seed=n) for n in range(4))
        weights = -jnp.abs(weights[:, 0])

        def attend(q, k, v, weights):
            e = jnp.exp(jnp.clip(q @ k.T * 20.0, -80.0, 80.0)) * weights
            return e / jnp.maximum(e @ jnp.ones((5, 1)), 1e-9) @ v

        optimized = optimized_like_a_user(attend)
        np.testing.assert_allclose(optimized(q, k, v, weights), attend(q, k, v, weights), rtol=1e-5)


@pytest.mark.parametrize("subtract", [lambda s: 0.0, lambda s: s.min(-1, keepdims=True)], ids=["nothing", "minimum"])
def test_a_denominator_that_a_cast_makes_infinite_divides_to_zero(subtract):
    q, k, v = (array(5, 4, seed=n) for n in range(3))

    def attend(q, k, v):
        s = 20.0 * (q @ k.T)
        e = jnp.exp(s - subtract(s))
        return e / e.sum(-1, keepdims=True).astype(jnp.float16) @ v

    optimized = optimized_like_a_user(attend)
    np.testing.assert_allclose(optimized(q, k, v), attend(q, k, v), rtol=1e-5, atol=1e-6)
    (miss,) = optimized.report().near_misses
    assert "denominator is cast to float16" in miss.reason


SCALED_BEHIND = {
    "base two": lambda s: jnp.exp2(s - s.max(-1, keepdims=True)),
    "temperature": lambda s: jnp.exp((s - s.max(-1, keepdims=True)) * 0.7),
    "divided": lambda s: jnp.exp((s - s.max(-1, keepdims=True)) / 3),
    "masked": lambda s: jnp.exp2(jnp.where(jnp.tri(7, 9, dtype=bool), s, -jnp.inf) - s.max(-1, keepdims=True)),
}
AS_EXACT = {
    "a power of two": lambda s: jnp.exp((s - s.max(-1, keepdims=True)) * 0.25),
    "scaled before": lambda s: jnp.exp2(s * 0.7 - (s * 0.7).max(-1, keepdims=True)),
    "nothing": lambda s: jnp.exp(s - s.max(-1, keepdims=True)),
}


@pytest.mark.parametrize("cast", [True, False], ids=["operands cast", "product promotes"])
@pytest.mark.parametrize("spelling", SCALED_BEHIND | AS_EXACT)
def test_a_scale_behind_the_maximum_of_exact_scores_is_refused(spelling, cast):
    """Products of 16-bit numbers are exact in float32, and so is what is left beside their maximum; the scale rounds
    that alone.  A kernel that scales scores of 3,600 rounds these."""
    q = jnp.asarray(30 + array(7, 4, seed=0), jnp.float16)
    k = jnp.asarray(30 + array(9, 4, seed=1), jnp.bfloat16)
    v = jnp.asarray(array(9, 5, seed=2))

    def attend(q, k, v):
        q, k = (q.astype(jnp.float32), k.astype(jnp.float32)) if cast else (q, k)
        e = (SCALED_BEHIND | AS_EXACT)[spelling](jnp.einsum("td,sd->ts", q, k, preferred_element_type=jnp.float32))
        return jnp.einsum("ts,se->te", e / e.sum(-1, keepdims=True), v)

    optimized = optimized_like_a_user(attend, ops=("attention",))
    atol = 1e-4 if spelling == "scaled before" else 1e-5  # the program rounds the product of 3,600 and the scale
    np.testing.assert_allclose(optimized(q, k, v), attend(q, k, v), rtol=1e-5, atol=atol)
    report = optimized.report()
    assert report.counts()["attention"] == (spelling in AS_EXACT)
    assert all("scaled after their maximum" in miss.reason for miss in report.near_misses)


@pytest.mark.parametrize("spelling", SCALED_BEHIND)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_scale_behind_the_maximum_is_part_of_a_site_whose_rounding_hides_it(spelling, dtype):
    q, k, v = (jnp.asarray(array(n, 4, seed=n), dtype) for n in (7, 9, 9))

    def attend(q, k, v):
        e = SCALED_BEHIND[spelling](jnp.einsum("td,sd->ts", q, k, preferred_element_type=jnp.float32))
        return jnp.einsum("ts,se->te", (e / e.sum(-1, keepdims=True)).astype(dtype), v)

    optimized = optimized_like_a_user(attend, ops=("attention",))
    found, expected = (np.asarray(f(q, k, v), np.float32) for f in (optimized, attend))
    np.testing.assert_allclose(found, expected, atol=1e-5 if dtype == np.float32 else 2e-2)
    assert optimized.report().counts()["attention"] == 1


ONE_HOT = {
    "einsum": lambda z, hot: jnp.einsum("tv,tv->t", z, hot),
    "product": lambda z, hot: (z * hot).sum(-1),
    "factor first": lambda z, hot: (hot * z).sum(-1),
    "negated": lambda z, hot: -(-z * hot).sum(-1),
    "dot of each": lambda z, hot: jax.vmap(jnp.dot)(z, hot),
    "log_softmax": lambda z, hot: jax.nn.logsumexp(z, -1) + (jax.nn.log_softmax(z) * hot).sum(-1),
}


@pytest.mark.parametrize("spelling", ONE_HOT)
def test_one_hot_labels_beside_classes_that_are_masked_with_infinity(spelling):
    """Compiled, a product with a truth value of its shape selects: 0 times infinity is 0 there, and so it is here."""
    x, head, labels = array(5, 4, seed=0), array(4, 11, seed=1), jnp.array([0, 3, 8, 2, 5])

    def loss(x, head, labels):
        z = jnp.where(jnp.arange(11) < 9, x @ head, -jnp.inf)
        return (jax.nn.logsumexp(z, -1) - ONE_HOT[spelling](z, jax.nn.one_hot(labels, 11))).mean()

    for program in (loss, jax.value_and_grad(loss)):
        optimized = optimized_like_a_user(program, ops=("cross_entropy",))
        for found, expected in zip(
            jax.tree.leaves(optimized(x, head, labels)), jax.tree.leaves(jax.jit(program)(x, head, labels)), strict=True
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
            assert np.isfinite(expected).all()
        assert optimized.report().counts()["cross_entropy"] == 1


@pytest.mark.parametrize("shape", [(5, 1), (1, 11)], ids=["of rows", "of classes"])
def test_a_truth_value_of_another_shape_multiplies_infinity_to_nan_as_compiled(shape):
    x, head, labels = array(5, 4, seed=0), array(4, 11, seed=1), jnp.array([0, 3, 8, 2, 10])
    counted = (jnp.arange(max(shape)) < 4).reshape(shape)

    def loss(x, head, labels, counted):
        z = jnp.where(jnp.arange(11) < 9, x @ head, -jnp.inf)
        hot = jnp.where(jax.nn.one_hot(labels, 11, dtype=bool), z * counted.astype(z.dtype), 0)
        return (jax.nn.logsumexp(z, -1) - hot.sum(-1)).mean()

    optimized = optimized_like_a_user(loss, ops=("cross_entropy",))
    found, expected = optimized(x, head, labels, counted), jax.jit(loss)(x, head, labels, counted)
    assert np.isnan(expected)
    assert np.isnan(found)
    assert optimized.report().counts()["cross_entropy"] == 1
