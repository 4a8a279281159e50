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
        Bucket(f"T{steps} S{size}", {"T": range_of_steps, "S": range_of_sizes})
        for steps, range_of_steps in ((512, (257, 1024)), (2048, (1025, _ANY)))
        for size, range_of_sizes in ((1024, (513, 2048)), (4096, (2049, _ANY)))
    ),
    Bucket("other", {}),
)
"""By the steps T and the elements S = N P of a state."""


def _filed(spec: RecurrenceSpec, implementation: str, direction: str) -> tuple[str, dict[str, int], str]:
    return direction, {"T": spec.steps, "S": spec.rows * spec.columns}, spec.decay


def conditions(match: Workload) -> Conditions:
    """Returns the number of independent states.  A row holds for every number of them: all forms treat them alike."""
    spec = match.spec
    assert isinstance(spec, RecurrenceSpec)
    return Conditions(batch=spec.groups * spec.heads, holds_from=0.0)


TABLE = Table(OPERATION, BUCKETS, _filed, BlockSizes)
table_key, find, infer_block_sizes = TABLE.key, TABLE.find, TABLE.infer_block_sizes
