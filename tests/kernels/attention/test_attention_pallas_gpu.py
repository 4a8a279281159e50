"""The GPU kernels on a CPU: interpreted, with detection of races.

``make check-gpu`` runs every case (``FULL_GRID=1``), else a choice of them, for interpreting takes long.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import KEY, QUERY, SCORE, Case, named, oracle, traced
from support.oracle import errors
from test_attention_implementations import BY_NAME, TOLERANCES, AttentionImplementation, both, computed

import autopallas
from autopallas import compat
from autopallas.compile import gpu as compile_gpu
from autopallas.kernels import gpu
from autopallas.kernels.attention import (
    gpu_block_sizes,
    gpu_side_gradient,
    gpu_warpgroups,
    pallas_gpu,
    reference,
)
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.gpu_elements import primitives, scale_of
from autopallas.kernels.attention.gpu_grid import Visits, turned_sides
from autopallas.kernels.attention.gpu_order import Order
from autopallas.kernels.attention.operands import Cotangents, Operands, Residuals, ScaledRows
from autopallas.kernels.attention.operation import OPERATION
from autopallas.kernels.attention.programs import causal
from autopallas.kernels.attention.schedule import edges
from autopallas.kernels.attention.spec import Layouts, SideSpec, Weight
from autopallas.kernels.attention.tiles import DEAD, FULL, tile_map
from autopallas.kernels.attention.tuned_block_sizes import infer_block_sizes
from autopallas.kernels.gpu import PROGRAM_PRIMITIVES, SHARED_MEMORY, too_few_threads
from autopallas.sites.device import Device
from autopallas.sites.elementwise import Side
from autopallas.sites.interpret import mode
from autopallas.sites.operation import Supported, Unsupported

FULL_GRID = os.environ.get("FULL_GRID") == "1"
H100 = Device("gpu", "NVIDIA H100 80GB HBM3")
BF16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
SIZES = BlockSizes(64, 64)
AT = QUERY, KEY
LAYOUTS = (
    Layouts.with_heads_after_lengths(),
    Layouts((3, 2, 0, 1, 4), (2, 0, 1, 3), (1, 2, 0, 3)),
    Layouts((0, 1, 2, 4, 3), (0, 1, 3, 2), (0, 2, 3, 1)),  # the last axis is another, which kernels do not read
)

MISSING = compat.missing_mosaic_gpu()
needs_mosaic = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
REASON = MISSING or too_few_threads()
needs_interpreter = pytest.mark.skipif(REASON is not None, reason=str(REASON))

QUICK = {
    f"test_values_and_gradients[{name}]"
    for name in (
        "grouped queries", "causal with a fill of -inf", "biases of every shape", "rows without keys, finite fill",
        "weights of zero inside the sum beside huge exponentials",
    )
} | {
    "test_narrow_operands[probabilities multiplied-bfloat16]",
    "test_products_read_what_the_originals_do[('bfloat16', 'bfloat16', 'bfloat16')]",
}  # fmt: skip


@needs_mosaic
@pytest.mark.parametrize("name", ["causal", "bias"])
def test_kernels_are_lowered_for_a_gpu(name):
    """Whatever they read and write: JAX refuses transfers that it would do by halves of sectors, unless asked."""
    case = replace(BY_NAME[name], batch=1, query_length=256, key_length=256, head_size=64, value_head_size=64)
    spec, sizes = case.spec(BF16), BlockSizes(128, 128)
    *types, out = jax.eval_shape(lambda: case.operands(BF16))
    residuals = Residuals(out, jax.ShapeDtypeStruct(out.shape[:-1], F32))

    def step(operands, residuals, cotangents):
        found = pallas_gpu.forward(spec, sizes, operands)
        return found, pallas_gpu.backward(spec, sizes, operands, residuals, cotangents)

    with compile_gpu.H100.targeted():
        program = jax.jit(step).trace(Operands(*types), residuals, Cotangents(out))
        text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 3


@needs_mosaic
@pytest.mark.parametrize("name", ["causal", "full"])
def test_sums_over_a_row_are_computed_before_they_are_stacked(name):
    """XLA would compute them within the copy, a number at a time."""
    case = replace(BY_NAME[name], batch=1, query_length=256, key_length=256, head_size=64, value_head_size=64)
    *types, out = jax.eval_shape(lambda: case.operands(BF16))
    residuals = Residuals(out, jax.ShapeDtypeStruct(out.shape[:-1], F32))
    with compile_gpu.H100.targeted():
        run = partial(pallas_gpu.backward, case.spec(BF16), BlockSizes(128, 128))
        jaxpr = jax.make_jaxpr(run)(Operands(*types), residuals, Cotangents(out)).jaxpr
    behind = {id(x) for e in jaxpr.eqns if e.primitive.name == "optimization_barrier" for x in e.outvars}
    summed = {id(x) for e in jaxpr.eqns if e.primitive.name == "reduce_sum" for x in e.outvars}
    stacks = [e for e in jaxpr.eqns if e.outvars[0].aval.shape == (1, *out.shape[1:3], 2, 256)]
    assert summed
    assert stacks
    for equation in jaxpr.eqns:  # what follows from a sum, up to a barrier
        if any(id(x) in summed for x in equation.invars) and not any(id(x) in behind for x in equation.outvars):
            summed |= {id(x) for x in equation.outvars}
            assert equation not in stacks


@needs_mosaic
@pytest.mark.parametrize("order", ["btnd", "bntd", "tbnd"])
def test_kernels_read_and_write_what_the_program_has_as_it_lies(order, monkeypatch):
    """Also the result, although what the program multiplies last gives it in another order, and a transpose follows."""
    sizes = dict(b=2, t=320, n=3, d=64)
    types: list[tuple[int, ...]] = []
    call = gpu.call

    def kept(*given: Any, out_type: Any, **settings: Any) -> Any:
        run = call(*given, out_type=out_type, **settings)

        def noted(*arrays: Any) -> Any:
            types.extend(x.shape for x in (*arrays, *out_type) if x.dtype == BF16)
            return run(*arrays)

        return noted

    def attend(q: Any, k: Any, v: Any) -> Any:
        keys = order.replace("t", "s")
        weights = jax.nn.softmax(jnp.einsum(f"{order},{keys}->bnts", q, k).astype(jnp.float32)).astype(BF16)
        return jnp.einsum(f"bnts,{keys}->{order}", weights, v)

    def step(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(dout)

    monkeypatch.setattr(gpu, "call", kept)
    shape = tuple(sizes[letter] for letter in order)
    step = autopallas.optimize(step, implementation="pallas_gpu", objective="always", strict=True)
    compile_gpu.lowered_for(step, (jax.ShapeDtypeStruct(shape, BF16),) * 4)
    padded = tuple(384 if n == 320 else n for n in shape)
    found = {tuple(n for n in x if n > 1) for x in types}
    assert len(types) >= 12
    assert found <= {shape, padded}


def larger(case: Case) -> Case:
    """With two tiles along each axis, the last ones not whole; few heads, for each is interpreted on its own."""
    more = 53 if case.query_length > 1 else 0
    heads = min(case.key_heads, 1 if case.groups > 1 else 2)
    longer = dict(query_length=case.query_length + more, key_length=case.key_length + 51)
    return replace(case, batch=1, key_heads=heads, groups=min(case.groups, 2), **longer)


def racing() -> Any:
    from jax.experimental.pallas import mosaic_gpu

    return mode(mosaic_gpu.InterpretGPUParams(detect_races=True))


@needs_interpreter
class TestPallasGpu(AttentionImplementation):
    name = "pallas_gpu"
    sizes = SIZES

    @pytest.fixture(autouse=True)
    def interpreted(self, request):
        if not FULL_GRID and request.node.name not in QUICK:
            pytest.skip("one of the cases that make check-gpu runs")
        with racing():
            yield

    def resized(self, case):
        return larger(case)

    def check(self, module, case, dtype, sizes):
        super().check(module, larger(case), "bfloat16" if dtype == "float32" else dtype, sizes)

    @pytest.mark.parametrize("name", ["causal", "blocks", "rows without keys, finite fill"])
    def test_skipped_tiles_change_nothing(self, module, name):
        case = larger(BY_NAME[name])
        skipping = computed(module, case, BF16, self.sizes, assume_finite=True)
        computing = computed(module, case, BF16, self.sizes, assume_finite=False)
        for part, value in computing.items():
            assert errors(skipping[part], value)[0] <= 1e-2, part  # sums in another order, rounded to bfloat16

    def test_without_assume_finite_a_nan_in_a_masked_value_reaches_the_result(self, module):
        case = BY_NAME["causal"]
        query, key, value, *_ = case.operands(BF16)
        value = value.at[:, :, -1].set(jnp.nan)
        spec = case.spec(BF16, assume_finite=False)
        out = module.forward(spec, self.sizes, Operands(query, key, value)).out
        assert jnp.all(jnp.isnan(out))

    def test_works_under_vmap_and_scan(self, module):
        pytest.skip("pallas_gpu: the interpreter's callbacks have an order, which vmap cannot keep")

    def test_float64_stays_float64(self, module):
        pytest.skip("pallas_gpu: wgmma multiplies 16 bits")


PERSISTENT = BlockSizes(64, 64, "persistent")
QUICK_PERSISTENT = {"test_values_and_gradients[grouped queries]"}


@pytest.fixture
def one_processor(monkeypatch):
    """Has one block of threads, which computes all blocks one after the other."""
    for module in (gpu, gpu_block_sizes):
        monkeypatch.setattr(module, "processors", lambda device: 1)


@needs_interpreter
class TestPersistentBlocks(TestPallasGpu):
    """What blocks of threads that stay compute, one block after the other."""

    sizes = PERSISTENT

    @pytest.fixture(autouse=True)
    def interpreted(self, request, one_processor):
        if not FULL_GRID and request.node.name not in QUICK_PERSISTENT:
            pytest.skip("one of the cases that make check-gpu runs")
        with racing():
            yield


@needs_interpreter
@pytest.mark.parametrize("processors", [1, 3])
@pytest.mark.parametrize(
    "name, query_block, key_block",
    [
        ("causal", 128, 64), ("causal", 192, 128), ("full", 128, 256), ("sliding window", 128, 128),
        ("rows without keys, fill -inf", 128, 64), ("sink", 128, 64), ("segments and causal", 64, 64),
    ],
)  # fmt: skip
def test_persistent_warpgroups_take_turns_over_the_ends_of_blocks(
    name, query_block, key_block, processors, monkeypatch
):
    """Also where blocks have no steps, and where a list is shorter than others."""
    if not FULL_GRID and (name, processors) != ("rows without keys, fill -inf", 3):
        pytest.skip("one of the cases that make check-gpu runs")
    for module in (gpu, gpu_block_sizes):
        monkeypatch.setattr(module, "processors", lambda device: processors)
    case = replace(larger(BY_NAME[name]), query_length=330, key_length=300)
    with racing():
        found = computed(pallas_gpu, case, BF16, BlockSizes(query_block, key_block, "persistent"))
    for part, value in oracle(case, BF16).items():
        assert errors(found[part], value)[0] <= TOLERANCES["bfloat16"][part.startswith("d")], part


@needs_interpreter
@pytest.mark.parametrize("size", [96, 128, 192, 256])
def test_persistent_blocks_of_every_head_size(size, one_processor):
    if not FULL_GRID:
        pytest.skip("one of the cases that make check-gpu runs")
    case = replace(BY_NAME["causal"], batch=1, key_heads=1, groups=2, query_length=133, key_length=133, head_size=size,
                   value_head_size=size)  # fmt: skip
    with racing():
        found = computed(pallas_gpu, case, BF16, PERSISTENT)
    for part, value in oracle(case, BF16).items():
        assert errors(found[part], value)[0] <= TOLERANCES["bfloat16"][part.startswith("d")], part


@needs_interpreter
def test_blocks_in_sections_are_the_same_blocks(monkeypatch):
    case = replace(larger(BY_NAME["causal"]), key_heads=3)
    with racing():
        plain, sections = (
            computed(pallas_gpu, case, BF16, replace(SIZES, schedule=schedule)) for schedule in ("", "sections")
        )
    for part, value in plain.items():
        np.testing.assert_array_equal(sections[part], value, err_msg=part)


@needs_interpreter
@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["grouped queries", "causal", "biases of every shape", "sink"])
def test_arrays_are_read_and_written_in_any_order(name, layouts):
    if not FULL_GRID and (name, layouts) != ("grouped queries", LAYOUTS[1]):
        pytest.skip("one of the cases that make check-gpu runs")
    case = replace(larger(BY_NAME[name]), batch=2, key_heads=2)
    with racing():
        found = computed(pallas_gpu, case, BF16, SIZES, layouts=layouts)
    for part, value in oracle(case, BF16).items():
        assert errors(found[part], value)[0] <= TOLERANCES["bfloat16"][part.startswith("d")], part


@needs_interpreter
@pytest.mark.parametrize("query_block, key_block", [(128, 64), (64, 128), (192, 128), (128, 256)])
def test_any_number_of_warpgroups_computes_the_same(query_block, key_block):
    if not FULL_GRID and query_block != 128:
        pytest.skip("one of the cases that make check-gpu runs")
    length = 150 if key_block < 256 else 300
    case = replace(larger(BY_NAME["causal"]), query_length=length, key_length=length, key_heads=1)
    with racing():
        found = computed(pallas_gpu, case, BF16, BlockSizes(query_block, key_block))
    for name, value in oracle(case, BF16).items():
        assert errors(found[name], value)[0] <= TOLERANCES["bfloat16"][name.startswith("d")], name


@needs_interpreter
@pytest.mark.parametrize("size", [96, 128, 256])
def test_every_head_size(size):
    if not FULL_GRID:
        pytest.skip("one of the cases that make check-gpu runs")
    case = Case("head", batch=1, key_heads=1, query_length=70, key_length=70, head_size=size, value_head_size=size,
                score=traced(lambda s: s * np.float32(0.1), SCORE))  # fmt: skip
    with racing():
        found = computed(pallas_gpu, case, BF16, SIZES)
    for name, value in oracle(case, BF16).items():
        assert errors(found[name], value)[0] <= TOLERANCES["bfloat16"][name.startswith("d")], name


@needs_interpreter
@pytest.mark.parametrize(
    "name, dtype",
    [
        ("causal", "bfloat16"), ("causal", "float16"), ("sliding window", "bfloat16"), ("full", "bfloat16"),
        ("rows without keys, fill -inf", "bfloat16"), ("rows without keys, finite fill", "bfloat16"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rounded", [False, True], ids=["float32", "rounded"])
def test_gradients_of_wide_heads_that_share_keys(name, dtype, rounded):
    """Where one kernel has dk and dv and where two have them; gradients of scores as they are, and rounded."""
    if not FULL_GRID and (name, dtype, rounded) != ("causal", "bfloat16", False):
        pytest.skip("one of the cases that make check-gpu runs")
    case = replace(BY_NAME[name], batch=1, key_heads=1, groups=2, query_length=133, key_length=133, head_size=128,
                   value_head_size=128)  # fmt: skip
    changes = dict(score_gradient_dtype=np.dtype(dtype)) if rounded else {}
    with racing():
        found = computed(pallas_gpu, case, np.dtype(dtype), SIZES, **changes)
    for part, value in oracle(case, np.dtype(dtype)).items():
        assert errors(found[part], value)[0] <= TOLERANCES[dtype][part.startswith("d")], part


@needs_interpreter
@pytest.mark.parametrize(
    "size, varies", [(64, (True, False, True, True, True)), (128, (False, True, False, True, True))]
)
def test_a_bias_of_16_bits_is_turned_as_it_is_read(size, varies):
    """Gradients of keys and values, whose tiles are transposed, with one kernel for both and with two."""
    bias = SideSpec(BF16, varies)
    score = traced(lambda s, b, i, j: jnp.where(i + 60 >= j, s + b.astype(F32), -jnp.inf), SCORE, Side(0, BF16), *AT)
    live = traced(lambda i, j: i + 60 >= j, *AT)
    case = Case(
        "bias of 16 bits", 2, 2 - varies[2], 1 + varies[2], 133, 197, size, size, score, live, (bias,), draw="n"
    )
    assert turned_sides(case.spec(BF16), flipped=True) == (0,)
    with racing():
        found = computed(pallas_gpu, case, BF16, SIZES)
    for part, value in oracle(case, BF16).items():
        assert errors(found[part], value)[0] <= TOLERANCES["bfloat16"][part.startswith("d")], part


@needs_interpreter
@pytest.mark.parametrize("length", [256, 192])
def test_the_gradient_of_a_bias_is_summed_over_several_examples(length):
    """Tile after tile, some of which no row sees; with two warpgroups and two tiles at a time, and with one."""
    bias = SideSpec(BF16, (False, True, False, True, True))
    score = traced(lambda s, b, i, j: jnp.where(i >= j, s + b.astype(F32), -jnp.inf), SCORE, Side(0, BF16), *AT)
    case = Case("bias", 3, 2, 1, length, length, score=score, live=causal(), sides=(bias,), draw="n")
    query, key, value, (side,), _, dout = case.operands(BF16)
    q, k, v, b, d = (np.asarray(x, np.float64) for x in (query, key, value, side, dout))
    x = np.where(np.tri(length, dtype=bool), np.einsum("bkgtd,bksd->bkgts", q, k) + b, -np.inf)
    shift = np.log(np.sum(np.exp(x), axis=-1))
    p, dp = np.exp(x - shift[..., None]), np.einsum("bkgtd,bksd->bkgts", d, v)
    delta = np.sum(p * dp, axis=-1)
    wanted = np.sum(p * (dp - delta[..., None]), axis=0, keepdims=True)
    rows = ScaledRows(dout, jnp.asarray(shift, F32), jnp.asarray(delta, F32))
    operands = Operands(query, key, value, (side,), None)
    with racing():
        found = gpu_side_gradient.tile_gradient(case.spec(BF16), 0, operands, rows, None)
    assert found.dtype == BF16
    by_row = np.linalg.norm(np.asarray(found, np.float64) - wanted, axis=-1)
    assert np.all(by_row <= 2**-7 * np.linalg.norm(wanted, axis=-1) + 1e-6)
    assert not np.any(np.triu(np.asarray(found, F32), 1))


@needs_interpreter
def test_repeated_runs_agree_to_the_last_bit():
    """Whatever order the simulated threads happen to run in."""
    case = replace(larger(BY_NAME["causal"]), key_heads=1, query_length=70, key_length=70)
    with racing():
        first = computed(pallas_gpu, case, BF16, SIZES)
        for _ in range(5 if FULL_GRID else 1):
            again = computed(pallas_gpu, case, BF16, SIZES)
            for name, value in first.items():
                np.testing.assert_array_equal(again[name], value, err_msg=name)


# ---------------------------------------------------------------------- the order of blocks

HEADS_AND_LENGTHS = [(64, 4096), (16, 16384), (16, 8192), (5, 2048), (7, 1000), (3, 300)]


def visited(length: int, home: str = "row", name: str = "causal") -> Visits:
    spec = replace(BY_NAME[name], query_length=length, key_length=length).spec(BF16)
    return Visits.of(spec, home, 128, 128, ())


def places(order: Order) -> np.ndarray:
    """The (head, block) of each block of threads, in their order."""
    found = jax.vmap(order.place)(jnp.arange(order.heads * order.home_blocks, dtype=jnp.int32))
    return np.stack([np.asarray(x) for x in found], axis=-1)


@pytest.mark.parametrize("heads, length", HEADS_AND_LENGTHS)
@pytest.mark.parametrize("home", ["row", "column"])
def test_each_order_has_each_block_once(heads, length, home):
    visits = visited(length, home)
    wanted = {(head, block) for head in range(heads) for block in range(visits.home_blocks)}
    with compile_gpu.H100.targeted():
        for schedule in ("", "sections"):
            found = places(Order.of(visits, heads, schedule, 2**20))
            assert len(found) == len(wanted)
            assert {tuple(x) for x in found.tolist()} == wanted
        order = Order.of(visits, heads, "persistent", 2**20)
    assert order.blocks == len(order.lists) <= 132
    listed = [x for row in order.lists for x in row[1 : 1 + row[0]].tolist()]
    assert sorted(listed) == [head * visits.home_blocks + block for head, block in sorted(wanted)]


@pytest.mark.parametrize("heads", [5, 6])
def test_in_a_section_long_blocks_come_before_short_ones(heads):
    order = Order(heads, 4, 3, True, None)
    blocks, of_heads = places(order)[:, 1], places(order)[:, 0]
    assert blocks[:12].tolist() == [3, 3, 3, 2, 2, 2, 1, 1, 1, 0, 0, 0]
    assert set(of_heads[:12].tolist()) == {0, 1, 2}
    assert order._all().tolist() == (of_heads * 4 + blocks).tolist()


def test_an_order_begins_long_blocks_early_and_keeps_few_heads_in_the_cache():
    """Simulated with the number of steps of each block: what is lost to processors that wait."""
    with compile_gpu.H100.targeted():
        for heads, length in HEADS_AND_LENGTHS[:3]:
            visits, bytes_of_head = visited(length), length * 512
            plain = Order.of(visits, heads, "", bytes_of_head)
            chosen = Order.of(visits, heads, "sections", bytes_of_head)
            ideal = heads * (visits.table[0, :, 1] + 2).sum() / 132
            assert chosen.dealt(visits)[1] <= min(1.02 * ideal, plain.dealt(visits)[1])
            assert chosen.section * bytes_of_head <= 2**24


def test_schedules_are_for_more_blocks_than_processors():
    spec = replace(BY_NAME["causal"], batch=4, key_heads=16, query_length=4096, key_length=4096).spec(BF16)
    with compile_gpu.H100.targeted():
        found = gpu_block_sizes.candidates(spec)
        assert [sizes.schedule for sizes in found[:3]] == ["persistent", "", "sections"]
        few = replace(spec, batch=1, key_heads=2)
        for schedule in ("persistent", "sections"):
            known = BlockSizes(128, 128, schedule)
            assert gpu_block_sizes.default(spec, known) == known
            assert gpu_block_sizes.default(few, known).schedule == ""
        assert {sizes.schedule for sizes in gpu_block_sizes.candidates(few)} == {""}
        many = replace(spec, batch=512)
        assert gpu_block_sizes.default(many, BlockSizes(128, 128, "persistent")).schedule == "sections"
        dynamic = replace(BY_NAME["segments and causal"], batch=4, key_heads=16, query_length=4096, key_length=4096)
        assert {sizes.schedule for sizes in gpu_block_sizes.candidates(dynamic.spec(BF16))} == {""}
    # What is planned for another device does not follow from this one.
    assert pallas_gpu.default_block_sizes(few, compile_gpu.H100, known).schedule == ""
    assert pallas_gpu.default_block_sizes(spec, compile_gpu.H100, known) == known


# ---------------------------------------------------------------------- what is visited


@pytest.mark.parametrize("home", ["row", "column"])
@pytest.mark.parametrize(
    "name", ["full", "causal with more keys", "sliding window", "blocks", "rows without keys, fill -inf"]
)
def test_every_live_tile_is_visited_once_and_the_full_ones_first(name, home):
    spec = replace(BY_NAME[name], query_length=300, key_length=700).spec(BF16)
    visits = Visits.of(spec, home, 128, 64, ())
    states = tile_map(spec, edges(300, 128), edges(700, 64))
    states = states.T if home == "column" else states
    assert (visits.home_blocks, visits.away_blocks) == states.shape
    for block, row in enumerate(states):
        steps = visits.steps(visits.table, 0, block)
        seen = [int(steps.block(n)) for n in range(int(steps.total))]
        assert sorted(seen) == list(np.flatnonzero(row != DEAD))
        assert all(row[b] == FULL for b in seen[: int(steps.full)])
        assert sum(int(count) for *_, count in visits.loops(steps)) == len(seen)


def test_a_causal_mask_begins_with_the_longest_rows():
    spec = replace(BY_NAME["causal"], query_length=1024, key_length=1024).spec(BF16)
    assert Visits.of(spec, "row", 128, 128, ()).longest_first
    assert not Visits.of(spec, "column", 128, 128, ()).longest_first


# ---------------------------------------------------------------------- refusals, sizes


@needs_mosaic
def test_what_the_kernel_lacks_is_refused_before_any_compile():
    def reason(spec: Any, device: Device = H100) -> str:
        answer = pallas_gpu.supports(spec, device)
        assert isinstance(answer, Unsupported)
        return answer.reason

    spec = BY_NAME["causal"].spec
    assert pallas_gpu.supports(spec(BF16), H100) == Supported()
    assert "A100" in reason(spec(BF16), Device("gpu", "NVIDIA A100-SXM4-40GB"))
    assert "float32" in reason(spec(F32))
    assert "cbrt" in reason(replace(spec(BF16), score=traced(lambda s: jnp.cbrt(s), SCORE)))
    assert "256" in reason(replace(spec(BF16), head_size=264))
    assert "AUTOPALLAS_INTERPRET=1" in reason(spec(BF16), Device("cpu", "cpu"))
    scaled = (Weight("multiply", traced(lambda s: s, SCORE)),)
    assert "float16" in reason(replace(spec(np.float16), weights=scaled))


@needs_mosaic
@pytest.mark.parametrize("name", BY_NAME)
def test_every_case_is_supported_as_bfloat16(name):
    assert pallas_gpu.supports(BY_NAME[name].spec(BF16), H100) == Supported()


@pytest.mark.parametrize("name", BY_NAME)
def test_derivatives_need_no_primitive_that_mosaic_lacks(name):
    assert primitives(BY_NAME[name].spec(BF16)) <= PROGRAM_PRIMITIVES


def test_a_derivative_of_its_own_is_looked_into():
    spec = replace(BY_NAME["full"].spec(BF16), score=traced(lambda s: jnp.tanh(s), SCORE))
    assert {"tanh", "mul"} <= primitives(spec)


def test_only_a_plain_scale_is_folded_into_the_exponential():
    assert scale_of(traced(lambda s: s * np.float32(0.5), SCORE)) == 0.5
    assert scale_of(traced(lambda s: s / np.float32(8), SCORE)) == 0.125
    assert scale_of(traced(lambda s: s * np.float32(-0.5), SCORE)) is None
    assert scale_of(traced(lambda s: jnp.tanh(s), SCORE)) is None
    assert scale_of(BY_NAME["causal"].spec(BF16).score) is None


@pytest.mark.parametrize("size", [40, 64, 96, 128, 192, 256])
def test_candidates_fit_into_shared_memory(size):
    spec = replace(BY_NAME["causal"], head_size=size, value_head_size=size, query_length=4096, key_length=4096).spec(
        BF16
    )
    found = gpu_block_sizes.candidates(spec)
    assert infer_block_sizes(spec, H100, "pallas_gpu") in found
    for sizes in found:
        tiles = gpu_block_sizes.forward_tiles(spec, sizes)
        assert gpu_block_sizes.shared_memory(spec, "forward", tiles) <= SHARED_MEMORY
        assert (tiles.warpgroups * 64, tiles.away) == (sizes.query_block, sizes.key_block)
        for kernel in ("query", "key_value"):
            backward = gpu_block_sizes.backward_tiles(spec, kernel)
            assert gpu_block_sizes.shared_memory(spec, kernel, backward) <= SHARED_MEMORY


@pytest.mark.parametrize(
    "name, size, rows, keys",
    [("causal", 64, 128, 256), ("causal", 64, 192, 128), ("causal", 96, 128, 128), ("bias", 64, 128, 128)],
)
def test_tiles_have_as_many_keys_as_registers_hold(name, size, rows, keys):
    spec = replace(BY_NAME[name], query_length=4096, key_length=4096, head_size=size, value_head_size=size).spec(BF16)
    assert gpu_block_sizes.fitting(spec, BlockSizes(rows, 256)) == BlockSizes(rows, keys)
    assert (BlockSizes(128, 256) in gpu_block_sizes.candidates(spec)) == (name == "causal" and size == 64)


@pytest.mark.parametrize("length", [2048, 2041])
@pytest.mark.parametrize(
    "name, size, kernels",
    [
        ("full", 128, 1), ("causal", 128, 1), ("causal, low fill", 128, 1), ("causal", 96, 1), ("sink", 128, 1),
        ("sliding window", 128, 2), ("bias", 128, 2), ("segments and causal", 128, 2),
        ("soft cap and position bias", 128, 2), ("causal", 192, 2),
    ],
)  # fmt: skip
def test_keys_and_values_share_a_kernel_where_registers_hold_both(name, size, kernels, length):
    case = replace(BY_NAME[name], query_length=length, key_length=length, head_size=size, value_head_size=size)
    assert len(gpu_block_sizes.backward_tiles(case.spec(BF16), "key_value").outputs) == kernels


@pytest.mark.parametrize("length, warpgroups", [(64, 1), (65, 2), (4096, 2)])
@pytest.mark.parametrize("kernel", ["query", "key_value"])
def test_the_backward_has_two_warpgroups_where_there_is_work_for_both(kernel, length, warpgroups):
    """Whatever the forward has, which may be one or three."""
    for name, size in (("causal", 64), ("causal", 128), ("bias", 128)):
        case = replace(BY_NAME[name], query_length=length, key_length=length, head_size=size, value_head_size=size)
        assert gpu_block_sizes.backward_tiles(case.spec(BF16), kernel).warpgroups == warpgroups


@pytest.mark.parametrize("dtype, bits", [(jnp.bfloat16, 8), (jnp.float16, 11)])
@pytest.mark.parametrize("precision, count", [(None, 2), ("HIGHEST", 3)])
def test_a_tile_is_a_sum_of_parts_of_fewer_bits(precision, count, dtype, bits):
    x = jnp.asarray(np.random.default_rng(0).normal(size=1000) * 2.0 ** np.arange(-5, 5).repeat(100), np.float32)
    found = gpu_warpgroups.parts(x, F32, dtype, precision)
    assert [part.dtype for part in found] == [dtype] * count
    rest = np.asarray(x, np.float64) - sum(np.asarray(part, np.float64) for part in found)
    least = 0.0 if dtype == jnp.bfloat16 else 2.0**-25  # half of the smallest number of float16
    assert np.all(np.abs(rest) <= np.maximum(2.0 ** -(bits * count) * np.abs(x), least))
    assert [part.tolist() for part in gpu_warpgroups.parts(x, dtype, dtype, precision)] == [x.astype(dtype).tolist()]
    for number in (np.inf, np.nan):
        found = gpu_warpgroups.parts(jnp.full(1, number, F32), F32, dtype, None)
        assert np.isnan(sum(np.asarray(part, np.float32) for part in found))


@needs_interpreter
def test_gradients_of_rows_that_a_finite_fill_hides():
    """exp(x - logsumexp) would be 1, not 1 / S, where logsumexp = -1e9 + log(S)."""
    case = Case("hidden", batch=1, key_heads=1, query_length=20, key_length=40,
                score=traced(lambda s: s * np.float32(0) - np.float32(1e9), SCORE))  # fmt: skip
    with racing():
        found = computed(OPERATION.implementation("pallas_gpu"), case, BF16, SIZES)
    wanted = computed(reference, case, F32, SIZES)
    assert errors(found["dvalue"], wanted["dvalue"])[0] <= 4e-2


@needs_interpreter
@pytest.mark.parametrize("exponent", [-14, 9])
def test_gradients_of_float16_are_neither_lost_nor_out_of_range(exponent):
    """Of scores they are smaller, or larger, than float16 has numbers, where those of queries are not."""
    if not FULL_GRID and exponent > 0:
        pytest.skip("one of the cases that make check-gpu runs")
    dtype, factor = np.dtype(np.float16), 2.0**exponent
    case = replace(BY_NAME["bias"], batch=1, key_heads=1, query_length=70, key_length=70)
    spec, (*arrays, dout) = case.spec(dtype), case.operands(dtype)
    with racing():
        found = both(pallas_gpu, spec, SIZES, Operands(*arrays), Cotangents(dout * dtype.type(factor)))
    gradients = {name: x / factor for name, x in named(*found).items()}
    for name, value in oracle(case, dtype).items():
        if name.startswith("d"):
            assert errors(gradients[name], value)[0] <= TOLERANCES["float16"][1], name


@pytest.mark.skipif(compat.missing_mosaic_gpu() is not None, reason=str(compat.missing_mosaic_gpu()))
def test_any_number_of_heads_is_within_the_limits_of_a_grid(monkeypatch):
    """CUDA has at most 65535 blocks along the second and the third axis of a grid; Pallas' last axis is the first."""
    grids, call = [], gpu.call

    def kept(body: Any, *, grid: Any, **settings: Any) -> Any:
        grids.append(tuple(grid.values()))
        return call(body, grid=grid, **settings)

    monkeypatch.setattr(gpu, "call", kept)
    case = replace(BY_NAME["biases of every shape"], batch=40_000)
    spec, types = case.spec(BF16), jax.eval_shape(lambda: case.operands(BF16))
    operands = Operands(*types[:5])

    def step(given: Operands) -> Any:
        found = pallas_gpu.forward(spec, SIZES, given)
        return pallas_gpu.backward(spec, SIZES, given, found.residuals, Cotangents(found.out))

    jax.eval_shape(step, operands)
    assert len(grids) > 4
    assert max(grid[-1] for grid in grids) > 65535
    assert all(number <= 65535 for grid in grids for number in grid[:-1])
