"""What counts as a breach, what is said about it, and when it is looked for."""

import functools
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopallas
from autopallas.kernels.attention import xla
from autopallas.numerics.compare import compare, tolerance
from autopallas.sites import calls

RANDOM = np.random.default_rng(1)
T, D = 32, 16
Q, K, V = (jnp.asarray(RANDOM.standard_normal((T, D)), jnp.float32) for _ in range(3))
always = functools.partial(autopallas.optimize, objective="always")


def attend(q, k, v):
    s = q @ k.T / 4.0
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -jnp.inf)
    return jax.nn.softmax(s, axis=-1) @ v


@pytest.fixture
def plant(monkeypatch):
    """Puts an error into the kernels: ``plant(forward=f, backward=g)``, applied to their first result."""
    forget = [calls.kernel_forward.cache_clear, calls.kernel_backward.cache_clear]

    def plant(**errors):
        for name, error in errors.items():
            true = getattr(xla, name)

            def wrong(*args, true=true, error=error, **kwargs):
                first, *rest = true(*args, **kwargs)
                return (error(first), *rest)

            monkeypatch.setattr(xla, name, wrong)
        for clear in forget:
            clear()

    yield plant
    monkeypatch.undo()
    for clear in forget:
        clear()


def breach(fn, *args, **kwargs):
    with pytest.raises(autopallas.VerificationError) as caught:
        autopallas.verify(fn, *args, **kwargs)
    verification = caught.value.verification
    assert not verification.ok
    assert str(verification) == str(caught.value)
    assert max(map(len, str(verification).splitlines())) <= 80
    return verification


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_right_kernel_passes(dtype):
    q, k, v = (x.astype(dtype) for x in (Q, K, V))
    verification = autopallas.verify(always(attend), q, k, v)
    assert verification.ok
    assert verification.replaced == 1
    assert verification.sites == ()
    (output,) = verification.outputs
    assert (output.dtype, output.shape, output.non_finite) == (dtype, (T, D), 0)
    assert output.allowed >= tolerance(dtype, gradient=False)
    assert 0 < output.rewritten.max_relative <= output.allowed
    assert output.rewritten.mean_absolute <= output.rewritten.max_absolute
    assert "passed" in str(verification)
    assert max(map(len, str(verification).splitlines())) <= 80


def test_a_wrong_kernel_is_a_breach_that_names_the_site(plant):
    plant(forward=lambda x: x + 1e-3)
    verification = breach(always(lambda q, k, v: {"out": attend(q, k, v), "sum": jnp.sum(v)}), Q, K, V)
    out, total = verification.outputs
    assert (out.name, out.ok) == ("['out']", False)
    assert total.ok
    assert out.rewritten.max_absolute == pytest.approx(1e-3, rel=1e-2)
    (site,) = verification.sites
    assert (site.op, site.direction, site.implementation) == ("attention", "forward", "xla")
    assert (site.calls, site.ok) == (1, False)
    assert "test_verify.py" in site.location
    assert "(attend)" in site.location
    assert site.outputs[0].rewritten.max_absolute == pytest.approx(1e-3, rel=1e-2)
    assert "IN BREACH" in str(verification)


def test_only_the_wrong_site_is_named(plant):
    """The error shows on one of two layers: where the keys are all alike."""
    plant(forward=lambda x: jnp.where(jnp.abs(x) > 50, x * 1.01, x))

    def layers(q, k, v):
        return attend(attend(q, k, v), k, v * 100)

    verification = breach(always(layers), Q, K, V)
    assert [site.ok for site in verification.sites] == [True, False]


def test_a_wrong_kernel_in_a_scan_is_looked_at_in_every_step(plant):
    plant(forward=lambda x: x + 1e-3)

    def layers(q, k, v):
        return lax.scan(lambda q, _: (attend(q, k, v), None), q, None, length=3)[0]

    (site,) = breach(always(layers), Q, K, V).sites
    assert (site.calls, site.ok) == (3, False)


def test_a_nan_that_the_original_lacks_is_a_breach(plant):
    plant(forward=lambda x: x.at[..., 3, 2].set(jnp.nan))
    verification = breach(always(attend), Q, K, V)
    assert verification.outputs[0].non_finite == 1
    assert "NaN" in str(verification)


def test_a_nan_that_the_original_has_is_none(plant):
    """The first row attends to nothing, so it is NaN in both."""

    def strict(q, k, v):
        s = jnp.where(jnp.tril(jnp.ones((T, T), bool), -1), q @ k.T, -jnp.inf)
        return jax.nn.softmax(s, axis=-1) @ v

    assert autopallas.verify(always(strict), Q, K, V).ok
    plant(forward=lambda x: x.at[..., 1:, :].add(1e-3))
    assert not breach(always(strict), Q, K, V).outputs[0].ok


