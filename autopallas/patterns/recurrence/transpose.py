"""Pairs a loop with the reversed loop that is its backward, in a program that JAX has differentiated.

One step of the loop is differentiated with ``jax.vjp``, and the equations that come out are looked up in the body of
the reversed loop.  The pair is proved if what the reversed loop carries on is the cotangent of what the step carries,
and if each of its results is the cotangent of a constant, of a first value or of a slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product

import jax

from autopallas import array_types, compat, jaxprs
from autopallas.compat import JaxprAtom, JaxprEqn, Literal, Var
from autopallas.graph import Body, Graph, Node, flatten
from autopallas.graph.array_slices import Place
from autopallas.graph.custom_rules import is_elementwise_call, rule_key
from autopallas.graph.extract import closed, copied
from autopallas.graph.keys import literal_key
from autopallas.graph.loop_slices import is_zero
from autopallas.patterns.inlined_rules import inlined_call
from autopallas.patterns.recurrence.rules import restored
from autopallas.patterns.recurrence.step import Scan, Step, is_inexact

__all__ = ["Lead", "Pair", "Pairing", "program_key"]

_LEVELS = 6
"""Most equations before a loop's constant that are looked through for the value whose cotangent is summed."""
_ATTEMPTS = 16
_LONGEST = 64
"""Most terms of a sum of cotangents."""


@dataclass(frozen=True, slots=True)
class Lead:
    """What is computed before a loop from the values whose cotangents the program asks for.

    Attributes:
      sources: numbers of values outside of the loop.
      nodes: from these to the loop's constants, in order.
    """

    sources: tuple[int, ...]
    nodes: tuple[Node, ...] = ()

    @staticmethod
    def of(graph: Graph, scan: Scan) -> Lead:
        """Returns the lead whose sources are the loop's constants themselves."""
        numbers = graph.numbers[scan.outer]
        found = [numbers[a] for a in scan.given[: len(scan.constants)] if isinstance(a, Var)]
        return Lead(tuple(n for n in dict.fromkeys(found) if not is_scalar_literal(graph, n)))


def is_scalar_literal(graph: Graph, number: int) -> bool:
    """Returns whether a value is a known scalar."""
    return number in graph.literals and not graph.shape(number)


def constant_atom(graph: Graph, number: int, variables: Mapping[int, JaxprAtom]) -> JaxprAtom:
    """Returns a loop's constant, in the variables of a lead."""
    if is_scalar_literal(graph, number):
        return Literal(graph.literals[number][()], graph.avals[number])
    return variables[number]


@dataclass(eq=False, slots=True)
class Pair:
    """A loop and its backward.

    Attributes:
      backward: the reversed loop.
      cotangents: the numbers of the cotangents of the loop's results, where the reversed loop is, by the places of
        these results among what the loop gives.
      lead: from the values whose cotangents the reversed loop sums to the loop's constants.
      sources, first, slices: the number of the cotangent, by source, and by the places of carried values and slices.
      arrays: that of an array of which the loop reads slices elsewhere, by its number.
      before: that of an array into which the loop writes, by the array's place among what the loop gives.
    """

    backward: Scan
    cotangents: dict[int, int]
    lead: Lead
    sources: dict[int, int] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    slices: dict[int, int] = field(default_factory=dict)
    arrays: dict[int, int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)


def program_key(
    graph: Graph, inputs: Sequence[Var], equations: Sequence[JaxprEqn], results: Sequence[JaxprAtom]
) -> Hashable:
    """Returns a key that is equal for equal programs of equal derivatives."""
    places: dict[Var, int] = {v: i for i, v in enumerate(inputs)}

    def of(atom: JaxprAtom) -> Hashable:
        return literal_key(atom) if isinstance(atom, Literal) else places[atom]

    lines: list[Hashable] = [tuple(v.aval for v in inputs)]
    for equation in equations:
        key = graph.key(equation, (), ())
        does = equation if key is None else key
        lines.append((does, rule_key(equation), tuple(map(of, equation.invars))))
        for variable in equation.outvars:
            places[variable] = len(places)
    return tuple(lines), tuple(map(of, results))


@dataclass(frozen=True, slots=True)
class _Guess:
    """Which carried values of the reversed loop are cotangents of which of the loop's, and which values are those of
    what it stacks."""

    carries: tuple[tuple[int, int], ...]
    results: tuple[int, ...]


