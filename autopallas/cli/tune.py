"""``autopallas tune``: searches for the block sizes of every site of a program, before the program runs."""

from __future__ import annotations

import argparse
import importlib
import json
import math
from typing import Any

import jax

from autopallas.cli import CommandError
from autopallas.cli.program import function_of, shapes_of
from autopallas.graph import Graph, flatten
from autopallas.kernels.implementation import Device, Supported
from autopallas.optimize import Optimized
from autopallas.options import resolve
from autopallas.patterns import Match, find
from autopallas.tuning.cache import Cache
from autopallas.tuning.entry import Entry
from autopallas.tuning.key import key_of
from autopallas.tuning.search import search

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("program", metavar="MODULE:FUNCTION", help="the function, optimized or not")
    parser.add_argument("--shapes", required=True, help='its arguments, as in "f32[8,1024],i32[8]"')
    parser.add_argument(
        "--budget", type=_seconds, default=30.0, metavar="SECONDS", help="what each site may take (default 30)"
    )
    parser.add_argument("--again", action="store_true", help="search even where there is a result")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_tune)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not (math.isfinite(seconds) and seconds > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds


def _tune(options: argparse.Namespace) -> int:
    function, shapes = function_of(options.program), shapes_of(options.shapes)
    matches = _matches(function, shapes, options.program)
    cache, device = Cache.current(), Device.current()
    results: list[dict[str, Any]] = []
    known: dict[Any, dict[str, Any]] = {}
    for match in matches:
        key = (match.op, match.site, match.direction)
        if key not in known:
            known[key] = _result(match, cache, device, options.budget, options.again)
        results.append({"location": match.location} | known[key])
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        for result in results:
            print(f"{result['location']}: {result['spec']}\n    {result['result']}")
        if not results:
            print("no known computation was recognised; autopallas.explain says what was nearly one")
    return 0 if results else 1


def _matches(function: Any, shapes: tuple[Any, ...], name: str) -> list[Match]:
    """The sites of a function; of an optimized one those of the original."""
    settings = resolve(function._explicit if isinstance(function, Optimized) else {})
    original = function._function if isinstance(function, Optimized) else function
    try:
        program = jax.make_jaxpr(original)(*shapes)
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise CommandError(f"{name} cannot be traced with these shapes: {type(error).__name__}: {reason}") from None
    return find(Graph(flatten(program)), settings.ops, settings.assume_finite)[0]


def _result(match: Match, cache: Cache, device: Device, budget: float, again: bool) -> dict[str, Any]:
    """What is known of a site after a search with the first implementation that supports it and works."""
    told: dict[str, Any] = {"op": match.op, "spec": str(match.spec), "direction": match.direction}
    reasons = []
    for name, answer in match.site.operation.candidates(match.spec, device, None):
        if not isinstance(answer, Supported):
            reasons.append(f"{name}: {answer.reason}")
            continue
        entry, searched = _entry(match, name, cache, device, budget, again)
        if entry.row is None:
            reasons.append(f"{name}: {entry.reason}")
            continue
        row, sizes = entry.row, dict(entry.block_sizes or {})
        speed = row.original_us / row.kernel_us
        origin = "searched for now" if searched else "known before"
        shown = " ".join(f"{size}={value}" for size, value in sizes.items())
        return told | {
            "implementation": name,
            "block_sizes": sizes,
            "kernel_us": row.kernel_us,
            "original_us": row.original_us,
            "searched": searched,
            "key": entry.digest,
            "result": f"{name} {shown}: {speed:.2f}x the original's speed ({origin})",
        }
    return told | {"implementation": None, "result": f"nothing was found: {'; '.join(reasons)}"}


def _entry(match: Match, name: str, cache: Cache, device: Device, budget: float, again: bool) -> tuple[Entry, bool]:
    """(the result of one implementation, whether it was searched for now)."""
    key = key_of(match, name, device)
    known = cache.get(key)
    if known is not None and not again and (known.outcome != "unfinished" or known.seconds >= budget):
        return known, False
    tables = importlib.import_module(f"autopallas.kernels.{match.op}.tuned_block_sizes")
    first = tables.infer_block_sizes(match.spec, device, name, match.direction)
    entry = search(match, name, key, first, budget, None if again else known)
    cache.put(entry)
    return entry, True
