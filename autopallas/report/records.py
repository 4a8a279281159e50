"""Records what the rewrite did and did not do, as plain frozen data.

A report holds numbers, strings, and tuples and dictionaries of these: no arrays, no jaxprs, nothing that keeps a device
or a trace alive.  It survives a round trip through JSON unchanged.
"""

from __future__ import annotations

import json
import math
import types
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

__all__ = [
    "SCHEMA_VERSION",
    "Attempt",
    "Canary",
    "Failure",
    "NearMiss",
    "Pass",
    "Rematerialised",
    "Report",
    "Site",
    "in_order",
    "plain",
]

SCHEMA_VERSION = 8
"""Version number, which rises whenever the fields of the records, or their meaning, change."""

Attempt: TypeAlias = tuple[str, str, str]
"""(implementation, stage, error): an implementation that was tried and did not work."""


def in_order(attempts: Sequence[Attempt]) -> tuple[Attempt, ...]:
    """Returns the attempts in order, but those that a description alone ruled out after those that failed."""
    return tuple(sorted(attempts, key=lambda attempt: attempt[1] == "supports"))


Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""Values that JSON can represent."""


@dataclass(frozen=True, slots=True)
class Site:
    """A place that spells out a known computation, and what was decided about it.

    There is one for each forward occurrence in the program as it runs with calls inlined: a scan body counts once, an
    unrolled loop each time; backward, rematerialised and merged copies are no further sites.
    """

    op: str
    """The operation, such as "attention"."""
    location: str
    """"file:line (function)" of the user's code."""
    path: str
    """Bodies around the site, outermost first, such as "scan > checkpoint"; empty at the top level."""
    direction: Literal["forward", "forward+backward"]
    verdict: Literal["applied", "kept"]
    """"applied": a kernel runs here.  "kept": recognised, but the original runs."""
    reason: str
    """Reason for the verdict, in words."""
    implementation: str | None = None
    """Implementation that was chosen."""
    numerics: Literal["identical", "reordered", "tolerance"] | None = None
    """How the results of that implementation relate to the original's; None where none was chosen."""
    block_sizes: Mapping[str, int | bool | str] | None = None
    """Block sizes that were chosen, as a table, a cache or a lockfile has them; None where the implementation reads
    none."""
    running_sizes: Mapping[str, int | bool | str] | None = None
    """Sizes with which the implementation computes for these, such as those nearby that divide the axes."""
    block_sizes_from: Literal["explicit", "cache", "table", "autotune", "nearest", "default"] | None = None
    measured: Mapping[str, object] | None = None
    """Row of the tuned table or of the cache that the verdict rests on."""
    attempts: tuple[Attempt, ...] = ()
    """Implementations that were tried and did not work; at the end those that are not for such a site."""
    assumptions: tuple[str, ...] = ()
    """Conditions under which the replacement equals the original, such as finite values."""
    checks: tuple[str, ...] = ()
    """Checks that the replacement makes when it runs, such as whether masked tiles may be skipped."""
    spec: Mapping[str, object] = field(default_factory=dict)
    """Description of the site: sizes, dtypes, score program, mask."""
    spec_line: str = ""
    """The same description on one line."""
    encoded: Mapping[str, object] | None = None
    """The site as data, from which ``autopallas tune --from`` makes it anew; None if it has no such form."""
    original: str = ""
    """Equations that were found, printed."""
    replacement: str = ""
    """Equations that run instead, printed; empty if the original was kept."""
    kind: str = ""
    """Kind of the site, where the operation has several: that of a respelling."""


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A place that looks like a known computation but is not, or cannot be proved to be."""

    op: str
    location: str
    reason: str
    advice: str = ""
    """Advice on what to write instead, if it is known."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of autopallas, or of a trace that cannot be made; the program ran on without the rewrite."""

    stage: str
    """Stage of the pipeline, such as "trace", "graph", "patterns", "plan", "rewrite", "lowering", "compile", "run"."""
    error: str
    """Type and message of the exception."""
    op: str = ""
    """Operation concerned, if one is known."""
    location: str = ""
    """Place in the user's code, if one is known."""


@dataclass(frozen=True, slots=True)
class Rematerialised:
    """Arrays that a backward computes again from others, in place of keeping them from the forward."""

    location: str
    """"file:line (function)" of the user's code."""
    arrays: int
    """Number of arrays that need not be kept."""
    bytes: int
    """By how much less is kept, as estimated from the sizes of arrays."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass of the pipeline over the program, and what it left."""

    name: str
    stage: str
    """Stage that it belongs to, as in a failure."""
    seconds: float
    equations: int
    """Number of equations of the program and its bodies, with calls inlined."""
    sites: int
    """Number of sites that are to be replaced, as far as is known by then."""


@dataclass(frozen=True, slots=True)
class Canary:
    """What the calls of a function gave that were compared with the original, under ``verify`` as a fraction."""

    fraction: float
    """Part of the calls that is compared."""
    compared: int
    """Number of calls that were compared."""
    errors: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """For each site, and for each output that several sites reach: how often the largest relative distance from the
    original was up to each power of ten."""
    breaches: tuple[str, ...] = ()
    """Where results were wrong, by how much, and what was disabled."""
    notes: tuple[str, ...] = ()
    """Why calls are not compared, or how."""


