"""Finds gated MLPs in any spelling, with their backwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import jax.numpy as jnp

from autopallas import jaxprs
from autopallas.faults import contained
from autopallas.graph import Body, Graph, Node, Ref, Space
from autopallas.graph.edit import surviving
from autopallas.graph.labels import Atom, Dimension
from autopallas.kernels.gated_mlp.operation import OPERATION, GatedMlpSpec
from autopallas.patterns.declared_match import declared_match
from autopallas.patterns.escapes import complete
from autopallas.patterns.expressions import Scope, precision_of
from autopallas.patterns.forward import DissolvedApart, RectifiedApart
from autopallas.patterns.gated_mlp.adapters import with_adapters
from autopallas.patterns.gated_mlp.candidates import Candidate, candidates, is_joined
from autopallas.patterns.gated_mlp.factors import roles
from autopallas.patterns.gated_mlp.units import Units, Unlike, Use
from autopallas.patterns.match import Match, Mismatch, NearMiss, bounded
from autopallas.sites.declared import DeclaredSite
from autopallas.sites.elementwise import ElementwiseProgram, Score, Side

__all__ = ["find"]

_FURTHER = (
    "the product that gives the projections gives something else too",
    "Compute both projections, or each, by a product of its own: jnp.split(x @ w[:, :2 * hidden], 2, -1). The kernel "
    "computes them itself, so that the larger product would be computed beside it.",
)
_VECTORS = ("gate_bias", "up_bias", "parameter")
_THROUGH = frozenset({"transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy", "name"})
"""Changes of layout before which an operand is read: those that need no copy of a part of it."""


def find(graph: Graph, assume_finite: bool = True) -> tuple[list[Match], list[NearMiss]]:
    """Finds every gated MLP in a graph, and the near misses.

    Hidden units that another site computes, as those of experts, belong to that site.
    """
    if not any(node.name == "dot_general" for node in graph.nodes):
        return [], []
    # what another site reads is computed as well, such as the activations of a loss that is all that the program gives
    alive = surviving(graph, graph.replaced, graph.reads) if graph.replaced else surviving(graph)
    misses: list[NearMiss] = []
    waiting: list[list[tuple[Match, Node]]] = []
    again: dict[int, Sequence[Candidate]] = {}
    """By the result of the last try: candidates whose rectifiers may be those of a loop that was differentiated."""
    for tries in candidates(graph, alive):
        with contained(tries[-1][0]):
            try:
                with bounded(graph):
                    if sites := _matches(graph, tries):
                        waiting.append(sites)
                        again[sites[-1][1].outputs[0]] = tries
            except Mismatch as mismatch:
                node = tries[-1][0]
                location = jaxprs.location(node.equation)
                misses.append(NearMiss(OPERATION.name, location, mismatch.reason, node.outputs[0], mismatch.advice))
    matches: list[Match] = []
    first: dict[int, NearMiss] = {}
    tried_late: set[int] = set()
    while waiting:  # what is incomplete with the product that follows may be complete without it
        found, missed = complete(graph, [own[0] for own in waiting])
        matches += found
        incomplete = {miss.value: miss for miss in missed}
        left = []
        for own in waiting:
            if (miss := incomplete.get(own[0][1].outputs[0])) is None:
                continue
            number = own[-1][1].outputs[0]
            first.setdefault(number, miss)
            if own[1:]:
                left.append(own[1:])
            elif number not in tried_late and (later := _later(graph, again[number])):
                tried_late.add(number)
                tried_late.add(later[-1][1].outputs[0])
                again.setdefault(later[-1][1].outputs[0], again[number])
                left.append(later)
            elif _resembles(own[0][0]):
                misses.append(first[own[-1][1].outputs[0]])
        waiting = left
    misses += with_adapters(graph, alive)
    missed_at = {miss.value: number for number, miss in first.items() if miss in misses}
    rectified: list[tuple[Match, Node]] = []
    for number in missed_at.values():
        node = again[number][-1][0]
        with contained(node), suppress(Mismatch), bounded(graph):
            rectified += _matches(graph, again[number], rectified=True)[:1]
    for kind in (RectifiedApart, DissolvedApart):
        found = complete(graph, rectified, kind)[0] if rectified else []
        found = [match for match in found if match.backwards]  # which show that these were rectifiers
        matches += found
        given = {number for match in found for number in match.results}
        rectified = [(match, node) for match, node in rectified if given.isdisjoint(match.results)]
        misses = [miss for miss in misses if miss.value not in given]
    return matches, list({(miss.location, miss.reason): miss for miss in reversed(misses)}.values())[::-1]


def _resembles(match: Match) -> bool:
    """Returns whether what is incomplete resembles a gated MLP: its hidden units are summed, or vary along the last
    axis. Else the rows of two arrays are multiplied with one matrix, as for a layer and its derivative."""
    site = match.site
    assert isinstance(site, DeclaredSite)
    hidden = set(dict(site.letters)["H"])
    return "down" in dict(site.operands) or bool(site.result) and hidden.issuperset(site.result[-1][1])


def _later(graph: Graph, tries: Sequence[Candidate]) -> list[tuple[Match, Node]]:
    """Returns the sites that candidates for one place are where x is read after its changes of layout, such as tokens
    in one row: others may read it there too, so that its cotangents are added up there."""
    node = tries[-1][0]
    with contained(node), suppress(Mismatch), bounded(graph):
        return _matches(graph, tries, late=True)
    return []


def _matches(
    graph: Graph, tries: Sequence[Candidate], rectified: bool = False, late: bool = False
) -> list[tuple[Match, Node]]:
    """Returns the sites that candidates for one place are, each with the node that gives its result.

    With ``late``, x is read as the products read it, and what would be the same without is left out.

    Raises:
      Mismatch: a guard failed, of a place that is close to a gated MLP.
    """
    found: list[tuple[Match, Node]] = []
    for units, reader in tries:
        try:
            match = _match(graph, units, reader, rectified, late)
        except Unlike:
            continue
        if match is not None:
            found.append((match, reader or units))
    return found


def _match(graph: Graph, units: Node, reader: Node | None, rectified: bool, late: bool) -> Match | None:
    scope = Scope(graph)
    space = scope.space
    result = reader or units
    whole = space.full(result.outputs[0])
    down: Ref | None = None
    at = whole
    if reader is not None:
        left, right, _ = space.dot(whole)
        is_left = space.canonical(left).value == units.outputs[0]
        at, down = (left, right) if is_left else (right, left)
        if space.canonical(at).value != units.outputs[0]:
            raise Unlike("the product reads something else")
    reading = Units(scope, rectified)
    program = reading.read(at)
    # A checkpoint that computes the products again, or is handed them, lacks what weights were before they were passed
    # in.
    products = {use.ref.value for use in reading.products}
    again = (body for number in sorted(products) for body in graph.bodies_with(number))
    bodies = list(dict.fromkeys((result.body, *again)))
    _refuse_further_columns(space, reading.products, program, units, reader)
    projections = _projections(space, reading.products, bodies, late)
    if any(_is_chosen(space, use) for use in (projections.gate, projections.up)):
        raise Unlike("the matrices are those of experts")
    own_down = None if down is None else Use(_earlier(space, down, bodies), ())
    place = _Place(graph, space, whole, projections, own_down)
    letters = place.letters([use.ref for use in reading.vectors])
    if not roles(program, alone=reader is None):
        program, projections = _exchanged(program), replace(projections, gate=projections.up, up=projections.gate)
        place = _Place(graph, space, whole, projections, own_down)
        letters = place.letters([use.ref for use in reading.vectors])
    names = _names(program, reading.vectors)
    program = _renamed(program, names)
    operands: dict[str, Use | None] = {"x": projections.x, "gate": projections.gate, "up": projections.up}
    operands["down"] = place.down
    for name in _VECTORS:
        operands[name] = None
    for use, name in zip(reading.vectors, names, strict=True):
        operands[name] = Use(_earlier(space, use.ref, bodies), use.fixed)
    dtypes = {f"{n}_dtype": None if use is None else graph.dtype(use.ref.value) for n, use in operands.items()}
    floating = all(dtype is None or jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes.values())
    if not floating or (down is not None and graph.dtype(down.value) != program.dtype):
        raise Unlike("it has other dtypes")
    nodes = [graph.definitions[use.ref.value] for use in reading.products]
    asked = {precision_of(graph, node) for node in (*nodes, *([reader] if reader is not None else []))}
    if len(asked) > 1:
        raise Unlike("the products have several precisions")
    make: Callable[..., GatedMlpSpec] = GatedMlpSpec
    form = make(
        **dict.fromkeys(OPERATION.sizes.values(), 0),
        **dtypes,
        result_dtype=graph.dtype(result.outputs[0]),
        activation=program,
        precision=asked.pop(),
    )
    dimensions = [own for _, own in space.view(whole.view)]
    refs = {
        name: None if use is None else Ref(use.ref.value, space.view(use.ref.view)) for name, use in operands.items()
    }
    fixed = {name: dict(use.fixed) for name, use in operands.items() if use is not None and use.fixed}
    return declared_match(graph, OPERATION.name, form, result, refs, letters, dimensions, space.sizes, fixed)


@dataclass(frozen=True, slots=True)
class _Projections:
    """Two products of one value: what both read, the matrix of each, and what they sum over."""

    x: Use
    gate: Use
    up: Use
    features: tuple[Atom, ...]


def _projections(space: Space, products: Sequence[Use], bodies: Sequence[Body], late: bool) -> _Projections:
    """Returns what two contractions have in common; with ``late``, as they read it, where that is another value than
    the one before changes of layout.

    Raises:
      Unlike: they read no value in common, or both operands are the same, or there are further columns.
    """
    first, second = products
    left, right, summed = space.dot(first.ref)
    ours = left, right
    left, right, also = space.dot(second.ref, summed if second.ref.value == first.ref.value else None)
    theirs = left, right
    labels = {atom for atom, _ in (*first.fixed, *second.fixed)}
    for i in (0, 1):
        for j in (0, 1):
            x, other = (_earlier(space, operands[k], bodies) for operands, k in ((ours, i), (theirs, j)))
            if x.value != other.value or labels & space.atoms(x):
                continue
            names = _unified(space, x, other, summed, also)
            if names is None:
                continue
            renamed = [(o, tuple(names.get(a, a) for a in space.resolve(own))) for o, own in also]
            both = space.dot(second.ref, renamed)[:2]
            if not space.same(_earlier(space, both[j], bodies), x):
                continue
            gate, up = _earlier(space, ours[1 - i], bodies), _earlier(space, both[1 - j], bodies)
            if space.same(gate, up) and first.fixed == second.fixed:
                raise Unlike("both products are the same")
            features = tuple(atom for _, own in summed for atom in space.resolve(own))
            if late:
                last = ours[i]
                if last.value == x.value or last.value != both[j].value or not space.same(last, both[j]):
                    raise Unlike("the two products read it in one layout, or in two")
                x = last
            return _Projections(Use(x, ()), Use(gate, first.fixed), Use(up, second.fixed), features)
    raise Unlike("the two products have no operand in common")


def _refuse_further_columns(
    space: Space, products: Sequence[Use], program: ElementwiseProgram, units: Node, reader: Node | None
) -> None:
    """Refuses projections beside which a contraction gives something else: the contraction would stay.

    Raises:
      Mismatch: they are a gate and what it is multiplied with, and a further product reads the hidden units.
      Unlike: they are not.
    """
    shares = 2 if products[0].ref.value == products[1].ref.value else 1
    for use in products:
        read = math.prod(space.sizes[atom] for atom in space.atoms(use.ref) - {atom for atom, _ in use.fixed})
        whole = math.prod(space.graph.shape(use.ref.value))
        if read * shares != whole:
            if read * shares > whole or (reader is None and not is_joined(space.graph, units)):
                raise Unlike("there is more in a product")
            roles(program, alone=True)
            raise Mismatch(_FURTHER[0], use.ref.value, advice=_FURTHER[1])


def _is_chosen(space: Space, use: Use) -> bool:
    """Returns whether a matrix is gathered by several numbers, as those of experts are; with one number, it is that of
    a loop's step, which vmap reads so."""
    at = space.canonical(use.ref)
    while space.graph.name(at.value) == "convert_element_type" and (operands := space.operands(at)):
        (at,) = operands
    node = space.graph.definitions.get(at.value)
    return node is not None and node.name == "gather" and math.prod(space.graph.shape(node.inputs[1])[:-1]) > 1


