"""``autopallas report``: what becomes of each site of a function; traces it, and compiles and runs nothing."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from autopallas.cli import CommandError
from autopallas.environment import OBJECTIVES, REPORT_SUFFIXES

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="the function, optimized or not")
    parser.add_argument("--shapes", required=True, help='its arguments, such as "f32[8,1024],i32[8]"')
    parser.add_argument("--objective", choices=OBJECTIVES, help="what a replacement has to improve")
    parser.add_argument(
        "--target", metavar="TPU", help="decide and compile for a TPU that need not be here, such as tpu-v5e"
    )
    parser.add_argument("--details", action="store_true", help="everything about each site, not only the table")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help=f"write it to a file, {', '.join(REPORT_SUFFIXES)}; - prints it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from contextlib import nullcontext

    from autopallas.cli.program import function_of, one_line, shapes_of
    from autopallas.errors import OptionError, RequirementError, UnsupportedError
    from autopallas.optimize import Optimized, explain
    from autopallas.report import terminal

    suffix = os.path.splitext(options.output or "")[1]
    if options.output not in (None, "-") and suffix not in REPORT_SUFFIXES:
        raise CommandError(f"{options.output} is no report; its name has to end in {', '.join(REPORT_SUFFIXES)}")
    target = None if options.target is None else _generation(options.target)
    shapes = shapes_of(options.shapes)
    function = function_of(options.function)
    known = function._explicit if isinstance(function, Optimized) else {}
    original = function._function if isinstance(function, Optimized) else function
    if options.objective is not None:
        known = known | {"objective": options.objective}
    function = Optimized(original, known)
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
    if compiled is not None and not options.json:
        print(f"\nCompiled for {options.target}, before and after:")
        for name, (before, after) in compiled.items():
            print(f"- {name}: {_shown(before)}, {_shown(after)}")
    return 0


def _generation(name: str) -> Any:
    from autopallas.tuning.ahead_of_time import GENERATIONS, missing

    if name not in GENERATIONS:
        raise CommandError(f"there is no target {name}; there are {', '.join(GENERATIONS)}")
    if reason := missing():
        raise CommandError(f"nothing can be compiled for {name}: {reason}")
    return GENERATIONS[name]


def _compiled(original: Any, optimized: Any, shapes: tuple[Any, ...], target: Any) -> dict[str, tuple[Any, Any]]:
    """(of the original, of the optimized) for everything that the compiler says; a text where it failed."""
    from autopallas.cli.program import one_line
    from autopallas.tuning.ahead_of_time import compile_for

    found = []
    for function in (original, optimized):
        try:
            found.append(compile_for(function, shapes, target, simulate=target.simulates))
        except Exception as error:
            raise CommandError(f"it cannot be compiled for {target.name}: {one_line(error)}") from None
    before, after = found
    if before.failure or after.failure:
        failures = [f"{c.stage}: {c.failure}".split("\n")[0] if c.failure else None for c in found]
        return {"failure": (failures[0], failures[1])}
    told: dict[str, tuple[Any, Any]] = {
        "temporary bytes": (before.temporary_bytes, after.temporary_bytes),
        "bytes accessed": (before.bytes_accessed, after.bytes_accessed),
    }
    if before.cycles is not None and after.cycles is not None:
        told["simulated cycles"] = (before.cycles, after.cycles)
    return told


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value or "it compiles")
