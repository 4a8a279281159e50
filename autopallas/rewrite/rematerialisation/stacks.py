"""Arrays that one scan stacks for another, which the other computes again in each of its rounds.

What is differentiated in a scan becomes two: one stacks what its body leaves for the backward, such as the activations
of every layer of a model, and another reads the stacks, from the last to the first.  The second computes a slice again
from slices of other stacks, or of what both scans read.  No compiler takes equations of one loop for those of another,
so that nothing has to keep them apart.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import ClassVar

import jax.numpy as jnp

from autopallas import array_types, compat, jaxprs
from autopallas.compat import Jaxpr, JaxprAtom, JaxprEqn, Literal, Var
from autopallas.report.records import Rematerialised
from autopallas.rewrite.rematerialisation.costs import (
    MOST,
    MOST_FOR_A_LARGE_STACK,
    beside_padded,
    cost,
    is_spread,
    repeated,
)
from autopallas.rewrite.rematerialisation.recomputation import (
    LEAST_BYTES,
    SHORT,
    Group,
    Recomputation,
    renamed,
    size_of,
    variables,
)

__all__ = ["with_less_stacked"]


_LARGE = 2**22
"""Size of a stack that no cache close to a processor holds."""
_SIXTEEN_BITS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def with_less_stacked(
    jaxpr: Jaxpr, equations: Sequence[JaxprEqn], fast: bool = False
) -> tuple[list[JaxprEqn], list[Rematerialised]]:
    """Returns the equations of a body with less in the stacks between its scans, and what is computed again for that.

    Args:
      jaxpr: the body.
      equations: what stands for its equations.
      fast: whether nothing may take longer for it; processors compute with 16-bit floats by way of 32 bits.
    """
    told: list[Rematerialised] = []
    if sum(equation.primitive.name == "scan" for equation in equations) < 2:
        return list(equations), told
    made = {variable for equation in equations for variable in equation.outvars}
    readers = _readers(jaxpr, equations)
    found = dict(enumerate(equations))
    scans = {
        position: None
        for position, equation in found.items()
        if equation.primitive.name == "scan" and any(readers.get(variable) for variable in equation.outvars)
    }
    for first in scans:
        read = Counter[int]()
        for stack in _stacks(found[first]):
            read.update(dict.fromkeys(readers[stack] & scans.keys(), size_of(stack)))
        if not read:
            continue
        ((second, _),) = read.most_common(1)
        others = {stack: readers[stack] - {second} for stack in _stacks(found[first])}
        pair = _Pair(found[first], found[second], others, made, fast)
        groups = pair.groups()
        if groups:
            told += (pair.record(group, pair.length) for group in groups)
            results = (*found[first].outvars, *found[second].outvars)
            found[second], *left = pair.rewritten(groups, {variable for variable in results if readers.get(variable)})
            del found[first]
            found.update((first, equation) for equation in left)
            for variable in variables(found[second].invars):
                readers[variable].add(second)
    return [found[position] for position in sorted(found)], told


def _readers(jaxpr: Jaxpr, equations: Sequence[JaxprEqn]) -> dict[Var, set[int]]:
    """Returns the positions of the equations that read each variable, of which one behind the last reads results."""
    readers: dict[Var, set[int]] = defaultdict(set)
    for position, equation in enumerate(equations):
        for variable in variables(equation.invars):
            readers[variable].add(position)
    for variable in variables(jaxpr.outvars):
        readers[variable].add(len(equations))
    return readers


def _stacks(scan: JaxprEqn) -> Sequence[Var]:
    return scan.outvars[compat.scan_parts(scan)[1] :]


class _Pair(Recomputation):
    """The body of a scan, and behind it that of another which reads its stacks, with one name for what both know.

    Attributes:
      stored: slices of stacks that the second scan alone reads.
      peak: the position of the last equation of the first body.
      length: the number of rounds.
    """

    SHORT: ClassVar[frozenset[str]] = SHORT | {"iota"}

    def __init__(self, first: JaxprEqn, second: JaxprEqn, others: Mapping[Var, Set[int]], made: Set[Var], fast: bool):
        """Reads two scans.

        Args:
          first: the scan that stacks.
          second: the one that reads the stacks.
          others: what else reads each stack.
          made: what the equations around the scans compute.
          fast: whether nothing may take longer.
        """
        self._first, self._second = first, second
        forward, _ = jaxprs.open_jaxpr(first.params["jaxpr"])
        backward, _ = jaxprs.open_jaxpr(second.params["jaxpr"])
        constants, carried = compat.scan_parts(first)
        given = [*zip(forward.invars, first.invars, strict=True)]
        whole = {*variables(second.invars[: sum(compat.scan_parts(second))])}
        stacks = [
            (value, stack)
            for value, stack in zip(forward.outvars[carried:], _stacks(first), strict=True)
            if isinstance(value, Var) and (others[stack] or stack in second.invars)
        ]
        shared = {value for value, stack in stacks if others[stack] or stack in whole}
        self._stacks = stacks
        self._constants = dict(given[:constants])
        self._slices: dict[Var, JaxprAtom] = dict([*stacks, *given[constants + carried :]])
        known: list[dict[JaxprAtom, Var]] = [{o: v for v, o in given[:constants] if isinstance(o, Var)}, {}]
        known.append({o: v for v, o in [*given[constants + carried :], *stacks] if isinstance(o, Var)})
        constants, carried = compat.scan_parts(second)
        names = {variable: Var(variable.aval) for variable in backward.constvars}
        for place, (variable, outer) in enumerate(zip(backward.invars, second.invars, strict=True)):
            of_kind = known[(place >= constants) + (place >= constants + carried)]
            names[variable] = of_kind.get(outer, Var(variable.aval)) if isinstance(outer, Var) else Var(variable.aval)
        self._own = {variable: names[variable] for variable in backward.invars}
        self._given = {name: variable for variable, name in reversed(self._own.items())}
        behind: list[JaxprEqn] = []
        for equation in backward.eqns:
            operands = renamed(equation.invars, names)
            names.update((variable, Var(variable.aval)) for variable in equation.outvars)
            behind.append(equation.replace(invars=operands, outvars=[names[v] for v in equation.outvars]))
        super().__init__([*forward.eqns, *behind])
        self._fast = fast
        self.length: int = first.params["length"]
        self.peak = len(forward.eqns) - 1
        returned = {*variables(renamed(backward.outvars, names))}
        self._kept = shared | self._given.keys()
        both = [*self._constants.items(), *self._slices.items()]
        self._kept |= {v for v, outer in both if isinstance(outer, Literal) or outer not in made}
        own = {value for value, _ in stacks} & self._given.keys() - returned - shared
        self.stored = {v for v in own if self.can_repeat(v) and size_of(v) * self.length >= LEAST_BYTES}

    def candidates(self) -> set[Var]:
        if not self._fast:
            return set(self.stored)
        behind = self.equations[self.peak + 1 :]
        slow = beside_padded(behind)
        return {v for v in self.stored - repeated(behind) if v not in slow or size_of(v) * self.length >= _LARGE}

    def is_kept(self, value: Var) -> bool:
        return value in self._kept

    def can_compute(self, group: Group) -> bool:
        return bool(group.late)

    def is_slow(self, value: Var, equations: Set[int]) -> bool:
        if not self._fast:
            return False
        made = [self.equations[position] for position in equations]
        if is_spread(value, made) or any(
            variable.aval.dtype in _SIXTEEN_BITS for equation in made for variable in equation.outvars
        ):
            return True
        most = MOST_FOR_A_LARGE_STACK if size_of(value) * self.length >= _LARGE else MOST
        return sum(map(cost, made)) > most * value.aval.size

    def rewritten(self, groups: Sequence[Group], read: Set[Var]) -> list[JaxprEqn]:
        """Returns the second scan, which computes groups again, and the first, which no longer stacks their values; the
        second alone if the first was there for nothing else.

        Args:
          groups: the groups.
          read: the results of both that are read anywhere.
        """
        constants: list[tuple[Var, JaxprAtom]] = []
        slices: list[tuple[Var, JaxprAtom]] = []
        stacks: list[tuple[Var, Var]] = []
        names = dict(self._given)
        for base in dict.fromkeys(base for group in groups for base in group.bases if base not in names):
            names[base] = Var(base.aval)
            if base in self._constants:
                constants.append((names[base], self._constants[base]))
                continue
            if base not in self._slices:
                shape = (self.length, *base.aval.shape)
                stacks.append((base, Var(array_types.array_type(shape, base.aval.dtype, [base.aval], base.aval))))
                self._slices[base] = stacks[-1][1]
            slices.append((names[base], self._slices[base]))

        jaxpr, _ = jaxprs.open_jaxpr(self._second.params["jaxpr"])
        added: dict[int, list[JaxprEqn]] = defaultdict(list)
        again: dict[Var, Var] = {}
        for group in groups:
            own = dict(names)
            added[group.late[0]] += self.computed_again(group, own)
            again.update((value, own[value]) for value in group.values)
        instead = {variable: again[name] for variable, name in self._own.items() if name in again}
        lines: list[JaxprEqn] = []
        for position, equation in enumerate(jaxpr.eqns, self.peak + 1):
            lines += [*added[position], equation.replace(invars=renamed(equation.invars, instead))]

        second = _extended(self._second, lines, constants, slices, ())
        forward, _ = jaxprs.open_jaxpr(self._first.params["jaxpr"])
        first = _extended(self._first, forward.eqns, (), (), stacks)
        dropped = {stack for value, stack in self._stacks if value in again}
        new = {stack for _, stack in stacks}
        return [*_with_results(second, read), *_with_results(first, (read - dropped) | new)]


def _extended(
    scan: JaxprEqn,
    equations: Sequence[JaxprEqn],
    constants: Sequence[tuple[Var, JaxprAtom]],
    slices: Sequence[tuple[Var, JaxprAtom]],
    stacks: Sequence[tuple[Var, Var]],
) -> JaxprEqn:
    """Returns a scan with other equations, which reads more constants and slices, and stacks more."""
    program = scan.params["jaxpr"]
    jaxpr, consts = jaxprs.open_jaxpr(program)
    invars = [*(v for v, _ in constants), *jaxpr.invars, *(v for v, _ in slices)]
    outvars = [*jaxpr.outvars, *(value for value, _ in stacks)]
    params = compat.extended_scan(scan.params, len(constants), len(slices), len(stacks))
    return scan.replace(
        params=params | {"jaxpr": jaxprs.rebuild(program, jaxpr.constvars, consts, invars, outvars, equations)},
        invars=[*(outer for _, outer in constants), *scan.invars, *(outer for _, outer in slices)],
        outvars=[*scan.outvars, *(stack for _, stack in stacks)],
    )


def _with_results(scan: JaxprEqn, wanted: Set[Var]) -> list[JaxprEqn]:
    """Returns a scan without results that are not wanted, and without what it reads for them alone; nothing if nothing
    of it is wanted."""
    results = [variable for variable in scan.outvars if variable in wanted]
    info = jaxprs.debug_info("autopallas", len(operands := variables(scan.invars)), len(results))
    whole = compat.new_jaxpr((), operands, results, [scan], scan.effects, info)
    live, _ = compat.dce_jaxpr(whole, [True] * len(results), instantiate=True)
    return list(live.eqns)
