"""Writes the checked-in tables: the dictionaries of rows in a table's module, and nothing else in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from autopallas.tuning.table import DEVICES, Key, Row

__all__ = ["literal", "rows_name", "source_with_rows"]

_LINE = 120


def rows_name(device: str) -> str:
    """The name of the dictionary of a device's rows.

    Example:
      >>> rows_name("cpu"), rows_name("TPU v5e")
      ('_ROWS', '_ROWS_TPU_V5E')
    """
    return "_ROWS" if device == "cpu" else "_ROWS_" + re.sub(r"\W+", "_", device).upper()


def source_with_rows(source: str, rows: Mapping[Key, Row], buckets: Sequence[str], device: str = "cpu") -> str:
    """A table's source with the rows of one device replaced.

    Args:
      source: of the module: it assigns ``TABLE``, and a dictionary :func:`rows_name` for each device that has rows.
      rows: all rows of the device.
      buckets: names of the buckets, in order.
      device: one of :data:`autopallas.tuning.table.DEVICES`.

    Raises:
      ValueError: the module assigns no ``TABLE``.
    """
    text = literal(rows, buckets, rows_name(device))
    assigned = _assigned(source)
    if "TABLE" not in assigned:
        raise ValueError("the module assigns no TABLE")
    lines = source.splitlines(keepends=True)
    if rows_name(device) in assigned:
        first, last = assigned[rows_name(device)]
        return "".join([*lines[:first], text, *lines[last:]])
    first, last = assigned["TABLE"]
    owners = [owner for owner in DEVICES if owner == device or rows_name(owner) in assigned]
    entries = [f'        "{owner}": MappingProxyType({rows_name(owner)}),\n' for owner in owners]
    table = ["TABLE: Table = MappingProxyType(\n", "    {\n", *entries, "    }\n", ")\n"]
    return "".join([*lines[:first], text, "\n", *table, *lines[last:]])


def _assigned(source: str) -> dict[str, tuple[int, int]]:
    """The lines, from and to, of each annotated assignment of a module."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = (node.lineno - 1, node.end_lineno or node.lineno)
    return found


def literal(rows: Mapping[Key, Row], buckets: Sequence[str], name: str = "_ROWS") -> str:
    """The assignment of a dictionary of rows, as the formatter has it."""

    def order(key: Key) -> tuple[Any, ...]:
        place = buckets.index(key[3]) if key[3] in buckets else len(buckets)
        return (*key[:3], place, key[4])

    lines = [f"{name}: dict[Key, Row] = {{\n"]
    for key in sorted(rows, key=order):
        row = rows[key]
        sizes = f"{type(row.block_sizes).__name__}({', '.join(map(repr, row.block_sizes.to_dict().values()))})"
        figures = ", ".join(map(str, (row.kernel_us, row.original_us, row.kernel_bytes, row.original_bytes)))
        origin = [f'"{text}"' for text in (row.evidence, row.date, row.versions)]
        shown = "(" + ", ".join(f'"{text}"' for text in key) + ")"
        parts = (sizes, *figures.split(", "), *origin, *_conditions(row))
        values = ", ".join(parts)
        if len(values) > _LINE - 8:  # one to a line
            values = ",\n        ".join(parts) + ","
        lines += [f"    {shown}: Row(\n", f"        {values}\n", "    ),\n"]
    return "".join([*lines, "}\n"])


def _conditions(row: Row) -> list[str]:
    """What a row holds for, as far as that is not the default."""
    given = {"batch": str(row.batch)} if row.batch != 1 else {}
    given |= {"spelling": f'"{row.spelling}"'} if row.spelling else {}
    extensions = [] if row.extensions is None else [f'"{row.extensions}"']
    return [*extensions, *(f"{name}={value}" for name, value in given.items())]