def _earlier(space: Space, ref: Ref, bodies: Sequence[Body]) -> Ref:
    """Returns a use before the changes of layout that need no copy: a kernel reads the array that the program has, as
    far back as the bodies have it."""
    last = ref
    chain = list(space.chain(ref))
    held = [space.graph.positions[body] for body in bodies]
    known = [own for own in held if any(at.value in own for at in chain)]
    for at in chain:
        if known and all(at.value in own for own in known):
            last = at
        node = space.graph.definitions.get(at.value)
        if node is None or node.name not in _THROUGH:
            break
    return last


def _unified(
    space: Space, ours: Ref, theirs: Ref, summed: Sequence[Dimension], also: Sequence[Dimension]
) -> dict[Atom, Atom] | None:
    """Returns which labels that one contraction sums over are which of another's, if two uses of one value are the same
    then; None if they are not."""
    for _ in range(8):
        names: dict[Atom, Atom] = {}
        inner, others = (
            {atom for _, own in dimensions for atom in space.resolve(own)} for dimensions in (summed, also)
        )
        pairs = list(zip(space.view(ours.view), space.view(theirs.view), strict=True))
        if any(a[0] != b[0] for a, b in pairs):
            return None
        cut = False
        for (_, own), (_, other) in pairs:
            for a, b in zip(own, other, strict=False):
                if a == b:
                    continue
                if a not in inner or b not in others:
                    return None
                n, m = space.sizes[a], space.sizes[b]
                if n != m:
                    large, small = (a, m) if n > m else (b, n)
                    if space.cut((large,), (small, max(n, m) // small)) is None:
                        return None
                    cut = True
                    break
                names[b] = a
            if cut:
                break
            if len(own) != len(other):
                return None
        if not cut:
            return names
    return None


class _Place:
    """Which letters the labels of a site are."""

    def __init__(self, graph: Graph, space: Space, whole: Ref, projections: _Projections, down: Use | None):
        self.graph, self.space, self.whole, self.down = graph, space, whole, down
        self.projections = projections

    def letters(self, vectors: Sequence[Ref]) -> dict[str, list[Atom]]:
        """Returns the labels of each letter.

        Raises:
          Unlike: an operand varies along an axis that it must not vary along.
        """
        space, parts = self.space, self.projections
        result = [atom for _, own in space.view(self.whole.view) for atom in own]
        if any(offset for offset, _ in self.whole.view) or len(set(result)) != len(result):
            raise Unlike("the result is read in part")
        fixed = {atom for use in (parts.gate, parts.up) for atom, _ in use.fixed}
        x, gate, up = (self._own(use) - fixed for use in (parts.x, parts.gate, parts.up))
        features = set(space.resolve(parts.features))
        down = set() if self.down is None else self._own(self.down)
        columns = down - gate - up - x
        if not features <= x & gate & up or features & set(result):
            raise Unlike("the sums differ")
        of_weights = gate - features
        hidden = (of_weights & down - set(result)) if self.down is not None else of_weights - x
        batch = (of_weights | (up - features) | down) - hidden - columns
        rows = (x - features) - batch
        order = [
            atom for own in (parts.gate.ref, parts.up.ref) for _, atoms in own.view for atom in space.resolve(atoms)
        ]
        every = [*result, *dict.fromkeys(order)]
        if not hidden or not hidden <= up or hidden & x or down & rows or columns & features:
            raise Unlike("the hidden units vary along other axes")
        expected = batch | rows | (columns if self.down is not None else hidden)
        if set(result) != expected or not (gate | up) <= batch | features | hidden or not x <= batch | rows | features:
            raise Unlike("the result varies along other axes")
        if self.down is not None and not down <= batch | hidden | columns:
            raise Unlike("the last product varies along other axes")
        if any(space.atoms(ref) - fixed - batch - hidden for ref in vectors):
            raise Unlike("a vector varies along the rows")
        in_order = list(dict.fromkeys(every))
        own = [atom for atom in in_order if atom in hidden]
        return {
            "B": [atom for atom in result if atom in batch],
            "M": [atom for atom in result if atom in rows],
            "K": list(space.resolve(parts.features)),
            "H": own,
            "N": own if self.down is None else [atom for atom in result if atom in columns],
        }

    def _own(self, use: Use) -> set[Atom]:
        atoms = [atom for _, own in use.ref.view for atom in self.space.resolve(own)]
        if len(set(atoms)) != len(atoms):
            raise Unlike("a diagonal is read")
        return set(atoms)


def _exchanged(program: ElementwiseProgram) -> ElementwiseProgram:
    """Returns the program with the score and side input 0 in each other's place."""

    def other(i: object) -> object:
        if isinstance(i, Score):
            return Side(0, i.dtype)
        return Score(i.dtype) if isinstance(i, Side) and i.position == 0 else i

    return replace(program, inputs=tuple(map(other, program.inputs)))  # type: ignore[arg-type]


def _names(program: ElementwiseProgram, vectors: Sequence[Use]) -> list[str]:
    """Returns the names of the vectors: a bias is what is added to a product, before anything else."""
    names: dict[int, str] = {}
    count = len(program.inputs)
    score = next((n for n, i in enumerate(program.inputs) if isinstance(i, Score)), -1)
    other = next((n for n, i in enumerate(program.inputs) if isinstance(i, Side) and i.position == 0), -1)
    places = {n: i.position - 1 for n, i in enumerate(program.inputs) if isinstance(i, Side) and i.position}
    for instruction in program.instructions:
        if instruction.primitive.name != "add" or any(a >= count for a in instruction.arguments):
            continue
        for product, name in ((score, "gate_bias"), (other, "up_bias")):
            added = [places[a] for a in instruction.arguments if a in places]
            if product in instruction.arguments and added and name not in names.values():
                names.setdefault(added[0], name)
    free = [name for name in reversed(_VECTORS) if name not in names.values()]
    return [names[n] if n in names else free.pop(0) for n in range(len(vectors))]


def _renamed(program: ElementwiseProgram, names: Sequence[str]) -> ElementwiseProgram:
    """Returns the program with the vectors numbered by their names."""

    def numbered(i: object) -> object:
        if isinstance(i, Side) and i.position:
            return Side(1 + _VECTORS.index(names[i.position - 1]), i.dtype)
        return i

    return replace(program, inputs=tuple(map(numbered, program.inputs)))  # type: ignore[arg-type]
