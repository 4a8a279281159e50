"""Probabilities that a number of each key multiplies, a mask or a weight, and that are normalised again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.nn import sigmoid, softmax
from support.catalogue import array
from support.compare import TOLERANCE, compare, compiled, in_float64, measured, optimized_step

B, T, S, N, D = 2, 6, 7, 2, 4


def arguments():
    """Queries, keys, values, and a number of each key, some of which are below zero; each row has one that is not."""
    shapes = (B, T, N, D), (B, S, N, D), (B, S, N, 3)
    return [*(array(*shape, seed=seed) for seed, shape in enumerate(shapes)), array(B, S, seed=3).at[:, 0].set(2)]


def attend(weigh):
    def program(q, k, v, w):
        p = weigh(softmax(jnp.einsum("btnd,bsnd->bnts", q, k) / 2), w[:, None, None])
        return jnp.einsum("bnts,bsnd->btnd", p, v)

    return program


def train_step(program):
    """The report of a step with its backward in it, and whether no error is above the tolerance and twice the
    original's own."""
    step, given, report = optimized_step(program, arguments())
    true = in_float64(step, arguments())
    own = measured(compiled(step)(*arguments()), true)
    errors = zip(measured(given, true), own, strict=True)
    return report, all(error[0] <= max(TOLERANCE["float32"][1], 2 * before[0]) for error, before in errors)


def summed(p, w):
    """A sum over the keys that is spelled as a product with their weights."""
    return jnp.einsum("bnts,bs->bnt", p, w[:, 0, 0])[..., None]


def again(p):
    return p / p.sum(-1, keepdims=True)


FOUND = {
    "a mask of booleans": lambda p, w: again(p * (w > 0)),
    "a mask of numbers": lambda p, w: again((w > 0).astype(p.dtype) * p),
    "a mask, with an epsilon": lambda p, w: (m := p * (w > 0)) / (m.sum(-1, keepdims=True) + 1e-6),
    "a mask, with a floor": lambda p, w: (m := p * (w > 0)) / jnp.maximum(m.sum(-1, keepdims=True), 1e-6),
    "weights with a gradient": lambda p, w: again(p * sigmoid(w)),
    "a sum that is a product": lambda p, w: p * (w > 0) / summed(p, (w > 0).astype(p.dtype)),
    "a mask, then weights": lambda p, w: again(again(p * (w > 0)) * sigmoid(w)),
}


@pytest.mark.parametrize("weigh", FOUND.values(), ids=FOUND)
def test_found_in_its_forward_and_exact(weigh):
    compared = compare(attend(weigh), arguments())
    assert compared.complaints == []
    assert compared.reasons() == []
    assert compared.counts() == 1


@pytest.mark.parametrize("weigh", FOUND.values(), ids=FOUND)
def test_found_in_a_train_step_and_exact(weigh):
    report, is_exact = train_step(attend(weigh))
    assert [(site.op, site.direction) for site in report.sites] == [("attention", "forward+backward")]
    assert is_exact


def test_a_row_without_a_key_gives_what_the_program_gives():
    """Without an epsilon it is 0 / 0, with one 0."""
    hidden = [*arguments()[:3], -jnp.ones((B, S))]
    for weigh, nan in ((FOUND["a mask of booleans"], True), (FOUND["a mask, with an epsilon"], False)):
        compared = compare(attend(weigh), hidden, gradients=False)
        assert compared.complaints == []
        assert compared.counts() == 1
        assert bool(jnp.isnan(attend(weigh)(*hidden)).all()) == nan


OTHERS = {
    "the sum of other weights": lambda p, w: p * sigmoid(w) / (p * jnp.cos(w)).sum(-1, keepdims=True),
    "the sum without the weights": lambda p, w: p * sigmoid(w) / p.sum(-1, keepdims=True),
    "the sum of other weights, as a product": lambda p, w: p * w / summed(p, w**2),
    "the sum over the queries": lambda p, w: (m := p * sigmoid(w)) / m.sum(-2, keepdims=True),
    "the sum of squares": lambda p, w: (m := p * sigmoid(w)) / (m * m).sum(-1, keepdims=True),
    "weights of the greatest probability": lambda p, w: again(p * sigmoid(w + p.max(-1, keepdims=True))),
}
"""What looks like it and computes something else."""


@pytest.mark.parametrize("weigh", OTHERS.values(), ids=OTHERS)
def test_what_looks_like_it_stays_what_it_is(weigh):
    compared = compare(attend(weigh), arguments())
    assert compared.complaints == []
    assert train_step(attend(weigh))[1]


def test_a_weighted_sum_that_is_returned_keeps_the_program_as_it_is():
    def program(q, k, v, w):
        p = softmax(jnp.einsum("btnd,bsnd->bnts", q, k) / 2) * sigmoid(w)[:, None, None]
        return jnp.einsum("bnts,bsnd->btnd", again(p), v), p

    compared = compare(program, arguments())
    assert compared.complaints == []
    assert compared.counts() == 0
    assert any("the scores or probabilities are also" in reason for reason in compared.reasons())


def test_an_expected_number_of_each_row_is_still_found_where_nothing_divides_by_it():
    def program(q, k, v, w):
        p = softmax(jnp.einsum("btnd,bsnd->bnts", q, k) / 2)
        return (p * w[:, None, None]).sum(-1)

    compared = compare(program, arguments())
    assert compared.complaints == []
    assert compared.counts() == 1


def test_found_under_vmap():
    program = attend(FOUND["a mask of booleans"])
    compared = compare(jax.vmap(program), [jnp.stack([x, x[::-1]]) for x in arguments()])
    assert compared.complaints == []
    assert compared.counts() == 1
