"""Entries for the tests of the cache, made without any search."""

from __future__ import annotations

from typing import Any

from autopallas.tuning.entry import Entry, Rejected
from autopallas.tuning.key import TuningKey, digest_of
from autopallas.tuning.row import running_jax
from autopallas.tuning.table import Row


def key(number: int = 0, **changes: Any) -> TuningKey:
    """A key like a real one; another for another number."""
    description = {
        "operation": "attention",
        "implementation": "xla",
        "direction": "forward",
        "specs": [{"query_length": number, "score": "program(score: float32)\n  return score"}],
        "bucket": ["float32", "T1024", "causal"],
        "kernel_version": "0123456789abcdef",
        "platform": "cpu",
        "device_kind": "cpu",
        "runtime": "2 processors",
        "versions": {"jax": "0.12.0", "jaxlib": "0.12.0"},
        "flags": {"XLA_FLAGS": ""},
    } | changes
    return TuningKey(digest_of(description), description)


def tuned(number: int = 0, query_block: int = 256, **changes: Any) -> Entry:
    """An entry with block sizes."""
    sizes = {"query_block": query_block, "key_block": 256}
    row = Row(sizes, 100.0, 250.0, 1000, 4000, "measured", "2026-11-21", running_jax())
    wrong = Rejected({"query_block": 8, "key_block": 8}, "compare", "differs by 0.5")
    return Entry(key(number, **changes).description, "tuned", sizes, row, "", (wrong,), 30.0)


def failed(number: int = 0, reason: str = "no candidate works") -> Entry:
    """A negative entry."""
    return Entry(key(number).description, "failed", reason=reason, seconds=30.0)
