"""Declares the operation RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from autopallas.sites.declared import DeclaredOperation, Result
from autopallas.sites.spec import Dtype, Spec

__all__ = ["OPERATION", "RmsNormSpec", "reference"]


@dataclass(frozen=True)
class RmsNormSpec(Spec):
    """One normalisation of B times M rows of N columns, rounded at the end:
    ``gain * x / sqrt(factor * mean(x**2) + epsilon) * scale + shift``.

    Operands: x [B, M, N]; scale and shift [B|1, N|1], and residual [B|1, M|1, N|1], floating, each of which a site may
    lack.  Where there is a residual, x stands for ``x + residual``, rounded as the further result ``sum`` where that is
    given.
    """

    batch: int
    rows: int
    columns: int
    x_dtype: Dtype
    scale_dtype: Dtype | None
    shift_dtype: Dtype | None
    result_dtype: Dtype
    residual_dtype: Dtype | None = None
    sum_dtype: Dtype | None = None
    """The dtype of ``x + residual`` as a second result; by default it is not given."""
    epsilon: float = 1e-6
    outside: bool = False
    """Whether epsilon is added to the root, and not to the mean."""
    gain: float = 1.0
    """A number by which the rows are multiplied too."""
    factor: float = 1.0
    """What the mean is multiplied by: N for the sum of the squares, as where rows are divided by their norm."""
    strided: bool = False
    """Whether columns lie apart in the program's arrays, as where channels come first."""

    def __str__(self) -> str:
        scale = "" if self.scale_dtype is None else f", scale {self.scale_dtype}"
        shift = "" if self.shift_dtype is None else f", shift {self.shift_dtype}"
        residual = "" if self.residual_dtype is None else f", residual {self.residual_dtype}"
        residual = residual if self.sum_dtype is None else f"{residual}, sum {self.sum_dtype}"
        batch = f"B={self.batch} " if self.batch != 1 else ""
        sizes = f"{batch}M={self.rows} N={self.columns} {self.x_dtype}"
        more = f", gain {self.gain:.3g}" if self.gain != 1 else ""
        more += f", factor {self.factor:.3g}" if self.factor != 1 else ""
        more += ", columns apart" if self.strided else ""
        return f"rms_norm {sizes}{scale}{shift}{residual}, epsilon {self.epsilon:.3g}{more}"


def reference(
    spec: RmsNormSpec,
    x: jax.Array,
    scale: jax.Array | None = None,
    shift: jax.Array | None = None,
    residual: jax.Array | None = None,
) -> Result:
    """Computes the formula of :class:`RmsNormSpec` in its accumulation dtype; the results are [B, M, N]."""
    wide = x.astype(spec.accumulation_dtype)
    wide = wide if residual is None else wide + residual.astype(wide.dtype)
    total = wide.astype(spec.sum_dtype) if spec.sum_dtype is not None else None
    wide = wide if total is None else total.astype(wide.dtype)
    square = jnp.sum(wide * wide, axis=-1, keepdims=True) / (spec.columns / spec.factor)
    root = jnp.sqrt(square) + spec.epsilon if spec.outside else jnp.sqrt(square + spec.epsilon)
    result = wide / root if spec.gain == 1 else wide / root * spec.gain
    result = result if scale is None else result * scale.astype(wide.dtype)[:, None]
    result = result if shift is None else result + shift.astype(wide.dtype)[:, None]
    result = result.astype(spec.result_dtype)
    return result if total is None else (result, total)


OPERATION = DeclaredOperation(
    "rms_norm",
    reference=reference,
    operands={"x": "B M N", "scale": "B N", "shift": "B N", "residual": "B M N"},
    result="B M N",
    further={"sum": "B M N"},
    sizes={"B": "batch", "M": "rows", "N": "columns"},
    rows="B M",
    sample=RmsNormSpec(1, 4096, 1024, jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32), None, jnp.dtype(jnp.bfloat16)),
)
