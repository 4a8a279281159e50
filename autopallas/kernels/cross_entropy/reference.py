"""Cross-entropy's statistics and products as they are written down: the oracle of the tests.

It has the N x V arrays that the others avoid.  Ties are found by comparison with the maximum: as an oracle it is to be
run operation by operation, because compiled programs may compute a value anew, and differently, for each use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.compat import PyTree
from autopallas.kernels.accumulation import einsum
from autopallas.kernels.cross_entropy.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.operands import Gradients, Operands, Residuals, Results
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, Product, SideArray, Statistic
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.elementwise import ElementwiseProgram
from autopallas.sites.operation import Supported, Unsupported

__all__ = ["NUMERICS", "backward", "forward", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""

Array: TypeAlias = jax.Array


def supports(spec: CrossEntropySpec, device: Device) -> Supported | Unsupported:
    """Everything, everywhere."""
    return Supported()


def forward(spec: CrossEntropySpec, block_sizes: BlockSizes | None, operands: Operands) -> Results:
    """This has the formulas of :class:`CrossEntropySpec`, line by line."""
    query = jnp.arange(spec.rows, dtype=jnp.int32)[:, None]
    key = jnp.arange(spec.vocabulary, dtype=jnp.int32)[None, :]
    pairs = [(operands.x, operands.w), *(side for side in operands.sides if isinstance(side, tuple))]
    logits = [
        einsum("nd,vd->nv" if head.vocabulary_major else "nd,dv->nv", *pair, spec.accumulation_dtype, spec.precision)
        for head, pair in zip(spec.heads, pairs, strict=True)
    ]
    z, *further = logits
    z = z.astype(spec.logit_dtype)
    arrays = [
        further.pop(0).astype(s.dtype) if isinstance(side, tuple) else side
        for s, side in zip(spec.sides, operands.sides, strict=True)
    ]

    def value(program: ElementwiseProgram, *extra: Array) -> Array:
        return jnp.broadcast_to(program.evaluate(z, query, key, (*arrays, *extra)), z.shape)

    # Once for all its statistics, so that what goes back to 16-bit sides is rounded once.
    values = {p: value(p).astype(spec.accumulation_dtype) for p in dict.fromkeys(s.program for s in spec.statistics)}

    def statistic(of: Statistic) -> Array:
        p = values[of.program]
        greatest = jnp.max(p, axis=1, keepdims=True)
        match of.kind:
            case "max":
                return greatest[:, 0]
            case "exp_sum":
                shift = lax.stop_gradient(jnp.where(jnp.isfinite(greatest), greatest, 0))
                return jnp.sum(jnp.exp(p - shift), axis=1)
            case "sum":
                return jnp.sum(p, axis=1)
            case "argmax":
                return jnp.argmax(p, axis=1).astype(jnp.int32)
            case "ties":
                return lax.stop_gradient(jnp.sum(p == greatest, axis=1, dtype=p.dtype))
            case "pick":
                assert of.label is not None
                return jnp.sum(jnp.where(arrays[of.label] == key, p, 0), axis=1)

    statistics = tuple(statistic(s) for s in spec.statistics)
    known = (*arrays, *(s[:, None] for s in statistics))
    finished = tuple(program.evaluate(None, query, None, known) for program in spec.finish)

    def product(of: Product) -> Array:
        p = value(of.program, *finished)
        if of.kind == "values":
            return p.astype(of.dtype)
        if of.kind == "column_sum":
            return jnp.sum(p.astype(spec.accumulation_dtype), axis=0).astype(of.dtype)
        x, w = pairs[of.head]
        vocabulary_major = spec.heads[of.head].vocabulary_major
        if of.kind == "rows":
            equation, factor = "nv,vd->nd" if vocabulary_major else "nv,dv->nd", w
        else:
            equation, factor = "nv,nd->vd" if vocabulary_major else "nv,nd->dv", x
        return einsum(equation, p, factor, spec.accumulation_dtype, spec.precision).astype(of.dtype)

    return Results(statistics, tuple(product(p) for p in spec.products))


def backward(
    spec: CrossEntropySpec,
    block_sizes: BlockSizes | None,
    operands: Operands,
    residuals: Residuals,
    cotangents: Sequence[Array | None],
    wanted: Sequence[bool],
) -> Gradients:
    """``jax.vjp`` of :func:`forward` gives the gradients."""
    differentiable = (True, True, *(s.differentiable for s in spec.sides))
    active = [n for n, (w, d) in enumerate(zip(wanted, differentiable, strict=True)) if w and d]
    leaves: tuple[PyTree, ...] = (operands.x, operands.w, *operands.sides)

    def floating(*given: SideArray) -> tuple[Array, ...]:
        merged = list(leaves)
        for n, operand in zip(active, given, strict=True):
            merged[n] = operand
        found = forward(spec, block_sizes, Operands(merged[0], merged[1], tuple(merged[2:]))).statistics
        return tuple(f for f, c in zip(found, cotangents, strict=True) if given_cotangent(c))

    def given_cotangent(cotangent: Array | None) -> bool:
        return cotangent is not None and cotangent.dtype != jax.dtypes.float0

    _, vjp = jax.vjp(floating, *(leaves[n] for n in active))
    found = vjp(tuple(c for c in cotangents if given_cotangent(c)))
    return Gradients.at(dict(zip(active, found, strict=True)), len(spec.sides))
