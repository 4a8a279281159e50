"""Declares the ``AUTOPALLAS_*`` environment variables in one table, from which they are parsed and documented.

The environment is read whenever a function is traced, not at import, so a variable set before the first call counts.
A variable that is not in the table, or a value that it does not accept, is an error: a misspelt switch that is
silently ignored costs more than one that stops the program.
"""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from autopallas.errors import OptionError
from autopallas.numerics.classes import CLASSES, Numerics
from autopallas.place_selectors import FORMS, selector_of
from autopallas.sites.operation import IMPLEMENTATIONS, implementation_names, operation_named, operation_names

__all__ = [
    "OBJECTIVES",
    "OPERATIONS",
    "REMATERIALISATION",
    "SELECTED",
    "VARIABLES",
    "Environment",
    "Variable",
    "one_of",
    "places",
    "read",
    "selected",
]

OPERATIONS = operation_names()
"""Names of the operations that can be looked for: the folders of ``kernels``."""
_OPERATION_OF = {kind: name for name in OPERATIONS for kind in operation_named(name).kinds}
REMATERIALISATION = "rematerialisation"
"""Word that selects what is computed again for a backward, which is no operation."""
_NAMES = (*OPERATIONS, *_OPERATION_OF, REMATERIALISATION)
SELECTED = (*_NAMES, *(f"-{name}" for name in _NAMES))
"""Words that select operations, and kinds of their sites; one with "-" in front leaves out what it names."""
OBJECTIVES = ("time", "memory", "always")
REPORT_SUFFIXES = (".json", ".html", ".txt")

_PREFIX = "AUTOPALLAS_"
_MOST_DIGITS = 19
"""From how many digits a number is none that anybody means."""
_NEARLY = 0.9
"""How much a name has to be like one in the table, where it does not begin as they do, to be a misspelt one."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Parsed values of the environment variables; None where a variable is unset or empty."""

    disable: bool | None = None
    backend: str | tuple[str, ...] | None = None
    backend_of: tuple[tuple[str, str | tuple[str, ...]], ...] = ()
    """(operation, implementation or implementations) for each ``AUTOPALLAS_BACKEND_<OPERATION>`` that is set."""
    ops: tuple[str, ...] | None = None
    only: tuple[str, ...] | None = None
    deny: tuple[str, ...] | None = None
    objective: str | None = None
    numerics: Numerics | None = None
    autotune: bool | None = None
    cache_dir: str | None = None
    verify: bool | float | None = None
    interpret: bool | None = None
    fuel: int | None = None
    report: str | None = None
    """"1" (standard error) or a path that ends in one of ``REPORT_SUFFIXES``."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One row of the table: the variable, the values it accepts and its meaning in words, and its parser."""

    name: str
    accepts: str
    meaning: str
    parse: Callable[[str, str], Any]
    """``parse(name, text)`` returns the value, or raises OptionError naming the variable and what it accepts."""


def one_of(label: str, value: object, choices: Iterable[str]) -> str:
    """Returns ``value`` if it is one of ``choices``.

    Args:
      label: what the value was given for, as the message names it.
      value: anything.
      choices: the valid names; the message does not list those that are others with "-" in front.

    Returns:
      The value.

    Raises:
      OptionError: naming the value, the valid ones, and the one that is nearest in spelling.

    Example:
      >>> one_of("objective", "time", OBJECTIVES)
      'time'
    """
    names = tuple(choices)
    if isinstance(value, str):
        if value in names:
            return value
        near = difflib.get_close_matches(value.lower(), names, n=1)
    else:
        near = []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(name for name in names if name[0] != "-")
    raise OptionError(f"{label} is {value!r}, which is not one of {listed}{hint}")


def places(label: str, texts: Iterable[object]) -> tuple[str, ...]:
    """Returns selectors of places (:mod:`autopallas.place_selectors`) if all of them are valid.

    Args:
      label: what they were given for, as the message names it.
      texts: the selectors.

    Raises:
      OptionError: naming the one that is none, and the forms.

    Example:
      >>> places("option deny", ["model.py:94", "scope:decoder/*"])
      ('model.py:94', 'scope:decoder/*')
    """
    found = []
    for text in texts:
        try:
            if not isinstance(text, str):
                raise ValueError("it is no text")
            selector_of(text)
        except ValueError as error:
            raise OptionError(f"{label} has {text!r}, which selects no place: {error}; write {FORMS}") from None
        found.append(text)
    return tuple(found)


