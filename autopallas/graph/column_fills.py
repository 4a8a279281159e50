"""Reads a number that is written into columns of logits or scores as a selection by the column.

``logits.at[:, size:].set(-1e9)`` leaves out what a vocabulary is padded with, ``scores.at[..., 0].set(-inf)`` a key.
JAX has a scatter of the number for it, and its derivative scatters zeros among the cotangents.  Each is
``where(written, number, logits)`` of an array that tells for each column whether it is written to, as a mask does.

Where an index may occur twice, under a derivative JAX numbers the writes, scatters the numbers, takes zero for the
elements that have one, and adds what the last write of each gives.  That is the same selection, and so is what takes
the cotangents of the elements without a number.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from autopallas import compat, jaxprs
from autopallas.array_types import divided_like
from autopallas.compat import JaxprEqn, Literal, Var
from autopallas.faults import contained
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.graph.flatten import Body, is_contraction
from autopallas.graph.joined_logits import LAYOUT
from autopallas.graph.known_integers import Array, known_array
from autopallas.graph.numbered_writes import NumberedWrites
from autopallas.graph.rewritten_body import Atom, RewrittenBody

__all__ = ["select_fills"]

_UPDATES = "dynamic_update_slice"
_WRITES = frozenset({"scatter", _UPDATES})
_DERIVED = "scatter-add"
"""Primitive that ends what a derivative makes of a scatter whose indices may occur twice."""
_EXPONENTIALS = frozenset({"exp", "exp2"})
_SPREADS = frozenset({"broadcast_in_dim", "reshape", "convert_element_type", "copy"}) | jaxprs.VARYING
"""Primitives through which a number that is written is spread over the columns."""
_MOST_SPREADS = 8
_MOST_FILLS = 16
"""Most writes of one body that are read as selections."""


def select_fills(root: Body) -> Body:
    """Reads numbers that are written into columns of what a product gives, before an exponential, as selections, and
    the zeros that their derivatives write, in place, in every body."""
    writes = _WRITES | {_DERIVED}
    bodies = [body for body in root.walk() if not writes.isdisjoint(e.primitive.name for e in body.equations)]
    if not bodies:
        return root
    origins = _Origins(root)
    places: set[Hashable] = set()
    found: dict[Body, dict[Var, _Fill]] = {}
    for body in bodies:
        with contained("a number that is written into columns", "cross_entropy", "graph"):
            found[body] = _fills(body, origins)
            if not found[body]:
                continue
            reached = _between(body, found[body].keys())
            places |= {fill.place for variable, fill in found[body].items() if variable in reached}
            found[body] = {v: f for v, f in found[body].items() if v in reached or f.is_zero}
    for body, fills in found.items():
        fills = {v: fill for v, fill in fills.items() if fill.place in places}
        if fills and len(fills) <= _MOST_FILLS:
            with contained("a number that is written into columns", "cross_entropy", "graph"):
                _Selections(body, fills).run()
    return root


@dataclass(frozen=True, slots=True)
class _Fill:
    """One number that is written into columns of an array.

    Attributes:
      equation: the write.
      operand: the array that is written into.
      number: a scalar.
      axis: the axis of the columns.
      first, count: the columns that are written to, where they are known and stand side by side; else how many for an
        index.
      place: what the write of a derivative has in common with that of the program.
    """

    equation: JaxprEqn
    operand: Atom
    number: Atom
    axis: int
    first: int | None
    count: int
    place: Hashable

    @property
    def is_zero(self) -> bool:
        return isinstance(self.number, Literal) and float(self.number.val) == 0.0

    @property
    def indices(self) -> list[Atom]:
        """Values that tell the columns, where these are not known."""
        if self.first is not None:
            return []
        return [self.equation.invars[1 if self.scatters else 2 + self.axis]]

    @property
    def scatters(self) -> bool:
        return self.equation.primitive.name != _UPDATES

    def selected(self, array: jax.Array, number: jax.Array, *indices: jax.Array) -> jax.Array:
        """Returns the array with the number in its columns."""
        written = self.written(array.shape[self.axis], *indices)
        over = lax.broadcast_in_dim(written, array.shape, (self.axis,)), lax.broadcast(number, array.shape)
        is_written, filled = (divided_like(x, jax.typeof(array)) for x in over)
        return lax.select_n(is_written, array, filled)

    def written(self, columns: int, *indices: jax.Array) -> jax.Array:
        """Tells for each column whether it is written to."""
        if self.first is not None:
            counted = lax.iota(jnp.int32, columns)
            written = counted >= self.first
            if self.first + self.count < columns:
                written = jnp.logical_and(written, counted < self.first + self.count)
        elif self.scatters:
            written = self._scattered(columns, *indices)
        else:
            # The equation's own indices are clamped: a program that counts from the end has done so before.
            written = lax.dynamic_update_slice(
                jnp.zeros(columns, bool), jnp.ones(self.count, bool), indices, allow_negative_indices=False
            )
        return written

    def _scattered(self, columns: int, indices: jax.Array) -> jax.Array:
        params = self.equation.params
        numbers = params["dimension_numbers"]
        inserted = bool(numbers.inserted_window_dims)
        several = indices.shape[:-1]
        own = lax.ScatterDimensionNumbers(
            update_window_dims=() if inserted else (len(several),),
            inserted_window_dims=(0,) if inserted else (),
            scatter_dims_to_operand_dims=(0,),
        )
        return lax.scatter(
            jnp.zeros(columns, bool), indices, jnp.ones(several if inserted else (*several, self.count), bool), own,
            indices_are_sorted=params["indices_are_sorted"], unique_indices=params["unique_indices"],
            mode=params["mode"],
        )  # fmt: skip


class _Origins:
    """Knows where the values of all bodies come from, through the bodies around them."""

    def __init__(self, root: Body):
        self.definitions: dict[Var, JaxprEqn] = {}
        self.given: dict[Var, Atom] = {}
        """By the input of a body: what its equation is given for it, the same in all steps of a loop."""
        self.known: dict[Var, Array | None] = {}
        self.numbered = NumberedWrites(self.definition, lambda a, b: self.of(a) is self.of(b))
        for body in root.walk():
            self.definitions.update((v, e) for e in body.equations for v in e.outvars)
            for position, children in body.children.items():
                equation = body.equations[position]
                same = _given(equation)
                for child in children:
                    self.given.update(zip(child.body.invars, same, strict=False))

    def of(self, atom: Atom) -> Atom:
        """Returns the value of a body further out that a body is given, or the value itself."""
        while isinstance(atom, Var) and atom in self.given:
            atom = self.given[atom]
        return atom

    def here(self, body: Body, atom: Atom) -> Atom | None:
        """Returns the value in a body, or one that the body is given for it; None where it has none."""
        if _is_in(body, atom):
            return atom
        return next((v for v in body.invars if self.of(v) is self.of(atom)), None)

    def definition(self, atom: Atom) -> JaxprEqn | None:
        """Returns the equation that computes a value."""
        outer = self.of(atom)
        return self.definitions.get(outer) if isinstance(outer, Var) else None

    def number(self, update: Atom) -> Atom | None:
        """Returns the scalar of which an array is full, if it is of one that the same body has."""
        here = True
        for _ in range(_MOST_SPREADS):
            if update.aval.shape == ():
                return update if here or isinstance(update, Literal) else None
            outer = self.of(update)
            here = here and outer is update
            equation = self.definitions.get(outer) if isinstance(outer, Var) else None
            if equation is None or equation.primitive.name not in _SPREADS:
                return None
            (update,) = equation.invars
            if update.aval.dtype != outer.aval.dtype:
                return None
        return None


def _given(equation: JaxprEqn) -> Sequence[Atom]:
    """Returns what the body of a loop or checkpoint is given for its first inputs, the same in all steps."""
    if equation.primitive.name in jaxprs.CHECKPOINTS:
        return list(equation.invars)
    return list(equation.invars[: compat.scan_parts(equation)[0]]) if equation.primitive.name == "scan" else []


def _fills(body: Body, origins: _Origins) -> dict[Var, _Fill]:
    """Returns the results of all writes of one number into columns of an array of floats."""
    found: dict[Var, _Fill] = {}
    for equation in body.equations:
        written = _written(body, equation, origins)
        columns = None if written is None else _columns(written.write)
        if written is None or columns is None:
            continue
        (result,), equation, scatters = equation.outvars, written.write, written.write.primitive.name != _UPDATES
        axis, count = columns
        if written.axis is not None:
            axis = written.axis
        index, first = origins.of(equation.invars[1 if scatters else 2 + axis]), None
        at = known_array(index, origins.definitions, origins.known)
        if at is not None and at.size == 1:
            first, most = int(at.reshape(())), result.aval.shape[axis] - count
            first = min(max(first, 0), most) if not scatters else first if 0 <= first <= most else None
        place = axis - len(result.aval.shape), result.aval.shape[axis], first, count
        found[result] = _Fill(equation, written.operand, written.number, axis, first, count, place)
    return found


@dataclass(frozen=True, slots=True)
class _Written:
    """A write of one number, what it writes into, the number, and the axis of the columns where it is not the
    write's."""

    write: JaxprEqn
    operand: Atom
    number: Atom
    axis: int | None = None


