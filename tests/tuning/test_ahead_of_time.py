"""Functions compiled for TPUs that are not there.  What needs the TPU's compiler is skipped where it is missing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autopallas.compile import tpu
from autopallas.compile.tpu import GENERATIONS, Compilation, Compiler, Operation, compile_for, lowered_for
from autopallas.compile.tpu_process import Module
from autopallas.kernels.tpu import call

needs_compiler = pytest.mark.skipif(tpu.missing() is not None, reason=str(tpu.missing()))


def matmul(block, buffers=1):
    """A tiled matmul; ``buffers`` multiplies its scratch, so that it can be made too large."""

    def body(a, b, out, accumulator):
        @pl.when(pl.program_id(2) == 0)
        def _():
            accumulator[...] = jnp.zeros_like(accumulator)

        accumulator[:block] += jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)
        out[...] = accumulator[:block].astype(out.dtype)

    def run(a, b):
        rows, columns, inner = a.shape[0], b.shape[1], a.shape[1]
        return pl.pallas_call(
            body,
            grid=(rows // block, columns // block, inner // block),
            in_specs=[
                pl.BlockSpec((block, block), lambda i, j, k: (i, k)),
                pl.BlockSpec((block, block), lambda i, j, k: (k, j)),
            ],
            out_specs=pl.BlockSpec((block, block), lambda i, j, k: (i, j)),
            out_shape=jax.ShapeDtypeStruct((rows, columns), a.dtype),
            scratch_shapes=[pltpu.VMEM((buffers * block, block), jnp.float32)],
            name="tiled_matmul",
        )(a, b)

    return run


def square(size, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((size, size), dtype)


def test_lowering_needs_no_compiler_and_names_a_wrong_block_shape():
    assert lowered_for(matmul(128), (square(256), square(256)), "tpu-v5e")
    with pytest.raises(ValueError, match="block shape"):
        lowered_for(matmul(100), (square(200), square(200)), "tpu-v5e")


def test_the_kernel_is_told_the_generation_that_it_is_compiled_for():
    seen = []

    def f(x):
        seen.append(pltpu.get_tpu_info().chip_version.name)
        return x + 1

    for name in GENERATIONS:
        lowered_for(f, (square(8),), name)
    assert seen == ["TPU_V4", "TPU_V5E", "TPU_V5P", "TPU_V6E", "TPU_7X"]


def test_an_unknown_generation_is_named():
    with pytest.raises(ValueError, match=r"'tpu-v1'.*tpu-v4, tpu-v5e"):
        compile_for(lambda x: x, (square(8),), "tpu-v1")


@needs_compiler
def test_every_generation_compiles_a_kernel_and_tells_what_it_takes():
    types = (square(256), square(256))
    for name in GENERATIONS:
        found = compile_for(matmul(128), types, name)
        assert found.failure is None, (name, found.failure)
        (kernel,) = (o for o in found.operations if o.kernel)
        assert kernel.name.startswith("tiled_matmul")
        # Three blocks of 128 x 128 bfloat16, each twice, and the float32 accumulator.
        assert kernel.vmem_bytes == found.vmem_bytes == 6 * 128 * 128 * 2 + 128 * 128 * 4
        assert (found.argument_bytes, found.output_bytes) == (2 * 256 * 256 * 2, 256 * 256 * 2)
        assert found.cycles is None
        assert found.estimated_seconds is None


@needs_compiler
def test_the_simulation_ranks_block_sizes():
    types = (square(512), square(512))
    with Compiler("tpu-v5e", simulate=True) as compiler:
        small, large = (compiler.compile(matmul(block), types) for block in (128, 256))
        assert len(compiler._children) == 1, "one child compiles many programs"
    assert small.cycles > large.cycles > 2 * 512**3 / (4 * 128**2 * 2), "no faster than four matrix units are"
    assert small.estimated_seconds >= small.seconds_of_memory > 0


@needs_compiler
def test_a_kernel_that_exceeds_vmem_is_a_result():
    with Compiler("tpu-v5e") as compiler:
        found = compiler.compile(matmul(256, buffers=600), (square(256), square(256)))
        assert found.stage == "memory"
        assert "vmem" in found.failure
        assert found.cycles is None
        assert compiler.compile(matmul(128), (square(128), square(128))).failure is None, "the child goes on"


@needs_compiler
def test_a_generation_that_cannot_be_simulated_is_compiled_all_the_same():
    found = compile_for(matmul(128), (square(128), square(128)), "tpu-v4", simulate=True)
    assert found.failure is None
    assert found.vmem_bytes > 0
    assert found.cycles is None
    assert "cannot be simulated" in found.note


@needs_compiler
def test_a_child_that_dies_or_hangs_is_a_result():
    with Compiler("tpu-v5e", simulate=True) as compiler:
        module = lowered_for(matmul(128), (square(128), square(128)), "tpu-v5e")
        compiler.compile_lowered(module)
        compiler._children[True]._process.kill()
        found = compiler.compile_lowered(module)
        assert found.failure is None
        assert "the simulation failed: the compiler ended with status -9" in found.note
        late = compiler.compile_lowered(module, seconds=0.0)
        assert late.stage == "time"
        assert "not done after 0 seconds" in late.failure


MODULE = """HloModule jit_f, is_scheduled=true

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %kernel.1 = f32[8]{0:T(128)} custom-call(%p), custom_call_target="tpu_custom_call", backend_config={"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"4096"}],"bundle_analysis_data":{"estimated_cycles":"100","flops":"0"}}
  ROOT %add.1 = f32[8]{0} add(%p, %p), backend_config={"used_scoped_memory_configs":[]}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %while.1 = (s32[], f32[8]{0}) while(%x), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  ROOT %fusion.2 = f32[8]{0:T(128)} fusion(%while.1), kind=kLoop, calls=%fused, backend_config={"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"64"},{"memory_space":"2","offset":"0","size":"9"}],"bundle_analysis_data":{"estimated_cycles":"7","flops":"0"}}
}
"""  # noqa: E501


def test_what_loops_run_is_counted_as_often():
    found = tuple(Operation(**operation) for operation in Module(MODULE).operations())
    assert found == (Operation("kernel.1", True, 4096, 100, 12), Operation("fusion.2", False, 64, 7, 1))
    done = Compilation(GENERATIONS["tpu-v5e"], operations=found, bytes_accessed=819_000)
    assert done.cycles == 1207
    assert done.vmem_bytes == 4096
    assert done.estimated_seconds == pytest.approx(1e-6), "the memory is slower than 1207 cycles"


COUNTED = """HloModule jit_f, is_scheduled=true

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %one = s32[]{:T(128)} constant(1)
  %p = (s32[]{:T(128)}, f32[8]{0}) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%p), index=0
  %copy.1 = s32[]{:T(128)S(6)} copy(%counter)
  %next = s32[]{:T(128)} add(%copy.1, %one)
  %array = f32[8]{0} get-tuple-element(%p), index=1
  %kernel.1 = f32[8]{0:T(128)} custom-call(%array), custom_call_target="tpu_custom_call", backend_config={"bundle_analysis_data":{"estimated_cycles":"100","flops":"0"}}
  ROOT %tuple.1 = (s32[]{:T(128)}, f32[8]{0}) tuple(%next, %kernel.1)
}

