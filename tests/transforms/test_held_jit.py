"""Objects that call a jit function which they hold, as the jit of libraries whose modules change."""

from __future__ import annotations

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopallas


class Model:
    """A model that counts how often it is called, beside its arrays."""

    def __init__(self, weight):
        self.weight, self.calls = weight, jnp.zeros((), jnp.int32)

    def __call__(self, x):
        self.calls += 1
        return jax.nn.softmax(x @ self.weight @ x.T) @ x


class Jitted:
    """Takes the arrays of a model out of it, and puts the new ones into it, around a jit function."""

    def __init__(self, function):
        self.function, self.traces = function, 0
        self.jitted = jax.jit(self._pure)

    def _pure(self, weight, calls, x):
        self.traces += 1
        model = Model(weight)
        model.calls = calls
        result = self.function(model, x)
        return result, model.weight, model.calls

    def __call__(self, model, x):
        if isinstance(model.weight, jax.core.Tracer) or isinstance(x, jax.core.Tracer):
            raise RuntimeError("a model may not change while another function is traced")
        result, model.weight, model.calls = self.jitted(model.weight, model.calls, x)
        return result


def step(model, x):
    value, gradient = jax.value_and_grad(lambda weight: jnp.sin(jax.nn.softmax(x @ weight @ x.T) @ x).sum())(
        model.weight
    )
    model.weight = model.weight - 0.1 * gradient
    model.calls += 1
    return value


@pytest.fixture
def given():
    random = np.random.default_rng(0)
    return jnp.asarray(random.standard_normal((8, 8)) / 4, jnp.float32), jnp.asarray(
        random.standard_normal((16, 8)), jnp.float32
    )


def test_what_an_object_jits_is_optimized(given, recwarn):
    weight, x = given
    ours, theirs = Model(weight), Model(weight)
    plain, optimized = Jitted(step), autopallas.optimize(Jitted(step), objective="always", ops="attention")
    for _ in range(3):
        np.testing.assert_allclose(optimized(ours, x), plain(theirs, x), rtol=1e-5)
    np.testing.assert_allclose(ours.weight, theirs.weight, rtol=1e-5, atol=1e-5)
    assert ours.calls == theirs.calls == 3
    assert optimized.report().counts() == {"attention": 1}
    assert not recwarn.list


def test_the_object_itself_stays_as_it_was(given):
    weight, x = given
    own = Jitted(step)
    jitted = own.jitted
    autopallas.optimize(own, objective="always")(Model(weight), x)
    assert own.jitted is jitted
    traces = own.traces
    own(Model(weight), x)
    assert own.traces == traces + 1  # by its own jit function, which has not traced it yet


def test_an_explanation_changes_nothing(given):
    weight, x = given
    own, model = Jitted(step), Model(weight)
    report = autopallas.explain(autopallas.optimize(own, objective="always", ops="attention"), model, x)
    assert [site.verdict for site in report.sites] == ["applied"]
    assert model.weight is weight
    assert model.calls == 0


def test_another_jit_function_that_it_is_given_is_called(given):
    weight, x = given
    own = Jitted(step)
    optimized = autopallas.optimize(own, objective="always")
    optimized(Model(weight), x)
    own.jitted = jax.jit(lambda weight, calls, x: (x.sum(), weight, calls))
    assert optimized(Model(weight), x) == x.sum()


