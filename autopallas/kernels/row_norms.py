"""What the declarations of normalisations of rows share: the spec, and the computation in plain JAX.

A site may also turn its rows behind the normalisation: rotary embedding (Su et al., 2021, arXiv:2104.09864) takes two
columns at a time and rotates them by an angle that depends on the position of the row.

Letters: B models, M rows, N columns.  Rows that are turned are M = G x P x H: P positions, each of which has H
neighbouring rows, as where heads come last, and all of them G times, as where heads come first.  A is the number of
angles of a position, one for each pair of columns; J is 2 where the two columns of a pair have cosines of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.sites.declared import DeclaredOperation, Result
from autopallas.sites.spec import Dtype, Spec

__all__ = ["RowNormSpec", "declared_norm", "normalised", "turned_columns"]


@dataclass(frozen=True)
class RowNormSpec(Spec):
    """One normalisation of B times M rows of N columns.

    Operands: x [B, M, N]; scale and shift [B|1, N|1], and residual [B|1, M|1, N|1], floating, each of which a site may
    lack.  Where there is a residual, x stands for ``x + residual``, rounded as the further result ``sum`` where that is
    given.  Where there are cos and sin [B|1, P, H|1, J, A], A pairs (p, q) of columns of each result become
    ``(p * cos - q * sin, q * cos + p * sin)``.
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
    floor: bool = field(default=False, kw_only=True)
    """Whether epsilon is the least that the mean, or the root, may be, and is not added."""
    strided: bool = False
    """Whether columns lie apart in the program's arrays, as where channels come first."""
    cos_dtype: Dtype | None = field(default=None, kw_only=True)
    sin_dtype: Dtype | None = field(default=None, kw_only=True)
    positions: int = field(default=1, kw_only=True)
    heads: int = field(default=1, kw_only=True)
    own_of_pair: int = field(default=1, kw_only=True)
    angles: int = field(default=1, kw_only=True)
    start: int = field(default=0, kw_only=True)
    """The first column that is turned."""
    neighbours: bool = field(default=False, kw_only=True)
    """Whether the two columns of a pair are neighbours, and not half of the turned columns apart."""
    first_adds: bool = field(default=False, kw_only=True)
    """Whether the product of the second column of a pair and the sine is added to the first one, not subtracted."""
    second_subtracts: bool = field(default=False, kw_only=True)
    """Whether the product of the first column of a pair and the sine is subtracted from the second one, not added."""

    @property
    def gain(self) -> float:
        """What the rows are multiplied by."""
        return 1.0

    @property
    def factor(self) -> float:
        """What the mean square, or the variance, is multiplied by."""
        return 1.0

    @property
    def turns(self) -> bool:
        """Whether rows are turned."""
        return self.cos_dtype is not None

    @property
    def sine_signs(self) -> tuple[int, int]:
        """The signs with which the first and the second column of a pair get the sine's products."""
        return 1 if self.first_adds else -1, -1 if self.second_subtracts else 1

    def described(self, name: str) -> str:
        """Returns the spec in one line, under the name of its operation."""
        vectors = ((own, getattr(self, f"{own}_dtype")) for own in ("scale", "shift", "residual", "sum"))
        given = "".join(f", {own} {dtype}" for own, dtype in vectors if dtype is not None)
        batch = f"B={self.batch} " if self.batch != 1 else ""
        more = f", gain {self.gain:.3g}" if self.gain != 1 else ""
        more += f", factor {self.factor:.3g}" if self.factor != 1 else ""
        more += ", columns apart" if self.strided else ""
        if self.turns:
            pairs = "neighbours" if self.neighbours else "halves"
            more += f", turned by P={self.positions} H={self.heads} A={self.angles} {self.cos_dtype} {pairs}"
        sizes = f"{batch}M={self.rows} N={self.columns} {self.x_dtype}"
        least = "at least" if self.floor else "epsilon"
        return f"{name} {sizes}{given}, {least} {self.epsilon:.3g}{more}"


