"""The declaration: where a program computes the reference, the kernel is to run."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp

import autopallas
from own_kernel import kernel, reference

# The kernel compiles for a TPU.  Interpreted, it runs anywhere, which is for tests.
INTERPRET = os.environ.get("AUTOPALLAS_INTERPRET") == "1"

EXAMPLE = [jax.ShapeDtypeStruct((8, 128), jnp.float32), jax.ShapeDtypeStruct((128,), jnp.float32)]


@autopallas.pattern(
    reference.rms_norm,
    shapes=EXAMPLE,  # of the right rank and dtype; other sizes are found too
    scalars=["eps"],  # may have any value in the program, which the kernel is given
    platforms=["cpu", "gpu", "tpu"] if INTERPRET else ["tpu"],
)
def fused_rms_norm(x: jax.Array, scale: jax.Array, *, eps: float) -> jax.Array:
    """Runs the kernel; in the backward pass JAX differentiates the reference."""
    return kernel.rms_norm(x, scale, eps=eps, interpret=INTERPRET)
