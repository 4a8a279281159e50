"""Holds tuned block sizes of the attention implementations, and the times and bytes that justify them.

The rows are data: ``autopallas/tuning/data/<device>/attention.csv``.

Every row was measured as its ``evidence`` says, by ``python -m benchmarks table attention``: medians of interleaved
runs in one process against the naive spelling (einsum, where, softmax, einsum).  Other load on the machine disturbs
times more than ratios of paired runs, so that numbers should be compared only within a row.

Rows of TPUs were simulated, with scores in float32, by ``autopallas tune attention --target tpu-v6e --table``.  The
original's time there is a lower bound, if that suffices: the main-memory traffic of its T x S numbers.

Measured rows of the H100 are of cases of ``benchmarks/gpu_attention.py``, each implementation against the same original
(``python -m benchmarks gpu --tables``).  Those that are "estimated" were written by ``python -m benchmarks gpu --op
attention --estimate`` on a machine without one: bytes as the compiler reports them, times from the matrix products at
800 TFLOP/s or the memory at 3 TB/s, whichever is longer.  With a causal mask the original multiplies both halves; the
memory traffic of its T x S numbers is not counted.  These rows replace nothing; they are starting points for a
measurement.
"""

from __future__ import annotations

import math

from autopallas.kernels import tpu
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.fills import mask_class
from autopallas.kernels.attention.operation import OPERATION
from autopallas.kernels.attention.spec import AttentionSpec, AttentionSumSpec
from autopallas.sites.device import Device
from autopallas.sites.operation import HOME
from autopallas.sites.workload import Workload
from autopallas.tuning.coverage import Conditions, products
from autopallas.tuning.table import Bucket, Row, Table, table_device

__all__ = ["BUCKETS", "TABLE", "conditions", "find", "infer_block_sizes", "share_of_gain", "table_device", "table_key"]

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


_OF_BOTH = ("xla", "xla_heads")
"""Implementations whose rows distinguish masks that positions decide in part and side inputs in part."""


_HEAD_SIZES = (32, 64, 128)
"""Largest head sizes of the classes by which GPUs' rows are filed, which are those of the kernels' registers."""


def _filed(spec: AttentionSpec, implementation: str, direction: str) -> tuple[str, dict[str, int], str]:
    """Files a spec by direction, sizes, and as invariants the mask class and whether a T x S side input is read; of
    GPUs also the class of the head size, on which it depends how their implementations compare, and of TPUs whether it
    fills no more than half of the lanes, where a kernel takes as long and the original less."""
    # A bias or mask that fills tiles has to be read: measurements without one do not apply.
    reads_tiles = any(side.varies[3] and side.varies[4] for side in spec.sides)
    mask = mask_class(spec, implementation)
    if implementation not in _OF_BOTH:
        mask = mask.removeprefix("causal and ").removeprefix("static and ")
    elif mask == "full" and not reads_tiles and any(spec.sides[n].varies[4] for n in spec.score.sides):
        mask = "dynamic"  # such as padding with a fill of -1e9: both sides compute what they do for one of -inf
    invariants = f"{mask}, T x S input" if reads_tiles else mask
    if isinstance(spec, AttentionSumSpec):  # the original multiplies the sum of all maps with the values once
        invariants = f"{invariants}, sum of {spec.maps} maps"
    widest = max(spec.head_size, spec.value_head_size)
    if HOME.get(implementation) == "gpu":
        invariants = f"{invariants}, D{next((size for size in _HEAD_SIZES if widest <= size), 256)}"
    elif HOME.get(implementation) == "tpu" and widest <= tpu.LANES // 2:
        invariants = f"{invariants}, D{tpu.LANES // 2}"
    return direction, {"T": spec.query_length, "S": spec.key_length}, invariants


_CASES = "abcd,aecd->acbe; abcd,aceb->acde"
"""The products of a case as ``jnp.einsum`` emits them: queries by keys, values by weights."""


_HOLDS_FROM = {
    ("forward", "causal"): 1.6,
    ("forward", "static"): 1.6,
    ("forward", "causal and dynamic"): 1.6,
    **{("forward+backward", mask): 1.2 for mask in ("full", "causal", "static", "dynamic", "causal and dynamic")},
}
"""Smallest gain with which a row holds for other batch sizes and spellings: those tried gained less by this factor."""
_ELSEWHERE_FROM = {
    ("forward", False): 1.35,
    ("forward", True): 1.65,
    ("forward+backward", False): 1.25,
    ("forward+backward", True): 1.25,
}
"""The same for other vector extensions, by direction and whether the site is batched: of sites that were measured with
AVX2 and with AVX-512, forward ones gained up to 1.33 times more with the one than with the other, batched ones up to
1.63 times, those with gradients up to 1.23 times, where either gained less than 2."""

_MIXED_FROM = 1.35
"""The same for sites whose scores are products of float32 numbers, and whose values have 16 bits: models in bfloat16
that rotate queries and keys in float32.  With float16 arithmetic (JAX 0.10.2 and 0.12, B 1 to 4, T 512 and 1,024,
causal with padding and padding alone, medians of 11 paired processor times) they gained 0.75 to 1.8 times what the
float32 rows of avx512_bf16 say, where these are 1.35 or more."""


