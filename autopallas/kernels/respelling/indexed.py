"""Loops that index arrays at their own step, as loops that are given slices and give results.

Under ``jax.grad`` a loop that reads ``x[i]`` adds to the whole of x's gradient in each step, zero but for one slice, so
that T steps cost T arrays of T slices.  Here each step gives its slice alone, and the arrays are put together after the
loop.  What a loop writes at its own step and reads nowhere else goes the same way.

A carried array is one of two things:

- a *sum*: steps add slices at positions that are known while the program is traced, and nothing reads it;
- a *table*: each step reads, replaces or adds to one slice, another one in each step.

Positions are computed with the program's own integer arithmetic (:mod:`known_integers`), step by step.  An array that
does anything else stays what the loop carries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal as OneOf

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import compat, jaxprs
from autopallas.compat import ClosedJaxpr, JaxprAtom, JaxprEqn, Literal, Var
from autopallas.kernels.respelling.known_integers import Array, of_steps

__all__ = ["IndexedLoop", "Place", "key_of", "planned"]

_ROUNDS = 8
"""How often a plan is made anew without the arrays that turned out to be neither sums nor tables."""

_ADDS = frozenset({"scatter-add", "scatter_add"})
_WRITES = _ADDS | {"dynamic_update_slice", "scatter"}


@dataclass(frozen=True)
class Place:
    """Position of a slice along one axis of an array, for all steps.

    Attributes:
      axis: the axis.
      positions: the positions, in the order of the loop's slices.
    """

    axis: int
    positions: tuple[int, ...]

    @property
    def first(self) -> int | None:
        """The smallest position if they are consecutive, else None."""
        least, count = min(self.positions), len(self.positions)
        rising = tuple(range(least, least + count))
        return least if self.positions in (rising, rising[::-1]) else None

    @property
    def falls(self) -> bool:
        return self.positions[0] > self.positions[-1]


@dataclass(frozen=True, repr=False)
class IndexedLoop:
    """A loop, and what each array is that it carries.

    Attributes:
      key: equal for equal loops, which jaxprs are not.
      step: from constants, carried values and slices to carried values and results.
      constants, carried: how many of each there are; the rest are slices.
      length: the number of steps.
      reverse: whether the last slices come first.
      unroll: steps that are compiled as one.
      operands: per operand of the loop its position among the site's operands, or the value of a literal.
      zeros: positions of the loop's operands that are zero in each element.
      known: what is known of the site's operands that are integers, as (position, array).
      tables: (number of the carried value, its place).
      sums: (number of the carried value, the places of what is added to it).
    """

    key: str
    step: ClosedJaxpr = field(compare=False)
    constants: int
    carried: int
    length: int
    reverse: bool
    unroll: int
    operands: tuple[int | np.generic | np.ndarray, ...] = field(compare=False)
    zeros: frozenset[int] = field(compare=False)
    known: tuple[tuple[int, Array], ...] = field(compare=False)
    tables: tuple[tuple[int, Place], ...] = field(compare=False)
    sums: tuple[tuple[int, tuple[Place, ...]], ...] = field(compare=False)

    def __repr__(self) -> str:
        arrays = len(self.tables) + len(self.sums)
        return f"{self.length} steps, {arrays} of {self.carried} carried values by slices, {self.key}"

    @cached_property
    def plan(self) -> Plan:
        return _Analysis(self, frozenset(i for i, _ in (*self.tables, *self.sums))).plan()

    def given(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the loop's operands of the site's."""
        return [operands[x] if isinstance(x, int) else jnp.asarray(x) for x in self.operands]

    def as_written(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the loop's results, as the program computes them."""
        given = self.given(operands)
        last = self.constants + self.carried

        def one(carried: list[jax.Array], own: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            found = compat.jaxpr_as_fun(self.step)(*given[: self.constants], *carried, *own)
            return list(found[: self.carried]), list(found[self.carried :])

        ends, results = lax.scan(
            one, given[self.constants : last], given[last:], self.length, self.reverse, unroll=self.unroll
        )
        return [*ends, *results]

    def by_slices(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the same, from a loop that is given slices and gives slices."""
        given = self.given(operands)
        last = self.constants + self.carried
        first = given[self.constants : last]
        tables, sums = dict(self.tables), dict(self.sums)
        kept = [i for i in range(self.carried) if i not in tables and i not in sums]
        rows = {i: _slices(first[i], place) for i, place in tables.items()}

        def one(
            carried: list[jax.Array], own: tuple[dict[int, jax.Array], list[jax.Array]]
        ) -> tuple[list[jax.Array], tuple[dict[int, jax.Array], dict[int, list[jax.Array]], list[jax.Array]]]:
            step = _Step(self, given[: self.constants], dict(zip(kept, carried, strict=True)), *own)
            return step.ends(kept), (step.rows(), step.added(), step.results())

        ends, (written, added, results) = lax.scan(
            one, [first[i] for i in kept], (rows, given[last:]), self.length, self.reverse, unroll=self.unroll
        )
        found = dict(zip(kept, ends, strict=True))
        for i, place in tables.items():
            found[i] = _with_slices(first[i], place, written[i])
        for i, places in sums.items():
            found[i] = first[i]
            for place, slices in zip(places, added[i], strict=True):
                found[i] = _plus_slices(found[i], place, slices)
        return [*(found[i] for i in range(self.carried)), *results]


# ---------------------------------------------------------------------- arrays and their slices


def _slices(array: jax.Array, place: Place) -> jax.Array:
    """Returns the slices of an array, with the steps in front; the axis stays, of size 1."""
    if place.first is not None:
        count = len(place.positions)
        found = lax.slice_in_dim(array, place.first, place.first + count, axis=place.axis)
        found = lax.rev(found, (place.axis,)) if place.falls else found
    else:
        found = jnp.take(array, np.asarray(place.positions), axis=place.axis, mode="clip")
    return jnp.expand_dims(jnp.moveaxis(found, place.axis, 0), place.axis + 1)


def _along(slices: jax.Array, place: Place) -> jax.Array:
    """Returns stacked slices side by side along their axis."""
    found = jnp.moveaxis(jnp.squeeze(slices, place.axis + 1), 0, place.axis)
    return lax.rev(found, (place.axis,)) if place.first is not None and place.falls else found


def _with_slices(array: jax.Array, place: Place, slices: jax.Array) -> jax.Array:
    """Returns an array with other slices."""
    block = _along(slices, place)
    if place.first is not None:
        whole = block.shape == array.shape
        return block if whole else lax.dynamic_update_slice_in_dim(array, block, place.first, place.axis)
    return array.at[(slice(None),) * place.axis + (np.asarray(place.positions),)].set(block, unique_indices=True)


def _plus_slices(array: jax.Array, place: Place, slices: jax.Array) -> jax.Array:
    """Returns an array with slices added to it."""
    block = _along(slices, place)
    if place.first is not None:
        if block.shape == array.shape:
            return array + block
        here = lax.slice_in_dim(array, place.first, place.first + len(place.positions), axis=place.axis)
        return lax.dynamic_update_slice_in_dim(array, here + block, place.first, place.axis)
    return array.at[(slice(None),) * place.axis + (np.asarray(place.positions),)].add(block)


# ---------------------------------------------------------------------- which arrays are what


@dataclass(frozen=True, slots=True)
class _Zeros:
    """Says of a variable that it is zero but for slices.

    Attributes:
      slices: (place, the variable with the slice) of each; the slices add up.
    """

    slices: tuple[tuple[Place, JaxprAtom], ...]


@dataclass(frozen=True, slots=True)
class Action:
    """What becomes of an equation that reads or gives a carried array.

    Attributes:
      carried: the number of the carried value.
      kind: "read" a slice, "set" it, or "add" to it.
      before: the variable with the array before.
      slices: what is set or added: (place, variable) of each slice.
    """

    carried: int
    kind: OneOf["read", "set", "add"]
    before: Var
    slices: tuple[tuple[Place, JaxprAtom], ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of each equation of a step.

    Attributes:
      actions: by the positions of equations; all other equations stay.
      tables, sums: as in :class:`IndexedLoop`.
      whole_sums: whether an equation adds whole arrays of which all but slices are zero.
    """

    actions: Mapping[int, Action]
    tables: tuple[tuple[int, Place], ...]
    sums: tuple[tuple[int, tuple[Place, ...]], ...]
    whole_sums: bool


class _Analysis:
    """Walks a step once, and follows the arrays that it carries."""

    def __init__(self, loop: IndexedLoop, candidates: frozenset[int]):
        jaxpr, _ = jaxprs.open_jaxpr(loop.step)
        self.equations, self.inputs, self.outputs = list(jaxpr.eqns), list(jaxpr.invars), list(jaxpr.outvars)
        self.loop, self.candidates = loop, candidates
        known = dict(loop.known)
        given = [known.get(x) if isinstance(x, int) else np.asarray(x) for x in loop.operands]
        given = [x if x is None or x.dtype.kind in "iub" else None for x in given]
        parts = loop.constants, loop.carried
        self.known = of_steps(self.equations, self.inputs, self.outputs, parts, given, loop.length, loop.reverse)
        carries = self.inputs[loop.constants : loop.constants + loop.carried]
        self.states: dict[Var, int] = {v: i for i, v in enumerate(carries) if i in candidates}
        self.zeros = {v: _Zeros(()) for i, v in enumerate(self.inputs[: loop.constants]) if i in loop.zeros}
        self.actions: dict[int, Action] = {}
        self.refused: set[int] = set()
        """The carried arrays that are neither sums nor tables."""
        self.whole_sums: set[int] = set()
        """The sums to which whole arrays are added of which all but slices are zero."""

    def plan(self) -> Plan:
        """Returns the plan, which holds if no array was refused."""
        for position, equation in enumerate(self.equations):
            self._follow(position, equation)
        for i, atom in enumerate(self.outputs):
            found = self.states.get(atom) if isinstance(atom, Var) else None
            if i in self.candidates and found != i:
                self.refused.add(i)
            if found is not None and found != i:
                self.refused.add(found)
        tables: list[tuple[int, Place]] = []
        sums: list[tuple[int, tuple[Place, ...]]] = []
        actions: dict[int, list[Action]] = {i: [] for i in sorted(self.candidates)}
        for action in self.actions.values():
            actions[action.carried].append(action)
        for i, own in actions.items():
            if not own:
                self.refused.add(i)
                continue
            if all(action.kind == "add" for action in own) and self._is_chain(i, own):
                sums.append((i, tuple(place for action in own for place, _ in action.slices)))
                continue
            places = {place for action in own for place, _ in action.slices}
            if len(places) != 1 or len(set(next(iter(places)).positions)) != self.loop.length:
                self.refused.add(i)
                continue
            tables.append((i, places.pop()))
        return Plan(self.actions, tuple(tables), tuple(sums), bool(self.whole_sums))

    def _is_chain(self, carried: int, actions: Sequence[Action]) -> bool:
        """Returns whether each addition is to the sum of the ones before it, and the last sum is carried on."""
        results = {self.equations[p].outvars[0]: a for p, a in self.actions.items() if a.carried == carried}
        variable, count = self.outputs[carried], 0
        while isinstance(variable, Var) and variable in results:
            variable, count = results[variable].before, count + 1
        return count == len(actions)

    def _follow(self, position: int, equation: JaxprEqn) -> None:
        read = [v for v in equation.invars if isinstance(v, Var) and self.states.get(v, -1) not in (-1, *self.refused)]
        name = jaxprs.operation_name(equation)
        if not read:
            self._zero_but_for_slices(name, equation)
            return
        before = read[0]
        carried = self.states[before]
        action: Action | None = None
        if len(read) == 1 and name in ("add", "add_any"):
            (other,) = (v for v in equation.invars if v is not before)
            zeros = self.zeros.get(other) if isinstance(other, Var) else None
            if zeros is not None and zeros.slices and other.aval.shape == before.aval.shape:
                self.whole_sums.add(carried)
                action = Action(carried, "add", before, zeros.slices)
        elif len(read) == 1 and equation.invars[0] is before:
            action = self._slice_of(name, equation, carried, before)
        if action is None:
            self.refused.update(self.states[v] for v in read)
            return
        self.actions[position] = action
        if action.kind != "read":
            self.states[equation.outvars[0]] = carried

    def _slice_of(self, name: str, equation: JaxprEqn, carried: int, before: Var) -> Action | None:
        """Returns what an equation does with a slice of a carried array."""
        if name in ("dynamic_slice", "gather"):
            place = self._place_read(name, equation)
            return None if place is None else Action(carried, "read", before, ((place, equation.outvars[0]),))
        if name in _WRITES:
            place = self._place_written(name, equation)
            if place is None:
                return None
            update = equation.invars[1 if name == "dynamic_update_slice" else 2]
            return Action(carried, "add" if name in _ADDS else "set", before, ((place, update),))
        return None

    def _zero_but_for_slices(self, name: str, equation: JaxprEqn) -> None:
        """Notes results that are zero, or zero but for slices."""
        given = equation.invars
        if len(equation.outvars) != 1 or not equation.outvars[0].aval.shape:
            return
        (result,) = equation.outvars
        if name == "broadcast_in_dim" and isinstance(given[0], Literal) and not np.any(np.asarray(given[0].val)):
            self.zeros[result] = _Zeros(())
        elif name in ("add", "add_any"):
            both = [self.zeros.get(v) if isinstance(v, Var) else None for v in given]
            if all(x is not None for x in both):
                self.zeros[result] = _Zeros(tuple(s for x in both if x is not None for s in x.slices))
        elif name in _WRITES:
            base = self.zeros.get(given[0]) if isinstance(given[0], Var) else None
            if base is not None and not base.slices:
                place = self._place_written(name, equation)
                if place is not None:
                    update = given[1 if name == "dynamic_update_slice" else 2]
                    self.zeros[result] = _Zeros(((place, update),))

    # ------------------------------------------------------------------ positions

    def _steps(self, atom: JaxprAtom) -> Array | None:
        if isinstance(atom, Var):
            return self.known.get(atom)
        if atom.aval.dtype.kind not in "iu":
            return None
        value = np.asarray(atom.val)
        return np.broadcast_to(value, (self.loop.length, *value.shape))

    def _place(
        self, shape: Sequence[int], sizes: Sequence[int], starts: Mapping[int, Array | None], clips: bool
    ) -> Place | None:
        """Returns the place of a window that spans all axes but one, of which it has one position.

        Args:
          shape: of the array.
          sizes: of the window.
          starts: by axis, for all steps, None where it is not known; elsewhere the window begins at 0.
          clips: whether a window is moved until it lies in the array; else it has to lie there.
        """
        narrow = [axis for axis in starts if sizes[axis] == 1 and shape[axis] > 1]
        if len(narrow) != 1 or any(n != m for a, (n, m) in enumerate(zip(shape, sizes, strict=True)) if a != narrow[0]):
            return None
        (axis,) = narrow
        for other, values in starts.items():
            if values is None:
                if not clips or other == axis:
                    return None
                continue  # the window spans this axis, and is moved to its beginning
            values = values.astype(np.int64)
            if not clips and (np.any(values < 0) or np.any(values > shape[other] - sizes[other])):
                return None
            if other == axis:
                positions = np.clip(values, 0, shape[axis] - 1)
        return Place(axis, tuple(int(x) for x in positions.reshape(-1)))

    def _starts(self, indices: JaxprAtom, axes: Sequence[int]) -> dict[int, Array | None] | None:
        """Returns the single index of a gather or scatter by axis, for all steps."""
        values = self._steps(indices)
        if values is None or values.shape != (self.loop.length, len(axes)):
            return None
        return {int(axis): values[:, n] for n, axis in enumerate(axes)}

    def _place_read(self, name: str, equation: JaxprEqn) -> Place | None:
        shape = equation.invars[0].aval.shape
        sizes = tuple(equation.params["slice_sizes"])
        if name == "dynamic_slice":
            return self._place(shape, sizes, dict(enumerate(map(self._steps, equation.invars[1:]))), clips=True)
        numbers = equation.params["dimension_numbers"]
        starts = self._starts(equation.invars[1], numbers.start_index_map)
        if starts is None or numbers.operand_batching_dims:
            return None
        if tuple(numbers.offset_dims) != tuple(range(len(equation.outvars[0].aval.shape))):
            return None
        return self._place(shape, sizes, starts, clips=False)

    def _place_written(self, name: str, equation: JaxprEqn) -> Place | None:
        shape = equation.invars[0].aval.shape
        if name == "dynamic_update_slice":
            _, update, *starts = equation.invars
            return self._place(shape, update.aval.shape, dict(enumerate(map(self._steps, starts))), clips=True)
        _, indices, update = equation.invars
        numbers = equation.params["dimension_numbers"]
        found = self._starts(indices, numbers.scatter_dims_to_operand_dims)
        window = tuple(range(len(update.aval.shape)))
        if found is None or numbers.operand_batching_dims or tuple(numbers.update_window_dims) != window:
            return None
        inserted = {int(axis) for axis in numbers.inserted_window_dims}
        given = iter(update.aval.shape)
        sizes = [1 if axis in inserted else next(given) for axis in range(len(shape))]
        return self._place(shape, sizes, found, clips=False)


def planned(loop: IndexedLoop) -> Plan | None:
    """Returns the plan of a loop whose tables and sums are not known yet, or None if it would gain nothing."""
    candidates = frozenset(
        i
        for i, v in enumerate(loop.step.jaxpr.invars[loop.constants : loop.constants + loop.carried])
        if getattr(v.aval, "shape", ())
    )
    for _ in range(_ROUNDS):
        analysis = _Analysis(loop, candidates)
        plan = analysis.plan()
        if not analysis.refused:
            return plan if plan.whole_sums else None
        candidates -= analysis.refused
    return None


def key_of(loop: IndexedLoop) -> str:
    """Returns a key that is equal for loops of equal text, parameters and known integers."""
    found = hashlib.sha256(f"{loop.step} {loop.zeros} {loop.unroll}".encode())
    for operand in loop.operands:
        found.update(repr(operand).encode())
    for position, array in loop.known:
        found.update(f"{position} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


# ---------------------------------------------------------------------- one step


class _Step:
    """Computes one step without the arrays that are sums and tables."""

    def __init__(
        self,
        loop: IndexedLoop,
        constants: Sequence[jax.Array],
        carried: Mapping[int, jax.Array],
        rows: Mapping[int, jax.Array],
        slices: Sequence[jax.Array],
    ):
        jaxpr, captured = jaxprs.open_jaxpr(loop.step)
        self.loop, self.equations, self.outputs = loop, list(jaxpr.eqns), list(jaxpr.outvars)
        inputs, last = list(jaxpr.invars), loop.constants + loop.carried
        carries = inputs[loop.constants : last]
        self.values: dict[Var, jax.Array] = dict(zip(jaxpr.constvars, captured, strict=True))
        self.values.update(zip(inputs[: loop.constants], constants, strict=True))
        self.values.update((carries[i], x) for i, x in carried.items())
        self.values.update(zip(inputs[last:], slices, strict=True))
        self.own: dict[Var, jax.Array] = {carries[i]: x for i, x in rows.items()}
        """The slice of each table, by the variable that has the table."""
        self.definitions = {v: e for e in self.equations for v in e.outvars}
        self.sums: dict[int, list[jax.Array]] = {i: [] for i, _ in loop.sums}
        for position in range(len(self.equations)):
            action = loop.plan.actions.get(position)
            if action is not None:
                self._act(action, self.equations[position])

    def _act(self, action: Action, equation: JaxprEqn) -> None:
        if action.carried in self.sums:
            shapes = ((place, self.value(atom)) for place, atom in action.slices)
            self.sums[action.carried] += [_with_axis(x, action.before.aval.shape, place) for place, x in shapes]
            return
        row, (result,) = self.own[action.before], equation.outvars
        if action.kind == "read":
            self.values[result] = row.reshape(result.aval.shape)
            return
        new = [_with_axis(self.value(atom), action.before.aval.shape, place) for place, atom in action.slices]
        for x in new:
            row = x if action.kind == "set" else row + x
        self.own[result] = row

    def value(self, atom: JaxprAtom) -> jax.Array:
        """Returns a value, and computes what it needs."""
        if isinstance(atom, Literal):
            return jnp.asarray(atom.val, atom.aval.dtype)
        todo = [atom]
        while todo:
            variable = todo[-1]
            if variable in self.values:
                todo.pop()
                continue
            equation = self.definitions[variable]
            missing = [v for v in equation.invars if isinstance(v, Var) and v not in self.values]
            if missing:
                todo += missing
                continue
            given = [
                self.values[v] if isinstance(v, Var) else jnp.asarray(v.val, v.aval.dtype) for v in equation.invars
            ]
            inputs = [Var(v.aval) for v in equation.invars]
            outputs = [Var(v.aval) for v in equation.outvars]
            info = jaxprs.debug_info("indexed_loop", len(inputs), len(outputs))
            alone = equation.replace(invars=inputs, outvars=outputs)
            program = ClosedJaxpr(compat.new_jaxpr([], inputs, outputs, [alone], equation.effects, info), [])
            self.values.update(zip(equation.outvars, compat.jaxpr_as_fun(program)(*given), strict=True))
        return self.values[atom]

    def ends(self, kept: Sequence[int]) -> list[jax.Array]:
        return [self.value(self.outputs[i]) for i in kept]

    def rows(self) -> dict[int, jax.Array]:
        found: dict[int, jax.Array] = {}
        for i, _ in self.loop.tables:
            variable = self.outputs[i]
            assert isinstance(variable, Var)
            found[i] = self.own[variable]
        return found

    def added(self) -> dict[int, list[jax.Array]]:
        return self.sums

    def results(self) -> list[jax.Array]:
        return [self.value(atom) for atom in self.outputs[self.loop.carried :]]


def _with_axis(x: jax.Array, shape: Sequence[int], place: Place) -> jax.Array:
    """Returns a slice of an array with the axis along which it was cut, of size 1."""
    return x.reshape((*shape[: place.axis], 1, *shape[place.axis + 1 :]))
