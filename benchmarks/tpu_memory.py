"""``python -m benchmarks.tpu_memory``: temporary memory of a train step on TPUs that are not there.

The step of ``examples/compile_for_tpu.py``, four layers of attention at T = 8192, is compiled as it is written and
optimized; figures are the TPU compiler's own.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import autopallas
from autopallas import compat
from autopallas.compile.tpu import GENERATIONS, Compilation, Compiler, missing
from autopallas.tuning.table import table_device

RESULTS = Path(__file__).parent / "results" / "tpu-memory.json"
LEAST = 10.0
"""How many times less temporary memory is asked for."""
LENGTH, LAYERS, HEADS, WIDTH = 8192, 4, 8, 1024


def row(name: str) -> dict[str, Any]:
    """What the compiler says of the step on one generation, as it is written and optimized."""
    path = Path(__file__).parents[1] / "examples" / "compile_for_tpu.py"
    specification = importlib.util.spec_from_file_location("compile_for_tpu", path)
    assert specification is not None
    assert specification.loader is not None
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)

    def step(layers: Any, x: Any) -> Any:
        return example.step(layers, x, HEADS)

    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
    arguments = [dict.fromkeys("qkvo", weight)] * LAYERS, jax.ShapeDtypeStruct((LENGTH, WIDTH), jnp.bfloat16)
    with Compiler(name) as compiler:
        found: list[Compilation] = []
        for function in (step, autopallas.optimize(step, objective="always", ops="attention")):
            found.append(compiler.compile(function, arguments, seconds=600.0))
        device = table_device(compiler.target.device)
    original, optimized = found
    return {
        "program": f"train step, {LAYERS} layers of attention, T{LENGTH} N{HEADS} D{WIDTH // HEADS}",
        "dtype": "bfloat16",
        "device": device,
        "evidence": "compiled",
        "original_bytes": original.temporary_bytes if original.failure is None else None,
        "temporary_bytes": optimized.temporary_bytes if optimized.failure is None else None,
        "kernels": sum(operation.kernel for operation in optimized.operations),
        "failures": [(c.failure or "").strip().split("\n")[0][:300] or None for c in found],
        "versions": {**compat.versions(), "libtpu": metadata.version("libtpu")},
        "date": datetime.date.today().isoformat(),
    }


def holds(row: dict[str, Any]) -> bool:
    """Whether the step compiles with kernels, in a tenth of the memory if it compiles without them."""
    own, original = row["temporary_bytes"], row["original_bytes"]
    return own is not None and row["kernels"] > 0 and (original is None or LEAST * own <= original)


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; 1 where a step needs more memory than asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tpu_memory", description=__doc__)
    parser.add_argument("generations", nargs="*", default=["tpu-v5e"], help=f"of {', '.join(GENERATIONS)}")
    parser.add_argument("--output", type=Path, help=f"a file for the rows, as JSON, such as {RESULTS.name}")
    options = parser.parse_args(arguments)
    if (reason := missing()) is not None:
        print(reason)
        return 2
    rows = []
    for name in options.generations:
        rows.append(row(name))
        shown = [f"{rows[-1][n] / 2**20:,.1f} MiB" if rows[-1][n] else "does not compile"
                 for n in ("original_bytes", "temporary_bytes")]  # fmt: skip
        print("yes" if holds(rows[-1]) else "NO ", rows[-1]["device"], "as written", shown[0], "optimized", shown[1])
        if options.output:
            options.output.write_text(json.dumps(rows, indent=1) + "\n")
    return int(not all(map(holds, rows)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