def _written(body: Body, equation: JaxprEqn, origins: _Origins) -> _Written | None:
    """Reads an equation that writes one number into an array of floats, or that takes zero for the elements that a
    scatter writes."""
    name = equation.primitive.name
    if name == "select_n" and (kept := origins.numbered.kept(equation)) is not None:
        scatter, axis, zero, operand = kept
        index = origins.here(body, scatter.invars[1])
        number = None if index is None else origins.number(zero)
        if index is None or number is None:
            return None
        return _Written(
            jaxprs.with_operands(scatter, [scatter.invars[0], index, scatter.invars[2]]), operand, number, axis
        )
    if name not in (*_WRITES, _DERIVED) or not jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating):
        return None
    operand, update = equation.invars[0], equation.invars[1 if name == _UPDATES else 2]
    if name == _DERIVED:
        derived = origins.numbered.write(equation)
        if derived is None:
            return None
        operand, update = derived
    number = origins.number(update)
    if number is None or not (_is_in(body, operand) and _is_in(body, number)):
        return None
    return _Written(equation, operand, number)


def _is_in(body: Body, atom: Atom) -> bool:
    """Returns whether an atom is one of a body, and not of one around it."""
    return isinstance(atom, Literal) or atom in body.defined or atom in body.invars or atom in body.constvars


