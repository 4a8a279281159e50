"""The TPU's compiler takes the kernels of grouped matmul, on a machine without a TPU: run by ``make check-tpu``."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import pytest
from test_grouped_matmul_implementations import USES, spec_of

from autopallas.compile.tpu import GENERATIONS, Compiler, missing
from autopallas.kernels import tpu
from autopallas.kernels.grouped_matmul import pallas_tpu
from autopallas.kernels.grouped_matmul.block_sizes import BlockSizes
from autopallas.kernels.grouped_matmul.operands import Operands
from autopallas.sites.elementwise import Score, traced

pytestmark = pytest.mark.skipif(
    os.environ.get("FULL_GRID") != "1" or missing() is not None, reason="make check-tpu runs it, with the compiler"
)

SHAPES = {
    "M8192 K4096 N4096 G8": dict(rows=8192, inner=4096, columns=4096, groups=8),
    "M8192 K4096 N4096 G64": dict(rows=8192, inner=4096, columns=4096, groups=64),
    "columns for one core": dict(rows=2048, inner=4096, columns=384, groups=2),
    "odd sizes": dict(rows=1000, inner=700, columns=900, groups=7),
    "a batch": dict(rows=500, inner=512, columns=512, groups=4, batch=3),
}


@pytest.fixture(scope="module", params=GENERATIONS)
def compiler(request):
    with Compiler(request.param) as compiler:
        yield compiler


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", SHAPES)
def test_every_generation_compiles_them(compiler, name, use, dtype):
    spec = spec_of(use, dtype, **SHAPES[name])
    sizes = BlockSizes(512).fitted(spec)
    types = [
        jax.ShapeDtypeStruct((spec.batch, *shape), jnp.dtype(dtype))
        for shape in (spec.first_shape(), spec.second_shape())
    ]
    types.append(jax.ShapeDtypeStruct((spec.batch, spec.groups), jnp.int32))
    with compiler.generation.device.targeted():
        found = compiler.compile(lambda *given: pallas_tpu.forward(spec, sizes, Operands(*given)), types)
    assert found.failure is None
    (kernel,) = [o for o in found.operations if o.kernel]
    generation = tpu.generation(compiler.generation.device)
    on_cores = name == "columns for one core" and use == "forward" and generation.cores > 1
    assert ("on_cores" in kernel.name) == on_cores
    if name.startswith("M8192"):
        tile = pallas_tpu.Tile.of(spec, sizes, spec.rows, generation.budget, generation.cores)
        assert tile.vmem_bytes(spec) == pytest.approx(kernel.vmem_bytes, rel=0.25)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_epilogue_is_part_of_the_kernel(compiler, dtype):
    epilogue = traced(lambda y: jax.nn.gelu(y) * jax.nn.sigmoid(y), Score(jnp.dtype(dtype)))
    spec = spec_of("forward", dtype, rows=2048, inner=1024, columns=1024, groups=4, epilogue=epilogue)
    types = [jax.ShapeDtypeStruct((1, *shape), jnp.dtype(dtype)) for shape in (spec.first_shape(), spec.second_shape())]
    types.append(jax.ShapeDtypeStruct((1, 4), jnp.int32))
    with compiler.generation.device.targeted():
        found = compiler.compile(lambda *given: pallas_tpu.forward(spec, BlockSizes(512), Operands(*given)), types)
    assert found.failure is None
    assert found.temporary_bytes < 2048 * 1024 * jnp.dtype(dtype).itemsize, "no array for the product"
