"""Exceptions that autopallas raises on purpose, and its warning.  Any other exception that escapes is a bug."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopallas.verification.verify import Verification

__all__ = [
    "AutopallasWarning",
    "OptionError",
    "RequirementError",
    "UnsupportedError",
    "VerificationError",
    "one_line",
    "printable",
    "warn",
]


class OptionError(ValueError):
    """Raised if an option or an ``AUTOPALLAS_*`` variable has a name or a value that does not exist."""


class RequirementError(RuntimeError):
    """Raised if a program lacks what ``require`` asks for: replaced sites, or the certificate of its lockfile."""


class UnsupportedError(RuntimeError):
    """Raised if no requested implementation can compute a site."""


class VerificationError(RuntimeError):
    """Raised if a rewritten program's numbers differ from the original's by more than the tolerance.

    ``verification`` is the :class:`autopallas.Verification` that says which numbers differ, and by how much.
    """

    def __init__(self, message: str, verification: Verification | None = None):
        super().__init__(message)
        self.verification = verification


class AutopallasWarning(UserWarning):
    """Warns that something went wrong inside autopallas; the program still runs, without the rewrite concerned."""


def one_line(error: BaseException) -> str:
    """Returns an exception's type, and the first line of its message where it has one."""
    kind, first = type(error).__name__, str(error).strip().partition("\n")[0].rstrip()
    return f"{kind}: {first}" if first else kind


def printable(text: str) -> str:
    """Returns a text on one line, without characters by which a message or a file's name could control a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


_NOT_THE_USERS = ("autopallas", "jax", "jaxlib")
"""Packages whose lines tell a user nothing about where a warning comes from."""


def warn(message: str) -> None:
    """Issues a warning of this package, at the line of the user's code that led to it."""
    level, frame = 2, sys._getframe(1)  # level 2 is the caller's line
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, AutopallasWarning, stacklevel=level)
