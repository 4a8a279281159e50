"""``make fuzz``: random programs against their originals.  ``python -m tests.fuzz --help`` lists the commands."""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import sys
import time
from collections.abc import Sequence

from . import record
from .judge import Verdict
from .mutations import FAULTS
from .pool import Judging, verdicts
from .program import random_program
from .shrink import shrunk

_RANGE = 500
"""Programs after which progress is printed, and recorded where that is asked for."""


def main() -> int:
    """Runs one of the commands; 1 where something was found, or a fault was not."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="judge a range of programs")
    run.add_argument("--first", type=int, default=0, help="the first seed")
    run.add_argument("--programs", type=int, default=2000)
    run.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    run.add_argument("--features", nargs="+", help="judge only those that have one of these, named as --mix names them")
    run.add_argument("--record", action="store_true", help="record clean ranges, and leave out those recorded before")
    run.add_argument("--mix", action="store_true", help="print how many programs have which feature")
    show = commands.add_parser("show", help="print a program")
    show.add_argument("seed", type=int)
    small = commands.add_parser("shrink", help="print the smallest program that fails like the one of a seed")
    small.add_argument("seed", type=int)
    for command in (run, small):
        command.add_argument(
            "--optimization-level",
            type=int,
            default=0,
            help="XLA's, 0 by default; at its own, 3, programs take longer, and may meet faults of the compiler",
        )
    back = commands.add_parser("mutations", help="put known faults back, one at a time, and look when they are found")
    back.add_argument("faults", nargs="*", metavar="FAULT", help=f"out of {', '.join(FAULTS)}; all by default")
    back.add_argument("--programs", type=int, default=2000, help="in which each has to be found")
    back.add_argument("--first", type=int, default=0)
    back.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    if given.command == "run":
        return _run(given)
    if given.command == "show":
        print(random_program(given.seed).script())
        return 0
    return _shrink(given) if given.command == "shrink" else _mutations(given)


def _run(given: argparse.Namespace) -> int:
    if given.record and (changes := record.unrecorded_changes()):
        print(f"Not recorded, since these differ from the last commit:\n{changes}")
        return 2
    if given.record and (given.optimization_level or given.features):
        print("Whole ranges are recorded, at optimization level 0.")
        return 2
    found: list[Verdict] = []
    every: list[Verdict] = []
    start, end = time.monotonic(), given.first + given.programs
    for first in range(given.first, end, _RANGE):
        count = min(_RANGE, end - first)
        if given.record and record.recorded(first, count):
            print(f"{first} to {first + count - 1}: recorded before")
            continue
        part = []
        seeds: Sequence[int] = range(first, first + count)
        if given.features:
            seeds = [s for s in seeds if not random_program(s).features.isdisjoint(given.features)]
        for (verdict,) in verdicts(seeds, given.workers, level=given.optimization_level):
            part.append(verdict)
            if verdict.kind:
                print(f"  program {verdict.seed}: {verdict.kind}: {verdict.complaints[0]}", flush=True)
        wrong = [v for v in part if v.kind]
        replaced = sum(any(v.applied.values()) for v in part)
        seconds = time.monotonic() - start
        print(f"{first} to {first + count - 1}: {len(wrong)} wrong, {replaced} with sites, {seconds:.0f} s", flush=True)
        if given.record and not wrong:
            record.remember(first, count, replaced)
        found += wrong
        every += part
    if given.mix:
        _print_mix(every)
    print(f"{len(found)} of {len(every)} programs are wrong.")
    for verdict in sorted(found, key=lambda v: v.seed)[:20]:
        print(f"  python -m tests.fuzz shrink {verdict.seed}  # {verdict.kind}")
    return 1 if found else 0


def _print_mix(every: list[Verdict]) -> None:
    """How many programs have which feature, and in how many of these something was replaced."""
    have: collections.Counter[str] = collections.Counter()
    replaced: collections.Counter[str] = collections.Counter()
    seconds: collections.Counter[str] = collections.Counter()
    for verdict in every:
        names = [*verdict.features, *(f"operation: {op}" for op, n in verdict.applied.items() if n)]
        names += [f"kind: {kind}" for kind in verdict.kinds]
        have.update(names)
        replaced.update(names if any(verdict.applied.values()) else ())
        seconds.update(verdict.seconds)
    for name in sorted(have):
        print(f"{have[name]:6d} {replaced[name]:6d}  {name}")
    print(", ".join(f"{name} {spent:.0f} s" for name, spent in seconds.most_common()))


def _shrink(given: argparse.Namespace) -> int:
    judging = Judging(quick=False, level=given.optimization_level)
    try:
        verdict = judging(given.seed)
        if not verdict.kind:
            print(f"Nothing is wrong with program {given.seed}.")
            return 0
        program = shrunk(verdict, judging)
        print(program.script())
        print(f"# {verdict.kind}: {'; '.join(verdict.complaints)}")
        print(f"# choices: {program.choices}")
    finally:
        judging.close()
    return 1


def _mutations(given: argparse.Namespace) -> int:
    """Prints of each fault how many programs it took to find it, and what was seen.

    A program counts for a fault if it computes something else, and nothing is wrong with it otherwise.
    """
    print("fault, programs until found", flush=True)
    missed, as_it_is = 0, Judging()
    try:
        for name in given.faults or FAULTS:
            found = _first(name, given, as_it_is)
            number = "not" if found is None else f"{found.seed - _start(name, given) + 1}"
            print(f"{name:4s} {number:>5s}  {FAULTS[name].what}", flush=True)
            if found is None:
                missed += 1
            else:
                print(f"{'':12s}program {found.seed}: {found.kind}: {found.complaints[0]}", flush=True)
    finally:
        as_it_is.close()
    return 1 if missed else 0


def _start(name: str, given: argparse.Namespace) -> int:
    """The first program that is tried with a fault put back."""
    return max(given.first, FAULTS[name].first)


def _first(name: str, given: argparse.Namespace, as_it_is: Judging) -> Verdict | None:
    """What was first found with a fault put back."""
    fault = FAULTS[name]
    start = _start(name, given)
    seeds = (s for s in range(start, start + given.programs) if fault.concerns(random_program(s)))
    always = name if fault.in_kernels else None  # what kernels are compiled to is remembered by a process
    judged = verdicts(seeds, given.workers, always, () if always else (name,))
    with contextlib.closing(judged):
        for found in judged:
            for verdict in found:
                if verdict.kind in ("values", "NaN") and not as_it_is(verdict.seed).kind:
                    return verdict
    return None


if __name__ == "__main__":
    sys.exit(main())
