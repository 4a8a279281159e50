"""Keeps tuning results on disk: one JSON file per key, in a folder that many processes share.

A file appears whole, by renaming a temporary one, or not at all, so that a process may be killed at any moment.  A file
may have been written by another version, or by somebody else, so it is checked, and ignored with one warning if it is
not an entry of the requested key.  File names never come from the contents of a file.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from autopallas import environment
from autopallas.errors import warn
from autopallas.tuning.entry import MAXIMUM_BYTES, Entry, EntryError, parse
from autopallas.tuning.key import TuningKey

__all__ = ["Cache", "Folder", "Kept", "directory"]


class Kept(Protocol):
    """Interface of what a folder keeps: data that knows its own key and its own text."""

    @property
    def digest(self) -> str: ...

    def to_json(self) -> str: ...


K = TypeVar("K", bound=Kept)

_MOST_ENTRIES = 4096
_MOST_BYTES = 64 * 2**20
_ENTRY = re.compile(r"[0-9a-f]{64}\.json")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")
_ABANDONED_SECONDS = 3600.0
"""Age from which a temporary file counts as left behind by a dead process."""


def directory() -> Path | None:
    """Returns ``AUTOPALLAS_CACHE_DIR``, else the platform's folder for a user's caches, or None if there is none."""
    asked = environment.read().cache_dir
    if asked is not None:
        return Path(asked)
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return Path(local) / "autopallas" / "Cache" if local else None
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "autopallas"
        return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "autopallas"
    except RuntimeError:  # the user has no home folder
        return None


class _Warned:
    """Records which warnings this process has given: each is given only once."""

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._lock = threading.Lock()

    def once(self, kind: str, message: str) -> None:
        with self._lock:
            if kind in self._given:
                return
            self._given.add(kind)
        warn(message)

    def forget(self) -> None:
        self._given.clear()


WARNED = _Warned()


class Folder(Generic[K]):
    """Entries of one kind in one folder.

    Attributes:
      folder: where the files are; None: entries are kept only in this process.
    """

    def __init__(self, base: Path | None, name: str):
        self._base = base
        self.folder = None if base is None else base / name
        self._unwritten: dict[str, K] = {}  # so that an unwritable disk costs one search, not one per trace

    def parse(self, text: str | bytes, digest: str) -> K:
        """Parses the entry in a file; raises EntryError if the file holds something else."""
        raise NotImplementedError

    def get(self, key: TuningKey) -> K | None:
        """Returns the entry of a key, or None."""
        if key.digest in self._unwritten:
            return self._unwritten[key.digest]
        if not self.usable():
            return None
        assert self.folder is not None
        return self._read(self.folder / f"{key.digest}.json", key.digest)

    def put(self, entry: K) -> bool:
        """Keeps an entry, replacing the one of the same key; returns False if it could not be written to disk."""
        try:
            self._write(entry)
        except (OSError, ValueError) as error:
            self._unwritten[entry.digest] = entry
            WARNED.once("write", f"autopallas cannot keep tuning results in {self.folder}: {error}")
            return False
        self._unwritten.pop(entry.digest, None)
        try:
            self._bound()
        except OSError as error:
            WARNED.once("write", f"autopallas cannot remove old tuning results from {self.folder}: {error}")
        return True

    def entries(self) -> Iterator[K]:
        """Yields all valid entries on disk, by digest."""
        for name in sorted(file.name for file in self._files(_ENTRY)):
            assert self.folder is not None
            entry = self._read(self.folder / name, name.removesuffix(".json"))
            if entry is not None:
                yield entry

    def unreadable(self) -> str:
        """Returns why the entries on disk cannot be read; an empty text if they can, or where there is no folder."""
        if self.folder is None:
            return ""
        try:
            with os.scandir(self.folder):
                return ""
        except FileNotFoundError:
            return ""
        except OSError as error:
            return error.strerror or str(error)

    def clear(self) -> int:
        """Removes every entry, and nothing else; returns how many there were.

        Raises:
          OSError: a file cannot be removed.
        """
        self._unwritten.clear()
        for left in self._files(_TEMPORARY):
            _removed(left.path)
        return sum(_removed(file.path) for file in self._files(_ENTRY))

    # ------------------------------------------------------------------ files

    def usable(self) -> bool:
        """Returns whether the folder exists and is one; before the first result it does not, and no key is computed."""
        if self.folder is None:
            return False
        try:
            mode = os.lstat(self.folder).st_mode
        except OSError:
            return False
        if not stat.S_ISDIR(mode):
            WARNED.once("read", f"autopallas ignores {self.folder}, which is not a folder")
            return False
        return True

    def _files(self, pattern: re.Pattern[str]) -> list[os.DirEntry[str]]:
        if not self.usable():
            return []
        assert self.folder is not None
        try:
            with os.scandir(self.folder) as files:
                return [file for file in files if pattern.fullmatch(file.name)]
        except OSError as error:
            WARNED.once("read", f"autopallas cannot read {self.folder}: {error}")
            return []

    def _read(self, path: Path, digest: str) -> K | None:
        """Reads the entry in a file; returns None, with a warning, if the file holds something else."""
        try:
            return self.parse(_bytes(path), digest)
        except FileNotFoundError:
            return None
        except (OSError, EntryError) as error:
            WARNED.once(
                "read",
                f"autopallas ignores the tuning result {path}: {error}; "
                "`python -m autopallas cache clear` removes what cannot be used",
            )
            return None

    def _write(self, entry: K) -> None:
        if self._base is None or self.folder is None:
            raise OSError("there is no folder for caches")
        content = entry.to_json().encode()
        if len(content) > MAXIMUM_BYTES:
            raise ValueError(f"an entry has {len(content)} bytes, more than {MAXIMUM_BYTES}")
        self._base.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if not self.usable():
            raise OSError(f"{self.folder} is not a folder")
        temporary = self.folder / f".{entry.digest}.{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        handle = os.open(temporary, flags, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(temporary, self.folder / f"{entry.digest}.json")
        except BaseException:
            _removed(temporary)
            raise

    def _bound(self) -> None:
        """Removes the oldest entries if there are too many, and files that killed processes left behind."""
        known = []
        for file in self._files(_ENTRY):
            try:
                found = file.stat(follow_symlinks=False)
            except OSError:  # another process was faster
                continue
            known.append((found.st_mtime, found.st_size, file.path))
        known.sort(reverse=True)
        total = 0
        for count, (_, size, path) in enumerate(known, 1):
            total += size
            if count > _MOST_ENTRIES or total > _MOST_BYTES:
                _removed(path)
        for file in self._files(_TEMPORARY):
            try:
                if time.time() - file.stat(follow_symlinks=False).st_mtime > _ABANDONED_SECONDS:
                    _removed(file.path)
            except OSError:
                continue


class Cache(Folder[Entry]):
    """The tuning results in one folder."""

    def __init__(self, base: Path | None):
        super().__init__(base, "tuning")

    @staticmethod
    def current() -> Cache:
        """Returns the cache that the environment asks for now."""
        return _at(directory())

    def parse(self, text: str | bytes, digest: str) -> Entry:
        return parse(text, digest)


@functools.lru_cache(maxsize=16)
def _at(base: Path | None) -> Cache:
    return Cache(base)


def _removed(path: str | Path) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def _bytes(path: Path) -> bytes:
    # Opens no link, and does not wait for the other end of a pipe.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags)
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise EntryError("it is not a file")
        if found.st_size > MAXIMUM_BYTES:
            raise EntryError(f"it has {found.st_size} bytes, more than {MAXIMUM_BYTES}")
        return file.read(MAXIMUM_BYTES + 1)
