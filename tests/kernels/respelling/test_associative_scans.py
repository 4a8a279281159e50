"""Recurrences written with ``lax.associative_scan``: which are found, with their gradients, and which are not."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from support.compare import compare
from support.respellings import random

import autopallas
from autopallas.graph import Graph, flatten
from autopallas.kernels.respelling import doubling
from autopallas.patterns import find
from autopallas.plan.decision import Decision
from autopallas.plan.shared_values import without_shared_values

T, D = 21, 3


def found(function, *arguments):
    """The numbers of gradients of each site: 0 for the scan itself."""
    sites = find(Graph(flatten(jax.make_jaxpr(function)(*arguments))), ("associative_scan",), True)[0]
    return sorted(len(dict(site.spec.parameters)["gradients"]) for site in sites)


def usual(left, right):
    return left[0] * right[0], right[0] * left[1] + right[1]


def scanned(a, b, combine=usual, **options):
    return lax.associative_scan(combine, (a, b), **options)[1]


def judged(function, *arguments, wanted=(0,)):
    assert found(function, *arguments) == list(wanted)
    result = compare(function, arguments, gradients=False)
    assert result.complaints == []
    return result


def trained(function, argnums=(0, 1)):
    return jax.value_and_grad(lambda *arguments: jnp.sum(jnp.sin(function(*arguments))), argnums)


FORMS = {
    "usual": lambda a, b: scanned(jnp.tanh(a), b),
    "other factors first": lambda a, b: scanned(
        jnp.tanh(a), b, lambda left, right: (right[0] * left[0], right[1] + left[1] * right[0])
    ),
    "reversed": lambda a, b: scanned(jnp.tanh(a), b, reverse=True),
    "second axis": lambda a, b: scanned(jnp.tanh(a).T, b.T, axis=1),
    "last axis": lambda a, b: scanned(jnp.tanh(a).T, b.T, axis=-1),
    "a state of two axes": lambda a, b: scanned(jnp.tanh(a[:, :, None] * b[:, None]), a[:, :, None] * b[:, None]),
    "mapped": lambda a, b: jax.vmap(scanned)(jnp.tanh(a) * jnp.ones((2, 1, 1)), jnp.stack([b, a])),
    "under jit": lambda a, b: jax.jit(scanned)(jnp.tanh(a), b),
    "checkpointed": jax.checkpoint(lambda a, b: scanned(jnp.tanh(a), b)),
    "used twice": lambda a, b: (lambda h: h * h + jnp.cos(h))(scanned(jnp.tanh(a), b)),
    "what is computed from the decay": lambda a, b: scanned(jnp.exp(-jnp.abs(a)), a * b),
    "of two": lambda a, b: jnp.tanh(scanned(jnp.tanh(a), jnp.sin(scanned(jnp.cos(a), b)))),
}


@pytest.mark.parametrize("name", FORMS)
def test_scans_and_their_gradients_are_found(name):
    a, b = random(T, D), random(T, D, seed=1)
    count = 2 if name == "of two" else 1
    judged(FORMS[name], a, b, wanted=[0] * count)
    judged(trained(FORMS[name]), a, b, wanted=[0] * count + [2] * count)


@pytest.mark.parametrize("length", [8, 9, 16, 31, 100, 1025])
def test_lengths(length):
    judged(trained(FORMS["usual"]), random(length, D), random(length, D, seed=1), wanted=(0, 2))


@pytest.mark.parametrize("argnums", [0, 1])
def test_one_gradient_alone(argnums):
    run = trained(lambda a, b: scanned(jnp.tanh(a), b), argnums)
    assert len(found(run, random(T, D), random(T, D, seed=1))) == 2
    assert compare(run, (random(T, D), random(T, D, seed=1)), gradients=False).complaints == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_of_16_bits_are_carried_in_32(dtype):
    a, b = random(200, D, dtype=dtype), random(200, D, seed=1, dtype=dtype)
    judged(FORMS["usual"], a, b)
    judged(trained(FORMS["usual"]), a, b, wanted=(0, 2))


def test_complex_numbers():
    def run(a, b):
        return jnp.real(scanned(jnp.exp(1j * a), b + 0j))

    a, b = random(T, D), random(T, D, seed=1)
    assert found(run, a, b) == [0]
    assert found(trained(run), a, b) == [0, 2]
    state, states = 0, []
    for decay, one in zip(np.exp(1j * np.asarray(a, np.float64)), np.asarray(b, np.float64), strict=True):
        state = decay * state + one
        states.append(np.real(state))
    optimized = autopallas.optimize(run, objective="always", strict=True)
    np.testing.assert_allclose(optimized(a, b), states, rtol=1e-4, atol=1e-5)
    step = trained(run)
    optimized = autopallas.optimize(step, objective="always", strict=True)
    for one, other in zip(jax.tree.leaves(jax.jit(step)(a, b)), jax.tree.leaves(optimized(a, b)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_decays_of_one_of_zero_and_beyond_one():
    for decay in (jnp.ones((300, D)), jnp.zeros((T, D)), -jnp.ones((T, D)), 1.05 * jnp.ones((40, D))):
        run = trained(lambda a, b: scanned(a * jnp.cos(0.0 * b), b))
        judged(run, decay, random(*decay.shape), wanted=(0, 2))


@pytest.mark.parametrize("decay", [1.0, 0.9995, -0.9995])
def test_equal_roundings_do_not_add_up(decay):
    """Each step rounds the product with such a decay in the same way; a tree has few levels of them."""
    a, b = jnp.full((8192, 1), decay), jnp.where(jnp.arange(8192) % 2, 0.1, 0.1 * jnp.sign(decay))[:, None]
    assert judged(lambda a, b: scanned(a, b), a, b).errors["value"][0][0] < 1e-6
    judged(jax.grad(lambda a, b: jnp.sum(jnp.sin(1e-4 * scanned(a, b))), (0, 1)), a, b, wanted=(0, 2))


def test_equal_roundings_of_complex_states_do_not_add_up():
    a, b = jnp.full(8192, 0.9995j, jnp.complex64), 0.1 * 1j ** (jnp.arange(8192) % 4)
    run = autopallas.optimize(lambda a, b: scanned(a, b), objective="always", strict=True)
    wanted, state = [], 0
    for decay, one in zip(np.asarray(a, np.complex128), np.asarray(b, np.complex128), strict=True):
        state = decay * state + one
        wanted.append(state)
    np.testing.assert_allclose(run(a, b.astype(a.dtype)), wanted, rtol=1e-6, atol=1e-4)
    assert run.report().counts()["respelling"] == 1


@pytest.mark.parametrize("decay", [0.0, 0.3, -0.3, 1e-9])
def test_a_large_state_that_is_given_up_leaves_nothing_behind(decay):
    a, b = jnp.full((T, D), 0.9).at[9:].set(decay), random(T, D).at[8].set(1e9)
    result = judged(lambda a, b: scanned(a, b)[9:] / jnp.abs(a[9:, :1] * 1e9 + 1), a, b)
    assert result.errors["value"][0][0] < 1e-6
    judged(lambda a, b: scanned(a, b)[-1], a, b)


def test_infinite_states_stay_infinite():
    a, b = jnp.ones((T, D)).at[9].set(0.5), random(T, D).at[5].set(jnp.array([jnp.inf, -jnp.inf, jnp.nan]))
    run = autopallas.optimize(lambda a, b: scanned(a, b), objective="always", strict=True)
    np.testing.assert_array_equal(run(a, b)[5:], np.broadcast_to(np.array([np.inf, -np.inf, np.nan]), (T - 5, D)))


def test_the_first_decay_is_not_read():
    a, b = random(T, D).at[0].set(jnp.array([jnp.inf, jnp.nan, -jnp.inf])), random(T, D, seed=1)
    run = autopallas.optimize(lambda a, b: scanned(a, b), objective="always", strict=True)
    np.testing.assert_allclose(run(a, b), jax.jit(scanned)(a, b), rtol=1e-5)
    assert run.report().counts()["respelling"] == 1


@pytest.mark.parametrize("name", ["a state", "a product of decays"])
def test_what_overflows_is_assumed_away(name):
    a, b = np.full((16, D), 0.5, np.float32), np.zeros((16, D), np.float32)
    if name == "a state":
        b[0], a[1:4] = 1e30, np.array([[1], [1e30], [0]])  # given up after it has overflowed
    else:
        a[:] = 1e10
    own = autopallas.optimize(scanned, objective="always")
    own(a, b)
    assert any("overflows" in text for text in own.report().sites[0].assumptions)
    strict = autopallas.optimize(scanned, objective="always", assume_finite=False)
    np.testing.assert_array_equal(strict(a, b), jax.jit(scanned)(a, b))
    assert not strict.report().sites


@pytest.mark.parametrize("kept", ["scan", "gradients", "neither"])
def test_a_scan_stays_where_its_gradients_do(kept):
    """These read what the scan computes within, which would be computed beside the loop."""
    a, b = random(T, D), random(T, D, seed=1)
    program = jax.make_jaxpr(trained(FORMS["usual"]))(a, b)
    matches = find(Graph(flatten(program)), ("associative_scan",), True)[0]
    names = ["gradients" if dict(match.spec.parameters)["gradients"] else "scan" for match in matches]
    verdicts = [Decision("kept" if name == kept else "applied", "", "cpu") for name in names]
    found = {name: own.verdict for name, own in zip(names, without_shared_values(matches, verdicts), strict=True)}
    wanted = {
        "scan": "kept" if kept != "neither" else "applied",
        "gradients": "kept" if kept == "gradients" else "applied",
    }
    assert found == wanted


def test_in_layers_and_after_second_derivatives():
    def layers(a, b):
        return lax.scan(lambda x, a: (jnp.sin(scanned(jnp.tanh(a), x)), None), b, a)[0]

    judged(layers, random(2, T, D), random(T, D, seed=1))
    assert compare(trained(layers), (random(2, T, D), random(T, D, seed=1)), gradients=False).complaints == []
    plain = trained(FORMS["usual"])
    second = jax.grad(lambda a, b: sum(jnp.sum(x**2) for x in plain(a, b)[1]), (0, 1))
    assert compare(second, (random(T, D), random(T, D, seed=1)), gradients=False).complaints == []
    assert compare(FORMS["usual"], (random(T, D), random(T, D, seed=1))).complaints == []


def through_layers(layer):
    """A loop over layers, each with decays of its own; its backward reads, step by step, what the forward stacked."""
    return lambda a, b: lax.scan(lambda x, a: (layer(a, x), None), b, a)[0]


def read_out(a, x):
    """The states of a state-space model, expanded and read out again."""
    rate, write = jnp.exp(jnp.arange(4.0) / 4), jnp.sin(x[:, :1] * jnp.arange(4.0))
    decay = jnp.exp(-jax.nn.softplus(a)[..., None] * rate)
    return jnp.einsum("tdn,tn->td", scanned(decay, x[..., None] * write[:, None]), write) + x


LAYERS = {
    "usual": lambda a, x: jnp.sin(scanned(jnp.tanh(a), x)),
    "reversed": lambda a, x: jnp.sin(scanned(jnp.tanh(a), x, reverse=True)),
    "with a residual": lambda a, x: x + scanned(jnp.exp(-jnp.abs(a * x)), a * x),
    "both inputs are computed": lambda a, x: jnp.sin(scanned(jax.nn.sigmoid(a * x), (1 - jax.nn.sigmoid(a * x)) * x)),
    "mapped over channels": lambda a, x: jnp.sin(jax.vmap(scanned, 1, 1)(jnp.tanh(a), x)),
    "expanded and read out": read_out,
}


@pytest.mark.parametrize("name", LAYERS)
def test_in_layers_the_backward_is_given_what_it_reads(name):
    a, b = random(2, T, D), random(T, D, seed=1)
    run = trained(through_layers(LAYERS[name]))
    judged(run, a, b, wanted=(0, 2))
    judged(trained(through_layers(jax.checkpoint(LAYERS[name]))), a, b, wanted=(0, 2))


def test_in_layers_with_complex_numbers():
    def layer(a, x):
        return jnp.sin(jnp.real(scanned(jnp.exp((1j - 1) * jnp.abs(a)), x + 0j)))

    a, b = random(2, T, D), random(T, D, seed=1)
    run = trained(through_layers(layer))
    assert found(run, a, b) == [0, 2]
    optimized = autopallas.optimize(run, objective="always", strict=True)
    for one, other in zip(jax.tree.leaves(jax.jit(run)(a, b)), jax.tree.leaves(optimized(a, b)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)  # as without layers


def test_in_layers_nothing_of_the_tree_is_stacked():
    a, b = random(2, T, D), random(T, D, seed=1)
    run = trained(through_layers(LAYERS["usual"]))
    half = f"float32[2,{T // 2},{D}]"
    plain, own = (
        jax.make_jaxpr(program)(a, b).pretty_print(use_color=False).replace("f32", "float32")
        for program in (run, autopallas.optimize(run, objective="always", strict=True))
    )
    assert (half in plain, half in own) == (True, False)


def test_in_layers_of_layers_and_of_examples():
    a, b = random(2, 2, T, D), random(T, D, seed=1)
    judged(trained(through_layers(through_layers(LAYERS["usual"]))), a, b, wanted=(0, 2))
    layers = through_layers(LAYERS["usual"])
    judged(trained(lambda a, b: jax.vmap(layers, (None, 0))(a, b)), a[0], random(3, T, D, seed=1), wanted=(0, 2))


@pytest.mark.parametrize("name", ["another composition", "a value on the way"])
def test_in_layers_look_alikes_are_left_alone(name):
    """What another loop reads of the tree has to be stacked."""

    def other(a, x):
        wrong = REFUSED["a factor"](jnp.tanh(a), x)
        return jnp.sin(wrong)

    def on_the_way(a, b):
        def layer(x, a):
            pairs = jnp.tanh(a), x
            states = scanned(*pairs)
            return jnp.sin(states), pairs[0][1::2][: T // 2] * pairs[0][::2][: T // 2]

        x, products = lax.scan(layer, b, a)
        return lax.scan(lambda c, p: (c + jnp.sum(jnp.cos(p)), None), jnp.sum(x), products)[0]

    a, b = random(2, T, D), random(T, D, seed=1)
    run = through_layers(other) if name == "another composition" else on_the_way
    assert found(trained(run), a, b) == []
    assert compare(trained(run), (a, b), gradients=False).complaints == []


def test_scans_with_the_same_decays():
    """The program has the products of decays once; all of the scans that read them are replaced, or none."""

    def several(a, b):
        a = jnp.tanh(a)
        return scanned(a, b), scanned(a, jnp.cos(b)) * scanned(a, b * b)

    def read_elsewhere(a, b):
        a = jnp.tanh(a)
        return scanned(a, b), jnp.stack(lax.associative_scan(usual, (a, jnp.cos(b))))

    a, b = random(T, D), random(T, D, seed=1)
    judged(several, a, b, wanted=(0, 0, 0))
    judged(read_elsewhere, a, b, wanted=(0, 0, 0))


def both(a, b, **options):
    return lax.associative_scan(usual, (jnp.tanh(a), b), **options)


def transmitted(density, colour):
    """What reaches the eye along a ray, as in volume rendering: products that are shifted by one step."""
    opacity = 1 - jnp.exp(-jnp.abs(density))
    left = jnp.cumprod(1 - opacity + 1e-10, -1)
    left = jnp.concatenate([jnp.ones_like(left[..., :1]), left[..., :-1]], -1)
    return opacity * left * colour


def transmitted_exclusively(density, colour):
    opacity = 1 - jnp.exp(-jnp.abs(density))
    shifted = jnp.concatenate([jnp.ones_like(opacity[..., :1]), 1 - opacity + 1e-10], -1)
    return opacity * jnp.cumprod(shifted, -1)[..., :-1] * colour


def broken(stick, weight):
    """Parts of a stick, each broken off what is left."""
    part = jax.nn.sigmoid(stick)
    left = jnp.cumprod(1 - part, 0)
    return jnp.pad(part, ((0, 1), (0, 0)), constant_values=1) * jnp.pad(left, ((1, 0), (0, 0)), constant_values=1)


PRODUCTS = {
    "products and states": (lambda a, b: jnp.stack(both(a, b)), [0, 0], [0, 0, 2]),
    "products and states with one cotangent": (lambda a, b: sum(both(a, b)), [0, 0], [0, 0, 2]),
    "reversed": (lambda a, b: jnp.stack(both(a, b, reverse=True)), [0, 0], [0, 0, 2]),
    "a first state": (lambda a, b: (lambda p, h: p * jnp.arange(D) + h)(*both(a, b)), [0, 0], [0, 0, 2]),
    "the decays of the states stand still": (
        lambda a, b: (lambda p, h: p * jnp.cos(lax.stop_gradient(p)) + h)(*both(a, b)), [0, 0], [0, 0, 2]
    ),
    "products alone": (lambda a, b: both(a, b)[0] * b, [0], [0, 1]),
    "a scan of products": (lambda a, b: lax.associative_scan(jnp.multiply, jnp.tanh(a)) * b, [0], [0, 1]),
    "cumprod": (lambda a, b: jnp.cumprod(jnp.tanh(a), 0) * b, [], [0, 1]),
    "cumprod from the last": (lambda a, b: lax.cumprod(jnp.tanh(a), 0, reverse=True) * b, [], [0, 1]),
    "what reaches the eye": (lambda a, b: transmitted(a.T, b.T), [], [0, 1]),
    "what reaches the eye, shifted first": (lambda a, b: transmitted_exclusively(a.T, b.T), [], [0, 1]),
    "a stick": (broken, [], [0, 1]),
    "decays that are shifted": (lambda a, b: scanned(jnp.pad(a, ((1, 0), (0, 0)))[:-1], b), [0], [0, 2]),
    "differences of states": (lambda a, b: jnp.diff(scanned(jnp.tanh(a), b), axis=0), [0], [0, 2]),
}  # fmt: skip
"""Functions, with the numbers of gradients of the sites in them, and in a program with the gradients."""


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_their_gradients_are_found(name):
    function, plain, wanted = PRODUCTS[name]
    a, b = random(T, D), random(T, D, seed=1)
    judged(function, a, b, wanted=plain)
    judged(trained(function), a, b, wanted=wanted)


@pytest.mark.parametrize("value", [0.0, 1e-30, -1.0, 0.999, 1.05])
def test_products_of_equal_numbers(value):
    """A gradient may be of a product of which one factor alone is zero."""
    a, b = jnp.full((300, D), value).at[5].set(0.5), random(300, D, seed=1)
    judged(trained(lambda a, b: jnp.cumprod(a, 0) * b), a, b, wanted=[0, 1])
    judged(trained(lambda a, b: jnp.stack(lax.associative_scan(usual, (a, b)))), a, b, wanted=[0, 0, 2])


def test_it_is_assumed_that_products_do_not_come_back():
    own = autopallas.optimize(jax.grad(lambda a: jnp.sum(jnp.cumprod(a))), objective="always", strict=True)
    own(random(T))
    assert any("comes back" in text for site in own.report().sites for text in site.assumptions)


# ---------------------------------------------------------------------- what is something else


def _flags(left, right):
    return left[0] * right[0], jnp.where(right[0] > 0, right[1], left[1] + right[1])


REFUSED = {
    "the wrong composition": lambda a, b: scanned(a, b, lambda x, y: (x[0] * y[0], x[0] * y[1] + x[1])),
    "maxima": lambda a, b: scanned(a, b, lambda x, y: (x[0] + y[0], jnp.maximum(x[1] + y[0], y[1]))),
    "resets by where": lambda a, b: scanned(a, b, _flags),
    "a factor": lambda a, b: scanned(a, b, lambda x, y: (x[0] * y[0], 0.5 * (y[0] * x[1]) + y[1])),
    "a factor of two": lambda a, b: scanned(a, b, lambda x, y: (x[0] * y[0], 2.0 * (y[0] * x[1]) + y[1])),
    "an added one": lambda a, b: scanned(a, b, lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1] + 1.0)),
    "a nonlinear step": lambda a, b: scanned(a, b, lambda x, y: (x[0] * y[0], jnp.tanh(y[0] * x[1] + y[1]))),
    "a difference": lambda a, b: scanned(a, b, lambda x, y: (x[0] * y[0], y[0] * x[1] - y[1])),
    "sums": lambda a, b: lax.associative_scan(jnp.add, a) + b,
    "largest products": lambda a, b: lax.associative_scan(lambda x, y: jnp.maximum(x, y) * 0.5, a) + b,
    "products of squares": lambda a, b: lax.associative_scan(lambda x, y: x * y * y, a) + b,
}


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_integers_are_left_alone(dtype):
    """They wrap, as in a hash of characters."""
    a, b = jnp.full((T, D), 31, dtype), jnp.arange(T * D, dtype=dtype).reshape(T, D)
    assert found(scanned, a, b) == []
    run = autopallas.optimize(scanned, objective="always", strict=True)
    np.testing.assert_array_equal(run(a, b), jax.jit(scanned)(a, b))


@pytest.mark.parametrize("name", REFUSED)
def test_look_alikes_are_left_alone(name):
    a, b = random(T, D), random(T, D, seed=1)
    judged(REFUSED[name], a, b, wanted=())
    assert compare(trained(REFUSED[name]), (a, b), gradients=False).complaints == []


def shifted_by_concatenation(x, by, fill):
    return jnp.concatenate([jnp.full_like(x[:by], fill), x[:-by]])


def shifted_by_padding(x, by, fill):
    return jnp.pad(x[:-by], ((by, 0), (0, 0)), constant_values=fill)


def shifted_by_padding_first(x, by, fill):
    return jnp.pad(x, ((by, 0), (0, 0)), constant_values=fill)[:-by]


def shifted_by_negative_padding(x, by, fill):
    return lax.pad(x, jnp.asarray(fill, x.dtype), ((by, -by, 0), (0, 0, 0)))


SHIFTS = {
    "concatenated": shifted_by_concatenation,
    "padded": shifted_by_padding,
    "padded first": shifted_by_padding_first,
    "padded by a negative number": shifted_by_negative_padding,
}


def doubled(a, b, shift=shifted_by_concatenation, wrong=0, fills=(1.0, 0.0)):
    by = 1
    while by < a.shape[0]:
        before = shift(a, by, fills[0]), shift(b, by, fills[1])
        a, b, by = a * before[0], a * before[1] + b, 2 * by + (wrong if by == 4 else 0)
    return b


DOUBLED = {
    **{name: functools.partial(doubled, shift=shift) for name, shift in SHIFTS.items()},
    "decays filled with zeros": functools.partial(doubled, shift=shifted_by_padding, fills=(0.0, 0.0)),
    "reversed": lambda a, b: doubled(a[::-1], b[::-1])[::-1],
    "mapped": lambda a, b: jax.vmap(doubled)(jnp.stack([a, b]), jnp.stack([b, a])),
}


@pytest.mark.parametrize("length", [8, 21])
@pytest.mark.parametrize("name", DOUBLED)
def test_doubling_by_hand_and_its_gradients_are_found(name, length):
    def run(a, b):
        return DOUBLED[name](jnp.tanh(a), b)

    a, b = random(length, D), random(length, D, seed=1)
    judged(run, a, b)
    judged(trained(run), a, b, wanted=[0, 2])


def test_parts_of_a_short_axis_are_no_shifts(monkeypatch):
    """The gradient of taking parts apart pads by 1, 2 and 4: nothing is followed for that."""

    def parted(x):
        return sum(jnp.sin(i * x[:, i]).sum() for i in range(6))

    def refuse(*_):
        raise AssertionError("values are followed along an axis")

    program = jax.make_jaxpr(jax.grad(parted))(random(D, 6))
    assert {equation.primitive.name for equation in program.jaxpr.eqns} & {"pad", "dynamic_update_slice"}
    monkeypatch.setattr(doubling, "_Scans", refuse)
    assert not doubling.scans_of(Graph(flatten(program)))


def test_what_is_respelt_beside_a_scan_is_not_computed_in_its_loop():
    def loss(x):  # the cotangent is a cosine, and the decays one number
        return jnp.sum(jnp.sin(doubled(jnp.full_like(x, 0.9), x)))

    compared = compare(jax.grad(loss), (random(32, 64),), gradients=False)
    assert compared.complaints == []
    kinds = [site.kind for site in compared.report.sites]
    assert kinds.count("associative_scan") == 2
    assert "elementwise" in kinds


WRONG = {
    "a shift": lambda a, b: doubled(a, b, wrong=1),
    "too few levels": lambda a, b: doubled(a[:12], b[:12])[:8] + doubled(a[:8] * 2, b[:8])[::-1],
    "states filled with ones": lambda a, b: doubled(a, b, fills=(1.0, 1.0)),
    "states filled with a half": lambda a, b: doubled(a, b, shifted_by_padding, fills=(1.0, 0.5)),
    "shifts to the left": lambda a, b: doubled(a, b, lambda x, by, fill: shifted_by_concatenation(x[::-1], by, fill)),
    "a product the other way": lambda a, b: _otherwise(a, b),
}


def _otherwise(a, b):
    for by in (1, 2, 4, 8, 16):
        before = shifted_by_concatenation(a, by, 1.0), shifted_by_concatenation(b, by, 0.0)
        a, b = a * before[0], before[0] * b + before[1]
    return b


def products_by_hand(a, b):
    for by in (1, 2, 4, 8, 16):
        before = shifted_by_concatenation(a, by, 1.0), shifted_by_concatenation(b, by, 0.0)
        a, b = a * before[0], a * before[1] + b
    return a - b


def test_products_by_hand_are_read_too():
    a, b = random(T, D), random(T, D, seed=1)
    judged(lambda a, b: products_by_hand(jnp.tanh(a), b), a, b, wanted=[0, 0])
    judged(trained(lambda a, b: products_by_hand(jnp.tanh(a), b)), a, b, wanted=[0, 0, 2])


@pytest.mark.parametrize("name", WRONG)
def test_wrong_doubling_by_hand_is_left_alone(name):
    a, b = random(T, D), random(T, D, seed=1)
    if name != "too few levels":  # the second is one
        assert found(WRONG[name], a, b) == []
    for run in (WRONG[name], trained(WRONG[name])):
        assert compare(run, (a, b), gradients=False).complaints == []


@pytest.mark.nightly
@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(8, 40), st.sampled_from(sorted(FORMS)), st.sampled_from(["a", "b", "h", "none"]), st.booleans())
def test_scans_within_other_arithmetic(length, name, shared, reverse):
    """What stands around a scan is of the same operations as the scan itself."""

    def run(a, b):
        x = jnp.pad(b, ((1, 0), (0, 0)))[:-1] + 0.5 * b[::-1] if reverse else b
        h = FORMS[name](a, x)
        h = h if h.shape == x.shape else h.reshape(length, -1)[:, :D]
        given = {"a": a, "b": x, "h": h, "none": 0.0}[shared]
        return jnp.concatenate([h[1:] - h[:-1], h[:1]]) * 0.5 + given * h

    step = trained(run)
    a, b = random(length, D), random(length, D, seed=1)
    optimized = autopallas.optimize(step, objective="always", strict=True, ops={"associative_scan"})
    for one, other in zip(jax.tree.leaves(jax.jit(step)(a, b)), jax.tree.leaves(optimized(a, b)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)


def with_resets(a, b, reset):
    """As public code of state-space models has it: what came before a reset is forgotten."""

    def combine(left, right):
        (a, b, c), (d, e, f) = left, right
        return d * a * (1 - f) + d * f, (d * b + e) * (1 - f) + e * f, c * (1 - f) + f

    return lax.associative_scan(combine, (jnp.tanh(a), b, reset * jnp.ones_like(a)))[1]


@pytest.mark.parametrize("form", ["forward", "gradient", "mapped", "loop"])
def test_an_associative_scan_of_another_form_is_a_near_miss(form):
    a, b = random(T, D), random(T, D, seed=1)
    reset = (jnp.arange(T) % 6 == 5)[:, None].astype(a.dtype)
    run = {
        "forward": with_resets,
        "gradient": lambda a, b, r: trained(lambda a, b: with_resets(a, b, r))(a, b),
        "mapped": lambda a, b, r: jax.vmap(with_resets, (1, 1, None), 1)(a, b, r[:, 0]),
        "loop": lambda a, b, r: lax.scan(lambda c, _: (with_resets(a, jnp.tanh(c), r), None), b, None, length=3)[0],
    }[form]
    compared = compare(run, (a, b, reset), gradients=False)
    assert compared.complaints == []
    misses = [miss for miss in compared.report.near_misses if miss.op == "respelling"]
    assert ["this associative scan" in miss.reason for miss in misses] == [True]
    assert "reset" in misses[0].advice


@pytest.mark.parametrize("sums", [lax.cumlogsumexp, lambda x: lax.associative_scan(jnp.logaddexp, x)])
def test_the_gradient_of_sums_of_exponentials_is_told_as_such(sums):
    """As minGRUs have it, that are written with logarithms: JAX makes an associative scan of the gradient."""
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(sums(x))))
    report = autopallas.explain(autopallas.optimize(gradient, objective="always", strict=True), random(T, D))
    (miss,) = (miss for miss in report.near_misses if miss.op == "respelling")
    assert "adds up exponentials" in miss.reason


def test_its_advice_makes_it_a_site():
    a, b = random(T, D), random(T, D, seed=1)
    reset = (jnp.arange(T) % 6 == 5)[:, None]
    compared = judged(lambda a, b: scanned(jnp.where(reset, 0, jnp.tanh(a)), b), a, b)
    assert [miss for miss in compared.report.near_misses if miss.op == "respelling"] == []
    expected = with_resets(a, b, reset.astype(a.dtype))
    np.testing.assert_allclose(scanned(jnp.where(reset, 0, jnp.tanh(a)), b), expected, rtol=1e-5, atol=1e-6)
