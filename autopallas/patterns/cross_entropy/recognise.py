"""Finds logits and what a loss computes from them: ``x w``, an elementwise program, reductions over the vocabulary, and
under a gradient the two products of ``dlogits``.

The anchor is a contraction whose result flows, through elementwise operations and layout alone, into an exponential
that is summed over the axis of one operand. Everything that the logits flow into has to end in a reduction that a
kernel can take (:mod:`autopallas.patterns.cross_entropy.row_statistics`) or in a product with x or w. Then neither the
logits nor anything of their size is needed any more. The program may do anything with numbers per row.

The backward is recognised in the same way: ``dlogits`` is an elementwise program of the logits and of numbers per row,
and ends in products. So it is found whether automatic differentiation or a user's rule made it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace

import jax.numpy as jnp

from autopallas import jaxprs
from autopallas.compat import Literal
from autopallas.faults import contained
from autopallas.graph import Graph, Node, Space
from autopallas.graph.custom_rules import ELEMENTWISE, is_elementwise_call
from autopallas.graph.edit import surviving
from autopallas.graph.keys import enters_mesh
from autopallas.graph.labels import is_product
from autopallas.graph.loop_slices import is_zero
from autopallas.graph.selected_rows import PROMISED
from autopallas.patterns.advice import (
    ASSUME_FINITE,
    COLUMNS,
    GRADIENTS_OF_EXAMPLES,
    IN_SHARD_MAP,
    JOINED,
    LOGITS_APART,
    LOGITS_AS_A_PRODUCT,
    LOGITS_OF_DISTANCES,
    LOGITS_RETURNED,
    MATRIX,
    OF_PIXELS,
    OWN_LOGITS,
    ROWS_BEFORE,
    WHOLE_ROWS,
)
from autopallas.patterns.cross_entropy.flows import Flows
from autopallas.patterns.cross_entropy.intent import origin, takes_logarithm
from autopallas.patterns.cross_entropy.labelled_logits import JOINS
from autopallas.patterns.cross_entropy.passes import passes
from autopallas.patterns.cross_entropy.region import Region
from autopallas.patterns.cross_entropy.sigmoid_losses import sigmoid_losses
from autopallas.patterns.match import Match, Mismatch, NearMiss, bounded, describe_reason, refuse_quantised
from autopallas.patterns.site_order import circle

__all__ = ["find"]

_LAYOUT = frozenset(
    "transpose reshape broadcast_in_dim squeeze expand_dims slice concatenate split stack unstack tile copy copy_p "
    "name sharding_constraint optimization_barrier pvary pcast layout_constraint reshard".split()
)

_CUTS = frozenset({"slice", "split", "unstack"})
_REARRANGES = frozenset({"dynamic_slice", "dynamic_update_slice", "gather", "pad", "rev", "sort"})
"""Primitives that pick rows of an array, or put them in another order or place."""
_OVERWRITES = frozenset({"scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"})
"""Primitives that change some elements, such as the logit of a token that is never predicted."""
_FURTHEST = 8
"""Most equations that only restate a value through which the value is followed."""
_MOST_HEADS = 4
"""Most products whose results are read together as logits: each is computed tile by tile, and a tile of each is
held."""
_MOST_INSIDE = 2048
"""Most values into which logits flow elementwise: those of a loss are some hundreds at most, but the gates of a
recurrence, whose steps are written one after the other, flow into all that follow."""
_READINGS = 4
"""Times that a value may be followed, on average, from products whose results enter no exponential."""


def find(graph: Graph, assume_finite: bool = True) -> tuple[list[Match], list[NearMiss]]:
    """Finds every cross-entropy in a graph, and the near misses: one outcome for each product that gives logits."""
    matches: list[Match] = []
    misses: list[NearMiss] = []
    exponents = _exponents(graph)
    alive = surviving(graph)
    needed = surviving(graph, graph.replaced)  # scores that only attention's sites read are no logits
    scatters = _Scatters(graph, alive)
    flows = Flows(graph)
    every: list[_Candidate] = []
    others: list[Node] = []
    for node in graph.nodes:
        if node.name != "dot_general" or node.outputs[0] not in needed:
            continue
        with contained(node):
            if not _may_give_logits(graph, node):
                continue
            if node.outputs[0] not in exponents:
                others.append(node)
                continue
            inside, ends = _flow(graph, [node.outputs[0]], alive, _MOST_INSIDE)
            if len(inside) <= _MOST_INSIDE and any(graph.name(number) in ("exp", "exp2") for number in inside):
                every.append(_Candidate(node, inside, ends))
    candidates = [one for one in every if not _weighs_something_else(graph, [one.dot], one.inside, one.ends.values())]
    joint = _joint(graph, [*every, *_beside(graph, others, every, alive)])
    scatters.join([*joint, *_lone(candidates, joint)])
    scatters.join(candidates)
    regions: list[Region] = []
    for candidate in (*joint, *candidates):
        with contained(candidate.dot):
            region = _region(graph, candidate, flows)
            if region is not None:
                regions.append(region)
    matched: list[Region] = []
    taken: set[int] = set()
    given: set[int] = set()
    together: dict[int, Mismatch] = {}
    """Reasons why some logits are no site together with others."""
    for region in regions:
        node = region.dot
        with contained(node):
            if region.logits in taken or region.intent.attends:
                continue
            try:
                with bounded(graph):
                    matches.append(_match(graph, region, assume_finite, given))
                matched.append(region)
                taken |= region.inside
                given.update(matches[-1].replaced)
            except Mismatch as mismatch:
                if region.others:
                    if region.understood:
                        together |= dict.fromkeys(region.every, mismatch)
                elif region.intent.labelled:
                    mismatch = together.get(node.outputs[0], mismatch)
                    where = jaxprs.location(node.equation)
                    misses.append(NearMiss("cross_entropy", where, mismatch.reason, node.outputs[0], mismatch.advice))
    _part(graph, matches, matched, assume_finite)
    with contained():
        apart = [one for one in candidates if not any(one.dot.outputs[0] in region.every for region in regions)]
        misses += [
            *_rearranged(graph, exponents, alive),
            *_in_parts(graph, apart),
            *_of_devices(graph, exponents, alive),
            *_of_pixels(graph, exponents, alive),
            *_of_distances(graph, exponents, alive),
        ]
    with contained():
        of_sigmoids = [miss for miss in sigmoid_losses(graph, needed) if miss.value not in given]
        misses = [*(m for m in misses if all(m.value != miss.value for miss in of_sigmoids)), *of_sigmoids]
    return matches, misses


def _part(graph: Graph, matches: list[Match], regions: Sequence[Region], assume_finite: bool) -> None:
    """Splits sites that wait for each other into several passes: each gives its statistics before it reads the other's,
    as where the labels of two heads are compared."""
    left = set(range(len(matches)))
    while len(left) > 1 and (around := circle(graph, matches)):
        position = next((i for i in sorted(left) if matches[i] in around and not matches[i].then), None)
        if position is None:
            return
        left.remove(position)
        before = {number for match in matches[:position] for number in match.replaced}
        others = frozenset(number for match in around if match is not matches[position] for number in match.replaced)
        with contained(regions[position].dot), suppress(Mismatch), bounded(graph):
            matches[position] = _match(graph, regions[position], assume_finite, before, others)


def _rearranged(graph: Graph, exponents: Set[int], alive: Set[int]) -> Iterator[NearMiss]:
    """Yields a near miss for logits whose rows are rearranged before the loss, in a way that does not move before the
    product, or of which elements are overwritten."""
    left = _READINGS * len(graph.avals)
    for node in graph.nodes:
        overwrites = node.name in _OVERWRITES
        if not (overwrites or node.name in _REARRANGES) or node.outputs[0] not in exponents or left < 0:
            continue
        dot = _product_behind(graph, node.inputs[0])
        if dot is None or not _may_give_logits(graph, dot):
            continue
        inside, ends = _flow(graph, node.outputs, alive)
        left -= len(inside)
        if any(graph.name(number) in ("exp", "exp2") for number in inside) and any(map(_picks, ends.values())):
            reason = f"the loss reads the logits after {node.name} at {jaxprs.location(node.equation)}"
            advice = COLUMNS if overwrites else ROWS_BEFORE
            yield NearMiss("cross_entropy", jaxprs.location(dot.equation), reason, dot.outputs[0], advice)


def _in_parts(graph: Graph, candidates: Sequence[_Candidate]) -> Iterator[NearMiss]:
    """Yields a near miss for logits that are put together from parts before the loss, at the largest part, or that are
    parts of one product, reshaped before they are cut out of it."""
    said: set[int] = set()
    for candidate in sorted(candidates, key=lambda one: -math.prod(graph.shape(one.dot.outputs[0]))):
        joined = next((n for number in candidate.inside if (n := _made_by(graph, number, JOINS)) is not None), None)
        cut = next((n for number in candidate.inside if (n := _made_by(graph, number, _CUTS)) is not None), None)
        ends = candidate.ends.values()
        found = joined or cut
        if found is None or found.outputs[0] in said:
            continue
        sums = any(takes_logarithm(graph, end) for end in ends)
        if not sums and not any(map(_picks, ends)):
            continue
        said.add(found.outputs[0])
        where = jaxprs.location(candidate.dot.equation)
        if joined is None:
            reason = f"the loss reads a part of one product, after {found.name} at {jaxprs.location(found.equation)}"
            yield NearMiss("cross_entropy", where, reason, candidate.dot.outputs[0], WHOLE_ROWS)
            continue
        reason = f"the loss reads logits that {joined.name} puts together at {jaxprs.location(joined.equation)}"
        as_rows = joined.name == "stack" and joined.params["axis"] < len(graph.shape(joined.outputs[0])) - 1
        advice = OWN_LOGITS if as_rows else JOINED if sums else ROWS_BEFORE
        yield NearMiss("cross_entropy", where, reason, candidate.dot.outputs[0], advice)


def _of_devices(graph: Graph, exponents: Set[int], alive: Set[int]) -> Iterator[NearMiss]:
    """Yields a near miss for logits that each device computes in a ``shard_map``, and that a loss outside reads."""
    left = _READINGS * len(graph.avals)
    for node in graph.nodes:
        if node.name != "shard_map" or exponents.isdisjoint(node.outputs):
            continue
        for number, inner in zip(node.outputs, _left_on_devices(graph, node), strict=False):
            dot = None if number not in exponents or left < 0 else _product_behind(graph, inner)
            if dot is None or not _may_give_logits(graph, dot):
                continue
            inside, ends = _flow(graph, [number], alive)
            left -= len(inside)
            found = any(_picks(end) or takes_logarithm(graph, end) for end in ends.values())
            if found and any(graph.name(n) in ("exp", "exp2") for n in inside):
                where = jaxprs.location(node.equation)
                reason = f"the loss is outside of the shard_map that computes its logits, at {where}"
                yield NearMiss("cross_entropy", jaxprs.location(dot.equation), reason, dot.outputs[0], IN_SHARD_MAP)


def _of_pixels(graph: Graph, exponents: Set[int], alive: Set[int]) -> Iterator[NearMiss]:
    """Yields a near miss for logits that a convolution of one pixel gives: it is a product, but for its spelling."""
    left = _READINGS * len(graph.avals)
    for node in graph.nodes:
        if node.name != "conv_general_dilated" or node.outputs[0] not in exponents or left < 0:
            continue
        kernel, given = graph.shape(node.inputs[1]), node.params
        plain = given["feature_group_count"] == 1 and {*given["window_strides"]} == {1}
        if not plain or any(kernel[d] != 1 for d in given["dimension_numbers"].rhs_spec[2:]):
            continue
        inside, ends = _flow(graph, node.outputs, alive)
        left -= len(inside)
        if _is_of_a_loss(graph, inside, ends):
            where = jaxprs.location(node.equation)
            yield NearMiss("cross_entropy", where, "a convolution gives the logits", node.outputs[0], OF_PIXELS)


def _is_of_a_loss(graph: Graph, inside: Set[int], ends: Mapping[int, Node]) -> bool:
    """Returns whether what flows from logits is exponentiated, and ends in a label's pick or a logarithm."""
    found = any(_picks(end) or takes_logarithm(graph, end) for end in ends.values())
    return found and any(graph.name(n) in ("exp", "exp2") for n in inside)


