"""The oracle: a float64 evaluation of a jaxpr, which takes every decision as the program itself does.

All floats become float64, also those behind explicit casts to float32 or bfloat16, and complex numbers complex128.
Integers, booleans and random bits are the program's own.  Beside each float64 value its twin in the program's own
precision is computed; comparisons, indices, conversions to integers, roundings to a grid, trip counts and branches use
the twins.  So the oracle is a very accurate evaluation of the path that the program took, not of another one.

Values that enter (arguments, captured arrays, literals) are those of the program: a constant that it holds as bfloat16
is that bfloat16 number.  ``reduce_precision`` to a dtype's own width is the identity; a narrower one is a rounding that
the program requests, and is kept.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from autopallas import compat, jaxprs
from autopallas.compat import ClosedJaxpr, JaxprAtom, JaxprEqn, JaxprLike, Literal, Shaped
from autopallas.numerics.promote import FROZEN, Value, decided, equation_twice, is_float, quiet
from autopallas.numerics.rounding import EXACT_PRIMITIVES

__all__ = ["Oracle", "without_callbacks"]

_CALLS = jaxprs.CHECKPOINTS | frozenset(
    {
        "closed_call",
        "core_call",
        "custom_jvp_call",
        "custom_partitioning",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "jit",
        "pjit",
    }
)
"""Equations whose one body computes their results from their operands."""
_SILENT = frozenset({"debug_callback", "debug_print"})
"""Equations that exist only for their effect, which a check must not repeat."""


def without_callbacks(program: JaxprLike) -> JaxprLike:
    """Returns a jaxpr without the equations that exist only for their effect; the same jaxpr if there are none."""
    jaxpr, consts = jaxprs.open_jaxpr(program)
    if not jaxpr.effects:
        return program
    heard = [e for e in jaxpr.eqns if not _is_silent(e)]
    equations = [jaxprs.with_bodies(e, without_callbacks) for e in heard]
    return jaxprs.rebuild(program, jaxpr.constvars, consts, jaxpr.invars, jaxpr.outvars, equations)


def _is_silent(equation: JaxprEqn) -> bool:
    return equation.primitive.name in _SILENT and not equation.outvars


_Packed: TypeAlias = Sequence[tuple[jax.Array, ...]]

_GOLDEN = 0x9E3779B9
"""2**32 over the golden ratio: multiples of it lie far apart."""


def _scrambled(number: jax.Array) -> jax.Array:
    """Returns 32-bit integers that look random, by the last steps of MurmurHash3 (Appleby, 2011).

    A key of ``jax.random`` for each equation takes three times as long to compile.
    """
    number = (number ^ (number >> 16)) * np.uint32(0x85EBCA6B)
    number = (number ^ (number >> 13)) * np.uint32(0xC2B2AE35)
    return number ^ (number >> 16)


class Oracle:
    """Evaluates a closed jaxpr in float64.  Compiles it once, at the first call.

    Args:
      program: the closed jaxpr.
      rounds: whether to add a random rounding to the program's own dtypes to each result of its arithmetic.  So the
        results are a sample of what other orders of the same steps may give: where the program's own difference is
        exactly zero, as in the gradient of a saturated softmax, theirs is a rounding ("Monte Carlo arithmetic", Parker,
        1997).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> program = jax.make_jaxpr(lambda x: jnp.sum(x.astype(jnp.bfloat16) / 3))(jnp.ones(3))
      >>> [x.item() for x in Oracle(program)(jnp.ones(3))]
      [1.0]
    """

    def __init__(self, program: ClosedJaxpr, rounds: bool = False):
        self._program, self._rounds = program, rounds
        self._key: jax.Array | None = None
        self._drawn = 0
        self._compiled: Callable[..., list[jax.Array]] | None = None
        self._notes: set[str] = set()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes, after a call, on each equation that could not be evaluated in float64."""
        return tuple(sorted(self._notes))

    def __call__(self, *arguments: ArrayLike, seed: int = 0) -> list[jax.Array | np.ndarray]:
        """Returns the results as numpy arrays (random keys as they are); floats are float64 or complex128.

        Args:
          *arguments: the program's arguments, in its own dtypes.
          seed: that of the roundings.
        """
        with quiet(), jax.enable_x64(True):
            with _device():
                if self._compiled is None:
                    # Values that no decision reads are not computed twice.
                    twice = jaxprs.without_dead_code(compat.make_jaxpr(self._seeded, np.uint32(seed), *arguments))
                    self._compiled = jax.jit(compat.jaxpr_as_fun(twice))
                results = self._compiled(np.uint32(seed), *arguments)
            return [x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else np.asarray(x) for x in results]

    def _seeded(self, seed: jax.Array, *arguments: ArrayLike) -> list[jax.Array]:
        self._key = _scrambled(seed) if self._rounds else None
        return self._evaluate(*arguments)

    def _evaluate(self, *arguments: ArrayLike) -> list[jax.Array]:
        return [v.high for v in self._run(self._program, [decided(jnp.asarray(x)) for x in arguments])]

    # ------------------------------------------------------------------ bodies

    def _run(self, body: JaxprLike, values: Sequence[Value]) -> list[Value]:
        jaxpr, consts = jaxprs.open_jaxpr(body)
        known = dict(zip(jaxpr.invars, values, strict=True))
        known.update(zip(jaxpr.constvars, (decided(jnp.asarray(c)) for c in consts), strict=True))

        def read(atom: JaxprAtom) -> Value:
            if not isinstance(atom, Literal):
                return known[atom]
            return decided(jnp.asarray(atom.val, atom.aval.dtype))

        for equation in jaxpr.eqns:
            with equation.ctx.manager:
                results = self._equation(equation, [read(atom) for atom in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: JaxprEqn, values: list[Value]) -> list[Value]:
        name = equation.primitive.name
        if _is_silent(equation):
            return []
        if name in _CALLS:
            ((_, _, body),) = jaxprs.bodies(equation)
            return self._run(body, values)
        rule = _STRUCTURES.get(name)
        if rule is not None:
            return rule(self, equation, values)
        key, self._key = self._key, None  # the combiners of an equation, as of a scatter, draw nothing
        results = equation_twice(equation, values, self._run, self._notes)
        self._key = key
        if key is None or name in EXACT_PRIMITIVES or name in FROZEN:
            return results
        return [self._rounded(value, key) for value in results]

    def _rounded(self, value: Value, key: jax.Array) -> Value:
        """Adds a rounding to the dtype of a value's own form."""
        if not is_float(value.own.dtype):
            return value
        self._drawn += 1
        unit, shape = float(jnp.finfo(value.own.dtype).eps), value.high.shape
        number = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) + np.uint32(self._drawn * _GOLDEN % 2**32)
        drawn = _scrambled(_scrambled(number) ^ key).astype(jnp.float64) * 2.0**-31 - 1
        return Value(value.own, value.high * (1 + unit * drawn))

    # ------------------------------------------------------------------ structures

    def _scan(self, equation: JaxprEqn, values: list[Value]) -> list[Value]:
        params = equation.params
        constants, carried = compat.scan_parts(equation)
        fixed, start, rows = values[:constants], values[constants : constants + carried], values[constants + carried :]

        def step(carry: _Packed, row: _Packed) -> tuple[_Packed, _Packed]:
            results = self._run(params["jaxpr"], [*fixed, *_unpacked(carry), *_unpacked(row)])
            return _packed(results[:carried]), _packed(results[carried:])

        carry, stacked = lax.scan(
            step, _packed(start), _packed(rows), params["length"], params["reverse"], params["unroll"]
        )
        return [*_unpacked(carry), *_unpacked(stacked)]

    def _while(self, equation: JaxprEqn, values: list[Value]) -> list[Value]:
        """Runs a loop until no example goes on; under ``vmap`` those that have ended keep what they had."""
        params = equation.params
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

        def go_on(carry: _Packed) -> jax.Array:
            return self._run(params["cond_jaxpr"], [*values[:first], *_unpacked(carry)])[0].own

        def step(carry: _Packed) -> _Packed:
            after = _packed(self._run(params["body_jaxpr"], [*values[first:second], *_unpacked(carry)]))
            test = go_on(carry)
            return jax.tree.map(functools.partial(_where_leading, test), after, carry) if test.shape else after

        return _unpacked(lax.while_loop(lambda carry: jnp.any(go_on(carry)), step, _packed(values[second:])))

    def _cond(self, equation: JaxprEqn, values: list[Value]) -> list[Value]:
        def branch(body: JaxprLike, operands: _Packed) -> _Packed:
            return _packed(self._run(body, _unpacked(operands)))

        branches = [functools.partial(branch, body) for body in equation.params["branches"]]
        return _unpacked(lax.switch(values[0].own, branches, _packed(values[1:])))

    def _shard_map(self, equation: JaxprEqn, values: list[Value]) -> list[Value]:
        params = equation.params

        def twice(specs: Sequence[PartitionSpec], types: Sequence[Shaped]) -> list[tuple[PartitionSpec, ...]]:
            return [(s, s) if is_float(t.dtype) else (s,) for s, t in zip(specs, types, strict=True)]

        mapped: Callable[[_Packed], _Packed] = jax.shard_map(
            lambda packed: _packed(self._run(params["jaxpr"], _unpacked(packed))),
            mesh=params["mesh"],
            in_specs=(twice(params["in_specs"], [v.own for v in values]),),
            out_specs=twice(params["out_specs"], [v.aval for v in equation.outvars]),
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )
        return _unpacked(mapped(_packed(values)))

    def _linear_solve(self, equation: JaxprEqn, values: list[Value]) -> list[Value]:
        """Runs only the body that gives the solution; the other bodies are for derivatives, which were taken before."""
        lengths, bodies = equation.params["const_lengths"], equation.params["jaxprs"]
        start = lengths.matvec + lengths.vecmat
        return self._run(bodies.solve, [*values[start : start + lengths.solve], *values[sum(lengths) :]])


