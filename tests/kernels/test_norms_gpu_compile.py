"""The GPU's compiler takes the kernels of norms, without a GPU: run by ``make check-gpu``."""

from __future__ import annotations

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopallas.compile.gpu import H100, Compiler, missing
from autopallas.sites.operation import operation_named

pytestmark = pytest.mark.skipif(
    os.environ.get("FULL_GRID") != "1" or missing() is not None,
    reason=f"make check-gpu runs it, with the compiler ({missing() or 'which is here'})",
)

F32 = np.dtype(np.float32)
CASES = [
    # dtype, (rows, columns), rows of a block at a time, bytes that a thread loads at once
    (jnp.bfloat16, (8192, 1024), 4, 16),
    (jnp.bfloat16, (8192, 4096), 1, 16),
    (jnp.bfloat16, (8192, 8192), 1, 16),
    (jnp.float16, (4096, 5120), 1, 16),
    (jnp.float32, (8192, 8192), 1, 16),
    (jnp.float32, (8192, 1024), 4, 16),
    (jnp.bfloat16, (8192, 2048), 1, 16),
    (jnp.bfloat16, (8192, 768), 4, 16),
    (jnp.float16, (65536, 96), 4, 2),
    (jnp.float16, (1001, 640), 1, 2),
]
LOADS = {16: "LD.E.128", 4: "LD.E R", 2: "LD.E.U16"}
BLOCKS = 132 * 4


def forward_and_backward(module, spec, operands, cotangent, *added):
    """Results and gradients of the rows, the scale and the shift; ``added``: a residual, and its sum's cotangent."""
    names = frozenset(("x", "scale", "shift"))
    if not added:
        return module.forward(spec, None, operands), module.backward(spec, None, operands, cotangent, names)
    residual, of_sum = added
    results = module.forward(spec, None, operands | {"residual": residual})
    known = operands | {"residual": residual, "sum": results[1]}
    return results, module.backward(spec, None, known, (cotangent, of_sum), names)


@pytest.mark.parametrize("adds", [False, True], ids=["alone", "with a residual"])
@pytest.mark.parametrize("dtype, sizes, together, each", CASES, ids=str)
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_the_compiler_takes_both_directions_without_spills(op, dtype, sizes, together, each, adds):
    operation, (rows, columns), dtype = operation_named(op), sizes, jnp.dtype(dtype)
    spec = dataclasses.replace(
        operation.sample, rows=rows, columns=columns, x_dtype=dtype, result_dtype=dtype, shift_dtype=F32
    )
    if adds:
        spec = dataclasses.replace(spec, residual_dtype=dtype, sum_dtype=dtype)
    module = operation.implementation("pallas_gpu")
    x, shared = jax.ShapeDtypeStruct((1, rows, columns), dtype), jax.ShapeDtypeStruct((1, columns), F32)

    def both(x, scale, shift, *further):
        return forward_and_backward(module, spec, {"x": x, "scale": scale, "shift": shift}, *further)

    with H100.targeted(), Compiler() as compiler:
        found = compiler.compile(both, [x, shared, shared, x, *([x, x] if adds else [])])
    print(f"\n{spec}", *found.kernels, f"temporary memory {found.temporary_bytes}", sep="\n  ")
    assert found.faults(multiplies=False) == ()
    assert {kernel.name for kernel in found.kernels} == {f"autopallas_{op}_{d}" for d in ("forward", "backward")}
    assert found.temporary_bytes <= 2 * BLOCKS * columns * F32.itemsize + 2**16  # each block's sums, and nothing else
    for kernel in found.kernels:
        # x is loaded once, or it and the residual, and in the backward its cotangents; a warpgroup has 128 threads.
        numbers = kernel.listing.count(LOADS[each]) * 128 * each / dtype.itemsize
        arrays = (2 if kernel.name.endswith("backward") else 1) + adds
        assert numbers == arrays * together * columns, kernel.name


TURNED = [
    # dtype, (models, positions, neighbouring rows, times), angles
    (jnp.bfloat16, (4, 2048, 32, 1), 64),
    (jnp.bfloat16, (4, 2048, 4, 1), 128),
    (jnp.bfloat16, (2, 2048, 1, 16), 64),
    (jnp.float32, (2, 1024, 8, 1), 64),
    (jnp.float16, (2, 1024, 8, 1), 32),
    (jnp.bfloat16, (1, 1024, 4, 1), 512),
]


@pytest.mark.parametrize("adds", [False, True], ids=["alone", "with a residual"])
@pytest.mark.parametrize("dtype, sizes, angles", TURNED, ids=str)
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_the_compiler_takes_rows_that_are_turned_without_spills(op, dtype, sizes, angles, adds):
    operation, (models, positions, heads, times), dtype = operation_named(op), sizes, jnp.dtype(dtype)
    rows, columns, of_sum = positions * heads * times, 2 * angles, dtype if adds else None
    spec = dataclasses.replace(
        operation.sample, batch=models, rows=rows, columns=columns, x_dtype=dtype, result_dtype=dtype, shift_dtype=F32,
        residual_dtype=of_sum, sum_dtype=of_sum, cos_dtype=F32, sin_dtype=F32, positions=positions, heads=heads,
        angles=angles,
    )  # fmt: skip
    module = operation.implementation("pallas_gpu")
    x, shared = jax.ShapeDtypeStruct((models, rows, columns), dtype), jax.ShapeDtypeStruct((1, columns), F32)
    table = jax.ShapeDtypeStruct((1, positions, 1, 1, angles), F32)

    def both(x, scale, shift, cos, sin, *further):
        operands = {"x": x, "scale": scale, "shift": shift, "cos": cos, "sin": sin}
        return forward_and_backward(module, spec, operands, *further)

    with H100.targeted(), Compiler() as compiler:
        found = compiler.compile(both, [x, shared, shared, table, table, x, *([x, x] if adds else [])])
    print(f"\n{spec}", *found.kernels, f"temporary memory {found.temporary_bytes}", sep="\n  ")
    assert found.faults(multiplies=False) == ()
    assert {kernel.name for kernel in found.kernels} == {f"autopallas_{op}_turned_{d}" for d in ("forward", "backward")}
    sums, tables = 2 * (BLOCKS + models * times) * columns * F32.itemsize, 2 * positions * columns * F32.itemsize
    assert found.temporary_bytes <= sums + 2 * tables + 2**16  # each block's sums, the tables, and nothing else
