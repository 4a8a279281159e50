"""The decorator, and the whole pipeline on one screen: trace, graph, patterns, plan, rewrite, run."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax

from autopallas import compat
from autopallas.errors import AutopallasWarning, OptionError, RequirementError, UnsupportedError, VerificationError
from autopallas.graph import Graph, flatten
from autopallas.kernels.implementation import Device
from autopallas.options import Options, resolve, validated
from autopallas.patterns import Match, NearMiss, find
from autopallas.plan import Decision, decide
from autopallas.report import Failure, Report, Site
from autopallas.report import NearMiss as NearMissRecord
from autopallas.report.describe import describe
from autopallas.rewrite.splice import splice

__all__ = ["Optimized", "explain", "optimize"]

P = ParamSpec("P")
R = TypeVar("R")

_inside = compat.trace_context(False)
"""Whether an optimized function is being traced.  The outermost one owns the rewrite.  Part of the trace key."""

_RAISED = (OptionError, RequirementError, UnsupportedError, VerificationError)


# ---------------------------------------------------------------------- the pipeline


def rewrite(program: Any, options: Options) -> tuple[Any, Report]:
    """A closed jaxpr with its sites replaced, and the report.

    ``program`` comes back as it is where nothing was replaced or something inside failed.
    """
    device = Device.current()
    misses: list[NearMiss] = []
    failures: list[Failure] = []
    sites: tuple[Site, ...] = ()
    result = program
    stage = "graph"
    try:
        graph = Graph(flatten(_without_dead_code(program)))
        stage = "patterns"
        matches, misses = find(graph, options.ops, options.assume_finite)
        stage = "plan"
        decisions = _with_fuel([_decide(match, device, options) for match in matches], options)
        sites = tuple(describe(match, decision) for match, decision in zip(matches, decisions, strict=True))
        stage = "rewrite"
        chosen = [pair for pair in zip(matches, decisions, strict=True) if pair[1].verdict == "applied"]
        if chosen:
            result = splice(graph, chosen)
    except _RAISED:
        raise
    except Exception as error:
        if options.strict:
            raise
        sites, result = (), program
        failures.append(Failure(stage, f"{type(error).__name__}: {error}"))
        warnings.warn(
            f"autopallas left a program as it was: {stage} failed with {type(error).__name__}: {error}",
            AutopallasWarning,
            stacklevel=2,
        )
    report = Report(
        sites=sites,
        near_misses=tuple(NearMissRecord(m.op, m.location, m.reason) for m in misses),
        failures=tuple(failures),
        platform=device.platform,
        device_kind=device.kind,
        versions=compat.versions(),
    )
    _require(report, options)
    return result, report


def _without_dead_code(program: Any) -> Any:
    """What nobody reads is no use of a value."""
    jaxpr, consts = compat.opened(program)
    live, _ = compat.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return compat.ClosedJaxpr(live, consts)


def _decide(match: Match, device: Device, options: Options) -> Decision:
    return decide(match.site.operation, match.spec, match.direction, device, options)


def _with_fuel(decisions: list[Decision], options: Options) -> list[Decision]:
    """At most ``fuel`` sites are replaced."""
    if options.fuel is None:
        return decisions
    left = options.fuel
    kept = []
    for decision in decisions:
        if decision.verdict == "applied":
            left -= 1
            if left < 0:
                decision = Decision("kept", f"the fuel of {options.fuel} is used up", decision.platform)
        kept.append(decision)
    return kept


def _require(report: Report, options: Options) -> None:
    counts = report.counts()
    short = [f"{op}: {counts[op]} of {n}" for op, n in options.require if counts[op] < n]
    if short:
        raise RequirementError(
            "fewer sites were replaced than required (" + ", ".join(short) + ")\n\n" + str(report)
        )


# ---------------------------------------------------------------------- the decorator


class Optimized(Generic[P, R]):
    """A function whose reference computations run as tuned kernels.  Made by :func:`optimize`."""

    def __init__(self, function: Callable[P, R], settings: dict[str, Any] | None, explicit: dict[str, Any]):
        functools.update_wrapper(self, function)
        self._function = function
        self._explicit = explicit
        self._report = Report()
        self._lock = threading.Lock()
        inner = getattr(function, "__wrapped__", function) if settings is not None else function
        self._jit = jax.jit(functools.wraps(function)(self._traced(inner)), **(settings or {}))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self._jit(*args, **kwargs)
        return result

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"<autopallas.optimize of {self._function!r}>"

    def report(self) -> Report:
        """What was done to the signature that was traced last; empty before any."""
        return self._report

    def _traced(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """The body that jit traces: the original's jaxpr, rewritten."""

        def traced(*args: Any, **kwargs: Any) -> Any:
            options = resolve(self._explicit)
            if options.disabled or _inside.value:
                return inner(*args, **kwargs)
            program, shape = _trace(inner, args, kwargs)
            result, report = rewrite(program, options)
            self._publish(report)
            leaves = compat.jaxpr_as_fun(result)(*jax.tree.leaves((args, kwargs)))
            return jax.tree.unflatten(jax.tree.structure(shape), leaves)

        return traced

    def _publish(self, report: Report) -> None:
        from autopallas.report import at_exit

        with self._lock:
            self._report = report
        at_exit.record(self._name, report)

    @property
    def _name(self) -> str:
        return getattr(self._function, "__qualname__", None) or repr(self._function)


def _trace(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The function's jaxpr and the structure of its result, traced with the knowledge that we own the rewrite."""
    with _inside(True):
        program, shape = jax.make_jaxpr(function, return_shape=True)(*args, **kwargs)
    return program, shape


@overload
def optimize(fn: None = None, **options: Any) -> Callable[[Callable[P, R]], Optimized[P, R]]: ...
@overload
def optimize(fn: Callable[P, R], **options: Any) -> Optimized[P, R]: ...
def optimize(fn: Callable[P, R] | None = None, **options: Any) -> Any:
    """Makes a function run its reference computations as tuned kernels, without changing what it computes."""
    explicit = dict(validated(options))
    if fn is None:
        return functools.partial(optimize, **options)
    return Optimized(fn, compat.jit_settings(fn), explicit)


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """What :func:`optimize` would do with a call, without running or compiling anything."""
    explicit = fn._explicit if isinstance(fn, Optimized) else {}
    function = fn._function if isinstance(fn, Optimized) else fn
    options = resolve(explicit)
    program, _ = _trace(function, args, kwargs)
    return rewrite(program, options)[1]
