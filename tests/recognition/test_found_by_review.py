"""Programs by which readers of the code showed it to be wrong, each by what was wrong with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.nn import log_softmax, logsumexp, softmax
from support.catalogue import array
from support.compare import compare, compiled, optimized_like_a_user

import autopallas
from autopallas.graph import Graph, flatten
from autopallas.patterns.expressions import Scope
from autopallas.patterns.indexing import is_position
from recognition.losses import picked

T, D, V = 4, 8, 12
LABELS = jnp.arange(T) * 5 % V


def arguments():
    return array(T, D, seed=1), array(D, V, seed=2)


def total_of_squares(x, w):
    z = x @ w
    p = softmax(z)
    return -picked(log_softmax(z), LABELS).mean() * (p * p).sum()


def logarithm_of_everything(x, w):
    e = jnp.exp(x @ w)
    return jnp.log(e.sum()) + jnp.log(e.sum(-1)).sum()


def logarithm_of_a_contraction(x, w):
    e = jnp.exp(x @ w)
    return jnp.log(jnp.einsum("tv,tv->", e, jnp.ones_like(e))) + jnp.log(e.sum(-1)).sum()


def numbers_of_rows_in_a_contraction(x, w):
    z = x @ w
    return jnp.einsum("tv,t->", z, logsumexp(z, -1))


def reciprocals_in_a_contraction(x, w):
    z = x @ w
    return jnp.einsum("tv,t->", z, jnp.exp(-logsumexp(z, -1)))


def printed_on_the_way(x, w):
    z = x @ w
    jax.debug.callback(lambda _: None, z[0, 0])
    return -picked(log_softmax(z[:-1]), LABELS[1:]).mean()


def a_checkpoint_within_one(x, w):
    def model(x, w):
        return jax.checkpoint(lambda h, w: h @ w)(jnp.tanh(x), w)

    return -picked(log_softmax(jax.checkpoint(model)(x, w)), LABELS).mean()


PROGRAMS = [
    total_of_squares,
    logarithm_of_everything,
    logarithm_of_a_contraction,
    numbers_of_rows_in_a_contraction,
    reciprocals_in_a_contraction,
    printed_on_the_way,
    a_checkpoint_within_one,
]


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_losses_that_couple_rows_or_have_something_between(program, within):
    function = jax.value_and_grad(program, (0, 1)) if within else program
    compared = compare(function, arguments(), gradients=not within)
    assert compared.complaints == []


def test_a_selection_moves_no_further_than_to_the_logits():
    weights = array(80, D, D, seed=3) * 0.2

    def loss(x, w):
        for layer in weights:
            x = jnp.exp(-((x @ layer) ** 2))
        return -picked(log_softmax((x @ w)[:-1]), LABELS[1:]).mean()

    compared = compare(loss, arguments(), gradients=False)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1


def test_many_selections_of_the_same_logits_are_left_alone():
    def loss(x, w):
        z = jnp.tanh(x @ w)
        return sum(logsumexp(lax.dynamic_slice_in_dim(z, n % T, 1, 0)) for n in range(40))

    compared = compare(loss, arguments(), gradients=False)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 0


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int32"])
def test_intervals_of_a_running_sum_that_begins_anew(dtype):
    x, w1, w2 = array(64, 8, seed=1), array(4, 8, 16, seed=2) * 0.3, array(4, 16, 8, seed=3) * 0.3
    counts = jnp.asarray(
        {"uint8": [200, 100, 5, 3], "uint32": [50, 2**32 - 20, 4, 3]}.get(dtype, [20, 30, 4, 3]), dtype
    )

    def mixture(x, w1, w2, counts):
        end = lax.cumsum(counts)
        rows = lax.broadcasted_iota(dtype, (64,), 0)
        shown = (rows >= (end - counts)[:, None]) & (rows < end[:, None])
        y = jnp.einsum("etf,efd->etd", jax.nn.relu(jnp.einsum("td,edf->etf", x, w1)), w2)
        return jnp.einsum("et,etd->td", shown.astype(x.dtype), y)

    compared = compare(mixture, (x, w1, w2, counts))
    assert compared.complaints == []


def blocks(q, k1, v1, k2, v2, further):
    s1, s2 = q @ k1.mT, q @ k2.mT
    m = jnp.maximum(s1.max(-1, keepdims=True), s2.max(-1, keepdims=True))
    if further is not None:
        m = jnp.maximum(m, further)
    m = lax.stop_gradient(m)
    e1, e2 = jnp.exp(s1 - m), jnp.exp(s2 - m)
    return (e1 @ v1 + e2 @ v2) / (e1.sum(-1, keepdims=True) + e2.sum(-1, keepdims=True))


@pytest.mark.parametrize("further", [None, 300.0])
def test_a_shared_maximum_with_something_greater_is_an_assumption(further):
    q, k1, v1, k2, v2 = (array(2, 9, 8, seed=n) for n in range(5))
    optimized = optimized_like_a_user(lambda *a: blocks(*a, further))
    jax.jit(optimized).lower(q, k1, v1, k2, v2)
    for site in optimized.report().sites:
        assert bool(site.assumptions) == (further is not None)


def test_two_products_that_read_each_others_maximum():
    q, k1, k2 = (array(2, 24, 8, seed=n) for n in range(3))
    compared = compare(lambda q, k1, k2: blocks(q, k1, k1, k2, k2, None), (q, k1, k2))
    assert compared.complaints == []


def test_huge_scores_below_a_fill():
    q, k, v = (array(1, 1, 300, 8, seed=n) for n in range(3))
    q, k = jnp.abs(q) * 6e4, -jnp.abs(k) * 6e4

    def attend(q, k, v):
        scores = jnp.where(jnp.tril(jnp.ones((300, 300), bool)), q @ k.mT * 0.35, -1e4)
        return softmax(scores) @ v

    given, expected = (compiled(f)(q, k, v) for f in (optimized_like_a_user(attend), attend))
    assert jnp.isnan(given).sum() == jnp.isnan(expected).sum() == 0


def test_a_nan_that_is_added_to_hidden_scores_shows_where_it_did():
    q, k, v = array(1, 2, 300, 8, seed=1), array(1, 1, 300, 8, seed=2), array(1, 1, 300, 8, seed=3)
    shown = jnp.tril(jnp.ones((300, 300), bool))
    bias = jnp.where(~shown & (jnp.arange(300) == 299), jnp.nan, array(1, 1, 300, 300, seed=4))

    def attend(q, k, v, bias):
        return softmax(q @ k.mT * 0.35 + bias + jnp.where(shown, 0.0, -1e9)) @ v

    given, expected = (compiled(f)(q, k, v, bias) for f in (optimized_like_a_user(attend), attend))
    assert jnp.array_equal(jnp.isnan(given), jnp.isnan(expected))


def test_a_row_of_captured_numbers_does_not_count_with_those_before_it():
    numbers = jnp.arange(12).reshape(2, 6)

    def row(place):
        parts = jax.jit(lambda x: lax.slice(x, (place, 0), (place + 1, 6)))
        graph = Graph(flatten(jax.make_jaxpr(lambda x: x + parts(numbers))(numbers)))
        scope = Scope(graph)
        last = scope.space.full(graph.numbers[graph.root][graph.root.outvars[0]])
        operands = scope.space.operands(last)
        return [is_position(scope, operand, last.view[1][1]) for operand in operands]

    assert row(0) == [False, True]
    assert row(1) == [False, False]


def test_what_nothing_reads_is_no_site():
    """As the forward that a library runs for the shapes of its parameters alone."""
    q = array(8, 4)
    attend = lambda q: jax.nn.softmax(q @ q.T, -1) @ q  # noqa: E731

    def called(q):
        attend(q)
        return q + 1

    def in_a_loop(q):
        return jax.lax.scan(lambda x, _: (x + 1, attend(x)), q, None, length=3)[0]

    def in_a_branch(q):
        return jax.lax.cond(q[0, 0] > 0, lambda q: (attend(q), q)[1], lambda q: q, q)

    for function in (called, in_a_loop, in_a_branch):
        report = autopallas.explain(function, q)
        assert not report.sites
        assert not report.near_misses
    assert len(autopallas.explain(attend, q).sites) == 1
