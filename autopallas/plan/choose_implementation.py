"""Decides whether a recognised site is replaced, by which implementation, with which block sizes, on what evidence."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, cast

import jax

from autopallas import array_types, compat, jaxprs
from autopallas.autotune.probe import Prober
from autopallas.autotune.tuner import Tuner
from autopallas.compat import Shaped
from autopallas.custom import check
from autopallas.custom.operation import pattern_of
from autopallas.custom.registry import Pattern
from autopallas.errors import UnsupportedError
from autopallas.faults import MEANT
from autopallas.numerics.classes import allows
from autopallas.options import Options
from autopallas.patterns.match import Match
from autopallas.plan.decision import NOTHING_TO_COMPUTE, WIDER_THAN_ENABLED, Decision
from autopallas.plan.shared_values import without_shared_values
from autopallas.report.live_report import Entry
from autopallas.sharding.local import local_match
from autopallas.sites.calls import kernel_backward, kernel_forward
from autopallas.sites.device import Device
from autopallas.sites.interpret import interpretation, settled
from autopallas.sites.operation import HOME, Operation, Unsupported
from autopallas.sites.sharded_site import ShardedSite
from autopallas.sites.spec import NoBlockSizes, SiteSpec
from autopallas.tuning import lock as lockfile
from autopallas.tuning.coverage import REMEDY
from autopallas.tuning.evidence import Evidence, in_words, ranked
from autopallas.tuning.lookup import Choice, of_table

__all__ = ["evaluate_candidates", "plan"]


def plan(
    matches: Sequence[Match], device: Device, options: Options, tuner: Tuner, prober: Prober | None = None
) -> list[Decision]:
    """Returns a decision for each match.  Equal sites share one; at most ``options.fuel`` sites are applied.

    Args:
      matches: the sites.
      device: where the program will run.
      options: the options in force.
      tuner: supplies block sizes, and counts the cost of finding them.
      prober: knows which kernels fail; None: nothing is known, and nothing is tried.

    Raises:
      UnsupportedError: the options name a single implementation, and it does not support some site.
      OptionError: the options name a lockfile that cannot be read.
    """
    lock = None if options.lock is None else lockfile.read(options.lock)
    prober = prober or Prober(device, options, runs=False)
    known: dict[Hashable, Decision] = {}
    decisions: list[Decision] = []
    applied = 0
    for match in matches:
        key: Hashable = None
        try:
            key = (
                match.op,
                tuple(part.site for part in match.passes),
                match.direction,
                match.obstacle,
                match.shared,
                match.denied,
            )
            found = known.get(key)
            if found is None:
                found = known[key] = _decide(match, device, options, tuner, prober, lock)
            decision = found
        except MEANT:
            raise
        except Exception as error:
            if options.strict:
                raise
            reason = f"{type(error).__name__}: {error}"
            prober.found.append((match, "any implementation", "plan", reason))
            attempts = (("", "plan", reason),)
            decision = Decision("kept", f"planning failed: {reason}", device.platform, attempts=attempts)
            with contextlib.suppress(TypeError):  # a faulty site may have no hash
                known[key] = decision
        if decision.verdict == "applied":
            applied += 1
            decision = replace(decision, entry=Entry())
            if options.fuel is not None and applied > options.fuel:
                decision = replace(decision, verdict="kept", reason=f"the fuel of {options.fuel} is used up")
        decisions.append(decision)
    return without_shared_values(matches, decisions)


def _decide(
    match: Match, device: Device, options: Options, tuner: Tuner, prober: Prober, lock: lockfile.Lock | None
) -> Decision:
    if match.denied:
        return Decision("kept", match.denied, device.platform)
    if any(0 in aval.shape for part in match.passes for aval in (*part.original.in_avals, *part.original.out_avals)):
        return Decision("kept", NOTHING_TO_COMPUTE, device.platform)
    if not compat.numeric_setting()[0] and any(jaxprs.is_wide(part.original) for part in match.passes):
        return Decision("kept", WIDER_THAN_ENABLED, device.platform)
    if match.obstacle:
        return _decide_obstructed(match, device, options)
    if match.shared and options.objective == "time" and options.implementation_for(match.op) is None:
        reason = f"{match.shared}; measurements of one such site by itself are no evidence of time"
        return Decision("kept", reason, device.platform)
    pattern = pattern_of(match.site)
    if pattern is not None:
        return _decide_custom(match, pattern, device, options, tuner, prober, lock)
    if lock is not None and options.implementation_for(match.op) is None:
        return _decide_by_lockfile(match, device, options, lock, prober)
    return _decide_by_evidence(match, device, options, tuner, prober)


def _decide_by_evidence(match: Match, device: Device, options: Options, tuner: Tuner, prober: Prober) -> Decision:
    """Picks the supported implementation with the best evidence that also passes the probe and the type check."""
    operation: Operation = match.site.operation
    wanted = options.implementation_for(operation.name)
    # An implementation of another platform is named for programs that will be exported, so this device cannot try it.
    foreign = isinstance(wanted, str) and HOME.get(wanted, device.platform) != device.platform and not interpretation()
    if isinstance(wanted, str) and foreign:
        device = Device(HOME[wanted], "")
    foreign = foreign or not device.here
    measured = local_match(match)
    attempts: list[tuple[str, str, str]] = []

    def choices(names: Sequence[str]) -> Mapping[str, Choice]:
        if foreign:
            return {name: of_table(match, name, device, options.objective) for name in names}
        return tuner.choices(measured, names)

    for decision in evaluate_candidates(operation, match.spec, device, options, choices, attempts):
        if decision.verdict == "kept":
            return decision
        name, sizes = decision.implementation or "", decision.block_sizes
        assert sizes is not None
        found_now = decision.block_sizes_from == "autotune"
        objection: tuple[str, str] | None = None
        if not foreign:
            objection = prober.objection(measured, name, sizes, again=isinstance(wanted, str), measured=found_now)
        if objection is None:
            try:
                with device.checked(), settled(), array_types.lowered_on_mesh_of(match.original.in_avals):
                    for part in match.passes:
                        _check_types(part, decision)
                return replace(decision, kind=device.kind, direction=match.direction, options=options)
            except Exception as error:
                if options.strict or isinstance(wanted, str):
                    raise
                objection = "trace", f"{type(error).__name__}: {error}"
                prober.record_failure(measured, name, sizes, *objection)
        attempts.append((name, *objection))
    tried = next((name for name, stage, _ in attempts if stage != "supports"), "")
    told = _told(operation, device, tried, attempts)
    why = "; ".join(f"{name}: {reason}" for name, _, reason in told)
    if _is_demanded(wanted, operation, options):
        raise UnsupportedError(f"{operation.name} was to run on {wanted} only: {why}. The site: {match.spec}")
    pinned = all(reason.startswith(_NOT_ALLOWED) for _, _, reason in told)
    reason = why if pinned else f"no implementation can compute it ({why})"
    return Decision("kept", reason, device.platform, attempts=told)


def _is_demanded(wanted: str | Sequence[str] | None, operation: Operation, options: Options) -> bool:
    """Returns whether a site must run on one implementation: it is named alone, and either for this operation or one
    that the operation has."""
    own = operation.name in dict(options.implementation_of)
    return isinstance(wanted, str) and (own or operation.has(wanted))


def _decide_obstructed(match: Match, device: Device, options: Options) -> Decision:
    wanted = options.implementation_for(match.op)
    if _is_demanded(wanted, match.site.operation, options):
        raise UnsupportedError(f"{match.op} was to run on {wanted} only: {match.obstacle}. The site: {match.spec}")
    return Decision("kept", match.obstacle, device.platform)


def _decide_custom(
    match: Match,
    pattern: Pattern,
    device: Device,
    options: Options,
    tuner: Tuner,
    prober: Prober,
    lock: lockfile.Lock | None,
) -> Decision:
    """Decides about a custom pattern.  The user asked for it, so the comparison with the reference is the evidence;
    where it has block sizes and they were measured, the figures count too."""
    operation, name = match.site.operation, match.site.operation.usual(device)
    answer = operation.supports(name, match.spec, device)
    if not isinstance(answer, Unsupported):
        answer = _allowed(operation, name, match.spec, options) or answer
    if isinstance(answer, Unsupported):
        return Decision("kept", answer.reason, device.platform)
    if pattern.block_sizes and lock is not None:
        decision = _decide_by_lockfile(match, device, options, lock, prober)
        if decision.verdict == "applied":
            decision = replace(decision, reason=f"its block sizes are those of the lockfile {options.lock}")
    elif pattern.block_sizes:
        decision = _decide_by_figures(match, device, options, tuner, prober)
    else:
        decision = Decision("applied", "", device.platform, name, NoBlockSizes(), kind=device.kind, options=options)
    if decision.verdict == "kept":
        return decision
    sizes = decision.block_sizes or NoBlockSizes()
    equal, reason = check.check_replacement(match, sizes, options.strict, prober.runs)
    if not equal:
        return Decision("kept", reason, device.platform, attempts=decision.attempts)
    if isinstance(match.site, ShardedSite):
        with array_types.on_mesh_of(match.original.in_avals):
            _check_types(match, decision)
    reason = "; ".join(filter(None, (reason, decision.reason)))
    return replace(decision, reason=reason, direction=match.direction)


def _decide_by_figures(match: Match, device: Device, options: Options, tuner: Tuner, prober: Prober) -> Decision:
    """Finds the block sizes of a custom pattern; keeps the original where they were measured and gain nothing."""
    name, measured = match.site.operation.usual(device), local_match(match)
    choice = tuner.choices(measured, (name,))[name]
    sizes, evidence = choice.block_sizes, Evidence.of(choice.row, options.objective) if choice.exact else None
    if sizes is None:
        return Decision("kept", choice.failure or "", device.platform, name)
    reason = f"its block sizes were not measured{f' (a search found nothing: {choice.note})' if choice.note else ''}"
    decision = Decision(
        "applied", reason, device.platform, name, sizes, choice.source, choice.row, kind=device.kind
    )  # without options, since on another platform it was not compared
    if evidence is not None and options.objective != "always" and not evidence.licenses:
        return replace(decision, verdict="kept", reason=evidence.reason)
    if evidence is not None:
        decision = replace(decision, reason=str(evidence))
    objection = prober.objection(measured, name, sizes, again=False, measured=choice.source == "autotune")
    if objection is not None:
        return replace(decision, verdict="kept", reason=f"{name} failed", attempts=((name, *objection),))
    return decision


def _decide_by_lockfile(
    match: Match, device: Device, options: Options, lock: lockfile.Lock, prober: Prober
) -> Decision:
    """Follows the lockfile.  A site that it lacks keeps its original, so that every process runs the same program."""

    def kept(reason: str, *attempt: str) -> Decision:
        attempts = (cast(tuple[str, str, str], attempt),) if attempt else ()
        return Decision("kept", f"{reason} (lockfile {options.lock})", device.platform, attempts=attempts)

    if (lock.platform, lock.device_kind) != (device.platform, device.kind):
        return kept(f"the lockfile is for {lock.platform} ({lock.device_kind}), not {device.platform} ({device.kind})")
    site = lock.find(match)
    if site is None:
        return kept("the lockfile has no such site")
    if site.verdict == "kept" or site.implementation is None:
        return kept(site.reason)
    operation: Operation = match.site.operation
    answer = operation.supports(site.implementation, match.spec, device)
    if not isinstance(answer, Unsupported):
        answer = _allowed(operation, site.implementation, match.spec, options) or answer
    if isinstance(answer, Unsupported):
        return kept(f"{site.implementation} cannot compute it", site.implementation, "supports", answer.reason)
    try:
        given = site.sizes_for(match.op)
        sizes = given.fitted(match.spec)
        reason = f"{site.reason} (lockfile {options.lock})"
        decision = Decision(
            "applied",
            reason,
            device.platform,
            site.implementation,
            sizes,
            "explicit",
            site.row(given),
            raise_on_failure=options.strict,
        )
        objection = prober.objection(local_match(match), site.implementation, sizes, again=False, measured=False)
        if objection is not None:
            return kept(f"{site.implementation} failed", site.implementation, *objection)
        with array_types.on_mesh_of(match.original.in_avals):
            for part in match.passes:
                _check_types(part, decision)
    except Exception as error:
        if options.strict:
            raise
        return kept(
            f"{site.implementation} cannot be used", site.implementation, "trace", f"{type(error).__name__}: {error}"
        )
    return decision


def _check_types(match: Match, decision: Decision) -> None:
    """Checks by tracing that the kernels give the types that the original and its derivative give.

    Lowering finds what is traced here, since it calls the same functions with tuples of the same types.
    """
    name, sizes = decision.implementation or "", decision.block_sizes
    original, of = match.original, array_types.shape_of if isinstance(match.site, ShardedSite) else _shape
    operands, cotangents = [list(map(of, avals)) for avals in (original.in_avals, original.out_avals)]
    results, residuals = jax.eval_shape(kernel_forward(match.site, name, sizes), *operands)
    _same((*results, *residuals), (*cotangents, *match.site.residual_types()))
    if not match.site.has_backward:
        return
    for active in {tuple(position for position, _ in backward.gradients) for backward in match.backwards}:
        backward = kernel_backward(match.site, name, sizes, active)
        given = (operands, results, residuals, cotangents)
        gradients = jax.eval_shape(backward, *map(tuple, given))
        _same(gradients, [operands[position] for position in active])


def _same(found: Sequence[Shaped], types: Sequence[Shaped]) -> None:
    for given, wanted in zip(found, types, strict=True):
        if (given.shape, given.dtype) != (wanted.shape, wanted.dtype):
            raise TypeError(f"the kernel gives {given.dtype}{given.shape}, the original {wanted.dtype}{wanted.shape}")


def _shape(aval: Shaped) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def evaluate_candidates(
    operation: Operation,
    spec: SiteSpec,
    device: Device,
    options: Options,
    choices: Callable[[Sequence[str]], Mapping[str, Choice]],
    attempts: list[tuple[str, str, str]],
) -> Iterator[Decision]:
    """Yields a go or no-go decision for each supported implementation, in the order in which they are to be tried.

    Implementations that the user names keep the user's order; without names, the best evidence comes first.

    Args:
      operation: the site's operation.
      spec: the site's spec.
      device: where it will run.
      options: the options in force.
      choices: returns block sizes and evidence for the named implementations.
      attempts: (implementation, stage, error) of the failures so far.  Implementations without support or whose tuning
        failed are appended here; the caller appends those that fail later.
    """
    wanted = options.implementation_for(operation.name)

    def among(names: Sequence[str]) -> Iterator[Decision]:
        found = choices(names)
        attempts.extend((name, "tune", choice.failure) for name, choice in found.items() if choice.failure is not None)
        order = ranked({name: choice for name, choice in found.items() if choice.failure is None}, options.objective)
        for position, (name, choice) in enumerate(order):
            decision = _go_or_no_go(operation, name, choice, device, options, _told(operation, device, name, attempts))
            yield replace(decision, reason=decision.reason + in_words(order[position:], options.objective))

    able: list[str] = []
    for name, answer in operation.candidates(spec, device, wanted):
        if not isinstance(answer, Unsupported):
            answer = _allowed(operation, name, spec, options) or answer
        if isinstance(answer, Unsupported):
            attempts.append((name, "supports", answer.reason))
        elif wanted is None:
            able.append(name)
        else:
            yield from among([name])
    if able:
        yield from among(able)


def _allowed(operation: Operation, name: str, spec: SiteSpec, options: Options) -> Unsupported | None:
    """Returns why the option ``numerics`` does not allow an implementation, or None where it does."""
    stated = operation.numerics(name, spec)
    if allows(options.numerics, stated):
        return None
    return Unsupported(f"{_NOT_ALLOWED}{options.numerics!r} does not allow its results, which are {_RELATION[stated]}")


_NOT_ALLOWED = "numerics "
_RELATION = {
    "identical": "identical",
    "reordered": "sums in another order",
    "tolerance": "within the tolerance",
}


def _told(
    operation: Operation, device: Device, name: str, attempts: Sequence[tuple[str, str, str]]
) -> tuple[tuple[str, str, str], ...]:
    """Returns the attempts without implementations that cannot compute the site and would come after the named one."""
    order = operation.order.get(device.platform, ())
    later = order[order.index(name) + 1 :] if name in order else ()
    return tuple(attempt for attempt in attempts if attempt[1] != "supports" or attempt[0] not in later)


def _go_or_no_go(
    operation: Operation,
    name: str,
    choice: Choice,
    device: Device,
    options: Options,
    attempts: tuple[tuple[str, str, str], ...],
) -> Decision:
    """Decides go or no-go for one supported implementation."""
    row = choice.row

    def decision(verdict: Literal["applied", "kept"], reason: str) -> Decision:
        must = options.strict or isinstance(options.implementation_for(operation.name), str)
        sizes, source = choice.block_sizes, choice.source
        return Decision(verdict, reason, device.platform, name, sizes, source, row, attempts, raise_on_failure=must)

    if options.implementation_for(operation.name) is not None:
        return decision("applied", "the implementation was asked for by name")
    if options.objective == "always":
        return decision("applied", 'objective "always" asks for no evidence')
    tried = f" (a search found nothing: {choice.note})" if choice.note else f" ({REMEDY})"
    if choice.gap:
        return decision("kept", f"{choice.gap}, so the original stays{tried}")
    if (row is None or not choice.exact) and operation.only_restates(name):
        reason = f"there is no kernel of it for this platform ({device.platform}), so the original stays"
        return Decision("kept", reason, device.platform, attempts=attempts)
    if row is None or not choice.exact:
        return decision("kept", f"nothing was measured for this device, dtype and size, so the original stays{tried}")
    evidence = Evidence.of(row, options.objective)
    if evidence is None:
        reason = f"there is only an estimate for this device, dtype and size, so the original stays{tried}"
        return decision("kept", reason)
    whose = f", on an {choice.owner}" if choice.owner else ""
    return decision("applied" if evidence.licenses else "kept", f"{evidence.reason}{whose}")
