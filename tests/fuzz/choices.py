"""The choices of which a random program consists, each with a name, so that one can be undone without the others."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TypeVar

__all__ = ["Choices"]

T = TypeVar("T")


class Choices:
    """Draws by name: what one name gives depends on the seed and the name alone, not on what was drawn before.

    The first option of each choice is the plain one.  A program is made smaller by taking it for one name after the
    other (``plain``) and looking whether it still fails.
    """

    def __init__(self, seed: int, plain: frozenset[str] = frozenset(), fixed: Mapping[str, str] | None = None):
        self.seed = seed
        self._plain = plain
        self._fixed = fixed or {}
        self.taken: dict[str, str] = {}
        """What was chosen other than plainly, by name."""

    def pick(self, name: str, options: Mapping[str, T] | list[T] | tuple[T, ...], often: float = 0.5) -> T:
        """One of the options.  The first with the probability ``1 - often``, the others alike."""
        named = dict(options) if isinstance(options, Mapping) else {str(x): x for x in options}
        first, *others = named
        draw = random.Random(f"{self.seed}/{name}")
        chosen = draw.choice(others) if others and draw.random() < often else first
        if name in self._fixed and self._fixed[name] in named:
            chosen = self._fixed[name]
        if name in self._plain:
            chosen = first
        if chosen != first:
            self.taken[name] = chosen
        return named[chosen]

    def chance(self, name: str, often: float) -> bool:
        """Whether something is done.  Not doing it is plain."""
        return self.pick(name, {"no": False, "yes": True}, often)