%cond (q: (s32[], f32[8])) -> pred[] {
  %most = s32[]{:T(128)} constant(256)
  %q = (s32[]{:T(128)}, f32[8]{0}) parameter(0)
  %counter.1 = s32[]{:T(128)} get-tuple-element(%q), index=0
  ROOT %lt = pred[]{:T(512)} compare(%counter.1, %most), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %zero = s32[]{:T(128)} constant(0)
  %x = f32[8]{0} parameter(0)
  %start = s32[]{:T(128)} copy(%zero)
  %tuple.2 = (s32[]{:T(128)}, f32[8]{0}) tuple(%start, %x)
  %while.1 = (s32[]{:T(128)}, f32[8]{0}) while(%tuple.2), condition=%cond, body=%body
  ROOT %found = f32[8]{0} get-tuple-element(%while.1), index=1
}
"""  # noqa: E501


@pytest.mark.parametrize(
    "changed, runs",
    [
        ({}, 256),
        ({"%zero = s32[]{:T(128)} constant(0)": "%zero = s32[]{:T(128)} constant(6)"}, 250),
        ({"%one = s32[]{:T(128)} constant(1)": "%one = s32[]{:T(128)} constant(2)"}, 1),
        ({"add(%copy.1, %one)": "add(%copy.1, %copy.1)"}, 1),
        ({"direction=LT": "direction=NE"}, 1),
        ({"%most = s32[]{:T(128)} constant(256)": "%most = s32[]{:T(128)} get-tuple-element(%q), index=1"}, 1),
        ({"copy(%zero)": "copy(%x)"}, 1),
        ({"condition=%cond": "condition=%other"}, 1),
    ],
)
def test_a_loop_that_counts_to_a_constant_is_counted_where_the_compiler_does_not_say(changed, runs):
    text = COUNTED
    for old, new in changed.items():
        assert old in text
        text = text.replace(old, new)
    assert [(o["name"], o["runs"]) for o in Module(text).operations()] == [("kernel.1", runs)]


TRAFFIC = """HloModule jit_f, is_scheduled=true

