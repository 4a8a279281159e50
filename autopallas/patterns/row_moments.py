"""Recognises normalisations of rows, whatever their spelling.

Values after a root are read as polynomials of the rows and their moments (:mod:`autopallas.patterns.row_forms`); what
has the polynomial of a normalisation is one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopallas import jaxprs
from autopallas.compat import Var
from autopallas.faults import contained
from autopallas.graph import Graph, Node, Ref
from autopallas.graph.edit import surviving
from autopallas.graph.extract import nodes_between
from autopallas.graph.labels import Atom
from autopallas.graph.proof_cache import ProofCache
from autopallas.patterns.declared_match import declared_match
from autopallas.patterns.escapes import complete
from autopallas.patterns.expressions import Scope
from autopallas.patterns.forward import COPIES, LAYOUT, in_backward
from autopallas.patterns.match import Match, Mismatch, NearMiss, bounded
from autopallas.patterns.normalisation import Normalisation, ends_with
from autopallas.patterns.row_forms import FormReader, OfRowsError, UnlikeError, before_layout
from autopallas.patterns.turned_rows import turned
from autopallas.sites.declared import DeclaredSite
from autopallas.sites.spec import Spec

__all__ = ["Normalisation", "found_normalisations", "normalisations"]

_MOST_TILES = 12
"""Most values among which x is looked for."""
_MOST_USERS = 24
"""Most values after a root among which the normalisation is looked for."""
_WAYS = 10
"""Most rounds in which shorter ways to take a normalisation are tried."""
_MOST_TURNED = 64
"""Most normalisations of a program that are taken with what turns their rows: all layers turn by the same cosines, so
that each search for a backward tries the cotangents of all of them."""
_ROOTS = frozenset({"rsqrt", "sqrt", "pow"})
_MADE_OF_ROWS = frozenset({"convert_element_type", "mul", "div", "sub", "add", "square", "integer_pow", "pow"})
_STEPS = LAYOUT | frozenset(
    {"mul", "div", "add", "add_any", "sub", "neg", "max", "select_n", "convert_element_type", "integer_pow", "pow"}
)

_NEARLY_ONE = 0.6, 1.7
"""Bounds of a factor of centred rows that is worth reporting, as of a variance over N - 1."""
_GAIN = "the rows are multiplied by a further number, as with a variance over N - 1"
_PLAIN = "Divide by jnp.sqrt(jnp.var(x) + epsilon), and put the number into the scale."
_STANDARDISED = (
    "the rows are taken from their means along an axis that is not the last, and no element of it has a scale or a "
    "shift of its own, as where a batch is standardised"
)
_MOVED = "Move the axis to the end before it is normalised, and back afterwards: jnp.moveaxis(x, axis, -1)."


def normalisations(graph: Graph) -> tuple[list[tuple[Normalisation, ...]], dict[int, tuple[bool, str, str]]]:
    """Finds the normalisations of a graph, and why near misses are none; keeps both in the graph.

    Each normalisation comes in several ways: with everything it is scaled by and everything added, then with less. A
    scale stays outside if the program computes another gradient of it than the sum over all rows, such as one per
    example. The reasons for near misses are keyed by the number of a root; each is (whether what the root is part of is
    centred, the reason, the advice).
    """
    if "normalisations" not in graph.notes:
        found: dict[int, tuple[Normalisation, ...]] = {}
        reasons: dict[int, tuple[bool, str, str]] = {}
        alive = surviving(graph)
        given = {graph.numbers[graph.root][v] for v in graph.root.outvars if isinstance(v, Var)}
        others: ProofCache[_Outcome] = ProofCache(graph, [(n in alive, n in given) for n in range(len(graph.avals))])
        for node in graph.nodes:
            if node.name in _ROOTS and node.outputs[0] in alive:
                with contained(node):
                    search = _Search(graph, node, alive, given)
                    try:
                        with bounded(graph):
                            outcome = _outcome(search, others)
                    except Mismatch as mismatch:  # out of steps
                        outcome = _Outcome((), (search.centred, mismatch.reason, mismatch.advice))
                    if outcome.reason is not None:
                        reasons[node.outputs[0]] = outcome.reason
                    for ways in outcome.every:
                        found.setdefault(ways[0].result.outputs[0], ways)
        graph.notes["normalisations"] = [tuple(found.values()), tuple(reasons.items())]
    ways_of, reasons_of = graph.notes["normalisations"]
    return list(ways_of), dict(reasons_of)  # type: ignore[call-overload]


class _Outcome(NamedTuple):
    """Outcome of a search: the ways to take each normalisation; or, for a near miss, whether it is centred, the reason
    and the advice."""

    every: tuple[tuple[Normalisation, ...], ...]
    reason: tuple[bool, str, str] | None = None


def _outcome(search: _Search, others: ProofCache[_Outcome]) -> _Outcome:
    """Returns the outcome of a search; takes it over from another root of the same form where there is one."""
    graph = search.graph
    for outcome, image in others.like(search.root, None):
        return outcome._replace(every=tuple(tuple(one.at(graph, image) for one in ways) for ways in outcome.every))

    def proof(watched: Graph) -> _Outcome:
        search.graph = watched
        try:
            return _Outcome(search.found())
        except Mismatch as mismatch:
            return _Outcome((), (search.centred, mismatch.reason, mismatch.advice))

    return others.prove(search.root, None, proof)


def found_normalisations(
    graph: Graph, op: str, spec: Callable[..., Spec], centred: bool
) -> tuple[list[Match], list[NearMiss]]:
    """Finds the normalisations of one operation, with their backwards.

    Args:
      graph: the program.
      op: a declared operation of rows B and M and columns N, with operands x, scale and shift, which vary along B.
      spec: makes its spec.
      centred: whether it subtracts the mean.
    """
    found, reasons = normalisations(graph)
    misses = [
        NearMiss(op, jaxprs.location(graph.definitions[number].equation), reason, number, advice)
        for number, (nearly_centred, reason, advice) in reasons.items()
        if nearly_centred == centred
    ]
    chosen = [ways for ways in found if ways[0].numbers.centred == centred]
    if sum(ways[0].turn is not None for ways in chosen) > _MOST_TURNED:
        chosen = [tuple(one for one in ways if one.turn is None) for ways in chosen]
    for _ in range(_WAYS):
        sites: list[tuple[Match, Node]] = []
        for one in (ways[0] for ways in chosen):
            with contained(one.result):
                match = _match(graph, op, spec, one)
                if match is not None:
                    sites.append((match, one.result))
        matches, missed = complete(graph, sites)
        incomplete = {miss.value for miss in missed} | {m.results[0] for m in matches if _turn_is_trained(m)}
        if not any(len(ways) > 1 and ways[0].result.outputs[0] in incomplete for ways in chosen):
            break
        shorter = (ways[1:] or ways if ways[0].result.outputs[0] in incomplete else ways for ways in chosen)
        chosen = list({ways[0].result.outputs[0]: ways for ways in shorter}.values())
    return matches, [*misses, *missed]


def _turn_is_trained(match: Match) -> bool:
    """Returns whether the program computes gradients of cosines or sines, which no kernel gives."""
    site = match.site
    assert isinstance(site, DeclaredSite)
    own = {operand.position for name, operand in site.operands if name in ("cos", "sin")}
    return any(site.uses[place] in own for backward in match.backwards for place, _ in backward.gradients)


def _match(graph: Graph, op: str, spec: Callable[..., Spec], one: Normalisation) -> Match | None:
    operands = {"x": one.x, "scale": one.scale, "shift": one.shift}
    turn = one.turn
    if turn is not None:
        operands |= {"cos": turn.cos, "sin": turn.sin}
    dtypes = {f"{name}_dtype": None if ref is None else graph.dtype(ref.value) for name, ref in operands.items()}
    sizes = {"batch": 0, "rows": 0, "columns": 0}  # filled in from the site
    dtypes["result_dtype"] = graph.dtype(one.result.outputs[0])
    numbers = {"epsilon": one.numbers.epsilon, "outside": one.numbers.outside, "floor": one.numbers.floor}
    if not one.numbers.centred:
        numbers |= {"gain": one.numbers.gain, "factor": one.numbers.factor}
    if turn is not None:
        numbers |= {"start": turn.start, "neighbours": turn.neighbours}
        numbers |= {"first_adds": turn.first_adds, "second_subtracts": turn.second_subtracts}
    form = spec(**sizes, **dtypes, **numbers, strided=one.strided)
    letters = _letters(one)
    if letters is None:
        return None
    return declared_match(graph, op, form, one.result, operands, letters, one.dimensions, one.sizes)


def _letters(one: Normalisation) -> dict[str, list[Atom]] | None:
    """Returns the labels of each letter: positions, along which the cosines vary, are neighbours among the rows, and
    rows before them that all positions share are models where they vary along those too. None where that cannot be."""
    every = [atom for own in one.dimensions for atom in own]
    shared = {atom for ref in (one.scale, one.shift) if ref is not None for _, own in ref.view for atom in own}
    rows = [atom for atom in every if atom not in one.columns]
    models = [atom for atom in rows if atom in shared]
    left = [atom for atom in rows if atom not in shared]
    letters = {"N": [*one.columns], "P": [], "H": [], "J": [], "A": []}
    if one.turn is not None:
        of_rows, places = one.turn.atoms, [i for i, atom in enumerate(left) if atom in one.turn.atoms]
        if places and places != [*range(places[0], places[-1] + 1)]:
            count = next(i for i, atom in enumerate(left) if atom not in of_rows)
            models, left = [*models, *left[:count]], left[count:]
            places = [i for i, atom in enumerate(left) if atom in of_rows]
            if places != [*range(places[0], places[-1] + 1)]:
                return None
        end = places[-1] + 1 if places else 0
        letters |= {"P": [left[i] for i in places], "H": left[end:]}
        pairs = one.turn.pair if set(one.turn.pair) & of_rows else ()
        letters |= {"J": [*pairs], "A": [*one.turn.angle]}
    return {"B": models, "M": left, **letters}


# ---------------------------------------------------------------------- where normalisations are


@dataclass
class _Search:
    """Looks for the normalisation that one root is part of."""

    graph: Graph
    root: Node
    alive: frozenset[int]
    given: Set[int]
    """Numbers of the program's results."""
    centred: bool = False
    """Whether the near miss subtracts its mean."""
    _subtracts: bool = False
    _reason: Mismatch | None = None
    _of_rows: bool = False
    """Whether what follows has a scale or a shift for each row, as norms of a batch or of groups have."""

    def found(self) -> tuple[tuple[Normalisation, ...], ...]:
        """Returns the normalisation with everything scaled and added after it, then with less; nothing where nothing
        resembles a normalisation. Where the program normalises the same rows several times, returns each.

        Raises:
          Mismatch: something resembles one, with the reason why it is none.
        """
        if not self._is_root():
            return ()
        for x, axes in dict.fromkeys(self._candidates()):
            self._of_rows = False
            read = dict(self._behind(x, axes))
            if read and self._of_rows and not any(one.of_columns or not one.strided for one in read.values()):
                return ()
            if read:
                ways = map(self._ways, self._of_layers(self._chains(read)))
                return tuple(self._with_later_rows(own, x) for own in ways)
            if self._reason is not None and self.centred:
                break  # what is nearly a norm of centred rows is none of these
        if self._reason is not None:
            raise self._reason
        return ()

    def _with_later_rows(self, ways: tuple[Normalisation, ...], x: int) -> tuple[Normalisation, ...]:
        """Adds, after each way to take a normalisation of x, the same one of rows that are made of x, such as a
        multiple of it, where something else reads these: they are needed in any case."""
        later: list[tuple[int, frozenset[int]]] = []
        for number, axes in dict.fromkeys(self._candidates()):
            if number > x and self._is_read_elsewhere(number, x, ways[0].result.outputs[0]):
                later.append((number, axes))
        found: list[Normalisation] = []
        read: dict[tuple[int, int], Normalisation | None] = {}  # several ways may end with one value
        for one in ways:
            found.append(one)
            for number, axes in later:
                key = one.result.outputs[0], number
                if key not in read:
                    read[key] = None
                    with suppress(UnlikeError, Mismatch):
                        read[key] = self._read(one.result, number, axes)
                other = read[key]
                if other is not None and other.numbers.centred == one.numbers.centred:
                    found.append(other)
        return tuple(found)

    def _is_read_elsewhere(self, number: int, x: int, result: int) -> bool:
        """Returns whether something other than the normalisation of x, and its backward, reads a value, or that in
        another dtype or layout."""
        own = {id(node) for node in nodes_between(self.graph, [x], [result])[0]}
        todo = [number]
        while todo:
            number = todo.pop()
            if number in self.given:
                return True
            for node in self.graph.users[number]:
                if in_backward(node):
                    continue
                if node.name in COPIES:
                    todo += node.outputs
                elif id(node) not in own and not self.alive.isdisjoint(node.outputs):
                    return True
        return False

    def _is_root(self) -> bool:
        if self.root.name != "pow":
            return True
        exponent = self.graph.literals.get(self.root.inputs[1])
        return exponent is not None and exponent.item() in (0.5, -0.5)  # it may be complex

    def _candidates(self) -> Iterator[tuple[int, frozenset[int]]]:
        """Yields (value, its summed dimensions) of tiles whose moments the root's operand may hold, the innermost
        first."""
        scope = Scope(self.graph)
        space = scope.space
        todo, seen = [space.full(self.root.inputs[0])], 0
        while todo and seen < _MOST_USERS:
            seen += 1
            at = space.canonical(todo.pop())
            if (contraction := space.contraction(at)) is not None and scope.name(at) == "dot_general":
                left, _, dimensions = contraction
                yield from self._inner(scope, left, frozenset(a for _, atoms in dimensions for a in atoms))
                return
            if scope.name(at) == "reduce_sum":
                operand, dimensions = space.reduced(at)
                yield from self._inner(scope, operand, frozenset(a for _, atoms in dimensions for a in atoms))
                return
            todo += [o for o in (space.operands(at) or [])[::-1] if scope.number(o) is None]

    def _inner(self, scope: Scope, ref: Ref, columns: frozenset[Atom]) -> Iterator[tuple[int, frozenset[int]]]:
        space = scope.space
        path: list[Ref] = []
        at: Ref | None = ref
        while at is not None and len(path) < _MOST_TILES:
            read, at = at, space.canonical(at)
            operands = space.uses(at) or []
            widens = scope.name(at) == "convert_element_type" and not self._narrows(at, operands)
            if not widens:
                path += [at, read] if read != at else [at]
            carrying = [o for o in operands if space.atoms(o) & columns]
            alike = carrying and all(space.same(carrying[0], other) for other in carrying)
            if scope.name(at) in ("mul", "div"):  # rows times one number each, as after another norm, are x themselves
                others = [o for o in operands if not space.atoms(o) & columns]
                alike = alike and all(scope.number(o) is not None for o in others)
            at = carrying[0] if alike and scope.name(at) in _MADE_OF_ROWS else None
        for at in path[::-1]:
            atoms = [space.resolve(own) for _, own in at.view]
            axes = frozenset(d for d, own in enumerate(atoms) if own and set(own) <= columns)
            if axes and math.prod(self.graph.shape(at.value)[d] for d in axes) == space.extent(sorted(columns)):
                yield at.value, axes

    def _narrows(self, at: Ref, operands: Sequence[Ref]) -> bool:
        """Returns whether a cast is to a narrower dtype: numbers of such rows may be as narrow."""
        return any(self.graph.dtype(at.value).itemsize < self.graph.dtype(o.value).itemsize for o in operands)

    def _behind(self, x: int, axes: frozenset[int]) -> Iterator[tuple[int, Normalisation]]:
        """Yields (number, normalisation) for the values after the root that are normalisations of x, in order.

        Values that turn out otherwise are not followed: in a deep program, that would lead through all of it.
        """
        waiting = {n: user for user in self.graph.users[self.root.outputs[0]] for n in user.outputs[:1]}
        seen: set[int] = set()
        while waiting and len(seen) < _MOST_USERS:
            number = min(waiting)
            node = waiting.pop(number)
            seen.add(number)
            if node.name not in _STEPS or number not in self.alive or len(node.outputs) != 1:
                continue
            try:
                found = self._read(node, x, axes)
            except UnlikeError as unlike:
                self._of_rows |= isinstance(unlike, OfRowsError)
                continue
            except Mismatch as mismatch:
                if self._reason is None:
                    self._reason, self.centred = mismatch, self._subtracts
                continue
            if found is not None:
                yield number, found
            waiting.update({n: u for u in self.graph.users[number] for n in u.outputs[:1] if n not in seen})

    def _read(self, node: Node, x: int, axes: frozenset[int]) -> Normalisation | None:
        """Reads what a node computes as a normalisation of x; returns None for layout, for other sizes, and where
        neither x nor other rows are used.

        Raises:
          UnlikeError: the value is no normalisation of x.
        """
        graph, shape = self.graph, self.graph.shape(node.outputs[0])
        if node.name in LAYOUT or math.prod(shape) != math.prod(graph.shape(x)) or 0 in shape:
            return None
        scope = Scope(graph)
        space = scope.space
        result = space.full(node.outputs[0])
        several = math.prod(shape) > math.prod(graph.shape(x)[d] for d in axes)
        at = _use(scope, result, x, several)
        if at is None:
            return None
        columns = [atom for d in sorted(axes) for atom in space.resolve(at.view[d][1])]
        dimensions = tuple(space.resolve(own) for _, own in result.view)
        every = [atom for own in dimensions for atom in own]
        if not columns or not set(columns) <= set(every):
            raise UnlikeError("the result lacks the axes along which it is normalised")
        reader = FormReader(scope, x, columns, [atom for atom in every if atom not in columns])
        before = space.refinements
        try:
            form = reader.form(result)
            if space.refinements != before:
                raise UnlikeError("an axis of it is cut in two")
            numbers = reader.conclusion(form)
        finally:
            self._subtracts = reader.centred
        if numbers.centred and (numbers.gain, numbers.factor) != (1.0, 1.0):
            if _NEARLY_ONE[0] < abs(numbers.gain) / math.sqrt(numbers.factor) < _NEARLY_ONE[1]:
                raise Mismatch(_GAIN, advice=_PLAIN)
            raise UnlikeError("the rows are multiplied by another number")
        if not ends_with(dimensions, columns):
            shared = [space.atoms(ref) for ref in (form.scale, form.shift) if ref is not None]
            if any(own and not own >= {*columns} for own in shared):
                raise OfRowsError("the rows have scales or shifts of their own, or a part of the columns has")
        read = [*reader.reads.values()]
        use = read[0] if len(read) == 1 else at

        def viewed(ref: Ref | None, before: bool = False) -> Ref | None:
            ref = space.canonical(ref) if ref is not None and before else ref
            return None if ref is None else Ref(ref.value, space.view(ref.view))

        scale, shift = viewed(form.scale), viewed(form.shift)
        earlier = viewed(form.scale, True), viewed(form.shift, True)
        rows = Ref(use.value, space.view(use.view))
        return Normalisation(node, numbers, rows, scale, shift, dimensions, tuple(columns), dict(space.sizes), earlier)

    def _of_layers(self, chains: list[list[Normalisation]]) -> list[list[Normalisation]]:
        """Returns the chains without those that normalise along other axes than the last, each element of which lacks
        a scale and a shift of its own: along several axes, or centred, as where a batch is standardised.

        Raises:
          Mismatch: all standardise along one axis.
        """
        kept = [own for own in chains if not own[0].strided or own[-1].of_columns or own[0].of_one_axis]
        layers = [own for own in kept if not own[0].numbers.centred or not own[0].strided or own[-1].of_columns]
        if kept and not layers:
            self.centred = True
            raise Mismatch(_STANDARDISED, advice=_MOVED)
        return layers

    def _chains(self, read: Mapping[int, Normalisation]) -> list[list[Normalisation]]:
        """Returns chains of normalisations, each the only thing computed from the one before.

        There is one chain, unless the program computes the root several times and what follows it forks as often: two
        norms of the same rows, as in parallel blocks, have the same values up to their scales.  Where forks meet again
        there would be two chains for each, of several forks a power of two, and only their beginning is returned.
        """
        following = {number: () if number in self.given else self._next(number) & read.keys() for number in read}
        first = min(read)
        inner = set().union(*following.values())
        starts = sorted(read.keys() - inner)
        forks = {number: sorted(following[number]) for number in read if len(following[number]) > 1}
        count = len(starts) + sum(len(further) - 1 for further in forks.values())
        copies = Counter(body for body, _ in self.graph.occurrences(self.root.outputs[0]))
        rejoin = sum(map(len, following.values())) > len(inner)
        if rejoin or not 1 < count <= max(copies.values(), default=1):
            starts, forks = [first], {}
        chains: list[list[Normalisation]] = []
        todo = [[start] for start in starts]
        while todo:
            chain = todo.pop(0)
            further = forks.get(chain[-1]) or (following[chain[-1]] if len(following[chain[-1]]) == 1 else ())
            if further:
                todo += [[*chain, number] for number in further]
            else:
                chains.append([read[number] for number in chain])
        return chains

    def _ways(self, chain: Sequence[Normalisation]) -> tuple[Normalisation, ...]:
        """Returns the normalisations of a chain from the last to the first; before these, the last one with what turns
        its rows, if anything does.

        A cast to a wider dtype at the end is left out, since whatever comes next reads through it.
        """
        ways = [chain[0]]
        for one in chain[1:]:
            node = one.result
            before, after = (self.graph.dtype(n) for n in (node.inputs[0], node.outputs[0]))
            if node.name != "convert_element_type" or after.itemsize < before.itemsize:
                ways.append(one)
        found: list[Normalisation] = list(turned(self.graph, ways[-1]))
        for one in ways[::-1]:
            found.append(one)
            if one.earlier != (one.scale, one.shift):
                found.append(replace(one, scale=one.earlier[0], shift=one.earlier[1]))
        return tuple(found)

    def _next(self, number: int) -> set[int]:
        """Returns what is computed from a value, looking through layout operations."""
        found: set[int] = set()
        todo = [number]
        while todo and len(found) < _MOST_USERS:
            for user in self.graph.users[todo.pop()]:
                if user.name in LAYOUT:
                    todo += user.outputs[:1]
                else:
                    found.update(user.outputs[:1])
        return found


def _use(scope: Scope, result: Ref, x: int, several: bool) -> Ref | None:
    """Finds the use of a value from which a result of one row, or of ``several``, is computed element by element.

    Raises:
      UnlikeError: several rows are computed from the rows of another value, such as a cotangent.
    """
    space = scope.space
    every = space.atoms(result)
    todo, seen = [result], 0
    while todo and seen < 2 * _MOST_USERS:
        seen += 1
        at = before_layout(space, todo.pop(), x)
        if at.value == x:
            return at
        operands = space.uses(at) if at.value > x else None
        if operands is None and several and every <= space.atoms(at) and scope.number(at) is None:
            raise UnlikeError("the rows are combined with something else")
        todo += (operands or [])[::-1]
    return None
