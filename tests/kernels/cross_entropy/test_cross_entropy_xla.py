"""The streaming implementation computes every case, in little memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_entropy_cases import BF16, F32, LOSS, Case, promoted_spec, wide
from cross_entropy_implementation import BY_NAME, SIZES, CrossEntropyImplementation

from autopallas.kernels.cross_entropy import kept_logits, reference, tile_products, tiles
from autopallas.kernels.cross_entropy.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.operands import Operands
from autopallas.kernels.cross_entropy.operation import OPERATION
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, Head, Product, SideSpec, Statistic
from autopallas.kernels.cross_entropy.tile_products import Target
from autopallas.sites.device import Device
from autopallas.sites.elementwise import Score, Side, traced
from autopallas.sites.operation import Unsupported


class TestXla(CrossEntropyImplementation):
    name = "xla"
    unrounded = (BF16,)  # as in the original: XLA's CPU compiler leaves out what is widened again at once

    @pytest.mark.parametrize("sizes", [BlockSizes(64, 64), BlockSizes(1024, 64)], ids=str)
    def test_no_array_of_the_size_of_the_logits(self, module, sizes):
        case = Case("long", rows=512, vocabulary=1024, labels=(0, 1024), kinds=LOSS)
        spec = case.spec()
        x, w, sides, cotangents = case.operands()
        finish = case.with_products(spec, "finish")
        sizes = sizes.fitted(spec)

        def gradients(x, w):
            operands = Operands(x, w, sides)
            found = module.forward(spec, sizes, operands)
            own = module.backward(spec, sizes, operands, found.residuals, cotangents, (True, True, False))
            return found, own, module.forward(finish, sizes, operands)

        temporary = jax.jit(gradients).lower(x, w).compile().memory_analysis().temp_size_in_bytes
        assert temporary < 512 * 1024 * 4 / 2

    @pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
    @pytest.mark.parametrize("name", ["plain", "odd embedding table"])
    def test_the_gradient_of_the_weight_grows_part_by_part(self, module, monkeypatch, name, dtype):
        """The last part is the shorter one."""
        case = BY_NAME[name]
        monkeypatch.setattr(tile_products, "_PART", 5 * case.hidden)
        assert case.vocabulary % 5
        for sizes in (SIZES["rows stream"], SIZES["tiles"]):
            self.check_products(module, case, "finish", sizes, dtype)

    @pytest.mark.parametrize("hidden", [100, 136, 200])
    @pytest.mark.parametrize("name", ["plain", "odd embedding table", "bias", "soft cap", "row factor and bias"])
    def test_sums_of_shares_and_values_over_logits_are_the_same(self, module, monkeypatch, name, hidden):
        """As a GPU has them: the weight's gradient as two sums, and values written over the logits."""
        case = replace(BY_NAME[name], rows=150, hidden=hidden)
        spec = case.with_products(case.spec(BF16), "finish")
        for part in (tiles, tile_products, kept_logits):
            monkeypatch.setattr(part, "on_gpu", lambda: True)
        (target,) = (Target.of_product(p) for p in spec.products if p.kind == "columns")
        shares = kept_logits._shares(spec, target)
        assert shares == ((None,) if hidden < 128 else ((0, 64), (64, hidden - 64)))
        self.check_products(module, case, "finish", BlockSizes(64, 1000), BF16)

    def test_rows_stream_past_a_large_weight_in_less_than_its_size(self, module):
        """What each block of rows adds to the gradient is never all there at once."""
        case = Case("wide", rows=64, hidden=512, vocabulary=8192, labels=(0, 8192), kinds=LOSS)
        spec = case.with_products(case.spec(), "finish")
        x, w, sides, _ = case.operands()
        run = jax.jit(lambda x, w: module.forward(spec, BlockSizes(8, 8192), Operands(x, w, sides)))
        assert run.lower(x, w).compile().memory_analysis().temp_size_in_bytes < w.nbytes / 2

    @pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
    @pytest.mark.parametrize("rows", [17, 20, 23])
    def test_a_last_block_of_rows_is_computed_as_the_others_and_counts_each_row_once(self, module, rows, dtype):
        """One of another size would be compiled by itself, and have memory of its own."""

        def products(rows):
            case = replace(BY_NAME["row factor and bias"], rows=rows)
            spec = case.with_products(case.spec(dtype), "finish")
            x, w, sides, _ = case.operands(dtype)
            run = jax.jit(lambda x, w: module.forward(spec, BlockSizes(8, 1000), Operands(x, w, sides)))
            return run.lower(x, w).as_text().count("dot_general")

        assert products(rows) == products(24)
        case = replace(BY_NAME["row factor and bias"], rows=rows)
        self.check_products(module, case, "finish", BlockSizes(8, 1000), dtype)

    def test_products_with_native_16_bit_dots(self, module, monkeypatch):
        """As on processors that have them; what the dots give is then rounded once more."""
        monkeypatch.setattr(tiles, "_multiplies_natively", lambda dtype: True)
        for name in ("plain", "embedding table"):
            self.check_products(module, BY_NAME[name], "finish", self.sizes, BF16)

    @pytest.mark.parametrize("majors", [(False, True), (True, False)], ids=str)
    @pytest.mark.parametrize("sizes", SIZES)
    def test_logits_of_several_heads(self, module, sizes, majors):
        spec, operands = two_heads(*majors)
        with jax.enable_x64(True):
            true = reference.forward(promoted_spec(spec), None, wide(operands))
        found = module.forward(spec, SIZES[sizes].fitted(spec), operands)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(true), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())

        statistics = replace(spec, finish=(), products=())
        forward, backward = SIZES[sizes].fitted(statistics), SIZES[sizes].fitted(statistics)
        cotangents = [np.linspace(-1, 1, spec.rows, dtype=np.float32) * (n + 1) for n in range(len(spec.statistics))]
        own = module.forward(statistics, forward, operands).residuals
        wanted = (True,) * (2 + len(operands.sides))
        gradients = module.backward(statistics, backward, operands, own, cotangents, wanted)
        with jax.enable_x64(True):
            given = *wide((operands, own, cotangents)), wanted
            true = reference.backward(promoted_spec(statistics), None, *given)
        for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(true), strict=True):
            np.testing.assert_allclose(a, b, atol=5e-5 * np.abs(b).max())
        alone = module.backward(statistics, backward, operands, own, cotangents, (False, False, True, False))
        assert alone[:2] == (None, None)
        assert alone[2][1] is None
        np.testing.assert_array_equal(alone[2][0][1], gradients[2][0][1])

    def test_the_logits_of_no_head_are_stored(self, module):
        spec, operands = two_heads(False, True, rows=512, vocabulary=1024)
        run = jax.jit(partial(module.forward, spec, BlockSizes(64, 64)))
        temporary = run.lower(operands).compile().memory_analysis().temp_size_in_bytes
        assert temporary < 512 * 1024 * 4 / 2

    @pytest.mark.parametrize("name", ["pallas_tpu", "pallas_gpu"])
    def test_kernels_of_one_head_say_so(self, name):
        spec = two_heads(False, False)[0]
        device = {"pallas_tpu": Device("tpu", "TPU v6 lite"), "pallas_gpu": Device("gpu", "NVIDIA H100")}[name]
        answer = OPERATION.implementation(name).supports(spec, device)
        assert isinstance(answer, Unsupported)
        assert "one head" in answer.reason


