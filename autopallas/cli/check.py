"""``autopallas check``: tells whether a function still has the sites that its lockfile applies."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from typing import TypeVar

from autopallas.patterns.match import Match, NearMiss
from autopallas.places import users_place
from autopallas.plan.decision import Decision
from autopallas.sites.device import Device
from autopallas.tuning.lock import Lock, LockedSite, identity, place, read

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("file", metavar="FILE", help="the lockfile; the module that it names is imported")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from autopallas.cli.program import function_of, shapes_of, sites_of

    lock = read(options.file)
    function = function_of(lock.function)
    asked = {"lock": options.file, "autotune": False, "require": {}}
    sites = sites_of(lock.function, function, shapes_of(lock.shapes), asked)
    here = (sites.device.platform, sites.device.kind) == (lock.platform, lock.device_kind)
    lost = []
    for site, found in _paired(lock, list(zip(sites.matches, sites.decisions, strict=True))):
        if found is None:
            lost.append(_told(site, sites.matches, sites.misses))
        elif here and found[1].verdict == "kept":
            lost.append(_entry(site, f"found, but not replaced: {found[1].reason}", "", found[0].location))
    new = [m.location for m in sites.matches if lock.find(m) is None]
    held = sum(site.verdict == "applied" for site in lock.sites) - len(lost)
    problem, compared = _certificate(lock, options.file, sites.device)
    failed = int(bool(lost) or (compared and bool(problem)))
    if options.json:
        digest = {"compared": compared, "same": compared and not problem, "reason": problem}
        data = {"ok": not failed, "held": held, "lost": lost, "new": new, "device": here, "digest": digest}
        print(json.dumps(data, indent=2))
        return failed
    for entry in lost:
        print(f"lost: {entry['op']} at {entry['location']} ({entry['spec']})\n    {entry['reason']}")
        if entry["near_miss"]:
            print(f"    near miss at {entry['at']}: {entry['near_miss']}")
    for location in new:
        print(f"new: a site at {location} that is not locked, so its original runs; write the lockfile anew to use it")
    if not here:
        print(f"only recognition was checked: the lockfile is for {lock.platform} ({lock.device_kind})")
    print(f"{options.file}: {held} of {held + len(lost)} applied sites hold")
    told = problem or "it is the one that was locked"
    print(f"the program: {told if compared else f'not compared, since {problem}'}")
    return failed


def _certificate(lock: Lock, path: str, device: Device) -> tuple[str, bool]:
    """Returns why the program is not the one that was locked, or could not be compared, and whether it was compared."""
    from autopallas import compat
    from autopallas.cli.program import function_of, rewritten_program, shapes_of
    from autopallas.tuning import certificate

    here = (device.platform, device.kind) == (lock.platform, lock.device_kind)
    if not here or certificate.setting(device, compat.versions()) not in lock.digests:
        known = "; ".join(sorted(lock.digests)) or "no device"
        return f"it was locked for {known}", False
    program = rewritten_program(lock.function, function_of(lock.function), shapes_of(lock.shapes), {"lock": path})
    return certificate.problem(program, lock, device), True


def _paired(
    lock: Lock, found: Sequence[tuple[Match, Decision]]
) -> Iterator[tuple[LockedSite, tuple[Match, Decision] | None]]:
    """Pairs each applied site with a separate (match, decision) that computes the same, or None."""
    left: dict[str, list[tuple[Match, Decision]]] = {}
    for pair in found:
        left.setdefault(identity(pair[0]), []).append(pair)
    for site in lock.sites:
        if site.verdict == "applied":
            same = left.get(site.identity)
            yield site, same.pop(0) if same else None


def _told(site: LockedSite, matches: Sequence[Match], misses: Sequence[NearMiss]) -> dict[str, str]:
    """Returns why a site is lost: it computes something else now, or it is a near miss; the nearest of its kind."""
    changed = _nearest(
        site, [m for m in matches if m.op == site.op and _function(m.location) == _function(site.location)]
    )
    near = _nearest(site, [m for m in misses if m.op == site.op])
    if near is not None and (changed is None or _function(near.location) == _function(site.location)):
        return _entry(site, "it is not recognised any more", near.reason, near.location)
    if changed is not None:
        return _entry(site, f"the site there is now another one: {changed.spec}", "", changed.location)
    return _entry(site, "nothing like it is in the program", "", "")


def _entry(site: LockedSite, reason: str, near_miss: str, at: str) -> dict[str, str]:
    told = {"op": site.op, "location": site.location, "spec": site.spec, "reason": reason}
    return told | {"near_miss": near_miss, "at": at}


Located = TypeVar("Located", Match, NearMiss)


def _nearest(site: LockedSite, candidates: Sequence[Located]) -> Located | None:
    """Returns the candidate in the same function or file; of several, the one on the nearest line."""

    def distance(candidate: Located) -> tuple[bool, bool, int]:
        same_function = _function(candidate.location) == _function(site.location)
        same_file = _file(candidate.location) == _file(site.location)
        return not same_function, not same_file, abs(_line(candidate.location) - _line(site.location))

    return min(candidates, key=distance, default=None)


_PLACE = re.compile(r"(?P<file>.*):(?P<line>\d+) \((?P<function>.*)\)")


def _file(location: str) -> str:
    found = _PLACE.fullmatch(place(users_place(location), "/"))
    return found["file"].rpartition("/")[2] if found else location


def _line(location: str) -> int:
    found = _PLACE.fullmatch(users_place(location))
    return int(found["line"]) if found else 0


def _function(location: str) -> tuple[str, str]:
    found = _PLACE.fullmatch(users_place(location))
    return _file(location), found["function"] if found else ""
