"""Compares equations and programs that were traced apart: each layer that is written with a loop of its own has a body
of its own, whose equations are those of the others."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from autopallas import jaxprs
from autopallas.compat import ClosedJaxpr, Jaxpr, JaxprAtom, JaxprEqn, JaxprLike, Literal, Var
from autopallas.graph.custom_rules import called_program, is_elementwise_call, same_rule
from autopallas.graph.keys import literal_key

__all__ = ["same_parameters", "same_programs"]


def same_parameters(a: JaxprEqn, b: JaxprEqn) -> bool:
    """Returns whether the parameters of two equations of one primitive are equal."""
    if is_elementwise_call(a) and is_elementwise_call(b):
        return called_program(a) == called_program(b) and same_rule(a, b)
    try:
        if a.params == b.params:
            return True
        held = not jaxprs.is_leaf(a) and a.params.keys() == b.params.keys()
        return held and all(_alike(value, b.params[name]) for name, value in a.params.items())
    except Exception:  # arrays among them, for example
        return False


def _alike(a: object, b: object) -> bool:
    """Returns whether two parameters are equal; jaxprs are where they hold equal equations: each layer that is written
    with a loop of its own has another one."""
    if a is b:
        return True
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, (Jaxpr, ClosedJaxpr)) and isinstance(b, (Jaxpr, ClosedJaxpr)):
        return same_programs(a, b)
    return bool(a == b)


_COMPARED: WeakKeyDictionary[JaxprLike, WeakKeyDictionary[JaxprLike, bool]] = WeakKeyDictionary()


def same_programs(a: JaxprLike, b: JaxprLike) -> bool:
    """Returns whether two jaxprs hold equal equations, and the same arrays.

    Two jaxprs are compared once: each proof that meets a loop asks again.

    Example:
      >>> from autopallas import compat
      >>> programs = [compat.make_jaxpr(f, 1.0) for f in (lambda x: x + x, lambda y: y + y, lambda x: x * x)]
      >>> [same_programs(programs[0], other) for other in programs]
      [True, True, False]
    """
    if a is b:
        return True
    known = _COMPARED.get(a)
    if known is None:
        known = _COMPARED[a] = WeakKeyDictionary()
    found = known.get(b)
    if found is None:
        found = known[b] = _compared(a, b)
    return found


def _compared(a: JaxprLike, b: JaxprLike) -> bool:
    (one, held), (other, others) = jaxprs.open_jaxpr(a), jaxprs.open_jaxpr(b)
    pairs: dict[Var, Var] = {}

    def met(found: Sequence[Var], wanted: Sequence[Var]) -> bool:
        """Notes that variables correspond, and returns whether their types are equal."""
        pairs.update(zip(found, wanted, strict=False))
        return len(found) == len(wanted) and all(x.aval == y.aval for x, y in zip(found, wanted, strict=True))

    def read(found: Sequence[JaxprAtom], wanted: Sequence[JaxprAtom]) -> bool:
        if len(found) != len(wanted):
            return False
        for x, y in zip(found, wanted, strict=True):
            if isinstance(x, Literal) or isinstance(y, Literal):
                if not isinstance(x, Literal) or not isinstance(y, Literal):
                    return False
                if x.aval != y.aval or literal_key(x) != literal_key(y):
                    return False
            elif pairs.get(x) is not y:
                return False
        return True

    if len(one.eqns) != len(other.eqns) or len(held) != len(others):
        return False
    if not all(x is y for x, y in zip(held, others, strict=True)):
        return False
    if not met(one.constvars, other.constvars) or not met(one.invars, other.invars):
        return False
    for x, y in zip(one.eqns, other.eqns, strict=True):
        if x.primitive is not y.primitive or x.effects != y.effects or not read(x.invars, y.invars):
            return False
        if not met(x.outvars, y.outvars) or x.params is not y.params and not same_parameters(x, y):
            return False
    return read(one.outvars, other.outvars)
