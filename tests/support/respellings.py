"""What the tests of respellings share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.graph import Graph, flatten
from autopallas.patterns import find

__all__ = ["found", "random"]


def random(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def found(function, *arguments):
    """Returns the kind of each respelling of a program."""
    sites = find(Graph(flatten(jax.make_jaxpr(function)(*arguments))), ("respelling",), True)[0]
    return [site.spec.kind for site in sites]
