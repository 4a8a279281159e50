"""Compiles a training step for a TPU on a machine without one, as it is written and optimized, and compares.

The model is four layers of attention spelled out in plain jnp.  The TPU's compiler comes with the extra "tpu-check":

    pip install '.[tpu-check]'
    python examples/compile_for_tpu.py --target tpu-v5e --sequence-length 8192
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import autopallas
from autopallas.compile.tpu import GENERATIONS, Compilation, Compiler, lowered_for, missing


def attention(x: jax.Array, layer: dict[str, jax.Array], heads: int) -> jax.Array:
    length, width = x.shape
    query, key, value = ((x @ layer[name]).reshape(length, heads, width // heads) for name in ("q", "k", "v"))
    scores = jnp.einsum("qhd,khd->hqk", query, key) / math.sqrt(width // heads)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1), value)
    return mixed.reshape(length, width) @ layer["o"]


def loss(layers: list[dict[str, jax.Array]], x: jax.Array, heads: int) -> jax.Array:
    for layer in layers:
        x = x + attention(x, layer, heads)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def step(layers: list[dict[str, jax.Array]], x: jax.Array, heads: int) -> Any:
    """The parameters after one step of gradient descent."""
    gradients = jax.grad(loss)(layers, x, heads)
    return jax.tree.map(lambda p, g: p - 0.1 * g, layers, gradients)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what the compiler says of both; 0 where the kernels are in the program and need less memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tpu-v5e", choices=tuple(GENERATIONS))
    parser.add_argument("--sequence-length", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args(arguments)
    if (reason := missing()) is not None:
        print(reason)
        return 2

    weight = jax.ShapeDtypeStruct((options.width, options.width), jnp.bfloat16)
    layers = [dict.fromkeys("qkvo", weight) for _ in range(options.layers)]
    x = jax.ShapeDtypeStruct((options.sequence_length, options.width), jnp.bfloat16)

    def original(layers: Any, x: Any) -> Any:
        return step(layers, x, options.heads)

    # There is no table of measured times for a device that is not here, so replacement is asked for.
    optimized = autopallas.optimize(original, objective="always", ops="attention")

    found: dict[str, Compilation] = {}
    with Compiler(options.target) as compiler:
        for name, function in (("as written", original), ("optimized", optimized)):
            found[name] = compiler.compile_lowered(lowered_for(function, (layers, x), options.target))
    print(optimized.report())
    for name, compilation in found.items():
        kernels = sorted({o.name.split(".")[0] for o in compilation.operations if o.kernel})
        print(f"\n{name}, for {options.target}:")
        if compilation.failure is not None:
            print(f"  the compiler refuses it ({compilation.stage}): {compilation.failure.splitlines()[0]}")
            continue
        print(f"  temporary memory  {compilation.temporary_bytes / 2**20:,.1f} MiB")
        print(f"  Pallas kernels    {', '.join(kernels) or 'none'}")
    written, ours = found["as written"], found["optimized"]
    smaller = written.stage == "memory" or ours.temporary_bytes < written.temporary_bytes
    return int(ours.failure is not None or not any(o.kernel for o in ours.operations) or not smaller)


if __name__ == "__main__":
    sys.exit(main())
