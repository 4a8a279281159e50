"""Tuned forms of recurrences.  There are no rows yet: a site is measured where it runs."""

from __future__ import annotations

from autopallas.kernels.recurrence.block_sizes import BlockSizes
from autopallas.kernels.recurrence.operation import OPERATION
from autopallas.kernels.recurrence.spec import RecurrenceSpec
from autopallas.sites.workload import Workload
from autopallas.tuning.coverage import Conditions
from autopallas.tuning.table import Bucket, Table, table_device

__all__ = ["BUCKETS", "TABLE", "conditions", "find", "infer_block_sizes", "table_device", "table_key"]

_ANY = 2**62

BUCKETS: tuple[Bucket, ...] = (
    *(
        Bucket(f"T{steps} S{size}", {"T": (steps // 2 + 1, steps), "S": (size // 2 + 1, size)})
        for steps in (256, 1024, 4096)
        for size in (1024, 4096, 16384)
    ),
    Bucket("other", {}),
)


def _filed(spec: RecurrenceSpec, implementation: str, direction: str) -> tuple[str, dict[str, int], str]:
    return direction, {"T": spec.steps, "S": spec.rows * spec.columns}, f"{spec.decay} {spec.products} products"


def conditions(match: Workload) -> Conditions:
    """Returns the number of independent states: a row holds for its own batch size."""
    spec = match.spec
    assert isinstance(spec, RecurrenceSpec)
    return Conditions(batch=spec.groups * spec.heads, holds_from=0.0)


TABLE = Table(OPERATION, BUCKETS, _filed, BlockSizes)
table_key, find, infer_block_sizes = TABLE.key, TABLE.find, TABLE.infer_block_sizes
