"""Grouped matmul on a GPU: what is checked, repeated and timed.

Letters: M rows, K inner size, N columns, G groups.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import autopallas
from autopallas.kernels.grouped_matmul import pallas_gpu, xla
from autopallas.kernels.grouped_matmul.api import apply, grouped_matmul
from autopallas.kernels.grouped_matmul.block_sizes import STORED, BlockSizes
from autopallas.kernels.grouped_matmul.operands import Operands
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec
from autopallas.kernels.grouped_matmul.tuned_block_sizes import STORED_WEIGHTS, table_key
from autopallas.sites.device import Device
from autopallas.sites.elementwise import Score, Side, traced
from autopallas.tuning.table import of_form
from benchmarks.gpu_benchmark import MATMUL, ORIGINAL, Check, Timed
from benchmarks.gpu_session import peers

IMPLEMENTATION = "pallas_gpu"

_SHAPES = (
    (8192, 4096, 4096, 8), (4096, 2048, 1408, 64), (1000, 256, 512, 7), (513, 200, 136, 5), (77, 72, 40, 3),
    (1001, 701, 903, 6), (64, 64, 64, 1), (1, 5, 3, 4),
)  # fmt: skip
_SMALL = ((70, 72, 40, 3),)
_TIMED = (
    # (M, K, N, G, candidates): the first two are what the kernel is for.
    (8192, 4096, 4096, 8, 3),
    (32768, 2048, 1408, 64, 3),
    (16384, 2048, 2048, 16, 2),
    (512, 4096, 4096, 8, 2),
    (128, 4096, 4096, 8, 2),
    (8192, 2048, 2048, 32, 1),
    (4096, 4096, 4096, 4, 1),
    (2048, 4096, 4096, 2, 1),
    (1024, 2048, 1408, 64, 1),
    (512, 2048, 2048, 32, 1),
)
_SMALL_TIMED = ((70, 64, 64, 3, 1),)
_STORED_TIMED = ((128, 4096, 4096, 8), (512, 4096, 4096, 8), (8192, 4096, 4096, 8))
"""Weights of 8 bits: the fewer rows a group has, the more of the time is that of its weights."""


def patterns(rows: int, groups: int) -> dict[str, np.ndarray[Any, Any]]:
    """Group sizes by what they are."""
    random = np.random.default_rng(rows + groups)
    uneven = random.multinomial(rows, random.dirichlet(np.full(groups, 1.0)))
    holes = uneven * (np.arange(groups) % 2)
    return {
        "uneven": uneven,
        "even": np.full(groups, rows // groups) + (np.arange(groups) < rows % groups),
        "empty groups, rows past the sum": holes,
        "none": np.zeros(groups, int),
        "one has all": np.where(np.arange(groups) == groups // 2, rows, 0),
        "overlapping": np.where(np.arange(groups) % 2 == 0, rows // 2, -(rows // 4)),
    }


def operands(rows: int, k: int, n: int, groups: int, sizes: Any, dtype: str, cotangent: bool) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(rows + k + n), 3)
    shapes = ((rows, k), (groups, k, n), (rows, n))
    arrays = [jax.random.normal(key, shape, jnp.dtype(dtype)) for key, shape in zip(keys, shapes, strict=True)]
    return arrays[0], arrays[1], jnp.asarray(sizes, jnp.int32), *([arrays[2]] if cotangent else [])


def both(function: Callable[..., Any]) -> Callable[..., Any]:
    """The result and the gradients for lhs and rhs from a cotangent."""

    def run(lhs: Any, rhs: Any, sizes: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(lambda a, b: function(a, b, sizes), lhs, rhs)
        return out, *pull(cotangent)

    return run


def exact(lhs: Any, rhs: Any, sizes: Any, *cotangent: Any) -> Any:
    """In float32 at the highest precision, group by group."""
    f32 = np.dtype(np.float32)
    spec = GroupedMatmulSpec("forward", 1, *lhs.shape[:1], *rhs.shape, f32, f32, f32, "HIGHEST")
    given = [x.astype(f32)[None] for x in (lhs, rhs, *cotangent)]
    block = BlockSizes(256).fitted(spec)
    own = Operands(given[0], given[1], sizes[None])
    out = xla.forward(spec, block, own)[0]
    if not cotangent:
        return out
    gradients = xla.backward(spec, block, own, given[2])
    return out, *(x[0] for x in gradients if x is not None)


def _check(rows: int, k: int, n: int, groups: int, pattern: str, dtype: str, small: bool) -> Check:
    sizes = patterns(rows, groups)[pattern]
    if small:  # the interpreter's callbacks have an order, which a replaced site cannot have
        function = both(partial(grouped_matmul, implementation=IMPLEMENTATION))
    else:
        function = autopallas.optimize(
            both(jax.lax.ragged_dot), implementation=IMPLEMENTATION, objective="always", autotune=False, strict=True
        )
    tolerance = {"bfloat16": 4e-2, "float16": 1e-2}[dtype]
    given = partial(operands, rows, k, n, groups, sizes, dtype, True)
    return Check(f"M{rows} K{k} N{n} G{groups} {pattern}", dtype, "forward+backward", function, exact, given, tolerance)


def scaled(lhs: Any, rhs: Any, sizes: Any, scales: Any) -> Any:
    """Weights of 8 bits with a scale for each column of a group, as programs multiply them."""
    return jax.lax.ragged_dot(lhs, (rhs.astype(jnp.float32) * scales).astype(lhs.dtype), sizes)


def stored_operands(rows: int, k: int, n: int, groups: int, sizes: Any, stored: str) -> tuple[Any, ...]:
    """The operands of :func:`scaled`."""
    lhs, rhs, given = operands(rows, k, n, groups, sizes, "bfloat16", False)
    scales = jax.random.uniform(jax.random.key(k), (groups, 1, n), jnp.float32, 0.5, 2.0)
    return lhs, rhs.astype(jnp.dtype(stored)), given, scales


def _stored_spec(rows: int, k: int, n: int, groups: int, stored: str) -> GroupedMatmulSpec:
    bf16, f32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
    score, side = Score(np.dtype(jnp.dtype(stored))), Side(0, f32)
    program = traced(lambda weight, scale: (weight.astype(f32) * scale).astype(bf16), score, side)
    over = ((groups, 1, n),)
    return GroupedMatmulSpec("forward", 1, rows, groups, k, n, bf16, bf16, bf16, widening=program, scales=over)


def _of_stored(spec: GroupedMatmulSpec, choice: BlockSizes, lhs: Any, rhs: Any, given: Any, scales: Any) -> Any:
    return pallas_gpu.forward(spec, choice, Operands(lhs[None], rhs[None], given[None], (scales[None],)))[0]


def _exact_of_stored(lhs: Any, rhs: Any, sizes: Any, scales: Any) -> Any:
    return exact(lhs, (rhs.astype(jnp.float32) * scales).astype(jnp.bfloat16), sizes)


def _stored_checks(small: bool, shapes: Any, kinds: tuple[str, ...] = ("uneven",)) -> Iterator[Check]:
    """Weights of 8 bits, widened in shared memory, by tiles of both heights."""
    for (rows, k, n, groups), kind, stored in itertools.product(shapes, kinds, ("float8_e4m3fn", "float8_e5m2")):
        spec, sizes = _stored_spec(rows, k, n, groups, stored), patterns(rows, groups)[kind]
        for block in (64,) if small else (64, 128):
            yield Check(
                f"M{rows} K{k} N{n} G{groups} {kind}, stored {stored}, {block} rows",
                "bfloat16",
                "forward",
                partial(_of_stored, spec, BlockSizes(block, weights=STORED)),
                _exact_of_stored,
                partial(stored_operands, rows, k, n, groups, sizes, stored),
                4e-2,
            )


def smoke(small: bool) -> Iterator[Check]:
    """The product and both gradients, with tails of every axis."""
    yield _check(*(_SMALL[0] if small else (513, 200, 136, 5)), "uneven", "bfloat16", small)
    yield next(_stored_checks(small, _SMALL if small else ((513, 200, 136, 5),)))


def checks(small: bool) -> Iterator[Check]:
    """The grid: every shape, every kind of group sizes at the small ones, both dtypes."""
    for shape in _SMALL if small else _SHAPES:
        kinds = ["uneven"] if small or shape[0] > 1001 else list(patterns(*shape[:1], shape[3]))
        for number, kind in enumerate(kinds):
            dtypes = ("bfloat16", "float16") if number == 0 and not small else ("bfloat16",)
            for dtype in dtypes:
                yield _check(*shape, kind, dtype, small)
    kinds = ("uneven",) if small else tuple(patterns(1, 1))
    yield from _stored_checks(small, _SMALL if small else _SHAPES[3:5], kinds)
    yield from () if small else _stored_checks(small, (_SHAPES[0], _SHAPES[1], _SHAPES[5], _SHAPES[7]))


def stressed(small: bool) -> Iterator[Check]:
    """Many groups that share tiles, large tiles in a row, and NaN in the rows of one group beside others'."""
    for shape in _SMALL if small else ((4096, 1024, 1408, 61), (8192, 4096, 4096, 8)):
        yield _check(*shape, "uneven", "bfloat16", small)
    if not small:
        check = _check(2048, 512, 512, 13, "uneven", "bfloat16", False)
        yield replace(check, name=f"{check.name}, NaN in group 5", arguments=partial(_with_nan, check.arguments, 5))
    yield from _stored_checks(small, _SMALL if small else ((4096, 1024, 1408, 61),))


