"""``autopallas run``: runs an unchanged script with every ``jax.jit`` in it optimized, and reports at its end."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from typing import cast

from autopallas import environment
from autopallas.cli import CommandError
from autopallas.compat import ArrayFunction, PyTree
from autopallas.environment import OBJECTIVES, REPORT_SUFFIXES
from autopallas.options import OptionArguments

__all__ = ["add", "optimize_every_jit"]

_NEVER = ("jax", "jaxlib", "autopallas")
"""Packages whose own use of ``jax.jit`` stays as it is."""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.usage = "autopallas run [options] SCRIPT [arguments ...]\n       autopallas run [options] -m MODULE ..."
    parser.add_argument("--report", metavar="FILE", help=f"write the report to a file, {', '.join(REPORT_SUFFIXES)}")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, to standard error")
    parser.add_argument("--objective", choices=OBJECTIVES, help="what a replacement has to improve")
    parser.add_argument("--implementation", metavar="NAME", help="the one implementation to use")
    parser.add_argument(
        "--ops",
        metavar="OP",
        action="append",
        help="look for this operation or kind of respelling alone; may be repeated",
    )
    parser.add_argument("--autotune", action=argparse.BooleanOptionalAction, help="search for block sizes")
    parser.add_argument("--fuel", type=int, metavar="N", help="replace at most so many sites of each function")
    parser.add_argument("--verify", action="store_true", help="check first calls against float64")
    parser.add_argument("--strict", action="store_true", help="raise what goes wrong inside autopallas")
    parser.add_argument("--xla-dump-dir", metavar="DIR", help="write there what XLA compiles, and the flags in force")
    parser.add_argument(
        "-m",
        dest="module",
        metavar="MODULE",
        nargs=argparse.REMAINDER,
        help="a module and its arguments, instead of a script",
    )
    parser.add_argument("script", metavar="SCRIPT", nargs=argparse.REMAINDER, help="the script and its arguments")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> Callable[[], int]:
    from autopallas.cli.dump import dump_to
    from autopallas.cli.script import module, script
    from autopallas.options import validated
    from autopallas.report import at_exit

    if options.report is not None and os.path.splitext(options.report)[1] not in REPORT_SUFFIXES:
        raise CommandError(f"{options.report} is no report; its name has to end in {', '.join(REPORT_SUFFIXES)}")
    if options.report is not None and not os.path.isdir(os.path.dirname(os.path.abspath(options.report))):
        raise CommandError(f"{options.report} cannot be written: there is no such folder")
    environment.read()  # reports misspelt variables now, and not in the middle of the script
    names = ("objective", "implementation", "ops", "autotune", "fuel")
    asked = {name: value for name in names if (value := getattr(options, name)) is not None}
    asked |= {name: True for name in ("verify", "strict") if getattr(options, name)}
    validated(asked)
    given = cast(OptionArguments, asked)
    command = options.module if options.module is not None else options.script
    if not command:
        raise CommandError("there is nothing to run; give a script, or a module with -m")
    program = (script if options.module is None else module)(command[0], command[1:])
    if options.xla_dump_dir is not None:
        dump_to(options.xla_dump_dir)
    if options.report or options.json or not os.environ.get("AUTOPALLAS_REPORT"):
        at_exit.collect(options.report or (at_exit.JSON if options.json else at_exit.TABLE))
    optimize_every_jit(given)
    return program.run


def optimize_every_jit(options: OptionArguments) -> None:
    """Makes ``jax.jit`` return optimized functions from now on, except to JAX itself and to this package.

    Args:
      options: the options of every optimized function.
    """
    import jax

    from autopallas.cli.equal_jits import shared
    from autopallas.errors import warn
    from autopallas.optimize import optimize

    original: ArrayFunction = jax.jit

    def optimized(jitted: ArrayFunction) -> ArrayFunction:
        if not hasattr(jitted, "lower"):  # jit with options alone, which returns a decorator
            return functools.wraps(jitted)(lambda function: optimized(jitted(function)))
        try:
            return shared(jitted, lambda: optimize(jitted, **options))
        except Exception as error:
            warn(f"autopallas leaves {jitted!r} as it is: {type(error).__name__}: {error}")
            return jitted

    @functools.wraps(original)
    def jit(*args: PyTree, **kwargs: PyTree) -> PyTree:
        jitted = original(*args, **kwargs)
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        return jitted if caller.partition(".")[0] in _NEVER else optimized(jitted)

    jax.jit = jit
