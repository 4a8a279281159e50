"""Cross-entropy as a function, usable without the rest of autopallas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import Dtype, PyTree
from autopallas.kernels.arguments import check_block_sizes, check_floating, kind, require
from autopallas.kernels.cross_entropy.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.operands import Operands, Residuals, Results
from autopallas.kernels.cross_entropy.operation import OPERATION
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, SideSpec, Statistic
from autopallas.sites.device import Device
from autopallas.sites.elementwise import ElementwiseProgram, Input, Score, Side, traced
from autopallas.tuning.direct import block_sizes_for

__all__ = ["cross_entropy"]

Array: TypeAlias = jax.Array


def cross_entropy(
    x: Array,
    w: Array,
    labels: Array,
    *,
    bias: Array | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    vocabulary_major: bool = False,
    implementation: str | Sequence[str] | None = None,
    block_sizes: BlockSizes | None = None,
) -> tuple[Array, Array]:
    """Softmax cross-entropy of the logits ``cap(scale * x w) + bias``, without the [N, V] array of logits.

    Logits are computed tile by tile and never stored, as by Cut Your Losses (Wijmans et al. 2024,
    https://arxiv.org/abs/2411.09009).  They are float32 (float64 for float64 operands), and so are all sums.
    Differentiable in reverse mode once, with respect to x, w and bias; forward mode and second derivatives are not
    available here (``autopallas.optimize`` has them).

    Letters: N rows (tokens), D hidden size, V vocabulary.

    Arguments:
      x: [N, D], floating point.
      w: [D, V], or [V, D] if ``vocabulary_major``; floating point.
      labels: [N], integers.  A label that is not in 0 .. V - 1 picks a logit of 0, so that the row's loss is its
        logsumexp: give such rows weight 0 outside if they are to be ignored.
      bias: [V], floating point, added to the scaled and capped logits; -inf takes a position out of the vocabulary.
      scale: factor of x w.
      logits_soft_cap: c in ``c * tanh(scale * x w / c)``.
      vocabulary_major: whether the vocabulary is the first axis of ``w``, as in an embedding table.
      implementation: None for the best one here, a name ("xla", "reference", ...), or a sequence of names to try in
        order, with a warning for each that cannot be used.
      block_sizes: tile sizes; from the cache or the tuned table by default.

    Returns:
      ``(loss, logsumexp)``, [N] each, float32 (float64): the loss of row n is ``logsumexp[n] - logits[n, labels[n]]``.
      Weights, means and terms in the logsumexp (z-loss) are for the caller.

    Raises:
      TypeError, ValueError: an argument has the wrong dtype, rank or size.
      UnsupportedError: the named implementation cannot compute this, or none of several can.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from autopallas.kernels.cross_entropy import cross_entropy
      >>> x, w = jnp.ones((6, 16)), jnp.zeros((16, 100))
      >>> loss, logsumexp = cross_entropy(x, w, jnp.arange(6))
      >>> print(loss.shape, f"{loss[0]:.4f}")  # log(100)
      (6,) 4.6052
    """
    rows, hidden, vocabulary = _sizes(x, w, vocabulary_major)
    if not hasattr(labels, "dtype") or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels must be an integer array, not {kind(labels)}; convert it")
    require(labels.shape == (rows,), f"labels has shape {labels.shape}; there must be one for each row, ({rows},)")
    if bias is not None:
        check_floating("bias", bias)
        require(bias.shape == (vocabulary,), f"bias has shape {bias.shape}; it must be ({vocabulary},)")
    require(scale is None or math.isfinite(scale), f"scale is {scale}; it must be a finite number")
    require(logits_soft_cap is None or logits_soft_cap > 0, f"logits_soft_cap is {logits_soft_cap}; it must be > 0")
    check_block_sizes(block_sizes, BlockSizes)
    logit_dtype = np.dtype(np.float64 if np.float64 in (x.dtype, w.dtype) else np.float32)
    program = _logit_program(logit_dtype, scale, logits_soft_cap, None if bias is None else np.dtype(bias.dtype))
    biases = () if bias is None else (bias,)
    sides = _side(labels, by_row=True), *(_side(b, by_row=False) for b in biases)
    statistics = Statistic("max", program), Statistic("exp_sum", program), Statistic("pick", program, 0)
    dtypes = np.dtype(x.dtype), np.dtype(w.dtype), logit_dtype
    spec = CrossEntropySpec(rows, hidden, vocabulary, *dtypes, vocabulary_major, statistics, sides)
    operands = Operands(x, w, (labels[:, None], *(b[None, :] for b in biases)))
    device = Device.current()

    def call(name: str) -> tuple[Array, Array]:
        sizes = block_sizes_for(OPERATION.name, spec, device, name, block_sizes)
        result: tuple[Array, Array] = _cross_entropy(name, spec, sizes, operands)
        return result

    return OPERATION.first_that_works(spec, device, implementation, call)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _cross_entropy(
    name: str,
    spec: CrossEntropySpec,
    block_sizes: tuple[BlockSizes, BlockSizes],
    operands: Operands,
) -> tuple[Array, Array]:
    return _results(_statistics(name, spec, block_sizes[0], operands))


def _statistics(name: str, spec: CrossEntropySpec, sizes: BlockSizes, operands: Operands) -> Residuals:
    module = OPERATION.implementation(name)
    assert module is not None
    found: Results = module.forward(spec, sizes, operands)
    return found.residuals


def _results(residuals: Residuals) -> tuple[Array, Array]:
    maximum, total, picked = residuals.statistics
    logsumexp = jnp.where(jnp.isfinite(maximum), maximum, 0) + jnp.log(total)
    return logsumexp - picked, logsumexp


def _forward(
    name: str, spec: CrossEntropySpec, block_sizes: tuple[BlockSizes, BlockSizes], operands: Operands
) -> tuple[tuple[Array, Array], tuple[Operands, Residuals]]:
    residuals = _statistics(name, spec, block_sizes[1], operands)
    return _results(residuals), (operands, residuals)


def _backward(
    name: str,
    spec: CrossEntropySpec,
    block_sizes: tuple[BlockSizes, BlockSizes],
    saved: tuple[Operands, Residuals],
    cotangents: tuple[Array, Array],
) -> tuple[PyTree]:
    module = OPERATION.implementation(name)
    assert module is not None
    operands, residuals = saved
    dloss, dlogsumexp = cotangents
    # The logsumexp does not depend on the shift, so its maximum needs no gradient.
    given = (None, (dloss + dlogsumexp) / residuals.statistics[1], -dloss)
    wanted = (True, True, *(side.differentiable for side in spec.sides))
    return (Operands(*module.backward(spec, block_sizes[1], operands, residuals, given, wanted)),)


_cross_entropy.defvjp(_forward, _backward)


@lru_cache(maxsize=256)
def _logit_program(
    dtype: np.dtype, scale: float | None, logits_soft_cap: float | None, bias: Dtype | None
) -> ElementwiseProgram:
    inputs: list[Input] = [Score(dtype)]
    if bias is not None:
        inputs.append(Side(1, bias))

    def logit(z: Array, *added: Array) -> Array:
        if scale is not None:
            z = z * dtype.type(scale)
        if logits_soft_cap is not None:
            z = jnp.tanh(z / dtype.type(logits_soft_cap)) * dtype.type(logits_soft_cap)
        for b in added:
            z = z + b.astype(dtype)
        return z

    return traced(logit, *inputs)


def _sizes(x: Array, w: Array, vocabulary_major: bool) -> tuple[int, int, int]:
    """The operands agree in (rows, hidden size, vocabulary); else this raises."""
    rows, hidden = _matrix("x", x, "[rows, hidden size]")
    first, second = _matrix("w", w, "[vocabulary, hidden size]" if vocabulary_major else "[hidden size, vocabulary]")
    vocabulary, weight_hidden = (first, second) if vocabulary_major else (second, first)
    require(
        weight_hidden == hidden,
        f"w has hidden size {weight_hidden} (shape {w.shape}, vocabulary_major={vocabulary_major}) and x {hidden}; "
        "they are multiplied and must agree",
    )
    require(min(rows, hidden, vocabulary) > 0, "x and w must not be empty")
    return rows, hidden, vocabulary


def _side(array: Array, by_row: bool) -> SideSpec:
    return SideSpec(np.dtype(array.dtype), (by_row, not by_row))


def _matrix(name: str, x: Array, axes: str) -> tuple[int, int]:
    check_floating(name, x)
    if x.ndim != 2:
        raise ValueError(f"{name} has shape {x.shape}; it must be {axes}: merge or add axes")
    first, second = x.shape
    return first, second
