"""Respelling of loops whose steps compute gates of parts of a slice: what is found, left alone and computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.compare import compare
from support.respellings import found, random

import autopallas
from autopallas.kernels.respelling.kinds.gates_of_slices import KIND

NAME = KIND.name
T, D = 19, 6


def arguments(*lead, steps=T, dtype=jnp.float32):
    """z [T, ..., 3 D], u [D, 3 D]."""
    return random(steps, *lead, 3 * D, dtype=dtype), random(D, 3 * D, seed=1, dtype=dtype) * 0.3


def loop(step, **options):
    def function(z, u):
        return lax.scan(lambda h, z: step(h, z, u), jnp.zeros((*z.shape[1:-1], D), z.dtype), z, **options)

    return function


def gru(h, z, u):
    reset, update, new = jnp.split(z, 3, -1)
    of_reset, of_update, of_new = jnp.split(h @ u, 3, -1)
    update = jax.nn.sigmoid(update + of_update)
    h = (1 - update) * jnp.tanh(new + jax.nn.sigmoid(reset + of_reset) * of_new) + update * h
    return h, h


def sliced(h, z, u):
    z = z + h @ u
    h = jax.nn.silu(z[..., :D]) * h + jnp.exp(-jnp.abs(z[..., D : 2 * D])) * z[..., 2 * D :]
    return h, (h.sum(-1), z)


def of_two_slices(z, u):
    """Of one slice each step takes parts, and adds the other."""

    def step(h, own):
        a, b, c = jnp.split(own[0] * 2, 3, -1)
        h = jax.nn.sigmoid(a) * h + jnp.tanh(b) * jnp.tanh(c) + own[1]
        return h, None

    return lax.scan(step, jnp.zeros((*z.shape[1:-1], D), z.dtype), (z, jnp.flip(z, 0)[..., :D]))[0]


FORMS = {
    "a gated unit": loop(gru),
    "from behind": loop(gru, reverse=True),
    "several steps as one": loop(gru, unroll=2),
    "slices of sums": loop(sliced),
    "beside another slice": of_two_slices,
}


@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_steps_hand_on_what_the_next_one_reads(form, lead):
    compared = compare(FORMS[form], arguments(*lead), ops=NAME)
    assert compared.complaints == []
    function = autopallas.optimize(FORMS[form], objective="always", ops=NAME, strict=True)
    function(*arguments(*lead))
    assert function.report().counts()["respelling"] == 1, function.report()


@pytest.mark.parametrize("steps", [2, 3, 40])
def test_every_number_of_steps(steps):
    for form in ("a gated unit", "from behind"):
        assert compare(FORMS[form], arguments(steps=steps), ops=NAME).complaints == []


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gates_of_16_bits(dtype):
    given = arguments(2, dtype=dtype)
    assert compare(FORMS["a gated unit"], given, dtype=jnp.dtype(dtype).name, ops=NAME).complaints == []


LEFT = {
    "whole slices": lambda h, z, u: (jnp.tanh(z.sum(-1, keepdims=True) + h), h),
    "parts of products of slices": lambda h, z, u: (jnp.tanh((z[..., :D] @ u)[..., :D] + h), h),
    "sums of parts": lambda h, z, u: (h + z[..., :D] * z[..., D : 2 * D], h),
    "parts of what was carried": lambda h, z, u: (jnp.tanh((h @ u)[..., :D]) + z.sum(-1, keepdims=True), h),
}


@pytest.mark.parametrize("name", LEFT)
def test_anything_else_is_left_alone(name):
    compared = compare(loop(LEFT[name]), arguments(), gradients=False, ops=NAME)
    assert compared.complaints == []
    assert compared.counts("respelling") == 0


def test_other_kinds_go_first():
    """Where steps multiply their slices too, all of these are multiplied at once, and handed on as well."""

    def function(z, x, w, u):
        def step(h, own):
            a, b = jnp.split(own[0] + own[1] @ w, 2, -1)
            h = jax.nn.sigmoid(a) * h + jnp.tanh(b + h @ u)
            return h, h

        return lax.scan(step, jnp.zeros_like(x[0]), (z, x))[1]

    shapes = (16, 2, 512), (16, 2, 256), (256, 512), (256, 256)
    kinds = found(function, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    assert kinds == ["summed_products"]
