"""Weights of experts that are not what they seem: 0 / 0, positions that wrap around or are rounded, loops over data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compare import compare, compiled, optimized_like_a_user
from support.mixtures import ONE_SITE, D, E, K, P, T, X, expert, hidden, normal, one_einsum

import autopallas

OP = "grouped_matmul"


def with_gradient(function):
    """The result and the gradients, of a loss that tells all results apart."""

    def loss(p, x):
        y = function(p, x)
        return jnp.sum(y * jnp.sin(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)), y

    return jax.grad(loss, (0, 1), has_aux=True)


def same(function, args=(P, X)):
    """How often a mixture is replaced in a program that gives what it gave, NaN and infinity in the same places."""
    optimized = optimized_like_a_user(function)
    given, wanted = compiled(lambda *a: optimized(*a))(*args), compiled(function)(*args)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)  # float32 sums in another order; NaN only as NaN
    return optimized.report().counts()[OP], wanted


def mixed(weights):
    return lambda p, x: jnp.einsum("tef,efd,te->td", hidden(p, x), p["down"], weights(p, x))


# ---------------------------------------------------------------------- 0 / 0


def probabilities(p, x):
    return jax.nn.softmax(x @ p["router"])


def best(p, x):
    return lax.top_k(probabilities(p, x), K)[1]


WITHOUT = jnp.arange(T) % 3 == 0
"""Tokens without any expert."""

NUMBERS = {
    "each has experts": best,
    "number -1": lambda p, x: jnp.where(WITHOUT[:, None], -1, best(p, x)),
    "number behind the last": lambda p, x: jnp.where(WITHOUT[:, None], E, best(p, x)),
}


def chosen(numbers):
    return lambda p, x: jnp.sum(jax.nn.one_hot(numbers(p, x), E), 1)


def masked(numbers):
    return lambda p, x: jnp.where(chosen(numbers)(p, x) > 0, probabilities(p, x), 0.0)


def multiplied(numbers, gates=probabilities):
    return lambda p, x: chosen(numbers)(p, x) * gates(p, x)


def scattered(numbers):
    def weights(p, x):
        w, i = lax.top_k(probabilities(p, x), K)[0], numbers(p, x)
        return jnp.zeros((T, E)).at[jnp.arange(T)[:, None], jnp.where(i < 0, E, i)].set(w, mode="drop")

    return weights


def of_choices(numbers):
    """Normalised before they are given to the experts."""

    def weights(p, x):
        i = numbers(p, x)
        w = jnp.where((i >= 0) & (i < E), lax.top_k(probabilities(p, x), K)[0], 0.0)
        return jnp.sum(jax.nn.one_hot(i, E) * (w / w.sum(-1, keepdims=True))[..., None], 1)

    return weights


def over(divide, weights):
    return lambda numbers: lambda p, x: divide(weights(numbers)(p, x))


def summed(c):
    return c.sum(-1, keepdims=True)


NORMALISED = {
    "masked": over(lambda c: c / summed(c), masked),
    "multiplied": over(lambda c: c / summed(c), multiplied),
    "sigmoid": over(lambda c: c / summed(c), lambda n: multiplied(n, lambda p, x: jax.nn.sigmoid(x @ p["router"]))),
    "reciprocal": over(lambda c: c * (1 / summed(c)), multiplied),
    "power": over(lambda c: c * summed(c) ** -1, multiplied),
    "rsqrt": over(lambda c: c * lax.rsqrt(summed(c)) ** 2, multiplied),
    "scattered": over(lambda c: c / summed(c), scattered),
    "of all tokens": over(lambda c: c / c.sum(), multiplied),
    "of each expert": over(lambda c: c / c.sum(0), multiplied),
    "by their number": lambda n: lambda p, x: multiplied(n)(p, x) / summed(chosen(n)(p, x)),
    "of choices": of_choices,
}
GUARDED = {
    "epsilon": over(lambda c: c / (summed(c) + 1e-9), multiplied),
    "floor": over(lambda c: c / jnp.maximum(summed(c), 1e-9), masked),
    "not normalised": masked,
}


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("spelling", NORMALISED | GUARDED)
def test_a_token_without_an_expert_has_what_it_had(spelling, numbers):
    count, wanted = same(mixed((NORMALISED | GUARDED)[spelling](NUMBERS[numbers])))
    if numbers != "each has experts" and spelling in NORMALISED and "of " not in spelling:
        assert np.isnan(wanted[0]).all(), "the program hides no NaN that could be lost"
    if spelling in GUARDED:
        assert count == 1


@pytest.mark.parametrize("spelling", ["masked", "reciprocal", "of choices", "epsilon"])
def test_so_has_its_gradient(spelling):
    same(with_gradient(mixed((NORMALISED | GUARDED)[spelling](NUMBERS["number -1"]))))


@pytest.mark.parametrize("spelling", ["masked", "multiplied", "sigmoid", "reciprocal", "of choices", "by their number"])
def test_weights_normalised_over_the_best_experts_are_found(spelling):
    assert same(mixed(NORMALISED[spelling](best)))[0] == 1


def test_an_expert_without_tokens_may_make_every_result_undefined():
    """Weights that are normalised over the tokens of each expert: 0 / 0 for one that nobody chooses."""

    def function(p, x):
        gates = probabilities(p, x)
        c = jax.nn.one_hot(jnp.argmax(gates[:, : E - 1], -1), E) * gates
        return mixed(lambda p, x: c / c.sum(0))(p, x)

    assert np.isnan(same(function)[1]).all()


def test_normalised_weights_in_a_loop_over_experts():
    def function(p, x):
        c = NORMALISED["masked"](NUMBERS["number -1"])(p, x)
        own = [{name: p[name][e] for name in p if name != "router"} for e in range(E)]
        return sum(c[:, e : e + 1] * expert(q, x) for e, q in enumerate(own))

    assert np.isnan(same(function)[1][0]).all()


def test_a_known_infinity_is_not_left_out():
    """-inf * 0 where an expert is not chosen."""

    def weights(p, x):
        mine = jax.nn.one_hot(jnp.argmax(x @ p["router"], -1), E)
        return jnp.where(mine > 0, 0.5, -jnp.inf) * mine

    assert same(mixed(weights))[0] == 0


# ---------------------------------------------------------------------- positions in types that do not hold them


def many(experts):
    """Few tokens, of which some choose experts with large numbers."""
    p = {"router": normal(1, D, experts), "gate": normal(2, experts, D, 2), "up": normal(3, experts, D, 2)}
    p["down"] = normal(4, experts, 2, D)
    return p, jnp.concatenate([normal(5, 8, D), 8 * p["router"].T[-8:]])


def with_positions(positions):
    def function(p, x):
        number = jnp.argmax(x @ p["router"], -1)
        c = (number[:, None] == positions(p["router"].shape[1]).astype(number.dtype)).astype(x.dtype)
        return jnp.einsum("tef,efd,te->td", hidden(p, x), p["down"], c)

    return function


TYPES = ["int8", "uint8", "int16", "uint32", "bfloat16", "float16", "float32"]
POSITIONS = {
    "cast": lambda dtype: lambda n: jnp.arange(n).astype(dtype),
    "counted": lambda dtype: lambda n: lax.iota(jnp.dtype(dtype), n),
    "cast twice": lambda dtype: lambda n: jnp.arange(n).astype(dtype).astype("float32"),
}


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("experts", [4, 300])
def test_experts_are_counted_in_a_type_that_holds_them_or_left_alone(experts, dtype, positions):
    count, _ = same(with_positions(POSITIONS[positions](dtype)), many(experts))
    assert count == (experts == 4 or dtype in ("int16", "uint32", "float16", "float32"))


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float16"])
def test_so_are_they_under_a_gradient(dtype):
    same(with_gradient(with_positions(POSITIONS["cast"](dtype))), many(300))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int16"])
def test_thousands_of_experts(dtype):
    count, _ = same(with_positions(POSITIONS["cast"](dtype)), many(2304))
    assert count == (dtype == "int16")


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_numbers_of_experts_that_wrap_around_choose_whom_they_name(dtype):
    def function(p, x):
        number = jnp.argmax(x @ p["router"], -1).astype(dtype)
        c = jax.nn.one_hot(number.astype(jnp.int32), 300)
        return jnp.einsum("tef,efd,te->td", hidden(p, x), p["down"], c)

    assert same(function, many(300))[0] == 1


@pytest.mark.parametrize("rows", [8, T])
@pytest.mark.parametrize("dtype", ["uint8", "int32"])
def test_rows_that_weights_are_scattered_to(dtype, rows):
    """Of the first rows alone the others have no expert; 300 rows cannot be counted in 8 bits."""

    def function(p, x):
        w, i = lax.top_k(probabilities(p, x), K)
        place = jnp.arange(rows * 25).astype(dtype)[:, None]
        c = jnp.zeros((T * 25, E)).at[place, i[: rows * 25].astype(dtype)].set(w[: rows * 25])
        return jnp.einsum("tef,efd,te->td", hidden(p, x), p["down"], c)

    assert same(function, (P, jnp.tile(X, (25, 1)) * jnp.linspace(-1, 1, T * 25)[:, None]))[0] in (0, 1)


# ---------------------------------------------------------------------- loops over data


def mapped(function):
    return lambda p, xs: lax.map(lambda x: function(p, x), xs)


def summed_up(function, scale=1.0):
    """Added up over parts of a batch; ``scale`` is a literal that the loop is given."""

    def whole(p, xs):
        c = jax.jit(lambda: scale)()
        return lax.scan(lambda out, x: (out + c * function(p, x), None), jnp.zeros_like(function(p, xs[0])), xs)[0]

    return whole


def softmax_sum(p, x):
    return jnp.sum(jax.nn.softmax(x @ p["router"])[..., None] * (x @ p["gate"][0])[:, None], 1)


def picked(p, x):
    return jnp.sum(jax.nn.one_hot(jnp.argmax(x[:, :E], -1), E) * jax.nn.log_softmax(x @ p["router"]), -1)


PARTS = jnp.stack([X, 2 * X, X[::-1]])


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("loop", [mapped, summed_up, lambda f: summed_up(f, 3.0)], ids=["map", "sum", "literal"])
@pytest.mark.parametrize("function", [one_einsum, ONE_SITE[-4], softmax_sum, picked], ids=lambda f: f.__name__)
def test_a_loop_over_data_is_no_loop_over_experts(function, loop, gradient):
    whole = loop(function)
    count, _ = same(with_gradient(whole) if gradient else whole, (P, PARTS))
    if function in ONE_SITE and not gradient:
        assert count == 1


# ---------------------------------------------------------------------- weights that a loss of balance reads too


def scattered(chosen, weights):
    return jnp.zeros((T, E)).at[jnp.arange(T)[:, None], chosen].set(weights)


def one_hots(chosen, weights):
    return jnp.sum(jax.nn.one_hot(chosen, E) * weights[..., None], 1)


def balanced(written, importance):
    """The gradient of a mixture and of the variance of how much each expert is used."""

    def loss(p, x):
        scores, chosen = lax.top_k(x @ p["router"], K)
        weights = jax.nn.softmax(scores)
        every = written(chosen, weights)
        y = jnp.einsum("tef,efd,te->td", hidden(p, x), p["down"], every)
        return jnp.sum(jnp.sin(y)) + jnp.var(importance(every, chosen, weights))

    return jax.value_and_grad(loss)


def divided_by_their_sum(chosen, weights):
    kept = one_hots(chosen, weights)
    return kept / (jnp.sum(kept, -1, keepdims=True) + 1e-3)


def selected_by_a_mask(chosen, weights):
    mask = jnp.any(chosen[..., None] == jnp.arange(E), 1)
    return jnp.where(mask, weights.sum(-1, keepdims=True) * jnp.arange(1.0, E + 1), 0.0)


def in_sixteen_bits(chosen, weights):
    return scattered(chosen, weights).astype("bfloat16").astype("float32")


IMPORTANCE = {
    "sum": lambda every, *_: every.sum(0),
    "share of tokens times mean": lambda every, *_: (every > 0).mean(0) * every.mean(0),
    "variation": lambda every, *_: jnp.std(every.sum(0)) / (jnp.mean(every.sum(0)) + 1e-9) * jnp.arange(E),
    "squares in another layout": lambda every, *_: jnp.square(every.T).mean(1),
    "with what they are made of": lambda every, chosen, weights: every.sum(0) * weights.mean(),
}


@pytest.mark.parametrize("importance", IMPORTANCE.values(), ids=IMPORTANCE)
@pytest.mark.parametrize(
    "written",
    [scattered, one_hots, divided_by_their_sum, selected_by_a_mask, in_sixteen_bits],
    ids=lambda f: f.__name__,
)
def test_a_loss_of_balance_reads_the_weights_of_all_experts_too(written, importance):
    """Its gradient is added to that of the mixture before both come back to the choice."""
    outcome = compare(balanced(written, importance), (P, X), gradients=False)
    assert outcome.complaints == []
    sites = [(site.direction, site.verdict) for site in outcome.report.sites if site.op == OP]
    assert sites == [("forward+backward", "applied")]


def test_a_loss_of_balance_that_reads_weights_before_they_are_divided_is_named():
    """Their cotangent is the sum of that of the quotient's two operands and that of the loss, in one."""

    def loss(p, x):
        probabilities = jax.nn.softmax(x @ p["router"])
        kept = jnp.where(jax.nn.one_hot(lax.top_k(probabilities, K)[1], E).sum(1) > 0, probabilities, 0.0)
        y = jnp.einsum("tef,efd,te->td", hidden(p, x), p["down"], kept / kept.sum(-1, keepdims=True))
        return jnp.sum(jnp.sin(y)) + jnp.var(kept.sum(0))

    optimized = optimized_like_a_user(jax.value_and_grad(loss))
    (miss,) = (miss for miss in autopallas.explain(optimized, P, X).near_misses if miss.op == OP)
    assert "the weights of all experts are also used by reduce_sum" in miss.reason


