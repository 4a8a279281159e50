"""Finds recurrences: loops whose carried values are affine in themselves, with the backward that the program holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import NamedTuple

import jax
import jax.numpy as jnp

from autopallas import compat, jaxprs
from autopallas.compat import ArrayFunction, JaxprAtom, JaxprEqn, Literal, Var
from autopallas.faults import contained
from autopallas.graph import Body, Graph, Node, flatten
from autopallas.graph.array_slices import Place, plus_slices, slices_at, with_slices
from autopallas.graph.edit import surviving
from autopallas.graph.extract import closed, copied
from autopallas.graph.indexed_arrays import READS, WRITES
from autopallas.graph.known_integers import KnownIntegers
from autopallas.kernels.recurrence.forms import is_product, products_apart
from autopallas.kernels.recurrence.loop import Loop
from autopallas.kernels.recurrence.operation import OPERATION
from autopallas.kernels.recurrence.site import RecurrenceSite
from autopallas.kernels.recurrence.spec import RecurrenceSpec
from autopallas.kernels.recurrence.structure import Known, MatrixState
from autopallas.patterns.advice import AT_HAND, COUNTED, LOOP_GRADIENT
from autopallas.patterns.carry import is_available
from autopallas.patterns.match import BackwardMatch, Match, Mismatch, NearMiss, bounded
from autopallas.patterns.recurrence.all_steps import check_all_steps
from autopallas.patterns.recurrence.by_slices import by_slices, without_counters
from autopallas.patterns.recurrence.carries import carries_of, check_delta_rules, matrix_states
from autopallas.patterns.recurrence.counted import while_loops
from autopallas.patterns.recurrence.interpret import RULES
from autopallas.patterns.recurrence.rules import restored
from autopallas.patterns.recurrence.step import Scan, Step, Written, scans
from autopallas.patterns.recurrence.transpose import Lead, Pair, Pairing, constant_atom, is_scalar_literal, program_key

__all__ = ["find"]

_SHORTEST = 16
"""Smallest number of steps of a loop that is looked at."""


@dataclass(eq=False, slots=True)
class _Candidate:
    """A loop that is affine in what it carries.

    Attributes:
      scan: the loop.
      step: its step.
      backwards: the reversed loops that read what depends on its carried values.
      others: those that read no more than other loops may have too, such as its slices; the most likely backward first.
      stacks: whether one of the others reads what the loop computes of its slices, and stacks.
    """

    scan: Scan
    step: Step
    backwards: list[Scan]
    others: list[Scan]
    stacks: bool

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
    analyses = _Analyses(graph, assume_finite)
    misses: list[NearMiss] = []
    candidates: list[_Candidate] = []
    for scan in forwards:
        with contained(jaxprs.location(scan.equation)):
            gated = False
            try:
                with bounded(graph):
                    step = Step.of(graph, scan)
                    may_be_affine, gated = _paths_of(step)
                    if gated and not scan.length:
                        raise Mismatch("how often it runs is not known while the program is traced", advice=COUNTED)
                    if scan.length and (may_be_affine or gated):
                        analyses.check(step)
                        candidates.append(_Candidate(scan, step, *readers.of(scan, step)))
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
                misses.append(_miss(graph, candidate.scan, mismatch))
    return matches, misses


def _is_floating(variable: Var) -> bool:
    return bool(jnp.issubdtype(variable.aval.dtype, jnp.inexact))


def _is_integer(variable: Var) -> bool:
    return bool(jnp.issubdtype(variable.aval.dtype, jnp.integer))


def _divided(graph: Graph, integers: KnownIntegers) -> tuple[list[Scan], list[Scan]]:
    """Returns the loops of the program's forward that carry floating values, and those that autodiff reversed."""
    forwards: list[Scan] = []
    backwards: list[Scan] = []
    for scan in (*scans(graph), *while_loops(graph, integers)):
        if scan.is_backward:
            backwards.append(scan)
        elif _is_long(scan) and any(map(_is_floating, scan.carries)):
            if not any(0 in v.aval.shape for v in scan.inputs):  # an empty batch
                forwards.append(scan)
    return forwards, backwards


