"""Mixtures in which every expert computes every token are done for the chosen experts; look-alikes are left alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import mixtures
from support.compare import compare, compiled, optimized_like_a_user
from support.mixtures import IN_LOOPS, ONE_SITE, D, E, F, K, P, T, X, combine, expert, hidden, one_einsum

import autopallas

OP = "grouped_matmul"


def found(function, args=(P, X), count=1, **options):
    """The report of a program that is exact, in its derivative too, and has so many sites, all replaced."""
    compared = compare(function, args, **options)
    assert compared.complaints == []
    assert compared.counts(OP) == count, compared.reasons()
    return compared.report


def dense(function, args=(P, X)):
    """Arrays of tokens times experts times features that the optimized program still computes."""
    program = jax.make_jaxpr(lambda *a: optimized_like_a_user(function)(*a))(*args)
    return [v.aval for e in program.eqns for v in e.outvars if v.aval.size >= T * E * min(D, F) and e.invars]


@pytest.mark.parametrize("function", [*ONE_SITE, *IN_LOOPS], ids=lambda f: f.__name__)
def test_every_spelling_is_found_and_exact(function):
    report = found(function)
    (site,) = (site for site in report.sites if site.op == OP)
    assert site.direction == "forward"
    assert site.implementation == "xla"
    assert "mixtures.py" in site.location
    assert site.spec["use"] == "experts"
    assert site.spec["groups"] == E
    assert any("assume_finite" in text for text in site.assumptions)
    assert not [miss for miss in report.near_misses if miss.op == OP]


def test_nothing_is_computed_for_experts_that_are_not_chosen():
    inside = jax.jit(lambda p, x: optimized_like_a_user(one_einsum)(p, x)).lower(P, X).as_text()
    shapes = [f"{T}x{E}x{F}x", f"{E}x{T}x{F}x", f"{T}x{E}x{D}x", f"{E}x{T}x{D}x"]
    assert not [shape for shape in shapes if f"tensor<{shape}" in inside]


@pytest.mark.parametrize("chosen", [[0, 0], [-1, 2], [E, 1], [3, 3], [E + 5, -7]])
def test_experts_named_twice_or_not_at_all(chosen):
    """An expert that is named twice has the sum of its weights; a number that is no expert's has no part."""
    indices = jnp.asarray([chosen, chosen[::-1], [1, 2]] * (T // 3), jnp.int32)

    def function(p, x, weights):
        c = jnp.sum(jax.nn.one_hot(indices, E) * weights[..., None], 1)
        return jnp.einsum("tef,efd,te->td", hidden(p, x), p["down"], c)

    found(function, (P, X, mixtures.normal(7, T, K)))


def test_all_tokens_may_choose_one_expert():
    def function(p, x):
        mine = jax.nn.one_hot(jnp.zeros(T, jnp.int32) + jnp.int32(x[0, 0] * 0), E)
        return jnp.einsum("tef,efd,te->td", hidden(p, x), p["down"], mine)

    found(function)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_numbers(dtype):
    def function(p, x):
        c = combine(p, x).astype(dtype)
        return jnp.einsum("tef,efd,te->td", hidden(p, x), p["down"], c)

    found(function, jax.tree.map(lambda a: a.astype(dtype), (P, X)))


def dispatched_and_combined(p, x):
    """Tokens are given to the experts by one sum over their choices, and collected by another one."""
    weights, numbers = mixtures.route(p, x)
    mine = jax.nn.one_hot(numbers, E)
    given = jnp.einsum("td,tke->ted", x, mine)
    inside = jax.nn.silu(jnp.einsum("ted,edf->tef", given, p["gate"])) * jnp.einsum("ted,edf->tef", given, p["up"])
    of_each = jnp.einsum("tef,efd->ted", inside, p["down"])
    return jnp.einsum("ted,te->td", of_each, jnp.einsum("tk,tke->te", weights, mine))


def scanned_with_scattered_weights(p, x):
    weights, numbers = mixtures.route(p, x)
    columns = jnp.zeros((T, E)).at[jnp.arange(T)[:, None], numbers].set(weights).T
    experts = {name: p[name] for name in ("gate", "up", "down")}
    start = jnp.zeros_like(x)
    return lax.scan(lambda y, at: (y + expert(at[0], x) * at[1][:, None], None), start, (experts, columns))[0]


def scattered_for_sequences(p, x, first=0):
    """Tokens of sequences are rows, and weights are scattered into an array of their own dtype."""
    rows = x.reshape(-1, D)
    chosen, experts = lax.top_k(rows @ p["router"], K)
    place = jnp.arange(first, first + len(rows))[:, None]
    weights = jnp.zeros((len(rows), E)).at[place, experts].set(jax.nn.softmax(chosen))
    return (weights[..., None] * everyone(p, rows)).sum(1).reshape(x.shape)


def everyone(p, rows):
    """What every expert computes for every row."""
    inner = jax.nn.gelu(jnp.einsum("td,edf->tef", rows, p["gate"]))
    return jnp.einsum("tef,efd->ted", inner, p["down"])


SEQUENCES = X.reshape(3, T // 3, D)


def test_tokens_of_sequences_in_narrow_numbers():
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (P, SEQUENCES))
    found(scattered_for_sequences, narrow, dtype="bfloat16")


def test_tokens_of_sequences_under_vmap():
    found(jax.vmap(scattered_for_sequences, (None, 0)), (P, jnp.stack([SEQUENCES, SEQUENCES[::-1]])))


def test_weights_that_are_scattered_to_other_tokens_are_left_alone():
    args = P, jnp.stack([SEQUENCES, SEQUENCES[::-1]])
    found(jax.vmap(functools.partial(scattered_for_sequences, first=1), (None, 0)), args, count=0)


@pytest.mark.parametrize("function", [dispatched_and_combined, scanned_with_scattered_weights])
def test_choices_over_which_two_sums_run_are_computed_once(function):
    def loss(p, x):
        return jnp.sum(jnp.sin(function(p, x)))

    for program in (function, jax.grad(loss)):
        (site,) = (site for site in found(program).sites if site.op == OP)
        assert site.spec["choices"] == K


def test_layers_of_a_model_each_have_a_site():
    def model(p, x):
        for scale in (1.0, 2.0):
            x = x + one_einsum(jax.tree.map(lambda a, s=scale: a * s, p), x / jnp.sqrt(jnp.mean(x * x, -1)[:, None]))
        return lax.scan(
            lambda x, q: (x + mixtures.sum_after_a_product(q, x), None), x, jax.tree.map(lambda a: a[None], p)
        )[0]

    found(model, count=3)


@pytest.mark.parametrize("own", [False, True], ids=["shared experts", "experts of their own"])
def test_vmap_of_an_optimized_mixture(own):
    p, x = (jax.tree.map(lambda a: jnp.stack([a, a[::-1], 2 * a]), P) if own else P), jnp.stack([X, 2 * X, X[::-1]])
    optimized, axes = optimized_like_a_user(one_einsum), (0 if own else None, 0)
    for mapped in (lambda f: jax.vmap(f, axes), lambda f: jax.vmap(jax.grad(lambda p, x: jnp.sum(f(p, x) ** 2)), axes)):
        given, wanted = (compiled(mapped(f))(p, x) for f in (lambda p, x: optimized(p, x), one_einsum))
        for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    assert optimized.report().counts()[OP] == 1


def refused(function, args=(P, X)):
    """The reasons why a program, whose results are those of the original, keeps its mixtures."""
    optimized = optimized_like_a_user(function)
    given, wanted = compiled(lambda *a: optimized(*a))(*args), compiled(function)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), given, wanted)
    assert optimized.report().counts()[OP] == 0
    return [miss.reason for miss in optimized.report().near_misses if miss.op == OP]


