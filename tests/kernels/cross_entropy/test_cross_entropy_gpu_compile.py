"""The GPU's compiler takes the kernels of cross-entropy, on a machine without a GPU: run by ``make check-gpu``."""

from __future__ import annotations

import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopallas
from autopallas.compile.gpu import H100, Compiler, missing
from autopallas.kernels.cross_entropy import gpu_statistics, gpu_values, pallas_gpu
from autopallas.kernels.cross_entropy.block_sizes import WHOLE, BlockSizes
from autopallas.kernels.cross_entropy.operands import Operands
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, Product, SideSpec, Statistic
from autopallas.sites.elementwise import Index, Score, Side, traced

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


def described(dtype, vocabulary_major, kinds, logit=lambda z: z, more=()):
    """The spec with labels as side input 0, and the types of x, w and the side inputs."""
    dtype, i32 = np.dtype(dtype), np.dtype(np.int32)
    inputs = [Side(1 + n, side.dtype) for n, side in enumerate(more)]
    program = traced(lambda z, *rest: logit(z.astype(jnp.float32), *rest), Score(dtype), *inputs)
    statistics = tuple(Statistic(kind, program, 0 if kind == "pick" else None) for kind in kinds)
    sides = (SideSpec(i32, (True, False)), *more)
    spec = CrossEntropySpec(N, D, V, dtype, dtype, dtype, vocabulary_major, statistics, sides)
    shapes = [((N if side.varies[0] else 1, V if side.varies[1] else 1), side.dtype) for side in sides]
    types = [((N, D), dtype), ((V, D) if vocabulary_major else (D, V), dtype), *shapes]
    return spec, [jax.ShapeDtypeStruct(*t) for t in types]


def checked(found, estimates):
    """What is printed and required of every compilation: no faults, and shared memory as it was estimated."""
    print("", *found.kernels, f"temporary memory {found.temporary_bytes}", sep="\n  ")
    assert found.faults() == ()
    assert {kernel.name.rpartition("_")[2] for kernel in found.kernels} == estimates.keys()
    for kernel in found.kernels:
        estimate = estimates[kernel.name.rpartition("_")[2]]
        assert abs(estimate / kernel.shared_bytes - 1) <= 0.25


