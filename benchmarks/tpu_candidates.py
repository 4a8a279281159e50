"""What ``python -m benchmarks.tpu_schedule`` compares: the TPU kernels, JAX's own, and plain matmuls of the same work.

Data that is known at run time only reads as zero in a simulation.  So the tables that a kernel follows are replaced by
arithmetic (:mod:`autopallas.kernels.tpu_schedule_tracing`), in MegaBlox too, or by what makes every step of the grid a
full one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autopallas.autotune.trial import Trial
from autopallas.kernels.attention import pallas_tpu as attention
from autopallas.kernels.attention.block_sizes import BlockSizes as AttentionBlocks
from autopallas.kernels.attention.operands import Cotangents, Residuals
from autopallas.kernels.attention.operands import Operands as AttentionOperands
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.cross_entropy import pallas_tpu as cross_entropy
from autopallas.kernels.cross_entropy.block_sizes import BlockSizes as LossBlocks
from autopallas.kernels.cross_entropy.operands import Operands as LossOperands
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, Product, SideSpec, Statistic
from autopallas.kernels.grouped_matmul import pallas_tpu as grouped_matmul
from autopallas.kernels.grouped_matmul.block_sizes import BlockSizes as GroupedBlocks
from autopallas.kernels.grouped_matmul.operands import Operands as GroupedOperands
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec, Use
from autopallas.kernels.recurrence.block_sizes import BlockSizes as RecurrenceBlocks
from autopallas.kernels.tpu import generation
from autopallas.kernels.tpu_schedule_tracing import Table, limit_of
from autopallas.sites.device import Device
from autopallas.sites.elementwise import Index, Score, Side, traced
from autopallas.workbench.cases import DIRECTIONS, Case, match_of

__all__ = ["Candidate", "attentions", "grouped", "losses", "matmul", "recurrences"]

BF16, F32, I32 = np.dtype(jnp.bfloat16), np.dtype(np.float32), np.dtype(np.int32)
ATTENTION_BLOCKS = ((1024, 2048), (512, 2048), (512, 1024), (1024, 1024))
TILES = ((1024, 1024, 1024), (512, 4096, 1024), (512, 1024, 1024))
LOSS_BLOCKS = ((2048, 2048), (1024, 1024))
_BEST = {"attention": 2, "grouped_matmul": 2, "cross_entropy": 1}
"""How many of these, the first ones, have ever been the best of anyone's, or within 2% of it."""


class Candidate(NamedTuple):
    """One way to compute something.

    Attributes:
      kernel, shape, direction: what is computed.
      name: by whom.
      block_sizes: or () where there are none to choose.
      function, arguments: the program.
      work: multiplications with additions, by a part of the names of the kernels that do them; "" is part of all, and
        where there are no kernels, all operations count, as with "*" they do anyway.
    """

    kernel: str
    shape: str
    direction: str
    name: str
    block_sizes: tuple[int, ...]
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    work: dict[str, int]