def normalised(
    spec: RowNormSpec,
    x: jax.Array,
    scale: jax.Array | None = None,
    shift: jax.Array | None = None,
    residual: jax.Array | None = None,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    *,
    centred: bool,
) -> Result:
    """Computes the formula of a spec in its accumulation dtype; the results are [B, M, N].

    Args:
      spec: the spec.
      x, scale, shift, residual, cos, sin: the operands.
      centred: whether the rows are taken from their means first.

    Raises:
      ValueError: of cosines and sines one is lacking, or they do not fit the rows.
    """
    if (cos is None) != (sin is None):
        raise ValueError("rows are turned by cos and sin, of which one is lacking; pass both or none")
    wide = x.astype(spec.accumulation_dtype)
    wide = wide if residual is None else wide + residual.astype(wide.dtype)
    total = wide.astype(spec.sum_dtype) if spec.sum_dtype is not None else None
    wide = wide if total is None else total.astype(wide.dtype)
    if centred:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    else:
        square = jnp.sum(wide * wide, axis=-1, keepdims=True) / (spec.columns / spec.factor)
    with_epsilon = jnp.maximum if spec.floor else jnp.add
    epsilon = jnp.asarray(spec.epsilon, wide.dtype)
    root = with_epsilon(jnp.sqrt(square), epsilon) if spec.outside else jnp.sqrt(with_epsilon(square, epsilon))
    result = wide / root if spec.gain == 1 else wide / root * spec.gain
    result = result if scale is None else result * scale.astype(wide.dtype)[:, None]
    result = result if shift is None else result + shift.astype(wide.dtype)[:, None]
    result = result if cos is None or sin is None else _turned(spec, result, cos, sin)
    result = result.astype(spec.result_dtype)
    return result if total is None else (result, total)


def turned_columns(spec: RowNormSpec) -> slice:
    """Returns the columns that are turned."""
    return slice(spec.start, spec.start + 2 * spec.angles)


def _turned(spec: RowNormSpec, y: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Returns the rows [B|1, M, N] turned: [B, M, N]."""
    if spec.columns < (own := turned_columns(spec)).stop or spec.rows % (spec.positions * spec.heads):
        raise ValueError(
            f"{spec.angles} pairs of columns from column {spec.start} on, at {spec.positions} positions of "
            f"{spec.heads} rows each, do not fit {spec.rows} rows of {spec.columns} columns"
        )
    rows = y.reshape(len(y), -1, spec.positions, spec.heads, spec.columns)
    before, inner, after = rows[..., : own.start], rows[..., own], rows[..., own.stop :]
    axis = -1 if spec.neighbours else -2
    pairs = inner.reshape(*inner.shape[:-1], *((spec.angles, 2) if spec.neighbours else (2, spec.angles)))
    first, second = (lax.index_in_dim(pairs, i, axis, keepdims=False) for i in (0, 1))
    cos_first, cos_second = (cos.astype(y.dtype)[:, None, ..., i, :] for i in (0, -1))
    sin_first, sin_second = (sin.astype(y.dtype)[:, None, ..., i, :] for i in (0, -1))
    one, other = spec.sine_signs
    turned = first * cos_first + one * (second * sin_first), second * cos_second + other * (first * sin_second)
    inner = jnp.stack(turned, axis).reshape(*turned[0].shape[:-1], 2 * spec.angles)
    rest = [jnp.broadcast_to(x, (*inner.shape[:-1], x.shape[-1])) for x in (before, after)]
    parts = [x for x in (rest[0], inner, rest[1]) if x.size]
    whole = jnp.concatenate(parts, -1) if len(parts) > 1 else inner
    return whole.reshape(len(inner), spec.rows, spec.columns)


def _fitted(sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns sizes of letters that rows which are turned may have, near others; those of other rows as they are."""
    if "P" not in sizes:
        return dict(sizes)
    positions = math.gcd(sizes["P"], sizes["M"])
    heads = math.gcd(sizes["H"], sizes["M"] // positions)
    angles = max(1, min(sizes["A"], sizes["N"] // 2))
    return {**sizes, "P": positions, "H": heads, "J": 1 + (sizes["J"] > 1), "A": angles}


def declared_norm(name: str, reference: Callable[..., Result], spec: type[RowNormSpec]) -> DeclaredOperation:
    """Declares the normalisation of a name, with :func:`normalised` as its reference."""
    bfloat16, float32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
    sample = spec(1, 4096, 1024, bfloat16, float32, None, bfloat16)
    turns = replace(
        sample, batch=2, rows=2048 * 16, columns=128, positions=2048, angles=64, cos_dtype=float32, sin_dtype=float32
    )
    return DeclaredOperation(
        name,
        reference=reference,
        operands={
            "x": "B M N",
            "scale": "B N",
            "shift": "B N",
            "residual": "B M N",
            "cos": "B P H J A",
            "sin": "B P H J A",
        },
        result="B M N",
        further={"sum": "B M N"},
        sizes={
            "B": "batch",
            "M": "rows",
            "N": "columns",
            "P": "positions",
            "H": "heads",
            "J": "own_of_pair",
            "A": "angles",
        },
        rows="B M",
        sample=sample,
        variants={"turned": turns},
        untrained=("cos", "sin"),
        fitted_sizes=_fitted,
    )
