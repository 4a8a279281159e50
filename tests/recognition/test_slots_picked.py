"""Rows that are picked from slots of experts are rows of these experts; what mixes slots is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compare import compare, compiled, optimized_like_a_user
from support.mixtures import E, P, T, X, at, expert, normal, route
from support.mixtures_written import KINDS, C, in_slots, slot_numbers

import autopallas
from recognition.slots_written import ELSEWHERE, MIXED, ONE_MORE, PLACES, WAYS, brought, weighted

OP = "grouped_matmul"


def found(function, args=(P, X), count=1, **options):
    compared = compare(function, args, **options)
    assert compared.complaints == []
    assert compared.counts(OP) == count, compared.reasons()
    return compared.report


def reasons(function, args=(P, X)):
    """Why a program, which is exact, keeps its mixtures."""
    report = found(function, args, 0)
    return [miss.reason for miss in report.near_misses if miss.op == OP]


@pytest.mark.parametrize("function", WAYS, ids=lambda f: f.__name__)
def test_each_way_is_found_and_exact_in_its_derivative_too(function):
    report = found(function)
    assert not [miss for miss in report.near_misses if miss.op == OP]
    (site,) = (site for site in report.sites if site.op == OP)
    assert site.spec["scattered"]
    assert site.spec["slots"] in (3, 4, C)
    assert site.spec["groups"] == E
    assert any("slots of which nothing is read" in text for text in site.assumptions)


@pytest.mark.parametrize("name", PLACES)
def test_any_numbers_of_slots_are_exact(name):
    """Also those that drop tokens, that two tokens share, or that are none."""
    found(PLACES[name])


@pytest.mark.parametrize("name", ONE_MORE)
def test_a_row_beside_the_slots(name):
    found(ONE_MORE[name])


@pytest.mark.parametrize("name", ELSEWHERE)
def test_rows_of_others_are_exact(name):
    compared = compare(ELSEWHERE[name], (P, X))
    assert compared.complaints == []


@pytest.mark.parametrize("name", MIXED)
def test_slots_that_depend_on_others_are_left_alone_with_a_reason(name):
    assert any("by a scatter and a gather, and" in reason for reason in reasons(MIXED[name]))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("gradient", [False, True])
def test_examples_whose_tokens_share_places(axis, gradient):
    """A gather picks the same places of all examples: along an axis that is none of the places'."""

    def function(p, x):
        weights, chosen, place = slot_numbers(p, X)

        def one(x):
            return weighted(in_slots(p, brought(x, chosen, place))[chosen, place], weights)

        return jax.vmap(one, axis)(x)

    x = jnp.stack([X, 2 * X, 3 * X], axis)
    compared = compare(function, (P, x), gradients=gradient)
    assert compared.complaints == []
    assert (compared.counts(OP), compared.report.failures) == (1, ())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_numbers(dtype):
    args = jax.tree.map(lambda a: a.astype(dtype), (P, X))
    found(KINDS["slots"][1], args)


def test_as_many_experts_as_slots_and_features():
    p = {name: normal(i, *(6,) * P[name].ndim) for i, name in enumerate(P)}

    def function(p, x):
        best = jnp.argmax(x @ p["router"], -1)
        place = jnp.cumsum(jax.nn.one_hot(best, 6, dtype=jnp.int32), 0)[jnp.arange(6), best] - 1
        rows = jnp.zeros((6, 6, 6)).at[best, place].set(x)
        return in_slots(p, rows)[best, place]

    found(function, (p, normal(9, 6, 6)))


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
def test_places_that_are_not_there_have_the_derivatives_of_the_original(mode):
    """Nothing is masked: what is read there, and its gradient, is what the gather's mode says."""

    def function(p, x):
        weights, chosen, place = slot_numbers(p, x)
        y = in_slots(p, brought(x, chosen, place, slots=2))
        options = {"fill_value": -2.0} if mode == "fill" else {}
        return weighted(y.at[chosen, place].get(mode=mode, **options), weights)

    found(function)


