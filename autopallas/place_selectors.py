"""Selects sites by their place in the source code: by file, line, function, or named scope.

These are the texts of the options ``only`` and ``deny``, of the environment variables of the same names, and of
lockfiles.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

__all__ = ["FORMS", "Frame", "PlaceSelector", "Places", "first_that_selects", "selector_of"]

FORMS = "FILE, FILE:LINE, FILE:FIRST-LAST, FILE:FUNCTION, function:NAME or scope:NAME"
"""The forms of a selector.  Names and files may hold * and ?."""

_LINES = r"(?P<first>\d+)(-(?P<last>\d+))?"
_FUNCTION = r"(?P<function>[^:/\\]*[^:/\\\d-][^:/\\]*)"
_FILE = re.compile(rf"(?P<file>([A-Za-z]:[\\/])?[^:]+)(:{_LINES}|:{_FUNCTION})?")


class Frame(NamedTuple):
    """One call on the way to an equation: a line of source code."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Places:
    """Where the equations of a site were written.

    Attributes:
      frames: the calls that led to them.
      scopes: the named scopes around each of them, outermost first.
    """

    frames: frozenset[Frame]
    scopes: frozenset[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class PlaceSelector:
    """A selector; an empty field selects everything.

    Attributes:
      file: the end of a path, or a pattern of one.
      first, last: the lines.
      function: the name of a function, or a pattern of one.
      scope: successive named scopes, or a pattern of them.
    """

    file: str = ""
    first: int = 0
    last: int = 0
    function: str = ""
    scope: str = ""

    def selects(self, places: Places) -> bool:
        """Returns whether a site is at such a place."""
        if self.scope:
            return any(_holds(scopes, self.scope) for scopes in places.scopes)
        return any(self._is_at(frame) for frame in places.frames)

    def _is_at(self, frame: Frame) -> bool:
        if self.first and not self.first <= frame.line <= self.last:
            return False
        if self.function and not any(fnmatchcase(name, self.function) for name in _names(frame.function)):
            return False
        return not self.file or _ends_with(frame.file, self.file)


def _names(function: str) -> tuple[str, str]:
    """Returns the names of a function: qualified, as JAX has it, and plain."""
    return function, function.rpartition(".")[2]


def _ends_with(path: str, pattern: str) -> bool:
    parts, wanted = path.replace("\\", "/").split("/"), pattern.replace("\\", "/").split("/")
    return fnmatchcase("/".join(parts[-len(wanted) :]), "/".join(wanted))


def _holds(scopes: Sequence[str], pattern: str) -> bool:
    """Returns whether some successive scopes, joined by "/", fit a pattern."""
    parts = [part for scope in scopes for part in scope.split("/")]
    ends = range(1, len(parts) + 1)
    return any(fnmatchcase("/".join(parts[start:end]), pattern) for end in ends for start in range(end))


def selector_of(text: str) -> PlaceSelector:
    """Reads a selector.

    Raises:
      ValueError: the text has none of the forms; the message says why.

    Example:
      >>> selector_of("models/*.py:90-120")
      PlaceSelector(file='models/*.py', first=90, last=120, function='', scope='')
      >>> selector_of("scope:decoder/layer_*").scope
      'decoder/layer_*'
    """
    for kind in ("function", "scope"):
        if text.startswith(f"{kind}:"):
            name = text.removeprefix(f"{kind}:").strip("/" if kind == "scope" else "")
            if not name:
                raise ValueError(f"it names no {kind}")
            return PlaceSelector(function=name) if kind == "function" else PlaceSelector(scope=name)
    found = _FILE.fullmatch(text)
    if found is None or not any(mark in found["file"] for mark in ".*?<"):
        raise ValueError("it has no file, such as model.py")
    first = int(found["first"] or 0)
    last = int(found["last"] or first)
    if found["first"] is not None and not 0 < first <= last:
        raise ValueError("its lines do not count up from 1")
    return PlaceSelector(found["file"], first, last, found["function"] or "")


def first_that_selects(texts: Iterable[str], places: Places) -> str:
    """Returns the first of some selectors that selects a site, or an empty string.

    Example:
      >>> places = Places(frozenset({Frame("/home/me/model.py", 94, "attend")}), frozenset())
      >>> first_that_selects(("train.py", "model.py:90-99"), places)
      'model.py:90-99'
    """
    return next((text for text in texts if selector_of(text).selects(places)), "")
