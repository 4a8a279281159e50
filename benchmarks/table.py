"""``python -m benchmarks table``: measures block sizes, and writes the tuned table that they belong to."""

from __future__ import annotations

import argparse
import datetime
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax

from autopallas import compat
from autopallas.graph import Graph, flatten
from autopallas.patterns import Match, find
from autopallas.plan.decision import Decision
from autopallas.progress import Progress
from autopallas.rewrite.sites import splice
from autopallas.sites.device import Device
from autopallas.tuning import Measurement, measure
from autopallas.tuning.coverage import form_of, stated
from autopallas.tuning.table import Key, Row, of_form
from benchmarks.case import ORIGINAL, TUNED, Case, benchmark
from benchmarks.run import select

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 2e-2}
"""How far from the original's result a candidate may be; one that is further is wrong and not taken."""

CLEARLY = 1.05
"""A later candidate takes the place of an earlier one only where it is faster by this factor: less is noise."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """One row, where it belongs, and what else was tried: block sizes -> ratio to the original, None on failure."""

    key: Key
    row: Row | None
    tried: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Place:
    """The original of a case as the pipeline sees it: one recognised site in a graph."""

    graph: Graph
    match: Match

    @staticmethod
    def of(function: Callable[..., Any], operands: Sequence[Any]) -> Place:
        graph = Graph(flatten(jax.make_jaxpr(function)(*operands)))
        matches, misses = find(graph, None, True)
        if len(matches) != 1:
            raise ValueError(f"{len(matches)} sites were recognised, not one: {[m.reason for m in misses]}")
        return Place(graph, matches[0])

    def replaced(self, implementation: str, block_sizes: Any, device: Device) -> Callable[..., Any]:
        """The function with its site replaced by what is given: exactly what ``optimize`` would run."""
        decision = Decision("applied", "tuning", device.platform, implementation, block_sizes, "explicit")
        run = compat.jaxpr_as_fun(splice(self.graph, [self.match], [decision]))
        return lambda *operands: run(*operands)[0]


def tune(case: Case, implementation: str, count: int, seconds: float) -> Tuned:
    """Measures the first ``count`` candidates for the case's block sizes against each other and the original."""
    offered = benchmark(case.kernel)
    tables = importlib.import_module(f"autopallas.kernels.{case.kernel}.tuned_block_sizes")
    sizes = importlib.import_module(f"autopallas.kernels.{case.kernel}.block_sizes").BlockSizes
    device = Device.current()
    arguments = offered.arguments(case)
    operands = arguments[:-1] if case.direction == "forward+backward" else arguments
    original = offered.original(case)
    if hasattr(offered, "kernel"):  # a step whose backward pass is no pull-back of the kernel's forward
        spec, traced, replaced = offered.spec(case), None, partial(offered.kernel, case, implementation)
    else:
        place = Place.of(original, operands)
        spec, traced = place.match.spec, place.match.original

        def replaced(choice: Any) -> Callable[..., Any]:
            return offered.in_direction(case, place.replaced(implementation, choice, device))

    choices = {str(list(c.to_dict().values())): c for c in sizes.candidates(spec)[:count]}
    functions = {ORIGINAL: jax.jit(offered.in_direction(case, original))}
    for name, choice in choices.items():
        functions[name] = jax.jit(replaced(choice))
    reference = jax.device_get(functions[ORIGINAL](*arguments))
    measured = measure(functions, arguments, baseline=ORIGINAL, seconds=seconds, reference=reference)
    site = SimpleNamespace(op=case.kernel, spec=spec, direction=case.direction, original=traced)
    key = of_form(tables.table_key(spec, implementation, case.direction), form_of(site, device))
    tried = {name: _ratio(measured, name, TOLERANCE[case.dtype]) for name in choices}
    best = _best(tried)
    if best is None:
        return Tuned(key, None, tried)
    return Tuned(key, stated(_row(choices[best], measured, best, tried[best] or 0.0), site, device), tried)


