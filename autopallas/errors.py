"""Exceptions that autopallas raises on purpose.  Any other exception that escapes is a bug."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopallas.verification.verify import Verification

__all__ = ["AutopallasWarning", "OptionError", "RequirementError", "UnsupportedError", "VerificationError"]


class OptionError(ValueError):
    """Raised if an option or an ``AUTOPALLAS_*`` variable has a name or a value that does not exist."""


class RequirementError(RuntimeError):
    """Raised if fewer sites were replaced than ``require={...}`` asks for."""


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
