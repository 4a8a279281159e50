"""Mutable arrays (``jax.new_ref``) in and around what is replaced: they are read and written as in the original."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import lax
from support.catalogue import array

import autopallas

Q, K, V = (array(2, 8, 4, seed=i) for i in range(3))


def attend(q, k, v):
    return jax.nn.softmax(q @ k.mT / 3) @ v


def attend_and_write(ref, q, k):
    result = attend(q, k, ref[...])
    ref[...] = result
    return result.sum()


def called_twice(q, k, v):
    ref = jax.new_ref(v)
    call = jax.jit(attend_and_write)
    return call(ref, q, k), call(ref, k, q), ref[...]


def scanned_twice(q, k, v):
    ref = jax.new_ref(v)
    loop = jax.jit(lambda ref, rows: lax.scan(lambda c, row: (c + attend_and_write(ref, row, k), None), 0.0, rows)[0])
    return loop(ref, q[None]), loop(ref, k[None]), ref[...]


def in_a_branch_twice(q, k, v):
    ref = jax.new_ref(v)

    def branch(sign):
        return lax.cond(sign * q.sum() > 0, lambda: attend_and_write(ref, q, k), lambda: attend(k, q, v).sum())

    return branch(1), branch(-1), ref[...]


def written_between_scores_and_values(q, k, v):
    ref = jax.new_ref(v)
    weights = jax.nn.softmax(q @ k.mT)
    ref[...] = 2 * ref[...] + 1
    return weights @ ref[...]


def same(given, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), given, expected)


def always(function, **options):
    return autopallas.optimize(function, objective="always", strict=True, **options)


@pytest.mark.parametrize("program", [called_twice, scanned_twice, in_a_branch_twice, written_between_scores_and_values])
def test_one_that_the_function_makes(program):
    optimized = always(program)
    same(optimized(Q, K, V), jax.jit(program)(Q, K, V))
    assert program is in_a_branch_twice or optimized.report().counts()["attention"]


@pytest.mark.parametrize("options", [{}, {"verify": True}, {"verify": 0.5}])
def test_one_that_is_given_or_captured_is_written_once_for_each_call(options):
    captured, given, expected, other = (jax.new_ref(V) for _ in range(4))
    optimized = always(lambda ref, q, k: attend_and_write(ref, q, k) + attend_and_write(captured, k, q), **options)
    for _ in range(2):
        same(optimized(given, Q, K), attend_and_write(expected, Q, K) + attend_and_write(other, K, Q))
    same((given[...], captured[...]), (expected[...], other[...]))
    assert optimized.report().counts()["attention"] == 2


def test_a_check_of_what_changes_one_says_that_it_did_not_run():
    ref = jax.new_ref(V)
    verification = autopallas.verify(always(attend_and_write), ref, Q, K)
    assert "mutable" in verification.notes[0]
    np.testing.assert_array_equal(ref[...], V)