def _of_distances(graph: Graph, exponents: Set[int], alive: Set[int]) -> Iterator[NearMiss]:
    """Yields a near miss for logits that are sums of squared differences, as of embeddings and prototypes, or of
    products that are written by broadcasting, as cosines of all pairs are."""
    left = _READINGS * len(graph.avals)
    for node in graph.nodes:
        if node.name != "reduce_sum" or node.outputs[0] not in exponents or node.outputs[0] not in alive or left < 0:
            continue
        distances = _adds_up_squared_differences(graph, node)
        if not distances and not _adds_up_broadcast_products(graph, node):
            continue
        inside, ends = _flow(graph, node.outputs, alive)
        left -= len(inside)
        if _is_of_a_loss(graph, inside, ends):
            where = jaxprs.location(node.equation)
            reason = "the logits are sums of squared differences, and no product"
            if not distances:
                reason = "the logits are a product that is written by broadcasting"
            advice = LOGITS_OF_DISTANCES if distances else LOGITS_AS_A_PRODUCT
            yield NearMiss("cross_entropy", where, reason, node.outputs[0], advice)


def _adds_up_squared_differences(graph: Graph, node: Node) -> bool:
    """Returns whether a sum is that of squares of differences, of something along rows and something along columns."""
    if not _is_square(graph, graph.definitions.get(origin(graph, node.inputs[0]))):
        return False
    space = Space(graph, through=True)
    total = space.full(node.outputs[0])
    at = space.canonical(space.reduced(total)[0])
    while graph.name(at.value) == "convert_element_type":
        at = space.canonical((space.operands(at) or [at])[0])
    if not _is_square(graph, graph.definitions.get(at.value)):
        return False
    difference = space.canonical((space.operands(at) or [at])[0])
    terms = space.operands(difference) if graph.name(difference.value) == "sub" else None
    if not terms:
        return False
    first, second = (space.atoms(term) & space.atoms(total) for term in terms)
    return bool(first - second and second - first)


