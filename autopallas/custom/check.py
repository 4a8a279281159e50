"""Decides about a site of a custom pattern: it is applied, since the user asked for it, once it has been compared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from autopallas import compat
from autopallas.compat import Shaped
from autopallas.custom.site import OwnSite
from autopallas.graph import Graph
from autopallas.graph.edit import surviving
from autopallas.patterns.match import Match
from autopallas.sites.calls import kernel_backward, kernel_forward
from autopallas.sites.device import Device
from autopallas.sites.operation import Unsupported
from autopallas.sites.spec import NoBlockSizes

__all__ = ["check_replacement", "without_nested"]


class Verdict(Protocol):
    """Interface of a decision about a site."""

    @property
    def verdict(self) -> str: ...


D = TypeVar("D", bound=Verdict)

_MOST_BYTES = 2**28
"""Size above which a site's replacement is not compared, in bytes of its operands."""


class _Verdicts:
    """Results of checking replacements in this process: None, or what is wrong."""

    def __init__(self) -> None:
        self._known: dict[Hashable, str | None] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, compute: Callable[[], str | None]) -> str | None:
        with self._lock:
            if key not in self._known:
                self._known[key] = compute()
            return self._known[key]


_VERDICTS = _Verdicts()


def check_replacement(
    match: Match, device: Device, strict: bool, runs: bool
) -> tuple[str | None, str, NoBlockSizes | None]:
    """Returns (the implementation or None, the reason, its block sizes) for a site of a custom pattern.

    Args:
      match: the site.
      device: where the program will run.
      strict: whether to raise an exception in the replacement.
      runs: whether anything may run; if not, as in ``explain``, the replacement is not checked.
    """
    site = match.site
    assert isinstance(site, OwnSite)
    name = getattr(site.pattern.replacement, "__name__", "replacement")
    answer = site.operation.supports(name, site.spec, device)
    if isinstance(answer, Unsupported):
        return None, answer.reason, None
    if not runs:
        return name, "asked for by its pattern; it is compared with the reference before its first use", NoBlockSizes()
    asked = {site.uses[p] for backward in match.backwards for p, _ in backward.gradients}
    active = tuple(i for i, argument in enumerate(site.uses) if argument in asked)
    key = (site, active, compat.numeric_setting())
    try:
        fault = _VERDICTS.get(key, lambda: _fault(match, name, active))
    except Exception as error:
        if strict:
            raise
        return None, f"the replacement fails with {type(error).__name__}: {str(error).splitlines()[0]}", None
    if fault is not None:
        return None, fault, None
    return name, "asked for by its pattern, and found equal to the reference within tolerance", NoBlockSizes()


def without_nested(graph: Graph, matches: Sequence[Match], decisions: Sequence[D]) -> tuple[list[Match], list[D]]:
    """Drops sites, with their decisions, that lie within another applied site; the outer one stays."""
    pairs = list(zip(matches, decisions, strict=True))
    if not any(isinstance(match.site, OwnSite) for match in matches):
        return list(matches), list(decisions)

    def outside(some: list[tuple[Match, D]], others: list[tuple[Match, D]]) -> list[tuple[Match, D]]:
        given = {n for match, decision in others if decision.verdict == "applied" for n in match.replaced}
        still = surviving(graph, given) | given
        return [pair for pair in some if not still.isdisjoint(pair[0].results)]

    own = [pair for pair in pairs if isinstance(pair[0].site, OwnSite)]
    others = [pair for pair in pairs if not isinstance(pair[0].site, OwnSite)]
    own = outside(own, others)
    left = [*own, *outside(others, own)]
    return [match for match, _ in left], [decision for _, decision in left]