def largest(weights):
    """Whether each weight is the largest of its token: of equal ones, several are."""
    return weights >= weights.max(-1, keepdims=True)


def weighted(weights):
    return lambda p, x: jnp.einsum("tef,efd,te->td", hidden(p, x), p["down"], weights(p, x))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (weighted(lambda p, x: jax.nn.softmax(x @ p["router"])), "each has a weight that is not zero"),
        (weighted(lambda p, x: jax.nn.sigmoid(x @ p["router"])), "each has a weight that is not zero"),
        (
            weighted(
                lambda p, x: jnp.where((g := jax.nn.softmax(x @ p["router"])) >= lax.top_k(g, K)[0][:, -1:], g, 0)
            ),
            "a comparison of weights decides which count",
        ),
        (weighted(lambda p, x: 1.0 * largest(x @ p["router"])), "a comparison of weights decides which count"),
        (
            weighted(lambda p, x: jnp.where((g := jax.nn.softmax(x @ p["router"])) == g.max(-1, keepdims=True), g, 0)),
            "a comparison of weights decides which count",
        ),
        (
            lambda p, x: jnp.where(
                largest(jax.nn.softmax(x @ p["router"]))[..., None],
                jnp.einsum("tef,efd->ted", hidden(p, x), p["down"]),
                0,
            ).sum(1),
            "a comparison of weights decides which count",
        ),
        (
            lambda p, x: sum(
                jnp.where(m[:, None], jax.nn.relu(x @ p["gate"][e]) @ p["down"][e], 0)
                for e, m in enumerate(largest(x @ p["router"]).T)
            ),
            "a comparison of weights decides which count",
        ),
        (weighted(lambda p, x: 1 - combine(p, x)), "cannot be shown that what is not chosen has no weight"),
        (weighted(lambda p, x: 0.9 * combine(p, x) + 0.1 / E), "cannot be shown that what is not chosen has no weight"),
        (
            lambda p, x: jnp.sum(jnp.einsum("tef,efd->ted", hidden(p, x), p["down"]) + combine(p, x)[..., None], 1),
            "cannot be shown that what is not chosen has no weight",
        ),
        (
            lambda p, x: (
                y := jnp.einsum("tef,efd->ted", hidden(p, x), p["down"]),
                jnp.einsum("ted,te->td", y, combine(p, x)),
            ),
            "what they compute is also returned",
        ),
        (
            lambda p, x: jnp.einsum(
                "tef,efd,te->td", lax.cumsum(hidden(p, x), axis=2), p["down"], combine(p, x)
            ),
            "passes through cumsum",
        ),
    ],
    ids=[
        "softmax", "sigmoid", "threshold", "largest", "equal to the largest", "selected", "one by one", "all others",
        "smoothed", "added", "returned", "cumsum",
    ],
)  # fmt: skip
def test_what_is_not_proved_sparse_is_left_alone_with_a_reason(function, reason):
    assert any(reason in given for given in refused(function))


