"""What other packages bring: implementations and operations by entry points, and tokamax as the first of them."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import warnings
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopallas
from autopallas.court.trial import judge
from autopallas.errors import AutopallasWarning, OptionError
from autopallas.kernels.attention import attention
from autopallas.sites import operation as operations
from autopallas.sites.calls import kernel_backward, kernel_forward
from autopallas.sites.device import Device
from autopallas.sites.operation import operation_named
from autopallas.sites.providers import GROUP, Providers
from autopallas.tuning.key import version_of_provided

MODULE = """
import autopallas, jax, jax.numpy as jnp
from autopallas.sites.operation import Supported
from autopallas.sites.providers import ProvidedImplementation, Provider
from autopallas.kernels.attention.xla import backward, forward

def supports(spec, device):
    return Supported()

def reference(x):
    return jnp.tanh(x) * jnp.exp(x)

def declare():
    @autopallas.pattern(reference, shapes=[jnp.ones(8)], name="brought_gate")
    def gate(x):
        return jnp.exp(x) * jnp.tanh(x)

PROVIDER = Provider((ProvidedImplementation("attention", "borrowed", "brought", ("cpu",), "7"),), declare)
UNKNOWN = Provider((ProvidedImplementation("nothing", "borrowed", "brought", ("cpu",)),))
SHADOW = Provider((ProvidedImplementation("attention", "xla", "brought", ("cpu",)),))
"""


def attend(q, k, v):
    return jax.nn.softmax(q @ k.T / 8.0) @ v


X = np.random.default_rng(0).standard_normal((24, 16)).astype(np.float32)


@pytest.fixture
def providers(tmp_path, monkeypatch):
    """Installs entry points, as of a package, and starts anew with them."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "brought.py").write_text(MODULE)
    importlib.invalidate_caches()
    kernel_forward.cache_clear()
    kernel_backward.cache_clear()

    def install(**values):
        entries = [metadata.EntryPoint(name, value, GROUP) for name, value in values.items()]
        found = Providers(lambda: entries)
        monkeypatch.setattr(operations, "PROVIDERS", found)
        monkeypatch.setattr("autopallas.pipeline.PROVIDERS", found)
        return found

    yield install
    sys.modules.pop("brought", None)
    for own in operations.registered():
        operations.unregister(own)


def test_an_implementation_takes_part_in_the_race_and_can_be_named(providers):
    providers(package="brought:PROVIDER")
    assert operation_named("attention").requested(None, Device("cpu", ""))[-1] == "borrowed"
    assert "borrowed" not in operation_named("attention").requested(None, Device("gpu", ""))
    step = autopallas.optimize(jax.grad(lambda q: jnp.sum(attend(q, X, X))), implementation="borrowed", strict=True)
    np.testing.assert_allclose(step(X), jax.grad(lambda q: jnp.sum(attend(q, X, X)))(X), rtol=1e-4, atol=1e-5)
    assert [site.implementation for site in step.report().sites] == ["borrowed"]
    assert [version_of_provided("attention", name) for name in ("borrowed", "xla")] == ["brought 7", ""]
    verdict = judge(
        autopallas.optimize(attend, implementation="borrowed"), attend, [X, X, X], dtypes=(), questions=["runs", "vmap"]
    )
    assert verdict.ok, str(verdict)


def test_a_public_function_calls_it_by_its_name_whatever_its_module_is_called(providers):
    providers(package="brought:PROVIDER")
    q = jnp.asarray(X)[None, :, None]
    found, gradient = jax.value_and_grad(lambda q: jnp.sum(attention(q, q, q, scale=1 / 8, implementation="borrowed")))(
        q
    )
    true, wanted = jax.value_and_grad(lambda x: jnp.sum(attend(x, x, x)))(X)
    np.testing.assert_allclose(found, true, rtol=1e-4)
    np.testing.assert_allclose(gradient[0, :, 0], wanted, rtol=1e-4, atol=1e-5)


def test_a_search_measures_it_as_any_other(providers):
    providers(package="brought:PROVIDER")
    optimized = autopallas.optimize(attend, autotune=True, tune_seconds=20.0)
    optimized(X, X, X)
    (site,) = optimized.report().sites
    assert "borrowed" in site.reason or site.implementation == "borrowed"


