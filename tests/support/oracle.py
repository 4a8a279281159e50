"""A float64 interpretation of jaxprs in numpy: what a program would give without rounding.

Floats are promoted, explicit casts to a narrower float too; integers, booleans and random bits stay as they are.  What
has no rule here runs in JAX, equation by equation, with 64-bit types.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from autopallas import jaxprs

__all__ = ["errors", "evaluate", "promoted"]


def errors(found: np.ndarray, wanted: np.ndarray) -> tuple[float, float]:
    """Maximum and mean absolute error over the largest value wanted, or over 0.01 where all are smaller.

    NaNs and infinities have to coincide.
    """
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(found[~finite & ~np.isnan(wanted)], wanted[~finite & ~np.isnan(wanted)])
    if not finite.any():
        return 0.0, 0.0
    difference = np.abs(found[finite] - wanted[finite])
    largest = max(np.abs(wanted[finite]).max(), 1e-2)
    return float(difference.max() / largest), float(difference.mean() / largest)


def promoted(x: Any) -> Any:
    """An array with its floats in float64, and its complex numbers in complex128."""
    if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    x = np.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x.astype(np.complex128)
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def evaluate(program: Any, *arguments: Any, rules: dict[str, Callable[..., Any]] | None = None) -> list[Any]:
    """The results of a closed jaxpr, in float64.  ``rules``: more of them, by the primitive's name."""
    jaxpr, consts = jaxprs.open_jaxpr(program)
    _RULES.update(rules or {})
    with np.errstate(all="ignore"):
        return _run(jaxpr, [promoted(c) for c in consts], [promoted(a) for a in arguments])


