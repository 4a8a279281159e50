"""Finds mixtures in which every expert computes every token: ``out[t] = sum over e of y[t, e]``, mostly zero.

The anchor is the sum over experts. :mod:`autopallas.patterns.mixture_of_experts.readers` reads the terms and proves
that they are zero where an expert was not chosen. The site reaches from there back to values that depend neither on a
choice of experts nor on one of their products: tokens, matrices, and the numbers that routing starts from. So the
routing, its derivative included, is carried along unchanged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autopallas import compat, jaxprs
from autopallas.compat import ClosedJaxpr, JaxprAtom, JaxprEqn, Literal, Var
from autopallas.faults import contained
from autopallas.graph import Body, Graph, Node
from autopallas.graph.body_links import homes_of
from autopallas.graph.edit import surviving
from autopallas.graph.extract import closed, copied, jaxpr_of, nodes_between
from autopallas.graph.proof_cache import ProofCache
from autopallas.kernels.mixture_of_experts.operation import OPERATION
from autopallas.numerics.casts import is_floating, kind_of
from autopallas.patterns.advice import AT_HAND, EXPERTS_APART, SIDE_EFFECTS, WEIGHTS_APART, WHOLE_GRADIENT
from autopallas.patterns.backward import Backward, Lookup
from autopallas.patterns.carry import is_available
from autopallas.patterns.forward import (
    COPIES,
    Dissolved,
    DissolvedApart,
    Forward,
    Merged,
    Rectified,
    RectifiedApart,
    differentiable,
    in_backward,
)
from autopallas.patterns.match import BackwardMatch, Match, Mismatch, NearMiss, bounded
from autopallas.patterns.mixture_of_experts.axes import choice_axes
from autopallas.patterns.mixture_of_experts.candidates import MOVES, PLAIN
from autopallas.patterns.mixture_of_experts.loops import added_on_the_way, even_sums, loop_at, selected_on_the_way
from autopallas.patterns.mixture_of_experts.picks import GATHERED, PICKED
from autopallas.patterns.mixture_of_experts.readers import read
from autopallas.patterns.mixture_of_experts.refusals import DENSE, refuse_compared
from autopallas.patterns.mixture_of_experts.shared_weights import (
    SharedWeights,
    returns_to_choice,
    shared_weights,
    with_chosen,
)
from autopallas.patterns.mixture_of_experts.site import NoMixture, Sites
from autopallas.patterns.mixture_of_experts.slots import DISPATCHED, SCATTERED
from autopallas.patterns.settling import Search, settle

__all__ = ["dense"]

OP = OPERATION.name
_PARTS = 8
"""Most partial sums of a longer sum that are tried, where the longer sum is no site."""
_LAYOUTS = 8
"""Most casts and layouts, one after the other, that are read through."""
_KINDS = (Merged, Forward, Dissolved, Rectified, DissolvedApart, RectifiedApart)
"""Ways in which a backward is looked for, in order."""
_REACHES = {
    DENSE: ("an expert computes for a token that it is not given", "the result"),
    DISPATCHED: ("a token holds", "the others"),
    SCATTERED: ("an expert computes for a slot of which nothing is read", "the gradients"),
}
"""Per kind of mixture, where an infinity may be that the site leaves out, and what it would reach."""


def dense(
    graph: Graph, nodes: Sequence[Node], alive: frozenset[int], assume_finite: bool
) -> tuple[dict[int, Match], dict[int, NearMiss], set[int]]:
    """Finds such mixtures among the nodes that may be their sums.

    Returns:
      The matches and the near misses, by the number of the sum, and the products that the matches compute.
    """
    matches: dict[int, Match] = {}
    drafts: dict[int, Draft] = {}
    misses: dict[int, NearMiss] = {}
    covered: set[int] = set()
    others: ProofCache[_Found | _Refusal | None] = ProofCache(graph, choice_axes(graph))
    sites = Sites(graph)
    within: set[int] = set()
    sums, tried = even_sums(graph), Counter[int]()
    for node in reversed(nodes):  # the whole of a written-out sum comes before its parts
        with contained(node):
            root, location = _result(graph, node, alive), jaxprs.location(node.equation)
            if root in covered or node.name == "select_n" and root in within:
                continue
            if node.name == "add":
                even, first = sums[node.outputs[0]]
                tried[first] += even is not None
                if even is None or tried[first] > _PARTS:
                    continue
            try:
                with bounded(graph):
                    found = _found(graph, node, root, others)
                    if found is None:
                        continue
                    covered.update(added_on_the_way(graph, root))
                    within.update(selected_on_the_way(graph, root))
                    if not assume_finite:
                        what = found.what
                        held, other = _REACHES.get(what, _REACHES[DENSE])
                        raise Mismatch(
                            f"{what}, and assume_finite is off: an inf or NaN that {held} would reach {other}",
                            advice="Leave assume_finite on, if what the experts compute is finite. Or sort the tokens "
                            "by expert and call jax.lax.ragged_dot, which computes what is chosen and nothing else.",
                        )
                    draft = Draft(graph, sites, node, root, *found)
                    match = draft.match()
                    draft.settle(alive)
                if found.what in (GATHERED, PICKED, SCATTERED):
                    covered.update(found.products)
                drafts[root] = draft
                if not draft.escaped:
                    matches[root] = match
                else:
                    misses[root] = NearMiss(OP, location, draft.escaped, root, EXPERTS_APART)
            except NoMixture:
                continue
            except Mismatch as mismatch:
                misses[root] = NearMiss(OP, location, mismatch.reason, root, mismatch.advice)
    with contained():
        holders = {id(equation) for draft in drafts.values() for equation in _holders(graph, draft.body)}
        around = {root: draft for root, draft in drafts.items() if not holders.isdisjoint(draft.equations)}
        alone = {root: match for root, match in matches.items() if root not in around}
        _with_backward(graph, {root: draft for root, draft in drafts.items() if root not in around}, alone, misses)
        for root, draft in around.items():
            if any(draft.holds(match.body) for match in alone.values()):
                misses.pop(root, None)  # it is the site inside, seen from outside
            elif root in matches:
                alone[root] = matches[root]
            else:
                _with_backward(graph, {root: draft}, alone, misses)
        _with_loops_again(graph, drafts, alone)
        _with_backwards_beside(graph, drafts, alone)
        matches = alone
    return matches, misses, {number for root in matches for number in drafts[root].products}


def _holders(graph: Graph, body: Body) -> Iterator[JaxprEqn]:
    """Yields the equations whose bodies hold a body, from inside out."""
    while body in graph.holders:
        body, position = graph.holders[body]
        yield body.equations[position]


_PIECES = COPIES | {"slice", "dynamic_slice"}
"""Equations that give a part of an array, or all of it otherwise."""


class _Found(NamedTuple):
    """The parts of a sum over experts that :class:`Draft` keeps."""

    seeds: set[int]
    products: set[int]
    kept: set[int]
    loops: bool
    what: str

    def at(self, image: Mapping[int, int]) -> _Found:
        """Returns the same parts with corresponding values."""
        seeds, products, kept = ({image[number] for number in own} for own in self[:3])
        return _Found(seeds, products, kept, self.loops, self.what)


class _Refusal(NamedTuple):
    """Reason why a sum over experts cannot be taken apart, and advice on what to write instead."""

    reason: str
    advice: str


def _result(graph: Graph, node: Node, alive: frozenset[int]) -> int:
    """Returns the result of a sum; for a loop, what it adds up rather than what it counts."""
    floating = [n for n in node.outputs if n in alive and is_floating(graph.dtype(n))]
    return floating[0] if floating else next(iter(node.outputs), -1)


def _found(graph: Graph, node: Node, root: int, others: ProofCache[_Found | _Refusal | None]) -> _Found | None:
    """Reads a sum over experts; returns None for another sum."""
    loop = loop_at(graph, root)
    if loop is not None:
        choices = loop.choices(graph, root)
        if node.name == "gather":
            return _Found(loop.visited, loop.products, set(), True, PICKED)
        if choices or loop.compares:
            return _Found(loop.visited | choices, loop.products, set(), True, DENSE)
        refuse_compared(graph, loop.visited.union(*(leaf.numbers for leaf in loop.leaves)))
    if node.name in ("add", "select_n"):
        return None
    outcome, image = next(others.like(node, None), (None, None))
    if image is None:
        outcome = others.prove(node, None, lambda watched: _read(watched, root))
    elif isinstance(outcome, _Found):
        outcome = outcome.at(image)
    if isinstance(outcome, _Refusal):
        raise Mismatch(outcome.reason, advice=outcome.advice)
    return outcome


def _read(graph: Graph, root: int) -> _Found | _Refusal | None:
    """Reads a sum over experts; returns a refusal where it cannot be taken apart."""
    try:
        reading = read(graph, root)
    except Mismatch as mismatch:
        return _Refusal(mismatch.reason, mismatch.advice)
    if reading is None:
        return None
    what = reading.what if reading.slots is None else DISPATCHED
    return _Found(reading.seeds, reading.products, reading.kept, False, what)


def _with_backward(
    graph: Graph, drafts: dict[int, Draft], matches: dict[int, Match], misses: dict[int, NearMiss]
) -> None:
    """Settles the sites whose products are used elsewhere: by their own backward, or the site is a near miss.

    A program adds up the cotangents of a value that is read in several places. The sum is looked for first, then each
    cotangent by itself, in case something else is added in between.
    """
    for root, mismatch in _settled(graph, drafts, matches).items():
        misses[root] = replace(misses[root], reason=mismatch.reason, advice=mismatch.advice)
    apart: dict[int, Draft] = {}
    for root, draft in drafts.items():
        if root not in matches:
            with contained(draft.root), suppress(Mismatch), bounded(graph):
                if draft.find_shared_weights():
                    apart[root] = draft
    _settled(graph, apart, matches)  # or the reason stays that of the whole


def _settled(graph: Graph, drafts: dict[int, Draft], matches: dict[int, Match]) -> dict[int, Mismatch]:
    """Adds the sites of which a program has the whole backward; returns why the others are none."""
    lookup = Lookup.of(graph) if drafts else None
    refused: dict[int, Mismatch] = {}
    for kind in _KINDS:
        waiting = {root: draft for root, draft in drafts.items() if root not in matches}
        searches: dict[int, _Search] = {}
        for root, draft in waiting.items():
            with contained(draft.root), suppress(Mismatch), bounded(graph):
                if (search := draft.search(kind)) is not None:
                    searches[root] = search
        if not searches or lookup is None:
            continue
        given = {number for match in matches.values() for number in match.replaced}
        complete = settle(graph, lookup, list(searches.values()), given)
        for root, search in searches.items():
            with contained(drafts[root].root):
                try:
                    if search not in complete:
                        raise drafts[root].without_backward()
                    with bounded(graph):
                        matches[root] = drafts[root].match_with(search)
                except Mismatch as mismatch:
                    refused[root] = mismatch
    return refused


def _with_loops_again(graph: Graph, drafts: dict[int, Draft], matches: dict[int, Match]) -> None:
    """Adds the backwards of loops none of whose values is used elsewhere: a checkpoint has recomputed such a loop.

    They are added only where the backward loops are then gone; otherwise the forward alone is the site.
    """
    again = {root: draft for root, draft in drafts.items() if draft.loops and root in matches and not draft.escaped}
    if not again or not any(body.transposed or "checkpoint" in body.path for body in graph.numbers):
        return
    lookup = Lookup.of(graph)
    for kind in _KINDS:
        for root, draft in again.items():
            if matches[root].backwards:
                continue
            with contained(draft.root), suppress(Mismatch), bounded(graph):
                search = draft.search(kind)
                given = {number for match in matches.values() for number in match.replaced}
                if search is None or search not in settle(graph, lookup, [search], given) or not search.found:
                    continue
                still = surviving(graph, given | search.replaced())
                ends = {levels[0].cotangent for b in search.found for levels in b.levels.values()}
                loops = [node for n in ends if (node := graph.definitions.get(n)) is not None and node.name == "scan"]
                left = {n for node in loops for n in node.outputs if is_floating(graph.dtype(n))}
                if loops and not (left - ends) & still:
                    matches[root] = draft.match_with(search)


def _with_backwards_beside(graph: Graph, drafts: dict[int, Draft], matches: dict[int, Match]) -> None:
    """Adds the backwards of sites none of whose products is used elsewhere, such as experts of one product each without
    weights: the derivative of a product reads its operands alone.

    They are added where all gradients are found but those of the program's own arguments and of captured arrays,
    which it may not ask for, and where no gathered matrices are left; otherwise the forward alone is the site.
    """
    beside = {root: draft for root, draft in drafts.items() if root in matches and not draft.escaped}
    beside = {root: draft for root, draft in beside.items() if not (draft.loops and draft.root.name == "scan")}
    if not beside or not any(compat.is_transposed(node.equation) for node in graph.nodes):
        return
    lookup = Lookup.of(graph)
    arguments = {graph.numbers[graph.root][v] for v in graph.root.invars} | graph.constants.keys()
    for kind in _KINDS:
        searches: dict[int, _Search] = {}
        for root, draft in beside.items():
            with contained(draft.root), suppress(Mismatch), bounded(graph):
                if not matches[root].backwards and (search := draft.search(kind)) is not None:
                    searches[root] = search
        if not searches:
            continue
        given = {number for match in matches.values() for number in match.replaced}
        complete = settle(graph, lookup, list(searches.values()), given)
        still = surviving(graph, given.union(*(search.replaced() for search in complete)))
        for root, search in searches.items():
            found = {use for backward in search.found for use in backward.levels}
            uses = search.forward.uses
            missing = [i for i in search.roles if i not in found and uses[i].number not in arguments]
            matrices = (n for n in search.forward.own & still if graph.name(n) == "gather")
            if search not in complete or not found or missing or any(len(graph.shape(n)) > 2 for n in matrices):
                continue
            with contained(drafts[root].root), suppress(Mismatch), bounded(graph):
                matches[root] = drafts[root].match_with(search)


def _constants(graph: Graph) -> Sequence[Hashable]:
    """Returns, per value, whether it is made of literals and positions alone."""
    if "constant" not in graph.notes:
        found = bytearray(len(graph.avals))
        for number in graph.literals:
            found[number] = True
        for node in graph.nodes:
            plain = (node.name in PLAIN or node.name == "iota") and not node.equation.effects
            if plain and all(found[i] for i in node.inputs):
                for output in node.outputs:
                    found[output] = True
        graph.notes["constant"] = found
    return graph.notes["constant"]


class _Search(Search):
    """A search that requires only the values computed from the experts' products to be gone; the routing may be read
    on."""

    products: frozenset[int] = frozenset()

    def inner(self) -> set[int]:
        return {n for n in super().inner() if n in self.products}


@dataclass
class Draft:
    """A sum over experts that may turn out to be a site."""

    graph: Graph
    sites: Sites
    root: Node
    number: int
    """Number of the value that the sum gives."""
    seeds: set[int]
    products: set[int]
    kept: set[int]
    """Further values that belong to it, though others may read them too."""
    loops: bool = False
    """Whether the experts are written out one after the other."""
    what: str = DENSE
    """What the program does, in words."""
    escaped: str = ""
    handed: bool = False
    """Whether it reads the values that its body is handed, and not those that they are computed from elsewhere."""
    equations: set[int] = field(default_factory=set)
    """Its equations, by identity."""
    shared: Sequence[SharedWeights] = ()
    """Weights that it reads as operands, since something else reads them too."""
    _depends: dict[bool, dict[int, bool]] = field(default_factory=lambda: {False: {}, True: {}})

    @property
    def body(self) -> Body:
        return self.root.body

    # ------------------------------------------------------------------ what belongs to it

    def depends(self, number: int, on_products: bool = False) -> bool:
        """Returns whether a value is computed from the choices or products; with ``on_products``, from the products
        alone."""
        seeds, known = (self.products if on_products else self.seeds), self._depends[on_products]
        first = min(seeds, default=number)
        todo = [number]
        while todo:
            value = todo[-1]
            node = self.graph.definitions.get(value)
            if value not in known and (value in seeds or node is None or value < first):
                known[value] = value in seeds
            elif value not in known and node is not None:
                waiting = [i for i in node.inputs if i not in known]
                if waiting:
                    todo += waiting
                    continue
                self.graph.steps.spend()
                known[value] = any(known[i] for i in node.inputs)
            todo.pop()
        return known[number]

    def inside(self, number: int) -> bool:
        """Returns whether a value on the way to the sum belongs to it: it depends on the choices, is made of literals
        and positions, or only repeats something smaller."""
        if any(number == weights.number for weights in self.shared):
            return False
        return self._belongs(number)

    def _belongs(self, number: int) -> bool:
        """Returns whether a value is inside, or one of the weights that it shares, or belongs to what these are made
        of."""
        graph = self.graph
        if self.handed and graph.positions[self.body].get(number, (0,))[0] < 0 and not self._constant(number):
            return False
        if number == self.number or self._keeps(number) or self.depends(number):
            return True
        node = graph.definitions.get(number)
        if node is None or node.equation.effects:
            return False
        if self._constant(number):
            return True
        if kind_of(graph.dtype(number)) in "iub" and node.name in PLAIN:
            return any(self._constant(i) for i in node.inputs)  # positions and choices on their way to indices
        size = math.prod(graph.shape(number))
        return node.name == "broadcast_in_dim" and size > math.prod(graph.shape(node.inputs[0]))

    def _keeps(self, number: int) -> bool:
        """Returns whether a value belongs to the sum although it, or the value it is a layout of, is computed before
        the choices."""
        for _ in range(_LAYOUTS):
            node = self.graph.definitions.get(number)
            if number in self.kept or node is None or node.name not in MOVES:
                break
            number = node.inputs[0]
        return number in self.kept

    def _constant(self, number: int) -> bool:
        """Returns whether a value is made of literals and positions alone."""
        return bool(_constants(self.graph)[number])

    def _parts(self) -> tuple[list[Node], list[int]]:
        """Returns the nodes inside, in order, and the values that they read."""
        graph = self.graph
        found: dict[int, Node] = {}
        operands: dict[int, None] = {}
        todo = [self.number]
        while todo:
            number = todo.pop()
            graph.steps.spend()
            if number in found or number in graph.literals:
                continue
            if self.inside(number):
                node = graph.definitions[number]
                found.update((output, node) for output in node.outputs if graph.definitions.get(output) is node)
                todo += node.inputs
            else:
                operands[number] = None
        return list({id(node): node for _, node in sorted(found.items())}.values()), list(operands)

    def holds(self, body: Body) -> bool:
        """Returns whether a body is below one of the draft's equations."""
        return any(id(equation) in self.equations for equation in _holders(self.graph, body))

    def settle(self, alive: frozenset[int]) -> None:
        """Finds out where else a value computed from the experts' products is used."""
        graph = self.graph
        nodes, _ = self._parts()
        inside = self.equations = {id(node.equation) for node in nodes}

        def belongs(user: Node) -> bool:
            """Returns whether a node is one of these, or stands in the body of one."""
            return id(user.equation) in inside or self.holds(user.body)

        for node in nodes:
            if node.equation.effects:
                raise Mismatch(f"{self.what}, and the equations have side effects", advice=SIDE_EFFECTS)
            for number in node.outputs:
                if number == self.number or number not in alive or not self.depends(number, on_products=True):
                    continue
                if number in graph.returned:
                    self.escaped = f"{self.what}, and what they compute is also returned"
                    return
                users = (u for u in graph.users[number] if not alive.isdisjoint(u.outputs) or u.equation.effects)
                other = next((u for u in users if not belongs(u)), None)
                if other is not None:
                    where = jaxprs.location(other.equation)
                    self.escaped = f"{self.what}, and what they compute is also used by {other.name} at {where}"
                    return

    def without_backward(self) -> Mismatch:
        """Returns why only a part of the backward was recognised: what else reads the weights of all experts adds its
        own gradient to theirs before that comes back to the choice."""
        for node in self._parts()[0]:
            for number in node.outputs:
                if self._weighs(number) and not self._is_given(number):
                    for user in self._other_readers(number):
                        where = jaxprs.location(user.equation)
                        reason = f"{self.what}, and the weights of all experts are also used by {user.name} at {where}"
                        return Mismatch(f"{reason}, whose gradient is added to theirs", advice=WEIGHTS_APART)
        return Mismatch(f"only a part of its backward was recognised; {self.escaped}", advice=EXPERTS_APART)

    def _weighs(self, number: int) -> bool:
        """Returns whether a value is a number that is made by the choice, and not of what experts compute."""
        floating = is_floating(self.graph.dtype(number))
        return floating and self.depends(number) and not self.depends(number, on_products=True)

    def _other_readers(self, number: int) -> Iterator[Node]:
        """Yields what reads a value and is neither a part of the site nor of a backward."""
        alive = surviving(self.graph)
        for user in self.graph.users[number] if number in alive else ():
            outside = id(user.equation) not in self.equations and not self.holds(user.body)
            if outside and not in_backward(user) and not alive.isdisjoint(user.outputs):
                yield user

    def _is_shared(self, number: int) -> bool:
        """Returns whether something else reads a value too, or a layout of it."""
        todo = [number]
        while todo:
            number = todo.pop()
            self.graph.steps.spend()
            if any(True for _ in self._other_readers(number)):
                return True
            todo += [user.outputs[0] for user in self.graph.users[number] if user.name in MOVES]
        return False

    def find_shared_weights(self) -> bool:
        """Makes operands of the weights that something else reads too; returns whether there are any."""
        if self.loops:
            return False
        self.shared = shared_weights(self.graph, self.number, self._weighs, self._is_shared)
        return bool(self.shared)

    def _is_given(self, number: int) -> bool:
        """Returns whether a value is a part of an argument, such as the matrix of one expert."""
        node = self.graph.definitions.get(number)
        while node is not None and node.name in _PIECES:
            self.graph.steps.spend()
            node = self.graph.definitions.get(node.inputs[0])
        return node is None

    # ------------------------------------------------------------------ sites

    def match(self) -> Match:
        """Builds the site whose values are used nowhere else."""
        graph = self.graph
        known = graph.positions[self.body]
        for self.handed in (False, True):
            nodes, operands = self._parts()
            if all(n in known and known[n][0] < known[self.number][0] for n in operands):
                break
        else:
            raise Mismatch(f"{self.what}, and an operand is not at hand where they are summed", advice=AT_HAND)
        original = jaxpr_of(graph, nodes, operands, [self.number])
        return self._match(operands, original, original, nodes)

    def _match(
        self,
        operands: Sequence[int],
        original: ClosedJaxpr,
        readable: ClosedJaxpr,
        nodes: Sequence[Node] = (),
        backwards: tuple[BackwardMatch, ...] = (),
    ) -> Match:
        return Match(
            op=OP,
            site=self.sites.of(readable, self.loops, operands),
            direction="forward+backward" if backwards else "forward",
            operands=tuple(operands),
            results=(self.number,),
            equations=tuple(nodes),
            original=original,
            body=self.body,
            location=jaxprs.location(self.root.equation),
            backwards=backwards,
        )

    def search(self, kind: type[Forward]) -> _Search | None:
        """Returns what to look for as this site's backward; None if the site spans several bodies."""
        known = self.graph.positions[self.body]

        def inside(number: int) -> bool:
            """Returns whether a value is inside, unless it is made of positions that were moved out of a loop."""
            return self.inside(number) and not (self._constant(number) and known.get(number, (-1,))[0] < 0)

        calls = frozenset({"scan"}) if self.loops else frozenset()
        forward = kind(self.graph, self.body, self.number, inside, calls)
        if not forward.complete or isinstance(forward, (Rectified, RectifiedApart)) and not forward.differs:
            return None
        wanted = [i for i, u in enumerate(forward.uses) if differentiable(u) and not self._constant(u.number)]
        search = _Search(forward, wanted[::-1], [], by_example=kind is Merged)
        search.products = frozenset(n for n in forward.own if self.depends(n, on_products=True))
        return search

    def match_with(self, search: Search) -> Match:
        """Builds the site together with the backwards that were found for it.

        Raises:
          Mismatch: values that it reads are not available where its backward stands.
        """
        forward, graph = search.forward, self.graph
        constant = [self._constant(use.number) for use in forward.uses]  # the site recomputes these itself
        places = {i: k for k, i in enumerate(i for i, own in enumerate(constant) if not own)}
        backwards = []
        for backward in search.found:
            body = self._home(backward)
            if not all(is_available(graph, forward.uses[i].number, (self.body,), body, across=True) for i in places):
                raise Mismatch("the backward lacks an operand where it stands", advice=WHOLE_GRADIENT)
            gradients = tuple((places[use], levels[0].cotangent) for use, levels in backward.levels.items())
            if backward.spread:
                raise Mismatch(
                    f"{self.what}, and each example of a vmap has gradients of its own of what all of them read",
                    advice=WHOLE_GRADIENT,
                )
            moved = tuple((backward.levels[use][0].cotangent, order) for use, order in backward.moved.items())
            backwards.append(BackwardMatch(body, backward.cotangent, gradients, backward.mapped, moved=moved))
        if not backwards:
            raise Mismatch("the backward was not recognised", advice=WHOLE_GRADIENT)
        inputs = [Var(use.variable.aval) for use in forward.uses]
        shared: dict[int, Var] = {}
        made: dict[int, Var] = {}
        equations: list[JaxprEqn] = []
        given: list[JaxprAtom] = []
        for use, variable, own in zip(forward.uses, inputs, constant, strict=True):
            # Each use with a gradient is an operand of its own; uses without one, as of the choices, share a variable.
            if own:
                if use.number not in made and use.number not in graph.literals:
                    nodes, _ = nodes_between(graph, tuple(made), [use.number])
                    equations += copied(graph, nodes, made)
                literal = graph.literals.get(use.number)
                given.append(made[use.number] if literal is None else Literal(literal, use.variable.aval))
            else:
                given.append(variable if differentiable(use) else shared.setdefault(use.number, variable))
        read = [inputs[i] for i in places]
        original = closed(read, [forward.root], [*equations, *forward.over(given)])
        operands = [forward.uses[i].number for i in places]
        if self.shared:
            self._check_shared(search)
            operands, original = with_chosen(graph, original, operands, self.shared)
            for number in operands[len(places) :]:
                here = number in graph.positions[self.body]
                if not here or not all(is_available(graph, number, (self.body,), b.body, True) for b in backwards):
                    raise Mismatch("the backward lacks the choice of experts where it stands", advice=WHOLE_GRADIENT)
        return self._match(operands, original, original, (), tuple(backwards))

    def _check_shared(self, search: Search) -> None:
        """Requires that the gradients of shared weights go on to what these are made of, and nowhere else."""
        graph, lookup, numbers = self.graph, Lookup.of(self.graph), {weights.number for weights in self.shared}
        for backward in search.found:
            for use, (level, *_) in backward.levels.items():
                number = search.forward.uses[use].number
                if number not in numbers:
                    continue
                if not returns_to_choice(graph, lookup, self.body, number, level.cotangent, self._belongs):
                    reason = f"{self.what}, and more than their choice reads the gradient of their weights"
                    raise Mismatch(reason, advice=WEIGHTS_APART)

    def _home(self, backward: Backward) -> Body:
        """Returns the body that computes the cotangents."""
        homes = homes_of(self.graph, backward.cotangent, backward.gradients)
        if homes:
            return homes[0]
        raise Mismatch("the backward is spread over several bodies", advice=WHOLE_GRADIENT)
