"""Tuned block sizes of the cross-entropy implementations, and the times and bytes that justify using them.

The rows are data: ``autopallas/tuning/data/<device>/cross_entropy.csv``.

Every row was measured as its ``evidence`` says, by ``python -m benchmarks table cross_entropy``: medians of interleaved
runs in one process against the naive spelling (dot, logsumexp, take_along_axis).  Other work on the machine disturbs
times more than ratios, which are those of paired runs: compare within a row only.

Rows of the H100 that are "estimated" were written by ``python -m benchmarks gpu --op cross_entropy --estimate`` on a
machine without one: bytes by the compiler's account, times from the matrix products at 800 TFLOP/s and the memory at 3
TB/s, whichever takes longer.  A train step multiplies three times where it keeps logits, and four times where it
computes them again, which needs the least memory; the original multiplies three times.  Of passes over logits nothing
is counted.  They replace nothing; they start a measurement.

Rows of TPUs were simulated by ``autopallas tune cross_entropy --target tpu-v6e --table``; the original's time is a
bound where it could not be simulated, of its products at the nominal peak.
"""

from __future__ import annotations

import math

from autopallas.kernels.cross_entropy.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.operation import OPERATION
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec
from autopallas.sites.workload import Workload
from autopallas.tuning.coverage import Conditions
from autopallas.tuning.table import Bucket, Table, table_device

__all__ = ["BUCKETS", "TABLE", "conditions", "find", "infer_block_sizes", "table_device", "table_key"]

_ANY = 2**62
_ROWS_RANGES = {"N512": (1, 1024), "N2048": (1025, 4096), "N8192": (4097, _ANY)}
_VOCABULARY_RANGES = {"V8192": (2049, 16384), "V32000": (16385, 65536), "V128000": (65537, _ANY)}

BUCKETS: tuple[Bucket, ...] = (
    Bucket("small", {"V": (1, 2048)}),
    *(
        Bucket(f"{n} {v}", {"N": rows, "V": vocabulary})
        for v, vocabulary in _VOCABULARY_RANGES.items()
        for n, rows in _ROWS_RANGES.items()
    ),
)


def _filed(spec: CrossEntropySpec, implementation: str, direction: str) -> tuple[str, dict[str, int], str]:
    """The invariants are statistics that cost more than a logsumexp, and N x V inputs."""
    kinds = {statistic.kind for statistic in spec.statistics}
    invariants = ["argmax"] if "argmax" in kinds else []
    if direction == "forward+backward" and not spec.products:
        invariants.append("two passes")  # as in a checkpoint; measured is forward and backward in one
    if len(spec.heads) > 1:
        invariants.append(f"{len(spec.heads)} heads")
    # An input that fills the tile has to be read: what was measured without one says nothing of it.
    if any(all(side.varies) and side.head is None for side in spec.sides):
        invariants.append("N x V input")
    return direction, {"N": spec.rows, "V": spec.vocabulary}, ", ".join(invariants) or "plain"


def conditions(match: Workload) -> Conditions:
    """Returns the conditions on which the time of a site depends, beyond the key of its row.

    The cases go once over the logits, or twice where the key says so.  A contrastive loss over rows and columns goes
    over them once for each, and every pass multiplies anew, while the original multiplies once: rows of other losses
    tell nothing of that.
    """
    spec, several = match.spec, len(match.passes)
    assert isinstance(spec, CrossEntropySpec)
    slight = _slight(spec)
    if several == 1 or (match.direction == "forward+backward" and not spec.products):
        return Conditions(slight=slight)
    passes = f"of {several} passes over the logits"
    return Conditions(spelling=passes, holds_from=math.inf, form="several passes", beyond=passes, slight=slight)


_LEAST_VOCABULARY = 256
"""Smallest vocabulary for which rows of 16-bit numbers hold on a CPU.

The rows are of 1,024 words and more.  With AVX-512 for bfloat16 and JAX 0.12, losses of 10 to 100 classes had 0.57 to
0.93 of the original's speed (N 100 to 2,048, D 256 and 513), those of 128 classes 1.01 to 1.09, and of 256 to 700 1.00
to 1.37 (medians of 11 paired processor times).
"""


def _slight(spec: CrossEntropySpec) -> str:
    """Returns why a site computes too little for rows of a CPU to hold, or an empty string."""
    if _narrow(spec) and spec.vocabulary < _LEAST_VOCABULARY:
        return f"rows hold from {_LEAST_VOCABULARY} words on, and this site has {spec.vocabulary}"
    return ""


def _narrow(spec: CrossEntropySpec) -> bool:
    return any(head.row_dtype.itemsize <= 2 for head in spec.heads)


TABLE = Table(OPERATION, BUCKETS, _filed, BlockSizes)
table_key, find, infer_block_sizes = TABLE.key, TABLE.find, TABLE.infer_block_sizes
