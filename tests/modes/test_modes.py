"""In every mode of JAX an optimized function gives what plain jit gives, down to dtype and weak type."""

import contextlib
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopallas

RANDOM = np.random.default_rng(2)
T, D = 16, 8
X = RANDOM.standard_normal((T, D)).astype(np.float32)
W = (RANDOM.standard_normal((3, D, D)) / 2).astype(np.float32)
always = functools.partial(autopallas.optimize, objective="always", strict=True)


def attend(x, w):
    q, k, v = (x @ w[i] for i in range(3))
    s = q @ k.T / np.sqrt(D).astype(x.dtype)
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, jnp.finfo(s.dtype).min)
    return jax.nn.softmax(s, axis=-1) @ v


def loss(w, x):
    out, sums = lax.scan(lambda x, _: (x + attend(x, w), jnp.sum(x)), x, None, length=2)
    return jnp.mean(out**2) + jnp.mean(sums)


STEP = jax.value_and_grad(loss)


def same(function, *arguments, tolerance=1e-5, sites=1, **options):
    """Runs a function both ways and compares; returns the optimized one's result."""
    optimized = always(function, **options)
    wanted, given = jax.jit(function)(*arguments), optimized(*arguments)
    assert optimized.report().failures == ()
    assert optimized.report().counts()["attention"] == sites
    alike(given, wanted, tolerance)
    types = [jax.tree.map(kind, f.eval_shape(*arguments)) for f in (optimized, jax.jit(function))]
    assert types[0] == types[1]
    return given


def kind(x):
    return x.shape, x.dtype, getattr(x, "weak_type", None)


def alike(given, wanted, tolerance):
    assert jax.tree.structure(given) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
        assert type(a) is type(b)
        assert kind(a) == kind(b)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if a.dtype != jax.dtypes.float0:
            scale = float(np.max(np.abs(np.asarray(b, np.float64)), initial=0))
            np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), atol=tolerance * scale)


MODES = {
    "plain": contextlib.nullcontext,
    "x64": lambda: jax.enable_x64(True),
    "strict dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "check tracer leaks": lambda: jax.checking_leaks(),
    "debug nans": lambda: jax.debug_nans(True),
    "custom prng": lambda: jax.default_prng_impl("rbg"),
}


def mixture(x, w):
    gates, chosen = lax.top_k(jax.nn.softmax(x @ w[0, :, :3], axis=-1), 2)
    weights = jnp.einsum("tk,tke->te", gates, jax.nn.one_hot(chosen, 3, dtype=x.dtype))
    hidden = jax.nn.relu(jnp.einsum("td,edf->tef", x, w))
    return jnp.einsum("tef,efd,te->td", hidden, 2 * w, weights)


def recurrence(x, w):
    def step(state, row):
        q, k, v, g = row
        state = state * jax.nn.sigmoid(g)[:, None] + k[:, None] * v[None, :]
        return state, q @ state

    rows = tuple(x @ w[i] for i in (0, 1, 2))
    return lax.scan(step, jnp.zeros((D, D), x.dtype), (*rows, 2 * rows[0]))[1]


@pytest.mark.parametrize("operation, function", [("grouped_matmul", mixture), ("recurrence", recurrence)])
def test_where_a_program_forbids_itself_to_promote(operation, function):
    """What a kernel promotes is no affair of the program's."""

    def objective(w, x):
        return jnp.sum(jnp.sin(function(x, w)))

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for program in (objective, jax.grad(objective)):
            optimized = always(program)
            alike(optimized(W, X), jax.jit(program)(W, X), 1e-5)
            assert optimized.report().counts()[operation] >= 1
        alike(jax.grad(always(objective))(W, X), jax.jit(jax.grad(objective))(W, X), 1e-5)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_mode_changes_nothing(mode):
    with mode():
        same(STEP, W, X)


def test_without_jit():
    wanted = jax.jit(jax.grad(lambda w, x: jnp.sum(attend(x, w)), argnums=1))(W, X)
    optimized = always(jax.grad(lambda w, x: jnp.sum(attend(x, w)), argnums=1))
    with jax.disable_jit():
        alike(optimized(W, X), wanted, 1e-5)
    assert optimized.report().counts()["attention"] == 1


def test_a_function_that_looks_at_values_without_jit():
    optimized = always(jax.jit(lambda x: x * 2 if float(x.sum()) > -1e9 else x))
    with jax.disable_jit():
        np.testing.assert_array_equal(optimized(X), 2 * X)


