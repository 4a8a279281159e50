"""Runs a recurrence in its different forms; all return the last carried values and the stacked results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from string import ascii_letters
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.compat import JaxprAtom, JaxprEqn, Var
from autopallas.kernels.recurrence.chunks import OfChunks, Recurrence, chunked
from autopallas.kernels.recurrence.loop import AllSteps, Loop
from autopallas.kernels.recurrence.products import times
from autopallas.kernels.recurrence.structure import Axes, Factor, Known, Labels, MatrixState, Readout, Term
from autopallas.sites.spec import Dtype

__all__ = ["in_chunks", "is_product", "products_apart", "without_products"]

Array: TypeAlias = jax.Array


# ---------------------------------------------------------------------- the loop without its products


def without_products(loop: Loop, known: Sequence[Known], operands: Sequence[Array]) -> list[Array]:
    """Computes products with matrices that are the same in all steps before and after the loop."""
    steps = AllSteps(loop, operands)
    early = _early(loop, known)
    before, after = products_apart(loop, early)
    last: dict[int, Array] = {}
    for value in early:
        last |= _computed(steps, value)
    steps.compute(v for e in before for v in e.outvars)
    late = {v for e in after for v in e.outvars}
    between = [a for e in after for a in e.invars if isinstance(a, Var) and a not in late]
    results = [a for a in loop.outputs[loop.carried :] if isinstance(a, Var)]
    inside = [place for place in range(loop.carried) if place not in last]
    dependent = _dependent(loop, inside)
    inner = dict.fromkeys(v for v in (*between, *results) if v in dependent and v not in late)
    last |= steps.scan(inside, [*inner] or [loop.carries[place] for place in inside])
    steps.compute(results)
    return [*(last[i] for i in range(loop.carried)), *map(steps.stacked, loop.outputs[loop.carried :])]


def products_apart(loop: Loop, known: Sequence[Known]) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Returns the products with matrices of all steps that do not read carried values, but for those that are known
    before the loop; and the equations behind those that do, if these do not lead to the carried values."""
    early = {value.carry: value.kind for value in _early(loop, known)}
    dependent = _dependent(loop, [place for place in range(loop.carried) if place not in early])
    slices = loop.inputs[loop.constants + loop.carried :]
    varying = {*slices, *dependent, *(loop.carries[i] for i, kind in early.items() if kind == "shifted")}
    carried = [a for i, a in enumerate(loop.outputs[: loop.carried]) if i not in early and isinstance(a, Var)]
    leading = set(loop.leading_to(carried, {}))
    before: list[JaxprEqn] = []
    after: list[JaxprEqn] = []
    late: set[Var] = set()
    for position, equation in enumerate(loop.equations):
        read = [a for a in equation.invars if isinstance(a, Var)]
        own = [a for a in read if a in varying]
        if own:
            varying.update(equation.outvars)
        product = is_product(equation) and len(own) == 1
        if product and not dependent.intersection(own):
            before.append(equation)
        elif position not in leading and (late.intersection(read) or product):
            after.append(equation)
            late.update(equation.outvars)
    return before, after


def _early(loop: Loop, known: Sequence[Known]) -> list[Known]:
    """Returns the carried values that are known before the loop without a loop of their own."""
    found: list[Known] = []
    for value in known:
        others = set(loop.carries) - {loop.carries[own.carry] for own in found}
        after = loop.outputs[value.carry]
        wanted = [after] if isinstance(after, Var) else []
        read = {*wanted, *_read(loop, loop.leading_to(wanted, {}))}
        if value.kind == "constant" or (value.kind == "shifted" and others.isdisjoint(read)):
            found.append(value)
    return found


def _read(loop: Loop, positions: Sequence[int]) -> set[Var]:
    """Returns the variables that equations read."""
    return {a for i in positions for a in loop.equations[i].invars if isinstance(a, Var)}


def is_product(equation: JaxprEqn) -> bool:
    """Returns whether an equation sums products over an axis."""
    if equation.primitive.name == "dot_general":
        return bool(equation.params["dimension_numbers"][0][0])
    return equation.primitive.name == "conv_general_dilated"


def _dependent(loop: Loop, carried: Sequence[int]) -> set[Var]:
    """Returns the variables that depend on some of the carried values."""
    found = {loop.carries[place] for place in carried}
    for equation in loop.equations:
        if not found.isdisjoint([a for a in equation.invars if isinstance(a, Var)]):
            found.update(equation.outvars)
    return found


# ---------------------------------------------------------------------- chunks


