"""The whole pipeline on one screen, from jaxpr to jaxpr: graph, patterns, sharding, plan, rewrite, report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Protocol, TypeAlias, runtime_checkable

from autopallas import compat, jaxprs
from autopallas.autotune.probe import Prober
from autopallas.autotune.tuner import Tuner
from autopallas.compat import ArrayFunction, ClosedJaxpr
from autopallas.environment import REMATERIALISATION
from autopallas.errors import RequirementError, warn
from autopallas.fallback.bisect import is_bisecting, only_allowed
from autopallas.fallback.splice import splice_what_can_be
from autopallas.fallback.warn import warn_not_used, warn_passed_over
from autopallas.faults import MEANT, collecting, contained, in_words
from autopallas.gc_pause import paused
from autopallas.graph import (
    Graph,
    Parting,
    added_products,
    bring_indices_out,
    flatten,
    move_heads_out,
    move_selections,
    part_columns,
    part_gradients,
    select_fills,
    sizes,
    take_logits_apart,
)
from autopallas.numerics.classes import allows
from autopallas.numerics.promote import usual_promotion
from autopallas.options import Options
from autopallas.passes import Passes
from autopallas.patterns import Match, NearMiss, find
from autopallas.plan.allowed_places import deny_places, selecting_nothing
from autopallas.plan.choose_implementation import plan
from autopallas.plan.decision import Decision, size_unknown
from autopallas.plan.exclusions import leaving_out, without_left_out
from autopallas.plan.neighbours import without_lonely
from autopallas.plan.nested_sites import without_nested
from autopallas.report import Failure, Rematerialised, Report, Site
from autopallas.report import NearMiss as NearMissRecord
from autopallas.report.describe import Describer
from autopallas.report.live_report import LiveReport
from autopallas.rewrite.rematerialisation.conditions import Extent, limit_of, obstacle_to, wanted_extent
from autopallas.rewrite.rematerialisation.rematerialise import rematerialise
from autopallas.rewrite.sites import splice
from autopallas.sharding.call_shardings import Shardings
from autopallas.sharding.shard_sites import shard_sites
from autopallas.sites.device import Device
from autopallas.sites.operation import provided
from autopallas.sites.providers import PROVIDERS
from autopallas.trace_context import TraceContext
from autopallas.tuning import certificate, processor
from autopallas.tuning import lock as lockfile
from autopallas.tuning.cache import WARNED

__all__ = [
    "OptimizedFunction",
    "Place",
    "find_sites",
    "inside",
    "require",
    "require_certified",
    "rewrite",
    "rewritten",
]

_LEAST_LOGITS = 2**16
"""Fewest logits for which a product of several readers is taken apart, unless sites are replaced without evidence."""
_MOST_EQUATIONS, _MOST_COPIES = 2**19, 16
"""Equations of a program with its calls written out, and how many times as many as it is written in, from which on it
is left as it is: functions that call one another twice are twice as many with each of them."""
_ALL = Parting.SUMS | Parting.COLUMNS


Place: TypeAlias = tuple[str, str]
"""The operation and the location of a site, as reports have them."""


@runtime_checkable
class OptimizedFunction(Protocol):
    """Interface of an optimized function for modules other than the decorator's."""

    _inner: ArrayFunction
    """Function that is traced."""
    _explicit: Mapping[str, object]
    """Options of the function itself."""


inside = TraceContext(False)
"""Whether an optimized function is being traced.  The outermost one owns the rewrite.  Part of the trace key."""


def rewrite(
    program: ClosedJaxpr, options: Options, probes: bool = True, shardings: Shardings | None = None
) -> tuple[ClosedJaxpr, Report]:
    """Runs the pipeline from a closed jaxpr to a closed jaxpr, and reports on it.

    The program is returned unchanged if nothing was replaced, or if a stage failed that all sites share; a failure in
    the work on one site costs only that site.  ``probes`` tells whether kernels may be compiled for it, ``shardings``
    how its arguments and results are spread over devices.
    """
    result, report = rewritten(program, options, probes, shardings)
    return result, report()


