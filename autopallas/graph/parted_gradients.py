"""Adds up products instead of the gradients of scores that two softmaxes read.

Where both sides attend to each other, or tokens are dispatched to slots and combined again, two softmaxes along
different axes read one product of queries and keys.  Under a gradient, what comes back from both is added up before the
products with queries and keys: ``(d1 + d2) @ k``.  The backward of each attention alone ends in ``d1 @ k``; so the sum
moves behind these products.  The program has more of them then, and is of use only where sites stand in for all.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence, Set

import jax.numpy as jnp

from autopallas.compat import JaxprEqn, Literal, Var
from autopallas.faults import contained
from autopallas.graph.edit import surviving
from autopallas.graph.flatten import Body, Child, is_contraction
from autopallas.graph.numbering import Graph
from autopallas.jaxprs import live_equations

__all__ = ["Parting", "added_products", "part_gradients"]

Atom = Var | Literal
Axes = tuple[frozenset[int], ...]
"""Per axis of a value, the axes of a sum of gradients that it runs over."""

_LAYOUT = frozenset({"transpose", "reshape", "squeeze", "expand_dims", "convert_element_type", "copy"})
_ELEMENTWISE = frozenset({"neg", "mul", "div", "add", "add_any", "sub", "select_n", "convert_element_type", "copy"})
_REPEATS = frozenset({"broadcast_in_dim", "convert_element_type"})
_EXPONENTIALS = frozenset({"exp", "exp2", "pow", "custom_jvp_call", "custom_vjp_call"})
"""Equations that may be a softmax's exponentials, which are as many as the elements of its scores' gradient."""
_MOST_TERMS = 16
"""Most terms of one sum."""
_MOST = 96
"""Most values that are looked at on the way from one gradient back to the product that it comes from."""


def part_gradients(root: Body) -> Body:
    """Moves sums of two softmaxes' gradients behind products, in place, in every body."""
    bodies = [*root.walk()]
    sizes = {
        math.prod(getattr(variable.aval, "shape", ()))
        for body in bodies
        for equation in body.equations
        if equation.primitive.name in _EXPONENTIALS
        for variable in equation.outvars
    }
    for body in bodies:
        with contained("a gradient of scores", "attention", "graph"):
            _part(body, sizes)
    return root


class Parting(enum.Flag):
    """What is computed by more products than a program has, for the sake of sites."""

    SUMS = enum.auto()
    """Products of sums, each of which becomes a sum of products."""
    COLUMNS = enum.auto()
    """Products of which each site computes some columns."""


def added_products(graph: Graph, given: Set[int]) -> Parting:
    """Returns for what a program whose ``given`` values sites compute still computes products that it lacked before, or
    products that it took apart for no site."""
    bodies = [*graph.root.walk()]
    added = {graph.numbers[body][product] for body in bodies for product in body.added}
    parted = [{graph.numbers[body][product] for product in own} for body in bodies for own in body.parted]
    if not added and not parted:
        return Parting(0)
    alive = surviving(graph, given) - given
    sums = Parting(0) if alive.isdisjoint(added) else Parting.SUMS
    return sums | Parting.COLUMNS if any(own <= alive for own in parted) else sums


