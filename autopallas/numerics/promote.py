"""Evaluates one equation in two precisions: as the program has it, and in float64.

Every variable is a :class:`Value`: its value in the program's own precision, and its value in float64.  Where an
equation decides something (a comparison, an index, a random bit, a rounding to a grid), its outcome in the program's
own precision holds for both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives
from jax.typing import DTypeLike

from autopallas import compat, jaxprs
from autopallas.compat import Array, Dtype, JaxprEqn, JaxprLike, Params, Shaped

__all__ = [
    "FROZEN",
    "Value",
    "decided",
    "equation_twice",
    "in_float64",
    "is_float",
    "promoted_dtype",
    "quiet",
    "usual_promotion",
]

Body = Callable[[JaxprLike, Sequence["Value"]], "list[Value]"]
"""Evaluates a jaxpr, open or closed, on values."""


class Value(NamedTuple):
    """A variable in both precisions.  If it is no float, both are the same object."""

    own: jax.Array
    high: jax.Array


def is_float(dtype: DTypeLike) -> bool:
    """Returns whether a dtype is real or complex floating point."""
    return bool(jnp.issubdtype(dtype, np.inexact))


def promoted_dtype(dtype: Dtype) -> Dtype:
    """Returns the promoted dtype: float64 for floats, complex128 for complex numbers, the same for everything else."""
    if not is_float(dtype):
        return dtype
    return np.dtype(np.complex128 if jnp.issubdtype(dtype, np.complexfloating) else np.float64)


def in_float64(x: Array) -> np.ndarray:
    """Returns the numbers of an array in float64, or in complex128 where they are complex."""
    array = np.asarray(x)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def decided(own: jax.Array) -> Value:
    """Returns a value whose own form holds in both precisions."""
    dtype = own.dtype
    return Value(own, lax.convert_element_type(own, promoted_dtype(dtype)) if is_float(dtype) else own)


@contextlib.contextmanager
def usual_promotion() -> Iterator[None]:
    """Lets arrays of several dtypes and ranks meet, as JAX does by default, where a program forbids it to itself."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Switches off JAX's modes that watch the user's program, since they are not meant for a check of it."""
    with (
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.disable_jit(False),
        jax.check_tracer_leaks(False),
        jax.transfer_guard("allow"),
        usual_promotion(),
    ):
        yield


FROZEN = frozenset(
    {"bitcast_convert_type", "ceil", "floor", "nextafter", "random_gamma", "rng_uniform", "round", "sign"}
)
"""Float results that are decisions: a grid point, a sign, a neighbour or bit pattern in a dtype, random numbers."""
_OPAQUE = frozenset({"core_map", "custom_call", "ffi_call", "io_callback", "pallas_call", "pure_callback", "run_state"})
"""Custom kernels or other languages, in which nothing can be promoted."""
_CONTRACTIONS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"})
_KNOWN = frozenset(p.name for p in vars(primitives).values() if hasattr(p, "bind")) | {
    "all_gather_invariant",
    "optimization_barrier",
    "pbroadcast",
    "pcast",
    "psum_invariant",
    "pvary",
    "ragged_dot_general",
    "reduce_scatter",
    "split",
}
"""Primitives whose float64 form is known to compile; for others, compilation is tried."""


def equation_twice(equation: JaxprEqn, values: Sequence[Value], run: Body, notes: set[str]) -> list[Value]:
    """Returns the results of an equation that is no part of the program's control flow.

    Args:
      equation: the equation.
      values: its operands.
      run: evaluates a nested body (a combiner, such as the addition of a scatter-add).
      notes: receives a line where the equation has no float64 form, so that its own result is used instead.
    """
    name = equation.primitive.name
    if name == "sort":
        return _sort(equation, values)
    own = _bind(equation, [v.own for v in values], equation.params)
    if not any(is_float(x.dtype) for x in own):
        return [Value(x, x) for x in own]
    if name in FROZEN or any(jnp.issubdtype(v.own.dtype, jax.dtypes.prng_key) for v in values):
        return [decided(x) for x in own]
    try:
        high = _promoted(equation, values, own, run)
        for x, y in zip(own, high, strict=True):
            if x.shape != y.shape:
                raise TypeError(f"in float64 it gives the shape {y.shape}, not {x.shape}")
    except Exception as error:
        reason = "" if name in _OPAQUE else f" ({type(error).__name__})"
        notes.add(f"{name} has no float64 form{reason}; its own result was taken: {jaxprs.location(equation)}")
        return [decided(x) for x in own]
    return [
        Value(x, lax.convert_element_type(y, promoted_dtype(x.dtype)) if is_float(x.dtype) else x)
        for x, y in zip(own, high, strict=True)
    ]


