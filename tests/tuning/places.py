"""Sites for the tests of tuning: small, and of which no table knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.graph import Graph, flatten
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.patterns import Match, find
from autopallas.sites.device import Device
from autopallas.tuning.entry import Entry
from autopallas.tuning.key import TuningKey, key_of
from autopallas.tuning.row import running_jax
from autopallas.tuning.table import Row

CPU = Device("cpu", "cpu")


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention, [T, D]."""
    scores = query @ key.T / 8
    shown = jnp.tril(jnp.ones(scores.shape, bool), scores.shape[1] - scores.shape[0])
    return jax.nn.softmax(jnp.where(shown, scores, -jnp.inf), axis=-1) @ value


def attend_all(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention without a mask, [T, D]."""
    return jax.nn.softmax(query @ key.T / 8, axis=-1) @ value


def gradient(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
    """A step that holds forward and backward."""
    return jax.grad(lambda *qkv: jnp.sum(attend(*qkv) ** 2), argnums=(0, 1, 2))(query, key, value)


def qkv(length: int = 200, dtype: str = "float16", keys: int | None = None, seed: int = 0) -> tuple[jax.Array, ...]:
    """Operands of :func:`attend`; the table has no float16."""
    random = np.random.default_rng(seed)
    return tuple(jnp.asarray(random.standard_normal((n, 64)), dtype) for n in (length, keys or length, keys or length))


def match_of(function: Callable[..., Any], *operands: Any, ops: tuple[str, ...] = ("-respelling",)) -> Match:
    """The one site of a function, but for respellings unless ``ops`` names them."""
    matches, misses = find(Graph(flatten(jax.make_jaxpr(function)(*operands))), ops, True)
    assert len(matches) == 1, misses
    return matches[0]


def key_for(match: Match, implementation: str = "xla") -> TuningKey:
    """The key under which the site's result is kept."""
    return key_of(match, implementation, CPU)


def entry_for(match: Match, sizes: BlockSizes, kernel_us: float = 10.0, original_us: float = 30.0) -> Entry:
    """A positive entry of the site."""
    row = Row(sizes.to_dict(), kernel_us, original_us, 100, 200, "measured", "2026-11-21", running_jax())
    return Entry(key_for(match).description, "tuned", sizes.to_dict(), row, seconds=30.0)
