"""One tuning result as it is kept on disk: plain data, which is checked before anything in it is believed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields, replace
from typing import Literal, NoReturn, TypeAlias, cast

from autopallas.errors import printable
from autopallas.sites.spec import BlockSizes, BlockSizesClass, Sizes
from autopallas.tuning.key import Description, TuningKey, digest_of
from autopallas.tuning.row import Evidence
from autopallas.tuning.table import Row

__all__ = [
    "FORMAT",
    "MAXIMUM_BYTES",
    "Entry",
    "EntryError",
    "Rejected",
    "Sizes",
    "checked_object",
    "checked_sizes",
    "checked_text",
    "from_data",
    "parse",
    "read_json",
    "shortened",
    "storable",
]

FORMAT = 3
"""Version number, which rises whenever the fields of an entry, or their meaning, change."""

MAXIMUM_BYTES = 128 * 1024
"""Largest size of a file that is read, and of an entry that is written."""

Outcome: TypeAlias = Literal["tuned", "failed", "unfinished"]

_KEY_TEXTS = ("operation", "implementation", "direction", "kernel_version", "platform", "device_kind", "runtime")
_KEY_OBJECTS = ("versions", "flags")
_KEY_LISTS = ("specs", "bucket")
_KEY_FIELDS = {*_KEY_TEXTS, *_KEY_OBJECTS, *_KEY_LISTS}
_OUTCOMES = ("tuned", "failed", "unfinished")
_LONGEST_TEXT = 2000
_GREATEST_SIZE = 2**31 - 1
_MOST_SIZES = 16
_MOST_REJECTED = 256
_MOST_DIGITS = 20
_GREATEST_BYTES = 2**62
_LONGEST_MICROSECONDS = 1e12


class EntryError(ValueError):
    """Raised if a text is no entry; the message says why."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """Block sizes that must not be used, with the stage at which they failed, and the error."""

    block_sizes: Sizes
    stage: str
    error: str


@dataclass(frozen=True, slots=True)
class Entry:
    """The result of a search.

    Attributes:
      key: the description of what was searched for.
      outcome: "tuned": block sizes, and what they cost.  "failed": the implementation does not work there.
        "unfinished": the search came to no result within its seconds.
      block_sizes: the fastest ones, by name; None unless "tuned".
      row: what kernel and original cost; None unless "tuned".  Its own block sizes are those of the entry.
      lean: the row of the block sizes that need the least memory at a bounded slow-down, if they are others; it holds
        its block sizes.
      reason: why there is no result.
      rejected: the block sizes that failed, or computed something else.
      seconds: the time that the search was allowed to take.
    """

    key: Description
    outcome: Outcome
    block_sizes: Sizes | None = None
    row: Row[object] | None = None
    reason: str = ""
    rejected: tuple[Rejected, ...] = field(default=())
    seconds: float = 0.0
    lean: Row[Sizes] | None = None

    def serving(self, objective: str) -> Entry:
        """Returns the entry with the block sizes and the row that are best for an objective."""
        if objective != "memory" or self.lean is None:
            return self
        return replace(self, block_sizes=self.lean.block_sizes, row=self.lean)

    @property
    def digest(self) -> str:
        return digest_of(self.key)

    def to_dict(self) -> dict[str, object]:
        """Returns the entry in JSON's types."""
        lean = None
        if self.lean is not None:
            lean = {"block_sizes": dict(self.lean.block_sizes), "row": _figures(self.lean)}
        return {
            "format": FORMAT,
            "key": dict(self.key),
            "outcome": self.outcome,
            "block_sizes": None if self.block_sizes is None else dict(self.block_sizes),
            "row": None if self.row is None else _figures(self.row),
            "lean": lean,
            "reason": storable(self.reason),
            "rejected": [
                {"block_sizes": dict(r.block_sizes), "stage": r.stage, "error": storable(r.error)}
                for r in self.rejected[:_MOST_REJECTED]
            ],
            "seconds": self.seconds,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True, allow_nan=False)

    def sizes_for(self, kind: BlockSizesClass) -> BlockSizes:
        """Returns the block sizes as an operation's class.

        Args:
          kind: the class ``BlockSizes`` of the operation that was asked for, never of one that the entry names.

        Raises:
          EntryError: they are not that operation's.
        """
        given = self.block_sizes or {}
        like = kind.get_default()
        wanted = {f.name: type(getattr(like, f.name)) for f in fields(kind)}
        # What the default leaves out, others may have.
        complete = like.to_dict().keys() <= given.keys() <= wanted.keys()
        if not complete or any(type(value) is not wanted[name] for name, value in given.items()):
            raise EntryError(f"the block sizes {dict(given)} are not those of {kind.__module__}")
        try:
            return kind(**given)
        except (TypeError, ValueError) as error:
            raise EntryError(f"the block sizes are not valid: {error}") from None


