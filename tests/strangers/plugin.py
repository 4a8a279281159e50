"""Pytest plugin: `jax.jit` is `autopallas.optimize` of itself, for everything that is imported from now on."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from autopallas.cli.run import optimize_every_jit
from autopallas.optimize import Optimized

APPLIED: Counter[str] = Counter()


def install() -> None:
    """Wraps ``jax.jit``, except for JAX and this package themselves, and counts the sites that are replaced."""
    publish = Optimized._publish
    optimize_every_jit({"objective": "always", "strict": True})

    def counted(self: Any, report: Any) -> None:
        APPLIED.update(report.counts())
        publish(self, report)

    Optimized._publish = counted  # type: ignore[method-assign]


if os.environ.get("STRANGERS") == "optimized":
    install()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if os.environ.get("STRANGERS") == "optimized":
        terminalreporter.write_line(f"applied sites: {sum(APPLIED.values())} {dict(APPLIED)}")