def test_weights_that_are_zero_though_their_expert_is_chosen_have_a_gradient():
    """What decides is the choice, and not the weight."""

    def loss(p, x):
        scores, chosen = lax.top_k(x @ p["router"], K)
        every = one_hots(chosen, jax.nn.softmax(scores) * p["scale"])
        y = jnp.einsum("tef,efd,te->td", hidden(p, x), p["down"], every)
        return jnp.sum(jnp.sin(y)) + jnp.var(every.sum(0))

    p = P | {"scale": jnp.where(WITHOUT, 0.0, 1.0)[:, None]}
    outcome = compare(jax.value_and_grad(loss), (p, X), gradients=False)
    assert outcome.complaints == []
    assert outcome.counts(OP) == 1
    gradients = jax.grad(loss)(p, X)["scale"]
    assert np.all(np.abs(gradients[WITHOUT]) > 0)


def layers_of(layer):
    def whole(p, x):
        def step(carried, scale):
            x, total = carried
            y, balance = layer({name: value * scale for name, value in p.items()}, x)
            return (x + y, total + balance), None

        (x, total), _ = lax.scan(step, (x, 0.0), jnp.array([1.0, 0.9, 0.8]))
        return jnp.sum(jnp.sin(x)) + total

    return whole


def balanced_layer(p, x):
    scores, chosen = lax.top_k(x @ p["router"], K)
    every = scattered(chosen, jax.nn.softmax(scores))
    return jnp.einsum("tef,efd,te->td", hidden(p, x), p["down"], every), jnp.var(every.sum(0))