def _with_nan(arguments: Callable[[], tuple[Any, ...]], group: int) -> tuple[Any, ...]:
    lhs, rhs, sizes, cotangent = arguments()
    ends = jnp.cumsum(sizes)
    row = jnp.arange(len(lhs))
    inside = (row >= ends[group] - sizes[group]) & (row < ends[group])
    return jnp.where(inside[:, None], jnp.nan, lhs), rhs, sizes, cotangent


def timed(small: bool) -> Iterator[Timed]:
    """The grid of the table, forward and with gradients."""
    for rows, k, n, groups, count in _SMALL_TIMED if small else _TIMED:
        for backward in (False,) if small else (False, True):
            yield _timed(rows, k, n, groups, count, backward)
    for shape in ((70, 64, 64, 3),) if small else _STORED_TIMED:
        yield _stored(*shape)
    for number, (rows, k, n, groups, _) in enumerate(() if small else _TIMED[:2]):
        yield from (_product(rows, k, n, groups, use, 5 + 3 * number + u) for u, use in enumerate(("dlhs", "drhs")))


def _stored(rows: int, k: int, n: int, groups: int) -> Timed:
    """Weights of 8 bits, which XLA widens before the product, or the kernel while it multiplies."""
    spec = _stored_spec(rows, k, n, groups, "float8_e4m3fn")
    found = pallas_gpu.candidates(spec, Device.current())
    chosen = [found[0], *(choice for choice in found if choice.weights == STORED)]
    sizes = {f"pallas_gpu {tuple(c.to_dict().values())}": c for c in chosen}

    def dense(lhs: Any, rhs: Any, given: Any, scales: Any) -> Any:
        return lhs @ (rhs[0].astype(jnp.float32) * scales[0]).astype(lhs.dtype)

    candidates = {ORIGINAL: scaled, MATMUL: dense}
    candidates |= {name: partial(_of_stored, spec, choice) for name, choice in sizes.items()}
    return Timed(
        name=f"M{rows} K{k} N{n} G{groups}, weights stored in float8_e4m3fn",
        dtype="bfloat16",
        direction="forward",
        candidates=candidates,
        block_sizes=sizes,
        arguments=partial(stored_operands, rows, k, n, groups, patterns(rows, groups)["uneven"], "float8_e4m3fn"),
        operations=2.0 * rows * k * n,
        key=of_form(table_key(spec, IMPLEMENTATION, "forward"), STORED_WEIGHTS),
        bytes_moved=2.0 * rows * (k + n) + groups * k * n,
        expansion=groups,
    )


