"""The streaming implementation computes every case, in little memory."""

from __future__ import annotations

import jax
import pytest
from cross_entropy_cases import BF16, LOSS, Case
from cross_entropy_implementation import BY_NAME, CrossEntropyImplementation

from autopallas.kernels.cross_entropy import tiles
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

    def test_products_with_native_16_bit_dots(self, module, monkeypatch):
        """As on processors that have them; what the dots give is then rounded once more."""
        monkeypatch.setattr(tiles, "_multiplies_natively", lambda dtype: True)
        for name in ("plain", "embedding table"):
            self.check_products(module, BY_NAME[name], "finish", self.sizes, BF16)
