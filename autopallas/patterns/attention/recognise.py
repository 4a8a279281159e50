"""Finds softmax attention in any spelling: ``out[.., t, d] = sum_S softmax_S(x[.., t, S]) v[S, d]``, x a program of q
k^T.

The anchors are the two contractions. A contraction over S, one side of which comes from an exponential of another
contraction, is pulled apart. :mod:`autopallas.patterns.softmax` proves the softmax, and
:mod:`autopallas.patterns.carry` carries the elementwise program from the scores to x over unchanged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass, replace
from typing import TypeAlias

from autopallas import jaxprs
from autopallas.faults import contained
from autopallas.graph import Graph, Node
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.graph.edit import surviving
from autopallas.graph.labels import is_product
from autopallas.graph.proof_cache import ProofCache
from autopallas.patterns.attention.attempt import CUSTOM_RULES, PASSING, Attempt, Settled, holds_softmax
from autopallas.patterns.attention.draft import AttentionDraft, Escape, Proved, escape_of, match_of
from autopallas.patterns.attention.equal_layers import TakenOver
from autopallas.patterns.attention.few_keys import few_keys
from autopallas.patterns.attention.mapped_softmax import mapped_softmaxes
from autopallas.patterns.attention.other_weights import other_weights
from autopallas.patterns.attention.resemblance import Normalised
from autopallas.patterns.backward import Lookup
from autopallas.patterns.examples import of_examples
from autopallas.patterns.forward import PerExample, in_backward
from autopallas.patterns.match import Match, Mismatch, NearMiss, bounded, describe_reason
from autopallas.patterns.settling import Search, settle
from autopallas.patterns.softmax_terms import InBlocks, NoNormaliser

_RANDOM = frozenset({"random_bits", "threefry2x32", "random_unwrap", "rng_bit_generator", "rng_uniform"})

_SHARED = "several softmaxes read its scores, which the program computes once"

_Place: TypeAlias = tuple[int, tuple[int, ...]]
"""The number of scores, and the axes of these along which keys run."""


def find(graph: Graph, assume_finite: bool = True) -> tuple[list[Match], list[NearMiss]]:
    """Finds every attention in a graph, and the near misses: one outcome for each product of queries and keys, or one
    for each axis of it along which a softmax runs, as where both sides attend to each other."""
    reach = _reach(graph)
    alive = surviving(graph)
    matches: dict[_Place, Match] = {}
    drafts: dict[_Place, AttentionDraft | TakenOver] = {}
    misses: dict[int, NearMiss] = {}
    settled: dict[int, dict[tuple[int, ...], int]] = {}
    normalisers: set[_Place] = set()
    sums: set[int] = set()

    def missed(score: int, node: Node, location: str, reason: str, advice: str) -> None:
        """Records a miss, unless the score has one; a contraction's miss replaces that of a sum, which may be the
        normaliser's."""
        if score not in misses or (score in sums and node.name != "reduce_sum"):
            misses[score] = NearMiss("attention", location, reason, score, advice)
            (sums.add if node.name == "reduce_sum" else sums.discard)(score)

    proofs = _Proofs(graph, reach, assume_finite)
    normalised = Normalised(graph, reach, _THROUGH, holds_softmax)
    for node in graph.nodes:
        if node.name not in ("dot_general", "reduce_sum"):
            continue
        for side in (0, 1):
            if not reach[node.inputs[side if node.name == "dot_general" else 0]][1]:
                continue
            with contained(node):
                outcome = proofs.at(node, side, settled if in_backward(node) else _without(settled, normalisers))
                proved, reason, operand, advice = outcome.proved, outcome.reason, outcome.operand, outcome.advice
                if proved is not None:
                    place = proved.score, proved.axes
                    try:
                        matches[place] = match_of(graph, proved, node, alive)
                    except Escape as escape:
                        if place not in drafts or place in normalisers:
                            drafts[place] = proofs.draft(outcome, node, side, _without(settled, normalisers))
                            (normalisers.discard if outcome.values else normalisers.add)(place)
                        missed(proved.score, node, jaxprs.location(node.equation), escape.reason, escape.advice)
                    except Mismatch as mismatch:
                        reason, operand, advice = mismatch.reason, mismatch.operand, mismatch.advice
                    if place in matches or place in drafts:
                        settled.setdefault(proved.score, {})[proved.axes] = proved.root
                if reason is not None and outcome.score is not None and not in_backward(node):
                    if proved is None and not _resembles(outcome, node, side, normalised):
                        continue
                    reason = describe_reason(graph, reason, operand)
                    missed(outcome.score, node, jaxprs.location(node.equation), reason, advice)
    waiting = {place: draft for place, draft in drafts.items() if place not in matches}
    with contained():
        _with_backward(graph, waiting, matches, misses)
    found = Counter(score for score, _ in matches)
    ordered = [
        replace(match, shared=_SHARED * (found[place[0]] > 1))
        for place, match in sorted(matches.items(), key=lambda item: item[0])
    ]
    missed_at = [miss for score, miss in misses.items() if score not in found and score in alive]
    with contained():
        missed_at += few_keys(graph, alive)
    with contained():
        missed_at += other_weights(graph, alive)
    with contained():
        missed_at += mapped_softmaxes(graph, alive)
    return ordered, missed_at