def _adds_up_broadcast_products(graph: Graph, node: Node) -> bool:
    """Returns whether a sum is that of products of something along rows and something along columns."""
    space = Space(graph)
    total = space.full(node.outputs[0])
    contraction = space.contraction(total)
    if contraction is None:
        return False
    first, second = (space.atoms(space.canonical(factor)) & space.atoms(total) for factor in contraction[:2])
    return bool(first - second and second - first)


def _is_square(graph: Graph, node: Node | None) -> bool:
    if node is None or node.name == "square":
        return node is not None
    if node.name == "integer_pow":
        return bool(node.params["y"] == 2)
    return node.name == "mul" and len(set(node.inputs)) == 1


def _left_on_devices(graph: Graph, node: Node) -> list[int]:
    """Returns what each device computes of the results of a ``shard_map``."""
    position = next((i for i, equation in enumerate(node.body.equations) if equation is node.equation), None)
    held = [] if position is None else node.body.children.get(position, [])
    if not held:
        return []
    body = held[0].body
    return [-1 if isinstance(a, Literal) else graph.numbers[body][a] for a in body.outvars]


def _made_by(graph: Graph, number: int, names: Set[str]) -> Node | None:
    node = graph.definitions.get(number)
    return node if node is not None and node.name in names else None


def _product_behind(graph: Graph, number: int) -> Node | None:
    """Returns the ``dot_general`` from which a value is computed by elementwise operations and layout."""
    todo, seen = [number], set[int]()
    while todo and len(seen) < _FURTHEST:
        number = todo.pop()
        node = graph.definitions.get(number)
        if number in seen or node is None:
            continue
        if node.name == "dot_general":
            return node
        seen.add(number)
        if _flows(node) and node.inputs:
            sizes = [math.prod(graph.shape(n)) for n in node.inputs]
            todo += [n for n, size in zip(node.inputs, sizes, strict=True) if size == max(sizes)]
    return None