def written_out_layers(p, x):
    total = 0.0
    for scale in (1.0, 0.9, 0.8):
        y, balance = balanced_layer({name: value * scale for name, value in p.items()}, x)
        x, total = x + y, total + balance
    return jnp.sum(jnp.sin(x)) + total


LAYERS = {
    "scan": (layers_of(balanced_layer), 1),
    "checkpointed": (layers_of(jax.checkpoint(balanced_layer)), 1),
    "written out": (written_out_layers, 3),
}


@pytest.mark.parametrize(("whole", "count"), LAYERS.values(), ids=LAYERS)
def test_layers_that_a_loss_of_balance_reads(whole, count):
    outcome = compare(jax.value_and_grad(whole), (P, X), gradients=False)
    assert outcome.complaints == []
    assert outcome.counts(OP) == count


@jax.custom_vjp
def with_a_gradient_of_unit_length(x):
    return x


with_a_gradient_of_unit_length.defvjp(lambda x: (x, None), lambda _, ct: (ct / jnp.linalg.norm(ct),))


@jax.custom_vjp
def straight_through(mask, x):
    return jnp.where(mask, x, 0.0)


straight_through.defvjp(lambda mask, x: (jnp.where(mask, x, 0.0), None), lambda _, ct: (None, ct))


@jax.custom_jvp
def straight_through_forward(mask, x):
    return mask * x


