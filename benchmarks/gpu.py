"""``python -m benchmarks gpu --op OPERATION``: everything that only a GPU can show of a kernel, within nine minutes.

First correctness of what users run (``autopallas.optimize``) over a grid of shapes, against float32 at the highest
precision.  Then the same call repeated, whose results must not differ in a bit: what is not synchronised shows there.
Then times in turns, against XLA, tokamax where it is installed, and what the GPU can do at best: a plain matrix product
of the same work, and a copy.  Each row is written as soon as it is known; the table is regenerated from what was timed.

``--all`` does this for all operations, in stages, and ``--tables`` makes tables of what it found: see
:mod:`benchmarks.gpu_session`.

``--model`` estimates times on a machine without a GPU, from the compiled code: see :mod:`benchmarks.gpu_model`.

``--dry-run`` goes the same way with small shapes and interpreted kernels, on a CPU; its times mean nothing, and it
writes no table.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.kernels.gpu import is_hopper
from autopallas.sites.device import Device
from autopallas.sites.interpret import mode
from autopallas.sites.operation import operation_named
from autopallas.tuning import measure
from autopallas.tuning.row import LEAST_MEMORY
from autopallas.tuning.table import Key, Row, table_device
from benchmarks import environment
from benchmarks.gpu_benchmark import MATMUL, ORIGINAL, Arguments, Check, Timed
from benchmarks.gpu_declared import offered

RESULTS = Path(__file__).parent / "results"
OPERATIONS_PER_SECOND, BYTES_PER_SECOND = 800e12, 3.0e12
"""Of an H100's large matrix products and copies, as measured elsewhere: what estimates are made of."""
FIELDS = (
    "kernel", "part", "candidate", "implementation", "direction", "shape", "dtype", "device", "evidence",
    "block_sizes", "microseconds", "microseconds_lower", "microseconds_upper", "clock", "ratio_to_xla",
    "ratio_to_xla_lower", "ratio_to_xla_upper", "teraflops", "fraction_of_matmul", "gigabytes_per_second",
    "temporary_bytes", "xla_temporary_bytes", "max_error", "tolerance", "repetitions", "differing", "failure", "date",
    "versions",
)  # fmt: skip


