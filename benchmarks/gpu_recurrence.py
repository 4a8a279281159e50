"""Recurrences on a GPU: what is checked, repeated and timed.

Letters: T steps, B sequences, H heads, N rows and P columns of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopallas
from autopallas.kernels.recurrence.block_sizes import BlockSizes
from autopallas.kernels.recurrence.cases import in_direction, types
from autopallas.kernels.recurrence.chunks import Recurrence, chunked
from autopallas.kernels.recurrence.gpu_sizes import CHUNK
from autopallas.kernels.recurrence.pallas_gpu import of_chunks
from autopallas.kernels.recurrence.spec import RecurrenceSpec
from autopallas.kernels.recurrence.tuned_block_sizes import table_key
from benchmarks.case import DIRECTIONS, Case, Direction
from benchmarks.gpu_benchmark import ORIGINAL, Check, Peer, Timed

IMPLEMENTATION = "pallas_gpu"
CHUNKED = "chunked"
"""The candidate that is chunks in plain JAX."""

_SHARED = "shared"
"""The variant whose heads share queries and keys, as those of Mamba-2 do."""
_CHECKED = (
    (1000, 2, 3, 64, 128, "scalar"),
    (1024, 4, 8, 128, 128, "scalar"),
    (513, 2, 5, 128, 64, _SHARED),
    (1, 1, 1, 32, 48, "scalar"),
)
_STRESSED = ((4096, 2, 16, 128, 128, "scalar"), (777, 1, 3, 64, 64, _SHARED))
_TIMED = (
    (4096, 4, 16, 128, 64, _SHARED),
    (4096, 4, 16, 128, 128, "scalar"),
    (2048, 8, 16, 64, 64, "scalar"),
    (16384, 1, 16, 128, 64, "scalar"),
)
_SMALL = (70, 1, 1, 64, 64, "scalar")
_FIRST_PRIORITY, _HEADLINES = 15, 2
_TOLERANCE = 4e-2
"""Relative to the largest number of a row, as of other operations in bfloat16: keys, values and stored states are
rounded to 8 bits."""


def case_of(t: int, b: int, h: int, n: int, p: int, variant: str, direction: Direction) -> Case:
    return Case("recurrence", direction, "bfloat16", variant, (("T", t), ("B", b), ("H", h), ("N", n), ("P", p)))


def of_heads(query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array) -> jax.Array:
    """Computes a matrix state with one decay for each head and step: query, key [T, B, H, N], value [T, B, H, P], decay
    [T, B, H]."""
    return _scanned("bhnp,bhn->bhp", query, key, value, decay)


def shared(query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array) -> jax.Array:
    """Computes the same with queries and keys that all heads share, [T, B, N]."""
    return _scanned("bhnp,bn->bhp", query, key, value, decay)


def _scanned(reads: str, *given: jax.Array) -> jax.Array:
    def step(state: jax.Array, own: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, a = own
        k = k if k.ndim == 3 else k[:, None]
        state = a[..., None, None] * state + k[..., None] * v[..., None, :]
        return state, jnp.einsum(reads, state, q)

    key, value = given[1:3]
    first = jnp.zeros((*value.shape[1:3], key.shape[-1], value.shape[-1]), value.dtype)
    found: jax.Array = jax.lax.scan(step, first, given)[1]
    return found


def spec_of(case: Case) -> RecurrenceSpec:
    """Returns what recognition makes of the original."""
    t, b, h, n, p = (case.size(letter) for letter in "TBHNP")
    bf16 = np.dtype(jnp.bfloat16)
    groups, heads = (b, h) if case.mask == _SHARED else (b * h, 1)
    return RecurrenceSpec(t, groups, heads, n, p, "scalar", 0, 1, 1, 0, bf16, bf16)


def original(case: Case) -> Callable[..., Any]:
    """The computation as people write it, in the direction of the case."""
    return in_direction(case, shared if case.mask == _SHARED else of_heads)


def operands(case: Case) -> tuple[jax.Array, ...]:
    """Query, key, value, decay, and the cotangent: random, and decays of which 95 in 100 are between 0.88 and 1."""
    found = []
    for number, t in enumerate(types(case)):
        shape = (*t.shape[:2], t.shape[3]) if case.mask == _SHARED and number < 2 else t.shape
        scale = case.size("N") ** -0.5 if number == 0 else 1.0
        random = jax.random.normal(jax.random.key(number), shape, jnp.bfloat16) * scale
        found.append((jax.nn.sigmoid(random + 4) if number == 3 else random).astype(t.dtype))
    return tuple(found)


def kernel(case: Case) -> Callable[..., Any]:
    """What a replaced site runs, without recognition."""

    def run(query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array) -> jax.Array:
        if case.mask == _SHARED:
            query, key = query[:, :, None], key[:, :, None]
        _, *lead, columns = value.shape
        initial = jnp.zeros((*lead, key.shape[-1], columns), jnp.float32)
        given = Recurrence(decay.astype(jnp.float32), key, value, query, initial)
        y, _ = chunked(given, CHUNK, False, of_chunks)
        return y.astype(value.dtype)

    return in_direction(case, run)


def exact(case: Case, *given: jax.Array) -> Any:
    """As it is written, in float32 at the highest precision."""
    with jax.default_matmul_precision("highest"):
        return original(case)(*(x.astype(jnp.float32) for x in given))


def _check(case: Case, small: bool) -> Check:
    function = kernel(case)
    if not small:  # the interpreter's callbacks have an order, which a replaced site cannot have
        function = autopallas.optimize(
            original(case), implementation=IMPLEMENTATION, objective="always", autotune=False, strict=True
        )
    return Check(f"{case.shape} {case.mask}", case.dtype, case.direction, _in_rows(function),
                 _in_rows(partial(exact, case)), partial(operands, case), _TOLERANCE)  # fmt: skip


def _in_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns value and gradients with all steps of a head's decay in one row: errors are judged by rows, and the
    gradient of one step's decay may cancel to nothing."""

    def run(*given: jax.Array) -> Any:
        y, (*gradients, of_decay) = function(*given)
        return y, (*gradients, jnp.moveaxis(of_decay, 0, -1))

    return run


