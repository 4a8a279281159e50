"""Warns that an implementation is not used because it failed."""

from __future__ import annotations

from autopallas.tuning.cache import WARNED

__all__ = ["warn_not_used"]


def warn_not_used(op: str, location: str, implementation: str, stage: str, error: str) -> None:
    """Warns once for each site and reason."""
    WARNED.once(
        f"{op} {location} {implementation} {stage} {error}",
        f"autopallas does not use {implementation} for the {op} at {location}: {stage} failed with {error}",
    )
