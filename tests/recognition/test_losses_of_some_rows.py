"""Losses of some rows of the logits, which are selected before or behind the softmax, in every way of public code."""

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

from autopallas.graph.flatten import flatten
from autopallas.graph.row_selections import move_selections
from recognition.losses import picked
from recognition.sequences import B, D, T, V, arguments

ROWS, rows = registry()


@rows
def all_but_the_last(w, x, y):
    return -picked(log_softmax((x @ w)[:, :-1]), y[:, 1:]).mean()


@rows
def log_probabilities_but_the_last(w, x, y):
    return -picked(log_softmax(x @ w)[:, :-1], y[:, 1:]).mean()


@rows
def losses_that_are_padded_and_weighted(w, x, y):
    losses = -picked(log_softmax((x @ w)[:, :-1]), y[:, 1:])
    return (jnp.pad(losses, ((0, 0), (0, 1))) * jnp.sin(x[..., 0])).sum()


@rows
def every_third(w, x, y):
    return -picked(log_softmax((x @ w)[:, 1::3]), y[:, 1::3]).mean()


@rows
def widened_and_capped_before(w, x, y):
    z = 30 * jnp.tanh((x @ w).astype(jnp.float32) / 30)
    return -picked(log_softmax(z[..., :-1, :]), y[:, 1:]).mean()


@rows
def widened_and_capped_behind(w, x, y):
    z = (x @ w)[:, :-1].astype(jnp.float32)
    return -picked(log_softmax(30 * jnp.tanh(z / 30)).reshape(-1, V), y[:, 1:].reshape(-1)).mean()


@rows
def of_rows_that_were_merged(w, x, y):
    return -picked(log_softmax((x.reshape(-1, D) @ w).reshape(B, T, V)[:, :-1]), y[:, 1:]).mean()


@rows
def normaliser_and_pick_apart(w, x, y):
    z = x @ w
    return (logsumexp(z, -1)[:, :-1] - picked(z[:, :-1], y[:, 1:])).mean()


@rows
def weighted(w, x, y):
    z, counts = (x @ w)[:, :-1], y[:, 1:] > 2
    return -jnp.where(counts, picked(log_softmax(z), y[:, 1:]), 0).sum() / counts.sum()


@rows
def one_hot_labels(w, x, y):
    return -(one_hot(y[:, 1:], V) * log_softmax((x @ w)[:, :-1])).sum(-1).mean()


@rows
def with_a_bias(w, x, y):
    return -picked(log_softmax((x @ w[:, :] + w[0])[:, :-1]), y[:, 1:]).mean()


@rows
def a_window_whose_start_is_an_argument(w, x, y):
    start = y[0, 1] % 3
    z = lax.dynamic_slice_in_dim(x @ w, start, 3, 1)
    return -picked(log_softmax(z), lax.dynamic_slice_in_dim(y, start, 3, 1)).mean()


@rows
def rows_by_number(w, x, y):
    chosen = jnp.array([1, 4, 2])
    return -picked(log_softmax((x @ w)[:, chosen]), y[:, chosen]).mean()


@rows
def rows_by_number_twice(w, x, y):
    chosen = jnp.array([1, 4, 4, 1])
    return -picked(log_softmax((x.reshape(-1, D) @ w)[chosen]), y.reshape(-1)[chosen]).mean()


@rows
def rows_by_a_static_mask(w, x, y):
    shown = np.arange(T) % 2 == 1
    return -picked(log_softmax((x @ w)[:, shown]), y[:, shown]).mean()


@rows
def the_last_alone(w, x, y):
    return -picked(log_softmax((x @ w)[:, -1:]), y[:, -1:]).mean()


@rows
def rolled_logits(w, x, y):
    return -(picked(log_softmax(jnp.roll(x @ w, 1, 1)), y) * (jnp.arange(T) > 0)).sum()


@rows
def rolled_the_other_way_by_two(w, x, y):
    return -picked(log_softmax(jnp.roll(3 * jnp.tanh(x @ w), -2, 1)), y).mean()


