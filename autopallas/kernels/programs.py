"""Programs written as Python functions of scalars: for the public function and for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, Var

from autopallas.program import Constant, Input, Instruction, Program, parameters

__all__ = ["traced"]

_NOTHING = frozenset({"broadcast_in_dim", "reduce_sum", "reshape", "squeeze"})
"""What derivatives have beside elementwise primitives, and what does nothing to a scalar."""


def traced(function: Callable[..., Any], *inputs: Input) -> Program:
    """The program of an elementwise function, one scalar argument per input.

    Example: ``traced(lambda i, j: i >= j, Index("query", int32), Index("key", int32))`` is the causal mask.
    """
    closed = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct((), i.dtype) for i in inputs))
    loaded: list[Input] = list(inputs)
    instructions: list[tuple[Any, tuple[tuple[str, Any], ...], list[tuple[str, int]], Any]] = []
    environment: dict[Var, tuple[str, int]] = {v: ("input", n) for n, v in enumerate(closed.jaxpr.invars)}

    def constant(value: Any, dtype: Any) -> tuple[str, int]:
        loaded.append(Constant(np.asarray(value).item(), np.dtype(dtype)))
        return "input", len(loaded) - 1

    def inline(jaxpr: Any, environment: dict[Var, tuple[str, int]]) -> list[tuple[str, int]]:
        def read(atom: Any) -> tuple[str, int]:
            if not isinstance(atom, Literal):
                return environment[atom]
            aval: Any = atom.aval
            return constant(atom.val, aval.dtype)

        for equation in jaxpr.eqns:
            arguments = [read(a) for a in equation.invars]
            if equation.primitive.name in ("jit", "pjit"):
                body = equation.params["jaxpr"]
                inner = dict(zip(body.jaxpr.invars, arguments, strict=True))
                inner |= {v: constant(c, v.aval.dtype) for v, c in zip(body.jaxpr.constvars, body.consts, strict=True)}
                results = inline(body.jaxpr, inner)
                environment |= dict(zip(equation.outvars, results, strict=True))
                continue
            (result,) = equation.outvars
            if equation.primitive.name in _NOTHING:
                environment[result] = arguments[0]
                continue
            environment[result] = ("instruction", len(instructions))
            params = parameters(equation.params)
            instructions.append((equation.primitive, params, arguments, np.dtype(result.aval.dtype)))
        return [read(a) for a in jaxpr.outvars]

    environment |= {v: constant(c, v.aval.dtype) for v, c in zip(closed.jaxpr.constvars, closed.consts, strict=True)}
    (result,) = inline(closed.jaxpr, environment)

    def number(register: tuple[str, int]) -> int:
        return register[1] if register[0] == "input" else len(loaded) + register[1]

    return Program(
        tuple(loaded),
        tuple(Instruction(p, params, tuple(map(number, arguments)), d) for p, params, arguments, d in instructions),
        number(result),
    )
