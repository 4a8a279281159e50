"""Every implementation of attention computes every case."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, KEY, QUERY, SCORE, Case, named, oracle, promoted_spec
from support.oracle import errors

from autopallas.kernels.attention import reference
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.operands import Cotangents, Gradients, Operands, Results
from autopallas.kernels.attention.operation import OPERATION
from autopallas.kernels.attention.programs import traced
from autopallas.kernels.attention.schedule import schedule
from autopallas.kernels.attention.spec import SideSpec, Weight
from autopallas.sites.device import Device
from autopallas.sites.elementwise import Side
from autopallas.sites.operation import Unsupported

TOLERANCES = {"float32": (1e-5, 5e-5), "float16": (4e-3, 1e-2), "bfloat16": (2e-2, 4e-2)}
BY_NAME = {case.name: case for case in CASES}
MIXED = (
    ("float32", "bfloat16", "bfloat16"),
    ("float32", "float32", "bfloat16"),
    ("bfloat16", "float16", "float16"),
    ("bfloat16", "bfloat16", "bfloat16"),
)
"""Dtypes of queries, keys and values."""

SPELLINGS_OF_TEMPERATURES = {
    "divided by a number": (lambda s, t: s / t, ""),
    "divided for each row": (lambda s, t: s / t, "BKGT"),
    "divided for each key": (lambda s, t: s / t, "S"),
    "divided by a root": (lambda s, t: s / jnp.sqrt(t), "BK"),
    "multiplied for each row": (lambda s, t: s * t, "BKGT"),
    "a product subtracted first": (lambda s, t: (s - 1000 * t) * t, "TS"),
    "a negated quotient": (lambda s, t: -(s / (abs(t) + 1)), "BKGTS"),
    "a product of quotients": (lambda s, t: s * s * np.float32(1e-3) * (t * 0.8) * -(1.8 / t), "TS"),
}
"""A program of the score and a side input, and along which axes that varies."""


def computed(module: ModuleType, case: Case, dtype: Any, sizes: BlockSizes, **changes: Any) -> dict[str, np.ndarray]:
    spec = case.spec(dtype, **changes)
    *arrays, dout = case.operands(dtype)
    operands = Operands(*arrays)

    @jax.jit
    def run(operands: Operands) -> Any:
        return both(module, spec, sizes, operands, Cotangents(dout))

    results, gradients = run(operands)
    assert results.out.dtype == spec.result_dtype
    assert [x.dtype for x in results.rows] == [spec.accumulation_dtype]
    for gradient, operand in zip(gradients[:3], operands[:3], strict=True):
        assert gradient.dtype == operand.dtype
    for gradient, operand, side in zip(gradients.sides, operands.sides, spec.sides, strict=True):
        assert gradient.dtype == operand.dtype if side.differentiable else gradient is None
    return named(results, gradients)


def both(
    module: ModuleType, spec: Any, sizes: BlockSizes | None, operands: Operands, cotangents: Cotangents
) -> tuple[Results, Gradients]:
    """The forward's results, and the gradients that the backward makes of its residuals."""
    results = module.forward(spec, sizes, operands)
    return results, module.backward(spec, sizes, operands, results.residuals, cotangents)