@dataclass(frozen=True, slots=True)
class Report:
    """Record of what happened to one traced signature of one function.

    ``str(report)`` is for people, ``to_json`` for programs, ``to_html`` for a browser.

    Example:
      >>> Report(sites=(Site("attention", "model.py:12 (attend)", "", "forward", "applied", "faster"),)).counts()
      Counter({'attention': 1})
    """

    sites: tuple[Site, ...] = ()
    """Recognised sites, replaced ("applied") or not ("kept"), one for each forward occurrence."""
    near_misses: tuple[NearMiss, ...] = ()
    """What looks like a known computation and is not one, or cannot be proved to be one."""
    failures: tuple[Failure, ...] = ()
    """What went wrong inside autopallas; the program runs without the rewrite concerned."""
    tuning: Mapping[str, int] = field(default_factory=lambda: {"searches": 0, "cache_hits": 0})
    """"searches": how many searches for block sizes were run; "cache_hits": how many answers came from the disk."""
    platform: str = ""
    """Platform for which was decided: "cpu", "gpu" or "tpu"."""
    device_kind: str = ""
    """The device's own name."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of Python, jax and jaxlib, and of a CPU the vector extensions."""
    notes: tuple[str, ...] = ()
    """What was asked for without effect, such as a place under ``deny`` that is no site's."""
    rematerialised: tuple[Rematerialised, ...] = ()
    """What backwards compute again, in place of keeping it."""
    schema_version: int = SCHEMA_VERSION
    """Version of the JSON form; a later one is refused when it is read."""
    canary: Canary | None = field(default=None, compare=False)
    """What compared calls of the function gave so far; None without them."""
    trace: tuple[Pass, ...] = field(default=(), compare=False)
    """Passes of the pipeline, in order; they are not compared, since their times differ from run to run."""

    def counts(self) -> Counter[str]:
        """Returns the number of applied sites per operation; an operation without any counts 0."""
        return Counter(site.op for site in self.sites if site.verdict == "applied")

    def to_dict(self) -> dict[str, Json]:
        """Returns the report as JSON's types: dictionaries, lists, strings, numbers, booleans and None."""
        result = plain(self)
        assert isinstance(result, dict)
        return result

    def to_json(self) -> str:
        """Returns the report as a JSON object; equal reports give equal text, except for the times of passes."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @classmethod
    def from_dict(cls, data: object) -> Report:
        """Returns the report that ``to_dict`` described; see :meth:`from_json`."""
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version is None:
            raise ValueError("the report has no field schema_version")
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise ValueError(f"the report has schema version {version}; this autopallas reads up to {SCHEMA_VERSION}")
        result = _parsed(cls, data, "report")
        assert isinstance(result, Report)
        return result

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """Reads a report back.  The text is data only: nothing in it is executed or opened.

        Args:
          text: the result of ``to_json``, perhaps from another machine.

        Returns:
          An equal report.

        Raises:
          ValueError: the text is no report; the message names the wrong field.

        Example:
          >>> Report.from_json(Report(platform="cpu").to_json()).platform
          'cpu'
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the report is not JSON: {error}") from None
        return cls.from_dict(data)

    def to_html(self) -> str:
        """Returns the report as one self-contained HTML page."""
        from autopallas.report import html

        return html.page([("", self)])

    def _repr_html_(self) -> str:
        """Returns the page in a frame of its own, for notebooks."""
        from autopallas.report import html

        return html.frame(self)

    def __str__(self) -> str:
        from autopallas.report import text

        return text.render(self)


_RECORDS = (Report, Site, NearMiss, Failure, Canary, Pass, Rematerialised)


def plain(value: object) -> Json:
    """Returns ``value`` in JSON's types; a value without such a form becomes its text, also infinities and NaNs."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, _RECORDS):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return plain(value.item())
    return str(value)


def _parsed(kind: Any, data: object, where: str) -> Any:  # neither an annotation nor its values have a static type
    """Returns ``data`` as the annotated type ``kind``; raises ValueError naming ``where`` it is not."""

    def wrong(expected: str) -> ValueError:
        return ValueError(f"{where} is {_short(data)}, not {expected}")

    origin, arguments = get_origin(kind), get_args(kind)
    if kind is object:
        return data
    if origin is Literal:
        if data not in arguments or not isinstance(data, str):
            raise wrong(f"one of {', '.join(map(repr, arguments))}")
        return data
    if origin in (Union, types.UnionType):
        if type(data) in arguments:  # None too, and one of several plain types
            return data
        return _parsed(next(a for a in arguments if a is not type(None)), data, where)
    if origin is tuple:
        if not isinstance(data, (list, tuple)):
            raise wrong("a list")
        if arguments[-1] is Ellipsis:
            return tuple(_parsed(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
        if len(data) != len(arguments):
            raise wrong(f"a list of {len(arguments)}")
        return tuple(_parsed(a, item, f"{where}[{i}]") for i, (a, item) in enumerate(zip(arguments, data, strict=True)))
    if origin is Mapping:
        if not isinstance(data, dict):
            raise wrong("an object")
        return {str(key): _parsed(arguments[1], item, f"{where}[{key!r}]") for key, item in data.items()}
    if origin is None and kind in _RECORDS:
        if not isinstance(data, dict):
            raise wrong("an object")
        hints = get_type_hints(kind)
        required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
        if missing := required - data.keys():
            raise ValueError(f"{where} lacks {', '.join(sorted(missing))}")
        if unknown := data.keys() - hints.keys():
            raise ValueError(f"{where} has the unknown {', '.join(sorted(map(repr, unknown)))}")
        return kind(**{name: _parsed(hints[name], data[name], f"{where}.{name}") for name in hints if name in data})
    if kind is float and type(data) is int:
        return float(data)
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise wrong({str: "a string", int: "a whole number", float: "a number"}[kind])
    return data


def _short(data: object) -> str:
    shown = repr(data)
    return shown if len(shown) <= 60 else shown[:57] + "..."
