"""Cumulative sums, products, maxima, minima and logarithms of sums of exponentials, as loops over the axis.

JAX computes them by a tree of slices, which CPUs are slow at.  A loop adds one slice after the other.  Floating sums,
those of exponentials too, carry what rounding lost, so that the loop is at least as exact as the tree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.compat import Dtype, JaxprEqn, PyTree
from autopallas.kernels.respelling.exact_sums import Sums, added_exactly
from autopallas.kernels.respelling.kind import Kind, Sample, of_equation
from autopallas.kernels.respelling.spec import Plain, RespellingSpec
from autopallas.numerics.classes import Numerics
from autopallas.numerics.extremes import extreme

__all__ = ["KIND"]

_LONGEST_PRODUCT = 1024
"""Elements above which the roundings of a product one by one would add up to more than the tolerance."""
_TINY = 16
"""Elements below which a tree has so few levels that a loop may take twice as long, if a step computes little."""
_STEPS: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "cumsum": lax.add,
    "cumprod": lax.mul,
    "cummax": lax.max,
    "cummin": lax.min,
    "cumlogsumexp": jnp.logaddexp,
}
_Step: TypeAlias = Callable[[PyTree, jax.Array], tuple[PyTree, jax.Array]]
"""From what is carried and a slice to what is carried, and the slice of the result."""


def _parameters(equation: JaxprEqn) -> Mapping[str, Plain] | None:
    (operand,) = equation.invars
    axis, name = equation.params["axis"], equation.primitive.name
    dtype, shape = operand.aval.dtype, operand.aval.shape
    real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    if not real or 0 in shape or shape[axis] < 2:
        return None
    if name == "cumprod" and jnp.issubdtype(dtype, jnp.floating) and shape[axis] > _LONGEST_PRODUCT:
        return None
    return {"function": name, "axis": axis, "reverse": bool(equation.params["reverse"])}


def _original(spec: RespellingSpec, x: jax.Array) -> list[jax.Array]:
    function = getattr(lax, cast(str, spec["function"]))
    return [function(x, axis=spec["axis"], reverse=spec["reverse"])]


def _respelt(spec: RespellingSpec, x: jax.Array) -> list[jax.Array]:
    name, axis = cast(str, spec["function"]), cast(int, spec["axis"])
    dtype, floating = x.dtype, jnp.issubdtype(x.dtype, jnp.floating)
    rounds = floating and name in ("cumsum", "cumprod", "cumlogsumexp")
    own = jnp.promote_types(dtype, jnp.float32) if rounds else dtype
    moved = jnp.moveaxis(x, axis, 0)
    zeros = jnp.zeros(moved.shape[1:], own)
    identity = jnp.full_like(zeros, _identity(name, own))
    first: PyTree = identity
    step: _Step = _plain(_STEPS[name])
    if name == "cumlogsumexp":
        first, step = (identity, (zeros, zeros)), _log_summed
    elif name == "cumsum" and floating:
        first, step = (identity, zeros), _summed

    def one(carried: PyTree, given: jax.Array) -> tuple[PyTree, jax.Array]:
        carried, found = step(carried, given.astype(own))
        return carried, found.astype(dtype)

    found = lax.scan(one, first, moved, reverse=cast(bool, spec["reverse"]))[1]
    return [jnp.moveaxis(found, 0, axis)]


def _numerics(spec: RespellingSpec) -> Numerics:
    """Returns "identical" for integers and extrema.  A logarithm of a sum of exponentials is taken of another sum."""
    ((_, dtype),) = spec.operands
    if spec["function"] in ("cummax", "cummin") or not jnp.issubdtype(dtype, jnp.floating):
        return "identical"
    return "tolerance" if spec["function"] == "cumlogsumexp" else "reordered"


def _assumptions(spec: RespellingSpec) -> tuple[str, ...]:
    """Returns that nothing overflows on the way: the loop keeps what overflowed, where the original's blocks recover.
    Sums of float16 are carried in float32, and do not overflow."""
    ((_, dtype),) = spec.operands
    if not jnp.issubdtype(dtype, jnp.floating):
        return ()
    if spec["function"] == "cumprod":
        return ("no product of the first numbers overflows, or vanishes, and comes back with later ones",)
    if spec["function"] == "cumsum" and dtype != jnp.float16:
        return ("no sum of the first numbers overflows and comes back with later ones",)
    return ()


def _plain(combined: Callable[[jax.Array, jax.Array], jax.Array]) -> _Step:
    def step(carried: jax.Array, given: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = combined(carried, given)
        return found, found

    return step


def _summed(carried: Sums, given: jax.Array) -> tuple[Sums, jax.Array]:
    found = added_exactly(*carried, given)
    return found, found[0]


_FAR = 16.0
"""Distance of a number from the subtracted one from which it takes its place."""


def _log_summed(carried: tuple[jax.Array, Sums], given: jax.Array) -> tuple[tuple[jax.Array, Sums], jax.Array]:
    """Adds an exponential to a sum, and gives the sum's logarithm.

    The logarithm itself is not carried: beside it small terms would be rounded away, all the more where the numbers are
    large.  The sum is, of exponentials from which a number is subtracted that is near the maximum so far; it changes
    seldom, since each change rounds the sum.
    """
    before, (total, lost) = carried
    further = given > before + _FAR
    after = jnp.where(further, given, before)
    scale = jnp.where(further, jnp.exp(before - after), 1)
    subtracted = jnp.where(jnp.isfinite(after), after, 0)
    sums = added_exactly(total * scale, lost * scale, jnp.exp(given - subtracted))
    return (after, sums), subtracted + jnp.log(sums[0])


def _identity(name: str, dtype: Dtype) -> float | int:
    """Returns what leaves any number as it is: for sums of floats it is -0.0."""
    if name in ("cumsum", "cumprod"):
        return (-0.0 if jnp.issubdtype(dtype, jnp.floating) else 0) if name == "cumsum" else 1
    return extreme(dtype, largest=name == "cummin")


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns the function, and how long the axis is and where it stands."""
    ((shape, dtype),) = spec.operands
    axis = cast(int, spec["axis"])
    others = math.prod(shape) // shape[axis]
    tiny = shape[axis] < _TINY and spec["function"] != "cumlogsumexp"
    length = "tiny" if tiny else "short" if shape[axis] < 64 else "long"
    inner = math.prod(shape[axis + 1 :])
    place, few = ("minor", others < 64) if inner == 1 else ("outer", inner < 16)
    where = "alone" if others == 1 else f"{place}, few beside it" if few else place
    kind = "floats" if jnp.issubdtype(dtype, jnp.floating) else "integers"
    return f"{spec['function']} of {kind}, {length} axis, {where}"