def _bind(equation: JaxprEqn, operands: Sequence[jax.Array], params: Params) -> list[jax.Array]:
    results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(params))
    return list(results) if equation.primitive.multiple_results else [results]


def _promoted(equation: JaxprEqn, values: Sequence[Value], own: Sequence[jax.Array], run: Body) -> list[jax.Array]:
    name, params = equation.primitive.name, equation.params
    operands = [v.high for v in values]
    if name in _OPAQUE:
        raise NotImplementedError
    if name == "reduce_precision":
        return [operands[0] if _keeps_width(values[0].own.dtype, **params) else own[0]]
    if name in ("top_k", "approx_top_k"):
        axis: int = params["axis"] if "axis" in params else params.get("reduction_dimension", -1)
        return [_take(operands[0], own[1], axis % operands[0].ndim), own[1]]
    if name == "rem":
        quotients = lax.round((values[0].own - own[0]) / values[1].own, lax.RoundingMethod.TO_NEAREST_EVEN)
        return [operands[0] - lax.convert_element_type(quotients, operands[0].dtype) * operands[1]]
    params = {k: _promoted_param(v) for k, v in params.items()}
    if name in _CONTRACTIONS:
        # A requested algorithm or precision names the dtypes of the hardware's multipliers.
        params = params | {"precision": None} if "precision" in params else params
        wide = np.result_type(*(x.dtype for x in operands if is_float(x.dtype)), np.float64)
        count = 2  # the operands after these are group sizes
        operands = [lax.convert_element_type(x, wide) for x in operands[:count]] + operands[count:]
    for key, position, body in jaxprs.bodies(equation):
        types: list[Shaped] = [v.aval for v in jaxprs.open_jaxpr(body)[0].invars]
        if position is not None or not all(is_float(t.dtype) for t in types):
            raise NotImplementedError
        params[key] = _promoted_body(body, run)
    if name not in _KNOWN:
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        jax.jit(lambda *x: _bind(equation, x, params)).lower(*types)  # raises where it cannot be compiled
    return _bind(equation, operands, params)


def _promoted_param(value: object) -> object:
    """Promotes parameters that name a dtype, such as that of the result or of the accumulator."""
    if isinstance(value, (np.dtype, type)):
        try:
            return promoted_dtype(np.dtype(value)) if is_float(value) else value
        except TypeError:
            return value
    return value


def _promoted_body(body: JaxprLike, run: Body) -> JaxprLike:
    """Returns a combiner of scalars in float64."""
    types: list[Shaped] = [v.aval for v in jaxprs.open_jaxpr(body)[0].invars]

    def combine(*scalars: jax.Array) -> list[jax.Array]:
        values = [Value(lax.convert_element_type(x, t.dtype), x) for x, t in zip(scalars, types, strict=True)]
        return [v.high for v in run(body, values)]

    new = compat.make_jaxpr(combine, *(jax.ShapeDtypeStruct(t.shape, promoted_dtype(t.dtype)) for t in types))
    return new if hasattr(body, "consts") else jaxprs.open_jaxpr(new)[0]


def _keeps_width(dtype: DTypeLike, exponent_bits: int, mantissa_bits: int) -> bool:
    """Returns whether a reduce_precision changes nothing, like those that checkpointing puts around what it saves.

    A narrower one is a rounding that the program requests, and therefore a decision.
    """
    kind = jnp.finfo(dtype)
    return exponent_bits >= kind.nexp and mantissa_bits >= kind.nmant


def _sort(equation: JaxprEqn, values: Sequence[Value]) -> list[Value]:
    """Sorts the float64 values in the order of the program's own, which is found by sorting the positions along."""
    params = equation.params
    axis = params["dimension"]
    first = values[0].own
    positions = lax.broadcasted_iota(np.int32, first.shape, axis)
    *own, order = _bind(equation, [*(v.own for v in values), positions], params)
    return [Value(x, _take(v.high, order, axis) if is_float(x.dtype) else x) for x, v in zip(own, values, strict=True)]


def _take(x: jax.Array, order: jax.Array, axis: int) -> jax.Array:
    return jnp.take_along_axis(x, order, axis, mode="clip")
