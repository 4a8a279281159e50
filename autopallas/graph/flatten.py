"""Inlines a jaxpr structurally, into a tree of bodies, and dissolves calls that only group equations.

Nothing is traced anew: equations are copied with other variables.  A body is anything that must stay a jaxpr of its own
in the program that runs: the program itself, the body of a loop, branch or checkpoint, the primal of a custom rule.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from autopallas import compat, jaxprs
from autopallas.array_types import typed_like
from autopallas.compat import ClosedJaxpr, Jaxpr, JaxprAtom, JaxprEqn, JaxprLike, Literal, Var
from autopallas.graph.custom_rules import is_elementwise_call, restates_casts

_CALLS = frozenset({"closed_call", "core_call", "eval_jaxpr"})
_KERNELS = frozenset({"pallas_call", "core_map", "run_state"})
"""Equations whose bodies are kernels, written against references, which are not looked into."""
_OF_SCALARS = frozenset(
    {"scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max", "reduce", "reduce_window"}
)
"""Equations whose body combines two numbers into one; it counts as a parameter like any other."""
_CLOSED = _KERNELS | _OF_SCALARS


@dataclass(slots=True)
class Child:
    """A body held by an equation: its parameter and, in a tuple of bodies, its position."""

    parameter: str
    position: int | None
    body: Body


@dataclass(eq=False, slots=True)
class Body:
    """A flat jaxpr: inputs, equations in order, results, and the bodies that its equations hold."""

    source: JaxprLike
    path: tuple[str, ...]
    constvars: list[Var]
    consts: list[jax.Array]
    invars: list[Var]
    equations: list[JaxprEqn] = field(default_factory=list)
    outvars: list[Var | Literal] = field(default_factory=list)
    children: dict[int, list[Child]] = field(default_factory=dict)
    renamed: bool = False
    """Whether its variables differ from those of ``source``, which is the body of another equation too."""
    transposed: bool = False
    """Whether an equation of a derivative's backward holds the body, directly or further out."""
    assumed: dict[Var, str] = field(default_factory=dict)
    """Variables that equal the program's own value only under an assumption, and the assumption in words."""
    added: list[Var] = field(default_factory=list)
    """Results of products that the program itself lacks, which sites have to compute."""
    parted: list[list[Var]] = field(default_factory=list)
    """For each product that is taken apart, the results of products in its place of which a site has to compute one."""
    calls: dict[Var, tuple[JaxprEqn, ...]] = field(default_factory=dict)
    """For the first result of each equation of a dissolved call: the calls, the outermost first."""

    _defined: dict[Var, int] = field(default_factory=dict)

    @property
    def defined(self) -> dict[Var, int]:
        """Position of the equation that defines each variable."""
        if not self._defined:
            self._defined = {v: i for i, e in enumerate(self.equations) for v in e.outvars}
        return self._defined

    def replace(
        self, equations: list[JaxprEqn], outvars: list[Var | Literal], children: dict[int, list[Child]]
    ) -> None:
        """Replaces the body's equations, its results, and the bodies that these equations hold."""
        self.equations, self.outvars, self.children = equations, outvars, children
        self._defined = {}

    def walk(self) -> Iterator[Body]:
        """Yields this body and all below it."""
        yield self
        for children in self.children.values():
            for child in children:
                yield from child.body.walk()


def sizes(program: JaxprLike) -> tuple[int, int]:
    """Returns the number of a program's equations as they are written, and as they are with a copy of each body at each
    place that has it: functions that call each other twice double it with each of them."""
    written, flat = 0, dict[int, int]()
    todo = [jaxprs.open_jaxpr(program)[0]]
    while todo:
        jaxpr = todo[-1]
        if id(jaxpr) in flat:
            todo.pop()
            continue
        inner = [
            jaxprs.open_jaxpr(body)[0]
            for equation in jaxpr.eqns
            if not jaxprs.is_leaf(equation) and may_hold_bodies(equation)
            for _, _, body in jaxprs.bodies(equation)
        ]
        if missing := [one for one in inner if id(one) not in flat]:
            todo += missing
            continue
        flat[id(jaxpr)] = len(jaxpr.eqns) + sum(flat[id(one)] for one in inner)
        written += len(jaxpr.eqns)
        todo.pop()
    return written, flat[id(jaxprs.open_jaxpr(program)[0])]


def flatten(jaxpr: JaxprLike, path: tuple[str, ...] = ()) -> Body:
    """Returns the tree of bodies of a jaxpr, open or closed, as if it stood at ``path`` in another one.

    Each variable belongs to one body.
    """
    return _flatten(jaxpr, path, set())


def _flatten(jaxpr: JaxprLike, path: tuple[str, ...], seen: set[int], transposed: bool = False) -> Body:
    inner, consts = jaxprs.open_jaxpr(jaxpr)
    renamed = id(inner) in seen  # one jaxpr object may be the body of two loops
    seen.add(id(inner))
    constvars, invars = list(inner.constvars), list(inner.invars)
    bound: dict[Var, Var | Literal] = {}
    if renamed:
        constvars, invars = [Var(v.aval) for v in constvars], [Var(v.aval) for v in invars]
        bound = dict(zip([*inner.constvars, *inner.invars], [*constvars, *invars], strict=True))
    body = Body(jaxpr, path, constvars, list(consts), invars, renamed=renamed, transposed=transposed)
    body.outvars = _inline(body, inner, bound, (), renamed, seen)
    return body


