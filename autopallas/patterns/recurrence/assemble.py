"""Makes the match of a recurrence: its site, the program that it replaces, and where its backward stands."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import jax

from autopallas import array_types, compat, jaxprs
from autopallas.compat import ArrayFunction, JaxprAtom, JaxprEqn, Literal, ShapedArray, Var
from autopallas.graph import Body, Graph, Node, flatten
from autopallas.graph.array_slices import Place, plus_slices, slices_at, with_slices
from autopallas.graph.body_links import may_be_given
from autopallas.graph.edit import surviving
from autopallas.graph.extract import closed, copied
from autopallas.kernels.recurrence.forms import is_product, products_apart
from autopallas.kernels.recurrence.loop import Loop
from autopallas.kernels.recurrence.operation import OPERATION
from autopallas.kernels.recurrence.site import RecurrenceSite
from autopallas.kernels.recurrence.spec import RecurrenceSpec
from autopallas.kernels.recurrence.structure import Known, MatrixState
from autopallas.patterns.advice import AT_HAND, FIRST_VARIES, LOOP_GRADIENT, STATE
from autopallas.patterns.carry import is_available
from autopallas.patterns.escapes import Beside
from autopallas.patterns.match import BackwardMatch, Match, Mismatch
from autopallas.patterns.recurrence.all_steps import check_all_steps
from autopallas.patterns.recurrence.carries import carries_of, check_delta_rules
from autopallas.patterns.recurrence.matrices import matrix_states
from autopallas.patterns.recurrence.step import Scan, Step, Written
from autopallas.patterns.recurrence.transpose import Lead, Pair, constant_atom, is_scalar_literal, program_key

__all__ = ["Analyses", "Assembly"]


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


class Analyses:
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
            states, others = matrix_states(step, carries)
            if not self.assume_finite:
                unknown = Mismatch("its values are not known to be finite (assume_finite=False)", advice=STATE)
                states, others = [], dict.fromkeys(carries.states, unknown)
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
        """Returns the key of a step, of its form, of what is known of its constants, and of what is equal."""
        parts = len(step.constants), len(step.carries)
        known = tuple((v in step.zeros, step.identities.get(v), step.varies.get(v)) for v in step.constants)
        first: dict[Hashable, int] = {}
        variables = [*step.inputs, *(v for e in step.equations for v in e.outvars)]
        equal = tuple(first.setdefault(step.numbers.get(v, v), i) for i, v in enumerate(variables))
        return key, parts, known, equal


class Assembly:
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
        self.typed: dict[int, ShapedArray] = {}
        """The types of first values that are made of literals, by their numbers: the program may cast these."""
        self.known: dict[int, JaxprAtom] = {}
        """What is known by its number."""

    def match(self, pairs: Sequence[Pair], analyses: Analyses) -> Match:
        """Returns the match."""
        scan = self.scan
        self._check_axes()
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
        )

    # ------------------------------------------------------------------ operands

    def _check_axes(self) -> None:
        """Checks that the first carried values vary over the axes of a ``shard_map`` as those do that steps give.

        Raises:
          Mismatch: one does not but for a cast, and the loop is taken out of the program without casts.
        """
        equation = self.scan.equation
        parts = compat.scan_parts(equation) if equation.primitive.name == "scan" else None
        first = len(equation.invars) - len(equation.outvars) if parts is None else parts[0]
        count = len(equation.outvars) if parts is None else parts[1]
        for atom, after in zip(equation.invars[first : first + count], equation.outvars, strict=False):
            number = None if isinstance(atom, Literal) else self.numbers[atom]
            own = atom.aval if number is None else self.graph.avals[number]
            if number is not None and self._is_of_literals(number):  # no operand gives it, so that no cotangent is lost
                own = self.typed.setdefault(number, after.aval)
            if array_types.varying_axes([own]) != array_types.varying_axes([after.aval]):
                raise Mismatch(
                    "it begins with a value that is cast to vary over the axes of a shard_map", advice=FIRST_VARIES
                )

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
                steps = () if position < constants + scan.carried else (scan.length,)
                atoms.append(self._sliced(array, place, (*steps, *variable.aval.shape)))
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

    def _sliced(self, array: JaxprAtom, place: Place, shape: tuple[int, ...]) -> JaxprAtom:
        """Returns the slices of an array in a shape."""

        def slices(x: jax.Array) -> jax.Array:
            return slices_at(x, place).reshape(shape)

        return self._traced(("slices", place, shape), slices, array)

    def _traced(self, key: Hashable, function: ArrayFunction, *atoms: JaxprAtom) -> JaxprAtom:
        """Returns what a function makes of operands, by equations that it appends; of one key there is one function."""
        key = key, tuple(a.aval for a in atoms)
        if key not in self.programs:
            with array_types.on_mesh_of([a.aval for a in atoms]):
                made = compat.make_jaxpr(function, *(array_types.typed_like(a.aval) for a in atoms))
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

    def _is_of_literals(self, number: int) -> bool:
        """Returns whether a value is made of numbers, such as zeros."""
        node = self.graph.definitions.get(number)
        if node is None or len(node.outputs) != 1 or jaxprs.bodies(node.equation):
            return False
        return all(n in self.graph.literals and not self.graph.shape(n) for n in node.inputs)

    def _of_literals(self, number: int) -> Var | None:
        if not self._is_of_literals(number):
            return None
        node = self.graph.definitions[number]
        variables: dict[int, Var] = {}
        (equation,) = copied(self.graph, [node], variables)
        like = self.typed.get(number)
        if like is not None and array_types.varying_axes([like]):
            equation = equation.replace(outvars=[Var(like)])
        self.equations.append(equation)
        return equation.outvars[0]

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
                like = array_types.array_type((scan.length, *row.shape), row.dtype, [row], row)
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
        least = {state.carry: 2 if state.is_corrected else _LEAST_COLUMNS for state in states}
        wide = [state for state in states if extent(state.columns) >= least[state.carry]]
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
            delta=any(s.is_corrected for s in states),
            substeps=max(s.substeps(sizes) for s in states),
        )

    # ------------------------------------------------------------------ the backward

    def _backward(self, pair: Pair) -> BackwardMatch:
        home = pair.backward.outer
        for number in self.operands:
            here = may_be_given(self.graph, number, self.scan.outer)
            if not here or not (
                is_available(self.graph, number, (self.scan.outer,), home, across=True)
                or may_be_given(self.graph, number, home)
            ):
                raise Mismatch("an operand is not known where its backward is", number, advice=AT_HAND)
        try:
            gradients = [(self.of_source[source], number) for source, number in pair.sources.items()]
            gradients += [(self.of_place[place], number) for place, number in pair.first.items()]
            gradients += [(self.of_place[self.scan.carried + i], number) for i, number in pair.slices.items()]
            gradients += [(self.of_array[array], number) for array, number in pair.arrays.items()]
            gradients += [(self.of_before[end], number) for end, number in pair.before.items()]
        except KeyError:
            raise Mismatch("its backward gives the cotangent of a constant", advice=LOOP_GRADIENT) from None
        if not gradients:
            raise Mismatch("its backward gives nothing", advice=LOOP_GRADIENT)
        self._check_equal_slices(pair)
        cotangents = [pair.cotangents[end] for end in self.needed]
        known = self.graph.positions[home]
        if len(cotangents) > 1 and not (
            all(n in known for n in cotangents)
            and self.scan.equation.primitive.name == "scan"
            and len({self.numbers[self.scan.ends[i]] for i in self.needed}) == len(cotangents)
        ):
            raise Mismatch("its backward gets the cotangents of several results", advice=LOOP_GRADIENT)
        return BackwardMatch(home, cotangents[0], tuple(sorted(gradients)), further=tuple(cotangents[1:]))

    def _check_equal_slices(self, pair: Pair) -> None:
        """Checks that the cotangents of slices of one array do nothing but add up: a kernel reads one for all of them.

        Raises:
          Mismatch: they go elsewhere, or the program lacks one, as where the gradient is that of one of two arguments
            that are the same array.
        """
        step, first = self.step, len(self.scan.constants) + self.scan.carried
        atoms = [*(atom for e in step.equations for atom in e.invars), *step.after, *step.results]
        read = {atom for atom in atoms if isinstance(atom, Var)}
        places: dict[int, list[int]] = {}
        for i, (variable, atom) in enumerate(zip(step.slices, self.scan.given[first:], strict=True)):
            if variable in read and variable not in self.scan.places and isinstance(atom, Var):
                places.setdefault(self.numbers[atom], []).append(i)
        for number, own in places.items():
            found = [pair.slices[i] for i in own if i in pair.slices]
            if len(own) == 1 or not found:
                continue
            beside = Beside(self.graph, surviving(self.graph))
            if len(found) < len(own) or not any(beside.meet(n, found) for n in found):
                raise Mismatch(
                    "it reads an array in two places, whose cotangents are not added up", number, advice=LOOP_GRADIENT
                )


_LEAST_COLUMNS = 8


def _labels_of(state: MatrixState) -> set[int]:
    found = {label for term in state.terms() for label in term.labels} | {a for a in state.axes if a is not None}
    return found | {a for readout in state.readouts for a in readout.axes if a is not None}
