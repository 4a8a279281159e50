"""What TPU kernels share: generations, memory, alignment, refusals, and lowering for a TPU without one."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopallas.kernels import tpu
from autopallas.sites.device import Device
from autopallas.sites.elementwise import Score, Side, traced
from autopallas.sites.interpret import interpretation, mode, refusal
from autopallas.sites.operation import Unsupported

CPU, V5E = Device("cpu", "cpu"), Device("tpu", "TPU v5 lite")
F32 = np.dtype(np.float32)


def test_generations_by_device_kind():
    found = {kind: tpu.generation(Device("tpu", kind)).name for g in tpu.GENERATIONS for kind in (*g.kinds, g.name)}
    assert found["TPU v5 lite"] == found["TPU v5e"] == found["v5e"] == "v5e"
    assert found["TPU v5"] == "v5p"
    assert tpu.generation(Device("tpu", "TPU v99")) is tpu.ANY_GENERATION
    for g in tpu.GENERATIONS:
        assert tpu.ANY_GENERATION.budget <= g.budget <= g.vmem


@pytest.mark.parametrize(
    "shape, dtype, wanted",
    [((8, 128), np.float32, 4096), ((9, 129), np.float32, 16 * 256 * 4), ((3, 512, 64), jnp.bfloat16, 3 * 512 * 256),
     ((1, 512), np.float32, 2048), ((33, 128), np.int8, 64 * 128), ((100,), np.int32, 512)],
)  # fmt: skip
def test_blocks_take_whole_tiles(shape, dtype, wanted):
    assert tpu.block_bytes(shape, dtype) == wanted
    assert tpu.block_bytes(shape, dtype, buffers=2) == 2 * wanted


def test_blocks_that_mosaic_refuses_are_refused_with_the_remedy():
    tpu.check_block("x", (16, 128), (100, 1000), jnp.bfloat16)
    tpu.check_block("x", (100, 1000), (100, 1000), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"x: a block of .* 8 must be a multiple of 16, or all of 100"):
        tpu.check_block("x", (8, 128), (100, 1000), jnp.bfloat16)
    with pytest.raises(ValueError, match="64 must be a multiple of 128, or all of 1000"):
        tpu.check_block("x", (8, 64), (100, 1000), np.float32)


def test_kernels_run_off_their_platform_only_when_interpreted(monkeypatch):
    assert refusal("tpu", V5E) is None
    assert "AUTOPALLAS_INTERPRET=1" in refusal("tpu", CPU).reason
    assert interpretation() is False
    with mode(True):
        assert refusal("tpu", CPU) is None
    monkeypatch.setenv("AUTOPALLAS_INTERPRET", "1")
    assert refusal("tpu", CPU) is None
    assert interpretation() is True


def test_programs_and_dtypes_that_a_tpu_lacks_are_named():
    good = traced(lambda s: jnp.tanh(s) + jnp.exp(s), Score(F32))
    assert tpu.reason_against(V5E, [good], [jnp.bfloat16, F32]) is None
    lacking = traced(lambda s: jnp.cbrt(s), Score(F32))
    assert tpu.reason_against(V5E, [good, lacking], []) == Unsupported("Mosaic TPU has no cbrt")
    assert "float64" in tpu.reason_against(V5E, [good], [np.float64]).reason
    assert "float16" in tpu.reason_against(V5E, [traced(lambda s: s * 2, Score(np.dtype(np.float16)))], []).reason


def test_a_call_with_a_wrong_block_fails_before_it_is_lowered():
    with pytest.raises(ValueError, match=r"doubled: a block of \(8, 100\) of an array of \(16, 256\): 100 must be"):
        jax.eval_shape(lambda x: doubled(x, 100), jax.ShapeDtypeStruct((16, 256), F32))
    with mode(True):  # an interpreter takes any
        jax.eval_shape(lambda x: doubled(x, 100), jax.ShapeDtypeStruct((16, 256), F32))


def double(x_ref, y_ref):
    y_ref[...] = x_ref[...] * 2


def doubled(x, columns=128):
    from jax.experimental import pallas as pl

    block = pl.BlockSpec((8, columns), lambda i: (i, 0))
    cost = tpu.cost_of(lambda x: x * 2, jax.ShapeDtypeStruct((8, 128), F32), times=x.shape[0] // 8, arrays=[x, x])
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return tpu.call(
        double, name="doubled", grid=(x.shape[0] // 8,), semantics=("parallel",), in_specs=[block], out_specs=block,
        out_shape=shape, cost=cost,
    )(x)  # fmt: skip


@pytest.mark.parametrize("x64", [False, True])
def test_a_call_when_interpreted(x64):
    with jax.enable_x64(x64), mode(True):
        x = jnp.arange(16 * 128, dtype=jnp.float32).reshape(16, 128)
        np.testing.assert_array_equal(jax.jit(doubled)(x), 2 * x)


@pytest.mark.parametrize("kind, limit", [("TPU v5 lite", "51200000"), ("TPU v6 lite", "100663296"), ("TPU v4", None)])
def test_a_call_asks_for_the_memory_of_its_generation(kind, limit):
    with Device("tpu", kind).targeted():
        types = jax.ShapeDtypeStruct((16, 128), F32)
        text = jax.jit(doubled).trace(types).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text
    assert "doubled" in text
    assert ("scoped_memory" in text) == (limit is not None)
    assert limit is None or limit in text


def test_programs_select_no_booleans():
    """Mosaic has neither selections nor comparisons of them."""
    spellings = {
        "where": (lambda a, b, c: jnp.where(a, b, c), lambda a, b, c: b if a else c),
        "maximum": (lambda a, b, c: jnp.maximum(a, b) & c, lambda a, b, c: (a or b) and c),
        "minimum": (lambda a, b, c: jnp.minimum(a, b) | c, lambda a, b, c: (a and b) or c),
    }
    flags = np.array(list(itertools.product([False, True], repeat=3))).T[:, :, None]
    for name, (function, wanted) in spellings.items():
        boolean = np.dtype(bool)
        program = traced(function, *(Side(n, boolean) for n in range(3)))
        sides = [jnp.asarray(x) for x in flags]
        found = program.evaluate(None, None, None, sides)
        assert found[:, 0].tolist() == [wanted(*values) for values in flags[:, :, 0].T.tolist()], name
        lowered = str(jax.make_jaxpr(lambda *x, p=program: p.evaluate(None, None, None, x))(*sides))
        assert not any(word in lowered for word in ("select_n", "max ", "min ")), name
