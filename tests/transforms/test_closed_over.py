"""What a function that cannot be traced holds besides its arguments is what it was when it is called as it is."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import autopallas

X = jnp.arange(3.0)


class Model:
    """Counts its calls, and is taken apart while another function is traced."""

    def __init__(self):
        self.calls, self.log, self.scale, self.parts = 0, [], 2.0, {}

    def choose(self, x):
        self.calls += 1
        self.log.append(x)
        self.parts["x"] = x
        if isinstance(x, jax.core.Tracer):
            vars(self).clear()
            raise RuntimeError("a model may not change while it is traced")
        return x * self.scale

    __call__ = choose


MODEL = Model()


def closure(model):
    return lambda x: model.choose(x)


HOLDERS = {
    "method": lambda model: model.choose,
    "object": lambda model: model,
    "partial": lambda model: functools.partial(Model.choose, model),
    "closure": closure,
}


@pytest.mark.filterwarnings("ignore:autopallas runs")
@pytest.mark.every_case
@pytest.mark.parametrize("name", HOLDERS)
def test_an_object_that_a_trace_took_apart_is_put_together_again(name):
    model = Model()
    function = autopallas.optimize(HOLDERS[name](model))
    for calls in (1, 2):
        assert jnp.array_equal(function(X), X * 2)
        if name != "closure":  # others may change beside the trace
            assert model.calls == len(model.log) == calls
        assert model.scale == 2.0


@pytest.mark.filterwarnings("ignore:autopallas runs")
def test_an_object_that_a_function_reads_by_a_global_name():
    function = autopallas.optimize(lambda x: MODEL.choose(x))
    assert jnp.array_equal(function(X), X * 2)
    assert MODEL.scale == 2.0


@pytest.mark.filterwarnings("ignore:autopallas runs")
def test_arguments_of_a_function_that_returns_a_text_are_changed_once():
    def function(model, x):
        model.calls += 1
        return x, "text"

    model = Model()
    autopallas.optimize(function)(model, X)
    assert model.calls == 1
