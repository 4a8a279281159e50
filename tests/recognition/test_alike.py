"""Places of one form are proved once, and what is carried over is what a proof of their own would have given."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import pytest
from support import layouts, programs  # noqa: F401 - they fill the catalogue
from support.catalogue import EQUAL, ODD, SPELLINGS, array, bhtd
from support.compare import compare

from autopallas.graph import Graph, equal_programs, flatten
from autopallas.graph.proof_cache import ProofCache
from autopallas.patterns import find
from autopallas.patterns.attention.draft import AttentionDraft

LAYERS = 5


def summary(program, arguments):
    """All that recognition says of a program."""
    matches, misses = find(Graph(flatten(jax.make_jaxpr(program)(arguments))), None, True)
    sites = [
        (m.op, m.site, m.operands, m.results, m.location, m.direction, str(m.original), m.assumptions)
        + tuple((b.cotangent, b.gradients, b.mapped) for b in m.backwards)
        for m in matches
    ]
    return sites, misses


@pytest.fixture
def proofs(monkeypatch):
    """Counts proofs; ``alone`` makes every place be proved by itself."""

    class Proofs:
        count = 0

        def alone(self):
            monkeypatch.setattr(ProofCache, "like", lambda *_: iter(()))

    counting, prove = Proofs(), ProofCache.prove

    def counted(self, *args):
        counting.count += 1
        return prove(self, *args)

    monkeypatch.setattr(ProofCache, "prove", counted)
    return counting


def stacked(layers):
    """A program of layers, each with arrays of its own; the first of these is moved by the layer before."""

    def program(arguments):
        moved = jnp.float32(0)
        results = []
        for layer, (first, *rest) in zip(layers, arguments, strict=True):
            result = layer(first + moved.astype(first.dtype), *rest)
            moved = jnp.tanh(jnp.sum(jax.tree.leaves(result)[0]).astype(jnp.float32))
            results.append(result)
        return results

    return program


@pytest.mark.parametrize("name", sorted(SPELLINGS))
def test_equal_layers_are_what_each_of_them_is(name, proofs):
    spelling = SPELLINGS[name]
    program = stacked([spelling.program(ODD)] * LAYERS)
    arguments = [spelling.arguments(ODD, jnp.float32)] * LAYERS
    carried = summary(program, arguments)
    few, proofs.count = proofs.count, 0
    proofs.alone()
    assert carried == summary(program, arguments)
    assert few < proofs.count
    assert sum(site[0] == "attention" for site in carried[0]) == LAYERS * spelling.sites(ODD)


def attention(q, k, v, scale=0.3, fill=-jnp.inf, ahead=0, axis=-1, dtype=jnp.float32):
    scores = jnp.where(jnp.tril(jnp.ones((q.shape[-2], k.shape[-2]), bool), ahead), (q @ k.mT) * scale, fill)
    return jax.nn.softmax(scores.astype(dtype), axis).astype(q.dtype) @ v


def with_its_maximum(q, k, v):
    scores = q @ k.mT * 0.3
    return jax.nn.softmax(scores) @ v + jnp.max(scores)


def divided_by_another_sum(q, k, v):
    weights = jnp.exp(q @ k.mT * 0.3)
    return weights / jnp.sum(weights + 1.0, -1, keepdims=True) @ v


def of_shifted_values(q, k, v):
    return jax.nn.softmax(q @ k.mT * 0.3) @ (v + jnp.mean(q, -2, keepdims=True))


def with_a_bias_of_its_own(q, k, v):
    return jax.nn.softmax(q @ k.mT * 0.3 + jnp.asarray(array(q.shape[-2], k.shape[-2], seed=random.randrange(99)))) @ v


def with_dropout(q, k, v):
    weights = jax.nn.softmax(q @ k.mT * 0.3)
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, weights.shape), weights, 0) @ v


VARIANTS = [
    attention,
    lambda q, k, v: attention(q, k, v, scale=0.4),
    lambda q, k, v: attention(q, k, v, fill=-1e9),
    lambda q, k, v: attention(q, k, v, ahead=1),
    lambda q, k, v: attention(q, k, v, axis=-2),
    lambda q, k, v: attention(q, k, v, dtype=jnp.bfloat16),
    lambda q, k, v: attention(q, k, v * 2.0),
    lambda q, k, v: attention(q, q, v),
    with_its_maximum,
    divided_by_another_sum,
    of_shifted_values,
    with_a_bias_of_its_own,
    with_dropout,
    *(s.program(EQUAL) for s in SPELLINGS.values() if s.inputs is bhtd and not s.extra(EQUAL, jnp.float32)),
]


@pytest.mark.parametrize("seed", range(40))
def test_layers_that_differ_are_told_apart(seed, proofs):
    chosen = random.Random(seed)
    # Few kinds, so that a layer often follows one that is its equal, or nearly so.
    kinds = [chosen.choice(VARIANTS) for _ in range(3)] + [attention]
    program = stacked([chosen.choice(kinds) for _ in range(8)])
    arguments = [bhtd(EQUAL, jnp.float32)] * 8
    state = random.getstate()
    carried = summary(program, arguments)
    random.setstate(state)
    proofs.alone()
    assert carried == summary(program, arguments)


def train_step(program, *of):
    """The gradients of a program of layers by all arguments, or by those at some positions of each layer."""

    def step(arguments):
        def loss(chosen):
            given = [[c.get(str(i), x) for i, x in enumerate(own)] for c, own in zip(chosen, arguments, strict=True)]
            return sum(jnp.vdot(x, jnp.sin(x)).astype(jnp.float32) for x in jax.tree.leaves(program(given)))

        return jax.grad(loss)([{str(i): x for i, x in enumerate(own) if not of or i in of} for own in arguments])

    return step


@pytest.mark.parametrize("name", sorted(SPELLINGS))
def test_equal_layers_of_train_steps_are_what_each_of_them_is(name, proofs):
    spelling = SPELLINGS[name]
    program = train_step(stacked([spelling.program(ODD)] * 3), 0, 1, 2)
    arguments = [spelling.arguments(ODD, jnp.float32)] * 3
    carried = summary(program, arguments)
    proofs.alone()
    assert carried == summary(program, arguments)


def recurrent(factor=0.9, narrow=False):
    """A layer with a loop that is written in it, so that each such layer has a body of its own, and a norm behind."""

    def layer(x, scale):
        def step(state, row):
            state = jax.nn.silu(state) * factor + row
            return state, state.astype(jnp.bfloat16).astype(jnp.float32) if narrow else state

        y = jax.lax.scan(step, x[0], x)[1]
        return y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * scale

    return layer


ROWS = array(8, 16), array(16, seed=1)


def test_layers_with_equal_loops_of_their_own_are_proved_once(proofs):
    carried = summary(stacked([recurrent()] * LAYERS), [ROWS] * LAYERS)
    few, proofs.count = proofs.count, 0
    proofs.alone()
    assert carried == summary(stacked([recurrent()] * LAYERS), [ROWS] * LAYERS)
    assert few <= proofs.count - LAYERS + 2
    assert [site[0] for site in carried[0]].count("rms_norm") == LAYERS


def test_two_bodies_are_compared_once(monkeypatch):
    """However many proofs of a layer meet its loop."""
    compared, pairs = equal_programs._compared, []

    def counted(a, b):
        pairs.append((a, b))
        return compared(a, b)

    def layer(x, scale):
        y = jax.lax.scan(lambda state, row: ((state := jnp.sin(state) * 0.7 + row), state), x[0], x)[1]
        parts = [y + i for i in range(6)]
        return sum(x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale for x in parts)

    monkeypatch.setattr(equal_programs, "_compared", counted)
    sites, _ = summary(stacked([layer] * LAYERS), [ROWS] * LAYERS)
    assert [site[0] for site in sites].count("rms_norm") == 6 * LAYERS
    assert pairs
    assert len(pairs) == len({(id(a), id(b)) for a, b in pairs})  # which the list keeps alive


@pytest.mark.parametrize("seed", range(8))
def test_layers_with_loops_that_differ_are_told_apart(seed, proofs):
    chosen = random.Random(seed)
    kinds = [recurrent(), recurrent(), recurrent(0.8), recurrent(narrow=True)]
    program = stacked([chosen.choice(kinds) for _ in range(LAYERS)])
    carried = summary(program, [ROWS] * LAYERS)
    proofs.alone()
    assert carried == summary(program, [ROWS] * LAYERS)


TRAINED = [
    *VARIANTS[:11],
    lambda q, k, v: attention(q, jax.lax.stop_gradient(k), v),
    lambda q, k, v: attention(q, k, k),
    lambda q, k, v: attention(q, k, v) + attention(q, k, v + 1.0),
    lambda q, k, v: attention(jnp.tanh(q), k, v),
    lambda q, k, v: jax.checkpoint(attention)(q, k, v),
    lambda q, k, v: jax.nn.softmax(q @ k.mT * 0.3 + jnp.sum(v, -1)[..., None, :]) @ v,
]


@pytest.mark.parametrize("seed", range(40))
def test_layers_of_train_steps_that_differ_are_told_apart(seed, proofs):
    chosen = random.Random(seed)
    kinds = [chosen.choice(TRAINED) for _ in range(3)] + [attention]
    program = stacked([chosen.choice(kinds) for _ in range(7)])
    program = train_step(program, *chosen.choice([(), (0,), (1, 2), (0, 2)]))
    arguments = [bhtd(EQUAL, jnp.float32)] * 7
    carried = summary(program, arguments)
    proofs.alone()
    assert carried == summary(program, arguments)


def test_backwards_of_equal_layers_are_taken_over(monkeypatch):
    made = []
    match_with = AttentionDraft.match_with
    monkeypatch.setattr(AttentionDraft, "match_with", lambda self, search: made.append(1) or match_with(self, search))
    arguments = [bhtd(ODD, jnp.float32)] * 12
    sites, _ = summary(train_step(stacked([attention] * 12)), arguments)
    assert [site[5] for site in sites] == ["forward+backward"] * 12
    assert len(made) <= 3


def test_a_train_step_of_equal_layers_computes_what_it_did():
    layers = [attention, attention, attention, lambda q, k, v: attention(q, k, v, scale=0.4), attention]
    compared = compare(stacked(layers), [[bhtd(ODD, jnp.float32)] * 5])
    assert compared.complaints == []
    assert compared.counts() == 5


def test_of_many_equal_layers_few_are_proved(proofs):
    arguments = [bhtd(ODD, jnp.float32)] * 24

    def layer(q, k, v):
        return attention(q, k, v, ahead=4)

    matches, misses = summary(stacked([layer] * 24), arguments)
    assert len(matches) == 24
    assert misses == []
    few, proofs.count = proofs.count, 0
    summary(stacked([layer] * 2), arguments[:2])
    assert few <= 2 * proofs.count


def test_a_program_of_equal_layers_computes_what_it_did():
    arguments = [bhtd(ODD, jnp.float32)] * 3
    for gradients in (False, True):
        compared = compare(stacked([attention] * 3), [arguments], gradients=gradients)
        assert compared.complaints == []
        assert compared.counts() == 3
