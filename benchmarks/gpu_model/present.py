"""Compiles the kernels as they are, and says what the model makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import jax

from autopallas.compile.gpu import H100, Compilation, Compiler, Kernel
from autopallas.kernels.attention import gpu_block_sizes
from autopallas.sites.block_sizes import dividing
from autopallas.workbench.cases import PLAIN, Direction
from autopallas.workbench.cases import Case as Sized
from benchmarks import gpu_attention, gpu_attention_decode, gpu_cross_entropy, gpu_grouped_matmul
from benchmarks.gpu_benchmark import Timed
from benchmarks.gpu_declared import DeclaredGpuBenchmark
from benchmarks.gpu_model import cases
from benchmarks.gpu_model.model import Case, Code

__all__ = ["CASES", "Compiled", "compiled", "estimated"]

Compiled = dict[str, Code]
"""Codes of a case's kernels by name."""
Row = tuple[Timed, Callable[[str, Compiled, int], Case]]
"""What is timed, and the model's case of its name, its codes, and the bytes that transposes and copies write."""

_CROSS_ENTROPY = (32768, 2560, 128256)
_GATED_MLP = (8192, 4096, 14336)
_LARGE, _MANY = (8192, 4096, 4096, 8), (32768, 2048, 1408, 64)
_SIZE = 2
"""Bytes of bfloat16."""
_ROW_TILES = {_LARGE: 68, _MANY: 320}
"""Tiles of 128 rows of uneven groups, as the review counted them."""


def _grouped(shape: tuple[int, int, int, int], use: str) -> Row:
    timed: Timed
    if use == "forward":
        timed = gpu_grouped_matmul._timed(*shape, 1, False)
    else:
        timed = gpu_grouped_matmul._product(*shape, use, 0)  # type: ignore[arg-type]

    def case(name: str, found: Compiled, copied: int) -> Case:
        (code,) = found.values()
        return cases.grouped_matmul(name, code, shape, row_tiles=None if use == "drhs" else _ROW_TILES[shape])

    return timed, case


def _cross_entropy() -> Row:
    timed = gpu_cross_entropy._timed(gpu_cross_entropy.case_of(*_CROSS_ENTROPY, "bfloat16", "forward"), 1)

    def case(name: str, found: Compiled, copied: int) -> Case:
        return cases.cross_entropy(name, found["autopallas_cross_entropy_statistics"], _CROSS_ENTROPY)

    return timed, case


def _train_step(kept: int = 0) -> Row:
    """Logits are computed again; or those of so many rows are kept."""
    timed = gpu_cross_entropy._timed(gpu_cross_entropy.case_of(*_CROSS_ENTROPY, "bfloat16", "forward+backward"), 9)
    assert timed.lean is not None
    wanted = timed.lean[0]
    if kept:
        n, _, v = _CROSS_ENTROPY
        blocks = {
            name: dividing(s.rows_block, n, 128) for name, s in timed.block_sizes.items() if s.vocabulary_block > v
        }
        wanted = next(name for name, rows in blocks.items() if rows == kept)

    def case(name: str, found: Compiled, copied: int) -> Case:
        if kept:
            return cases.train_step_kept(name, found["autopallas_cross_entropy_logits"], _CROSS_ENTROPY, kept)
        statistics, values = (found[f"autopallas_cross_entropy_{part}"] for part in ("statistics", "values"))
        return cases.train_step(name, statistics, values, _CROSS_ENTROPY)

    return replace(timed, block_sizes={wanted: timed.block_sizes[wanted]}), case


def _gated_mlp(direction: Literal["forward", "backward"]) -> Row:
    benchmark = DeclaredGpuBenchmark.of("gated_mlp")
    m, k, h = _GATED_MLP
    sizes = tuple(zip(benchmark.operation.sizes, (1, m, k, h, k), strict=True))
    whole: Direction = "forward" if direction == "forward" else "forward+backward"
    timed = benchmark._timed(Sized("gated_mlp", whole, "bfloat16", PLAIN, sizes), 1)

    def case(name: str, found: Compiled, copied: int) -> Case:
        return cases.gated_mlp(name, found[f"autopallas_gated_mlp_{direction}"], _GATED_MLP)

    return timed, case


def _attention(shape: tuple[int, int, int, int], mask: str, backward: bool, rounded: bool = False) -> Row:
    timed = gpu_attention._timed(*shape, mask, 1, backward, rounded)
    sizes = next(iter(timed.block_sizes.values()))

    def case(name: str, found: Compiled, copied: int) -> Case:
        chosen = [code for kernel, code in found.items() if ("backward" in kernel) == backward]
        # Queries and keys are read for their greatest numbers, and again for their copies in float16; values are read.
        beside = 3.5 if backward and not rounded else 0.0
        # Where a fill is shown to hide tiles, queries, keys and values are read for that before; and the cotangent.
        beside += (2.0 if backward else 1.5) * (mask == gpu_attention.FILLED)
        groups = 1 if backward and shape[3] > 128 else 2
        keys = (32 if shape[3] > 128 else 64) if backward else sizes.key_block
        causal = mask.startswith("causal")
        return cases.attention(
            name, chosen, shape, causal, rows=64 * groups, keys=keys, warpgroups=groups, backward=backward,
            two_stages=False, copies=copied / (_SIZE * math.prod(shape)) + beside,
        )  # fmt: skip

    return timed, case


