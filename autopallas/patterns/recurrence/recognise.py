"""Finds recurrences: loops whose carried values are affine in themselves, with the backward that the program holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import NamedTuple

import jax.numpy as jnp

from autopallas import jaxprs
from autopallas.compat import Var
from autopallas.faults import contained
from autopallas.graph import Body, Graph
from autopallas.graph.edit import surviving
from autopallas.graph.indexed_arrays import READS, WRITES
from autopallas.graph.known_integers import KnownIntegers
from autopallas.kernels.recurrence.operation import OPERATION
from autopallas.patterns.advice import COUNTED, FEW_STEPS, LOOP_GRADIENT
from autopallas.patterns.match import Match, Mismatch, NearMiss, bounded
from autopallas.patterns.recurrence.assemble import Analyses, Assembly
from autopallas.patterns.recurrence.by_slices import by_slices, without_counters
from autopallas.patterns.recurrence.interpret import RULES
from autopallas.patterns.recurrence.nested_loops import written_out
from autopallas.patterns.recurrence.rules import restored
from autopallas.patterns.recurrence.step import Scan, Step, is_inexact, scans
from autopallas.patterns.recurrence.transpose import Lead, Pair, Pairing
from autopallas.patterns.recurrence.while_loops import while_loops

__all__ = ["find"]

_FEWEST = 4
"""Smallest number of steps of a loop that is looked at."""
_SHORTEST = 16
"""Smallest number of steps of a loop that is a site; of a shorter one is said that it is a recurrence."""


@dataclass(eq=False, slots=True)
class _Candidate:
    """A loop that is affine in what it carries.

    Attributes:
      scan: the loop.
      step: its step.
      backwards: the reversed loops that read what depends on its carried values.
      others: those that read no more than other loops may have too, such as its slices; the most likely backward first.
      stacks: whether one of the others reads what the loop computes of its slices, and stacks.
      gated: whether a state is multiplied from step to step; of a loop that only adds up, as that of a likelihood, no
        near miss is told.
    """

    scan: Scan
    step: Step
    backwards: list[Scan]
    others: list[Scan]
    stacks: bool
    gated: bool

    def without_counters(self, wanted: Sequence[int]) -> tuple[_Candidate, list[int]]:
        """Returns the loop without numbers of steps that nothing needs, and the places of the results that are
        wanted."""
        scan, step, places = without_counters(self.scan, self.step, wanted)
        return replace(self, scan=scan, step=step), places


def find(graph: Graph, assume_finite: bool = True) -> tuple[list[Match], list[NearMiss]]:
    """Finds every recurrence in a graph, and the near misses."""
    integers = KnownIntegers(graph)
    forwards, backwards = _divided(graph, integers)
    if not forwards:
        return [], []
    forwards, backwards = ([_form(graph, scan, integers) for scan in own] for own in (forwards, backwards))
    readers = _Readers(graph, backwards)
    analyses = Analyses(graph, assume_finite)
    misses: list[NearMiss] = []
    candidates: list[_Candidate] = []
    for scan in forwards:
        with contained(jaxprs.location(scan.equation)):
            gated = False
            if 0 < scan.length < _SHORTEST:
                misses += _few_steps(graph, scan, analyses)
                continue
            try:
                with bounded(graph):
                    step = Step.of(graph, scan)
                    whole = written_out(step)
                    may_be_affine, gated = _paths_of(whole)
                    if gated and not scan.length:
                        raise Mismatch("how often it runs is not known while the program is traced", advice=COUNTED)
                    if scan.length and (may_be_affine or gated):
                        analyses.check(whole)
                        candidates.append(_Candidate(scan, step, *readers.of(scan, step), gated))
            except Mismatch as mismatch:
                if gated:
                    misses.append(_miss(graph, scan, mismatch))
    if not candidates:
        return [], misses
    matches: list[Match] = []
    finder = _Finder(graph, candidates, analyses)
    for candidate in candidates:
        with contained(jaxprs.location(candidate.scan.equation)):
            try:
                with bounded(graph):
                    matches.append(finder.match(candidate))
            except Mismatch as mismatch:
                if candidate.gated:
                    misses.append(_miss(graph, candidate.scan, mismatch))
    return matches, misses


def _is_integer(variable: Var) -> bool:
    return bool(jnp.issubdtype(variable.aval.dtype, jnp.integer))


def _divided(graph: Graph, integers: KnownIntegers) -> tuple[list[Scan], list[Scan]]:
    """Returns the loops of the program's forward that carry floating values, and those that autodiff reversed."""
    forwards: list[Scan] = []
    backwards: list[Scan] = []
    for scan in (*scans(graph), *while_loops(graph, integers)):
        if scan.is_backward:
            backwards.append(scan)
        elif _is_looked_at(scan) and any(map(is_inexact, scan.carries)):
            if not any(0 in v.aval.shape for v in scan.inputs):  # an empty batch
                forwards.append(scan)
    return forwards, backwards


