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


ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "relu2": lambda x: jax.nn.relu(x) ** 2}


@pytest.mark.parametrize("activation, biases", [*((name, False) for name in ACTIVATIONS), ("gelu", True)])
def test_gated_mlps_have_kernels_both_ways_without_spills(activation, biases):
    """The backward's kernel computes both projections again, and stores hidden units and two cotangents.

    With the gradients of biases, which are summed over the rows, the backward is XLA's.
    """
    operation = operation_named("gated_mlp")
    own = dict(zip(operation.sizes.values(), (1, 8192, 4096, 14336, 4096), strict=True))
    vectors = dict.fromkeys(("gate_bias_dtype", "up_bias_dtype"), np.dtype(np.float32) if biases else None)
    spec = dataclasses.replace(operation.sample, **own, **vectors)
    names = [name for name in operand_names(operation) if getattr(spec, f"{name}_dtype") is not None]
    types = [jax.ShapeDtypeStruct(operation.shape(spec, name), getattr(spec, f"{name}_dtype")) for name in names]
    function = public_function(operation)

    def loss(*given):
        keywords = dict(zip(names, given, strict=True))
        result = function(**keywords, implementation="pallas_gpu", activation=ACTIVATIONS[activation])
        return jnp.sum(jnp.sin(result.astype(jnp.float32)))

    with H100.targeted(), Compiler() as compiler:
        found = compiler.compile(jax.grad(loss, tuple(range(len(names)))), types)
    print(f"\n{spec}", *found.kernels, f"temporary memory {found.temporary_bytes}", sep="\n  ")
    assert found.faults() == ()
    kernels = {"forward"} if biases else {"forward", "backward"}
    assert {kernel.name.rpartition("_")[2] for kernel in found.kernels} == kernels