def _columns(equation: JaxprEqn) -> tuple[int, int] | None:
    """Returns the axis into whose columns an array is written, all else being whole, and how many columns for an
    index."""
    whole = equation.outvars[0].aval.shape
    if equation.primitive.name == _UPDATES:
        part = equation.invars[1].aval.shape
        cut = [i for i, (n, m) in enumerate(zip(part, whole, strict=True)) if n != m]
        return (cut[0], part[cut[0]]) if len(cut) == 1 else None
    numbers, indices, updates = equation.params["dimension_numbers"], equation.invars[1].aval, equation.invars[2].aval
    along = [int(i) for i in numbers.scatter_dims_to_operand_dims]
    adds = equation.params["update_jaxpr"] is not None and equation.primitive.name != _DERIVED
    if len(along) != 1 or indices.shape[-1:] != (1,) or adds:
        return None
    if tuple(numbers.operand_batching_dims) or tuple(numbers.scatter_indices_batching_dims):
        return None
    (axis,), inserted = along, [int(i) for i in numbers.inserted_window_dims]
    window = [updates.shape[int(i)] for i in numbers.update_window_dims]
    if inserted not in ([], [axis]):
        return None
    if inserted:
        window.insert(axis, 1)
    others = [n for i, n in enumerate(window) if i != axis]
    return (axis, window[axis]) if others == [n for i, n in enumerate(whole) if i != axis] else None


def _between(body: Body, fills: Set[Var]) -> set[Atom]:
    """Returns the values that come from a product of matrices, and of which an exponential is computed, by elementwise
    operations, changes of layout and ``fills`` alone."""
    through = ELEMENTWISE | LAYOUT | _WRITES | {"reduce_max"}

    def passes(equation: JaxprEqn) -> bool:
        return equation.primitive.name in through or not fills.isdisjoint(equation.outvars)

    from_products: set[Atom] = set()
    for equation in body.equations:
        if is_contraction(equation) or (
            passes(equation) and any(isinstance(a, Var) and a in from_products for a in equation.invars)
        ):
            from_products.update(equation.outvars)
    to_exponentials: set[Atom] = set()
    for equation in reversed(body.equations):
        name = equation.primitive.name
        if name in _EXPONENTIALS or (passes(equation) and not to_exponentials.isdisjoint(equation.outvars)):
            to_exponentials.update(a for a in equation.invars if isinstance(a, Var))
    return from_products & to_exponentials


class _Selections(RewrittenBody):
    """Writes selections in the place of writes."""

    def __init__(self, body: Body, fills: dict[Var, _Fill]):
        super().__init__(body)
        self.fills = fills

    def run(self) -> None:
        for position, equation in enumerate(self.body.equations):
            equation = self._renamed(equation)
            fill = self.fills.get(equation.outvars[0]) if equation.outvars else None
            if fill is None:
                self._add_original(position, equation)
                continue
            atoms = [self._named(a) for a in (fill.operand, fill.number, *fill.indices)]
            varying = [a for a in atoms if isinstance(a, Var)]
            literals = {n: a.val for n, a in enumerate(atoms) if isinstance(a, Literal)}
            function = partial(_applied, fill, literals, len(atoms))
            self.names[equation.outvars[0]] = self._emit(equation, function, *varying)
        self._replace(*self._live())


def _applied(fill: _Fill, literals: Mapping[int, object], count: int, *arrays: jax.Array) -> jax.Array:
    left = iter(arrays)
    dtype = fill.operand.aval.dtype
    given = [
        jnp.asarray(literals[n], dtype if n < 2 else jnp.int32) if n in literals else next(left) for n in range(count)
    ]
    return fill.selected(*given)
