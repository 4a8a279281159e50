"""Flags, which a function may compare by identity: truth values, and integers with names."""

from __future__ import annotations

import enum
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.catalogue import array

import autopallas
from autopallas import AutopallasWarning
from autopallas.plain_calls import PlainCalls
from transforms.test_transforms import optimized, same

T, S, D = 5, 7, 3


@pytest.fixture(scope="module")
def qkv():
    return array(1, 2, T, D, seed=1), array(1, 2, S, D, seed=2), array(1, 2, S, D, seed=3)


class Mode(enum.IntEnum):
    PLAIN = 0
    TWICE = 1


@pytest.mark.parametrize(
    ("use", "flags"),
    [
        (lambda x, flag: x * 2 if flag is True else x, [True, False, 1, 0, np.True_]),
        (lambda x, flag: x * 2 if isinstance(flag, bool) else x, [True, False, 1, jnp.array(True)]),
        (lambda x, flag: x * 2 if flag is Mode.TWICE else x, [Mode.TWICE, Mode.PLAIN, 1, 0]),
    ],
    ids=["true", "type", "name"],
)
@pytest.mark.parametrize("by_name", [False, True])
def test_flags_are_held_fixed_as_a_function_may_compare_them_by_identity(use, flags, by_name, qkv):
    wrapped = optimized(use)
    for flag in [*flags, *flags]:
        given = wrapped(qkv[0], flag=flag) if by_name else wrapped(qkv[0], flag)
        np.testing.assert_array_equal(given, use(qkv[0], flag))
        explained = autopallas.explain(wrapped, qkv[0], flag)
        assert not explained.failures
    same(jax.grad(lambda x: wrapped(x, flags[0]).sum())(qkv[0]), jax.grad(lambda x: use(x, flags[0]).sum())(qkv[0]))
    if not any(isinstance(flag, (np.bool_, jax.Array)) for flag in flags):  # after these, each call is looked through
        assert wrapped._run is wrapped._jit


@pytest.mark.parametrize("inside", [lambda flag: {"twice": flag}, lambda flag: [flag]], ids=["dictionary", "list"])
@pytest.mark.parametrize("lowered_before", [False, True])
def test_flags_inside_of_other_arguments_are_held_fixed_too(inside, lowered_before, qkv):
    def use(x, config):
        (flag,) = jax.tree.leaves(config)
        return x * 2 if flag is True else x

    wrapped = autopallas.optimize(use)
    if lowered_before:
        wrapped.lower(qkv[0], inside(True))
    for flag in (True, False, jnp.array(True), True):
        np.testing.assert_array_equal(wrapped(qkv[0], inside(flag)), use(qkv[0], inside(flag)))


@pytest.mark.parametrize("inside", [lambda mode: {"mode": mode}, lambda mode: [(mode,)]], ids=["dictionary", "list"])
@pytest.mark.parametrize("lowered_before", [False, True])
def test_integers_with_names_inside_of_other_arguments_are_held_fixed(inside, lowered_before, qkv):
    def use(x, config):
        (mode,) = jax.tree.leaves(config)
        return x * 2 if mode is Mode.TWICE else x

    wrapped = autopallas.optimize(use)
    if lowered_before:
        wrapped.lower(qkv[0], inside(Mode.TWICE))
    for mode in (Mode.TWICE, Mode.PLAIN, 1, Mode.TWICE):
        np.testing.assert_array_equal(wrapped(qkv[0], inside(mode)), use(qkv[0], inside(mode)))


def test_integers_with_names_are_held_fixed_after_others_without(qkv):
    """A program that was traced for an integer runs for one with a name, as far as jit knows."""

    def use(x, config):
        return x * 2 if config["mode"] is Mode.TWICE else x

    wrapped = autopallas.optimize(use)
    for mode in (1, Mode.TWICE, 0, Mode.PLAIN, Mode.TWICE):
        np.testing.assert_array_equal(wrapped(qkv[0], {"mode": mode}), use(qkv[0], {"mode": mode}))


def test_no_trace_is_aborted_for_integers_inside_of_other_arguments(monkeypatch):
    """After a trace that was aborted, JAX finds what it compiled a hundred microseconds later in every call."""
    started, refuse = [], PlainCalls.refuse_flags
    monkeypatch.setattr(PlainCalls, "refuse_flags", lambda *call: started.append(1) or refuse(*call))
    wrapped = autopallas.optimize(lambda state: state["x"] * state["n"])
    assert wrapped({"n": 3, "x": jnp.float32(2)}) == 6
    assert len(started) == 1


def test_integers_without_names_inside_of_other_arguments_are_traced_once():
    traces = []

    def step(state):
        traces.append(1)
        return {"step": state["step"] + 1, "x": state["x"] * 2}

    wrapped, state = autopallas.optimize(step), {"step": 0, "x": jnp.float32(1)}
    for _ in range(4):
        state = wrapped(state)
    assert (int(state["step"]), float(state["x"]), len(traces)) == (4, 16, 1)
    assert wrapped._run is wrapped._jit


