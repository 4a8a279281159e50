"""``python -m benchmarks.tracing``: what tracing costs with recognition and rewrite, beside the plain trace.

Models of unrolled layers, each traced in turns as it is written and under autopallas.optimize, always by a function
that JAX has not seen before.  A ratio of 1.5 says that tracing took 1.5 times the processor time, by the median of
ratios that are formed within rounds.  Looking is recognition alone, of a program that was traced before.  Nothing is
compiled or run.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import autopallas
from autopallas.options import resolve
from autopallas.passes import Passes
from autopallas.pipeline import find_sites
from benchmarks import environment, recurrent_layers

RESULTS = Path(__file__).parent / "results" / "tracing.json"
MOST = 1.5
"""How many times the processor time of the plain trace a model of attention layers may take."""
B, T, D, N, F, E, V = 2, 512, 256, 4, 1024, 8, 4096
"""Sequences, tokens of each, width, heads, hidden width, experts, vocabulary."""

OPTIONS: dict[str, Any] = {"objective": "always"}
"""Every site is replaced, so that the rewrite is part of what is measured."""

Parameters = dict[str, Any]


def _normalised(p: jax.Array, x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * p[0] + p[1]


def _attention(p: Parameters, x: jax.Array, causal: bool = True) -> jax.Array:
    q, k, v = ((x @ p[name]).reshape(B, T, N, D // N).transpose(0, 2, 1, 3) for name in "qkv")
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(D // N).astype(np.float32)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf)
    return (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(B, T, D) @ p["o"]


def _hidden(p: Parameters, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"]


def _mixture(p: Parameters, x: jax.Array) -> jax.Array:
    weights, chosen = lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
    combine = (jax.nn.one_hot(chosen, E) * weights[..., None]).sum(-2)
    hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, p["gate"]))
    return jnp.einsum("btef,efd,bte->btd", hidden, p["out"], combine)


def gpt(p: Parameters, x: jax.Array) -> jax.Array:
    x = x + _attention(p, _normalised(p["first"], x))
    return x + _hidden(p, _normalised(p["second"], x))


def bert(p: Parameters, x: jax.Array) -> jax.Array:
    x = _normalised(p["first"], x + _attention(p, x, causal=False))
    return _normalised(p["second"], x + _hidden(p, x))


def moe(p: Parameters, x: jax.Array) -> jax.Array:
    x = x + _attention(p, _normalised(p["first"], x))
    return x + _mixture(p, _normalised(p["second"], x))


def mlp(p: Parameters, x: jax.Array) -> jax.Array:
    return x + _hidden(p, _normalised(p["second"], x))


LAYERS: dict[str, Callable[[Parameters, jax.Array], jax.Array]] = {
    "gpt": gpt, "gpt remat": jax.checkpoint(gpt), "bert": bert, "moe": moe, "mlp": mlp, **recurrent_layers.LAYERS,
}  # fmt: skip
BOUNDED = ("gpt", "bert")
"""The models that ``MOST`` is asked of."""


def model(name: str, direction: str, depth: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A model of so many layers and its arguments, as shapes: the mean cross-entropy of the tokens, or a train step."""

    def loss(parameters: Parameters, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        x = parameters["embedding"][tokens]
        for layer in parameters["layers"]:
            x = LAYERS[name](layer, x)
        logits = jax.nn.log_softmax(_normalised(parameters["last"], x) @ parameters["head"])
        return -jnp.take_along_axis(logits, labels[..., None], axis=-1).mean()

    def step(parameters: Parameters, tokens: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(parameters, tokens, labels)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, parameters, gradients), value

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    of_attention = {
        "q": floats(D, D), "k": floats(D, D), "v": floats(D, D), "o": floats(D, D),
        "up": floats(D, F), "bias": floats(F), "down": floats(F, D), "first": floats(2, D), "second": floats(2, D),
        "router": floats(D, E), "gate": floats(E, D, F), "out": floats(E, F, D),
    }  # fmt: skip
    recurrent = {key: floats(*shape) for key, shape in recurrent_layers.SHAPES.get(name, {}).items()}
    layer = recurrent or of_attention
    tables = {"embedding": floats(V, D), "head": floats(D, V), "last": floats(2, D)}
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32)
    return (step if direction == "train step" else loss), (tables | {"layers": [layer] * depth}, ids, ids)


