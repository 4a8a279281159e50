"""The GPU's compiler takes the kernel of cross-entropy, on a machine without a GPU: run by ``make check-gpu``."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopallas
from autopallas.kernels.cross_entropy import pallas_gpu
from autopallas.kernels.cross_entropy.gpu_statistics import Plan
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, SideSpec, Statistic
from autopallas.kernels.programs import traced
from autopallas.program import Score
from autopallas.tuning.gpu_ahead_of_time import H100, Compiler, missing

pytestmark = pytest.mark.skipif(
    os.environ.get("FULL_GRID") != "1" or missing() is not None,
    reason=f"make check-gpu runs it, with the compiler ({missing() or 'which is here'})",
)

ALL = ("max", "exp_sum", "pick", "sum", "argmax", "ties")
N, D, V = 32768, 2560, 128256


@pytest.fixture(scope="module")
def compiler():
    with Compiler() as compiler:
        yield compiler


@pytest.mark.parametrize("vocabulary_major", [False, True])
@pytest.mark.parametrize(
    "kinds, dtype",
    [(ALL[:3], jnp.bfloat16), (ALL[:3], np.float16), (ALL, jnp.bfloat16)],
    ids=["loss-bfloat16", "loss-float16", "all-bfloat16"],
)
def test_statistics(compiler, kinds, vocabulary_major, dtype):
    dtype, i32 = np.dtype(dtype), np.dtype(np.int32)
    program = traced(lambda z: z.astype(jnp.float32), Score(dtype))
    statistics = tuple(Statistic(kind, program, 0 if kind == "pick" else None) for kind in kinds)
    spec = CrossEntropySpec(N, D, V, dtype, dtype, dtype, vocabulary_major, statistics, (SideSpec(i32, (True, False)),))
    w = (V, D) if vocabulary_major else (D, V)
    types = [jax.ShapeDtypeStruct(*t) for t in (((N, D), dtype), (w, dtype), ((N, 1), i32))]
    sizes = pallas_gpu.candidates(spec, H100)[0]
    found = compiler.compile(lambda x, w, labels: pallas_gpu.forward(spec, sizes, x, w, (labels,)), types)
    print(f"\n{spec}", *found.kernels, f"temporary memory {found.temporary_bytes}", sep="\n  ")
    assert found.faults() == ()
    (kernel,) = found.kernels
    plan = Plan.of(spec, 256, len(kinds))
    assert abs(plan.shared_bytes(spec, len(kinds)) / kernel.shared_bytes - 1) <= 0.25
    parts = 4 * len(kinds) * N * -(-V // plan.columns)
    assert found.temporary_bytes <= 1.1 * parts + 2**20, "more than one number per row, statistic and tile"


def test_a_train_step_has_the_kernel_and_a_fifth_of_the_memory(compiler):
    def loss(x, w, labels):
        logits = (x @ w.T).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked)

    step = jax.grad(loss, (0, 1))
    types = [jax.ShapeDtypeStruct(*t) for t in (((N, D), jnp.bfloat16), ((V, D), jnp.bfloat16), ((N,), jnp.int32))]
    fused = autopallas.optimize(step, implementation="pallas_gpu", objective="always", strict=True)
    found, original = compiler.compile(fused, types), compiler.compile(step, types)
    print(f"\ntemporary memory {found.temporary_bytes}, materialised {original.temporary_bytes}")
    assert found.faults() == ()
    assert {kernel.name for kernel in found.kernels} == {"autopallas_cross_entropy_statistics"}
    assert found.temporary_bytes <= original.temporary_bytes / 5
