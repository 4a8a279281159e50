"""Options and environment at work in calls of an optimized function, and the reports of these calls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.catalogue import array

import autopallas
from autopallas.errors import AutopallasWarning, RequirementError, UnsupportedError
from autopallas.tuning.cache import WARNED
from transforms.test_transforms import attend, optimized, primitives, same

T, S, D = 5, 7, 3


@pytest.fixture(scope="module")
def qkv():
    return array(1, 2, T, D, seed=1), array(1, 2, S, D, seed=2), array(1, 2, S, D, seed=3)


def test_without_evidence_the_original_stays(qkv):
    wrapped = autopallas.optimize(attend, strict=True)
    wrapped(*qkv)
    (site,) = wrapped.report().sites
    assert site.verdict == "kept"
    assert "measured" in site.reason
    np.testing.assert_array_equal(wrapped(*qkv), jax.jit(attend)(*qkv))


def test_a_block_of_options_is_part_of_the_trace_key(qkv):
    wrapped = autopallas.optimize(attend, strict=True)
    jitted = jax.jit(wrapped)
    verdicts = []
    for objective in ("time", "always", "time"):
        with autopallas.options(objective=objective):
            jitted(*qkv)
            verdicts.append("autopallas_site" in primitives(jax.make_jaxpr(wrapped)(*qkv)))
    assert verdicts == [False, True, False]


def test_requirement_that_is_not_met_names_what_was_nearly_found(qkv):
    def function(q, k, v):
        p = jax.nn.softmax(q @ k.mT)
        return p @ v, p

    with pytest.raises(RequirementError, match=r"attention: 0 of 1[\s\S]*also returned"):
        optimized(function, require={"attention": 1})(*qkv)
    with pytest.raises(RequirementError, match="attention: 1 of 2"):
        optimized(require={"attention": 2})(*qkv)


def test_fuel_limits_the_number_of_applied_sites(qkv):
    def function(q, k, v):
        return attend(attend(attend(q, k, v), k, v), k, v)

    for fuel in range(4):
        wrapped = optimized(function, fuel=fuel)
        same(wrapped(*qkv), function(*qkv))
        report = wrapped.report()
        assert report.counts()["attention"] == fuel
        assert [site.verdict for site in report.sites] == ["applied"] * fuel + ["kept"] * (3 - fuel)


def test_only_the_operations_asked_for(qkv):
    wrapped = optimized(ops="cross_entropy")
    wrapped(*qkv)
    assert wrapped.report().sites == ()


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_implementation_by_name(implementation, qkv):
    wrapped = optimized(implementation=implementation)
    same(wrapped(*qkv), attend(*qkv))
    assert wrapped.report().sites[0].implementation == implementation


def test_an_implementation_that_cannot_is_an_error_and_in_a_list_a_warning(qkv):
    with pytest.raises(UnsupportedError, match="cudnn"):
        optimized(implementation="cudnn")(*qkv)
    WARNED.forget()
    wrapped = optimized(implementation=["cudnn", "xla"])
    with pytest.warns(AutopallasWarning, match="does not use cudnn for attention, as listed: cuDNN's attention is"):
        same(wrapped(*qkv), attend(*qkv))
    (site,) = wrapped.report().sites
    assert site.implementation == "xla"
    assert [attempt[0] for attempt in site.attempts] == ["cudnn"]


def test_explain_runs_nothing_and_uses_the_functions_own_options():
    ran = []

    def function(q, k, v):
        jax.debug.callback(lambda: ran.append(1))
        return attend(q, k, v)

    shapes = [jax.ShapeDtypeStruct((1, 2, n, D), jnp.float32) for n in (T, S, S)]
    wrapped = optimized(function)
    assert autopallas.explain(wrapped, *shapes).counts()["attention"] == 1
    assert autopallas.explain(function, *shapes).sites[0].verdict == "kept"
    assert wrapped.report().sites == ()
    jax.effects_barrier()
    assert ran == []


def test_the_report_is_of_the_last_traced_signature(qkv):
    wrapped = optimized()
    assert wrapped.report() == autopallas.Report()
    wrapped(*qkv)
    assert "B=1 N=2" in wrapped.report().sites[0].spec_line
    wrapped(*(x.repeat(2, 0) for x in qkv))
    assert "B=2 N=2" in wrapped.report().sites[0].spec_line


def test_effects_of_the_function_stay_and_keep_their_order(qkv, capfd):
    def function(q, k, v):
        jax.debug.print("before {}", 1, ordered=True)
        out = attend(q, k, v)
        jax.debug.print("after {}", 2, ordered=True)
        return out

    wrapped = optimized(function, require={"attention": 1})
    wrapped(*qkv)
    jax.effects_barrier()
    assert capfd.readouterr().out.split("\n")[:2] == ["before 1", "after 2"]


def test_disable_runs_the_program_as_it_was_written(qkv, monkeypatch):
    monkeypatch.setenv("AUTOPALLAS_DISABLE", "1")
    wrapped = optimized(require={"attention": 1})
    assert "autopallas_site" not in primitives(jax.make_jaxpr(wrapped)(*qkv))
    np.testing.assert_array_equal(wrapped(*qkv), jax.jit(attend)(*qkv))
    assert wrapped.report().sites == ()


def test_backend_wins_over_the_code(qkv, monkeypatch):
    monkeypatch.setenv("AUTOPALLAS_BACKEND", "reference")
    wrapped = optimized(implementation="xla")
    wrapped(*qkv)
    assert wrapped.report().sites[0].implementation == "reference"
    monkeypatch.setenv("AUTOPALLAS_BACKEND_ATTENTION", "xla")
    wrapped = optimized()
    wrapped(*qkv)
    assert wrapped.report().sites[0].implementation == "xla"


def test_fuel_from_the_environment(qkv, monkeypatch):
    monkeypatch.setenv("AUTOPALLAS_FUEL", "0")
    wrapped = optimized()
    wrapped(*qkv)
    assert [site.verdict for site in wrapped.report().sites] == ["kept"]
    assert "fuel" in wrapped.report().sites[0].reason
