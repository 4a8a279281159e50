"""Decides what the evidence for an implementation permits under an objective, and which implementation comes first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopallas.tuning.lookup import Choice
from autopallas.tuning.table import MEMORY_SLOWDOWN, Row

__all__ = ["LEAST_GAIN", "SIMULATED_MARGIN", "Evidence", "in_words", "ranked"]

SIMULATED_MARGIN = 1.3
"""Simulated gains count only above this."""

LEAST_GAIN = 1.1
"""Smallest gain in time that counts: processes differ from one another by as much, and a kernel takes longer to compile
than what it replaces."""

_GAIN_FOR_MEMORY = 1.3
"""Smallest gain that counts if the kernel needs more temporary memory than the original."""

_QUICK_GAIN = 1.25
"""Smallest gain that counts if it was measured quickly, in one process and few runs."""
_QUICK_GAIN_OF_LONG = 1.15
"""Smallest quickly measured gain that counts if the original takes so long that few runs say more."""
_LONG_MICROSECONDS = 10_000

_NEXT_TO_NOTHING = 1e-3
"""Share of the kernel's temporary memory that counts as none."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence about one implementation at a site's device, dtype and size.

    Attributes:
      kind: "measured", "quickly measured" or "simulated".
      time: how many times as fast as the original it is.
      memory: how many times as much temporary memory the original needs.
      objective: "memory", or another, under which the time counts.
      microseconds: the time of the original.
    """

    kind: str
    time: float
    memory: float
    objective: str
    microseconds: float = 0.0

    @staticmethod
    def of(row: Row[object] | None, objective: str) -> Evidence | None:
        """Returns the evidence of a row of the site's own bucket; None if there is none, or only an estimate."""
        if row is None or row.evidence == "estimated":
            return None
        time, memory = row.assured_gain, max(row.original_bytes, 1) / max(row.kernel_bytes, 1)
        return Evidence(row.evidence, time, memory, objective, row.original_us)

    @property
    def licenses(self) -> bool:
        """Whether the original may be replaced."""
        if self.objective == "memory":
            return self.memory > 1 and self.time * MEMORY_SLOWDOWN >= 1
        return self._sure_time > 1 and self.time >= self._least_gain

    @property
    def _least_gain(self) -> float:
        """Smallest gain in time that pays for a replacement."""
        least = LEAST_GAIN
        if self.kind == "quickly measured":
            least = _QUICK_GAIN_OF_LONG if self.microseconds > _LONG_MICROSECONDS else _QUICK_GAIN
        return max(least, _GAIN_FOR_MEMORY) if self.memory < 1 else least

    @property
    def reason(self) -> str:
        """The figures, and what would be required of them if they do not suffice."""
        if self.licenses or self.objective == "memory" or self._sure_time <= 1:
            return str(self)
        more = " with more temporary memory" if self.memory < 1 else ""
        return f"{self}; less than {self._least_gain}x the speed{more} is within what measurements differ by"

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Greater for better evidence; relative to the original, since each may have been measured on another day."""
        figures = (self.memory, self._sure_time) if self.objective == "memory" else (self._sure_time, self.memory)
        return self.licenses, *figures

    @property
    def _sure_time(self) -> float:
        return self.time / (SIMULATED_MARGIN if self.kind == "simulated" else 1.0)

    def __str__(self) -> str:
        memory = f"{1 / self.memory:.2f}x its temporary memory"
        if self.memory < _NEXT_TO_NOTHING:
            memory = "temporary memory where that needs next to none"
        return f"{self.kind}: {self.time:.2f}x the original's speed, {memory}"


def ranked(choices: Mapping[str, Choice], objective: str) -> list[tuple[str, Choice]]:
    """Orders implementations: those with evidence first, the best in front; the others, and equal ones, as given."""
    known = {name: _known(choice, objective) for name, choice in choices.items()}
    best = sorted((e.rank for e in known.values() if e is not None), reverse=True)

    def place(item: tuple[str, Choice]) -> int:
        evidence = known[item[0]]
        return len(best) if evidence is None else best.index(evidence.rank)

    return sorted(choices.items(), key=place)


def in_words(order: Sequence[tuple[str, Choice]], objective: str) -> str:
    """Returns why the first of several comes before the others, as the end of a sentence; empty for a single one."""
    if len(order) < 2:
        return ""
    known = [(name, _known(choice, objective)) for name, choice in order]
    if all(evidence is None for _, evidence in known):
        return f"; in the platform's order: {', '.join(name for name, _ in known)}"
    return f"; in the order of evidence: {', '.join(f'{name} {_figure(evidence)}' for name, evidence in known)}"


def _known(choice: Choice, objective: str) -> Evidence | None:
    return Evidence.of(choice.row, objective) if choice.exact else None


def _figure(evidence: Evidence | None) -> str:
    if evidence is None:
        return "(none)"
    figure = f"{1 / evidence.memory:.2f}x memory" if evidence.objective == "memory" else f"{evidence.time:.2f}x"
    return f"{figure} (simulated)" if evidence.kind == "simulated" else figure
