"""Products of a loop's steps with arrays that all steps share, for which no step waits: of what a step is given, and of
what it gives and no later step reads.

A recurrent network multiplies its inputs by a weight, and its backward multiplies the gradients of its gates by the
same weight: each step reads the whole weight for a few rows.  The rows of many steps can be multiplied at once, before
these steps or after them.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import jax
from jax import lax

from autopallas import array_types, compat, jaxprs
from autopallas.compat import ClosedJaxpr, Jaxpr, JaxprAtom, JaxprEqn, Var
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.kernels.respelling.indexed_loops import IndexedLoop

__all__ = ["Parted", "SharedFactors", "Taken", "has_shared_factors"]

_SHARED, _OF_SLICES, _OF_CARRIED = range(3)
"""What a value of a step follows from at most: what all steps share, slices, or what the step before gave."""

_COSTLY = frozenset(
    """acos acosh asin asinh atan atan2 atanh cbrt cos cosh div erf erf_inv erfc exp exp2 expm1 integer_pow log log1p
    log2 logistic pow rem rsqrt sin sinh sqrt tan tanh""".split()
)
_MOVES = frozenset(
    """broadcast_in_dim concatenate copy expand_dims gather pad reshape rev slice split squeeze transpose""".split()
)
_TURNS = frozenset("copy expand_dims reshape squeeze transpose".split())
_PARTS = frozenset("concatenate slice split".split())
_CHEAP = (ELEMENTWISE - _COSTLY) | _MOVES
"""What may stand between a slice and a product: steps that read it too compute it again."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Products that are taken out of a loop's step, by the positions of their equations.

    Attributes:
      before: those of slices, computed before the steps.
      after: those from which results alone follow, computed after the steps.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.before or self.after)


@dataclass(frozen=True, slots=True)
class Parted:
    """A loop's step without what is taken out of it.

    Attributes:
      shared: from what all steps share to what follows from it and they multiply by; both are given to all of the
        following.
      before: from that and slices to ``given``.
      step: from that, what is carried, slices and ``given`` to what is carried, results and ``stacked``.
      after: from that, slices, ``given`` and ``stacked`` to ``later``.
      kept: numbers of the values that the step carries.
      results: positions of the results that the step gives.
      outputs: all results.
      slices: the variables of slices.
      given: those of products of slices.
      stacked: those of what each step gives beside its results.
      later: those of what is computed after the steps.
    """

    shared: ClosedJaxpr
    before: ClosedJaxpr
    step: ClosedJaxpr
    after: ClosedJaxpr
    kept: tuple[int, ...]
    results: tuple[int, ...]
    outputs: tuple[JaxprAtom, ...]
    slices: tuple[Var, ...]
    given: tuple[Var, ...]
    stacked: tuple[Var, ...]
    later: tuple[Var, ...]


