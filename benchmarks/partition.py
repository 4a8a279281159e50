"""``python -m benchmarks.partition``: temporary memory per device of programs over eight CPU devices.

Each program, with its gradients, is compiled for a mesh of 4 x 2 as it is written and optimized, in every layout, and
not run: XLA says how much memory it plans beside arguments and results, and what is sent can be counted in its text.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopallas
from benchmarks import environment

__all__ = ["Program", "main", "programs", "rows"]

RESULTS = Path(__file__).parent / "results" / "partition-cpu.json"
SIZES: Mapping[str, int] = {"data": 4, "model": 2}

_SENT = re.compile(r"\b(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Program:
    """One program, and how its arguments may be divided.

    Attributes:
      kernel: the operation in it.
      shape: its sizes, to be read.
      function: of the arguments, the floating ones first.
      types: of the arguments.
      floating: how many of them have gradients.
      layouts: how each argument is divided.
    """

    kernel: str
    shape: str
    function: Callable[..., jax.Array]
    types: tuple[jax.ShapeDtypeStruct, ...]
    floating: int
    layouts: Mapping[str, tuple[P, ...]]


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention over [B, T, N, D]."""
    scores = jnp.einsum("btnd,bsnd->bnts", q, k) / math.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)), v)


def loss(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy of x [B, T, D] and w [V, D]."""
    picked = jnp.take_along_axis(jax.nn.log_softmax(jnp.einsum("btd,vd->btv", x, w)), labels[..., None], -1)
    return -jnp.mean(picked)


def programs(length: int, vocabulary: int) -> tuple[Program, ...]:
    """What is compared, for sequences and a vocabulary of a size."""
    batch, heads, size, width = 8, 8, 64, 256
    qkv = jax.ShapeDtypeStruct((batch, length, heads, size), jnp.float32)
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((batch, length, width), (vocabulary, width)))
    labels = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    rows, words = P("data"), P("model")
    return (
        Program(
            "attention",
            f"B{batch} T{length} N{heads} D{size}",
            attend,
            (qkv,) * 3,
            3,
            {
                "batches": (rows,) * 3,
                "heads": (P(None, None, "model"),) * 3,
                "batches and heads": (P("data", None, "model"),) * 3,
                "batches and queries": (P("data", "model"), rows, rows),
            },
        ),
        Program(
            "cross_entropy",
            f"B{batch} T{length} D{width} V{vocabulary}",
            loss,
            (x, w, labels),
            2,
            {
                "tokens": (rows, P(), rows),
                "vocabulary": (P(), words, P()),
                "tokens and vocabulary": (rows, words, rows),
                "tokens, gathered weight": (rows, P("model", "data"), rows),
            },
        ),
    )


def rows(program: Program, mesh: Mesh) -> Iterator[Row]:
    """One row for each layout, with the figures of the original and of the optimized program."""

    def step(*arguments: Any) -> Any:
        def total(*floating: Any) -> jax.Array:
            return jnp.sum(jnp.sin(program.function(*floating, *arguments[program.floating :])))

        return jax.value_and_grad(total, tuple(range(program.floating)))(*arguments[: program.floating])

    for layout, specs in program.layouts.items():
        types = [
            jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=NamedSharding(mesh, spec))
            for t, spec in zip(program.types, specs, strict=True)
        ]
        optimized = autopallas.optimize(jax.jit(step), objective="always")
        (original_bytes, original_sent), (own_bytes, own_sent) = (
            _planned(f, types) for f in (jax.jit(step), optimized)
        )
        yield {
            "kernel": program.kernel,
            "direction": "forward+backward",
            "shape": program.shape,
            "dtype": "float32",
            "layout": layout,
            "mesh": dict(mesh.shape),
            "device": environment.device(),
            "replaced": sum(optimized.report().counts().values()),
            "temporary_bytes": own_bytes,
            "original_temporary_bytes": original_bytes,
            "temporary_ratio": round(own_bytes / original_bytes, 4) if original_bytes else None,
            "collectives": own_sent,
            "original_collectives": original_sent,
            "evidence": "estimated",
            "date": datetime.date.today().isoformat(),
            "versions": environment.versions(),
            "flags": environment.flags(),
        }


def _planned(function: Any, types: Sequence[Any]) -> tuple[int, dict[str, int]]:
    """(temporary bytes of one device, how often what is sent)."""
    compiled = function.lower(*types).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes), dict(Counter(_SENT.findall(compiled.as_text())))


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; 1 where something is not replaced, needs more memory, or sends more than the original."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.partition", description=__doc__)
    parser.add_argument("--length", type=int, default=1024, help="of the sequences (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=16384, help="its size (%(default)s)")
    parser.add_argument("--output", type=Path, help=f"a file for the rows, as JSON, such as {RESULTS.name}")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", math.prod(SIZES.values()))
    mesh = Mesh(
        np.array(jax.devices()).reshape(*SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * len(SIZES)
    )
    found: list[Row] = []
    for program in programs(options.length, options.vocabulary):
        for row in rows(program, mesh):
            found.append(row)
            print(_line(row), flush=True)
    if options.output:
        options.output.write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")
    return int(not all(map(_holds, found)))


def _holds(row: Row) -> bool:
    before, after = row["original_collectives"], row["collectives"]
    smaller = row["temporary_bytes"] <= row["original_temporary_bytes"]
    return bool(row["replaced"]) and smaller and all(count <= before.get(kind, 0) for kind, count in after.items())


def _line(row: Row) -> str:
    own, original = (row[name] / 2**20 for name in ("temporary_bytes", "original_temporary_bytes"))
    share = f" ({own / original:.2f})" if original else ""
    sent = ", ".join(f"{count} {kind}" for kind, count in row["collectives"].items()) or "nothing sent"
    verdict = "yes" if _holds(row) else "NO "
    return f"{verdict} {row['kernel']:14} {row['layout']:24} {own:8.1f} MiB of {original:8.1f}{share}, {sent}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
