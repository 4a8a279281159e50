"""Compares programs between processes: those that run different programs together wait for each other forever."""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import re
from collections.abc import Iterator, Sequence

import jax
from jax.typing import ArrayLike

from autopallas import compat
from autopallas.compat import ClosedJaxpr
from autopallas.sharding.call_shardings import Shardings
from autopallas.tuning.distributed import agreement

__all__ = ["disagreement", "inspection_only"]

LOOK_SECONDS = 60.0
"""How long to wait for the other processes when the program is only inspected; they may never lower it."""

_inspecting = contextvars.ContextVar("inspection_only", default=False)

_SET = re.compile(r"\{([^{}:=]*)\}")
_ADDRESS = re.compile(r"0x[0-9a-f]+")


@contextlib.contextmanager
def inspection_only() -> Iterator[None]:
    """Enters a context in which a program is only lowered, not called; waits for other processes are shorter in it."""
    token = _inspecting.set(True)
    try:
        yield
    finally:
        _inspecting.reset(token)


def disagreement(
    program: ClosedJaxpr, rewritten: ClosedJaxpr, arrays: Sequence[ArrayLike], shardings: Shardings | None
) -> str | None:
    """Returns why all processes keep the original, or None where all made the same rewrite or there is only one.

    Waits for all processes that the program's mesh spans.  If one of them fails or rewrites in another way, none of
    them replaces anything.

    Args:
      program: the original, as a closed jaxpr.
      rewritten: the rewritten program of this process.
      arrays: the program's arguments.
      shardings: of the program's arguments and results.
    """
    processes = _processes(shardings)
    if len(processes) < 2:
        return None
    shared = agreement()
    if shared is None:
        return "it is run by several processes that cannot compare what they run"
    try:  # a failure to trace is also compared between processes
        text = str(jax.make_jaxpr(lambda *arrays: compat.emit(rewritten, list(arrays)))(*arrays))
        own = hashlib.sha256(_same_everywhere(text).encode()).hexdigest()
    except Exception as error:
        own = f"fails with {type(error).__name__}"
    types = ", ".join(str(aval) for aval in (*program.in_avals, *program.out_avals))
    patience = LOOK_SECONDS if _inspecting.get() else None
    return shared.same(hashlib.sha256(types.encode()).hexdigest(), own, processes, patience)


def _processes(shardings: Shardings | None) -> list[int]:
    """Returns the processes that the mesh spans; none where this one is not among them, or there is only one."""
    if jax.process_count() == 1 or shardings is None or shardings.mesh is None:
        return []
    if not isinstance(shardings.mesh, jax.sharding.Mesh):  # an abstract mesh may be of any processes
        return list(range(jax.process_count()))
    found = sorted({device.process_index for device in shardings.mesh.devices.flat})
    return found if jax.process_index() in found else []


def _same_everywhere(text: str) -> str:
    """Returns a program's text without addresses, and with the elements of sets sorted."""
    return _SET.sub(lambda match: "{" + ",".join(sorted(match[1].split(", "))) + "}", _ADDRESS.sub("", text))
