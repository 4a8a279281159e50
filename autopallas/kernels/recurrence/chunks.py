"""Computes linear recurrences with matrix states chunk by chunk, in matrix products, forward and backward.

    S[t] = a[t] * S[t-1] + k[t] (x) v[t],    y[t] = q[t] . S[t]  or  q[t] . S[t-1]

and, where a step corrects the state along one row, by the delta rule (``delta_rule.py``):

    S[t] = a[t] * S[t-1] + u[t] (x) (w[t] . S[t-1]) + k[t] (x) v[t]

Letters: T steps, C steps of a chunk, G groups, H heads of a group, J heads that keys and queries have (H, or 1 where
heads share them), N rows of a state (summed over in y), P columns.

Of the states only those at the beginnings of chunks are kept for the backward, which computes the others again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.compat import ArrayFunction, PyTree
from autopallas.kernels.recurrence.chunk_kinds import Channels, Decays, Form, Heads, Kind, Operands
from autopallas.kernels.recurrence.delta_rule import Corrected

__all__ = ["OfChunks", "Recurrence", "by_heads", "by_scans", "chunked"]

Array: TypeAlias = jax.Array


class Recurrence(NamedTuple):
    """The arrays of a recurrence, in its accumulation dtype, which is that of the initial state; keys, values, queries,
    probes and writes may have a narrower one.

    Attributes:
      decay: [T, G, H], or [T, G, H, N] where each row of the state has its own.
      key, query: [T, G, J, N].
      value: [T, G, H, P].
      initial: [G, H, N, P].
      excess: the decay minus one, where that is known more exactly than from the rounded decay. It has no derivative of
        its own: that of the decay stands for both.
      probe: w, [T, G, H, N], of the delta rule; None without it.
      write: u, [T, G, J, N]; None where it is the key.
    """

    decay: Array
    key: Array
    value: Array
    query: Array
    initial: Array
    excess: Array | None = None
    probe: Array | None = None
    write: Array | None = None


OfChunks: TypeAlias = Callable[[bool, Recurrence], tuple[Array, Array]]
"""Computes (y [T / C, C, G, H, P], the last state) from whether y reads the states before their steps, and arrays whose
steps are split into chunks, [T / C, C, G, H, ...]; with a derivative of its own.  The last state has the accumulation
dtype, and y that one or the dtype of the query."""


def chunked(given: Recurrence, chunk: int, before: bool, of_chunks: OfChunks) -> tuple[Array, Array]:
    """Returns (y [T, G, H, P], the last state [G, H, N, P]).

    Args:
      given: the arrays.
      chunk: the number of steps of a chunk, a power of two.
      before: whether y[t] reads the state before step t, and not after it.
      of_chunks: what computes them.
    """
    steps = given.value.shape[0]
    chunk = min(chunk, 1 << (steps - 1).bit_length())
    missing = -steps % chunk
    if missing:  # steps that change nothing
        longer = {
            name: _lengthened(x, missing, float(name == "decay"))
            for name in _OF_STEPS
            if (x := getattr(given, name)) is not None
        }
        given = given._replace(**longer)
    if given.decay.ndim == 4 or given.probe is not None:
        shape = (*given.value.shape[:3], given.key.shape[3])
        wide = given.initial.dtype  # in which cotangents are summed
        rows = {n: jnp.broadcast_to(x.astype(wide), shape) for n in _OF_ROWS if (x := getattr(given, n)) is not None}
        given = given._replace(**rows)
    split = {
        n: x.reshape(x.shape[0] // chunk, chunk, *x.shape[1:])
        for n in _OF_STEPS
        if (x := getattr(given, n)) is not None
    }
    y, last = of_chunks(before, given._replace(**split))
    return y.reshape(-1, *y.shape[2:])[:steps], last


_OF_STEPS = ("decay", "key", "value", "query", "excess", "probe", "write")
_OF_ROWS = ("key", "query", "probe", "write")


def _lengthened(x: Array, count: int, value: float) -> Array:
    return jnp.pad(x, ((0, count), *((0, 0) for _ in x.shape[1:])), constant_values=value)


def by_heads(of_chunks: OfChunks) -> OfChunks:
    """Returns what computes chunks from a function of wide arrays [T / C, G, H, C, ...] that gives such a y."""

    def run(before: bool, given: Recurrence) -> tuple[Array, Array]:
        moved = {
            n: jnp.moveaxis(x.astype(given.initial.dtype), 1, 3)
            for n in _OF_STEPS
            if (x := getattr(given, n)) is not None
        }
        y, last = of_chunks(before, given._replace(**moved))
        return jnp.moveaxis(y, 3, 1), last

    return run


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scans(before: bool, given: Recurrence) -> tuple[Array, Array]:
    merged = _merged(given)
    form = _form(merged)
    last, y = _scanned(
        lambda state, own: form.step(before, state, own),
        merged.initial,
        (form.prepared(merged.decay, merged.excess), _operands(merged)),
    )
    return y.reshape(given.value.shape), last.reshape(given.initial.shape)


def _merged(given: Recurrence) -> Recurrence:
    """Returns the same with one axis for groups and heads, where heads share no keys."""
    if given.key.shape[2] < given.value.shape[2]:
        return given
    of_steps = {n: x.reshape(x.shape[0], -1, *x.shape[3:]) for n in _OF_STEPS if (x := getattr(given, n)) is not None}
    initial = given.initial
    return given._replace(initial=initial.reshape(-1, *initial.shape[2:]), **of_steps)


def _scanned(step: ArrayFunction, first: Array, chunks: PyTree, reverse: bool = False) -> tuple[Array, PyTree]:
    """Runs ``lax.scan`` with slices and results of one axis each.

    XLA's time to compile a slice, an update and the zeros of a stacked result on CPUs grows with their axes; and behind
    a barrier, equal slices are one kernel, whatever reads them.
    """
    leaves, tree = jax.tree.flatten(chunks)
    result: PyTree = None

    def one(state: Array, flat: list[Array]) -> tuple[Array, list[Array]]:
        nonlocal result
        own = [x.reshape(whole.shape[1:]) for x, whole in zip(lax.optimization_barrier(flat), leaves, strict=True)]
        state, result = step(state, jax.tree.unflatten(tree, own))
        return state, lax.optimization_barrier([x.reshape(-1) for x in jax.tree.leaves(result)])

    last, stacked = lax.scan(one, first, [x.reshape(x.shape[0], -1) for x in leaves], reverse=reverse)
    shapes = [x.shape for x in jax.tree.leaves(result)]
    found = [x.reshape(x.shape[0], *shape) for x, shape in zip(stacked, shapes, strict=True)]
    return last, jax.tree.unflatten(jax.tree.structure(result), found)


def _form(given: Recurrence) -> Form:
    kind: Kind = Channels() if given.decay.ndim == given.key.ndim else Heads()
    return kind if given.probe is None else Corrected(kind)


def _operands(given: Recurrence) -> Operands:
    return Operands(given.key, given.value, given.query, given.probe, given.write)


def _forward(before: bool, given: Recurrence) -> tuple[tuple[Array, Array], Recurrence]:
    return _scans(before, given), given


def _backward(before: bool, given: Recurrence, cotangents: tuple[Array, Array]) -> tuple[Recurrence]:
    merged = _merged(given)
    dy, dlast = (x.reshape(like.shape) for x, like in zip(cotangents, (merged.value, merged.initial), strict=True))
    form = _form(merged)
    decays = form.prepared(merged.decay, merged.excess)
    operands = _operands(merged)

    def enter(state: Array, own: tuple[Decays, Operands]) -> tuple[Array, Array]:
        return form.advance(state, *own), state

    _, states = _scanned(enter, merged.initial, (decays, operands))
    dinitial, (ddecay, found) = _scanned(
        lambda dstate, own: form.step_transposed(before, dstate, *own),
        dlast,
        (decays, operands, states, dy),
        reverse=True,
    )
    excess = None if given.excess is None else jnp.zeros_like(given.excess)
    gradients = Recurrence(ddecay, found.key, found.value, found.query, dinitial, excess, found.probe, found.write)
    return (jax.tree.map(lambda own, like: own.reshape(like.shape), gradients, given),)


_scans.defvjp(_forward, _backward)

by_scans = by_heads(_scans)
"""Computes chunks one after the other, in plain JAX (:data:`OfChunks`)."""
