"""Random bits and keys by the Threefry hash, with its rounds written one after the other.

For CPUs JAX writes the rounds as a loop, which keeps four arrays in memory between one group of rounds and the next.
Without the loop all rounds of a number happen in registers, on vectors, and there is less to compile.  The bits are the
same.

The hash is Threefry-2x32 with 20 rounds, of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
3" (2011).  What is hashed is what JAX hashes under ``jax_threefry_partitionable``, its default.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from autopallas import compat
from autopallas.compat import Dtype, Shaped
from autopallas.graph import Graph, Node
from autopallas.kernels.respelling.kind import Found, Kind, Sample
from autopallas.kernels.respelling.spec import Parameters, RespellingSpec
from autopallas.sites.random_keys import dtype_of

__all__ = ["KIND"]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
_IMPLEMENTATION = "threefry2x32"
_FLAG = "jax_threefry_partitionable"
_CHECKS = "jax_debug_key_reuse"
"""JAX's check that no key is read twice, which knows its own primitives."""
_MOST = 2**32
"""Numbers from one key that are counted in 32 bits."""
_FEW = 1024
"""Words of keys up to which no loop stands around them, which took longer than they do with 4 and with 256 words."""


# ---------------------------------------------------------------------- recognition


def _match(graph: Graph, node: Node) -> Found | None:
    keys, *others = node.equation.invars
    params = dict(node.equation.params)
    if keys.aval.dtype != dtype_of(_IMPLEMENTATION) or 0 in keys.aval.shape or getattr(jax.config, _CHECKS, False):
        return None
    if node.name == "random_fold_in":
        return None if params else _fold_in(graph, node, others[0].aval)
    shape, width = params.pop("shape"), params.pop("bit_width", 32)
    if params or not (getattr(jax.config, _FLAG) and compat.draws_by_position(node.equation)):
        return None
    if not all(isinstance(size, int) for size in shape) or not 0 < math.prod(shape) <= _MOST:
        return None
    parameters = (("bit_width", width), ("primitive", node.name), ("shape", tuple(shape)))
    return Found(parameters, node.inputs, node.outputs)


def _fold_in(graph: Graph, node: Node, data: Shaped) -> Found | None:
    if data.dtype != jnp.uint32 or 0 in data.shape:
        return None
    keys, number = node.inputs
    parameters: Parameters = (("data", None), ("primitive", node.name))
    if number not in graph.literals:
        return Found(parameters, (keys, number), node.outputs)
    value = np.asarray(graph.literals[number])
    return Found((("data", int(value)), parameters[1]), (keys,), node.outputs) if value.ndim == 0 else None


# ---------------------------------------------------------------------- the two ways


def _original(spec: RespellingSpec, keys: jax.Array, *data: jax.Array) -> list[jax.Array]:
    if spec["primitive"] == "random_fold_in":
        folded = data[0] if data else jnp.uint32(cast(int, spec["data"]))
        return [jnp.vectorize(jax.random.fold_in)(keys, folded)]
    shape = cast(tuple[int, ...], spec["shape"])
    if spec["primitive"] == "random_bits":
        one = functools.partial(jax.random.bits, shape=shape, dtype=spec.results[0][1])
    else:
        one = functools.partial(jax.random.split, num=shape)
    for _ in keys.shape:
        one = jax.vmap(one)
    return [one(keys)]


def _respelt(spec: RespellingSpec, keys: jax.Array, *data: jax.Array) -> list[jax.Array]:
    words = jax.random.key_data(keys)
    if spec["primitive"] == "random_bits":
        ((shape, dtype),) = spec.results
        return [_once(words, lambda: _bits(spec, words, dtype), shape, dtype)]
    shape = (*spec.results[0][0], 2)
    if math.prod(shape) <= _FEW:  # what draws bits from them computes them once
        hashed = _keys(spec, words, *data)
    else:
        hashed = _once(words, lambda: _keys(spec, words, *data), shape, jnp.uint32)
    return [jax.random.wrap_key_data(hashed, impl=_IMPLEMENTATION)]