class _Reversed:
    """A reversed loop in numbers.

    Attributes:
      starts: what it is given beside constants: the first carried values, and arrays to be sliced.
      after: what it carries on, and what it stacks, in a step.
      ends: its results.
      unchanged: results that are what the loop is given, and that.
      befores: the arrays, before the loop, that are made of what it stacks.
    """

    def __init__(self, graph: Graph, scan: Scan):
        inner, outer = scan.numbers(graph), graph.numbers[scan.outer]

        def number(numbers: Mapping[Var, int], atom: JaxprAtom) -> int | None:
            return graph.find_literal(atom) if isinstance(atom, Literal) else numbers[atom]

        self.graph, self.scan = graph, scan
        self.inputs = [inner[v] for v in (*scan.carries, *scan.slices)]
        self.starts = [number(outer, a) for a in scan.given[len(scan.constants) :]]
        self.after = [number(inner, a) for a in scan.outputs]
        self.ends = scan.end_numbers(graph)
        self.unchanged = [(outer[end], number(outer, start)) for end, start in scan.unchanged]
        self.befores = {i: number(outer, own.first) for i, own in scan.written.items()}

    def begins_with_zero(self, place: int) -> bool:
        """Returns whether a carried value is zero at the start."""
        if self.scan.carries[place] in self.scan.zeros:
            return True
        start = self.starts[place]
        return start is not None and is_zero(self.graph, start)

    def place_of(self, number: int) -> int:
        """Returns the place of a slice after the carried values."""
        return self.inputs.index(number)

    def added(self, place: int) -> Counter[int] | None:
        """Returns what the loop adds in each step to a sum that it carries, whatever the order of additions."""
        after, within = self.after[place], self.inputs[place]
        terms = Counter[int]() if after is None else _terms(self.graph, after, within)
        if terms[within] != 1:
            return None
        del terms[within]
        return terms

    def slices_added(self, end: int) -> Counter[tuple[Place, int]] | None:
        """Returns the terms of the slices that make a sum, zero at the start, each with its place; None where it is no
        such sum."""
        own = [i for i, number in enumerate(self.ends) if number == end]
        found: Counter[tuple[Place, int]] = Counter()
        for i in own:
            written, before, number = self.scan.written.get(i), self.befores.get(i), self.after[i]
            if written is None or not written.adds or before is None or number is None:
                return None
            if not is_zero(self.graph, before):
                return None
            found.update({(written.place, n): times for n, times in _terms(self.graph, number).items()})
        return found


def _terms(graph: Graph, number: int, kept: int = -1) -> Counter[int]:
    """Returns the values of which one is the sum, each with how often it is added."""
    found: Counter[int] = Counter()
    todo = [number]
    while todo:
        own = todo.pop()
        node = graph.definitions.get(own)
        if own != kept and node is not None and node.name in ("add", "add_any") and found.total() < _LONGEST:
            todo += node.inputs
        else:
            found[own] += 1
    return found


@dataclass(frozen=True, eq=False, slots=True)
class _Derivative:
    """The derivative of a step, with the numbers of its variables as far as the program has them.

    Attributes:
      graph: the program.
      body: the equations.
      found: the numbers.
      cotangents: the cotangent of each input of the step, and of each source.
    """

    graph: Graph
    body: Body
    found: dict[Var, int]
    cotangents: dict[Var | int, Var]

    def number(self, key: Var | int) -> int | None:
        """Returns the number of a cotangent, or None."""
        cotangent = self.cotangents.get(key)
        return None if cotangent is None else self.found.get(cotangent)

    def terms(self, key: Var | int) -> Counter[int] | None:
        """Returns the values of which a cotangent is the sum; the program may add them up in another order."""
        cotangent = self.cotangents.get(key)
        todo = [] if cotangent is None else [cotangent]
        total: Counter[int] = Counter()
        while todo:
            variable = todo.pop()
            position = self.body.defined.get(variable)
            if variable in self.found:
                total += _terms(self.graph, self.found[variable])
                continue
            equation = None if position is None else self.body.equations[position]
            if equation is None or equation.primitive.name not in ("add", "add_any") or total.total() > _LONGEST:
                return None
            if any(isinstance(atom, Literal) for atom in equation.invars):
                return None
            todo += [atom for atom in equation.invars if isinstance(atom, Var)]
        return total or None


