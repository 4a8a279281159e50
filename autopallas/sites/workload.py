"""Interfaces through which tables, searches and probes see a site, whether its program is available or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from autopallas.compat import ClosedJaxpr
from autopallas.sites.calls import SiteDescription
from autopallas.sites.spec import SiteSpec

__all__ = ["Gradients", "SiteWorkload", "Workload", "to_measure"]


class Workload(Protocol):
    """Interface for tables and caches: a site, or a direct call of an operation."""

    @property
    def op(self) -> str:
        """Name of the operation."""

    @property
    def spec(self) -> SiteSpec:
        """Computation, as the operation describes it."""

    @property
    def direction(self) -> Literal["forward", "forward+backward"]: ...

    @property
    def original(self) -> ClosedJaxpr:
        """Computation as the program has it, or as the operation's reference has it."""

    @property
    def passes(self) -> Sequence[Workload]:
        """This workload, and further passes of the same site."""


class Gradients(Protocol):
    """A backward of a site."""

    @property
    def gradients(self) -> tuple[tuple[int, int], ...]:
        """(position among the site's operands, number of the value that is its cotangent) for each gradient."""


class SiteWorkload(Workload, Protocol):
    """Interface for searches and probes: a match, or a site that was saved without its program."""

    @property
    def site(self) -> SiteDescription:
        """Description of the site."""

    @property
    def backwards(self) -> Sequence[Gradients]:
        """Backwards that the program holds."""

    @property
    def location(self) -> str:
        """ "file:line (function)" of the user's code."""

    @property
    def passes(self) -> Sequence[SiteWorkload]: ...


def to_measure(match: SiteWorkload) -> SiteWorkload:
    """Returns the workload that is run and timed for a match: its own, or, where its passes leave each other what the
    original lacks, one that computes all of it at once."""
    return getattr(match, "measured", None) or match
