"""Reads a sum of softmaxes times the same values, as of differential attention, as a sum of attentions.

``(softmax(x) - c * softmax(y)) v`` is ``softmax(x) v - c * (softmax(y) v)`` for a number c of each row: the same terms
are added up in another order.  Each summand is proved by itself; the site is all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from autopallas.graph import Body, Ref
from autopallas.graph.labels import Atom, Dimension
from autopallas.kernels.attention.sum_site import AttentionSum
from autopallas.numerics.casts import rounds
from autopallas.patterns.advice import MAPS_ALIKE
from autopallas.patterns.attention.joint_drafts import SeveralDraft
from autopallas.patterns.attention.site import Labels
from autopallas.patterns.carry import Carrier
from autopallas.patterns.expressions import Scope, computed_from
from autopallas.patterns.forward import Forward
from autopallas.patterns.match import Mismatch
from autopallas.patterns.softmax_terms import SeveralMaps
from autopallas.sites.index_notation import Operand

__all__ = ["SumDraft", "Summand", "summands", "with_weights"]

_MOST = 8
"""Most maps of one sum."""
_FURTHEST = 32
"""Most operations between a map and the product with the values."""
_ROLES = 3
"""Queries, keys and values."""


@dataclass(frozen=True, slots=True)
class Summand:
    """One term of a sum of weights.

    Attributes:
      sign: 1, or -1 if it is subtracted.
      weights: the term, without factors of the whole sum that it is in.
      outside: these factors, which multiply (1) or divide (-1) it.
      fixed: the index of each label of the term of which one index is read, as where several maps are one array.
    """

    sign: int
    weights: Ref
    outside: tuple[tuple[int, Ref], ...]
    fixed: tuple[tuple[Atom, int], ...] = ()


def summands(scope: Scope, weights: Ref, keys: Sequence[Atom]) -> list[Summand]:
    """Returns the terms that weights are the sum of; ``keys`` are the labels of the key axis.

    Raises:
      SeveralMaps: there are too many.
    """
    space, graph = scope.space, scope.graph

    def split(ref: Ref, sign: int, outside: tuple[tuple[int, Ref], ...], depth: int) -> list[Summand]:
        ref, fixed = _read_whole(scope, space.canonical(ref))
        itself = [Summand(sign, ref, outside, fixed)]
        name, operands = scope.name(ref), space.operands(ref)
        if operands is None or depth > _FURTHEST:
            return itself
        found: list[Summand] = []
        if name in ("add", "add_any", "sub"):
            for operand, own in zip(operands, (sign, -sign if name == "sub" else sign), strict=True):
                if scope.number(operand) != 0:  # Python's sum begins with 0
                    found += split(operand, own, outside, depth + 1)
                if len(found) > _MOST:
                    raise SeveralMaps
            return found
        if name == "neg":
            found = split(operands[0], -sign, outside, depth + 1)
        elif name == "convert_element_type" and rounds(graph.dtype(operands[0].value), graph.dtype(ref.value)):
            found = split(operands[0], sign, outside, depth + 1)
        elif name in ("mul", "div"):
            over_keys = [bool(set(space.resolve(keys)) & space.atoms(operand)) for operand in operands]
            if over_keys.count(True) == 1 and (name == "mul" or over_keys[0]):
                first = over_keys.index(True)
                factor = (1 if name == "mul" else -1, operands[1 - first])
                found = split(operands[first], sign, (*outside, factor), depth + 1)
        if len(found) > 1 or found and found[0].fixed:
            return found
        return itself  # one map is read with its factors

    return split(weights, 1, (), 0)


def _read_whole(scope: Scope, ref: Ref) -> tuple[Ref, tuple[tuple[Atom, int], ...]]:
    """Reads one index of an axis that a reshape cut out, as where heads lie in pairs, as all of it under a label.

    Returns:
      The use of what was reshaped, and the index of each such label; the same use where nothing was cut.
    """
    space = scope.space
    if scope.name(ref) != "reshape":
        return ref, ()
    view, fixed = list(ref.view), list[tuple[Atom, int]]()
    for axis, (n, (offset, atoms)) in enumerate(zip(scope.graph.shape(ref.value), view, strict=True)):
        if n > 1 and space.extent(atoms) == 1:
            label = space.fresh(n)
            view[axis] = 0, label
            fixed.append((label[0], offset))
    whole = space.canonical(Ref(ref.value, tuple(view)))
    return (ref, ()) if whole.value == ref.value else (whole, tuple(fixed))


class SumDraft(SeveralDraft):
    """Treats attentions whose maps are added up before the product with their values as one site."""

    signs: tuple[int, ...]

    @property
    def assumptions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(said for part in self.parts for said in part.assumptions))

    def assemble(
        self,
        pinned_roles: Mapping[int, int | None] = MappingProxyType({}),
        pinned_sides: frozenset[int] = frozenset(),
        further: tuple[Body, ...] = (),
        across: bool = False,
    ) -> tuple[AttentionSum, Carrier]:
        graph, space = self.graph, self.space
        before = -1
        while space.refinements != before:
            before = space.refinements
            for part in self.parts:
                part._roles()
        operands: list[int] = []
        carriers: list[Carrier] = []
        read: list[Operand] = []
        self._places = []
        for number, part in enumerate(self.parts):
            carrier = part._carrier(pinned_sides, further, across)
            carrier.operands = operands
            carriers.append(carrier)
            pins = {role: pinned_roles.get(_ROLES * number + role) for role in range(_ROLES)}
            for role, operand in enumerate(part._read_roles(carrier, pins)):
                shared = self._same_use(number, role)
                if shared is not None and operands[self._places[shared]] == operands[operand.position]:
                    operand = Operand(self._places[shared], operand.view)
                self._places.append(operand.position)
                read.append(operand)
        kept = sorted(set(self._places))
        operands[:] = [operands[position] for position in kept]
        self._places = [kept.index(position) for position in self._places]
        for carrier in carriers:
            carrier.roles = len(operands)
        fixed = {atom: index for part in self.parts for atom, index in part.fixed.items()}
        if any(space.resolve((atom,)) != (atom,) for atom in fixed):
            raise Mismatch("an axis of which one index is read is cut in two", advice=MAPS_ALIKE)
        labels = Labels(space, fixed=fixed)
        sites = []
        for number, (part, carrier) in enumerate(zip(self.parts, carriers, strict=True)):
            own = range(_ROLES * number, _ROLES * (number + 1))
            roles = [Operand(self._places[role], read[role].view) for role in own]
            sites.append(part._described(carrier, roles, labels, bool(further)))
        result_dtype = graph.dtype(self.root)
        wide = np.dtype(np.float32) if result_dtype.itemsize < 4 else result_dtype
        site = AttentionSum(
            sizes=labels.sizes(),
            parts=tuple(replace(own, result_dtype=wide) for own in sites),
            signs=self.signs,
            types=(),
            result=sites[0].result,
            result_dtype=result_dtype,
        )
        typed = replace(site, types=tuple(graph.dtype(number) for number in operands))
        if any(own.spec != typed.sites[0].spec for own in typed.sites):
            raise Mismatch(
                "softmaxes are added up that differ in more than what they read: in sizes, masks or dtypes",
                advice=MAPS_ALIKE,
            )
        scores = {part.score.value: True for part in self.parts}
        for number in operands:
            if computed_from(graph, number, scores, min(scores)):
                raise Mismatch(
                    "one of several softmaxes that are added up reads the scores of another", number, advice=MAPS_ALIKE
                )
        return site, carriers[0]

    def _same_use(self, part: int, role: int) -> int | None:
        """Returns an earlier role that reads its operand in the same place of the program, if there is one."""
        query_or_key = role < _ROLES - 1
        for other in range(part):
            if not query_or_key or self.parts[other].score.value == self.parts[part].score.value:
                return _ROLES * other + role
        return None

    def role_uses(self, forward: Forward) -> list[list[int]]:
        """Returns, per role, the position among the uses of the forward that reads its operand."""
        uses = self._uses(forward)
        assert uses is not None
        ordered: list[list[int]] = []
        for start in range(0, len(uses), _ROLES):
            ordered += [[use] for use in uses[start : start + _ROLES]]
        return ordered


def with_weights(
    contraction: tuple[Ref, Ref, list[Dimension]], side: int, weights: Ref
) -> tuple[Ref, Ref, list[Dimension]]:
    """Returns a contraction with other weights as the operand at ``side``."""
    first, second, dimensions = contraction
    return (weights, second, dimensions) if side == 0 else (first, weights, dimensions)
