"""Parses numbers on the command line, with what is wrong in words."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

__all__ = ["at_least", "seconds"]


def seconds(text: str) -> float:
    """Parses a number of seconds above 0.

    Raises:
      ArgumentTypeError: the text is something else.
    """
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not (math.isfinite(found) and found > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return found


def at_least(least: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers that are not less than ``least``."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text} is not a whole number above {least - 1}")
        return int(text)

    return parse
