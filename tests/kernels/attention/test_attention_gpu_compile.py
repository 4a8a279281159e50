"""The GPU's compiler takes the kernels of attention, on a machine without a GPU: run by ``make check-gpu``."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import KEY, QUERY, SCORE, Case, traced
from test_attention_implementations import BY_NAME

import autopallas
from autopallas.compile.gpu import H100, Compiler, missing
from autopallas.kernels.attention import gpu_block_sizes, gpu_forward, pallas_gpu
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.fills import hides_by_sides
from autopallas.kernels.attention.operands import Cotangents, Operands, Residuals
from autopallas.kernels.attention.spec import SideSpec
from autopallas.kernels.attention.tuned_block_sizes import TABLE
from autopallas.sites.elementwise import Side

pytestmark = pytest.mark.skipif(
    os.environ.get("FULL_GRID") != "1" or missing() is not None,
    reason=f"make check-gpu runs it, with the compiler ({missing() or 'which is here'})",
)

BF16, I32 = np.dtype(jnp.bfloat16), np.dtype(np.int32)
ROWS = TABLE.get("NVIDIA H100", {})
ENTRIES = sorted({row.block_sizes for key, row in ROWS.items() if key[0] == "pallas_gpu"}, key=str)
WHOLE, RAGGED = (2048, 2048), (2041, 1999)
ALWAYS = dict(implementation="pallas_gpu", objective="always", strict=True)


@pytest.fixture(scope="module")
def compiler():
    with Compiler() as compiler:
        yield compiler


def sized(name: str, size: int, lengths: tuple[int, int] = WHOLE) -> Case:
    t, s = lengths
    return replace(BY_NAME[name], batch=2, key_heads=4, query_length=t, key_length=s, head_size=size,
                   value_head_size=size)  # fmt: skip


def check(compiler, case, dtype, sizes, backward):
    """The forward, or the backward alone, and what it takes of registers and memories."""
    spec = case.spec(dtype)
    *types, out = jax.eval_shape(lambda: case.operands(dtype))
    operands = Operands(*types)
    logsumexp = jax.ShapeDtypeStruct(out.shape[:-1], jnp.float32)

    def run(operands, residuals, cotangents):
        if not backward:
            return pallas_gpu.forward(spec, sizes, operands)
        return pallas_gpu.backward(spec, sizes, operands, residuals, cotangents)

    found = compiler.compile(run, (operands, Residuals(out, logsumexp), Cotangents(out)))
    print(f"\n{spec} {sizes}", *found.kernels, f"temporary memory {found.temporary_bytes}", sep="\n  ")
    assert found.faults() == ()
    for kernel in found.kernels:
        name = kernel.name.removeprefix("autopallas_attention_gpu").removeprefix("_backward").strip("_")
        if name.startswith("side") or name == "statistics":
            continue
        which = {"": "forward", "query": "query", "delta": "query"}.get(name, "key_value")
        if which == "forward":
            tiles = gpu_block_sizes.forward_tiles(spec, sizes)
        else:
            tiles = gpu_block_sizes.backward_tiles(spec, which)
            tiles = replace(tiles, outputs=(("value",),)) if name == "value" else tiles
        estimate = gpu_block_sizes.shared_memory(spec, which, tiles)
        assert abs(estimate / kernel.shared_bytes - 1) <= 0.25, f"{which}: {estimate} of {kernel.shared_bytes}"
    # Copies of operands that are padded or turned; the scores, 2 heads of which would be more, are never there.
    arrays = [*operands[:3], *operands.sides, *((operands.query,) * 3 if backward else ())]
    assert found.temporary_bytes <= 3 * sum(a.size * a.dtype.itemsize for a in arrays) + 2**20
    return found


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("size", [64, 96, 128])
@pytest.mark.parametrize("name", ["full", "causal"])
def test_the_compiler_takes_what_is_common(compiler, name, size, backward):
    case = sized(name, size)
    check(compiler, case, BF16, pallas_gpu.candidates(case.spec(BF16), H100)[0], backward)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "name",
    [
        "causal with a fill of -inf", "sliding window", "segments and causal", "lengths", "bias",
        "biases of every shape", "soft cap and position bias", "sink", "probabilities masked again",
        "probabilities multiplied", "weights inside the sum",
    ],
)  # fmt: skip
def test_the_compiler_takes_every_kind_of_program(compiler, name, backward):
    check(compiler, sized(name, 128), BF16, BlockSizes(128, 128), backward)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_quotients_by_side_inputs_are_differentiated(compiler, backward):
    check(compiler, sized("temperatures of rows and heads", 64), BF16, BlockSizes(64, 64), backward)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", ["full", "causal", "biases of every shape"])
def test_odd_lengths_are_padded(compiler, name, backward):
    check(compiler, sized(name, 128, RAGGED), BF16, BlockSizes(128, 128), backward)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_a_finite_fill_takes_no_more_than_an_infinite_one(compiler, size, backward):
    """The same kernels, which read at run time how many tiles there are."""
    score = traced(lambda s, i, j: jnp.where(i >= j, s * np.float32(0.125), -1e9), SCORE, QUERY, KEY)
    filled = replace(sized("full", size), score=score)
    causal = replace(sized("causal", size), score=score)
    assert filled.spec(BF16).fill is not None
    assert causal.spec(BF16).live is not None
    found, wanted = (check(compiler, case, BF16, BlockSizes(128, 128), backward) for case in (filled, causal))
    of = [[(k.name, k.registers, k.shared_bytes) for k in compiled.kernels] for compiled in (found, wanted)]
    assert of[0] == of[1]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("size", [192, 256])
@pytest.mark.parametrize("name", ["full", "causal", "bias"])
def test_large_heads(compiler, name, size, backward):
    case = sized(name, size)
    check(compiler, case, BF16, pallas_gpu.candidates(case.spec(BF16), H100)[0], backward)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "name, size, lengths",
    [
        *((name, size, WHOLE) for name in ("full", "causal") for size in (64, 96, 128, 192, 256)),
        *((name, 128, RAGGED) for name in ("full", "causal", "sliding window")),
        *((name, 128, WHOLE) for name in ("sink", "soft cap and position bias", "segments and causal")),
    ],
    ids=str,
)
def test_persistent_blocks_hold_no_more_than_registers(compiler, name, size, lengths, backward):
    case = sized(name, size, lengths)
    case = replace(case, batch=32 // case.groups)
    with H100.targeted():
        sizes = gpu_block_sizes.fitting(case.spec(BF16), BlockSizes(128, 128, "persistent"))
    assert sizes.schedule == "persistent"
    check(compiler, case, BF16, sizes, backward)


@pytest.mark.parametrize("lengths", [WHOLE, RAGGED], ids=str)
@pytest.mark.parametrize("size", [64, 96, 128, 192, 256])
def test_a_bias_of_16_bits_is_not_turned_in_memory(compiler, size, lengths):
    bias = SideSpec(BF16, (False, True, True, True, True))
    score = traced(lambda s, b: s + b.astype(np.float32), SCORE, Side(0, BF16))
    case = replace(sized("bias", size, lengths), score=score, sides=(bias,))
    found = check(compiler, case, BF16, BlockSizes(128, 128), backward=True)
    assert found.copied_bytes < lengths[0] * lengths[1]


@pytest.mark.parametrize("lengths", [WHOLE, RAGGED], ids=str)
@pytest.mark.parametrize("name", ["full", "causal", "sliding window", "dilated", "sink"])
def test_small_heads_with_many_keys_at_once(compiler, name, lengths):
    case = sized(name, 64, lengths)
    sizes = gpu_block_sizes.fitting(case.spec(BF16), BlockSizes(128, 256))
    assert sizes.key_block == (128 if (name, lengths) == ("sink", RAGGED) else 256), "which would spill"
    check(compiler, case, BF16, sizes, backward=False)


@pytest.mark.parametrize("position", range(5))
def test_the_compiler_takes_every_candidate(compiler, position):
    case = sized("causal", 64)
    candidates = pallas_gpu.candidates(case.spec(np.dtype(np.float16)), H100)
    check(compiler, case, np.dtype(np.float16), candidates[position], backward=False)


@pytest.mark.parametrize("sizes", ENTRIES, ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_the_compiler_takes_every_entry_of_the_table(compiler, sizes, backward):
    check(compiler, sized("causal", 64), BF16, sizes, backward)


def attend(order, q, k, v):
    """Causal attention of arrays whose axes are in this order."""
    keys, i = order.replace("t", "s"), jnp.arange(q.shape[order.index("t")])
    scores = jnp.einsum(f"{order},{keys}->bnts", q, k).astype(jnp.float32) * np.float32(1 / np.sqrt(q.shape[-1]))
    weights = jax.nn.softmax(jnp.where(i[:, None] >= i, scores, -jnp.inf)).astype(v.dtype)
    return jnp.einsum(f"bnts,{keys}->{order}", weights, v)


@pytest.mark.parametrize("length", [1024, 1000])
@pytest.mark.parametrize("order", ["btnd", "bntd"])
def test_no_array_of_a_program_is_transposed(compiler, order, length):
    """Neither those that are read nor those that are written, in either direction; one number for each row may be."""
    sizes = dict(b=2, t=length, n=8, d=128)

    def step(q, k, v, dout):
        out, pull = jax.vjp(partial(attend, order), q, k, v)
        return out, pull(dout)

    given = (jax.ShapeDtypeStruct(tuple(sizes[letter] for letter in order), BF16),) * 4
    found = compiler.compile(autopallas.optimize(step, **ALWAYS), given)
    assert found.faults() == ()
    assert found.calls == 3
    assert found.copied_bytes <= 2 * length * 8 * 4


@pytest.mark.parametrize("order", ["btnd", "bntd"])
def test_lengths_of_tiles_of_8_are_read_as_they_lie(compiler, order):
    """Of 1,000 rows only what is written is padded to whole blocks: the result, and the numbers of the rows."""
    sizes = dict(b=2, t=1000, n=8, d=128)
    given = (jax.ShapeDtypeStruct(tuple(sizes[letter] for letter in order), BF16),) * 3
    found = compiler.compile(autopallas.optimize(partial(attend, order), **ALWAYS), given)
    assert found.faults() == ()
    rows = 2 * 8 * 1024
    assert found.temporary_bytes < rows * (128 * 2 + 2 * 4) + 2**16


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", ["segments", "a mask"])
def test_a_mask_of_data_is_looked_at_without_an_array_of_scores(compiler, name, backward):
    """The bound of memory that ``check`` has is less than the scores of one head would be; and there is no loop."""
    of_mask = SideSpec(np.dtype(bool), (True, False, False, True, True))
    of_rows, of_keys = (SideSpec(np.dtype("int32"), (True, False, False, x, not x)) for x in (True, False))
    filled, scale = -1e9, np.float32(0.125)
    if name == "segments":
        sides = of_rows, of_keys
        score = traced(lambda s, a, b: jnp.where(a == b, s * scale, filled), SCORE, Side(0, I32), Side(1, I32))
    else:
        sides = (of_mask,)
        score = traced(lambda s, m: jnp.where(m, s * scale, filled), SCORE, Side(0, np.dtype(bool)))
    case = replace(sized("full", 64), score=score, sides=sides, draw="sm"[name != "segments"] * len(sides), key_heads=8)
    assert hides_by_sides(case.spec(BF16))
    check(compiler, case, BF16, BlockSizes(128, 128), backward)


def test_a_layer_in_a_loop_runs_each_kernel_once(compiler):
    """XLA computes a result that is stacked, and used besides, by two calls of its kernel."""

    def layer(x, weights):
        inside, outside = weights
        q, k, v = (part.reshape(2, 1024, 4, 128) for part in jnp.split(x @ inside, 3, -1))
        return x + attend("btnd", q, k, v).reshape(x.shape) @ outside, None

    def step(x, weights, dout):
        out, pull = jax.vjp(lambda x, weights: jax.lax.scan(layer, x, weights)[0], x, weights)
        return out, pull(dout)

    x = jax.ShapeDtypeStruct((2, 1024, 512), BF16)
    weights = tuple(jax.ShapeDtypeStruct((3, 512, n), BF16) for n in (3 * 512, 512))
    found = compiler.compile(autopallas.optimize(step, **ALWAYS), (x, weights, x))
    assert found.faults() == ()
    assert found.calls == 3


def test_statistics_are_a_kernel_without_values(compiler):
    case = sized("causal", 128)
    spec, (*types, _) = case.spec(BF16), jax.eval_shape(lambda: case.operands(BF16))

    def run(operands):
        return gpu_forward.statistics(spec, BlockSizes(128, 128), operands)

    assert compiler.compile(run, (Operands(*types),)).faults() == ()
