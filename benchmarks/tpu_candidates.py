"""What ``python -m benchmarks.tpu_schedule`` compares: the TPU kernels, JAX's own, and plain matmuls of the same work.

Data that is known at run time only reads as zero in a simulation.  So tables that a kernel's control flow follows are
replaced by arithmetic in ours, or by what makes every step of the grid a full one.  MegaBlox' number of tiles is made
fixed; its tables still read as zero, that is, its blocks are fetched once only: its cycles are a lower bound.
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

from autopallas.kernels.attention import pallas_tpu as attention
from autopallas.kernels.attention.block_sizes import BlockSizes as AttentionBlocks
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.cross_entropy import pallas_tpu as cross_entropy
from autopallas.kernels.cross_entropy.block_sizes import BlockSizes as LossBlocks
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, Product, SideSpec, Statistic
from autopallas.kernels.grouped_matmul import pallas_tpu as grouped_matmul
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec, Use
from autopallas.kernels.programs import traced
from autopallas.program import Index, Score, Side

__all__ = ["Candidate", "attentions", "grouped", "losses", "matmul"]

BF16, F32, I32 = np.dtype(jnp.bfloat16), np.dtype(np.float32), np.dtype(np.int32)
ATTENTION_BLOCKS = ((512, 1024), (1024, 1024), (512, 2048), (1024, 2048))
TILES = ((512, 4096, 1024), (1024, 1024, 1024), (512, 1024, 1024))
MEGABLOX_TILES = (*TILES, (512, 2048, 512), (512, 512, 512))
"""Some of them within the vector memory that it gets unasked."""
LOSS_BLOCKS = ((2048, 2048), (1024, 1024))


class Candidate(NamedTuple):
    """One way to compute something.

    Attributes:
      kernel, shape, direction: what is computed.
      name: by whom.
      block_sizes: or () where there are none to choose.
      function, arguments: the program.
      work: multiplications with additions, by a part of the names of the kernels that do them; "" is part of all, and
        where there are no kernels, all operations count.
      bound: whether the simulation gives a lower bound only.
    """

    kernel: str
    shape: str
    direction: str
    name: str
    block_sizes: tuple[int, ...]
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    work: dict[str, int]
    bound: bool = False


def array(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def matmul(kernel: str, shape: str, direction: str, rows: int, inner: int, columns: int) -> Candidate:
    """XLA's own, of as many operations as something else has."""
    arguments = (array(rows, inner), array(inner, columns))
    return Candidate(kernel, shape, direction, "matmul", (), jnp.matmul, arguments, {"": rows * inner * columns})


# ---------------------------------------------------------------------- attention


