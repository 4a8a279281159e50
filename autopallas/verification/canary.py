"""Compares now and then a call of an optimized function with the original: the option ``verify`` as a fraction.

Such a call runs as every other, and its arguments also go through the original.  Outputs are compared on the device.
Where one is further away than its tolerance, the call is judged by the float64 oracle, as ``verify`` does; only what is
in breach then is blamed, on the sites that :mod:`autopallas.verification.blame` finds.
"""

from __future__ import annotations

import functools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from autopallas import compat, jaxprs
from autopallas.compat import ClosedJaxpr, JaxprEqn, PyTree, Var
from autopallas.numerics.casts import is_quantised
from autopallas.numerics.compare import Comparison, tolerance_of
from autopallas.report.live_report import LiveReport
from autopallas.report.records import Canary as CanaryRecord
from autopallas.sites import random_keys
from autopallas.verification.influence import SITES, sources

__all__ = ["Canary", "Distance", "decade", "distances", "leaves_named"]


class Distance:
    """Distance of an output from the original's.

    Attributes:
      relative: the largest distance relative to the largest element; for integers the share that differs.
      introduced: how many elements are not finite that are finite in the original.
      absolute: the largest distance.
    """

    __slots__ = ("absolute", "introduced", "relative")

    def __init__(self, relative: float, introduced: int, absolute: float = 0.0):
        self.relative, self.introduced, self.absolute = relative, introduced, absolute


@jax.jit
def _distances(originals: Sequence[jax.Array], results: Sequence[jax.Array]) -> list[tuple[jax.Array, ...]]:
    return [_distance(x, y) for x, y in zip(originals, results, strict=True)]


def _distance(original: jax.Array, result: jax.Array) -> tuple[jax.Array, ...]:
    """Returns (largest distance, largest element, number of elements that are not finite any more)."""
    original, result = random_keys.data(original), random_keys.data(result)
    nothing = jnp.zeros((), jnp.float32)
    if not original.size:
        return nothing, nothing, jnp.zeros((), jnp.int32)
    if not jnp.issubdtype(original.dtype, jnp.inexact):
        return jnp.mean(original != result, dtype=jnp.float32), jnp.ones((), jnp.float32), jnp.zeros((), jnp.int32)
    kind = jnp.float32 if is_quantised(original.dtype) else jnp.promote_types(original.dtype, jnp.float32)
    x, y = original.astype(kind), result.astype(kind)
    finite = jnp.isfinite(x) & jnp.isfinite(y)
    same = jnp.isfinite(y) | jnp.isnan(x) | (x == y)
    distance = jnp.max(jnp.where(finite, jnp.abs(x - y), 0))
    smallest = float(jnp.finfo(original.dtype).tiny) / float(jnp.finfo(original.dtype).eps)
    size = jnp.maximum(jnp.max(jnp.where(finite, jnp.abs(x), 0)), smallest)
    return distance, size, jnp.sum(~same)


def distances(originals: Sequence[jax.Array], results: Sequence[jax.Array]) -> list[Distance]:
    """Returns how far each output is from the original's."""
    kept = [(x, y) for x, y in zip(originals, results, strict=True) if x.dtype != jax.dtypes.float0]
    found = iter(jax.device_get(_distances([x for x, _ in kept], [y for _, y in kept])))
    told = []
    for x in originals:
        distance, size, introduced = (0.0, 1.0, 0) if x.dtype == jax.dtypes.float0 else next(found)
        told.append(Distance(float(distance) / float(size) if distance else 0.0, int(introduced), float(distance)))
    return told


def decade(distance: Distance) -> str:
    """Returns the power of ten that a distance does not exceed, as the histogram has it.

    Example:
      >>> decade(Distance(3.2e-7, 0)), decade(Distance(0.0, 0)), decade(Distance(0.1, 5))
      ('1e-06', '0', 'not finite')
    """
    if distance.introduced or not math.isfinite(distance.relative):  # also what lies too far apart for its dtype
        return "not finite"
    return f"{10.0 ** math.ceil(math.log10(distance.relative)):.0e}" if distance.relative else "0"


