"""Declares the operation of gated MLPs (Shazeer, 2020, arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import compat
from autopallas.sites.block_sizes import block_sizes_class
from autopallas.sites.declared import DeclaredOperation
from autopallas.sites.elementwise import ElementwiseProgram, Input, Instruction, Score, Side, parameters, traced
from autopallas.sites.spec import Dtype, Sizes, Spec

__all__ = ["OPERATION", "GatedMlpSpec", "hidden", "product", "reference"]

_WIDE = np.dtype(np.float32)


@dataclass(frozen=True)
class GatedMlpSpec(Spec):
    """One gated MLP: ``(act(x @ gate) * (x @ up)) @ down``, or without ``@ down`` where it is lacking.

    Operands: x [B|1, M, K]; gate, up [B|1, K, H]; down [B|1, H, N]; gate_bias, up_bias, parameter [B|1, H|1]; floating.
    The program of a hidden unit reads the gate's product as the score, and as side inputs 0 to 3 the other product,
    gate_bias, up_bias and parameter.
    """

    batch: int
    rows: int
    features: int
    hidden: int
    columns: int
    x_dtype: Dtype
    gate_dtype: Dtype
    up_dtype: Dtype
    down_dtype: Dtype | None
    gate_bias_dtype: Dtype | None
    up_bias_dtype: Dtype | None
    parameter_dtype: Dtype | None
    result_dtype: Dtype
    activation: ElementwiseProgram | Callable[[jax.Array], jax.Array] | str = "silu"
    """A function of one number, its name in jax.nn, or a program of the hidden unit"""
    precision: str | None = None
    """The precision of all products, such as "HIGHEST"."""

    def __post_init__(self) -> None:
        if not isinstance(self.activation, ElementwiseProgram):
            biases = self.gate_bias_dtype is not None, self.up_bias_dtype is not None
            object.__setattr__(self, "activation", _program(self.activation, self.accumulation_dtype, *biases))

    @property
    def program(self) -> ElementwiseProgram:
        """The program of the hidden unit."""
        assert isinstance(self.activation, ElementwiseProgram)
        return self.activation

    def programs(self) -> str:
        return str(self.activation)

    def __str__(self) -> str:
        batch = f"B={self.batch} " if self.batch != 1 else ""
        columns = "no down projection" if self.down_dtype is None else f"N={self.columns}"
        steps = ", ".join(sorted(self.program.primitives - {"mul", "convert_element_type"})) or "mul"
        return f"gated_mlp {batch}M={self.rows} K={self.features} H={self.hidden} {columns} {self.x_dtype}, {steps}"


def _program(
    activation: Callable[[jax.Array], jax.Array] | str, dtype: Dtype, gate_bias: bool, up_bias: bool
) -> ElementwiseProgram:
    """Returns ``act(gate + gate_bias) * (up + up_bias)`` as a program in a dtype."""
    if activation == "silu" and dtype == _WIDE and not gate_bias and not up_bias:
        return _SILU
    function: Callable[[jax.Array], jax.Array] = (
        getattr(jax.nn, activation) if isinstance(activation, str) else activation
    )
    inputs: list[Input] = [Score(dtype), Side(0, dtype)]
    inputs += [Side(i, dtype) for i, has in ((1, gate_bias), (2, up_bias)) if has]

    def unit(gate: jax.Array, up: jax.Array, *biases: jax.Array) -> jax.Array:
        given = iter(biases)
        gate = gate + next(given) if gate_bias else gate
        up = up + next(given) if up_bias else up
        return function(gate) * up

    return traced(unit, *inputs)


def _multiplication(first: int, second: int) -> Instruction:
    return Instruction(lax.mul_p, parameters(compat.multiplication_params()), (first, second), _WIDE)


_SILU = ElementwiseProgram(
    (Score(_WIDE), Side(0, _WIDE)),
    (
        Instruction(lax.logistic_p, (("accuracy", None),), (0,), _WIDE),
        _multiplication(0, 2),
        _multiplication(3, 1),
    ),
    4,
)
"""The same as ``traced(lambda gate, up: jax.nn.silu(gate) * up, ...)``, which would trace at import."""


def product(spec: GatedMlpSpec, a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiplies matrices [B|1, I, J] and [B|1, J, L] and sums in the accumulation dtype; the result is [B|1, I, L]."""
    precision = None if spec.precision is None else lax.Precision[spec.precision]
    return jnp.matmul(a, b, precision=precision, preferred_element_type=spec.accumulation_dtype)


def hidden(spec: GatedMlpSpec, gate: jax.Array, up: jax.Array, *vectors: jax.Array | None) -> jax.Array:
    """Evaluates the hidden units [B, M, H] from both products and the vectors [B|1, H|1], or [B|1, M, H|1] with one for
    each row, None for one that is lacking; in the dtype that the product with ``down`` reads, or in that of the result
    where there is none."""
    program = spec.program
    dtypes = {i.position: i.dtype for i in program.inputs if isinstance(i, Side)}
    given = [up, *(v[:, None] if v is not None and v.ndim == 2 else v for v in vectors)]
    sides = [gate if s is None or i not in dtypes else s.astype(dtypes[i]) for i, s in enumerate(given)]
    # Of models that share one projection, or both, either product may lack the axis that another operand has.
    shape = np.broadcast_shapes(*(array.shape for array in (gate, *given) if array is not None))
    units = jnp.broadcast_to(program.evaluate(gate, None, None, sides), shape)
    return units.astype(spec.result_dtype if spec.down_dtype is None else spec.down_dtype)


def reference(
    spec: GatedMlpSpec,
    x: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array | None = None,
    gate_bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    parameter: jax.Array | None = None,
) -> jax.Array:
    """Computes the formula of :class:`GatedMlpSpec`; the result is [B, M, N], or [B, M, H] without ``down``."""
    units = hidden(spec, product(spec, x, gate), product(spec, x, up), gate_bias, up_bias, parameter)
    return (units if down is None else product(spec, units, down)).astype(spec.result_dtype)


def _candidates(spec: Spec) -> tuple[Sizes, ...]:
    """Returns blocks of rows: fewer rows need less memory, and read the weights more often."""
    assert isinstance(spec, GatedMlpSpec)
    sizes = [size for size in (512, 256, 1024, 2048) if size < spec.rows * spec.batch]
    return tuple({"rows": size} for size in sizes or [512])


_BFLOAT16 = jnp.dtype(jnp.bfloat16)

OPERATION = DeclaredOperation(
    "gated_mlp",
    reference=reference,
    operands={
        "x": "B M K",
        "gate": "B K H",
        "up": "B K H",
        "down": "B H N",
        "gate_bias": "B H",
        "up_bias": "B H",
        "parameter": "B H",
    },
    result="B M N",
    sizes={"B": "batch", "M": "rows", "K": "features", "H": "hidden", "N": "columns"},
    rows="B M",
    stands_for={"N": "H"},
    sample=GatedMlpSpec(
        1, 2048, 1024, 2816, 1024, _BFLOAT16, _BFLOAT16, _BFLOAT16, _BFLOAT16, None, None, None, _BFLOAT16, _SILU
    ),
    block_sizes=block_sizes_class("gated_mlp", {"rows": 512}, _candidates),
)
