"""One state of a loop in canonical arrays, which chunks are computed from.

A step that makes several updates of a state, one after the other, and an update that adds several products, are as many
steps of these arrays: substeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from string import ascii_letters
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.kernels.recurrence.chunks import OfChunks, Recurrence, chunked
from autopallas.kernels.recurrence.loop import AllSteps
from autopallas.kernels.recurrence.products import times
from autopallas.kernels.recurrence.structure import Axes, Factor, Labels, MatrixState, Query, Readout, Term, Update
from autopallas.sites.spec import Dtype

__all__ = ["StateArrays"]

Array: TypeAlias = jax.Array


class StateArrays:
    """One state.

    Args:
      steps: the values of the loop's variables, which get those of the state's readouts.
      state: the state.
      sizes: the size of each label.
      dtype: in which it is computed.
    """

    def __init__(self, steps: AllSteps, state: MatrixState, sizes: Mapping[int, int], dtype: Dtype):
        self.steps, self.state, self.sizes, self.dtype = steps, state, sizes, dtype
        self.counts = [update.substeps(sizes) for update in state.updates]
        """The number of substeps of each update."""
        queries = [query for readout in state.readouts for query in readout.queries]
        self.read_once = len(queries) == 1 and not queries[0].over
        """Whether chunks are computed once; else their cotangents are summed, and not in a narrow dtype."""

    def run(self, chunk: int, of_chunks: OfChunks) -> Array:
        """Makes the readouts known; returns the last state."""
        state, variables = self.state, self.steps.loop.variables
        self.steps.compute(variables[factor.variable] for term in state.terms() for factor in term.factors)
        axes = (*state.groups, *state.heads, *state.rows, *state.columns)
        first = self.steps.first[state.carry].astype(self.dtype)
        own = tuple(label for label in state.axes if label is not None)
        first = first.reshape([self.sizes[a] for a in own]).transpose([own.index(a) for a in axes])
        first = first.reshape([self._extent(own) for own in (state.groups, state.heads, state.rows, state.columns)])
        given = self._given(first)
        last = first
        for readout in state.readouts:
            found = self._free(readout)
            for query in readout.queries:
                y, last = self._read(given, query, variables[readout.variable].aval.dtype, chunk, of_chunks)
                labels = (*query.over, *state.groups, *state.heads, *state.columns)
                y = y.reshape(y.shape[0], *(self.sizes[a] for a in labels))
                found = found + self._in_axes(y, labels, readout.axes) * self._spread(query.factor, readout)
            aval = variables[readout.variable].aval
            shape = (self.steps.loop.length, *aval.shape)
            self.steps.varying[variables[readout.variable]] = jnp.broadcast_to(found, shape).astype(aval.dtype)
        last = last.reshape([self.sizes[a] for a in axes]).transpose([axes.index(a) for a in own])
        return last.reshape(self.steps.first[state.carry].shape).astype(self.steps.first[state.carry].dtype)

    # ------------------------------------------------------------------ updates

    def _given(self, first: Array) -> Recurrence:
        """Returns the arrays of all substeps, without queries: [T * M, ...] of M substeps in each step."""
        groups, heads, rows = self.state.groups, self.state.heads, self.state.rows
        updates = self.state.updates
        inner = rows if self.state.by_channel else ()
        decays = [self._decay(update, inner) for update in updates]
        excesses = [self._excess(update.decay, (*groups, *heads, *inner)) for update in updates]
        excess = None
        if any(own is not None for own in excesses):
            own = [
                decay - 1 if excess is None else self._of_heads(excess, inner)
                for decay, excess in zip(decays, excesses, strict=True)
            ]
            excess = self._joined([self._lengthened(x, count, 0) for x, count in zip(own, self.counts, strict=True)])
        keys = [self._of_rows(update.key, update.over) for update in updates]
        values = [self._value(update) for update in updates]
        probes, writes = self._corrections(keys)
        return Recurrence(
            self._joined([self._lengthened(x, count, 1) for x, count in zip(decays, self.counts, strict=True)]),
            self._joined(keys),
            self._joined(values),
            jnp.zeros((), self.dtype),
            first,
            excess,
            None if probes is None else self._joined(probes),
            None if writes is None else self._joined(writes),
        )

    def _decay(self, update: Update, inner: Labels) -> Array:
        """Returns the decay of an update, [T, 1, G, H] or [T, 1, G, H, N]."""
        labels = (*self.state.groups, *self.state.heads, *inner)
        return self._of_heads(jnp.asarray(sum(self._array(term, labels) for term in update.decay), self.dtype), inner)

    def _of_heads(self, x: Array, inner: Labels) -> Array:
        return self._grouped(x, (), self.state.groups, self.state.heads, *([inner] if inner else []))

    def _of_rows(self, term: Term, over: Labels = ()) -> Array:
        """Returns a product of factors with labels of rows, [T, R, G, 1, N], as narrow as :meth:`_narrow` has it."""
        groups, rows = self.state.groups, self.state.rows
        return self._grouped(self._narrow(term, (*over, *groups, *rows)), over, groups, (), rows)

    def _value(self, update: Update) -> Array:
        """Returns the values of an update, [T, R, G, H, P], as narrow as :meth:`_narrow` has them."""
        groups, heads, columns = self.state.groups, self.state.heads, self.state.columns
        labels = (*update.over, *groups, *heads, *columns)
        of_term = self._narrow if len(update.value) == 1 else self._array
        found = sum(of_term(term, labels) for term in update.value)
        if not update.value:
            found = jnp.zeros((1,) * (1 + len(labels)), self.dtype)
        return self._grouped(jnp.asarray(found), update.over, groups, heads, columns)

    def _corrections(self, keys: Sequence[Array]) -> tuple[list[Array] | None, list[Array] | None]:
        """Returns what the delta rule reads by, with its factors, and what it writes by where that is not the key, for
        each update."""
        state, updates = self.state, self.state.updates
        if not state.is_corrected:
            return None, None
        written = any(update.correction is not None and update.correction.write is not None for update in updates)
        probes: list[Array] = []
        writes: list[Array] = []
        for update, key, count in zip(updates, keys, self.counts, strict=True):
            own, write = update.correction, key
            probe = jnp.zeros((*key.shape[:3], self._extent(state.heads), key.shape[4]), self.dtype)
            if own is not None:
                factor = sum(self._array(term, (*state.groups, *state.heads)) for term in own.factors)
                probe = self._of_rows(own.probe) * self._of_heads(jnp.asarray(factor), ())[..., None]
                probe = self._lengthened(probe, count, 0)
                if own.write is not None:
                    write = self._lengthened(self._of_rows(own.write), count, 0)
            probes.append(probe)
            writes.append(write)
        return probes, writes if written else None

    @staticmethod
    def _lengthened(x: Array, count: int, value: float) -> Array:
        """Returns an array of a first substep with further ones."""
        if count == 1:
            return x
        return jnp.pad(x, ((0, 0), (0, count - 1), *((0, 0) for _ in x.shape[2:])), constant_values=value)

    @staticmethod
    def _joined(parts: Sequence[Array]) -> Array:
        """Returns [T * M, ...] of the substeps of each update, [T, R, ...]."""
        found = parts[0] if len(parts) == 1 else jnp.concatenate(parts, 1)
        return found.reshape(-1, *found.shape[2:])

    # ------------------------------------------------------------------ readouts

    def _read(
        self, given: Recurrence, query: Query, dtype: Dtype, chunk: int, of_chunks: OfChunks
    ) -> tuple[Array, Array]:
        """Returns what a query reads in each step, [T, R, G, H, P] of R rows that it reads, and the last state; in the
        dtype of the readout at least."""
        own = self._of_rows(query.query, query.over)
        own = own if own.dtype == dtype else own.astype(self.dtype)
        before, substeps = query.updates == 0, sum(self.counts)
        place = sum(self.counts[: query.updates]) - (not before)

        def read(own: Array) -> tuple[Array, Array]:
            if substeps > 1:
                own = jnp.pad(own[:, None], ((0, 0), (place, substeps - 1 - place), *((0, 0) for _ in own.shape[1:])))
                own = own.reshape(-1, *own.shape[2:])
            y, last = chunked(given._replace(query=own), chunk, before, of_chunks)
            return y.reshape(-1, substeps, *y.shape[1:])[:, place], last

        if not query.over:
            return read(own[:, 0])
        y, last = jax.vmap(read, 1, (1, 0))(own)
        return y, last[0]

    def _excess(self, terms: Sequence[Term], labels: Labels) -> Array | None:
        """Returns the decay minus one as exactly as its terms have it; None where the decay itself is as exact.

        A decay such as ``1 - a`` or ``1 / (1 + a)`` loses digits of a small ``a`` where it is rounded.
        """
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
        shape = (self.steps.loop.length, *sizes)
        if x.shape != shape:  # the cotangents of which are summed, and not in a narrow dtype
            x = jnp.broadcast_to(x.astype(self.dtype), shape)
        return x.reshape(x.shape[0], *map(self._extent, groups))

    def _array(self, term: Term, labels: Labels, dtype: Dtype | None = None) -> Array:
        """Returns a term with an axis of steps and one for each label, of size 1 where it does not vary."""
        letters = dict(zip(dict.fromkeys((*labels, *sorted(term.labels))), ascii_letters[1:], strict=False))
        arrays: list[Array] = []
        subscripts: list[str] = []
        for factor in term.factors:
            array, varies = self._factor(factor, dtype or self.dtype)
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

    def _narrow(self, term: Term, labels: Labels) -> Array:
        """Returns :meth:`_array`, but of a term that is no more than a variable in the variable's own dtype.

        A kernel then reads what the program has, and not a wider copy of it.
        """
        if not self.read_once or term.coefficient != 1 or len(term.factors) != 1 or not term.labels <= set(labels):
            return self._array(term, labels)
        (factor,) = term.factors
        dtype = np.dtype(self.steps.loop.variables[factor.variable].aval.dtype)
        is_plain = not factor.inverse and factor.case is None and jnp.issubdtype(dtype, jnp.floating)
        exact = is_plain and jnp.promote_types(dtype, self.dtype) == self.dtype
        return self._array(term, labels, dtype if exact else None)

    def _factor(self, factor: Factor, dtype: Dtype) -> tuple[Array, bool]:
        """Returns the array of a factor, and whether it has an axis of steps."""
        variable = self.steps.loop.variables[factor.variable]
        varies = variable in self.steps.varying
        array = self.steps.varying[variable] if varies else self.steps.fixed[variable]
        chosen = tuple(0 if a is None else slice(None) for a in factor.axes)
        array = array[(slice(None), *chosen) if varies else chosen]
        if factor.case is not None:
            array = jnp.equal(array, jnp.asarray(factor.case, array.dtype))
        array = array.astype(dtype)
        return (1 / array if factor.inverse else array), varies
