"""Losses with statistics of the rows and of the columns of one product, and several products with the same labels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.nn import log_softmax, logsumexp, one_hot, softmax
from support.catalogue import array, registry
from support.checks import check
from support.compare import compare, optimized_like_a_user

import autopallas

N, D = 6, 4
EACH = jnp.arange(N)


def arguments(dtype=jnp.float32):
    """a [N, D], b [N, D], the logarithm of a temperature."""
    return array(N, D, dtype=dtype, seed=1), array(N, D, dtype=dtype, seed=2), jnp.asarray(0.7, dtype)


def normalised(a):
    return a / jnp.linalg.norm(a, axis=-1, keepdims=True)


def own(z):
    """Cross-entropy of rows of which each is labelled with its own number."""
    return -jnp.take_along_axis(log_softmax(z), EACH[:, None], -1).mean()


def with_integer_labels(z, labels):
    """As optax has it."""
    z -= lax.stop_gradient(z.max(-1, keepdims=True))
    picked = jnp.take_along_axis(z, labels[..., None], -1).squeeze(-1)
    return jnp.log(jnp.exp(z).sum(-1)) - picked


CONTRASTIVE, contrastive = registry()


@contrastive
def along_the_diagonal(a, b, t):
    z = jnp.exp(t) * a @ b.T
    return (logsumexp(z, -1) - jnp.diag(z)).mean() / 2 + (logsumexp(z, 0) - jnp.diag(z)).mean() / 2


@contrastive
def of_the_transposed_logits(a, b, t):
    z = jnp.exp(t) * (normalised(a) @ normalised(b).T)
    return (own(z) + own(z.T)) / 2


@contrastive
def by_row_and_column_numbers(a, b, t):
    z = jnp.einsum("nd,md->nm", a, b) * t
    return -(log_softmax(z, 1)[EACH, EACH].mean() + log_softmax(z, 0)[EACH, EACH].mean()) / 2


@contrastive
def diagonals_of_both(a, b, t):
    z = jnp.matmul(normalised(b), normalised(a).T) * jnp.exp(t)
    return -jnp.mean(jnp.diag(log_softmax(z))) - jnp.mean(jnp.diag(log_softmax(z.T)))


@contrastive
def one_hot_labels(a, b, t):
    z = a @ b.T * jnp.exp(t)
    labels = jnp.eye(N)
    return -(jnp.sum(labels * log_softmax(z, -1), -1) + jnp.sum(labels * log_softmax(z, 0), 0)).mean()


@contrastive
def with_integer_labels_of_both(a, b, t):
    z = a @ b.T / jnp.maximum(t, 0.01)
    return (with_integer_labels(z, EACH).mean() + with_integer_labels(z.T, EACH).mean()) / 2


@contrastive
def labels_of_rows_and_of_columns(a, b, t):
    z = a @ b[:5].T * t
    rows, columns = jnp.array([3, 1, 0, 2, 4, 4]), jnp.array([1, 1, 0, 4, 2])
    down = jnp.take_along_axis(log_softmax(z, 0), columns[None], 0)
    return -jnp.take_along_axis(log_softmax(z, 1), rows[:, None], 1).mean() - down.mean()


@contrastive
def labels_of_columns_out_of_range(a, b, t):
    z = a @ b.T * t
    filled = jnp.take_along_axis(log_softmax(z, 0), (EACH + 3)[None], 0)
    return -jnp.nan_to_num(filled).mean() - jnp.take_along_axis(log_softmax(z), (EACH + 3)[:, None], 1, "clip").mean()


@contrastive
def soft_labels(a, b, t):
    z = a @ b.T * t
    labels = softmax(jnp.cos(EACH[:, None] * EACH))
    return -(labels * (log_softmax(z, 1) + log_softmax(z, 0))).sum() / N


@contrastive
def masked_in_both_directions(a, b, t):
    z = jnp.where(EACH[:, None] + EACH < 9, a @ b.T * t, -jnp.inf)
    return (logsumexp(z, 1) + logsumexp(z, 0)).mean() - jnp.diag(a @ b.T * t).mean()


@contrastive
def both_probabilities(a, b, t):
    z = a @ b.T * t
    return -jnp.log((softmax(z, 0) * softmax(z, 1))[EACH, EACH]).mean()


@contrastive
def columns_after_rows(a, b, t):
    z = a @ b.T * t
    z -= logsumexp(z, 1, keepdims=True)
    z -= logsumexp(z, 0, keepdims=True)
    return (z[EACH, EACH] ** 2).mean()


@contrastive
def weighted_by_the_loss_itself(a, b, t):
    z = a @ b.T * t
    rows, columns = log_softmax(z, 1)[EACH, EACH], log_softmax(z, 0)[EACH, EACH]
    return -((1 - jnp.exp(rows)) ** 2 * rows + (1 - jnp.exp(columns)) ** 2 * columns).mean()


@contrastive
def rows_in_groups(a, b, t):
    z = jnp.einsum("gnd,md->gnm", a.reshape(2, 3, D), b) * t
    return (logsumexp(z, 2) ** 2).mean() + (logsumexp(z.reshape(N, N), 0) - z.reshape(N, N)[EACH, EACH]).mean()


@contrastive
def of_one_tower_with_itself(a, b, t):
    z = a @ a.T * t - 1e9 * jnp.eye(N)
    other = (EACH + 3) % N
    return -log_softmax(z, 1)[EACH, other].mean() - log_softmax(z, 0)[other, EACH].mean() + b.sum()


@contrastive
def mapped_over_batches(a, b, t):
    pairs = jnp.stack([a, a * 2]), jnp.stack([b, b[::-1]])
    return jax.vmap(of_the_transposed_logits, (0, 0, None))(*pairs, t).sum()


@contrastive
def in_a_loop(a, b, t):
    pairs = jnp.stack([a, a * 2]), jnp.stack([b, b[::-1]])
    return lax.scan(lambda total, pair: (total + of_the_transposed_logits(*pair, t), None), 0.0, pairs)[0]


@contrastive
def in_a_checkpoint(a, b, t):
    return jax.checkpoint(with_integer_labels_of_both)(jnp.tanh(a), b, t)


@pytest.mark.parametrize("name", CONTRASTIVE)
def test_rows_and_columns_of_one_product_are_one_site(name):
    compared = compare(CONTRASTIVE[name], arguments())
    assert compared.counts("cross_entropy") == 1, compared.reasons()
    assert compared.complaints == []
    sizes = (N, 5 if name == "labels_of_rows_and_of_columns" else N)
    report = check(
        jax.value_and_grad(CONTRASTIVE[name], (0, 1, 2)),
        arguments(),
        op="cross_entropy",
        # labels and a mask are the program's own
        sizes=None if name in ("one_hot_labels", "soft_labels", "of_one_tower_with_itself") else sizes,
    )
    assert report.near_misses == ()


def test_rows_and_columns_in_16_bits():
    step = jax.value_and_grad(CONTRASTIVE["of_the_transposed_logits"], (0, 1, 2))
    check(step, arguments(jnp.bfloat16), op="cross_entropy")


def test_no_logits_are_stored_between_the_passes():
    loss = CONTRASTIVE["labels_of_rows_and_of_columns"]
    optimized = optimized_like_a_user(loss)
    text = str(jax.make_jaxpr(optimized)(*arguments()))
    assert "f32[6,5] = dot_general" in str(jax.make_jaxpr(loss)(*arguments()))
    assert text.count("autopallas_site[") == 2
    assert not [line for line in text.split("autopallas_site[")[0].splitlines() if "f32[6,5]" in line]


SEVERAL, several = registry()


@several
def both_ways_round(a, b, t):
    a, b = normalised(a), normalised(b)
    return (own(a @ b.T * jnp.exp(t)) + own(b @ a.T * jnp.exp(t))) / 2


@several
def by_number(a, b, t):
    return -log_softmax(a @ b.T * t)[EACH, EACH].mean() - log_softmax(b @ a.T * t)[EACH, EACH].mean()


@several
def one_head_twice(a, b, t):
    labels = jnp.array([3, 1, 1, 0, 5, 2])
    loss = lambda z: -jnp.take_along_axis(log_softmax(z), labels[:, None], -1).mean()  # noqa: E731
    return t * loss(a @ b.T) + t * loss(jnp.sin(a) @ b.T)


@pytest.mark.parametrize("name", SEVERAL)
def test_products_with_the_same_labels_are_sites_of_their_own(name):
    """Automatic differentiation puts the same cotangents at the same labels, which is one value for both."""
    step = jax.value_and_grad(SEVERAL[name], (0, 1, 2))
    check(step, arguments(), directions=("forward+backward",) * 2, op="cross_entropy", sizes=(N, N))


def test_what_labels_share_with_something_else_is_kept():
    labels = jnp.array([3, 1, 1, 0, 5, 2])

    def loss(a, b, t):
        first, second = (-log_softmax(z)[EACH, labels].mean() for z in (a @ b.T, jnp.sin(a) @ b.T))
        return first + second + jnp.sort(a @ b.T, 1)[0, 0] * t

    compared = compare(jax.value_and_grad(loss, (0, 1, 2)), arguments(), gradients=False)
    assert compared.counts("cross_entropy") == 1
    assert compared.complaints == []
    assert any("sort" in reason for reason in compared.reasons())


REFUSED, refused = registry()


@refused
def logits_are_returned(a, b, t):
    z = a @ b.T * t
    return own(z) + own(z.T), z


@refused
def columns_are_sorted(a, b, t):
    z = a @ b.T * t
    return own(z) + own(z.T) + jnp.sort(z, 0)[2].sum()


@refused
def the_columns_probabilities_weigh_something_else(a, b, t):
    z = a @ b.T * t
    return own(z) + (softmax(z, 0).T @ jnp.sin(a)).sum(0)[1]


@refused
def running_along_the_columns(a, b, t):
    z = a @ b.T * t
    return own(z) + lax.cumlogsumexp(z, 0).sum()


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_logits_themselves_is_left_alone(name):
    compared = compare(REFUSED[name], arguments())
    assert compared.counts("cross_entropy") == 0
    assert compared.complaints == []
    assert compared.reasons()


def test_labels_of_columns_do_not_count_within_groups_of_rows():
    """The weight's gradients are summed over the rows of each group: there a row's number is another one."""

    def loss(a, b, t):
        z = jnp.einsum("gnd,md->gnm", a.reshape(2, 3, D), b) * t
        down = jnp.take_along_axis(log_softmax(z.reshape(N, N), 0), ((EACH * 5) % N)[None], 0)
        return logsumexp(z, 2).mean() - down.mean()

    def grouped(a, b, t):
        return jax.vmap(jax.grad(loss, 1), (None, 0, None))(a, jnp.stack([b, b[::-1]]), t)

    assert compare(grouped, arguments(), gradients=False).complaints == []


def test_columns_of_some_rows():
    def loss(a, b, t):
        z = a @ b.T * t
        return own(z) + logsumexp(z[:4], 0).sum()

    assert compare(loss, arguments()).complaints == []
    assert compare(jax.value_and_grad(loss, (0, 1, 2)), arguments(), gradients=False).complaints == []


def test_one_hot_labels_of_columns_are_no_labels_of_rows():
    def loss(a, b, t):
        z = a @ b.T * t
        labels = one_hot((EACH * 5 + 1) % N, N)
        return -(labels * log_softmax(z, 0)).sum() - (labels * log_softmax(z, 1)).sum()

    compared = compare(loss, arguments())
    assert compared.counts("cross_entropy") == 1
    assert compared.complaints == []


def test_an_optimized_function_that_counts_rows_is_mapped_later():
    def loss(x, w):
        z = jnp.where(jnp.arange(N)[:, None] >= jnp.arange(N), x @ w, -1e9)
        return logsumexp(z, -1) - z[EACH, 0]

    x, w = array(3, N, D, seed=4), array(D, N, seed=5)
    optimized = optimized_like_a_user(loss)
    given = jax.vmap(optimized, (0, None))(x, w)
    assert optimized.report().counts()["cross_entropy"] == 1
    np.testing.assert_allclose(given, jax.vmap(loss, (0, None))(x, w), atol=1e-5)
    total = lambda f: lambda x, w: jax.vmap(f, (0, None))(x, w).sum()  # noqa: E731
    for a, b in zip(*(jax.grad(total(f), (0, 1))(x, w) for f in (optimized, loss)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


CLASSES = EACH % 3
SAME = (CLASSES[:, None] == CLASSES).astype(jnp.float32)


def supervised(others, bounded=True):
    """A supervised contrastive loss, whose exponentials are multiplied by ``others``: all but the row's own."""

    def loss(a):
        z = normalised(a) @ normalised(a).T / 0.1
        z -= lax.stop_gradient(z.max(1, keepdims=True)) if bounded else 0
        mask = SAME * (1 - jnp.eye(N))
        log_probabilities = z - jnp.log((jnp.exp(z) * others()).sum(1, keepdims=True))
        return -((mask * log_probabilities).sum(1) / mask.sum(1)).mean()

    return loss


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize(
    "others",
    [
        lambda: 1 - jnp.eye(N),
        lambda: (~jnp.eye(N, dtype=bool)).astype(jnp.float32),
        lambda: 1 - (1 - (CLASSES[:, None] == CLASSES).astype(jnp.float32)),
    ],
)
def test_exponentials_times_a_mask_of_zeros_and_ones_are_masked(others, bounded):
    compared = compare(jax.value_and_grad(supervised(others, bounded)), (array(N, D),), gradients=False)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1, compared.reasons()