class SharedFactors:
    """A loop's step, what each of its values follows from, and its products with what all steps share."""

    def __init__(self, loop: IndexedLoop):
        self.loop = loop
        self.jaxpr, self.captured = jaxprs.open_jaxpr(loop.step)
        last = loop.constants + loop.carried
        self.constants = list(self.jaxpr.invars[: loop.constants])
        self.carried = list(self.jaxpr.invars[loop.constants : last])
        self.slices = list(self.jaxpr.invars[last:])
        self.ends, self.results = self.jaxpr.outvars[: loop.carried], self.jaxpr.outvars[loop.carried :]
        self._origin: dict[Var, int] = dict.fromkeys(self.slices, _OF_SLICES)
        self._origin.update(dict.fromkeys(self.carried, _OF_CARRIED))
        self._follow(self.jaxpr.eqns)
        self.equations = list(self.jaxpr.eqns)
        """The step's equations; products of parts that follow from different values are one for each of them."""
        if apart := _apart(self):
            self.equations = apart
            self._follow(apart)

    def _follow(self, equations: Iterable[JaxprEqn]) -> None:
        for equation in equations:
            origin = max((self.origin(v) for v in equation.invars), default=_SHARED)
            if origin > _SHARED:
                self._origin.update(dict.fromkeys(equation.outvars, origin))

    def origin(self, atom: JaxprAtom) -> int:
        """Returns what a value follows from."""
        return self._origin.get(atom, _SHARED) if isinstance(atom, Var) else _SHARED

    def shared_side(self, equation: JaxprEqn) -> int | None:
        """Returns which operand of a product all steps share, if the other one is each step's own."""
        if equation.primitive.name != "dot_general":
            return None
        own = [self.origin(v) > _SHARED for v in equation.invars]
        return own.index(False) if own.count(True) == 1 else None

    def rows(self, product: JaxprEqn) -> int:
        """Returns the rows that a product multiplies by what all steps share; 0 where it does not."""
        shared = self.shared_side(product)
        return 0 if shared is None else _rows(product, 1 - shared)

    def own(self, equation: JaxprEqn) -> set[Var]:
        """Returns those operands of an equation that are each step's own."""
        return {v for v in equation.invars if isinstance(v, Var) and self.origin(v) > _SHARED}

    def waiting(self, sums: Iterable[int]) -> set[int]:
        """Returns the identities of the equations from which what a later step reads follows."""
        dropped = {*sums}
        return self.needed([v for i, v in enumerate(self.ends) if i not in dropped])

    def needed(self, atoms: Iterable[JaxprAtom]) -> set[int]:
        """Returns the identities of the equations from which values follow."""
        return {id(e) for e in jaxprs.live_equations(self.equations, [*atoms])}

    def defined(self) -> Iterator[Var]:
        """Yields what a step is given and computes, in order."""
        yield from (*self.carried, *self.slices)
        for equation in self.equations:
            yield from equation.outvars

    def program(
        self, inputs: Sequence[Var], outputs: Sequence[JaxprAtom], equations: Sequence[JaxprEqn]
    ) -> ClosedJaxpr:
        """Returns the program of those equations that the outputs follow from."""
        live = jaxprs.live_equations(equations, [*outputs])
        found = jaxprs.rebuild(self.loop.step, self.jaxpr.constvars, self.captured, inputs, outputs, live)
        return cast(ClosedJaxpr, found)

    def taken_out(self, sums: Iterable[int], read: Iterable[Var], most_rows: int) -> Taken:
        """Returns the products of few rows that can be taken out of the step.

        Args:
          sums: numbers of carried values that the step need not carry.
          read: what is read of each step in their place.
          most_rows: the most rows of a product of one step.
        """
        few = {i for i, e in enumerate(self.equations) if self.rows(e) in range(1, most_rows + 1)}
        if not few:
            return Taken()
        live = self.needed([*self.results, *read])
        waits = self.waiting(sums) | self.needed([v for e in self.equations if not _is_mapped(e) for v in e.invars])
        before, after, at_hand = list[int](), list[int](), {*self.slices}
        for i, equation in enumerate(self.equations):
            needed = id(equation) in waits or id(equation) in live
            if self.own(equation) <= at_hand:
                if i in few:
                    before += [i] if needed else []
                    at_hand.update(equation.outvars)
                elif equation.primitive.name in _CHEAP:
                    at_hand.update(equation.outvars)
            elif i in few and needed and id(equation) not in waits:
                after.append(i)
        return Taken(tuple(before), tuple(after))

    def products(self, taken: Taken) -> list[JaxprEqn]:
        """Returns the products that are taken out."""
        return [self.equations[i] for i in (*taken.before, *taken.after)]

    def elements(self, products: Iterable[JaxprEqn]) -> int:
        """Returns the elements of what all steps share that products multiply by."""
        found = ((e, self.shared_side(e)) for e in products)
        factors = {e.invars[side]: None for e, side in found if side is not None}
        return sum(int(v.aval.size) for v in factors)

    def parted(self, sums: Iterable[int], read: Iterable[Var], taken: Taken) -> Parted:
        """Parts the step.

        Args:
          sums: numbers of carried values that the step does not carry.
          read: what is read of each step in their place.
          taken: the products that are taken out.
        """
        wanted, dropped = dict.fromkeys(read), {*sums}
        kept = [i for i in range(len(self.carried)) if i not in dropped]
        given = [self.equations[i].outvars[0] for i in taken.before]
        products, live = {self.equations[i].outvars[0] for i in taken.after}, self.needed([*self.results, *wanted])
        later, moved = set[Var](), list[JaxprEqn]()
        for equation in self.equations:
            follows = id(equation) in live and not later.isdisjoint(self.own(equation))
            if follows or equation.outvars[0] in products:
                later.update(equation.outvars)
                moved.append(equation)
        elsewhere = later | {*given}
        results = [i for i, v in enumerate(self.results) if not (isinstance(v, Var) and v in elsewhere)]
        follow = [*dict.fromkeys(v for v in (*self.results, *wanted) if isinstance(v, Var) and v in later)]
        reads = ({v for e in moved for v in self.own(e)} | {*wanted}) - elsewhere - {*self.slices}
        stacked = [v for v in self.defined() if v in reads]
        factors = self.made()
        constants, apart, given_too = [*self.constants, *factors], elsewhere | {*factors}, {*factors}
        origin = {id(e): self.origin(e.outvars[0]) for e in self.equations if given_too.isdisjoint(e.outvars)}
        first = [e for e in self.equations if origin.get(id(e), _OF_CARRIED) < _OF_CARRIED]
        last = [e for e in self.equations if origin.get(id(e)) == _SHARED or not later.isdisjoint(e.outvars)]
        rest = [e for e in self.equations if apart.isdisjoint(e.outvars)]
        inputs = [*constants, *(self.carried[i] for i in kept), *self.slices, *given]
        outputs = [*(self.ends[i] for i in kept), *(self.results[i] for i in results), *stacked]
        return Parted(
            shared=self.program(self.constants, factors, self.equations),
            before=self.program([*constants, *self.slices], given, first),
            step=self.program(inputs, outputs, rest),
            after=self.program([*constants, *self.slices, *given, *stacked], follow, last),
            kept=tuple(kept), results=tuple(results), outputs=tuple(self.results), slices=tuple(self.slices),
            given=tuple(given), stacked=tuple(stacked), later=tuple(follow),
        )  # fmt: skip

    def made(self) -> list[Var]:
        """Returns what steps compute of what all share, and multiply by, with what else the same equations give: not
        every compiler computes it once."""
        made = {v: e for e in self.equations for v in e.outvars}
        found = dict.fromkeys(v for factor, _, _ in self._made() for v in made[factor].outvars)
        read = {v for v in (*self.jaxpr.outvars, *(v for e in self.equations for v in e.invars)) if isinstance(v, Var)}
        return [v for v in found if v in read]

    def of_parts(self) -> list[JaxprEqn]:
        """Returns the products with parts that steps, as they are written, take of what all share, and with what they
        put together of it."""
        written = {v for e in self.jaxpr.eqns for v in e.outvars}
        return [product for factor, product, name in self._made() if name in _PARTS and factor in written]

    def _made(self) -> Iterator[tuple[Var, JaxprEqn, str]]:
        """Yields factors that steps compute, with a product, and what computes them before they are turned; those that
        are turned alone are multiplied by as they are."""
        made = {v: e for e in self.equations for v in e.outvars}
        for product in jaxprs.live_equations(self.equations, self.jaxpr.outvars):
            side = self.shared_side(product)
            factor = None if side is None else product.invars[side]
            if isinstance(factor, Var):
                equation = made.get(factor)
                while equation is not None and equation.primitive.name in _TURNS:
                    (given, *_) = equation.invars
                    equation = made.get(given) if isinstance(given, Var) else None
                if equation is not None:
                    yield factor, product, equation.primitive.name


