"""Pytest plugin: `jax.jit` is `autopallas.optimize` of itself, for everything that is imported from now on."""

from __future__ import annotations

import functools
import os
from collections import Counter
from typing import Any

import jax

import autopallas
from autopallas.optimize import Optimized

APPLIED: Counter[str] = Counter()


def install() -> None:
    """Wraps ``jax.jit``, and counts the sites that are replaced."""
    compiled = jax.jit
    publish = Optimized._publish

    @functools.wraps(compiled)
    def jit(fun: Any = None, **settings: Any) -> Any:
        if fun is None:
            return functools.partial(jit, **settings)
        return autopallas.optimize(compiled(fun, **settings), objective="always", strict=True)

    def counted(self: Any, report: Any) -> None:
        APPLIED.update(report.counts())
        publish(self, report)

    jax.jit = jit  # type: ignore[assignment]
    Optimized._publish = counted  # type: ignore[method-assign]


if os.environ.get("STRANGERS") == "optimized":
    install()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if os.environ.get("STRANGERS") == "optimized":
        terminalreporter.write_line(f"applied sites: {sum(APPLIED.values())} {dict(APPLIED)}")