@pytest.mark.parametrize("others", [lambda: 2 - jnp.eye(N), lambda: 1 - 0.5 * jnp.eye(N), lambda: jnp.cos(SAME)])
def test_exponentials_times_other_numbers_are_a_near_miss_that_says_so(others):
    optimized = optimized_like_a_user(supervised(others))
    optimized(array(N, D))
    (miss,) = optimized.report().near_misses
    assert (miss.op, miss.reason) == ("cross_entropy", "the exponentials are weighted")
    assert optimized.report().counts()["cross_entropy"] == 0


def two_products_side_by_side(a, b, queue):
    z = jnp.concatenate([a @ b.T, a @ queue.T], 1)
    return -(one_hot(EACH, z.shape[1]) * log_softmax(z)).sum(1).mean()


def test_of_logits_of_two_products_one_is_a_site_and_the_advice_helps_the_other():
    args = array(N, D, seed=1), array(N, D, seed=2), array(9, D, seed=3)
    compared = compare(two_products_side_by_side, args)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1
    (miss,) = compared.report.near_misses
    assert "waits for what another site computes" in miss.reason
    assert "concatenated weights" in miss.advice

    def advised(a, b, queue):
        z = a @ jnp.concatenate([b, queue]).T
        return -(one_hot(EACH, z.shape[1]) * log_softmax(z)).sum(1).mean()

    compared = compare(jax.value_and_grad(advised, (0, 1, 2)), args, gradients=False)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1


