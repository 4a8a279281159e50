"""Takes products apart of whose columns a softmax reads some: its logits become a product of their own.

The heads of an actor and a critic, or several predictions from one state, are often one product, ``h @ w``, that is
sliced.  A loss stands in for the whole of a product.  So ``(h @ w)[:, a:b]`` is computed as ``h @ w[:, a:b]``, and of
the gradient, each product reads its own columns.  The program has more products then, and is of use only where sites
stand in for some.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
from jax import lax

from autopallas.compat import JaxprEqn, Var
from autopallas.faults import contained
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.graph.flatten import Body, is_contraction
from autopallas.graph.parts import MOST_PARTS, Cut, Parts, bounds_of
from autopallas.graph.rewritten_body import Atom

__all__ = ["part_columns"]

_LEFT_OUT = "activations, and weights of columns that no gradient comes back to, are finite"
"""Assumption made where products of zeros are left out."""
_CUTS = ("slice", "split", "unstack")


@dataclass(slots=True)
class _Product:
    """A product whose columns are read by slices.

    Attributes:
      equation: the product.
      axis: the axis along which the slices are taken; None before the first.
      slices: the columns that are read, each from a first to a last.
      logits: those of them that a softmax reads.
      whole: whether something else reads it.
    """

    equation: JaxprEqn
    axis: int | None = None
    slices: set[tuple[int, int]] = field(default_factory=set)
    logits: set[tuple[int, int]] = field(default_factory=set)
    whole: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.equation.outvars[0].aval.shape)

    def side(self, axis: int | None) -> int | None:
        """Returns which operand an axis comes from; None for one of both."""
        sides = [side for side, _ in _free(self.equation)]
        before = len(self.shape) - len(sides)
        return None if axis is None or axis < before else sides[axis - before]

    def cut(self) -> tuple[Cut, frozenset[int]] | None:
        """Returns where to cut it, and which of the parts are logits; None where slices overlap, or it has one part."""
        if self.whole or self.axis is None or not self.logits:
            return None
        size, bounds = self.shape[self.axis], [0]
        own: list[int] = []
        for low, high in sorted(self.logits):
            if low < bounds[-1]:
                return None
            bounds += [low] if low > bounds[-1] else []
            own.append(len(bounds) - 1)
            bounds.append(high)
        bounds += [size] if size > bounds[-1] else []
        parts = [*itertools.pairwise(bounds)]
        inside = all(any(a <= low and high <= b for a, b in parts) for low, high in self.slices)
        if not inside or not 2 <= len(parts) <= MOST_PARTS:
            return None
        return Cut(self.axis, tuple(b - a for a, b in parts)), frozenset(own)


def _free(product: JaxprEqn) -> list[tuple[int, int]]:
    """Returns the operand, and its axis, of each axis of a product that one operand has, in order."""
    contracted, batch = product.params["dimension_numbers"]
    return [
        (side, d)
        for side, operand in enumerate(product.invars)
        for d in range(len(operand.aval.shape))
        if d not in contracted[side] and d not in batch[side]
    ]


@dataclass(frozen=True, slots=True)
class _Read:
    """A value that is computed, element by element, from a product, or from a slice of it.

    Attributes:
      product: the product.
      axes: which of the product's axes each of the value's is, or None; two are one, where that became two.
      slices: the columns that are read, if not all.
      is_exponential: whether an exponential stands between.
    """

    product: _Product
    axes: tuple[int | None, ...]
    slices: tuple[int, int] | None = None
    is_exponential: bool = False


def part_columns(root: Body, least: int = 0, assume_finite: bool = True) -> Body:
    """Takes products apart in place, in every body.

    Args:
      root: the program.
      least: fewest logits of a product that is taken apart.
      assume_finite: whether 0 times anything may be taken for 0.
    """
    for body in root.walk():
        with contained("columns of a product", "cross_entropy", "graph"):
            found = _products(body, least)
            for _ in range(2):  # of some, the backward in another body reads the whole
                if not found:
                    break
                whole = _Columns(body, found, assume_finite).run()
                found = {variable: own for variable, own in found.items() if variable not in whole} if whole else {}
    return root


def _products(body: Body, least: int) -> dict[Var, tuple[Cut, frozenset[int]]]:
    """Returns the products to take apart, where each is cut, and which of its parts are logits."""
    names = {e.primitive.name for e in body.equations}
    if not {"dot_general", "reduce_sum"} <= names or names.isdisjoint(_CUTS) or not names & {"exp", "exp2"}:
        return {}
    products: list[_Product] = []
    known: dict[Atom, _Read] = {}
    for equation in body.equations:
        read = [a for a in equation.invars if isinstance(a, Var) and a in known]
        if read:
            found = _results(equation, read, known)
            known.update(zip(equation.outvars, found, strict=False))
            for atom in read:
                if known[atom].slices is None and not any(own.product is known[atom].product for own in found):
                    known[atom].product.whole = True
            if equation.primitive.name == "reduce_sum":
                _note_logits(equation, known[read[0]], least)
        elif is_contraction(equation):
            (result,) = equation.outvars
            if math.prod(result.aval.shape) >= least and jnp.issubdtype(result.aval.dtype, jnp.floating):
                products.append(_Product(equation))
                known[result] = _Read(products[-1], tuple(range(len(result.aval.shape))))
    for returned in body.outvars:
        if isinstance(returned, Var) and returned in known and known[returned].slices is None:
            known[returned].product.whole = True
    return {own.equation.outvars[0]: cut for own in products if (cut := own.cut()) is not None}


def _results(equation: JaxprEqn, read: Sequence[Var], known: Mapping[Atom, _Read]) -> list[_Read]:
    """Returns what the results of an equation are that reads something known; nothing where that is not known."""
    name, shape = equation.primitive.name, equation.outvars[0].aval.shape if equation.outvars else ()
    if name in ELEMENTWISE:
        found = [known[a] for a in read if a.aval.shape == shape]
        return [replace(a, is_exponential=a.is_exponential or name in ("exp", "exp2")) for a in found[:1]]
    own, before = known[read[0]], tuple(read[0].aval.shape)
    if name == "squeeze":
        gone = equation.params["dimensions"]
        return [replace(own, axes=tuple(axis for d, axis in enumerate(own.axes) if d not in gone))]
    if name == "transpose":
        return [replace(own, axes=tuple(own.axes[d] for d in equation.params["permutation"]))]
    if name == "reshape" and before and shape:
        last, count = own.axes[-1], 1 if shape[-1] == before[-1] else 2
        if math.prod(shape[-count:]) == before[-1]:
            return [replace(own, axes=(*[None] * (len(shape) - count), *[last] * count))]
    if name in _CUTS and own.slices is None and (slices := _slices(equation, own)) is not None:
        own.product.slices.update(slices)
        gone = equation.params["axis"] if name == "unstack" else None
        axes = tuple(axis for d, axis in enumerate(own.axes) if d != gone)
        return [replace(own, axes=axes, slices=bounds) for bounds in slices]
    return []


def _slices(equation: JaxprEqn, read: _Read) -> list[tuple[int, int]] | None:
    """Returns the columns that an equation takes of a product along one axis, which it notes."""
    params, shape, product = equation.params, equation.invars[0].aval.shape, read.product
    if equation.primitive.name != "slice":
        along = params["axis"]
        cut = Cut(along, tuple(map(int, params.get("sizes", (1,) * len(equation.outvars)))))
        slices = [(start, start + size) for start, size in zip(cut.starts(), cut.sizes, strict=True)]
    else:
        bounds = bounds_of(equation)
        if bounds is None:
            return None
        axes = [d for d, (own, size) in enumerate(zip(bounds, shape, strict=True)) if own != (0, size)]
        if len(axes) != 1:
            return None
        (along,) = axes
        slices = [bounds[along]]
    axis = read.axes[along]
    if axis is None or product.side(axis) is None or product.axis not in (None, axis):
        return None
    each = 1
    if product.shape[axis] != shape[along]:  # that axis of the product became two
        if read.axes[along + 1 :] != (axis,):
            return None
        each = shape[-1]
    product.axis = axis
    return [(low * each, high * each) for low, high in slices]


def _note_logits(equation: JaxprEqn, read: _Read, least: int) -> None:
    """Notes columns over whose exponentials an equation sums."""
    product, slices = read.product, read.slices
    if not read.is_exponential or slices is None:
        return
    summed = {product.side(read.axes[d]) for d in equation.params["axes"]}
    if product.side(product.axis) in summed and math.prod(equation.invars[0].aval.shape) >= least:
        product.logits.add(slices)


class _Columns(Parts):
    """Takes products of one body apart, and the gradients that come back to them."""

    def __init__(self, body: Body, products: Mapping[Var, tuple[Cut, frozenset[int]]], assume_finite: bool):
        super().__init__(body, {variable: cut for variable, (cut, _) in products.items()})
        self.logits = {variable: own for variable, (_, own) in products.items()}
        self.assume_finite = assume_finite
        self.assumed: list[Var] = []
        """Results of products beside which products of zeros are left out."""
        self.products: list[list[Var]] = []
        """The products that are logits, of each product that is taken apart."""

    def _first_parts(self, equation: JaxprEqn, cut: Cut) -> list[Atom]:
        """Computes each part of a product by a product of its own."""
        operands, free = equation.invars, _free(equation)
        side, axis = free[cut.axis - len(equation.outvars[0].aval.shape)]
        own = self._apart(operands[side], Cut(axis, cut.sizes), equation)
        found = [self._bind(equation, [part, operands[1]] if side == 0 else [operands[0], part]) for part in own]
        self.products.append([found[i] for i in sorted(self.logits[equation.outvars[0]])])
        return [*found]

    def _in_place_of(self, equation: JaxprEqn) -> Atom | None:
        if is_contraction(equation) or equation.primitive.name == "reduce_sum":
            for place, atom in enumerate(equation.invars):
                for cut, terms in self._sums_of(atom):
                    found = self._of_gradient(equation, place, terms, cut)
                    if found is not None:
                        return found
        return super()._in_place_of(equation)

    # ------------------------------------------------------------------ what reads gradients

    def _of_gradient(self, equation: JaxprEqn, place: int, terms: Sequence[Atom | None], cut: Cut) -> Atom | None:
        """Computes a product, or a sum, of each part of a gradient, and puts these together, or adds them up."""
        operands, params, axis = equation.invars, equation.params, cut.axis
        if equation.primitive.name == "reduce_sum":
            if axis in params["axes"]:
                return None
            parts = [None if term is None else self._bind(equation, [term]) for term in terms]
            return self._together(equation, parts, Cut(axis - sum(d < axis for d in params["axes"]), cut.sizes))
        contracted, batch = params["dimension_numbers"]
        all_given = all(term is not None for term in terms)
        if axis in batch[place] or not (all_given or self.assume_finite):
            return None
        if axis in contracted[place]:
            along = contracted[1 - place][[*contracted[place]].index(axis)]
            read = self._apart(operands[1 - place], Cut(along, cut.sizes), equation)
            pairs = [(term, own) for term, own in zip(terms, read, strict=True) if term is not None]
            total: Var | None = None
            for pair in pairs:
                product = self._bind(equation, pair if place == 0 else pair[::-1])
                self.assumed += [] if all_given else [product]
                total = product if total is None else self._emit(equation, lax.add, total, product)
            return total
        own = len(batch[0]) + _free(equation).index((place, axis))
        other = operands[1 - place]
        parts = [
            None if term is None else self._bind(equation, [term, other] if place == 0 else [other, term])
            for term in terms
        ]
        self.assumed += [] if all_given else [part for part in parts if part is not None]
        return self._together(equation, parts, Cut(own, cut.sizes))

    def _together(self, like: JaxprEqn, parts: Sequence[Var | None], cut: Cut) -> Var:
        """Puts parts together, with zeros for those that are None."""
        (result,) = like.outvars
        dtype = result.aval.dtype
        whole = [
            self._emit(like, lambda own=own: lax.full(own, 0, dtype)) if part is None else part
            for part, own in zip(parts, cut.shapes(result.aval.shape), strict=True)
        ]
        return self._emit(like, lambda *arrays: lax.concatenate(arrays, cut.axis), *whole)

    def _replace(self, live: list[JaxprEqn], outvars: list[Atom]) -> bool:
        """Replaces the equations of the body, and notes which products it lacked."""
        children = {i: self._children[id(e)] for i, e in enumerate(live) if id(e) in self._children}
        self.body.replace(live, outvars, children)
        for products in self.products:
            self.body.parted.append([v for v in products if v in self.body.defined])
        self.body.assumed.update((v, _LEFT_OUT) for v in self.assumed if v in self.body.defined)
        return True
