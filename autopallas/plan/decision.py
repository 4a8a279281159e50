"""The decision about a recognised site: the planner makes it, and the rewrite carries it out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from autopallas.options import Options
from autopallas.report.live_report import Entry
from autopallas.sites.spec import BlockSizes
from autopallas.tuning.row import Row

__all__ = ["NOTHING_TO_COMPUTE", "WIDER_THAN_ENABLED", "Decision", "size_unknown"]

NOTHING_TO_COMPUTE = "an axis of size 0 leaves nothing to compute"
"""Why a site with an empty array keeps its original, whatever the operation: kernels cut axes into blocks."""

WIDER_THAN_ENABLED = (
    "it computes with 64-bit types, which are not enabled where the function is called; call it with "
    "jax.enable_x64(True) around"
)
"""Why a site from the middle of a program that enables these types itself keeps its original: a kernel would compute
with 32 bits."""


def size_unknown(size: object) -> str:
    """Returns why the original runs where a size is an expression, as in a program that is exported for several."""
    return f"kernels are chosen by sizes, and {size} is not known"


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision about one site on one platform: whether it is replaced, and by what."""

    verdict: Literal["applied", "kept"]
    reason: str
    platform: str
    implementation: str | None = None
    block_sizes: BlockSizes | None = None
    block_sizes_from: Literal["explicit", "cache", "table", "autotune", "nearest", "default"] | None = None
    evidence: Row[BlockSizes] | None = None
    """Row of a table or of the cache that the verdict rests on, or None."""
    attempts: tuple[tuple[str, str, str], ...] = ()
    """(implementation, stage, error) of each implementation that was tried before and cannot be used."""
    kind: str = ""
    """Device kind that the decision is for, by the device's own name; "" for any device of the platform."""
    direction: Literal["forward", "forward+backward"] = "forward"
    options: Options | None = field(default=None, repr=False)
    """Options to plan with again if the program is lowered for another platform; None: the original runs there."""
    raise_on_failure: bool = False
    """Whether a failure of the implementation is raised instead of falling back to the original."""
    entry: Entry | None = field(default=None, repr=False, compare=False)
    """Entry of the site in the report, updated if the original runs after all; every replaced site has its own."""
    mark: int | None = None
    """Number of the site when the original is lowered with marks, to find out how a program is sharded."""
    mapped: bool = False
    """Whether ``vmap`` has made a site of it about which is to be decided anew when it is lowered."""