def test_negatives_of_each_query_that_have_gradients_are_a_near_miss():
    """A query of its own is multiplied by its negatives: their gradient is as large as the negatives themselves."""

    def loss(q, k, negatives):
        z = jnp.concatenate([(q * k).sum(-1, keepdims=True), jnp.einsum("nd,nmd->nm", q, negatives)], 1)
        return (logsumexp(z, 1) - z[:, 0]).mean()

    args = (array(4, 8, seed=1), array(4, 8, seed=2), array(4, 5, 8, seed=3))
    compared = compare(jax.value_and_grad(loss, (0, 1, 2)), args, gradients=False)
    assert compared.complaints == []
    (miss,) = (miss for miss in compared.report.near_misses if miss.op == "cross_entropy")
    assert "a vector gives the logits" in miss.reason


def test_a_loss_that_also_gives_the_joined_logits_is_a_near_miss_and_its_advice_helps():
    args = array(N, D, seed=1), array(N, D, seed=2), array(9, D, seed=3)

    def given(a, b, queue):
        z = jnp.concatenate([jnp.sum(a * b, -1, keepdims=True), a @ queue.T], 1) / 0.07
        return -log_softmax(z)[:, 0].mean(), z

    (miss,) = autopallas.explain(given, *args).near_misses
    assert "reads logits that concatenate puts together" in miss.reason
    assert "jnp.logaddexp" in miss.advice

    def advised(a, b, queue):
        positive, negative = jnp.sum(a * b, -1) / 0.07, a @ queue.T / 0.07
        return (jnp.logaddexp(positive, logsumexp(negative, 1)) - positive).mean()

    compared = compare(jax.value_and_grad(advised, (0, 1, 2)), args, gradients=False)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1