@rows
def rolled_log_probabilities(w, x, y):
    return -(picked(jnp.roll(log_softmax(x @ w), 1, 1), y) * (jnp.arange(T) > 0)).sum()


@rows
def rolled_labels(w, x, y):
    shown = jnp.arange(T) < T - 1
    return -(picked(log_softmax(x @ w), jnp.roll(y, -1, 1)) * shown).sum() / shown.sum()


@rows
def taken_rows(w, x, y):
    return -picked(log_softmax(jnp.take(x @ w, jnp.array([1, 4, 2]), axis=1)), y[:, :3]).mean()


@rows
def taken_rows_that_may_be_out_of_range(w, x, y):
    chosen = y[0, :4] * 2
    z = jnp.take(x.reshape(-1, D) @ w, chosen, axis=0)
    return -jnp.where(chosen < B * T, picked(log_softmax(z), y[1, :4]), 0).sum()


@rows
def taken_rows_with_a_fill(w, x, y):
    z = jnp.take(x @ w, jnp.array([1, 9, 2]), axis=1, fill_value=-1e9)
    return -picked(log_softmax(z), y[:, :3]).sum()


@rows
def taken_log_probabilities_out_of_range_are_replaced(w, x, y):
    chosen = jnp.array([1, 9, 2])
    values = jnp.where((chosen < T)[:, None], jnp.take(log_softmax(x @ w), chosen, axis=1), 0.0)
    return -picked(values, y[:, :3]).sum()


PLACES = jnp.array([[4, 1, 1], [0, 5, 2]])
"""Positions in each sequence, one of them twice."""


def per_sequence(y):
    return jnp.take_along_axis(y, PLACES, 1)


@rows
def along_each_sequence(w, x, y):
    return -picked(log_softmax(jnp.take_along_axis(x @ w, PLACES[..., None], 1)), per_sequence(y)).mean()


@rows
def log_probabilities_along_each_sequence(w, x, y):
    z = jnp.take_along_axis(log_softmax(x @ w), PLACES[..., None], 1)
    return -picked(z, per_sequence(y)).mean()


@rows
def along_each_sequence_where_there_are_as_many(w, x, y):
    """Positions that do not exist give NaN, which the mask leaves out."""
    places = PLACES + jnp.array([[0, 9, 0], [0, 0, 4]])
    z = jnp.take_along_axis(x @ w, places[..., None], 1)
    return -jnp.where(places < T, picked(log_softmax(z), per_sequence(y)), 0.0).sum()


@rows
def by_sequence_and_position(w, x, y):
    return -picked(log_softmax((x @ w)[jnp.arange(B)[:, None], PLACES]), per_sequence(y)).mean()


@rows
def the_last_of_each_sequence(w, x, y):
    return -picked(log_softmax((x @ w)[jnp.arange(B), jnp.array([3, 5])]), y[:, 0]).mean()


@rows
def the_last_of_each_sequence_with_narrow_numbers(w, x, y):
    z = (x @ w)[jnp.arange(B), jnp.array([3, -1], jnp.int8)]
    return -picked(log_softmax(z), y[:, 0]).mean()


@rows
def one_label_of_the_last_of_each_sequence(w, x, y):
    return -log_softmax(x @ w)[jnp.arange(B), jnp.array([3, 5]), y[:, 0]].mean()


@rows
def labels_and_rows_out_of_range_with_a_fill(w, x, y):
    values = log_softmax(x @ w).at[jnp.arange(B), jnp.array([3, 8]), y[:, 0] + jnp.array([20, 0])]
    return -values.get(mode="fill", fill_value=-7.0).sum()


@rows
def labels_and_rows_out_of_range_that_are_clipped(w, x, y):
    values = log_softmax(x @ w).at[jnp.arange(B), jnp.array([3, 8]), y[:, 0] + jnp.array([20, 0])]
    return -values.get(mode="clip").sum()


@rows
def labels_of_some_merged_rows(w, x, y):
    chosen = jnp.array([7, 1, 7])
    return -log_softmax(x @ w).reshape(-1, V)[chosen, y.reshape(-1)[chosen]].mean()