def _made(arguments: Arguments) -> tuple[Any, ...]:
    return arguments() if callable(arguments) else arguments


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status: 1 where a result was wrong or a kernel failed."""
    if {"--all", "--tables"} & {argument.partition("=")[0] for argument in arguments}:
        from benchmarks.gpu_session import command

        return command.main(arguments)
    if "--model" in arguments:
        from benchmarks.gpu_model import command as model

        return model.main(arguments)
    options = _parser().parse_args(arguments)
    device = Device.current()
    if options.estimate:
        return _estimate(options.op, options.print)
    if not options.dry_run and not is_hopper(device):
        print(f"this needs a Hopper GPU (sm_90), and JAX has {device.kind}; --dry-run does the same on a CPU")
        return 2
    until = time.monotonic() + 60 * options.minutes
    with mode(True) if options.dry_run else nullcontext():
        run = _Run(options.op, device, until, options.dry_run, options.output)
        run.check()
        run.stress(options.repetitions)
        run.time(options.seconds)
    if not options.dry_run:
        run.write_table(options.print)
    left = len(run.skipped)
    print(f"{len(run.rows)} rows, {run.faults} faults" + (f", {left} left out for lack of time" if left else ""))
    for name in run.skipped:
        print(f"  not run: {name}")
    return int(run.faults > 0)


class _Run:
    def __init__(self, op: str, device: Device, until: float, dry: bool, output: Path | None):
        self.op, self.until, self.small = op, until, dry
        self.offered = offered(op)
        self.device, self.output = device, output or (None if dry else RESULTS)
        self.rows: list[dict[str, Any]] = []
        self.table: dict[Key, Row] = {}
        self.skipped: list[str] = []
        self.faults = 0
        self._peaks: dict[str, float] = {}

    def check(self) -> None:
        for check in self.offered.checks(self.small):
            if not self._late(f"correctness: {check.name}"):
                self._compare(check, "correctness", 1)

    def stress(self, repetitions: int) -> None:
        for check in self.offered.stressed(self.small):
            if not self._late(f"stress: {check.name}"):
                self._compare(check, "stress", repetitions)

    def _compare(self, check: Check, part: str, repetitions: int) -> None:
        error, differing, failure = None, None, None
        try:
            run, given = jax.jit(check.function), _made(check.arguments)
            first = jax.block_until_ready(run(*given))
            wanted = jax.jit(check.reference)(*given)
            error = max(map(_error, jax.tree.leaves(first), jax.tree.leaves(wanted)))
            same = jax.jit(lambda a, b: jnp.all(jnp.stack([jnp.array_equal(x, y) for x, y in zip(a, b, strict=True)])))
            leaves = jax.tree.leaves(first)
            found = [same(leaves, jax.tree.leaves(run(*given))) for _ in range(repetitions - 1)]
            differing = sum(not bool(x) for x in found)
        except Exception as problem:
            failure = f"{type(problem).__name__}: {problem}"[:2000]
        wrong = failure is not None or differing != 0 or not (error is not None and error <= check.tolerance)
        self.faults += wrong
        self._add(
            part=part, candidate="autopallas", implementation=self.offered.IMPLEMENTATION, shape=check.name,
            dtype=check.dtype, direction=check.direction, max_error=error, tolerance=check.tolerance,
            repetitions=repetitions, differing=differing, failure=failure,
        )  # fmt: skip
        print(f"{part} {check.name} {check.dtype} {check.direction}: "
              f"{failure or f'error {error:.1e} of {check.tolerance:.0e}, {differing} of {repetitions - 1} differ'}"
              f"{'  WRONG' if wrong else ''}", flush=True)  # fmt: skip

    def time(self, seconds: float) -> None:
        if not self._late("ceiling: copy"):
            self._copy()
        for case in self.offered.timed(self.small):
            if not self._late(f"time: {case.name} {case.direction}"):
                self._time(case, seconds)

    def _copy(self) -> None:
        array = jnp.ones((2**16 if self.small else 2**29,), jnp.bfloat16)
        measured = measure({"copy": lambda x: -x}, (array,), seconds=2.0, repetitions=20)["copy"]
        spread = measured.spread("device") or measured.spread("wall")
        if spread is not None:
            rate = 2 * array.nbytes / spread.median / 1e9
            self._add(part="ceiling", candidate="copy", shape=f"{array.nbytes} bytes", dtype="bfloat16",
                      microseconds=_digits(spread.median * 1e6), gigabytes_per_second=_digits(rate))  # fmt: skip
            print(f"ceiling copy: {rate:.0f} GB/s", flush=True)

    def _time(self, case: Timed, seconds: float) -> None:
        left = max(self.until - time.monotonic(), 1.0)
        found = measure(
            {name: jax.jit(f) for name, f in case.candidates.items()}, _made(case.arguments), baseline=ORIGINAL,
            seconds=min(seconds, left), repetitions=20, profile=None if not self.small else False,
        )  # fmt: skip
        clock: Any = "device" if all(found[n].device or found[n].failure for n in case.candidates) else "wall"
        ceiling = found[MATMUL].spread(clock) if MATMUL in case.candidates else None
        for name in case.candidates:
            timing, spread, ratio = found[name], found[name].spread(clock), found.ratio(name, clock=clock)
            sizes = case.block_sizes.get(name)
            self.faults += sizes is not None and timing.failure is not None
            self._add(
                part="ceiling" if name == MATMUL else "time", candidate=name, shape=case.name, dtype=case.dtype,
                direction=case.direction, implementation=self.offered.IMPLEMENTATION if sizes is not None else name,
                block_sizes=None if sizes is None else sizes.to_dict(), clock=clock,
                **_spread("microseconds", spread, 1e6), **_spread("ratio_to_xla", ratio, 1.0),
                teraflops=_digits(case.operations / spread.median / 1e12) if spread else None,
                fraction_of_matmul=_digits(ceiling.median / spread.median) if spread and ceiling else None,
                temporary_bytes=timing.temporary_bytes, xla_temporary_bytes=found[ORIGINAL].temporary_bytes,
                repetitions=len(timing.samples(clock)), failure=str(timing.failure) if timing.failure else None,
            )  # fmt: skip
            told = f"{spread.median * 1e6:.1f} us" if spread else str(timing.failure)
            print(f"time {case.name} {case.direction} {name}: {told}"
                  f"{f', {ratio.median:.2f} times as fast as XLA' if ratio else ''}", flush=True)  # fmt: skip
        best = min((n for n in case.block_sizes if found[n].spread(clock)), default=None,
                   key=lambda n: found[n].spread(clock).median)  # type: ignore[union-attr]  # fmt: skip
        ratio = found.ratio(best, clock=clock) if best is not None else None
        if best is not None and ratio is not None and case.key is not None:
            spread = found[best].spread(clock)
            assert spread is not None
            self.table[case.key] = Row(
                case.block_sizes[best], _digits(spread.median * 1e6), _digits(spread.median * 1e6 * ratio.median),
                found[best].temporary_bytes or 0, found[ORIGINAL].temporary_bytes or 0, "measured",
                datetime.date.today().isoformat(), f"jax {jax.__version__}",
            )  # fmt: skip

    def write_table(self, only_print: bool) -> None:
        """Writes what was timed into the table's module, beside the rows that were not."""
        _write_table(self.op, table_device(self.device), self.table, only_print)

    def _late(self, name: str) -> bool:
        late = time.monotonic() > self.until
        if late:
            self.skipped.append(name)
        return late

    def _add(self, **known: Any) -> None:
        row = dict.fromkeys(FIELDS) | {"kernel": self.op, "device": self.device.kind, "evidence": "measured"} | known
        row |= {"date": datetime.date.today().isoformat(), "versions": environment.versions()}
        if self.small:
            row["evidence"] = "simulated"  # interpreted: nothing was run on a GPU
        self.rows.append(row)
        if self.output is None:
            return
        self.output.mkdir(parents=True, exist_ok=True)
        stem = self.output / f"{self.op}-{'dry-run' if self.small else 'h100'}"
        lines = ",\n".join(json.dumps(row, allow_nan=False) for row in self.rows)
        stem.with_suffix(".json").write_text(f"[\n{lines}\n]\n")
        with stem.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            for row in self.rows:
                writer.writerow({k: json.dumps(v) if isinstance(v, dict) else v for k, v in row.items()})


