"""The command ``python -m benchmarks gpu --all``, and ``--tables``, which makes tables of journals."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from autopallas.compile.gpu import H100
from autopallas.sites.device import Device
from autopallas.tuning.key import kernel_version
from benchmarks.gpu_session import journal as journals
from benchmarks.gpu_session.children import Child, settings
from benchmarks.gpu_session.journal import ARCHIVE, Identity, Journal
from benchmarks.gpu_session.session import Plan, Session, clocks
from benchmarks.gpu_session.summary import summary, tuned_rows
from benchmarks.gpu_session.tasks import OPERATIONS, STAGES, Task, tasks

__all__ = ["main"]

_START_SECONDS = 120.0


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns 1 where something is wrong, and 2 where nothing can be measured."""
    options = _parser().parse_args(arguments)
    if options.tables:
        return _tables(options.tables, options.write, options.op or OPERATIONS)
    begin = time.monotonic()
    jax.config.update("jax_platforms", "cpu")  # the children have the GPU
    if options.output is None:
        print("--all needs --output DIR, the folder of its journal")
        return 2
    output: Path = options.output
    try:
        journal = Journal.opened(output, options.journal)
        (options.cache or output / "compiled").mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        print(f"the journal in {output} cannot be read and written: {error}")
        return 2
    plan = Plan(
        small=options.dry_run,
        stages=[stage for stage in STAGES if options.stages is None or stage in options.stages],
        until=begin + 60 * options.minutes,
        jobs=options.jobs or max(2, min(8, (os.cpu_count() or 2) // 2)),
        repetitions=options.repetitions if not options.dry_run else min(options.repetitions, 3),
        seconds=options.seconds,
        cache=options.cache or output / "compiled",
        keep_going=options.keep_going,
        shared=options.shared,
        loops=options.loops,
    )
    environ = settings("check", plan.cache, plan.small, plan.shared)
    child = Child("small" if plan.small else "", environ, output / "run.log")
    answers = list(child.ask({"do": "hello"}, begin + min(_START_SECONDS, 60 * options.minutes)))
    told = next((answer for answer in answers if "kind" in answer), None)
    problem = _unusable(told, plan.small)
    if problem is None:
        assert told is not None
        identity = Identity(options.commit or _commit(), jax.__version__, told["kind"])
        if (stranger := journal.stranger(identity)) is not None and not options.other_commits:
            problem = (
                f"{stranger}: name another folder, or --other-commits, which keeps these rows and reuses those of "
            )
            problem += "the same kernels and version of JAX"
    if problem is not None:
        child.end()
        print(problem)
        return 2
    assert told is not None
    session = Session(plan, journal, identity, {op: kernel_version(op) for op in OPERATIONS}, child)
    session.note({"part": "device", **{k: v for k, v in told.items() if k != "event"}, **clocks()})
    device = Device(told["platform"], told["kind"])
    chosen = _chosen(tasks(plan.small, device), options)
    # A dry run lowers what a GPU would compile.
    session.run(chosen, _chosen(tasks(False, H100), options) if plan.small else chosen)
    session.archive()
    print(f"{len(session.faults)} faults, {len(session.skipped)} tasks for which no time was left; {output / ARCHIVE}")
    for name in session.faults:
        print(f"  fault: {name}")
    return int(bool(session.faults))


def _chosen(found: Sequence[Task], options: argparse.Namespace) -> list[Task]:
    """Returns the tasks that the options name."""
    of = [t for t in found if options.op is None or t.operation in options.op or t.kind == "copy"]
    of = [t for t in of if not options.filter or any(all(w in t.name for w in f.split()) for f in options.filter)]
    return [t.limited(options.candidates) for t in of] if options.candidates else of


def _unusable(told: dict[str, Any] | None, small: bool) -> str | None:
    """Returns why nothing can be measured with what the child says of its device, or None."""
    if told is None:
        return "no device answered: the end of run.log says why"
    if small or (told["platform"] == "gpu" and told["capability"] == "9.0"):
        return None
    capability = f" of capability {told['capability']}" if told["capability"] else ""
    return (
        f"this needs a Hopper GPU (sm_90), and JAX has {told['kind']}{capability}; --dry-run goes through it on a CPU"
    )


def _commit() -> str:
    """Returns the checkout's commit, with "-dirty" where files differ from it; empty if git does not tell."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _tables(paths: Sequence[Path], write: bool, operations: Sequence[str]) -> int:
    """Prints the tables of journals; ``write``: also writes the tuned tables' rows, of the named operations."""
    files = [path / journals.JOURNAL if path.is_dir() else path for path in paths]
    if missing := [file for file in files if not file.exists()]:
        print(f"there is no journal {missing[0]}")
        return 2
    rows = [row for file in files for row in journals.read(file)]
    last = {row["device"]: row for row in rows}
    for device, row in last.items():
        print(summary(rows, Identity(row["commit"], row["jax"], device)))
    tuned = tuned_rows([row for row in rows if row["kernel"] in operations])
    for note in tuned.notes:
        print(f"- {note}")
    for (operation, device), found in tuned.rows.items():
        table = importlib.import_module(f"autopallas.kernels.{operation}.tuned_block_sizes").TABLE
        if write:
            print(f"wrote {len(found)} rows into {table.files.write(device, found)}")
        else:
            print(f"{operation}, {device}:\n{table.files.text(list(found.items()))}")
    return 0


def _stages(text: str) -> set[int]:
    return {int(part) for part in text.split(",")}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument(
        "--all", action="store_true", help="run the stages: " + "; ".join(f"{n} {s}" for n, s in STAGES.items())
    )
    parser.add_argument("--tables", nargs="+", type=Path, metavar="JOURNAL", help="make tables of journals or folders")
    parser.add_argument("--write", action="store_true", help="with --tables: write rows into the tuned tables")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder of the journal and the archive")
    parser.add_argument(
        "--journal", type=Path, action="append", default=[], metavar="FILE", help="rows of another call"
    )
    parser.add_argument("--cache", type=Path, metavar="DIR", help="folder of compiled programs (in the output folder)")
    parser.add_argument("--minutes", type=float, default=9.0, help="when everything has ended (%(default)s)")
    parser.add_argument("--stages", type=_stages, metavar="N,N", help="only these")
    parser.add_argument("--op", action="append", choices=OPERATIONS, help="only this operation; may be repeated")
    parser.add_argument(
        "--filter", action="append", metavar="WORDS", help="only tasks whose names have all these words"
    )
    parser.add_argument(
        "--candidates", action="append", metavar="NAME",
        help="time only candidates whose names have this, the originals, and of ours one at least; may be repeated",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=2.0, help="for the loops of one case (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=200, help="of each call in stage 3 (%(default)s)")
    parser.add_argument("--jobs", type=int, help="processes that compile ahead (half the processors, 8 at most)")
    parser.add_argument(
        "--shared", action="store_true",
        help="other calls with the same --cache run beside this one: they use the device in turns, and compile at once",
    )  # fmt: skip
    parser.add_argument(
        "--loops", action="store_true",
        help="time by loops alone: the profiler serves one process at a time, and of several calls the first to ask",
    )  # fmt: skip
    parser.add_argument("--keep-going", action="store_true", help="go on after a fault in stage 0")
    parser.add_argument("--other-commits", action="store_true", help="go on with a journal of another commit")
    parser.add_argument("--commit", help="the name of the checkout, where git cannot tell")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU: small shapes interpreted, large ones lowered")
    parser.add_argument("--no-allocator-settings", action="store_true", help="use the memory allocator as it comes")
    return parser
