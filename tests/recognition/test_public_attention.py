"""Attention as public code writes it is found, in its forward and in a train step, and computes what it did."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from support.catalogue import array
from support.compare import (
    TOLERANCE,
    Compared,
    compare,
    compiled,
    floats,
    in_float64,
    measured,
    optimized_like_a_user,
    optimized_step,
    with_gradients,
)

import autopallas
from recognition.attention_in_blocks import LOOK_ALIKES, PROGRAMS  # it enters its programs among the others
from recognition.public_attention import JOINED


def train_step(function, arguments) -> Compared:
    """The program with its backward in it, optimized, against float64."""
    step, given, report = optimized_step(function, arguments)
    true = in_float64(step, arguments)
    result = Compared(report, [], {})
    dtype = min((x.dtype.name for x in floats(arguments)), key=lambda name: jnp.dtype(name).itemsize)
    errors = measured(given, true)
    if any(error[0] > TOLERANCE[dtype][1] for error in errors):
        own = measured(compiled(step)(*arguments), true)
        pairs = zip(errors, own, strict=True)
        result.complaints += [f"{a} {b}" for a, b in pairs if a[0] > max(TOLERANCE[dtype][1], 2 * b[0])]
    return result


def attentions(compared):
    return [site for site in compared.report.sites if site.op == "attention"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_found_in_its_forward_and_exact(name):
    program = PROGRAMS[name]
    compared = compare(program.function, program.arguments())
    assert compared.complaints == []
    assert compared.reasons() == []
    assert compared.counts() == program.sites


@pytest.mark.parametrize("name", PROGRAMS)
def test_found_in_a_train_step_and_exact(name):
    program = PROGRAMS[name]
    compared = train_step(program.function, program.arguments())
    assert compared.complaints == []
    assert compared.reasons() == []
    assert [site.direction for site in attentions(compared)] == ["forward+backward"] * program.sites


@pytest.mark.parametrize(
    "name",
    [
        "mask_as_an_argument",
        "repeated_and_turned",
        "sink_in_the_maximum",
        "contents_and_positions",
        "cast_with_a_rule",
        "blocks_with_shared_statistics",
    ],
)
def test_found_under_vmap_and_exact(name):
    program = PROGRAMS[name]
    stacked = [jnp.stack([x, x[::-1] if x.ndim > 2 else x]) for x in program.arguments()]
    for found in (compare(jax.vmap(program.function), stacked), train_step(jax.vmap(program.function), stacked)):
        assert found.complaints == []
        assert found.reasons() == []
        assert found.counts() == program.sites


@pytest.mark.parametrize("name", JOINED)
def test_products_that_are_added_are_one_product(name):
    program = PROGRAMS[name]
    arguments = program.arguments()
    for function in (program.function, with_gradients(program.function, arguments)):
        found = autopallas.explain(optimized_like_a_user(function), *arguments).sites
        (site,) = (one for one in found if one.op == "attention")  # beside it, products may be respelt
        assert site.spec["sides"] == []


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("bias_of")])
def test_a_bias_that_is_a_product_is_not_taken_for_the_scores(name):
    program = PROGRAMS[name]
    arguments = program.arguments()
    for function in (program.function, with_gradients(program.function, arguments)):
        found = autopallas.explain(optimized_like_a_user(function), *arguments).sites
        (site,) = (one for one in found if one.op == "attention")
        _, length, _, size = arguments[0].shape
        assert f" T={length} S={length} D={size} " in site.spec_line


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alike_is_left_as_it_is_or_exact(name):
    program = LOOK_ALIKES[name]
    arguments = program.arguments()
    compared = compare(program.function, arguments)
    assert compared.complaints == []
    assert compared.counts() == program.sites
    if program.kept == "side":
        (site,) = attentions(compared)
        assert site.spec["sides"]
    else:
        assert any(program.kept in reason for reason in compared.reasons()) or not program.kept
    assert train_step(program.function, arguments).complaints == []


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("parts_of_the_keys")])
def test_parts_with_a_maximum_each_assume_that_it_is_finite(name):
    program = PROGRAMS[name]
    (site,) = autopallas.explain(optimized_like_a_user(program.function), *program.arguments()).sites
    assert any("a finite maximum of its own" in said for said in site.assumptions)
    careful = autopallas.explain(optimized_like_a_user(program.function, assume_finite=False), *program.arguments())
    assert careful.counts()["attention"] == 0


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith(("blocks", "three"))])
def test_blocks_whose_maximum_is_subtracted_assume_nothing(name):
    program = PROGRAMS[name]
    (site,) = autopallas.explain(optimized_like_a_user(program.function), *program.arguments()).sites
    assert not any("maximum" in said for said in site.assumptions)


def test_a_near_miss_names_the_operand_and_its_line():
    def before_the_loop(x, weights):
        q = jnp.tanh(x)
        s = jnp.einsum("td,sd->ts", q, x)
        return jax.lax.scan(lambda c, w: (c + jax.nn.softmax(s * w) @ x, None), x, weights)[0]

    def summed_over_heads(q, k, v):
        return jnp.einsum("nts,snd->td", jax.nn.softmax(jnp.einsum("tnd,snd->nts", q, k)), v)

    def values_of_the_query(q, k, v):
        return jnp.einsum("ts,tsd->td", jax.nn.softmax(q @ k.mT), q[:, None] * v)

    x = array(5, 4)
    (miss,) = autopallas.explain(optimized_like_a_user(before_the_loop), x, jnp.arange(3.0)).near_misses
    assert "the queries are computed in an enclosing body and not passed in: float32[5,4] of tanh at" in miss.reason
    assert "before_the_loop" in miss.reason
    (miss,) = autopallas.explain(optimized_like_a_user(values_of_the_query), x, x, x).near_misses
    assert "the values depend on the query: float32[5,5,4] of mul at" in miss.reason
    q = array(5, 2, 4)
    (miss,) = autopallas.explain(optimized_like_a_user(summed_over_heads), q, q, q).near_misses
    assert miss.reason


@pytest.mark.parametrize("gradient", [False, True])
def test_a_near_miss_stays_where_a_loss_follows(gradient):
    def loss(weights, table, tokens):
        x = table[tokens]
        q, k, v = (x @ w for w in weights)
        s = q @ k.mT
        least = jax.lax.top_k(s, 3)[0][..., -1:]
        x = x + jax.nn.softmax(jnp.where(s >= least, s, -jnp.inf)) @ v
        own = jax.nn.log_softmax(x @ table.T)
        return -jnp.take_along_axis(own, jnp.roll(tokens, 1, -1)[..., None], -1).mean()

    function = jax.grad(loss, (0, 1)) if gradient else loss
    report = autopallas.explain(
        optimized_like_a_user(function), array(3, 8, 8), array(20, 8), jnp.arange(12).reshape(2, 6)
    )
    assert report.counts()["cross_entropy"] == 1
    assert [(miss.op, miss.reason) for miss in report.near_misses] == [("attention", "the scores pass through top_k")]