def test_probabilities_that_are_joined_without_a_loss_are_no_near_miss():
    optimized = optimized_like_a_user(lambda a, b: softmax(jnp.concatenate([a @ b.T, a], 1)))
    optimized(array(N, D, seed=1), array(N, D, seed=2))
    assert optimized.report().near_misses == ()


# --- Two views of each example, side by side -------------------------------------------------------------------------


def of_two_views(a, b):
    views = jnp.concatenate([normalised(a), normalised(b)])
    return views @ views.T / 0.5


def others_of_each(z):
    return jnp.where(jnp.eye(2 * N, dtype=bool), -1e9, z)


def diagonals_beside(a, b):
    z = of_two_views(a, b)
    positive = jnp.concatenate([jnp.diag(z, N), jnp.diag(z, -N)])
    return (logsumexp(others_of_each(z), 1) - positive).mean()


def rows_by_numbers(a, b):
    z = of_two_views(a, b)
    positive = jnp.concatenate([z[EACH, EACH + N], z[EACH + N, EACH]])
    total = (jnp.exp(z) * (1 - jnp.eye(2 * N))).sum(1)
    return -jnp.log(jnp.exp(positive) / total).mean()


def some_rows_alone(a, b):
    """Labels for three rows in the middle, one of which is out of range."""
    z = of_two_views(a, b)
    picked = z.at[jnp.arange(4, 7), jnp.array([1, 30, 5])].get(mode="fill", fill_value=0.25)
    return logsumexp(z, 1).mean() - picked.sum()