def _form(graph: Graph, scan: Scan, integers: KnownIntegers) -> Scan:
    """Returns the form of a loop by slices, where there is one."""
    with contained(jaxprs.location(scan.equation)):
        return by_slices(graph, scan, integers)
    return scan


def _is_long(scan: Scan) -> bool:
    """Returns whether a loop is looked at: it has many steps, or counts and indexes but may stop at any of them."""
    if scan.length:
        return scan.length >= _SHORTEST
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


def _paths_of(step: Step) -> tuple[bool, bool]:
    """Returns (whether a carried value may be affine in itself, whether one gets to itself by additions and at least
    one multiplication, and not through a matrix product or a loop: a recurrence but for what the reason of a near miss
    says)."""
    paths = {v: _Paths(1 << i, 1 << i, 0, 0, 0) for i, v in enumerate(step.carries) if _is_floating(v)}
    for equation in step.equations:
        read = [paths[a] for a in equation.invars if isinstance(a, Var) and a in paths]
        if not read:
            continue
        depends, direct, scaled, through, opaque = (reduce(or_, bits) for bits in zip(*read, strict=True))
        name = equation.primitive.name
        if name in ("dot_general", "conv_general_dilated", "scan", "while", "cond"):
            through = depends
        if name not in RULES:
            opaque = depends
        if name in ("mul", "div"):
            scaled = direct
        elif name not in _PATH:
            direct = scaled = 0
        paths.update(dict.fromkeys(equation.outvars, _Paths(depends, direct, scaled, through, opaque)))
    found = [paths.get(after) if isinstance(after, Var) else None for after in step.after]
    own = [(path, 1 << i) for i, path in enumerate(found) if path is not None]
    may_be_affine = any(path.depends & ~path.opaque & bit for path, bit in own)
    return may_be_affine, any(path.scaled & ~path.through & bit for path, bit in own)


class _Paths(NamedTuple):
    """From which carried values paths lead to a variable, as bits.

    Attributes:
      depends: any path.
      direct: a path of additions, multiplications and changes of layout.
      scaled: such a path with a multiplication.
      through: a path through a matrix product or a loop.
      opaque: a path through an equation of which affine results are not known.
    """

    depends: int
    direct: int
    scaled: int
    through: int
    opaque: int


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

    def __init__(self, graph: Graph, candidates: Sequence[_Candidate], analyses: _Analyses):
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
        numbers = [self.graph.numbers[scan.outer][v] for v in scan.ends]
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
        assembly = _Assembly(self.graph, scan, step, lead, needed, self.nodes, self.programs)
        return assembly.match(pairs, self.analyses)

    def _pairs(self, candidate: _Candidate, needed: Sequence[int]) -> tuple[Step, list[Pair]]:
        """Returns the step whose derivative the program holds, and the pairs."""
        if len(needed) == 1:
            scan, (result,) = candidate.scan, needed
            places = [result - scan.carried] if result >= scan.carried else []
            step = candidate.step.with_results(places)
            calls = restored(self.graph, step.equations)
            for own in [step] if calls is None else [step, step.with_equations(calls)]:
                pairs = self._of_step(candidate, own, result)
                if pairs:
                    return own, pairs
        if not candidate.backwards and not candidate.stacks:
            return candidate.step, []
        if not needed:
            raise Mismatch("nothing needs its results", advice=LOOP_GRADIENT)
        if len(needed) > 1:
            raise Mismatch("its backward gets the cotangents of several results", advice=LOOP_GRADIENT)
        raise Mismatch(
            "the reversed loop that reads its values could not be shown to be its backward", advice=LOOP_GRADIENT
        )

    def _of_step(self, candidate: _Candidate, step: Step, result: int) -> list[Pair]:
        """Returns the pairs with every loop that reads what the candidate computes; without such a loop, with the first
        other one that is its backward."""
        found: list[Pair] = []
        for backward in candidate.backwards:
            pair = self.pairing.pair(candidate.scan, step, result, backward, self.read)
            if pair is None or (found and pair.lead != found[0].lead):
                return []
            found.append(pair)
        for backward in () if found else candidate.others:
            pair = self.pairing.pair(candidate.scan, step, result, backward, self.read)
            if pair is not None:
                return [pair]
        return found