straight_through_forward.defjvp(lambda given, tangents: (given[0] * given[1], tangents[1]))


def of_all_probabilities(select):
    def written(p, x):
        probabilities = jax.nn.softmax(x @ p["router"])
        return select(jax.nn.one_hot(lax.top_k(probabilities, K)[1], E).sum(1), probabilities)

    return written


def of_weights(change):
    def written(p, x):
        scores, chosen = lax.top_k(x @ p["router"], K)
        return change(scattered(chosen, jax.nn.softmax(scores)))

    return written


CHANGED = {
    "the gradient is divided by its norm": of_weights(with_a_gradient_of_unit_length),
    "straight through": of_all_probabilities(lambda mask, x: straight_through(mask > 0, x)),
    "straight through forward": of_all_probabilities(straight_through_forward),
    "straight through by differences": of_all_probabilities(lambda mask, x: x + lax.stop_gradient(mask * x - x)),
}


@pytest.mark.parametrize("with_balance", [False, True], ids=["alone", "balanced"])
@pytest.mark.parametrize("written", CHANGED.values(), ids=CHANGED)
def test_a_gradient_that_experts_without_a_choice_have_too_is_kept(written, with_balance):
    """It reaches what the weights are made of by a rule of its own, of all experts."""

    def loss(p, x):
        every = written(p, x)
        y = jnp.einsum("tef,efd,te->td", hidden(p, x), p["down"], every)
        return jnp.sum(jnp.sin(y)) + (jnp.var(every.sum(0)) if with_balance else 0.0)

    outcome = compare(jax.value_and_grad(loss), (P, X), gradients=False)
    assert outcome.complaints == []
    assert outcome.counts(OP) == 0


