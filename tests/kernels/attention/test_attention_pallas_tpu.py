"""The TPU kernels, interpreted on a CPU: values, gradients, and what is lowered for a TPU."""

from __future__ import annotations

import pytest
from attention_cases import CASES
from test_attention_implementations import BY_NAME, AttentionImplementation

from autopallas.kernels.interpret import mode


class TestPallasTpu(AttentionImplementation):
    name = "pallas_tpu"

    @pytest.fixture(autouse=True)
    def interpreted(self):
        with mode(True):
            yield

    def test_float64_stays_float64(self, module):
        pytest.skip("pallas_tpu: TPUs do not compute with float64")