class AttentionImplementation:
    """What an implementation has to do.  A subclass names it; what it does not support is skipped, with its reason."""

    name: str
    sizes = BlockSizes(8, 16)

    @pytest.fixture
    def module(self) -> Any:
        return OPERATION.implementation(self.name)

    def require(self, module: ModuleType, spec: Any) -> None:
        """Skips the test, with the reason, where the implementation does not support the spec."""
        answer = module.supports(spec, Device.current())
        if isinstance(answer, Unsupported):
            pytest.skip(f"{self.name}: {answer.reason}")

    def resized(self, case: Case) -> Case:
        """The case as large as this implementation wants it."""
        return case

    def check(self, module: ModuleType, case: Case, dtype: str, sizes: BlockSizes) -> None:
        dtype = jnp.dtype(dtype)
        answer = module.supports(case.spec(dtype), Device.current())
        if isinstance(answer, Unsupported):
            pytest.skip(f"{self.name}: {answer.reason}")
        found, wanted = computed(module, case, dtype, sizes), oracle(case, dtype)
        own = None
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            tolerance = TOLERANCES[dtype.name][name.startswith("d")]
            largest, mean = errors(found[name], value)
            if largest > tolerance:  # the plain formula's own error in this precision counts twice
                own = own or computed(reference, case, dtype, sizes)
                tolerance = max(tolerance, 2 * errors(own[name], value)[0])
            assert largest <= tolerance, f"{name}: max error {largest:.2e}, mean {mean:.2e}, allowed {tolerance:.2e}"

    @pytest.mark.parametrize("name", BY_NAME)
    def test_values_and_gradients(self, module, name):
        self.check(module, BY_NAME[name], "float32", self.sizes)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize(
        "name", ["full with odd sizes", "causal", "bias", "probabilities multiplied", "large logits"]
    )
    def test_narrow_operands(self, module, name, dtype):
        self.check(module, BY_NAME[name], dtype, self.sizes)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_backward_probabilities_are_at_most_1_whatever_the_scores(self, module, dtype):
        """Scores of 1e7, summed in another order than in the forward, would differ by more than an exponent holds."""
        case = self.resized(Case("enormous scores", size=1e7, query_length=32, groups=2))
        self.require(module, case.spec(jnp.dtype(dtype)))
        dvalue = computed(module, case, jnp.dtype(dtype), self.sizes)["dvalue"]
        most = np.abs(np.asarray(case.operands(jnp.dtype(dtype))[5], np.float64)).sum(axis=(2, 3))[:, :, None]
        assert np.all(np.abs(dvalue) <= 1.01 * most), (np.abs(dvalue) / most).max()

    @pytest.mark.parametrize(
        "name", ["soft cap and position bias", "sink and rows without keys", "weights inside the sum"]
    )
    def test_sums_over_rows_do_not_add_up_what_the_result_was_rounded_by(self, module, name):
        """The gradients of a slope and of a sink: what the keys of a row contribute cancels."""
        self.check(module, replace(BY_NAME[name], batch=1, query_length=77, key_length=83), "bfloat16", self.sizes)

    @pytest.mark.parametrize(
        "name, sizes",
        [
            ("causal with a fill of -inf", BlockSizes(256, 256)),
            ("causal with a fill of -inf", BlockSizes(8, 1000)),
            ("sliding window", BlockSizes(16, 8)),
            ("weights inside the sum", BlockSizes(1000, 8)),
        ],
        ids=str,
    )
    def test_any_block_sizes(self, module, name, sizes):
        self.check(module, BY_NAME[name], "float32", sizes)

    def test_rows_whose_weights_are_all_zero_divide_zero_by_zero(self, module):
        """As the original does; the other rows are as they would be without them."""
        case = replace(BY_NAME["negative weights inside the sum, a mask and a sink"], sink=None)
        spec, (query, key, value, (weights,), _, _) = case.spec(), case.operands()
        self.require(module, spec)
        weights = jnp.abs(weights).at[:, :, :, 5].set(0).at[:, :, :, :, 0].add(1).at[:, :, :, 7:].multiply(1e-3)
        weights = weights.at[:, :, :, 5].set(0)
        out = module.forward(spec, self.sizes, Operands(query, key, value, (weights,))).out
        assert np.all(np.isnan(np.asarray(out, np.float32)[:, :, :, 5]))
        assert np.all(np.isfinite(np.asarray(out, np.float32)[:, :, :, 6:]))

    @pytest.mark.parametrize("dtypes", MIXED, ids=str)
    def test_products_read_what_the_originals_do(self, module, dtypes):
        """Scores, probabilities and the result are in float32, whatever the operands are; keys and values have an
        offset, so that a gradient of scores or a probability that is rounded to 16 bits shows."""
        case = self.resized(replace(BY_NAME["causal"], key_length=40, size=0.02))
        names = ("query_dtype", "key_dtype", "value_dtype")
        spec = replace(case.spec(), **{n: jnp.dtype(d) for n, d in zip(names, dtypes, strict=True)}, weights_dtype=None)
        self.require(module, spec)
        query, key, value, _, _, dout = case.operands()
        operands = [x.astype(d) for x, d in zip((query, key + 64, value + 8), dtypes, strict=True)]

        @jax.jit
        def run(*given: Any) -> Any:
            return both(module, spec, self.sizes, Operands(*given), Cotangents(dout))

        with jax.enable_x64(True):
            wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (*operands, dout)]
            double, cotangents = promoted_spec(spec), Cotangents(wide[3])
            wanted = named(*both(reference, double, None, Operands(*wide[:3]), cotangents))
        found = named(*run(*operands))
        result_dtypes = dict(zip(("dquery", "dkey", "dvalue"), dtypes, strict=True))
        for name, value in wanted.items():
            dtype = jnp.dtype(result_dtypes.get(name, "float32"))
            # One rounding at the end; before it, sums of keys of 64 with gradients that add up to zero.
            tolerance = 2e-4 if dtype == np.float32 else float(jnp.finfo(dtype).eps)
            largest, _ = errors(found[name], value)
            assert largest <= tolerance, f"{name}: max error {largest:.2e}, allowed {tolerance:.2e}"

    @pytest.mark.parametrize("name", ["causal", "blocks", "rows without keys, finite fill"])
    def test_skipped_tiles_change_nothing(self, module, name):
        case = BY_NAME[name]
        skipping = computed(module, case, jnp.float32, self.sizes, assume_finite=True)
        computing = computed(module, case, jnp.float32, self.sizes, assume_finite=False)
        for name, value in computing.items():
            assert errors(skipping[name], value)[0] <= 1e-6, name

    def test_without_assume_finite_a_nan_in_a_masked_value_reaches_the_result(self, module):
        case = BY_NAME["causal"]
        query, key, value, *_ = case.operands()
        value = value.at[:, :, -1].set(jnp.nan)
        spec = case.spec(assume_finite=False)
        out = module.forward(spec, self.sizes, Operands(query, key, value)).out
        assert jnp.all(jnp.isnan(out))

    @pytest.mark.parametrize(
        "name",
        [
            "causal", "rows without keys, fill -inf", "sink", "probabilities masked again", "weights inside the sum",
            "negative weights inside the sum, a mask and a sink",
        ],
    )  # fmt: skip
    def test_row_statistics(self, module, name):
        """Numerator, sum, maxima, and the gradients of the first two."""
        case = BY_NAME[name]
        far, scaled = (
            traced(lambda i, j: i > j + 2, QUERY, KEY),
            traced(lambda j: j.astype(np.float32) * np.float32(0.1) - np.float32(1), KEY),
        )
        statistics = (
            (Weight("where", far), Weight("multiply", scaled)),
            case.spec().score,
            traced(lambda s: s * np.float32(-2), SCORE),
        )
        spec = replace(case.spec(), statistics=statistics, live=None)  # the last one is over all keys
        answer = module.supports(spec, Device.current())
        if isinstance(answer, Unsupported):
            pytest.skip(f"{self.name}: {answer.reason}")
        *arrays, dout = case.operands()

        def run(module, spec, sizes, operands, dout):
            out, rows, _ = results = module.forward(spec, sizes, operands)
            cotangents = Cotangents(dout, (jnp.sin(rows[0]), jnp.cos(rows[2])))
            return (out, *rows, *module.backward(spec, sizes, operands, results.residuals, cotangents))

        found = run(module, spec, self.sizes, Operands(*arrays), dout)
        with jax.enable_x64(True):

            def wide(x: Any) -> Any:
                return jnp.asarray(np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x)

            wanted = run(reference, promoted_spec(spec), None, *jax.tree.map(wide, (Operands(*arrays), dout)))
        assert len(found) == len(wanted) == 1 + spec.row_results + 5
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            largest, mean = errors(np.asarray(a, np.float64), np.asarray(b))
            assert largest <= 5e-5, f"max error {largest:.2e}, mean {mean:.2e}"

    def test_works_under_vmap_and_scan(self, module):
        case = BY_NAME["causal"]
        spec = case.spec()
        query, key, value, _, _, dout = case.operands()

        @jax.jit
        def step(query, dout):
            results, gradients = both(module, spec, self.sizes, Operands(query, key, value), Cotangents(dout))
            return results.out, gradients.key

        queries, douts = jnp.stack([query, -query]), jnp.stack([dout, dout])
        mapped = jax.jit(jax.vmap(step))(queries, douts)
        _, scanned = jax.lax.scan(lambda c, x: (c, step(*x)), None, (queries, douts))
        for n in range(2):
            for a, b, c in zip(mapped, scanned, step(queries[n], douts[n]), strict=True):
                np.testing.assert_allclose(a[n], c, atol=1e-5)
                np.testing.assert_allclose(b[n], c, atol=1e-5)

    def test_float64_stays_float64(self, module):
        case = BY_NAME["causal"]
        with jax.enable_x64(True):
            query, key, value, *_ = case.operands(jnp.float64)
            spec = promoted_spec(case.spec())
            out, (logsumexp,), _ = module.forward(spec, self.sizes, Operands(query, key, value))
            assert out.dtype == logsumexp.dtype == np.float64
            scores = np.einsum("bkgtd,bksd->bkgts", query, key) * 0.3
            scores = np.where(np.tri(32, dtype=bool), scores, -np.inf)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            wanted = np.einsum("bkgts,bksd->bkgtd", p / p.sum(-1, keepdims=True), value)
            np.testing.assert_allclose(out, wanted, atol=1e-6)  # 0.3 is the float32 nearest to it


