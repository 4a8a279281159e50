"""Tells what the option ``ops`` selects."""

from __future__ import annotations

from collections.abc import Sequence

from autopallas.sites.operation import operation_named, operation_names

__all__ = ["looks_for"]


def looks_for(ops: Sequence[str] | None, op: str, kind: str = "") -> bool:
    """Returns whether sites of an operation, or of one kind of them, are asked for.

    Names select operations, or kinds of their sites; where there are only names with "-" in front, everything else is
    selected.

    Args:
      ops: the option; None: everything.
      op: the operation.
      kind: the kind; an empty string asks whether any kind is selected.

    Example:
      >>> looks_for(("-sort",), "respelling", "argmax"), looks_for(("-sort",), "respelling", "sort")
      (True, False)
      >>> looks_for(("argmax",), "respelling"), looks_for(("argmax",), "attention")
      (True, False)
    """
    if ops is None:
        return True
    kinds = operation_named(op).kinds if op in operation_names() else ()
    wanted = {name for name in ops if not name.startswith("-")}
    if f"-{op}" in ops or kind and f"-{kind}" in ops:
        return False
    return not wanted or op in wanted or (kind in wanted if kind else not wanted.isdisjoint(kinds))
