"""Scans of what the program expands: their steps compute that, and what is read of their results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compare import compare
from support.respellings import found, random, sites

import autopallas

T, D, N = 67, 33, 16
"""As many numbers of all steps as the smallest scans have that are respelt."""


def arguments(dtype=jnp.float32, lead=()):
    rows = [random(*lead, T, D, seed=i, dtype=dtype) for i in range(2)]
    states = [random(*lead, T, N, seed=i, dtype=dtype) for i in (3, 4)]
    return (*rows, random(D, N, seed=2, dtype=dtype), *states)


def slices(x, dt, rate, write):
    dt = jax.nn.softplus(dt)
    return jnp.exp(-dt[..., None] * jnp.exp(rate)), (dt * x)[..., None] * write[:, None]


def states(decay, given, first=None, **options):
    def step(h, own):
        h = own[0] * h + own[1]
        return h, h

    return lax.scan(step, jnp.zeros_like(given[0]) if first is None else first, (decay, given), **options)[1]


def usual(x, dt, rate, write, read):
    def step(h, own):
        a, b, c = own
        h = a * h + b
        return h, h @ c

    return lax.scan(step, jnp.zeros_like(rate), (*slices(x, dt, rate, write), read))[1] + x * 0.3


def by_products(x, dt, rate, write, read):
    """As in ports of the public code: products of three, and a sum after the loop."""
    decay = jnp.exp(jnp.einsum("ld,dn->ldn", -jnp.abs(dt), jnp.exp(rate)))
    return jnp.einsum("ldn,ln->ld", states(decay, jnp.einsum("ld,ln,ld->ldn", dt, write, x)), read)


def backwards(x, dt, rate, write, read):
    return (states(*slices(x, dt, rate, write), reverse=True) * read[:, None]).sum(-1)


def unrolled(x, dt, rate, write, read):
    return (states(*slices(x, dt, rate, write), unroll=4) * jnp.tanh(read)[:, None]).max(-1)


def from_a_given_state(x, dt, rate, write, read):
    return states(*slices(x, dt, rate, write), first=rate).sum(-1) * x


def remembered_less(x, dt, rate, write, read):
    return jax.checkpoint(usual)(x, dt, rate, write, read)


def outer_products(x, dt, rate, write, read):
    """As in linear attention and RWKV by a loop: keys times values, and a readout of the state before."""
    decay, given = jnp.exp(-jnp.abs(dt))[..., None], x[..., None] * write[:, None]

    def step(s, own):
        w, kv, r = own
        return w * s + kv, (s + kv) @ r

    return lax.scan(step, jnp.zeros((D, N)), (jnp.broadcast_to(decay, given.shape), given, read))[1]


def of_the_last_state(x, dt, rate, write, read):
    def step(h, own):
        return own[0] * h + own[1], None

    return lax.scan(step, rate, slices(x, dt, rate, write))[0] @ read[0]


def masked(x, dt, rate, write, read):
    decay, given = slices(x, dt, rate, write)
    return states(jnp.where(dt[..., None] > 0, decay, 1), jnp.where(x[..., None] > -1, given, 0)).sum(-1)


def over_all_steps(x, dt, rate, write, read):
    return (states(*slices(x, dt, rate, write)) * read[:, None]).mean((0, 1))


def trained(function):
    return jax.value_and_grad(lambda *given: jnp.sum(jnp.sin(function(*given))), tuple(range(5)))


def judged(function, given, kinds=None, **options):
    result = compare(function, given, gradients=False, ops="scan_surroundings", **options)
    assert result.complaints == []
    assert result.counts("respelling") == (len(mine(function, *given)) if kinds is None else kinds)


def mine(function, *given):
    return [site for site in sites(function, *given) if site.spec.kind == "scan_surroundings"]


FORMS = [
    usual, by_products, backwards, unrolled, from_a_given_state, remembered_less, outer_products, of_the_last_state,
    masked, over_all_steps,
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_what_is_expanded_is_computed_in_the_steps(form):
    given = arguments()
    (site,) = mine(form, *given)
    assert site.spec["around"].steps_before
    judged(form, given)


@pytest.mark.parametrize("form", FORMS)
def test_and_in_train_steps(form):
    given = arguments()
    both = mine(trained(form), *given)
    assert len(both) == 2
    judged(trained(form), given)


def test_what_is_summed_over_the_steps_is_added_up_in_the_loop():
    assert any(axis < 0 for site in mine(trained(usual), *arguments()) for axis in site.spec["around"].results)


@pytest.mark.parametrize("form", [usual, by_products])
def test_it_is_found_where_the_loop_is_a_recurrence_that_nothing_computes(form):
    """Under "always" a site of another operation that is kept leaves its loop to this."""
    ours = autopallas.optimize(form, objective="always", ops=["recurrence", "scan_surroundings"])
    np.testing.assert_allclose(ours(*arguments()), jax.jit(form)(*arguments()), rtol=1e-5, atol=1e-5)
    assert [site.kind for site in ours.report().sites if site.verdict == "applied"] == ["scan_surroundings"]


def by_the_last_state(x, dt, rate, write, read):
    """Each step of what is read of the states needs the state after the last step."""

    def step(h, own):
        h = own[0] * h + own[1]
        return h, h

    last, found = lax.scan(step, jnp.zeros_like(rate), slices(x, dt, rate, write))
    return (found / (1 + jnp.abs(last))).sum(-1) + jnp.einsum("tdn,dn->td", found, last)


@pytest.mark.parametrize("ops", ["scan_surroundings", ["recurrence", "scan_surroundings"]])
@pytest.mark.parametrize("form", [by_the_last_state, trained(by_the_last_state)])
def test_what_needs_the_last_state_stays_behind_the_loop(form, ops):
    given = arguments()
    ours = autopallas.optimize(form, objective="always", ops=ops, strict=True)
    for a, b in zip(jax.tree.leaves(ours(*given)), jax.tree.leaves(jax.jit(form)(*given)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5 * float(jnp.abs(b).max()))
    assert "scan_surroundings" in [site.kind for site in ours.report().sites if site.verdict == "applied"]


def test_many_examples():
    def mapped(x, dt, rate, write, read):
        return jax.vmap(usual, (0, 0, None, 0, 0))(x, dt, rate, write, read)

    given = arguments(lead=(3,))
    judged(mapped, given, kinds=1)
    judged(trained(mapped), given, kinds=2)
    judged(jax.vmap(trained(usual), (0, 0, None, 0, 0)), given)


def test_layers_of_scans_in_a_scan():
    def layers(x, dt, rate, write, read):
        return lax.scan(lambda x, r: (usual(x, dt, rate * r, write, read), None), x, jnp.array([0.5, 1.0, 2.0]))[0]

    judged(layers, arguments(), kinds=1)
    judged(trained(layers), arguments())


def test_several_states_and_whole_numbers():
    def counted(x, dt, rate, write, read):
        decay, given = slices(x, dt, rate, write)

        def step(carried, own):
            (h, largest, n), (a, b, keep) = carried, own
            h = jnp.where(keep, a * h + b, h)
            return (h, jnp.maximum(largest, h), n + keep), (h, n)

        first = jnp.zeros_like(rate), jnp.zeros_like(rate), jnp.int32(0)
        (_, largest, n), (hs, counts) = lax.scan(step, first, (decay, given, jnp.arange(T) % 3 > 0))
        return (hs * read[:, None]).sum(-1), largest, n, counts

    judged(counted, arguments(), kinds=1)


def test_what_is_not_finite_stays_where_it_was():
    x, dt, rate, write, read = arguments()
    given = x.at[5, 3].set(jnp.inf).at[9, 7].set(jnp.nan), dt.at[20, 1].set(-jnp.inf), rate, write, read
    for function in (usual, by_products, backwards):
        ours = autopallas.optimize(function, objective="always", ops="scan_surroundings", strict=True)(*given)
        wanted = jax.jit(function)(*given)
        np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(wanted))
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(wanted))


def test_in_float64():
    with jax.enable_x64(True):
        judged(trained(usual), arguments(jnp.float64))


def slices_too(x, dt, rate, write, read):
    decay, given = slices(x, dt, rate, write)
    return states(decay, given), decay, given


def shifted(x, dt, rate, write, read):
    """A step of what is scanned needs another step of what it is computed from."""
    decay, given = slices(x, dt, rate, write)
    return states(jnp.cumsum(decay, 0) * 0.01, jnp.roll(given, 1, 0))


def small(x, dt, rate, write, read):
    return usual(x[:8], dt[:8], rate, write[:8], read[:8])


def dear(x, dt, rate, write, read):
    """What takes long is not computed twice, once for each loop of a train step."""
    z = dt[..., None] * rate
    decay = jnp.exp(-jnp.abs(jnp.tanh(jnp.exp(z * 0.3)) * jnp.log1p(z * z)))
    return states(decay, x[..., None] * write[:, None]).sum(-1)


def given_whole(x, dt, rate, write, read):
    """Nothing is expanded, nothing reduced."""
    wide = jnp.concatenate([x] * N, 1)
    return lax.scan(lambda h, own: (h * 0.9 + own,) * 2, wide[0], wide)[1]


@pytest.mark.parametrize("form", [slices_too, shifted, small, dear, given_whole])
def test_what_gains_nothing_is_left_alone(form):
    assert "scan_surroundings" not in found(form, *arguments())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_dtypes_are_left_alone(dtype):
    assert "scan_surroundings" not in found(usual, *arguments(dtype))


def test_a_step_that_prints_is_left_alone():
    def printed(x, dt, rate, write, read):
        def step(h, own):
            h = own[0] * h + own[1]
            jax.debug.callback(lambda _: None, h[0, 0])
            return h, h.sum(-1)

        return lax.scan(step, jnp.zeros_like(rate), slices(x, dt, rate, write))[1]

    assert "scan_surroundings" not in found(printed, *arguments())


def test_every_sample_is_one():
    from autopallas.workbench.cases import cases_of

    cases = [c for c in cases_of("respelling").table_grid() if c.mask.startswith("scan_surroundings")]
    assert cases
    for case in cases[:4]:
        assert mine(cases_of("respelling").ORIGINALS[case.mask], *cases_of("respelling").types(case)), case.mask
