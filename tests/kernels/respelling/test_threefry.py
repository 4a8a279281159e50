"""Random bits and keys: the hash written out gives the program's own bits, wherever they are drawn."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.respellings import found, optimized

from autopallas.sites import random_keys

KEY = jax.random.key(5, impl="threefry2x32")
KEYS = jax.random.split(KEY, (2, 3))
X = jnp.arange(24, dtype=jnp.float32).reshape(4, 6)


def agree(function, *arguments, sites):
    """Asserts equal results, bit for bit, and how many sites were replaced."""
    run = optimized(function)
    given, wanted = run(*arguments), jax.jit(function)(*arguments)
    for ours, own in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
        assert jax.typeof(ours) == jax.typeof(own)
        np.testing.assert_array_equal(random_keys.data(ours), random_keys.data(own))
    assert run.report().counts()["respelling"] == sites


def mapped(function, keys):
    for _ in keys.shape:
        function = jax.vmap(function)
    return function(keys)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("keys", [KEY, KEYS, jax.random.key_data(KEY)], ids=["one", "several", "words"])
def test_bits_of_any_width_shape_and_keys(keys, dtype):
    shapes = [(), (1,), (7,), (3, 5), (2, 1, 9), (5, 2, 3, 4), (70001,)]

    def draw(keys):
        if keys.dtype == jnp.uint32:
            return [jax.random.bits(keys, shape, dtype) for shape in shapes]
        return [mapped(lambda key, shape=shape: jax.random.bits(key, shape, dtype), keys) for shape in shapes]

    with jax.enable_x64(dtype == "uint64"):
        agree(draw, keys, sites=len(shapes))


def test_keys_that_are_split():
    shapes = [(), (1,), (2,), (2, 3), (70000,)]
    agree(lambda key: [jax.random.split(key, shape) for shape in shapes], KEY, sites=len(shapes))
    agree(lambda keys: mapped(lambda key: [jax.random.split(key, shape) for shape in shapes], keys), KEYS[:1, :2],
          sites=len(shapes))  # fmt: skip


def test_numbers_that_are_folded_in():
    numbers = [0, 1, 2**31, 2**32 - 1]
    agree(lambda key: [jax.random.fold_in(key, n) for n in numbers], KEY, sites=len(numbers))
    agree(lambda key, n: jax.random.fold_in(key, n), KEY, np.uint32(2**32 - 1), sites=1)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
def test_numbers_that_are_folded_in_under_vmap(axes):
    keys = KEYS.reshape(-1) if axes[0] == 0 else KEY
    numbers = jnp.arange(6) if axes[1] == 0 else 3
    agree(jax.vmap(jax.random.fold_in, axes), keys, numbers, sites=1)
    agree(lambda keys, n: jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(keys, n), KEYS[0], X[0], sites=1)


def walk(key, x):
    """A random walk that splits its key in each step, and stops now and then."""

    def step(carry, n):
        key, x = carry
        key, move, stop = jax.random.split(key, 3)
        x = x + jnp.where(jax.random.bernoulli(stop, 0.3), 0, jax.random.normal(move, x.shape))
        return (key, x), jax.random.uniform(jax.random.fold_in(move, n))

    return lax.scan(step, (key, x), jnp.arange(7))


def test_random_numbers_of_loops():
    agree(walk, KEY, X, sites=5)
    agree(jax.vmap(walk), KEYS[0], jnp.stack([X, -X, 2 * X]), sites=5)
    agree(lambda key, x: lax.fori_loop(0, 4, lambda n, x: x * jax.random.uniform(jax.random.fold_in(key, n)), x),
          KEY, X, sites=2)  # fmt: skip


def dropout(key, x, rate=0.5):
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_dropout_in_a_train_step(around):
    def loss(w, key, x):
        first, second = jax.random.split(key)
        return (dropout(second, around(lambda x: jnp.tanh(dropout(first, x) @ w))(x)) ** 2).sum()

    w = jnp.ones((6, 6)) / 7
    run = optimized(jax.value_and_grad(loss))
    for ours, own in zip(run(w, KEY, X), jax.jit(jax.value_and_grad(loss))(w, KEY, X), strict=True):
        np.testing.assert_allclose(ours, own, rtol=1e-6)  # which products are fused is the compiler's choice
    assert run.report().counts()["respelling"] >= 3


def test_gradients_are_taken_around_it():
    run = optimized(lambda x, key: (dropout(key, x) ** 2).sum())
    for derivative in (jax.grad, jax.jacfwd, jax.hessian):
        wanted = derivative(lambda x: (dropout(KEY, x) ** 2).sum())(X)
        np.testing.assert_array_equal(derivative(lambda x: run(x, KEY))(X), wanted)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_of_another_implementation_are_left_alone(impl):
    key = jax.random.key(3, impl=impl)
    assert found(lambda key: [jax.random.bits(k, (5,)) for k in jax.random.split(key)], key) == []
    assert found(lambda key: jax.random.fold_in(key, 3), key) == []


def test_counters_of_the_older_kind_are_left_alone():
    """Under that flag JAX hashes other counters; what is folded in is the same."""
    run = optimized(lambda key: [jax.random.bits(key, (5,)), jax.random.bits(jax.random.fold_in(key, 1), (3, 3))])
    draw = run.__wrapped__
    new = run(KEY)
    with jax.threefry_partitionable(False):
        old = run(KEY)
        for ours, own in zip(old, draw(KEY), strict=True):
            np.testing.assert_array_equal(ours, own)
        assert found(draw, KEY) == ["threefry"]
    assert not np.array_equal(new[0], old[0])
    for ours, own in zip(new, draw(KEY), strict=True):
        np.testing.assert_array_equal(ours, own)


@pytest.mark.parametrize("older", ["first", "last", "both"])
def test_counters_of_the_older_kind_inside_of_the_function_are_left_alone(older):
    """JAX keeps with each equation which counters it hashes; the same key gives other numbers under each."""

    def draw(key):
        with jax.threefry_partitionable(older == "last"):
            first = jax.random.bits(key, (5,)), jax.random.split(key, 2)
        with jax.threefry_partitionable(older == "first"):
            last = jax.random.bits(key, (5,)), jax.random.split(key, 2)
        return [first[0], last[0], *map(jax.random.key_data, (first[1], last[1]))]

    for ours, own in zip(optimized(draw)(KEY), jax.jit(draw)(KEY), strict=True):
        np.testing.assert_array_equal(ours, own)


def test_checks_of_keys_that_are_read_twice_see_the_program():
    run = optimized(lambda key: [jax.random.bits(k, (5,)) for k in jax.random.split(key)])
    run(KEY)
    twice = optimized(lambda key: jax.random.normal(key, (3,)) + jax.random.uniform(key, (3,)))
    with jax.debug_key_reuse(True):
        for ours, own in zip(run(jax.random.clone(KEY)), run.__wrapped__(jax.random.clone(KEY)), strict=True):
            np.testing.assert_array_equal(ours, own)
        with pytest.raises(jax.errors.KeyReuseError):
            twice(jax.random.clone(KEY))


def test_nothing_is_drawn_where_nothing_is_asked_for():
    assert found(lambda key: jax.random.bits(key, (3, 0)), KEY) == []
    assert found(jax.vmap(lambda key: jax.random.bits(key, (3,))), KEYS[0, :0]) == []


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_on_a_mesh(kind):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(kind,))

    def draw(key, x):
        own = jax.random.fold_in(key, lax.axis_index("d"))
        return dropout(own, x) + jax.random.normal(jax.random.split(own)[0], x.shape)

    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("d")))
        agree(jax.shard_map(draw, in_specs=(P(), P("d")), out_specs=P("d")), KEY, x, sites=4)
        run = optimized(lambda key, x: (dropout(key, x), jax.random.split(key, 4)))
        for ours, own in zip(run(KEY, x), jax.jit(run.__wrapped__)(KEY, x), strict=True):
            assert jax.typeof(ours) == jax.typeof(own)
            np.testing.assert_array_equal(random_keys.data(ours), random_keys.data(own))


def test_keys_are_described_as_data():
    for name in ("threefry2x32", "rbg", "unsafe_rbg"):
        dtype = random_keys.dtype_of(name)
        assert random_keys.dtype_named(dtype.name) == dtype == random_keys.keys(dtype, (2,), 0).dtype
    assert random_keys.dtype_named("float32") is None
    with pytest.raises(ValueError, match="none of JAX's own"):
        random_keys.keys(jnp.dtype("float32"), (), 0)
