"""Keeps what was found: a line of JSON for each row, appended when it is known, and an archive after each stage."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["ARCHIVE", "JOURNAL", "Identity", "Journal", "read"]

JOURNAL, ARCHIVE = "journal.jsonl", "results.tar.gz"
_LOG_BYTES = 2**19

Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Identity:
    """What rows depend on besides the kernels, each of which has a version of its own.

    Attributes:
      commit: of the checkout; empty if unknown.
      jax: JAX's version.
      device: the device's own name.
    """

    commit: str
    jax: str
    device: str


def read(path: Path) -> list[Row]:
    """Returns a journal's rows.  A last line that was cut off, by the end of a machine, is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(lines):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines) - 1:
                raise
    return rows


@dataclass
class Journal:
    """A journal in a folder, and the rows of further ones.

    Attributes:
      folder: where it is.
      rows: all rows, those of earlier calls too.
    """

    folder: Path
    rows: list[Row] = field(default_factory=list)

    @staticmethod
    def opened(folder: Path, more: Iterable[Path] = ()) -> Journal:
        """Opens the folder's journal, and copies the rows of further ones into it that it lacks.

        Raises:
          OSError: the folder cannot be written.
          ValueError: a journal is damaged.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / JOURNAL
        found = Journal(folder, read(path))
        known = {json.dumps(row, sort_keys=True) for row in found.rows}
        added = [row for file in more for row in read(file) if json.dumps(row, sort_keys=True) not in known]
        lines = [json.dumps(row) + "\n" for row in (*found.rows, *added)]
        # Written anew, so that a line that was cut off does not run into the next one.
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text("".join(lines), encoding="utf-8")
        os.replace(unfinished, path)
        found.rows += added
        return found

    def add(self, row: Row) -> None:
        """Appends a row, on disk too."""
        self.rows.append(row)
        with open(self.folder / JOURNAL, "a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def stranger(self, own: Identity) -> str | None:
        """Returns why these rows do not go with new ones: another version of JAX, or another commit; or None."""
        for row in self.rows:
            if row["jax"] != own.jax:
                return f"the journal has rows of JAX {row['jax']}, and this is {own.jax}"
            if own.commit and row["commit"] and row["commit"] != own.commit:
                return f"the journal has rows of commit {row['commit']}, and this is {own.commit}"
        return None

    def reusable(self, own: Identity, versions: Mapping[str, str]) -> Iterator[Row]:
        """Yields the rows of the same device, JAX and version of the kernels, whatever their commit."""
        for row in self.rows:
            same = row["jax"] == own.jax and row["device"] == own.device
            if same and row["kernel_version"] == versions.get(row["kernel"], ""):
                yield row

    def archive(self, texts: Mapping[str, str], logs: Sequence[Path]) -> Path:
        """Writes the journal, texts, and the ends of logs into one file."""
        members = {JOURNAL: (self.folder / JOURNAL).read_bytes()}
        members |= {name: text.encode() for name, text in texts.items()}
        members |= {log.name: log.read_bytes()[-_LOG_BYTES:] for log in logs if log.exists()}
        unfinished = self.folder / f"{ARCHIVE}.unfinished"
        with tarfile.open(unfinished, "w:gz") as archive:
            for name, content in members.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        os.replace(unfinished, self.folder / ARCHIVE)
        return self.folder / ARCHIVE
