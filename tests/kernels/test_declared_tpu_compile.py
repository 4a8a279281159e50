"""The TPU's compiler takes the kernels of declared operations, without a TPU: run by ``make check-tpu``."""

from __future__ import annotations

import dataclasses
import os

import jax
import pytest

from autopallas.autotune.trial import Trial
from autopallas.compile.tpu import GENERATIONS, Compiler, missing
from autopallas.sites.declared import DeclaredOperation
from autopallas.sites.operation import operation_named, operation_names
from autopallas.workbench.cases import DIRECTIONS, cases_of, match_of

pytestmark = pytest.mark.skipif(
    os.environ.get("FULL_GRID") != "1" or missing() is not None, reason="make check-tpu runs it, with the compiler"
)

KERNELS = [
    name
    for name in operation_names()
    if isinstance(operation_named(name), DeclaredOperation) and operation_named(name).has("pallas_tpu")
]
ODD = (1000, 700, 900, 300)
"""Sizes behind the first letter's, which is a batch."""


@pytest.fixture(scope="module", params=GENERATIONS)
def compiler(request):
    with Compiler(request.param) as compiler:
        yield compiler


def compiled(compiler, case):
    match = match_of(case)
    module = match.site.operation.implementation("pallas_tpu")
    trial, device = Trial.abstract(match), compiler.target.device
    kind = match.site.operation.part("block_sizes").BlockSizes
    own = getattr(module, "candidates", None)
    with device.targeted():
        sizes = (kind.candidates(match.spec) if own is None else own(match.spec, device))[0]
        return compiler.compile(trial.kernel("pallas_tpu", sizes), trial.arguments)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("size", ["of the sample", "odd", "a batch"])
@pytest.mark.parametrize("op", KERNELS)
def test_every_generation_compiles_them(compiler, op, size, direction, dtype):
    case = cases_of(op).table_grid()[0]
    letters = [letter for letter, _ in case.sizes]
    sizes = dict(case.sizes) | ({} if size == "of the sample" else dict(zip(letters[1:], ODD, strict=False)))
    sizes |= {letters[0]: 2} if size == "a batch" else {}
    case = dataclasses.replace(case, direction=direction, dtype=dtype, sizes=tuple(sizes.items()))
    found = compiled(compiler, case)
    assert found.failure is None
    kernels = {o.name.split(".")[0] for o in found.operations if o.kernel}
    assert kernels == {f"autopallas_{op}_{d}" for d in direction.split("+")}


@pytest.mark.parametrize("op", KERNELS)
def test_every_operand_of_it_may_have_a_gradient(compiler, op):
    from test_declared_kernels import both, operands_of

    given = operands_of(op, "all", (2, 300, 260, 500, 130), "bfloat16", models=True)
    with compiler.target.device.targeted():
        found = compiler.compile(lambda given: both(op, "pallas_tpu", given), [given])
    assert found.failure is None
    assert sum(o.kernel for o in found.operations) == 2
    assert jax.default_backend() == "cpu"
