"""Moves the products with a head's weight out of the checkpoint around a whole model.

With ``jax.checkpoint`` around a model that ends in ``x @ w`` and the loss outside, logits are computed in one body and
read in another, and their gradient enters the body that computes the model again.  The logits' product, and what
follows it, may as well stand behind the checkpoint, which then returns x, a smaller array.  Likewise, the product of
the logits' gradient with the weight may stand before the checkpoint that computes everything again, and its product
with x behind that checkpoint, which then returns x.  Nothing is computed twice that was not, and less is passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopallas import compat, jaxprs
from autopallas.compat import JaxprEqn, Literal, Var
from autopallas.faults import contained
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.graph.flatten import Body, Child, is_contraction

__all__ = ["move_heads_out"]

Atom = Var | Literal

_LAYOUTS = frozenset({"transpose", "reshape", "convert_element_type", "squeeze", "expand_dims", "copy"})
_FLOWS = ELEMENTWISE | {
    "broadcast_in_dim", "copy", "dynamic_slice", "expand_dims", "gather", "pad", "reshape", "slice", "squeeze",
    "transpose", "dynamic_update_slice", "scatter-add",
}  # fmt: skip


def move_heads_out(root: Body) -> Body:
    """Moves products with a head's weight out of the checkpoints in every body, in place."""
    for body in root.walk():
        if any(body.equations[i].primitive.name in jaxprs.CHECKPOINTS for i in body.children):
            _of_body(body)
    return root


def _of_body(body: Body) -> None:
    into, out_of = _exponents(body)
    if not into:
        return
    equations: list[JaxprEqn] = []
    children: dict[int, list[Child]] = {}
    divided: list[_Parts] = []
    for position, equation in enumerate(body.equations):
        held = body.children.get(position)
        parts = _Parts(equation)
        if held is not None and equation.primitive.name in jaxprs.CHECKPOINTS:
            with contained(equation, "cross_entropy", "graph"):
                parts = _divided(equation, held[0].body, into, out_of)
        divided.append(parts)
        equations += parts.before
        if held is not None:
            children[len(equations)] = held
        equations += [parts.checkpoint, *parts.after]
    for parts in divided:
        parts.change()
    body.replace(equations, body.outvars, children)


def _exponents(body: Body) -> tuple[set[Var], set[Var]]:
    """Returns the variables that flow into an exponential element by element, and those that flow out of one."""
    into: set[Var] = set()
    for equation in reversed(body.equations):
        name = equation.primitive.name
        if name in ("exp", "exp2") or (name in _FLOWS and not into.isdisjoint(equation.outvars)):
            into.update(a for a in equation.invars if isinstance(a, Var))
    out_of: set[Var] = set()
    for equation in body.equations:
        name = equation.primitive.name
        reads = (a for a in equation.invars if isinstance(a, Var))
        if name in ("exp", "exp2") or (name in _FLOWS and any(a in out_of for a in reads)):
            out_of.update(equation.outvars)
    return into, out_of


@dataclass(frozen=True, slots=True)
class _Parts:
    """A checkpoint, and the equations that may stand before and behind it; ``change`` removes these from its body."""

    checkpoint: JaxprEqn
    before: Sequence[JaxprEqn] = ()
    after: Sequence[JaxprEqn] = ()
    change: Callable[[], None] = lambda: None


def _divided(equation: JaxprEqn, inner: Body, into: set[Var], out_of: set[Var]) -> _Parts:
    """Splits the products of a head from a checkpoint, if it has any."""
    unchanged = _Parts(equation)
    if any(map(compat.has_side_effects, inner.equations)):
        return unchanged
    given = {v for v, a in zip(inner.invars, equation.invars, strict=True) if isinstance(a, Var) and a in out_of}
    wanted = {v for v, outer in zip(inner.outvars, equation.outvars, strict=True) if outer in into}
    early = _early(inner, given) if given else []
    late = _late(inner, given, {id(e) for e in early}, wanted)
    if not any(is_contraction(e) for e in (*early, *late)):
        return unchanged
    return _rebuilt(equation, inner, early, late)


def _early(inner: Body, given: set[Var]) -> list[JaxprEqn]:
    """Returns the equations that depend on a gradient of logits, and otherwise only on the checkpoint's inputs."""
    known, touched = set(inner.invars), set(given)
    layouts: dict[Var, JaxprEqn] = {}
    """Layout operations on the checkpoint's inputs, such as a transposed weight: moved if a product needs them."""
    found: dict[int, JaxprEqn] = {}

    def take(equation: JaxprEqn) -> None:
        for atom in equation.invars:
            if isinstance(atom, Var) and atom in layouts and id(layouts[atom]) not in found:
                take(layouts[atom])
        found[id(equation)] = equation

    for equation in inner.equations:
        reads = [a for a in equation.invars if isinstance(a, Var)]
        if not all(a in known for a in reads):
            continue
        if touched.isdisjoint(reads):
            if equation.primitive.name in _LAYOUTS and reads:
                layouts[equation.outvars[0]] = equation
                known.update(equation.outvars)
        elif equation.primitive.name in _FLOWS or is_contraction(equation):
            take(equation)
            known.update(equation.outvars)
            if not is_contraction(equation):
                touched.update(equation.outvars)
    return [e for e in inner.equations if id(e) in found]


