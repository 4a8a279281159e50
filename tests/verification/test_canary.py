"""Canaries: some calls are compared with the original; a breach disables the site at fault, and no result changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopallas
from autopallas.errors import AutopallasWarning, OptionError
from autopallas.kernels.attention import xla
from autopallas.options import resolve
from autopallas.report import Report
from autopallas.verification import blame, canary, compared_calls
from autopallas.verification.canary import Canary, Distance, decade

OFTEN = 0.9


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOPALLAS_CACHE_DIR", str(tmp_path))


@pytest.fixture
def wrong(monkeypatch):
    """Makes attention's kernel wrong in one column."""
    right = xla.forward

    def spoil(factor=1.35):
        def forward(*arguments):
            results = right(*arguments)
            return jax.tree.map(lambda x: x.at[..., 3:4].multiply(factor) if x.ndim > 3 else x, results)

        monkeypatch.setattr(xla, "forward", forward)
        jax.clear_caches()

    yield spoil
    jax.clear_caches()


def attend(x):
    return jax.nn.softmax(x @ x.T / 4.0) @ x


def program(x, w):
    return {"attended": attend(x @ w), "chosen": jnp.argmax(x, axis=-1)}


X = jnp.asarray(np.random.default_rng(0).standard_normal((40, 16)), jnp.float32)
W = jnp.eye(16)


def watched(function=program, verify=OFTEN, **options):
    return autopallas.optimize(function, objective="always", verify=verify, **options)


def called(function, *arguments, times=12):
    return [function(*arguments) for _ in range(times)]


def test_errors_are_counted_for_each_site_and_results_are_the_optimized_functions():
    function = watched()
    results = called(function, X, W)
    plain = autopallas.optimize(program, objective="always")(X, W)
    for result in results:
        jax.tree.map(np.testing.assert_array_equal, result, plain)
    found = function.report().canary
    assert 6 <= found.compared <= 12
    assert found.breaches == found.notes == ()
    attention, respelling = sorted(found.errors)
    assert attention.startswith(f"attention at {__file__}")
    assert set(found.errors[respelling]) == {"0"}
    assert sum(found.errors[attention].values()) == found.compared
    assert all(float(bound) <= 1e-5 for bound in found.errors[attention])
    assert "Calls compared with the original" in str(function.report())
    assert f"up to {next(iter(found.errors[attention]))}: " in function.report().to_html()
    assert Report.from_json(function.report().to_json()).canary == found
    assert "canary" in json.loads(function.report().to_json())


def test_outputs_that_several_sites_reach_are_counted_by_their_names():
    function = watched(lambda x: attend(jax.nn.softmax(x @ x.T) @ x + 1))
    called(function, X)
    assert list(function.report().canary.errors) == ["output result"]


def test_the_fraction_of_the_calls_is_compared():
    for fraction in (0.5, 0.1, 0.01):
        one = Canary(fraction)
        compared = 0
        for _ in range(20_000):
            if one.due():
                compared += 1
                one.wait(fraction)
        assert 0.8 * fraction < compared / 20_000 < 1.25 * fraction


@pytest.mark.parametrize("options", [{}, {"implementation": "xla"}])
def test_a_breach_disables_the_site_and_says_where_and_by_how_much(wrong, options):
    wrong()
    function = watched(**options)
    with pytest.warns(AutopallasWarning, match=r"disables the attention at .*relative error of [\d.e-]+, 1.0e-05 is"):
        first, *_, last = called(function, X, W)
    right = jax.jit(program)(X, W)["attended"]
    assert np.abs(first["attended"] - right).max() > 0.01  # what was wrong is returned: results do not change
    np.testing.assert_allclose(last["attended"], right, rtol=1e-5, atol=1e-6)
    report = function.report()
    assert {site.op: site.verdict for site in report.sites} == {"attention": "kept", "respelling": "applied"}
    (breach,) = report.canary.breaches
    assert all(told in breach for told in ("attention at", "its forward by xla", "output ['attended']"))
    assert report.canary.errors[f"attention at {report.sites[0].location}"] == {"1e+00": 1}
    assert report.canary.errors["output ['attended']"] == {"0": report.canary.compared - 1}
    assert "IN BREACH" in str(report)
    later = watched()
    called(later, X, W)
    assert {site.op: site.verdict for site in later.report().sites}["attention"] == ("kept"), (
        "remembered for the next process"
    )


