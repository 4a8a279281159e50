"""The shardings of a call's arguments, which a trace does not see.

A function under ``jit`` sees of an array only over which mesh it is spread, not how.  So the trace of a program over
several devices is broken off by :class:`ShardingsNeeded`, and done again in a context that holds the shardings.  They
are a part of the key of every trace, so that a call with other shardings is traced anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.typing import ArrayLike

from autopallas import compat, jaxprs
from autopallas.compat import ClosedJaxpr, JaxprLike, MeshLike, Params, PyTree

__all__ = ["Shardings", "ShardingsNeeded", "is_recording", "known", "needs_shardings", "recording_shardings", "spread"]


class ShardingsNeeded(Exception):
    """Breaks off the trace of a program over several devices."""


@dataclass(frozen=True, slots=True)
class Shardings:
    """How the arguments and results of a program are spread over devices; None where nothing says.

    Attributes:
      arguments: per argument.
      results: per result.
      mesh: of all of them.
    """

    arguments: tuple[Sharding | None, ...]
    results: tuple[Sharding | None, ...]
    mesh: MeshLike | None


_UNKNOWN = "unknown"
_Recorded: TypeAlias = tuple[tuple[Sharding | None, ...], Mesh | None]
_recorded: compat.TraceContext[_Recorded | str | None] = compat.trace_context(None)
"""None: nobody asked; "unknown": there are no arrays, since something outside is being traced; else (per leaf of the
call's arguments, the sharding or None; the mesh in force)."""


def _of_leaf(leaf: object) -> Sharding | None:
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, jax.sharding.Sharding) and sharding.num_devices > 1 else None


def recording_shardings(args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> AbstractContextManager[None]:
    """A context in which the shardings of a call's arguments are known, as far as there are any."""
    leaves = jax.tree.leaves((tuple(args), kwargs))
    if not compat.is_outermost() or any(map(compat.is_tracer, leaves)):
        context: AbstractContextManager[None] = _recorded(_UNKNOWN)
    else:
        context = _recorded((tuple(map(_of_leaf, leaves)), compat.mesh_in_force()))
    return context


def is_recording() -> bool:
    """Whether this is inside of :func:`recording_shardings`."""
    return _recorded.value is not None


def needs_shardings(program: ClosedJaxpr, settings: Params | None) -> bool:
    """Whether a program is spread over several devices, and nothing has recorded how."""
    if _recorded.value is not None:
        return False
    given = jax.tree.leaves([(settings or {}).get(name) for name in ("in_shardings", "out_shardings")])
    return any(_of_leaf(_Holder(s)) is not None for s in given) or spread(program)


@dataclass(frozen=True, slots=True)
class _Holder:
    sharding: object


def spread(program: JaxprLike) -> bool:
    """Whether the types or constraints in a program name a mesh of several devices that the compiler divides for."""
    divided: dict[int, bool] = {}  # per mesh: a program has few, and many values
    todo, seen = [program], set()
    while todo:
        jaxpr, _ = jaxprs.open_jaxpr(todo.pop())
        if id(jaxpr) in seen:
            continue
        seen.add(id(jaxpr))
        values = [*jaxpr.invars, *jaxpr.constvars]
        for equation in jaxpr.eqns:
            bodies = jaxprs.bodies(equation)
            if bodies:
                todo += [body for _, _, body in bodies]
            else:
                values += equation.outvars
            if equation.primitive.name == "sharding_constraint" and _constrained_over(equation) is not None:
                return True
        for value in values:
            mesh = getattr(getattr(value.aval, "sharding", None), "mesh", None)
            if mesh is None:
                continue
            if id(mesh) not in divided:
                divided[id(mesh)] = _is_divided_for(mesh)
            if divided[id(mesh)]:
                return True
    return False


def _is_divided_for(mesh: MeshLike) -> bool:
    """Whether the compiler divides values whose types name a mesh."""
    if mesh.empty:
        return False
    pairs = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    # Types with explicit axes say how, but not over which processes.
    kinds = {AxisType.Auto, AxisType.Explicit} if jax.process_count() > 1 else {AxisType.Auto}
    return any(n > 1 and kind in kinds for n, kind in pairs)


def _constrained_over(equation: compat.JaxprEqn) -> jax.sharding.Mesh | None:
    """The mesh of several devices that a constraint names, if an equation is one."""
    sharding = equation.params.get("sharding") if equation.primitive.name == "sharding_constraint" else None
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, jax.sharding.Mesh):
        return None
    return sharding.mesh if sharding.mesh.size > 1 else None


