"""The TPU's compiler takes the kernels, on a machine without a TPU: run by ``make check-tpu``."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, causal
from test_attention_implementations import BY_NAME

from autopallas.compile.tpu import GENERATIONS, Compiler, missing
from autopallas.kernels import tpu
from autopallas.kernels.attention import pallas_tpu
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.operands import Cotangents, Operands
from autopallas.kernels.attention.tpu_block_sizes import candidates, default, fitting, vmem_bytes

pytestmark = pytest.mark.skipif(
    os.environ.get("FULL_GRID") != "1" or missing() is not None, reason="make check-tpu runs it, with the compiler"
)

KINDS = {name: tpu.generation(g.device) for name, g in GENERATIONS.items()}
SIMPLE = Case("simple", query_length=2048, key_length=2048, head_size=128, value_head_size=128)
REALISTIC = {
    "B4 N16 T4096 D128": replace(SIMPLE, batch=4, key_heads=16, query_length=4096, key_length=4096, live=causal()),
    "N32 K8 T8192": replace(SIMPLE, batch=1, key_heads=8, groups=4, query_length=8192, key_length=8192, live=causal()),
    "decode N32 K8 S8192": replace(SIMPLE, batch=8, key_heads=8, groups=4, query_length=1, key_length=8192),
    "D64": replace(SIMPLE, head_size=64, value_head_size=64),
    "D256": replace(SIMPLE, head_size=256, value_head_size=256),
    "odd T and S": replace(SIMPLE, query_length=1023, key_length=1537, head_size=80, value_head_size=96),
    "segments": replace(BY_NAME["segments and causal"], query_length=2048, key_length=2048, head_size=128),
    "biases": replace(BY_NAME["biases of every shape"], query_length=1024, key_length=1024, head_size=64),
}


@pytest.fixture(scope="module", params=GENERATIONS)
def compiler(request):
    with Compiler(request.param) as compiler:
        yield compiler


def both(case: Case, dtype: Any, sizes: BlockSizes | None, generation: tpu.Generation) -> tuple[Any, Any]:
    """Forward and backward as a function, and its arguments."""
    spec = case.spec(dtype)
    sizes = sizes or default(spec, generation)

    def run(*given: Any) -> Any:
        *arrays, dout = given
        operands = Operands(*arrays)
        found = pallas_tpu.forward(spec, sizes, operands)
        return found.out, pallas_tpu.backward(spec, sizes, operands, found.residuals, Cotangents(dout))

    return run, jax.eval_shape(lambda: case.operands(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", REALISTIC)
def test_realistic_shapes(compiler, name, dtype):
    run, arguments = both(REALISTIC[name], jnp.dtype(dtype), None, KINDS[compiler.generation.name])
    found = compiler.compile(run, arguments)
    assert found.failure is None
    assert sum(o.kernel for o in found.operations) >= 3


@pytest.mark.parametrize("name", BY_NAME)
def test_every_case(compiler, name):
    case = BY_NAME[name]
    case = replace(
        case, query_length=case.query_length + 13 * (case.query_length > 1), key_length=case.key_length + 145
    )
    for dtype in (jnp.float32, jnp.bfloat16):
        run, arguments = both(case, dtype, BlockSizes(16, 128), KINDS[compiler.generation.name])
        assert compiler.compile(run, arguments).failure is None


@pytest.mark.parametrize("sizes", [(512, 512), (1024, 1024), (512, 2048)], ids=str)
def test_the_estimate_of_vector_memory_is_near_the_compilers_account(compiler, sizes):
    kind, blocks = KINDS[compiler.generation.name], BlockSizes(*sizes)
    spec = SIMPLE.spec(jnp.bfloat16)
    if fitting(spec, blocks, kind) != blocks:
        pytest.skip(f"{blocks} do not fit into the vector memory of {kind.name}")
    run, arguments = both(SIMPLE, jnp.bfloat16, blocks, kind)
    found = compiler.compile(run, arguments)
    assert found.failure is None
    estimated = vmem_bytes(spec, blocks, kind)
    names = {"autopallas_attention_tpu": "forward", "autopallas_attention_tpu_backward_query": "query",
             "autopallas_attention_tpu_backward_key_value": "key_value"}  # fmt: skip
    compared = {names[o.name.split(".")[0]]: o.vmem_bytes for o in found.operations if o.name.split(".")[0] in names}
    assert compared.keys() == estimated.keys()
    for name, given in compared.items():
        assert abs(estimated[name] - given) <= 0.25 * given, name


def test_no_candidate_that_the_compiler_takes_is_left_out(compiler):
    kind, wide = KINDS[compiler.generation.name], replace(SIMPLE, head_size=256, value_head_size=256)
    spec = wide.spec(np.float32)
    offered = candidates(spec, kind)
    for pair in ((1024, 1024), (1024, 2048)):
        run, arguments = both(wide, np.float32, BlockSizes(*pair), kind)
        if BlockSizes(*pair) not in offered:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(pallas_tpu, "_fitted", lambda spec, sizes: sizes)
                assert compiler.compile(run, arguments).stage == "memory"
    run, arguments = both(wide, np.float32, default(spec, kind), kind)
    assert compiler.compile(run, arguments).failure is None


def test_the_example_needs_a_tenth_of_the_memory(monkeypatch, capsys):
    import importlib.util
    from pathlib import Path

    path = Path(__file__).parents[3] / "examples" / "compile_for_tpu.py"
    specification = importlib.util.spec_from_file_location("compile_for_tpu", path)
    assert specification is not None
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    assert example.main(["--sequence-length", "8192"]) == 0
    memory = [line.split()[2] for line in capsys.readouterr().out.splitlines() if "temporary memory" in line]
    written, ours = (float(x.replace(",", "")) for x in memory)
    assert ours <= written / 10
