"""Recognises what ``lax.associative_scan`` and doubling by hand compute by their values: recurrences
``h[t] = a[t] h[t-1] + b[t]``, and products ``p[t] = a[t] p[t-1]``.

To JAX an associative scan is no equation, but some seventeen for each level: slices, products, sums, pads and
concatenations, and as many again in the gradient.  No arrangement of these is matched.  Along one axis they compute
polynomials of their inputs with integer coefficients (``moved_values.py``), and two polynomials that agree at random
points of a large prime field are the same (``scan_proofs.py``; Schwartz and Zippel: for T steps the chance of an error
is below T / 2^31 for each point and each element, and two points are tried).

Autodiff adds up what comes to a value from all that reads it.  So a gradient may begin with what came from elsewhere.

A scan of a and b gives the products of a too.  Where the program reads both results, these are two scans, whose
gradient of a is one sum.  The derivative of ``cumprod`` is that of such products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from autopallas.graph import Graph, Node
from autopallas.graph.body_links import is_at_hand
from autopallas.graph.edit import surviving
from autopallas.graph.loop_slices import uniform
from autopallas.kernels.respelling.associative_scan_spec import Backward, Forward
from autopallas.kernels.respelling.carried_proofs import CarriedProofs
from autopallas.kernels.respelling.lanes import LAYOUTS, Layout
from autopallas.kernels.respelling.moved_values import SHORTEST, SUMS, Leaf, MovedValues, has_interior
from autopallas.kernels.respelling.scan_proofs import Pulled, ScanProofs

__all__ = ["scans_of"]

_REMEMBERED: WeakKeyDictionary[Graph, Mapping[int, Forward | Backward]] = WeakKeyDictionary()


def scans_of(graph: Graph) -> Mapping[int, Forward | Backward]:
    """Returns the scans of a graph, and their gradients, each by the number of its first result."""
    known = _REMEMBERED.get(graph)
    if known is None:
        known = _REMEMBERED[graph] = _found(graph)
    return known


def _found(graph: Graph) -> dict[int, Forward | Backward]:
    along: dict[int, set[int]] = {}  # by how many places something is shifted, by the number of steps
    for node in graph.nodes:
        for by, steps in _shifts(graph, node):
            for size in (steps, steps - by):  # what is taken off again is padded before or after that
                along.setdefault(size, set()).add(by)
    shifted = any(own >= _FIRST_SHIFTS for steps, own in along.items() if steps >= SHORTEST)
    if not shifted and not any(node.name == "pad" and has_interior(node) for node in graph.nodes):
        return {}
    known = _Scans(graph, shifted)
    found: dict[int, Forward | Backward] = {}
    for scan, backwards in _together(known, [(scan, known.backwards(scan)) for scan in known.scans.values()]):
        if all(known.reaches(backward) for backward in backwards):
            found[scan.result] = scan
            found.update((backward.results[0], backward) for backward in backwards)
    return found


_Scan = tuple[Forward, Sequence[Backward]]
_MOST_ROUNDS = 8


def _together(known: _Scans, scans: Sequence[_Scan]) -> list[_Scan]:
    """Returns the scans of whose inner values the program needs none but in these scans.

    Scans of the same decays share the products of these, which the program has once.
    """
    regions_of = {scan.result: known.own([scan.result, *(n for b in own for n in b.results)]) for scan, own in scans}
    left = list(scans)
    for _ in range(_MOST_ROUNDS):
        nodes = set[int]().union(*(regions_of[scan.result][1] for scan, _ in left))
        leaving = known.leaving(set[int]().union(*(regions_of[scan.result][0] for scan, _ in left)), left)
        still = [one for one in left if not known.escapes(regions_of[one[0].result][0], nodes, leaving)]
        if len(still) == len(left):
            return still
        left = still
    return [one for one in left if not known.escapes(*(own := regions_of[one[0].result]), known.leaving(own[0], [one]))]


_FIRST_SHIFTS = frozenset({1, 2, 4})


def _shifts(graph: Graph, node: Node) -> list[tuple[int, int]]:
    """Returns by how many places a node may shift what it is given, filling with one number, and how many steps there
    are then."""
    if node.name == "pad":
        sizes = graph.shape(node.outputs[0])
        config = zip(node.params["padding_config"], sizes, strict=True)
        return [(int(x), steps) for (low, high, _), steps in config for x in (low, high) if int(x) > 0]
    if node.name == "concatenate" and len(node.inputs) == 2:
        axis = int(node.params["dimension"])
        steps = graph.shape(node.outputs[0])[axis]
        return [(graph.shape(n)[axis], steps) for n in node.inputs if uniform(graph, n) is not None]
    return []


class _Scans:
    """The scans of a graph, and the gradients of each.

    Attributes:
      scans: by the result.
      of_given, of_decay: the gradients, by the scan's result and cotangent, and those of the products where a's
        gradient is the sum of both.
    """

    def __init__(self, graph: Graph, shifted: bool):
        self.graph = graph
        self._values = MovedValues(graph, shifted)
        self._alone = ScanProofs(self._values)
        self._proofs = CarriedProofs(self._values, self._alone)
        self.scans: dict[int, Forward] = {}
        self._of_decays: dict[int, list[Forward]] = {}
        self.of_given: dict[Pulled, int] = {}
        self.of_decay: dict[Pulled, int] = {}
        self._of_results: dict[int, tuple[Layout, int | None, Layout]] = {}
        """By the results that are gradients, which of their scan's axes they have, what is added, and its axes."""
        self._alive = surviving(graph)
        for node in graph.nodes:
            axis = self._values.follow(node)
            if axis is None:
                continue
            sums = node.name in SUMS and (shifted or any(self._values.is_padded(n) for n in node.inputs))
            if sums or shifted and node.name == "mul":
                (number,) = node.outputs
                leaves = self._values.leaves_of(number, axis)
                if leaves is not None and self._is_known(number, leaves, axis):
                    self._values.make_input(number)

    def _is_known(self, number: int, leaves: tuple[Leaf, ...], axis: int) -> bool:
        """Returns whether a sum is a scan of its inputs, or a gradient of scans so far, and notes that."""
        by_result = {scan.result: scan for n, _ in leaves for scan in self._of_decays.get(n, ())}
        scans = [scan for _, scan in sorted(by_result.items())]
        outcome = self._proofs.outcome(number, leaves, axis, scans)
        if outcome is None or self._values.region(number) is None:
            return False
        if isinstance(outcome, Forward):
            self.scans[number] = outcome
            self._of_decays.setdefault(outcome.decay, []).append(outcome)
        else:
            (self.of_decay if outcome.of_decay else self.of_given)[outcome.pulled] = number
            self._alone.of_cotangents.update(zip(outcome.pulled, outcome.cotangents, strict=True))
            self._of_results[number] = outcome.result, outcome.added, outcome.beside
        self._values.computed.add((number, axis))
        return True

    def backwards(self, scan: Forward) -> list[Backward]:
        """Returns the gradients of a scan, one pair for each cotangent."""
        alive = surviving(self.graph)
        summed = {pulled[0]: pulled for pulled in self.of_decay if len(pulled) > 1}
        found = []
        for pulled in dict.fromkeys((*self.of_given, *self.of_decay)):
            if pulled[0][0] != scan or len(pulled) > 1 and pulled[:1] in self.of_given:
                continue
            own = summed.get(pulled[0], pulled) if pulled not in self.of_decay else pulled
            products = own[1] if len(own) > 1 else None
            one = Backward(scan, pulled[0][1], False, self.of_given.get(pulled), self.of_decay.get(own), products)
            laid = [self._of_results[n] for n in one.results]
            layouts = tuple(self._alone.of_cotangents[each] for each in own), tuple(layout for layout, _, _ in laid)
            one = replace(one, layouts=layouts, added=tuple((more, layout) for _, more, layout in laid))
            home, body = (self.graph.definitions[n].body for n in (scan.result, one.results[0]))
            at_hand = all(n in alive and is_at_hand(self.graph, n, home, body) for n in one.scanned)
            found.append(replace(one, reads_result=at_hand))
        return found

    def own(self, results: Sequence[int]) -> tuple[set[int], set[int]]:
        """Returns (the values on the way to results, the identities of the nodes that compute all of them)."""
        inside: set[int] = set()
        nodes: set[int] = set()
        for number in results:
            found = self._values.region(number)
            assert found is not None
            inside.update(n for node in found if not self._lays_out(node) for n in node.outputs)
            nodes.update(id(node) for node in found)
        return inside - set(results), nodes

    def _lays_out(self, node: Node) -> bool:
        """Returns whether a node moves the axes of an input, which costs nothing to do once more."""
        return node.name in LAYOUTS and len(node.inputs) == 1 and node.inputs[0] not in self._values.moved

    def leaving(self, inside: set[int], scans: Sequence[_Scan]) -> set[int]:
        """Returns those of some values that leave their body, and that the program needs beside scans and gradients.

        What a loop over layers stacks, and its backward reads step by step, leaves the loop's body too.
        """
        found = inside & self.graph.returned
        if not found or self.graph.has_plain_bodies:
            return found
        reads: dict[int, tuple[int, ...]] = {}
        for scan, backwards in scans:
            reads[scan.result] = scan.inputs
            for one in backwards:
                reads.update(dict.fromkeys(one.results, one.reads))
        return found & surviving(self.graph, reads, reads)

    def escapes(self, inside: set[int], nodes: set[int], leaving: set[int]) -> bool:
        """Returns whether the program needs a value elsewhere than in some nodes; ``leaving`` are those that it needs
        outside of their body."""
        return any(
            n in leaving
            or any(id(user) not in nodes and not self._alive.isdisjoint(user.outputs) for user in self.graph.users[n])
            for n in inside
        )

    def reaches(self, backward: Backward) -> bool:
        """Returns whether the body with the gradients has all that they are computed from, or can be given it."""
        own, body = self.graph.definitions, self.graph.definitions[backward.results[0]].body
        return all(is_at_hand(self.graph, n, own[backward.scan.result].body, body) for n in backward.reads)
