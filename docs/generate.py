"""Writes the tables of the documentation that the code knows: ``python docs/generate.py``; ``--check`` compares."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from autopallas.environment import VARIABLES
from autopallas.kernels.respelling.tuned_block_sizes import TABLE

PAGES = Path(__file__).parent


def environment() -> str:
    """The environment variables, from the table by which they are parsed."""
    rows = ["| variable | accepts | meaning |", "|---|---|---|"]
    for variable in VARIABLES:
        accepts = variable.accepts.replace("|", "\\|")
        rows.append(f"| `{variable.name}` | {accepts} | {variable.meaning} |")
    return "\n".join(rows)


def respellings() -> str:
    """The gains of respellings on CPUs, from the table's rows."""
    found: dict[tuple[str, str], list[float]] = {}
    for (*_, invariants), row in TABLE.files.read("cpu"):
        kind, _, feature = invariants.partition(", ")
        found.setdefault((kind, feature), []).append(row.speedup)
    rows = ["| kind | form | gain in time |", "|---|---|---|"]
    for (kind, feature), gains in sorted(found.items()):
        least, most = (f"{gain:.3g}" for gain in (min(gains), max(gains)))
        rows.append(f"| `{kind}` | {feature} | {least if least == most else f'{least} to {most}'} |")
    return "\n".join(rows)


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "environment": ("options.md", environment),
    "respellings": ("respellings.md", respellings),
}
"""Per name, the page and what gives the table."""


def main() -> int:
    """0, or with ``--check`` 1 where a page is not up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page would change")
    check = parser.parse_args().check
    stale = []
    for name, (page, table) in TABLES.items():
        path = PAGES / page
        text = path.read_text(encoding="utf-8")
        marks = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        new, count = marks.subn(lambda found, table=table: f"{found[1]}{table()}\n{found[2]}", text)
        if count != 1:
            print(f"{page} has no place for the table {name}", file=sys.stderr)
            return 1
        if new != text:
            stale.append(page)
            if not check:
                path.write_text(new, encoding="utf-8")
    if stale and check:
        print(f"not up to date: {', '.join(stale)}; run python docs/generate.py", file=sys.stderr)
    return int(bool(stale and check))


if __name__ == "__main__":
    sys.exit(main())
