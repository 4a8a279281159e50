"""Computes again, for a backward, what is elementwise and would be kept for it from the forward.

The forward of a train step leaves its backward several arrays that follow from one of them, element by element: from
what goes into an activation follow the activation, which the gradient of the next weight reads, and its derivative;
from the rows that are normalised follow the normalised ones, and what their scale and shift make of them.  One of these
arrays is kept instead, and the others are computed anew where the backward first reads one of them, as
``jax.checkpoint`` does around functions that a user chooses [1].

A compiler would find that equations compute what others have computed, and take these.  So the array that is kept is
read through a selection, by a condition that always holds: the bits of a number of the backward, with one of them set,
are not all zero.  No compiler is known to find that out; one that does computes the program as it was.  And the number
is known in the backward alone, so that nothing is computed early.  A branch tells whether the condition holds: without
it, a compiler would fuse the condition with all that reads the array, and keep what the number follows from.

[1] Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import compat, jaxprs
from autopallas.compat import ClosedJaxpr, Jaxpr, JaxprAtom, JaxprEqn, JaxprLike, Var
from autopallas.graph.custom_rules import ELEMENTWISE, is_elementwise_call
from autopallas.report.records import Rematerialised

__all__ = ["rematerialise"]

_SAME = frozenset({"copy", "expand_dims", "reshape", "squeeze"})
"""Primitives whose results are their operands, as they are stored."""
_SHORT = ELEMENTWISE | _SAME | {"broadcast_in_dim", "transpose"}
"""Primitives of what is computed again."""
_FUSED = _SHORT | frozenset(
    {"concatenate", "iota", "pad", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum", "slice"}
)
"""Primitives that a compiler computes together with what computes their operands."""
_COSTLY = frozenset(
    """acos acosh asin asinh atan atan2 atanh cbrt cos cosh erf erf_inv erfc exp exp2 expm1 log log1p log2 logistic pow
    rem rsqrt sin sinh sqrt tan tanh""".split()
)
"""Those of them that a compiler does not compute once for each reader."""
_LOOPS = frozenset({"scan", "while"})
_TOKENS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float64))
_LEAST_BYTES = 2**16
"""Smallest size of an array that is computed again."""
_LEAST_GAIN = 0.05
"""Part of the largest number of bytes that are needed at once, as estimated, by which it has to be smaller at least."""
_SMALL = 8
"""How many times as large an array is as one that costs next to nothing to keep for it, such as the mean of a row."""
_SOURCES = 16
"""Most arrays that are kept to compute another one again."""
_LONGEST = 128
"""Most equations that are computed again for one array, or searched for a number of the backward."""
_ROUNDS = 8
"""How often the groups that gain nothing are left out, and the others formed again."""
_READERS = 16
"""How many readers of what is computed again are searched for such a number first."""


def rematerialise(program: ClosedJaxpr) -> tuple[ClosedJaxpr, tuple[Rematerialised, ...]]:
    """Returns a program that computes elementwise values again where it would have kept them, and which these are.

    Args:
      program: flat, but for its loops, in which the same is done.

    Returns:
      The program as it is, and an empty tuple, where the memory that it needs would hardly be less.
    """
    told: list[Rematerialised] = []
    found = _changed(program, told)
    assert isinstance(found, ClosedJaxpr)
    return found, tuple(told)


def _changed(program: JaxprLike, told: list[Rematerialised]) -> JaxprLike:
    jaxpr, consts = jaxprs.open_jaxpr(program)
    equations = [
        jaxprs.with_bodies(e, lambda body: _changed(body, told)) if e.primitive.name in _LOOPS else e
        for e in jaxpr.eqns
    ]
    found = _Body(jaxpr, equations)
    groups = found.groups()
    again = found.rewritten(groups) if groups else equations
    if groups and _Body(jaxpr, again).most_bytes() <= (1 - _LEAST_GAIN) * found.most_bytes():
        equations = again
        told += map(found.record, groups)
    if len(equations) == len(jaxpr.eqns) and all(map(lambda new, old: new is old, equations, jaxpr.eqns)):
        return program
    return jaxprs.rebuild(program, jaxpr.constvars, consts, jaxpr.invars, jaxpr.outvars, equations)


def _bytes(variable: Var) -> int:
    """Returns the size of an array; 0 for what is none, such as a token or a key of random numbers."""
    shape, dtype = getattr(variable.aval, "shape", None), getattr(variable.aval, "dtype", None)
    if shape is None or dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return 0
    count: int = math.prod(shape) * dtype.itemsize
    return count


def _variables(atoms: Iterable[JaxprAtom]) -> list[Var]:
    return list(dict.fromkeys(atom for atom in atoms if isinstance(atom, Var)))


@dataclass(eq=False, slots=True)
class _Group:
    """Values that are computed again together.

    Attributes:
      values: the values.
      bases: what they are computed from.
      equations: the positions of the equations that compute them.
      late: the positions of the equations that read one of them after the peak, in order.
      token: an array of the backward that is known before these, one number of which is read.
    """

    values: list[Var] = field(default_factory=list)
    bases: dict[Var, None] = field(default_factory=dict)
    equations: set[int] = field(default_factory=set)
    late: list[int] = field(default_factory=list)
    token: Var | None = None


class _Body:
    """The equations of a program or of a loop, with what a compiler is expected to keep of them.

    Attributes:
      equations: the equations.
      defined: for each value, the position of its equation.
      readers: for each value, the positions of the equations that read it.
      stored: elementwise values that are stored: what something other than an elementwise equation or a sum reads, and
        what has several readers and is long to compute for each, or computed from several large arrays.
      until: for each value, the position at which it is last needed, by itself or to compute what is not stored.
      peak: the position of an equation, neither elementwise nor a sum, before which the largest part of what could be
        computed again is kept for what follows.
    """

    def __init__(self, jaxpr: Jaxpr, equations: Sequence[JaxprEqn]):
        self.equations = equations
        self._calls = {position for position, equation in enumerate(equations) if is_elementwise_call(equation)}
        self._results = set(_variables(jaxpr.outvars))
        self.defined: dict[Var, int] = {}
        self.readers: dict[Var, list[int]] = defaultdict(list)
        for position, equation in enumerate(equations):
            for variable in _variables(equation.invars):
                self.readers[variable].append(position)
            self.defined.update(dict.fromkeys(equation.outvars, position))
        self.stored = self._stored()
        self.until = self._until()
        self.peak = self._peak()

    def is_short(self, value: Var) -> bool:
        """Returns whether a value is elementwise, so that it can be computed again."""
        position = self.defined.get(value)
        if position is None:
            return False
        equation = self.equations[position]
        short = equation.primitive.name in _SHORT or position in self._calls
        return short and len(equation.outvars) == 1 and not equation.effects

    def _is_fused(self, position: int) -> bool:
        """Returns whether an equation is computed together with what computes its operands."""
        return self.equations[position].primitive.name in _FUSED or position in self._calls

    def _stored(self) -> set[Var]:
        costly: set[Var] = set()
        found: set[Var] = set()
        for position, equation in enumerate(self.equations):
            for value in equation.outvars[:1]:
                if not self.is_short(value):
                    continue
                operands = _variables(equation.invars)
                if (
                    position in self._calls
                    or equation.primitive.name in _COSTLY
                    or any(o in costly and o not in found for o in operands)
                ):
                    costly.add(value)
                several = value in costly or sum(_bytes(o) * _SMALL > _bytes(value) for o in operands) > 1
                readers = self.readers[value]
                apart = any(not self._is_fused(reader) for reader in readers)
                if apart or several and len(readers) > 1:
                    found.add(value)
        return found

    def _until(self) -> dict[Var, int]:
        until: dict[Var, int] = {}
        for position in range(len(self.equations) - 1, -1, -1):
            for value in self.equations[position].outvars:
                until[value] = self._last(value, until)
        for value in [value for value in self.readers if value not in until]:
            until[value] = self._last(value, until)
        return until

    def _last(self, value: Var, until: dict[Var, int]) -> int:
        last = len(self.equations) if value in self._results else -1
        for reader in self.readers[value]:
            last = max(last, reader)
            for result in self.equations[reader].outvars[:1]:
                if self.is_short(result) and result not in self.stored and result not in self._results:
                    last = max(last, until[result])
        return last

    def _peak(self) -> int:
        change = [0] * (len(self.equations) + 1)
        for value in self.stored:
            if value not in self._results and _bytes(value) >= _LEAST_BYTES:
                change[self.defined[value]] += _bytes(value)
                change[max(self.until[value], self.defined[value])] -= _bytes(value)
        total, most, peak = 0, 0, -1
        for position in range(len(self.equations)):
            total += change[position]
            if total > most and not self._is_fused(position):
                most, peak = total, position
        return peak

    def most_bytes(self) -> int:
        """Estimates the largest number of bytes that are needed at once, beside arguments and results.

        Elementwise equations and sums are taken to be computed as soon as they can be, as an optimizer's are.
        """
        soonest: list[int] = []
        for position, equation in enumerate(self.equations):
            if self._is_fused(position):
                known = (self.defined[v] for v in _variables(equation.invars) if v in self.defined)
                soonest.append(max((soonest[i] for i in known), default=0))
            else:
                soonest.append(position)
        change = [0] * (len(self.equations) + 2)
        for value, position in self.defined.items():
            if value not in self._results and (value in self.stored or not self.is_short(value)):
                first, last = soonest[position], self.until[value]
                change[first] += _bytes(value)
                change[max(soonest[last], first) + 1 if last >= 0 else first] -= _bytes(value)
        total = most = 0
        for one in change:
            total += one
            most = max(most, total)
        return most

    def _is_kept(self, value: Var) -> bool:
        """Returns whether a value is there after the peak in any case, unless it is computed again."""
        position = self.defined.get(value)
        return position is None or value in self._results or position <= self.peak < self.until[value]

    # ------------------------------------------------------------------ what is computed again

    def groups(self) -> list[_Group]:
        """Returns what is worth computing again, in groups that are computed from the same arrays."""
        again = {
            value
            for value, position in self.defined.items()
            if position <= self.peak < self.until[value]
            and value not in self._results
            and self.is_short(value)
            and _bytes(value) >= _LEAST_BYTES
        }
        for _ in range(_ROUNDS if again else 0):
            groups = list(self._grouped(again))
            left = {v for group in groups if group.token is None or self.gain(group) <= 0 for v in group.values}
            left.update(base for group in groups for base in group.bases if base in again)  # which is kept for it
            if not left:
                return groups
            again -= left
        return []

    def gain(self, group: _Group) -> int:
        """Returns by how many bytes less are kept."""
        stored = sum(_bytes(value) for value in group.values if value in self.stored)
        return stored - sum(_bytes(base) for base in group.bases if not self._is_kept(base))

    def _grouped(self, again: set[Var]) -> Iterator[_Group]:
        groups: dict[frozenset[Var], _Group] = defaultdict(_Group)
        passed = self._passed(again)
        for value in sorted(again, key=self.defined.__getitem__):
            bases, equations = self._chain(value, again, passed)
            large = frozenset(base for base in bases if _bytes(base) * _SMALL > _bytes(value))
            names = {self.equations[position].primitive.name for position in equations}
            if large and len(equations) <= _LONGEST and not names <= _SAME:
                group = groups[large]
                group.values.append(value)
                group.bases.update(bases)
                group.equations |= equations
        for group in groups.values():
            group.late = sorted({i for value in group.values for i in self.readers[value] if i > self.peak})
            group.token = self._token(group.late) if group.late else None
            yield group

    def _passed(self, again: set[Var]) -> set[Var]:
        """Returns the values that are not kept, but computed from others, where these are not larger together."""
        sources: dict[Var, frozenset[Var]] = {}  # what would be kept for a value
        passed: set[Var] = set()
        for equation in self.equations[: self.peak + 1]:
            for value in equation.outvars:
                kept = value not in again and self._is_kept(value)
                sources[value] = frozenset() if kept else frozenset([value])
                if kept or not self.is_short(value):
                    continue
                found = frozenset[Var]().union(*(sources.get(o, ()) for o in _variables(equation.invars)))
                size, sizes = _bytes(value), [*map(_bytes, found)]
                large = sum(one * _SMALL > size for one in sizes)
                if large < 2 and len(found) <= _SOURCES and sum(sizes) <= size + size // _SMALL:
                    passed.add(value)
                    sources[value] = found
        return passed

    def _chain(self, value: Var, again: set[Var], passed: set[Var]) -> tuple[dict[Var, None], set[int]]:
        """Returns what a value is computed from, and the positions of the equations that do so."""
        bases: dict[Var, None] = {}
        equations: set[int] = set()
        todo = [value]
        while todo and len(equations) <= _LONGEST:
            position = self.defined[todo.pop()]
            if position not in equations:
                equations.add(position)
                for operand in _variables(self.equations[position].invars):
                    if operand in passed:
                        todo.append(operand)
                    else:
                        bases[operand] = None
        return bases, equations

    def _token(self, late: Sequence[int]) -> Var | None:
        """Returns an array of the backward that is known where the first of some equations reads, at best one that
        these read too."""
        read = (v for position in late[:_READERS] for v in _variables(self.equations[position].invars))
        near = range(late[0] - 1, max(self.peak, late[0] - _LONGEST), -1)
        before = (v for position in near for v in self.equations[position].outvars)
        known = (v for variables in (read, before) for v in variables if self._is_known(v, late[0]))
        return next(known, None)

    def _is_known(self, variable: Var, position: int) -> bool:
        """Returns whether a value is an array of floats that comes from the backward, before an equation."""
        early = not self.peak < self.defined.get(variable, -1) < position
        return not early and _bytes(variable) > 0 and variable.aval.dtype in _TOKENS

    def _after(self, group: _Group, position: int) -> list[Var]:
        """Returns what is computed of a group before an equation, and takes long: gradients of weights, above all."""
        late = [i for i in group.late if i < position and not self._is_fused(i)]
        return [v for i in late for v in self.equations[i].outvars[:1] if self._is_known(v, position)]

    # ------------------------------------------------------------------ the program

    def rewritten(self, groups: Iterable[_Group]) -> list[JaxprEqn]:
        """Returns the equations, with those of groups again, which what comes after the peak reads."""
        added: dict[int, list[JaxprEqn]] = defaultdict(list)
        names: dict[Var, Var] = {}
        ordered = sorted(groups, key=lambda group: group.late)
        for before, group in zip([None, *ordered], ordered, strict=False):
            assert group.token is not None
            tokens = [group.token] if before is None else [group.token, *self._after(before, group.late[0])]
            largest = max(map(_bytes, group.values))
            hidden = [base for base in group.bases if _bytes(base) * _SMALL > largest]
            new, results = _hidden(tokens, hidden, self.equations[group.late[0]])
            own = dict(zip(hidden, results, strict=True))
            for position in sorted(group.equations):
                equation = self.equations[position]
                (value,) = equation.outvars
                own[value] = Var(value.aval)
                new.append(equation.replace(invars=_renamed(equation.invars, own), outvars=[own[value]]))
            added[group.late[0]] += new
            names.update((value, own[value]) for value in group.values)
        found: list[JaxprEqn] = []
        for position, equation in enumerate(self.equations):
            found += added[position]
            if position > self.peak and not names.keys().isdisjoint(_variables(equation.invars)):
                equation = equation.replace(invars=_renamed(equation.invars, names))
            found.append(equation)
        return jaxprs.live_equations(found, list(self._results))

    def record(self, group: _Group) -> Rematerialised:
        return Rematerialised(
            location=jaxprs.location(self.equations[max(group.equations)]),
            arrays=sum(value in self.stored for value in group.values),
            bytes=self.gain(group),
        )


def _renamed(atoms: Iterable[JaxprAtom], names: Mapping[Var, JaxprAtom]) -> list[JaxprAtom]:
    return [names.get(atom, atom) if isinstance(atom, Var) else atom for atom in atoms]


def _hidden(tokens: Sequence[Var], arrays: Sequence[Var], like: JaxprEqn) -> tuple[list[JaxprEqn], list[Var]]:
    """Returns equations that give the same arrays, as a compiler cannot know, once the tokens are known."""
    given = [*tokens, *arrays]
    program = compat.make_jaxpr(_selected(len(tokens)), *(compat.typed_like(v.aval) for v in given)).jaxpr
    names: dict[Var, JaxprAtom] = dict(zip(program.invars, given, strict=True))
    found = []
    for equation in program.eqns:
        outvars = [Var(v.aval) for v in equation.outvars]
        new = equation.replace(invars=_renamed(equation.invars, names), outvars=outvars, source_info=like.source_info)
        names.update(zip(equation.outvars, outvars, strict=True))
        found.append(new)
    return found, [v for v in _renamed(program.outvars, names) if isinstance(v, Var)]


def _selected(count: int) -> Callable[..., list[jax.Array]]:
    """Returns a function of so many tokens and of arrays, which returns the arrays."""

    def bits_of(token: jax.Array) -> jax.Array:
        number = lax.reshape(lax.slice(token, (0,) * token.ndim, (1,) * token.ndim), ())
        bits = lax.bitcast_convert_type(number, jnp.dtype(f"int{8 * number.dtype.itemsize}"))
        return lax.convert_element_type(bits, jnp.int32)

    def has_bits(bit: int) -> Callable[[jax.Array], jax.Array]:
        return lambda bits: lax.ne(lax.bitwise_or(bits, np.int32(bit)), np.int32(0))

    def function(*given: jax.Array) -> list[jax.Array]:
        bits = reduce(lax.bitwise_or, map(bits_of, given[:count]))
        holds = lax.cond(lax.gt(bits, np.int32(0)), has_bits(1), has_bits(2), bits)
        return [lax.select_n(holds, lax.full_like(array, 0), array) for array in given[count:]]

    return function
