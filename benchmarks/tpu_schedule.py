"""``python -m benchmarks.tpu_schedule``: simulated schedules of the TPU kernels beside JAX's or XLA's, without a TPU.

The TPU's compiler (extra ``tpu-check``) simulates the scheduled program of each kernel.  A simulation ranks; it is no
measurement.  Differences of a few percent mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax.experimental import pallas as pl

from autopallas import compat
from autopallas.compile.tpu import GENERATIONS, Compilation, Compiler, Generation, missing
from autopallas.kernels import tpu
from autopallas.kernels.tpu_schedule_tracing import in_main_memory
from autopallas.tuning.table import table_device
from benchmarks import tpu_declared
from benchmarks.tpu_candidates import Candidate, attentions, grouped, losses, recurrences

RESULTS = Path(__file__).parent / "results" / "tpu-simulated.json"
MOST = 1.05
"""Times the cycles of JAX's own at its best block sizes."""
LEAST = 0.60
"""Of the matrix units' peak, for a kernel that matmuls bound."""
OURS = ("ours", tpu_declared.WITH_THE_SUM)
_MATMULS = ("grouped_matmul", "cross_entropy")
"""Attention is bound by them on v5e, and by exponentials and row sums where matrix units are wider."""

Row = dict[str, Any]


def candidates(operations: Sequence[str], full: bool = False) -> Iterator[Candidate]:
    """All that is compared on the device that is compiled for: the best block sizes that are known, or ``full``, all.

    Compiling and simulating takes 5 to 30 seconds for each, so sizes and choices are small.
    """
    if "attention" in operations:
        yield from attentions(2, 2048, 128, full)
    if "grouped_matmul" in operations:
        for use in ("forward", "dlhs", "drhs"):
            yield from grouped(use, 2048, 4096, 4096, 2, full)
    if "cross_entropy" in operations:
        yield from losses(1024, 2048, 8192, full)
    if "recurrence" in operations:
        yield from recurrences(512, 8, 64, full)
    for operation in tpu_declared.operations():
        if operation in operations:
            yield from tpu_declared.candidates(operation)


def arrays_in_main_memory() -> AbstractContextManager[Any]:
    """The arrays of JAX's kernels lie there in a simulation, as those of ours do."""
    pallas_call = pl.pallas_call

    def placed(kernel: Any, out_shape: Any, *, grid_spec: Any = None, **named: Any) -> Any:
        call = partial(pallas_call, kernel, grid_spec=grid_spec, **named)
        return in_main_memory(call, out_shape, getattr(grid_spec, "num_scalar_prefetch", 0))

    return mock.patch.object(pl, "pallas_call", placed)


def rows_of(compiler: Compiler, candidate: Candidate) -> Iterator[Row]:
    """One row per part of a candidate."""
    placed = nullcontext() if candidate.name in OURS else arrays_in_main_memory()
    with compiler.target.device.targeted(), placed:
        found = compiler.compile(candidate.function, candidate.arguments)
    for part, work in candidate.work.items():
        direction = f"{candidate.direction}: {part}" if len(candidate.work) > 1 else candidate.direction
        yield {**_described(compiler.target, candidate), "direction": direction, **_simulated(found, part, work)}


def _described(generation: Generation, candidate: Candidate) -> Row:
    own = tpu.generation(generation.device)
    return {
        "kernel": candidate.kernel,
        "shape": candidate.shape,
        "candidate": candidate.name,
        "dtype": jax.tree.leaves(candidate.arguments)[0].dtype.name,
        "device": table_device(generation.device),
        "evidence": "simulated",
        "block_sizes": candidate.block_sizes,
        "scoped_vmem_limit": own.limit if candidate.name in (*OURS, "megablox") else None,
        "flags": os.environ.get("LIBTPU_INIT_ARGS", ""),
        "versions": {**compat.versions(), "libtpu": metadata.version("libtpu")},
        "date": datetime.date.today().isoformat(),
    }


def _simulated(found: Compilation, part: str, work: int) -> Row:
    kernels = [o for o in found.operations if o.kernel and part in o.name and "attention_tpu_statistics" not in o.name]
    if part == "*":
        kernels = [o for o in found.operations if o.cycles is not None or o.kernel]
    counted = kernels or [o for o in found.operations if o.cycles and not any(p.kernel for p in found.operations)]
    known = [o.cycles * o.runs for o in counted if o.cycles is not None]
    cycles = sum(known) if known and len(known) == len(counted) else None
    peak = found.generation.operations_per_second / found.generation.clock / 2
    return {
        "cycles": cycles,
        "fraction_of_peak": None if cycles is None else round(work / peak / cycles, 4),
        "vmem_bytes": max((o.vmem_bytes for o in counted), default=0),
        "failure": (found.failure or found.note or "").strip().split("\n")[0][:300] or None,
    }