def test_an_empty_slot_may_be_infinite():
    """A slot of which nothing is read reaches no result."""

    def function(p, x):
        weights, chosen, place = slot_numbers(p, x)
        rows = jnp.full((E, C, x.shape[-1]), jnp.inf).at[chosen, place].set(x[:, None], mode="drop")
        return weighted(in_slots(p, rows).at[chosen, place].get(mode="fill", fill_value=0), weights)

    optimized = optimized_like_a_user(function)
    np.testing.assert_allclose(compiled(lambda *a: optimized(*a))(P, X), function(P, X), rtol=1e-5, atol=1e-5)
    assert optimized.report().counts()[OP] == 1


def test_what_may_be_infinite_keeps_the_original():
    report = autopallas.explain(optimized_like_a_user(KINDS["slots"][0], assume_finite=False), P, X)
    assert report.counts()[OP] == 0
    assert any("assume_finite is off" in miss.reason for miss in report.near_misses)


def test_without_evidence_the_original_stays():
    """What was measured of other mixtures says nothing of slots to which tokens are scattered."""
    report = autopallas.explain(autopallas.optimize(KINDS["slots"][0]), P, X)
    (site,) = (site for site in report.sites if site.op == OP)
    assert site.verdict == "kept"
    assert "nothing was measured" in site.reason


def test_slots_that_are_also_returned_keep_the_original():
    def function(p, x):
        weights, chosen, place = slot_numbers(p, x)
        y = in_slots(p, brought(x, chosen, place))
        return weighted(y.at[chosen, place].get(mode="fill", fill_value=0), weights), y

    assert any("also returned" in reason for reason in reasons(function))


def padded_sequences(p, x):
    """Rows of an attention are brought to places of sequences and back: these are no experts."""
    sequence, place = jnp.arange(T) % 3, jnp.arange(T) // 3
    rows = jnp.zeros((3, 5, x.shape[-1])).at[sequence, place].set(x)
    scores = jnp.einsum("bqd,bkd->bqk", rows @ p["router"], rows @ p["router"])
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), rows)[sequence, place]


def padded_keys(p, x):
    """The same of what is brought, without any matrix."""
    sequence, place = jnp.arange(T) % 3, jnp.arange(T) // 3
    rows = jnp.zeros((3, 5, x.shape[-1])).at[sequence, place].set(x)
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", rows, rows)), rows)[sequence, place]


@pytest.mark.parametrize("function", [padded_sequences, padded_keys], ids=lambda f: f.__name__)
def test_rows_of_sequences_are_no_mixture(function):
    assert reasons(function) == []


def test_a_part_of_the_experts():
    """Some are left out, and so are some slots."""

    def function(p, x):
        weights, chosen, place = slot_numbers(p, x)
        y = in_slots(p, brought(x, chosen, place))[1:, 2:]
        return weighted(
            y.at[chosen - 1, place - 2].get(mode="fill", fill_value=0, wrap_negative_indices=False), weights
        )

    found(function)


