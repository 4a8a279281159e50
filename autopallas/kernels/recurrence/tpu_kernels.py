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
from autopallas.kernels.recurrence.chunks import Recurrence, by_heads
from autopallas.kernels.recurrence.delta_rule import corrected_advance, corrected_step
from autopallas.kernels.recurrence.tpu_tiles import ChannelChunk, HeadChunk, channel_chunk, head_chunks
from autopallas.kernels.refs import Ref
from autopallas.kernels.tpu import block_bytes, call, generation
from autopallas.sites.device import Device

__all__ = ["Layout", "by_kernels"]

Array: TypeAlias = jax.Array
Direction: TypeAlias = Literal["forward", "states", "backward"]
Kind: TypeAlias = Literal["decay", "key", "value", "state", "states", "key cotangent"]
"""What an array holds, and so which part of it belongs to a step of the grid."""

_MOST_HEADS = 8
"""Heads of a block: with more of them the program becomes long, and a step of the grid costs little already."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernels(before: bool, given: Recurrence) -> tuple[Array, Array]:
    sizes = _Sizes.of(given)
    arrays = sizes.flat(given)
    y, last = sizes.call("forward", partial(_forward_kernel, before), arrays, ("value", "state"))
    return y.reshape(given.value.shape), last.reshape(given.initial.shape)


def _forward(before: bool, given: Recurrence) -> tuple[tuple[Array, Array], Recurrence]:
    return _kernels(before, given), given


def _backward(before: bool, given: Recurrence, cotangents: tuple[Array, Array]) -> tuple[Recurrence]:
    sizes = _Sizes.of(given)
    arrays = sizes.flat(given)
    (states,) = sizes.call("states", _states_kernel, arrays._replace(query=None), ("states",))
    of_keys: list[Kind] = ["key cotangent" for x in (given.key, given.query, given.probe, given.write) if x is not None]
    ddecay, dvalue, dinitial, *others = sizes.call(
        "backward",
        partial(_backward_kernel, before),
        arrays._replace(initial=None),
        (sizes.of_decays, "value", "state", *of_keys),
        ("states", states),
        ("value", cotangents[0].reshape(arrays.value.shape)),
        ("state", cotangents[1].reshape(sizes.shape("state"))),
    )
    dkey, dquery, *more = (x.sum(0).reshape(given.key.shape) for x in others)
    dprobe, dwrite = (*more, None, None)[:2]
    found = Recurrence(
        ddecay.reshape(given.decay.shape),
        dkey,
        dvalue.reshape(given.value.shape),
        dquery,
        dinitial.reshape(given.initial.shape),
        None if given.excess is None else jnp.zeros_like(given.excess),
        dprobe,
        dwrite,
    )
    return (found,)


_kernels.defvjp(_forward, _backward)

by_kernels = by_heads(_kernels)
"""Computes chunks in one kernel (:data:`~.chunks.OfChunks`)."""


# ---------------------------------------------------------------------- blocks


class Layout(NamedTuple):
    """Sizes that decide how much of VMEM a kernel takes.

    Attributes:
      chunk, rows, columns: C, N, P.
      by_channel: whether each row of a state has its own decay.
      delta: whether steps correct the state along a row.
    """

    chunk: int
    rows: int
    columns: int
    by_channel: bool = False
    delta: bool = False

    def heads_of_block(self, heads: int, budget: int) -> int:
        """Returns K: the most heads at a time, of which all blocks are full, that fit into VMEM; 0 where one does not.

        Args:
          heads: how many of them are alike: H where they share keys, else M.
          budget: bytes of VMEM.
        """
        room = budget - budget // 8
        divisors = [k for k in range(min(_MOST_HEADS, heads), 0, -1) if heads % k == 0]
        return next((k for k in divisors if self.vmem_bytes(k) <= room), 0)

    def vmem_bytes(self, heads: int, direction: Direction = "backward") -> int:
        """Estimates what a kernel takes of VMEM: two buffers for each block, the states, and what is spilled.

        Args:
          heads: K.
          direction: which kernel; the backward takes most.
        """
        of_rows, of_columns, states = _BLOCKS[direction]
        if self.by_channel:
            of_rows += 3 if direction == "backward" else 2
        if self.delta:
            of_rows += 4 if direction == "backward" else 2
        found = of_rows * block_bytes((heads, self.chunk, self.rows), jnp.float32, 2)
        found += of_columns * block_bytes((heads, self.chunk, self.columns), jnp.float32, 2)
        found += (2 * states + 1) * block_bytes((heads, self.rows, self.columns), jnp.float32)
        found += 3 * block_bytes((heads, self.chunk), jnp.float32, 2)
        # What is spilled, of a head and of others beside it.
        tiles = 2 if direction == "states" and not self.delta else 8 + 2 * heads
        # Decays of rows and the delta rule have products for each size of blocks of steps.
        each = {"forward": 2, "states": 0, "backward": 12}[direction]
        tiles += each * (self.by_channel + self.delta) * (self.chunk - 1).bit_length()
        return found + tiles * block_bytes((self.chunk, max(self.chunk, self.rows)), jnp.float32)


_BLOCKS: dict[Direction, tuple[int, int, int]] = {"forward": (2, 2, 2), "states": (1, 1, 2), "backward": (4, 3, 3)}
"""Of each kernel: blocks [K, C, N], blocks [K, C, P], and blocks [K, N, P] that it reads or writes."""


class _Arrays(NamedTuple):
    """What a kernel reads, with groups and heads as one axis; None for what it does not read.

    Attributes:
      decay, excess: [T / C, M / K, K, C], or [T / C, M, C, N] where each row has its own.
      key, query, probe, write: [T / C, M or G, C, N].
      value: [T / C, M, C, P].
      initial: [M, N, P].
    """

    decay: Array
    excess: Array | None
    key: Array
    value: Array
    query: Array | None
    initial: Array | None
    probe: Array | None
    write: Array | None


class _Sizes(NamedTuple):
    """Sizes of a recurrence in chunks.

    Attributes:
      chunks, chunk, heads, rows, columns: T / C, C, M, N, P.
      each: how many heads share keys and queries.
      block: K.
      of_decays: what decays are in blocks of: "decay", or "key" where each row has its own.
    """

    chunks: int
    chunk: int
    heads: int
    rows: int
    columns: int
    each: int
    block: int
    of_decays: Kind

    @staticmethod
    def of(given: Recurrence) -> _Sizes:
        chunks, groups, heads, chunk, columns = given.value.shape
        rows, each = given.key.shape[4], heads if given.key.shape[2] == 1 else 1
        by_channel = given.decay.ndim == 5
        layout = Layout(chunk, rows, columns, by_channel, given.probe is not None)
        budget = generation(Device.current()).budget
        block = layout.heads_of_block(each if each > 1 else groups * heads, budget) or 1
        of_decays: Kind = "key" if by_channel else "decay"
        return _Sizes(chunks, chunk, groups * heads, rows, columns, each, block, of_decays)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Returns what the arrays of :class:`_Arrays` hold."""
        return self.of_decays, self.of_decays, "key", "value", "key", "state", "key", "key"

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
        own = given.decay, given.excess, given.key, given.value, given.query, given.initial, given.probe, given.write
        return _Arrays._make(
            None if x is None else x.reshape(self.shape(kind)) for x, kind in zip(own, self.kinds, strict=True)
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
        held = [(kind, x) for kind, x in zip(self.kinds, arrays, strict=True) if x is not None]
        operands: list[tuple[Kind, Array]] = [*held, *more]
        missing: list[bool] = [x is None for x in arrays]

        def body(*refs: Ref) -> None:
            given = iter(refs)
            kernel(_Arrays._make(None if lacks else next(given) for lacks in missing), *given)

        types = [jax.ShapeDtypeStruct(self.shape(kind), jnp.float32) for kind in results]
        moved = sum(4 * math.prod(shape) for shape in (*(x.shape for _, x in operands), *(t.shape for t in types)))
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
        state_ref[head], y_ref[head] = _stepped(before, state_ref[head], chunk, own)
    last_ref[...] = state_ref[...]


def _states_kernel(given: _Arrays, states_ref: Ref, state_ref: Ref) -> None:
    """One chunk: the state before it."""
    _begin(state_ref, given.initial)
    states_ref[...] = state_ref[...]
    advance = advanced if given.probe is None else corrected_advance
    for head, (chunk, own) in enumerate(_heads(given)):
        state_ref[head] = advance(chunk, state_ref[head], own)


def _backward_kernel(
    before: bool,
    given: _Arrays,
    states_ref: Ref,
    dy_ref: Ref,
    dlast_ref: Ref,
    ddecay_ref: Ref,
    dvalue_ref: Ref,
    dinitial_ref: Ref,
    dkey_ref: Ref,
    dquery_ref: Ref,
    *refs: Ref,
) -> None:
    """One chunk, the last one first: the cotangents of what it is computed from, and at the first that of the state."""
    *others, dstate_ref = refs
    _begin(dstate_ref, dlast_ref)
    for head, (chunk, own) in enumerate(_heads(given)):
        _, pull = jax.vjp(partial(_stepped, before), states_ref[head], chunk, own)
        dstate_ref[head], dchunk, found = pull((dstate_ref[head], dy_ref[head]))
        if isinstance(chunk, HeadChunk):
            ddecay_ref[head : head + 1] = chunk.of_decays(dchunk)
        else:
            ddecay_ref[head] = chunk.of_decays(dchunk)
        dvalue_ref[head] = found.value
        cotangents = [x for x in (found.key, found.query, found.probe, found.write) if x is not None]
        for ref, x in zip((dkey_ref, dquery_ref, *others), cotangents, strict=True):
            place = head % ref.shape[0]
            ref[place] = ref[place] + x if place < head else x  # heads that share a key add theirs up
    dinitial_ref[...] = dstate_ref[...]


def _stepped(before: bool, state: Array, chunk: HeadChunk | ChannelChunk, own: Operands) -> tuple[Array, Array]:
    """Returns (the state after a chunk, y) of one head."""
    step = stepped if own.probe is None else corrected_step
    return step(chunk, before, state, own)


def _begin(state_ref: Ref, first_ref: Ref) -> None:
    """Puts the first states in their place."""

    @pl.when(pl.program_id(1) == 0)
    def begin() -> None:
        state_ref[...] = first_ref[...]


def _heads(given: _Arrays) -> Iterator[tuple[HeadChunk | ChannelChunk, Operands]]:
    """Yields the products of decays and the operands of each head of a block."""
    heads, keys = given.value.shape[0], given.key.shape[0]
    excess = given.excess
    chunks: Iterator[HeadChunk | ChannelChunk]
    if len(given.decay.shape) == 2:
        chunks = head_chunks(given.decay[...], None if excess is None else excess[...])
    else:
        chunks = (channel_chunk(given.decay[h], None if excess is None else excess[h]) for h in range(heads))
    for head, chunk in enumerate(chunks):
        key = given.key[head % keys]
        query = key if given.query is None else given.query[head % keys]
        probe, write = (None if ref is None else ref[head] for ref in (given.probe, given.write))
        yield chunk, Operands(key, given.value[head], query, probe, write)