def _run(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

    def read(atom: Any) -> Any:
        return promoted(np.asarray(atom.val, atom.aval.dtype)) if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        rule = _RULES.get(equation.primitive.name, _in_jax)
        results = rule(equation, *map(read, equation.invars))
        results = results if equation.primitive.multiple_results else [results]
        for variable, result in zip(equation.outvars, results, strict=True):
            if isinstance(result, (np.ndarray, np.generic)) and result.dtype.kind in "iub":
                result = np.asarray(result, variable.aval.dtype)
            values[variable] = result
    return [read(atom) for atom in jaxpr.outvars]


def _call(body: Any, arguments: Sequence[Any]) -> list[Any]:
    jaxpr, consts = jaxprs.open_jaxpr(body)
    return _run(jaxpr, [promoted(c) for c in consts], arguments)


def _in_jax(equation: Any, *arguments: Any) -> Any:
    params = dict(equation.params)
    with jax.enable_x64(True):
        given = [a if isinstance(a, jax.Array) else jnp.asarray(a) for a in arguments]
        if equation.primitive.name in ("bitcast_convert_type", "random_bits", "nextafter"):
            pairs = zip(given, equation.invars, strict=True)
            given = [a.astype(v.aval.dtype) if a.dtype == np.float64 else a for a, v in pairs]
        results = equation.primitive.bind(*given, **params)
        if equation.primitive.multiple_results:
            return [promoted(r) for r in results]
        return promoted(results)


def _scatter(equation: Any, *arguments: Any) -> Any:
    """A scatter that combines numbers, of some that are promoted."""
    params = equation.params
    scatter = getattr(jax.lax, equation.primitive.name.replace("-", "_"))
    with jax.enable_x64(True):
        return promoted(
            scatter(
                *map(jnp.asarray, arguments), params["dimension_numbers"], mode=params["mode"],
                indices_are_sorted=params["indices_are_sorted"], unique_indices=params["unique_indices"],
            )
        )  # fmt: skip


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda equation, *arguments: np.asarray(function(*arguments))


def _convert(equation: Any, x: Any) -> Any:
    wanted = equation.params["new_dtype"]
    if jnp.issubdtype(wanted, jnp.complexfloating):
        return x.astype(np.complex128)
    return np.real(x).astype(np.float64) if _is_float(wanted) else x.astype(wanted)


def _division(a: Any, b: Any) -> Any:
    return a / b if a.dtype.kind in "fc" else np.trunc(a / b).astype(a.dtype)


def _broadcast(equation: Any, x: Any, *_: Any) -> Any:
    shape, dimensions = equation.params["shape"], equation.params["broadcast_dimensions"]
    full = [1] * len(shape)
    for size, dimension in zip(x.shape, dimensions, strict=True):
        full[dimension] = size
    return np.broadcast_to(x.reshape(full), shape)


def _iota(equation: Any) -> Any:
    dtype, shape, dimension = (equation.params[n] for n in ("dtype", "shape", "dimension"))
    view = [-1 if d == dimension else 1 for d in range(len(shape))]
    line = np.arange(shape[dimension]).astype(np.float64 if _is_float(dtype) else dtype)
    return np.broadcast_to(line.reshape(view), shape)


def _slice(equation: Any, x: Any) -> Any:
    starts, limits = equation.params["start_indices"], equation.params["limit_indices"]
    strides = equation.params["strides"] or (1,) * len(starts)
    return x[tuple(slice(*bounds) for bounds in zip(starts, limits, strides, strict=True))]


def _dynamic_slice(equation: Any, x: Any, *starts: Any) -> Any:
    sizes = equation.params["slice_sizes"]
    bounded = [min(max(int(s), 0), n - size) for s, n, size in zip(starts, x.shape, sizes, strict=True)]
    return x[tuple(slice(s, s + size) for s, size in zip(bounded, sizes, strict=True))]


def _dynamic_update_slice(equation: Any, x: Any, update: Any, *starts: Any) -> Any:
    bounded = [min(max(int(s), 0), n - size) for s, n, size in zip(starts, x.shape, update.shape, strict=True)]
    result = x.copy()
    result[tuple(slice(s, s + size) for s, size in zip(bounded, update.shape, strict=True))] = update
    return result


def _split(equation: Any, x: Any) -> Any:
    return np.split(x, np.cumsum(equation.params["sizes"])[:-1], axis=equation.params["axis"])


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda equation, x: np.asarray(function(x, axis=tuple(equation.params["axes"])))


def _dot(equation: Any, a: Any, b: Any) -> Any:
    (contract_a, contract_b), (batch_a, batch_b) = equation.params["dimension_numbers"]
    letters = iter(range(100))
    left: list[int] = [-1] * a.ndim
    right: list[int] = [-1] * b.ndim
    batch = []
    for i, j in zip(batch_a, batch_b, strict=True):
        left[i] = right[j] = next(letters)
        batch.append(left[i])
    for i, j in zip(contract_a, contract_b, strict=True):
        left[i] = right[j] = next(letters)
    free = []
    for labels in (left, right):
        for i, label in enumerate(labels):
            if label < 0:
                labels[i] = next(letters)
                free.append(labels[i])
    return np.einsum(a, left, b, right, [*batch, *free])


def _scan(equation: Any, *arguments: Any) -> list[Any]:
    params = equation.params
    if "num_carry" in params:
        consts, carries = params["num_consts"], params["num_carry"]
    else:
        consts, carries = (len(list(part)) for part in params["ft_in"].update(equation.invars).unpack()[:2])
    length = params["length"]
    carry = list(arguments[consts : consts + carries])
    stacked: list[list[Any]] = []
    for step in reversed(range(length)) if params["reverse"] else range(length):
        rows = [x[step] for x in arguments[consts + carries :]]
        results = _call(params["jaxpr"], [*arguments[:consts], *carry, *rows])
        carry = results[:carries]
        stacked.append(results[carries:])
    if params["reverse"]:
        stacked.reverse()
    return [*carry, *(np.stack(column) for column in zip(*stacked, strict=True))]


def _while(equation: Any, *arguments: Any) -> list[Any]:
    params = equation.params
    n, m = params["cond_nconsts"], params["body_nconsts"]
    carry = list(arguments[n + m :])
    while bool(_call(params["cond_jaxpr"], [*arguments[:n], *carry])[0]):
        carry = _call(params["body_jaxpr"], [*arguments[n : n + m], *carry])
    return carry


def _cond(equation: Any, index: Any, *arguments: Any) -> list[Any]:
    branches = equation.params["branches"]
    return _call(branches[min(max(int(index), 0), len(branches) - 1)], arguments)


def _body(equation: Any, *arguments: Any) -> list[Any]:
    ((_, _, body),) = jaxprs.bodies(equation)
    return _call(body, arguments)


_RULES: dict[str, Callable[..., Any]] = {
    name: _elementwise(function)
    for name, function in {
        "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "div": _division, "neg": np.negative,
        "max": np.maximum, "min": np.minimum, "exp": np.exp, "exp2": np.exp2, "log": np.log, "log1p": np.log1p,
        "expm1": np.expm1, "tanh": np.tanh, "sin": np.sin, "cos": np.cos, "sqrt": np.sqrt, "abs": np.abs,
        "sign": np.sign, "square": np.square, "rsqrt": lambda x: 1 / np.sqrt(x),
        "logistic": lambda x: 1 / (1 + np.exp(-x)),
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "eq": np.equal,
        "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
        "is_finite": np.isfinite, "stop_gradient": lambda x: x, "copy": lambda x: x, "name": lambda x: x,
        "reduce_precision": lambda x: x, "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
        "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high), "copy_p": lambda x: x,
        "sharding_constraint": lambda x: x, "floor": np.floor,
    }.items()
}  # fmt: skip
_RULES |= {
    "optimization_barrier": lambda equation, *arguments: list(arguments),
    "integer_pow": lambda equation, x: (
        np.power(x, float(equation.params["y"])) if x.dtype.kind == "f" else x ** equation.params["y"]
    ),
    "pow": lambda equation, x, y: np.power(x, y),
    "convert_element_type": _convert,
    "broadcast_in_dim": _broadcast,
    "reshape": lambda equation, x: x.reshape(equation.params["new_sizes"]),
    "squeeze": lambda equation, x: x.reshape(equation.outvars[0].aval.shape),
    "expand_dims": lambda equation, x: x.reshape(equation.outvars[0].aval.shape),
    "transpose": lambda equation, x: x.transpose(equation.params["permutation"]),
    "concatenate": lambda equation, *parts: np.concatenate(parts, axis=equation.params["dimension"]),
    "iota": _iota,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "split": _split,
    "scatter-add": _scatter,
    "scatter-sub": _scatter,
    "scatter-mul": _scatter,
    "scatter-min": _scatter,
    "scatter-max": _scatter,
    "reduce_sum": _reduction(np.sum),
    "reduce_max": _reduction(np.max),
    "reduce_min": _reduction(np.min),
    "reduce_and": _reduction(np.all),
    "reduce_or": _reduction(np.any),
    "dot_general": _dot,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    **dict.fromkeys(
        ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "remat", "remat2", "checkpoint", "custom_jvp_call"),
        _body,
    ),
    "custom_vjp_call": lambda equation, *arguments: _call(equation.params["call_jaxpr"], arguments),
}