def test_examples_of_a_site():
    """A site under vmap, of tokens or of all."""
    optimized = optimized_like_a_user(KINDS["slots"][1])
    xs = jnp.stack([X, 2 * X, X[::-1]])
    stacked = jax.tree.map(lambda a: jnp.stack([a, 2 * a, a[::-1]]), P)
    for axes, args in (((None, 0), (P, xs)), ((0, 0), (stacked, xs)), ((0, None), (stacked, X))):
        both = [jax.vmap(f, axes)(*args) for f in (optimized, KINDS["slots"][1])]
        np.testing.assert_allclose(*both, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- experts that compute what they gather


def loss(function):
    def total(p, x):
        y = function(p, x)
        return jnp.sum(jnp.sin(y + jnp.arange(y.size, dtype=y.dtype).reshape(y.shape)))

    return total


def layers(function):
    """Two layers in a scan."""
    return lambda p, x: lax.scan(
        lambda x, q: (x + function(q, x), None), x, jax.tree.map(lambda a: jnp.stack([a, 2 * a]), p)
    )[0]


FORMS = {
    "forward": lambda f: f,
    "train step": lambda f: jax.value_and_grad(loss(f), (0, 1)),
    "checkpoint": lambda f: jax.value_and_grad(loss(jax.checkpoint(f)), (0, 1)),
    "vmap": lambda f: lambda p, x: jax.vmap(f, (None, 0))(p, jnp.stack([x, 2 * x])),
    "vmap, train step": lambda f: jax.value_and_grad(
        lambda p, x: jnp.mean(jax.vmap(loss(f), (None, 0))(p, jnp.stack([x, 2 * x]))), (0, 1)
    ),
    "stacked": lambda f: (
        lambda p, x: jax.vmap(jax.value_and_grad(loss(f), (0, 1)))(
            jax.tree.map(lambda a: jnp.stack([a, 2 * a]), p), jnp.stack([x, 2 * x])
        )
    ),
    "layers": layers,
    "layers, train step": lambda f: jax.value_and_grad(loss(layers(f)), (0, 1)),
    "microbatches": lambda f: jax.value_and_grad(
        lambda p, x: jnp.mean(lax.map(lambda x: loss(f)(p, x), jnp.stack([x, 2 * x]))), (0, 1)
    ),
}


def explained(function):
    """The reasons why nothing is replaced."""
    report = autopallas.explain(optimized_like_a_user(function), P, X)
    assert report.counts()[OP] == 0
    return {miss.reason for miss in report.near_misses if miss.op == OP}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("function", KINDS["expert choice"], ids=lambda f: f.__name__)
def test_experts_that_choose_have_nothing_to_leave_out(function, form):
    (reason,) = explained(FORMS[form](function))
    assert "experts choose their tokens" in reason
    assert "nothing to leave out" in reason


@pytest.mark.parametrize("form", FORMS)
def test_tokens_that_are_gathered_expert_by_expert_are_a_near_miss(form):
    (reason,) = explained(FORMS[form](KINDS["slots"][4]))
    assert "rows without a token are computed too" in reason


def test_slots_with_numbers_of_tokens_are_a_near_miss():
    """A scatter brings back what is computed for slots, of which some are empty."""

    def function(p, x):
        weights, chosen, place = slot_numbers(p, x)
        token = jnp.full((E, C), T, jnp.int32).at[chosen, place].set(jnp.arange(T)[:, None], mode="drop")
        own = jnp.zeros((E, C), x.dtype).at[chosen, place].set(weights, mode="drop")
        y = in_slots(p, x.at[token].get(mode="fill", fill_value=0)) * own[..., None]
        return jnp.zeros_like(x).at[token].add(y, mode="drop")

    (reason,) = reasons(function)
    assert "which slots are empty is not known" in reason


def some_tokens_alone(p, x):
    """One expert for a few tokens."""
    chosen = lax.top_k(x @ p["router"][:, 0], 4)[1]
    return x.at[chosen].add(expert(at(p, 0), x[chosen]))


def messages(p, x):
    """Rows of some nodes are added to others."""
    source, target = route(p, x)[1].T
    return jnp.zeros_like(x).at[target].add(jnp.tanh(x[source] @ p["gate"][0] @ p["down"][0]))


def members(p, x):
    """Each of four models does that for a few of its own tokens."""

    def one(q, x):
        chosen = lax.top_k(jnp.sum(x, -1), 4)[1]
        return x.at[chosen].add(expert(q, x[chosen]))

    return jax.vmap(one)(at(p, slice(None)), jnp.stack([x * (1 + e) for e in range(E)]))


def sorted_and_put_back(p, x):
    """Tokens of one chunk of a sorted sequence see each other."""
    order = jnp.argsort(x[:, 0])
    rows = x[order].reshape(4, -1, x.shape[-1])
    scores = jnp.tanh(jnp.einsum("cid,cjd->cij", rows, rows))
    return jnp.einsum("cij,cjd->cid", scores, rows).reshape(x.shape)[jnp.argsort(order)]


@pytest.mark.parametrize(
    "function", [some_tokens_alone, messages, members, sorted_and_put_back], ids=lambda f: f.__name__
)
def test_what_has_one_expert_is_no_mixture(function):
    assert reasons(function) == []
