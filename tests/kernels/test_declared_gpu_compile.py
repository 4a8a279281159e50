"""The GPU's compiler takes the kernels of declared operations, without a GPU: run by ``make check-gpu``."""

from __future__ import annotations

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_declared_kernels import KERNELS

from autopallas.compile.gpu import H100, Compiler, missing
from autopallas.kernels.declared_function import public_function
from autopallas.sites.declared_call import operand_names
from autopallas.sites.elementwise import Score, Side, traced
from autopallas.sites.operation import operation_named

pytestmark = pytest.mark.skipif(
    os.environ.get("FULL_GRID") != "1" or missing() is not None,
    reason=f"make check-gpu runs it, with the compiler ({missing() or 'which is here'})",
)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
@pytest.mark.parametrize("sizes", [(1, 8192, 4096, 14336, 4096), (1, 1001, 701, 903, 300)], ids=str)
@pytest.mark.parametrize("op", [op for op, name in KERNELS if name == "pallas_gpu" and operation_named(op).contracts])
def test_the_compiler_takes_it_without_spills(op, sizes, dtype):
    operation = operation_named(op)
    own = dict(zip(operation.sizes.values(), sizes, strict=False))
    spec = dataclasses.replace(operation.sample, **own)
    names = [name for name in operand_names(operation) if getattr(spec, f"{name}_dtype") is not None]
    types = [jax.ShapeDtypeStruct(operation.shape(spec, name), dtype) for name in names]
    function = public_function(operation)
    with H100.targeted(), Compiler() as compiler:
        found = compiler.compile(lambda *given: function(*given, implementation="pallas_gpu"), types)
    print(f"\n{spec}", *found.kernels, f"temporary memory {found.temporary_bytes}", sep="\n  ")
    assert found.faults() == ()
    (kernel,) = found.kernels
    assert kernel.operations["HGMMA"] > 0


ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu by erf": lambda x: jax.nn.gelu(x, approximate=False),
    "relu2": lambda x: jax.nn.relu(x) ** 2,
}
CASES = [*((name, "bfloat16", False) for name in ACTIVATIONS), ("silu", "bfloat16", True), ("gelu", "bfloat16", True)]
CASES += [("silu", "float16", False), ("silu", "float16", True)]


@pytest.mark.parametrize("activation, dtype, biases", CASES)
def test_gated_mlps_have_kernels_both_ways_without_spills(activation, dtype, biases):
    """The backward's kernel computes both projections again, and stores hidden units and two cotangents.

    A program in float16 has its cotangents in float16 too.
    """
    operation, dtype = operation_named("gated_mlp"), jnp.dtype(dtype)
    own = dict(zip(operation.sizes.values(), (1, 8192, 4096, 14336, 4096), strict=True))
    matrices = dict.fromkeys((f"{name}_dtype" for name in ("x", "gate", "up", "down", "result")), dtype)
    vectors = dict.fromkeys(("gate_bias_dtype", "up_bias_dtype"), dtype if biases else None)
    spec = dataclasses.replace(operation.sample, **own, **matrices, **vectors)
    names = [name for name in operand_names(operation) if getattr(spec, f"{name}_dtype") is not None]
    types = [jax.ShapeDtypeStruct(operation.shape(spec, name), getattr(spec, f"{name}_dtype")) for name in names]
    function, wide = public_function(operation), dtype if dtype == np.float16 else np.dtype(np.float32)

    def unit(gate, up, gate_bias=0, up_bias=0):
        return ACTIVATIONS[activation](gate + gate_bias) * (up + up_bias)

    program = traced(unit, Score(wide), *(Side(i, wide) for i in range(3 if biases else 1)))

    def loss(*given):
        result = function(**dict(zip(names, given, strict=True)), implementation="pallas_gpu", activation=program)
        return jnp.sum(jnp.sin(result.astype(jnp.float32)))

    with H100.targeted(), Compiler() as compiler:
        found = compiler.compile(jax.grad(loss, tuple(range(len(names)))), types)
    print(f"\n{spec}", *found.kernels, f"temporary memory {found.temporary_bytes}", sep="\n  ")
    assert found.faults() == ()
    assert {kernel.name.rpartition("_")[2] for kernel in found.kernels} == {"forward", "backward"}
