"""``autopallas tune``: searches for the block sizes of a program's sites, or of an operation, ahead of time."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

from autopallas.cli import CommandError
from autopallas.cli.numbers import at_least, seconds
from autopallas.cli.program import function_of, shapes_of, traced
from autopallas.compat import ArrayFunction, PyTree
from autopallas.compile.tpu import Compiler
from autopallas.custom.registry import Pattern
from autopallas.environment import OPERATIONS
from autopallas.errors import one_line
from autopallas.optimized import Optimized
from autopallas.options import resolve
from autopallas.passes import Passes
from autopallas.pipeline import find_sites
from autopallas.report import Report
from autopallas.sites.encoding import EncodingError, saved_site
from autopallas.sites.operation import operation_named
from autopallas.sites.spec import BlockSizes
from autopallas.tuning.table import Key, Row, Table, table_device
from autopallas.workbench import remeasure
from autopallas.workbench import trial_log as raw
from autopallas.workbench.cases import DIRECTIONS, Case, Cases, cases_of
from autopallas.workbench.tune import TARGETS, Outcome, Subject, TargetError, of_case, target_of, tune

__all__ = ["add"]

_MOST_BYTES = 256 * 2**20


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument(
        "what",
        metavar="OPERATION | MODULE:FUNCTION | MODULE:PATTERN",
        nargs="?",
        help="an operation, by default at the sizes of its table; a function, optimized or not; or a pattern of yours",
    )
    parser.add_argument("--shapes", help='arguments, as in "f32[8,1024],i32[8]"; a function needs them')
    parser.add_argument(
        "--from", dest="report", metavar="REPORT.json", help="tune every site of a saved report instead"
    )
    parser.add_argument(
        "--target", choices=TARGETS, help="tune for this device; TPUs need not be there (default: the device here)"
    )
    parser.add_argument(
        "--objective", choices=("time", "memory"), default="time", help="show the block sizes that are best in this"
    )
    parser.add_argument(
        "--budget", type=seconds, default=30.0, metavar="SECONDS", help="time for each site (default 30)"
    )
    parser.add_argument("--variant", help="tune this variant of an operation, such as causal")
    parser.add_argument(
        "--direction", choices=DIRECTIONS, help="tune an operation in this direction (default: in both)"
    )
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="WORDS",
        help="tune only the cases of an operation's table whose names have all these words; may be repeated",
    )
    parser.add_argument(
        "--table", action="store_true", help="write the rows found into the operation's checked-in table"
    )
    parser.add_argument(
        "--processes",
        type=at_least(1),
        default=1,
        metavar="N",
        help="measure the block sizes found in N processes, one after the other: rows then have the median of their "
        "gains, and its lower quartile, which counts (default 1)",
    )
    parser.add_argument("--only", help=argparse.SUPPRESS)  # a file for a further process: block sizes by their keys
    parser.add_argument("--output", metavar="DIR", help="write every configuration tried: results.csv, results.json")
    parser.add_argument("--again", action="store_true", help="search even where there is a result")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_tune)


def _tune(options: argparse.Namespace) -> int:
    try:
        target = target_of(options.target)
    except TargetError as error:
        raise CommandError(f"--target {options.target}: {error}") from None
    if options.processes > 1 and (not options.table or target.generation is not None):
        raise CommandError("--processes is of rows that are measured for --table")
    subjects = _subjects(options, target.device.platform)
    only = None if options.only is None else remeasure.asked(Path(options.only))
    if options.output is not None:
        _write(Path(options.output), [])  # so that an unwritable folder is reported before the search
    known: dict[Hashable, Outcome] = {}
    outcomes: list[tuple[Subject, Outcome]] = []
    with contextlib.ExitStack() as stack:
        compiler = None
        if target.generation is not None:
            compiler = stack.enter_context(Compiler(target.generation, simulate=True))
        for subject in subjects:
            match = subject.match
            key = (match.op, tuple(part.site for part in match.passes), match.direction)
            if key not in known:
                try:
                    known[key] = tune(subject, target, options.budget, options.again, compiler, options.objective, only)
                except Exception as error:
                    known[key] = Outcome(reasons=(one_line(error),))
            outcomes.append((subject, known[key]))
            if not options.json:
                told = _told(subject, known[key], options.objective)
                print(f"{told['location']}: {told['spec']}\n    {told['result']}", flush=True)
    written: list[str] = []
    if options.output is not None:
        written += _write(Path(options.output), [result for outcome in known.values() for result in outcome.results])
    if only is not None:
        remeasure.answer(Path(options.only), _rows(outcomes))
        return 0
    if options.table:
        rows = _rows(outcomes)
        if options.processes > 1:
            try:
                rows = remeasure.measured(rows, options.processes, options.arguments)
            except remeasure.ProcessError as error:
                raise CommandError(f"{error}; what this one found is in its cache") from None
        written += _write_tables(rows, table_device(target.device))
    if options.json:
        told_all = [_told(subject, outcome, options.objective) for subject, outcome in outcomes]
        print(json.dumps(told_all, indent=2))
    else:
        for line in written:
            print(line)
        if not outcomes:
            print("no known computation was recognised; autopallas.explain says what was nearly one")
    return 0 if outcomes else 1


def _told(subject: Subject, outcome: Outcome, objective: str) -> dict[str, object]:
    match = subject.match
    told: dict[str, object] = {"op": match.op, "spec": str(match.spec), "direction": match.direction}
    told["location"] = subject.label
    row = outcome.row(objective)
    if row is None:
        return told | {"implementation": None, "result": f"nothing was found: {'; '.join(outcome.reasons)}"}
    sizes = dict(row.block_sizes)
    shown = " ".join(f"{size}={value}" for size, value in sizes.items())
    stated = [f"{row.evidence}, {'searched for now' if outcome.searched else 'known before'}"]
    stated += [outcome.note] if outcome.note else []
    memory = f"{row.kernel_bytes / 2**20:.2f} MiB of temporary memory, of which it takes none"
    if row.original_bytes:
        memory = f"{row.kernel_bytes / row.original_bytes:.2f}x its memory"
    figures = f"{row.speedup:.2f}x the original's speed, {memory}"
    return told | {
        "implementation": outcome.implementation,
        "block_sizes": sizes,
        "kernel_us": row.kernel_us,
        "original_us": row.original_us,
        "kernel_bytes": row.kernel_bytes,
        "original_bytes": row.original_bytes,
        "evidence": row.evidence,
        "searched": outcome.searched,
        "key": outcome.digest,
        "result": f"{outcome.implementation} {shown}: {figures} ({'; '.join(stated)})",
    }


# ---------------------------------------------------------------------- what is tuned


def _subjects(options: argparse.Namespace, platform: str) -> list[Subject]:
    if (options.what is None) == (options.report is None):
        raise CommandError("name an operation, MODULE:FUNCTION, or --from a saved report: one of them")
    if any(not words.split() for words in options.filter):
        raise CommandError("--filter is empty; give words of a case's name, such as causal, or leave it out")
    if options.what in OPERATIONS:
        return _of_operation(options.what, options, platform)
    function = function_of(options.what) if ":" in (options.what or "") else None
    if isinstance(function, Pattern) and function.operands:
        return _of_operation(function.name, options, platform)
    for name in ("variant", "direction", "filter"):
        if getattr(options, name):
            raise CommandError(f"--{name} is of operations: {', '.join(OPERATIONS)}")
    if options.report is not None:
        if options.shapes is not None:
            raise CommandError("--from has the shapes of its report, and takes no --shapes")
        return _of_report(options.report)
    if function is None:
        raise CommandError(
            f"{options.what!r} is no operation ({', '.join(OPERATIONS)}), and no MODULE:FUNCTION, such as model:loss"
        )
    if options.shapes is None:
        raise CommandError(f'{options.what} needs its arguments, as in --shapes "f32[8,1024],i32[8]"')
    return _of_program(function, shapes_of(options.shapes), options.what)


def _of_program(function: ArrayFunction, shapes: tuple[PyTree, ...], name: str) -> list[Subject]:
    """Returns the sites of a function; for an optimized one, those of the original."""
    settings = resolve(function._explicit if isinstance(function, Optimized) else {})
    original = function._function if isinstance(function, Optimized) else function
    program = traced(name, original, shapes)
    _, matches, _ = find_sites(Passes(program, checked=False), program, settings, divided=False)
    return [Subject(match, match.location) for match in matches]


def _of_operation(op: str, options: argparse.Namespace, platform: str) -> list[Subject]:
    """Returns the cases of the table's grid, or that of the shapes, in the requested directions."""
    offered = cases_of(op)
    if offered is None:
        raise CommandError(f"{op} has no grid; tune a function that computes it: MODULE:FUNCTION --shapes ...")
    if options.variant is not None and options.variant not in offered.ORIGINALS:
        raise CommandError(f"{op} has no variant {options.variant!r}; it has {', '.join(offered.ORIGINALS)}")
    if options.shapes is not None:
        cases = _of_shapes(offered, options)
    else:
        cases = [
            case
            for case in offered.table_grid(platform)
            if options.variant in (None, case.mask)
            and options.direction in (None, case.direction)
            and (not options.filter or any(case.selected_by(words) for words in options.filter))
        ]
        if not cases:
            chosen = "--variant, --direction and --filter"
            raise CommandError(f"no case of {op}'s table is selected by {chosen}; without these all are tuned")
    try:
        return [of_case(case) for case in cases]
    except ValueError as error:
        raise CommandError(str(error)) from None