@rows
def merged_rows_by_number(w, x, y):
    chosen = jnp.array([7, 0, 11, 3])
    return -picked(log_softmax((x @ w).reshape(-1, V)[chosen]), y.reshape(-1)[chosen]).mean()


@rows
def merged_rows_of_a_slice(w, x, y):
    return -picked(log_softmax((x @ w).reshape(-1, V)[2:9]), y.reshape(-1)[2:9]).mean()


@rows
def merged_rows_where_a_mask_is(w, x, y):
    chosen = jnp.nonzero((y % 3 == 0).reshape(-1), size=6, fill_value=0)[0]
    return -picked(log_softmax((x @ w).reshape(-1, V)[chosen]), y.reshape(-1)[chosen]).mean()


@rows
def sorted_merged_rows(w, x, y):
    order = jnp.argsort(y.reshape(-1))
    return -picked(log_softmax((3 * jnp.tanh(x @ w)).reshape(-1, V)[order]), y.reshape(-1)[order]).mean()


@rows
def one_of_each_example(w, x, y):
    z = jax.vmap(lambda z, place: lax.dynamic_index_in_dim(z, place, 0, False))(x @ w, jnp.array([2, 99]))
    return -picked(log_softmax(z), y[:, 0]).mean()


@rows
def some_of_each_example(w, x, y):
    return -picked(log_softmax(jax.vmap(lambda z, places: z[places])(x @ w, PLACES)), per_sequence(y)).mean()


@rows
def labels_of_rows_from_the_end(w, x, y):
    return -log_softmax((x @ w).reshape(-1, V))[jnp.arange(B * T)[::-1], y.reshape(-1)].mean()


@rows
def with_a_bias_and_by_sequence_and_position(w, x, y):
    z = x @ w + jnp.sin(jnp.arange(V))
    return -picked(log_softmax(z[jnp.arange(B)[:, None], PLACES]), per_sequence(y)).mean()


@rows
def vocabulary_in_front(w, x, y):
    z = jnp.einsum("btd,dv->vbt", x, w)
    return -log_softmax(z[:, jnp.arange(B), jnp.array([3, 5])], 0)[y[:, 0], jnp.arange(B)].mean()


def windows(array, starts, size=3):
    """So many rows of each sequence, from its own start on."""
    return jax.vmap(lambda rows, start: lax.dynamic_slice_in_dim(rows, start, size, 0))(array, starts)


@rows
def a_window_of_each_sequence(w, x, y):
    starts = y[:, 1] % 4
    return -picked(log_softmax(windows(x @ w, starts)), windows(y, starts)).mean()


@rows
def a_window_of_log_probabilities_of_each_sequence(w, x, y):
    starts = y[:, 1] % 4
    return -picked(windows(log_softmax(x @ w), starts), windows(y, starts)).mean()


@rows
def windows_beyond_the_end(w, x, y):  # clamped, in the derivative too
    starts = y[:, 1] + 2
    return -picked(log_softmax(windows(x @ w, starts)), windows(y, starts)).mean()


@rows
def a_window_under_vmap(w, x, y):
    def one(x, y):
        z = lax.dynamic_slice_in_dim(x @ w, y[1] % 4, 2, 0)
        return -picked(log_softmax(z), lax.dynamic_slice_in_dim(y, y[1] % 4, 2, 0)).mean()

    return jax.vmap(one)(x, y).mean()


@rows
def windows_that_are_filled_beyond_the_end(w, x, y):
    numbers = lax.GatherDimensionNumbers((1, 2), (), (1,), (0,), (0,))
    starts = jnp.array([[2], [5]])
    z = lax.gather(x @ w, starts, numbers, (1, 3, V), mode="fill", fill_value=0)
    return -(picked(log_softmax(z), y[:, :3]) * jnp.array([[1, 2, 3], [0, 1, 4]])).mean()


