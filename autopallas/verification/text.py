"""Renders a verification as text of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from autopallas.numerics.compare import Comparison

if TYPE_CHECKING:
    from autopallas.verification.verify import Verification

__all__ = ["render"]

_WIDTH = 80
_NAME = 22
_SHOWN = 20
"""Largest number of outputs to list: first those in breach, then the worst."""


def render(verification: Verification) -> str:
    """Renders the findings for people.

    Args:
      verification: a :class:`autopallas.Verification`.

    Returns:
      Lines of at most 80 columns.
    """
    outputs, sites = verification.outputs, verification.sites
    bad = [c for c in outputs if not c.ok]
    kernels = f"{verification.replaced} {'kernel' if verification.replaced == 1 else 'kernels'}"
    if bad:
        head = f"Verification failed: {len(bad)} of {len(outputs)} outputs in breach ({kernels})."
    else:
        head = f"Verification passed: {len(outputs)} {'output' if len(outputs) == 1 else 'outputs'}, {kernels}."
    lines = [head, "Relative errors against a float64 evaluation of the original (max, mean):", ""]
    if outputs:
        lines += [_row("output", "dtype", "original", "", "rewritten", "", "allowed"), *_table(outputs)]
    for site in sites:
        verdict = "ok" if site.ok else "IN BREACH"
        where = f"site: {site.op}, {site.direction}, {site.implementation}, {site.location}: {verdict}"
        lines += ["", *_wrapped(where)]
        lines += _table(site.outputs)
    if bad and sites and all(site.ok for site in sites):
        lines += ["", *_wrapped(_NO_SITE)]
    if verification.notes:
        lines += ["", *(line for note in verification.notes for line in _wrapped(f"note: {note}"))]
    return "\n".join(lines)


_NO_SITE = (
    "Each site by itself is within its bound on the operands that it met: the errors add up on the way to the output, "
    "or a decision (a comparison, an argmax) between nearly equal numbers fell the other way."
)


def _table(compared: Iterable[Comparison]) -> list[str]:
    ranked = sorted(compared, key=lambda c: (c.ok, -c.rewritten.max_relative / (c.allowed or 1)))
    lines = [_line(c) for c in ranked[:_SHOWN]]
    if len(ranked) > _SHOWN:
        lines.append(f"... and {len(ranked) - _SHOWN} more, none of them worse")
    return lines


def _line(c: Comparison) -> str:
    line = _row(
        c.name or "result",
        c.dtype,
        _number(c.original.max_relative),
        _number(c.original.mean_relative),
        _number(c.rewritten.max_relative),
        _number(c.rewritten.mean_relative),
        _number(c.allowed),
    )
    if c.non_finite:
        line += f"\n  {c.non_finite} elements are NaN or infinite that the original has finite"
    return line if c.ok else "!" + line[1:]


def _row(name: str, dtype: str, *columns: str) -> str:
    shown = name if len(name) <= _NAME else "..." + name[3 - _NAME :]
    return f"  {shown:<{_NAME}} {dtype[:8]:<8}" + "".join(f"{c:>9}" for c in columns)


def _number(x: float) -> str:
    return f"{x:.1e}" if x else "0"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=True, break_on_hyphens=False)
