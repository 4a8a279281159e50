"""Sines, cosines, tangents, their inverses, powers, cube roots, remainders and the gamma function, on vectors, and
exponentials and logarithms of complex numbers.

XLA's CPU compiler has no vector form of these functions, and calls one for scalars for each element.  The arithmetic is
that of :mod:`autopallas.kernels.respelling.elementary`: in float64, and rounded once, so that results are nearer to the
exact ones than the original's; remainders are exact, as the original's are.

Sines, cosines and tangents of numbers from 2^23 on need more digits of pi than that has, and remainders of quotients
from 2^28 on more than its 53 bits; the gamma function is computed of numbers above zero, and of complex numbers what is
finite.  Where there is another, the original is computed.  Both stand in branches, which also keep the compiler from
computing the function anew in all that reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.compat import arctangents_take_vectors, reductions_take_sines
from autopallas.graph import Graph, Node
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.graph.edit import surviving
from autopallas.kernels.respelling import elementary
from autopallas.kernels.respelling.fusion_barrier import unfused
from autopallas.kernels.respelling.kind import Found, Kind, Sample
from autopallas.kernels.respelling.spec import RespellingSpec

__all__ = ["KIND"]

_LEAST, _MOST = 1024, 2**31
"""Elements of the least and of the largest array that is looked at: branches cost more than fewer would save."""
_PERIODIC = ("sin", "cos", "tan")
_POSITIVE = ("lgamma", "digamma", "polygamma")
_COMPLEX: Mapping[str, tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]] = {
    "exp": (elementary.complex_exp, elementary.complex_exp_is_apart),
    "log": (elementary.complex_log, elementary.complex_log_is_apart),
}
"""Functions of complex numbers, each with where its arithmetic does not hold."""
_BOUNDED = (*_PERIODIC, *_POSITIVE, "rem", *_COMPLEX)
"""Functions whose arithmetic does not hold for all numbers."""
_DIVISORS = (2.0**-100, 2.0**99)
"""Magnitudes of known divisors for which it is enough to look at the dividends."""
_FUNCTIONS: Mapping[str, Callable[..., jax.Array]] = {
    "sin": elementary.sin,
    "cos": elementary.cos,
    "tan": elementary.tan,
    "asin": elementary.asin,
    "acos": elementary.acos,
    "atan": elementary.atan,
    "atan2": elementary.atan2,
    "cbrt": elementary.cbrt,
    "rem": elementary.rem,
    "lgamma": elementary.lgamma,
    "digamma": elementary.digamma,
    **{name: function for name, (function, _) in _COMPLEX.items()},
}
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_LAYOUT = frozenset({"broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "rev", "pad"})
_PARTS = frozenset({"slice", "dynamic_slice", "gather"})
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod"})
_FARTHEST = 64
"""Values that are looked at to learn what reads a result; beyond that it counts as taken."""
_REPEATS = frozenset({"broadcast_in_dim", "tile"})
_SAME_NUMBERS = frozenset({"copy", "expand_dims", "reshape", "squeeze", "transpose"})
_OFTEN = 8
"""How often numbers are repeated from which on computing each once is faster, without vectors as well."""
_COMPILED_ANYWAY = (0.0, 0.5, 1.0, 2.0, 3.0, -1.0)
"""Exponents that XLA itself writes as roots, products and quotients."""


# ---------------------------------------------------------------------- recognition


def _match(graph: Graph, node: Node) -> Found | None:
    (result,) = node.equation.outvars
    dtypes = {operand.aval.dtype for operand in node.equation.invars}
    computed = (jnp.complex64,) if node.name in _COMPLEX else _DTYPES
    if len(dtypes) > 1 or result.aval.dtype not in dtypes or not any(result.aval.dtype == own for own in computed):
        return None
    if not _LEAST <= math.prod(result.aval.shape) <= _MOST:
        return None
    if any(value is not None for value in node.equation.params.values()):  # an accuracy that is asked for
        return None
    if not any(graph.shape(number) == result.aval.shape for number in node.inputs):
        return None  # each operand is repeated along an axis of the other, as under two ``vmap``
    if node.name == "atan" and arctangents_take_vectors():
        return None
    if _is_taken(graph, node) or _is_repeated(graph, node):
        return None
    constants = [graph.literals.get(number) for number in node.inputs]
    if any(np.ndim(constant) for constant in constants if constant is not None):
        return None
    found = [(place, float(np.asarray(x))) for place, x in enumerate(constants) if x is not None]
    if not found:
        return Found((("function", node.name),), node.inputs, node.outputs) if node.name in _FUNCTIONS else None
    given = [number for number, constant in zip(node.inputs, constants, strict=True) if constant is None]
    if len(found) > 1 or graph.shape(given[0]) != result.aval.shape:
        return None
    ((place, value),) = found
    name, is_computed = _CONSTANTS.get((node.name, place), ("", _never))
    if not is_computed(value):
        return None
    parameters = {"function": node.name, name: str(value)}
    return Found(tuple(sorted(parameters.items())), tuple(given), node.outputs)


def _is_base(number: float) -> bool:
    return 0 < number < math.inf and number != 1


def _is_exponent(number: float) -> bool:
    return math.isfinite(number) and number not in _COMPILED_ANYWAY


def _is_divisor(number: float) -> bool:
    """Returns whether remainders by a number are computed here, if it is enough to look at the dividends.

    Where it is a power of two from 1 on, the compiler itself writes vectors.
    """
    mantissa, exponent = math.frexp(abs(number))
    return _DIVISORS[0] <= abs(number) <= _DIVISORS[1] and not (mantissa == 0.5 and exponent > 0)


def _never(number: float) -> bool:
    return False


_CONSTANTS: Mapping[tuple[str, int], tuple[str, Callable[[float], bool]]] = {
    ("pow", 0): ("base", _is_base),
    ("pow", 1): ("exponent", _is_exponent),
    ("rem", 1): ("divisor", _is_divisor),
    ("polygamma", 0): ("order", lambda number: number == 1),
}
"""Of a function and a position the name of an operand that the program knows, and which of its values are computed."""


def _is_repeated(graph: Graph, node: Node) -> bool:
    """Returns whether the one array that a function is computed of holds each number many times.

    The compiler then computes the function, and what is computed before it of this array alone, and repeats the result:
    sines of 4,096 numbers that are repeated 16 or 32 times took 1.2 to 2 times as long as respelt.
    """
    result = math.prod(graph.shape(node.outputs[0]))
    for _ in range(_FARTHEST):
        given = [number for number in node.inputs if number not in graph.literals]
        if len(set(given)) != 1:
            return False
        (number,) = set(given)
        if math.prod(graph.shape(number)) * _OFTEN <= result:
            return True
        following = graph.definitions.get(number)
        if following is None or following.name not in _SAME_NUMBERS | _REPEATS | ELEMENTWISE:
            return False
        node = following
    return False


def _is_taken(graph: Graph, node: Node) -> bool:
    """Returns whether all that reads a result takes parts of it, or a reduction takes it.

    The compiler then computes the parts alone; it computes some functions on vectors where a reduction reads them.
    """
    alive, (result,) = surviving(graph), node.outputs
    todo, seen, parts, whole = [result], {result}, False, False
    while todo:
        number = todo.pop()
        users = [u for u in graph.users.get(number, ()) if not u.outputs or not alive.isdisjoint(u.outputs)]
        names = {user.name for user in users}
        written = number in graph.returned or number in graph.read
        if written or any(not _is_fused(name) for name in names):
            whole = True  # and what else reads it reads what was written
            continue
        for user in users:
            if user.name in _REDUCTIONS:
                whole = True
                if node.name in _PERIODIC and reductions_take_sines():
                    return True
            elif user.name in _PARTS:
                parts = True
            else:
                todo += [n for n in user.outputs if n not in seen]
                seen.update(user.outputs)
        if len(seen) > _FARTHEST:
            return True
    graph.steps.spend(len(seen))
    return parts and not whole


def _is_fused(name: str) -> bool:
    return name in ELEMENTWISE or name in _LAYOUT or name in _PARTS or name in _REDUCTIONS


# ---------------------------------------------------------------------- the two ways


def _constant(spec: RespellingSpec, name: str) -> float | None:
    """Returns the base, the exponent, the divisor or the order, where the program knows it."""
    value = dict(spec.parameters).get(name)
    return None if value is None else float(cast(str, value))


def _original(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    return [_computed(spec, operands)]


def _computed(spec: RespellingSpec, operands: Sequence[jax.Array]) -> jax.Array:
    dtype = spec.results[0][1]
    base, exponent, divisor = (_constant(spec, name) for name in ("base", "exponent", "divisor"))
    if base is not None:
        return lax.pow(np.asarray(base, dtype)[()], operands[0])
    if exponent is not None:
        return lax.pow(operands[0], np.asarray(exponent, dtype)[()])
    if divisor is not None:
        return lax.rem(operands[0], np.asarray(divisor, dtype)[()])
    if spec["function"] == "polygamma":
        return lax.polygamma(np.asarray(_constant(spec, "order"), dtype)[()], operands[0])
    found: jax.Array = getattr(lax, cast(str, spec["function"]))(*operands)
    return found


def _respelt(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    """Computes a function in one branch of two, so that nothing of it can be moved elsewhere."""
    shape, dtype = spec.results[0]
    place = next(i for i, x in enumerate(operands) if x.shape == shape)

    def arithmetic(*given: jax.Array) -> jax.Array:
        return _function(spec)(*map(_read, given)).astype(dtype)

    if spec["function"] not in _BOUNDED or (
        spec["function"] in _PERIODIC and float(jnp.finfo(dtype).max) < elementary.LARGE
    ):
        return [unfused(arithmetic, lambda *given: given[place], *operands)]

    # Under vmap a condition for each example would have both branches computed; one for all of them has not.
    @jax.custom_batching.custom_vmap
    def chosen(*given: jax.Array) -> jax.Array:
        beyond = _any_beyond(spec, *map(_read, given))
        found: jax.Array = lax.cond(beyond, lambda *given: _computed(spec, given), arithmetic, *given)
        return found

    @chosen.def_vmap
    def over_examples(size: int, are_mapped: Sequence[bool], *given: jax.Array) -> tuple[jax.Array, bool]:
        mapped = zip(given, are_mapped, strict=True)
        return chosen(*(x if own else jnp.broadcast_to(x, (size, *x.shape)) for x, own in mapped)), True

    return [chosen(*operands)]


def _read(x: jax.Array) -> jax.Array:
    return x if jnp.iscomplexobj(x) else x.astype(jnp.float32)


def _function(spec: RespellingSpec) -> Callable[..., jax.Array]:
    base, exponent, divisor = (_constant(spec, name) for name in ("base", "exponent", "divisor"))
    if base is not None:
        return lambda y: elementary.power_of_constant(base, y)
    if exponent is not None:
        return lambda x: elementary.constant_power(x, exponent)
    if divisor is not None:
        return lambda x: elementary.rem(x, jnp.asarray(divisor, jnp.float32))
    return elementary.trigamma if spec["function"] == "polygamma" else _FUNCTIONS[cast(str, spec["function"])]


def _any_beyond(spec: RespellingSpec, *given: jax.Array) -> jax.Array:
    """Returns whether the arithmetic does not hold for some of the numbers.

    A sum of float32 numbers is faster than ``any`` and than a count in integers, and XLA has a routine for it, where it
    compiles three kernels for those.
    """
    if spec["function"] in _COMPLEX:
        _, is_apart = _COMPLEX[cast(str, spec["function"])]
        beyond = is_apart(given[0])
    elif spec["function"] == "rem":
        divisor = _constant(spec, "divisor")
        beyond = elementary.rem_is_apart(*given, *(() if divisor is None else (jnp.asarray(divisor, jnp.float32),)))
    elif spec["function"] in _POSITIVE:
        beyond = elementary.gamma_is_apart(given[0])
        if spec["function"] == "polygamma":
            beyond |= given[0] == np.float32(math.inf)  # of which XLA's is NaN
    else:
        size = jnp.abs(given[0])
        beyond = (size >= np.float32(elementary.LARGE)) & (size < np.float32(math.inf))
    return jnp.sum(beyond.astype(jnp.float32)) != 0


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns the function, what of its operands is known, and whether roots compute it."""
    function = cast(str, spec["function"])
    base, exponent = (_constant(spec, name) for name in ("base", "exponent"))
    if exponent is not None:
        return f"{function} {'by roots' if elementary.by_roots(exponent) else 'of one exponent'}"
    if _constant(spec, "divisor") is not None:
        return f"{function} of one divisor"
    if _constant(spec, "order") is not None:
        return f"{function} of order 1"
    if function in _COMPLEX:
        return f"{function} of complex numbers"
    return function if base is None else f"{function} of one base"


