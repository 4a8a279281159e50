"""``autopallas report``: what becomes of each site of a function; traces it, and compiles and runs nothing."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from autopallas.cli import CommandError
from autopallas.environment import OBJECTIVES, REPORT_SUFFIXES

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="the function, optimized or not")
    parser.add_argument("--shapes", required=True, help='its arguments, such as "f32[8,1024],i32[8]"')
    parser.add_argument("--objective", choices=OBJECTIVES, help="what a replacement has to improve")
    parser.add_argument("--details", action="store_true", help="everything about each site, not only the table")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help=f"write it to a file, {', '.join(REPORT_SUFFIXES)}; - prints it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from autopallas.cli.program import function_of, one_line, shapes_of
    from autopallas.errors import OptionError, RequirementError, UnsupportedError
    from autopallas.optimize import Optimized, explain
    from autopallas.report import terminal

    suffix = os.path.splitext(options.output or "")[1]
    if options.output not in (None, "-") and suffix not in REPORT_SUFFIXES:
        raise CommandError(f"{options.output} is no report; its name has to end in {', '.join(REPORT_SUFFIXES)}")
    shapes = shapes_of(options.shapes)
    function = function_of(options.function)
    if options.objective is not None:
        known = function._explicit if isinstance(function, Optimized) else {}
        original = function._function if isinstance(function, Optimized) else function
        function = Optimized(original, known | {"objective": options.objective})
    try:
        report = explain(function, *shapes)
    except RequirementError as error:
        raise CommandError(str(error).split("\n")[0]) from None
    except (OptionError, UnsupportedError) as error:
        raise CommandError(one_line(error)) from None
    except Exception as error:
        raise CommandError(f"{options.function} cannot be traced with these shapes: {one_line(error)}") from None
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
        print(report.to_json())
    elif options.details:
        print(report)
    else:
        terminal.show(entries, sys.stdout)
    return 0
