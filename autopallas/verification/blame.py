"""Finds the replaced sites that are to blame for a call that a canary found to be wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax

from autopallas import compat
from autopallas.arguments import split
from autopallas.compat import Array, ClosedJaxpr, PyTree
from autopallas.fallback.bisect import bisect_failures
from autopallas.numerics.compare import Comparison
from autopallas.numerics.promote import quiet
from autopallas.options import Options
from autopallas.pipeline import Place, rewritten
from autopallas.report.live_report import LiveReport
from autopallas.sharding import call_shardings
from autopallas.verification.sites import applied_sites, check_sites
from autopallas.verification.verify import judged, original_program

if TYPE_CHECKING:
    from autopallas.optimized import Optimized

__all__ = ["Judgement", "judge"]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the oracle says of a call.

    Attributes:
      outputs: the comparison of each output.
      blamed: the sites to blame, each with the reason; empty if the outputs are as good as they have to be.
    """

    outputs: tuple[Comparison, ...]
    blamed: Mapping[Place, str]


def judge(
    function: Optimized[..., PyTree],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    own: Sequence[jax.Array],
    ours: Sequence[jax.Array],
    options: Options,
) -> Judgement:
    """Judges the outputs of a call by the float64 oracle, and finds the sites to blame if they are in breach.

    Args:
      function: the optimized function.
      args, kwargs: the arguments of the call.
      own, ours: the outputs of the original and of the call.
      options: the options in force.
    """
    arrays, static = split(args, kwargs)
    if function._settings is None:
        static = replace(static, given=(args, kwargs))
    original, shapes, names = original_program(function._inner, arrays, static)
    shardings = call_shardings.known(original, args, kwargs, arrays, shapes, function._settings)

    def with_sites(left_out: Mapping[Place, str]) -> tuple[ClosedJaxpr, LiveReport]:
        return rewritten(original, options, True, shardings, {**function._disabled, **left_out})

    program, report = with_sites({})
    outputs = tuple(judged(original, program, names, arrays, own, ours)[0])
    bad = [c for c in outputs if not c.ok]
    if not bad:
        return Judgement(outputs, {})
    told = _told(bad)
    places = dict.fromkeys((site.op, site.location) for site in report().sites if site.verdict == "applied")
    blamed = _by_themselves(program, report, arrays, told)
    if not blamed:

        def is_wrong(program: ClosedJaxpr) -> bool:
            with quiet():
                ours = jax.block_until_ready(jax.jit(compat.jaxpr_as_fun(program))(*arrays))
            return not all(c.ok for c in judged(original, program, names, arrays, own, ours)[0])

        found = _by_halving(list(places), lambda left_out: is_wrong(with_sites(left_out)[0]))
        again = "" if found else ", which did not happen again"
        blamed = dict.fromkeys(found or places, f"{told}{again}")
    return Judgement(outputs, blamed)


def _told(bad: Sequence[Comparison]) -> str:
    """Returns by how much the worst output is wrong."""
    worst = max(bad, key=lambda c: (c.non_finite, c.rewritten.max_relative / (c.allowed or 1)))
    return f"output {worst.name or 'result'} {_by_how_much(worst)}"


def _by_how_much(comparison: Comparison) -> str:
    if comparison.non_finite:
        return f"has {comparison.non_finite} elements that are not finite and should be"
    return f"has a relative error of {comparison.rewritten.max_relative:.1e}, {comparison.allowed:.1e} is allowed"


def _by_themselves(program: ClosedJaxpr, report: LiveReport, arrays: Sequence[Array], told: str) -> dict[Place, str]:
    """Returns the sites that are wrong on the operands that they met, with the reasons."""
    found: dict[Place, str] = {}
    try:
        checks, _ = check_sites(program, arrays)
    except Exception:
        return {}
    for equation, check in zip(applied_sites(program), checks, strict=True):
        site = report.site_of(equation.params["decision"].entry)
        if not check.ok and site is not None:
            worst = max((c for c in check.outputs if not c.ok), key=lambda c: c.rewritten.max_relative)
            reason = f"its {check.direction} by {check.implementation} {_by_how_much(worst)}; {told}"
            found.setdefault((site.op, site.location), reason)
    return found


def _by_halving(places: Sequence[Place], is_wrong_without: Callable[[Mapping[Place, str]], bool]) -> list[Place]:
    """Returns the sites with which alone the outputs are in breach; none if they are not in breach with all of them, or
    if the sites cannot be told apart."""

    def fails(some: Collection[Place]) -> bool:
        return is_wrong_without({place: "left out to find what fails" for place in places if place not in some})

    try:
        return bisect_failures(places, fails) if fails(places) else []
    except Exception:
        return []