_CONDITIONS = ("batch", "extensions", "spelling")
_FIGURES = ("kernel_us", "original_us", "kernel_bytes", "original_bytes")
_ROW_FIELDS = (*_FIGURES, "evidence", "date", "versions", *_CONDITIONS)


def _figures(row: Row[object]) -> dict[str, object]:
    return {name: getattr(row, name) for name in _ROW_FIELDS}


def storable(text: str) -> str:
    """Returns a text as an entry holds it: one short line of printable characters."""
    return printable(text)[:_LONGEST_TEXT]


# ---------------------------------------------------------------------- reading


def parse(text: str | bytes, key: TuningKey | str | None = None) -> Entry:
    """Reads an entry.  The text is data: nothing in it is executed, imported, or opened.

    Args:
      text: the result of ``to_json``, or anything else.
      key: the key, or the digest, that the entry must have; None: any.

    Raises:
      EntryError: it is no entry of this format, or another key's.
    """
    if len(text) > MAXIMUM_BYTES:
        raise EntryError(f"it is longer than {MAXIMUM_BYTES} bytes")
    return from_data(read_json(text), key)


def read_json(text: str | bytes) -> object:
    """Parses JSON without numbers that are infinite, not a number, or too long to be meant."""

    def whole(digits: str) -> int:
        if len(digits) > _MOST_DIGITS:
            raise ValueError(f"a number has {len(digits)} digits")
        return int(digits)

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number of JSON")

    try:
        data: object = json.loads(text, parse_int=whole, parse_constant=refuse)
        return data
    except (ValueError, RecursionError) as error:
        raise EntryError(f"it is not JSON: {error}") from None


def from_data(data: object, key: TuningKey | str | None = None) -> Entry:
    """Like :func:`parse`, from parsed JSON."""
    if isinstance(data, dict) and data.get("format") != FORMAT:
        raise EntryError(f"its format is {shortened(data.get('format'))}, not {FORMAT}")
    names = {"format", "key", "outcome", "block_sizes", "row", "lean", "reason", "rejected", "seconds"}
    data = checked_object(data, names, "the entry")
    description = _key(data["key"])
    digest = _digest(description)
    if key is not None and digest != (key if isinstance(key, str) else key.digest):
        raise EntryError("it is another key's")
    outcome = data["outcome"]
    if not isinstance(outcome, str) or outcome not in _OUTCOMES:
        raise EntryError(f"outcome is {shortened(outcome)}, not one of {', '.join(_OUTCOMES)}")
    sizes = row = lean = None
    if outcome == "tuned":
        sizes = checked_sizes(data["block_sizes"])
        row = _row(data["row"], sizes)
        if data["lean"] is not None:
            given = checked_object(data["lean"], {"block_sizes", "row"}, "lean")
            lean = _row(given["row"], checked_sizes(given["block_sizes"]))
    elif any(data[name] is not None for name in ("block_sizes", "row", "lean")):
        raise EntryError(f"it has block sizes, although its outcome is {outcome}")
    rejected = data["rejected"]
    if not isinstance(rejected, list) or len(rejected) > _MOST_REJECTED:
        raise EntryError(f"rejected is not a list of up to {_MOST_REJECTED}")
    return Entry(
        key=description,
        outcome=cast(Outcome, outcome),
        block_sizes=sizes,
        row=row,
        reason=checked_text(data["reason"], "reason"),
        rejected=tuple(_rejected(item) for item in rejected),
        seconds=_number(data["seconds"], "seconds", 0.0, 1e9),
        lean=lean,
    )


