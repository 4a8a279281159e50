"""Mixtures by gathers, selections, intervals and loops are done for the chosen experts; look-alikes are not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support import mixtures
from support.compare import compare, compiled, optimized_like_a_user
from support.mixtures import E, K, P, T, X, at, expert, one_einsum, route, scattered_weights, sum_after_a_product
from support.mixtures_written import KINDS, SITES, collected, everyone, sorted_rows

OP = "grouped_matmul"
FOUND = [f for kind in ("picked", "gathered", "intervals", "switches", "loops") for f in KINDS[kind]]
FOUND += KINDS["slots"][:4]


def found(function, args=(P, X), count=1, **options):
    compared = compare(function, args, **options)
    assert compared.complaints == []
    assert compared.counts(OP) == count, compared.reasons()
    return compared.report


@pytest.mark.parametrize("function", FOUND, ids=lambda f: f.__name__)
def test_each_is_found_and_exact_in_its_derivative_too(function):
    report = found(function, count=SITES.get(function, 1))
    assert not [miss for miss in report.near_misses if miss.op == OP]


# ---------------------------------------------------------------------- one product


def weightless(p, x):
    return jnp.sum(jnp.einsum("td,edf->tef", x, p["gate"]) * jax.nn.one_hot(best(p, x), E)[..., None], 1)


def picked_of_all(p, x):
    return jnp.einsum("td,edf->tef", x, p["gate"])[jnp.arange(T), best(p, x)]


def matrix_of_each_token(p, x):
    return jnp.einsum("td,tdf->tf", x, p["gate"][best(p, x)])


def weighted_afterwards(p, x):
    return matrix_of_each_token(p, x) * jnp.max(jax.nn.softmax(x @ p["router"]), -1, keepdims=True)


def one_after_the_other(p, x):
    chosen = best(p, x)[:, None]
    return sum(jnp.where(chosen == e, x @ p["gate"][e], 0) for e in range(E))


def of_slots(p, x):
    mask = jax.nn.one_hot(best(p, x), E, dtype=jnp.int32)
    place = jnp.sum(jnp.cumsum(mask, 0) * mask, -1) - 1
    room = 1 + T // 2
    held = (mask * (place < room)[:, None])[..., None] * jax.nn.one_hot(place, room, dtype=jnp.int32)[:, None]
    held = held.astype(x.dtype)
    y = jnp.einsum("ecd,edf->ecf", jnp.einsum("tec,td->ecd", held, x), p["gate"])
    return jnp.einsum("tec,ecf->tf", held, y)


@pytest.mark.parametrize(
    "function",
    [weightless, picked_of_all, matrix_of_each_token, weighted_afterwards, one_after_the_other, of_slots],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_experts_of_one_product_are_trained_as_one_site(function, checkpointed):
    """Nothing but the sum reads what the experts compute, and their backward reads tokens and matrices alone."""
    inner = jax.checkpoint(function) if checkpointed else function
    step = jax.value_and_grad(lambda p, x: jnp.sum(jnp.sin(inner(p, x))), (0, 1))
    (site,) = (site for site in found(step, gradients=False).sites if site.op == OP)
    assert site.direction == "forward+backward"


def test_matrices_that_are_not_trained_have_no_gradient():
    step = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(matrix_of_each_token(P, x))))
    (site,) = (site for site in found(step, (X,), gradients=False).sites if site.op == OP)
    assert site.direction == "forward+backward"


# ---------------------------------------------------------------------- variations


def best(p, x):
    return jnp.argmax(x @ p["router"], -1)


def gathered(p, x, chosen, down=None):
    """[..., D], for rows that choose one expert each."""
    h = jax.nn.silu(jnp.einsum("...d,...df->...f", x, p["gate"][chosen]))
    return jnp.einsum("...f,...fd->...d", h, p["down"][chosen if down is None else down])


def of_some_tokens(p, x):
    chosen = best(p, x)
    return jnp.einsum("td,tdf->tf", x[2:9], p["gate"][chosen][2:9])


def one_expert_twice(p, x):
    """Each choice counts, of the same expert too."""
    chosen = jnp.stack([best(p, x), best(p, x)], 1)
    h = jnp.tanh(jnp.einsum("td,tkdf->tkf", x, p["gate"][chosen]))
    return jnp.einsum("tkf,tkfd->td", h, p["down"][chosen])


def rows_of_each_choice(p, x):
    weights, chosen = route(p, x)
    rows = jnp.stack([x, x[::-1]], 1) * weights[..., None]
    return gathered(p, rows, chosen)


def two_indices(p, x):
    """The second product has an expert of its own: that is another mixture."""
    return gathered(p, x, best(p, x), best(p, -x))


def every_token_for_each(p, x):
    return jnp.einsum("sd,tdf->tsf", x[:5], p["gate"][best(p, x)])


def cast_matrices(p, x):
    chosen = best(p, x)
    return jnp.einsum("td,tdf->tf", x, p["gate"].astype(jnp.bfloat16)[chosen].astype(jnp.float32))


def picked_transposed(p, x):
    y = jnp.einsum("tef,efd->det", mixtures.hidden(p, x), p["down"])
    return jnp.take_along_axis(y, best(p, x)[None, None], axis=1)[:, 0].T


def a_sequence_each(p, x):
    x = x.reshape(3, 4, -1)
    own = jnp.argmax(x.mean(1) @ p["router"], -1)
    return jnp.einsum("bsd,bdf->bsf", x, p["gate"][own])


def picked_by_sorted_numbers(p, x):
    weights, chosen = route(p, x)
    order = jnp.argsort(chosen.ravel())
    rows, own = x[order // K], chosen.ravel()[order]
    return collected(gathered(p, rows, own), jnp.argsort(order), weights)


def ends_by_addition(p, x):
    rows, back, counts, weights = sorted_rows(p, x)
    starts = jnp.cumsum(counts) - counts
    position, ends = jnp.arange(rows.shape[0]), starts + counts
    mine = (position < ends[:, None]) & (position >= starts[:, None])
    return collected(
        jnp.einsum("etd,et->td", jax.vmap(expert, (0, None))(at(p, slice(None)), rows), mine), back, weights
    )


def bounds_in_one_array(p, x):
    rows, back, counts, weights = sorted_rows(p, x)
    bounds = jnp.concatenate([jnp.zeros(1, counts.dtype), jnp.cumsum(counts)])
    position = jnp.arange(rows.shape[0])[:, None]
    mine = (bounds[:-1] <= position) & (position < bounds[1:])
    return collected(
        jnp.einsum("etd,te->td", jax.vmap(expert, (0, None))(at(p, slice(None)), rows), mine), back, weights
    )


def selected_in_another_order(p, x):
    chosen, out = best(p, x)[:, None], jnp.zeros_like(x)
    for e in (2, 0, 3, 1):
        out = jnp.where(chosen == e, expert(at(p, e), x), out)
    return out


def fori_loop_of_integers(p, x):
    chosen = best(p, x)

    def step(e, out):
        return out + (chosen == e).astype(x.dtype)[:, None] * expert(at(p, e), x)

    return lax.fori_loop(0, E, step, jnp.zeros_like(x))


VARIATIONS = {
    one_expert_twice: 1, rows_of_each_choice: 1, two_indices: 2,
    picked_transposed: 1, a_sequence_each: 1, picked_by_sorted_numbers: 1, ends_by_addition: 1,
    bounds_in_one_array: 1, selected_in_another_order: 1, fori_loop_of_integers: 1,
}  # fmt: skip


@pytest.mark.parametrize("function", VARIATIONS, ids=lambda f: f.__name__)
def test_variations_are_exact(function):
    found(function, count=VARIATIONS[function])


def test_axes_of_the_same_size():
    """Tokens, experts, width and hidden width are told apart by what is done with them."""
    p = {name: mixtures.normal(i, *(6,) * P[name].ndim) for i, name in enumerate(P)}
    x = mixtures.normal(9, 6, 6)

    def function(p, x):
        return gathered(p, jnp.stack([x, 2 * x], 1), lax.top_k(x @ p["router"], 2)[1])

    found(function, (p, x))


@pytest.mark.parametrize("own", ["all", "one matrix", "biases", "tokens"])
def test_stacked_programs(own):
    """What of a mixture each example has of its own: all, or only a part."""
    stacked = {"all": P, "one matrix": {"down": 0}, "biases": {"gate_bias": 0, "down_bias": 0}, "tokens": {}}[own]
    axes = {name: 0 if name in stacked else None for name in P}
    p = {name: jnp.stack([P[name], P[name][::-1], 2 * P[name]]) if name in stacked else P[name] for name in P}
    x = jnp.stack([X, 2 * X, X[::-1]])
    for function in (one_einsum, mixtures.biases_and_relu, mixtures.loop_with_columns_of_weights):
        found(jax.vmap(function, (axes, 0)), (p, x))


@pytest.mark.parametrize("function", [one_einsum, sum_after_a_product, scattered_weights], ids=lambda f: f.__name__)
def test_models_may_share_their_tokens(function):
    """Each chooses experts of its own for all of them."""
    models = jax.tree.map(lambda a: jnp.stack([a, 0.5 * a, -a]), P)
    found(jax.vmap(function, (0, None)), (models, X))
    found(jax.vmap(function), (models, jnp.stack([X, 2 * X, X + 1])))


@pytest.mark.parametrize("axes", [(0, None), (0, 0)], ids=["shared tokens", "tokens of their own"])
@pytest.mark.parametrize("function", [one_einsum, sum_after_a_product, scattered_weights], ids=lambda f: f.__name__)
def test_train_steps_of_several_models(function, axes):
    models = jax.tree.map(lambda a: jnp.stack([a, 0.5 * a, -a]), P)
    tokens = X if axes[1] is None else jnp.stack([X, 2 * X, X + 1])
    step = jax.vmap(jax.value_and_grad(lambda p, x: jnp.sum(jnp.sin(function(p, x)))), axes)
    compared = compare(step, (models, tokens), gradients=False)
    assert compared.complaints == []
    sites = [(site.direction, site.verdict) for site in compared.report.sites if site.op == "grouped_matmul"]
    assert sites == [("forward+backward", "applied")]


def test_rectifiers_in_differentiated_loops():
    """Where a value is exactly zero, a rectifier has another derivative than a maximum."""
    x = X.at[::3].set(0)

    def layers(act):
        def layer(x, q):
            c = mixtures.combine(q, x)
            h = act(jnp.einsum("td,edf->tef", x, q["gate"]))
            return x + jnp.einsum("tef,efd,te->td", h, q["down"], c), None

        return layer

    stacked = jax.tree.map(lambda a: jnp.stack([a, 0.5 * a]), P)
    for wrap in (lambda f: f, jax.checkpoint):
        for act, count in ((jax.nn.relu, 1), (lambda h: jnp.maximum(h, 0), None)):
            layer = wrap(layers(act))

            def loss(p, x, layer=layer):
                return jnp.sum(jnp.sin(lax.scan(layer, x, p)[0]))

            step = jax.value_and_grad(loss, (0, 1))
            compared = compare(step, (stacked, x), gradients=False)
            assert compared.complaints == []
            assert count is None or compared.counts(OP) == count, compared.reasons()


# ---------------------------------------------------------------------- look-alikes


def unchanged(function, args=(P, X), others=0):
    """The reasons why a program, which is exact, keeps its mixtures."""
    compared = compare(function, args)
    assert compared.complaints == []
    assert compared.counts(OP) == others, compared.counts(OP)
    return [miss.reason for miss in compared.report.near_misses if miss.op == OP]


NUMBERS = jnp.asarray([0, 3, -1, 2, 1, 0, 7, 1, 2, 3, -2, 0], jnp.int32)
"""Of experts, and of none: a gather takes -1 for the last one, and 7 for the last one or for none."""


@pytest.mark.parametrize(
    "function",
    [
        lambda p, x: gathered(p, x, NUMBERS),
        lambda p, x: gathered(p, x, jnp.argmax(jnp.concatenate([x @ p["router"], x], -1), -1)),
        lambda p, x: everyone(p, x)[jnp.arange(T), NUMBERS],
        lambda p, x: jnp.nan_to_num(jnp.take_along_axis(everyone(p, x), NUMBERS[:, None, None], 1)[:, 0]),
        lambda p, x: everyone(p, x).at[jnp.arange(T), NUMBERS].get(mode="fill", fill_value=1.5),
        lambda p, x: gathered(p, x, best(p, x) - 1),
    ],
)
def test_numbers_that_may_be_out_of_range(function):
    assert any("in range" in reason for reason in unchanged(function))


def where_not_alone(p, x):
    """A token may be compared with its first choice and with its second one: the later one counts."""
    (a, b), out = route(p, x)[1].T[:, :, None], jnp.zeros_like(x)
    for e in range(E):
        out = jnp.where((a if e % 2 else b) == e, expert(at(p, e), x), out)
    return out


def where_twice(p, x):
    chosen, out = best(p, x)[:, None], jnp.zeros_like(x)
    for e in (0, 1, 2, 3, 0):
        out = jnp.where(chosen == e, expert(at(p, e), x * (1 + e)), out)
    return out


def where_else(p, x):
    chosen, out = best(p, x)[:, None] + 1, x
    for e in range(E):
        out = jnp.where(chosen == e, expert(at(p, e), x), out)
    return out


def where_at_most(p, x):
    chosen, out = best(p, x)[:, None], jnp.zeros_like(x)
    for e in range(E):
        out = jnp.where(chosen <= e, expert(at(p, e), x), out)
    return out


def stopped_elsewhere(p, x):
    """A derivative that is stopped for some tokens stays stopped."""
    chosen = best(p, x)
    quiet = (jnp.arange(T) % 2 == 0)[:, None]
    y = [expert(at(p, e), jnp.where(quiet, lax.stop_gradient(x), x)) for e in range(E)]
    return lax.select_n(jnp.broadcast_to(jnp.clip(chosen, 0, E - 1)[:, None], x.shape), *y)


def from_the_second_on(p, x):
    c = mixtures.combine(p, x)
    return lax.fori_loop(1, E, lambda e, out: out + c[:, e][:, None] * expert(at(p, e), x), jnp.zeros_like(x))


def the_other_way(p, x):
    c = mixtures.combine(p, x)

    def step(e, out):
        return out + c[:, e][:, None] * expert(at(p, E - 1 - e), x)

    return lax.fori_loop(0, E, step, jnp.zeros_like(x))


def fading(p, x):
    c = mixtures.combine(p, x)

    def step(e, out):
        return 0.5 * out + c[:, e][:, None] * expert(at(p, e), x)

    return lax.fori_loop(0, E, step, jnp.zeros_like(x))


def backwards(p, x):
    def step(out, q):
        q, column, e = q
        return out + column[:, None] * expert(q, x) * e, None

    given = at(p, slice(None)), mixtures.combine(p, x).T, jnp.arange(E, dtype=x.dtype)
    return lax.scan(step, jnp.zeros_like(x), given, reverse=True)[0]


@pytest.mark.parametrize(
    "function",
    [where_not_alone, where_twice, where_else, where_at_most, stopped_elsewhere, from_the_second_on, the_other_way,
     fading, backwards, of_some_tokens, every_token_for_each, cast_matrices],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_selections_and_loops_of_another_kind_are_exact(function):
    """Whether they are found or not, what they give and their derivatives are the same."""
    compared = compare(function, (P, X))
    assert compared.complaints == []


def in_intervals(bounds):
    def function(p, x):
        rows, back, counts, weights = sorted_rows(p, x)
        starts, ends = bounds(counts)
        position = jnp.arange(rows.shape[0])
        mine = (position >= starts[:, None]) & (position < ends[:, None])
        y = jax.vmap(expert, (0, None))(at(p, slice(None)), rows)
        return collected(jnp.sum(y * mine[..., None], 0), back, weights)

    return function


@pytest.mark.parametrize(
    "bounds",
    [
        lambda c: (jnp.cumsum(c) - 2 * c, jnp.cumsum(c)),
        lambda c: (jnp.cumsum(c) - c, jnp.cumsum(c) + 1),
        lambda c: (jnp.cumsum(c) - c + 1, jnp.cumsum(c) + 1),
        lambda c: (jnp.cumsum(c) - c - 3, jnp.cumsum(c - 3)),
        lambda c: (jnp.cumsum(c - 3) - (c - 3), jnp.cumsum(c - 3)),
        lambda c: (lax.cumsum(c, reverse=True) - c, lax.cumsum(c, reverse=True)),
        lambda c: (jnp.concatenate([jnp.ones(1, c.dtype), jnp.cumsum(c)[:-1]]), jnp.cumsum(c)),
        lambda c: (jnp.concatenate([jnp.zeros(1, c.dtype), jnp.cumsum(c)[1:]]), jnp.cumsum(c)),
        lambda c: (jnp.concatenate([jnp.zeros(1, c.dtype), jnp.cumsum(c)[:-1]]), jnp.cumsum(c[::-1])),
        lambda c: (jnp.cumsum(c[::-1]) - c, jnp.cumsum(c[::-1])),
        lambda c: (jnp.zeros_like(c), jnp.cumsum(c)),
    ],
)
def test_intervals_that_may_overlap(bounds):
    unchanged(in_intervals(bounds))


@pytest.mark.parametrize("name", ["uint8", "int8", "bfloat16"])
def test_experts_counted_in_a_narrow_type_are_a_near_miss(name):
    x, router, up, down = (mixtures.normal(i, *s) for i, s in enumerate([(12, 4), (4, 300), (300, 4, 2), (300, 2, 4)]))

    def function(x, router, up, down):
        mine = jnp.argmax(x @ router, -1).astype(name)[:, None] == jnp.arange(300).astype(name)
        return jnp.einsum("tef,efd,te->td", jax.nn.relu(jnp.einsum("td,edf->tef", x, up)), down, mine.astype(x.dtype))

    (reason,) = unchanged(function, (x, router, up, down))
    assert f"counted in {name}" in reason


def test_branches_of_a_switch_for_each_token_with_a_function_that_has_a_derivative_of_its_own():
    def token(p, chosen, x):
        branches = [lambda x, e=e: jax.nn.relu(x @ p["gate"][e]) @ p["down"][e] for e in range(E)]
        return lax.switch(chosen, branches, x)

    found(lambda p, x: jax.vmap(token, (None, 0, 0))(p, best(p, x), x))


# ---------------------------------------------------------------------- weights by columns of probabilities


def masked_where(p, x):
    probabilities = jax.nn.softmax(x @ p["router"])
    mask = best(p, x)[:, None] == jnp.arange(E)
    return sum(jnp.where(mask[:, e : e + 1], expert(at(p, e), x) * probabilities[:, e : e + 1], 0) for e in range(E))


def one_hot_columns(p, x):
    weights = jax.nn.softmax(x @ p["router"]) * jax.nn.one_hot(best(p, x), E)
    return sum(expert(at(p, e), x) * weights[:, e, None] for e in range(E))


def replaced_where(p, x):
    probabilities, out = jax.nn.softmax(x @ p["router"]), jnp.zeros_like(x)
    for e in range(E):
        out = jnp.where(
            (best(p, x) == e)[:, None], jnp.tanh(x @ p["gate"][e]) @ p["down"][e] * probabilities[:, e, None], out
        )
    return out


@pytest.mark.parametrize("function", [masked_where, one_hot_columns, replaced_where], ids=lambda f: f.__name__)
def test_columns_of_probabilities_are_weights_of_experts_and_no_labels(function):
    assert found(mean_loss(function)).counts()["cross_entropy"] == 0


# ---------------------------------------------------------------------- routers


def mean_loss(function):
    def loss(p, x):
        y = function(p, x)
        return jnp.mean(jnp.sin(y))

    return lambda p, x: jax.value_and_grad(loss, (0, 1))(p, x)


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "train step"])
@pytest.mark.parametrize("mapped", [False, True], ids=["", "mapped"])
def test_routers_are_neither_losses_nor_attentions(gradient, mapped):
    for function in (one_einsum, mixtures.masked_probabilities, mixtures.two_choices, KINDS["picked"][0]):
        step = mean_loss(function) if gradient else function
        if mapped:
            step = lambda p, x, step=step: lax.map(lambda x: step(p, x), x)  # noqa: E731
        optimized = optimized_like_a_user(step)
        compiled(lambda *a, o=optimized: o(*a)).lower(P, jnp.stack([X, 2 * X]) if mapped else X)
        assert [miss for miss in optimized.report().near_misses if miss.op != OP] == []


def test_a_loss_whose_logits_are_ranked_too_is_still_named():
    def loss(w, x, labels):
        logits = x @ w
        ranked = lax.top_k(logits, 2)[0]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)), ranked

    args = mixtures.normal(0, 8, 20), mixtures.normal(1, 12, 8), jnp.arange(12)
    optimized = optimized_like_a_user(loss)
    optimized(*args)
    (miss,) = optimized.report().near_misses
    assert miss.op == "cross_entropy"
    assert "top_k" in miss.reason
