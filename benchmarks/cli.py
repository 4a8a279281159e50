"""The command line: ``python -m benchmarks`` measures, ``table`` regenerates a tuned table, ``gpu`` does both there,
``programs`` measures programs of other libraries, ``respellings`` models of what has no kernel."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from autopallas.cli import CommandError
from autopallas.cli.dump import dump_to
from autopallas.progress import Progress
from benchmarks import environment, rows, terminal
from benchmarks.case import AUTOPALLAS, KEPT, KERNELS
from benchmarks.run import Effort, run, select

RESULTS = Path(__file__).parent / "results"

_DESCRIPTION = """\
Measures kernels against the computations as people write them.

Each case is run as it is written ("original"), under autopallas.optimize, and by JAX's own function where
there is one, in turns within one process; what counts is the ratio of runs next to each other.
Every row is written as JSON and CSV; docs/benchmarks.md explains the fields.
"""

_EPILOG = """\
examples:
  python -m benchmarks                                the standard grid, seven to nine minutes on two cores
  python -m benchmarks --quick                        a sample, under two minutes
  python -m benchmarks --filter "float32 causal T2048" --filter "forward+backward T1024"
  python -m benchmarks table attention                measure block sizes and regenerate the tuned table
  python -m benchmarks gpu --all --output DIR         correctness, stress and times of the GPU kernels, on Hopper
  python -m benchmarks programs                       unmodified programs of other libraries, by default options
  python -m benchmarks respellings                    models of each kind of respelling, forward and in a train step
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status: 1 where an optimized program failed or was left as it was."""
    if arguments and arguments[0] == "table":
        from benchmarks import table

        return table.main(arguments[1:])
    if arguments and arguments[0] == "gpu":
        from benchmarks import gpu

        return gpu.main(arguments[1:])
    if arguments and arguments[0] == "programs":
        from benchmarks.programs import cli

        return cli.main(arguments[1:])
    if arguments and arguments[0] == "respellings":
        from benchmarks import respellings

        return respellings.main(arguments[1:])
    parser = _parser()
    options = parser.parse_args(arguments)
    if unknown := [kernel for kernel in options.kernels if kernel not in KERNELS]:
        parser.error(f"no benchmark is called {unknown[0]!r}; there are: {', '.join(KERNELS)}")
    grid = "quick" if options.quick else "wide" if options.wide else "standard"
    if options.xla_dump_dir is not None:
        try:
            dump_to(options.xla_dump_dir)
        except CommandError as error:
            parser.error(str(error))
    cases = select(options.kernels or KERNELS, grid, options.filter)
    if options.list:
        for case in cases:
            print(case)
        return 0
    if not cases:
        print("no case matches; see --list")
        return 2
    effort = Effort(options.seconds, options.repetitions, not options.no_resident_memory)
    # Parts of a grid have files of their own, so that they do not take the place of a whole one.
    suffix = environment.backend() + ("" if grid == "standard" else f"-{grid}")
    found: list[rows.Row] = []
    with Progress("benchmarks") as say:
        for of_case in run(cases, effort, say):
            if not found:
                print(terminal.header(of_case))
            found += of_case
            print(terminal.table(of_case), flush=True)
            paths = _write(found, options.output, f"{suffix}-part")
    if not options.filter:
        for path in paths:
            path.unlink()
        paths = _write(found, options.output, suffix)
    print("\nwrote", *paths)
    optimized = [row for row in found if row.candidate == AUTOPALLAS]
    return int(any(row.failure or row.implementation.startswith(KEPT) for row in optimized))


def _write(found: Sequence[rows.Row], directory: Path, suffix: str) -> list[Path]:
    """Writes the rows of each operation to files of its own."""
    paths: list[Path] = []
    for kernel in dict.fromkeys(row.kernel for row in found):
        paths += rows.write([row for row in found if row.kernel == kernel], directory, f"{kernel}-{suffix}")
    return paths


def _parser() -> argparse.ArgumentParser:
    usual = Effort()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kernels", nargs="*", metavar="OPERATION", help=f"what to measure, of: {', '.join(KERNELS)}")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a sample of the cases")
    size.add_argument("--wide", action="store_true", help="many more cases; an hour, and 16 GiB of memory")
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="WORDS",
        help="only cases that have all these words, as --list shows them; given several times: any of them",
    )
    parser.add_argument("--list", action="store_true", help="show the cases and measure nothing")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR", help="where the rows go (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=usual.seconds, help="time for the runs of one case (%(default)s)"
    )
    parser.add_argument(
        "--repetitions", type=int, default=usual.repetitions, help="runs of each candidate at most (%(default)s)"
    )
    parser.add_argument("--xla-dump-dir", metavar="DIR", help="write there what XLA compiles, and the flags in force")
    parser.add_argument(
        "--no-resident-memory", action="store_true", help="do not start processes to measure peak resident memory"
    )
    parser.add_argument(
        "--no-allocator-settings",
        action="store_true",
        help="use the memory allocator as it comes (else this process restarts itself with "
        + " ".join(f"{k}={v}" for k, v in environment.ALLOCATOR_SETTINGS.items())
        + ")",
    )
    return parser