def smoke(small: bool) -> Iterator[Check]:
    """Value and gradients of an odd number of steps, of heads with queries of their own and of such that share them."""
    for shape in (_SMALL,) if small else ((257, 2, 3, 64, 64, "scalar"), (130, 1, 2, 128, 64, _SHARED)):
        yield _check(case_of(*shape, "forward+backward"), small)


def checks(small: bool) -> Iterator[Check]:
    """The grid: every shape, value and gradients."""
    for shape in ((*_SMALL[:-1], _SHARED),) if small else _CHECKED:
        yield _check(case_of(*shape, "forward+backward"), small)


def stressed(small: bool) -> Iterator[Check]:
    """Many blocks at once, and an odd number of them."""
    for shape in (_SMALL,) if small else _STRESSED:
        yield _check(case_of(*shape, "forward+backward"), small)


def timed(small: bool) -> Iterator[Timed]:
    """Forward, and with gradients."""
    for number, shape in enumerate((_SMALL,) if small else _TIMED):
        for direction in DIRECTIONS[:1] if small else DIRECTIONS[::-1]:
            priority = _FIRST_PRIORITY + number if number < _HEADLINES and not small else 100
            yield _timed(case_of(*shape, direction), priority)


def _timed(case: Case, priority: int) -> Timed:
    chunks = autopallas.optimize(original(case), implementation="xla", objective="always", autotune=False, strict=True)
    t, b, h, n, p = (case.size(letter) for letter in "TBHNP")
    described, sizes = spec_of(case), BlockSizes(CHUNKED, CHUNKED, CHUNK)
    backwards = 3 if case.direction == "forward+backward" else 1
    return Timed(
        name=f"{case.shape} {case.mask}",
        dtype=case.dtype,
        direction=case.direction,
        candidates={ORIGINAL: original(case), CHUNKED: chunks, IMPLEMENTATION: kernel(case)},
        block_sizes={IMPLEMENTATION: sizes},
        arguments=partial(operands, case),
        # A step multiplies a state by its decay, adds a product to it, and reads it.
        operations=5.0 * t * b * h * n * p * backwards,
        key=table_key(described, IMPLEMENTATION, case.direction),
        peers={CHUNKED: Peer(table_key(described, "xla", case.direction), sizes)},
        batch=b * h,
        bytes_moved=2.0 * t * b * (2 * n * (1 if case.mask == _SHARED else h) + 2 * h * p + h) * backwards,
        priority=priority,
    )
