"""What every implementation of cross-entropy has to compute: the tests that the file of each one runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_entropy_cases import BF16, CASES, F32, LOSS, ROW, Case, computed, oracle, promoted_spec, wide
from support.oracle import errors

from autopallas.kernels.cross_entropy import reference
from autopallas.kernels.cross_entropy.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.operands import Operands, Residuals
from autopallas.kernels.cross_entropy.operation import OPERATION
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, Product, SideSpec
from autopallas.sites.device import Device
from autopallas.sites.elementwise import Score, Side, traced
from autopallas.sites.operation import Unsupported

TOLERANCES = {"float32": (1e-5, 5e-5), "float16": (4e-3, 1e-2), "bfloat16": (2e-2, 4e-2)}
BY_NAME = {case.name: case for case in CASES}
EXACT = ("argmax", "ties")
SIZES = {
    "tiles": BlockSizes(8, 16),
    "vocabulary streams": BlockSizes(1000, 16),
    "rows stream": BlockSizes(8, 1000),
    "one tile": BlockSizes(1000, 1000),
}


def named_products(spec: CrossEntropySpec, found: Any) -> dict[str, np.ndarray]:
    statistics, products = found
    named = {s.kind: s_value for s, s_value in zip(spec.statistics, statistics, strict=True)}
    named |= {f"d{p.kind}": value for p, value in zip(spec.products, products, strict=True)}
    return {name: np.asarray(value, np.float64) for name, value in named.items()}


class CrossEntropyImplementation:
    """What an implementation has to do.  A subclass names it; what it does not support is skipped, with its reason."""

    name: str
    sizes = SIZES["tiles"]
    unrounded: tuple[Any, ...] = ()
    """Dtypes to which logits are not rounded where only their order depends on it."""

    @pytest.fixture
    def module(self) -> Any:
        return OPERATION.implementation(self.name)

    def agree(self, found: Any, wanted: Any, own: Any, dtype: str) -> None:
        """``own()`` are the results of the plain formulas in this precision: their error counts twice."""
        assert found.keys() == wanted.keys()
        reference_errors = None
        for name, value in wanted.items():
            if name in EXACT:
                np.testing.assert_array_equal(found[name], value, err_msg=name)
                continue
            tolerance = TOLERANCES[dtype][name.startswith("d")]
            largest, mean = errors(found[name], value)
            if largest > tolerance:
                reference_errors = reference_errors or own()
                tolerance = max(tolerance, 2 * errors(reference_errors[name], value)[0])
            assert largest <= tolerance, f"{name}: max error {largest:.2e}, mean {mean:.2e}, allowed {tolerance:.2e}"

    def require(self, module: ModuleType, spec: CrossEntropySpec) -> None:
        """Skips the test, with the reason, where the implementation does not support the spec."""
        answer = module.supports(spec, Device.current())
        if isinstance(answer, Unsupported):
            pytest.skip(f"{self.name}: {answer.reason}")

    def check(
        self, module: ModuleType, case: Case, sizes: BlockSizes, dtype: Any = F32, weight: Any = None, logits: Any = F32
    ) -> dict[str, np.ndarray]:
        """Returns what was found, which is right."""
        spec = case.spec(dtype, weight, logits)
        self.require(module, spec)
        operands = case.operands(dtype, weight)
        found = computed(module, sizes.fitted(spec), case, spec, operands)
        narrowest = min((jnp.dtype(dtype), jnp.dtype(weight or dtype)), key=lambda d: d.itemsize).name
        self.agree(
            found,
            oracle(case, dtype, weight, logits),
            lambda: computed(reference, None, case, spec, operands),
            narrowest,
        )
        return found

    @pytest.mark.parametrize("name", BY_NAME)
    def test_statistics_and_gradients(self, module, name):
        self.check(module, BY_NAME[name], self.sizes)

    @pytest.mark.parametrize("sizes", list(SIZES)[1:])
    @pytest.mark.parametrize("name", ["ties", "N x V bias", "NaN and infinities"])
    def test_any_block_sizes(self, module, name, sizes):
        self.check(module, BY_NAME[name], SIZES[sizes])

    @pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
    @pytest.mark.parametrize("name", ["row factor and bias", "activations of 1000"])
    def test_narrow_operands(self, module, name, dtype):
        case = replace(BY_NAME[name], kinds=LOSS)
        self.check(module, case, self.sizes, dtype)

    @pytest.mark.parametrize("dtypes", [(np.float32, jnp.bfloat16), (jnp.bfloat16, np.float32)], ids=["w", "x"])
    def test_gradients_of_mixed_operands_are_as_exact_as_their_dtypes(self, module, dtypes):
        case = replace(BY_NAME["plain"], kinds=LOSS)
        found = self.check(module, case, self.sizes, *dtypes)
        wanted = oracle(case, *dtypes, F32)
        name = "dx" if dtypes[0] == np.float32 else "dw"
        assert errors(found[name], wanted[name])[0] < 5e-5  # no rounding of float32 gradients to bfloat16 on the way

    @pytest.mark.parametrize("vocabulary_major", [True, False])
    def test_gradients_of_float32_logits_are_not_rounded_before_their_products(self, module, vocabulary_major):
        """Those of a row add up to zero, so that the offset of all weights has no part in the gradient of x."""
        case = Case("offset", rows=32, hidden=16, vocabulary=64, kinds=LOSS, vocabulary_major=vocabulary_major,
                    labels=(0, 64), size=0.02)  # fmt: skip
        spec = case.spec(BF16)
        self.require(module, spec)
        x, w, sides, _ = case.operands(BF16)
        w = w + 64
        rows = np.random.default_rng(0).uniform(0.5, 1.5, case.rows).astype(np.float32)
        operands = Operands(x, w, sides)
        statistics, _ = module.forward(spec, self.sizes, operands)
        maximum = np.asarray(statistics[0], np.float64)
        cotangents = (None, jnp.asarray(rows / np.asarray(statistics[1])), jnp.asarray(-rows))
        wanted = (True, False, *(False for _ in sides))
        dx, _, _ = module.backward(spec, self.sizes, operands, Residuals(statistics), cotangents, wanted)
        wide_x, wide_w = np.asarray(x, np.float64), np.asarray(w, np.float64)
        wide_w = wide_w.T if vocabulary_major else wide_w
        p = np.exp(wide_x @ wide_w - maximum[:, None])
        p = p / p.sum(axis=1, keepdims=True) - np.eye(case.vocabulary)[np.asarray(sides[0])[:, 0]]
        wanted = (rows[:, None] * p) @ wide_w.T
        assert errors(np.asarray(dx, np.float64), wanted)[0] <= 2 * float(jnp.finfo(BF16).eps)

    @pytest.mark.parametrize("logits", [np.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
    def test_logits_are_rounded_to_their_dtype(self, module, logits):
        """Ties and the argmax of rounded logits; logits and sums are exact here before they are rounded."""
        case = Case("rounded", whole=True, hidden=64, size=100.0, kinds=("max", "argmax", "ties"))
        spec = case.spec(logit_dtype=logits)
        self.require(module, spec)
        x, w, sides, _ = case.operands()
        (maximum, argmax, ties), _ = jax.jit(partial(module.forward, spec, self.sizes))(Operands(x, w, sides))
        exact = np.asarray(x) @ np.asarray(w)
        z = np.asarray(jnp.asarray(exact).astype(logits).astype(F32))
        np.testing.assert_array_equal(maximum, (exact if logits in self.unrounded else z).max(axis=1))
        np.testing.assert_array_equal(argmax, z.argmax(axis=1))
        np.testing.assert_array_equal(ties, (z == z.max(axis=1, keepdims=True)).sum(axis=1))
        assert np.asarray(ties).max() > 1

    @pytest.mark.parametrize("sizes", SIZES)
    def test_forward_and_backward_see_the_same_logits(self, module, sizes):
        """With |logit| above 600, a bfloat16 rounding that only one of them does changes probabilities by 86%."""
        case = Case("large", hidden=32, size=100.0, whole=True, kinds=("max", "exp_sum"))
        spec = case.spec(BF16, logit_dtype=BF16)
        p = traced(lambda z, logsumexp: jnp.exp(z.astype(F32) - logsumexp), Score(BF16), Side(1, F32))
        probabilities = replace(
            spec, statistics=(), sides=(*spec.sides, SideSpec(F32, ROW)), products=(Product("rows", p, F32),)
        )
        x, w, sides, _ = case.operands(BF16)

        @jax.jit
        def run(x, w):
            (maximum, total), _ = module.forward(spec, SIZES[sizes].fitted(spec), Operands(x, w, sides))
            logsumexp = (maximum + jnp.log(total))[:, None]
            given = Operands(x, w, (*sides, logsumexp))
            return module.forward(probabilities, SIZES[sizes].fitted(spec), given).products[0]

        exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
        z = np.asarray(jnp.asarray(exact, F32).astype(BF16).astype(F32))
        assert np.abs(z).max() > 600
        assert np.abs(z - exact).max() >= 1
        wanted = np.asarray(jax.nn.softmax(z, axis=-1), np.float64) @ np.asarray(w, np.float64).T
        assert (
            errors(np.asarray(run(x, w), np.float64), wanted)[0] < 5e-4
        )  # the logsumexp has 24 bits, 10 of them above 1

    @pytest.mark.parametrize("sizes", SIZES)
    @pytest.mark.parametrize("form", ["finish", "products"])
    @pytest.mark.parametrize("name", ["labels out of range", "N x V bias"])
    def test_products(self, module, name, form, sizes):
        self.check_products(module, BY_NAME[name], form, SIZES[sizes], F32)

    @pytest.mark.parametrize("form", ["finish", "products"])
    @pytest.mark.parametrize("name", ["plain", "odd embedding table"])
    def test_products_of_narrow_operands(self, module, name, form):
        self.check_products(module, BY_NAME[name], form, SIZES["tiles"], BF16)
        self.check_products(module, BY_NAME[name], form, SIZES["rows stream"], BF16)

    def check_products(self, module: ModuleType, case: Case, form: str, sizes: BlockSizes, dtype: Any) -> None:
        statistics_spec = replace(case, kinds=("max", "exp_sum")).spec(dtype)
        spec = case.with_products(statistics_spec, form)
        x, w, sides, _ = case.operands(dtype)
        with jax.enable_x64(True):
            operands = wide(Operands(x, w, sides))
            if form == "products":
                maximum, total = reference.forward(promoted_spec(statistics_spec), None, operands).statistics
                logsumexp = (maximum + jnp.log(total))[:, None]
                sides = (*sides, np.asarray(logsumexp, np.float32))
                operands = operands._replace(sides=(*operands.sides, logsumexp))
            wanted = named_products(spec, reference.forward(promoted_spec(spec), None, operands))
        given = Operands(x, w, sides)
        found = jax.jit(partial(module.forward, spec, sizes.fitted(spec)))(given)
        for product, value in zip(spec.products, found.products, strict=True):
            assert value.dtype == product.dtype
        own = lambda: named_products(spec, reference.forward(spec, None, given))  # noqa: E731
        self.agree(named_products(spec, found), wanted, own, dtype.name)

    def test_only_what_is_wanted_is_computed(self, module):
        case = BY_NAME["bias"]
        spec = case.spec()
        x, w, sides, cotangents = case.operands()
        operands = Operands(x, w, sides)
        residuals = jax.jit(partial(module.forward, spec, self.sizes))(operands).residuals

        def gradients(*wanted):
            run = jax.jit(lambda *a: module.backward(spec, self.sizes, *a, cotangents, wanted))
            return run(operands, residuals)

        whole = oracle(case, F32, None, F32)
        for wanted in ((True, False, True, False), (False, True, False, True)):
            dx, dw, (dlabels, dbias) = gradients(*wanted)
            assert dlabels is None
            assert (dx is None, dw is None, dbias is None) == tuple(not w for w in (*wanted[:2], wanted[3]))
            for found, name in ((dx, "dx"), (dw, "dw"), (dbias, "dside1")):
                if found is not None:
                    assert errors(np.asarray(found, np.float64), whole[name])[0] < 5e-5
        assert gradients(False, False, True, False) == (None, None, (None, None))

    def test_ties_are_counted_where_the_forward_did_not(self, module):
        """The gradient of a maximum alone: equal ones share it."""
        self.check(module, replace(BY_NAME["ties"], kinds=("max",)), self.sizes)

    def test_cotangents_that_are_none_are_zero(self, module):
        case = replace(BY_NAME["plain"], kinds=("max", "exp_sum", "argmax"))
        spec = case.spec()
        x, w, sides, (dmax, dtotal, _) = case.operands()
        operands = Operands(x, w, sides)
        residuals = jax.jit(partial(module.forward, spec, self.sizes))(operands).residuals
        no_tangent = np.zeros(case.rows, jax.dtypes.float0)

        def dx(module, *cotangents):
            return module.backward(spec, self.sizes, operands, residuals, cotangents, (True, False, False)).x

        found = jax.jit(lambda dtotal: dx(module, None, dtotal, no_tangent))(dtotal)
        np.testing.assert_allclose(found, dx(reference, jnp.zeros_like(dmax), dtotal, no_tangent), atol=2e-5)
        np.testing.assert_array_equal(dx(module, None, None, None), jnp.zeros_like(x))

    def test_nothing_flows_from_one_row_into_another(self, module):
        """Rows are not padded by others, nor the vocabulary: a NaN stays where it is."""
        case = replace(BY_NAME["plain"], kinds=LOSS)
        spec = case.spec()
        x, w, sides, cotangents = case.operands()
        x = x.at[-1].set(jnp.nan)

        @jax.jit
        def run(x):
            operands = Operands(x, w, sides)
            found = module.forward(spec, self.sizes, operands)
            wanted = (True, False, False)
            gradients = module.backward(spec, self.sizes, operands, found.residuals, cotangents, wanted)
            return found.statistics, gradients.x

        statistics, dx = run(x)
        assert all(np.isnan(s).nonzero()[0].tolist() == [case.rows - 1] for s in statistics)
        assert np.isfinite(dx[:-1]).all()

    def test_works_under_vmap_and_scan(self, module):
        case = replace(BY_NAME["bias"], kinds=LOSS)
        spec = case.spec()
        x, w, sides, cotangents = case.operands()

        @jax.jit
        def step(x, labels):
            operands = Operands(x, w, (labels, *sides[1:]))
            found = module.forward(spec, self.sizes, operands)
            wanted = (True, True, False, True)
            return found.statistics, module.backward(spec, self.sizes, operands, found.residuals, cotangents, wanted)

        xs, labels = jnp.stack([x, -x, 2 * x, x]), jnp.stack([sides[0], sides[0] + 1, sides[0], sides[0] - 1])
        pairs = jax.tree.map(lambda a: a.reshape(2, 2, *a.shape[1:]), (xs, labels))
        _, found = jax.lax.scan(lambda c, a: (c, jax.vmap(step)(*a)), None, pairs)
        for n in range(4):
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(step(xs[n], labels[n])), strict=True):
                np.testing.assert_allclose(a[n // 2, n % 2], b, atol=5e-5)

    def test_float64_stays_float64(self, module):
        case = replace(BY_NAME["plain"], kinds=LOSS)
        spec = promoted_spec(case.spec())
        self.require(module, spec)
        with jax.enable_x64(True):
            x, w, sides, cotangents = wide(case.operands())
            operands = Operands(x, w, sides)
            statistics, _ = module.forward(spec, self.sizes, operands)
            assert all(s.dtype == np.float64 for s in statistics)
            z = np.asarray(x) @ np.asarray(w)
            logsumexp = np.log(np.exp(z).sum(axis=1))
            np.testing.assert_allclose(statistics[0] + np.log(statistics[1]), logsumexp, rtol=1e-13)
            cotangents = (None, None, jnp.ones(case.rows))
            wanted = (True, False, False)
            dx, *_ = module.backward(spec, self.sizes, operands, Residuals(statistics), cotangents, wanted)
            np.testing.assert_allclose(dx, np.asarray(w).T[np.asarray(sides[0])[:, 0]], rtol=1e-13)

    @pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32])
    def test_labels_of_any_integer_dtype(self, module, dtype):
        case = Case("long", rows=8, vocabulary=300, kinds=("pick",))
        labels = np.array([0, 1, 127, 5, 7, 100, 99, np.iinfo(dtype).max], dtype)
        spec = replace(case.spec(), sides=(SideSpec(np.dtype(dtype), (True, False)),))
        x, w, _, _ = case.operands()
        (picked,), _ = module.forward(spec, BlockSizes(8, 64), Operands(x, w, (jnp.asarray(labels)[:, None],)))
        z = np.asarray(x) @ np.asarray(w)
        wanted = [z[n, v] if v < 300 else 0 for n, v in enumerate(labels.astype(np.int64))]
        np.testing.assert_allclose(picked, wanted, atol=1e-5)
