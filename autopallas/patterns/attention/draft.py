"""Turns a proved attention into a match: alone, or with the backwards that the program holds for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import jax.numpy as jnp

from autopallas import jaxprs
from autopallas.compat import ClosedJaxpr, JaxprAtom, Literal, Var
from autopallas.graph import Body, Graph, Node, Ref, Space
from autopallas.graph.body_links import homes_of
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.graph.extract import closed, copied, jaxpr_of, nodes_between
from autopallas.graph.labels import Atom
from autopallas.kernels.attention.site import AttentionSite
from autopallas.kernels.attention.sum_site import AttentionSum
from autopallas.patterns.advice import AT_HAND, QUERIES_ONCE, SIDE_EFFECTS, SIDE_INPUT_ONCE, WHOLE_GRADIENT
from autopallas.patterns.attention.score_terms import Product
from autopallas.patterns.attention.site import ProvedAttention
from autopallas.patterns.backward import Backward, Level
from autopallas.patterns.carry import fewest_side_elements, is_available, not_passed_in
from autopallas.patterns.derivatives import DERIVATIVES, further_derivative
from autopallas.patterns.expressions import computed_from
from autopallas.patterns.forward import LAYOUT, Forward, differentiable
from autopallas.patterns.match import BackwardMatch, Match, Mismatch, refuse_quantised
from autopallas.patterns.settling import Search

__all__ = ["AttentionDraft", "Escape", "Proved", "axes_of", "escape_of", "match_of", "original_of"]


_PROBABILITIES = (
    "scores or probabilities",
    "Return or log the probabilities from a separate function, called only where they are needed; a train step that "
    "needs them has to store them.",
)
_ROW_STATISTICS = (
    "row statistics",
    "Compute the maximum, the sum or the logsumexp of the scores in a separate function, called only where they are "
    "needed: the kernel gives the result of the attention alone.",
)


class Escape(Mismatch):
    """Reports that an intermediate value of a proved site is used outside it."""


def escape_of(graph: Graph, number: int, rows: int, user: Node | None = None, own: Iterable[Node] = ()) -> Escape:
    """Returns the report of a value of the equations ``own`` that ``user`` uses, or that the program returns.

    A value with no more elements than there are ``rows`` is a statistic of these.
    """
    what, advice = _ROW_STATISTICS if math.prod(graph.shape(number)) <= rows else _PROBABILITIES
    where = "returned" if user is None else f"used by {user.name} at {jaxprs.location(user.equation)}"
    if user is not None and (derivative := further_derivative(graph, user, own)) is not None:
        return Escape(f"the {what} are also {where}, in {derivative}", advice=DERIVATIVES)
    return Escape(f"the {what} are also {where}", advice=advice)


@dataclass(frozen=True, slots=True, eq=False)
class Proved:
    """Result of a proof about an attention, whatever surrounds it.

    Attributes:
      site: its description, without the types of its operands.
      operands: numbers of the values that the site reads.
      root: the number of its result.
      score: the number of its scores.
      further: the numbers of the scores of further blocks of keys.
      axes: the axes of the scores along which keys run.
      keys: the number of keys.
      assumptions: what the proof assumes about the scores.
    """

    site: AttentionSite | AttentionSum
    operands: tuple[int, ...]
    root: int
    score: int
    axes: tuple[int, ...]
    keys: int
    assumptions: tuple[str, ...] = ()
    further: tuple[int, ...] = ()

    def at(self, image: Mapping[int, int]) -> Proved:
        """Returns the same result with corresponding values."""
        operands = tuple(image[number] for number in self.operands)
        further = tuple(image[number] for number in self.further)
        return replace(self, operands=operands, root=image[self.root], score=image[self.score], further=further)


def axes_of(space: Space, score: Ref, labels: Sequence[Atom]) -> tuple[int, ...]:
    """Returns the axes of scores that run over some of the labels."""
    wanted = set(space.resolve(labels))
    return tuple(
        axis for axis, (_, atoms) in enumerate(space.view(score.view)) if not wanted.isdisjoint(space.resolve(atoms))
    )


def match_of(graph: Graph, proved: Proved, second: Node, alive: Set[int]) -> Match:
    """Builds the site in its forward direction; ``second`` is the contraction of probabilities and values.

    Raises:
      Escape: an intermediate value is used elsewhere.
    """
    root, body = proved.root, graph.definitions[proved.root].body
    if root not in alive:
        raise Escape("only its derivative is used", advice=WHOLE_GRADIENT)
    nodes, free = nodes_between(graph, proved.operands, [root])
    _refuse_escapes(graph, proved, nodes, alive)
    known = graph.positions[body]
    for number in free:  # values that cancel in the proof, but not in the original equations
        if number not in known:
            raise not_passed_in(graph, number, [body])
    operands = (*proved.operands, *free)
    for number in operands:
        if known[number][0] >= known[root][0]:
            raise Mismatch(
                "an operand is at hand only after the place where the result is computed", number, advice=AT_HAND
            )
    refuse_quantised(graph, operands)
    if any(n.equation.effects for n in nodes):
        raise Mismatch("the equations have side effects", advice=SIDE_EFFECTS)
    return Match(
        op="attention",
        site=replace(proved.site, types=tuple(graph.dtype(number) for number in operands)),
        direction="forward",
        operands=operands,
        results=(root,),
        equations=tuple(nodes),
        original=jaxpr_of(graph, nodes, operands, [root]),
        body=body,
        location=jaxprs.location(second.equation),
        assumptions=proved.assumptions,
    )


def _refuse_escapes(graph: Graph, proved: Proved, nodes: Sequence[Node], alive: Set[int]) -> None:
    """Refuses a site with an intermediate value that is used elsewhere."""
    inside = {id(n) for n in nodes}
    rows = math.prod(graph.shape(proved.score)) // proved.keys
    scores = dict.fromkeys((proved.score, *proved.further), True)
    for n in nodes:
        for number in n.outputs:
            if number == proved.root or number not in alive:
                continue
            if not computed_from(graph, number, scores, min(proved.score, *proved.further, proved.score)):
                continue
            if number in graph.returned:
                raise escape_of(graph, number, rows)
            users = (u for u in graph.users[number] if not alive.isdisjoint(u.outputs) or u.equation.effects)
            other = next((u for u in users if id(u) not in inside), None)
            if other is not None:
                raise escape_of(graph, number, rows, other, nodes)


class AttentionDraft(ProvedAttention):
    """A proved attention whose surroundings are still to be examined.

    Attributes:
      searched: what was looked for as its backward, then what instead of that, without what is found.
      matched: the forward and the backwards that were found, and the match that was made of them.
    """

    searched: tuple[Search, ...] = ()
    matched: tuple[Forward, tuple[Backward, ...], Match] | None = None

    @property
    def proved(self) -> Proved:
        site, carrier = self.assembled
        keys = self.space.extent(self.key_axis)
        axes = axes_of(self.space, self.score, self.key_axis)
        return Proved(site, tuple(carrier.operands), self.root, self.score.value, axes, keys, self.assumptions)

    def go_on(self, graph: Graph) -> None:
        """Asks ``graph`` from now on, instead of a graph that notes what is asked."""
        self.scope.go_on(graph)

    def place(self, role: int) -> int:
        """Returns the position of a role's operand among the operands."""
        return role

    # ------------------------------------------------------------------ the backward

    def search(self) -> Search | None:
        """Returns what to look for as this site's backward; None if the site spans several bodies."""
        search = self._search(())
        if self.terms and search is not None:
            search = self._search(self.terms, search) or search
        chain = [search]
        while (last := chain[-1]) is not None:
            chain.append(last.instead)
        self.searched = tuple(replace(one) for one in chain if one is not None)
        return search

    def _search(self, terms: tuple[Product, ...], instead: Search | None = None) -> Search | None:
        """Does what :meth:`search` does, with some of the further products as parts of the scores."""
        products = self._products(terms)
        added = {term.ref.value: True for term in terms}

        def within(number: int) -> bool:
            """Returns whether a value is one of the products whose sum the scores are, or is computed from them."""
            if added and computed_from(self.graph, number, added, min(added)):
                return True
            return self.scope.depends(number) or number in products

        plain = Forward(self.graph, self.body, self.root, within)
        if not plain.complete:
            return None
        roles = self._uses(plain)
        if roles is None:
            return None
        wide = self._computed_sides(plain, roles)
        forwards = [plain]
        if wide:  # better: these, and gradients of what they are computed from, are computed tile by tile
            forwards.insert(0, Forward(self.graph, self.body, self.root, lambda n: within(n) or n in wide))
        search = instead
        for forward in reversed(forwards):
            roles = self._uses(forward)
            assert roles is not None
            query, key, value, *others_of_terms = roles
            wanted = [i for i in (value, query, key, *others_of_terms) if differentiable(forward.uses[i])]
            others = [i for i, use in enumerate(forward.uses) if i not in roles and differentiable(use)]
            search = Search(forward, wanted, others, instead=search)
        return search

    def _computed_sides(self, forward: Forward, roles: Sequence[int]) -> set[int]:
        """Finds side inputs as large as a tile of all scores that are computed elementwise from smaller values.

        Returns:
          These values, and the values on the way from the smaller ones.
        """
        graph, body = self.graph, self.body
        tile = math.prod(graph.shape(self.score.value)[-2:])

        def values(variable: Var) -> set[int] | None:
            """Returns the values from smaller ones to this one; None if it comes from one as large."""
            aval = variable.aval
            if math.prod(aval.shape) < tile or not jnp.issubdtype(aval.dtype, jnp.floating):
                return set()
            position = body.defined.get(variable)
            equation = None if position is None or position in body.children else body.equations[position]
            if equation is None or not (equation.primitive.name in ELEMENTWISE or equation.primitive.name in LAYOUT):
                return None
            found = {graph.numbers[body][variable]}
            for atom in equation.invars:
                inner = values(atom) if isinstance(atom, Var) else set()
                if inner is None:
                    return None
                found |= inner
            return found

        sides = (use for i, use in enumerate(forward.uses) if i not in roles and differentiable(use))
        return set().union(*(values(use.variable) or () for use in sides))

    def _products(self, terms: Sequence[Product]) -> set[int]:
        """Returns the values between product and sum, where scores are written as a sum over a product."""
        found: set[int] = set()
        for score in (self.score, *(term.ref for term in terms)):
            found.update(self._multiplied(score.value)[:-1])
        return found

    def _multiplied(self, score: int) -> list[int]:
        """Returns the value that multiplies queries and keys, then those that follow it, up to the scores."""
        found = [score]
        while self.graph.name(found[0]) in ("reduce_sum", "convert_element_type"):
            found.insert(0, self.graph.definitions[found[0]].inputs[0])
        return found

    def _uses(self, forward: Forward) -> tuple[int, ...] | None:
        """Returns the positions of queries, keys and values among the uses of the forward, and of further queries and
        keys."""
        graph = self.graph
        second = self.second.outputs[0]
        if self.second.name == "reduce_sum":
            while graph.name(second) in ("reduce_sum", "convert_element_type"):
                second = graph.definitions[second].inputs[0]
        numbers = graph.numbers[self.body]

        def use(value: int, position: int) -> int | None:
            found = [
                i
                for i, u in enumerate(forward.uses)
                if u.position == position and numbers[forward.equations[u.equation].outvars[0]] == value
            ]
            if len(found) > 1:  # one of which may stand behind a stopped gradient, as in a maximum
                found = [i for i in found if forward.uses[i].equation in forward.differentiated]
            return found[0] if len(found) == 1 else None  # of a product that is read twice, the gradient comes in parts

        found = [use(second, 1 - self.side)]
        for score, query_first, _, _ in self.products[: 1 + len(self._terms_of(forward))]:
            first, query_position = self._multiplied(score.value)[0], 0 if query_first else 1
            found += [use(first, query_position), use(first, 1 - query_position)]
        value, query, key, *others = found
        roles = [i for i in (query, key, value, *others) if i is not None]
        return tuple(roles) if len(roles) == len(found) else None

    def _terms_of(self, forward: Forward) -> tuple[Product, ...]:
        """Returns the further products that are inside of a forward."""
        return self.terms if all(term.ref.value in forward.own for term in self.terms) else ()

    def match_with(self, search: Search) -> Match:
        """Builds the site together with the backwards that were found for it.

        Raises:
          Mismatch: values that the site reads are not available where its backward stands.
        """
        tile = math.prod(self.graph.shape(self.score.value)[-2:])
        nearest: set[int] = set()
        while True:
            try:
                match = fewest_side_elements(self.graph, lambda across: self._joined(search, across, nearest), tile)
                break
            except _ReadInAnotherWay as mismatch:
                if mismatch.operand is None or mismatch.operand in nearest:
                    raise
                nearest.add(mismatch.operand)
        self.matched = search.forward, tuple(search.found), match
        return match

    def _homes(self, backward: Backward) -> list[Body]:
        """Returns the bodies that compute the cotangents."""
        homes = homes_of(self.graph, backward.cotangent, backward.gradients)
        if not homes:
            raise Mismatch("the backward is spread over several bodies", advice=WHOLE_GRADIENT)
        return homes

    def _joined(self, search: Search, across: bool, passed: Set[int]) -> Match:
        """Builds that match; with ``across``, operands may be brought from the forward's loop into the backward's.

        Operands in ``passed`` are not read themselves, but what is made of them by layout.
        """
        graph, forward = self.graph, search.forward
        roles = self.role_uses(forward)
        every = [use for uses in roles for use in uses]
        pairs = [(backward, body) for backward in search.found for body in self._homes(backward)]
        levels = self._levels(search, pairs, across, passed)
        pins = _pins(search, levels)
        self.terms = self._terms_of(forward)
        sides = [pin for use, pin in pins.items() if use not in every]
        pinned_roles = _pinned_roles(roles, pins, search.found)
        for number in sides:
            if sides.count(number) > 1:
                raise Mismatch("a side input with a gradient is read in two places", number, advice=SIDE_INPUT_ONCE)
        for backward in search.found:
            lacking = [forward.uses[use].number for use in backward.lacking.difference(every)]
            self._check_lacking(lacking, frozenset(pins[use] for use in backward.levels if use not in every))
        site, carrier = self.assemble(pinned_roles, frozenset(sides), tuple(body for _, body in pairs), across)
        carried = {number: carrier.roles + i for i, number in enumerate(carrier.operands[carrier.roles :])}
        # The cotangent of a constant, such as the zeros of a fill, is nobody's gradient: if it is read, it stays.
        idle = {n for n in sides if n not in carried and self.scope.number(self.space.full(n)) is not None}
        pins = {use: pin for use, pin in pins.items() if pin not in idle}
        for number in sides:
            if number not in carried and number not in idle:
                reason = "a side input with a gradient is not read by the site as it is read by the backward"
                raise _ReadInAnotherWay(reason, number, advice=SIDE_INPUT_ONCE)
        positions = {use: carried[pins[use]] for use in pins if use not in every}
        positions |= {use: self.place(role) for role, uses in enumerate(roles) for use in uses if use in pins}
        places = [self.place(role) for role in range(len(roles))]
        original = original_of(
            graph, self.body, forward, roles, places, carrier.operands, carrier.roles, carrier.further
        )
        operands = tuple(carrier.operands)
        refuse_quantised(graph, operands)
        return Match(
            op="attention",
            site=replace(site, types=tuple(graph.dtype(number) for number in operands)),
            direction="forward+backward" if pairs else "forward",
            operands=operands,
            results=(self.root,),
            equations=(),
            original=original,
            body=self.body,
            homes=self.homes,
            location=self.location,
            assumptions=self.assumptions,
            backwards=tuple(
                BackwardMatch(
                    body,
                    backward.cotangent,
                    tuple(
                        (positions[u], steps[levels[u]].cotangent) for u, steps in backward.levels.items() if u in pins
                    ),
                    backward.mapped,
                    moved=tuple((backward.levels[u][0].cotangent, order) for u, order in backward.moved.items()),
                )
                for backward, body in pairs
            ),
        )

    def _levels(
        self, search: Search, pairs: Sequence[tuple[Backward, Body]], across: bool, passed: Set[int]
    ) -> dict[int, int]:
        """Returns how far back the operand of each use lies: values of both bodies are preferred to values further
        back."""
        levels: dict[int, int] = {}
        for use in dict.fromkeys(use for backward in search.found for use in backward.levels):
            known = [(b.levels[use], body) for b, body in pairs if use in b.levels]
            depth = min(len(steps) for steps, _ in known)
            for brought in (False, across):
                fitting = [
                    i
                    for i in range(depth)
                    if all(self._fits(s[i], body, brought) for s, body in known)
                    and passed.isdisjoint(s[i].operand for s, _ in known)
                ]
                if fitting:
                    break
            else:
                raise Mismatch(
                    "the backward lacks an operand where it stands",
                    search.forward.uses[use].number,
                    advice=WHOLE_GRADIENT,
                )
            levels[use] = fitting[-1]
        return levels

    def _check_lacking(self, numbers: Sequence[int], sides: frozenset[int]) -> None:
        """Checks that no side input with a gradient in a backward is among values of which that one has no cotangent,
        or among what they are computed from: a kernel gives the cotangent of all its uses.

        Raises:
          Mismatch: one is, as where the gradient is that of one of two arguments that are the same array.
        """
        todo = [*numbers]
        seen = set(todo) if sides else set()
        while todo and sides:
            number = todo.pop()
            self.graph.steps.spend()
            if number in sides:
                raise Mismatch("a side input with a gradient is read in two places", number, advice=SIDE_INPUT_ONCE)
            node = self.graph.definitions.get(number)
            further = [n for n in (node.inputs if node is not None else ()) if n not in seen and n >= min(sides)]
            seen.update(further)
            todo += further

    def _fits(self, level: Level, body: Body, across: bool) -> bool:
        """Returns whether an operand is at hand in both directions, and its cotangent is computed in the backward's
        body."""
        computed = self.graph.positions[body].get(level.cotangent, (-1,))[0] >= 0
        read = level.operand in self.graph.positions[self.body]
        return computed and read and is_available(self.graph, level.operand, self.homes, body, across)

    def role_uses(self, forward: Forward) -> list[list[int]]:
        """Returns, per role, the positions among the uses of the forward that read its operand."""
        roles = self._uses(forward)
        assert roles is not None
        return [[use] for use in roles]


