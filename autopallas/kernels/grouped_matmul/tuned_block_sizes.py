"""Tuned block sizes of the grouped matmul implementations, and the times and bytes that justify using them.

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

from types import MappingProxyType

from autopallas.kernels.grouped_matmul.block_sizes import BlockSizes
from autopallas.kernels.grouped_matmul.operation import OPERATION
from autopallas.kernels.grouped_matmul.spec import AnySpec, ExpertsSpec
from autopallas.sites.device import Device
from autopallas.tuning.table import Bucket, Found, Key, Row, Table, bucket_of, lookup, table_device

__all__ = ["BUCKETS", "TABLE", "find", "infer_block_sizes", "table_device", "table_key"]

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

_ROWS: dict[Key, Row] = {
    ("xla", "forward", "bfloat16", "G2 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 408.5, 597.3, 303800, 557056, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G2 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 123.6, 113.7, 15032, 24576, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G2 M/G64", "large"): Row(
        BlockSizes(32, 0, 0), 1041.0, 1287.0, 344760, 655360, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G2 M/G64", "small"): Row(
        BlockSizes(32, 0, 0), 130.7, 152.6, 21176, 49152, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G2 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 3640.0, 5063.0, 590520, 1048576, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G2 M/G256", "small"): Row(
        BlockSizes(128, 0, 0), 209.1, 316.2, 58040, 147456, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G4 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 1470.0, 2027.0, 303800, 1179648, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G4 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 170.0, 279.2, 15032, 65536, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G4 M/G64", "large"): Row(
        BlockSizes(32, 0, 0), 1973.0, 3936.0, 344760, 1572864, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G4 M/G64", "small"): Row(
        BlockSizes(32, 0, 0), 166.8, 307.6, 21176, 163840, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G4 M/G256", "dense large"): Row(
        BlockSizes(256, 0, 0), 196100.0, 1426000.0, 5257720, 21004288, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G4 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 10000.0, 23290.0, 590520, 3145728, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G4 M/G256", "small"): Row(
        BlockSizes(256, 0, 0), 524.0, 1248.0, 107192, 557056, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G8 M/G16", "dense large"): Row(
        BlockSizes(16, 0, 0), 44050.0, 510100.0, 797368, 6292480, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G8 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 2044.0, 6103.0, 303800, 2621440, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G8 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 213.1, 820.5, 15032, 196608, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G8 M/G64", "large"): Row(
        BlockSizes(32, 0, 0), 4168.0, 17070.0, 344760, 4194304, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G8 M/G64", "small"): Row(
        BlockSizes(64, 0, 0), 245.2, 947.2, 33464, 589824, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G8 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 25350.0, 112700.0, 590520, 10485760, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G8 M/G256", "small"): Row(
        BlockSizes(128, 0, 0), 620.9, 3294.0, 58040, 2162688, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G16 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 4591.0, 30960.0, 303800, 6291456, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G16 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 365.2, 1896.0, 15032, 655360, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G16 M/G64", "large"): Row(
        BlockSizes(32, 0, 0), 13420.0, 110400.0, 344760, 12582912, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G16 M/G64", "small"): Row(
        BlockSizes(32, 0, 0), 469.7, 3724.0, 21176, 2228224, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G16 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 37560.0, 408100.0, 590520, 37748736, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G16 M/G256", "small"): Row(
        BlockSizes(128, 0, 0), 1206.0, 12820.0, 58040, 8519680, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G32 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 10270.0, 122900.0, 303928, 16777228, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G32 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 341.4, 3494.0, 15160, 2359308, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G32 M/G64", "large"): Row(
        BlockSizes(64, 0, 0), 25320.0, 413200.0, 426808, 41943052, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G32 M/G64", "small"): Row(
        BlockSizes(32, 0, 0), 883.9, 15200.0, 21304, 8650764, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G32 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 54300.0, 1142000.0, 590648, 142606348, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G32 M/G256", "small"): Row(
        BlockSizes(128, 0, 0), 2857.0, 63680.0, 58168, 33816588, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G64 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 13080.0, 301800.0, 304184, 50331668, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G64 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 671.4, 12420.0, 15416, 8912916, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G64 M/G64", "large"): Row(
        BlockSizes(64, 0, 0), 73710.0, 2530000.0, 427064, 150994964, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "G64 M/G64", "small"): Row(
        BlockSizes(32, 0, 0), 1472.0, 52590.0, 21560, 34078740, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G2 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 522.9, 725.6, 574136, 1114112, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G2 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 162.4, 251.4, 25272, 49152, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G2 M/G64", "large"): Row(
        BlockSizes(64, 0, 0), 1125.0, 1239.0, 721592, 1310720, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G2 M/G64", "small"): Row(
        BlockSizes(64, 0, 0), 132.0, 138.4, 49848, 98304, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G2 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 3032.0, 4043.0, 918200, 2097152, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G2 M/G256", "small"): Row(
        BlockSizes(128, 0, 0), 197.1, 228.1, 82616, 294912, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G4 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 1324.0, 1943.0, 574136, 2359296, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G4 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 156.6, 173.0, 25272, 131072, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G4 M/G64", "large"): Row(
        BlockSizes(32, 0, 0), 2025.0, 4706.0, 623288, 3145728, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G4 M/G64", "small"): Row(
        BlockSizes(64, 0, 0), 225.4, 344.8, 49848, 327680, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G4 M/G256", "dense large"): Row(
        BlockSizes(256, 0, 0), 357500.0, 937700.0, 10504696, 33587200, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G4 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 8195.0, 20980.0, 918200, 6291456, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G4 M/G256", "small"): Row(
        BlockSizes(128, 0, 0), 322.7, 737.3, 82616, 1114112, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G8 M/G16", "dense large"): Row(
        BlockSizes(16, 0, 0), 75270.0, 346400.0, 1592504, 12582912, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G8 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 1984.0, 5891.0, 574136, 5242880, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G8 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 173.7, 367.0, 25272, 393216, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G8 M/G64", "large"): Row(
        BlockSizes(64, 0, 0), 11980.0, 49660.0, 721592, 8388608, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G8 M/G64", "small"): Row(
        BlockSizes(64, 0, 0), 395.4, 1258.0, 49848, 1179648, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G8 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 14440.0, 81900.0, 918200, 20971520, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G8 M/G256", "small"): Row(
        BlockSizes(256, 0, 0), 618.5, 2755.0, 148152, 4325376, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G16 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 3138.0, 18150.0, 574136, 12582912, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G16 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 528.3, 1662.0, 25272, 1310720, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G16 M/G64", "large"): Row(
        BlockSizes(64, 0, 0), 17590.0, 151600.0, 721592, 25165824, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G16 M/G64", "small"): Row(
        BlockSizes(32, 0, 0), 627.1, 4832.0, 33464, 4456448, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G16 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 30540.0, 383800.0, 918200, 75497472, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G16 M/G256", "small"): Row(
        BlockSizes(128, 0, 0), 1058.0, 11450.0, 82616, 17039360, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G32 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 13130.0, 130100.0, 574264, 33554444, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G32 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 459.3, 3542.0, 25400, 4718604, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G32 M/G64", "large"): Row(
        BlockSizes(64, 0, 0), 20900.0, 408300.0, 721720, 83886092, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G32 M/G64", "small"): Row(
        BlockSizes(32, 0, 0), 707.4, 11730.0, 33592, 17301516, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G32 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 74720.0, 1935000.0, 918328, 285212684, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G32 M/G256", "small"): Row(
        BlockSizes(128, 0, 0), 1931.0, 44040.0, 82744, 67633164, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G64 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 15360.0, 271900.0, 574520, 100663316, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G64 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 891.3, 16830.0, 25656, 17825812, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G64 M/G64", "large"): Row(
        BlockSizes(64, 0, 0), 43250.0, 1594000.0, 721976, 301989908, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "G64 M/G64", "small"): Row(
        BlockSizes(32, 0, 0), 1423.0, 52000.0, 33848, 68157460, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G2 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 1547.0, 2177.0, 1098616, 1835008, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G2 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 163.5, 141.2, 41848, 90112, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G2 M/G64", "large"): Row(
        BlockSizes(64, 0, 0), 3186.0, 3560.0, 1246072, 2621440, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G2 M/G64", "small"): Row(
        BlockSizes(32, 0, 0), 211.1, 330.0, 50040, 212992, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G2 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 12890.0, 18770.0, 1442680, 5767168, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G2 M/G256", "small"): Row(
        BlockSizes(128, 0, 0), 472.9, 806.8, 99192, 802816, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G4 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 2918.0, 5190.0, 1098616, 4194304, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G4 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 275.8, 514.6, 41848, 262144, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G4 M/G64", "large"): Row(
        BlockSizes(32, 0, 0), 6554.0, 14750.0, 1147768, 7340032, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G4 M/G64", "small"): Row(
        BlockSizes(32, 0, 0), 471.8, 1047.0, 50040, 819200, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G4 M/G256", "dense large"): Row(
        BlockSizes(256, 0, 0), 567900.0, 3410000.0, 14724280, 68157440, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G4 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 28170.0, 71920.0, 1442680, 19922944, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G4 M/G256", "small"): Row(
        BlockSizes(128, 0, 0), 1370.0, 3773.0, 131704, 3178496, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G8 M/G16", "dense large"): Row(
        BlockSizes(16, 0, 0), 59170.0, 386400.0, 2384568, 21102592, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G8 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 6338.0, 13760.0, 1098616, 10485760, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G8 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 376.7, 1033.0, 41848, 851968, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G8 M/G64", "large"): Row(
        BlockSizes(64, 0, 0), 17960.0, 55450.0, 1246072, 23068672, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G8 M/G64", "small"): Row(
        BlockSizes(64, 0, 0), 701.1, 2871.0, 66424, 3211264, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G8 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 44970.0, 231800.0, 1442680, 77594624, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G8 M/G256", "small"): Row(
        BlockSizes(128, 0, 0), 1647.0, 10510.0, 262776, 12648448, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G16 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 12860.0, 62170.0, 1098616, 29360128, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G16 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 512.2, 2657.0, 41848, 3276800, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G16 M/G64", "large"): Row(
        BlockSizes(64, 0, 0), 30820.0, 222100.0, 1246072, 79691776, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G16 M/G64", "small"): Row(
        BlockSizes(32, 0, 0), 1150.0, 10680.0, 131704, 12713984, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G16 M/G256", "large"): Row(
        BlockSizes(256, 0, 0), 168300.0, 1572000.0, 1835896, 306184192, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G16 M/G256", "small"): Row(
        BlockSizes(128, 0, 0), 3196.0, 39880.0, 524920, 50462720, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G32 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 31700.0, 273700.0, 1098744, 92274688, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G32 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 1124.0, 10730.0, 66232, 12845056, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G32 M/G64", "large"): Row(
        BlockSizes(64, 0, 0), 81580.0, 1237000.0, 1246200, 310378496, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G32 M/G64", "small"): Row(
        BlockSizes(64, 0, 0), 2063.0, 39570.0, 262840, 50593792, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G32 M/G256", "large"): Row(
        BlockSizes(128, 0, 0),
        218200.0,
        4625000.0,
        1442808,
        1216348160,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "bfloat16", "G32 M/G256", "small"): Row(
        BlockSizes(128, 0, 0), 5694.0, 151900.0, 1049272, 201588736, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G64 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 59140.0, 1069000.0, 1099000, 318767104, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G64 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 2166.0, 47610.0, 131896, 50855936, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G64 M/G64", "large"): Row(
        BlockSizes(64, 0, 0), 259900.0, 7045000.0, 1246456, 1224736768, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "G64 M/G64", "small"): Row(
        BlockSizes(32, 0, 0), 4492.0, 165400.0, 525112, 201850880, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G2 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 1154.0, 1407.0, 1098616, 1376256, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G2 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 159.7, 121.1, 41848, 98304, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G2 M/G64", "large"): Row(
        BlockSizes(64, 0, 0), 3029.0, 3428.0, 1246072, 2359296, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G2 M/G64", "small"): Row(
        BlockSizes(32, 0, 0), 184.1, 203.6, 50040, 294912, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G2 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 8639.0, 12470.0, 1442680, 6291456, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G2 M/G256", "small"): Row(
        BlockSizes(128, 0, 0), 397.9, 547.6, 131704, 1081344, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G4 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 2409.0, 4429.0, 1098616, 3670016, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G4 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 246.5, 291.9, 41848, 327680, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G4 M/G64", "large"): Row(
        BlockSizes(32, 0, 0), 5233.0, 12480.0, 1147768, 8388608, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G4 M/G64", "small"): Row(
        BlockSizes(64, 0, 0), 331.9, 571.2, 66424, 1114112, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G4 M/G256", "dense large"): Row(
        BlockSizes(256, 0, 0),
        501100.0,
        2024000.0,
        27323576,
        100696064,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "float32", "G4 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 16890.0, 44150.0, 1442680, 27262976, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G4 M/G256", "small"): Row(
        BlockSizes(128, 0, 0), 750.2, 2282.0, 262776, 4259840, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G8 M/G16", "dense large"): Row(
        BlockSizes(16, 0, 0), 118800.0, 404700.0, 3437240, 23076864, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G8 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 5531.0, 19430.0, 1098616, 10485760, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G8 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 292.7, 783.0, 41848, 1179648, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G8 M/G64", "large"): Row(
        BlockSizes(64, 0, 0), 11990.0, 50780.0, 1246072, 29360128, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G8 M/G64", "small"): Row(
        BlockSizes(64, 0, 0), 557.6, 2317.0, 131704, 4325376, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G8 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 36180.0, 208500.0, 1442680, 104857600, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G8 M/G256", "small"): Row(
        BlockSizes(128, 0, 0), 1557.0, 8986.0, 524920, 16908288, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G16 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 10740.0, 57150.0, 1098616, 33554432, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G16 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 460.7, 2286.0, 66168, 4456448, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G16 M/G64", "large"): Row(
        BlockSizes(64, 0, 0), 31360.0, 199800.0, 1246072, 109051904, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G16 M/G64", "small"): Row(
        BlockSizes(64, 0, 0), 1043.0, 9285.0, 262776, 17039360, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G16 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 65170.0, 858300.0, 1442680, 411041792, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G16 M/G256", "small"): Row(
        BlockSizes(128, 0, 0), 2655.0, 34050.0, 1049208, 67371008, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G32 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 23650.0, 206600.0, 1098744, 117440512, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G32 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 1013.0, 8782.0, 131768, 17301504, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G32 M/G64", "large"): Row(
        BlockSizes(64, 0, 0), 48810.0, 789800.0, 1246200, 419430400, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G32 M/G64", "small"): Row(
        BlockSizes(32, 0, 0), 1747.0, 33940.0, 524984, 67633152, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G32 M/G256", "large"): Row(
        BlockSizes(128, 0, 0),
        131500.0,
        3114000.0,
        1442808,
        1627389952,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "float32", "G32 M/G256", "small"): Row(
        BlockSizes(128, 0, 0), 5129.0, 134500.0, 2097848, 268959744, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G64 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 50100.0, 820300.0, 1099000, 436207616, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G64 M/G16", "small"): Row(
        BlockSizes(16, 0, 0), 1803.0, 35010.0, 262968, 68157440, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G64 M/G64", "large"): Row(
        BlockSizes(32, 0, 0), 102400.0, 3248000.0, 1148152, 1644167168, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "G64 M/G64", "small"): Row(
        BlockSizes(32, 0, 0), 3652.0, 136800.0, 1049400, 269484032, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
}

_ROWS_NVIDIA_H100: dict[Key, Row] = {
    ("pallas_gpu", "forward", "bfloat16", "G2 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 85.9, 171.8, 772, 33554432, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward", "bfloat16", "G4 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 171.8, 687.2, 1540, 134217728, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward", "bfloat16", "G8 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 90.18, 721.4, 1028, 16777216, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward", "bfloat16", "G8 M/G64", "large"): Row(
        BlockSizes(64, 0, 0), 92.27, 738.2, 1028, 33554432, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward", "bfloat16", "G8 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 343.6, 2749.0, 2308, 536870944, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward", "bfloat16", "G16 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 171.8, 2749.0, 5144, 1073741888, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward", "bfloat16", "G32 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 90.88, 2908.0, 3096, 83886080, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward", "bfloat16", "G32 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 111.8, 3579.0, 4632, 1073741952, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward", "bfloat16", "G64 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 125.4, 8025.0, 5656, 279969792, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward", "bfloat16", "G64 M/G64", "large"): Row(
        BlockSizes(64, 0, 0), 132.5, 8478.0, 7448, 1073742080, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "G2 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 257.7, 515.4, 260, 100663312, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "G4 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 515.4, 2062.0, 260, 402653200, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "G8 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 270.5, 2164.0, 260, 33554448, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "G8 M/G64", "large"): Row(
        BlockSizes(64, 0, 0), 276.8, 2215.0, 260, 100663312, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "G8 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 1031.0, 8246.0, 260, 1610612752, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "G16 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 515.4, 8246.0, 1304, 3221225488, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "G32 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 272.6, 8724.0, 1560, 218103824, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "G32 M/G256", "large"): Row(
        BlockSizes(128, 0, 0), 335.5, 10740.0, 1560, 3221225488, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "G64 M/G16", "large"): Row(
        BlockSizes(16, 0, 0), 376.2, 24080.0, 2840, 654311424, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "G64 M/G64", "large"): Row(
        BlockSizes(64, 0, 0), 397.4, 25430.0, 3352, 2147483648, "estimated", "2026-11-21", "jax 0.11.2"
    ),
}

_ROWS_TPU_V6E: dict[Key, Row] = {
    ("pallas_tpu", "forward", "bfloat16", "G8 M/G256", "large"): Row(
        BlockSizes(1024, 0, 0), 350.4, 473.6, 684544, 64992, "simulated", "2026-11-22", "jax 0.12.0.1, libtpu 0.0.50.1"
    ),
    ("pallas_tpu", "forward", "bfloat16", "G64 M/G64", "large"): Row(
        BlockSizes(128, 0, 0), 1391.0, 1391.0, 684544, 64992, "simulated", "2026-11-21", "jax 0.12.0.1, libtpu 0.0.50.1"
    ),
    ("pallas_tpu", "forward+backward", "bfloat16", "G8 M/G256", "large"): Row(
        BlockSizes(1024, 0, 0),
        1167.0,
        1146.0,
        1698688,
        268696864,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
}

_ROWS_TPU_V5E: dict[Key, Row] = {
    ("pallas_tpu", "forward", "bfloat16", "G8 M/G256", "large"): Row(
        BlockSizes(1024, 0, 0),
        1479.0,
        1395.0,
        677888,
        64512,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward", "bfloat16", "G64 M/G64", "large"): Row(
        BlockSizes(128, 0, 0), 2786.0, 2786.0, 677888, 64512, "simulated", "2026-11-21", "jax 0.12.0.1, libtpu 0.0.50.1"
    ),
    ("pallas_tpu", "forward+backward", "bfloat16", "G8 M/G256", "large"): Row(
        BlockSizes(1024, 0, 0),
        4641.0,
        4186.0,
        1839104,
        268693504,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
}

TABLE: Table = MappingProxyType(
    {
        "cpu": MappingProxyType(_ROWS),
        "NVIDIA H100": MappingProxyType(_ROWS_NVIDIA_H100),
        "TPU v6e": MappingProxyType(_ROWS_TPU_V6E),
        "TPU v5e": MappingProxyType(_ROWS_TPU_V5E),
    }
)


def table_key(spec: AnySpec, implementation: str, direction: str) -> Key:
    """Where the table files a spec; invariants say whether a group's weights are "small" or "large", "dense" where the
    original has every expert compute every token, "slots" where it dispatches tokens to slots by products, and
    "scattered slots" where by scatters and gathers."""
    weights = "small" if spec.contracting * spec.columns < _SMALL else "large"
    if isinstance(spec, ExpertsSpec):
        # A dense original computes G / k times the rows, so this decides what is gained.
        original = "scattered slots" if spec.scattered else "slots" if spec.slots else "dense"
        sizes, invariants = {"G": spec.groups // spec.choices, "M/G": spec.rows_per_group}, f"{original} {weights}"
    else:
        sizes, invariants = {"G": spec.groups, "M/G": spec.rows_per_group}, weights
    bucket = bucket_of(sizes, BUCKETS)
    assert bucket is not None, "the last bucket takes everything"
    if spec.use in ("dlhs", "drhs"):
        direction = "forward+backward"  # in which it was measured
    return implementation, direction, spec.widest_dtype.name, bucket.name, invariants


def find(
    spec: AnySpec,
    device: Device,
    implementation: str | None = None,
    direction: str = "forward",
    objective: str = "time",
) -> Found | None:
    """The table's row for a spec: its own bucket's, else the nearest one's, else None."""
    name = implementation or OPERATION.usual(device)
    return lookup(TABLE, table_device(device), table_key(spec, name, direction), BUCKETS, objective)


def infer_block_sizes(
    spec: AnySpec,
    device: Device,
    implementation: str | None = None,
    direction: str = "forward",
    objective: str = "time",
) -> BlockSizes:
    """Block sizes from the table, or the default; valid for the shape in any case."""
    found = find(spec, device, implementation, direction, objective)
    name = implementation or OPERATION.usual(device)
    if found is None and name.startswith("pallas"):
        guess: BlockSizes = OPERATION.implementation(name).candidates(spec, device)[0]  # type: ignore[union-attr]
        return guess.fitted(spec)
    sizes = found.row.block_sizes if found is not None else BlockSizes.get_default()
    assert isinstance(sizes, BlockSizes)
    return sizes.fitted(spec)