def test_an_operation_is_looked_for_once_its_package_is_installed(providers):
    providers(package="brought:PROVIDER")
    fn = autopallas.optimize(lambda x: jnp.tanh(x) * jnp.exp(x) + 1, strict=True)
    np.testing.assert_allclose(fn(X), np.tanh(X) * np.exp(X) + 1, rtol=1e-5)
    assert fn.report().counts() == {"brought_gate": 1}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("missing_module:PROVIDER", "No module named 'missing_module'"),
        ("brought:MISSING", "has no attribute 'MISSING'"),
        ("brought:MODULE", "has no attribute"),
        ("brought:supports", "missing 2 required positional arguments"),
        ("brought:UNKNOWN", "there is no operation 'nothing'"),
        ("brought:SHADOW", "or one of autopallas itself"),
    ],
)
def test_a_faulty_provider_costs_itself_alone(providers, value, reason):
    providers(faulty=value, good="brought:PROVIDER")
    with pytest.warns(AutopallasWarning, match="does without the provider faulty"):
        fn = autopallas.optimize(attend, implementation=["borrowed", "xla"], strict=True)
    fn(X, X, X)
    report = fn.report()
    assert [site.implementation for site in report.sites] == ["borrowed"]
    (failure,) = report.failures
    assert failure.stage == "providers"
    assert reason in failure.error
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutopallasWarning)  # it is told once
        fn(X[:8], X[:8], X[:8])


def test_two_providers_cannot_have_one_name(providers):
    found = providers(one="brought:PROVIDER", two="brought:PROVIDER")
    with pytest.warns(AutopallasWarning, match="two"):
        operations.provided()
    assert [fault.provider for fault in found.faults] == ["two"]


def test_nothing_is_loaded_at_import_and_an_unknown_name_is_still_an_error(providers):
    loaded = []
    providers()
    monitored = Providers(lambda: loaded.append(1) or [])
    operations.PROVIDERS = monitored
    autopallas.optimize(attend, implementation="xla")
    assert not loaded
    with pytest.raises(OptionError, match="'borrowed', which is not one of"):
        autopallas.optimize(attend, implementation="borrowed")
    assert loaded
    code = "import autopallas; from autopallas.sites.providers import PROVIDERS; print(PROVIDERS._begun)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_exported_program_needs_no_other_package(providers):
    export = pytest.importorskip("jax.export")
    providers(package="brought:PROVIDER")
    module = importlib.import_module("brought")
    forward = module.forward

    def marked(*arguments):
        jax.debug.callback(lambda: None)
        return forward(*arguments)

    module.forward = marked
    step = jax.jit(autopallas.optimize(attend, implementation="borrowed"))
    assert "callback" in step.lower(X, X, X).as_text()
    assert "callback" not in export.export(step)(X, X, X).mlir_module()


# --- tokamax --------------------------------------------------------------------------------------------------------

HAS_TOKAMAX = importlib.util.find_spec("tokamax") is not None


def test_tokamax_brings_nothing_where_it_is_not_installed(monkeypatch):
    from autopallas.tokamax import provider

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert provider().implementations == ()


def causal(q, k, v):
    scores = jnp.einsum("btnd,bsnd->bnts", q, k) / np.sqrt(q.shape[-1]).astype(q.dtype)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores, axis=-1), v)


def sized(types, seed):
    random = np.random.default_rng(seed)
    rows, groups = types[0].shape[0], types[2].shape[0]
    sizes = random.multinomial(rows, np.full(groups, 1 / groups)) if groups else np.zeros(0)
    if seed % 2 and groups:  # rows that no group owns
        sizes = sizes // 2
    return [*(random.standard_normal(t.shape) for t in types[:2]), sizes]


@pytest.mark.skipif(not HAS_TOKAMAX, reason="tokamax needs Python 3.12 and is an extra")
def test_tokamaxs_kernels_are_judged_by_the_court(providers):
    providers(tokamax="autopallas.tokamax:provider")

    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    named = {"implementation": "tokamax", "strict": True}
    questions = ["sizes", "runs", "vmap"]
    own = autopallas.optimize(causal, require={"attention": 1}, **named)
    verdict = judge(own, causal, [f32(2, 24, 4, 8)] * 3, questions=questions, dtypes=())
    assert verdict.ok, str(verdict)
    types = [f32(24, 8), f32(5, 8, 6), jax.ShapeDtypeStruct((5,), jnp.int32)]
    own = autopallas.optimize(jax.lax.ragged_dot, require={"grouped_matmul": 1}, **named)
    verdict = judge(own, jax.lax.ragged_dot, types, inputs=sized, questions=["sizes", "runs"], dtypes=())
    assert verdict.ok, str(verdict)


@pytest.mark.skipif(not HAS_TOKAMAX, reason="tokamax needs Python 3.12 and is an extra")
@pytest.mark.parametrize("sizes", [[6, 6, 6, 6], [3, 0, 7, 2], [10, -2, 3, 1], [20, 20, 1, 1]])
def test_group_sizes_that_tokamax_does_not_take_are_computed_otherwise(providers, sizes):
    providers(tokamax="autopallas.tokamax:provider")
    x, w = jnp.asarray(X), jnp.ones((4, 16, 6)) * jnp.arange(1.0, 5.0)[:, None, None]

    def step(x, w):
        return jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(jax.lax.ragged_dot(*a, jnp.array(sizes)))), (0, 1))(x, w)

    optimized = autopallas.optimize(step, implementation="tokamax", require={"grouped_matmul": 1})
    for a, b in zip(jax.tree.leaves(optimized(x, w)), jax.tree.leaves(step(x, w)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