def selected(label: str, words: tuple[str, ...]) -> tuple[str, ...]:
    """Returns words that select operations and kinds, if none of them leaves out what another one names.

    Args:
      label: what they were given for, as the message names it.
      words: some of ``SELECTED``.

    Raises:
      OptionError: naming the two words.

    Example:
      >>> selected("option ops", ("respelling", "-sort"))
      ('respelling', '-sort')
    """
    for word in words:
        for left_out in (f"-{word}", f"-{_OPERATION_OF.get(word, word)}"):
            if left_out in words:
                raise OptionError(f"{label} has {word!r} and {left_out!r}, which leaves it out; give one of the two")
    return words


def _flag(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise OptionError(f"{name} is {text!r}; it accepts 0 or 1")
    return text == "1"


def _names(choices: tuple[str, ...]) -> Callable[[str, str], tuple[str, ...]]:
    def parse(name: str, text: str) -> tuple[str, ...]:
        return tuple(one_of(name, part.strip(), choices) for part in text.split(","))

    return parse


def _ops(name: str, text: str) -> tuple[str, ...]:
    return selected(name, _names(SELECTED)(name, text))


def _places(name: str, text: str) -> tuple[str, ...]:
    return places(name, (part.strip() for part in text.split(",")))


def _backend(name: str, text: str) -> str | tuple[str, ...]:
    # One name is a demand and fails fast; a list says what to fall back to.
    names = _names(implementation_names())(name, text)
    return names[0] if len(names) == 1 else names


def _objective(name: str, text: str) -> str:
    return one_of(name, text, OBJECTIVES)


def _numerics(name: str, text: str) -> str:
    return one_of(name, text, CLASSES)


def _fuel(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS):
        raise OptionError(f"{name} is {text!r}; it accepts a whole number of sites, 0 or more")
    return int(text)


def _directory(name: str, text: str) -> str:
    text = os.path.expanduser(text)  # outside of a shell, nobody else does
    if os.path.exists(text) and not os.path.isdir(text):
        raise OptionError(f"{name} is {text!r}, which is not a folder; it accepts the path of a folder")
    return text


def _verify(name: str, text: str) -> bool | float:
    whole, slash, part = text.partition("/")
    try:
        value = float(whole) / float(part) if slash else float(whole)
    except (ValueError, ZeroDivisionError):
        value = -1.0
    if not 0 <= value <= 1:
        raise OptionError(f"{name} is {text!r}; it accepts 0 or 1, or a fraction of calls such as 1/1000 or 0.001")
    return bool(value) if value in (0, 1) else value


def _report(name: str, text: str) -> str | None:
    if text == "0":
        return None
    if text == "1" or os.path.splitext(text)[1] in REPORT_SUFFIXES:
        return os.path.expanduser(text)
    raise OptionError(f"{name} is {text!r}; it accepts 0, 1, or a path that ends in {', '.join(REPORT_SUFFIXES)}")


_BACKENDS = f"comma list of {', '.join(IMPLEMENTATIONS)}"

VARIABLES: tuple[Variable, ...] = (
    Variable("AUTOPALLAS_DISABLE", "0 | 1", "1: every function runs as it was written. Wins over the code.", _flag),
    Variable(
        "AUTOPALLAS_BACKEND",
        _BACKENDS,
        "The implementation of every operation; one name must work, a list is tried in order and ends in the original. "
        "Wins over the code.",
        _backend,
    ),
    *(
        Variable(
            f"AUTOPALLAS_BACKEND_{op.upper()}",
            _BACKENDS,
            f"The same for {op} alone; wins over AUTOPALLAS_BACKEND.",
            _backend,
        )
        for op in OPERATIONS
    ),
    Variable(
        "AUTOPALLAS_OPS",
        f"comma list of {', '.join(_NAMES)}",
        'The operations, or kinds of respellings, to look for; with "-" in front those to leave out.',
        _ops,
    ),
    Variable("AUTOPALLAS_ONLY", f"comma list of {FORMS}", "The places at which sites may be replaced.", _places),
    Variable(
        "AUTOPALLAS_DENY",
        f"comma list of {FORMS}",
        "The places at which no site is replaced, beside those that the code denies.",
        _places,
    ),
    Variable("AUTOPALLAS_OBJECTIVE", " | ".join(OBJECTIVES), "What a replacement has to improve.", _objective),
    Variable("AUTOPALLAS_NUMERICS", " | ".join(CLASSES), "How far results may differ from the original's.", _numerics),
    Variable("AUTOPALLAS_AUTOTUNE", "0 | 1", "Whether block sizes are searched for where no table knows them.", _flag),
    Variable("AUTOPALLAS_CACHE_DIR", "folder", "Where tuning results and probe verdicts are kept.", _directory),
    Variable(
        "AUTOPALLAS_VERIFY",
        "0 | 1 | fraction",
        "1: the first call of each signature is checked against float64; a fraction, such as 1/1000 or 0.001: so many "
        "of the calls are compared with the original.",
        _verify,
    ),
    Variable(
        "AUTOPALLAS_INTERPRET", "0 | 1", "1: Pallas kernels are interpreted, so that they run on any device.", _flag
    ),
    Variable(
        "AUTOPALLAS_FUEL", "whole number", "At most this many sites are replaced, to find the one at fault.", _fuel
    ),
    Variable(
        "AUTOPALLAS_REPORT",
        f"0 | 1 | path {' | '.join(REPORT_SUFFIXES)}",
        "1: the reports of the process are printed to standard error at exit; a path: they are written there.",
        _report,
    ),
)
"""Every variable, in the order in which the documentation lists them."""


@functools.cache
def _meant(name: str) -> str | None:
    """Returns a hint for a variable that is not in the table and was meant to be; None for somebody else's.

    ``autopallas_disable`` and ``AUTOPALAS_DISABLE`` were meant, and would be ignored silently.
    """
    ours = _letters(_PREFIX)
    letters = _letters(name)
    if letters.startswith(ours):  # only what follows the prefix is compared: with it any two names are alike
        table = {_letters(variable.name).removeprefix(ours): variable.name for variable in VARIABLES}
        near = difflib.get_close_matches(letters.removeprefix(ours), table, n=1)
        return f" (did you mean {table[near[0]]}?)" if near else ""
    near = difflib.get_close_matches(name.upper(), [variable.name for variable in VARIABLES], n=1, cutoff=_NEARLY)
    return f" (did you mean {near[0]}?)" if near else None


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.upper()))


