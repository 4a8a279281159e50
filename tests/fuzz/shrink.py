"""Makes a failing program smaller: takes one choice after the other back, as long as it still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable

from .judge import Verdict
from .program import RandomProgram, random_program

__all__ = ["shrunk"]


def shrunk(verdict: Verdict, judge: Callable[[int, list[str]], Verdict], tries: int = 200) -> RandomProgram:
    """The smallest program found that fails in the same way.

    Args:
      verdict: that of the whole program.
      judge: gives a verdict on a seed with some choices taken plainly.
      tries: so many programs are judged at most.
    """
    plain: list[str] = []
    settled: set[str] = {"family", "busy"}
    size = 64
    while tries > 0:
        names = [n for n in random_program(verdict.seed, frozenset(plain)).choices if n not in settled]
        if not names:
            break
        group = names[: max(1, min(size, len(names)))]
        tries -= 1
        found = judge(verdict.seed, [*plain, *group])
        if found.kind == verdict.kind and _alike(found, verdict):
            plain += group
        elif len(group) == 1:
            settled.update(group)
        else:
            size = len(group) // 2
            continue
        size = max(size, 4)
    return random_program(verdict.seed, frozenset(plain))


def _alike(a: Verdict, b: Verdict) -> bool:
    """Exceptions have to be of one type; otherwise anything wrong is as good."""
    return a.kind != "exception" or a.complaints[0].split(":")[0] == b.complaints[0].split(":")[0]
