"""Associative scans whose operands lack axes of their results: written for one example and mapped over a batch, with
decays that the examples share, or of heads."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax import lax
from support.compare import compiled
from support.respellings import random
from support.tiers import examples

import autopallas

T, N, H, B = 9, 4, 3, 2


def usual(left, right):
    return right[0] * left[0], right[0] * left[1] + right[1]


def of_heads(left, right):
    return right[0] * left[0], right[0][..., None] * left[1] + right[1]


def by_einsum(left, right):
    return right[0] * left[0], jnp.einsum("...h,...hp->...hp", right[0], left[1]) + right[1]


def doubled(combine, a, b):
    """By shifts of all steps, along the first axis."""
    by = 1
    while by < len(a):
        before = [jnp.concatenate([jnp.full_like(x[:by], fill), x[:-by]]) for x, fill in ((a, 1), (b, 0))]
        a, b = combine(before, (a, b))
        by *= 2
    return b


def judged(function, *arguments, sites, misses=0):
    """Compares in float64, and asserts how many scans and gradients of scans are replaced."""
    with jax.enable_x64(True):
        arguments = jax.tree.map(lambda x: np.asarray(x, np.float64), arguments)
        optimized = autopallas.optimize(function, objective="always", strict=True, ops={"associative_scan"})
        found, expected = optimized(*arguments), compiled(function)(*arguments)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10 * max(1, np.max(np.abs(other))))
        report = optimized.report()
    assert report.counts().get("respelling", 0) == sites
    assert len(report.near_misses) == misses


# ---------------------------------------------------------------------- models


def linear_recurrent_unit(parameters, x):
    """arXiv:2303.06349; x is [T, H]."""
    radius, angle, scale, write, read, skip = parameters
    decay = jnp.exp(-jnp.exp(radius) + 1j * jnp.exp(angle))
    weights = (write[0] + 1j * write[1]) * jnp.exp(scale)[:, None]
    decays = jnp.repeat(decay[None], len(x), axis=0)
    states = lax.associative_scan(usual, (decays, jax.vmap(lambda u: weights @ u)(x)))[1]
    return jax.vmap(lambda h, u: ((read[0] + 1j * read[1]) @ h).real + skip * u)(states, x)


def both_directions(parameters, x):
    """As arXiv:2208.04933, with states that are read from both ends."""
    radius, angle, step, write, read, skip = parameters
    rate = -jnp.exp(radius) + 1j * angle
    decay = jnp.exp(rate * jnp.exp(step))
    weights = ((decay - 1) / rate)[:, None] * (write[0] + 1j * write[1])
    decays = decay * jnp.ones((len(x), len(decay)))
    given = jax.vmap(lambda u: weights @ u)(x)
    ahead = lax.associative_scan(usual, (decays, given))[1]
    back = lax.associative_scan(usual, (decays, given), reverse=True)[1]
    own = jnp.concatenate([read[0] + 1j * read[1], read[0] - 1j * read[1]], axis=-1)
    states = jnp.concatenate([ahead, back], axis=-1)
    return jax.vmap(lambda h: 2 * (own @ h).real)(states) + jax.vmap(lambda u: skip * u)(x)


def gated(parameters, x):
    """Decays of each example, and a state with an axis more."""
    width, rate, write, read = parameters
    decay = jnp.exp(-jax.nn.softplus(x @ width)[..., None] * jnp.exp(rate))
    given = x[..., None] * (x @ write)[:, None]
    states = lax.associative_scan(usual, (decay, given))[1]
    return jnp.einsum("tdn,tn->td", states, x @ read)


def _unit():
    return (
        0.1 * random(N) - 1, 0.1 * random(N, seed=1) - 1, 0.1 * random(N, seed=2) - 1,
        random(2, N, H, seed=3), random(2, H, N, seed=4), random(H, seed=5),
    )  # fmt: skip


def _in_layers(model, parameters, x, key):
    """Two layers with batch norms over all examples, gates and dropout around them."""

    def layer(own, x, key):
        mean, variance = lax.pmean(x.mean(0), "batch"), lax.pmean((x**2).mean(0), "batch")
        y = jax.nn.gelu(model(own, (x - mean) / jnp.sqrt(variance - mean**2 + 1e-5)))
        kept = jax.random.bernoulli(key, 0.9, y.shape)
        return x + jnp.where(kept, y * jax.nn.sigmoid(y), 0) / 0.9

    for own, one in zip(parameters, jax.random.split(key, 2), strict=True):
        x = layer(own, x, one)
    return x.mean(0)


MODELS = {
    "linear recurrent unit": (linear_recurrent_unit, _unit(), 1),
    "both directions": (both_directions, _unit(), 2),
    "gated": (gated, (random(H, H), random(H, N, seed=1), random(H, N, seed=2), random(H, N, seed=3)), 1),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_written_per_example(name):
    model, parameters, scans = MODELS[name]
    x = random(B, T, H, seed=9)

    def mapped(parameters, x):
        return jax.vmap(model, (None, 0))(parameters, x)

    def loss(parameters, x):
        return jnp.sum(jnp.sin(mapped(parameters, x)))

    judged(mapped, parameters, x, sites=scans)
    judged(jax.value_and_grad(loss, (0, 1)), parameters, x, sites=2 * scans)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_examples(name):
    model, parameters, scans = MODELS[name]
    step = jax.vmap(jax.grad(lambda parameters, x: jnp.sum(jnp.sin(model(parameters, x)))), (None, 0))
    judged(step, parameters, random(B, T, H, seed=9), sites=2 * scans)


@pytest.mark.parametrize("name", ["linear recurrent unit", "both directions"])
def test_layers_with_batch_norm_and_dropout(name):
    model, parameters, scans = MODELS[name]

    def loss(parameters, x, keys):
        run = functools.partial(_in_layers, model)
        return jnp.sum(jnp.sin(jax.vmap(run, (None, 0, 0), axis_name="batch")(parameters, x, keys)))

    keys = jax.random.split(jax.random.key(0), B)
    several = [parameters, jax.tree.map(lambda p: 0.9 * p, parameters)]
    judged(lambda p, x: jax.grad(loss)(p, x, keys), several, random(B, T, H, seed=9), sites=4 * scans)


def test_ensembles_share_nothing_and_are_found_too():
    model, parameters, scans = MODELS["linear recurrent unit"]
    several = jax.tree.map(lambda p: jnp.stack([p, 0.9 * p, 0.8 * p]), parameters)
    step = jax.vmap(jax.grad(lambda p, x: jnp.sum(jnp.sin(jax.vmap(model, (None, 0))(p, x)))), (0, None))
    judged(step, several, random(B, T, H, seed=9), sites=2 * scans)


# ---------------------------------------------------------------------- operands and axes


def scanned(a, b, combine=usual, **options):
    return lax.associative_scan(combine, (jnp.tanh(a), b), **options)[1]


FORMS = {
    "a batch shares decays": (jax.vmap(scanned, (None, 0)), (T, N), (B, T, N)),
    "the batch in the middle": (jax.vmap(scanned, (None, 1), 1), (T, N), (T, B, N)),
    "the batch last": (jax.vmap(scanned, (None, -1), -1), (T, N), (T, N, B)),
    "a batch shares what is added": (jax.vmap(scanned, (0, None)), (B, T, N), (T, N)),
    "both, in other places": (jax.vmap(scanned, (1, 0)), (T, B, N), (B, T, N)),
    "two batches": (jax.vmap(jax.vmap(scanned, (None, 0)), (0, 0)), (B, T, N), (B, 3, T, N)),
    "a batch of each": (jax.vmap(jax.vmap(scanned, (None, 0)), (0, None)), (B, T, N), (3, T, N)),
    "as many examples as steps": (jax.vmap(scanned, (None, 0)), (T, T), (T, T, T)),
    "heads": (lambda a, b: scanned(a, b, of_heads), (T, N), (T, N, H)),
    "heads by einsum": (lambda a, b: scanned(a, b, by_einsum), (T, N), (T, N, H)),
    "heads of a batch": (jax.vmap(lambda a, b: scanned(a, b, of_heads), (None, 0)), (T, N), (B, T, N, H)),
    "reversed": (jax.vmap(lambda a, b: scanned(a, b, reverse=True), (None, 0)), (T, N), (B, T, N)),
    "along the last axis": (jax.vmap(lambda a, b: scanned(a, b, axis=1), (None, 0)), (N, T), (B, N, T)),
    "no other axis": (jax.vmap(scanned, (None, 0)), (T,), (B, T)),
    "one example": (jax.vmap(scanned, (None, 0)), (T, N), (1, T, N)),
    "by shifts": (jax.vmap(lambda a, b: doubled(usual, jnp.tanh(a), b), (None, 0)), (T, N), (B, T, N)),
    "heads by shifts": (lambda a, b: doubled(of_heads, jnp.tanh(a), b), (T, N), (T, N, H)),
}


@pytest.mark.parametrize("name", FORMS)
def test_operands_lack_axes(name):
    run, a, b = FORMS[name]
    a, b = random(*a), random(*b, seed=1)
    judged(run, a, b, sites=1)
    for argnums in (0, 1, (0, 1)):
        judged(jax.value_and_grad(lambda a, b: jnp.sum(jnp.sin(run(a, b))), argnums), a, b, sites=2)


ELSEWHERE = {
    "what is added": lambda a, b, h: jnp.sin(h) * jnp.cos(b),
    "the decays": lambda a, b, h: jnp.sin(h) * jnp.cos(a),
    "a sum of both": lambda a, b, h: jnp.sin(h + b),
    "squares": lambda a, b, h: h * h / 2,
    "a product with what is added": lambda a, b, h: h * b,
    "the states alone": lambda a, b, h: h,
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_operands_are_read_elsewhere_too(name, shared):
    """Then their gradients begin as other sums, or what comes in is one of the operands."""

    def run(a, b):
        a = jnp.tanh(a)
        return ELSEWHERE[name](a, b, lax.associative_scan(usual, (a, b))[1])

    mapped = jax.vmap(run, (None if shared else 0, 0))
    a = random(T, N) if shared else random(B, T, N)
    step = jax.value_and_grad(lambda a, b: jnp.sum(mapped(a, b)), (0, 1))
    judged(step, a, random(B, T, N, seed=1), sites=2)


@settings(max_examples=examples(24), deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(st.data())
def test_random_maps(data):
    """Nothing that is replaced may differ, whatever is mapped, and all of it is found."""
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    steps, reverse, shifted = pick(8, 9, 16, 21), pick(False, True), pick(False, False, True)
    combine = usual if shifted else pick(usual, usual, of_heads, by_einsum)
    a, b = [steps, N], [steps, N, *([H] if combine is not usual else [])]

    def run(a, b):
        a, b = jnp.tanh(a), b[::-1] if reverse and shifted else b
        h = doubled(combine, a, b) if shifted else scanned(a, b, combine, reverse=reverse)
        return jnp.sin(h + b) if pick_residual else jnp.sin(h)

    pick_residual = pick(False, True)
    inside = pick(False, True)
    mapped = jax.grad(lambda a, b: jnp.sum(run(a, b)), (0, 1)) if inside else run
    for size in [pick(1, 2, 3, steps) for _ in range(pick(0, 1, 1, 2))]:
        places = [pick(None, 0), 0] if shifted else [pick(None, 0, 1, -1), pick(0, 1, -1)]
        for shape, place in zip((a, b), places, strict=True):
            if place is not None:
                shape.insert(place if place >= 0 else len(shape), size)
        mapped = jax.vmap(mapped, places)
    step = mapped if inside else jax.grad(lambda a, b: jnp.sum(mapped(a, b)), (0, 1))
    judged(step, random(*a), random(*b, seed=1), sites=2)


# ---------------------------------------------------------------------- what is something else


def _mixed(left, right):
    return right[0] * left[0], right[0] * left[1].mean(0, keepdims=True) + right[1]


def _summed(left, right):
    return right[0] * left[0], (right[0] * left[1]).sum(0, keepdims=True) + right[1]


def _exchanged(left, right):
    return right[0] * left[0], right[0] * left[1][::-1] + right[1]


def _turned(left, right):
    return right[0] * left[0], right[0][..., None] * jnp.swapaxes(left[1], -1, -2) + right[1]


def _now_and_then(left, right):
    first = right[0].shape[0] > 2
    return right[0] * left[0], (right[0][..., None] if first else right[0][..., None, :]) * left[1] + right[1]


def _twice(left, right):
    """The products of decays of heads, each with the sum of all."""
    return right[0] * left[0].sum(-1, keepdims=True), right[0] * left[1] + right[1]


WRONG = {
    "a mean over the batch": (_mixed, (1, T, N), (B, T, N), 1),
    "a sum over the batch": (_summed, (1, T, N), (B, T, N), 1),
    "another example": (_exchanged, (1, T, N), (B, T, N), 1),
    "turned axes": (_turned, (T, N), (T, N, N), 0),
    "another axis at some levels": (_now_and_then, (T, N), (T, N, N), 0),
    "sums of products": (_twice, (T, N), (T, N), 0),
}


@pytest.mark.parametrize("name", WRONG)
def test_look_alikes_are_left_alone(name):
    combine, a, b, axis = WRONG[name]

    def run(a, b):
        return lax.associative_scan(combine, (jnp.tanh(a), b), axis=axis)[1]

    a, b = random(*a), random(*b, seed=1)
    judged(run, a, b, sites=0, misses=1)
    judged(jax.grad(lambda a, b: jnp.sum(jnp.sin(run(a, b))), (0, 1)), a, b, sites=0, misses=1)


def test_a_gradient_that_is_not_the_scans_keeps_it():
    """Of shared decays, the program doubles what one level adds."""

    @jax.custom_jvp
    def twice(x):
        return x * 1.0

    twice.defjvp(lambda primals, tangents: (twice(*primals), 2.0 * tangents[0]))

    def combine(left, right):
        own = twice(right[0]) if right[0].shape[0] == 2 else right[0]
        return own * left[0], own * left[1] + right[1]

    run = jax.vmap(lambda a, b: scanned(a, b, combine), (None, 0))
    step = jax.grad(lambda a, b: jnp.sum(jnp.sin(run(a, b))), (0, 1))
    judged(step, random(T, N), random(B, T, N, seed=1), sites=0, misses=1)


def test_what_each_example_adds_to_the_gradient_of_shared_states_is_counted_for_each():
    """Along the steps, the sum over examples of a gradient and of one more value looks as if it were added once."""

    def plainly(x):
        return jnp.broadcast_to(x, (B, *x.shape))

    repeated = jax.custom_vjp(plainly)
    repeated.defvjp(lambda x: (plainly(x), x), lambda x, cotangent: ((cotangent + x).sum(0),))

    def run(a, b):
        odd = usual((a[:, ::2], repeated(b[::2])), (a[:, 1::2], repeated(b[1::2])))
        odd = lax.associative_scan(usual, odd, axis=1)
        even = usual([x[:, :-1] for x in odd], (a[:, 2::2], plainly(b[2::2])))[1]
        even = jnp.concatenate([plainly(b[:1]), even], 1)
        between = [[(0, 0, 0), (first, 1 - first, 1), (0, 0, 0)] for first in (0, 1)]
        return lax.pad(even, 0.0, between[0]) + lax.pad(odd[1], 0.0, between[1])

    step = jax.grad(lambda a, b: jnp.sum(jnp.sin(run(jnp.tanh(a), b))), (0, 1))
    judged(step, random(B, 8, N), random(8, N, seed=1), sites=0)
