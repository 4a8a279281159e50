"""While loops, which may count their steps up to a known number."""

from __future__ import annotations

import numpy as np

from autopallas.compat import Dtype, JaxprAtom, Literal, Var
from autopallas.graph import Body, Graph
from autopallas.graph.known_integers import KnownIntegers
from autopallas.numerics.casts import kind_of
from autopallas.patterns.recurrence.step import Scan

__all__ = ["while_loops"]


def while_loops(graph: Graph, integers: KnownIntegers) -> list[Scan]:
    """Returns the while loops of a program.

    The number of steps is known of those that run while an integer is below or above a known one, to which each step
    adds the same known number; it is 0 for the others.
    """
    found: list[Scan] = []
    for outer in graph.numbers:
        for position, children in outer.children.items():
            if outer.equations[position].primitive.name == "while":
                bodies = {child.parameter: child.body for child in children}
                condition, body = bodies["cond_jaxpr"], bodies["body_jaxpr"]
                length = _steps(graph, outer, position, condition, body, integers) or 0
                equation = outer.equations[position]
                given = equation.invars[int(equation.params["cond_nconsts"]) :]
                constants = int(equation.params["body_nconsts"])
                parts = body.invars[:constants], body.invars[constants:], list[Var]()
                found.append(Scan(outer, position, body, length, False, *parts, [*given], [*equation.outvars]))
    return found


def _steps(
    graph: Graph, outer: Body, position: int, condition: Body, body: Body, integers: KnownIntegers
) -> int | None:
    """Returns the number of steps, or None if it is not known."""
    equation = outer.equations[position]
    further, constants = int(equation.params["cond_nconsts"]), int(equation.params["body_nconsts"])
    first = equation.invars[further + constants :]

    def known(atom: JaxprAtom) -> int | None:
        """Returns a scalar integer of the body around the loop."""
        if atom.aval.shape or kind_of(atom.aval.dtype) not in "iu":
            return None
        if isinstance(atom, Literal):
            return int(atom.val)
        value = integers.of(graph.numbers[outer][atom])
        return None if value is None else int(value)

    if len(condition.equations) != 1 or condition.outvars != condition.equations[0].outvars:
        return None
    (test,) = condition.equations
    carried = {v: i for i, v in enumerate(condition.invars[further:])}
    values = [*map(known, equation.invars[:further]), *(None for _ in first)]
    for i, (variable, after) in enumerate(zip(body.invars[constants:], body.outvars, strict=True)):
        if after is variable:
            values[further + i] = known(first[i])
    limits = dict(zip(condition.invars, values, strict=True))
    name, (left, right) = test.primitive.name, (test.invars[0], test.invars[-1])
    if name not in _MIRRORED or len(test.invars) != 2:
        return None
    if not (isinstance(left, Var) and left in carried and limits[left] is None):
        left, right, name = right, left, _MIRRORED[name]
    limit = int(right.val) if isinstance(right, Literal) else limits.get(right)
    if not isinstance(left, Var) or left not in carried or limit is None:
        return None
    place = carried[left]
    start, step = known(first[place]), _step(body, constants + place, body.outvars[place])
    return None if start is None or step is None else _length(name, start, step, limit, left.aval.dtype)


_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


def _step(body: Body, place: int, after: JaxprAtom) -> int | None:
    """Returns the known number that each step adds to a carried value."""
    position = body.defined.get(after) if isinstance(after, Var) else None
    equation = None if position is None else body.equations[position]
    if equation is None or equation.primitive.name not in ("add", "sub"):
        return None
    own, by = equation.invars
    if equation.primitive.name == "add" and by is body.invars[place]:
        own, by = by, own
    if own is not body.invars[place] or not isinstance(by, Literal) or by.aval.shape:
        return None
    return int(by.val) if equation.primitive.name == "add" else -int(by.val)


def _length(name: str, start: int, step: int, limit: int, dtype: Dtype) -> int | None:
    """Returns the number of steps, or None if the counter does not come to the limit, or overflows before."""
    if name in ("gt", "ge"):
        start, step, limit = -start, -step, -limit
    past = limit + (name in ("le", "ge"))  # the first number at which the loop ends, or one behind it
    if step <= 0 or start >= past:
        return None
    length = -(-(past - start) // step)
    last, info = start + step * length, np.iinfo(np.dtype(str(dtype)))
    if name in ("gt", "ge"):
        last = -last
    return length if info.min <= last <= info.max else None
