"""Attention on a GPU: what is checked, repeated and timed.

Letters: B batch, T length of queries and keys, N heads, K heads of keys and values, D head size.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import autopallas
from autopallas.kernels.attention import cudnn, pallas_gpu
from autopallas.kernels.attention.api import attention
from autopallas.kernels.attention.block_sizes import PERSISTENT, BlockSizes
from autopallas.kernels.attention.operands import Cotangents, Operands, Residuals
from autopallas.kernels.attention.programs import causal, traced
from autopallas.kernels.attention.spec import AttentionSpec, Layouts, SideSpec
from autopallas.kernels.attention.tuned_block_sizes import table_key
from autopallas.kernels.gpu import array_bytes
from autopallas.sites.device import Device
from autopallas.sites.elementwise import Index, Score, Side
from autopallas.sites.operation import Kernel
from benchmarks import gpu_attention_decode
from benchmarks.gpu_benchmark import MATMUL, ORIGINAL, Check, Peer, Timed
from benchmarks.gpu_session import peers

IMPLEMENTATION = "pallas_gpu"

FILLED = "causal, filled"
"""A causal mask that gives hidden keys a low score, as most programs do."""
FILLED_SEGMENTS = "segments, filled"
"""The same of segments."""
_LOW = ("rows without keys", FILLED, FILLED_SEGMENTS)
_MASKS = ("full", "causal", "window", "segments", "padded", "bias", "rows without keys", "soft cap", FILLED)
_SHAPES = (
    # (B, T, N, K, D)
    (2, 512, 4, 2, 64), (1, 1000, 4, 4, 128), (1, 333, 3, 1, 96), (1, 257, 2, 2, 40),
)  # fmt: skip
_LARGE = ((1, 1025, 2, 1, 256), (4, 64, 2, 2, 64), (1, 1, 4, 4, 64), (1, 2048, 2, 2, 128))
_SMALL = ((1, 70, 1, 1, 16),)
_TIMED = (
    # (B, T, N, D, mask, sizes of blocks, each with every schedule): the first ones are what the kernel is for.
    (1, 16384, 16, 128, "causal", 1), (1, 16384, 16, 128, "full", 1), (2, 4096, 16, 128, "mask + bias", 1),
    (4, 4096, 16, 64, "causal", 2), (4, 4096, 16, 128, "causal", 1), (4, 4096, 16, 128, "segments", 1),
    (4, 4096, 16, 128, FILLED, 1), (1, 16384, 16, 128, FILLED, 1), (4, 4096, 16, 128, FILLED_SEGMENTS, 1),
    (16, 1024, 16, 64, "full", 2), (4, 4096, 16, 128, "full", 1), (8, 2048, 16, 64, "full", 1),
    (8, 2048, 16, 128, "causal", 1), (16, 1024, 16, 64, "causal", 2),
    (32, 512, 16, 64, "causal", 1), (64, 256, 16, 64, "full", 1), (1, 8192, 16, 128, "causal", 1),
    (8, 2048, 16, 64, "causal", 1), (16, 1024, 16, 128, "causal", 1), (32, 512, 16, 64, "full", 1),
)  # fmt: skip
_SMALL_TIMED = ((1, 64, 1, 16, "causal", 1),)
_CAP, _OFFSET = 20.0, 300.0
_HEADLINES = (
    # What is timed first: (B, T, N, D, mask, whether gradients too).
    (4, 4096, 16, 128, "causal", False), (4, 4096, 16, 128, "causal", True), (1, 16384, 16, 128, "causal", False),
    (1, 16384, 16, 128, "causal", True), (4, 4096, 16, 64, "causal", False), (4, 4096, 16, 64, "causal", True),
    (1, 16384, 16, 128, "full", False), (1, 16384, 16, 128, "full", True), (2, 4096, 16, 128, "mask + bias", True),
    (4, 4096, 16, 128, FILLED, False), (4, 4096, 16, 128, FILLED, True), (1, 16384, 16, 128, FILLED, False),
)  # fmt: skip
_CUDNN = "cudnn implementation"
"""The candidate that is what a site runs where cuDNN is chosen; "cudnn" is the library's own call."""
_PLACES = (0, 1, 2, 3, 3, 3, 14, 15, 16, 1, 2, 3)
"""Places of these among the headlines of all operations: which schedule is best is found first."""


