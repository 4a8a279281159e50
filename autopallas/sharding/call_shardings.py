"""Records the shardings of a call's arguments, which a trace does not see.

Inside of ``jit`` the type of an array names its mesh, but not how the array is sharded.  So :class:`ShardingsNeeded`
aborts the trace of a program over several devices, and the trace is repeated in a context that holds the shardings.
They are part of the key of every trace, so that a call with other shardings is traced anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias
from weakref import WeakKeyDictionary

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.typing import ArrayLike

from autopallas import array_types, compat, jaxprs
from autopallas.compat import ClosedJaxpr, JaxprLike, MeshLike, Params, PyTree
from autopallas.trace_context import TraceContext

__all__ = [
    "Shardings",
    "ShardingsNeeded",
    "has_explicit_shardings",
    "is_recording",
    "known",
    "needs_shardings",
    "on_several_devices",
    "recording_shardings",
    "spread",
]


class ShardingsNeeded(Exception):
    """Aborts the trace of a program over several devices, so that it is repeated with the shardings recorded."""


@dataclass(frozen=True, slots=True)
class Shardings:
    """Shardings of a program's arguments and results; None for those that are not known.

    Attributes:
      arguments: one per argument.
      results: one per result.
      mesh: the mesh of all of them.
    """

    arguments: tuple[Sharding | None, ...]
    results: tuple[Sharding | None, ...]
    mesh: MeshLike | None


_UNKNOWN = "unknown"
_Recorded: TypeAlias = tuple[tuple[Sharding | None, ...], Mesh | None]
_recorded: TraceContext[_Recorded | str | None] = TraceContext(None)
"""None outside of :func:`recording_shardings`; "unknown" where the arguments are not arrays, since an outer
transformation is being traced; otherwise (the sharding or None per leaf of the call's arguments, the mesh in force)."""


def _of_leaf(leaf: object) -> Sharding | None:
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, jax.sharding.Sharding) and sharding.num_devices > 1 else None


