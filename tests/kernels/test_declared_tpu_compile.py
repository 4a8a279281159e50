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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("size", ["of the sample", "odd"])
@pytest.mark.parametrize("op, variant", [(op, variant) for op in KERNELS for variant in operation_named(op).variants])
def test_every_generation_compiles_variants(compiler, op, variant, size, direction, dtype):
    case = next(case for case in cases_of(op).table_grid() if case.mask == variant)
    letters = [letter for letter, _ in case.sizes]
    sizes = dict(case.sizes) | ({} if size == "of the sample" else dict(zip(letters[1:], ODD, strict=False)))
    sizes = operation_named(op).fitted_sizes(sizes)
    case = dataclasses.replace(case, direction=direction, dtype=dtype, sizes=tuple(sizes.items()))
    found = compiled(compiler, case)
    assert found.failure is None
    kernels = {o.name.split(".")[0] for o in found.operations if o.kernel}
    assert kernels == {f"autopallas_{op}_{d}" for d in direction.split("+")}


@pytest.mark.parametrize("heads, columns", [(16, 128), (4, 128), (3, 80)])
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_every_generation_compiles_rows_that_are_turned_head_by_head(compiler, op, heads, columns):
    from test_turned_rows_kernels import site

    parts = [{}, {"start": 8, "angles": 24}, {"neighbours": True}]
    module = operation_named(op).implementation("pallas_tpu")
    for part, dtype, adds in zip(parts, ("bfloat16", "float32", "bfloat16"), (False, True, True), strict=True):
        given = {"angles": columns // 2, "columns": columns} | part
        spec, operands = site(op, (2, 250, heads, 1), dtype, adds=adds, **given)
        both = spec.sum_dtype is not None

        def run(operands, cotangent, spec=spec, both=both):
            results = module.forward(spec, None, operands)
            known = operands | ({"sum": results[1]} if both else {})
            given = (cotangent, cotangent) if both else cotangent
            return results, module.backward(spec, None, known, given, frozenset(operands) - {"cos", "sin"})

        with compiler.target.device.targeted():
            found = compiler.compile(run, [operands, operands["x"]])
        assert found.failure is None
        assert sum(o.kernel for o in found.operations) == 2


@pytest.mark.parametrize("op", KERNELS)
def test_every_operand_of_it_may_have_a_gradient(compiler, op):
    from test_declared_kernels import both, operands_of

    given = operands_of(op, "all", (2, 300, 260, 500, 130), "bfloat16", models=True)
    with compiler.target.device.targeted():
        found = compiler.compile(lambda given: both(op, "pallas_tpu", given), [given])
    assert found.failure is None
    assert sum(o.kernel for o in found.operations) == 2
    assert jax.default_backend() == "cpu"
