"""Reads and rebuilds jaxprs: bodies, constants, places in source code, dead code."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from operator import add
from typing import Any

import jax
import numpy as np
from jax.extend.core import DebugInfo, Primitive
from jax.typing import ArrayLike, DTypeLike

from autopallas import array_types, compat
from autopallas.compat import (
    ClosedJaxpr,
    Jaxpr,
    JaxprAtom,
    JaxprEqn,
    JaxprLike,
    Literal,
    NameStack,
    ShapedArray,
    Traceback,
    Var,
)
from autopallas.place_selectors import Frame
from autopallas.places import in_package

__all__ = [
    "CHECKPOINTS",
    "bodies",
    "debug_info",
    "every_equation",
    "frames",
    "inline_equation",
    "is_leaf",
    "is_reader",
    "is_wide",
    "live_equations",
    "location",
    "name_stack",
    "name_stacks",
    "open_jaxpr",
    "operation_name",
    "reader",
    "rebuild",
    "renamed",
    "repeated_equation",
    "reshape_equation",
    "transposed_equation",
    "with_bodies",
    "with_operands",
    "with_weak_types",
    "without_casts",
    "without_dead_code",
    "zeros",
    "zeros_equation",
]


CHECKPOINTS = frozenset({"remat2", "checkpoint"})
"""Names of the primitive of :func:`jax.checkpoint`."""


def open_jaxpr(body: JaxprLike) -> tuple[Jaxpr, list[jax.Array]]:
    """Returns a jaxpr and its constants, whether ``body`` is open, closed, or (from 0.12) both at once."""
    found: Any = body
    return (found.jaxpr, list(found.consts)) if hasattr(body, "consts") else (found, [])


def rebuild(
    body: JaxprLike,
    constvars: Sequence[Var],
    consts: Sequence[ArrayLike],
    invars: Sequence[Var],
    outvars: Sequence[JaxprAtom],
    eqns: Sequence[JaxprEqn],
) -> JaxprLike:
    """Returns a jaxpr with the effects of ``body``, open or closed as ``body`` is."""
    info = debug_info("autopallas", len(invars), len(outvars))
    effects = open_jaxpr(body)[0].effects
    if compat.has_input_effects(effects):  # they name inputs, which may be others now
        effects = compat.effects_of(constvars, invars, outvars, eqns)
    new = compat.new_jaxpr(constvars, invars, outvars, eqns, effects, info)
    if isinstance(body, ClosedJaxpr):
        return ClosedJaxpr(new, list(consts))
    assert not consts
    return new


def debug_info(name: str, arguments: int, results: int) -> DebugInfo:
    """Returns debug information for a jaxpr that does not come from a Python function."""
    return DebugInfo("autopallas", name, ("",) * arguments, ("",) * results)


def is_leaf(equation: JaxprEqn) -> bool:
    """Returns whether an equation's primitive is known to have no jaxpr parameter; others may have none either."""
    return equation.primitive in _LEAVES


def bodies(equation: JaxprEqn) -> list[tuple[str, int | None, JaxprLike]]:
    """Returns the jaxprs among an equation's parameters: (parameter, position in a tuple or None, jaxpr).

    A jaxpr whose constants are given elsewhere, as primitives of other libraries hold them, is a parameter like any
    other.
    """
    found: list[tuple[str, int | None, JaxprLike]] = []
    if is_leaf(equation):
        return found
    for name, value in equation.params.items():
        kind = type(value)
        if kind in _PLAIN:
            continue
        if kind is tuple or kind is list:
            for i, x in enumerate(value):
                if type(x) not in _PLAIN and isinstance(x, _JAXPRS) and _is_whole(x):
                    found.append((name, i, x))
        elif isinstance(value, _JAXPRS) and _is_whole(value):
            found.append((name, None, value))
    return found


def _is_whole(body: JaxprLike) -> bool:
    """Returns whether a jaxpr has the values of all its constants."""
    jaxpr, consts = open_jaxpr(body)
    return len(jaxpr.constvars) == len(consts)