@dataclass(frozen=True, slots=True)
class _Analysis:
    """What is known of a step, whatever the names of its variables.

    Attributes:
      affine: the places of the carried values that are affine in themselves.
      states: those that are matrices.
      known: the other carried values, in the order in which they can be computed.
      sizes: the size of each label.
      products: how many matrix products can be taken out of the loop.
    """

    affine: list[int]
    states: list[MatrixState]
    known: list[Known]
    sizes: dict[int, int]
    products: int


class _Analyses:
    """Analyses steps, equal ones once."""

    def __init__(self, graph: Graph, assume_finite: bool):
        self.graph, self.assume_finite = graph, assume_finite
        self._checked: set[Hashable] = set()
        self._found: dict[Hashable, _Analysis] = {}

    def check(self, step: Step) -> None:
        """Checks that some carried values are affine in themselves, and the others can be known.

        Raises:
          Mismatch: they are not.
        """
        key = self._key(step, program_key(self.graph, step.inputs, step.equations, step.after))
        if key not in self._checked:
            carries_of(step.with_results(()))
            self._checked.add(key)

    def of(self, step: Step, loop: Loop) -> _Analysis:
        """Returns the analysis of a step and its loop."""
        assert isinstance(loop.key, tuple)
        key = self._key(step, loop.key[1])
        if key not in self._found:
            check_all_steps(step.equations)
            carries = carries_of(step)
            states, others = matrix_states(step, carries) if self.assume_finite else ([], carries.states)
            check_delta_rules(carries, others)
            known = [*carries.known, *(Known(place, "scanned") for place in others)]
            known += [Known(place, "last") for place in carries.last]
            before, after = products_apart(loop, known)
            products = len(before) + sum(map(is_product, after))
            sizes = carries.interpretation.labels.sizes
            self._found[key] = _Analysis(carries.states, states, known, sizes, products)
        return self._found[key]

    @staticmethod
    def _key(step: Step, key: Hashable) -> Hashable:
        """Returns the key of a step of which the constants that are zero are known."""
        parts = len(step.constants), len(step.carries)
        return key, parts, tuple(i for i, v in enumerate(step.constants) if v in step.zeros)


