"""Train steps with mixtures in which every expert computes every token: the backward goes with the forward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.checks import arrays, right
from support.compare import compiled, optimized_like_a_user
from support.mixtures import IN_LOOPS, ONE_SITE, D, E, F, P, T, X, combine, hidden, one_einsum, two_choices
from support.mixtures_written import (
    KINDS,
    SITES,
    gathered_matrices,
    picked_along_an_axis,
    scattered_to_slots,
    slots_by_sorting,
)

OP = "grouped_matmul"


def step(function):
    """Loss and gradients, a loss that tells all results apart."""

    def loss(p, x):
        y = function(p, x)
        return jnp.sum(jnp.sin(y + jnp.arange(y.size, dtype=y.dtype).reshape(y.shape)))

    return lambda p, x: jax.value_and_grad(loss, (0, 1))(p, x)


def found(function, args=(P, X)):
    """The sites of a step that is right."""
    optimized = optimized_like_a_user(function)
    right(compiled(lambda *a: optimized(*a))(*args), function, args, "float32")
    report = optimized.report()
    assert not [miss.reason for miss in report.near_misses if miss.op == OP]
    return [site.direction for site in report.sites if site.op == OP and site.verdict == "applied"]


def features(function, args=(P, X)):
    """What is left of tokens times experts times features, outside the kernels."""
    program = jax.make_jaxpr(lambda *a: optimized_like_a_user(function)(*a))(*args)
    sizes = {tuple(sorted((T, E, n))) for n in (D, F)}
    return [name for name, aval in arrays(program) if tuple(sorted(getattr(aval, "shape", ()))) in sizes]


WRITTEN = [f for kind in ("picked", "gathered", "switches") for f in KINDS[kind]]
WRITTEN += [
    f for f in KINDS["loops"] if f.__name__ in ("fori_loop", "scan_with_columns", "scan_by_number", "map_and_sum")
]
WRITTEN += KINDS["slots"][:4]
WRITTEN += [f for f in KINDS["intervals"] if not f.__name__.startswith("segments")]


@pytest.mark.parametrize("function", WRITTEN, ids=lambda f: f.__name__)
def test_what_people_write_has_its_backward(function):
    assert found(step(function)) == ["forward+backward"] * SITES.get(function, 1)


@pytest.mark.parametrize(
    "function",
    [one_einsum, gathered_matrices, picked_along_an_axis, scattered_to_slots, slots_by_sorting],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("form", ["examples", "programs", "microbatches", "checkpoint"])
def test_forms_have_their_backward(function, form):
    args, one = (P, X), step(function)
    if form == "checkpoint":
        one = step(jax.checkpoint(function))
    elif form == "microbatches":
        args = P, jnp.stack([X, 2 * X])
        whole = lambda p, xs: jnp.mean(jax.lax.map(lambda x: jnp.sum(jnp.sin(function(p, x))), xs))  # noqa: E731
        one = lambda p, xs: jax.value_and_grad(whole, (0, 1))(p, xs)  # noqa: E731
    elif form == "examples":
        args = P, jnp.stack([X, 2 * X])
        whole = lambda p, xs: jnp.mean(jax.vmap(lambda x: jnp.sum(jnp.sin(function(p, x))))(xs))  # noqa: E731
        one = lambda p, xs: jax.value_and_grad(whole, (0, 1))(p, xs)  # noqa: E731
    else:
        args = jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), P), jnp.stack([X, 2 * X])
        one = jax.vmap(step(function))
    assert found(one, args) == ["forward+backward"]


@pytest.mark.parametrize("function", [*ONE_SITE, *IN_LOOPS], ids=lambda f: f.__name__)
def test_each_spelling_has_its_backward(function):
    assert found(step(function)) == ["forward+backward"]


@pytest.mark.parametrize("function", [one_einsum, two_choices], ids=lambda f: f.__name__)
def test_nothing_dense_is_left(function):
    assert features(step(function)) == []


def layers(function):
    def scanned(p, x):
        q = jax.tree.map(lambda a: jnp.stack([a, a[::-1] if a.shape[0] == E else a, 2 * a]), p)
        return jax.lax.scan(lambda x, q: (x + function(q, x), None), x, q)[0]

    return scanned


def unrolled(p, x):
    for scale in (0.5, 1.5):
        normed = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        x = x + one_einsum(jax.tree.map(lambda a, s=scale: a * s, p), normed)
    return x


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (layers(one_einsum), 1),
        (layers(jax.checkpoint(one_einsum)), 1),
        (jax.checkpoint(one_einsum), 1),
        (unrolled, 2),
        (lambda p, x: one_einsum(p, one_einsum(p, x)), 2),
    ],
    ids=["scan", "scan and remat", "remat", "unrolled", "shared experts"],
)
def test_in_models(function, count):
    assert found(step(function)) == ["forward+backward"] * count


def test_gradients_of_some_alone():
    assert found(lambda p, x: jax.grad(lambda p: jnp.sum(one_einsum(p, x) ** 2))(p)) == ["forward+backward"]
    assert found(lambda p, x: jax.grad(lambda x: jnp.sum(one_einsum(p, x) ** 2))(x)) == ["forward+backward"]


def test_a_balancing_loss_reads_the_routing():
    def loss(p, x):
        probabilities = jax.nn.softmax(x @ p["router"])
        shares = jnp.mean(jax.nn.one_hot(jnp.argmax(probabilities, -1), E), 0)
        return jnp.sum(two_choices(p, x) ** 2) + 0.1 * jnp.sum(shares * jnp.mean(probabilities, 0))

    assert found(lambda p, x: jax.value_and_grad(loss)(p, x)) == ["forward+backward"]


def twice(function):
    """The same loop in two places, with cotangents of their own."""

    def both(p, x):
        return function(p, x) * jnp.cos(x), function(p, x)[::-1], jnp.sum(function(p, 2 * x))

    return lambda p, x: sum(jnp.sum(y * jnp.cos(i + y)) for i, y in enumerate(both(p, x)))


def read_on(function):
    """What the loop reads, and what it gives, is used again."""

    def loss(p, x):
        y = function(p, jnp.tanh(x))
        return jnp.sum(y**2) + jnp.sum(jnp.tanh(x) @ p["gate"][0]) + jnp.sum(y @ p["router"])

    return loss


@pytest.mark.parametrize("form", [twice, read_on], ids=lambda f: f.__name__)
@pytest.mark.parametrize("function", [*IN_LOOPS, *KINDS["loops"][2:4]], ids=lambda f: f.__name__)
def test_loops_that_share_what_they_read_are_right(function, form):
    whole = lambda p, x: jax.value_and_grad(form(function), (0, 1))(p, x)  # noqa: E731
    optimized = optimized_like_a_user(whole)
    right(compiled(lambda *a: optimized(*a))(P, X), whole, (P, X), "float32")


@pytest.mark.parametrize("wanted", [0, 1, (0, 1)])
def test_loops_with_a_part_of_their_gradients_are_right(wanted):
    for function in (*IN_LOOPS, KINDS["loops"][2]):
        whole = lambda p, x, f=function: jax.grad(lambda p, x: jnp.sum(jnp.sin(f(p, x))), wanted)(p, x)  # noqa: E731
        optimized = optimized_like_a_user(whole)
        right(compiled(lambda *a, o=optimized: o(*a))(P, X), whole, (P, X), "float32")


@jax.custom_vjp
def half_as_steep(x):
    """The identity, whose derivative is said to be a half."""
    return x


half_as_steep.defvjp(lambda x: (x, None), lambda _, g: (0.5 * g,))


def experts_with_a_gradient_of_their_own(p, x):
    return jnp.einsum("tef,efd,te->td", half_as_steep(hidden(p, x)), p["down"], combine(p, x))


def test_a_backward_that_is_not_recognised_keeps_both():
    whole = step(experts_with_a_gradient_of_their_own)
    optimized = optimized_like_a_user(whole)
    given, wanted = compiled(lambda *a: optimized(*a))(P, X), compiled(whole)(P, X)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert optimized.report().counts()[OP] == 0
    reasons = [miss.reason for miss in optimized.report().near_misses if miss.op == OP]
    assert any("what they compute is also used by" in reason for reason in reasons)


def test_second_derivatives_and_forward_mode():
    direction = jax.tree.map(jnp.cos, P)
    step_of = lambda f: lambda p: jax.jvp(jax.grad(lambda p: jnp.sum(f(p, X) ** 2)), (p,), (direction,))[1]  # noqa: E731
    optimized = optimized_like_a_user(one_einsum)
    right(compiled(step_of(lambda p, x: optimized(p, x)))(P), step_of(one_einsum), (P,), "float32")