def conditions(match: Workload) -> Conditions:
    """Returns the conditions on which the original's time depends on a CPU.

    The cases are einsums over [B, T, N, D] with B = 1, whose steps XLA computes separately, as it does for a single
    head in any spelling.  With B > 1, or with several heads spelled with matmul, XLA fuses the same attention into one
    kernel without a T x S array, or makes it faster otherwise.  If the row's gain is large, the tiles that a causal or
    static mask leaves out outweigh that.  With the gradients in the same program the original is also faster, by less.

    Both of these are one form, "batched": matmul at B=1 and einsums at B=2 gain the same within a tenth
    (docs/tuning.md), so that rows measured at B=2 hold for both.
    """
    spec = match.spec
    assert isinstance(spec, AttentionSpec)
    found, heads = products(match.original), spec.key_heads * spec.groups
    spelling = "" if found == _CASES or spec.batch * heads == 1 else found or "none"
    batched = heads > 1 and (spec.batch > 1 or bool(spelling))
    holds_from = _HOLDS_FROM.get((match.direction, spec.mask_class), math.inf)
    elsewhere_from = _ELSEWHERE_FROM[match.direction, batched]
    form, slight = "batched" if batched else "", _slight(spec, match.direction)
    unlike = _STRIDED if getattr(getattr(match, "site", None), "strides_over_keys", False) else ""
    return Conditions(
        spec.batch,
        spelling,
        holds_from,
        elsewhere_from,
        max(elsewhere_from, _MIXED_FROM) if min(spec.query_dtype.itemsize, spec.key_dtype.itemsize) > 2 else math.inf,
        form,
        unlike=unlike,
        unlike_from=_STRIDED_FROM,
        slight=slight,
    )


_STRIDED = "a T x S input that lies in memory with another axis after the keys"
_STRIDED_FROM = 1.5
"""Smallest gain with which a row holds for a side input such as ``bias[positions]`` [B, T, S, N], transposed.

The cases' side inputs have their keys last.  The original reads such an array once, with a stride, and fuses a gather
with that; tiles read it in the forward, for the maximum and for the exponentials, and again in the backward, and a
gradient of it is computed in both orders.  With AVX2 and JAX 0.10.2, forward and backward of rows that gain 1.17 to
1.30 had 0.77 to 1.18 of the original's speed (B 2 to 8, T 49 to 512, D 16 to 64), and 0.99 to 1.32 where the keys are
last.
"""


_LEAST_SCORES, _LEAST_KEYS = 8192, 48
"""Least scores of a site on a CPU for which rows hold, and least keys where it has a backward.

The rows are of 8 heads and of two hundred positions or more.  With AVX2 and JAX 0.10.2, sites of 1,024 to 4,608 scores
took 0.9 to 1.4 times as long as the original, and backwards of 17 to 24 keys 1.1 to 1.3 times with up to 16 heads;
those of 8,192 scores and 48 keys or more gained 0.98 to 1.3 (medians of 13 paired processor times, B=1, D=32).
"""


def _slight(spec: AttentionSpec, direction: str) -> str:
    """Returns why a site computes too little for rows of a CPU to hold, or an empty string."""
    scores = spec.batch * spec.key_heads * spec.groups * spec.query_length * spec.key_length
    if scores < _LEAST_SCORES:
        return f"rows hold from {_LEAST_SCORES:,} scores on, and this site has {scores:,}"
    if direction == "forward+backward" and spec.key_length < _LEAST_KEYS:
        return f"rows with a backward hold from {_LEAST_KEYS} keys on, and this site has {spec.key_length}"
    return ""


_ROWS, _KEYS, _PROCESSORS = 128, 128, 132
"""Rows of a GPU kernel's block, or keys where blocks divide these, and the processors of an H100, each of which
computes a block at a time."""


def share_of_gain(match: Workload, row: Row[object], device: Device) -> float:
    """Returns the least share of a row's gain that a site has on a GPU or TPU.

    Where a GPU has fewer blocks than processors, a kernel takes no less time, and the original at best so much less.
    A TPU's compiler keeps scores that fit into VMEM there, in the dtype that they are rounded to, and the original may
    be as fast as a kernel or faster: of five cases, simulated for v5e, the kernel was 0.5 to 1.1 times as fast.
    """
    spec = match.spec
    assert isinstance(spec, AttentionSpec)
    if device.platform == "tpu":
        scores = spec.batch * spec.key_heads * spec.groups * spec.query_length * spec.key_length
        # Of scores that a kernel does not round, their gradients have the original's dtype.
        return float(spec.reads_score_gradients.itemsize * scores >= tpu.generation(device).vmem)
    if device.platform != "gpu":
        return 1.0
    blocks = spec.batch * spec.key_heads * spec.groups * -(-spec.query_length // _ROWS)
    if isinstance(row.block_sizes, BlockSizes) and row.block_sizes.blocks_per_processor:
        blocks = spec.batch * spec.key_heads * -(-spec.key_length // _KEYS)
    return min(1.0, blocks / _PROCESSORS)


TABLE = Table(OPERATION, BUCKETS, _filed, BlockSizes)
table_key, find, infer_block_sizes = TABLE.key, TABLE.find, TABLE.infer_block_sizes