def _form(graph: Graph, scan: Scan, integers: KnownIntegers) -> Scan:
    """Returns the form of a loop by slices, where there is one."""
    with contained(jaxprs.location(scan.equation)):
        return by_slices(graph, scan, integers)
    return scan


def _few_steps(graph: Graph, scan: Scan, analyses: Analyses) -> list[NearMiss]:
    """Returns that a loop is too short, if it is a recurrence."""
    try:
        with bounded(graph):
            step = written_out(Step.of(graph, scan))
            may_be_affine, gated = _paths_of(step)
            if may_be_affine and gated:
                analyses.check(step)
                reason = f"it has no more than {scan.length} steps, and loops are replaced from {_SHORTEST} steps on"
                return [_miss(graph, scan, Mismatch(reason, advice=FEW_STEPS))]
    except Mismatch:
        pass
    return []


def _is_looked_at(scan: Scan) -> bool:
    """Returns whether a loop is looked at: it has several steps, or counts and indexes but may stop at any of them."""
    if scan.length:
        return scan.length >= _FEWEST
    return any(e.primitive.name in READS for e in scan.body.equations)


_MOST_READERS = 32
_MOST_OTHERS = 8


class _Readers:
    """Knows which reversed loops read a value."""

    def __init__(self, graph: Graph, backwards: Sequence[Scan]):
        self.graph = graph
        self.of_number: dict[int, list[Scan]] = {}
        for backward in backwards:
            numbers = backward.numbers(graph)
            for number in dict.fromkeys(numbers[v] for v in backward.inputs):
                self.of_number.setdefault(number, []).append(backward)

    def of(self, scan: Scan, step: Step) -> tuple[list[Scan], list[Scan], bool]:
        """Returns the reversed loops, as a candidate has them.

        What several loops compute of slices that they share has one number.  Readers of a value that many loops read do
        not count, nor do those of integers: loops of one length have the same numbers of steps.
        """

        def fits(backward: Scan) -> bool:
            return backward.length == scan.length and backward.reverse != scan.reverse

        bits = step.dependencies()
        made = [v for e in step.equations for v in e.outvars if v in step.numbers and not _is_integer(v)]
        own = [v for v in (*step.carries, *made) if bits[v] and not _is_integer(v)]
        backwards = dict.fromkeys(b for v in own for b in self.of_number.get(step.numbers[v], ()) if fits(b))
        counts: Counter[Scan] = Counter()
        stacks = False
        for variable in (*step.slices, *(v for v in made if not bits[v])):
            readers = self.of_number.get(step.numbers[variable], ())
            if len(readers) <= _MOST_READERS:
                others = [b for b in readers if b not in backwards and fits(b)]
                counts.update(others)
                stacks |= bool(others) and variable not in step.slices
        return [*backwards], [b for b, _ in counts.most_common(_MOST_OTHERS)], stacks


def _miss(graph: Graph, scan: Scan, mismatch: Mismatch) -> NearMiss:
    numbers = [graph.numbers[scan.outer][v] for v in scan.equation.outvars]
    location, last = jaxprs.location(scan.equation), max(numbers, default=-1)
    return NearMiss(OPERATION.name, location, mismatch.reason, last, advice=mismatch.advice)