@rows
def windows_of_one_sequence(w, x, y):
    starts = jnp.array([3, 0])
    z = jax.vmap(lambda start: lax.dynamic_slice_in_dim(x[0] @ w, start, 2, 0))(starts)
    return -picked(log_softmax(z), y[:, :2]).mean()


@rows
def picked_twice(w, x, y):
    z = (x.reshape(-1, D) @ w)[jnp.array([1, 4, 4, 1, 7])][jnp.array([0, 2, 3])]
    return -picked(log_softmax(z), y.reshape(-1)[:3]).mean()


@rows
def sliced_twice(w, x, y):
    return -picked(log_softmax((x @ w)[:, :-1][:, 1:]), y[:, 2:]).mean()


@rows
def sliced_and_then_one_of_each(w, x, y):
    return -picked(log_softmax((x @ w)[:, :-1][jnp.arange(B), y[:, 0] % 5]), y[:, 1]).mean()


@rows
def sliced_before_and_behind_a_softmax(w, x, y):
    z = 30 * jnp.tanh((x @ w)[:, 1:] / 30)
    return -picked(log_softmax(z)[:, :-1], y[:, 2:]).mean()


@rows
def in_reverse(w, x, y):
    return -picked(log_softmax((x @ w)[:, ::-1]), y).mean()


@rows
def log_probabilities_in_reverse(w, x, y):
    return -picked(jnp.flip(log_softmax(x @ w), 1), y).mean()


@rows
def in_reverse_without_the_last(w, x, y):
    return -picked(log_softmax((x @ w)[:, ::-1][:, 1:]), y[:, 1:]).mean()


@rows
def in_reverse_under_vmap(w, x, y):
    return jax.vmap(lambda x, y: -picked(log_softmax(jnp.flip(x @ w, 0)), y).mean())(x, y).mean()


@pytest.mark.parametrize("name", ROWS)
def test_losses_of_some_rows_are_found_forward_and_in_train_steps(name):
    compared = compare(ROWS[name], arguments())
    assert compared.counts("cross_entropy") == 1, compared.reasons()
    assert compared.complaints == []
    report = check(jax.value_and_grad(ROWS[name], (0, 1)), arguments(), op="cross_entropy")
    assert report.near_misses == ()


@pytest.mark.parametrize("transform", ["vmap", "scan", "checkpoint"])
def test_losses_of_some_rows_under_transforms(transform):
    loss = ROWS["all_but_the_last"]
    w, x, y = arguments()

    def total(w, x, y):
        if transform == "vmap":
            return jax.vmap(loss, (None, 0, 0))(w, x[:, None], y[:, None]).mean()
        if transform == "checkpoint":
            return jax.checkpoint(loss)(w, x, y)
        parts = x[:, None], y[:, None]
        return lax.scan(lambda c, part: (c + loss(w, *part), None), 0.0, parts)[0] / B

    check(jax.value_and_grad(total, (0, 1)), (w, x, y), op="cross_entropy")


@pytest.mark.parametrize("name", ["all_but_the_last", "log_probabilities_but_the_last"])
def test_the_rows_that_are_left_out_are_assumed_finite_where_they_are_multiplied_by_zeros(name):
    step = jax.value_and_grad(ROWS[name], (0, 1))
    optimized = optimized_like_a_user(step, assume_finite=False)
    w, x, y = arguments()
    x = x.at[0, -1, 0].set(jnp.nan)
    for given, wanted in zip(jax.tree.leaves(optimized(w, x, y)), jax.tree.leaves(step(w, x, y)), strict=True):
        np.testing.assert_allclose(given, wanted, atol=1e-6)
    assert not any("leaves out" in text for site in optimized.report().sites for text in site.assumptions)
    optimized = optimized_like_a_user(step)
    jax.jit(optimized).lower(*arguments())
    (site,) = optimized.report().sites
    assert any("leaves out" in assumption for assumption in site.assumptions)
    optimized = optimized_like_a_user(ROWS[name])
    jax.jit(optimized).lower(*arguments())
    assert optimized.report().sites[0].assumptions == ()


