"""Takes logits apart that are put together from several arrays before a loss.

A contrastive loss reads ``concatenate([positive, x @ queue.T], 1)``, one with sampled labels the true label's logit
beside those of the sample.  Elementwise functions of what is put together are the functions of its parts; a sum or a
maximum over all is made of those over the parts; and of the gradient, each product reads its own part.  What remains is
a loss of the logits that one product gives, and of numbers of its rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from autopallas import compat
from autopallas.compat import JaxprEqn, Var
from autopallas.faults import contained
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.graph.flatten import Body, is_contraction
from autopallas.graph.rewritten_body import Atom, RewrittenBody

__all__ = ["take_logits_apart"]

_MOST_PARTS = 4
"""Most arrays that are put together."""
_DEEPEST = 32
"""Most equations on one path through which a part is taken of a value."""
_LAYOUT = frozenset({"transpose", "reshape", "broadcast_in_dim", "squeeze", "expand_dims", "copy", "slice"})
_JOINS = {"reduce_sum": lax.add, "reduce_max": lax.max, "reduce_min": lax.min}
_FILL = GatherScatterMode.FILL_OR_DROP


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where values are cut: along an axis, behind each of some sizes."""

    axis: int
    sizes: tuple[int, ...]

    def starts(self) -> list[int]:
        return [sum(self.sizes[:i]) for i in range(len(self.sizes))]


def take_logits_apart(root: Body) -> Body:
    """Takes logits apart that are put together, in place, in every body."""
    joined = {body: _joined(body) for body in root.walk()}
    attends = any(weights for _, weights in joined.values())
    for body, (found, _) in joined.items():
        if attends:  # a backward may compute an attention's weights again, and not what they weigh
            found = {variable for variable in found if not _in_backward(body, variable)}
        if found:
            with contained("logits that are put together", "cross_entropy", "graph"):
                _Parts(body, found).run()
    return root


def _in_backward(body: Body, variable: Var) -> bool:
    return body.transposed or compat.is_transposed(body.equations[body.defined[variable]])


def _joined(body: Body) -> tuple[set[Var], bool]:
    """Returns the arrays that are put together, one part of them by a product, for a softmax that weighs nothing, and
    whether there are some for one that does.

    They flow element by element into an exponential, and into no product but those of a backward.
    """
    names = {e.primitive.name for e in body.equations}
    if not {"concatenate", "dot_general"} <= names or names.isdisjoint(("exp", "exp2")):
        return set(), False
    exponents: set[Atom] = set()
    weights: set[Atom] = set()
    for equation in reversed(body.equations):
        name, results = equation.primitive.name, equation.outvars
        through = name in ELEMENTWISE or name in _LAYOUT or name == "concatenate"
        if name in ("exp", "exp2") or (through and not exponents.isdisjoint(results)):
            exponents.update(a for a in equation.invars if isinstance(a, Var))
        weighs = is_contraction(equation) and not (body.transposed or compat.is_transposed(equation))
        if weighs or (through and not weights.isdisjoint(results)):
            weights.update(a for a in equation.invars if isinstance(a, Var))
    products: set[Atom] = set()
    found: set[Var] = set()
    attends = False
    for equation in body.equations:
        name = equation.primitive.name
        reads = any(isinstance(a, Var) and a in products for a in equation.invars)
        if is_contraction(equation) or ((name in ELEMENTWISE or name in _LAYOUT) and reads):
            products.update(equation.outvars)
        elif name == "concatenate" and reads and len(equation.invars) <= _MOST_PARTS:
            (result,) = equation.outvars
            if result in exponents and jnp.issubdtype(result.aval.dtype, jnp.floating):
                attends |= result in weights
                found.update({result} - weights)
    return found, attends