def test_a_kernel_that_is_better_than_the_original_passes():
    """Probabilities rounded to bfloat16 and summed there: the original is far off, the kernel close to float64."""

    def poor(q, k, v):
        s = q @ k.T
        e = jnp.exp(s.astype(jnp.bfloat16))
        return (e @ v.astype(jnp.bfloat16) / jnp.sum(e, -1, keepdims=True)).astype(jnp.float32)

    (output,) = autopallas.verify(always(poor), Q, K, V).outputs
    assert output.ok


def test_the_bound_is_twice_the_originals_error_or_the_tolerance():
    oracle = np.asarray([1.0, 2.0])

    def judged(original, rewritten):
        return compare("x", np.float32(oracle + original), np.float32(oracle + rewritten), oracle, 1e-5)

    assert judged(0, 1.9e-5).ok
    assert not judged(0, 2.1e-5).ok
    assert judged(1e-3, 1.9e-3).ok
    assert not judged(1e-3, 2.1e-3).ok
    assert judged(1e-3, -1.9e-3).allowed == pytest.approx(1e-3, rel=1e-3)
    both = compare("x", np.float32([np.nan, 2]), np.float32([np.nan, 2.1]), oracle, 1e-5)
    assert (both.non_finite, both.ok) == (0, False)
    other = compare("x", np.float32([np.inf, 2]), np.float32([-np.inf, 2]), oracle, 1e-5)
    assert (other.non_finite, other.ok) == (1, False)
    overflow = np.asarray([1e39, 2])
    right = compare("x", np.float32([-np.inf, 2]), np.float32([np.inf, 2]), overflow, 1e-5)
    assert right.ok  # the original overflowed to the wrong side
    assert not compare("x", np.float32([np.inf, 2]), np.float32([-np.inf, 2]), overflow, 1e-5).ok
    assert not compare("x", np.float32([3e38, 2]), np.float32([np.inf, 2]), overflow, 1e-5).ok
    nothing = compare("x", np.float32([0, 0]), np.float32([1e-9, 0]), np.zeros(2), 1e-5)
    assert nothing.ok


def test_a_small_difference_of_large_numbers_is_no_breach():
    """The sum is all rounding, in the original and in the rewritten program; either may be exact by luck."""

    def cancelled(q, k, v):
        out = attend(q, k, v)
        return jnp.sum(out.astype(jnp.float32)) - shift

    for dtype in ("float32", "bfloat16"):
        q, k, v = (x.astype(dtype) for x in (Q, K, V))
        shift = jnp.sum(jax.jit(attend)(q, k, v).astype(jnp.float32)) * (1 + 1e-7)
        assert autopallas.verify(always(cancelled), q, k, v).ok


def test_integers_have_to_be_equal():
    assert compare("n", np.arange(4), np.arange(4), np.arange(4), 0.0).ok
    differing = compare("n", np.arange(4), np.asarray([0, 1, 2, 4]), np.arange(4), 0.0)
    assert not differing.ok
    assert differing.rewritten.max_relative == 0.25
    keys = jax.random.split(jax.random.key(0), 2)
    assert compare("k", keys, keys, keys, 0.0).ok
    assert not compare("k", keys, keys[::-1], keys, 0.0).ok


def loss(parameters, x):
    q, k, v = (x @ parameters[name] for name in ("q", "k", "v"))
    return jnp.mean((attend(q, k + parameters["bias"], v) - x) ** 2)


PARAMETERS = {name: jnp.asarray(RANDOM.standard_normal((D, D)) / 4, jnp.float32) for name in ("q", "k", "v")} | {
    "bias": jnp.asarray(RANDOM.standard_normal(D), jnp.float32)
}


def step(parameters, x):
    value, gradient = jax.value_and_grad(loss)(parameters, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradient), {"loss": value, "gradient": gradient}


def train(parameters, x):
    """As a user writes it who optimizes the loss alone."""
    value, gradient = jax.value_and_grad(always(loss))(parameters, x)
    return {"loss": value, "gradient": gradient}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_train_steps_pass(dtype):
    """The gradient of the bias of the keys is zero but for rounding, of the original and of the kernel."""
    parameters, x = jax.tree.map(lambda p: p.astype(dtype), (PARAMETERS, Q))
    for function in (always(jax.jit(step, donate_argnums=0)), train):
        verification = autopallas.verify(function, parameters, x)
        assert verification.ok
        assert "['loss']" in [c.name[-8:] for c in verification.outputs]
    assert not parameters["q"].is_deleted()
    assert verification.replaced == 2  # forward and backward: the last one, where the sites are the loss's own


def test_a_wrong_backward_kernel_is_a_breach(plant):
    plant(backward=lambda x: x * 1.01)
    verification = breach(train, PARAMETERS, Q)
    assert verification.outputs[-1].name == "['loss']"
    assert verification.outputs[-1].ok
    assert {(site.direction, site.ok) for site in verification.sites} == {("forward", True), ("backward", False)}


