"""Tuned block sizes of the cross-entropy implementations, and the times and bytes that justify using them.

Every row was measured as its ``evidence`` says, by ``python -m benchmarks table cross_entropy``: medians of interleaved
runs in one process against the naive spelling (dot, logsumexp, take_along_axis).  Other work on the machine disturbs
times more than ratios, which are those of paired runs: compare within a row only.
"""

from __future__ import annotations

from types import MappingProxyType

from autopallas.kernels.cross_entropy.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec
from autopallas.kernels.implementation import Device
from autopallas.tuning.table import Bucket, Found, Key, Row, Table, bucket_of, lookup

__all__ = ["BUCKETS", "TABLE", "find", "infer_block_sizes", "table_device", "table_key"]

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

_ROWS: dict[Key, Row] = {
    ("xla", "forward", "bfloat16", "N2048 V32000", "plain"): Row(
        BlockSizes(512, 1048576),
        1644000.0,
        1972000.0,
        163883128,
        393232384,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1, avx2",
    ),
    ("xla", "forward", "float32", "N2048 V32000", "plain"): Row(
        BlockSizes(512, 1048576),
        624000.0,
        720600.0,
        66627704,
        262160384,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1, avx2",
    ),
    ("xla", "forward+backward", "bfloat16", "N2048 V32000", "plain"): Row(
        BlockSizes(512, 1048576),
        4484000.0,
        5912000.0,
        265322728,
        524321024,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1, avx2",
    ),
    ("xla", "forward+backward", "float32", "N512 V8192", "plain"): Row(
        BlockSizes(512, 1048576), 82630.0, 86270.0, 17829888, 33562624, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward+backward", "float32", "N2048 V32000", "plain"): Row(
        BlockSizes(256, 1048576),
        5463000.0,
        5843000.0,
        103579872,
        524312832,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1, avx2",
    ),
    ("xla", "forward+backward", "float32", "N2048 V128000", "plain"): Row(
        BlockSizes(2048, 2048),
        48680000.0,
        35900000.0,
        35694920,
        2097176832,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1, avx2",
    ),
}

TABLE: Table = MappingProxyType({"cpu": MappingProxyType(_ROWS)})


def table_device(device: Device) -> str:
    """The table's name of a device: all CPUs share one."""
    return "cpu" if device.platform == "cpu" else device.kind


def table_key(spec: CrossEntropySpec, implementation: str, direction: str) -> Key:
    """Where the table files a spec; the invariants are statistics that cost more than a logsumexp, and N x V inputs."""
    bucket = bucket_of({"N": spec.rows, "V": spec.vocabulary}, BUCKETS)
    assert bucket is not None, "the buckets take everything"
    kinds = {statistic.kind for statistic in spec.statistics}
    invariants = ["argmax"] if "argmax" in kinds else []
    if direction == "forward+backward" and not spec.products:
        invariants.append("two passes")  # as in a checkpoint; measured is forward and backward in one
    # An input that fills the tile has to be read: what was measured without one says nothing of it.
    if any(all(side.varies) for side in spec.sides):
        invariants.append("N x V input")
    return implementation, direction, spec.widest_dtype.name, bucket.name, ", ".join(invariants) or "plain"


def find(
    spec: CrossEntropySpec, device: Device, implementation: str = "xla", direction: str = "forward"
) -> Found | None:
    """The table's row for a spec: its own bucket's, else the nearest one's, else None."""
    return lookup(TABLE, table_device(device), table_key(spec, implementation, direction), BUCKETS)


def infer_block_sizes(
    spec: CrossEntropySpec, device: Device, implementation: str = "xla", direction: str = "forward"
) -> BlockSizes:
    """Block sizes from the table, or the default; valid for the shape in any case."""
    found = find(spec, device, implementation, direction)
    sizes = found.row.block_sizes if found is not None else BlockSizes.get_default()
    assert isinstance(sizes, BlockSizes)
    return sizes.fitted(spec)