def _fault(match: Match, name: str, active: tuple[int, ...]) -> str | None:
    """Returns what is wrong with the replacement for this site, or None."""
    from autopallas.compile.outside_trace import isolated
    from autopallas.numerics.compare import compare, tolerance
    from autopallas.numerics.oracle import Oracle

    site = match.site
    assert isinstance(site, OwnSite)
    kernel = kernel_forward(site, name, NoBlockSizes())
    results, _ = jax.eval_shape(kernel, *map(_shape, match.original.in_avals))
    (wanted,) = match.original.out_avals
    if (results[0].shape, results[0].dtype) != (wanted.shape, wanted.dtype):
        found = f"{results[0].dtype}{list(results[0].shape)}"
        return f"the replacement gives {found} where the reference gives {wanted.dtype}{list(wanted.shape)}"
    if site.maps or _bytes(match.original.in_avals) > _MOST_BYTES:
        return None

    backward = active and site.has_backward

    def cotangent(value: jax.Array) -> jax.Array:
        return jnp.cos(jnp.arange(value.size, dtype=jnp.float32)).reshape(value.shape).astype(value.dtype)

    def summed(gradients: Sequence[jax.Array]) -> list[jax.Array]:
        """Adds up the gradients of the uses of each argument."""
        sums: dict[int, jax.Array] = {}
        for position, gradient in zip(active, gradients, strict=True):
            argument = site.uses[position]
            sums[argument] = sums[argument] + gradient if argument in sums else gradient
        return list(sums.values())

    def original(*operands: jax.Array) -> list[jax.Array]:
        run = compat.jaxpr_as_fun(match.original)
        if not backward:
            return list(run(*operands))

        def varied(*chosen: jax.Array) -> jax.Array:
            filled = list(operands)
            for position, x in zip(active, chosen, strict=True):
                filled[position] = x
            first: jax.Array = run(*filled)[0]
            return first

        value, pull = jax.vjp(varied, *(operands[i] for i in active))
        return [value, *summed(pull(cotangent(value)))]

    def ours(*operands: jax.Array) -> list[jax.Array]:
        results, _ = kernel(*operands)
        if not backward:
            return list(results)
        pull = kernel_backward(site, name, NoBlockSizes(), active)
        return [*results, *summed(pull(operands, results, (), (cotangent(results[0]),)))]

    def work() -> str | None:
        operands = _operands(match)
        plain, found = jax.jit(original)(*operands), jax.jit(ours)(*operands)
        oracle = Oracle(compat.make_jaxpr(original, *operands))(*operands)
        for position, (x, y, exact) in enumerate(zip(plain, found, oracle, strict=True)):
            what = "result" if position == 0 else f"gradient {position - 1}"
            dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.float32
            comparison = compare(what, x, y, exact, tolerance(dtype, position > 0))
            if not comparison.ok:
                error = comparison.rewritten.max_relative
                return f"the replacement's {what} differs from the reference's by {error:.2g} of the largest value"
        return None

    return isolated(work)


def _operands(match: Match) -> list[jax.Array]:
    """Returns operands for the comparison; uses of one argument get the same."""
    site = match.site
    assert isinstance(site, OwnSite)
    first = [match.original.in_avals[site.uses.index(i)] for i in range(len(site.spec.operands))]
    shapes = list(map(_shape, first))
    given: Sequence[jax.Array]
    if site.pattern.inputs is not None:
        given = [jnp.asarray(x, s.dtype) for x, s in zip(site.pattern.inputs(shapes), shapes, strict=True)]
    else:
        random = np.random.default_rng(0)
        given = [_random(random, s) for s in shapes]
    return [given[i] for i in site.uses]


def _random(random: np.random.Generator, shape: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(shape.dtype, jnp.inexact):
        return jnp.asarray(random.standard_normal(shape.shape), shape.dtype)
    return jnp.asarray(random.integers(0, 2, shape.shape), shape.dtype)


def _shape(aval: Shaped) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _bytes(avals: Sequence[Shaped]) -> int:
    return sum(int(np.prod(a.shape)) * np.dtype(a.dtype).itemsize for a in avals)
