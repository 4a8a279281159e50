"""How much a test does in the tier that runs."""

from __future__ import annotations

__all__ = ["examples"]

tier = "nightly"
"""What ``--tier`` says; tests/conftest.py sets it."""


def examples(most: int) -> int:
    """Returns how many examples Hypothesis draws: all in the nightly tier, else a third of them and at least five."""
    return most if tier == "nightly" else max(most // 3, 5)
