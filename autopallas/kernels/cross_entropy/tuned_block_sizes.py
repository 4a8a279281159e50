"""Tuned block sizes of the cross-entropy implementations, and the times and bytes that justify using them.

Every row was measured as its ``evidence`` says, by ``python -m benchmarks table cross_entropy``: medians of interleaved
runs in one process against the naive spelling (dot, logsumexp, take_along_axis).  Other work on the machine disturbs
times more than ratios, which are those of paired runs: compare within a row only.

Rows of the H100 that are "estimated" were written by ``python -m benchmarks gpu --op cross_entropy --estimate`` on a
machine without one: bytes by the compiler's account, times from the matrix products at 800 TFLOP/s and the memory at 3
TB/s, whichever takes longer.  A train step multiplies four times, the original three times: of its passes over the
logits nothing is counted.  They replace nothing; they start a measurement.

Rows of TPUs were simulated by ``autopallas tune cross_entropy --target tpu-v6e --table``; the original's time is a
bound where it could not be simulated, of its products at the nominal peak.
"""

from __future__ import annotations

from types import MappingProxyType

from autopallas.kernels.cross_entropy.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.operation import OPERATION
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec
from autopallas.sites.device import Device
from autopallas.tuning.table import Bucket, Found, Key, Row, Table, bucket_of, lookup, table_device

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
    ("xla", "forward", "bfloat16", "N2048 V8192", "plain"): Row(
        BlockSizes(2048, 2048),
        117600.0,
        166100.0,
        29403264,
        100679680,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward", "bfloat16", "N512 V32000", "plain"): Row(
        BlockSizes(512, 2048), 163500.0, 183600.0, 13378176, 98308096, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "N2048 V32000", "argmax"): Row(
        BlockSizes(2048, 2048),
        1071000.0,
        1243000.0,
        45172936,
        393240592,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward", "bfloat16", "N2048 V32000", "plain"): Row(
        BlockSizes(2048, 2048),
        441600.0,
        575400.0,
        45131904,
        393232384,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward", "float32", "small", "plain"): Row(
        BlockSizes(2048, 1024), 13010.0, 12890.0, 8413184, 8404992, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "N512 V8192", "plain"): Row(
        BlockSizes(512, 2048), 30710.0, 29680.0, 8397440, 16781312, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "N2048 V8192", "plain"): Row(
        BlockSizes(2048, 2048), 109600.0, 110600.0, 21006464, 67125248, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "N8192 V8192", "plain"): Row(
        BlockSizes(2048, 2048),
        221600.0,
        243400.0,
        21152000,
        268500992,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward", "float32", "N512 V32000", "plain"): Row(
        BlockSizes(512, 2048), 104600.0, 99110.0, 11020928, 65540096, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "N2048 V32000", "argmax"): Row(
        BlockSizes(2048, 2048),
        502400.0,
        427700.0,
        31516872,
        262168592,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward", "float32", "N2048 V32000", "plain"): Row(
        BlockSizes(2048, 2048),
        452000.0,
        441700.0,
        31500416,
        262160384,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward", "float32", "N8192 V32000", "plain"): Row(
        BlockSizes(2048, 2048),
        887000.0,
        978400.0,
        22462848,
        1048641536,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward", "float32", "N512 V128000", "plain"): Row(
        BlockSizes(512, 2048), 475100.0, 481400.0, 10496640, 262148096, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "N2048 V128000", "plain"): Row(
        BlockSizes(2048, 2048),
        4593000.0,
        4907000.0,
        29403264,
        1048592384,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "bfloat16", "N2048 V8192", "plain"): Row(
        BlockSizes(512, 1048576),
        354400.0,
        434900.0,
        70287592,
        134250752,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "bfloat16", "N512 V32000", "plain"): Row(
        BlockSizes(512, 1048576),
        365400.0,
        463800.0,
        132124672,
        132128768,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "bfloat16", "N2048 V32000", "argmax"): Row(
        BlockSizes(512, 1048576),
        2171000.0,
        2440000.0,
        265335024,
        655360016,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "bfloat16", "N2048 V32000", "plain"): Row(
        BlockSizes(512, 1048576),
        1310000.0,
        1610000.0,
        265322728,
        524321024,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "float32", "small", "plain"): Row(
        BlockSizes(512, 1048576), 46420.0, 44840.0, 10518752, 16802048, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "N512 V8192", "plain"): Row(
        BlockSizes(512, 1048576), 86820.0, 86420.0, 17829888, 33562624, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "N2048 V8192", "plain"): Row(
        BlockSizes(512, 1048576),
        357900.0,
        342700.0,
        39878880,
        134242560,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "float32", "N8192 V8192", "plain"): Row(
        BlockSizes(512, 1048576),
        696800.0,
        749600.0,
        34734304,
        536969216,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "float32", "N512 V32000", "plain"): Row(
        BlockSizes(512, 1048576),
        319700.0,
        312400.0,
        66588672,
        131080192,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "float32", "N2048 V32000", "argmax"): Row(
        BlockSizes(512, 1048576),
        1266000.0,
        1343000.0,
        137404648,
        524312848,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "float32", "N2048 V32000", "plain"): Row(
        BlockSizes(512, 1048576),
        1551000.0,
        1783000.0,
        137396448,
        524312832,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "float32", "N8192 V32000", "plain"): Row(
        BlockSizes(512, 1048576),
        2705000.0,
        3162000.0,
        107872480,
        2097250304,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "float32", "N512 V128000", "plain"): Row(
        BlockSizes(512, 4096),
        1723000.0,
        1262000.0,
        23070984,
        524296192,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "float32", "N2048 V128000", "plain"): Row(
        BlockSizes(128, 1048576),
        33010000.0,
        28510000.0,
        75792736,
        2097176832,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
}