def attentions(heads: int, length: int, size: int) -> Iterator[Candidate]:
    """Without a mask, whose tables would not be known."""
    shape = f"B1 T{length} N{heads} D{size}"
    q = array(1, heads, length, size)
    rows, ours_q = array(1, heads, 1, length, dtype=F32), array(1, heads, 1, length, size)
    work = 2 * heads * length**2 * size
    score = traced(lambda s: s * np.float32(size**-0.5), Score(F32))
    spec = AttentionSpec(1, heads, 1, length, length, size, size, BF16, BF16, BF16, F32, BF16, score)
    for pair in ATTENTION_BLOCKS:
        if max(pair) > length:
            continue
        sizes = AttentionBlocks(*pair)

        def forward(q: Any, k: Any, v: Any, sizes: Any = sizes) -> Any:
            return attention.forward(spec, sizes, q, k, v)[0]

        def backward(q: Any, k: Any, v: Any, out: Any, rows: Any, dout: Any, sizes: Any = sizes) -> Any:
            return attention.backward(spec, sizes, q, k, v, (), None, out, rows, dout)[:3]

        # The branch for rows of a huge logsumexp, "statistics", is not taken.
        yield Candidate("attention", shape, "forward", "ours", pair, forward, (ours_q, q, q), {"": work})
        arguments = (ours_q, q, q, ours_q, rows, ours_q)
        both = {"backward": 5 * work // 2}
        yield Candidate("attention", shape, "backward", "ours", pair, backward, arguments, both)
        for name, theirs, part in (
            ("flash_attention", _flash(pair, size), "bwd"),
            ("splash_attention", _splash(pair, heads, length), "_d"),
        ):
            both = {part: 5 * work // 2}
            gradients = jax.grad(lambda *x, f=theirs: f(*x).astype(F32).sum(), (0, 1, 2))
            yield Candidate("attention", shape, "forward", name, pair, theirs, (q, q, q), {"": work})
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


def _splash(pair: tuple[int, int], heads: int, length: int) -> Callable[..., Any]:
    """Its queries come scaled.  Without tables every tile is a full one."""
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
        kernel = splash.make_splash_mha_single_device(mask=mask, block_sizes=sizes)
        for name in ("fwd_mask_info", "dq_mask_info", "dkv_mask_info"):
            info = getattr(kernel, name)
            setattr(kernel, name, info._replace(data_next=None, mask_next=None, block_mask=None))
        return kernel(q[0], k[0], v[0])

    return run


# ---------------------------------------------------------------------- grouped matmul


def grouped(use: Use, rows: int, k: int, n: int, groups: int) -> Iterator[Candidate]:
    """Ours, and MegaBlox, with groups of equal sizes."""
    shape, work = f"M{rows} K{k} N{n} G{groups}", {"": rows * k * n}
    spec = GroupedMatmulSpec(use, 1, rows, groups, k, n, BF16, BF16, BF16)
    first, second = array(*spec.first_shape()), array(*spec.second_shape())
    for blocks in TILES:
        tile = grouped_matmul.Tile(*blocks)
        visits, each = rows // tile.rows, rows // groups // tile.rows

        def at(tables: Any, v: Any, each: int = each, tile: Any = tile) -> tuple[Any, ...]:
            nth, zero = lax.rem(v, jnp.int32(each)), jnp.int32(0)
            edges = [(nth == i).astype(jnp.int32) for i in (0, each - 1)]
            ends = edges if use == "drhs" else [jnp.int32(1)]
            return v, lax.div(v, jnp.int32(each)), zero, jnp.int32(tile.rows), *ends

        call = grouped_matmul.weights_call if use == "drhs" else grouped_matmul.rows_call
        tables = (array(visits, dtype=I32),) * (6 if use == "drhs" else 5)

        def ours(*operands: Any, call: Any = call, tile: Any = tile, visits: int = visits, at: Any = at) -> Any:
            return call(spec, tile, rows, groups, visits, at)(*operands)

        given = (*tables, first, second)
        yield Candidate("grouped_matmul", shape, use, "ours", blocks, ours, given, work)
    for blocks in MEGABLOX_TILES:
        theirs = _megablox(use, rows, groups, blocks)
        yield Candidate("grouped_matmul", shape, use, "megablox", blocks, theirs, (first, second), work, True)
    yield matmul("grouped_matmul", shape, use, *((k, rows, n) if use == "drhs" else (rows, k, n)))


def _megablox(use: Use, rows: int, groups: int, blocks: tuple[int, ...]) -> Callable[..., Any]:
    module = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    visits, each = rows // blocks[0], rows // groups
    tiles = jnp.arange(visits, dtype=I32)
    metadata = jnp.arange(groups + 1, dtype=I32) * each, tiles * blocks[0] // each, tiles

    def run(a: Any, b: Any) -> Any:
        sizes = jnp.full((groups,), each, I32)
        with mock.patch.object(module, "make_group_metadata", return_value=(metadata, visits)):
            if use == "drhs":
                return module.tgmm.__wrapped__(a.T, b, sizes, BF16, blocks)
            return module.gmm.__wrapped__(a, b, sizes, BF16, blocks, transpose_rhs=use == "dlhs")

    return run


# ---------------------------------------------------------------------- cross-entropy


def losses(rows: int, hidden: int, vocabulary: int) -> Iterator[Candidate]:
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
    for blocks in LOSS_BLOCKS:
        sizes = LossBlocks(*blocks)

        def ours(x: Any, w: Any, labels: Any, sizes: LossBlocks = sizes) -> Any:
            return cross_entropy.forward(spec, sizes, x, w, (labels,))

        kernels = {"statistics": work, "rows": 2 * work, "columns": 2 * work}
        yield Candidate("cross_entropy", shape, "forward+backward", "ours", blocks, ours, arguments, kernels)
    yield matmul("cross_entropy", shape, "forward+backward", rows, hidden, vocabulary)