class _Parts(RewrittenBody):
    """Takes the values of one body apart."""

    def __init__(self, body: Body, joined: set[Var]):
        super().__init__(body)
        self.joined = joined
        self.parts: dict[tuple[Var, _Cut], list[Atom]] = {}
        self.cuts: dict[Var, _Cut] = {}
        """Where values are cut that are computed from joined ones."""

    def run(self) -> None:
        for position, original in enumerate(self.body.equations):
            equation = self._renamed(original)
            self._add_original(position, equation)
            if position in self.body.children:
                continue
            if equation.primitive.name == "split":
                self._split(equation)
            elif len(equation.outvars) == 1 and (new := self._in_place_of(equation)) is not None:
                self.names[equation.outvars[0]] = new
        if not self.names:
            return
        live, outvars = self._live()
        if any(variable in self.joined for equation in live for variable in equation.outvars):
            return  # something needs the whole of it, such as a backward in another body
        self._replace(live, outvars)

    # ------------------------------------------------------------------ what reads joined values

    def _in_place_of(self, equation: JaxprEqn) -> Atom | None:
        """Returns what to read in place of an equation's result, if that is made of parts; notes where the result is
        cut, if it is computed element by element from values that are."""
        name, (result,) = equation.primitive.name, equation.outvars
        if result in self.joined:
            axis = equation.params["dimension"]
            cut = self.cuts[result] = _Cut(axis, tuple(a.aval.shape[axis] for a in equation.invars))
            self.parts[result, cut] = [*equation.invars]
            return None
        cuts = [self.cuts.get(a) if isinstance(a, Var) else None for a in equation.invars]
        own = next((cut for cut in cuts if cut is not None), None)
        if own is None:
            return None
        if name in ELEMENTWISE:
            shape = equation.invars[cuts.index(own)].aval.shape
            if all(cut in (None, own) for cut in cuts) and len(result.aval.shape) == len(shape):
                self.cuts[result] = own
            return None
        first = equation.invars[0]
        if cuts[0] is None or not isinstance(first, Var):
            return None
        if name in _JOINS or name == "argmax":
            return self._reduced(equation, first, own)
        if name == "slice":
            return self._slice(equation, first, own)
        if name == "gather" and len(cuts) == 2 and cuts[1] is None:
            return self._picked(equation, first, own)
        return None

    def _reduced(self, equation: JaxprEqn, operand: Var, cut: _Cut) -> Atom | None:
        """Reduces each part, and joins the results."""
        name, axes, params = equation.primitive.name, equation.params["axes"], equation.params
        if cut.axis not in axes:
            if name != "argmax":
                (result,) = equation.outvars
                own = self.cuts[result] = _Cut(cut.axis - sum(d < cut.axis for d in axes), cut.sizes)
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

    def _first_of_the_largest(self, equation: JaxprEqn, parts: Sequence[Atom], cut: _Cut) -> Atom | None:
        """Finds the position of the largest element of all parts: that of the first part which has it, or has a NaN."""
        params, dtype = equation.params, equation.params["index_dtype"]

        def position(*arrays: jax.Array) -> jax.Array:
            best: jax.Array | None = None
            where: jax.Array | None = None
            for start, x in zip(cut.starts(), arrays, strict=True):
                largest = lax.reduce_max_p.bind(x, axes=params["axes"], out_sharding=None)
                own = lax.add(equation.primitive.bind(x, **params), lax.full(largest.shape, start, dtype))
                if best is None or where is None:
                    best, where = largest, own
                else:
                    stays = lax.bitwise_or(lax.ge(best, largest), lax.ne(best, best))
                    best, where = lax.select(stays, best, largest), lax.select(stays, where, own)
            assert where is not None
            return where

        return self._emit(equation, position, *parts)

    def _split(self, equation: JaxprEqn) -> None:
        """Reads the parts of a value in place of the pieces that it is split into, if they are the same."""
        (operand,) = equation.invars
        cut = self.cuts.get(operand) if isinstance(operand, Var) else None
        if cut == _Cut(equation.params["axis"], tuple(equation.params["sizes"])):
            self.names.update(zip(equation.outvars, self._apart(operand, cut, equation), strict=True))

    def _slice(self, equation: JaxprEqn, operand: Var, cut: _Cut) -> Atom | None:
        """Takes a slice from the part that it lies in."""
        params, shape = equation.params, operand.aval.shape
        if params["strides"] is not None:
            return None
        low, high = params["start_indices"][cut.axis], params["limit_indices"][cut.axis]
        for start, size, part in zip(cut.starts(), cut.sizes, self._apart(operand, cut, equation), strict=True):
            if start <= low and high <= start + size:
                lows, highs = list(params["start_indices"]), list(params["limit_indices"])
                lows[cut.axis], highs[cut.axis] = low - start, high - start
                whole = (*shape[: cut.axis], size, *shape[cut.axis + 1 :])
                if [*zip(lows, highs, strict=True)] == [(0, n) for n in whole]:
                    return part
                return self._emit(equation, lambda x, a=tuple(lows), b=tuple(highs): lax.slice(x, a, b), part)
        return None

    def _picked(self, equation: JaxprEqn, operand: Var, cut: _Cut) -> Atom | None:
        """Picks one element of each row from the part that has it: each part gives 0 for the elements of others."""
        indices, along = equation.invars[1], equation.params["dimension_numbers"].start_index_map
        places = _Places.of(cut, operand.aval.shape, along, equation.params["mode"], indices.aval.dtype)
        if places is None or any(n != 1 for n in equation.params["slice_sizes"]):
            return None
        if not jnp.issubdtype(operand.aval.dtype, jnp.floating) or not isinstance(indices, Var):
            return None
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
                filled = lax.full(found.shape, math.nan if fill is None else fill, found.dtype)
                found = lax.select(lax.reshape(places.exist(indices), found.shape), found, filled)
            return found

        return self._emit(equation, picked, indices, *self._apart(operand, cut, equation))

    # ------------------------------------------------------------------ parts of values

    def _apart(self, atom: Atom, cut: _Cut, like: JaxprEqn, depth: int = 0) -> list[Atom]:
        """Returns the parts of a value, each computed from the parts of what it is computed from."""
        if not isinstance(atom, Var):
            return [atom] * len(cut.sizes)
        key = atom, cut
        if key not in self.parts:
            definition = self.definitions.get(atom)
            found = None if definition is None or depth > _DEEPEST else self._apart_anew(atom, cut, definition, depth)
            self.parts[key] = self._sliced(atom, cut, like) if found is None else found
        return self.parts[key]

    def _sliced(self, atom: Var, cut: _Cut, like: JaxprEqn) -> list[Atom]:
        return [
            self._emit(like, lambda x, a=start, b=start + size: lax.slice_in_dim(x, a, b, axis=cut.axis), atom)
            for start, size in zip(cut.starts(), cut.sizes, strict=True)
        ]

    def _apart_anew(self, variable: Var, cut: _Cut, equation: JaxprEqn, depth: int) -> list[Atom] | None:
        name, params, shape = equation.primitive.name, equation.params, variable.aval.shape
        shapes = [(*shape[: cut.axis], size, *shape[cut.axis + 1 :]) for size in cut.sizes]
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
                own = _Cut(to.index(cut.axis), cut.sizes)
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
        if name == "pad":
            return self._padded(equation, cut, shapes)
        if name == "scatter-add":
            return self._scattered(equation, cut)
        return None

    def _padded(self, equation: JaxprEqn, cut: _Cut, shapes: Sequence[Sequence[int]]) -> list[Atom] | None:
        """Returns the parts of a part among zeros, as the gradient of a slice is."""
        (operand, fill), config = equation.invars, equation.params["padding_config"]
        low, high, between = config[cut.axis]
        others = all(c == (0, 0, 0) for d, c in enumerate(config) if d != cut.axis)
        if between or not others or low < 0 or high < 0:
            return None
        size, found = operand.aval.shape[cut.axis], list[Atom]()
        for start, own, shape in zip(cut.starts(), cut.sizes, shapes, strict=True):
            if (low, size) == (start, own):
                found.append(operand)
            elif start <= low and low + size <= start + own:
                within = [(0, 0, 0)] * len(shape)
                within[cut.axis] = low - start, start + own - low - size, 0
                found.append(self._bind(equation, [operand, fill], padding_config=tuple(within)))
            elif low + size <= start or start + own <= low:
                found.append(self._emit(equation, lambda x, s=shape: lax.broadcast(x, s), fill))
            else:
                return None
        return found

    def _scattered(self, equation: JaxprEqn, cut: _Cut) -> list[Atom] | None:
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
        cls, cut: _Cut, shape: Sequence[int], along: Sequence[int], mode: GatherScatterMode, dtype: compat.Dtype
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


def _row(numbers: Sequence[int], indices: jax.Array) -> jax.Array:
    """Returns numbers, one for each component of an index, in the shape and dtype of indices."""
    last = indices.ndim - 1
    each = (lax.full((*indices.shape[:last], 1), n, indices.dtype) for n in numbers)
    return lax.concatenate([*each], last)


def _counting(primitive: compat.Primitive, params: dict[str, object], start: int) -> Callable[[], jax.Array]:
    def counting() -> jax.Array:
        count: jax.Array = primitive.bind(**params)
        return lax.add(count, lax.full(count.shape, start, count.dtype))

    return counting