def _optimized(function: Callable[..., Any]) -> Any:
    return autopallas.optimize(function, **OPTIONS)


def _seconds(trace: Callable[..., Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """Processor time for one trace of a function that has not been traced before."""

    def fresh(*given: Any) -> Any:
        return function(*given)

    wrapped = trace(fresh)
    gc.collect()  # what the trace before left behind
    start = time.process_time()
    wrapped.trace(*arguments)
    return time.process_time() - start


def _looking(function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """Processor time for what looks for sites in a program that has not been looked at before."""
    program = jax.make_jaxpr(lambda *given: function(*given))(*arguments)
    gc.collect()
    start = time.process_time()
    find_sites(Passes(program, checked=False), program, resolve(OPTIONS), divided=False)
    return time.process_time() - start


def row(name: str, direction: str, depth: int, rounds: int) -> dict[str, Any]:
    """What tracing one model costs, after one trace of each kind."""
    function, arguments = model(name, direction, depth)
    optimized = autopallas.optimize(function, **OPTIONS)
    optimized.trace(*arguments)
    report = optimized.report()
    _seconds(jax.jit, function, arguments)
    times = [
        (
            _seconds(jax.jit, function, arguments),
            _seconds(_optimized, function, arguments),
            _looking(function, arguments),
        )
        for _ in range(rounds)
    ]
    plain, own, _ = (statistics.median(of_kind) for of_kind in zip(*times, strict=True))
    ratios = sorted(b / a for a, b, _ in times)
    quarter = len(ratios) // 4
    return {
        "model": name, "direction": direction, "layers": depth, "sites": len(report.sites),
        "applied": sum(site.verdict == "applied" for site in report.sites),
        "near_misses": len(report.near_misses), "plain_cpu_seconds": float(f"{plain:.4g}"),
        "cpu_seconds": float(f"{own:.4g}"), "rounds": rounds,
        "cpu_ratio": [round(x, 3) for x in (statistics.median(ratios), ratios[quarter], ratios[-1 - quarter])],
        "looking_cpu_ratio": round(statistics.median(c / a for a, _, c in times), 3),
        "load": round(os.getloadavg()[0], 2), "processor": environment.processor(),
        "versions": environment.versions(), "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def main(given: Sequence[str]) -> int:
    """Runs the command line; 1 where a model of attention layers takes more time than asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracing", description=__doc__)
    parser.add_argument("--models", nargs="*", choices=list(LAYERS), default=list(LAYERS))
    parser.add_argument("--directions", nargs="*", choices=["forward", "train step"], default=["forward", "train step"])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help=f"a file for the rows, as JSON, such as {RESULTS.name}")
    options = parser.parse_args(given)
    every = []
    for name in options.models:
        for direction in options.directions:
            every.append(row(name, direction, options.layers, options.rounds))
            found = every[-1]
            median, lower, upper = found["cpu_ratio"]
            print(f"{options.layers} layers of {name}, {direction}: {found['plain_cpu_seconds']:.3f} s plain, "
                  f"{found['cpu_seconds']:.3f} s, {median:.2f} [{lower:.2f}, {upper:.2f}] times, "
                  f"of which looking is {found['looking_cpu_ratio']:.2f}; "
                  f"{found['applied']} of {found['sites']} sites replaced", flush=True)  # fmt: skip
            if options.output:
                options.output.write_text("[\n" + ",\n".join(map(json.dumps, every)) + "\n]\n")
    return int(not all(found["cpu_ratio"][0] <= MOST for found in every if found["model"] in BOUNDED))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