def test_a_wrong_backward_is_found_in_a_train_step(wrong):
    wrong()
    step = watched(jax.value_and_grad(lambda x: jnp.sum(attend(x) ** 2)))
    with pytest.warns(AutopallasWarning, match="disables the attention"):
        *_, (value, gradient) = called(step, X)
    wanted = jax.jit(jax.value_and_grad(lambda x: jnp.sum(attend(x) ** 2)))(X)
    np.testing.assert_allclose(value, wanted[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, wanted[1], rtol=1e-4, atol=1e-5)


def test_elements_that_are_not_finite_any_more_are_a_breach(wrong):
    wrong(jnp.nan)
    function = watched()
    with pytest.warns(AutopallasWarning, match="elements that are not finite"):
        called(function, X, W)
    assert any("not finite" in counts for counts in function.report().canary.errors.values())


@pytest.mark.nightly
def test_sites_that_are_right_by_themselves_are_halved(wrong, monkeypatch):
    wrong()
    monkeypatch.setattr(blame, "_by_themselves", lambda *_: {})
    function = watched(lambda x, w: (attend(x @ w), jnp.argmax(x, -1), jnp.cumsum(x, axis=0)))
    with pytest.warns(AutopallasWarning, match="disables the attention"):
        called(function, X, W)
    kept = {site.op + site.kind for site in function.report().sites if site.verdict == "kept"}
    assert kept == {"attention"}


@pytest.mark.nightly
def test_what_does_not_happen_again_disables_all_sites(monkeypatch):
    monkeypatch.setattr(compared_calls, "leaves_named", _spoiled(compared_calls.leaves_named))
    function = watched()
    with pytest.warns(AutopallasWarning, match="did not happen again"):
        called(function, X, W)
    assert all(site.verdict == "kept" for site in function.report().sites)
    assert len(function.report().canary.breaches) == 2


def _spoiled(leaves_named):
    """Reads the result of the first compared call, and of no other, as if it were wrong."""
    calls = iter(range(100))

    def spoiled(result):
        names, leaves = leaves_named(result)
        return names, [x * 2 for x in leaves] if next(calls) == 0 else leaves

    return spoiled


def test_an_ill_conditioned_output_is_no_breach_and_is_judged_by_the_oracle_once(monkeypatch):
    judged = []
    monkeypatch.setattr(blame, "judged", lambda *a, own=blame.judged: judged.append(a) or own(*a))

    def cancelled(x):
        y = attend(x)
        return jnp.sum(y - jnp.mean(y))  # zero but for rounding

    function = watched(cancelled)
    called(function, X)
    assert function.report().canary.breaches == ()
    assert len(judged) <= 1


def test_programs_with_effects_are_not_compared():
    ran = []

    def printing(x):
        jax.debug.callback(lambda: ran.append(1))
        return attend(x)

    function = watched(printing)
    called(function, X)
    jax.effects_barrier()
    assert len(ran) == 12
    found = function.report().canary
    assert found.compared == 0
    assert "effects" in found.notes[0]


def test_donated_arguments_are_copied():
    function = watched(jax.jit(lambda x: attend(x) + x, donate_argnums=0))
    for _ in range(8):
        x = X + 0.0
        result = function(x)
        assert x.is_deleted()
        np.testing.assert_allclose(result, attend(X) + X, rtol=1e-5, atol=1e-6)
    found = function.report().canary
    assert found.compared >= 4
    assert "donates" in found.notes[0]


def test_results_of_eight_bits_are_compared():
    def quantised(x):
        return attend(x).astype(jnp.float8_e4m3fn)

    run = watched(quantised, verify=1 - 1e-9, strict=True)
    for _ in range(2):
        given, wanted = (x.astype(jnp.float32) for x in (run(X), jax.jit(quantised)(X)))
        np.testing.assert_allclose(given, wanted, rtol=0.13, atol=2**-9)  # one step of such a number, where they differ
    record = run.report().canary
    assert record is not None
    assert record.notes == ()
    assert record.compared >= 1


def test_static_and_keyword_arguments_and_methods_are_compared_too():
    class Model:
        @autopallas.optimize(objective="always", verify=OFTEN)
        def __call__(self, x, *, scale):
            return attend(x) * scale

    model = Model()
    for _ in range(8):
        model(X, scale=2.0)
    assert Model.__call__.report().canary is not None
    function = watched(jax.jit(lambda x, power: attend(x) ** power, static_argnums=1))
    called(function, X, 2)
    assert function.report().canary.compared >= 6


SHARDED = """
import os, warnings
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
import jax, jax.numpy as jnp, numpy as np, autopallas
from autopallas.kernels.attention import xla
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

sharding = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), P("d"))
x = jax.device_put(jax.random.normal(jax.random.key(0), (8, 40, 16)), sharding)

def attend(x):
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, x)), x)

def called():
    function = autopallas.optimize(attend, objective="always", implementation="xla", verify=0.9)
    for _ in range(8):
        assert function(x).sharding == sharding
    return function.report()

report = called()
assert report.counts() == {"attention": 1}
assert 4 <= report.canary.compared <= 8, report.canary
assert report.canary.breaches == report.canary.notes == ()
right = xla.forward
xla.forward = lambda *a: jax.tree.map(lambda x: x * 1.35 if x.ndim > 3 else x, right(*a))
jax.clear_caches()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    report = called()
assert any("disables the attention" in str(one.message) for one in caught), caught
assert [site.verdict for site in report.sites] == ["kept"]
print("as it should be")
"""


def test_calls_on_several_devices_are_compared_as_they_are_divided(tmp_path):
    environment = os.environ | {"AUTOPALLAS_CACHE_DIR": str(tmp_path)}
    child = subprocess.run(
        [sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True, check=False
    )
    assert "as it should be" in child.stdout, child.stderr


def test_calls_inside_of_another_program_are_not_compared():
    function = watched(attend)
    called(function, X, times=3)
    before = function.report().canary.compared
    for scale in range(1, 8):
        jax.grad(lambda x, scale=scale: jnp.sum(function(x * scale)))(X)
    found = function.report().canary
    assert found.compared == before
    assert "part of another program" in found.notes[0]


def test_the_option_holds_where_it_is_set():
    function = autopallas.optimize(program, objective="always")
    with autopallas.options(verify=OFTEN):
        called(function, X, W, times=6)
    compared = function.report().canary.compared
    assert compared > 0
    called(function, X, W)
    with autopallas.options(verify=OFTEN):
        assert function.report() is not None
    assert autopallas.optimize(program, verify=False)(X, W) is not None


def test_a_failing_comparison_costs_no_call_and_is_told(monkeypatch):
    def fails(*_):
        raise ZeroDivisionError("no comparison")

    monkeypatch.setattr(compared_calls, "distances", fails)
    function = watched()
    with pytest.warns(AutopallasWarning, match="could not compare a call"):
        called(function, X, W)
    assert "ZeroDivisionError" in function.report().canary.notes[0]
    with pytest.raises(ZeroDivisionError):
        called(watched(strict=True), X, W)


@pytest.mark.parametrize(
    ("text", "value"), [("1/1000", 0.001), ("0.25", 0.25), ("1", True), ("0", False), ("1e-3", 0.001), ("2/2", True)]
)
def test_the_environment_takes_fractions(monkeypatch, text, value):
    monkeypatch.setenv("AUTOPALLAS_VERIFY", text)
    assert resolve({}).verify == value
    assert isinstance(resolve({}).verify, bool) == isinstance(value, bool)


def test_numbers_one_and_zero_mean_true_and_false():
    assert resolve({"verify": 1}).verify is True
    assert resolve({"verify": 0.0}).verify is False
    assert resolve({"verify": np.float32(0.5)}).verify == 0.5


@pytest.mark.parametrize("value", [2, -0.1, "0.5", float("nan"), None])
def test_other_numbers_are_refused(value):
    with pytest.raises(OptionError, match=r"verify.*fraction of calls between 0 and 1"):
        resolve({"verify": value})


@pytest.mark.parametrize("text", ["1/0", "2", "-1", "half", "1/", "nan"])
def test_other_texts_are_refused(monkeypatch, text):
    monkeypatch.setenv("AUTOPALLAS_VERIFY", text)
    with pytest.raises(OptionError, match=r"AUTOPALLAS_VERIFY.*1/1000"):
        resolve({})


def test_distances_of_every_dtype():
    x = jnp.asarray([1.0, 2.0, jnp.inf, jnp.nan, 0.0])
    y = jnp.asarray([1.0, 2.5, jnp.inf, jnp.nan, jnp.inf])
    pairs = [
        (x, y, Distance(0.25, 1)),
        (jnp.asarray([1, 2]), jnp.asarray([1, 3]), Distance(0.5, 0)),
        (jnp.asarray([True]), jnp.asarray([True]), Distance(0.0, 0)),
        (jnp.zeros((0, 3)), jnp.zeros((0, 3)), Distance(0.0, 0)),
        (jnp.bfloat16(4.0), jnp.bfloat16(3.0), Distance(0.25, 0)),
        (jnp.float8_e4m3fn(4.0), jnp.float8_e4m3fn(3.0), Distance(0.25, 0)),
        (jnp.float8_e5m2(4.0), jnp.float8_e5m2(jnp.inf), Distance(0.0, 1)),
        (jnp.asarray([1j]), jnp.asarray([1j * 1.5]), Distance(0.5, 0)),
        (jax.random.key(0), jax.random.key(0), Distance(0.0, 0)),
    ]
    for found, (_, _, wanted) in zip(
        canary.distances([x for x, _, _ in pairs], [y for _, y, _ in pairs]), pairs, strict=True
    ):
        assert found.relative == pytest.approx(wanted.relative)
        assert found.introduced == wanted.introduced
    assert decade(Distance(1e-6, 0)) == "1e-06"


def test_results_too_far_apart_for_their_dtype_are_counted_and_judged():
    """Their distance is infinite, though both are finite."""
    (found,) = canary.distances([jnp.full(3, 3e38)], [jnp.full(3, -3e38)])
    assert found.introduced == 0
    assert decade(found) == "not finite"
