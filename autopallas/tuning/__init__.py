"""Tuning: timing, tuned tables, and what is built on them.

``measure`` is the only timing function: benchmarks, tables and searches all use it, so that their figures compare.
"""

from __future__ import annotations

from autopallas.tuning.measure import Clocks, Failure, Measurement, Spread, Timing, measure

__all__ = ["Clocks", "Failure", "Measurement", "Spread", "Timing", "measure"]
