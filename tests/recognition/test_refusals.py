"""What looks like attention and is not, or cannot be replaced: left alone, with the reason and the line, and exact."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.nn import softmax
from support.catalogue import ODD, array, bhtd, registry
from support.compare import compare, compiled, floats, optimized_like_a_user, with_gradients

import autopallas

REFUSALS = {}
UNRELATED, unrelated = registry()
"""Programs without any softmax attention in them."""


def refused(reason, extra=(), inputs=None):
    """Enters a program that must be a near miss.  ``reason`` is what the report must say, in part."""

    def enter(function):
        REFUSALS[function.__name__] = (function, reason, extra, inputs)
        return function

    return enter


def attend(q, k, v):
    return softmax(q @ k.mT) @ v


# --- Escapes ---------------------------------------------------------------------------------------------------------


@refused("scores or probabilities are also returned")
def probabilities_returned(q, k, v):
    p = softmax(q @ k.mT)
    return p @ v, p


@refused("the values, or their sums, are of dtype complex64")
def complex_values(q, k, v):
    o = softmax(q @ k.mT) @ lax.complex(v, 2 * v)
    return o.real, o.imag


@refused("the values, or their sums, are of dtype complex64")
def real_part_of_complex_values(q, k, v):
    return (softmax(q @ k.mT) @ lax.complex(v, 2 * v)).real


@refused("scores or probabilities are also returned")
def scores_returned(q, k, v):
    s = q @ k.mT
    return softmax(s) @ v, s


@refused("scores or probabilities are also used by")
def entropy_of_the_probabilities(q, k, v):
    p = softmax(q @ k.mT)
    return p @ v, -jnp.sum(p * jnp.log(p + 1e-9))


@refused("scores or probabilities are also used by")
def regularised_scores(q, k, v):
    s = q @ k.mT
    return softmax(s) @ v, jnp.sum(jnp.tanh(s) ** 2)


@refused("scores or probabilities are also used by")
def probabilities_averaged_over_queries(q, k, v):
    p = softmax(q @ k.mT)
    return p @ v, p.mean(2)


@refused("row statistics are also")
def normaliser_returned(q, k, v):
    s = q @ k.mT
    lse = jax.nn.logsumexp(s, -1, keepdims=True)
    return jnp.exp(s - lse) @ v, lse


@refused("row statistics are also")
def maximum_used_elsewhere(q, k, v):
    s = q @ k.mT
    m = s.max(-1, keepdims=True)
    e = jnp.exp(s - m)
    return (e / e.sum(-1, keepdims=True)) @ v * jax.nn.sigmoid(m)


@refused("scores or probabilities are also", inputs=lambda: bhtd(ODD._replace(keys=ODD.queries), jnp.float32))
def probabilities_carried_by_a_scan(q, k, v):
    def step(previous, _):
        p = softmax(q @ k.mT + previous)
        return p, p @ v

    return lax.scan(step, jnp.zeros((*q.shape[:-1], k.shape[-2])), None, length=2)


# --- Another function ------------------------------------------------------------------------------------------------


@refused("another axis")
def softmax_over_the_queries(q, k, v):
    return softmax(q @ k.mT, axis=-2) @ v


@refused("another axis")
def softmax_over_the_heads(q, k, v):
    return softmax(q @ k.mT, axis=1) @ v


@refused("more than the keys")
def softmax_over_queries_and_keys(q, k, v):
    return softmax(q @ k.mT, axis=(-2, -1)) @ v


@refused("")
def softmax_twice(q, k, v):
    return softmax(softmax(q @ k.mT)) @ v


@refused("")
def normaliser_of_other_scores(q, k, v):
    s = q @ k.mT
    return (jnp.exp(s) / jnp.exp(2 * s).sum(-1, keepdims=True)) @ v


@refused("another axis")
def normaliser_of_half_the_scores(q, k, v):
    e = jnp.exp(q @ k.mT)
    return (e / e[..., ::2].sum(-1, keepdims=True)) @ v


@refused("")
def normaliser_under_a_root(q, k, v):
    e = jnp.exp(q @ k.mT)
    return (e / jnp.sqrt(e.sum(-1, keepdims=True) * e.mean((-1, -2), keepdims=True))) @ v


@refused("")
def nothing_normalises(q, k, v):
    return jnp.exp(q @ k.mT) @ v


@refused("")
def norm_instead_of_sum(q, k, v):
    e = jnp.exp(q @ k.mT * 0.3)
    return (e / jnp.linalg.norm(e, axis=-1, keepdims=True)) @ v


@refused("a mask on the probabilities depends on the scores")
def small_probabilities_dropped(q, k, v):
    p = softmax(q @ k.mT)
    return jnp.where(p > 0.1, p, 0) @ v


@refused("")
def probabilities_to_a_power(q, k, v):
    return (softmax(q @ k.mT) ** 2) @ v


@refused("")
def probabilities_renormalised_after_an_offset(q, k, v):
    p = softmax(q @ k.mT) + 0.01
    return (p / p.sum(-1, keepdims=True)) @ v


@refused("")
def clipped_after_the_maximum(q, k, v):
    s = q @ k.mT
    e = jnp.exp(jnp.clip(s - s.max(-1, keepdims=True), -1.0, 0.0))
    return (e / e.sum(-1, keepdims=True)) @ v


@refused("the scores of several heads are mixed before the softmax", extra=lambda: [array(ODD.heads, ODD.heads)])
def heads_mixed_before_the_softmax(q, k, v, mix):
    return softmax(jnp.einsum("bhts,hg->bgts", q @ k.mT, mix)) @ v


@refused("", extra=lambda: [array(ODD.heads, ODD.heads)])
def heads_mixed_after_the_softmax(q, k, v, mix):
    return jnp.einsum("bhts,hg->bgts", softmax(q @ k.mT), mix) @ v


@refused("")
def values_computed_from_the_scores(q, k, v):
    s = q @ k.mT
    return softmax(s) @ (v * s.mean(-2)[..., None])


@refused("", inputs=lambda: [array(2, 3, 7, 5), array(2, 3, 7, 5, seed=1), array(2, 3, 7, 7, 5)])
def values_that_depend_on_the_query(q, k, v):
    return jnp.einsum("bhts,bhtsd->bhtd", softmax(q @ k.mT), v)


@refused("", inputs=lambda: [array(2, 3, 6, 5), array(2, 3, 6, 5, seed=1), array(2, 6, 3, 5)])
def values_contracted_over_heads_too(q, k, v):
    return jnp.einsum("bhts,bshd->btd", softmax(q @ k.mT), v)


@refused("")
def gradient_stopped_at_the_probabilities(q, k, v):
    return lax.stop_gradient(softmax(q @ k.mT)) @ v


@refused("")
def gradient_stopped_at_the_scores_of_the_numerator(q, k, v):
    s = q @ k.mT * 0.3
    return (jnp.exp(lax.stop_gradient(s)) / jnp.exp(s).sum(-1, keepdims=True)) @ v


@refused("")
def straight_through_hard_attention(q, k, v):
    p = softmax(q @ k.mT)
    hard = jax.nn.one_hot(p.argmax(-1), p.shape[-1])
    return (p + lax.stop_gradient(hard - p)) @ v


@refused("")
def integer_scores(q, k, v):
    s = jnp.einsum("bhtd,bhsd->bhts", (q * 3).astype(jnp.int32), (k * 3).astype(jnp.int32))
    return softmax(s.astype(jnp.float32)) @ v


@refused("")
def probabilities_rounded_to_eight_bits(q, k, v):
    return softmax(q @ k.mT).astype(jnp.float8_e4m3fn).astype(jnp.float32) @ v


# --- A few keys of each query ----------------------------------------------------------------------------------------


def retrieval():
    return [array(7, 5), array(11, 5, seed=1), array(11, 5, seed=2)]


@refused("keys that top_k chose", inputs=retrieval)
def chosen_keys(q, k, v):
    scores, numbers = lax.top_k(q @ k.T, 3)
    return jnp.einsum("qk,qkd->qd", softmax(scores), v[numbers])


@refused("keys that top_k chose", inputs=retrieval)
def nearest_keys_divided_at_the_end(q, k, v):
    near, numbers = lax.top_k(-jnp.sum((q[:, None] - k) ** 2, -1), 3)
    e = jnp.exp(near - near.max(-1, keepdims=True))
    return jnp.sum(e[..., None] * jnp.take(v, numbers, axis=0), 1) / e.sum(-1, keepdims=True)


SENDERS = np.random.default_rng(0).integers(0, 7, 30)
RECEIVERS = np.random.default_rng(1).integers(0, 7, 30)


def nodes():
    return [array(7, 5), array(7, 5, seed=1), array(7, 4, seed=2)]


@refused("the edges of each node", inputs=nodes)
def edges_of_a_graph(q, k, v):
    s = jnp.sum(q[RECEIVERS] * k[SENDERS], -1)
    e = jnp.exp(s - jax.ops.segment_max(s, RECEIVERS, 7)[RECEIVERS])
    p = e / jax.ops.segment_sum(e, RECEIVERS, 7)[RECEIVERS]
    return jax.ops.segment_sum(p[:, None] * v[SENDERS], RECEIVERS, 7)


@refused("the edges of each node", inputs=nodes)
def edges_of_a_graph_divided_at_the_end(q, k, v):
    s = jax.nn.leaky_relu((q @ k[0])[SENDERS] + k.sum(-1)[RECEIVERS])
    e = jnp.exp(s - jax.ops.segment_max(s, RECEIVERS, 7)[RECEIVERS])
    total = jax.ops.segment_sum(e, RECEIVERS, 7)
    return jax.ops.segment_sum(e[:, None] * v[SENDERS], RECEIVERS, 7) / (total + 1e-9)[:, None]


# --- Reductions over the keys, randomness, effects -------------------------------------------------------------------


@refused("")
def only_the_largest_scores(q, k, v):
    s = q @ k.mT
    least = lax.top_k(s, 3)[0][..., -1:]
    return softmax(jnp.where(s >= least, s, -jnp.inf)) @ v


@refused("")
def only_scores_near_the_maximum(q, k, v):
    s = q @ k.mT
    return softmax(jnp.where(s > s.max(-1, keepdims=True) - 1.0, s, -1e9)) @ v


@refused("")
def scores_normalised_over_the_keys(q, k, v):
    s = q @ k.mT
    return softmax((s - s.mean(-1, keepdims=True)) / (s.std(-1, keepdims=True) + 1e-3)) @ v


@refused("")
def scores_sorted(q, k, v):
    return softmax(jnp.sort(q @ k.mT, -1)) @ v


@refused("")
def scores_accumulated_over_the_keys(q, k, v):
    return softmax(jnp.cumsum(q @ k.mT, -1)) @ v


@refused("dropout is active", extra=lambda: [jax.random.key(3)])
def dropout_on_the_probabilities(q, k, v, key):
    p = softmax(q @ k.mT)
    return jnp.where(jax.random.bernoulli(key, 0.8, p.shape), p / 0.8, 0) @ v


@refused("dropout is active", extra=lambda: [jax.random.key(3)])
def dropout_shared_by_all_queries(q, k, v, key):
    p = softmax(q @ k.mT)
    kept = jax.random.bernoulli(key, 0.8, (*p.shape[:-2], 1, p.shape[-1]))
    return (p * kept / 0.8) @ v


@refused("")
def scores_through_a_derivative_of_its_own(q, k, v):
    clip = jax.custom_vjp(lambda x: x)
    clip.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))
    return softmax(clip(q @ k.mT)) @ v


@refused("")
def softmax_with_a_derivative_of_its_own(q, k, v):
    own = jax.custom_jvp(lambda x: softmax(x))
    own.defjvp(lambda primals, tangents: (softmax(primals[0]), 2 * tangents[0]))
    return own(q @ k.mT) @ v


@refused("a loop computes the softmax piece by piece")
def softmax_of_each_example_in_a_loop(q, k, v):
    return lax.map(softmax, q @ k.mT) @ v


@refused("a loop computes the softmax piece by piece")
def softmax_of_each_head_in_a_loop(q, k, v):
    s = jnp.einsum("bhtd,bhsd->hbts", q, k) * 0.5
    _, p = lax.scan(lambda _, s: (None, softmax(jnp.where(s > -9, s, -jnp.inf))), None, s)
    return jnp.einsum("hbts,bhsd->bhtd", p, v)


@refused("")
def scores_printed_on_the_way(q, k, v):
    s = q @ k.mT
    jax.debug.callback(lambda _: None, s)
    return softmax(s) @ v


@refused("")
def scores_from_another_process(q, k, v):
    s = q @ k.mT
    s = jax.pure_callback(lambda x: np.asarray(x), jax.ShapeDtypeStruct(s.shape, s.dtype), lax.stop_gradient(s))
    return softmax(s) @ v


def _arguments(extra, inputs):
    return [*(inputs() if inputs else bhtd(ODD, jnp.float32)), *(extra() if extra else ())]


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_reason_and_line_and_exactly_as_it_was(name):
    function, reason, extra, inputs = REFUSALS[name]
    arguments = _arguments(extra, inputs)
    optimized = optimized_like_a_user(function, ops=("attention",))
    given = compiled(with_gradients(optimized, arguments))(*arguments)
    report = optimized.report()
    assert report.counts()["attention"] == 0
    assert [miss.op for miss in report.near_misses] == ["attention"]
    miss = report.near_misses[0]
    assert reason in miss.reason
    assert miss.advice
    file, line = miss.location.split(" ")[0].rsplit(":", 1)
    source, first = inspect.getsourcelines(function)
    assert file == function.__code__.co_filename
    assert first <= int(line) < first + len(source)
    assert f"({name}" in miss.location
    expected = compiled(with_gradients(function, arguments))(*arguments)
    for a, b in zip(floats(given), floats(expected), strict=True):
        np.testing.assert_array_equal(a, b)


# A train step holds the user's rule instead of the call; there the probabilities are replaced, with what remains of
# their derivative.
@pytest.mark.parametrize("name", [name for name in REFUSALS if name != "softmax_with_a_derivative_of_its_own"])
def test_a_train_step_reports_it_once_too_for_its_forward(name):
    function, _, extra, inputs = REFUSALS[name]
    arguments = _arguments(extra, inputs)
    optimized = optimized_like_a_user(with_gradients(function, arguments), ops=("attention",))
    jax.make_jaxpr(lambda *args: optimized(*args))(*arguments)
    (miss,) = optimized.report().near_misses
    assert f"({name}" in miss.location


# --- No attention at all ---------------------------------------------------------------------------------------------


@unrelated
def sigmoid_attention(q, k, v):
    return jax.nn.sigmoid(q @ k.mT - 2.0) @ v


@unrelated
def linear_attention(q, k, v):
    return softmax(q, -1) @ (softmax(k, -2).mT @ v)


@unrelated
def rectified_attention(q, k, v):
    s = jnp.maximum(q @ k.mT, 0)
    return (s / (s.sum(-1, keepdims=True) + 1e-3)) @ v


@unrelated
def gates_of_experts(q, k, v):
    return jnp.einsum("bhts,bhtd->bhd", softmax(q @ k.mT), q)[:, :, None] + v


@unrelated
def classifier(q, k, v):
    return jax.nn.log_softmax(q @ k.mT)


@unrelated
def retention(q, k, v):
    t, s = q.shape[-2], k.shape[-2]
    decay = 0.9 ** jnp.abs(jnp.arange(t)[:, None] - jnp.arange(s))
    return (q @ k.mT * decay) @ v


@unrelated
def power_attention(q, k, v):
    s = (q @ k.mT) ** 2
    return (s / s.sum(-1, keepdims=True)) @ v


@pytest.mark.parametrize("name", UNRELATED)
def test_no_site_where_there_is_no_softmax_attention(name):
    function, arguments = UNRELATED[name], bhtd(ODD, jnp.float32)
    compared = compare(function, arguments)
    assert compared.counts() == 0
    assert compared.complaints == []


# --- Not even nearly one: an exponential between two products, and nothing else of an attention ----------------------


def chosen_without_weights(q, k, v):
    """What is picked by ``top_k``, and averaged."""
    return jnp.mean(jnp.take(v[0, 0], lax.top_k(q @ k.mT, 3)[1], axis=0), -2)


def expert_of_its_own(q, k, v):
    """Weights of a few experts, of what all of them computed for the token."""
    every = jnp.einsum("bhtd,bhsd,bhse->bhtse", q, k, v)
    weights, chosen = lax.top_k(q @ k.mT, 2)
    return jnp.sum(softmax(weights)[..., None] * jnp.take_along_axis(every, chosen[..., None], 3), 3)


def flow(q, k, v):
    """Coupling layers: one half scales and shifts the other."""
    x, log_volume = q, 0.0
    for i in range(2):
        kept = (jnp.arange(q.shape[-1]) % 2 == i).astype(q.dtype)
        moved = jnp.tanh((x * kept) @ k[:1, :1].mT) @ k[:1, :1]
        x = x * kept + (1 - kept) * (x * jnp.exp(moved) + moved**2)
        log_volume += jnp.sum((1 - kept) * moved, -1)
    return log_volume - jnp.sum(x * x, -1) / 2


def flow_with_a_product(q, k, v):
    """A coupling layer, and a product that mixes what it gives, for several examples of one model."""
    x, w = q[0, 0], k[0, 0]
    hidden = jnp.tanh(x @ w.T)
    return (v[0, 0, :1, :1] * hidden * jnp.exp(jnp.tanh(hidden @ w @ w.T)) + hidden) @ v[0, 0]


def scaled_features(q, k, v):
    x, w = q[0, 0], k[0, 0]
    return (jnp.cos(x @ w.T) * jnp.exp(jnp.tanh(x @ w.T))) @ v[0, 0]


def focal_loss(q, k, v):
    logits = q @ k.mT
    wrong = jax.nn.sigmoid(-logits)
    return jnp.mean(wrong**2 * jnp.log1p(jnp.exp(-jnp.abs(logits))), -1)


def rendered_volume(q, k, v):
    """The colours along a ray, weighed by what light reaches them."""
    field = jax.nn.relu(q @ k.mT)
    opaque = 1 - jnp.exp(-field[..., 0])
    light = jnp.cumprod(jnp.concatenate([jnp.ones_like(opaque[..., :1]), 1 - opaque], -1), -1)[..., :-1]
    return jnp.einsum("bht,bhtc->bhc", opaque * light, field[..., 1:])


def sampled_code(q, k, v):
    mean, log_scale = jnp.split(q @ k.mT, [k.shape[-2] // 2], -1)
    width = min(mean.shape[-1], log_scale.shape[-1])
    z = mean[..., :width] + jnp.exp(log_scale[..., :width] / 2) * 0.3
    z = z - z.mean(-1, keepdims=True)
    return z @ v[..., :width, :]


def divergence_of_two_softmaxes(q, k, v):
    p = softmax(q @ k.mT)
    return jnp.sum(p * (jnp.log(p + 1e-9) - jnp.log(softmax(-(q @ k.mT)) + 1e-9)), -1)


def mapped_entropies(q, k, v):
    p = lax.map(softmax, q @ k.mT)
    return -jnp.sum(p * jnp.log(p + 1e-9), -1)


def mapped_norms(q, k, v):
    """Rows that a loop divides by a sum of squares."""
    return lax.map(lambda x: jnp.tanh(x) / (1 + jnp.sum(x * x, -1, keepdims=True)), q @ k.mT) @ v


def random_features(q, k, v):
    """Linear attention with exponentials of products with one matrix."""
    features = jnp.arange(15.0).reshape(5, 3)[: q.shape[-1]] / 20
    left = jnp.exp(q @ features - jnp.sum(q * q, -1, keepdims=True) / 2)
    right = jnp.exp(k @ features - jnp.sum(k * k, -1, keepdims=True) / 2)
    total = jnp.einsum("bhtm,bhm->bht", left, right.sum(-2))
    return jnp.einsum("bhtm,bhmd->bhtd", left, jnp.einsum("bhsm,bhsd->bhmd", right, v)) / total[..., None]


@pytest.mark.parametrize(
    "function",
    [
        chosen_without_weights,
        expert_of_its_own,
        flow,
        flow_with_a_product,
        scaled_features,
        focal_loss,
        rendered_volume,
        sampled_code,
        divergence_of_two_softmaxes,
        mapped_entropies,
        mapped_norms,
        random_features,
    ],
    ids=lambda function: function.__name__,
)
@pytest.mark.parametrize("step", [False, True], ids=["forward", "train step"])
def test_what_no_reader_would_call_nearly_an_attention_is_no_near_miss(function, step):
    arguments = bhtd(ODD, jnp.float32)
    optimized = optimized_like_a_user(with_gradients(function, arguments) if step else function)
    jax.make_jaxpr(lambda *args: optimized(*args))(*arguments)
    report = optimized.report()
    assert report.counts()["attention"] == 0
    assert [miss for miss in report.near_misses if miss.op in ("attention", "cross_entropy", "gated_mlp")] == []


def test_the_advice_for_chosen_keys_is_followed_and_recognised():
    def recomputed(q, k, v):
        numbers = lax.top_k(lax.stop_gradient(q @ k.T), 3)[1]
        return jnp.einsum("qk,qkd->qd", softmax(jnp.einsum("qd,qkd->qk", q, k[numbers])), v[numbers])

    arguments = retrieval()
    compared = compare(recomputed, arguments)
    assert (compared.counts(), compared.complaints) == (1, [])
    written = compiled(with_gradients(chosen_keys, arguments))(*arguments)
    again = compiled(with_gradients(recomputed, arguments))(*arguments)
    for a, b in zip(floats(written), floats(again), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


# --- Carried exactly -------------------------------------------------------------------------------------------------


def mask_that_multiplies_the_scores(q, k, v):
    return softmax(q @ k.mT * jnp.tri(q.shape[-2], k.shape[-2])) @ v


def mask_on_the_probabilities_only(q, k, v):
    return (softmax(q @ k.mT) * jnp.tri(q.shape[-2], k.shape[-2])) @ v


def temperature_from_the_keys(q, k, v):
    return softmax(q @ k.mT / (1 + jnp.sum(k * k, -1))[..., None, :]) @ v


def sink_of_zero(q, k, v):
    e = jnp.exp(q @ k.mT)
    return e / (1 + e.sum(-1, keepdims=True)) @ v


def gate_on_the_result(q, k, v):
    return attend(q, k, v) * jax.nn.sigmoid(q)


def values_normalised_first(q, k, v):
    return softmax(q @ k.mT) @ softmax(v)


def bias_from_the_queries(q, k, v):
    return softmax(q @ k.mT + jnp.sum(q, -1, keepdims=True)) @ v


def probabilities_used_twice_for_values(q, k, v):
    p = softmax(q @ k.mT)
    return p @ v, p @ (v * v)


def attention_of_attention(q, k, v):
    return attend(attend(q, k, k), k, v)


@pytest.mark.parametrize(
    "function",
    [
        mask_that_multiplies_the_scores,
        mask_on_the_probabilities_only,
        temperature_from_the_keys,
        sink_of_zero,
        gate_on_the_result,
        values_normalised_first,
        bias_from_the_queries,
        probabilities_used_twice_for_values,
        attention_of_attention,
    ],
    ids=lambda function: function.__name__,
)
def test_look_alike_is_refused_or_carried_exactly(function):
    compared = compare(function, bhtd(ODD, jnp.float32))
    assert compared.complaints == []
    assert compared.counts() + len(compared.reasons()) >= 1


def test_reference_effects_keep_a_site_from_being_replaced():
    def logged(q, k, v):
        log = jax.new_ref(jnp.zeros(()))
        s = q @ k.mT
        log[...] = s.sum()
        return softmax(s) @ v, log[...]

    arguments = bhtd(ODD, jnp.float32)
    optimized = optimized_like_a_user(logged)
    given = optimized(*arguments)
    assert optimized.report().counts()["attention"] == 0
    assert "used by" in optimized.report().near_misses[0].reason
    for a, b in zip(given, jax.jit(logged)(*arguments), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "used, by", [(lambda p, v: p.mean(2), "reduce_sum"), (lambda p, v: p @ jnp.cos(v), "dot_general")]
)
def test_a_train_step_says_what_else_needs_the_probabilities(used, by):
    """And not that its own derivative does."""

    def loss(q, k, v):
        p = softmax(q @ k.mT)
        return jnp.sum(jnp.sin(p @ v)) + jnp.sum(jnp.sin(used(p, v)))

    arguments = bhtd(ODD, "float32")
    report = autopallas.explain(optimized_like_a_user(jax.value_and_grad(loss, (0, 1, 2))), *arguments)
    (reason,) = (miss.reason for miss in report.near_misses if miss.op == "attention")
    assert reason.startswith(f"the scores or probabilities are also used by {by}")
