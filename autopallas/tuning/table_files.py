"""Reads and writes the tables' files, ``autopallas/tuning/data/<device>/<operation>.csv``, when first asked for.

Each row stands on one line, so that differences and merges are of rows, and each column is named once.  On CPUs the
processor's vector extensions and the minor version of JAX, which has the compiler, are a second key: of rows that
otherwise have the same key, the one for this processor and this version counts, else what those nearest to it agree on.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, TypedDict, cast

from autopallas.sites.spec import BlockSizes
from autopallas.tuning import processor
from autopallas.tuning.row import DEVICES, Bucket, Evidence, Key, Row, Rows, jax_line, key_of_least_time, running_jax

__all__ = ["DATA", "Files", "device_of", "folder_of"]

DATA = Path(__file__).with_name("data")
"""Folder of the tables' files."""

_KEY = ("implementation", "direction", "dtype", "bucket", "invariants")


def _positive(text: str) -> float:
    """Returns a time or a gain; raises ValueError for what is none, such as a NaN, with which nothing compares."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"a row of a table has {text} where a number above 0 belongs")
    return value


_FIGURES: Mapping[str, Callable[[str], object]] = {
    "extensions": lambda text: text or None,
    "kernel_us": _positive,
    "original_us": _positive,
    "kernel_bytes": int,
    "original_bytes": int,
    "evidence": str,
    "date": str,
    "versions": str,
    "batch": int,
    "spelling": str,
    "processes": lambda text: int(text or 1),
    "lower_gain": lambda text: _positive(text) if text else None,
}
"""Columns of a row after its key, and how each is parsed; block sizes, by name, stand before the times."""


_Lines: TypeAlias = tuple[Sequence[str], list[list[str]]]
"""The names of a file's columns, and its lines."""
_Parse: TypeAlias = Callable[[Sequence[str], Sequence[str]], tuple[Key, Row[BlockSizes]]]


class _Figures(TypedDict):
    """All fields of a row except its block sizes."""

    extensions: str | None
    kernel_us: float
    original_us: float
    kernel_bytes: int
    original_bytes: int
    evidence: Evidence
    date: str
    versions: str
    batch: int
    spelling: str
    processes: int
    lower_gain: float | None


def folder_of(device: str) -> str:
    """Returns the folder of a device's files: its name with "_" for spaces, and other special characters encoded.

    Example:
      >>> folder_of("NVIDIA H100"), folder_of("TPU v5e"), folder_of("a/b_c")
      ('NVIDIA_H100', 'TPU_v5e', 'a%2Fb%5Fc')
    """
    encoded = re.sub(rb"[^A-Za-z0-9 -]", lambda found: b"%%%02X" % found[0][0], device.encode())
    return encoded.decode().replace(" ", "_")


def device_of(folder: str) -> str:
    """Returns the device that a folder belongs to.

    Example:
      >>> device_of("NVIDIA_H100"), device_of("a%2Fb%5Fc")
      ('NVIDIA H100', 'a/b_c')
    """
    spaced = folder.replace("_", " ").encode()
    return re.sub(rb"%([0-9A-F]{2})", lambda found: bytes.fromhex(found[1].decode()), spaced).decode()


def _size(text: str) -> int | str:
    """Returns a block size as its class has it: a number, or a word."""
    return int(text) if text.removeprefix("-").isdigit() else text


