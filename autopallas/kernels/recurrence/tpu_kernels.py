"""Computes chunks of recurrences on a TPU: the states of several heads stay in VMEM from one chunk to the next.

One kernel goes through the chunks forward; for the backward one finds the states at the beginnings of chunks, and one
goes back through them, with the cotangent of the state in VMEM, and computes a chunk's scores again.

Letters: T steps, C steps of a chunk, G groups, H heads of a group, J heads that keys and queries have (H, or 1 where
heads share them), M heads of all groups, K heads of a block, N rows of a state, P columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autopallas.kernels.recurrence.chunk_kinds import Operands, advanced, stepped
from autopallas.kernels.recurrence.chunks import Recurrence
from autopallas.kernels.recurrence.tpu_tiles import HeadChunk, cotangent_of_decays, head_chunks
from autopallas.kernels.refs import Ref
from autopallas.kernels.tpu import block_bytes, call, generation
from autopallas.sites.device import Device

__all__ = ["by_kernels", "heads_of_block", "vmem_bytes"]

Array: TypeAlias = jax.Array
Direction: TypeAlias = Literal["forward", "states", "backward"]
Kind: TypeAlias = Literal["decay", "key", "value", "state", "states", "key cotangent"]
"""What an array holds, and so which part of it belongs to a step of the grid."""

_MOST_HEADS = 8
"""Heads of a block: with more of them the program becomes long, and a step of the grid costs little already."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_kernels(before: bool, given: Recurrence) -> tuple[Array, Array]:
    """Computes chunks in one kernel (:data:`~.chunks.OfChunks`)."""
    sizes = _Sizes.of(given)
    arrays = sizes.flat(given)
    y, last = sizes.call("forward", partial(_forward_kernel, before), arrays, ("value", "state"))
    return y.reshape(given.value.shape), last.reshape(given.initial.shape)


def _forward(before: bool, given: Recurrence) -> tuple[tuple[Array, Array], Recurrence]:
    return by_kernels(before, given), given


def _backward(before: bool, given: Recurrence, cotangents: tuple[Array, Array]) -> tuple[Recurrence]:
    sizes = _Sizes.of(given)
    arrays = sizes.flat(given)
    (states,) = sizes.call("states", _states_kernel, arrays._replace(query=None), ("states",))
    ddecay, dkey, dvalue, dquery, dinitial = sizes.call(
        "backward",
        partial(_backward_kernel, before),
        arrays._replace(initial=None),
        ("decay", "key cotangent", "value", "key cotangent", "state"),
        ("states", states),
        ("value", cotangents[0].reshape(arrays.value.shape)),
        ("state", cotangents[1].reshape(sizes.shape("state"))),
    )
    found = Recurrence(
        ddecay.reshape(given.decay.shape),
        dkey.sum(0).reshape(given.key.shape),
        dvalue.reshape(given.value.shape),
        dquery.sum(0).reshape(given.query.shape),
        dinitial.reshape(given.initial.shape),
        None if given.excess is None else jnp.zeros_like(given.excess),
    )
    return (found,)


by_kernels.defvjp(_forward, _backward)


# ---------------------------------------------------------------------- blocks


def heads_of_block(heads: int, chunk: int, rows: int, columns: int, budget: int) -> int:
    """Returns K: the most heads at a time, of which all blocks are full, that fit into VMEM; 0 where one does not.

    Args:
      heads: how many of them are alike: H where they share keys, else M.
      chunk, rows, columns: C, N, P.
      budget: bytes of VMEM.
    """
    room = budget - budget // 8  # for what the compiler spills
    divisors = [k for k in range(min(_MOST_HEADS, heads), 0, -1) if heads % k == 0]
    return next((k for k in divisors if vmem_bytes(k, chunk, rows, columns) <= room), 0)


def vmem_bytes(heads: int, chunk: int, rows: int, columns: int, direction: Direction = "backward") -> int:
    """Estimates what a kernel takes of VMEM: two buffers for each block, the states, and the tiles of one chunk.

    Args:
      heads, chunk, rows, columns: K, C, N, P.
      direction: which kernel; the backward takes most.
    """
    of_rows, of_columns, states = _BLOCKS[direction]
    blocks = of_rows * block_bytes((heads, chunk, rows), jnp.float32, 2)
    blocks += of_columns * block_bytes((heads, chunk, columns), jnp.float32, 2)
    blocks += (2 * states + 1) * block_bytes((heads, rows, columns), jnp.float32)
    return blocks + 3 * block_bytes((heads, chunk), jnp.float32, 2) + 4 * block_bytes((chunk, chunk), jnp.float32)