@pytest.mark.parametrize("vocabulary_major", [False, True])
@pytest.mark.parametrize(
    "kinds, dtype",
    [(ALL[:3], jnp.bfloat16), (ALL[:3], np.float16), (ALL, jnp.bfloat16), (ALL, np.float16)],
    ids=["loss-bfloat16", "loss-float16", "all-bfloat16", "all-float16"],
)
def test_statistics(compiler, kinds, vocabulary_major, dtype):
    spec, types = described(dtype, vocabulary_major, kinds)
    sizes = pallas_gpu.candidates(spec, H100)[0]
    found = compiler.compile(lambda x, w, *sides: pallas_gpu.forward(spec, sizes, Operands(x, w, sides)), types)
    plan = gpu_statistics.plan_of(spec, len(kinds))
    checked(found, {"statistics": plan.shared_bytes(spec)})
    parts = 4 * len(kinds) * N * -(-V // plan.columns)
    assert found.temporary_bytes <= 1.1 * parts + 2**20, "more than one number per row, statistic and tile"


F32 = np.dtype(np.float32)
LOGITS = {
    "plain": (lambda z: z, ()),
    "soft cap": (lambda z: jnp.tanh(z / np.float32(30)) * np.float32(30), ()),
    "bias": (lambda z, b: z + b, (SideSpec(F32, (False, True)),)),
    "row factor": (lambda z, t: z * t, (SideSpec(F32, (True, False)),)),
    "kept rows": (lambda z, r: jnp.where(r, z, -jnp.inf), (SideSpec(np.dtype(np.bool_), (True, False)),)),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    "logit, vocabulary_major", [("plain", False), *((name, number % 2 == 0) for number, name in enumerate(LOGITS))]
)
def test_statistics_and_gradients(compiler, logit, dtype, vocabulary_major):
    """The derivative as a program of two passes takes it: gradients for x, w and the side inputs that have one."""
    function, more = LOGITS[logit]
    spec, types = described(dtype, vocabulary_major, ALL[:3], function, more)
    sizes = pallas_gpu.candidates(spec, H100)[0]

    def both(x, w, *rest):
        sides, cotangents = rest[: len(spec.sides)], rest[len(spec.sides) :]
        operands = Operands(x, w, sides)
        found = pallas_gpu.forward(spec, sizes, operands)
        given, wanted = (None, *cotangents), (True,) * len(types)
        return found, pallas_gpu.backward(spec, sizes, operands, found.residuals, given, wanted)

    found = compiler.compile(both, [*types, *[jax.ShapeDtypeStruct((N,), F32)] * 2])
    stored = [spec.row_dtype, *(side.dtype for side in spec.sides if side.differentiable)]
    values = gpu_values.plan_of(spec, [(None, dtype) for dtype in stored], sizes.vocabulary_block)
    statistics = gpu_statistics.plan_of(spec, 3)
    checked(found, {"statistics": statistics.shared_bytes(spec), "values": values.shared_bytes(spec)})
    # The values of a part, dx in float32, x the other way round; as much again for what XLA has beside them.
    parts = N * sizes.vocabulary_block * sum(dtype.itemsize for dtype in stored)
    assert found.temporary_bytes <= parts + 2 * N * D * 4 + N * D * 2 + 2**28


def with_gradients(spec):
    """The same with dx and dW of the mean loss, as a train step's site has them."""
    (logits,) = {s.program for s in spec.statistics}
    sides, beside = len(spec.sides), [Side(1 + n, side.dtype) for n, side in enumerate(spec.sides[1:])]

    def gradient(z, key, label, lse, *rest):
        p = jnp.exp(logits.evaluate(z, None, key, (label, *rest)) - lse)
        return ((p - (key == label)) * np.float32(1 / N)).astype(spec.logit_dtype)

    inputs = Score(spec.logit_dtype), Index("key", np.dtype(np.int32)), Side(0, np.dtype(np.int32)), Side(sides, F32)
    program = traced(gradient, *inputs, *beside)
    products = tuple(Product(kind, program, spec.row_dtype) for kind in ("rows", "columns"))
    finish = (traced(lambda m, s: m + jnp.log(s), Side(sides, F32), Side(sides + 1, F32)),)
    return replace(spec, finish=finish, products=products)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("logit, vocabulary_major", [(name, number % 2 == 0) for number, name in enumerate(LOGITS)])
def test_logits_that_are_kept(compiler, logit, dtype, vocabulary_major):
    """A train step's logits are computed once.  They and half of dW take no more than all of dW, the other half being
    where the result will be."""
    function, more = LOGITS[logit]
    spec, types = described(dtype, vocabulary_major, ALL[:3], function, more)
    spec = with_gradients(spec)
    sizes = pallas_gpu.candidates(spec, H100)[0]
    assert sizes == BlockSizes(D, WHOLE)
    found = compiler.compile(lambda x, w, *sides: pallas_gpu.forward(spec, sizes, Operands(x, w, sides)), types)
    checked(found, {"logits": gpu_statistics.plan_of(spec, 3, kept=True).shared_bytes(spec)})
    assert found.temporary_bytes <= 4 * D * V + 2**26, "more than dW in float32"


@pytest.mark.parametrize(
    "objective, rows, vocabulary, kernels, share",
    [
        ("always", N, V, {"logits"}, 14),
        ("memory", N, V, {"logits"}, 14),
        ("memory", 8192, 32000, {"statistics", "values"}, 5.5),
    ],
)
def test_a_train_step_has_the_kernels_and_a_part_of_the_memory(compiler, objective, rows, vocabulary, kernels, share):
    """Rows of an H100 keep 4,096 or 5,120 rows of logits at a time, one of least memory none; XLA keeps all, and their
    gradients."""

    def loss(x, w, labels):
        logits = (x @ w.T).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked)

    step = jax.grad(loss, (0, 1))
    types = [
        jax.ShapeDtypeStruct(*t)
        for t in (((rows, D), jnp.bfloat16), ((vocabulary, D), jnp.bfloat16), ((rows,), jnp.int32))
    ]
    fused = autopallas.optimize(step, implementation="pallas_gpu", objective=objective, strict=True)
    found, original = compiler.compile(fused, types), compiler.compile(step, types)
    print(f"\ntemporary memory {found.temporary_bytes}, materialised {original.temporary_bytes}")
    assert found.faults() == ()
    assert {kernel.name.rpartition("_")[2] for kernel in found.kernels} == kernels
    assert found.temporary_bytes <= original.temporary_bytes / share