def every_equation(*programs: JaxprLike) -> Iterator[JaxprEqn]:
    """Yields the equations of programs, each followed by those of its bodies; a body that several equations share, as
    calls of one function do, is walked once.

    Example:
      >>> @jax.jit
      ... def twice(x):
      ...     return x + x
      >>> program = compat.make_jaxpr(lambda x: jax.numpy.sin(twice(twice(x))), 1.0)
      >>> [equation.primitive.name for equation in every_equation(program)]
      ['jit', 'add', 'jit', 'sin']
    """
    seen: set[int] = set()

    def within(program: JaxprLike) -> Iterator[JaxprEqn]:
        jaxpr, _ = open_jaxpr(program)
        if id(jaxpr) in seen:
            return
        seen.add(id(jaxpr))
        for equation in jaxpr.eqns:
            yield equation
            for _, _, body in bodies(equation):
                yield from within(body)

    for program in programs:
        yield from within(program)


def is_wide(program: JaxprLike) -> bool:
    """Returns whether a program computes anything with types that exist only where 64-bit types are enabled."""
    todo: list[JaxprLike] = [program]
    seen: set[int] = set()  # calls of one function share its body
    while todo:
        jaxpr, _ = open_jaxpr(todo.pop())
        if id(jaxpr) in seen:
            continue
        seen.add(id(jaxpr))
        variables = (*jaxpr.invars, *jaxpr.constvars, *(v for equation in jaxpr.eqns for v in equation.outvars))
        if any(compat.is_wide(v.aval) for v in variables):
            return True
        todo += [inner for equation in jaxpr.eqns for _, _, inner in bodies(equation)]
    return False


def with_bodies(equation: JaxprEqn, change: Callable[[JaxprLike], JaxprLike]) -> JaxprEqn:
    """Returns an equation whose bodies are changed; the same equation if ``change`` returns every body as it is."""
    params = dict(equation.params)
    for name, place, body in bodies(equation):
        new, several = change(body), params[name]
        if new is not body:
            params[name] = new if place is None else type(several)([*several[:place], new, *several[place + 1 :]])
    changed = any(params[name] is not value for name, value in equation.params.items())
    return equation.replace(params=params) if changed else equation


_JAXPRS = (Jaxpr, ClosedJaxpr)
_PLAIN = frozenset({type(None), bool, int, float, str})
"""Types of most parameters; none of them is a jaxpr."""
_LEAVES = frozenset(
    getattr(jax.lax, f"{name}_p")
    for name in """add sub mul div neg max min exp log sqrt rsqrt tanh erf logistic integer_pow pow select_n eq ge gt le
    lt ne and or not dot_general reduce_sum reduce_max convert_element_type broadcast_in_dim reshape transpose squeeze
    slice concatenate iota""".split()
)
"""Primitives of most equations; none of them has a jaxpr parameter."""


def name_stacks(calls: Sequence[JaxprEqn]) -> NameStack | None:
    """Concatenates the name stacks of calls, each of which holds the next; returns None without calls."""
    return reduce(add, [call.source_info.name_stack for call in calls]) if calls else None


def inline_equation(
    equation: JaxprEqn,
    invars: Sequence[JaxprAtom],
    outvars: Sequence[Var],
    calls: Sequence[JaxprEqn],
    around: NameStack | None,
) -> JaxprEqn:
    """Returns an equation of an inlined body with other variables, and with the name stacks of the enclosing calls,
    ``around``, in front."""
    source = equation.source_info
    traceback, stack = source.traceback, source.name_stack
    for call in reversed(calls):  # for a library's jit, the line of the user that calls it
        if traceback is not None and _place(traceback) != "unknown":
            break
        outer = call.source_info.traceback
        traceback = traceback if outer is None else outer
    source = source.replace(traceback=traceback, name_stack=stack if around is None else around + stack)
    return with_operands(equation, invars, outvars=list(outvars), source_info=source)


def renamed(atoms: Iterable[JaxprAtom], names: Mapping[Var, JaxprAtom]) -> list[JaxprAtom]:
    """Returns what stands for each atom: what ``names`` has for it, and else the atom itself."""
    return [atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in atoms]


def with_operands(equation: JaxprEqn, operands: Sequence[JaxprAtom], **changes: object) -> JaxprEqn:
    """Returns an equation with one operand in the place of each of its own, and perhaps with further changes."""
    return equation.replace(invars=list(operands), effects=compat.effects_on(equation, operands), **changes)


def location(equation: JaxprEqn | None) -> str:
    """ "file:line (function)" of the code that made an equation, or "unknown".

    If an installed package made it, the user's line that led there comes first:
    "file:line (function), in package/file:line (function)".
    """
    if equation is None or equation.source_info.traceback is None:
        return "unknown"
    return _place(equation.source_info.traceback)


