"""What is compiled stays compiled: a call of an optimized function changes the key of no jit cache."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from autopallas.trace_context import TraceContext

PROGRAMS = {
    "attention": "lambda x: jax.nn.softmax(x @ x.T / 8) @ x",
    "cross_entropy": "lambda x: -jnp.take_along_axis(jax.nn.log_softmax(x @ x.T), jnp.arange(24)[:, None], 1).mean()",
    "grouped_matmul": "lambda x: lax.ragged_dot(x, jnp.ones((2, 16, 8)), jnp.array([10, 14]))",
    "gated_mlp": "lambda x: (jax.nn.silu(x @ x.T) * (x @ jnp.sin(x).T)) @ x",
    "layer_norm": "lambda x: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)",
    "linear_attention": "lambda x: jnp.tril(x @ x.T) @ x",
    "recurrence": "lambda x: lax.scan(lambda s, r: (0.9 * s + jnp.outer(r, r), r @ s), jnp.zeros((16, 16)), x)[1]",
    "respelling": "lambda x: jnp.argsort(x, axis=0)",
}

RUN = """
import jax, jax.numpy as jnp
from jax import lax
import autopallas

compiled, traced = [], []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **_: compiled.append(name) if "backend_compile" in name else None
)

@jax.jit
def another(x):
    traced.append(x)
    return x + 1

x = jnp.arange(24.0 * 16).reshape(24, 16) / 384
another(x)
function = autopallas.optimize(jax.jit({program}), objective="always", ops=["{op}"])
jax.block_until_ready(function(x))
assert function.report().counts()["{op}"], function.report()
del compiled[:]
jax.block_until_ready(function(x))
another(x)
print(len(compiled), len(traced))
"""


@pytest.mark.parametrize("op", PROGRAMS)
def test_the_second_call_compiles_nothing_and_what_was_compiled_before_stays(op):
    """In a process of its own, since modules are imported when they are first asked for."""
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(program=PROGRAMS[op], op=op)], capture_output=True, text=True
    )
    assert done.stdout.split() == ["0", "1"], done.stderr


def test_a_context_variable_counts_by_its_value_alone():
    traces = []

    @jax.jit
    def function(x):
        traces.append((first.value, second.value))
        return x

    first, second = TraceContext(0), TraceContext("")
    x = jnp.ones(3)
    function(x)
    third = TraceContext(None)
    function(x)
    with first(0), third(None):
        function(x)
    assert traces == [(0, "")]
    with first(1), second("a"):
        function(x)
        with first(0), second(""):
            function(x)
    with second("a"), first(1):
        function(x)
    assert traces == [(0, ""), (1, "a")]
    with pytest.raises(KeyError), first(2):
        {}[first.value]
    assert (first.value, second.value) == (0, "")
