"""Leaves out sites that do not gain where too many of their neighbours stay as they are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from autopallas.options import Options
from autopallas.patterns.match import Match
from autopallas.plan.decision import Decision

__all__ = ["without_lonely"]

_MOST_LEFT = 1
"""Neighbours of a site that may stay beside it.

Products by broadcasting that share an operand are stored once by XLA's CPU compiler, and each reads that.  Once the
product that both gradients follow is a matrix product, the compiler computes their shared operand anew, a column at a
time: 64 rows with 4,096 of 64 numbers had 0.14 of the original's speed (AVX2, JAX 0.12).  Beside a single one that
stays, programs gained 1.2 to 35.
"""


def without_lonely(matches: Sequence[Match], decisions: Sequence[Decision], options: Options) -> list[Decision]:
    """Keeps the originals of applied sites of which several :attr:`~.Match.neighbours` are given by no applied site.

    Under objective "always", which asks for no gain, nothing is left out.
    """
    found = list(decisions)
    around = [n for n, match in enumerate(matches) if match.neighbours]
    if options.objective == "always" or not around:
        return found
    applied = [match for match, decision in zip(matches, found, strict=True) if decision.verdict == "applied"]
    given = Counter(number for match in applied for number in match.results)
    left = {n: sum(not given[number] for number in set(matches[n].neighbours)) for n in around}
    beside: dict[int, list[int]] = defaultdict(list)
    for n in around:
        for number in set(matches[n].neighbours):
            beside[number].append(n)
    todo = list(around)
    while todo:
        n = todo.pop()
        if found[n].verdict != "applied" or left[n] <= _MOST_LEFT:
            continue
        reason = f"{left[n]} equations that read the same operand stay as they are, beside which it gains nothing"
        found[n] = replace(found[n], verdict="kept", reason=reason)
        for number in matches[n].results:
            given[number] -= 1
            for other in beside[number] if not given[number] else ():
                left[other] += 1
                todo.append(other)
    return found