def _named_mesh(program: JaxprLike) -> jax.sharding.Mesh | None:
    """The first mesh that a constraint in a program names."""
    jaxpr, _ = jaxprs.open_jaxpr(program)
    for equation in jaxpr.eqns:
        meshes = [_constrained_over(equation), *(_named_mesh(body) for _, _, body in jaxprs.bodies(equation))]
        found = next((mesh for mesh in meshes if mesh is not None), None)
        if found is not None:
            return found
    return None


def known(
    program: ClosedJaxpr,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    arrays: Sequence[ArrayLike],
    results: PyTree,
    settings: Params | None,
) -> Shardings | None:
    """The shardings of the program that is being traced, or None where they are not known.

    Args:
      program: as a closed jaxpr.
      args, kwargs: of the traced function.
      arrays: those of their leaves that are the program's arguments.
      results: the structure of its results.
      settings: of its ``jit``.
    """
    recorded = _recorded.value
    if recorded is None or isinstance(recorded, str):
        return None
    given, mesh = recorded
    settings = settings or {}
    leaves = jax.tree.leaves((tuple(args), kwargs))
    if len(leaves) != len(given):
        return None
    demanded = _demanded(args, settings)
    demanded += [None] * (len(leaves) - len(demanded))
    by_leaf = [d if _of_leaf(_Holder(d)) is not None else g for d, g in zip(demanded, given, strict=True)]
    place = {id(leaf): i for i, leaf in enumerate(leaves)}
    arguments = tuple(by_leaf[place[id(x)]] for x in arrays)
    count = len(jax.tree.leaves(results))
    wanted = settings.get("out_shardings")
    outside: list[Sharding | None] = [None] * count if wanted is None else _prefixed(wanted, results)
    named = [s for s in (*arguments, *outside) if isinstance(s, NamedSharding)]
    meshes = {s.mesh for s in named}
    if len(meshes) > 1:
        return None
    return Shardings(arguments, tuple(outside), meshes.pop() if meshes else mesh or _named_mesh(program))


def _demanded(args: Sequence[PyTree], settings: Params) -> list[Sharding | None]:
    """Per leaf of the positional arguments, the sharding that ``jit`` demands; of static ones it demands none."""
    if settings.get("in_shardings") is None:
        return []
    static = {number % len(args) for number in settings.get("static_argnums", ())} if args else set()
    shared = tuple(arg for i, arg in enumerate(args) if i not in static)
    left = iter(_prefixed(settings["in_shardings"], shared))
    return [None if i in static else next(left) for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]


def _prefixed(prefix: PyTree, full: PyTree) -> list[Sharding | None]:
    """The leaves of a tree of shardings, one for each leaf of the tree that they are meant for."""
    found: list[Sharding | None] = []

    def spread_out(sharding: object, part: PyTree) -> None:
        found.extend([sharding if isinstance(sharding, jax.sharding.Sharding) else None] * len(jax.tree.leaves(part)))

    jax.tree.map(spread_out, prefix, full, is_leaf=_is_prefix_leaf)
    return found


def _is_prefix_leaf(x: object) -> bool:
    return x is None or isinstance(x, jax.sharding.Sharding) or "Unspecified" in type(x).__name__
