"""Softmax attention, in any spelling: ``out[.., t, d] = sum_S softmax_S(x[.., t, S]) v[S, d]``, x a program of q k^T.

The anchors are the two contractions.  A contraction over S, one side of which comes from an exponential of another
contraction, is pulled apart: the proof of the softmax is in :mod:`autopallas.patterns.softmax`, the elementwise program
from the scores to x is carried as it is by :mod:`autopallas.patterns.carry`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopallas import compat
from autopallas.compat import Literal, Var
from autopallas.graph import Body, Graph, Node, Ref
from autopallas.graph.edit import surviving
from autopallas.graph.extract import closed, copied, jaxpr_of, nodes_between
from autopallas.graph.labels import ELEMENTWISE, Atom, Dimension, is_product
from autopallas.kernels.attention.site import AttentionSite, RowTerm
from autopallas.kernels.attention.spec import Weight
from autopallas.kernels.layout import Operand, Positions, View
from autopallas.patterns.backward import Backward, Forward, Level, Lookup, Search, differentiable, settle
from autopallas.patterns.carry import Carrier, ProgramBuilder
from autopallas.patterns.expressions import Apply, Expression, Scope
from autopallas.patterns.match import BackwardMatch, Match, Mismatch, NearMiss
from autopallas.patterns.softmax import Exponential, Factor, LogSumExp, NoNormaliser, Softmax, Term, keeps_value
from autopallas.program import Constant

_RANDOM = frozenset({"random_bits", "threefry2x32", "random_unwrap", "rng_bit_generator", "rng_uniform"})
_CUSTOM_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
_LAYOUT = frozenset({"transpose", "reshape", "broadcast_in_dim", "squeeze", "copy", "name", "optimization_barrier"})


class Escape(Mismatch):
    """An intermediate value of a proved site is used outside it."""


def find(graph: Graph, assume_finite: bool = True) -> tuple[list[Match], list[NearMiss]]:
    """Every attention in a graph, and what nearly was one: one outcome for each product of queries and keys."""
    reach = _reach(graph)
    alive = surviving(graph, ())
    matches: dict[int, Match] = {}
    drafts: dict[int, _Draft] = {}
    misses: dict[int, NearMiss] = {}
    for node in graph.nodes:
        if node.name not in ("dot_general", "reduce_sum"):
            continue
        for side in (0, 1):
            if not reach[node.inputs[side if node.name == "dot_general" else 0]][1]:
                continue
            attempt = _Attempt(graph, reach, alive, assume_finite, matches.keys() | drafts.keys())
            score = None
            try:
                draft = attempt.draft(node, side)
                score = attempt.scope.score
                if draft is not None and score is not None:
                    matches[score] = draft.match()
            except Escape as escape:
                assert draft is not None
                assert score is not None
                drafts.setdefault(score, draft)
                misses.setdefault(score, NearMiss("attention", draft.location, escape.reason))
            except Mismatch as mismatch:
                score = attempt.scope.score
                if score is not None:
                    misses.setdefault(score, NearMiss("attention", compat.location(node.equation), mismatch.reason))
    waiting = {score: draft for score, draft in drafts.items() if score not in matches}
    _with_backward(graph, waiting, matches, misses)
    ordered = [matches[score] for score in sorted(matches)]
    gone = {number for match in ordered for number in match.replaced}
    still = surviving(graph, gone) if ordered and misses else alive  # a recognised backward holds no near misses
    return ordered, [miss for score, miss in misses.items() if score not in matches and score in still]


def _with_backward(
    graph: Graph, drafts: dict[int, _Draft], matches: dict[int, Match], misses: dict[int, NearMiss]
) -> None:
    """Settles the sites whose intermediate values are used elsewhere: by their own backward, or it is a near miss."""
    searches = {score: search for score, draft in drafts.items() if (search := draft.search()) is not None}
    if not searches:
        return
    given = {number for match in matches.values() for number in match.results}
    complete = settle(graph, Lookup(graph), list(searches.values()), given)
    for score, search in searches.items():
        miss = misses[score]
        if search in complete:
            try:
                matches[score] = drafts[score].match_with(search)
            except Mismatch as mismatch:
                misses[score] = replace(miss, reason=mismatch.reason)
        elif search.found:
            misses[score] = replace(miss, reason=f"only a part of its backward was recognised; {miss.reason}")


def _reach(graph: Graph) -> list[tuple[bool, bool]]:
    """Per value: whether it comes from a contraction, and whether from an exponential of such a value, through
    elementwise operations, layout and reductions.  A contraction starts anew."""
    reach = [(False, False)] * len(graph.avals)
    for node in graph.nodes:
        found = (False, False)
        contracts = node.name == "dot_general" and not is_product(node)
        if contracts:
            found = (True, False)
        elif node.name in ELEMENTWISE or node.name in _THROUGH or is_product(node):
            contraction = any(reach[i][0] for i in node.inputs)
            exponential = any(reach[i][1] for i in node.inputs)
            starts = node.name in ("exp", "exp2") or _holds_softmax(node)
            found = (contraction, exponential or contraction and starts)
        if node.name == "reduce_sum" and not found[0] and _sums_product(graph, node):
            found = (True, False)
        for output in node.outputs:
            reach[output] = found
    return reach


_THROUGH = _LAYOUT | _CUSTOM_RULES | {
    "concatenate", "slice", "split", "expand_dims", "sharding_constraint", "reduce_sum", "reduce_max", "reduce_min",
    "reduce_precision", "pvary", "pcast", "reshard", "copy_p", "layout_constraint", "tile", "cumsum", "gather", "sort",
    "dynamic_slice", "argmax", "pure_callback",
}  # fmt: skip


def _holds_softmax(node: Node) -> bool:
    """Whether a custom rule's body could compute a softmax."""
    if node.name not in _CUSTOM_RULES:
        return False
    names = {inner.primitive.name for body in compat.bodies(node.equation) for inner in _equations(body[2])}
    return "exp" in names and "reduce_sum" in names


