"""The exceptions that autopallas raises on purpose.  Everything else that escapes is a bug."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopallas.verification.verify import Verification

__all__ = ["AutopallasWarning", "OptionError", "RequirementError", "UnsupportedError", "VerificationError"]


class OptionError(ValueError):
    """An option or an ``AUTOPALLAS_*`` variable has a name or a value that does not exist."""


class RequirementError(RuntimeError):
    """``require={...}`` asked for more replaced sites than were replaced."""


class UnsupportedError(RuntimeError):
    """No requested implementation can compute what was asked of it."""


class VerificationError(RuntimeError):
    """A rewritten program's numbers differ from the original's by more than the tolerance.

    ``verification`` is the :class:`autopallas.Verification` that says which, and by how much.
    """

    def __init__(self, message: str, verification: Verification | None = None):
        super().__init__(message)
        self.verification = verification


class AutopallasWarning(UserWarning):
    """Something went wrong inside autopallas; the program still runs, without the rewrite concerned."""
