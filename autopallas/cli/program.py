"""``MODULE:FUNCTION``: imports a function by name, and finds its sites."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopallas.autotune.tuner import Tuner
from autopallas.cli import CommandError
from autopallas.cli.shapes import shapes_of
from autopallas.compat import ArrayFunction, ClosedJaxpr, PyTree, make_jaxpr
from autopallas.custom.registry import declared
from autopallas.environment import OPERATIONS
from autopallas.errors import OptionError, UnsupportedError, one_line
from autopallas.optimized import Optimized
from autopallas.options import Options, resolve
from autopallas.passes import Passes
from autopallas.patterns import Match, NearMiss
from autopallas.pipeline import find_sites, inside, rewrite
from autopallas.plan.choose_implementation import plan
from autopallas.plan.decision import Decision
from autopallas.plan.nested_sites import without_nested
from autopallas.sites.device import Device
from autopallas.tuning.lock import pinned

__all__ = ["Sites", "function_of", "rewritten_program", "shapes_of", "sites_of", "traced"]

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True, slots=True)
class Sites:
    """The sites of a function, and what was decided about them.

    Attributes:
      matches: the sites.
      decisions: one for each site.
      misses: near misses.
      options: the options in force.
      device: the device that the decisions are for.
      tuner: the tuner, which counts what its answers cost.
    """

    matches: tuple[Match, ...]
    decisions: tuple[Decision, ...]
    misses: tuple[NearMiss, ...]
    options: Options
    device: Device
    tuner: Tuner


def function_of(name: str) -> ArrayFunction:
    """Imports a function.

    Args:
      name: "package.module:function", or "package.module:Class.method"; modules of the current folder come first.

    Raises:
      CommandError: there is no such function.
    """
    if not _NAME.fullmatch(name):
        raise CommandError(f"{name!r} is no function's name; write MODULE:FUNCTION, such as model:loss")
    module_name, _, path = name.partition(":")
    if module_name.endswith(".py"):
        raise CommandError(f"{name!r} begins with a file; write its module, {module_name[:-3]}:{path}")
    here = os.getcwd()
    if here not in sys.path:  # as with `python -m`, even where a script was called
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise CommandError(
                f"there is no module {error.name}; run the command in its folder, or name that in PYTHONPATH"
            ) from None
        raise CommandError(f"importing {module_name} failed: {one_line(error)}") from None
    except (Exception, SystemExit) as error:
        raise CommandError(f"importing {module_name} failed: {one_line(error)}") from None
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            near = difflib.get_close_matches(part, vars(found) if hasattr(found, "__dict__") else (), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise CommandError(f"{module_name} has no {path}{hint}") from None
    if not callable(found):
        raise CommandError(f"{name} is no function; its type is {type(found).__name__}")
    function: ArrayFunction = found
    return function


def sites_of(name: str, function: ArrayFunction, arguments: Sequence[PyTree], options: dict[str, object]) -> Sites:
    """Finds the sites of a function and their decisions; traces it, and compiles or runs nothing unless a search is on.

    Args:
      name: the function's name, for messages.
      function: the function.  If it is optimized, its own options apply.
      arguments: its positional arguments, or their types.
      options: further options, which take precedence.

    Raises:
      CommandError: the function cannot be traced with these arguments.
    """
    own = function._explicit if isinstance(function, Optimized) else {}
    program = traced(name, function, arguments)
    device = Device.current()
    try:
        resolved = pinned(resolve(own | options))
        tuner = Tuner(device, resolved)
        tuned = (pattern.name for pattern in declared() if pattern.block_sizes)  # of others there is nothing to lock
        ops = (*OPERATIONS, *tuned) if resolved.ops is None else resolved.ops
        searched = replace(resolved, ops=ops)
        graph, matches, misses = find_sites(Passes(program, checked=False), program, searched, divided=False)
        matches, decisions = without_nested(graph, matches, plan(matches, device, resolved, tuner))
    except (OptionError, UnsupportedError) as error:
        raise CommandError(one_line(error)) from None
    return Sites(tuple(matches), tuple(decisions), tuple(misses), resolved, device, tuner)


def rewritten_program(
    name: str, function: ArrayFunction, arguments: Sequence[PyTree], options: dict[str, object]
) -> ClosedJaxpr:
    """Returns the program that a function is with a lockfile's sites.

    Args:
      name, function, arguments: as for :func:`sites_of`.
      options: further options, among them ``lock``.

    Raises:
      CommandError: the function cannot be traced with these arguments.
    """
    own = function._explicit if isinstance(function, Optimized) else {}
    program = traced(name, function, arguments)
    try:
        return rewrite(program, resolve(own | options | {"autotune": False, "require": {}}), probes=False)[0]
    except (OptionError, UnsupportedError) as error:
        raise CommandError(one_line(error)) from None


def traced(name: str, function: ArrayFunction, arguments: Sequence[PyTree]) -> ClosedJaxpr:
    """Traces a function as it is written, with all optimized functions that it calls.

    Raises:
      CommandError: it cannot be traced with these arguments.
    """
    try:
        with inside(True):
            return make_jaxpr(function, *arguments)
    except Exception as error:
        raise CommandError(f"{name} cannot be traced with these shapes: {one_line(error)}") from None