def test_the_option_checks_the_first_call_of_each_signature(plant):
    plant(forward=lambda x: x + 1e-3)
    wrong = always(attend, verify=True)
    for _ in range(2):
        with pytest.raises(autopallas.VerificationError, match="attention"):
            wrong(Q, K, V)
    wrong.lower(Q, K, V)  # Nothing runs, so nothing is checked.
    assert autopallas.explain(wrong, Q, K, V).counts()["attention"] == 1
    assert jax.jit(wrong)(Q, K, V).shape == (T, D)  # Under a trace there is nothing to check.
    with autopallas.options(verify=True), pytest.raises(autopallas.VerificationError):
        always(attend)(Q, K, V)
    assert always(attend)(Q, K, V).shape == (T, D)


def test_a_checked_call_runs_on_and_is_checked_once(monkeypatch):
    from autopallas.verification import verify as module

    calls = []
    monkeypatch.setattr(module, "verify", lambda *args, **kwargs: calls.append(len(args)))
    right = always(jax.jit(attend, donate_argnums=0), verify=True)
    for _ in range(3):
        np.testing.assert_allclose(right(Q.copy(), K, V), attend(Q, K, V), rtol=1e-5, atol=1e-6)
    assert len(calls) == 1
    right(Q.astype(jnp.bfloat16), K, V)
    assert len(calls) == 2
    always(attend)(Q, K, V)
    assert len(calls) == 2


def test_the_environment_variable_asks_for_the_check(monkeypatch, plant):
    plant(forward=lambda x: x + 1e-3)
    monkeypatch.setenv("AUTOPALLAS_VERIFY", "1")
    with pytest.raises(autopallas.VerificationError):
        always(attend)(Q, K, V)
    assert always(attend, verify=False)(Q, K, V).shape == (T, D)


def test_a_check_that_cannot_be_made_does_not_stop_the_program(monkeypatch):
    from autopallas.verification import verify as module

    monkeypatch.setattr(module, "check", lambda *_: 1 / 0)
    with pytest.warns(autopallas.AutopallasWarning, match="could not verify"):
        assert always(attend, verify=True)(Q, K, V).shape == (T, D)
    with pytest.raises(ZeroDivisionError):
        always(attend, verify=True, strict=True)(Q, K, V)


def test_methods_static_arguments_and_numbers():
    class Model:
        scale = 0.5

        @functools.partial(autopallas.optimize, objective="always")
        def __call__(self, q, k, *, mode, factor):
            return attend(q, k, V * self.scale) * factor if mode == "on" else q

    verification = autopallas.verify(Model().__call__, Q, K, mode="on", factor=2.0)
    assert verification.replaced == 1
    jitted = always(jax.jit(lambda q, n: attend(q, q, q) * n, static_argnums=1))
    assert autopallas.verify(jitted, Q, 3).replaced == 1


def test_the_error_survives_pickling(plant):
    plant(forward=lambda x: x + 1e-3)
    with pytest.raises(autopallas.VerificationError) as caught:
        autopallas.verify(always(attend), Q, K, V)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.verification == caught.value.verification
    assert str(again) == str(caught.value)


def test_functions_with_effects_are_not_run_again():
    seen = []

    def logs(q, k, v):
        out = attend(q, k, v)
        jax.experimental.io_callback(lambda x: seen.append(x), None, out[0, 0])
        return out

    verification = autopallas.verify(always(logs), Q, K, V)
    assert seen == []
    assert verification.outputs == ()
    assert "io_callback" in verification.notes[0]


def test_what_is_told_to_the_host_is_told_once_for_a_checked_call():
    seen = []

    def loss(q, k, v):
        def layer(x, i):
            x = attend(x, k, v)
            jax.debug.callback(lambda i: seen.append(int(i)), i, ordered=True)
            return x, None

        return jnp.sum(jax.lax.scan(layer, q, jnp.arange(3))[0] ** 2)

    jax.block_until_ready(always(jax.value_and_grad(loss), verify=True)(Q, K, V))
    jax.effects_barrier()
    assert seen == [0, 1, 2]


def test_under_a_trace_verify_says_what_it_needs():
    with pytest.raises(ValueError, match="values of its arguments"):
        jax.jit(lambda q: autopallas.verify(attend, q, K, V))(Q)


def test_a_shape_has_no_values_to_verify():
    with pytest.raises(ValueError, match=r"a jax\.ShapeDtypeStruct has none"):
        autopallas.verify(jnp.sin, jax.ShapeDtypeStruct((3,), jnp.float32))


def test_importing_the_package_starts_no_device():
    code = "import autopallas, jax; from jax._src import xla_bridge as x; assert not x._backends; autopallas.verify"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