class Files(Mapping[str, Rows]):
    """The rows of one operation by device, as its files have them.

    Args:
      operation: the operation's name.
      block_sizes: the class of its block sizes, a dataclass of integers and words.
      buckets: the buckets, in the order in which rows are written.
    """

    def __init__(self, operation: str, block_sizes: type[BlockSizes], buckets: Sequence[Bucket]):
        self._operation = operation
        self._block_sizes = block_sizes
        self._buckets = [bucket.name for bucket in buckets]
        self._views: dict[tuple[Path, str | None, str], Rows] = {}

    def __getitem__(self, device: str) -> Rows:
        here = processor.vector_extensions() if device == "cpu" else None
        line = jax_line(running_jax())
        place = self.path(device), here, line
        view = self._views.get(place)
        if view is None:
            view = self._views[place] = _RowsHere(self._lines(device), self._row, here, line)
        if not view:
            raise KeyError(device)
        return view

    def __iter__(self) -> Iterator[str]:
        found = {device_of(path.parent.name) for path in DATA.glob(f"*/{self._operation}.csv")}
        return iter(sorted(found, key=lambda name: (DEVICES.index(name) if name in DEVICES else len(DEVICES), name)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def path(self, device: str) -> Path:
        """Returns the file of a device's rows, which need not exist."""
        return DATA / folder_of(device) / f"{self._operation}.csv"

    def read(self, device: str) -> list[tuple[Key, Row[BlockSizes]]]:
        """Returns all rows of a device, for every processor, in the order of its file; none if there is no file."""
        columns, lines = self._lines(device)
        return [self._row(columns, line) for line in lines]

    def _lines(self, device: str) -> _Lines:
        try:
            text = self.path(device).read_text(encoding="utf-8")
        except FileNotFoundError:
            return _KEY, []
        lines = csv.reader(io.StringIO(text))
        return next(lines, _KEY), list(lines)

    def _row(self, columns: Sequence[str], fields: Sequence[str]) -> tuple[Key, Row[BlockSizes]]:
        line = dict(zip(columns, fields, strict=True))
        implementation, direction, dtype, bucket, invariants = (line[name] for name in _KEY)
        # A size that is left out is its class's default.
        given = ((name, text) for name, text in line.items() if name not in _KEY and name not in _FIGURES)
        sizes = {name: _size(text) for name, text in given if text}
        figures = cast(_Figures, {name: read(line.get(name) or "") for name, read in _FIGURES.items()})
        return (implementation, direction, dtype, bucket, invariants), Row(self._block_sizes(**sizes), **figures)

    def text(self, rows: Sequence[tuple[Key, Row[BlockSizes]]]) -> str:
        """Formats rows as a file has them: in the order of their keys, and of the buckets."""

        def order(item: tuple[Key, Row[BlockSizes]]) -> tuple[object, ...]:
            (*first, bucket, invariants), row = item
            place = self._buckets.index(bucket) if bucket in self._buckets else len(self._buckets)
            return (*first, place, invariants, row.measured_with, _age(row.jax_line))

        named = {name for _, row in rows for name in row.block_sizes.to_dict()}
        sizes = [field.name for field in dataclasses.fields(self._block_sizes) if field.name in named]
        written = io.StringIO()
        columns = [*_KEY, "extensions", *sizes, *(name for name in _FIGURES if name != "extensions")]
        writer = csv.DictWriter(written, columns, lineterminator="\n")
        writer.writeheader()
        for key, row in sorted(rows, key=order):
            figures = {name: getattr(row, name) for name in _FIGURES}
            writer.writerow({**dict(zip(_KEY, key, strict=True)), **row.block_sizes.to_dict(), **figures})
        return written.getvalue()

    def write(self, device: str, rows: Rows, both_objectives: bool = False) -> Path:
        """Writes rows of a device into its file, replacing those of the same key, and on CPUs of the same vector
        extensions and minor version of JAX.

        Args:
          device: the device, as tables name it.
          rows: the rows, with block sizes of the operation's class.
          both_objectives: whether these are all rows for their keys: a second row of an old key, for
            :data:`~autopallas.tuning.row.LEAST_MEMORY`, is then removed. It is removed in any case where the row of
            least time that it was measured with gives way to one of another version of JAX.

        Returns:
          The file.

        Raises:
          OSError: it cannot be written.
        """

        def place(key: Key, row: Row[BlockSizes]) -> tuple[Key, str, str]:
            own = row.jax_line if device == "cpu" else ""
            return key_of_least_time(key) if both_objectives else key, row.measured_with, own

        replaced = {place(key, row) for key, row in rows.items()}
        kept = [(key, row) for key, row in self.read(device) if place(key, row) not in replaced]
        path = self.path(device)
        path.parent.mkdir(parents=True, exist_ok=True)
        # The file is renamed when complete, since a truncated file would be believed.
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(self.text(_paired([*kept, *rows.items()])), encoding="utf-8", newline="")
        os.replace(unfinished, path)
        self._views.clear()
        return path


class _RowsHere(Mapping[Key, Row[BlockSizes]]):
    """The rows of a device that hold for one processor and version of JAX.

    A program needs few of them, so that lines are parsed when their key is asked for.

    Args:
      lines: the names of the columns, and all lines.
      parse: makes a row of the columns and a line.
      here: the processor's vector extensions, if it is a CPU.
      version: the minor version of JAX.
    """

    def __init__(self, lines: _Lines, parse: _Parse, here: str | None, version: str):
        columns, rest = lines
        places = [columns.index(name) for name in _KEY]
        self._columns, self._parse, self._own = columns, parse, (here, version)
        self._waiting: dict[Key, list[Sequence[str]]] = defaultdict(list)
        for fields in rest:
            key = cast(Key, tuple([fields[place] for place in places]))
            self._waiting[key_of_least_time(key)].append(fields)
        self._known: dict[Key, Mapping[Key, Row[BlockSizes]]] = {}

    def _at(self, place: Key) -> Mapping[Key, Row[BlockSizes]]:
        """Returns the rows of both objectives at one place."""
        found = self._known.get(place)
        if found is None:
            rows = [self._parse(self._columns, fields) for fields in self._waiting.get(place, ())]
            found = self._known[place] = _for_processor(rows, *self._own)
        return found

    def __getitem__(self, key: Key) -> Row[BlockSizes]:
        return self._at(key_of_least_time(key))[key]

    def __iter__(self) -> Iterator[Key]:
        for place in list(self._waiting):
            yield from self._at(place)

    def __len__(self) -> int:
        return sum(len(self._at(place)) for place in list(self._waiting))

    def __bool__(self) -> bool:
        return bool(self._waiting)


def _for_processor(
    rows: Sequence[tuple[Key, Row[BlockSizes]]], here: str | None, line: str
) -> dict[Key, Row[BlockSizes]]:
    """Chooses among rows that differ only in their vector extensions and version of JAX: those of this processor, else
    of processors that multiply float32 alike, else of such as multiply 16-bit numbers alike, else those of AVX2; of
    these, those of this minor version.  The rows of both objectives were measured together.

    A minor version without rows that lies between two with rows has those of the lesser gain: where they disagree,
    either may be right.  One before or after all of them has those of the nearest.
    """
    rows = _paired(rows)
    measured: dict[Key, dict[tuple[str, str], float]] = defaultdict(dict)
    for key, row in rows:
        place, own = key_of_least_time(key), (row.measured_with, row.jax_line)
        gains = measured[place]
        gains[own] = row.assured_gain if key == place else gains.get(own, row.assured_gain)

    def rank(extensions: str) -> tuple[object, ...]:
        near = processor.alike_in_float32(extensions, here), processor.alike(extensions, here)
        return extensions == here, *near, extensions == "avx2", extensions

    best: dict[Key, tuple[str, str]] = {}
    for place, gains in measured.items():
        extensions = max((found for found, _ in gains), key=rank)
        versions = sorted((version for found, version in gains if found == extensions), key=_age)
        before = [version for version in versions if _age(version) <= _age(line)][-1:]
        after = [version for version in versions if _age(version) > _age(line)][:1]
        near = before if before == [line] else [*before, *after]
        best[place] = min(((extensions, version) for version in near), key=lambda own: gains[own])
    return {key: row for key, row in rows if (row.measured_with, row.jax_line) == best[key_of_least_time(key)]}


def _paired(rows: Sequence[tuple[Key, Row[BlockSizes]]]) -> list[tuple[Key, Row[BlockSizes]]]:
    """Leaves out the rows of least memory that stand beside rows of least time of other processors and versions of JAX
    alone.  Such a row would hide these where its own version runs."""

    def own(row: Row[BlockSizes]) -> tuple[str, str]:
        return row.measured_with, row.jax_line

    timed: dict[Key, set[tuple[str, str]]] = defaultdict(set)
    for key, row in rows:
        if key == key_of_least_time(key):
            timed[key].add(own(row))
    return [(key, row) for key, row in rows if own(row) in timed.get(key_of_least_time(key), {own(row)})]


def _age(line: str) -> list[int]:
    """Returns what puts minor versions in their order."""
    return [int(part) for part in line.split(".") if part]