def array(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def matmul(kernel: str, shape: str, direction: str, rows: int, inner: int, columns: int) -> Candidate:
    """XLA's own, of as many operations as something else has."""
    arguments = (array(rows, inner), array(inner, columns))
    return Candidate(kernel, shape, direction, "matmul", (), jnp.matmul, arguments, {"": rows * inner * columns})


# ---------------------------------------------------------------------- attention


def attentions(heads: int, length: int, size: int, full: bool = False) -> Iterator[Candidate]:
    """Without a mask, whose tables would not be known."""
    shape = f"B1 T{length} N{heads} D{size}"
    q = array(1, heads, length, size)
    rows, ours_q = array(1, heads, 1, length, dtype=F32), array(1, heads, 1, length, size)
    work = 2 * heads * length**2 * size
    score = traced(lambda s: s * np.float32(size**-0.5), Score(F32))
    extents = 1, heads, 1, length, length, size, size
    spec = AttentionSpec(*extents, BF16, BF16, BF16, F32, BF16, score, weights_dtype=BF16)
    for pair in ATTENTION_BLOCKS[: None if full else _BEST["attention"]]:
        sizes = AttentionBlocks(*pair)

        def forward(q: Any, k: Any, v: Any, sizes: Any = sizes) -> Any:
            return attention.forward(spec, sizes, AttentionOperands(q, k, v)).out

        def backward(q: Any, k: Any, v: Any, out: Any, rows: Any, dout: Any, sizes: Any = sizes) -> Any:
            saved = Residuals(out, rows)
            return attention.backward(spec, sizes, AttentionOperands(q, k, v), saved, Cotangents(dout))[:3]

        # The branch for rows of a huge logsumexp, "statistics", is not taken.
        yield Candidate("attention", shape, "forward", "ours", pair, forward, (ours_q, q, q), {"": work})
        arguments = (ours_q, q, q, ours_q, rows, ours_q)
        both = {"backward": 5 * work // 2}
        yield Candidate("attention", shape, "backward", "ours", pair, backward, arguments, both)
        for name, theirs, part in (
            ("flash_attention", _flash(pair, size), "bwd"),
            ("splash_attention", _splash(pair, heads, length, False), "_d"),
        ):
            both = {part: 5 * work // 2}
            gradients = jax.grad(lambda *x, f=theirs: f(*x).astype(F32).sum(), (0, 1, 2))
            run = theirs
            if name == "splash_attention":
                run, gradients = map(_without_metadata, (_splash(pair, heads, length, True), gradients))
            yield Candidate("attention", shape, "forward", name, pair, run, (q, q, q), {"": work})
            yield Candidate("attention", shape, "backward", name, pair, gradients, (q, q, q), both)
    yield matmul("attention", shape, "forward", length, 4 * heads * size, length // 2)


def _flash(pair: tuple[int, int], size: int) -> Callable[..., Any]:
    flash = importlib.import_module("jax.experimental.pallas.ops.tpu.flash_attention")
    queries, keys = pair
    sizes = flash.BlockSizes(
        block_q=queries, block_k_major=keys, block_k=keys, block_b=1, block_q_major_dkv=queries,
        block_k_major_dkv=keys, block_k_dkv=keys, block_q_dkv=queries, block_k_major_dq=keys, block_k_dq=keys,
        block_q_dq=queries,
    )  # fmt: skip
    return lambda q, k, v: flash.flash_attention(q, k, v, sm_scale=size**-0.5, block_sizes=sizes)


def _splash(pair: tuple[int, int], heads: int, length: int, residuals: bool) -> Callable[..., Any]:
    """Its queries come scaled.  Without tables every tile is a full one.  With ``residuals`` it also writes the
    logsumexp, as ours does."""
    package = "jax.experimental.pallas.ops.tpu.splash_attention"
    splash = importlib.import_module(f"{package}.splash_attention_kernel")
    masks = importlib.import_module(f"{package}.splash_attention_mask")
    queries, keys = pair
    sizes = splash.BlockSizes(
        block_q=queries, block_kv=keys, block_kv_compute=keys, block_q_dkv=queries, block_kv_dkv=keys,
        block_kv_dkv_compute=keys, block_q_dq=queries, block_kv_dq=keys,
    )  # fmt: skip
    mask = masks.MultiHeadMask([masks.FullMask((length, length))] * heads)

    def run(q: Any, k: Any, v: Any) -> Any:
        kernel = splash.make_splash_mha_single_device(mask=mask, block_sizes=sizes, save_residuals=residuals)
        for name in ("fwd_mask_info", "dq_mask_info", "dkv_mask_info"):
            info = getattr(kernel, name)
            setattr(kernel, name, info._replace(data_next=None, mask_next=None, block_mask=None))
        return kernel(q[0], k[0], v[0])

    return run


def _without_metadata(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same without splash attention's notes beside its kernels, because of which the compiler tells no cycles."""
    splash = importlib.import_module("jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel")

    def pallas_call(*arguments: Any, metadata: Any = None, **named: Any) -> Any:
        return pl.pallas_call(*arguments, **named)

    def run(*arguments: Any) -> Any:
        with mock.patch.object(splash, "pl", _With(pl, pallas_call=pallas_call)):
            return function(*arguments)

    return run


# ---------------------------------------------------------------------- grouped matmul


def grouped(use: Use, rows: int, k: int, n: int, groups: int, full: bool = False) -> Iterator[Candidate]:
    """Ours, and MegaBlox, with groups of equal sizes."""
    shape, work = f"M{rows} K{k} N{n} G{groups}", {"": rows * k * n}
    spec = GroupedMatmulSpec(use, 1, rows, groups, k, n, BF16, BF16, BF16)
    first, second = array(*spec.first_shape()), array(*spec.second_shape())
    budget = generation(Device.current()).budget
    for blocks in TILES[: None if full else _BEST["grouped_matmul"]]:
        sizes = GroupedBlocks(*blocks)
        tile = tuple(grouped_matmul.Tile.of(spec, sizes, rows, budget))

        def ours(first: Any, second: Any, counts: Any, sizes: Any = sizes) -> Any:
            return grouped_matmul.forward(spec, sizes, GroupedOperands(first[None], second[None], counts))

        given = (first, second, array(1, groups, dtype=I32))
        yield Candidate("grouped_matmul", shape, use, "ours", tile, ours, given, work)
        theirs = _megablox(spec, blocks)
        yield Candidate("grouped_matmul", shape, use, "megablox", blocks, theirs, (first, second), work)
    yield matmul("grouped_matmul", shape, use, *((k, rows, n) if use == "drhs" else (rows, k, n)))


def _megablox(spec: GroupedMatmulSpec, blocks: tuple[int, ...]) -> Callable[..., Any]:
    """With arithmetic in the place of its tables, without a branch that is never taken (which the simulation does not
    take on v5e), and as much vector memory as ours asks for."""
    use, rows, groups = spec.use, spec.rows, spec.groups
    module = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    visits, each = rows // blocks[0], rows // groups
    tiles = np.arange(visits, dtype=I32)
    metadata = np.arange(groups + 1, dtype=I32) * each, tiles * blocks[0] // each, tiles
    tables = tuple(map(Table, metadata))

    def block(shape: Any, index_map: Callable[..., Any]) -> Any:
        return pl.BlockSpec(shape, lambda *ids: index_map(*ids, tables, (0,)))

    def grid_spec(num_scalar_prefetch: int, **named: Any) -> Any:
        return pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=0, **named)

    def pallas_call(kernel: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        call = pl.pallas_call(lambda *refs: kernel(tables, (0,), *refs), *arguments, **named)
        return lambda given, offset, *operands: call(*operands)

    def cond(condition: Any, last: Callable[[], Any], other: Callable[[], Any]) -> Any:
        return last() if one_step else lax.cond(condition, last, other)

    one_step = blocks[1] == (spec.columns if use == "dlhs" else spec.contracting)
    asked = generation(Device.current()).limit
    pallas = _With(pl, BlockSpec=block, pallas_call=pallas_call)

    def parameters(**named: Any) -> Any:
        return pltpu.CompilerParams(vmem_limit_bytes=limit_of(asked), **named)

    mosaic = _With(pltpu, CompilerParams=parameters, PrefetchScalarGridSpec=grid_spec)

    def run(a: Any, b: Any) -> Any:
        sizes = jnp.full((groups,), each, I32)
        known = tuple(map(jnp.asarray, metadata)), visits
        replaced = {"pl": pallas, "pltpu": mosaic, "lax": _With(lax, cond=cond)}
        with mock.patch.multiple(module, make_group_metadata=lambda **_: known, **replaced):
            if use == "drhs":
                return module.tgmm.__wrapped__(a.T, b, sizes, BF16, blocks)
            return module.gmm.__wrapped__(a, b, sizes, BF16, blocks, transpose_rhs=use == "dlhs")

    return run


class _With:
    """A module with some of its names replaced."""

    def __init__(self, module: Any, **replaced: Any):
        self._module = module
        self.__dict__ |= replaced

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


# ---------------------------------------------------------------------- cross-entropy


def losses(rows: int, hidden: int, vocabulary: int, full: bool = False) -> Iterator[Candidate]:
    """The loss and its gradients, as of a train step; the kernels decide on their tiles."""
    shape, work = f"N{rows} D{hidden} V{vocabulary}", rows * hidden * vocabulary
    logits = traced(lambda z: z.astype(F32), Score(BF16))
    spec = CrossEntropySpec(
        rows, hidden, vocabulary, BF16, BF16, BF16, True,
        (Statistic("max", logits), Statistic("exp_sum", logits), Statistic("pick", logits, 0)),
        (SideSpec(I32, (True, False)),),
    )  # fmt: skip
    finish = traced(lambda m, s: m + jnp.log(s), Side(1, F32), Side(2, F32))
    gradient = traced(
        lambda z, key, label, total: (jnp.exp(z.astype(F32) - total) - (key == label)) * np.float32(1 / rows),
        Score(BF16), Index("key", I32), Side(0, I32), Side(1, F32),
    )  # fmt: skip
    spec = replace(
        spec, finish=(finish,), products=(Product("rows", gradient, BF16), Product("columns", gradient, BF16))
    )
    arguments = (array(rows, hidden), array(vocabulary, hidden), array(rows, 1, dtype=I32))
    for blocks in LOSS_BLOCKS[: None if full else _BEST["cross_entropy"]]:
        sizes = LossBlocks(*blocks)

        def ours(x: Any, w: Any, labels: Any, sizes: LossBlocks = sizes) -> Any:
            return cross_entropy.forward(spec, sizes, LossOperands(x, w, (labels,)))

        kernels = {"statistics": work, "rows": 2 * work, "columns": 2 * work}
        yield Candidate("cross_entropy", shape, "forward+backward", "ours", blocks, ours, arguments, kernels)
    yield matmul("cross_entropy", shape, "forward+backward", rows, hidden, vocabulary)


# ---------------------------------------------------------------------- recurrences


def recurrences(steps: int, heads: int, size: int, full: bool = False) -> Iterator[Candidate]:
    """Matrix states with one decay for each head, in float32: ours, the loop as it is written ("xla"), and, ``full``,
    chunks in plain JAX, whose simulation takes minutes.  All operations count, with what brings arrays into chunks."""
    shape = f"T{steps} B1 H{heads} N{size} P{size}"
    sizes = (("T", steps), ("B", 1), ("H", heads), ("N", size), ("P", size))
    for direction in DIRECTIONS:
        trial = Trial.abstract(match_of(Case("recurrence", direction, "float32", "scalar", sizes)))
        work = {"*": 2 * steps * heads * size * size * (1 if direction == "forward" else 3)}

        for chunk in (128, 64)[: None if full else 1]:
            blocks = RecurrenceBlocks("chunked", "chunked", chunk)
            for name, implementation in (("ours", "pallas_tpu"), ("chunks", "xla"))[: None if full else 1]:
                function = trial.kernel(implementation, blocks)
                yield Candidate("recurrence", shape, direction, name, (chunk,), function, trial.arguments, work)
        yield Candidate("recurrence", shape, direction, "xla", (), trial.original(), trial.arguments, work)
