"""Finds what turns the rows of a normalisation behind it: rotary embedding, in any spelling.

Each column of a value is read by itself, as a sum of columns of the normalised row, each with a sign and a factor that
does not depend on the rows' numbers.  Columns are followed one by one through slices, concatenations, reshapes, stacks
and complex numbers by views with a single index (:mod:`autopallas.graph.labels`), so that no spelling is listed.  A
value turns the rows if each of its columns either is that column of the row, or has the cosine's product with it and
the sine's product with the other column of its pair.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from autopallas.graph import Graph, Node, Ref
from autopallas.graph.labels import Atom, View
from autopallas.numerics.casts import is_floating, rounds
from autopallas.patterns.expressions import Scope
from autopallas.patterns.forward import LAYOUT
from autopallas.patterns.match import Mismatch, bounded
from autopallas.patterns.normalisation import Normalisation, Turn
from autopallas.patterns.row_forms import before_layout

__all__ = ["turned"]

_MOST_COLUMNS = 1024
_MOST_USERS = 48
"""Most values behind a normalisation among which the turned rows are looked for."""
_MOST_WAYS = 4
_DEEPEST = 32
_COMPLEX = frozenset({"complex", "real", "imag", "conj"})
_MOVES = LAYOUT | {"slice", "split", "concatenate", "stack", "unstack", "tile", "copy", "name"}
_STEPS = _MOVES | _COMPLEX | {"mul", "add", "add_any", "sub", "neg", "convert_element_type"}
_RESULTS = frozenset({"add", "add_any", "sub", "concatenate", "convert_element_type", "reshape"})
"""What may give the turned rows."""


class _UnlikeError(Exception):
    """Raised where a value is not the turned rows; the message says why, for debugging."""


class _Term(NamedTuple):
    """A column of the normalised rows with a sign and a factor."""

    sign: int
    column: int
    factor: Ref | None


_Terms: TypeAlias = tuple[_Term, ...]


def turned(graph: Graph, one: Normalisation) -> tuple[Normalisation, ...]:
    """Returns the normalisation with what turns its rows behind it, in several ways, the last value first; nothing
    where nothing does.

    Args:
      graph: the program.
      one: a normalisation.
    """
    own = [d for d, labels in enumerate(one.dimensions) if labels == one.columns]
    count = graph.shape(one.result.outputs[0])[own[0]] if own else 0
    if not 4 <= count <= _MOST_COLUMNS:
        return ()
    found: list[Normalisation] = []
    for node in _behind(graph, one.result):
        value = node.outputs[0]
        if node.name == "convert_element_type" and (not found or _widens(graph, node)):
            continue  # what comes next reads through it
        for axis in (d for d, n in reversed([*enumerate(graph.shape(value))]) if n == count):
            try:
                with bounded(graph):
                    found += _Reader(graph, one, own[0], value, axis).ways()
            except (_UnlikeError, Mismatch):
                continue
            break
    return tuple(found[: -1 - _MOST_WAYS : -1])


def _widens(graph: Graph, node: Node) -> bool:
    before, after = (graph.dtype(n) for n in (node.inputs[0], node.outputs[0]))
    return before.itemsize < after.itemsize


def _behind(graph: Graph, result: Node) -> Iterator[Node]:
    """Yields the nodes behind a normalisation that may give its turned rows, in order.

    What is added to something else, as to a residual stream, is not followed: that would lead through all of a program.
    """
    (number,) = result.outputs
    size = math.prod(graph.shape(number))
    waiting, met, own = [number], {number}, {number}
    while waiting and len(met) <= _MOST_USERS:
        at = heapq.heappop(waiting)
        if at != number:
            node = graph.definitions[at]
            count = sum(operand in own for operand in node.inputs)
            if count != (1 if node.name == "mul" else len(node.inputs)):
                continue
            own.add(at)
            if node.name in _RESULTS and is_floating(graph.dtype(at)) and math.prod(graph.shape(at)) == size:
                if not _only_moves(graph, node):
                    yield node
        for user in graph.users[at]:
            if user.name in _STEPS and not user.equation.effects:
                for output in user.outputs:
                    if output not in met:
                        met.add(output)
                        heapq.heappush(waiting, output)


def _only_moves(graph: Graph, node: Node) -> bool:
    """Returns whether a reshape gives an array whose last axis there was before."""
    return node.name == "reshape" and graph.shape(node.inputs[0])[-1:] == graph.shape(node.outputs[0])[-1:]


class _Reader:
    """Reads the columns of a value.

    Args:
      graph: the program.
      one: the normalisation.
      column_axis: the axis of its result that has the columns.
      value, axis: the value that is read, and its axis that has the columns.
    """

    def __init__(self, graph: Graph, one: Normalisation, column_axis: int, value: int, axis: int):
        self.graph, self.one, self.column_axis, self.axis = graph, one, column_axis, axis
        self.scope = Scope(graph)
        self.space = self.scope.space
        (self.rows,) = one.result.outputs
        self.scope.score = self.rows
        self.whole = self.space.full(value)
        self._at_rows: View | None = None
        self._known: dict[Hashable, _Terms] = {}

    def ways(self) -> list[Normalisation]:
        """Returns the normalisation with its turned rows: by cosines and sines as close to the rows as they are known,
        and before that one by those before all layout operations.

        Raises:
          _UnlikeError: the value is no turned rows.
        """
        count = self.graph.shape(self.whole.value)[self.axis]
        columns = []
        for column in range(count):
            view = (*self.whole.view[: self.axis], (column, ()), *self.whole.view[self.axis + 1 :])
            columns.append(_checked(column, self._real(Ref(self.whole.value, view), 0)))
        start, angles, neighbours = _pairs(columns)
        pair, angle = self.space.fresh(2), self.space.fresh(angles)
        step, apart = (2, 1) if neighbours else (1, angles)
        places = [[start + i * step + j * apart for i in range(angles)] for j in (0, 1)]
        firsts, seconds = ([columns[place] for place in own] for own in places)
        first, second = firsts[0][1].sign, seconds[0][1].sign
        if any(turn[1].sign != sign for own, sign in ((firsts, first), (seconds, second)) for turn in own):
            raise _UnlikeError("some pairs are turned one way, and others the other way")
        mapping, columns_of = self._labels()
        found: list[Normalisation] = []
        for nearest in (self.space.unrepeated, self.space.canonical):
            cos, sin = (
                self._table([turn[k].factor for turn in (*firsts, *seconds)], nearest, pair, angle) for k in (0, 1)
            )
            if cos is not None and sin is not None:
                turn = Turn(cos, sin, pair, angle, start, neighbours, first > 0, second < 0)
                if not found or found[0].turn != turn:
                    found.insert(0, self._whole(turn, mapping, columns_of))
        if not found:
            raise _UnlikeError("cosines or sines are not read from one array")
        return found

    # ------------------------------------------------------------------ single columns

    def _real(self, ref: Ref, depth: int) -> _Terms:
        """Reads a column of a value as a sum.

        Raises:
          _UnlikeError: it is something else.
        """
        at = before_layout(self.space, ref, self.rows)
        if at.value == self.rows:
            return (_Term(1, self._column(at), None),)
        if depth > _DEEPEST or not self.scope.depends(at.value):
            raise _UnlikeError("something else is added")
        key = at.value, self.space.view(at.view)
        if key not in self._known:
            self._known[key] = self._read(at, depth)
        return self._known[key]

    def _read(self, at: Ref, depth: int) -> _Terms:
        name, operands = self.scope.name(at), self._operands(at)
        match name:
            case "add" | "add_any" | "sub":
                one, other = (self._real(operand, depth + 1) for operand in operands)
                return (*one, *(_negative(other) if name == "sub" else other))
            case "neg":
                return _negative(self._real(operands[0], depth + 1))
            case "mul":
                of_rows, factor = self._factors(operands)
                terms, number = self._real(of_rows, depth + 1), self.scope.number(factor)
                if number in (1, -1):
                    return terms if number == 1 else _negative(terms)
                return _times(terms, factor)
            case "convert_element_type":
                source, target = (self.graph.dtype(r.value) for r in (operands[0], at))
                if rounds(source, target):
                    return self._real(operands[0], depth + 1)
            case "real" | "imag":
                return self._complex(operands[0], depth + 1)[name == "imag"]
        raise _UnlikeError(f"it passes through {name}")

    def _complex(self, ref: Ref, depth: int) -> tuple[_Terms, _Terms]:
        """Reads a column of complex numbers as two sums."""
        at = self.space.canonical(ref)
        name, operands = self.scope.name(at), self._operands(at)
        if depth > _DEEPEST:
            raise _UnlikeError("it is too long")
        match name:
            case "complex":
                real, imaginary = (self._real(operand, depth + 1) for operand in operands)
                return real, imaginary
            case "conj":
                real, imaginary = self._complex(operands[0], depth + 1)
                return real, _negative(imaginary)
            case "mul":
                of_rows, factor = self._factors(operands)
                a, b = self._complex(of_rows, depth + 1)
                c, d = self._parts(factor)
                return (*_times(a, c), *_negative(_times(b, d))), (*_times(a, d), *_times(b, c))
        raise _UnlikeError(f"it passes through {name}")

    def _parts(self, ref: Ref) -> tuple[Ref, Ref]:
        """Returns the real and the imaginary part of a factor that is computed from them."""
        at = self.space.canonical(ref)
        operands = self._operands(at)
        if self.scope.name(at) == "conj" or self.scope.name(at) != "complex":
            raise _UnlikeError("the real parts of complex factors are not values of the program")
        return operands[0], operands[1]

    def _operands(self, at: Ref) -> Sequence[Ref]:
        """Returns what the elementwise equation of a value reads."""
        node = self.graph.definitions.get(at.value)
        if node is not None and node.name in _COMPLEX:
            return [Ref(number, at.view) for number in node.inputs]
        return self.space.uses(at) or ()

    def _factors(self, operands: Sequence[Ref]) -> tuple[Ref, Ref]:
        """Returns the factor that depends on the rows, and the other one."""
        dependent = [operand for operand in operands if self.scope.depends(operand.value)]
        others = [operand for operand in operands if not self.scope.depends(operand.value)]
        if len(dependent) != 1 or len(others) != 1:
            raise _UnlikeError("rows are multiplied by rows")
        return dependent[0], others[0]

    def _column(self, at: Ref) -> int:
        """Returns which column of the rows a use reads; each use has to read the same rows."""
        view = self.space.view(at.view)
        column, atoms = view[self.column_axis]
        rows = (*view[: self.column_axis], *view[self.column_axis + 1 :])
        if atoms or any(offset for offset, _ in rows):
            raise _UnlikeError("rows and columns are exchanged")
        if self._at_rows is not None and self.space.view(self._at_rows) != rows:
            raise _UnlikeError("columns of different rows are combined")
        self._at_rows = rows
        return column

    # ------------------------------------------------------------------ all columns

    def _table(
        self,
        factors: Sequence[Ref | None],
        nearest: Callable[[Ref], Ref],
        pair: tuple[Atom, ...],
        angle: tuple[Atom, ...],
    ) -> Ref | None:
        """Returns the array from which a factor of each column is read, those of the first columns of all pairs first;
        None where they are not read from one array in the order of the pairs."""
        refs = [nearest(ref) for ref in factors if ref is not None]
        views = [self.space.view(ref.view) for ref in refs]
        count = len(factors) // 2
        if len({ref.value for ref in refs}) > 1 or len(refs) < len(factors):
            return None
        if not is_floating(self.graph.dtype(refs[0].value)):
            return None
        if any([own for _, own in view] != [own for _, own in views[0]] for view in views):
            return None
        places = [[view[d][0] for view in views] for d in range(len(views[0]))]
        view, each = [*views[0]], [*range(count)]
        for axis in (d for d, own in enumerate(places) if len(set(own)) > 1):
            base = places[axis][0]
            first, second = ([place - base for place in own] for own in (places[axis][:count], places[axis][count:]))
            if first == second == each:
                view[axis] = base, angle
            elif (first, second) == (each, [count + i for i in each]):
                view[axis] = base, (*pair, *angle)
            elif (first, second) == ([2 * i for i in each], [2 * i + 1 for i in each]):
                view[axis] = base, (*angle, *pair)
            elif (first, second) == ([0] * count, [1] * count):
                view[axis] = base, pair
            else:
                return None
        if any(atoms and len(set(places[d])) > 1 for d, (_, atoms) in enumerate(views[0])):
            return None
        labels = [atom for _, own in view for atom in own]
        return Ref(refs[0].value, tuple(view)) if labels.count(*angle) == 1 and labels.count(*pair) <= 1 else None

    def _labels(self) -> tuple[Mapping[Atom, tuple[Atom, ...]], tuple[Atom, ...]]:
        """Returns the labels here of each label of the normalisation, and those of its columns.

        Raises:
          _UnlikeError: the value does not have each row once.
        """
        space, one = self.space, self.one
        dimensions = [own for d, own in enumerate(one.dimensions) if d != self.column_axis]
        rows = self._at_rows or ()
        mapping: dict[Atom, tuple[Atom, ...]] = {atom: space.fresh(one.sizes[atom]) for atom in one.columns}
        for _ in range(2):  # cutting one axis may cut another
            for (_, atoms), own in zip(space.view(rows), dimensions, strict=True):
                groups = space.cut(atoms, [one.sizes[atom] for atom in own])
                if groups is None:
                    raise _UnlikeError("an axis of rows is cut otherwise")
                mapping |= {atom: group for atom, (_, group) in zip(own, groups, strict=True)}
        mapping = {atom: space.resolve(own) for atom, own in mapping.items()}
        there = sorted(
            atom for d, (_, own) in enumerate(self.whole.view) if d != self.axis for atom in space.resolve(own)
        )
        if there != sorted(atom for _, own in space.view(rows) for atom in own):
            raise _UnlikeError("rows are repeated or lacking")
        return mapping, tuple(atom for own in one.columns for atom in mapping[own])

    def _whole(self, turn: Turn, mapping: Mapping[Atom, tuple[Atom, ...]], columns: tuple[Atom, ...]) -> Normalisation:
        space, one = self.space, self.one
        rows = {atom for d, (_, own) in enumerate(self.whole.view) if d != self.axis for atom in space.resolve(own)}
        for ref in (turn.cos, turn.sin):
            own = [atom for _, labels in ref.view for atom in labels]
            if len(set(own)) < len(own) or not set(own) <= rows | {*turn.pair, *turn.angle}:
                raise _UnlikeError("cosines or sines vary along other axes")

        def viewed(ref: Ref | None) -> Ref | None:
            if ref is None:
                return None
            if any(atom not in mapping for _, own in ref.view for atom in own):
                raise _UnlikeError("an operand varies along an axis that the rows lack")
            return Ref(
                ref.value, tuple((offset, tuple(a for o in own for a in mapping[o])) for offset, own in ref.view)
            )

        x, scale, shift = viewed(one.x), viewed(one.scale), viewed(one.shift)
        assert x is not None
        dimensions = [columns if d == self.axis else space.resolve(own) for d, (_, own) in enumerate(self.whole.view)]
        result = self.graph.definitions[self.whole.value]
        return replace(
            one, result=result, x=x, scale=scale, shift=shift, dimensions=tuple(dimensions), columns=columns,
            sizes=dict(space.sizes), earlier=(scale, shift), turn=turn,
        )  # fmt: skip


def _negative(terms: _Terms) -> _Terms:
    return tuple(term._replace(sign=-term.sign) for term in terms)


def _times(terms: _Terms, factor: Ref) -> _Terms:
    if any(term.factor is not None for term in terms):
        raise _UnlikeError("a column is multiplied twice")
    return tuple(term._replace(factor=factor) for term in terms)


def _checked(column: int, terms: _Terms) -> _Terms:
    """Returns the terms of a column, its own first.

    Raises:
      _UnlikeError: they are not those of turned rows.
    """
    own = [term for term in terms if term.column == column]
    others = [term for term in terms if term.column != column]
    if len(own) != 1 or own[0].sign < 0 or len(others) > 1:
        raise _UnlikeError("a column is not that of turned rows")
    if any((term.factor is None) == bool(others) for term in terms):
        raise _UnlikeError("a column is not that of turned rows")
    return (*own, *others)


def _pairs(columns: Sequence[_Terms]) -> tuple[int, int, bool]:
    """Returns the first column that is turned, how many pairs there are, and whether they are neighbours.

    Raises:
      _UnlikeError: the columns do not come in pairs.
    """
    turned = [column for column, terms in enumerate(columns) if len(terms) > 1]
    start, angles = turned[0] if turned else 0, len(turned) // 2
    if angles < 2 or turned != [*range(start, start + 2 * angles)]:
        raise _UnlikeError("the columns that are turned are not neighbours")
    partners = [columns[column][1].column - start for column in turned]
    if partners == [i ^ 1 for i in range(2 * angles)]:
        return start, angles, True
    if partners == [(i + angles) % (2 * angles) for i in range(2 * angles)]:
        return start, angles, False
    raise _UnlikeError("the columns do not come in pairs")
