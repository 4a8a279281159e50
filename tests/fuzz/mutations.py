"""Faults that the product once had, to be put back one at a time: the random programs have to find each."""

from __future__ import annotations

__all__ = ["put_back"]


def put_back(name: str) -> None:
    """Puts a fault back into this process."""
    raise KeyError(name)
