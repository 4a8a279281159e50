"""Every implementation of grouped matmul computes every use, with any group sizes."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tiers import examples

from autopallas.kernels.grouped_matmul.block_sizes import BlockSizes
from autopallas.kernels.grouped_matmul.operands import Operands
from autopallas.kernels.grouped_matmul.operation import OPERATION
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec
from autopallas.sites.device import Device
from autopallas.sites.elementwise import Score, traced
from autopallas.sites.operation import Unsupported

TOLERANCES = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2}
"""Of accumulation in float32 and one rounding to the dtype; the gradients are products of the same kind."""
USES = ("forward", "dlhs", "drhs")
SIZES = {
    "even": [6, 6, 6, 6, 6],
    "uneven": [1, 14, 3, 9, 3],
    "empty groups": [0, 17, 0, 13, 0],
    "one group has all": [0, 0, 30, 0, 0],
    "rows past the sum": [3, 5, 0, 7, 2],
    "no rows at all": [0, 0, 0, 0, 0],
    "more than there are": [9, 12, 4, 20, 8],
    "negative, so that groups overlap": [12, -5, 9, 0, 6],
}


def spec_of(use: Any, dtype: Any = "float32", rows: int = 30, inner: int = 7, columns: int = 11, groups: int = 5,
            batch: int = 1, **rest: Any) -> GroupedMatmulSpec:  # fmt: skip
    dtype = np.dtype(jnp.dtype(dtype))
    return GroupedMatmulSpec(use, batch, rows, groups, inner, columns, dtype, dtype, dtype, **rest)


def operands(spec: GroupedMatmulSpec, shared: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    """first, second, cotangent; ``shared``: the second one has no batch."""
    random = np.random.default_rng(spec.rows + spec.columns)
    shapes = [(spec.batch, *shape) for shape in (spec.first_shape(), spec.second_shape(), spec.result_shape())]
    if shared:
        shapes[1] = (1, *shapes[1][1:])
    dtypes = (spec.first_dtype, spec.second_dtype, spec.result_dtype)
    first, second, cotangent = (
        jnp.asarray(random.standard_normal(shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    return first, second, cotangent


def truth(use: str, first: Any, second: Any, sizes: Any) -> np.ndarray:
    """One example in float64, group by group.  ``sizes`` [G]."""
    first, second = (np.asarray(x, np.float64) for x in (first, second))
    rows, end = first.shape[0], np.cumsum(sizes)
    spans = [slice(max(int(e - n), 0), min(max(int(e), 0), rows)) for e, n in zip(end, sizes, strict=True)]
    if use == "drhs":
        return np.stack([first[s].T @ second[s] for s in spans])
    weights = second if use == "forward" else second.swapaxes(1, 2)
    out = np.zeros((rows, weights.shape[2]))
    for s, w in zip(spans, weights, strict=True):
        out[s] += first[s] @ w
    return out


def truths(spec: GroupedMatmulSpec, first: Any, second: Any, sizes: Any, cotangent: Any) -> dict[str, np.ndarray]:
    """The result and the gradients of both operands, with the batch."""
    forms = {
        "forward": ("dlhs", lambda a, b, c: (c, b), "drhs", lambda a, b, c: (a, c)),
        "dlhs": ("forward", lambda a, b, c: (c, b), "drhs", lambda a, b, c: (c, a)),
        "drhs": ("dlhs", lambda a, b, c: (b, c), "forward", lambda a, b, c: (a, c)),
    }
    use_a, of_a, use_b, of_b = forms[spec.use]
    found = []
    for i in range(spec.batch):
        a, b, n = (np.asarray(x, np.float64)[i if len(x) > 1 else 0] for x in (first, second, sizes))
        n = n.astype(int)
        c = np.asarray(cotangent, np.float64)[i]
        found.append((truth(spec.use, a, b, n), truth(use_a, *of_a(a, b, c), n), truth(use_b, *of_b(a, b, c), n)))
    return {
        name: np.stack(x) for name, x in zip(("result", "dfirst", "dsecond"), zip(*found, strict=True), strict=True)
    }


def error(found: Any, wanted: np.ndarray) -> float:
    """The largest error relative to the largest value, or to 0.01 where all are smaller."""
    found = np.asarray(found, np.float64)
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    apart = np.abs(found - wanted)[np.isfinite(wanted)]
    return float(apart.max(initial=0.0) / max(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0), 1e-2))


@cache
def everything(module: Any, spec: GroupedMatmulSpec, block: BlockSizes) -> Any:
    """Result and gradients of both operands, compiled once for all group sizes."""

    @jax.jit
    def run(first: Any, second: Any, group_sizes: Any, cotangent: Any) -> Any:
        result = module.forward(spec, block, Operands(first, second, group_sizes))
        whole = (jnp.broadcast_to(x, (spec.batch, *x.shape[1:])) for x in (first, second))
        return result, *module.backward(spec, block, Operands(*whole, group_sizes), cotangent)

    return run


class GroupedMatmulImplementation:
    """What an implementation has to do.  A subclass names it; what it does not support is skipped, with its reason."""

    name: str
    sizes = BlockSizes(8)
    dtype = "float32"

    @pytest.fixture
    def module(self) -> Any:
        return OPERATION.implementation(self.name)

    def run(self, module: Any, spec: GroupedMatmulSpec, *given: Any, sizes: BlockSizes | None = None) -> dict[str, Any]:
        answer = module.supports(spec, Device.current())
        if isinstance(answer, Unsupported):
            pytest.skip(f"{self.name}: {answer.reason}")
        found = dict(
            zip(("result", "dfirst", "dsecond"), everything(module, spec, sizes or self.sizes)(*given), strict=True)
        )
        assert found["result"].dtype == spec.result_dtype
        assert (found["dfirst"].dtype, found["dsecond"].dtype) == (spec.first_dtype, spec.second_dtype)
        return found

    def check(self, module: Any, spec: GroupedMatmulSpec, group_sizes: Any, shared: bool = False, **rest: Any) -> None:
        first, second, cotangent = operands(spec, shared)
        group_sizes = jnp.asarray(group_sizes, jnp.int32).reshape(-1, spec.groups)
        found = self.run(module, spec, first, second, group_sizes, cotangent, **rest)
        tolerance = TOLERANCES[spec.result_dtype.name]
        for name, wanted in truths(spec, first, second, group_sizes, cotangent).items():
            assert error(found[name], wanted) <= tolerance, f"{name}: {error(found[name], wanted):.2e}"

    @pytest.mark.parametrize("pattern", SIZES)
    @pytest.mark.parametrize("use", USES)
    def test_values_and_gradients(self, module, use, pattern):
        self.check(module, spec_of(use, self.dtype), SIZES[pattern])

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("use", USES)
    def test_narrow_dtypes(self, module, use, dtype):
        self.check(module, spec_of(use, dtype), SIZES["uneven"])

    @pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 5, 3, 4), (37, 1, 13, 3), (29, 9, 1, 2), (64, 16, 8, 16)])
    def test_odd_shapes(self, module, shape):
        rows, inner, columns, groups = shape
        group_sizes = np.random.default_rng(rows).multinomial(rows, [1 / groups] * groups)
        spec = spec_of("forward", self.dtype, rows, inner, columns, groups)
        self.check(module, spec, group_sizes, sizes=BlockSizes(min(8, rows)))

    @pytest.mark.parametrize("block", [1, 3, 16, 30])
    @pytest.mark.parametrize("use", USES)
    def test_any_block_size_gives_the_same(self, module, use, block):
        self.check(module, spec_of(use, self.dtype), SIZES["uneven"], sizes=BlockSizes(block))

    @pytest.mark.parametrize("shared", [False, True])
    def test_a_batch_with_sizes_of_its_own(self, module, shared):
        group_sizes = [SIZES["uneven"], SIZES["rows past the sum"], SIZES["empty groups"]]
        self.check(module, spec_of("forward", self.dtype, batch=3), group_sizes, shared=shared)

    def test_a_narrow_dot_may_give_a_wide_result(self, module):
        bf16, f32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
        spec = GroupedMatmulSpec("forward", 1, 30, 5, 7, 11, bf16, bf16, f32)
        first, second, cotangent = operands(spec)
        group_sizes = jnp.asarray([SIZES["uneven"]])
        found = self.run(module, spec, first, second, group_sizes, cotangent)
        wanted = truths(spec, first, second, group_sizes, cotangent)
        assert error(found["result"], wanted["result"]) < 1e-6  # a rounding to bfloat16 would cost 4e-3

    @pytest.mark.parametrize("use", USES)
    @pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")], ids=str)
    def test_the_wider_of_two_operands_is_not_rounded(self, module, use, dtypes):
        """As rows in float32 meet the weights of experts in bfloat16."""
        first, second = (np.dtype(jnp.dtype(d)) for d in dtypes)
        spec = GroupedMatmulSpec(use, 1, 30, 5, 7, 11, first, second, np.dtype(np.float32))
        first, second, cotangent = operands(spec)
        group_sizes = jnp.asarray([SIZES["uneven"]])
        found = self.run(module, spec, first, second, group_sizes, cotangent)
        wanted = truths(spec, first, second, group_sizes, cotangent)
        for name, value in wanted.items():
            # One rounding to the operand's dtype at the end.
            assert error(found[name], value) < (1e-5 if found[name].dtype == np.float32 else 8e-3), name

    @pytest.mark.parametrize("use", USES[:2])
    def test_an_epilogue(self, module, use):
        """In the product's dtype, in rows of no group too; it may give another dtype."""
        if not getattr(module, "EPILOGUES", False):
            pytest.skip(f"{self.name}: has no epilogues; its sites apply them to what it gives")
        program = traced(lambda y: jax.nn.sigmoid(y * 2).astype(jnp.float32), Score(np.dtype(jnp.bfloat16)))
        spec = spec_of(use, "bfloat16", epilogue=program)
        first, second, _ = operands(spec)
        if isinstance(answer := module.supports(spec, Device.current()), Unsupported):
            pytest.skip(f"{self.name}: {answer.reason}")
        group_sizes = jnp.asarray([SIZES["rows past the sum"]])
        found = jax.jit(partial(module.forward, spec, self.sizes))(Operands(first, second, group_sizes))
        assert found.dtype == jnp.float32
        product = truth(use, first[0], second[0], SIZES["rows past the sum"])
        assert error(found[0], 1 / (1 + np.exp(-2 * product))) < TOLERANCES["bfloat16"]

    # Each subclass runs this test for itself; what one of them finds need not fail in the other.
    @settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
    @given(group_sizes=st.lists(st.integers(0, 12), min_size=5, max_size=5), use=st.sampled_from(USES))
    def test_all_group_sizes(self, module, group_sizes, use):
        self.check(module, spec_of(use, self.dtype), group_sizes)

    def test_what_one_group_holds_does_not_reach_another(self, module):
        group_sizes = [SIZES["rows past the sum"]]
        for use in USES:
            spec = spec_of(use, self.dtype)
            first, second, cotangent = operands(spec)
            first = first.at[0, 4, 2].set(jnp.nan).at[0, 20, 1].set(jnp.inf)  # a row of group 1, and one past the sum
            if use == "drhs":
                second = second.at[0, 9, 3].set(jnp.inf)  # a row of group 3
            found = self.run(module, spec, first, second, jnp.asarray(group_sizes), cotangent)["result"][0]
            finite = np.isfinite(np.asarray(found)).reshape(found.shape[0], -1).all(axis=1)
            touched = {1, 3} if use == "drhs" else {4}
            assert set(np.flatnonzero(~finite)) == touched

    def test_only_the_gradients_asked_for(self, module):
        spec = spec_of("forward", self.dtype)
        first, second, cotangent = operands(spec)
        group_sizes = jnp.asarray([SIZES["uneven"]])
        given = Operands(first, second, group_sizes)
        dfirst, dsecond = module.backward(spec, self.sizes, given, cotangent, (False, True))
        assert dfirst is None
        assert dsecond.shape == second.shape


class TestReference(GroupedMatmulImplementation):
    name = "reference"


class TestXla(GroupedMatmulImplementation):
    name = "xla"

    def test_nothing_grows_with_groups_times_rows(self, module):
        spec = spec_of("forward", rows=4096, inner=64, columns=64, groups=16)
        first, second, cotangent = operands(spec)
        group_sizes = jnp.full((1, 16), 256, jnp.int32)

        def both(given: Operands, cotangent: Any) -> Any:
            gradients = module.backward(spec, BlockSizes(128), given, cotangent)
            return module.forward(spec, BlockSizes(128), given), gradients

        compiled = jax.jit(both).lower(Operands(first, second, group_sizes), cotangent).compile()
        expanded = 16 * 4096 * 64 * 4
        assert compiled.memory_analysis().temp_size_in_bytes < expanded / 4

    def test_weights_that_may_be_infinite_are_left_to_the_original(self, module):
        assert isinstance(module.supports(spec_of("forward", assume_finite=False), Device.current()), Unsupported)
