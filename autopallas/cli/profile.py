"""``autopallas profile``: measures what each replaced site of a function is worth."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from autopallas.cli import CommandError
from autopallas.cli.numbers import at_least, seconds
from autopallas.compat import ArrayFunction, PyTree
from autopallas.environment import OBJECTIVES
from autopallas.errors import one_line

if TYPE_CHECKING:
    import jax

    from autopallas.optimized import Optimized
    from autopallas.plan.exclusions import Place
    from autopallas.report import Report
    from autopallas.workbench.worth import Interval, Whole

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument(
        "function", metavar="MODULE:FUNCTION", help="a whole train step; it is run, and its arguments are not donated"
    )
    parser.add_argument("--shapes", required=True, help='its arguments, such as "f32[8,1024],i32[8]"')
    parser.add_argument("--inputs", metavar="MODULE:FUNCTION", help="inputs(types, seed) gives flat arguments")
    parser.add_argument("--objective", choices=OBJECTIVES, help="what a replacement has to improve")
    parser.add_argument(
        "--rounds",
        type=at_least(2),
        default=21,
        metavar="N",
        help="how often each program runs, 2 or more (default 21)",
    )
    parser.add_argument("--seconds", type=seconds, default=60.0, help="time for all rounds (default 60)")
    parser.add_argument(
        "--places", type=at_least(1), default=16, metavar="N", help="leave out at most so many places in turn"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write a page with a picture of it, .html, or .json")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


class _Without:
    """A function that is lowered with some places left out, or as it is written."""

    def __init__(self, function: Optimized[..., PyTree], places: frozenset[Place], written: bool = False):
        self._function, self._places, self._written = function, places, written

    def lower(self, *arguments: PyTree) -> jax.stages.Lowered:
        """Lowers it, as ``jax.jit`` does."""
        import jax

        from autopallas.pipeline import inside
        from autopallas.plan.exclusions import leaving_out

        if self._written:
            with inside(True):
                lowered: jax.stages.Lowered = jax.jit(self._function._inner).lower(*arguments)
                return lowered
        with leaving_out(self._places):
            return self._function.lower(*arguments)

    def __call__(self, *arguments: PyTree) -> PyTree:
        return self.lower(*arguments).compile()(*arguments)


def _run(options: argparse.Namespace) -> int:
    import jax

    from autopallas.cli.program import function_of, shapes_of
    from autopallas.errors import OptionError, RequirementError, UnsupportedError
    from autopallas.optimized import Optimized
    from autopallas.progress import Progress
    from autopallas.workbench.worth import worths

    suffix = Path(options.output).suffix if options.output else ""
    if options.output and suffix not in (".html", ".json"):
        raise CommandError(f"{options.output} is no page; its name has to end in .html or .json")
    types = shapes_of(options.shapes)
    given = function_of(options.function)
    optimized = given if isinstance(given, Optimized) else Optimized(given, {})
    inner, known = optimized._inner, dict(optimized._explicit)
    if options.objective is not None:
        known["objective"] = options.objective
    inputs = None if options.inputs is None else function_of(options.inputs)
    arguments = _arguments(types, inputs)
    whole = Optimized(inner, known)
    try:
        whole.lower(*arguments)
    except (OptionError, RequirementError, UnsupportedError) as error:
        raise CommandError(one_line(error)) from None
    except Exception as error:
        raise CommandError(f"{options.function} cannot be traced with these shapes: {one_line(error)}") from None
    report = whole.report()
    counts = Counter((site.op, site.location) for site in report.sites if site.verdict == "applied")
    left_out = counts.most_common()[: options.places]
    without = {place: (count, _Without(Optimized(inner, known), frozenset({place}))) for place, count in left_out}
    nothing: frozenset[Place] = frozenset()
    with Progress("autopallas profile") as say, jax.transfer_guard("allow"):
        found = worths(
            _Without(Optimized(inner, known), nothing, written=True),
            _Without(Optimized(inner, known), nothing),
            without,
            arguments,
            rounds=options.rounds,
            seconds=options.seconds,
            progress=say,
        )
    return _told(options, report, found, len(counts) - len(left_out))


def _told(options: argparse.Namespace, report: Report, found: Whole, omitted: int) -> int:
    if options.output:
        from autopallas.report import profile_page

        page = json.dumps(asdict(found), indent=2) + "\n"
        if Path(options.output).suffix == ".html":
            page = profile_page.page(options.function, report, found)
        try:
            Path(options.output).write_text(page, encoding="utf-8")
        except OSError as error:
            raise CommandError(f"{options.output} cannot be written: {error.strerror or error}") from None
    if options.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        print("\n".join(_lines(options.function, found, omitted)))
        if options.output:
            print(f"wrote {options.output}")
    return int(bool(found.failures))


def _arguments(types: Sequence[PyTree], inputs: ArrayFunction | None) -> list[PyTree]:
    """Returns random arguments, or those that ``inputs`` gives."""
    import jax
    import jax.numpy as jnp

    from autopallas.court.case import Case
    from autopallas.sites import random_keys

    leaves, structure = jax.tree.flatten(tuple(types))
    plain = [kind for kind in leaves if not jnp.issubdtype(kind.dtype, jax.dtypes.prng_key)]
    try:
        arrays = iter(Case(tuple(plain)).arguments(inputs))
        filled = [
            random_keys.keys(kind.dtype, kind.shape, seed=0)
            if jnp.issubdtype(kind.dtype, jax.dtypes.prng_key)
            else jnp.asarray(next(arrays))
            for kind in leaves
        ]
    except Exception as error:
        raise CommandError(f"the inputs cannot be made: {one_line(error)}") from None
    found: list[PyTree] = list(jax.tree.unflatten(structure, filled))
    return found


def _lines(name: str, found: Whole, omitted: int) -> list[str]:
    from autopallas.report.terminal import relative

    lines = [f"{name}: {found.rounds} rounds, {found.clock} time, medians with 95% intervals", ""]
    memory, first = found.temporary_bytes, found.first_step_seconds
    for label, step, place in (("as it is written", found.original, 0), ("with all sites", found.optimized, 1)):
        text = f"temporary {_bytes(memory[place])}, first step {_seconds(first[place])}"
        lines.append(f"  {label:<18} {_interval(step)}; {text}")
    if found.gain is not None:
        lines.append(f"  {'all sites save':<18} {_interval(found.gain)}{_doubt(found.gain)}")
    if found.worths:
        lines += ["", "Without one place, a step takes so much more:"]
    for worth in found.worths:
        times = f" ({worth.sites} sites)" if worth.sites > 1 else ""
        lines.append(f"  {worth.op} at {relative(worth.location)}{times}")
        if worth.seconds is None:
            lines.append(f"    not measured: {worth.failure.splitlines()[0] if worth.failure else 'no round was run'}")
            continue
        share = "" if worth.share is None else f", {worth.share:+.1%} of a step"
        more = f"temporary {_bytes(worth.temporary_bytes, True)}, first step {_seconds(worth.first_step_seconds, True)}"
        lines.append(f"    {_interval(worth.seconds, True)}{share}{_doubt(worth.seconds)}; {more}")
    if not found.worths:
        lines += ["", "No site is replaced, so there is nothing to leave out."]
    if omitted:
        lines.append(f"  {omitted} further places were not left out; --places N")
    for program, failure in found.failures.items():
        lines.append(f"failed, {program}: {failure.splitlines()[0]}")
    return lines


def _doubt(difference: Interval) -> str:
    return "" if difference.certain else ", which may be nothing"


def _interval(value: Interval | None, signed: bool = False) -> str:
    if value is None:
        return "not measured"
    plus = "+" if signed else ""
    return f"{value.median * 1e3:{plus}.3g} ms [{value.lower * 1e3:{plus}.3g}, {value.upper * 1e3:{plus}.3g}]"


def _seconds(value: float | None, signed: bool = False) -> str:
    return "unknown" if value is None else f"{value:{'+' if signed else ''}.2f} s"


def _bytes(value: int | None, signed: bool = False) -> str:
    return "unknown" if value is None else f"{value / 2**20:{'+' if signed else ''}.1f} MiB"
