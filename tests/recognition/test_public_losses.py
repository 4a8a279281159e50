"""Losses as public code writes them: with other picks, several labels per row, in loops, around checkpoints."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.nn import log_softmax, logsumexp, one_hot, softmax
from support.catalogue import array, registry
from support.checks import check
from support.compare import compare, compiled, optimized_like_a_user

from recognition.losses import picked
from recognition.sequences import B, D, T, V, arguments

PICKS, pick = registry()


@pick
def einsum_with_one_hot(w, x, y):
    return -jnp.einsum("blv,blv->bl", one_hot(y, V), log_softmax(x @ w)).mean()


@pick
def vdot(w, x, y):
    return -jnp.vdot(one_hot(y, V), log_softmax(x @ w)) / y.size


@pick
def vmapped_dot(w, x, y):
    return -jax.vmap(jnp.dot)(one_hot(y.reshape(-1), V), log_softmax(x @ w).reshape(-1, V)).mean()


@pick
def contracted_over_rows_too(w, x, y):
    return -jnp.einsum("blv,blv->b", log_softmax(x @ w), one_hot(y, V)).mean()


@pick
def narrow_one_hot(w, x, y):
    return -jnp.einsum("blv,blv->bl", one_hot(y, V, dtype=jnp.bfloat16), log_softmax(x @ w)).mean()


@pick
def soft_labels_contracted(w, x, y):
    return -jnp.einsum("blv,blv->bl", softmax(jnp.sin(y[..., None] + jnp.arange(V))), log_softmax(x @ w)).mean()


@pick
def diagonal(w, x, y):
    z = (x[0] @ w[:, :T]) * 3
    return (logsumexp(z, -1) - jnp.diag(z)).mean()


@pick
def entropy_contracted(w, x, y):
    z = x @ w
    return -picked(log_softmax(z), y).mean() - 0.1 * jnp.einsum("blv,blv->bl", softmax(z), log_softmax(z)).mean()


@pytest.mark.parametrize("name", PICKS)
def test_labels_that_a_contraction_picks(name):
    compared = compare(PICKS[name], arguments(), dtype="float32" if name != "narrow_one_hot" else "bfloat16")
    assert compared.counts("cross_entropy") == 1, compared.reasons()
    assert compared.complaints == []


def test_a_contraction_with_a_matrix_is_no_pick():
    def loss(w, x, y):
        return (log_softmax(x @ w) @ jnp.ones((V, 3))).sum()

    compared = compare(loss, arguments())
    assert compared.counts("cross_entropy") == 0
    assert compared.complaints == []


LABEL_SETS, label_set = registry()


def some_labels(y):
    return jnp.stack([y, (y + 1) % V, (y + 4) % V], -1)


@label_set
def the_mean_of_several(w, x, y):
    return -jnp.take_along_axis(log_softmax(x @ w), some_labels(y), -1).mean()


@label_set
def teacher_of_the_best_labels(w, x, y):
    z, labels = x @ w, some_labels(y)
    return (logsumexp(z, -1) - (jnp.take_along_axis(z, labels, -1) * softmax(jnp.sin(labels * 1.0))).sum(-1)).mean()


@label_set
def the_same_label_twice(w, x, y):
    labels = jnp.stack([y, y, (y + 4) % V], -1)
    return -(jnp.take_along_axis(log_softmax(x @ w), labels, -1) * jnp.array([0.5, 0.3, 0.2])).sum()


@label_set
def margins_of_wrong_labels(w, x, y):
    z = x @ w
    margins = 1 - picked(z, y)[..., None] + jnp.take_along_axis(z, some_labels(y)[..., 1:], -1)
    return jax.nn.relu(margins).mean() - picked(log_softmax(z), y).mean()


@label_set
def labels_out_of_range(w, x, y):
    labels = some_labels(y) * 2 - V
    lowest = jnp.nan_to_num(jnp.take_along_axis(log_softmax(x @ w), labels, -1)).sum()
    return -lowest - jnp.take_along_axis(log_softmax(x @ w), labels, -1, mode="clip").mean()


@label_set
def mapped_over_labels(w, x, y):
    return -jax.vmap(lambda y: picked(log_softmax(x @ w), y).mean())(jnp.stack([y, (y + 1) % V])).sum()


@label_set
def of_some_rows(w, x, y):
    return -jnp.take_along_axis(log_softmax((x @ w)[:, :-1]), some_labels(y)[:, 1:], -1).mean()


@label_set
def in_a_scan(w, x, y):
    def step(total, part):
        return total - jnp.take_along_axis(log_softmax(part[0] @ w), some_labels(part[1]), -1).mean(), None

    return lax.scan(step, 0.0, (x, y))[0]


@pytest.mark.parametrize("name", LABEL_SETS)
def test_several_labels_per_row(name):
    compared = compare(LABEL_SETS[name], arguments())
    assert compared.counts("cross_entropy") == 1, compared.reasons()
    assert compared.complaints == []
    step = jax.value_and_grad(LABEL_SETS[name], (0, 1))
    report = check(step, arguments(), op="cross_entropy", sizes=None if name == "mapped_over_labels" else (T, V))
    assert report.near_misses == ()


def test_an_own_part_of_each_row_is_no_set_of_labels():
    def loss(w, x, y):
        z = x @ w
        window = jax.vmap(jax.vmap(lambda row, start: lax.dynamic_slice(row, (start,), (3,))))(z, y % 5)
        return logsumexp(z, -1).mean() - (window * jnp.arange(3)).mean()

    compared = compare(loss, arguments())
    assert compared.counts("cross_entropy") == 0
    assert compared.complaints == []


def plain(w, x, y):
    return -picked(log_softmax(x @ w), y).mean()


def stacked_arguments():
    w, x, y = arguments()
    return jnp.stack([w, w[::-1], w * 0.5]), jnp.stack([x, x[::-1], x * 2]), jnp.stack([y, y[::-1], y])


STACKED = {
    "losses": lambda w, x, y: jax.vmap(plain)(w, x, y),
    "gradients": lambda w, x, y: jax.vmap(jax.value_and_grad(plain, (0, 1)))(w, x, y),
    "gradient of the sum": jax.value_and_grad(lambda w, x, y: jax.vmap(plain)(w, x, y).sum(), (0, 1)),
    "weights alone": lambda w, x, y: jax.vmap(plain, (0, None, None))(w, x[0], y[0]),
    "twice": lambda w, x, y: jax.vmap(jax.vmap(plain, (0, 0, None)), (None, None, 0))(w, x, y),
    "labels as one-hot rows": lambda w, x, y: jax.vmap(PICKS["einsum_with_one_hot"])(w, x, y),
    "mapped": lambda w, x, y: lax.map(lambda part: plain(*part), (w, x, y)),
}


@pytest.mark.parametrize("name", STACKED)
def test_weights_of_their_own(name):
    compared = compare(STACKED[name], stacked_arguments(), gradients=False)
    several_labels_per_row_and_weight = name == "twice"
    assert compared.counts("cross_entropy") == (0 if several_labels_per_row_and_weight else 1), compared.reasons()
    assert compared.complaints == []


def test_scores_of_attention_are_no_logits():
    def attend(q, k, v):
        s = jnp.einsum("bqd,bkd->bqk", q, k)
        return jnp.einsum("bqk,bkd->bqd", softmax(s), v)

    compared = compare(attend, tuple(array(2, 6, 4, seed=n) for n in range(3)))
    assert (compared.counts("attention"), compared.counts("cross_entropy")) == (1, 0)
    assert compared.reasons() == []


def microbatches(w, x, y):
    def body(total, part):
        value, gradients = jax.value_and_grad(plain, (0, 1))(w, *part)
        return total + value, gradients

    return lax.scan(body, 0.0, (x.reshape(3, 4, D), y.reshape(3, 4)))


def test_microbatches_are_no_pieces_of_a_loss():
    check(microbatches, arguments(), op="cross_entropy")


def test_pieces_of_the_vocabulary_are():
    def loss(w, x, y):
        def body(carry, part):
            z = x @ part
            greatest = jnp.maximum(carry[0], z.max(-1))
            return (greatest, carry[1] * jnp.exp(carry[0] - greatest) + jnp.exp(z - greatest[..., None]).sum(-1)), None

        start = jnp.full((B, T), -jnp.inf), jnp.zeros((B, T))
        (greatest, total), _ = lax.scan(body, start, w[:, :10].reshape(D, 2, 5).transpose(1, 0, 2))
        return (greatest + jnp.log(total) - (x * w[:, 0]).sum(-1)).mean()

    compared = compare(loss, arguments())
    assert compared.counts("cross_entropy") == 0
    assert compared.complaints == []


HEADS, head = registry()


@head
def whole_model(w, x, y):
    return -picked(log_softmax(jax.checkpoint(lambda w, x: jnp.tanh(x) @ w)(w, x)), y).mean()


@head
def that_saves_products(w, x, y):
    model = jax.checkpoint(lambda w, x: jnp.tanh(x) @ w, policy=jax.checkpoint_policies.dots_saveable)
    return -picked(log_softmax(model(w, x)), y).mean()


@head
def some_rows_within(w, x, y):
    return -picked(log_softmax(jax.checkpoint(lambda w, x: (jnp.tanh(x) @ w)[:, :-1])(w, x)), y[:, 1:]).mean()


@head
def some_rows_outside(w, x, y):
    z = jax.checkpoint(lambda w, x: jnp.tanh(x) @ w)(w, x).astype(jnp.float32)
    return (logsumexp(z[:, :-1], -1) - picked(z[:, :-1], y[:, 1:])).mean()


@head
def tied_weight_in_16_bits(w, x, y):
    def model(w, x):
        embedding = w.T.astype(jnp.bfloat16)
        return (jnp.tanh(x).astype(jnp.bfloat16) @ embedding.T).astype(jnp.float32)

    return -picked(log_softmax(jax.checkpoint(model)(w, x)), y).mean()


@head
def a_loop_within(w, x, y):
    def model(w, x):
        return lax.scan(lambda h, _: (jnp.sin(h), None), x, None, length=2)[0] @ w

    return -picked(log_softmax(jax.checkpoint(model)(w, x)), y).mean()


@pytest.mark.parametrize("name", HEADS)
def test_the_head_of_a_model_within_a_checkpoint(name):
    narrow = "16_bits" in name
    compared = compare(HEADS[name], arguments(), dtype="bfloat16" if narrow else "float32")
    assert compared.counts("cross_entropy") == 1, compared.reasons()
    assert compared.complaints == []
    step = jax.value_and_grad(HEADS[name], (0, 1))
    check(step, arguments(), op="cross_entropy", dtype="bfloat16" if narrow else "float32")


def test_what_a_checkpoint_computes_again_is_computed_again():
    """The model's own work stays inside of the checkpoint; only the head's products leave it."""
    step = jax.value_and_grad(HEADS["whole_model"], (0, 1))
    optimized = optimized_like_a_user(step)
    text = str(jax.make_jaxpr(optimized)(*arguments()))
    inner = text[text.index("remat") if "remat" in text else text.index("checkpoint") :]
    assert "tanh" in inner
    assert optimized.report().counts()["cross_entropy"] == 1


def test_an_optimized_function_with_a_checkpoint_is_differentiated_later():
    optimized = optimized_like_a_user(HEADS["whole_model"])
    given, wanted = (compiled(jax.grad(f, (0, 1)))(*arguments()) for f in (optimized, HEADS["whole_model"]))
    assert optimized.report().counts()["cross_entropy"] == 1
    for a, b in zip(given, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("examples", [B, 1])
@pytest.mark.parametrize("narrow", [False, True])
def test_a_bias_that_each_example_repeats_for_its_rows(examples, narrow):
    def loss(w, bias, x, y):
        def model(x):
            return x @ w + jnp.broadcast_to(bias, (T, V))

        return -picked(log_softmax(jax.vmap(model)(x)), y).mean()

    w, x, y = arguments()
    bias = array(V, dtype=jnp.bfloat16 if narrow else jnp.float32, seed=3)
    compared = compare(jax.value_and_grad(loss, (0, 1, 2)), (w, bias, x[:examples], y[:examples]), gradients=False)
    assert compared.counts("cross_entropy") == 1, compared.reasons()
    assert compared.complaints == []


def gradient_of_the_repeated_bias(weigh):
    """Gradients of the logits' sum over examples, of which ``weigh`` makes what is returned beside them."""

    def program(w, x, y):
        def loss(w, bias):
            return -picked(log_softmax(x @ w + bias), y).mean()

        value, (of_w, of_bias) = jax.value_and_grad(loss, (0, 1))(w, jnp.zeros((T, V)))
        return value, of_w, weigh(of_bias)

    return program