def _product(rows: int, k: int, n: int, groups: int, use: Literal["dlhs", "drhs"], priority: int) -> Timed:
    """One gradient alone, which no table has a row for."""
    bf16 = np.dtype(jnp.bfloat16)
    spec = GroupedMatmulSpec(use, 1, rows, groups, k, n, bf16, bf16, bf16)
    sizes = {f"pallas_gpu {tuple(c.to_dict().values())}": c for c in pallas_gpu.candidates(spec, Device.current())[:2]}

    def ours(choice: BlockSizes, first: Any, second: Any, given: Any) -> Any:
        return pallas_gpu.forward(spec, choice, Operands(first[None], second[None], given[None]))[0]

    def transposed(first: Any, second: Any, given: Any) -> Any:
        if use == "dlhs":
            lhs = jax.ShapeDtypeStruct((rows, k), bf16)
            return jax.linear_transpose(lambda x: jax.lax.ragged_dot(x, second, given), lhs)(first)[0]
        rhs = jax.ShapeDtypeStruct((groups, k, n), bf16)
        return jax.linear_transpose(lambda x: jax.lax.ragged_dot(first, x, given), rhs)(second)[0]

    def dense(first: Any, second: Any, given: Any) -> Any:
        return first @ second[0].T if use == "dlhs" else first.T @ second

    def arguments() -> tuple[Any, ...]:
        lhs, rhs, given, dout = operands(rows, k, n, groups, patterns(rows, groups)["uneven"], "bfloat16", True)
        return (dout, rhs, given) if use == "dlhs" else (lhs, dout, given)

    candidates = {ORIGINAL: transposed, MATMUL: dense}
    candidates |= {name: partial(ours, choice) for name, choice in sizes.items()}
    if Device.current().platform == "gpu":
        candidates["jax_mgpu"] = (
            partial(peers.ragged_dot, transposed=True) if use == "dlhs" else peers.transposed_ragged_dot
        )
    return Timed(
        name=f"M{rows} K{k} N{n} G{groups}",
        dtype="bfloat16",
        direction=use,
        candidates=candidates,
        block_sizes=sizes,
        arguments=arguments,
        operations=2.0 * rows * k * n,
        key=None,
        bytes_moved=2.0 * (rows * k + groups * k * n + rows * n),
        expansion=groups,
        priority=priority,
    )