def rewritten(
    program: ClosedJaxpr,
    options: Options,
    probes: bool,
    shardings: Shardings | None,
    disabled: Mapping[Place, str] = MappingProxyType({}),
    parts: Parting = _ALL,
) -> tuple[ClosedJaxpr, LiveReport]:
    """Does the same as :func:`rewrite`, and returns a report that later events can update.

    ``disabled`` has the sites that were found to be wrong, and the reasons; ``parts`` tells what may
    be computed by more products, where sites compute these.
    """
    provided()  # operations of other packages are looked for too
    device = Device.current()
    options = lockfile.pinned(options)
    tuner = Tuner(device, options, probes)
    run = Passes(program, checked=options.strict)
    if obstacle := _too_large(program) or _unknown_sizes(program):
        report = _report((), (), (), tuner, device, run, (f"the program stays as it was: {obstacle}",))
        require(report, options)
        return program, LiveReport(report, [])
    result = program
    sites: tuple[Site, ...] = ()
    originals: tuple[ClosedJaxpr | None, ...] = ()
    misses: list[NearMiss] = []
    decisions: list[Decision] = []
    notes: tuple[str, ...] = ()
    again: tuple[Rematerialised, ...] = ()
    with collecting(options.strict) as failures, usual_promotion():
        try:
            graph, matches, misses = find_sites(run, program, options, shardings is not None, parts)
            notes = selecting_nothing(graph, matches, options)
            matches = run("partition", "shard sites", shard_sites, program, graph, matches, shardings, options.strict)
            with Prober(device, options, probes) as prober:
                decisions = run("plan", "choose implementations", plan, matches, device, options, tuner, prober)
                matches, decisions = run("plan", "drop nested sites", without_nested, graph, matches, decisions)
                decisions = run("plan", "leave out suspects", only_allowed, matches, decisions, device)
                decisions = run("plan", "leave out disabled", _without_disabled, matches, decisions, disabled)
                decisions = run("plan", "leave out sites", without_left_out, matches, decisions)
                decisions = run("plan", "leave out lonely sites", without_lonely, matches, decisions, options)
            wanted = wanted_extent(program, options, graph, device, shardings)
            if added := parts & _added(graph, matches, decisions, bool(wanted)):
                return rewritten(program, options, probes, shardings, disabled, parts & ~added)
            describer = Describer()
            decisions = run("report", "describe sites", describer.accountable, matches, decisions)
            with paused():
                result, decisions = run(
                    "rewrite", "splice", splice_what_can_be, program, graph, matches, decisions, options.strict
                )
            if wanted and not (disabled or leaving_out.value or is_bisecting()):
                if not (obstacle := obstacle_to(program, options, device)):
                    with contained(op=REMATERIALISATION, stage="rewrite"):
                        less = partial(_with_less_kept, extent=wanted, platform=device.platform)
                        result, again = run("rewrite", "rematerialise", less, program, graph, result)
                        if wanted == "stacks" and not again:
                            obstacle = f"no scan stacks what follows from less, and {limit_of(device)}"
                if obstacle and wanted != "fast stacks":
                    notes = (*notes, f"{REMATERIALISATION}: {obstacle}")
            sites = run("rewrite", "record sites", describer.records, matches, decisions)
            originals = describer.originals(matches, decisions)
            if failures:
                WARNED.once(str(failures), in_words(failures))
            failures += [failure for failure in _failures(sites) if failure not in failures]
            warn_passed_over(matches, decisions, options)
            for match, *failed in prober.found:
                warn_not_used(match.op, match.location, *failed)
        except MEANT:
            raise
        except Exception as error:
            if options.strict:
                raise
            result, sites, originals, decisions, again = program, (), (), [], ()
            failures.append(Failure(run.stage, f"{type(error).__name__}: {error}"))
            warn(f"autopallas left a program as it was: {run.stage} failed with {type(error).__name__}: {error}")
    report = _report(sites, misses, failures, tuner, device, run, notes, again)
    require(report, options)
    return result, LiveReport(report, [decision.entry for decision in decisions], originals)


def _with_less_kept(
    program: ClosedJaxpr, graph: Graph, result: ClosedJaxpr, extent: Extent, platform: str
) -> tuple[ClosedJaxpr, tuple[Rematerialised, ...]]:
    """Rematerialises in what became of a program, with calls inlined also where no site was replaced."""
    flat = result if result is not program else jaxprs.with_weak_types(splice(graph, (), ()), program)
    found, again = rematerialise(flat, extent, platform)
    return (found, again) if again else (result, ())


def _unknown_sizes(program: ClosedJaxpr) -> str:
    """Returns why a program cannot be rewritten some of whose arguments' sizes are expressions; nothing for others."""
    every = (size for aval in program.in_avals for size in getattr(aval, "shape", ()))
    unknown = ", ".join(dict.fromkeys(str(size) for size in every if not isinstance(size, int)))
    return size_unknown(unknown) if unknown else ""


def _too_large(program: ClosedJaxpr) -> str:
    """Returns why a program is not looked at whose functions call each other so often that it would take minutes."""
    written, flat = sizes(program)
    if flat <= max(_MOST_EQUATIONS, _MOST_COPIES * written):
        return ""
    return f"its {written} equations are {flat} where each call is written out"


def _report(
    sites: tuple[Site, ...],
    misses: Sequence[NearMiss],
    failures: Sequence[Failure],
    tuner: Tuner,
    device: Device,
    run: Passes,
    notes: tuple[str, ...],
    again: tuple[Rematerialised, ...] = (),
) -> Report:
    return Report(
        sites=sites,
        near_misses=tuple(NearMissRecord(miss.op, miss.location, miss.reason, miss.advice) for miss in misses),
        failures=(*failures, *(Failure("providers", f"{f.provider}: {f.error}") for f in PROVIDERS.faults)),
        tuning={"searches": tuner.searches, "cache_hits": tuner.cache_hits},
        platform=device.platform,
        device_kind=device.kind,
        versions={**compat.versions(), **processor.told(device)},
        trace=tuple(run.done),
        notes=notes,
        rematerialised=again,
    )


