"""Takes values apart along an axis: each part is computed from the parts of what the value is computed from."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from autopallas import array_types, compat
from autopallas.compat import JaxprEqn, Literal, Var
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.graph.flatten import Body
from autopallas.graph.rewritten_body import Atom, RewrittenBody

__all__ = ["MOST_PARTS", "Cut", "Parts", "before_layout", "bounds_of"]

MOST_PARTS = 16
"""Most parts of one value."""
_DEEPEST = 32
"""Most equations on one path through which a part is taken of a value."""
_MOST_TERMS = 64
"""Most equations on the way from a sum of gradients to one that it adds up."""
_JOINS = {"reduce_sum": lax.add, "reduce_max": lax.max, "reduce_min": lax.min}
_FILL = GatherScatterMode.FILL_OR_DROP


@dataclass(frozen=True, slots=True)
class Cut:
    """Where values are cut: along an axis, behind each of some sizes."""

    axis: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, equation: JaxprEqn) -> Cut:
        """Returns where an equation puts arrays together."""
        if equation.primitive.name == "stack":
            return cls(equation.params["axis"], (1,) * len(equation.invars))
        axis = equation.params["dimension"]
        return cls(axis, tuple(a.aval.shape[axis] for a in equation.invars))

    def shapes(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """Returns the shapes of the parts of an array of a shape."""
        return [(*shape[: self.axis], size, *shape[self.axis + 1 :]) for size in self.sizes]

    def starts(self) -> list[int]:
        return [sum(self.sizes[:i]) for i in range(len(self.sizes))]

    def reshaped(self, before: Sequence[int], after: Sequence[int]) -> Cut | None:
        """Returns where a value is cut after a reshape from one shape to another; None where that is not known.

        The last axis stays, or becomes two of which the first is cut, or the other way around.
        """
        from_end = len(before) - self.axis
        if from_end > 2 or not before or not after or 0 in before:
            return None
        if before[-from_end:] == after[-from_end:]:
            return Cut(len(after) - from_end, self.sizes)
        if from_end == 2 and after[-1] == before[-2] * before[-1]:
            return Cut(len(after) - 1, tuple(size * before[-1] for size in self.sizes))
        each = after[-1]
        if from_end == 1 and math.prod(after[-2:]) == before[-1] and all(size % each == 0 for size in self.sizes):
            return Cut(len(after) - 2, tuple(size // each for size in self.sizes))
        return None


def bounds_of(equation: JaxprEqn) -> list[tuple[int, int]] | None:
    """Returns the first and the last element along each axis of a slice; None where it leaves out some between."""
    params = equation.params
    if any(stride != 1 for stride in params["strides"] or ()):
        return None
    return [*zip(params["start_indices"], params["limit_indices"], strict=True)]


def before_layout(equation: JaxprEqn, cut: Cut) -> Cut | None:
    """Returns where the operand of a reshape or transposition is cut, for a cut of the result."""
    if equation.primitive.name == "transpose":
        return Cut(equation.params["permutation"][cut.axis], cut.sizes)
    plain = equation.params["dimensions"] is None
    return cut.reshaped(equation.outvars[0].aval.shape, equation.invars[0].aval.shape) if plain else None


def _after(equation: JaxprEqn, cut: Cut) -> Cut | None:
    """Returns where the result of a reshape or transposition is cut, for a cut of the operand."""
    if equation.primitive.name == "transpose":
        return Cut([*equation.params["permutation"]].index(cut.axis), cut.sizes)
    plain = equation.params["dimensions"] is None
    return cut.reshaped(equation.invars[0].aval.shape, equation.outvars[0].aval.shape) if plain else None


class Parts(RewrittenBody):
    """Takes the values of one body apart.

    Args:
      body: the body.
      joined: the values at which this begins, and where each is cut; by default, arrays that are put together.
    """

    def __init__(self, body: Body, joined: Mapping[Var, Cut]):
        super().__init__(body)
        self.joined = joined
        self.parts: dict[tuple[Var, Cut], list[Atom]] = {}
        self.cuts: dict[Var, Cut] = {}
        """Where values are cut that are computed from joined ones."""
        cuts = dict.fromkeys((tuple(variable.aval.shape), cut) for variable, cut in joined.items())
        self._gradients = {shape: [cut for own, cut in cuts if own == shape] for shape, _ in cuts}
        """Where the gradients of joined values are cut, by their shape."""
        self._sums: dict[tuple[Var, Cut], list[Atom | None] | None] = {}

    def run(self) -> set[Var]:
        """Reads parts wherever that is possible, in place; returns those of the values begun with of which something
        needs the whole, such as a backward in another body: then nothing is changed."""
        for position, original in enumerate(self.body.equations):
            equation = self._renamed(original)
            self._add_original(position, equation)
            if position in self.body.children:
                continue
            if equation.primitive.name in ("split", "unstack"):
                self.names.update(self._split(equation))
            elif len(equation.outvars) == 1 and (new := self._in_place_of(equation)) is not None:
                self.names[equation.outvars[0]] = new
        live, outvars = self._live()
        whole = {variable for equation in live for variable in equation.outvars if variable in self.joined}
        if self.names and not whole:
            self._replace(live, outvars)
        return whole

    # ------------------------------------------------------------------ what reads joined values

    def _in_place_of(self, equation: JaxprEqn) -> Atom | None:
        """Returns what to read in place of an equation's result, if that is made of parts; notes where the result is
        cut, if it is computed element by element from values that are."""
        name, (result,) = equation.primitive.name, equation.outvars
        if result in self.joined:
            cut = self.cuts[result] = self.joined[result]
            self.parts[result, cut] = self._first_parts(equation, cut)
            return None
        first = equation.invars[0] if equation.invars else None
        if name == "slice" and (bounds := bounds_of(equation)) is not None and isinstance(first, Var):
            return self._within(equation, first, bounds)
        cuts = [self.cuts.get(a) if isinstance(a, Var) else None for a in equation.invars]
        own = next((cut for cut in cuts if cut is not None), None)
        if own is None:
            return None
        if name in ELEMENTWISE:
            shape = equation.invars[cuts.index(own)].aval.shape
            if all(cut in (None, own) for cut in cuts) and len(result.aval.shape) == len(shape):
                self.cuts[result] = own
            return None
        if cuts[0] is None or not isinstance(first, Var):
            return None
        if name in _JOINS or name == "argmax":
            return self._reduced(equation, first, own)
        if name in ("reshape", "transpose") and (after := _after(equation, own)) is not None:
            self.cuts[result] = after
        if name == "gather" and len(cuts) == 2 and cuts[1] is None:
            return self._picked(equation, first, own)
        return None

    def _first_parts(self, equation: JaxprEqn, cut: Cut) -> list[Atom]:
        """Returns the parts of a value at which this begins."""
        return self._put_together(equation)

    def _put_together(self, equation: JaxprEqn) -> list[Atom]:
        """Returns the arrays that an equation puts together, with the axis along which it does so."""
        if equation.primitive.name == "concatenate":
            return [*equation.invars]
        axis = equation.params["axis"]
        return [self._emit(equation, lambda x: lax.expand_dims(x, (axis,)), a) for a in equation.invars]

    def _reduced(self, equation: JaxprEqn, operand: Var, cut: Cut) -> Atom | None:
        """Reduces each part, and joins the results."""
        name, axes, params = equation.primitive.name, equation.params["axes"], equation.params
        if cut.axis not in axes:
            if name != "argmax":
                (result,) = equation.outvars
                own = self.cuts[result] = Cut(cut.axis - sum(d < cut.axis for d in axes), cut.sizes)
                self.parts[result, own] = [
                    self._emit(equation, lambda x: equation.primitive.bind(x, **params), part)
                    for part in self._apart(operand, cut, equation)
                ]
            return None
        parts = self._apart(operand, cut, equation)
        if name == "argmax":
            return self._first_of_the_largest(equation, parts, cut)

        join = _JOINS[name]

        def reduced(*arrays: jax.Array) -> jax.Array:
            found: list[jax.Array] = [equation.primitive.bind(x, **params) for x in arrays]
            return functools.reduce(join, found)

        return self._emit(equation, reduced, *parts)

    def _first_of_the_largest(self, equation: JaxprEqn, parts: Sequence[Atom], cut: Cut) -> Atom | None:
        """Finds the position of the largest element of all parts: that of the first part which has it, or has a NaN."""
        params = equation.params

        def position(*arrays: jax.Array) -> jax.Array:
            best: jax.Array | None = None
            where: jax.Array | None = None
            for start, x in zip(cut.starts(), arrays, strict=True):
                largest = lax.reduce_max_p.bind(x, axes=params["axes"], out_sharding=None)
                own = equation.primitive.bind(x, **params)
                own = lax.add(own, lax.full_like(own, start))
                if best is None or where is None:
                    best, where = largest, own
                else:
                    stays = lax.bitwise_or(lax.ge(best, largest), lax.ne(best, best))
                    best, where = lax.select(stays, best, largest), lax.select(stays, where, own)
            assert where is not None
            return where

        return self._emit(equation, position, *parts)

    def _split(self, equation: JaxprEqn) -> dict[Var, Atom]:
        """Returns what to read in place of what a value is split into, of which each lies in one part."""
        (operand,), axis = equation.invars, equation.params["axis"]
        if not isinstance(operand, Var):
            return {}
        sizes = equation.params.get("sizes")
        own = Cut(axis, (1,) * len(equation.outvars) if sizes is None else tuple(sizes))
        bounds = [(0, size) for size in operand.aval.shape]
        found: dict[Var, Atom] = {}
        for variable, start, size in zip(equation.outvars, own.starts(), own.sizes, strict=True):
            bounds[axis] = start, start + size
            new = self._within(equation, operand, bounds)
            if new is not None:
                found[variable] = self._emit(equation, lambda x: lax.squeeze(x, (axis,)), new) if sizes is None else new
        return found

    def _within(self, equation: JaxprEqn, operand: Var, bounds: Sequence[tuple[int, int]]) -> Atom | None:
        """Takes the elements between bounds, a first and a last for each axis, from the part that they lie in."""
        if operand in self.cuts:
            cut = self.cuts[operand]
            given: list[tuple[Cut, Sequence[Atom | None]]] = [(cut, self._apart(operand, cut, equation))]
        else:
            given = [*self._sums_of(operand)]
        for cut, parts in given:
            low, high = bounds[cut.axis]
            for start, size, part in zip(cut.starts(), cut.sizes, parts, strict=True):
                if part is not None and start <= low and high <= start + size:
                    own = [*bounds]
                    own[cut.axis] = low - start, high - start
                    if own == [(0, n) for n in part.aval.shape]:
                        return part
                    lows, highs = zip(*own, strict=True)
                    return self._emit(equation, lambda x, a=lows, b=highs: lax.slice(x, a, b), part)
        return None

    def _picked(self, equation: JaxprEqn, operand: Var, cut: Cut) -> Atom | None:
        """Picks one element of each row from the part that has it: each part gives 0 for the elements of others."""
        indices, along = equation.invars[1], equation.params["dimension_numbers"].start_index_map
        places = _Places.of(cut, operand.aval.shape, along, equation.params["mode"], indices.aval.dtype)
        if places is None or any(n != 1 for n in equation.params["slice_sizes"]):
            return None
        if not jnp.issubdtype(operand.aval.dtype, jnp.floating) or not isinstance(indices, Var):
            return None
        if _dividing_axes(operand) != _dividing_axes(indices):
            return None  # what is picked and what tells whether it exists could not meet
        fill = equation.params["fill_value"]

        def of_part(x: jax.Array, start: int, indices: jax.Array) -> jax.Array:
            if places.mode == _FILL:
                params = {**equation.params, "fill_value": 0.0}
                found: jax.Array = equation.primitive.bind(x, places.within_part(indices, start), **params)
                return found
            size = x.shape[cut.axis]
            found = equation.primitive.bind(x, places.clipped(indices, start, size), **equation.params)
            inside = lax.reshape(places.inside(indices, start, size), found.shape)
            return lax.select(inside, found, lax.full_like(found, 0))

        def picked(indices: jax.Array, *arrays: jax.Array) -> jax.Array:
            parts = [of_part(x, start, indices) for start, x in zip(cut.starts(), arrays, strict=True)]
            found: jax.Array = functools.reduce(lax.add, parts)
            if places.mode == _FILL:
                filled = lax.full_like(found, math.nan if fill is None else fill)
                found = lax.select(lax.reshape(places.exist(indices), found.shape), found, filled)
            return found

        return self._emit(equation, picked, indices, *self._apart(operand, cut, equation))

    # ------------------------------------------------------------------ parts of values

    def _apart(self, atom: Atom, cut: Cut, like: JaxprEqn, depth: int = 0) -> list[Atom]:
        """Returns the parts of a value, each computed from the parts of what it is computed from."""
        if not isinstance(atom, Var):
            return [atom] * len(cut.sizes)
        key = atom, cut
        if key not in self.parts:
            definition = self.definitions.get(atom)
            found = None if definition is None or depth > _DEEPEST else self._apart_anew(atom, cut, definition, depth)
            self.parts[key] = self._sliced(atom, cut, like) if found is None else found
        return self.parts[key]

    def _sliced(self, atom: Var, cut: Cut, like: JaxprEqn) -> list[Atom]:
        return [
            self._emit(like, lambda x, a=start, b=start + size: lax.slice_in_dim(x, a, b, axis=cut.axis), atom)
            for start, size in zip(cut.starts(), cut.sizes, strict=True)
        ]

    def _apart_anew(self, variable: Var, cut: Cut, equation: JaxprEqn, depth: int) -> list[Atom] | None:
        name, params, shape = equation.primitive.name, equation.params, variable.aval.shape
        shapes = cut.shapes(shape)
        if len(equation.outvars) != 1:
            return None
        if name in ELEMENTWISE:
            if any(a.aval.shape and len(a.aval.shape) != len(shape) for a in equation.invars):
                return None
            operands = [
                self._apart(a, cut, equation, depth + 1)
                if a.aval.shape and a.aval.shape[cut.axis] > 1
                else [a] * len(shapes)
                for a in equation.invars
            ]  # an axis of size 1 is repeated
            return [self._bind(equation, [own[i] for own in operands]) for i in range(len(shapes))]
        if name == "broadcast_in_dim" and len(equation.invars) == 1:
            to, (operand,) = params["broadcast_dimensions"], equation.invars
            if cut.axis in to and operand.aval.shape[to.index(cut.axis)] != 1:
                own = Cut(to.index(cut.axis), cut.sizes)
                given = self._apart(operand, own, equation, depth + 1)
            else:
                given = [operand] * len(shapes)
            return [self._bind(equation, [a], shape=one) for a, one in zip(given, shapes, strict=True)]
        if name == "iota" and params["dimension"] != cut.axis:
            return [self._bind(equation, [], shape=one) for one in shapes]
        if name == "iota":
            return [
                self._emit(equation, _counting(equation.primitive, {**params, "shape": one}, start))
                for start, one in zip(cut.starts(), shapes, strict=True)
            ]
        if name == "concatenate" and params["dimension"] == cut.axis:
            sizes = tuple(a.aval.shape[cut.axis] for a in equation.invars)
            return [*equation.invars] if sizes == cut.sizes else None
        if name in ("reshape", "transpose"):
            before = before_layout(equation, cut)
            given = [] if before is None else self._apart(equation.invars[0], before, equation, depth + 1)
            return [self._laid_out(equation, part, cut, i) for i, part in enumerate(given)] or None
        if name == "pad":
            return self._padded(equation, cut, shapes)
        if name == "scatter-add":
            return self._scattered(equation, cut)
        return None

    def _laid_out(self, equation: JaxprEqn, part: Atom, cut: Cut, place: int) -> Var:
        """Reshapes or transposes a part as the whole is."""
        if equation.primitive.name == "transpose":
            return self._bind(equation, [part])
        return self._bind(equation, [part], new_sizes=cut.shapes(equation.outvars[0].aval.shape)[place])

    def _padded(self, equation: JaxprEqn, cut: Cut, shapes: Sequence[Sequence[int]]) -> list[Atom] | None:
        """Returns the parts of a part among others, as the gradient of a slice is among zeros."""
        fill, parts = equation.invars[1], self._one_term(equation, cut)
        if parts is None:
            return None
        return [
            self._emit(equation, lambda x, s=shape: lax.broadcast(x, s), fill) if part is None else part
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def _scattered(self, equation: JaxprEqn, cut: Cut) -> list[Atom] | None:
        """Returns the parts of single elements that are added to rows: each drops the elements of others."""
        array, indices, updates = equation.invars
        numbers = equation.params["dimension_numbers"]
        along = numbers.scatter_dims_to_operand_dims
        places = _Places.of(cut, array.aval.shape, along, equation.params["mode"], indices.aval.dtype)
        if places is None or any(updates.aval.shape[d] != 1 for d in numbers.update_window_dims):
            return None
        params = {**equation.params, "mode": _FILL}

        def scattered(start: int, x: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
            result: jax.Array = equation.primitive.bind(x, places.within_part(indices, start), updates, **params)
            return result

        return [
            self._emit(equation, functools.partial(scattered, start), part, indices, updates)
            for start, part in zip(cut.starts(), self._apart(array, cut, equation), strict=True)
        ]

    # ------------------------------------------------------------------ parts of gradients

    def _sums_of(self, atom: Atom) -> Iterator[tuple[Cut, list[Atom | None]]]:
        """Yields each way in which a value is a sum of gradients of slices, and its parts, None for what is zero."""
        for cut in self._gradients.get(tuple(atom.aval.shape), ()):
            if (terms := self._terms(atom, cut)) is not None:
                yield cut, terms

    def _terms(self, atom: Atom, cut: Cut, depth: int = 0) -> list[Atom | None] | None:
        """Returns the parts of a sum of gradients of slices, None for what is zero; None where it is no such sum."""
        if not isinstance(atom, Var) or depth > _MOST_TERMS:
            return None
        key = atom, cut
        if key not in self._sums:
            definition = self.definitions.get(atom)
            self._sums[key] = None if definition is None else self._terms_anew(definition, cut, depth)
        return self._sums[key]

    def _terms_anew(self, equation: JaxprEqn, cut: Cut, depth: int) -> list[Atom | None] | None:
        name, operands = equation.primitive.name, equation.invars
        if name == "add_any":
            first, second = (self._terms(a, cut, depth + 1) for a in operands)
            if first is None or second is None:
                return None
            return [
                b if a is None else a if b is None else self._bind(equation, [a, b])
                for a, b in zip(first, second, strict=True)
            ]
        if name in ("convert_element_type", "copy"):
            given = self._terms(operands[0], cut, depth + 1)
            return None if given is None else [None if a is None else self._bind(equation, [a]) for a in given]
        if name in ("reshape", "transpose"):
            before = before_layout(equation, cut)
            given = None if before is None else self._terms(operands[0], before, depth + 1)
            return given and [None if a is None else self._laid_out(equation, a, cut, i) for i, a in enumerate(given)]
        if name in ("concatenate", "stack") and Cut.of(equation).axis == cut.axis:
            return self._joined(equation, cut)
        if name == "pad" and isinstance(operands[1], Literal) and operands[1].val == 0:
            return self._one_term(equation, cut)
        return None

    def _joined(self, equation: JaxprEqn, cut: Cut) -> list[Atom | None] | None:
        """Returns the parts of gradients that are put together, none of which lies in several."""
        left, found = self._put_together(equation), list[Atom | None]()
        for size in cut.sizes:
            own: list[Atom] = []
            while left and sum(a.aval.shape[cut.axis] for a in own) < size:
                own.append(left.pop(0))
            if sum(a.aval.shape[cut.axis] for a in own) != size:
                return None
            found.append(
                own[0] if len(own) == 1 else self._emit(equation, lambda *x: lax.concatenate(x, cut.axis), *own)
            )
        return found

    def _one_term(self, equation: JaxprEqn, cut: Cut) -> list[Atom | None] | None:
        """Returns the parts of what is padded, which lies in one of them, None for those of padding alone."""
        (operand, fill), config = equation.invars, [*equation.params["padding_config"]]
        low, high, between = config[cut.axis]
        others = all(own == (0, 0, 0) for d, own in enumerate(config) if d != cut.axis)
        if between or not others or low < 0 or high < 0:
            return None
        last, found = low + operand.aval.shape[cut.axis], list[Atom | None]()
        for start, size in zip(cut.starts(), cut.sizes, strict=True):
            if start <= low and last <= start + size:
                config[cut.axis] = low - start, start + size - last, 0
                whole = config[cut.axis] == (0, 0, 0)
                found.append(operand if whole else self._bind(equation, [operand, fill], padding_config=tuple(config)))
            else:
                found.append(None)
        return found if any(term is not None for term in found) else None


@dataclass(frozen=True, slots=True)
class _Places:
    """How indices, which are the last axis of an array, name elements of an array that is cut.

    Attributes:
      sizes: per component of an index, how many there are.
      component: the component along the axis that is cut.
      mode: what becomes of indices out of range.
    """

    sizes: tuple[int, ...]
    component: int
    mode: GatherScatterMode

    @classmethod
    def of(
        cls, cut: Cut, shape: Sequence[int], along: Sequence[int], mode: GatherScatterMode, dtype: compat.Dtype
    ) -> _Places | None:
        """Returns this for indices along some axes; None where they are not along that of the cut, in another mode, or
        in a dtype that has no position before the first."""
        known = (_FILL, GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS)
        if cut.axis not in along or mode not in known or (dtype.kind != "i" and dtype.itemsize >= 4):
            return None
        return cls(tuple(shape[d] for d in along), tuple(along).index(cut.axis), mode)

    def within_part(self, indices: jax.Array, start: int) -> jax.Array:
        """Returns the indices as those of the part that begins at ``start``, where elements of others are out of
        range."""
        indices = self._signed(indices)
        if self.mode == GatherScatterMode.CLIP:
            indices = lax.clamp(_row([0] * len(self.sizes), indices), indices, _row(self._last, indices))
        return self._with_own(indices, lambda own: lax.sub(own, lax.full_like(own, start))) if start else indices

    def clipped(self, indices: jax.Array, start: int, size: int) -> jax.Array:
        """Returns the indices as those of a part, of which the nearest element stands for those of others."""

        def nearest(own: jax.Array) -> jax.Array:
            shifted = lax.sub(own, lax.full_like(own, start))
            return lax.clamp(lax.full_like(own, 0), shifted, lax.full_like(own, size - 1))

        return self._with_own(self._signed(indices), nearest)

    def inside(self, indices: jax.Array, start: int, size: int) -> jax.Array:
        """Returns whether the nearest element to each index lies in a part."""
        indices, axis = self._signed(indices), indices.ndim - 1
        own = lax.slice_in_dim(indices, self.component, self.component + 1, axis=axis)
        own = lax.clamp(lax.full_like(own, 0), own, lax.full_like(own, self.sizes[self.component] - 1))
        return lax.bitwise_and(lax.ge(own, lax.full_like(own, start)), lax.lt(own, lax.full_like(own, start + size)))

    def _with_own(self, indices: jax.Array, change: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Changes the component along the axis that is cut; the others stay what they are known to be."""
        axis = indices.ndim - 1
        components = [lax.slice_in_dim(indices, i, i + 1, axis=axis) for i in range(len(self.sizes))]
        components[self.component] = change(components[self.component])
        return lax.concatenate(components, axis)

    def exist(self, indices: jax.Array) -> jax.Array:
        """Returns whether each index is in range."""
        indices = self._signed(indices)
        low, high = lax.ge(indices, _row([0] * len(self.sizes), indices)), lax.le(indices, _row(self._last, indices))
        return lax.reduce_and(lax.bitwise_and(low, high), (indices.ndim - 1,))

    @staticmethod
    def _signed(indices: jax.Array) -> jax.Array:
        """Returns indices in a dtype that has the position before the first, and those of all parts."""
        return lax.convert_element_type(indices, np.int32) if indices.dtype.itemsize < 4 else indices

    @property
    def _last(self) -> list[int]:
        return [n - 1 for n in self.sizes]


def _dividing_axes(variable: Var) -> set[object]:
    """Returns the axes of a mesh along which an array's type says that it is divided."""
    sharding = array_types.explicit_sharding(variable.aval)
    return set() if sharding is None else {names for names in sharding.spec if names is not None}


def _row(numbers: Sequence[int], indices: jax.Array) -> jax.Array:
    """Returns numbers, one for each component of an index, in the shape and dtype of indices."""
    last = indices.ndim - 1
    each = (lax.full((*indices.shape[:last], 1), n, indices.dtype) for n in numbers)
    return lax.concatenate([*each], last)


def _counting(primitive: compat.Primitive, params: dict[str, object], start: int) -> Callable[[], jax.Array]:
    def counting() -> jax.Array:
        count: jax.Array = primitive.bind(**params)
        return lax.add(count, lax.full_like(count, start))

    return counting