class TestXla(AttentionImplementation):
    name = "xla"

    @pytest.mark.parametrize("name", [case.name for case in CASES if min(case.query_length, case.key_length) > 8])
    def test_a_last_block_that_repeats_rows_and_columns_counts_each_once(self, module, name):
        case = replace(BY_NAME[name], query_length=21, key_length=19 if name == "bias" else 22)
        plan = schedule(case.spec(), BlockSizes(8, 8))
        assert plan.rows(2).first == plan.columns(2).first == 16
        self.check(module, case, "float32", BlockSizes(8, 8))

    @pytest.mark.parametrize("size", [30.0, 1e3, 2.0**16, 2.0**20])
    @pytest.mark.parametrize("scale", [0.125, 8**-0.5])
    def test_a_row_that_one_key_decides_has_its_value_and_no_gradient(self, module, size, scale):
        """The keys are far apart, so that each query's own has all of its weight: the value is that of the key."""
        case = Case("decided", query_length=24, key_length=24, groups=1, score=traced(lambda s: s * scale, SCORE))
        spec = case.spec()
        query, key, value, *_, dout = case.operands()
        length = np.arange(1, 25, dtype=np.float32)
        apart = np.stack([np.cos(length / 24), np.sin(length / 24)], -1) * size * 24
        key = jnp.zeros_like(key).at[..., :2].set(apart)
        query = jnp.broadcast_to(key[:, :, None], query.shape) * size * 24
        found = both(module, spec, BlockSizes(8, 8), Operands(query, key, value), Cotangents(dout))
        exact = scale == 0.125
        np.testing.assert_allclose(found[0].out[:, :, 0], value, rtol=1e-6 if exact else 1)
        assert np.all(np.isfinite(found[0].rows[0]))
        for gradient in found[1][:2]:
            assert np.all(np.asarray(gradient) == 0) if exact else np.all(np.isfinite(gradient))

    def test_a_key_of_little_weight_beside_a_great_score_has_its_gradient(self, module):
        """The logsumexp is rounded to the greatest score, and the probability of that is not 1."""
        case = Case("nearly decided", batch=1, key_heads=1, groups=1, query_length=8, key_length=8, head_size=8)
        case = replace(case, score=traced(lambda s: s, SCORE))
        query = jnp.zeros((1, 1, 1, 8, 8)).at[..., 0].set(300.0)
        key = jnp.zeros((1, 1, 8, 8)).at[..., 0].set(jnp.arange(8) - 9.0).at[0, 0, 7, 0].set(1.0)
        key = key.at[0, 0, 6, :2].set(jnp.asarray([1 - 11.5 / 300, 10.0]))
        value, dout = (jax.random.normal(jax.random.key(n), (1, 1, 8, 8)) for n in range(2))
        operands = Operands(query, key, value)
        found = both(module, case.spec(), BlockSizes(8, 8), operands, Cotangents(dout[:, :, None]))[1].query
        x = 300.0 * np.asarray(key, np.float64)[0, 0, :, 0]
        p = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
        c = np.asarray(dout, np.float64)[0, 0] @ np.asarray(value, np.float64)[0, 0].T
        wanted = (p * (c - (p * c).sum(-1, keepdims=True))) @ np.asarray(key, np.float64)[0, 0]
        assert np.abs(wanted[:, 1]).max() > 1e-4
        np.testing.assert_allclose(found[0, 0, 0], wanted, rtol=0, atol=1e-5)  # a rounding of c times the key

    def test_a_row_of_one_key_keeps_the_nan_of_its_cotangent(self, module):
        case = Case("one key", query_length=16, key_length=1)
        *operands, dout = case.operands()
        dout = dout.at[:, :, :, 10, 3].set(jnp.nan)
        found = both(module, case.spec(), BlockSizes(8, 8), Operands(*operands), Cotangents(dout))[1]
        rows = np.isnan(np.asarray(found.query)).all(axis=(0, 1, 2, 4))
        assert rows[10]
        assert not rows[[*range(10), *range(11, 16)]].any()
        assert np.isnan(np.asarray(found.key)).all()

    def test_rows_with_a_fill_beyond_the_integers_and_weights_inside_the_sum(self, module):
        """The fill is so low that a rounding of it is more than an exponential reaches."""
        case = Case(
            "weights and a low fill",
            score=traced(
                lambda s, m: jnp.where(m, s * np.float32(0.3), np.float32(-1e10)), SCORE, Side(0, np.dtype(bool))
            ),
            sides=(
                SideSpec(np.dtype(bool), (True, False, False, True, False)),
                SideSpec(np.dtype(np.float32), (False, False, False, False, True)),
            ),
            draw="mp", inner_weights=(Weight("multiply", traced(lambda w: w, Side(1, np.dtype(np.float32)))),),
        )  # fmt: skip
        self.check(module, case, "float32", BlockSizes(8, 8))

    @pytest.mark.parametrize("length", [16, 17])
    def test_an_infinite_value_is_no_nan(self, module, length):
        """Whether a last block repeats it or not."""
        case = Case("infinite value", query_length=length, key_length=length)
        query, key, value, sides, sink, _ = case.operands()
        value = value.at[:, :, 10, 3].set(jnp.inf)
        out = module.forward(case.spec(), BlockSizes(8, 8), Operands(query, key, value, sides, sink)).out
        assert np.all(np.asarray(out)[..., 3] == np.inf)
        assert np.all(np.isfinite(np.delete(np.asarray(out), 3, axis=-1)))

    def test_no_array_of_the_size_of_the_scores(self, module):
        case = Case("long", batch=1, key_heads=1, query_length=512, key_length=512)
        spec, sizes = case.spec(), BlockSizes(32, 32)
        operands = case.operands()[:3]
        dout = case.operands()[5]

        def run(*given):
            return both(module, spec, sizes, Operands(*given), Cotangents(dout))[1]

        temporary = jax.jit(run).lower(*operands).compile().memory_analysis().temp_size_in_bytes
        assert temporary < 512 * 512 * 4 / 2

    @pytest.mark.parametrize("name", SPELLINGS_OF_TEMPERATURES)
    def test_probabilities_of_large_scores_sum_to_one_in_the_backward(self, module, name):
        """The sum of the values' gradients over the keys is that of the cotangents over the queries."""
        program, varies = SPELLINGS_OF_TEMPERATURES[name]
        side = SideSpec(np.dtype(np.float32), tuple(letter in varies for letter in "BKGTS"))
        divided = traced(program, SCORE, Side(0, side.dtype))
        case = Case("large", score=divided, sides=(side,), draw="p", size=3000.0, query_length=40, key_length=64)
        found = computed(module, case, jnp.float32, self.sizes)
        wanted = np.asarray(case.operands()[5], np.float64).sum((2, 3))
        sums = np.asarray(found["dvalue"], np.float64).sum(2)
        np.testing.assert_allclose(sums, wanted, atol=1e-5)  # of 40 rows, each a few roundings of numbers around 1

    def test_gradients_of_rows_whose_weights_sum_to_less_than_zero(self, module):
        self.check(module, BY_NAME["negative weights inside the sum, a mask and a sink"], "float32", self.sizes)

    def test_gradients_of_rows_with_a_huge_logsumexp(self, module):
        """exp(x - logsumexp) would be 1, not 1 / S, where logsumexp = -1e30 + log(S)."""
        case = Case("hidden", score=traced(lambda s: s * np.float32(0) - np.float32(1e9), SCORE))
        found = computed(module, case, jnp.float32, self.sizes)
        dout = np.asarray(case.operands()[5])
        wanted = np.broadcast_to(dout.sum(axis=(2, 3))[:, :, None] / case.key_length, found["dvalue"].shape)
        np.testing.assert_allclose(found["dvalue"], wanted, atol=1e-5)