def _without(
    settled: dict[int, dict[tuple[int, ...], int]], places: Set[_Place]
) -> dict[int, dict[tuple[int, ...], int]]:
    """Returns what is settled but for the sums of weighted probabilities at some places, by which a program may go on
    to divide: the product with values, which comes later, is then the one that is wanted."""
    if not places:
        return settled
    left = {
        score: {axes: root for axes, root in sites.items() if (score, axes) not in places}
        for score, sites in settled.items()
    }
    return {score: sites for score, sites in left.items() if sites}


def _resembles(outcome: _Outcome, node: Node, side: int, normalised: Normalised) -> bool:
    """Returns whether what is no attention is nearly one: values have an axis that the scores lack, and a sum of
    exponentials normalises; or nothing but that sum is missing, which may stand after the second contraction."""
    if not outcome.values:
        return False
    return outcome.bare and node.name == "dot_general" or node.inputs[side if len(node.inputs) > 1 else 0] in normalised


def _with_backward(
    graph: Graph,
    drafts: dict[_Place, AttentionDraft | TakenOver],
    matches: dict[_Place, Match],
    misses: dict[int, NearMiss],
) -> None:
    """Settles the sites whose intermediate values are used elsewhere: by their own backward, or the site is a near
    miss."""
    searches: dict[_Place, Search] = {}
    for place, draft in drafts.items():
        with contained(draft.second):
            if (search := draft.search()) is not None:
                search.by_example = True
                searches[place] = search
    if not searches:
        return
    lookup = Lookup.of(graph)
    given = {number for match in matches.values() for number in match.results}
    derivatives = (number for node in graph.nodes if in_backward(node) for number in node.outputs)
    given_up = frozenset([*derivatives, *(search.root for search in searches.values())])
    first = True
    while searches:
        complete = settle(graph, lookup, list(searches.values()), given)
        further: dict[_Place, Search] = {}
        for place, search in searches.items():
            score, _ = place
            if search in complete:
                with contained(drafts[place].second):
                    try:
                        match = drafts[place].match_with(search)
                        if isinstance(search.forward, PerExample):
                            match = of_examples(match, search.forward, search.found)
                        matches[place] = match
                        given |= search.replaced()
                    except Mismatch as mismatch:
                        if first:
                            reason = describe_reason(graph, mismatch.reason, mismatch.operand)
                            misses[score] = replace(misses[score], reason=reason, advice=mismatch.advice)
                        if search.give_way():
                            further[place] = search
            elif first:
                rows = math.prod(graph.shape(score)) // drafts[place].proved.keys
                escape = _used_in_forward(graph, search, given_up, rows)
                if escape is not None:
                    misses[score] = replace(misses[score], reason=escape.reason, advice=escape.advice)
                elif search.found:
                    reason = f"only a part of its backward was recognised; {misses[score].reason}"
                    misses[score] = replace(misses[score], reason=reason)
        searches, first = further, False


def _used_in_forward(graph: Graph, search: Search, given: Set[int], rows: int) -> Escape | None:
    """Returns the escape of a value that the program needs for something else than the sites that were looked at and
    derivatives, whose values are ``given``; None where there is none."""
    alive = surviving(graph, given)
    own = search.forward.own
    for number in sorted((own - {search.root}) & alive):
        for user in graph.users[number]:
            if own.isdisjoint(user.outputs) and not alive.isdisjoint(user.outputs):
                nodes = (node for n in own if (node := graph.definitions.get(n)) is not None)
                return escape_of(graph, number, rows, user, nodes)
    return None


def _reach(graph: Graph) -> list[tuple[bool, bool]]:
    """Returns, per value, whether it comes from a contraction, and whether from an exponential of such a value.

    The way may lead through elementwise operations, layout and reductions. A contraction starts anew.
    """
    reach = [(False, False)] * len(graph.avals)
    for node in graph.nodes:
        name = node.name
        contraction = exponential = False
        if name == "dot_general" and not is_product(node):
            contraction = True
        elif name == "dot_general" or name in _THROUGH:
            for i in node.inputs:
                contraction |= reach[i][0]
                exponential |= reach[i][1]
            if contraction and not exponential:
                exponential = name in ("exp", "exp2", "pow") or holds_softmax(node)
        if name == "reduce_sum" and not contraction and _sums_product(graph, node):
            contraction, exponential = True, False
        if contraction or exponential:
            for output in node.outputs:
                reach[output] = contraction, exponential
    return reach


