"""What the machine can do at best: the fastest matrix product measured in this very process."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from autopallas.tuning import measure

SIZE = {"cpu": 2048, "gpu": 8192, "tpu": 8192}
"""Rows and columns of the square matrices: large enough for full speed, small enough for a few runs."""


def matmul_peak(dtypes: Iterable[str], seconds: float = 5.0) -> dict[str, float]:
    """Floating-point operations per second of ``x @ y`` by dtype: that of the fastest run, for a peak is a bound."""
    size = SIZE.get(jax.default_backend(), 2048)
    peaks = {}
    for dtype in dtypes:
        x = jax.random.normal(jax.random.key(0), (size, size), jnp.float32).astype(dtype)
        timing = measure({dtype: jnp.matmul}, (x, x), seconds=seconds, repetitions=40)[dtype]
        spread = timing.spread()
        if spread is not None:
            peaks[dtype] = 2.0 * size**3 / spread.minimum
    return peaks