def recording_shardings(args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> AbstractContextManager[None]:
    """Returns a context in which the shardings of a call's arguments are recorded, as far as they are known."""
    leaves = jax.tree.leaves((tuple(args), kwargs))
    if not compat.is_outermost() or any(map(compat.is_tracer, leaves)):
        context: AbstractContextManager[None] = _recorded(_UNKNOWN)
    else:
        context = _recorded((tuple(map(_of_leaf, leaves)), array_types.mesh_in_force()))
    return context


def is_recording() -> bool:
    """Returns whether :func:`recording_shardings` is in force."""
    return _recorded.value is not None


def needs_shardings(program: ClosedJaxpr, settings: Params | None) -> bool:
    """Returns whether a program is spread over several devices and no shardings have been recorded."""
    if _recorded.value is not None:
        return False
    given = jax.tree.leaves([(settings or {}).get(name) for name in ("in_shardings", "out_shardings")])
    return any(_of_leaf(_Holder(s)) is not None for s in given) or spread(program)


@dataclass(frozen=True, slots=True)
class _Holder:
    sharding: object


_SPREAD: WeakKeyDictionary[JaxprLike, bool] = WeakKeyDictionary()


def spread(program: JaxprLike) -> bool:
    """Returns whether the compiler shards a program: whether a type or constraint names a mesh of several devices."""
    if program not in _SPREAD:
        # Types with explicit axes tell the sharding, but not over which processes.
        told = {AxisType.Explicit} if jax.process_count() > 1 else set()
        _SPREAD[program] = _is_spread(program, {AxisType.Auto} | told)
    return _SPREAD[program]


def on_several_devices(program: JaxprLike) -> bool:
    """Returns whether a program is sharded, as far as it tells: by the compiler, or by explicit types."""
    return _is_spread(program, {AxisType.Auto, AxisType.Explicit})


def has_explicit_shardings(program: JaxprLike) -> bool:
    """Returns whether types of a program tell how values are spread over several devices."""
    return _is_spread(program, {AxisType.Explicit})


def _is_spread(program: JaxprLike, kinds: Set[AxisType]) -> bool:
    meshes, is_constrained = _named(program)
    return (is_constrained and AxisType.Auto in kinds) or any(_is_divided_for(mesh, kinds) for mesh in meshes)


_NAMED: WeakKeyDictionary[JaxprLike, tuple[Sequence[MeshLike], bool]] = WeakKeyDictionary()


def _named(program: JaxprLike) -> tuple[Sequence[MeshLike], bool]:
    """Returns the meshes that types of a program name, and whether it constrains a value over several devices."""
    if program not in _NAMED:
        _NAMED[program] = _walked(program)
    return _NAMED[program]


def _walked(program: JaxprLike) -> tuple[Sequence[MeshLike], bool]:
    meshes: dict[int, MeshLike] = {}  # a program has few meshes and many values
    is_constrained = False
    todo, seen = [program], set()
    while todo:
        jaxpr, _ = jaxprs.open_jaxpr(todo.pop())
        if id(jaxpr) in seen:
            continue
        seen.add(id(jaxpr))
        values = [*jaxpr.invars, *jaxpr.constvars]
        for equation in jaxpr.eqns:
            bodies = () if jaxprs.is_leaf(equation) else jaxprs.bodies(equation)
            if bodies:
                todo += [body for _, _, body in bodies]
            else:
                values += equation.outvars
            if equation.primitive.name == "sharding_constraint" and _constrained_over(equation) is not None:
                is_constrained = True
        for value in values:
            mesh = getattr(getattr(value.aval, "sharding", None), "mesh", None)
            if mesh is not None:
                meshes.setdefault(id(mesh), mesh)
    return [*meshes.values()], is_constrained


def _is_divided_for(mesh: MeshLike, kinds: Set[AxisType]) -> bool:
    """Returns whether values whose types name this mesh are sharded over an axis of one of these kinds."""
    if mesh.empty:
        return False
    pairs = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(n > 1 and kind in kinds for n, kind in pairs)


def _constrained_over(equation: compat.JaxprEqn) -> jax.sharding.Mesh | None:
    """Returns the mesh of several devices that an equation names, if it is a sharding constraint, else None."""
    sharding = equation.params.get("sharding") if equation.primitive.name == "sharding_constraint" else None
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, jax.sharding.Mesh):
        return None
    return sharding.mesh if sharding.mesh.size > 1 else None


def _named_mesh(program: JaxprLike) -> jax.sharding.Mesh | None:
    """Returns the first mesh of several devices that a sharding constraint in a program names, or None."""
    meshes = map(_constrained_over, jaxprs.every_equation(program))
    return next((mesh for mesh in meshes if mesh is not None), None)


def known(
    program: ClosedJaxpr,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    arrays: Sequence[ArrayLike],
    results: PyTree,
    settings: Params | None,
) -> Shardings | None:
    """Returns the shardings of the program that is being traced, or None where they are not known.

    Args:
      program: the program, as a closed jaxpr.
      args, kwargs: the arguments of the traced function.
      arrays: the leaves of ``args`` and ``kwargs`` that are the program's arguments.
      results: a tree with the structure of its results.
      settings: the settings of its ``jit``.
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
    """Returns the sharding that ``jit`` demands for each leaf of the positional arguments; for static ones, None."""
    if settings.get("in_shardings") is None:
        return []
    static = {number % len(args) for number in settings.get("static_argnums", ())} if args else set()
    shared = tuple(arg for i, arg in enumerate(args) if i not in static)
    left = iter(_prefixed(settings["in_shardings"], shared))
    return [None if i in static else next(left) for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]


def _prefixed(prefix: PyTree, full: PyTree) -> list[Sharding | None]:
    """Spreads a prefix tree of shardings over the leaves of the full tree."""
    found: list[Sharding | None] = []

    def spread_out(sharding: object, part: PyTree) -> None:
        found.extend([sharding if isinstance(sharding, jax.sharding.Sharding) else None] * len(jax.tree.leaves(part)))

    jax.tree.map(spread_out, prefix, full, is_leaf=_is_prefix_leaf)
    return found


def _is_prefix_leaf(x: object) -> bool:
    return x is None or isinstance(x, jax.sharding.Sharding) or "Unspecified" in type(x).__name__
