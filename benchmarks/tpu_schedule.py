"""``python -m benchmarks.tpu_schedule``: simulated schedules of the TPU kernels beside JAX's own, without a TPU.

The TPU's compiler (extra ``tpu-check``) simulates the scheduled program of each kernel.  A simulation ranks; it is no
measurement.  Differences of a few percent mean nothing, and control flow that depends on data is not followed, so that
only attention without a mask is compared.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from autopallas import compat
from autopallas.kernels.attention import pallas_tpu
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.programs import traced
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.program import Score
from autopallas.tuning.ahead_of_time import GENERATIONS, Compiler, missing

RESULTS = Path(__file__).parent / "results"
BLOCKS = ((512, 512), (512, 1024), (1024, 1024), (512, 2048), (1024, 2048))
_STATISTICS = "autopallas_attention_tpu_statistics"
"""The kernel that runs only for rows of a huge logsumexp, in a branch that is not taken."""


class Candidate(NamedTuple):
    """One way to compute it."""

    name: str
    direction: str
    block_sizes: tuple[int, int] | None
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def spec_of(heads: int, length: int, size: int) -> AttentionSpec:
    """Attention without a mask, in bfloat16."""
    narrow, wide = np.dtype(jnp.bfloat16), np.dtype(np.float32)
    score = traced(lambda s: s * np.float32(size**-0.5), Score(wide))
    dtypes = (narrow, narrow, narrow, wide, narrow)
    return AttentionSpec(1, heads, 1, length, length, size, size, *dtypes, score)


def candidates(heads: int, length: int, size: int, directions: Sequence[str]) -> Iterator[Candidate]:
    """Ours and JAX's at several block sizes, and a matmul of as many operations as the forward has."""
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    spec = spec_of(heads, length, size)
    q = jax.ShapeDtypeStruct((1, heads, length, size), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((1, heads, 1, length), jnp.float32)
    grouped = jax.ShapeDtypeStruct((1, heads, 1, length, size), jnp.bfloat16)
    for pair in BLOCKS:
        if max(pair) > length:
            continue
        sizes, (block_q, block_k) = BlockSizes(*pair), pair
        theirs = flash.BlockSizes(
            block_q=block_q, block_k_major=block_k, block_k=block_k, block_b=1, block_q_major_dkv=block_q,
            block_k_major_dkv=block_k, block_k_dkv=block_k, block_q_dkv=block_q, block_k_major_dq=block_k,
            block_k_dq=block_k, block_q_dq=block_q,
        )  # fmt: skip

        def forward(q: Any, k: Any, v: Any, sizes: BlockSizes = sizes) -> Any:
            return pallas_tpu.forward(spec, sizes, q, k, v)[0]

        def backward(q: Any, k: Any, v: Any, out: Any, rows: Any, dout: Any, sizes: BlockSizes = sizes) -> Any:
            return pallas_tpu.backward(spec, sizes, q, k, v, (), None, out, rows, dout)[:3]

        def jax_forward(q: Any, k: Any, v: Any, theirs: Any = theirs) -> Any:
            return flash.flash_attention(q, k, v, sm_scale=size**-0.5, block_sizes=theirs)

        def jax_both(q: Any, k: Any, v: Any, f: Any = jax_forward) -> Any:
            return jax.grad(lambda *x: f(*x).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

        if "forward" in directions:
            yield Candidate("pallas_tpu", "forward", pair, forward, (grouped, q, q))
            yield Candidate("jax flash_attention", "forward", pair, jax_forward, (q, q, q))
        if "backward" in directions:
            yield Candidate("pallas_tpu", "backward", pair, backward, (grouped, q, q, grouped, rows, grouped))
            yield Candidate("jax flash_attention", "backward", pair, jax_both, (q, q, q))
    if "forward" in directions:
        a = jax.ShapeDtypeStruct((length, 4 * heads * size), jnp.bfloat16)
        b = jax.ShapeDtypeStruct((4 * heads * size, length // 2), jnp.bfloat16)
        yield Candidate("matmul", "forward", None, lambda a, b: a @ b, (a, b))


def kernels_of(candidate: Candidate, operations: Sequence[Any]) -> list[Any]:
    """The operations whose cycles count: kernels of the direction, or all of a matmul."""
    if candidate.name == "matmul":
        return [o for o in operations if o.cycles]
    found = [o for o in operations if o.kernel and not o.name.startswith(_STATISTICS)]
    if candidate.direction == "backward":
        found = [o for o in found if "bwd" in o.name or "backward" in o.name]
    return found


def simulated(compiler: Compiler, candidate: Candidate, work: float) -> dict[str, Any]:
    """The row of one candidate."""
    generation = compiler.generation
    assert not isinstance(generation, str)
    found = compiler.compile(candidate.function, candidate.arguments)
    counted = kernels_of(candidate, found.operations)
    known = counted and all(o.cycles is not None for o in counted)
    cycles = sum(o.cycles * o.runs for o in counted) if known else None
    peak = generation.operations_per_second / generation.clock
    return {
        "kernel": "attention" if candidate.name != "matmul" else "matmul",
        "candidate": candidate.name,
        "direction": candidate.direction,
        "dtype": "bfloat16",
        "mask": "full",
        "device": {"TPU v5 lite": "TPU v5e", "TPU v6 lite": "TPU v6e"}.get(generation.kind, generation.kind),
        "evidence": "simulated",
        "block_sizes": candidate.block_sizes,
        "cycles": cycles,
        "cycles_by_kernel": {o.name: o.cycles for o in counted},
        "fraction_of_peak": None if cycles is None else round(work / peak / cycles, 4),
        "vmem_bytes": max((o.vmem_bytes for o in counted), default=0),
        "failure": found.failure or found.note or None,
        "versions": compat.versions(),
        "date": datetime.date.today().isoformat(),
    }


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; 1 where ours takes more than 1.05 times the cycles of JAX's best."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tpu_schedule", description=__doc__)
    parser.add_argument("generations", nargs="*", default=["tpu-v5e", "tpu-v6e"], help=f"of {', '.join(GENERATIONS)}")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--direction", choices=("forward", "backward"), action="append")
    parser.add_argument("--output", type=Path, help="a file for the rows, as JSON")
    options = parser.parse_args(arguments)
    if (reason := missing()) is not None:
        print(reason)
        return 2
    shape = f"B1 T{options.length} N{options.heads} D{options.size}"
    forward_work = 4.0 * options.heads * options.length**2 * options.size
    rows: list[dict[str, Any]] = []
    worse = False
    for name in options.generations:
        with Compiler(name, simulate=True) as compiler:
            directions = options.direction or ["forward", "backward"]
            for candidate in candidates(options.heads, options.length, options.size, directions):
                work = forward_work * (2.5 if candidate.direction == "backward" else 1)
                rows.append({"shape": shape, **simulated(compiler, candidate, work)})
                shown = {k: rows[-1][k] for k in ("device", "candidate", "direction", "block_sizes")}
                cycles, part = rows[-1]["cycles"], rows[-1]["fraction_of_peak"]
                text = "not simulated" if cycles is None else f"{cycles:10,} cycles  {part:6.1%} of peak"
                print(*(f"{v!s:22}" for v in shown.values()), text, flush=True)
    for name, direction in sorted({(r["device"], r["direction"]) for r in rows}):
        best = {}
        for row in rows:
            if (row["device"], row["direction"]) == (name, direction) and row["cycles"]:
                best[row["candidate"]] = min(row["cycles"], best.get(row["candidate"], row["cycles"]))
        if {"pallas_tpu", "jax flash_attention"} <= best.keys():
            ratio = best["pallas_tpu"] / best["jax flash_attention"]
            worse |= ratio > 1.05
            print(f"{name} {direction}: ours takes {ratio:.2f} times the cycles of JAX's flash_attention")
    if options.output:
        options.output.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    return int(worse)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
