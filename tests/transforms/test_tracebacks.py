"""A function's own errors are shown without frames of this package, as jit shows them without JAX's."""

from __future__ import annotations

import os
import traceback

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import autopallas

OURS = os.path.join(os.path.dirname(autopallas.__file__), "")
X = jnp.ones((4, 4))


def narrow(x):
    return x @ jnp.ones((3, 3))


def looped(x):
    return lax.scan(lambda c, _: (narrow(c), None), x, None, length=3)[0]


def raised(call):
    with pytest.raises(TypeError) as caught:
        call()
    return list(traceback.extract_tb(caught.value.__traceback__))


def shown(call):
    """Names of the functions in a traceback, and the files of this package in it."""
    frames = raised(call)
    return [f.name for f in frames], [f.filename for f in frames if f.filename.startswith(OURS)]


@pytest.mark.parametrize("make", [autopallas.optimize, lambda f: autopallas.optimize(jax.jit(f))], ids=["plain", "jit"])
@pytest.mark.parametrize("use", ["call", "lower", "trace", "eval_shape", "explain"])
def test_an_error_of_the_function_leads_from_the_call_to_its_line(make, use):
    function = make(looped)
    calls = {"call": function, "explain": lambda x: autopallas.explain(function, x)}
    names, ours = shown(lambda: calls.get(use, getattr(function, use, None))(X))
    assert "narrow" in names
    assert "looped" in names
    assert not ours


def test_an_error_in_an_optimized_function_within_another_too():
    inner = autopallas.optimize(narrow)
    names, ours = shown(lambda: autopallas.optimize(lambda x: inner(x) + 1)(X))
    assert "narrow" in names
    assert not ours


def test_errors_of_this_package_keep_their_frames():
    with pytest.raises(autopallas.OptionError) as caught:
        autopallas.optimize(narrow, objective="none")(X)
    files = [f.filename for f in traceback.extract_tb(caught.value.__traceback__)]
    assert any(file.startswith(OURS) for file in files)


def test_all_frames_are_shown_where_jax_shows_all_of_its_own():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        _, ours = shown(lambda: autopallas.optimize(looped)(X))
    finally:
        jax.config.update("jax_traceback_filtering", before)
    assert ours


def test_what_jit_says_of_a_function_names_it():
    def chooses(x):
        return x if x.sum() > 0 else -x

    for function, error in ((chooses, jax.errors.TracerBoolConversionError), (lambda x: "text", TypeError)):
        with pytest.raises(error, match=f"function {function.__name__} at .*test_tracebacks.py"):
            autopallas.optimize(jax.jit(function))(X)