def frames(equation: JaxprEqn) -> tuple[Frame, ...]:
    """Returns the calls that led to an equation, the innermost first, without JAX's own."""
    traceback = equation.source_info.traceback
    return () if traceback is None else _frames(traceback)


@lru_cache(maxsize=4096)
def _frames(traceback: Traceback) -> tuple[Frame, ...]:
    found = compat.user_frames(traceback)
    return tuple(Frame(frame.file_name, frame.start_line, frame.function_name) for frame in found)


@lru_cache(maxsize=4096)
def _place(traceback: Traceback) -> str:
    innermost = ""  # the innermost place in a package, without the path to it
    whole = "unknown"
    for frame in compat.user_frames(traceback):
        line = f":{frame.start_line} ({frame.function_name})"
        place = f"{frame.file_name}{line}"
        package = _in_package(frame.file_name)
        if package is None:
            return in_package(place, innermost) if innermost else place
        if not innermost:
            innermost, whole = f"{package}{line}", place
    return whole


@lru_cache(maxsize=4096)
def _in_package(file: str) -> str | None:
    """Returns a path relative to the folder of installed packages, or to this package; None for a file elsewhere."""
    if file.startswith(_OURS):
        return "autopallas/" + file.removeprefix(_OURS).replace(os.sep, "/")
    parts = file.replace(os.sep, "/").rsplit("/site-packages/", 1)
    parts = parts if len(parts) == 2 else file.replace(os.sep, "/").rsplit("/dist-packages/", 1)
    return parts[1] if len(parts) == 2 else None


_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


def operation_name(equation: JaxprEqn) -> str:
    """Returns the name of an equation's primitive.

    It is "scatter-apply" for a ``scatter`` that applies a function to the present elements, which shares its primitive
    with the ``scatter`` that replaces them.
    """
    name: str = equation.primitive.name
    applies = name == "scatter" and equation.params["update_jaxpr"] is not None
    return "scatter-apply" if applies else name


def name_stack(equation: JaxprEqn) -> str:
    """Returns the scopes and transformations under which an equation was made: "transpose(jvp(loss))/layer"."""
    return str(equation.source_info.name_stack)


def reshape_equation(variable: Var, shape: tuple[int, ...]) -> JaxprEqn:
    """Returns an equation that reshapes a variable."""
    equation: JaxprEqn
    (equation,) = jax.make_jaxpr(lambda x: jax.lax.reshape(x, shape))(np.zeros(variable.aval.shape, bool)).eqns
    result = Var(array_types.array_type(shape, variable.aval.dtype, [variable.aval]))
    return equation.replace(invars=[variable], outvars=[result])


def repeated_equation(variable: Var, axis: int, size: int, of_one: bool) -> JaxprEqn:
    """Returns an equation that repeats an array along a new axis, or along one of size 1 if ``of_one``."""
    before = variable.aval.shape
    shape = (*before[:axis], size, *before[axis + of_one :])
    dimensions = [d + (d >= axis and not of_one) for d in range(len(before))]
    equation: JaxprEqn
    (equation,) = jax.make_jaxpr(lambda x: jax.lax.broadcast_in_dim(x, shape, dimensions))(np.zeros(before, bool)).eqns
    result = Var(array_types.array_type(shape, variable.aval.dtype, [variable.aval]))
    return equation.replace(invars=[variable], outvars=[result])


def transposed_equation(variable: Var, order: Sequence[int]) -> JaxprEqn:
    """Returns an equation that gives the axes of an array in another order."""
    equation: JaxprEqn
    (equation,) = jax.make_jaxpr(lambda x: jax.lax.transpose(x, order))(np.zeros(variable.aval.shape, bool)).eqns
    shape = tuple(variable.aval.shape[d] for d in order)
    result = Var(array_types.array_type(shape, variable.aval.dtype, [variable.aval]))
    return equation.replace(invars=[variable], outvars=[result])


def zeros(dtype: DTypeLike) -> JaxprEqn:
    """Returns an equation that gives zeros of a dtype, for :func:`zeros_equation`."""
    program = jax.make_jaxpr(lambda: jax.lax.broadcast(jax.lax.full((), 0, dtype), (1,)))()
    equation: JaxprEqn = program.eqns[0]  # of one axis, since a scalar would be a literal
    return equation


def zeros_equation(aval: ShapedArray, like: JaxprEqn) -> tuple[JaxprEqn, Var]:
    """Returns an equation whose result is all zeros, and that result; ``like`` gives zeros of the same dtype."""
    result = Var(aval)
    return like.replace(params=like.params | {"shape": aval.shape}, outvars=[result]), result


