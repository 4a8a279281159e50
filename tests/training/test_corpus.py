"""Losses and train steps of tests/corpus: every attention is replaced in both directions, and nothing else changes."""

from __future__ import annotations

import pytest
from recognition.compare import compiled, optimized_like_a_user
from recognition.test_corpus import CASES, _built

from training.checks import absolute_errors, replaced

NOT_YET: dict[str, int] = {}
"""How many sites are replaced in both directions where not all are, by the name of the case."""


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.kind in ("loss", "train_step")])
def test_every_attention_is_replaced_in_both_directions(name):
    case, function, args = _built(name)
    optimized = optimized_like_a_user(function)
    given = compiled(lambda *a: optimized(*a))(*args)
    expected = compiled(lambda *a: function(*a))(*args)
    # Of the whole result: the gradient of a bias on all keys is zero but for rounding.  Adam makes whole steps of that.
    error, mean, largest = absolute_errors(given, expected)
    limit = 3e-2 if "bf16" in case.tags else 2e-3 if case.kind == "train_step" else 2e-5
    assert error <= limit * largest, f"max absolute error {error:.2e}, mean {mean:.2e} of values up to {largest:.2e}"
    if case.kind == "train_step":
        assert mean <= 2e-5 * largest
    report = optimized.report()
    assert not report.failures
    if name in NOT_YET:
        assert len(replaced(report)) == NOT_YET[name]
    elif case.origin != "negative":
        reasons = [miss.reason for miss in report.near_misses]
        assert replaced(report) == ["forward+backward"] * case.count("attention"), reasons