def _part(body: Body, sizes: Set[int]) -> None:
    sums = _sums(body, sizes)
    gradients: dict[Atom, tuple[Atom, Atom]] = {}
    products: dict[Atom, tuple[Atom, Atom]] = {}
    equations: list[JaxprEqn] = []
    children: dict[int, list[Child]] = {}
    made: list[Var] = []
    adds: JaxprEqn | None = None
    for position, equation in enumerate(body.equations if sums else ()):
        if position in body.children:
            children[id(equation)] = body.children[position]
        if position in sums:
            adds = equation
            first, second = (_added(adds, terms, equations) for terms in sums[position])
            gradients[equation.outvars[0]] = first, second
        elif adds is not None and (place := _place_of(body, equation, gradients, products)) is not None:
            operand, result = equation.invars[place], equation.outvars[0]
            ends = is_contraction(equation) or equation.primitive.name == "reduce_sum"
            pair = Var(result.aval), Var(result.aval)
            for part, new in zip(gradients.get(operand) or products[operand], pair, strict=True):
                inputs = [part if i == place else atom for i, atom in enumerate(equation.invars)]
                equations.append(equation.replace(invars=inputs, outvars=[new]))
            if ends or operand in products:
                products[result] = pair
                equation = adds.replace(invars=[*pair], outvars=[result], source_info=equation.source_info)
            else:
                gradients[result] = pair
            made += pair if ends else ()
        equations.append(equation)
    if made:
        live = live_equations(equations, body.outvars)
        body.replace(live, body.outvars, {i: children[id(e)] for i, e in enumerate(live) if id(e) in children})
        body.added += [v for v in made if v in body.defined]


def _place_of(
    body: Body, equation: JaxprEqn, gradients: dict[Atom, tuple[Atom, Atom]], products: dict[Atom, tuple[Atom, Atom]]
) -> int | None:
    """Returns the position of the operand that is a sum, if the equation of each part may be added up instead."""
    name, operands = equation.primitive.name, equation.invars
    places = [i for i, a in enumerate(operands) if isinstance(a, Var) and (a in gradients or a in products)]
    if len(places) != 1 or len(equation.outvars) != 1:
        return None
    (place,) = places
    if name in _LAYOUT:
        return place
    if operands[place] in products:
        return None
    if name == "select_n":
        fits = place > 0 and all(_is_zero(body, a) for i, a in enumerate(operands) if i not in (0, place))
    else:
        fits = name in ("neg", "mul", "reduce_sum") or is_contraction(equation) or (name == "div" and place == 0)
    return place if fits else None


def _is_zero(body: Body, atom: Atom) -> bool:
    while isinstance(atom, Var):
        position = body.defined.get(atom)
        if position is None or body.equations[position].primitive.name not in _REPEATS:
            return False
        atom = body.equations[position].invars[0]
    return not atom.aval.shape and not bool(atom.val)


def _sums(body: Body, sizes: Set[int]) -> dict[int, tuple[list[Var], list[Var]]]:
    """Returns, per position of an equation that adds up the gradients of two softmaxes along different axes, the terms
    of each.  ``sizes`` has how many elements the exponentials of a softmax may be.

    Each gradient is computed from one product, of a result's gradient and values, and from a sum of its elements over
    some axes, which is repeated along these again.
    """
    found: dict[int, tuple[list[Var], list[Var]]] = {}
    inner: set[int] = set()
    for position in range(len(body.equations) - 1, -1, -1):
        equation = body.equations[position]
        aval = equation.outvars[0].aval if equation.outvars else None
        if equation.primitive.name != "add_any" or position in inner or aval is None or len(aval.shape) < 2:
            continue
        if math.prod(aval.shape) not in sizes:
            continue
        if (terms := _terms(body, position, inner)) is None or not jnp.issubdtype(aval.dtype, jnp.floating):
            continue
        of_product: dict[frozenset[Atom], tuple[list[Var], set[int]]] = {}
        for term in terms:
            source = _Source(body, term, aval.shape)
            own, axes = of_product.setdefault(source.products, ([], set()))
            own.append(term)
            axes |= source.axes
        if len(of_product) == 2 and all(len(products) == 1 for products in of_product):
            (first, first_axes), (second, second_axes) = of_product.values()
            if first_axes and second_axes and first_axes.isdisjoint(second_axes):
                found[position] = first, second
    return found


def _terms(body: Body, position: int, inner: set[int]) -> list[Var] | None:
    """Returns what a sum adds up, in order; None where that is much. Adds the positions of sums within to ``inner``."""
    found: list[Var] = []
    todo: list[Atom] = [*body.equations[position].invars[::-1]]
    while todo:
        atom = todo.pop()
        if not isinstance(atom, Var) or len(found) + len(todo) >= _MOST_TERMS:
            return None
        at = body.defined.get(atom)
        if at is not None and body.equations[at].primitive.name == "add_any" and at not in inner:
            inner.add(at)
            todo += body.equations[at].invars[::-1]
        else:
            found.append(atom)
    return found


