"""What is handed to cuDNN: proven before it is offered; and what comes back means what ours does."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import KEY, QUERY, SCORE, oracle, traced
from support.oracle import errors
from test_attention_implementations import BY_NAME, computed

from autopallas.kernels.attention import cudnn
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.cudnn import Reduced
from autopallas.sites.device import Device
from autopallas.sites.operation import Unsupported

BF16 = np.dtype(jnp.bfloat16)
H100 = Device("gpu", "NVIDIA H100 80GB HBM3")
SCALE = float(np.float32(0.3))


def square(name, **changes):
    return replace(BY_NAME[name], query_length=48, key_length=48, **changes)


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("full", Reduced(SCALE, causal=False)),
        ("causal", Reduced(SCALE, causal=True)),
        ("causal with a fill of -inf", Reduced(SCALE, causal=True)),
        ("large logits", Reduced(SCALE, causal=False)),
    ],
)
def test_scales_and_causal_masks_are_recognised(name, wanted):
    assert cudnn.reduced(square(name).spec(BF16)) == wanted


def test_a_causal_window_is_recognised():
    def seen(i, j):
        return (i >= j) & (i - j < 8)

    score = traced(lambda s, i, j: jnp.where(seen(i, j), s * np.float32(0.3), -np.inf), SCORE, QUERY, KEY)
    case = square("causal", score=score, live=traced(seen, QUERY, KEY))
    assert cudnn.reduced(case.spec(BF16)) == Reduced(SCALE, causal=True, window=7)


@pytest.mark.parametrize(
    "name",
    [
        "causal with an offset", "prefix", "dilated", "blocks", "rows without keys, finite fill", "bias",
        "soft cap and position bias", "segments and causal", "lengths",
    ],
)  # fmt: skip
def test_nothing_else_is(name):
    case = BY_NAME[name] if name == "causal with an offset" else square(name)
    assert cudnn.reduced(case.spec(BF16)) is None


def test_a_mask_that_differs_in_one_element_is_not_causal():
    def seen(i, j):
        return (i >= j) & ~((i == 30) & (j == 3))

    score = traced(lambda s, i, j: jnp.where(seen(i, j), s * np.float32(0.3), -np.inf), SCORE, QUERY, KEY)
    case = square("causal", score=score, live=traced(seen, QUERY, KEY))
    assert cudnn.reduced(case.spec(BF16)) is None


def test_it_is_not_offered_for_a_machine_that_is_not_here():
    answer = cudnn.supports(square("causal").spec(BF16), H100)
    assert isinstance(answer, Unsupported)
    assert "another machine" in answer.reason
    assert "A100" in cudnn.supports(square("causal").spec(BF16), Device("gpu", "NVIDIA A100")).reason


@pytest.mark.parametrize("name", ["full", "causal", "grouped queries", "window"])
def test_the_call_means_the_same(name, monkeypatch):
    """With JAX's own implementation in place of the library, which is not here."""
    monkeypatch.setattr(cudnn, "_LIBRARY", "xla")
    if name == "window":
        score = traced(
            lambda s, i, j: jnp.where((i >= j) & (i - j < 8), s * np.float32(0.3), -np.inf), SCORE, QUERY, KEY
        )
        case = square("causal", score=score, live=traced(lambda i, j: (i >= j) & (i - j < 8), QUERY, KEY))
    else:
        case = square(name, value_head_size=8)
    found = computed(cudnn, case, BF16, BlockSizes.get_default())
    for part, value in oracle(case, BF16).items():
        assert errors(found[part], value)[0] <= 4e-2, part  # bfloat16 throughout, its probabilities and logsumexp too