class Canary:
    """Decides which calls of one function are compared, and counts what the comparisons found.

    Args:
      fraction: the part of the calls to compare.
    """

    __slots__ = (
        "_bounds",
        "_compared",
        "_errors",
        "_known",
        "_random",
        "_rounding",
        "breaches",
        "fraction",
        "left",
        "notes",
    )

    def __init__(self, fraction: float):
        self.fraction = fraction
        self.breaches: tuple[str, ...] = ()
        self.notes: tuple[str, ...] = ()
        self._random = random.Random(0)
        self._errors: dict[str, Counter[str]] = defaultdict(Counter)
        self._compared = 0
        self._bounds: dict[tuple[int, int], float] = {}
        self._rounding: dict[tuple[int, int], float] = {}
        self._known: dict[int, tuple[ClosedJaxpr, list[float], list[frozenset[str]]]] = {}
        self.left = 0
        self.wait(fraction)

    def wait(self, fraction: float) -> None:
        """Draws the number of calls up to the next one that is compared, so that on average a fraction is.

        A fraction of 0 or 1, which is no canary's, leaves that of before.
        """
        self.fraction = fraction if 0 < fraction < 1 else self.fraction
        rest = math.log1p(-self.fraction)
        self.left = 1 + int(math.log(1 - self._random.random()) / rest)

    def due(self) -> bool:
        """Counts a call; returns whether it is to be compared."""
        self.left -= 1
        return self.left <= 0

    def note(self, text: str) -> None:
        """Records why calls are not compared, or how."""
        if text not in self.notes:
            self.notes = (*self.notes, text)

    def breach(self, text: str) -> None:
        """Records a breach."""
        self.breaches = (*self.breaches, text)

    def suspicious(
        self, program: ClosedJaxpr, report: LiveReport, names: Sequence[str], found: Sequence[Distance]
    ) -> bool:
        """Counts the distances of one call; returns whether an output is further away than is known to be allowed.

        Args:
          program: the rewritten program.
          report: its report.
          names: the names of the outputs.
          found: the distance of each output.
        """
        self._compared += 1
        allowed, reached = self._facts(program, report)
        for name, sites, distance in zip(names, reached, found, strict=True):
            (site,) = sites if len(sites) == 1 else (f"output {name or 'result'}",)
            self._errors[site][decade(distance)] += 1
        return any(
            distance.introduced
            or (
                distance.relative > self._bounds.get((id(program), i), bound)
                and distance.absolute > self._rounding.get((id(program), i), -1.0)
            )
            for i, (distance, bound) in enumerate(zip(found, allowed, strict=True))
        )

    def allow(self, program: ClosedJaxpr, outputs: Sequence[Comparison]) -> None:
        """Remembers the distances that the oracle allowed for the outputs of a program.

        An output that is rounding and nothing else may be zero, as the original has it, where nothing is near
        relatively: for such a one the absolute distance is remembered too.
        """
        for i, output in enumerate(outputs):
            self._bounds[id(program), i] = output.allowed + output.original.max_relative
            if output.allowed >= 1 and output.rewritten.max_relative > 0:
                scale = output.rewritten.max_absolute / output.rewritten.max_relative
                self._rounding[id(program), i] = output.allowed * scale + output.original.max_absolute

    def _facts(self, program: ClosedJaxpr, report: LiveReport) -> tuple[list[float], list[frozenset[str]]]:
        """Returns the tolerance of each output, and the sites that it depends on; ``program`` stays alive with them."""
        if id(program) not in self._known:
            allowed = [tolerance_of(t.dtype, s) for t, s in zip(program.out_avals, sources(program), strict=True)]
            self._known[id(program)] = program, allowed, reaching(program, functools.partial(_named, report))
        return self._known[id(program)][1:]

    def record(self) -> CanaryRecord:
        """Returns what was found so far, for a report."""
        errors = {name: dict(sorted(counts.items(), key=_order)) for name, counts in sorted(self._errors.items())}
        return CanaryRecord(self.fraction, self._compared, errors, self.breaches, self.notes)


def _order(item: tuple[str, int]) -> float:
    return math.inf if item[0] == "not finite" else float(item[0])


def _named(report: LiveReport, equation: JaxprEqn) -> str:
    """Returns the name of a site under which errors are counted."""
    site = report.site_of(equation.params["decision"].entry)
    if site is not None:
        return f"{site.op} at {site.location}"
    return f"{equation.params['site'].operation.name} at {jaxprs.location(equation)}"


def reaching(program: ClosedJaxpr, name: Callable[[JaxprEqn], str]) -> list[frozenset[str]]:
    """Returns the names of the sites that each output of a program depends on.

    Args:
      program: the rewritten program.
      name: the name of the site to which an equation belongs.
    """
    jaxpr = jaxprs.open_jaxpr(program)[0]
    known: dict[Var, frozenset[str]] = {}
    for equation in jaxpr.eqns:
        read = [known.get(v, frozenset()) for v in equation.invars if not isinstance(v, compat.Literal)]
        found = frozenset[str]().union(*read, _within(equation, name))
        known.update(dict.fromkeys(equation.outvars, found))
    return [frozenset() if isinstance(v, compat.Literal) else known.get(v, frozenset()) for v in jaxpr.outvars]


def _within(equation: JaxprEqn, name: Callable[[JaxprEqn], str]) -> frozenset[str]:
    """Returns the names of the replaced sites that an equation is or holds."""
    if equation.primitive in SITES:
        return frozenset({name(equation)} if equation.params["decision"].verdict == "applied" else ())
    found: set[str] = set()
    for _, _, body in jaxprs.bodies(equation):
        for inner in jaxprs.open_jaxpr(body)[0].eqns:
            found |= _within(inner, name)
    return frozenset(found)


def leaves_named(result: PyTree) -> tuple[list[str], list[jax.Array]]:
    """Returns the names and the arrays of a result, beside which may be functions and numbers of the arguments."""
    found = [(path, x) for path, x in jax.tree_util.tree_flatten_with_path(result)[0] if hasattr(x, "dtype")]
    return [jax.tree_util.keystr(path) for path, _ in found], [x for _, x in found]