_THROUGH = ELEMENTWISE | PASSING | CUSTOM_RULES | {
    "concatenate", "stack", "slice", "split", "unstack", "expand_dims", "sharding_constraint", "reduce_sum",
    "reduce_max", "reduce_min",
    "reduce_precision", "pvary", "pcast", "reshard", "copy_p", "layout_constraint", "tile", "cumsum", "gather", "sort",
    "dynamic_slice", "argmax", "pure_callback",
}  # fmt: skip


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


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """Outcome of a try to read a contraction as the second one of an attention: a proof, or the reason why there is
    none.

    Attributes:
      score: the number of what looks like scores, if anything does.
      operand: the number of the value that a reason is about, if it is about one.
      draft: the proof itself, where it was not taken over from another place.
      advice: what to write instead of what a reason is about.
      model: where it was taken over, the proof and the values here that correspond to those there.
      values: whether what is multiplied with weights has an axis that these lack, as values have.
      bare: whether all that fails is that no sum over the keys was found, of scores of two batched operands or of
        blocks that are joined elsewhere.
    """

    score: int | None
    proved: Proved | None = None
    reason: str | None = None
    operand: int | None = None
    draft: AttentionDraft | None = None
    advice: str = ""
    model: tuple[AttentionDraft, Mapping[int, int]] | None = None
    values: bool = True
    bare: bool = False

    def at(self, image: Mapping[int, int]) -> _Outcome:
        """Returns the same outcome with corresponding values."""
        score = None if self.score is None else image[self.score]
        operand = None if self.operand is None else image.get(self.operand)
        proved = None if self.proved is None else self.proved.at(image)
        model = None if self.draft is None else (self.draft, image)
        return replace(self, score=score, proved=proved, operand=operand, draft=None, model=model)


class _Proofs:
    """Tries contractions, and remembers the outcomes for others of the same form."""

    def __init__(self, graph: Graph, reach: list[tuple[bool, bool]], assume_finite: bool):
        self.graph, self.reach, self.assume_finite = graph, reach, assume_finite
        self._known: ProofCache[tuple[_Outcome, Hashable]] = ProofCache(graph, reach)

    def at(self, node: Node, side: int, settled: Settled) -> _Outcome:
        def known(outcome: _Outcome) -> Hashable:
            if outcome.score not in settled:
                return False
            return True if in_backward(node) else object()  # what other sites give is not compared

        for (outcome, before), image in self._known.like(node, side):
            here = outcome.at(image)
            if known(here) == before:
                return here

        def proof(graph: Graph) -> tuple[_Outcome, Hashable]:
            outcome = self.anew(graph, node, side, settled)
            return outcome, known(outcome)

        outcome, _ = self._known.prove(node, side, proof)
        if outcome.draft is not None:
            outcome.draft.go_on(self.graph)
        return outcome

    def draft(self, outcome: _Outcome, node: Node, side: int, settled: Settled) -> AttentionDraft | TakenOver:
        """Returns the draft of a proved outcome, of which the site and its backward are made."""
        if outcome.draft is not None:
            return outcome.draft
        before = {score: dict(sites) for score, sites in settled.items()}

        def anew() -> AttentionDraft:
            draft = self.anew(self.graph, node, side, before).draft
            assert draft is not None
            return draft

        if outcome.model is None or outcome.proved is None or type(outcome.model[0]) is not AttentionDraft:
            return anew()
        return TakenOver(self.graph, *outcome.model, node, outcome.proved, anew)

    def anew(self, graph: Graph, node: Node, side: int, settled: Settled) -> _Outcome:
        """Returns the outcome of a try that takes nothing over from other places."""
        attempt = Attempt(graph, self.reach, self.assume_finite, settled)
        try:
            with bounded(graph):
                draft = attempt.draft(node, side)
        except Mismatch as mismatch:
            return _Outcome(
                attempt.scope.score,
                reason=mismatch.reason,
                operand=mismatch.operand,
                advice=mismatch.advice,
                values=attempt.has_values,
                bare=isinstance(mismatch, InBlocks)
                or (isinstance(mismatch, NoNormaliser) and attempt.is_batched_alike and attempt.is_plain),
            )
        proved = None if draft is None else draft.proved
        return _Outcome(attempt.scope.score, proved, draft=draft, values=attempt.has_values)
