"""Attention is found, and computes what it did, in the words of libraries and models."""

from __future__ import annotations

import pytest
from support.compare import compare

from recognition.library_programs import PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_attention_is_found_and_exact(name):
    program = PROGRAMS[name]
    compared = compare(program.function, program.arguments(), program.gradients, dtype="float32")
    assert compared.complaints == []
    assert compared.reasons() == []
    assert compared.counts() == 1