def test_several_threads_call_it(given, recwarn):
    weight, x = given
    own = Jitted(step)
    jitted, optimized = own.jitted, autopallas.optimize(own, objective="always")
    models = [Model(weight) for _ in range(4)]
    threads = [threading.Thread(target=lambda m=m: [optimized(m, x) for _ in range(5)]) for m in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not recwarn.list
    assert own.jitted is jitted
    assert [int(m.calls) for m in models] == [5] * 4
    for model in models[1:]:
        np.testing.assert_allclose(model.weight, models[0].weight, rtol=1e-5, atol=1e-5)


def test_an_error_of_the_users_is_raised_as_it_is(given):
    def failing(model, x):
        raise KeyError("of the user")

    weight, x = given
    own = Jitted(failing)
    jitted, optimized = own.jitted, autopallas.optimize(own)
    for _ in range(2):
        with pytest.raises(KeyError, match="of the user"):
            optimized(Model(weight), x)
    assert own.jitted is jitted


class Fixed(Jitted):
    """Refuses another jit function."""

    def __setattr__(self, name, value):
        if "jitted" in vars(self) and name == "jitted":
            raise AttributeError(name)
        super().__setattr__(name, value)


class Several(Jitted):
    """Holds two jit functions."""

    def __init__(self, function):
        super().__init__(function)
        self.other = jax.jit(jnp.sin)


@pytest.mark.parametrize("kind", [Fixed, Several], ids=lambda kind: kind.__name__)
def test_others_run_as_they_are(kind, given):
    weight, x = given
    model, optimized = Model(weight), autopallas.optimize(kind(step), objective="always")
    with pytest.warns(UserWarning, match="as it is written"):
        value = optimized(model, x)
    np.testing.assert_allclose(value, Jitted(step)(Model(weight), x), rtol=1e-6)
    assert model.calls == 1
    assert not optimized.report().sites


class Unread(Jitted):
    """Does not call its jit function."""

    def __call__(self, model, x):
        model.calls += 1
        return np.asarray(x).sum()


class Sometimes(Jitted):
    """Calls its jit function where an array has large numbers alone."""

    def __call__(self, model, x):
        return super().__call__(model, x) if np.abs(np.asarray(x)).max() > 100 else x.sum()


@pytest.mark.parametrize("kind", [Unread, Sometimes], ids=lambda kind: kind.__name__)
def test_a_report_says_that_an_object_did_not_call_its_jit_function(kind, given):
    weight, x = given
    model, optimized = Model(weight), autopallas.optimize(kind(step), objective="always")
    with pytest.warns(UserWarning, match="as it is written"):
        value = optimized(model, x)
    np.testing.assert_allclose(value, x.sum(), rtol=1e-5)
    assert model.calls == (kind is Unread)
    assert "as it is written" in str(optimized.report())


def test_an_explanation_calls_no_object_that_does_not_read_its_jit_function(given):
    weight, x = given
    model = Model(weight)
    assert "as it is written" in str(autopallas.explain(Unread(step), model, x))
    assert model.calls == 0


def test_what_an_object_jits_is_traced_anew_after_its_cache_was_cleared(given):
    weight, x = given
    own = Jitted(step)
    optimized = autopallas.optimize(own)
    optimized(Model(weight), x)
    traces = own.traces
    optimized.clear_cache()
    optimized(Model(weight), x)
    assert own.traces == traces + 1


def test_calls_of_other_threads_are_made_while_one_is_explained(given):
    weight, x = given
    own, found = Jitted(step), []

    class Slow(Model):
        @property
        def weight(self):
            if threading.current_thread() is not threading.main_thread() or found:
                return vars(self)["weight"]
            thread = threading.Thread(target=lambda: found.append(own(Model(weight), x)))
            thread.start()
            thread.join()
            return vars(self)["weight"]

        @weight.setter
        def weight(self, weight):
            vars(self)["weight"] = weight

    report = autopallas.explain(own, Slow(weight), x)
    np.testing.assert_allclose(found, [Jitted(step)(Model(weight), x)], rtol=1e-5)
    assert not report.failures


@pytest.mark.parametrize("objective", ["time", "always"])
def test_a_partial_function_of_an_object(given, recwarn, objective):
    """As a method that the jit of a library made."""
    weight, x = given
    ours, theirs = Model(weight), Model(weight)
    optimized = autopallas.optimize(functools.partial(Jitted(step), ours), objective=objective, ops="attention")
    for _ in range(2):
        np.testing.assert_allclose(optimized(x), Jitted(step)(theirs, x), rtol=1e-5)
    np.testing.assert_allclose(ours.weight, theirs.weight, rtol=1e-5, atol=1e-5)
    assert ours.calls == theirs.calls == 2
    assert optimized.report().counts() == {"attention": int(objective == "always")} or objective == "time"
    assert not recwarn.list


class Inspected(Jitted):
    """Has the methods of jit itself, which call those of the jit function that it holds."""

    def lower(self, model, x):
        return self.jitted.lower(model.weight, model.calls, x)

    def trace(self, model, x):
        return self.jitted.trace(model.weight, model.calls, x)

    def eval_shape(self, model, x):
        return self.jitted.eval_shape(model.weight, model.calls, x)[0]


@pytest.mark.parametrize("called_before", [False, True])
def test_an_object_that_is_lowered_or_traced_is_optimized_too(called_before, given):
    weight, x = given
    held = Inspected(Model.__call__)
    wrapped, model, before = autopallas.optimize(held, objective="always"), Model(weight), held.jitted
    if called_before:
        wrapped(model, x)
    lowered = wrapped.lower(model, x)
    assert wrapped.report().counts()["attention"] == 1
    np.testing.assert_allclose(lowered.compile()(weight, jnp.int32(0), x)[0], Model(weight)(x), atol=1e-5)
    assert "autopallas_site" in str(wrapped.trace(model, x).jaxpr)
    assert wrapped.eval_shape(model, x).shape == x.shape
    assert held.jitted is before
    assert int(model.calls) == called_before


def test_an_object_without_methods_of_jit_cannot_be_lowered(given):
    weight, x = given
    wrapped = autopallas.optimize(Jitted(Model.__call__), objective="always")
    with pytest.raises(TypeError, match="non-array argument"):
        wrapped.lower(Model(weight), x)
