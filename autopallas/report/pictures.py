"""Draws the pictures of the page: bars of time and memory, and tiles of a mask, as SVG sized by its container."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import TypeGuard

from autopallas.report.records import Site

__all__ = ["bars", "compared", "tile_counts", "tiles"]

_STATES = {"2": "full", "1": "partial", "0": "skipped", "3": "hidden"}


def compared(site: Site) -> list[tuple[str, float, float, str, str]]:
    """Returns what was measured of a site, as far as known: (label, original, kernel, the two as text)."""
    row = site.measured or {}
    found = []
    for label, unit, shown in (("time", "us", _time), ("temporary memory", "bytes", _bytes)):
        original, kernel = row.get(f"original_{unit}"), row.get(f"kernel_{unit}")
        if _positive(original) and _positive(kernel, zero=unit == "bytes"):
            found.append((label, float(original), float(kernel), shown(original), shown(kernel)))
    return found


def bars(original: float, kernel: float, texts: tuple[str, str]) -> str:
    """Draws two bars below each other: the original and the kernel."""
    longest = max(original, kernel) or 1.0
    rows = []
    for name, value, shown in (("original", original, texts[0]), ("kernel", kernel, texts[1])):
        width = max(1.0, 100 * value / longest)
        rows.append(
            f'<div class="bar {name}"><span>{name}</span>'
            f'<svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
            f'<rect class="track" width="100" height="10"/><rect class="{name}" width="{width:.2f}" height="10"/></svg>'
            f"<b>{escape(shown)}</b></div>"
        )
    return "".join(rows)


def tile_counts(picture: Mapping[str, object]) -> dict[str, int]:
    """Counts the tiles that are full, partial, skipped, and hidden: skipped if a check at run time allows it."""
    states = "".join(_rows(picture))
    counts = {name: states.count(state) for state, name in _STATES.items()}
    return {name: count for name, count in counts.items() if count or name != "hidden"}


def tiles(picture: Mapping[str, object]) -> str:
    """Draws the tiles of a mask: queries downwards, keys to the right; equal neighbours are one rectangle."""
    rows = _rows(picture)
    if not rows or not rows[0]:
        return ""
    height, width = len(rows), len(rows[0])
    shapes = []
    for y, row in enumerate(rows):
        x = 0
        for state, run in groupby(row):
            length = len(list(run))
            if state in _STATES:
                shapes.append(f'<rect class="{_STATES[state]}" x="{x}" y="{y}" width="{length}" height="1"/>')
            x += length
    lines = "".join(f"M{x} 0V{height}" for x in range(width + 1)) + "".join(
        f"M0 {y}H{width}" for y in range(height + 1)
    )
    counts = tile_counts(picture)
    said = ", ".join(f"{count} {name}" for name, count in counts.items())
    # Tall and wide masks keep the shape of their tiles within bounds.
    ratio = min(max(width / height, 0.4), 2.5)
    return (
        f'<svg class="tiles" viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img" '
        f'width="{int(170 * min(ratio, 1.4))}" height="{int(170 * min(ratio, 1.4) / ratio)}">'
        f"<title>tiles of the mask: {said}</title>{''.join(shapes)}"
        f'<path d="{lines}" vector-effect="non-scaling-stroke"/></svg>'
    )


def _rows(picture: Mapping[str, object]) -> list[str]:
    rows = picture.get("states", ())
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        return []
    width = len(rows[0]) if rows and isinstance(rows[0], str) else 0
    return [row for row in rows if isinstance(row, str) and len(row) == width]


def _positive(value: object, zero: bool = False) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and (value > 0 or (zero and value == 0))


def _time(microseconds: float) -> str:
    if microseconds < 1e3:
        return f"{microseconds:.0f} µs"
    return f"{microseconds / 1e3:.3g} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.3g} s"


def _bytes(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"