def test_rows_that_are_promised_in_range_and_are_not():
    """Indexing clips, and its derivative drops what was clipped: so in a train step.  A site that is differentiated
    from outside does not know, and says so."""

    def loss(w, x, y):
        z = (x @ w)[jnp.arange(B)[:, None], PLACES + jnp.array([[0, 9, 0], [0, 0, 4]])]
        return -picked(log_softmax(z), per_sequence(y)).mean()

    assert check(jax.value_and_grad(loss, (0, 1)), arguments(), op="cross_entropy").sites[0].assumptions == (
        "what the loss leaves out, rows of activations and of logits, is finite",
    )
    (assumption,) = check(loss, arguments(), ("forward",), op="cross_entropy").sites[0].assumptions
    assert "PROMISE_IN_BOUNDS" in assumption


@pytest.mark.parametrize("divided", [False, True])
def test_rows_of_several_axes_are_not_merged_where_these_are_divided(divided):
    program = jax.make_jaxpr(ROWS["by_sequence_and_position"])(*arguments())
    shapes = {e.outvars[0].aval.shape for e in move_selections(flatten(program), divided=divided).equations}
    assert ((B, T, V) in shapes) == divided


def _gated(w, x, rates):
    decays = jnp.exp(-jax.nn.softplus(rates) * jax.nn.sigmoid(x @ w))
    pairs = decays, x @ w * jnp.sqrt(1 - decays**2)
    return lax.associative_scan(lambda one, other: (one[0] * other[0], other[0] * one[1] + other[1]), pairs, axis=1)[1]


@pytest.mark.parametrize("trained", [False, True])
def test_no_slice_of_gates_that_are_no_softmax_is_tried(trained, monkeypatch):
    """A scan takes some hundred slices, each of which was computed anew before it was given up."""
    program = jax.grad(lambda *given: _gated(*given).sum(), (0, 1, 2)) if trained else _gated
    body = flatten(jax.make_jaxpr(program)(*arguments()[:2], jnp.ones(V)))
    before, computed = list(body.equations), []
    monkeypatch.setattr("autopallas.compat.make_jaxpr", lambda *given: computed.append(given))
    assert {"exp", "slice", "dot_general"} <= {e.primitive.name for e in before}
    assert move_selections(body).equations == before
    assert not computed


LOOKALIKES, lookalike = registry()


@lookalike
def logits_of_all_rows_are_returned(w, x, y):
    z = x @ w
    return -picked(log_softmax(z[:, :-1]), y[:, 1:]).mean(), z


@lookalike
def a_part_of_the_vocabulary_as_well(w, x, y):
    z = x @ w
    return (logsumexp(z[:, :-1], -1) - picked(z[:, :-1], y[:, 1:])).mean() + jnp.sort(z[..., :5]).sum()


@lookalike
def two_losses_of_different_rows_share_the_logits(w, x, y):
    z = x @ w
    first, second = z[:, :3], z[:, 2:]
    return -picked(log_softmax(first), y[:, :3]).mean() - picked(log_softmax(second), y[:, 2:]).mean(), z[0, 0]


@lookalike
def rolled_and_as_they_are(w, x, y):
    z = x @ w
    return -picked(log_softmax(jnp.roll(z, 1, 1)), y).mean() - picked(log_softmax(z), y).mean()


@lookalike
def more_rows_than_there_are(w, x, y):
    chosen = jnp.arange(B * T + 1) % (B * T)
    return -picked(log_softmax((x @ w).reshape(-1, V)[chosen]), y.reshape(-1)[chosen]).mean()


@lookalike
def rows_that_the_logits_choose(w, x, y):
    z = x @ w
    chosen = jnp.argmax(z[..., 0], 1)
    return -picked(log_softmax(z[jnp.arange(B), chosen]), y[:, 0]).mean()


@lookalike
def parts_that_overlap(w, x, y):
    z = x @ w
    return -picked(log_softmax(jnp.concatenate([z[:, 2:], z[:, 1:3]], 1)), y).mean()


