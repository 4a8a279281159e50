"""Processes that run one program together have to run the same one, or they wait for each other forever."""

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
"""How long the other processes are waited for where nothing is to be run yet.  They may not lower it at all."""

_inspecting = contextvars.ContextVar("inspection_only", default=False)

_SET = re.compile(r"\{([^{}:=]*)\}")
_ADDRESS = re.compile(r"0x[0-9a-f]+")


@contextlib.contextmanager
def inspection_only() -> Iterator[None]:
    """A context in which a program is only looked at: lowered, not called.  The others are not waited for as long."""
    token = _inspecting.set(True)
    try:
        yield
    finally:
        _inspecting.reset(token)


def disagreement(
    program: ClosedJaxpr, rewritten: ClosedJaxpr, arrays: Sequence[ArrayLike], shardings: Shardings | None
) -> str | None:
    """Why the original has to stay in all processes; None where each has rewritten it alike, or only one runs it.

    All processes over which the program's mesh spreads are waited for.  What one of them cannot do, or does in another
    way, none does.

    Args:
      program: the original, as a closed jaxpr.
      rewritten: what this process makes of it.
      arrays: its arguments.
      shardings: of its arguments and results.
    """
    processes = _processes(shardings)
    if len(processes) < 2:
        return None
    shared = agreement()
    if shared is None:
        return "it is run by several processes that cannot compare what they run"
    try:  # whether it can be traced belongs to what they compare
        text = str(jax.make_jaxpr(lambda *arrays: compat.emit(rewritten, list(arrays)))(*arrays))
        own = hashlib.sha256(_same_everywhere(text).encode()).hexdigest()
    except Exception as error:
        own = f"fails with {type(error).__name__}"
    types = ", ".join(str(aval) for aval in (*program.in_avals, *program.out_avals))
    patience = LOOK_SECONDS if _inspecting.get() else None
    return shared.same(hashlib.sha256(types.encode()).hexdigest(), own, processes, patience)


def _processes(shardings: Shardings | None) -> list[int]:
    """The processes over which a mesh spreads; none where this one is not among them, or there is but one."""
    if jax.process_count() == 1 or shardings is None or shardings.mesh is None:
        return []
    if not isinstance(shardings.mesh, jax.sharding.Mesh):  # an abstract one, which may be of any
        return list(range(jax.process_count()))
    found = sorted({device.process_index for device in shardings.mesh.devices.flat})
    return found if jax.process_index() in found else []


def _same_everywhere(text: str) -> str:
    """A program's text without addresses, and with sets in one order."""
    return _SET.sub(lambda match: "{" + ",".join(sorted(match[1].split(", "))) + "}", _ADDRESS.sub("", text))
