"""Tells how a hidden unit depends on its two products: which one is activated, and which one enters linearly."""

from __future__ import annotations

from typing import TypeAlias

from autopallas.patterns.gated_mlp.units import Unlike
from autopallas.patterns.match import Mismatch
from autopallas.sites.elementwise import ElementwiseProgram, Input, Instruction, Score, Side

__all__ = ["roles"]

Degrees: TypeAlias = tuple[int, int]
"""How a value depends on the first and on the second product: 0 not at all, 1 linearly, 2 linearly between bounds, 3 in
any other way."""

_LINEAR, _BOUNDED, _ANY = 1, 2, 3
_KEPT = frozenset({"convert_element_type", "neg", "add", "add_any", "sub", "reduce_precision", "copy", "stop_gradient"})
_BOUNDS = frozenset({"max", "min", "clamp"})

_BILINEAR = (
    "neither of the two projections is activated",
    "A product of two projections without an activation is left alone. If a gate is meant, activate one of them, as in "
    "jax.nn.silu(x @ gate) * (x @ up).",
)
_BOTH = (
    "both projections are activated",
    "A gated MLP multiplies one activated projection with one that is not: only biases, scales, casts and bounds may "
    "stand between the second projection and the product.",
)


def roles(program: ElementwiseProgram, alone: bool = False) -> bool:
    """Returns whether the first product, the score, is the gate, and side input 0 what it is multiplied with; False
    where they have changed places. ``alone`` tells that no further product sums over the hidden units.

    Raises:
      Mismatch: neither product is activated, or both are.
      Unlike: so it is, and there is no further product either: any two products may be multiplied, such as the
        derivatives of a layer along two directions, or the gates of a recurrent unit.
    """
    first, second = program.run(_degrees_of, _applied)
    if alone and (max(first, second) <= _LINEAR or min(first, second) == _ANY):
        raise Unlike("two products are multiplied, of which none or both are activated")
    if max(first, second) <= _LINEAR:
        raise Mismatch(_BILINEAR[0], advice=_BILINEAR[1])
    if min(first, second) == _ANY:
        raise Mismatch(_BOTH[0], advice=_BOTH[1])
    return first >= second


def _degrees_of(given: Input) -> Degrees:
    match given:
        case Score():
            return _LINEAR, 0
        case Side(position=0):
            return 0, _LINEAR
        case _:
            return 0, 0


def _applied(instruction: Instruction, arguments: list[Degrees]) -> Degrees:
    first, second = (_one(instruction.primitive.name, [a[i] for a in arguments]) for i in (0, 1))
    return first, second


def _one(name: str, degrees: list[int]) -> int:
    """Returns the degree of an operation's result in one product, by those of its operands."""
    highest = max(degrees, default=0)
    if not highest or name in _KEPT:
        return highest
    if name in _BOUNDS:
        return max(highest, _BOUNDED)
    if name == "mul":
        return highest if min(degrees) == 0 else _ANY
    if name == "div":
        return highest if degrees[1] == 0 else _ANY
    if name == "select_n":
        return highest if degrees[0] == 0 else _ANY
    return _ANY
