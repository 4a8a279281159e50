"""What XLA computes around a kernel of hidden units: the products with one more matrix, which come near to the peak.

The kernel, ``compute``, reads x, both weights and the vectors, and gives values of all hidden units.  The backward has
it compute both projections again and write their cotangents and, where the product that follows wants its gradient, the
hidden units.  So nothing of the size [rows, hidden] lives between forward and backward; within the backward of one site
three such arrays do, and a fourth where none has the dtype of the hidden units' cotangent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import Dtype
from autopallas.kernels.gated_mlp.operation import GatedMlpSpec, product
from autopallas.kernels.gated_mlp.xla import VECTORS, turned
from autopallas.sites.elementwise import ElementwiseProgram, Input, Score, Side
from autopallas.sites.elementwise_gradients import pulled_back, without_rules
from autopallas.sites.index_notation import summed_to

__all__ = ["COTANGENT", "Compute", "backward", "forward", "programs_of", "stored_dtypes", "unit_dtype"]

Array: TypeAlias = jax.Array
Arrays: TypeAlias = Mapping[str, jax.Array]

COTANGENT = 4
"""Position of the hidden unit's cotangent among the side inputs of a program's derivatives."""


class Compute(Protocol):
    """Interface of a kernel of hidden units."""

    def __call__(
        self,
        programs: Sequence[ElementwiseProgram],
        dtypes: Sequence[Dtype | None],
        cotangent: Array | None,
        reuse: bool,
    ) -> list[Array]:
        """Returns the values of programs of all hidden units.

        Args:
          programs: of the two projections, the vectors and, at :data:`COTANGENT`, the cotangent.
          dtypes: of each value; None for one that is summed over the rows.
          cotangent: [B, M, H], or None.
          reuse: whether a result may lie where the cotangent did, which is read nowhere else.

        Returns:
          Arrays [B, M, H], and [B|1, H] in float32 for what is summed.
        """


def forward(spec: GatedMlpSpec, operands: Arrays, compute: Compute) -> Array:
    """Returns the result, [B, M, N], or [B, M, H] without ``down``."""
    (units,) = compute([without_rules(spec.program)], [unit_dtype(spec)], None, False)
    return units if "down" not in operands else product(spec, units, operands["down"]).astype(spec.result_dtype)


def backward(
    spec: GatedMlpSpec, operands: Arrays, cotangent: Array, wanted: frozenset[str], compute: Compute
) -> dict[str, Array]:
    """Returns the cotangents of the operands named in ``wanted``."""
    derivatives, narrow = _derivatives(spec), _multiplied_dtype(spec)
    products = [name for name in ("gate", "up") if wanted & {"x", name}]
    vectors = [name for name in VECTORS if name in wanted and name in derivatives]
    programs: dict[str, tuple[ElementwiseProgram, Dtype | None]] = {}
    if "down" in wanted:
        programs["down"] = without_rules(spec.program), unit_dtype(spec)
    programs |= {name: (derivatives[name], narrow or derivatives[name].dtype) for name in products}
    programs |= {name: (derivatives[name], None) for name in vectors}
    made: dict[str, Array] = {}
    if programs:
        has_down = "down" in operands
        of_units = product(spec, cotangent, turned(operands["down"])) if has_down else cotangent
        chosen, dtypes = zip(*programs.values(), strict=True)
        values = compute(chosen, dtypes, of_units.astype(unit_dtype(spec)), has_down)
        made = dict(zip(programs, values, strict=True))
    found = {name: made[name] if name in made else jnp.zeros_like(operands[name]) for name in VECTORS if name in wanted}
    if "down" in wanted:
        found["down"] = product(spec, turned(made["down"]), cotangent)
    found |= {name: product(spec, turned(operands["x"]), made[name]) for name in products if name in wanted}
    if "x" in wanted:
        found["x"] = reduce(jnp.add, (product(spec, made[name], turned(operands[name])) for name in products))
    return {name: summed_to(x, operands[name].shape).astype(operands[name].dtype) for name, x in found.items()}


def programs_of(spec: GatedMlpSpec) -> list[ElementwiseProgram]:
    """Returns all programs that a kernel may have to evaluate: that of the hidden unit, and its derivatives."""
    return [without_rules(spec.program), *_derivatives(spec).values()]


def unit_dtype(spec: GatedMlpSpec) -> Dtype:
    """Returns the dtype of hidden units: that in which the product that follows reads them, or the result's."""
    return spec.result_dtype if spec.down_dtype is None else spec.down_dtype


def stored_dtypes(spec: GatedMlpSpec) -> frozenset[Dtype]:
    """Returns the dtypes of all values of hidden units that the products after a kernel read."""
    derivatives, narrow = _derivatives(spec), _multiplied_dtype(spec)
    cotangents = (narrow or derivatives[name].dtype for name in ("gate", "up") if name in derivatives)
    return frozenset((unit_dtype(spec), *cotangents))


def _multiplied_dtype(spec: GatedMlpSpec) -> Dtype | None:
    """Dtype in which products read the cotangents of the two projections, where it is narrower than these: that to
    which a matrix unit cuts its operands.  None: as the program has them."""
    narrow = np.dtype(jnp.bfloat16)
    cut = spec.precision is None and {spec.x_dtype, spec.gate_dtype, spec.up_dtype} == {narrow}
    return narrow if cut else None


def _derivatives(spec: GatedMlpSpec) -> dict[str, ElementwiseProgram]:
    """Programs of the cotangents of the two products and of the vectors that the program reads, by name."""
    names: dict[int | None, str] = {None: "gate", 0: "up", **dict(enumerate(VECTORS, 1))}
    reads: dict[str, tuple[Input, ...]] = {}
    for read in dict.fromkeys(spec.program.inputs):
        if isinstance(read, Score | Side):
            name = names[read.position if isinstance(read, Side) else None]
            reads[name] = (*reads.get(name, ()), read)
    cotangent = Side(COTANGENT, spec.program.dtype)
    return {name: pulled_back(spec.program, found, cotangent) for name, found in reads.items()}
