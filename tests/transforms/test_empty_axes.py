"""Programs with an axis of size 0, their own or one that ``vmap`` adds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopallas


def attend(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


def gated(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def zeros(*shapes):
    return tuple(jnp.zeros(shape) for shape in shapes)


PROGRAMS = {
    "attention": (attend, ((5, 4), (6, 4), (6, 4))),
    "gated_mlp": (gated, ((5, 4), (4, 7), (4, 7), (7, 4))),
}


def optimized(function):
    return autopallas.optimize(function, objective="always", strict=True)


def total(function):
    return lambda *args: jnp.sum(function(*args))


@pytest.mark.parametrize("axes", ["all", "the first"])
@pytest.mark.parametrize("use", ["inside", "around"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_vmap_over_no_examples(name, use, axes):
    function, shapes = PROGRAMS[name]
    mapped = [axes == "all" or i == 0 for i in range(len(shapes))]
    args = zeros(*((0, *shape) if own else shape for own, shape in zip(mapped, shapes, strict=True)))
    in_axes = tuple(0 if own else None for own in mapped)
    run = optimized(jax.vmap(function, in_axes)) if use == "around" else jax.vmap(optimized(function), in_axes)
    wanted = jax.grad(total(jax.vmap(function, in_axes)), argnums=(0, 1))(*args)
    jax.tree.map(np.testing.assert_array_equal, jax.grad(total(run), argnums=(0, 1))(*args), wanted)


def test_a_site_without_rows_stays_and_says_why():
    run = optimized(gated)
    assert run(*zeros((2, 0, 4), (4, 7), (4, 7), (7, 4))).shape == (2, 0, 4)
    (site,) = run.report().sites
    assert (site.verdict, site.reason) == ("kept", "an axis of size 0 leaves nothing to compute")
