"""Measures rows once more, in further processes: one differs from the next by more than its own spread."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from autopallas.sites.spec import BlockSizes, Sizes
from autopallas.tuning.table import Key, Row

__all__ = ["ProcessError", "answer", "asked", "joined", "measured"]

Found = Mapping[str, Mapping[Key, Row[BlockSizes]]]
"""Rows by operation."""

_FIGURES = ("kernel_us", "original_us", "kernel_bytes", "original_bytes")


class ProcessError(Exception):
    """Raised if a further process fails; the message has its last line."""


def measured(first: Found, processes: int, arguments: Sequence[str]) -> dict[str, dict[Key, Row[BlockSizes]]]:
    """Returns rows with what further processes measure of the same block sizes.

    Args:
      first: the rows that this process found.
      processes: how many measure them in all, this one among them.
      arguments: of this command line, which the others repeat.

    Raises:
      ProcessError: a process failed.
    """
    every = {op: {key: [row] for key, row in rows.items()} for op, rows in first.items()}
    for _ in range(processes - 1):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.json"
            sizes = [[list(key), row.block_sizes.to_dict()] for rows in first.values() for key, row in rows.items()]
            file.write_text(json.dumps(sizes), encoding="utf-8")
            command = [sys.executable, "-m", "autopallas", *arguments, "--only", str(file), "--again"]
            child = dict(os.environ, AUTOPALLAS_CACHE_DIR=folder)  # what others found is not what this one measures
            done = subprocess.run(command, env=child, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
                raise ProcessError(f"a further process could not measure: {said[-1]}")
            for op, key, figures in json.loads(file.read_text(encoding="utf-8")):
                rows = every.get(op, {}).get(cast(Key, tuple(key)))
                if rows is not None:
                    rows.append(dataclasses.replace(rows[0], **figures))
    return {op: {key: joined(rows) for key, rows in keyed.items()} for op, keyed in every.items()}


def joined(rows: Sequence[Row[BlockSizes]]) -> Row[BlockSizes]:
    """Returns one row for several measurements of the same block sizes: that of the median gain, with their lower
    quartile.

    Example:
      >>> from autopallas.kernels.attention.block_sizes import BlockSizes
      >>> rows = [Row(BlockSizes(64, 64), 1.0, gain, 1, 1, "measured", "", "") for gain in (2.0, 1.0, 1.5)]
      >>> joined(rows).speedup, joined(rows).lower_gain, joined(rows).processes
      (1.5, 1.25, 3)
    """
    if len(rows) == 1:
        return rows[0]
    gains = [row.speedup for row in rows]
    middle = statistics.median_low(gains)
    (row, *_) = (row for row in rows if row.speedup == middle)
    lower = float(f"{np.percentile(gains, 25):.4g}")
    return dataclasses.replace(row, processes=len(rows), lower_gain=lower)


def asked(file: Path) -> dict[Key, Sizes]:
    """Returns the block sizes that a further process is to measure, by their rows' keys."""
    return {cast(Key, tuple(key)): sizes for key, sizes in json.loads(file.read_text(encoding="utf-8"))}


def answer(file: Path, found: Found) -> None:
    """Writes what a further process measured."""
    rows = [
        [op, list(key), {name: getattr(row, name) for name in _FIGURES}]
        for op, keyed in found.items()
        for key, row in keyed.items()
    ]
    file.write_text(json.dumps(rows), encoding="utf-8")
