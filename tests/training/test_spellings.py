"""With the derivative inside, every spelling and many random programs are rewritten into the same function."""

from __future__ import annotations

import os

import jax
import pytest
from recognition import test_spellings
from support.catalogue import ODD, array
from support.checks import exact, replaced
from support.compare import with_gradients
from support.random_programs import N, random_program
from support.spellings import SPELLINGS

LEFT = {
    # The result depends on the maximum, so its gradient does, and a kernel would have to find where the maximum is.
    "one_added_beside_a_maximum_with_a_gradient": "a gradient runs through the maximum of a row, which does not cancel",
}
"""Spellings of which no backward is replaced, with the reason that the report gives."""

PROGRAMS = int(os.environ.get("FUZZ_PROGRAMS", "60"))
FIRST = int(os.environ.get("FUZZ_SEED", "0"))
BATCH = 10


@pytest.mark.parametrize("name", [n for n, s in SPELLINGS.items() if s.gradients and n not in test_spellings.NOT_YET])
def test_spelling_is_replaced_in_both_directions(name):
    spelling = SPELLINGS[name]
    args = spelling.arguments(ODD, "float32")
    report = exact(with_gradients(spelling.program(ODD), args), args)
    reasons = [miss.reason for miss in report.near_misses]
    if name in LEFT:
        assert (replaced(report), reasons) == ([], [LEFT[name]])
    else:
        assert replaced(report) == ["forward+backward"] * spelling.sites(ODD), reasons


@pytest.mark.parametrize("start", range(FIRST, FIRST + PROGRAMS, BATCH))
def test_random_programs_with_their_gradients_compute_what_they_did(start):
    arguments = [array(2, N, N, seed=i) for i in range(3)]
    applied = written = 0
    complaints = []
    for seed in range(start, min(start + BATCH, FIRST + PROGRAMS)):
        program, right = random_program(seed)
        try:
            report = exact(with_gradients(program, arguments), arguments)
        except AssertionError as error:
            complaints.append(f"program {seed}: {error}")
            continue
        applied, written = applied + len(replaced(report)), written + right
        jax.clear_caches()
    assert complaints == []
    assert applied >= written * 0.2, f"only {applied} of {written} attentions were replaced"
