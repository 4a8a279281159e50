"""What becomes of a recognised site: the word that the planner says and the rewrite obeys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from autopallas.options import Options
from autopallas.report.late import Entry
from autopallas.sites.spec import BlockSizes
from autopallas.tuning.row import Row

__all__ = ["Decision"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one site on one platform."""

    verdict: Literal["applied", "kept"]
    reason: str
    platform: str
    implementation: str | None = None
    block_sizes: BlockSizes | None = None
    block_sizes_from: Literal["explicit", "cache", "table", "autotune", "nearest", "default"] | None = None
    evidence: Row[BlockSizes] | None = None
    """The row of a table or of the cache that the verdict rests on, or None."""
    attempts: tuple[tuple[str, str, str], ...] = ()
    """(implementation, stage, error) of those that were asked before and cannot."""
    kind: str = ""
    """The device that it is for, by its own name; "" for any of the platform."""
    direction: Literal["forward", "forward+backward"] = "forward"
    options: Options | None = field(default=None, repr=False)
    """What was asked for, should the program be lowered for another platform; None: there the original runs."""
    raise_on_failure: bool = False
    """Whether a failure of it is raised, in place of a fallback."""
    entry: Entry | None = field(default=None, repr=False, compare=False)
    """Where in the report it is entered if the original runs after all; every replaced site has its own."""
    mark: int | None = None
    """A number under which the original is lowered with marks, to find out how a program is divided among devices."""