class TestReference(AttentionImplementation):
    name = "reference"

    @pytest.mark.parametrize("name", ["causal", "sink", "probabilities multiplied", "weights inside the sum"])
    def test_the_formula_in_numpy(self, name):
        """The oracle itself against loops over rows."""
        case = BY_NAME[name]
        query, key, value, sides, sink, _ = (jax.tree.map(np.asarray, x) for x in case.operands())
        out = oracle(case, jnp.dtype(jnp.float32))["out"]
        for b, k, g, t in np.ndindex(out.shape[:4]):
            x = np.float64(np.float32(0.3)) * (key[b, k].astype(np.float64) @ query[b, k, g, t].astype(np.float64))
            j = np.arange(case.key_length)
            if name == "causal":
                x = np.where(j <= t, x, -np.inf)
            e = np.exp(x)
            if name == "weights inside the sum":
                e = np.where((t + j) % 2 == 0, e * sides[0][0, 0, 0, 0], 0)
            total = e.sum()
            if sink is not None:
                total += np.exp(np.broadcast_to(sink, (*out.shape[:4], 1))[b, k, g, t, 0].astype(np.float64))
            p = e / total
            if name == "probabilities multiplied":
                p = p * sides[0][b, 0, 0, t]
            np.testing.assert_allclose(out[b, k, g, t], p @ value[b, k].astype(np.float64), atol=1e-6)
