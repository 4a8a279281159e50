"""Steps of decoding on a GPU: attention of one query for each head, or a few, over a cache of keys and values.

Letters: B batch, T queries, S keys of the cache, N heads, K heads of keys and values, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import autopallas
from autopallas.kernels.attention import gpu_few_queries, pallas_gpu
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.operands import Operands
from autopallas.kernels.attention.programs import traced
from autopallas.kernels.attention.spec import AttentionSpec, Layouts, SideSpec
from autopallas.kernels.attention.tuned_block_sizes import table_key
from autopallas.sites.device import Device
from autopallas.sites.elementwise import Index, Score, Side
from benchmarks.gpu_benchmark import ORIGINAL, Check, Timed

__all__ = ["Shape", "checks", "naive", "operands", "searched", "smoke", "spec_of", "stressed", "timed"]


class Shape(NamedTuple):
    """Sizes of a step of decoding, and whether the cache is filled to "lengths" of the examples, or is "full"."""

    b: int
    t: int
    s: int
    n: int
    k: int
    d: int
    mask: str

    @property
    def name(self) -> str:
        return f"B{self.b} T{self.t} S{self.s} N{self.n} K{self.k} D{self.d} {self.mask}"

    @property
    def groups(self) -> int:
        return self.n // self.k


_IMPLEMENTATION = "pallas_gpu"
_TIMED = (
    Shape(16, 1, 8192, 32, 8, 128, "lengths"), Shape(1, 1, 32768, 32, 8, 128, "lengths"),
    Shape(1, 1, 4096, 32, 8, 128, "lengths"), Shape(16, 1, 32768, 32, 8, 128, "lengths"),
    Shape(4, 1, 8192, 32, 8, 128, "full"), Shape(8, 4, 8192, 32, 8, 128, "lengths"),
    Shape(4, 1, 8192, 16, 16, 64, "lengths"), Shape(4, 1, 8192, 16, 16, 64, "full"),
)  # fmt: skip
_PLACES = (4, 5, 15)
"""Places of the first ones among the headlines of all operations."""
_SMALL = Shape(1, 1, 200, 4, 2, 16, "lengths")
_SMOKE = Shape(2, 1, 1024, 8, 2, 128, "lengths")
_CHECKED = (
    Shape(3, 1, 1000, 12, 4, 128, "lengths"), Shape(2, 4, 1024, 8, 2, 64, "lengths"),
    Shape(1, 16, 2048, 16, 2, 128, "lengths"), Shape(1, 1, 4099, 4, 4, 128, "full"),
    Shape(2, 2, 1536, 8, 1, 256, "lengths"), Shape(4, 1, 96, 8, 8, 96, "full"),
)  # fmt: skip
_STRESSED = (
    Shape(4, 1, 16384, 32, 8, 128, "lengths"), Shape(4, 4, 8192, 16, 8, 64, "lengths"),
    Shape(2, 16, 4096, 32, 4, 128, "lengths"), Shape(4, 1, 4096, 8, 2, 256, "full"),
)  # fmt: skip


def naive(mask: str, query: Any, key: Any, value: Any, lengths: Any) -> Any:
    """A step of decoding as people write it, [B, T, N, D] and [B, S, K, D], of a cache of ``lengths`` [B]."""
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    scores = jnp.einsum("btnd,bsnd->bnts", query, key, preferred_element_type=jnp.float32)
    scores = scores * np.float32(1 / np.sqrt(query.shape[-1]))
    if mask == "lengths":
        shown = jnp.arange(key.shape[1]) < lengths[:, None]
        scores = jnp.where(shown[:, None, None, :], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bnts,bsnd->btnd", weights, value)


def operands(shape: Shape, filled: bool = False) -> tuple[Any, ...]:
    """Returns the arguments of :func:`naive` after the mask; with ``filled`` caches all keys are there."""
    b, t, s, n, k, d, _ = shape
    keys, kind = jax.random.split(jax.random.key(t + d), 4), jnp.bfloat16
    query = jax.random.normal(keys[0], (b, t, n, d), kind)
    key, value = (jax.random.normal(x, (b, s, k, d), kind) for x in keys[1:3])
    lengths = jnp.full((b,), s) if filled else jax.random.randint(keys[3], (b,), 1, s + 1)
    return query, key, value, lengths.astype(jnp.int32)


def spec_of(shape: Shape) -> AttentionSpec:
    """Returns what recognition makes of :func:`naive`: of one query each, heads of a group are queries."""
    b, t, s, _, k, d, mask = shape
    bf16, f32, int32 = np.dtype(jnp.bfloat16), np.dtype(np.float32), np.dtype(np.int32)
    scale, score, live, sides = np.float32(1 / np.sqrt(d)), Score(f32), None, ()
    program = traced(lambda x: x * scale, score)
    if mask == "lengths":
        at = Index("key", int32), Side(0, int32)
        program = traced(lambda x, j, n: jnp.where(j < n, x * scale, -jnp.inf), score, *at)
        live, sides = traced(lambda j, n: j < n, *at), (SideSpec(int32, (b > 1, False, False, False, False)),)
    groups, length = (1, shape.groups) if t == 1 else (shape.groups, t)
    layouts = Layouts.with_heads_after_lengths()._replace(query=(0, 3, 1, 2, 4) if t > 1 else (0, 1, 2, 3, 4))
    sizes = b, k, groups, length, s, d, d
    return AttentionSpec(
        *sizes, bf16, bf16, bf16, f32, bf16, program, sides=sides, live=live, weights_dtype=bf16, layouts=layouts
    )


def searched(shape: Shape) -> bool:
    """Returns whether it is found before which blocks of keys a mask shows."""
    return 4 * shape.b * shape.s * shape.k * shape.d >= gpu_few_queries._SEARCHED_FROM


def _kernel(shape: Shape, sizes: BlockSizes) -> Callable[..., Any]:
    """The implementation with these sizes, from and to the arrays of :func:`naive`."""
    spec = spec_of(shape)

    def run(query: Any, key: Any, value: Any, lengths: Any) -> Any:
        b, t, n, d = query.shape
        canonical = jnp.moveaxis(query.reshape(b, t, shape.k, shape.groups, d), 1, 3)
        canonical = canonical.reshape(b, shape.k, spec.groups, spec.query_length, d)
        sides = (lengths.reshape(-1, 1, 1, 1, 1),) * len(spec.sides)
        given = Operands(canonical, jnp.moveaxis(key, 1, 2), jnp.moveaxis(value, 1, 2), sides)
        out = pallas_gpu.forward(spec, sizes, given).out.reshape(b, shape.k, shape.groups, t, d)
        return jnp.moveaxis(out, 3, 1).reshape(b, t, n, d)

    return run


def _exact(mask: str, *arguments: Any) -> Any:
    with jax.default_matmul_precision("highest"):
        return naive(mask, *(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in arguments))


def _check(shape: Shape, sizes: BlockSizes | None = None) -> Check:
    """What a program runs, or the kernel with these block sizes."""
    function = partial(naive, shape.mask)
    if sizes is None:
        settings: Any = dict(implementation=_IMPLEMENTATION, objective="always", autotune=False, strict=True)
        function = autopallas.optimize(function, **settings)
    else:
        function = _kernel(shape, sizes)  # type: ignore[assignment]
    name = shape.name if sizes is None else f"{shape.name}, blocks {tuple(sizes.to_dict().values())}"
    return Check(name, "bfloat16", "forward", function, partial(_exact, shape.mask), partial(operands, shape), 4e-2)


def _first(shape: Shape) -> BlockSizes:
    return pallas_gpu.candidates(spec_of(shape), Device.current())[0]


def smoke(small: bool) -> Iterator[Check]:
    """One step; in a dry run the kernel alone, since its callbacks have an order, which a site cannot have."""
    yield _check(_SMALL, _first(_SMALL)) if small else _check(_SMOKE)


def checks(small: bool) -> Iterator[Check]:
    """Groups, lengths and head sizes; numbers of keys that are no multiple of anything."""
    for shape in () if small else _CHECKED:
        yield _check(shape)


def stressed(small: bool) -> Iterator[Check]:
    """Many shares of the keys, with one and two warpgroups, and stages that are filled again and again."""
    for shape in () if small else _STRESSED:
        yield _check(shape)
        yield _check(shape, replace(_first(shape), key_block=128, blocks_per_processor=3))


def timed(small: bool) -> Iterator[Timed]:
    """The cases of the table; none in a dry run."""
    for n, shape in enumerate(() if small else _TIMED):
        yield _timed(shape, _PLACES[n] if n < len(_PLACES) else 100)


def _timed(shape: Shape, priority: int) -> Timed:
    """Caches are full: a mask by lengths is compared with an original that has no more to do."""
    b, t, s, n, k, d, mask = shape
    spec = spec_of(shape)
    found = {
        f"pallas_gpu ({', '.join(map(str, sizes.to_dict().values()))})": sizes
        for sizes in pallas_gpu.candidates(spec, Device.current())
    }
    candidates: dict[str, Callable[..., Any]] = {ORIGINAL: partial(naive, mask)}
    candidates |= {name: _kernel(shape, sizes) for name, sizes in found.items()}
    if Device.current().platform == "gpu":
        candidates["cudnn"] = partial(_cudnn, mask)
    return Timed(
        name=shape.name,
        dtype="bfloat16",
        direction="forward",
        candidates=candidates,
        block_sizes=found,
        arguments=partial(operands, shape, filled=True),
        operations=4.0 * b * t * n * s * d,
        key=table_key(spec, _IMPLEMENTATION, "forward"),
        bytes_moved=2.0 * (2 * b * s * k * d + 2 * b * t * n * d),
        priority=priority,
    )


def _cudnn(mask: str, query: Any, key: Any, value: Any, lengths: Any) -> Any:
    lengths = lengths if mask == "lengths" else None
    return jax.nn.dot_product_attention(query, key, value, key_value_seq_lengths=lengths, implementation="cudnn")