def _once(words: jax.Array, function: Callable[[], jax.Array], shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
    """Computes a function in a loop of one step, whose number the compiler does not know.

    It would compute all rounds anew in whatever reads the numbers, such as the forward and the backward of a dropout,
    and for every element of what a mask is broadcast to.
    """
    steps = jnp.minimum(lax.population_count(words.reshape(-1)[0]).astype(jnp.int32) + 1, 1)
    first = jnp.int32(0), jnp.zeros(shape, dtype)
    return lax.while_loop(lambda c: c[0] < steps, lambda c: (c[0] + 1, function()), first)[1]


def _bits(spec: RespellingSpec, words: jax.Array, dtype: Dtype) -> jax.Array:
    shape = cast(tuple[int, ...], spec["shape"])
    high, low = _hash(*_spread(words, shape), _counters(shape))
    if spec["bit_width"] == 64:
        return lax.shift_left(high.astype(dtype), jnp.asarray(32, dtype)) | low.astype(dtype)
    return (high ^ low).astype(dtype)


def _keys(spec: RespellingSpec, words: jax.Array, *data: jax.Array) -> jax.Array:
    """Returns the words of keys, uint32[..., 2]."""
    if spec["primitive"] == "random_fold_in":
        folded = data[0] if data else jnp.uint32(cast(int, spec["data"]))
        high, low = _hash(words[..., 0], words[..., 1], folded)
    else:
        shape = cast(tuple[int, ...], spec["shape"])
        high, low = _hash(*_spread(words, shape), _counters(shape))
    word = lax.broadcasted_iota(jnp.int32, (*high.shape, 2), high.ndim)
    return jnp.where(word == 0, high[..., None], low[..., None])  # a concatenation would be computed one by one


def _spread(words: jax.Array, shape: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Returns the two words of each key with as many axes of size 1 as ``shape`` has behind."""
    inner = range(words.ndim - 1, words.ndim - 1 + len(shape))
    return lax.expand_dims(words[..., 0], inner), lax.expand_dims(words[..., 1], inner)


def _counters(shape: Sequence[int]) -> jax.Array:
    """Returns the position of each element in row-major order, uint32 of ``shape``."""
    counters, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        counters += lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride % 2**32)
        stride *= shape[axis]
    return counters


def _hash(first: jax.Array, second: jax.Array, counters: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the two words of the hash.

    Args:
      first, second: the words of the keys, uint32.
      counters: uint32, the lower words of what is hashed; the higher ones are zero.
    """
    schedule = (first, second, first ^ second ^ _PARITY)
    x, y = jnp.broadcast_arrays(first, counters + second)
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x = x + y
            y = x ^ (lax.shift_left(y, np.uint32(distance)) | lax.shift_right_logical(y, np.uint32(32 - distance)))
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns what is drawn, and whether from several keys."""
    (keys, _), *_ = spec.operands
    drawn = f"{spec['bit_width']} bits" if spec["primitive"] == "random_bits" else "keys"
    return f"{drawn} of {'one key' if math.prod(keys) == 1 else 'several keys'}"


def _samples() -> Iterator[tuple[str, Sample]]:
    key = dtype_of(_IMPLEMENTATION)
    dtypes = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}
    shapes = ((1024,), (64, 512), (4, 128, 768), (4, 512, 768), (8, 4096, 256))
    several = (64,)
    for shape in shapes:
        for width, dtype in dtypes.items():
            for keys in ((), several):
                each = (math.prod(shape) // 64,) if keys else shape
                draw = functools.partial(jax.random.bits, shape=each, dtype=dtype)

                name = f"{width}-{'x'.join(map(str, shape))}{'-keys' if keys else ''}"
                yield name, Sample(jax.vmap(draw) if keys else draw, (jax.ShapeDtypeStruct(keys, key),))
    for count in (1, 64, 2**14):
        given = jax.ShapeDtypeStruct((count,) * (count > 1), key)
        split, fold_in = jax.random.split, jax.random.fold_in
        yield f"split-{count}", Sample(jax.vmap(split) if count > 1 else split, (given,))
        data = jax.ShapeDtypeStruct(given.shape, jnp.uint32)
        yield f"fold_in-{count}", Sample(jax.vmap(fold_in) if count > 1 else fold_in, (given, data))
    yield "split-1x32768", Sample(lambda key: jax.random.split(key, 2**15), (jax.ShapeDtypeStruct((), key),))


KIND = Kind(
    name="threefry",
    primitives=("random_bits", "random_split", "random_fold_in"),
    numerics="identical",
    instead="the rounds of the hash one after the other",
    match=_match,
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    in_loops=True,
)