class _ReadInAnotherWay(Mismatch):
    """Reports a side input that the site does not read as the backward does: layout that no label survives, such as a
    reshape that shifts rows, may lie between."""


def original_of(
    graph: Graph,
    body: Body,
    forward: Forward,
    roles: Sequence[Sequence[int]],
    places: Sequence[int],
    operands: Sequence[int],
    leading: int,
    further: Callable[[int], object],
) -> ClosedJaxpr:
    """Builds the forward's program from the site's operands, each of which is one input, to the result.

    Args:
      graph: the program.
      body: the body of the forward.
      forward: its equations.
      roles: per role, the uses that read its operand.
      places: per role, the position of its operand.
      operands: the values that the site reads.
      leading: how many of them have a role.
      further: adds an operand that the program reads besides.
    """
    numbers = graph.numbers[body]
    every = [use for uses in roles for use in uses]
    others = [use for i, use in enumerate(forward.uses) if i not in every]
    nodes, free = nodes_between(graph, operands[leading:], [use.number for use in others])
    for number in free:
        further(number)
    inputs = [Var(graph.avals[number]) for number in operands]
    variables: dict[int, Var] = dict(zip(operands[leading:], inputs[leading:], strict=True))
    equations = copied(graph, nodes, variables)
    given: list[JaxprAtom | None] = [
        Literal(graph.literals[use.number], use.variable.aval)
        if use.number in graph.literals
        else variables.get(use.number)
        for use in forward.uses
    ]
    for role, use in ((role, use) for role, uses in enumerate(roles) for use in uses):
        variable = inputs[places[role]]
        operand = operands[places[role]]
        steps = list(forward.steps_back(forward.uses[use]))
        reached = [forward.uses[use].number, *(numbers[a] for e in steps if isinstance(a := e.invars[0], Var))]
        if operand not in reached:
            raise Mismatch("several blocks of keys read an operand in different ways", operand, advice=QUERIES_ONCE)
        for equation in reversed(steps[: reached.index(operand)]):
            result = Var(equation.outvars[0].aval)
            equations.append(equation.replace(invars=[variable], outvars=[result]))
            variable = result
        given[use] = variable
    filled = [atom for atom in given if atom is not None]
    return closed(inputs, [forward.root], [*equations, *forward.over(filled)])


