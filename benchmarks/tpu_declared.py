"""The TPU kernels of declared operations where they are used: between an addition and a product, which XLA may fuse.

A kernel keeps apart what XLA computes in one pass with the operations before and after it, so that by itself it may
look faster than it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from autopallas.kernels.declared_function import public_function
from autopallas.sites.declared import declared_named, declared_names
from autopallas.sites.declared_call import operand_names
from benchmarks.tpu_candidates import Candidate

__all__ = ["IMPLEMENTATIONS", "WITH_THE_SUM", "candidates", "operations"]

IMPLEMENTATIONS = {"ours": "pallas_tpu", "xla": "reference"}
"""What computes the operation, by the candidate's name."""
WITH_THE_SUM = "ours with sum"
"""The candidate whose kernel has the addition in it too, where the operation gives the sum as a further result."""
ROWS = 1024


def operations() -> tuple[str, ...]:
    """The declared operations that have a TPU kernel."""
    return declared_names("pallas_tpu")


def candidates(name: str) -> Iterator[Candidate]:
    """One operation by its kernel and by XLA, forward and with all gradients, at its sample's size but for the rows."""
    operation = declared_named(name)
    rows = operation.rows.split()[-1]
    spec = dataclasses.replace(operation.sample, **{operation.sizes[rows]: ROWS})
    dtypes = {own: getattr(spec, f"{own}_dtype") for own in operand_names(operation)}
    given = {own: jax.ShapeDtypeStruct(operation.shape(spec, own), d) for own, d in dtypes.items() if d is not None}
    (first, x), *others = given.items()
    columns = operation.extents(spec, operation.result)[-1]
    weight = jax.ShapeDtypeStruct((columns, columns), x.dtype)
    shape = " ".join(
        f"{one}{getattr(spec, own)}" for one, own in operation.sizes.items() if one in operation.letters(spec)
    )
    arguments = (x, x, weight, *(kind for _, kind in others))

    def program(implementation: str, adds: bool = False) -> Callable[..., Any]:
        function = public_function(operation)

        def between(a: Any, b: Any, weight: Any, *more: Any) -> Any:
            rest = dict(zip((own for own, _ in others), more, strict=True))
            rest |= {"implementation": implementation, "result_dtype": spec.result_dtype}
            if adds:
                result, total = function(**{first: a}, residual=b, sum_dtype=x.dtype, **rest)
            else:
                total = a + b
                result = function(**{first: total}, **rest)
            return total, jnp.matmul(result, weight)

        return between

    def train(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(cotangents: Any, *operands: Any) -> Any:
            results, pull = jax.vjp(function, *operands)
            return results, pull(cotangents)

        return run

    results = jax.eval_shape(program("reference"), *arguments)
    for direction in ("forward", "forward+backward"):
        both = direction != "forward"
        types = (results, *arguments) if both else arguments
        made = {who: program(by) for who, by in IMPLEMENTATIONS.items()}
        if operation.further:
            made[WITH_THE_SUM] = program(IMPLEMENTATIONS["ours"], adds=True)
        made = {who: train(function) if both else function for who, function in made.items()}
        counted = jax.jit(made["xla"]).lower(*types).cost_analysis() or {}
        work = {"*": int(counted.get("flops", 0) // 2)}
        for who, function in made.items():
            yield Candidate(name, shape, direction, who, (), function, types, work)