def test_gradients_of_weights_that_something_else_reads_are_kept():
    """Where the gradient of all weights is a result, it is that of experts without a choice too."""

    def whole(p, x):
        scores, chosen = lax.top_k(x @ p["router"], K)
        every = scattered(chosen, jax.nn.softmax(scores))

        def loss(p, every):
            y = jnp.einsum("tef,efd,te->td", hidden(p, x), p["down"], every)
            return jnp.sum(jnp.sin(y)) + jnp.var(every.sum(0))

        return jax.value_and_grad(loss, (0, 1))(p, every)

    outcome = compare(whole, (P, X), gradients=False)
    assert outcome.complaints == []
    assert outcome.counts(OP) == 0


def test_a_loss_that_reads_weights_whose_gradient_goes_elsewhere_is_named():
    """And not the experts' own activation, whose derivative the backward reads."""

    def loss(p, x):
        scores, chosen = lax.top_k(x @ p["router"], K)
        every = with_a_gradient_of_unit_length(scattered(chosen, jax.nn.softmax(scores)))
        y = jnp.einsum("tef,efd,te->td", hidden(p, x), p["down"], every)
        return jnp.sum(jnp.sin(y)) + jnp.var(every.sum(0))

    optimized = optimized_like_a_user(jax.value_and_grad(loss))
    (miss,) = (miss for miss in autopallas.explain(optimized, P, X).near_misses if miss.op == OP)
    assert "the weights of all experts are also used by reduce_sum" in miss.reason


@pytest.mark.parametrize(
    "importance",
    [
        lambda every, chosen, weights: jnp.zeros(E).at[chosen].add(weights),
        lambda every, chosen, weights: lax.stop_gradient(every).sum(0) * weights.mean(),
    ],
)
@pytest.mark.parametrize("written", [scattered, one_hots])
def test_a_mixture_is_a_site_beside_a_loss_of_balance_as_the_advice_has_it(written, importance):
    count, _ = same(balanced(written, importance))
    assert count == 1