_ONE_BY_ONE = frozenset({"ffi_call", "pure_callback", "rng_bit_generator"})
"""What may be computed of one step at a time only, or gives another result of many."""


def _is_mapped(equation: JaxprEqn) -> bool:
    """Returns whether an equation of many steps can be computed at once, with the results of one after the other."""
    name, bodies = equation.primitive.name, jaxprs.bodies(equation)
    if name in _ONE_BY_ONE or not (bodies or compat.has_batching_rule(equation.primitive)):
        return False
    return all(_is_mapped(inner) for _, _, body in bodies for inner in jaxprs.open_jaxpr(body)[0].eqns)


# ---------------------------------------------------------------------- products of parts


def _apart(step: SharedFactors) -> list[JaxprEqn]:
    """Returns a step's equations with a product for each part of an operand that is put together of slices and of what
    was carried, and of each part of a result that a step's results alone follow from; nothing where there is none."""
    made = {v: e for e in step.jaxpr.eqns for v in e.outvars}
    readers: dict[Var, list[JaxprEqn]] = {}
    for equation in step.jaxpr.eqns:
        for v in {v for v in equation.invars if isinstance(v, Var)}:
            readers.setdefault(v, []).append(equation)
    whole = {v for v in step.jaxpr.outvars if isinstance(v, Var)}
    waiting = jaxprs.live_equations(step.jaxpr.eqns, step.ends)
    waited = {v for v in (*step.ends, *(v for e in waiting for v in e.invars)) if isinstance(v, Var)}
    instead: dict[int, list[JaxprEqn]] = {}
    for equation in step.jaxpr.eqns:
        shared = step.shared_side(equation)
        if shared is None:
            continue
        own, result = equation.invars[1 - shared], equation.outvars[0]
        put_together = made.get(own) if isinstance(own, Var) else None
        if put_together is not None and put_together.primitive.name == "concatenate":
            found = _of_parts(step, equation, shared, put_together)
        elif result not in whole and len({v in waited for e in readers.get(result, []) for v in e.outvars}) == 2:
            found = _in_parts(equation, shared, readers[result])
        else:
            found = {}
        instead.update(found)
    if not instead:
        return []
    return [new for equation in step.jaxpr.eqns for new in instead.get(id(equation), [equation])]


