"""``autopallas report``: reports on each site of a function; with a target, compiles the function before and after."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from autopallas.cli import CommandError
from autopallas.compat import ArrayFunction, PyTree
from autopallas.environment import OBJECTIVES, REPORT_SUFFIXES
from autopallas.errors import one_line

if TYPE_CHECKING:
    from autopallas.compile.tpu import Generation
    from autopallas.workbench.tune import Target

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="the function, optimized or not")
    parser.add_argument("--shapes", required=True, help='its arguments, such as "f32[8,1024],i32[8]"')
    parser.add_argument("--objective", choices=OBJECTIVES, help="what a replacement has to improve")
    parser.add_argument(
        "--target",
        metavar="TARGET",
        help="compile it too, before and after: for a TPU that need not be here, such as tpu-v5e, or for cpu or gpu",
    )
    parser.add_argument("--details", action="store_true", help="everything about each site, not only the table")
    parser.add_argument("--trace", action="store_true", help="the passes over the program, with the time of each")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help=f"write it to a file, {', '.join(REPORT_SUFFIXES)}; - prints it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _refuse_if_disabled(known: Mapping[str, object]) -> None:
    """Raises CommandError where the environment turns everything off, so that nothing would be found."""
    from autopallas.errors import OptionError
    from autopallas.options import resolve

    try:
        disabled = resolve(known).disabled
    except OptionError as error:
        raise CommandError(one_line(error)) from None
    if disabled:
        raise CommandError("AUTOPALLAS_DISABLE is set: everything runs as it is written; without it there is a report")


def _run(options: argparse.Namespace) -> int:
    from contextlib import nullcontext

    from autopallas.cli.program import function_of, shapes_of
    from autopallas.errors import OptionError, RequirementError, UnsupportedError
    from autopallas.optimize import explain
    from autopallas.optimized import Optimized
    from autopallas.report import terminal
    from autopallas.report.text import passes

    suffix = os.path.splitext(options.output or "")[1]
    if options.output not in (None, "-") and suffix not in REPORT_SUFFIXES:
        raise CommandError(f"{options.output} is no report; its name has to end in {', '.join(REPORT_SUFFIXES)}")
    target = None if options.target is None else _target(options.target)
    shapes = shapes_of(options.shapes)
    function = function_of(options.function)
    known = function._explicit if isinstance(function, Optimized) else {}
    original = function._function if isinstance(function, Optimized) else function
    if options.objective is not None:
        known = known | {"objective": options.objective}
    function = Optimized(original, known)
    _refuse_if_disabled(known)
    try:
        with nullcontext() if target is None else target.device.targeted():
            report = explain(function, *shapes)
    except RequirementError as error:
        raise CommandError(str(error).split("\n")[0]) from None
    except (OptionError, UnsupportedError) as error:
        raise CommandError(one_line(error)) from None
    except Exception as error:
        raise CommandError(f"{options.function} cannot be traced with these shapes: {one_line(error)}") from None
    compiled = None if target is None else _compiled(original, Optimized(original, known), shapes, target)
    entries = [(options.function, report)]
    if options.output not in (None, "-"):
        from autopallas.report import at_exit

        try:
            at_exit.write(str(Path(options.output).absolute()), entries)
        except OSError as error:
            raise CommandError(f"{options.output} cannot be written: {error.strerror or error}") from None
        if not options.json:
            print(f"wrote {options.output}")
            return 0
    if options.json:
        told = report.to_dict()
        print(json.dumps(told if compiled is None else {"report": told, "target": compiled}, indent=2))
    elif options.details:
        print(report)
    else:
        terminal.show(entries, sys.stdout)
    if options.trace and not options.json:
        print(f"\n{passes(report)}")
    if compiled is not None and not options.json:
        print(f"\nCompiled for {options.target}, before and after:")
        for name, (before, after) in compiled.items():
            print(f"- {name}: {_shown(before)} -> {_shown(after)}")
    return 0


Figure: TypeAlias = int | float | str | None
"""A figure that a compiler reports for a program, or a text if it failed."""


def _target(name: str) -> Target:
    from autopallas.workbench.tune import TARGETS, TargetError, target_of

    if name not in TARGETS:
        raise CommandError(f"there is no target {name}; there are {', '.join(TARGETS)}")
    try:
        return target_of(name)
    except TargetError as error:
        raise CommandError(f"--target {name}: {error}") from None


def _compiled(
    original: ArrayFunction, optimized: ArrayFunction, shapes: tuple[PyTree, ...], target: Target
) -> dict[str, tuple[Figure, Figure]]:
    """Returns (the original's, the optimized one's) for every figure of the compiler; a text if it failed."""
    from autopallas.progress import Progress

    compiler: Callable[..., Mapping[str, Figure]] = _here if target.generation is None else _ahead
    found: list[Mapping[str, Figure]] = []
    try:
        with Progress(f"autopallas: compiling for {target.device.kind}") as say:
            for text, function in (("1 of 2: as it is written", original), ("2 of 2: optimized", optimized)):
                say(text)
                found.append(compiler(function, shapes, target.generation))
    except Exception as error:
        raise CommandError(f"it cannot be compiled for {target.device.kind}: {one_line(error)}") from None
    before, after = found
    if "failure" in before or "failure" in after:
        return {"failure": (before.get("failure"), after.get("failure"))}
    return {name: (before[name], after[name]) for name in before if name in after}


def _ahead(function: ArrayFunction, shapes: tuple[PyTree, ...], generation: Generation) -> Mapping[str, Figure]:
    """Returns the figures of the TPU's compiler."""
    from autopallas.compile.tpu import compile_for

    found = compile_for(function, shapes, generation, simulate=generation.simulates)
    if found.failure:
        return {"failure": f"{found.stage}: {found.failure}".split("\n")[0]}
    told = {"temporary bytes": found.temporary_bytes, "bytes accessed": found.bytes_accessed}
    return told if found.cycles is None else told | {"simulated cycles": found.cycles}


def _here(function: ArrayFunction, shapes: tuple[PyTree, ...], generation: None) -> Mapping[str, Figure]:
    """Returns the figures of this machine's compiler."""
    import jax

    lowered = (function if hasattr(function, "lower") else jax.jit(function)).lower(*shapes)
    analysis = lowered.compile().memory_analysis()
    return {} if analysis is None else {"temporary bytes": analysis.temp_size_in_bytes}


def _shown(value: Figure) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value or "it compiles")