def _equations(body: Any) -> Iterator[Any]:
    for equation in compat.opened(body)[0].eqns:
        yield equation
        for inner in compat.bodies(equation):
            yield from _equations(inner[2])


def _sums_product(graph: Graph, node: Node) -> bool:
    value = node.inputs[0]
    for _ in range(4):
        inner = graph.definitions.get(value)
        if inner is None:
            return False
        if inner.name == "mul" or is_product(inner):
            return True
        if inner.name != "convert_element_type":
            return False
        value = inner.inputs[0]
    return False


class _Attempt:
    """One try to read a contraction as the second one of an attention."""

    def __init__(
        self,
        graph: Graph,
        reach: list[tuple[bool, bool]],
        alive: set[int],
        assume_finite: bool,
        settled: Set[int],
    ):
        self.graph, self.reach, self.alive, self.assume_finite = graph, reach, alive, assume_finite
        self.settled = settled
        """Scores of which the outcome is known already: what else is computed from them is their backward."""
        self.scope = Scope(graph)
        self.query_first = True

    def draft(self, node: Node, side: int) -> _Draft | None:
        """A proved site, or None where there is not even a product of queries and keys.

        Raises:
          Mismatch: it looks like an attention and is not, or cannot be proved to be.
        """
        try:
            return self._match(node, side, node.outputs[0], ())
        except NoNormaliser:
            later = self._division_after(node.outputs[0])
            if later is None:
                raise
        root, steps = later
        self.scope = Scope(self.graph)
        return self._match(node, side, root, steps)

    def _division_after(self, value: int) -> tuple[int, list[tuple[int, int | None]]] | None:
        """The division or product that first uses the second contraction: (its value, [(sign, operand)] down to it)."""
        steps: list[tuple[int, int | None]] = []
        for _ in range(12):
            users = self.graph.users[value]
            if len(users) != 1 or value in self.graph.returned:
                return None
            user = users[0]
            if user.name in _LAYOUT:
                value = user.outputs[0]
            elif user.name == "convert_element_type" and keeps_value(self.graph, user):
                value = user.outputs[0]
                steps.append((0, None))
            elif user.name == "div" and user.inputs[0] == value:
                return user.outputs[0], [(-1, 1), *steps]
            elif user.name == "mul":
                return user.outputs[0], [(1, 1 - user.inputs.index(value)), *steps]
            else:
                return None
        return None

    # ------------------------------------------------------------------ the proof

    def _match(self, node: Node, side: int, root: int, steps: Sequence[tuple[int, int | None]]) -> _Draft | None:
        scope, space, graph = self.scope, self.scope.space, self.graph
        top = space.full(root)
        outside: list[tuple[int, Ref]] = []
        at = top
        for sign, other in steps:
            operands = space.operands(space.canonical(at))
            assert operands is not None
            if other is None:
                at = operands[0]
            else:
                outside.append((sign, operands[other]))
                at = operands[1 - other]
        at = space.canonical(at)
        if at.value != node.outputs[0]:
            return None
        contraction = space.contraction(at)
        if contraction is None:
            return None
        weights, value = contraction[:2] if side == 0 else contraction[1::-1]
        weights = space.canonical(weights)
        contracted = space.resolve([a for _, atoms in contraction[2] for a in atoms])
        if not contracted:
            return None
        # In the order in which the weights have them: a sum over merged axes goes over them in that order.
        layout = [a for _, atoms in space.view(weights.view) for a in atoms]
        key_axis = tuple(sorted(contracted, key=lambda a: layout.index(a) if a in layout else len(layout)))
        offset = next((o for o, atoms in weights.view if set(space.resolve(atoms)) & set(space.resolve(key_axis))), 0)
        softmax = Softmax(scope, key_axis, offset)
        scores = self._score_contraction(softmax, weights)
        if scores is None:
            return None
        score, query, key, head_axis = scores
        scope.score = score.value
        if score.value in self.settled:
            return None
        if not jnp.issubdtype(graph.dtype(score.value), jnp.floating):
            raise Mismatch(f"the scores are of dtype {graph.dtype(score.value)}")
        if len(contraction[2]) > 1 and not self._only_keys(softmax, contraction[2], score):
            raise Mismatch("the second contraction runs over more than the key axis")
        found = softmax.exponential(weights)
        for sign, factor in outside:
            found.rows += [t.scaled(sign) for t in softmax.log(factor)]
        normaliser, rest = self._prove(softmax, found)
        draft = _Draft(
            self, softmax, node, side, root, top, score, query, key, value, key_axis, head_axis, found, normaliser, rest
        )
        draft.settle()
        return draft

    def _only_keys(self, softmax: Softmax, contracted: Sequence[Dimension], score: Ref) -> bool:
        """Whether every contracted dimension is an axis of the scores."""
        atoms = self.scope.space.atoms(score)
        return all(set(self.scope.space.resolve(a)) <= atoms for _, a in contracted)

    def _score_contraction(self, softmax: Softmax, weights: Ref) -> tuple[Ref, Ref, Ref, list[Dimension]] | None:
        """The contraction that gives the scores: (scores, queries, keys, contracted).

        It lies under the exponential (a product of probabilities with something else is a backward's); of several, the
        one that sums over most is it.
        """
        space = self.scope.space
        axis = set(space.resolve(softmax.axis))
        found: list[tuple[int, int, Ref, Ref, Ref, list[Dimension]]] = []
        obstacle: tuple[int, str] | None = None  # what hides the scores, if nothing is found
        first: dict[int, bool] = {}  # whether the queries are the first operand
        seen: set[Any] = set()
        todo = [(weights, False)]
        while todo:
            ref, under = todo.pop(0)
            ref = space.canonical(ref)
            key = (ref.value, space.view(ref.view), under)
            if key in seen or not softmax.carries_axis(ref) or not self.reach[ref.value][0]:
                continue
            seen.add(key)
            contraction = space.contraction(ref)
            if contraction is not None:
                a, b, contracted = contraction
                left, right = space.atoms(space.canonical(a)) & axis, space.atoms(space.canonical(b)) & axis
                if under and left != right:
                    query, keys = (b, a) if right < left else (a, b)
                    first[ref.value] = not right < left
                    size = space.extent([x for _, atoms in contracted for x in atoms])
                    found.append((size, -len(found), ref, query, keys, contracted))
                elif under:
                    obstacle = ref.value, "the probabilities are contracted over an axis that queries and keys share"
                continue
            under = under or self.scope.name(ref) in ("exp", "exp2")
            operands, node = space.operands(ref), self.scope.node(ref)
            if obstacle is None and operands is None and node is not None and node.name not in _REDUCTIONS:
                if under or _holds_softmax(node):
                    own = ", which has a derivative of its own" if node.name in _CUSTOM_RULES else ""
                    obstacle = ref.value, f"the scores pass through {node.name}{own}"
            todo += [(operand, under) for operand in operands or []]
        if not found and obstacle is not None:
            self.scope.score, reason = obstacle
            raise Mismatch(reason)
        if not found:
            return None
        _, _, ref, query, keys, contracted = max(found, key=lambda f: f[:2])
        self.query_first = first[ref.value]
        return space.canonical(ref), query, keys, contracted

    def _prove(self, softmax: Softmax, found: Exponential) -> tuple[LogSumExp, list[Term]]:
        """The normaliser, and the terms beside it, none of which depends on the scores."""
        terms = softmax.combine(found.rows)
        normalisers = [t for t in terms if t.kind == "logsumexp" and softmax.depends(t)]
        if not normalisers:
            if any(t.kind == "log" and softmax.depends(t) for t in terms):
                raise NoNormaliser(softmax.note or "the denominator is not a sum over the keys")
            raise NoNormaliser(softmax.note or "nothing normalises over the keys")
        if len(normalisers) > 1:
            raise Mismatch("the normaliser sums something else than the numerator")
        inner: LogSumExp = normalisers[0].expression
        if abs(normalisers[0].coefficient + 1) > 1e-12:
            raise Mismatch("the normaliser enters with another power than -1")
        if self.scope.key(inner.argument) != self.scope.key(found.argument):
            raise Mismatch("the normaliser sums something else than the numerator")
        rest = [t for t in terms if t is not normalisers[0]]
        if any(softmax.depends(t) for t in rest):
            raise Mismatch(softmax.note or "a function of the row of scores remains beside the normaliser")
        return inner, rest