def _timed(rows: int, k: int, n: int, groups: int, count: int, backward: bool) -> Timed:
    bf16 = np.dtype(jnp.bfloat16)
    spec = GroupedMatmulSpec("forward", 1, rows, groups, k, n, bf16, bf16, bf16)
    direction = "forward+backward" if backward else "forward"
    wrapped: Callable[..., Any] = both if backward else lambda function: function
    sizes = {str(tuple(c.to_dict().values())): c for c in pallas_gpu.candidates(spec, Device.current())[:count]}

    def ours(choice: BlockSizes, lhs: Any, rhs: Any, given: Any) -> Any:
        return apply(IMPLEMENTATION, spec, (choice, choice), lhs[None], rhs[None], given[None])[0]

    def dense(lhs: Any, rhs: Any, given: Any) -> Any:
        return lhs @ rhs[0]

    candidates = {ORIGINAL: wrapped(jax.lax.ragged_dot), MATMUL: wrapped(dense)}
    candidates |= {f"pallas_gpu {name}": wrapped(partial(ours, choice)) for name, choice in sizes.items()}
    if importlib.util.find_spec("tokamax") is not None:
        candidates["tokamax"] = wrapped(_tokamax)
    if Device.current().platform == "gpu" and not backward:
        candidates["jax_mgpu"] = peers.ragged_dot
        if n % 256 == 0:
            candidates["jax_mgpu matmul"] = lambda lhs, rhs, given: peers.matmul(lhs, rhs[0])
    products = 3 if backward else 1
    headlines = [case[:4] for case in _TIMED[:2]]
    shape = rows, k, n, groups
    return Timed(
        name=f"M{rows} K{k} N{n} G{groups}",
        dtype="bfloat16",
        direction=direction,
        candidates=candidates,
        block_sizes={f"pallas_gpu {name}": choice for name, choice in sizes.items()},
        arguments=partial(operands, rows, k, n, groups, patterns(rows, groups)["uneven"], "bfloat16", backward),
        operations=2.0 * rows * k * n * products,
        key=table_key(spec, IMPLEMENTATION, direction),
        bytes_moved=2.0 * products * (rows * k + groups * k * n + rows * n),
        expansion=groups,
        priority=4 + 3 * headlines.index(shape) if shape in headlines and not backward else 100,
    )


def _tokamax(lhs: Any, rhs: Any, sizes: Any) -> Any:
    import tokamax

    return tokamax.ragged_dot(lhs, rhs, sizes)