def _inline(
    body: Body,
    jaxpr: Jaxpr,
    bound: Mapping[Var, Var | Literal],
    calls: tuple[JaxprEqn, ...],
    renamed: bool,
    seen: set[int],
) -> list[Var | Literal]:
    """Appends the equations of ``jaxpr`` to ``body``; returns its results.

    ``bound`` gives the values of the inputs of an inlined call.  Its variables are renamed: it may be called twice.
    """
    known: dict[Var, Var | Literal] = dict(bound)
    around = jaxprs.name_stacks(calls)
    for equation in jaxpr.eqns:
        leaf = jaxprs.is_leaf(equation)
        inputs: list[JaxprAtom] = equation.invars
        if known:
            inputs = jaxprs.renamed(inputs, known)
        called = None if leaf else _called(equation)
        if called is None and not leaf and (called := _outside_of_kernels(equation)) is not None:
            inputs = inputs[1:]
        if called is not None:
            inner, consts = jaxprs.open_jaxpr(called)
            names = [Var(v.aval) for v in inner.constvars]
            body.constvars += names
            body.consts += consts
            arguments = dict(zip([*inner.constvars, *inner.invars], [*names, *inputs], strict=True))
            results = _inline(body, inner, arguments, (*calls, equation), True, seen)
            known.update(zip(equation.outvars, results, strict=True))
            continue
        if renamed:
            outputs = [Var(v.aval) for v in equation.outvars]
            known.update(zip(equation.outvars, outputs, strict=True))
            equation = jaxprs.inline_equation(equation, inputs, outputs, calls, around)
            if calls and outputs:
                body.calls[outputs[0]] = calls
        elif known and any(map(operator.is_not, inputs, equation.invars)):
            equation = jaxprs.with_operands(equation, inputs)
        body.equations.append(equation)
        if not leaf and may_hold_bodies(equation):
            transposed = body.transposed or compat.is_transposed(equation)
            children = [
                Child(name, position, _flatten(inner, (*body.path, _label(equation, name, position)), seen, transposed))
                for name, position, inner in jaxprs.bodies(equation)
            ]
            if children:
                body.children[len(body.equations) - 1] = children
    return jaxprs.renamed(jaxpr.outvars, known)


def _called(equation: JaxprEqn) -> JaxprLike | None:
    """Returns the body of a call that may be dissolved, or None."""
    if (lowered := _lowered(equation)) is not None:
        return lowered
    if not (compat.is_plain_jit(equation) or equation.primitive.name in _CALLS or restates_casts(equation)):
        return None
    bodies = jaxprs.bodies(equation)
    if len(bodies) != 1 or len(jaxprs.open_jaxpr(bodies[0][2])[0].invars) != len(equation.invars):
        return None
    return bodies[0][2]


def _lowered(equation: JaxprEqn) -> ClosedJaxpr | None:
    """Returns what JAX lowers a call of a "high" primitive to; None for other calls, and if a result is a float."""
    if equation.primitive.name != "call_hi_primitive" or equation.effects:
        return None
    if any(getattr(v.aval.dtype, "kind", "-") not in "iub" for v in equation.outvars):
        return None
    primitive: Any = equation.primitive
    given = [typed_like(a.aval) for a in equation.invars]
    return compat.make_jaxpr(lambda *arguments: primitive.to_lojax(*arguments, **equation.params), *given)


def _outside_of_kernels(equation: JaxprEqn) -> JaxprLike | None:
    """Returns the branch taken outside of Pallas kernels, if a cond distinguishes nothing else, as in ``jnp.diag``."""
    platforms = equation.params.get("branches_platforms") if equation.primitive.name == "cond" else None
    if platforms is None or platforms[-1] is not None or {*platforms[:-1]} != {("mosaic",)}:
        return None
    branch: JaxprLike = equation.params["branches"][-1]
    return branch


def may_hold_bodies(equation: JaxprEqn) -> bool:
    """Returns whether jaxprs among an equation's parameters are bodies of the program."""
    return equation.primitive.name not in _CLOSED and not is_elementwise_call(equation)


def is_contraction(equation: JaxprEqn) -> bool:
    """Returns whether an equation is a product that sums over an axis."""
    return equation.primitive.name == "dot_general" and bool(equation.params["dimension_numbers"][0][0])


def _label(equation: JaxprEqn, parameter: str, position: int | None) -> str:
    """Returns the name of a body in reports: "scan", "while.cond", "cond.1"."""
    name = equation.primitive.name
    name = {"remat2": "checkpoint", "custom_vjp_call": "custom_vjp", "custom_jvp_call": "custom_jvp"}.get(name, name)
    if position is not None:
        return f"{name}.{position}"
    return f"{name}.{parameter.removesuffix('_jaxpr')}" if name == "while" else name
