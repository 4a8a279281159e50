"""The oracle gives what float64 would give on the path that the program took."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from autopallas.numerics.oracle import Oracle

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((6, 8)).astype(np.float32)
Y = RANDOM.standard_normal((8, 6)).astype(np.float32)
X64, Y64 = X.astype(np.float64), Y.astype(np.float64)


def evaluate(function, *arguments):
    arguments = [jnp.asarray(a) for a in arguments]
    oracle = Oracle(jax.make_jaxpr(function)(*arguments))
    results = oracle(*arguments)
    assert oracle.notes == ()
    return results[0] if len(results) == 1 else results


def in_float64(function, *arguments):
    """The same function traced with float64 arguments: only right where it names no dtype and decides nothing."""
    with jax.enable_x64(True):
        return np.asarray(jax.jit(function)(*(np.asarray(a, np.float64) for a in arguments)))


def softmax64(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def close(given, wanted, tolerance=1e-13):
    assert given.dtype == np.asarray(wanted).dtype
    np.testing.assert_allclose(given, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_masked_attention_with_explicit_casts(dtype):
    def attention(q, k, v):
        s = jnp.einsum("td,sd->ts", q, k, preferred_element_type=jnp.float32) / np.sqrt(8)
        s = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), s, jnp.finfo(jnp.float32).min)
        return jax.nn.softmax(s.astype(jnp.float32), axis=-1).astype(q.dtype) @ v

    q, k, v = (jnp.asarray(a, dtype) for a in (X, Y.T, X[::-1]))
    q64, k64, v64 = (np.asarray(a).astype(np.float64) for a in (q, k, v))
    s = np.where(np.tril(np.ones((6, 6), bool)), q64 @ k64.T / np.float64(np.float32(np.sqrt(8))), -np.inf)
    close(evaluate(attention, q, k, v), softmax64(s) @ v64)


def test_the_users_process_stays_without_x64():
    given = evaluate(lambda x: x / 3, X)
    assert given.dtype == np.float64
    assert not jax.config.jax_enable_x64
    assert (jnp.ones(2) / 3).dtype == jnp.float32


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.linalg.solve(x.T @ x + 3 * jnp.eye(8), x.T),
        lambda x: jnp.linalg.cholesky(x.T @ x + 3 * jnp.eye(8)),
        lambda x: jnp.log1p(jnp.abs(x)) ** 1.5 + jnp.cumsum(x, axis=1),
        lambda x: jnp.concatenate([x, x[::-1]], 0)[:, ::2].reshape(4, 12) * 0.5,
        lambda x: x.at[jnp.array([0, 3, 3])].add(x[1]),
        lambda x: x.at[jnp.array([0, 2])].multiply(x[1]),
        lambda x: x.at[jnp.array([0, 2])].max(x[1]),
        lambda x: x[jnp.array([1, 5, 2])][:, jnp.array([0, 0, 7])],
        lambda x: lax.conv_general_dilated(x[None, None], x[None, None, :3, :3], (1, 1), "SAME"),
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"),
        lambda x: jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID").sum())(x) * x,
        lambda x: lax.reduce(x, 1.0, lambda a, b: a * b * 0.5, (0,)),
        lambda x: jnp.abs(jnp.fft.rfft(x)),
        lambda x: lax.cumlogsumexp(x, axis=1) + jax.nn.logsumexp(x),
        lambda x: jax.scipy.special.erf(x) + jax.nn.silu(x) + jnp.clip(x, -0.5, 0.5),
        lambda x: jax.vmap(lambda row: row @ row)(x),
    ],
    ids=lambda f: f"line{f.__code__.co_firstlineno}",
)
def test_what_names_no_dtype_is_as_in_x64(function):
    close(evaluate(function, X), in_float64(function, X), 1e-12)


def test_casts_to_narrow_dtypes_do_not_round():
    def narrow(x):
        return (x.astype(jnp.bfloat16) * x.astype(jnp.float16)).astype(jnp.float32) + lax.iota(jnp.bfloat16, 8)

    close(evaluate(narrow, X), X64 * X64 + np.arange(8.0))


def test_a_bfloat16_literal_is_that_bfloat16_number():
    x = jnp.asarray(X, jnp.bfloat16)
    tenth = np.asarray(jnp.asarray(0.1, jnp.bfloat16)).astype(np.float64)
    close(evaluate(lambda x: x * 0.1, x), np.asarray(x).astype(np.float64) * tenth)


def test_comparisons_are_the_programs_own():
    """1 + 1e-9 is 1 in float32, so the program takes that branch; float64 would not."""
    tiny = np.full(3, 1e-9, np.float32)
    given = evaluate(lambda t: jnp.where(1 + t == 1, t, 7.0), tiny)
    close(given, tiny.astype(np.float64))


def test_conversions_to_integers_and_roundings_are_the_programs_own():
    x = np.asarray([0.1, 0.7, 2.5], np.float32)
    below = np.float32(3.0) - np.float32(2**-23)  # times 1 + 2**-24 in float64, and rounded up in float32

    def decide(x, y):
        z = x * y + y * np.float32(1e-8)
        return z.astype(jnp.int32), jnp.floor(z), jnp.round(z), jnp.sign(z - y * x)

    y = np.full(3, below, np.float32)
    given = evaluate(decide, x, y)
    own = jax.jit(decide)(x, y)
    for a, b in zip(given, own, strict=True):
        np.testing.assert_array_equal(a, np.asarray(b))


def test_argmax_and_sort_and_top_k_follow_the_programs_order():
    """In bfloat16 the two are equal, so the first wins; in float64 the second is larger."""
    x = np.asarray([1.0, 1.001, 0.5], np.float32)

    def order(x):
        y = x.astype(jnp.bfloat16)
        values, indices = lax.top_k(y, 2)
        keys, positions = lax.sort((-y, jnp.arange(3)), num_keys=1)
        return jnp.argmax(y), values, indices, keys, positions, jnp.sort(-y)

    argmax, values, indices, keys, positions, ordered = evaluate(order, x)
    x64 = x.astype(np.float64)
    assert argmax == 0
    np.testing.assert_array_equal(indices, [0, 1])
    np.testing.assert_array_equal(positions, [0, 1, 2])
    close(values, x64[:2])
    close(keys, -x64)
    close(ordered, -x64)


def test_random_bits_are_the_programs_own():
    key = jax.random.key(3)

    def noise(key, x):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.where(keep, x / 0.5, 0) + jax.random.uniform(key, x.shape) + jax.random.gamma(key, 2.0, x.shape)

    own = jax.jit(noise)(key, X)
    given = evaluate(noise, key, X)
    assert given.dtype == np.float64
    np.testing.assert_allclose(given, np.asarray(own), rtol=1e-6, atol=1e-6)


def test_scan_carries_both():
    def body(carry, x):
        count, total = carry
        total = total + x.astype(jnp.bfloat16)
        return (count + 1, total), (total, total > 1)

    def loop(x):
        (count, total), (totals, large) = lax.scan(body, (0, jnp.zeros(8, jnp.bfloat16)), x, reverse=True)
        return count, total, totals, large

    count, total, totals, large = evaluate(loop, X)
    wanted = np.cumsum(X64[::-1], axis=0)[::-1]
    assert count == 6
    close(total, wanted[0])
    close(totals, wanted)
    np.testing.assert_array_equal(large, jax.jit(loop)(X)[3])


def test_a_while_loop_runs_as_often_as_the_program():
    """Adding 2**-9 to 1 changes nothing in bfloat16, so its loop runs to the limit; in float64 it would end before."""

    def loop(x):
        def goes_on(state):
            i, y = state
            return (i < 40) & (y < 1.05)

        return lax.while_loop(goes_on, lambda s: (s[0] + 1, s[1] + jnp.asarray(2**-9, jnp.bfloat16)), (0, x))

    count, value = evaluate(loop, jnp.ones((), jnp.bfloat16))
    assert count == 40
    close(value, 1 + 40 * 2.0**-9)


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)])
def test_each_example_of_a_while_loop_runs_as_often_as_the_program(in_axes):
    def loop(x, limit):
        key = jax.random.key(0)
        carry = (0, x, jnp.zeros((2, *x.shape)), key)
        return lax.while_loop(
            lambda s: s[1].sum() < limit,
            lambda s: (s[0] + 1, s[1] * 1.5, s[2] + jnp.sin(s[1]), jax.random.fold_in(s[3], s[0])),
            carry,
        )[:3]

    given = [jnp.array([[1.0, 0.2], [3.0, 0.1], [99.0, 1.0]]), jnp.array([7.0, 50.0, 20.0])]
    given = [x if axis == 0 else x[0] for x, axis in zip(given, in_axes, strict=True)]
    counts, values, sums = evaluate(jax.vmap(loop, in_axes), *given)
    for i in range(3):
        own = evaluate(loop, *(x[i] if axis == 0 else x for x, axis in zip(given, in_axes, strict=True)))
        assert counts[i] == own[0]
        close(values[i], own[1])
        close(sums[i], own[2])
    assert len(set(np.asarray(counts).tolist())) > 1


def test_a_branch_is_the_programs_own():
    def choose(x):
        return lax.cond(x.astype(jnp.bfloat16) > 1, lambda x: x / 3, lambda x: x / 7, x)

    close(evaluate(choose, np.float32(1.001)), np.float64(np.float32(1.001)) / 7)


def test_custom_rules_and_checkpoints_and_inner_jits():
    @jax.custom_jvp
    def twice(x):
        return x.astype(jnp.bfloat16) * 2

    twice.defjvps(lambda t, _, x: t * 2)

    @jax.custom_vjp
    def third(x):
        return x / 3

    third.defvjp(lambda x: (x / 3, None), lambda _, g: (g / 3,))
    given = evaluate(lambda x: jax.checkpoint(jax.jit(lambda x: third(twice(x)).astype(jnp.float32)))(x), X)
    close(given, X64 * 2 / 3)


def test_the_gradient_of_a_checkpointed_scan():
    def loss(x):
        body = jax.checkpoint(lambda c, row: (jnp.tanh(c + row), None))
        return jnp.sum(lax.scan(body, jnp.zeros(8, x.dtype), x)[0])

    close(evaluate(jax.grad(loss), X), in_float64(jax.grad(loss), X))


def test_reduce_precision_is_a_rounding_only_where_it_is_narrower():
    wide, narrow = evaluate(lambda x: (lax.reduce_precision(x / 3, 8, 23), lax.reduce_precision(x / 3, 5, 10)), X)
    close(wide, X64 / 3)
    close(narrow, np.asarray(lax.reduce_precision(jnp.asarray(X) / 3, 5, 10)).astype(np.float64))


def test_the_remainder_keeps_the_programs_quotient():
    given = evaluate(lambda x: (jnp.remainder(x, 0.3), lax.rem(x, jnp.float32(0.3))), X)
    step = np.float64(np.float32(0.3))
    close(given[0], np.mod(X64, step))
    close(given[1], np.fmod(X64, step))


@pytest.mark.parametrize("check", [True, False])
def test_inside_shard_map(check):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("i"), out_specs=(P(), P("i")), check_vma=check)
    def sharded(x):
        return lax.psum(jnp.sum(x / 3), "i"), (x > 0).astype(x.dtype) * x

    total, positive = evaluate(sharded, X)
    close(total, np.sum(X64 / 3))
    close(positive, np.maximum(X64, 0))


def test_complex_numbers_become_complex128():
    z = (X + 1j * X[::-1]).astype(np.complex64)
    close(evaluate(lambda z: z * z.conj() / 3, z), z.astype(np.complex128) * z.conj().astype(np.complex128) / 3)


def test_what_cannot_be_promoted_is_taken_as_it_is_and_said():
    def call_back(x):
        return jax.pure_callback(lambda x: np.asarray(x) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x) / 3

    oracle = Oracle(jax.make_jaxpr(call_back)(X))
    close(oracle(X)[0], X64 * 2 / 3)
    (note,) = oracle.notes
    assert "pure_callback" in note
    assert "test_oracle.py" in note


def test_integers_and_keys_pass_through():
    numbers = np.arange(5, dtype=np.int32)
    bits, key, moved = evaluate(lambda n: (n // 3, jax.random.key(1), n.astype(jnp.float32) / 3), numbers)
    np.testing.assert_array_equal(bits, np.arange(5) // 3)
    assert bits.dtype == np.int32
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    close(moved, np.arange(5) / 3)


def test_printing_is_not_repeated(capfd):
    def prints(x):
        jax.debug.print("seen")
        return x / 3

    close(evaluate(prints, X), X64 / 3)
    jax.effects_barrier()
    assert "seen" not in capfd.readouterr().out


def test_roundings_are_drawn_beside_combiners_and_in_loops():
    """Samples differ by roundings of the program's own dtype, from the exact results and from each other."""

    def function(x, places):
        total, _ = jax.lax.scan(lambda c, row: (c + row / 3, None), jnp.zeros(4), x)
        return jnp.zeros(5).at[places].add(total)

    x, places = jnp.arange(12.0).reshape(3, 4), jnp.array([0, 2, 2, 4])
    program = jax.make_jaxpr(function)(x, places)
    (exact,), rounding = Oracle(program)(x, places), Oracle(program, rounds=True)
    samples = [rounding(x, places, seed=seed)[0] for seed in range(3)]
    for sample, other in zip(samples, samples[1:] + samples[:1], strict=True):
        assert (sample != other).any()
        np.testing.assert_allclose(sample, exact, rtol=1e-6)