def _pins(search: Search, levels: Mapping[int, int]) -> dict[int, int]:
    """Returns the number of the operand that each use reads, of those with a cotangent."""
    pins: dict[int, int] = {}
    for backward in search.found:
        for use, steps in backward.levels.items():
            if pins.setdefault(use, steps[levels[use]].operand) != steps[levels[use]].operand:
                raise Mismatch(
                    "two backwards of the site give the cotangents of different operands", advice=WHOLE_GRADIENT
                )
    return pins


def _pinned_roles(
    roles: Sequence[Sequence[int]], pins: Mapping[int, int], backwards: Sequence[Backward]
) -> dict[int, int | None]:
    """Returns the number of the operand that each role reads; None where it has no cotangent.

    A backward may have the gradients of other roles than the next one, but of each role all or none.
    """
    pinned_roles: dict[int, int | None] = {}
    for role, uses in enumerate(roles):
        found = [pins[use] for use in uses if use in pins]
        in_part = any(not b.lacking.isdisjoint(uses) and not b.levels.keys().isdisjoint(uses) for b in backwards)
        if len(found) > 1 or in_part:
            raise Mismatch(
                "the gradients of what several blocks of keys read are not added up", found[0], advice=QUERIES_ONCE
            )
        pinned_roles[role] = found[0] if found else None
    return pinned_roles
