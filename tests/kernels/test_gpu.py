"""What GPU kernels share: which GPUs, shared memory, refusals, and a call that is interpreted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopallas import compat
from autopallas.kernels import gpu
from autopallas.kernels.gpu import too_few_threads
from autopallas.sites.device import Device, GpuProperties
from autopallas.sites.elementwise import Score, traced
from autopallas.sites.interpret import mode
from autopallas.sites.operation import Unsupported

H100, CPU = Device("gpu", "NVIDIA H100 80GB HBM3"), Device("cpu", "cpu")
F32, BF16 = np.dtype(np.float32), np.dtype(jnp.bfloat16)

MISSING = compat.missing_mosaic_gpu()
needs_mosaic = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
REASON = MISSING or too_few_threads()
needs_interpreter = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.mark.parametrize(
    "kind, count", [("NVIDIA H100 80GB HBM3", 132), ("NVIDIA H100 PCIe", 114), ("NVIDIA H200", 132)]
)
def test_hopper_gpus_by_device_kind(kind, count):
    assert gpu.is_hopper(Device("gpu", kind))
    assert gpu.processors(Device("gpu", kind)) == count


def test_an_exported_program_has_as_many_blocks_as_an_h100():
    """It is lowered for GPUs without the name of one."""
    assert gpu.processors(Device("gpu", "")) == gpu.processors(H100)
    assert gpu.processors(CPU) == 2


def test_a_cluster_has_two_multiprocessors_and_two_clusters_are_interpreted():
    assert [gpu.clusters(Device("gpu", kind)) for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe")] == [66, 57]
    assert gpu.clusters(CPU) == 2


@pytest.mark.parametrize("device", [Device("gpu", "NVIDIA A100-SXM4-40GB"), Device("gpu", "NVIDIA B200"), CPU])
def test_nothing_else_is_hopper(device):
    assert not gpu.is_hopper(device)


@pytest.mark.parametrize("capability, answer", [("9.0", True), ("10.0", False)])
def test_a_gpu_that_is_here_is_known_by_its_capability(monkeypatch, capability, answer):
    monkeypatch.setattr(gpu, "gpu_properties", lambda kind: GpuProperties(capability, 78))
    device = Device("gpu", "NVIDIA H100 of a name to come")
    assert gpu.is_hopper(device) is answer
    assert gpu.processors(device) == 78


@needs_mosaic
@pytest.mark.parametrize(
    "version, refused", [(12070, False), (12080, True), (12090, True), (12091, False), (13000, False)]
)
def test_versions_of_cuda_that_miscompile_are_refused(monkeypatch, version, refused):
    monkeypatch.setattr(compat, "cuda_runtime", lambda: version)
    assert gpu.reason_against(H100, [BF16, BF16]) is None, "another machine compiles with its own CUDA"
    monkeypatch.setattr(Device, "here", property(lambda self: True))
    assert ("miscompiles" in str(gpu.reason_against(H100, [BF16, BF16]))) is refused


def test_tiles_of_shared_memory_are_aligned_and_barriers_counted():
    one = gpu.shared_bytes([((64, 64), BF16)])
    assert gpu.shared_bytes([((64, 64), BF16), ((3,), F32)], barriers=4) - one == 1024 + 32
    assert gpu.shared_bytes([((2, 64, 64), BF16)]) - one == 64 * 64 * 2
    with pytest.raises(ValueError, match="no multiple of 32 bytes"):
        gpu.swizzle(8, BF16)


@needs_mosaic
def test_programs_and_dtypes_that_a_gpu_lacks_are_named():
    good = traced(lambda s: jnp.tanh(s) + jnp.exp(s), Score(F32))
    assert gpu.reason_against(H100, [BF16, BF16], [good], [F32]) is None
    cotangents = traced(lambda s: jax.grad(lambda s: s * jnp.exp(s))(s), Score(F32))
    assert "add_any" in cotangents.primitives
    assert gpu.reason_against_programs([cotangents]) is None
    assert float(cotangents.evaluate(jnp.float32(0), None, None, ())) == 1.0
    lacking = traced(lambda s: jnp.cbrt(s), Score(F32))
    assert gpu.reason_against(H100, [BF16], [good, lacking]) == Unsupported("Mosaic GPU has no cbrt")
    assert "not float32" in gpu.reason_against(H100, [F32]).reason
    assert "bfloat16 with float16" in gpu.reason_against(H100, [BF16, np.float16]).reason
    assert "float64" in gpu.reason_against(H100, [BF16], held=[np.float64]).reason
    assert "this GPU is NVIDIA L4" in gpu.reason_against(Device("gpu", "NVIDIA L4"), [BF16]).reason
    assert "AUTOPALLAS_INTERPRET=1" in gpu.reason_against(CPU, [BF16]).reason


@needs_mosaic
def test_kernels_are_not_interpreted_where_too_few_threads_would_wait_for_each_other(monkeypatch):
    monkeypatch.setenv("NPROC", "2")
    with mode(True):
        assert "NPROC=32" in gpu.reason_against(CPU, [BF16]).reason
    assert gpu.reason_against(H100, [BF16]) is None, "compiled kernels have threads of their own"
    monkeypatch.setenv("NPROC", "32")
    with mode(True):
        assert gpu.reason_against(CPU, [BF16]) is None


@needs_mosaic
def test_every_primitive_that_is_promised_is_lowered():
    from jax._src.pallas.mosaic_gpu import lowering

    rules = [{p.name for p in rules} for rules in lowering.mosaic_lowering_rules.values()]
    whole = max(rules, key=len)
    assert whole >= gpu.PROGRAM_PRIMITIVES


def doubled(x):
    def body(x_ref, y_ref, tile, barrier):
        plgpu = gpu.mosaic()
        row = jax.lax.axis_index("block") * 64
        plgpu.copy_gmem_to_smem(x_ref.at[pl_ds(row, 64)], tile, barrier)
        plgpu.barrier_wait(barrier)
        tile[...] = tile[...] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, y_ref.at[pl_ds(row, 64)])
        plgpu.wait_smem_to_gmem(0)

    from jax.experimental.pallas import ds as pl_ds

    return gpu.call(
        body, name="doubled", grid={"block": len(x) // 64}, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch=[gpu.tile((64, 64), x.dtype), gpu.mosaic().Barrier()], warpgroups=1, bytes_accessed=4 * x.size,
    )(x)  # fmt: skip


@needs_interpreter
@pytest.mark.parametrize("x64", [False, True])
def test_a_call_when_interpreted(x64):
    with jax.enable_x64(x64), mode(True):
        x = jnp.arange(128 * 64, dtype=jnp.bfloat16).reshape(128, 64)
        np.testing.assert_array_equal(jax.jit(doubled)(x), 2 * x)


@needs_mosaic
def test_a_call_is_lowered_for_a_gpu_with_its_name():
    with H100.targeted():
        types = jax.ShapeDtypeStruct((128, 64), BF16)
        text = jax.jit(doubled).trace(types).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert "doubled" in text