%fused (p: f32[8,128]) -> f32[8,128] {
  ROOT %add.1 = f32[8,128]{1,0:T(8,128)} add(%p, %p)
}

%body (p: (s32[], bf16[256])) -> (s32[], bf16[256]) {
  %p = (s32[], bf16[256]{0:T(256)}) parameter(0)
  %get-tuple-element.1 = bf16[256]{0:T(256)} get-tuple-element(%p), index=1
  %kernel.1 = bf16[256]{0:T(256)} custom-call(%get-tuple-element.1), custom_call_target="tpu_custom_call", backend_config={"cost_estimate":{"flops":"9","bytes_accessed":"777"}}
  ROOT %tuple = (s32[], bf16[256]{0:T(256)}) tuple(%p, %kernel.1)
}

ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  %copy-start = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %slice-start.1 = ((f32[8,128]{1,0:T(8,128)}), f32[2,128]{1,0:T(2,128)}, s32[]{:S(2)}) slice-start(%x), slice={[0:2], [0:128]}
  %slice-done.1 = f32[2,128]{1,0:T(2,128)} slice-done(%slice-start.1)
  %copy-done = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%copy-start)
  %fusion.1 = (f32[8,128]{1,0:T(8,128)S(1)}, pred[8,128]{1,0:T(8,128)}) fusion(%copy-done, %x), kind=kLoop, calls=%fused
  %get-tuple-element.2 = f32[8,128]{1,0:T(8,128)S(1)} get-tuple-element(%fusion.1), index=0
  %while.1 = (s32[], bf16[256]{0}) while(%x), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"10"}}
  ROOT %copy = f32[8,128]{1,0:T(8,128)} copy(%get-tuple-element.2)
}
"""  # noqa: E501


def test_what_vmem_keeps_is_no_traffic():
    # A copy reads an array of 4,096 bytes; a slice reads and writes 1,024; the fusion reads the array and writes a
    # byte for each of 1,024 elements; its other operand and result are in VMEM.
    fusion, loop, copy = 4096 + 1024, 10 * 777, 4096
    assert Module(TRAFFIC).traffic() == 4096 + 2 * 1024 + fusion + loop + copy


@needs_compiler
def test_of_a_long_grid_a_part_is_simulated_and_the_whole_is_told():
    def kernel(alike):
        def body(x, out):
            out[...] = jnp.exp(x[...])

        block = pl.BlockSpec((256, 128), lambda i: (i, 0))
        types = jax.ShapeDtypeStruct((256 * 96, 128), jnp.float32)
        return lambda x: call(
            body, name="long", grid=(96,), semantics=("parallel",), in_specs=[block], out_specs=block, out_shape=types,
            cost=pl.CostEstimate(flops=1, bytes_accessed=1, transcendentals=1), alike=alike,
        )(x)  # fmt: skip

    with Compiler("tpu-v5e", simulate=True) as compiler:
        types = (jax.ShapeDtypeStruct((256 * 96, 128), jnp.float32),)
        whole, part = (compiler.compile(kernel(alike), types) for alike in (0, 1))
    # What begins and ends the kernel counts as often as the part: fetching the first block, and writing the last one,
    # each of which takes as long as one of the part's steps where memory bounds them, as here.
    assert whole.cycles <= part.cycles <= (compiler.steps + 2) / compiler.steps * whole.cycles
    assert part.argument_bytes == whole.argument_bytes
    assert whole.cycles > 96


@needs_compiler
def test_large_arrays_and_blocks_leave_room_for_the_simulation():
    def body(x, y, out, room):
        room[...] = jnp.exp(x[...])
        out[...] = room[...] + y[...]

    rows, columns = 1024, 1536  # 42 MiB of vector memory for blocks and scratch
    large = jax.ShapeDtypeStruct((8 * rows, columns), jnp.float32)  # 48 MiB
    block = pl.BlockSpec((rows, columns), lambda i: (i, 0))
    kernel = call(
        body, name="large", grid=(8,), semantics=("parallel",), in_specs=[block, block], out_specs=block,
        out_shape=large, cost=pl.CostEstimate(flops=1, bytes_accessed=1, transcendentals=1), alike=1,
        scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32)],
    )  # fmt: skip

    def chain(x):
        y = kernel(x, x)
        z = kernel(x, y)
        return kernel(y, z), z

    with Compiler("tpu-v5e", simulate=True) as compiler:
        found = compiler.compile(chain, (large,))
    assert (found.failure, found.note) == (None, "")
    assert found.cycles
