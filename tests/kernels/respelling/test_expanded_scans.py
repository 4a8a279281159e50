"""Associative scans of what the program expands: the loop computes it, and what is read of the states, step by step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compare import compare
from support.respellings import random

import autopallas
from autopallas.graph import Graph, flatten
from autopallas.kernels.respelling.example import operands
from autopallas.kernels.respelling.kinds import kind_named
from autopallas.patterns import find
from autopallas.workbench.cases import cases_of, match_of

B, T, D, N = 2, 19, 3, 8


def scanned(a, b, axis=1):
    return lax.associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (a, b), axis=axis)[1]


def arguments(batch=B, steps=T, width=D, state=N, dtype=jnp.float32):
    rows = [random(batch, steps, width, seed=i, dtype=dtype) for i in range(2)]
    states = [random(batch, steps, state, seed=i, dtype=dtype) for i in (3, 4)]
    return (*rows, random(width, state, seed=2, dtype=dtype), *states)


def expanded(dt, x, rate, write):
    decay = jnp.exp(-jax.nn.softplus(dt)[..., None] * jnp.exp(rate))
    return scanned(decay, x[..., None] * write[..., None, :])


def usual(dt, x, rate, write, read):
    return jnp.einsum("btdn,btn->btd", expanded(dt, x, rate, write), read)


def by_products(dt, x, rate, write, read):
    """As in ports of the public code: products of three, and a sum by hand."""
    decay = jnp.exp(jnp.einsum("bld,dn->bldn", -jax.nn.softplus(dt), jnp.exp(rate)))
    states = scanned(decay, jnp.einsum("bld,bln,bld->bldn", jax.nn.softplus(dt), write, x))
    return (states * read[:, :, None]).sum(-1) + x * 0.3


def steps_first(dt, x, rate, write, read):
    dt, x, write, read = (jnp.swapaxes(y, 0, 1) for y in (dt, x, write, read))
    decay = jnp.exp(-jnp.abs(dt[..., None]) * jnp.exp(rate))
    states = scanned(decay, x[..., None] * write[..., None, :], axis=0)
    return jnp.max(states * jnp.tanh(read)[..., None, :], -1)


def masked(dt, x, rate, write, read):
    decay = jnp.where(dt[..., None] > 0, jnp.exp(-dt[..., None] * jnp.exp(rate)), 1.0)
    states = scanned(decay, jnp.where(x[..., None] > -1, write[:, :, None], 0))
    return jnp.einsum("btdn,btn->btd", states, read).astype(jnp.float32)


def found(function, *given):
    """Per site: whether it computes more than the recurrence, and how many results it has."""
    sites = find(Graph(flatten(jax.make_jaxpr(function)(*given))), ("associative_scan",), True)[0]
    return [("around" in dict(site.spec.parameters), len(site.results)) for site in sites]


def trained(function):
    return jax.value_and_grad(lambda *given: jnp.sum(jnp.sin(function(*given))), tuple(range(5)))


def judged(function, given, **options):
    result = compare(function, given, gradients=False, ops="associative_scan", **options)
    assert result.complaints == []
    assert result.counts("respelling") == len(found(function, *given))


@pytest.mark.parametrize("form", [usual, by_products, steps_first, masked])
def test_what_is_expanded_is_computed_in_the_loop(form):
    given = arguments()
    assert found(form, *given) == [(True, 1)]
    judged(form, given)
    sites = found(trained(form), *given)
    assert len(sites) == 2
    assert all(around for around, _ in sites)
    judged(trained(form), given)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_dtypes(dtype):
    judged(usual, arguments(dtype=dtype))


def several_readouts(dt, x, rate, write, read):
    states = expanded(dt, x, rate, write)
    return jnp.einsum("btdn,btn->btd", states, read) + states.sum(-1) + (states**2).sum((0, 1, 3))


def states_too(*given):
    states = expanded(*given[:4])
    return jnp.einsum("btdn,btn->btd", states, given[4]), states


def what_is_read_depends_on_the_states(dt, x, rate, write, read):
    states = expanded(dt, x, rate, write)
    first = jnp.einsum("btdn,btn->btd", states, read)
    return (states * jnp.tanh(first)[..., None]).sum(-1)


def another_step_is_read(dt, x, rate, write, read):
    states = expanded(dt, x, rate, write)
    return (states * jnp.roll(states, 1, 1)).sum(-1) + states[:, -1:].sum(-1)


def counted(dt, x, rate, write, read):
    """A sum of integers over the steps stays one."""
    return (expanded(dt, x, rate, write) > 0).sum((0, 1)) * 2**24 + 1


def printed(dt, x, rate, write, read):
    states = expanded(dt, x, rate, write)
    jax.debug.callback(lambda _: None, states * 2)
    return (states * 2).sum(-1)


def over_all_steps(dt, x, rate, write, read):
    return (expanded(dt, x, rate, write) * read[:, :, None]).sum((0, 1))


def the_largest_of_all_steps(dt, x, rate, write, read):
    return jnp.max(expanded(dt, x, rate, write), (1, 3)) * x[:, 0]


def along_two_axes(dt, x, rate, write, read):
    """What is the same for all steps in one place has a step each in the other."""
    square = write[:, :N] @ jnp.swapaxes(write[:, :N], 1, 2)  # [B, N, N]
    decay = jax.nn.sigmoid(square[:, :, None, :] + square[:, None, :, :] + rate[0])
    return scanned(decay, square[:, :, None] * dt[:, :N, :1, None] * jnp.ones((N, 1))).sum(-1)


def transposed_after(dt, x, rate, write, read):
    states = jnp.transpose(expanded(dt, x, rate, write), (3, 0, 2, 1))
    return jnp.einsum("nbdt,btn->tbd", states, read).reshape(T, B * D)


@pytest.mark.parametrize(
    "form",
    [
        several_readouts, states_too, what_is_read_depends_on_the_states, another_step_is_read, over_all_steps,
        counted, printed, the_largest_of_all_steps, along_two_axes, transposed_after,
    ],
)  # fmt: skip
def test_other_readings_stay_right(form):
    given = arguments()
    assert found(form, *given)
    judged(form, given)
    if form is counted:
        np.testing.assert_array_equal(autopallas.optimize(form, objective="always")(*given), form(*given))
        return
    total = jax.value_and_grad(
        lambda *own: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(form(*own))), tuple(range(5))
    )
    judged(total, given)


def test_axes_of_one_size_are_told_apart():
    given = arguments(8, 8, 8, 8)
    judged(trained(usual), given)
    judged(lambda *own: transposed_after_square(*own), given)


def transposed_after_square(dt, x, rate, write, read):
    states = expanded(dt, x, rate, write)
    return (states * jnp.swapaxes(states, 1, 2) * read[:, :, None]).sum(-1) + (states * x).sum(1)


def test_under_vmap_scan_checkpoint_and_outside():
    given = arguments()
    many = jax.tree.map(lambda y: jnp.stack([y, -y]), given)
    inside = jax.vmap(usual, (0, 0, None, 0, 0))
    judged(inside, (*many[:2], given[2], *many[3:]))
    outside = jax.vmap(autopallas.optimize(usual, objective="always", strict=True))
    np.testing.assert_allclose(outside(*many), jax.vmap(usual)(*many), rtol=1e-5, atol=1e-5)

    def layers(dt, x, rate, write, read):
        def layer(x, rate):
            return jax.checkpoint(lambda x: x + usual(dt, x, rate, write, read))(x), None

        return lax.scan(layer, x, jnp.stack([rate, -rate]))[0]

    judged(trained(layers), given)


def test_a_first_decay_that_is_no_number_is_not_read():
    dt, x, rate, write, read = arguments()
    given = dt.at[:, 0].set(jnp.nan), x, rate, write, read
    wanted, result = usual(*given), autopallas.optimize(usual, objective="always", strict=True)(*given)
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)


def test_what_is_not_expanded_is_no_part_of_the_loop():
    a, b = random(T, D), random(T, D, seed=1)
    assert found(lambda a, b: jnp.sin(scanned(jnp.tanh(a), b * 2, axis=0)), a, b) == [(False, 1)]


def test_a_search_measures_numbers():
    """Decays that are exponentials of normally distributed numbers would make the states overflow."""
    (case,) = [c for c in cases_of("respelling").table_grid() if c.mask.endswith(":states-1x256x64x16-expanded")]
    match = match_of(case)
    given = [jnp.asarray(x) for x in operands(match.site, match.original.in_avals)]
    (result,) = jax.jit(lambda *own: kind_named("associative_scan").respelt(match.spec, *own))(*given)
    assert np.isfinite(result).all()
    assert np.ptp(result) > 0


def test_results_are_weakly_typed_where_the_originals_are():
    """The gradient of a Python number is, and what sums it up is not: both are one value."""

    def gradients(decay, x):
        return jax.grad(lambda decay, x: jnp.sum(jnp.sin(scanned(jnp.full_like(x, decay), x))), (0, 1))(decay, x)

    x = random(B, 40, D)
    respelt = autopallas.optimize(gradients, objective="always", strict=True)
    assert [found.weak_type for found in respelt(0.9, x)] == [True, False]
    assert respelt.report().counts()["respelling"] == 2
