"""Roundings to bfloat16 that a program takes back at once are left out, as XLA leaves them out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopallas
from autopallas.sites.elementwise import Constant, Score, Side, traced
from autopallas.sites.roundings import NARROW, WIDE, rounding_first, unrounded

SCORE = Score(NARROW)
SIDE = Side(0, NARROW)


def widened(function, *inputs, narrow=(SCORE,)):
    return unrounded(traced(function, *inputs), frozenset(narrow))


def test_a_cast_at_once_is_left_out():
    found = widened(lambda s: s.astype(jnp.float32) * 2, SCORE)
    assert found == traced(lambda s: s * 2, Score(WIDE))


def test_arithmetic_before_the_cast_is_computed_in_float32():
    found = widened(lambda s, b: jnp.tanh(s * 0.1 + b).astype(jnp.float32), SCORE, SIDE)
    assert {Score(WIDE), SIDE} <= {*found.inputs}
    assert {i.dtype for i in found.instructions} == {WIDE}
    score, bias = np.float32(3.1415927), jnp.asarray(0.75, NARROW)
    constant = float(jnp.asarray(0.1, NARROW))  # as the program has it
    want = np.tanh(np.float64(score) * constant + 0.75)
    assert abs(float(found.evaluate(score, None, None, [bias])) - want) < 1e-6
    assert Constant(constant, WIDE) in found.inputs


@pytest.mark.parametrize(
    "function",
    [
        lambda s: s,
        lambda s: s * 2,
        lambda s: jnp.where(s > 1, s.astype(jnp.float32), 0),
        lambda s: s.astype(jnp.float32) + s.astype(jnp.float16).astype(jnp.float32),
        lambda s: s.astype(jnp.float32) + s.astype(jnp.int32),
        lambda s: lax.reduce_precision(s, 8, 3).astype(jnp.float32),
        lambda s: jnp.floor(s).astype(jnp.float32),
    ],
    ids=["returned", "computed", "compared", "float16", "integer", "reduced", "floor"],
)
def test_what_reads_the_rounded_number_keeps_it_rounded(function):
    assert widened(function, SCORE) is None


def test_a_rounded_number_beside_the_cast_stays_rounded():
    """Its sum is rounded, and what is computed from that; the score itself is read in both ways."""
    assert widened(lambda s: s.astype(jnp.float32) + jnp.floor(s * 3).astype(jnp.float32), SCORE) is None
    found = widened(lambda s, b: s.astype(jnp.float32) + jnp.floor(b * 3).astype(jnp.float32), SCORE, SIDE)
    assert SIDE in found.inputs
    assert NARROW in {i.dtype for i in found.instructions}


def test_programs_of_other_inputs_are_the_same():
    program = traced(lambda b: b * 2, SIDE)
    assert unrounded(program, frozenset({SCORE})) == program


def test_a_rounding_first_is_kept_by_the_compiler():
    program = rounding_first(traced(lambda s: s.astype(jnp.float32), SCORE), frozenset({SCORE}))
    numbers = jax.random.normal(jax.random.key(0), (1000,))
    found = jax.jit(lambda x: program.evaluate(x, None, None, []))(numbers)
    assert program.inputs == (Score(WIDE),)
    np.testing.assert_array_equal(found, numbers.astype(jnp.bfloat16).astype(jnp.float32))


# ---------------------------------------------------------------------- programs

CAUSAL = np.tril(np.ones((128, 128), bool))


def scores(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k)


def wide(s):
    return s.astype(jnp.promote_types(s.dtype, jnp.float32))


FORMS = {
    "cast": lambda q, k: wide(scores(q, k)) * 0.125,
    "scaled": lambda q, k: wide(scores(q, k) * 0.125),
    "masked": lambda q, k: wide(jnp.where(CAUSAL, scores(q, k) * 0.125, jnp.asarray(-1e4, q.dtype))),
    "mask added": lambda q, k: wide(scores(q, k) * 0.125 + jnp.where(CAUSAL, 0, -1e9).astype(q.dtype)),
    "capped": lambda q, k: wide(20 * jnp.tanh(scores(q, k) * 0.125 / 20)),
    "two products": lambda q, k: wide(scores(q, k) * 0.125 + scores(k, q) * 0.01),
}


def off(found, oracle):
    """The largest error of several arrays, each relative to its largest number."""
    errors = [
        np.max(np.abs(np.asarray(x, np.float64) - np.asarray(y))) / np.max(np.abs(np.asarray(y)))
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(oracle), strict=True)
    ]
    return max(errors)


@pytest.mark.parametrize("form", FORMS)
def test_attention_of_large_scores_is_as_near_to_float64_as_the_original(form):
    """Scores of 30 are rounded by 0.06 in bfloat16, their exponentials by 6 %: these are left out."""

    def attend(q, k, v):
        weights = jax.nn.softmax(FORMS[form](q, k), axis=-1).astype(v.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.standard_normal((2, 128, 2, 64)) * s, NARROW) for s in (2.5, 2.5, 1))
    cotangent = random.standard_normal((2, 128, 2, 64))

    def step(q, k, v):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(jnp.asarray(cotangent, out.dtype))

    with jax.enable_x64(True):
        oracle = jax.tree.map(np.asarray, step(*(jnp.asarray(x, jnp.float64) for x in (q, k, v))))
    optimized = autopallas.optimize(step, objective="always", autotune=False)
    found = optimized(q, k, v)
    assert [site.verdict for site in optimized.report().sites] == ["applied"]
    # Probabilities, their gradients and results are rounded by 2^-9 of themselves each, in sums of 128.
    assert off(found, oracle) < 1.2e-2


@pytest.mark.parametrize("accuracy", [False, True])
def test_losses_that_multiply_log_probabilities_are_as_near_to_float64_as_the_original(accuracy):
    """A ratio of probabilities, as of policies, has the error of an exponential, and its gradient too."""

    def loss(h, w, labels, old):
        logits = wide(h @ w)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)[:, 0]
        right = jnp.argmax(logits, axis=-1) == labels
        return jnp.mean(jnp.exp(picked - old)), jnp.mean(right) if accuracy else picked

    random = np.random.default_rng(0)
    h = jnp.asarray(random.standard_normal((256, 128)), NARROW)
    w = jnp.asarray(0.5 * random.standard_normal((128, 1000)), NARROW)
    labels = jnp.asarray(random.integers(0, 1000, 256))
    step = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    with jax.enable_x64(True):
        exact = [jnp.asarray(x, jnp.float64) for x in (h, w)]
        logits = exact[0] @ exact[1]
        old = np.asarray(jax.nn.log_softmax(logits)[np.arange(256), labels] + random.standard_normal(256))
        oracle = jax.tree.map(np.asarray, step(*exact, labels, old))
    old = jnp.asarray(old, jnp.float32)
    optimized = autopallas.optimize(step, objective="always", autotune=False)
    (value, further), gradients = optimized(h, w, labels, old)
    assert [site.verdict for site in optimized.report().sites] == ["applied"]
    assert off(value, oracle[0][0]) < 1e-5
    assert off(gradients, oracle[1]) < 1.2e-2
    rounded = np.argmax(np.asarray(logits, np.float32).astype(NARROW).astype(np.float32), axis=-1)
    if accuracy:  # by the rounded logits, of which the first of equal ones is taken
        assert further == jnp.mean(rounded == labels)
    else:
        assert off(further, oracle[0][1]) < 1e-5


def test_the_greatest_logit_equals_the_one_that_is_picked_there():
    def right(h, w, labels):
        logits = wide(h @ w)
        picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
        greatest = jnp.max(logits, axis=-1)
        return picked == greatest, jax.nn.logsumexp(logits, axis=-1)

    random = np.random.default_rng(0)
    h = jnp.asarray(random.standard_normal((256, 128)), NARROW)
    w = jnp.asarray(random.standard_normal((128, 1000)), NARROW)
    labels = jnp.argmax(wide(h) @ wide(w), axis=-1)
    optimized = autopallas.optimize(right, objective="always", autotune=False)
    found, _ = optimized(h, w, labels)
    assert [site.verdict for site in optimized.report().sites] == ["applied"]
    assert np.all(found)


@pytest.mark.parametrize("form", ["temperature", "temperatures of rows", "own label"])
def test_passes_over_the_same_logits_round_them_alike(form):
    """A gradient with respect to a temperature reads the rounded logits, in a pass that also reads the logarithm of the
    sum that another one gives; a label may be an argmax, which rounded logits decide."""

    def loss(h, w, t, labels):
        logits = wide(h @ w / t) if form != "own label" else wide(h @ w)
        further = None
        if form == "own label":
            own = jnp.take_along_axis(logits, jnp.argmax(logits, axis=-1)[:, None], axis=-1)[:, 0]
            further = own == jnp.max(logits, axis=-1)
        picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - picked), further

    random = np.random.default_rng(0)
    h = jnp.asarray(random.standard_normal((256, 64)), NARROW)
    w = jnp.asarray(1.25 * random.standard_normal((64, 512)), NARROW)
    t = jnp.full((256, 1) if form == "temperatures of rows" else (), 0.7, NARROW)
    # Most rows' gradients are what is left of probabilities near 1 and the label's -1.
    labels = np.argmax(np.asarray(h, np.float64) @ np.asarray(w, np.float64), axis=-1)
    step = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    optimized = autopallas.optimize(step, objective="always", autotune=False)
    (_, further), _ = optimized(h, w, t, labels)
    assert {site.verdict for site in optimized.report().sites} == {"applied"}
    assert further is None or np.all(further)
    assert autopallas.verify(optimized, h, w, t, labels).ok