def in_chunks(
    loop: Loop,
    known: Sequence[Known],
    states: Sequence[MatrixState],
    sizes: Mapping[int, int],
    dtype: Dtype,
    chunk: int,
    of_chunks: OfChunks,
    operands: Sequence[Array],
) -> list[Array]:
    """Computes states in chunks of steps, and everything else for all steps at once.

    Args:
      loop: the loop.
      known: the other carried values, in the order in which they can be computed.
      states: the states.
      sizes: the size of each label.
      dtype: in which the states are computed.
      chunk: the number of steps of a chunk.
      of_chunks: what computes chunks.
      operands: the site's operands.
    """
    steps = AllSteps(loop, operands)
    last: dict[int, Array] = {}
    for value in known:
        if value.kind != "last":
            last |= _computed(steps, value)
    for state in states:
        last[state.carry] = _State(steps, state, sizes, dtype).run(chunk, of_chunks)
    for value in known:
        if value.kind == "last":
            last[value.carry] = _sequence(steps, loop.outputs[value.carry])[-1]
    results = loop.outputs[loop.carried :]
    steps.compute(a for a in results if isinstance(a, Var))
    return [*(last[i] for i in range(loop.carried)), *map(steps.stacked, results)]


def _computed(steps: AllSteps, value: Known) -> dict[int, Array]:
    """Makes known what a carried value is before each step; returns what it is at the end."""
    loop, place = steps.loop, value.carry
    variable, after, first = loop.carries[place], loop.outputs[place], steps.first[place]
    match value.kind:
        case "constant":
            steps.fixed[variable] = first
            return {place: first}
        case "shifted":
            found = _sequence(steps, after)
            steps.varying[variable] = jnp.concatenate([first[None], found[:-1]])
            return {place: found[-1]}
        case _:
            return steps.scan([place], [])


def _sequence(steps: AllSteps, atom: JaxprAtom) -> Array:
    """Returns the values of a variable in all steps, the first step's first."""
    if isinstance(atom, Var):
        steps.compute([atom])
    found = steps.stacked(atom)
    return jnp.flip(found, 0) if steps.loop.reverse else found