def _of_parts(step: SharedFactors, product: JaxprEqn, shared: int, parts: JaxprEqn) -> dict[int, list[JaxprEqn]]:
    """Returns the sum of the products of parts in the place of the product of all, by the equation's identity: empty
    where that is of 16 bits, whose sums are rounded once, or where the parts are not what is summed up over."""
    (contracted, _), own = product.params["dimension_numbers"], 1 - shared
    axis, origins = parts.params["dimension"], [step.origin(v) for v in parts.invars]
    if len(contracted[0]) != 1 or contracted[own][0] != axis or {_OF_SLICES, _OF_CARRIED} - {*origins}:
        return {}
    if product.outvars[0].aval.dtype.itemsize < 4:
        return {}
    sizes = [v.aval.shape[axis] for v in parts.invars]
    params, other = product.params, contracted[shared][0]

    def of_parts(*given: jax.Array) -> jax.Array:
        begin, found = 0, list[jax.Array]()
        for part, size in zip(given[1:], sizes, strict=True):
            factor = lax.slice_in_dim(given[0], begin, begin + size, axis=other)
            pair = (factor, part) if shared == 0 else (part, factor)
            found.append(lax.dot_general_p.bind(*pair, **params))
            begin += size
        return functools.reduce(operator.add, found)

    inputs = [product.invars[shared], *parts.invars]
    return {id(product): _written(product, of_parts, inputs, product.outvars)}


def _in_parts(product: JaxprEqn, shared: int, readers: Sequence[JaxprEqn]) -> dict[int, list[JaxprEqn]]:
    """Returns a product for each part that is read of a result, by the identities of the equations that read them;
    empty where anything else reads it, or the parts are not of the axis of what all steps share."""
    (contracted, batch), own = product.params["dimension_numbers"], 1 - shared
    factor = product.invars[shared].aval
    free = [i for i in range(factor.ndim) if i not in contracted[shared] and i not in batch[shared]]
    rows = product.invars[own].aval.ndim - len(contracted[own]) - len(batch[own])
    if len(free) != 1 or not readers:
        return {}
    at = len(batch[0]) + (rows if shared == 1 else 0)
    found: dict[int, list[JaxprEqn]] = {id(product): []}
    for reader in readers:
        spans = _spans(reader, at)
        if not spans:
            return {}
        new = list[JaxprEqn]()
        for (begin, end), result in zip(spans, reader.outvars, strict=True):

            def part(given: jax.Array, all_of_it: jax.Array, begin: int = begin, end: int = end) -> jax.Array:
                few = lax.slice_in_dim(all_of_it, begin, end, axis=free[0])
                pair = (few, given) if shared == 0 else (given, few)
                return cast(jax.Array, lax.dot_general_p.bind(*pair, **product.params))

            new += _written(product, part, [product.invars[own], product.invars[shared]], [result])
        found[id(reader)] = new
    return found


