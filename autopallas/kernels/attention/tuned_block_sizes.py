"""Tuned block sizes of the attention implementations, and the times and bytes that justify using them.

Every row was measured as its ``evidence`` says.  Times are medians of interleaved runs in one process against the naive
spelling (einsum, where, softmax, einsum; its gradient by jax.grad).
"""

from __future__ import annotations

from types import MappingProxyType

from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.implementation import Device
from autopallas.tuning.table import Bucket, Found, Key, Row, Table, bucket_of, lookup

__all__ = ["BUCKETS", "TABLE", "find", "infer_block_sizes", "table_device", "table_key"]

_ANY = 2**62


def _square(name: str, low: int, high: int) -> Bucket:
    return Bucket(name, {"T": (low, high), "S": (low, high)})


BUCKETS: tuple[Bucket, ...] = (
    Bucket("decode", {"T": (1, 16)}),
    _square("T256", 1, 384),
    _square("T512", 257, 768),
    _square("T1024", 513, 1536),
    _square("T2048", 1025, 3072),
    _square("T4096", 2049, 6144),
    _square("T8192", 4097, 12288),
    _square("T16384", 8193, _ANY),
    Bucket("other", {}),
)

_ROWS: dict[Key, Row] = {}

TABLE: Table = MappingProxyType({"cpu": MappingProxyType(_ROWS)})


def table_device(device: Device) -> str:
    """The table's name of a device: all CPUs share one."""
    return "cpu" if device.platform == "cpu" else device.kind


def table_key(spec: AttentionSpec, implementation: str, direction: str) -> Key:
    """Where the table files a spec; the invariant is its mask class."""
    bucket = bucket_of({"T": spec.query_length, "S": spec.key_length}, BUCKETS)
    assert bucket is not None, "the last bucket takes everything"
    return implementation, direction, spec.widest_dtype.name, bucket.name, spec.mask_class


def find(spec: AttentionSpec, device: Device, implementation: str = "xla", direction: str = "forward") -> Found | None:
    """The table's row for a spec: its own bucket's, else the nearest one's, else None."""
    return lookup(TABLE, table_device(device), table_key(spec, implementation, direction), BUCKETS)


def infer_block_sizes(
    spec: AttentionSpec, device: Device, implementation: str = "xla", direction: str = "forward"
) -> BlockSizes:
    """Block sizes from the table, or the default; valid for the shape in any case."""
    found = find(spec, device, implementation, direction)
    sizes = found.row.block_sizes if found is not None else BlockSizes.get_default()
    assert isinstance(sizes, BlockSizes)
    return sizes.fitted(spec)
