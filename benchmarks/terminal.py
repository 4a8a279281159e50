"""What a person sees of a run: a table of 100 columns on standard output, progress on standard error."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.case import AUTOPALLAS, ORIGINAL
from benchmarks.rows import Row

_COLUMNS = (
    ("", 20),
    ("wall ms", 8),
    ("ratio (quartiles)", 18),
    ("cpu ratio", 9),
    ("peak", 4),
    ("temp MiB", 8),
    ("share", 5),
    ("resident", 8),
    ("error", 7),
)
_INDENT = "  "


def header(rows: Sequence[Row]) -> str:
    """What holds for the whole run, from its first rows."""
    row = rows[0]
    settings = " ".join(f"{name}={value}" for name, value in row.flags.items()) or "none"
    return "\n".join(
        [
            f"{row.backend}: {row.device}, {row.processor} {row.vector_extensions}".rstrip(),
            f"jax {row.versions['jax']}, settings: {settings}",
            "ratio: how many times as fast as the original, median of paired runs; peak: share of the matmul peak;",
            "share, resident: temporary and peak resident memory, of the original's; error: max, against float64",
        ]
    )


def table(rows: Sequence[Row]) -> str:
    """One case."""
    row = rows[0]
    peak = f"   (matmul peak {row.peak_teraflops} TFLOP/s)" if row.peak_teraflops else ""
    lines = ["", f"{row.kernel} {row.direction} {row.dtype} {row.mask} {row.shape}{peak}"]
    lines.append(_line([name for name, _ in _COLUMNS]))
    for row in rows:
        lines.append(_line(_cells(row)))
        if ":" in row.implementation:
            lines.append(f"{_INDENT * 2}{row.implementation[:90]}")
        if row.failure:
            lines.append(f"{_INDENT * 2}failed: {row.failure.splitlines()[0][:90]}")
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    blocks = "x".join(str(v) for v in row.block_sizes.values() if isinstance(v, int)) if row.block_sizes else ""
    name = row.implementation if row.candidate == AUTOPALLAS else row.candidate
    ratio = cpu_ratio = share = resident = ""
    if row.candidate != ORIGINAL:
        if row.wall_ratio is not None:
            ratio = f"{row.wall_ratio:.2f} ({row.wall_ratio_lower:.2f}-{row.wall_ratio_upper:.2f})"
        cpu_ratio = _shown(row.cpu_ratio, ".2f")
        share = _shown(row.temporary_ratio, ".2f")
        resident = _shown(row.resident_ratio, ".2f")
    return [
        f"{name.partition(':')[0]} {blocks}".strip(),
        _shown(row.wall_seconds, ".1f", 1e3),
        ratio,
        cpu_ratio,
        _shown(row.fraction_of_peak, ".0%"),
        _shown(row.temporary_bytes, ".1f", 2.0**-20),
        share,
        resident,
        _shown(row.max_error, ".1e"),
    ]


def _shown(value: float | None, how: str, scale: float = 1.0) -> str:
    return "" if value is None else format(value * scale, how)


def _line(cells: Sequence[str]) -> str:
    shown = [f"{cells[0]:<{_COLUMNS[0][1]}.{_COLUMNS[0][1]}}"]
    shown += [f"{cell:>{width}}" for cell, (_, width) in zip(cells[1:], _COLUMNS[1:], strict=True)]
    return (_INDENT + " ".join(shown)).rstrip()