_ROWS_NVIDIA_H100: dict[Key, Row] = {
    ("pallas_gpu", "forward", "bfloat16", "N2048 V32000", "plain"): Row(
        BlockSizes(4096, 8192), 1055.0, 1055.0, 9699352, 414220288, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward", "bfloat16", "N8192 V32000", "plain"): Row(
        BlockSizes(8192, 8192), 2684.0, 2684.0, 12320792, 528547840, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward", "bfloat16", "N8192 V128000", "plain"): Row(
        BlockSizes(32768, 8192), 26900.0, 26900.0, 197132312, 8471314432, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "N2048 V32000", "plain"): Row(
        BlockSizes(4096, 8192), 4220.0, 3165.0, 134235208, 1236271120, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "N8192 V32000", "plain"): Row(
        BlockSizes(8192, 8192), 10740.0, 8053.0, 390103880, 1572864016, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "N8192 V128000", "plain"): Row(
        BlockSizes(32768, 8192), 107600.0, 80690.0, 1023542344, 25216155664, "estimated", "2026-11-21", "jax 0.11.2"
    ),
}

_ROWS_TPU_V5E: dict[Key, Row] = {
    ("pallas_tpu", "forward", "bfloat16", "N8192 V128000", "plain"): Row(
        BlockSizes(512, 1024),
        50770.0,
        44680.0,
        1209856,
        6442644992,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward+backward", "bfloat16", "N8192 V128000", "plain"): Row(
        BlockSizes(512, 1024),
        257400.0,
        134100.0,
        1082775552,
        6442709504,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
}

_ROWS_TPU_V6E: dict[Key, Row] = {
    ("pallas_tpu", "forward", "bfloat16", "N8192 V128000", "plain"): Row(
        BlockSizes(2048, 2048),
        12700.0,
        9588.0,
        1212256,
        6442827488,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
}

TABLE: Table = MappingProxyType(
    {
        "cpu": MappingProxyType(_ROWS),
        "NVIDIA H100": MappingProxyType(_ROWS_NVIDIA_H100),
        "TPU v5e": MappingProxyType(_ROWS_TPU_V5E),
        "TPU v6e": MappingProxyType(_ROWS_TPU_V6E),
    }
)


def table_key(spec: CrossEntropySpec, implementation: str, direction: str) -> Key:
    """Where the table files a spec; the invariants are statistics that cost more than a logsumexp, and N x V inputs."""
    bucket = bucket_of({"N": spec.rows, "V": spec.vocabulary}, BUCKETS)
    assert bucket is not None, "the buckets take everything"
    kinds = {statistic.kind for statistic in spec.statistics}
    invariants = ["argmax"] if "argmax" in kinds else []
    if direction == "forward+backward" and not spec.products:
        invariants.append("two passes")  # as in a checkpoint; measured is forward and backward in one
    if len(spec.heads) > 1:
        invariants.append(f"{len(spec.heads)} heads")
    # An input that fills the tile has to be read: what was measured without one says nothing of it.
    if any(all(side.varies) and side.head is None for side in spec.sides):
        invariants.append("N x V input")
    return implementation, direction, spec.widest_dtype.name, bucket.name, ", ".join(invariants) or "plain"


def find(
    spec: CrossEntropySpec,
    device: Device,
    implementation: str | None = None,
    direction: str = "forward",
    objective: str = "time",
) -> Found | None:
    """The table's row for a spec: its own bucket's, else the nearest one's, else None."""
    name = implementation or OPERATION.usual(device)
    return lookup(TABLE, table_device(device), table_key(spec, name, direction), BUCKETS, objective)


def infer_block_sizes(
    spec: CrossEntropySpec,
    device: Device,
    implementation: str | None = None,
    direction: str = "forward",
    objective: str = "time",
) -> BlockSizes:
    """Block sizes from the table, or the default; valid for the shape in any case."""
    found = find(spec, device, implementation, direction, objective)
    if found is None and (implementation or OPERATION.usual(device)) == "pallas_gpu":
        from autopallas.kernels.cross_entropy import pallas_gpu

        return pallas_gpu.candidates(spec, device)[0]
    sizes = found.row.block_sizes if found is not None else BlockSizes.get_default()
    assert isinstance(sizes, BlockSizes)
    return sizes.fitted(spec)
