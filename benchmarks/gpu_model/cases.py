"""Says how often the loops of each kernel run: cases of attention, grouped matmul, cross-entropy and gated MLPs.

Letters as in the operations: B batch, T length, N heads, D head size; M rows, K inner size, N columns, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu_model.model import LAUNCH, Blocks, Case, Code, Streams, Tiles

__all__ = [
    "attention",
    "cross_entropy",
    "few_queries",
    "gated_mlp",
    "grouped_matmul",
    "train_step",
    "train_step_kept",
]

_SIZE = 2
"""Bytes of bfloat16."""
_ROWS, _COLUMNS, _INNER = 128, 256, 64
"""Tile of the persistent kernels."""
_SHARED = {0: (1.0, 1.0), 1: (1.0, 0.5), 2: (0.5, 1.0)}
"""What each multiprocessor loads of its tiles of rows and of columns, by the number of transfers that two blocks make
together: rows come in two, and columns in one."""
_PART = 8192
"""Columns of the vocabulary whose gradient is stored at a time."""


def attention(
    name: str,
    codes: Sequence[Code],
    shape: tuple[int, int, int, int],
    causal: bool,
    *,
    rows: int = 128,
    keys: int = 128,
    warpgroups: int = 2,
    backward: bool = False,
    two_stages: bool = False,
    copies: float = 0,
) -> Case:
    """Attention of shape (B, T, N, D).

    Args:
      name: of the case.
      codes: one kernel of a forward pass, all of a backward pass.
      shape, causal: what is computed; a causal pass is credited with half of the operations.
      rows, keys: of a block, and of a pass of its loop.
      warpgroups: that compute.
      backward: whether it is a backward pass; 10 B T T N D are credited, and the sums of out * dout are read beside it.
      two_stages: as :class:`Blocks` has it.
      copies: how many arrays of the size of the queries are transposed beside it.
    """
    b, t, n, d = shape
    cut = max(1.0, rows / keys)
    passes = ((t / rows - 1) / 2 * rows / keys, cut) if causal else (t / keys,)
    works = tuple(
        Blocks(code, b * n * t // rows, passes, warpgroups, not causal, backward, two_stages) for code in codes
    )
    operations = (10 if backward else 4) * b * t * t * n * d * (0.5 if causal else 1.0)
    return Case(name, operations, works, copied=(copies + backward) * 2 * b * t * n * d * _SIZE)


def few_queries(
    name: str,
    code: Code,
    shape: tuple[int, int, int, int, int],
    *,
    blocks: int,
    keys: int,
    warpgroups: int,
    kernels: int,
) -> Case:
    """One query for each head, over a cache that is read whole: (B, S, N, K, D).

    Args:
      name, code: of the case and its kernel.
      shape: what is computed.
      blocks: that divide the keys of a head.
      keys: of a pass of the loop.
      warpgroups: that compute.
      kernels: of XLA's, which find what is visited, and join the parts; each is taken to last as long as its launch.
    """
    b, s, n, k, d = shape
    partial = 4.0 * b * n * d * blocks * warpgroups
    moved = 2.0 * (2 * b * s * k * d + 2 * b * n * d) + partial
    work = Streams(code, b * k * blocks, s / keys / blocks, moved, warpgroups)
    return Case(name, 4.0 * b * s * n * d, (work,), copied=partial, beside=kernels * LAUNCH)


def grouped_matmul(
    name: str,
    code: Code,
    shape: tuple[int, int, int, int],
    *,
    row_tiles: int | None = None,
) -> Case:
    """Grouped matmul of (M, K, N, G).

    Args:
      name, code: of the case and its kernel.
      shape: what is computed.
      row_tiles: how many tiles of rows the groups have; None for the gradient of the weights, whose groups are even.
    """
    m, k, n, groups = shape
    columns = -(-n // _COLUMNS)
    if row_tiles is None:
        count, steps = groups * -(-k // _ROWS) * columns, m / groups / _INNER + 0.5
    else:
        count, steps = row_tiles * columns, -(-k // _INNER)
    return Case(name, 2.0 * m * k * n, (_tiles(code, count, steps),))


def _tiles(code: Code, count: float, steps: float) -> Tiles:
    rows, columns = (
        _INNER * n * _SIZE * share for n, share in zip((_ROWS, _COLUMNS), _SHARED[code.multicasts], strict=True)
    )
    return Tiles(code, count, steps, rows + columns, half_bytes=rows / 2 + columns)


def gated_mlp(name: str, code: Code, shape: tuple[int, int, int]) -> Case:
    """Both projections of (M rows, K features, H hidden units), of which a tile has half of its columns each."""
    m, k, h = shape
    rows, columns = (_INNER * n * _SIZE for n in (_ROWS, _COLUMNS))
    count = -(-m // _ROWS) * -(-h // (_COLUMNS // 2))
    # Two blocks load the same columns of both weights.
    loaded = rows + columns / (2 if code.multicasts else 1)
    return Case(name, 4.0 * m * k * h, (Tiles(code, count, -(-k // _INNER), loaded),))


def cross_entropy(name: str, code: Code, shape: tuple[int, int, int]) -> Case:
    """The statistics, or the values, of the logits of (N rows, D, V)."""
    n, d, v = shape
    tiles = -(-n // _ROWS) * -(-v // _COLUMNS)
    return Case(name, 2.0 * n * d * v, (_tiles(code, tiles, -(-d // _INNER)),))


def train_step(name: str, statistics: Code, values: Code, shape: tuple[int, int, int]) -> Case:
    """Statistics, the gradient of the logits, dx and dW, of which three products are credited."""
    n, d, v = shape
    parts = -(-v // _PART)
    own = tuple(
        cross_entropy("", code, (n, d, columns)).works[0]
        for code, columns, count in (
            (statistics, v, 1),
            (values, _PART, parts - 1),
            (values, v - _PART * (parts - 1), 1),
        )
        for _ in range(count)
    )
    product = 2.0 * n * d * v
    # dx is read and written in float32 for every part.
    return Case(name, 3 * product, own, copied=2.0 * parts * n * d * 4, products=2 * product)


def train_step_kept(name: str, logits: Code, shape: tuple[int, int, int], rows: int) -> Case:
    """Logits with their statistics, dx and dW, so many rows after the other."""
    n, d, v = shape
    parts = -(-n // rows)
    own = cross_entropy("", logits, (rows, d, v)).works * parts
    product = 2.0 * n * d * v
    # The gradient is written over the logits; dW is read and written in float32 for every part, and half of it is
    # rounded before the rest is read.
    moved = 2.0 * n * v * _SIZE + 2.0 * parts * d * v * 4 + 2.0 * d * v / 2 * _SIZE
    return Case(name, 3 * product, own, copied=moved, products=2 * product)
