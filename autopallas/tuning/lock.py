"""Lockfiles: record the decision for each site of a program once, so that it is reviewed and no longer decided.

A lockfile is JSON, and data only: reading one executes, imports and opens nothing.  Sites are identified by what they
compute (operation, direction, sizes, dtypes, score program, mask), not by their place: moving code changes nothing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal, TypedDict, cast

from autopallas.environment import places
from autopallas.errors import OptionError
from autopallas.numerics.classes import CLASSES, Numerics, allows
from autopallas.places import users_place
from autopallas.sites.device import Device
from autopallas.sites.operation import operation_named
from autopallas.sites.spec import BlockSizes
from autopallas.sites.workload import Workload
from autopallas.tuning.entry import Entry, EntryError, Sizes, checked_object, checked_sizes, read_json, shortened
from autopallas.tuning.key import digest_of
from autopallas.tuning.table import Evidence, Row
from autopallas.version import __version__

if TYPE_CHECKING:
    from autopallas.options import Options
    from autopallas.patterns.match import Match
    from autopallas.plan.decision import Decision

__all__ = ["FORMAT", "Lock", "LockError", "LockedSite", "identity", "pinned", "read", "written"]

FORMAT = 2
"""Version number, which rises whenever the fields of a lockfile, or their meaning, change."""

_MOST_BYTES = 16 * 2**20
_MOST_SITES = 10_000
_LONGEST_TEXT = 4000
_EVIDENCE = ("measured", "quickly measured", "simulated", "estimated")
_FIGURES = ("kernel_us", "original_us", "kernel_bytes", "original_bytes")


class LockError(ValueError):
    """Raised if a text is no lockfile; the message says why."""


class RowEvidence(TypedDict):
    """A row without its block sizes."""

    kernel_us: float
    original_us: float
    kernel_bytes: int
    original_bytes: int
    evidence: Evidence
    date: str
    versions: str


@dataclass(frozen=True, slots=True)
class LockedSite:
    """One site and its decision.

    Attributes:
      op: the operation.
      location: its place when the file was written; for people.
      path: the bodies around it, outermost first; for people.
      direction: "forward" or "forward+backward".
      spec: its description in one line; for people.
      identity: the hash of all that it computes; see :func:`identity`.
      verdict: "applied" or "kept".
      reason: the reason when the file was written.
      implementation: what runs there, if it is applied.
      numerics: the class of its results, if it is applied.
      block_sizes: by name, if it is applied.
      evidence: the row of a table or of the cache that the verdict rests on, without its block sizes.
    """

    op: str
    location: str
    path: str
    direction: str
    spec: str
    identity: str
    verdict: Literal["applied", "kept"]
    reason: str
    implementation: str | None = None
    numerics: Numerics | None = None
    block_sizes: Sizes | None = None
    evidence: RowEvidence | None = None

    def sizes_for(self, op: str) -> BlockSizes:
        """Returns the block sizes as the operation's class.

        Raises:
          LockError: they are not that operation's.
        """
        kind = operation_named(op).part("block_sizes").BlockSizes
        try:
            return Entry({}, "tuned", self.block_sizes).sizes_for(kind)
        except EntryError as error:
            raise LockError(str(error)) from None

    def row(self, block_sizes: BlockSizes) -> Row[BlockSizes] | None:
        """Returns the evidence as a row."""
        return None if self.evidence is None else Row(block_sizes, **self.evidence)


@dataclass(frozen=True, slots=True)
class Lock:
    """A lockfile.

    Attributes:
      function: "module:function" that has the sites.
      shapes: its arguments, as ``--shapes`` takes them.
      platform, device_kind: the device for which the sites were decided.
      versions: of autopallas, jax and jaxlib at that time; for people.
      numerics: the class of numerics that was allowed; what is not allowed by it is not used.
      only: places at which sites may be replaced, beside what options say; none: everywhere.
      deny: places at which no site is replaced, beside what options say.
      digests: for each platform and version (:func:`autopallas.tuning.certificate.setting`), the digest of the program
        with these sites.
      sites: the sites in the order of the program.
    """

    function: str
    shapes: str
    platform: str
    device_kind: str
    versions: Mapping[str, str]
    sites: tuple[LockedSite, ...]
    numerics: Numerics = "tolerance"
    only: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)

    def find(self, match: Workload) -> LockedSite | None:
        """Returns the site that computes what ``match`` does, or None; an applied one, where others are denied."""
        wanted = identity(match)
        found = [site for site in self.sites if site.identity == wanted]
        return next((site for site in found if site.verdict == "applied"), next(iter(found), None))

    def to_json(self) -> str:
        """Returns the file's text: equal locks give equal texts, with one field on each line."""
        data: dict[str, object] = {"autopallas_lock": FORMAT}
        data |= {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sites"}
        data["versions"] = dict(sorted(self.versions.items()))
        data["digests"] = dict(sorted(self.digests.items()))
        data["only"], data["deny"] = list(self.only), list(self.deny)
        data["sites"] = [_plain(site) for site in self.sites]
        return json.dumps(data, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Lock:
        """Reads a lockfile.

        Raises:
          LockError: it is none; the message names the wrong field.

        Example:
          >>> lock = Lock("model:loss", "f32[8,1024]", "cpu", "cpu", {"jax": "0.12.0"}, ())
          >>> Lock.from_json(lock.to_json()) == lock
          True
        """
        try:
            data = read_json(text)
        except EntryError as error:
            raise LockError(str(error)) from None
        version = data.get("autopallas_lock") if isinstance(data, dict) else None
        if version is None:
            raise LockError("it has no field autopallas_lock")
        if version != FORMAT or isinstance(version, bool):
            older = isinstance(version, int) and version < FORMAT
            remedy = "; write it anew with `autopallas lock`" if older else ""
            raise LockError(f"its format is {ascii(version)[:40]}; this autopallas reads {FORMAT}{remedy}")
        names = {f.name for f in fields(cls)}
        data = checked_object(data, {*names, "autopallas_lock"}, "the file", LockError)
        sites = data["sites"]
        if not isinstance(sites, list) or len(sites) > _MOST_SITES:
            raise LockError(f"sites is not a list of up to {_MOST_SITES}")
        return cls(
            **{name: _text(data[name], name) for name in ("function", "shapes", "platform", "device_kind")},
            versions=_texts(data["versions"], "versions"),
            numerics=_class(data["numerics"], "numerics"),
            digests=_texts(data["digests"], "digests"),
            only=_places(data["only"], "only"),
            deny=_places(data["deny"], "deny"),
            sites=tuple(_site(site, f"sites[{number}]") for number, site in enumerate(sites)),
        )


def identity(match: Workload) -> str:
    """Returns the hash of what a site computes: equal for sites that may share a decision."""
    specs = [part.spec.to_dict() for part in match.passes]
    return digest_of({"op": match.op, "direction": match.direction, "specs": specs})


def read(path: str | os.PathLike[str]) -> Lock:
    """Reads a lockfile from the disk.

    Raises:
      OptionError: there is no file, or it is no lockfile.
    """
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise OptionError(f"the lockfile {name!r} cannot be read: {error.strerror or error}") from None
    if len(text) > _MOST_BYTES:
        raise OptionError(f"the lockfile {name!r} is longer than {_MOST_BYTES} bytes")
    try:
        return Lock.from_json(text)
    except LockError as error:
        raise OptionError(f"{name!r} is no lockfile: {error}") from None


def pinned(options: Options) -> Options:
    """Returns options that allow no looser numerics than their lockfile, if they name one.

    Raises:
      OptionError: they name a lockfile that cannot be read.
    """
    lock = None if options.lock is None else read(options.lock)
    if lock is None or allows(lock.numerics, options.numerics):
        return options
    return replace(options, numerics=lock.numerics)


def _plain(site: LockedSite) -> dict[str, object]:
    data = {f.name: getattr(site, f.name) for f in fields(site)}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in data.items()}


# ---------------------------------------------------------------------- writing


def written(
    matches: Sequence[Match],
    decisions: Sequence[Decision],
    function: str,
    shapes: str,
    device: Device,
    folder: str,
    options: Options | None = None,
) -> Lock:
    """Returns the lock of a program.

    Args:
      matches: the program's sites.
      decisions: the decision about each site.
      function: "module:function".
      shapes: the function's arguments.
      device: the device for which it was decided.
      folder: the folder of the lockfile; names of files below it are relative to it.
      options: the options in force; None: the defaults.
    """
    from autopallas import compat

    versions = {name: text for name, text in compat.versions().items() if name != "python"}
    return Lock(
        function=function,
        shapes=shapes,
        platform=device.platform,
        device_kind=device.kind,
        versions={"autopallas": __version__, **versions},
        numerics="tolerance" if options is None else options.numerics,
        only=() if options is None else options.only or (),
        deny=() if options is None else options.deny,
        sites=tuple(_locked(match, decision, folder) for match, decision in zip(matches, decisions, strict=True)),
    )


def _locked(match: Match, decision: Decision, folder: str) -> LockedSite:
    applied = decision.verdict == "applied"
    evidence = None
    if decision.evidence is not None:
        names = (*_FIGURES, "evidence", "date", "versions")
        evidence = cast(RowEvidence, {name: getattr(decision.evidence, name) for name in names})
    return LockedSite(
        op=match.op,
        location=place(match.location, folder),
        path=" > ".join(match.body.path),
        direction=match.direction,
        spec=str(match.spec),
        identity=identity(match),
        verdict=decision.verdict,
        reason=decision.reason,
        implementation=decision.implementation if applied else None,
        numerics=match.site.operation.numerics(decision.implementation or "", match.spec) if applied else None,
        block_sizes=decision.block_sizes.to_dict() if applied and decision.block_sizes is not None else None,
        evidence=evidence,
    )


def place(location: str, folder: str) -> str:
    """Returns a location with its file relative to a folder, or its name alone if it is elsewhere: the same everywhere.

    Example:
      >>> place("/home/me/project/model/attention.py:12 (attend)", "/home/me/project")
      'model/attention.py:12 (attend)'
      >>> place("/usr/lib/library.py:3 (f)", "/home/me/project")
      'library.py:3 (f)'
    """
    file, colon, rest = users_place(location).rpartition(":")
    if not colon:
        return location
    relative = os.path.relpath(file, folder) if os.path.isabs(file) else file
    outside = relative.split(os.sep)[0] == os.pardir or os.path.isabs(relative)
    return f"{os.path.basename(file) if outside else relative.replace(os.sep, '/')}:{rest}"


# ---------------------------------------------------------------------- reading


def _site(data: object, where: str) -> LockedSite:
    data = checked_object(data, {f.name for f in fields(LockedSite)}, where, LockError)
    verdict = data["verdict"]
    if verdict not in ("applied", "kept"):
        raise LockError(f"{where}.verdict is {shortened(verdict)}, not applied or kept")
    texts = ("op", "location", "path", "direction", "spec", "identity", "reason")
    applied = verdict == "applied"
    if not applied and data["block_sizes"] is not None:
        raise LockError(f"{where} has block sizes, although it is kept")
    return LockedSite(
        **{name: _text(data[name], f"{where}.{name}") for name in texts},
        verdict=verdict,
        implementation=_text(data["implementation"], f"{where}.implementation") if applied else None,
        numerics=_class(data["numerics"], f"{where}.numerics") if applied else None,
        block_sizes=checked_sizes(data["block_sizes"], f"{where}.block_sizes", LockError) if applied else None,
        evidence=None if data["evidence"] is None else _evidence(data["evidence"], f"{where}.evidence"),
    )


def _texts(data: object, where: str) -> dict[str, str]:
    if not isinstance(data, dict) or len(data) > _MOST_SITES:
        raise LockError(f"{where} is not an object of up to {_MOST_SITES}")
    return {_text(name, where): _text(text, f"{where}.{name}") for name, text in data.items()}


def _class(data: object, where: str) -> Numerics:
    if data not in CLASSES:
        raise LockError(f"{where} is {shortened(data)}, not one of {', '.join(CLASSES)}")
    return data


def _places(data: object, where: str) -> tuple[str, ...]:
    if not isinstance(data, list) or len(data) > _MOST_SITES:
        raise LockError(f"{where} is {shortened(data)}, not a list of up to {_MOST_SITES}")
    try:
        return places(where, [_text(one, where) for one in data])
    except OptionError as error:
        raise LockError(str(error)) from None


def _evidence(data: object, where: str) -> RowEvidence:
    data = checked_object(data, {*_FIGURES, "evidence", "date", "versions"}, where, LockError)
    for name in _FIGURES:
        value, timed = data[name], name.endswith("_us")
        kinds = (int, float) if timed else (int,)
        if not isinstance(value, kinds) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
            raise LockError(f"{where}.{name} is {shortened(value)}, not a number of 0 or more")
        if timed and not value:
            raise LockError(f"{where}.{name} is {shortened(value)}, not a time above 0")
    if data["evidence"] not in _EVIDENCE:
        raise LockError(f"{where}.evidence is {shortened(data['evidence'])}, not one of {', '.join(_EVIDENCE)}")
    texts = {name: _text(data[name], f"{where}.{name}") for name in ("date", "versions")}
    return cast(RowEvidence, {name: data[name] for name in _FIGURES} | {"evidence": data["evidence"]} | texts)


def _text(data: object, where: str) -> str:
    if not isinstance(data, str) or len(data) > _LONGEST_TEXT or not data.isprintable():
        raise LockError(f"{where} is {shortened(data)}, not a printable text of up to {_LONGEST_TEXT} characters")
    return data
