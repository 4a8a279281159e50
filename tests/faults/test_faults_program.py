"""Faults in recognition and planning: the program stays as it was."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

import autopallas
from autopallas import pipeline
from autopallas.kernels.attention import tuned_block_sizes
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.rewrite import sites
from autopallas.sharding import call_shardings
from tests.faults.programs import forget, program, warned

ERRORS = [ValueError("on fire"), MemoryError("too much")]


def kept_with_one_warning(fn, case, stage, op=""):
    with warned(1):
        case.same(fn(*case.operands))
        case.same(fn(*case.operands))
    report = fn.report()
    assert report.counts() == {}
    assert [(failure.stage, failure.op) for failure in report.failures] == [(stage, op)]


def healed(case):
    forget()
    fn = autopallas.optimize(case.function, objective="always")
    with warned(0):
        case.same(fn(*case.operands))
    return fn.report().counts()


def raising(error):
    def fails(*arguments, **keywords):
        raise error

    return fails


@pytest.mark.parametrize("error", ERRORS)
def test_a_pattern_that_fails(error, monkeypatch):
    case = program()
    monkeypatch.setattr(pipeline, "find", raising(error))
    kept_with_one_warning(autopallas.optimize(case.function, objective="always"), case, "patterns")
    monkeypatch.undo()
    assert healed(case) == {"attention": 1}


@pytest.mark.parametrize("error", ERRORS)
def test_shardings_that_cannot_be_found_out(error, monkeypatch):
    case = program()
    monkeypatch.setattr(call_shardings, "known", raising(error))
    kept_with_one_warning(autopallas.optimize(case.function, objective="always"), case, "partition")
    monkeypatch.undo()
    assert healed(case) == {"attention": 1}


@pytest.mark.parametrize("error", ERRORS)
def test_a_plan_that_fails(error, monkeypatch):
    case = program()
    monkeypatch.setattr(tuned_block_sizes, "find", raising(error))
    kept_with_one_warning(autopallas.optimize(case.function, objective="always"), case, "plan", "attention")
    monkeypatch.undo()
    assert healed(case) == {"attention": 1}


def changed_matches(monkeypatch, change):
    find = pipeline.find
    monkeypatch.setattr(pipeline, "find", lambda *a: ([change(match) for match in find(*a)[0]], []))


def test_a_match_of_another_shape(monkeypatch):
    case = program()
    other = jax.make_jaxpr(lambda q, k, v: (q @ k.T)[:, :1] @ v[:1, :3])(*case.operands)
    changed_matches(monkeypatch, lambda match: replace(match, original=other))
    kept_with_one_warning(autopallas.optimize(case.function, objective="always"), case, "trace", "attention")


def test_a_wrong_match_under_verify(monkeypatch):
    case = program()
    changed_matches(monkeypatch, lambda match: replace(match, operands=match.operands[::-1]))
    fn = autopallas.optimize(case.function, objective="always", verify=True)
    with pytest.raises(autopallas.VerificationError):
        fn(*case.operands)
    monkeypatch.undo()
    assert healed(case) == {"attention": 1}


@pytest.mark.parametrize("sizes", [BlockSizes(2**20, 2**20), BlockSizes(1, 1)])
def test_block_sizes_that_fit_nothing(sizes, monkeypatch):
    """They are made valid for the shape; the result is right."""
    case = program()
    monkeypatch.setattr(tuned_block_sizes, "infer_block_sizes", lambda spec, *_: sizes.fitted(spec))
    fn = autopallas.optimize(case.function, objective="always")
    with warned(0):
        case.same(fn(*case.operands))
    assert fn.report().counts() == {"attention": 1}


def test_one_site_that_cannot_be_spliced_leaves_the_others(monkeypatch):
    case = program()
    narrow = tuple(x[:, :8] for x in case.operands)

    def both(operands, narrow):
        return case.function(*operands), case.function(*narrow)

    splicer = sites._Splicer
    real = splicer.replace

    def fails(self, match, decision):
        if match.original.out_avals[0].shape[-1] == 8:
            raise AssertionError("no place for it")
        real(self, match, decision)

    monkeypatch.setattr(splicer, "replace", fails)
    fn = autopallas.optimize(both, objective="always")
    with warned(1, "rewrite", "no place for it"):
        case.same(fn(case.operands, narrow)[0])
    assert sorted(site.verdict for site in fn.report().sites) == ["applied", "kept"]
    assert [failure.stage for failure in fn.report().failures] == ["rewrite"]
