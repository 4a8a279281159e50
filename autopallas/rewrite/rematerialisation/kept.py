"""Values of a program, or of one round of a loop, that its backward computes again.

A compiler would find that equations compute what others have computed, and take these.  So the array that is kept is
read behind a barrier, together with a number that is known in the backward alone, so that nothing is computed early.

XLA's CPU compiler removes barriers before it looks for equal equations.  There the array is read through a selection
instead, by a condition that always holds: the bits of a number of the backward, with one of them set, are not all zero.
No compiler is known to find that out; one that does computes the program as it was.  A branch tells whether the
condition holds: without it, a compiler would fuse the condition with all that reads the array, and keep what the number
follows from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import array_types, compat, jaxprs
from autopallas.compat import Jaxpr, JaxprAtom, JaxprEqn, Var
from autopallas.graph.prices import SAME
from autopallas.rewrite.rematerialisation.recomputation import (
    LEAST_BYTES,
    SHORT,
    Group,
    Recomputation,
    is_large_beside,
    renamed,
    size_of,
    variables,
)

__all__ = ["Kept"]

_FUSED = SHORT | frozenset(
    {"concatenate", "iota", "pad", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum", "slice"}
)
"""Primitives that a compiler computes together with what computes their operands."""
_COSTLY = frozenset(
    """acos acosh asin asinh atan atan2 atanh cbrt cos cosh erf erf_inv erfc exp exp2 expm1 log log1p log2 logistic pow
    rem rsqrt sin sinh sqrt tan tanh""".split()
)
"""Those of them that a compiler does not compute once for each reader."""
_TOKENS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float64))
_NEAR = 128
"""Most equations that are searched for a number of the backward."""
_READERS = 16
"""How many readers of what is computed again are searched for such a number first."""


class Kept(Recomputation):
    """The equations of a program or of a loop, with what a compiler is expected to keep of them.

    Attributes:
      stored: elementwise values that are stored: what something other than an elementwise equation or a sum reads, and
        what has several readers and is long to compute for each, or computed from several large arrays.
      until: for each value, the position at which it is last needed, by itself or to compute what is not stored.
      peak: the position of an equation, neither elementwise nor a sum, before which the largest part of what could be
        computed again is kept for what follows.
    """

    def __init__(self, jaxpr: Jaxpr, equations: Sequence[JaxprEqn]):
        super().__init__(equations)
        self._results = set(variables(jaxpr.outvars))
        self.stored = self._stored()
        self.until = self._until()
        self.peak = self._peak()

    def _is_fused(self, position: int) -> bool:
        """Returns whether an equation is computed together with what computes its operands."""
        return self.equations[position].primitive.name in _FUSED or self.is_call(position)

    def _stored(self) -> set[Var]:
        costly: set[Var] = set()
        found: set[Var] = set()
        for position, equation in enumerate(self.equations):
            for value in equation.outvars[:1]:
                if not self.is_elementwise(value):
                    continue
                operands = variables(equation.invars)
                if (
                    self.is_call(position)
                    or equation.primitive.name in _COSTLY
                    or any(o in costly and o not in found for o in operands)
                ):
                    costly.add(value)
                several = value in costly or sum(is_large_beside(o, size_of(value)) for o in operands) > 1
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
                if self.is_elementwise(result) and result not in self.stored and result not in self._results:
                    last = max(last, until[result])
        return last

    def _peak(self) -> int:
        change = [0] * (len(self.equations) + 1)
        for value in self.stored:
            if value not in self._results and size_of(value) >= LEAST_BYTES:
                change[self.defined[value]] += size_of(value)
                change[max(self.until[value], self.defined[value])] -= size_of(value)
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
                known = (self.defined[v] for v in variables(equation.invars) if v in self.defined)
                soonest.append(max((soonest[i] for i in known), default=0))
            else:
                soonest.append(position)
        change = [0] * (len(self.equations) + 2)
        for value, position in self.defined.items():
            if value not in self._results and (value in self.stored or not self.is_elementwise(value)):
                first, last = soonest[position], self.until[value]
                change[first] += size_of(value)
                change[max(soonest[last], first) + 1 if last >= 0 else first] -= size_of(value)
        total = most = 0
        for one in change:
            total += one
            most = max(most, total)
        return most

    def candidates(self) -> set[Var]:
        return {
            value
            for value, position in self.defined.items()
            if position <= self.peak < self.until[value]
            and value not in self._results
            and self.can_repeat(value)
            and size_of(value) >= LEAST_BYTES
        }

    def is_kept(self, value: Var) -> bool:
        position = self.defined.get(value)
        return position is None or value in self._results or position <= self.peak < self.until[value]

    def can_compute(self, group: Group) -> bool:
        return bool(group.late) and self._token(group.late) is not None

    def is_worth(self, sources: Set[Var], equations: Set[int]) -> bool:
        return bool(sources) and not {self.equations[position].primitive.name for position in equations} <= SAME

    # ------------------------------------------------------------------ when it is computed again

    def _token(self, late: Sequence[int]) -> Var | None:
        """Returns an array of the backward that is known where the first of some equations reads, at best one that
        these read too."""
        read = (v for position in late[:_READERS] for v in variables(self.equations[position].invars))
        near = range(late[0] - 1, max(self.peak, late[0] - _NEAR), -1)
        before = (v for position in near for v in self.equations[position].outvars)
        known = (v for found in (read, before) for v in found if self._is_known(v, late[0]))
        return next(known, None)

    def _is_known(self, variable: Var, position: int) -> bool:
        """Returns whether a value is an array of floats that comes from the backward, before an equation."""
        early = not self.peak < self.defined.get(variable, -1) < position
        return not early and size_of(variable) > 0 and variable.aval.dtype in _TOKENS

    def _after(self, group: Group, position: int) -> list[Var]:
        """Returns what is computed of a group before an equation, and takes long: gradients of weights, above all."""
        late = [i for i in group.late if i < position and not self._is_fused(i)]
        return [v for i in late for v in self.equations[i].outvars[:1] if self._is_known(v, position)]

    # ------------------------------------------------------------------ the program

    def rewritten(self, groups: Iterable[Group], platform: str) -> list[JaxprEqn]:
        """Returns the equations for a platform, with those of groups again, which what comes after the peak reads."""
        hide = _selected if platform == "cpu" else _behind_a_barrier
        added: dict[int, list[JaxprEqn]] = defaultdict(list)
        names: dict[Var, Var] = {}
        ordered = sorted(groups, key=lambda group: group.late)
        for before, group in zip([None, *ordered], ordered, strict=False):
            token = self._token(group.late)
            assert token is not None
            tokens = [token] if before is None else [token, *self._after(before, group.late[0])]
            largest = max(map(size_of, group.values))
            hidden = [base for base in group.bases if is_large_beside(base, largest)]
            new, results = _hidden(tokens, hidden, self.equations[group.late[0]], hide)
            own = dict(zip(hidden, results, strict=True))
            new += self.computed_again(group, own)
            added[group.late[0]] += new
            names.update((value, own[value]) for value in group.values)
        found: list[JaxprEqn] = []
        for position, equation in enumerate(self.equations):
            found += added[position]
            if position > self.peak and not names.keys().isdisjoint(variables(equation.invars)):
                equation = equation.replace(invars=renamed(equation.invars, names))
            found.append(equation)
        return jaxprs.live_equations(found, list(self._results))


def _hidden(
    tokens: Sequence[Var], arrays: Sequence[Var], like: JaxprEqn, hide: Callable[[int], Callable[..., list[jax.Array]]]
) -> tuple[list[JaxprEqn], list[Var]]:
    """Returns equations that give the same arrays, as a compiler cannot know, once the tokens are known."""
    given = [*tokens, *arrays]
    program = compat.make_jaxpr(hide(len(tokens)), *(array_types.typed_like(v.aval) for v in given)).jaxpr
    names: dict[Var, JaxprAtom] = dict(zip(program.invars, given, strict=True))
    found = []
    for equation in program.eqns:
        outvars = [Var(v.aval) for v in equation.outvars]
        new = equation.replace(invars=renamed(equation.invars, names), outvars=outvars, source_info=like.source_info)
        names.update(zip(equation.outvars, outvars, strict=True))
        found.append(new)
    return found, [v for v in renamed(program.outvars, names) if isinstance(v, Var)]


def _first(token: jax.Array) -> jax.Array:
    return lax.reshape(lax.slice(token, (0,) * token.ndim, (1,) * token.ndim), ())


def _behind_a_barrier(count: int) -> Callable[..., list[jax.Array]]:
    """Returns a function of so many tokens and of arrays, which returns the arrays."""
    return lambda *given: list(lax.optimization_barrier((*map(_first, given[:count]), *given[count:])))[count:]


def _selected(count: int) -> Callable[..., list[jax.Array]]:
    """Does the same where barriers are removed early."""

    def bits_of(token: jax.Array) -> jax.Array:
        bits = lax.bitcast_convert_type(_first(token), jnp.dtype(f"int{8 * token.dtype.itemsize}"))
        return lax.convert_element_type(bits, jnp.int32)

    def has_bits(bit: int) -> Callable[[jax.Array], jax.Array]:
        return lambda bits: lax.ne(lax.bitwise_or(bits, np.int32(bit)), np.int32(0))

    def function(*given: jax.Array) -> list[jax.Array]:
        bits = reduce(lax.bitwise_or, map(bits_of, given[:count]))
        holds = lax.cond(lax.gt(bits, np.int32(0)), has_bits(1), has_bits(2), bits)
        return [lax.select_n(holds, lax.full_like(array, 0), array) for array in given[count:]]

    return function