def _added(adds: JaxprEqn, terms: Sequence[Var], equations: list[JaxprEqn]) -> Var:
    """Returns the sum of some terms, for which it adds equations like ``adds``."""
    total, *others = terms
    for term in others:
        result = Var(total.aval)
        equations.append(adds.replace(invars=[total, term], outvars=[result]))
        total = result
    return total


class _Source:
    """What a gradient is computed from, up to products and to functions that are not linear.

    Attributes:
      products: the results of these products that have as many elements.
      axes: the axes along which something is repeated that is computed from one of them.
    """

    def __init__(self, body: Body, gradient: Atom, shape: Sequence[int]):
        self._body, self._size, self._left = body, math.prod(shape), _MOST
        self._known: dict[tuple[Atom, Axes], frozenset[Atom]] = {}
        self.axes: frozenset[int] = frozenset()
        own = tuple(frozenset({axis}) if n > 1 else frozenset() for axis, n in enumerate(shape))
        self.products = self._products(gradient, own)

    def _products(self, atom: Atom, axes: Axes) -> frozenset[Atom]:
        if not isinstance(atom, Var):
            return frozenset()
        key = atom, axes
        if key not in self._known:
            self._known[key] = frozenset()
            self._left -= 1
            self._known[key] = self._products_anew(atom, axes)
        return self._known[key]

    def _products_anew(self, atom: Var, axes: Axes) -> frozenset[Atom]:
        position = self._body.defined.get(atom)
        if position is None or self._left < 0:
            return frozenset()
        equation = self._body.equations[position]
        name, shape = equation.primitive.name, atom.aval.shape
        if is_contraction(equation):
            return frozenset({atom}) if math.prod(shape) == self._size else frozenset()
        if name in _ELEMENTWISE:
            operands = equation.invars[name == "select_n" :]
            return frozenset().union(*(self._products(a, axes) for a in operands if a.aval.shape == shape))
        operand = equation.invars[0] if len(equation.invars) == 1 else None
        if operand is None or len(equation.outvars) != 1:
            return frozenset()
        before = operand.aval.shape
        if name == "broadcast_in_dim":
            to = dict(zip(equation.params["broadcast_dimensions"], range(len(before)), strict=True))
            new = [axis for axis, n in enumerate(shape) if axis not in to or before[to[axis]] != n]
            found = self._products(operand, tuple(frozenset() if d in new else axes[d] for d in to))
            if found:
                self.axes = self.axes.union(*(axes[axis] for axis in new))
            return found
        if name == "reduce_sum":
            left = iter(axes)
            gone = equation.params["axes"]
            return self._products(operand, tuple(frozenset() if d in gone else next(left) for d in range(len(before))))
        if name == "transpose":
            order = [*equation.params["permutation"]]
            return self._products(operand, tuple(axes[order.index(d)] for d in range(len(order))))
        if name in ("reshape", "squeeze", "expand_dims"):
            return self._products(operand, _reshaped(before, shape, axes))
        return frozenset()


def _reshaped(before: Sequence[int], after: Sequence[int], axes: Axes) -> Axes:
    """Returns the axes of a reshape's operand, from those of its result."""
    found: list[frozenset[int]] = []
    start = 0
    while len(found) < len(before):
        first, taken = len(found), 0
        end, sizes = first, [1, 1]
        while end == first or sizes[0] != sizes[1]:
            if sizes[0] <= sizes[1] and end < len(before):
                sizes[0], end = sizes[0] * before[end], end + 1
            elif start + taken < len(after):
                sizes[1], taken = sizes[1] * after[start + taken], taken + 1
            else:
                return (frozenset(),) * len(before)
        own = frozenset().union(*axes[start : start + taken])
        found += [own if n > 1 else frozenset() for n in before[first:end]]
        start += taken
    return tuple(found)