def find_sites(
    run: Passes, program: ClosedJaxpr, options: Options, divided: bool, parts: Parting = _ALL
) -> tuple[Graph, list[Match], list[NearMiss]]:
    """Finds the sites of a program, and marks those at places that are denied.

    Args:
      run: runs the passes.
      program: a closed jaxpr.
      options: the options in force.
      divided: whether arrays are spread over several devices.
      parts: what may be computed by more products, where sites then compute these.
    """
    moves = allows(options.numerics, "reordered")
    found = _recognised(run, program, options, divided, moves, parts)
    while moves and (added := parts & added_products(found[0], _computed(found[1]))):
        parts &= ~added
        found = _recognised(run, program, options, divided, moves, parts)
    if moves and any(match.denied for match in found[1]):  # at their places nothing is to be moved either
        unmoved = _recognised(run, program, options, divided, moves=False, parts=Parting(0))
        if _allowed(unmoved[1]) >= _allowed(found[1]):
            return unmoved
    return found


def _recognised(
    run: Passes, program: ClosedJaxpr, options: Options, divided: bool, moves: bool, parts: Parting
) -> tuple[Graph, list[Match], list[NearMiss]]:
    """Finds the sites; ``moves`` tells whether what stands in the way of one may be moved before, ``parts`` what
    may be computed by more products.
    """
    with paused():
        body = run("graph", "flatten", flatten, program)
        if moves:
            body = run("graph", "move heads out of checkpoints", move_heads_out, body)
            body = run("graph", "bring indices out of custom rules", bring_indices_out, body)
            body = run("graph", "select fills of columns", select_fills, body)
            body = run("graph", "take joined logits apart", take_logits_apart, body)
            body = run("graph", "move row selections", move_selections, body, options.assume_finite, divided)
            if Parting.SUMS in parts:
                body = run("graph", "part gradients of scores", part_gradients, body)
            if Parting.COLUMNS in parts and not divided:  # columns that several devices hold would be sent around
                least = 0 if options.objective == "always" else _LEAST_LOGITS
                body = run("graph", "part columns of products", part_columns, body, least, options.assume_finite)
        graph = run("graph", "number values", Graph, body)
        matches, misses = run(
            "patterns", "find sites", find, graph, options.ops, options.assume_finite, options.objective
        )
    return graph, run("plan", "deny places", deny_places, graph, matches, options), misses


def _added(graph: Graph, matches: Sequence[Match], decisions: Sequence[Decision], again: bool) -> Parting:
    """Returns for what the rewritten program would compute products that the program itself lacks.

    ``again`` tells whether it may be rewritten where no site is replaced, since something is computed again.
    """
    applied = [match for match, decision in zip(matches, decisions, strict=True) if decision.verdict == "applied"]
    return added_products(graph, _computed(applied)) if applied or again else Parting(0)


def _computed(matches: Iterable[Match]) -> set[int]:
    """Returns the numbers of the values that sites compute."""
    return {number for match in matches for number in match.replaced}


def _allowed(matches: Sequence[Match]) -> int:
    return sum(not match.denied for match in matches)


def _without_disabled(
    matches: Sequence[Match], decisions: list[Decision], disabled: Mapping[Place, str]
) -> list[Decision]:
    """Keeps the originals of sites that are disabled."""
    result = []
    for match, decision in zip(matches, decisions, strict=True):
        reason = disabled.get((match.op, match.location), "") if decision.verdict == "applied" else ""
        result.append(replace(decision, verdict="kept", reason=f"disabled: {reason}") if reason else decision)
    return result


def _failures(sites: Sequence[Site]) -> list[Failure]:
    """Returns the implementations that should have worked and did not, once for each operation and reason."""
    found: dict[tuple[str, str, str], Failure] = {}
    for site in sites:
        for _, stage, error in site.attempts:
            if stage not in ("supports", "tune"):
                found.setdefault((site.op, stage, error), Failure(stage, error, site.op, site.location))
    return list(found.values())


def require(report: Report, options: Options) -> None:
    counts = report.counts()
    if options.require == "lockfile":
        return
    short = [f"{op}: {counts[op]} of {wanted}" for op, wanted in options.require if counts[op] < wanted]
    if short:
        raise RequirementError(f"fewer sites were replaced than required ({', '.join(short)})\n\n{report}")


def require_certified(program: ClosedJaxpr, report: Report, options: Options) -> None:
    """Raises RequirementError where the lockfile has to certify a rewritten program and does not."""
    if options.require != "lockfile" or options.lock is None:
        return
    problem = certificate.problem(program, lockfile.read(options.lock), Device.current())
    if problem:
        raise RequirementError(f"the lockfile {options.lock} does not certify this program: {problem}\n\n{report}")
