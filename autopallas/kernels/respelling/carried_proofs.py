"""Carries what is proved of the sums of one layer over to those of equal layers, so that a deep model takes no more
proofs than a shallow one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from autopallas.kernels.respelling.associative_scan_spec import Forward
from autopallas.kernels.respelling.moved_values import Leaf, MovedValues
from autopallas.kernels.respelling.scan_proofs import Gradient, ScanProofs

__all__ = ["CarriedProofs"]

_MOST_RELATED = 32
"""Most values by which two sums are compared."""
_Outcome = Forward | Gradient | None


class CarriedProofs:
    """What sums are, proved once for those of the same form whose inputs are related alike."""

    def __init__(self, values: MovedValues, alone: ScanProofs):
        self._values = values
        self._alone = alone
        self._outcomes: dict[Hashable, tuple[_Outcome, tuple[int, ...], Sequence[Forward]]] = {}
        """What sums were found to be, by what tells that: with the values and the scans that this names."""

    def outcome(self, number: int, leaves: tuple[Leaf, ...], axis: int, scans: Sequence[Forward]) -> _Outcome:
        """Returns the scan of its inputs that a sum is, or the gradient of some scans.

        What was found for one sum is taken over by another one of the same form, whose inputs are related alike.
        """
        related = self._related(number, leaves, scans)
        known = None if related is None else self._outcomes.get(related[0])
        if known is None:
            outcome = self._alone.scan(number, leaves, axis) or self._alone.gradient_of(number, leaves, scans)
            if related is not None:
                self._outcomes[related[0]] = outcome, related[1], scans
            return outcome
        assert related is not None
        outcome, there, scans_there = known
        image = dict(zip(there, related[1], strict=True))
        if isinstance(outcome, Forward):
            outcome = outcome.at(image)
        elif outcome is not None:
            outcome = outcome.at(image, dict(zip(scans_there, scans, strict=True)))
        if scans or len(leaves) < 3:
            self._values.taken_over.add(number)
        return outcome

    def _related(
        self, number: int, leaves: tuple[Leaf, ...], scans: Sequence[Forward]
    ) -> tuple[Hashable, tuple[int, ...]] | None:
        """Returns what tells whether a sum is a scan, or a gradient of some scans, and the values that this names by
        their places; None where that is not known."""
        values, of_cotangents = self._values, self._alone.of_cotangents
        form, order = values.forms.get(number), values.inputs[number]
        if form is None or order is None or {*order} != {*leaves}:
            return None
        places = {leaf: i for i, leaf in enumerate(order)}

        def place(leaf: Leaf) -> int:
            return places.setdefault(leaf, len(places))

        said: list[Hashable] = [form, tuple([places[leaf] for leaf in leaves])]
        for scan in scans:
            inputs = [place((n, scan.axis_of(i))) for i, n in enumerate(scan.inputs)]
            result = place((scan.result, scan.axis))
            pulled = [(places[leaf], own) for leaf in leaves if (own := of_cotangents.get((scan, leaf[0]))) is not None]
            said += [tuple(inputs), result, scan.layouts, tuple(pulled)]
        todo = list(places)
        for leaf in todo:
            if leaf not in values.computed:
                said.append((values.graph.shape(leaf[0]), leaf[1]))
                continue
            form, order = values.forms.get(leaf[0]), values.inputs[leaf[0]]
            if form is None or order is None or len(todo) > _MOST_RELATED:
                return None
            todo += [other for other in order if other not in places]
            said.append((form, tuple(map(place, order))))
        numbers = [n for n, _ in places]
        first = {n: i for i, n in reversed([*enumerate(numbers)])}
        return (*said, tuple([first[n] for n in numbers])), (number, *numbers)
