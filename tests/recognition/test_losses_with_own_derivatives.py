"""Losses in a ``jax.custom_vjp`` to which logits of a product outside are given: found in any form, and right."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.nn import log_softmax, logsumexp, one_hot, softmax
from support.catalogue import array, registry
from support.compare import compare, optimized_like_a_user

import autopallas
from autopallas.patterns.advice import LOSSES_OF_A_RULE

N, D, V = 12, 5, 33
LABELS = jnp.arange(N) * 7 % V


def arguments(dtype=jnp.float32):
    """Rows x [N, D], weights w [D, V] and labels [N]."""
    x, w = (array(*shape, dtype=dtype, seed=seed, scale=0.8) for seed, shape in enumerate(((N, D), (D, V)), 1))
    return x, w, LABELS


def ruled(forward, backward):
    """A function with a derivative of its own; ``forward`` gives the losses and what is kept."""
    loss = jax.custom_vjp(lambda *operands: forward(*operands)[0])
    loss.defvjp(forward, backward)
    return loss


def ruled_by_itself(loss, backward):
    """A function with a derivative of its own, whose forward rule calls the function, and which keeps its operands."""
    own = jax.custom_vjp(loss)
    own.defvjp(lambda *operands: (own(*operands), operands), backward)
    return own


def picked(values, labels):
    return jnp.take_along_axis(values, labels[..., None], -1)[..., 0]


RULES, rule = registry()


def difference(kept, g):
    z, labels = kept
    return (g[:, None] * (softmax(z.astype(jnp.float32), -1) - one_hot(labels, V))).astype(z.dtype), None


_of_operands = ruled_by_itself(lambda z, labels: logsumexp(z, -1) - picked(z, labels), difference)
_of_rows_and_columns = ruled_by_itself(
    lambda z, labels: logsumexp(z, -1) - z[jnp.arange(len(labels)), labels], difference
)
_of_one_hot = ruled_by_itself(lambda z, labels: -(one_hot(labels, V) * log_softmax(z, -1)).sum(-1), difference)


@rule
def of_its_operands(z, labels):
    return _of_operands(z, labels)


@rule
def of_rows_and_columns(z, labels):
    return _of_rows_and_columns(z, labels)


@rule
def of_labels_as_rows(z, labels):
    return _of_one_hot(z, labels)


def _kept_probabilities(z, labels):
    logs = log_softmax(z.astype(jnp.float32), -1)
    return -picked(logs, labels), (jnp.exp(logs), labels, jnp.zeros((), z.dtype))


_of_probabilities = ruled(
    _kept_probabilities,
    lambda kept, g: ((g[:, None] * (kept[0] - one_hot(kept[1], V))).astype(kept[2].dtype), None),
)


@rule
def that_keeps_probabilities(z, labels):
    return _of_probabilities(z, labels)


def _kept_sum(z, labels):
    wide = z.astype(jnp.float32)
    total = logsumexp(wide, -1)
    return total - picked(wide, labels), (z, labels, total)


def _of_sum(kept, g):
    z, labels, total = kept
    p = jnp.exp(z.astype(jnp.float32) - total[:, None])
    return (g[:, None] * (p - one_hot(labels, V))).astype(z.dtype), np.zeros(labels.shape, jax.dtypes.float0)


_of_a_sum = ruled(_kept_sum, _of_sum)


@rule
def that_keeps_a_sum(z, labels):
    return _of_a_sum(z, labels)


@rule
def of_capped_logits(z, labels):
    return _of_a_sum(5 * jnp.tanh(z / 5), labels)


@rule
def of_shifted_labels(z, labels):
    return _of_operands(z, (labels + 1) % V)


FORMS, form = registry()


@form
def forward(loss):
    return loss


@form
def at_once(loss):
    return jax.value_and_grad(loss, (0, 1))


@form
def checkpointed(loss):
    return jax.value_and_grad(jax.checkpoint(lambda x, w, y: loss(jnp.tanh(x), w, y)), (0, 1))


@form
def in_checkpointed_chunks(loss):
    def chunks(x, w, y):
        body = jax.checkpoint(lambda total, rows: (total + loss(rows[0], w, rows[1]), None))
        return lax.scan(body, jnp.float32(0), (jnp.stack([x, x * 0.3]), jnp.stack([y, (y + 3) % V])))[0]

    return jax.value_and_grad(chunks, (0, 1))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", RULES)
def test_a_loss_is_found_and_right(name, form, dtype):
    function = FORMS[form](lambda x, w, y: RULES[name](x @ w, y).astype(jnp.float32).mean())
    compared = compare(function, arguments(dtype), gradients=form == "forward")
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1


def test_a_rule_keeps_its_derivative_where_the_program_has_no_gradient():
    """A gradient that is taken of the optimized function is that of the rule, here three times the loss's."""
    tripled = ruled_by_itself(
        lambda z, labels: logsumexp(z, -1) - picked(z, labels),
        lambda kept, g: (3 * g[:, None] * (softmax(kept[0], -1) - one_hot(kept[1], V)), None),
    )

    def loss(x, w, y):
        return tripled(x @ w, y).mean()

    optimized = optimized_like_a_user(loss)
    given, expected = (jax.grad(f, (0, 1))(*arguments()) for f in (optimized, loss))
    assert optimized.report().counts()["cross_entropy"] == 1
    for one, other in zip(given, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_backward_that_is_no_derivative_is_the_programs():
    reduced = ruled_by_itself(
        lambda z, labels: logsumexp(z, -1) - picked(z, labels),
        lambda kept, g: (g[:, None] * (0.5 * softmax(kept[0], -1) - one_hot(kept[1], V)) + 0.01, None),
    )
    step = jax.value_and_grad(lambda x, w, y: reduced(x @ w, y).mean(), (0, 1))
    compared = compare(step, arguments(), gradients=False)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1


def test_an_index_inside_of_a_rule_inside_of_another_rule():
    outer = ruled_by_itself(lambda z, labels: 2 * _of_operands(z, labels), lambda kept, g: difference(kept, 2 * g))
    compared = compare(lambda x, w, y: outer(x @ w, y).mean(), arguments())
    assert compared.complaints == []


def test_a_rule_that_adds_up_losses_is_said():
    mean = ruled_by_itself(
        lambda z, labels: (logsumexp(z, -1) - picked(z, labels)).mean(),
        lambda kept, g: difference(kept, jnp.full(N, g / N)),
    )
    report = autopallas.explain(lambda x, w, y: mean(x @ w, y), *arguments())
    assert [miss.advice for miss in report.near_misses] == [LOSSES_OF_A_RULE]


REPLACED, replaced = registry()
"""Gradients of probabilities p [N, V] of which elements are replaced."""


@replaced
def by_the_derivative(p, labels):
    return p.at[jnp.arange(N), labels].set(picked(p, labels) - 1)


@replaced
def by_a_number(p, labels):
    return p.at[jnp.arange(N), labels].set(-0.5)


@replaced
def by_what_is_not_finite(p, labels):
    return p.at[jnp.arange(N), labels].set(jnp.where(labels > 20, jnp.inf, jnp.nan))


@replaced
def of_labels_that_are_clipped(p, labels):
    return p.at[jnp.arange(N), labels + 20].set(-0.5, mode="clip")


@replaced
def of_labels_that_are_dropped(p, labels):
    return p.at[jnp.arange(N), labels + 20].set(-0.5, mode="drop")


def step_of_replaced(name, rows=N, columns=V):
    """A step of a loss whose gradient has replaced elements and of a plain loss, and its arguments."""
    replace = (REPLACED | REPLACED_TWICE)[name]
    own = ruled_by_itself(
        lambda z, labels: logsumexp(z, -1) - picked(z, labels),
        lambda kept, g: (g[:, None] * replace(softmax(kept[0], -1), kept[1]), None),
    )
    x, w, y = arguments()
    y = y % columns

    def loss(x, w, y):
        return own(x @ w, y).mean() - picked(log_softmax(jnp.sin(x) @ w, -1), y).mean()

    return jax.value_and_grad(loss, (0, 1)), (x[:rows], w[:, :columns], y[:rows])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", REPLACED)
def test_elements_that_a_gradient_replaces_are_found_and_right(name):
    compared = compare(*step_of_replaced(name), gradients=False)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 2


def test_elements_that_a_gradient_replaces_are_found_without_another_selection():
    own = ruled_by_itself(
        lambda z, labels: logsumexp(z, -1) - (one_hot(labels, V) * z).sum(-1),
        lambda kept, g: (g[:, None] * softmax(kept[0], -1).at[jnp.arange(N), kept[1]].set(-0.5), None),
    )
    compared = compare(
        jax.value_and_grad(lambda *a: own(a[0] @ a[1], a[2]).mean(), (0, 1)), arguments(), gradients=False
    )
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1


REPLACED_TWICE, twice = registry()
"""Gradients of probabilities p [4, 8] of which some elements are written to more than once."""


@twice
def at_rows_that_are_clipped(p, labels):
    return p.at[jnp.arange(4), labels].add(-1).at[jnp.arange(8), jnp.full(8, 3)].set(2.0, mode="clip")


def _at_windows(p, labels, first, second, updates):
    numbers = lax.ScatterDimensionNumbers((1, 2), (), (0, 1))
    indices = jnp.concatenate([first[:, None], second[:, None]], 1)
    return lax.scatter(p.at[jnp.arange(4), labels].add(-1), indices, updates, numbers, mode="clip")


@twice
def in_windows_of_columns(p, labels):
    return _at_windows(p, labels, jnp.zeros(4, jnp.int32), jnp.arange(4), jnp.full((4, 1, 2), 2.0))


@twice
def in_windows_of_rows(p, labels):
    return _at_windows(p, labels, jnp.arange(4), jnp.zeros(4, jnp.int32), jnp.full((4, 2, 1), 2.0))


@pytest.mark.parametrize("name", REPLACED_TWICE)
def test_elements_that_are_replaced_twice_are_not_added_up(name):
    step, given = step_of_replaced(name, 4, 8)
    assert compare(step, given, gradients=False).complaints == []


def test_infinite_logits_times_scattered_labels_are_assumed_not_to_be():
    """A zero times an infinity is NaN as the program is written; where nothing may be assumed, it stays so."""

    def step(x, w, y):
        z = jnp.where(jnp.arange(V) % 5 == 4, -jnp.inf, x @ w)
        labels = jnp.zeros_like(z).at[jnp.arange(N), y].add(1)
        return (logsumexp(z, -1) - (labels * z).sum(-1)).mean(), (softmax(z, -1) - labels) @ w.T

    optimized = optimized_like_a_user(step)
    optimized(*arguments())
    assert optimized.report().counts()["cross_entropy"] == 1
    assert "zeros of one-hot labels" in str(optimized.report())
    refused = optimized_like_a_user(step, assume_finite=False)
    assert np.isnan(refused(*arguments())[0])
