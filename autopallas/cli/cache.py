"""``autopallas cache``: lists the tuning results and verdicts on disk, removes them, and carries results between
machines."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from autopallas.cli import CommandError
from autopallas.errors import printable
from autopallas.sites.spec import Sizes
from autopallas.tuning.cache import Cache
from autopallas.tuning.entry import MAXIMUM_BYTES, Entry, EntryError, from_data, read_json
from autopallas.tuning.probe_cache import ProbeResult, ProbeResults
from autopallas.tuning.table import Row

__all__ = ["add"]

_ARCHIVE = "autopallas tuning results"
_MOST_BYTES = 256 * 2**20
_SHORT = 12
"""Number of characters of a key to show; any beginning that only one key has can stand for the whole."""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")

    def action(name: str, purpose: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
        made.add_argument("--json", action="store_true", help="print JSON")
        made.set_defaults(run=run)
        return made

    action("list", "all results and verdicts, one on each line", _list)
    action("show", "one of them in full", _show).add_argument("key", help="a key, or its beginning")
    action("clear", "remove all results and verdicts", _clear)
    exported = action("export", "write all results into one file", _export)
    exported.add_argument("file", help="the file to write, or - for standard output")
    imported = action("import", "add the results of a file that `export` wrote", _import)
    imported.add_argument("file", help="the file to read, or - for standard input")


def _folders() -> tuple[Cache, ProbeResults]:
    """Returns the results and the verdicts.

    Raises:
      CommandError: a folder cannot be read, so that nothing would seem to be in it.
    """
    found = Cache.current(), ProbeResults.current()
    for kept in found:
        if reason := kept.unreadable():
            raise CommandError(f"{kept.folder} cannot be read: {reason}")
    return found


def _everything() -> list[Entry | ProbeResult]:
    results, verdicts = _folders()
    return [*results.entries(), *verdicts.entries()]


# ---------------------------------------------------------------------- actions


def _list(options: argparse.Namespace) -> int:
    cache = Cache.current()
    entries = _everything()
    if options.json:
        return _print_json([_summary(entry) for entry in entries])
    if not entries:
        print(f"no results in {cache.folder}")
        return 0
    rows: list[tuple[str, ...]] = [("key", "operation", "implementation", "direction", "bucket", "device", "result")]
    for entry in entries:
        told = _summary(entry)
        rows.append((told["key"][:_SHORT], *(str(told[name]) for name in rows[0][1:])))
    print(_table(rows))
    return 0


def _show(options: argparse.Namespace) -> int:
    entry = _the_one(_everything(), options.key)
    if options.json:
        return _print_json({"digest": entry.digest} | entry.to_dict())
    if isinstance(entry, ProbeResult):
        return _print_json({"digest": entry.digest} | entry.to_dict())
    told = _summary(entry)
    lines = [(name, str(told[name])) for name in ("key", *(name for name in told if name != "key"))]
    lines += [(name, str(dict(entry.key)[name])) for name in ("platform", "runtime", "kernel_version")]
    if entry.lean is not None:
        lines.append(("least memory", _result(entry.lean)))
    settings = entry.key["versions"] | entry.key["flags"]
    lines += [(name, str(value)) for name, value in settings.items() if value]
    lines += [("not used", f"{_sizes(r.block_sizes)}: {r.stage}: {r.error}") for r in entry.rejected]
    lines += [("spec", json.dumps(spec, indent=2)) for spec in entry.key["specs"]]
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        first, *rest = text.split("\n")
        print(f"{name:<{width}}  {printable(first)}")
        for line in rest:
            print(" " * (width + 2) + printable(line))
    return 0


def _clear(options: argparse.Namespace) -> int:
    cache, verdicts = _folders()
    try:
        removed = cache.clear() + verdicts.clear()
    except OSError as error:
        raise CommandError(f"not everything could be removed: {error}") from None
    if options.json:
        return _print_json({"removed": removed})
    print(f"removed {_counted(removed)} from {cache.folder and cache.folder.parent}")
    return 0


def _export(options: argparse.Namespace) -> int:
    entries = [entry.to_dict() for entry in _folders()[0].entries()]
    text = json.dumps({"archive": _ARCHIVE, "entries": entries}, indent=1, sort_keys=True) + "\n"
    if options.file == "-":
        sys.stdout.write(text)
        return 0
    try:
        Path(options.file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{options.file} cannot be written: {error.strerror or error}") from None
    if options.json:
        return _print_json({"exported": len(entries)})
    print(f"wrote {_counted(len(entries))} to {options.file}")
    return 0


def _import(options: argparse.Namespace) -> int:
    cache = Cache.current()
    entries = _archived(options.file)
    for done, entry in enumerate(entries):
        if not cache.put(entry):
            raise CommandError(f"{_counted(done)} of {len(entries)} were kept in {cache.folder}, which takes no more")
    if options.json:
        return _print_json({"imported": len(entries)})
    print(f"added {_counted(len(entries))} to {cache.folder}")
    return 0


def _archived(file: str) -> list[Entry]:
    """Reads all entries of a file that ``export`` wrote, or none: each is checked before the first is kept."""
    try:
        if file == "-":
            data = sys.stdin.buffer.read(_MOST_BYTES + 1)
        elif not os.path.isfile(file):
            raise CommandError(f"{file} is no file" if os.path.exists(file) else f"there is no file {file}")
        else:
            with open(file, "rb") as opened:
                data = opened.read(_MOST_BYTES + 1)
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror or error}") from None
    if len(data) > _MOST_BYTES:
        raise CommandError(f"{file} is longer than {_MOST_BYTES} bytes")
    try:
        archive = read_json(data)
    except EntryError as error:
        raise CommandError(f"{file} holds no tuning results: {error}") from None
    if not isinstance(archive, dict) or archive.get("archive") != _ARCHIVE:
        raise CommandError(f"{file} holds no tuning results: `autopallas cache export` did not write it")
    listed = archive.get("entries")
    if not isinstance(listed, list):
        raise CommandError(f"{file} holds no tuning results: it has no list of entries")
    entries = []
    for number, item in enumerate(listed, 1):
        try:
            entry = from_data(item)
            if len(entry.to_json()) > MAXIMUM_BYTES:
                raise EntryError(f"it is longer than {MAXIMUM_BYTES} bytes")
        except EntryError as error:
            raise CommandError(f"{file}: entry {number} cannot be used: {error}") from None
        entries.append(entry)
    return entries


# ---------------------------------------------------------------------- what is told of an entry


def _summary(entry: Entry | ProbeResult) -> dict[str, str]:
    if isinstance(entry, ProbeResult):
        until = datetime.datetime.fromtimestamp(entry.until).date().isoformat()
        told = f"{entry.outcome}{f' ({entry.stage}): {entry.error}' if entry.stage else ''}, until {until}"
        names = {"operation": "operation", "implementation": "implementation", "direction": "direction"}
        shown = {name: str(entry.key.get(field, "")) for name, field in (names | {"device": "device_kind"}).items()}
        bucket = entry.key.get("bucket")
        bucketed = " ".join(map(str, bucket)) if isinstance(bucket, list) else ""
        return {"key": entry.digest} | shown | {"bucket": bucketed, "outcome": entry.outcome, "result": told}
    row = entry.row
    result = f"{entry.outcome}: {entry.reason}" if row is None else _result(row.of(entry.block_sizes or {}))
    return {
        "key": entry.digest,
        "operation": entry.key["operation"],
        "implementation": entry.key["implementation"],
        "direction": entry.key["direction"],
        "bucket": " ".join(map(str, entry.key["bucket"])),
        "device": entry.key["device_kind"],
        "outcome": entry.outcome,
        "result": result,
    }


def _result(row: Row[Sizes]) -> str:
    smaller = row.kernel_bytes / max(row.original_bytes, 1)
    return f"{_sizes(row.block_sizes)}: {row.speedup:.2f}x the speed, {smaller:.2f}x the memory ({row.date})"


def _the_one(entries: Sequence[Entry | ProbeResult], beginning: str) -> Entry | ProbeResult:
    found = [entry for entry in entries if beginning and entry.digest.startswith(beginning.lower())]
    if not found:
        raise CommandError(f"no key begins with {beginning!r}; `autopallas cache list` shows all")
    if len(found) > 1:
        raise CommandError(f"{len(found)} keys begin with {beginning!r}; give more of it")
    return found[0]


def _sizes(sizes: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in sizes.items())


def _counted(count: int) -> str:
    return f"{count} result{'s' * (count != 1)}"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(printable(row[i])) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(printable(cell).ljust(n) for cell, n in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _print_json(data: object) -> int:
    print(json.dumps(data, indent=2, sort_keys=True))
    return 0