def test_flags_of_calls_from_several_threads_are_held_fixed(qkv):
    """The first call learns that there are flags while others, under way, are traced."""

    def use(x, config):
        return x * 2 if config["twice"] is True else x

    for _ in range(3):
        wrapped, start, found = autopallas.optimize(use), threading.Barrier(8), {}

        def call(n, wrapped=wrapped, start=start, found=found):
            start.wait()
            found[n] = wrapped(qkv[0], {"twice": n % 2 == 1})

        threads = [threading.Thread(target=call, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for n in range(8):
            np.testing.assert_array_equal(found[n], qkv[0] * (1 + n % 2))


def test_flags_within_a_function_that_is_lowered_are_held_fixed(qkv):
    inner = autopallas.optimize(lambda x, config: x * 2 if config["twice"] is True else x)
    outer = autopallas.optimize(lambda x, config: inner(x, {"twice": True}) + config["more"])
    lowered = outer.lower(qkv[0], {"more": True})
    np.testing.assert_array_equal(lowered.compile()(qkv[0], {"more": True}), qkv[0] * 2 + 1)
    np.testing.assert_array_equal(outer(qkv[0], {"more": jnp.array(True)}), qkv[0] * 2 + 1)


def test_truth_values_that_are_arrays_are_traced():
    traces = []

    def step(state):
        traces.append(1)
        return {"done": state["x"] > 1, "x": state["x"] + 1}

    wrapped, state = autopallas.optimize(step), {"done": jnp.array(False), "x": jnp.float32(0)}
    for _ in range(4):
        state = wrapped(state)
    assert (bool(state["done"]), float(state["x"]), len(traces)) == (True, 4, 1)
    same(jax.vmap(wrapped)({"done": jnp.ones(2, bool), "x": jnp.arange(2.0)})["x"], jnp.arange(2.0) + 1)


@jax.tree_util.register_pytree_node_class
class Module:
    """A module of a library whose parameters are arrays, and whose rate is a number among its leaves."""

    def __init__(self, weight, rate):
        self.weight, self.rate = weight, rate

    def tree_flatten(self):
        return (self.weight, self.rate), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


def gradients_of_parameters(module, x, scale):
    """Differentiates by the arrays of a module, as libraries do that tell them from numbers by ``isinstance``."""
    leaves, structure = jax.tree.flatten(module)
    traced = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    def loss(arrays):
        left = iter(arrays)
        one = jax.tree.unflatten(structure, [next(left) if isinstance(leaf, jax.Array) else leaf for leaf in leaves])
        return jnp.sum((x @ one.weight * (1.0 - one.rate) * scale) ** 2)

    return jax.grad(loss)(traced)


def test_numbers_with_a_fraction_inside_of_an_object_are_none_of_its_arrays(qkv):
    x = qkv[0][0, 0]
    traces = []

    def step(module, x, scale):
        traces.append(None)
        return gradients_of_parameters(module, x, scale)

    wrapped = autopallas.optimize(step)
    for rate in (0.25, 0.5, 0.25):
        module = Module(jnp.ones((D, D)), rate)
        same(wrapped(module, x, 2.0), gradients_of_parameters(module, x, 2.0))
    before = len(traces)
    for scale in (3.0, 4.0):  # traced, as an argument of its own
        module = Module(jnp.ones((D, D)), 0.25)
        same(wrapped(module, x, scale), gradients_of_parameters(module, x, scale))
        same(wrapped({"scale": module}["scale"], x, scale), gradients_of_parameters(module, x, scale))
    assert len(traces) == before
    module = Module(jnp.ones((D, D)), jnp.float32(0.25))
    same(wrapped(module, x, 2.0), gradients_of_parameters(module, x, 2.0))


def test_a_number_that_changes_from_call_to_call_is_none_of_the_arrays_either(qkv):
    """Where it was traced from its second value on, what has the same form counted it among the parameters: the norm of
    a gradient, and a step that returns the module."""
    x = qkv[0][0, 0]

    def norm(module, x):
        return jnp.sqrt(sum(jnp.sum(g**2) for g in gradients_of_parameters(module, x, 2.0)))

    def scaled(module, x):
        return jax.tree.map(lambda leaf: 2 * leaf if isinstance(leaf, jax.Array) else leaf, module)

    wrapped, also = autopallas.optimize(norm), autopallas.optimize(scaled)
    for rate in (0.1, 0.2, 0.3):
        module = Module(jnp.ones((D, D)), rate)
        same(wrapped(module, x), norm(module, x))
        assert also(module, x).rate == rate


def test_a_function_is_compiled_a_few_times_for_numbers_that_are_others_in_each_call(qkv):
    """And for more of them, where calls come back to them."""
    x = qkv[0][0, 0]
    wrapped = autopallas.optimize(lambda module, x: x @ module.weight * module.rate)

    def call(rate):
        module = Module(jnp.ones((D, D)), rate)
        same(wrapped(module, x), x @ module.weight * rate)
        return wrapped._fixed._cache_size()

    assert [call(0.5 + n) for n in range(4)] == [1, 2, 3, 4]
    with pytest.warns(AutopallasWarning, match="several numbers inside of its arguments"):
        assert call(4.5) == 4
    assert "others in each call" in wrapped.report().failures[-1].error
    assert [call(5.5), call(6.5)] == [4, 4]
    assert [call(0.5) for _ in range(4)] == [4] * 4
    assert [call(6.5), call(7.5)] == [5, 5]


def test_a_number_that_the_function_looks_at_stays_one(qkv):
    x = qkv[0][0, 0]
    wrapped = autopallas.optimize(lambda module, x: x @ module.weight if module.rate > 0.2 else x)
    for rate in (0.1, 0.3, 0.15, 0.4):
        same(wrapped(Module(2 * jnp.ones((D, D)), rate), x), x @ (2 * jnp.ones((D, D))) if rate > 0.2 else x)
