"""Tuned block sizes of the attention implementations, and the times and bytes that justify using them.

Every row was measured as its ``evidence`` says.  Times are medians of interleaved runs in one process against the naive
spelling (einsum, where, softmax, einsum; its gradient by jax.grad).  Those of "forward+backward" are the process's CPU
time, all threads together, because other work on the machine disturbs that least: compare within a row only.
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

_ROWS: dict[Key, Row] = {
    ("xla", "forward", "bfloat16", "decode", "dynamic"): Row(
        BlockSizes(1, 256), 1885.0, 1631.0, 5257536, 8456192, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "decode", "full"): Row(
        BlockSizes(1, 256), 2178.0, 1506.0, 5257464, 8456192, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T256", "causal"): Row(
        BlockSizes(256, 256), 5111.0, 6875.0, 5251072, 3153920, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T256", "dynamic"): Row(
        BlockSizes(256, 256), 6168.0, 7845.0, 5251072, 3153920, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T256", "full"): Row(
        BlockSizes(256, 256), 4449.0, 5342.0, 5767168, 3153920, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T256", "static"): Row(
        BlockSizes(256, 256), 3279.0, 4069.0, 5251072, 3153920, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T512", "causal"): Row(
        BlockSizes(256, 256), 14880.0, 20740.0, 8159680, 8388608, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T512", "dynamic"): Row(
        BlockSizes(256, 256), 25510.0, 24790.0, 5800320, 8388608, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T512", "full"): Row(
        BlockSizes(256, 256), 22900.0, 20460.0, 5800248, 8388608, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T512", "static"): Row(
        BlockSizes(256, 256), 30080.0, 36240.0, 5801416, 8388608, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T1024", "causal"): Row(
        BlockSizes(256, 256), 47410.0, 82990.0, 9732544, 33554432, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T1024", "dynamic"): Row(
        BlockSizes(256, 256), 113900.0, 117400.0, 7373184, 33554432, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T1024", "full"): Row(
        BlockSizes(256, 256), 79320.0, 76680.0, 7373112, 33554432, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T1024", "static"): Row(
        BlockSizes(256, 256), 64270.0, 112600.0, 9479824, 33554432, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T2048", "causal"): Row(
        BlockSizes(256, 256), 222800.0, 326200.0, 6439360, 67108864, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T2048", "dynamic"): Row(
        BlockSizes(256, 256), 143100.0, 166000.0, 5259648, 67108864, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T2048", "full"): Row(
        BlockSizes(256, 256), 193200.0, 177900.0, 5259576, 67108864, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T2048", "static"): Row(
        BlockSizes(256, 256), 69980.0, 171800.0, 5261008, 67108864, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T4096", "causal"): Row(
        BlockSizes(256, 256), 138900.0, 311100.0, 4792768, 134217728, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T4096", "dynamic"): Row(
        BlockSizes(256, 256), 297900.0, 314100.0, 4202880, 134217728, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T4096", "full"): Row(
        BlockSizes(256, 256), 284200.0, 283800.0, 4202808, 134217728, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T4096", "static"): Row(
        BlockSizes(256, 256), 122300.0, 336600.0, 4204240, 134217728, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T8192", "causal"): Row(
        BlockSizes(256, 256), 239300.0, 337700.0, 1610176, 268435456, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T8192", "dynamic"): Row(
        BlockSizes(256, 256), 501200.0, 307900.0, 1315200, 268435456, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T8192", "full"): Row(
        BlockSizes(256, 256), 502100.0, 590200.0, 1315128, 268435456, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T8192", "static"): Row(
        BlockSizes(256, 256), 194800.0, 322000.0, 1316560, 268435456, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T16384", "causal"): Row(
        BlockSizes(256, 256), 900400.0, 1710000.0, 2658752, 1073741824, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T16384", "dynamic"): Row(
        BlockSizes(256, 256), 1983000.0, 1335000.0, 2363776, 1073741824, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T16384", "full"): Row(
        BlockSizes(256, 256), 1866000.0, 1312000.0, 2363704, 1073741824, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "T16384", "static"): Row(
        BlockSizes(256, 256), 675100.0, 1131000.0, 2365136, 1073741824, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "other", "dynamic"): Row(
        BlockSizes(256, 256), 60760.0, 70410.0, 8946048, 52428800, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "bfloat16", "other", "full"): Row(
        BlockSizes(256, 256), 59620.0, 59980.0, 8945976, 35651584, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "decode", "dynamic"): Row(
        BlockSizes(1, 256), 4596.0, 3872.0, 9447744, 8454144, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "decode", "full"): Row(
        BlockSizes(1, 256), 3690.0, 3047.0, 9447672, 8454144, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T256", "causal"): Row(
        BlockSizes(256, 256), 4674.0, 5267.0, 4718592, 4202496, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T256", "dynamic"): Row(
        BlockSizes(256, 256), 4613.0, 5013.0, 4718592, 4202496, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T256", "full"): Row(
        BlockSizes(256, 256), 4428.0, 5729.0, 3153920, 4202496, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T256", "static"): Row(
        BlockSizes(256, 256), 4634.0, 5212.0, 4718592, 4202496, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T512", "causal"): Row(
        BlockSizes(256, 256), 14900.0, 19890.0, 9994688, 16777216, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T512", "dynamic"): Row(
        BlockSizes(256, 256), 16660.0, 17210.0, 8937856, 16777216, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T512", "full"): Row(
        BlockSizes(256, 256), 20980.0, 20610.0, 7373112, 16777216, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T512", "static"): Row(
        BlockSizes(256, 256), 16870.0, 21260.0, 8938952, 16777216, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T1024", "causal"): Row(
        BlockSizes(256, 256), 42670.0, 76760.0, 13140416, 67108864, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T1024", "dynamic"): Row(
        BlockSizes(256, 256), 71040.0, 84740.0, 12083584, 67108864, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T1024", "full"): Row(
        BlockSizes(256, 256), 56300.0, 72260.0, 10518840, 67108864, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T1024", "static"): Row(
        BlockSizes(256, 256), 47040.0, 80340.0, 12625552, 67108864, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T2048", "causal"): Row(
        BlockSizes(256, 256), 95290.0, 208000.0, 9716160, 134217728, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T2048", "dynamic"): Row(
        BlockSizes(256, 256), 194900.0, 212800.0, 9187712, 134217728, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T2048", "full"): Row(
        BlockSizes(256, 256), 143400.0, 175400.0, 8405304, 134217728, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T2048", "static"): Row(
        BlockSizes(256, 256), 132500.0, 224100.0, 9189008, 134217728, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T4096", "causal"): Row(
        BlockSizes(256, 256), 215100.0, 456400.0, 8004032, 268435456, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T4096", "dynamic"): Row(
        BlockSizes(256, 256), 274500.0, 335100.0, 7739776, 268435456, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T4096", "full"): Row(
        BlockSizes(256, 256), 319100.0, 421100.0, 7348536, 268435456, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T4096", "static"): Row(
        BlockSizes(256, 256), 101700.0, 303700.0, 7741072, 268435456, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T8192", "causal"): Row(
        BlockSizes(256, 256), 279400.0, 676100.0, 2691520, 536870912, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T8192", "dynamic"): Row(
        BlockSizes(256, 256), 796600.0, 864800.0, 2559360, 536870912, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T8192", "full"): Row(
        BlockSizes(256, 256), 604000.0, 853700.0, 2363704, 536870912, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T8192", "static"): Row(
        BlockSizes(256, 256), 424400.0, 1072000.0, 2365136, 536870912, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T16384", "causal"): Row(
        BlockSizes(256, 256), 718900.0, 1243000.0, 4788672, 2147483648, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T16384", "dynamic"): Row(
        BlockSizes(256, 256), 2152000.0, 2587000.0, 4656512, 2147483648, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T16384", "full"): Row(
        BlockSizes(256, 256), 2802000.0, 3896000.0, 4460856, 2147483648, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "T16384", "static"): Row(
        BlockSizes(256, 256), 702800.0, 1954000.0, 4462288, 2147483648, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "other", "dynamic"): Row(
        BlockSizes(256, 256), 136200.0, 123100.0, 15229312, 104857600, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward", "float32", "other", "full"): Row(
        BlockSizes(256, 256), 74810.0, 88210.0, 13664568, 71303168, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T256", "causal"): Row(
        BlockSizes(256, 256), 13520.0, 13260.0, 7880848, 9445376, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T256", "full"): Row(
        BlockSizes(256, 256), 10000.0, 10820.0, 7880848, 9445376, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T512", "causal"): Row(
        BlockSizes(256, 256), 38850.0, 47910.0, 12633128, 39845888, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T512", "full"): Row(
        BlockSizes(512, 512), 45080.0, 42600.0, 37257360, 33554432, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T1024", "causal"): Row(
        BlockSizes(256, 256), 100600.0, 204000.0, 15811624, 155189248, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T1024", "full"): Row(
        BlockSizes(256, 256), 176200.0, 177800.0, 14238624, 125829120, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T2048", "causal"): Row(
        BlockSizes(256, 256), 371100.0, 960200.0, 22168680, 612368384, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T2048", "full"): Row(
        BlockSizes(256, 256), 685200.0, 719000.0, 20595616, 486539264, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward+backward", "float32", "T256", "causal"): Row(
        BlockSizes(256, 256), 9706.0, 11790.0, 6308048, 13115392, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward+backward", "float32", "T256", "full"): Row(
        BlockSizes(256, 256), 10790.0, 12390.0, 6308048, 13115392, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward+backward", "float32", "T512", "causal"): Row(
        BlockSizes(256, 256), 39500.0, 53140.0, 13681704, 35651584, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward+backward", "float32", "T512", "full"): Row(
        BlockSizes(512, 512), 32520.0, 41420.0, 30458128, 34635776, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward+backward", "float32", "T1024", "causal"): Row(
        BlockSizes(256, 256), 117200.0, 266900.0, 17908840, 138412032, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward+backward", "float32", "T1024", "dynamic"): Row(
        BlockSizes(256, 256), 180800.0, 245300.0, 16335784, 138412032, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward+backward", "float32", "T1024", "full"): Row(
        BlockSizes(256, 256), 171200.0, 198000.0, 16335776, 136380416, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward+backward", "float32", "T2048", "causal"): Row(
        BlockSizes(256, 256), 406100.0, 1178000.0, 30557288, 545259520, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward+backward", "float32", "T2048", "dynamic"): Row(
        BlockSizes(256, 256), 655100.0, 1093000.0, 28460072, 545259520, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
    ("xla", "forward+backward", "float32", "T2048", "full"): Row(
        BlockSizes(256, 256), 742600.0, 929200.0, 28460000, 541196288, "measured", "2026-11-21", "jax 0.12.0.1, avx2"
    ),
}

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