def read(environ: Mapping[str, str] | None = None) -> Environment:
    """Parses the ``AUTOPALLAS_*`` variables.

    Args:
      environ: the environment; that of the process if None.

    Returns:
      The parsed values.  An empty variable counts as unset.

    Raises:
      OptionError: a variable's name or value is not in the table.

    Example:
      >>> read({"AUTOPALLAS_BACKEND": "pallas_gpu,xla", "HOME": "/"}).backend
      ('pallas_gpu', 'xla')
    """
    environ = os.environ if environ is None else environ
    table = {variable.name: variable for variable in VARIABLES}
    values: dict[str, Any] = {}
    backend_of: list[tuple[str, str | tuple[str, ...]]] = []
    operations = {op.upper(): op for op in OPERATIONS}
    plain = {field.name for field in fields(Environment)}
    for name in sorted(environ):
        if name not in table:
            hint = _meant(name) if name[:1] in ("A", "a") and "PAL" in name.upper() else None
            if hint is None:
                continue
            raise OptionError(f"there is no environment variable {name}{hint}; the variables are {', '.join(table)}")
        text = environ[name].strip()
        if not text:
            continue
        value = table[name].parse(name, text)
        key = name.removeprefix(_PREFIX)
        if key.lower() in plain:
            values[key.lower()] = value
        else:
            backend_of.append((operations[key.removeprefix("BACKEND_")], value))
    return Environment(**values, backend_of=tuple(backend_of))
