"""Reads what is computed by experts that are chosen by gathers."""

from __future__ import annotations

import jax.numpy as jnp

from autopallas.graph import Ref
from autopallas.graph.labels import Atom
from autopallas.patterns.advice import CHOOSE_FEW, ONE_NUMBER
from autopallas.patterns.expressions import Scope
from autopallas.patterns.match import Mismatch
from autopallas.patterns.mixture_of_experts.picks import GATHERED, PICKED, Picking
from autopallas.patterns.mixture_of_experts.reading import Reading
from autopallas.patterns.mixture_of_experts.refusals import DENSE
from autopallas.patterns.mixture_of_experts.signs import Signs
from autopallas.patterns.mixture_of_experts.sum_reader import SumReader

__all__ = ["PickReader"]


class PickReader(SumReader):
    """Reads what is computed by experts that are chosen by gathers, one for each row."""

    def __init__(self, scope: Scope, top: Ref, space: Picking):
        assert space.pick is not None
        super().__init__(scope, top, [top], ())
        self.pick, self.picking = space.pick, space
        self.contraction = None if scope.name(top) == "gather" else space.contraction(top)

    def _concerns(self, ref: Ref) -> bool:
        atoms = self.space.atoms(ref)
        # Before the choice nothing is gathered, so only values with a label of experts matter there.
        return (
            not self.expert.isdisjoint(atoms) or ref.value > self.pick.index.value and not self.rows.isdisjoint(atoms)
        )

    def read(self) -> Reading | None:
        space, pick = self.space, self.pick
        self.expert = frozenset(space.resolve(pick.expert))
        index = space.canonical(pick.index)
        own = set(space.atoms(index))
        order = [x for _, atoms in space.view(self.top.view) for x in atoms]
        added: tuple[Atom, ...] = ()
        if self.contraction is not None:
            inner = space.resolve([x for _, atoms in self.contraction[2] for x in atoms])
            added = tuple(x for x in inner if x in own)
        self.rows = frozenset(own)
        if not self._add_tokens(own, [*order, *added]) or set(added) & self._shared():
            return None
        self.result.summed, self.result.expert = added, space.resolve(pick.expert)
        if not (self._sum_of_rows() if added else self.holds_product(self.top)):
            return None
        rows = space.extent(self.result.tokens)
        dense = self.contraction is None
        self.result.what = PICKED if dense else GATHERED
        try:
            if not dense and rows <= space.extent((*pick.expert, *self._shared())):
                return None  # each matrix is read about once
            if not Signs(self.graph).counts_below(index.value, pick.size):
                raise Mismatch(
                    f"{DENSE}, and it is not known that the numbers of experts are in range",
                    advice="Take the numbers from jax.lax.top_k or jnp.argmax over the experts, or clip them to 0 and "
                    "the last one with jnp.clip: a gather takes a number out of range for the last expert, or for NaN, "
                    "and a mixture for no expert.",
                )
            self.result.choices.append((self._operand(index), ()))
            last = self._row_sum() if added else self._contribution()
            if set(order) != (self.tokens | set(last)) - set(added):
                raise Mismatch(f"{DENSE}, and the result has an axis that its terms lack", advice=CHOOSE_FEW)
        except Mismatch as mismatch:
            advice = ONE_NUMBER if not dense and mismatch.advice == CHOOSE_FEW else mismatch.advice
            raise Mismatch(mismatch.reason.replace(DENSE, self.result.what, 1), advice=advice) from None
        self.result.seeds |= self.picking.gathers
        return self._finished()

    def _shared(self) -> frozenset[Atom]:
        """Returns the labels that matrices share with rows."""
        found: frozenset[Atom] = frozenset()
        for side in self.contraction[:2] if self.contraction is not None else ():
            atoms = self.space.atoms(self.space.canonical(side))
            if self.expert <= atoms:
                found |= atoms & self.tokens
        return found

    def _sides(self) -> tuple[Ref, Ref, tuple[Atom, ...], tuple[Atom, ...]] | None:
        """Returns (rows, matrices, inner labels, outer labels) of a product whose rows are added up."""
        assert self.contraction is not None
        space, summed = self.space, set(self.result.summed)
        inner = tuple(x for x in space.resolve([x for _, own in self.contraction[2] for x in own]) if x not in summed)
        for rows, matrices in (self.contraction[:2], self.contraction[1::-1]):
            other, own = (space.atoms(space.canonical(r)) for r in (rows, matrices))
            shared = own & self.rows
            outer = own - set(inner) - self.expert - shared
            if not self.expert <= own or not outer or not inner or not self._are_examples(shared, other, inner):
                continue
            if set(inner) <= own & other and not other - set(inner) - self.rows:
                order = [x for _, atoms in space.view(self.top.view) for x in atoms if x in outer]
                return rows, matrices, inner, tuple(order)
        return None

    def _sum_of_rows(self) -> bool:
        return self._sides() is not None

    def _row_sum(self) -> tuple[Atom, ...]:
        """Adds the steps of rows whose results are then added up; returns the labels of the last step."""
        sides = self._sides()
        assert sides is not None
        node = self.graph.definitions[self.top.value]
        wide = jnp.promote_types(self.graph.dtype(self.top.value), jnp.float32)
        return self._labels(self._emit(*sides, node, wide))