class _State:
    """One state in canonical arrays."""

    def __init__(self, steps: AllSteps, state: MatrixState, sizes: Mapping[int, int], dtype: Dtype):
        self.steps, self.state, self.sizes, self.dtype = steps, state, sizes, dtype

    def run(self, chunk: int, of_chunks: OfChunks) -> Array:
        """Makes the readouts known; returns the last state."""
        state, variables = self.state, self.steps.loop.variables
        terms = [*state.decay, state.key, state.value, *_terms_of(state.readouts)]
        terms += [] if state.correction is None else state.correction.terms()
        self.steps.compute(variables[factor.variable] for term in terms for factor in term.factors)
        rows, heads, columns = state.rows, (*state.groups, *state.heads), state.columns
        inner = rows if state.by_channel else ()
        decay = sum(self._array(term, (*heads, *inner)) for term in state.decay)
        decay = self._grouped(jnp.asarray(decay), state.groups, state.heads, *([rows] if inner else []))
        excess = self._excess((*heads, *inner))
        if excess is not None:
            excess = self._grouped(excess, state.groups, state.heads, *([rows] if inner else []))
        key = self._grouped(self._array(state.key, (*state.groups, *rows)), state.groups, (), rows)
        value = self._grouped(self._array(state.value, (*heads, *columns)), state.groups, state.heads, columns)
        probe, write = self._correction()
        axes = (*heads, *rows, *columns)
        first = self.steps.first[state.carry].astype(self.dtype)
        own = tuple(label for label in state.axes if label is not None)
        first = first.reshape([self.sizes[a] for a in own]).transpose([own.index(a) for a in axes])
        first = first.reshape([self._extent(group) for group in (state.groups, state.heads, rows, columns)])
        last = first
        for readout in state.readouts:
            found = self._free(readout)
            for before, query, further in readout.queries:
                q = self._grouped(self._array(query, (*state.groups, *rows)), state.groups, (), rows)
                given = Recurrence(decay, key, value, q, first, excess, probe, write)
                y, last = chunked(given, chunk, before, of_chunks)
                y = y.reshape(y.shape[0], *(self.sizes[a] for a in (*heads, *columns)))
                found = found + self._in_axes(y, (*heads, *columns), readout.axes) * self._spread(further, readout)
            aval = variables[readout.variable].aval
            shape = (self.steps.loop.length, *aval.shape)
            self.steps.varying[variables[readout.variable]] = jnp.broadcast_to(found, shape).astype(aval.dtype)
        last = last.reshape([self.sizes[a] for a in axes]).transpose([axes.index(a) for a in own])
        return last.reshape(self.steps.first[state.carry].shape).astype(self.steps.first[state.carry].dtype)

    def _correction(self) -> tuple[Array | None, Array | None]:
        """Returns what the delta rule reads by, with its factors, and what it writes by, if not the key."""
        state, own = self.state, self.state.correction
        if own is None:
            return None, None
        groups, heads, rows = state.groups, state.heads, state.rows
        factor = sum(self._array(term, (*groups, *heads)) for term in own.factors)
        probe = self._grouped(self._array(own.probe, (*groups, *rows)), groups, (), rows)
        probe = probe * self._grouped(jnp.asarray(factor), groups, heads)[..., None]
        if own.write is None:
            return probe, None
        return probe, self._grouped(self._array(own.write, (*groups, *rows)), groups, (), rows)

    def _excess(self, labels: Labels) -> Array | None:
        """Returns the decay minus one as exactly as its terms have it; None where the decay itself is as exact.

        A decay such as ``1 - a`` or ``1 / (1 + a)`` loses digits of a small ``a`` where it is rounded.
        """
        terms = self.state.decay
        if len(terms) == 1 and len(terms[0].factors) == 1 and terms[0].coefficient == 1:
            if not terms[0].factors[0].inverse:
                return None
        if len(terms) == 1 and terms[0].labels <= set(labels):
            return lax.stop_gradient(self._excess_of_product(terms[0], labels))
        whole = sum(term.coefficient for term in terms if not term.factors)
        found = jnp.full((1,) * (1 + len(labels)), whole - 1, self.dtype)
        rest = [term for term in terms if term.factors]
        for term in sorted(rest, key=lambda term: any(factor.case is None for factor in term.factors)):
            found = found + self._array(term, labels)  # selections, which sum up to whole numbers, come first
        return lax.stop_gradient(found)

    def _excess_of_product(self, term: Term, labels: Labels) -> Array:
        """Returns a product of factors, minus one."""
        shape = (1,) * (1 + len(labels))
        product = jnp.full(shape, term.coefficient, self.dtype)
        excess = jnp.full(shape, term.coefficient - 1, self.dtype)
        for factor in term.factors:
            own = self._array(Term(1.0, (replace(factor, inverse=False),)), labels)
            further = own - 1
            if factor.inverse:
                own, further = 1 / own, -further / own
            product, excess = times(product, excess, own, further)
        return excess

    def _extent(self, labels: Labels) -> int:
        return math.prod(self.sizes[a] for a in labels)

    def _free(self, readout: Readout) -> Array:
        """Returns the terms without the state, with an axis of steps and those of the readout."""
        found = jnp.zeros((1,) * (1 + len(readout.axes)), self.dtype)
        for term in readout.others:
            found = found + self._spread(term, readout)
        return found

    def _spread(self, term: Term, readout: Readout) -> Array:
        labels = tuple(a for a in readout.axes if a is not None)
        return self._in_axes(self._array(term, labels), labels, readout.axes)

    def _in_axes(self, x: Array, labels: Labels, axes: Axes) -> Array:
        """Returns [T, ...] with the dimensions of a variable, of size 1 where it does not vary."""
        order = [a for a in axes if a in labels]
        x = x.transpose([0, *(1 + labels.index(a) for a in order if a is not None)])
        sizes = iter(x.shape[1:])
        return x.reshape(x.shape[0], *(next(sizes) if a in labels else 1 for a in axes))

    def _grouped(self, x: Array, *groups: Labels) -> Array:
        """Merges axes into one for each group, and repeats what does not vary."""
        sizes = [self.sizes[a] for group in groups for a in group]
        x = jnp.broadcast_to(x, (self.steps.loop.length, *sizes))
        return x.reshape(x.shape[0], *map(self._extent, groups))

    def _array(self, term: Term, labels: Labels) -> Array:
        """Returns a term with an axis of steps and one for each label, of size 1 where it does not vary."""
        letters = dict(zip(dict.fromkeys((*labels, *sorted(term.labels))), ascii_letters[1:], strict=False))
        arrays: list[Array] = []
        subscripts: list[str] = []
        for factor in term.factors:
            array, varies = self._factor(factor)
            arrays.append(array)
            subscripts.append("a" * varies + "".join(letters[a] for a in factor.axes if a is not None))
        varying = any("a" in own for own in subscripts)
        present = [a for a in labels if a in term.labels]
        result = "a" * varying + "".join(letters[a] for a in present)
        found = jnp.asarray(term.coefficient, self.dtype)
        if arrays:
            product = jnp.einsum(
                f"{','.join(subscripts)}->{result}", *arrays, precision=lax.Precision.HIGHEST, optimize="auto"
            )
            found = product if term.coefficient == 1 else found * product
        sizes = iter(found.shape[1:] if varying else found.shape)
        shape = [next(sizes) if a in present else 1 for a in labels]
        return found.reshape(found.shape[0] if varying else 1, *shape)

    def _factor(self, factor: Factor) -> tuple[Array, bool]:
        """Returns the array of a factor, and whether it has an axis of steps."""
        variable = self.steps.loop.variables[factor.variable]
        varies = variable in self.steps.varying
        array = self.steps.varying[variable] if varies else self.steps.fixed[variable]
        chosen = tuple(0 if a is None else slice(None) for a in factor.axes)
        array = array[(slice(None), *chosen) if varies else chosen]
        if factor.case is not None:
            array = jnp.equal(array, jnp.asarray(factor.case, array.dtype))
        array = array.astype(self.dtype)
        return (1 / array if factor.inverse else array), varies


def _terms_of(readouts: Sequence[Readout]) -> list[Term]:
    of_state = [term for readout in readouts for _, *terms in readout.queries for term in terms]
    return [*of_state, *(term for readout in readouts for term in readout.others)]
