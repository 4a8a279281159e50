"""Tuned block sizes of the grouped matmul implementations, and the times and bytes that justify using them.

The rows are data: ``autopallas/tuning/data/<device>/grouped_matmul.csv``.

Every row was measured as its ``evidence`` says, by ``python -m benchmarks table grouped_matmul``: medians of
interleaved runs in one process against ``lax.ragged_dot``, rows "dense" against einsums over all experts, with two of
them chosen for each token.  Other work on the machine disturbs times more than ratios, which are those of paired runs:
compare within a row only.

Rows of the H100 that are "estimated" were written by ``python -m benchmarks gpu --op grouped_matmul --estimate`` on a
machine without one: bytes by the compiler's account, times from the arithmetic at 800 TFLOP/s and the memory at 3 TB/s,
whichever takes longer, of which the original does as many times more as there are groups.  They replace nothing; they
start a measurement.

Rows of TPUs were simulated by ``autopallas tune grouped_matmul --target tpu-v6e --table``, the groups of equal sizes.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from autopallas.kernels.grouped_matmul.block_sizes import BlockSizes
from autopallas.kernels.grouped_matmul.operation import OPERATION
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec, ProductSpec
from autopallas.numerics.casts import is_quantised
from autopallas.sites.device import Device
from autopallas.sites.workload import Workload
from autopallas.tuning.coverage import Conditions
from autopallas.tuning.table import Bucket, Row, Table, table_device

__all__ = [
    "BUCKETS", "STORED_WEIGHTS", "TABLE", "conditions", "find", "infer_block_sizes", "share_of_gain", "table_device",
    "table_key",
]  # fmt: skip

_ANY = 2**62
_SMALL = 2**15
"""Weights with fewer elements than this per group: loops cost as much as their matmuls."""

_GROUPS = {"G2": (2, 2), "G4": (3, 5), "G8": (6, 11), "G16": (12, 23), "G32": (24, 47), "G64": (48, _ANY)}
_ROWS_PER_GROUP = {"M/G4": (1, 7), "M/G16": (8, 31), "M/G64": (32, 127), "M/G256": (128, _ANY)}

BUCKETS: tuple[Bucket, ...] = (
    *(
        Bucket(f"{group} {rows}", {"G": groups, "M/G": range_})
        for group, groups in _GROUPS.items()
        for rows, range_ in _ROWS_PER_GROUP.items()
        if group != "G64" or rows in ("M/G4", "M/G16")
    ),
    # More rows gain more, and what they are measured against takes minutes.
    Bucket("G64 M/G64", {"G": _GROUPS["G64"], "M/G": (32, _ANY)}),
    Bucket("other", {}),
)


def _filed(spec: ProductSpec, implementation: str, direction: str) -> tuple[str, dict[str, int], str]:
    """Invariants say whether a group's weights are "small" or "large", and before that what kind the original is of,
    where it is no ``lax.ragged_dot``."""
    weights = "small" if spec.contracting * spec.columns < _SMALL else "large"
    if spec.use in ("dlhs", "drhs"):
        direction = "forward+backward"  # in which it was measured
    sizes = {"G": spec.original_times_rows, "M/G": spec.rows_per_group}
    return direction, sizes, f"{spec.original_form} {weights}".lstrip()


_LEAST_MICROSECONDS = 20.0
"""Time that the launches of a GPU's kernels take at most, whatever they compute."""
_OPERATIONS, _BYTES = 6e8, 3e6
"""What an H100 multiplies and adds, and what it reads, in a microsecond."""


def share_of_gain(match: Workload, row: Row[object], device: Device) -> float:
    """Returns the least share of a row's gain that a site has on a GPU: a small product takes no less time than the
    launches do."""
    if device.platform != "gpu":
        return 1.0
    spec = cast(ProductSpec, match.spec)
    operations = 2.0 * spec.rows * spec.contracting * spec.columns
    weights = spec.groups * spec.contracting * spec.columns * spec.widest_dtype.itemsize
    return min(1.0, max(operations / _OPERATIONS, weights / _BYTES) / _LEAST_MICROSECONDS)


STORED_WEIGHTS = "stored weights"


def conditions(match: Workload) -> Conditions:
    """Returns that weights which the program stores in 8 bits may have rows of their own; those of weights that are
    stored as they are multiplied hold for them too, since the original's cast comes on top.

    Where rows have 8 bits too, the original may be faster than any that was measured.
    """
    if not isinstance(match.spec, GroupedMatmulSpec):  # a mixture of experts
        return Conditions()
    rows = match.original.in_avals[:1] if match.original is not None else ()  # a direct call has no original
    if any(is_quantised(np.dtype(aval.dtype)) for aval in rows):
        return Conditions(beyond="that multiply rows of 8 bits", unlike="rows of 8 bits")
    if match.spec.widening is None:
        return Conditions()
    return Conditions(form=STORED_WEIGHTS, form_on_gpus=True)


TABLE = Table(OPERATION, BUCKETS, _filed, BlockSizes)
table_key, find, infer_block_sizes = TABLE.key, TABLE.find, TABLE.infer_block_sizes
