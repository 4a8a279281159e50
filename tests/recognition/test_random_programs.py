"""Random programs compute what they did, and enough of the attentions in them are replaced for that to mean something.

The environment variable FUZZ_PROGRAMS says how many are tried (100), FUZZ_SEED which is the first (0).
"""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest
from support.catalogue import array
from support.compare import compare
from support.random_programs import N, random_program

PROGRAMS = int(os.environ.get("FUZZ_PROGRAMS", "100"))
FIRST = int(os.environ.get("FUZZ_SEED", "0"))
BATCH = 10
"""Programs per test, so that a run of thousands shows progress and fails late."""


@pytest.mark.parametrize("start", range(FIRST, FIRST + PROGRAMS, BATCH))
def test_random_programs_compute_what_they_did(start):
    arguments = [array(2, N, N, seed=i) for i in range(3)]
    applied = written = 0
    complaints = []
    for seed in range(start, min(start + BATCH, FIRST + PROGRAMS)):
        gradients = seed % 4 == 0
        program, right = random_program(seed, reverse=gradients)
        compared = compare(program, arguments, gradients=gradients)
        complaints += [f"program {seed}: {complaint}" for complaint in compared.complaints]
        applied, written = applied + compared.counts(), written + right
        jax.clear_caches()
    assert complaints == []
    assert applied >= written * 0.4, f"only {applied} of {written} attentions were replaced"
    assert written >= BATCH // 2


def test_a_random_program_is_the_same_each_time_it_is_traced():
    arguments = [array(2, N, N, seed=i) for i in range(3)]
    for seed in range(5):
        first, second = (jax.make_jaxpr(random_program(seed)[0])(*arguments) for _ in range(2))
        assert str(first) == str(second)


def test_random_programs_have_both_right_and_wrong_attentions_in_them():
    counts = [random_program(seed)[1] for seed in range(100)]
    assert np.mean(counts) > 1
    assert min(counts) == 0
