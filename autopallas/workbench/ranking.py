"""Ranks candidates for a site's block sizes on a TPU that is not present: compiles ahead of time, and simulates."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from autopallas.autotune.search import Tried, candidates_of
from autopallas.autotune.trial import Trial
from autopallas.compat import ArrayFunction
from autopallas.compile.tpu import Compilation, Compiler
from autopallas.sites.spec import BlockSizes, Sizes
from autopallas.sites.workload import SiteWorkload
from autopallas.tuning.evidence import SIMULATED_MARGIN
from autopallas.tuning.row import running_jax
from autopallas.tuning.table import MEMORY_SLOWDOWN, Row

__all__ = ["Ranking", "ranked"]

_LESS_MEMORY = 0.95
"""Share of the fastest candidate's memory that another one may need at most to be worth a row."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Ranking of a site's candidates without running them.

    Attributes:
      time: the row of the one that is fastest by simulation, with block sizes by name; None: none compiles.
      memory: the row of the one of least memory at a bounded slow-down, if it is another one.
      tried: how far each came.
      reason: why there is no row.
      note: why the original's time is a lower bound though candidates could not be shown to be faster than that.
    """

    time: Row[Sizes] | None
    memory: Row[Sizes] | None
    tried: tuple[Tried, ...]
    reason: str = ""
    note: str = ""


def ranked(
    match: SiteWorkload,
    implementation: str,
    first: BlockSizes,
    compiler: Compiler,
    seconds: float,
    say: Callable[[str], None],
) -> Ranking:
    """Compiles the original and every candidate, and ranks those that compile.

    The time of a program is estimated from its simulated cycles or its traffic with the device's memory, whichever is
    slower.  For the original, arithmetic and traffic give a lower bound of the time.  The original is simulated, if
    possible, only if this bound does not prove a candidate faster.  A candidate that cannot be simulated also gets such
    a bound, and its evidence is "estimated".  Without any simulation the operation's first guess is taken, as for
    kernels whose control flow follows data, which a simulation reads as zeros.

    Args:
      match: the site.
      implementation: the implementation's name.
      first: block sizes to begin with.
      compiler: the compiler for the generation; it simulates where it can.
      seconds: the budget; no candidate begins after it.
      say: called with what is being done.
    """
    begin = time.monotonic()
    trial = Trial.abstract(match)
    say("the original")
    original, reason = _compiled(compiler, trial.original(), trial, seconds, simulate=False)
    if original is None or original.failure is not None:
        return Ranking(None, None, (), f"the original cannot be compiled: {reason or _first_line(original)}")
    tried: list[Tried] = []
    candidates = candidates_of(match, implementation, first, compiler.target.device)
    compiled: list[tuple[BlockSizes, Compilation | None, str]] = []
    for number, sizes in enumerate(candidates, 1):
        left = begin + seconds - time.monotonic()
        if left <= 0:
            tried.append(Tried(sizes.to_dict(), "budget", f"the budget of {seconds:g} seconds was used up"))
            continue
        say(f"candidate {number} of {len(candidates)}")
        compiled.append((sizes, *_compiled(compiler, trial.kernel(implementation, sizes), trial, left)))
    known = [found.estimated_seconds for _, found, _ in compiled if found is not None]
    fastest_known = min((seconds for seconds in known if seconds is not None), default=None)
    note = ""
    if fastest_known is not None and fastest_known * SIMULATED_MARGIN >= original.bound_seconds:
        say("the original, simulated")
        left = max(begin + seconds - time.monotonic(), seconds / 3)
        other, reason = _compiled(compiler, trial.original(), trial, left)
        if other is not None and other.estimated_seconds is not None:
            original = other
        else:
            why = reason if other is None else other.note or _first_line(other)
            note = f"the original's time is a lower bound, from its arithmetic and its traffic: {why}"
    tried = [*(_tried(*one, original, compiler.version) for one in compiled), *tried]
    rows = [cast("Row[Sizes]", one.row) for one in tried if one.row is not None]
    if not rows:
        reasons = dict.fromkeys(f"{one.stage}: {one.error}".split("\n")[0][:300] for one in tried)
        return Ranking(None, None, tuple(tried), f"none of {len(tried)} candidates compiles: {'; '.join(reasons)}")
    # If traffic is the slower for several, fewer cycles are the better choice.
    ordered = sorted((one.row.kernel_us, one.cycles, n) for n, one in enumerate(tried) if one.row and one.cycles)
    simulated = [cast("Row[Sizes]", row) for _, _, n in ordered if (row := tried[n].row) is not None]
    fastest = (simulated or rows)[0]
    bearable = [r for r in simulated or rows if r.kernel_us <= MEMORY_SLOWDOWN * r.original_us]
    least = min(bearable, key=lambda row: row.kernel_bytes, default=fastest)
    lean = least.kernel_bytes < _LESS_MEMORY * fastest.kernel_bytes
    return Ranking(fastest, least if lean else None, tuple(tried), note=note)


def _compiled(
    compiler: Compiler, function: ArrayFunction, trial: Trial, seconds: float, simulate: bool | None = None
) -> tuple[Compilation | None, str]:
    try:
        return compiler.compile(function, trial.arguments, seconds=seconds, simulate=simulate), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _first_line(compilation: Compilation | None) -> str:
    return "" if compilation is None else str(compilation.failure).strip().split("\n")[0]


def _tried(sizes: BlockSizes, found: Compilation | None, reason: str, original: Compilation, version: str) -> Tried:
    if found is None:
        return Tried(sizes.to_dict(), "lower", reason)
    if found.failure is not None:
        return Tried(sizes.to_dict(), found.stage or "compile", found.failure)
    simulated = found.estimated_seconds is not None
    own = found.bound_seconds if found.estimated_seconds is None else found.estimated_seconds
    base = original.bound_seconds if original.estimated_seconds is None else original.estimated_seconds
    row = Row(
        block_sizes=sizes.to_dict(),
        kernel_us=float(f"{max(own, 1e-9) * 1e6:.4g}"),
        original_us=float(f"{max(base, 1e-9) * 1e6:.4g}"),
        kernel_bytes=found.temporary_bytes,
        original_bytes=original.temporary_bytes,
        evidence="simulated" if simulated else "estimated",
        date=datetime.date.today().isoformat(),
        versions=f"{running_jax()}, {version}",
    )
    return Tried(
        sizes.to_dict(),
        error=found.note,
        temporary_bytes=found.temporary_bytes,
        row=row,
        cycles=found.cycles,
        vmem_bytes=found.vmem_bytes,
    )