class Pairing:
    """Pairs loops of one program."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._derivatives: dict[Hashable, Body] = {}

    def pair(
        self, scan: Scan, step: Step, results: Sequence[int], backward: Scan, alive: frozenset[int]
    ) -> Pair | None:
        """Returns the pair of a loop and a reversed loop, or None.

        Args:
          scan: the loop.
          step: its step, with the stacked results alone that are needed.
          results: the places of what is needed, among carried values, as they are at the end, and what it stacks.
          backward: the reversed loop.
          alive: the values that the program needs.
        """
        if scan.length != backward.length or scan.reverse == backward.reverse:
            return None
        lead: Lead | None = Lead.of(self.graph, scan)
        for _ in range(_LEVELS):
            assert lead is not None
            pair: Pair | None = None
            for guess in islice(self._guesses(scan, step, results, backward), _ATTEMPTS):
                pair, complete = self._attempt(scan, step, results, backward, alive, guess, lead)
                if pair is not None and complete:
                    return pair
                if pair is not None:
                    break
            lead = None if pair is None else self._earlier(lead, pair.sources)
            if lead is None:
                return None
        return None

    # ------------------------------------------------------------------ what may correspond

    def _guesses(self, scan: Scan, step: Step, results: Sequence[int], backward: Scan) -> Iterator[_Guess]:
        """Yields assignments; JAX carries sums of cotangents of constants first, then those of what is carried."""
        carried = backward.carried
        floating = [i for i, v in enumerate(step.carries) if is_inexact(v) and isinstance(step.after[i], Var)]
        stacked = self._guesses_of_results(scan, step, [i for i in results if i >= scan.carried], backward)
        for count in range(min(len(floating), carried) if stacked else 0, 0, -1):
            last = range(carried - count, carried)
            types = [backward.carries[j] for j in last]
            for chosen in _alike_in_order([step.carries[i] for i in floating], types):
                pairs = tuple(zip((floating[i] for i in chosen), last, strict=True))
                for cotangents in stacked:
                    yield _Guess(pairs, cotangents)

    def _guesses_of_results(
        self, scan: Scan, step: Step, stacked: Sequence[int], backward: Scan
    ) -> list[tuple[int, ...]]:
        """Returns what the cotangents of stacked results may be; equal results may have the same one."""
        numbers, made = backward.numbers(self.graph), set(step.numbers.values())
        each: list[list[int]] = []
        for place, atom in zip(stacked, step.results, strict=True):
            written = scan.written.get(place)
            rows = None if written is None else written.place
            read = [v for v in backward.slices if backward.places.get(v) == rows]
            each.append([n for v in read if (n := numbers[v]) not in made and _alike(v, atom)])
        found = islice(product(*map(dict.fromkeys, each)), _ATTEMPTS**2)
        return sorted(found, key=lambda own: len(own) - len(set(own)))

    # ------------------------------------------------------------------ one attempt

    def _attempt(
        self,
        scan: Scan,
        step: Step,
        results: Sequence[int],
        backward: Scan,
        alive: frozenset[int],
        guess: _Guess,
        lead: Lead,
    ) -> tuple[Pair | None, bool]:
        """Returns the pair, if it is one, and whether it is complete: sums for constants may be sums for what these are
        computed from."""
        loop = _Reversed(self.graph, backward)
        derivative = self._cotangents(scan, step, backward, guess, lead)
        for place, own in guess.carries:
            closes = self._closes(derivative, step.carries[place], loop.after[own])
            if not closes or not (place in results or loop.begins_with_zero(own)):
                return None, False
        places = dict(guess.carries)
        stacked = [i for i in results if i >= scan.carried]
        places |= {i: loop.place_of(n) for i, n in zip(stacked, guess.results, strict=True)}
        starts = {i: loop.starts[places[i]] for i in results if i in places}
        cotangents = {i: start for i, start in starts.items() if start is not None}
        if len(cotangents) < len(results):
            return None, False
        return self._explained(Pair(backward, cotangents, lead), loop, guess, alive, scan, step, derivative)

    def _closes(self, derivative: _Derivative, carry: Var, after: int | None) -> bool:
        """Returns whether the cotangent of a carried value is what the reversed loop carries on, whatever the order of
        additions."""
        if after is None:
            return False
        return derivative.number(carry) == after or derivative.terms(carry) == _terms(self.graph, after)

    def _explained(
        self,
        pair: Pair,
        loop: _Reversed,
        guess: _Guess,
        alive: frozenset[int],
        scan: Scan,
        step: Step,
        derivative: _Derivative,
    ) -> tuple[Pair | None, bool]:
        """Says which cotangent each result of the reversed loop is."""
        plain = [(i, v) for i, v in enumerate(step.slices) if v not in scan.places]
        slices = {n: i for i, v in plain if (n := derivative.number(v)) is not None}
        arrays = self._of_arrays(scan, derivative)
        sources = dict.fromkeys(pair.lead.sources)
        places = {own: place for place, own in guess.carries}
        complete = True
        for i, end in enumerate(loop.ends):
            after = loop.after[i]
            if end not in alive:
                continue
            if i in places:
                pair.first[places[i]] = end
            elif i in loop.scan.written:
                slices_added = loop.slices_added(end)
                array = next((n for n, own in arrays.items() if own == slices_added), None)
                into = [o for o in scan.written if self._is_before(loop, i, scan, o, pair, derivative, places)]
                if array is not None:
                    pair.arrays[array] = end
                elif into:
                    pair.before[into[0]] = end
                else:
                    return None, False
            elif i < pair.backward.carried:
                added = loop.added(i) if loop.begins_with_zero(i) else None
                source = next((n for n in sources if added and derivative.terms(n) == added), None)
                if source is None:
                    complete = False
                    continue
                del sources[source]
                pair.sources[source] = end
            elif after is not None and after in slices:
                pair.slices[slices[after]] = end
            else:
                return None, False
        for result, cotangent in pair.cotangents.items():
            if result in scan.written and scan.written[result].adds:  # the array before it has the result's cotangent
                ends = [end for end, start in loop.unchanged if start == cotangent and end in alive]
                pair.before.update((result, end) for end in ends[:1])
        return pair, complete

    def _of_arrays(self, scan: Scan, derivative: _Derivative) -> dict[int, Counter[tuple[Place, int]]]:
        """Returns the terms of the cotangents of the slices of arrays that no step changes, with their places, by the
        array's number."""
        found: dict[int, Counter[tuple[Place, int]]] = {}
        unknown: set[int] = set()
        outer, first = self.graph.numbers[scan.outer], len(scan.constants) + len(scan.carries)
        for variable, atom in zip(scan.slices, scan.given[first:], strict=True):
            if variable in scan.places and variable not in scan.tables and variable in derivative.cotangents:
                assert isinstance(atom, Var)
                number, terms = outer[atom], derivative.terms(variable)
                if terms is None:
                    unknown.add(number)
                else:
                    own = {(scan.places[variable], n): times for n, times in terms.items()}
                    found.setdefault(number, Counter()).update(own)
        return {number: own for number, own in found.items() if number not in unknown}

    def _is_before(
        self,
        loop: _Reversed,
        i: int,
        scan: Scan,
        into: int,
        pair: Pair,
        derivative: _Derivative,
        places: Mapping[int, int],
    ) -> bool:
        """Returns whether a result of the reversed loop is the cotangent of an array into which the loop writes: that
        of what the loop made of it, zeros where that is no result, with zeros or the cotangents of the slices that the
        loop reads in their places, and the cotangents of the rows that it carries first added."""
        own, forward, row = loop.scan.written[i], scan.written[into], loop.after[i]
        if into in pair.before or own.adds or forward.adds or own.place != forward.place:
            return False
        before = loop.befores[i]
        if row is None or before is None:
            return False
        if before != pair.cotangents[into] if into in pair.cotangents else not is_zero(self.graph, before):
            return False
        rows = {(v, scan.places[v]) for v in scan.carries if scan.tables.get(v) == into}
        carried = dict(zip(loop.scan.carries, range(loop.scan.carried), strict=True))
        left = {(scan.carries[places[carried[v]]], place) for v, place in own.left if carried[v] in places}
        if rows != left or len(left) < len(own.left):
            return False
        sliced = [v for v in scan.slices if scan.tables.get(v) == into]
        read = [v for v in sliced if v in derivative.cotangents]
        if len(read) > 1:
            return False
        return derivative.number(read[0]) == row if read else is_zero(self.graph, row)

    def _cotangents(self, scan: Scan, step: Step, backward: Scan, guess: _Guess, lead: Lead) -> _Derivative:
        """Differentiates the step, and looks the derivative up in the reversed loop."""
        graph = self.graph
        roots = [step.after[place] for place, _ in guess.carries]
        roots += step.results
        equations, sources, roots = self._whole(scan, step, lead, roots)
        inputs = [*sources, *step.carries, *step.slices]
        key = program_key(graph, inputs, equations, roots)
        if key not in self._derivatives:
            self._derivatives[key] = _derivative(inputs, equations, roots)
        derivative = self._derivatives[key]
        inner = backward.numbers(graph)
        numbers = [*lead.sources, *(step.numbers[v] for v in (*step.carries, *step.slices))]
        numbers += [inner[backward.carries[j]] for _, j in guess.carries]
        numbers += guess.results
        found = dict(zip(derivative.invars, numbers, strict=True))
        self._follow(derivative.equations, found, graph.frames[backward.body], (backward.made, scan.made))
        names: list[Var | int] = [*lead.sources, *step.carries, *step.slices]
        floating = [name for name, v in zip(names, inputs, strict=True) if is_inexact(v)]
        results = {n: r for n, r in zip(floating, derivative.outvars, strict=True) if isinstance(r, Var)}
        return _Derivative(graph, derivative, found, results)

    def _whole(
        self, scan: Scan, step: Step, lead: Lead, roots: Sequence[JaxprAtom]
    ) -> tuple[list[JaxprEqn], list[Var], list[JaxprAtom]]:
        """Returns the equations of the step after those of the lead, variables for the sources, and the roots, which
        may be constants of the loop."""
        sources = [Var(self.graph.avals[number]) for number in lead.sources]
        variables = dict(zip(lead.sources, sources, strict=True))
        before = copied(self.graph, lead.nodes, variables)
        before = restored(self.graph, before) or before
        outer = self.graph.numbers[scan.outer]
        given: dict[Var, JaxprAtom] = {}
        for variable, atom in zip(step.constants, scan.given, strict=False):
            number = None if isinstance(atom, Literal) else outer[atom]
            given[variable] = atom if number is None else constant_atom(self.graph, number, variables)

        own = [e.replace(invars=jaxprs.renamed(e.invars, given)) for e in step.equations]
        return [*before, *own], sources, jaxprs.renamed(roots, given)

    def _follow(
        self,
        equations: Sequence[JaxprEqn],
        found: dict[Var, int],
        frame: tuple[int, ...],
        made: Sequence[Mapping[Hashable, int]] = (),
    ) -> None:
        """Adds the numbers of what equations compute, as far as the program has them, or loops in another form."""
        for equation in equations:
            self.graph.steps.spend()
            operands: list[int] = []
            for atom in equation.invars:
                number = self.graph.find_literal(atom) if isinstance(atom, Literal) else found.get(atom)
                if number is None:
                    break
                operands.append(number)
            else:
                results = operands if _keeps_shape(equation) else self.graph.find(equation, operands, frame)
                if results is None and any(made) and len(equation.outvars) == 1:
                    key = self.graph.key_here(equation, operands, frame)
                    results = next(([known[key]] for known in made if key is not None and key in known), None)
                if results is None and is_elementwise_call(equation):
                    results = self._computed(equation, operands, frame)
                found.update(zip(equation.outvars, results or (), strict=False))

    def _computed(self, call: JaxprEqn, operands: Sequence[int], frame: tuple[int, ...]) -> list[int] | None:
        """Returns the number of what a function with its own derivative computes, where the program holds that and not
        the call."""
        body = flatten(call.params["call_jaxpr"])
        found = dict(zip(body.invars, operands, strict=True))
        self._follow(body.equations, found, frame)
        (result,) = body.outvars
        return [found[result]] if isinstance(result, Var) and result in found else None

    def _earlier(self, lead: Lead, explained: Container[int]) -> Lead | None:
        """Returns the lead with one more equation before each source that is not explained, where there is one.

        A source of which another one is computed stays for now: its cotangent may be summed with what comes by that.
        """
        before: dict[int, list[Node]] = {}
        for source in lead.sources:
            passed = source in explained or source in self.graph.supposed
            node = None if passed else self.graph.definitions.get(source)
            if node is not None and len(node.outputs) == 1 and _is_plain(node.equation):
                before[source] = self._activation(node) or [node]
        read = {n for nodes in before.values() for node in nodes for n in node.inputs}
        added: dict[int, Node] = {}
        sources: dict[int, None] = {}
        for source in lead.sources:
            nodes = [] if source in read else before.get(source, [])
            own = {n.outputs[0]: n for n in nodes}
            added |= own
            inputs = (n for node in nodes for n in node.inputs if n not in self.graph.literals and n not in own)
            sources.update(dict.fromkeys(inputs if nodes else (source,)))
        if not added:
            return None
        every = {node.outputs[0]: node for node in lead.nodes} | added
        left = tuple(n for n in sources if n not in every)
        return Lead(left, tuple(every[number] for number in sorted(every)))

    def _activation(self, last: Node) -> list[Node]:
        """Returns the nodes that stand for a call of ``jax.nn.softplus`` or ``jax.nn.relu6``, of which one is the last;
        none if it is no such call."""
        found = inlined_call(self.graph, last)
        nodes: dict[int, Node] = {}
        todo = [] if found is None else [last.outputs[0]]
        while todo:
            number = todo.pop()
            node = self.graph.definitions.get(number)
            if node is not None and number not in nodes and found is not None and number not in found[1]:
                nodes[number] = node
                todo += node.inputs
        plain = all(len(node.outputs) == 1 and _is_plain(node.equation) for node in nodes.values())
        return [*nodes.values()] if plain else []