class _Assembly:
    """Makes the match of one loop."""

    def __init__(
        self,
        graph: Graph,
        scan: Scan,
        step: Step,
        lead: Lead,
        needed: Sequence[int],
        nodes: dict[int, Node],
        programs: dict[Hashable, Body],
    ):
        self.graph, self.scan, self.step, self.lead, self.needed, self.nodes = graph, scan, step, lead, needed, nodes
        self.programs = programs
        self.numbers = graph.numbers[scan.outer]
        self.inputs: list[Var] = []
        self.operands: list[int] = []
        self.equations: list[JaxprEqn] = []
        self.outer: list[Node] = []
        self.of_source: dict[int, int] = {}
        self.of_place: dict[int, int] = {}
        self.of_array: dict[int, int] = {}
        self.of_before: dict[int, int] = {}
        self.arrays: dict[int, JaxprAtom] = {}
        """The arrays that the loop reads by slices, by their numbers."""
        self.before: dict[int, JaxprAtom] = {}
        """The arrays into which the loop's results are written, by the places of these."""
        self.known: dict[int, JaxprAtom] = {}
        """What is known by its number."""

    def match(self, pairs: Sequence[Pair], analyses: _Analyses) -> Match:
        """Returns the match."""
        scan = self.scan
        atoms, written = self._scan_inputs(), self._as_written()
        loop = self._loop(atoms)
        site = self._site(loop, analyses.of(self.step, loop))
        results = [Var(v.aval) for v in scan.equation.outvars]
        whole = scan.equation.replace(invars=written, outvars=results)
        given = [results[scan.equation.outvars.index(scan.ends[i])] for i in self.needed]
        original = jaxprs.without_dead_code(closed(self.inputs, given, [*self.equations, whole]))
        numbers = tuple(self.numbers[scan.ends[i]] for i in self.needed)
        backwards = tuple(self._backward(pair) for pair in pairs)
        return Match(
            op=OPERATION.name,
            site=site,
            direction="forward+backward" if backwards else "forward",
            operands=tuple(self.operands),
            results=numbers,
            equations=(*self.outer, self.nodes[id(scan.equation)]),
            original=original,
            body=scan.outer,
            location=jaxprs.location(scan.equation),
            backwards=backwards,
            assumptions=site.spec.assumptions(),
        )

    # ------------------------------------------------------------------ operands

    def _scan_inputs(self) -> list[JaxprAtom]:
        """Returns the inputs of the loop in terms of operands, which it makes; what is made of literals is none."""
        scan, constants = self.scan, len(self.scan.constants)
        atoms: list[JaxprAtom] = []
        variables: dict[int, JaxprAtom] = {}
        for source in self.lead.sources:
            variables[source] = self._source(source, self.of_source, source)
        names = {number: atom for number, atom in variables.items() if isinstance(atom, Var)}
        self.equations += copied(self.graph, self.lead.nodes, names)
        self.outer += self.lead.nodes
        self.known |= names
        for end, written in scan.written.items():
            if end in self.needed or end in scan.tables.values():
                self.before[end] = self._given(written.first, self.of_before, end)
        for position, (variable, atom) in enumerate(zip(scan.inputs, scan.given, strict=True)):
            place = scan.places.get(variable)
            if position < constants and isinstance(atom, Var):
                atoms.append(constant_atom(self.graph, self.numbers[atom], names))
            elif place is None:
                atoms.append(self._given(atom, self.of_place, position - constants))
            else:
                table = scan.tables.get(variable)
                array = self._array(atom) if table is None else self.before[table]
                atoms.append(self._sliced(array, place, variable))
        return atoms

    def _as_written(self) -> list[JaxprAtom]:
        """Returns the inputs of the loop as the program has it."""
        found: list[JaxprAtom] = []
        for atom in self.scan.equation.invars:
            number = None if isinstance(atom, Literal) else self.numbers[atom]
            if number is not None and number not in self.known:
                if is_scalar_literal(self.graph, number):
                    self.known[number] = constant_atom(self.graph, number, {})
                else:
                    self._source(number, {}, 0)
            found.append(atom if number is None else self.known[number])
        return found

    def _given(self, atom: JaxprAtom, positions: dict[int, int], key: int) -> JaxprAtom:
        return atom if isinstance(atom, Literal) else self._source(self.numbers[atom], positions, key)

    def _array(self, atom: JaxprAtom) -> JaxprAtom:
        """Returns an array that is read by slices; all that read it share the operand."""
        assert isinstance(atom, Var)
        number = self.numbers[atom]
        if number not in self.arrays:
            self.arrays[number] = self._source(number, self.of_array, number)
        return self.arrays[number]

    def _sliced(self, array: JaxprAtom, place: Place, like: Var) -> JaxprAtom:
        """Returns the slices of an array, each of the shape of a variable."""

        def slices(x: jax.Array) -> jax.Array:
            return slices_at(x, place).reshape(self.scan.length, *like.aval.shape)

        return self._traced(("slices", place, like.aval.shape), slices, array)

    def _traced(self, key: Hashable, function: ArrayFunction, *atoms: JaxprAtom) -> JaxprAtom:
        """Returns what a function makes of operands, by equations that it appends; of one key there is one function."""
        key = key, tuple(a.aval for a in atoms)
        if key not in self.programs:
            with compat.on_mesh_of([a.aval for a in atoms]):
                made = compat.make_jaxpr(function, *(compat.typed_like(a.aval) for a in atoms))
            self.programs[key] = flatten(made)
        body = self.programs[key]
        if body.constvars:
            raise Mismatch("it writes slices in an order that is no sequence", advice=LOOP_GRADIENT)
        names: dict[Var, JaxprAtom] = dict(zip(body.invars, atoms, strict=True))

        def named(atom: JaxprAtom) -> JaxprAtom:
            return atom if isinstance(atom, Literal) else names[atom]

        for equation in body.equations:
            outputs = [Var(v.aval) for v in equation.outvars]
            self.equations.append(equation.replace(invars=[named(a) for a in equation.invars], outvars=outputs))
            names.update(zip(equation.outvars, outputs, strict=True))
        return named(body.outvars[0])

    def _source(self, number: int, positions: dict[int, int], key: int) -> Var:
        """Returns an operand, whose position it enters, or the value as it is made of literals."""
        made = self._of_literals(number)
        if made is None:
            positions[key] = len(self.operands)
            made = Var(self.graph.avals[number])
            self.inputs.append(made)
            self.operands.append(number)
        self.known.setdefault(number, made)
        return made

    def _of_literals(self, number: int) -> Var | None:
        node = self.graph.definitions.get(number)
        if node is None or len(node.outputs) != 1 or jaxprs.bodies(node.equation):
            return None
        if not all(n in self.graph.literals and not self.graph.shape(n) for n in node.inputs):
            return None
        variables: dict[int, Var] = {}
        self.equations += copied(self.graph, [node], variables)
        return variables[number]

    # ------------------------------------------------------------------ the site

    def _tail(self) -> tuple[list[Var], list[JaxprEqn], list[JaxprAtom]] | None:
        """Returns a program from the operands and what the loop gives to the site's results; None if these are the
        same."""
        scan = self.scan
        if not any(end in scan.written for end in self.needed):
            return None
        before, self.equations = self.equations, [*self.equations]
        given: list[Var] = []
        results: list[JaxprAtom] = []
        for end in self.needed:
            like, own = scan.ends[end].aval, scan.written.get(end)
            if own is not None:
                row = scan.outputs[end].aval
                like = compat.array_type((scan.length, *row.shape), row.dtype, [row], row)
            given.append(Var(like))
            results.append(given[-1] if own is None else self._put(own, self.before[end], given[-1]))
        equations, self.equations = jaxprs.live_equations(self.equations, results), before
        return [*self.inputs, *given], equations, results

    def _put(self, own: Written, array: JaxprAtom, slices: JaxprAtom) -> JaxprAtom:
        """Returns an array with what a loop stacks in its slices, or added to them."""

        def put(array: jax.Array, slices: jax.Array) -> jax.Array:
            shape = array.shape[: own.place.axis], array.shape[own.place.axis + 1 :]
            rows = slices.reshape(slices.shape[0], *shape[0], 1, *shape[1])
            return (plus_slices if own.adds else with_slices)(array, own.place, rows)

        return self._traced(("put", own.place, own.adds), put, array, slices)

    def _loop(self, atoms: Sequence[JaxprAtom]) -> Loop:
        step, scan = self.step, self.scan
        results = [*step.after, *step.results]
        tail = self._tail()
        key = (
            program_key(self.graph, self.inputs, self.equations, atoms),
            program_key(self.graph, step.inputs, step.equations, results),
            None if tail is None else program_key(self.graph, *tail),
        )
        return Loop(
            key=key,
            lead=closed(self.inputs, atoms, self.equations),
            step=closed(step.inputs, results, step.equations),
            tail=None if tail is None else closed(tail[0], tail[2], tail[1]),
            constants=len(scan.constants),
            carried=scan.carried,
            length=scan.length,
            reverse=scan.reverse,
        )

    def _site(self, loop: Loop, found: _Analysis) -> RecurrenceSite:
        form = self._form(loop, found)
        states, sizes = found.states, found.sizes
        stacked = {place: i for i, place in enumerate(i for i in self.needed if i >= self.scan.carried)}
        chosen = tuple(i if i < self.scan.carried else self.scan.carried + stacked[i] for i in self.needed)
        used = {label for state in states for label in _labels_of(state)}
        return RecurrenceSite(
            loop=loop,
            form=form,
            states=tuple(states) if form.is_matrix else (),
            known=tuple(found.known),
            sizes=tuple((label, size) for label, size in sizes.items() if label in used),
            results=chosen,
        )

    def _form(self, loop: Loop, found: _Analysis) -> RecurrenceSpec:
        states, sizes, products = found.states, found.sizes, found.products
        loops = sum(value.kind == "scanned" for value in found.known)

        def extent(labels: Sequence[int]) -> int:
            return math.prod(sizes[label] for label in labels)

        first = self.scan.ends[self.needed[0]].aval.dtype
        wide = [state for state in states if extent(state.columns) >= _LEAST_COLUMNS]
        if not wide:
            place = max(found.affine, key=lambda i: math.prod(self.step.carries[i].aval.shape))
            aval = self.step.carries[place].aval
            elements = math.prod(aval.shape)
            count = len(found.affine)
            return RecurrenceSpec(
                loop.length, 1, elements, 1, 1, "elementwise", products, count, count, loops, aval.dtype, first
            )
        state = max(wide, key=lambda s: math.prod(self.step.carries[s.carry].aval.shape))
        return RecurrenceSpec(
            steps=loop.length,
            groups=extent(state.groups),
            heads=extent(state.heads),
            rows=extent(state.rows),
            columns=extent(state.columns),
            decay="channel" if any(s.by_channel for s in states) else "scalar",
            products=products,
            states=len(states),
            readouts=sum(len(readout.queries) for state in states for readout in state.readouts),
            loops=loops,
            state_dtype=self.step.carries[state.carry].aval.dtype,
            result_dtype=first,
            delta=any(s.correction is not None for s in states),
        )

    # ------------------------------------------------------------------ the backward

    def _backward(self, pair: Pair) -> BackwardMatch:
        home = pair.backward.outer
        for number in self.operands:
            here = _is_known(self.graph, number, self.scan.outer)
            if not here or not (
                is_available(self.graph, number, (self.scan.outer,), home, across=True)
                or _is_known(self.graph, number, home)
            ):
                raise Mismatch("an operand is not known where its backward is", number, advice=AT_HAND)
        try:
            gradients = [(self.of_source[source], number) for source, number in pair.sources.items()]
            gradients += [(self.of_place[place], number) for place, number in pair.first.items()]
            gradients += [(self.of_place[self.scan.carried + i], number) for i, number in pair.slices.items()]
            gradients += [(self.of_array[array], number) for array, number in pair.arrays.items()]
            gradients += [] if pair.before is None else [(self.of_before[self.needed[0]], pair.before)]
        except KeyError:
            raise Mismatch("its backward gives the cotangent of a constant", advice=LOOP_GRADIENT) from None
        if not gradients:
            raise Mismatch("its backward gives nothing", advice=LOOP_GRADIENT)
        return BackwardMatch(home, pair.cotangent, tuple(sorted(gradients)))


def _is_known(graph: Graph, number: int, body: Body) -> bool:
    """Returns whether a body has a variable for a value, or can be given that of a body around it."""
    while number not in graph.positions[body]:
        if body not in graph.holders:
            return False
        outer, position = graph.holders[body]
        if outer.equations[position].primitive.name not in ("scan", "remat", "remat2", "checkpoint"):
            return False
        body = outer
    return True


_LEAST_COLUMNS = 8


def _labels_of(state: MatrixState) -> set[int]:
    terms = [*state.decay, state.key, state.value]
    terms += [] if state.correction is None else state.correction.terms()
    terms += [term for readout in state.readouts for _, *own in readout.queries for term in own]
    terms += [term for readout in state.readouts for term in readout.others]
    found = {label for term in terms for label in term.labels} | {a for a in state.axes if a is not None}
    return found | {a for readout in state.readouts for a in readout.axes if a is not None}