def with_weak_types(program: ClosedJaxpr, like: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program whose results are weakly typed where those of another one are.

    Numbering takes a value for the same whether its type is weak or not, but what JAX promotes it to depends on that.
    """
    outputs: list[Var | Literal] = list(program.jaxpr.outvars)
    added: list[JaxprEqn] = []
    for i, (result, aval) in enumerate(zip(outputs, like.out_avals, strict=True)):
        if getattr(result.aval, "weak_type", False) != getattr(aval, "weak_type", False):
            (cast,) = jax.make_jaxpr(lambda x: jax.lax.convert_element_type(x, np.float16))(np.float32(0)).eqns
            params = cast.params | {"new_dtype": aval.dtype, "weak_type": aval.weak_type}
            outputs[i] = Var(aval)
            added.append(cast.replace(invars=[result], outvars=[outputs[i]], params=params))
    if not added:
        return program
    jaxpr = program.jaxpr
    found = rebuild(program, jaxpr.constvars, program.consts, jaxpr.invars, outputs, [*jaxpr.eqns, *added])
    assert isinstance(found, ClosedJaxpr)
    return found


def reader(like: JaxprEqn, operands: Sequence[Var], result: Var) -> JaxprEqn:
    """Returns an equation that stands for anything that reads some operands and gives a result; it is never run."""
    params = {"result": result.aval}
    return like.replace(primitive=reads_p, invars=list(operands), outvars=[result], params=params, effects=frozenset())


def is_reader(equation: JaxprEqn) -> bool:
    """Returns whether :func:`reader` made an equation."""
    return equation.primitive is reads_p


reads_p = Primitive("autopallas_reads")
"""Reads any operands and gives one result, whose type is a parameter; it is never bound."""
reads_p.def_abstract_eval(lambda *_, result: result)


def without_casts(program: JaxprLike) -> JaxprLike:
    """Returns a jaxpr without the equations that make values vary over manual mesh axes, which are bound in a
    ``shard_map`` alone; the same jaxpr if there are none."""
    jaxpr, consts = open_jaxpr(program)
    names: dict[Var, JaxprAtom] = {}
    equations: list[JaxprEqn] = []

    for equation in jaxpr.eqns:
        if equation.primitive.name in VARYING:
            names.update(zip(equation.outvars, renamed(equation.invars, names), strict=True))
            continue
        new = equation if is_leaf(equation) else with_bodies(equation, without_casts)
        read = renamed(equation.invars, names)
        equations.append(new if read == equation.invars else with_operands(new, read))
    if not names and all(new is old for new, old in zip(equations, jaxpr.eqns, strict=True)):
        return program
    return rebuild(program, jaxpr.constvars, consts, jaxpr.invars, renamed(jaxpr.outvars, names), equations)


VARYING = frozenset({"pvary", "pcast"})
"""Primitives whose result is the operand, typed as varying over further manual mesh axes."""


def without_dead_code(program: JaxprLike) -> ClosedJaxpr:
    """Returns a closed jaxpr without the equations whose results nobody reads, with the same inputs and results."""
    jaxpr, consts = open_jaxpr(program)
    equations = _needed(jaxpr)
    if equations is not None:
        rest = rebuild(program, jaxpr.constvars, consts, jaxpr.invars, jaxpr.outvars, equations)
        assert isinstance(rest, ClosedJaxpr)
        return rest
    live, _ = compat.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return ClosedJaxpr(live, consts)


def _needed(jaxpr: Jaxpr) -> list[JaxprEqn] | None:
    """Returns the equations whose results are read; None where one could shrink because only part of it is read."""
    from jax.interpreters.partial_eval import dce_rules

    found = live_equations(jaxpr.eqns, jaxpr.outvars)
    divisible = (e for e in found if e.primitive in dce_rules and e.primitive.name != "custom_jvp_call")
    return None if any(True for _ in divisible) else found


def live_equations(equations: Sequence[JaxprEqn], results: Sequence[Var | Literal]) -> list[JaxprEqn]:
    """Returns, in order, the equations from which the results are computed, and those with side effects."""
    read = {atom for atom in results if isinstance(atom, Var)}
    found: list[JaxprEqn] = []
    for equation in reversed(equations):
        if not read.isdisjoint(equation.outvars) or compat.has_side_effects(equation):
            found.append(equation)
            read.update([atom for atom in equation.invars if isinstance(atom, Var)])
    return found[::-1]
