"""Programs of other libraries, unmodified, as they are written and under autopallas.optimize with default options."""

from __future__ import annotations

import importlib
import pkgutil
from importlib import metadata

from benchmarks.programs.program import Program

__all__ = ["Program", "missing", "programs"]


def programs() -> list[Program]:
    """All programs: those of each module of this folder that has a list ``PROGRAMS``."""
    names = sorted(found.name for found in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return [program for module in modules for program in getattr(module, "PROGRAMS", ())]


def missing(program: Program) -> list[str]:
    """The distributions of a program that are not installed."""
    found = []
    for package in program.packages:
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            found.append(package)
    return found