def _ratio(measured: Measurement, name: str, tolerance: float) -> float | None:
    """How many times as fast as the original; None where the candidate failed or computes something else.

    On a CPU by CPU time, which other programs disturb least; wall time has a veto, for a kernel that uses fewer cores.
    """
    timing = measured[name]
    wall, cpu = measured.ratio(name, clock="wall"), measured.ratio(name, clock="cpu")
    if timing.failure or timing.difference is None or timing.difference.maximum > tolerance or not (wall and cpu):
        return None
    return min(cpu.median, wall.upper) if jax.default_backend() == "cpu" else wall.median


def _best(tried: Mapping[str, float | None]) -> str | None:
    best: str | None = None
    best_ratio = 0.0
    for name, ratio in tried.items():
        if ratio is not None and ratio > best_ratio * (CLEARLY if best else 1.0):
            best, best_ratio = name, ratio
    return best


def _row(block_sizes: Any, measured: Measurement, name: str, ratio: float) -> Row:
    kernel = measured[name].spread()
    assert kernel, "a ratio was formed from it"
    return Row(
        block_sizes=block_sizes,
        kernel_us=_rounded(kernel.median * 1e6),
        original_us=_rounded(kernel.median * 1e6 * ratio),  # so that the row's ratio is that of paired runs
        kernel_bytes=measured[name].temporary_bytes or 0,
        original_bytes=measured[ORIGINAL].temporary_bytes or 0,
        evidence="measured",
        date=datetime.date.today().isoformat(),
        versions=f"jax {jax.__version__}",
    )


def _rounded(microseconds: float) -> float:
    return float(f"{microseconds:.4g}")


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status: 1 where a case gave no row."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.kernel not in TUNED:
        parser.error(f"no tuned table is called {options.kernel!r}; there are: {', '.join(TUNED)}")
    cases = select([options.kernel], "table", options.filter)
    if options.list:
        for case in cases:
            print(case)
        return 0
    tables = importlib.import_module(f"autopallas.kernels.{options.kernel}.tuned_block_sizes")
    device = Device.current()
    implementation = options.implementation or tables.TABLE.operation.requested(None, device)[0]
    measured: dict[Key, Row] = {}
    missing = 0
    for number, case in enumerate(cases, 1):
        try:
            with Progress("benchmarks") as say:
                say(f"[{number}/{len(cases)}] {case}")
                tuned = tune(case, implementation, options.candidates, options.seconds)
        except Exception as error:
            missing += 1
            print(f"{case}: {type(error).__name__}: {error}", flush=True)
            continue
        tried = ", ".join(f"{name} {'failed' if r is None else f'{r:.2f}'}" for name, r in tuned.tried.items())
        print(f"{case}: {tried}", flush=True)
        if tuned.row is None:
            missing += 1
        else:
            measured[tuned.key] = tuned.row
    if device.platform != "cpu" or options.print:
        print(tables.TABLE.files.text(list(measured.items())))
    else:
        print(f"wrote {len(measured)} rows into {tables.TABLE.files.write('cpu', measured)}")
    return int(missing > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks table",
        description="Measures the candidates for block sizes, the original among them, for each row of an operation's "
        "tuned table on this device, and writes the rows into the table's file. Rows that were not measured stay.",
    )
    parser.add_argument("kernel", metavar="OPERATION", help=f"one of: {', '.join(TUNED)}")
    parser.add_argument("--implementation", help="what to tune (the first in the platform's order)")
    parser.add_argument("--filter", action="append", default=[], metavar="WORDS", help="only rows with all these words")
    parser.add_argument("--list", action="store_true", help="show what would be measured")
    parser.add_argument("--candidates", type=int, default=3, help="block sizes to try for each row (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for the runs of each row (%(default)s)")
    parser.add_argument("--print", action="store_true", help="print the rows measured and write nothing")
    parser.add_argument("--no-allocator-settings", action="store_true", help="use the memory allocator as it comes")
    return parser
