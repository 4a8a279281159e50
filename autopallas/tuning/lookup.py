"""Looks up what the tables know of a site: block sizes, and the evidence for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autopallas.sites.device import Device
from autopallas.sites.operation import operation_named
from autopallas.sites.spec import BlockSizes
from autopallas.sites.workload import Workload
from autopallas.tuning import coverage
from autopallas.tuning.table import Row, table_device

__all__ = ["Choice", "of_table"]


@dataclass(frozen=True, slots=True)
class Choice:
    """Block sizes and their evidence, or why the implementation must not be used.

    Attributes:
      block_sizes: valid for the shape.
      source: where they come from.
      row: the row that they come from, or None.
      failure: None, or why the implementation does not work for this site.
      gap: why the table's row of this bucket does not hold for this site, or an empty string.
      owner: the device that the table has the row for, if it is another one; else an empty string.
      note: why a search found nothing, or an empty string.
    """

    block_sizes: BlockSizes | None
    source: Literal["cache", "table", "autotune", "nearest", "default"]
    row: Row[BlockSizes] | None = None
    failure: str | None = None
    note: str = ""
    gap: str = ""
    owner: str = ""

    @property
    def exact(self) -> bool:
        """Whether the row was measured for such a site, so that it can justify a replacement."""
        return self.row is not None and self.source in ("cache", "table", "autotune") and not self.gap


def of_table(match: Workload, implementation: str, device: Device, objective: str = "time") -> Choice:
    """Returns what the tables know of a match (its ``op``, ``spec``, ``direction`` and ``original``) on a device."""
    tables = operation_named(match.op).part("tuned_block_sizes")
    form = coverage.form_of(match, device)
    found = tables.find(match.spec, device, implementation, match.direction, objective, form)
    sizes = tables.infer_block_sizes(match.spec, device, implementation, match.direction, objective, form)
    if found is None:
        return Choice(sizes, "default")
    uncovered = ""
    if found.source == "table":
        uncovered = coverage.gap_of_work(match, device) or coverage.gap(found.row, match, device, found.own_form)
    owner = found.owner if found.owner != table_device(device) else ""
    return Choice(sizes, found.source, found.row, gap=uncovered, owner=owner)
