"""Compiling for a GPU without one: what is said of a kernel, and what counts as a fault of it."""

from __future__ import annotations

import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import autopallas
from autopallas.compile import gpu_process
from autopallas.compile.gpu import Compilation, Compiler, Kernel, compile_for, missing

needs_compiler = pytest.mark.skipif(missing() is not None, reason=str(missing()))
GOOD = Kernel("good", 168, 0, 0, 196656, 1224, {"HGMMA": 4, "UTMALDG": 3}, ())

LOG = """\
ptxas info    : (C7519) warpgroup.arrive is injected in around line 671 by compiler to allow use of registers in GMMA
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient
ptxas info    : Function properties for good_mosaic_gpu_kernel
    16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
"""
SASS = """\
   -:-:-:Y:01        /*0000*/                   LDC R1, c[0x0][0x28]
   -:-:1:Y:07        /*0010*/              @!P0 LDL.LU R5, [R1+0x4]
   -:-:1:Y:07        /*0020*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24, gsb0
"""
PASSES = """\
      %size = arith.constant 196656 : i32
      %launch = gpu.launch async [%a] blocks(%x, %y, %z) dynamic_shared_memory_size %size {
"""


def test_what_ptxas_and_the_disassembler_write_is_read(tmp_path):
    for ending, text in ((".ptxas", LOG), (".sass_ctrl", SASS), (".mlir-passes.log", PASSES)):
        (tmp_path / f"good_3{ending}").write_text(text)
    (found,) = gpu_process.kernels(tmp_path)
    assert found["name"] == "good"
    assert (found["registers"], found["spill_bytes"], found["stack_bytes"]) == (168, 64, 16)
    assert (found["shared_bytes"], found["instructions"]) == (196656, 3)
    assert found["operations"] == {"HGMMA": 1, "LDL": 1}
    assert found["warnings"] == ["C7511"]


def test_what_transposes_and_copies_write_is_added_up():
    program = """
      ROOT %transpose.2 = bf16[4,16,4096]{2,1,0} transpose(%param.1), dimensions={0,2,1}
      %copy.3 = pred[8,2]{1,0} copy(%a)
      %copy.4 = s32[] copy(%constant)
      %bitcast.5 = f32[1024]{0} bitcast(%transpose.2), metadata={op_name="transpose(jvp())"}
    """
    assert gpu_process.copied_bytes(program) == 2 * 4 * 16 * 4096 + 8 * 2 + 4


def test_faults_are_named():
    assert GOOD.faults() == ()
    assert Compilation(kernels=(GOOD,)).faults() == ()
    assert "no kernel" in Compilation().faults()[0]
    assert Compilation("no such layout").faults() == ("no such layout",)
    for change, said in [
        ({"spill_bytes": 64}, "spills 64 bytes"),
        ({"warnings": ("C7512",)}, "C7512"),
        ({"operations": {"UTMALDG": 3}}, "no HGMMA"),
        ({"operations": {"HGMMA": 4, "HMMA": 8}}, "HMMA, at half the rate"),
    ]:
        (fault,) = replace(GOOD, **change).faults()
        assert said in fault


@pytest.mark.skipif(missing() is None, reason="the compiler is here")
def test_without_the_compiler_the_extra_is_named():
    with pytest.raises(RuntimeError, match=r"gpu-check|JAX 0\.11"), Compiler():
        pass


@needs_compiler
@pytest.mark.skipif(os.environ.get("FULL_GRID") != "1", reason="make check-gpu runs it")
def test_programs_without_kernels_and_failures_are_results_too():
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    with Compiler() as compiler:
        found = compiler.compile(lambda x: x @ x, (x,))
        assert (found.failure, found.kernels, found.output_bytes) == (None, (), 2 * 256 * 256)
        assert found.seconds > 0
    assert compile_for(lambda x: jnp.tanh(x), (x,)).argument_bytes == 2 * 256 * 256


@needs_compiler
@pytest.mark.skipif(os.environ.get("FULL_GRID") != "1", reason="make check-gpu runs it")
def test_a_kernel_of_an_earlier_program_is_told_of_too():
    @autopallas.optimize(implementation="pallas_gpu", objective="always", strict=True)
    def normed(x):
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)

    x = jax.ShapeDtypeStruct((256, 1024), jnp.bfloat16)
    with Compiler() as compiler:
        first, second = (compiler.compile(normed, (x,)) for _ in range(2))
    assert len(first.kernels) == 1
    assert second.kernels == first.kernels