def _estimate(op: str, only_print: bool) -> int:
    """Rows for the table on a machine without a GPU: memory by the compiler's account, times by arithmetic."""
    from autopallas.compile.gpu import H100, Compiler, missing

    if (reason := missing()) is not None:
        print(reason)
        return 2
    own = offered(op)
    if not operation_named(op).has("tuned_block_sizes"):
        print(f"{op} has no table of tuned block sizes to estimate rows of")
        return 2
    rows: dict[Key, Row] = {}
    faults = 0
    with H100.targeted(), Compiler() as compiler:
        for case in own.timed(False):
            types = jax.eval_shape(lambda case=case: _made(case.arguments))
            least = max(case.operations / OPERATIONS_PER_SECOND, case.bytes_moved / BYTES_PER_SECOND) * 1e6
            first = next(iter(case.block_sizes))
            names = {first: 1.0} | dict([case.lean] if case.lean is not None else [])
            # The compiler does not take Mosaic's kernels any more after its first program had none.
            compilations = {name: compiler.compile(case.candidates[name], types) for name in (*names, ORIGINAL)}
            original = compilations.pop(ORIGINAL)
            for name, found in compilations.items():
                microseconds = least * names[name]
                faults += bool(found.faults() or original.failure)
                told = "; ".join(found.faults()) or f"{microseconds:.1f} us at least"
                print(f"{case.name} {case.direction} {name}: {told}", *found.kernels,
                      f"temporary memory {found.temporary_bytes}, XLA's {original.temporary_bytes}",
                      sep="\n  ", flush=True)  # fmt: skip
                if case.key is None or found.faults():
                    continue
                *key, invariants = case.key
                rows[*key, invariants + LEAST_MEMORY * (name != first)] = Row(  # type: ignore[index]
                    case.block_sizes[name], _digits(microseconds), _digits(least * case.expansion),
                    found.temporary_bytes, original.temporary_bytes, "estimated", datetime.date.today().isoformat(),
                    f"jax {jax.__version__}",
                )  # fmt: skip
    _write_table(op, table_device(H100), rows, only_print)
    return int(faults > 0)


def _write_table(op: str, device: str, found: Mapping[Key, Row], only_print: bool) -> None:
    """An estimate does not take the place of anything better.  An operation without a table has no rows."""
    if not found:
        return
    table = importlib.import_module(f"autopallas.kernels.{op}.tuned_block_sizes").TABLE
    known = table.get(device, {})
    kept = {k: row for k, row in found.items() if row.evidence != "estimated" or k not in known
            or known[k].evidence == "estimated"}  # fmt: skip
    if only_print:
        print(table.files.text(list(kept.items())))
    elif kept:
        print(f"wrote {len(kept)} rows into {table.files.write(device, kept)}")


def _error(found: Any, wanted: Any) -> float:
    """max |found - wanted| / max |wanted|; a large number where one is not finite and the other is."""
    a, b = (jnp.asarray(x, jnp.float32) for x in (found, wanted))
    worst = float(jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-6))
    return worst if np.isfinite(worst) else 1e30


def _spread(name: str, spread: Any, unit: float) -> dict[str, Any]:
    values = (spread.median, spread.lower, spread.upper) if spread else (None,) * 3
    return {
        name + end: None if x is None else _digits(x * unit)
        for end, x in zip(("", "_lower", "_upper"), values, strict=True)
    }


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("--op", required=True, help="the operation: grouped_matmul, ...")
    parser.add_argument("--minutes", type=float, default=8.5, help="when nothing new is begun (%(default)s)")
    parser.add_argument("--seconds", type=float, default=4.0, help="for the runs of one case (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=200, help="of each stressed call (%(default)s)")
    parser.add_argument("--output", type=Path, metavar="DIR", help=f"where rows go ({RESULTS}; a dry run: nowhere)")
    parser.add_argument("--print", action="store_true", help="print the table's rows instead of writing them")
    parser.add_argument("--dry-run", action="store_true", help="small shapes, interpreted, on a CPU")
    parser.add_argument("--estimate", action="store_true", help="no GPU: compile ahead of time and estimate the table")
    parser.add_argument("--no-allocator-settings", action="store_true", help="use the memory allocator as it comes")
    return parser
