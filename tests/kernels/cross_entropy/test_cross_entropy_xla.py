"""The streaming implementation computes every case, in little memory."""

from __future__ import annotations

import jax
import pytest
from cross_entropy_cases import BF16, F32, LOSS, Case
from cross_entropy_implementation import BY_NAME, SIZES, CrossEntropyImplementation

from autopallas.kernels.cross_entropy import tile_products, tiles
from autopallas.kernels.cross_entropy.block_sizes import BlockSizes


class TestXla(CrossEntropyImplementation):
    name = "xla"

    @pytest.mark.parametrize("sizes", [BlockSizes(64, 64), BlockSizes(1024, 64)], ids=str)
    def test_no_array_of_the_size_of_the_logits(self, module, sizes):
        case = Case("long", rows=512, vocabulary=1024, labels=(0, 1024), kinds=LOSS)
        spec = case.spec()
        x, w, sides, cotangents = case.operands()
        finish = case.with_products(spec, "finish")
        sizes = sizes.fitted(spec)

        def gradients(x, w):
            statistics, _ = module.forward(spec, sizes, x, w, sides)
            found = module.backward(spec, sizes, x, w, sides, statistics, cotangents, (True, True, False))
            return statistics, found, module.forward(finish, sizes, x, w, sides)

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

    def test_rows_stream_past_a_large_weight_in_less_than_its_size(self, module):
        """What each block of rows adds to the gradient is never all there at once."""
        case = Case("wide", rows=64, hidden=512, vocabulary=8192, labels=(0, 8192), kinds=LOSS)
        spec = case.with_products(case.spec(), "finish")
        x, w, sides, _ = case.operands()
        run = jax.jit(lambda x, w: module.forward(spec, BlockSizes(8, 8192), x, w, sides))
        assert run.lower(x, w).compile().memory_analysis().temp_size_in_bytes < w.nbytes / 2

    def test_products_with_native_16_bit_dots(self, module, monkeypatch):
        """As on processors that have them; what the dots give is then rounded once more."""
        monkeypatch.setattr(tiles, "_multiplies_natively", lambda dtype: True)
        for name in ("plain", "embedding table"):
            self.check_products(module, BY_NAME[name], "finish", self.sizes, BF16)