def _of_shapes(offered: Cases, options: argparse.Namespace) -> list[Case]:
    if options.filter:
        raise CommandError("--filter selects cases of the table, but --shapes gives the case")
    types, variant = shapes_of(options.shapes), options.variant or next(iter(offered.ORIGINALS))
    directions = (options.direction,) if options.direction else DIRECTIONS
    try:
        return [offered.case_of(types, variant, direction) for direction in directions]
    except ValueError as error:
        raise CommandError(f"--shapes {options.shapes!r}: {error}") from None


def _of_report(path: str) -> list[Subject]:
    """Returns every site of a saved report, or of a list of reports."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(text) > _MOST_BYTES:
        raise CommandError(f"{path} is longer than {_MOST_BYTES} bytes")
    try:
        data = json.loads(text)
        reports = [Report.from_dict(item) for item in (data if isinstance(data, list) else [data])]
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path} is no report: {one_line(error)}") from None
    sites = [site for report in reports for site in report.sites]
    subjects, refused = [], []
    for site in sites:
        try:
            match = saved_site(site.op, site.direction, site.encoded, site.location)
            subjects.append(Subject(match, site.location))
        except EncodingError as error:
            refused.append(f"{site.location}: {error}")
    if sites and not subjects:
        raise CommandError(f"{path}: none of its {len(sites)} sites can be made anew: {refused[0]}")
    for line in refused:
        print(f"autopallas tune: not tuned: {line}", file=sys.stderr)
    return subjects


# ---------------------------------------------------------------------- what is written


def _write(folder: Path, results: Sequence[raw.Result]) -> list[str]:
    try:
        files = raw.write(folder, results)
    except OSError as error:
        raise CommandError(f"--output {folder}: {error.strerror or error}") from None
    return [f"wrote {len(results)} results to {file}" for file in files]


def _write_tables(found: Mapping[str, Mapping[Key, Row[BlockSizes]]], device: str) -> list[str]:
    """Writes the rows of each operation into the tables' files, beside those that were not tuned now."""
    written = []
    for op, rows in found.items():
        table = operation_named(op).part("tuned_block_sizes").TABLE
        if not isinstance(table, Table):
            written.append(f"wrote none of {len(rows)} rows: {op} has no table")
            continue
        path = table.files.path(device)
        try:
            table.files.write(device, rows, both_objectives=True)
        except OSError as error:
            raise CommandError(f"--table: {path} cannot be written: {error.strerror or error}") from None
        written.append(f"wrote {len(rows)} rows into {path}")
    return written


def _rows(outcomes: Sequence[tuple[Subject, Outcome]]) -> dict[str, dict[Key, Row[BlockSizes]]]:
    """Returns the rows of each operation; of several with one key, that of the least gain."""
    found: dict[str, dict[Key, Row[BlockSizes]]] = {}
    for subject, outcome in outcomes:
        own = found.setdefault(subject.match.op, {})
        for key, row in outcome.rows(subject.match.op).items():
            if key not in own or row.speedup < own[key].speedup:
                own[key] = row
    return {op: rows for op, rows in found.items() if rows}
