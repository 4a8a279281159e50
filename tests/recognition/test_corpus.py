"""The programs of tests/corpus: every site is found, look-alikes are refused or exact, nothing raises."""

from __future__ import annotations

import importlib.util
import warnings

import corpus
import jax
import jax.numpy as jnp
import pytest
from support.compare import compare, compiled, floats, measured, optimized_like_a_user

from recognition.forms import EXPECTED, MODULES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    CASES = {case.name: case for case in corpus.cases()}

CARRIED = {
    "negative/mask_multiplies_scores": 1,  # as a part of the score program
    "negative/epsilon_in_denominator": 1,  # as a sink: without a maximum, a constant in the denominator is one
    "negative/custom_vjp_different_backward": 1,  # in the forward only; the derivative is the user's
}
"""Look-alikes that are replaced exactly, and how many sites each has."""


def _check_counts(case, report):
    reasons = [miss.reason for miss in report.near_misses]
    for op, expected in EXPECTED.items():
        assert report.counts()[op] == expected(case), (op, reasons)


def _names(**wanted):
    return [name for name, case in CASES.items() if all(getattr(case, k) == v for k, v in wanted.items())]


def _built(name):
    case = CASES[name]
    needed = {MODULES[case.library]} if case.library in MODULES else set()
    if case.kind == "train_step":
        needed.add("optax")
    missing = [module for module in sorted(needed) if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    return case, *case.build()


def _difference(case, function, args):
    """(report, largest error relative to the original's results)."""
    optimized = optimized_like_a_user(function)
    given = compiled(lambda *a: optimized(*a))(*args)
    expected = compiled(lambda *a: function(*a))(*args)
    # What is zero but for rounding, as the gradient of a bias on all keys, is compared with the largest of all.
    largest = max(float(jnp.max(jnp.abs(x.astype(jnp.float32)), initial=0.0)) for x in floats(expected))
    errors = (error for error, _ in measured(given, expected, least=largest * 1e-3))
    return optimized.report(), max(errors, default=0.0)


@pytest.mark.parametrize("name", _names(origin="hand", kind="forward"))
def test_every_site_written_by_hand_is_found(name):
    case, function, args = _built(name)
    report, error = _difference(case, function, args)
    _check_counts(case, report)
    assert error < (2e-2 if "bf16" in case.tags else 1e-5)


@pytest.mark.parametrize("name", _names(origin="library", kind="forward"))
def test_every_site_of_a_library_is_found(name):
    case, function, args = _built(name)
    report, error = _difference(case, function, args)
    _check_counts(case, report)
    assert error < (2e-2 if "bf16" in case.tags else 1e-5)


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].count("ce") and CASES[n].origin != "negative"])
def test_every_cross_entropy_is_found_in_both_directions(name):
    case, function, args = _built(name)
    if case.kind == "train_step":  # an optimizer divides by a gradient's own size, rounding errors too
        optimized = optimized_like_a_user(function)
        jax.jit(lambda *a: optimized(*a)).lower(*args)
        report, error = optimized.report(), 0.0
    else:
        report, error = _difference(case, function, args)
    found = [site.direction for site in report.sites if site.op == "cross_entropy"]
    wanted = "forward" if case.kind == "forward" else "forward+backward"
    assert found == [wanted] * case.count("ce"), [m.reason for m in report.near_misses if m.op == "cross_entropy"]
    assert error < (2e-2 if "bf16" in case.tags else 1e-4)


@pytest.mark.parametrize("name", _names(origin="negative", kind="forward"))
def test_look_alikes_are_refused_or_exact_in_value_and_gradient(name):
    case, function, args = _built(name)
    with_gradients = bool(floats(args)) and all(floats(a) for a in args)
    compared = compare(lambda *a: function(*a), args, gradients=with_gradients, dtype="float32")
    assert compared.complaints == []
    if case.decoy["op"] == "attention" and case.decoy["equivalent"] is None:
        assert compared.counts() == (CARRIED.get(case.family) or case.count("attention"))


def test_the_corpus_is_complete_enough_to_mean_something():
    assert sum(CASES[name].count("attention") for name in _names(origin="hand", kind="forward")) >= 12
    assert len(_names(origin="negative")) >= 10
    assert jax.default_backend() == "cpu"