def _decode(batch: int, keys: int, mask: str = "lengths") -> Row:
    shape = gpu_attention_decode.Shape(batch, 1, keys, 32, 8, 128, mask)
    with H100.targeted():
        timed = gpu_attention_decode._timed(shape, 0)
        sizes = next(iter(timed.block_sizes.values()))
        divided = gpu_block_sizes.divided(gpu_attention_decode.spec_of(shape), sizes)
    assert divided is not None
    tiles, blocks = divided

    def case(name: str, found: Compiled, copied: int) -> Case:
        (code,) = found.values()
        # Two join the parts; five more find which blocks of keys are visited, where that is done.
        kernels = 2 + 5 * (mask == "lengths" and gpu_attention_decode.searched(shape))
        return cases.few_queries(
            name, code, (batch, keys, 32, 8, 128), blocks=blocks, keys=tiles.away, warpgroups=tiles.warpgroups,
            kernels=kernels,
        )  # fmt: skip

    return timed, case


CASES: dict[str, Callable[[], Row]] = {
    "grouped matmul forward G8": lambda: _grouped(_LARGE, "forward"),
    "grouped matmul dlhs G8": lambda: _grouped(_LARGE, "dlhs"),
    "grouped matmul drhs G8": lambda: _grouped(_LARGE, "drhs"),
    "grouped matmul forward G64": lambda: _grouped(_MANY, "forward"),
    "grouped matmul drhs G64": lambda: _grouped(_MANY, "drhs"),
    "cross-entropy forward": _cross_entropy,
    "cross-entropy train step, logits again": _train_step,
    "cross-entropy train step, logits of 2048 rows kept": lambda: _train_step(2048),
    "cross-entropy train step, logits of 4096 rows kept": lambda: _train_step(4096),
    "gated MLP forward, both projections": lambda: _gated_mlp("forward"),
    "gated MLP backward, both projections again": lambda: _gated_mlp("backward"),
    "attention forward T16384 D128 causal": lambda: _attention((1, 16384, 16, 128), "causal", False),
    "attention forward T16384 D128 full": lambda: _attention((1, 16384, 16, 128), "full", False),
    "attention forward T4096 D128 causal": lambda: _attention((4, 4096, 16, 128), "causal", False),
    "attention forward T4096 D64 causal": lambda: _attention((4, 4096, 16, 64), "causal", False),
    "attention backward T16384 D128 causal": lambda: _attention((1, 16384, 16, 128), "causal", True),
    "attention backward T16384 D128 causal, score gradients in bfloat16": lambda: _attention(
        (1, 16384, 16, 128), "causal", True, True
    ),
    "attention forward T16384 D128 causal, filled": lambda: _attention(
        (1, 16384, 16, 128), gpu_attention.FILLED, False
    ),
    "attention forward T4096 D128 causal, filled": lambda: _attention((4, 4096, 16, 128), gpu_attention.FILLED, False),
    "attention backward T16384 D128 causal, filled": lambda: _attention(
        (1, 16384, 16, 128), gpu_attention.FILLED, True
    ),
    "attention backward T4096 D128 causal, filled": lambda: _attention((4, 4096, 16, 128), gpu_attention.FILLED, True),
    "attention backward T16384 D128 full": lambda: _attention((1, 16384, 16, 128), "full", True),
    **{
        f"attention decode B{b} S{s} N32 K8 D128 lengths": partial(_decode, b, s)
        for b in (1, 4, 16)
        for s in (4096, 8192, 32768)
    },
}
"""What is estimated, by name: a timed case, and the model's case of its kernels. Attention is as a caller with
[B, T, N, D] has it, with the copies that the compiler makes."""


def compiled(compiler: Compiler, timed: Timed) -> Compilation:
    """Compiles the first choice of block sizes of a timed case.

    Raises:
      RuntimeError: the compiler failed, or a kernel has a fault.
    """
    arguments = timed.arguments
    types = jax.eval_shape(arguments) if callable(arguments) else arguments
    found = compiler.compile(timed.candidates[next(iter(timed.block_sizes))], types)
    if faults := found.faults():
        raise RuntimeError("; ".join(faults))
    return found


def estimated(compiler: Compiler, names: Sequence[str] = ()) -> Iterator[tuple[str, Case, dict[Code, Kernel]]]:
    """Yields each case with its kernels by their codes, of those whose names contain one of these words."""
    for name, make in CASES.items():
        if names and not any(all(word in name for word in wanted.split()) for wanted in names):
            continue
        timed, case = make()
        found = compiled(compiler, timed)
        kernels = found.kernels
        codes = [Code.of(k.listing, k.registers, k.shared_bytes) for k in kernels]
        by_name = dict(zip((k.name for k in kernels), codes, strict=True))
        yield name, case(name, by_name, found.copied_bytes), dict(zip(codes, kernels, strict=True))
