"""Names the classes of numerics: how the results of a replacement relate to the original's."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

__all__ = ["CLASSES", "Numerics", "allows"]

Numerics: TypeAlias = Literal["identical", "reordered", "tolerance"]
"""A class of numerics, for values and gradients alike.

"identical": bit for bit; a NaN is a NaN.  "reordered": the same sums and products, taken in another order or rounded
less often; where each of them is exact, the results are equal, though zeros may differ in sign and equal elements may
change places.  "tolerance": other roundings, within the tolerances of :mod:`autopallas.numerics.compare`.
"""

CLASSES: tuple[Numerics, ...] = get_args(Numerics)
"""The classes, the strictest first.  Each allows those before it."""


def allows(allowed: Numerics, stated: Numerics) -> bool:
    """Returns whether a replacement of the class ``stated`` may be used where ``allowed`` is asked for.

    Example:
      >>> allows("reordered", "identical"), allows("reordered", "tolerance")
      (True, False)
    """
    return CLASSES.index(stated) <= CLASSES.index(allowed)
