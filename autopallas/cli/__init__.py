"""The command line: this module parses it and reports errors; each command is a module with ``add(parser)``.

A command returns its exit status.  One that hands over to the user's own program returns a function that runs it, since
that program's errors are its own.  Bad input raises :class:`CommandError`: one line, status 2.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from autopallas.errors import OptionError
from autopallas.version import __version__

__all__ = ["COMMANDS", "CommandError", "main", "parser"]

COMMANDS = {
    "cache": "tuning results kept on disk: list, show, clear, export, import",
    "check": "fail where a program has lost a site of its lockfile",
    "court": "try a kernel: compare it with its reference in whatever kernels get wrong",
    "doctor": "say what this machine has, which implementations it can use, and why not the others",
    "lock": "write down what becomes of each site of a program",
    "profile": "run a function with each replaced site left out in turn, and say what each is worth",
    "report": "say what becomes of each site of a program, and why",
    "run": "run a script with every jax.jit in it optimized",
    "tune": "search for the block sizes of a program, a saved report or an operation, also for TPUs that are not there",
}
"""Each command, which is a module of this package, and its purpose."""


class CommandError(Exception):
    """Raised if the user's input cannot be used; the message says why, in one line."""


class _Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line, which names the command."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:  # else the parser of all commands would report them, under its own name
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    whole = _Parser(
        prog="autopallas", description="Finds reference computations in JAX programs and runs tuned kernels instead."
    )
    whole.add_argument("--version", action="version", version=f"autopallas {__version__}")
    commands = whole.add_subparsers(dest="command", required=True, metavar="command")
    for name, purpose in COMMANDS.items():
        module = importlib.import_module(f"autopallas.cli.{name}")
        module.add(commands.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + "."))
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
      arguments: what follows the program's name; by default the arguments of the process.

    Returns:
      The exit status: 0, or 2 if the input was bad.
    """
    if sys.stdout is None:  # closed by whoever started this process
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (for the rest of the process)
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        print(parser().format_help(), end="", file=sys.stderr)
        return 2
    options = parser().parse_args(words)
    options.arguments = words
    run: Callable[[argparse.Namespace], int | Callable[[], int]] = options.run
    try:
        status = run(options)
        sys.stdout.flush()
    except (CommandError, OptionError) as error:
        print(f"autopallas {options.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not str(error).startswith("Unable to initialize backend"):  # from JAX_PLATFORMS, or a device that is in use
            raise
        print(f"autopallas {options.command}: JAX finds no device: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is not None:  # a file's, not of standard output
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader, such as `head`, has seen enough
            return 0
        print(f"autopallas {options.command}: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    return status() if callable(status) else status
