"""Provides programs of attention for the public function and for tests."""

from __future__ import annotations

from functools import cache

import numpy as np

from autopallas.sites.elementwise import ElementwiseProgram, Index, traced

__all__ = ["causal", "traced"]


@cache
def causal() -> ElementwiseProgram:
    """Returns the program ``query >= key``: position t sees the keys 0 .. t."""
    int32 = np.dtype(np.int32)
    return traced(lambda query, key: query >= key, Index("query", int32), Index("key", int32))