def _key(data: object) -> Description:
    data = checked_object(data, _KEY_FIELDS, "key")
    for name in _KEY_TEXTS:
        checked_text(data[name], f"key.{name}")
    for name in _KEY_OBJECTS:
        if not isinstance(data[name], dict):
            raise EntryError(f"key.{name} is not an object")
    for name in _KEY_LISTS:
        if not isinstance(data[name], list):
            raise EntryError(f"key.{name} is not a list")
    return cast(Description, data)


def _digest(description: Description) -> str:
    try:
        return digest_of(description)
    except (ValueError, RecursionError):
        raise EntryError("its key holds a number that is not finite") from None


def checked_sizes(data: object, where: str = "block_sizes", error: type[Exception] = EntryError) -> Sizes:
    """Returns block sizes by name, few and within bounds; raises the error for anything else."""
    if not isinstance(data, dict) or len(data) > _MOST_SIZES:
        raise error(f"{where} is {shortened(data)}, not an object of up to {_MOST_SIZES}")
    for name, value in data.items():
        checked_text(name, f"the name of a block size in {where}", error)
        if isinstance(value, bool):
            continue
        if isinstance(value, int) and 0 <= value <= _GREATEST_SIZE:
            continue
        if isinstance(value, str) and len(value) <= 64 and value.isprintable():
            continue
        raise error(f"{where}.{name} is {shortened(value)}, which is no block size")
    return cast(Sizes, data)


def _row(data: object, sizes: Sizes) -> Row[Sizes]:
    data = checked_object(data, set(_ROW_FIELDS), "row")
    evidence: Evidence | None = data["evidence"]  # type: ignore[assignment]
    if evidence not in ("measured", "quickly measured"):
        raise EntryError(f"row.evidence is {shortened(data['evidence'])}, and only what was measured is kept")
    return Row(
        block_sizes=sizes,
        kernel_us=_number(data["kernel_us"], "row.kernel_us", 1e-6, _LONGEST_MICROSECONDS),
        original_us=_number(data["original_us"], "row.original_us", 1e-6, _LONGEST_MICROSECONDS),
        kernel_bytes=_whole(data["kernel_bytes"], "row.kernel_bytes"),
        original_bytes=_whole(data["original_bytes"], "row.original_bytes"),
        evidence=evidence,
        date=checked_text(data["date"], "row.date"),
        versions=checked_text(data["versions"], "row.versions"),
        batch=_whole(data["batch"], "row.batch"),
        extensions=None if data["extensions"] is None else checked_text(data["extensions"], "row.extensions"),
        spelling=checked_text(data["spelling"], "row.spelling"),
    )


def _rejected(data: object) -> Rejected:
    data = checked_object(data, {"block_sizes", "stage", "error"}, "rejected")
    return Rejected(
        checked_sizes(data["block_sizes"]), checked_text(data["stage"], "stage"), checked_text(data["error"], "error")
    )


def checked_object(data: object, names: set[str], where: str, error: type[Exception] = EntryError) -> dict[str, object]:
    """Returns an object with exactly these fields; raises the error for anything else."""
    if not isinstance(data, dict):
        raise error(f"{where} is {shortened(data)}, not an object")
    if missing := names - data.keys():
        raise error(f"{where} lacks {', '.join(sorted(missing))}")
    if unknown := data.keys() - names:
        raise error(f"{where} has the unknown {shortened(sorted(unknown)[0])}")
    return data


def checked_text(data: object, where: str, error: type[Exception] = EntryError) -> str:
    """Returns a short text of printable characters; raises the error for anything else."""
    if not isinstance(data, str) or len(data) > _LONGEST_TEXT or not data.isprintable():
        raise error(f"{where} is {shortened(data)}, not a short printable text")
    return data


def _number(data: object, where: str, low: float, high: float) -> float:
    if isinstance(data, bool) or not isinstance(data, (int, float)) or not math.isfinite(data):
        raise EntryError(f"{where} is {shortened(data)}, not a number")
    if not low <= data <= high:
        raise EntryError(f"{where} is {shortened(data)}, which is out of bounds")
    return float(data)


def _whole(data: object, where: str) -> int:
    if isinstance(data, bool) or not isinstance(data, int) or not 0 <= data <= _GREATEST_BYTES:
        raise EntryError(f"{where} is {shortened(data)}, not a count")
    return data


def shortened(data: object) -> str:
    """Returns data as text of at most 60 characters, for an error."""
    shown = ascii(data)
    return shown if len(shown) <= 60 else shown[:57] + "..."