def _spans(reader: JaxprEqn, axis: int) -> list[tuple[int, int]]:
    """Returns which indices of an axis each result of an equation has, which takes all of the others; none where it
    does anything else."""
    params, shape = reader.params, reader.invars[0].aval.shape
    if reader.primitive.name == "split" and params["axis"] == axis:
        ends = [*itertools.accumulate(params["sizes"])]
        return [(int(end - size), int(end)) for end, size in zip(ends, params["sizes"], strict=True)]
    if reader.primitive.name != "slice" or params["strides"] is not None:
        return []
    spans = [*zip(params["start_indices"], params["limit_indices"], strict=True)]
    if any(span != (0, size) for i, (span, size) in enumerate(zip(spans, shape, strict=True)) if i != axis):
        return []
    return [(int(spans[axis][0]), int(spans[axis][1]))]


def _written(
    like: JaxprEqn, function: Callable[..., jax.Array], inputs: Sequence[JaxprAtom], outputs: Sequence[Var]
) -> list[JaxprEqn]:
    """Returns the equations of a function, with one result, of some values."""
    program = compat.make_jaxpr(function, *(array_types.typed_like(v.aval) for v in inputs))
    known: dict[Var, JaxprAtom] = dict(zip(program.jaxpr.invars, inputs, strict=True))
    known.update(zip(cast("list[Var]", program.jaxpr.outvars), outputs, strict=True))
    found = []
    for equation in program.jaxpr.eqns:
        operands = [known.get(v, v) if isinstance(v, Var) else v for v in equation.invars]
        results = [cast(Var, known.get(v, v)) for v in equation.outvars]
        found.append(jaxprs.inline_equation(equation, operands, results, [like], None))
    return found


# ---------------------------------------------------------------------- a quick look


def _rows(product: JaxprEqn, side: int) -> int:
    """Returns how many rows of one operand a product multiplies by those of the other."""
    contracted, batch = product.params["dimension_numbers"]
    axes = {*contracted[side], *batch[side]}
    return math.prod(size for axis, size in enumerate(product.invars[side].aval.shape) if axis not in axes)


def has_shared_factors(scan: JaxprEqn, most_rows: int, least_elements: int) -> bool:
    """Returns whether a scan's steps may multiply few rows by a large array that all of them share: a quick look."""
    jaxpr, _ = jaxprs.open_jaxpr(scan.params["jaxpr"])
    return _has_shared(
        jaxpr, {*jaxpr.constvars, *jaxpr.invars[: compat.scan_parts(scan)[0]]}, most_rows, least_elements
    )


def _has_shared(jaxpr: Jaxpr, shared: set[Var], most_rows: int, least_elements: int) -> bool:
    for equation in jaxpr.eqns:
        own = [isinstance(v, Var) and v not in shared for v in equation.invars]
        if not any(own):
            shared.update(equation.outvars)
        elif equation.primitive.name == "dot_general":
            if not all(own) and _rows(equation, own.index(True)) <= most_rows:
                if int(equation.invars[own.index(False)].aval.size) >= least_elements:
                    return True
        else:
            for _, _, body in jaxprs.bodies(equation):
                inner, _ = jaxprs.open_jaxpr(body)
                if len(inner.invars) == len(own):
                    read = {v for v, is_own in zip(inner.invars, own, strict=True) if not is_own}
                    if _has_shared(inner, read | {*inner.constvars}, most_rows, least_elements):
                        return True
    return False