_BLOCKS: dict[Direction, tuple[int, int, int]] = {"forward": (2, 2, 2), "states": (1, 1, 2), "backward": (4, 3, 3)}
"""Of each kernel: blocks [K, C, N], blocks [K, C, P], and blocks [K, N, P] that it reads or writes."""


class _Arrays(NamedTuple):
    """What a kernel reads, with groups and heads as one axis; None for what it does not read.

    Attributes:
      decay, excess: [T / C, M / K, K, C].
      key, query: [T / C, M or G, C, N].
      value: [T / C, M, C, P].
      initial: [M, N, P].
    """

    decay: Array
    excess: Array | None
    key: Array
    value: Array
    query: Array | None
    initial: Array | None


_KINDS: tuple[Kind, ...] = ("decay", "decay", "key", "value", "key", "state")
"""What the arrays of :class:`_Arrays` hold."""


class _Sizes(NamedTuple):
    """Sizes of a recurrence in chunks.

    Attributes:
      chunks, chunk, heads, rows, columns: T / C, C, M, N, P.
      each: how many heads share keys and queries.
      block: K.
    """

    chunks: int
    chunk: int
    heads: int
    rows: int
    columns: int
    each: int
    block: int

    @staticmethod
    def of(given: Recurrence) -> _Sizes:
        chunks, groups, heads, chunk, columns = given.value.shape
        rows, each = given.key.shape[4], heads if given.key.shape[2] == 1 else 1
        budget = generation(Device.current()).budget
        block = heads_of_block(each if each > 1 else groups * heads, chunk, rows, columns, budget) or 1
        return _Sizes(chunks, chunk, groups * heads, rows, columns, each, block)

    @property
    def parts(self) -> int:
        """Number of blocks of heads that share a key: each gives a part of the key's cotangent."""
        return max(self.each // self.block, 1)

    def shape(self, kind: Kind) -> tuple[int, ...]:
        """Returns the shape of an array."""
        match kind:
            case "decay":
                return self.chunks, self.heads // self.block, self.block, self.chunk
            case "key":
                return self.chunks, self.heads // self.each, self.chunk, self.rows
            case "key cotangent":
                return self.parts, *self.shape("key")
            case "value":
                return self.chunks, self.heads, self.chunk, self.columns
            case "state":
                return self.heads, self.rows, self.columns
            case "states":
                return self.chunks, self.heads, self.rows, self.columns

    def flat(self, given: Recurrence) -> _Arrays:
        """Returns the arrays as the kernels read them."""
        own = (given.decay, given.excess, given.key, given.value, given.query, given.initial)
        return _Arrays(
            *(None if x is None else x.reshape(self.shape(kind)) for x, kind in zip(own, _KINDS, strict=True))
        )

    def call(
        self,
        direction: Direction,
        kernel: Callable[..., None],
        arrays: _Arrays,
        results: Sequence[Kind],
        *more: tuple[Kind, Array],
    ) -> list[Array]:
        """Runs a kernel on the blocks of all heads and chunks; the backward's chunks are in reverse order.

        The kernel's first argument is :class:`_Arrays` of references, and then come those of ``more``.
        """
        held = [(kind, x) for kind, x in zip(_KINDS, arrays, strict=True) if x is not None]
        operands = [*held, *more]
        missing = [x is None for x in arrays]

        def body(*refs: Ref) -> None:
            given = iter(refs)
            kernel(_Arrays(*(None if lacks else next(given) for lacks in missing)), *given)

        types = [jax.ShapeDtypeStruct(self.shape(kind), jnp.float32) for kind in results]
        moved = sum(4 * math.prod(x.shape) for x in (*(x for _, x in operands), *types))
        found: list[Array] = call(
            body,
            name=f"autopallas_recurrence_{direction}",
            grid=(self.heads // self.block, self.chunks),
            semantics=("parallel", "arbitrary"),
            in_specs=[self._block(kind, direction) for kind, _ in operands],
            out_specs=[self._block(kind, direction) for kind in results],
            out_shape=types,
            scratch_shapes=[pltpu.VMEM((self.block, self.rows, self.columns), jnp.float32)],
            cost=pl.CostEstimate(flops=self._operations(direction), bytes_accessed=moved, transcendentals=0),
            alike=2,
        )(*(x for _, x in operands))
        return found

    def _operations(self, direction: Direction) -> int:
        """Returns the multiplications and additions of a kernel's matrix products."""
        c, n, p = self.chunk, self.rows, self.columns
        scores, values, states = c * c * n, c * c * p, c * n * p
        one = {
            "forward": scores + values + 2 * states,
            "states": states,
            "backward": 3 * scores + 2 * values + 5 * states + c**3,
        }[direction]
        return 2 * self.heads * self.chunks * one

    def _block(self, kind: Kind, direction: Direction) -> pl.BlockSpec:
        """Returns which part of an array belongs to a step (block of heads, chunk) of the grid."""
        last, each, k = self.chunks - 1, self.each, self.block
        tile = self.shape(kind)[-2:]

        def at(chunk: Array) -> Array:
            return last - chunk if direction == "backward" else chunk

        def keys(b: Array) -> Array:
            return b if each == 1 else lax.div(b, jnp.int32(self.parts))

        match kind:
            case "decay":
                return pl.BlockSpec((None, None, *tile), lambda b, c: (at(c), b, 0, 0))
            case "key":
                return pl.BlockSpec((None, k if each == 1 else 1, *tile), lambda b, c: (at(c), keys(b), 0, 0))
            case "key cotangent":
                return pl.BlockSpec(
                    (None, None, k if each == 1 else 1, *tile),
                    lambda b, c: (lax.rem(b, jnp.int32(self.parts)), at(c), keys(b), 0, 0),
                )
            case "state":
                return pl.BlockSpec((k, *tile), lambda b, c: (b, 0, 0))
            case _:
                return pl.BlockSpec((None, k, *tile), lambda b, c: (at(c), b, 0, 0))


# ---------------------------------------------------------------------- bodies


def _forward_kernel(before: bool, given: _Arrays, y_ref: Ref, last_ref: Ref, state_ref: Ref) -> None:
    """One chunk: y, and at the last chunk the state after it."""
    _begin(state_ref, given.initial)
    for head, (chunk, own) in enumerate(_heads(given)):
        state_ref[head], y_ref[head] = stepped(chunk, before, state_ref[head], own)
    _end(last_ref, state_ref)


def _states_kernel(given: _Arrays, states_ref: Ref, state_ref: Ref) -> None:
    """One chunk: the state before it."""
    _begin(state_ref, given.initial)
    states_ref[...] = state_ref[...]
    for head, (chunk, own) in enumerate(_heads(given)):
        state_ref[head] = advanced(chunk, state_ref[head], own)


def _backward_kernel(
    before: bool,
    given: _Arrays,
    states_ref: Ref,
    dy_ref: Ref,
    dlast_ref: Ref,
    ddecay_ref: Ref,
    dkey_ref: Ref,
    dvalue_ref: Ref,
    dquery_ref: Ref,
    dinitial_ref: Ref,
    dstate_ref: Ref,
) -> None:
    """One chunk, the last one first: the cotangents of what it is computed from, and at the first that of the state."""
    _begin(dstate_ref, dlast_ref)
    for head, (chunk, own) in enumerate(_heads(given)):
        _, pull = jax.vjp(lambda state, chunk, own: stepped(chunk, before, state, own), states_ref[head], chunk, own)
        dstate_ref[head], dchunk, found = pull((dstate_ref[head], dy_ref[head]))
        ddecay_ref[head : head + 1] = cotangent_of_decays(chunk, dchunk)
        dvalue_ref[head] = found.value
        place = head % dkey_ref.shape[0]
        if place < head:
            dkey_ref[place] += found.key
            dquery_ref[place] += found.query
        else:
            dkey_ref[place], dquery_ref[place] = found.key, found.query
    _end(dinitial_ref, dstate_ref)


def _begin(state_ref: Ref, first_ref: Ref) -> None:
    """Puts the first states in their place."""

    @pl.when(pl.program_id(1) == 0)
    def begin() -> None:
        state_ref[...] = first_ref[...]


def _end(last_ref: Ref, state_ref: Ref) -> None:
    """Writes the states; the last chunk writes last."""
    last_ref[...] = state_ref[...]


def _heads(given: _Arrays) -> Iterator[tuple[HeadChunk, Operands]]:
    """Yields the products of decays and the operands of each head of a block."""
    chunks = head_chunks(given.decay[...], None if given.excess is None else given.excess[...])
    keys = given.key.shape[0]

    def of(head: int) -> Operands:
        key = given.key[head % keys]
        return Operands(key, given.value[head], key if given.query is None else given.query[head % keys])

    for head, chunk in enumerate(chunks):
        yield chunk, of(head)
