"""Every spelling of attention is found, exactly as often as it is there, and computes what it did."""

from __future__ import annotations

import pytest
from support.compare import compare
from support.spellings import EQUAL, ODD, SPELLINGS, layouts, programs

NOT_YET: dict[str, str] = {}
"""Spellings that are not found yet, and the reason that the report gives; their results must be right all the same."""


def check(spelling, sizes, dtype, gradients=True):
    compared = compare(spelling.program(sizes), spelling.arguments(sizes, dtype), gradients and spelling.gradients)
    assert compared.complaints == []
    assert not compared.report.failures
    if spelling.name in NOT_YET:
        assert compared.counts() == 0
        assert any(NOT_YET[spelling.name] in reason for reason in compared.reasons())
        return
    assert compared.counts() == spelling.sites(sizes), compared.reasons()
    assert compared.reasons() == []


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_is_found_and_exact_in_value_and_gradient(name):
    check(SPELLINGS[name], ODD, "float32")


@pytest.mark.parametrize("name", [name for name in SPELLINGS if not hasattr(layouts, name)])
def test_spelling_is_found_and_exact_in_bfloat16(name):
    """The gradient too where the program differs; surroundings share it."""
    check(SPELLINGS[name], ODD, "bfloat16", gradients=hasattr(programs, name))


@pytest.mark.parametrize("name", [name for name in SPELLINGS if hasattr(layouts, name)])
def test_layout_is_found_where_all_axes_have_one_size_and_exact_in_bfloat16(name):
    check(SPELLINGS[name], EQUAL, "bfloat16", gradients=False)


def test_the_catalogue_holds_at_least_forty_spellings():
    assert len(SPELLINGS) - len(NOT_YET) >= 40