def best(rows: Iterable[Row]) -> dict[tuple[str, str, str], dict[str, Row]]:
    """The row of fewest cycles of each candidate, by what is compared."""
    found: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        if row["cycles"] is not None:
            known = found.setdefault((row["device"], row["kernel"], row["direction"]), {})
            if row["candidate"] not in known or row["cycles"] < known[row["candidate"]]["cycles"]:
                known[row["candidate"]] = row
    return found


def verdicts(rows: Sequence[Row]) -> list[tuple[str, bool]]:
    """What is asked of each kernel, and whether it holds."""
    found = []
    for (device, kernel, direction), known in best(rows).items():
        if "ours" not in known:
            continue
        own, what = known["ours"], f"{device} {kernel} {direction}"
        for name, row in known.items():
            # With tables of zeros a grid may skip its work, and then nothing can be said.
            if name in (*OURS, "matmul", "xla", "chunks") or row["fraction_of_peak"] > 1:
                continue
            ratio = own["cycles"] / row["cycles"]
            found.append((f"{what}: {ratio:.2f} times the cycles of JAX's {name}", ratio <= MOST))
        part = own["fraction_of_peak"]
        if kernel in _MATMULS or (kernel == "attention" and device == "TPU v5e"):
            found.append((f"{what}: {part:.0%} of the matrix units' peak", part >= LEAST))
    for key, row in failures(rows).items():
        if row["candidate"] == "ours":
            found.append((f"{' '.join(key[:3])}: not simulated", False))
    return sorted(found)


def failures(rows: Iterable[Row]) -> dict[tuple[str, str, str, str], Row]:
    """A row of each candidate that was never simulated, with what the compiler said."""
    found: dict[tuple[str, str, str, str], Row] = {}
    known: set[tuple[str, str, str, str]] = set()
    for row in rows:
        key = (row["device"], row["kernel"], row["direction"], row["candidate"])
        if row["cycles"] is None:
            found.setdefault(key, row)
        else:
            known.add(key)
    return {key: row for key, row in found.items() if key not in known}


def table(rows: Sequence[Row]) -> list[str]:
    """The best of each candidate beside the best of ours, and what could not be simulated, as lines of text."""
    lines = [f"{'':46} {'candidate':16} {'blocks':14} {'cycles':>9}  of peak  ours"]
    failed = failures(rows)
    for (device, kernel, direction), known in sorted(best(rows).items()):
        head = f"{device:8} {kernel:14} {direction}"
        for name, row in sorted(known.items(), key=lambda item: (item[0] != "ours", item[0])):
            blocks = "x".join(map(str, row["block_sizes"]))
            line = f"{head:46} {name:16} {blocks:14} {row['cycles']:9,}  {row['fraction_of_peak']:7.1%}"
            lines.append(line + (f"  {known['ours']['cycles'] / row['cycles']:.2f}x" if "ours" in known else ""))
            head = ""
        for name in [k[3] for k in failed if k[:3] == (device, kernel, direction)]:
            lines.append(f"{'':46} {name:16} not simulated: {failed[device, kernel, direction, name]['failure']}"[:160])
    return lines


def _all() -> tuple[str, ...]:
    return ("attention", *_MATMULS, "recurrence", *tpu_declared.operations())


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; 1 where something that is asked of a kernel does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tpu_schedule", description=__doc__)
    parser.add_argument("generations", nargs="*", default=["tpu-v5e", "tpu-v6e"], help=f"of {', '.join(GENERATIONS)}")
    parser.add_argument("--op", action="append", choices=_all(), help="all, unless given")
    parser.add_argument("--full", action="store_true", help="all block sizes (hours), not the best that are known")
    parser.add_argument("--output", type=Path, help=f"a file for the rows, as JSON, such as {RESULTS.name}")
    options = parser.parse_args(arguments)
    if (reason := missing()) is not None:
        print(reason)
        return 2
    rows: list[Row] = []
    for name in options.generations:
        with Compiler(name, simulate=True, steps=None) as compiler:
            with compiler.target.device.targeted():
                chosen = list(candidates(options.op or _all(), options.full))
            for candidate in chosen:
                for row in rows_of(compiler, candidate):
                    rows.append(row)
                    print(_line(row), flush=True)
                    if options.output:
                        options.output.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    found = verdicts(rows)
    print("", *table(rows), "", sep="\n")
    for text, holds in found:
        print("yes" if holds else "NO ", text)
    return int(not all(holds for _, holds in found))


def _line(row: Row) -> str:
    text = row["failure"] or "not simulated"
    if row["cycles"] is not None:
        text = f"{row['cycles']:10,} cycles  {row['fraction_of_peak']:6.1%} of peak"
    blocks = "x".join(map(str, row["block_sizes"]))
    head = f"{row['device']:8} {row['kernel']:14} {row['direction']:28} {row['candidate']:16} {blocks:14}"
    return f"{head} {text[:110]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
