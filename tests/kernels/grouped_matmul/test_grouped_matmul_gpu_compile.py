"""The GPU's compiler takes the kernels of grouped matmul, on a machine without a GPU: run by ``make check-gpu``."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_grouped_matmul_implementations import USES, spec_of
from test_grouped_matmul_stored_weights import stored

import autopallas
from autopallas.compile.gpu import H100, Compiler, missing
from autopallas.kernels.grouped_matmul import pallas_gpu
from autopallas.kernels.grouped_matmul.block_sizes import STORED, BlockSizes
from autopallas.kernels.grouped_matmul.gpu_tiles import Tile
from autopallas.kernels.grouped_matmul.gpu_visits import capacity
from autopallas.kernels.grouped_matmul.operands import Operands
from autopallas.kernels.grouped_matmul.tuned_block_sizes import TABLE
from autopallas.sites.elementwise import Score, traced

pytestmark = pytest.mark.skipif(
    os.environ.get("FULL_GRID") != "1" or missing() is not None,
    reason=f"make check-gpu runs it, with the compiler ({missing() or 'which is here'})",
)

SHAPES = {
    "M8192 K4096 N4096 G8": dict(rows=8192, inner=4096, columns=4096, groups=8),
    "M32768 K2048 N1408 G64": dict(rows=32768, inner=2048, columns=1408, groups=64),
    "a batch": dict(rows=512, inner=512, columns=512, groups=4, batch=3),
}
ROWS = TABLE.get("NVIDIA H100", {})
ENTRIES = sorted({row.block_sizes for key, row in ROWS.items() if key[0] == "pallas_gpu"}, key=str)


@pytest.fixture(scope="module")
def compiler():
    with Compiler() as compiler:
        yield compiler


def check(compiler, spec, sizes):
    types = [
        jax.ShapeDtypeStruct((spec.batch, *shape), dtype)
        for shape, dtype in ((spec.first_shape(), spec.first_dtype), (spec.second_shape(), spec.second_dtype))
    ]
    types.append(jax.ShapeDtypeStruct((spec.batch, spec.groups), jnp.int32))
    found = compiler.compile(lambda *given: pallas_gpu.forward(spec, sizes, Operands(*given)), types)
    print(f"\n{spec} {sizes}", *found.kernels, f"temporary memory {found.temporary_bytes}", sep="\n  ")
    assert found.faults() == ()
    (kernel,) = found.kernels
    tile = Tile.of(spec, sizes)
    assert abs(tile.shared_bytes(spec) / kernel.shared_bytes - 1) <= 0.25
    sides = (spec.contracting, spec.columns)
    shared = tile.shared_operand(sides[spec.use != "dlhs"], spec.contracting if spec.use == "drhs" else None)
    assert (".MULTICAST" in kernel.listing) == (shared is not None), "what two blocks share is loaded once"
    tables = 4 * (6 + 8) * capacity(spec.batch, spec.rows, spec.groups, tile.rows) + 2**14
    assert found.temporary_bytes <= tables, "more than the tables of visits"


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", SHAPES)
def test_the_compiler_takes_the_first_candidate(compiler, name, use):
    spec = spec_of(use, "bfloat16", **SHAPES[name])
    check(compiler, spec, pallas_gpu.candidates(spec, H100)[0])


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("sizes", ENTRIES, ids=str)
def test_the_compiler_takes_every_entry_of_the_table(compiler, sizes, use):
    check(compiler, spec_of(use, "bfloat16", **SHAPES["M8192 K4096 N4096 G8"]), sizes)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("position", range(6))
def test_the_compiler_takes_every_candidate(compiler, position, use):
    spec = spec_of(use, "float16", **SHAPES["M8192 K4096 N4096 G8"])
    check(compiler, spec, pallas_gpu.candidates(spec, H100)[position])


@pytest.mark.parametrize("use", USES)
def test_results_may_be_wide(compiler, use):
    spec = replace(spec_of(use, "bfloat16", **SHAPES["a batch"]), result_dtype=np.dtype(np.float32))
    check(compiler, spec, BlockSizes(128))


@pytest.mark.parametrize("use", USES)
def test_odd_sizes_are_padded(compiler, use):
    spec = spec_of(use, "bfloat16", rows=1001, inner=701, columns=903, groups=7)
    types = [jax.ShapeDtypeStruct((1, *s), jnp.bfloat16) for s in (spec.first_shape(), spec.second_shape())]
    types.append(jax.ShapeDtypeStruct((1, spec.groups), jnp.int32))
    found = compiler.compile(lambda *given: pallas_gpu.forward(spec, BlockSizes(128), Operands(*given)), types)
    assert found.faults() == ()


@pytest.mark.parametrize(
    "activation", [jax.nn.silu, jax.nn.gelu, partial(jnp.maximum, 0)], ids=["silu", "gelu", "relu"]
)
@pytest.mark.parametrize("use", USES[:2])
def test_activations_are_epilogues(compiler, use, activation):
    program = traced(lambda y: activation(y), Score(np.dtype(jnp.bfloat16)))
    spec = spec_of(use, "bfloat16", **SHAPES["M8192 K4096 N4096 G8"], epilogue=program)
    check(compiler, spec, pallas_gpu.candidates(spec, H100)[0])


def stored_compiled(compiler, spec, sizes):
    shapes = ((spec.first_shape(), spec.first_dtype), (spec.second_shape(), spec.stored_dtype))
    types = [jax.ShapeDtypeStruct((1, *shape), dtype) for shape, dtype in shapes]
    given = tuple(jax.ShapeDtypeStruct((1, *numbers), jnp.float32) for numbers in spec.scales)
    types += [jax.ShapeDtypeStruct((1, spec.groups), jnp.int32), given]
    return compiler.compile(lambda *given: pallas_gpu.forward(spec, sizes, Operands(*given)), types)


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("scales", ["none", "group", "columns", "rows", "two", "blocks", "blocks of rows"])
@pytest.mark.parametrize("use", USES[:2])
def test_weights_of_8_bits_are_widened_in_shared_memory(compiler, use, scales, rows):
    """A warpgroup of its own does that: nothing in main memory is as large as the weights that are multiplied."""
    spec = stored(use, scales=scales, through=np.float32, **SHAPES["M8192 K4096 N4096 G8"])
    sizes = BlockSizes(rows, weights=STORED)
    found = stored_compiled(compiler, spec, sizes)
    print(f"\n{spec} {sizes}", *found.kernels, f"temporary memory {found.temporary_bytes}", sep="\n  ")
    assert found.faults() == ()
    (kernel,) = found.kernels
    assert kernel.operations["USETMAXREG"] == 3
    assert abs(Tile.of(spec, sizes).shared_bytes(spec) / kernel.shared_bytes - 1) <= 0.25
    assert found.temporary_bytes <= 4 * (6 + 8) * capacity(1, spec.rows, spec.groups, rows) + 2**18


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("shape", [(1001, 701, 903, 7), (512, 2880, 2880, 32)], ids=str)
def test_weights_of_8_bits_may_have_any_size(compiler, shape, dtype):
    rows, inner, columns, groups = shape
    for use in USES[:2]:
        spec = stored(use, dtype, "columns", rows=rows, inner=inner, columns=columns, groups=groups)
        sizes = BlockSizes(64, weights=STORED)
        found = stored_compiled(compiler, spec, sizes)
        assert found.faults() == ()
        if columns % 64 == 0:
            assert found.temporary_bytes < groups * inner * columns, "the weights are not copied"


@pytest.mark.parametrize("activation", [jax.nn.silu, jax.nn.gelu], ids=["silu", "gelu"])
@pytest.mark.parametrize("use", USES[:2])
def test_weights_of_8_bits_and_an_epilogue(compiler, use, activation):
    program = traced(lambda y: activation(y), Score(np.dtype(jnp.bfloat16)))
    spec = stored(use, scales="columns", through=np.float32, epilogue=program, **SHAPES["M8192 K4096 N4096 G8"])
    for sizes in (sizes for sizes in pallas_gpu.candidates(spec, H100) if sizes.weights == STORED):
        assert stored_compiled(compiler, spec, sizes).faults() == ()


def test_what_optimize_makes_of_a_step_has_three_kernels(compiler):
    lhs, rhs = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16), jax.ShapeDtypeStruct((4, 256, 384), jnp.bfloat16)

    def loss(lhs, rhs, sizes):
        return jnp.sum(jax.lax.ragged_dot(lhs, rhs, sizes).astype(jnp.float32) ** 2)

    step = autopallas.optimize(jax.grad(loss, (0, 1)), implementation="pallas_gpu", objective="always", strict=True)
    found = compiler.compile(step, (lhs, rhs, jax.ShapeDtypeStruct((4,), jnp.int32)))
    assert found.faults() == ()
    assert {kernel.name for kernel in found.kernels} == {f"autopallas_grouped_matmul_{use}" for use in USES}


def test_a_train_step_has_three_kernels(compiler):
    from autopallas.kernels.grouped_matmul import grouped_matmul

    lhs, rhs = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16), jax.ShapeDtypeStruct((4, 256, 384), jnp.bfloat16)

    def loss(lhs, rhs, sizes):
        return jnp.sum(grouped_matmul(lhs, rhs, sizes, implementation="pallas_gpu").astype(jnp.float32) ** 2)

    found = compiler.compile(jax.grad(loss, (0, 1)), (lhs, rhs, jax.ShapeDtypeStruct((4,), jnp.int32)))
    assert found.faults() == ()
    names = {kernel.name for kernel in found.kernels}
    assert names == {f"autopallas_grouped_matmul_{use}" for use in USES}


def test_rows_come_back_to_their_tokens_in_one_pass(compiler):
    """XLA gathers them by token, multiplies them by the router's weights and adds them up without an array of its own,
    which is why no kernel scatters what it stores."""
    tokens, choices, columns = 4096, 2, 4096

    def combined(rows, place, weights):
        terms = jnp.take(rows, place, axis=0, unique_indices=True, mode="clip").reshape(tokens, choices, columns)
        return jnp.sum(terms.astype(jnp.float32) * weights[..., None], axis=1).astype(rows.dtype)

    shapes = (((tokens * choices, columns), "bfloat16"), ((tokens * choices,), "int32"), ((tokens, choices), "float32"))
    found = compiler.compile(combined, [jax.ShapeDtypeStruct(*given) for given in shapes])
    assert found.failure is None
    assert found.temporary_bytes == 0