def _picks(node: Node) -> bool:
    """Returns whether a node gathers one element of each row, as labels are picked."""
    return node.name == "gather" and math.prod(node.params["slice_sizes"]) == 1


def _region(graph: Graph, candidate: _Candidate, flows: Flows) -> Region | None:
    """Returns the values around some logits; None where no sum of their exponentials tells the vocabulary."""
    ends = sorted(candidate.ends.values(), key=lambda n: n.outputs or (-1,))
    every = [(candidate.dot, candidate.own), *candidate.others]
    for position, (dot, own) in enumerate(every):
        others = every[:position] + every[position + 1 :]
        region = Region(
            graph, dot, candidate.inside, ends, flows, shared=candidate.shared, others=others, own=frozenset(own)
        )
        if region.anchored:
            return region
    return None


def _beside(graph: Graph, nodes: Sequence[Node], candidates: Sequence[_Candidate], alive: Set[int]) -> list[_Candidate]:
    """Returns products that give no exponents but may be read together with logits, since they have as many elements.

    Returns none where following them all would take longer than reading the program a few times.
    """
    sizes = {math.prod(graph.shape(candidate.dot.outputs[0])) for candidate in candidates}
    shapes = {graph.shape(number) for candidate in candidates for number in candidate.inside}
    found: list[_Candidate] = []
    left = _READINGS * len(graph.avals)
    for node in nodes:
        if math.prod(graph.shape(node.outputs[0])) in sizes and graph.shape(node.outputs[0]) in shapes:
            found.append(_Candidate(node, *_flow(graph, [node.outputs[0]], alive), plain=True))
            left -= len(found[-1].inside)
            if left < 0:
                return []
    return found


