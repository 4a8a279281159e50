"""What tables, searches and probes know of a site, whether its program is there or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from autopallas.compat import ClosedJaxpr
from autopallas.sites.calls import SiteDescription
from autopallas.sites.spec import SiteSpec

__all__ = ["Gradients", "SiteWorkload", "Workload"]


class Workload(Protocol):
    """What a table or a cache has to know: a site, or a direct call of an operation."""

    @property
    def op(self) -> str:
        """The operation's name."""

    @property
    def spec(self) -> SiteSpec:
        """What is computed, as the operation describes it."""

    @property
    def direction(self) -> Literal["forward", "forward+backward"]: ...

    @property
    def original(self) -> ClosedJaxpr:
        """The computation as the program has it, or as the operation's reference has it."""

    @property
    def passes(self) -> Sequence[Workload]:
        """This, and further passes of the same site."""


class Gradients(Protocol):
    """A backward of a site."""

    @property
    def gradients(self) -> tuple[tuple[int, int], ...]:
        """(position among the site's operands, number of the value that is its cotangent)."""


class SiteWorkload(Workload, Protocol):
    """What a search or a probe has to know: a match, or a site that was saved without its program."""

    @property
    def site(self) -> SiteDescription:
        """The site's description."""

    @property
    def backwards(self) -> Sequence[Gradients]:
        """The backwards that the program holds."""

    @property
    def location(self) -> str:
        """ "file:line (function)" of the user's code."""

    @property
    def passes(self) -> Sequence[SiteWorkload]: ...
