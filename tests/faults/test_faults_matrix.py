"""The matrix of stages and kinds of faults is complete."""

from __future__ import annotations

from tests.faults.matrix import missing


def test_each_fault_at_each_stage_is_tested_or_named():
    assert missing() == []
