"""Tuned forms of recurrences.

Rows of the H100 are of cases of ``benchmarks/gpu_recurrence.py``; their ``batch`` is the number of states.
"""

from __future__ import annotations

from autopallas.kernels.recurrence.block_sizes import BlockSizes
from autopallas.kernels.recurrence.operation import OPERATION
from autopallas.kernels.recurrence.spec import RecurrenceSpec
from autopallas.sites.device import Device
from autopallas.sites.workload import Workload
from autopallas.tuning.coverage import Conditions
from autopallas.tuning.evidence import SIMULATED_MARGIN
from autopallas.tuning.table import Bucket, Row, Table, table_device

__all__ = ["BUCKETS", "TABLE", "conditions", "find", "infer_block_sizes", "share_of_gain", "table_device", "table_key"]

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
    kind = f"{spec.decay}, delta" if spec.delta else spec.decay
    return direction, {"T": spec.steps, "S": spec.rows * spec.columns}, kind


_HOLDS_FROM = 2.5
"""Gain from which a row holds for another number of states.  Of a gain measured at 8 states, 0.45 was left at one."""
_STATES_ON_TPU = 8
"""States of the cases whose rows are TPUs'."""
_SHARE_OF_MORE = {"scalar": 0.7, "channel": 0.5}
"""Share of such a row's gain, by decays, that more states are taken to have: simulated on v5e with 16 and 32 states,
delta rules had 0.76 and 0.77 of the gain with eight, and one decay for each head 0.91 and 0.92; with 16 states decays
of rows 0.59, and 0.71 on v6e."""


def conditions(match: Workload) -> Conditions:
    """Returns the number of independent states, and as the spelling what a loop has beside one state that it reads
    once: each readout has products of its own, and other loops stay loops, so that no row holds for these."""
    spec = match.spec
    assert isinstance(spec, RecurrenceSpec)
    batch = spec.groups * spec.heads
    if spec.is_single:
        return Conditions(batch, holds_from=_HOLDS_FROM)
    parts = f"of {spec.states} states, {spec.readouts} readouts, {spec.loops} other loops, {spec.products} apart"
    if spec.substeps > 1:
        parts += f", {spec.substeps} products a step"
    return Conditions(batch, parts, float("inf"), beyond=parts)


def share_of_gain(match: Workload, row: Row[object], device: Device) -> float:
    """Returns the least share of a row's gain that a site has with another number of states.

    On a GPU a loop's time hardly depends on that number, and the kernels' is at most proportional to it.  On a TPU both
    are about proportional to it from 16 states on; rows are of eight, with which the loop takes a little longer each.
    A kernel computes whole chunks there: the steps of the last one count where they would decide.
    """
    spec = match.spec
    assert isinstance(spec, RecurrenceSpec)
    states = spec.groups * spec.heads
    if device.platform == "tpu":
        share = 1.0 if states <= _STATES_ON_TPU else _SHARE_OF_MORE.get(spec.decay, min(_SHARE_OF_MORE.values()))
        chunk = row.block_sizes.chunk if isinstance(row.block_sizes, BlockSizes) else 1
        filled = spec.steps / (-(-spec.steps // chunk) * chunk)
        return share if row.assured_gain * filled >= SIMULATED_MARGIN else share * filled
    return min(1.0, row.batch / states)


TABLE = Table(OPERATION, BUCKETS, _filed, BlockSizes)
table_key, find, infer_block_sizes = TABLE.key, TABLE.find, TABLE.infer_block_sizes
