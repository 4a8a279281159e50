"""``python -m benchmarks programs``: programs of other libraries and of plain JAX, by default options."""

from __future__ import annotations

import argparse
import compileall
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import autopallas
from benchmarks import environment
from benchmarks.programs import measure, missing, programs
from benchmarks.programs.program import Program

__all__ = ["main"]

RESULTS = Path(__file__).parents[1] / "results" / "programs-cpu.json"

_DESCRIPTION = """\
Runs unmodified programs of other libraries as they are written and under autopallas.optimize with default options.

Each row has the ratio of times (2.0: the original takes twice as long; processor time on a CPU, else wall time),
temporary memory, and what the first step costs: without a search, with the search of a first run, and with what that
search left in the cache.  The libraries are those of the extra "programs"; a program whose library is missing is left
out, and said.  Programs that are sized for a GPU run on GPUs, and the others on CPUs.
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command line.

    Returns:
      1 where a program failed, 2 where nothing could be measured, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks programs", description=_DESCRIPTION, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="show the programs and measure nothing")
    parser.add_argument(
        "--filter", action="append", default=[], metavar="WORDS",
        help="only programs whose names have all these words; given several times: any of them",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true",
        help="one process for each program: the first step with a search in an empty cache, that of the original, and\n"
        'both in turns; nothing under objective="memory"',
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true", help="the programs for GPUs at small sizes, wherever; times mean nothing"
    )
    parser.add_argument(
        "--tune-seconds", type=float, metavar="S", help="the option of that name, by default autopallas's own"
    )
    parser.add_argument("--limit", type=float, metavar="S", help="seconds after which a process is given up")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each program, in turns (%(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="first steps of each kind (%(default)s)")
    parser.add_argument(
        "--first-steps", action="store_true", help="measure these alone, for the rows that --output has of this machine"
    )
    parser.add_argument(
        "--smallest-memory", action="store_true",
        help='measure temporary memory under objective="memory" alone, for the rows that --output has of this machine',
    )  # fmt: skip
    parser.add_argument(
        "--coverage", action="store_true",
        help="count the sites for which the tuned tables have a row, replaced or kept, and run nothing",
    )  # fmt: skip
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="keeps what quick searches find; by default forgotten"
    )
    stays = f"rows as JSON, such as {RESULTS.name} or programs-gpu.json; rows of other machines and programs in it stay"
    parser.add_argument("--output", type=Path, metavar="FILE", help=stays)
    options = parser.parse_args(arguments)
    for name in ("rounds", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    anew = {"--first-steps": measure.with_first_steps, "--smallest-memory": measure.with_smallest_memory}
    asked = [name for name in anew if getattr(options, name[2:].replace("-", "_"))]
    if len(asked) > 1:
        parser.error(f"{' and '.join(asked)}: give one of the two")
    if asked and not (options.output and options.output.exists()):
        parser.error(f"{asked[0]} needs --output, a file with rows")
    chosen = [one for one in programs() if _selected(one.name, options.filter)]
    if options.list:
        for program in chosen:
            notes = ["for a GPU"] if program.platform == "gpu" else []
            if absent := missing(program):
                notes.append(f"needs {', '.join(absent)}")
            print(program.name + (f"   ({'; '.join(notes)})" if notes else ""))
        return 0
    platform, device = environment.backend_and_device()
    sized_for = "cpu" if platform == "cpu" and not options.dry_run else "gpu"
    chosen = [program for program in chosen if program.platform == sized_for]
    absent = {name for program in chosen for name in missing(program)}
    if absent:
        left = sum(bool(missing(program)) for program in chosen)
        print(f"{left} programs left out: {', '.join(sorted(absent))} not installed; pip install '.[programs]'")
    chosen = [program for program in chosen if not missing(program)]
    if not chosen:
        print("no program to measure; see --list")
        return 2
    if options.coverage:
        return _coverage(chosen)
    effort = measure.Effort(
        platform,
        device,
        options.rounds,
        options.repeats,
        options.quick,
        options.dry_run,
        options.tune_seconds,
        options.limit,
    )
    # As of an installed package: else each first step would read the syntax of ours, but not that of its libraries.
    compileall.compile_dir(Path(autopallas.__file__).parent, quiet=1)
    known = _read(options.output) if asked else {}
    rows: list[measure.Row] = []
    with tempfile.TemporaryDirectory() as forgotten:
        cache = options.cache or Path(forgotten)
        machine = f"{environment.processor()} {environment.vector_extensions()}" if platform == "cpu" else device
        for program in chosen:
            if not asked:
                rows.append(measure.measured(program, effort, cache))
            elif row := known.get((program.name, machine, jax.__version__)):
                rows.append(anew[asked[0]](row, program, effort, cache))
            else:
                print(f"{program.name}: no row of this machine in {options.output}")
                continue
            print(measure.line(rows[-1]), flush=True)
            if options.output:
                _write(rows, options.output)
    print("\n" + measure.summary(rows))
    short = [(row, found) for row in rows if (found := measure.verdicts(row))]
    for row, found in short:
        print(f"short of a bar: {row['program']}: {'; '.join(found)}")
    return int(any(row.get("failure") for row in rows))


def _coverage(chosen: Sequence[Program]) -> int:
    found, without, failed = 0, 0, False
    for program in chosen:
        sites, failure = measure.covered(program)
        rowless = [site for site in sites if not site["has_row"]]
        found, without, failed = found + len(sites), without + len(rowless), failed or bool(failure)
        print(f"{program.name:48} " + (failure or f"{len(sites) - len(rowless)} of {len(sites)}"), flush=True)
        for reason, count in Counter(f"{site['name']} {site['spec']}: {site['reason']}" for site in rowless).items():
            print(f"    {count} without: {reason}")
    share = f" ({(found - without) / found:.1%})" if found else ""
    print(f"\n{found - without} of {found} sites have a row of this machine{share}")
    return int(failed)


def _selected(name: str, wanted: Sequence[str]) -> bool:
    return not wanted or any(all(word.lower() in name.lower() for word in words.split()) for words in wanted)


def _machine(row: dict[str, Any]) -> tuple[str, ...]:
    """The key of a row: program, CPU with its vector extensions or kind of another device, version of JAX."""
    machine = f"{row['processor']} {row['vector_extensions']}" if "vector_extensions" in row else row.get("device", "")
    return row["program"], machine, row["versions"]["jax"]


def _read(path: Path) -> dict[tuple[str, ...], measure.Row]:
    rows = json.loads(path.read_text()) if path.exists() else []
    return {_machine(row): row for row in rows}


def _write(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes rows among those that a file has already, of which they take the place."""
    new = _read(path) | {_machine(row): row for row in rows}
    path.write_text("[\n" + ",\n".join(json.dumps(new[key]) for key in sorted(new)) + "\n]\n")