def _lone(candidates: Sequence[_Candidate], joint: Sequence[_Candidate]) -> list[_Candidate]:
    """Copies the candidates that are in none of the joint ones."""
    taken = {number for one in joint for number in (*one.dot.outputs, *(n for d, _ in one.others for n in d.outputs))}
    left = (one for one in candidates if one.dot.outputs[0] not in taken)
    return [replace(one, inside=one.inside.copy(), ends=one.ends.copy(), shared=set()) for one in left]


def _joint(graph: Graph, candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Joins candidates whose logits are read together, as those of two heads whose probabilities a divergence
    compares."""
    group = list(range(len(candidates)))

    def root(number: int) -> int:
        while group[number] != number:
            group[number] = number = group[group[number]]
        return number

    first: dict[Hashable, int] = {}
    for number, candidate in enumerate(candidates):
        for read in (*candidate.inside, *(("end", key) for key, end in candidate.ends.items() if _adds_up(end))):
            group[root(number)] = root(first.setdefault(read, number))
    members: dict[int, list[_Candidate]] = {}
    for number, candidate in enumerate(candidates):
        members.setdefault(root(number), []).append(candidate)
    found: list[_Candidate] = []
    for several in members.values():
        sizes = {math.prod(graph.shape(candidate.dot.outputs[0])) for candidate in several}
        if not 1 < len(several) <= _MOST_HEADS or len(sizes) > 1 or all(one.plain for one in several):
            continue
        inside = set().union(*(one.inside for one in several))
        ends = {key: end for one in several for key, end in one.ends.items()}
        if _weighs_something_else(graph, [one.dot for one in several], inside, ends.values()):
            continue
        first_one, *others = several
        own = [(one.dot, one.inside.copy()) for one in others]
        found.append(_Candidate(first_one.dot, inside, ends, own=first_one.inside.copy(), others=own))
    return found


def _adds_up(end: Node) -> bool:
    """Returns whether an end is a contraction one of whose operands has only axes that both operands have."""
    if end.name != "dot_general":
        return False
    contracting, batch = end.params["dimension_numbers"]
    return any(len(end.equation.invars[s].aval.shape) == len((*contracting[s], *batch[s])) for s in (0, 1))


def _may_give_logits(graph: Graph, node: Node) -> bool:
    """Returns whether a ``dot_general`` contracts and gives floating-point numbers."""
    return not is_product(node) and bool(jnp.issubdtype(graph.dtype(node.outputs[0]), jnp.floating))


def _weighs_something_else(graph: Graph, nodes: Sequence[Node], inside: Set[int], ends: Iterable[Node]) -> bool:
    """Returns whether what flows from products with batch axes is multiplied by something that these products do not
    read, as the probabilities of an attention are multiplied by the values."""
    if not any(node.params["dimension_numbers"][1][0] for node in nodes):
        return False
    own = {origin(graph, number) for node in nodes for number in node.inputs}
    for end in ends:
        if end.name == "dot_general" and not is_product(end):
            contracting, batch = end.params["dimension_numbers"]
            for side, number in enumerate(end.inputs):
                free = len(graph.shape(number)) > len(contracting[side]) + len(batch[side])
                if number not in inside and free and origin(graph, number) not in own:
                    return True
    return False


def _exponents(graph: Graph) -> set[int]:
    """Returns the values that flow into an exponential elementwise."""
    found: set[int] = set()
    for node in reversed(graph.nodes):
        if node.name in ("exp", "exp2") or (not found.isdisjoint(node.outputs) and _flows(node)):
            for number in node.inputs:
                found.add(number)
                if number in graph.inner:  # the result of a custom rule's call is that of its body
                    found.add(graph.inner[number])
    return found


def _flows(node: Node) -> bool:
    through = node.name in ELEMENTWISE or node.name in _LAYOUT or is_product(node) or is_elementwise_call(node.equation)
    return through and not node.equation.effects and not enters_mesh(node.equation)


def _flow(
    graph: Graph, seeds: Iterable[int], alive: Set[int], most: float = math.inf
) -> tuple[set[int], dict[int, Node]]:
    """Returns the values into which the ``seeds`` flow elementwise, and the other computations that read these values;
    not all of them where the values are more than ``most``."""
    inside: set[int] = set()
    ends: dict[int, Node] = {}
    todo = list(seeds)
    while todo and len(inside) <= most:
        value = todo.pop()
        if value in inside:
            continue
        inside.add(value)
        todo += graph.outer.get(value, ())  # the result of a custom rule's body is that of its call
        for user in graph.users[value]:
            if not graph.inner.keys().isdisjoint(user.outputs):
                continue
            if alive.isdisjoint(user.outputs) and not user.equation.effects:
                continue
            if _flows(user):
                todo += user.outputs
            else:
                ends[id(user)] = user
    return inside, ends


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A product that may give logits, the values into which the logits flow, and the computations that read those."""

    dot: Node
    inside: set[int]
    ends: dict[int, Node]
    shared: set[int] = field(default_factory=set)
    """Values inside that other logits flow together with, too."""
    plain: bool = False
    """Whether no exponential is taken of the product."""
    own: set[int] = field(default_factory=set)
    """Values into which these logits flow; only filled where there are others."""
    others: list[tuple[Node, set[int]]] = field(default_factory=list)
    """Other products whose results are read together with these logits, each with the values into which they flow."""


class _Scatters:
    """Follows the scatters of a program once each; some of them are gradients of elements picked from logits."""

    def __init__(self, graph: Graph, alive: Set[int]):
        self._graph, self._alive = graph, alive
        self._by_shape: dict[tuple[int, ...], list[Node]] = {}
        self._flows: dict[int, tuple[set[int], dict[int, Node]]] = {}
        for node in graph.nodes:
            if node.name == "scatter-add" and node.outputs[0] in alive and _may_be_of_a_pick(graph, node):
                self._by_shape.setdefault(graph.shape(node.outputs[0]), []).append(node)

    def join(self, candidates: Sequence[_Candidate]) -> None:
        """Adds to each candidate the scatters that flow into the same values as its logits.

        Several logits flow together with one scatter if their labels and cotangents are the same. Each candidate is
        then given the values that belong to none of the others.
        """
        joined: dict[int, list[_Candidate]] = {}
        for candidate in candidates:
            for shape in sorted({self._graph.shape(number) for number in candidate.inside} & self._by_shape.keys()):
                for node in self._by_shape[shape]:
                    own, own_ends = self._flow(node.outputs[0])
                    if not own.isdisjoint(candidate.inside) or not own_ends.keys().isdisjoint(candidate.ends):
                        joined.setdefault(node.outputs[0], []).append(candidate)
        for number, sharing in joined.items():
            own, own_ends = self._flow(number)
            if len(sharing) == 1:
                sharing[0].inside.update(own)
                sharing[0].ends.update(own_ends)
                continue
            alone = [candidate.inside.copy() for candidate in sharing]
            for position, candidate in enumerate(sharing):
                values = own.difference(*alone[:position], *alone[position + 1 :])
                candidate.inside.update(values)
                candidate.shared.update(values)
                candidate.ends.update((k, end) for k, end in own_ends.items() if not values.isdisjoint(end.inputs))

    def _flow(self, value: int) -> tuple[set[int], dict[int, Node]]:
        if value not in self._flows:
            self._flows[value] = _flow(self._graph, [value], self._alive)
        return self._flows[value]


def _may_be_of_a_pick(graph: Graph, scatter: Node) -> bool:
    """Returns whether a scatter may be the gradient of one element of each row, or column: it begins with zeros, and
    adds as many elements.  Others, such as projected distributions and counts of words, are arrays like any other."""
    before, _, updates = scatter.inputs
    shape, added = graph.shape(before), math.prod(graph.shape(updates))
    if not is_zero(graph, before):
        return False
    axes = (math.prod(own) for n in range(1, len(shape) + 1) for own in itertools.combinations(shape, n))
    return any(added * size == math.prod(shape) for size in axes)


def _match(
    graph: Graph, region: Region, assume_finite: bool, before: Set[int], others: frozenset[int] = frozenset()
) -> Match:
    """Builds the site of some logits.

    Args:
      graph, region: the program, and the logits in it.
      assume_finite: whether it may be assumed that what is left out is finite.
      before: values that other sites give already.
      others: results of sites that read results of this one: what is computed from both is for a pass after the one
        that gives this site's results.

    Raises:
      Mismatch: there is no site.
    """
    region.parted, region.may_cancel = others, assume_finite
    (first, *then), left = _passes(graph, region, before)
    if returned := left & graph.returned:
        region.asked = frozenset(returned)
        (first, *then), left = _passes(graph, region, before)
    refuse_quantised(graph, first.operands)
    assumptions = tuple(region.algebra.assumptions)
    if assumptions and not assume_finite:
        raise Mismatch(f"it is not known that {assumptions[0]}, and assume_finite is off", advice=ASSUME_FINITE)
    nodes = (node for part in (first, *then) for node in part.equations)
    said = dict.fromkeys(node.body.assumed.get(variable) for node in nodes for variable in node.equation.outvars)
    assumptions += tuple(text for text in said if text and not (text is PROMISED and region.products))
    if left:
        outer = [n for n in left if _is_outer(graph, region, n)]
        if outer:
            where = jaxprs.location(graph.definitions[min(outer)].equation)
            contracting, batch = region.dot.params["dimension_numbers"]
            shapes = [graph.shape(number) for number in region.dot.inputs]
            if all(len(shape) > len((*c, *b)) for shape, c, b in zip(shapes, contracting, batch, strict=True)):
                raise Mismatch(
                    f"the gradient of each row is multiplied by activations, and not summed over rows, at {where}",
                    advice=GRADIENTS_OF_EXAMPLES,
                )
            raise Mismatch(f"a vector gives the logits, whose gradient is multiplied by it at {where}", advice=MATRIX)
        advice = LOGITS_APART if left.isdisjoint(graph.returned) else LOGITS_RETURNED
        raise Mismatch(_escape(graph, region, left), advice=advice)
    return Match(
        op=first.op,
        site=first.site,
        direction="forward+backward" if region.products else "forward",
        operands=first.operands,
        results=first.results,
        equations=first.equations,
        original=first.original,
        body=first.body,
        location=region.location,
        then=tuple(then),
        assumptions=assumptions,
    )


def _passes(graph: Graph, region: Region, before: Set[int]) -> tuple[list[Match], Set[int]]:
    """Returns the passes over some logits, and the values of their size that are needed all the same."""
    region.read()
    found = passes(region, before)
    given = {number for part in found for number in part.results}
    given |= {number for number in before if not region.scope.depends(number)}
    asked = region.inside - region.shared
    return found, asked & surviving(graph, given, least=min(asked, default=0))


def _is_outer(graph: Graph, region: Region, number: int) -> bool:
    """Returns whether a value is a product of more elements than the logits have, without a sum."""
    node = graph.definitions.get(number)
    size = math.prod(graph.shape(region.logits))
    return node is not None and is_product(node) and math.prod(graph.shape(number)) > size


def _escape(graph: Graph, region: Region, left: Set[int]) -> str:
    """Describes where values of the logits' size are still needed."""
    if returned := left & graph.returned:
        return describe_reason(graph, "the logits, or values of their size, are also returned", min(returned))
    ends = {id(t.node) for t in region.terminals}
    for number in sorted(left):
        for user in graph.users[number]:
            if id(user) not in ends and not set(user.outputs) & region.inside:
                return f"the logits are also used by {user.name} at {jaxprs.location(user.equation)}"
    return "the logits are needed elsewhere"
