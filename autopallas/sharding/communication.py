"""Compares collective traffic of the original and the sharded site by compiling both, where no rule decides."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopallas import compat
from autopallas.compat import PyTree
from autopallas.compile.outside_trace import isolated
from autopallas.patterns.match import Match
from autopallas.sharding.propagation import Divided, Found
from autopallas.sites.calls import with_residuals
from autopallas.sites.sharded_site import ShardedSite

__all__ = ["communicates_no_more"]

_SENDS = re.compile(r"= (.*) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_ARRAY = re.compile(r"\b[a-z]+(\d+)\w*\[([\d,]*)\]")


def communicates_no_more(part: Match, site: ShardedSite, found: Found) -> bool:
    """Returns whether a sharded site sends nothing that the original would not; compiles both, each on its own.

    Args:
      part: the match.
      site: the sharded site that is to compute it.
      found: how its operands and results are sharded.
    """
    if not isinstance(site.mesh, Mesh):
        return False
    original = part.original
    gradients = sorted({position for backward in part.backwards for position, _ in backward.gradients})
    given, wanted = (
        tuple(((*a.shape,), str(a.dtype), divided.get(i)) for i, a in enumerate(avals))
        for avals, divided in ((original.in_avals, found.operands), (original.out_avals, found.results))
    )
    before = _sent(_Program(compat.jaxpr_as_fun(original), str(original)), given, wanted, tuple(gradients), site.mesh)
    after = _sent(_Program(_in_parts(site), site), given, wanted, tuple(gradients), site.mesh)
    return all(count <= before[kind] for kind, count in after.items())


_Arrays: TypeAlias = Sequence[jax.Array]
_Saved: TypeAlias = tuple[_Arrays, _Arrays, _Arrays]
_Type: TypeAlias = tuple[tuple[int, ...], str, Divided | None]


class _Program:
    """A function that is compared and hashed by its key."""

    def __init__(self, run: Callable[..., Sequence[jax.Array]], key: Hashable):
        self.run, self.key = run, key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Program) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _in_parts(site: ShardedSite) -> Callable[..., Sequence[jax.Array]]:
    """Returns the sharded site's function and derivative on the reference kernel, since all kernels send the same."""
    kernel, saving = site.operation.implementation("reference"), with_residuals(site)

    @jax.custom_vjp
    def run(*operands: jax.Array) -> list[jax.Array]:
        return list(site.forward(kernel, None, operands)[0])

    def forward(*operands: jax.Array) -> tuple[list[jax.Array], _Saved]:
        results, residuals = saving.forward(kernel, None, operands)
        return list(results), (operands, results, residuals)

    def backward(saved: _Saved, cotangents: Sequence[jax.Array]) -> tuple[jax.Array | None, ...]:
        operands, results, residuals = saved
        floats = [i for i, x in enumerate(operands) if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)]
        found = saving.backward(kernel, None, operands, results, residuals, cotangents, floats)
        own = dict(zip(floats, found, strict=True))
        return tuple(own.get(i) for i in range(len(operands)))

    run.defvjp(forward, backward)
    return run


@functools.lru_cache(maxsize=256)
def _sent(
    program: _Program, given: Sequence[_Type], wanted: Sequence[_Type], gradients: tuple[int, ...], mesh: Mesh
) -> Counter[str]:
    """Counts the collectives of each kind in the compiled program, and the bits of the arrays that they return."""
    operands, results = (
        [_type(shape, dtype, divided, mesh) for shape, dtype, divided in types] for types in (given, wanted)
    )

    def function(operands: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> PyTree:
        def varied(*chosen: jax.Array) -> list[jax.Array]:
            filled = list(operands)
            for position, x in zip(gradients, chosen, strict=True):
                filled[position] = x
            return [
                jax.lax.with_sharding_constraint(x, t.sharding)
                for x, t in zip(program.run(*filled), results, strict=True)
            ]

        if not gradients:
            return varied()
        out, pull = jax.vjp(varied, *(operands[i] for i in gradients))
        pairs = zip(pull(cotangents), gradients, strict=True)
        return out, [jax.lax.with_sharding_constraint(x, operands_of[i]) for x, i in pairs]

    operands_of = [t.sharding for t in operands]
    text = isolated(lambda: str(jax.jit(function).lower(operands, results).compile().as_text()))
    found: Counter[str] = Counter()
    for types, kind in _SENDS.findall(text):
        found[kind] += 1
        for width, shape in _ARRAY.findall(types):
            found["bits"] += int(width) * math.prod(map(int, filter(None, shape.split(","))))
    return found


def _type(shape: tuple[int, ...], dtype: str, divided: Divided | None, mesh: Mesh) -> jax.ShapeDtypeStruct:
    axes = [own or None for own in divided or ()]
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))
