"""``autopallas profile``, and the names that sites have in profiles.  No time is asserted."""

from __future__ import annotations

import importlib
import json
import re
import sys

import jax
import jax.numpy as jnp
import pytest

import autopallas
from autopallas.places import scope
from autopallas.plan.exclusions import leaving_out
from autopallas.workbench.worth import interval

MODULE = """
import functools, jax, jax.numpy as jnp

def loss(q, w, x, labels):
    attended = jax.nn.softmax(q @ q.T / 8.0) @ q
    logits = (x + attended) @ w
    picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

step = jax.jit(jax.grad(loss, argnums=(0, 1)), donate_argnums=1)

def plain(x):
    return x + 1

def repeated(function):
    @functools.wraps(function)
    def run(x):
        return function(function(x))
    return run

attend_twice = repeated(lambda q: jax.nn.softmax(q @ q.T / 8.0) @ q)
"""
SHAPES = "f32[24,8],f32[8,40],f32[24,8],i32[24]"


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "profiled.py").write_text(MODULE)
    importlib.invalidate_caches()
    yield
    sys.modules.pop("profiled", None)


def test_each_place_is_left_out_in_turn_and_its_worth_told(command, tmp_path):
    arguments = ("profiled:step", "--shapes", SHAPES, "--objective", "always", "--rounds", "3")
    status, out, err = command("profile", *arguments, "-o", "worth.html")
    assert (status, err) == (0, "")
    assert "attention at profiled.py:5 (loss)" in out
    assert "cross_entropy at profiled.py:6 (loss)" in out
    assert "medians with 95% intervals" in out
    page = (tmp_path / "worth.html").read_text()
    assert page.count("<rect") >= 2
    assert "attention at profiled.py:5" in page
    assert "What each site is worth" in page
    status, out, _ = command("profile", *arguments, "--places", "1", "--json")
    found = json.loads(out)
    assert status == 0
    assert [len(found["worths"]), found["rounds"], found["failures"]] == [1, 3, {}]
    worth = found["worths"][0]
    assert worth["seconds"]["lower"] <= worth["seconds"]["median"] <= worth["seconds"]["upper"]
    assert worth["temporary_bytes"] is not None
    assert worth["first_step_seconds"] is not None


def test_a_function_without_sites_is_measured_and_bad_input_is_status_2(command):
    status, out, _ = command("profile", "profiled:plain", "--shapes", "f32[4]", "--rounds", "2")
    assert (status, "No site is replaced" in out) == (0, True)
    wrongs = (("--rounds", "1"), ("--seconds", "nan"), ("-o", "worth.txt"), ("--inputs", "profiled:missing"))
    for wrong in wrongs:
        status, _, err = command("profile", "profiled:plain", "--shapes", "f32[4]", *wrong)
        assert (status, err.count("\n")) == (2, 1)


def test_a_function_around_another_is_profiled_as_it_is(command):
    options = ("--shapes", "f32[24,8]", "--objective", "always", "--rounds", "2", "--json")
    status, out, _ = command("profile", "profiled:attend_twice", *options)
    assert status == 0
    assert [worth["sites"] for worth in json.loads(out)["worths"]] == [2]


def two(q, k):
    first = jax.nn.softmax(q @ k.T / 8.0) @ k
    return jax.nn.softmax(first @ k.T / 4.0) @ k


def test_a_place_that_is_left_out_is_kept_and_the_others_replaced():
    x = jnp.ones((24, 16))
    optimized = autopallas.optimize(two, objective="always")
    optimized(x, x)
    first, second = optimized.report().sites
    with leaving_out(frozenset({("attention", first.location)})):
        optimized(x, x)
    verdicts = {site.location: site.verdict for site in optimized.report().sites}
    assert verdicts == {first.location: "kept", second.location: "applied"}
    assert "left out" in optimized.report().sites[0].reason
    optimized.clear_cache()
    optimized(x, x)
    assert optimized.report().counts() == {"attention": 2}


def test_sites_have_names_in_the_compiled_program_without_folders():
    x = jnp.ones((24, 16))
    optimized = autopallas.optimize(jax.grad(lambda q, k: jnp.sum(two(q, k))), objective="always")
    lowered = optimized.lower(x, x)
    names = set(re.findall(r'op_name="([^"]*)"', lowered.compile().as_text()))
    places = {site.location.partition(" ")[0].rpartition("/")[2] for site in optimized.report().sites}
    assert len(places) == 2
    for place in places:
        own = {name for name in names if f"autopallas/attention/{place}" in name}
        assert any("autopallas_attention_backward" in name for name in own)
        assert any("autopallas_attention" in name and "backward" not in name for name in own)
    assert not any("/test_profile_command.py" in name and "/tests/" in name for name in names)
    again = autopallas.optimize(jax.grad(lambda q, k: jnp.sum(two(q, k))), objective="always").lower(x, x)
    assert again.as_text() == lowered.as_text(), "lowered text stays the same from trace to trace"


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("/home/me/model.py:94 (attend)", "autopallas/attention/model.py:94"),
        ("C:\\code\\model.py:94 (attend)", "autopallas/attention/model.py:94"),
        ("train.py:4 (loss), in flax/linear.py:2 (__call__)", "autopallas/attention/train.py:4"),
        ("", "autopallas/attention"),
    ],
)
def test_names_hold_a_file_and_a_line(location, name):
    assert scope("attention", location) == name


def test_an_interval_holds_the_median_and_narrows_with_more_samples():
    few, many = interval([float(n) for n in range(5)]), interval([float(n % 5) for n in range(45)])
    assert (few.median, few.lower, few.upper) == (2.0, 0.0, 4.0)
    assert few.lower < many.lower <= many.median <= many.upper < few.upper
    assert interval([]) is None
    six = interval([float(n) for n in range(6)])
    assert (six.lower, six.upper) == (0.0, 5.0), "two in 64 samples of six lie on one side of the median"