def test_slots_that_may_hold_two_tokens_are_a_near_miss():
    def shared(p, x):
        probabilities = jax.nn.softmax(x @ p["router"])
        mine = jax.nn.one_hot(jnp.argmax(probabilities, -1), E)
        place = jnp.sum((jnp.cumsum(mine, 0) - 1) * mine, -1).astype(jnp.int32) // 2
        dispatch = mine[..., None] * jax.nn.one_hot(place, 4)[:, None]
        slots = jnp.einsum("td,tec->ecd", x, dispatch)
        y = jnp.einsum("ecf,efd->ecd", jax.nn.relu(jnp.einsum("ecd,edf->ecf", slots, p["gate"])), p["down"])
        return jnp.einsum("ecd,tec->td", y, dispatch * jnp.max(probabilities, -1)[:, None, None])

    assert any("not shown that a slot holds one token at most" in reason for reason in refused(shared))


@pytest.mark.parametrize(
    "function",
    [
        lambda p, x: jax.nn.one_hot(jnp.argmax(x @ p["router"], -1), E) @ p["down_bias"],
        lambda p, x: jnp.sum(jax.nn.one_hot(jnp.argmax(x, -1), D) * jax.nn.log_softmax(x)),
        lambda p, x: x + jax.nn.silu(x @ p["gate"][0]) @ p["down"][0] + jax.nn.silu(x @ p["gate"][1]) @ p["down"][1],
        lambda p, x: lax.scan(lambda c, q: (c + jnp.sum((x @ q == 0) * 1.0), None), jnp.zeros(()), p["gate"])[0],
    ],
    ids=["embedding", "picked label", "two branches", "accumulation"],
)
def test_what_is_no_mixture_is_no_near_miss(function):
    assert refused(function) == []


def test_what_may_be_infinite_keeps_the_original():
    p = P | {"gate": P["gate"].at[0].set(jnp.inf)}
    optimized = autopallas.optimize(one_einsum, objective="always", assume_finite=False)
    given, wanted = compiled(lambda *a: optimized(*a))(p, X), compiled(one_einsum)(p, X)
    np.testing.assert_array_equal(given, wanted)
    assert optimized.report().counts()[OP] == 0
    assert any("assume_finite is off" in miss.reason for miss in optimized.report().near_misses)


def test_without_evidence_the_original_stays():
    report = autopallas.explain(autopallas.optimize(lambda p, x: expert_of(p, x)), *huge())
    (site,) = (site for site in report.sites if site.op == OP)
    assert site.verdict == "kept"
    assert "nothing was measured" in site.reason


def expert_of(p, x):
    c = jnp.sum(jax.nn.one_hot(p["chosen"], 512) * p["weights"][..., None], 1)
    h = jax.nn.silu(jnp.einsum("td,edf->tef", x, p["gate"]))
    return jnp.einsum("tef,efd,te->td", h, p["down"], c)


def huge():
    shape = jax.ShapeDtypeStruct
    p = {"gate": shape((512, 8, 8), jnp.float32), "down": shape((512, 8, 8), jnp.float32)}
    p |= {"chosen": shape((64, 2), jnp.int32), "weights": shape((64, 2), jnp.float32)}
    return p, shape((64, 8), jnp.float32)


def test_verify_agrees():
    assert autopallas.verify(autopallas.optimize(one_einsum, objective="always"), P, X).ok


def shared_expert(p, x):
    return jax.nn.silu(x @ p) @ p.T


def test_a_residual_connection_and_a_shared_expert_stay_outside():
    found(lambda p, x: x + mixtures.loop_with_columns_of_weights(p, x) + shared_expert(2 * p["up"][0], x))


def test_an_expert_that_is_used_outside_too_is_a_near_miss():
    reasons = refused(lambda p, x: mixtures.loop_with_columns_of_weights(p, x) + shared_expert(p["up"][0], x))
    assert any("what they compute is also used by" in reason for reason in reasons)
