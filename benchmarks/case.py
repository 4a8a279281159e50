"""What is measured: frozen data, and the joint between the operations and the machinery."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from autopallas.optimized import Optimized
from autopallas.sites.declared import declared_names
from autopallas.sites.operation import operation_named
from autopallas.workbench.cases import DIRECTIONS, Case, Direction

__all__ = ["AUTOPALLAS", "DIRECTIONS", "KERNELS", "ORIGINAL", "Benchmark", "Candidate", "Case", "Chosen", "Direction"]
__all__ += ["DECLARED", "KEPT", "TUNED", "WRITTEN", "benchmark", "chosen_by"]

ORIGINAL = "original"
"""The name of the candidate that every ratio refers to: the computation as people write it."""

AUTOPALLAS = "autopallas"
"""The name of the candidate that is the original under ``autopallas.optimize``."""


KEPT = "kept: "
"""What an implementation's name begins with where the original was left as it was; the reasons follow."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which implementation stands behind a candidate, and with which block sizes, if it reads any."""

    implementation: str
    block_sizes: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way of computing a case.  ``chosen`` is asked after the function has been compiled."""

    function: Callable[..., Any]
    chosen: Callable[[], Chosen]


def chosen_by(optimized: Optimized[..., Any]) -> Chosen:
    """Returns what runs at the site that was replaced, or why none was."""
    report = optimized.report()
    for site in report.sites:
        if site.verdict == "applied":
            return Chosen(site.implementation or "", site.block_sizes)
    reasons = [site.reason for site in report.sites] + [miss.reason for miss in report.near_misses]
    return Chosen(KEPT + ("; ".join(reasons) or "no site was found"))


class Benchmark(Protocol):
    """What the module of an operation offers, or a declared operation has without one."""

    def grid(self, name: str) -> tuple[Case, ...]:
        """The cases of the grid "quick", "standard", "wide" or "table" (one for each row of the tuned table)."""

    def arguments(self, case: Case) -> tuple[Any, ...]:
        """The arguments of every candidate of the case, always the same ones; a cotangent comes last."""

    def original(self, case: Case) -> Callable[..., Any]:
        """The forward computation as people write it, of the arguments without the cotangent."""

    def in_direction(self, case: Case, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function like the original, as a function of all the case's arguments, with gradients if it has them."""

    def candidates(self, case: Case) -> dict[str, Candidate]:
        """The ways of computing the case, the original among them and first."""

    def operations(self, case: Case) -> float:
        """Floating-point operations that the case cannot do without."""

    def oracle(self, case: Case, arguments: tuple[Any, ...]) -> Any:
        """The result in float64, or None where the case is too large for it."""


def benchmark(kernel: str) -> Benchmark:
    """The benchmark of an operation by its name: a module of this package, or what follows from its declaration."""
    import importlib

    if kernel in DECLARED:
        from benchmarks.declared import DeclaredBenchmark

        return DeclaredBenchmark.of(kernel)
    if kernel not in WRITTEN:
        raise KeyError(kernel)
    module: Any = importlib.import_module(f"benchmarks.{kernel}")
    offered: Benchmark = module
    return offered


WRITTEN = ("attention", "cross_entropy", "grouped_matmul", "recurrence")
"""The operations whose benchmark is a module of this package each."""

DECLARED = tuple(name for name in declared_names() if name not in WRITTEN)
"""Those whose benchmark follows from their declaration."""

KERNELS = (*WRITTEN, *DECLARED)
"""The operations that have a benchmark."""

TUNED = tuple(name for name in KERNELS if operation_named(name).has("tuned_block_sizes"))
"""Those that have a tuned table."""
