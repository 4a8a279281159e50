"""Derivatives of elementwise programs, as programs that a kernel evaluates on each tile."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from autopallas.sites.elementwise import Constant, ElementwiseProgram, Input, Instruction, Side, bind, traced

__all__ = ["pulled_back", "without_rules"]


@functools.cache
def pulled_back(program: ElementwiseProgram, reads: tuple[Input, ...], cotangent: Side) -> ElementwiseProgram:
    """Returns the program of the cotangent of what a program reads, by the rules of the functions that it calls.

    Args:
      program: the program.
      reads: its inputs that are one and the same number, each in a dtype of its own.
      cotangent: the side input that holds the cotangent of the program's result, in the result's dtype.

    Returns:
      A program whose result has the widest dtype of ``reads``.
    """
    inputs, wide = _read(program), max((read.dtype for read in reads), key=lambda dtype: dtype.itemsize)

    def element(*given: jax.Array) -> jax.Array:
        *values, of_result = given

        def chosen(*some: jax.Array) -> jax.Array:
            return _evaluated(program, dict(zip(inputs, values, strict=True)) | dict(zip(reads, some, strict=True)))

        found = jax.vjp(chosen, *(values[inputs.index(read)] for read in reads))[1](of_result)
        total: jax.Array = functools.reduce(jnp.add, (one.astype(wide) for one in found))
        return total

    with jax.enable_x64(False):
        return traced(element, *inputs, cotangent, rules=False)


@functools.cache
def without_rules(program: ElementwiseProgram) -> ElementwiseProgram:
    """Returns a program of the same values that is not to be differentiated: of functions with derivatives of their own
    it has the values alone, which any kernel can evaluate."""
    inputs = _read(program)
    with jax.enable_x64(False):
        return traced(lambda *given: _evaluated(program, dict(zip(inputs, given, strict=True))), *inputs, rules=False)


def _read(program: ElementwiseProgram) -> list[Input]:
    return list(dict.fromkeys(i for i in program.inputs if not isinstance(i, Constant)))


def _evaluated(program: ElementwiseProgram, values: Mapping[Input, jax.Array]) -> jax.Array:
    def load(i: Input) -> jax.Array:
        return jnp.asarray(i.value, i.dtype) if isinstance(i, Constant) else values[i]

    return program.run(load, _bind)


def _bind(instruction: Instruction, arguments: list[jax.Array]) -> jax.Array:
    """Applies an instruction, but for what kernels lack: copies, erf, and erfc, which is ``1 - erf``."""
    name = instruction.primitive.name
    if name in ("copy", "copy_p"):
        return arguments[0]
    if name not in ("erf", "erfc"):
        return bind(instruction, arguments)
    (x,) = arguments
    found = _erf(jax.lax.convert_element_type(x, jnp.float32))
    return jax.lax.convert_element_type(1 - found if name == "erfc" else found, x.dtype)


_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
_ERF_SLOPE = 0.3275911


@jax.custom_jvp
def _erf(x: jax.Array) -> jax.Array:
    """Returns erf within 5e-7 (Abramowitz and Stegun, 7.1.26), in operations that every kernel has."""
    t = 1 / (1 + _ERF_SLOPE * jnp.abs(x))
    *others, last = _ERF
    polynomial = last * t
    for coefficient in reversed(others):
        polynomial = (polynomial + coefficient) * t
    found = 1 - polynomial * jnp.exp(-x * x)
    return jax.lax.select(x < 0, -found, found)


@_erf.defjvp
def _erf_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    return _erf(x), tangent * (2 / math.sqrt(math.pi) * jnp.exp(-x * x))