def two_heads(*majors, rows=21, vocabulary=40):
    """(spec, operands) of a divergence and of its gradient, the other head's logits first among the side inputs."""
    random = np.random.default_rng(0)
    sizes = 7, 5
    heads = [Head(n, F32, F32, major) for n, major in zip(sizes, majors, strict=True)]
    arrays = [
        (
            random.standard_normal((rows, n), np.float32),
            random.standard_normal((vocabulary, n) if major else (n, vocabulary), np.float32),
        )
        for n, major in zip(sizes, majors, strict=True)
    ]
    z, other, row = Score(F32), Side(0, F32), Side(1, F32)
    one, two = (traced(lambda a: a, given) for given in (z, other))
    apart = traced(lambda a, b, c: jnp.exp(b - a) * c + a, z, other, row)
    statistics = (
        Statistic("max", one), Statistic("exp_sum", one), Statistic("max", two), Statistic("exp_sum", two),
        Statistic("sum", apart),
    )  # fmt: skip
    finish = tuple(traced(lambda m, s: m + jnp.log(s), Side(k, F32), Side(k + 1, F32)) for k in (2, 4))
    numbers = Side(2, F32), Side(3, F32)
    gradient = traced(lambda a, b, own, of_other: jnp.exp(a - own) - jnp.exp(b - of_other), z, other, *numbers)
    products = tuple(Product(kind, gradient, F32, head) for head in (0, 1) for kind in ("rows", "columns"))
    products = (*products, Product("column_sum", gradient, F32), Product("values", gradient, F32))
    spec = CrossEntropySpec(
        rows, sizes[0], vocabulary, F32, F32, F32, majors[0], statistics,
        (SideSpec(F32, (True, True), heads[1]), SideSpec(F32, (True, False))), finish, products,
    )  # fmt: skip
    (x, w), side = arrays
    return spec, Operands(x, w, (side, random.random((rows, 1), np.float32)))
