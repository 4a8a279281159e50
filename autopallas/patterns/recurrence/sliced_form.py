"""The form of a loop that indexes arrays in which it is given slices, gives slices, and carries rows from step to step.

The equations that index are gone.  Rows that later steps read are carried values, and so are, in the loops that
autodiff reversed, the sums of what steps add to a row until one reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from autopallas import array_types
from autopallas.compat import JaxprAtom, JaxprEqn, Literal, Var
from autopallas.graph.array_slices import Place
from autopallas.graph.indexed_arrays import Action, Plan
from autopallas.graph.loop_slices import is_zero
from autopallas.graph.tables import Table
from autopallas.patterns.recurrence.indexing_loop import IndexingLoop, variables
from autopallas.patterns.recurrence.made_equations import MadeEquations
from autopallas.patterns.recurrence.step import Scan, Step, Written, identities, needed, varying

__all__ = ["Refused", "SlicedForm"]


class Refused(Exception):
    """Carried arrays that are not indexed by slices alone."""

    def __init__(self, *carried: int):
        super().__init__(carried)
        self.carried = frozenset(carried)


class SlicedForm:
    """A loop without the equations that index."""

    def __init__(self, loop: IndexingLoop, plan: Plan, reads: Mapping[int, Place]):
        self.loop, self.step = loop, loop.step
        self.names: dict[Var, JaxprAtom] = {}
        self.equations: list[JaxprEqn] = []
        self.slices: list[Var] = []
        self.given: list[JaxprAtom] = []
        self.places: dict[Var, Place] = {}
        self.of_table: dict[Var, int] = {}
        """For slices of a carried array, which one."""
        self.added: dict[int, list[tuple[Place, JaxprAtom]]] = {i: [] for i, _ in plan.sums}
        self.tables = dict(plan.tables)
        self.made = MadeEquations(loop.graph, loop.scan, self.step, self.equations)
        accesses: dict[int, list[tuple[Action, JaxprEqn]]] = {i: [] for i in self.tables}
        for position, own in sorted(plan.actions.items()):
            if own.carried in accesses:
                accesses[own.carried].append((own, self.step.equations[position]))
        self.rows = {i: self._carried(i, table, accesses[i]) for i, table in plan.tables}
        """The rows of each table that the loop carries."""
        self.own: dict[Var, list[JaxprAtom | None]] = {loop.carries[i]: [None, *rows] for i, rows in self.rows.items()}
        """By the variable of a table, its rows in this step by their lags; None for one that was not read yet."""
        self.read: set[Var] = set()
        of_array = dict(zip(loop.constants, loop.of_constants, strict=True))
        known: dict[int, Var] = {}
        for position, equation in enumerate(self.step.equations):
            action, place = plan.actions.get(position), reads.get(position)
            if action is not None:
                self._act(action, equation)
            elif place is not None and _moves(place):
                (array, *_), (result,) = equation.invars, equation.outvars
                assert isinstance(array, Var)
                number = self.step.numbers[result]
                if number in known:
                    self.names[result] = known[number]
                    continue
                known[number] = result
                self.read.add(array)
                self._slice(result, of_array[array], place)
            else:
                self.equations.append(equation.replace(invars=[self._named(a) for a in equation.invars]))

    def _named(self, atom: JaxprAtom) -> JaxprAtom:
        return self.names.get(atom, atom) if isinstance(atom, Var) else atom

    def _slice(self, variable: Var, array: JaxprAtom, place: Place) -> None:
        self.slices.append(variable)
        self.given.append(array)
        self.places[variable] = place

    def _carried(self, carried: int, table: Table, accesses: Sequence[tuple[Action, JaxprEqn]]) -> list[Var]:
        """Returns variables for the rows of a table that are carried from step to step, by their lags.

        In a forward loop these are rows that are read later; in a reversed one, sums of what is added to rows until
        they are read.  They lack the array's axis, whatever the shape in which they are read or added to, so that two
        loops have rows of one shape.

        Raises:
          Refused: an array's rows are neither.
        """
        if not table.depth:
            return []
        backward = self.loop.scan.is_backward
        if (table.summed, table.last) != ((table.depth,) * 2 if backward else (0, 0)):
            raise Refused(carried)
        like = self._row_type(carried)
        of_lag: dict[int, JaxprAtom] = {}
        of_read: Var | None = None
        for action, equation in accesses:
            for place, atom in action.slices:
                if action.kind == "read" and not backward:
                    of_lag.setdefault(table.lags[place], atom)
                elif action.kind == "read" and of_read is None and self._begins_with_zero(carried):
                    of_read = equation.outvars[0]
        found: dict[int, Var] = {}
        for lag in range(1, table.depth + 1):
            own = (of_read if lag == table.depth else None) if backward else of_lag.get(lag)
            found[lag] = own if isinstance(own, Var) and _alike(own, like) else self.made.variable(like.aval)
        carried_rows = [found[lag] for lag in range(1, table.depth + 1)]
        if not backward:
            self.places.update((v, table.before(lag)) for lag, v in enumerate(carried_rows, 1))
            self.of_table.update(dict.fromkeys(carried_rows, carried))
        return carried_rows

    def _row_type(self, carried: int) -> Var:
        """Returns a variable with the type of a row of an array."""
        aval, axis = self.loop.carries[carried].aval, self.tables[carried].axis
        return Var(array_types.array_type((*aval.shape[:axis], *aval.shape[axis + 1 :]), aval.dtype, [aval], aval))

    def _act(self, action: Action, equation: JaxprEqn) -> None:
        """Follows what becomes of the slice of a carried array.

        Raises:
          Refused: a literal is looked at in several shapes.
        """
        (result,), carried = equation.outvars, action.carried
        if carried in self.added:
            self.added[carried] += [(place, self._named(atom)) for place, atom in action.slices]
            return
        table, rows = self.tables[carried], list(self.own[action.before])
        for place, given in action.slices:
            lag = table.lags[place]
            row = rows[lag]
            if action.kind == "read":
                self.own[action.before][lag] = self._row_read(row, result, carried, lag)
                return
            atom = self._as_row(self._named(given), carried)
            if action.kind == "add":
                if self._is_new(row, carried, lag):
                    row = self.own[action.before][lag] = self._begun(row, carried)
                if row is not None and not self._is_zero(row):
                    atom = self.made.sum(row, atom)
            rows[lag] = atom
        self.own[result] = rows

    def _is_new(self, row: JaxprAtom | None, carried: int, lag: int) -> bool:
        """Returns whether a row lacks what was there before the loop."""
        if lag != self.tables[carried].summed:
            return False
        return row is None or (lag > 0 and row is self.rows[carried][lag - 1])

    def _begun(self, row: JaxprAtom | None, carried: int, result: Var | None = None) -> JaxprAtom:
        """Returns a row to which a step comes, with what was there before the loop; ``result`` is its variable, where
        there is one."""
        if row is not None and self._begins_with_zero(carried):
            return row
        first = result if row is None and result is not None else self.made.variable(self._row_type(carried).aval)
        self._slice(first, self.loop.first[carried], self.tables[carried].place(self.tables[carried].summed))
        self.of_table[first] = carried
        return first if row is None else self.made.sum(row, first, result)

    def _row_read(self, row: JaxprAtom | None, result: Var, carried: int, lag: int) -> JaxprAtom:
        """Returns the row that an equation reads, of which the result becomes the name.

        Raises:
          Refused: no step writes it, nor is it there before the loop.
        """
        if row is result:
            return result
        if self._is_new(row, carried, lag):
            row = self._begun(row, carried, result if _alike(result, self._row_type(carried)) else None)
            if row is result:
                return result
        if row is None:
            raise Refused(carried)
        self.names[result] = self._shaped(row, result.aval.shape, carried)
        self.made.found(self.names[result], self.step.numbers[result])
        return row

    def _as_row(self, atom: JaxprAtom, carried: int) -> JaxprAtom:
        """Returns what is written to an array in the type of its rows.

        Raises:
          Refused: it is a literal in another shape, or has another type.
        """
        like = self._row_type(carried)
        if atom.aval.dtype != like.aval.dtype:
            raise Refused(carried)
        return self._shaped(atom, like.aval.shape, carried)

    def _begins_with_zero(self, carried: int) -> bool:
        first = self.loop.first[carried]
        return isinstance(first, Var) and is_zero(self.loop.graph, self.loop.outer[first])

    def _shaped(self, row: JaxprAtom, shape: Sequence[int], carried: int) -> JaxprAtom:
        """Returns a row in another shape.

        Raises:
          Refused: it is a literal.
        """
        if tuple(row.aval.shape) == tuple(shape):
            return row
        if not isinstance(row, Var):
            raise Refused(carried)
        return self.made.reshaped(row, shape)

    def _is_zero(self, row: JaxprAtom) -> bool:
        if isinstance(row, Literal):
            return not np.any(np.asarray(row.val))
        return is_zero(self.loop.graph, self.made.numbers[row])

    def scan(self) -> Scan:
        """Returns the loop, without the arrays that it made of slices.

        Raises:
          Refused: a forward loop adds several slices to one array.
        """
        loop, step, scan = self.loop, self.step, self.loop.scan
        after, results = [self._named(a) for a in loop.after], [self._named(a) for a in step.results]
        ends: list[Var] = list(scan.ends[scan.carried :])
        written: dict[int, tuple[Written, JaxprAtom, int]] = {}
        for i in (*self.tables, *self.added):
            left: tuple[tuple[Var, Place], ...] = ()
            if i in self.tables:
                table = self.tables[i]
                last = self._after(i)[table.last]
                if last is None:
                    raise Refused(i)
                made = [(table.place(table.last), last)]
                left = tuple((v, table.after(lag)) for lag, v in enumerate(self.rows[i], 1) if lag <= table.last)
            else:
                made = self.added[i]
            if len(made) > 1 and not scan.is_backward:
                raise Refused(i)
            for place, atom in made:
                written[len(results)] = Written(place, loop.first[i], i in self.added, left), atom, i
                results.append(atom)
                ends.append(scan.ends[loop.places[i]])
        kept = [i for i in range(len(loop.carries)) if i not in self.tables and i not in self.added]
        after, carries = [after[i] for i in kept], [loop.carries[i] for i in kept]
        first, last_of_kept = [loop.first[i] for i in kept], [scan.ends[loop.places[i]] for i in kept]
        zeros: set[Var] = set()
        for i, rows in self.rows.items():
            for lag, row in enumerate(rows, 1):
                own = self._after(i)[lag - 1]
                if own is None:
                    raise Refused(i)
                after.append(own)
                carries.append(row)
                first.append(loop.first[i])
                last_of_kept.append(Var(row.aval))
                if scan.is_backward:
                    zeros.add(row)
        equations = needed(self.equations, [*after, *results])
        inner = variables(a for e in equations for a in e.invars) | variables((*after, *results))
        constants = [i for i, v in enumerate(loop.constants) if v in inner or v not in self.read]
        of_written = {i: len(carries) + place for place, (_, _, i) in written.items()}
        own_constants = [loop.constants[i] for i in constants]
        slices = [*step.slices, *self.slices]
        return replace(
            scan,
            constants=own_constants,
            carries=carries,
            slices=slices,
            given=[*(loop.of_constants[i] for i in constants), *first, *loop.of_slices, *self.given],
            ends=[*last_of_kept, *ends],
            places=self.places,
            unchanged=loop.unchanged,
            made=self.made.known,
            tables={v: of_written[i] for v, i in self.of_table.items()},
            written={len(carries) + place: own for place, (own, _, _) in written.items()},
            zeros=frozenset(zeros),
            step=Step(
                own_constants, carries, slices, equations, after, results, self.made.numbers,
                frozenset(v for v in own_constants if is_zero(loop.graph, step.numbers[v])),
                identities(loop.graph, self.made.numbers, own_constants, equations),
                varying(loop.graph, step.numbers, own_constants),
            ),
        )  # fmt: skip

    def _after(self, table: int) -> list[JaxprAtom | None]:
        """Returns the rows of a table after the step."""
        variable = self.loop.after[table]
        assert isinstance(variable, Var)
        return self.own[variable]


def _alike(first: JaxprAtom | None, second: JaxprAtom) -> bool:
    return first is not None and first.aval.shape == second.aval.shape and first.aval.dtype == second.aval.dtype


def _moves(place: Place) -> bool:
    """Returns whether slices lie at a few runs of positions, and not all at one."""
    return place.runs is not None and (len(place.runs) > 1 or place.runs[0].step != 0)
