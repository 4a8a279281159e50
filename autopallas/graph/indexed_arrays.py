"""Tells which arrays a loop reads and writes by slices, at positions that are known while the program is traced.

A carried array may be one of two things:

- a *sum*: steps add slices at known positions, and nothing reads it;
- a *table*: each step comes to a slice of its own, and reads, replaces or adds to that one and to those to which a few
  steps before it came.

Positions are computed with the program's own integer arithmetic (:mod:`known_integers`), step by step.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal as OneOf
from typing import NamedTuple

import numpy as np

from autopallas import array_types, jaxprs
from autopallas.compat import JaxprAtom, JaxprEqn, Literal, Var
from autopallas.graph.array_slices import Place
from autopallas.graph.known_integers import Array, of_steps
from autopallas.graph.tables import Access, Table, table_of
from autopallas.numerics.casts import kind_of

__all__ = ["READS", "WRITES", "Action", "IndexedArrays", "Plan", "Steps"]

READS = frozenset({"dynamic_slice", "gather"})
"""Primitives that read slices of an array."""
_ADDS = frozenset({"scatter-add", "scatter_add"})
WRITES = _ADDS | {"dynamic_update_slice", "scatter"}
"""Primitives that write slices of an array."""


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
      tables: (number of the carried value, how steps come to its slices).
      sums: (number of the carried value, the places of what is added to it).
      whole_sums: whether an equation adds whole arrays of which all but slices are zero.
      clears: whether an equation sets a slice to zero, as the derivative of one that sets it does.
      stacks: whether steps read slices of an array, set others of it, and stack results, as a loop does that keeps what
        it read for its backward.
      sets: whether steps set slices of an array, and stack results that are not known while the program is traced, as
        the forward does of a loop that sets ``y.at[i]``.
    """

    actions: Mapping[int, Action]
    tables: tuple[tuple[int, Table], ...]
    sums: tuple[tuple[int, tuple[Place, ...]], ...]
    whole_sums: bool
    clears: bool
    stacks: bool
    sets: bool


class Steps(NamedTuple):
    """What all steps of a loop compute, and what is known of it.

    Attributes:
      equations, inputs, outputs: of one step; inputs are constants, carried values and slices, outputs carried values
        and results.
      constants, carried: how many of each there are.
      known: what is known of each input of the loop, as of :func:`~autopallas.graph.known_integers.of_steps`.
      zeros: the positions of constants that are zero in each element.
      length, reverse: of the loop.
    """

    equations: Sequence[JaxprEqn]
    inputs: Sequence[Var]
    outputs: Sequence[JaxprAtom]
    constants: int
    carried: int
    known: Sequence[Array | None]
    zeros: Container[int]
    length: int
    reverse: bool


