"""The TPU's compiler takes the kernels of cross-entropy, on a machine without a TPU: run by ``make check-tpu``."""

from __future__ import annotations

import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_entropy_cases import BF16, F32, KINDS, LOSS, Case
from cross_entropy_implementation import BY_NAME

from autopallas.compile.tpu import GENERATIONS, Compiler, missing
from autopallas.kernels import tpu
from autopallas.kernels.cross_entropy import pallas_tpu
from autopallas.kernels.cross_entropy.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.operands import Operands
from autopallas.kernels.cross_entropy.tpu_memory import fitting, vmem_bytes

pytestmark = pytest.mark.skipif(
    os.environ.get("FULL_GRID") != "1" or missing() is not None, reason="make check-tpu runs it, with the compiler"
)

LARGE = {
    "N8192 D4096 V131072": dict(rows=8192, hidden=4096, vocabulary=131072),
    "N4096 D768 V50257": dict(rows=4096, hidden=768, vocabulary=50257),
    "N1000 D2048 V32001": dict(rows=1000, hidden=2048, vocabulary=32001),
}


@pytest.fixture(scope="module", params=GENERATIONS)
def compiler(request):
    with Compiler(request.param) as compiler:
        yield compiler


@pytest.mark.parametrize("major", [True, False])
@pytest.mark.parametrize("name", LARGE)
def test_losses_with_their_gradients(compiler, name, major):
    case = Case(name, kinds=LOSS, vocabulary_major=major, **LARGE[name])
    spec = case.with_products(case.spec(BF16, logit_dtype=BF16), "finish")
    weight = (case.vocabulary, case.hidden) if major else (case.hidden, case.vocabulary)
    types = [jax.ShapeDtypeStruct(shape, BF16) for shape in ((case.rows, case.hidden), weight)]
    types.append(jax.ShapeDtypeStruct((case.rows, 1), jnp.int32))
    sizes = BlockSizes(2048, 2048)
    with compiler.generation.device.targeted():
        found = compiler.compile(lambda x, w, y: pallas_tpu.forward(spec, sizes, Operands(x, w, (y,))), types)
    assert found.failure is None
    assert found.temporary_bytes < case.rows * case.vocabulary * 2 / 10
    budget = tpu.generation(compiler.generation.device).budget
    for task in ("statistics", "rows", "columns"):
        (kernel,) = [o for o in found.operations if o.kernel and task in o.name]
        estimate = vmem_bytes(spec, fitting(spec, sizes, task, budget), task)
        if name == "N8192 D4096 V131072":  # smaller ones XLA may keep in VMEM as a whole
            assert estimate == pytest.approx(kernel.vmem_bytes, rel=0.25)


@pytest.mark.parametrize("name", ["odd sizes", "bias", "row factor and bias", "vocabulary mask", "N x V bias",
                                  "rows without positions", "soft cap"])  # fmt: skip
def test_statistics_of_every_kind_and_their_gradients(compiler, name):
    case = replace(BY_NAME[name], rows=300, hidden=256, vocabulary=1000, kinds=KINDS)
    spec, sizes = case.spec(F32), BlockSizes(256, 256)
    x, w, sides, cotangents = jax.eval_shape(case.operands)
    wanted = (True, True, *(s.differentiable for s in spec.sides))

    def both(x, w, sides, cotangents):
        operands = Operands(x, w, sides)
        found = pallas_tpu.forward(spec, sizes, operands)
        return found, pallas_tpu.backward(spec, sizes, operands, found.residuals, cotangents, wanted)

    assert all(c is None or c.dtype == np.float32 for c in cotangents)
    with compiler.generation.device.targeted():
        found = compiler.compile(both, (x, w, sides, cotangents))
    assert found.failure is None