def _filled(spec: RespellingSpec, random: np.random.Generator, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns arrays on which the function has results, and which its arithmetic holds for."""
    dtype, function = arrays[0].dtype, spec["function"]
    if function in ("asin", "acos"):
        return [random.uniform(-1, 1, arrays[0].shape).astype(dtype)]
    if function in _POSITIVE:
        return [np.maximum(np.abs(arrays[0]), dtype.type(2.0**-10))]  # of millions of random numbers some are 0
    if function == "pow" and _constant(spec, "base") is None:
        return [np.abs(arrays[0]), *arrays[1:]]
    return list(arrays)


_SIZES = ((1024,), (64, 256), (512, 512), (1024, 4096))
"""Shapes, one for each bucket."""
_FORMS: Mapping[str, Callable[..., jax.Array]] = {
    **{name: getattr(lax, name) for name in _FUNCTIONS},
    "roots": lambda x: x**-1.5,
    "exponent": lambda x: x**2.2,
    "base": lambda y: lax.pow(jnp.asarray(10000, y.dtype), y),
    "trigamma": lambda x: lax.polygamma(jnp.asarray(1, x.dtype), x),
    "divisor": lambda x: lax.rem(x, jnp.asarray(0.7, x.dtype)),
}
_NARROW = ("sin", "cos", "roots", "exponent")
"""Forms that are measured in 16 bits too."""


def _samples() -> Iterator[tuple[str, Sample]]:
    for shape in _SIZES:
        for name, function in _FORMS.items():
            if name == "atan" and arctangents_take_vectors():
                continue
            dtypes = (jnp.complex64,) if name in _COMPLEX else _DTYPES if name in _NARROW else _DTYPES[:1]
            for dtype in dtypes:
                given = (jax.ShapeDtypeStruct(shape, dtype),) * (2 if name in ("atan2", "rem") else 1)
                own = "" if dtype in (jnp.float32, jnp.complex64) else f"-{jnp.dtype(dtype).name}"
                yield f"{name}-{math.prod(shape)}{own}", Sample(function, given)


KIND = Kind(
    name="elementwise",
    primitives=(*_FUNCTIONS, "pow", "polygamma"),
    numerics=lambda spec: "identical" if spec["function"] == "rem" else "tolerance",
    instead="arithmetic on vectors, in float64",
    match=_match,
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    in_loops=True,
    platforms=("cpu",),  # others compute float64 slowly, or not at all
    fill=_filled,
)