@lookalike
def parts_of_two_products(w, x, y):
    z = jnp.concatenate([(x @ w)[:, 2:], (jnp.sin(x) @ w)[:, :2]], 1)
    return -picked(log_softmax(z), y).mean()


@lookalike
def more_windows_than_there_are_rows(w, x, y):
    starts = jnp.array([0, 1, 0, 2])
    z = jax.vmap(lambda start: lax.dynamic_slice_in_dim((x @ w)[0], start, 3, 0))(starts)
    return -picked(log_softmax(z), jnp.stack([y[0, :3]] * 4)).mean()


@lookalike
def in_reverse_and_as_they_are(w, x, y):
    z = x @ w
    return -picked(log_softmax(z[:, ::-1]), y).mean() - picked(log_softmax(z), y).mean()


@pytest.mark.parametrize("name", LOOKALIKES)
def test_nothing_is_computed_twice_for_the_sake_of_a_selection(name):
    compared = compare(LOOKALIKES[name], arguments())
    assert compared.counts("cross_entropy") == 0
    assert compared.complaints == []


def test_a_slice_of_the_vocabulary_is_no_slice_of_rows():
    def loss(w, x, y):
        return -picked(log_softmax((x @ w)[..., :7]), y % 7).mean()

    compared = compare(loss, arguments())
    assert compared.complaints == []
    check(jax.value_and_grad(loss, (0, 1)), arguments(), op="cross_entropy")


@pytest.mark.parametrize("columns", ["a window of each row", "in reverse"])
def test_columns_are_no_rows(columns):
    """Each row has other columns; or all rows have the same ones in reverse, which are columns of the weight."""

    def loss(w, x, y):
        z = (x @ w).reshape(-1, V)
        z = z[:, ::-1] if columns == "in reverse" else windows(z, y.reshape(-1) % 4, 7)
        return -picked(log_softmax(z), y.reshape(-1) % 7).mean()

    for function in (loss, jax.value_and_grad(loss, (0, 1))):
        compared = compare(function, arguments())
        assert compared.complaints == []
        assert compared.counts("cross_entropy") == (columns == "in reverse")


REARRANGED, rearranged = registry()


@rearranged
def padded(w, x, y):
    z = jnp.pad((x @ w)[:, :-1], ((0, 0), (0, 1), (0, 0)))
    return -(picked(log_softmax(z), y) * (jnp.arange(T) < T - 1)).sum()


@rearranged
def joined(w, x, y):
    z = x @ w
    return -picked(log_softmax(jnp.concatenate([z[:, :3], z[:, 3:]], 1)), y).mean()


@rearranged
def reversed_along_two_axes(w, x, y):
    return -picked(log_softmax(jnp.flip(x @ w, (0, 1))), y).mean()


@rearranged
def sorted_columns(w, x, y):
    return -picked(log_softmax(jnp.sort(x @ w)), y).mean()


@pytest.mark.parametrize("name", REARRANGED)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "train step"])
def test_logits_that_are_rearranged_are_no_silent_miss(name, backward):
    function = jax.value_and_grad(REARRANGED[name], (0, 1)) if backward else REARRANGED[name]
    optimized = optimized_like_a_user(function)
    jax.jit(optimized).lower(*arguments())
    report = optimized.report()
    assert report.counts()["cross_entropy"] == 0
    (miss,) = [miss for miss in report.near_misses if miss.op == "cross_entropy"]
    assert "loss reads" in miss.reason
    assert "before the product" in miss.advice


def test_scores_that_are_rearranged_are_no_loss():
    """A skewed product of queries and positions, as relative attention has it, and an embedding that is gathered."""

    def attend(q, k, v):
        skewed = jnp.pad(q @ k.T, ((0, 0), (1, 0))).reshape(-1)[T:].reshape(T, T)
        return softmax(skewed) @ v[jnp.argsort(v[:, 0])]

    optimized = optimized_like_a_user(attend)
    jax.jit(optimized).lower(*(array(T, n, seed=n) for n in (D, D, D)))
    assert [miss for miss in optimized.report().near_misses if miss.op == "cross_entropy"] == []
