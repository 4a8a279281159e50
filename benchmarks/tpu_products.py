"""``python -m benchmarks.tpu_products``: simulated schedules of grouped matmul and cross-entropy, without a TPU.

The TPU's compiler (extra ``tpu-check``) simulates the scheduled program of each kernel, in which data that is known at
run time only reads as zero.  So the tables of our grouped matmul are replaced by arithmetic, as even groups give them.
MegaBlox in JAX has its number of tiles made fixed; its tables read as zero, that is, its blocks are fetched once only:
its cycles are a lower bound.  A simulation ranks; it is no measurement.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import compat
from autopallas.kernels.cross_entropy import pallas_tpu as cross_entropy
from autopallas.kernels.cross_entropy.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, Product, SideSpec, Statistic
from autopallas.kernels.grouped_matmul import pallas_tpu as grouped_matmul
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec, Use
from autopallas.kernels.programs import traced
from autopallas.program import Index, Score, Side
from autopallas.tuning.ahead_of_time import Compiler, missing

TILES = ((512, 4096, 1024), (1024, 1024, 1024), (512, 1024, 1024))
BF16, F32, I32 = np.dtype(jnp.bfloat16), np.dtype(np.float32), np.dtype(np.int32)


class Candidate(NamedTuple):
    """One kernel, or the kernels of one pass.  ``work``: multiplications with additions, of each of its kernels."""

    kernel: str
    name: str
    direction: str
    block_sizes: tuple[int, ...]
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    work: dict[str, int]


def array(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def grouped(use: Use, rows: int, k: int, n: int, groups: int) -> Iterator[Candidate]:
    """Ours, and MegaBlox, with groups of equal sizes."""
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

        yield Candidate("grouped_matmul", "pallas_tpu", use, blocks, ours, (*tables, first, second), {"": rows * k * n})
        megablox = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
        made = megablox.make_group_metadata

        def fixed(*args: Any, made: Any = made, visits: int = visits, **kwargs: Any) -> Any:
            return made(*args, **kwargs)[0], visits

        def theirs(
            a: Any, b: Any, sizes: Any, blocks: Any = blocks, fixed: Any = fixed, megablox: Any = megablox
        ) -> Any:
            with mock.patch.object(megablox, "make_group_metadata", fixed):
                if use == "drhs":
                    return megablox.tgmm.__wrapped__(a.T, b, sizes, BF16, blocks)
                return megablox.gmm.__wrapped__(a, b, sizes, BF16, blocks, transpose_rhs=use == "dlhs")

        arguments = (first, second, array(groups, dtype=I32))
        yield Candidate("grouped_matmul", "jax megablox", use, blocks, theirs, arguments, {"": rows * k * n})


def losses(rows: int, hidden: int, vocabulary: int) -> Iterator[Candidate]:
    """The loss and its gradients, as of a train step; the kernels decide on their blocks."""
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
    sizes = BlockSizes(2048, 2048)
    work = rows * hidden * vocabulary

    def ours(x: Any, w: Any, labels: Any) -> Any:
        return cross_entropy.forward(spec, sizes, x, w, (labels,))

    arguments = (array(rows, hidden), array(vocabulary, hidden), array(rows, 1, dtype=I32))
    kernels = {"statistics": work, "rows": 2 * work, "columns": 2 * work}
    yield Candidate("cross_entropy", "pallas_tpu", "forward+backward", (2048, 2048), ours, arguments, kernels)


def simulated(compiler: Compiler, candidate: Candidate) -> Iterator[dict[str, Any]]:
    """One row per kernel of a candidate."""
    generation = compiler.generation
    assert not isinstance(generation, str)
    with generation.device.targeted():
        found = compiler.compile(candidate.function, candidate.arguments)
    peak = generation.operations_per_second / generation.clock / 2
    for part, work in candidate.work.items():
        kernels = [o for o in found.operations if o.kernel and part in o.name]
        cycles = sum(o.cycles * o.runs for o in kernels) if kernels and all(o.cycles for o in kernels) else None
        yield {
            "kernel": candidate.kernel,
            "candidate": candidate.name,
            "direction": f"{candidate.direction}: {part}" if part else candidate.direction,
            "dtype": "bfloat16",
            "device": {"TPU v5 lite": "TPU v5e", "TPU v6 lite": "TPU v6e"}.get(generation.kind, generation.kind),
            "evidence": "simulated",
            "block_sizes": candidate.block_sizes,
            "cycles": cycles,
            "fraction_of_peak": None if not cycles else round(work / peak / cycles, 4),
            "failure": found.failure or found.note or None,
            "versions": compat.versions(),
            "date": datetime.date.today().isoformat(),
        }


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; 1 where our grouped matmul takes more than 1.05 times the cycles of MegaBlox's best."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tpu_products", description=__doc__)
    parser.add_argument("generations", nargs="*", default=["tpu-v5e", "tpu-v6e"])
    parser.add_argument("--output", type=Path, help="a file for the rows, as JSON")
    options = parser.parse_args(arguments)
    if (reason := missing()) is not None:
        print(reason)
        return 2
    m, k, n, groups = 2048, 4096, 4096, 2
    offered: list[tuple[str, Candidate]] = []
    for use in ("forward", "dlhs", "drhs"):
        offered += [(f"M{m} K{k} N{n} G{groups}", c) for c in grouped(use, m, k, n, groups)]  # type: ignore[arg-type]
    offered += [("N2048 D4096 V4096", c) for c in losses(2048, 4096, 4096)]
    rows: list[dict[str, Any]] = []
    for name in options.generations:
        with Compiler(name, simulate=True) as compiler:
            for shape, candidate in offered:
                for row in simulated(compiler, candidate):
                    rows.append({"shape": shape, **row})
                    text = row["failure"] or "not simulated"
                    if row["cycles"]:
                        text = f"{row['cycles']:10,} cycles  {row['fraction_of_peak']:6.1%} of peak"
                    head = (row["device"], row["candidate"], row["direction"], row["block_sizes"])
                    print(*(f"{v!s:28}" for v in head), text, flush=True)
                    if options.output:
                        options.output.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    best: dict[tuple[str, str], dict[str, int]] = {}
    for row in rows:
        if row["kernel"] == "grouped_matmul" and row["cycles"]:
            known = best.setdefault((row["device"], row["direction"]), {})
            known[row["candidate"]] = min(row["cycles"], known.get(row["candidate"], row["cycles"]))
    ratios = {key: found["pallas_tpu"] / found["jax megablox"] for key, found in best.items() if len(found) == 2}
    for (device, use), ratio in ratios.items():
        print(f"{device} {use}: ours takes {ratio:.2f} times the cycles of MegaBlox with fixed tables")
    return int(any(ratio > 1.05 for ratio in ratios.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