_STRUCTURES: dict[str, Callable[[Oracle, JaxprEqn, list[Value]], list[Value]]] = {
    "scan": Oracle._scan,
    "while": Oracle._while,
    "cond": Oracle._cond,
    "shard_map": Oracle._shard_map,
    "custom_linear_solve": Oracle._linear_solve,
}


def _where_leading(test: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Selects by a test that has the first axes of the arrays."""
    return jnp.where(lax.expand_dims(test, range(test.ndim, x.ndim)), x, y)


def _packed(values: Sequence[Value]) -> _Packed:
    """Returns values as a pytree of arrays: (own, high) for a float, (own,) for anything else."""
    return [tuple(map(_strong, v)) if is_float(v.own.dtype) else (_strong(v.own),) for v in values]


def _unpacked(packed: _Packed) -> list[Value]:
    return [Value(item[0], item[-1]) for item in packed]


def _strong(x: jax.Array) -> jax.Array:
    """Removes the weak type, which a loop would not carry along."""
    return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else lax.convert_element_type(x, x.dtype)


def _device() -> AbstractContextManager[object]:
    """Returns a context that evaluates on the host if the default backend is a TPU, which has no float64."""
    host = None if jax.default_backend() != "tpu" else jax.local_devices(backend="cpu")[0]
    context: AbstractContextManager[object] = jax.default_device(host)
    return context