class _Draft:
    """A proved softmax on its way to a site: labels sorted into roles, programs built, operands collected."""

    def __init__(
        self,
        attempt: _Attempt,
        softmax: Softmax,
        second: Node,
        side: int,
        root: int,
        top: Ref,
        score: Ref,
        query: Ref,
        key: Ref,
        value: Ref,
        key_axis: tuple[Atom, ...],
        head_axis: list[Dimension],
        found: Exponential,
        normaliser: LogSumExp,
        rest: list[Term],
    ):
        self.attempt, self.softmax, self.root, self.top = attempt, softmax, root, top
        self.second, self.side, self.query_first = second, side, attempt.query_first
        self.graph, self.scope, self.space = attempt.graph, attempt.scope, attempt.scope.space
        self.score, self.query, self.key, self.value = score, query, key, value
        self.key_axis, self.head_axis = key_axis, [a for _, atoms in head_axis for a in atoms]
        self.found, self.normaliser, self.rest = found, normaliser, rest
        self.body = self.graph.definitions[root].body
        self.location = compat.location(second.equation)

    def settle(self) -> None:
        """Visits everything until no label is refined any more."""
        before = -1
        while self.space.refinements != before:
            before = self.space.refinements
            self.assembled = self.assemble()

    def match(self) -> Match:
        """The site in its forward direction.

        Raises:
          Escape: an intermediate value is used elsewhere.
        """
        site, carrier = self.assembled
        graph = self.graph
        if self.root not in self.attempt.alive:
            raise Escape("only its derivative is used")
        nodes, free = nodes_between(graph, carrier.operands, [self.root])
        self._escapes(nodes)
        for number in free:  # what cancels in the proof, but not in the original equations
            carrier.further(number)
        known = graph.positions[self.body]
        if any(known[number][0] >= known[self.root][0] for number in carrier.operands):
            raise Mismatch("an operand is at hand only after the place where the result is computed")
        if any(n.equation.effects for n in nodes):
            raise Mismatch("the equations have side effects")
        operands = tuple(carrier.operands)
        return Match(
            op="attention",
            site=replace(site, types=tuple(graph.dtype(number) for number in operands)),
            direction="forward",
            operands=operands,
            results=(self.root,),
            equations=tuple(nodes),
            original=jaxpr_of(graph, nodes, operands, [self.root]),
            body=self.body,
            location=self.location,
        )

    def _escapes(self, nodes: Sequence[Node]) -> None:
        """Refuses a site of which an intermediate value is used elsewhere."""
        graph, scope, alive = self.graph, self.scope, self.attempt.alive
        inside = {id(n) for n in nodes}
        rows = math.prod(graph.shape(self.score.value)) // self.space.extent(self.key_axis)
        for n in nodes:
            for number in n.outputs:
                if number == self.root or not scope.depends(number):
                    continue
                size = math.prod(graph.shape(number))
                what = "row statistics" if size <= rows else "scores or probabilities"
                if number not in alive:
                    continue
                if number in graph.returned:
                    raise Escape(f"the {what} are also returned")
                users = (u for u in graph.users[number] if alive.intersection(u.outputs) or u.equation.effects)
                other = next((u for u in users if id(u) not in inside), None)
                if other is not None:
                    where = compat.location(other.equation)
                    raise Escape(f"the {what} are also used by {other.name} at {where}")

    # ------------------------------------------------------------------ the backward

    def search(self) -> Search | None:
        """What to look for in the program as this site's backward; None if the site spans several bodies."""
        products = self._products()
        forward = Forward(self.graph, self.body, self.root, lambda n: self.scope.depends(n) or n in products)
        if not forward.complete:
            return None
        roles = self._uses(forward)
        if roles is None:
            return None
        others = [i for i, use in enumerate(forward.uses) if i not in roles and differentiable(use)]
        query, key, value = roles
        wanted = [i for i in (value, query, key) if differentiable(forward.uses[i])]
        return Search(forward, wanted, others)

    def _products(self) -> set[int]:
        """Where the scores are a sum of products: the values between the product and the sum."""
        found: set[int] = set()
        value = self.score.value
        while self.graph.name(value) in ("reduce_sum", "convert_element_type"):
            value = self.graph.definitions[value].inputs[0]
            found.add(value)
        return found

    def _uses(self, forward: Forward) -> tuple[int, int, int] | None:
        """The positions of queries, keys and values among the uses of the forward."""
        graph = self.graph
        first = min(self._products(), default=self.score.value)
        second = self.second.outputs[0]
        if self.second.name == "reduce_sum":
            while graph.name(second) in ("reduce_sum", "convert_element_type"):
                second = graph.definitions[second].inputs[0]
        numbers = graph.numbers[self.body]

        def use(value: int, position: int) -> int | None:
            for i, u in enumerate(forward.uses):
                if u.position == position and numbers[forward.equations[u.equation].outvars[0]] == value:
                    return i
            return None

        query_position = 0 if self.query_first else 1
        found = use(first, query_position), use(first, 1 - query_position), use(second, 1 - self.side)
        return None if None in found else found  # type: ignore[return-value]

    def match_with(self, search: Search) -> Match:
        """The site together with the backwards that were found for it."""
        graph, forward = self.graph, search.forward
        roles = self._uses(forward)
        assert roles is not None
        bodies = [_home(graph, backward) for backward in search.found]
        levels: dict[int, int] = {}  # per use, how far back its operand lies
        for backward, body in zip(search.found, bodies, strict=True):
            for use, steps in backward.levels.items():
                fitting = [i for i, step in enumerate(steps) if self._reachable(step, body)]
                if not fitting:
                    raise Mismatch("the backward lacks an operand where it stands")
                levels[use] = min(levels.get(use, fitting[-1]), fitting[-1])
        pins = {
            use: search.found[0].levels[use][level].operand
            for use, level in levels.items()
            if use in search.found[0].levels
        }
        if levels.keys() != pins.keys():
            raise Mismatch("two backwards of the site give the cotangents of different operands")
        sides = [pin for use, pin in pins.items() if use not in roles]
        if len(set(sides)) != len(sides):
            raise Mismatch("a side input with a gradient is read in two places")
        site, carrier = self.assemble({r: pins.get(u) for r, u in enumerate(roles)}, frozenset(sides), tuple(bodies))
        positions = {use: carrier.operands.index(pins[use], carrier.roles) for use in pins if use not in roles}
        positions |= {use: role for role, use in enumerate(roles) if use in pins}
        original = self._original(forward, roles, carrier)
        operands = tuple(carrier.operands)
        return Match(
            op="attention",
            site=replace(site, types=tuple(graph.dtype(number) for number in operands)),
            direction="forward+backward",
            operands=operands,
            results=(self.root,),
            equations=(),
            original=original,
            body=self.body,
            location=self.location,
            backwards=tuple(
                BackwardMatch(
                    body,
                    backward.cotangent,
                    tuple((positions[u], steps[levels[u]].cotangent) for u, steps in backward.levels.items()),
                )
                for backward, body in zip(search.found, bodies, strict=True)
            ),
        )

    def _reachable(self, level: Level, body: Body) -> bool:
        """Whether an operand is at hand in both directions, and its cotangent computed in the backward's body."""
        positions = self.graph.positions
        return (
            level.operand in positions[self.body]
            and level.operand in positions[body]
            and positions[body].get(level.cotangent, (-1,))[0] >= 0
        )

    def _original(self, forward: Forward, roles: tuple[int, int, int], carrier: Carrier) -> Any:
        """The forward's equations from the site's operands, each of which is one input, to the result."""
        graph, numbers = self.graph, self.graph.numbers[self.body]
        others = [use for i, use in enumerate(forward.uses) if i not in roles]
        nodes, free = nodes_between(graph, carrier.operands[carrier.roles :], [use.number for use in others])
        for number in free:
            carrier.further(number)
        inputs = [Var(graph.avals[number]) for number in carrier.operands]
        variables: dict[int, Any] = dict(zip(carrier.operands[carrier.roles :], inputs[carrier.roles :], strict=True))
        equations = copied(graph, nodes, variables)
        given: list[Any] = [
            Literal(graph.literals[use.number], use.variable.aval)
            if use.number in graph.literals
            else variables.get(use.number)
            for use in forward.uses
        ]
        for role, use in enumerate(roles):
            variable: Any = inputs[role]
            steps = list(forward.steps_back(forward.uses[use]))
            reached = [forward.uses[use].number, *(numbers[e.invars[0]] for e in steps)]
            for equation in reversed(steps[: reached.index(carrier.operands[role])]):
                result = Var(equation.outvars[0].aval)
                equations.append(equation.replace(invars=[variable], outvars=[result]))
                variable = result
            given[use] = variable
        return closed(inputs, [forward.root], [*equations, *forward.over(given)])

    # ------------------------------------------------------------------ roles of labels

    def _roles(self) -> tuple[tuple[Atom, ...], tuple[Atom, ...]]:
        """(labels of T, labels of Dv), after checking that every label has a role."""
        space = self.space
        query, key, value = (space.atoms(space.canonical(r)) for r in (self.query, self.key, self.value))
        keys, heads = set(space.resolve(self.key_axis)), set(space.resolve(self.head_axis))
        result = [a for _, atoms in self.top.view for a in space.resolve(atoms)]
        weights = space.atoms(self.score) | {a for a in result if a not in value}
        if not keys <= value:
            raise Mismatch("the values do not carry the key axis")
        if not keys <= key or keys & query:
            raise Mismatch("the contracted axis is not the key axis of the scores")
        if (value & query) - key:
            raise Mismatch("the values depend on the query")
        if self.scope.depends(space.canonical(self.value).value):
            raise Mismatch("the values depend on the scores")
        if len(result) != len(set(result)):
            raise Mismatch("the result has an axis twice")
        value_axis = tuple(a for a in result if a in value and a not in weights and a not in key and a not in query)
        rest = (query | key | value | weights) - keys - heads - set(value_axis)
        if rest - set(result):
            raise Mismatch("an axis of the operands is missing from the result")
        if value - keys - set(value_axis) - set(result):
            raise Mismatch("an axis of the values is missing from the result")
        # Of the axes that only the queries have, one is T and the others are groups of heads.  Parts of one axis (the
        # height and width of an image) stay together.
        rows = [a for a in result if a in query and a not in key and a not in value]
        by_origin: dict[Atom, list[Atom]] = {}
        for atom in rows:
            by_origin.setdefault(space.origin(atom), []).append(atom)
        longest = max(by_origin.values(), key=lambda atoms: math.prod(space.sizes[a] for a in atoms), default=[])
        return tuple(longest), value_axis

    # ------------------------------------------------------------------ the site

    def assemble(
        self,
        pinned_roles: Mapping[int, int | None] = MappingProxyType({}),
        pinned_sides: frozenset[int] = frozenset(),
        further: tuple[Body, ...] = (),
    ) -> tuple[AttentionSite, Carrier]:
        """The site and what it reads; ``pinned``: the values to take as queries, keys, values and side inputs;
        ``further``: bodies, besides its own, in which the operands must be at hand."""
        graph, space = self.graph, self.space
        query_axis, value_axis = self._roles()
        key_axis = space.resolve(self.key_axis)
        carrier = Carrier(self.scope, (self.body, *further), (query_axis, key_axis), self.score, pinned_sides)
        query, key, value = (
            carrier.role(ref, pinned_roles.get(role)) for role, ref in enumerate((self.query, self.key, self.value))
        )
        argument, weights, inner_weights = self._masks()
        score = ProgramBuilder(carrier).build(argument)
        if score.dtype.kind == "c" or not jnp.issubdtype(score.dtype, jnp.floating):
            raise Mismatch(f"the argument of the exponential has dtype {score.dtype}")
        live = self._live(argument)
        live_program = None
        if live:
            live_program = ProgramBuilder(carrier).conjunction(live)
        finished = [self._weight(carrier, w) for w in weights]
        inner = [self._weight(carrier, w) for w in inner_weights]
        sinks = tuple(self._terms(carrier, extra) for extra in self.normaliser.extras)
        factors = self._terms(carrier, self.rest)
        for term in factors:
            if term.kind == "log" and term.coefficient != int(term.coefficient):
                raise Mismatch("a factor of the result enters with a fractional power")
        for sides in (carrier.sides, [t.source for s in (*sinks, factors) for t in s if t.source is not None]):
            self._no_dropout(carrier, sides)
        first = graph.definitions[self.score.value]
        labels = _Labels(space)
        site = AttentionSite(
            sizes=(),
            query=labels.operand(query),
            key=labels.operand(key),
            value=labels.operand(value),
            query_labels=labels.atoms(query_axis),
            key_labels=labels.atoms(key_axis),
            head_labels=labels.atoms(self.head_axis),
            value_labels=labels.atoms(value_axis),
            result=labels.view(space.view(self.top.view)),
            rows=tuple(
                (0, labels.atoms((a,)))
                for _, atoms in self.top.view
                for a in space.resolve(atoms)
                if a not in value_axis
            ),
            types=(),
            score_dtype=graph.dtype(self.score.value),
            result_dtype=graph.dtype(self.root),
            score=score,
            sides=tuple(labels.source(s) for s in carrier.sides),
            inner_weights=tuple(inner),
            weights=tuple(finished),
            sinks=tuple(tuple(labels.term(t) for t in terms) for terms in sinks),
            factors=tuple(labels.term(t) for t in factors),
            live=live_program,
            score_precision=_precision(graph, first),
            value_precision=_precision(graph, self.second),
            assume_finite=self.attempt.assume_finite,
        )
        return replace(site, sizes=labels.sizes()), carrier

    def _masks(self) -> tuple[Expression, list[Factor], list[Factor]]:
        """The argument with the masks of the normaliser folded in as -inf; factors after it; factors within it.

        A mask on numerator and normaliser alike is a score of -inf.  One put on after the division too only acts on
        rows without any live key, where it turns 0 / 0 into 0.
        """
        inner = list(self.normaliser.weights)
        keys = [self.softmax.factor_key(w) for w in inner]
        outer: list[Factor] = []
        for weight in self.found.weights:
            own = self.softmax.factor_key(weight)
            if own in keys:
                keys.remove(own)
                if weight.kind in ("where", "unless") and weight.after_normalisation:
                    outer.append(weight)
            else:
                outer.append(weight)
        if keys:
            raise Mismatch("the normaliser is masked and the numerator is not")
        argument = self.found.argument
        for weight in inner:
            if weight.kind in ("where", "unless"):
                dtype = self._dtype(argument)
                nothing = Constant(-math.inf, dtype)
                cases = (nothing, argument) if weight.kind == "where" else (argument, nothing)
                argument = Apply(lax.select_n_p, {}, (weight.source, *cases), dtype)
        return argument, outer, [w for w in inner if w.kind in ("multiply", "divide")]

    def _dtype(self, expression: Expression) -> Any:
        return self.graph.dtype(expression.value) if isinstance(expression, Ref) else expression.dtype

    def _weight(self, carrier: Carrier, factor: Factor) -> Weight:
        builder = ProgramBuilder(carrier)
        if factor.kind in ("where", "unless") and self.graph.dtype(factor.source.value).kind != "b":
            raise Mismatch("a mask on the probabilities is not boolean")
        if factor.kind == "where":
            return Weight("where", builder.build(factor.source))
        if factor.kind == "unless":
            return Weight("where", builder.build_not(factor.source))
        if factor.kind == "divide":
            return Weight("multiply", builder.build_reciprocal(factor.source))
        return Weight("multiply", builder.build(factor.source))

    def _terms(self, carrier: Carrier, terms: Sequence[Term]) -> tuple[RowTerm, ...]:
        found = []
        for term in terms:
            if term.kind == "constant":
                found.append(RowTerm(term.coefficient, "constant"))
            elif term.kind in ("value", "log"):
                found.append(RowTerm(term.coefficient, term.kind, carrier.source(term.expression)))
            else:
                raise Mismatch("a second normaliser remains")
        return tuple(found)

    def _live(self, expression: Expression) -> list[tuple[Ref, bool]]:
        """Masks that must all hold for a key to have weight: those of selections directly under the exponential."""
        name: str | None
        arguments: list[Any] | None
        match expression:
            case Ref():
                ref = self.space.canonical(expression)
                if not self.scope.depends(ref.value) or ref.value == self.scope.score:
                    return []
                name, arguments, dtype = self.scope.name(ref), self.space.operands(ref), self.graph.dtype(ref.value)
            case Apply():
                name, dtype = expression.primitive.name, expression.dtype
                arguments = list(expression.arguments)
            case _:
                return []
        if arguments is None:
            return []
        if name == "convert_element_type":
            return self._live(arguments[0])
        if name == "mul" and isinstance(arguments[1], Constant) and arguments[1].value >= 0.5:  # exp2's log 2
            return self._live(arguments[0])
        if name == "select_n" and len(arguments) == 3 and isinstance(arguments[0], Ref):
            mask, if_false, if_true = arguments
            if self._dtype(mask).kind == "b" and not self.scope.depends(mask.value):
                if self._dead(if_false, dtype):
                    return [(mask, True), *self._live(if_true)]
                if self._dead(if_true, dtype):
                    return [(mask, False), *self._live(if_false)]
        return []

    def _dead(self, fill: Expression, dtype: Any) -> bool:
        """Whether the exponential of this score is exactly 0 beside any real score: -inf, or near the dtype's least."""
        if isinstance(fill, Constant):
            number: float | None = float(fill.value)
        else:
            number = self.scope.number(fill) if isinstance(fill, Ref) else None
        if number is None:
            return False
        least = float(jnp.finfo(dtype).min)
        return number == -math.inf or (dtype.name != "float16" and number <= 0.3 * least)

    def _no_dropout(self, carrier: Carrier, sources: Sequence[Operand | Positions | None]) -> None:
        """Dropout would have to be carried as a T x S array of random numbers: refused, with its name."""
        keys = set(self.space.resolve(self.key_axis))
        for source in sources:
            if isinstance(source, Operand) and set(source.labels) & keys:
                if self._random(carrier.operands[source.position]):
                    raise Mismatch("dropout is active on the probabilities or scores")

    def _random(self, value: int) -> bool:
        seen: set[int] = set()
        todo = [value]
        for _ in range(200):
            if not todo:
                return False
            number = todo.pop()
            node = self.graph.definitions.get(number)
            if node is None or number in seen:
                continue
            seen.add(number)
            if node.name in _RANDOM:
                return True
            if not (node.name == "dot_general" or self.graph.dtype(number).kind == "V"):
                todo += node.inputs
        return False


