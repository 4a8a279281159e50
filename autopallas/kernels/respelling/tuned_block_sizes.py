"""Evidence for respellings, by kind, feature and size.  There are no block sizes."""

from __future__ import annotations

from autopallas.kernels.respelling.block_sizes import BlockSizes
from autopallas.kernels.respelling.kinds import kind_named
from autopallas.kernels.respelling.operation import OPERATION
from autopallas.kernels.respelling.recomputed_operands import FOR_OTHERS
from autopallas.kernels.respelling.spec import RespellingSpec
from autopallas.sites.workload import Workload
from autopallas.tuning.coverage import Conditions
from autopallas.tuning.table import Bucket, Table, table_device

__all__ = ["BUCKETS", "TABLE", "conditions", "find", "infer_block_sizes", "table_device", "table_key"]

_LARGEST = 2**62

_FOR_OTHERS_FROM = 1.3
"""Smallest gain with which a row holds where an operand that costs little is read by others too: the respelling
computes it anew.  A train step of two convolutions with means over windows of 2 x 2 after their rectifiers took 1.07
times as long with these respelt, where their row gains 1.11 (AVX-512, JAX 0.10.2)."""

BUCKETS: tuple[Bucket, ...] = (
    *(Bucket(f"E{4 * least}", {"E": (least + 1, 16 * least)}) for least in (2**13, 2**17)),
    Bucket("E8388608", {"E": (2**21 + 1, _LARGEST)}),  # arrays that no cache holds, however large
    Bucket("other", {}),  # the smallest
)
"""By the elements of the largest array."""


def _filed(spec: RespellingSpec, implementation: str, direction: str) -> tuple[str, dict[str, int], str]:
    feature = kind_named(spec.kind).feature(spec)
    several = ", mapped" if spec.mapped > 1 else ""
    return direction, {"E": spec.elements}, f"{spec.kind}, {feature}{several}"


def conditions(match: Workload) -> Conditions:
    """Returns what evidence of a kind depends on, beyond the key of its row."""
    assert isinstance(match.spec, RespellingSpec)
    return Conditions(
        elsewhere_from=kind_named(match.spec.kind).elsewhere_from,
        with_jax=True,
        unlike="an operand that other equations read too" if dict(match.spec.parameters).get(FOR_OTHERS) else "",
        unlike_from=_FOR_OTHERS_FROM,
    )


TABLE = Table(OPERATION, BUCKETS, _filed, BlockSizes)
table_key, find, infer_block_sizes = TABLE.key, TABLE.find, TABLE.infer_block_sizes