def naive(mask: str, query: Any, key: Any, value: Any, *rest: Any) -> Any:
    """Attention as people write it, [B, T, N, D] and [B, T, K, D]; ``rest``: segments, lengths or bias."""
    scores = _scores(mask, query, key, *rest)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bnts,bsnd->btnd", weights, jnp.repeat(value, query.shape[2] // value.shape[2], axis=2))


def _scores(mask: str, query: Any, key: Any, *rest: Any) -> Any:
    groups = query.shape[2] // key.shape[2]
    key = jnp.repeat(key, groups, axis=2)
    scores = jnp.einsum("btnd,bsnd->bnts", query, key, preferred_element_type=jnp.float32)
    scores = scores * np.float32(1 / np.sqrt(query.shape[-1]))
    i = jnp.arange(query.shape[1])
    past = i[:, None] >= i
    if mask == "soft cap":
        scores = jnp.tanh(scores / _CAP) * _CAP
    if mask == "offset":
        scores = scores + np.float32(_OFFSET)
    if mask in ("bias", "mask + bias"):
        scores = scores + rest[0].astype(jnp.float32)
    shown = {
        "causal": lambda: past,
        FILLED: lambda: past,
        "offset": lambda: past,
        "soft cap": lambda: past,
        "mask + bias": lambda: past,
        "window": lambda: past & (i[:, None] - i < max(1, len(i) // 4)),
        "segments": lambda: past & (rest[0][:, None, :, None] == rest[0][:, None, None, :]),
        FILLED_SEGMENTS: lambda: past & (rest[0][:, None, :, None] == rest[0][:, None, None, :]),
        "padded": lambda: (i < rest[0][:, None])[:, None, None, :],
        "rows without keys": lambda: i[:, None] >= i + len(i) // 2,
    }.get(mask)
    if shown is not None:
        scores = jnp.where(shown(), scores, np.float32(-1e9) if mask in _LOW else -jnp.inf)
    return scores


def _exact(mask: str, *arguments: Any) -> Any:
    """The result and the gradients in float32, these with the result rounded to the query's dtype.

    A row of dS is p (dp - delta), where delta is the row's sum of p dp, or of the cotangent times the result.  Kernels
    take the second, of the result that they have stored, whose weights were rounded too.  Where dq of a row is small,
    what rounding adds to delta, e, is most of its error, up to 0.23 of the row.  It is no fault, and part of what is
    wanted here: the gradient of each row's logsumexp for the scores is p, so that its cotangent is -e.  Where a
    gradient sums over keys (bias), delta is summed from p dp.
    """
    kept = jnp.finfo(arguments[0].dtype)
    wide = [x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in arguments]
    with jax.default_matmul_precision("highest"):

        def with_logsumexp(query: Any, key: Any, value: Any, *rest: Any) -> Any:
            out = naive(mask, query, key, value, *rest)
            return out, jax.nn.logsumexp(_scores(mask, query, key, *rest), axis=-1)  # [B, N, T]

        def rounded(x: Any) -> Any:
            # Casts there and back would be taken out by XLA on GPUs, which keeps what is more precise.
            return lax.reduce_precision(x, kept.nexp, kept.nmant)

        def cotangents(results: Any) -> Any:
            out, logsumexp = results
            scores = _scores(mask, *wide[:2], *wide[3:-1])
            largest = jnp.max(scores, axis=-1, keepdims=True)
            weights = jnp.exp(scores - jnp.where(jnp.isfinite(largest), largest, 0.0))
            sums = jnp.moveaxis(weights.sum(-1, keepdims=True), 1, 2)
            value = jnp.repeat(wide[2], out.shape[2] // wide[2].shape[2], axis=2)
            stored = rounded(jnp.einsum("bnts,bsnd->btnd", rounded(weights), value) / jnp.where(sums > 0, sums, 1.0))
            added = jnp.where(jnp.isfinite(out), stored - out, 0.0)
            return wide[-1], jnp.zeros_like(logsumexp) if "bias" in mask else -jnp.einsum(
                "btnd,btnd->bnt", wide[-1], added
            )

        (out, _), *gradients = _with_gradients(with_logsumexp, wide[:-1], cotangents)
    return out, *gradients


def _both(function: Callable[..., Any]) -> Callable[..., Any]:
    """The result and the gradients for query, key, value, and the bias, from a cotangent, the last argument."""

    def run(*arguments: Any) -> Any:
        *given, cotangent = arguments
        return _with_gradients(function, given, lambda out: cotangent.astype(out.dtype))

    return run


def _with_gradients(function: Callable[..., Any], given: Any, cotangents: Callable[[Any], Any]) -> tuple[Any, ...]:
    """A function's results, and gradients for floats among its arguments, from what ``cotangents`` makes of these."""
    active = tuple(n for n, x in enumerate(given) if jnp.issubdtype(x.dtype, jnp.floating))

    def of(*chosen: Any) -> Any:
        filled = list(given)
        for n, x in zip(active, chosen, strict=True):
            filled[n] = x
        return function(*filled)

    results, pull = jax.vjp(of, *(given[n] for n in active))
    return results, *pull(cotangents(results))


def operands(b: int, t: int, n: int, k: int, d: int, mask: str, dtype: str, cotangent: bool) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(t + d), 5)
    kind = jnp.dtype(dtype)
    arrays = [jax.random.normal(key, (b, t, heads, d), kind) for key, heads in zip(keys[:4], (n, k, k, n), strict=True)]
    rest: list[Any] = []
    if mask in ("segments", FILLED_SEGMENTS):
        rest = [jnp.sort(jax.random.randint(keys[4], (b, t), 0, 4), axis=1)]
    elif mask == "padded":
        rest = [jax.random.randint(keys[4], (b,), 1, t + 1)]
    elif mask in ("bias", "mask + bias"):
        rest = [jax.random.normal(keys[4], (1, n, t, t), kind)]
    return *arrays[:3], *rest, *(arrays[3:] if cotangent else [])


def _check(shape: tuple[int, ...], mask: str, dtype: str, small: bool) -> Check:
    b, t, n, k, d = shape
    if small:  # the interpreter's callbacks have an order, which a replaced site cannot have
        function = _both(partial(attention, implementation=IMPLEMENTATION, is_causal=mask == "causal"))
    else:
        step = _both(partial(naive, mask))
        function = autopallas.optimize(
            step, implementation=IMPLEMENTATION, objective="always", autotune=False, strict=True
        )
    tolerance = {"bfloat16": 4e-2, "float16": 1e-2}[dtype]
    given = partial(operands, b, t, n, k, d, mask, dtype, True)
    name = f"B{b} T{t} N{n} K{k} D{d} {mask}"
    return Check(name, dtype, "forward+backward", function, partial(_exact, mask), given, tolerance)


def _named(blocks: BlockSizes) -> str:
    return f"({', '.join(str(size) for size in blocks.to_dict().values())})"


def _check_of_blocks(shape: tuple[int, ...], mask: str, dtype: str, blocks: BlockSizes) -> Check:
    """The kernels themselves with these block sizes, which no table might choose."""
    b, t, n, _, d = shape
    function = _both(_of_implementation(pallas_gpu, _spec(b, t, n, d, mask), blocks))
    given = partial(operands, b, t, n, n, d, mask, dtype, True)
    name = f"B{b} T{t} N{n} D{d} {mask}, blocks {_named(blocks)}"
    return Check(name, dtype, "forward+backward", function, partial(_exact, mask), given, 4e-2)


def smoke(small: bool) -> Iterator[Check]:
    """A step of decoding; forward, dq, dk and dv; the gradient of a bias; scores so large that maximum and sum are
    computed anew."""
    yield from gpu_attention_decode.smoke(small)
    if small:
        yield _check(_SMALL[0], "causal", "bfloat16", True)
        return
    for shape, mask in (((1, 256, 2, 1, 128), "causal"), ((1, 256, 2, 2, 64), "bias"), ((1, 256, 2, 2, 64), "offset")):
        yield _check(shape, mask, "bfloat16", False)


def checks(small: bool) -> Iterator[Check]:
    """The grid: every mask at the shapes of moderate size, both dtypes, and a few extreme shapes."""
    for shape in _SMALL if small else _SHAPES:
        for mask in ("causal",) if small else _MASKS:
            yield _check(shape, mask, "bfloat16", small)
    if not small:
        for mask in _MASKS:
            yield _check(_SHAPES[0], mask, "float16", small)
        for shape in _LARGE:
            yield _check(shape, "causal", "bfloat16", small)
    yield from gpu_attention_decode.checks(small)


def stressed(small: bool) -> Iterator[Check]:
    """Many blocks at once, with every stage of the rings used again and again.

    Synchronisation differs with the number of warpgroups that compute (three for 192 rows), the stages of the ring (two
    for heads of 256), the dtype, and whether blocks of threads stay.
    """
    if small:
        yield _check(_SMALL[0], "causal", "bfloat16", True)
        return
    for shape, mask, sizes in (
        ((4, 2048, 8, 8, 128), "causal", (128, 128)),
        ((4, 2048, 8, 8, 64), "causal", (128, 256)),
        ((4, 2048, 8, 8, 128), FILLED, (128, 128)),
        ((4, 2048, 8, 8, 128), "full", (128, 128)),
        ((2, 2048, 8, 8, 256), "causal", (128, 64)),
        ((4, 1000, 8, 8, 96), "causal", (192, 128)),
    ):
        yield _check_of_blocks(shape, mask, "bfloat16", BlockSizes(*sizes, PERSISTENT))
    for shape, mask, dtype in (
        ((2, 2048, 8, 2, 128), "causal", "bfloat16"),
        ((2, 2048, 8, 8, 64), "segments", "bfloat16"),
        ((2, 2048, 8, 8, 64), FILLED_SEGMENTS, "bfloat16"),
        ((2, 1024, 4, 4, 128), "bias", "bfloat16"),
        ((1, 2048, 8, 8, 256), "causal", "bfloat16"),
        ((2, 2048, 8, 2, 128), "causal", "float16"),
    ):
        yield _check(shape, mask, dtype, False)
    yield _check_of_blocks((2, 2048, 8, 8, 64), "causal", "bfloat16", BlockSizes(192, 128))
    yield from gpu_attention_decode.stressed(small)


def timed(small: bool) -> Iterator[Timed]:
    """The grid of the table, forward and with gradients; then steps of decoding."""
    for case in _SMALL_TIMED if small else _TIMED:
        for backward in (False,) if small else (False, True):
            yield _timed(*case, backward)
    yield from gpu_attention_decode.timed(small)


def _spec(b: int, t: int, n: int, d: int, mask: str) -> AttentionSpec:
    """What recognition makes of :func:`naive`."""
    bf16, f32, int32 = np.dtype(jnp.bfloat16), np.dtype(np.float32), np.dtype(np.int32)
    scale, score = np.float32(1 / np.sqrt(d)), Score(f32)
    at, live, sides = (Index("query", int32), Index("key", int32)), None, ()
    program = traced(lambda s: s * scale, score)
    if mask == "causal":
        program = traced(lambda s, i, j: jnp.where(i >= j, s * scale, -jnp.inf), score, *at)
        live = causal()
    elif mask == FILLED:
        program = traced(lambda s, i, j: jnp.where(i >= j, s * scale, np.float32(-1e9)), score, *at)
    elif mask == "mask + bias":
        program = traced(
            lambda s, c, i, j: jnp.where(i >= j, s * scale + c.astype(f32), -jnp.inf), score, Side(0, bf16), *at
        )
        live, sides = causal(), (SideSpec(bf16, (False, True, False, True, True)),)
    elif mask in ("segments", FILLED_SEGMENTS):
        given, fill = (Side(0, int32), Side(1, int32)), np.float32(-1e9 if mask == FILLED_SEGMENTS else -np.inf)
        if mask == "segments":
            live = traced(lambda a, c, i, j: (a == c) & (i >= j), *given, *at)
        program = traced(lambda s, a, c, i, j: jnp.where((a == c) & (i >= j), s * scale, fill), score, *given, *at)
        varies = ((True, False, False, True, False), (True, False, False, False, True))
        sides = tuple(SideSpec(int32, v) for v in varies)
    sizes = b, n, 1, t, t, d, d
    dtypes = bf16, bf16, bf16, f32, bf16
    return AttentionSpec(
        *sizes, *dtypes, program, sides=sides, live=live, weights_dtype=bf16, layouts=Layouts.with_heads_after_lengths()
    )


def _timed(b: int, t: int, n: int, d: int, mask: str, count: int, backward: bool, rounded: bool = False) -> Timed:
    """Returns a case; ``rounded`` gradients of scores are multiplied in bfloat16, which :func:`naive` does not have."""
    spec = _spec(b, t, n, d, mask)
    if rounded:
        spec = replace(spec, score_gradient_dtype=np.dtype(jnp.bfloat16))
    direction = "forward+backward" if backward else "forward"
    wrapped: Callable[..., Any] = _both if backward else lambda function: function
    share = 1.0 if mask == "full" else 0.5
    operations = 2.0 * b * n * t * t * d * (7 if backward else 2) * share
    found = pallas_gpu.candidates(spec, Device.current())
    blocks = list(dict.fromkeys(replace(choice, schedule="") for choice in found))[:count]
    sizes = {_named(choice): choice for choice in found if replace(choice, schedule="") in blocks}
    candidates = {ORIGINAL: wrapped(partial(naive, mask)), MATMUL: _products(operations)}
    candidates |= {
        f"pallas_gpu {name}": wrapped(_of_implementation(pallas_gpu, spec, choice)) for name, choice in sizes.items()
    }
    others = {}
    if Device.current().platform == "gpu" and mask not in ("segments", FILLED_SEGMENTS):
        candidates["cudnn"] = wrapped(partial(_cudnn, mask))
        if cudnn.reduced(spec) is not None:
            (choice,) = cudnn.candidates(spec, Device.current())
            candidates[_CUDNN] = wrapped(_of_implementation(cudnn, spec, choice))
            others[_CUDNN] = Peer(table_key(spec, "cudnn", direction), choice)
    if importlib.util.find_spec("tokamax") is not None and mask in ("full", "causal"):
        candidates["tokamax"] = wrapped(partial(_tokamax, mask))
    if Device.current().platform == "gpu" and mask in ("full", "causal") and not backward:
        candidates["jax_mgpu"] = partial(peers.attention, causal=mask == "causal")
    headline = b, t, n, d, mask, backward
    arguments = partial(operands, b, t, n, n, d, mask, "bfloat16", backward)
    given = jax.eval_shape(arguments)
    results = jax.eval_shape(candidates[ORIGINAL], *given)
    return Timed(
        name=f"B{b} T{t} N{n} D{d} {mask}",
        dtype="bfloat16",
        direction=direction,
        candidates=candidates,
        block_sizes={f"pallas_gpu {name}": choice for name, choice in sizes.items()},
        arguments=arguments,
        operations=operations,
        key=table_key(spec, IMPLEMENTATION, direction),
        bytes_moved=float(array_bytes(*given, *jax.tree.leaves(results))),
        expansion=1 / share,  # of the original's T x T numbers in memory nothing is counted
        priority=_PLACES[_HEADLINES.index(headline)] if headline in _HEADLINES else 100,
        peers=others,
    )


def _of_implementation(own: Kernel, spec: AttentionSpec, sizes: BlockSizes) -> Callable[..., Any]:
    """An implementation with these sizes, differentiable, from and to [B, T, N, D]."""

    def canonical(arguments: Any) -> Operands:
        query, key, value, *rest = arguments
        q, k, v = (jnp.moveaxis(x, 1, 2) for x in (query, key, value))
        sides = [x[:, :, None] for x in rest] if len(spec.sides) == 1 else []
        if len(spec.sides) == 2:
            sides = [rest[0][:, None, None, :, None], rest[0][:, None, None, None, :]]
        return Operands(q[:, :, None], k, v, tuple(sides))

    @jax.custom_vjp
    def attend(given: Operands) -> Any:
        return own.forward(spec, sizes, given).out

    def forwards(given: Operands) -> Any:
        found = own.forward(spec, sizes, given)
        return found.out, (given, found.residuals)

    def backwards(saved: tuple[Operands, Residuals], dout: Any) -> Any:
        return (Operands(*own.backward(spec, sizes, *saved, Cotangents(dout))),)

    attend.defvjp(forwards, backwards)
    return lambda *arguments: jnp.moveaxis(attend(canonical(arguments))[:, :, 0], 1, 2)


def _products(operations: float) -> Callable[..., Any]:
    """A chain of plain products of as many operations, up to a few percent: the ceiling."""

    def run(query: Any, key: Any, *_: Any) -> Any:
        width = min(4096, 1 << (int(np.sqrt(key.size)).bit_length() - 1))
        left = query.reshape(-1)[: query.size // width * width].reshape(-1, width)
        right = key.reshape(-1)[: width * width].reshape(width, width) * key.dtype.type(1 / np.sqrt(width))
        rows = max(1, round(operations / (2 * width * width)))
        if rows <= len(left):
            return left[:rows] @ right
        return jax.lax.fori_loop(0, round(rows / len(left)), lambda _, x: x @ right, left)

    return run


def _cudnn(mask: str, query: Any, key: Any, value: Any, *rest: Any) -> Any:
    return jax.nn.dot_product_attention(
        query, key, value, rest[0] if rest else None, is_causal=mask != "full", implementation="cudnn"
    )


def _tokamax(mask: str, query: Any, key: Any, value: Any) -> Any:
    import tokamax

    return tokamax.dot_product_attention(query, key, value, is_causal=mask == "causal")