def _home(graph: Graph, backward: Backward) -> Body:
    """The body that computes the cotangents."""
    for body, positions in graph.positions.items():
        firsts = (levels[0].cotangent for levels in backward.levels.values())
        if all(positions.get(number, (-1,))[0] >= 0 for number in firsts):
            if backward.cotangent in positions:
                return body
    raise Mismatch("the backward is spread over several bodies")


class _Labels:
    """Renumbers atoms densely, in order of appearance, so that equal sites have equal descriptions."""

    def __init__(self, space: Any):
        self._space = space
        self._number: dict[Atom, int] = {}

    def atoms(self, atoms: Sequence[Atom]) -> tuple[int, ...]:
        return tuple(self._number.setdefault(a, len(self._number)) for a in self._space.resolve(atoms))

    def view(self, view: Any) -> View:
        return tuple((offset, self.atoms(atoms)) for offset, atoms in view)

    def operand(self, operand: Operand) -> Operand:
        return Operand(operand.position, self.view(operand.view))

    def source(self, source: Operand | Positions) -> Operand | Positions:
        if isinstance(source, Operand):
            return self.operand(source)
        return Positions((source.dimension[0], self.atoms(source.dimension[1])), source.dtype)

    def term(self, term: RowTerm) -> RowTerm:
        return term if term.source is None else replace(term, source=self.source(term.source))

    def sizes(self) -> tuple[int, ...]:
        return tuple(self._space.sizes[a] for a in self._number)


def _precision(graph: Graph, node: Node) -> str | None:
    """The precision asked of a contraction, or None for the default."""
    if node.name != "dot_general":
        return None
    precision = node.params["precision"]
    if precision is None:
        return None
    given = precision if isinstance(precision, tuple) else (precision,)
    names = {getattr(p, "name", str(p)) for p in given}
    dtypes = {graph.dtype(operand).name for operand in node.inputs}
    if len(names) == 1 and dtypes == {_ACCUMULATES_IN_FLOAT32.get(*names)}:
        return None
    if len(names) != 1 or not names <= {"DEFAULT", "HIGH", "HIGHEST"}:
        raise Mismatch(f"a contraction asks for the precision {precision}")
    (name,) = names
    return None if name == "DEFAULT" else name


_ACCUMULATES_IN_FLOAT32 = {"BF16_BF16_F32": "bfloat16", "F16_F16_F32": "float16"}
"""Algorithms that are what kernels do with operands of that dtype."""