_SHAPES: Mapping[str, tuple[tuple[tuple[int, ...], int], ...]] = {
    "outer": (((128, 256), 0), ((8, 256, 256), 1), ((2048, 4096), 0)),
    "minor": (((128, 256), 1), ((512, 1024), 1), ((2048, 4096), 1)),
    "few": (((2048, 8), 0), ((65536, 8), 0), ((524288, 8), 0)),
    "alone": (((32768,), 0), ((524288,), 0)),
    "short": (((32, 1024), 0), ((64, 32, 256), 1), ((32, 262144), 0)),
}
"""Shapes and axes by where the axis stands, one for each bucket."""


def _samples() -> Iterator[tuple[str, Sample]]:
    for name, (where, shapes), dtype in itertools.product(_STEPS, _SHAPES.items(), (jnp.float32, jnp.int32)):
        for shape, axis in shapes if dtype == jnp.float32 or name == "cumsum" else ():

            def function(x: jax.Array, name: str = name, axis: int = axis) -> jax.Array:
                found: jax.Array = getattr(lax, name)(x, axis=axis)
                return found

            if name == "cumprod" and shape[axis] > _LONGEST_PRODUCT:
                continue
            own = f"{name}-{where}-{math.prod(shape)}" + ("-counts" if dtype == jnp.int32 else "")
            yield own, Sample(function, (jax.ShapeDtypeStruct(shape, dtype),))


KIND = Kind(
    name="cumulative",
    primitives=tuple(_STEPS),
    numerics=_numerics,
    assumptions=_assumptions,
    instead="a loop over the axis",
    match=of_equation(_parameters),
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    elsewhere_from=2.0,  # one of 1.5 with AVX2 takes 1.2 times as long with AVX-512
)