def _late(inner: Body, given: set[Var], early: set[int], wanted: set[Atom]) -> list[JaxprEqn]:
    """Returns the product that gives logits, or one with a gradient of logits, and all that is computed from it;
    returns nothing if that is more than elementwise computations."""
    touched = set(given)
    ends = _flowing_to(inner, wanted)
    moved: set[Var] = set()
    found: list[JaxprEqn] = []
    for equation in inner.equations:
        reads = [a for a in equation.invars if isinstance(a, Var)]
        if id(equation) in early:
            if not is_contraction(equation):
                touched.update(equation.outvars)
            continue
        if not moved.isdisjoint(reads):
            if equation.primitive.name not in _FLOWS:
                return []
        elif not (is_contraction(equation) and (equation.outvars[0] in ends or not touched.isdisjoint(reads))):
            continue
        found.append(equation)
        moved.update(equation.outvars)
    return found


def _flowing_to(inner: Body, wanted: set[Atom]) -> set[Atom]:
    found = set(wanted)
    for equation in reversed(inner.equations):
        if equation.primitive.name in _FLOWS and not found.isdisjoint(equation.outvars):
            found.update(a for a in equation.invars if isinstance(a, Var))
    return found


def _rebuilt(equation: JaxprEqn, inner: Body, early: Sequence[JaxprEqn], late: Sequence[JaxprEqn]) -> _Parts:
    moved = {id(e) for e in (*early, *late)}
    kept = [e for e in inner.equations if id(e) not in moved]
    outside: dict[Var, Atom] = dict(zip(inner.invars, equation.invars, strict=True))

    def copied(e: JaxprEqn) -> JaxprEqn:
        names = [Var(v.aval) for v in e.outvars]
        e = e.replace(invars=[a if isinstance(a, Literal) else outside[a] for a in e.invars])
        outside.update(zip(e.outvars, names, strict=True))
        return e.replace(outvars=names)

    before = [copied(e) for e in early]
    first = {v for e in early for v in e.outvars}
    behind = {v for e in late for v in e.outvars}
    # The rest of the body takes results of the early equations as operands, and returns the operands of the late ones.
    own = {v for e in kept for v in e.outvars} | {*inner.constvars}
    results: dict[Var, Atom] = {}
    passed: list[tuple[Atom, Var]] = []
    for atom, outer in zip(inner.outvars, equation.outvars, strict=True):
        if isinstance(atom, Var) and (atom in behind or atom in first):
            passed.append((atom, outer))
        else:
            results[outer] = atom
    needed = dict.fromkeys(a for e in late for a in e.invars if isinstance(a, Var) and a in own)
    for variable in needed:
        outside[variable] = outer = Var(variable.aval)
        results[outer] = variable
    reads = {a for e in kept for a in e.invars if isinstance(a, Var)} | {
        a for a in results.values() if isinstance(a, Var)
    }
    invars = [v for v in (*inner.invars, *(v for e in early for v in e.outvars)) if v in reads]
    operands = [outside[v] for v in invars]
    after = [copied(e) for e in late]
    names = {outside[a]: outer for a, outer in passed if isinstance(a, Var)}
    if len(names) != len(passed):  # one value is returned twice
        return _Parts(equation)

    def named(e: JaxprEqn) -> JaxprEqn:
        return e.replace(
            invars=[a if isinstance(a, Literal) else names.get(a, a) for a in e.invars],
            outvars=[names.get(v, v) for v in e.outvars],
        )

    before, after = [named(e) for e in before], [named(e) for e in after]
    operands = [a if isinstance(a, Literal) else names.get(a, a) for a in operands]
    held = {id(inner.equations[i]): children for i, children in inner.children.items()}
    outvars = list(results.values())
    source = jaxprs.rebuild(inner.source, inner.constvars, inner.consts, invars, outvars, kept)

    def change() -> None:
        inner.replace(kept, outvars, {i: held[id(e)] for i, e in enumerate(kept) if id(e) in held})
        inner.source, inner.invars, inner.renamed = source, invars, True

    params = {**equation.params, "jaxpr": source}
    return _Parts(equation.replace(invars=operands, outvars=list(results), params=params), before, after, change)
