"""Computes gated MLPs by blocks of rows, so that the hidden units of only one block are stored at a time.

The backward reads nothing but the operands and the cotangent: it computes the hidden units of a block again, and adds
the gradients of the weights up in the accumulation dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp

from autopallas.compat import Dtype
from autopallas.kernels.gated_mlp.operation import GatedMlpSpec, hidden, product
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.elementwise import Score, Side
from autopallas.sites.index_notation import summed_to
from autopallas.sites.operation import Supported, Unsupported
from autopallas.sites.spec import BlockSizes, Sizes

__all__ = [
    "GAINS",
    "NUMERICS",
    "VECTORS",
    "backward",
    "forward",
    "program_dtypes",
    "running_sizes",
    "supports",
    "turned",
]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""
GAINS = ("memory",)
"""What it is for: it computes two products again in the backward, which costs time."""

Arrays: TypeAlias = Mapping[str, jax.Array]
VECTORS = ("gate_bias", "up_bias", "parameter")
"""Operands with one number per hidden unit, in the order of the program's side inputs."""


def supports(spec: GatedMlpSpec, device: Device) -> Supported | Unsupported:
    """Returns that every spec is supported."""
    return Supported()


def running_sizes(spec: GatedMlpSpec, block_sizes: BlockSizes, device: Device) -> Sizes:
    """Returns the rows of a block; those of a model with weights of its own end with the model's rows."""
    return {"rows": _rows_of_block(block_sizes, spec.batch * spec.rows)}


def _rows_of_block(block_sizes: BlockSizes | None, rows: int) -> int:
    return rows if block_sizes is None else min(int(block_sizes.to_dict()["rows"]), rows)


def forward(spec: GatedMlpSpec, block_sizes: BlockSizes | None, operands: Arrays) -> jax.Array:
    """Returns the result, [B, M, N], or [B, M, H] without ``down``."""
    layout = _Layout(spec, block_sizes, operands)
    weights = layout.weights

    def block(_: None, x: jax.Array) -> tuple[None, jax.Array]:
        units = hidden(spec, product(spec, x, weights["gate"]), product(spec, x, weights["up"]), *layout.vectors)
        result = product(spec, units, weights["down"]) if "down" in weights else units
        return None, result.astype(spec.result_dtype)

    _, blocks = layout.scan(block, None, layout.blocks(operands["x"]))
    return layout.whole(blocks)


