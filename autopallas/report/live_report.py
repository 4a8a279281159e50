"""Keeps a report up to date: later events at a site are entered into it.

A replaced site may still turn out to be impossible: when its program is lowered, for another platform, under vmap.
Then the original runs.  The site's equations carry its :class:`Entry`, which records such events, and readers of the
:class:`LiveReport` see them too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopallas.compat import ClosedJaxpr
from autopallas.report.records import Canary, Failure, Report, Site, in_order

__all__ = ["Entry", "LiveReport"]


@dataclass(frozen=True, slots=True)
class _Kept:
    """Why the original runs on a platform, and the exceptions that led to it, each as (stage, error)."""

    reason: str
    errors: tuple[tuple[str, str], ...]


class Entry:
    """Events at one replaced site where it was lowered, per platform."""

    __slots__ = ("_kept", "_ran")

    def __init__(self) -> None:
        self._ran: dict[str, None] = {}
        self._kept: dict[str, _Kept] = {}

    def runs(self, platform: str) -> None:
        """Records that the kernel was lowered for a platform."""
        self._ran[platform] = None

    def keeps(self, platform: str, reason: str, *errors: tuple[str, str]) -> bool:
        """Records that the original was lowered instead, and each (stage, error) to blame; the first reason counts.
        Returns whether this is the first."""
        kept = _Kept(reason, errors)
        return self._kept.setdefault(platform, kept) is kept

    def corrected(self, site: Site, platform: str) -> tuple[Site, list[Failure]]:
        """Returns the current record of the site, and the failures since it was made.

        Only one platform's program runs, so a kernel that runs on one platform stays in the report although another one
        keeps the original; ``platform``, for which the site was planned, takes precedence over the others.
        """
        if site.verdict != "applied" or not self._kept:
            return site, []
        failures = [
            Failure(stage, error, site.op, site.location)
            for kept in self._kept.values()
            for stage, error in kept.errors
        ]
        if platform not in self._kept and (platform in self._ran or self._ran.keys() - self._kept.keys()):
            return site, failures
        where = platform if platform in self._kept else next(iter(self._kept))
        kept = self._kept[where]
        attempts = tuple((site.implementation or "", stage, error) for stage, error in kept.errors)
        return without_kernel(
            site, kept.reason if where == platform else f"on {where}: {kept.reason}", attempts
        ), failures


def without_kernel(site: Site, reason: str, attempts: Sequence[tuple[str, str, str]] = ()) -> Site:
    """Returns the record of a replaced site whose original runs after all."""
    return replace(
        site,
        verdict="kept",
        reason=reason,
        implementation=None,
        numerics=None,
        block_sizes=None,
        running_sizes=None,
        block_sizes_from=None,
        attempts=in_order((*site.attempts, *attempts)),
        replacement="",
    )


class LiveReport:
    """A report, the entries of its sites, in order, None for a site that was not replaced; and the equations that were
    found at each, which are printed when somebody reads the report: that takes a good part of a trace's time.
    """

    def __init__(
        self, report: Report, entries: Sequence[Entry | None] = (), originals: Sequence[ClosedJaxpr | None] = ()
    ):
        self._report = report
        self._entries = tuple(entries)
        self._originals = tuple(originals)
        self.canary: Callable[[], Canary] | None = None
        """What compared calls gave so far."""

    def __call__(self) -> Report:
        """Returns the current report."""
        self._print_originals()
        return self.unprinted()

    def unprinted(self) -> Report:
        """Returns the current report, whose sites may lack the equations that were found."""
        sites, failures = [], list(self._report.failures)
        entries = self._entries or (None,) * len(self._report.sites)
        for site, entry in zip(self._report.sites, entries, strict=True):
            if entry is not None:
                site, further = entry.corrected(site, self._report.platform)
                failures += [failure for failure in further if failure not in failures]
            sites.append(site)
        canary = None if self.canary is None else self.canary()
        return replace(self._report, sites=tuple(sites), failures=tuple(failures), canary=canary)

    def _print_originals(self) -> None:
        originals = self._originals
        if originals:
            texts = {id(program): "" if program is None else _printed(program) for program in originals}
            pairs = zip(self._report.sites, originals, strict=True)
            sites = tuple(replace(site, original=texts[id(program)]) for site, program in pairs)
            self._report, self._originals = replace(self._report, sites=sites), ()

    def site_of(self, entry: Entry | None) -> Site | None:
        """Returns the record of the site to which an entry belongs, as it was planned; None for one of no site."""
        self._print_originals()
        pairs = zip(self._report.sites, self._entries, strict=False)
        return next((site for site, own in pairs if own is entry and own is not None), None)

    def counts(self) -> Counter[str]:
        """Returns the counts of the current report."""
        return self.unprinted().counts()

    def add(self, *failures: Failure) -> None:
        """Adds failures of the whole program."""
        self._report = replace(self._report, failures=(*self._report.failures, *failures))

    def leave(self, reason: str) -> None:
        """Records that the original runs: for every replaced site, and for what was rematerialised."""
        sites = tuple(
            without_kernel(site, reason) if site.verdict == "applied" else site for site in self._report.sites
        )
        self._report = replace(self._report, sites=sites, rematerialised=())


def _printed(program: ClosedJaxpr) -> str:
    try:
        return str(program)
    except Exception as error:
        return f"the equations cannot be printed: {type(error).__name__}: {error}"
