"""Loops that index arrays, in the form of loops that are given slices and give slices.

A loop may read ``x[i]`` and write ``y.at[i].set(...)`` for a number i that follows from the number of the step.  Then x
is an array to be sliced, and y is made of what the loop stacks.  What it reads of y, such as ``y[i - 1]``, is a row
that an earlier step wrote: a carried value.  The derivative of such a loop is another one, which reads the cotangent of
y by slices, and adds slices to the cotangent of x, or to that of y where the next steps read it.  Both have one form
here; what indexes in another way stays as it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopallas.graph import Body, Graph
from autopallas.graph.indexed_arrays import READS, WRITES, IndexedArrays
from autopallas.graph.known_integers import KnownIntegers
from autopallas.numerics.casts import kind_of
from autopallas.patterns.match import Mismatch
from autopallas.patterns.recurrence.indexing_loop import IndexingLoop, variables
from autopallas.patterns.recurrence.sliced_form import Refused, SlicedForm
from autopallas.patterns.recurrence.step import Scan, Step, needed

__all__ = ["by_slices", "without_counters"]

_MOST_STEPS = 2**20
"""Largest number of steps whose positions are looked at one by one."""
_OF_ARRAYS = READS | WRITES | {"add", "add_any"}
"""Primitives that read what is a carried array of slices."""
_ROUNDS = 8
"""How often a loop is looked at anew without the arrays that turned out to be indexed in another way."""


def by_slices(graph: Graph, scan: Scan, integers: KnownIntegers) -> Scan:
    """Returns the form of a loop by slices; the loop as it is where there is none.

    Args:
      graph: the program.
      scan: the loop.
      integers: what the program knows of integers.
    """
    if not 0 < scan.length <= _MOST_STEPS or not any(name in READS or name in WRITES for name in _names(scan.body)):
        return scan
    try:
        step = Step.of(graph, scan)
    except Mismatch:  # said of the loop, where it might be a site
        return scan
    return _form(IndexingLoop(graph, scan, step, integers))


def _names(body: Body) -> list[str]:
    return [equation.primitive.name for own in body.walk() for equation in own.equations]


def _form(loop: IndexingLoop) -> Scan:
    """Returns a loop by slices, or as it was."""
    other = variables(a for e in loop.step.equations if e.primitive.name not in _OF_ARRAYS for a in e.invars)
    candidates = frozenset(i for i, v in enumerate(loop.carries) if v.aval.shape and v not in other)
    arrays = frozenset(v for v in loop.constants if v.aval.shape)
    for _ in range(_ROUNDS):
        found = IndexedArrays(loop.steps, candidates, arrays, late=loop.scan.is_backward)
        plan = found.plan()
        try:
            if found.refused:
                raise Refused(*found.refused)
            if not plan.actions and not found.reads:
                return loop.scan
            return SlicedForm(loop, plan, found.reads).scan()
        except Refused as refused:
            candidates -= refused.carried
    return loop.scan


def without_counters(scan: Scan, step: Step, wanted: Sequence[int]) -> tuple[Scan, Step, list[int]]:
    """Returns a loop, its step, and the places of the results that are wanted, without the carried integers from which
    nothing else is computed that is carried or wanted."""
    idle = {i for i, v in enumerate(step.carries) if not v.aval.shape and kind_of(v.aval.dtype) in "iu"}.difference(
        wanted
    )
    if not idle:
        return scan, step, list(wanted)
    carried = scan.carried
    outputs = [*(a for i, a in enumerate(step.after) if i not in idle)]
    outputs += [step.results[i - carried] for i in wanted if i >= carried]
    read = variables(a for e in needed(step.equations, outputs) for a in e.invars) | variables(outputs)
    kept = [i for i, v in enumerate(step.carries) if i not in idle or v in read]
    moved = {old: new for new, old in enumerate([*kept, *range(carried, len(scan.ends))])}
    first = len(scan.constants)
    step = replace(step, carries=[step.carries[i] for i in kept], after=[step.after[i] for i in kept])
    scan = replace(
        scan,
        carries=step.carries,
        given=[*scan.given[:first], *(scan.given[first + i] for i in kept), *scan.given[first + carried :]],
        ends=[scan.ends[i] for i in moved],
        tables={v: moved[i] for v, i in scan.tables.items()},
        written={moved[i]: own for i, own in scan.written.items()},
        step=step,
    )
    return scan, step, [moved[i] for i in wanted]
