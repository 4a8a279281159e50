"""Attention of few queries on a GPU: rows of several heads in a tile, and keys that several blocks of threads divide.

Interpreted with detection of races, and compiled.  ``make check-gpu`` runs every case (``FULL_GRID=1``).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import KEY, QUERY, SCORE, Case, oracle, side, traced
from support.oracle import errors
from test_attention_implementations import TOLERANCES, AttentionImplementation, computed
from test_attention_pallas_gpu import BF16, F32, FULL_GRID, H100, TestPallasGpu, needs_interpreter, needs_mosaic, racing

import autopallas
from autopallas.compile import gpu as compile_gpu
from autopallas.kernels import gpu
from autopallas.kernels.attention import gpu_block_sizes, gpu_few_queries, pallas_gpu, reference, tuned_block_sizes
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.operands import Operands
from autopallas.kernels.attention.spec import Layouts, SideSpec
from autopallas.kernels.gpu import SHARED_MEMORY
from autopallas.tuning.table import Row
from autopallas.workbench.cases import only_match
from benchmarks import gpu_attention_decode

SIZES = BlockSizes(64, 64, blocks_per_processor=1)
I32, BOOL = np.dtype(np.int32), np.dtype(np.bool_)


@pytest.fixture
def processors(monkeypatch):
    """Has three processors where kernels are interpreted, so that the keys of one head are divided among three; and has
    blocks that a mask hides left out of arrays as small as these."""
    for module in (gpu, gpu_block_sizes):
        monkeypatch.setattr(module, "processors", lambda device: 3)
    monkeypatch.setattr(gpu_few_queries, "_SEARCHED_FROM", 0)


QUICK_DIVIDED = {
    f"test_values_and_gradients[{name}]" for name in ("grouped queries", "sink and rows without keys", "lengths")
}


@needs_interpreter
class TestFewQueries(TestPallasGpu):
    """The cases of all implementations, with one head, whose keys three blocks of threads divide."""

    sizes = SIZES

    @pytest.fixture(autouse=True)
    def interpreted(self, request, processors):
        if not FULL_GRID and request.node.name not in QUICK_DIVIDED:
            pytest.skip("one of the cases that make check-gpu runs")
        with racing():
            yield

    def resized(self, case):
        return few(case)

    def check(self, module, case, dtype, sizes):
        case, dtype = few(case), "bfloat16" if dtype == "float32" else dtype
        assert gpu_block_sizes.divided(case.spec(np.dtype(dtype)), self.sizes) is not None
        AttentionImplementation.check(self, module, case, dtype, self.sizes)


def few(case: Case) -> Case:
    """One head of one example or two, and keys of several tiles, the last not whole."""
    batch = 2 if case.name == "lengths" else 1
    return replace(case, batch=batch, key_heads=1, groups=min(case.groups, 2), key_length=case.key_length + 117)


def _varies(letters: str) -> tuple[bool, bool, bool, bool, bool]:
    b, k, g, t, s = (axis in letters for axis in "BKGTS")
    return b, k, g, t, s


def _masked(condition: Any, *inputs: Any, fill: Any = -np.inf, **rest: Any) -> Any:
    score = traced(lambda s, *rest: jnp.where(condition(*rest), s * np.float32(0.3), fill), SCORE, *inputs)
    return dict(score=score, live=traced(condition, *inputs), **rest)


LENGTHS = SideSpec(I32, _varies("B"))
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lengths": _masked(lambda j, n: j < n, KEY, side(0, I32), sides=(LENGTHS,), draw="l"),
    "lengths, finite fill": _masked(
        lambda j, n: j < n, KEY, side(0, I32), fill=np.float32(-1e9), sides=(LENGTHS,), draw="l"
    ),
    "positions after those of the cache": _masked(
        lambda i, j, n: j <= n + i, QUERY, KEY, side(0, I32), sides=(LENGTHS,), draw="l"
    ),
    "window": _masked(lambda i, j: (i + 100 >= j) & (i + 100 - j < 70), QUERY, KEY),
    "bias": dict(
        score=traced(lambda s, b: s + b, SCORE, side(0)), sides=(SideSpec(F32, _varies("KGTS")),), draw="n"
    ),
    "slopes and a mask": _masked(
        lambda m: m, side(0, BOOL), sides=(SideSpec(BOOL, _varies("BTS")), SideSpec(F32, _varies("KG"))), draw="mp"
    )
    | dict(
        score=traced(
            lambda s, i, j, m, slope: jnp.where(m, s * np.float32(0.3) - slope * (i - j).astype(F32), -np.inf),
            SCORE, QUERY, KEY, side(0, BOOL), side(1),
        ),
    ),
    "sink": dict(sink=_varies("KG")),
}  # fmt: skip
SHAPES = [
    (kind, size, groups, length)
    for (n, kind), (size, (groups, length)) in itertools.product(
        enumerate(KINDS), zip((64, 128) * 6, itertools.product((1, 3, 8), (1, 2, 4, 16)), strict=True)
    )
    if (groups + length + n) % 2 or kind in ("lengths", "slopes and a mask")
]
QUICK = {("slopes and a mask", 64, 3, 4), ("positions after those of the cache", 128, 8, 16), ("lengths", 64, 1, 1)}


def case_of(kind: str, size: int, groups: int, length: int) -> Case:
    sizes = dict(batch=2, key_heads=1, key_length=333, head_size=size, value_head_size=size)
    varies = tuple(x and n > 1 for x, n in zip(_varies("BKGTS"), (2, 1, groups, length, 333), strict=True))

    def shaped(side: SideSpec) -> SideSpec:
        return replace(side, varies=tuple(a and b for a, b in zip(side.varies, varies, strict=True)))

    given = KINDS[kind]
    return Case(kind, groups=groups, query_length=length, **sizes,
                **given | {"sides": tuple(map(shaped, given.get("sides", ())))})  # fmt: skip


@needs_interpreter
@pytest.mark.parametrize("kind, size, groups, length", SHAPES)
def test_shares_of_the_keys_are_joined_exactly(kind, size, groups, length, processors):
    if not FULL_GRID and (kind, size, groups, length) not in QUICK:
        pytest.skip("one of the cases that make check-gpu runs")
    case = case_of(kind, size, groups, length)
    sizes = BlockSizes(64, 64 if size == 64 else 128, blocks_per_processor=2)
    spec = case.spec(BF16)
    tiles, blocks = gpu_block_sizes.divided(spec, sizes)
    assert (tiles.warpgroups, blocks) == (2 if size == 64 or groups * length > 64 else 1, 3)
    *arrays, _ = case.operands(BF16)
    with racing():
        out, (logsumexp,), _ = pallas_gpu.forward(spec, sizes, Operands(*arrays))
    wanted = oracle(case, BF16)
    assert out.dtype == BF16
    assert errors(np.asarray(out, np.float64), wanted["out"])[0] <= 1e-2
    assert errors(np.asarray(logsumexp, np.float64), wanted["logsumexp"])[0] <= 1e-5


LAYOUTS = [Layouts.with_heads_after_lengths(), Layouts((0, 2, 1, 3, 4), (1, 0, 2, 3))]


@needs_interpreter
@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
def test_arrays_are_read_in_any_order(layouts, processors):
    if not FULL_GRID:
        pytest.skip("one of the cases that make check-gpu runs")
    case = case_of("positions after those of the cache", 64, 3, 4)
    with racing():
        found = computed(pallas_gpu, case, BF16, SIZES, layouts=layouts)
    for part, value in oracle(case, BF16).items():
        assert errors(found[part], value)[0] <= TOLERANCES["bfloat16"][part.startswith("d")], part


@needs_interpreter
@pytest.mark.parametrize("kind", ["lengths", "slopes and a mask"])
def test_small_caches_are_read_whole(kind, processors, monkeypatch):
    """Which blocks a mask hides is not found before; results are the same."""
    if not FULL_GRID and kind != "lengths":
        pytest.skip("one of the cases that make check-gpu runs")
    case = case_of(kind, 64, 3, 4)
    *arrays, _ = case.operands(BF16)
    found = []
    for least in (0, 2**20):
        monkeypatch.setattr(gpu_few_queries, "_SEARCHED_FROM", least)
        plan, _ = gpu_few_queries._Plan.of(case.spec(BF16), SIZES, Operands(*arrays))
        assert (plan.pieces is not None) == (least == 0)
        with racing():
            found.append(pallas_gpu.forward(case.spec(BF16), SIZES, Operands(*arrays)))
    assert errors(*(np.asarray(x.out, np.float64) for x in found))[0] <= 1e-2
    assert errors(np.asarray(found[1].out, np.float64), oracle(case, BF16)["out"])[0] <= 1e-2


@needs_interpreter
@pytest.mark.parametrize("kind", ["full", "lengths"])
def test_shares_without_keys_and_rows_that_are_not_finite(kind, processors):
    """More shares than keys are visited; NaNs and infinities reach the rows that they reach in the original."""
    case = case_of(kind, 64, 2, 2)
    query, key, value, sides, sink, _ = case.operands(BF16)
    if kind == "lengths":  # one example has one key, the other those of one tile
        sides = (jnp.asarray([1, 64], I32).reshape(sides[0].shape),)
    query = query.at[0, 0, 1, 0, 3].set(jnp.nan).at[1, 0, 0, 1, 5].set(jnp.inf)
    value = value.at[1, 0, 5, 7].set(jnp.inf).at[1, 0, 300, 9].set(jnp.nan)
    operands = Operands(query, key, value, sides, sink)
    spec = case.spec(BF16, assume_finite=kind == "lengths")
    with racing():
        found = pallas_gpu.forward(spec, replace(SIZES, blocks_per_processor=4), operands)
    wanted = reference.forward(spec, None, operands)
    if kind == "lengths":  # values at keys without any weight are assumed to be finite
        wanted = reference.forward(spec, None, operands._replace(value=value.at[1, 0, 300, 9].set(0)))
    assert errors(np.asarray(found.out, np.float64), np.asarray(wanted.out, np.float64))[0] <= 1e-2
    np.testing.assert_array_equal(np.isnan(found.rows[0]), np.isnan(wanted.rows[0]))


def decoding(batch: int, heads: int, groups: int, keys: int, size: int = 128) -> Any:
    """The spec of a step of decoding under lengths."""
    case = replace(case_of("lengths", size, groups, 1), batch=batch, key_heads=heads, key_length=keys)
    return case.spec(BF16)


def test_examples_visit_the_blocks_from_the_first_to_the_last_with_keys():
    case = replace(case_of("lengths", 64, 1, 2), batch=5, key_length=333)
    spec = case.spec(BF16)
    lengths = jnp.asarray([1, 64, 65, 333, 0], I32).reshape(5, 1, 1, 1, 1)
    found = gpu_few_queries._pieces(spec, 64, [lengths])
    # Rows without any key see all of them: their weights are alike.
    np.testing.assert_array_equal(found, [[0, 1], [0, 1], [0, 2], [0, 6], [0, 6]])
    mask = jnp.zeros((5, 1, 1, 2, 333), bool).at[:, :, :, :, 200].set(True).at[0, 0, 0, 0, 70].set(True)
    given = case_of("slopes and a mask", 64, 1, 2)
    given = replace(given, batch=5, sides=(replace(given.sides[0], varies=(True, False, False, True, True)),),
                    score=_masked(lambda m: m, side(0, BOOL))["score"], draw="m")  # fmt: skip
    np.testing.assert_array_equal(gpu_few_queries._pieces(given.spec(BF16), 64, [mask]), [[1, 3]] + [[3, 1]] * 4)
    assert gpu_few_queries._pieces(case_of("window", 64, 1, 2).spec(BF16), 64, []) is None


def test_keys_are_divided_among_the_processors():
    with compile_gpu.H100.targeted():
        for batch, heads, groups, keys, wanted in (
            (1, 8, 4, 4096, 16), (16, 8, 4, 8192, 1), (4, 8, 1, 4096, 4), (1, 1, 8, 640, 10), (64, 32, 1, 4096, 1)
        ):  # fmt: skip
            spec = decoding(batch, heads, groups, keys)
            first = gpu_block_sizes.candidates(spec)[0]
            found = gpu_block_sizes.divided(spec, SIZES)
            assert found is not None
            assert found[1] == wanted
            assert first.blocks_per_processor > 0
        alone = replace(decoding(20, 8, 4, 8192), live=None, score=traced(lambda s: s * np.float32(0.3), SCORE))
        # 160 heads take two rounds; four blocks for each take five of a quarter.
        assert gpu_block_sizes.divided(alone, SIZES)[1] == 1
        assert gpu_block_sizes.divided(alone, replace(SIZES, blocks_per_processor=7))[1] == 4


@pytest.mark.parametrize("size", [40, 64, 96, 128, 192, 256])
def test_tiles_of_few_queries_fit_into_shared_memory(size):
    with compile_gpu.H100.targeted():
        for groups, keys in itertools.product((1, 8, 64, 128, 129), (64, 128)):
            sizes = replace(SIZES, key_block=keys)
            found = gpu_block_sizes.divided(spec := decoding(1, 2, groups, 4096, size), sizes)
            assert (found is None) == (groups > (128 if size <= 128 else 64))
            if found is not None:
                assert gpu_block_sizes.shared_memory(spec, "few_queries", found[0]) <= SHARED_MEMORY
                assert gpu_block_sizes.fitting(spec, sizes).blocks_per_processor == 1
            else:
                assert gpu_block_sizes.fitting(spec, sizes).blocks_per_processor == 0


def test_sizes_of_many_queries_do_not_say_that_keys_are_not_divided():
    spec = decoding(1, 8, 4, 4096)
    with compile_gpu.H100.targeted():
        assert pallas_gpu.default_block_sizes(spec, H100, BlockSizes(128, 128)).blocks_per_processor == 1
        assert pallas_gpu.default_block_sizes(spec, H100, BlockSizes(64, 128)).blocks_per_processor == 0
        windows = replace(decoding(64, 32, 2, 64), query_length=64)
        assert pallas_gpu.default_block_sizes(windows, H100, BlockSizes(128, 128)).blocks_per_processor == 0


# ---------------------------------------------------------------------- what a program has


def repeated(query: Any, key: Any, value: Any, lengths: Any) -> Any:
    return gpu_attention_decode.naive("lengths", query, key, value, lengths)


def grouped(query: Any, key: Any, value: Any, lengths: Any) -> Any:
    b, t, n, d = query.shape
    grouped = query.reshape(b, t, key.shape[2], n // key.shape[2], d)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, key, preferred_element_type=jnp.float32) * d**-0.5
    shown = jnp.arange(key.shape[1])[None] < lengths[:, None]
    weights = jax.nn.softmax(jnp.where(shown[:, None, None, None], scores, -jnp.inf), axis=-1).astype(query.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(b, t, n, d)


def library(query: Any, key: Any, value: Any, lengths: Any) -> Any:
    shown = jnp.arange(key.shape[1])[None, None, None] < lengths[:, None, None, None]
    return jax.nn.dot_product_attention(query, key, value, mask=shown)


def positions(query: Any, key: Any, value: Any, lengths: Any) -> Any:
    """After the cache has got the keys of this step."""
    t, groups = query.shape[1], query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(jax.lax.dynamic_update_slice(x, x[:, :t] * 2, (0, 3, 0, 0)), groups, 2)
                  for x in (key, value))  # fmt: skip
    scores = jnp.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(query.shape[-1]).astype(query.dtype)
    shown = jnp.arange(key.shape[1]) <= lengths[:, None, None, None] + jnp.arange(t)[:, None]
    weights = jax.nn.softmax(jnp.where(shown, scores.astype(jnp.float32), -jnp.inf), axis=-1).astype(query.dtype)
    return jnp.einsum("bnts,bsnd->btnd", weights, value)


STEPS = [repeated, grouped, library, positions]


def decoded(length: int, heads: int) -> tuple[Any, ...]:
    b, s, k, d = 2, 2048, 4, 64
    shapes = (b, length, heads, d), (b, s, k, d), (b, s, k, d)
    return *(jax.ShapeDtypeStruct(shape, BF16) for shape in shapes), jax.ShapeDtypeStruct((b,), I32)


@needs_mosaic
@pytest.mark.parametrize("length, heads", [(1, 16), (1, 4), (4, 16)])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_step_of_decoding_takes_the_kernel_by_a_measured_row(step, length, heads, monkeypatch):
    """As people write it, by default options; without a row its code stays."""
    types = decoded(length, heads)
    spec = only_match(step, types, "attention").spec
    row = Row(SIZES, 100.0, 400.0, 1, 2, "measured", "2026-11-27", "jax 0.11.2")
    key = tuned_block_sizes.table_key(spec, "pallas_gpu", "forward")
    assert key[3] == "decode"
    for rows in ({key: row}, {}):
        monkeypatch.setattr(tuned_block_sizes.TABLE, "rows", {"NVIDIA H100": rows})
        optimized = autopallas.optimize(step)
        with compile_gpu.H100.targeted():
            text = optimized.trace(*types).lower(lowering_platforms=("cuda",)).as_text()
        assert ("few_queries" in text) == bool(rows)


def test_keys_that_are_divided_fill_a_gpu():
    row = Row(SIZES, 100.0, 400.0, 1, 2, "measured", "2026-11-27", "jax 0.11.2")

    def share(row: Any, **sizes: int) -> float:
        match: Any = SimpleNamespace(spec=decoding(**sizes))
        return tuned_block_sizes.share_of_gain(match, row, H100)

    assert share(row, batch=1, heads=8, groups=4, keys=4096) == 1.0
    assert share(row, batch=1, heads=1, groups=4, keys=1024) == pytest.approx(8 / 132)
    assert share(replace(row, block_sizes=BlockSizes(64, 64)), batch=1, heads=8, groups=1, keys=4096) == 8 / 132


@pytest.mark.parametrize("shape", gpu_attention_decode._TIMED, ids=lambda shape: shape.name)
def test_what_is_timed_is_what_is_recognised(shape):
    found = only_match(
        partial(gpu_attention_decode.naive, shape.mask),
        jax.eval_shape(partial(gpu_attention_decode.operands, shape)),
        "attention",
    ).spec
    given = gpu_attention_decode.spec_of(shape)
    assert (str(found), found.sides, found.groups) == (str(given), given.sides, given.groups)


# ---------------------------------------------------------------------- what the compiler says

compiles = pytest.mark.skipif(
    not FULL_GRID or compile_gpu.missing() is not None,
    reason=f"make check-gpu runs it, with the compiler ({compile_gpu.missing() or 'which is here'})",
)


@pytest.fixture(scope="module")
def compiler() -> Any:
    with compile_gpu.Compiler() as compiler:
        yield compiler


@compiles
@pytest.mark.parametrize("size, keys", [(64, 64), (64, 128), (96, 64), (128, 64), (128, 128), (192, 64), (256, 64)])
@pytest.mark.parametrize("groups, length", [(1, 1), (8, 1), (4, 4), (8, 16)])
@pytest.mark.parametrize("kind", ["full", "lengths", "positions after those of the cache"])
def test_the_compiler_takes_few_queries(compiler, kind, size, groups, length, keys):
    """Without spills; keys and values, which are as long as they are, are not copied."""
    case = replace(case_of(kind, size, groups, length), batch=2, key_heads=4, key_length=16384)
    spec = case.spec(BF16, layouts=Layouts.with_heads_after_lengths())
    with compile_gpu.H100.targeted():
        found = gpu_block_sizes.divided(spec, sizes := replace(SIZES, key_block=keys))
    if found is None:
        assert groups * length > 64
        assert size > 128
        return
    *types, _ = jax.eval_shape(lambda: case.operands(BF16))

    def run(query: Any, key: Any, value: Any, *rest: Any) -> Any:
        key, value = (jnp.moveaxis(x, 1, 2) for x in (key, value))
        return pallas_gpu.forward(spec, sizes, Operands(query, key, value, *rest)).out

    cache = jax.ShapeDtypeStruct((2, 16384, 4, size), BF16)
    compiled = compiler.compile(run, (types[0], cache, cache, *types[3:]))
    print(f"\n{spec} {sizes} {found}", *compiled.kernels, f"temporary memory {compiled.temporary_bytes}", sep="\n  ")
    assert compiled.faults() == ()
    (kernel,) = compiled.kernels
    estimate = gpu_block_sizes.shared_memory(spec, "few_queries", found[0])
    assert abs(estimate / kernel.shared_bytes - 1) <= 0.25
    assert compiled.copied_bytes <= cache.size // 8
