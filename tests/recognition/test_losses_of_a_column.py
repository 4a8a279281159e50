"""Losses that read the same element of each row of logits: a slice of one column, which is a label like any other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.nn import log_softmax, logsumexp, softmax
from support.catalogue import array, registry
from support.compare import compare, optimized_like_a_user

B, T, D, V, K = 2, 6, 5, 9, 4


def arguments(dtype=jnp.float32):
    return [array(B, T, D, dtype=dtype, seed=1), array(D, V, dtype=dtype, seed=2)]


FOUND, found = registry()


@found
def first(x, w):
    return -log_softmax(x @ w)[..., 0].mean()


@found
def last(x, w):
    z = x @ w
    return (logsumexp(z, -1) - z[..., -1]).mean()


@found
def of_two_words(x, w):
    z = x @ w * 0.5
    return (logsumexp(z, -1) - jnp.logaddexp(z[..., 2], z[..., 3])).mean()


@found
def kept_as_an_axis(x, w):
    z = x @ w
    return ((logsumexp(z, -1, keepdims=True) - z[..., 4:5]) ** 2).mean()


@found
def beside_labels(x, w):
    logs = log_softmax(x @ w)
    labels = jnp.arange(B * T).reshape(B, T, 1) % V
    return -(jnp.take_along_axis(logs, labels, -1)[..., 0] + 0.5 * logs[..., 1]).mean()


@found
def of_the_last_rows(x, w):
    return -log_softmax((x @ w)[:, -2:])[..., 3].mean()


@found
def along_the_first_axis(x, w):
    z = jnp.einsum("dv,btd->vbt", w, x)
    return (logsumexp(z, 0) - z[2]).mean()


@found
def checkpointed(x, w):
    return jax.checkpoint(first)(x, w)


@found
def each_example(x, w):
    def example(x):
        z = x @ w
        return (logsumexp(z, -1) - z[:, 1]).sum()

    return jax.vmap(example)(x).mean()


def labels(count):
    return jnp.arange(B * count).reshape(B, count) * 5 % V


def picked(z, y, **options):
    return jnp.take_along_axis(z, y[..., None], -1, **options)[..., 0]


@found
def blanks_and_labels_of_all_rows_but_the_last(x, w):
    z = log_softmax(x @ w)
    return -z[..., 0].mean() - jnp.sin(picked(z[:, :-1], labels(T - 1))).mean()


@found
def blanks_and_labels_of_all_rows_but_the_first(x, w):
    z = x @ w
    return (logsumexp(z, -1) - z[..., 0]).mean() - jnp.cos(picked(z[:, 1:], labels(T - 1))).mean()


@found
def blanks_and_labels_of_rows_in_the_middle_of_which_some_are_none(x, w):
    z, y = log_softmax(x @ w), labels(3).at[0, 1].set(V).at[1, 0].set(-1)
    return -z[..., 0].mean() - jnp.sin(picked(z[:, 2:5], y, mode="fill", fill_value=0.5)).mean()


@found
def labels_of_two_parts_and_a_column(x, w):
    z = log_softmax(x @ w)
    return -z[..., V - 1].mean() - jnp.sin(picked(z[:, :4], labels(4))).mean() - picked(z[:, 3:], labels(3)).mean()


@found
def transducer(x, w):
    """Blanks at each time and label, and labels that all times share (Graves, 2012, arXiv:1211.3711)."""
    steps = 4
    z = log_softmax(jnp.tanh(jnp.sin(jnp.arange(steps))[:, None, None] + x[:, None]) @ w)
    y = jnp.broadcast_to(labels(T - 1)[:, None], (B, steps, T - 1))
    blanks, emitted = z[..., 0], picked(z[:, :, :-1], y)
    first = jnp.concatenate([jnp.zeros((B, 1)), jnp.cumsum(emitted[:, 0], 1)], 1)

    def time(before, now):
        blank, label = now

        def next_label(left, of_label):
            stays, moves = of_label
            left = jnp.logaddexp(stays, left + moves)
            return left, left

        stays = (before + blank).T
        _, rest = lax.scan(next_label, stays[0], (stays[1:], label.T))
        return jnp.concatenate([stays[:1], rest]).T, None

    last, _ = lax.scan(time, first, (blanks[:, :-1].swapaxes(0, 1), emitted[:, 1:].swapaxes(0, 1)))
    return -(last[:, -1] + blanks[:, -1, -1]).mean()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", FOUND)
def test_is_found_and_right(name, dtype):
    for function in (FOUND[name], jax.value_and_grad(FOUND[name], (0, 1))):
        compared = compare(function, arguments(dtype), gradients=False)
        assert compared.complaints == []
        assert compared.counts("cross_entropy") == 1, compared.reasons()


def test_candidates_of_each_row_the_first_of_which_is_right():
    def loss(x, candidates):
        z = jnp.einsum("btd,btkd->btk", x, candidates) / 0.1
        return -log_softmax(z)[..., 0].mean()

    args = [array(B, T, D, seed=1), array(B, T, K, D, seed=2)]
    compared = compare(loss, args)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1


@pytest.mark.parametrize("infinity", [jnp.inf, -jnp.inf, jnp.nan])
def test_other_elements_may_be_infinite(infinity):
    def loss(x, w):
        z = (x @ w).at[..., 5].set(infinity)
        return logsumexp(z, -1), z[..., 0]

    assert compare(loss, arguments(), gradients=False).complaints == []


# --- What looks alike ------------------------------------------------------------------------------------------------


def rows(x, w):
    """The first rows, which are rows of activations."""
    return logsumexp((x @ w)[:, 0], -1).mean()


def gates(x, w):
    return (jnp.exp(x @ w)[..., 0] * x[..., 0]).sum()


def probabilities(x, w):
    p = softmax(x @ w)
    return p[..., 0], p


def steps(x, w):
    def step(total, x):
        p = softmax(x @ w)
        return total + p[..., 0], p[..., 1:]

    return lax.scan(step, jnp.zeros(B), x.swapaxes(0, 1))


def some_rows_are_read_as_they_are(x, w):
    z = log_softmax(x @ w)
    return -z[..., 0].mean() - jnp.sin(picked(z[:, :-1], labels(T - 1))).mean() + jnp.tanh(z[:, 1:]).sum()


def every_other_row(x, w):
    z = log_softmax(x @ w)
    return -z[..., 0].mean() - jnp.sin(picked(z[:, ::2], labels(T // 2))).mean()


LOOKALIKES = [rows, gates, probabilities, steps, some_rows_are_read_as_they_are, every_other_row]


@pytest.mark.parametrize("function", LOOKALIKES)
def test_what_looks_alike_is_right(function):
    assert compare(function, arguments()).complaints == []
    assert compare(gates, arguments(), gradients=False).counts("cross_entropy") == 0


def addressed(key, memory, strength):
    """One query for each example reads a memory, whose weights are needed later too."""
    z = jnp.einsum("bd,bkd->bk", key, memory)
    z /= jnp.linalg.norm(key, axis=-1, keepdims=True) * jnp.linalg.norm(memory, axis=-1) + 1e-6
    weights = softmax(jax.nn.softplus(strength) * z)
    return jnp.einsum("bk,bkd->bd", weights, memory), weights


def test_a_memory_that_one_query_reads_is_no_loss():
    args = [array(B, D, seed=1), array(B, K, D, seed=2), array(B, 1, seed=3)]
    compared = compare(addressed, args)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 0


def spans(product):
    """The start and the end of a span, each with its softmax over the positions."""

    def loss(x, w):
        start, end = product(jnp.tanh(x), w)
        return -log_softmax(start)[:, 1].mean() - log_softmax(end)[:, 3].mean()

    return loss


SPANS = {
    "two columns of one product": (lambda x, w: jnp.moveaxis(x @ w, -1, 0), "in parts, each apart"),
    "a column of each of two products": (lambda x, w: ((x @ w)[..., 0], (x @ w)[..., 1]), None),
    "a split product": (lambda x, w: [z[..., 0] for z in jnp.split(x @ w, 2, -1)], "in parts, each apart"),
    "a vector": (lambda x, w: (x @ w[:, 0],) * 2, "a vector gives the logits"),
    "products of their own": (lambda x, w: ((x @ w[:, :1])[..., 0], (x @ w[:, 1:])[..., 0]), None),
}


@pytest.mark.parametrize(("join", "count"), [(True, 2), (False, 0)])
def test_logits_that_are_stacked_are_found_and_those_taken_apart_by_rows_are_near_misses(join, count):
    def loss(x, w):
        z = jnp.stack([x[0] @ w, x[1] @ w]) if join else jnp.unstack(x @ w)
        return sum(-log_softmax(one)[:, 1].mean() for one in z)

    compared = compare(loss, arguments())
    assert compared.complaints == []
    assert compared.report.counts()["cross_entropy"] == count
    assert {miss.op for miss in compared.report.near_misses} == (set() if count else {"cross_entropy"})


@pytest.mark.parametrize("name", SPANS)
def test_spans_are_found_where_each_end_has_a_product_and_say_so_otherwise(name):
    product, reason = SPANS[name]
    args = [array(B, T, D, seed=1), array(D, 2, seed=2)]
    compared = compare(spans(product), args)
    assert compared.complaints == []
    step = optimized_like_a_user(jax.grad(spans(product), (0, 1)))
    jax.make_jaxpr(lambda *own: step(*own))(*args)
    report = step.report()
    said = {miss.reason for miss in report.near_misses if miss.op == "cross_entropy"}
    if reason is None:
        assert (report.counts()["cross_entropy"], said) == (2, set())
    else:
        assert report.counts()["cross_entropy"] == 0
        assert all(reason in one for one in said)
        assert said