def test_float64_arguments_stay_float64():
    with jax.enable_x64(True):
        w, x = W.astype(np.float64), X.astype(np.float64)
        given = same(STEP, w, x, tolerance=1e-13)
        assert {x.dtype for x in jax.tree.leaves(given)} == {np.dtype(np.float64)}
        assert autopallas.verify(always(STEP), w, x).ok


def test_one_function_in_both_precisions():
    """The trace with x64 on is another than the one with it off."""
    optimized = always(attend)
    assert optimized(X, W).dtype == np.float32
    with jax.enable_x64(True):
        assert optimized(X.astype(np.float64), W.astype(np.float64)).dtype == np.float64
    assert optimized(X, W).dtype == np.float32


@pytest.mark.parametrize("mode", ["x64", "debug nans", "check tracer leaks", "strict dtype promotion"])
def test_verification_in_a_mode(mode):
    with MODES[mode]():
        np.testing.assert_allclose(always(attend, verify=True)(X, W), attend(X, W), atol=1e-5)


def test_verification_without_jit():
    with jax.disable_jit():
        np.testing.assert_allclose(always(attend, verify=True)(X, W), attend(X, W), atol=1e-5)


def test_debug_nans_still_finds_a_nan():
    """The masked row is NaN in the original too, and the mode says so either way."""

    def masked(x, w):
        s = jnp.where(jnp.tril(jnp.ones((T, T), bool), -1), x @ x.T, -jnp.inf)
        return jax.nn.softmax(s, axis=-1) @ x

    for run in (jax.jit(masked), always(masked)):
        with jax.debug_nans(True), pytest.raises(FloatingPointError):
            run(X, W)


def test_random_keys_pass_through():
    def dropped(key, x, w):
        key, use = jax.random.split(key)
        return key, attend(x * jax.random.bernoulli(use, 0.5, x.shape), w)

    for implementation in ("threefry2x32", "rbg"):
        given, _ = same(dropped, jax.random.key(0, impl=implementation), X, W)
        assert jnp.issubdtype(given.dtype, jax.dtypes.prng_key)


def test_float0_gradients():
    def scaled(w, n, x):
        return jnp.sum(attend(x, w)) * n

    gradient = jax.grad(scaled, argnums=(0, 1), allow_int=True)
    _, given = same(gradient, W, np.int32(3), X)
    assert given.dtype == jax.dtypes.float0
    _, inner = jax.jit(jax.grad(always(scaled), argnums=(0, 1), allow_int=True))(W, np.int32(3), X)
    assert inner.dtype == jax.dtypes.float0


def test_weak_types_of_arguments_and_results():
    def scaled(x, w, factor):
        return attend(x, w) * factor, factor * 2, jnp.where(factor > 1, 1.0, 2.0)

    _, doubled, chosen = same(scaled, X, W, 1.5)
    assert doubled.weak_type
    assert chosen.weak_type
    same(scaled, X.astype(jnp.bfloat16), W.astype(jnp.bfloat16), 1.5, tolerance=4e-2)
    same(lambda x, w: (attend(x, w), jnp.asarray(2.0) * 3, 7), X, W)


def test_weakly_typed_operands_of_the_site():
    """Keys from a Python number: the product is weakly typed."""

    def constant(x):
        ones = jnp.broadcast_to(lax.full((), 1.0), (T, D)) * 0.5
        return jax.nn.softmax(x @ ones.T, axis=-1) @ x

    same(constant, X)


@pytest.mark.nightly
def test_the_persistent_compilation_cache(tmp_path, caplog):
    """A process that finds a program there gets the rewritten one, not the original that has the same name."""
    names = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in names}
    from jax.experimental.compilation_cache import compilation_cache

    try:
        for name, value in names.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        first = same(attend, X, W)
        entries = {path.name for path in tmp_path.iterdir()}
        assert entries
        jax.clear_caches()
        with caplog.at_level(logging.DEBUG, logger="jax._src.compiler"):
            second = always(attend)(X, W)
        np.testing.assert_array_equal(first, second)
        # The same program is found again: nothing in it depends on object identities or on the order of a set.
        assert {p.name for p in tmp_path.iterdir() if p.name.endswith("-cache")} == {
            n for n in entries if n.endswith("-cache")
        }
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_debug_nans_names_the_operation_and_the_line():
    def function(x):
        return jnp.log(x) * 2

    for run in (jax.jit(function), always(function), always(jax.jit(function))):
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="encountered in log") as raised:
            run(-jnp.ones(3))
        assert "function" in [entry.name for entry in raised.traceback]