class IndexedArrays:
    """Walks a step once, and follows arrays that it reads and writes by slices.

    Attributes:
      late: whether tables sum what is added to a row on its own, until more is done with it.
      reads: by the positions of equations, the place at which each reads one of the constants in ``arrays``.
      refused: after a plan was made, the carried arrays that are neither sums nor tables.
    """

    def __init__(
        self, steps: Steps, candidates: frozenset[int], arrays: frozenset[Var] = frozenset(), late: bool = True
    ):
        self.steps, self.candidates, self.arrays, self.late = steps, candidates, arrays, late
        parts = steps.constants, steps.carried
        self.known = of_steps(
            steps.equations, steps.inputs, steps.outputs, parts, steps.known, steps.length, steps.reverse
        )
        carries = steps.inputs[steps.constants : steps.constants + steps.carried]
        self.states: dict[Var, int] = {v: i for i, v in enumerate(carries) if i in candidates}
        self.zeros = {v: _Zeros(()) for i, v in enumerate(steps.inputs[: steps.constants]) if i in steps.zeros}
        self.actions: dict[int, Action] = {}
        self.reads: dict[int, Place] = {}
        self.refused: set[int] = set()
        self.whole_sums: set[int] = set()
        """The sums to which whole arrays are added of which all but slices are zero."""
        self.cleared: set[int] = set()
        """The arrays of which slices are set to zero."""

    def plan(self) -> Plan:
        """Returns the plan, which holds if no array was refused."""
        for position, equation in enumerate(self.steps.equations):
            self._follow(position, equation)
        for i, atom in enumerate(self.steps.outputs):
            found = self.states.get(atom) if isinstance(atom, Var) else None
            if i in self.candidates and found != i:
                self.refused.add(i)
            if found is not None and found != i:
                self.refused.add(found)
        tables: list[tuple[int, Table]] = []
        sums: list[tuple[int, tuple[Place, ...]]] = []
        actions: dict[int, list[tuple[Action, Var]]] = {i: [] for i in sorted(self.candidates)}
        for position, action in self.actions.items():
            actions[action.carried].append((action, self.steps.equations[position].outvars[0]))
        for i, own in actions.items():
            if not own:
                self.refused.add(i)
                continue
            if all(action.kind == "add" for action, _ in own) and self._is_chain(i, own):
                sums.append((i, tuple(place for action, _ in own for place, _ in action.slices)))
                continue
            table = self._table(i, own)
            if table is None:
                self.refused.add(i)
                continue
            tables.append((i, table))
        copied = any({action.kind for action, _ in actions[i]} >= {"read", "set"} for i, _ in tables)
        results = self.steps.outputs[self.steps.carried :]
        sets = any(action.kind == "set" for i, _ in tables for action, _ in actions[i])
        sets = sets and any(self._steps(atom) is None for atom in results)
        flags = bool(self.whole_sums), bool(self.cleared), copied and bool(results), sets
        return Plan(self.actions, tuple(tables), tuple(sums), *flags)

    def _table(self, carried: int, actions: Sequence[tuple[Action, Var]]) -> Table | None:
        """Returns how steps come to the slices of an array; None where it is no table."""
        carry = self.steps.inputs[self.steps.constants + carried]
        versions, accesses, newest, in_turn = {carry: 0}, list[Access](), 0, True
        for action, made in actions:
            version = versions[action.before]
            accesses += [Access(place, version, action.kind) for place, _ in action.slices]
            if action.kind != "read":
                in_turn &= version == newest
                versions[made] = newest = version + 1
        result = self.steps.outputs[carried]
        in_turn &= isinstance(result, Var) and versions.get(result) == newest
        table = table_of(accesses, self.steps.length, self.steps.reverse, in_turn, self.late)
        if table is not None and table.depth:  # rows that are carried would need types of their own
            typed = array_types.explicit_sharding(carry.aval) is not None or array_types.varying_axes([carry.aval])
            return None if typed else table
        return table

    def _is_chain(self, carried: int, actions: Sequence[tuple[Action, Var]]) -> bool:
        """Returns whether each addition is to the sum of the ones before it, and the last sum is carried on."""
        results = {made: action for action, made in actions}
        variable, count = self.steps.outputs[carried], 0
        while isinstance(variable, Var) and variable in results:
            variable, count = results[variable].before, count + 1
        return count == len(actions)

    def _follow(self, position: int, equation: JaxprEqn) -> None:
        read = [v for v in equation.invars if isinstance(v, Var) and self.states.get(v, -1) not in (-1, *self.refused)]
        name = jaxprs.operation_name(equation)
        if not read:
            if name in READS and isinstance(equation.invars[0], Var) and equation.invars[0] in self.arrays:
                place = self._place_read(name, equation)
                if place is not None:
                    self.reads[position] = place
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
        if name in READS:
            place = self._place_read(name, equation)
            return None if place is None else Action(carried, "read", before, ((place, equation.outvars[0]),))
        if name in WRITES:
            place = self._place_written(name, equation)
            if place is None:
                return None
            update = equation.invars[1 if name == "dynamic_update_slice" else 2]
            if name not in _ADDS and self._is_zero(update):
                self.cleared.add(carried)
            return Action(carried, "add" if name in _ADDS else "set", before, ((place, update),))
        return None

    def _is_zero(self, atom: JaxprAtom) -> bool:
        if isinstance(atom, Literal):
            return not np.any(np.asarray(atom.val))
        zeros = self.zeros.get(atom)
        return zeros is not None and not zeros.slices

    def _zero_but_for_slices(self, name: str, equation: JaxprEqn) -> None:
        """Notes results that are zero, or zero but for slices."""
        given = equation.invars
        if len(equation.outvars) != 1 or not equation.outvars[0].aval.shape:
            return
        (result,) = equation.outvars
        if name == "broadcast_in_dim" and isinstance(given[0], Literal) and self._is_zero(given[0]):
            self.zeros[result] = _Zeros(())
        elif name in jaxprs.VARYING and isinstance(given[0], Var) and given[0] in self.zeros:
            self.zeros[result] = self.zeros[given[0]]
        elif name in ("add", "add_any"):
            both = [self.zeros.get(v) if isinstance(v, Var) else None for v in given]
            if all(x is not None for x in both):
                self.zeros[result] = _Zeros(tuple(s for x in both if x is not None for s in x.slices))
        elif name in WRITES:
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
        if kind_of(atom.aval.dtype) not in "iu":
            return None
        value = np.asarray(atom.val)
        return np.broadcast_to(value, (self.steps.length, *value.shape))

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
        return Place(axis, tuple(positions.reshape(-1).tolist()))

    def _starts(self, indices: JaxprAtom, axes: Sequence[int]) -> dict[int, Array | None] | None:
        """Returns the single index of a gather or scatter by axis, for all steps."""
        values = self._steps(indices)
        if values is None or values.shape != (self.steps.length, len(axes)):
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