@pytest.mark.parametrize(
    "weigh",
    [
        lambda g: g,
        lambda g: (g.sum(0), g),
        lambda g: (g.sum(0), (g**2).sum()),
        lambda g: (g * jnp.arange(T)[:, None]).sum(0),
        lambda g: g.reshape(2, -1).sum(0),
        lambda g: g.reshape(1, T, V).sum((0, 2)),
        lambda g: jnp.pad(g, ((1, 0), (0, 0))).sum(0),
        lambda g: g.astype(jnp.int32).sum(0),
    ],
)
def test_sums_over_examples_that_something_else_reads_too(weigh):
    compared = compare(gradient_of_the_repeated_bias(weigh), arguments(), gradients=False)
    assert compared.counts("cross_entropy") == 0, compared.reasons()
    assert compared.complaints == []


@pytest.mark.parametrize("weigh", [lambda g: g.sum(0), lambda g: g[None].sum((0, 1)), lambda g: g.sum(0)[None] * 2])
def test_sums_over_examples_that_are_summed_over_their_rows(weigh):
    compared = compare(gradient_of_the_repeated_bias(weigh), arguments(), gradients=False)
    assert compared.counts("cross_entropy") == 1, compared.reasons()
    assert compared.complaints == []


def convolved(size):
    """The mean loss of the pixels of images whose logits a convolution gives."""

    def program(kernel, x, labels):
        logits = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return -picked(log_softmax(logits), labels).mean()

    labels = jnp.arange(2 * 4 * 4).reshape(2, 4, 4) % V
    return program, (array(size, size, D, V), array(2, 4, 4, D, seed=1), labels)


def test_logits_that_a_convolution_of_one_pixel_gives_are_a_near_miss():
    program, args = convolved(1)
    for run in (program, jax.value_and_grad(program, (0, 1))):
        compared = compare(run, args, gradients=False)
        assert compared.complaints == []
        (miss,) = compared.report.near_misses
        assert (miss.op, miss.reason) == ("cross_entropy", "a convolution gives the logits")
        assert "x @ kernel[0, 0]" in miss.advice


def test_as_products_they_are_a_site():
    def program(kernel, x, labels):
        return -picked(log_softmax(x @ kernel[0, 0]), labels).mean()

    own, args = convolved(1)
    compared = compare(program, args)
    assert compared.counts("cross_entropy") == 1
    np.testing.assert_allclose(own(*args), program(*args), rtol=1e-6)


def test_logits_that_another_convolution_gives_are_none():
    program, args = convolved(3)
    assert compare(program, args).reasons() == []

    def weighed(kernel, x, labels):
        logits = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (softmax(logits) * labels[..., None]).sum()

    assert compare(weighed, convolved(1)[1]).reasons() == []