def backward(
    spec: GatedMlpSpec,
    block_sizes: BlockSizes | None,
    operands: Arrays,
    cotangent: jax.Array,
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Returns the cotangents of the operands named in ``wanted``."""
    layout = _Layout(spec, block_sizes, operands)
    weights = layout.weights
    summed = [name for name in operands if name in wanted and name != "x"]
    kinds = {name: jax.ShapeDtypeStruct(weights[name].shape, spec.accumulation_dtype) for name in summed}
    sums = {name: jnp.zeros(kind.shape, kind.dtype) for name, kind in kinds.items()}

    def block(
        sums: dict[str, jax.Array], given: tuple[jax.Array, jax.Array, jax.Array | None]
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        found, of_x = _block_gradients(layout, *given, wanted)
        return {name: sums[name] + summed_to(found[name], kinds[name].shape) for name in summed}, of_x

    given = layout.blocks(operands["x"]), layout.blocks(cotangent), layout.present
    sums, blocks = layout.scan(block, sums, given)
    gradients = {name: sums[name].astype(operands[name].dtype) for name in summed}
    if "x" in wanted:
        of_x = layout.whole(blocks)
        gradients["x"] = summed_to(of_x, operands["x"].shape).astype(operands["x"].dtype)
    return gradients


def _block_gradients(
    layout: _Layout, x: jax.Array, cotangent: jax.Array, present: jax.Array | None, wanted: frozenset[str]
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns the gradients of weights and vectors from one block, in the accumulation dtype, and that of its rows.

    Rows that only fill the block up are left out of all sums: of the zeros in them, the hidden units or their
    derivatives may be infinite, and are NaN times a cotangent of zero.
    """
    spec, weights = layout.spec, layout.weights
    names = [name for name in VECTORS if name in weights]
    vectors = [weights[name] for name in names]
    if present is not None:
        vectors = [jnp.broadcast_to(v[:, None], (v.shape[0], layout.block, v.shape[-1])) for v in vectors]

    def of_present(rows: jax.Array) -> jax.Array:
        return rows if present is None else jnp.where(present[:, None], rows, jnp.zeros((), rows.dtype))

    def units_of(gate: jax.Array, up: jax.Array, *vectors: jax.Array) -> jax.Array:
        given = dict(zip(names, vectors, strict=True))
        return hidden(spec, gate, up, *(given.get(name) for name in VECTORS))

    products = product(spec, x, weights["gate"]), product(spec, x, weights["up"])
    units, pull = jax.vjp(units_of, *products, *vectors)
    found: dict[str, jax.Array] = {}
    of_units = cotangent
    if "down" in weights:
        of_units = product(spec, cotangent, turned(weights["down"]))
        if "down" in wanted:
            found["down"] = product(spec, turned(of_present(units)), cotangent)
    of_units = summed_to(of_units, units.shape)  # over models that share all but ``down``
    of_gate, of_up, *of_vectors = map(of_present, pull(of_units.astype(units.dtype)))
    for name, of in zip(names, of_vectors, strict=True):
        wide = of.astype(spec.accumulation_dtype)
        found[name] = wide if present is None else wide.sum(1)
    score, side = program_dtypes(spec)
    of_gate, of_up = of_gate.astype(score), of_up.astype(side)
    if "gate" in wanted:
        found["gate"] = product(spec, turned(x), of_gate)
    if "up" in wanted:
        found["up"] = product(spec, turned(x), of_up)
    if "x" not in wanted:
        return found, jnp.zeros((), x.dtype)
    of_x = product(spec, of_gate, turned(weights["gate"])) + product(spec, of_up, turned(weights["up"]))
    return found, of_x.astype(x.dtype)


class _Layout:
    """How rows are cut into blocks.

    Models that share all weights have their rows side by side, as those of one model. The last block is filled up with
    rows of zeros, whose cotangents are zeros.
    """

    def __init__(self, spec: GatedMlpSpec, block_sizes: BlockSizes | None, operands: Arrays):
        self.spec = spec
        self.weights = {name: array for name, array in operands.items() if name != "x"}
        self.vectors = [self.weights.get(name) for name in VECTORS]
        self.is_merged = all(array.shape[0] == 1 for array in self.weights.values())
        self.batch = spec.batch
        self.rows = spec.rows * (spec.batch if self.is_merged else 1)
        self.block = _rows_of_block(block_sizes, self.rows)
        self.count = -(-self.rows // self.block)
        self.present: jax.Array | None = None
        """Which rows of each block there are, [count, block]; None where all of them are."""
        if self.count * self.block != self.rows:
            self.present = (jnp.arange(self.count * self.block) < self.rows).reshape(self.count, self.block)

    def blocks(self, array: jax.Array) -> jax.Array:
        """Cuts rows [B|1, M, ...] into blocks: [count, B|1, block, ...]."""
        if self.is_merged:
            array = array.reshape(1, -1, array.shape[-1])
            if array.shape[1] != self.rows:  # rows that all models share
                array = jnp.broadcast_to(array[:, None], (1, self.batch, *array.shape[1:])).reshape(1, self.rows, -1)
        missing = self.count * self.block - self.rows
        array = jnp.pad(array, ((0, 0), (0, missing), (0, 0))) if missing else array
        return jnp.moveaxis(array.reshape(array.shape[0], self.count, self.block, array.shape[-1]), 1, 0)

    def whole(self, blocks: jax.Array) -> jax.Array:
        """Undoes :meth:`blocks`; the result is [B, M, ...]."""
        array = jnp.moveaxis(blocks, 0, 1)
        array = array.reshape(array.shape[0], -1, array.shape[-1])[:, : self.rows]
        return array.reshape(self.batch, self.spec.rows, -1) if self.is_merged else array

    def scan(self, block: Callable, carried: object, blocks: object) -> tuple:  # type: ignore[type-arg]
        """Runs ``block`` over all blocks, without a loop where there is one."""
        if self.count > 1:
            return jax.lax.scan(block, carried, blocks)
        carried, result = block(carried, jax.tree.map(lambda array: array[0], blocks))
        return carried, jax.tree.map(lambda array: array[None], result)


def program_dtypes(spec: GatedMlpSpec) -> tuple[Dtype, Dtype]:
    """Returns the dtypes in which the program that is replaced has the two products."""
    inputs = spec.program.inputs
    score = next((i.dtype for i in inputs if isinstance(i, Score)), spec.accumulation_dtype)
    side = next((i.dtype for i in inputs if isinstance(i, Side) and i.position == 0), spec.accumulation_dtype)
    return score, side


def turned(matrix: jax.Array) -> jax.Array:
    """Returns the transpose of the last two axes."""
    return jnp.swapaxes(matrix, -1, -2)