def two_labels_of_one_window(a, b):
    z = of_two_views(a, b)
    return logsumexp(z, 1).mean() - (z[EACH, EACH + N] * z[EACH, 2 * N - 1 - EACH]).mean()


TWO_VIEWS = [diagonals_beside, rows_by_numbers, some_rows_alone, two_labels_of_one_window]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("loss", TWO_VIEWS)
def test_elements_of_consecutive_rows_are_labels_of_these(loss, dtype):
    args = arguments(dtype)[:2]
    for function in (loss, jax.value_and_grad(loss, (0, 1))):
        compared = compare(function, args, gradients=False)
        assert compared.complaints == []
        assert compared.counts("cross_entropy") == 1, compared.reasons()


@pytest.mark.parametrize("labels", [jnp.uint8, jnp.int32])
def test_labels_of_consecutive_rows_in_any_dtype(labels):
    def loss(a, b):
        z = of_two_views(a, b)
        own = jnp.arange(N, 2 * N).astype(labels)
        return logsumexp(z, 1).mean() - z[jnp.arange(N).astype(labels), own].mean()

    compared = compare(jax.value_and_grad(loss, (0, 1)), arguments()[:2], gradients=False)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1


def rows_backwards(a, b):
    z = of_two_views(a, b)
    return logsumexp(z, 1).mean() - z[N - EACH, EACH].mean()


def one_row_again_and_again(a, b):
    z = of_two_views(a, b)
    return logsumexp(z, 1).mean() - z[jnp.zeros(N, int) + 3, EACH].mean()


@pytest.mark.parametrize("loss", [rows_backwards, one_row_again_and_again])
def test_rows_in_another_order_are_not_taken_for_consecutive_ones(loss):
    assert compare(jax.value_and_grad(loss, (0, 1)), arguments()[:2], gradients=False).complaints == []


def in_checkpointed_steps(loss):
    """A loss of several batches, one after the other: what each step computes alike is computed before the loop."""

    def total(batches, b):
        def one(total, a):
            return total + loss(a, b), None

        return lax.scan(jax.checkpoint(one), jnp.float32(0), batches)[0]

    return jax.value_and_grad(total, (0, 1))


def both_diagonals(a, b):
    z = of_two_views(a, b)
    return (logsumexp(z, -1) - jnp.concatenate([jnp.diag(z, N), jnp.diag(z, -N)])).mean()


def numbers_that_the_program_holds(a, b):
    z = of_two_views(a, b)
    rows = np.arange(N)
    return logsumexp(z, 1).mean() - z[jnp.asarray(rows), jnp.asarray(rows + N)].mean()


@pytest.mark.parametrize("loss", [both_diagonals, numbers_that_the_program_holds])
def test_indices_that_loops_are_given_are_known_within(loss):
    compared = compare(in_checkpointed_steps(loss), (array(3, N, D, seed=1), array(N, D, seed=2)), gradients=False)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1
    assert not compared.report.near_misses


@pytest.mark.parametrize("loss", [rows_backwards, one_row_again_and_again])
def test_rows_in_another_order_are_none_within_loops(loss):
    compared = compare(in_checkpointed_steps(loss), (array(3, N, D, seed=1), array(N, D, seed=2)), gradients=False)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 0