_PATH = frozenset({
    "add", "sub", "mul", "div", "neg", "select_n", "broadcast_in_dim", "transpose", "reshape", "squeeze", "add_any",
    "convert_element_type", "max", "min", "clamp", "reduce_sum", *READS, *WRITES,
})  # fmt: skip
_PARTS = frozenset({"slice", "concatenate", "split", "pad", "stack", "unstack", "rev"}) | READS | WRITES
"""What takes an array apart and puts it together: a register whose numbers move on by one place, or one array of
several states. No form of a state passes through it, though what it computes may be affine."""


def _paths_of(step: Step) -> tuple[bool, bool]:
    """Returns (whether a carried value may be affine in itself, whether one gets to itself by additions and at least
    one multiplication, and not through a matrix product or a loop, or through matrix products and parts of arrays
    alone: a recurrence but for what the reason of a near miss says)."""
    paths = {v: _Paths(1 << i, 1 << i, 0, 0, 0, 0) for i, v in enumerate(step.carries) if is_inexact(v)}
    for equation in step.equations:
        read = [paths[a] for a in equation.invars if isinstance(a, Var) and a in paths]
        if not read:
            continue
        depends, direct, scaled, through, opaque, unknown = (reduce(or_, bits) for bits in zip(*read, strict=True))
        name = equation.primitive.name
        if name in ("dot_general", "conv_general_dilated", "scan", "while", "cond"):
            through = depends
        if name not in RULES:
            opaque = depends
            if name not in _PARTS:
                unknown = depends
        if name in ("mul", "div"):
            scaled = direct
        elif name not in _PATH and name not in _PARTS:
            direct = scaled = 0
        paths.update(dict.fromkeys(equation.outvars, _Paths(depends, direct, scaled, through, opaque, unknown)))
    found = [paths.get(after) if isinstance(after, Var) else None for after in step.after]
    own = [(path, 1 << i) for i, path in enumerate(found) if path is not None]
    may_be_affine = any(path.depends & ~path.opaque & bit for path, bit in own)
    gated = (path.scaled & ~path.through | path.through & ~path.unknown for path, _ in own)
    return may_be_affine, any(path & bit for path, (_, bit) in zip(gated, own, strict=True))


class _Paths(NamedTuple):
    """From which carried values paths lead to a variable, as bits.

    Attributes:
      depends: any path.
      direct: a path of additions, multiplications and changes of layout.
      scaled: such a path with a multiplication.
      through: a path through a matrix product or a loop.
      opaque: a path through an equation of which affine results are not known.
      unknown: such a path through another equation than one that takes arrays apart or puts them together.
    """

    depends: int
    direct: int
    scaled: int
    through: int
    opaque: int
    unknown: int


def _cotangents(graph: Graph, candidates: Sequence[_Candidate]) -> dict[int, list[int]]:
    """Returns the results of the reversed loops, each with what its loop reads beside the loops' results: the cotangent
    of a loop's result is among it, and may be computed from that result.

    A value that was there before its loop, such as a cotangent that it carries as it is, is no result.
    """
    stacked = {graph.numbers[c.scan.outer][v] for c in candidates for v in c.scan.equation.outvars}
    found: dict[int, list[int]] = {}
    for backward in dict.fromkeys(b for c in candidates for b in (*c.backwards, *c.others)):
        numbers = graph.numbers[backward.outer]
        read = [n for a in backward.equation.invars if isinstance(a, Var) and (n := numbers[a]) not in stacked]
        for number in map(numbers.__getitem__, backward.equation.outvars):
            defined = graph.definitions.get(number)
            if number >= 0 and number not in read and (defined is None or defined.equation is backward.equation):
                found[number] = read
    return found


