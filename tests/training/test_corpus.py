"""Losses and train steps of tests/corpus: every attention is replaced in both directions, and nothing else changes.

The kernels run in recognition/test_corpus.py.
"""

from __future__ import annotations

import pytest
from recognition.test_corpus import CASES, _built
from support.checks import exact, replaced


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.kind in ("loss", "train_step")])
def test_every_attention_is_replaced_in_both_directions(name):
    case, function, args = _built(name)
    report = exact(function, args)
    reasons = [miss.reason for miss in report.near_misses]
    if case.origin != "negative":
        assert replaced(report) == ["forward+backward"] * case.count("attention"), reasons
