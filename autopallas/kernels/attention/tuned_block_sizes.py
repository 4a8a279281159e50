"""Tuned block sizes of the attention implementations, and the times and bytes that justify using them.

Every row was measured as its ``evidence`` says, by ``python -m benchmarks table attention``: medians of interleaved
runs in one process against the naive spelling (einsum, where, softmax, einsum).  Other work on the machine disturbs
times more than ratios, which are those of paired runs: compare within a row only.

Rows of TPUs were simulated, with scores in float32, by ``autopallas tune attention --target tpu-v6e --table``.  The
original's time is a bound there, where that is enough: the traffic with main memory of its T x S numbers.

Rows of the H100 that are "estimated" were written by ``python -m benchmarks gpu --op attention --estimate`` on a
machine without one: bytes by the compiler's account, times from the matrix products at 800 TFLOP/s and the memory at 3
TB/s, whichever takes longer.  Of a causal mask the original multiplies both halves; of its T x S numbers in memory
nothing is counted.  They replace nothing; they start a measurement.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.fills import mask_class
from autopallas.kernels.attention.operation import OPERATION
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.tpu import generation
from autopallas.sites.device import Device
from autopallas.tuning.coverage import Conditions, products
from autopallas.tuning.table import Bucket, Found, Key, Row, Table, bucket_of, lookup, table_device

__all__ = ["BUCKETS", "TABLE", "conditions", "find", "infer_block_sizes", "table_device", "table_key"]

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
        BlockSizes(1, 256), 1885.0, 1631.0, 5257536, 8456192, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "decode", "full"): Row(
        BlockSizes(1, 256), 2178.0, 1506.0, 5257464, 8456192, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T256", "causal"): Row(
        BlockSizes(256, 256), 5111.0, 6875.0, 5251072, 3153920, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T256", "dynamic"): Row(
        BlockSizes(256, 256), 6168.0, 7845.0, 5251072, 3153920, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T256", "full"): Row(
        BlockSizes(256, 256), 4449.0, 5342.0, 5767168, 3153920, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T256", "static"): Row(
        BlockSizes(256, 256), 3279.0, 4069.0, 5251072, 3153920, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T512", "causal"): Row(
        BlockSizes(256, 256), 14070.0, 21380.0, 8937920, 8388608, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T512", "dynamic"): Row(
        BlockSizes(512, 512), 20440.0, 27330.0, 11550720, 8388608, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T512", "full"): Row(
        BlockSizes(512, 512), 21850.0, 24800.0, 13647872, 8388608, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T512", "static"): Row(
        BlockSizes(256, 256), 12860.0, 19420.0, 6325704, 8388608, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T1024", "causal"): Row(
        BlockSizes(256, 256), 47410.0, 82990.0, 9732544, 33554432, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T1024", "dynamic"): Row(
        BlockSizes(256, 512), 75290.0, 95140.0, 11567488, 33554432, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T1024", "full"): Row(
        BlockSizes(256, 256), 72480.0, 84030.0, 7889208, 33554432, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T1024", "static"): Row(
        BlockSizes(256, 256), 64270.0, 112600.0, 9479824, 33554432, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T2048", "causal"): Row(
        BlockSizes(256, 256), 222800.0, 326200.0, 6439360, 67108864, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T2048", "dynamic"): Row(
        BlockSizes(256, 256), 543400.0, 710700.0, 11043200, 134217728, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T2048", "full"): Row(
        BlockSizes(256, 256), 613300.0, 780200.0, 11034936, 134217728, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T2048", "static"): Row(
        BlockSizes(256, 256), 69980.0, 171800.0, 5261008, 67108864, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T4096", "causal"): Row(
        BlockSizes(256, 256), 535700.0, 1631000.0, 9974208, 268435456, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T4096", "dynamic"): Row(
        BlockSizes(256, 256), 1139000.0, 1613000.0, 8667520, 268435456, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T4096", "full"): Row(
        BlockSizes(256, 256), 1084000.0, 1311000.0, 8663352, 268435456, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T4096", "static"): Row(
        BlockSizes(256, 256), 208100.0, 754300.0, 8668816, 268435456, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T8192", "causal"): Row(
        BlockSizes(256, 256), 911900.0, 2606000.0, 8133056, 536870912, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T8192", "dynamic"): Row(
        BlockSizes(256, 256), 1402000.0, 2305000.0, 7479680, 536870912, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T8192", "full"): Row(
        BlockSizes(256, 256), 2437000.0, 3030000.0, 7477560, 536870912, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T8192", "static"): Row(
        BlockSizes(256, 256), 634600.0, 2253000.0, 7480976, 536870912, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T16384", "causal"): Row(
        BlockSizes(256, 256), 900400.0, 1710000.0, 2658752, 1073741824, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "T16384", "dynamic"): Row(
        BlockSizes(256, 256),
        4165000.0,
        5937000.0,
        13771136,
        2147483648,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward", "bfloat16", "T16384", "full"): Row(
        BlockSizes(256, 256),
        4952000.0,
        7260000.0,
        13769016,
        2147483648,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward", "bfloat16", "T16384", "static"): Row(
        BlockSizes(256, 256), 675100.0, 1131000.0, 2365136, 1073741824, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "other", "dynamic"): Row(
        BlockSizes(256, 256), 68110.0, 94920.0, 9470336, 52428800, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "bfloat16", "other", "full"): Row(
        BlockSizes(512, 256), 60660.0, 82980.0, 13140088, 35651584, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "decode", "dynamic"): Row(
        BlockSizes(1, 256), 4596.0, 3872.0, 9447744, 8454144, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "decode", "full"): Row(
        BlockSizes(1, 256), 3690.0, 3047.0, 9447672, 8454144, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "T256", "causal"): Row(
        BlockSizes(256, 256), 4674.0, 5267.0, 4718592, 4202496, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "T256", "dynamic"): Row(
        BlockSizes(256, 256), 4613.0, 5013.0, 4718592, 4202496, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "T256", "full"): Row(
        BlockSizes(256, 256), 4428.0, 5729.0, 3153920, 4202496, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "T256", "static"): Row(
        BlockSizes(256, 256), 4634.0, 5212.0, 4718592, 4202496, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "T512", "causal"): Row(
        BlockSizes(256, 256), 14640.0, 18980.0, 9994688, 16777216, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "T512", "dynamic"): Row(
        BlockSizes(512, 512), 12820.0, 16350.0, 10518528, 16777216, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "T512", "full"): Row(
        BlockSizes(512, 512), 13470.0, 16060.0, 10518528, 16777216, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "T512", "static"): Row(
        BlockSizes(256, 256), 14690.0, 17960.0, 8938952, 16777216, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "T1024", "causal"): Row(
        BlockSizes(256, 256), 42670.0, 76760.0, 13140416, 67108864, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "T1024", "dynamic"): Row(
        BlockSizes(256, 256), 74260.0, 88270.0, 12083584, 67108864, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "T1024", "full"): Row(
        BlockSizes(256, 256), 62830.0, 78090.0, 10518840, 67108864, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "T1024", "static"): Row(
        BlockSizes(256, 256), 47040.0, 80340.0, 12625552, 67108864, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "T2048", "causal"): Row(
        BlockSizes(256, 256), 95290.0, 208000.0, 9716160, 134217728, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "T2048", "dynamic"): Row(
        BlockSizes(256, 256), 511100.0, 577500.0, 18375040, 268435456, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "T2048", "full"): Row(
        BlockSizes(256, 256), 321500.0, 395800.0, 16810296, 268435456, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "T2048", "static"): Row(
        BlockSizes(256, 256), 132500.0, 224100.0, 9189008, 134217728, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "T4096", "causal"): Row(
        BlockSizes(256, 256), 645600.0, 1646000.0, 16007616, 536870912, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "T4096", "dynamic"): Row(
        BlockSizes(256, 256), 847800.0, 945500.0, 15479168, 536870912, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "T4096", "full"): Row(
        BlockSizes(256, 256), 366500.0, 553100.0, 14696760, 536870912, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "T4096", "static"): Row(
        BlockSizes(256, 256), 158300.0, 525300.0, 15480464, 536870912, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "T8192", "causal"): Row(
        BlockSizes(256, 256),
        1017000.0,
        2699000.0,
        14295488,
        1073741824,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward", "float32", "T8192", "dynamic"): Row(
        BlockSizes(256, 256),
        1931000.0,
        2473000.0,
        14031232,
        1073741824,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward", "float32", "T8192", "full"): Row(
        BlockSizes(256, 256),
        800300.0,
        1124000.0,
        13639992,
        1073741824,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward", "float32", "T8192", "static"): Row(
        BlockSizes(256, 256),
        587300.0,
        2132000.0,
        14032528,
        1073741824,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward", "float32", "T16384", "causal"): Row(
        BlockSizes(256, 256), 718900.0, 1243000.0, 4788672, 2147483648, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "T16384", "dynamic"): Row(
        BlockSizes(256, 256),
        2152000.0,
        2587000.0,
        4656512,
        2147483648,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward", "float32", "T16384", "full"): Row(
        BlockSizes(256, 256),
        2802000.0,
        3896000.0,
        4460856,
        2147483648,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward", "float32", "T16384", "static"): Row(
        BlockSizes(256, 256), 702800.0, 1954000.0, 4462288, 2147483648, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "other", "dynamic"): Row(
        BlockSizes(256, 256), 68340.0, 83920.0, 15229312, 104857600, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward", "float32", "other", "full"): Row(
        BlockSizes(256, 512), 70000.0, 86130.0, 16793912, 71303168, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "decode", "dynamic"): Row(
        BlockSizes(1, 256), 16280.0, 12430.0, 9466536, 12584960, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "decode", "full"): Row(
        BlockSizes(1, 256), 7884.0, 5959.0, 9466528, 12584960, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T256", "causal"): Row(
        BlockSizes(128, 128), 17210.0, 18270.0, 5530664, 7077888, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T256", "dynamic"): Row(
        BlockSizes(256, 256), 8905.0, 8426.0, 8396952, 7077888, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T256", "full"): Row(
        BlockSizes(256, 256), 23080.0, 19540.0, 8396944, 6037504, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T256", "static"): Row(
        BlockSizes(128, 128), 10630.0, 12570.0, 4744816, 7077888, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T512", "causal"): Row(
        BlockSizes(256, 256), 34930.0, 45660.0, 13157416, 26755072, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T512", "dynamic"): Row(
        BlockSizes(256, 256), 25940.0, 26920.0, 11584488, 26755072, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T512", "full"): Row(
        BlockSizes(256, 256), 47570.0, 46690.0, 11584416, 26755072, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T512", "static"): Row(
        BlockSizes(256, 256), 40200.0, 49600.0, 11585648, 26755072, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T1024", "causal"): Row(
        BlockSizes(256, 256), 103400.0, 176200.0, 16860200, 103841792, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T1024", "dynamic"): Row(
        BlockSizes(512, 512), 180700.0, 194400.0, 31556584, 103841792, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T1024", "full"): Row(
        BlockSizes(256, 256), 175900.0, 178200.0, 15287200, 103841792, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T1024", "static"): Row(
        BlockSizes(256, 256), 131700.0, 220800.0, 15297016, 103841792, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T2048", "causal"): Row(
        BlockSizes(256, 256), 542300.0, 1107000.0, 24265768, 409010176, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T2048", "dynamic"): Row(
        BlockSizes(256, 256),
        1736000.0,
        2011000.0,
        22692840,
        409010176,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "bfloat16", "T2048", "full"): Row(
        BlockSizes(256, 256),
        1125000.0,
        1170000.0,
        22692768,
        409010176,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "bfloat16", "T2048", "static"): Row(
        BlockSizes(256, 256), 957200.0, 2014000.0, 22694456, 409010176, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "T4096", "causal"): Row(
        BlockSizes(256, 256),
        1333000.0,
        2969000.0,
        19538984,
        811663360,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "bfloat16", "T4096", "dynamic"): Row(
        BlockSizes(256, 256),
        1257000.0,
        1372000.0,
        18752488,
        811663360,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "bfloat16", "T4096", "full"): Row(
        BlockSizes(256, 256),
        1483000.0,
        1418000.0,
        18752416,
        811663360,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "bfloat16", "T4096", "static"): Row(
        BlockSizes(256, 256), 647600.0, 1756000.0, 18754104, 811663360, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "other", "dynamic"): Row(
        BlockSizes(256, 256), 139300.0, 145300.0, 17875944, 103825408, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "bfloat16", "other", "full"): Row(
        BlockSizes(256, 512), 180700.0, 183100.0, 23118752, 103825408, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "decode", "dynamic"): Row(
        BlockSizes(1, 256), 16020.0, 10630.0, 9460456, 8650784, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "decode", "full"): Row(
        BlockSizes(1, 256), 11610.0, 9231.0, 9460384, 8650784, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "T256", "causal"): Row(
        BlockSizes(256, 256), 31240.0, 36630.0, 6308048, 13639680, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "T256", "dynamic"): Row(
        BlockSizes(256, 256), 30100.0, 34170.0, 6308056, 13639680, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "T256", "full"): Row(
        BlockSizes(256, 256), 31130.0, 36950.0, 6308048, 13639680, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "T256", "static"): Row(
        BlockSizes(256, 256), 31240.0, 37190.0, 6308048, 13639680, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "T512", "causal"): Row(
        BlockSizes(256, 256), 37440.0, 52680.0, 14730280, 35684352, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "T512", "dynamic"): Row(
        BlockSizes(512, 512), 71610.0, 86910.0, 23118040, 35684352, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "T512", "full"): Row(
        BlockSizes(256, 256), 57320.0, 61000.0, 13157280, 35684352, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "T512", "static"): Row(
        BlockSizes(256, 256), 60710.0, 93200.0, 13158512, 35684352, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "T1024", "causal"): Row(
        BlockSizes(256, 256), 270700.0, 614300.0, 20005928, 138477568, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "T1024", "dynamic"): Row(
        BlockSizes(256, 512), 149700.0, 224400.0, 23675880, 138477568, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "T1024", "full"): Row(
        BlockSizes(256, 256), 290600.0, 357600.0, 18432928, 138477568, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "T1024", "static"): Row(
        BlockSizes(256, 256), 282900.0, 598600.0, 18958840, 138477568, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "T2048", "causal"): Row(
        BlockSizes(256, 256), 594900.0, 2138000.0, 30557224, 545390592, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "T2048", "dynamic"): Row(
        BlockSizes(256, 256),
        1426000.0,
        2284000.0,
        28984296,
        545390592,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "float32", "T2048", "full"): Row(
        BlockSizes(256, 256), 604600.0, 896100.0, 28984224, 545390592, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "T2048", "static"): Row(
        BlockSizes(256, 256), 941600.0, 3100000.0, 28985912, 545390592, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "T4096", "causal"): Row(
        BlockSizes(256, 256),
        1017000.0,
        3781000.0,
        25830440,
        1082261504,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "float32", "T4096", "dynamic"): Row(
        BlockSizes(256, 256),
        1283000.0,
        2388000.0,
        25232232,
        1082261504,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "float32", "T4096", "full"): Row(
        BlockSizes(256, 256),
        1374000.0,
        2044000.0,
        25232224,
        1082261504,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "float32", "T4096", "static"): Row(
        BlockSizes(256, 256),
        664000.0,
        2814000.0,
        25232632,
        1082261504,
        "measured",
        "2026-11-21",
        "jax 0.12.0.1",
        "avx2",
    ),
    ("xla", "forward+backward", "float32", "other", "dynamic"): Row(
        BlockSizes(256, 256), 142700.0, 192300.0, 19448808, 139493376, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
    ("xla", "forward+backward", "float32", "other", "full"): Row(
        BlockSizes(512, 512), 162100.0, 206100.0, 31490592, 139493376, "measured", "2026-11-21", "jax 0.12.0.1", "avx2"
    ),
}

_ROWS_TPU_V6E: dict[Key, Row] = {
    ("pallas_tpu", "forward", "bfloat16", "T2048", "causal"): Row(
        BlockSizes(1024, 1024),
        547.4,
        1412.0,
        134971168,
        1073840032,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward", "bfloat16", "T2048", "full"): Row(
        BlockSizes(1024, 2048),
        538.8,
        1412.0,
        134872960,
        1073840032,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward", "bfloat16", "T4096", "causal"): Row(
        BlockSizes(1024, 1024),
        438.0,
        5616.0,
        50822944,
        4563533696,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward", "bfloat16", "T4096", "full"): Row(
        BlockSizes(1024, 2048),
        566.8,
        1350.0,
        50724736,
        1073840032,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward", "bfloat16", "T8192", "causal"): Row(
        BlockSizes(1024, 2048),
        368.0,
        2972.0,
        8748832,
        2416180992,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward", "bfloat16", "T8192", "full"): Row(
        BlockSizes(1024, 2048),
        543.7,
        3949.0,
        8650624,
        3221323680,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward+backward", "bfloat16", "T2048", "causal"): Row(
        BlockSizes(1024, 1024),
        2056.0,
        5203.0,
        271414432,
        1615658688,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward+backward", "bfloat16", "T2048", "full"): Row(
        BlockSizes(512, 2048),
        2164.0,
        5197.0,
        271283488,
        1611398912,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward+backward", "bfloat16", "T4096", "causal"): Row(
        BlockSizes(1024, 1024),
        1644.0,
        9310.0,
        119240992,
        4580605536,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward+backward", "bfloat16", "T4096", "full"): Row(
        BlockSizes(1024, 2048),
        1949.0,
        3724.0,
        119044576,
        1611234976,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward+backward", "bfloat16", "T8192", "causal"): Row(
        BlockSizes(1024, 2048),
        1378.0,
        6691.0,
        42695968,
        2483420800,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward+backward", "bfloat16", "T8192", "full"): Row(
        BlockSizes(1024, 2048),
        1846.0,
        7591.0,
        42499552,
        3221585568,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
}

_ROWS_NVIDIA_H100: dict[Key, Row] = {
    ("pallas_gpu", "forward", "bfloat16", "T256", "full"): Row(
        BlockSizes(128, 128), 44.74, 44.74, 101712128, 402653184, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward", "bfloat16", "T512", "causal"): Row(
        BlockSizes(128, 128), 44.74, 89.48, 101712128, 805306368, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward", "bfloat16", "T1024", "causal"): Row(
        BlockSizes(128, 128), 44.74, 89.48, 101712128, 1610612736, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward", "bfloat16", "T1024", "full"): Row(
        BlockSizes(128, 128), 85.9, 85.9, 101712128, 1610612736, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward", "bfloat16", "T2048", "causal"): Row(
        BlockSizes(128, 128), 171.8, 343.6, 202375424, 3221225472, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward", "bfloat16", "T4096", "causal"): Row(
        BlockSizes(128, 128), 343.6, 687.2, 202375424, 6442450944, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward", "bfloat16", "T4096", "causal, T x S input"): Row(
        BlockSizes(128, 128), 223.7, 447.4, 101187840, 3221225472, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward", "bfloat16", "T4096", "dynamic"): Row(
        BlockSizes(128, 128), 343.6, 687.2, 202394160, 6442450944, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward", "bfloat16", "T8192", "causal"): Row(
        BlockSizes(128, 128), 343.6, 687.2, 101187840, 6442450944, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward", "bfloat16", "T16384", "causal"): Row(
        BlockSizes(128, 128), 1374.0, 2749.0, 202375424, 25769803776, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward", "bfloat16", "T16384", "full"): Row(
        BlockSizes(128, 128), 2749.0, 2749.0, 202375424, 25769803776, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "T256", "full"): Row(
        BlockSizes(128, 128), 89.48, 89.48, 136316432, 672137216, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "T512", "causal"): Row(
        BlockSizes(128, 128), 89.48, 179.0, 136316432, 1343225856, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "T1024", "causal"): Row(
        BlockSizes(128, 128), 150.3, 300.6, 136316432, 2685403136, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "T1024", "full"): Row(
        BlockSizes(128, 128), 300.6, 300.6, 136316432, 2685403136, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "T2048", "causal"): Row(
        BlockSizes(128, 128), 601.3, 1203.0, 270533904, 5369757696, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "T4096", "causal"): Row(
        BlockSizes(128, 128), 1203.0, 2405.0, 270533904, 10738466816, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "T4096", "causal, T x S input"): Row(
        BlockSizes(128, 128), 601.3, 1203.0, 168822040, 5369233408, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "T4096", "dynamic"): Row(
        BlockSizes(128, 128), 1203.0, 2405.0, 270574384, 10738466816, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "T8192", "causal"): Row(
        BlockSizes(128, 128), 1203.0, 2405.0, 135267600, 10737418240, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "T16384", "causal"): Row(
        BlockSizes(128, 128), 4810.0, 9621.0, 270533904, 42949672960, "estimated", "2026-11-21", "jax 0.11.2"
    ),
    ("pallas_gpu", "forward+backward", "bfloat16", "T16384", "full"): Row(
        BlockSizes(128, 128), 9621.0, 9621.0, 270534160, 42949672960, "estimated", "2026-11-21", "jax 0.11.2"
    ),
}

_ROWS_TPU_V5E: dict[Key, Row] = {
    ("pallas_tpu", "forward", "bfloat16", "T2048", "causal"): Row(
        BlockSizes(1024, 1024),
        1031.0,
        5449.0,
        68052480,
        2147612672,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward", "bfloat16", "T2048", "full"): Row(
        BlockSizes(1024, 2048),
        1090.0,
        5449.0,
        67955712,
        2147612672,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward", "bfloat16", "T4096", "causal"): Row(
        BlockSizes(1024, 1024),
        804.0,
        5326.0,
        455680,
        2147580416,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward", "bfloat16", "T4096", "full"): Row(
        BlockSizes(1024, 2048),
        1165.0,
        5326.0,
        358912,
        2147580416,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward", "bfloat16", "T8192", "causal"): Row(
        BlockSizes(1024, 1024),
        659.3,
        5285.0,
        324608,
        2147580416,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward", "bfloat16", "T8192", "full"): Row(
        BlockSizes(512, 512),
        1075.0,
        5285.0,
        227840,
        2147580416,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward+backward", "bfloat16", "T2048", "causal"): Row(
        BlockSizes(1024, 1024),
        3821.0,
        12960.0,
        202294272,
        2152032768,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward+backward", "bfloat16", "T2048", "full"): Row(
        BlockSizes(512, 2048),
        4407.0,
        12950.0,
        202455552,
        2147773952,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward+backward", "bfloat16", "T4096", "causal"): Row(
        BlockSizes(1024, 1024),
        3005.0,
        12740.0,
        67721728,
        2164680192,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward+backward", "bfloat16", "T4096", "full"): Row(
        BlockSizes(1024, 2048),
        4137.0,
        12700.0,
        67592704,
        2147838464,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward+backward", "bfloat16", "T8192", "causal"): Row(
        BlockSizes(1024, 1024),
        2494.0,
        12740.0,
        9001472,
        2215011840,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward+backward", "bfloat16", "T8192", "causal, least memory"): Row(
        BlockSizes(512, 512),
        2993.0,
        12740.0,
        548352,
        2215011840,
        "simulated",
        "2026-11-22",
        "jax 0.12.0.1, libtpu 0.0.50.1",
    ),
    ("pallas_tpu", "forward+backward", "bfloat16", "T8192", "full"): Row(
        BlockSizes(1024, 2048),
        3868.0,
        12580.0,
        8807936,
        2147838464,
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


def table_key(spec: AttentionSpec, implementation: str, direction: str) -> Key:
    """Where the table files a spec; the invariant is its mask class, and whether it reads a T x S side input."""
    bucket = bucket_of({"T": spec.query_length, "S": spec.key_length}, BUCKETS)
    assert bucket is not None, "the last bucket takes everything"
    # A bias or mask that fills the tile has to be read: what was measured without one says nothing of it.
    reads_tiles = any(side.varies[3] and side.varies[4] for side in spec.sides)
    mask = mask_class(spec, implementation)
    invariants = f"{mask}, T x S input" if reads_tiles else mask
    return implementation, direction, spec.widest_dtype.name, bucket.name, invariants


_CASES = "abcd,aecd->acbe; abcd,aceb->acde"
"""The products of a case, as ``jnp.einsum`` has them: queries by keys, values by weights."""


_HOLDS_FROM = {
    ("forward", "causal"): 1.6,
    ("forward", "static"): 1.6,
    **{("forward+backward", mask): 1.2 for mask in ("full", "causal", "static", "dynamic")},
}
"""The gain from which a row holds for other batch sizes and spellings: those that were tried gained less by as much."""


def conditions(match: Any) -> Conditions:
    """What an attention's original depends on, on a CPU.

    The cases are einsums over [B, T, N, D] with B = 1, and XLA computes each of their steps by itself, as it does for a
    single head however that is spelled.  With B > 1, or of several heads spelled with matmul, the same attention is one
    kernel without a T x S array, or faster otherwise.  Whole tiles that a causal or static mask leaves out outweigh
    that where the row's gain is large.  With the gradients in the same program the original is faster too, by less.
    """
    found, parts = products(match.original), match.spec.batch * match.spec.key_heads * match.spec.groups
    return Conditions(
        match.spec.batch,
        "" if found == _CASES or parts == 1 else found or "none",
        _HOLDS_FROM.get((match.direction, match.spec.mask_class), math.inf),
    )


def find(
    spec: AttentionSpec,
    device: Device,
    implementation: str | None = None,
    direction: str = "forward",
    objective: str = "time",
) -> Found | None:
    """The table's row for a spec: its own bucket's, else the nearest one's, else None."""
    name = implementation or OPERATION.usual(device)
    return lookup(TABLE, table_device(device), table_key(spec, name, direction), BUCKETS, objective)


def infer_block_sizes(
    spec: AttentionSpec,
    device: Device,
    implementation: str | None = None,
    direction: str = "forward",
    objective: str = "time",
) -> BlockSizes:
    """Block sizes from the table, or the default; valid for the shape in any case."""
    found, name = find(spec, device, implementation, direction, objective), implementation or OPERATION.usual(device)
    sizes = None if found is None else found.row.block_sizes
    assert sizes is None or isinstance(sizes, BlockSizes)
    if name == "pallas_tpu":
        from autopallas.kernels.attention import tpu_block_sizes

        return tpu_block_sizes.default(spec, generation(device), sizes)
    if name == "pallas_gpu":
        from autopallas.kernels.attention import gpu_block_sizes

        sizes = gpu_block_sizes.default(spec, sizes)
    return (sizes or BlockSizes.get_default()).fitted(spec)