def _derivative(inputs: Sequence[Var], equations: Sequence[JaxprEqn], roots: Sequence[JaxprAtom]) -> Body:
    """Returns the equations of ``jax.vjp``, from inputs and cotangents of the roots to the cotangents of the floating
    inputs."""
    run = compat.jaxpr_as_fun(closed(inputs, roots, equations))
    places = [i for i, v in enumerate(inputs) if is_inexact(v)]

    def pulled(given: list[jax.Array], cotangents: list[jax.Array]) -> tuple[jax.Array, ...]:
        def varied(*chosen: jax.Array) -> list[jax.Array]:
            filled = list(given)
            for place, x in zip(places, chosen, strict=True):
                filled[place] = x
            return list(run(*filled))

        found: tuple[jax.Array, ...] = jax.vjp(varied, *(given[place] for place in places))[1](cotangents)
        return found

    types = [array_types.typed_like(v.aval) for v in inputs]
    wanted = [array_types.cotangent_like(v.aval) for v in roots]
    with array_types.on_mesh_of([v.aval for v in inputs]):
        return flatten(compat.make_jaxpr(pulled, types, wanted))


def _is_plain(equation: JaxprEqn) -> bool:
    """Returns whether an equation may stand before a loop in what is differentiated with its step."""
    if compat.has_side_effects(equation):
        return False
    return not jaxprs.bodies(equation) or is_elementwise_call(equation)


