"""``autopallas lock``: writes down the decision about each site of a function."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autopallas.cli import CommandError
from autopallas.cli.numbers import seconds
from autopallas.environment import OBJECTIVES
from autopallas.errors import OptionError, one_line
from autopallas.numerics.classes import CLASSES

if TYPE_CHECKING:
    from autopallas.compat import PyTree
    from autopallas.sites.device import Device
    from autopallas.tuning.lock import Lock, LockedSite

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="whose sites are locked; it is traced, not run")
    parser.add_argument("--shapes", required=True, help='its arguments, such as "f32[8,1024],i32[8]"')
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the file to write; - prints it")
    parser.add_argument("--objective", choices=OBJECTIVES, help="what a replacement has to improve")
    parser.add_argument("--numerics", choices=CLASSES, help="how far results may differ from the original's")
    for name, text in (("only", "places at which sites may be replaced"), ("deny", "places at which none is")):
        parser.add_argument(f"--{name}", action="append", metavar="PLACE", help=f"{text}: FILE:LINE, scope:NAME, ...")
    parser.add_argument(
        "--autotune",
        action=argparse.BooleanOptionalAction,
        help="search for block sizes where no table has them (on accelerators by default)",
    )
    parser.add_argument("--budget", type=seconds, metavar="SECONDS", help="time for each search (default 30)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from autopallas.cli.program import function_of, shapes_of, sites_of
    from autopallas.tuning.lock import written

    arguments = shapes_of(options.shapes)
    given = {name: getattr(options, name) for name in ("objective", "numerics", "only", "deny")}
    given |= {"autotune": options.autotune, "tune_seconds": options.budget}
    asked = {name: value for name, value in given.items() if value is not None} | {"lock": None, "require": {}}
    sites = sites_of(options.function, function_of(options.function), arguments, asked)
    printed = options.output == "-"
    folder = os.getcwd() if printed else os.path.dirname(os.path.abspath(options.output))
    unsigned = written(
        sites.matches, sites.decisions, options.function, options.shapes, sites.device, folder, sites.options
    )
    before = options.output if os.path.isfile(options.output) else None
    lock = _certified(unsigned, arguments, sites.device, before)
    if printed:
        sys.stdout.write(lock.to_json())
        return 0
    _write(Path(options.output), lock.to_json())
    applied = sum(site.verdict == "applied" for site in lock.sites)
    kept = len(lock.sites) - applied
    if options.json:
        print(json.dumps({"file": options.output, "applied": applied, "kept": kept, **_tuning(sites.tuner)}, indent=2))
        return 0
    misses = len(sites.misses)
    print(f"wrote {options.output}: {applied} applied, {kept} kept, {misses} near miss{'es' * (misses != 1)}")
    print("the program is certified for " + "; ".join(lock.digests))
    for line, count in Counter(map(_line, lock.sites)).items():
        print(line + (f", {count} times" if count > 1 else ""))
    return 0


def _line(site: LockedSite) -> str:
    sizes = " ".join(f"{name}={value}" for name, value in (site.block_sizes or {}).items())
    return f"  {site.op} at {site.location}: {' '.join(filter(None, (site.verdict, site.implementation, sizes)))}"


def _certified(lock: Lock, arguments: Sequence[PyTree], device: Device, before: str | None) -> Lock:
    """Returns the lock with the digest of its program here, and with those that a file with the same sites has."""
    from autopallas import compat
    from autopallas.cli.program import function_of, rewritten_program
    from autopallas.tuning.certificate import digest_of, setting

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lock"
        path.write_text(lock.to_json(), encoding="utf-8")
        program = rewritten_program(lock.function, function_of(lock.function), arguments, {"lock": str(path)})
    try:
        own = {setting(device, compat.versions()): digest_of(program)}
    except Exception as error:
        raise CommandError(f"{lock.function} cannot be lowered with these shapes: {one_line(error)}") from None
    return replace(lock, digests={**_digests_before(lock, before), **own})


def _digests_before(lock: Lock, path: str | None) -> Mapping[str, str]:
    """Returns the digests that other versions and platforms gave the program with these sites."""
    from autopallas.tuning.lock import read

    try:
        old = None if path is None else read(path)
    except OptionError:
        return {}
    if old is None or (old.function, old.shapes, _decided(old)) != (lock.function, lock.shapes, _decided(lock)):
        return {}
    return old.digests


def _decided(lock: Lock) -> list[tuple[object, ...]]:
    return [(site.identity, site.implementation, site.block_sizes) for site in lock.sites]


def _tuning(tuner: object) -> dict[str, int]:
    return {name: getattr(tuner, name) for name in ("searches", "cache_hits")}


def _write(path: Path, text: str) -> None:
    """Writes the whole file or none of it; what is no file, such as a pipe, is written to and not replaced."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise CommandError(f"{path} cannot be written: {error.strerror or error}") from None
