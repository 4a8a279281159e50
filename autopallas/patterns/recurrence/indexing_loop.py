"""Loops that index arrays, as they are looked at: what a step computes, and what is known of it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from autopallas.compat import JaxprAtom, Var
from autopallas.graph import Graph
from autopallas.graph.indexed_arrays import READS, Steps
from autopallas.graph.known_integers import Array, KnownIntegers
from autopallas.graph.loop_slices import is_zero
from autopallas.patterns.recurrence.step import Scan, Step

__all__ = ["IndexingLoop", "variables"]


class IndexingLoop:
    """A loop whose arrays that no step changes are constants."""

    def __init__(self, graph: Graph, scan: Scan, step: Step, integers: KnownIntegers):
        self.graph, self.scan, self.step = graph, scan, step
        self.outer = graph.numbers[scan.outer]
        parts = len(step.constants), len(step.carries)
        read = variables(e.invars[0] for e in step.equations if e.primitive.name in READS)
        unchanged = [v is after and v in read for v, after in zip(step.carries, step.after, strict=True)]
        self.places = [i for i, same in enumerate(unchanged) if not same]
        """The places of the other carried values, among all that the loop carries."""
        same = [i for i, same in enumerate(unchanged) if same]
        first = scan.given[parts[0] : sum(parts)]
        self.unchanged = [(scan.ends[i], first[i]) for i in same]
        self.constants = [*step.constants, *(step.carries[i] for i in same)]
        self.carries = [step.carries[i] for i in self.places]
        self.after = [step.after[i] for i in self.places]
        self.first = [first[i] for i in self.places]
        self.of_constants = [*scan.given[: parts[0]], *(first[i] for i in same)]
        self.of_slices = scan.given[sum(parts) :]
        given = [*self.of_constants, *self.first, *self.of_slices]
        self.steps = Steps(
            step.equations,
            [*self.constants, *self.carries, *step.slices],
            [*self.after, *step.results],
            len(self.constants),
            len(self.carries),
            [self._known(atom, integers) for atom in given],
            {i for i, v in enumerate(self.constants) if is_zero(graph, step.numbers[v])},
            scan.length,
            scan.reverse,
        )

    def _known(self, atom: JaxprAtom, integers: KnownIntegers) -> Array | None:
        if isinstance(atom, Var):
            return integers.of(self.outer[atom])
        value = np.asarray(atom.val, atom.aval.dtype)
        return value if value.dtype.kind in "iub" else None


def variables(atoms: Iterable[JaxprAtom]) -> set[Var]:
    """Returns the variables among some atoms."""
    return {atom for atom in atoms if isinstance(atom, Var)}