def _keeps_shape(equation: JaxprEqn) -> bool:
    """Returns whether an equation reshapes a value to the shape that it has, or sums it over no axis, as derivatives in
    a ``shard_map`` do."""
    name = equation.primitive.name
    if name == "reduce_sum":
        return not equation.params["axes"]
    if name != "reshape" or len(equation.invars) > 1 or equation.params["dimensions"] is not None:
        return False
    return tuple(equation.invars[0].aval.shape) == tuple(equation.outvars[0].aval.shape)


def _alike_in_order(given: Sequence[Var], wanted: Sequence[Var]) -> Iterator[tuple[int, ...]]:
    """Yields the places of some given variables that have the types of the wanted ones, in the same order.

    Nothing is tried that comes to no end: behind its latest place, each is followed by all that are wanted after it.
    """
    latest: list[int] = []
    end = len(given)
    for variable in reversed(wanted):
        end = next((i for i in reversed(range(end)) if _alike(given[i], variable)), -1)
        if end < 0:
            return
        latest.append(end)
    latest.reverse()

    def places(chosen: Sequence[int]) -> Iterator[int]:
        """Yields where the next one may be."""
        begin, n = chosen[-1] + 1 if chosen else 0, len(chosen)
        return (i for i in range(begin, latest[n] + 1) if _alike(given[i], wanted[n]))

    chosen: list[int] = []
    todo = [places(chosen)]
    while todo:
        place = next(todo[-1], None)
        if place is None:
            todo.pop()
            del chosen[-1:]
        elif len(chosen) + 1 == len(wanted):
            yield (*chosen, place)
        else:
            chosen.append(place)
            todo.append(places(chosen))


def _alike(first: JaxprAtom, second: JaxprAtom) -> bool:
    return tuple(first.aval.shape) == tuple(second.aval.shape) and first.aval.dtype == second.aval.dtype
