"""A run: every case's candidates against each other, one case after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from autopallas.tuning import measure
from benchmarks import resident, rows
from benchmarks.case import AUTOPALLAS, ORIGINAL, Case, benchmark
from benchmarks.peak import matmul_peak
from benchmarks.rows import Machine, Row


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: ``seconds`` and ``repetitions`` bound the rounds of one case; the first met ends them."""

    seconds: float = 6.0
    repetitions: int = 15
    resident: bool = True


def run(cases: Sequence[Case], effort: Effort, say: Callable[[str], None]) -> Iterator[list[Row]]:
    """Measures the cases and yields the rows of each as it is done, the original's first."""
    say("measuring the matmul peak")
    peaks = matmul_peak(dict.fromkeys(case.dtype for case in cases))
    for number, case in enumerate(cases, 1):
        # Once more next to each case: on a shared machine a single moment's peak can be half of the true one.
        now = matmul_peak([case.dtype], seconds=1.0)
        peaks = {dtype: max(peak, now.get(dtype, 0.0)) for dtype, peak in peaks.items()}
        machine = Machine.current(peaks)
        yield measure_case(case, effort, machine, _numbered(say, f"[{number}/{len(cases)}] {case}: "))


def measure_case(case: Case, effort: Effort, machine: Machine, say: Callable[[str], None]) -> list[Row]:
    """The rows of one case."""
    offered = benchmark(case.kernel)
    arguments = offered.arguments(case)
    candidates = offered.candidates(case)
    say("computing the float64 oracle")
    reference = offered.oracle(case, arguments)
    measured = measure(
        {name: candidate.function for name, candidate in candidates.items()},
        arguments,
        baseline=ORIGINAL,
        repetitions=effort.repetitions,
        seconds=effort.seconds,
        reference=reference,
        progress=say,
    )
    found = rows.rows_of(case, offered, candidates, measured, machine)
    if not effort.resident:
        return found
    say("measuring resident memory")
    wanted = [name for name in (ORIGINAL, AUTOPALLAS) if name in candidates and measured[name].failure is None]
    peaks = resident.peaks((case, name) for name in wanted)
    original = peaks.get((case, ORIGINAL))
    return [rows.with_resident_memory(row, peaks.get((case, row.candidate)), original) for row in found]


def select(kernels: Iterable[str], grid: str, filters: Sequence[str]) -> list[Case]:
    """The cases of a grid that match any of the filters, or all of them where there is no filter."""
    cases = [case for kernel in kernels for case in benchmark(kernel).grid(grid)]
    return [case for case in cases if not filters or any(case.selected_by(words) for words in filters)]


def _numbered(say: Callable[[str], None], prefix: str) -> Callable[[str], None]:
    return lambda line: say(prefix + line)