def _read(graph: Graph, alive: frozenset[int]) -> frozenset[int]:
    """Returns the values that something reads, of those that loops give: these give what they carry anyway."""
    found: set[int] = set()
    for body in graph.numbers:
        for position in body.children:
            for number in map(graph.numbers[body].__getitem__, body.equations[position].outvars):
                users = graph.users.get(number, ())
                read = (not alive.isdisjoint(user.outputs) or bool(user.equation.effects) for user in users)
                if number in alive and (number in graph.returned or any(read)):
                    found.add(number)
    return frozenset(found)


class _Finder:
    """Makes matches of the candidates of one program."""

    def __init__(self, graph: Graph, candidates: Sequence[_Candidate], analyses: Analyses):
        self.graph, self.analyses = graph, analyses
        self.pairing = Pairing(graph)
        self.programs: dict[Hashable, Body] = {}
        self.read = _read(graph, surviving(graph))
        cotangents = _cotangents(graph, candidates)
        self.read_forward = _read(graph, surviving(graph, cotangents, cotangents)) if cotangents else self.read
        """What the program reads beside the reversed loops."""
        self.nodes = {id(node.equation): node for node in graph.nodes if node.name in ("scan", "while")}

    def match(self, candidate: _Candidate) -> Match:
        """Returns the match of a loop.

        Raises:
          Mismatch: there is none.
        """
        scan = candidate.scan
        numbers = scan.end_numbers(self.graph)
        if self.read.isdisjoint(numbers):
            raise Mismatch("nothing needs its results", advice=LOOP_GRADIENT)
        given = {self.graph.numbers[scan.outer][a] for a in scan.equation.invars if isinstance(a, Var)}
        first = [(i, number) for i, number in enumerate(numbers) if number not in numbers[:i]]
        own = [(i, number) for i, number in first if number not in given]  # it may stack what it reads
        pairs: list[Pair] = []
        if candidate.backwards or candidate.others:
            whole, needed = candidate.without_counters([i for i, number in own if number in self.read_forward])
            scan, (step, pairs) = whole.scan, self._pairs(whole, needed)
        if not pairs:
            whole, needed = candidate.without_counters([i for i, number in own if number in self.read])
            scan = whole.scan
            step = whole.step.with_results([i - scan.carried for i in needed if i >= scan.carried])
        if not needed:
            raise Mismatch("nothing needs its results", advice=LOOP_GRADIENT)
        lead = pairs[0].lead if pairs else Lead.of(self.graph, scan)
        assembly = Assembly(self.graph, scan, written_out(step), lead, needed, self.nodes, self.programs)
        return assembly.match(pairs, self.analyses)

    def _pairs(self, candidate: _Candidate, needed: Sequence[int]) -> tuple[Step, list[Pair]]:
        """Returns the step whose derivative the program holds, and the pairs."""
        scan = candidate.scan
        stacked = [i for i in needed if i >= scan.carried]
        if needed:
            step = candidate.step.with_results([i - scan.carried for i in stacked])
            calls = restored(self.graph, step.equations)
            for own in [step] if calls is None else [step, step.with_equations(calls)]:
                pairs = self._of_step(candidate, own, needed)
                if pairs:
                    return own, pairs
        if not candidate.backwards and not candidate.stacks:
            return candidate.step, []
        if not needed:
            raise Mismatch("nothing needs its results", advice=LOOP_GRADIENT)
        raise Mismatch(
            "the reversed loop that reads its values could not be shown to be its backward", advice=LOOP_GRADIENT
        )

    def _of_step(self, candidate: _Candidate, step: Step, results: Sequence[int]) -> list[Pair]:
        """Returns the pairs with every loop that reads what the candidate computes; without such a loop, with the first
        other one that is its backward."""
        found: list[Pair] = []
        for backward in candidate.backwards:
            pair = self.pairing.pair(candidate.scan, step, results, backward, self.read)
            if pair is None or (found and pair.lead != found[0].lead):
                return []
            found.append(pair)
        for backward in () if found else candidate.others:
            pair = self.pairing.pair(candidate.scan, step, results, backward, self.read)
            if pair is not None:
                return [pair]
        return found
